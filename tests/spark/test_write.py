"""Writing with Spark: executors stage, the driver appends in one transaction. A batch that is
written twice is in the log once; a superseded run can no longer write."""

from __future__ import annotations

import datetime as dt
import glob
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.records import U64
from exclusivelog.local.storage import tables
from exclusivelog.messages import Columns
from exclusivelog.once import Run, append_once, record, recorded
from exclusivelog.spark import staging
from exclusivelog.spark.errors import SourceError
from exclusivelog.spark.options import batch_write_options, stream_write_options
from exclusivelog.spark.source import Job, Staged, StreamWriter
from exclusivelog.spark.staging import Directory, Piece, Stage, check_arrived, parts, staged
from testing.pages import blocks
from testing.patience import PATIENCE
from tests.spark.sparks import (
    as_bytes,
    epochs,
    fill,
    finish,
    left_in,
    numbers,
    refused,
    stream,
    values,
    wait_for,
    write,
)

pytestmark = pytest.mark.once

STAGING = "log/staging"
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def part(*items: bytes | None) -> Columns:
    return Columns(_core.strings(list(items)))


# ---- the transaction, without Spark ------------------------------------------------------


def test_a_batch_is_appended_once_by_number(engine) -> None:
    run = Run("job", "run", "spark")
    first = append_once(engine, run, 0, {"a": [part(b"1", b"2")], "b": [part(b"x")]})
    assert (first["a"].offsets, first["b"].offsets) == (range(2), range(1))
    again = append_once(engine, run, 0, {"a": [part(b"1", b"2")], "b": [part(b"x")]})
    assert (again["a"].offsets, again["a"].epoch) == (range(2, 2), 1)
    assert append_once(engine, run, 5, {"a": [part(b"3")]})["a"].offsets == range(2, 3)
    assert append_once(engine, run, 4, {"a": [part(b"4")]})["a"].offsets == range(3, 3)
    assert append_once(engine, Run("other", "r", "p"), 0, {"a": [part(b"5")]})["a"].epoch == 2
    assert [message.value for message in engine.topic("a").reader()] == [b"1", b"2", b"3", b"5"]
    assert [message.sequence_id for message in engine.topic("a").reader()] == [0, 1, 2, 0]
    assert recorded(engine, "a") == {"job": 5, "other": 0}
    assert engine.verify().ok


def test_a_run_keeps_its_epoch_until_another_has_had_the_topic(engine) -> None:
    run = Run("job", "run-1", "spark")
    assert append_once(engine, run, 0, {"a": [part(b"1")]})["a"].epoch == 1
    assert append_once(engine, run, 1, {"a": [part(b"2")]})["a"].epoch == 1
    with engine.topic("a").producer("exclusive"):
        with pytest.raises(xl.ProducerFencedError):
            append_once(engine, run, 2, {"a": [part(b"3")]})
    with pytest.raises(xl.ProducerFencedError):  # for ever (rule B4)
        append_once(engine, run, 2, {"a": [part(b"3")]})
    assert append_once(engine, Run("job", "run-2", "spark"), 2, {"a": [part(b"3")]})["a"].epoch == 3
    grants = [event.reason for event in engine.history("a") if event.kind == "grant"]
    assert grants == ["request", "request", "request"]  # none for a batch that was not appended


def test_b4_a_run_that_was_superseded_stays_so_when_its_topic_is_made_anew(engine, path) -> None:
    first, second = Run("job", "run-1", "spark"), Run("job", "run-2", "spark")
    append_once(engine, first, 0, {"a": [part(b"1")]})
    append_once(engine, second, 1, {"a": [part(b"2")]})
    for epoch in (3, 4):
        engine.delete_topic("a")
        with pytest.raises(xl.ProducerFencedError):
            append_once(engine, first, 2, {"a": [part(b"stale")]})
        assert engine.topics() == []
        # No other producer has owned it in between: the run continues in a new epoch (rule B1).
        assert append_once(engine, second, epoch, {"a": [part(b"3")]})["a"].epoch == epoch
        with xl.open(path, name="other") as other, pytest.raises(xl.ProducerFencedError):
            append_once(other, first, epoch + 1, {"a": [part(b"stale")]})
        assert append_once(engine, second, epoch + 1, {"a": [part(b"4")]})["a"].epoch == epoch
        assert [message.value for message in engine.topic("a").reader()] == [b"3", b"4"]


