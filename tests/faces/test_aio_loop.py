"""exclusivelog.aio never blocks its loop, also while a call waits.

A heartbeat goes on in the loop while every call of the package waits: for another owner, for the
writer lock that another thread or a stopped process has, for a hand-over, for a full queue, for
threads that send by the same producer. A blocked loop would stand still for as long as they wait;
each of them waits for more than a second. All of it with asyncio's own loop, and with uvloop where
it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core, aio
from testing import loops
from testing.loops import Heartbeat, LoopFactory, held, paused, play, soon
from testing.processes import PATIENCE, State, Worker, open_producer, threads_since, until, values
from testing.states import add

EXCLUSIVE, WAIT = "exclusive", "wait_for_exclusive"
STILL = 1.2  # seconds that a call waits
LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]

pytestmark = pytest.mark.once


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> LoopFactory | None:
    """What makes the loop."""
    if request.param == "asyncio":
        return None
    import uvloop

    return uvloop.new_event_loop


# ---- the judge ---------------------------------------------------------------------------


def test_the_heartbeat_sees_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Heartbeat:
        async with Heartbeat() as heartbeat:
            until(lambda: heartbeat.longest > 0.5)
        return heartbeat

    heartbeat = play(main)
    assert 0.5 < heartbeat.longest < PATIENCE
    monkeypatch.setattr(loops, "STARVED", 1_000 * PATIENCE)
    with pytest.raises(AssertionError, match="test_aio_loop"):
        heartbeat.check()


# ---- the writer lock -----------------------------------------------------------------------


class Things:
    """An open object of every kind, and calls of every method that may have to wait."""

    def __init__(self, engine: aio.Engine, path: str, place: Path) -> None:
        self.engine, self.path, self.place = engine, path, place

    async def open(self) -> None:
        engine = self.engine
        self.topic = await engine.topic("orders")
        await engine.topic("empty")
        self.producer = await self.topic.producer(max_pending_bytes=1)
        self.owner = await engine.topic("owned").producer(EXCLUSIVE)
        self.closing = await engine.topic("other").producer()
        await self.producer.send_many([b"1", b"2"], keys=["a", "b"])
        self.reader = await self.topic.reader(group="g")
        self.group_reader = await engine.reader(["other"], group="g")
        self.claim = await engine.own({"r": None})
        self.role = await engine.role("role", topics=["of-role"])
        self.leaving = await engine.role("leaving")
        self.map = await aio.SharedMap[str, int](engine.topic("map"))
        self.state = await aio.SharedState[Any, Any](engine.topic("state"), dict, add)
        await self.map.put("a", 1)
        await self.state.write(lambda state: [["a", 1]])

    def calls(self) -> Iterator[tuple[str, Awaitable[Any]]]:
        engine, topic, producer = self.engine, self.topic, self.producer
        yield "open", opened_and_closed(aio.open(self.path, "second"))
        yield "topic", engine.topic("new")
        yield "a producer", opened_and_closed(topic.producer())
        yield "a producer of a new topic", opened_and_closed(engine.topic("newer").producer())
        yield "producers", engine.producers(["x", "y"])
        yield "own", engine.own({"s": None})
        yield "role", engine.role("second", topics=["z"])
        yield "a reader of a group", topic.reader(group="h")
        yield "a reader of many", engine.reader(["orders"], group="i")
        yield "a map", aio.SharedMap(engine.topic("map-2"))
        yield "send", producer.send(b"3")
        yield "send with a timeout", producer.send(b"3", timeout=PATIENCE)
        yield "receipt", producer.send_async(b"4")
        yield "another receipt", producer.send_async(b"5")
        yield "send_many", producer.send_many([b"6"])
        yield "flush", producer.flush()
        yield "announce", self.owner.announce({"a": "b"})
        yield "close", self.closing.close()
        yield "commit", self.reader.commit()
        yield "commit of many", self.group_reader.commit()
        yield "transaction", self.transact()
        yield "put", self.map.put("b", 2)
        yield "put_async", self.map.put_async("c", 2)
        yield "get", self.map.get("a", latest=True)
        yield "update", self.map.update("a", lambda old: old + 1)
        yield "snapshot", self.map.snapshot()
        yield "write", self.state.write(lambda state: [["b", 1]])
        yield "read", self.state.read(dict, latest=True)
        yield "watch", next_of(self.map.watch(start=0))
        yield "compact", topic.compact()
        yield "retention", topic.retention()
        yield "trim", topic.trim(0)
        yield "terminate", engine.topic("empty").terminate()
        yield "move", self.owner.move(engine.id)
        yield "unload", engine.unload("owned", engine.id)
        yield "unload_async", engine.unload_async("owned", engine.id)
        yield "cancel_unload", engine.cancel_unload("owned")
        yield "release", self.claim.release()
        yield "a role's producer", self.role.producer("of-role")
        yield "the close of a role", self.leaving.close()
        yield "delete_topic", engine.delete_topic("of-nobody")
        yield "delete_role", engine.delete_role("none")
        yield "backup", engine.backup(self.place / "backup")
        yield "verify", engine.verify()
        yield "stats", topic.stats()
        yield "stats of the engine", engine.stats()
        yield "history", next_of(engine.history())
        yield "catch_up", next_of(producer.catch_up(topic.reader()))

    async def transact(self) -> None:
        async with self.engine.transaction() as txn:
            txn.require(self.claim)
            txn.commit_cursor(self.reader)
            await self.producer.send(b"7", transaction=txn)

    def facts(self) -> None:
        """The calls that are not awaited."""
        engine, topic = self.engine, self.topic
        engine.topics(), engine.engines(), engine.claims(), engine.groups(), engine.roles()
        engine.inside(), engine.supports("backup"), engine.info, engine.closed
        names = """
            epoch first_offset next_offset owner holders transfer transfers waiters kind serializers
            announcement
        """
        for name in names.split():
            getattr(topic, name)
        with pytest.raises(xl.TopicNotFoundError, match=r"await engine\.topic"):
            assert engine.topic("not-yet").next_offset
        self.producer.state, self.producer.last_sequence_id, self.producer.topic_epoch
        self.claim.is_valid, self.claim.check(), self.role.state, self.role.generations
        self.reader.position, self.reader.has_message_available(), self.reader.seek("latest")
        topic.reader("latest").has_message_available()
        self.role.claim.is_valid, self.group_reader.positions


async def opened_and_closed(opening: Any) -> None:
    async with opening:
        pass


async def next_of(found: AsyncIterator[Any]) -> Any:
    return await anext(aiter(found), None)


async def go_through(path: str, place: Path, locked: Callable[[], Any]) -> list[str]:
    """Make every call while `locked()`; returns those that had to wait until it was over."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    async with aio.open(path, "mine") as engine:
        things = Things(engine, path, place)
        await things.open()
        async with Heartbeat() as heartbeat:
            with locked():
                tasks = {name: asyncio.ensure_future(call) for name, call in things.calls()}
                things.facts()
                await asyncio.sleep(STILL)
                waiting = [name for name, task in tasks.items() if not task.done()]
            for name, task in tasks.items():
                with contextlib.suppress(xl.ExclusiveLogError):  # some of them exclude one another
                    assert not isinstance(await task, BaseException), name
        heartbeat.check()
        return waiting


