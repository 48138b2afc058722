"""A topic that is terminated: read, and never written again, on the public interface (rule G8)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    MODES,
    PATIENCE,
    SHARED,
    WAIT,
    until,
    values,
    within,
)

pytestmark = [pytest.mark.needs("termination"), pytest.mark.rule("G8")]


@pytest.fixture
def there(path: str) -> Iterator[xl.Topic]:
    """The topic, on another engine."""
    with xl.open(path, name="there") as engine:
        yield engine.topic("orders")


def terminated(call: Callable[[], Any], end: int) -> None:
    with pytest.raises(xl.TopicTerminatedError, match=f"'orders' was terminated.* offset {end}"):
        call()


@pytest.mark.on_broker
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE])
def test_g8_nothing_is_written_behind_a_termination(
    topic: xl.Topic, there: xl.Topic, mode: str
) -> None:
    mine = topic.producer(mode, name="mine", linger=60.0)
    mine.send(b"x")
    waiting = mine.send_async(b"in time, or too late")
    end = there.terminate()
    terminated(lambda: mine.send(b"y"), end)
    if end == 1:
        terminated(lambda: waiting.result(PATIENCE), end)
    else:
        assert (waiting.result(PATIENCE), end) == (1, 2)
    terminated(lambda: mine.send_many([b"y"]), end)
    terminated(lambda: mine.send_async(b"y").result(PATIENCE), end)
    assert mine.state == "closed"
    for one in (topic, there):
        for other_mode in MODES:
            terminated(lambda one=one, mode=other_mode: one.producer(mode, timeout=PATIENCE), end)
    mine.close()
    assert topic.terminate() == there.terminate() == end
    assert values(topic) == values(there) == [b"x", b"in time, or too late"][:end]


@pytest.mark.on_broker
def test_g8_what_was_acknowledged_before_a_termination_is_in_the_log(
    topic: xl.Topic, there: xl.Topic
) -> None:
    acknowledged: list[int] = []

    def send_all() -> None:
        with topic.producer(EXCLUSIVE) as producer, contextlib.suppress(xl.TopicTerminatedError):
            while True:
                acknowledged.append(producer.send(b"x"))

    sending = threading.Thread(target=send_all)
    sending.start()
    until(lambda: len(acknowledged) > 30)
    end = there.terminate()
    sending.join(PATIENCE)
    assert not sending.is_alive()
    assert acknowledged == list(range(end)) == list(range(topic.next_offset))


@pytest.mark.on_broker
def test_g8_readers_end_where_a_topic_does(topic: xl.Topic, there: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        producer.send_many([b"a", b"b"])
    waiting = there.reader("latest")
    outcome: list[BaseException] = []

    def read_on() -> None:
        try:
            waiting.read_next()
        except xl.ExclusiveLogError as error:
            outcome.append(error)

    reading = threading.Thread(target=read_on)
    reading.start()
    topic.terminate()
    reading.join(PATIENCE)
    assert [type(error) for error in outcome] == [xl.TopicTerminatedError]
    reader = topic.reader()
    assert [message.value for message in within(lambda: list(reader.follow()))] == [b"a", b"b"]
    with pytest.raises(xl.TopicTerminatedError, match=r"'orders' is terminated.* 2"):
        reader.read_next(timeout=0)
    assert not reader.has_message_available()


@pytest.mark.on_broker
def test_g8_those_who_wait_are_told_of_a_termination(topic: xl.Topic, there: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)
    waiters = [one.producer_async(WAIT) for one in (topic, there)]
    there.terminate()
    for waiter in waiters:
        terminated(lambda waiter=waiter: waiter.result(PATIENCE), 0)
    owner.close()
    terminated(lambda: topic.producer(FENCING), 0)


@pytest.mark.on_broker
@pytest.mark.rule("E5")
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE])
def test_g8_a_termination_ends_the_sessions_of_a_topic(
    topic: xl.Topic, there: xl.Topic, engine: xl.Engine, mode: str
) -> None:
    """Not each of them when it is closed: a sender that is gone for an hour holds nothing."""
    mine = topic.producer(mode, name="mine")
    mine.send(b"x")
    there.terminate()
    for one in (topic, there):
        until(lambda one=one: one.holders == [])
        assert (one.owner, one.epoch) == (None, int(mode == EXCLUSIVE))
    until(lambda: mine.state == "closed")
    terminated(mine.flush, 1)
    mine.close()
    if mode == EXCLUSIVE:
        last = list(engine.history("orders"))[-1]
        assert (last.kind, last.reason, last.epoch) == ("release", "terminated", 1)
        assert last.source is not None
        assert last.source["producer"] == "mine"


@pytest.mark.on_broker
def test_g8_a_terminated_topic_stays_so(path: str) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"x")
        engine.topic("orders").terminate()
    with xl.open(path) as again:
        topic = again.topic("orders")
        terminated(topic.producer, 1)
        assert (topic.next_offset, values(topic)) == (1, [b"x"])