def test_b4_a_run_is_superseded_by_who_has_its_topic_once_it_is_made_anew(engine) -> None:
    run = Run("job", "run", "spark")
    append_once(engine, run, 0, {"a": [part(b"1")]})
    engine.delete_topic("a")
    with engine.topic("a").producer("exclusive") as owner, pytest.raises(xl.ProducerFencedError):
        append_once(engine, run, 1, {"a": [part(b"stale")]})
    assert owner.state == "closed"
    with pytest.raises(xl.ProducerFencedError):
        append_once(engine, run, 1, {"a": [part(b"stale")]})


def test_a_copy_of_a_checkpoint_is_told(engine) -> None:
    """Two queries use copies of one checkpoint: the later one fences the other. A query whose copy
    is older is refused, so that it does not skip batches that it takes for written."""
    first, copy = Run("job", "run-1", "spark"), Run("job", "run-2", "spark")
    for number in range(3):
        append_once(engine, first, number, {"a": [part(b"%d" % number)]})
    with pytest.raises(xl.LedgerError, match="copied or restored checkpoint"):
        append_once(engine, copy, 1, {"a": [part(b"others")]})
    append_once(engine, first, 3, {"a": [part(b"3")]})
    assert append_once(engine, copy, 3, {"a": [part(b"3")]})["a"].offsets == range(4, 4)
    with pytest.raises(xl.ProducerFencedError):
        append_once(engine, first, 4, {"a": [part(b"4")]})
    append_once(engine, copy, 4, {"a": [part(b"4")]})
    assert [m.value for m in engine.topic("a").reader()] == [b"%d" % n for n in range(5)]


def test_so_it_is_of_a_query_that_writes_as_a_shared_producer(engine) -> None:
    first, copy = (Run("job", f"run-{n}", "spark", access_mode="shared") for n in (1, 2))
    for number in range(3):
        append_once(engine, first, number, {"a": [part(b"%d" % number)]})
    with pytest.raises(xl.LedgerError, match="copied or restored checkpoint"):
        append_once(engine, copy, 1, {"a": [part(b"others")]})
    assert append_once(engine, copy, 2, {"a": [part(b"2")]})["a"].offsets == range(3, 3)
    append_once(engine, first, 3, {"a": [part(b"3")]})
    assert append_once(engine, first, 3, {"a": [part(b"3")]})["a"].offsets == range(4, 4)
    assert [m.value for m in engine.topic("a").reader()] == [b"%d" % n for n in range(4)]


def test_what_is_remembered_of_runs_and_jobs_is_bounded(engine, monkeypatch) -> None:
    """The oldest go; those that go on are where they were, and a deleted topic keeps no numbers."""
    monkeypatch.setattr(tables, "MOST_FENCES", 40)
    monkeypatch.setattr(tables, "MOST_WRITERS", 40)
    for n in range(200):
        append_once(engine, Run(f"job {n}", f"run {n}", "spark"), 0, {"a": [part(b"x")]})
        append_once(engine, Run("always", None, "spark"), n, {"a": [part(b"y")]})
    number = engine.topic("a").id
    with engine.ledger.read() as found:
        assert 20 < len(list(found.rows.under("fences", number))) <= 40
        assert 20 < len(found.once.batches(number)) <= 40
        assert found.once.batch(number, "always") == 199
        assert found.once.batch(number, "job 199") == 0
    with pytest.raises(xl.ProducerFencedError):
        append_once(engine, Run("job 198", "run 198", "spark"), 1, {"a": [part(b"stale")]})
    again = append_once(engine, Run("always", None, "spark"), 199, {"a": [part(b"y")]})
    assert len(again["a"].offsets) == 0
    engine.delete_topic("a")
    with engine.ledger.read() as found:
        assert found.once.batches(number) == [] or found.deletions.all()


def test_the_numbers_of_an_older_version_are_read(engine) -> None:
    append_once(engine, Run("job", "run", "spark"), 7, {"a": [part(b"x")]})
    key = U64.pack(engine.topic("a").id) + b"job"
    with engine.ledger.write_exclusive() as found:
        found.rows.put("batches", key, found.rows.get("batches", key)[:8])
    assert recorded(engine, "a") == {"job": 7}
    append_once(engine, Run("job", "run", "spark"), 8, {"a": [part(b"y")]})
    assert recorded(engine, "a") == {"job": 8}


