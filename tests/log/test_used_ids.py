"""Rules B9, G2: a sequence id that is used again before the first message with it has an outcome.

The first one is queued, or waits for its flush. To call the second one a duplicate would say that
the message is in the log; the first may fail yet, and the message would be lost. So the outcome of
the first decides.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.loops import held
from testing.processes import PATIENCE, values
from tests.log.test_outcomes import LARGE, Failing

pytestmark = pytest.mark.rule("B9", "G2")


class Producer:
    """A producer, and its engine."""

    def __init__(self, engine: Any, producer: Any) -> None:
        self.engine = engine
        self.send, self.send_async = producer.send, producer.send_async
        self.send_many, self.flush = producer.send_many, producer.flush


def queue_and_flush(p: Producer, value: bytes, n: int) -> None:
    receipt = p.send_async(value, sequence_id=n)
    p.flush()
    receipt.result(PATIENCE)


def in_transaction(p: Producer, value: bytes, n: int) -> None:
    with p.engine.transaction() as txn:
        p.send(value, sequence_id=n, transaction=txn)


def many_in_transaction(p: Producer, value: bytes, n: int) -> None:
    with p.engine.transaction() as txn:
        p.send_many([value], sequence_id=n, transaction=txn)


Call = Callable[[Producer, bytes, int], object]
CALLS: dict[str, Call] = {
    "send": lambda p, value, n: p.send(value, sequence_id=n),
    "send, timeout": lambda p, value, n: p.send(value, sequence_id=n, timeout=PATIENCE),
    "send_async": queue_and_flush,
    "send_many": lambda p, value, n: p.send_many([value], sequence_id=n),
    "send_many, timeout": lambda p, value, n: p.send_many([value], sequence_id=n, timeout=PATIENCE),
    "large": lambda p, value, n: p.send(value + LARGE, sequence_id=n),
    "transaction": in_transaction,
    "send_many in a transaction": many_in_transaction,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_b9_a_duplicate_of_a_queued_message_is_told_once_that_is_in_the_log(
    engine: xl.Engine, topic: xl.Topic, call: Call
) -> None:
    with topic.producer(linger=60) as producer:
        first = producer.send_async(b"first", sequence_id=5)
        with pytest.raises(xl.DuplicateSequenceError) as caught:
            call(Producer(engine, producer), b"again", 5)
        assert first.done()
        assert (caught.value.repeated, caught.value.last_sequence_id) == (True, 5)
        later = producer.send_async(b"later", sequence_id=9)
        with pytest.raises(xl.DuplicateSequenceError) as caught:
            call(Producer(engine, producer), b"between", 7)
        assert later.done()
        assert (caught.value.repeated, caught.value.last_sequence_id) == (False, 9)
    assert values(topic) == [b"first", b"later"]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_b9_if_the_queued_message_fails_the_second_is_appended(
    engine: xl.Engine, topic: xl.Topic, call: Call
) -> None:
    with topic.producer(linger=60) as producer:
        first = producer.send_async(b"first", sequence_id=5)
        with Failing(engine, xl.LedgerError("not now"), after=False, large=False):
            call(Producer(engine, producer), b"again", 5)
        assert isinstance(first.exception(0), xl.LedgerError)
        assert producer.last_sequence_id == 5
    assert [value.rstrip(b"\0") for value in values(topic)] == [b"again"]


def test_b9_a_lower_id_is_free_again_if_the_queued_message_fails(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with topic.producer(linger=60) as producer:
        first = producer.send_async(b"first", sequence_id=5)
        with Failing(engine, xl.LedgerError("not now"), after=False, large=False):
            producer.send(b"lower", sequence_id=3)
        assert first.exception(0) is not None
        assert producer.last_sequence_id == 3
    assert values(topic) == [b"lower"]


def test_b9_a_second_message_waits_no_longer_than_its_timeout(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with topic.producer(linger=60) as producer:
        first = producer.send_async(b"first", sequence_id=5)
        with held(engine), pytest.raises(xl.WaitTimeoutError, match="same sequence_id") as caught:
            producer.send(b"again", sequence_id=5, timeout=0.01)
        assert caught.value.maybe_written  # a message with this id
        assert first.result(PATIENCE) == 0
    assert values(topic) == [b"first"]


def test_b9_an_id_is_not_called_repeated_before_the_flush_of_its_message(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many threads send the same ids without the queue: one of them is told the offset, and once
    another one is told that it is repeated, the message is in the log."""
    start, told = threading.Barrier(4), list[tuple[bool, bool]]()
    with topic.producer() as producer, concurrent.futures.ThreadPoolExecutor(4) as threads:

        def send(number: int) -> int | None:
            start.wait(PATIENCE)
            try:
                return producer.send(b"%d" % number, sequence_id=number)
            except xl.DuplicateSequenceError as error:
                logged = producer._sender.appender.durable_sequence
                told.append((error.repeated, logged >= number))
                return None

        for number in range(50):
            sent = list(threads.map(send, [number] * 4))
            assert [each for each in sent if each is not None] == [number]
    assert told == [(True, True)] * 150
    assert values(topic) == [b"%d" % number for number in range(50)]


# ---- asyncio -----------------------------------------------------------------------------


async def both(path: Any, call: Callable[[Producer, bytes], Any]) -> list[Any]:
    async with aio.open(path) as engine:
        producer = await engine.topic("t").producer(linger=60)
        first = producer.send_async(b"first", sequence_id=5)
        second = call(Producer(engine, producer), b"again")
        outcomes = asyncio.gather(first, second, return_exceptions=True)
        async with asyncio.timeout(PATIENCE):
            while not outcomes.done():
                with contextlib.suppress(xl.LedgerError):  # of the first one
                    await producer.flush()
                await asyncio.sleep(0.01)
            return await outcomes


async def in_a_transaction(p: Producer, value: bytes) -> None:
    async with p.engine.transaction() as txn:
        await p.send(value, sequence_id=5, transaction=txn)


AIO_CALLS: dict[str, Callable[[Producer, bytes], Any]] = {
    "send": lambda p, value: p.send(value, sequence_id=5),
    "send_async": lambda p, value: p.send_async(value, sequence_id=5),
    "send_many": lambda p, value: p.send_many([value], sequence_id=5),
    "transaction": in_a_transaction,
}


@pytest.mark.parametrize("call", AIO_CALLS.values(), ids=AIO_CALLS)
def test_b9_so_it_is_for_asyncio(path: Any, call: Any) -> None:
    first, second = asyncio.run(both(path, call))
    assert first == 0
    assert isinstance(second, xl.DuplicateSequenceError)
    assert second.repeated


@pytest.mark.parametrize("call", AIO_CALLS.values(), ids=AIO_CALLS)
def test_b9_and_for_asyncio_if_the_queued_message_fails(path: Any, call: Any) -> None:
    with xl.open(path) as engine:
        with Failing(engine, xl.LedgerError("not now"), after=False, large=False):
            first, second = asyncio.run(both(path, call))
        assert isinstance(first, xl.LedgerError)
        assert not isinstance(second, BaseException)
        assert values(engine.topic("t")) == [b"again"]
