"""Cursors: a position in one topic, and reading on from it in the view, the tables and the journal.

A message lies in up to three places, and a cursor reads them in this order:

1. the topic's compacted view, for offsets below the cursor's horizon (rule G7);
2. the end of the journal, once the cursor has read the tables up to there: no LMDB transaction;
3. the tables with the journal's frames on top, as one snapshot.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from exclusivelog import _core
from exclusivelog.errors import EngineClosedError, OffsetTrimmedError, TopicNotFoundError
from exclusivelog.local.faults import retry_damaged
from exclusivelog.local.log.entries import (
    READ_BYTES,
    check_place,
    damaged_block,
    offset_at_time,
    read_entries,
    read_entry,
    view_entries,
)
from exclusivelog.local.storage.compression import naming
from exclusivelog.local.storage.tables import Store, Tables
from exclusivelog.messages import to_ms
from exclusivelog.waits import READER_LOOK_UP_SECONDS

Found = TypeVar("Found")

# After a wait that was no longer than this, the next wait spins first. For messages that come
# less often, spinning would cost the writer more than the reader gains.
BUSY_SECONDS = 80e-6
MIN_READ_AHEAD = 64 << 10  # bytes, from the second read at a position on


class Host(Protocol):
    """What a cursor needs of the engine that opened it."""

    unflushed: bool  # its readers see messages before they are flushed (rule H1)
    closed: bool
    forked: bool

    @property
    def ledger(self) -> Store:
        """Where the log is kept."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def inspect(self, find: Callable[[Tables], Found]) -> Found:
        """What `find` finds in all that the engine's readers may see (rule G6)."""


class Membership(Protocol):
    """A reader's place in its group."""

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come."""


class JournalTail:
    """One topic's frames at the end of the journal, behind what a cursor has read."""

    def __init__(self, host: Host, topic: int, loads: _core.Deserializer | None) -> None:
        self._host = host
        self._topic = topic
        self._loads = loads
        self._version = 0  # of the journal when the tables were read,
        self._read_at = 0.0  # and when that was
        self.forget()

    def forget(self) -> None:
        """The position has changed: the next read is one of the tables."""
        self._scanned = 0, 0  # (generation, position): earlier frames have been read

    def since(self, tables: Tables) -> int:
        """The position in the journal up to which its frames have been read."""
        generation, position = self._scanned
        return position if generation == tables.journal.generation else 0

    @property
    def version(self) -> int:
        """Changes with whatever is written into the tables besides checkpoints."""
        journal = self._host.ledger.journal
        return 0 if journal is None else journal.version

    def note_read(self, version: int) -> None:
        """The tables were read, after the journal had this version."""
        self._version, self._read_at = version, time.monotonic()

    @property
    def is_current(self) -> bool:
        """Has nobody deleted or trimmed the topic since the tables were read? Both change the
        version. Look again before long: a process may have died between its commit and that."""
        journal = self._host.ledger.journal
        return (
            journal is not None
            and journal.version == self._version
            and bool(journal.ready)
            and time.monotonic() - self._read_at < READER_LOOK_UP_SECONDS / 2
        )

    def continue_behind(self, tables: Tables) -> None:
        """Everything in this snapshot has been read."""
        self._scanned = tables.journal.generation, tables.entries.scanned

    def read(self, position: int, most_bytes: int) -> list[_core.Entry] | None:
        """The entries from the offset `position` on; None: read the tables."""
        ledger, (generation, since) = self._host.ledger, self._scanned
        journal = ledger.journal
        if journal is None or not generation or not journal.ready or journal.failed:
            return None
        if journal.version != self._version:
            return None
        visible = journal.tail if self._host.unflushed else journal.synced
        if since >= visible:
            # A process that died between its commit and the news of it leaves no trace here.
            recently = time.monotonic() - self._read_at < READER_LOOK_UP_SECONDS / 2
            return [] if recently else None
        found: list[_core.Entry] = []
        try:
            for last, data, reached in journal.collect(
                self._topic, position, since, visible, generation, most_bytes, packed=True
            ):
                entry = _core.Entry(data, self._loads)
                check_place(entry, self._topic, last, position)
                found.append(entry)
                position, since = last + 1, reached
        except (ValueError, _core.JournalOverwritten):
            if not found:
                return None  # the tables have it, or name the damage
        self._scanned = generation, since if found else visible
        return found


