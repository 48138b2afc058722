"""On the way into the log: receipts, lingering, batches, back-pressure, group commit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import pickle
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core, sessions
from exclusivelog.local.storage.tables import Tables
from testing.children import child, finish, line, tell
from testing.disks import needs_strace
from testing.journals import appends, flushes, frames, no_checkpoints
from testing.processes import PATIENCE, State, collect, until, values, within
from testing.strace import traced


def run_threads(count: int, function: Callable[[int], Any], timeout: float = PATIENCE) -> None:
    """`function(number)` in so many threads at the same time; none may fail or hang."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(PATIENCE)
            function(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


@contextlib.contextmanager
def ledger_busy(engine: xl.Engine) -> Iterator[None]:
    """Another thread writes as long as the block runs."""
    inside, done = threading.Event(), threading.Event()

    def write() -> None:
        with engine.ledger.write_exclusive():
            inside.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=write)
    thread.start()
    assert inside.wait(PATIENCE)
    try:
        yield
    finally:
        done.set()
        thread.join(PATIENCE)


# ---- receipts ----------------------------------------------------------------------------


def test_a_receipt_tells_the_offset(topic) -> None:
    with topic.producer() as producer:
        receipts = [producer.send_async(b"%d" % n) for n in range(100)]
        assert [receipt.result(PATIENCE) for receipt in receipts] == list(range(100))
        assert all(receipt.done() for receipt in receipts)
        assert {receipt.exception(0) for receipt in receipts} == {None}
        assert "offset=99" in repr(receipts[-1])
    assert values(topic) == [b"%d" % n for n in range(100)]


def test_a_receipt_that_is_pending_says_so(topic) -> None:
    with topic.producer(linger=60) as producer:
        receipt = producer.send_async(b"x")
        assert not receipt.done()
        assert "pending" in repr(receipt)
        for wait in (receipt.result, receipt.exception):
            before = time.monotonic()
            with pytest.raises(xl.WaitTimeoutError):
                wait(0.1)
            assert 0.1 <= time.monotonic() - before < PATIENCE
            with pytest.raises(xl.WaitTimeoutError):
                wait(0)
        assert topic.next_offset == 0
        producer.flush()
        assert receipt.result(0) == 0


