"""Rules D1 to D6: who waits, in which order, and how a wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local import records
from exclusivelog.local.ownership import pending, promoting
from exclusivelog.local.ownership.sessions import Succession
from exclusivelog.local.records import Session
from exclusivelog.local.storage.tables import queue_key
from exclusivelog.local.worker import BackgroundWorker
from exclusivelog.waits import GrantFuture
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    Worker,
    open_producer,
    rows,
    threads_since,
    until,
    values,
    within,
)
from tests.conformance.test_waiting import FENCED, HIGHEST, LOWEST, names, queue, write_and_leave

pytestmark = pytest.mark.once  # durability changes appends, not who may append

# ---- D1: the order -----------------------------------------------------------------------


def test_d1_highest_priority_first_then_earliest(topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)
    priorities = [0, 5, -3, 5, LOWEST, 0, HIGHEST, -3, HIGHEST - 1, LOWEST, 5]
    futures = [
        topic.producer_async(WAIT, name=f"{number}", priority=priority)
        for number, priority in enumerate(priorities)
    ]
    order = sorted(range(len(priorities)), key=lambda number: (-priorities[number], number))
    assert names(topic) == [str(number) for number in order]
    assert [waiter.priority for waiter in topic.waiters] == sorted(priorities, reverse=True)
    owner.close()
    for epoch, number in enumerate(order, start=2):
        with futures[number].result(timeout=PATIENCE) as producer:
            assert producer.topic_epoch == epoch
            assert producer.priority == priorities[number]
            producer.send(producer.name.encode())
    assert values(topic) == [str(number).encode() for number in order]


def test_d1_it_is_one_order_across_all_processes(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Waiters of different priorities queue in three processes, one after the other. They get the
    topic in the order that rule D1 defines, independent of their process."""
    owner = topic.producer(EXCLUSIVE)
    processes = [worker(name=f"w{i}") for i in range(3)]
    chance = random.Random(3)
    queued = []
    for number in range(18):
        process, priority = processes[number % 3], chance.choice((-1, 0, 0, 7))
        process.call(queue, f"{number}", priority)
        queued.append((-priority, number, process))
    queued.sort(key=lambda waiter: waiter[:2])
    expected = [str(number) for _, number, _ in queued]
    assert names(topic) == expected
    with xl.open(engine.path) as other:
        assert names(other.topic("orders")) == expected
    owner.close()
    epochs = [process.call(write_and_leave, str(number)) for _, number, process in queued]
    assert epochs == list(range(2, 20))
    assert values(topic) == [name.encode() for name in expected]


def some_sessions(topic: int, count: int, engine: xl.Engine) -> list[Session]:
    """Waiting sessions of which many are equal in priority, or in priority and creation."""
    chance = random.Random(4)
    extremes = (LOWEST, LOWEST + 1, -1, 0, 1, HIGHEST - 1, HIGHEST)
    return [
        Session(
            id=1000 + number,
            topic=topic,
            engine=engine.id,
            slot=0,
            pid=1,
            engine_name="e",
            name=f"n{number}",
            mode=WAIT,
            priority=chance.choice(extremes),
            created=chance.choice((0, 1, 2**40, 2**63)),
            tie=chance.getrandbits(32),
            since=0,
        )
        for number in range(count)
    ]


