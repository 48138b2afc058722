"""Watching an owner on a cluster: its death, which is no record, and what that costs. What is the
same on all backends is tested in `tests/conformance/test_watching.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.cluster import watching
from exclusivelog.cluster.memory import MemoryLog, MemoryPlace
from testing.processes import EXCLUSIVE, PATIENCE, until

pytestmark = pytest.mark.once
Told = list[tuple[str, str, int]]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"memory://{tmp_path}"


@pytest.fixture
def gone(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, name="gone") as engine:
        yield engine


def disappear(engine: xl.Engine) -> None:
    """As if its process had been killed, or cut off: nothing is released."""
    engine.backend.place.close()  # type: ignore[attr-defined]


def come_back(engine: xl.Engine) -> None:
    engine.backend.place.join(engine.backend.info)  # type: ignore[attr-defined]


def told(events: object) -> Told:
    return [(e.kind, e.reason, e.epoch) for e in events]  # type: ignore[attr-defined]


def take(watch: xl.OwnerWatch, count: int) -> Told:
    return told(watch.read_next(PATIENCE) for _ in range(count))


@pytest.mark.rule("C2", "E5")
def test_the_death_of_an_owner_is_told_once_although_nobody_asks_for_the_topic(
    topic: xl.Topic, gone: xl.Engine
) -> None:
    producer = gone.topic("orders").producer(EXCLUSIVE)
    with topic.watch_owner() as watch:
        disappear(gone)
        assert take(watch, 1) == [("evict", "dead", 1)]
        position = watch.position
        assert topic.owner is None
        with topic.watch_owner() as later, topic.watch_owner("earliest") as all_of_it:
            assert told(all_of_it.follow(0)) == [("grant", "request", 1), ("evict", "dead", 1)]
            topic.producer(EXCLUSIVE).close()
            after = [("grant", "request", 2), ("release", "closed", 2)]
            assert take(watch, 2) == take(later, 2) == take(all_of_it, 2) == after
        with topic.watch_owner(position) as continued:
            assert told(continued.follow(0)) == [("evict", "dead", 1), *after]
    with pytest.raises(xl.ProducerFencedError):
        producer.send(b"late")


@pytest.mark.rule("C3")
def test_a_watch_evicts_nobody_and_tells_that_an_owner_is_back(
    topic: xl.Topic, gone: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "GONE_POLL_SECONDS", 0.01)
    producer = gone.topic("orders").producer(EXCLUSIVE)
    with topic.watch_owner() as watch:
        disappear(gone)
        assert take(watch, 1) == [("evict", "dead", 1)]
        assert producer.send(b"it was only cut off") == 0
        come_back(gone)
        assert take(watch, 1) == [("grant", "reconnect", 1)]
        producer.close()
        assert take(watch, 1) == [("release", "closed", 1)]
        assert told(watch.follow(0)) == []


def test_one_that_was_taken_for_dead_and_releases_is_told_as_back(
    topic: xl.Topic, gone: xl.Engine
) -> None:
    producer = gone.topic("orders").producer(EXCLUSIVE)
    with topic.watch_owner() as watch:
        disappear(gone)
        assert take(watch, 1) == [("evict", "dead", 1)]
        producer.close()
        assert take(watch, 2) == [("grant", "reconnect", 1), ("release", "closed", 1)]


def test_an_eviction_that_was_told_as_a_death_is_not_told_again(
    topic: xl.Topic, gone: xl.Engine
) -> None:
    producer = gone.topic("orders").producer(EXCLUSIVE)
    with topic.watch_owner() as watch:
        disappear(gone)
        assert take(watch, 1) == [("evict", "dead", 1)]
        topic.producer("shared").close()  # evicts it by a release
        topic.producer(EXCLUSIVE).close()
        assert take(watch, 2) == [("grant", "request", 2), ("release", "closed", 2)]
    assert told(topic.engine.history("orders"))[1] == ("evict", "dead", 1)
    with pytest.raises(xl.ProducerFencedError):
        producer.send(b"late")


def test_a_readonly_engine_is_told_of_deaths_too(path: str, gone: xl.Engine) -> None:
    producer = gone.topic("orders").producer(EXCLUSIVE)
    with xl.open(path, readonly=True) as engine, engine.topic("orders").watch_owner() as watch:
        disappear(gone)
        assert take(watch, 1) == [("evict", "dead", 1)]
    del producer


def test_nothing_is_asked_while_this_engine_or_nobody_owns_the_topic(
    topic: xl.Topic, gone: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    lives = MemoryPlace.lives

    def counted(place: MemoryPlace, engine: str, patient: bool = True) -> bool:
        asked.append(engine)
        return lives(place, engine, patient)

    monkeypatch.setattr(MemoryPlace, "lives", counted)
    with topic.watch_owner() as watch, topic.producer(EXCLUSIVE):
        assert take(watch, 1) == [("grant", "request", 1)]
        assert topic.engine.backend.watching.seconds == watching.IDLE_SECONDS  # type: ignore[attr-defined]
        assert asked == []
    with topic.watch_owner() as watch:
        producer = gone.topic("orders").producer(EXCLUSIVE)
        assert take(watch, 1) == [("grant", "request", 2)]
        until(lambda: asked.count(gone.id) > 1)
    assert topic.engine.backend.watching.seconds == watching.IDLE_SECONDS  # type: ignore[attr-defined]
    producer.close()


def test_waiting_asks_the_log_for_nothing(topic: xl.Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = topic.producer(EXCLUSIVE)
    with topic.watch_owner() as watch:
        for name in ("end", "tail", "first", "last"):
            monkeypatch.setattr(MemoryLog, name, lambda *args: pytest.fail("it was asked"))
        producer.close()
        assert take(watch, 1) == [("release", "closed", 1)]


def test_a_watch_that_falls_too_far_behind_says_so(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST_KEPT", 3)
    with topic.watch_owner() as slow, topic.watch_owner() as fast:
        for epoch in (1, 2):
            topic.producer(EXCLUSIVE).close()
            assert take(fast, 2) == [("grant", "request", epoch), ("release", "closed", epoch)]
        with pytest.raises(xl.OffsetTrimmedError, match="has fallen behind by more than 3 changes"):
            slow.read_next(0)