def test_a_receipt_tells_the_error(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        producer = engine.topic("t").producer()
        receipt = producer.send_async(bytes(1 << 21))
        error = receipt.exception(PATIENCE)
        assert isinstance(error, xl.LedgerFullError)
        assert not error.maybe_written
        with pytest.raises(xl.LedgerFullError) as caught:
            receipt.result(0)
        assert caught.value is error
        assert "failed" in repr(receipt)


def test_many_threads_can_wait_for_one_receipt(topic) -> None:
    with topic.producer(linger=0.3) as producer:
        receipt = producer.send_async(b"x")
        run_threads(8, lambda _: receipt.result(PATIENCE))
        assert receipt.result(0) == 0


def test_callbacks_come_in_order(topic) -> None:
    seen: list[Any] = []
    with topic.producer(linger=60) as producer:
        for n in range(50):
            receipt = producer.send_async(b"x")
            receipt.add_done_callback(lambda r, n=n: seen.append((n, 0, r.result(0))))
            receipt.add_done_callback(lambda r, n=n: seen.append((n, 1, r.result(0))))
        assert seen == []
        producer.flush()
        until(lambda: len(seen) == 100)
        receipt.add_done_callback(lambda r: seen.append("late"))  # at once
        assert seen.pop() == "late"
    assert seen == [(n, i, n) for n in range(50) for i in (0, 1)]


def test_callbacks_come_in_order_across_commits_and_threads(topic) -> None:
    seen: list[int] = []
    with topic.producer() as producer:

        def run(_: int) -> None:
            for _ in range(50):
                producer.send_async(b"x").add_done_callback(lambda r: seen.append(r.result(0)))
                producer.send(b"y")

        run_threads(4, run)
        producer.flush()
        until(lambda: len(seen) == 200)
    # Those added after the outcome was known are called at once, so that a few may come early.
    assert sorted(seen) == sorted(set(seen))
    assert sum(a > b for a, b in itertools.pairwise(seen)) <= 40


def test_callbacks_of_failed_messages_come_too(path) -> None:
    """They only keep the receipts: if one told of the error before the flush, that would not."""
    seen: list[xl.Receipt] = []
    with xl.open(path, map_size=1 << 20) as engine:
        with engine.topic("t").producer(linger=60) as producer:
            for size in (10, 10, 1 << 21):  # the large one ends the batch: none may come after it
                producer.send_async(bytes(size)).add_done_callback(seen.append)
            with pytest.raises(xl.LedgerFullError):
                producer.flush()
            until(lambda: len(seen) == 3)
    assert [type(receipt.exception(0)) for receipt in seen] == [xl.LedgerFullError] * 3


def test_a_callback_that_fails_harms_no_other(topic, caplog) -> None:
    seen: list[int] = []

    def fail(receipt: xl.Receipt) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "exclusivelog"), topic.producer(linger=0.01) as producer:
        receipt = producer.send_async(b"x")
        receipt.add_done_callback(fail)
        receipt.add_done_callback(lambda r: seen.append(r.result(0)))
        assert receipt.result(PATIENCE) == 0
        until(lambda: seen == [0])
        assert producer.send_async(b"y").result(PATIENCE) == 1
        receipt.add_done_callback(fail)
    assert len([r for r in caplog.records if r.exc_info]) == 2


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_b9_a_callback_that_exits_does_not_silence_the_others(topic, error) -> None:
    """A callback calls sys.exit() in the thread that commits for all producers. Later sends are
    still acknowledged."""
    seen: list[int] = []

    def leave(receipt: xl.Receipt) -> None:
        raise error

    with topic.producer(linger=0.01) as producer:
        with contextlib.suppress(error):
            receipt = producer.send_async(b"x")
            receipt.add_done_callback(leave)
            receipt.add_done_callback(lambda r: seen.append(r.result(0)))
            receipt.result(PATIENCE)
            until(lambda: seen == [0])
        assert producer.send_async(b"y").result(PATIENCE) == 1


def test_callbacks_may_send_again(topic) -> None:
    done = threading.Event()
    with topic.producer() as producer:

        def again(receipt: xl.Receipt) -> None:
            if receipt.result(0) < 20:
                producer.send_async(b"async").add_done_callback(lambda r: None)
                producer.send(b"sync")
                producer.send_async(b"next").add_done_callback(again)
            else:
                done.set()

        producer.send_async(b"first").add_done_callback(again)
        assert done.wait(PATIENCE)


def test_callbacks_may_close_the_producer(topic) -> None:
    with topic.producer() as producer:
        receipt = producer.send_async(b"x")
        receipt.add_done_callback(lambda r: producer.close())
        assert receipt.result(PATIENCE) == 0
        until(lambda: topic.holders == [])
        assert producer.state == "closed"


def test_callbacks_may_close_the_engine(path) -> None:
    engine = xl.open(path)
    closed = threading.Event()
    receipt = engine.topic("t").producer(linger=0.05).send_async(b"x")
    receipt.add_done_callback(lambda r: (engine.close(), closed.set()))
    assert receipt.result(PATIENCE) == 0
    assert closed.wait(PATIENCE)
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == [b"x"]


def test_a_callback_added_while_the_outcome_arrives_is_called(topic) -> None:
    """The garbage collector runs in the middle of `add_done_callback`, and there the switch to
    another thread, which commits. The callback must neither get lost nor fail."""
    seen: list[int] = []
    armed: list[Callable[[], None]] = []

    def collecting(phase: str, info: object) -> None:
        if phase == "start" and armed:
            within(armed.pop(), PATIENCE)

    with topic.producer(linger=60) as producer:
        threshold = gc.get_threshold()
        gc.callbacks.append(collecting)
        try:
            for _ in range(20):
                receipt = producer.send_async(b"x")
                callback = lambda r: seen.append(r.result(0))  # noqa: E731
                emptied = [(n, n) for n in range(3000)]  # the tuples kept ready are used up
                armed.append(producer.flush)
                gc.set_threshold(1)
                try:
                    receipt.add_done_callback(callback)
                finally:
                    gc.set_threshold(*threshold)
                    armed.clear()
                    del emptied
        finally:
            gc.callbacks.remove(collecting)
            gc.set_threshold(*threshold)
        producer.flush()
        until(lambda: len(seen) == 20)


