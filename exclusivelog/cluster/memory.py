"""Ordered logs in memory, a place for them, and an unreliable log for tests.

For tests and examples.

`MemoryLog` keeps its records in a list. `UnreliableLog` gives each writer a connection of its own
to a `MemoryLog`, and delays, reorders, doubles and loses appends and their answers, as backends do.
It decides at random, or a test calls `deliver` and `lose`.

>>> log = MemoryLog()
>>> log.append(b"a")
>>> log.append(b"b")
>>> tail = log.tail(log.first())
>>> tail.next(timeout=0).data
b'b'
>>> tail.next(timeout=0) is None
True
>>> one, other = MemoryPlace.named("example"), MemoryPlace.named("example")
>>> one.open("orders").append(b"record")
>>> other.topics(), other.open("orders").end() == one.open("orders").end()
(['orders'], True)
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from exclusivelog import _core
from exclusivelog.cluster.frames import MAX_BYTES
from exclusivelog.cluster.ordered import (
    Answer,
    Answered,
    OrderedLog,
    Position,
    Record,
    Tail,
    ignore,
)
from exclusivelog.errors import EngineClosedError, LedgerIOError, OffsetTrimmedError
from exclusivelog.types import EngineInfo
from exclusivelog.waits import wait_for

__all__ = ["Chances", "MemoryLog", "MemoryPlace", "UnreliableLog"]


def _position(number: int) -> Position:
    return Position(number.to_bytes(8, "big"))


class MemoryLog:
    """A totally ordered log in this process, for any number of threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._records: list[bytes] = []
        self._trimmed = 0  # records that were removed
        self._changed = threading.Condition()
        self._closed = False

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        """Append a record; the answer comes at once."""
        if len(data) > self.max_bytes:
            raise ValueError(f"data has {len(data)} bytes; this log takes {self.max_bytes}")
        with self._changed:
            self._check_open()
            self._records.append(data)
            position = _position(self._trimmed + len(self._records))
            self._changed.notify_all()
        answered(Answer(True, position))

    def tail(self, after: Position | None = None) -> Tail:
        """Read the records after this position; None: from the first record on."""
        with self._changed:
            self._check_open()
            number = self._trimmed if after is None else int.from_bytes(after, "big")
        return _MemoryTail(self, number)

    def end(self) -> Position | None:
        """The position of the last record; None for an empty log."""
        with self._changed:
            self._check_open()
            return _position(self._trimmed + len(self._records)) if self._records else None

    def first(self) -> Position | None:
        """The position of the first record that is still kept; None for an empty log."""
        with self._changed:
            self._check_open()
            return _position(self._trimmed + 1) if self._records else None

    def last(self) -> Record | None:
        """The last record; None for an empty log."""
        with self._changed:
            self._check_open()
            end = self._trimmed + len(self._records)
            return Record(_position(end), self._records[-1]) if self._records else None

    def follows(self, position: Position, last: Position) -> bool:
        """Does `position` directly follow `last`?"""
        return int.from_bytes(position, "big") == int.from_bytes(last, "big") + 1

    @property
    def was_written(self) -> bool:
        """Has it had records?"""
        with self._changed:
            return bool(self._trimmed or self._records)

    def trim(self, count: int) -> None:
        """Remove the first records, as retention does."""
        with self._changed:
            self._trimmed += len(self._records[:count])
            del self._records[:count]

    def close(self) -> None:
        """Close the log, and end waiting calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this log is closed")

    def read(self, number: int, timeout: float | None, closed: Callable[[], bool]) -> Record | None:
        """The record after this one; for tails."""
        with self._changed:
            wait_for(
                self._changed,
                lambda: closed() or self._closed or number < self._trimmed + len(self._records),
                timeout,
            )
            if closed():
                raise EngineClosedError("this tail is closed")
            self._check_open()
            if number < self._trimmed:
                raise OffsetTrimmedError(
                    f"the records after position {number} were removed, up to {self._trimmed}"
                )
            index = number - self._trimmed
            if index >= len(self._records):
                return None
            return Record(_position(number + 1), self._records[index])

    def wake(self) -> None:
        """Let waiting tails check whether they were closed."""
        with self._changed:
            self._changed.notify_all()


class _MemoryTail:
    def __init__(self, log: MemoryLog, number: int) -> None:
        self._log = log
        self._number = number
        self._closed = False

    def next(self, timeout: float | None = None) -> Record | None:
        record = self._log.read(self._number, timeout, lambda: self._closed)
        if record is not None:
            self._number = int.from_bytes(record.position, "big")
        return record

    def close(self) -> None:
        self._closed = True
        self._log.wake()


# ---- adversity ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Chances:
    """The probabilities (0 to 1) that an append is lost, doubled or delayed, and its answer lost or
    doubled. A delayed append waits until a later append or `deliver` lets it in."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    answer_lost: float = 0.0
    answer_doubled: float = 0.0


@dataclass(frozen=True, slots=True)
class _Append:
    data: bytes
    answered: Answered


