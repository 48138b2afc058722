"""Many topics (P11, P18), and how to create them with few flushes."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import exclusivelog as xl
from bench.append import messages
from bench.measure import POWER, Arm, Figure, Settings, Stores, Target, take_turns

COUNTS = (1, 1_000, 100_000)
MANY = {10_000: 100e3, 100_000: 80e3}  # topics, and the messages a second that they must take
SENDS = 1_000
PIPELINED = 100_000
AT_ONCE = 10_000
Item = TypeVar("Item")


def p11(settings: Settings) -> Figure:
    """The append rate, round robin over many topics, each with an owner of its own."""
    how = "one by one" if settings.full else f"in transactions of {AT_ONCE:,}"
    figure = Figure("P11", "append rate with many topics")
    figure.notes.append(f"topics and their owners were registered {how}; one ledger per count")
    with Stores(settings) as stores:
        arms: list[Arm] = []
        for count in COUNTS:
            engine = stores.engine(f"topics-{count}")
            producers = own(engine, names(count), settings.full)
            arms += _arms(engine, producers)
        results = take_turns(arms, settings.rounds_or(5), before=stores.warm_memory)
    figure.series = list(results.values())
    for kind in ("send", "send_async"):
        one = results[arm_name(kind, 1)]
        for count in COUNTS[1:]:
            judged = kind == "send" and count == COUNTS[-1]
            figure.compare(
                f"durable {kind}, {count:,} topics",
                results[arm_name(kind, count)],
                one,
                Target(least_ratio=0.7) if judged else None,
            )
    return figure


def p18(settings: Settings) -> Figure:
    """One message to each of many topics, repeatedly, with checkpoints; opening their producers,
    and the memory that these take."""
    figure = Figure("P18", "send_async, one message each to many topics")
    with Stores(settings) as stores:
        arms: list[Arm] = []
        for count in MANY:
            engine = stores.engine(f"topics-{count}")
            producers, seconds, size = _opened(engine, names(count))
            figure.state(f"opening a producer, {count:,} topics", seconds, "s", Target(most=70e-6))
            figure.state(f"memory of a producer, {count:,} topics", size, "bytes")
            arms.append(_arms(engine, producers)[1])
        results = take_turns(arms, settings.rounds_or(5), before=stores.warm_memory)
    figure.series = list(results.values())
    for count, least in MANY.items():
        series = results[arm_name("send_async", count)]
        figure.compare(f"durable send_async, {count:,} topics", series, target=Target(least=least))
    return figure


def _opened(engine: xl.Engine, names: Sequence[str]) -> tuple[list[xl.Producer], float, float]:
    """Open producers of these topics; return them, and the seconds and bytes of memory of each."""
    before, begun = _anonymous_memory(), time.perf_counter()
    producers = own(engine, names, False)
    seconds = time.perf_counter() - begun
    return producers, seconds / len(names), (_anonymous_memory() - before) / len(names)


def _anonymous_memory() -> int:
    """Bytes of private memory of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def arm_name(kind: str, count: int) -> str:
    return f"{kind}, {count:,} topic{'s' * (count > 1)}"


def _arms(engine: xl.Engine, producers: Sequence[xl.Producer]) -> list[Arm]:
    turn = itertools.cycle(producers)
    value = messages(1)[0]

    def send(_: Any) -> None:
        for producer in itertools.islice(turn, SENDS):
            producer.send(value)

    def send_async(_: Any) -> None:
        receipts = [p.send_async(value) for p in itertools.islice(turn, PIPELINED)]
        for receipt in receipts:
            receipt.result()

    return [
        Arm(arm_name("send", len(producers)), send, SENDS, durability=POWER),
        Arm(arm_name("send_async", len(producers)), send_async, PIPELINED, durability=POWER),
    ]


# ---- setting up --------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return [f"topic-{i:06}" for i in range(count)]


def own(engine: xl.Engine, names: Sequence[str], one_by_one: bool) -> list[xl.Producer]:
    """An exclusive producer on each of these topics."""
    if one_by_one:
        return [engine.topic(name).producer("exclusive") for name in names]
    return [producer for part in chunks(names) for producer in engine.producers(part, "exclusive")]


def chunks(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    return (items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE))


def make_topics(engine: xl.Engine, names: Sequence[str]) -> None:
    """What `engine.topic` does, many at a time."""
    for part in chunks(names):
        with engine.ledger.write_exclusive() as tables:
            for name in part:
                if tables.topics.id_of(name) is None:
                    tables.topics.create(name)
