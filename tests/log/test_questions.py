"""A program asks whether there is more to read, and stops its loop if not. Where a read would raise
(its position was trimmed, the topic was deleted, the tables are damaged), the answer must not be
that everything was read: the program would go on with a state that is out of date (rule G12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.records import U64

Reading = xl.Reader | xl.GroupReader
Spoil = Callable[[xl.Engine, xl.Topic], None]


def trim_all(_: xl.Engine, topic: xl.Topic) -> None:
    topic.trim(before=topic.next_offset)


def delete(engine: xl.Engine, topic: xl.Topic) -> None:
    engine.delete_topic(topic.name)


def delete_and_make_again(engine: xl.Engine, topic: xl.Topic) -> None:
    engine.delete_topic(topic.name)
    engine.topic(topic.name)


def damage_the_row(engine: xl.Engine, topic: xl.Topic) -> None:
    with engine.ledger.write_exclusive() as tables:
        key = U64.pack(topic.id)
        row = tables.rows.get("topics", key)
        assert row is not None
        tables.rows.put("topics", key, row[:-1] + bytes([row[-1] ^ 1]))


SPOILT = pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (trim_all, xl.OffsetTrimmedError),
        (delete, xl.TopicNotFoundError),
        (delete_and_make_again, xl.TopicNotFoundError),
        (damage_the_row, xl.LedgerCorruptedError),
    ],
)


@pytest.fixture
def filled(topic: xl.Topic) -> xl.Topic:
    with topic.producer() as producer:
        producer.send_many([b"a", b"b", b"c"], keys=["x", "y", "x"])
    topic.engine.ledger.checkpoint()
    return topic


def readers_of(engine: xl.Engine, topic: xl.Topic) -> Iterator[Reading]:
    """A reader of each kind; some have read a message."""
    for options in ({}, {"read_compacted": True}, {"group": "g"}):
        reader = topic.reader(**options)
        yield reader
        yield topic.reader(1, **({} if "group" in options else options))
    yield engine.reader([topic.name], group="many")


def questions(reader: Reading) -> dict[str, Callable[[], Any]]:
    """Every call that says whether, or shows that, there is more to read."""
    found: dict[str, Callable[[], Any]] = {
        "has_message_available": reader.has_message_available,
        "read_next": lambda: reader.read_next(0),
        "next": lambda: next(reader),
        "iter": lambda: list(reader),
        "read_batch": lambda: reader.read_batch(9),
        "values": lambda: list(reader.values()),
        "follow": lambda: list(reader.follow(0)),
        "follow values": lambda: list(reader.values(follow=True, timeout=0)),
    }
    if isinstance(reader, xl.Reader):
        found["read_arrow"] = reader.read_arrow
    return found


@SPOILT
def test_g12_no_question_hides_what_reading_would_raise(
    engine: xl.Engine, filled: xl.Topic, spoil: Spoil, error: type[Exception]
) -> None:
    opened = list(readers_of(engine, filled))
    spoil(engine, filled)
    answers = {}
    for number, reader in enumerate(opened):
        for name, ask in questions(reader).items():
            try:
                answers[number, name] = ask()
            except error:
                continue
    assert answers == {}


@SPOILT
def test_g12_nor_do_those_of_asyncio(path: str, spoil: Spoil, error: type[Exception]) -> None:
    async def ask() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"a", b"b", b"c"])
            reader = await topic.reader()
            group = await engine.reader(["orders"], group="g")
            with xl.open(path) as other:
                other.ledger.checkpoint()
                spoil(other, other.topic("orders"))
            for each in (reader, group):
                with pytest.raises(error):
                    await each.has_message_available()
                with pytest.raises(error):
                    await each.read_next(timeout=0)

    asyncio.run(ask())


def test_g12_a_reader_that_has_read_everything_is_not_told_of_a_trim(filled: xl.Topic) -> None:
    """It has missed nothing."""
    reader = filled.reader()
    assert len(list(reader)) == 3
    trim_all(filled.engine, filled)
    assert not reader.has_message_available()
    assert list(reader) == []


def test_g12_one_that_skips_what_was_trimmed_is_at_the_end(filled: xl.Topic) -> None:
    reader = filled.reader(trimmed="earliest")
    trim_all(filled.engine, filled)
    assert not reader.has_message_available()
    assert list(reader) == []


@pytest.mark.parametrize("spoil", [delete, damage_the_row])
def test_g12_the_length_of_a_topic_hides_no_error(
    engine: xl.Engine, filled: xl.Topic, spoil: Spoil
) -> None:
    spoil(engine, filled)
    for ask in (
        lambda: len(filled),
        lambda: filled.first_offset,
        lambda: filled.next_offset,
        filled.stats,
    ):
        with pytest.raises((xl.TopicNotFoundError, xl.LedgerCorruptedError)):
            ask()


def test_g12_the_lag_of_a_group_counts_what_was_trimmed_before_it_came(
    engine: xl.Engine, filled: xl.Topic
) -> None:
    with filled.reader(group="g") as reader:
        reader.read_next(0)
        reader.commit()
    trim_all(engine, filled)
    for infos in (filled.stats().groups, engine.stats().groups):
        assert [(info.position, info.lag) for info in infos] == [(1, 2)]
