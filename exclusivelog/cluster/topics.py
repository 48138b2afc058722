"""The logs of topics that one engine follows."""

from __future__ import annotations

import hashlib
import threading
from typing import Protocol

from exclusivelog.cluster import checkpoints
from exclusivelog.cluster.following import Host as FollowingHost
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.place import Place

__all__ = ["Topics"]


def id_of(name: str) -> int:
    """The id of the topic of that name; the processes of one Spark query agree on it.

    >>> id_of("orders") == id_of("orders") != id_of("bills"), id_of("orders").bit_length() < 63
    (True, True)
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2


class Host(FollowingHost, Protocol):
    """The engine."""

    @property
    def place(self) -> Place:
        """Where the topics are."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""


class Topics:
    """Numbers topics, and follows those that are used."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._followed: dict[int, TopicLog] = {}

    def number_of(self, name: str) -> int:
        """The id of a topic: the same in all engines."""
        with self._lock:
            return self._numbers.setdefault(name, id_of(name))

    def named(self, name: str) -> TopicLog:
        """The log of the topic of that name, followed from now on."""
        return self.followed(self.number_of(name))

    def followed(self, number: int) -> TopicLog:
        """The topic's log, followed from now on."""
        found = self._followed.get(number)
        if found is not None:
            return found
        with self._lock:
            self._host.check_open()
            found = self._followed.get(number)
            if found is None:
                name = next(name for name, each in self._numbers.items() if each == number)
                log = self._host.place.open(name)
                checkpoint = checkpoints.load(self._host.place, name, log)
                found = TopicLog(self._host, name, number, log, checkpoint)
                self._followed[number] = found
            return found

    def all(self) -> list[TopicLog]:
        """Those that are followed."""
        with self._lock:
            return list(self._followed.values())

    def close(self) -> None:
        """End all."""
        for each in self.all():
            each.close()

    def forget(self) -> None:
        """In a forked child: all of them are the parent's."""
        for each in list(self._followed.values()):
            each.forget()