def test_a_new_run_fences_the_topics_holder(engine) -> None:
    topic = engine.topic("a")
    owner = topic.producer("exclusive", name="owner")
    with pytest.raises(xl.ProducerFencedError, match="held by producer 'owner'"):
        append_once(engine, Run("job", "r", "spark", "exclusive"), 0, {"a": [part(b"1")]})
    assert owner.send(b"0") == 0
    assert append_once(engine, Run("job", "r", "spark"), 0, {"a": [part(b"1")]})["a"].epoch == 2
    with pytest.raises(xl.ProducerFencedError):
        owner.send(b"2")
    assert [message.value for message in topic.reader()] == [b"0", b"1"]


def test_a_shared_run_goes_in_between_others(engine) -> None:
    run = Run("job", "r", "spark", "shared")
    with engine.topic("a").producer(name="other") as other:
        other.send(b"0")
        append_once(engine, run, 0, {"a": [part(b"1")]})
        other.send(b"2")
        append_once(engine, run, 0, {"a": [part(b"1")]})
    assert [message.value for message in engine.topic("a").reader()] == [b"0", b"1", b"2"]
    with engine.topic("a").producer("exclusive"), pytest.raises(xl.ProducerBusyError):
        append_once(engine, run, 1, {"a": [part(b"3")]})


def test_a_batch_that_is_refused_by_one_topic_is_in_none(engine) -> None:
    run = Run("job", "run", "spark")
    append_once(engine, run, 0, {"b": [part(b"0")]})
    with engine.topic("b").producer("exclusive"):
        pass
    with pytest.raises(xl.ProducerFencedError):
        append_once(engine, run, 1, {"a": [part(b"1")], "b": [part(b"1")]})
    assert engine.topics() == ["b"]  # none is made for it
    assert engine.topic("a").epoch == 0  # and no epoch is used up (rule A2)
    assert recorded(engine, "a") == {}


def test_a_failure_in_the_middle_leaves_nothing(engine) -> None:
    def breaks():
        yield part(bytes(2 << 20))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        append_once(engine, Run("job", "run", "spark"), 0, {"a": breaks()})
    topic = engine.topic("a")
    assert (topic.next_offset, topic.epoch) == (0, 0)
    append_once(engine, Run("job", "run", "spark"), 0, {"a": [part(b"1")]})
    assert engine.verify().ok


def test_the_library_s_own_topics_are_not_written(engine, path) -> None:
    """Rule E5: what `__events__` says has happened, and nothing else."""
    engine.topic("a").producer("exclusive").close()
    before = list(engine.history())
    run = Run("job", "run", "spark")
    with pytest.raises(ValueError, match="can only be read"):
        append_once(engine, run, 0, {"b": [part(b"1")], "__events__": [part(b"{}")]})
    assert list(engine.history()) == before
    assert engine.topics() == ["a"]
    with pytest.raises(SourceError, match=r"OPTION.*can only be read"):
        batch_write_options({"path": path, "topic": "__events__"})


@pytest.mark.parametrize(
    ("number", "error"), [(2**63, ValueError), (-(2**63), ValueError), ("7", TypeError)]
)
def test_a_number_that_cannot_be_is_refused(engine, number, error) -> None:
    """It is no damage: nothing was written."""
    with pytest.raises(error, match="number"):
        append_once(engine, Run("job", "run", "spark"), number, {"a": [part(b"1")]})
    assert engine.topics() == []
    engine.topic("a")
    with pytest.raises(error, match="number"):
        record(engine, "a", "job", number)
    assert recorded(engine, "a") == {}


def test_numbers_are_recorded_without_disturbing_the_owner(engine) -> None:
    with engine.topic("a").producer("exclusive") as owner:
        record(engine, "a", "archive", 10)
        record(engine, "a", "archive", 7)
        assert recorded(engine, "a") == {"archive": 10}
        assert owner.send(b"1") == 0


def test_a_waiting_run_or_half_a_name_is_refused(engine) -> None:
    with pytest.raises(ValueError, match="access_mode='wait_for_exclusive'"):
        append_once(engine, Run("j", "r", "p", "wait_for_exclusive"), 0, {})
    with pytest.raises(ValueError, match="give both or neither"):
        append_once(engine, Run("j", "r", "p"), None, {})


