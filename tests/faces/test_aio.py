"""exclusivelog.aio: the same promises, awaited. Every method does what its counterpart does,
for many tasks, and in several loops. What becomes of the cancelled is in test_aio_cancel.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.aio.readers import Watch
from testing.loops import free, held, play, soon
from testing.processes import PATIENCE, Worker, collect, forked, open_producer, send, values, within
from testing.states import add, everything, one_more

EXCLUSIVE, WAIT, FENCING = "exclusive", "wait_for_exclusive", "exclusive_with_fencing"


# ---- the judge ---------------------------------------------------------------------------


def test_the_judge_sees_what_is_left() -> None:
    """A thread, and an exception that was never retrieved."""
    go_on = threading.Event()

    async def leave_a_thread() -> None:
        threading.Thread(target=go_on.wait, args=(PATIENCE,)).start()

    async def leave_an_exception() -> None:
        asyncio.get_running_loop().create_future().set_exception(ZeroDivisionError())
        collect()

    with pytest.raises(AssertionError, match="never retrieved"):
        play(leave_an_exception)
    with pytest.raises(AssertionError, match="did not come true"):
        play(leave_a_thread, patience=0.5)
    go_on.set()


# ---- every method ------------------------------------------------------------------------


def test_the_example_of_its_docstring(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer(WAIT) as producer:
                assert await producer.send(b"hello") == 0
            assert [message.value async for message in topic.reader()] == [b"hello"]

    play(main)


def test_an_engine(path: str, engine: xl.Engine) -> None:
    async def main() -> None:
        opened = await aio.open(path, "mine", {"a": "b"}, keepalive=50.0)
        try:
            assert (opened.name, opened.path, opened.info.properties) == ("mine", path, {"a": "b"})
            await opened.topic("orders")
            assert opened.topics() == ["orders"]
            with pytest.raises(xl.TopicNotFoundError):
                opened.topic("none", create=False)
            assert {info.name for info in engine.engines()} == {"test", "mine"}
            assert (await opened.verify()).ok
            assert (await opened.stats())["topics"] == 1
        finally:
            await opened.close()
        await opened.close()
        with pytest.raises(xl.EngineClosedError):
            opened.topic("orders")
        with pytest.raises(xl.LedgerError):
            await aio.open(path + "-none", create=False)
        with pytest.raises(ValueError, match="keepalive"):
            async with aio.open(path, keepalive=-1):
                pass

    play(main)
    assert len(engine.engines()) == 1


def test_a_topic(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer(EXCLUSIVE) as producer:
                await producer.send_many([b"1", b"2", b"3"], keys=["a", "b", "a"])
                assert (topic.name, topic.epoch, topic.next_offset) == ("orders", 1, 3)
                assert topic.owner.producer_name == producer.name
            assert topic.owner is None
            assert await topic.compact() == 2
            await topic.compression(None)
            assert (await topic.stats()).compression is None
            assert await topic.trim(before=1) == 1
            assert await topic.trim(dt.datetime.now(dt.UTC) - dt.timedelta(days=1)) == 1
            assert await topic.trim(max_bytes=1 << 30) == topic.first_offset == 1
            compacted = topic.reader(read_compacted=True)
            assert [m.offset async for m in compacted] == [1, 2]
            assert await topic.terminate() == 3
            with pytest.raises(xl.TopicTerminatedError):
                await topic.producer()

    play(main)


def test_a_producer(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            producer = await topic.producer(WAIT, name="me", priority=3, serializer="json")
            facts = (producer.name, producer.priority, producer.topic_epoch, producer.state)
            assert facts == ("me", 3, 1, "open")
            assert await producer.send({"a": 1}, key="k", properties={"p": "q"}, event_time=7) == 0
            receipts = [producer.send_async(number) for number in range(5)]
            assert [await receipt for receipt in receipts] == [1, 2, 3, 4, 5]
            assert await producer.send_many([1, 2], timeout=PATIENCE) == range(6, 8)
            assert await producer.send(None, timeout=PATIENCE) == 8
            await producer.flush()
            await producer.flush(timeout=PATIENCE)
            async with engine.transaction() as transaction:
                assert await producer.send(9, transaction=transaction) == -1
                await producer.send_many([10], transaction=transaction)
            assert transaction.offsets == {producer: range(9, 11)}
            assert transaction.state == "committed"
            with contextlib.suppress(ZeroDivisionError):
                async with engine.transaction() as transaction:
                    await producer.send(11, transaction=transaction)
                    raise ZeroDivisionError
            assert (transaction.state, transaction.offsets) == ("aborted", {})
            await engine.transaction().commit()
            with pytest.raises(xl.DuplicateSequenceError):
                await producer.send(1, sequence_id=0)
            with pytest.raises(TypeError, match="key"):
                await producer.send(1, key=1)
            await producer.close()
            await producer.close()
            with pytest.raises(xl.EngineClosedError):
                await producer.send(1)
            first = await topic.reader(deserializer="json").read_next()
            assert (first.value, first.key, first.properties) == ({"a": 1}, b"k", {"p": "q"})

    play(main)


def test_a_producer_that_is_refused_or_fenced(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            owner = await topic.producer(EXCLUSIVE)
            with pytest.raises(xl.ProducerFencedError):
                await topic.producer(EXCLUSIVE)
            with pytest.raises(xl.ProducerBusyError):
                await topic.producer()
            with pytest.raises(xl.WaitTimeoutError):
                await topic.producer(WAIT, timeout=0.05)
            with pytest.raises(ValueError, match="priority"):
                await topic.producer(priority="high")
            rival = await topic.producer(FENCING)
            for call in (lambda: owner.send(b"x"), lambda: owner.send_many([b"x"]), owner.flush):
                with pytest.raises(xl.ProducerFencedError):
                    await call()
            assert (owner.state, rival.state) == ("fenced", "open")
            await owner.close()
            await rival.close()
            assert free(topic.sync)

    play(main)


def test_a_reader(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"%d" % number for number in range(10)])
            async with topic.reader(2, inclusive=False) as reader:
                assert (reader.position, reader.has_message_available()) == (3, True)
                assert (await reader.read_next()).offset == 3
                assert (await reader.read_next(timeout=0)).offset == 4
                assert [m.offset for m in await reader.read_batch(3)] == [5, 6, 7]
                assert [m.offset async for m in reader] == [8, 9]
                assert [m async for m in reader] == []
                reader.seek("earliest")
                async for message in reader:
                    if message.offset == 4:
                        break
                assert [m.offset async for m in reader.follow(timeout=0.05)] == [5, 6, 7, 8, 9]
                begin = time.monotonic()
                with pytest.raises(xl.WaitTimeoutError):
                    await reader.read_next(timeout=0.3)
                assert 0.3 <= time.monotonic() - begin < PATIENCE
            with pytest.raises(xl.EngineClosedError):
                await reader.read_next()

    play(main)


def test_a_reader_is_a_table_only_where_that_does_not_stop_the_loop(path: str) -> None:
    """The page of asyncio says how: as a stream, it would be read at once, in the loop's thread."""
    pyarrow = pytest.importorskip("pyarrow")

    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("t")
            async with topic.producer() as producer:
                await producer.send_many([b"a", b"b"])
            reader = topic.reader()
            with pytest.raises(TypeError):
                pyarrow.table(reader)
            table = await asyncio.to_thread(pyarrow.table, reader.sync)
            assert table["value"].to_pylist() == [b"a", b"b"]

    play(main)


