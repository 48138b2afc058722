"""The kinds of a place's topics: messages, map or state.

They are kept in a log of their own, `__kinds__`, in which the first record about a topic counts.

>>> from exclusivelog.cluster.memory import MemoryLog
>>> log = MemoryLog()
>>> kinds = Kinds(lambda: log)
>>> kinds.check("settings", {"holds": "map", "key": "str"})
False
>>> kinds.record("settings", {"holds": "map", "key": "str"})
>>> kinds.of("settings"), kinds.check("settings", {"holds": "map"})
({'holds': 'map', 'key': 'str'}, True)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgpack

from exclusivelog import _core
from exclusivelog.backend import Kind
from exclusivelog.cluster.frames import sealed, unsealed
from exclusivelog.cluster.ordered import OrderedLog, Tail
from exclusivelog.errors import LedgerIOError, StateError

__all__ = ["TOPIC", "Kinds"]

TOPIC = "__kinds__"
MAGIC = b"XLK"
VERSION = 1
ANSWER_SECONDS = 60.0
RESEND_SECONDS = 1.0


class Kinds:
    """The log of kinds, which every call reads to its end. `open_log` opens it at the first
    call."""

    def __init__(self, open_log: Callable[[], OrderedLog]) -> None:
        self._open_log = open_log
        self._lock = threading.Lock()
        self._log: OrderedLog | None = None
        self._tail: Tail | None = None
        self._position: bytes = b""
        self._found: dict[str, dict[str, str | None]] = {}

    def of(self, topic: str) -> Kind:
        """The kind recorded for a topic; empty if there is none."""
        with self._lock:
            self._read()
            return dict(self._found.get(topic, {}))

    def check(self, topic: str, kind: Kind) -> bool:
        """Is it recorded that the topic holds this? False if nothing is recorded; StateError if it
        holds something else."""
        held = self.of(topic)
        if any(value and (held.get(field) or value) != value for field, value in kind.items()):
            raise StateError(
                f"topic {topic!r} holds {_described(held)}; it cannot be opened as "
                f"{_described(kind)}"
            )
        return bool(held)

    def record(self, topic: str, kind: Kind) -> None:
        """Record what a topic holds, unless that is recorded; StateError if it holds something
        else."""
        deadline, due = _core.monotonic() + ANSWER_SECONDS, 0.0
        while not self.check(topic, kind):
            if _core.monotonic() > deadline:
                raise LedgerIOError(
                    f"topic {topic!r}: what it holds could not be recorded within "
                    f"{ANSWER_SECONDS} s"
                )
            if _core.monotonic() >= due and self._log is not None:
                self._log.append(_encode(topic, kind))
                due = _core.monotonic() + RESEND_SECONDS
            time.sleep(0.001)

    def _read(self) -> None:
        """Read the log up to its current end."""
        if self._log is None:
            self._log = self._open_log()
            self._tail = self._log.tail()
        assert self._tail is not None
        end, deadline = self._log.end(), _core.monotonic() + ANSWER_SECONDS
        while end is not None and self._position < end:
            record = self._tail.next(1.0)
            if record is not None:
                self._position = record.position
                self._take(record.data)
            elif _core.monotonic() > deadline:
                raise LedgerIOError(f"{TOPIC} could not be read within {ANSWER_SECONDS} s")

    def _take(self, data: bytes) -> None:
        body = unsealed(MAGIC, VERSION, data)
        if body is not None:
            topic, kind = msgpack.unpackb(body)
            self._found.setdefault(topic, kind)

    def close(self) -> None:
        """Close the log."""
        if self._tail is not None:
            self._tail.close()
        if self._log is not None:
            self._log.close()


def _encode(topic: str, kind: Kind) -> bytes:
    body: bytes = msgpack.packb([topic, dict(kind)])
    return sealed(MAGIC, VERSION, body)


def _described(kind: Kind) -> str:
    codecs = ", ".join(f"{name}={value}" for name, value in kind.items() if name != "holds")
    return f"a {kind['holds']}" + (f" ({codecs})" if codecs else "")
