"""`engine.producers` opens many producers in one transaction: all or none (rules A2, A6, B6); or it
queues them, in as few transactions as their time allows (rule D9)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
import exclusivelog.aio
from exclusivelog.local.log.appending import Committer
from exclusivelog.local.ownership import sessions
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.records import U64
from exclusivelog.producer import ProducerFuture
from testing.processes import PATIENCE, WAIT, collect, until, values, within

NAMES = [f"t{i}" for i in range(30)]


def snapshot(engine: xl.Engine) -> list[tuple[str, int, object]]:
    """Each topic's name, epoch and owner."""
    topics = [engine.topic(name) for name in engine.topics()]
    owners = [topic.owner for topic in topics]
    names = [owner and owner.producer_name for owner in owners]
    return [(t.name, t.epoch, name) for t, name in zip(topics, names, strict=True)]


@pytest.mark.parametrize("mode", ["shared", "exclusive", "exclusive_with_fencing"])
def test_a2_they_are_opened_in_one_transaction(engine: xl.Engine, mode: str) -> None:
    before = engine.stats()["transactions"]
    producers = engine.producers(NAMES, mode, properties={"rack": "7"})
    assert engine.stats()["transactions"] <= before + 2  # a checkpoint may come between
    assert [p.topic for p in producers] == NAMES
    assert len({p.name for p in producers}) == len(NAMES)
    receipts = [p.send_async(p.topic.encode()) for p in producers]
    assert [r.result(PATIENCE) for r in receipts] == [0] * len(NAMES)
    for name in NAMES:
        topic = engine.topic(name)
        assert values(topic) == [name.encode()]
        [holder] = topic.holders
        assert holder.properties == {"rack": "7"}
        assert topic.epoch == (0 if mode == "shared" else 1)
    for producer in producers:
        producer.close()
    assert all(not engine.topic(name).holders for name in NAMES)


def test_g2_each_counts_the_sequence_ids_of_its_topic(engine: xl.Engine) -> None:
    for producer in engine.producers(["a", "b"], "exclusive", name="p"):
        if producer.topic == "a":
            producer.send(b"x", sequence_id=41)
        producer.close()
    a, b = engine.producers(["a", "b"], "exclusive", name="p")
    assert (a.last_sequence_id, b.last_sequence_id) == (41, -1)


def test_a2_one_that_is_refused_opens_none(engine: xl.Engine, path: str) -> None:
    """No topic is made, no epoch used up, and no producer fenced before it is refused."""
    with xl.open(path, name="other") as other:
        shared = other.topic("t1").producer(name="taken")
        owner = other.topic("t20").producer("exclusive", name="owner")
        other.topic("t25").terminate()
        before = snapshot(engine)
        with pytest.raises(xl.ProducerFencedError, match="t1"):
            engine.producers(NAMES, "exclusive")
        with pytest.raises(xl.ProducerBusyError, match="'taken'"):
            engine.producers(NAMES[:5], "shared", name="taken")
        with pytest.raises(xl.TopicTerminatedError):
            engine.producers(NAMES, "exclusive_with_fencing")
        assert snapshot(engine) == before
        assert (shared.send(b"1"), owner.send(b"2")) == (0, 0)


def test_b6_fencing_takes_all_topics_over(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="other") as other:
        former = other.producers(NAMES, "exclusive")
        producers = engine.producers(NAMES, "exclusive_with_fencing")
        assert [p.topic_epoch for p in producers] == [2] * len(NAMES)
        for producer in former:
            with pytest.raises(xl.ProducerFencedError):
                producer.send(b"too late")


