"""Reading with Spark: every message once, with all columns, ranges and partitions. Messages that
were trimmed raise an error, or are skipped if the user says so."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable

import exclusivelog as xl
from exclusivelog.spark import plan
from exclusivelog.spark.errors import SourceError
from exclusivelog.spark.options import batch_options, stream_options
from exclusivelog.spark.source import (
    MOST_KEPT,
    BatchReader,
    Budget,
    Place,
    Rows,
    Slice,
    StreamReader,
    reading,
    writing,
)
from exclusivelog.spark.views import schema_of
from testing.patience import PATIENCE
from tests.spark.sparks import (
    FORMAT,
    as_bytes,
    fill,
    finish,
    read,
    refused,
    stream,
    trim,
    values,
)

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _open(engine: xl.Engine) -> None:
    """What reads in this process must not be the first to open the ledger, read-only."""


def offsets(frame) -> list[int]:
    return [row.offset for row in frame.select("offset").collect()]


# ---- values ------------------------------------------------------------------------------


@pytest.mark.long
def test_every_column_comes_as_it_was_sent(spark, path) -> None:
    with xl.open(path) as engine:
        with engine.topic("orders").producer("exclusive", name="alice") as producer:
            producer.send(b"\x00\xff", key=b"k", properties={"a": "1", "b": ""}, event_time=1500)
            producer.send(None, key="gone")
            producer.send(b"", event_time=0)
            producer.send(b"last", key=b"", sequence_id=40, event_time=-1)
        sent = list(engine.topic("orders").reader())
    rows = read(spark, path).orderBy("offset").collect()
    for row, message in zip(rows, sent, strict=True):
        assert row.topic == "orders"
        assert (row.offset, row.epoch) == (message.offset, 1)
        assert (row.key, row.value) == (message.key, message.value)
        assert (row.producer, row.sequence_id) == ("alice", message.sequence_id)
        assert (row.properties or {}) == message.properties
        assert ms(row.publish_time) == message.publish_time
        assert (None if row.event_time is None else ms(row.event_time)) == message.event_time
    assert [row.sequence_id for row in rows] == [0, 1, 2, 40]
    assert rows[1].value is None


def ms(time: dt.datetime) -> int:
    # Spark gives naive times of the machine's zone, which is not for the test to know.
    return round(time.timestamp() * 1000)


@pytest.mark.parametrize(
    "columns",
    [
        "offset bigint",
        "value binary, offset bigint",
        "topic string",
        "properties map<string,string>",
        "sequence_id bigint, key binary, topic string, epoch bigint",
    ],
)
def test_any_columns_in_any_order(spark, path, columns) -> None:
    fill(path, count=50)
    frame = read(spark, path, columns=columns)
    assert frame.columns == [part.split()[0] for part in columns.split(", ")]
    everything = read(spark, path).select(*frame.columns)
    assert sorted(map(repr, frame.collect())) == sorted(map(repr, everything.collect()))


@pytest.mark.long
def test_columns_that_do_not_exist_or_have_another_type_are_refused(spark, path) -> None:
    fill(path)
    for columns in ("ofset bigint", "offset int", "value string"):
        text = refused("SCHEMA", lambda columns=columns: read(spark, path, columns=columns).count())
        assert columns.split()[0] in text


@pytest.mark.long
def test_messages_sent_one_by_one_and_in_large_entries_read_the_same(spark, path) -> None:
    with xl.open(path) as engine:
        with engine.topic("orders").producer("exclusive") as producer:
            for number in range(300):
                producer.send(b"%d" % number)
            producer.send_many([b"%06d" % n + bytes(94) for n in range(300, 60_300)])
            producer.send(b"end")
    rows = read(spark, path, columns="offset bigint, value binary").orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(60_301))
    assert [bytes(row.value) for row in rows] == values(path, "orders")


# ---- ranges and partitions ---------------------------------------------------------------


@pytest.mark.long
def test_a_range_by_offset_by_time_and_by_topic(spark, path) -> None:
    fill(path, "a", 10)
    fill(path, "b", 5)
    some = {"startingOffsets": json.dumps({"a": 3}), "endingOffsets": json.dumps({"a": 7})}
    assert offsets(read(spark, path, "a", **some)) == [3, 4, 5, 6]
    both = spark.read.format(FORMAT).option("topics", "a, b")
    both = both.option("startingOffsets", json.dumps({"a": 8, "b": "latest"})).load(path)
    assert [(row.topic, row.offset) for row in both.collect()] == [("a", 8), ("a", 9)]
    matching = spark.read.format(FORMAT).option("topicsPattern", "[ab]").load(path)
    assert matching.count() == 15
    with xl.open(path, readonly=True) as engine:
        published = engine.topic("b").reader().read_next(0).publish_time
    assert read(spark, path, "b", startingTimestamp=published).count() == 5
    assert read(spark, path, "b", startingTimestamp=published + 3_600_000).count() == 0
    assert read(spark, path, "b", endingTimestamp="2001-01-01T00:00:00Z").count() == 0


def test_partitions_share_out_every_message_once(spark, path) -> None:
    fill(path, count=1000)
    frame = read(spark, path, minPartitions=7)
    assert frame.rdd.getNumPartitions() == 7
    assert sorted(offsets(frame)) == list(range(1000))


def test_few_messages_are_one_partition_many_are_as_many_for_each_core(path, monkeypatch) -> None:
    fill(path, count=1000)
    options = batch_options({"path": path, "topic": "orders"})
    engine = reading(path)
    [span] = plan.spans(engine, options)

    def counts(*spans: plan.Span) -> list[int]:
        shared = plan.share_out(engine, options, spans)
        return [sum(piece.count for piece in pieces) for pieces in shared]

    monkeypatch.setattr(plan, "cores", lambda: 4)
    assert counts() == []
    assert counts(span) == [1000]
    monkeypatch.setattr(plan, "LEAST_MESSAGES", 400)
    assert counts(span) == [333, 333, 334]  # three are worth their cost
    monkeypatch.setattr(plan, "LEAST_MESSAGES", 10)
    assert counts(span) == [250] * 4  # and a hundred were, but no more can run at once
    assert counts(span, span) == [500] * 4
    monkeypatch.setattr(plan, "MOST_MESSAGES", 240)
    assert counts(span) == [125] * 8  # five needed, three more that no core is idle
    assert counts(*[span] * 4) == [200] * 20
    monkeypatch.setattr(plan, "MOST_MESSAGES", 10_000)
    monkeypatch.setattr(plan, "MOST_BYTES", 1000)
    assert len(counts(span)) > 4
    monkeypatch.setattr(plan, "LEAST_MESSAGES", 10_000)
    monkeypatch.setattr(plan, "LEAST_BYTES", 1000)
    assert len(counts(span)) > 4


def spans_of(path: str, topics: str) -> list[plan.Span]:
    return plan.spans(reading(path), batch_options({"path": path, "topics": topics}))


def test_small_topics_share_a_partition_and_a_large_one_has_the_cores(path, monkeypatch) -> None:
    """A task costs more than a small topic: 1,200 of them are not 1,200 tasks."""
    fill(path, "large", count=1000)
    small = [f"small-{n}" for n in range(40)]
    with xl.open(path) as engine:
        for name in small:
            engine.topic(name).producer().send(b"only")
    options = batch_options({"path": path, "topicsPattern": ".*"})
    monkeypatch.setattr(plan, "cores", lambda: 4)
    spans = spans_of(path, ",".join(["large", *small]))
    assert plan.share_out(reading(path), options, spans) == [spans]
    monkeypatch.setattr(plan, "LEAST_MESSAGES", 100)
    shared = plan.share_out(reading(path), options, spans)
    assert [sum(piece.count for piece in pieces) for pieces in shared] == [260] * 4
    assert [len(pieces) for pieces in shared] == [1, 1, 1, 41]


def test_at_least_as_many_partitions_as_were_asked_for(path) -> None:
    fill(path, "one", count=1)
    with xl.open(path) as engine:
        engine.topic("one").producer().send(b"x" * 1_000_000)  # cannot be cut
    fill(path, "many", count=100)
    for least in (3, 10, 102):
        options = batch_options({"path": path, "topics": "one,many", "minPartitions": str(least)})
        shared = plan.share_out(reading(path), options, spans_of(path, "one,many"))
        assert len(shared) == least
        read = [(p.topic, n) for pieces in shared for p in pieces for n in range(p.start, p.end)]
        assert read == [("one", 0), ("one", 1)] + [("many", n) for n in range(100)]


def test_a_range_that_falls_on_the_ends_of_entries_is_not_cut_to_shreds(path) -> None:
    """Each sample was an entry's last message, and as long as all of it."""
    with xl.open(path) as engine:
        producer = engine.topic("orders").producer("exclusive")
        for _ in range(10):
            producer.send_many([b"x" * 1000] * 1000)
        with engine.ledger.read() as tables:
            ends = [last for last, _ in tables.entries.walk(engine.topic("orders").id, 0)]
    step = ends[-1] - ends[-2]
    span = plan.Span("orders", ends[0], ends[0] + 8 * step)
    assert ends[1] - ends[0] == step
    found = plan.share_out(reading(path), batch_options({"path": path, "topic": "orders"}), [span])
    assert found == [[span]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"startingOffsets": '{"orders": 7}', "endingOffsets": '{"orders": 3}'},
            "'orders', 3, is before its start, 7; see startingOffsets and endingOffsets",
        ),
        ({"startingOffsets": "latest", "endingOffsets": '{"orders": 3}'}, "start, latest"),
        ({"startingOffsets": '{"orders": 7}', "endingOffsets": "earliest"}, "'orders', earliest"),
        (
            {"startingTimestamp": "2026-02-01", "endingTimestamp": "2026-01-01"},
            "see startingTimestamp and endingTimestamp",
        ),
    ],
)
@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_range_that_ends_before_it_starts_is_refused(path, options, words, strict) -> None:
    fill(path)
    given = batch_options({"path": path, "topic": "orders", "failOnDataLoss": strict, **options})
    with pytest.raises(SourceError, match=re.escape(words)) as error:
        plan.spans(reading(path), given)
    assert error.value.code == "OPTION"


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": '{"orders": 7}', "endingOffsets": '{"orders": 7}'},
        {"startingTimestamp": "2026-01-01", "endingTimestamp": "2026-01-01"},
        {"startingTimestamp": "3026-01-01", "endingOffsets": '{"orders": 3}'},
        {"startingOffsets": '{"orders": 12}', "failOnDataLoss": "false"},
    ],
)
def test_a_range_with_nothing_in_it_is_empty(path, options) -> None:
    fill(path)
    [span] = plan.spans(reading(path), batch_options({"path": path, "topic": "orders", **options}))
    assert span.count == 0