MANY = {"topic", "a producer", "own", "role", "send", "receipt", "flush", "transaction", "put"}


@pytest.mark.sampled
def test_while_another_thread_has_the_writer_lock(
    path: str, tmp_path: Path, engine: xl.Engine, loop: LoopFactory | None
) -> None:
    waited = play(lambda: go_through(path, tmp_path, lambda: held(engine)), loop=loop)
    assert set(waited) >= MANY


def be_stopped_inside(state: State) -> None:
    """Hold the append mutex, as a process that is stopped in an append: no other process can append
    or change anything."""
    assert state.engine.ledger.journal is not None
    state.engine.ledger.journal.lock()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.sampled
def test_while_a_stopped_process_is_inside_an_append(
    path: str, tmp_path: Path, worker: Callable[..., Worker], loop: LoopFactory | None
) -> None:
    process = worker(keepalive=None)

    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        process.start(be_stopped_inside)
        process.await_stop()
        try:
            yield
        finally:
            process.kill()

    waited = play(lambda: go_through(path, tmp_path, stopped), loop=loop)
    assert set(waited) >= MANY


# ---- one producer ------------------------------------------------------------------------


@contextlib.contextmanager
def no_appends(engine: xl.Engine) -> Iterator[None]:
    """Another thread is in the middle of an append while the block runs."""
    entered, leave = threading.Event(), threading.Event()
    journal = engine.ledger.journal
    assert journal is not None

    def hold() -> None:
        journal.lock()
        entered.set()
        leave.wait(PATIENCE)
        journal.unlock()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert entered.wait(PATIENCE)
        try:
            yield
        finally:
            leave.set()
            holding.result(PATIENCE)


def past_the_queue(producer: xl.Producer) -> bool:
    """Does a thread append by this producer now? A message with the first sequence id again is
    queued in no case."""
    appender = producer._sender.session.appender
    return appender.add(b"", None, None, None, 0, True, False) is _core.NOT_NOW


