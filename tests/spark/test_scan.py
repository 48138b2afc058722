"""`scan` gives what the data source gives, column by column and option by option; and what is
missing, damaged or out of reach fails as it does there, also where it went after the planning."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pytest

import exclusivelog as xl
from exclusivelog.spark import plan, scan
from exclusivelog.spark.errors import SourceError
from exclusivelog.spark.scan import Packed, Planned, _schema
from exclusivelog.spark.source import Place, Rows, Slice, reading
from exclusivelog.spark.views import COLUMNS, schema_of
from testing.entries import flipped
from tests.log.test_damage import Damage
from tests.spark.sparks import as_bytes, fill, read, refused, trim, values, write

pytestmark = pytest.mark.once

TWO = ["offset", "value"]


@pytest.fixture(autouse=True)
def _open(engine: xl.Engine) -> None:
    """What reads in this process must not be the first to open the ledger, read-only."""


def offsets(frame) -> list[int]:
    return [row.offset for row in frame.select("offset").collect()]


def same(ours, theirs) -> None:
    """The same columns, types and rows, in the same order."""
    assert ours.schema == theirs.schema
    assert ours.collect() == theirs.collect()


# ---- what it reads -----------------------------------------------------------------------


@pytest.mark.long
def test_every_column_comes_as_the_data_source_reads_it(spark, path) -> None:
    with xl.open(path) as engine:
        with engine.topic("orders").producer("exclusive", name="alice") as producer:
            producer.send(b"\x00\xff", key=b"k", properties={"a": "1", "b": ""}, event_time=1500)
            producer.send(None, key="gone")
            producer.send(b"", event_time=0)
            producer.send_many([b"%06d" % n + bytes(94) for n in range(20_000)])
            producer.send(b"last", key=b"", sequence_id=40_000, event_time=-1)
    ours = scan(spark, path, "orders")
    assert ours.columns == list(COLUMNS["messages"])
    same(ours, read(spark, path))
    assert [row.value for row in ours.select("value").collect()] == values(path, "orders")


@pytest.mark.long
def test_a_compressed_topic_is_read_both_ways_and_written(spark, path) -> None:
    pytest.importorskip("lz4")
    with xl.open(path) as engine:
        for name in ("orders", "out"):
            engine.topic(name).compression("lz4")
        with engine.topic("orders").producer("exclusive", name="alice") as producer:
            producer.send_many([b"%06d" % n + bytes(94) for n in range(20_000)])
    same(scan(spark, path, "orders"), read(spark, path))
    write(read(spark, path).select("value").coalesce(1), path, topic="out")
    assert sorted(values(path, "out")) == values(path, "orders")
    with xl.open(path, readonly=True) as engine:
        assert engine.topic("out").stats().methods.keys() == {"lz4"}


@pytest.mark.parametrize(
    "columns",
    [["offset"], ["value", "offset"], ["topic"], ["properties", "topic"], ["epoch", "event_time"]],
    ids="-".join,
)
def test_any_columns_in_any_order(spark, path, columns) -> None:
    fill(path, count=50)
    types = COLUMNS["messages"]
    wanted = ", ".join(f"{name} {types[name].simpleString()}" for name in columns)
    ours = scan(spark, path, "orders", columns)
    assert ours.columns == columns
    same(ours, read(spark, path, columns=wanted))


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        (
            {"startingOffsets": 3, "endingOffsets": 7},
            {"startingOffsets": '{"orders": 3}', "endingOffsets": '{"orders": 7}'},
        ),
        ({"startingOffsets": {"orders": 8}}, {"startingOffsets": '{"orders": 8}'}),
        ({"STARTINGOFFSETS": 8, "endingoffsets": "latest"}, {"startingOffsets": '{"orders": 8}'}),
        ({"startingOffsets": "latest"}, {"startingOffsets": "latest"}),
        (
            {"startingTimestamp": dt.datetime(2001, 1, 1), "endingTimestamp": None},
            {"startingTimestamp": "2001-01-01"},
        ),
        ({"endingTimestamp": 1000}, {"endingTimestamp": "1000"}),
        (
            {"failOnDataLoss": False, "startingOffsets": 0, "endingOffsets": 99},
            {
                "failOnDataLoss": "false",
                "startingOffsets": '{"orders": 0}',
                "endingOffsets": '{"orders": 99}',
            },
        ),
        ({"minPartitions": 3}, {"minPartitions": "3"}),
        ({"access": "inline", "minPartitions": 3}, {"access": "inline", "minPartitions": "3"}),
    ],
    ids=lambda options: ",".join(options),
)
def test_options_mean_what_they_mean_to_the_data_source(spark, path, given, theirs) -> None:
    fill(path, count=10)
    trim(path, "orders", 2)
    ours = scan(spark, path, "orders", TWO, **given)
    same(ours, read(spark, path, columns="offset bigint, value binary", **theirs))
    if "minPartitions" in theirs:
        assert ours.rdd.getNumPartitions() == 3
        assert offsets(ours) == list(range(2, 10))


@pytest.mark.long
def test_an_empty_topic_has_all_columns_and_no_rows(spark, path) -> None:
    with xl.open(path) as engine:
        engine.topic("orders")
    frame = scan(spark, path, "orders")
    assert (frame.schema, frame.collect()) == (schema_of("messages"), [])


def test_a_range_is_fixed_by_the_call_and_the_ledger_is_free_after_it(spark, tmp_path) -> None:
    """A process that had it open read-only could not open it to write."""
    where = str(tmp_path / "other")
    fill(where, count=3)
    frame = scan(spark, tmp_path / "other", "orders", ["offset"])
    fill(where, count=2)
    assert offsets(frame) == [0, 1, 2]
    assert scan(spark, where, "orders", ["offset"]).count() == 5


# ---- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["ofset"], "no column 'ofset'; there are topic, offset, epoch, key, value, publish_time"),
        (["offset", "Value"], "no column 'Value'"),
        (["offset", "offset"], "each once"),
        ([], "at least one"),
        ("offset", "a list of names"),
    ],
)
def test_columns_that_do_not_exist_are_refused_by_name(path, columns, words) -> None:
    with pytest.raises(SourceError, match="EXCLUSIVELOG_SCHEMA") as caught:
        scan(None, path, "orders", columns)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffset": 5}, "no option of scan; is startingOffsets meant?"),
        ({"view": "runs"}, "view is no option of scan"),
        ({"topics": "a,b"}, "topics is no option of scan"),
        ({"maxOffsetsPerTrigger": 5}, "no option of scan"),
        ({"startingOffsets": -7}, "startingOffsets="),
        ({"startingOffsets": {"other": 5}}, "'other', which is not among those read"),
        ({"startingOffsets": 7, "endingOffsets": 3}, "3, is before its start, 7"),
        ({"failOnDataLoss": "perhaps"}, "true or false"),
        ({"minPartitions": 0}, "from 1 on"),
    ],
)
def test_options_are_checked_by_name(path, options, words) -> None:
    fill(path)
    with pytest.raises(SourceError, match="EXCLUSIVELOG_OPTION") as caught:
        scan(None, path, "orders", **options)
    assert words in str(caught.value)


def test_what_is_not_there_when_it_is_planned(path) -> None:
    fill(path)
    trim(path, "orders", 4)
    for options, code in (
        ({"startingOffsets": 2}, "DATA_LOSS.*2 was trimmed"),
        ({"endingOffsets": 20}, "DATA_LOSS.*20 is not there yet"),
        ({"topicIds": {"orders": 77}}, "DATA_LOSS.*created again"),
    ):
        with pytest.raises(SourceError, match=code):
            scan(None, path, "orders", **options)
    with pytest.raises(SourceError, match=r"TOPIC_NOT_FOUND.*'nothing'"):
        scan(None, path, "nothing")
    with pytest.raises(SourceError, match="EXCLUSIVELOG_LEDGER"):
        scan(None, path + "-not", "orders")


# ---- what is lost after the planning -----------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_trimmed_before_it_is_read(spark, path, strict) -> None:
    fill(path, count=10)
    frame = scan(spark, path, "orders", TWO, failOnDataLoss=strict)
    trim(path, "orders", 4)
    if strict:
        assert "trimmed" in refused("DATA_LOSS", frame.collect)
    else:
        assert offsets(frame) == [4, 5, 6, 7, 8, 9]


@pytest.mark.long
@pytest.mark.parametrize("strict", [True, False])
def test_a_topic_that_is_made_anew_before_it_is_read(spark, path, strict) -> None:
    fill(path, count=5)
    frame = scan(spark, path, "orders", TWO, failOnDataLoss=strict)
    with xl.open(path) as engine:
        engine.delete_topic("orders")
    fill(path, count=8)
    if strict:
        assert "created again" in refused("DATA_LOSS", frame.collect)
    else:
        assert frame.collect() == []


def test_a_topic_that_ends_before_its_plan(path) -> None:
    fill(path, count=10)
    part = Slice([plan.Span("orders", 5, 12)], Place.of(reading(path)))
    tasks = Planned(Rows(_schema(TWO), True), [part])
    with pytest.raises(SourceError, match=r"DATA_LOSS.*ends at offset 10, before 12"):
        list(tasks.read(iter([pa.record_batch({"id": [0]})])))


@pytest.mark.long
def test_a_damaged_entry_fails_the_query_and_names_the_offsets(spark, path) -> None:
    fill(path, count=10)
    frame = scan(spark, path, "orders", TWO)
    with xl.open(path) as engine:
        engine.ledger.checkpoint()
        damage = Damage(engine, engine.topic("orders"))
        [(last, data)] = damage.entries()
        damage.put(last, flipped(data, 0))
    text = refused("LEDGER_CORRUPTED", frame.collect)
    assert "'orders'" in text
    assert "0 to 9" in text


# ---- other machines ----------------------------------------------------------------------


def test_an_executor_that_cannot_open_the_ledger_says_so(path) -> None:
    fill(path)
    here = Place.of(reading(path))
    for place in (replace(here, boot="another"), replace(here, inode=(1, 2))):
        part = Slice([plan.Span("orders", 0, 5)], place)
        tasks = Planned(Rows(_schema(TWO), True), [part])
        with pytest.raises(SourceError, match="REMOTE_EXECUTOR") as caught:
            list(tasks.read(iter([pa.record_batch({"id": [0]})])))
        assert '"access", "inline"' in str(caught.value)


@pytest.mark.long
def test_a_ledger_that_is_gone_is_read_only_where_its_messages_came_along(spark, tmp_path) -> None:
    where = str(tmp_path / "other")
    fill(where, count=100)
    direct = scan(spark, where, "orders", TWO)
    inline = scan(spark, where, "orders", TWO, access="inline", minPartitions=3)
    shutil.rmtree(where)
    assert where in refused("REMOTE_EXECUTOR", direct.collect)
    assert [bytes(row.value) for row in inline.collect()] == as_bytes(range(100))
    assert list(Packed(Rows(_schema(TWO), True)).read(iter([pa.record_batch({"x": [None]})]))) == []


def test_inline_has_a_limit(path, monkeypatch) -> None:
    fill(path, count=100)
    monkeypatch.setattr("exclusivelog.spark.source.Budget.__init__.__defaults__", (100,))
    with pytest.raises(SourceError, match="access=inline ships at most"):
        scan(None, path, "orders", access="inline", startingOffsets=json.dumps({"orders": 1}))