@pytest.mark.long
def test_an_empty_log_and_an_empty_range_have_no_rows(spark, path) -> None:
    with xl.open(path) as engine:
        engine.topic("orders")
    assert read(spark, path).count() == 0  # Spark makes a partition of its own for none
    assert read(spark, path).collect() == []
    fill(path)
    assert read(spark, path, startingOffsets="latest").count() == 0
    assert list(Rows(schema_of("messages"), True).of(InputPartition(None))) == []


@pytest.mark.long
def test_filters_are_spark_s_own(spark, path) -> None:
    """The planned reader is kept: had it taken a filter, the scan without one would use it."""
    assert BatchReader.pushFilters is DataSourceReader.pushFilters
    fill(path, count=10)
    frame = read(spark, path)
    assert frame.where("offset > 5").count() == 4
    assert frame.count() == 10


@pytest.mark.long
def test_a_range_is_fixed_when_it_is_first_run(spark, path) -> None:
    fill(path, count=3)
    frame = read(spark, path)
    assert frame.count() == 3
    fill(path, count=3)
    assert read(spark, path).count() == 6


# ---- what is not there -------------------------------------------------------------------


@pytest.mark.long
def test_trimmed_offsets_are_an_error_or_passed_over(spark, path) -> None:
    fill(path, count=10)
    trim(path, "orders", 4)
    assert offsets(read(spark, path)) == [4, 5, 6, 7, 8, 9]  # earliest is what there is
    first = {"startingOffsets": json.dumps({"orders": 2})}
    assert "2 was trimmed" in refused("DATA_LOSS", lambda: read(spark, path, **first).count())
    assert offsets(read(spark, path, failOnDataLoss="false", **first)) == [4, 5, 6, 7, 8, 9]
    beyond = {"endingOffsets": json.dumps({"orders": 20})}
    refused("DATA_LOSS", lambda: read(spark, path, **beyond).count())
    assert read(spark, path, failOnDataLoss="false", **beyond).count() == 6


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_trimmed_between_planning_and_reading(path, strict) -> None:
    fill(path, count=10)
    engine = reading(path)
    rows = Rows(schema_of("messages"), strict)
    trim(path, "orders", 4)
    batches = rows.of(Slice([plan.Span("orders", 1, 8)], Place.of(engine)))
    if strict:
        with pytest.raises(SourceError, match="DATA_LOSS"):
            list(batches)
    else:
        assert [n for batch in batches for n in batch["offset"].to_pylist()] == [4, 5, 6, 7]


