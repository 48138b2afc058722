"""Messages: checking and encoding them for the log, conversion to and from Arrow (without a copy
per message), and the items of shared states.

pyarrow is imported only if the caller passes or requests Arrow data.
"""

from __future__ import annotations

import datetime as dt
import functools
import operator
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgpack

from exclusivelog import _core
from exclusivelog.arguments import as_int

# ---- encoding --------------------------------------------------------------------------


MAX_SEQUENCE_ID = 2**63 - 1
MAX_MESSAGE_BYTES = 1 << 30
UNTIL = re.compile(r"[0-9]{1,16}")  # ms since 1970, as text
MAX_TIME = (2**63 - 1) // 1000  # ms; in microseconds, as in Arrow, this still fits 64 bits
Serializer = Callable[[Any], bytes]
Raw = tuple[bytes | None, bytes | None, bytes | None]  # key, value, properties
# value, key, properties, event time, sequence id
Encoded = tuple[bytes | None, bytes | None, bytes | None, int | None, int | None]


class Columns(NamedTuple):
    """Messages in columns, made by `_core.strings` and `arrow.arrow_column`. A column is None if no
    message has a value in it. `properties` are msgpack, `event_times` are ms since 1970."""

    values: _core.Strings
    keys: _core.Strings | None = None
    properties: _core.Strings | None = None
    event_times: list[int | None] | None = None

    def batch(self, appender: _core.Appender) -> _core.Batch:
        """Return a batch for the appender that sends it: it contains the producer's name."""
        return appender.make_batch(self.values, self.keys, self.properties, self.event_times)


def encode_message(
    value: Any,
    key: Any,
    properties: Any,
    event_time: Any,
    sequence_id: Any,
    dumps: Serializer | None,
) -> Encoded:
    """Encode one message; TypeError or ValueError for an invalid field."""
    if dumps is not None and value is not None:
        value = _dumped(dumps, value)
    if type(value) is not bytes and value is not None:
        value = _to_bytes(value)
    if value is not None and len(value) > MAX_MESSAGE_BYTES:
        raise _too_large("value", len(value))
    return (
        value,
        None if key is None else _encode_key(key),
        None if properties is None else _encode_properties(properties),
        None if event_time is None else _encode_time(event_time),
        None if sequence_id is None else encode_sequence(sequence_id),
    )


def encode_columns(
    values: Any, keys: Any, properties: Any, event_times: Any, dumps: Serializer | None
) -> Columns:
    """Encode messages that are given in columns, each an iterable or an Arrow array, or all in one
    RecordBatch; TypeError or ValueError for an invalid column."""
    values, keys, properties, event_times = _unpack_record_batch(
        values, keys, properties, event_times
    )
    column = arrow_column(values, "values") or _encode_values(values, dumps)
    if column.largest > MAX_MESSAGE_BYTES:
        raise _too_large("values", column.largest)
    key_column = packed = times = None
    if keys is not None:
        key_column = arrow_column(keys, "keys") or _core.strings(
            _encode_each(_encode_key, keys, "keys")
        )
        _check_length("keys", key_column.count, column.count)
    if properties is not None:
        packed = _encode_each(_encode_properties, properties, "properties")
        _check_length("properties", len(packed), column.count)
    if event_times is not None:
        times = _encode_each(_encode_time, event_times, "event_times")
        _check_length("event_times", len(times), column.count)
    return Columns(column, key_column, None if packed is None else _core.strings(packed), times)


def _dumped(dumps: Serializer, value: Any) -> bytes:
    """Return what the serializer returns. An error names the value."""
    try:
        return dumps(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"value={reprlib.repr(value)}: the serializer refuses it: {error}") from error


