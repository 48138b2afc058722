"""A topic is given back, on the public interface alone (rule C1)."""

from __future__ import annotations

import os
import weakref
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    PATIENCE,
    SHARED,
    WAIT,
    collect,
    until,
    values,
)


@pytest.mark.on_broker
@pytest.mark.parametrize("linger", [0.0, 60.0])
def test_c1_closing_a_producer_sends_what_waits_and_then_gives_the_topic_back(
    engine: xl.Engine, topic: xl.Topic, linger: float
) -> None:
    with xl.open(engine.path) as other:
        waiter = other.topic("orders").producer_async(WAIT)
        owner = waiter.result(timeout=PATIENCE)
        successor = topic.producer_async(WAIT)
        fast = other.topic("elsewhere").producer(EXCLUSIVE, linger=linger)
        fast.send_async(b"not this one's")
        receipts = [owner.send_async(b"%d" % i) for i in range(500)]
        owner.close()
        assert [receipt.result(timeout=0) for receipt in receipts] == list(range(500))
        assert successor.result(timeout=PATIENCE).send(b"next") == 500
    assert [message.epoch for message in topic.reader()] == [1] * 500 + [2]


@pytest.mark.on_broker
def test_c1_the_first_waiter_has_the_topic_when_the_owner_is_closed(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with xl.open(engine.path) as other:
        there, owner = other.topic("orders"), topic.producer(EXCLUSIVE)
        waiters = {
            name: place.producer_async(WAIT, name=name)
            for name, place in (("a", there), ("b", topic), ("c", there))
        }
        until(lambda: [len(each.waiters) for each in (topic, there)] == [3, 3])
        for name, waiter in waiters.items():
            owner.close()
            owners = [each.owner for each in (topic, there)]
            assert [each and each.producer_name for each in owners] == [name, name]
            owner = waiter.result(PATIENCE)
        owner.close()
        assert (topic.owner, there.owner) == (None, None)


def test_c1_closing_an_engine_gives_back_all_of_its_topics(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    names = [f"t{i}" for i in range(5)]
    other = xl.open(engine.path)
    mine = [other.topic(name).producer(EXCLUSIVE, linger=60) for name in names]
    receipts = [producer.send_async(b"last words") for producer in mine]
    owner = topic.producer(EXCLUSIVE)
    queued = other.topic("orders").producer_async(WAIT)
    waiters = [engine.topic(name).producer_async(WAIT) for name in names]
    other.close()
    assert [receipt.result(timeout=0) for receipt in receipts] == [0] * 5
    assert [waiter.result(timeout=PATIENCE).topic_epoch for waiter in waiters] == [2] * 5
    with pytest.raises(xl.EngineClosedError):
        queued.result(timeout=PATIENCE)
    assert (owner.state, topic.waiters) == ("open", [])


def test_c1_an_exception_in_the_block_gives_the_topic_back(topic: xl.Topic) -> None:
    def stumble(producer: xl.Producer) -> None:
        with producer:
            producer.send_async(b"before")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble(topic.producer(EXCLUSIVE))
    assert topic.owner is None
    assert values(topic) == [b"before"]


@pytest.mark.rule("A6")
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_a6_a_dropped_producer_blocks_neither_its_name_nor_its_topic(
    engine: xl.Engine, topic: xl.Topic, mode: str
) -> None:
    with xl.open(engine.path) as other:
        for number in range(20):
            place = (topic, other.topic("orders"))[number % 2]
            producer = place.producer(mode, name="p")
            producer.send_async(b"%d" % number)
            del producer
        topic.producer(EXCLUSIVE, name="p").close()
    assert values(topic) == [b"%d" % number for number in range(20)]


@pytest.mark.on_broker
# What other tests have left is collected, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_c1_a_closed_engine_is_freed_with_its_connections(path: str) -> None:
    """Also one whose producers and readers were dropped, not closed."""

    def use(path: str) -> list[weakref.ref[Any]]:
        engine = xl.open(path)
        topic = engine.topic("orders")
        producer, reader = topic.producer("exclusive"), topic.reader()
        producer.send(b"x")
        assert reader.read_next(PATIENCE).value == b"x"
        with xl.SharedMap(engine.topic("map")) as shared:
            shared.put("a", 1)
        dropped = engine.topic("dropped").producer("exclusive")
        dropped.send_async(b"x").result(PATIENCE)
        del dropped
        engine.close()
        return [weakref.ref(engine), weakref.ref(engine.backend)]

    use(path)  # what a process makes once
    collect()
    before = len(os.listdir("/proc/self/fd"))
    engines = use(path)

    def freed() -> bool:
        collect()
        return [engine() for engine in engines] == [None, None]

    until(freed)
    until(lambda: collect() or len(os.listdir("/proc/self/fd")) <= before)