def test_values_of_a_reader(path: str) -> None:
    """... stop where those of its counterpart stop, and wait without holding up the loop."""

    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"%d" % number for number in range(4)])
                async with topic.reader() as reader:
                    async for value in reader.values():
                        if value == b"1":
                            break
                    assert reader.position == 2
                    assert [value async for value in reader.values()] == [b"2", b"3"]
                    values = reader.values(follow=True, timeout=PATIENCE)
                    coming = asyncio.ensure_future(anext(values))
                    await producer.send(b"4")
                    assert await coming == b"4"
                    assert [value async for value in reader.values(follow=True, timeout=0)] == []
                    with pytest.raises(ValueError, match="follow"):
                        await anext(reader.values(timeout=1))
            async with engine.reader(["orders"], group="g") as reader:
                got = [found async for found in reader.values()][3:]
                assert got == [("orders", b"3"), ("orders", b"4")]

    play(main)


def test_a_reader_of_a_group(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"a", b"b", b"c"])
            first = topic.reader(group="g")
            await first.read_next()
            await first.commit()
            second = await topic.reader(group="g")
            assert (second.group, (await second.read_next()).value) == ("g", b"b")
            for call in (first.commit, first.read_next):
                with pytest.raises(xl.ReaderFencedError):
                    await call()
            with pytest.raises(ValueError, match="group"):
                await topic.reader().commit()
            await second.close()

    play(main)


