"""One engine's part in a topic's queue: its records of those who wait, until they are read back.

The records and what they add up to are in `exclusivelog.cluster.waiting`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from exclusivelog.cluster.waiting import Assign, Leave, Noted, Unassign, Wait, Waiters, encode

__all__ = ["Queue"]


Told = Wait | Assign | Unassign


class Host(Protocol):
    """The engine."""

    id: str

    def waits_here(self, number: int) -> bool:
        """Is this a waiter of this engine?"""


class Queue:
    """See the module's text. Its topic serialises all calls."""

    def __init__(self, host: Host, append: Callable[[bytes], object]) -> None:
        self.waiters = Waiters()
        self._host, self._append = host, append
        self._unread: dict[tuple[type, int], bytes] = {}  # records that were not read back yet

    def tell(self, record: Told) -> None:
        """Append a record; the log shows it once it `is_told`."""
        data = self._unread[type(record), record.number] = encode(record)
        self._append(data)

    def is_told(self, record: Told) -> bool:
        """Was this record read back?"""
        return (type(record), record.number) not in self._unread

    def leave(self, number: int) -> None:
        """This producer waits no more."""
        self._unread.pop((Wait, number), None)
        self._append(encode(Leave((number,))))

    def take(self, record: Noted) -> None:
        """The next record of the log."""
        self.waiters.take(record)
        if not isinstance(record, Leave):
            self._unread.pop((type(record), record.number), None)
        if isinstance(record, Wait):
            self._answer_ghosts()

    def is_wanted(self, name: str) -> bool:
        """Does a producer of another name wait?"""
        return any(each.producer_name != name for each in self.waiters)

    # ---- what was lost -------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Is there a record that should be in the log, and was not read back?"""
        return bool(self._unread or self._ghosts())

    def append_again(self) -> None:
        """Append what was not read back."""
        for data in list(self._unread.values()):
            self._append(data)
        self._answer_ghosts()

    def _answer_ghosts(self) -> None:
        if ghosts := self._ghosts():
            self._append(encode(Leave(ghosts)))

    def _ghosts(self) -> tuple[int, ...]:
        """The waiters of this engine that do not wait any more, though the log says so: their
        records came late, or that of their leaving is not there yet."""
        return tuple(
            each.number
            for each in self.waiters
            if each.engine_id == self._host.id and not self._host.waits_here(each.number)
        )