# ---- asyncio -----------------------------------------------------------------------------


def test_receipts_can_be_awaited(topic) -> None:
    async def run() -> None:
        with topic.producer(linger=0.01) as producer:
            assert await producer.send_async(b"0") == 0
            receipts = [producer.send_async(b"%d" % n) for n in range(1, 50)]
            assert await asyncio.gather(*receipts) == list(range(1, 50))
            assert await receipts[0] == 1  # again, when it is known
            assert await asyncio.gather(receipts[7], receipts[7]) == [8, 8]

    asyncio.run(run())


def test_an_awaited_receipt_raises_its_error(path) -> None:
    async def run(producer: xl.Producer) -> None:
        receipt = producer.send_async(bytes(1 << 21))
        for _ in range(2):
            with pytest.raises(xl.LedgerFullError):
                await receipt
        assert await producer.send_async(b"x") == 0

    with xl.open(path, map_size=1 << 20) as engine, engine.topic("t").producer() as producer:
        asyncio.run(run(producer))


def test_the_loop_goes_on_while_a_receipt_is_awaited(topic) -> None:
    async def run() -> int:
        with topic.producer(linger=60) as producer:
            waiting = asyncio.ensure_future(wait(producer.send_async(b"x")))
            ticks = 0
            while not waiting.done():
                await asyncio.sleep(0.01)
                ticks += 1
                if ticks == 6:
                    await asyncio.to_thread(producer.flush)
            return ticks

    async def wait(receipt: xl.Receipt) -> int:
        return await receipt

    assert asyncio.run(run()) > 5


def test_a_cancelled_await_leaves_the_message_on_its_way(topic) -> None:
    async def run() -> None:
        with topic.producer(linger=60) as producer:
            receipt = producer.send_async(b"x")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait(receipt), 0.05)
            assert not receipt.done()
            producer.flush()
            assert await receipt == 0

    async def wait(receipt: xl.Receipt) -> int:
        return await receipt

    asyncio.run(run())
    assert values(topic) == [b"x"]


def test_an_outcome_that_comes_after_the_loop_is_closed_harms_no_other(topic, caplog) -> None:
    async def give_up(receipt: xl.Receipt) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wait(receipt), 0.01)

    async def wait(receipt: xl.Receipt) -> int:
        return await receipt

    with caplog.at_level(logging.ERROR), topic.producer(linger=0.2) as producer:
        receipt = producer.send_async(b"x")
        asyncio.run(give_up(receipt))
        assert receipt.result(PATIENCE) == 0
        assert producer.send_async(b"y").result(PATIENCE) == 1
    assert caplog.records == []


SENDS_A_HUNDRED = """
import sys
import exclusivelog as xl
with xl.open(sys.argv[1], durability="power") as engine:
    producer = engine.topic("a").producer()
    producer.send(b"a")
    print(flush=True)
    sys.stdin.readline()
    for _ in range(100):
        producer.send(b"b")
    print(flush=True)
    sys.stdin.readline()
"""


@needs_strace
def test_an_append_does_not_ask_for_the_times_of_the_journal(path, tmp_path) -> None:
    # Where something has, Linux notes the exact time of the next write, and each flush writes the
    # inode, too.
    calls = tmp_path / "calls"
    with child(SENDS_A_HUNDRED, path) as process:
        line(process)
        with traced(process.pid, "-o", str(calls), "-e", "trace=/stat,pwritev,fdatasync"):
            tell(process)
            line(process)
    found = Counter(re.findall(r"^\d+ +(\w+)\(", calls.read_text(), re.M))
    assert found["pwritev"] >= 100
    assert found["fstat"] + found["newfstatat"] < 50
    assert "STATX_BASIC_STATS" not in calls.read_text()


