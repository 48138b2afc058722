"""Hand-overs to an engine that is named in advance, on the public interface alone (E1 to E4)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    State,
    Worker,
    until,
    values,
)

pytestmark = [pytest.mark.needs("unload"), pytest.mark.usefixtures("idle_producers_stay")]


@pytest.fixture
def there(path: str) -> Iterator[xl.Topic]:
    """The topic, on another engine."""
    with xl.open(path, name="there", properties={"at": "there"}) as engine:
        yield engine.topic("orders")


@pytest.mark.on_broker
def test_e1_e3_the_destinations_best_waiter_gets_the_topic_past_all_others(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    owner.send(b"before")
    first = topic.producer_async(WAIT, priority=9)
    low, best = (there.producer_async(WAIT, priority=priority) for priority in (0, 1))
    [move] = engine.unload("orders", to=there.engine.id, timeout=PATIENCE)
    assert move.ok
    assert move.target.properties == {"at": "there"}
    assert move.source is not None
    assert move.source.session == owner._session.id or owner.state != "open"
    new = best.result(PATIENCE)
    assert (new.topic_epoch, new.send(b"after")) == (2, 1)
    assert not first.done()
    assert not low.done()
    new.close()
    assert first.result(PATIENCE).topic_epoch == 3


@pytest.mark.on_broker
def test_e3_a_topic_is_reserved_for_the_destinations_next_producer(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    owner.send(b"before")
    waiter = topic.producer_async(WAIT)
    [move] = engine.unload("orders", to=there.engine.id, timeout=PATIENCE)
    assert (move.state, topic.owner, owner.state) == ("assigned", None, "moved")
    assert [info.state for info in engine.topic("orders").transfers] == ["assigned"]
    with pytest.raises(xl.ProducerFencedError, match="there"):
        topic.producer(EXCLUSIVE)
    assert not waiter.done()
    with there.producer(EXCLUSIVE) as new:
        assert new.topic_epoch == 2
    assert waiter.result(PATIENCE).topic_epoch == 3


def test_e3_a_reservation_ends_at_its_deadline(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    for sent in range(50):
        owner = topic.producer(EXCLUSIVE, follow=False)
        assert owner.send(b"before") == sent
        waiter = topic.producer_async(WAIT)
        [move] = engine.unload("orders", to=there.engine.id, timeout=0.5)
        if move.ok:
            break
        # On a busy machine, the owner could not release it in time.
        owner.close()
        waiter.result(PATIENCE).close()
    assert (move.state, owner.state) == ("assigned", "moved")
    assert waiter.result(PATIENCE).send(b"after") == sent + 1


def test_e4_cancel_frees_a_reserved_topic(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    topic.producer(EXCLUSIVE).close()
    engine.unload("orders", to=there.engine.id, timeout=PATIENCE)
    waiter = topic.producer_async(WAIT)
    assert not waiter.done()
    assert engine.cancel_unload("orders") == ["orders"]
    assert engine.cancel_unload("orders") == []
    assert waiter.result(PATIENCE).topic_epoch == 2


def test_e4_the_end_of_the_destination_ends_a_reservation(
    engine: xl.Engine, topic: xl.Topic, path: str
) -> None:
    topic.producer(EXCLUSIVE).close()
    with xl.open(path) as gone:
        engine.unload("orders", to=gone.id, timeout=PATIENCE)
        waiter = topic.producer_async(WAIT)
        assert not waiter.done()
    assert waiter.result(PATIENCE).topic_epoch == 2


def test_e4_moving_again_is_safe(engine: xl.Engine, topic: xl.Topic, there: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    owner.send(b"before")
    waiting = there.producer_async(WAIT)
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    assert owner.state == "moved"
    new = waiting.result(PATIENCE)
    [again] = there.engine.unload(["orders"], to=there.engine.id, timeout=PATIENCE)
    assert (again.state, again.epoch, new.state) == ("owned", 2, "open")
    with pytest.raises(xl.LedgerError, match="is not a live engine"):
        engine.unload("orders", to="nobody")
    with pytest.raises(xl.TopicNotFoundError):
        engine.unload("elsewhere", to=there.engine.id)
    for call in (lambda: engine.unload("", to=there.engine.id), lambda: engine.cancel_unload("")):
        with pytest.raises(ValueError, match="topics=''"):  # not: all of them
            call()


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("elsewhere", xl.TopicNotFoundError, "has no topic 'elsewhere', and none that begins with it"),
    (["orders", "elsewhere"], xl.TopicNotFoundError, "there is no topic 'elsewhere' to move"),
    (["__events__"], ValueError, "'__events__' is internal to the library, and has no owner"),
    ([b"orders"], TypeError, "topics takes a str or an iterable of them, not b'orders'"),
]


@pytest.mark.parametrize(("topics", "error", "text"), REFUSED)
def test_e1_j5_what_cannot_be_moved_is_refused_alike_by_all_backends(
    engine: xl.Engine, there: xl.Topic, topics: Any, error: type[Exception], text: str
) -> None:
    owner = there.engine.topic("orders").producer(EXCLUSIVE, follow=False)
    with pytest.raises(error, match=re.escape(text)):
        engine.unload(topics, to=there.engine.id)
    assert owner.state == "open"
    with pytest.raises(TypeError, match="producer=7: it takes the name of a producer, or None"):
        engine.unload("orders", to=there.engine.id, producer=7)  # type: ignore[arg-type]


@pytest.mark.on_broker
def test_e1_a_prefix_moves_all_of_its_topics(engine: xl.Engine, there: xl.Topic) -> None:
    owners = [engine.topic(name).producer(EXCLUSIVE, follow=False) for name in ("a/1", "a/2", "b")]
    moves = engine.unload("a/*", to=there.engine.id, timeout=PATIENCE)
    assert [(move.topic, move.ok) for move in moves] == [("a/1", True), ("a/2", True)]
    assert [owner.state for owner in owners] == ["moved", "moved", "open"]


def open_and_send(state: State, count: int) -> str:
    """Own the topic and send; the producer's state afterwards, and whom it names."""
    state.producer = producer = state.topic.producer(EXCLUSIVE)
    for number in range(count):
        producer.send_async(b"%d" % number)
    return str(producer.state)