def test_a_reader_of_several_topics(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            producers = {name: await engine.topic(name).producer() for name in "abc"}
            for name, producer in producers.items():
                await producer.send_many([name.encode(), name.encode() * 2])
            async with engine.reader(list("abc"), group="g", generation=4) as reader:
                assert (reader.group, reader.topics) == ("g", ["a", "b", "c"])
                assert [name for name, _ in await reader.read_batch(2)] == ["a", "b"]
                assert (await reader.read_next())[1].value == b"c"
                await reader.commit()
                rest = [(name, message.value) async for name, message in reader]
                assert rest == [("a", b"aa"), ("b", b"bb"), ("c", b"cc")]
                assert [found async for found in reader.follow(timeout=0)] == []
                with pytest.raises(xl.WaitTimeoutError, match="a, b, c"):
                    await reader.read_next(timeout=0.01)
                with pytest.raises(ValueError, match="timeout"):
                    await reader.read_next(timeout=-1)
                for name in "ba":
                    waiting = asyncio.create_task(reader.read_next(PATIENCE))
                    await asyncio.sleep(0.02)
                    assert not waiting.done()
                    await producers[name].send(b"new")
                    found, message = await waiting
                    assert (found, message.value) == (name, b"new")
                waiting = asyncio.create_task(reader.read_next())
                await asyncio.sleep(0.02)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                async with engine.transaction() as txn:
                    txn.commit_cursor(reader)
                    await producers["c"].send(b"x", transaction=txn)
                second = await engine.topic("b").reader(group="g", generation=4)
                assert second.position == 3
                with pytest.raises(xl.ReaderFencedError):
                    await reader.read_next()
            assert [info.topic for info in engine.groups()] == ["a", "b", "c"]

    play(main)


def test_claims_and_what_they_guard(path: str) -> None:
    async def main() -> None:
        told: asyncio.Queue[aio.Claim] = asyncio.Queue()

        def note(claim: aio.Claim, _: Exception) -> None:
            told.put_nowait(claim)

        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            claim = await engine.own({"r": None}, on_lost=note)
            bound = await topic.producer(claim=claim)
            free = await topic.producer()
            assert [info.generations for info in engine.claims()] == [{"r": 1}]
            async with engine.transaction() as txn:
                txn.require(claim)
                txn.require(bound)
                await free.send(b"1", transaction=txn)
            assert await bound.send(b"2") == 1
            late = engine.transaction()
            late.require(claim)
            await free.send(b"3", transaction=late)
            second = await engine.own(None, {"r": None}, timeout=PATIENCE)
            assert await asyncio.wait_for(told.get(), PATIENCE) is claim
            with pytest.raises(xl.ProducerRevokedError):
                await bound.send(b"4")
            with pytest.raises(xl.OwnershipLostError):
                await late.commit()
            assert late.state == "aborted"
            await second.release()
            assert topic.next_offset == 2

    play(main)


def test_a_reader_waits_for_another_process(path: str, worker: Callable[..., Worker]) -> None:
    process = worker()
    process.call(open_producer, "shared")

    async def main() -> None:
        async with aio.open(path) as engine:
            reader = engine.topic("orders").reader()
            waiting = asyncio.create_task(reader.read_next())
            await asyncio.sleep(0.6)  # longer than it waits at a time
            assert not waiting.done()
            process.start(send, b"there")
            assert (await waiting).value == b"there"
            process.answer()

    play(main)


def test_a_reader_at_the_end_of_a_terminated_topic(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            following = asyncio.create_task(all_of(topic.reader().follow()))
            waiting = asyncio.create_task(topic.reader(1).read_next())
            async with topic.producer() as producer:
                await producer.send(b"last")
            await asyncio.sleep(0.05)
            await topic.terminate()
            assert [m.value for m in await following] == [b"last"]
            with pytest.raises(xl.TopicTerminatedError):
                await waiting

    play(main)


async def all_of(messages: AsyncIterator[xl.Message]) -> list[xl.Message]:
    return [message async for message in messages]


def test_a_map(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with aio.SharedMap(topic, "str", value="json") as shared:
                assert await shared.get("a") is None
                await shared.put("a", 1)
                assert (await shared.get("a"), await shared.get("b", 5, latest=True)) == (1, 5)
                assert await shared.get_or_default("b", 6, latest=True) == 6
                assert await shared.put_if_absent("a", 2) == xl.Change(False, 1, 1)
                assert await shared.replace("a", 1, 2) == xl.Change(True, 1, 2)
                assert (await shared.update("a", one_more)).value == 3
                await shared.put_all({"b": 1, "c": 2})
                changed = await shared.update_multiple(lambda k: k > "a", lambda k, v: v * 10)
                assert changed == {"b": 10, "c": 20}
                assert await shared.delete("b") == 10
                assert await shared.list_keys(latest=True) == ["a", "c"]
                seen: list[Any] = []
                pairs = await shared.scan(lambda *pair: seen.append(pair), latest=True)
                assert pairs == seen == [("a", 3), ("c", 20)]
                assert await shared.snapshot() == 8
                await shared.clear()
                assert await shared.scan() == []
                with pytest.raises(ZeroDivisionError):
                    await shared.update("a", lambda old: 1 / 0)
            with pytest.raises(xl.EngineClosedError):
                await shared.get("a")
            assert free(topic.sync)

    play(main)


def test_a_state(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with aio.SharedState(topic, initial=dict, apply=add) as counts:
                assert await counts.write(lambda state: [["a", 1], ["b", 2]]) is None
                found = await counts.write(lambda state: [["a", state["b"]]], dict)
                assert found == {"a": 3, "b": 2}
                assert await counts.read(len) == 2
                assert await counts.read(dict, latest=True) == {"a": 3, "b": 2}
                assert await counts.snapshot() == 3
                with pytest.raises(ZeroDivisionError):
                    await counts.read(lambda state: 1 / 0)
            assert free(topic.sync)
            with pytest.raises(TypeError, match="apply"):
                await aio.SharedState(topic, initial=dict)

    play(main)


def test_an_unload(path: str) -> None:
    async def main() -> None:
        async with aio.open(path, "a") as a, aio.open(path, "b") as b:
            owner = await a.topic("orders").producer(EXCLUSIVE)
            waiting = asyncio.create_task(b.topic("orders").producer(WAIT))
            await soon(lambda: a.topic("orders").waiters)
            [move] = await a.unload("orders", to=b.id)
            assert (move.state, (await waiting).topic_epoch) == ("owned", 2)
            await owner.close()

    play(main)


PAIRS = [
    (xl.Producer, aio.Producer),
    (xl.Reader, aio.Reader),
    (xl.SharedMap, aio.SharedMap),
    (xl.SharedState, aio.SharedState),
    (xl.GroupReader, aio.GroupReader),
    (xl.Engine, aio.Engine),
]


@pytest.mark.parametrize(("plain", "awaitable"), PAIRS)
def test_arguments_are_the_same(plain: type, awaitable: type) -> None:
    """... as far as they are spelled out, and so are their defaults."""
    for name, method in vars(awaitable).items():
        if name.startswith("_") or name == "create" or not inspect.isfunction(method):
            continue
        theirs = inspect.signature(getattr(plain, name)).parameters
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                assert parameter.name in theirs
                assert parameter.default == theirs[parameter.name].default


# ---- what differs, and should not --------------------------------------------------------


def test_b9_a_send_that_takes_too_long_says_so_as_everywhere(path: str, engine: xl.Engine) -> None:
    async def main() -> None:
        async with aio.open(path) as mine, mine.topic("orders").producer() as producer:
            with held(engine), pytest.raises(xl.WaitTimeoutError, match="still on its way"):
                await producer.send(b"x", timeout=0.05)

    play(main)


@pytest.mark.parametrize(
    ("timeout", "error", "says"),
    [
        (0.05, xl.WaitTimeoutError, "within 0.05 s"),
        (-1, ValueError, "timeout"),
        ("1", TypeError, "timeout"),
    ],
)
def test_g5_timeouts_of_a_reader_are_looked_at_as_everywhere(
    path: str, timeout: Any, error: type[Exception], says: str
) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            with pytest.raises(error, match=says):
                await engine.topic("orders").reader().read_next(timeout)

    play(main)


def test_f1_waiting_for_a_claim_does_not_hold_up_the_loop(path: str, engine: xl.Engine) -> None:
    claim = engine.own("group", {"a": 7})

    async def main() -> None:
        async with aio.open(path) as mine:
            owning = asyncio.create_task(own(mine))
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert not owning.done()
            claim.release()
            with pytest.raises(xl.OwnershipError, match="out of date"):
                await owning

    async def own(mine: aio.Engine) -> None:
        await mine.own("group", {"a": 6}, timeout=2 * PATIENCE)

    play(main)


# ---- many tasks, many loops --------------------------------------------------------------


def test_many_tasks_send_at_once(path: str, topic: xl.Topic) -> None:
    async def main() -> list[int]:
        async with aio.open(path) as mine, mine.topic("orders").producer() as producer:
            return await asyncio.gather(*(producer.send(b"%d" % n) for n in range(500)))

    offsets = play(main)
    assert offsets == list(range(500))
    assert values(topic) == [b"%d" % number for number in range(500)]


@pytest.mark.long
def test_many_tasks_wait_for_their_turn(path: str, topic: xl.Topic) -> None:
    """Waiting costs no thread: there are more of them than asyncio has."""

    async def take_writer_lock(mine: aio.Engine, number: int) -> int:
        async with mine.topic("orders").producer(WAIT, name=f"{number}") as producer:
            await producer.send(producer.name.encode())
            return int(producer.topic_epoch)

    async def main() -> list[int]:
        async with aio.open(path) as mine:
            return await asyncio.gather(*(take_writer_lock(mine, number) for number in range(60)))

    assert sorted(play(main)) == list(range(1, 61))
    assert sorted(int(value) for value in values(topic)) == list(range(60))
    assert free(topic)


def test_many_tasks_call_one_map(path: str, topic: xl.Topic) -> None:
    async def main() -> dict[str, int]:
        async with aio.open(path) as a, aio.open(path) as b:
            async with (
                aio.SharedMap(a.topic("orders")) as first,
                aio.SharedMap(b.topic("orders")) as second,
            ):
                calls = [shared.update("n", one_more) for shared in (first, second) * 60]
                seen = await asyncio.gather(*calls)
                assert sorted(made.value for made in seen) == list(range(1, 121))
                assert await first.get("n", latest=True) == 120
                return dict(await second.scan(latest=True))

    assert play(main) == {"n": 120}
    assert free(topic)


def test_many_readers_all_see_everything(path: str) -> None:
    async def read(topic: aio.Topic) -> list[int]:
        return [m.offset async for m in topic.reader().follow(timeout=PATIENCE)]

    async def main() -> list[list[int]]:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            reading = [asyncio.create_task(read(topic)) for _ in range(20)]
            async with topic.producer() as producer:
                for _ in range(30):
                    await producer.send(b"x")
                    await asyncio.sleep(0.002)
            await topic.terminate()
            return await asyncio.gather(*reading)

    assert play(main) == [list(range(30))] * 20


def test_many_readers_that_wait_do_not_hold_up_the_rest(path: str) -> None:
    """They take no thread of the loop's, which has four: a producer could have none then."""
    submitted: list[Any] = []

    class Executor(ThreadPoolExecutor):
        def submit(self, *call: Any, **options: Any) -> Any:
            submitted.append(call)
            return super().submit(*call, **options)

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(Executor(4))
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            readers = [topic.reader() for _ in range(40)]
            submitted.clear()
            waiting = [asyncio.create_task(reader.read_next()) for reader in readers]
            await asyncio.sleep(0.3)
            meanwhile = list(submitted)
            async with topic.producer() as producer:
                assert submitted
                await producer.send(b"x")
            await asyncio.gather(*waiting)
            return meanwhile

    assert play(main) == []


def test_two_loops_in_two_threads_share_an_engine(engine: xl.Engine, topic: xl.Topic) -> None:
    """They also share a producer and a map. Each loop awaits its own calls, and callbacks run only
    in their own loop."""
    shared: xl.SharedMap[str, int] = xl.SharedMap(engine.topic("map"))
    plain = topic.producer()
    both = threading.Barrier(2)

    async def work(name: str) -> list[int]:
        await asyncio.to_thread(both.wait, PATIENCE)
        producer, own_map = aio.Producer(plain), aio.SharedMap.wrap(shared)
        reader = aio.Topic(topic).reader()
        offsets = []
        for number in range(100):
            offsets.append(await producer.send(f"{name} {number}".encode()))
            await own_map.update("n", one_more)
            await own_map.put(name, number)
            assert await own_map.get(name) == number
        read = [m.offset async for m in reader]
        assert read == list(range(len(read)))
        assert set(offsets) <= set(read)
        return offsets

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda name: asyncio.run(work(name)), ("a", "b"), timeout=PATIENCE)
    assert sorted(first + second) == list(range(200))
    assert everything(shared) == {"a": 99, "b": 99, "n": 200}
    plain.close()
    shared.close()


def test_the_loop_goes_on_while_a_map_waits(
    path: str, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_producer, EXCLUSIVE)

    async def main() -> int:
        async with aio.open(path) as mine:
            async with aio.SharedMap(mine.topic("orders")) as shared:
                writing = asyncio.create_task(shared.put("a", 1))
                turns = 0
                while turns < 50:
                    await asyncio.sleep(0.002)
                    turns += 1
                assert not writing.done()
                process.kill()
                await writing
                return turns

    assert play(main) == 50
    assert within(lambda: free(topic))


def read_in_a_loop(path: str) -> bytes:
    """In a child made by fork(): its own engine, and its own loop."""

    async def main() -> bytes:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            reader = topic.reader("latest")
            reading = asyncio.create_task(reader.read_next(timeout=PATIENCE / 3))
            await asyncio.sleep(0.1)
            async with topic.producer() as producer:
                await producer.send(b"of the child")
            return (await reading).value or b""

    return asyncio.run(main())


def test_c5_a_child_that_is_forked_while_a_watch_is_made_can_read(path: str) -> None:
    """A thread of the parent is just starting the watch at the end of a topic, and holds a lock
    that no thread of the child will release."""
    held, let_go = threading.Event(), threading.Event()

    def make_a_watch() -> None:
        with Watch.lock:
            held.set()
            let_go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make_a_watch)
        try:
            assert held.wait(PATIENCE)
            assert forked(lambda: read_in_a_loop(path)) == b"of the child"
        finally:
            let_go.set()
        making.result(PATIENCE)


# ---- hand-over ---------------------------------------------------------------------------


def test_e2_a_send_during_a_hand_over_waits_without_the_loop(path: str, topic: xl.Topic) -> None:
    """The topic is on its way: the tasks that send wait, in their order, and the others go on."""
    with xl.open(path) as engine:
        there = engine.topic("orders").producer(EXCLUSIVE)
        told: list[str] = []

        async def main() -> None:
            producer = aio.Producer(there)
            assert await producer.send(b"0") == 0
            there._sender.session.pauses.begin()  # the hand-over begins
            sends = [asyncio.create_task(producer.send(b"%d" % n)) for n in (1, 2, 3)]
            await asyncio.sleep(0.2)
            told.append("the loop goes on")
            assert not any(send.done() for send in sends)
            there._sender.session.pauses.end()  # and is given up
            assert await asyncio.gather(*sends) == [1, 2, 3]
            assert await producer.send(b"4") == 4

        within(lambda: play(main))
        there.close()
        assert told
        assert values(topic) == [b"%d" % n for n in range(5)]


def test_e2_a_send_follows_its_topic_within_the_process(path: str, topic: xl.Topic) -> None:
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        there = a.topic("orders").producer(EXCLUSIVE)

        async def main() -> None:
            producer = aio.Producer(there)
            assert await producer.send(b"0") == 0
            moves = await aio.Engine(a).unload("orders", to=b.id)
            assert [move.state for move in moves] == ["assigned"]
            assert await asyncio.gather(*(producer.send(b"%d" % n) for n in (1, 2))) == [1, 2]

        within(lambda: play(main))
        there.close()