class LogCursor(_core.Cursor):
    """A position in one topic; see `exclusivelog.backend.Cursor`."""

    def __init__(
        self, host: Host, topic: int, name: str, loads: _core.Deserializer | None, compacted: bool,
        skip_trimmed: bool,
    ) -> None:  # fmt: skip
        self.topic_id = topic
        self.topic = name
        self.closed = False
        self.membership: Membership | None = None
        self._host = host
        self._check_open = host.check_open  # looked up once: `check` runs for every message
        self._loads = loads
        self._compacted = compacted
        self._skip_trimmed = skip_trimmed
        self._horizon = 0  # lower offsets are read from the compacted view
        self._tail = JournalTail(host, topic, loads)
        self._open = host.ledger.segments.open_entries()
        self._first_offset = 0  # of the topic, when the tables were read
        self._found_at = -1  # the journal's version when `seek` last found the topic
        self._read_to = 0
        self._known_end = 0  # the topic's end when it was last read
        self._ahead = 1
        self._busy_until = 0.0
        self.word = host.ledger.lockfile.counters.place(topic)

    @property
    def ledger(self) -> Store:
        """Where it reads."""
        return self._host.ledger

    def check(self) -> None:
        """EngineClosedError or ReaderFencedError unless it can be used."""
        self._check_open()
        if self.closed:
            raise EngineClosedError(
                f"this reader of topic {self.topic!r} is closed; open a new one"
            )
        if self.membership is not None:
            self.membership.check()

    # ---- the position --------------------------------------------------------------------

    def seek(self, start: str | int | dt.datetime, inclusive: bool) -> None:
        """Continue at "earliest", "latest", an offset from 0 on, or a datetime (naive: local)."""
        journal = self._host.ledger.journal
        version = -1 if journal is None or journal.failed else journal.version
        if version != self._found_at or version < 0 or type(start) is not int or self._compacted:
            position = self._inspect(lambda tables: self._find(tables, start, inclusive))
            self._found_at = version
        else:  # nobody has deleted the topic since, and the next read looks for the offset
            position = _offset(start, inclusive)
        self.move_to(position)

    def _inspect(self, find: Callable[[Tables], Found]) -> Found:
        with naming(self.topic):
            return retry_damaged(lambda: self._host.inspect(find))

    def _find(self, tables: Tables, start: str | int | dt.datetime, inclusive: bool) -> int:
        row = _existing(tables.latest(self.topic_id))
        if self._compacted:
            view = tables.views.view(self.topic_id)
            self._horizon = 0 if view is None else view.horizon
        if start == "earliest":
            return 0 if self._horizon else row.first_offset
        if start == "latest":
            return row.next_offset
        if isinstance(start, dt.datetime):
            offset = offset_at_time(tables, row, to_ms(start) + (0 if inclusive else 1))
            # The first message of the topic since then may be preceded by some in its view.
            return 0 if self._horizon and offset == row.first_offset else offset
        return _offset(start, inclusive)

    def move_to(self, position: int) -> None:
        """Continue at this offset; drops what was read ahead."""
        self._tail.forget()
        self._read_to = 0
        self._ahead = 1  # one entry: perhaps only one message is wanted
        super().move_to(position)

    # ---- the end -------------------------------------------------------------------------

    def has_more(self) -> bool:
        """Is there a message at or behind the position (rule G5)?"""
        return self._host.inspect(self._has_more)

    def _has_more(self, tables: Tables) -> bool:
        row = _existing(tables.latest(self.topic_id, self._tail.since(tables)))
        end = self._known_end = max(row.next_offset, self._read_to)
        horizon = self._horizon_over(tables, row)
        if end > max(self.position, horizon, row.first_offset):
            return True
        return self.position < horizon and bool(
            view_entries(tables, self.topic_id, self.position, horizon, None, 1)
        )

    def _horizon_over(self, tables: Tables, row: _core.TopicRow) -> int:
        """The offset below which the compacted view is read: the view's horizon when the reader
        began and, if trimmed offsets are skipped, what has been trimmed since. No more: above it
        the topic still has messages that a later view lacks (rule G7)."""
        overtaken = max(self.position, self._horizon) < row.first_offset
        if not (self._compacted and overtaken and self._skip_trimmed):
            return self._horizon
        view = tables.views.view(self.topic_id)
        return self._horizon if view is None else min(view.horizon, row.first_offset)

    def end(self) -> int:
        """The topic's end as it is now."""

        def find(tables: Tables) -> int:
            row = tables.latest(self.topic_id, self._tail.since(tables))
            return _existing(row).next_offset

        self._known_end = max(self._host.inspect(find), self._read_to)
        return self._known_end

    def is_over(self) -> bool:
        """Is this the end of a terminated topic?"""
        with self._host.ledger.read() as tables:
            row = _existing(tables.topics.get(self.topic_id))
            return bool(row.flags & _core.TERMINATED) and self.position >= row.next_offset

    def mark(self) -> int:
        """A number that changes with every append to the topic, for `wait`."""
        found: int = self._host.ledger.lockfile.atomics.load(self.word)
        return found

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or about so many seconds have passed; spins
        first while messages come in quick succession."""
        began = time.monotonic()
        spin = began < self._busy_until
        self._host.ledger.lockfile.counters.wait(self.word, seen, seconds, spin=spin)
        woken = time.monotonic()
        if woken - began < BUSY_SECONDS:
            self._busy_until = woken + BUSY_SECONDS

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`, without spinning; any thread may call it while another one reads."""
        self._host.check_open()
        self._host.ledger.lockfile.counters.wait(self.word, seen, seconds, spin=False)

    # ---- entries -------------------------------------------------------------------------

    def refill(self) -> list[_core.Entry]:
        """The next entries; the compiled base class calls it when it has none left."""
        self.check()
        if self.position < self._horizon:
            view = self._inspect(self._read_view)
            if view:
                return view
            self.move_to(self._horizon)
        if self._ahead == 1 and self.position >= self._first_offset and self._tail.is_current:
            entry = self._open.holding(self.position)
            if entry is not None:
                self._host.ledger.check()
                self._read_further(entry)
                return [entry]
        found = self._tail.read(self.position, self._ahead)
        if found:
            self._read_to = found[-1].end
        # Between a commit and the news of it, the tables may have what the journal does not show.
        if found or (found is not None and self.position >= self._known_end):
            return found
        version = self._tail.version
        found = self._inspect(self._read_on)
        self._tail.note_read(version)
        return found

    def _read_view(self, tables: Tables) -> list[_core.Entry]:
        _existing(tables.topics.get(self.topic_id))
        found = view_entries(
            tables, self.topic_id, self.position, self._horizon, self._loads, self._ahead
        )
        self._ahead = min(READ_BYTES, max(MIN_READ_AHEAD, 8 * self._ahead))
        return found

    def _read_on(self, tables: Tables) -> list[_core.Entry]:
        row = _existing(tables.topics.get(self.topic_id))
        if self.position < row.first_offset and self._skip_trimmed:
            self._horizon = self._horizon_over(tables, row)
            if self.position < self._horizon and (found := self._read_view(tables)):
                return found
            self.move_to(row.first_offset)
        if self.position < row.first_offset:
            raise OffsetTrimmedError(
                f"topic {self.topic!r} begins at offset {row.first_offset}; {self.position} "
                'was trimmed. seek("earliest") continues at the first message that is left'
            )
        one = None
        if self._ahead == 1:
            one = read_entry(tables, row, self.position, self._loads, self._open)
        found = [one] if one is not None else read_entries(
            tables, row, self.position, self._loads, most_bytes=self._ahead,
            since=self._tail.since(tables), packed=True,
        )  # fmt: skip
        self._first_offset = row.first_offset
        self._read_further(found[-1] if found else None)
        if tables.entries.scanned and max(self.position, self._read_to) >= row.next_offset:
            self._tail.continue_behind(tables)
        return found

    def _read_further(self, last: _core.Entry | None) -> None:
        self._ahead = min(READ_BYTES, max(MIN_READ_AHEAD, 8 * self._ahead))
        if last is not None:
            self._read_to = last.end

    def refuse(self, start: int, stop: int, damage: str | None) -> None:
        """Raise the error for messages that a damaged block costs; the compiled base class calls it
        when it meets one."""
        where = ""
        if damage is not None:
            where = self._inspect(lambda tables: tables.entries.where(self.topic_id, start))
        raise damaged_block(self.topic, range(start, stop), damage, where)

    def close(self) -> bool:
        """End reading, and wake a thread that waits; False if that was done before, or its engine
        is gone."""
        if self.closed:
            return False
        self.closed = True
        self.move_to(self.position)
        self._open.clear()
        if self._host.closed or self._host.forked:
            return False
        self._host.ledger.lockfile.counters.announce(self.topic_id)
        return True


def _offset(start: object, inclusive: bool) -> int:
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < 2**63:
        return start if inclusive else start + 1
    raise ValueError(
        f"start={start!r}: it takes 'earliest', 'latest', an offset, -n for the last n messages, a "
        "datetime or a timedelta"
    )


def _existing(row: _core.TopicRow) -> _core.TopicRow:
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    return row
