"""The data source `exclusivelog`: batch and streaming, reading and writing (docs/spark.md).

What decides the design is in the comments where it matters; above all, `pushFilters` is not
implemented: Spark caches the planned reader, so that a scan without a filter would reuse the
filtered one, and silently return too little. Options bound what is read instead.
"""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from exclusivelog.engine import Engine
from exclusivelog.errors import OffsetTrimmedError, TopicNotFoundError
from exclusivelog.reader import Reader
from exclusivelog.spark import plan
from exclusivelog.spark.errors import DATA_LOSS, OPTION, OVERWRITE, SourceError, coded
from exclusivelog.spark.handles import Place, reading
from exclusivelog.spark.options import (
    NAME,
    ReadOptions,
    batch_options,
    batch_write_options,
    stream_options,
    stream_write_options,
    view_of,
)
from exclusivelog.spark.plan import Offsets, Position, Span
from exclusivelog.spark.runs import READ, summed_up
from exclusivelog.spark.views import VIEWS, check_columns, records, schema_of
from exclusivelog.spark.writer import BatchWriter, StreamWriter
from exclusivelog.topic import Topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What stays in the processor's cache between Python and Java.
READ_BYTES = 2 << 20
BATCH_ROWS = 1 << 13
MOST_INLINE_BYTES = 256 << 20


def register(spark: SparkSession) -> None:
    """Make the format "exclusivelog" known to a session."""
    spark.dataSource.register(ExclusiveLogSource)


