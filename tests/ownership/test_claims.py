"""Claims: any resource, for one claim session of a group (rules F1 to F5)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.admission import ClaimVerdict as Verdict
from exclusivelog.admission import judge_claim
from testing.processes import PATIENCE, State, hang, until

pytestmark = pytest.mark.once


def own(state: State, group: str, resources: dict[str, int | None]) -> dict[str, int]:
    claim = state.engine.own(group, resources)
    state.kept.setdefault("claims", []).append(claim)
    return claim.generations


def still_valid(state: State) -> list[bool]:
    return [claim.is_valid for claim in state.kept["claims"]]


def use(state: State) -> dict[str, int]:
    generations: dict[str, int] = state.kept["claims"][-1].generations
    return generations


@pytest.mark.parametrize(
    ("last", "held", "wanted", "verdict", "generation"),
    [
        (0, False, None, Verdict.GRANT, 1),
        (0, False, 0, Verdict.GRANT, 0),
        (0, False, 9, Verdict.GRANT, 9),
        (4, False, None, Verdict.GRANT, 5),
        (4, False, 4, Verdict.GRANT, 4),
        (4, False, 3, Verdict.STALE, 3),
        (4, False, 0, Verdict.GRANT, 0),
        (4, True, 3, Verdict.HELD, 3),
        (4, True, 4, Verdict.REVOKE, 4),
        (4, True, 5, Verdict.REVOKE, 5),
        (4, True, None, Verdict.REVOKE, 5),
        (4, True, 0, Verdict.REVOKE, 0),
    ],
)
def test_f2_f3_f4_who_wins(last, held, wanted, verdict, generation) -> None:
    assert judge_claim(last, held, wanted) == (verdict, generation)


def test_f1_all_or_nothing(engine) -> None:
    """One of three resources is held with a higher generation: the other two are not taken,
    no claim is revoked, and no generation is used."""
    low = engine.own("g", {"a": 2})
    high = engine.own("g", {"b": 9})
    with pytest.raises(xl.OwnershipError, match="generation 9") as caught:
        engine.own("g", {"a": None, "b": 3, "c": None})
    for part in ("'b'", engine.id, str(os.getpid()), "since", "or None"):
        assert part in str(caught.value)
    assert caught.value.retriable
    assert low.is_valid
    assert high.is_valid
    assert engine.own("g", {"c": None}).generations == {"c": 1}


def test_f1_groups_never_conflict(engine) -> None:
    """Nor do names that read the same once group and resource are joined."""
    pairs = [("g", "x"), ("gx", "x"), ("g", "xx"), ("gx", "y"), ("g" * 240, "x" * 240)]
    claims = [engine.own(group, {resource: None}) for group, resource in pairs]
    assert all(claim.is_valid for claim in claims)


def test_f2_generations_go_on_without_an_owner(engine) -> None:
    engine.own("g", {"a": None}).release()
    engine.own("g", {"a": None}).release()
    assert engine.own("g", {"a": 2}).generations == {"a": 2}
    engine.own("g", {"a": 8}).release()
    with pytest.raises(xl.OwnershipError, match="generation 8") as caught:
        engine.own("g", {"a": 7})
    assert not caught.value.retriable
    assert engine.own("g", {"a": None}).generations == {"a": 9}


def test_f3_the_whole_claim_is_revoked(engine, path) -> None:
    first = engine.own("g", {"a": 1, "b": 5})
    with xl.open(path, name="rival") as rival:
        second = rival.own("g", {"a": 1})
        assert not first.is_valid
        assert second.is_valid
        third = rival.own("g", {"b": 5})  # it is free now: 5 is not below the last one
        assert second.is_valid
        assert third.generations == {"b": 5}


def test_f4_zero_always_wins_and_begins_anew(engine) -> None:
    high = engine.own("g", {"a": 1000})
    zero = engine.own("g", {"a": 0})
    assert not high.is_valid
    assert zero.generations == {"a": 0}
    assert engine.own("g", {"a": None}).generations == {"a": 1}


def test_f5_using_a_revoked_claim_raises(engine) -> None:
    first = engine.own("g", {"a": None, "b": None})
    second = engine.own("g", {"b": None})
    for use in (first.check, lambda: first.generations):
        with pytest.raises(xl.OwnershipLostError, match="revoked"):
            use()
    first.release()  # as closing a stale session, it has no effect on others (rule B3)
    assert second.is_valid
    assert second.generations == {"b": 2}
    with pytest.raises(xl.OwnershipLostError, match="released"), first:
        pytest.fail("the block has run")
    assert second.is_valid


def test_f5_a_released_claim_is_lost(engine) -> None:
    with engine.own("g", {"a": None}) as claim:
        assert claim.is_valid
    assert not claim.is_valid
    claim.release()
    with pytest.raises(xl.OwnershipLostError, match="released"):
        claim.check()


def test_f5_a_claim_ends_with_its_process(engine, worker) -> None:
    other = worker()
    assert other.call(own, "g", {"a": 50}) == {"a": 50}
    with pytest.raises(xl.OwnershipError):
        engine.own("g", {"a": 7})
    other.signal(signal.SIGKILL)
    until(lambda: len(engine.engines()) == 1)
    with pytest.raises(xl.OwnershipError, match="None for the next") as caught:
        engine.own("g", {"a": 7})  # it is free, but generation 7 is out of date
    assert not caught.value.retriable
    assert engine.own("g", {"a": None}).generations == {"a": 51}


def test_f5_a_claim_of_a_process_that_hangs_is_lost(engine, worker) -> None:
    other = worker(keepalive=0.3)
    other.call(own, "g", {"a": 50})
    hang(other)
    until(lambda: len(engine.engines()) == 1)
    mine = engine.own("g", {"a": 50})
    other.signal(signal.SIGCONT)
    assert other.call(still_valid) == [False]
    with pytest.raises(Exception, match="OwnershipLostError"):
        other.call(use)
    assert mine.is_valid


def test_f5_a_claim_ends_with_its_engine(engine, path) -> None:
    with xl.open(path, name="rival") as rival:
        claim = rival.own("g", {"a": 50})
    assert not claim.is_valid
    with pytest.raises(xl.EngineClosedError):
        claim.check()
    claim.release()
    assert engine.own("g", {"a": 50}).is_valid


def test_own_waits_for_an_owner_to_go(engine, worker) -> None:
    held = engine.own("g", {"a": 50})
    threading.Timer(0.2, held.release).start()
    with pytest.raises(xl.OwnershipError, match="is out of date"):
        engine.own("g", {"a": 49}, timeout=PATIENCE)  # it went, and left its generation
    other = worker()
    other.call(own, "g", {"a": 60})
    threading.Timer(0.2, other.signal, [signal.SIGKILL]).start()
    with pytest.raises(xl.OwnershipError, match="is out of date"):
        engine.own("g", {"a": 59}, timeout=PATIENCE)
    held = engine.own("g", {"a": 70})
    with pytest.raises(xl.OwnershipError, match="is held"):
        engine.own("g", {"a": 59}, timeout=0.1)
    assert held.is_valid


def claim_over_and_over(state: State, seconds: float, seed: int) -> list[tuple[str, int]]:
    """(resource, generation) of every claim that was granted: for so long, and 40 of them."""
    dice, granted, end = random.Random(seed), [], time.monotonic() + seconds
    while time.monotonic() < end or len(granted) < 40:
        names = dice.sample("abcd", dice.randint(1, 3))
        claim = state.engine.own("g", dict.fromkeys(names))
        granted += [(name, claim._session.generations[name]) for name in names]
        if dice.random() < 0.3:
            claim.release()
    return granted


@pytest.mark.long
def test_f2_no_generation_is_given_twice(worker) -> None:
    """Three processes claim overlapping resources as fast as they can."""
    others = [worker(name=f"w{n}") for n in range(3)]
    for seed, other in enumerate(others):
        other.start(claim_over_and_over, 1.0, seed)
    granted: list[Any] = [pair for other in others for pair in other.answer()]
    assert len(granted) > 100
    assert len(set(granted)) == len(granted)
    for name in "abcd":
        numbers = sorted(number for resource, number in granted if resource == name)
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(
    ("group", "resources", "error"),
    [
        ("", {"a": 1}, ValueError),
        ("g" * 241, {"a": 1}, ValueError),
        (7, {"a": 1}, TypeError),
        ("g", {}, TypeError),
        ("g", ["a"], TypeError),
        ("g", {"": 1}, ValueError),
        ("g", {"a": -1}, ValueError),
        ("g", {"a": 2**63}, ValueError),
        ("g", {"a": "1"}, TypeError),
        ("g", {"a": True}, TypeError),
        ("g", {"\ud800": 1}, ValueError),
        ("g", {7: 1}, TypeError),
    ],
)
def test_wrong_arguments_say_what_is_taken(engine, group, resources, error) -> None:
    with pytest.raises(error, match=r"takes|UTF-8"):
        engine.own(group, resources)


def test_a_readonly_engine_takes_no_claims(topic, worker) -> None:
    other = worker(readonly=True)
    with pytest.raises(Exception, match="readonly"):
        other.call(own, "g", {"a": 1})
