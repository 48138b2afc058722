"""A role is held as a whole, by one process, or by none (rules B, C, D, E and F for roles).

A holder owns two topics, reads for a group and has a claim, and requires its role in transactions.
It is fenced, stopped, killed, forked and asked to hand over, at every step; its topics, groups and
claims are taken from it one by one; it waits with others, for others, and for half of what others
have. At no moment has one engine a part of a role that another has a part of, and nothing that a
former holder tries gets into the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog._core import strings
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.records import Rows
from exclusivelog.local.shm.slots import Slots
from exclusivelog.messages import Columns
from exclusivelog.once import Run, append_once
from testing.handovers import (
    KEEPALIVE,
    KILLED,
    POINTS,
    HeldUp,
    Quick,
    at_once,
    begin,
    end_reservations,
    fall_at,
    freeze,
    quick_workers,
    quiet_wake_ups,
    steps,
    thaw,
)
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    collect,
    forked,
    until,
    values,
    within,
)
from tests.ownership.roles import (
    AUDIT,
    BINDS,
    COMMON,
    DONE,
    GROUP,
    READ,
    ROLE,
    TOPICS,
    Auditor,
    act,
    acts,
    check_whole,
    close,
    crowd,
    hand_over,
    hold,
    judge_logs,
    outcome,
    queue,
    role_state,
    send_to,
    take,
    traces,
    wander,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

FENCED = xl.ProducerFencedError
REFUSALS = (FENCED, xl.ProducerBusyError, xl.OwnershipError, xl.ReaderFencedError)


@pytest.fixture(autouse=True)
def _orders(request: pytest.FixtureRequest) -> None:
    """There is always something to read."""
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        with engine.topic(READ).producer() as producer:
            producer.send_many([b"%d" % n for n in range(100)])


def role(engine: xl.Engine, mode: str = WAIT, **options: Any) -> xl.Role:
    """Ask for the role, and wait for it no longer than a test may."""
    return engine.role(ROLE, access_mode=mode, **{**BINDS, "timeout": PATIENCE, **options})


def lost(holder: xl.Role, reader: xl.Reader) -> bool:
    """Nothing that only a holder may do succeeds any more."""
    outcomes = {name: outcome(each) for name, each in acts(holder, reader, "late").items()}
    assert "done" not in outcomes.values(), outcomes
    assert holder.state in ("fenced", "moved")
    with pytest.raises(xl.OwnershipLostError):
        holder.producer(TOPICS[0])
    return True


def own_epochs(engine: xl.Engine) -> list[int]:
    """The epochs of the role, and of its topics."""
    [info] = engine.roles()
    return [info.epoch, *(engine.topic(name).epoch for name in TOPICS)]


# ---- what they cost ----------------------------------------------------------------------


class Searching:
    """A cursor of LMDB that notes each search for requests for roles."""

    def __init__(self, cursor: Any, found: list[bytes]) -> None:
        self._cursor, self._found = cursor, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def __iter__(self) -> Any:
        return iter(self._cursor)

    def set_range(self, key: bytes) -> Any:
        if key.startswith(role_rows.PART):
            self._found.append(key)
        return self._cursor.set_range(key)


def searches(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The searches for requests for roles, in any topic, from now on."""
    found: list[bytes] = []
    cursor = Rows.cursor
    monkeypatch.setattr(Rows, "cursor", lambda self, table: Searching(cursor(self, table), found))
    return found


