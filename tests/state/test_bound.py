"""Maps and states that are bound to a claim, a role or a lock: every write is appended only while
that is held, which the append compares (rules B2, F5, I8).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.processes import State, Worker, stop_outside, within
from testing.states import Later, call_map, everything, one_more, open_counts

pytestmark = pytest.mark.rule("I8")

Map = xl.SharedMap[Any, Any]
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda m, txn: m.put("a", 2, transaction=txn),
    "replace": lambda m, txn: m.replace("a", 1, 2, transaction=txn),
    "compare": lambda m, txn: m.put_if_absent("a", 2, transaction=txn),
    "update": lambda m, txn: m.update("a", one_more, transaction=txn),
    "clear": lambda m, txn: m.clear(transaction=txn),
}


def claimed(engine: xl.Engine) -> xl.Claim:
    """A claim, which severs the one before it."""
    return engine.own({"shard": None})


def held(engine: xl.Engine, kind: str) -> tuple[Any, Callable[[], object]]:
    """What a map can be bound to, and how that is lost."""
    if kind == "role":
        role = engine.role("keeper")
        return role, role.close
    if kind == "lock":
        stack = contextlib.ExitStack()
        return stack.enter_context(engine.lock("keeper")), stack.close
    return claimed(engine), lambda: claimed(engine)


@pytest.mark.rule("F5")
@pytest.mark.parametrize("how", ["plain", "future", "transaction", "committed later"])
@pytest.mark.parametrize("call", WRITES)
def test_f5_after_its_claim_is_lost_nothing_is_written(
    engine: xl.Engine, topic: xl.Topic, other: xl.Topic, call: str, how: str
) -> None:
    """Memory stays as it is, reads go on, and also see what the next holder writes."""
    with xl.SharedMap(topic, claim=claimed(engine)) as shared:
        shared.put("a", 1)
        txn = engine.transaction() if how != "plain" and how != "future" else None
        if how == "committed later":
            WRITES[call](shared, txn)
        claim = claimed(other.engine)
        if txn is not None and how == "committed later":
            with pytest.raises(xl.OwnershipLostError, match="shard"):
                txn.commit()
            txn = engine.transaction()
        for _ in range(2):
            with pytest.raises(xl.OwnershipLostError, match="shard"):
                WRITES[call](Later(shared) if how == "future" else shared, txn)
        assert (shared.get("a"), topic.next_offset) == (1, 1)
        with xl.SharedMap(other, claim=claim) as successor:
            assert successor.put("a", 5) == 1
        assert (shared.get("a", latest=True), everything(shared)) == (5, {"a": 5})


@pytest.mark.parametrize("kind", ["claim", "role", "lock"])
def test_i8_a_state_is_bound_to_a_claim_a_role_or_a_lock(
    engine: xl.Engine, topic: xl.Topic, kind: str
) -> None:
    holder, lose = held(engine, kind)
    with open_counts(topic, claim=holder) as counts:
        counts.write(lambda now: [["n", 1]])
        with engine.transaction() as txn:
            counts.write(lambda now: [["n", 1]], transaction=txn)
        lose()
        with pytest.raises(xl.OwnershipLostError):
            counts.write(lambda now: [["n", 1]])
        assert counts.read(dict, latest=True) == {"n": 2}
    with pytest.raises(xl.OwnershipLostError):
        open_counts(topic, claim=holder)


def keep_writing(state: State) -> None:
    """Claim, bind a map, and write to it."""
    claim = claimed(state.engine)
    bound: Map = xl.SharedMap(state.topic, claim=claim)
    bound.put("n", 1)
    state.kept["map"], state.kept["claim"] = bound, claim


def write_in_a_transaction(state: State) -> str:
    """Write in a transaction; its state, or the name of its error."""
    txn = state.engine.transaction()
    try:
        state.kept["map"].put("n", -1, transaction=txn)
        txn.commit()
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return txn.state


def begin_a_transaction(state: State) -> None:
    """Write in a transaction, which `commit` commits."""
    state.kept["txn"] = txn = state.engine.transaction()
    state.kept["map"].put("n", -1, transaction=txn)


def commit(state: State) -> str:
    """Commit it; its state, or the name of its error."""
    try:
        state.kept["txn"].commit()
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return str(state.kept["txn"].state)


@pytest.mark.rule("B2")
@pytest.mark.parametrize("begun", [True, False], ids=["begun before", "begun after"])
def test_b2_a_holder_that_was_stopped_and_severed_writes_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], begun: bool
) -> None:
    zombie = worker(keepalive=None)
    zombie.call(keep_writing)
    if begun:
        zombie.call(begin_a_transaction)
    stop_outside(engine.path, zombie.pid)
    with xl.SharedMap(topic, claim=claimed(engine)) as successor:
        assert within(lambda: successor.put("n", 2)) == 1
        zombie.signal(signal.SIGCONT)
        lost = "OwnershipLostError"
        assert zombie.call(commit if begun else write_in_a_transaction) == lost
        with pytest.raises(Exception, match=lost):
            zombie.call(call_map, "put", "n", -1)
        assert zombie.call(call_map, "get", "n", latest=True) == 2
        assert everything(successor) == {"n": 2}
    assert topic.next_offset == 2


def test_i8_a_claim_that_is_lost_while_the_map_waits_for_its_topic_ends_the_wait(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with topic.producer("exclusive"), xl.SharedMap(topic, claim=claimed(engine)) as shared:
        waiting = shared.put_async("a", 1)
        while not topic.waiters:
            assert not waiting.done()
        claimed(engine)
        with pytest.raises(xl.OwnershipLostError, match="shard"):
            within(waiting.result)


def test_a4_a_claim_that_cannot_bind_a_map_is_refused(
    engine: xl.Engine, topic: xl.Topic, other: xl.Topic
) -> None:
    with pytest.raises(TypeError, match="claim=7"):
        xl.SharedMap(topic, claim=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engine of the topic"):
        xl.SharedMap(other, claim=claimed(engine))
    role = engine.role("keeper", topics=["orders"])
    with pytest.raises(ValueError, match="owns topic 'orders' itself"):
        xl.SharedMap(topic, claim=role)


def test_i8_an_awaitable_map_is_bound_to_a_claim(path: str) -> None:
    async def run() -> Any:
        async with aio.open(path) as engine, engine.own({"shard": None}) as claim:
            async with aio.SharedMap(engine.topic("orders"), claim=claim) as shared:
                await shared.put("a", 1)
                async with engine.own({"shard": None}):
                    with pytest.raises(xl.OwnershipLostError):
                        await shared.put("a", 2)
                return await shared.get("a")

    assert asyncio.run(run()) == 1
