"""Rule D5: a request's timeout also bounds the wait for a process that is stopped in a transaction.

Such a process holds the writer lock, so nothing can be registered. The request ends with an error
that names the process, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import pytest

import exclusivelog as xl
import exclusivelog.aio
from exclusivelog import _core, threads
from exclusivelog.local.ownership import pending
from exclusivelog.producer import ProducerFuture
from exclusivelog.waits import give_up_all
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    WAIT,
    State,
    Worker,
    open_producer,
    send,
    until,
    within,
)
from testing.stops import PLACES, stopped


@contextlib.contextmanager
def blocked_by(process: Worker, place: str = "in_a_commit") -> Iterator[str]:
    """The process is stopped there, and resumes afterwards. Gives the pattern of the error."""
    with stopped(process, place):
        yield rf"pid {process.pid}\), silent for .* Resume or end that process.*kill_stalled=True"
    process.answer()


@pytest.mark.sampled
@pytest.mark.rule("D5")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [WAIT, EXCLUSIVE, FENCING])
def test_d5_a_request_that_cannot_be_registered_ends_at_its_timeout(
    topic: xl.Topic, worker: Callable[..., Worker], mode: str, place: str
) -> None:
    process = worker(name="stopped")
    with blocked_by(process, place) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        within(lambda: topic.producer(mode, timeout=1))
    assert process.call(open_producer, EXCLUSIVE) == 1  # the late request has not had the topic
    assert [owner.engine_name for owner in topic.holders] == ["stopped"]
    assert topic.waiters == []
    with topic.producer(FENCING, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2
        assert again.send(b"x") == 0


@pytest.mark.long
@pytest.mark.rule("D5", "A4")
def test_d5_a_fencing_request_that_timed_out_fences_nobody(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="owner")
    assert process.call(open_producer, EXCLUSIVE) == 1
    with blocked_by(process) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        within(lambda: topic.producer(FENCING, timeout=1))
    assert process.call(send, b"still the owner") == 0
    with topic.producer(FENCING, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_thread_beside_one_that_waits_without_a_timeout_is_bounded_too(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The patient request holds the engine's lock meanwhile, and is granted in the end."""
    process, pending = worker(name="stopped"), topic.engine.backend.pending
    with ThreadPoolExecutor(1) as pool:
        with blocked_by(process) as names_it:
            patient = pool.submit(topic.producer, EXCLUSIVE)
            until(lambda: not _is_free(pending.lock))
            with pytest.raises(xl.WaitTimeoutError, match=names_it):
                within(lambda: topic.producer(WAIT, timeout=1))
            assert not patient.done()
        with patient.result(PATIENCE) as producer:
            assert producer.topic_epoch == 1
            assert topic.waiters == []
    with topic.producer(WAIT, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2


def _is_free(lock: object) -> bool:
    """Is no thread inside? Taken for a moment to see that."""
    if free := lock.acquire(False):  # type: ignore[attr-defined]
        lock.release()  # type: ignore[attr-defined]
    return bool(free)


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_claim_that_cannot_be_recorded_ends_at_its_timeout(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    with blocked_by(worker(name="stopped")) as names_it:
        with pytest.raises(xl.WaitTimeoutError, match=names_it):
            within(lambda: engine.own({"shard": None}, timeout=1))
    assert engine.claims() == []
    with engine.own({"shard": None}, timeout=PATIENCE) as claim:
        assert claim.generations == {"shard": 1}


# ---- requests that were queued before -------------------------------------------------------

SOON = 2.0  # seconds: a timeout that is long enough to stop a process after the request


def waiting(topic: xl.Topic, **options: Any) -> ProducerFuture:
    """A request in the topic's queue."""
    future = topic.producer_async(WAIT, **options)
    until(lambda: topic.waiters)
    return future


def time_out(engine: xl.Engine, *futures: Any) -> None:
    """The timeouts of these requests in a queue are over now: what happens before may take as long
    as it does on a busy machine."""
    for future in futures:
        engine.backend.pending.queue(future, _core.monotonic())


def result_in_time(engine: xl.Engine, future: Any) -> Any:
    """What becomes of a request whose timeout is over now."""
    time_out(engine, future)
    return within(future.result)


@pytest.mark.long
@pytest.mark.rule("D5")
@pytest.mark.parametrize("place", PLACES)
def test_d5_a_waiter_that_was_queued_before_ends_at_its_timeout(
    topic: xl.Topic, worker: Callable[..., Worker], place: str
) -> None:
    """Its row stays until the writer lock is free."""
    process = worker(name="stopped")
    assert process.call(open_producer, EXCLUSIVE) == 1
    future = waiting(topic, timeout=PATIENCE)
    with (
        blocked_by(process, place) as names_it,
        pytest.raises(xl.WaitTimeoutError, match=names_it) as e,
    ):
        result_in_time(topic.engine, future)
    assert "it is held by producer 'stopped-" in str(e.value)
    assert e.value.holder is not None
    assert e.value.holder.pid == process.pid
    until(lambda: topic.waiters == [])
    assert process.call(send, b"still the owner") == 0
    with topic.producer(FENCING, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_waiter_ends_beside_a_request_without_a_timeout(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The patient request holds the engine's lock, for which the background thread waits then."""
    process, pending = worker(name="stopped"), topic.engine.backend.pending
    assert process.call(open_producer, EXCLUSIVE) == 1
    other = topic.engine.topic("other")
    future, called = waiting(topic, timeout=PATIENCE), Event()
    future.add_done_callback(lambda _: called.set())
    with ThreadPoolExecutor(1) as pool:
        with blocked_by(process) as names_it:
            patient = pool.submit(other.producer, EXCLUSIVE)
            until(lambda: not _is_free(pending.lock))
            time_out(topic.engine, future)
            with pytest.raises(xl.WaitTimeoutError, match=names_it):
                within(future.result)
            assert called.wait(PATIENCE)
            assert not patient.done()
        patient.result(PATIENCE).close()
    until(lambda: topic.waiters == [])


@pytest.mark.long
@pytest.mark.rule("D5", "B2")
def test_d5_a_grant_to_a_waiter_that_has_timed_out_is_released_at_once(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The process is stopped in the transaction that promotes the waiter. The next waiter, which
    has no timeout, is promoted after it."""
    process = worker(name="stopped")
    assert process.call(open_producer, EXCLUSIVE) == 1
    future = waiting(topic, timeout=PATIENCE, name="late", priority=1)
    patient = topic.producer_async(WAIT, name="patient")
    with stopped(process, "", release_and_stop), pytest.raises(xl.WaitTimeoutError):
        result_in_time(topic.engine, future)
    process.answer()
    with patient.result(PATIENCE) as producer:
        assert producer.topic_epoch == 3
        assert [owner.producer_name for owner in topic.holders] == ["patient"]
    events = [(e.kind, e.target and e.target["producer"]) for e in topic.engine.history("orders")]
    found = events[-5:-1]
    assert found == [("release", None), ("grant", "late"), ("release", None), ("grant", "patient")]


def release_and_stop(state: State, _: str) -> None:
    """Release the topic, and stop before the commit."""
    assert state.producer is not None
    backend = state.engine.backend

    def run() -> None:
        with backend.ledger.write_exclusive() as tables:
            [session] = tables.sessions.holders(state.topic.id)
            backend.sessions.succession.leave(tables, session, "release", "closed")
            signal.raise_signal(signal.SIGSTOP)

    within(run, 2 * PATIENCE)


@pytest.mark.long
@pytest.mark.rule("D4", "D5")
def test_d4_waiters_that_have_timed_out_are_released_together(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """At most one of them is promoted, in the transaction that the process is stopped in."""
    process = worker(name="stopped")
    assert process.call(open_producer, EXCLUSIVE) == 1
    late = [topic.producer_async(WAIT, timeout=PATIENCE, priority=1) for _ in range(20)]
    patient = topic.producer_async(WAIT)
    with stopped(process, "", release_and_stop):
        time_out(topic.engine, *late)
        for future in late:
            with pytest.raises(xl.WaitTimeoutError):
                within(future.result)
    process.answer()
    with patient.result(PATIENCE) as producer:
        assert producer.topic_epoch == 3


@pytest.mark.long
@pytest.mark.rule("A2", "D5")
@pytest.mark.parametrize("mode", [WAIT, EXCLUSIVE])
def test_a2_a_request_is_not_refused_for_one_that_has_timed_out(
    topic: xl.Topic, worker: Callable[..., Worker], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same name, and gets the writer lock before the background thread does."""
    process, background = worker(name="stopped"), topic.engine.backend.worker
    assert process.call(open_producer, EXCLUSIVE) == 1
    future = waiting(topic, timeout=PATIENCE, name="same")
    release, again = background._release_abandoned, Event()
    monkeypatch.setattr(background, "_release_abandoned", lambda: (again.wait(PATIENCE), release()))
    with ThreadPoolExecutor(1) as pool:
        with stopped(process, "", release_and_stop):
            time_out(topic.engine, future)
            with pytest.raises(xl.WaitTimeoutError):
                within(future.result)
            second = pool.submit(topic.producer, mode, name="same", timeout=PATIENCE)
        process.answer()
        producer = second.result(PATIENCE / 2)
    again.set()
    until(lambda: not background.ended())
    assert (producer.topic_epoch, producer.send(b"x")) == (3, 0)


@pytest.mark.long
@pytest.mark.rule("D5")
@pytest.mark.parametrize("refused", [0, 1])
def test_d5_a_waiter_ends_although_no_thread_could_be_started(
    topic: xl.Topic, worker: Callable[..., Worker], refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one that ends it, nor the one of its callback; the next attempt succeeds."""
    process, count = worker(name="stopped"), itertools.count()
    assert process.call(open_producer, EXCLUSIVE) == 1
    future, called = waiting(topic, timeout=PATIENCE), Event()
    future.add_done_callback(lambda _: called.set())
    start = threads.start

    def start_most(path: str, thread: Thread) -> Thread:
        if thread.name == "exclusivelog-callback" and next(count) == refused:
            raise xl.LedgerError("no thread")
        return start(path, thread)

    monkeypatch.setattr(threads, "start", start_most)
    with blocked_by(process) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        result_in_time(topic.engine, future)
    assert called.wait(PATIENCE)
    assert next(count) > refused + 1


@pytest.mark.long
@pytest.mark.rule("A5", "D5")
def test_a5_no_process_is_named_that_does_not_block(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The background thread waits for a thread of its own process."""
    process = worker(name="owner")
    assert process.call(open_producer, EXCLUSIVE) == 1
    future = waiting(topic, timeout=0.5)
    with topic.engine.ledger.write_exclusive(), ThreadPoolExecutor(1) as pool:
        error = pool.submit(future.exception, PATIENCE).result()
    assert isinstance(error, xl.WaitTimeoutError)
    assert "writer lock" not in str(error)


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_waiter_ends_while_its_engine_is_being_closed(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """To close the engine takes until the process resumes."""
    process, other = worker(name="stopped"), xl.open(topic.engine.path, name="other")
    assert process.call(open_producer, EXCLUSIVE) == 1
    future = other.topic("orders").producer_async(WAIT, timeout=PATIENCE)
    patient = other.topic("orders").producer_async(WAIT)
    with ThreadPoolExecutor(1) as pool:
        with blocked_by(process) as names_it:
            time_out(other, future)
            closing = pool.submit(other.close)
            with pytest.raises(xl.WaitTimeoutError, match=names_it):
                within(future.result)
            assert not closing.done()
        closing.result(PATIENCE)
    with pytest.raises(xl.EngineClosedError):
        patient.result(PATIENCE)
    assert topic.waiters == []


@pytest.mark.rule("D5")
def test_d5_deadlines_of_requests_that_have_ended_are_forgotten(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their timeouts may be days away."""
    monkeypatch.setattr(pending, "FEW_ENTRIES", 10)
    requests = topic.engine.backend.pending
    requests.limits._most = 10
    for _ in range(100):
        with topic.producer(EXCLUSIVE):
            future = topic.producer_async(WAIT, timeout=10**6)
        future.result(PATIENCE).close()
    del future
    requests.limits.wake()
    until(lambda: len(requests.limits._entries) <= 10)
    until(lambda: len(requests.queued._deadlines) <= 12)


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_call_in_the_background_that_fails_does_not_hold_up_the_next(
    engine: xl.Engine,
) -> None:
    background, called = engine.backend.worker, Event()
    attempts = iter(range(3))

    def fail() -> None:
        if next(attempts, None) is not None:
            called.wait(0.1)
            raise xl.LedgerError("the disk is full")

    background.do_later(fail)
    background.do_later(called.set)
    assert called.wait(PATIENCE)
    assert next(attempts, None) is not None


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_cancel_does_not_wait_for_a_stopped_process(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped")
    assert process.call(open_producer, EXCLUSIVE) == 1
    future = waiting(topic)
    with blocked_by(process):
        assert within(future.cancel)
        assert future.cancelled()
    until(lambda: topic.waiters == [])
    assert process.call(send, b"still the owner") == 0


@pytest.mark.long
@pytest.mark.rule("D5", "K3")
def test_k3_many_requests_are_given_up_with_one_wait_for_a_stopped_process(
    engine: xl.Engine, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an interrupt of a wait for many topics does."""
    monkeypatch.setattr(pending, "CANCELLED_WITHIN", 0.1)
    process, requests = worker(name="stopped"), engine.backend.sessions
    assert process.call(open_producer, EXCLUSIVE) == 1
    futures = [engine.topic("orders").producer_async(WAIT) for _ in range(20)]
    cancel, waits = requests.cancel, list[int]()

    def counted(session: Any, until: int = 0) -> bool:
        waits.append(session.id)
        return bool(cancel(session, until))

    monkeypatch.setattr(requests, "cancel", counted)
    with blocked_by(process):
        within(lambda: give_up_all(futures))
        assert all(future.cancelled() for future in futures)
        assert len(waits) == 1
    until(lambda: engine.topic("orders").waiters == [])
    assert process.call(send, b"still the owner") == 0
    again = engine.topic("orders").producer_async(WAIT)
    until(lambda: not engine.backend.worker.is_behind)
    assert again.cancel()
    assert len(waits) == 2


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_role_that_was_queued_before_ends_at_its_timeout(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped")
    process.call(hold_role)
    future = engine.role_async(
        "billing", topics=["orders"], claims={"g": {"r": None}}, timeout=PATIENCE
    )
    until(lambda: engine.backend.pending.queued)
    with blocked_by(process) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        result_in_time(engine, future)
    until(lambda: not any(role.waiters for role in engine.roles()))
    process.call(end_role)
    with engine.role("billing", topics=["orders"], claims={"g": {"r": None}}, timeout=PATIENCE):
        pass


def hold_role(state: State) -> None:
    """Hold the role."""
    state.kept["role"] = state.engine.role("billing", topics=["orders"], claims={"g": {"r": None}})


def end_role(state: State) -> None:
    """Release it."""
    state.kept["role"].close()


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_request_that_waits_for_a_hand_over_ends_at_its_timeout(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The source keeps the topic, because it is in a transaction that pauses its producers."""
    process = worker(name="stopped")
    assert process.call(open_producer, EXCLUSIVE) == 1
    process.call(keep_pausing)
    moving = topic.engine.unload_async("orders", to=topic.engine.id, timeout=PATIENCE)
    future = topic.producer_async(EXCLUSIVE, timeout=SOON)
    assert not future.done()
    with blocked_by(process), pytest.raises(xl.WaitTimeoutError, match="took longer than timeout"):
        within(future.result)
    process.call(end_pausing)
    [move] = moving.result(PATIENCE)
    assert move.state == "assigned"
    with topic.producer(EXCLUSIVE, timeout=PATIENCE) as producer:
        assert producer.topic_epoch == 2


def keep_pausing(state: State) -> None:
    """Hold the lock of operations that pause producers, in a thread."""
    over, begun = Event(), Event()
    state.kept["over"] = over

    def run() -> None:
        with state.engine.backend.ledger.pause_lock:
            begun.set()
            over.wait(2 * PATIENCE)

    Thread(target=run, daemon=True).start()
    assert begun.wait(PATIENCE)


def end_pausing(state: State) -> None:
    """Release it."""
    state.kept["over"].set()


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_a_claim_that_waits_for_its_holder_ends_at_its_timeout(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped")
    process.call(own_shard)
    with ThreadPoolExecutor(1) as pool:
        for timeout in (SOON, 4 * SOON, 16 * SOON):
            future, began = pool.submit(engine.own, {"shard": 1}, timeout=timeout), time.monotonic()
            with blocked_by(process) as names_it:
                if time.monotonic() - began > timeout / 2:  # a busy machine: perhaps too late
                    future.exception(PATIENCE)
                    continue
                with pytest.raises(xl.WaitTimeoutError, match=names_it):
                    future.result(PATIENCE)
                break
        else:
            raise AssertionError("the process was always stopped too late")
    [claim] = engine.claims()
    assert claim.generations == {"shard": 5}


def own_shard(state: State) -> None:
    """Claim it with a high generation."""
    state.kept["claim"] = state.engine.own({"shard": 5})


@pytest.mark.long
@pytest.mark.rule("D5")
def test_d5_tasks_that_wait_end_at_their_timeouts(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """By `timeout=`, and by the task's cancellation."""
    process, path = worker(name="stopped"), topic.engine.path
    assert process.call(open_producer, EXCLUSIVE) == 1

    async def wait() -> None:
        async with xl.aio.open(path, name="tasks") as engine:
            orders = await engine.topic("orders")
            timed = orders.producer_async(WAIT, name="timed", timeout=PATIENCE)
            cancelled = orders.producer_async(WAIT)
            while len(topic.waiters) < 2:
                await asyncio.sleep(0.01)
            requests = engine.sync.backend.pending.queued.futures()
            with blocked_by(process) as names_it:
                time_out(engine.sync, *(each for each in requests if each.session.name == "timed"))
                with pytest.raises(xl.WaitTimeoutError, match=names_it):
                    await asyncio.wait_for(timed, PATIENCE)
                cancelled.cancel()
                await asyncio.wait({cancelled}, timeout=PATIENCE)
                assert cancelled.cancelled()
            while topic.waiters:
                await asyncio.sleep(0.01)

    asyncio.run(wait())
    assert process.call(send, b"still the owner") == 0


# ---- hand-overs -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.rule("E4", "D5")
@pytest.mark.parametrize("place", PLACES)
def test_e4_a_move_that_cannot_begin_fails_at_its_deadline(
    topic: xl.Topic, worker: Callable[..., Worker], place: str
) -> None:
    """Each topic says why, and the call can be repeated. While only appends are blocked, the move
    begins, and is cancelled later."""
    process, engine = worker(name="stopped"), topic.engine
    assert process.call(open_producer, EXCLUSIVE) == 1
    with blocked_by(process, place):
        moves = within(lambda: engine.unload(["orders"], to=engine.id, timeout=1))
        future = within(lambda: engine.unload_async(["orders"], to=engine.id, timeout=1))
        moves += within(future.result)
    for move in moves:
        assert (move.topic, move.state, move.ok) == ("orders", "failed", False)
        assert move.source is not None
        assert move.source.pid == process.pid
        assert f"pid {process.pid}" in move.reason
    assert process.call(send, b"still the owner") == 0
    [move] = engine.unload("orders", to=engine.id, timeout=PATIENCE)
    assert move.state == "assigned"


@pytest.mark.long
@pytest.mark.rule("E4", "D5")
@pytest.mark.parametrize("keepalive", [0.5, None])
def test_e4_a_move_whose_source_is_stopped_inside_fails_at_its_deadline(
    topic: xl.Topic, worker: Callable[..., Worker], keepalive: float | None
) -> None:
    """Also if the source is unresponsive, so that it would be evicted."""
    process, engine = worker(name="stopped", keepalive=None), topic.engine
    assert process.call(open_producer, EXCLUSIVE) == 1
    process.call(keep_pausing)
    future = engine.unload_async("orders", to=engine.id, timeout=SOON)
    with blocked_by(process):
        if keepalive is not None:  # not before: a busy machine might let it be silent for as long
            process.set_keepalive(keepalive)
        [move] = within(future.result)
    assert (move.state, move.ok) == ("failed", False)
    process.call(end_pausing)
    until(lambda: [e.kind for e in engine.history("orders")][-1] in ("cancel", "evict"))
    with topic.producer(FENCING, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2


@pytest.mark.long
@pytest.mark.rule("E4", "D5")
def test_e4_a_move_that_cannot_be_cancelled_says_so(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process, engine = worker(name="stopped"), topic.engine
    assert process.call(open_producer, EXCLUSIVE) == 1
    process.call(keep_pausing)
    future = engine.unload_async("orders", to=engine.id, timeout=2 * PATIENCE)
    with blocked_by(process) as names_it:
        assert not within(future.cancel)
        with pytest.raises(xl.WaitTimeoutError, match=names_it):
            within(future.result)
    until(lambda: [e.kind for e in engine.history("orders")][-1] == "cancel")
    process.call(end_pausing)
    assert process.call(send, b"still the owner") == 0


@pytest.mark.long
@pytest.mark.rule("E4", "D5")
def test_e4_a_cancel_of_a_move_ends_beside_an_unresponsive_source(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The move tries to evict the source, and waits for the writer lock."""
    process, engine = worker(name="stopped"), topic.engine
    assert process.call(open_producer, EXCLUSIVE) == 1
    process.call(keep_pausing)
    future = engine.unload_async("orders", to=engine.id, timeout=2 * PATIENCE)
    with blocked_by(process) as names_it:
        process.set_keepalive(0.5)  # not before: a busy machine might let it be silent for as long
        until(engine.backend.sessions.find_dead)
        assert not within(future.cancel)
        with pytest.raises(xl.WaitTimeoutError, match=names_it):
            within(functools.partial(future.result, PATIENCE / 2))
    process.call(end_pausing)


@pytest.mark.long
@pytest.mark.rule("E4", "D5")
def test_e4_a_producer_that_cannot_move_stays(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped")
    with topic.producer(EXCLUSIVE) as producer:
        with blocked_by(process) as names_it:
            move = within(lambda: producer.move(process.id, timeout=1))
        assert (move.state, bool(re.search(names_it, move.reason))) == ("failed", True)
        assert producer.send(b"still the owner") == 0


# ---- roles ----------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.rule("D5")
@pytest.mark.parametrize("topics", [[], ["orders"], ["new"]])
def test_d5_a_role_that_cannot_be_registered_ends_at_its_timeout(
    engine: xl.Engine, worker: Callable[..., Worker], topics: list[str]
) -> None:
    """Its topics may have to be created."""
    process = worker(name="stopped")
    with blocked_by(process) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        within(lambda: engine.role("billing", topics=topics, timeout=1))
    assert engine.roles() == []
    with engine.role("billing", topics=topics, timeout=PATIENCE) as role:
        assert role.epoch == 1


@pytest.mark.long
@pytest.mark.rule("E4", "D5")
def test_e4_a_role_that_cannot_be_handed_over_stays(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped")
    with engine.role("billing", topics=["orders"]) as role:
        with blocked_by(process) as names_it:
            move = within(lambda: role.hand_over(process.id, timeout=1))
        assert (move.state, bool(re.search(names_it, move.reason))) == ("failed", True)
        with role.producer("orders") as producer:
            assert producer.send(b"still the owner") == 0


# ---- sends and reads ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.rule("B9", "G5")
@pytest.mark.parametrize("place", PLACES)
def test_b9_sends_and_reads_end_at_their_timeouts(
    topic: xl.Topic, worker: Callable[..., Worker], place: str
) -> None:
    """Messages without an outcome are in the log once the process has resumed."""
    process, engine = worker(name="stopped"), topic.engine
    counts = xl.SharedMap(engine.topic("counts"))
    counts.put("a", 1)
    producer, reader, watch = topic.producer(EXCLUSIVE), topic.reader("latest"), counts.watch()
    members = topic.reader(group="g"), engine.reader(["orders", "counts"], group="h")
    for _ in counts.topic.reader():
        members[1].read_next(0)
    calls = [
        lambda: producer.send(b"1", timeout=1),
        lambda: producer.send_many([b"2", b"3"], timeout=1),
        lambda: producer.send_async(b"4").result(1),
        lambda: producer.flush(timeout=1),
        lambda: reader.read_next(timeout=1),
        lambda: list(reader.follow(timeout=1)),
        lambda: list(reader.values(follow=True, timeout=1)),
        *(functools.partial(member.read_next, timeout=1) for member in members),
        lambda: watch.read_next(timeout=1),
    ]
    with stopped(process, place):
        for call in calls:
            with contextlib.suppress(xl.WaitTimeoutError):
                within(call)
    process.answer()
    producer.flush(PATIENCE)
    assert sorted(message.value for message in topic.reader()) == [b"1", b"2", b"3", b"4"]


def be_stopped_in_an_append(state: State) -> None:
    """While it holds the append mutex."""
    assert state.engine.ledger.journal is not None
    state.engine.ledger.journal.lock()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.rule("K3", "D5")
def test_k3_a_request_waits_no_longer_than_its_timeout_for_what_a_dropped_producer_has_accepted(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped", keepalive=None)
    producer = topic.producer(EXCLUSIVE)
    process.start(be_stopped_in_an_append)
    process.await_stop()
    receipt = producer.send_async(b"accepted")
    del producer
    with pytest.raises(xl.ProducerFencedError, match="not free for an exclusive producer"):
        within(lambda: topic.producer(EXCLUSIVE, timeout=0.5), PATIENCE / 4)
    process.kill()
    assert receipt.result(PATIENCE) == 0
    assert topic.producer(WAIT, timeout=PATIENCE).send(b"next") == 1
