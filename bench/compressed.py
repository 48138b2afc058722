"""Topics with and without compression, of JSON events (P22)."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from functools import partial

import exclusivelog as xl
from bench.measure import Arm, Figure, Row, Series, Settings, Stores, Target, take_turns
from bench.scan import check
from exclusivelog.cli.demo import DEFAULT_DATA, HISTORY
from exclusivelog.local.maintenance import compression

DATA = DEFAULT_DATA / HISTORY
TIMES, BATCH, POINTS = 4, 10_000, 2_000
PARSED = 25_000  # of the events: to parse one takes a hundred times as long as to read it
PLAIN, LZ4, ZSTD = "no compression", "lz4", "zstd"
APPEND = f"append, {BATCH:,} at a time"
VALUES, PARSE = "for value in reader.values()", "the same, and json.loads(value)"
MESSAGES, POINT = "for message in reader: message.value", "seek and read one"
TARGETS = {APPEND: Target(least_ratio=0.65), VALUES: Target(least_ratio=0.75)}


def p22(settings: Settings) -> Figure:
    """The same events in topics that differ in their compression."""
    values = events()
    figure = Figure("P22", f"compression of JSON events of {_mean(values):.0f} B")
    figure.notes.append(
        "zstd: compressed by LZ4 when they were written, and again by Zstandard afterwards; "
        f"the events of the demo, {TIMES} times; {POINT}: each in an order of its own"
    )
    with Stores(settings) as stores:
        engine = stores.engine()
        topics = {name: _filled(engine, name, values) for name in (PLAIN, LZ4, ZSTD)}
        _compress_again(engine)
        _state_sizes(figure, topics)
        sent = {name: engine.topic(f"sent {name}") for name in (PLAIN, LZ4)}
        sent[LZ4].compression("lz4")
        arms = [
            Arm(f"{APPEND}, {name}", lambda _, topic=topic: send(topic, values), len(values))
            for name, topic in sent.items()
        ]
        for name, topic in topics.items():
            arms += _reads(name, topic, values)
        results = take_turns(arms, settings.rounds_or(9))
    figure.series = list(results.values())
    _judge(figure, results)
    return figure


def events() -> list[bytes]:
    return gzip.decompress(DATA.read_bytes()).splitlines() * TIMES


def _mean(values: Sequence[bytes]) -> float:
    return sum(map(len, values)) / len(values)


def _filled(engine: xl.Engine, name: str, values: Sequence[bytes]) -> xl.Topic:
    topic = engine.topic(name)
    if name != PLAIN:
        topic.compression(name)
    send(topic, values)
    engine.ledger.checkpoint()
    return topic


def _compress_again(engine: xl.Engine) -> None:
    usual, compression.OLD_MS = compression.OLD_MS, -60_000  # all is old
    try:
        compression.compress_old(engine.ledger, lambda: False)
    finally:
        compression.OLD_MS = usual


def _state_sizes(figure: Figure, topics: dict[str, xl.Topic]) -> None:
    plain = topics[PLAIN].stats().stored_bytes
    for name, target in ((LZ4, Target(most_ratio=1 / 3.5)), (ZSTD, None)):
        stored = topics[name].stats().stored_bytes
        figure.rows.append(Row(f"stored bytes, {name}", stored, "B", plain, PLAIN, target))


def _reads(name: str, topic: xl.Topic, values: Sequence[bytes]) -> list[Arm]:
    works: list[tuple[str, Callable[[xl.Topic, int], None], int]] = [
        (VALUES, each_value, len(values)),
        (MESSAGES, each_message, len(values)),
        (PARSE, each_parsed, PARSED),
        (POINT, points, POINTS),
    ]
    return [
        Arm(f"{what}, {name}", partial(_run, work, topic, count), count)
        for what, work, count in works
    ]


def _run(work: Callable[[xl.Topic, int], None], topic: xl.Topic, count: int, _: object) -> None:
    work(topic, count)


def _judge(figure: Figure, results: dict[str, Series]) -> None:
    for what in (APPEND, VALUES, MESSAGES, PARSE, POINT):
        for name in (LZ4, ZSTD):
            ours = results.get(f"{what}, {name}")
            if ours is not None:
                target = TARGETS.get(what) if name == LZ4 else None
                figure.compare(ours.name, ours, results[f"{what}, {PLAIN}"], target)


# ---- what is measured --------------------------------------------------------------------


def send(topic: xl.Topic, values: Sequence[bytes]) -> None:
    with topic.producer() as producer:
        for at in range(0, len(values), BATCH):
            producer.send_many(values[at : at + BATCH])


def each_value(topic: xl.Topic, count: int) -> None:
    with topic.reader() as reader:
        for value in reader.values():  # noqa: B007
            pass
        check(reader.position, count)


def each_message(topic: xl.Topic, count: int) -> None:
    with topic.reader() as reader:
        for message in reader:
            value = message.value  # noqa: F841
        check(reader.position, count)


def each_parsed(topic: xl.Topic, count: int) -> None:
    with topic.reader() as reader:
        for value in reader.values():
            json.loads(value)
            if reader.position == count:
                break
        check(reader.position, count)


def points(topic: xl.Topic, count: int) -> None:
    dice = random.Random(count)
    end = topic.next_offset
    with topic.reader() as reader:
        for _ in range(count):
            offset = dice.randrange(end)
            reader.seek(offset)
            check(reader.read_next(timeout=0).offset, offset)
