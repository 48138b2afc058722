"""The data source, its engines and its writer.

The data source `exclusivelog`: batch and streaming, reading and writing (docs/spark.md).

`pushFilters` is not implemented: Spark caches the planned reader, so that a scan without a filter
would reuse the filtered one, and silently return too little. Options bound what is read instead.

Writing: executors stage, the driver commits, in one transaction of the ledger.

`write` runs at least once for each partition, and ends before Spark decides which attempt counts;
so it only writes files. `commit` gets the messages of the attempts that count, in the order of
partitions, perhaps repeatedly, in another process, or in a superseded run of the query:
`once.append_once` handles all of that. `abort` may follow a commit that succeeded; it removes only
staged files.

Engines of this process are opened at their first use and kept open, until the worker's process
ends.

A Python worker reads for one task, commits for another, and is forked from a process without
engines; so they are kept by process id and path.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType, TimestampType

import exclusivelog as xl
from exclusivelog.audit.runs import READ, summed_up
from exclusivelog.engine import Engine
from exclusivelog.errors import LedgerError, OffsetTrimmedError, TopicNotFoundError
from exclusivelog.once import Run, append_once, check_writable
from exclusivelog.reader import Reader
from exclusivelog.spark import plan
from exclusivelog.spark.clusters import open_cluster
from exclusivelog.spark.errors import (
    DATA_LOSS,
    OPTION,
    OVERWRITE,
    REMOTE_EXECUTOR,
    SCHEMA,
    SourceError,
    coded,
)
from exclusivelog.spark.options import (
    NAME,
    ReadOptions,
    WriteOptions,
    batch_options,
    batch_write_options,
    is_url,
    stream_options,
    stream_write_options,
    view_of,
)
from exclusivelog.spark.plan import Offsets, Position, Span
from exclusivelog.spark.staging import Directory, Piece, Stage, check_arrived, parts, staged
from exclusivelog.spark.views import VIEWS, check_columns, records, schema_of
from exclusivelog.topic import Topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- engines of this process -----------------------------------------------------------


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MOST_KEPT = 8  # ledgers that a process keeps open, as each reserves a lot of address space


@dataclass
class _Handle:
    engine: Engine
    inode: plan.Inode | None  # of a ledger's directory
    writes: bool


_handles: dict[tuple[int, str], _Handle] = {}
_opening = threading.Lock()


def reading(path: str, access: Mapping[str, str] | None = None) -> Engine:
    """An engine of this process that reads the ledger; LedgerError where there is none. Or the
    cluster's namespace of that URL, with what is needed to get in."""
    return _handle(path, writes=False, access=access).engine


def writing(path: str) -> Engine:
    """An engine of this process that writes to the ledger, which is made if need be."""
    return _handle(path, writes=True).engine


def _handle(path: str, writes: bool, access: Mapping[str, str] | None = None) -> _Handle:
    url = is_url(path)
    # A process can open a ledger only once.
    key = (
        os.getpid(),
        repr((path, sorted((access or {}).items()))) if url else (os.path.realpath(path)),
    )
    with _opening:
        handle = _handles.pop(key, None)
        if handle is not None and not _fits(handle, path, writes):
            handle.engine.close()
            handle = None
        if handle is None:
            engine = open_cluster(path, access) if url else _open_ledger(path, writes)
            handle = _Handle(engine, None if url else plan.inode(path), writes)
            _make_room()
        _handles[key] = handle  # at the end, so that the first one is the least recently used
        return handle


def _open_ledger(path: str, writes: bool) -> Engine:
    engine = xl.open(path, name="spark", readonly=not writes, create=writes)
    assert plan.inode(path) is not None
    return engine


def _make_room() -> None:
    # Engines that were inherited through a fork are neither counted nor closed.
    ours = [key for key in _handles if key[0] == os.getpid()]
    if len(ours) >= MOST_KEPT:
        _handles.pop(ours[0]).engine.close()


def _fits(handle: _Handle, path: str, writes: bool) -> bool:
    if handle.engine.closed or (writes and not handle.writes):
        return False
    if handle.inode is None:
        return True  # a cluster's
    if handle.inode != plan.inode(path):
        return False
    try:
        handle.engine.ledger.check()
    except LedgerError:  # the engine has failed; a new one starts from what is durable
        return False
    return True


# ---- is it the same ledger, on the same machine? -----------------------------------------