def test_a_topic_that_ended_before_its_plan_is_data_loss(path) -> None:
    fill(path, count=10)
    rows = Rows(schema_of("messages"), True)
    with pytest.raises(SourceError, match=r"ends at offset 10, before 12"):
        list(rows.of(Slice([plan.Span("orders", 5, 12)], Place.of(reading(path)))))


@pytest.mark.long
def test_errors_name_what_is_wrong(spark, path) -> None:
    fill(path)
    assert "no topic 'nothing'" in refused(
        "TOPIC_NOT_FOUND", lambda: read(spark, path, "nothing").count()
    )
    assert "startingOffsets meant" in refused(
        "OPTION", lambda: read(spark, path, startingOffset="earliest").count()
    )
    refused("LEDGER", lambda: read(spark, path + "-not").count())
    refused("OPTION", lambda: spark.read.format(FORMAT).load(path).count())
    refused("OPTION", lambda: read(spark, path, view="message").count())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": "a", "topics": "b"}, "topic and topics"),
        ({"topicsPattern": "["}, "no regular expression"),
        ({"topic": ""}, "topic is missing"),
        ({"topic": "a", "startingOffsets": "5"}, "startingOffsets='5'"),
        ({"topic": "a", "startingOffsets": '{"a": -7}'}, "startingOffsets="),
        ({"topic": "a", "startingOffsets": "latest", "startingTimestamp": "1"}, "one of them"),
        ({"topic": "a", "startingTimestamp": "yesterday"}, "ISO 8601"),
        ({"topic": "a", "minPartitions": "0"}, "from 1 on"),
        ({"topic": "a", "view": "message"}, "messages or epochs"),
        ({"topic": "a", "failOnDataLoss": "perhaps"}, "true or false"),
        ({"topic": "a", "maxOffsetsPerTrigger": "5"}, "no option of spark.read"),
        ({"topic": "a", "minPartitions": str(2**63)}, "below 2**63"),
        ({"topic": "a", "startingOffsets": '{"A": 5}'}, "'A', which is not among those read"),
        ({"topicsPattern": "a.", "endingOffsets": '{"b": 5}'}, "'b', which is not among"),
    ],
)
def test_options_are_checked_by_name(options, words) -> None:
    with pytest.raises(SourceError, match="EXCLUSIVELOG_OPTION") as caught:
        batch_options({"path": "log", **options})
    assert words in str(caught.value)


