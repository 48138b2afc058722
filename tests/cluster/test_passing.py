"""An owner that closes passes its topic on to the first waiter (rules C1, D4, D5). The schedules of
engines, their threads and their requests that `proof.cluster_model` does not have."""

from __future__ import annotations

import contextlib
import gc
import secrets
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import requests, waiting
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import Grant, decode
from exclusivelog.cluster.memory import MemoryPlace, _Link
from exclusivelog.cluster.ordered import Record
from exclusivelog.cluster.requests import Asking, Requests
from exclusivelog.cluster.rule import State
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, WAIT, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.once, pytest.mark.rule("C1")]


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def log_of(path: str) -> Any:
    return MemoryPlace.named(path.partition("://")[2]).open("orders")


def raw(path: str) -> Iterator[Record]:
    """All that the topic's log has."""
    tail = log_of(path).tail()
    while (record := tail.next(0)) is not None:
        yield record


def passes(path: str) -> list[Grant]:
    """The grants by which the topic was passed on, whether they count or not."""
    found = [decode(record.data) for record in raw(path)]
    return [each for each in found if isinstance(each, Grant) and each.by]


def told(engine: xl.Engine) -> list[tuple[str, str, int]]:
    return [(event.kind, event.reason, event.epoch) for event in engine.history("orders")]


def followed(engine: xl.Engine) -> TopicLog:
    found: TopicLog = engine.backend.topics.named("orders")  # type: ignore[attr-defined]
    return found


