"""Numbers of numpy and pandas are taken wherever whole numbers are: offsets, limits, ids. Booleans
and numbers with a fraction are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.arguments import as_int

pytestmark = pytest.mark.once

Kind = Callable[[int], Any]
KINDS = pytest.mark.parametrize(
    "kind", [np.int64, np.uint8, np.array], ids=lambda kind: kind.__name__
)


@KINDS
def test_whole_numbers_of_numpy_are_taken(path: str, kind: Kind) -> None:
    with xl.open(path, durability="process", keepalive=kind(30), max_readers=kind(100)) as engine:
        topic = engine.topic("orders")
        with topic.producer(
            "exclusive",
            priority=kind(1),
            timeout=kind(9),
            max_batch_messages=kind(9),
            max_batch_bytes=kind(99),
            max_pending_bytes=kind(99),
            linger=kind(0),
            settle=kind(0),
        ) as producer:
            assert producer.priority == 1
            assert producer.send(b"a", sequence_id=kind(3), event_time=kind(5)) == 0
            assert producer.send_async(b"b", sequence_id=kind(4)).result(kind(9)) == 1
            rest = producer.send_many(
                [b"c", b"d"], event_times=[kind(6), kind(7)], sequence_id=kind(5)
            )
            assert (rest, producer.last_sequence_id) == (range(2, 4), 6)
            epoch = producer.topic_epoch
        with topic.producer("exclusive", topic_epoch=kind(epoch)) as again:
            assert again.topic_epoch == epoch
        reader = topic.reader(kind(1))
        assert reader.read_next(kind(0)).value == b"b"
        reader.seek(kind(3))
        assert [m.event_time for m in reader.read_batch(kind(5))] == [7]
        reader.seek(kind(0))
        assert [m.value for m in reader.follow(kind(0))] == [b"a", b"b", b"c", b"d"]
        reader.seek(kind(0))
        assert reader.read_arrow(kind(99)) is not None
        with topic.reader(group="g", generation=kind(7)) as member:
            assert member.generation == 7
        with engine.reader(["orders"], group="g", generation=kind(8), start=kind(2)) as many:
            assert [m.value for _, m in many.read_batch(kind(9))] == [b"c", b"d"]
        with engine.own("g", {"shard": kind(3)}, timeout=kind(1)) as claim:
            assert claim.generations == {"shard": 3}
        assert topic.retention(kind(100), kind(50)) == xl.Retention(100, 50)
        assert topic.trim(kind(1)) == 1
        assert topic.trim(before=kind(2), max_bytes=kind(200)) >= 2


@KINDS
def test_so_are_they_by_maps_and_states(topic: xl.Topic, kind: Kind) -> None:
    shared: xl.SharedMap[str, int]
    with xl.SharedMap(topic, snapshot_every=kind(5), timeout=kind(9)) as shared:
        shared.put("a", 1)
        shared.put("a", 2)
        assert shared.at(kind(1)) == {"a": 1}
        assert [change.value for change in shared.watch(start=kind(1)).follow(kind(0))] == [2]


def test_so_are_they_by_asyncio(path: str) -> None:
    async def use() -> None:
        async with aio.open(path, durability="process") as engine:
            topic = await engine.topic("orders")
            async with topic.producer(priority=np.int64(1)) as producer:
                await producer.send_many([b"a", b"b"])
            assert [m.value async for m in topic.reader(np.int64(1))] == [b"b"]
            assert await topic.trim(np.int64(1)) == 1

    asyncio.run(use())


@pytest.mark.parametrize(
    "wrong", [np.True_, np.float64(1.0), np.array([1, 2]), np.array([1.0]), "1", 1.0, True]
)
def test_what_is_no_whole_number_is_refused(topic: xl.Topic, wrong: Any) -> None:
    assert as_int(wrong) is wrong
    reader = topic.reader()
    for call in (
        lambda: reader.read_batch(wrong),
        lambda: topic.trim(wrong),
        lambda: topic.reader(wrong),
        lambda: topic.producer(priority=wrong),
        lambda: topic.producer().send(b"", sequence_id=wrong),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