def told(state: State) -> tuple[str, str]:
    """What a send raises once the topic was moved."""
    assert state.producer is not None
    try:
        state.producer.send(b"late")
    except xl.ProducerMovedError as error:
        return state.producer.state, "" if error.successor is None else error.successor.name
    return state.producer.state, ""


@pytest.mark.on_broker
def test_e2_the_former_owner_learns_who_has_it_and_loses_nothing_that_it_accepted(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    assert process.call(open_and_send, 300) == "open"
    [move] = engine.unload("orders", to=engine.id, timeout=PATIENCE)
    assert move.state == "assigned"
    assert process.call(told) == ("moved", engine.name)
    assert values(topic) == [b"%d" % n for n in range(300)]
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


@pytest.mark.on_broker
def test_e4_a_killed_source_is_followed_by_the_destination(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_and_send, 1)
    until(lambda: topic.next_offset == 1)
    waiter = topic.producer_async(WAIT)
    process.kill()
    [move] = engine.unload("orders", to=engine.id, timeout=PATIENCE)
    assert move.ok
    assert waiter.result(PATIENCE).topic_epoch == 2


@pytest.mark.on_broker
def test_e4_a_producer_that_fences_meanwhile_leaves_one_owner(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    """First valid transition wins, whichever it is."""
    for _ in range(5):
        owner = topic.producer(FENCING, follow=False)
        moving = threading.Thread(
            target=lambda: engine.unload("orders", to=there.engine.id, timeout=1)
        )
        moving.start()
        rival = there.producer(FENCING)
        moving.join(PATIENCE)
        until(lambda owner=owner: owner.state != "open")
        assert topic.owner is not None
        assert topic.owner.session == rival._session.id
        rival.close()
        end = time.monotonic() + PATIENCE
        while topic.transfers and time.monotonic() < end:
            engine.cancel_unload("orders")


# ---- producers that follow within the process --------------------------------------------


@pytest.mark.on_broker
def test_e2_a_producer_follows_to_the_session_that_waits_in_its_process(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    producer = topic.producer(EXCLUSIVE, name="p")
    producer.send(b"before")
    waiting = there.producer_async(WAIT, name="q")
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    new = waiting.result(PATIENCE)
    assert (producer.send(b"after"), new.send(b"too")) == (1, 2)
    assert (producer.state, producer.name, producer.topic_epoch) == ("open", "p", new.topic_epoch)
    producer.close()
    assert new.send(b"its owner goes on") == 3
    new.close()
    assert topic.owner is None
    assert [message.epoch for message in topic.reader()] == [1, 2, 2, 2]


def test_e2_of_producers_that_share_a_session_the_owner_is_told_who_waits(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    told: list[str] = []

    def wanted(producer: xl.Producer) -> None:
        told.append(producer.name)

    follower = topic.producer(EXCLUSIVE, name="p", on_wanted=wanted)
    waiting = there.producer_async(WAIT, name="q", on_wanted=wanted)
    until(lambda: told == ["p"])
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    owner = waiting.result(PATIENCE)
    follower.send(b"there")
    third = topic.producer_async(WAIT, name="r")
    until(lambda: "q" in told)
    owner.close()
    third.result(PATIENCE).close()
    assert told == ["p", "q"]


@pytest.mark.on_broker
def test_e2_a_producer_goes_on_where_its_topic_is_reserved(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    producer = topic.producer(EXCLUSIVE, name="p")
    producer.send(b"before")
    [move] = engine.unload("orders", to=there.engine.id, timeout=PATIENCE)
    assert move.state == "assigned"
    receipts = [producer.send_async(b"%d" % number) for number in range(5)]
    assert [receipt.result(PATIENCE) for receipt in receipts] == [1, 2, 3, 4, 5]
    assert topic.owner is not None
    assert (topic.owner.engine_id, topic.owner.producer_name) == (there.engine.id, "p")
    [back] = engine.unload("orders", to=engine.id, timeout=PATIENCE)
    assert back.ok
    assert producer.send(b"again") == 6
    assert producer.last_sequence_id == 6
    producer.close()
    assert topic.owner is None


def test_e2_no_send_fails_while_a_topic_goes_to_and_fro(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    """Threads send all the while: what comes during a move waits, and is appended there."""
    producer, done, sent = topic.producer(EXCLUSIVE), threading.Event(), [[], []]

    def send_on(into: list[int]) -> None:
        while not done.is_set():
            into.append(producer.send(b"x"))

    threads = [threading.Thread(target=send_on, args=(into,)) for into in sent]
    for thread in threads:
        thread.start()
    for target in (there.engine, engine) * 3:
        here = topic.epoch
        [move] = engine.unload("orders", to=target.id, timeout=PATIENCE)
        assert move.ok
        until(lambda here=here: topic.epoch > here)  # it was followed
    done.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    producer.close()
    assert sorted(sent[0] + sent[1]) == list(range(topic.next_offset))
    assert topic.epoch == 7


def test_e2_a_producer_does_not_follow_past_another_owner(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    producer = topic.producer(EXCLUSIVE)
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    with topic.producer(FENCING) as rival:
        with pytest.raises(xl.ProducerMovedError, match="there"):
            producer.send(b"late")
        assert producer.state == "moved"
        assert rival.send(b"x") == 0


@pytest.mark.rule("A1")
@pytest.mark.on_broker
def test_e2_an_exclusive_producer_does_not_follow_to_a_shared_one(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    """One of the destination has ended the reservation: by it, the former owner would append
    between the messages of others, in an epoch that it takes for its own."""
    producer = topic.producer(EXCLUSIVE, name="p")
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    with there.producer(SHARED) as shared:
        with pytest.raises(xl.ProducerMovedError, match="there"):
            producer.send(b"late")
        assert producer.state == "moved"
        assert shared.send(b"x") == 0
    assert values(topic) == [b"x"]


@pytest.mark.on_broker
def test_e2_an_idle_producer_follows_two_moves_at_once(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    producer = topic.producer(EXCLUSIVE, name="p")
    producer.send(b"before")
    waiting = there.producer_async(WAIT, name="q", follow=False)
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    new = waiting.result(PATIENCE)
    assert engine.unload("orders", to=engine.id, timeout=PATIENCE)[0].ok
    assert producer.state == "open"
    assert producer.send(b"after") == 1
    assert (new.state, topic.epoch) == ("moved", 3)


@pytest.mark.rule("C6")
@pytest.mark.on_broker
def test_e2_a_producer_that_cannot_follow_any_more_is_told_without_sending(
    engine: xl.Engine, topic: xl.Topic, there: xl.Topic
) -> None:
    told: list[xl.ProducerFencedError] = []
    producer = topic.producer(EXCLUSIVE, on_fenced=lambda _, error: told.append(error))
    assert engine.unload("orders", to=there.engine.id, timeout=PATIENCE)[0].ok
    assert told == []
    with topic.producer(FENCING):
        until(lambda: told)
    with pytest.raises(xl.ProducerMovedError) as error:
        producer.flush()
    assert told == [error.value]


def test_e2_a_producer_ends_with_the_engine_that_it_has_followed_to(
    engine: xl.Engine, topic: xl.Topic, path: str
) -> None:
    producer = topic.producer(EXCLUSIVE)
    with xl.open(path) as there:
        assert engine.unload("orders", to=there.id, timeout=PATIENCE)[0].ok
        assert producer.send(b"there") == 0
    with pytest.raises(xl.ProducerMovedError):
        producer.send(b"late")
    assert values(topic) == [b"there"]