@dataclass(frozen=True)
class Place:
    """Identifies the ledger for which a driver has planned, and its machine."""

    path: str
    uuid: str
    inode: plan.Inode
    boot: str
    host: str

    @classmethod
    def of(cls, engine: Engine) -> Place:
        """Where this engine's ledger is."""
        inode = plan.inode(engine.path)
        assert inode is not None
        return cls(engine.path, engine.ledger.uuid, inode, boot_id(), socket.gethostname())

    def engine(self) -> Engine:
        """An engine that reads this ledger.

        Raises SourceError where the files are another machine's, or another ledger's.
        """
        if self.boot != boot_id() or self.inode != plan.inode(self.path):
            raise SourceError(
                REMOTE_EXECUTOR,
                f"the ledger {self.path} lies on {self.host!r}, and this executor on "
                f"{socket.gethostname()!r} cannot open its files. Let the executors run on that "
                "machine (master local[*] or local-cluster), or ship what they read inside the "
                'partitions with option("access", "inline")',
            )
        engine = reading(self.path)
        if engine.ledger.uuid != self.uuid:
            raise SourceError(
                REMOTE_EXECUTOR, f"{self.path} holds another ledger than when the query was planned"
            )
        return engine


@dataclass(frozen=True)
class ClusterPlace:
    """A cluster's namespace: each executor connects by itself. No repr has what is needed to get
    in."""

    url: str
    access: Mapping[str, str] = field(repr=False)

    def engine(self) -> Engine:
        """An engine of this process that reads there."""
        return reading(self.url, self.access)


def place_of(engine: Engine, options: ReadOptions) -> Place | ClusterPlace:
    """The place from which tasks of this engine's plan read."""
    if is_url(options.path):
        return ClusterPlace(options.path, dict(options.access))
    return Place.of(engine)


def boot_id() -> str:
    """Identifies this boot of this machine."""
    return BOOT_ID.read_text().strip()


# ---- writing ---------------------------------------------------------------------------


TEXT, BYTES = StringType(), BinaryType()
TAKEN: dict[str, tuple[DataType, ...]] = {
    "value": (BYTES, TEXT),
    "key": (BYTES, TEXT),
    "properties": (MapType(TEXT, TEXT),),
    "event_time": (TimestampType(),),
    "topic": (TEXT,),
}
# Columns that the log sets itself; a DataFrame that was read from a log may have them.
ITS_OWN = ("offset", "epoch", "publish_time", "producer", "sequence_id")
PRODUCER_BYTES = 255


@dataclass(frozen=True)
class Job:
    """Whose batch it is: the job (None: it has no name, and its batches no numbers), the run,
    and the batch's number."""

    name: str | None
    run: str
    number: int | None

    @property
    def place(self) -> tuple[str, str, int]:
        """Its staging directory."""
        return self.name or "-", self.run, self.number or 0


