"""Writing: executors stage, the driver commits, in one transaction of the ledger.

`write` runs at least once for each partition, and ends before Spark decides which attempt
counts; so it changes nothing but files. `commit` gets the messages of the attempts that count,
in the order of partitions, perhaps a second time, perhaps in another process, perhaps in a run
of the query that another one has superseded: `once.append_once` is made for all of that.
`abort` may follow a commit that came through; it removes staged files and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from exclusivelog.engine import open as open_engine
from exclusivelog.once import Run, append_once, check_writable
from exclusivelog.spark.errors import SCHEMA, SourceError, coded
from exclusivelog.spark.handles import ledger_exists, writing
from exclusivelog.spark.options import WriteOptions
from exclusivelog.spark.staging import Directory, Piece, Stage, check_arrived, parts, staged
from exclusivelog.types import AccessMode

TEXT, BYTES = StringType(), BinaryType()
TAKEN: dict[str, tuple[DataType, ...]] = {
    "value": (BYTES, TEXT), "key": (BYTES, TEXT), "properties": (MapType(TEXT, TEXT),),
    "event_time": (TimestampType(),), "topic": (TEXT,),
}  # fmt: skip
# What the log gives a message anew: they may come along from reading another one.
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
        """Where it is staged."""
        return self.name or "-", self.run, self.number or 0


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged."""

    job: Job
    partition: int
    pieces: list[Piece] = field(default_factory=list)


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Spark does not compare what is written with anything: so it is done here."""
    kinds = {column.name: column.dataType for column in schema.fields}
    for name, kind in kinds.items():
        if name in ITS_OWN:
            continue
        if name not in TAKEN:
            raise SourceError(SCHEMA, f"there is no column {name!r} to write; drop it. A message "
                              f"has {', '.join(TAKEN)}")  # fmt: skip
        if not any(_same(kind, wanted) for wanted in TAKEN[name]):
            wanted = " or ".join(kind.simpleString() for kind in TAKEN[name])
            raise SourceError(
                SCHEMA, f"column {name!r} is {kind.simpleString()}; cast it to {wanted}"
            )
    if "value" not in kinds:
        raise SourceError(SCHEMA, "there is no column 'value'; a message without one is a "
                          "tombstone: lit(None).cast('binary')")  # fmt: skip
    if options.topic is None and "topic" not in kinds:
        raise SourceError(SCHEMA, "no topic is given. Name it with the option topic, or a column "
                          "'topic'")  # fmt: skip


def _same(kind: DataType, wanted: DataType) -> bool:
    if isinstance(wanted, MapType):
        return isinstance(kind, MapType) and kind.keyType == kind.valueType == TEXT
    return kind == wanted


class _Writer:
    """What batch and stream have in common."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema, options)
        if not ledger_exists(options.path):
            open_engine(options.path, name="spark").close()
        self.options = options
        self.directory = Directory.prepare(options.staging)

    # ---- on an executor ------------------------------------------------------------------

    def stage(self, job: Job, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Stage one partition."""
        task = TaskContext.get()
        assert task is not None
        partition = task.partitionId()
        output = Stage(
            self.directory, self.directory.of(*job.place),
            f"part-{partition}-{task.taskAttemptId()}", self.options.inline_limit,
        )  # fmt: skip
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
        """Append what was staged, in the order of partitions. A stream's run has many batches."""
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
                job.name, job.run if stream else None, self._producer(job),
                self.options.access_mode,
            )  # fmt: skip
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
        if stream and appended and self.options.access_mode is not AccessMode.SHARED:
            # The query's other runs are superseded: what they have left behind goes, too. Who
            # had nothing to append may be superseded itself.
            self.directory.remove(job.place[0])
        else:  # a batch job of the same name may run at the same time, into another topic
            self.directory.remove(*job.place[:2])
            self.directory.remove_old(job.place[0])

    def discard(self, messages: Sequence[Staged | None]) -> None:
        """Remove what was staged."""
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
        self, messages: Sequence[Staged | None], batchId: int  # noqa: N803
    ) -> None:  # fmt: skip
        """On the driver: append all partitions."""
        with coded():
            self.append([message for message in messages if message is not None], True)

    def abort(  # type: ignore[override]
        self, messages: Sequence[Staged | None], batchId: int  # noqa: N803
    ) -> None:  # fmt: skip
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
