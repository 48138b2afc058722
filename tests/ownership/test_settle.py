"""Rules D6 to D8: whom a freed topic wakes, how long it waits, what its new owner reads first.

A machine is restarted: the waiters reconnect one by one, and the best of them need not be the
first. So a waiter that has just joined the queue may leave the topic to better ones for a while. A
waiter that has been in the queue for long does not: a death costs only the promotion. A new owner
must also have read all that was written before, down to what its predecessor had acknowledged at
the moment of its death.
"""

from __future__ import annotations

import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core, admission
from exclusivelog.local import records
from exclusivelog.local.ownership import promoting
from exclusivelog.local.shm.slots import OPENED, SLOT_SIZE, SLOTS, WAKE_UPS
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    Worker,
    hang,
    open_producer,
    rows,
    until,
    values,
    within,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

SHARED, EXCLUSIVE = "shared", "exclusive"
WAIT, FENCING = "wait_for_exclusive", "exclusive_with_fencing"

FENCED = xl.ProducerFencedError
SETTLE = 0.4  # seconds
KEEPALIVE = 0.5  # of those that hang
# More than passes between a waiter's call and the end of the owner before it, also under load: who
# came less than its time before the topic became free has just come.
JUST_COME = 3.0


class Watch:
    """How long something took since the watch was started."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin


def granted(future: Any) -> xl.Producer:
    """The producer, which must be granted without another call."""
    producer: xl.Producer = future.result(timeout=PATIENCE)
    return producer


def free_for_long(topic: xl.Topic) -> None:
    """Until the topic has been free for longer than `SETTLE`."""
    time.sleep(SETTLE + 0.1)
    assert not topic.holders


# ---- D7: who has just come waits ---------------------------------------------------------


def by_closing_its_producer(process: Worker) -> None:
    process.call(close_kept)


def by_being_killed(process: Worker) -> None:
    process.signal(signal.SIGKILL)


def by_hanging(process: Worker) -> None:
    hang(process, KEEPALIVE)


def close_kept(state: State) -> None:
    assert state.producer is not None
    state.producer.close()


LEAVES = (by_closing_its_producer, by_being_killed, by_hanging)


@pytest.mark.long
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
@pytest.mark.parametrize("leave", LEAVES)
def test_d7_a_freed_topic_is_left_to_settle(
    topic: xl.Topic, worker: Callable[..., Worker], leave: Callable[[Worker], None], mode: str
) -> None:
    """However the last one left it: its best waiter, which has just come, gets the topic when the
    time is over, on its own, and not before."""
    process = worker()
    epoch = process.call(open_producer, mode)
    watch = Watch()  # before it comes: on a busy machine, `leave` may take as long
    waiter = topic.producer_async(WAIT, settle=JUST_COME)
    leave(process)
    with granted(waiter) as producer:
        assert watch.seconds >= JUST_COME
        assert producer.topic_epoch == epoch + 1
        assert producer.send(b"x") == 0
    process.kill()


@pytest.mark.long
def test_d7_closing_the_owner_s_engine_frees_the_topic_too(engine: xl.Engine) -> None:
    with xl.open(engine.path) as other:
        owner, watch = other.topic("orders").producer(EXCLUSIVE), Watch()
        waiter = engine.topic("orders").producer_async(WAIT, settle=JUST_COME)
    assert owner.state == "closed"
    assert granted(waiter).topic_epoch == 2
    assert watch.seconds >= JUST_COME


@pytest.mark.long
@pytest.mark.parametrize("leave", LEAVES)
def test_d7_one_that_has_waited_for_long_is_promoted_at_once(
    topic: xl.Topic, worker: Callable[..., Worker], leave: Callable[[Worker], None]
) -> None:
    """However the last owner left it: no former owner has to reconnect, and the wait is no part of
    the failover."""
    process = worker()
    epoch = process.call(open_producer, EXCLUSIVE)
    waiter = topic.producer_async(WAIT, settle=JUST_COME)
    time.sleep(JUST_COME + 0.1)
    watch = Watch()
    leave(process)
    with granted(waiter) as producer:
        assert watch.seconds < PATIENCE
        assert producer.topic_epoch == epoch + 1
    process.kill()
    kinds = [kind for _, (kind, *_) in notifications_of(topic.engine)]
    assert "later" not in kinds, "no waiter is told to retry"


def notifications_of(engine: xl.Engine) -> list[Any]:
    with engine.ledger.read() as tables:
        return tables.notifications.read(engine.id, 0)


@pytest.mark.long
def test_d7_a_topic_that_has_long_been_free_is_granted_at_once(topic: xl.Topic) -> None:
    """No waiter waits for a delay that has passed: not on a topic that was never owned, nor on
    one whose owner left before."""
    for _ in range(2):
        free_for_long(topic)
        topic.producer(WAIT, settle=SETTLE, timeout=0).close()
    with pytest.raises(xl.WaitTimeoutError):
        topic.producer(WAIT, settle=60, timeout=0)


def test_d7_only_what_is_left_of_the_time_is_waited_for(topic: xl.Topic) -> None:
    """The topic has been free for ten minutes, less a moment."""
    topic.producer(EXCLUSIVE).close()
    ago = min(_core.now() // 2, 600 * 10**9)  # the machine may just have started
    with topic.engine.ledger.write_exclusive() as tables:
        row = tables.topics.get(topic.id)
        freed = row.freed = row.freed - ago
        tables.topics.put(row)
    topic.engine.ledger.lockfile.atomics.store64(OPENED, freed - 1)
    with topic.producer(WAIT, settle=ago / 1e9 + SETTLE, timeout=PATIENCE):
        assert _core.now() - freed >= ago + SETTLE * 1e9


@pytest.mark.long
def test_d7_each_topic_settles_for_itself(engine: xl.Engine) -> None:
    """One engine awaits thirty topics that have become free together, each with a time of its
    own, in no order."""
    chance = random.Random(7)
    times = [0.1 + 0.03 * number for number in range(30)]
    chance.shuffle(times)
    topics = [engine.topic(f"t{number}") for number in range(30)]
    owners = [topic.producer(EXCLUSIVE) for topic in topics]
    waited: dict[int, float] = {}
    futures = []
    watch = Watch()
    for owner in owners:
        owner.close()
    for number, (topic, settle) in enumerate(zip(topics, times, strict=True)):
        futures.append(topic.producer_async(WAIT, settle=settle))
        futures[-1].add_done_callback(
            lambda _, number=number: waited.update({number: watch.seconds})
        )
    until(lambda: len(waited) == 30)
    for number, settle in enumerate(times):
        assert waited[number] >= settle
        assert granted(futures[number]).topic_epoch == 2


# ---- D7: who wins ------------------------------------------------------------------------


def wait_in_a_worker(state: State, priority: int, settle: float) -> float:
    """Queue up and own the topic; the monotonic clock when that was."""
    state.producer = state.topic.producer(WAIT, priority=priority, settle=settle)
    return time.monotonic()


@pytest.mark.long
def test_d7_a_higher_priority_that_arrives_meanwhile_wins(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The leader dies. The standby that comes back first is the worse one; the better one comes
    a moment later, in a process of its own, and is who decides how long."""
    owner, worse, better = (worker(name=name) for name in ("owner", "worse", "better"))
    owner.call(open_producer, EXCLUSIVE)
    worse.start(wait_in_a_worker, 1, 86400.0)
    until(lambda: topic.waiters)
    begin = time.monotonic()
    owner.kill()
    time.sleep(0.3)
    better.start(wait_in_a_worker, 9, 0.8)
    assert better.answer() - begin >= 0.8
    assert topic.owner is not None
    assert (topic.owner.engine_name, topic.owner.epoch) == ("better", 2)
    assert not worse.answered()
    assert [waiter.engine_name for waiter in topic.waiters] == ["worse"]


