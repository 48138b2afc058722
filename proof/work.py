"""A fixed work, of which every step is known, and what must be left of it after any death.

Each step is one atomic append: one message, a batch of several entries, large ones, a transaction
with the position of a reader. An owner is fenced on the way and another one goes on; checkpoints
are made; the journal goes around.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import exclusivelog as xl
from testing.judges import Call, Read, read_rows
from testing.judges import judge as judge_calls
from testing.processes import values

Durability = Literal["power", "process"]


def some(name: str, number: int, size: int) -> bytes:
    """A message of its own."""
    head = f"{name}/{number}/".encode()
    return head + random.Random(f"{name}{number}").randbytes(max(0, size - len(head)))


@functools.cache
def steps(name: str, rounds: int = 1) -> list[list[bytes]]:
    """What is sent to a topic: each step is one atomic append. With `max_batch_messages=2` the
    longer ones are several entries."""
    sizes = [[9], [700], [9] * 5, [40_000], [200_000], [9], [3000] * 5, [9], [90_000] * 4, [100]]
    numbers = itertools.count()
    return [[some(name, next(numbers), size) for size in step] for step in sizes * rounds]


FENCED_BEFORE = 5  # the step that a new owner begins with
CHECKPOINTS = (1, 3, 7)  # there is one behind these steps
WITH_POSITION = (2, 6)  # steps with which a reader group's position is committed: their number
TOPICS = ("t", "u")


def act(engine: xl.Engine, name: str, acknowledge: Callable[[], object], rounds: int = 1) -> None:
    """Send every step that is not there yet, by an owner that is fenced on the way, and by the
    one that fenced it."""
    topic = engine.topic(name)
    there = whole_steps(values(topic), steps(name, rounds))
    assert there is not None, "what is there is not this work"
    producer = topic.producer("exclusive", name=name, max_batch_messages=2, timeout=10)
    reader = topic.reader(group=name)  # its claim flushes: so it is none of a step
    for number, step in enumerate(steps(name, rounds)[there:], there):
        if number % 10 == FENCED_BEFORE:
            rival = topic.producer(
                "exclusive_with_fencing", name=f"{name}{number}", max_batch_messages=2
            )
            refused(producer)
            producer = rival
        if number % 10 in WITH_POSITION:
            _send_with_position(engine, producer, reader, number, step)
        elif len(step) == 1:
            producer.send(step[0])
        else:
            producer.send_many(step)
        acknowledge()
        if number % 10 in CHECKPOINTS:
            engine.ledger.checkpoint()
    producer.close()
    reader.close()


def _send_with_position(
    engine: xl.Engine, producer: xl.Producer, reader: xl.Reader, number: int, step: list[bytes]
) -> None:
    reader.seek(number)
    with engine.transaction() as transaction:
        producer.send_many(step, transaction=transaction)
        transaction.commit_cursor(reader)


def _judge_position(engine: xl.Engine, name: str, found: list[bytes], rounds: int) -> list[str]:
    """The position of the last step that was to be committed with one, and no other, belongs to
    what was found."""
    whole = whole_steps(found, steps(name, rounds))
    if whole is None:
        return []
    numbers = [number for number in range(whole) if number % 10 in WITH_POSITION]
    positions = [group.position for group in engine.groups() if group.group == name]
    last = positions[0] if positions else None
    if last == (numbers[-1] if numbers else None):
        return []
    return [f"G3: the position is {last}, and the log has {whole} steps"]


def refused(producer: xl.Producer) -> None:
    try:
        producer.send(b"of a fenced owner")
    except xl.ProducerFencedError:
        return
    raise AssertionError("B2: a fenced owner has sent")


def whole_steps(found: list[bytes], expected: list[list[bytes]]) -> int | None:
    """So many of the steps are in the log, whole and in order, and nothing else; else None."""
    at = 0
    for number, step in enumerate(expected):
        if at == len(found):
            return number
        if found[at : at + len(step)] != step:
            return None
        at += len(step)
    return len(expected) if at == len(found) else None


def calls(name: str, acknowledged: int, rounds: int = 1) -> list[Call]:
    """The steps as the calls of one sender, of which so many were acknowledged."""
    made = [
        Call(name, tuple(step), begun=2 * number) for number, step in enumerate(steps(name, rounds))
    ]
    return [
        call.acknowledged(call.begun + 1) if number < acknowledged else call
        for number, call in enumerate(made)
    ]


def judge_topic(engine: xl.Engine, name: str, acknowledged: int, rounds: int = 1) -> list[str]:
    """Every broken rule. It sends first: what a dead process had written and not flushed is
    in the log from then on, or is not; no reader sees it before (rule G6)."""
    topic = engine.topic(name)
    made = calls(name, acknowledged, rounds)
    end = 2 * len(made)
    before = Read("the next one", end, end + 1, 0, tuple(values(topic)))
    with topic.producer("exclusive_with_fencing", name=name) as producer:
        following = Call("the next one", (b"next",), end + 2)
        offset = producer.send(b"next")
        made.append(following.acknowledged(end + 3, offset, producer.topic_epoch))
    rows = read_rows(topic)
    after = Read("the next one", end + 4, end + 5, 0, tuple(row.value for row in rows))
    broken = [
        *judge_calls(rows, made, [before, after]),
        *_judge_position(engine, name, list(after.values[:-1]), rounds),
    ]
    return [f"{name}: {each}" for each in broken]


def judge(
    path: str | Path, durability: Durability, acknowledged: dict[str, int], rounds: int = 1
) -> list[str]:
    """Every rule that this ledger breaks once it is opened."""
    try:
        with xl.open(path, durability=durability) as engine:
            broken = list(engine.verify().problems)
            for name, count in acknowledged.items():
                broken += judge_topic(engine, name, count, rounds)
            return broken + [f"at last: {problem}" for problem in engine.verify().problems]
    except xl.ExclusiveLogError as error:
        return [f"H1: {type(error).__name__}: {error}"]