@pytest.mark.sampled
def test_while_a_thread_sends_by_the_same_producer(
    engine: xl.Engine, topic: xl.Topic, loop: LoopFactory | None
) -> None:
    """It is past the queue, and nothing may be queued before it is through."""
    plain = topic.producer()
    plain.send(b"first")

    async def main() -> list[int]:
        producer = aio.Producer(plain)
        async with Heartbeat() as heartbeat:
            with no_appends(engine):
                by_thread = asyncio.ensure_future(asyncio.to_thread(plain.send, b"by a thread"))
                await soon(lambda: past_the_queue(plain))
                sends = [asyncio.ensure_future(producer.send(b"%d" % n)) for n in (1, 2)]
                await asyncio.sleep(0)
                receipt = producer.send_async(b"3")
                sends.append(asyncio.ensure_future(producer.send(b"4")))
                await asyncio.sleep(STILL)
                assert not any(send.done() for send in (*sends, receipt))
            found = [await by_thread, *[await send for send in sends[:2]]]
            found += [await receipt, await sends[2]]
        heartbeat.check()
        return found

    assert play(main, loop=loop) == [1, 2, 3, 4, 5]
    assert values(topic)[1:] == [b"by a thread", b"1", b"2", b"3", b"4"]
    plain.close()


@pytest.mark.sampled
def test_while_the_queue_is_full(path: str, engine: xl.Engine, loop: LoopFactory | None) -> None:
    async def main() -> list[int]:
        async with aio.open(path) as mine:
            async with mine.topic("orders").producer(max_pending_bytes=10) as producer:
                async with Heartbeat() as heartbeat:
                    with no_appends(engine):
                        receipts = [producer.send_async(b"x" * 100) for _ in range(50)]
                        sends = [asyncio.create_task(producer.send(b"y" * 100)) for _ in range(50)]
                        flush = asyncio.create_task(producer.flush())
                        await asyncio.sleep(STILL)
                        assert not any(one.done() for one in (*receipts, *sends, flush))
                    await flush
                    found = [await one for one in (*receipts, *sends)]
                heartbeat.check()
                return found

    assert play(main, loop=loop) == list(range(100))


@pytest.mark.sampled
def test_while_a_hand_over_pauses_the_producer(
    engine: xl.Engine, topic: xl.Topic, loop: LoopFactory | None
) -> None:
    """Sends wait in the order in which they were made, and so does what comes after them."""
    plain = topic.producer(EXCLUSIVE)

    async def main() -> list[Any]:
        producer, mine = aio.Producer(plain), aio.Engine(engine)
        async with Heartbeat() as heartbeat:
            with paused(plain):
                first = producer.send_async(b"0")
                second = asyncio.create_task(producer.send(b"1", timeout=PATIENCE))
                await asyncio.sleep(0)
                third = producer.send_async(b"2")
                many = asyncio.create_task(producer.send_many([b"x", b"x"]))
                flush = asyncio.create_task(producer.flush())
                announce = asyncio.create_task(producer.announce({"a": "b"}))
                read = asyncio.create_task(
                    next_of(producer.catch_up(mine.topic("orders").reader()))
                )
                txn = mine.transaction()
                assert await producer.send(b"y", transaction=txn) == -1
                commit = asyncio.create_task(txn.commit())
                late = asyncio.create_task(producer.send(b"late", timeout=0.1))
                with pytest.raises(xl.WaitTimeoutError, match="still on its way"):
                    await late
                with pytest.raises(asyncio.InvalidStateError, match="await it"):
                    first.result()
                await asyncio.sleep(STILL)
                waiting = (first, second, third, many, flush, announce, commit)
                assert not any(one.done() for one in waiting)
            found = [await one for one in waiting]
            await read
        heartbeat.check()
        assert first.result() == found[0]
        return found[:3]

    offsets = play(main, loop=loop)
    sent = [value for value in values(topic) if value != b"y"]  # a transaction stands by itself
    assert sent == [b"0", b"1", b"2", b"x", b"x"]
    assert sorted(offsets) == offsets
    plain.close()


def test_e2_what_is_sent_after_a_message_that_waits_follows_it(topic: xl.Topic) -> None:
    """A batch, which a thread sends, does not overtake it either."""
    plain = topic.producer(EXCLUSIVE)

    async def main() -> None:
        producer = aio.Producer(plain)
        for _ in range(20):
            with paused(plain):
                first = producer.send_async(b"first")
                rest = asyncio.create_task(producer.send_many([b"second", b"third"]))
                await asyncio.sleep(0.01)
                last = producer.send_async(b"last")
            await asyncio.gather(first, rest, last)

    play(main)
    sent = values(topic)
    assert [value for value in sent if value != b"last"] == [b"first", b"second", b"third"] * 20
    assert [value for value in sent if value in (b"first", b"last")] == [b"first", b"last"] * 20
    plain.close()