@pytest.mark.long
def test_d7_the_lower_one_is_promoted_if_no_better_one_comes(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The owner and everybody else are gone: the waiter's own engine must come back to it."""
    lonely, owner = worker(name="lonely"), topic.producer(EXCLUSIVE)
    begin = time.monotonic()
    lonely.start(wait_in_a_worker, -5, JUST_COME)
    until(lambda: topic.waiters)
    owner.close()
    path = topic.engine.path
    topic.engine.close()
    assert lonely.answer() - begin >= JUST_COME
    with xl.open(path) as engine:
        assert engine.topic("orders").epoch == 2


@pytest.mark.long
def test_d7_the_best_one_s_time_counts(topic: xl.Topic) -> None:
    """Waiters behind it wait as long, whether their own delays are shorter or longer."""
    with topic.producer(EXCLUSIVE):
        watch = Watch()
        best = topic.producer_async(WAIT, priority=5, settle=JUST_COME)
        others = [topic.producer_async(WAIT, settle=settle) for settle in (0, 60)]
    with granted(best):
        assert watch.seconds >= JUST_COME
        assert not any(other.done() for other in others)
    with granted(others[0]) as next_one:
        assert next_one.topic_epoch == 3
    assert others[1].cancel()


def test_d7_a_better_one_that_need_not_wait_does_not(topic: xl.Topic) -> None:
    topic.producer(EXCLUSIVE).close()
    patient = topic.producer_async(WAIT, settle=60)
    hasty = topic.producer_async(WAIT, priority=1)
    with granted(hasty) as producer:
        assert producer.topic_epoch == 2
    assert not patient.done()
    assert patient.cancel()


@pytest.mark.parametrize("settle", [0.0, SETTLE])
def test_d7_a_worse_one_that_need_not_wait_stands_behind(topic: xl.Topic, settle: float) -> None:
    topic.producer(EXCLUSIVE).close()
    best = topic.producer_async(WAIT, priority=1, settle=60)
    worse = topic.producer_async(WAIT, settle=settle)
    time.sleep(SETTLE + 0.1)
    assert not worse.done()
    assert best.cancel()
    assert granted(worse).topic_epoch == 2


@pytest.mark.long
def test_d7_those_who_waited_meanwhile_do_not_wait_again(topic: xl.Topic) -> None:
    """The first of them lets the topic settle; each of the others has waited for as long by the
    time that it is free again."""
    owner, watch = topic.producer(EXCLUSIVE), Watch()
    waiters = [topic.producer_async(WAIT, settle=JUST_COME) for _ in range(4)]
    owner.close()
    granted(waiters[0]).close()
    assert watch.seconds >= JUST_COME
    for epoch, waiter in enumerate(waiters[1:], 3):
        assert (topic.epoch, topic.owner is not None) == (epoch, True)  # since the last `close`
        granted(waiter).close()
    assert topic.epoch == 5


# ---- D7: the better, the sooner ----------------------------------------------------------


def session(priority: int, settle: int = 900, created: int = 10_000) -> records.Session:
    return records.Session(
        id=1,
        topic=1,
        engine="0" * 16,
        slot=0,
        pid=1,
        engine_name="e",
        name="n",
        mode=WAIT,
        priority=priority,
        created=created,
        tie=0,
        since=0,
        settle=settle,
    )


@pytest.mark.parametrize(
    ("priority", "seconds"),
    [(-(2**63), 900), (0, 900), (1, 600), (2, 300), (3, 0), (4, 0), (2**63 - 1, 0)],
)
def test_d7_the_delay_is_0_for_the_best_and_grows_downward(priority: int, seconds: int) -> None:
    """Of what is known, 3 is the best priority and 0 the lowest."""
    assert _core.delay(priority, 900, (3, 0)) == seconds
    assert promoting.eligible_at(session(priority), 10_000, (3, 0)) == 10_000 + seconds


@pytest.mark.parametrize("known", [None, (0, 0), (7, 7)])
def test_d7_if_the_best_is_unknown_all_wait(known: admission.Known | None) -> None:
    for priority in (-1, 0, 7, 8):
        assert _core.delay(priority, 900, known) == 900


def test_d7_the_delay_is_in_order_whatever_the_priorities_are() -> None:
    chance = random.Random(7)
    for _ in range(2000):
        bits = chance.choice([2, 8, 63])
        known = admission.widened(None, *(chance.randrange(-(2**bits), 2**bits) for _ in range(3)))
        better, worse = sorted(chance.randrange(-(2**bits), 2**bits) for _ in range(2))[::-1]
        settle = chance.randrange(10**14)
        delays = [_core.delay(each, settle, known) for each in (better, worse)]
        assert 0 <= delays[0] <= delays[1] <= settle


@pytest.mark.parametrize(
    ("created", "eligible_at"),
    [(9_000, 10_000), (9_100, 10_000), (9_101, 10_900), (12_000, 10_900)],
)
def test_d7_who_came_its_delay_before_has_waited_for_it(created: int, eligible_at: int) -> None:
    """The topic has been free since 10,000, and the delay is 900."""
    assert promoting.eligible_at(session(0, created=created), 10_000, None) == eligible_at


def leave_waiters_behind(path: str, worker: Callable[..., Worker], *priorities: int) -> None:
    """The best of these owned the topic while the others waited; then all were killed."""
    processes = [worker(name=f"before-{priority}") for priority in priorities]
    for number, (process, priority) in enumerate(zip(processes, priorities, strict=True)):
        process.start(wait_in_a_worker, priority, 0.0)
        if number == 0:
            process.answer()
    until(lambda: len(waiting_rows(path)) == len(priorities) - 1)
    for process in processes:  # all at once, so that none succeeds another
        hang(process)
    for process in processes:
        process.kill()


@pytest.mark.long
def test_d7_after_a_restart_the_best_comes_first_though_it_comes_later(
    path: str, worker: Callable[..., Worker]
) -> None:
    """Everybody has died, and the lowest priority is the first to come back. The best one need
    not wait when it comes: no better one is known."""
    leave_waiters_behind(path, worker, 9, 5, 1)
    low, high = worker(name="low"), worker(name="high")
    low.start(wait_in_a_worker, 1, 2 * PATIENCE)
    until(lambda: [waiter.engine_name for waiter in waiting_rows(path)] == ["low"])
    time.sleep(0.3)
    assert not low.answered()
    watch = Watch()
    high.start(wait_in_a_worker, 9, 2 * PATIENCE)
    high.answer()
    assert watch.seconds < PATIENCE
    assert not low.answered()
    watch = Watch()  # the delay counts from when the topic is free, and that may be at once
    high.kill()
    with xl.open(path) as engine:  # and again: the best one that comes now is in the middle
        middle = engine.topic("orders").producer_async(WAIT, priority=5, settle=4.0)
        assert granted(middle).topic_epoch == 3
        assert 2.0 <= watch.seconds < 4.0 + PATIENCE
    low.kill()


@pytest.mark.long
def test_d7_after_a_restart_the_lowest_waits_as_long_as_it_asks(
    path: str, worker: Callable[..., Worker]
) -> None:
    leave_waiters_behind(path, worker, 9, 5, 1)
    watch = Watch()
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        assert granted(topic.producer_async(WAIT, priority=1, settle=1.5)).topic_epoch == 2
        assert watch.seconds >= 1.5


@pytest.mark.long
def test_d7_one_that_died_and_comes_back_leaves_the_topic_to_better_ones(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It is the only one there, and the topic became free with its own death."""
    process, again, best = (worker(name=name) for name in ("worse", "worse again", "best"))
    with topic.producer(WAIT, priority=9):
        process.start(wait_in_a_worker, 1, 0.0)
        until(lambda: topic.waiters)
    process.answer()
    process.kill()
    again.start(wait_in_a_worker, 1, 60.0)
    until(lambda: [waiter.engine_name for waiter in topic.waiters] == ["worse again"])
    assert topic.owner is None
    best.start(wait_in_a_worker, 9, 60.0)
    best.answer()
    assert topic.owner is not None
    assert (topic.owner.engine_name, topic.owner.epoch) == ("best", 3)


def test_d7_priorities_are_known_once_a_waiter_has_had_the_topic(topic: xl.Topic) -> None:
    """While the first ones come, the best of them may be still to come."""

    def known() -> admission.Known | None:
        with topic.engine.ledger.read() as tables:
            return tables.sessions.known(topic.id)

    with topic.producer(EXCLUSIVE, priority=99):  # which it ignores (rule D2)
        first = topic.producer_async(WAIT, priority=2)
        second = topic.producer_async(WAIT, priority=-3)
        third = topic.producer_async(WAIT, priority=0)
        assert known() is None
    with granted(first):
        assert known() == (2, -3)
        assert topic.producer_async(WAIT, priority=7).cancel()
        assert known() == (7, -3)
        assert third.cancel()
    granted(second).close()
    assert known() == (7, -3)
    topic.engine.delete_topic("orders")
    assert known() is None


# ---- D7: while it settles ----------------------------------------------------------------


@pytest.fixture
def settling(topic: xl.Topic) -> Iterator[Any]:
    """The best waiter of a free topic, which is to settle for a minute."""
    topic.producer(EXCLUSIVE).close()
    waiter = topic.producer_async(WAIT, name="settling", priority=9, settle=60)
    assert not waiter.done()
    yield waiter
    waiter.cancel()


def test_d7_a_cancel_lets_the_next_one_have_the_topic(topic: xl.Topic, settling: Any) -> None:
    next_one = topic.producer_async(WAIT)
    assert not next_one.done()
    assert settling.cancel()
    assert granted(next_one).topic_epoch == 2
    with pytest.raises(CancelledError):
        settling.result(0)


def test_d7_a_cancel_leaves_the_next_one_its_own_time(topic: xl.Topic) -> None:
    owner, watch = topic.producer(EXCLUSIVE), Watch()
    owner.close()
    best = topic.producer_async(WAIT, priority=9, settle=60)
    next_one = topic.producer_async(WAIT, settle=0.8)
    time.sleep(0.2)
    assert best.cancel()
    assert granted(next_one).topic_epoch == 2
    assert watch.seconds >= 0.8


def test_d7_the_last_one_s_cancel_leaves_nothing_behind(topic: xl.Topic, settling: Any) -> None:
    assert settling.cancel()
    assert (topic.owner, topic.waiters, topic.epoch) == (None, [], 1)
    assert rows(topic.engine)["queue"] == []
    with topic.producer(EXCLUSIVE) as producer:
        assert producer.topic_epoch == 2


@pytest.mark.long
def test_d7_a_cancel_that_races_with_the_end_of_the_time_leaves_no_orphan(
    topic: xl.Topic,
) -> None:
    """Either it was first, and the topic is free, or the future has its producer at once."""
    granted_ones = 0
    for number in range(80):
        topic.producer(EXCLUSIVE).close()
        waiter = topic.producer_async(WAIT, settle=0.01)
        time.sleep(0.006 + number % 20 * 0.0004)
        cancelled = waiter.cancel()
        assert waiter.done()
        assert waiter.cancelled() is cancelled
        if not cancelled:
            granted_ones += 1
            waiter.result(0).close()
        assert (topic.owner, topic.waiters) == (None, [])
    assert topic.epoch == 80 + granted_ones


def test_d7_a_timeout_is_kept_while_the_topic_settles(topic: xl.Topic) -> None:
    topic.producer(EXCLUSIVE).close()
    watch = Watch()
    best = topic.producer_async(WAIT, priority=9, settle=60, timeout=0.3)
    next_one = topic.producer_async(WAIT)
    with pytest.raises(xl.WaitTimeoutError):
        best.result(PATIENCE)
    assert watch.seconds >= 0.3
    with granted(next_one) as producer:
        assert producer.topic_epoch == 2
    with pytest.raises(xl.WaitTimeoutError):
        topic.producer(WAIT, settle=60, timeout=0.1)
    until(lambda: topic.waiters == [])  # one that ended late leaves the queue after that
    assert topic.owner is None


@pytest.mark.parametrize("leave", [by_being_killed, by_hanging])
def test_d7_one_that_dies_or_hangs_while_it_settles_is_passed_over(
    topic: xl.Topic, worker: Callable[..., Worker], leave: Callable[[Worker], None]
) -> None:
    """It is the engine that was to come back to the topic. Another one does, for the next."""
    process = worker()
    topic.producer(EXCLUSIVE).close()
    process.start(wait_in_a_worker, 9, 60)
    until(lambda: topic.waiters)
    waiter = topic.producer_async(WAIT, settle=0.1)
    leave(process)
    assert granted(waiter).topic_epoch == 2
    assert topic.waiters == []
    process.kill()


@pytest.mark.long
def test_d7_one_that_was_stopped_for_a_moment_is_granted_when_it_goes_on(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process, owner = worker(keepalive=30), topic.producer(EXCLUSIVE)
    process.start(wait_in_a_worker, 9, JUST_COME)
    until(lambda: topic.waiters)
    waiter = topic.producer_async(WAIT)
    hang(process)
    owner.close()
    time.sleep(JUST_COME + 0.2)
    assert not waiter.done()
    process.signal(signal.SIGCONT)
    process.answer()
    assert topic.owner is not None
    assert topic.owner.engine_name == "worker"


def test_d7_it_is_as_taken_as_any_topic_with_a_waiter(topic: xl.Topic, settling: Any) -> None:
    """Others are refused or stand in the queue, and are told who is in their way (rule A)."""
    for mode, error in ((SHARED, xl.ProducerBusyError), (EXCLUSIVE, FENCED)):
        with pytest.raises(error) as caught:
            topic.producer(mode)
        assert caught.value.holder is not None
        assert caught.value.holder.producer_name == "settling"
    with pytest.raises(xl.WaitTimeoutError):
        topic.producer(WAIT, timeout=0.1)
    # One that ended late leaves the queue after that.
    until(lambda: [waiter.producer_name for waiter in topic.waiters] == ["settling"])
    assert topic.epoch == 1


def test_d7_fencing_does_not_wait_and_fails_who_settles(topic: xl.Topic, settling: Any) -> None:
    with topic.producer(FENCING, settle=60) as producer:
        assert producer.topic_epoch == 2
        with pytest.raises(FENCED):
            settling.result(PATIENCE)
        assert topic.waiters == []


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, FENCING])
def test_d7_other_modes_ignore_it(topic: xl.Topic, mode: str) -> None:
    topic.producer(EXCLUSIVE).close()
    within(lambda: topic.producer(mode, settle=86400), PATIENCE).close()


def test_d7_an_owner_that_reconnects_keeps_its_epoch(topic: xl.Topic) -> None:
    owner, watch = topic.producer(EXCLUSIVE), Watch()
    owner.close()
    with topic.producer(WAIT, topic_epoch=1, settle=SETTLE) as producer:
        assert watch.seconds >= SETTLE
        assert producer.topic_epoch == 1


@pytest.mark.parametrize(
    ("settle", "error"),
    [
        (-0.1, ValueError),
        (float("nan"), ValueError),
        (86400.5, ValueError),
        (float("inf"), ValueError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
@pytest.mark.parametrize("mode", [WAIT, SHARED])
def test_d7_wrong_times_say_what_is_taken(
    topic: xl.Topic, settle: Any, error: type[Exception], mode: str
) -> None:
    for ask in (topic.producer, topic.producer_async):
        with pytest.raises(error, match=r"settle=.*it takes seconds from 0 to 86400"):
            ask(mode, settle=settle)
    assert (topic.holders, topic.waiters) == ([], [])


# ---- D7: after a restart -----------------------------------------------------------------


def test_d7_a_ledger_that_is_opened_again_settles_as_a_whole(path: str) -> None:
    """Everything was closed, for however long. Any process may be the first to come back."""
    with xl.open(path) as engine:
        engine.topic("orders").producer(EXCLUSIVE).close()
        free_for_long(engine.topic("orders"))
    watch = Watch()
    with xl.open(path, name="first") as first, xl.open(path, name="second") as second:
        worse = first.topic("orders").producer_async(WAIT, settle=60)
        never_owned = first.topic("new").producer_async(WAIT, settle=SETTLE)
        better = second.topic("orders").producer_async(WAIT, priority=1, settle=SETTLE)
        assert granted(better).topic_epoch == 2
        assert watch.seconds >= SETTLE
        assert granted(never_owned).topic_epoch == 1
        assert not worse.done()


def test_d7_after_a_crash_of_everybody_too(path: str, worker: Callable[..., Worker]) -> None:
    """The old owner's row is still there, and so are those who waited for it."""
    owner, waiter = worker(name="owner"), worker(name="waiter")
    owner.call(open_producer, EXCLUSIVE)
    waiter.start(open_producer, WAIT, priority=9)
    until(lambda: len(waiting_rows(path)) == 1)
    owner.kill()
    waiter.kill()
    watch = Watch()
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        worse = topic.producer_async(WAIT, settle=60)
        better = topic.producer_async(WAIT, priority=1, settle=SETTLE)
        assert granted(better).topic_epoch == topic.epoch
        assert watch.seconds >= SETTLE
        assert not worse.done()


def waiting_rows(path: str) -> list[Any]:
    with xl.open(path, readonly=True) as engine:
        return engine.topic("orders").waiters


def test_d7_one_more_engine_is_no_restart(path: str, topic: xl.Topic) -> None:
    free_for_long(topic)
    with xl.open(path) as newcomer:
        assert newcomer.topic("orders").producer(WAIT, settle=SETTLE, timeout=0).send(b"x") == 0


def test_d7_a_time_of_an_earlier_boot_means_nothing(topic: xl.Topic) -> None:
    """The monotonic clock begins anew with the machine, and a topic that was freed in the
    future would be left to settle for ever."""
    free_for_long(topic)
    with topic.engine.ledger.write_exclusive() as tables:
        row = tables.topics.get(topic.id)
        row.freed = time.monotonic_ns() + 10**15
        tables.topics.put(row)
    with topic.producer(WAIT, settle=SETTLE, timeout=0) as producer:
        assert producer.topic_epoch == 1


def test_d7_a_promotion_that_fails_is_tried_again(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the very moment when the time is over, and soon is not any more. A
    topic with a live waiter is never left idle (rule D4)."""
    sessions = topic.engine.backend.sessions
    promote = sessions.promote_again
    attempts = []

    def fail_at_first(topics: Any) -> None:
        attempts.append(topics)
        if len(attempts) == 1:
            raise xl.LedgerFullError("no room left")
        promote(topics)

    monkeypatch.setattr(sessions, "promote_again", fail_at_first)
    topic.producer(EXCLUSIVE).close()
    waiter = topic.producer_async(WAIT, settle=0.2)
    until(lambda: attempts)
    assert granted(waiter).topic_epoch == 2


def test_d7_one_that_comes_back_too_early_comes_back_again(topic: xl.Topic) -> None:
    """Its clock may be early, or it is woken for something else. The retry time that it has
    kept is over: it gets a new one, although its time is the same as before."""
    topic.producer(EXCLUSIVE).close()
    waiter = topic.producer_async(WAIT, settle=0.5)
    retries = topic.engine.backend.notifications.retries
    until(lambda: retries._due or waiter.done())  # the machine may be too busy to see the first
    retries._due.clear()
    topic.engine.backend.sessions.promote_again([topic.id])
    assert granted(waiter).topic_epoch == 2


def test_d7_newcomers_wakes_no_engine_while_it_settles(path: str, topic: xl.Topic) -> None:
    """The best waiter knows when to come back. It need not be told again for each of the many
    that queue up behind it and leave, and what it is told must not pile up (rule D6)."""
    topic.producer(EXCLUSIVE).close()
    best = topic.producer_async(WAIT, priority=9, settle=60)
    slot = topic.engine.backend._slot
    assert slot is not None
    before = slot.wake_up_count()
    with xl.open(path) as other:
        for _ in range(20):
            assert other.topic("orders").producer_async(WAIT).cancel()
    assert slot.wake_up_count() - before < 10
    assert len(rows(topic.engine)["mail"]) < 10
    assert best.cancel()


# ---- D8: what the new owner reads first --------------------------------------------------


def test_d8_a_promoted_producer_reads_all_of_its_predecessors(topic: xl.Topic) -> None:
    for number in range(4):
        with topic.producer(WAIT if number % 2 else EXCLUSIVE) as owner:
            owner.send(b"%d" % number)
            owner.send_many([b"%d" % number] * 100)
            owner.send(bytes(200_000))
    reader = topic.reader()
    with topic.producer(WAIT) as producer:
        seen = list(producer.catch_up(reader))
        assert [message.offset for message in seen] == list(range(4 * 102))
        assert reader.position == topic.next_offset == producer.send(b"next")
        assert [message.value for message in producer.catch_up(reader)] == [b"next"]
        assert list(producer.catch_up(reader)) == []


def test_d8_it_goes_on_where_the_reader_stands(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as owner:
        owner.send_many([b"%d" % i for i in range(10)])
        reader = topic.reader(group="standby")
        reader.read_batch(4)
        reader.commit()
        waiter = topic.producer_async(WAIT)
    with granted(waiter) as producer:
        assert [message.offset for message in producer.catch_up(reader)] == list(range(4, 10))
        reader.commit()
    assert topic.reader(group="standby").position == 10


def send_for_ever(state: State, notes: str) -> None:
    """Own the topic and send; note how many were acknowledged, after each."""
    count = struct.Struct("q")
    with state.topic.producer(EXCLUSIVE) as producer, Path(notes).open("wb", buffering=0) as file:
        number = 0
        while True:
            producer.send(b"%d" % number)
            number += 1
            file.seek(0)
            file.write(count.pack(number))


@pytest.mark.parametrize("durability", ["process", "power"])
def test_d8_a_standby_misses_nothing_of_a_killed_owner(
    path: str, worker: Callable[..., Worker], tmp_path: Path, durability: str
) -> None:
    """A standby follows the log of an owner that is killed in full flight, and takes over. The
    owner's engine acknowledges before it flushes; the standby's shows nothing that is not
    flushed. All the same it has seen, before its first own message, all that was acknowledged,
    also in the last microsecond; and nothing turns up behind it."""
    with xl.open(path, name="standby", durability="power") as engine:
        topic = engine.topic("orders")
        reader = topic.reader()
        for _ in range(4):
            first, notes = topic.next_offset, tmp_path / "notes"
            notes.write_bytes(bytes(8))
            owner = worker(name="owner", durability=durability)
            owner.start(send_for_ever, str(notes))
            until(lambda notes=notes: notes.read_bytes() > bytes(8))
            waiter = topic.producer_async(WAIT)
            seen = follow_until_killed(reader, owner)
            with granted(waiter) as producer:
                seen += producer.catch_up(reader)
                [acknowledged] = struct.unpack("q", notes.read_bytes())
                assert [message.offset for message in seen] == list(range(first, first + len(seen)))
                assert [message.value for message in seen] == [b"%d" % i for i in range(len(seen))]
                assert acknowledged <= len(seen) <= acknowledged + 1
                assert producer.send(b"mine") == reader.position
            assert [message.value for message in reader] == [b"mine"]


def follow_until_killed(reader: xl.Reader, owner: Worker) -> list[xl.Message]:
    """What a standby reads on the way."""
    seen = []
    end = time.monotonic() + random.uniform(0.02, 0.15)
    while time.monotonic() < end:
        seen += reader.read_batch(100)
    owner.kill()
    return seen


def test_d8_who_is_fenced_meanwhile_learns_of_it(topic: xl.Topic) -> None:
    """Its successor may have written: what it has seen is not all, and it must not think so."""
    with topic.producer(EXCLUSIVE) as owner:
        owner.send_many([b"old"] * 1000)
    producer = topic.producer(WAIT)
    messages = producer.catch_up(topic.reader())
    assert next(messages).value == b"old"
    with topic.producer(FENCING) as rival:
        rival.send(b"new")
        with pytest.raises(FENCED) as caught:
            list(messages)
    with pytest.raises(FENCED) as again:
        producer.send(b"zombie")
    assert again.value is caught.value
    with pytest.raises(FENCED):
        list(producer.catch_up(topic.reader()))


def test_d8_who_hangs_while_it_reads_learns_of_it(
    topic: xl.Topic, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    with topic.producer(EXCLUSIVE) as owner:
        owner.send_many([b"old"] * 50)
    process, go_on = worker(keepalive=0.4), tmp_path / "go_on"
    process.start(catch_up_slowly, str(go_on))
    until(lambda: topic.owner is not None)
    hang(process)
    with topic.producer(WAIT, timeout=PATIENCE) as successor:
        go_on.touch()
        process.signal(signal.SIGCONT)
        with pytest.raises(Failed, match="ProducerFencedError"):
            process.answer()
        successor.send(b"mine")


def catch_up_slowly(state: State, go_on: str) -> list[bytes]:
    """Read the first message; the others once the file is there."""
    found = []
    with state.topic.producer(WAIT) as producer:
        for message in producer.catch_up(state.topic.reader()):
            found.append(message.value)
            until(Path(go_on).exists)
    return found


def test_d8_who_has_closed_cannot_catch_up(topic: xl.Topic) -> None:
    producer = topic.producer(EXCLUSIVE)
    producer.close()
    with pytest.raises(xl.EngineClosedError):
        list(producer.catch_up(topic.reader()))


def test_d8_another_topic_s_reader_is_refused(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        elsewhere = engine.topic("elsewhere").reader()
        with pytest.raises(ValueError, match="takes one of topic 'orders'"):
            list(producer.catch_up(elsewhere))


def test_d8_another_topic_s_reader_is_refused_at_once(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        with pytest.raises(ValueError, match="takes one of topic 'orders'"):
            producer.catch_up(engine.topic("elsewhere").reader())


def test_d8_another_ledger_s_reader_is_refused(topic: xl.Topic, tmp_path: Path) -> None:
    with xl.open(tmp_path / "other") as other, topic.producer(EXCLUSIVE) as producer:
        reader = other.topic("orders").reader()
        with pytest.raises(ValueError, match="reader"):
            list(producer.catch_up(reader))


# ---- D6: whom it wakes -------------------------------------------------------------------

CROWD = 250


def queue_up(state: State, priorities: list[int], settle: float = 0.0) -> str:
    """Wait so many times for the topic; the engine's id."""
    name = state.engine.name
    state.kept["waiting"] = {
        f"{name}-{number}": state.topic.producer_async(
            WAIT, name=f"{name}-{number}", priority=priority, settle=settle
        )
        for number, priority in enumerate(priorities)
    }
    return state.engine.id


def take_writer_lock(state: State, name: str) -> int:
    """Own the topic; the epoch."""
    state.producer = state.kept["waiting"].pop(name).result(PATIENCE)
    state.producer.send(name.encode())
    return state.producer.topic_epoch


def threads(state: State) -> int:
    return threading.active_count()


class Crowd:
    """Processes in which many wait for one topic."""

    def __init__(self, topic: xl.Topic, processes: list[Worker]) -> None:
        chance = random.Random(6)
        self.topic = topic
        self.processes = {f"w{number}": process for number, process in enumerate(processes)}
        for process in processes:
            process.start(queue_up, [chance.randint(-2, 2) for _ in range(CROWD)])
        self.ids = {name: process.answer() for name, process in self.processes.items()}

    def wake_ups(self) -> dict[str, int]:
        """How often each process has been woken so far."""
        lockfile = self.topic.engine.ledger.lockfile
        found = {name: lockfile.slots.find(engine) for name, engine in self.ids.items()}
        return {
            name: lockfile.atomics.load(SLOTS + place[0] * SLOT_SIZE + WAKE_UPS)
            for name, place in found.items()
            if place is not None
        }

    def woken_by(self, action: Callable[[], Any]) -> dict[str, int]:
        """Who was woken while this was done, and how often."""
        before = self.wake_ups()
        action()
        after = self.wake_ups()
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.mark.long
def test_d6_a_thousand_waiters_in_four_processes_cost_one_wake_up(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """When a session leaves the topic, in any process, the engine of the next waiter is woken,
    once, and no other engine. The death of a process with a quarter of the waiters wakes none."""
    processes = [worker(name=f"w{number}") for number in range(4)]
    owner = topic.producer(EXCLUSIVE)
    crowd = Crowd(topic, processes)
    order = [(waiter.engine_name, waiter.producer_name) for waiter in topic.waiters]
    assert len(order) == 4 * CROWD
    assert max(process.call(threads) for process in processes) < 10
    leave: Callable[[], Any] = owner.close
    for epoch, (engine, name) in enumerate(order[:12], start=2):
        process = crowd.processes[engine]
        turn = lambda p=process, n=name: p.call(take_writer_lock, n)  # noqa: E731
        assert crowd.woken_by(lambda leave=leave, turn=turn: (leave(), turn())) == {engine: 1}
        assert topic.epoch == epoch
        leave = lambda p=process: p.call(close_kept)  # noqa: E731
    chosen = next(name for name in crowd.processes if name != order[11][0])
    assert crowd.woken_by(lambda: bury(crowd, chosen)) == {}
    assert [value.decode() for value in values(topic)] == [name for _, name in order[:12]]


def bury(crowd: Crowd, chosen: str) -> None:
    """Kill a process, and wait until the others have cleared its waiters away."""
    crowd.processes[chosen].kill()
    until(lambda: crowd.ids[chosen] not in engines_with_rows(crowd.topic.engine))


def engines_with_rows(engine: xl.Engine) -> set[str]:
    with engine.ledger.read() as tables:
        return {name for name, _ in tables.sessions.engines()}


@pytest.mark.long
def test_d6_settling_wakes_only_the_engine_that_settles(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It is told when to come back, and again that it has the topic; the others sleep on."""
    best, *others = [worker(name=f"w{number}") for number in range(3)]
    owner = topic.producer(EXCLUSIVE)
    crowd = Crowd(topic, others)
    crowd.ids["best"] = best.call(queue_up, [99], settle=JUST_COME)
    woken = crowd.woken_by(lambda: (owner.close(), best.call(take_writer_lock, "w0-0")))
    assert woken == {"best": 2}
