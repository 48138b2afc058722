"""Producers that follow their topics to another engine of the process, on the public interface
alone (E2, E6)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import exclusivelog as xl
from exclusivelog import sessions
from testing.processes import EXCLUSIVE, PATIENCE, until

pytestmark = [pytest.mark.needs("unload"), pytest.mark.rule("E6")]


@pytest.fixture
def there(path: str) -> Iterator[xl.Engine]:
    """Another engine of this process."""
    with xl.open(path, name="there") as engine:
        yield engine


@pytest.mark.on_broker
def test_e6_producers_that_do_not_send_follow(
    engine: xl.Engine, there: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FOLLOWED_AFTER", 0.2)
    names = [f"t{number}" for number in range(20)]
    producers = [engine.topic(name).producer(EXCLUSIVE, name="p") for name in names]
    moves = engine.unload(names, to=there.id, timeout=PATIENCE)
    assert [move.ok for move in moves] == [True] * 20

    def holders() -> set[str | None]:
        owners = [there.topic(name).owner for name in names]
        return {None if owner is None else owner.engine_name for owner in owners}

    until(lambda: holders() == {"there"})
    until(lambda: {producer.topic_epoch for producer in producers} == {2})
    assert [producer.send(b"x") for producer in producers] == [0] * 20


def test_e6_one_that_was_dropped_does_not_follow(
    engine: xl.Engine, there: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FOLLOWED_AFTER", 0.5)
    topic = engine.topic("orders")
    dropped = topic.producer(EXCLUSIVE)
    stays = engine.topic("other").producer(EXCLUSIVE)
    moves = engine.unload(["orders", "other"], to=there.id, timeout=PATIENCE)
    assert [move.ok for move in moves] == [True, True]
    dropped.close()
    until(lambda: stays.topic_epoch == 2)
    time.sleep(0.1)
    assert topic.owner is None


@pytest.mark.usefixtures("idle_producers_stay")
def test_e6_until_then_a_producer_of_the_destination_comes_first(
    engine: xl.Engine, there: xl.Engine
) -> None:
    producer = engine.topic("orders").producer(EXCLUSIVE)
    assert engine.unload("orders", to=there.id, timeout=PATIENCE)[0].state == "assigned"
    other = there.topic("orders").producer(EXCLUSIVE)
    assert [other.send(b"0"), producer.send(b"1"), other.send(b"2")] == [0, 1, 2]
    assert producer.topic_epoch == other.topic_epoch == 2