# ---- lingering and batches ---------------------------------------------------------------


@pytest.mark.long
def test_messages_sent_within_linger_share_one_commit(engine) -> None:
    """Anew where a busy machine takes longer to send them."""
    topics = (engine.topic(f"t{number}") for number in itertools.count())
    until(lambda: share_one_commit(engine, next(topics)))


def share_one_commit(engine: xl.Engine, topic: xl.Topic) -> bool:
    """Send for less than the time to linger; False if that did not succeed."""
    linger = 2.0
    with topic.producer(linger=linger) as producer, no_checkpoints(engine):
        before, began = engine.ledger.journal.tail, time.monotonic()
        receipts = [producer.send_async(b"x") for _ in range(1000)]
        took = time.monotonic() - began
        assert receipts[-1].result(PATIENCE) == 999
        found = frames(engine, before)
    if took >= linger:
        return False
    assert [frame.offsets for frame in found] == [range(1000)]
    assert entry_sizes(engine, topic) == [[1] * 1000]
    return True


def test_linger_is_no_longer_than_it_says(topic) -> None:
    with topic.producer(linger=0.2) as producer:
        for _ in range(3):
            before = time.monotonic()
            producer.send_async(b"x").result(PATIENCE)
            assert 0.15 <= time.monotonic() - before < PATIENCE


def test_without_linger_messages_go_at_once(topic) -> None:
    with topic.producer() as producer:
        before = time.monotonic()
        for _ in range(20):
            producer.send_async(b"x").result(PATIENCE)
        assert time.monotonic() - before < PATIENCE


def test_send_takes_along_what_lingers(engine, topic) -> None:
    with topic.producer(linger=60) as producer:
        before = engine.ledger.journal.tail
        receipts = [producer.send_async(b"%d" % n) for n in range(10)]
        assert producer.send(b"10") == 10
        assert [r.result(0) for r in receipts] == list(range(10))
        assert appends(engine, before) == 1
        producer.send_async(b"11")
        assert producer.send_many([b"12", b"13"]) == range(12, 14)
    assert values(topic) == [b"%d" % n for n in range(14)]


def test_a_full_batch_does_not_linger(topic) -> None:
    with topic.producer(linger=60, max_batch_messages=10) as producer:
        receipts = [producer.send_async(b"x") for _ in range(10)]
        assert receipts[-1].result(PATIENCE) == 9
    with topic.producer(linger=60, max_batch_bytes=100) as producer:
        receipts = [producer.send_async(bytes(30)) for _ in range(4)]
        assert receipts[0].result(PATIENCE) == 10


def entry_sizes(engine: xl.Engine, topic: xl.Topic) -> list[list[int]]:
    """The sizes of the values in each entry, as it was sent."""

    def look(tables: Tables) -> list[_core.Entry]:
        return [
            _core.Entry(tables.entries.load(data)) for _, data in tables.entries.walk(topic.id, 0)
        ]

    entries = engine.ledger.inspect(look, unflushed=True)
    return [[len(e.message(i).value or b"") for i in range(e.count)] for e in entries]


def send_each(producer: xl.Producer, messages: list[bytes]) -> None:
    for message in messages:
        producer.send_async(message)
    producer.flush()


SEND_ALL = {"send_async": send_each, "send_many": lambda producer, m: producer.send_many(m)}


@pytest.mark.parametrize("how", SEND_ALL)
@pytest.mark.parametrize("most", [1, 7, 100])
def test_an_entry_holds_no_more_messages_than_it_may(engine, topic, how, most) -> None:
    with no_checkpoints(engine):
        with topic.producer(linger=60, max_batch_messages=most) as producer:
            SEND_ALL[how](producer, [b"x"] * 100)
        assert max(map(len, entry_sizes(engine, topic))) == most


