"""A topic's messages as DataFrames, for the pipelines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from exclusivelog.spark.errors import PIPELINE, SourceError
from exclusivelog.spark.options import NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHUNK = 5_000_000  # messages a range


def check_chunk(chunk: int) -> None:
    """SourceError unless so many messages at once get somewhere."""
    if chunk < 1:
        raise SourceError(PIPELINE, f"chunk={chunk}: it takes a whole number from 1 on")


def read(
    spark: SparkSession, ledger: str, topic: str, number: int, start: int, stop: int
) -> DataFrame:
    """The messages [start, stop) of a topic, and of no other one that has its name by now."""
    from exclusivelog.spark.source import register

    register(spark)
    frame = spark.read.format(NAME).option("topic", topic)
    frame = frame.option("startingOffsets", json.dumps({topic: start}))
    return (
        frame.option("topicIds", json.dumps({topic: number}))
        .option("endingOffsets", json.dumps({topic: stop}))
        .load(ledger)
    )


def with_origin(frame: DataFrame) -> DataFrame:
    """The columns that can be written, with the origin's offset and epoch as properties."""
    origin = "map('origin_offset', cast(offset as string), 'origin_epoch', cast(epoch as string))"
    former = (
        "map_filter(coalesce(properties, cast(map() as map<string,string>)), "
        "(k, v) -> k not in ('origin_offset', 'origin_epoch'))"
    )
    properties = f"map_concat({former}, {origin}) as properties"
    return frame.selectExpr("key", "value", "event_time", properties)
