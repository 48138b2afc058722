"""Faults that systems of this kind have had, one story each, and what happens here instead.

Most were found in brokers and lock services years after their release: the code that grants
was right, and the code around it, for the request that is cancelled, interrupted, late,
dead or half done, was not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.records import Rows
from exclusivelog.local.shm.slots import Slots
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import (
    NotificationTable,
    ProducerTable,
    SessionTable,
    Tables,
    TopicTable,
)
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    Worker,
    close_producer,
    collect,
    hang,
    open_producer,
    rows,
    send,
    until,
    values,
)

SHARED, EXCLUSIVE = "shared", "exclusive"
WAIT, FENCING = "wait_for_exclusive", "exclusive_with_fencing"

FENCED = xl.ProducerFencedError


def free(topic: xl.Topic) -> bool:
    """The topic has no holder and no waiter."""
    return not topic.holders and not topic.waiters


# ---- stale claims ------------------------------------------------------------------------


@pytest.mark.rule("B5", "D4")
def test_a_stale_waiter_is_not_promoted_with_a_lower_epoch(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """An owner loses its connection and queues up with the epoch it had, while it is still
    valid. Another waiter is promoted before it, writes under the next epoch, and is killed.
    Promoting the old owner now, with the epoch that it claims, would turn the clock back:
    its messages would be fenced off by readers, or worse, accepted beside newer ones."""
    owner, rival, old = (worker(name=name) for name in ("owner", "rival", "old"))
    owner.call(open_producer, EXCLUSIVE)
    rival.start(open_producer, WAIT)
    until(lambda: len(topic.waiters) == 1)
    old.start(open_producer, WAIT, topic_epoch=1)
    until(lambda: len(topic.waiters) == 2)
    last = topic.producer_async(WAIT)
    owner.kill()
    assert rival.answer() == 2
    rival.call(send, b"epoch 2")
    rival.kill()
    with pytest.raises(Failed, match="ProducerFencedError"):
        old.answer()
    producer = last.result(timeout=PATIENCE)
    assert producer.topic_epoch == topic.epoch == 3
    producer.send(b"epoch 3")
    assert [message.epoch for message in topic.reader()] == [2, 3]


def keep_sending(state: State, count: int) -> list[str]:
    """Send; the kinds of the errors that it met."""
    errors = []
    for number in range(count):
        try:
            send(state, b"%d" % number)
        except xl.ExclusiveLogError as error:
            errors.append(type(error).__name__)
    return errors


def fence_again_and_again(state: State, claim: int, count: int) -> set[str]:
    """Ask for the topic by force, with an old epoch; the kinds of the refusals."""
    refusals = set()
    for _ in range(count):
        try:
            state.topic.producer(FENCING, topic_epoch=claim)
        except xl.ExclusiveLogError as error:
            refusals.add(type(error).__name__)
    return refusals


@pytest.mark.long
@pytest.mark.rule("B6")
def test_a_stale_fencer_does_not_evict_the_valid_owner_before_it_is_refused(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """A process hangs and is replaced. When it goes on it reconnects with its old epoch, by
    force, again and again. A broker that first evicts and then validates would throw the
    valid owner out each time, and refuse the intruder afterwards: the topic is down."""
    old, valid = worker(name="old", keepalive=0.5), worker(name="valid")
    old.call(open_producer, EXCLUSIVE)
    hang(old)
    assert valid.call(open_producer, WAIT, timeout=PATIENCE) == 2
    waiter = topic.producer_async(WAIT)
    valid.start(keep_sending, 300)
    old.signal(signal.SIGCONT)
    with pytest.raises(Failed, match="ProducerFencedError"):
        old.call(send, b"zombie")
    assert old.call(fence_again_and_again, 1, 100) == {"ProducerFencedError"}
    assert valid.answer() == []
    assert topic.epoch == 2
    assert not waiter.done()
    assert values(topic) == [b"%d" % number for number in range(300)]


# ---- late releases -----------------------------------------------------------------------


def drop_producer(state: State) -> None:
    """Forget the producer without closing it."""
    state.producer = None
    collect()


def close_engine(state: State) -> None:
    """Close the worker's engine."""
    state.engine.close()