def _encode_values(values: Any, dumps: Serializer | None) -> _core.Strings:
    if isinstance(values, (bytes, bytearray, memoryview, str)) or not isinstance(values, Iterable):
        raise TypeError(f"values takes an iterable of messages, not {type(values).__name__}")
    if dumps is not None:
        values = (None if value is None else _dumped(dumps, value) for value in values)
    items = list(values)  # a copy: other threads may change the original meanwhile
    try:
        return _core.strings(items)
    except TypeError:  # not all are bytes; some may be bytes-like
        return _core.strings([None if item is None else _to_bytes(item) for item in items])


def _unpack_record_batch(
    values: Any, keys: Any, properties: Any, event_times: Any
) -> tuple[Any, Any, Any, Any]:
    schema = getattr(values, "schema", None)
    if schema is None or not hasattr(values, "column"):
        return values, keys, properties, event_times
    names = schema.names
    if "value" not in names:
        raise ValueError(f"values: a RecordBatch takes a column 'value'; this one has {names}")
    if keys is None and "key" in names:
        keys = values.column(names.index("key"))
    if properties is None and "properties" in names:
        given = values.column(names.index("properties")).to_pylist()
        properties = [dict(pairs) if isinstance(pairs, list) else pairs for pairs in given]
    if event_times is None and "event_time" in names:
        event_times = values.column(names.index("event_time")).to_pylist()
    return values.column(names.index("value")), keys, properties, event_times


def _encode_each(encode: Callable[[Any], Any], items: Any, name: str) -> list[Any]:
    if not isinstance(items, Iterable) or isinstance(items, (bytes, str)):
        raise TypeError(f"{name} takes an iterable, not {type(items).__name__}")
    return [encode(item) for item in items]


def _check_length(name: str, length: int, count: int) -> None:
    if length != count:
        raise ValueError(f"{name} has {length} items, values has {count}")


def _too_large(argument: str, size: int) -> ValueError:
    return ValueError(f"{argument} has {size} bytes; a message takes {MAX_MESSAGE_BYTES}")


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(
        f"value takes bytes or None, not {type(value).__name__}; or give the producer a serializer "
        "that returns bytes"
    )


def _encode_key(key: Any) -> bytes | None:
    if key is None:
        return None
    if isinstance(key, str):
        try:
            key = key.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"key={key!r} cannot be written as UTF-8") from error
    elif isinstance(key, (bytearray, memoryview)):
        key = bytes(key)
    elif not isinstance(key, bytes):
        raise TypeError(f"key takes bytes, str or None, not {type(key).__name__}")
    if len(key) > MAX_MESSAGE_BYTES:
        raise _too_large("key", len(key))
    return bytes(key)


def _encode_properties(properties: Any) -> bytes | None:
    packed = None if properties is None else encode_properties(properties)
    if packed is not None and len(packed) > MAX_MESSAGE_BYTES:
        raise _too_large("properties", len(packed))
    return packed if properties else None


def encode_properties(properties: Any, argument: str = "properties") -> bytes:
    """Return properties as msgpack; TypeError unless they map str to str, which is not a subclass:
    that would come back as str."""
    if not isinstance(properties, Mapping) or not all(
        type(name) is str and type(value) is str for name, value in properties.items()
    ):
        raise TypeError(f"{argument}={reprlib.repr(properties)}: it takes a mapping of str to str")
    try:
        packed: bytes = msgpack.packb(dict(properties))
    except UnicodeEncodeError as error:
        raise ValueError(f"{argument}={properties!r} cannot be written as UTF-8") from error
    return packed


def _encode_time(time: Any) -> int | None:
    if time is None:
        return None
    if isinstance(time, dt.datetime):
        return to_ms(time)
    time = as_int(time)
    if not isinstance(time, int) or isinstance(time, bool):
        raise TypeError(f"event_time takes a datetime or ms since 1970 as an int, not {time!r}")
    if not -MAX_TIME <= time <= MAX_TIME:
        raise ValueError(f"event_time={time}: it takes ms within {MAX_TIME} of 1970")
    return time


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def to_ms(time: dt.datetime) -> int:
    """Return ms since 1970. A naive datetime is local time, as for `datetime.astimezone`.

    >>> to_ms(dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC))
    1000
    >>> now = dt.datetime.now()
    >>> to_ms(now) == to_ms(now.astimezone())
    True
    """
    if time.utcoffset() is None:
        time = time.replace(tzinfo=_local_zone(time))
    return (time - _EPOCH) // dt.timedelta(milliseconds=1)


