"""Shared state, on the public interface alone (rule I1)."""

from __future__ import annotations

import datetime as dt
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, State, Worker, until
from testing.states import (
    Later,
    open_counts,
)

pytestmark = pytest.mark.needs("shared_state")


@pytest.mark.on_broker
@pytest.mark.parametrize("future", [False, True], ids=["plain", "future"])
def test_i1_operations_come_from_the_state_and_lead_to_the_next(
    topic: xl.Topic, future: bool
) -> None:
    with open_counts(topic) as state:
        counts: Any = Later(state) if future else state
        assert counts.read(dict) == {}
        assert counts.write(lambda now: [["a", 5], ["b", 1]]) is None
        assert counts.write(lambda now: [["a", -now["a"]]], lambda now: now["a"]) == 0
        assert counts.read(lambda now: now["b"], True) == 1
        assert counts.read(dict, latest=True) == {"a": 0, "b": 1}
    found = [message.value for message in topic.reader(deserializer="msgpack")]
    assert found == [["a", 5], ["b", 1], ["a", -5]]


def test_i1_no_process_sees_half_of_a_write(topic: xl.Topic, other: xl.Topic) -> None:
    """One moves amounts between two names all the time, another one adds them up."""
    ended = threading.Event()
    with open_counts(topic) as counts, open_counts(other) as observer:
        counts.write(lambda state: [["a", 1000]])

        def move() -> None:
            while not ended.is_set():
                counts.write(lambda state: [["a", -1], ["b", 1]])

        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(move)
            for latest in (True, False) * 100:
                assert observer.read(lambda state: sum(state.values()), latest) == 1000
            ended.set()
            moving.result(PATIENCE)


@pytest.mark.rule("I8")
def test_i8_a_write_waits_for_a_producer_of_the_application(
    topic: xl.Topic, other: xl.Topic
) -> None:
    """It has not agreed to release the topic."""
    with topic.producer("exclusive") as producer, open_counts(other, timeout=1.5) as counts:
        with pytest.raises(xl.WaitTimeoutError):
            counts.write(lambda state: [["a", 1]])
        assert producer.state == "open"
        assert (topic.epoch, topic.next_offset) == (1, 0)


@pytest.mark.needs("snapshots")
def count_up(state: State) -> int:
    """Count in a map, which stays open."""
    shared = state.kept.setdefault("map", None) or xl.SharedMap(state.topic)
    state.kept["map"] = shared
    return int(shared.update("n", one_more).value)


def one_more(count: int | None) -> int:
    return (count or 0) + 1


@pytest.mark.on_broker
@pytest.mark.rule("I8")
def test_i8_a_write_waits_for_no_owner_that_is_stopped(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="stopped")
    assert process.call(count_up) == 1
    process.signal(signal.SIGSTOP)
    process.await_stop()
    with xl.SharedMap(topic) as shared:
        assert shared.update("n", one_more).value == 2
        lost = [event for event in engine.history("orders") if event.kind == "evict"]
        process.signal(signal.SIGCONT)
        assert process.call(count_up) == 3
        assert shared.get("n", latest=True) == 3
    assert [event.reason for event in lost] == ["late"]


@pytest.mark.rule("I8")
def test_i8_only_an_owner_that_has_agreed_is_evicted(engine: xl.Engine, topic: xl.Topic) -> None:
    """A producer of the application keeps its topic: a write waits for it."""
    store = engine.backend.topic_store(topic.id)
    with topic.producer("exclusive") as producer:
        assert topic.owner is not None
        assert store.yielding_owner() == 0
        assert not store.evict_late(topic.owner.session, 0)
        assert not store.evict_late(topic.owner.session + 1, 0)
        assert producer.send(b"mine") == 0
    with xl.SharedMap(engine.topic("map")) as shared:
        shared.put("n", 1)
        owner = engine.topic("map").owner
        assert owner is not None
        store = engine.backend.topic_store(engine.topic("map").id)
        until(lambda: store.yielding_owner() == owner.session)
        assert not store.evict_late(owner.session + 1, 0)
        assert store.evict_late(owner.session, 0)
        assert shared.update("n", one_more).value == 2
    changes = [(event.kind, event.reason) for event in engine.history("map")]
    assert changes[1] == ("evict", "late")


