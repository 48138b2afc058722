"""exclusivelog.aio: a cancelled call leaves nothing behind, wherever it waits.

It leaves no waiter, no owner, no message that was read and lost, no thread, and no warning of
asyncio about an exception that was never retrieved. A call in progress may be completed: a message
that was being sent is in the log, or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.aio import calls
from exclusivelog.aio.producers import Ticket
from exclusivelog.life import OpenEngine, open_here
from exclusivelog.local.log import appending
from testing.loops import cancelled_after, free, held, play, soon
from testing.processes import PATIENCE, collect, until, values
from testing.states import add, everything, one_more

EXCLUSIVE, WAIT, FENCING = "exclusive", "wait_for_exclusive", "exclusive_with_fencing"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled call waits for its clean-up as long as a test does: its thread may get no core
    for a second."""
    monkeypatch.setattr(calls, "GIVEN_BACK_SECONDS", PATIENCE)


# ---- cancelling a producer ---------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_d5_a_cancelled_wait_leaves_the_queue(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    owner = topic.producer(EXCLUSIVE)

    async def main() -> None:
        async with aio.open(path) as mine:
            for _ in range(20):
                waiting = asyncio.create_task(mine.topic("orders").producer(WAIT))
                await soon(lambda: topic.waiters)
                await asyncio.sleep(0.005)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert topic.waiters == []
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await mine.topic("orders").producer(WAIT)
            assert topic.waiters == []

    play(main)
    assert (owner.state, topic.epoch) == ("open", 1)


