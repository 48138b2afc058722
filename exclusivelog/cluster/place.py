"""Where an engine on a cluster finds its topics' logs, and the other engines.

A *place* is a namespace of Apache Pulsar, or a name in this process's memory (`MemoryPlace`), for
tests and examples. It keeps one ordered log for each topic, and knows which engines live. Only
order, time and inspections depend on who lives, never safety: a place may be wrong about it.

>>> a, b = MemoryPlace.named("example"), MemoryPlace.named("example")
>>> a.open("orders").append(b"record")
>>> b.topics(), b.open("orders").end() == a.open("orders").end()
(['orders'], True)
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar, Protocol

from exclusivelog.cluster.memory import MemoryLog
from exclusivelog.cluster.ordered import Answered, OrderedLog, Position, Record, Tail, ignore
from exclusivelog.errors import ClusterError, EngineClosedError
from exclusivelog.types import EngineInfo

__all__ = ["MemoryPlace", "Place", "is_known"]


class Place(Protocol):
    """A namespace, as one engine has it open. All calls may come from any thread."""

    url: str  # without secrets

    def topics(self) -> list[str]:
        """The names of the topics, sorted."""
        ...

    def has(self, topic: str) -> bool:
        """Is there a topic of that name?"""
        ...

    def open(self, topic: str) -> OrderedLog:
        """The log of a topic, which is made if there is none."""
        ...

    def join(self, engine: EngineInfo) -> None:
        """This engine lives from now on, until `close`, or the end of its process."""
        ...

    def lives(self, engine: str) -> bool:
        """Does the engine of that id live?"""
        ...

    def engines(self) -> list[EngineInfo]:
        """The engines that live."""
        ...

    def close(self) -> None:
        """Leave, and release connections."""
        ...

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        ...


def is_known(place: Place, topic: str) -> bool:
    """Has the place told that it has this topic? False, too, where it cannot be asked."""
    try:
        return place.has(topic)
    except ClusterError:  # the admin API cannot be reached
        return False


# ---- in memory ---------------------------------------------------------------------------


class _Shared:
    """What the engines of one name have in common."""

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
        """Is `position` that of the record directly behind the one at `last`?"""
        return self._log.follows(position, last)

    def close(self) -> None:
        """Disconnect."""
        self._closed = True


class MemoryPlace:
    """Logs in this process's memory, for all engines that open the same name. They are gone with
    the process."""

    _all: ClassVar[dict[str, _Shared]] = {}

    def __init__(self, name: str, shared: _Shared) -> None:
        self.url = f"memory://{name}"
        self._shared = shared
        self._engine = ""

    @classmethod
    def named(cls, name: str) -> MemoryPlace:
        """The place of that name, made if there is none."""
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
        """The log of a topic, which is made if there is none."""
        with self._shared.lock:
            return _Link(self._shared.logs.setdefault(topic, MemoryLog()))

    def join(self, engine: EngineInfo) -> None:
        """This engine lives from now on, until `close`."""
        self._engine = engine.id
        with self._shared.lock:
            self._shared.engines[engine.id] = engine, time.monotonic()

    def lives(self, engine: str) -> bool:
        """Does the engine of that id live?"""
        return engine in self._shared.engines

    def engines(self) -> list[EngineInfo]:
        """The engines that live."""
        with self._shared.lock:
            return [info for info, _ in self._shared.engines.values()]

    def close(self) -> None:
        """Leave."""
        with self._shared.lock:
            self._shared.engines.pop(self._engine, None)

    def forget(self) -> None:
        """In a forked child."""
        self._shared = _Shared()