def from_ms(ms: int) -> dt.datetime:
    """Return a time in ms since 1970 as a datetime in UTC, or the last one that there is.

    >>> from_ms(1_000)
    datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.timezone.utc)
    """
    last = dt.datetime.max.replace(tzinfo=dt.UTC) - _EPOCH
    return _EPOCH + min(dt.timedelta(milliseconds=ms), last)


def _local_zone(time: dt.datetime) -> dt.tzinfo | None:
    """The offset of local time at a naive datetime."""
    # Python cannot convert local times on the first and last days that a datetime can have.
    year = min(max(time.year, dt.MINYEAR + 1), dt.MAXYEAR - 1)
    # Not `time` itself: a subclass such as pandas.Timestamp may convert in another way.
    plain = dt.datetime(
        year, time.month, time.day, time.hour, time.minute, time.second, fold=time.fold
    )
    return plain.astimezone().tzinfo


def encode_sequence(sequence: Any) -> int:
    """Return the sequence id; TypeError or ValueError if it is invalid."""
    sequence = as_int(sequence)
    if not isinstance(sequence, int) or isinstance(sequence, bool):
        raise TypeError(f"sequence_id takes an int, not {type(sequence).__name__}")
    if not 0 <= sequence <= MAX_SEQUENCE_ID:
        raise ValueError(f"sequence_id={sequence}: it takes 0 to 2**63 - 1")
    return sequence


MOST_ANNOUNCED_BYTES = 16 << 10  # the row of a waiter with an announcement contains it, too


def check_info(info: Any, argument: str = "info") -> dict[str, str]:
    """Return a copy of what a producer announces; TypeError or ValueError if it is invalid.

    >>> check_info({"address": "tcp://127.0.0.1:7001"})
    {'address': 'tcp://127.0.0.1:7001'}
    """
    size = len(encode_properties(info, argument))
    if size > MOST_ANNOUNCED_BYTES:
        raise ValueError(
            f"{argument} has {size} bytes as msgpack; it takes {MOST_ANNOUNCED_BYTES} at most"
        )
    return dict(info)


# ---- Arrow -----------------------------------------------------------------------------


COLUMNS = (
    "offset",
    "epoch",
    "key",
    "value",
    "publish_time",
    "event_time",
    "producer",
    "sequence_id",
    "properties",
)


MOST_ARROW_BYTES = (1 << 31) - 1  # of one array of binary, whose offsets have 32 bits
# Entries with fewer messages are copied: wrapping costs some microseconds per column.
WORTH_WRAPPING = 256


def arrow_column(values: Any, argument: str) -> _core.Strings | None:
    """Return a pyarrow array of binary, string or null as a column of messages; None if `values` is
    not an array."""
    pa = sys.modules.get("pyarrow")
    arrays: Any = getattr(pa, "Array", None), getattr(pa, "ChunkedArray", None)
    # Another thread may be importing it; nobody has an array before it is there.
    if pa is None or None in arrays or not isinstance(values, arrays):
        return None
    kind = values.type
    if kind not in (
        pa.binary(),
        pa.large_binary(),
        pa.large_string(),
        pa.string(),
        pa.null(),
    ) and not pa.types.is_fixed_size_binary(kind):
        raise TypeError(f"{argument} takes an arrow array of binary or string, not {kind}")
    # Not `nbytes`, which follows the offsets: a hand-made array may have wrong ones.
    if (
        isinstance(values, pa.ChunkedArray) or kind in (pa.large_binary(), pa.large_string())
    ) and values.get_total_buffer_size() > MOST_ARROW_BYTES:
        return _core.strings(values.cast(pa.large_binary()).to_pylist())
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
    if kind != pa.binary():
        values = values.cast(pa.binary())
    if len(values) == 0:  # it may have no buffers
        return _core.strings([])
    valid, offsets, data = values.buffers()
    return _core.arrow_strings(valid, offsets, data, values.offset, len(values))


