"""Appends that were not read back yet, and the log's answers to them.

A tail may get a record long after it was stored: a Pulsar broker polls for new entries every 10 ms.
An answer has the record's position at once. If the log says that this position directly follows the
last one that was read, the record is the next one for every reader, and is used without waiting for
the tail. If not, there may be another record between them, and the tail will deliver both.

>>> answers = Answers(lambda position, last: position[0] == last[0] + 1)
>>> answers.add(Position(bytes([3])), b"three")
>>> answers.next(Position(bytes([1]))) is None
True
>>> answers.add(Position(bytes([2])), b"two")
>>> answers.next(Position(bytes([1]))).data, answers.next(Position(bytes([2]))).data
(b'two', b'three')
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.cluster.ordered import Answer, OrderedLog, Position, Record

__all__ = ["RESEND_SECONDS", "Answers", "Appending"]

RESEND_SECONDS = 1.0  # without progress, before unread records are appended again


class Answers:
    """Records of this process whose positions are known from answers, and which were not read yet.
    For one thread at a time.

    `follows(position, last)`: is there certainly nothing between these?"""

    def __init__(self, follows: Callable[[Position, Position], bool]) -> None:
        self._follows = follows
        self._records: list[Record] = []  # a heap

    def add(self, position: Position, data: bytes) -> None:
        """Add a record that the log has stored at this position."""
        heapq.heappush(self._records, Record(position, data))

    def next(self, last: Position | None) -> Record | None:
        """The record directly after `last`, if it is one of these; drops those that were read."""
        if last is None:
            return None
        while self._records and self._records[0].position <= last:
            heapq.heappop(self._records)
        if self._records and self._follows(self._records[0].position, last):
            return heapq.heappop(self._records)
        return None


class Appending:
    """Appends records to the log, and knows when to append again those that were not read back.

    `stored(position, data)` is called in a thread of the log: it has stored this record there."""

    def __init__(self, log: OrderedLog, stored: Callable[[Position, bytes], None]) -> None:
        self.answers = Answers(log.follows)
        self._log, self._stored = log, stored
        self._calling = 0  # the thread that calls `log.append`
        self.due = float("inf")  # by the monotonic clock

    def append(self, data: bytes) -> None:
        """Append a record: at least once or not at all, as reading the log shows."""
        self.due = min(self.due, _core.monotonic() + RESEND_SECONDS)
        self._calling = threading.get_ident()
        try:
            self._log.append(data, lambda answer: self._answered(data, answer))
        except Exception as error:  # reading back shows whether it is in the log
            self._answered(data, Answer(None, error=error))
        finally:
            self._calling = 0

    def _answered(self, data: bytes, answer: Answer) -> None:
        """Handle an answer; retry soon if it does not say that the record is stored."""
        if not answer.stored:
            self.resend_soon()
        elif answer.position is not None and self._calling != threading.get_ident():
            self._stored(answer.position, data)  # an answer within the call leaves it to the tail

    def resend_soon(self) -> None:
        """Append again soon, because a record was lost."""
        self.due = min(self.due, _core.monotonic() + RESEND_SECONDS / 10)

    def progress(self, unsettled: bool) -> None:
        """Note that a record counts. `unsettled`: are there more to be read back?"""
        self.due = _core.monotonic() + RESEND_SECONDS if unsettled else float("inf")

    def is_due(self) -> bool:
        """Is it time to append again? True only once until the next append."""
        due = _core.monotonic() >= self.due
        if due:
            self.due = float("inf")
        return due

    @property
    def seconds(self) -> float:
        """Seconds until it is due, at most `RESEND_SECONDS`."""
        return max(0.0, min(RESEND_SECONDS, self.due - _core.monotonic()))
