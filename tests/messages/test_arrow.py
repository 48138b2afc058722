"""Arrow in and out: the same messages as one by one, wherever a reader stands (rules G1, G5)."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core, messages
from testing.children import finish
from testing.entries import encode
from testing.journals import never_pack, no_checkpoints
from testing.patience import PATIENCE

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.once

VALUES = [b"", b"a", None, b"\x00\xff", b"x" * 5000, None, b"last"]
TEXTS = ["", "a", None, "é", "x" * 5000, None, "last"]
AS_BYTES = [None if text is None else text.encode() for text in TEXTS]
STAMP = pa.timestamp("us", "UTC")


def values(topic: xl.Topic) -> list[bytes | None]:
    return [message.value for message in topic.reader()]


def keys(topic: xl.Topic) -> list[bytes | None]:
    return [message.key for message in topic.reader()]


# ---- in ----------------------------------------------------------------------------------

ARRAYS: dict[str, tuple[Callable[[], Any], list[bytes | None]]] = {
    "binary": (lambda: pa.array(VALUES, pa.binary()), VALUES),
    "large binary": (lambda: pa.array(VALUES, pa.large_binary()), VALUES),
    "string": (lambda: pa.array(TEXTS, pa.string()), AS_BYTES),
    "large string": (lambda: pa.array(TEXTS, pa.large_string()), AS_BYTES),
    "fixed size": (lambda: pa.array([b"abc", None, b"def"], pa.binary(3)), [b"abc", None, b"def"]),
    "sliced": (lambda: pa.array(VALUES, pa.binary())[2:6], VALUES[2:6]),
    "sliced twice": (lambda: pa.array(VALUES * 3, pa.binary())[5:][3:11], (VALUES * 3)[8:16]),
    "sliced strings": (lambda: pa.array(TEXTS, pa.string())[1:4], AS_BYTES[1:4]),
    "sliced large": (lambda: pa.array(VALUES, pa.large_binary())[3:], VALUES[3:]),
    "sliced fixed size": (
        lambda: pa.array([b"abc", None, b"def"], pa.binary(3))[1:],
        [None, b"def"],
    ),
    "chunked": (lambda: pa.chunked_array([VALUES[:3], [], VALUES[3:]], pa.binary()), VALUES),
    "chunked strings": (lambda: pa.chunked_array([TEXTS[:1], TEXTS[1:]], pa.string()), AS_BYTES),
    "chunked and sliced": (
        lambda: pa.chunked_array([VALUES, VALUES], pa.binary())[5:9],
        [*VALUES[5:], *VALUES[:2]],
    ),
    "one chunk": (lambda: pa.chunked_array([VALUES], pa.binary()), VALUES),
    "all null": (lambda: pa.array([None] * 9, pa.binary()), [None] * 9),
    "no nulls": (lambda: pa.array([b"a", b"b"], pa.binary()), [b"a", b"b"]),
    "no bytes": (lambda: pa.array([b"", b""], pa.binary()), [b"", b""]),
}

EMPTY: dict[str, Callable[[], Any]] = {
    "binary": lambda: pa.array([], pa.binary()),
    "string": lambda: pa.array([], pa.string()),
    "large": lambda: pa.array([], pa.large_binary()),
    "fixed size": lambda: pa.array([], pa.binary(4)),
    "slice": lambda: pa.array(VALUES, pa.binary())[3:3],
    "slice at the end": lambda: pa.array(VALUES, pa.binary())[7:],
    "chunks": lambda: pa.chunked_array([], pa.binary()),
    "empty chunks": lambda: pa.chunked_array([[], []], pa.string()),
    "no offsets": lambda: pa.Array.from_buffers(pa.binary(), 0, [None, None, pa.py_buffer(b"")]),
    "empty buffers": lambda: pa.Array.from_buffers(
        pa.binary(), 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")]
    ),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("most", [100_000, 2])
def test_g1_an_array_of_values_is_sent(engine, topic, kind, most) -> None:
    make, expected = ARRAYS[kind]
    with topic.producer(max_batch_messages=most) as producer:
        assert producer.send_many(make()) == range(len(expected))
    assert values(topic) == expected
    assert engine.verify().ok


@pytest.mark.parametrize("kind", ARRAYS)
def test_g1_an_array_of_keys_is_sent(topic, kind) -> None:
    make, expected = ARRAYS[kind]
    with topic.producer(max_batch_messages=3) as producer:
        producer.send_many([b"v"] * len(expected), keys=make())
        producer.send_many(pa.array([b"v"] * len(expected)), keys=make())
    assert keys(topic) == expected * 2


@pytest.mark.parametrize("kind", EMPTY)
def test_g1_an_empty_array_sends_nothing(topic, kind) -> None:
    with topic.producer() as producer:
        assert producer.send_many(EMPTY[kind]()) == range(0)
        assert producer.send_many([], keys=EMPTY[kind]()) == range(0)
    assert topic.next_offset == 0


def test_g1_bytes_under_a_null_are_not_seen(topic) -> None:
    """Arrow lets a null lie over bytes of its own."""
    array = pa.Array.from_buffers(
        pa.binary(),
        3,
        [
            pa.py_buffer(b"\x05"),
            pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 7, 8))),
            pa.py_buffer(b"asecretb"),
        ],
    )
    assert array.to_pylist() == [b"a", None, b"b"]
    with topic.producer() as producer:
        producer.send_many(array, keys=array)
    assert values(topic) == keys(topic) == [b"a", None, b"b"]
    batch = topic.reader().read_arrow(columns=["value", "key"])
    assert batch.to_pydict() == {"value": [b"a", None, b"b"], "key": [b"a", None, b"b"]}


WHEN = [0, None, -1, 1_700_000_000_123]


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process takes UTC for local time, which times without a zone are in."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC0")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    "times",
    [
        pa.array(WHEN, pa.timestamp("ms")),
        pa.array([None if w is None else w * 1000 for w in WHEN], pa.timestamp("us", "UTC")),
        pa.array([None if w is None else w * 1000 for w in WHEN], pa.timestamp("us", "+05:30")),
        pa.array(WHEN, pa.int64()),
        pa.chunked_array([WHEN[:1], WHEN[1:]], pa.timestamp("ms", "UTC")),
    ],
    ids=["naive", "utc", "zone", "ms", "chunked"],
)
def test_g1_a_record_batch_stands_for_values_keys_and_times(topic, times, in_utc) -> None:
    columns = {"other": [1] * 4, "key": ["a", None, "", "d"], "value": [b"0", b"1", None, b"3"]}
    table = pa.table({**columns, "event_time": times})
    with topic.producer() as producer:
        producer.send_many(table)
        if not isinstance(times, pa.ChunkedArray):
            producer.send_many(pa.record_batch({**columns, "event_time": times}))
    seen = [(m.key, m.value, m.event_time) for m in topic.reader()]
    expected = list(zip([b"a", None, b"", b"d"], columns["value"], WHEN, strict=True))
    assert seen == expected * (len(seen) // 4)


MAPS = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([[("a", "b")], None, []], MAPS), [{"a": "b"}, {}, {}]),
        (pa.array([[("x", "y")], [("a", "b")], None, []], MAPS)[1:], [{"a": "b"}, {}, {}]),
        (pa.array([{"a": "b"}, None, {"a": ""}]), [{"a": "b"}, {}, {"a": ""}]),
        (pa.nulls(3), [{}, {}, {}]),
    ],
    ids=["maps", "sliced", "structs", "null"],
)
def test_g1_a_record_batch_brings_its_properties(topic, column, expected) -> None:
    batch = pa.record_batch({"value": [b"0", b"1", b"2"], "properties": column})
    with topic.producer() as producer:
        producer.send_many(batch)
        producer.send_many(pa.table(batch.to_pydict(), batch.schema))
    assert [m.properties for m in topic.reader()] == expected * 2


def test_g1_what_read_arrow_gives_can_be_sent_as_it_is(topic, engine) -> None:
    with topic.producer() as producer:
        producer.send(b"1", key="k", properties={"a": "b"}, event_time=7)
        producer.send(None)
    copy = engine.topic("copy")
    with topic.reader() as reader, copy.producer() as producer:
        producer.send_many(reader.read_arrow())
    sent, copied = (
        [(m.key, m.value, m.properties, m.event_time) for m in each.reader()]
        for each in (topic, copy)
    )
    assert copied == sent


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.large_string(), pa.string()])
@pytest.mark.parametrize("chunks", [0, 3])
def test_g1_an_array_that_is_too_large_for_32_bit_offsets_is_sent(
    topic, monkeypatch, kind, chunks
) -> None:
    """Such an array of binary cannot be made from one of large_binary, nor from several. (Here it
    is too large already at 10 bytes: with 2 GiB, the test would need 7 GiB.)"""
    monkeypatch.setattr(messages, "MOST_ARROW_BYTES", 10)
    part = pa.array(["first", None, "second"], kind)
    column = pa.chunked_array([part] * chunks) if chunks else part
    with topic.producer() as producer:
        producer.send_many(column, keys=column)
    sent = [None if each is None else each.encode() for each in ("first", None, "second")]
    found = [(m.key, m.value) for m in topic.reader()]
    assert found == [(each, each) for each in sent] * max(chunks, 1)


def test_g1_columns_of_the_null_type_hold_nothing(topic) -> None:
    with topic.producer() as producer:
        producer.send_many(pa.record_batch({"value": pa.nulls(2), "key": pa.nulls(2)}))
        producer.send_many(pa.nulls(0))
    assert [(m.key, m.value) for m in topic.reader()] == [(None, None)] * 2


def test_g1_columns_given_beside_a_record_batch_come_first(topic) -> None:
    batch = pa.record_batch({"value": [b"v"], "key": [b"theirs"], "event_time": [1]})
    with topic.producer() as producer:
        producer.send_many(batch, keys=[b"mine"], event_times=[2])
        producer.send_many(batch.select(["value"]))
    assert [(m.key, m.event_time) for m in topic.reader()] == [(b"mine", 2), (None, None)]


WRONG = [
    ("values", lambda: {"values": pa.array([1, 2])}),
    ("values", lambda: {"values": pa.chunked_array([[1.5]])}),
    ("values", lambda: {"values": pa.record_batch({"other": [b"x"]})}),
    ("values", lambda: {"values": pa.record_batch({"value": [1]})}),
    ("keys", lambda: {"values": pa.array([b"x", b"y"]), "keys": pa.array([b"k"])}),
    ("keys", lambda: {"values": [b"x", b"y"], "keys": pa.array([1, 2])}),
    ("event_time", lambda: {"values": pa.record_batch({"value": [b"x"], "event_time": ["now"]})}),
    ("properties", lambda: {"values": pa.record_batch({"value": [b"x"], "properties": ["a=b"]})}),
    (
        "properties",
        lambda: {"values": pa.record_batch({"value": [b"x"], "properties": [{"a": 1}]})},
    ),
]


@pytest.mark.parametrize(("name", "make"), WRONG)
def test_g1_arrays_of_a_wrong_kind_are_refused_by_name(topic, name, make) -> None:
    with topic.producer() as producer:
        with pytest.raises((TypeError, ValueError), match=name):
            producer.send_many(**make())
        assert producer._sender.appender.pending_messages == 0
        assert producer.last_sequence_id == -1
    assert topic.next_offset == 0


def buffers(valid: bytes | None, offsets: list[int], data: bytes, count: int, shift: int) -> Any:
    packed = b"".join(number.to_bytes(4, "little", signed=True) for number in offsets)
    return valid, packed, data, shift, count


@pytest.mark.parametrize(
    ("valid", "offsets", "data", "count", "shift"),
    [
        (None, [0, 1], b"ab", 2, 0),
        (None, [0, 1, 2], b"ab", 2, 1),
        (None, [0, 3], b"ab", 1, 0),
        (None, [-1, 1], b"ab", 1, 0),
        (None, [2, 1], b"ab", 1, 0),
        (None, [0, 2, 1], b"ab", 2, 0),
        (b"", [0, 1], b"ab", 1, 0),
        (b"\xff", [0] * 10, b"", 9, 0),
        (None, [0, 1], b"ab", -1, 0),
        (None, [0, 1], b"ab", 1, -1),
        (None, [0, 2**31 - 1], b"ab", 1, 0),
        (None, [], b"", 0, 0),
    ],
)
def test_g1_an_array_that_lies_about_its_buffers_is_refused(
    valid, offsets, data, count, shift
) -> None:
    with pytest.raises(ValueError, match="values"):
        _core.arrow_strings(*buffers(valid, offsets, data, count, shift))


# ---- out ---------------------------------------------------------------------------------


def as_messages(batch: Any) -> list[tuple[Any, ...]]:
    """A RecordBatch as the message API would tell it, times in ms."""
    batch.validate(full=True)
    return [
        (
            row["offset"],
            row["epoch"],
            row["key"],
            row["value"],
            ms(row["publish_time"]),
            ms(row["event_time"]),
            row["producer"],
            row["sequence_id"],
            dict(row["properties"] or {}),
        )
        for row in batch.to_pylist()
    ]


def ms(time: dt.datetime | None) -> int | None:
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return None if time is None else (time - epoch) // dt.timedelta(milliseconds=1)


def facts(message: xl.Message) -> tuple[Any, ...]:
    return (
        message.offset,
        message.epoch,
        message.key,
        message.value,
        message.publish_time,
        message.event_time,
        message.producer_name,
        message.sequence_id,
        message.properties,
    )


@pytest.fixture(params=["entries", "packed", "frames"])
def mixed(request, monkeypatch, engine, topic) -> Iterator[xl.Topic]:
    """Entries of every shape: with and without keys, nulls, times, properties, gaps in their
    sequence ids; of two producers and epochs; small, large, and of one message each. As they
    were sent, in the tables; packed into few there; or still in the journal."""
    if request.param != "packed":
        never_pack(monkeypatch)
    with no_checkpoints(engine) if request.param == "frames" else contextlib.nullcontext():
        send_mixed(topic)
        engine.ledger.checkpoint()
        yield topic


def send_mixed(topic: xl.Topic) -> None:
    dice = random.Random(7)

    def some(make: Callable[[], Any], count: int) -> list[Any]:
        return [make() if dice.random() < 0.7 else None for _ in range(count)]

    for name in ("first", "zweiter"):
        with topic.producer("exclusive", name=name, max_batch_messages=64, linger=5) as producer:
            for shape in range(32):
                count = dice.choice([1, 2, 9, 17, 150])
                producer.send_many(
                    some(lambda: dice.randbytes(dice.randrange(9)), count),
                    keys=some(lambda: dice.randbytes(3), count) if shape & 1 else None,
                    event_times=(
                        some(lambda: dice.randrange(-(10**12), 10**12), count)
                        if shape & 2
                        else None
                    ),
                    properties=some(lambda: {"a": "é", "b": ""}, count) if shape & 4 else None,
                    sequence_id=producer.last_sequence_id + 5 if shape & 8 else None,
                )
            for number in range(20):
                producer.send_async(b"x", sequence_id=producer.last_sequence_id + 1 + number % 3)


def test_g5_arrow_says_what_the_messages_say(mixed) -> None:
    expected = [facts(message) for message in mixed.reader()]
    reader, seen = mixed.reader(), []
    while (batch := reader.read_arrow(max_bytes=3000)) is not None:
        seen += as_messages(batch)
        assert reader.position == len(seen)
    assert seen == expected
    assert as_messages(mixed.reader().read_arrow(max_bytes=1 << 30)) == expected


@pytest.mark.long
def test_g5_arrow_begins_in_the_middle_of_an_entry(mixed) -> None:
    """Every column is cut at the same message: validity bitmaps at a bit, offsets and times at
    a number."""
    expected = [facts(message) for message in mixed.reader()]
    reader = mixed.reader()
    for start in [*range(200), *range(200, len(expected), 7), len(expected) - 1]:
        reader.seek(start)
        batch = reader.read_arrow(max_bytes=1)
        assert as_messages(batch) == expected[start : start + batch.num_rows]
        assert reader.position == start + batch.num_rows
    reader.seek(33)
    assert as_messages(reader.read_arrow(max_bytes=1 << 30)) == expected[33:]


def test_g5_arrow_and_messages_can_take_turns(mixed) -> None:
    expected = [facts(message) for message in mixed.reader()]
    reader, seen, dice = mixed.reader(), [], random.Random(2)
    while len(seen) < len(expected):
        seen += [facts(m) for m in reader.read_batch(dice.randrange(1, 100))]
        batch = reader.read_arrow(max_bytes=dice.choice([1, 5000]))
        seen += [] if batch is None else as_messages(batch)
    assert seen == expected
    assert reader.read_arrow() is None
    assert not reader.has_message_available()


@pytest.mark.parametrize(
    "chosen",
    [
        ["value"],
        ["offset", "value"],
        ["value", "offset"],
        ["properties"],
        ["event_time", "key"],
        ("producer", "sequence_id", "epoch", "publish_time"),
    ],
)
def test_g5_arrow_gives_the_columns_that_are_asked_for(mixed, chosen) -> None:
    everything = mixed.reader(10).read_arrow(max_bytes=1 << 30)
    batch = mixed.reader(10).read_arrow(max_bytes=1 << 30, columns=chosen)
    assert batch.schema.names == list(chosen)
    assert batch.equals(everything.select(list(chosen)))


def test_g5_arrow_columns_have_one_type_whatever_the_entries_hold(request, engine, mixed) -> None:
    reader, schemas = mixed.reader(), []
    while (batch := reader.read_arrow(max_bytes=1)) is not None:
        schemas.append(batch.schema)
    where = request.node.callspec.params["mixed"]
    if where == "frames":  # those that go together are packed as they are read
        assert 30 < len(schemas) < engine.verify().entries
    else:
        assert len(schemas) == engine.verify().entries
        assert (len(schemas) > 60) == (where == "entries")
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert {field.name: str(field.type) for field in schemas[0]} == {
        "offset": "int64",
        "epoch": "int64",
        "key": "binary",
        "value": "binary",
        "publish_time": str(STAMP),
        "event_time": str(STAMP),
        "producer": "string",
        "sequence_id": "int64",
        "properties": "map<string, string>",
    }


def test_g5_arrow_asked_for_what_is_not_there_says_so(topic) -> None:
    reader = topic.reader()
    assert reader.read_arrow() is None
    with topic.producer() as producer:
        producer.send(b"x")
    for wrong in (["nothing"], "value", ["value", "Key"]):
        with pytest.raises(ValueError, match="columns"):
            reader.read_arrow(columns=wrong)
    assert reader.position == 0


@pytest.mark.parametrize("most", [0, -1])
def test_g5_arrow_does_not_say_end_where_there_is_more(topic, most) -> None:
    """None means the end: a limit too low for anything must not be taken for it."""
    with topic.producer() as producer:
        producer.send(b"x")
    reader = topic.reader()
    try:
        assert reader.read_arrow(max_bytes=most) is not None
    except ValueError as error:
        assert "max_bytes" in str(error)  # noqa: PT017  either answer is honest


@pytest.mark.parametrize("time", [2**53, -(2**53), 2**62, 2**63 - 1, -(2**63)])
def test_g5_arrow_never_tells_another_time_than_the_message(topic, time) -> None:
    """ms of 64 bits are not always us of 64 bits: such a time may be refused, when it is sent
    or when it is read as Arrow, but not turned into another."""
    reader = topic.reader()
    try:
        with topic.producer() as producer:
            producer.send(b"x", event_time=time)
        batch = reader.read_arrow(columns=["event_time"])
    except (ValueError, TypeError, OverflowError):
        return
    assert reader.position == 1
    assert batch.column(0).cast(pa.int64()).to_pylist() == [time * 1000]


def test_g5_a_batch_outlives_its_reader_and_its_engine(path) -> None:
    with xl.open(path) as engine:
        topic = engine.topic("t")
        with topic.producer() as producer:
            producer.send_many([b"%d" % n for n in range(1000)])
        batch = topic.reader(5).read_arrow()
    del engine, topic
    assert batch.column("value").to_pylist() == [b"%d" % n for n in range(5, 1000)]


def test_g5_a_large_entry_is_wrapped_not_copied(topic) -> None:
    with topic.producer(max_batch_bytes=1 << 26) as producer:
        producer.send_many([bytes(1000)] * 10_000)
    before = pa.total_allocated_bytes()
    batch = topic.reader(3).read_arrow(columns=["value"])
    assert batch.num_rows == 9997
    assert pa.total_allocated_bytes() - before < 100_000


@pytest.mark.long
def test_g5_a_batch_of_more_than_an_array_can_hold_loses_nothing() -> None:
    """An Arrow array of binary ends at 2 GiB; larger reads must not end there in silence. In a
    process of its own, with the same entry again and again: it takes memory."""
    output = finish(
        """
        import os
        import pyarrow as pa
        from exclusivelog import _core
        from exclusivelog.messages import record_batch
        from testing.entries import values

        if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 << 30:
            print("too little memory")
        else:
            entry = _core.Entry(values([bytes(1 << 16)] * 2048))
            try:
                print(record_batch([(entry, 0)] * 17, ("value",)).num_rows)
            except (pa.ArrowInvalid, OverflowError, ValueError):
                print("refused")
        """,
        timeout=PATIENCE,
    )
    assert output.strip() in (str(17 * 2048), "refused", "too little memory")


# ---- and back again ----------------------------------------------------------------------


def test_g1_what_was_read_as_arrow_can_be_sent_as_it_is(engine, mixed) -> None:
    copy = engine.topic("copy")
    reader = mixed.reader(17)
    with copy.producer() as producer:
        while (batch := reader.read_arrow(max_bytes=5000)) is not None:
            producer.send_many(batch)
    parts = [(m.value, m.key, m.event_time) for m in mixed.reader(17)]
    assert [(m.value, m.key, m.event_time) for m in copy.reader()] == parts


def test_g5_arrow_from_an_entry_made_by_hand() -> None:
    from exclusivelog.messages import COLUMNS, record_batch

    rows = [(b"%d" % n, None, None, n if n % 2 else None, None) for n in range(20)]
    entry = _core.Entry(encode(rows))
    for start in range(20):
        batch = record_batch([(entry, start)], COLUMNS)
        batch.validate(full=True)
        assert batch.column("value").to_pylist() == [row[0] for row in rows[start:]]
        assert [ms(t) for t in batch.column("event_time").to_pylist()] == [
            row[3] for row in rows[start:]
        ]


def test_arrow_is_not_imported_until_it_is_needed() -> None:
    source = "import sys, exclusivelog; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=PATIENCE)


def test_g1_arrow_has_bytes_whatever_the_deserializers(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"[1]", b"wrong"], keys=["7", "x"])
    reader = topic.reader(deserializer="json", key_deserializer=int)
    batch = reader.read_arrow(columns=["key", "value"])
    assert batch.to_pydict() == {"key": [b"7", b"x"], "value": [b"[1]", b"wrong"]}


# ---- a reader as a table ---------------------------------------------------------------------


@pytest.mark.rule("G5")
def test_a_reader_is_a_table_of_what_read_arrow_returns(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many(VALUES, keys=["k", None, "", "x", "y", "z", "k"])
        producer.send(b"single", key="k", properties={"a": "b"}, event_time=5)
        producer.send_many([b"%d" % number for number in range(5000)])
    table = pa.table(topic.reader())
    batches = []
    reader = topic.reader()
    while (batch := reader.read_arrow()) is not None:
        batches.append(batch)
    assert table.equals(pa.Table.from_batches(batches))
    assert table["value"].to_pylist() == values(topic)
    assert table["key"].to_pylist() == keys(topic)


def test_a_topic_without_messages_is_an_empty_table(topic: xl.Topic) -> None:
    table = pa.table(topic.reader())
    assert (table.num_rows, tuple(table.column_names)) == (0, messages.COLUMNS)
    with topic.producer() as producer:
        producer.send(b"x")
    assert pa.table(topic.reader()).schema == table.schema


def test_it_goes_on_where_the_reader_is_and_ends_where_the_topic_did(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % number for number in range(10)])
        reader = topic.reader(4)
        stream = pa.RecordBatchReader.from_stream(reader)
        producer.send_many([b"later"] * 1000)  # an entry of its own, which is not read
        assert stream.read_all()["offset"].to_pylist() == list(range(4, 10))
        assert reader.position == 10
        assert pa.table(reader).num_rows == 1000


def test_an_error_at_its_end_is_raised_by_the_consumer(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"a", b"b", b"c"])
    stream = pa.RecordBatchReader.from_stream(reader := topic.reader())
    topic.trim(before=2)
    with pytest.raises((OSError, pa.ArrowException, xl.OffsetTrimmedError), match="trimmed"):
        stream.read_all()
    assert reader.position == 0
    reader.close()
    with pytest.raises(xl.EngineClosedError):
        pa.table(reader)


def test_pandas_gets_columns_of_it(topic: xl.Topic) -> None:
    pytest.importorskip("pandas")
    with topic.producer() as producer:
        producer.send_many([b"a", b"b"], keys=["x", "y"])
    frame = pa.table(topic.reader()).to_pandas()
    assert list(frame["value"]) == [b"a", b"b"]
    assert str(frame["offset"].dtype) == "int64"


@pytest.mark.long
@pytest.mark.parametrize("library", ["polars", "duckdb"])
def test_libraries_that_take_arrow_streams_get_columns(topic: xl.Topic, library: str) -> None:
    other: Any = importlib.import_module(library)  # of the extra [test]: nothing to skip
    with topic.producer() as producer:
        producer.send_many([b"a", b"b"], keys=["x", "y"])
    reader = topic.reader()
    if library == "polars":
        assert other.DataFrame(reader)["value"].to_list() == [b"a", b"b"]
    else:
        assert other.sql("select value from reader order by value").fetchall() == [(b"a",), (b"b",)]


# ---- while it is imported ------------------------------------------------------------------


@pytest.mark.parametrize("there", [(), ("Array",)])
def test_a_send_goes_on_while_another_thread_imports_it(topic, monkeypatch, there) -> None:
    """The module is known at once, and has its classes later."""
    partly = types.ModuleType("pyarrow")
    for name in there:
        setattr(partly, name, getattr(pa, name))
    monkeypatch.setitem(sys.modules, "pyarrow", partly)
    with topic.producer() as producer:
        assert producer.send_many([b"a", b"b"]) == range(2)
