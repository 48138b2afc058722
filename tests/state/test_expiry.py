"""Rule I2: keys that expire. The map is a function of the log: a key is there until a message
removes it, which the owner of the topic appends once the log's time has come.

Between the key's time and that message, reads find the value, in every process. Writes do not: the
owner removes first what has expired.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import math
import random
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.maintenance.views import read_view
from exclusivelog.messages import MAX_TIME, Timed, item_of
from exclusivelog.producer import ProducerSender
from exclusivelog.state import expiry
from exclusivelog.state.entries import FEW, NEVER, Entries
from testing.clocks import DAY, WallClock
from testing.processes import PATIENCE, State, Worker, stop_outside, until
from testing.states import call_map, everything, open_map, opened_afresh

pytestmark = pytest.mark.rule("I2")

Map = xl.SharedMap[Any, Any]
SOON = 0.001  # seconds
LATER = dt.timedelta(hours=1)


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


@pytest.fixture
def no_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is removed in the background."""
    monkeypatch.setattr(expiry.Expiring, "_set_alarm", lambda *args: None)


def removals(topic: xl.Topic) -> list[int]:
    """The offsets of the messages that remove a key."""
    return [message.offset for message in topic if message.raw_value is None]


def put_soon(shared: Map, key: str, value: Any = "old") -> None:
    """Put a key, and wait until its time has come."""
    shared.put(key, value, ttl=SOON)
    until_due(shared, key)


def until_due(shared: Map, key: str) -> None:
    at = shared.expires_at(key)
    assert at is not None
    until(lambda: dt.datetime.now(dt.UTC) > at)


# ---- what a write with a time to live does -----------------------------------------------

WRITES: dict[str, Callable[[Map, Any], object]] = {
    "put": lambda m, ttl: m.put("a", 1, ttl=ttl),
    "put_if_absent": lambda m, ttl: m.put_if_absent("a", 1, ttl=ttl),
    "replace": lambda m, ttl: m.replace("a", None, 1, ttl=ttl),
    "update": lambda m, ttl: m.update("a", lambda old: 1, ttl=ttl),
    "put_all": lambda m, ttl: m.put_all({"a": 1, "b": 2}, ttl=ttl),
    "setdefault": lambda m, ttl: m.setdefault("a", 1, ttl=ttl),
    "put_async": lambda m, ttl: m.put_async("a", 1, ttl=ttl).result(PATIENCE),
}


@pytest.mark.parametrize("call", WRITES)
def test_i2_a_key_is_removed_once_its_time_has_come(
    shared: Map, topic: xl.Topic, other: xl.Topic, call: str
) -> None:
    """Nobody does anything for that. Every process sees the removal, as that of `delete`."""
    with xl.SharedMap(other) as second, second.watch("a") as watch:
        WRITES[call](shared, 0.05)
        changes = [watch.read_next(timeout=PATIENCE) for _ in range(2)]
        assert [(c.previous, c.value) for c in changes] == [(None, 1), (1, None)]
        put, removed = (topic[change.offset] for change in changes)
        assert removed.publish_time >= int(put.properties["until"])
        until(lambda: not everything(second))
        assert (everything(shared), second.expires_at("a")) == ({}, None)
    assert opened_afresh(topic) == {}


@pytest.mark.parametrize("ttl", [0, -1, math.nan, math.inf, True, "5", b"5", dt.timedelta(0), 1e10])
@pytest.mark.parametrize("call", WRITES)
def test_i2_no_other_time_to_live_is_taken(
    shared: Map, topic: xl.Topic, call: str, ttl: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match="ttl="):
        WRITES[call](shared, ttl)
    assert topic.next_offset == 0


def test_i2_who_writes_a_key_again_decides_when_it_expires(shared: Map) -> None:
    """A plain write makes it stay; a function of its value leaves its time as it is."""
    shared.put_all({"put": 1, "set": 1, "update": 1, "multiple": 1, "renewed": 1}, ttl=LATER)
    before = shared.expires_at("update")
    assert before is not None
    shared.put("put", 2)
    shared["set"] = 2
    assert (shared.expires_at("put"), shared.expires_at("set")) == (None, None)
    shared.update("update", lambda old: old + 1)
    shared.update_multiple("multiple".__eq__, lambda key, old: old + 1)
    assert shared.expires_at("update") == shared.expires_at("multiple") == before
    assert shared.update_multiple("renewed".__eq__, lambda k, old: old, ttl=2 * LATER) == {
        "renewed": 1
    }
    after = shared.expires_at("renewed")
    assert after is not None
    assert after > before
    shared.update("renewed", lambda old: old, ttl=None)
    assert shared.expires_at("renewed") is None
    shared.update({"a": 1}, ttl=2)  # a key, as for `dict.update`
    assert (shared["ttl"], shared.expires_at("a")) == (2, None)