@pytest.mark.parametrize("how", SEND_ALL)
def test_an_entry_holds_no_more_bytes_than_it_may(engine, topic, how) -> None:
    """Unless it is a single message, which cannot be divided."""
    dice = random.Random(4)
    messages = [bytes(dice.choice([0, 1, 60, 300, 600, 999, 1000, 2500])) for _ in range(300)]
    with no_checkpoints(engine):
        with topic.producer(linger=60, max_batch_bytes=1000) as producer:
            SEND_ALL[how](producer, messages)
        assert values(topic) == messages
        sizes = entry_sizes(engine, topic)
    assert max(sum(entry) for entry in sizes if len(entry) > 1) <= 1000


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("linger", wrong) for wrong in (-1, -0.1, float("nan"), "1", None)],
        *[
            (name, wrong)
            for name in ("max_batch_messages", "max_batch_bytes", "max_pending_bytes")
            for wrong in (0, -1, 1.5, "1", None)
        ],
        *[("on_fenced", wrong) for wrong in (5, "call me")],
    ],
)
def test_wrong_options_are_refused_by_name(topic, name, wrong) -> None:
    for call in (topic.producer, topic.producer_async):
        with pytest.raises((ValueError, TypeError), match=name):
            call(**{name: wrong})
    assert topic.holders == []


# ---- back-pressure -----------------------------------------------------------------------


def test_what_waits_is_bounded(topic) -> None:
    with topic.producer(linger=60, max_pending_bytes=10_000) as producer:
        for _ in range(200):
            producer.send_async(bytes(999))
            assert producer._sender.appender.pending_bytes < 10_000
        assert topic.next_offset > 150


def test_sending_waits_when_too_much_is_pending_and_the_ledger_is_busy(engine, topic) -> None:
    with topic.producer(linger=60, max_pending_bytes=10_000) as producer:
        sent: list[xl.Receipt] = []

        def run() -> None:
            sent.extend(producer.send_async(bytes(1000)) for _ in range(50))

        with ledger_busy(engine):
            thread = threading.Thread(target=run)
            thread.start()
            until(lambda: producer._sender.appender.pending_messages == 10)
            time.sleep(0.2)
            assert thread.is_alive()
            assert producer._sender.appender.pending_messages == 10
            assert topic.next_offset == 0
        thread.join(PATIENCE)
        assert not thread.is_alive()
        producer.flush()
        assert [receipt.result(0) for receipt in sent] == list(range(50))


# ---- flush, close, time limits -----------------------------------------------------------


def test_flush_sends_everything(topic) -> None:
    with topic.producer(linger=60) as producer:
        producer.flush()
        receipts = [producer.send_async(b"x") for _ in range(10)]
        producer.flush()
        assert all(receipt.done() for receipt in receipts)
        assert topic.next_offset == 10


@pytest.mark.parametrize("end", ["flush", "close"])
def test_what_failed_before_a_flush_is_raised_by_it(path, end) -> None:
    """Once: by the flush, or by the closing, or by the receipt."""
    with xl.open(path, map_size=1 << 20) as engine:
        producer = engine.topic("t").producer()
        for told in (False, True):
            receipt = producer.send_async(bytes(1 << 21))
            until(receipt.done)
            if told:
                assert isinstance(receipt.exception(), xl.LedgerFullError)
            elif end == "flush":
                with pytest.raises(xl.LedgerFullError):
                    producer.flush()
            else:
                with pytest.raises(xl.LedgerFullError):
                    producer.close()
                producer = engine.topic("t").producer()
            producer.flush()
        receipt = producer.send_async(bytes(1 << 21))
        until(receipt.done)
        producer.send(b"the last one")
        producer.flush()
        producer.close()


@pytest.mark.parametrize("interrupt", [xl.WaitTimeoutError("late"), KeyboardInterrupt()], ids=repr)
def test_a_failure_behind_a_timeout_is_raised_by_the_flush(path, interrupt) -> None:
    """The call has said that there was no outcome yet; after an interrupt, it has told enough."""
    with xl.open(path, map_size=1 << 20) as engine:
        producer = engine.topic("t").producer()
        receipt = producer.send_async(bytes(1 << 21))
        until(receipt.done)

        def wait() -> None:
            raise interrupt

        with pytest.raises(type(interrupt)):
            sessions.outcome_of(receipt, wait)
        if isinstance(interrupt, xl.WaitTimeoutError):
            with pytest.raises(xl.LedgerFullError):
                producer.flush()
        producer.close()