# ---- batches -----------------------------------------------------------------------------


@pytest.mark.long
def test_every_column_arrives(spark, path) -> None:
    frame = spark.sql("""
        select * from values
            (cast('a' as binary), cast('k' as binary), map('x', '1', 'y', ''),
             timestamp'1969-12-31 23:59:59.998500Z'),
            (null, cast('gone' as binary), null, timestamp'2026-01-02 03:04:05.678901Z'),
            (cast('' as binary), null, map(), null)
        as t(value, key, properties, event_time)""")
    write(frame.coalesce(1), path, topic="orders", producerName="job")
    with xl.open(path, readonly=True) as engine:
        first, second, third = engine.topic("orders").reader()
    assert (first.value, first.key, first.properties) == (b"a", b"k", {"x": "1", "y": ""})
    assert first.event_time == -2  # ms, downwards
    assert (second.value, second.key, second.properties) == (None, b"gone", {})
    assert second.event_time == int(
        dt.datetime(2026, 1, 2, 3, 4, 5, 678000, dt.UTC).timestamp() * 1000
    )
    assert (third.value, third.key, third.event_time) == (b"", None, None)
    assert {first.producer_name, third.producer_name} == {"job"}


@pytest.mark.long
def test_a_time_too_far_back_for_arrow_is_refused(spark, path) -> None:
    """A reader would give it in microseconds, which begin at -2**63."""
    first = -1000 * ((2**63 - 1) // 1000)
    query = "select binary('x') as value, timestamp_micros({}) as event_time"
    write(spark.sql(query.format(first)), path, topic="orders")
    refused("SCHEMA", lambda: write(spark.sql(query.format(first - 1)), path, topic="orders"))
    with xl.open(path) as engine:
        [message] = engine.topic("orders").reader()
    assert message.event_time == first // 1000


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["in files", "inline"])
def test_partitions_are_appended_in_their_order(spark, path, tmp_path, limit) -> None:
    write(numbers(spark, 5000, 4), path, topic="out", inlineLimit=limit)
    assert values(path, "out") == as_bytes(range(5000))
    assert set(epochs(path, "out")) == {1}
    assert left_in(tmp_path / STAGING) == []


def test_a_numbered_batch_is_written_once(spark, path) -> None:
    for _ in range(2):
        write(numbers(spark, 10), path, topic="out", txnAppId="job-7", txnVersion=3)
    write(numbers(spark, 10), path, topic="out", txnAppId="job-7", txnVersion=2)
    write(numbers(spark, 10, start=10), path, topic="out", txnAppId="job-7", txnVersion=4)
    assert values(path, "out") == as_bytes(range(20))
    for _ in range(2):  # without a number, it is written each time
        write(numbers(spark, 1), path, topic="free")
    assert values(path, "free") == [b"0", b"0"]


@pytest.mark.long
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["in files", "inline"])
def test_a_job_may_have_any_name(spark, path, tmp_path, limit) -> None:
    """A name of 255 bytes is three times as long where it is a directory's."""
    name = "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 127
    for version in (0, 1, 1):
        options = {"topic": "out", "txnAppId": name, "txnVersion": version, "inlineLimit": limit}
        write(numbers(spark, 2), path, **options)
    assert values(path, "out") == as_bytes([0, 1] * 2)
    assert left_in(tmp_path / STAGING) == []


@pytest.mark.long
def test_a_column_says_which_topic(spark, path) -> None:
    frame = numbers(spark, 100).withColumn(
        "topic", F.when(F.col("value").cast("int") % 2 == 0, "even").otherwise("odd")
    )
    write(frame, path, inlineLimit=0)
    assert values(path, "even") == as_bytes(range(0, 100, 2))
    assert values(path, "odd") == as_bytes(range(1, 100, 2))
    own = frame.withColumn("topic", F.lit("__events__"))
    assert "can only be read" in refused("SCHEMA", lambda: write(own, path))
    nulls = frame.withColumn("topic", F.lit(None).cast("string"))
    assert "is null" in refused("SCHEMA", lambda: write(nulls, path))
    assert len(values(path, "even")) == 50