def test_i2_a_renewed_key_stays(shared: Map, topic: xl.Topic) -> None:
    for _ in range(20):
        shared.put("a", 1, ttl=LATER)
        shared.put("b", 1, ttl=SOON)
    until(lambda: "b" not in shared)
    assert (shared.get("a"), shared.put("a", None)) == (1, 1)


def test_i2_a_clear_forgets_when_keys_expire(shared: Map, other: xl.Topic) -> None:
    with xl.SharedMap(other) as second:
        shared.put("a", 1, ttl=LATER)
        assert second.expires_at("a", latest=True)
        shared.clear()
        shared.put("a", 2)
        assert second.expires_at("a", latest=True) is None


def test_i2_so_it_is_for_asyncio(path: str) -> None:
    async def play() -> list[Any]:
        async with aio.open(path) as engine, aio.SharedMap(engine.topic("m")) as shared:
            async with shared.watch() as watch:
                await shared.put_if_absent("b", 1, ttl=LATER)
                assert await shared.expires_at("b")
                await shared.put("a", 1, ttl=0.05)
                return [(await watch.read_next(timeout=PATIENCE)).value for _ in range(3)]

    assert asyncio.run(play()) == [1, 1, None]


# ---- between the time and the removal ----------------------------------------------------


def test_i2_reads_agree_until_the_removal_is_in_the_log(
    shared: Map, topic: xl.Topic, other: xl.Topic, no_alarms: None
) -> None:
    with xl.SharedMap(other) as second:
        put_soon(shared, "a")
        assert everything(shared) == everything(second) == {"a": "old"}
        shared.put("b", 1)
        assert everything(shared) == everything(second) == {"b": 1}
        assert [shared.at(offset) for offset in range(4)] == [{}, {"a": "old"}, {}, {"b": 1}]
    assert removals(topic) == [1]


ABSENT: dict[str, tuple[Callable[[Map], Any], Any]] = {
    "put": (lambda m: m.put("a", 1), None),
    "put, limited": (lambda m: m.put("a", 1, ttl=60), None),
    "delete": (lambda m: m.delete("a"), None),
    "put_if_absent": (lambda m: m.put_if_absent("a", 1).previous, None),
    "replace": (lambda m: bool(m.replace("a", "old", 1)), False),
    "update": (lambda m: m.update("a", lambda old: old).previous, None),
    "update_multiple": (lambda m: m.update_multiple(None, lambda k, v: 1), {}),
    "setdefault": (lambda m: m.setdefault("a", 1), 1),
    "pop": (lambda m: m.pop("a", 5), 5),
}


@pytest.mark.parametrize("by", ["owner", "other"])
@pytest.mark.parametrize("call", ABSENT)
def test_i2_a_write_finds_no_key_that_has_expired(
    shared: Map, topic: xl.Topic, other: xl.Topic, no_alarms: None, call: str, by: str
) -> None:
    """So one process at a time wins what expires."""
    with xl.SharedMap(other) as second:
        for _ in range(3):
            shared.put("b", 1)  # the next calls of an owner are compiled ones
        put_soon(shared, "a")
        expired = topic.next_offset
        write, expected = ABSENT[call]
        assert write(shared if by == "owner" else second) == expected
        assert removals(topic) == [expired]
        assert everything(shared) == everything(second) == opened_afresh(topic)


def test_i2_popitem_finds_none_either(shared: Map, no_alarms: None) -> None:
    put_soon(shared, "a")
    with pytest.raises(KeyError):
        shared.popitem()