def test_roles_cost_nothing_where_nobody_waits(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    role(engine).close()
    producers = engine.producers(["a", "b", "c"], "exclusive")
    found = searches(monkeypatch)
    for producer in producers:
        producer.close()
    engine.topic("a").producer("exclusive").close()
    assert found == []


def test_roles_cost_one_search_in_a_transaction_where_there_are_none(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{number}" for number in range(20)]
    with xl.open(path, name="b") as b:
        owners = engine.producers(names, "exclusive")
        waiting = [b.topic(name).producer_async("wait_for_exclusive") for name in names]
        until(lambda: all(engine.topic(name).waiters for name in names))
        found = searches(monkeypatch)
        sessions = [session.session for session in engine.backend.registry.sessions()]
        engine.backend.sessions.release(sessions)  # in one transaction, as when an engine closes
        assert len(found) == 1
        for each, owner in zip(waiting, owners, strict=True):
            each.result(PATIENCE).close()
            owner.close()


# ---- A: grants ---------------------------------------------------------------------------


def test_a2_all_of_a_role_is_granted_and_given_back_in_one_transaction_each(
    engine: xl.Engine, path: str
) -> None:
    told = told_together(engine)
    with xl.open(path, name="other") as other:
        mine = role(engine)
        assert check_whole(engine) == engine.id
        waiting = other.role_async(ROLE, **BINDS)
        mine.close()
        assert check_whole(engine) == other.id
        waiting.result(PATIENCE).close()
    parts = ["__role__/billing", *TOPICS]
    grant = [*((part, "grant") for part in parts), (READ, "own"), ("shard-1", "own")]
    release = [(part, "release") for part in (*parts, READ, "shard-1")]
    assert told == [grant, release + grant, release]
    assert own_epochs(engine) == [2, 2, 2]


@pytest.mark.parametrize("mode", [WAIT, EXCLUSIVE, FENCING])
def test_a1_a_holder_can_do_all_and_no_other_any(engine: xl.Engine, path: str, mode: str) -> None:
    holder = role(engine, mode)
    reader = holder.reader(READ)
    assert {n: outcome(a) for n, a in acts(holder, reader, "x").items()} == DONE
    with xl.open(path, name="other") as other:
        for name in TOPICS:
            with pytest.raises(xl.ProducerBusyError, match="producer 'billing'"):
                other.topic(name).producer()
            with pytest.raises(FENCED, match="producer 'billing'"):
                other.topic(name).producer(EXCLUSIVE)
        with pytest.raises(FENCED, match="role 'billing' is not free") as error:
            role(other, EXCLUSIVE)
        assert error.value.holder.engine_id == engine.id
    holder.close()
    assert traces(engine)["roles"] == []


@pytest.mark.parametrize("held", [EXCLUSIVE, SHARED])
def test_a2_a_role_of_which_a_topic_is_held_is_refused_and_nothing_changes(
    engine: xl.Engine, path: str, held: str
) -> None:
    role(engine).close()
    with xl.open(path, name="other") as other, other.topic(TOPICS[1]).producer(held, name="plain"):
        before, epochs = traces(engine), own_epochs(engine)
        with pytest.raises(FENCED, match="'payments' is held by producer 'plain'") as error:
            role(engine, EXCLUSIVE)
        assert error.value.holder.producer_name == "plain"
        with pytest.raises(
            xl.WaitTimeoutError, match="role 'billing' was not granted within its timeout"
        ):
            role(engine, WAIT, timeout=0.2)
        until(lambda: traces(engine) == before)  # a request that ended late is released after that
        assert own_epochs(engine) == epochs


def test_a1_a_shared_role_and_other_wrong_arguments_are_refused(engine: xl.Engine) -> None:
    for wrong, options in {
        "one holder": {"access_mode": SHARED},
        "unknown": {"access_mode": "first"},
        "several names": {"topics": "invoices"},
        "internal to the library": {"topics": ["__events__"]},
        "several names; put": {"groups": {"g": "orders"}},
        "no topics to read": {"groups": ["g"]},
        "mapping of resources": {"claims": {"g": ["x"]}},
        "generation": {"claims": {"g": {"x": -1}}},
        "already, in groups=": {"groups": {"g": ["x"]}, "claims": {"g": {"x": None}}},
        "priority": {"priority": "high"},
        "on_lost": {"on_lost": 1},
        "settle": {"settle": -1},
    }.items():
        with pytest.raises((ValueError, TypeError), match=wrong):
            engine.role("r", **options)
    for name in ("", "x" * 241, "a\n", 3):
        with pytest.raises((ValueError, TypeError)):
            engine.role(name)
    assert engine.roles() == []


def test_f3_a_generation_that_is_refused_refuses_the_role(engine: xl.Engine) -> None:
    engine.own("shards", {"shard-1": 5}).release()
    before = traces(engine)
    with pytest.raises(xl.OwnershipError, match="has been at generation 5"):
        role(engine, claims={"shards": {"shard-1": 4}})
    assert {**traces(engine), "waiting": before["waiting"]} == before
    assert not any(traces(engine)["waiting"])
    with role(engine) as holder:
        assert holder.generations == {"shards": {"shard-1": 6}}


def test_f3_a_waiter_whose_generation_is_over_when_its_turn_comes_is_refused(
    engine: xl.Engine, path: str
) -> None:
    holder = role(engine, claims={"shards": {"shard-1": 3}})
    waiting = engine.role_async(ROLE, **{**BINDS, "claims": {"shards": {"shard-1": 3}}})
    behind = engine.role_async(ROLE, **BINDS)
    engine.own("shards", {"shard-1": 9})  # which takes the role from its holder
    with pytest.raises(FENCED, match=r"has been at|is held with generation 9"):
        waiting.result(PATIENCE)
    assert behind.result(PATIENCE).generations == {"shards": {"shard-1": 10}}
    assert holder.state == "fenced"


def test_g2_sequence_ids_go_on_from_one_holder_to_the_next(engine: xl.Engine, path: str) -> None:
    with role(engine) as first:
        with first.producer("invoices") as producer:
            producer.send_many([b"a", b"b", b"c"])
        again = first.producer("invoices", linger=0.0)
        assert again is not producer
        assert again is first.producer("invoices")
        assert (again.send(b"d"), again.last_sequence_id) == (3, 3)
    with xl.open(path, name="other") as other, role(other) as second:
        producer = second.producer("invoices")
        assert (producer.name, producer.last_sequence_id) == (ROLE, 3)
        assert producer.send(b"e") == 4
        with pytest.raises(xl.DuplicateSequenceError):
            producer.send(b"d", sequence_id=3)


def test_d9_a_plain_producer_waits_under_the_name_of_the_role(engine: xl.Engine) -> None:
    """It goes on from the role's last message."""
    holder = role(engine)
    holder.producer("invoices").send(b"a")
    plain = engine.topic("invoices").producer_async(WAIT, name=ROLE)
    assert not plain.done()
    holder.close()
    assert plain.result(PATIENCE).last_sequence_id == 0
    assert plain.result(PATIENCE).send(b"b") == 1


def test_f6_readers_of_a_role_go_on_where_the_group_was(engine: xl.Engine, path: str) -> None:
    binds = {"topics": ["out"], "groups": {GROUP: [READ, "refunds"]}}
    engine.topic("refunds").producer().send(b"refund")
    with engine.role(ROLE, **binds) as first:
        with first.group_reader() as reader:
            assert len(reader.read_batch(4)) == 4
            reader.commit()
        with first.reader(READ) as reader:
            assert reader.position == 3
            reader.read_next(timeout=PATIENCE)
            reader.commit()
        with pytest.raises(ValueError, match="has the groups"):
            first.reader("out")
        assert first.groups == {GROUP: [READ, "refunds"]}
        assert first.state == "open"  # its readers are closed, and it goes on
    with xl.open(path, name="other") as other, other.role(ROLE, **binds) as second:
        assert second.group_reader(GROUP).positions == {READ: 4, "refunds": 1}
        [info, _] = sorted(other.groups(), key=lambda info: info.topic)
        assert info.reader.engine_id == other.id


@pytest.mark.parametrize("in_transaction", [True, False])
def test_f6_a_topic_that_was_made_again_is_not_one_of_the_role(
    engine: xl.Engine, path: str, in_transaction: bool
) -> None:
    engine.topic("orders").producer().close()
    role = engine.role("billing", groups={"biller": ["orders"]})
    with xl.open(path) as other:
        other.delete_topic("orders")
    with engine.topic("orders").producer() as producer:
        producer.send(b"of the new one")
    reader = role.reader("orders")
    assert next(reader).value == b"of the new one"

    def commit() -> None:
        if in_transaction:
            with engine.transaction() as transaction:
                transaction.commit_cursor(reader)
        else:
            reader.commit()

    with pytest.raises(xl.TopicNotFoundError, match="another one has its name; open a new reader"):
        commit()
    assert [group.position for group in engine.topic("orders").stats().groups] == [None]


def test_f6_groups_without_topics_read_the_roles_own(engine: xl.Engine) -> None:
    with engine.role(ROLE, topics=["a", "b"], groups=["g", "h"]) as holder:
        assert holder.groups == {"g": ["a", "b"], "h": ["a", "b"]}
        holder.producer("b").send(b"x")
        assert holder.reader("b", group="h").read_next(timeout=PATIENCE).value == b"x"
        with pytest.raises(ValueError, match="group=None"):
            holder.reader("b")


def test_f5_what_else_is_bound_to_a_roles_claim_ends_with_it(engine: xl.Engine) -> None:
    holder = role(engine)
    shared = engine.topic(AUDIT).producer(claim=holder.claim)
    beside = engine.topic(AUDIT).producer()
    assert (shared.send(b"x"), holder.claim.is_valid) == (0, True)
    assert holder.claim.generations == {ROLE: holder.epoch}
    holder.close()
    with pytest.raises(xl.ProducerRevokedError):
        shared.send(b"y")
    with pytest.raises(xl.OwnershipLostError, match="was closed"):
        holder.claim.check()
    assert beside.send(b"z") == 1


def test_f1_a_role_without_parts_is_an_election(engine: xl.Engine, path: str) -> None:
    with engine.role("leader") as leader, xl.open(path, name="other") as other:
        with pytest.raises(FENCED, match="role 'leader'"):
            other.role("leader", access_mode=EXCLUSIVE)
        with engine.transaction() as txn:
            txn.require(leader)
        assert leader.topics == []


# ---- B: fencing --------------------------------------------------------------------------


def test_b3_a_paused_holder_that_goes_on_gets_nothing_in_anywhere(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    old, new = quick("old", keepalive=None), quick("new")
    assert old.call(hold) == 1
    assert old.call(act) == DONE
    freeze(old)
    assert new.call(hold, access_mode=FENCING) == 2
    assert new.call(act) == DONE
    ends = {name: engine.topic(name).next_offset for name in (*TOPICS, AUDIT)}
    position = {info.group: info.position for info in engine.groups()}
    thaw(old)
    assert "done" not in old.call(act, "late").values()
    assert old.call(role_state) == "fenced"
    assert {name: engine.topic(name).next_offset for name in (*TOPICS, AUDIT)} == ends
    assert {info.group: info.position for info in engine.groups()} == position
    old.call(close)  # this has no effect on the new holder
    assert new.call(act) == DONE
    assert judge_logs(engine) == 15


def test_c3_a_holder_that_hangs_is_succeeded_by_a_waiter_and_gets_nothing_in(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    old, new = quick("old", keepalive=KEEPALIVE), quick("new")
    old.call(hold)
    new.call(queue)
    freeze(old)
    with Auditor(engine):
        assert new.call(take) == 2
        assert new.call(act) == DONE
        thaw(old)
        assert "done" not in old.call(act, "late").values()
        assert new.call(act) == DONE
    judge_logs(engine)


def test_b2_what_was_accepted_before_a_rival_came_is_there_and_nothing_behind_it(
    engine: xl.Engine, path: str
) -> None:
    holder = role(engine)
    receipts = [holder.producer("invoices").send_async(b"[1, %d]" % n) for n in range(50)]
    with xl.open(path, name="rival") as rival, role(rival, FENCING) as second:
        second.producer("invoices").send(b"[2, 0]")
        outcomes = []
        for receipt in receipts:
            with contextlib.suppress(FENCED):
                outcomes.append(receipt.result(PATIENCE))
        assert values(engine.topic("invoices"))[-1] == b"[2, 0]"
        assert len(values(engine.topic("invoices"))) == len(outcomes) + 1


PARTS: dict[str, Callable[[xl.Engine], Any]] = {
    "a topic": lambda engine: engine.topic("payments").producer(FENCING),
    "a batch of its own": lambda engine: append_once(
        engine, Run("job", "run-1", "spark"), 0, {"invoices": [Columns(strings([b"[0, 0]"]))]}
    ),
    "a claim": lambda engine: engine.own("shards", {"shard-1": None}),
    "a group": lambda engine: engine.topic(READ).reader(group=GROUP),
    "a group that moves with its topic": lambda engine: engine.unload(
        READ, to=engine.id, groups=[GROUP]
    ),
    "the role": lambda engine: role(engine, FENCING, topics=[], groups=[], claims={}),
}


@pytest.mark.parametrize("part", PARTS)
def test_b3_who_loses_a_part_has_lost_the_role(engine: xl.Engine, path: str, part: str) -> None:
    told: list[Any] = []
    holder = role(engine, on_lost=lambda *which: told.append(which))
    reader = holder.reader(READ)
    with xl.open(path, name="rival") as rival:
        taken = PARTS[part](rival)
        assert lost(holder, reader)
        until(lambda: told)
        [(which, error)] = told
        assert which is holder
        assert isinstance(error, xl.OwnershipLostError)
        with contextlib.suppress(AttributeError):
            taken.close()
    holder.close()
    assert role(engine).state == "open"  # it can be asked for again


def test_b3_a_waiter_gets_what_a_producer_that_fenced_a_part_gives_back(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="rival") as rival:
        holder = role(engine)
        plain = rival.topic("payments").producer(FENCING)
        assert holder.state == "fenced"
        waiting = engine.role_async(ROLE, **BINDS)
        assert not waiting.done()
        assert check_whole(engine) is None
        plain.close()
        assert waiting.result(PATIENCE).epoch == 2


def test_b6_a_role_that_fences_takes_topics_from_producers_and_other_roles(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="rival") as rival:
        plain = engine.topic("invoices").producer(EXCLUSIVE)
        waits = engine.topic("invoices").producer_async(WAIT)
        shared = [engine.topic("payments").producer() for _ in range(2)]
        other = rival.role("other", topics=["refunds"], claims={"shards": {"shard-1": None}})
        waiting = rival.role_async("third", topics=["payments", "x"])
        with Auditor(engine, ROLE, "other", "third"):
            mine = role(engine, FENCING, topics=[*TOPICS, "refunds"])
            for loser in (plain, *shared):
                with pytest.raises(FENCED):
                    loser.send(b"late")
            for future in (waits, waiting):
                with pytest.raises(FENCED):
                    future.result(PATIENCE)
            assert other.state == "fenced"
            assert mine.producer("refunds").send(b"mine") == 0


def test_b3_a_transaction_that_was_begun_before_the_loss_is_not_committed(
    engine: xl.Engine, path: str
) -> None:
    holder = role(engine)
    txn = engine.transaction()
    plain = engine.topic(AUDIT).producer()
    plain.send(b"[1, 0]", transaction=txn)
    txn.require(holder)
    with xl.open(path, name="rival") as rival, role(rival, FENCING):
        with pytest.raises(xl.OwnershipLostError, match="role 'billing' with epoch 1 was lost"):
            txn.commit()
        assert values(engine.topic(AUDIT)) == []
    with pytest.raises(xl.OwnershipLostError), engine.transaction() as again:
        again.require(holder)


def test_c5_a_forked_child_is_refused_and_the_parent_is_unharmed(engine: xl.Engine) -> None:
    holder = role(engine)
    reader = holder.reader(READ)

    def child() -> list[str]:
        found = []
        for each in (
            *acts(holder, reader, "child").values(),
            lambda: holder.state,
            lambda: holder.producer("invoices"),
            lambda: role(engine, FENCING),
            engine.roles,
        ):
            try:
                each()
            except xl.EngineClosedError as error:
                found.append(type(error).__name__)
        holder.close()
        return found

    assert forked(child) == ["EngineClosedError"] * 9
    assert {n: outcome(a) for n, a in acts(holder, reader, "x").items()} == DONE
    assert check_whole(engine) == engine.id


def test_c1_close_in_any_order(engine: xl.Engine, path: str) -> None:
    things = ["role", "reader", "invoices", "payments", "bound", "engine"]
    rng = random.Random(7)
    for _ in range(12):
        order = rng.sample(things, len(things))
        other = xl.open(path, name="other")
        holder = role(other)
        closing: dict[str, Any] = {
            "role": holder,
            "reader": holder.reader(READ),
            "engine": other,
            **{name: holder.producer(name) for name in TOPICS},
            "bound": other.topic(AUDIT).producer(claim=holder.claim),
        }
        receipts = [holder.producer(name).send_async(b"[0, 0]") for name in TOPICS]
        for name in order:
            within(closing[name].close)
        assert all(receipt.result(PATIENCE) >= 0 for receipt in receipts), order
        assert holder.state == "closed" or not closing
        empty = traces(engine)
        assert [empty[t] for t in ("holders", "queue", "roles", "claimants")] == [[]] * 4, order


def test_c1_closing_sends_what_waits_before_it_gives_back(engine: xl.Engine, path: str) -> None:
    holder = role(engine)
    producer = holder.producer("invoices", linger=60.0)
    receipts = [producer.send_async(b"[1, %d]" % n) for n in range(5)]
    with xl.open(path, name="other") as other:
        waiting = other.role_async(ROLE, **BINDS)
        holder.close()
        second = waiting.result(PATIENCE)
        assert second.producer("invoices").send(b"[2, 0]") == 5
    assert [receipt.result(0) for receipt in receipts] == list(range(5))


def test_c1_a_role_that_is_dropped_is_held_on(engine: xl.Engine) -> None:
    epoch = role(engine).epoch
    collect()
    time.sleep(0.2)
    [info] = engine.roles()
    assert (info.epoch, info.holder.engine_id) == (epoch, engine.id)


def test_c6_on_lost_is_not_called_for_a_close(engine: xl.Engine) -> None:
    told: list[Any] = []
    role(engine, on_lost=lambda *which: told.append(which)).close()
    holder = role(engine, on_lost=lambda *which: told.append(which))
    engine.close()
    assert holder.state == "closed"
    assert told == []


# ---- D: the queue ------------------------------------------------------------------------


def test_d1_waiters_of_several_processes_are_granted_by_priority(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    holder = quick("holder")
    holder.call(hold)
    order = [3, 9, -4, 7]
    waiters = {priority: quick(f"w{priority}") for priority in order}
    for priority, worker in waiters.items():
        worker.call(queue, priority=priority)
    assert [w.priority for w in engine.roles()[0].waiters] == sorted(order, reverse=True)
    assert [w.priority for w in engine.topic("invoices").waiters] == sorted(order, reverse=True)
    with Auditor(engine):
        for epoch, priority in enumerate(sorted(order, reverse=True), start=2):
            holder.call(close)
            holder = waiters[priority]
            assert holder.call(take) == epoch
            assert holder.call(act) == DONE
    judge_logs(engine)


def test_c2_the_death_of_the_holder_promotes_the_best_waiter(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    holder, low, high = quick("holder"), quick("low"), quick("high")
    holder.call(hold)
    low.call(queue, priority=1)
    high.call(queue, priority=2)
    with Auditor(engine):
        holder.kill()
        assert high.call(take) == 2
        assert high.call(act) == DONE
        high.kill()
        assert low.call(take) == 3
    assert low.call(act) == DONE
    assert [(e.kind, e.reason) for e in engine.history(role=ROLE)] == [
        ("grant", "request"),
        ("evict", "dead"),
        ("grant", "promotion"),
        ("evict", "dead"),
        ("grant", "promotion"),
    ]
    judge_logs(engine)


def test_d4_dead_waiters_are_passed_over(engine: xl.Engine, quick: Callable[..., Quick]) -> None:
    holder, dead, living = quick("holder"), quick("dead"), quick("living")
    holder.call(hold)
    dead.call(queue, priority=5)
    living.call(queue)
    dead.kill()
    holder.call(close)
    assert living.call(take) == 2
    living.call(close)
    assert traces(engine)["roles"] == []
    assert traces(engine)["queue"] == []


def test_d5_a_cancelled_request_leaves_no_trace(engine: xl.Engine, path: str) -> None:
    with role(engine), xl.open(path, name="other") as other:
        before = traces(engine)
        waiting = other.role_async(ROLE, **BINDS)
        assert traces(engine) != before
        assert waiting.cancel()
        assert waiting.cancelled()
        assert traces(engine) == before


def test_d5_a_cancel_that_races_with_the_grant_leaves_no_orphan(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="other") as other:
        for _ in range(30):
            holder = role(engine)
            waiting = other.role_async(ROLE, **BINDS)
            at_once(holder.close, waiting.cancel)
            if not waiting.cancelled():
                waiting.result(PATIENCE).close()
            assert check_whole(engine) is None
        assert traces(engine)["queue"] == []


def test_d5_an_interrupted_call_gives_the_role_back(engine: xl.Engine, path: str) -> None:
    with role(engine) as holder, xl.open(path, name="other") as other:
        waiting = other.role_async(ROLE, **BINDS)
        waiting.give_up()
        assert waiting.cancelled()
        late = other.role_async(ROLE, **BINDS)
        holder.close()
        late.result(PATIENCE)
        late.give_up()
        until(lambda: check_whole(engine) is None)


def test_a3_a_waiting_role_keeps_shared_producers_out_and_is_granted_when_the_last_leaves(
    engine: xl.Engine, path: str
) -> None:
    shared = [engine.topic("invoices").producer() for _ in range(2)]
    with xl.open(path, name="other") as other:
        waiting = other.role_async(ROLE, **BINDS)
        with pytest.raises(xl.ProducerBusyError):
            engine.topic("invoices").producer()
        for producer in shared:
            assert not waiting.done()
            producer.close()
        assert waiting.result(PATIENCE).epoch == 1


def test_e3_an_owner_of_a_part_is_told_that_a_role_waits(engine: xl.Engine, path: str) -> None:
    wanted: list[xl.Producer] = []
    with engine.topic("payments").producer(EXCLUSIVE, on_wanted=wanted.append) as producer:
        with xl.open(path, name="other") as other:
            waiting = other.role_async(ROLE, **BINDS)
            until(lambda: wanted == [producer])
            producer.close()
            waiting.result(PATIENCE).close()


def test_i1_a_shared_map_gives_way_to_a_role_that_waits_for_its_topic(
    engine: xl.Engine, path: str
) -> None:
    with xl.SharedMap(engine.topic("payments")) as shared:
        shared.put("a", 1)
        with xl.open(path, name="other") as other:
            assert role(other).state == "open"


def test_d1_a_plain_producer_with_a_higher_priority_comes_first(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="other") as other:
        owner = engine.topic("payments").producer(EXCLUSIVE)
        waiting = other.role_async(ROLE, **BINDS, priority=5)
        high = engine.topic("payments").producer_async(WAIT, priority=9)
        low = engine.topic("payments").producer_async(WAIT, priority=1)
        owner.close()
        first = high.result(PATIENCE)
        assert not waiting.done()
        first.close()
        second = waiting.result(PATIENCE)
        assert not low.done()
        second.close()
        low.result(PATIENCE).close()


def test_d4_a_role_that_waits_for_half_leaves_the_other_half_to_others(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="other") as other, engine.topic("payments").producer(EXCLUSIVE) as half:
        waiting = other.role_async(ROLE, **BINDS, priority=9)
        plain = engine.topic("invoices").producer_async(WAIT)
        producer = plain.result(PATIENCE)
        half.close()
        assert not waiting.done()
        producer.close()
        assert waiting.result(PATIENCE).epoch == 1


def test_c3_a_role_waits_for_a_topic_of_an_engine_that_hangs_no_longer_than_its_keepalive(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    stalled = quick("stalled", keepalive=KEEPALIVE)
    stalled.call(own_topic, "payments")
    freeze(stalled)
    assert role(engine).state == "open"
    thaw(stalled)
    with pytest.raises(Failed, match="ProducerFencedError"):
        stalled.call(send_own)


def own_topic(state: State, name: str) -> None:
    """Own a topic without any role."""
    state.producer = state.engine.topic(name).producer(EXCLUSIVE)


def send_own(state: State) -> int:
    """Send there."""
    assert state.producer is not None
    return state.producer.send(b"mine")


@pytest.mark.long
def test_d7_a_role_settles_before_it_is_granted_to_a_lower_priority(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="other") as other:
        while True:
            began = time.monotonic()
            low = other.role_async(ROLE, **BINDS, priority=1, settle=1.0)
            high = other.role_async(ROLE, **BINDS, priority=2)
            if time.monotonic() - began < 1.0:
                break
            for late in (low, high):  # the machine was too busy: the first may have settled
                late.give_up()
            until(lambda: check_whole(engine) is None)
        epoch = high.result(PATIENCE).epoch
        high.result(0).close()
        assert low.result(PATIENCE).epoch == epoch + 1


def test_d1_two_roles_with_topics_in_common_take_turns_and_never_block_each_other(
    path: str,
) -> None:
    wanted = {"r1": ["a", "b"], "r2": ["b", "c"], "r3": ["c", "a"], "r4": ["a", "b", "c"]}
    with crowd(path, len(wanted)) as engines:

        def turns(engine: xl.Engine, name: str) -> int:
            for _ in range(8):
                with engine.role(name, topics=wanted[name], timeout=PATIENCE) as holder:
                    for topic in wanted[name]:
                        holder.producer(topic).send(name.encode())
            return 8

        with Auditor(engines[0], *wanted):
            pairs = zip(engines, wanted, strict=True)
            assert at_once(*[functools.partial(turns, *pair) for pair in pairs]) == [8] * 4
        assert all(engines[0].topic(name).next_offset == 24 for name in "abc")
        assert traces(engines[0])["queue"] == []


def test_f3_two_roles_with_a_claim_in_common_wait_for_each_other(
    engine: xl.Engine, path: str
) -> None:
    both = {"claims": {"shards": {"shard-1": None}}}
    with xl.open(path, name="other") as other:
        first = engine.role("r1", **both)
        with pytest.raises(FENCED, match="held by role 'r1'"):
            other.role("r2", access_mode=EXCLUSIVE, **both)
        waiting = other.role_async("r2", **both)
        assert not waiting.done()
        assert first.state == "open"
        first.close()
        assert waiting.result(PATIENCE).generations == {"shards": {"shard-1": 2}}


def test_f3_a_role_takes_readers_and_claims_that_belong_to_no_role(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="other") as other:
        reader = engine.topic(READ).reader(group=GROUP)
        claim = engine.own("shards", {"shard-1": None, "shard-2": None})
        with role(other):
            assert not claim.is_valid
            with pytest.raises(xl.ReaderFencedError):
                reader.commit()


def test_c3_a_role_waits_for_a_claim_of_another_role_that_hangs_no_longer_than_its_keepalive(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    stalled = quick("stalled", keepalive=KEEPALIVE)
    stalled.call(hold)
    freeze(stalled)
    waiting = engine.role_async("other", claims={"shards": {"shard-1": None}})
    assert waiting.result(PATIENCE).generations == {"shards": {"shard-1": 2}}
    thaw(stalled)
    assert stalled.call(role_state) == "fenced"
    assert "done" not in stalled.call(act, "late").values()


@pytest.mark.long
def test_d6_only_the_engine_whose_turn_it_is_is_woken(engine: xl.Engine, path: str) -> None:
    with crowd(path, 4) as engines:
        holder = role(engine)
        waiting = [
            each.role_async(ROLE, **BINDS, priority=priority)
            for priority, each in enumerate(engines)
            for _ in range(50)
        ]
        before = quiet_wake_ups(engines)
        holder.close()
        waiting[150].result(PATIENCE)
        woken = [b - a for a, b in zip(before, quiet_wake_ups(engines), strict=True)]
        assert woken[:3] == [0, 0, 0]
        assert woken[3] >= 1


def test_d5_a_role_is_not_taken_for_what_an_interrupted_call_has_left(
    engine: xl.Engine, path: str
) -> None:
    holder = role(engine)
    with xl.open(path, name="other") as other:
        waiting = other.role_async(ROLE, **BINDS)
        for each in (engine, other):
            each.backend.worker.release_orphans()
            until(lambda each=each: not each.backend.worker._orphans_wanted)
        engine.ledger.checkpoint()
        with (
            engine.backend.notifications.lock,
            other.backend.notifications.lock,
        ):  # its round is over
            assert check_whole(engine) == engine.id
        assert holder.state == "open"
        holder.close()
        assert waiting.result(PATIENCE).state == "open"


@pytest.mark.parametrize("where", ["_register", "__init__"])
def test_d5_a_call_that_is_interrupted_after_its_grant_leaves_no_holder(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, where: str
) -> None:
    original = getattr(xl.Role, where)

    def interrupted(*args: Any) -> None:
        original(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    gc.disable()  # it must not be left to the collector
    request.addfinalizer(gc.enable)
    monkeypatch.setattr(xl.Role, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        role(engine)
    until(lambda: check_whole(engine) is None)
    assert role(engine, EXCLUSIVE).state == "open"


# ---- E: hand-over ------------------------------------------------------------------------


def test_e1_a_role_is_handed_over_as_a_whole_to_an_engine_that_waits(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    source, better, destination = quick("source"), quick("better"), quick("destination")
    source.call(hold)
    better.call(queue, priority=9)
    destination.call(queue)
    with Auditor(engine):
        state, _ = source.call(hand_over, destination.id)
        assert state in ("assigned", "owned")
        assert destination.call(take) == 2
    assert destination.call(act) == DONE
    assert source.call(role_state) == "moved"
    assert set(source.call(act, "late").values()) <= {
        "ProducerMovedError",
        "OwnershipLostError",
        "ReaderFencedError",
    }
    assert not better.call(is_done)
    assert steps(engine.history(role=ROLE)) == [
        ("grant", "request"),
        ("releasing", "unload"),
        ("release", "hand-over"),
        ("assigned", "unload"),
        ("grant", "hand-over"),
    ]
    destination.call(close)
    assert better.call(take) == 3
    judge_logs(engine)


def is_done(state: State) -> bool:
    """Has the role that is waited for come?"""
    return state.kept["future"].done()


def test_e1_a_hand_over_is_one_transaction(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="b") as b:
        holder = role(engine)
        waiting = b.role_async(ROLE, **BINDS)
        told = told_together(engine)
        assert holder.hand_over(b.id).ok
        assert waiting.result(PATIENCE).epoch == 2
    assert told[:2] == [
        [("__role__/billing", "releasing")],
        [
            ("__role__/billing", "release"),
            ("__role__/billing", "assigned"),
            ("invoices", "release"),
            ("invoices", "assigned"),
            ("payments", "release"),
            ("payments", "assigned"),
            (READ, "release"),
            ("shard-1", "release"),
            ("__role__/billing", "grant"),
            ("invoices", "grant"),
            ("payments", "grant"),
            (READ, "own"),
            ("shard-1", "own"),
        ],
    ]


def told_together(engine: Any) -> list[list[tuple[str, str]]]:
    """(topic or resource, kind) of all that this process's transactions on the engine's ledger tell
    from now on, one list for each transaction."""
    told: list[list[tuple[str, str]]] = []

    def note(tables: Any) -> None:
        if tables.events:
            told.append([(e.resource or e.topic, e.kind) for e in tables.events])

    engine.ledger.before_commit.settle_by("told together", note)  # after what settles roles
    return told


def test_e2_what_was_accepted_is_sent_first_and_the_errors_name_the_successor(
    engine: xl.Engine, path: str
) -> None:
    told: list[Any] = []
    with xl.open(path, name="b", properties={"address": "unix:/b"}) as b:
        holder = role(engine, on_lost=lambda *which: told.append(which))
        reader = holder.reader(READ)
        producer = holder.producer("invoices", linger=60.0)
        receipts = [producer.send_async(b"[1, %d]" % n) for n in range(20)]
        waiting = b.role_async(ROLE, **BINDS)
        assert holder.hand_over(b.id).ok
        assert [receipt.result(PATIENCE) for receipt in receipts] == list(range(20))
        assert waiting.result(PATIENCE).producer("invoices").send(b"[2, 0]") == 20
        with pytest.raises(xl.ProducerMovedError) as moved:
            producer.send(b"late")
        with pytest.raises(xl.ReaderFencedError) as fenced:
            reader.commit()
        with pytest.raises(xl.OwnershipLostError, match="role 'billing' was handed over") as gone:
            holder.claim.check()
        errors = [moved.value, fenced.value, gone.value]
        assert [e.successor.properties for e in errors] == [{"address": "unix:/b"}] * 3
        until(lambda: told)
        assert told[0][1].successor.id == b.id
        assert holder.state == "moved"


@pytest.mark.parametrize("topics", ["invoices", TOPICS, "inv", "__role__/billing"])
def test_e1_unloading_any_topic_of_a_role_moves_all_of_it(
    engine: xl.Engine, path: str, topics: Any
) -> None:
    with xl.open(path, name="b") as b, xl.open(path, name="third") as third:
        holder = role(engine)
        waiting = b.role_async(ROLE, **BINDS)
        [move] = third.unload(topics, to=b.id)
        assert (move.ok, move.topic) == (True, "__role__/billing")
        assert waiting.result(PATIENCE).state == "open"
        assert holder.state == "moved"
        [again] = third.unload(topics, to=b.id)
        assert again.state == "owned"


def test_e3_a_role_for_which_the_destination_does_not_wait_yet_is_kept_for_it(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, xl.open(path, name="third") as third:
        holder = role(engine)
        others = [
            third.role_async(ROLE, **BINDS, priority=9),
            third.topic("invoices").producer_async(WAIT, priority=9),
        ]
        assert holder.hand_over(b.id, timeout=PATIENCE).state == "assigned"
        with pytest.raises(FENCED):
            third.topic("payments").producer(EXCLUSIVE)
        second = role(b, EXCLUSIVE)
        assert second.epoch == 2
        assert not any(other.done() for other in others)
        assert traces(engine)["transfers"] == []
        second.close()
        others[0].result(PATIENCE).close()
        others[1].result(PATIENCE).close()


@pytest.mark.parametrize("how", ["deadline", "dead"])
def test_e4_a_role_that_is_not_taken_goes_to_those_who_wait(
    engine: xl.Engine, quick: Callable[..., Quick], how: str
) -> None:
    destination = quick("destination")
    holder = role(engine)
    assert holder.hand_over(destination.id, timeout=PATIENCE).state == "assigned"
    waiting = engine.role_async(ROLE, **BINDS)
    if how == "dead":
        destination.kill()
    else:
        end_reservations(engine, 0.5)
    assert waiting.result(PATIENCE).epoch == 2
    assert traces(engine)["transfers"] == []


def test_e4_a_hand_over_that_is_cancelled_leaves_the_role_where_it_was(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, HeldUp(engine) as held:
        holder = role(engine)
        future = b.unload_async("invoices", to=b.id, timeout=PATIENCE)
        held.await_it()
        assert b.cancel_unload("__role__/billing") == ["__role__/billing"]
        held.go_on()
        assert [move.ok for move in future.result(PATIENCE)] == [False]
        assert until(lambda: holder.producer("invoices").send(b"mine") == 0)
        assert holder.state == "open"


def test_e4_a_source_that_hangs_is_not_succeeded_in_halves(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=KEEPALIVE), quick("destination")
    source.call(hold)
    destination.call(queue)
    freeze(source)
    with Auditor(engine):
        [move] = engine.unload("payments", to=destination.id, timeout=PATIENCE)
        assert move.ok
        assert destination.call(take) == 2
        thaw(source)
        assert "done" not in source.call(act, "late").values()
    judge_logs(engine)


def test_e4_a_holder_that_closes_while_its_role_is_moved_leaves_it_to_the_destination(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, xl.open(path, name="third") as third, HeldUp(engine) as held:
        holder = role(engine)
        best = third.role_async(ROLE, **BINDS, priority=9)
        moving = begin(holder.hand_over, b.id, PATIENCE)
        held.await_it()
        with Auditor(b):
            holder.close()
            waiting = b.role_async(ROLE, **BINDS)
            assert waiting.result(PATIENCE).epoch == 2
            held.go_on()
            assert moving.result(PATIENCE).ok
        assert not best.done()
        waiting.result(0).close()
        assert best.result(PATIENCE).epoch == 3


@pytest.mark.long
def test_e4_a_destination_whose_request_binds_more_than_is_free_blocks_no_other_for_ever(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, engine.topic("refunds").producer(EXCLUSIVE):
        holder = role(engine)
        more = b.role_async(ROLE, **{**BINDS, "topics": [*TOPICS, "refunds"]}, priority=9)
        assert holder.hand_over(b.id, timeout=PATIENCE).state == "assigned"
        end_reservations(engine, 0.5)
        assert role(engine).epoch == 2
        assert not more.done()
        assert more.cancel()


def test_e3_a_request_at_the_destination_waits_for_the_release(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, HeldUp(engine) as held:
        holder = role(engine)
        moving = begin(holder.hand_over, b.id, PATIENCE)
        held.await_it()
        waiting = b.role_async(ROLE, **BINDS, access_mode=EXCLUSIVE)
        assert not waiting.done()
        held.go_on()
        assert waiting.result(PATIENCE).epoch == 2
        assert moving.result(PATIENCE).ok


def test_e4_a_reservation_that_is_cancelled_frees_the_roles_topics(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, xl.open(path, name="third") as third:
        assert role(engine).hand_over(b.id, timeout=1000.0).state == "assigned"
        waiting = third.role_async(ROLE, **{**BINDS, "topics": ["invoices"]})
        plain = third.topic("payments").producer_async(WAIT)
        third.cancel_unload("__role__/billing")
        assert waiting.result(PATIENCE).epoch == 2
        assert plain.result(PATIENCE).topic_epoch == 2


def test_e3_who_gets_a_role_that_is_kept_for_it_leaves_topics_that_it_does_not_bind(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="b") as b, xl.open(path, name="third") as third:
        assert role(engine).hand_over(b.id, timeout=1000.0).state == "assigned"
        plain = third.topic("payments").producer_async(WAIT)
        with role(b, topics=["invoices"]):
            assert plain.result(PATIENCE).topic_epoch == 2
        assert traces(engine)["transfers"] == []


def test_e4_repeating_the_call_gives_the_whole_role_more_time(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="b") as b, xl.open(path, name="third") as third:
        assert role(engine).hand_over(b.id, timeout=PATIENCE / 8).state == "assigned"
        first = [engine.topic(name).transfer.until for name in TOPICS]
        [move] = third.unload("__role__/billing", to=b.id, timeout=1000.0)
        assert move.state == "assigned"
        assert all(
            engine.topic(name).transfer.until > before + 900_000
            for name, before in zip(TOPICS, first, strict=True)
        )
        assert role(b, EXCLUSIVE).epoch == 2


class Round:
    """A role is handed over; somebody falls. Then everybody who is left uses the role in turn."""

    def __init__(self, path: str, make: Callable[..., Quick]) -> None:
        self.engine = xl.open(path, name="bystander")
        self.engine.topic(READ).producer().send_many([b"%d" % n for n in range(1000)])
        self.make, self.cast = make, dict[str, Quick]()

    def player(self, name: str) -> Quick:
        if name not in self.cast:
            self.cast[name] = self.make(name)
        return self.cast[name]

    def play(self, name: str, sign: int) -> None:
        point, stops = POINTS[name], sign == signal.SIGSTOP
        falls = {"coordinator": "third", "heir": "destination"}.get(point.role, point.role)
        falling = self.player(falls)
        source, destination, asking = map(self.player, ("source", "destination", "third"))
        source.call(hold)
        if point.role != "heir":
            destination.call(queue)
        falling.call(fall_at, name, sign)
        with Auditor(self.engine):
            asking.start(unload_role, destination.id)
            if point.role == "heir":
                assert asking.answer() == ["assigned"]
                destination.start(queue)
            if stops:
                falling.await_strike()
            else:
                falling.process.join(PATIENCE)
                assert falling.process.exitcode in KILLED
                del self.cast[falls]
            if asking is not falling and point.role != "heir":
                asking.answer()
            self.use([worker for worker in self.cast.values() if worker is not falling])
            if stops:
                self.go_on(falling)
        self.judge()

    def use(self, upright: list[Quick]) -> None:
        """The role is not blocked: the bystander gets it, and its former holders have nothing."""
        with role(self.engine, FENCING) as mine:
            reader = mine.reader(READ)
            assert {n: outcome(a) for n, a in acts(mine, reader, "x").items()} == DONE
            for worker in upright:
                assert "done" not in worker.call(act_if_holder).values()

    def go_on(self, falling: Quick) -> None:
        with role(self.engine) as mine:
            falling.signal(signal.SIGCONT)
            with contextlib.suppress(Failed, TimeoutError):
                falling.answer(0.5)  # of what it was at when it was stopped
            # A coordinator goes on with its move, and it is this engine that the role moves from.
            came = outcome(lambda: send_to(mine, "invoices", "x"))
            assert came == "done" or mine.state == "moved"

    def judge(self) -> None:
        for worker in self.cast.values():
            worker.end()
        self.cast.clear()
        with role(self.engine) as mine:
            assert mine.state == "open"
        judge_logs(self.engine)
        left = traces(self.engine)
        assert [left[t] for t in ("roles", "queue", "holders", "transfers")] == [[]] * 4


def unload_role(state: State, to: str) -> list[str]:
    """What became of the role's move."""
    return [move.state for move in state.engine.unload("invoices", to, PATIENCE)]


def act_if_holder(state: State) -> dict[str, str]:
    """What becomes of all that a holder does, where this process had the role."""
    future = state.kept.pop("future", None)
    if future is not None and not future.cancel():
        with contextlib.suppress(xl.ProducerFencedError):
            state.kept["role"] = future.result(PATIENCE)
            with contextlib.suppress(xl.OwnershipLostError):
                state.kept["reader"] = state.kept["role"].reader(READ)
    return act(state, "late") if "reader" in state.kept else {}


def play(path: str, names: list[str], sign: int) -> None:
    """A round for each point."""
    with quick_workers(path) as make:
        rounds = Round(path, make)
        try:
            for name in names:
                try:
                    rounds.play(name, sign)
                except BaseException as error:
                    error.add_note(name)
                    raise
        finally:
            for worker in rounds.cast.values():
                worker.end()
            rounds.engine.close()


FALLS = ["coordinator", "source", "destination", "heir"]


@pytest.mark.long
@pytest.mark.parametrize("who", FALLS)
def test_e4_killed_at_any_step_of_a_hand_over_one_has_the_whole_role(path: str, who: str) -> None:
    names = [name for name, point in POINTS.items() if point.role == who]
    at_once(
        *[
            functools.partial(play, f"{path}-{lane}", names[lane::2], signal.SIGKILL)
            for lane in range(2)
        ]
    )


@pytest.mark.long
@pytest.mark.parametrize("who", FALLS)
def test_e4_stopped_at_any_step_of_a_hand_over_one_has_the_whole_role(path: str, who: str) -> None:
    names = [name for name, p in POINTS.items() if p.role == who and not p.inside]
    at_once(
        *[
            functools.partial(play, f"{path}-{lane}", names[lane::2], signal.SIGSTOP)
            for lane in range(2)
        ]
    )


# ---- what can be seen --------------------------------------------------------------------


def test_e5_the_grants_of_a_roles_parts_are_told_in_the_same_transaction(
    engine: xl.Engine, path: str
) -> None:
    with role(engine):
        pass
    events = list(engine.history())
    grants = [(e.topic, e.kind, e.reason) for e in events if e.topic and e.topic != READ]
    assert grants == [
        ("__role__/billing", "grant", "request"),
        ("invoices", "grant", "role"),
        ("payments", "grant", "role"),
        ("__role__/billing", "release", "closed"),
        ("invoices", "release", "role"),
        ("payments", "release", "role"),
    ]
    claims = [(e.group, e.resource, e.kind, e.reason) for e in events if e.group is not None]
    assert claims == [
        (GROUP, READ, "own", "reader"),
        ("shards", "shard-1", "own", "claim"),
        (GROUP, READ, "release", "role"),
        ("shards", "shard-1", "release", "role"),
    ]
    assert len(list(engine.history(role=ROLE))) == 2


def test_e5_roles_are_listed_also_without_a_holder(engine: xl.Engine, path: str) -> None:
    with role(engine) as holder:
        with xl.open(path, name="other") as other:
            waiting = other.role_async(ROLE, **BINDS, priority=3)
            [info] = other.roles()
            assert info.holder.session == holder._seat._session.id
            assert (info.topics, info.groups) == (tuple(TOPICS), {GROUP: (READ,)})
            assert info.claims == {"shards": ("shard-1",)}
            assert [waiter.engine_name for waiter in info.waiters] == ["other"]
            assert len(engine.claims()) == 2  # what binds a role is no claim of anybody's
            assert waiting.cancel()
    with xl.open(path, readonly=True) as reading:
        [info] = reading.roles()
        assert (info.name, info.epoch, info.holder, info.waiters) == (ROLE, 1, None, ())
        assert (info.topics, reading.topics()) == (tuple(TOPICS), sorted([READ, *TOPICS]))
        with pytest.raises(xl.LedgerError):
            reading.role(ROLE)


def test_b1_a_role_that_was_deleted_goes_on_with_its_epoch(engine: xl.Engine) -> None:
    with role(engine) as holder:
        with pytest.raises(xl.ProducerBusyError):
            engine.delete_role(ROLE)
        with pytest.raises(xl.ProducerBusyError):
            engine.delete_topic("invoices")
        assert holder.state == "open"
    engine.delete_role(ROLE)
    with pytest.raises(xl.TopicNotFoundError):
        engine.delete_role(ROLE)
    assert engine.roles() == []
    assert role(engine).epoch == 2


def test_g8_a_role_whose_topic_was_terminated_is_refused(engine: xl.Engine, path: str) -> None:
    with role(engine) as holder, xl.open(path, name="other") as other:
        waiting = other.role_async(ROLE, **BINDS)
        engine.topic("payments").terminate()
        with pytest.raises(xl.TopicTerminatedError, match="terminated"):
            waiting.result(PATIENCE)
        with pytest.raises(xl.TopicTerminatedError):
            holder.producer("payments").send(b"x")
        assert holder.producer("invoices").send(b"x") == 0
    for mode in (WAIT, EXCLUSIVE, FENCING):
        with pytest.raises(xl.TopicTerminatedError):
            role(engine, mode)
    assert traces(engine)["roles"] == []


def test_b2_roles_of_asyncio(engine: xl.Engine, path: str) -> None:
    async def scene() -> list[Any]:
        async with aio.open(path, "a") as a, aio.open(path, "b") as b:
            async with await a.role(ROLE, **BINDS) as first:
                waiting = asyncio.create_task(b.role(ROLE, **BINDS))
                cancelled = asyncio.create_task(b.role(ROLE, **BINDS, priority=5))
                await (await first.producer("invoices")).send(b"[1, 0]")
                async with a.transaction() as txn:
                    txn.require(first)
                while len(b.roles()[0].waiters) < 2:
                    await asyncio.sleep(0.01)
                cancelled.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await cancelled
                reader = first.reader(READ)
                await reader.read_next(PATIENCE)
                await reader.commit()
            second = await waiting
            assert (await second.hand_over(a.id, PATIENCE)).state == "assigned"
            return [second.epoch, second.state]

    found = asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    assert found == [2, "moved"]
    assert values(engine.topic("invoices")) == [b"[1, 0]"]


# ---- all at once -------------------------------------------------------------------------


def reign(state: State, seed: int, stop_after: float) -> int:
    """Ask for the role again and again, in any mode, and do all that a holder may; how often."""
    rng, done, end = random.Random(seed), 0, time.monotonic() + stop_after
    while time.monotonic() < end:
        mode = rng.choice([WAIT, WAIT, EXCLUSIVE, FENCING])
        try:
            mine = state.engine.role(
                ROLE, **BINDS, access_mode=mode, priority=rng.randrange(5), timeout=0.5
            )
        except (xl.WaitTimeoutError, xl.ProducerFencedError):
            continue
        with mine:
            with contextlib.suppress(xl.OwnershipLostError, xl.ReaderFencedError):
                reader = mine.reader(READ)
                for _ in range(rng.randrange(1, 6)):
                    for name, each in acts(mine, reader, f"both-{seed}-{done}").items():
                        if name in ("both", "require", "cursor"):
                            done += outcome(each) == "done"
            others = [e for e in state.engine.engines() if e.id != state.engine.id]
            if others and rng.random() < 0.3:
                with contextlib.suppress(xl.LedgerError, xl.OwnershipLostError, FENCED):
                    mine.hand_over(rng.choice(others).id, timeout=0.3)
    return done


@pytest.mark.long
def test_e4_whatever_happens_one_process_acts_in_a_role(
    engine: xl.Engine, path: str, quick: Callable[..., Quick]
) -> None:
    rng = random.Random(11)
    workers: list[Quick] = []
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.15):
            with contextlib.suppress(*REFUSALS):
                what = rng.randrange(4)
                if what == 0:
                    engine.topic(rng.choice(TOPICS)).producer(FENCING).close()
                elif what == 1:
                    engine.own("shards", {"shard-1": None}).release()
                elif what == 2:
                    engine.topic(READ).reader(group=GROUP).close()
                else:
                    engine.topic(rng.choice(TOPICS)).producer(EXCLUSIVE).close()

    def new() -> Quick:
        worker = quick(f"w{len(workers)}", keepalive=KEEPALIVE)
        workers.append(worker)
        worker.start(reign, len(workers), 30.0)
        return worker

    with Auditor(engine):
        disturbing = begin(disturb)
        living = [new() for _ in range(4)]
        for _ in range(12):
            time.sleep(0.25)
            chosen = living.pop(rng.randrange(len(living)))
            if rng.random() < 0.5:
                chosen.kill()
            else:
                chosen.signal(signal.SIGSTOP)
                time.sleep(0.1)
                chosen.signal(signal.SIGCONT)
                living.append(chosen)
                continue
            living.append(new())
        for worker in living:
            worker.kill()
        stop.set()
        disturbing.result(PATIENCE)
        with role(engine) as mine:
            assert mine.state == "open"
    assert judge_logs(engine) > 0
    left = traces(engine)
    assert [left[t] for t in ("roles", "queue", "transfers")] == [[]] * 3
    assert [engine.topic(name).holders for name in TOPICS] == [[], []]


def test_b4_a_producer_of_a_role_that_is_fenced_is_told_the_same_by_its_notification(
    path: str,
) -> None:
    """As by its next send, which finds that the role is gone."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        producer = a.role("billing", topics=["invoices"]).producer("invoices")
        with b.role("billing", topics=["invoices"], access_mode=FENCING):
            until(lambda: producer._sender._lost is not None)
            with pytest.raises(xl.ProducerRevokedError):
                producer.send(b"stale")


def test_d4_a_claim_that_takes_a_role_apart_frees_the_rest_for_who_waits(path: str) -> None:
    """The role is lost for one of its claims; another role waits for the other one."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        both = a.role("both", claims={"s": {"x": None, "y": None}})
        waiting = b.role_async("one", claims={"s": {"y": None}})
        assert (both.state, waiting.done()) == ("open", False)
        claim = a.own("s", {"x": None})
        [one] = [info for info in a.roles() if info.name == "one"]
        assert one.holder is not None
        assert (both.state, claim.is_valid) == ("fenced", True)
        assert waiting.result(PATIENCE).generations == {"s": {"y": 2}}


def answer(monkeypatch: pytest.MonkeyPatch, engine: xl.Engine, *answers: bool) -> None:
    """What this thread is told when it asks whether that engine lives; the last one from then on.
    Between two questions of one transaction a stopped process may come to count as unresponsive,
    or go on."""
    left, thread, alive = list(answers), threading.get_ident(), Slots.alive

    def asked(self: Slots, slot: int, other: str) -> bool:
        if other != engine.id or threading.get_ident() != thread:
            return alive(self, slot, other)
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(Slots, "alive", asked)


@pytest.mark.parametrize("times", [1, 2], ids=["the role", "the role and the queue"])
def test_d4_a_producer_that_hangs_amid_a_selection_leaves_no_role_waiting(
    path: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """It is in the role's way as long as it lives, and is passed over when it does not."""
    with crowd(path, 3) as (a, b, c):
        holder = a.topic("invoices").producer(EXCLUSIVE)
        plain = b.topic("invoices").producer_async(WAIT)
        waiting = c.role_async(ROLE, topics=["invoices"])
        answer(monkeypatch, b, *[True] * times, False)
        holder.close()
        monkeypatch.undo()
        assert waiting.result(PATIENCE).state == "open"
        with pytest.raises(FENCED):
            plain.result(PATIENCE)


@pytest.mark.parametrize("answers", [[False, True], [True, False, True]], ids=["seat", "part"])
def test_d4_one_that_goes_on_amid_a_selection_is_granted_no_part_of_a_role(
    path: str, monkeypatch: pytest.MonkeyPatch, answers: list[bool]
) -> None:
    """The other part is held: neither the role can be granted nor the part that is free."""
    with crowd(path, 3) as (a, b, c):
        other = b.topic("invoices").producer(EXCLUSIVE)
        holder = a.topic("payments").producer(EXCLUSIVE)
        waiting = c.role_async(ROLE, topics=TOPICS)
        answer(monkeypatch, c, *answers)
        holder.close()
        monkeypatch.undo()
        assert (check_whole(a), a.topic("payments").holders, other.state) == (None, [], "open")
        with pytest.raises(FENCED):
            waiting.result(PATIENCE)


@pytest.mark.long
def test_d4_roles_with_parts_in_common_are_held_whole_and_never_left_idle(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    rng, made = random.Random(5), 0
    for name in "abc":
        engine.topic(name)

    def new() -> Quick:
        nonlocal made
        made += 1
        worker = quick(f"w{made}", keepalive=KEEPALIVE)
        worker.start(wander, made, PATIENCE)
        return worker

    with Auditor(engine, *COMMON):
        living = [new() for _ in range(4)]
        for _ in range(15):
            time.sleep(0.3)
            worker = living.pop(rng.randrange(len(living)))
            if rng.random() < 0.4:
                worker.kill()
                living.append(new())
            else:
                worker.signal(signal.SIGSTOP)
                time.sleep(rng.choice([0.05, 2 * KEEPALIVE]))
                worker.signal(signal.SIGCONT)
                living.append(worker)
        for worker in living:
            worker.kill()
        for name, binds in COMMON.items():
            with engine.role(name, **binds, timeout=PATIENCE) as holder:
                assert holder.state == "open"
    left = traces(engine)
    assert [left[t] for t in ("roles", "queue", "transfers")] == [[]] * 3
    assert engine.verify().ok