class UnreliableLog:
    """One writer's unreliable connection to a log. Reads are reliable.

    `under_way` has the delayed appends. They stay there after their writer has ended, as on a stale
    connection."""

    def __init__(
        self, log: OrderedLog, chances: Chances = Chances(), dice: random.Random | None = None
    ) -> None:
        self.max_bytes = log.max_bytes
        self.under_way: list[_Append] = []
        self._log = log
        self._chances = chances
        self._dice = random.Random() if dice is None else dice
        self._lock = threading.Lock()

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        """Append a record never, once or twice, now or later."""
        with self._lock:
            append = _Append(data, answered)
            due: list[_Append] = []
            if self._happens(self._chances.lost):
                answered(Answer(None, error=LedgerIOError("the append was lost")))
            elif self._happens(self._chances.delayed):
                self.under_way.append(append)
            else:
                late = [each for each in self.under_way if self._happens(0.5)]
                self.under_way = [each for each in self.under_way if each not in late]
                due = [append, *late]
                self._dice.shuffle(due)
        for each in due:
            self._let_in(each)

    def _happens(self, chance: float) -> bool:
        return self._dice.random() < chance

    def _let_in(self, append: _Append) -> None:
        answers: list[Answer] = []
        for _ in range(1 + self._happens(self._chances.doubled)):
            self._log.append(append.data, answers.append)
        if self._happens(self._chances.answer_lost):
            answers = [Answer(None, error=LedgerIOError("the answer was lost"))]
        elif not self._happens(self._chances.answer_doubled):
            answers = answers[:1]
        for answer in answers:
            append.answered(answer)

    def deliver(self, number: int = 0) -> None:
        """Let a delayed append in."""
        with self._lock:
            append = self.under_way.pop(number)
        self._let_in(append)

    def lose(self, number: int = 0) -> None:
        """Lose a delayed append for good, without an answer."""
        with self._lock:
            self.under_way.pop(number)

    def tail(self, after: Position | None = None) -> Tail:
        """Read the records after this position."""
        return self._log.tail(after)

    def end(self) -> Position | None:
        """The position of the last record."""
        return self._log.end()

    def first(self) -> Position | None:
        """The position of the first record."""
        return self._log.first()

    def last(self) -> Record | None:
        """The last record."""
        return self._log.last()

    def follows(self, position: Position, last: Position) -> bool:
        """Does `position` directly follow `last`?"""
        return self._log.follows(position, last)

    def close(self) -> None:
        """Disconnect. Delayed appends may still come."""


# ---- places -------------------------------------------------------------------------------


class _Shared:
    """The state that all engines of one name share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.logs: dict[str, MemoryLog] = {}
        self.engines: dict[str, tuple[EngineInfo, float]] = {}


class _Link:
    """One engine's connection to a log in memory: closing it leaves the log to others."""

    def __init__(self, log: MemoryLog) -> None:
        self.max_bytes = log.max_bytes
        self._log = log
        self._closed = False

    def _check(self) -> None:
        if self._closed:
            raise EngineClosedError("this log is closed")

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        """Append a record."""
        self._check()
        self._log.append(data, answered)

    def tail(self, after: Position | None = None) -> Tail:
        """Read the records after this position."""
        self._check()
        return self._log.tail(after)

    def end(self) -> Position | None:
        """The position of the last record."""
        self._check()
        return self._log.end()

    def first(self) -> Position | None:
        """The position of the first record."""
        self._check()
        return self._log.first()

    def last(self) -> Record | None:
        """The last record."""
        self._check()
        return self._log.last()

    def follows(self, position: Position, last: Position) -> bool:
        """Does `position` directly follow `last`?"""
        return self._log.follows(position, last)

    def close(self) -> None:
        """Disconnect."""
        self._closed = True


class MemoryPlace:
    """Logs in this process's memory, for all engines that open the same name, until the process
    ends."""

    _all: ClassVar[dict[str, _Shared]] = {}

    def __init__(self, name: str, shared: _Shared) -> None:
        self.url = f"memory://{name}"
        self._shared = shared
        self._engine = ""

    @classmethod
    def named(cls, name: str) -> MemoryPlace:
        """The place of that name, created if it is missing."""
        return cls(name, cls._all.setdefault(name, _Shared()))

    def topics(self) -> list[str]:
        """The names of the topics, sorted."""
        with self._shared.lock:
            return sorted(self._shared.logs)

    def has(self, topic: str) -> bool:
        """Is there a topic of that name?"""
        with self._shared.lock:
            return topic in self._shared.logs

    def open(self, topic: str) -> OrderedLog:
        """The log of a topic, created if it is missing."""
        with self._shared.lock:
            return _Link(self._shared.logs.setdefault(topic, MemoryLog()))

    def was_written(self, topic: str) -> bool:
        """Has the topic had records?"""
        with self._shared.lock:
            log = self._shared.logs.get(topic)
            return log is not None and log.was_written

    def note_written(self, topic: str) -> None:
        """No effect: a log knows how many of its records were removed."""

    def join(self, engine: EngineInfo) -> None:
        """Register a live engine, until `close`."""
        self._engine = engine.id
        with self._shared.lock:
            self._shared.engines[engine.id] = engine, _core.monotonic()

    def lives(self, engine: str, patient: bool = True) -> bool:
        """Does the engine of that id live?"""
        return engine in self._shared.engines

    def engines(self) -> list[EngineInfo]:
        """The live engines."""
        with self._shared.lock:
            return [info for info, _ in self._shared.engines.values()]

    def close(self) -> None:
        """Unregister the engine."""
        with self._shared.lock:
            self._shared.engines.pop(self._engine, None)

    def forget(self) -> None:
        """Drop the engine in a forked child."""
        self._shared = _Shared()
