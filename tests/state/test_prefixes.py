"""Rules I2, I4: a map of the keys that begin with a prefix, for a process that needs a part of a
large map; and what `prefix=` means for keys of each type."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.processes import PATIENCE, State, Worker, until
from testing.states import call_map, everything, open_map, opened_afresh

pytestmark = pytest.mark.rule("I2")

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def whole(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as whole:
        yield whole


@pytest.fixture
def part(whole: Map, other: xl.Topic) -> Iterator[Map]:
    """What another process has of the map."""
    whole.update({"a/1": 1, "b/1": 2, "a/2": 3, "c": 4})
    with xl.SharedMap(other, prefix="a/") as part:
        yield part


# ---- what it is a map of -----------------------------------------------------------------


def test_i2_a_map_of_some_keys_has_only_those(whole: Map, part: Map) -> None:
    assert (len(part), dict(part), part.scan()) == (2, {"a/1": 1, "a/2": 3}, list(part.items()))
    assert part._content.entries.keys() == {b"a/1", b"a/2"}  # in memory
    whole.update({"a/3": 5, "b/2": 6})
    assert part.list_keys(latest=True) == ["a/1", "a/2", "a/3"]
    assert (part.get("b/1"), "b/1" in part, part.get("b/1", 7, latest=True)) == (None, False, 7)
    assert part.update_multiple(None, lambda key, old: old + 1).keys() == set(part)
    assert part.popitem()[0] == "a/3"
    found = (whole.get("b/1", latest=True), part.at(2), part.diff(2, 3))
    assert found == (2, {"a/1": 1}, {"a/2": (None, 3)})
    with part.watch(existing=True) as watch:
        whole.put("b/1", 9)
        whole.put("a/1", 10)
        assert [(c.key, c.value) for c in watch.follow(0)][-1] == ("a/1", 10)
        assert watch._items.keys() == {b"a/1", b"a/2"}


WRITES: dict[str, Callable[[Map], object]] = {
    "put": lambda m: m.put("b/1", 1),
    "put, limited": lambda m: m.put("b/1", 1, ttl=5),
    "put_async": lambda m: m.put_async("b/1", 1).result(PATIENCE),
    "[]": lambda m: m.__setitem__("b/1", 1),
    "put_if_absent": lambda m: m.put_if_absent("b/1", 1),
    "replace": lambda m: m.replace("b/1", 2, 1),
    "update": lambda m: m.update("b/1", lambda old: 1),
    "update, many": lambda m: m.update({"a/1": 5, "b/1": 1}),
    "put_all": lambda m: m.put_all({"a/1": 5, "b/1": 1}),
    "setdefault": lambda m: m.setdefault("b/1", 1),
    "delete": lambda m: m.delete("b/1"),
    "del": lambda m: m.__delitem__("b/1"),
    "pop": lambda m: m.pop("b/1", None),
    "watch": lambda m: m.watch("b/1"),
}


@pytest.mark.parametrize("call", WRITES)
def test_i2_it_writes_no_other_key(whole: Map, part: Map, call: str) -> None:
    before = whole.topic.next_offset
    with pytest.raises(ValueError, match=r"key='b/1' does not begin with 'a/'"):
        WRITES[call](part)
    assert whole.topic.next_offset == before


def test_i2_nor_does_it_for_asyncio(path: str) -> None:
    async def play() -> None:
        async with (
            aio.open(path) as engine,
            aio.SharedMap(engine.topic("m")) as whole,
            aio.SharedMap(engine.topic("m"), prefix="a") as part,
        ):
            await whole.update({"a1": 1, "b1": 2})
            with pytest.raises(ValueError, match="does not begin with 'a'"):
                await part.put("b", 1)
            await part.put("a2", 1)
            assert await part.list_keys(prefix="a2") == ["a2"]
            assert await part.items() == [("a1", 1), ("a2", 1)]

    asyncio.run(play())


def test_i2_a_clear_removes_only_its_keys(whole: Map, part: Map) -> None:
    part.clear()
    assert (dict(part), everything(whole)) == ({}, {"b/1": 2, "c": 4})
    part.put("a/1", 1)
    whole.clear()
    assert part.get("a/1", latest=True) is None


def test_i2_so_it_is_in_a_transaction(whole: Map, part: Map, other: xl.Topic) -> None:
    with other.engine.transaction() as txn:
        with pytest.raises(ValueError, match="does not begin with 'a/'"):
            part.put("b/1", 1, transaction=txn)
        part.clear(transaction=txn)
        part.put("a/9", 1, transaction=txn)
    assert everything(whole) == {"b/1": 2, "c": 4, "a/9": 1}
    assert dict(part) == {"a/9": 1}


# ---- snapshots ---------------------------------------------------------------------------


def test_i4_its_snapshot_has_all_keys(whole: Map, part: Map, topic: xl.Topic) -> None:
    whole.put("b/2", 5, ttl=3600)
    assert part.snapshot() == 5
    topic.trim(before=5)
    part.put("a/3", 6)
    assert opened_afresh(topic) == {"a/1": 1, "b/1": 2, "a/2": 3, "c": 4, "b/2": 5, "a/3": 6}
    with xl.SharedMap(topic) as again, xl.SharedMap(topic, prefix="b/") as other:
        assert again.expires_at("b/2") == other.expires_at("b/2") is not None
        found = (dict(other), other._content.entries.keys())
        assert found == ({"b/1": 2, "b/2": 5}, {b"b/1", b"b/2"})


def test_i4_it_takes_none_by_itself(topic: xl.Topic, engine: xl.Engine) -> None:
    with xl.SharedMap(topic, prefix="a", snapshot_every=1) as part:
        part.update({f"a{number}": number for number in range(10)})
        part.put("a", 1)
    with xl.SharedMap(topic) as whole:
        assert len(whole) == 11
    store = engine.backend.topic_store(topic.id)
    assert store.newest(0, views=False)[1] is None


def test_i4_trimming_and_compacting_beside_it_lose_nothing(
    whole: Map, part: Map, topic: xl.Topic
) -> None:
    whole.close()  # the only map that is open is that of some keys
    for number in range(50):
        part.put(f"a/{number % 7}", number)
        if number % 10 == 0:
            topic.compact()
            topic.trim(before=topic.next_offset)
    assert dict(part).items() <= opened_afresh(topic).items()
    assert opened_afresh(topic)["b/1"] == 2


# ---- what a prefix is --------------------------------------------------------------------

KEYS: dict[str, list[Any]] = {
    "str": ["a", "ab", "b", "", "aé"],
    "bytes": [b"a", b"ab", b"b", b""],
    "json": ["a", "ab", "b", 1],
    "msgpack": ["a", b"ab", "ab", "b", 5],
    "exact": ["a", b"ab", "ab", ("a", 1), None, 7],
}


@pytest.mark.parametrize("prefix", ["a", b"a", "", "aé"])
@pytest.mark.parametrize("key", KEYS)
def test_i6_watches_lists_and_maps_agree_on_a_prefix(
    topic: xl.Topic, other: xl.Topic, key: str, prefix: Any
) -> None:
    """A key of another type does not begin with it, and is no error."""
    keys = [one for one in KEYS[key] if one is not None]
    with xl.SharedMap(topic, key=key) as whole:
        wrong = {"str": bytes, "bytes": str}.get(key)
        if wrong is not None and isinstance(prefix, wrong):
            for call in (
                lambda: whole.watch(prefix=prefix),
                lambda: whole.list_keys(prefix=prefix),
                lambda: xl.SharedMap(other, key=key, prefix=prefix),
            ):
                with pytest.raises(TypeError, match="prefix="):
                    call()
            return
        with whole.watch(prefix=prefix) as watch:
            whole.update([(one, 1) for one in keys])
            expected = [
                one for one in keys if isinstance(one, type(prefix)) and one.startswith(prefix)
            ]
            assert [change.key for change in watch.follow(0)] == expected
        assert whole.list_keys(prefix=prefix) == expected
        with xl.SharedMap(other, key=key, prefix=prefix) as part:
            assert list(part) == expected


@pytest.mark.parametrize("prefix", [5, ("a",), ["a"]])
def test_i6_no_other_prefix_is_taken(topic: xl.Topic, prefix: Any) -> None:
    with xl.SharedMap(topic) as shared:
        for call in (
            lambda: shared.watch(prefix=prefix),
            lambda: shared.list_keys(prefix=prefix),
            lambda: xl.SharedMap(topic, prefix=prefix),
        ):
            with pytest.raises(TypeError, match="prefix="):
                call()


def test_i2_a_key_that_cannot_be_read_is_named_by_the_call_that_reads_it(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"1", key=b"\xff{")
        producer.send(b"1", key=b'"a"')
    with xl.SharedMap(topic, key="json", value="json", prefix="a") as part:
        assert part["a"] == 1
        with pytest.raises(xl.DeserializationError):
            list(part)


# ---- any operations ----------------------------------------------------------------------


def play(state: State, prefix: str, seed: int, count: int) -> None:
    """Random writes of a process to its part of the map."""
    rng, shared = random.Random(seed), state.kept["map"]
    for number in range(count):
        key = f"{prefix}{rng.randrange(6)}"
        action = rng.randrange(8)
        if action < 4:
            shared.put(key, number, ttl=None if action else rng.uniform(0.001, 0.1))
        elif action == 4:
            shared.update_multiple(None, lambda key, old: old + 1)
        elif action == 5:
            shared.delete(key)
        elif action == 6 and rng.random() < 0.2:
            shared.clear()
        elif rng.random() < 0.1:
            shared.snapshot()


@pytest.mark.long
def test_i2_parts_are_those_of_the_whole_map(
    whole: Map, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Each process has a part, one is killed; the messages are trimmed meanwhile."""
    prefixes = "abc"
    processes = [worker(prefix) for prefix in prefixes]
    for number, (prefix, process) in enumerate(zip(prefixes, processes, strict=True)):
        process.call(open_map, prefix=prefix)
        process.start(play, prefix, number, 120)
    until(lambda: topic.next_offset > 100)
    topic.trim(before=topic.next_offset)
    processes[0].signal(signal.SIGKILL)
    for process in processes[1:]:
        process.answer()
    until(lambda: not any(whole.expires_at(key) for key in whole.list_keys(latest=True)))
    found = everything(whole)
    for prefix, process in zip(prefixes[1:], processes[1:], strict=True):
        mine = dict(process.call(call_map, "scan", latest=True))
        assert mine == {key: value for key, value in found.items() if key.startswith(prefix)}
    assert opened_afresh(topic) == found
