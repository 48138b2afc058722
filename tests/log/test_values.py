"""`reader.values()` yields the same values as iterating over the reader, and leaves the position
after the last one: for all kinds of entries, and wherever the loop is left."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import exclusivelog as xl
from exclusivelog import _core
from testing.children import finish
from testing.journals import no_checkpoints
from testing.processes import PATIENCE

pytestmark = [pytest.mark.once, pytest.mark.rule("G5")]
names = itertools.count()


def rest(reader: xl.Reader) -> list[Any]:
    return [message.value for message in reader]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[xl.Engine]:
    path = Path(tmp_path_factory.mktemp("values")) / "ledger"
    with xl.open(str(path), name="values", durability="process") as engine:
        yield engine


# ---- the same values ---------------------------------------------------------------------

batches = st.lists(st.sampled_from([1, 1, 2, 3, 10, 100, 1000]), min_size=1, max_size=8)
FILTERS: list[dict[str, Any]] = [
    {},
    {"trimmed": "earliest"},
    {"read_compacted": True},
    {"deserializer": "str"},
    {"read_compacted": True, "trimmed": "earliest", "deserializer": "str"},
]
# Of a walk: where it seeks to (None: it stays), how many values it takes, and what takes them.
steps = st.lists(
    st.tuples(
        st.none() | st.integers(0, 1200),
        st.integers(0, 40) | st.none(),
        st.sampled_from(["values", "values", "messages", "next", "batch", "entry"]),
    ),
    max_size=8,
)


def fill(engine: xl.Engine, sizes: list[int], seed: int, trim: bool, compact: bool) -> xl.Topic:
    """A topic of entries of these sizes, some still in the journal."""
    topic = engine.topic(f"t{next(names)}")
    chance = random.Random(seed)
    nothing = chance.random() < 0.5  # are there tombstones?
    with topic.producer() as producer:
        for number, size in enumerate(sizes):
            values = [
                None if nothing and chance.random() < 0.2 else b"%d.%d" % (number, at)
                for at in range(size)
            ]
            producer.send_many(values, keys=[f"k{chance.randrange(50)}" for _ in values])
            if chance.random() < 0.3:
                engine.ledger.checkpoint()
    if compact:
        topic.compact()
    if trim:
        topic.trim(before=chance.randrange(sum(sizes) + 1))
    return topic


def walk(reader: xl.Reader, walked: list[Any], by_value: bool) -> list[Any]:
    """What the steps of a walk gave, with the position behind each: by value, or by message."""
    found: list[Any] = []
    for start, most, kind in walked:
        if start is not None:
            reader.seek(start)
        if kind == "values":
            count = 0
            values = reader.values() if by_value else (m.value for m in reader)
            while count != most:  # before one is taken, not behind it
                for value in values:
                    found.append((value, reader.position))
                    count += 1
                    break
                else:
                    break
        elif kind == "messages":
            found += [m.value for m, _ in zip(reader, range(most or 3), strict=False)]
        elif kind == "next" and reader.has_message_available():
            found.append(reader.read_next(0).value)
        elif kind == "batch":
            found += [m.value for m in reader.read_batch(most or 3)]
        elif kind == "entry" and (taken := reader.cursor.take_entry()) is not None:
            found.append(taken[1])
        found.append(reader.position)
    return found


@pytest.mark.long
@given(
    sizes=batches,
    seed=st.integers(0, 1 << 20),
    walked=steps,
    options=st.sampled_from(FILTERS),
    trim=st.booleans(),
    compact=st.booleans(),
)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_are_those_of_the_messages(
    ledger, sizes, seed, walked, options, trim, compact
) -> None:
    """Also those that another way of reading gives in between, and each position on the way."""
    found = []
    with no_checkpoints(ledger):
        topic = fill(ledger, sizes, seed, trim, compact)
        for by_value in (True, False):
            with topic.reader(**options) as reader:
                try:
                    found.append(walk(reader, [*walked, (None, None, "values")], by_value))
                except xl.OffsetTrimmedError:
                    found.append([reader.position])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {"group": "g"}])
def test_a_loop_that_is_left_continues_behind_the_last_value(topic, options) -> None:
    with topic.producer(max_batch_messages=3) as producer:
        producer.send_many([b"%d" % number for number in range(10)])
    with topic.reader(**options) as reader:
        for value in reader.values():
            if value == b"4":
                break
        assert reader.position == 5
        assert next(iter(reader)).offset == 5
        reader.seek(8)
        assert list(reader.values()) == [b"8", b"9"]
        assert list(reader.values()) == []


def test_two_walks_of_one_reader_share_its_position(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % number for number in range(6)])
    reader = topic.reader()
    values, messages = reader.values(), iter(reader)
    assert [next(values), next(messages).value, next(values)] == [b"0", b"1", b"2"]
    reader.seek(5)
    assert next(values) == b"5"
    reader.seek(1)
    assert [*values] == [b"%d" % number for number in range(1, 6)]


def test_values_end_at_the_end_as_it_was(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2"])
        reader = topic.reader()
        values = reader.values()
        producer.send(b"3")
        assert list(values) == [b"1", b"2"]
        assert list(reader.values()) == [b"3"]


# ---- following ---------------------------------------------------------------------------


def test_values_that_are_followed_wait_at_the_end(topic) -> None:
    producer = topic.producer()
    producer.send_many([b"1", b"2"])
    with topic.reader() as reader:
        values = reader.values(follow=True, timeout=PATIENCE)
        found = [next(values), next(values)]
        producer.send(b"3")
        found.append(next(values))
        producer.close()
        topic.terminate()
        assert [*found, *values] == [b"1", b"2", b"3"]
        assert reader.position == 3
        assert list(reader.values(follow=True, timeout=0)) == []


@pytest.mark.parametrize("wrong", [{"timeout": -1, "follow": True}, {"timeout": 1.0}])
def test_a_timeout_is_refused_where_nothing_waits(topic, engine, wrong) -> None:
    with topic.reader() as reader, pytest.raises(ValueError, match="timeout"):
        reader.values(**wrong)
    with engine.reader(["orders"], group="g") as both, pytest.raises(ValueError, match="timeout"):
        both.values(**wrong)


# ---- what can go wrong -------------------------------------------------------------------


@pytest.mark.parametrize("follow", [False, True])
def test_a_value_that_cannot_be_deserialised_is_named_and_passed(topic, follow) -> None:
    """The reader stands behind it, and the next call goes on there."""
    with topic.producer() as producer:
        producer.send_many([b"1", b"wrong", b"3"])
    options = {"follow": True, "timeout": 0.0} if follow else {}
    with topic.reader(deserializer="json") as reader:
        found: list[Any] = []
        with pytest.raises(
            xl.DeserializationError, match="'orders': the value at offset 1"
        ) as caught:
            found.extend(reader.values(**options))
        error = caught.value
        assert (error.topic, error.offset, error.part, error.raw) == (
            "orders",
            1,
            "value",
            b"wrong",
        )
        assert isinstance(error.__cause__, json.JSONDecodeError)
        assert (found, reader.position) == ([1], 2)
        assert list(reader.values(**options)) == [3]
        reader.seek(error.offset)
        with pytest.raises(xl.DeserializationError):
            list(reader.values(**options))


def test_one_iterator_of_values_goes_on_behind_what_cannot_be_deserialised(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"wrong", b"2", b"", b"4"])
    values, found = topic.reader(deserializer="json").values(), []
    for _ in range(4):
        try:
            found.append(next(values))
        except xl.DeserializationError as error:
            found.append(error.raw)
    assert found == [b"wrong", 2, b"", 4]
    assert next(values, None) is None


def test_a_value_that_is_interrupted_is_read_again(topic) -> None:
    """It was not given, and is not to blame: also one that came while the reader waited."""
    interrupted: list[bytes] = []

    def loads(data: bytes) -> bytes:
        if data not in interrupted:
            interrupted.append(data)
            raise KeyboardInterrupt
        return data

    with topic.producer() as producer:
        producer.send_many([b"1", b"2"])
    reader = topic.reader(deserializer=loads)
    with pytest.raises(KeyboardInterrupt):
        next(reader.values())
    assert reader.position == 0
    assert next(reader.values()) == b"1"
    with pytest.raises(KeyboardInterrupt):
        reader._value_of(reader.read_next(0))
    assert reader.position == 1
    assert list(reader.values(follow=True, timeout=0)) == [b"2"]


def test_a_group_of_topics_passes_what_cannot_be_deserialised(engine) -> None:
    for name in "ab":
        with engine.topic(name).producer() as producer:
            producer.send_many([b"wrong", b"2"])
    with engine.reader(["a", "b"], group="g", deserializer="json") as reader:
        found, lost = [], []
        while reader.has_message_available():
            try:
                found.extend(reader.values())
            except xl.DeserializationError as error:
                lost.append((error.topic, error.offset))
        reader.commit()
        assert (sorted(found), lost) == ([("a", 2), ("b", 2)], [("a", 0), ("b", 0)])
    with engine.reader(["a", "b"], group="g") as reader:
        assert reader.positions == {"a": 2, "b": 2}


def test_a_deserializer_may_use_the_reader(topic) -> None:
    def loads(data: bytes) -> tuple[bytes, int]:
        if data == b"2":
            reader.seek(4)
        return data, reader.position

    with topic.producer(max_batch_messages=2) as producer:
        producer.send_many([b"%d" % number for number in range(6)])
    with topic.reader(deserializer=loads) as reader:
        assert list(reader.values()) == [(b"0", 1), (b"1", 2), (b"2", 4), (b"4", 5), (b"5", 6)]


def test_a_closed_reader_gives_no_more_values(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2", b"3"])
    for options in ({}, {"group": "g"}):
        reader = topic.reader(**options)
        values = reader.values()
        assert next(values) == b"1"
        reader.close()
        with pytest.raises(xl.EngineClosedError):
            next(values)
        with pytest.raises(xl.EngineClosedError):
            reader.values()


def test_values_that_were_trimmed_are_an_error_or_passed_over(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % number for number in range(10)])
        strict, lenient = topic.reader(), topic.reader(trimmed="earliest")
        topic.trim(before=7)
    with pytest.raises(xl.OffsetTrimmedError):
        list(strict.values())
    assert strict.position == 0
    assert list(lenient.values()) == [b"7", b"8", b"9"]


def test_values_are_made_by_a_reader_alone() -> None:
    with pytest.raises(TypeError, match="made by"):
        _core.Values()


@pytest.mark.long
def test_a_signal_handler_that_uses_the_reader_does_not_end_the_process(path: str) -> None:
    source = """
        import sys
        import exclusivelog as xl

        def use_it_inside(reader):
            cursor, inside = reader.cursor, []
            refill = cursor.refill

            def used():
                entries = refill()
                if entries and not inside:
                    inside.append(True)
                    for _ in zip(range(150), reader.values()):
                        pass
                    inside.clear()
                return entries

            cursor.refill = used

        with xl.open(sys.argv[1]) as engine:
            topic = engine.topic("t")
            with topic.producer() as producer:
                for _ in range(50):
                    producer.send_many([b"x"] * 100)
            reader = topic.reader()
            use_it_inside(reader)
            for _ in range(20):
                for _ in zip(range(400), reader.values()):
                    pass
                reader.seek(0)
        print("fine")
    """
    assert finish(source, path).strip() == "fine"


# ---- groups ------------------------------------------------------------------------------


def test_a_group_commits_where_the_values_ended(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2", b"3"])
    with topic.reader(group="g") as reader:
        assert next(reader.values()) == b"1"
        reader.commit()
    with topic.reader(group="g") as reader:
        assert list(reader.values()) == [b"2", b"3"]


def test_a_fenced_reader_gives_no_more_values(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2", b"3"])
    with topic.reader(group="g") as former:
        values = former.values()
        assert next(values) == b"1"
        with topic.reader(group="g"), pytest.raises(xl.ReaderFencedError):
            next(values)


def test_values_of_several_topics_come_in_turn(engine) -> None:
    for name, values in {"a": [b"1", None, b"3"], "b": [b"4"]}.items():
        with engine.topic(name).producer() as producer:
            producer.send_many(values)
    expected = [("a", b"1"), ("b", b"4"), ("a", None), ("a", b"3")]
    with engine.reader(["a", "b"], group="g") as reader:
        assert list(itertools.islice(reader.values(), 2)) == expected[:2]
        assert reader.positions == {"a": 1, "b": 1}
        assert list(reader.values(follow=True, timeout=0)) == expected[2:]
        engine.topic("b").producer().send(b"5")
        assert reader._value_of(reader.read_next(0)) == ("b", b"5")
        assert list(reader.values()) == []


# ---- a message's value -------------------------------------------------------------------


def test_every_attribute_of_a_message_is_found(topic) -> None:
    with topic.producer() as producer:
        producer.send(b"1", key="k")
    message = topic.reader(deserializer="json").read_next(0)
    assert (message.value, message.raw_value, message.key, message.offset) == (1, b"1", b"k", 0)
    assert getattr(message, "".join(["val", "ue"])) == 1  # another string of the same letters
    assert isinstance(type(message).__dict__["value"].__get__(message), int)
    for wrong in ("values", "valu", ""):
        with pytest.raises(AttributeError, match="Message"):
            getattr(message, wrong)
    with pytest.raises(AttributeError):
        message.value = 2


def test_a_deserializer_that_raises_stop_iteration_does_not_end_the_topic(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", b"2", b"", b"4"])
    reader = topic.reader(deserializer=lambda value: next(iter(value)))
    found: list[Any] = []
    with pytest.raises(xl.DeserializationError, match="StopIteration"):
        found.extend(reader.values())
    assert (found, reader.position) == ([ord("1"), ord("2")], 3)
