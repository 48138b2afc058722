"""Whether a saved state is of this log: a record that it stands on, and what that record is.

A Pulsar topic may be deleted and made anew, restored or copied. What was saved about the former one
must not be used for the new one. So what is saved names a record of the log, and is used only if
the log has that record at that position still.

>>> from exclusivelog.cluster.memory import MemoryLog
>>> log, other = MemoryLog(), MemoryLog()
>>> for number in range(3):
...     log.append(b"%d" % number)
...     other.append(b"x%d" % number)
>>> tail, anchor = log.tail(), Anchor(None, None, 0)
>>> for _ in range(2):
...     anchor = anchor.then(tail.next(0))
>>> holds(log, anchor), holds(other, anchor), holds(MemoryLog(), anchor)
(True, False, False)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from exclusivelog._core import crc32c
from exclusivelog.cluster.ordered import OrderedLog, Position, Record
from exclusivelog.errors import OffsetTrimmedError

__all__ = ["Anchor", "holds"]

READ_SECONDS = 10.0


class Anchor(NamedTuple):
    """A record: its position, that of the one before it, and the CRC-32C of its bytes."""

    before: Position | None
    position: Position | None
    crc: int

    def then(self, record: Record) -> Anchor:
        """The next record."""
        return Anchor(self.position, record.position, crc32c(record.data))

    @classmethod
    def of(cls, row: Any) -> Anchor:
        """From a list of the same; ValueError for anything else."""
        before, position, crc = row
        if type(position) is not bytes or type(crc) is not int:
            raise ValueError("it names no record")
        return cls(before, Position(position), crc)


def holds(log: OrderedLog, anchor: Anchor) -> bool:
    """Has the log this record at this position?"""
    if anchor.position is None:
        return False
    end = log.end()
    if end is None or end < anchor.position:
        return False
    tail = log.tail(anchor.before)
    try:
        record = tail.next(READ_SECONDS)
    except (OffsetTrimmedError, ValueError):  # a position that this log cannot have
        return False
    finally:
        tail.close()
    return record is not None and anchor == Anchor(
        anchor.before, record.position, crc32c(record.data)
    )