@pytest.mark.long
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["staged", "inline"])
def test_a_task_may_write_to_many_topics(spark, path, tmp_path, limit) -> None:
    """They share one file, and what waits to be written has a limit: neither the files that a
    process can have open nor its memory goes by the number of topics."""
    frame = spark.range(0, 2000, 1, 1)
    frame = frame.selectExpr("cast(id as string) value", "concat('t', id % 400) topic")
    write(frame, path, inlineLimit=limit, stagingDir=tmp_path / "staging")
    for topic in range(400):
        assert values(path, f"t{topic}") == as_bytes(range(topic, 2000, 400))
    assert left_in(tmp_path / "staging") == []


def test_what_a_task_gathers_for_its_topics_has_a_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 200)
    monkeypatch.setattr(staging, "MOST_WAITING", 1000)
    stage = Stage(Directory.prepare(str(tmp_path)), str(tmp_path / "job"), "part-0-0", 0)
    sent: dict[str, list[bytes]] = {}
    for number in range(600):
        topic, value = f"t{number % 31 if number < 300 else 0}", b"%d" % number
        sent.setdefault(topic, []).append(value)
        stage.add(topic, staged(pa.RecordBatch.from_pydict({"value": [value]})))
        assert sum(batch.nbytes for t in stage._topics.values() for batch in t.waiting) < 1000
    pieces = stage.finish()
    assert left_in(tmp_path) == [str(tmp_path / "job" / "part-0-0.arrow")]
    assert {piece.topic: piece.rows for piece in pieces} == {t: len(v) for t, v in sent.items()}
    with xl.open(str(tmp_path / "log")) as engine:
        batches = {piece.topic: parts([piece]) for piece in pieces}
        append_once(engine, Run(None, None, "spark"), None, batches)
        for topic, found in sent.items():
            assert [message.value for message in engine.topic(topic).reader()] == found


@pytest.mark.long
def test_what_cannot_be_written_is_refused(spark, path) -> None:
    frame = numbers(spark, 1)
    text = refused("OVERWRITE", lambda: write(frame, path, mode="overwrite", topic="out"))
    assert "only ever appended" in text
    assert "no topic is given" in refused("SCHEMA", lambda: write(frame, path))
    other = frame.selectExpr("value", "1 as price")
    assert "'price'" in refused("SCHEMA", lambda: write(other, path, topic="out"))
    number = frame.selectExpr("1 as value")
    assert "cast it to binary or string" in refused(
        "SCHEMA", lambda: write(number, path, topic="out")
    )
    bare = frame.selectExpr("value as key")
    assert "tombstone" in refused("SCHEMA", lambda: write(bare, path, topic="out"))
    odd = frame.withColumn("properties", F.expr("map('a', cast(null as string))"))
    assert "may not be null" in refused("SCHEMA", lambda: write(odd, path, topic="out"))
    with pytest.raises(SourceError, match=r"EXCLUSIVELOG_OPTION.*checkpoint"):
        stream_write_options({"path": "x", "txnAppId": "a"})
    with pytest.raises(SourceError, match=r"EXCLUSIVELOG_OPTION.*below 2\*\*63"):
        batch_write_options({"path": "x", "txnAppId": "a", "txnVersion": str(2**63)})
    with pytest.raises(SourceError, match=r"EXCLUSIVELOG_OPTION.*wait_for_exclusive"):
        batch_write_options({"path": "x", "producerAccessMode": "wait_for_exclusive"})


@pytest.mark.long
def test_what_was_read_can_be_written_elsewhere(spark, path, tmp_path) -> None:
    fill(path, count=20)
    copy = str(tmp_path / "copy")
    frame = spark.read.format("exclusivelog").option("topic", "orders").load(path)
    write(frame, copy)  # the column topic says where
    assert values(copy, "orders") == as_bytes(range(20))


@pytest.mark.long
def test_an_owner_keeps_an_exclusive_job_out(spark, path) -> None:
    with xl.open(path) as engine, engine.topic("out").producer("exclusive", name="owner") as owner:
        exclusive = {"topic": "out", "producerAccessMode": "exclusive"}
        text = refused("PRODUCER_FENCED", lambda: write(numbers(spark, 2), path, **exclusive))
        assert "'owner'" in text
        owner.send(b"first")
        write(numbers(spark, 2), path, topic="out")
        with pytest.raises(xl.ProducerFencedError):
            owner.send(b"second")
    assert values(path, "out") == [b"first", b"0", b"1"]


