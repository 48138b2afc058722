"""Rules B1 to B10: epochs only grow, and a producer that has lost a topic cannot change it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.log import appending
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    Worker,
    close_producer,
    hang,
    open_producer,
    producer_state,
    rows,
    send,
    until,
    values,
)
from tests.conformance.test_epochs import ALONE, FENCED, STALE_CALLS

# ---- B1: epochs only grow ----------------------------------------------------------------


def test_b1_a_holder_or_waiter_of_a_topic_keeps_it_from_being_deleted(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    for mode in (SHARED, EXCLUSIVE):
        process.call(open_producer, mode)
        before = rows(engine)
        with pytest.raises(xl.ProducerBusyError):
            engine.delete_topic("orders")
        assert rows(engine) == before
        process.call(close_producer)
    process.call(open_producer, EXCLUSIVE)
    process.kill()
    engine.delete_topic("orders")  # a dead owner does not prevent it
    assert engine.topic("orders").epoch == 2


def test_b1_an_owner_that_hung_writes_nothing_into_the_topic_s_next_life(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    """The owner's process hangs. Somebody deletes the topic and makes it again; then the
    process goes on, with a session and an epoch of the topic's first life."""
    process = worker(keepalive=0.5)
    process.call(open_producer, EXCLUSIVE, name="ann")
    process.call(send, b"first life")
    hang(process)
    old = engine.topic("orders")
    until(lambda: old.owner is None)
    engine.delete_topic("orders")
    with engine.topic("orders").producer(EXCLUSIVE, name="ann") as producer:
        assert producer.topic_epoch == 2
        process.signal(signal.SIGCONT)
        with pytest.raises(Failed, match=r"TopicNotFoundError|ProducerFencedError"):
            process.call(send, b"zombie")
        process.call(close_producer)
        assert producer.send(b"second life") == 0
    assert values(engine.topic("orders")) == [b"second life"]


# ---- B2: checked where it is written -----------------------------------------------------


