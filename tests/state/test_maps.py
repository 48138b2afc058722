"""Rules I2, I4, I6, I7: a shared map as a MutableMapping, its changes, its past, and its topic.

A topic knows what state it holds. No message of it is trimmed before it is in a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.maintenance.retention import Ages, trim_what_is_old
from exclusivelog.producer import Append
from testing.handovers import begin
from testing.processes import PATIENCE, State, Worker, until
from testing.states import add, call_map, everything, one_more, open_counts, open_map, opened_afresh

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


# ---- I2: a MutableMapping ----------------------------------------------------------------


def test_i2_it_is_a_mutable_mapping(shared: Map) -> None:
    """What a dict does, it does, call by call."""
    assert isinstance(shared, MutableMapping)
    plain: dict[str, Any] = {}
    calls: list[Callable[[Any], Any]] = [
        lambda m: m.update({"a": 1, "b": 2, "c": [3]}),
        lambda m: m.update([("d", 4), ("e", 5)]),
        lambda m: m.setdefault("a", 9),
        lambda m: m.setdefault("f", 6),
        lambda m: m.pop("b"),
        lambda m: m.pop("b", 7),
        lambda m: m.popitem(),
        lambda m: m.get("a"),
        lambda m: m.get("z", 8),
        lambda m: sorted(m.keys()),
        lambda m: list(m.values()),
        lambda m: list(m.items()),
        lambda m: ("a", 1) in m.items(),
        lambda m: [3] in m.values(),
        lambda m: 99 in m.values(),
        lambda m: "a" in m,
        lambda m: len(m.items()),
        lambda m: m == {"a": 1, "c": [3], "d": 4, "e": 5},
        lambda m: m == {},
        lambda m: m.clear(),
        lambda m: bool(m),
        len,
    ]
    for call in calls:
        assert call(shared) == call(plain)
    for call in (lambda m: m.popitem(), lambda m: m.pop("z"), lambda m: m.__delitem__("z")):
        for mapping in (shared, plain):
            with pytest.raises(KeyError):
                call(mapping)


def test_i2_writes_tell_what_was_there_before(shared: Map) -> None:
    assert (shared.put("a", 1), shared.put("a", 2), shared.put("a", None)) == (None, 1, 2)
    assert (shared.put("a", 0), shared.delete("a"), shared.delete("a")) == (None, 0, None)
    with pytest.raises(TypeError, match="fn takes a function"):
        shared.update("a", 5)  # type: ignore[call-overload]


@pytest.mark.parametrize("call", ["put_if_absent", "setdefault", "pop", "popitem", "put"])
def test_i2_each_is_one_atomic_write(shared: Map, other: xl.Topic, call: str) -> None:
    """Many threads of two processes: each value is won, or taken out, by exactly one of them."""
    names = [f"k{number}" for number in range(60)]
    if call.startswith("pop"):
        shared.update(dict.fromkeys(names, "there"))

    def work(mapping: Map, who: int) -> list[Any]:
        if call == "popitem":
            return [mapping.popitem()[0] for _ in range(15)]
        if call == "pop":
            return [mapping.pop(name, None) for name in names]
        if call == "put":
            return [mapping.put("n", [who, number]) for number in range(15)]
        if call == "setdefault":
            return [mapping.setdefault(name, who) for name in names]
        return [mapping.put_if_absent(name, who).made for name in names]

    with xl.SharedMap(other) as second, ThreadPoolExecutor(4) as pool:
        maps = [shared, second, shared, second]
        found = list(pool.map(work, maps, range(4), timeout=2 * PATIENCE))
    everybody_s = [item for mine in found for item in mine]
    if call == "popitem":
        assert sorted(everybody_s) == sorted(names)
    elif call == "pop":
        assert everybody_s.count("there") == 60
    elif call == "put":  # each value was replaced by one other, but for the last
        seen = [tuple(item) for item in everybody_s if item is not None]
        left = tuple(shared.get("n", latest=True))
        assert sorted([*seen, left]) == [(who, n) for who in range(4) for n in range(15)]
    elif call == "setdefault":
        assert found[0] == found[1] == found[2] == found[3]
    else:
        assert everybody_s.count(True) == 60


def test_i2_clear_is_one_message_everywhere(shared: Map, topic: xl.Topic, other: xl.Topic) -> None:
    shared.update({f"k{number}": number for number in range(500)})
    with xl.SharedMap(other) as second:
        before = topic.next_offset
        shared.clear()
        assert topic.next_offset == before + 1
        assert second.list_keys(latest=True) == []
        shared.put("a", 1)
        assert everything(second) == {"a": 1}
    assert opened_afresh(other) == {"a": 1}


def test_i3_what_only_looks_like_a_clear_is_named(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(None)
    with pytest.raises(xl.StateError, match="not a message of a map"):
        xl.SharedMap(topic)


# ---- I7: filters -------------------------------------------------------------------------


def test_i7_filters_are_asked_before_anything_is_decoded(topic: xl.Topic) -> None:
    decoded: list[bytes] = []

    def loads(data: bytes) -> Any:
        decoded.append(data)
        return xl.serde.json.loads(data)

    with xl.SharedMap(topic, value=xl.serde.Serde(xl.serde.json.dumps, loads)) as shared:
        shared.update({f"k{number}": number for number in range(1000)})
        decoded.clear()
        assert shared.update_multiple(lambda key: key == "k7", lambda key, old: old + 1) == {
            "k7": 8
        }
        assert decoded == [b"7"]
        seen: list[Any] = []
        only = {"k8", "k9"}
        pairs = shared.scan(lambda *pair: seen.append(pair), filter=only.__contains__, latest=True)
        assert (pairs, decoded) == (seen, [b"7", b"8", b"9"])
        assert pairs == [("k8", 8), ("k9", 9)]


def test_i7_what_is_not_changed_is_not_appended(shared: Map, topic: xl.Topic) -> None:
    shared.update({"a": 1, "b": 2, "c": 3})
    changed = shared.update_multiple(None, lambda key, old: max(old, 2))
    assert (changed, topic.next_offset) == ({"a": 2}, 4)


# ---- what the topic holds ----------------------------------------------------------------


def counts_of(topic: xl.Topic) -> Any:
    return xl.SharedState(topic, dict, add)


@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("holds", ["map", "state"])
def test_i4_a_topic_is_not_opened_as_what_it_does_not_hold(
    topic: xl.Topic, other: xl.Topic, holds: str, trimmed: bool
) -> None:
    opens = {"map": xl.SharedMap, "state": counts_of}
    with opens.pop(holds)(topic) as state:
        state.put("a", 1) if holds == "map" else state.write(lambda _: [["a", 1]])
        if trimmed:
            topic.trim(before=state.snapshot())
    [(wrong, make)] = opens.items()
    with pytest.raises(xl.StateError, match=f"'orders' holds a {holds}.* opened as a {wrong}"):
        make(other)
    with (
        pytest.raises(xl.StateError, match="holds a"),
        xl.open(topic.engine.path, readonly=True) as reader,
    ):
        make(reader.topic("orders"))
    assert (topic.owner, topic.next_offset) == (None, 1)


@pytest.mark.parametrize("options", [{"key": "bytes"}, {"value": "json"}])
def test_i4_nor_with_other_serialisers(
    shared: Map, other: xl.Topic, options: dict[str, str]
) -> None:
    shared.put("a", 1)
    with pytest.raises(xl.StateError, match=r"holds a map \(key=str, value=msgpack\)"):
        xl.SharedMap(other, **options)
    own = xl.serde.Serde(xl.serde.msgpack.dumps, xl.serde.msgpack.loads)
    assert opened_afresh(other, value=own) == {"a": 1}  # of one's own: that is not known


def test_i4_two_that_begin_at_once_do_not_both(topic: xl.Topic, other: xl.Topic) -> None:
    with xl.SharedMap(topic) as shared, counts_of(other) as counts:  # neither has written yet
        shared.put("a", 1)
        with pytest.raises(xl.StateError, match="holds a map"):
            counts.write(lambda _: [["a", 1]])
        assert shared.put("a", 2) == 1
    assert topic.next_offset == 2


def test_i4_what_a_topic_holds_goes_with_it(engine: xl.Engine, shared: Map) -> None:
    shared.put("a", 1)
    shared.close()
    engine.delete_topic("orders")
    with counts_of(engine.topic("orders")) as counts:
        assert counts.write(lambda _: [["a", 1]], dict) == {"a": 1}


def test_i4_a_map_s_messages_without_what_the_topic_holds_are_told_from_a_state_s(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """As an earlier version wrote them."""
    with topic.producer() as producer:
        producer.send(b"\x01", key="a")
    with pytest.raises(xl.StateError, match="not a message of a state"):
        counts_of(topic)
    assert opened_afresh(topic) == {"a": 1}
    engine.backend.snapshot(topic.id, 1, [(None, b"\x81\xa1a\x01")])
    topic.engine.topic("orders").trim(before=1)
    with pytest.raises(xl.StateError, match="not a snapshot of a map"):
        xl.SharedMap(topic)


# ---- trimming ----------------------------------------------------------------------------


def test_i4_trimming_takes_a_map_s_snapshot_first(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    shared.update({"b": 1, "a": 2, "c": 3})
    shared.delete("a")
    assert topic.trim(before=topic.next_offset) == 4
    shared.put("d", 4)
    assert opened_afresh(other) == everything(shared) == {"b": 1, "c": 3, "d": 4}
    shared.clear()
    shared.put("e", 5)
    assert topic.trim(max_bytes=0) >= 6
    assert list(opened_afresh(other)) == ["e"]


def old(topic: xl.Topic) -> int:
    """What the keeper does of a topic whose messages are all too old."""
    topic.engine.ledger.checkpoint()
    topic.retention(max_age=0.0)
    time.sleep(0.01)
    engine = topic.engine
    ages = Ages(engine.ledger, topic.id)
    first = trim_what_is_old(engine.ledger, topic.id, (0.0, None), engine.backend.renew, ages)
    topic.retention()  # the keeper itself does it every few seconds
    return first


def test_i4_so_does_retention(shared: Map, topic: xl.Topic, other: xl.Topic) -> None:
    for turn in range(3):
        shared.update({f"k{number}": turn for number in range(20)})
        assert old(topic) == topic.next_offset
        assert opened_afresh(other) == everything(shared)


def test_i4_a_state_s_trim_is_refused_beyond_its_snapshot(topic: xl.Topic, other: xl.Topic) -> None:
    with open_counts(topic) as counts:
        for _ in range(10):
            counts.write(lambda _: [["a", 1]])
        for _ in range(2):
            with pytest.raises(xl.StateError, match=r"snapshot of its state .*call snapshot\(\)"):
                topic.trim(before=5)
        assert old(topic) == topic.first_offset == 0
        assert counts.snapshot() == 10
        counts.write(lambda _: [["a", 1]])
        with pytest.raises(xl.StateError, match="goes up to offset 10"):
            topic.trim(before=11)
        assert topic.trim(before=4) == 4
        assert old(topic) == 10  # retention stops there
        with open_counts(other) as again:
            assert again.read(dict) == counts.read(dict) == {"a": 11}


def test_i4_other_topics_are_trimmed_as_before(engine: xl.Engine) -> None:
    topic = engine.topic("plain")
    with topic.producer() as producer:
        producer.send_many([b"x"] * 10)
    assert topic.trim(before=7) == 7


def test_i4_a_map_can_be_restored_from_its_compacted_view(
    shared: Map, topic: xl.Topic, other: xl.Topic, engine: xl.Engine
) -> None:
    shared.update({"a": 1, "b": 2})
    shared.clear()
    shared.update({"b": 3, "c": 4})
    topic.compact()
    assert topic.trim(before=topic.next_offset) == 5
    with engine.ledger.read() as tables:
        assert tables.views.snapshot(topic.id) is None  # it was not needed
    shared.put("d", 5)
    assert opened_afresh(other) == everything(shared) == {"b": 3, "c": 4, "d": 5}
    assert topic.trim(before=topic.next_offset) == 6
    assert opened_afresh(other) == everything(shared)


# ---- I6: watch ---------------------------------------------------------------------------


def facts(change: xl.MapChange[Any, Any]) -> tuple[Any, ...]:
    return change.offset, change.key, change.previous, change.value


def test_i6_every_change_in_order_with_old_and_new_and_offset(shared: Map, other: xl.Topic) -> None:
    shared.put("before", 0)
    with xl.SharedMap(other) as second, second.watch() as watch:
        shared.put("a", 1)
        shared.put("a", 1)
        shared.update({"a": 2, "b": 3})
        shared.replace("a", 9, 10)
        shared.delete("b")
        shared.clear()
        shared.put("a", 5)
        assert [facts(change) for change in watch.follow(timeout=0)] == [
            (1, "a", None, 1),
            (2, "a", 1, 1),
            (3, "a", 1, 2),
            (4, "b", None, 3),
            (5, "b", 3, None),
            (6, "before", 0, None),
            (6, "a", 2, None),
            (7, "a", None, 5),
        ]
        with pytest.raises(xl.WaitTimeoutError):
            watch.read_next(timeout=0)


def test_i6_of_a_key_or_of_a_prefix(shared: Map) -> None:
    with shared.watch("job/1") as one, shared.watch(prefix="job/") as some:
        shared.update({"job/1": 1, "job/2": 2, "other": 3})
        shared.clear()
        assert [facts(c)[1:] for c in one.follow(0)] == [("job/1", None, 1), ("job/1", 1, None)]
        assert [c.key for c in some.follow(0)] == ["job/1", "job/2", "job/1", "job/2"]
    with pytest.raises(TypeError, match="a key or a prefix"):
        shared.watch("a", prefix="a")


def test_i6_first_the_map_as_it_stands(shared: Map, topic: xl.Topic, other: xl.Topic) -> None:
    """Then each change, from one offset on: a copy that begins empty becomes equal to the map."""
    shared.update({"job/1": 1, "job/2": 2, "other": 3})
    shared.delete("job/2")
    with xl.SharedMap(other) as second, second.watch(prefix="job/", existing=True) as watch:
        shared.update({"job/1": 4, "job/3": 5, "other": 6})
        found = [facts(change) for change in watch.follow(0)]
        assert found == [(3, "job/1", None, 1), (4, "job/1", 1, 4), (5, "job/3", None, 5)]
    for key, expected in ("other", [(6, "other", None, 6)]), ("none", []):
        with shared.watch(key, existing=True) as watch:
            assert [facts(change) for change in watch.follow(0)] == expected
    topic.trim(before=shared.snapshot())
    with shared.watch(existing=True, start="earliest") as watch:
        got = {facts(change) for change in watch.follow(0)}
        assert got == {(6, "job/1", None, 4), (6, "job/3", None, 5), (6, "other", None, 6)}


def test_i6_as_it_stood_at_an_offset(shared: Map) -> None:
    for number in range(4):
        shared.put("n", number)
    with shared.watch(start=2, existing=True) as watch:
        found = [facts(change) for change in watch.follow(0)]
    assert found == [(1, "n", None, 1), (2, "n", 1, 2), (3, "n", 2, 3)]
    with shared.watch(start=found[0][0] + 1) as watch:  # go on after a change of the map as it was
        assert [facts(change) for change in watch.follow(0)] == found[1:]


@pytest.mark.long
def test_i6_neither_a_gap_nor_a_double_beside_writers(
    shared: Map, worker: Callable[..., Worker]
) -> None:
    """Copies that are begun at any moment all become the same map."""
    process = worker()
    process.call(open_map)
    process.start(put_many, 200)
    copies: list[tuple[dict[str, int], Any]] = []
    while not process.answered() and len(copies) < 20:
        copies.append(({}, shared.watch(existing=True)))
    process.answer()
    for copy, watch in copies:
        last = -1
        for change in watch.follow(0):
            assert copy.get(change.key) == change.previous
            assert change.offset >= last
            last = change.offset
            copy[change.key] = change.value
        watch.close()
        assert {key: value for key, value in copy.items() if value is not None} == everything(
            shared
        )


def put_many(state: State, count: int) -> None:
    shared = state.kept["map"]
    for number in range(count):
        shared.put(f"k{number % 20}", number if number % 3 else None)


@pytest.mark.parametrize("snapshot", [False, True])
def test_i6_from_a_given_offset_on(shared: Map, topic: xl.Topic, snapshot: bool) -> None:
    for number in range(10):
        shared.put("n", number)
        if number == 3 and snapshot:
            topic.trim(before=shared.snapshot())
    with shared.watch(start=6) as watch:
        assert [facts(c) for c in watch.follow(0)] == [
            (number, "n", number - 1, number) for number in range(6, 10)
        ]
    if snapshot:
        with pytest.raises(xl.OffsetTrimmedError, match="offset 2 cannot be restored any more"):
            shared.watch(start=2)


def test_i6_one_that_falls_behind_is_told(shared: Map, topic: xl.Topic) -> None:
    with shared.watch() as slow:
        for number in range(10):
            shared.put("n", number)
        topic.trim(before=shared.snapshot())
        for _ in range(2):
            with pytest.raises(xl.OffsetTrimmedError, match=r"watch .* has fallen behind"):
                slow.read_next(timeout=1)
    with shared.watch() as again:
        shared.put("n", 10)
        assert facts(again.read_next(timeout=PATIENCE)) == (10, "n", 9, 10)


def put_later(state: State, seconds: float) -> None:
    time.sleep(seconds)
    state.kept["map"].put("theirs", 1)


def test_i6_it_waits_for_another_process_without_polling(
    shared: Map, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_map)
    with shared.watch() as watch:
        process.start(put_later, 0.5)
        begin = time.thread_time()
        assert facts(watch.read_next(timeout=PATIENCE))[1:] == ("theirs", None, 1)
        assert time.thread_time() - begin < 0.1
        process.answer()


def test_i6_writes_of_many_threads_are_seen_each_once(shared: Map) -> None:
    def write(who: int) -> None:
        for number in range(50):
            shared.update("n", one_more)
            shared.put(f"mine-{who}", number)

    with shared.watch() as watch, ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4), timeout=2 * PATIENCE))
        changes = list(watch.follow(0))
    assert [c.value for c in changes if c.key == "n"] == list(range(1, 201))
    assert all((c.previous or 0) == c.value - 1 for c in changes if c.key == "n")
    assert [c.offset for c in changes] == list(range(400))


def test_i6_so_is_one_of_asyncio(path: str) -> None:
    async def play() -> list[Any]:
        async with aio.open(path) as engine:
            async with aio.SharedMap(engine.topic("m")) as shared:
                async with shared.watch(prefix="a") as watch:
                    reading = asyncio.create_task(watch.read_next(timeout=PATIENCE))
                    await asyncio.sleep(0.2)
                    assert not reading.done()
                    await shared.put("a", 1)
                    await shared.put("b", 1)
                    first = await reading
                    await shared.update({"a": 2, "ab": 3})
                    with pytest.raises(xl.WaitTimeoutError):
                        async with shared.watch() as none:
                            await none.read_next(timeout=0.05)
                    rest = [facts(change) async for change in watch.follow(timeout=0.2)]
                    return [facts(first), *rest]

    assert asyncio.run(play()) == [(0, "a", None, 1), (2, "a", 1, 2), (3, "ab", None, 3)]


# ---- the past ----------------------------------------------------------------------------


def test_i2_a_map_as_it_was(shared: Map, topic: xl.Topic) -> None:
    was: list[dict[Any, Any]] = [{}]
    times: list[dt.datetime] = []
    for number in range(12):
        shared.clear() if number == 7 else shared.put(f"k{number % 3}", number)
        was.append(everything(shared))
        time.sleep(0.005)
        times.append(dt.datetime.now(dt.UTC))
        time.sleep(0.005)
    assert [shared.at(offset) for offset in range(13)] == was
    assert [shared.at(moment) for moment in times] == was[1:]
    assert (shared.at(99), shared.at(dt.datetime(2020, 1, 1))) == (was[12], {})
    assert shared.diff(3, 5) == {"k0": (0, 3), "k1": (1, 4)}
    assert shared.diff(7, 9) == {"k0": (6, None), "k1": (4, None), "k2": (5, 8)}
    assert shared.diff(times[4], 5) == {}
    shared.snapshot()
    assert [shared.at(offset) for offset in range(13)] == was
    topic.trim(before=12)
    assert shared.at(12) == was[12]
    for when in (11, times[3]):
        with pytest.raises(xl.OffsetTrimmedError, match="cannot be restored any more"):
            shared.at(when)
    for wrong in (-1, True, "now"):
        with pytest.raises((TypeError, ValueError), match="when="):
            shared.at(wrong)  # type: ignore[arg-type]


# ---- I5: writes share flushes ------------------------------------------------------------


class Flushes(list[int]):
    """The offsets whose flush is waited for. Within `held`, none of them comes to its end."""

    def __init__(self) -> None:
        super().__init__()
        self._go_on = threading.Event()
        self._go_on.set()

    def wait(self, offset: int) -> None:
        self.append(offset)
        assert self._go_on.wait(PATIENCE)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.clear()
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> Flushes:
    await_flush, seen = Append.await_flush, Flushes()

    def slowly(appended: Append) -> None:
        if not appended.flushed:
            seen.wait(appended.offset)
        await_flush(appended)

    monkeypatch.setattr(Append, "await_flush", slowly)
    return seen


def test_i5_calls_of_many_tasks_share_flushes_and_each_gets_its_own_result(
    path: str, flushes: Flushes
) -> None:
    with xl.open(path, durability="power") as engine, xl.SharedMap(engine.topic("m")) as shared:
        shared.put("n", 0)
        with flushes.held():
            futures = [shared.update_async("n", one_more) for _ in range(200)]
            failed = shared.update_async("n", lambda old: 1 / 0)
            computed = threading.Event()
            futures.append(shared.update_async("n", lambda old: computed.set() or one_more(old)))
            assert computed.wait(PATIENCE)
        assert [future.result(PATIENCE).value for future in futures] == list(range(1, 202))
        assert isinstance(failed.exception(PATIENCE), ZeroDivisionError)
        assert len(flushes) < 20


def test_i5_threads_compute_while_another_one_s_flush_is_under_way(
    path: str, flushes: Flushes
) -> None:
    """Eight writes wait for their flushes at the same time."""
    with xl.open(path, durability="power") as engine, xl.SharedMap(engine.topic("m")) as shared:
        shared.put("n", 0)

        def write(_: int) -> int:
            return int(shared.update("n", one_more).value or 0)

        with ThreadPoolExecutor(8) as pool:
            with flushes.held():
                written = [pool.submit(write, number) for number in range(8)]
                # A checkpoint may flush what some of them have appended.
                until(lambda: len(flushes) + sum(each.done() for each in written) == 8)
            assert sorted(each.result(PATIENCE) for each in written) == list(range(1, 9))
        assert len(flushes) > 4


def test_i5_a_read_waits_for_the_flush_of_what_it_has_seen(path: str, flushes: Flushes) -> None:
    with xl.open(path, durability="power") as engine, xl.SharedMap(engine.topic("m")) as shared:
        shared.put("n", 0)
        with flushes.held():
            future = shared.put_async("n", 1)
            until(lambda: len(flushes) == 1)
            reading = begin(shared.get, "n")
            with pytest.raises(TimeoutError):
                reading.result(0.1)
        assert reading.result(PATIENCE) == 1
        future.result(PATIENCE)


@pytest.mark.parametrize("call", ["put_if_absent", "replace", "popitem"])
def test_i5_so_does_a_write_that_appends_nothing(path: str, flushes: Flushes, call: str) -> None:
    """A loser must not learn of a winner that a power cut could still take away."""
    with xl.open(path, durability="power") as engine, xl.SharedMap(engine.topic("m")) as shared:
        shared.put("n", 0)
        lose = {
            "put_if_absent": lambda: shared.put_if_absent("n", 2),
            "replace": lambda: shared.replace("n", 0, 2),
            "popitem": shared.popitem,
        }[call]
        with flushes.held():
            future = shared.clear_async() if call == "popitem" else shared.put_async("n", 1)
            until(lambda: len(flushes) == 1)
            losing = begin(lose)
            with pytest.raises(TimeoutError):
                losing.result(0.1)
        if call == "popitem":
            assert isinstance(losing.exception(PATIENCE), KeyError)
        else:
            assert losing.result(PATIENCE) == xl.Change(False, 1, 1)
        future.result(PATIENCE)


def test_i5_a_flush_that_fails_is_told_to_each_and_the_state_is_made_anew(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xl.open(path, durability="power") as engine, xl.SharedMap(engine.topic("m")) as shared:
        shared.put("n", 0)

        def fail(appended: Append) -> None:
            error = xl.LedgerIOError("the flush has failed")
            error.maybe_written = True
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Append, "await_flush", fail)
            with pytest.raises(xl.LedgerIOError, match="flush has failed"):
                shared.put("n", 1)
            futures = [shared.put_async("n", number) for number in range(2, 6)]
            errors = [future.exception(PATIENCE) for future in futures]
            assert all(isinstance(each, xl.LedgerIOError) for each in errors)
        # In truth they were written; had they not been, this would say so as well.
        assert everything(shared) == opened_afresh(engine.topic("m")) == {"n": 5}
        assert shared.update("n", one_more).value == 6


def test_i5_another_process_s_reads_see_what_has_returned(
    shared: Map, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_map)
    for number in range(20):
        for future in [shared.put_async(f"k{n}", number) for n in range(5)]:
            future.result(PATIENCE)
        assert process.call(call_map, "get", "k4", latest=True) == number


# ---- what dict and MutableMapping do -----------------------------------------------------


def test_i2_update_takes_what_dict_update_takes(shared: Map, topic: xl.Topic) -> None:
    end = topic.next_offset
    for nothing in (lambda: shared.update(), lambda: shared.update({}), lambda: shared.update([])):
        assert nothing() is None
    assert topic.next_offset == end
    shared.update(a=1, b=2)
    shared.update({"b": 3}, c=4)
    shared.update([("c", 5)], with_key=6)
    assert dict(shared) == {"a": 1, "b": 3, "c": 5, "with_key": 6}
    with pytest.raises(TypeError, match="'d'"):
        shared.update("a", lambda old: old, d=1)  # type: ignore[call-overload]


def test_i2_get_with_a_default_is_typed_as_that_of_a_dict(topic: xl.Topic) -> None:
    numbers: xl.SharedMap[str, int]
    with xl.SharedMap(topic) as numbers:
        assert_type(numbers.get("a", 0), int)
        assert_type(numbers.get("a"), int | None)
        assert_type(numbers.get("a", "none"), int | str)
        assert (numbers.get("a", 0), numbers.get("a")) == (0, None)


def test_i6_a_watch_is_an_iterator(shared: Map, topic: xl.Topic) -> None:
    with shared.watch(existing=True) as watch:
        shared.put("a", 1)
        shared.put("a", 2)
        assert next(watch).value == 1
        assert iter(watch) is watch
        shared.close()
        topic.terminate()
        assert [change.value for change in watch] == [2]
        with pytest.raises(StopIteration):
            next(watch)


def test_i6_so_it_is_for_asyncio(path: str) -> None:
    async def run() -> None:
        async with aio.open(path, name="aio") as engine:
            topic = await engine.topic("elsewhere")
            async with aio.SharedMap(topic) as shared, shared.watch() as watch:
                owners = await topic.watch_owner()
                await shared.put("a", 1)
                assert (await anext(watch)).value == 1
                assert (await anext(owners)).kind == "grant"
                await shared.close()
                await topic.terminate()
                with pytest.raises(StopAsyncIteration):
                    await anext(watch)

    asyncio.run(run())


def test_i6_a_watch_begins_where_readers_do(shared: Map, topic: xl.Topic) -> None:
    shared.update({"a": 1})
    shared.update({"a": 2})

    def seen(start: Any) -> list[Any]:
        return [change.value for change in shared.watch("a", start=start).follow(timeout=0)]

    then = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    assert seen("earliest") == seen(0) == seen(then) == [1, 2]
    assert seen("latest") == seen(None) == []
    shared.snapshot()
    topic.trim(before=topic.next_offset)
    shared.update({"a": 3})
    assert seen("earliest") == [3]
    for wrong in ("first", 1.5, True):
        with pytest.raises(TypeError):
            seen(wrong)
