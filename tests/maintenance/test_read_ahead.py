"""A reader that has read ahead returns no message that was trimmed, or whose topic was deleted,
before it was asked for (rule G8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from testing.children import finish
from testing.journals import never_pack
from testing.processes import State, preload
from tests.log.test_readers import fill, rest

preload(__name__)


def reads(reader: xl.Reader, way: str) -> Callable[[], Any]:
    """A way to read on, which begins now."""
    if way == "arrow":
        pytest.importorskip("pyarrow")
    match way:
        case "iterates" | "values" | "follows":
            begun = {"iterates": reader.__iter__, "values": reader.values, "follows": reader.follow}
            found = begun[way]()
            return lambda: next(found)
        case "next":
            return lambda: next(reader)
        case "read_next":
            return lambda: reader.read_next(0)
        case "batch":
            return lambda: reader.read_batch(100)
        case _:
            return lambda: reader.read_arrow(columns=["offset"])


WAYS = pytest.mark.parametrize(
    "way", ["next", "read_next", "batch", "arrow", "iterates", "values", "follows"]
)
WHERE = pytest.mark.parametrize("where", ["journal", "entries", "packed"])


def read_ahead(
    topic: xl.Topic, where: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> xl.Reader:
    """A reader at offset 2 of 40 messages; several were read ahead, also of later entries."""
    if where == "entries":
        never_pack(monkeypatch)
    fill(topic, 40)
    if where != "journal":
        topic.engine.ledger.checkpoint()
    reader = topic.reader(0, **options)
    assert [next(reader).offset, next(reader).offset] == [0, 1]
    return reader


def trim(state: State, before: int) -> None:
    state.topic.trim(before)


def delete(state: State) -> None:
    state.engine.delete_topic("orders")


@WAYS
@WHERE
def test_g8_what_was_read_ahead_and_trimmed_is_not_returned(
    engine, topic, worker, monkeypatch, where, way
) -> None:
    reader = read_ahead(topic, where, monkeypatch)
    read_on = reads(reader, way)
    worker().call(trim, 21)
    for _ in range(2):  # also the second time
        with pytest.raises(xl.OffsetTrimmedError, match="'orders' begins at offset 21; 2 was"):
            read_on()
        assert reader.position == 2
        read_on = reads(reader, way)
    assert reader.has_message_available()
    reader.seek("earliest")
    assert rest(reader) == [b"%d" % n for n in range(21, 40)]


@WAYS
@WHERE
def test_g8_what_was_read_ahead_of_a_deleted_topic_is_not_returned(
    engine, topic, worker, monkeypatch, where, way
) -> None:
    reader = read_ahead(topic, where, monkeypatch)
    read_on = reads(reader, way)
    worker().call(delete)
    for _ in range(2):
        with pytest.raises(xl.TopicNotFoundError, match="'orders' was deleted"):
            read_on()
        assert reader.position == 2
        read_on = reads(reader, "next")


@WHERE
def test_g8_what_was_read_ahead_and_trimmed_is_skipped(topic, monkeypatch, where) -> None:
    reader = read_ahead(topic, where, monkeypatch, trimmed="earliest")
    topic.trim(21)
    assert next(reader).offset == 21
    reader.seek(5)
    assert reader.read_next(0).offset == 21
    topic.trim(23)
    assert next(iter(reader)).offset == 23


@WHERE
def test_g8_what_stays_is_read_on_without_a_gap(engine, topic, monkeypatch, where) -> None:
    """Trims behind the position, and changes of other topics, disturb no reader."""
    reader = read_ahead(topic, where, monkeypatch)
    found = []
    for number, message in enumerate(reader):
        found.append(message.offset)
        topic.trim(number)
        engine.topic(f"other-{number}").producer().close()
    assert found == list(range(2, 40))


def test_g8_messages_that_were_returned_stay_as_they_are(engine, topic) -> None:
    sent = [b"%d" % n + bytes(100_000) for n in range(4)]
    with topic.producer() as producer:
        producer.send_many(sent)
    found = topic.reader().read_batch(3)
    topic.trim(4)
    engine.delete_topic("orders")
    assert [message.value for message in found] == sent[:3]


def test_g8_a_compacted_view_that_was_read_ahead_is_read_on(engine, topic) -> None:
    """Its messages stay when the topic's own are trimmed."""
    with topic.producer() as producer:
        for key in "abcd":
            producer.send(b"1", key=key)
    topic.compact()
    with topic.producer() as producer:
        producer.send(b"2", key="e")
    reader = topic.reader(read_compacted=True)
    assert next(reader).key == b"a"
    topic.trim(4)
    assert [message.key for message in reader] == [b"b", b"c", b"d", b"e"]
    reader = topic.reader(read_compacted=True)
    assert next(reader).key == b"a"
    engine.delete_topic("orders")
    with pytest.raises(xl.TopicNotFoundError):
        next(reader)


TRIMS = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine:
        engine.topic("orders").trim(int(sys.argv[2]))
"""


@pytest.mark.long
def test_g8_runs_that_open_the_ledger_one_after_the_other(path) -> None:
    """Each initialises the shared memory, so its versions are those of the run before."""
    with xl.open(path) as engine:
        fill(engine.topic("orders"), 40)
    finish(TRIMS, path, 1)
    with xl.open(path, readonly=True) as engine:
        reader = engine.topic("orders").reader()
        for first in range(1, 9, 2):
            assert next(reader).offset == first
            finish(TRIMS, path, first + 2)
            with pytest.raises(xl.OffsetTrimmedError, match=f"begins at offset {first + 2}"):
                next(reader)
            reader.seek("earliest")