def test_b2_there_is_no_instant_between_the_check_and_the_write(
    topic: xl.Topic, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is checked and found valid, and before it has written, a rival in another
    process takes the topic. In the tables the take-over must not happen until the write is
    done: else an old message would come to stand behind the rival's first."""
    rival = worker(name="rival")
    overtaken = []

    def check_then_dawdle(*args: Any) -> None:
        check(*args)
        rival.start(open_producer, FENCING)
        overtaken.append(rival.answered(0.5))

    check = appending.check_may_write
    owner = topic.producer(EXCLUSIVE)
    monkeypatch.setattr(appending, "check_may_write", check_then_dawdle)
    assert owner.send(LARGE) == 0
    assert overtaken == [False]
    assert rival.answer() == 2
    monkeypatch.undo()
    assert rival.call(send, b"new") == 1
    with pytest.raises(FENCED):
        owner.send(b"too late")
    assert [(m.epoch, m.value) for m in topic.reader()] == [(1, LARGE), (2, b"new")]


def test_b2_a_take_over_between_look_up_and_append_is_noticed(
    topic: xl.Topic, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the journal the owner is looked up beforehand, and what is compared in the critical
    section is whether anything has changed since. A rival that comes in between is noticed."""
    rival = worker(name="rival")
    looked_up = []

    def look_up_then_dawdle(*args: Any) -> None:
        look_up(*args)
        looked_up.append(rival.call(open_producer, FENCING))
        monkeypatch.undo()

    look_up = appending.look_up
    owner = topic.producer(EXCLUSIVE)
    monkeypatch.setattr(appending, "look_up", look_up_then_dawdle)
    with pytest.raises(FENCED):
        owner.send(b"old")
    assert looked_up == [2]
    assert rival.call(send, b"new") == 0
    assert [(m.epoch, m.value) for m in topic.reader()] == [(2, b"new")]


# ---- B3: stale sessions ------------------------------------------------------------------

LARGE = bytes(200_000)  # too much for the journal


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
@pytest.mark.parametrize("call", STALE_CALLS.values(), ids=STALE_CALLS)
def test_b3_a_stale_session_is_refused_everywhere(
    engine: xl.Engine, topic: xl.Topic, mode: str, call: Callable[[xl.Producer], Any]
) -> None:
    with xl.open(engine.path) as other:
        stale = topic.producer(mode)
        stale.send(b"valid")
        valid = other.topic("orders").producer(FENCING)
        engine.ledger.checkpoint()  # else one may come between
        before = rows(engine)["entries"]
        with pytest.raises(FENCED) as error:
            call(stale)
        assert error.value.maybe_written is False
        assert rows(engine)["entries"] == before
        assert valid.send(b"successor") == 1


def test_b3_closing_a_stale_session_affects_no_other(engine: xl.Engine, topic: xl.Topic) -> None:
    stale = [topic.producer(), topic.producer(SHARED, name="ann")]
    with xl.open(engine.path) as other:
        owner = other.topic("orders").producer(FENCING, name="ann")
        waiters = [other.topic("orders").producer_async(WAIT) for _ in range(2)]
        held = rows(engine)
        for producer in stale:
            producer.close()
            producer.close()
        now = rows(engine)
        for table in ("holders", "queue", "engines", "topics", "producers", "entries"):
            assert now[table] == held[table]
        assert owner.state == "open"
        assert not any(waiter.done() for waiter in waiters)
        owner.close()
        assert waiters[0].result(timeout=PATIENCE).topic_epoch == 2


# ---- B5: claims --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ALONE)
@pytest.mark.parametrize("claim", [0, 1, 2])
@pytest.mark.parametrize("situation", ["free", "shared", "owned"])
def test_b5_a_lower_claim_is_fenced(
    engine: xl.Engine, topic: xl.Topic, mode: str, claim: int, situation: str
) -> None:
    for _ in range(2 if situation == "owned" else 3):
        topic.producer(EXCLUSIVE).close()
    holder = {"shared": SHARED, "owned": EXCLUSIVE}.get(situation)
    holding = contextlib.nullcontext() if holder is None else topic.producer(holder)
    with holding:
        before = rows(engine)
        with pytest.raises(FENCED):
            topic.producer(mode, topic_epoch=claim, timeout=PATIENCE)
        assert rows(engine) == before


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ALONE)
@pytest.mark.parametrize("claim", [3, 4, 2**63, 2**64])
@pytest.mark.parametrize("situation", ["free", "shared", "owned"])
def test_b5_a_higher_claim_is_invalid(
    engine: xl.Engine, topic: xl.Topic, mode: str, claim: int, situation: str
) -> None:
    for _ in range(1 if situation == "owned" else 2):
        topic.producer(EXCLUSIVE).close()
    holder = {"shared": SHARED, "owned": EXCLUSIVE}.get(situation)
    holding = contextlib.nullcontext() if holder is None else topic.producer(holder)
    with holding:
        before = rows(engine)
        with pytest.raises(xl.InvalidEpochError) as error:
            topic.producer(mode, topic_epoch=claim, timeout=PATIENCE)
        assert isinstance(error.value, ValueError)
        assert rows(engine) == before


# ---- B6, B7: who is disturbed ------------------------------------------------------------


@pytest.mark.parametrize("claim", [1, 99])
def test_b6_a_fencer_whose_claim_does_not_hold_is_refused_before_it_disturbs_anyone(
    engine: xl.Engine, topic: xl.Topic, claim: int
) -> None:
    """An old instance comes back with its old epoch and asks to fence the present owner. It
    must be refused first, not after it has thrown the valid owner out."""
    topic.producer(EXCLUSIVE).close()
    told: list[Any] = []
    owner = topic.producer(EXCLUSIVE, on_fenced=lambda *args: told.append(args))
    waiter = topic.producer_async(WAIT)
    with xl.open(engine.path) as other:
        before = rows(engine)
        with pytest.raises((FENCED, xl.InvalidEpochError)):
            other.topic("orders").producer(FENCING, topic_epoch=claim)
        assert rows(engine) == before
    assert owner.send(b"still here") == 0
    owner.flush()
    assert owner.state == "open"
    assert not waiter.done()
    owner.close()
    assert waiter.result(timeout=PATIENCE).topic_epoch == 3
    assert told == []


def test_b7_a_late_release_does_not_touch_the_successor(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The owner's process hangs and loses the topic. When it goes on, the first thing it does
    is to close its producer, long after another one has taken over."""
    process = worker(keepalive=0.5)
    process.call(open_producer, EXCLUSIVE, name="ann")
    hang(process)
    successor = topic.producer(WAIT, timeout=PATIENCE)
    third = topic.producer_async(WAIT)
    process.signal(signal.SIGCONT)
    process.call(close_producer)
    assert process.call(producer_state) == "closed"
    assert successor.state == "open"
    assert not third.done()
    assert topic.owner is not None
    assert topic.owner.session == successor._session.id
    assert successor.send(b"x") == 0


def test_b7_a_late_release_of_an_equal_epoch_does_not_touch_the_successor(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """As before, but the successor has claimed the very epoch of the one that hangs: the two
    differ only by their sessions."""
    process = worker(keepalive=0.5)
    epoch = process.call(open_producer, EXCLUSIVE)
    hang(process)
    until(lambda: topic.owner is None)
    successor = topic.producer(EXCLUSIVE, topic_epoch=epoch)
    assert successor.topic_epoch == epoch
    process.signal(signal.SIGCONT)
    with pytest.raises(Failed, match="ProducerFencedError"):
        process.call(send, b"zombie")
    process.call(close_producer)
    assert successor.state == "open"
    assert successor.send(b"x") == 0
    assert values(topic) == [b"x"]


# ---- B8, B9, B10: what is in the log -----------------------------------------------------
