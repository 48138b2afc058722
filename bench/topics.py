"""Many topics (P11), and how to get them without as many flushes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import exclusivelog as xl
from bench.append import messages
from bench.measure import POWER, Arm, Figure, Settings, Stores, Target, take_turns
from exclusivelog import _core
from exclusivelog.local.records import Session
from exclusivelog.producer import Options, Producer

COUNTS = (1, 1_000, 100_000)
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
            figure.compare(f"durable {kind}, {count:,} topics", results[arm_name(kind, count)], one,
                           Target(least_ratio=0.7) if judged else None)  # fmt: skip
    return figure


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
    make_topics(engine, names)
    producers = []
    for part in chunks(names):
        producers += _register_owners(engine, part)
    return producers


def chunks(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    return (items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE))


def make_topics(engine: xl.Engine, names: Sequence[str]) -> None:
    """What `engine.topic` does, many at a time."""
    for part in chunks(names):
        with engine.ledger.write_exclusive() as tables:
            for name in part:
                if tables.topics.id_of(name) is None:
                    tables.topics.create(name)


def _register_owners(engine: xl.Engine, names: Sequence[str]) -> list[xl.Producer]:
    """What `topic.producer("exclusive")` does, many at a time."""
    registrations = []
    slot = engine._slot
    assert slot is not None
    with engine.ledger.write_exclusive() as tables:
        for name in names:
            topic = tables.topics.id_of(name)
            assert topic is not None
            number = tables.rows.next_id(b"session")
            session = Session(
                id=number, topic=topic, engine=engine.id, slot=slot.index, pid=os.getpid(),
                engine_name=engine.name, name=f"{engine.name}-{number}", mode="exclusive",
                priority=0, created=_core.now(), tie=0, since=time.time_ns() // 1_000_000,
            )  # fmt: skip
            row = tables.topics.get(topic)
            registrations.append(engine.sessions.requests.decide(tables, row, session, None))
    sessions = [
        engine.open_session(name, registration.session, registration.last_sequence, Options())
        for name, registration in zip(names, registrations, strict=True)
    ]
    return [
        Producer(engine, name, session, Options())
        for name, session in zip(names, sessions, strict=True)
    ]