@pytest.mark.long
def test_a_task_that_is_tried_again_leaves_nothing_behind(spark, path, tmp_path) -> None:
    @F.udf("string", useArrow=False)
    def stumble(value: str) -> str:
        task = TaskContext.get()
        if task.partitionId() == 1 and task.attemptNumber() < 2 and value == "190000":
            raise RuntimeError("stumbles with most of its rows staged")
        return value

    frame = numbers(spark, 200_000, 2).withColumn("value", stumble("value"))
    write(frame, path, topic="out", inlineLimit=0)
    assert values(path, "out") == as_bytes(range(200_000))
    assert left_in(tmp_path / STAGING) == []


@pytest.mark.long
def test_a_job_that_fails_leaves_nothing_behind(spark, path, tmp_path) -> None:
    """One of its two tasks fails when the other one has staged its rows."""
    staged = str(tmp_path / STAGING / "**" / "part-0-*.arrow")

    @F.udf("string", useArrow=False)
    def fail(value: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while value == "999":
            if glob.glob(staged, recursive=True) or time.monotonic() > deadline:
                raise RuntimeError("fails for good")
            time.sleep(0.01)
        return value

    frame = numbers(spark, 1000, 2).withColumn("value", fail("value"))
    with pytest.raises(PySparkException, match="fails for good"):
        write(frame, path, topic="out", inlineLimit=0)
    with xl.open(path, readonly=True) as engine:
        assert "out" not in engine.topics()
    assert left_in(tmp_path / STAGING) == []


# ---- staging -----------------------------------------------------------------------------


def test_a_run_with_nothing_to_append_affects_no_other(path, tmp_path) -> None:
    """It may have been superseded, and nothing has told it (rule B3): what another run of the
    query has staged is not its own to remove."""
    options = stream_write_options({"path": path, "topic": "out"})
    writer = StreamWriter(options, StructType().add("value", "binary"))
    staged = Path(writer.directory.of("query", "new run", 1)) / "part-0-0-0.arrow"
    staged.parent.mkdir(parents=True)
    staged.touch()
    writer.commit([Staged(Job("query", "old run", 1), 0)], 1)
    assert staged.exists()


def test_a_directory_is_known_by_its_mark(tmp_path) -> None:
    here = Directory.prepare(str(tmp_path / "a"))
    assert here == Directory.prepare(str(tmp_path / "a"))
    assert here.shared
    assert not Directory(here.root, "another").shared
    assert not Directory(str(tmp_path / "not there"), here.probe).shared
    umlauts = "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 127  # longer, quoted, than a name may be
    Path(here.of(umlauts, 3)).mkdir(parents=True)
    here.remove_old(umlauts)
    for name in ("..", ".", "../x", "/", umlauts):  # names cannot climb out
        assert Path(here.of(name, 3)).resolve().parent.parent == tmp_path / "a"


def test_what_killed_jobs_have_left_goes_after_a_while(tmp_path) -> None:
    here = Directory.prepare(str(tmp_path))
    for run, age in (("old", 8), ("young", 1)):
        where = Path(here.of("job", run))
        where.mkdir(parents=True)
        os.utime(where, (time.time() - age * 86_400,) * 2)
    here.remove_old("job")
    here.remove_old("no such job")
    assert [entry.name for entry in Path(here.of("job")).iterdir()] == ["young"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match=r"STAGING.*file/x cannot be used.*stagingDir"):
        Directory.prepare(str(tmp_path / "file" / "x"))


def test_staged_files_that_do_not_arrive_are_named(tmp_path) -> None:
    lost = Piece("a", 1, [0], path=str(tmp_path / "part-0-0-0.arrow"))
    with pytest.raises(SourceError, match=r"STAGING.*part-0-0-0.*stagingDir is not shared"):
        check_arrived({"a": [lost]})
    assert list(parts([])) == []


# ---- streams -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_micro_batch_after_a_lost_commit_file_is_not_written_again(spark, path, tmp_path) -> None:
    fill(path, count=30)
    checkpoint = tmp_path / "ckpt"
    finish(stream(spark, path, checkpoint, maxOffsetsPerTrigger=10))
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    assert last.name == "2"
    for file in (last, last.with_name(f".{last.name}.crc")):
        file.unlink(missing_ok=True)
    fill(path, count=5, start=30)
    finish(stream(spark, path, checkpoint, maxOffsetsPerTrigger=10))
    assert values(path, "out") == as_bytes(range(35))
    assert left_in(tmp_path / STAGING) == []


@pytest.mark.long
def test_a_query_goes_on_after_another_had_the_topic(spark, path, tmp_path) -> None:
    fill(path, count=10)
    finish(stream(spark, path, tmp_path / "ckpt"))
    with xl.open(path) as engine, engine.topic("out").producer("exclusive") as other:
        other.send(b"other")
    fill(path, count=10, start=10)
    finish(stream(spark, path, tmp_path / "ckpt"))
    assert values(path, "out") == [*as_bytes(range(10)), b"other", *as_bytes(range(10, 20))]
    assert sorted(set(epochs(path, "out"))) == [1, 2, 3]


@pytest.mark.long
def test_a_running_query_stops_when_it_is_fenced(spark, path, tmp_path) -> None:
    fill(path, count=10)
    query = stream(spark, path, tmp_path / "ckpt", now=False)
    try:
        with xl.open(path) as engine:
            wait_for(lambda: "out" in engine.topics() and engine.topic("out").next_offset == 10)
            with engine.topic("out").producer("exclusive_with_fencing") as other:
                other.send(b"mine")
        fill(path, count=10, start=10)
        refused("PRODUCER_FENCED", lambda: query.awaitTermination(int(PATIENCE)) or None)
        assert not query.isActive
    finally:
        query.stop()
    assert values(path, "out") == [*as_bytes(range(10)), b"mine"]
    finish(stream(spark, path, tmp_path / "ckpt"))  # a new run takes over, and loses nothing
    assert values(path, "out") == [*as_bytes(range(10)), b"mine", *as_bytes(range(10, 20))]
    assert left_in(tmp_path / STAGING) == []


@pytest.mark.long
def test_foreach_batch_with_the_batch_s_number(spark, path, tmp_path) -> None:
    fill(path, count=20)

    def append(frame, number: int) -> None:
        for _ in range(2):  # as a batch that is tried again
            write(frame.select("value"), path, topic="out", txnAppId="each", txnVersion=number)

    query = (
        spark.readStream.format("exclusivelog")
        .option("topic", "orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 8)
        .load(path)
        .writeStream.foreachBatch(append)
        .option("checkpointLocation", str(tmp_path / "ckpt"))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    assert values(path, "out") == as_bytes(range(20))


@pytest.mark.long
def test_the_running_sums_of_the_page_are_stored_once(spark, path, tmp_path) -> None:
    [text] = [b.text for b in blocks(PAGE.read_text()) if "sums-by-customer" in b.text]
    program = text.replace("/data/log", path).replace("/data/sums", str(tmp_path / "sums"))

    def send(cents: int) -> None:
        with xl.open(path) as engine, engine.topic("orders").producer(serializer="json") as orders:
            orders.send_many([{"customer": name, "cents": cents} for name in ("ann", "ann", "ben")])

    def run() -> list[tuple[bytes, bytes]]:
        names = {"spark": spark}
        exec(program, names)
        try:
            names["query"].processAllAvailable()
        finally:
            names["query"].stop()
        with xl.open(path, readonly=True) as engine:
            return [(message.raw_key, message.raw_value) for message in engine.topic("sums")]

    send(10)
    assert sorted(run()) == [(b"ann", b"20"), (b"ben", b"10")]
    send(1)
    found = run()
    assert sorted(found[2:]) == [(b"ann", b"22"), (b"ben", b"11")]
    for file in [*(tmp_path / "sums/commits").glob("1"), *(tmp_path / "sums/commits").glob(".1.*")]:
        file.unlink()  # a crash before Spark has noted the commit: the batch is run again
    assert run() == found


@pytest.mark.long
def test_a_stream_with_nothing_to_write_writes_nothing(spark, path, tmp_path) -> None:
    fill(path, count=10)
    finish(stream(spark, path, tmp_path / "ckpt", change=lambda frame: frame.where("false")))
    with xl.open(path, readonly=True) as engine:
        assert engine.topics() == ["orders"]