def awake(state: State) -> None:
    """Do nothing: an answer shows that the process runs."""


def leave_main(process: Worker) -> None:
    """The process is interrupted, and closes what is open on its way out."""
    process.call(awake)  # a main thread that is still stopped would leave the signal to others
    time.sleep(0.2)  # until it reads: Python may miss a signal just before a read
    process.signal(signal.SIGINT)
    process.process.join(PATIENCE)
    assert process.process.exitcode in (0, 1)


RELEASES: dict[str, Callable[[Worker], Any]] = {
    "closes its producer": lambda process: process.call(close_producer),
    "closes its engine": lambda process: process.call(close_engine),
    "drops its producer": lambda process: process.call(drop_producer),
    "leaves main": leave_main,
}


@pytest.mark.sampled
@pytest.mark.rule("B7")
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_a_late_release_by_an_evicted_owner_does_not_clear_its_successor(
    topic: xl.Topic, worker: Callable[..., Worker], release: Callable[[Worker], Any]
) -> None:
    """An owner hangs in the middle of shutting down, and is evicted. When it goes on it still
    believes that the topic is its own to give back. A release that does not say whose
    ownership it ends would end its successor's, and let a third one in beside it."""
    old = worker(name="old", keepalive=0.5)
    old.call(open_producer, EXCLUSIVE)
    hang(old)
    successor = topic.producer(WAIT, timeout=PATIENCE)
    third = topic.producer_async(WAIT)
    old.signal(signal.SIGCONT)
    release(old)
    time.sleep(0.1)  # what is dropped is released by another thread
    successor.send(b"x")
    assert successor.state == "open"
    assert not third.done()
    assert topic.epoch == 2


# ---- half a grant ------------------------------------------------------------------------

STEPS: dict[str, tuple[type, str]] = {  # the others are methods of `SessionTable`
    "next_id": (Rows, "next_id"),
    "put_producer": (ProducerTable, "put"),
    "put_topic": (TopicTable, "put"),
    "post": (NotificationTable, "post"),
}


@contextlib.contextmanager
def failing(method: str, error: BaseException, call: int = 1) -> Iterator[list[int]]:
    """The n-th call of this method of the ledger's tables does its work, and then raises; each from
    then on if the map is full, as it then stays."""
    owner, method = STEPS.get(method, (SessionTable, method))
    original = getattr(owner, method)
    counter = itertools.count(1)
    struck: list[int] = []

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        number = next(counter)
        if number == call or (number > call and isinstance(error, xl.LedgerFullError)):
            struck.append(call)
            raise error
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, fail)
        yield struck


WRITES = ("next_id", "put_holder", "put_producer", "put_topic", "put_waiter", "drop_holder")


@pytest.mark.sampled
@pytest.mark.rule("A2")
@pytest.mark.parametrize("method", WRITES)
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
@pytest.mark.parametrize("situation", ["free", "shared", "owned"])
@pytest.mark.parametrize("error", [xl.LedgerFullError("injected"), MemoryError("injected")])
def test_a_grant_whose_registration_fails_has_changed_nothing(
    engine: xl.Engine, topic: xl.Topic, method: str, mode: str, situation: str, error: BaseException
) -> None:
    """The topic is granted and the rivals are evicted; then registering the new owner fails,
    because the disk is full. An epoch that is raised already, or an owner that is thrown out
    already, would stay so, and the topic would have no owner."""
    holder = {"shared": SHARED, "owned": EXCLUSIVE}.get(situation)
    told: list[Any] = []
    held = topic.producer(holder, on_fenced=lambda *args: told.append(args)) if holder else None
    waiter = topic.producer_async(WAIT) if holder else None
    before, epoch = rows(engine), topic.epoch
    with failing(method, error) as struck:
        # Refused anyway, or it has no such step: that is another test's business.
        outcome = topic_request(topic, mode)
    if not struck:
        assert not isinstance(outcome, (xl.LedgerError, MemoryError))
        return
    assert outcome is error
    until(lambda: rows(engine) == before)
    assert topic.epoch == epoch
    if held is not None and waiter is not None:
        held.send(b"still here")
        assert held.state == "open"
        assert not waiter.done()
        held.close()
        assert waiter.result(timeout=PATIENCE).topic_epoch == epoch + 1
    else:
        assert topic.producer(EXCLUSIVE).topic_epoch == epoch + 1
    assert told == []


