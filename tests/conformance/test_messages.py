"""Messages, sequence ids and batches, on the public interface alone (rules G1 to G3)."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import serde
from testing.processes import PATIENCE, close_producer, open_producer, send

UTC = dt.UTC
EAST = dt.timezone(dt.timedelta(hours=9, minutes=30))
VALUES: list[tuple[Any, bytes | None]] = [
    (b"v", b"v"),
    (b"", b""),
    (None, None),
    (b"\x00\xff" * 5, b"\x00\xff" * 5),
    (bytearray(b"array"), b"array"),
    (memoryview(b"view"), b"view"),
    (memoryview(b"abcdef")[::2], b"ace"),
]
KEYS: list[tuple[Any, bytes | None]] = [
    (None, None),
    (b"", b""),
    (b"k", b"k"),
    ("", b""),
    ("ключ", "ключ".encode()),
    (bytearray(b"array"), b"array"),
    (memoryview(b"view"), b"view"),
]
PROPERTIES: list[tuple[Any, dict[str, str]]] = [
    (None, {}),
    ({}, {}),
    ({"a": "b"}, {"a": "b"}),
    ({"": "", "é": "\x00"}, {"": "", "é": "\x00"}),
]
EVENT_TIMES: list[tuple[Any, int | None]] = [
    (None, None),
    (0, 0),
    (-1, -1),
    (1_700_000_000_123, 1_700_000_000_123),
    (dt.datetime.fromtimestamp(1), 1000),  # naive: local time
    (dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), 1000),
    (dt.datetime(1970, 1, 1, 9, 30, 0, 999_999, tzinfo=EAST), 999),
    (dt.datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC), -1),
    (dt.datetime(1, 1, 1, tzinfo=UTC), -62_135_596_800_000),
]
EVERY = list(itertools.product(VALUES, KEYS, PROPERTIES, EVENT_TIMES))


def facts(message: xl.Message) -> tuple[Any, ...]:
    return message.value, message.key, message.properties, message.event_time


def test_g1_every_combination_of_parts_comes_back_one_by_one(topic) -> None:
    picked = random.Random(1).sample(EVERY, 200)
    with topic.producer("exclusive") as producer:
        for (value, _), (key, _), (properties, _), (event_time, _) in picked:
            producer.send(value, key=key, properties=properties, event_time=event_time)
    assert [facts(m) for m in topic.reader()] == [tuple(p[1] for p in c) for c in picked]


def test_g1_every_combination_of_parts_comes_back_from_shared_entries(topic) -> None:
    with topic.producer("exclusive", linger=5, max_batch_messages=50) as producer:
        for (value, _), (key, _), (properties, _), (event_time, _) in EVERY:
            producer.send_async(value, key=key, properties=properties, event_time=event_time)
    assert [facts(m) for m in topic.reader()] == [tuple(p[1] for p in c) for c in EVERY]


def test_g1_every_combination_of_parts_comes_back_from_one_batch(topic) -> None:
    given = [[parts[i][0] for parts in EVERY] for i in range(4)]
    with topic.producer("exclusive", max_batch_messages=300) as producer:
        offsets = producer.send_many(
            iter(given[0]),
            keys=iter(given[1]),
            properties=iter(given[2]),
            event_times=iter(given[3]),
        )
    assert offsets == range(len(EVERY))
    assert [facts(m) for m in topic.reader()] == [tuple(p[1] for p in c) for c in EVERY]


@pytest.mark.on_broker
def test_g1_a_message_says_who_sent_it_when_and_where_it_stands(topic) -> None:
    before = time.time_ns() // 1_000_000
    with topic.producer("exclusive", name="émetteur") as producer:
        producer.send(b"a")
        producer.send(b"b")
    after = time.time_ns() // 1_000_000
    for number, message in enumerate(topic.reader()):
        assert message.offset == message.sequence_id == number
        assert (message.epoch, message.producer_name) == (1, "émetteur")
        assert before <= message.publish_time <= after


def test_g1_what_was_sent_is_a_copy(topic) -> None:
    value, key, properties = bytearray(b"value"), bytearray(b"key"), {"a": "b"}
    with topic.producer("exclusive", linger=5) as producer:
        producer.send_async(value, key=key, properties=properties)
        value[:], key[:] = b"VALUE", b"KEY"
        properties["a"] = "c"
    assert [facts(m) for m in topic.reader()] == [(b"value", b"key", {"a": "b"}, None)]


@pytest.mark.needs("large_messages")
def test_g1_large_messages_come_back_whole(topic) -> None:
    large = [random.Random(size).randbytes(size) for size in (4095, 65_536, 1 << 20, 5_000_000)]
    with topic.producer("exclusive") as producer:
        for value in large:
            producer.send(value, key=value[:10_000])
        producer.send_many(large)
    messages = list(topic.reader())
    assert [m.value for m in messages] == large * 2
    assert [m.key for m in messages] == [value[:10_000] for value in large] + [None] * 4


DATA = {"text": "é", "list": [1, 2.5, None, True]}


@pytest.mark.parametrize(
    ("option", "sent", "stored"),
    [
        (None, b"x", b"x"),
        ("bytes", bytearray(b"x"), b"x"),
        ("str", "é", "é".encode()),
        ("json", DATA, json.dumps(DATA, separators=(",", ":"), ensure_ascii=False).encode()),
        ("msgpack", DATA, serde.msgpack.dumps(DATA)),
        (serde.json, DATA, serde.json.dumps(DATA)),
        (xl.serde.Serde(lambda v: b"<%d>" % v, lambda d: int(d[1:-1])), 7, b"<7>"),
    ],
)
def test_g1_serialisers_work_at_the_edges(topic, option, sent, stored) -> None:
    with topic.producer("exclusive", serializer=option) as producer:
        producer.send(sent)
        producer.send_async(sent).result(PATIENCE)
        producer.send_many([sent, None])
        producer.send(None)  # a tombstone is None with every serializer
    assert [m.value for m in topic.reader()] == [stored] * 3 + [None, None]
    seen = [m.value for m in topic.reader(deserializer=option)]
    assert seen == [sent if sent != bytearray(b"x") else b"x"] * 3 + [None, None]


def test_g1_a_function_can_stand_for_a_serialiser(topic) -> None:
    with topic.producer("exclusive", serializer=lambda value: str(value).encode()) as producer:
        producer.send(12)
    assert topic.reader(deserializer=int).read_next(0).value == 12


def test_g1_an_unknown_serialiser_is_refused(topic) -> None:
    for option in ("pickle", "", 5, object()):
        with pytest.raises((ValueError, TypeError), match="serializer"):
            topic.producer("exclusive", serializer=option)
        with pytest.raises((ValueError, TypeError), match="deserializer"):
            topic.reader(deserializer=option)
    assert topic.holders == []


LONE = "\ud800"  # half of a pair of surrogates: no UTF-8 can hold it
WRONG = [
    *[("value", {"value": wrong}) for wrong in ("text", 1, 1.5, True, [b"x"], object())],
    *[("key", {"key": wrong}) for wrong in (1, 1.5, True, [b"x"], LONE)],
    *[
        ("properties", {"properties": wrong})
        for wrong in (
            {"a": 1},
            {1: "a"},
            {"a": None},
            {b"a": "b"},
            [("a", "b")],
            "ab",
            7,
            [],
            "",
            0,
            {"a": LONE},
            {LONE: "a"},
        )
    ],
    *[
        ("event_time", {"event_time": wrong})
        for wrong in ("now", 1.5, True, dt.date(2020, 1, 1), 2**63, -(2**63) - 1)
    ],
    *[("sequence_id", {"sequence_id": wrong}) for wrong in (-1, 2**63, "1", 1.0, True)],
]


class Untouched:
    """What a refused call must leave as it was."""

    def __init__(self, topic: xl.Topic, producer: xl.Producer) -> None:
        self.topic, self.producer = topic, producer
        self.before = self.look()

    def look(self) -> tuple[Any, ...]:
        appender = self.producer._sender.appender
        return (
            self.topic.next_offset,
            self.producer.last_sequence_id,
            appender.pending_messages,
            appender.pending_bytes,
        )

    def check(self) -> None:
        assert self.look() == self.before
        offset, sequence = self.before[:2]
        assert self.producer.send(b"good") == offset
        assert self.producer.last_sequence_id == sequence + 1
        assert self.topic.reader(offset).read_next(0).value == b"good"


@pytest.mark.parametrize(("name", "arguments"), WRONG)
def test_g1_wrong_arguments_are_refused_by_name(topic, name, arguments) -> None:
    with topic.producer("exclusive") as producer:
        producer.send(b"before")
        untouched = Untouched(topic, producer)
        for call in (producer.send, producer.send_async):
            with pytest.raises((ValueError, TypeError), match=name):
                call(**{"value": b"x", **arguments})
        untouched.check()


@pytest.mark.parametrize("timeout", ["soon", b"1", [], object(), -1, float("nan")])
def test_g1_a_wrong_timeout_is_refused_before_anything_is_sent(topic, timeout) -> None:
    with topic.producer("exclusive") as producer:
        untouched = Untouched(topic, producer)
        with pytest.raises((ValueError, TypeError), match="timeout"):
            producer.send(b"x", timeout=timeout)
        with pytest.raises((ValueError, TypeError), match="timeout"):
            producer.send_many([b"x"], timeout=timeout)
        untouched.check()


@pytest.mark.parametrize("timeout", [1e9, 1e12, float("inf")])
def test_g1_a_timeout_may_be_as_long_as_one_likes(topic, timeout) -> None:
    with topic.producer("exclusive") as producer:
        assert producer.send(b"x", timeout=timeout) == 0
        assert producer.send_many([b"x"], timeout=timeout) == range(1, 2)
        producer.flush(timeout=timeout)
        assert producer.send_async(b"x").result(timeout) == 2
    reader = topic.reader()
    timer = threading.Timer(0.1, lambda: topic.producer("exclusive").send(b"late"))
    for _ in range(3):
        reader.read_next(timeout=timeout)
    timer.start()
    assert reader.read_next(timeout=timeout).value == b"late"
    timer.join(PATIENCE)


WRONG_MANY = [
    *[("values", {"values": wrong}) for wrong in (b"bytes", "text", bytearray(b"x"), 7, None)],
    *[("value", {"values": [b"x", wrong]}) for wrong in ("text", 1, object())],
    *[("keys", {"keys": wrong}) for wrong in ([b"k"], [b"k"] * 3, [], 7)],
    *[("key", {"keys": [b"k", wrong]}) for wrong in (1, [b"x"], LONE)],
    *[("properties", {"properties": wrong}) for wrong in ([None], [{}] * 3, 7)],
    *[("properties", {"properties": [{}, wrong]}) for wrong in ({"a": 1}, "ab", [], {"a": LONE})],
    *[("event_times", {"event_times": wrong}) for wrong in ([1], [1] * 3, 7)],
    *[("event_time", {"event_times": [1, wrong]}) for wrong in ("now", 1.5, True, 2**63)],
    *[("sequence_id", {"sequence_id": wrong}) for wrong in (-1, 2**63 - 1, 2**63, "1", 1.0)],
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "arguments"), WRONG_MANY)
def test_g1_a_batch_with_one_wrong_argument_is_refused_whole(topic, name, arguments) -> None:
    with topic.producer("exclusive") as producer:
        producer.send(b"before")
        untouched = Untouched(topic, producer)
        with pytest.raises((ValueError, TypeError), match=name):
            producer.send_many(**{"values": [b"x", b"y"], **arguments})
        untouched.check()


def test_g1_a_serialiser_that_fails_or_gives_no_bytes_changes_nothing(topic) -> None:
    def moody(value: Any) -> Any:
        if value == "fail":
            raise ZeroDivisionError("moody")
        return value

    with topic.producer("exclusive", serializer=moody) as producer:
        untouched = Untouched(topic, producer)
        for call in (producer.send, producer.send_async, lambda v: producer.send_many([b"x", v])):
            with pytest.raises(ZeroDivisionError, match="moody"):
                call("fail")
            with pytest.raises(TypeError, match="value"):
                call("text")
        untouched.check()


def test_g1_an_iterable_that_fails_midway_changes_nothing(topic) -> None:
    def failing() -> Any:
        yield b"one"
        raise ZeroDivisionError

    with topic.producer("exclusive") as producer:
        untouched = Untouched(topic, producer)
        with pytest.raises(ZeroDivisionError):
            producer.send_many(failing())
        with pytest.raises(ZeroDivisionError):
            producer.send_many([b"x", b"y"], keys=failing())
        untouched.check()


def test_g1_an_empty_batch_is_no_batch(topic) -> None:
    with topic.producer("exclusive") as producer:
        assert list(producer.send_many([])) == []
        producer.send(b"x")
        assert producer.send_many(iter(())) == range(1, 1)
        assert producer.last_sequence_id == 0
    assert topic.next_offset == 1


def numbers(topic: xl.Topic, name: str | None = None) -> list[int]:
    return [m.sequence_id for m in topic.reader() if name is None or m.producer_name == name]


@pytest.mark.needs("shared_producers")
def test_g2_ids_are_counted_per_name(topic) -> None:
    with topic.producer(name="a") as a, topic.producer(name="b") as b:
        assert a.last_sequence_id == b.last_sequence_id == -1
        a.send(b"0")
        b.send_many([b"0", b"1", b"2"])
        a.send_async(b"1").result(PATIENCE)
        assert (a.last_sequence_id, b.last_sequence_id) == (1, 2)
    assert numbers(topic, "a") == [0, 1]
    assert numbers(topic, "b") == [0, 1, 2]


@pytest.mark.needs("shared_producers")
def test_g2_names_that_were_not_chosen_are_never_shared(topic) -> None:
    names = set()
    for _ in range(20):
        with topic.producer() as producer, topic.producer() as other:
            names |= {producer.name, other.name}
            assert producer.last_sequence_id == -1
            producer.send(b"x")
    assert len(names) == 40


@pytest.mark.rule("B9")
def test_g2_a_queued_message_is_no_duplicate_before_it_is_in_the_log(topic) -> None:
    """Until then it may fail, so that the second one with its sequence id waits for its outcome."""
    with topic.producer("exclusive", name="a", linger=60) as producer:
        for number, send in enumerate((producer.send, producer.send_async, send_one(producer))):
            first = producer.send_async(b"x", sequence_id=number)
            with pytest.raises(xl.DuplicateSequenceError) as caught:
                send(b"x", sequence_id=number)
            assert first.done()
            assert (caught.value.repeated, caught.value.last_sequence_id) == (True, number)
    assert numbers(topic) == [0, 1, 2]


def send_one(producer: xl.Producer) -> Callable[..., object]:
    return lambda value, sequence_id: producer.send_many([value], sequence_id=sequence_id)


def test_g2_ids_may_be_given_and_leave_gaps(topic) -> None:
    with topic.producer("exclusive", name="a") as producer:
        producer.send(b"x", sequence_id=5)
        producer.send(b"x")
        assert producer.send_many([b"x"] * 3, sequence_id=100) == range(2, 5)
        producer.send(b"x", sequence_id=2**62)
        producer.send_many([b"x", b"x"])
        assert producer.last_sequence_id == 2**62 + 2
    assert numbers(topic) == [5, 6, 100, 101, 102, 2**62, 2**62 + 1, 2**62 + 2]


def test_g2_ids_with_gaps_keep_their_places_within_an_entry(topic) -> None:
    given = [None, None, 7, None, 8 + 2**40, 9 + 2**40, None, 2**50]
    with topic.producer("exclusive", name="a", linger=5) as producer:
        receipts = [producer.send_async(b"%d" % i, sequence_id=s) for i, s in enumerate(given)]
        producer.flush()
        assert [r.result(0) for r in receipts] == list(range(8))
    assert numbers(topic) == [0, 1, 7, 8, 8 + 2**40, 9 + 2**40, 10 + 2**40, 2**50]


def duplicate(call: Any, sequence_id: int, last: int) -> None:
    with pytest.raises(xl.DuplicateSequenceError) as caught:
        call()
    error = caught.value
    assert (error.sequence_id, error.last_sequence_id) == (sequence_id, last)
    assert not error.maybe_written
    assert not error.retriable


@pytest.mark.on_broker
def test_g2_an_id_that_is_used_up_is_a_duplicate_and_nothing_is_appended(topic) -> None:
    with topic.producer("exclusive", name="a") as producer:
        producer.send_many([b"x"] * 11)
        untouched = Untouched(topic, producer)
        for used in (10, 9, 0):
            duplicate(lambda used=used: producer.send(b"y", sequence_id=used), used, 10)
            duplicate(lambda used=used: producer.send_async(b"y", sequence_id=used), used, 10)
            duplicate(lambda used=used: producer.send_many([b"y"], sequence_id=used), used, 10)
        duplicate(lambda: producer.send_many([b"y"] * 5, sequence_id=8), 8, 10)  # 3 of 5 are used
        untouched.check()
    assert b"y" not in [m.value for m in topic.reader()]


def test_g2_a_duplicate_does_not_hurt_what_waits_beside_it(topic) -> None:
    with topic.producer("exclusive", linger=5) as producer:
        first = producer.send_async(b"first", sequence_id=5)
        duplicate(lambda: producer.send_async(b"again", sequence_id=5), 5, 5)
        second = producer.send_async(b"second")
        producer.flush()
        assert (first.result(0), second.result(0)) == (0, 1)


def test_g2_the_last_id_of_all_is_the_last(topic) -> None:
    with topic.producer("exclusive", name="a") as producer:
        producer.send(b"x", sequence_id=2**63 - 1)
        for call in (producer.send, producer.send_async, lambda v: producer.send_many([v])):
            with pytest.raises((xl.ExclusiveLogError, ValueError)):
                call(b"y")
        assert producer.last_sequence_id == 2**63 - 1
    assert numbers(topic) == [2**63 - 1]


def test_g2_ids_survive_closing_and_opening(path) -> None:
    for opened in range(3):
        with xl.open(path) as engine, engine.topic("t").producer("exclusive", name="a") as producer:
            assert producer.last_sequence_id == 2 * opened - 1
            producer.send(b"x")
        with xl.open(path) as engine:
            topic = engine.topic("t")
            with topic.producer("exclusive", name="a") as producer:
                duplicate(lambda p=producer: p.send(b"x", sequence_id=0), 0, 2 * opened)
                producer.send(b"x")
    with xl.open(path) as engine:
        assert numbers(engine.topic("t")) == list(range(6))


def test_g2_ids_are_counted_per_topic(engine) -> None:
    with engine.topic("a").producer("exclusive", name="n") as producer:
        producer.send_many([b"x"] * 5)
    with engine.topic("b").producer("exclusive", name="n") as producer:
        assert producer.last_sequence_id == -1


@pytest.mark.on_broker
def test_g2_ids_survive_a_kill(worker, topic) -> None:
    other = worker()
    other.call(open_producer, "exclusive", name="a")
    for number in range(5):
        other.call(send, b"%d" % number)
    other.kill()
    with topic.producer("wait_for_exclusive", name="a", timeout=PATIENCE) as producer:
        assert producer.last_sequence_id == 4
        duplicate(lambda: producer.send(b"4", sequence_id=4), 4, 4)
        assert producer.send(b"5") == 5
    assert numbers(topic) == list(range(6))


@pytest.mark.on_broker
def test_g2_ids_survive_a_take_over(worker, topic) -> None:
    other = worker()
    other.call(open_producer, "exclusive", name="a")
    other.call(send, b"0", sequence_id=41)
    with topic.producer("exclusive_with_fencing", name="a") as producer:
        assert producer.last_sequence_id == 41
        producer.send(b"1")
    other.call(close_producer)
    other.call(open_producer, "exclusive", name="a")
    other.call(send, b"2")
    assert numbers(topic) == [41, 42, 43]


def test_g2_ids_are_handed_to_a_waiter_as_they_are_when_it_is_promoted(topic) -> None:
    owner = topic.producer("exclusive", name="a")
    waiter = topic.producer_async("wait_for_exclusive", name="b", timeout=PATIENCE)
    owner.send(b"0")
    owner.close()
    with waiter.result(PATIENCE) as second:
        second.send(b"0")
        third = topic.producer_async("wait_for_exclusive", name="a", timeout=PATIENCE)
    with third.result(PATIENCE) as producer:
        assert producer.last_sequence_id == 0
        producer.send(b"1")
    assert numbers(topic, "a") == [0, 1]


def test_g2_ids_are_in_order_when_threads_share_a_producer(topic) -> None:
    with topic.producer("exclusive", name="a") as producer:

        def run() -> None:
            for _ in range(20):
                producer.send(b"x")
                producer.send_async(b"y")
                producer.send_many([b"z"] * 3)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert numbers(topic) == list(range(8 * 20 * 5))


@pytest.mark.on_broker
def test_g3_a_batch_appears_to_readers_at_one_moment(path, topic) -> None:
    stop = threading.Event()

    def run() -> None:
        with topic.producer("exclusive", max_batch_messages=10) as producer:
            while not stop.is_set():
                producer.send_many([b"x" * 100] * 100)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with xl.open(path) as engine:
            for _ in range(300):
                seen = engine.topic("orders")
                assert seen.next_offset % 100 == 0
                assert len(list(seen.reader(max(0, seen.next_offset - 100)))) % 100 == 0
    finally:
        stop.set()
        thread.join(PATIENCE)
