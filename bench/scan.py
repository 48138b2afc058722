"""Reading a whole topic (P6)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import exclusivelog as xl
from bench.append import SIZE, messages
from bench.measure import Arm, Figure, Settings, Stores, Target, take_turns
from bench.peers import Lmdb

BATCH = 100_000
COUNT, SINGLE_COUNT = 1_000_000, 4_000
CURSOR = "py-lmdb cursor, (key, value)"
VALUES = "for value in reader.values()"
VALUE = "for message in reader: message.value"
UNREAD = "for message in reader, nothing of it read"
COLUMNS: dict[str, list[str] | None] = {
    "value": ["value"],
    "offset and value": ["offset", "value"],
    "all columns": None,
}


def p6(settings: Settings) -> Figure:
    """Logs written in batches and one by one, read message by message and as arrow."""
    figure = Figure("P6", "read everything, 100 B")
    values = messages(COUNT)
    with Stores(settings) as stores:
        engine = stores.engine()
        many, single = engine.topic("many"), engine.topic("single")
        lmdb = stores.enter_context(closing(Lmdb(stores.path("lmdb"))))
        few = stores.enter_context(closing(Lmdb(stores.path("few"))))
        lmdb.put_many(lmdb.items(values), 1_000)
        few.put_many(few.items(values[:SINGLE_COUNT]), 1)
        _fill(many, single, values)
        results = take_turns(_arms(many, single, lmdb, few), settings.rounds_or(5))
    figure.series = list(results.values())
    _judge(figure, results)
    return figure


def _judge(figure: Figure, results: dict[str, Any]) -> None:
    cursor = results[CURSOR]
    figure.compare(VALUES, results[VALUES], cursor, Target(least_ratio=3.5))
    figure.compare(VALUE, results[VALUE], cursor, Target(least_ratio=2))
    figure.compare(
        f"{VALUES}; the peer without copies", results[VALUES], results["py-lmdb cursor, buffers"]
    )
    figure.compare(UNREAD, results[UNREAD], cursor)
    for name in COLUMNS:
        target = Target(least_ratio=10)
        figure.compare(f"read_arrow, {name}", results[f"read_arrow, {name}"], cursor, target)
    few = results[f"{CURSOR}, {SINGLE_COUNT:,} messages"]
    figure.compare(f"sent one by one: {VALUES}", results[f"one by one, {VALUES}"], few)
    figure.compare(f"sent one by one: {VALUE}", results[f"one by one, {VALUE}"], few)
    figure.compare("sent one by one: read_arrow, value", results["one by one, read_arrow"], few)


def _fill(many: xl.Topic, single: xl.Topic, values: Sequence[bytes]) -> None:
    with many.producer() as producer:
        for at in range(0, COUNT, BATCH):
            producer.send_many(values[at : at + BATCH])
    with single.producer() as producer:
        for value in values[:SINGLE_COUNT]:
            producer.send(value)


def _arms(many: xl.Topic, single: xl.Topic, lmdb: Lmdb, few: Lmdb) -> list[Arm]:
    return [
        Arm(VALUES, lambda _: each_value(many, COUNT), COUNT),
        Arm(VALUE, lambda _: value_of_each(many, COUNT), COUNT),
        Arm(UNREAD, lambda _: iterate(many, COUNT), COUNT),
        *(_arrow_arm(many, name, columns) for name, columns in COLUMNS.items()),
        Arm(CURSOR, lambda _: walk(lmdb), COUNT, rival=True),
        Arm("py-lmdb cursor, buffers", lambda _: walk(lmdb, buffers=True), COUNT, rival=True),
        Arm(f"one by one, {VALUES}", lambda _: each_value(single, SINGLE_COUNT), SINGLE_COUNT),
        Arm(f"one by one, {VALUE}", lambda _: value_of_each(single, SINGLE_COUNT), SINGLE_COUNT),
        Arm(
            "one by one, read_arrow", lambda _: arrow(single, SINGLE_COUNT, ["value"]), SINGLE_COUNT
        ),
        Arm(f"{CURSOR}, {SINGLE_COUNT:,} messages", lambda _: walk(few), SINGLE_COUNT, rival=True),
    ]


def _arrow_arm(topic: xl.Topic, name: str, columns: Sequence[str] | None) -> Arm:
    return Arm(f"read_arrow, {name}", lambda _: arrow(topic, COUNT, columns), COUNT)


def iterate(topic: xl.Topic, count: int) -> None:
    with topic.reader() as reader:
        for message in reader:  # noqa: B007
            pass
        check(message.offset + 1, count)


def value_of_each(topic: xl.Topic, count: int) -> None:
    with topic.reader() as reader:
        for message in reader:
            value = message.value
        check(len(value), SIZE)
        check(reader.position, count)


def each_value(topic: xl.Topic, count: int) -> None:
    with topic.reader() as reader:
        for value in reader.values():  # noqa: B007
            pass
        check(len(value), SIZE)
        check(reader.position, count)


def arrow(topic: xl.Topic, count: int, columns: Sequence[str] | None) -> None:
    found = 0
    with topic.reader() as reader:
        while (batch := reader.read_arrow(columns=columns)) is not None:
            found += batch.num_rows
    check(found, count)


def walk(lmdb: Lmdb, buffers: bool = False) -> None:
    begin: Any = lmdb.env.begin
    with begin(buffers=buffers) as txn:
        for key, value in txn.cursor():  # noqa: B007
            pass
    check(len(value), SIZE)


def check(found: int, expected: int) -> None:
    """Check that the result is correct."""
    if found != expected:
        raise RuntimeError(f"{expected} were there to read, {found} were read")
