"""Reading values one by one, as applications do (P20)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import exclusivelog as xl
from bench.append import messages
from bench.measure import Arm, Figure, Series, Settings, Stores, Target, take_turns
from bench.peers import Lmdb
from bench.scan import CURSOR, each_value, iterate, value_of_each, walk

SIZES = (1, 10, 100, 1_000, 100_000)  # messages that one call sends
COUNT = 200_000
FRESH = 5_000  # messages that are read before a checkpoint has packed them
READS: dict[str, tuple[Callable[[xl.Topic, int], None], Target | None]] = {
    "values()": (each_value, Target(least_ratio=3.5)),
    "message.value": (value_of_each, Target(least_ratio=2)),
    "nothing of the message": (iterate, None),
}


def p20(settings: Settings) -> Figure:
    """Logs that were sent in calls of one size each, and one row per message in LMDB."""
    figure = Figure("P20", "read each value, 100 B")
    figure.notes.append(
        f"{COUNT:,} messages for each size, read after a checkpoint, which packs small entries; "
        f"'in the journal': {FRESH:,} that were sent right before"
    )
    values = messages(COUNT)
    with Stores(settings) as stores:
        engine = stores.engine(durability="process")
        lmdb = stores.enter_context(closing(Lmdb(stores.path("lmdb"))))
        lmdb.put_many(lmdb.items(values), 1_000)
        topics = fill(engine, values)
        arms = [
            Arm(arm_name(read, size), partial(_run, call, topic, COUNT), COUNT)
            for size, topic in topics.items()
            for read, (call, _) in READS.items()
        ]
        arms += [_fresh_arm(engine, values, read) for read in READS]
        arms.append(Arm(CURSOR, lambda _: walk(lmdb), COUNT, rival=True))
        results = take_turns(arms, settings.rounds_or(7))
    figure.series = list(results.values())
    _judge(figure, results)
    return figure


def _judge(figure: Figure, results: dict[str, Series]) -> None:
    cursor = results[CURSOR]
    for read, (_, target) in READS.items():
        for size in SIZES:
            name = arm_name(read, size)
            figure.compare(name, results[name], cursor, target)
        figure.compare(fresh_name(read), results[fresh_name(read)], cursor)


def arm_name(read: str, size: int) -> str:
    """What is read from each message, and how many messages each call has sent."""
    return f"{read}, sent {size:,} at a time"


def fresh_name(read: str) -> str:
    """The same for messages that are only in the journal."""
    return f"{read}, sent 1 at a time, in the journal"


def fill(engine: xl.Engine, values: Sequence[bytes]) -> dict[int, xl.Topic]:
    """A topic for each size, with all of these values, packed as checkpoints leave them."""
    topics = {size: engine.topic(f"by-{size}") for size in SIZES}
    for size, topic in topics.items():
        with topic.producer() as producer:
            for at in range(0, len(values), size):
                producer.send_many(values[at : at + size])
    engine.ledger.checkpoint()
    return topics


def _fresh_arm(engine: xl.Engine, values: Sequence[bytes], read: str) -> Arm:
    def send_now() -> xl.Topic:
        engine.ledger.checkpoint()
        name = f"fresh-{read}"
        if name in engine.topics():
            engine.delete_topic(name)
        topic = engine.topic(name)
        with topic.producer() as producer:
            for value in values[:FRESH]:
                producer.send(value)
        return topic

    call, _ = READS[read]
    return Arm(fresh_name(read), lambda topic: call(topic, FRESH), FRESH, prepare=send_now)


def _run(call: Callable[[xl.Topic, int], None], topic: xl.Topic, count: int, _: object) -> None:
    call(topic, count)
