"""Facts about a place's topics, in a log of their own: the first record about a name counts.

The log begins with a *birth*: a record that no other log has. A log whose first record is another
one has lost its beginning, and with it facts: then every call raises `LedgerCorruptedError`. So it
is if the log is empty although the place says that it was written.

>>> from exclusivelog.cluster.memory import MemoryPlace
>>> facts = Facts(MemoryPlace.named("example of facts"), "__colours__", b"XLC")
>>> facts.of("sky"), facts.record("sky", "blue"), facts.record("sky", "grey"), facts.of("sky")
(None, 'blue', 'blue', 'blue')
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import msgpack

from exclusivelog import _core
from exclusivelog.cluster.frames import sealed, unsealed
from exclusivelog.cluster.ordered import OrderedLog, Place, Position, Record, Tail
from exclusivelog.errors import LedgerCorruptedError, LedgerIOError

__all__ = ["Facts", "is_birth", "lacks_beginning", "make_birth"]

BIRTH_MAGIC = b"XLA"
VERSION = 1
ANSWER_SECONDS = 60.0
RESEND_SECONDS = 1.0


# ---- births ------------------------------------------------------------------------------


def make_birth() -> bytes:
    """The first record of a new log; no two are the same.

    >>> is_birth(make_birth()), is_birth(b"another program's"), make_birth() == make_birth()
    (True, False, False)
    """
    return sealed(BIRTH_MAGIC, VERSION, secrets.token_bytes(16))


def is_birth(data: bytes) -> bool:
    """Is this the first record of a log?"""
    return unsealed(BIRTH_MAGIC, VERSION, data) is not None


def lacks_beginning(topic: str, why: str) -> LedgerCorruptedError:
    """The error for a topic whose first records were removed, and with them grants.

    >>> print(str(lacks_beginning("orders", "it is empty")).partition(". ")[0])
    topic 'orders' lacks its beginning: it is empty
    """
    return LedgerCorruptedError(
        f"topic {topic!r} lacks its beginning: {why}. Retention, truncation or deletion has "
        "removed records, and a new owner could be a second one. Use another topic; engines that "
        "follow this one go on",
        topic=topic,
    )


def check_birth(topic: str, first: Record) -> None:
    """LedgerCorruptedError unless the first record of a log of facts is its birth."""
    if not is_birth(first.data):
        raise lacks_beginning(topic, "its first record is none that begins a log")


EMPTIED = "it is empty, and was not"


def was_emptied(place: Place, topic: str, log: OrderedLog) -> bool:
    """Does the place know that this log was written, although it is empty?"""
    # It may be written between the first two questions, for the first time.
    return log.end() is None and place.was_written(topic) and log.end() is None


# ---- the log -----------------------------------------------------------------------------


class Facts:
    """The facts that the log `topic` of a place has. Every call reads it to its end; the first one
    opens it.

    `magic` marks its records: another one than that of every other kind of record."""

    def __init__(self, place: Place, topic: str, magic: bytes) -> None:
        self._place, self._topic, self._magic = place, topic, magic
        self._lock = threading.Lock()
        self._log: OrderedLog | None = None
        self._tail: Tail | None = None
        self._position: Position | None = None
        self._found: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """What is recorded about this name; None if nothing is."""
        with self._lock:
            self._read()
            return self._found.get(name)

    def record(self, name: str, value: Any) -> Any:
        """Record this about a name, unless something is recorded. Returns what counts."""
        with self._lock:
            self._read()
            self._begin()
            body: bytes = msgpack.packb([name, value])
            self._append_until(lambda: name in self._found, sealed(self._magic, VERSION, body))
            return self._found[name]

    def _read(self) -> None:
        """Read the log up to its current end."""
        log, tail = self._open()
        if was_emptied(self._place, self._topic, log):
            raise lacks_beginning(self._topic, EMPTIED)
        end, deadline = log.end(), _core.monotonic() + ANSWER_SECONDS
        if self._position is not None and (end is None or end < self._position):
            raise lacks_beginning(self._topic, "it has fewer records than before")
        while end is not None and (self._position is None or self._position < end):
            record = tail.next(1.0)
            if record is not None:
                self._take(record)
            elif _core.monotonic() > deadline:
                raise LedgerIOError(f"{self._topic} was not read within {ANSWER_SECONDS} s")

    def _open(self) -> tuple[OrderedLog, Tail]:
        if self._log is None:
            self._log = self._place.open(self._topic)
        if self._tail is None:
            self._tail = self._log.tail()
        return self._log, self._tail

    def _take(self, record: Record) -> None:
        if self._position is None:
            try:
                check_birth(self._topic, record)
            except LedgerCorruptedError:
                self._tail = None  # the next call finds the same record
                raise
        self._position = record.position
        body = unsealed(self._magic, VERSION, record.data)
        if body is not None:
            name, value = msgpack.unpackb(body)
            self._found.setdefault(name, value)

    def _begin(self) -> None:
        """Make the log begin, unless it has."""
        if self._position is None:
            self._append_until(lambda: self._position is not None, make_birth())
            self._place.note_written(self._topic)

    def _append_until(self, done: Callable[[], bool], data: bytes) -> None:
        """Append a record, and again if it is not read back, until `done()`."""
        log, tail = self._open()
        deadline, due = _core.monotonic() + ANSWER_SECONDS, 0.0
        while not done():
            if _core.monotonic() > deadline:
                raise LedgerIOError(
                    f"{self._topic}: a record was not read back within {ANSWER_SECONDS} s"
                )
            if _core.monotonic() >= due:
                log.append(data)
                due = _core.monotonic() + RESEND_SECONDS
            record = tail.next(RESEND_SECONDS)
            if record is not None:
                self._take(record)

    def close(self) -> None:
        """Close the log."""
        if self._tail is not None:
            self._tail.close()
        if self._log is not None:
            self._log.close()