@pytest.mark.rule("D5", "C1")
def test_d5_a_waiter_that_has_left_gives_back_what_was_passed_on_to_it(
    path: str, topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner closes before the log says that it has left."""
    append = _Link.append

    def lose_what_leaves(link: _Link, data: bytes, *answered: Any) -> None:
        if not isinstance(waiting.decode(data), waiting.Leave):
            append(link, data, *answered)

    owner = topic.producer(EXCLUSIVE)
    left = other.topic("orders").producer_async(WAIT, name="left", priority=9)
    there = other.topic("orders").producer_async(WAIT, name="there")
    until(lambda: [waiter.producer_name for waiter in topic.waiters] == ["left", "there"])
    with monkeypatch.context() as patch:
        patch.setattr(_Link, "append", lose_what_leaves)
        assert left.cancel()
        owner.close()
    producer = there.result(timeout=PATIENCE)
    assert (producer.topic_epoch, producer.send(b"x")) == (3, 0)
    assert [(e.kind, e.reason, e.epoch) for e in topic.engine.history("orders")] == [
        ("grant", "request", 1),
        ("release", "closed", 1),
        ("grant", "promotion", 2),
        ("release", "closed", 2),
        ("grant", "promotion", 3),
    ]


@pytest.mark.rule("C1")
@pytest.mark.parametrize("closes", ["producer", "engine"])
def test_c1_no_record_leaves_the_topic_without_an_owner_while_somebody_waits(
    path: str, topic: xl.Topic, other: xl.Engine, closes: str
) -> None:
    with xl.open(path, name="gone") as gone:
        owner = gone.topic("orders").producer(EXCLUSIVE)
        first = other.topic("orders").producer_async(WAIT, name="first")
        second = topic.producer_async(WAIT, name="second")
        until(lambda: len(gone.topic("orders").waiters) == 2)
        owner.send_async(b"last")
        (owner if closes == "producer" else gone).close()
        first.result(PATIENCE).close()
        assert second.result(PATIENCE).send(b"x") == 1
    state, waiters, unowned = State(), waiting.Waiters(), 0
    for record in raw(path):
        before = state.session, state.owned
        judged = state.fold(record)
        waiters.take(waiting.decode(record.data), state.owning)
        if judged.counts and isinstance(judged.parsed, Grant):
            waiters.granted(judged.parsed, *before)
        unowned += bool(len(waiters)) and not state.owned
    assert (unowned, state.epoch) == (0, 3)


@pytest.mark.rule("C1", "D7")
def test_c1_a_waiter_with_a_delay_of_its_own_is_not_passed_the_topic(
    path: str, topic: xl.Topic, other: xl.Engine
) -> None:
    owner = topic.producer(EXCLUSIVE)
    other.topic("orders").producer_async(WAIT, name="low", priority=-1)
    settling = other.topic("orders").producer_async(WAIT, name="high", priority=9, settle=0.05)
    until(lambda: len(topic.waiters) == 2)
    owner.close()
    assert settling.result(PATIENCE).topic_epoch == 2
    assert passes(path) == []


# ---- beside other requests, threads and deaths -----------------------------------------------


def test_c1_a_pass_that_comes_while_the_worker_looks_is_no_fence(
    topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, inspect, done = topic.producer(EXCLUSIVE), requests.inspect, list[int]()
    waiter = other.topic("orders").producer_async(WAIT)
    until(lambda: len(topic.waiters) == 1)

    def inspect_late(log: TopicLog, *arguments: Any) -> Any:
        if log.host is other.backend and not done:
            done.append(1)
            owner.close()
            until(lambda: log.state.epoch == 2)
        return inspect(log, *arguments)

    monkeypatch.setattr(requests, "inspect", inspect_late)
    assert waiter.result(PATIENCE).topic_epoch == 2
    assert done


@pytest.mark.parametrize("closes", ["producer", "engine"])
def test_c1_the_topic_is_released_although_nobody_knows_who_lives(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, closes: str
) -> None:
    def lives(engine: str, patient: bool = True) -> bool:
        raise xl.ClusterError("the broker is restarting")

    with xl.open(path, name="gone") as gone:
        owner = gone.topic("orders").producer(EXCLUSIVE)
        waiter = topic.producer_async(WAIT)
        until(lambda: len(gone.topic("orders").waiters) == 1)
        monkeypatch.setattr(gone.backend.place, "lives", lives)  # type: ignore[attr-defined]
        (owner if closes == "producer" else gone).close()
        assert waiter.result(PATIENCE).topic_epoch == 2
    assert told(topic.engine)[:2] == [("grant", "request", 1), ("release", "closed", 1)]
    assert passes(path) == []


@pytest.mark.rule("D9")
def test_d9_one_of_two_waiters_of_a_name_leaves_and_the_other_stays(
    path: str, topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass to the first one comes behind its withdrawal."""
    append, there, seen = _Link.append, other.topic("orders"), list[threading.Thread]()
    owner = topic.producer(EXCLUSIVE)
    first = there.producer_async(WAIT, name="w")
    second = there.producer_async(WAIT, name="w")
    until(lambda: len(topic.waiters) == 2)

    def append_late(link: _Link, data: bytes, *answered: Any) -> None:
        record = decode(data)
        if not (isinstance(record, Grant) and record.by) or seen:
            append(link, data, *answered)
            return

        def leave_first() -> None:
            first.cancel()
            until(lambda: len(topic.waiters) == 1)
            append(link, data, *answered)

        seen.append(threading.Thread(target=leave_first))
        seen[0].start()

    monkeypatch.setattr(_Link, "append", append_late)
    owner.close()
    seen[0].join(PATIENCE)
    assert second.result(PATIENCE).topic_epoch == 3
    assert told(topic.engine)[-3:] == [
        ("grant", "promotion", 2),
        ("release", "closed", 2),
        ("grant", "promotion", 3),
    ]


def test_c1_what_is_passed_on_twice_is_given_back_once(
    path: str, topic: xl.Topic, other: xl.Engine, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the waiter's record comes late, while it is being granted the topic."""
    registry = other.backend.registry  # type: ignore[attr-defined]
    keep, inside, go_on = registry.keep, threading.Event(), threading.Event()

    def keep_late(number: int, owning: Any) -> None:
        inside.set()
        go_on.wait(PATIENCE)
        keep(number, owning)

    owner = topic.producer(EXCLUSIVE)
    waiter = other.topic("orders").producer_async(WAIT, name="w")
    until(lambda: len(topic.waiters) == 1)
    [wait] = [
        each.data for each in raw(path) if isinstance(waiting.decode(each.data), waiting.Wait)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(registry, "keep", keep_late)
        owner.close()
        assert inside.wait(PATIENCE)
        rival = third.topic("orders").producer(FENCING)
        log_of(path).append(wait)
        until(lambda: len(third.topic("orders").waiters) == 1)
        rival.close()
        until(lambda: followed(other).state.epoch == 4)
        go_on.set()
        assert waiter.result(PATIENCE).topic_epoch == 2
    assert topic.producer(WAIT, timeout=PATIENCE).topic_epoch == 5


@pytest.mark.rule("E1")
def test_e1_a_topic_that_was_just_passed_on_is_handed_over_at_once(
    topic: xl.Topic, other: xl.Engine, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its engine's worker was busy when the hand-over began."""
    watching = other.backend.watching  # type: ignore[attr-defined]
    poll, inside, go_on = watching.poll, threading.Event(), threading.Event()

    def poll_late() -> None:
        inside.set()
        go_on.wait(PATIENCE)
        poll()

    owner = topic.producer(EXCLUSIVE)
    waiter = other.topic("orders").producer_async(WAIT, follow=False)
    until(lambda: len(topic.waiters) == 1)
    monkeypatch.setattr(watching, "poll", poll_late)
    assert inside.wait(PATIENCE)
    owner.close()
    moves = list[Any]()
    mover = threading.Thread(
        target=lambda: moves.extend(topic.engine.unload("orders", to=third.id, timeout=PATIENCE))
    )
    mover.start()
    until(lambda: followed(other).waiters.assigned is not None)
    go_on.set()
    assert waiter.result(PATIENCE).topic_epoch == 2
    mover.join(PATIENCE)
    assert [move.ok for move in moves] == [True]


def test_c1_an_engine_that_closes_gives_back_what_was_passed_on_to_it(
    path: str, topic: xl.Topic, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xl.open(path, name="gone") as gone:
        owner = topic.producer(EXCLUSIVE)
        for number in range(3):
            gone.topic("orders").producer_async(WAIT, name=f"w{number}")
        last = third.topic("orders").producer_async(WAIT, name="last")
        until(lambda: len(topic.waiters) == 4)
        monkeypatch.setattr(gone.backend.pending, "poll", lambda: None)
        owner.close()
        until(lambda: followed(gone).state.epoch == 2)
    assert last.result(PATIENCE).topic_epoch == 3
    assert told(third) == [
        ("grant", "request", 1),
        ("release", "closed", 1),
        ("grant", "promotion", 2),
        ("release", "closed", 2),
        ("grant", "promotion", 3),
    ]


def test_c1_what_was_given_back_is_released_by_an_engine_that_closes(
    path: str, topic: xl.Topic, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker has not come to it."""
    owner = topic.producer(EXCLUSIVE)
    with xl.open(path, name="gone") as gone:
        first = gone.topic("orders").producer_async(WAIT)
        until(lambda: len(topic.waiters) == 1)
        worker: Any = gone.backend.worker  # type: ignore[attr-defined]
        monkeypatch.setattr(worker, "release_dropped", lambda topic=None: None)
        monkeypatch.setattr(gone.backend.pending, "poll", lambda: None)  # type: ignore[attr-defined]
        owner.close()
        until(lambda: followed(gone).state.epoch == 2)
        assert first.cancel()
    assert told(third)[-2:] == [("grant", "promotion", 2), ("release", "closed", 2)]


@pytest.mark.rule("D5")
def test_d5_a_request_that_is_late_for_the_end_of_its_engine_is_told_of_that(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in before the engine began to close, and would be queued when no thread of the
    engine looks at its queues any more."""
    owner, errors = topic.producer(EXCLUSIVE), list[BaseException]()
    gone = xl.open(path, name="gone")
    pending, worker = gone.backend.pending, gone.backend.worker  # type: ignore[attr-defined]
    stop, let_in, go_on = worker.stop, threading.Event(), threading.Event()
    attempt = Requests._attempt

    def attempt_late(here: Requests, asking: Asking, patient: bool = True) -> bool:
        if here is pending:
            let_in.set()
            go_on.wait(PATIENCE)
        return attempt(here, asking, patient)

    def ask() -> None:
        try:
            gone.topic("orders").producer(WAIT)
        except BaseException as error:
            errors.append(error)

    def stop_then_go_on() -> None:
        stop()
        worker.join()
        go_on.set()
        asking.join(PATIENCE)

    monkeypatch.setattr(Requests, "_attempt", attempt_late)
    monkeypatch.setattr(worker, "stop", stop_then_go_on)
    asking = threading.Thread(target=ask)
    asking.start()
    assert let_in.wait(PATIENCE)
    gone.close()
    assert [type(error) for error in errors] == [xl.EngineClosedError]
    assert (topic.waiters, owner.send(b"x")) == ([], 0)


@pytest.mark.rule("D5")
def test_d5_an_interrupted_request_gives_back_what_was_passed_on_to_it(
    topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attempt, inherit = topic.producer(EXCLUSIVE), Requests._attempt, Requests._inherit

    def close_then(pending: Requests, asking: Asking, patient: bool = True) -> bool:
        found = attempt(pending, asking, patient)
        until(lambda: len(topic.waiters) == 1)
        owner.close()
        until(lambda: asking.topic.state.epoch == 2)
        return found

    def interrupt(pending: Requests, asking: Asking) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Requests, "_attempt", close_then)
        patch.setattr(Requests, "_inherit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            other.topic("orders").producer(WAIT)
    assert Requests._inherit is inherit
    assert topic.producer(WAIT, timeout=PATIENCE).topic_epoch == 3


def test_a_waiter_of_another_program_is_not_passed_the_topic(path: str, topic: xl.Topic) -> None:
    """Its record has a pid that no engine writes."""
    owner = topic.producer(EXCLUSIVE)
    stranger = waiting.Wait(1, topic.engine.id, "stranger", -1, "p", 0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic.engine.backend, "waits_here", lambda number: True)  # type: ignore[attr-defined]
        log_of(path).append(waiting.encode(stranger))
        until(lambda: len(followed(topic.engine).waiters) == 1)
        owner.close()
    assert (topic.owner, passes(path)) == (None, [])


def test_a_closed_session_is_freed_at_once(topic: xl.Topic) -> None:
    """Without the collector: what it had queued is memory."""
    registry = topic.engine.backend.registry  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        found = list[weakref.ref[Any]]()
        for _ in range(5):
            producer = topic.producer(EXCLUSIVE)
            found.append(weakref.ref(registry.all()[0]))
            producer.close()
            del producer
        until(lambda: [each() for each in found] == [None] * 5)
    finally:
        gc.enable()


@pytest.mark.rule("D4")
def test_d4_an_error_of_one_request_keeps_no_other(
    topic: xl.Topic, other: xl.Engine, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that was fenced is kept, with its error, while another one is promoted, and
    dropped."""
    pending, there = other.backend.pending, other.topic("orders")  # type: ignore[attr-defined]
    poll, go_on = pending.poll, threading.Event()
    owner = topic.producer(EXCLUSIVE)
    first = there.producer_async(WAIT, name="first")
    until(lambda: len(topic.waiters) == 1)
    monkeypatch.setattr(pending, "poll", lambda: poll() if go_on.is_set() else None)
    rival = third.topic("orders").producer(FENCING)
    second = there.producer_async(WAIT, name="second")
    until(lambda: len(topic.waiters) == 1)
    gc.collect()
    gc.disable()
    try:
        go_on.set()
        with pytest.raises(xl.ProducerFencedError):
            first.result(PATIENCE)
        rival.close()
        second.result(PATIENCE)
        del second
        assert topic.producer(WAIT, timeout=PATIENCE).topic_epoch == 4
    finally:
        gc.enable()
    with contextlib.suppress(xl.ProducerFencedError):
        owner.close()
