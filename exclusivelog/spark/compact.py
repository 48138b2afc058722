"""Compact: the last message of each key, without tombstones, into Parquet or another topic.

First it finds the greatest offset of each key, from two columns; then it reads the messages at
those offsets. Messages without a key are left out. Without new messages, a repeated call changes
nothing. A target topic from an earlier call has messages of keys that were removed since:
tombstones are appended for these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.once import recorded
from exclusivelog.spark import plan
from exclusivelog.spark.errors import PIPELINE, SourceError, coded
from exclusivelog.spark.files import Files, files_of, resolved
from exclusivelog.spark.options import NAME
from exclusivelog.spark.pipelines import Progress, job_name, parquet, with_origin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MARK = "_compacted.json"


@dataclass(frozen=True)
class Compacted:
    """The topic was compacted up to the offset `end`. `keys` is None if the target was up to date
    already."""

    topic: str
    end: int
    keys: int | None


def run(
    spark: SparkSession,
    ledger: str,
    topic: str,
    *,
    to: str | None = None,
    to_topic: str | None = None,
    out: TextIO | None = None,
) -> Compacted:
    """Compact a topic up to its current end.

    - `to`: a directory for Parquet; what it had is replaced, once the new is whole.
    - `to_topic`: a topic of the same ledger, which the compacted messages are appended to, all
      at once, with their `origin_offset` and `origin_epoch` as properties. One of the two.

    Raises SourceError: PIPELINE for a directory that is something else's.
    """
    if (to is None) == (to_topic is None):
        raise SourceError(PIPELINE, "to and to_topic: give one of them")
    if to_topic == topic:
        raise SourceError(PIPELINE, f"topic {topic!r} cannot be compacted into itself")
    progress = Progress(spark, out)
    with coded(), xl.open(ledger, "compact", create=False) as engine:
        here = plan.row(engine, topic)
        end = here.next_offset
        frame = latest(spark, engine.path, topic, here.id, here.first_offset, end)
        if to is not None:
            frame = frame.where("value is not null")
            # A topic that was made anew has another id; one that was trimmed, fewer keys.
            mark = {
                "ledger": engine.ledger.uuid,
                "name": topic,
                "topic": here.id,
                "start": here.first_offset,
                "end": end,
            }
            keys = _into_files(files_of(spark, to), frame, to, mark, progress)
        else:
            assert to_topic is not None
            keys = _into_topic(engine, frame, here, to_topic, progress)
        return Compacted(topic, end, keys)


def latest(
    spark: SparkSession, ledger: str, topic: str, number: int, start: int, stop: int
) -> DataFrame:
    """The last message of each key among [start, stop), tombstones too, in the order of their
    offsets. `number` is the topic's id."""
    from exclusivelog.spark.source import read

    messages = read(spark, ledger, topic, number, start, stop)
    keys = spark.read.schema("offset bigint, key binary").format(NAME).option("topic", topic)
    keys = keys.option("startingOffsets", json.dumps({topic: start}))
    keys = keys.option("topicIds", json.dumps({topic: number}))
    found = keys.option("endingOffsets", json.dumps({topic: stop})).load(ledger)
    last = found.where("key is not null").groupBy("key").agg({"offset": "max"})
    last = last.selectExpr("`max(offset)` as offset")
    return messages.join(last, "offset", "left_semi").orderBy("offset")


def _into_files(
    files: Files, frame: DataFrame, to: str, mark: dict[str, object], progress: Progress
) -> int | None:
    to = resolved(files.absolute(to))
    found = json.loads(files.read(f"{to}/{MARK}") or "null")
    if found == mark:
        progress.report(f"{to} is up to date")
        return None
    if found is None and files.names(to):
        raise SourceError(
            PIPELINE, f"{to} is not empty, and was not written by compact; choose another directory"
        )
    for what in ("ledger", "name"):
        if found is not None and found.get(what, mark[what]) != mark[what]:
            raise SourceError(
                PIPELINE,
                f"{to} holds the compacted topic {found.get('name', '?')!r} of ledger "
                f"{found.get('ledger')}, not topic {mark['name']!r} of ledger {mark['ledger']}; "
                "choose another directory",
            )
    aside, before = f"{to}.exclusivelog-writing", f"{to}.exclusivelog-before"
    files.remove(aside)
    with progress.step("compacting"):
        frame.write.option("compression", "zstd").parquet(aside)
        keys = parquet(frame.sparkSession, aside).count()
    files.write(f"{aside}/{MARK}", json.dumps(mark))
    files.remove(before)
    if files.exists(to):
        files.rename(to, before)
    files.rename(aside, to)  # if killed before this, the next call writes it again
    files.remove(before)
    return keys


def _into_topic(
    engine: xl.Engine, frame: DataFrame, source: _core.TopicRow, target: str, progress: Progress
) -> int | None:
    # By its id: a recreated topic has other offsets.
    writer, end = job_name("compact", str(source.id), source.name), source.next_offset
    there = engine.topic(target)
    before = recorded(engine, there).get(writer)
    if before is not None and before >= end:
        progress.report(f"{target} is up to date")
        return None
    count = plan.row_of(engine, there.id).next_offset
    if count == 0:
        frame = frame.where("value is not null")
    with progress.step(f"compacting {source.name} into {target}"):
        sink = with_origin(frame).write.format(NAME).mode("append").option("topic", target)
        sink.option("txnAppId", writer).option("txnVersion", end).save(engine.path)
    return plan.row_of(engine, there.id).next_offset - count