def test_d1_ties_are_broken_at_random_and_everybody_agrees_how(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """Priority, creation, tie: the queue's keys in the ledger, the order in admission.py and the
    promotions say the same, also at the ends of what 64 bits hold."""
    sessions = some_sessions(topic.id, 300, engine)
    expected = sorted(sessions, key=lambda session: session.place)
    with engine.ledger.write_exclusive() as tables:
        for session in sessions:
            tables.sessions.put_waiter(session)
        assert list(tables.sessions.waiters(topic.id)) == expected
    with engine.ledger.write_exclusive() as tables:
        for best in expected:
            rows = tables.sessions.queue(topic.id)
            winner = promoting.promote(0, topic.id, rows, lambda slot, engine: True).winner
            assert winner is not None
            assert winner.id == best.id
            assert tables.sessions.waiting(best)
            assert tables.sessions.drop_waiter(best)
            assert not tables.sessions.drop_waiter(best)
        rows = tables.sessions.queue(topic.id)
        assert promoting.promote(0, topic.id, rows, lambda slot, engine: True).winner is None


def test_d1_equals_are_promoted_in_random_order(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = SimpleNamespace(**vars(_core))
    frozen.now = lambda: 1  # all are created in the same nanosecond
    monkeypatch.setattr("exclusivelog.local.runtime._core", frozen)
    seen = set()
    with topic.producer(EXCLUSIVE):
        while len(seen) < 2:
            futures = [topic.producer_async(WAIT, name=name) for name in ("a", "b")]
            seen.add(tuple(names(topic)))
            assert all(future.cancel() for future in futures)
    assert seen == {("a", "b"), ("b", "a")}


# ---- D4: promotion tries everybody -------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "engine", "fence and close", "kill"])
def test_d4_the_dead_cancelled_timed_out_and_stale_are_passed_over(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], how: str
) -> None:
    """Four waiters are ahead in the queue, none of whom can take the topic any more: a killed
    one, a cancelled one, one whose patience is over, and one whose claim has become stale.
    The fifth gets it, and no epoch was used up on the way."""
    topic.producer(EXCLUSIVE).close()
    owner = worker(name="owner", keepalive=None) if how == "kill" else xl.open(engine.path)
    first = owner.call(open_producer, EXCLUSIVE) if how == "kill" else None
    producer = owner.topic("orders").producer(EXCLUSIVE) if first is None else None
    stale = topic.producer_async(WAIT, priority=4, topic_epoch=2)
    killed = worker(name="killed", keepalive=None)
    killed.call(queue, "killed", 9)
    cancelled = topic.producer_async(WAIT, priority=8)
    impatient = topic.producer_async(WAIT, priority=7, timeout=0.05, name="impatient")
    live = topic.producer_async(WAIT, priority=1)
    with pytest.raises(xl.WaitTimeoutError):
        impatient.result(timeout=PATIENCE)
    until(lambda: "impatient" not in names(topic))  # one that ended late leaves after that
    assert cancelled.cancel()
    epoch = 3
    if how == "fence and close":
        # The fencer fails all who wait, and they queue up again.
        fencer = topic.producer(FENCING)
        assert isinstance(stale.exception(PATIENCE), FENCED)
        assert isinstance(live.exception(PATIENCE), FENCED)
        stale = topic.producer_async(WAIT, priority=4, topic_epoch=3)
        live = topic.producer_async(WAIT, priority=1)
        epoch = 4
    # A take-over in between makes the claim stale: its owner is the better waiter.
    between = topic.producer_async(WAIT, priority=5)
    killed.kill()
    if how == "close":
        producer.close()
    elif how == "kill":
        owner.kill()
    elif how == "engine":
        owner.close()
    else:
        fencer.close()
    assert between.result(timeout=PATIENCE).topic_epoch == epoch
    between.result().close()
    with pytest.raises(FENCED):
        stale.result(timeout=PATIENCE)
    winner = live.result(timeout=PATIENCE)
    assert winner.topic_epoch == topic.epoch == epoch + 1
    assert topic.waiters == []
    if how != "kill":
        owner.close()


def test_d4_an_empty_queue_means_a_free_topic_and_no_epoch(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    owner = topic.producer(EXCLUSIVE)
    processes = [worker(name=f"w{i}", keepalive=None) for i in range(2)]
    for process in processes:
        process.call(queue, "x" + str(process.pid), 3)
        process.kill()
    owner.close()
    assert (topic.owner, topic.waiters, topic.epoch) == (None, [], 1)
    with engine.ledger.read() as tables:
        assert list(tables.sessions.waiters(topic.id)) == []
        assert tables.topics.get(topic.id).waiting == 0
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


def test_d4_a_long_queue_of_which_every_second_is_dead(
    path: str, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(xl.open(path)) for _ in range(2)]
        process = worker(name="mortal")
        owner = topic.producer(EXCLUSIVE)
        live = []
        for number in range(40):
            if number % 2:
                process.call(queue, f"dead-{number}", 0)
            else:
                live.append(others[number % 4 // 2].topic("orders").producer_async(WAIT))
        process.kill()
        owner.close()
        for epoch, future in enumerate(live, start=2):
            with future.result(timeout=PATIENCE) as producer:
                assert producer.topic_epoch == epoch
    assert (topic.owner, topic.waiters) == (None, [])


def test_d4_promote_is_a_function_of_the_queue() -> None:
    def waiter(number: int, claim: int | None = None) -> Session:
        return Session(
            id=number,
            topic=1,
            engine="0" * 16,
            slot=number,
            pid=0,
            engine_name="",
            name="",
            mode=WAIT,
            priority=0,
            created=number,
            tie=0,
            since=0,
            claimed_epoch=claim,
        )

    def promote(
        queue: list[Session], alive: Callable[[int, str], bool] = lambda slot, engine: True
    ) -> promoting.Promotion:
        rows = [(queue_key(each), records.pack_session(each)) for each in queue]
        return promoting.promote(5, 1, rows, alive)

    queue = [waiter(1), waiter(2, claim=4), waiter(3, claim=6), waiter(4), waiter(5)]
    promotion = promote(queue, lambda slot, engine: slot != 1)
    assert promotion.winner is not None
    assert (promotion.winner.id, promotion.winner.epoch) == (4, 6)
    assert [session.id for session in promotion.dead] == [1]
    assert [session.id for session in promotion.stale] == [2, 3]
    again = promote([waiter(7, claim=5)]).winner
    assert again is not None
    assert again.epoch == 5
    nobody = promote(queue, lambda slot, engine: False)
    assert nobody.winner is None
    assert len(nobody.dead) == 5
    assert promote([]).winner is None


# ---- D5: timeouts and cancelling ---------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.05, 0.3])
def test_d5_waiting_has_a_timeout(topic: xl.Topic, timeout: float) -> None:
    with topic.producer(EXCLUSIVE):
        begin = time.monotonic()
        with pytest.raises(xl.WaitTimeoutError) as error:
            topic.producer(WAIT, timeout=timeout)
        assert time.monotonic() - begin >= timeout
        assert isinstance(error.value, TimeoutError)
        assert error.value.retriable
        future = topic.producer_async(WAIT, timeout=timeout)
        with pytest.raises(xl.WaitTimeoutError):
            future.result(timeout=PATIENCE)
        until(lambda: topic.waiters == [])  # one that ended late leaves the queue after that


def test_d5_many_timeouts_of_different_length_end_none_before_its_time(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        waited: list[float] = []
        for number in random.Random(6).sample(range(30), 30):
            timeout = 0.05 + number * 0.02
            end = time.monotonic() + timeout
            topic.producer_async(WAIT, timeout=timeout).add_done_callback(
                lambda _, end=end: waited.append(time.monotonic() - end)
            )
        patient = topic.producer_async(WAIT)
        until(lambda: len(waited) == 30)
        assert min(waited) >= 0
        until(lambda: len(topic.waiters) == 1)  # one that ended late leaves the queue after that
        assert not patient.done()


def test_d5_no_timeout_waits_for_ever(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        future = topic.producer_async(WAIT, timeout=None)
        far = topic.producer_async(WAIT, timeout=1e9)
        endless = topic.producer_async(WAIT, timeout=float("inf"))
        time.sleep(0.2)
        assert [each.done() for each in (future, far, endless)] == [False] * 3
    assert future.result(timeout=PATIENCE).topic_epoch == 2


def test_d5_what_a_signal_handler_raises_ends_the_wait(topic: xl.Topic) -> None:
    """A TimeoutError of the application's own, above all: it is not that of the wait's slices."""

    def strike(number: int, frame: Any) -> None:
        raise TimeoutError("my own")

    owner, waits = topic.producer(EXCLUSIVE), threading.get_ident()

    def strike_who_waits() -> None:
        until(lambda: topic.waiters)
        time.sleep(0.3)
        signal.pthread_kill(waits, signal.SIGALRM)

    rescue = threading.Timer(PATIENCE, owner.close)
    rescue.start()
    before = signal.signal(signal.SIGALRM, strike)
    striking = threading.Thread(target=strike_who_waits)
    striking.start()
    try:
        with pytest.raises(TimeoutError, match="my own"):
            topic.producer(WAIT)
    finally:
        striking.join(PATIENCE)
        signal.signal(signal.SIGALRM, before)
        rescue.cancel()
    until(lambda: topic.waiters == [])  # after its registration, another thread removes it
    owner.close()


def test_d5_a_wait_is_cancelled_from_another_thread(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        future = topic.producer_async(WAIT)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(future.exception, PATIENCE)
            time.sleep(0.05)
            assert future.cancel() is True
            assert isinstance(waiting.exception(timeout=PATIENCE), CancelledError)
        assert future.cancelled()
        assert future.cancel() is True
        assert topic.waiters == []
    assert topic.owner is None


def test_d5_a_wait_is_cancelled_from_a_task(topic: xl.Topic) -> None:
    async def main() -> None:
        future = topic.producer_async(WAIT)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.05)
        assert future.cancelled()
        assert topic.waiters == []
        task = asyncio.ensure_future(asyncio.wrap_future(topic.producer_async(WAIT)))
        await asyncio.sleep(0.05)
        owner.close()
        async with asyncio.timeout(PATIENCE):
            producer = await task
        assert producer.topic_epoch == 2

    owner = topic.producer(EXCLUSIVE)
    asyncio.run(main())


def test_d5_cancelling_what_is_decided_changes_nothing(topic: xl.Topic) -> None:
    granted = topic.producer_async(WAIT)
    assert granted.cancel() is False
    assert granted.result(timeout=0).state == "open"
    refused = topic.producer_async(EXCLUSIVE)
    assert refused.cancel() is False
    assert isinstance(refused.exception(timeout=0), FENCED)
    waiter = topic.producer_async(WAIT)
    rival = topic.producer(FENCING)
    assert waiter.cancel() is False
    assert isinstance(waiter.exception(timeout=0), FENCED)
    assert rival.state == "open"


def race(*actions: Callable[[], Any]) -> list[Any]:
    """What actions that begin at the same moment return."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        for _ in range(random.randrange(300)):
            pass
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions, timeout=PATIENCE))


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["same engine", "another engine"])
def test_d5_a_cancel_that_races_with_the_grant_leaves_no_orphan(
    engine: xl.Engine, topic: xl.Topic, where: str
) -> None:
    """The owner releases the topic and the waiter is cancelled at the same moment. Either the
    cancel was first, and the topic is free; or the grant was first, and then cancel() returns False
    and the future has its producer at once."""
    granted = 0
    with xl.open(engine.path) as other:
        waiting = topic if where == "same engine" else other.topic("orders")
        for _ in range(200):
            owner = topic.producer(EXCLUSIVE)
            future = waiting.producer_async(WAIT)
            _, cancelled = race(owner.close, future.cancel)
            assert future.done()
            assert future.cancelled() is cancelled
            if cancelled:
                assert topic.owner is None
            else:
                granted += 1
                producer = future.result(timeout=0)
                assert topic.owner is not None
                assert topic.owner.session == producer._session.id
                assert producer.state == "open"
                producer.close()
            assert (topic.owner, topic.waiters) == (None, [])
    assert topic.epoch == 200 + granted


def test_d5_a_cancel_that_races_with_fencing_leaves_nothing(topic: xl.Topic) -> None:
    for _ in range(100):
        owner = topic.producer(EXCLUSIVE)
        future = topic.producer_async(WAIT)
        rival, cancelled = race(lambda: topic.producer(FENCING), future.cancel)
        assert future.done()
        assert future.cancelled() is cancelled
        if not cancelled:
            assert isinstance(future.exception(timeout=0), FENCED)
        assert topic.owner is not None
        assert topic.owner.session == rival._session.id
        assert topic.waiters == []
        rival.close()
        owner.close()


def test_d5_a_timeout_that_races_with_the_grant_leaves_no_orphan(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with xl.open(engine.path) as other:
        for number in range(100):
            owner = topic.producer(EXCLUSIVE)
            future = other.topic("orders").producer_async(WAIT, timeout=0.004)
            time.sleep(0.002 + (number % 20) * 0.0002)
            owner.close()
            try:
                producer = future.result(timeout=PATIENCE)
            except xl.WaitTimeoutError:
                # Another thread releases what is granted to one that ended late.
                until(lambda: (topic.owner, topic.waiters) == (None, []))
            else:
                assert topic.owner is not None
                assert topic.owner.session == producer._session.id
                producer.close()
            assert (topic.owner, topic.waiters) == (None, [])


def test_d5_two_cancels_at_once_both_leave_the_future_decided(topic: xl.Topic) -> None:
    """Whichever of the two took the session out of the queue: once a cancel has returned, the
    future has its outcome, and the outcome is what the cancel said."""

    def cancel_and_look(future: Any) -> tuple[bool, bool, bool]:
        said = future.cancel()
        return said, future.done(), future.cancelled()

    with topic.producer(EXCLUSIVE):
        for _ in range(150):
            future = topic.producer_async(WAIT)
            looks = race(*[lambda future=future: cancel_and_look(future)] * 2)
            assert looks == [(True, True, True)] * 2


def test_d5_a_second_cancel_awaits_what_the_first_one_does(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has taken the session out of the queue, and has not ended the future yet."""
    left, told = threading.Event(), threading.Event()
    withdraw, await_end = GrantFuture._withdraw, GrantFuture._await_end

    def withdraw_and_rest(future: Any) -> bool:
        leaves = withdraw(future)
        if leaves:
            left.set()
            assert told.wait(PATIENCE)
        return leaves

    def tell_and_await(future: Any, timeout: float | None) -> bool:
        told.set()
        return await_end(future, timeout)

    def second(future: Any) -> tuple[bool, bool]:
        assert left.wait(PATIENCE)
        try:
            return future.cancel(), future.done()
        finally:
            told.set()

    with topic.producer(EXCLUSIVE):
        future = topic.producer_async(WAIT)
        monkeypatch.setattr(GrantFuture, "_withdraw", withdraw_and_rest)
        monkeypatch.setattr(GrantFuture, "_await_end", tell_and_await)
        assert race(future.cancel, lambda: second(future)) == [True, (True, True)]


@pytest.mark.long
def test_d5_a_cancel_that_races_with_the_timeout_is_decided_at_once(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        for number in range(200):
            future = topic.producer_async(WAIT, timeout=0.003)
            time.sleep(0.002 + (number % 40) * 0.0001)
            cancelled = future.cancel()
            assert future.done()
            assert future.cancelled() is cancelled
            if not cancelled:
                assert isinstance(future.exception(timeout=0), xl.WaitTimeoutError)
            until(lambda: topic.waiters == [])  # one that ended late leaves after that


@pytest.mark.parametrize("last", [False, True], ids=["beside another engine", "the only engine"])
def test_d5_closing_the_engine_ends_every_wait(path: str, last: bool) -> None:
    """One thread closes the engine while others ask it for producers. Every request ends: a
    producer, or an error. None waits for a guard that has gone home."""

    def ask_again_and_again(topic: xl.Topic, mode: str) -> None:
        while True:
            try:
                topic.producer(mode, timeout=0.001).close()
            except (xl.WaitTimeoutError, xl.ProducerBusyError, FENCED):
                pass
            except xl.EngineClosedError:
                return

    with contextlib.ExitStack() as stack:
        if not last:
            stack.enter_context(xl.open(path))
        for number in range(20):
            engine = xl.open(path)
            topic = engine.topic("orders")
            threads = [
                threading.Thread(target=ask_again_and_again, args=(topic, mode), daemon=True)
                for mode in (WAIT, WAIT, SHARED)
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.005 + number % 5 * 0.001)
            within(engine.close)
            for thread in threads:
                thread.join(PATIENCE)
            assert not any(thread.is_alive() for thread in threads)
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            assert (topic.holders, topic.waiters) == ([], [])


def test_d5_a_wait_in_another_process_is_interrupted_by_its_timeout(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    with topic.producer(EXCLUSIVE), pytest.raises(Failed, match="WaitTimeoutError"):
        process.call(open_producer, WAIT, timeout=0.1)
    until(lambda: topic.waiters == [])  # one that ended late leaves the queue after that


# ---- D6: wake-ups ------------------------------------------------------------------------


def wake_ups(engines: list[xl.Engine]) -> list[int]:
    """How often each engine has been woken so far."""
    counts = []
    for engine in engines:
        assert engine.backend._slot is not None
        counts.append(engine.backend._slot.wake_up_count())
    return counts


def test_d6_only_the_promoted_waiter_is_woken(path: str, topic: xl.Topic) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xl.open(path, name=f"e{i}")) for i in range(6)]
        owner = topic.producer(EXCLUSIVE)
        futures = [engine.topic("orders").producer_async(WAIT) for engine in engines]
        for turn, future in enumerate(futures):
            before = wake_ups(engines)
            owner.close()
            owner = future.result(timeout=PATIENCE)
            woken = [after - count for after, count in zip(wake_ups(engines), before, strict=True)]
            assert woken == [int(number == turn) for number in range(6)]
        assert not any(engine.closed for engine in engines)


def test_d6_refusals_cancels_and_sends_wakes_no_engine(path: str, topic: xl.Topic) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xl.open(path)) for _ in range(3)]
        waiters = [engine.topic("orders").producer_async(WAIT) for engine in engines[1:]]
        owner = waiters[0].result(timeout=PATIENCE)
        before = wake_ups(engines)
        for _ in range(5):
            owner.send(b"x")
            with pytest.raises(FENCED):
                engines[0].topic("orders").producer(EXCLUSIVE)
        cancelled = engines[0].topic("orders").producer_async(WAIT)
        assert cancelled.cancel()
        after = wake_ups(engines)
        assert after[1:] == before[1:]
        assert not waiters[1].done()


@pytest.mark.long
def test_d6_thousands_of_waiters_cost_one_wake_up_and_no_thread(path: str) -> None:
    """Two thousand waiters in one engine, and one in each of three others. The owner leaves:
    one engine is woken, once, for the one waiter whose turn it is."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xl.open(path)) for _ in range(4)]
        crowd, *others = [engine.topic("orders") for engine in engines]
        owner = crowd.producer(EXCLUSIVE)
        few = [topic.producer_async(WAIT) for topic in others]
        waiting = [crowd.producer_async(WAIT, priority=-1)]
        threads = set(threading.enumerate())
        waiting += [crowd.producer_async(WAIT, priority=-1) for _ in range(1999)]
        assert threads_since(threads) == []
        assert len(crowd.waiters) == 2003
        turns = [*zip((1, 2, 3), few, strict=True), *((0, future) for future in waiting[:5])]
        for winner, future in turns:
            before = wake_ups(engines)
            owner.close()
            owner = future.result(timeout=PATIENCE)
            woken = [after - count for after, count in zip(wake_ups(engines), before, strict=True)]
            assert woken == [int(number == winner) for number in range(4)]
        assert owner.topic_epoch == 9
        assert not any(future.done() for future in waiting[5:])
        assert waiting[-1].cancel()
        engines[0].close()
        assert all(future.done() for future in waiting)
        assert rows(engines[1])["queue"] == []


def test_d4_the_waiters_of_an_engine_that_is_closed_use_up_no_epoch(
    path: str, topic: xl.Topic
) -> None:
    """An engine holds a topic, and its waiter is the first in the queue. When the engine is closed,
    the topic goes to the best waiter of another engine, not to its own."""
    with xl.open(path, name="closed") as closed:
        mine = closed.topic("orders")
        owner = mine.producer(EXCLUSIVE)
        waiting = [mine.producer_async(WAIT, priority=n) for n in (5, 6)]
        left = topic.producer_async(WAIT)
        closed.close()
        with left.result(PATIENCE) as successor:
            assert successor.topic_epoch == owner._session.epoch + 1 == 2
        for future in waiting:
            assert isinstance(future.exception(PATIENCE), xl.EngineClosedError)


def test_d5_no_timeout_is_lost_while_another_one_is_over(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request leaves the queue, another one is registered that was asked for earlier, and
    whose time is over, too: neither may be taken for the other."""
    owner = topic.producer(EXCLUSIVE)
    second = topic.producer_async(WAIT)
    cancel, calls = engine.backend.sessions.cancel, []

    def beside_a_late_one(session: Session) -> bool:
        calls.append(session.id)
        if len(calls) == 1:
            engine.backend.pending.queue(second, time.monotonic() - 0.5)
        return cancel(session)

    monkeypatch.setattr(engine.backend.sessions, "cancel", beside_a_late_one)
    monkeypatch.setattr(pending, "LATE_SECONDS", PATIENCE)  # else another thread may be first
    for future in (topic.producer_async(WAIT, timeout=0.05), second):
        with pytest.raises(xl.WaitTimeoutError):
            future.result(PATIENCE)
        assert future.done()
    assert len(calls) == 2
    until(lambda: topic.waiters == [])
    assert owner.state == "open"


# ---- D4: many dead waiters ---------------------------------------------------------------


@pytest.mark.rule("D4")
def test_d4_a_grant_waits_for_the_removal_of_few_dead_waiters(
    topic: xl.Topic, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living waiter behind dead ones is granted in a transaction that removes a bounded number
    of them; it is not told that a producer waits, and none of them keeps the topic later."""
    monkeypatch.setattr(promoting, "DROPPED_AT_ONCE", 3)
    monkeypatch.setattr(BackgroundWorker, "_evict_awaited", lambda worker: None)
    dropped, drop_waiter = [], Succession.drop_waiter

    def noted(succession: Any, tables: Any, row: Any, session: Any) -> None:
        dropped.append(session.name)
        drop_waiter(succession, tables, row, session)

    owner, told = topic.producer(EXCLUSIVE), []
    victim = worker("victim")
    victim.call(queue_many, 20)
    until(lambda: len(topic.waiters) == 20)
    living = topic.producer_async(WAIT, priority=-1, on_wanted=told.append)
    victim.kill()
    until(lambda: len(topic.waiters) == 1)  # the dead do not count
    monkeypatch.setattr(Succession, "drop_waiter", noted)
    owner.close()
    successor = living.result(PATIENCE)
    assert (len(dropped), successor.topic_epoch, told) == (3, 2, [])
    with pytest.raises(xl.ProducerBusyError):
        topic.producer()
    assert len(dropped) == 6  # the refused request took its removals back
    successor.close()
    assert topic.producer().send(b"x") == 0  # no dead waiter refuses it
    assert len(dropped) == 6 + 17


def queue_many(state: State, count: int) -> None:
    """Queue up so often, in a worker."""
    state.kept["many"] = [state.topic.producer_async(WAIT) for _ in range(count)]
