"""Compacted views, on the public interface (rules G5, G7, G12)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import exclusivelog as xl
from testing.compactions import Sent, compacted, kept, read
from testing.processes import PATIENCE

pytestmark = [pytest.mark.needs("compaction"), pytest.mark.rule("G7")]


@pytest.fixture
def there(path: str) -> Iterator[xl.Topic]:
    """The topic, on another engine."""
    with xl.open(path, name="there") as engine:
        yield engine.topic("orders")


def write(topic: xl.Topic, seed: int, count: int) -> None:
    """Messages of few keys, one by one and many at a time, by several owners."""
    rng = random.Random(seed)
    while count > 0:
        with topic.producer("exclusive") as producer:
            for _ in range(rng.randrange(1, 5)):
                some = min(count, rng.choice([1, 1, 7]))
                count -= some
                keys = [rng.choice([b"a", b"b", b"c", None]) for _ in range(some)]
                values = [rng.choice([b"%d" % n, None]) for n in range(some)]
                if some:
                    producer.send_many(values, keys=keys)


def sent(topic: xl.Topic) -> list[Sent]:
    return read(topic.reader())


@pytest.mark.on_broker
def test_g7_the_last_message_of_every_key_stays_at_its_offset(
    topic: xl.Topic, there: xl.Topic
) -> None:
    assert compacted(topic) == []
    for seed in range(3):
        write(topic, seed, 40)
        everything = sent(topic)
        expected = kept(everything)
        assert topic.compact() == len(expected)
        assert compacted(topic) == compacted(there) == expected
        write(there, seed + 10, 10)
        tail = sent(topic)[len(everything) :]
        assert compacted(topic) == compacted(there) == expected + tail


def test_g7_without_a_view_all_is_read(topic: xl.Topic) -> None:
    write(topic, 1, 30)
    assert compacted(topic) == sent(topic)


@pytest.mark.rule("G5")
def test_g7_it_begins_anywhere_and_knows_whether_there_is_more(topic: xl.Topic) -> None:
    write(topic, 1, 60)
    topic.compact()
    write(topic, 2, 5)
    left = compacted(topic)
    for start in range(topic.next_offset + 2):
        expected = [one for one in left if one[0] >= start]
        reader = topic.reader(start, read_compacted=True)
        assert reader.has_message_available() == bool(expected)
        assert read(reader) == expected
        assert not reader.has_message_available()
    reader.seek("earliest")
    assert [reader.read_next(PATIENCE).offset for _ in left] == [offset for offset, *_ in left]


def test_g7_of_a_topic_of_tombstones_nothing_stays(topic: xl.Topic) -> None:
    with topic.producer("exclusive") as producer:
        producer.send_many([b"1", None, None], keys=["a", "a", "b"])
        assert topic.compact() == 0
        reader = topic.reader(read_compacted=True)
        assert not reader.has_message_available()
        producer.send(b"2", key="a")
        assert read(reader) == [(3, b"a", b"2")]


def test_g7_one_that_has_begun_misses_nothing(topic: xl.Topic) -> None:
    """However often the topic is compacted meanwhile, deletions included."""
    write(topic, 1, 40)
    topic.compact()
    expected = compacted(topic)
    with topic.reader(read_compacted=True) as reader, topic.producer("exclusive") as producer:
        found = [reader.read_next(PATIENCE)]
        producer.send_many([b"x", None], keys=["a", "a"])
        topic.compact()
        rest = [(m.offset, m.key, m.value) for m in reader]
    begun = [(m.offset, m.key, m.value) for m in found]
    assert begun + rest == [*expected, (40, b"a", b"x"), (41, b"a", None)]


def test_g7_messages_are_what_they_were(topic: xl.Topic) -> None:
    for number in range(20):
        with topic.producer("exclusive", name=f"p{number % 3}") as producer:
            producer.send(
                b"%d" % number, key=f"k{number % 7}", properties={"n": str(number)}, event_time=5
            )
    expected = list(topic.reader(13))
    topic.compact()
    assert list(topic.reader(read_compacted=True)) == expected
    with topic.reader(read_compacted=True) as reader:
        batch = reader.read_arrow()
        assert batch is not None
        assert batch.column("offset").to_pylist() == list(range(13, 20))


@pytest.mark.needs("reader_groups")
@pytest.mark.rule("G12")
def test_g12_a_group_that_resumes_misses_no_deletion(topic: xl.Topic) -> None:
    with topic.producer("exclusive") as producer:
        producer.send_many([b"1", b"2"], keys=["a", "b"])
        with topic.reader(group="g", read_compacted=True) as reader:
            assert [message.key for message in reader] == [b"a", b"b"]
            reader.commit()
        producer.send_many([None, b"3"], keys=["a", "c"])
        topic.compact()
        with topic.reader(group="g", read_compacted=True) as reader:
            assert [(m.key, m.value) for m in reader] == [(b"a", None), (b"c", b"3")]
