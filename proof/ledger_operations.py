"""What else changes a ledger, besides the appends of `proof.work`: each of its kinds once.

Messages are committed together; a waiter is promoted; a topic is handed over, compacted, trimmed,
deleted; a claim is taken; a map snapshotted; a reader's cursor committed with what was made of its
messages. A process that dies in the middle leaves each of these done or not done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exclusivelog as xl
from testing.kills import garbage
from testing.processes import values

SENT = [b"%d" % number for number in range(6)]
KEYS = ["a", "b", "a", "b", "a", "b"]
MADE = [b"of them"]
LARGE = 140_000  # bytes: more than a transaction in the journal may have


def do(path: Path, engine: xl.Engine) -> None:
    """All of them, one after the other."""
    with engine.topic("together").producer("exclusive") as producer:
        for future in [producer.send_async(value) for value in SENT]:
            future.result(10)
    topic = engine.topic("chores")
    owner = topic.producer("exclusive")
    owner.send_many(SENT, keys=KEYS)
    waiter = topic.producer_async("wait_for_exclusive", timeout=10)
    owner.close()
    waiter.result(10)
    _read_and_write(engine, topic)
    _send_to_two(engine)
    topic.compact()
    topic.trim(before=3)
    with xl.open(path, name="next door") as other:
        engine.unload("chores", to=other.id)
        other.topic("chores").producer("exclusive", timeout=10).close()
    with engine.own("chores", {"claim": None}):
        pass
    shared: xl.SharedMap[str, int] = xl.SharedMap(engine.topic("map"))
    with shared:
        shared.put_all({"a": 1, "b": 1})
        shared.snapshot()
    with engine.topic("gone").producer() as producer:
        producer.send_many(SENT)
    engine.delete_topic("gone")


def _read_and_write(engine: xl.Engine, topic: xl.Topic) -> None:
    """Read some messages, and write what is made of them, in one transaction with the cursor."""
    with engine.topic("made").producer("exclusive") as producer:
        with topic.reader(group="chores") as reader, engine.transaction() as transaction:
            reader.read_batch(2)
            for value in MADE:
                producer.send(value, transaction=transaction)
            transaction.commit_cursor(reader)
        producer.announce({"done": "1"})
    # One that is as large as this is a transaction of the tables.
    with engine.topic("made large").producer("exclusive") as producer:
        with topic.reader(group="chores") as reader, engine.transaction() as transaction:
            reader.read_next(0)
            producer.send(bytes(LARGE), transaction=transaction)
            producer.announce({"done": "2"}, transaction=transaction)
            transaction.commit_cursor(reader)


def _send_to_two(engine: xl.Engine) -> None:
    """Send to two topics in one transaction."""
    with engine.topic("left").producer() as left, engine.topic("right").producer() as right:
        with engine.transaction() as transaction:
            for value in SENT:
                left.send(value, transaction=transaction)
                right.send(value, transaction=transaction)


def judge(path: Path) -> Iterator[str]:
    """What is half done. Everything can be had, and gone on with, at once."""
    with xl.open(path, name="judge") as engine:
        for name in set(engine.topics()) - {"t"}:
            engine.topic(name).producer("exclusive_with_fencing", timeout=10).close()
        yield from _judge_topics(engine)
        with engine.own("chores", {"claim": None}) as claim:
            if claim.generations["claim"] not in (1, 2):
                yield f"F2: generation {claim.generations['claim']} of a claim that was made once"
        yield from (f"A2: {kind} are left" for kind in garbage(engine))


def _judge_topics(engine: xl.Engine) -> Iterator[str]:
    topic, made = engine.topic("chores"), values(engine.topic("made"))
    found = [(m.offset, m.value) for m in topic.reader("earliest")]
    first = topic.first_offset
    if found != list(enumerate(SENT))[first:] and found:
        yield f"G3 at offset {first}: the log is not what was sent"
    together = values(engine.topic("together"))
    if together != SENT[: len(together)]:
        yield "B9: messages that were committed together are not what was sent"
    if first not in (0, 3):
        yield f"G8 at offset {first}: no trim was up to there"
    if made not in ([], MADE):
        yield "G3: a transaction is in the log in part"
    two = [values(engine.topic(name)) for name in ("left", "right")]
    if two not in ([[], []], [SENT, SENT]):
        yield "G3: a transaction is in one of its topics, or in part"
    with topic.reader(group="chores", trimmed="earliest") as reader:
        position = reader.position
    if made and position not in (2, 3):
        yield f"F6: the cursor is at {position}, and what was made of it is in the log"
    view = [(m.offset, m.value) for m in topic.reader(read_compacted=True, trimmed="earliest")]
    if first and view != [(4, SENT[4]), (5, SENT[5])]:
        yield "G7: the view is not the last message of every key"
    shared: xl.SharedMap[Any, Any]
    with xl.SharedMap(engine.topic("map")) as shared:
        if dict(shared.scan(latest=True)) not in ({}, {"a": 1, "b": 1}):
            yield "I1: only some of the keys were written"
    if "gone" in engine.topics() and values(engine.topic("gone")) not in ([], SENT):
        yield "G8: a topic was deleted in part"
