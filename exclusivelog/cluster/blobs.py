"""The newest value of a name, in a log of its own: for values that can be recomputed if lost.

A value is one record, or several if it is large. The last record of the log belongs to the newest
value, unless its writer died or others wrote at the same time: then the whole log is read, which
has only such values. Damaged, incomplete or newer values are ignored: the reader recomputes them
from the topic's own log.

```text
0  3 bytes  magic XLB
3  u8       version, 1
4  u32      CRC-32C of what follows
8           msgpack: [id, number of this part, parts, position before the first part, bytes]
```

>>> from exclusivelog.cluster.memory import MemoryLog
>>> log = MemoryLog(max_bytes=5_000_000)
>>> store(log, b"one"), store(log, bytes(9_000_000)), len(load(log))
(None, None, 9000000)
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgpack

from exclusivelog.cluster.frames import sealed, unsealed
from exclusivelog.cluster.ordered import Answer, OrderedLog, Position
from exclusivelog.errors import LedgerIOError

__all__ = ["load", "store"]

MAGIC = b"XLB"
VERSION = 1
PART_BYTES = 4_000_000
ANSWER_SECONDS = 60.0


class _Part(NamedTuple):
    id: bytes
    number: int
    parts: int
    before: Position | None
    data: bytes


def store(log: OrderedLog, value: bytes) -> None:
    """Append a value, and wait until it is stored. Raises `LedgerIOError` if that is not known."""
    before = log.end()
    name = secrets.token_bytes(8)
    starts = range(0, max(1, len(value)), PART_BYTES)
    for number, start in enumerate(starts):
        part = [name, number, len(starts), before, value[start : start + PART_BYTES]]
        body: bytes = msgpack.packb(part)
        _append(log, sealed(MAGIC, VERSION, body))


def _append(log: OrderedLog, data: bytes) -> None:
    answered, answers = threading.Event(), list[Answer]()

    def note(answer: Answer) -> None:
        answers.append(answer)
        answered.set()

    log.append(data, note)
    if not answered.wait(ANSWER_SECONDS) or not answers[0].stored:
        why = answers[0].error if answers else f"no answer within {ANSWER_SECONDS} s"
        raise LedgerIOError(f"a record beside a topic was not stored: {why}")


def load(log: OrderedLog) -> bytes | None:
    """The newest complete value; None if there is none."""
    last = log.last()
    if last is None:
        return None
    part = _decode(last.data)
    if part is not None and part.parts == 1:
        return part.data
    found = None if part is None else _whole(log, part.before, last.position, part.id)
    return found if found is not None else _whole(log, None, last.position, None)


def _whole(
    log: OrderedLog, after: Position | None, end: Position, wanted: bytes | None
) -> bytes | None:
    """The last complete value, or the one with this id, between these positions."""
    found, open_parts = None, dict[bytes, list[bytes]]()
    for part in _parts(log, after, end):
        there = open_parts.setdefault(part.id, [])
        if wanted in (None, part.id) and part.number == len(there):
            there.append(part.data)
            if len(there) == part.parts:
                found = b"".join(open_parts.pop(part.id))
    return found


def _parts(log: OrderedLog, after: Position | None, end: Position) -> Iterator[_Part]:
    tail = log.tail(after)
    try:
        while (record := tail.next(ANSWER_SECONDS)) is not None:
            part = _decode(record.data)
            if part is not None:
                yield part
            if record.position >= end:
                return
    finally:
        tail.close()


def _decode(data: bytes) -> _Part | None:
    body = unsealed(MAGIC, VERSION, data)
    if body is None:
        return None
    name, number, parts, before, value = msgpack.unpackb(body)
    return _Part(name, number, parts, before, value)
