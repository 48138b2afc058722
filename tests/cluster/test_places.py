"""Whether an engine on a cluster lives: its broker is asked, and may take long (rules C2, K3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from exclusivelog.cluster import places
from exclusivelog.cluster.places import PulsarPlace
from exclusivelog.errors import ClusterError
from testing.processes import PATIENCE, until, within

pytestmark = [pytest.mark.once, pytest.mark.rule("C2", "K3")]


class Broker:
    """Answers at once, but for engines that are stopped: for them when `pinged` is set."""

    def __init__(self) -> None:
        self.living, self.stopped = {"a", "b"}, set[str]()
        self.pinged = threading.Event()
        self.asked: list[str] = []

    def is_taken(self, engine: str) -> bool:
        self.asked.append(engine)
        if engine in self.stopped:
            assert self.pinged.wait(PATIENCE)
        return engine in self.living


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def place(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[PulsarPlace]:
    """A place whose broker is the one above; nothing else of it works."""
    monkeypatch.setattr(places, "SOON_SECONDS", PATIENCE)
    made = object.__new__(PulsarPlace)
    made.url, made._known, made._asked = "pulsar://nowhere/a/b", {}, {}
    made._lock = threading.Lock()
    monkeypatch.setattr(made, "_is_taken", broker.is_taken, raising=False)
    yield made
    broker.pinged.set()


def forget(place: PulsarPlace) -> None:
    """Let all answers be as old as they must be to be asked for again."""
    place._known = {engine: (0.0, found) for engine, (_, found) in place._known.items()}


def test_the_death_of_an_engine_is_seen_at_the_next_look(
    place: PulsarPlace, broker: Broker
) -> None:
    assert place.lives("a")
    broker.living.clear()
    forget(place)
    assert not place.lives("a")


def test_nobody_waits_for_an_engine_that_is_stopped(
    place: PulsarPlace, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as living until the broker has pinged it. Meanwhile it is asked for once, and
    others are looked for as ever."""
    assert place.lives("a")
    broker.stopped = {"a"}
    forget(place)
    monkeypatch.setattr(places, "SOON_SECONDS", 0.01)
    for _ in range(3):
        assert within(lambda: place.lives("a", patient=False))
    monkeypatch.setattr(places, "SOON_SECONDS", PATIENCE)
    assert place.lives("b")
    until(lambda: sorted(broker.asked) == ["a", "a", "b"])  # each in a thread of its own
    broker.living.clear()
    broker.pinged.set()
    until(lambda: not place.lives("a", patient=False))


def test_who_asks_once_waits_for_the_answer(
    place: PulsarPlace, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SOON_SECONDS", 0.0)
    broker.stopped = {"a"}
    assert place.lives("a", patient=False)  # as far as is known
    with ThreadPoolExecutor() as pool:
        looks = [pool.submit(place.lives, "a") for _ in range(2)]
        until(lambda: broker.asked)
        assert not any(look.done() for look in looks)
        broker.pinged.set()
        assert [look.result(PATIENCE) for look in looks] == [True, True]


def test_an_answer_that_nobody_has_taken_is_not_believed_later(
    place: PulsarPlace, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.lives("a")
    broker.stopped = {"a"}
    forget(place)
    monkeypatch.setattr(places, "SOON_SECONDS", 0.0)
    assert place.lives("a", patient=False)
    broker.pinged.set()
    until(lambda: place._asked["a"].is_old)
    broker.living.clear()
    monkeypatch.setattr(places, "SOON_SECONDS", PATIENCE)
    assert not place.lives("a")


def test_an_error_is_raised_once_and_asked_again(
    place: PulsarPlace, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: str) -> bool:
        raise ClusterError("no broker")

    answer: Callable[[str], bool] = broker.is_taken
    monkeypatch.setattr(place, "_is_taken", fail)
    with pytest.raises(ClusterError, match="no broker"):
        place.lives("a")
    monkeypatch.setattr(place, "_is_taken", answer)
    assert place.lives("a")