# ---- views -------------------------------------------------------------------------------


@pytest.mark.long
def test_views_show_what_the_ledger_knows(spark, path) -> None:
    fill(path, "orders", 4)
    fill(path, "orders", 3)
    fill(path, "empty", 0)

    def view(name: str, **options: object) -> list[dict[str, object]]:
        frame = spark.read.format(FORMAT).option("view", name)
        if (columns := options.pop("columns", None)) is not None:
            frame = frame.schema(columns)
        for key, value in options.items():
            frame = frame.option(key, value)
        return [row.asDict() for row in frame.load(path).collect()]

    topics = {row["topic"]: row for row in view("topics")}
    assert (topics["orders"]["messages"], topics["orders"]["epoch"]) == (7, 2)
    assert topics["empty"]["messages"] == 0
    spans = [(row["epoch"], row["first_offset"], row["last_offset"]) for row in view("epochs")]
    assert spans == [(1, 0, 3), (2, 4, 6)]
    assert view("epochs", topic="empty") == []
    producers = [row for row in view("producers") if row["topic"] == "orders"]
    assert producers == [
        {"topic": "orders", "producer": "alice", "last_sequence_id": 6, "live": False}
    ]
    assert view("txns") == []
    trim(path, "orders", 2)  # within an entry
    trimmed = [(row["first_offset"], row["messages"]) for row in view("epochs", topic="orders")]
    assert trimmed == [(2, 2), (4, 3)]
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive", name="bob"):
        [row] = view("topics", topic="orders", columns="owner_since timestamp, owner string")
        assert (row["owner"], row["owner_since"] is None) == ("bob", False)


