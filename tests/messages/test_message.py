"""Messages as objects: compared, copied and shown; and those that cannot be deserialised."""

from __future__ import annotations

import copy
import datetime as dt
import json
import pickle
import sys
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from testing.children import finish

pytestmark = [pytest.mark.once, pytest.mark.rule("G1")]
PARTS: list[dict[str, Any]] = [
    {"value": b"v"},
    {"value": None},
    {"value": b""},
    {"value": b"v", "key": ""},
    {"value": b"v", "key": "k"},
    {"value": b"w", "key": "k", "properties": {"a": "b"}},
    {"value": b"v", "event_time": 0},
    {"value": b"v", "event_time": -5},
    {"value": b"v" * 100_000, "key": b"k" * 500, "properties": {"a": "é"}, "event_time": 7},
]


def facts(message: xl.Message) -> tuple[Any, ...]:
    return (
        message.offset,
        message.epoch,
        message.session,
        message.publish_time,
        message.published_at,
        message.event_time,
        message.event_at,
        message.producer_name,
        message.sequence_id,
        message.value,
        message.raw_value,
        message.key,
        message.raw_key,
        message.properties,
    )


@pytest.fixture
def sent(topic: xl.Topic) -> xl.Topic:
    """A topic with a message of each kind: three in one entry, each of the others by itself."""
    with topic.producer("exclusive", name="p") as producer:
        producer.send_many([b"1", b"2", b"3"], keys=["x", None, "x"])
        for number, parts in enumerate(PARTS):
            producer.send(**parts, sequence_id=10 + 2 * number)
    return topic


# ---- compared ----------------------------------------------------------------------------


def test_messages_are_equal_if_all_of_their_parts_are(engine, sent) -> None:
    from_journal = list(sent.reader())
    engine.ledger.checkpoint()
    packed = list(sent.reader())
    assert len(packed) == 3 + len(PARTS)
    for number, message in enumerate(packed):
        assert message == from_journal[number]
        assert hash(message) == hash(from_journal[number])
        assert [message == other for other in packed] == [number == at for at in range(len(packed))]
    assert len({*packed, *from_journal}) == len(packed)
    assert packed[0] != packed[0].value
    assert packed[0] != facts(packed[0])


@pytest.mark.parametrize(
    "other",
    [
        {"value": b"w"},
        {"value": None},
        {"key": None},
        {"key": ""},
        {"properties": {}},
        {"properties": {"a": "c"}},
        {"event_time": 2},
        {"event_time": None},
        {"sequence_id": 6},
    ],
)
def test_messages_differ_if_one_part_does(engine, other) -> None:
    """Those at the same offset of two topics that were published in the same millisecond."""
    parts = {"value": b"v", "key": "k", "properties": {"a": "b"}, "event_time": 1, "sequence_id": 5}
    topics = [engine.topic(name) for name in ("a", "b", "c")]
    producers = [topic.producer(name="p") for topic in topics]
    ahead = 2_000_000_000_000
    for topic in topics:
        with engine.ledger.write_exclusive() as tables:
            row = tables.topics.get(topic.id)
            row.last_publish_time = ahead
            tables.topics.put(row)
    for producer, more in zip(producers, ({}, {}, other), strict=True):
        producer.send(**{**parts, **more})
    first, same, different = (next(topic.reader()) for topic in topics)
    assert first == same
    assert hash(first) == hash(same)
    assert first != different


def test_a_message_is_compared_as_the_log_has_it(topic) -> None:
    """Messages are compared by their bytes, also if a reader's deserializer fails."""
    with topic.producer() as producer:
        producer.send(b"no JSON", key="k")
    plain, read = next(topic.reader()), next(topic.reader(deserializer="json"))
    assert plain == read
    assert hash(plain) == hash(read)


# ---- copied ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("packed", [False, True])
def test_a_message_can_be_pickled(engine, sent, packed, protocol) -> None:
    if packed:
        engine.ledger.checkpoint()
    for message in sent.reader():
        again = pickle.loads(pickle.dumps(message, protocol))
        assert again == message
        assert facts(again) == facts(message)
        assert facts(copy.deepcopy(message)) == facts(copy.copy(message)) == facts(message)


