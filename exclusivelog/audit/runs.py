"""Runs: summaries of messages, made while they are read, so that an audit of millions of messages
processes a few thousand rows.

A row summarises the messages of one epoch and producer (and, with `bucket_ms`, of one time bucket)
among those that are read at once, at most 8192. The rows of an epoch together show whether its
messages are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from exclusivelog.topic import Topic

Record = dict[str, Any]

BATCH_ROWS = 8192
READ_BYTES = 1 << 20
TIMES = ("bucket", "first_time", "last_time")


def runs(topic: Topic, bucket_ms: int = 0) -> list[Record]:
    """All runs of a topic, in the order of offsets; times in ms since 1970."""
    found = []
    for batch in summed_up(_messages(topic), bucket_ms):
        for name in TIMES:
            column = batch.column(name).cast(pa.int64())
            position = batch.schema.get_field_index(name)
            batch = batch.set_column(position, name, pc.divide(column, 1000))
        found += batch.to_pylist()
    return sorted(({**run, "topic": topic.name} for run in found), key=_first_offset)


def _first_offset(run: Record) -> int:
    return int(run["first_offset"])


def _messages(topic: Topic) -> Iterator[pa.RecordBatch]:
    with topic.reader() as reader:
        while (batch := reader.read_arrow(READ_BYTES, READ)) is not None:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


# ---- sums --------------------------------------------------------------------------------

READ = ("offset", "epoch", "publish_time", "producer", "sequence_id")
BY = ("epoch", "producer", "bucket")
SUMS = {
    "first_offset": ("offset", "min"),
    "last_offset": ("offset", "max"),
    "messages": ("offset", "count"),
    "first_time": ("publish_time", "min"),
    "last_time": ("publish_time", "max"),
    "first_sequence_id": ("sequence_id", "first"),
    "last_sequence_id": ("sequence_id", "last"),
}


def summed_up(batches: Iterable[pa.RecordBatch], bucket_ms: int) -> Iterator[pa.RecordBatch]:
    """Summarise each batch, which has the columns `READ`, in a few rows. `bucket_ms` 0: do not
    group by time."""
    for batch in batches:
        yield _sum_up(batch, bucket_ms)


def _sum_up(batch: pa.RecordBatch, bucket_ms: int) -> pa.RecordBatch:
    table = pa.Table.from_batches([batch])
    table = table.append_column("bucket", _buckets(batch.column("publish_time"), bucket_ms))
    found = table.group_by(list(BY), use_threads=False).aggregate(list(SUMS.values()))
    falls, gaps = _falls(batch), _steps(batch.column("offset"), lambda step: pc.not_equal(step, 1))
    columns = {name: found.column(name).combine_chunks() for name in BY}
    for name, (column, kind) in SUMS.items():
        columns[name] = found.column(f"{column}_{kind}").combine_chunks()
    rows = found.num_rows
    columns["falls"] = pa.array([falls.get(name, 0) for name in columns["producer"].to_pylist()])
    columns["gaps"] = pa.array([gaps] + [0] * (rows - 1), pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def _buckets(times: pa.Array, bucket_ms: int) -> pa.Array:
    if not bucket_ms:
        return pa.nulls(len(times), times.type)
    us = times.cast(pa.int64())
    width = bucket_ms * 1000
    return pc.multiply(pc.divide(us, width), width).cast(times.type)


def _falls(batch: pa.RecordBatch) -> dict[str, int]:
    """Producer -> how often its sequence id did not increase (rule G2)."""
    names = pc.unique(batch.column("producer")).to_pylist()
    found = {}
    for name in names:
        one = batch if len(names) == 1 else batch.filter(pc.equal(batch.column("producer"), name))
        found[name] = _steps(one.column("sequence_id"), lambda step: pc.less_equal(step, 0))
    return found


def _steps(column: pa.Array, wrong: Any) -> int:
    """The number of steps from one value to the next that are wrong."""
    if len(column) < 2:
        return 0
    steps = pc.subtract(column.slice(1), column.slice(0, len(column) - 1))
    return int(pc.sum(wrong(steps)).as_py())
