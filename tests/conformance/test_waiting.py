"""Priorities of waiters, on the public interface alone (rules D2 and D3)."""

from __future__ import annotations

import concurrent.futures
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
    until,
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
        for _ in range(50):
            owner = topic.producer(EXCLUSIVE)
            first = topic.producer_async(WAIT, settle=1.0)
            began = time.monotonic()
            owner.close()
            better = other.topic("orders").producer_async(WAIT, priority=5, settle=1.0)
            if time.monotonic() - began < 1.0:
                break
            # On a busy machine, it came too late.
            for each in concurrent.futures.as_completed([first, better], PATIENCE):
                each.result().close()
        assert better.result(PATIENCE).topic_epoch == owner.topic_epoch + 1
        assert not first.done()
        better.result().close()
        assert first.result(PATIENCE).topic_epoch == owner.topic_epoch + 2


@pytest.mark.sampled
@pytest.mark.needs("settle")
def test_d7_a_new_waiter_leaves_a_free_topic_to_better_ones_for_a_while(path: str) -> None:
    """A topic that nobody has had since the ledger was opened, and one that has become free."""

    def wait(free: xl.Topic, since: float) -> None:
        with free.producer(WAIT, settle=0.5, timeout=PATIENCE):
            assert time.monotonic() - since >= 0.4  # the clocks differ in resolution

    before = time.monotonic()
    with xl.open(path) as engine:
        topic = engine.topic("t")
        wait(topic, before)
        owner = topic.producer(EXCLUSIVE)
        before = time.monotonic()
        owner.close()
        wait(topic, before)


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
        assert topic.owner.session == owner._session.id
        owner.close()
        process.call(write_and_leave, mode)


# ---- D9: many topics at once -------------------------------------------------------------


@pytest.mark.rule("D9")
def test_d9_many_topics_are_waited_for_at_once(engine: xl.Engine, path: str) -> None:
    """Each topic is granted by itself: free ones at once, owned ones when their owner leaves; a
    refusal is that of a single request, and concerns its topic alone (rule J5)."""
    with xl.open(path, name="leader") as leader:
        owners = [leader.topic(name).producer(EXCLUSIVE, name="p") for name in "ab"]
        owners[0].send(b"led")
        leader.topic("ended").terminate()
        options = {"name": "p", "priority": 7, "properties": {"rack": "1"}}
        standby = engine.producers(["a", "free", "ended", "b"], WAIT, wait=False, **options)
        with pytest.raises(xl.TopicTerminatedError) as alone:
            engine.topic("ended").producer(WAIT)
        with pytest.raises(xl.TopicTerminatedError) as among:
            standby[2].result(PATIENCE)
        assert str(among.value) == str(alone.value)
        assert standby[1].result(PATIENCE).send(b"x") == 0
        for name in "ab":
            [waiter] = engine.topic(name).waiters
            assert (waiter.producer_name, waiter.priority) == ("p", 7)
            assert waiter.engine_id == engine.id
        assert [future.done() for future in standby] == [False, True, True, False]
        owners[0].close()
        successor = standby[0].result(PATIENCE)
        assert (successor.topic_epoch, successor.last_sequence_id) == (2, 0)
        assert successor.send(b"y") == 1
        assert standby[3].cancel()
        assert not engine.topic("b").waiters
        assert owners[1].send(b"z") == 0


@pytest.mark.rule("D9")
def test_d9_a_wait_for_many_returns_when_all_are_granted_or_fails_as_one(
    engine: xl.Engine, path: str
) -> None:
    names = ["a", "b", "c"]
    with xl.open(path, name="leader") as leader:
        owner = leader.topic("b").producer(EXCLUSIVE)
        with pytest.raises(xl.WaitTimeoutError, match="'b'") as error:
            engine.producers(names, WAIT, timeout=0.2)
        assert error.value.holder.engine_id == leader.id
        until(lambda: not any(engine.topic(n).owner for n in ("a", "c")))
        assert not any(engine.topic(name).waiters for name in names)
        epochs = [engine.topic(name).epoch for name in names]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            waiting = threads.submit(engine.producers, names, WAIT, timeout=PATIENCE)
            until(lambda: engine.topic("b").waiters)
            owner.close()
            granted = waiting.result(PATIENCE)
    assert [producer.topic for producer in granted] == names
    assert [producer.topic_epoch for producer in granted] == [epoch + 1 for epoch in epochs]
    assert [producer.send(b"x") for producer in granted] == [0, 0, 0]
