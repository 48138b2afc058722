"""Large entries: the tables refer to them, segments have them.

A row of the table `entries` that stands for a large entry says in which segment it is, and
where (segments.py writes and reads the files). A row of the table `segments` says how much of a
file counts, and how many of its entries live: with the last one the segment goes.
"""

from __future__ import annotations

import contextlib
import logging

from exclusivelog import _core
from exclusivelog.errors import LedgerFullError
from exclusivelog.rows import PAIR, U64, Rows, u64
from exclusivelog.segments import (
    REFERENCE,
    REFERENCE_MAGIC,
    SEGMENT_BYTES,
    Segments,
    is_reference,
    space,
)

log = logging.getLogger("exclusivelog")


class LargeEntries:
    """The large entries, within one transaction.

    `emptied` gathers the segments that can be removed once the transaction is durable.
    """

    __slots__ = ("_grown", "_rows", "_segments", "emptied")

    def __init__(self, rows: Rows, segments: Segments) -> None:
        self._rows = rows
        self._segments = segments
        self._grown: dict[int, int] = {}  # {segment: where it ended before}
        self.emptied: set[int] = set()

    def segments(self) -> dict[int, tuple[int, int]]:
        """{segment: (bytes in use, entries that live)}."""
        return {
            u64(key): self._rows.decode("segments", PAIR.unpack, row)
            for key, row in self._rows.cursor("segments")
        }

    def total_bytes(self) -> int:
        """How long all segments are together."""
        return self._total()[0]

    def load(self, row: bytes) -> bytes | memoryview:
        """The bytes of the entry that a row is, or refers to; ValueError if they are not there."""
        return self._segments.load(row)

    def put(self, entry: bytes) -> bytes:
        """Write an entry into the newest segment; the row that refers to it."""
        segment, end, live = self._newest()
        stop = space(end) + len(entry)
        self._add_to_total(stop - end)
        self._grown.setdefault(segment, end)
        position = self._segments.append(segment, end, entry)
        self._rows.put("segments", U64.pack(segment), PAIR.pack(stop, live + 1))
        return REFERENCE.pack(REFERENCE_MAGIC, segment, position, len(entry))

    def free(self, topic: int, last_offset: int, row: bytes) -> None:
        """An entry of this topic goes; `row` may refer to a segment, or not."""
        if not self._refers_to_its_own(topic, last_offset, row):
            return
        segment = REFERENCE.unpack(row)[1]
        key = U64.pack(segment)
        found = self._rows.find("segments", key, PAIR.unpack)
        if found is None:
            return
        end, live = found
        if live > 1:
            self._rows.put("segments", key, PAIR.pack(end, live - 1))
        else:
            self._rows.delete("segments", key)
            self._add_to_total(-end)
            self.emptied.add(segment)

    def sync(self) -> None:
        """What is in segments must be durable before the rows that refer to it."""
        if self._grown:
            self._segments.sync(max(self._grown))  # one that is full was synced before

    def undo(self) -> None:
        """The transaction is given up."""
        for segment, end in self._grown.items():
            with contextlib.suppress(OSError):  # the next one overwrites it
                self._segments.cut(segment, end)

    def _total(self) -> tuple[int, int]:
        # The limit is the highest that anybody has opened the ledger with, as LMDB's own is.
        total, limit = self._rows.find("meta", b"large", PAIR.unpack) or (0, 0)
        return total, max(limit, self._segments.limit)

    def _add_to_total(self, count: int) -> None:
        total, limit = self._total()
        if count > 0 and total + count > limit:
            raise LedgerFullError(
                f"{self._rows.path}: large entries take {total} bytes of {limit}, another one "
                "does not fit; open the ledger with a larger map_size, or trim it"
            )
        self._rows.put("meta", b"large", PAIR.pack(total + count, limit))

    def _newest(self) -> tuple[int, int, int]:
        cursor = self._rows.cursor("segments")
        if cursor.last():
            end, live = self._rows.decode("segments", PAIR.unpack, cursor.value())
            # Short ones where there is little room: only a whole one gives it back.
            if end < min(SEGMENT_BYTES, self._total()[1] // 8):
                return u64(cursor.key()), end, live
        self.sync()  # it grows no more
        return self._rows.next_id(b"segment"), 0, 0

    def _refers_to_its_own(self, topic: int, last_offset: int, row: bytes) -> bool:
        # A damaged row must not cost another topic its segment: rather some space is lost.
        if not is_reference(row):
            return False
        try:
            if _core.ends_as(self.load(row), topic, last_offset):
                return True
        except ValueError as error:
            log.debug("%s: %s", self._rows.path, error)
        log.warning(
            "%s: a damaged entry of topic %d leaves its space behind", self._rows.path, topic
        )
        return False
