"""Rules I3 and I4: what a process that opens a state finds is what its writer has, in every codec.

The writer applies what its operations decode to, as every other process does. A snapshot is decoded
and compared with the state before it is kept: one that would give back something else, if only
`'5'` for `5` or a list for a tuple, is refused in the foreground.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import json
import tempfile
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import exclusivelog as xl
from exclusivelog.state.views import Scope, difference, thaw
from testing.processes import until

pytestmark = pytest.mark.once

Codec = dict[str, Any]


def set_key(state: dict[Any, Any], op: Any) -> None:
    """An operation is a pair."""
    key, value = op
    state[tuple(key) if isinstance(key, list) else key] = value


def to_text(value: Any) -> bytes:
    return repr(value).encode()


def from_text(data: bytes) -> Any:
    return eval(data.decode(), {"inf": float("inf"), "nan": float("nan")})


def by_json(value: Any) -> bytes:
    return json.dumps(value).encode()


PACK, UNPACK = xl.serde.msgpack.dumps, xl.serde.msgpack.loads
TEXT = xl.serde.str
CODECS: dict[str, Codec] = {
    "default": {},
    "json": {"encode": by_json, "decode": json.loads},
    "json for the state, too": {
        "encode": by_json,
        "decode": json.loads,
        "encode_state": by_json,
        "decode_state": json.loads,
    },
    "msgpack for the state": {"encode_state": PACK, "decode_state": UNPACK},
    "strict msgpack": {"encode_state": PACK, "decode_state": msgpack.unpackb},
    "one's own": {"encode": to_text, "decode": from_text},
    "one's own, for the state, too": {
        "encode": to_text,
        "decode": from_text,
        "encode_state": to_text,
        "decode_state": from_text,
    },
    "str": {
        "encode": lambda op: TEXT.dumps(repr(op)),
        "decode": from_text,
        "encode_state": lambda state: TEXT.dumps(str(state)),
        "decode_state": TEXT.loads,
    },
    "exact": {"encode": xl.serde.exact.dumps, "decode": xl.serde.exact.loads},
}

KEYS = some.one_of(
    some.integers(),
    some.text(max_size=4),
    some.binary(max_size=4),
    some.none(),
    some.booleans(),
    some.tuples(some.integers(0, 9), some.text(max_size=2)),
)
VALUES = some.recursive(
    KEYS | some.floats(),
    lambda inner: some.one_of(
        some.lists(inner, max_size=3),
        some.tuples(inner, inner),
        some.dictionaries(some.text(max_size=2) | some.integers(0, 9), inner, max_size=3),
    ),
    max_leaves=5,
)


@pytest.mark.long
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_i4_writer_and_reopened_process_are_equal_under_every_codec(codec: Codec) -> None:
    """Operations that the codec does not take are refused, and so are snapshots."""

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(some.lists(some.tuples(KEYS, VALUES), min_size=1, max_size=4))
    def play(ops: list[Any]) -> None:
        with tempfile.TemporaryDirectory() as path, xl.open(path, durability="process") as engine:
            topic = engine.topic("t")
            with xl.SharedState(topic, dict, set_key, **codec) as writer:
                for number, op in enumerate(ops):
                    with contextlib.suppress(TypeError, ValueError, OverflowError):
                        writer.write(lambda state, op=op: [op])
                    if number % 2 == 0:
                        with contextlib.suppress(xl.StateError):
                            writer.snapshot()
                with xl.SharedState(topic, dict, set_key, **codec) as reopened:
                    mine, theirs = writer.read(lambda s: s), reopened.read(lambda s: s)
                    assert difference(mine, theirs) is None

    play()


@pytest.mark.sampled
@pytest.mark.parametrize("key", ["bytes", "str", "json", "msgpack", "exact"])
@pytest.mark.parametrize("value", ["json", "msgpack", "exact"])
def test_i4_so_it_is_for_maps(path: str, engine: xl.Engine, key: str, value: str) -> None:
    keys = {"bytes": [b"", b"a"], "str": ["a", "b"]}.get(key, ["a", 1, 2.5, None])
    last = {"json": {"1": [2]}, "msgpack": {1: [2]}, "exact": {1: (2,)}}[value]
    for name in [*keys, ("a", 1)] if key == "exact" else keys:
        for number, item in enumerate([{"1": [1, {}]}, 0, "", [[]], last]):
            topic = engine.topic(f"{name!r} {number}".replace("\x00", ""))
            with xl.SharedMap(topic, key, value) as writer:
                writer.put(name, item)
                got = writer.get(name)
                writer.snapshot()
                with xl.SharedMap(topic, key, value) as reopened:
                    assert difference(got, reopened.get(name)) is None
                    assert writer.list_keys() == reopened.list_keys() == [name]
                    assert difference(got, item) is None


REFUSED: dict[str, tuple[Codec, Any, str]] = {
    "json, a number as key": (
        {"encode_state": by_json, "decode_state": json.loads},
        (5, 2),
        r"key int 5 does not come",
    ),
    "msgpack, a tuple": (
        {"encode_state": PACK, "decode_state": UNPACK},
        ("a", {"t": [1]}),
        "a tuple|tuple",
    ),
    "str": (CODECS["str"], ("a", 1), "state is dict .*, and comes back as str"),
    "it raises": ({"encode_state": by_json, "decode_state": json.loads}, ("a", b"x"), "not JSON"),
    "no bytes": ({"encode_state": str, "decode_state": str}, ("a", 1), "no bytes"),
}


def set_tuple(state: dict[Any, Any], op: Any) -> None:
    state[op[0]] = tuple(op[1]["t"]) if isinstance(op[1], dict) else op[1]


@pytest.mark.parametrize(("codec", "op", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_i4_a_snapshot_that_would_change_the_state_is_refused(
    topic: xl.Topic, codec: Codec, op: Any, told: str
) -> None:
    with xl.SharedState(topic, dict, set_tuple, **codec) as state:
        state.write(lambda _: [op])
        for _ in range(2):
            with pytest.raises(xl.StateError, match=f"no snapshot was kept.*{told}"):
                state.snapshot()
        before = state.read(lambda s: s)
        with topic.engine.ledger.read() as tables:
            assert tables.views.snapshot(topic.id) is None
        with xl.SharedState(topic, dict, set_tuple, **codec) as again:
            assert again.read(lambda s: s) == before


def test_i4_one_refused_in_the_background_is_told_once_in_the_foreground(topic: xl.Topic) -> None:
    """By the next call, which does nothing; the ones after it go on, without snapshots."""
    codec = {"encode_state": by_json, "decode_state": json.loads}
    with xl.SharedState(topic, dict, set_key, snapshot_every=3, **codec) as state:
        for number in range(3):
            state.write(lambda _, number=number: [(number, number)])
        until(lambda: state._snapshots.refused is not None)
        with pytest.raises(xl.StateError, match="This call did nothing") as refused:
            state.write(lambda _: [("never", 1)])
        assert not refused.value.maybe_written
        for number in range(3, 20):
            state.write(lambda _, number=number: [(number, number)])
        assert state.read(dict) == {number: number for number in range(20)}
    assert topic.next_offset == 20


def test_i4_a_snapshot_of_before_is_read_with_the_codec_of_the_operations(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """As it was written until the state had a codec of its own."""
    codec = {"encode": by_json, "decode": json.loads}
    with xl.SharedState(topic, dict, set_key, **codec) as state:
        state.write(lambda _: [("a", 1)])
    engine.backend.snapshot(topic.id, 1, [(None, by_json({"a": 2}))])
    with xl.SharedState(topic, dict, set_key, **codec) as state:
        assert state.read(dict) == {"a": 2}


def test_i4_a_snapshot_of_another_codec_is_named(topic: xl.Topic) -> None:
    codec = {"encode_state": to_text, "decode_state": from_text}
    with xl.SharedState(topic, dict, set_key, **codec) as state:
        state.write(lambda _: [("a", 1)])
        topic.trim(before=state.snapshot())
    with pytest.raises(xl.StateError, match=r"another codec \(own\)"):
        xl.SharedState(topic, dict, set_key)
    with xl.SharedState(topic, dict, set_key, **codec) as state:
        assert state.read(dict) == {"a": 1}


@pytest.mark.parametrize("given_", ["encode_state", "decode_state"])
def test_a4_the_codec_of_a_state_has_two_sides(topic: xl.Topic, given_: str) -> None:
    with pytest.raises(TypeError, match="encode_state and decode_state"):
        xl.SharedState(topic, dict, set_key, **{given_: PACK})


def test_g1_exact_gives_back_what_it_was_given() -> None:
    value = {
        1: (1, (2,)),
        "s": {1, "a"},
        (1, b"x"): frozenset({(1,)}),
        None: 2**100,
        "i": -(2**80),
        2.5: dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        b"d": dt.date(2026, 1, 2),
        "t": dt.time(1, 2),
        "p": dt.timedelta(days=-1, microseconds=3),
        "m": decimal.Decimal("1.10"),
        "c": 1 + 2j,
        "n": float("nan"),
        "l": [[], {}, ()],
    }
    assert difference(value, xl.serde.exact.loads(xl.serde.exact.dumps(value))) is None

    class Odd(dict):  # type: ignore[type-arg]
        pass

    for odd in (object(), Odd(), [Odd()], {1: range(3)}):
        with pytest.raises(TypeError, match="exact does not take"):
            xl.serde.exact.dumps(odd)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({1: 2}, {True: 2}),
        ({1}, {1.0}),
        ({"a": 1}, {}),
        ({}, {"a": 1}),
        ([1], [1, 2]),
        ({"a": {"b": [0]}}, {"a": {"b": [False]}}),
        ("a", b"a"),
        (object(), object()),
    ],
)
def test_i4_what_differs_only_in_type_differs(a: Any, b: Any) -> None:
    assert difference(a, b) is not None
    assert difference(a, a) is None


# ---- views -------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], object]] = {
    "a key": lambda s: s.__setitem__("new", 1),
    "a deletion": lambda s: s.__delitem__("a"),
    "update": lambda s: s.update(a=2),
    "clear": lambda s: s.clear(),
    "setdefault": lambda s: s.setdefault("z", 1),
    "inside": lambda s: s["d"].__setitem__("x", 5),
    "an item": lambda s: s["l"].append(5),
    "an item in a tuple": lambda s: s["t"][0].append(5),
    "by values": lambda s: next(iter(s["n"].values())).append(1),
    "by items": lambda s: dict(s.items())["l"].append(1),
    "in place": lambda s: s["s"].add(9),
    "an attribute": lambda s: setattr(s, "over", False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_i3_a_view_cannot_be_changed(change: Callable[[Any], object]) -> None:
    def made() -> dict[str, Any]:
        return {"a": 1, "d": {"x": 1}, "l": [1], "t": ([1], 2), "s": {1}, "n": {"m": [0]}}

    state = made()
    with Scope() as scope, pytest.raises((TypeError, AttributeError)):
        change(scope.view(state))
    assert state == made()


def test_i3_a_view_reads_as_what_it_shows_and_objects_are_copied() -> None:
    class Job:
        def __init__(self) -> None:
            self.tries = [0]

    state = {"a": [1, 2, {"b": 3}], "s": {1, 2}, "job": Job(), "t": (1, [2])}
    with Scope() as scope:
        seen = scope.view(state)
        assert (len(seen), list(seen), "a" in seen, seen.get("z", 9)) == (4, list(state), True, 9)
        assert seen["a"] == [1, 2, {"b": 3}]
        assert (seen["a"][-1]["b"], seen["a"][:2], seen["a"] + [4]) == (
            3,
            [1, 2],
            [1, 2, {"b": 3}, 4],
        )
        assert seen["s"] & {2, 3} == {2}
        assert (seen["t"][0], list(seen["t"][1])) == (1, [2])
        assert ([2] in [seen["t"][1]], seen["a"] != [1], sorted(seen["s"])) == (True, True, [1, 2])
        seen["job"].tries.append(1)
        assert state["job"].tries == [0]  # type: ignore[attr-defined]
        kept = seen["a"].copy()
        plain = thaw({"x": seen["a"], "y": (seen["s"], 1)})
        assert repr(seen["a"]) == "[1, 2, {'b': 3}]"
    kept.append(4)
    assert state["a"] == [1, 2, {"b": 3}]
    assert plain == {"x": [1, 2, {"b": 3}], "y": ({1, 2}, 1)}
    for use in (len, list, bool, lambda s: s["a"], lambda s: s == {}, lambda s: s.copy()):
        with pytest.raises(RuntimeError, match="view of the state has expired"):
            use(seen)


def test_i3_what_an_operation_takes_from_the_state_is_made_plain(topic: xl.Topic) -> None:
    with xl.SharedState(topic, dict, set_key) as state:
        state.write(lambda _: [("a", {"x": [1]})])
        state.write(lambda now: [("b", now["a"]), ("c", [now["a"]["x"], 1])])
        assert state.read(lambda now: (now["b"], now["c"])) == ({"x": [1]}, [[1], 1])
        assert state.read(lambda now: [now])[0] == state.read(lambda now: now)


def test_i3_reading_copies_nothing(topic: xl.Topic) -> None:
    """Neither the state nor any part of it that is a dict, list or set."""
    copies: list[object] = []

    def copy(item: Any) -> Any:
        copies.append(item)
        return item

    with xl.SharedState(topic, dict, set_key, copy=copy) as state:
        state.write(lambda _: [(number, [number]) for number in range(1000)])
        assert state.read(lambda now: now[500][0]) == 500
        state.write(lambda now: [(5, now[5][0] + 1)], lambda now: now[5])
        assert copies == []


def test_i3_an_operation_that_is_not_encoded_to_bytes_is_refused(topic: xl.Topic) -> None:
    for encode in (str, lambda op: None):
        with xl.SharedState(topic, dict, set_key, encode=encode, decode=from_text) as state:
            with pytest.raises(TypeError, match="must give bytes"):
                state.write(lambda _: [("a", 1)])
    with xl.SharedState(
        topic, dict, set_key, encode=lambda op: bytearray(to_text(op)), decode=from_text
    ) as state:
        assert state.write(lambda _: [("a", 1)], dict) == {"a": 1}
    assert topic.next_offset == 1


# ---- a map that other serialisers wrote --------------------------------------------------


@pytest.mark.rule("I3")
def test_a_value_of_a_map_that_cannot_be_deserialised_is_named(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"\xc1", key="k")
    with xl.SharedMap(topic) as settings:
        for read in (
            lambda: settings["k"],
            lambda: settings.get("k"),
            lambda: settings.get_or_default("k", 1),
            lambda: settings.scan(),
            lambda: settings.update("k", lambda _: 1),
            lambda: settings.replace("k", 1, 2),
            lambda: next(iter(settings.watch(start=0))),
        ):
            with pytest.raises(xl.DeserializationError, match="value") as raised:
                read()
            assert (raised.value.topic, raised.value.part) == (topic.name, "value")
            assert raised.value.raw == b"\xc1"
        assert topic.next_offset == 1
        with pytest.raises(xl.DeserializationError) as raised:
            settings.put("k", 5)
        assert raised.value.maybe_written
        assert settings["k"] == 5


@pytest.mark.rule("I3")
def test_a_key_of_a_map_that_cannot_be_deserialised_is_named(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"\x05", key=b"\xff")
    with xl.SharedMap(topic) as settings:
        for read in (settings.list_keys, settings.scan, lambda: dict(settings)):
            with pytest.raises(xl.DeserializationError, match="key") as raised:
                read()
            assert (raised.value.part, raised.value.raw) == ("key", b"\xff")