def test_a4_wrong_arguments(engine: xl.Engine) -> None:
    for names in ("orders", [1], [b"orders"]):
        with pytest.raises(TypeError):
            engine.producers(names)  # type: ignore[arg-type]
    for names in (["a", "b", "a"], ["__events__"], [""], ["a\n"]):
        with pytest.raises(ValueError):
            engine.producers(names)
    for option in ("timeout", "topic_epoch", "priority", "settle", "nonsense"):
        with pytest.raises(TypeError, match=option):
            engine.producers(["a"], **{option: 1})
    for option in ("topic_epoch", "nonsense"):
        with pytest.raises(TypeError, match=option):
            engine.producers(["a"], WAIT, **{option: 1})
    for wrong in ({"wait": 1}, {"wait": None}, {"timeout": "1"}, {"settle": -1}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            engine.producers(["a"], WAIT, **wrong)
    assert engine.producers([]) == []
    assert engine.topics() == []


def test_a2_an_interrupt_after_the_commit_leaves_no_owner(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_all = Sessions.request_all

    def interrupted(*args):
        request_all(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sessions, "request_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.producers(NAMES, "exclusive")
    until(lambda: all(owner is None for _, _, owner in snapshot(engine)))


def test_a2_an_orphan_with_a_damaged_row_keeps_no_other_topic(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        with engine.backend.notifications.lock:  # the background thread releases nothing yet
            request_all(*args)
            damage(engine, "producers", "t0")
            patch.undo()
            raise KeyboardInterrupt

    request_all = Sessions.request_all
    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "request_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.producers(NAMES, "exclusive")
    until(lambda: {name for name, _, owner in snapshot(engine) if owner} == {"t0"})


def test_dropped_producers_give_their_topics_back(engine: xl.Engine) -> None:
    producers = engine.producers(NAMES, "exclusive")
    assert all(owner for _, _, owner in snapshot(engine))
    del producers
    collect()
    until(lambda: all(owner is None for _, _, owner in snapshot(engine)))


@pytest.mark.rule("G8")
def test_g8_a_dropped_producer_keeps_no_topic_from_being_deleted(engine: xl.Engine) -> None:
    for _ in range(20):
        producer = engine.topic("brief").producer("exclusive", linger=60)
        producer.send_async(b"x")
        del producer
        engine.delete_topic("brief")


def test_f5_they_are_bound_to_a_claim(engine: xl.Engine) -> None:
    claim = engine.own("group", {"r": None})
    producers = engine.producers(["a", "b"], "exclusive", claim=claim)
    assert [p.send(b"x") for p in producers] == [0, 0]
    claim.release()
    for producer in producers:
        with pytest.raises(xl.ProducerRevokedError):
            producer.send(b"y")
    with pytest.raises(xl.OwnershipLostError):
        engine.producers(["c"], "exclusive", claim=claim)
    assert "c" not in engine.topics()


def test_they_are_awaitable(path: str) -> None:
    async def main() -> list[int]:
        async with exclusivelog.aio.open(path) as engine:
            producers = await engine.producers(["a", "b"], "exclusive", name="p")
            return [await p.send(b"x") for p in producers]

    assert asyncio.run(main()) == [0, 0]


# ---- D9: waiting for many topics ---------------------------------------------------------


@pytest.mark.rule("D9")
def test_d9_many_topics_are_waited_for_in_few_transactions(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number follows from the time that a transaction may take, not from that of the
    topics."""
    monkeypatch.setattr(sessions, "CHUNK_SECONDS", PATIENCE)
    with xl.open(path, name="leader") as leader:
        leading = leader.producers(NAMES, "exclusive", name="p")
        before = engine.stats()["transactions"]
        standby = engine.producers(NAMES, WAIT, wait=False, name="p", priority=3)
        assert engine.stats()["transactions"] <= before + 2  # a checkpoint may come between
        waiting = [waiter for name in NAMES for waiter in engine.topic(name).waiters]
        assert {(w.engine_id, w.producer_name, w.priority) for w in waiting} == {
            (engine.id, "p", 3)
        }
        assert len(waiting) == len(NAMES)
        for producer in leading:
            producer.send(b"led")
            producer.close()
        granted = [future.result(PATIENCE) for future in standby]
    assert [producer.topic for producer in granted] == NAMES
    assert {(p.topic_epoch, p.last_sequence_id, p.send(b"x")) for p in granted} == {(2, 0, 1)}


@pytest.mark.rule("D9")
def test_d9_a_transaction_takes_as_many_topics_as_its_time_allows(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "CHUNK_SECONDS", 0.0)
    before = engine.stats()["transactions"]
    futures = engine.producers(NAMES, WAIT, wait=False)
    assert engine.stats()["transactions"] >= before + len(NAMES)
    assert [future.result(0).topic for future in futures] == NAMES  # all were free


def test_d9_a_topic_that_is_refused_fails_alone(engine: xl.Engine, path: str) -> None:
    engine.topic("t3").terminate()
    with xl.open(path, name="leader") as leader:
        owner = leader.topic("t5").producer("exclusive")
        futures = engine.producers(NAMES, WAIT, wait=False)
        assert isinstance(futures[3].exception(0), xl.TopicTerminatedError)
        assert [i for i, future in enumerate(futures) if not future.done()] == [5]
        owner.close()
        assert futures[5].result(PATIENCE).topic == "t5"


@pytest.mark.rule("D5")
def test_d5_many_that_wait_end_at_their_timeout_and_leave_nothing(
    engine: xl.Engine, path: str
) -> None:
    with xl.open(path, name="leader") as leader:
        owner = leader.topic("t5").producer("exclusive", name="leading")
        with pytest.raises(xl.WaitTimeoutError, match="t5"):
            engine.producers(NAMES, WAIT, timeout=0.05)
        until(lambda: [name for _, _, name in snapshot(engine) if name] == ["leading"])
        assert owner.send(b"x") == 0
        until(lambda: not any(engine.topic(name).waiters for name in NAMES))


@pytest.mark.rule("D9")
def test_d9_the_first_request_that_fails_ends_the_wait_for_many(
    engine: xl.Engine, path: str
) -> None:
    engine.topic("t3").terminate()
    with xl.open(path, name="leader") as leader:
        owner = leader.topic("t1").producer("exclusive", name="leading")  # waited for first
        with pytest.raises(xl.TopicTerminatedError, match="t3"):
            within(lambda: engine.producers(NAMES, WAIT))
        until(lambda: [name for _, _, name in snapshot(engine) if name] == ["leading"])
        assert owner.send(b"x") == 0


@pytest.mark.rule("A2")
@pytest.mark.parametrize("at", ["registered", "waiting"])
def test_a2_an_interrupt_of_a_wait_for_many_leaves_no_trace(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def interrupted(*args):
        if at == "registered":
            queue_some(*args)
        patch.undo()  # what is granted already is closed by the same method
        raise KeyboardInterrupt

    queue_some = Sessions.queue_some
    with xl.open(path, name="leader") as leader:
        owner = leader.topic("t5").producer("exclusive", name="leading")
        with monkeypatch.context() as patch:
            if at == "registered":
                patch.setattr(Sessions, "queue_some", interrupted)
            else:
                patch.setattr("exclusivelog.waits.in_slices", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.producers(NAMES, WAIT)
        until(lambda: [name for _, _, name in snapshot(engine) if name] == ["leading"])
        until(lambda: not engine.topic("t5").waiters)
        owner.send(b"x")


@pytest.mark.rule("H2")
def test_h2_a_full_disk_fails_those_that_are_not_queued_yet(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "CHUNK_SECONDS", 0.0)
    queue_some, calls = Sessions.queue_some, []

    def full(*args):
        calls.append(args)
        if len(calls) == 10:
            raise xl.LedgerFullError("no space left")
        return queue_some(*args)

    monkeypatch.setattr(Sessions, "queue_some", full)
    futures = engine.producers(NAMES, WAIT, wait=False)
    errors = [future.exception(0) for future in futures]
    assert errors[:9] == [None] * 9
    assert {type(error) for error in errors[9:]} == {xl.LedgerFullError}
    assert [name for _, _, name in snapshot(engine) if name] == [
        future.result(0).name for future in futures[:9]
    ]


def damage(engine: xl.Engine, table: str, name: str, key: bytes = b"") -> None:
    """Damage the row of this topic whose key goes on with `key`, or its first row."""
    with engine.ledger.write_concurrent() as tables:
        topic = engine.topic(name).id
        found = key or next(iter(tables.rows.under(table, topic)), (b"",))[0]
        tables.rows.put(table, U64.pack(topic) + found, b"damaged")


@pytest.mark.rule("D9")
@pytest.mark.parametrize("seconds", [0.0, PATIENCE], ids=["one by one", "together"])
@pytest.mark.parametrize("table", ["topics", "producers", "queue"])
def test_d9_a_topic_with_a_damaged_row_fails_alone(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch, table: str, seconds: float
) -> None:
    """Its request may have changed rows before the damage was found: nothing of that stays."""
    monkeypatch.setattr(sessions, "CHUNK_SECONDS", seconds)
    engine.producers(NAMES)
    bad = ["t0", "t7", "t8", "t29"]
    with xl.open(path, name="leader") as leader:
        if table == "queue":
            leading = leader.producers(bad, "exclusive")
            queued = leader.producers(bad, WAIT, wait=False)
        for name in bad:
            damage(engine, table, name, b"p" if table == "producers" else b"")
        futures = engine.producers(NAMES, WAIT, wait=False, name="p")
        errors = {f"t{i}": future.exception(0) for i, future in enumerate(futures)}
        assert [name for name, error in errors.items() if error] == bad
        for name in bad:
            error = errors[name]
            assert isinstance(error, xl.LedgerCorruptedError)
            assert (error.topic, repr(table) in str(error)) == (name, True)
        granted = {f"t{i}" for i, future in enumerate(futures) if not future.exception(0)}
        with engine.ledger.read() as tables:
            mine = tables.sessions.of_engine(engine.id, "")
        assert {session.topic for session in mine} == {engine.topic(name).id for name in granted}
        for future in futures:
            if not future.exception(0):
                assert future.result().send(b"x") == 0
        if table == "queue":
            assert [future.done() for future in queued] == [False] * len(bad)
            assert [producer.send(b"led") for producer in leading] == [0] * len(bad)


@pytest.mark.rule("A2")
@pytest.mark.parametrize("mode", ["shared", "exclusive", "exclusive_with_fencing"])
def test_a2_a_damaged_row_opens_none_of_those_that_do_not_wait(
    engine: xl.Engine, mode: str
) -> None:
    engine.producers(NAMES)
    damage(engine, "producers", "t7", b"p")
    with pytest.raises(xl.LedgerCorruptedError, match=r"^topic 't7': .*'producers'"):
        engine.producers(NAMES, mode, name="p")
    assert {owner for _, _, owner in snapshot(engine)} == {None}


@pytest.mark.rule("A2")
@pytest.mark.parametrize("held", [True, False], ids=["queued", "granted"])
def test_a2_one_that_fails_after_its_transaction_leaves_no_place_behind(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """No thread can be started for one of the requests, although its transaction has committed:
    the others wait or are granted, and it neither keeps a place in the queue nor owns the topic."""

    def failing(original: Any) -> Callable[..., Any]:
        calls = itertools.count()

        def call(*args: Any) -> Any:
            if next(calls) == 7:
                raise xl.LedgerError("the system refuses another thread to this process")
            return original(*args)

        return call

    monkeypatch.setattr(sessions, "CHUNK_SECONDS", PATIENCE)
    place = (Committer, "start") if held else (ProducerFuture, "make")
    with xl.open(path, name="leader") as leader:
        leading = leader.producers(NAMES, "exclusive") if held else []
        with monkeypatch.context() as patch:
            call = failing(getattr(*place))
            patch.setattr(*place, lambda *args: call(*args))
            futures = engine.producers(NAMES, WAIT, wait=False)
        [failed] = [i for i, future in enumerate(futures) if future.done() and future.exception(0)]
        for producer in leading:
            producer.close()
        others = [f.result(PATIENCE) for i, f in enumerate(futures) if i != failed]
        topic = engine.topic(NAMES[failed])
        until(lambda: not topic.waiters and topic.owner is None)
        assert [producer.send(b"x") for producer in others] == [0] * (len(NAMES) - 1)
        assert topic.producer("exclusive").send(b"x") == 0


def test_d9_a_closed_or_read_only_engine_refuses(engine: xl.Engine, path: str) -> None:
    with xl.open(path, readonly=True) as reading, pytest.raises(xl.LedgerError):
        reading.producers(["a"], WAIT)
    engine.close()
    with pytest.raises(xl.EngineClosedError):
        engine.producers(["a"], WAIT)


@pytest.mark.rule("F5")
def test_f5_those_that_wait_end_with_their_claim(engine: xl.Engine, path: str) -> None:
    claim = engine.own("group", {"r": None})
    with xl.open(path, name="leader") as leader:
        leading = leader.producers(["a", "b"], "exclusive")
        futures = engine.producers(["a", "b"], WAIT, wait=False, claim=claim)
        claim.release()
        for future in futures:
            with pytest.raises(xl.ProducerRevokedError):
                future.result(PATIENCE)
        for future in engine.producers(["c"], WAIT, wait=False, claim=claim):
            with pytest.raises(xl.OwnershipLostError):
                future.result(PATIENCE)
        assert (len(leading), engine.topics()) == (2, ["a", "b"])


def test_d9_asyncio_waits_for_many(path: str) -> None:
    async def main() -> None:
        async with exclusivelog.aio.open(path) as leader, exclusivelog.aio.open(path) as engine:
            leading = await leader.producers(["a", "b"], "exclusive")
            waiting = asyncio.ensure_future(engine.producers(["a", "b"], WAIT))
            tasks = await engine.producers(["a", "b"], WAIT, wait=False, priority=-1)
            until_all = engine.topic("a")
            while len(until_all.waiters) < 2:
                await asyncio.sleep(0.001)
            tasks[0].cancel()
            for producer in leading:
                await producer.close()
            granted = await asyncio.wait_for(waiting, PATIENCE)
            assert [await producer.send(b"x") for producer in granted] == [0, 0]
            while until_all.waiters:
                await asyncio.sleep(0.001)
            for producer in granted:
                await producer.close()
            assert (await tasks[1]).topic_epoch == 3
            assert tasks[0].cancelled()

    asyncio.run(main())


@pytest.mark.rule("D5")
def test_d5_asyncio_a_task_that_is_cancelled_before_its_first_step_leaves_its_queue(
    path: str,
) -> None:
    async def main() -> None:
        async with exclusivelog.aio.open(path) as leader, exclusivelog.aio.open(path) as engine:
            leading = await leader.topic("a").producer("exclusive")
            tasks = await engine.producers(["a"], WAIT, wait=False)
            tasks[0].cancel()
            while engine.topic("a").waiters:
                await asyncio.sleep(0.001)
            assert await leading.send(b"x") == 0

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.rule("A2")
def test_a2_asyncio_a_cancelled_wait_for_many_leaves_no_trace(path: str) -> None:
    async def main() -> None:
        async with exclusivelog.aio.open(path) as leader, exclusivelog.aio.open(path) as engine:
            owner = await leader.topic("b").producer("exclusive")
            for wait in (True, False):
                opening = engine.producers(["a", "b", "c"], WAIT, wait=wait)  # type: ignore[call-overload]

                async def enter(opening=opening) -> None:
                    async with opening:
                        await asyncio.sleep(PATIENCE)

                task = asyncio.create_task(enter())
                while not engine.topic("b").waiters:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                topics = [engine.topic(name) for name in "abc"]
                while any(t.waiters for t in topics) or topics[0].owner or topics[2].owner:
                    await asyncio.sleep(0.001)
            assert await owner.send(b"x") == 0

    asyncio.run(main())