def topic_request(topic: xl.Topic, mode: str) -> Any:
    """The producer, or the error."""
    try:
        return topic.producer(mode, timeout=0)
    except BaseException as error:
        return error


@pytest.mark.rule("C1", "D4")
@pytest.mark.parametrize(
    "method", ["drop_holder", "drop_waiter", "put_holder", "put_producer", "post", "put_topic"]
)
@pytest.mark.parametrize(
    "error", [xl.LedgerFullError("injected"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
def test_a_promotion_that_fails_half_way_is_made_up_for(
    engine: xl.Engine, topic: xl.Topic, method: str, error: BaseException
) -> None:
    """The owner closes; the transaction that passes the topic on fails, or is interrupted. The
    producer is closed, so no other call will release the topic: the engine must do it, or the
    waiter waits without end behind an owner that no longer exists."""
    owner = topic.producer(EXCLUSIVE, name="owner")
    owner.send(b"x")
    with xl.open(engine.path) as other:
        waiter = other.topic("orders").producer_async(WAIT)
        with failing(method, error) as struck, pytest.raises(type(error)):
            owner.close()
        assert struck
        assert owner.state == "closed"
        assert waiter.result(timeout=PATIENCE).topic_epoch == topic.epoch == 2


# ---- abandoned requests ------------------------------------------------------------------


@pytest.mark.rule("D4", "D5")
def test_a_future_that_was_dropped_leaves_no_orphan(topic: xl.Topic) -> None:
    """A request is made and its future dropped. When it is granted, no code has the producer; the
    waiter behind it must get the topic."""
    owner = topic.producer(EXCLUSIVE)
    topic.producer_async(WAIT)
    collect()
    behind = topic.producer_async(WAIT)
    owner.close()
    behind.result(timeout=PATIENCE).close()
    until(lambda: free(topic))


@pytest.mark.sampled
@pytest.mark.rule("C1")
@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
def test_a_producer_that_was_dropped_without_close_leaves_no_orphan(
    engine: xl.Engine, topic: xl.Topic, mode: str, cycle: bool
) -> None:
    with xl.open(engine.path) as other:
        producer: Any = topic.producer(mode)
        producer.send(b"x")
        if cycle:
            producer.itself = producer
        waiter = other.topic("orders").producer_async(WAIT)
        del producer
        collect()
        assert waiter.result(timeout=PATIENCE).send(b"y") == 1


@pytest.mark.rule("C1")
def test_a_producer_dropped_with_messages_on_their_way_sends_them_first(topic: xl.Topic) -> None:
    receipts = [topic.producer(EXCLUSIVE, linger=0.05).send_async(b"x") for _ in range(1)]
    collect()
    assert receipts[0].result(timeout=PATIENCE) == 0
    until(lambda: free(topic))


@contextlib.contextmanager
def interrupted_after_commit() -> Iterator[None]:
    """Ctrl-C arrives while the first transaction is being flushed: Python raises it as soon
    as the commit has returned."""
    original = Ledger.write_fencing
    pending = [KeyboardInterrupt()]

    @contextlib.contextmanager
    def write(self: Ledger, until: int = 0, applied: bool = False) -> Iterator[Tables]:
        with original(self, until, applied) as tables:
            yield tables
        if pending and threading.current_thread() is threading.main_thread():
            raise pending.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "write_fencing", write)
        yield


@pytest.mark.sampled
@pytest.mark.rule("A2", "D5")
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
@pytest.mark.parametrize("rival", [None, SHARED, EXCLUSIVE])
def test_a_request_interrupted_after_its_commit_leaves_no_orphan(
    topic: xl.Topic, mode: str, rival: str | None
) -> None:
    """The grant is durable and Ctrl-C comes before a caller has it. The caller sees an
    interrupt, the ledger an owner: one that will never write and never leave."""
    holder = topic.producer(rival) if rival else None
    with interrupted_after_commit():
        outcome = topic_request(topic, mode)
    # The traceback is kept, as an interactive session does: it must not keep the owner alive.
    assert isinstance(outcome, (KeyboardInterrupt, xl.ProducerBusyError, FENCED))
    until(lambda: not topic.waiters)
    if holder is not None:
        holder.close()
    until(lambda: free(topic))
    assert topic.producer(EXCLUSIVE).topic_epoch == topic.epoch


@pytest.mark.rule("C1")
@pytest.mark.parametrize("method", ["producer", "engine"])
def test_a_close_interrupted_after_its_commit_has_closed(
    path: str, topic: xl.Topic, method: str
) -> None:
    with xl.open(path) as other:
        producer = other.topic("orders").producer(EXCLUSIVE, linger=60)
        producer.send_async(b"x")
        closing = producer if method == "producer" else other
        with interrupted_after_commit():
            with contextlib.suppress(KeyboardInterrupt):
                closing.close()
        until(lambda: free(topic))
        assert values(topic) == [b"x"]
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


def wait_and_be_interrupted(state: State, **options: Any) -> str:
    """Wait for the topic until it comes, or an interrupt does. The interrupt is kept, and its
    traceback with it."""

    def on_interrupt(*args: Any) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    armed = [True]
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        state.producer = state.topic.producer(WAIT, **options)
        armed.clear()
    except KeyboardInterrupt as interrupt:
        state.kept["interrupt"] = interrupt
        state.producer = None
        return "interrupted"
    return "granted"


@pytest.mark.rule("D5")
def test_a_process_interrupted_while_it_waits_leaves_no_orphan(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Ctrl-C in the main thread of a process that waits in the queue, and that lives on."""
    process = worker()
    for _ in range(3):
        owner = topic.producer(EXCLUSIVE)
        process.start(wait_and_be_interrupted)
        until(lambda: topic.waiters)
        process.signal(signal.SIGINT)
        assert process.answer() == "interrupted"
        until(lambda: not topic.waiters)  # it may have struck before the call knew its session
        owner.close()
        assert free(topic)


@pytest.mark.long
@pytest.mark.rule("D5")
def test_an_interrupt_that_races_with_the_grant_leaves_no_orphan(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The owner leaves at the moment in which the waiter is interrupted. In either order,
    the process has the topic and knows it, or the topic is free."""
    process = worker()
    chance = random.Random(7)
    for _ in range(40):
        owner = topic.producer(EXCLUSIVE)
        process.start(wait_and_be_interrupted)
        until(lambda: topic.waiters)
        if chance.random() < 0.5:
            timer = threading.Timer(chance.random() * 0.001, process.signal, [signal.SIGINT])
            timer.start()
            owner.close()
            timer.join()  # a late one would strike the next round
        else:
            owner.close()
            time.sleep(chance.random() * 0.0005)
            process.signal(signal.SIGINT)
        if process.answer() == "granted":
            assert process.call(send, b"x") == topic.next_offset - 1
            process.call(close_producer)
        until(lambda: free(topic))


def open_and_be_interrupted(state: State, rounds: int) -> int:
    """Open, send and close, with interrupts at random moments; how many struck."""

    def on_alarm(*args: Any) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def one_round() -> None:
        with state.topic.producer(EXCLUSIVE) as producer:
            producer.send(b"x")

    armed: list[bool] = []
    chance = random.Random(8)
    struck = 0
    signal.signal(signal.SIGALRM, on_alarm)
    for _ in range(rounds):
        until(lambda: free(state.topic))
        try:
            armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + chance.random() * 0.002)
            one_round()
            armed.clear()
        except KeyboardInterrupt:
            struck += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    until(lambda: free(state.topic))
    return struck


@pytest.mark.long
@pytest.mark.rule("A2", "D5")
def test_interrupts_at_any_moment_leave_no_orphan(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """An interrupt strikes somewhere in open, send or close. Afterwards the topic is free, and
    the same process can have it again."""
    process = worker()
    assert process.call(open_and_be_interrupted, 60) > 5
    assert process.call(open_producer, EXCLUSIVE) == topic.epoch
    assert topic.engine.verify().ok


# ---- promotion that stops ----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.rule("D4")
def test_promotion_does_not_stop_at_the_first_dead_candidate(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The three best waiters are killed, and the owner leaves before any process can have noticed.
    Promotion tries the first, fails, and must go on: nothing else would wake the fourth."""
    for _ in range(3):
        owner = topic.producer(EXCLUSIVE)
        processes = [worker(name=f"w{i}", keepalive=None) for i in range(3)]
        for priority, process in enumerate(processes, start=1):
            process.start(open_producer, WAIT, priority=priority)
        until(lambda: len(topic.waiters) == 3)
        live = topic.producer_async(WAIT)
        for process in processes:
            process.signal(signal.SIGKILL)
        owner.close()
        with live.result(timeout=PATIENCE) as producer:
            assert producer.state == "open"
            assert producer.topic_epoch == topic.epoch
        assert free(topic)


@pytest.mark.sampled
@pytest.mark.rule("A3")
@pytest.mark.parametrize("end", ["close", "kill", "stop", "drop"])
def test_a_waiter_behind_shared_producers_is_woken_when_they_are_gone(
    topic: xl.Topic, worker: Callable[..., Worker], end: str
) -> None:
    """A waiter stands behind shared producers, not behind an owner. Code that promotes when an
    owner leaves never looks at it: it waits for ever in front of a free topic."""
    waiting = worker(name="waiting")
    shared = [worker(name=f"s{i}", keepalive=None) for i in range(2)]
    for process in shared:
        process.call(open_producer, SHARED)
        process.call(send, b"shared")
    waiting.start(open_producer, WAIT, timeout=PATIENCE)
    until(lambda: topic.waiters)
    for process in shared:
        assert not waiting.answered()
        if end == "close":
            process.call(close_producer)
        elif end == "drop":
            process.call(drop_producer)
        elif end == "kill":
            process.kill()
        else:
            hang(process, 0.5)
    assert waiting.answer() == 1
    assert waiting.call(send, b"alone") == 2
    for process in shared:
        if end == "stop":
            process.signal(signal.SIGCONT)
            with pytest.raises(Failed, match="ProducerFencedError"):
                process.call(send, b"zombie")


# ---- ghosts ------------------------------------------------------------------------------


@pytest.mark.rule("B5", "C2")
@pytest.mark.parametrize("mode", [EXCLUSIVE, WAIT, FENCING])
def test_an_owner_is_not_refused_by_its_own_ghost(
    topic: xl.Topic, worker: Callable[..., Worker], mode: str
) -> None:
    """A process is killed and started again at once, as supervisors do, with the same name and
    the epoch that it had. Its former self still stands in the ledger as the owner. It must
    not have to wait until it is evicted after some timeout."""
    epoch, offsets = None, []
    for number in range(4):
        process = worker(name="service", keepalive=None)
        options = {} if epoch is None else {"topic_epoch": epoch}
        granted = process.call(open_producer, mode, name="ann", timeout=PATIENCE, **options)
        assert epoch in (None, granted)
        epoch = granted
        offsets.append(process.call(send, b"%d" % number, sequence_id=number))
        process.kill()
    assert offsets == [0, 1, 2, 3]
    assert topic.epoch == 1
    assert {(m.epoch, m.producer_name) for m in topic.reader()} == {(1, "ann")}


@pytest.mark.rule("B5", "D4")
def test_an_owner_that_comes_back_too_late_is_not_served_before_the_waiter(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """As before, but with a waiter, which is promoted at the death, and the old owner,
    which comes back with its epoch, is told that this epoch is over."""
    process = worker(name="service", keepalive=None)
    process.call(open_producer, EXCLUSIVE, name="ann")
    waiter = topic.producer_async(WAIT)
    process.kill()
    process = worker(name="service")
    for mode in (EXCLUSIVE, FENCING):
        with pytest.raises(Failed, match="ProducerFencedError"):
            process.call(open_producer, mode, name="ann", topic_epoch=1)
    assert waiter.result(timeout=PATIENCE).topic_epoch == topic.epoch == 2


@pytest.mark.rule("C3")
def test_a_waiter_taken_for_hung_by_a_hair_s_breadth_is_told(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter's process was slow, and the owner, leaving, finds its heartbeat overdue and
    passes it over. In the same moment the process beats again, looks at the queue, finds
    itself still in it, since the owner has not committed yet, and goes on waiting: for ever,
    unless the process that removes it from the queue notifies it."""
    with xl.open(path, name="slow") as other:
        owner = topic.producer(EXCLUSIVE)
        waiter = other.topic("orders").producer_async(WAIT)
        original = Slots.alive

        def overdue(self: Slots, slot: int, engine: str) -> bool:
            return engine != other.id and original(self, slot, engine)

        with monkeypatch.context() as patch:
            patch.setattr(Slots, "alive", overdue)
            owner.close()
        assert isinstance(waiter.exception(timeout=PATIENCE), FENCED)
        assert topic.waiters == []


@pytest.mark.rule("C3", "C6")
def test_an_engine_that_is_back_before_it_is_evicted_is_told(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is overdue, and another one takes its sessions away. Before that is committed
    the engine is back, and goes on as if nothing had happened: it holds a topic, waits for a
    second one, and is granted a third. All of that is gone a moment later; it must not wait for
    ever, or sit on a grant that it has never heard of."""
    engine, original = topic.engine, Slots.alive
    told: list[Any] = []
    with xl.open(path, name="back") as other:
        held = other.topic("held").producer(EXCLUSIVE, on_fenced=lambda *args: told.append(args))
        owners = [engine.topic(name).producer(EXCLUSIVE) for name in ("awaited", "granted")]
        awaited, granted = (
            other.topic(name).producer_async(WAIT) for name in ("awaited", "granted")
        )

        def overdue(self: Slots, slot: int, engine: str) -> bool:
            return engine != other.id and original(self, slot, engine)

        with other.backend.notifications.lock:  # it has not read its notifications yet
            owners[1].close()
            with monkeypatch.context() as patch:
                patch.setattr(Slots, "alive", overdue)
                names = ("held", "awaited", "granted")
                needed = {engine.backend.catalog.topic(name, False)[0] for name in names}
                list(engine.backend.sessions.evict(other.id, lambda: needed))
        until(lambda: told)
        assert held.state == "fenced"
        assert isinstance(awaited.exception(timeout=PATIENCE), FENCED)
        assert granted.exception(timeout=PATIENCE) is not None or granted.result().state == "fenced"
        owners[0].close()
        for name in ("held", "awaited", "granted"):
            until(lambda name=name: free(engine.topic(name)))


@pytest.mark.rule("C4")
def test_a_pid_that_was_used_before_means_nothing(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Two engines of one process have one pid, and a dead process's pid may be given to a new
    one. If liveness were decided by pids, a dead engine would seem alive."""
    with xl.open(topic.engine.path) as first:
        first.topic("orders").producer(EXCLUSIVE)
        kept = first.topic("kept").producer(EXCLUSIVE)
        assert kept.state == "open"
    assert free(topic)
    assert topic.engine.topic("kept").owner is None
    producer = topic.producer(EXCLUSIVE)
    assert producer.topic_epoch == 2
    assert topic.owner is not None
    assert topic.owner.pid == os.getpid()
