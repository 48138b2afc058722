"""An engine whose links to its topic's log fail: what is sent, asked for or in doubt (J2, B9)."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

import exclusivelog as xl
from exclusivelog.cluster.facts import make_birth
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.memory import Chances, MemoryLog, MemoryPlace, UnreliableLog
from exclusivelog.cluster.ordered import Answered, OrderedLog, ignore
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, forked, until, within

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
BAD = Chances(lost=0.2, doubled=0.2, delayed=0.2, answer_lost=0.3, answer_doubled=0.2)

# `reach(link, name)`: the topic `orders` of a new engine, which uses this link to the topic's log.
Reach = Callable[..., xl.Topic]


def values(log: MemoryLog) -> list[bytes | None]:
    return [message.content.value for message in Reader(log).messages()]


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    log = MemoryLog()
    log.append(make_birth())  # what a link does to the first request is not done to this record
    yield log
    log.close()


@pytest.fixture
def reach(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reach]:
    path, links, open_link = secrets.token_hex(8), list[OrderedLog](), MemoryPlace.open
    place = MemoryPlace.named(path)
    place._shared.logs["orders"] = log

    def open_given(place: MemoryPlace, topic: str) -> OrderedLog:
        return links.pop() if topic == "orders" and links else open_link(place, topic)

    monkeypatch.setattr(MemoryPlace, "open", open_given)
    with contextlib.ExitStack() as engines:

        def reach(link: OrderedLog, name: str = "engine") -> xl.Topic:
            links.append(link)
            topic = engines.enter_context(xl.open(f"memory://{path}", name=name)).topic("orders")
            assert topic.next_offset == 0
            assert not links  # it was opened by this link
            return topic

        yield reach


@pytest.fixture
def resend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`resend(seconds)`: the time without progress before unread records are appended again."""
    return lambda seconds: monkeypatch.setattr(
        "exclusivelog.cluster.appending.RESEND_SECONDS", seconds
    )


@pytest.mark.rule("J2")
def test_sends_of_many_threads_are_in_the_log_once(
    log: MemoryLog, reach: Reach, resend: Callable[[float], None]
) -> None:
    resend(0.02)
    producer = reach(UnreliableLog(log, BAD, random.Random(1))).producer(EXCLUSIVE)
    offsets: dict[bytes, int] = {}

    def send(thread: int) -> None:
        for number in range(25):
            value = b"%d.%d" % (thread, number)
            offsets[value] = producer.send(value, timeout=PATIENCE)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    there = values(log)
    assert len(there) == len(offsets) == 100
    assert all(there[offset] == value for value, offset in offsets.items())


@pytest.mark.rule("B9")
def test_a_send_that_times_out_may_be_written(log: MemoryLog, reach: Reach) -> None:
    link = UnreliableLog(log)
    producer = reach(link).producer(EXCLUSIVE)
    link._chances = Chances(delayed=1.0)
    with pytest.raises(xl.WaitTimeoutError) as raised:
        producer.send(b"late", timeout=0.05)
    assert raised.value.maybe_written
    until(lambda: link.under_way)
    link._chances = Chances()
    link.deliver()
    producer.flush(PATIENCE)
    assert values(log) == [b"late"]


