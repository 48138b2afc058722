"""Rules I1 and I2 by recorded histories: processes that share a map, and are killed and stopped.

Three processes call one map as they like. Some are killed in the midst of a call, others are
stopped for shorter or longer than their keepalive, and go on. Each notes every call before it
makes it, and its result afterwards. In the end a checker looks for an order of the calls in
which a single process would have got the same results (see linearizability.py).

The same checker must turn red where the promise is not kept: for reads that do not ask for the
latest, and for an update that is a read and then a write. Those are the controls.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proof.linearizability import UNKNOWN, Call, Failure, WholeMap, check, check_per_key
from proof.map_clients import KEYS, WRITERS, crew
from proof.maps import explanation, record, returned, torn
from testing.processes import until

SECONDS = 3.0  # of torment


# ---- the checker -------------------------------------------------------------------------


def calls(*rows: tuple[Any, ...]) -> list[Call]:
    """(process, name, value, result, begin, end) each, all of one key."""
    return [Call(process, name, "k", *rest) for process, name, *rest in rows]


GOOD = {
    "one after another": calls((0, "put", 1, None, 0, 1), (1, "get", None, 1, 2, 3)),
    "at once, old": calls((0, "put", 1, None, 0, 9), (1, "get", None, None, 2, 3)),
    "at once, new": calls((0, "put", 1, None, 0, 9), (1, "get", None, 1, 2, 3)),
    "of unknown outcome, seen": calls((0, "put", 1, UNKNOWN, 0, 9), (1, "get", None, 1, 2, 3)),
    "of unknown outcome, not": calls((0, "put", 1, UNKNOWN, 0, 1), (1, "get", None, None, 2, 3)),
    "only one replaces": calls(
        (0, "put", 1, None, 0, 1),
        (1, "replace", (1, 2), (True, 1), 2, 9),
        (2, "replace", (1, 3), (False, 2), 3, 8),
        (2, "get", None, 2, 10, 11),
    ),
}

BAD = {
    "stale": calls((0, "put", 1, None, 0, 1), (1, "get", None, None, 2, 3)),
    "back again": calls(
        (0, "put", 1, None, 0, 9), (1, "get", None, 1, 2, 3), (1, "get", None, None, 4, 5)
    ),
    "unknown, and back again": calls(
        (0, "put", 1, UNKNOWN, 0, 9), (1, "get", None, 1, 2, 3), (1, "get", None, None, 4, 5)
    ),
    "after its death": calls(
        (0, "put", 1, UNKNOWN, 0, 3), (1, "get", None, None, 4, 5), (1, "get", None, 1, 6, 7)
    ),
    "both replace": calls(
        (0, "put", 1, None, 0, 1),
        (1, "replace", (1, 2), (True, 1), 2, 9),
        (2, "replace", (1, 3), (True, 1), 3, 8),
    ),
    "both are first": calls(
        (0, "put_if_absent", 1, (True, None), 0, 9), (1, "put_if_absent", 2, (True, None), 1, 8)
    ),
    "the loser learns another value": calls(
        (0, "put_if_absent", 1, (True, None), 0, 9), (1, "put_if_absent", 2, (False, 3), 1, 8)
    ),
    "a lost update": calls(
        (0, "update", 1, (None, (1, None)), 0, 9), (1, "update", 2, (None, (2, None)), 1, 8)
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD.keys())
def test_the_checker_finds_an_order(history: list[Call]) -> None:
    assert check(history, WholeMap) is None
    assert check_per_key(history) is None


@pytest.mark.once
@pytest.mark.parametrize("history", BAD.values(), ids=BAD.keys())
def test_the_checker_says_where_there_is_none(history: list[Call]) -> None:
    failure = check_per_key(history)
    assert failure is not None
    assert failure.left > 0
    assert str(failure.candidates[0]) in str(failure)


def explained(history: list[Call]) -> bool:
    """The same by brute force: every order, and every choice of what has happened."""

    def in_order(order: tuple[Call, ...]) -> bool:
        state = WholeMap.first
        for call in order:
            state, result = WholeMap.apply(state, call)
            if call.known and result != call.result:
                return False
        return True

    def possible(order: tuple[Call, ...]) -> bool:
        return all(b.end >= a.begin for a, b in itertools.combinations(order, 2))

    known = [call for call in history if call.known]
    unknown = [call for call in history if not call.known]
    return any(
        possible(order) and in_order(order)
        for count in range(len(unknown) + 1)
        for some in itertools.combinations(unknown, count)
        for order in itertools.permutations([*known, *some])
    )


@pytest.mark.once
@pytest.mark.long
def test_the_checker_agrees_with_brute_force() -> None:
    """Two thousand random histories of up to five calls, about as many good as bad ones."""
    dice, verdicts = random.Random(9), []
    for _ in range(2000):
        history = []
        for process in range(dice.randrange(2, 6)):
            name = dice.choice(["put", "get", "get", "put_if_absent", "update", "delete"])
            begin = dice.randrange(8)
            before = dice.choice([None, None, None, 1, 2])
            result = {"update": (None, (1, None)), "put_if_absent": (before is None, before)}.get(
                name, before
            )
            if dice.random() < 0.2:
                result = UNKNOWN
            value = None if name in ("get", "delete") else dice.choice([1, 2])
            end = begin + dice.randrange(1, 6)
            history.append(Call(process, name, "k", value, result, begin, end))
        verdicts.append(check(history, WholeMap) is None)
        assert verdicts[-1] == explained(history), history
    assert 400 < sum(verdicts) < 1600


# ---- the promise -----------------------------------------------------------------------


def tormented(path: Path, style: str, **options: Any) -> list[Call]:
    """The history of a crew that was tormented for a while."""
    return record(path, style, SECONDS, random.Random(len(style)), **options).calls


@pytest.mark.long
@pytest.mark.parametrize(
    "durabilities", [("",), ("process", "power", "power")], ids=["as asked for", "mixed"]
)
def test_i2_what_many_processes_do_to_their_keys_is_linearizable(
    tmp_path: Path, durabilities: tuple[str, ...]
) -> None:
    history = tormented(tmp_path, "one key", durabilities=durabilities)
    assert len(history) > 300
    failure = check_per_key(history)
    assert failure is None, explanation(failure, history, tmp_path)


@pytest.mark.long
def test_i2_so_it_is_with_calls_that_concern_all_keys(tmp_path: Path) -> None:
    history = tormented(tmp_path, "whole map")
    assert len(history) > 300
    assert any(call.name == "update_all" and call.result == len(KEYS) for call in history)
    failure = check(history, WholeMap)
    assert failure is None, str(failure)


@pytest.mark.long
def test_i4_so_it_is_where_all_begin_with_a_snapshot_and_the_rest_is_trimmed(
    tmp_path: Path,
) -> None:
    history = tormented(tmp_path, "snapshots")
    assert len(history) > 300
    failure = check_per_key(history)
    assert failure is None, explanation(failure, history, tmp_path)


def found_out(where: Path, play: Callable[[Path], list[Call]]) -> Failure:
    """The failure of a history. Nearly each has one; on a busy machine, the processes of one may
    run after one another."""
    for attempt in range(10):
        path = where / str(attempt)
        path.mkdir()
        failure = check_per_key(play(path))
        if failure is not None:
            return failure
    raise AssertionError("no history shows it")


@pytest.mark.long
def test_i2_the_control_an_update_of_two_calls_is_not(tmp_path: Path) -> None:
    def play(path: Path) -> list[Call]:
        with crew(path, "two calls") as hands:
            time.sleep(1.5)
            until(lambda: returned(path) > 200)
            hands.finish()
            return hands.history()

    found_out(tmp_path, play)


@pytest.mark.long
def test_i2_the_control_reads_without_latest_are_not(tmp_path: Path) -> None:
    """The writer acknowledges before the flush; the others see what is flushed."""

    def play(path: Path) -> list[Call]:
        with crew(path, "one key", 1, durabilities=("power", "process")) as hands:
            hands.start(style="reads only")
            hands.await_all()
            time.sleep(1.5)
            until(lambda: returned(path) > 200)
            hands.finish()
            return hands.history()

    failure = found_out(tmp_path, play)
    assert {call.name for call in failure.candidates} >= {"get"}


# ---- all keys or none --------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "one by one"])
def test_i1_death_inside_a_write_of_many_keys_leaves_all_or_none(
    tmp_path: Path, writer: str, sweep: Callable[[int, int], int]
) -> None:
    assert sum(torn(tmp_path, writer, sweep(25, 50))) == 0


@pytest.mark.long
def test_i1_the_control_keys_put_one_by_one_are_torn(tmp_path: Path) -> None:
    assert any(torn(tmp_path, "one by one", 50))
