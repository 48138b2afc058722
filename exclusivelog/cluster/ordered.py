"""Protocols of a totally ordered log, and of a place that has one for each topic.

Of a log: five calls, the last record, and the order of positions.

An ordered log is a sequence of records that only grows, in one order that all readers see: a topic
of Apache Pulsar, a partition of Kafka, or a list in memory (`exclusivelog.cluster.memory`). It need
not keep a stale writer out, and may append a record twice or late. `exclusivelog.cluster.rule`
decides which records count.

What `append` promises:

- A record is appended as a whole and unchanged, or not at all.
- `answered` may be called never, once or several times, on any thread, and before `append` returns.
  An answer on another thread may wait for a lock that the caller of `append` holds.
- An answer with `stored=True` means that the record is in the log, at least once.
- An answer with `stored=False` means that this call has not appended it and never will.
- An answer with `stored=None`, a missing answer or a time limit that has passed mean: unknown. The
  record may be in the log, and it may still enter it, once or twice, at any later time.
- Records of one sender need not arrive in the order of their calls.

What a log promises to readers: all tails yield the same records at the same positions, none is left
out, and a record that was stored before `end` was called is at or before the position that `end`
returns. Records at the beginning may be removed (retention); a tail that would skip removed records
raises `OffsetTrimmedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol, runtime_checkable

from exclusivelog.types import EngineInfo

__all__ = [
    "Answer",
    "Answered",
    "Excluding",
    "OrderedLog",
    "Place",
    "Position",
    "Record",
    "Tail",
    "ignore",
]

Position = NewType("Position", bytes)
"""The place of a record. Opaque outside the log that has made it. Positions of one log have one
length, compare as bytes do (big-endian numbers, for example), and can be kept and used again
later."""


class Record(NamedTuple):
    """One record of an ordered log."""

    position: Position
    data: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What a backend says about one `append`; the module's text says what `stored` means.

    `position` is None where the backend does not tell it (Pulsar does not for a duplicate)."""

    stored: bool | None
    position: Position | None = None
    error: Exception | None = None


Answered = Callable[[Answer], None]


def ignore(answer: Answer) -> None:
    """Ignore an answer, as reading the log shows what is in it."""


class Tail(Protocol):
    """Reads a log forward, and waits at its end. For one thread at a time."""

    def next(self, timeout: float | None = None) -> Record | None:
        """The next record; None if `timeout` seconds have passed without one (None: no limit).

        Raises `OffsetTrimmedError` if the records after its position were removed,
        `EngineClosedError` after `close`, and `LedgerIOError` if the backend cannot be read."""
        ...

    def close(self) -> None:
        """Stop reading; a `next` that waits in another thread ends with `EngineClosedError`."""
        ...


class OrderedLog(Protocol):
    """One totally ordered log. All calls may come from any thread.

    `max_bytes` is the largest record that it takes."""

    max_bytes: int

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        """Hand a record over to be appended, without waiting for the backend's answer.

        Raises ValueError for more than `max_bytes` bytes, and `EngineClosedError` after `close`;
        then nothing is appended. The module's text says what an answer means."""
        ...

    def tail(self, after: Position | None = None) -> Tail:
        """Read the records after this position; None: from the first record on."""
        ...

    def end(self) -> Position | None:
        """The position of the last record at this moment; None for an empty log."""
        ...

    def first(self) -> Position | None:
        """The position of the first record that is still kept; None for an empty log."""
        ...

    def last(self) -> Record | None:
        """The last record at this moment; None for an empty log."""
        ...

    def follows(self, position: Position, last: Position) -> bool:
        """Does `position` directly follow `last`? False if unsure."""
        ...

    def close(self) -> None:
        """Release connections. An append without an answer remains unknown."""
        ...


@runtime_checkable
class Excluding(Protocol):
    """An ordered log that can exclude other appenders for a while: an optional part of it.

    A request that fences asks for this once it has lost a race. A log without it lets an owner that
    sends without a pause hold up a take-over, until that ends with `WaitTimeoutError`."""

    def alone(self) -> AbstractContextManager[None]:
        """No other process can append during the block; their appends are in doubt meanwhile. It
        may end early: safety does not depend on it. For one thread at a time."""
        ...


# ---- places ------------------------------------------------------------------------------


class Place(Protocol):
    """A namespace that an engine has open: it has one ordered log for each topic, and knows the
    live engines. All calls may come from any thread.

    It may be wrong about liveness: only order, time and inspections depend on that, not safety."""

    url: str  # without secrets

    def topics(self) -> list[str]:
        """The names of the topics, sorted."""
        ...

    def has(self, topic: str) -> bool:
        """Is there a topic of that name?"""
        ...

    def open(self, topic: str) -> OrderedLog:
        """The log of a topic, created if it is missing."""
        ...

    def was_written(self, topic: str) -> bool:
        """Does the place itself know that the topic has had records, even if it has none now? False
        if unsure: the log `__births__` knows it, too."""
        ...

    def note_written(self, topic: str) -> None:
        """Note that the topic has records, where its removed records leave the note. A place that
        cannot do that ignores it."""
        ...

    def join(self, engine: EngineInfo) -> None:
        """Register a live engine, until `close` or the end of its process."""
        ...

    def lives(self, engine: str, patient: bool = True) -> bool:
        """Does the engine of that id live? Who is not `patient` asks again soon: where it takes
        long to find out, because a process is stopped, the answer is True meanwhile."""
        ...

    def engines(self) -> list[EngineInfo]:
        """The live engines."""
        ...

    def close(self) -> None:
        """Unregister the engine, and close connections."""
        ...

    def forget(self) -> None:
        """Drop everything in a forked child."""
        ...