def test_e5_views_show_hand_overs_and_every_change_of_ownership(spark, path) -> None:
    """While a topic is reserved, and a shared producer's place, and somebody waits."""

    def view(name: str) -> list[dict[str, object]]:
        frame = spark.read.format(FORMAT).option("view", name).load(path)
        return sorted((row.asDict() for row in frame.collect()), key=lambda row: row["topic"])

    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        owner = a.topic("orders").producer("exclusive", name="owner", follow=False)
        seats = [a.topic("shared").producer(name=name, follow=False) for name in ("p", "q")]
        assert a.unload("orders", to=b.id, timeout=5 * PATIENCE)[0].ok
        assert seats[0].move(to=b.id, timeout=5 * PATIENCE).ok
        waiter = a.topic("orders").producer_async("wait_for_exclusive", name="w", priority=7)
        orders, shared = view("topics")
        assert (orders["transfer"], orders["transfer_to"]) == ("assigned", "b")
        assert (orders["transfer_to_engine"], orders["owner"]) == (b.id, None)
        until = a.topic("orders").transfer.until / 1000
        assert abs(orders["transfer_until"].timestamp() - until) < 2
        assert shared["transfer"] is None
        rows = [
            (row["topic"], row["state"], row["producer"], row["engine"]) for row in view("owners")
        ]
        assert rows == [
            ("orders", "assigned", None, "b"),
            ("orders", "waits", "w", "a"),
            ("shared", "holds", "q", "a"),
            ("shared", "assigned", "p", "b"),
        ]
        events = [
            (row["topic"], row["kind"], row["from_producer"], row["to_engine_id"])
            for row in view("events")
        ]
        assert events == [
            ("orders", "grant", None, a.id),
            ("orders", "releasing", "owner", b.id),
            ("orders", "release", "owner", b.id),
            ("orders", "assigned", "owner", b.id),
            ("shared", "releasing", "p", b.id),
            ("shared", "assigned", "p", b.id),
        ]
        waiter.cancel()
        assert owner.state == "moved"


# ---- streams -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_stream_takes_no_more_than_the_limit_and_nothing_twice(spark, path, tmp_path) -> None:
    fill(path, count=25)
    query = stream(spark, path, tmp_path / "ckpt", maxOffsetsPerTrigger=10)
    finish(query)
    assert [p.numInputRows for p in query.recentProgress if p.numInputRows] == [10, 10, 5]
    assert values(path, "out") == as_bytes(range(25))
    fill(path, count=5, start=25)
    finish(stream(spark, path, tmp_path / "ckpt", maxOffsetsPerTrigger=10))
    assert values(path, "out") == as_bytes(range(30))


def test_a_limit_of_bytes_takes_whole_entries(path) -> None:
    with xl.open(path) as engine:
        with engine.topic("orders").producer("exclusive") as producer:
            for _ in range(4):
                producer.send_many([bytes(1000)] * 300)  # 300 kB each: an entry of its own
    options = stream_options({"path": path, "topic": "orders", "maxBytesPerTrigger": "400000"})
    reader = StreamReader(options, schema_of("messages"))
    limit = reader.getDefaultReadLimit()
    assert limit.max_bytes == 400_000
    first = reader.latestOffset({"orders": 0}, limit)
    assert plan.split(first)[0] == {"orders": 600}
    last = reader.latestOffset(first, limit)
    assert plan.split(last)[0] == {"orders": 1200}
    assert reader.latestOffset(last, limit) == last