def test_e2_a_cancelled_send_does_not_wait_for_the_hand_over(
    topic: xl.Topic, loop: LoopFactory | None
) -> None:
    """It leaves no thread behind, however many there were: other calls need the loop's threads."""
    plain = topic.producer(EXCLUSIVE)

    async def main() -> int:
        producer = aio.Producer(plain)
        before = set(threading.enumerate())
        with paused(plain):
            for _ in range(60):
                sending = asyncio.create_task(producer.send(b"never"))
                await asyncio.sleep(0.002)
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
            assert len(threads_since(before)) <= 1
            assert await asyncio.to_thread(lambda: "a thread is free") == "a thread is free"
            last = asyncio.create_task(producer.send(b"last"))
            await asyncio.sleep(0.05)
        return await last

    assert play(main, loop=loop) == 0
    assert values(topic) == [b"last"]
    plain.close()


# ---- others ------------------------------------------------------------------------------


@pytest.mark.sampled
def test_while_another_owner_has_it_all(
    path: str, worker: Callable[..., Worker], loop: LoopFactory | None
) -> None:
    process = worker()
    process.call(open_producer, EXCLUSIVE)

    async def main() -> None:
        async with aio.open(path) as engine, aio.open(path, "other") as other:
            topic = await engine.topic("orders")
            held = await other.own("g", {"r": 7})
            role = await other.role("role")
            shared: aio.SharedMap[str, int] = await aio.SharedMap(engine.topic("orders-2"))
            owner = await other.topic("orders-2").producer(EXCLUSIVE)
            async with Heartbeat() as heartbeat:
                calls = {
                    "producer": topic.producer(WAIT),
                    "own": engine.own("g", {"r": 5}, timeout=PATIENCE),
                    "role": engine.role("role"),
                    "reader": topic.reader().read_next(),
                    "put": shared.put("a", 1),
                    "watch": shared.watch().read_next(),
                }
                tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
                await asyncio.sleep(STILL)
                assert not [name for name, task in tasks.items() if task.done()]
                process.kill()
                await held.release()
                await role.close()
                await owner.close()
                async with await tasks["producer"] as producer:
                    await producer.send(b"x")
                for name in ("role", "reader", "put", "watch"):
                    await asyncio.wait_for(tasks[name], PATIENCE)
                with pytest.raises(xl.OwnershipError, match="out of date"):
                    await tasks["own"]
            heartbeat.check()
            await shared.close()

    play(main, loop=loop)


@pytest.mark.long
def test_while_a_task_reads_a_long_backlog(
    path: str, topic: xl.Topic, loop: LoopFactory | None
) -> None:
    """Each way to read lets other tasks run now and then, also where no message has to be waited
    for."""
    with topic.producer() as producer:
        for _ in range(20):
            producer.send_many([b"x" * 100] * 50_000)

    async def by_next(reader: aio.Reader) -> int:
        for _ in range(300_000):
            await reader.read_next()
        return 300_000

    async def by_batches(reader: aio.Reader) -> int:
        count = 0
        while found := await reader.read_batch(100):
            count += len(found)
        return count

    async def counted(found: AsyncIterator[Any]) -> int:
        return sum([1 async for _ in found])

    async def main() -> list[int]:
        async with aio.open(path) as engine:
            mine = await engine.topic("orders")
            ways = (
                by_next,
                by_batches,
                lambda r: counted(aiter(r)),
                lambda r: counted(r.values()),
                lambda r: counted(r.follow(timeout=0)),
            )
            found = []
            for way in ways:
                async with mine.reader() as reader, Heartbeat() as heartbeat:
                    found.append(await way(reader))
                heartbeat.check()
            return found

    assert play(main, loop=loop) == [300_000] + 4 * [1_000_000]


# ---- uvloop --------------------------------------------------------------------------------


@pytest.mark.skipif("uvloop" not in LOOPS, reason="uvloop is not installed")
def test_uvloop_runs_it_all(path: str, topic: xl.Topic) -> None:
    """Each kind of call, and cancelling one."""
    import uvloop

    async def main() -> tuple[Any, ...]:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        async with aio.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as owner:
            offsets = await asyncio.gather(*(owner.send(b"%d" % n) for n in range(100)))
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(engine.topic("orders").producer(WAIT))
                await soon(lambda: topic.waiters)
                waiting.cancel()
            async with aio.SharedMap[str, int](engine.topic("map")) as shared:
                await asyncio.gather(*(shared.put(f"{n}", n) for n in range(100)))
                return offsets, topic.waiters, sum(await shared.values())

    assert play(main, loop=uvloop.new_event_loop) == (list(range(100)), [], sum(range(100)))