def test_a_request_that_times_out_leaves_no_owner(
    log: MemoryLog, reach: Reach, resend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    resend(PATIENCE)
    link = UnreliableLog(log)
    topic = reach(link)
    link._chances = Chances(delayed=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(TopicLog.ask, "__defaults__", (0.05,))
        with pytest.raises(xl.WaitTimeoutError, match="was not granted"):
            topic.producer(EXCLUSIVE)
    link._chances = Chances()
    link.deliver()
    until(lambda: topic.owner is None and topic.epoch == 1)
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


def test_a_request_that_was_lost_and_given_up_can_be_made_again(
    log: MemoryLog, reach: Reach, resend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    resend(0.02)
    link = UnreliableLog(log)
    topic = reach(link)
    link._chances = Chances(lost=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(TopicLog.ask, "__defaults__", (0.1,))
        with pytest.raises(xl.WaitTimeoutError, match="was not granted"):
            topic.producer(EXCLUSIVE)
    link._chances = Chances()
    assert within(lambda: topic.producer(EXCLUSIVE)).topic_epoch >= 1


class Losing(UnreliableLog):
    """Loses the next append on demand, without an answer."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.lost, self._lose = threading.Event(), False

    def lose_next(self) -> None:
        self._lose = True

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        if self._lose:
            self._lose = False
            self.lost.set()
        else:
            super().append(data, answered)


def test_a_lost_append_is_tried_again_while_other_records_keep_coming(
    log: MemoryLog, reach: Reach, resend: Callable[[float], None]
) -> None:
    resend(0.2)
    link, stop = Losing(log), threading.Event()

    def flood() -> None:
        while not stop.wait(0.002):
            log.append(b"foreign")

    thread = threading.Thread(target=flood)
    producer = reach(link).producer(EXCLUSIVE)
    thread.start()
    try:
        link.lose_next()
        receipt = producer.send_async(b"x")
        until(link.lost.is_set)
        assert receipt.result(PATIENCE) == 0
    finally:
        stop.set()
        thread.join(PATIENCE)


class Failing(UnreliableLog):
    """Raises, whether it has appended the record or not."""

    failures = 0

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        if self.failures % 2:
            super().append(data, answered)
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("no connection")
        super().append(data, answered)


@pytest.mark.rule("B9")
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_an_append_that_raises_leaves_the_outcome_to_the_log(
    log: MemoryLog, reach: Reach, resend: Callable[[float], None], failures: int
) -> None:
    resend(0.02)
    link = Failing(log)
    producer = reach(link).producer(EXCLUSIVE)
    link.failures = failures
    assert producer.send(b"x", timeout=PATIENCE) == 0
    assert producer.send(b"y", timeout=PATIENCE) == 1
    assert values(log) == [b"x", b"y"]


def test_a_log_of_too_small_records_is_refused(reach: Reach) -> None:
    small = MemoryLog(max_bytes=1000)
    small.append(make_birth())
    with pytest.raises(ValueError, match="log takes records of 1000 bytes"):
        reach(small)


@pytest.mark.rule("B9")
def test_closing_ends_all_calls_and_says_what_is_in_doubt(
    log: MemoryLog, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.sessions.CLOSE_SECONDS", 0.1)
    link = UnreliableLog(log)
    topic = reach(link)
    producer = topic.producer(EXCLUSIVE)
    link._chances = Chances(lost=1.0)
    receipt = producer.send_async(b"x")
    owning = producer._sender.session.owning
    until(lambda: owning._begun)  # the commit thread has sent it: only now it is in doubt
    within(topic.engine.close)
    error = receipt.exception(PATIENCE)
    assert isinstance(error, xl.ExclusiveLogError)
    assert error.maybe_written
    with pytest.raises(xl.EngineClosedError):
        producer.send(b"y")
    assert values(log) == []


@pytest.mark.rule("G9")
def test_a_damaged_record_ends_all_calls(log: MemoryLog, reach: Reach) -> None:
    topic = reach(log)
    producer = topic.producer(EXCLUSIVE)
    log.append(b"XLO\x01damaged, and nobody's")
    with pytest.raises((xl.LedgerCorruptedError, xl.LedgerIOError)):
        producer.send(b"x", timeout=PATIENCE)
    with pytest.raises(xl.LedgerCorruptedError):
        topic.producer(FENCING)


def test_a_callback_of_a_send_may_send(log: MemoryLog, reach: Reach) -> None:
    second: Future[xl.Receipt] = Future()
    producer = reach(log).producer(EXCLUSIVE)
    first = producer.send_async(b"first")
    first.add_done_callback(lambda _: second.set_result(producer.send_async(b"second")))
    assert second.result(PATIENCE).result(PATIENCE) == 1
    assert values(log) == [b"first", b"second"]


class Late(UnreliableLog):
    """Another process's frames come in just before this one's appends, some times."""

    def __init__(self, log: MemoryLog, owner: xl.Producer, times: int) -> None:
        super().__init__(log)
        self.owner, self.times = owner, times

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        if self.times:
            self.times -= 1
            self.owner.send(b"%d" % self.times, timeout=PATIENCE)
        super().append(data, answered)


@pytest.mark.rule("B1", "B10")
def test_an_owner_that_sends_meanwhile_only_delays_the_grant(log: MemoryLog, reach: Reach) -> None:
    owner = reach(UnreliableLog(log), "owner").producer(EXCLUSIVE)
    follower = within(lambda: reach(Late(log, owner, 5), "next").producer(FENCING))
    assert follower.topic_epoch == 2
    assert follower.send(b"x", timeout=PATIENCE) == 5
    with pytest.raises(xl.ProducerFencedError):
        owner.send(b"stale", timeout=PATIENCE)
    assert values(log) == [b"4", b"3", b"2", b"1", b"0", b"x"]


@pytest.mark.rule("C5")
def test_a_forked_child_is_refused_and_waits_for_nothing(
    log: MemoryLog, reach: Reach, resend: Callable[[float], None]
) -> None:
    resend(PATIENCE)
    link, me = UnreliableLog(log), os.getpid()
    topic = reach(link)
    producer = topic.producer(EXCLUSIVE)
    link._chances = Chances(delayed=1.0)
    receipt = producer.send_async(b"x")
    held, called = threading.Lock(), threading.Event()
    held.acquire()  # no thread of the child could release it
    receipt.add_done_callback(lambda _: called.set() if os.getpid() == me else held.acquire())
    until(lambda: link.under_way)

    def refused() -> int:
        calls: list[Callable[[], object]] = [
            lambda: receipt.result(PATIENCE),
            lambda: producer.send(b"child", timeout=PATIENCE),
            lambda: topic.producer(FENCING),
            lambda: topic.next_offset,
        ]
        for call in calls:
            with pytest.raises(xl.EngineClosedError, match=r"inherited through fork\(\)"):
                call()
        producer.close()
        topic.engine.close()
        return len(calls)

    assert forked(refused) == 4
    assert not receipt.done()
    link._chances = Chances()
    link.deliver()
    assert receipt.result(PATIENCE) == 0
    assert called.wait(PATIENCE)
    assert values(log) == [b"x"]
