"""Threads that follow a log and send to it, on links that fail (J2, B9)."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from exclusivelog.cluster.follower import Follower
from exclusivelog.cluster.frames import Holder
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.memory import Chances, MemoryLog, UnreliableLog
from exclusivelog.cluster.ordered import Answered, ignore
from exclusivelog.cluster.rule import State
from exclusivelog.errors import (
    EngineClosedError,
    LedgerCorruptedError,
    LedgerIOError,
    ProducerFencedError,
    WaitTimeoutError,
)
from exclusivelog.messages import Encoded
from exclusivelog.types import AccessMode
from testing.processes import PATIENCE, forked

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
BAD = Chances(lost=0.2, doubled=0.2, delayed=0.2, answer_lost=0.3, answer_doubled=0.2)


def holder(name: str) -> Holder:
    return Holder(name, name, 1, name, AccessMode.EXCLUSIVE)


def one(value: bytes) -> list[Encoded]:
    return [(value, None, None, None, None)]


def values(log: MemoryLog) -> list[bytes | None]:
    return [message.content.value for message in Reader(log).messages()]


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    log = MemoryLog()
    yield log
    log.close()


def test_sends_of_many_threads_are_in_the_log_once(log: MemoryLog) -> None:
    link = UnreliableLog(log, BAD, random.Random(1))
    offsets: dict[bytes, int] = {}

    def send(thread: int, follower: Follower) -> None:
        for number in range(25):
            value = b"%d.%d" % (thread, number)
            offsets[value] = follower.send(one(value), timeout=PATIENCE)

    with Follower(link, holder("p"), resend=0.02) as follower:
        assert follower.acquire(timeout=PATIENCE) == 1
        threads = [threading.Thread(target=send, args=(n, follower)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    there = values(log)
    assert len(there) == len(offsets) == 100
    assert all(there[offset] == value for value, offset in offsets.items())


@pytest.mark.rule("J2", "B9", "B10")
def test_two_that_take_the_topic_from_each_other_lose_no_acknowledged_send(log: MemoryLog) -> None:
    sent: list[tuple[bytes, Future[int]]] = []
    names = ("one", "two")
    followers = [
        Follower(UnreliableLog(log, BAD, random.Random(n)), holder(name), resend=0.02)
        for n, name in enumerate(names)
    ]
    try:
        for turn in range(10):
            follower = followers[turn % 2]
            try:
                follower.acquire(timeout=PATIENCE)
                for number in range(10):
                    value = b"%d.%d" % (turn, number)
                    sent.append((value, follower.send_soon(one(value))))
            except ProducerFencedError:
                continue
        outcomes = [
            (value, future.exception(PATIENCE) or future.result(0)) for value, future in sent
        ]
    finally:
        for follower in followers:
            follower.close()
    there = values(log)
    for value, outcome in outcomes:
        if isinstance(outcome, int):
            assert there[outcome] == value
        else:
            assert isinstance(outcome, ProducerFencedError)
            assert value not in there
    assert len(set(there)) == len(there) >= 10


@pytest.mark.rule("B9")
def test_a_send_that_times_out_may_be_written(log: MemoryLog) -> None:
    link = UnreliableLog(log)
    with Follower(link, holder("p"), resend=30) as follower:
        follower.acquire(timeout=PATIENCE)
        link._chances = Chances(delayed=1.0)
        with pytest.raises(WaitTimeoutError) as raised:
            follower.send(one(b"late"), timeout=0.05)
        assert raised.value.maybe_written
        with pytest.raises(WaitTimeoutError):
            follower.release(timeout=0.05)
        link.deliver()
        link._chances = Chances()
        follower.release(timeout=PATIENCE)
    assert values(log) == [b"late"]


def test_a_request_that_times_out_leaves_no_owner(log: MemoryLog) -> None:
    link = UnreliableLog(log, Chances(delayed=1.0))
    with Follower(link, holder("p"), resend=30) as follower:
        with pytest.raises(WaitTimeoutError):
            follower.acquire(timeout=0.05)
        link._chances = Chances()
        link.deliver()
        follower.catch_up(timeout=PATIENCE)
        follower.catch_up(timeout=PATIENCE)
        assert follower.status == "closed"
        assert not State.restore(follower.save()).owned
        assert follower.acquire(timeout=PATIENCE) == 2


def test_a_request_that_was_lost_and_given_up_can_be_made_again(log: MemoryLog) -> None:
    link = UnreliableLog(log, Chances(lost=1.0))
    with Follower(link, holder("p"), resend=0.02) as follower:
        with pytest.raises(WaitTimeoutError):
            follower.acquire(timeout=0.1)
        link._chances = Chances()
        assert follower.acquire(timeout=PATIENCE) == 1


def test_a_lost_append_is_tried_again_while_other_records_keep_coming(log: MemoryLog) -> None:
    link, stop = UnreliableLog(log), threading.Event()

    def flood() -> None:
        while not stop.wait(0.002):
            log.append(b"foreign")

    thread = threading.Thread(target=flood)
    with Follower(link, holder("p"), resend=0.2) as follower:
        follower.acquire(timeout=PATIENCE)
        thread.start()
        try:
            link._chances = Chances(lost=1.0)
            future = follower.send_soon(one(b"x"))
            link._chances = Chances()
            assert future.result(PATIENCE) == 0
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
def test_an_append_that_raises_leaves_the_outcome_to_the_log(log: MemoryLog, failures: int) -> None:
    link = Failing(log)
    with Follower(link, holder("p"), resend=0.02) as follower:
        follower.acquire(timeout=PATIENCE)
        link.failures = failures
        assert follower.send(one(b"x"), timeout=PATIENCE) == 0
        assert follower.send(one(b"y"), timeout=PATIENCE) == 1
    assert values(log) == [b"x", b"y"]


def test_a_log_of_too_small_records_is_refused() -> None:
    with pytest.raises(ValueError, match="log takes records of 1000 bytes"):
        Follower(MemoryLog(max_bytes=1000), holder("p"))


@pytest.mark.rule("B9")
def test_closing_ends_all_calls_and_says_what_is_in_doubt(log: MemoryLog) -> None:
    link = UnreliableLog(log)
    follower = Follower(link, holder("p"), resend=30)
    follower.acquire(timeout=PATIENCE)
    link._chances = Chances(lost=1.0)
    future = follower.send_soon(one(b"x"))
    follower.close()
    error = future.exception(PATIENCE)
    assert isinstance(error, LedgerIOError)
    assert error.maybe_written
    with pytest.raises(EngineClosedError):
        follower.send(one(b"y"))
    assert not follower._thread.is_alive()


@pytest.mark.rule("G9")
def test_a_damaged_record_ends_all_calls(log: MemoryLog) -> None:
    with Follower(log, holder("p")) as follower:
        follower.acquire(timeout=PATIENCE)
        log.append(b"XLO\x01damaged, and nobody's")
        with pytest.raises((LedgerCorruptedError, LedgerIOError)):
            follower.send(one(b"x"), timeout=PATIENCE)
        with pytest.raises(LedgerCorruptedError):
            follower.acquire(timeout=PATIENCE)


def test_a_callback_of_a_send_may_send(log: MemoryLog) -> None:
    second: Future[Future[int]] = Future()
    with Follower(log, holder("p")) as follower:
        follower.acquire(timeout=PATIENCE)
        first = follower.send_soon(one(b"first"))
        first.add_done_callback(lambda _: second.set_result(follower.send_soon(one(b"second"))))
        assert second.result(PATIENCE).result(PATIENCE) == 1
    assert values(log) == [b"first", b"second"]


def test_following_goes_on_from_a_saved_state(log: MemoryLog) -> None:
    with Follower(log, holder("p")) as follower:
        follower.acquire(timeout=PATIENCE)
        follower.send(one(b"first"), timeout=PATIENCE)
        follower.release(timeout=PATIENCE)
        saved = follower.save()
    log.trim(2)
    with Follower(log, holder("p"), state=State.restore(saved)) as follower:
        assert follower.acquire(timeout=PATIENCE) == 2
        assert follower.send(one(b"second"), timeout=PATIENCE) == 1


class Late(UnreliableLog):
    """Another process's frames come in just before this one's appends, some times."""

    def __init__(self, log: MemoryLog, owner: Follower, times: int) -> None:
        super().__init__(log)
        self.owner, self.times = owner, times

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        if self.times:
            self.times -= 1
            self.owner.send(one(b"%d" % self.times), timeout=PATIENCE)
        super().append(data, answered)


@pytest.mark.rule("B1", "B10")
def test_an_owner_that_sends_meanwhile_only_delays_the_grant(log: MemoryLog) -> None:
    with Follower(log, holder("owner")) as owner:
        owner.acquire(timeout=PATIENCE)
        with Follower(Late(log, owner, 5), holder("next")) as follower:
            assert follower.acquire(timeout=PATIENCE) == 2
            assert follower.send(one(b"x"), timeout=PATIENCE) == 5
        with pytest.raises(ProducerFencedError):
            owner.send(one(b"stale"), timeout=PATIENCE)
    assert values(log) == [b"4", b"3", b"2", b"1", b"0", b"x"]


@pytest.mark.rule("C5")
def test_a_forked_child_is_refused_and_waits_for_nothing(log: MemoryLog) -> None:
    link, me = UnreliableLog(log), os.getpid()
    with Follower(link, holder("p"), resend=30) as follower:
        follower.acquire(timeout=PATIENCE)
        link._chances = Chances(delayed=1.0)
        future = follower.send_soon(one(b"x"))
        held, called = threading.Lock(), threading.Event()
        held.acquire()  # no thread of the child could release it
        future.add_done_callback(lambda _: called.set() if os.getpid() == me else held.acquire())

        def refused() -> str:
            for call in (
                lambda: future.result(PATIENCE),
                lambda: follower.send(one(b"child"), timeout=PATIENCE),
                lambda: follower.acquire(timeout=PATIENCE),
                lambda: follower.catch_up(timeout=PATIENCE),
                lambda: follower.release(timeout=PATIENCE),
            ):
                with pytest.raises(EngineClosedError, match=r"inherited through fork\(\)"):
                    call()
            follower.close()
            return follower.status

        assert forked(refused) == "closed"
        assert not future.done()
        link.deliver()
        assert future.result(PATIENCE) == 0
        assert called.wait(PATIENCE)
    assert values(log) == [b"x"]