def test_i2_many_are_removed_in_bounded_steps(
    shared: Map, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    due_items = Entries.due_items

    def counted(entries: Entries, most: int, most_bytes: int) -> Any:
        items = due_items(entries, most, most_bytes)
        steps.append(len(items))
        return items

    monkeypatch.setattr(Entries, "due_items", counted)
    shared.put_all({f"k{number}": number for number in range(2500)}, ttl=0.05)
    assert len(set(shared._content.deadlines.values())) <= 1  # one for all, until they go
    shared.put("stays", 1)
    until(lambda: len(shared) == 1)
    assert (max(steps) <= 1000, sum(steps)) == (True, 2500)
    assert len(removals(topic)) == 2500


@pytest.mark.parametrize("where", ["local", pytest.param("cluster", marks=pytest.mark.once)])
def test_i2_large_keys_are_removed_a_record_at_a_time(
    path: str, no_alarms: None, where: str
) -> None:
    with xl.open(path if where == "local" else f"memory://{path}") as engine:
        with xl.SharedMap(engine.topic("orders"), timeout=PATIENCE) as shared:
            names = [f"{number:03}" + "k" * 100_000 for number in range(60)]
            for name in names:
                shared.put(name, 1, ttl=SOON)
            until_due(shared, names[-1])
            assert shared.put("next", 1) is None
            assert list(shared) == ["next"]
            gone = removals(engine.topic("orders"))
            assert len(gone) == 60


@pytest.mark.parametrize("where", ["local", pytest.param("cluster", marks=pytest.mark.once)])
def test_i2_an_error_of_a_removal_is_one_of_the_write(
    path: str, no_alarms: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xl.open(path if where == "local" else f"memory://{path}") as engine:
        with xl.SharedMap(engine.topic("orders"), timeout=PATIENCE) as shared:
            put_soon(shared, "k")
            with monkeypatch.context() as patch:
                patch.setattr(ProducerSender, "append", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    shared.put("next", 1)
            shared.put("next", 1)
            assert list(shared) == ["next"]


# ---- in a transaction --------------------------------------------------------------------


def test_i2_a_write_of_a_transaction_can_expire(
    engine: xl.Engine, shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    """Its later writes know it, as they know the value."""
    shared.put_all({"old": 1, "plain": 1}, ttl=LATER)
    before = shared.expires_at("old")
    with engine.transaction() as txn:
        shared.put("a", 1, ttl=LATER, transaction=txn)
        shared.update("a", lambda old: old + 1, transaction=txn)
        shared.update("old", lambda old: old + 1, transaction=txn)
        shared.put("plain", 2, transaction=txn)
        shared.update("plain", lambda old: old + 1, transaction=txn)
        shared.put("soon", 1, ttl=0.05, transaction=txn)
        assert shared.expires_at("a") is None
    with xl.SharedMap(other) as second:
        until(lambda: everything(second) == {"old": 2, "plain": 3, "a": 2})
        assert second.expires_at("old") == before
        assert second.expires_at("plain") is None
        assert second.expires_at("a") == shared.expires_at("a", latest=True) is not None
    with engine.transaction() as txn:
        shared.clear(transaction=txn)
        shared.put("a", 1, transaction=txn)
        shared.update("a", lambda old: old + 1, transaction=txn)
    assert (everything(shared), shared.expires_at("a")) == ({"a": 2}, None)


def test_i2_a_transaction_finds_no_key_that_had_expired_when_it_began_to_write(
    engine: xl.Engine, shared: Map, other: xl.Topic, no_alarms: None
) -> None:
    put_soon(shared, "a")
    with xl.SharedMap(other) as second:
        with engine.transaction() as txn:
            assert shared.put_if_absent("a", 1, transaction=txn).previous is None
            assert shared.put("a", 2, transaction=txn) == 1
        assert everything(second) == everything(shared) == {"a": 2}


def test_i2_the_removal_of_a_key_is_a_write_beside_the_transaction(
    engine: xl.Engine, shared: Map
) -> None:
    """A transaction that has found it is run again."""
    content: Any = shared._content
    shared.put("a", 1, ttl=LATER)
    txn = engine.transaction()
    had = shared.put("b", 1, transaction=txn)
    content.see(content.now() + 2 * LATER // dt.timedelta(milliseconds=1))
    shared._set_alarm()
    until(lambda: "a" not in shared)
    with pytest.raises(xl.TransactionAbortedError, match="Run the transaction again"):
        txn.commit()
    assert (had, everything(shared)) == (None, {})


# ---- who removes them --------------------------------------------------------------------


def remove_nothing(state: State) -> None:
    """Nothing is removed in the background of this process."""
    expiry.Expiring._set_alarm = lambda *args: None  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "stopped", "closed"])
def test_i2_if_the_owner_does_not_another_process_does(
    path: str, shared: Map, topic: xl.Topic, worker: Callable[..., Worker], how: str
) -> None:
    """Here by one that only reads. It does not stay the owner."""
    process = worker(keepalive=None)
    process.call(open_map)
    process.call(remove_nothing)  # also if it has time for that before it is stopped
    process.call(call_map, "put", "a", 1, ttl=0.5)
    if how == "killed":
        process.signal(signal.SIGKILL)
    elif how == "stopped":
        stop_outside(path, process.pid)
    else:
        process.call(call_map, "close")
    with shared.watch("a", start="earliest") as watch:
        shared.get("a", latest=True)  # so it knows of the key
        assert [watch.read_next(timeout=PATIENCE).value for _ in range(2)] == [1, None]
    until(lambda: topic.owner is None)
    if how == "stopped":
        process.signal(signal.SIGCONT)


@pytest.mark.long
def test_i2_so_does_one_that_only_watches(
    shared: Map, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It waits for the removal, and calls nothing else."""
    with shared.watch() as watch:
        process = worker()
        process.call(open_map)
        process.call(call_map, "put", "a", 1, ttl=0.5)
        process.signal(signal.SIGKILL)
        assert [watch.read_next(timeout=PATIENCE).value for _ in range(2)] == [1, None]
    until(lambda: topic.owner is None)


def test_i2_an_interrupted_alarm_is_set_by_the_next_call(
    shared: Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(shared._engine), "call_after", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shared.put("a", 1, ttl=0.1)
    shared.put("b", 1, ttl=0.1)
    until(lambda: not shared.list_keys())


def test_i2_the_next_that_opens_the_map_removes_what_is_left(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that opens the ledger only to read does not: the value is still there."""
    with monkeypatch.context() as patch, xl.SharedMap(topic) as shared:
        patch.setattr(expiry.Expiring, "_set_alarm", lambda *args: None)
        shared.put("b", 1)
        put_soon(shared, "a")
    with xl.open(path, readonly=True) as reader, xl.SharedMap(reader.topic("orders")) as looked:
        assert everything(looked) == {"a": "old", "b": 1}
    assert removals(topic) == []
    with xl.SharedMap(topic) as again:
        until(lambda: everything(again) == {"b": 1})


@pytest.mark.long
def test_i2_an_application_that_owns_the_topic_is_waited_for(
    shared: Map, topic: xl.Topic, caplog: pytest.LogCaptureFixture
) -> None:
    content: Any = shared._content
    shared.put("a", 1, ttl=LATER)
    with topic.producer("exclusive_with_fencing") as producer:
        content.see(content.now() + 2 * LATER // dt.timedelta(milliseconds=1))
        shared._set_alarm()
        until(lambda: "expired keys were not removed" in caplog.text)
        assert topic.owner is not None
        assert topic.owner.producer_name == producer.name
    until(lambda: everything(shared) == {})


def test_i2_a_map_without_such_keys_has_no_alarm(
    engine: xl.Engine, shared: Map, other: xl.Topic
) -> None:
    alarms: Any = engine.backend
    with xl.SharedMap(other) as second:
        shared.update({"a": 1, "b": 2})
        assert everything(second)
        assert second.put("c", 1) is None
        assert alarms.callbacks.alarms.seconds_left() == math.inf
        shared.put("c", 1, ttl=LATER)
        assert alarms.callbacks.alarms.seconds_left() < math.inf


def test_i2_renewing_a_key_leaves_one_alarm(engine: xl.Engine, shared: Map) -> None:
    alarms: Any = engine.backend
    for _ in range(100):
        shared.put("a", 1, ttl=LATER)
    assert len(alarms.callbacks.alarms._heap) == 1
    content: Any = shared._content
    assert len(content._heap) <= FEW + 3


def test_i2_an_alarm_keeps_no_map_that_was_dropped(shared: Map, other: xl.Topic) -> None:
    dropped = xl.SharedMap(other)
    dropped.put("a", 1, ttl=LATER)
    reference = weakref.ref(dropped)
    del dropped
    until(lambda: gc.collect() and reference() is None)


# ---- the log's time ----------------------------------------------------------------------


@pytest.mark.long
def test_i2_keys_expire_by_the_log_s_time_when_clocks_jump(
    shared: Map, topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker]
) -> None:
    """A clock that is a day ahead moves the log's time, which does not go back (rule G4): what it
    has made due stays due. From there, time goes on for new keys as it passes."""
    shared.put("a", 1, ttl=dt.timedelta(hours=5))
    shared.put("b", 1, ttl=dt.timedelta(days=9))
    clock.jump(DAY)
    ahead = worker()
    ahead.call(open_map)
    assert ahead.call(call_map, "put", "c", 1) is None
    until(lambda: ahead.call(call_map, "list_keys") == ["b", "c"])
    ahead.call(call_map, "put", "d", 1, ttl=60.0)
    clock.jump(-DAY)
    behind = worker()
    behind.call(open_map)
    limit = behind.call(call_map, "expires_at", "d")
    assert limit == shared.expires_at("d", latest=True)
    assert limit > topic[-1].published_at > dt.datetime.now(dt.UTC) + dt.timedelta(hours=23)
    # To this process's clock, too, the log is ahead.
    shared.put("e", 1, ttl=1)
    at = shared.expires_at("e")
    assert at is not None
    assert at >= topic[-1].published_at
    until(lambda: everything(shared).keys() == {"b", "c", "d"})
    assert behind.call(call_map, "put_if_absent", "f", 1, ttl=0.5).made
    until(lambda: everything(shared).keys() == {"b", "c", "d"})


def test_i2_what_the_log_s_time_has_passed_is_due_whatever_the_clock_shows(
    shared: Map, topic: xl.Topic
) -> None:
    """The messages say so: the owner before had another clock."""
    now = int(time.time() * 1000)
    content: Any = shared._content
    shared.put("a", 1, ttl=LATER)
    assert not content.is_due()
    content.see(now + 3_700_000)
    assert shared.put("b", 2) is None
    assert everything(shared) == {"b": 2}


# ---- what is restored --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["log", "snapshot", "trim"])
def test_i2_when_keys_expire_survives(topic: xl.Topic, other: xl.Topic, how: str) -> None:
    with xl.SharedMap(topic) as shared:
        shared.update({f"k{number}": number for number in range(10)})
        shared.put("a", 1, ttl=LATER)
        shared.put("b", 1, ttl=LATER)
        shared.put("b", 2)
        at = shared.expires_at("a")
        if how == "snapshot":
            shared.snapshot()
    if how != "log":
        topic.trim(before=topic.next_offset)  # it takes a snapshot first
    with xl.SharedMap(other) as again:
        assert (again.expires_at("a"), again.expires_at("b")) == (at, None)
        assert again["a"] == 1
        assert again.put("a", 2, ttl=0.01) == 1
        until(lambda: "a" not in again)


def test_i2_a_compacted_view_has_it(shared: Map, topic: xl.Topic) -> None:
    """Of which a map is restored that has no snapshot."""
    shared.put("a", 1, ttl=LATER)
    topic.compact()
    store: Any = topic.engine.backend.topic_store(topic.id)
    with store._engine.ledger.read() as tables:
        found = read_view(tables, topic.id)
    assert found is not None
    restored = Entries()
    restored.restore(found[1])
    assert restored.deadlines == shared._content.deadlines != {}


def test_i2_a_message_that_only_looks_like_one_sets_a_value(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        for text in ("", "x", "-5", "9" * 30, "٣"):
            producer.send(b"\x01", key="a", properties={"map": "put", "until": text})
        producer.send(b"\x01", key="b", properties={"until": "5"})
        producer.send(b"\x01", key="c", properties={"map": "put", "until": str(10**15)})
    with xl.SharedMap(topic) as shared:
        assert everything(shared) == {"a": 1, "b": 1, "c": 1}
        assert (shared.expires_at("a"), shared.expires_at("b")) == (None, None)
        assert shared.expires_at("c") is not None
    assert MAX_TIME > 10**15


# ---- any operations, any processes -------------------------------------------------------


class AtATime(Entries):
    """A map whose time stands still."""

    time = 1 << 50

    def now(self) -> int:
        return self.time


def test_i2_the_content_is_that_of_a_simple_model() -> None:
    """Random messages: `due_at` is never later than the first deadline, and what is due is what
    the model says."""
    rng = random.Random(5)
    entries = AtATime()
    model: dict[bytes, tuple[bytes, int | None]] = {}
    begin = entries.time
    for step in range(5000):
        name = b"k%d" % rng.randrange(30)
        action = rng.random()
        limit = begin + rng.randrange(-50, 50) + step // 10
        if action < 0.5:
            entries.apply(name, Timed(b"v", limit))
            model[name] = b"v", limit
        elif action < 0.7:
            entries.apply(name, b"w")
            model[name] = b"w", None
        elif action < 0.9:
            entries.apply(name, None)
            model.pop(name, None)
        elif action < 0.91:
            entries.apply(None, None)
            model.clear()
        elif action < 0.93:
            restored = AtATime()
            restored.time = entries.time
            restored.restore(entries.to_items())
            entries = restored
        else:
            entries.time = begin + step // 10
        now = entries.now()
        due = {key for key, (_, at) in model.items() if at is not None and at <= now}
        assert entries.due_at <= min((at for _, at in model.values() if at), default=NEVER)
        assert entries.is_due() == bool(due)
        assert {key for key, _ in entries.due_items(1000, 1 << 20)} == due
        assert bool(entries.due_items(1, 1 << 20)) == bool(due)
        assert entries.entries == {key: value for key, (value, _) in model.items()}


def play(state: State, seed: int, count: int) -> None:
    """Random writes of a process. Keys that begin with "t" are removed only because they expire."""
    rng, shared = random.Random(seed), state.kept["map"]
    for number in range(count):
        timed = f"t{rng.randrange(20)}"
        action = rng.randrange(7)
        if action == 0:
            shared.put(timed, number, ttl=rng.uniform(0.001, 0.2))
        elif action == 1:
            shared.put_if_absent(timed, number, ttl=rng.uniform(0.001, 0.2))
        elif action == 2:
            shared.update(timed, lambda old: (old or 0) + 1, ttl=rng.uniform(0.001, 0.2))
        elif action == 3:
            shared.update_multiple(lambda key: key.startswith("t"), lambda key, old: old + 1)
        elif action == 4:
            shared.put(f"p{rng.randrange(5)}", number)
        elif action == 5:
            shared.delete(f"p{rng.randrange(5)}")
        else:
            shared.get(timed, latest=True)


def content_at(topic: xl.Topic, end: int) -> Entries:
    """The map as the messages before an offset say, each applied once."""
    entries = Entries()
    messages = until(lambda: (found := topic[0:end]) and len(found) == end and found)  # flushed
    for message in messages:
        entries.apply(*item_of(message))
    return entries


def position_and_content(state: State) -> tuple[int, dict[bytes, bytes], dict[bytes, int]]:
    """What a process has in memory."""
    shared = state.kept["map"]
    with shared._lock:
        content = shared._content
        return shared._replica.position, dict(content.entries), dict(content.deadlines)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_i2_all_processes_have_the_same_map_at_the_same_offset(
    shared: Map, topic: xl.Topic, worker: Callable[..., Worker], seed: int
) -> None:
    """Processes write, one is killed, and one is opened meanwhile. The map is what the log says, at
    every offset; and no key went before its time."""
    processes = [worker(f"p{number}") for number in range(3)]
    for number, process in enumerate(processes):
        process.call(open_map)
        process.start(play, 10 * seed + number, 300)
    until(lambda: topic.next_offset > 200)
    processes[0].signal(signal.SIGKILL)
    late = worker("late")
    late.call(open_map)
    late.call(play, 99, 50)
    for process in processes[1:]:
        process.answer()
    for process in [*processes[1:], late]:
        position, entries, deadlines = process.call(position_and_content)
        expected = content_at(topic, position)
        assert (entries, deadlines) == (expected.entries, expected.deadlines)
    until(lambda: not shared.list_keys(prefix="t", latest=True))
    rng, end = random.Random(seed), topic.next_offset
    for offset in [end, *rng.sample(range(1, end), 5)]:
        names = content_at(topic, offset).entries
        assert shared.at(offset).keys() == {name.decode() for name in names}
    assert none_was_removed_early(topic)


def none_was_removed_early(topic: xl.Topic) -> bool:
    """Whether each removal of a key that nobody deletes came at its time."""
    deadlines: dict[bytes, int] = {}
    for message in topic:
        key, value = item_of(message)
        assert key is not None
        if isinstance(value, Timed):
            deadlines[key] = value.until
        elif key.startswith(b"t") and message.publish_time < deadlines.pop(key):
            return False
    return True