def test_a_stream_begins_at_the_end_unless_told(path) -> None:
    fill(path, count=7)
    options = stream_options({"path": path, "topicsPattern": ".*"})
    reader = StreamReader(options, schema_of("messages"))
    start = reader.initialOffset()
    assert plan.split(start)[0] == {"orders": 7}
    fill(path, "later", 3)  # a topic that comes later is read whole
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert plan.split(end)[0] == {"later": 3, "orders": 7}
    assert [p.spans for p in reader.partitions(start, end)] == [[plan.Span("later", 0, 3)]]
    assert reader.partitions(end, end) == []
    reader.prepareForTriggerAvailableNow()
    fill(path, "later", 3)
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    assert reader.reportLatestOffset() == {"later": 6, "orders": 7}


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_stream_whose_offsets_were_trimmed(path, strict) -> None:
    fill(path, count=10)
    options = {"path": path, "topic": "orders", "failOnDataLoss": strict}
    reader = StreamReader(stream_options(options), schema_of("messages"))
    trim(path, "orders", 6)
    if strict == "true":
        with pytest.raises(SourceError, match="DATA_LOSS"):
            reader.partitions({"orders": 3}, {"orders": 10})
    else:
        [part] = reader.partitions({"orders": 3}, {"orders": 10})
        assert part.spans == [plan.Span("orders", 6, 10)]


def made_anew(path: str, count: int, topic: str = "orders") -> None:
    """Delete a topic, and make another one of that name."""
    with xl.open(path) as engine:
        engine.delete_topic(topic)
    fill(path, topic, count)


def test_offsets_of_a_topic_that_was_made_anew_are_not_taken_for_the_old_ones(path) -> None:
    """It has more messages than the old one had when the stream last looked: only the topic's id
    tells them apart, and all of them are new."""
    fill(path, count=5)
    options = {"path": path, "topic": "orders", "startingOffsets": "earliest"}
    reader = StreamReader(stream_options(options), schema_of("messages"))
    everything = reader.getDefaultReadLimit()
    end = reader.latestOffset(reader.initialOffset(), everything)
    made_anew(path, 8)
    later = reader.latestOffset(end, everything)
    with pytest.raises(SourceError, match=r"DATA_LOSS.*created again"):
        reader.partitions(end, later)
    options["failOnDataLoss"] = "false"
    reader = StreamReader(stream_options(options), schema_of("messages"))
    assert [p.spans for p in reader.partitions(end, later)] == [[plan.Span("orders", 0, 8)]]
    # What was planned before is gone as a whole; it is no part of the new topic.
    assert reader.partitions(reader.initialOffset() | {"orders": 0, "": end[""]}, end) == []
    assert reader.latestOffset(later, everything) == later


def test_what_was_planned_is_not_read_from_a_topic_that_was_made_anew(path) -> None:
    fill(path, count=5)
    options = batch_options({"path": path, "topic": "orders"})
    [part] = BatchReader(options, schema_of("messages")).partitions()
    made_anew(path, 8)
    with pytest.raises(SourceError, match=r"DATA_LOSS.*created again"):
        list(Rows(schema_of("messages"), True).of(part))
    assert list(Rows(schema_of("messages"), False).of(part)) == []


def test_a_stream_of_topics_of_which_one_is_deleted(path) -> None:
    """A micro-batch that was planned with it must be readable after a restart."""
    fill(path, "a", 5)
    fill(path, "b", 5)
    options = {"path": path, "topicsPattern": "[ab]", "startingOffsets": "earliest"}
    reader = StreamReader(stream_options(options), schema_of("messages"))
    everything = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    end = reader.latestOffset(start, everything)
    with xl.open(path) as engine:
        engine.delete_topic("b")
    assert [[s.topic for s in p.spans] for p in reader.partitions({**start, "b": 5}, end)] == [
        ["a"]
    ]
    with pytest.raises(SourceError, match="no topic 'b'"):
        reader.partitions(start, end)
    with pytest.raises(SourceError, match=r"DATA_LOSS.*'b' was deleted"):
        reader.latestOffset(end, everything)
    options["failOnDataLoss"] = "false"
    reader = StreamReader(stream_options(options), schema_of("messages"))
    assert [[s.topic for s in p.spans] for p in reader.partitions(start, end)] == [["a"]]
    assert plan.split(reader.latestOffset(end, everything))[0] == {"a": 5}


