"""Spark reads a cluster engine's topics: what counts, once, in parallel; and no plan, log or error
shows what is needed to get in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import exclusivelog as xl
from exclusivelog.cluster.frames import Content, Frame, encode
from exclusivelog.spark import archive, audit
from exclusivelog.spark.errors import SourceError
from exclusivelog.spark.options import batch_options
from exclusivelog.spark.scan import scan
from exclusivelog.spark.source import ClusterPlace, Slice
from testing.broker import Namespace
from testing.patience import PATIENCE
from tests.spark.sparks import FORMAT, read

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

EACH = 400  # messages of an owner
SECRET = "secret.token.of-these-tests"


@pytest.fixture
def engine(namespace: Namespace) -> Iterator[xl.Engine]:
    with xl.open(namespace.url, "test", admin=namespace.admin) as engine:
        yield engine


@pytest.fixture
def filled(engine: xl.Engine, namespace: Namespace) -> Namespace:
    """Three owners of one topic, the second of which goes on after it was fenced."""
    topic = engine.topic("orders")
    for number in range(3):
        with topic.producer("exclusive", name="alice") as producer:
            stale = producer._session
            values = [b"%d" % n for n in range(number * EACH, (number + 1) * EACH)]
            for start in range(0, EACH, 50):
                producer.send_many(values[start : start + 50], keys=["k"] * 50)
        append_stale(engine, stale, topic.next_offset)
    return namespace


def append_stale(engine: xl.Engine, session: Any, first: int) -> None:
    """A frame of a session that has ended, directly into the Pulsar topic: it does not count."""
    backend: Any = engine.backend
    content = Content(b"stale", None, {}, None, 0, session.name, 10**6)
    log = backend.place.open("orders")
    log.append(encode(Frame(session.epoch, session.id, first, (content,))))
    log.close()


def test_a_batch_is_read_in_parallel_and_only_what_counts(
    spark: SparkSession, filled: Namespace
) -> None:
    frame = read(spark, filled.url, minPartitions=4, admin=filled.admin)
    assert frame.rdd.getNumPartitions() == 4
    rows = frame.orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(3 * EACH))
    assert [bytes(row.value) for row in rows] == [b"%d" % n for n in range(3 * EACH)]
    assert {(row.epoch, row.producer) for row in rows} == {(n, "alice") for n in (1, 2, 3)}
    some = read(
        spark,
        filled.url,
        startingOffsets='{"orders": 395}',
        endingOffsets='{"orders": 405}',
        admin=filled.admin,
        columns="offset bigint, epoch bigint",
    )
    assert [tuple(row) for row in some.orderBy("offset").collect()] == [
        (n, 1 if n < EACH else 2) for n in range(395, 405)
    ]
    found = scan(spark, filled.url, "orders", ["value"], admin=filled.admin)
    assert found.count() == 3 * EACH


def test_a_stream_reads_what_comes(
    spark: SparkSession, filled: Namespace, engine: xl.Engine, tmp_path: Path
) -> None:
    def run() -> None:
        frame = (
            spark.readStream.format(FORMAT)
            .option("topic", "orders")
            .option("admin", filled.admin)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "500")
            .load(filled.url)
        )
        query = (
            frame.selectExpr("offset", "cast(value as string) value")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(int(PATIENCE))

    run()
    with engine.topic("orders").producer("exclusive") as producer:
        producer.send(b"%d" % (3 * EACH))
    run()
    rows = spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()
    assert [(row.offset, row.value) for row in rows] == [(n, str(n)) for n in range(3 * EACH + 1)]


def test_archive_and_audit(spark: SparkSession, filled: Namespace, tmp_path: Path) -> None:
    access = {"admin": filled.admin}
    verdicts = audit.run(spark, filled.url, access=access)
    assert verdicts
    assert [v for v in verdicts if not v.holds] == []
    to = str(tmp_path / "archive")
    half = archive.run(spark, filled.url, "orders", to, before=EACH, access=access)
    assert (half.start, half.end) == (0, EACH)
    rest = archive.run(spark, filled.url, "orders", to, access=access)
    assert (rest.start, rest.end) == (EACH, 3 * EACH)
    found = spark.read.parquet(f"{to}/orders")
    assert found.select("offset").distinct().count() == 3 * EACH


def test_what_a_cluster_cannot_do_is_an_error_of_an_option(
    spark: SparkSession, filled: Namespace, path: str
) -> None:
    with pytest.raises(Exception, match=r"EXCLUSIVELOG_OPTION.*mirror it"):
        spark.range(1).selectExpr("cast(id as string) value").write.format(FORMAT).mode(
            "append"
        ).option("topic", "orders").save(filled.url)
    with pytest.raises(SourceError, match="token is for clusters"):
        batch_options({"path": path, "topic": "orders", "token": "x"})
    with pytest.raises(SourceError, match="keep"):
        archive.run(
            spark,
            filled.url,
            "orders",
            path,
            keep=archive.dt.timedelta(0),
            access={"admin": filled.admin},
        )


def test_no_plan_log_error_or_repr_has_the_token(
    spark: SparkSession,
    filled: Namespace,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG, "exclusivelog")
    told = []
    frame = read(spark, filled.url, admin=filled.admin, token=SECRET)
    assert frame.count() == 3 * EACH
    plan: Any = frame._jdf.queryExecution()  # type: ignore[attr-defined]
    told += [plan.toString(), plan.logical().toString(), plan.optimizedPlan().toString()]
    streamed = (
        spark.readStream.format(FORMAT)
        .option("topic", "orders")
        .option("admin", filled.admin)
        .option("token", SECRET)
        .option("startingOffsets", "earliest")
        .load(filled.url)
    )
    told += [streamed._jdf.queryExecution().toString()]  # type: ignore[attr-defined]
    query = (
        streamed.writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(int(PATIENCE))
    told += [str(query.lastProgress), *(p.read_text() for p in (tmp_path / "c").rglob("[0-9]*"))]
    for wrong in ({"startingOffsets": "never"}, {"admin": "http://127.0.0.1:1"}):
        with pytest.raises(Exception, match="EXCLUSIVELOG") as error:
            read(spark, filled.url, **{"admin": filled.admin, "token": SECRET, **wrong}).count()
        told += [str(error.value), repr(error.value)]
    options = batch_options({"path": filled.url, "topic": "orders", "token": SECRET})
    place = ClusterPlace(filled.url, options.access)
    told += [repr(options), repr(place), repr(Slice((), place))]
    out, err = capfd.readouterr()
    told += [out, err, caplog.text]
    assert not [text for text in told if SECRET in text]
    assert SECRET in str(dict(options.access))  # else the test could not fail
