"""Spark Connect: a client without a JVM, in a process of its own, asks a server to run its queries.
The data source, `scan` and the pipelines give it what they give to a classic session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import exclusivelog as xl
from exclusivelog.spark import archive, audit, compact, register, replay, report, scan
from exclusivelog.spark.errors import SourceError
from exclusivelog.spark.files import HadoopFiles, LocalFiles, is_connect
from testing.patience import PATIENCE
from testing.processes import spawn
from tests.spark.sparks import (
    as_bytes,
    epochs,
    fill,
    finish,
    numbers,
    read,
    refused,
    stream,
    trim,
    values,
    write,
)

pytestmark = [pytest.mark.once, pytest.mark.long]

Ask = Callable[..., Any]


def connect(url: str) -> None:
    """In the client's process: its session is the one that `session` finds."""
    os.environ["SPARK_REMOTE"] = url
    register(session())


def session() -> SparkSession:
    return SparkSession.builder.getOrCreate()


@pytest.fixture(scope="module")
def server(spark: SparkSession) -> Iterator[str]:
    """The URL of a server in the JVM of the tests' own session."""
    package: Any = spark.sparkContext._jvm.org.apache.spark.sql.connect.service  # type: ignore[union-attr]
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    yield f"sc://127.0.0.1:{service.localPort()}"
    service.stop(getattr(service, "stop$default$1")(), getattr(service, "stop$default$2")())


@pytest.fixture(scope="module")
def ask(server: str) -> Iterator[Ask]:
    """`ask(function, ...)` calls it in the client's process."""
    with ProcessPoolExecutor(1, spawn, connect, (server,)) as client:
        yield lambda *given, **options: client.submit(*given, **options).result(PATIENCE)


# ---- in the client's process -------------------------------------------------------------


def of_what() -> tuple[bool, bool]:
    """Is there a JVM? Is the session one of Spark Connect?"""
    return SparkSession._instantiatedSession is not None, is_connect(session())


def values_read(path: str) -> list[bytes]:
    return [bytes(row.value) for row in read(session(), path).collect()]


def values_scanned(path: str, **options: Any) -> list[bytes]:
    frame = scan(session(), path, "orders", ["value"], **options)
    return [bytes(row.value) for row in frame.collect()]


def write_once(path: str) -> None:
    for _ in range(2):
        write(numbers(session(), 10), path, topic="copy", txnAppId="job", txnVersion=1)


def refuse_what_was_trimmed(path: str) -> str:
    frame = read(session(), path, startingOffsets='{"orders": 0}')
    return refused("DATA_LOSS", frame.count)


def stream_once(path: str, checkpoint: Path) -> None:
    finish(stream(session(), path, checkpoint))


def stream_beside_another_producer(path: str, checkpoint: Path) -> str:
    """A query whose output topic another producer takes between two of its batches."""
    query = stream(session(), path, checkpoint, now=False)
    query.processAllAvailable()
    with xl.open(path, "other") as engine:
        engine.topic("out").producer("exclusive_with_fencing", name="other").close()
    fill(path, count=1, start=5)
    return refused("PRODUCER_FENCED", lambda: finish(query))


def run(pipeline: Callable[..., Any], *given: object, **options: object) -> Any:
    return pipeline(session(), *given, **options)


# ---- the data source ---------------------------------------------------------------------


def test_a_client_without_a_jvm_reads_and_writes(ask: Ask, path: str) -> None:
    fill(path, count=20)
    assert ask(of_what) == (False, True)
    assert ask(values_read, path) == as_bytes(range(20))
    ask(write_once, path)
    assert values(path, "copy") == as_bytes(range(10))


def test_errors_have_their_codes(ask: Ask, path: str) -> None:
    fill(path)
    trim(path, "orders", 5)
    assert "'orders'" in ask(refuse_what_was_trimmed, path)


def test_scan_reads_in_the_order_of_offsets(ask: Ask, path: str) -> None:
    fill(path, count=100)
    assert ask(values_scanned, path) == as_bytes(range(100))
    shipped = ask(values_scanned, path, access="inline", minPartitions=3)
    assert shipped == as_bytes(range(100))


