"""Replay: a range of a topic, or an archive of it, into another topic or another ledger.

Each message gets its `origin_offset` and `origin_epoch` as properties. Messages are appended in
chunks, each exactly once: a replay that was interrupted, or is run again, continues after the last
chunk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import exclusivelog as xl
from exclusivelog.once import recorded
from exclusivelog.spark import plan
from exclusivelog.spark.errors import DATA_LOSS, PIPELINE, SourceError, coded
from exclusivelog.spark.files import files_of
from exclusivelog.spark.options import NAME
from exclusivelog.spark.pipelines import (
    CHUNK,
    Progress,
    check_chunk,
    job_name,
    parquet,
    place,
    with_origin,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Replayed:
    """The offsets of the origin that this call has appended, [start, end), and the number of
    messages."""

    start: int
    end: int
    messages: int


@dataclass(frozen=True)
class Origin:
    """The source of the messages: its stable name, and its offsets."""

    name: str
    first: int
    end: int
    frame: DataFrame | None  # of an archive
    ledger: str
    topic: str
    number: int  # the topic's id

    def read(self, spark: SparkSession, start: int, stop: int) -> DataFrame:
        """The messages [start, stop), in order."""
        if self.frame is None:
            from exclusivelog.spark.source import read

            return read(spark, self.ledger, self.topic, self.number, start, stop)
        wanted = f"offset >= {start} and offset < {stop}"
        return self.frame.where(wanted).orderBy("offset")


def run(
    spark: SparkSession,
    source: str,
    topic: str,
    to: str,
    *,
    to_topic: str | None = None,
    start: int | None = None,
    end: int | None = None,
    chunk: int = CHUNK,
    out: TextIO | None = None,
) -> Replayed:
    """Replay messages.

    - `source`: a ledger's directory, or an archive's (`archive.run`), and the `topic` in it.
    - `to`: the ledger to append to, made if need be; `to_topic`: the topic there (default: the
      same name; within one ledger it must be another).
    - `start`, `end`: offsets of the origin, [start, end); None: all that there is. A replay is
      known by source, topic, target and `start`: with another `start` it is another one.
    - `chunk`: messages appended at once, at most.

    Raises SourceError: DATA_LOSS where offsets of the range are not there.
    """
    to_topic = to_topic or topic
    if os.path.realpath(source) == os.path.realpath(to) and to_topic == topic:
        raise SourceError(PIPELINE, f"topic {topic!r} cannot be replayed into itself")
    check_chunk(chunk)
    progress = Progress(spark, out)
    with coded():
        origin = _origin(spark, source, topic)
        writer = job_name("replay", origin.name, str(start or 0))
        first = _done(to, to_topic, writer)
        if first is None:
            first = origin.first if start is None else start
        stop = origin.end if end is None else end
        if first < min(origin.first, stop) or stop > origin.end:
            raise SourceError(
                DATA_LOSS,
                f"{source} has offsets {origin.first} to {origin.end - 1} of topic "
                f"{topic!r}, not all of {first} to {stop - 1}",
            )
        with xl.open(to, "replay") as engine:
            return _replay(spark, origin, engine, to_topic, writer, (first, stop, chunk), progress)


def _done(ledger: str, topic: str, writer: str) -> int | None:
    """The position that earlier calls of the same replay have reached."""
    if not plan.ledger_exists(os.path.abspath(ledger)):
        return None
    with xl.open(ledger, "replay", readonly=True) as engine:
        try:
            return recorded(engine, topic).get(writer)
        except xl.TopicNotFoundError:
            return None


def _origin(spark: SparkSession, source: str, topic: str) -> Origin:
    if plan.ledger_exists(os.path.abspath(source)):
        with xl.open(source, "replay", readonly=True) as engine:
            here = plan.row(engine, topic)
            # By its id: a recreated topic has other offsets.
            name = _name(engine.ledger.uuid, str(here.id), topic)
            return Origin(
                name, here.first_offset, here.next_offset, None, engine.path, topic, here.id
            )
    files = files_of(spark, source)
    where = place(files.absolute(source), topic)
    mark = files.read(f"{where}/_ledger")
    if mark is None:
        raise SourceError(PIPELINE, f"{source} is neither a ledger nor an archive of {topic!r}")
    frame = parquet(spark, where).drop("range", "date")
    low, high, count = frame.selectExpr("min(offset)", "max(offset)", "count(*)").collect()[0]
    if count == 0 or high - low + 1 != count:
        raise SourceError(DATA_LOSS, f"{where} has {count} messages from {low} to {high}")
    # The same name for ledger and archive, so that a replay can continue from the archive.
    ledger, number = mark.split()
    name = _name(ledger, number, topic)
    return Origin(name, low, high + 1, frame, source, topic, int(number))


def _name(ledger: str, number: str, topic: str) -> str:
    return f"{ledger}:{number}:{topic}"


def _replay(
    spark: SparkSession,
    origin: Origin,
    engine: xl.Engine,
    topic: str,
    writer: str,
    bounds: tuple[int, int, int],
    progress: Progress,
) -> Replayed:
    first, end, chunk = bounds
    before, at = engine.topic(topic).next_offset, first
    while at < end:
        stop = min(at + chunk, end)
        with progress.step(f"{origin.topic} {at} to {stop - 1} into {topic}"):
            sink = with_origin(origin.read(spark, at, stop)).write.format(NAME).mode("append")
            sink = sink.option("topic", topic).option("txnAppId", writer)
            sink.option("txnVersion", stop).save(engine.path)
        at = stop
    return Replayed(first, at, plan.row(engine, topic).next_offset - before)