@pytest.mark.rule("C1")
@pytest.mark.parametrize("size", [1 << 21, 300_000], ids=["too large", "full"])
def test_c1_a_dropped_producer_whose_commit_has_failed_gives_the_topic_back(path, size) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("t")
        producer = topic.producer("exclusive")
        while (error := producer.send_async(bytes(size)).exception(PATIENCE)) is None:
            pass
        assert isinstance(error, xl.LedgerFullError)
        del producer, error

        def given_back() -> bool:
            collect()
            return topic.owner is None

        until(given_back)


def test_flush_raises_what_went_wrong(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        with engine.topic("t").producer(linger=60) as producer:
            producer.send_async(bytes(1 << 21))
            with pytest.raises(xl.LedgerFullError):
                producer.flush()
            producer.flush()
            producer.send_async(b"x")
            producer.flush()
        assert values(engine.topic("t")) == [b"x"]


def test_closing_sends_what_waits(topic) -> None:
    producer = topic.producer(linger=60)
    receipts = [producer.send_async(b"x") for _ in range(10)]
    producer.close()
    assert [receipt.result(0) for receipt in receipts] == list(range(10))
    assert topic.holders == []
    for call in (producer.send, producer.send_async, lambda v: producer.send_many([v])):
        with pytest.raises(xl.EngineClosedError):
            call(b"y")
    with pytest.raises(xl.EngineClosedError):
        producer.flush()
    producer.close()
    assert topic.next_offset == 10


def test_closing_a_producer_raises_what_went_wrong_and_gives_the_topic_back(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("t")
        producer = topic.producer("exclusive", linger=60)
        receipt = producer.send_async(bytes(1 << 21))
        with pytest.raises(xl.LedgerFullError):
            producer.close()
        assert isinstance(receipt.exception(0), xl.LedgerFullError)
        with topic.producer("exclusive") as other:
            assert other.send(b"x") == 0


def test_closing_the_engine_sends_what_waits(path) -> None:
    engine = xl.open(path)
    receipts = [
        engine.topic(name).producer(linger=60).send_async(b"x") for name in "abc" for _ in range(3)
    ]
    engine.close()
    assert [receipt.exception(0) for receipt in receipts] == [None] * 9
    with xl.open(path) as engine:
        assert [engine.topic(name).next_offset for name in "abc"] == [3, 3, 3]


def test_the_end_of_the_program_sends_what_waits(path) -> None:
    finish(
        """
        import sys
        import exclusivelog as xl
        producer = xl.open(sys.argv[1]).topic("orders").producer("exclusive", linger=60)
        for n in range(10):
            producer.send_async(b"x")
        """,
        path,
    )
    with xl.open(path) as engine:
        assert engine.topic("orders").next_offset == 10
        assert engine.topic("orders").owner is None


def test_an_abandoned_producer_still_sends_what_waits(topic) -> None:
    receipt = topic.producer("exclusive", linger=0.2).send_async(b"x")
    collect()
    assert receipt.result(PATIENCE) == 0
    collect()
    until(lambda: topic.owner is None)


@pytest.mark.parametrize("call", ["send", "send_many", "flush"])
def test_a_time_limit_holds_behind_another_producers_commit(engine, topic, call) -> None:
    """The other one leads, and the ledger keeps it waiting."""
    calls = {
        "send": lambda: producer.send(b"x", timeout=0.2),
        "send_many": lambda: producer.send_many([b"x"], timeout=0.2),
        "flush": lambda: (producer.send_async(b"x"), producer.flush(timeout=0.2)),
    }
    with topic.producer(linger=60) as producer, topic.producer() as other:
        with ledger_busy(engine):
            leader = threading.Thread(target=other.send, args=(b"y",))
            leader.start()
            time.sleep(0.1)
            with pytest.raises(xl.WaitTimeoutError):
                within(calls[call])
            assert topic.next_offset == 0
        leader.join(PATIENCE)
        until(lambda: topic.next_offset == 2)  # it was on its way
        producer.flush()


def test_a_time_limit_holds_when_no_other_thread_commits(engine, topic) -> None:
    """Here the sender itself would be the one who leads."""
    with topic.producer() as producer:
        with ledger_busy(engine):
            with pytest.raises(xl.WaitTimeoutError):
                within(lambda: producer.send(b"x", timeout=0.2))
        until(lambda: topic.next_offset == 1)
        assert producer.send(b"y") == 1


# ---- group commit ------------------------------------------------------------------------


@pytest.fixture
def flushing(path: str) -> Iterator[xl.Engine]:
    """An engine that flushes, also under `--durability=process`."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        yield engine


def test_threads_that_send_together_share_flushes(flushing) -> None:
    topic = flushing.topic("orders")
    producers = [topic.producer() for _ in range(8)]
    before = flushes(flushing)
    run_threads(8, lambda n: [producers[n].send(b"%d" % i) for i in range(50)])
    spent = flushes(flushing) - before
    assert topic.next_offset == 400
    assert 0 < spent < 400
    for producer in producers:
        mine = [m.value for m in topic.reader() if m.producer_name == producer.name]
        assert mine == [b"%d" % i for i in range(50)]


def test_everything_that_waits_goes_with_one_flush(flushing) -> None:
    """While the ledger is busy, producers of several topics gather: one flush takes them all."""
    producers = [flushing.topic(f"t{n % 3}").producer(linger=60) for n in range(9)]

    def run(producer: xl.Producer) -> None:
        producer.send_async(b"x")
        producer.flush()

    before = flushes(flushing)
    with ledger_busy(flushing):
        threads = [threading.Thread(target=run, args=(p,)) for p in producers]
        for thread in threads:
            thread.start()
        until(lambda: sum(p._sender.appender.pending_messages for p in producers) == 9)
        time.sleep(0.3)
    for thread in threads:
        thread.join(PATIENCE)
    # The first one leads alone, and was already gone with its own message; and what kept the
    # ledger busy counts, too.
    assert 0 < flushes(flushing) - before <= 3
    assert [flushing.topic(f"t{n}").next_offset for n in range(3)] == [3, 3, 3]


def test_a_fenced_producer_in_the_group_does_not_disturb_the_others(path, engine, topic) -> None:
    other = engine.topic("other")
    loser = topic.producer("exclusive", linger=60)
    steady = other.producer(linger=60)
    lost = [loser.send_async(b"zombie") for _ in range(3)]
    kept = [steady.send_async(b"kept") for _ in range(3)]
    with xl.open(path) as second:
        winner = second.topic("orders").producer("exclusive_with_fencing")
        assert steady.send(b"with them") == 3
        assert [receipt.result(PATIENCE) for receipt in kept] == [0, 1, 2]
        errors = [receipt.exception(PATIENCE) for receipt in lost]
        assert [type(error) for error in errors] == [xl.ProducerFencedError] * 3
        assert not any(error.maybe_written for error in errors)
        assert winner.send(b"mine") == 0
    assert values(topic) == [b"mine"]
    assert steady.send(b"after") == 4
    with pytest.raises(xl.ProducerFencedError) as caught:
        loser.send(b"zombie")
    assert caught.value is errors[0]


def test_a_duplicate_in_the_group_does_not_disturb_the_others(engine, topic, monkeypatch) -> None:
    """The ledger knows of a sequence id that the producer itself does not know of."""
    a, b = topic.producer(name="a", linger=60), topic.producer(name="b", linger=60)
    with engine.ledger.write_exclusive() as tables:
        tables.producers.put(topic.id, "a", 5, a._session.id)
    first, second = a.send_async(b"a"), b.send_async(b"b")
    b.flush()
    assert second.result(0) == 0
    assert isinstance(first.exception(PATIENCE), xl.DuplicateSequenceError)
    assert values(topic) == [b"b"]
    assert a.send(b"a", sequence_id=6) == 1


# ---- in either durability ----------------------------------------------------------------


def promises_less(state: State) -> bool:
    return state.engine.backend.unflushed


def test_h1_workers_and_scripts_promise_what_the_tests_do(request, path, engine, worker) -> None:
    """`pytest --durability=process` sets the default durability of engines in the test process, in
    workers and in scripts; a durability that a test passes itself overrides it."""
    expected = request.config.getoption("--durability") == "process"
    source = """
        import sys
        import exclusivelog as xl
        plain, strict = xl.open(sys.argv[1]), xl.open(sys.argv[1], durability="power")
        print(plain.backend.unflushed, strict.backend.unflushed)
    """
    assert engine.backend.unflushed == expected
    assert worker().call(promises_less) == expected
    assert finish(source, path) == f"{expected} False\n"
    with xl.open(path, durability="power") as strict:
        assert not strict.backend.unflushed


def test_g2_a_duplicate_says_whether_it_is_the_same_message(engine, topic) -> None:
    """One that is sent again has the last id of the log; one below it may never have been sent."""
    producer = topic.producer("exclusive", name="feed")
    producer.send_many([b"a", b"b", b"c"], sequence_id=10)

    def duplicate(send: Callable[[], object]) -> tuple[bool, str]:
        with pytest.raises(xl.DuplicateSequenceError) as caught:
            send()
        assert pickle.loads(pickle.dumps(caught.value)).repeated == caught.value.repeated
        return caught.value.repeated, str(caught.value)

    def commit(sequence_id: int) -> None:
        with engine.transaction() as txn:
            producer.send(b"x", sequence_id=sequence_id, transaction=txn)

    assert duplicate(lambda: producer.send(b"c", sequence_id=12))[0]
    assert duplicate(lambda: producer.send(bytes(200_000), sequence_id=12))[0]
    assert duplicate(lambda: producer.send_many([b"a", b"b", b"c"], sequence_id=10))[0]
    assert duplicate(lambda: commit(12))[0]
    for send in (
        lambda: producer.send(b"other", sequence_id=11),
        lambda: producer.send_async(b"other", sequence_id=11),
        lambda: producer.send_many([b"other", b"other"], sequence_id=10),
        lambda: producer.send_many([b"c", b"other"], sequence_id=12),
        lambda: commit(11),
    ):
        repeated, text = duplicate(send)
        assert not repeated
        assert "13" in text


@pytest.mark.parametrize("size", [1, 200_000], ids=["framed", "large"])
def test_g2_a_duplicate_within_a_transaction_is_not_taken_for_one_in_the_log(
    engine, topic, size
) -> None:
    """Nothing of the transaction is in the log, so an id that it has twice was not sent before. One
    that the log has is named as such, whatever came before it in the transaction."""
    producer, value = topic.producer("exclusive", name="feed"), bytes(size)
    producer.send(b"a", sequence_id=15)

    def duplicate(*ids: int | None) -> xl.DuplicateSequenceError:
        txn = engine.transaction()
        for each in ids:
            producer.send(value, sequence_id=each, transaction=txn)
        with pytest.raises(xl.DuplicateSequenceError) as caught:
            txn.commit()
        assert txn.state == "aborted"
        return caught.value

    for ids in ((20, 20), (20, 17), (None, 16)):
        error = duplicate(*ids)
        assert (error.sequence_id, error.last_sequence_id) == (ids[1], 15)
        assert not error.repeated
        assert f"sequence id {ids[1]} behind {ids[0] or 16} in a transaction" in str(error)
    highest = duplicate((1 << 63) - 1, None)
    assert (highest.last_sequence_id, highest.repeated) == (15, False)
    assert duplicate(20, 15).repeated
    assert not duplicate(20, 14).repeated
    txn = engine.transaction()
    producer.send_many([value, value], sequence_id=20, transaction=txn)
    producer.send_many([value], sequence_id=21, transaction=txn)
    with pytest.raises(xl.DuplicateSequenceError, match="behind 21") as caught:
        txn.commit()
    assert not caught.value.repeated
    assert producer.last_sequence_id == 15
    assert [message.sequence_id for message in topic.reader()] == [15]
    with engine.transaction() as txn:
        producer.send(value, sequence_id=20, transaction=txn)
        producer.send(value, sequence_id=21, transaction=txn)
    assert producer.last_sequence_id == 21