class ExclusiveLogSource(DataSource):
    """`spark.read.format("exclusivelog")`, and its three siblings."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def schema(self) -> StructType:
        """All columns of the view that is read."""
        return schema_of(view_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return BatchReader(batch_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For `spark.readStream`."""
        return StreamReader(stream_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For `df.write`."""
        _refuse_overwriting(overwrite)
        with coded():
            return BatchWriter(batch_write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        _refuse_overwriting(overwrite)
        with coded():
            return StreamWriter(stream_write_options(self.options), schema)


def _refuse_overwriting(overwrite: bool) -> None:
    if overwrite:
        raise SourceError(
            OVERWRITE,
            'a log is only ever appended to: mode("append"), or outputMode("append"); write to '
            "another topic to start afresh",
        )


# ---- partitions and rows -----------------------------------------------------------------


@dataclass
class Slice(InputPartition):
    """A partition: some messages of one topic or more, to be read in `place`, or `data` if they
    came along (Arrow IPC)."""

    spans: Sequence[Span]
    place: Place | None
    data: bytes | None = None


class Rows:
    """Messages, or runs of them, as record batches with exactly the schema that Spark expects.

    `strict`: offsets that were trimmed are an error. `runs`: sum them up (view=runs), cut by
    `bucket_ms` of time unless that is 0.
    """

    def __init__(
        self, schema: StructType, strict: bool, runs: bool = False, bucket_ms: int = 0
    ) -> None:
        self.schema = schema
        self._strict = strict
        self._runs = runs
        self._bucket_ms = bucket_ms

    def of(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """What a partition holds. An empty list of partitions comes as one that is not ours."""
        if not isinstance(partition, Slice):
            return
        if partition.data is not None:
            with pa.ipc.open_stream(partition.data) as stream:
                yield from stream
        elif partition.place is not None:
            with coded():
                yield from self.read(partition.place.engine(), partition.spans)

    def read(self, engine: Engine, spans: Iterable[Span]) -> Iterator[pa.RecordBatch]:
        """The messages of spans, one after another."""
        for span in spans:
            yield from self._read(engine, span)

    def _read(self, engine: Engine, span: Span) -> Iterator[pa.RecordBatch]:
        """The messages of a span. No transaction is open between two batches."""
        schema = to_arrow_schema(self.schema, timezone="UTC")
        if self._runs:
            batches = summed_up(self._messages(engine, span, list(READ)), self._bucket_ms)
        else:
            wanted = [name for name in schema.names if name != "topic"] or ["offset"]
            batches = self._messages(engine, span, wanted)
        for batch in batches:
            yield _shaped(batch, schema, span.topic)

    def _messages(self, engine: Engine, span: Span, wanted: list[str]) -> Iterator[pa.RecordBatch]:
        topic = self._topic(engine, span)
        if topic is None:
            return
        with topic.reader(start=span.start) as reader:
            while reader.position < span.end:
                batch = self._next(reader, wanted)
                if batch is None and not self._strict:
                    return
                if batch is None:
                    raise _ended_early(span, reader.position)
                # Whole entries are read: the last one may go on behind the end.
                rows = batch.num_rows - max(0, reader.position - span.end)
                for start in range(0, rows, BATCH_ROWS):
                    yield batch.slice(start, min(BATCH_ROWS, rows - start))

    def _topic(self, engine: Engine, span: Span) -> Topic | None:
        """The topic that was planned for; None if it is gone, and the user does not mind."""
        try:
            topic = engine.topic(span.topic, create=False)
            if span.id not in (None, topic.id):
                raise plan.made_anew(span.topic)
        except (TopicNotFoundError, SourceError):
            if self._strict:
                raise
            return None
        return topic

    def _next(self, reader: Reader, wanted: list[str]) -> pa.RecordBatch | None:
        while True:
            try:
                return reader.read_arrow(READ_BYTES, wanted)
            except OffsetTrimmedError as error:  # between planning and reading
                if self._strict:
                    raise SourceError(DATA_LOSS, str(error)) from error
                reader.seek("earliest")


def _ended_early(span: Span, at: int) -> SourceError:
    return SourceError(
        DATA_LOSS,
        f"topic {span.topic!r} ends at offset {at}, before {span.end}: it was created again since "
        "the query was planned, or a power cut removed unacknowledged messages",
    )


def _shaped(batch: pa.RecordBatch, schema: pa.Schema, topic: str) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        if field.name == "topic":
            array = pa.repeat(pa.scalar(topic, field.type), batch.num_rows)
        else:
            array = batch.column(field.name)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Planned:
    """What batch and stream have in common."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_columns(options.view, schema)
        self.options = options
        self.rows = Rows(
            schema, options.fail_on_data_loss, options.view == "runs", options.bucket_ms
        )

    def slices(self, engine: Engine, wanted: Iterable[Span]) -> list[InputPartition]:
        """Partitions of spans, with their messages inside if access=inline asks for it."""
        place = Place.of(engine)
        cut = plan.share_out(engine, self.options, wanted)
        if not self.options.inline:
            return [Slice(spans, place) for spans in cut]
        budget = Budget()
        return [Slice((), None, budget.pack(self.rows.read(engine, spans))) for spans in cut]


class Budget:
    """What may travel inside the partitions of one query."""

    def __init__(self, most: int = MOST_INLINE_BYTES) -> None:
        self._most = self._left = most

    def pack(self, batches: Iterable[pa.RecordBatch]) -> bytes | None:
        """The batches as an Arrow stream; None if there are none."""
        buffer = io.BytesIO()
        with contextlib.ExitStack() as stack:
            stream = None
            for batch in batches:
                if stream is None:
                    stream = stack.enter_context(pa.ipc.new_stream(buffer, batch.schema))
                stream.write_batch(batch)
                if buffer.tell() > self._left:
                    raise SourceError(
                        OPTION,
                        f"access=inline ships at most {self._most >> 20} MiB with a query; bound "
                        "it with startingOffsets and endingOffsets, or let the executors run on "
                        f"{socket.gethostname()!r}",
                    )
        self._left -= buffer.tell()
        return buffer.getvalue() or None


# ---- batch -------------------------------------------------------------------------------


class BatchReader(_Planned, DataSourceReader):
    """Reads a range that is fixed when the query is first run."""

    def partitions(self) -> list[InputPartition]:
        """The partitions, in the order of topics and offsets."""
        with coded():
            engine = reading(self.options.path)
            if self.options.view in VIEWS:
                return [self._view(engine)]
            return self.slices(engine, plan.spans(engine, self.options))

    def _view(self, engine: Engine) -> Slice:
        schema = to_arrow_schema(self.rows.schema, timezone="UTC")
        found = records(engine, self.options.view, plan.topics(engine, self.options))
        table = pa.Table.from_pylist(list(found), schema=schema)
        return Slice((), None, Budget().pack(table.to_batches()) or None)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """One partition's messages."""
        return self.rows.of(partition)


# ---- streaming ---------------------------------------------------------------------------


class StreamReader(_Planned, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes. Its position is {topic: next offset}, and the topics' ids."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: Position | None = None

    def initialOffset(self) -> Position:  # noqa: N802
        """Where a new query begins."""
        with coded():
            return plan.starts(reading(self.options.path), self.options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What one micro-batch takes at most."""
        if self.options.max_offsets is not None:
            return ReadMaxRows(self.options.max_offsets)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> Position:  # noqa: N802
        """How far the next micro-batch goes."""
        with coded():
            engine = reading(self.options.path)
            available = self._available(engine)
            begin = plan.goes_on(engine, self.options, start, available)
            offsets, ids = plan.split(available)
            if isinstance(limit, ReadMaxRows):
                offsets = plan.limited(begin, offsets, limit.max_rows)
            elif isinstance(limit, ReadMaxBytes):
                offsets = plan.limited_bytes(engine, begin, offsets, limit.max_bytes)
            return {**offsets, plan.IDS: ids}

    def _available(self, engine: Engine) -> Position:
        now = plan.ends(engine, self.options)
        if self._target is None:
            return now
        (ends, ids), (target, former) = plan.split(now), plan.split(self._target)
        offsets = {topic: min(end, ends.get(topic, end)) for topic, end in target.items()}
        return {**offsets, plan.IDS: {topic: ids.get(topic, former[topic]) for topic in offsets}}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing that comes from now on counts."""
        with coded():
            self._target = plan.ends(reading(self.options.path), self.options)

    def reportLatestOffset(self) -> Offsets:  # noqa: N802
        """For the query's progress: how far the topics go, whatever the limit."""
        with coded():
            return plan.split(plan.ends(reading(self.options.path), self.options))[0]

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """The partitions of one micro-batch."""
        with coded():
            engine = reading(self.options.path)
            return self.slices(engine, plan.steps(engine, self.options, start, end))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """One partition's messages."""
        return self.rows.of(partition)
