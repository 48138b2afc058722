"""Announcements, on the public interface alone: what an owner says about itself, durable and fenced
as its messages are (rules B2 to B4, C1, E1, E2, G3)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.messages import MOST_ANNOUNCED_BYTES
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, SHARED, WAIT, until

HERE, THERE = {"address": "tcp://here:1"}, {"address": "tcp://there:2"}


def said(topic: xl.Topic) -> tuple[dict[str, str], int]:
    """(info, epoch) of the topic's announcement."""
    found = topic.announcement
    assert found is not None
    return dict(found.info), found.epoch


def test_e_nothing_is_announced_at_first(topic: xl.Topic) -> None:
    assert topic.announcement is None
    topic.producer(EXCLUSIVE).close()
    assert topic.announcement is None


def test_e_it_stays_until_the_next_owner_announces(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE, announce=HERE):
        pass
    with topic.producer(EXCLUSIVE) as second:
        assert said(topic) == (HERE, 1), "the successor reads what its predecessor said"
        second.announce({})
        assert said(topic) == ({}, 2)
    assert said(topic) == ({}, 2)


def test_e_a_waiter_that_leaves_has_announced_nothing(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        with pytest.raises(xl.WaitTimeoutError):
            topic.producer(WAIT, announce=HERE, timeout=0.05)
        with pytest.raises(xl.ProducerFencedError):
            topic.producer(EXCLUSIVE, announce=HERE)
        assert topic.producer_async(WAIT, announce=HERE).cancel()
        until(lambda: not topic.waiters)  # one that ends late leaves the queue later
    assert topic.announcement is None


def test_e2_who_follows_its_topic_goes_on_announcing(path: str, topic: xl.Topic) -> None:
    """Within one process a producer goes on through a hand-over, and so does what it said."""
    owner = topic.producer(EXCLUSIVE, announce={})
    owner.announce(HERE)
    with xl.open(path, name="other") as other:
        topic.engine.unload("orders", to=other.id)
        owner.send(b"x")
        found = topic.announcement
        assert found is not None
        assert (found.info, found.epoch, found.engine_name) == (HERE, 2, "other")
        owner.announce(THERE)
        assert said(topic) == (THERE, 2)


def test_e2_what_an_earlier_owner_announced_is_not_repeated(path: str, topic: xl.Topic) -> None:
    topic.producer(EXCLUSIVE, announce=HERE).close()
    owner = topic.producer(EXCLUSIVE)
    with xl.open(path, name="other") as other:
        topic.engine.unload("orders", to=other.id)
        owner.send(b"x")
        assert (owner.topic_epoch, said(topic)) == (3, (HERE, 1))


def test_g3_a_message_tells_those_who_read_the_topic(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE, serializer="json") as owner:
        owner.send("before")
        owner.announce(HERE, message=["moved"])
        owner.announce(THERE, message=None)
        owner.send("after")
    found = list(topic.reader(deserializer="json"))
    assert [message.value for message in found] == ["before", ["moved"], None, "after"]
    assert [message.properties for message in found] == [{}, HERE, THERE, {}]
    assert owner.last_sequence_id == 3


@pytest.mark.on_broker
def test_e_other_engines_read_who_announces_what(engine: xl.Engine, topic: xl.Topic) -> None:
    with xl.open(engine.path, name="other") as other:
        owner = other.topic("orders").producer(EXCLUSIVE, name="p")
        owner.announce(HERE)
        found, holder = topic.announcement, topic.owner
        assert found is not None
        assert holder is not None
        assert (found.info, found.epoch, found.producer_name) == (HERE, 1, "p")
        assert (found.engine_id, found.engine_name, found.pid) == (other.id, "other", holder.pid)
        assert (found.session, found.time >= holder.since) == (holder.session, True)
        owner.announce(THERE, message=b"x")
        owner.announce(HERE)
        assert said(topic) == (HERE, 1)
    with xl.open(engine.path, name="later") as later:
        assert said(later.topic("orders")) == (HERE, 1)


@pytest.mark.on_broker
@pytest.mark.rule("B3", "B4")
def test_b3_a_fenced_owner_announces_nothing(engine: xl.Engine, topic: xl.Topic) -> None:
    stale = topic.producer(EXCLUSIVE, announce=HERE)
    with xl.open(engine.path) as other:
        owner = other.topic("orders").producer(FENCING, announce=THERE)
        errors = []
        for announce in (
            lambda: stale.announce(HERE),
            lambda: stale.announce(HERE, message=b"mine"),
            lambda: stale.send(b"mine"),
        ):
            with pytest.raises(xl.ProducerFencedError) as caught:
                announce()
            errors.append(caught.value)
        assert errors[0] is errors[1] is errors[2]
        assert said(topic) == said(other.topic("orders")) == (THERE, 2)
        assert (owner.send(b"x"), topic.next_offset) == (0, 1)


@pytest.mark.rule("B3")
def test_b3_a_closed_owner_announces_nothing(topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)
    owner.close()
    with pytest.raises(xl.EngineClosedError):
        owner.announce(HERE)
    assert topic.announcement is None


@pytest.mark.parametrize("mode", [EXCLUSIVE, WAIT, FENCING])
def test_e_a_grant_announces(topic: xl.Topic, mode: str) -> None:
    with topic.producer(mode, announce=HERE):
        assert said(topic) == (HERE, 1)
    with topic.producer(mode, announce={}):
        assert said(topic) == ({}, 2)


@pytest.mark.on_broker
@pytest.mark.rule("C1")
def test_c1_a_promotion_announces_for_the_promoted(engine: xl.Engine, topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE, announce=HERE)
    with xl.open(engine.path) as other:
        waiter = other.topic("orders").producer_async(WAIT, announce=THERE)
        until(lambda: topic.waiters)
        assert said(topic) == (HERE, 1), "only with the grant"
        owner.close()
        assert said(topic) == (THERE, 2)
        assert waiter.result(PATIENCE).topic_epoch == 2


@pytest.mark.rule("E1")
def test_e1_a_hand_over_announces_for_its_destination(engine: xl.Engine, topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE, announce=HERE, follow=False)
    with xl.open(engine.path, name="other") as other:
        waiter = other.topic("orders").producer_async(WAIT, announce=THERE)
        until(lambda: topic.waiters)
        engine.unload("orders", to=other.id)
        assert waiter.result(PATIENCE).topic_epoch == 2
        assert said(topic) == (THERE, 2)
        with pytest.raises(xl.ProducerMovedError):
            owner.announce(HERE)
        assert said(topic) == (THERE, 2)


@pytest.mark.rule("G2", "G3")
def test_g3_a_message_that_announces_comes_behind_those_that_wait(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE, linger=60.0) as owner:
        receipts = [owner.send_async(b"%d" % n) for n in range(3)]
        owner.announce(HERE, message=b"3")
        receipts += [owner.send_async(b"4")]
    assert [receipt.result(PATIENCE) for receipt in receipts] == [0, 1, 2, 4]
    assert [message.sequence_id for message in topic.reader()] == [0, 1, 2, 3, 4]
    assert said(topic) == (HERE, 1)


@pytest.mark.rule("B9")
def test_b9_announcements_of_many_threads_are_made_once_each(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as owner, ThreadPoolExecutor(8) as pool:
        infos = [{"n": str(number)} for number in range(40)]
        list(pool.map(lambda info: owner.announce(info, message=b"x"), infos[:20]))
        list(pool.map(owner.announce, infos[20:]))
        assert topic.next_offset == 20
        assert said(topic)[0] in infos[20:]
        owner.announce(HERE)
        assert said(topic) == (HERE, 1)


WRONG = [
    ("x", TypeError),
    (b"x", TypeError),
    ({"a": 1}, TypeError),
    ({b"a": "b"}, TypeError),
    ({"a": "\ud800"}, ValueError),
    ({"a": "b" * MOST_ANNOUNCED_BYTES}, ValueError),
]


@pytest.mark.parametrize(("info", "error"), WRONG)
def test_e_wrong_information_is_refused_by_name(
    topic: xl.Topic, info: Any, error: type[Exception]
) -> None:
    with topic.producer(EXCLUSIVE) as owner:
        with pytest.raises(error, match="info"):
            owner.announce(info)
    for ask in (topic.producer, topic.producer_async):
        with pytest.raises(error, match="announce"):
            ask(EXCLUSIVE, announce=info)
    with pytest.raises(TypeError, match="info"), topic.producer(EXCLUSIVE) as owner:
        owner.announce(None)  # type: ignore[arg-type]
    assert (topic.announcement, topic.owner, topic.epoch) == (None, None, 2)


def test_e_only_an_owner_announces(topic: xl.Topic) -> None:
    with pytest.raises(ValueError, match="announce: a shared producer"):
        topic.producer(SHARED, announce=HERE)
    assert topic.holders == []
    with topic.producer(SHARED) as shared, pytest.raises(ValueError, match="is shared"):
        shared.announce(HERE)
    assert topic.announcement is None
