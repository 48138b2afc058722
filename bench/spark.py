"""Spark on a topic, compared with Spark on Parquet (P16)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import exclusivelog as xl
from bench.append import messages
from bench.measure import Arm, Figure, Series, Settings, Stores, Target, take_turns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT, FULL_COUNT = 5_000_000, 20_000_000
CHUNK = 100_000
WRITTEN = 2_000_000
BATCHES = 40  # micro-batches that are timed
PATIENCE = 150.0  # seconds: the first batch of a JVM that has just started takes longest
TWO = "offset bigint, value binary"
NINE = (
    "offset bigint, epoch bigint, key binary, value binary, publish_time timestamp, "
    "event_time timestamp, producer string, sequence_id bigint, properties map<string,string>"
)
FORMAT = "exclusivelog"


def p16(settings: Settings) -> Figure:
    """Reading, writing, streaming and an audit, with Spark on this machine."""
    figure = Figure("P16", "PySpark: topics against Parquet")
    count = FULL_COUNT if settings.full else COUNT
    with Stores(settings) as stores, session(stores) as spark:
        _fill(stores.engine("ours"), count)
        path = stores.path("ours")
        stored = stores.path("parquet")
        # Four files, however many tasks write them: Spark's tasks of a read go by files.
        topic(spark, path, NINE).write.option("maxRecordsPerFile", count // 4).parquet(stored)
        _compare(figure, settings, stores, spark, count)
        _audit(figure, settings, spark, path, count)
        _stream(figure, stores, spark)
    figure.notes.append(
        "Parquet is written without a flush; what is appended to a topic survives a power loss"
    )
    return figure


@contextmanager
def session(stores: Stores) -> Iterator[SparkSession]:
    from exclusivelog.spark.session import local_session

    settings = {
        "spark.driver.memory": "2g",
        "spark.local.dir": stores.path("spark"),
        "spark.python.unix.domain.socket.enabled": "true",  # docs/spark.md recommends it
    }
    spark = local_session("local[2]", settings, "bench")
    try:
        yield spark
    finally:
        spark.stop()


def _fill(engine: xl.Engine, count: int) -> None:
    values = messages(CHUNK)
    keys = [b"key-%d" % (number % 10_000) for number in range(CHUNK)]
    with engine.topic("many").producer("exclusive") as producer:
        for at in range(0, count, CHUNK):
            times = list(range(at, at + CHUNK))
            producer.send_many(values, keys=keys, event_times=times)


def topic(spark: SparkSession, path: str, columns: str) -> DataFrame:
    return spark.read.schema(columns).format(FORMAT).option("topic", "many").load(path)


def scanned(spark: SparkSession, path: str, columns: str) -> DataFrame:
    from exclusivelog.spark import scan

    return scan(spark, path, "many", [column.split()[0] for column in columns.split(", ")])


def nowhere(frame: DataFrame) -> None:
    """Make Spark produce every row of it."""
    frame.write.format("noop").mode("overwrite").save()


# ---- reading and writing -----------------------------------------------------------------


def _compare(
    figure: Figure, settings: Settings, stores: Stores, spark: SparkSession, count: int
) -> None:
    path, stored = stores.path("ours"), stores.path("parquet")

    def as_parquet() -> DataFrame:
        return spark.read.parquet(stored)

    def new_name() -> str:
        return f"out-{time.monotonic_ns()}"

    def new_path() -> str:
        return stores.path(new_name())

    rows = as_parquet().where(f"offset < {WRITTEN}").select("key", "value")
    rows = rows.coalesce(2).cache()
    assert rows.count() == WRITTEN
    arms = [
        _reading("topic, 2 columns", lambda: topic(spark, path, TWO), count),
        _reading("scan, 2 columns", lambda: scanned(spark, path, TWO), count),
        _reading("Parquet, 2 columns", lambda: as_parquet().select("offset", "value"), count, True),
        _reading("topic, 9 columns", lambda: topic(spark, path, NINE), count),
        _reading("scan, 9 columns", lambda: scanned(spark, path, NINE), count),
        _reading("Parquet, 9 columns", as_parquet, count, True),
        Arm("into a topic", lambda name: _append(rows, path, name), WRITTEN, prepare=new_name),
        Arm("into Parquet", lambda name: _store(rows, name), WRITTEN, prepare=new_path, rival=True),
    ]
    found = take_turns(arms, settings.rounds_or(5))
    rows.unpersist()
    figure.series += list(found.values())
    for columns, least in ((2, 1.1), (9, 1.0)):
        parquet = found[f"Parquet, {columns} columns"]
        figure.compare(
            f"read by the data source, {columns} columns",
            found[f"topic, {columns} columns"],
            parquet,
            Target(least_ratio=0.7),
        )
        figure.compare(
            f"read by scan, {columns} columns",
            found[f"scan, {columns} columns"],
            parquet,
            Target(least_ratio=least),
        )
    figure.compare(
        "write key and value, durable",
        found["into a topic"],
        found["into Parquet"],
        Target(least=1e6),
    )


def _reading(name: str, frame: Callable[[], DataFrame], count: int, rival: bool = False) -> Arm:
    return Arm(name, lambda _: nowhere(frame()), count, rival=rival)


def _append(rows: DataFrame, path: str, name: str) -> None:
    rows.write.format(FORMAT).mode("append").option("topic", name).save(path)


def _store(rows: DataFrame, path: str) -> None:
    rows.write.parquet(path)


# ---- the audit ---------------------------------------------------------------------------


def _audit(figure: Figure, settings: Settings, spark: SparkSession, path: str, count: int) -> None:
    from exclusivelog.spark import audit

    def judged(_: Any) -> list[float]:
        start = time.perf_counter()
        verdicts = audit.run(spark, path, ["many"])
        assert all(verdict.holds for verdict in verdicts)
        return [time.perf_counter() - start]

    name = f"audit of {count:,} messages"
    found = take_turns([Arm(name, judged, unit="s")], settings.rounds_or(5))[name]
    figure.series.append(found)
    figure.compare(name, found, target=Target(most=2.0) if count == COUNT else None)


# ---- streaming ---------------------------------------------------------------------------


def _stream(figure: Figure, stores: Stores, spark: SparkSession) -> None:
    """From just before a message's append to the moment when its copy is in the log."""
    engine = stores.engine("streamed")
    source, target = engine.topic("in"), engine.topic("out")
    reader = spark.readStream.format(FORMAT).option("topic", "in")
    query = (
        reader.option("startingOffsets", "earliest")
        .load(stores.path("streamed"))
        .select("key", "value")
        .writeStream.format(FORMAT)
        .option("topic", "out")
        .option("checkpointLocation", stores.path("checkpoint"))
        .start(stores.path("streamed"))
    )
    samples = []
    try:
        with source.producer("exclusive") as producer, target.reader() as copies:
            for number in range(BATCHES + 5):
                start = time.perf_counter()
                producer.send(b"%d" % number)
                assert copies.read_next(PATIENCE).value == b"%d" % number
                samples.append(time.perf_counter() - start)
                time.sleep(0.05)  # the query has come to rest
    finally:
        query.stop()
    series = Series("append to committed", "s", samples[5:])
    figure.series.append(series)
    figure.compare("a micro-batch, from append to committed, p50", series, target=Target(most=0.3))