@pytest.mark.usefixtures("patient")
def test_d5_so_does_one_that_is_cancelled_while_it_queues(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the queue already, but the thread that has put it there has not come back."""
    owner, queue_up = topic.producer(EXCLUSIVE), xl.Topic.producer_async

    def take_long(self: xl.Topic, *args: Any, **options: Any) -> Any:
        future = queue_up(self, *args, **options)
        time.sleep(0.2)
        return future

    async def main() -> None:
        async with aio.open(path) as mine:
            monkeypatch.setattr(xl.Topic, "producer_async", take_long)
            waiting = asyncio.create_task(mine.topic("orders").producer(WAIT))
            await soon(lambda: topic.waiters)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert topic.waiters == []

    play(main)
    assert (owner.state, topic.epoch) == ("open", 1)


@pytest.mark.long
def test_d5_so_does_one_that_was_cancelled_at_once(path: str, topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)

    async def main() -> None:
        async with aio.open(path) as mine:
            for turns in (-1, -2, -3):
                await cancelled_after(turns, mine.topic("orders").producer(WAIT))
                await asyncio.sleep(0.2)  # its thread has its time
                await soon(lambda: not topic.waiters)

    play(main)
    owner.close()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["shared", EXCLUSIVE, WAIT, FENCING])
def test_a2_cancelled_at_any_moment_it_has_nothing(path: str, topic: xl.Topic, mode: str) -> None:
    """The topic is free: it is granted at once, and the cancel comes before, or behind."""

    async def main() -> None:
        async with aio.open(path) as mine:
            for delay in [-1, -2, -3, -5, -10, *(n * 0.0004 for n in range(25))]:
                # As long as the test above fails, the one before may still be in its thread.
                with contextlib.suppress(xl.ProducerFencedError, xl.ProducerBusyError):
                    producer = await cancelled_after(delay, mine.topic("orders").producer(mode))
                    if producer is not None:
                        await producer.close()
                await soon(lambda: free(topic))
            await asyncio.sleep(0.2)
            await soon(lambda: free(topic))

    play(main)
    with topic.producer(EXCLUSIVE, timeout=0) as last:
        last.send(b"free")


@pytest.mark.long
def test_d5_a_cancel_that_races_with_the_grant_leaves_no_orphan(path: str, topic: xl.Topic) -> None:
    chance = random.Random(8)

    async def main() -> None:
        async with aio.open(path) as mine:
            for _ in range(100):
                owner = topic.producer(EXCLUSIVE)
                waiting = asyncio.create_task(mine.topic("orders").producer(WAIT))
                await soon(lambda: topic.waiters)
                closing = asyncio.get_running_loop().run_in_executor(None, owner.close)
                await asyncio.sleep(chance.choice((0, 0, 0.001, 0.002, 0.003, 0.005)))
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    producer = await waiting
                    assert producer.state == "open"
                    await producer.close()
                await closing
                await soon(lambda: free(topic))

    play(main)
    assert free(topic)


def test_c1_a_block_that_is_cancelled_gives_the_topic_back(path: str, topic: xl.Topic) -> None:
    """Once, or once more while it is being closed."""

    async def hold(mine: aio.Engine, inside: asyncio.Event) -> None:
        async with mine.topic("orders").producer(EXCLUSIVE) as producer:
            await producer.send(b"x")
            inside.set()
            await asyncio.sleep(PATIENCE)

    async def main() -> None:
        async with aio.open(path) as mine:
            for cancels in (1, 2, 3):
                inside = asyncio.Event()
                holding = asyncio.create_task(hold(mine, inside))
                await inside.wait()
                for _ in range(cancels):
                    holding.cancel()
                    await asyncio.sleep(0)
                with pytest.raises(asyncio.CancelledError):
                    await holding
                await soon(lambda: free(topic))

    play(main)


def test_c1_a_close_that_was_cancelled_can_be_called_again(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            for delay in (-1, -2, 0, 0.001, 0.002):
                producer = await mine.topic("orders").producer(EXCLUSIVE)
                producer.send_async(b"x")
                await cancelled_after(delay, producer.close())
                await producer.close()
                await soon(lambda: free(topic))

    play(main)
    assert values(topic) == [b"x"] * 5


# ---- cancelling a send -------------------------------------------------------------------


def test_b9_a_cancelled_send_is_in_the_log_or_not_and_harms_no_other(
    path: str, topic: xl.Topic
) -> None:
    """The others' messages are all there, in order; of those that were cancelled, some."""

    async def main() -> dict[int, bytes]:
        acknowledged = {}
        async with aio.open(path) as mine, mine.topic("orders").producer() as producer:
            for number in range(60):
                delay = -(number % 4) - 1 if number % 2 else number * 0.0001
                await cancelled_after(delay, producer.send(b"cancelled %d" % number))
                await cancelled_after(delay, producer.send_many([b"cancelled %d" % number] * 3))
                await cancelled_after(delay, producer.flush())
                value = b"%d" % number
                # A batch that was cancelled may be behind it: its thread has begun later.
                acknowledged[await producer.send(value)] = value
        return acknowledged

    acknowledged = play(main)
    found = values(topic)
    others = {n: value for n, value in enumerate(found) if not value.startswith(b"cancelled")}
    assert list(others.items()) == list(acknowledged.items())
    assert all(found.count(value) in (1, 3, 4) for value in found if value.startswith(b"c"))


def test_b9_a_send_that_was_cancelled_while_no_thread_could_commit(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    async def main() -> None:
        async with aio.open(path) as mine, mine.topic("orders").producer() as producer:
            with held(engine):
                sending = [asyncio.create_task(producer.send(b"%d" % n)) for n in range(20)]
                await asyncio.sleep(0.05)
                for task in sending[::2]:
                    task.cancel()
                await soon(lambda: all(task.done() for task in sending[::2]))
                assert all(task.cancelled() for task in sending[::2])
            assert await asyncio.gather(*sending[1::2]) == list(range(1, 20, 2))

    play(main)
    assert values(topic) == [b"%d" % number for number in range(20)]


def test_g11_a_commit_that_is_cancelled_before_it_begins_has_aborted(path: str) -> None:
    """No thread of the executor is free for it. The next transaction has the reader's position."""

    async def bill(transaction: aio.Transaction, reader: aio.Reader) -> None:
        async with asyncio.timeout(0.1), transaction:
            await reader.read_next(timeout=0)
            transaction.commit_cursor(reader)

    async def main() -> list[bytes | None]:
        loop, leave = asyncio.get_running_loop(), threading.Event()
        async with (
            aio.open(path) as mine,
            mine.topic("orders").producer() as producer,
            mine.topic("orders").reader(group="readers") as reader,
        ):
            await producer.send(b"0")
            with ThreadPoolExecutor(1) as pool:
                loop.set_default_executor(pool)
                busy = loop.run_in_executor(None, leave.wait, PATIENCE)
                transaction = mine.transaction()
                with pytest.raises(TimeoutError):
                    await bill(transaction, reader)
                assert (transaction.state, reader.position) == ("aborted", 0)
                leave.set()
                await busy
                async with mine.transaction() as again:
                    message = await reader.read_next(timeout=0)
                    await producer.send(message.value, transaction=again)
                    again.commit_cursor(reader)
                assert again.state == "committed"
                with pytest.raises(xl.TransactionAbortedError):
                    await transaction.commit()
                loop.set_default_executor(ThreadPoolExecutor(4))
            return [each.value async for each in mine.topic("orders").reader()]

    assert play(main) == [b"0", b"0"]


@pytest.mark.parametrize("asked", [True, False])
def test_b9_flush_raises_the_error_of_a_late_message_whose_receipt_nobody_has_asked(
    path: str, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """It was queued by a task, because another message was in front of it."""
    place = appending._place

    def fail(*args: Any) -> None:
        monkeypatch.setattr(appending, "_place", place)
        raise MemoryError("now")

    async def main() -> None:
        async with aio.open(path) as mine, mine.topic("orders").producer() as producer:
            await producer.send(b"before")
            in_front = Ticket(producer._line)
            receipt = producer.send_async(b"late")
            monkeypatch.setattr(appending, "append_together", lambda _, appenders: appenders)
            monkeypatch.setattr(appending, "_place", fail)
            in_front.leave()
            await soon(receipt.done)
            told = receipt if asked else producer.flush()
            with pytest.raises(xl.LedgerError, match="nothing was written"):
                await told
            await producer.flush()
            assert isinstance(receipt.exception(), xl.LedgerError)

    play(main)


# ---- cancelling a reader -----------------------------------------------------------------


def test_g5_a_cancelled_read_takes_no_message(path: str) -> None:
    """Messages come all the time, and most reads are cancelled."""
    chance = random.Random(4)

    async def write(topic: aio.Topic) -> None:
        async with topic.producer() as producer:
            for number in range(300):
                await producer.send(b"%d" % number)
                await asyncio.sleep(chance.random() * 0.002)

    async def main() -> list[int]:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            reader, got = topic.reader(), []
            writing = asyncio.create_task(write(topic))
            while len(got) < 300:
                delay = chance.choice((-1, -2, 0, 0.001, 0.003, 0.01))
                message = await cancelled_after(delay, reader.read_next())
                if message is not None:
                    got.append(message.offset)
            await writing
        return got

    assert play(main) == list(range(300))


def test_g5_a_cancelled_walk_can_be_taken_up_where_it_stopped(path: str) -> None:
    async def walk(messages: AsyncIterator[xl.Message], got: list[int]) -> None:
        async for message in messages:
            got.append(message.offset)
            await asyncio.sleep(0)

    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"x"] * 200)
            for make in (lambda r: aiter(r), lambda r: r.follow(timeout=1)):
                reader, got = topic.reader(), list[int]()
                for turns in range(1, 12):
                    await cancelled_after(-turns, walk(make(reader), got))
                    assert got == list(range(len(got)))
                    assert reader.position == len(got)
                assert 20 < len(got) < 200

    play(main)


def test_g5_also_where_it_lets_others_have_their_turn(path: str) -> None:
    async def walk(reader: aio.Reader, got: list[int]) -> None:
        async for message in reader:
            got.append(message.offset)

    async def main() -> None:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"x"] * 2500)
            reader, got = topic.reader(), list[int]()
            await cancelled_after(-1, walk(reader, got))
            assert 0 < len(got) < 2500
            await walk(reader, got)
            assert got == list(range(2500))

    play(main)