def test_a_stream_appends_each_batch_once(ask: Ask, path: str, tmp_path: Path) -> None:
    fill(path, count=5)
    ask(stream_once, path, tmp_path / "checkpoint")
    fill(path, count=5, start=5)
    ask(stream_once, path, tmp_path / "checkpoint")
    forget_the_last_commit(tmp_path / "checkpoint")
    ask(stream_once, path, tmp_path / "checkpoint")
    assert values(path, "out") == as_bytes(range(10))
    assert epochs(path, "out") == [1] * 5 + [2] * 5


def forget_the_last_commit(checkpoint: Path) -> None:
    """As if the server had died between the ledger's commit and Spark's."""
    last = max(
        (file for file in (checkpoint / "commits").glob("[0-9]*")), key=lambda f: int(f.name)
    )
    last.unlink()


def test_a_stream_whose_topic_was_taken_ends_as_fenced(ask: Ask, path: str, tmp_path: Path) -> None:
    fill(path, count=5)
    assert "'out'" in ask(stream_beside_another_producer, path, tmp_path / "checkpoint")
    assert values(path, "out") == as_bytes(range(5))


# ---- the pipelines -----------------------------------------------------------------------


def offsets(spark: SparkSession, where: Path) -> list[int]:
    return sorted(row.offset for row in spark.read.parquet(str(where)).select("offset").collect())


def test_an_archive_goes_on_in_a_session_of_the_other_kind(
    spark: SparkSession, ask: Ask, path: str, tmp_path: Path
) -> None:
    to = tmp_path / "archive"
    fill(path, count=10)
    assert archive.run(spark, path, "orders", str(to), before=4).end == 4
    done = ask(run, archive.run, path, "orders", str(to))
    assert (done.start, done.end) == (4, 10)
    done = archive.run(spark, path, "orders", str(to))
    assert (done.start, done.end) == (10, 10)
    assert offsets(spark, to / "orders") == list(range(10))
    assert ask(run, replay.run, str(to), "orders", str(tmp_path / "replayed")).messages == 10
    assert values(str(tmp_path / "replayed"), "orders") == as_bytes(range(10))


def test_a_compaction_goes_on_in_a_session_of_the_other_kind(
    spark: SparkSession, ask: Ask, path: str, tmp_path: Path
) -> None:
    to = tmp_path / "compacted"
    fill(path, count=10)
    assert compact.run(spark, path, "orders", to=str(to)).keys == 3
    assert ask(run, compact.run, path, "orders", to=str(to)).keys is None
    fill(path, count=1, start=10)
    assert ask(run, compact.run, path, "orders", to=str(to)).keys == 3
    assert compact.run(spark, path, "orders", to=str(to)).keys is None
    assert offsets(spark, to) == [8, 9, 10]
    assert ask(run, compact.run, path, "orders", to_topic="latest").keys == 3


def test_an_audit_and_a_report_judge(ask: Ask, path: str, tmp_path: Path) -> None:
    fill(path, count=10)
    verdicts = ask(run, audit.run, path)
    assert verdicts
    assert all(verdict.holds for verdict in verdicts)
    assert ask(run, report.run, path, str(tmp_path / "page.html")).stories
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "path", ["a", "./a/../b", "/x//y/", "/x/a%2Fb", "file:/x/y", "file:///x/y z", "/x/[1]*?"]
)
def test_paths_read_as_in_a_classic_session(spark: SparkSession, path: str) -> None:
    assert LocalFiles(path).absolute(path) == HadoopFiles(spark, path).absolute(path)


def test_files_can_be_replaced_from_either_session(spark: SparkSession, tmp_path: Path) -> None:
    here, there = LocalFiles(str(tmp_path)), HadoopFiles(spark, str(tmp_path))
    file = here.absolute(str(tmp_path / "file"))
    for number, files in enumerate((there, here, there, here)):
        files.write(file, str(number))
        assert here.read(file) == there.read(file) == str(number)
        assert here.names(str(tmp_path)) == there.names(str(tmp_path)) == ["file"]


def test_what_another_machine_has_written_is_missed(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    with pytest.raises(SourceError, match="has not written"):
        files.rename(str(tmp_path / "nothing"), str(tmp_path / "there"))


def test_a_directory_on_no_local_file_system_is_refused(ask: Ask, path: str) -> None:
    fill(path)
    for pipeline, options in (
        (archive.run, {"to": "s3a://b/a"}),
        (compact.run, {"to": "s3a://b/a"}),
    ):
        with pytest.raises(SourceError, match=r"s3a://b/a.*name a local directory"):
            ask(run, pipeline, path, "orders", **options)