def test_a_message_of_a_large_batch_is_pickled_alone(engine, topic) -> None:
    """Also if it is compressed where it is stored."""
    with topic.producer() as producer:
        producer.send_many([b"%d" % n * 10 for n in range(50_000)])
    engine.ledger.checkpoint()
    topic.reader()
    message = topic.reader(-1).read_next(0)
    data = pickle.dumps(message)
    assert len(data) < 1000
    assert pickle.loads(data) == message


def test_a_damaged_pickle_is_refused(topic) -> None:
    with topic.producer() as producer:
        producer.send(b"value" * 10)
    data = pickle.dumps(next(topic.reader()))
    changed = data.replace(b"valuevalue", b"valueValue", 1)
    assert changed != data
    with pytest.raises(ValueError, match="checksum"):
        pickle.loads(changed)


@pytest.mark.parametrize("name", ["bytes", "str", "json", "msgpack", "exact"])
def test_a_message_is_pickled_with_its_deserializer(topic, name) -> None:
    value: Any = b"x" if name == "bytes" else "x"
    with topic.producer(serializer=name) as producer:
        producer.send(value, key="k")
    message = next(topic.reader(deserializer=name, key_deserializer="str"))
    again = pickle.loads(pickle.dumps(message))
    assert (again.value, again.key, again.raw_key) == (value, "k", b"k")


def test_a_lambda_is_not_pickled(topic) -> None:
    with topic.producer() as producer:
        producer.send(b"x")
    message = next(topic.reader(deserializer=lambda data: data))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(message)


def test_a_pickled_message_outlives_its_engine_and_its_process(path) -> None:
    source = """
        import pickle, sys
        import exclusivelog as xl
        with xl.open(sys.argv[1]) as engine:
            topic = engine.topic("t")
            with topic.producer(serializer="json") as producer:
                producer.send({"a": 1}, key="k")
            message = next(topic.reader(deserializer="json"))
        print(pickle.dumps(message).hex())
    """
    message = pickle.loads(bytes.fromhex(finish(source, path).strip()))
    assert (message.offset, message.key, message.value) == (0, b"k", {"a": 1})


# ---- shown -------------------------------------------------------------------------------


def test_the_repr_of_a_message_is_short(topic) -> None:
    with topic.producer(name="p") as producer:
        producer.send(b"value", key="key")
        producer.send(None)
        producer.send(b"x" * 5_000_000, key=b"k" * 41)
        producer.send(b"x" * 40)
    assert [repr(message) for message in topic.reader(deserializer="json")] == [
        "<Message offset=0 epoch=0 key=b'key' value=b'value' producer_name='p'>",
        "<Message offset=1 epoch=0 key=None value=None producer_name='p'>",
        f"<Message offset=2 epoch=0 key={b'k' * 40!r}... (41 bytes) "
        f"value={b'x' * 40!r}... (5000000 bytes) producer_name='p'>",
        f"<Message offset=3 epoch=0 key=None value={b'x' * 40!r} producer_name='p'>",
    ]


def test_times_are_datetimes_in_utc_as_well(topic) -> None:
    ms = 1_700_000_000_123
    before = dt.datetime.now(dt.UTC) - dt.timedelta(milliseconds=1)
    with topic.producer() as producer:
        producer.send(b"a")
        for event_time in (0, -1, ms, dt.datetime(1, 1, 1, tzinfo=dt.UTC), 10**15):
            producer.send(b"b", event_time=event_time)
    none, zero, negative, some, first, beyond = topic.reader()
    assert before <= none.published_at <= dt.datetime.now(dt.UTC)
    assert none.published_at.tzinfo is dt.UTC
    assert none.published_at.timestamp() * 1000 == pytest.approx(none.publish_time, abs=0.01)
    assert none.event_at is None
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert (zero.event_at, negative.event_at) == (epoch, epoch - dt.timedelta(milliseconds=1))
    assert some.event_at == epoch + dt.timedelta(milliseconds=ms)
    assert first.event_at == dt.datetime(1, 1, 1, tzinfo=dt.UTC)
    assert beyond.event_time == 10**15
    with pytest.raises(OverflowError):
        _ = beyond.event_at


# ---- what cannot be deserialised ---------------------------------------------------------