def test_a_stream_whose_only_topic_is_deleted(path) -> None:
    """It is named, not matched: as said, the stream goes on without it, and with its successor."""
    fill(path, count=5)
    options = {"path": path, "topic": "orders", "startingOffsets": "earliest"}

    def reader(strict: str) -> StreamReader:
        given = stream_options({**options, "failOnDataLoss": strict})
        return StreamReader(given, schema_of("messages"))

    everything = ReadAllAvailable()
    end = reader("true").latestOffset(reader("true").initialOffset(), everything)
    with xl.open(path) as engine:
        engine.delete_topic("orders")
    with pytest.raises((SourceError, xl.TopicNotFoundError), match="no topic 'orders'"):
        reader("true").latestOffset(end, everything)
    without = reader("false").latestOffset(end, everything)
    assert reader("false").partitions(end, without) == []
    fill(path, count=3)
    later = reader("false").latestOffset(without, everything)
    parts = reader("false").partitions(without, later)
    assert [part.spans for part in parts] == [[plan.Span("orders", 0, 3)]]
    options["topic"] = "other"
    other = reader("false")
    with pytest.raises((SourceError, xl.TopicNotFoundError), match="no topic 'other'"):
        other.initialOffset()


def test_a_stream_does_not_begin_in_the_future(path) -> None:
    """It begins at an offset: the messages of before that time would be delivered."""
    fill(path, count=5)
    given = {"path": path, "topic": "orders", "startingTimestamp": "3026-01-01"}
    reader = StreamReader(stream_options(given), schema_of("messages"))
    with pytest.raises(SourceError, match=r"3026-01-01.* is in the future"):
        reader.initialOffset()


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_stream_that_is_restarted_with_fewer_topics_loses_no_position(path, strict) -> None:
    """It says nothing of a deletion, and delivers nothing twice when the topic is named again."""
    fill(path, "a", 5)
    fill(path, "b", 5)
    options = {"path": path, "startingOffsets": "earliest", "failOnDataLoss": strict}

    def step(topics: str, start: Any) -> tuple[Any, list[tuple[str, int, int]]]:
        given = stream_options({**options, "topics": topics})
        reader = StreamReader(given, schema_of("messages"))
        position = reader.initialOffset() if start is None else start
        end = json.loads(json.dumps(reader.latestOffset(position, reader.getDefaultReadLimit())))
        parts = reader.partitions(position, end)
        return end, [(s.topic, s.start, s.end) for part in parts for s in part.spans]

    position, found = step("a,b", None)
    assert sorted(found) == [("a", 0, 5), ("b", 0, 5)]
    fill(path, "a", 2, start=5)
    fill(path, "b", 3, start=5)
    for _ in range(2):
        position, found = step("a", position)
    assert (plan.split(position)[0], found) == ({"a": 7, "b": 5}, [])
    position, found = step("a,b", position)
    assert found == [("b", 5, 8)]
    position, _ = step("a", position)
    made_anew(path, 4, "b")
    if strict == "true":
        with pytest.raises(SourceError, match=r"DATA_LOSS.*'b' was deleted"):
            step("a", position)
    else:
        position, _ = step("a", position)
        assert step("a,b", position)[1] == [("b", 0, 4)]


@pytest.mark.parametrize(
    "limit", [{"maxOffsetsPerTrigger": "10"}, {"maxBytesPerTrigger": "1"}], ids=["offsets", "bytes"]
)
def test_a_limit_knows_where_a_trimmed_topic_begins(path, limit) -> None:
    """A topic that comes later, and was trimmed before a stream sees it, has lost nothing that
    the stream was to read."""
    fill(path, "a", 100)
    options = {"path": path, "topicsPattern": "[ab]", "startingOffsets": "earliest", **limit}
    reader = StreamReader(stream_options(options), schema_of("messages"))
    position = reader.initialOffset()
    fill(path, "b", 100)
    trim(path, "b", 60)
    read: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(20):
        end = reader.latestOffset(position, reader.getDefaultReadLimit())
        for part in reader.partitions(position, end):
            for span in part.spans:
                read[span.topic] += range(span.start, span.end)
        position = end
    assert read == {"a": list(range(100)), "b": list(range(60, 100))}


def test_a_small_topic_does_not_wait_for_a_large_one(path) -> None:
    """One that always has more than the limit must not keep the single message of another."""
    available = {"clicks": 1_000_000, "alerts": 1, "none": 5}
    assert plan.limited({"none": 5}, available, 100) == {"clicks": 99, "alerts": 1, "none": 5}
    available = {"alerts": 1, "clicks": 1_000_000}
    assert plan.limited({}, available, 100) == {"alerts": 1, "clicks": 99}


