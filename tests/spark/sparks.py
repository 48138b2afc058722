"""What the tests of the data source have in common: logs to read, queries with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import exclusivelog as xl
from testing.patience import PATIENCE

FORMAT = "exclusivelog"


def fill(path: str, topic: str = "orders", count: int = 10, start: int = 0) -> None:
    """Messages b"0", b"1", ... with keys, by one exclusive producer named alice."""
    with xl.open(path, "test") as engine:
        with engine.topic(topic).producer("exclusive", name="alice") as producer:
            numbers = range(start, start + count)
            producer.send_many([b"%d" % n for n in numbers], keys=[f"k{n % 3}" for n in numbers])


def read(spark: SparkSession, path: str, topic: str = "orders", **options: object) -> DataFrame:
    """A batch of a topic; `columns` are those of the schema."""
    columns = options.pop("columns", None)
    reader = spark.read.format(FORMAT).option("topic", topic)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return (reader.schema(columns) if isinstance(columns, str) else reader).load(path)


def values(path: str, topic: str) -> list[bytes | None]:
    """What the log holds, read without Spark."""
    with xl.open(path, "test", readonly=True) as engine:
        return [message.value for message in engine.topic(topic, create=False).reader()]


def epochs(path: str, topic: str) -> list[int]:
    """The epoch of each message."""
    with xl.open(path, "test", readonly=True) as engine:
        return [message.epoch for message in engine.topic(topic, create=False).reader()]


def write(frame: DataFrame, path: str, mode: str = "append", **options: object) -> None:
    """Append a DataFrame."""
    writer = frame.write.format(FORMAT).mode(mode)
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save(path)


def numbers(spark: SparkSession, count: int, partitions: int = 2, start: int = 0) -> DataFrame:
    """Rows with value "0", "1", ... in order."""
    return spark.range(start, start + count, 1, partitions).selectExpr("cast(id as string) value")


def stream(
    spark: SparkSession,
    path: str,
    checkpoint: Path,
    *,
    topic: str = "orders",
    to: str = "out",
    now: bool = True,
    change: Callable[[DataFrame], DataFrame] | None = None,
    sink: dict[str, object] | None = None,
    **options: object,
) -> StreamingQuery:
    """A query from one topic to another; `now` ends it once it has what there is."""
    reader = spark.readStream.format(FORMAT).option("topic", topic)
    for name, value in {"startingOffsets": "earliest", **options}.items():
        reader = reader.option(name, str(value))
    frame = reader.load(path).select("key", "value")
    writer = (frame if change is None else change(frame)).writeStream.format(FORMAT)
    for name, value in {"topic": to, "checkpointLocation": checkpoint, **(sink or {})}.items():
        writer = writer.option(name, str(value))
    if now:
        writer = writer.trigger(availableNow=True)
    return writer.start(path)


def finish(query: StreamingQuery) -> None:
    """Wait for the end of a query; raises what it failed with."""
    try:
        assert query.awaitTermination(int(PATIENCE)), "the query did not end"
    finally:
        query.stop()


def wait_for(what: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """What `what` returns once it is true."""
    deadline = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.05)
    return found


def refused(code: str, act: Callable[[], object]) -> str:
    """The text of the error with that code, which `act` must raise."""
    try:
        act()
    except PySparkException as error:
        text = str(error)
        assert f"[EXCLUSIVELOG_{code}]" in text, text
        return text.partition(f"[EXCLUSIVELOG_{code}]")[2]
    raise AssertionError(f"nothing was raised; expected {code}")


def left_in(path: str | Path) -> list[str]:
    """The files below a staging directory, without its own mark."""
    found = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
    return [name for name in found if not name.endswith(".exclusivelog-staging")]


def trim(path: str, topic: str, first: int) -> None:
    """Let the topic begin at this offset."""
    with xl.open(path) as engine:
        assert engine.topic(topic).trim(before=first) == first


def as_bytes(items: Iterable[int]) -> list[bytes]:
    """[b"0", b"1", ...]"""
    return [b"%d" % item for item in items]