def test_g5_closing_ends_a_read_that_waits(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            reader = engine.topic("orders").reader()
            waiting = asyncio.create_task(reader.read_next())
            await asyncio.sleep(0.05)
            await reader.close()
            with pytest.raises(xl.EngineClosedError):
                await waiting
            last = asyncio.create_task(engine.topic("orders").reader().read_next())
            await asyncio.sleep(0.05)
        with pytest.raises(xl.EngineClosedError):
            await last

    play(main)


# ---- cancelling open and close -----------------------------------------------------------

DELAYS = [-1, -2, 0, 0.0005, 0.001, 0.002, 0.005, 0.02]


def test_a2_an_open_that_was_cancelled_leaves_no_engine(path: str, engine: xl.Engine) -> None:
    async def open_it() -> aio.Engine:
        return await aio.open(path, "cancelled")

    async def enter_it() -> None:
        async with aio.open(path, "cancelled"):
            await asyncio.sleep(PATIENCE)

    async def main() -> None:
        for delay in DELAYS:
            opened = await cancelled_after(delay, open_it())
            if opened is not None:
                await opened.close()
            await cancelled_after(delay, enter_it())
            await soon(lambda: len(engine.engines()) == 1)

    play(main)


def test_a2_also_where_the_loop_ends_with_it(path: str, engine: xl.Engine) -> None:
    """As when a timeout, or Ctrl-C, ends `asyncio.run`."""

    async def main() -> None:
        await cancelled_after(-1, aio.open(path, "cancelled"))

    try:
        for _ in range(3):
            asyncio.run(main())
            until(lambda: len(engine.engines()) == 1)
    finally:
        for left in open_here(OpenEngine):
            if left.name == "cancelled":
                left.close()


def test_c1_an_engine_whose_close_was_cancelled_closes(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    async def main() -> None:
        for delay in DELAYS:
            mine = await aio.open(path, "mine")
            owner = await mine.topic("orders").producer(EXCLUSIVE)
            receipt = owner.send_async(b"x")
            await cancelled_after(delay, mine.close())
            await mine.close()
            assert await receipt == topic.next_offset - 1
            assert (len(engine.engines()), free(topic)) == (1, True)

    play(main)


# ---- cancelling what a map does ----------------------------------------------------------


def test_i2_a_cancelled_write_is_done_or_not(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            async with aio.SharedMap(mine.topic("orders")) as shared:
                low = 0
                for number in range(40):
                    delay = -(number % 4) - 1 if number % 2 else number * 0.0002
                    await cancelled_after(delay, shared.update("n", one_more))
                    await cancelled_after(delay, shared.get("n", latest=True))
                    await cancelled_after(delay, shared.put_all({"a": number, "b": number}))
                    found = dict(await shared.scan(latest=True))
                    assert low <= found.get("n", 0) <= low + 1
                    assert found.get("a") == found.get("b")
                    low = found.get("n", 0)
        with xl.SharedMap(topic) as fresh:
            assert everything(fresh) == found

    play(main)
    assert free(topic)


def test_i1_a_cancelled_write_of_a_state_is_done_or_not(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            options: dict[str, Any] = {"initial": dict, "apply": add}
            async with aio.SharedState(mine.topic("orders"), **options) as counts:
                for number in range(40):
                    delay = -(number % 4) - 1 if number % 2 else number * 0.0002
                    write = counts.write(lambda state: [["a", 1], ["b", 1]], dict)
                    await cancelled_after(delay, write)
                    await cancelled_after(delay, counts.read(dict, latest=True))
                    await cancelled_after(delay, counts.snapshot())
                    found = await counts.read(dict)
                    assert found.get("a") == found.get("b")

    play(main)
    assert free(topic)


def test_i1_creating_one_that_was_cancelled_leaves_nothing(path: str, topic: xl.Topic) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            for delay in DELAYS:
                made = await cancelled_after(delay, aio.SharedMap(mine.topic("orders")))
                if made is not None:
                    await made.close()
            assert free(topic)

    play(main)


def test_d5_a_map_s_cancelled_write_leaves_the_queue(path: str, topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)

    async def main() -> None:
        async with aio.open(path) as mine:
            async with aio.SharedMap(mine.topic("orders")) as shared:
                writing = asyncio.create_task(shared.put("a", 1))
                await soon(lambda: topic.waiters)
                writing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await writing
                await soon(lambda: not topic.waiters)
                owner.close()

    play(main)


def test_c1_a_map_whose_write_was_cancelled_can_be_closed(path: str, topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)

    async def main() -> bool:
        async with aio.open(path) as mine:
            shared: aio.SharedMap[str, int] = await aio.SharedMap(mine.topic("orders"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await shared.put("a", 1)
            closing = asyncio.create_task(shared.close())
            done, _ = await asyncio.wait([closing], timeout=PATIENCE / 2)
            owner.close()
            await closing
            return bool(done)

    assert play(main)


def test_f3_a_cancelled_claim_waits_for_nothing(path: str, engine: xl.Engine) -> None:
    """Its resource is somebody else's, and there was much time left to wait for it."""
    held = engine.own("group", {"resource": 9})

    async def main() -> None:
        async with aio.open(path) as mine:
            claiming = asyncio.create_task(mine.own("group", {"resource": 5}, timeout=2 * PATIENCE))
            await asyncio.sleep(0.1)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
            with pytest.raises(xl.OwnershipError):
                await mine.own("group", {"resource": 5}, timeout=0.3)

    start = time.monotonic()
    play(main)
    assert time.monotonic() - start < PATIENCE
    assert held.is_valid


# ---- before the first step -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["send_async", "task", "never awaited"])
def test_b9_a_send_that_was_cancelled_before_its_first_step_holds_up_no_other(
    path: str, how: str
) -> None:
    """Right after a hand-over, sends wait in a line. A task that is cancelled at once has run no
    line of its coroutine, and so no `finally`."""

    async def main() -> list[bytes]:
        async with aio.open(path, "a") as a, aio.open(path, "b") as b:
            producer = await a.topic("orders").producer(EXCLUSIVE)
            await a.unload("orders", to=b.id)
            if how == "send_async":
                producer.send_async(b"cancelled")._of.cancel()  # type: ignore[union-attr]
            elif how == "task":
                asyncio.ensure_future(
                    producer._send_late((b"cancelled", None, None, None, None))
                ).cancel()
            else:
                producer._send_late((b"cancelled", None, None, None, None)).close()
            async with asyncio.timeout(PATIENCE):
                assert await producer.send(b"next") == 0
                await producer.flush()
            return [message.value async for message in a.topic("orders").reader()]

    assert play(main) == [b"next"]


# ---- errors that asyncio takes for something else -------------------------------------------


@pytest.mark.parametrize(
    "kind", [StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError]
)
def test_i3_an_error_that_ends_iterators_or_tasks_reaches_the_caller(path: str, kind: type) -> None:
    """A function of the application raises it in the background thread. Each call ends with an
    error, and the calls of other tasks that are delivered with it end, too."""

    def fail(*_: object) -> Any:
        raise kind(1)

    async def main() -> None:
        async with aio.open(path) as engine:
            async with (
                aio.SharedMap(engine.topic("map")) as table,
                aio.SharedState(engine.topic("state"), dict, add) as state,
            ):
                await table.put("a", 1)
                for call in (
                    lambda: table.update("a", fail),
                    lambda: table.update_multiple(lambda key: True, fail),
                    lambda: state.write(fail),
                    lambda: state.read(fail),
                    lambda: state.read(fail, latest=True),
                ):
                    async with asyncio.timeout(PATIENCE):
                        found = await asyncio.gather(
                            call(), table.put("b", 2), return_exceptions=True
                        )
                    assert isinstance(found[0], RuntimeError), found
                    assert not isinstance(found[1], BaseException)
                assert await table.get("a") == 1

    play(main)


def test_a2_waits_that_are_fenced_and_cancelled_log_nothing(path: str) -> None:
    """Whichever comes first: nobody asks for the exception of a wait that was cancelled."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: complaints.append(context)
        )
        async with aio.open(path) as engine:
            for _ in range(3):
                owner = await engine.topic("orders").producer(FENCING)
                waits = [
                    asyncio.ensure_future(engine.topic("orders").producer(WAIT)) for _ in range(20)
                ]
                await soon(lambda: len(engine.sync.topic("orders").waiters) == 20)
                fencing = asyncio.ensure_future(engine.topic("orders").producer(FENCING))
                await asyncio.sleep(0)
                for wait in waits:
                    wait.cancel()
                    await asyncio.sleep(0.0005)
                await asyncio.wait(waits)
                for wait in waits:
                    if not wait.cancelled():
                        wait.exception()
                await (await fencing).close()
                await owner.close()
        collect()
        await asyncio.sleep(0.01)

    play(main)
    assert complaints == []