def import_pyarrow() -> Any:
    """Return pyarrow, or raise ImportError that says how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Arrow needs pyarrow, which is not installed: pip install 'exclusivelog[arrow]'"
        ) from error
    return pyarrow


def record_batch(parts: Sequence[tuple[_core.Entry, int]], columns: Sequence[str]) -> Any:
    """Return entries, each from a message index on, as one RecordBatch with these columns."""
    pa = import_pyarrow()
    batches: list[Any] = []
    few: list[_core.Message] = []
    for entry, start in parts:
        if entry.count - start >= WORTH_WRAPPING:
            if few:
                batches.append(_from_messages(pa, few, columns))
                few = []
            batches.append(_one_entry(pa, entry, start, columns))
        else:
            few += [entry.message(index) for index in range(start, entry.count)]
    if few:
        batches.append(_from_messages(pa, few, columns))
    if len(batches) == 1:
        return batches[0]
    combined = pa.Table.from_batches(batches).combine_chunks().to_batches()
    if len(combined) > 1:
        raise OverflowError("more than 2 GiB do not fit into one RecordBatch")
    return combined[0]


def arrow_stream(batches: Iterable[Any]) -> Any:
    """A RecordBatchReader of these batches, which have all columns."""
    pa = import_pyarrow()
    schema = pa.schema([(name, _types(pa)[name]) for name in COLUMNS])
    return pa.RecordBatchReader.from_batches(schema, batches)


@functools.cache
def _types(pa: Any) -> dict[str, Any]:
    time = pa.timestamp("us", "UTC")
    return {
        "offset": pa.int64(),
        "epoch": pa.int64(),
        "key": pa.binary(),
        "value": pa.binary(),
        "publish_time": time,
        "event_time": time,
        "producer": pa.string(),
        "sequence_id": pa.int64(),
        "properties": pa.map_(pa.string(), pa.string()),
    }


def _from_messages(pa: Any, messages: Sequence[_core.Message], columns: Sequence[str]) -> Any:
    types = _types(pa)
    get: dict[str, Callable[[_core.Message], Any]] = {
        "publish_time": lambda m: m.publish_time * 1000,
        "event_time": lambda m: None if m.event_time is None else m.event_time * 1000,
        "producer": lambda m: m.producer_name,
        "properties": lambda m: list(m.properties.items()) or None,
        "value": lambda m: m.raw_value,
        "key": lambda m: m.raw_key,
    }
    arrays = [
        pa.array([pick(message) for message in messages], types[name])
        for name in columns
        for pick in [get.get(name) or operator.attrgetter(name)]
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _one_entry(pa: Any, entry: _core.Entry, start: int, columns: Sequence[str]) -> Any:
    buffer = pa.py_buffer(entry.data)
    types = _types(pa)
    arrays = [_column(pa, entry, start, buffer, name, types[name]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=columns)


def _column(pa: Any, entry: _core.Entry, start: int, buffer: Any, name: str, kind: Any) -> Any:
    count = entry.count - start
    if name in ("offset", "sequence_id") or (name == "publish_time" and entry.has_publish_times):
        numbers = pa.py_buffer(entry.numbers(name, start))
        return pa.Array.from_buffers(kind, count, [None, numbers])
    if name in ONE_VALUE:
        return _same(name, ONE_VALUE[name](entry), count)
    if name == "properties":
        if not entry.has_properties:
            return _same(name, None, count)
        messages = (entry.message(index) for index in range(start, entry.count))
        return pa.array([list(m.properties.items()) or None for m in messages], kind)
    place = entry.column(name)
    if place is None:
        return _same(name, None, count)
    buffers = [None if at < 0 else buffer.slice(at) for at in place]
    if name == "event_time":  # stored in ms
        buffers = [buffers[0], pa.py_buffer(entry.numbers(name))]
    return pa.Array.from_buffers(kind, count, buffers, offset=start)


# Columns in which all messages of an entry have the same value.
ONE_VALUE: dict[str, Callable[[_core.Entry], Any]] = {
    "producer": lambda entry: entry.producer_name,
    "epoch": lambda entry: entry.epoch,
    "publish_time": lambda entry: entry.publish_time * 1000,
}


@functools.lru_cache(maxsize=16)
def _repeated(name: str, value: Any, size: int) -> Any:
    # Cached, and sliced to size: most entries have the same producer, epoch and so on as the entry
    # before.
    pa = import_pyarrow()
    kind = _types(pa)[name]
    return pa.nulls(size, kind) if value is None else pa.repeat(pa.scalar(value, kind), size)


def _same(name: str, value: Any, count: int) -> Any:
    """Return a column that has `count` times the same value."""
    return _repeated(name, value, 1 << (count - 1).bit_length()).slice(0, count)


# ---- items -----------------------------------------------------------------------------


# (key, value). In a map, the value None removes the key, and (None, None) removes all keys.
Item = tuple[bytes | None, bytes | None]
CLEAR: bytes = msgpack.packb({"map": "clear"})  # properties of the message that removes all keys


class Timed(bytes):
    """The value of an item of a map that expires.

    - `until`: when, in ms since 1970, by the log's time.

    >>> timed = Timed(b"5", 1_000)
    >>> timed == b"5", timed.until
    (True, 1000)
    """

    until: int

    def __new__(cls, value: bytes, until: int) -> Self:
        """A value that expires."""
        made = super().__new__(cls, value)
        made.until = until
        return made


def timed(value: bytes | None, until: int | None) -> bytes | None:
    """Return a value that expires then (None: never)."""
    return value if value is None or until is None else Timed(value, until)


def plain(value: bytes | None) -> bytes | None:
    """Return a value without the time at which it expires."""
    return bytes(value) if type(value) is Timed else value


def message_of(key: bytes | None, value: bytes | None) -> Raw:
    """Return the message that stores an item in the log."""
    if type(value) is Timed:
        return key, bytes(value), msgpack.packb({"map": "put", "until": str(value.until)})
    return key, value, CLEAR if key is None and value is None else None


def messages_of(items: Sequence[Item]) -> Columns:
    """Return the messages that store these items, in columns."""
    values: list[bytes | None] = [value for _, value in items]
    packed = None
    if Timed in map(type, values):
        packed = _core.strings([message_of(*item)[2] for item in items])
        values = [plain(value) for value in values]
    return Columns(_core.strings(values), _core.strings([key for key, _ in items]), packed)


def is_clear(message: _core.Message) -> bool:
    """Whether this message removes all keys of a map. Compaction applies it, too (rule G7)."""
    nothing = message.raw_value is None and message.key is None
    return nothing and message.properties == {"map": "clear"}


def item_of(message: _core.Message) -> Item:
    """Return the item that a message stores. An empty message without the properties of a clear
    becomes an item that no map accepts."""
    if message.key is None and message.raw_value is None and not is_clear(message):
        return None, b""
    properties = message.properties
    return message.key, _limited(message.raw_value, properties) if properties else message.raw_value


def _limited(value: bytes | None, properties: dict[str, str]) -> bytes | None:
    until = properties.get("until", "")
    is_timed = value is not None and properties.get("map") == "put" and UNTIL.fullmatch(until)
    return Timed(value, int(until)) if value is not None and is_timed else value