def test_a_limit_of_bytes_starves_no_topic(path) -> None:
    with xl.open(path) as engine:
        for topic in ("a", "b"):
            with engine.topic(topic).producer("exclusive") as producer:
                for _ in range(4):
                    producer.send_many([bytes(1000)] * 300)
    options = {"path": path, "topics": "a,b", "maxBytesPerTrigger": "400000"}
    reader = StreamReader(stream_options(options), schema_of("messages"))
    end = reader.latestOffset({"a": 0, "b": 0}, reader.getDefaultReadLimit())
    assert plan.split(end)[0] == {"a": 300, "b": 300}


def test_a_topic_that_was_trimmed_to_its_end_has_nothing_of_a_range(path) -> None:
    fill(path, count=10)
    rows = Rows(schema_of("messages"), False)
    part = Slice([plan.Span("orders", 1, 8)], Place.of(reading(path)))
    trim(path, "orders", 10)
    assert list(rows.of(part)) == []


# ---- other machines ----------------------------------------------------------------------


def test_an_executor_on_another_machine_says_so(path) -> None:
    fill(path)
    here = Place.of(reading(path))
    rows = Rows(schema_of("messages"), True)
    for place in (replace(here, boot="another"), replace(here, inode=(1, 2))):
        with pytest.raises(SourceError, match="REMOTE_EXECUTOR") as caught:
            list(rows.of(Slice([plan.Span("orders", 0, 5)], place)))
        assert '"access", "inline"' in str(caught.value)
    with pytest.raises(SourceError, match="another ledger"):
        list(rows.of(Slice([plan.Span("orders", 0, 5)], replace(here, uuid="x"))))


@pytest.mark.long
def test_inline_partitions_bring_their_messages(spark, path) -> None:
    fill(path, count=100)
    assert offsets(read(spark, path, access="inline", minPartitions=3)) == list(range(100))
    options = batch_options({"path": path, "topic": "orders", "access": "inline"})
    reader = BatchReader(options, schema_of("messages"))
    [part] = pickle.loads(pickle.dumps(reader.partitions()))
    assert part.place is None
    [batch] = reader.read(part)
    assert batch["value"].to_pylist() == values(path, "orders")


def test_inline_has_a_limit(path) -> None:
    fill(path, count=100)
    rows = Rows(schema_of("messages"), True)
    with pytest.raises(SourceError, match="access=inline ships at most"):
        Budget(100).pack(rows.read(reading(path), [plan.Span("orders", 0, 100)]))


def test_a_process_keeps_few_ledgers_open(tmp_path) -> None:
    paths = [str(tmp_path / str(number)) for number in range(MOST_KEPT + 1)]
    for path in paths:
        fill(path)
    engines = [reading(path) for path in paths]
    assert [engine.closed for engine in engines] == [True] + [False] * MOST_KEPT
    assert reading(paths[1]) is engines[1]
    assert not reading(paths[0]).closed


def test_a_ledger_is_the_same_by_all_its_names(tmp_path) -> None:
    """A worker may read by one name, and commit by another."""
    where, link = str(tmp_path / "other"), str(tmp_path / "link")
    fill(where)
    (tmp_path / "link").symlink_to(where)
    assert reading(link).topics() == ["orders"]
    assert writing(where).topic("orders").next_offset == 10
    assert reading(link).topics() == ["orders"]


def test_a_ledger_that_was_made_anew_is_opened_anew(path, tmp_path) -> None:
    where = str(tmp_path / "other")
    fill(where, count=3)
    before = reading(where)
    shutil.rmtree(where)
    with pytest.raises(xl.LedgerError):
        reading(where)
    assert before.closed
    fill(where, count=5)
    assert reading(where).topic("orders", create=False).next_offset == 5


# ---- discovery ---------------------------------------------------------------------------


@pytest.mark.long
def test_spark_finds_the_source_by_itself(spark: SparkSession, path) -> None:
    import pyspark_exclusivelog

    assert pyspark_exclusivelog.DefaultSource.name() == FORMAT
    fill(path)
    other = spark.newSession()
    assert other.read.format(FORMAT).option("topic", "orders").load(path).count() == 10