def test_a_batch_has_the_messages_that_cannot_be_deserialised(engine, topic) -> None:
    """They are named when their value is asked for; the others are as they are."""
    with topic.producer() as producer:
        producer.send_many([b"1", b"wrong", b"3"])
    reader = topic.reader(deserializer="json")
    first, wrong, last = reader.read_batch(10)
    assert reader.position == 3
    assert (first.value, last.value) == (1, 3)
    with engine.reader(["orders"], group="g", deserializer="json") as both:
        (_, again) = both.read_batch(10)[1]
    for message in (wrong, again):
        for _ in range(2):
            with pytest.raises(xl.DeserializationError) as caught:
                _ = message.value
            error = caught.value
            assert (error.topic, error.offset, error.raw) == ("orders", 1, b"wrong")
            assert isinstance(error.__cause__, json.JSONDecodeError)
            assert isinstance(error, ValueError)
        assert message.raw_value == b"wrong"


def test_reading_on_passes_a_message_that_cannot_be_deserialised(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"wrong", b"2"])
    with topic.reader(group="g", deserializer="json") as reader:
        message = reader.read_next(0)
        with pytest.raises(xl.DeserializationError):
            _ = message.value
        assert reader.position == 1
        reader.commit()
    with topic.reader(group="g", deserializer="json") as reader:
        assert [message.value for message in reader] == [2]


def test_keys_are_deserialised_by_a_function_of_their_own(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"[1]", b"[2]", None], keys=["7", None, "x"])
    numbered = topic.reader(key_deserializer=int)
    first, second, wrong = numbered.read_batch(3)
    assert [(m.key, m.value) for m in (first, second)] == [(7, b"[1]"), (None, b"[2]")]
    assert [m.raw_key for m in (first, second, wrong)] == [b"7", None, b"x"]
    with pytest.raises(xl.DeserializationError, match="the key at offset 2") as caught:
        _ = wrong.key
    assert (caught.value.part, caught.value.raw, wrong.value) == ("key", b"x", None)
    both = topic.reader(deserializer="json", key_deserializer="str")
    assert [(m.key, m.value) for m in both] == [("7", [1]), (None, [2]), ("x", None)]
    assert list(topic.reader(key_deserializer=int).values()) == [b"[1]", b"[2]", None]


def test_every_way_to_a_reader_takes_a_deserializer_of_keys(engine, topic) -> None:
    with topic.producer() as producer:
        producer.send(b"v", key="k")
    with engine.reader(["orders"], group="g", key_deserializer="str") as reader:
        assert next(reader)[1].key == "k"
    with engine.role("r", groups={"h": ["orders"]}) as role:
        assert next(role.reader("orders", key_deserializer="str")).key == "k"
        again = role.group_reader(start=0, key_deserializer="str")
        assert again.has_message_available()
        assert next(again)[1].key == "k"
    with pytest.raises(ValueError, match="key_deserializer='pickle'"):
        topic.reader(key_deserializer="pickle")


def test_an_interrupt_is_not_taken_for_a_wrong_message(topic) -> None:
    def loads(data: bytes) -> Any:
        raise KeyboardInterrupt

    with topic.producer() as producer:
        producer.send(b"x", key="k")
    message = next(topic.reader(deserializer=loads, key_deserializer=loads))
    with pytest.raises(KeyboardInterrupt):
        _ = message.value
    with pytest.raises(KeyboardInterrupt):
        _ = message.key


def test_the_error_can_be_pickled_and_its_text_is_bounded(topic) -> None:
    def loads(data: bytes) -> Any:
        raise ZeroDivisionError("line\n" * 1000)

    with topic.producer() as producer:
        producer.send(b"x" * 100)
    with pytest.raises(xl.DeserializationError) as caught:
        _ = next(topic.reader(deserializer=loads)).value
    said = str(caught.value)
    assert said.startswith("topic 'orders': the value at offset 0 cannot be deserialised. ")
    assert "ZeroDivisionError: line line" in said
    assert "100 bytes" in said
    assert len(said) < 500
    assert "\n" not in said
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (said, vars(caught.value))


def test_messages_do_not_leak(topic) -> None:
    with topic.producer() as producer:
        producer.send(b"wrong")
    loads = json.loads
    before = sys.getrefcount(loads)
    message = next(topic.reader(deserializer=loads))
    for _ in range(100):
        with pytest.raises(xl.DeserializationError):
            _ = message.value
        pickle.loads(pickle.dumps(message))
    del message
    assert sys.getrefcount(loads) <= before + 2


def test_what_reads_messages_takes_a_deserializer_alone() -> None:
    with pytest.raises(TypeError):
        _core.Entry(b"", lambda data: data)  # type: ignore[arg-type]
