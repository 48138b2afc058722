"""Priorities of waiters, on the public interface alone (rules D2 and D3)."""

from __future__ import annotations

import time
from collections.abc import Callable

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
)

FENCED = xl.ProducerFencedError
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def names(topic: xl.Topic) -> list[str]:
    return [waiter.producer_name for waiter in topic.waiters]


def queue(state: State, name: str, priority: int) -> None:
    """Queue up, in a worker."""
    state.kept[name] = state.topic.producer_async(WAIT, name=name, priority=priority)


def write_and_leave(state: State, name: str) -> int:
    """Take one's turn; the epoch."""
    with state.kept[name].result(PATIENCE) as producer:
        producer.send(name.encode())
        return int(producer.topic_epoch)


OF_MANY = pytest.param(SHARED, marks=pytest.mark.needs("shared_producers"))


@pytest.mark.parametrize("mode", [OF_MANY, EXCLUSIVE, FENCING, WAIT])
def test_d2_priority_is_read_only_and_other_modes_ignore_it(topic: xl.Topic, mode: str) -> None:
    with topic.producer(mode, priority=7) as producer:
        assert producer.priority == 7
        for attribute in ("priority", "topic_epoch", "access_mode", "name", "last_sequence_id"):
            with pytest.raises(AttributeError):
                setattr(producer, attribute, 9)
            with pytest.raises(AttributeError):
                delattr(producer, attribute)
        assert producer.priority == 7
        if mode != SHARED:
            with pytest.raises(FENCED):
                topic.producer(EXCLUSIVE, priority=HIGHEST)
        assert producer.state == "open"


@pytest.mark.sampled
@pytest.mark.needs("settle")
def test_d7_a_better_waiter_that_comes_while_the_topic_settles_gets_it(
    topic: xl.Topic, path: str
) -> None:
    with xl.open(path) as other:
        owner = topic.producer(EXCLUSIVE)
        first = topic.producer_async(WAIT, settle=1.0)
        owner.close()
        better = other.topic("orders").producer_async(WAIT, priority=5, settle=1.0)
        assert better.result(PATIENCE).topic_epoch == 2
        assert not first.done()
        better.result().close()
        assert first.result(PATIENCE).topic_epoch == 3


@pytest.mark.sampled
@pytest.mark.needs("settle")
def test_d7_a_new_waiter_leaves_a_free_topic_to_better_ones_for_a_while(topic: xl.Topic) -> None:
    for _ in range(2):
        before = time.monotonic()
        with topic.producer(WAIT, settle=0.5, timeout=PATIENCE):
            assert time.monotonic() - before >= 0.4  # the clocks differ in resolution


def test_d2_default_priority_is_0(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as owner:
        topic.producer_async(WAIT, name="default")
        topic.producer_async(WAIT, name="above", priority=1)
        topic.producer_async(WAIT, name="below", priority=-1)
        assert owner.priority == 0
        assert names(topic) == ["above", "default", "below"]


@pytest.mark.on_broker
def test_d3_a_better_waiter_never_retires_the_owner(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    for mode in (EXCLUSIVE, WAIT, FENCING):
        owner = topic.producer(mode, priority=LOWEST)
        process.call(queue, mode, HIGHEST)
        time.sleep(0.1)
        assert owner.state == "open"
        owner.send(b"still here")
        assert topic.owner is not None
        assert topic.owner.session == owner.session.id
        owner.close()
        process.call(write_and_leave, mode)