def test_i1_states_of_any_kind(topic: xl.Topic, engine: xl.Engine) -> None:
    """Changed in place, or replaced; with serialisers of one's own; immutable, with no copies."""
    stack = xl.SharedState(topic, initial=list, apply=lambda state, op: state.append(op))
    with stack:
        assert stack.write(lambda state: [len(state)] * 2, list) == [0, 0]
    days = engine.topic("days")
    first = dt.date(2026, 1, 1)
    options: dict[str, Any] = {
        "initial": lambda: first,
        "apply": lambda day, op: day + (op - first),
        "copy": None,
        "encode": lambda day: day.isoformat().encode(),
        "decode": lambda data: dt.date.fromisoformat(data.decode()),
    }
    with xl.SharedState(days, **options) as calendar:
        calendar.write(lambda day: [dt.date(2026, 1, 11)])
        calendar.snapshot()
        calendar.write(lambda day: [dt.date(2026, 1, 3)])
        assert calendar.read(lambda day: day) == dt.date(2026, 1, 13)
    with xl.SharedState(days, **options) as calendar:
        assert calendar.read(lambda day: day) == dt.date(2026, 1, 13)


# ---- keys that expire, and maps of some keys ---------------------------------------------


@pytest.mark.rule("I2")
def test_i2_a_key_expires_in_every_process(topic: xl.Topic, other: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared, xl.SharedMap(other) as second, second.watch("a") as watch:
        shared.put("a", 1, ttl=0.1)
        shared.put("b", 1, ttl=dt.timedelta(hours=1))
        limit = shared.expires_at("b")
        assert limit is not None
        assert second.expires_at("b", latest=True) == limit
        found = [watch.read_next(timeout=PATIENCE).value for _ in range(2)]
        assert found == [1, None]
        until(lambda: shared.list_keys(latest=True) == ["b"])
        assert second.put_if_absent("a", 2, ttl=60).made
        assert second.put("b", 3) == 1
        assert shared.expires_at("b", latest=True) is None


@pytest.mark.rule("I2")
@pytest.mark.long
def test_i2_a_key_expires_although_its_writer_has_gone(topic: xl.Topic, other: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared:
        shared.put("a", 1, ttl=0.1)
    with xl.SharedMap(other) as second:
        until(lambda: not second.list_keys(latest=True))
    assert topic.owner is None


@pytest.mark.rule("I4")
@pytest.mark.needs("snapshots")
def test_i4_a_snapshot_has_when_keys_expire(topic: xl.Topic, other: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared:
        shared.update({"p/a": 1, "q/a": 2})
        shared.put("p/b", 3, ttl=3600)
        limit = shared.expires_at("p/b")
        assert limit is not None
        shared.snapshot()
    with xl.SharedMap(other) as second, xl.SharedMap(other, prefix="p/") as part:
        assert second.expires_at("p/b") == part.expires_at("p/b") == limit
        assert (second.expires_at("p/a"), dict(part)) == (None, {"p/a": 1, "p/b": 3})


@pytest.mark.rule("I6")
def test_i6_a_watch_begins_with_the_map_as_it_stands(topic: xl.Topic, other: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared, xl.SharedMap(other, prefix="p/") as part:
        shared.update({"p/a": 1, "q/a": 2})
        with part.watch(existing=True) as watch:
            shared.put("p/a", 3)
            changes = [watch.read_next(timeout=PATIENCE) for _ in range(2)]
        assert [(c.offset, c.previous, c.value) for c in changes] == [(1, None, 1), (2, 1, 3)]
        with pytest.raises(ValueError, match="does not begin with"):
            part.put("q/a", 1)
