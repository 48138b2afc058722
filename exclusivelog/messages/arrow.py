"""Convert between messages and Arrow, without a copy per message.

pyarrow is imported only if the caller passes or requests Arrow data.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from exclusivelog import _core

COLUMNS = (
    "offset", "epoch", "key", "value", "publish_time", "event_time", "producer", "sequence_id",
    "properties",
)  # fmt: skip


# Entries with fewer messages are copied: wrapping costs some microseconds per column.
WORTH_WRAPPING = 256


def arrow_column(values: Any, argument: str) -> _core.Strings | None:
    """Return a pyarrow array of binary or string as a column of messages; None for other types."""
    pa = sys.modules.get("pyarrow")
    if pa is None or not isinstance(values, (pa.Array, pa.ChunkedArray)):
        return None
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
    if values.type in (pa.large_binary(), pa.large_string(), pa.string()) or (
        pa.types.is_fixed_size_binary(values.type)
    ):
        values = values.cast(pa.binary())
    if values.type != pa.binary():
        raise TypeError(f"{argument} takes an arrow array of binary or string, not {values.type}")
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


@functools.cache
def _types(pa: Any) -> dict[str, Any]:
    time = pa.timestamp("us", "UTC")
    return {
        "offset": pa.int64(), "epoch": pa.int64(), "key": pa.binary(), "value": pa.binary(),
        "publish_time": time, "event_time": time, "producer": pa.string(),
        "sequence_id": pa.int64(), "properties": pa.map_(pa.string(), pa.string()),
    }  # fmt: skip


def _from_messages(pa: Any, messages: Sequence[_core.Message], columns: Sequence[str]) -> Any:
    types = _types(pa)
    get: dict[str, Callable[[_core.Message], Any]] = {
        "publish_time": lambda m: m.publish_time * 1000,
        "event_time": lambda m: None if m.event_time is None else m.event_time * 1000,
        "producer": lambda m: m.producer_name,
        "properties": lambda m: list(m.properties.items()) or None,
        "value": lambda m: m.raw_value,
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
    # Cached to be sliced: most entries have the same producer, epoch and so on as the entry
    # before.
    pa = import_pyarrow()
    kind = _types(pa)[name]
    return pa.nulls(size, kind) if value is None else pa.repeat(pa.scalar(value, kind), size)


def _same(name: str, value: Any, count: int) -> Any:
    """Return a column that has `count` times the same value."""
    return _repeated(name, value, 1 << (count - 1).bit_length()).slice(0, count)