@dataclass
class Staged(WriterCommitMessage):
    """The staged output of one task."""

    job: Job
    partition: int
    pieces: list[Piece] = field(default_factory=list)


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Check the columns to be written, which Spark does not do."""
    kinds = {column.name: column.dataType for column in schema.fields}
    for name, kind in kinds.items():
        if name in ITS_OWN:
            continue
        if name not in TAKEN:
            raise SourceError(
                SCHEMA,
                f"there is no column {name!r} to write; drop it. A message has {', '.join(TAKEN)}",
            )
        if not any(_same(kind, wanted) for wanted in TAKEN[name]):
            wanted = " or ".join(kind.simpleString() for kind in TAKEN[name])
            raise SourceError(
                SCHEMA, f"column {name!r} is {kind.simpleString()}; cast it to {wanted}"
            )
    if "value" not in kinds:
        raise SourceError(
            SCHEMA,
            "there is no column 'value'; a message without one is a "
            "tombstone: lit(None).cast('binary')",
        )
    if options.topic is None and "topic" not in kinds:
        raise SourceError(
            SCHEMA, "no topic is given. Name it with the option topic, or a column 'topic'"
        )


def _same(kind: DataType, wanted: DataType) -> bool:
    if isinstance(wanted, MapType):
        return isinstance(kind, MapType) and kind.keyType == kind.valueType == TEXT
    return kind == wanted


class _Writer:
    """What batch and stream have in common."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema, options)
        if not plan.ledger_exists(options.path):
            xl.open(options.path, name="spark").close()
        self.options = options
        self.directory = Directory.prepare(options.staging)

    # ---- on an executor ------------------------------------------------------------------

    def stage(self, job: Job, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Stage one partition."""
        task = TaskContext.get()
        assert task is not None
        partition = task.partitionId()
        output = Stage(
            self.directory,
            self.directory.of(*job.place),
            f"part-{partition}-{task.taskAttemptId()}",
            self.options.inline_limit,
        )
        for batch in batches:
            for topic, messages in self._by_topic(batch):
                output.add(topic, staged(messages))
        return Staged(job, partition, output.finish())

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if batch.num_rows == 0:
            return
        if self.options.topic is not None:
            yield self.options.topic, batch
            return
        column = batch.column("topic")
        names = pc.unique(column).to_pylist()
        if None in names:
            raise SourceError(SCHEMA, "the column 'topic' is null in a row; give each row a topic")
        for name in names:
            try:
                check_writable(name)
            except ValueError as error:
                raise SourceError(SCHEMA, f"the column 'topic': {error}") from None
            yield name, batch if len(names) == 1 else batch.filter(pc.equal(column, name))

    # ---- on the driver -------------------------------------------------------------------

    def append(self, messages: Sequence[Staged], stream: bool) -> None:
        """Append the staged messages, in the order of partitions."""
        pieces: dict[str, list[Piece]] = {}
        for message in sorted(messages, key=lambda message: message.partition):
            for piece in message.pieces:
                pieces.setdefault(piece.topic, []).append(piece)
        if not messages:
            return
        job = messages[0].job
        if pieces:
            check_arrived(pieces)
            run = Run(
                job.name, job.run if stream else None, self._producer(job), self.options.access_mode
            )
            batches = {topic: parts(found) for topic, found in pieces.items()}
            append_once(writing(self.options.path), run, job.number, batches)
        self._clean(job, stream, appended=bool(pieces))

    def _producer(self, job: Job) -> str:
        if self.options.producer is not None:
            return self.options.producer
        if job.name is None:
            return "spark"
        return f"spark-{job.name}".encode()[:PRODUCER_BYTES].decode(errors="ignore")

    def _clean(self, job: Job, stream: bool, appended: bool) -> None:
        if stream and appended and self.options.access_mode.is_exclusive:
            # The query's other runs are superseded: what they have left behind goes, too. Who
            # had nothing to append may be superseded itself.
            self.directory.remove(job.place[0])
        else:  # a batch job of the same name may run at the same time, into another topic
            self.directory.remove(*job.place[:2])
            self.directory.remove_old(job.place[0])

    def discard(self, messages: Sequence[Staged | None]) -> None:
        """Remove the staged files."""
        for place in {message.job.place for message in messages if message is not None}:
            self.directory.remove(*place)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """One `df.write`: with txnAppId and txnVersion it is appended once, however often it is
    tried."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.job = Job(options.app_id, uuid4().hex, options.version)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """On an executor: stage one partition."""
        with coded():
            return self.stage(self.job, iterator)

    def commit(self, messages: Sequence[Staged | None]) -> None:  # type: ignore[override]
        """On the driver: append all partitions."""
        with coded():
            self.append([message for message in messages if message is not None], False)

    def abort(self, messages: Sequence[Staged | None]) -> None:  # type: ignore[override]
        """On the driver: forget them."""
        self.directory.remove(*self.job.place)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """One micro-batch of a streaming query. The query's id and run, and the batch's number, are
    known to tasks only; their messages bring them along."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """On an executor: stage one partition."""
        with coded():
            return self.stage(_job_of_task(), iterator)

    def commit(  # type: ignore[override]
        self,
        messages: Sequence[Staged | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """On the driver: append all partitions."""
        with coded():
            self.append([message for message in messages if message is not None], True)

    def abort(  # type: ignore[override]
        self,
        messages: Sequence[Staged | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """On the driver: forget them."""
        self.discard(messages)


def _job_of_task() -> Job:
    task = TaskContext.get()
    assert task is not None
    query, batch, run = (
        task.getLocalProperty(name)
        for name in ("sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id")
    )
    assert query is not None, "not a streaming query"
    assert batch is not None, "not a micro-batch"
    return Job(query, run or query, int(batch))


# ---- the source ------------------------------------------------------------------------


# Fits into the processor's cache between Python and Java.
READ_BYTES = 2 << 20
BATCH_ROWS = 1 << 13
MOST_INLINE_BYTES = 256 << 20


def register(spark: SparkSession) -> None:
    """Make the format "exclusivelog" known to a session."""
    spark.dataSource.register(ExclusiveLogSource)


class ExclusiveLogSource(DataSource):
    """The data source of `spark.read`, `readStream`, `write` and `writeStream`."""

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
    """A partition: messages of one or more topics, to be read in `place`, or shipped in `data`
    (Arrow IPC)."""

    spans: Sequence[Span]
    place: Place | ClusterPlace | None
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
        """The messages of a partition. For an empty list of partitions, Spark passes one of its
        own."""
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
                # Cut at the end: whole entries are read, and the last one may extend beyond it.
                rows = batch.num_rows - max(0, reader.position - span.end)
                for start in range(0, rows, BATCH_ROWS):
                    yield batch.slice(start, min(BATCH_ROWS, rows - start))

    def _topic(self, engine: Engine, span: Span) -> Topic | None:
        """The planned topic; None if it was deleted, and failOnDataLoss is false."""
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
    for column in schema:
        if column.name == "topic":
            array = pa.repeat(pa.scalar(topic, column.type), batch.num_rows)
        else:
            array = batch.column(column.name)
        arrays.append(array if array.type == column.type else array.cast(column.type))
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
        place = place_of(engine, self.options)
        cut = plan.share_out(engine, self.options, wanted)
        if not self.options.inline:
            return [Slice(spans, place) for spans in cut]
        budget = Budget()
        return [Slice((), None, budget.pack(self.rows.read(engine, spans))) for spans in cut]


class Budget:
    """Limits the bytes that are shipped inside the partitions of one query."""

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
    """Reads a range that is fixed when the query is planned."""

    def partitions(self) -> list[InputPartition]:
        """The partitions, in the order of topics and offsets."""
        with coded():
            engine = reading(self.options.path, self.options.access)
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
    """Reads new messages. Its position is {topic: next offset}, and the topics' ids."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: Position | None = None

    def initialOffset(self) -> Position:  # noqa: N802
        """The start of a new query."""
        with coded():
            return plan.starts(reading(self.options.path, self.options.access), self.options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit of a micro-batch."""
        if self.options.max_offsets is not None:
            return ReadMaxRows(self.options.max_offsets)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> Position:  # noqa: N802
        """The end of the next micro-batch."""
        with coded():
            engine = reading(self.options.path, self.options.access)
            available = self._available(engine)
            kept = plan.kept(engine, start, available)
            begin = plan.goes_on(engine, self.options, start, available, kept)
            offsets, ids = plan.split(available)
            if isinstance(limit, ReadMaxRows):
                offsets = plan.limited(begin, offsets, limit.max_rows)
            elif isinstance(limit, ReadMaxBytes):
                offsets = plan.limited_bytes(engine, begin, offsets, limit.max_bytes)
            others, their_ids = plan.split(kept)
            return {**others, **offsets, plan.IDS: {**their_ids, **ids}}

    def _available(self, engine: Engine) -> Position:
        now = plan.ends(engine, self.options)
        if self._target is None:
            return now
        (ends, ids), (target, former) = plan.split(now), plan.split(self._target)
        offsets = {topic: min(end, ends.get(topic, end)) for topic, end in target.items()}
        return {**offsets, plan.IDS: {topic: ids.get(topic, former[topic]) for topic in offsets}}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end: later messages are not read."""
        with coded():
            self._target = plan.ends(reading(self.options.path, self.options.access), self.options)

    def reportLatestOffset(self) -> Offsets:  # noqa: N802
        """The ends of the topics, for the query's progress."""
        with coded():
            return plan.split(
                plan.ends(reading(self.options.path, self.options.access), self.options)
            )[0]

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """The partitions of one micro-batch."""
        with coded():
            engine = reading(self.options.path, self.options.access)
            return self.slices(engine, plan.steps(engine, self.options, start, end))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """One partition's messages."""
        return self.rows.of(partition)


# ---- for the pipelines ------------------------------------------------------------------

# Not `timestamp`: spark.sql.timestampType may make that TIMESTAMP_NTZ.
RUNS = (
    "topic string, epoch bigint, producer string, first_offset bigint, last_offset bigint, "
    "messages bigint, first_sequence_id bigint, last_sequence_id bigint, falls bigint, "
    "gaps bigint, first_time timestamp_ltz, last_time timestamp_ltz"
)
RUN_TIMES = ("bucket", "first_time", "last_time")


def read(
    spark: SparkSession,
    ledger: str,
    topic: str,
    number: int,
    start: int,
    stop: int,
    access: Mapping[str, str] | None = None,
) -> DataFrame:
    """The messages [start, stop) of the topic with this id."""
    register(spark)
    frame = spark.read.format(NAME).options(**(access or {})).option("topic", topic)
    frame = frame.option("startingOffsets", json.dumps({topic: start}))
    return (
        frame.option("topicIds", json.dumps({topic: number}))
        .option("endingOffsets", json.dumps({topic: stop}))
        .load(ledger)
    )


def runs(
    spark: SparkSession,
    ledger: str,
    topics: Sequence[str],
    columns: str = RUNS,
    bucket_ms: int = 0,
    access: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The view `runs` of some topics, in the order of offsets; times in ms since 1970."""
    from pyspark.sql.functions import expr

    register(spark)
    if not topics:
        return []
    reader = spark.read.schema(columns).format(NAME).options(**(access or {}))
    reader = reader.option("view", "runs")
    # One job for all of them; in a list, a name could not have a comma.
    reader = reader.option("topicsPattern", "|".join(map(re.escape, topics)))
    if bucket_ms:
        reader = reader.option("bucketMs", str(bucket_ms))
    frame = reader.load(ledger)
    for name in RUN_TIMES:
        if name in frame.columns:  # Spark's rows have naive local times
            frame = frame.withColumn(name, expr(f"unix_millis({name})"))
    found = [row.asDict() for row in frame.collect()]
    return sorted(found, key=lambda run: (run["topic"], run["first_offset"]))
