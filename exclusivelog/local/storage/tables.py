"""The ledger's tables: keys, rows, and typed access to them.

Also the fencing check, and its errors.

```text
table      key                                              value
meta       b"format" | b"topic", b"session", b"mail", ...   msgpack | last id given (u64)
           b"journal"                                       generation, position applied, a mark and
                                                            the oldest version behind it (u64)
           b"times", topic id                               time marks (see time_marks.py)
           b"overdue", topic id                             boot id, ns of the machine's monotonic
                                                            clock (see retention.py)
           b"kind", topic id                                msgpack: what state the topic holds
           b"announced", topic id                           msgpack: what its owner announced last
                                                            (see steps.py)
           b"priorities", topic id                          the best and the lowest priority of
                                                            its waiters so far (i64, rule D7)
           b"compression", topic id                         msgpack [setting, offset before which
                                                            entries were compressed again]
           b"dead", segment id                              bytes of entries that do not live (u64)
           b"ended", number                                 topic id, producer name: the library
                                                            gave it, and its session has ended; or
                                                            topic id: deleted, and made again
           b"listed", topic name                            topic id: of topics that exist, if ...
           b"last listed"                                   ... this is the last topic id
           b"announced", topic id                           msgpack of types.Announcement
           b"void", key of a noted row                      the position in the journal before which
                                                            notes of that row do not count (u64)
           b"role ...", ...                                 of roles (see role_rows.py)
names      topic name, UTF-8                                topic id (u64)
topics     topic id                                         topic row (_core.TopicRow)
entries    topic id, last offset of the entry               entry (_core.Entry), or where it is
segments   segment id                                       bytes in use, entries that live (u64)
producers  topic id, producer name                          last sequence id, live session (see
                                                            `ProducerTable`)
holders    topic id, session                                msgpack of records.Session
queue      topic id, order of rule D1, session              msgpack of records.Session
engines    engine id, 0 holder | 1 waiter, session          slot (u16), key in holders or queue
mail       engine id, number                                notification: msgpack [kind, session,
                                                            ...]
trash      topic id                                         pending deletion. Empty: all rows of
                                                            a deleted topic; or an offset: those of
                                                            the entries before it; or (slot,
                                                            engine): a view that is being made
views      topic id                                         id and horizon of its compacted view
snapshots  topic id                                         id of a state's snapshot, and the
                                                            offset that it goes up to
claims     group (with its length in front), resource       last generation, claimant or 0 (u64)
claimants  claim session                                    msgpack of Claimant
           claim session, session                           0 holder | 1 waiter, key in holders or
                                                            queue: a producer bound to the claim
transfers  topic id                                         msgpack of records.Transfer
           topic id, session                                the same, of one shared producer
cursors    topic id, group                                  the committed offset of a reader group
retention  topic id                                         msgpack [max_age (s), max_bytes]
fences     topic id, token of a run                         the epoch it writes under (see once.py)
batches    topic id, writer                                 the number of its last batch (i64),
                                                            and a counter of when that was
```

Numbers in keys are big-endian, so that LMDB's order is theirs. Entries are keyed by their
last offset: the entry that holds an offset is then the first at or after it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import struct
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lmdb
import msgpack

from exclusivelog import _core, logs, refusals
from exclusivelog._core import TopicRow
from exclusivelog.admission import Known, widened
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerFullError,
    ProducerFencedError,
    TopicNotFoundError,
)
from exclusivelog.foreign import Ignoring
from exclusivelog.local.faults import report_damaged
from exclusivelog.local.records import (
    ANNOUNCED,
    APPLIED_JOURNAL,
    CHANGES,
    COMPRESSION,
    DEAD,
    DELETED_TO,
    ENDED,
    ITEMS,
    KIND,
    LARGE_BYTES,
    LAST_ENDED,
    LAST_LISTED,
    LISTED,
    OVERDUE,
    PAIR,
    PRIORITIES,
    TIMES,
    U64,
    VOID,
    Claimant,
    Decoded,
    Rows,
    Session,
    Transfer,
    View,
    fenced_by,
    pack_session,
    revoked,
    u64,
    unpack_session,
)
from exclusivelog.local.storage import compression
from exclusivelog.local.storage.free_pages import FAR, RoomLeft
from exclusivelog.local.storage.segments import (
    LARGE_ENTRY,
    REFERENCE,
    REFERENCE_MAGIC,
    Segments,
    is_reference,
    segment_bytes,
    space,
)
from exclusivelog.local.time_marks import (
    Mark,
    is_ahead,
    is_marked,
    pack_marks,
    unpack_marks,
    wall_ms,
    with_mark,
    without_trimmed,
)
from exclusivelog.types import Announcement

if TYPE_CHECKING:
    from exclusivelog.events import Event

log = logging.getLogger(__name__)


# ---- what is appended ------------------------------------------------------------------

# Tables whose rows of a topic are deleted with it.
OF_A_TOPIC = ("entries", "producers", "cursors", "retention", "batches")
COLLECTED_BYTES = 256 << 10  # copied out of the journal at once
PRODUCER = struct.Struct(">qQ")
AUTOMATIC, HAS_ENDED = 1 << 63, 1 << 62  # see `ProducerTable`
BATCH = struct.Struct(">qQ")
OLD_BATCH = struct.Struct(">q")
MOST_FENCES = 4096  # per topic: runs whose epochs are kept
MOST_WRITERS = 4096  # per topic: jobs whose last batch number is kept
APPLIED = struct.Struct(">QQQQ")
Kind = dict[str, str | None]  # the state that a topic holds; see `TopicTable.kind`


def note_ended(rows: Rows, place: bytes) -> int:
    """Note what is to be forgotten later (see forgetting.py); returns its number."""
    number = rows.next_id(LAST_ENDED)
    rows.put("meta", ENDED + U64.pack(number), place)
    return number


class TopicList:
    """The names of the topics that exist, so that no call reads those of deleted topics.

    A version of the library that does not know the list gives ids as well. So it is complete only
    if it has the last id; else the next opening makes it anew.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @property
    def last_id(self) -> int:
        """The last id that a topic or view was given; 0 if there was none."""
        return self.rows.find("meta", b"topic", u64) or 0

    @property
    def is_complete(self) -> bool:
        """Does it have all topics?"""
        return (self.rows.find("meta", LAST_LISTED, u64) or 0) == self.last_id

    def next_id(self) -> int:
        """An id for a new topic or view."""
        complete = self.is_complete
        number = self.rows.next_id(b"topic")
        if self.rows.get("topics", U64.pack(number)) is not None:
            raise self.rows.damaged("meta", ValueError(f"topic {number} is there already"))
        if complete:
            self.rows.put("meta", LAST_LISTED, U64.pack(number))
        return number

    def add(self, name: str, topic: int) -> None:
        """A topic was made."""
        self.rows.put("meta", LISTED + name.encode(), U64.pack(topic))

    def has(self, name: str) -> bool:
        """Is a topic of that name there?"""
        return self.rows.get("meta", LISTED + name.encode()) is not None

    def remove(self, name: str) -> None:
        """A topic was deleted. Its row stays, for its epoch (rule B1)."""
        self.rows.delete("meta", LISTED + name.encode())

    def all(self) -> list[tuple[str, int]]:
        """(name, id) of all that it has."""
        return list(_named(self.rows, "meta", self.names(), NOT_LISTED, self._id_of))

    def names(self) -> Iterator[tuple[bytes, bytes]]:
        """(name, encoded id) of all that it has."""
        return ((key[len(LISTED) :], data) for key, data in self._rows())

    def _id_of(self, name: bytes, data: bytes) -> int:
        """As the row says; if that is damaged, as the name's row says."""
        with contextlib.suppress(LedgerCorruptedError):
            return self.rows.decode("meta", u64, data)
        return self.rows.find("names", name, u64) or 0

    def replace(self, topics: Iterable[tuple[str, int]]) -> None:
        """Make it anew, of these (name, id)."""
        for key, _ in list(self._rows()):
            self.rows.delete("meta", key)
        for name, topic in topics:
            self.add(name, topic)
        self.rows.put("meta", LAST_LISTED, U64.pack(self.last_id))

    def _rows(self) -> Iterator[tuple[bytes, bytes]]:
        cursor = self.rows.cursor("meta")
        found = cursor if cursor.set_range(LISTED) else ()
        return itertools.takewhile(lambda row: row[0].startswith(LISTED), found)


def _named(
    rows: Rows,
    table: str,
    found: Iterable[tuple[bytes, bytes]],
    consequence: str,
    number: Callable[[bytes, bytes], int],
) -> Iterator[tuple[str, int]]:
    """(name, number) of these (name, data): a damaged row is left out, and logged."""
    for name, data in found:
        try:
            yield rows.decode(table, bytes.decode, name), number(name, data)
        except LedgerCorruptedError as error:
            report_damaged(rows.path, error, consequence)


class TopicTable:
    """Topics: their names and rows, their time marks, and what state they hold."""

    __slots__ = ("_being_changed", "list", "rows")

    def __init__(self, rows: Rows) -> None:
        self.rows, self.list = rows, TopicList(rows)
        self._being_changed: dict[int, TopicRow] = {}

    @contextlib.contextmanager
    def being_changed(self, row: TopicRow | None) -> Iterator[dict[int, TopicRow]]:
        """Register a row that the caller is changing, while the block runs. Returns all such rows
        by topic: code called meanwhile must use these, because the table has them unchanged."""
        before, self._being_changed = self._being_changed, dict(self._being_changed)
        if row is not None:
            self._being_changed[row.id] = row
        try:
            yield self._being_changed
        finally:
            self._being_changed = before

    def id_of(self, name: str) -> int | None:
        """The id of the topic of that name, also of a deleted one."""
        return self.rows.find("names", name.encode(), u64)

    def get(self, topic: int) -> TopicRow:
        """The topic's row. TopicNotFoundError if the topic was deleted, made again, and forgotten;
        LedgerCorruptedError if the row is damaged, or missing otherwise."""
        row = self.rows.find("topics", U64.pack(topic), TopicRow.unpack)
        if row is not None:
            return row
        if topic < self.list.last_id:
            raise TopicNotFoundError(f"{self.rows.path}: topic number {topic} was deleted")
        raise self._missing(topic)

    def existing(self, topic: int) -> TopicRow:
        """The same; TopicNotFoundError also if it was deleted, and not made again."""
        return existing(self.get(topic))

    def has(self, topic: int, kept: str) -> bool:
        """Does a topic exist, and was not deleted? If its row is damaged: True, and `kept` says in
        the log what is kept for it."""
        if self.rows.get("topics", U64.pack(topic)) is None:
            return False
        row = self.intact(topic, kept)
        return row is None or not row.flags & _core.DELETED

    def _of_name(self, name: str, topic: int) -> TopicRow:
        """The row of an id that a name has: it is never forgotten."""
        row = self.rows.find("topics", U64.pack(topic), TopicRow.unpack)
        if row is None:
            raise self._missing(topic)
        if row.name != name:
            error = ValueError(f"topic {topic} is {row.name!r}, not {name!r}")
            raise self.rows.damaged("names", error)
        return row

    def _missing(self, topic: int) -> LedgerCorruptedError:
        return LedgerCorruptedError(f"{self.rows.path}: the row of topic {topic} is missing")

    def _is_deleted(self, topic: int) -> bool:
        """Does its row say so? A damaged one does not."""
        try:
            row = self.rows.find("topics", U64.pack(topic), TopicRow.unpack)
        except LedgerCorruptedError:
            return False
        return row is not None and bool(row.flags & _core.DELETED)

    def intact(self, topic: int, consequence: str) -> TopicRow | None:
        """The topic's row; None if it is gone, or damaged, which is logged with the consequence.
        Use it for work on many topics in one transaction, which one damaged row must not stop."""
        try:
            return self.get(topic)
        except LedgerCorruptedError as error:
            report_damaged(self.rows.path, error, consequence)
            return None
        except TopicNotFoundError:
            return None

    def put(self, row: TopicRow) -> None:
        """Write the row back."""
        self.rows.put("topics", U64.pack(row.id), row.pack())
        self.mark_time(row)

    def find(self, name: str) -> TopicRow | None:
        """The row of the topic of that name, unless it was deleted."""
        topic = self.id_of(name)
        if topic is None:
            return None
        row = self._of_name(name, topic)
        return None if row.flags & _core.DELETED else row

    def create(self, name: str) -> TopicRow:
        """Make a topic of that name; there must be none."""
        row = TopicRow()
        row.id = self.list.next_id()
        row.name = name
        former = self.id_of(name)
        if former is None and self.list.has(name):
            raise self.rows.damaged("names", ValueError(f"it lacks topic {name!r}"))
        if former is not None:
            row.epoch = self._of_name(name, former).epoch  # no epoch is used twice (rule B1)
            row.flags = _core.RECREATED
            OnceTable(self.rows).move_fences(former, row.id)  # rule B4
            note_ended(self.rows, U64.pack(former))
        self.put(row)
        self.rows.put("names", row.name.encode(), U64.pack(row.id))
        self.list.add(row.name, row.id)
        return row

    def all(self) -> list[tuple[str, int]]:
        """(name, id) of all topics in the order of their names, without deleted ones. If versions
        without the list have used the ledger since it was opened, some deleted ones are there."""
        return self.list.all() if self.list.is_complete else self.named()

    def named(self) -> list[tuple[str, int]]:
        """The same with all deleted ones, whose epochs are kept by their names (rule B1)."""
        found = self.rows.cursor("names")
        return list(_named(self.rows, "names", found, NOT_LISTED, self._id_of))

    def _id_of(self, name: bytes, data: bytes) -> int:
        return self.rows.decode("names", u64, data)

    def misnamed(self) -> Iterator[str]:
        """What is wrong with the names of topics and their ids, for `verify`."""
        names, there, rows = dict(self.named()), set[int](), dict[int, TopicRow]()
        for key, data in self.rows.cursor("topics"):
            with contextlib.suppress(LedgerCorruptedError):  # named with the topic's messages
                topic = self.rows.decode("topics", u64, key)
                there.add(topic)
                rows[topic] = self.rows.decode("topics", TopicRow.unpack, data)
        for name, topic in names.items():
            if topic not in there:
                yield f"topic {name!r}: its row is missing"
            elif topic in rows and rows[topic].name != name:
                yield f"topic {name!r}: the row of its name leads to topic {rows[topic].name!r}"
        for topic, row in rows.items():
            if not row.flags & _core.DELETED and names.get(row.name) != topic:
                yield f"topic {row.name!r}: the row of its name is missing, or leads elsewhere"

    def readable(self) -> dict[str, int]:
        """{name: id} of all topics that a sound row names, also of deleted ones."""
        return {**dict(self.list.all()), **dict(self.named())}

    def relist(self) -> None:
        """Make the list anew."""
        there = [(name, topic) for name, topic in self.named() if not self._is_deleted(topic)]
        self.list.replace(there)

    def forget(self, topic: int) -> None:
        """Delete the row of a topic that was deleted and made again."""
        if self._is_deleted(topic) and self.id_of(self.get(topic).name) != topic:
            self.rows.delete("topics", U64.pack(topic))

    def marks(self, topic: int) -> list[Mark]:
        """The topic's time marks, in the order of their offsets."""
        return unpack_marks(self.rows.get("meta", TIMES + U64.pack(topic)))

    def lacks_mark(self, row: TopicRow) -> bool:
        """Are there messages with times ahead of the clock that no mark covers?"""
        now = wall_ms()
        gone = row.flags & _core.DELETED or row.first_offset == row.next_offset
        if gone or not is_ahead(row.last_publish_time, now):
            return False
        return not is_marked(self.marks(row.id), row.next_offset, now)

    def mark_time(self, row: TopicRow) -> None:
        """If the topic's publish times are ahead of the clock, record that its messages had been
        published by now."""
        if self.lacks_mark(row):
            marks = with_mark(self.marks(row.id), row.next_offset, wall_ms())
            self._put_marks(row.id, marks)

    def drop_marks(self, topic: int, before: int) -> None:
        """Drop the marks of messages before an offset, which were trimmed."""
        marks = self.marks(topic)
        left = without_trimmed(marks, before)
        if left != marks:
            self._put_marks(topic, left)

    def _put_marks(self, topic: int, marks: list[Mark]) -> None:
        key = TIMES + U64.pack(topic)
        if marks:
            self.rows.put("meta", key, pack_marks(marks))
        else:
            self.rows.delete("meta", key)

    def kind(self, topic: int) -> Kind:
        """The state that the topic holds: {"holds": "map" or "state"}, of a map also the names of
        its serialisers; {} if none is recorded."""
        return self.rows.find("meta", KIND + U64.pack(topic), msgpack.unpackb) or {}

    def put_kind(self, topic: int, kind: Kind) -> None:
        """Write what `kind` reads."""
        self.rows.put("meta", KIND + U64.pack(topic), msgpack.packb(kind))


class Segment(NamedTuple):
    """A segment, as the tables see it."""

    id: int
    end: int
    live: int  # entries
    dead: int | None  # bytes of the others; None: an earlier version began it, and counted none
    grows: bool  # takes more entries

    @property
    def live_bytes(self) -> int:
        """The bytes of its live entries; all its bytes if that is not known."""
        return self.end - (self.dead or 0)


class LargeEntries:
    """The large entries, within one transaction.

    `emptied` collects the segments that can be removed once the transaction is durable, each with
    the number of that transaction.
    """

    __slots__ = ("_grown", "_rows", "_segments", "emptied", "excess")

    def __init__(self, rows: Rows, segments: Segments) -> None:
        self.excess = 0  # bytes beyond the limit that the transaction may write
        self._rows = rows
        self._segments = segments
        self._grown: dict[int, int] = {}  # {segment: where it ended before}
        self.emptied: dict[int, int] = {}

    def segments(self) -> dict[int, tuple[int, int]]:
        """{segment: (committed end, number of live entries)}, without those of damaged rows, which
        are logged."""
        found = self._rows.cursor("segments")
        return dict(_undamaged(self._rows, "segments", PAIR.unpack, found, COUNTED_ANEW))

    def survey(self) -> list[Segment]:
        """All segments, the oldest first."""
        found, size = self.segments(), self.segment_bytes
        newest = max(found, default=0)
        return [
            Segment(segment, end, live, self._dead(segment), segment == newest and end < size)
            for segment, (end, live) in found.items()
        ]

    @property
    def segment_bytes(self) -> int:
        """The size from which on a segment takes no more entries."""
        return segment_bytes(self._total()[1], self._segments.disk_size)

    @property
    def last_id(self) -> int:
        """The last id that a segment was given; 0 if there was none."""
        return self._rows.find("meta", b"segment", u64) or 0

    def count_dead(self, segment: Segment, lengths: Collection[int]) -> None:
        """Record what lives in a segment, entries of these lengths, and how much of it does not,
        unless it has changed since it was looked at."""
        known = self.segments().get(segment.id, ())
        if (*known, self._dead(segment.id)) != segment[1:4]:
            return
        if lengths:
            row = PAIR.pack(segment.end, len(lengths))
            self._rows.put("segments", U64.pack(segment.id), row)
            self._put_dead(segment.id, max(0, space(segment.end) - sum(map(space, lengths))))
        else:
            self._drop(segment.id, segment.end)

    def find_again(self, segment: int, places: Mapping[int, int]) -> None:
        """Make the row of a segment that has lost it: {position: length} of the entries in it."""
        if segment in self.segments():
            return
        if places:
            end = max(position + length for position, length in places.items())
            self._rows.put("segments", U64.pack(segment), PAIR.pack(end, len(places)))
            self._count_again(segment)
        else:
            self._rows.delete("segments", U64.pack(segment))

    def correct_total(self) -> None:
        """Have the total agree with the rows of all segments, once each entry was looked for."""
        self._add_to_total(sum(end for end, _ in self.segments().values()) - self.total_bytes())

    def _count_again(self, segment: int) -> None:
        self._rows.delete("meta", DEAD + U64.pack(segment))

    def _dead(self, segment: int) -> int | None:
        return self._undamaged("meta", DEAD + U64.pack(segment), u64)

    def _put_dead(self, segment: int, count: int) -> None:
        self._rows.put("meta", DEAD + U64.pack(segment), U64.pack(count))

    def total_bytes(self) -> int:
        """The total length of all segments."""
        return self._total()[0]

    @property
    def nearly_full(self) -> bool:
        """Have they most of the bytes that all segments together may have?"""
        total, limit = self._total()
        return 4 * total > 3 * limit

    def load(self, row: bytes) -> bytes | memoryview:
        """The bytes of the entry that a row is, or refers to; ValueError if they are missing."""
        return self._segments.load(row)

    def where(self, row: bytes) -> str:
        """The file of the entry that a row is, or refers to."""
        if not is_reference(row):
            return f"{self._rows.path}/data.mdb"
        _, segment, position, _ = REFERENCE.unpack(row)
        return f"{self._segments.file(segment)} at {position}"

    def put(self, entry: bytes | memoryview, limited: bool = True) -> bytes:
        """Write an entry into the newest segment; returns the row that refers to it. `limited`:
        LedgerFullError if all segments together become too long."""
        segment, known, live = self._newest()
        end = self._end(segment, known)
        stop = space(end) + len(entry)
        self._add_to_total(stop - known, limited)
        self._grown.setdefault(segment, end)
        position = self._segments.append(segment, end, entry)
        self._rows.put("segments", U64.pack(segment), PAIR.pack(stop, live + 1))
        if not known:
            self._put_dead(segment, 0)
        elif end > known:
            self._count_again(segment)
        return REFERENCE.pack(REFERENCE_MAGIC, segment, position, len(entry))

    def sweep(self) -> None:
        """Discard what dead processes have left: segments, and what is behind the end of the newest
        one; unless a row may be damaged."""
        found, agree = self.segments(), self.agree()
        if agree:
            self._segments.sweep(found, self.last_id, self._rows.transaction - 1)
        newest = max(found, default=0)
        size = self._segments.size(newest) if newest else 0
        if size:  # a file that two ledgers share is refused here
            self._segments.cut(newest, found[newest][0] if agree else size)

    def _end(self, segment: int, known: int) -> int:
        """Where a segment ends. Behind the end that its row tells is what a rollback has left,
        or what was acknowledged: if the row is damaged."""
        size = self._segments.size(segment) if known else 0
        return size if size > known and not self.agree() else known

    def problems(self) -> Iterator[str]:
        """What is wrong with the rows of the segments, for `verify`."""
        if not self.agree():
            yield (
                "the rows of the segments do not agree with the total of their bytes: one is "
                "damaged or lost; the next trim or deletion counts the entries in them anew"
            )

    def agree(self) -> bool:
        """Do the rows of the segments agree with the total of their bytes? Else one is damaged."""
        return sum(end for end, _ in self.segments().values()) == self.total_bytes()

    def free(self, topic: int, last_offset: int, row: bytes) -> None:
        """Free the entry of this topic that `row` refers to, if it refers to one."""
        if not self.refers_to_its_own(topic, last_offset, row):
            return
        _, segment, _, length = REFERENCE.unpack(row)
        found = self._row(segment)
        if found is None:
            return
        end, live = found
        dead = self._dead(segment)
        is_last = dead is not None and dead + space(length) >= end
        if is_last and live == 1:
            self._drop(segment, end)
            return
        self._rows.put("segments", U64.pack(segment), PAIR.pack(end, max(1, live - 1)))
        if is_last or live <= 1:  # one of the two numbers is damaged, or the dead are not counted
            self._count_again(segment)
        elif dead is not None:
            self._put_dead(segment, dead + space(length))

    def _row(self, segment: int) -> tuple[int, int] | None:
        """(committed end, number of live entries); None if the row is missing or damaged."""
        return self._undamaged("segments", U64.pack(segment), PAIR.unpack)

    def _undamaged(
        self, table: str, key: bytes, decode: Callable[[bytes], Decoded]
    ) -> Decoded | None:
        try:
            return self._rows.find(table, key, decode)
        except LedgerCorruptedError as error:
            report_damaged(self._rows.path, error, COUNTED_ANEW)
            return None

    def _drop(self, segment: int, end: int) -> None:
        """Have a segment removed that has no entry which lives."""
        self._rows.delete("segments", U64.pack(segment))
        self._count_again(segment)
        self._add_to_total(-end)
        self.emptied[segment] = self._rows.transaction

    def sync(self) -> None:
        """Make entries durable, before the rows that refer to them."""
        if self._grown:
            self._segments.sync(max(self._grown))  # a segment that is full was synced before

    def undo(self) -> None:
        """Cut off what the transaction has written."""
        for segment, end in self._grown.items():
            with Ignoring(OSError):  # the next transaction overwrites it
                self._segments.cut(segment, end)

    def _total(self) -> tuple[int, int]:
        # As LMDB's own limit, it is the highest with which an engine has opened the ledger.
        total, limit = self._undamaged("meta", LARGE_BYTES, PAIR.unpack) or (0, 0)
        return total, max(limit, self._segments.limit)

    def _add_to_total(self, count: int, limited: bool = False) -> None:
        total, limit = self._total()
        if limited and total + count > limit + self.excess:
            raise LedgerFullError(
                f"{self._rows.path}: large entries take {total} bytes of {limit}, another one "
                "does not fit; open the ledger with a larger map_size, or trim or delete topics"
            )
        total = max(0, total + count)  # it, or what is subtracted, may be damaged
        self._rows.put("meta", LARGE_BYTES, PAIR.pack(total, limit))

    def _newest(self) -> tuple[int, int, int]:
        cursor = self._rows.cursor("segments")
        if cursor.last():
            segment = self._rows.decode("segments", u64, cursor.key())
            end, live = self._row(segment) or (self.segment_bytes, 0)
            if end < self.segment_bytes:
                return segment, end, live
        self.sync()  # it takes no more entries
        return self._rows.next_id(b"segment"), 0, 0

    def refers_to_its_own(self, topic: int, last_offset: int, row: bytes) -> bool:
        """Does this row refer to the topic's entry with this last offset? A damaged row must not
        free another topic's entry, so on a mismatch the space is kept, which is logged."""
        if not is_reference(row):
            return False
        try:
            if _core.ends_as(self.load(row), topic, last_offset):
                return True
        except ValueError as error:
            logs.emit(log, logs.ENTRY_DAMAGED, ledger=self._rows.path, reason=str(error))
        logs.emit(log, logs.SPACE_KEPT, ledger=self._rows.path, topic_id=topic)
        return False


class EntryTable:
    """Entries: those in the tables, followed by those in the journal."""

    __slots__ = ("_journal", "_large", "added", "rows", "scanned")

    def __init__(self, rows: Rows, large: LargeEntries, journal: AppliedJournal) -> None:
        self.rows, self._large, self._journal = rows, large, journal
        self.added = False  # has the transaction written entries?
        self.scanned = 0  # how far `walk` has read the journal

    def put(self, topic: int, last_offset: int, entry: bytes, limited: bool = True) -> None:
        """Append an entry to its topic. `limited` as in `LargeEntries.put`."""
        self.added = self.added or limited
        key = PAIR.pack(topic, last_offset)
        row = entry if len(entry) < LARGE_ENTRY else self._large.put(entry, limited)
        if not self.rows.put("entries", key, row, overwrite=False):
            raise LedgerCorruptedError(
                f"{self.rows.path}: topic {topic} has an entry at offset {last_offset} already, "
                "behind its own end"
            )

    def replace(self, topic: int, last_offset: int, row: bytes, entry: bytes) -> None:
        """Replace the stored form of this row's entry; no effect if the row is not there any
        more."""
        if self.has(topic, last_offset, row):
            self._large.free(topic, last_offset, row)
            self.rows.delete("entries", PAIR.pack(topic, last_offset))
            self.put(topic, last_offset, entry, limited=False)  # it makes room

    def move(self, topic: int, last_offset: int, row: bytes, entry: bytes) -> None:
        """Write this row's entry, of which `entry` is a copy, into the newest segment; no effect if
        the row is not there any more, or refers to damage."""
        if self.has(topic, last_offset, row) and self._large.refers_to_its_own(
            topic, last_offset, row
        ):
            self.replace(topic, last_offset, row, entry)

    def has(self, topic: int, last_offset: int, row: bytes) -> bool:
        """Is this still the row of the topic's entry with this last offset?"""
        return self.rows.get("entries", PAIR.pack(topic, last_offset)) == row

    def references(
        self, segments: Container[int], start: bytes, most: int
    ) -> tuple[list[tuple[int, int, bytes]], bytes | None]:
        """(topic, last offset, row) of entries in these segments, among `most` rows from the key
        `start` on; and the key to continue at, None at the end. Use it in a `Ledger.scan`."""
        found: list[tuple[int, int, bytes]] = []
        cursor = self.rows.cursor("entries")
        there = cursor.set_range(start)
        for _ in range(most):
            if not there:
                break
            if len(cursor.value()) == REFERENCE.size:
                row = bytes(cursor.value())
                if is_reference(row) and REFERENCE.unpack(row)[1] in segments:
                    found.append((*PAIR.unpack(cursor.key()), row))
            there = cursor.next()
        return found, bytes(cursor.key()) if there else None

    def stored(self, topic: int, offset: int) -> Iterator[tuple[int, bytes]]:
        """(last offset, row) of the entries in the tables from the one that holds `offset` on."""
        for key, data in self.rows.under("entries", topic, U64.pack(offset)):
            yield u64(key), data

    def walk(
        self, topic: int, offset: int, since: int = 0, packed: bool = False, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(last offset, row) of the entries from the one that holds `offset` on, those in the
        journal last; `load` makes an entry of a row.

        Frames before the journal position `since` are skipped; `scanned` then has the position up
        to which the journal was read. `packed`: combine frames into fewer, larger entries. `end`:
        the tables have no entries from this offset on, and are not searched there.
        """
        stored = self.stored(topic, offset) if end is None or offset < end else ()
        for last, data in stored:
            yield last, data
            offset = last + 1
        yield from self._frames(topic, offset, max(self._journal.applied, since), packed)

    def at(self, topic: int, offset: int) -> tuple[int, bytes] | None:
        """(last offset, row) of the entry in the tables that holds `offset`, or of the next one."""
        cursor = self.rows.cursor("entries")
        if not cursor.set_range(PAIR.pack(topic, offset)):
            return None
        owner, last = PAIR.unpack(cursor.key())
        return (last, cursor.value()) if owner == topic else None

    def begin(self, row: TopicRow, last: int) -> int:
        """The first offset of the entry in the tables with this last offset, from the entry before
        it."""
        cursor = self.rows.cursor("entries")
        if cursor.set_range(PAIR.pack(row.id, last)) and cursor.prev():
            owner, before = PAIR.unpack(cursor.key())
            if owner == row.id:
                return int(before) + 1
        return row.first_offset

    def _frames(
        self, topic: int, offset: int, start: int, packed: bool = False
    ) -> Iterator[tuple[int, bytes]]:
        journal, self.scanned = self._journal, start
        while journal.file is not None and self.scanned < journal.visible:
            found = journal.file.collect(
                topic,
                offset,
                self.scanned,
                journal.visible,
                journal.generation,
                COLLECTED_BYTES,
                packed,
            )
            for last, entry, position in found:
                yield last, entry
                self.scanned = position  # after the consumer has taken it
            if not found:
                self.scanned = journal.visible

    def load(self, row: bytes) -> bytes | memoryview:
        """The bytes of the entry that a row is, or refers to; ValueError if they are not there."""
        return self._large.load(row)

    def where(self, topic: int, offset: int) -> str:
        """The file of the entry in the tables that holds `offset`."""
        place = self.at(topic, offset)
        return f"{self.rows.path}/data.mdb" if place is None else self._large.where(place[1])

    def last_offset_before(self, topic: int, offset: int) -> int | None:
        """The last offset of the entry that ends before `offset`."""
        frames = [
            last for last, _ in self._frames(topic, 0, self._journal.applied) if last < offset
        ]
        if frames:
            return frames[-1]
        cursor = self.rows.cursor("entries")
        found = cursor.set_range(PAIR.pack(topic, offset))
        if not (cursor.prev() if found else cursor.last()):
            return None
        owner, last = PAIR.unpack(cursor.key())
        return last if owner == topic else None

    def drop(self, topic: int, most: int, before: int | None = None) -> int:
        """Delete up to `most` rows of a deleted topic, or with `before` of entries that end before
        an offset; returns how many."""
        count = 0
        prefix = U64.pack(topic)
        for table in OF_A_TOPIC if before is None else ("entries",):
            cursor = self.rows.cursor(table)
            while count < most and cursor.set_range(prefix) and cursor.key().startswith(prefix):
                if table == "entries":
                    last = PAIR.unpack(cursor.key())[1]
                    if before is not None and last >= before:
                        break
                    self._large.free(topic, last, cursor.value())
                self.rows.delete(table, cursor.key())
                count += 1
        return count

    def newest(self, row: TopicRow) -> Iterator[tuple[int, int]]:
        """(bytes, first offset) of the topic's entries, the newest first."""
        cursor = self.rows.cursor("entries")
        found = cursor.set_range(PAIR.pack(row.id, row.next_offset))
        found = cursor.prev() if found else cursor.last()
        while found:
            topic, last = PAIR.unpack(cursor.key())
            if topic != row.id or last < row.first_offset:
                return
            data = cursor.value()
            size = REFERENCE.unpack(data)[3] if is_reference(data) else len(data)
            found = cursor.prev()
            begin = row.first_offset
            if found:
                topic, last = PAIR.unpack(cursor.key())
                begin = max(begin, last + 1) if topic == row.id else begin
            yield size, begin


def is_handed_over(rows: Rows, topic: int) -> bool:
    """Is the topic handed over, or one of its shared producers?"""
    return next(rows.under("transfers", topic), None) is not None


class ProducerTable:
    """Producer names: their last sequence ids, and the sessions that use them.

    A row's second field is the live session, or 0. Of a name that the library gave, the bit
    `AUTOMATIC` is set. Once its session has ended, `HAS_ENDED` is set, too, and the other bits are
    a number: its row stays until `KEPT` more of such names have ended. A caller who opens a
    producer under the name before that makes it his own: then its row stays (rule G2).
    """

    __slots__ = ("_journal", "rows")

    def __init__(self, rows: Rows, journal: AppliedJournal) -> None:
        self.rows, self._journal = rows, journal

    def get(self, topic: int, name: str) -> tuple[int, int]:
        """(last sequence id or -1, live session or 0) of a producer name (rules A6, G2)."""
        key = U64.pack(topic) + name.encode()
        return self.rows.find("producers", key, _unpack_producer) or (-1, 0)

    def unused_name(self, topic: int, name: str) -> str:
        """This name if it is unused, else a similar unused one."""
        found = name
        while self.get(topic, found) != (-1, 0):
            found = f"{name}-{os.urandom(3).hex()}"
        return found

    def put(
        self, topic: int, name: str, sequence: int, session: int, given: bool | None = None
    ) -> None:
        """Write what `get` reads. `given`: did the library give the name, or the caller (None: as
        before)?"""
        key = U64.pack(topic) + name.encode()
        if given is None:
            given = _is_given(self.rows.get("producers", key))
        field = session | AUTOMATIC if given else session
        self.rows.put("producers", key, PRODUCER.pack(sequence, field))

    def count(self, topic: int, name: str, sequence: int) -> None:
        """Raise the last sequence id to this one; nothing else of the row changes."""
        key = U64.pack(topic) + name.encode()
        last, field = self.rows.find("producers", key, PRODUCER.unpack) or (-1, 0)
        self.rows.put("producers", key, PRODUCER.pack(max(last, sequence), field))

    def claim(self, topic: int, name: str) -> None:
        """A caller waits for this name, which is in use: it is his, whoever has given it."""
        if _is_given(self.rows.get("producers", U64.pack(topic) + name.encode())):
            self.put(topic, name, *self.get(topic, name), given=False)

    def free(self, session: Session) -> None:
        """The session's name may be registered again; its last sequence id stays, that of a name
        which the library gave for a while."""
        key = U64.pack(session.topic) + session.name.encode()
        sequence, holder = self.get(session.topic, session.name)
        if holder != session.id:
            return
        given = _is_given(self.rows.get("producers", key))
        if sequence < 0 and not (given and self._is_needed(session.topic)):
            self.rows.delete("producers", key)  # it never sent anything: keep no row (rule A2)
        elif given:
            field = AUTOMATIC | HAS_ENDED | note_ended(self.rows, key)
            self.rows.put("producers", key, PRODUCER.pack(sequence, field))
        else:
            self.put(session.topic, session.name, sequence, 0)

    def _is_needed(self, topic: int) -> bool:
        """Is the row of a name that the library gave needed, although it has no sequence id? A
        checkpoint would write it again, and a producer that is handed over continues with it."""
        return self._journal.has_more or is_handed_over(self.rows, topic)

    def forget(self, number: int, key: bytes) -> None:
        """Delete the row of a name that has ended under this number, unless it was used since."""
        row = self.rows.get("producers", key)
        if row is not None and row[U64.size :] == U64.pack(AUTOMATIC | HAS_ENDED | number):
            self.rows.delete("producers", key)

    def all(self, topic: int) -> list[tuple[str, int, int]]:
        """(name, last sequence id, live session or 0) of every producer of a topic."""
        return [
            (name.decode(), *self.rows.decode("producers", _unpack_producer, data))
            for name, data in self.rows.under("producers", topic)
        ]


def _unpack_producer(data: bytes) -> tuple[int, int]:
    sequence, field = PRODUCER.unpack(data)
    return sequence, 0 if field & HAS_ENDED else field & ~AUTOMATIC


def _is_given(row: bytes | None) -> bool:
    """Did the library give the name of this row? A damaged row does not say so."""
    return row is not None and len(row) == PRODUCER.size and bool(row[U64.size] & 0x80)


CURSORS = "cursors"


class CursorTable:
    """The committed positions of reader groups. Commits note them in the journal, and a checkpoint
    writes them here."""

    __slots__ = ("_topics", "journal", "rows")

    def __init__(self, rows: Rows, journal: AppliedJournal, topics: TopicTable) -> None:
        self.rows, self.journal, self._topics = rows, journal, topics

    def get(self, topic: int, group: str) -> int | None:
        """The committed offset of a reader group; None before its first commit."""
        return self.positions([topic], group).get(topic)

    def positions(self, topics: Iterable[int], group: str) -> dict[int, int]:
        """{topic: committed offset} of a reader group, where it has committed."""
        keys = {cursor_key(topic, group): topic for topic in topics}
        noted = self.journal.noted_of(CURSORS, keys)
        found = {}
        for key, topic in keys.items():
            data = noted.get(key)
            offset = self.rows.find(CURSORS, key, u64) if data is None else u64(data)
            if offset is not None:
                found[topic] = offset
        return found

    def all(self, topic: int) -> list[tuple[str, int]]:
        """(group, committed offset) of every group that has committed on a topic. A damaged row is
        left out, and logged."""
        found = dict(self.rows.under(CURSORS, topic))
        found |= {
            key[U64.size :]: data
            for key, data in self.journal.noted(CURSORS).items()
            if key.startswith(U64.pack(topic))
        }
        return list(_named(self.rows, CURSORS, sorted(found.items()), NO_GROUP, self._offset))

    def _offset(self, group: bytes, data: bytes) -> int:
        return self.rows.decode(CURSORS, u64, data)

    def topics(self) -> set[int]:
        """The topics on which any reader group has committed."""
        keys = [key for key, _ in self.rows.cursor(CURSORS)]
        noted = self.journal.noted(CURSORS)
        return {u64(key[: U64.size]) for key in [*keys, *noted] if len(key) > U64.size}

    def delete(self, group: str) -> int:
        """Remove the positions of a group on all topics; how many there were. Exclude appends, and
        include the journal."""
        suffix = group.encode()
        stored = [key for key, _ in self.rows.cursor(CURSORS)]
        found = {
            key for key in (*stored, *self.journal.noted(CURSORS)) if key[U64.size :] == suffix
        }
        for key in found:
            self.rows.delete(CURSORS, key)
            self.journal.void(key)
        return sum(self._belongs(key) for key in found)

    def put(self, topic: int, group: str, offset: int) -> None:
        """Write what `get` reads. Exclude appends."""
        key = cursor_key(topic, group)
        self.rows.put(CURSORS, key, U64.pack(offset))
        self.journal.void(key)

    def apply(self, key: bytes, data: bytes) -> None:
        """Write a position that the journal has noted, unless the topic was deleted meanwhile."""
        if self._belongs(key):
            self.rows.put(CURSORS, key, data)

    def _belongs(self, key: bytes) -> bool:
        """Is the row of a topic that exists? Notes of one that was deleted stay in the journal."""
        return self._topics.has(u64(key[: U64.size]), "positions of its groups are kept")


def cursor_key(topic: int, group: str) -> bytes:
    """The key of a group's position on a topic; its data is the offset, a `U64`."""
    return U64.pack(topic) + group.encode()


class AnnouncementTable:
    """Announcements: what the owner of a topic publishes about itself, such as an address.

    One row per topic, written by its owner alone: in the transaction of its grant (`announce=`), or
    later by one that compares session and epoch as an append does (`producer.announce`), and notes
    it in the journal, as positions are. It stays when its owner leaves, until another one
    announces: a successor reads the last announcement.
    """

    __slots__ = ("_topics", "journal", "rows")

    def __init__(self, rows: Rows, journal: AppliedJournal, topics: TopicTable) -> None:
        self.rows, self.journal, self._topics = rows, journal, topics

    def get(self, topic: int) -> Announcement | None:
        """The last announcement on a topic; None if there was none."""
        key = ANNOUNCED + U64.pack(topic)
        data = self.journal.noted_of("meta", (key,)).get(key)
        if data is not None:
            return _unpack_announcement(data)
        return self.rows.find("meta", key, _unpack_announcement)

    def put(self, session: Session, info: Mapping[str, str]) -> None:
        """Replace the announcement on the session's topic. Exclude appends; the caller has checked
        that the session owns the topic."""
        key, data = announcement_row(session, info)
        self.rows.put("meta", key, data)
        self.journal.void(key)

    def apply(self, key: bytes, data: bytes) -> None:
        """Write what the journal has noted, unless the topic was deleted meanwhile."""
        if self._topics.has(u64(key[len(ANNOUNCED) :]), "its announcement is kept"):
            self.rows.put("meta", key, data)


def announcement_row(session: Session, info: Mapping[str, str]) -> tuple[bytes, bytes]:
    """(key, data) of what a session announces now."""
    row = [
        dict(info),
        session.epoch,
        wall_ms(),
        session.engine,
        session.engine_name,
        session.pid,
        session.name,
        session.id,
    ]
    return ANNOUNCED + U64.pack(session.topic), msgpack.packb(row)


def _unpack_announcement(data: bytes) -> Announcement:
    return Announcement(*msgpack.unpackb(data))


class OnceTable:
    """Batches that are appended once (see once.py): the epochs of runs, and the numbers of
    batches."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def fence(self, topic: int, token: str) -> int | None:
        """The epoch under which the run with this token writes; None if it is unknown."""
        return self.rows.find("fences", U64.pack(topic) + token.encode(), u64)

    def put_fence(self, topic: int, token: str, epoch: int) -> None:
        """Write what `fence` reads. Of the runs of a topic the last `MOST_FENCES` are kept."""
        key = U64.pack(topic) + token.encode()
        if self.rows.get("fences", key) is None:
            self._make_room("fences", topic, MOST_FENCES, u64)
        self.rows.put("fences", key, U64.pack(epoch))

    def _make_room(self, table: str, topic: int, most: int, age: Callable[[bytes], int]) -> None:
        """Make room for one more row of a topic, by deleting the oldest eighth of its rows. So they
        rarely have to be sorted."""
        rows = [
            (self.rows.decode(table, age, row), key) for key, row in self.rows.under(table, topic)
        ]
        if len(rows) < most:
            return
        for _, key in sorted(rows)[: len(rows) - most + most // 8 + 1]:
            self.rows.delete(table, U64.pack(topic) + key)

    def move_fences(self, former: int, topic: int) -> None:
        """Move the fences of a deleted topic to the topic that is created again (rule B4)."""
        for token, data in list(self.rows.under("fences", former)):
            self.rows.put("fences", U64.pack(topic) + token, data)
            self.rows.delete("fences", U64.pack(former) + token)

    def batch(self, topic: int, writer: str) -> int | None:
        """The number of a writer's last batch; None if there is none."""
        return self.rows.find("batches", U64.pack(topic) + writer.encode(), _unpack_batch)

    def put_batch(self, topic: int, writer: str, number: int) -> None:
        """Write what `batch` reads. The latest `MOST_WRITERS` writers of a topic are kept."""
        key = U64.pack(topic) + writer.encode()
        if self.rows.get("batches", key) is None:
            self._make_room("batches", topic, MOST_WRITERS, _age_of_batch)
        self.rows.put("batches", key, BATCH.pack(number, self.rows.next_id(b"batch")))

    def batches(self, topic: int) -> list[tuple[str, int]]:
        """(writer, number of its last batch) of every writer of a topic."""
        return [
            (writer.decode(), self.rows.decode("batches", _unpack_batch, data))
            for writer, data in self.rows.under("batches", topic)
        ]


class AppliedJournal:
    """The journal, as one transaction sees it.

    The tables have its frames up to the position `applied`; those up to `visible` are read from the
    journal. `file` is None if a ledger is read without its journal.
    """

    __slots__ = (
        "_damaged",
        "_mark",
        "_noted",
        "_oldest",
        "_rows",
        "_sequences",
        "applied",
        "file",
        "generation",
        "visible",
    )

    def __init__(self, rows: Rows, file: _core.Journal | None) -> None:
        self._rows, self.file = rows, file
        self.visible = 0
        self._sequences: dict[tuple[int, str], int] | None = None
        self._noted: dict[str, dict[bytes, bytes]] | None = None  # once read
        self._damaged = 0
        self.generation, self.applied, self._mark, self._oldest = 0, 0, 0, 0
        if file is not None:
            self.generation, self.applied, self._mark, self._oldest = self._read()

    def _read(self) -> tuple[int, int, int, int]:
        return self._rows.find("meta", APPLIED_JOURNAL, _unpack_applied) or (0, 0, 0, 0)

    def _write(self) -> None:
        row = APPLIED.pack(self.generation, self.applied, self._mark, self._oldest)
        self._rows.put("meta", APPLIED_JOURNAL, row)

    @property
    def has_more(self) -> bool:
        """Are there frames that the tables lack?"""
        return self.file is not None and self.file.tail > self.applied

    def known_end(self) -> int:
        """Up to where the frames were certainly flushed (rule H7)."""
        assert self.file is not None
        return self.file.known_end(self.applied, self.generation)

    def damaged_at(self) -> int | None:
        """Where the journal is damaged, if it was not recovered yet; None if it is whole."""
        if self.file is None or self.file.ready:
            return None
        end = self.live_end()
        return end if self.known_end() > end else None

    def live_end(self, known: int = 0) -> int:
        """The end of the valid frames, where shared memory does not have the journal's end. Damage
        before `known` is not the end."""
        assert self.file is not None
        return self.file.live_end(self.applied, self.generation, self._mark, self._oldest, known)

    def resume(self, known: int) -> int:
        """Continue the generation of an earlier life instead of applying its frames; returns where
        they end. After the transaction that could not be committed. `known` as in `live_end`."""
        assert self.file is not None
        return self.file.resume(self.generation, self.applied, self._mark, self._oldest, known)

    def mark(self, position: int, version: int) -> None:
        """Record that all valid frames from this position on have at least this version. A frame
        with a lower version is void: its appender died before it had moved the tail, and the topic
        may have gone on without it (rules B10, D8)."""
        if (position, version) != (self._mark, self._oldest):
            self._mark, self._oldest = position, version
            self._write()

    def see(self, visible: int | None) -> None:
        """Include the journal's frames up to this position (None: to its end)."""
        if visible is None and self.file is not None:
            visible = self.live_end(self.known_end())
        self.visible, self._sequences, self._noted = visible or 0, None, None

    def sequences(self) -> dict[tuple[int, str], int]:
        """{(topic, producer name): last sequence id} of the frames that the tables lack."""
        if self.file is None or self.applied >= self.visible:
            return {}
        if self._sequences is None:
            with self.file.gather(self.applied, self.visible, self.generation) as bundles:
                self._sequences = {
                    (bundle.topic, name.decode()): last
                    for bundle in bundles
                    for name, last in bundle.producers().items()
                }
        return self._sequences

    def noted(self, table: str) -> dict[bytes, bytes]:
        """{key: data} of the rows of a table that transactions have changed in the frames that the
        tables lack."""
        return self._read_notes().get(table, {})

    def noted_of(self, table: str, keys: Container[bytes]) -> Mapping[bytes, bytes]:
        """The same for some rows, in less time."""
        if self._noted is not None or self.file is None or self.applied >= self.visible:
            return self.noted(table)
        rows, _ = self.file.notes(self.applied, self.visible, self.generation, keys)
        return {key: data for name, key, data, _ in self.counting(rows) if name == table}

    @property
    def damaged_notes(self) -> int:
        """How many notes of rows in those frames cannot be read."""
        self._read_notes()
        return self._damaged

    @property
    def destroyed_bytes(self) -> int:
        """The bytes of those frames of which nobody knows whether they were notes."""
        if self.file is None or self.applied >= self.visible:
            return 0
        return self.file.holes(self.applied, self.visible, self.generation)[0]

    def _read_notes(self) -> dict[str, dict[bytes, bytes]]:
        if self._noted is None:
            self._noted, rows = {}, list[tuple[str, bytes, bytes, int]]()
            if self.file is not None and self.applied < self.visible:
                rows, self._damaged = self.file.notes(self.applied, self.visible, self.generation)
            for name, key, data, _ in self.counting(rows):
                self._noted.setdefault(name, {})[key] = data
        return self._noted

    def counting(
        self, rows: list[tuple[str, bytes, bytes, int]]
    ) -> Iterator[tuple[str, bytes, bytes, int]]:
        """Those of the noted rows, (table, key, data, position), that are not void."""
        for row in rows:
            since = self._rows.find("meta", VOID + row[1], u64)
            if since is None or row[3] >= since:
                yield row

    def void(self, key: bytes) -> None:
        """Let the notes of a row that the journal has so far not count. Exclude appends."""
        if self.file is not None and self.applied < self.file.tail:
            self._rows.put("meta", VOID + key, U64.pack(self.file.tail))

    def last_void(self) -> int:
        """The position before which notes of some row do not count; the largest of them."""
        cursor, last = self._rows.cursor("meta"), 0
        there = cursor.set_range(VOID)
        while there and cursor.key().startswith(VOID):
            last, there = max(last, u64(cursor.value())), cursor.next()
        return last

    def end_voids(self) -> None:
        """The tables have all notes: those to come count."""
        cursor = self._rows.cursor("meta")
        while cursor.set_range(VOID) and cursor.key().startswith(VOID):
            self._rows.delete("meta", cursor.key())

    def begin_generation(self, generation: int, position: int) -> None:
        """Start a new generation of the journal, all of whose frames are in the tables."""
        self.generation, self.applied = generation, position
        self._mark = self._oldest = 0  # they were about the former frames
        self.end_voids()  # and so were these
        self._write()

    def record_generation(self) -> None:
        """Record the generation that opening a ledger began without a commit, as it had nothing to
        recover. The first commit that changes anything does this, which is before any append, as
        the session that appends has to be admitted by a commit."""
        if self.file is not None and self._rows.changed:
            generation = self.file.unrecorded_generation(self.generation, self.applied)
            if generation:
                self.begin_generation(generation, self.applied)

    def advance(self, stop: int, version: int | None) -> None:
        """Record that the tables have all frames before the position `stop`. `version`: frames
        behind that have at least this one (see `mark`)."""
        self.applied = stop
        if version is not None and stop >= self._mark:
            self._mark, self._oldest = stop, version
        self._write()

    def end_of(self, topic: int, since: int) -> tuple[int, int] | None:
        """(next offset, publish time) of a topic's last frame behind the position `since`; None if
        it has none there."""
        start = max(self.applied, since)
        if self.file is None or start >= self.visible:
            return None
        return self.file.end_of(topic, start, self.visible, self.generation)


def _unpack_batch(data: bytes) -> int:
    # Rows of older versions have no counter.
    last: int = (BATCH if len(data) == BATCH.size else OLD_BATCH).unpack(data)[0]
    return last


def _age_of_batch(data: bytes) -> int:
    age: int = BATCH.unpack(data)[1] if len(data) == BATCH.size else 0
    return age


def _unpack_applied(data: bytes) -> tuple[int, int, int, int]:
    if len(data) == PAIR.size:  # of an earlier version
        generation, applied = PAIR.unpack(data)
        return generation, applied, 0, 0
    generation, applied, mark, oldest = APPLIED.unpack(data)
    return generation, applied, mark, oldest


# ---- ownership -------------------------------------------------------------------------


PLACE = struct.Struct(">QQQIQ")
INDEX = struct.Struct(">QBQ")
SLOT = struct.Struct(">H")
KNOWN = struct.Struct(">qq")
HIGHEST_PRIORITY = 2**63 - 1
HOLDER, WAITER = 0, 1


class SessionTable:
    """Sessions, admitted or waiting, by topic, by engine and by claim."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def holder(self, topic: int, session: int) -> Session | None:
        """An admitted session."""
        return self.rows.find("holders", PAIR.pack(topic, session), unpack_session)

    def holds(self, topic: int, session: int) -> bool:
        """Is this session admitted?"""
        return self.rows.get("holders", PAIR.pack(topic, session)) is not None

    def owned(self) -> set[int]:
        """The topics that have admitted sessions."""
        return {PAIR.unpack(key)[0] for key, _ in self.rows.cursor("holders")}

    def holders(self, topic: int) -> list[Session]:
        """All admitted sessions of a topic."""
        return list(self._sessions("holders", topic))

    def put_holder(self, session: Session) -> None:
        """Register an admitted session."""
        key = PAIR.pack(session.topic, session.id)
        self.rows.put("holders", key, pack_session(session))
        self._index(session, HOLDER, key)

    def drop_holder(self, session: Session) -> None:
        """Remove an admitted session."""
        self.rows.delete("holders", PAIR.pack(session.topic, session.id))
        self._unindex(session, HOLDER)

    def waiters(self, topic: int) -> Iterator[Session]:
        """The topic's queue, best first (rule D1). Lazy; do not change it while walking."""
        return self._sessions("queue", topic)

    def queue(self, topic: int) -> Iterable[tuple[bytes, bytes]]:
        """(key, data) of the queue's rows from the topic's best waiter on, for `promoting.promote`.
        The rows of other topics follow the topic's last one."""
        cursor = self.rows.cursor("queue")
        return cursor if cursor.set_range(U64.pack(topic)) else ()

    def waiting(self, session: Session) -> bool:
        """Is this session still in the queue?"""
        return self.rows.get("queue", queue_key(session)) is not None

    def put_waiter(self, session: Session) -> None:
        """Put a session into the queue."""
        key = queue_key(session)
        self.rows.put("queue", key, pack_session(session))
        self._index(session, WAITER, key)

    def drop_waiter(self, session: Session) -> bool:
        """Take a session out of the queue; False if it was not there."""
        self._unindex(session, WAITER)
        return self.rows.delete("queue", queue_key(session))

    def known(self, topic: int) -> Known | None:
        """The best and the lowest priority of the topic's waiters so far; None if no waiter has
        owned it yet (rule D7)."""
        return self.rows.find("meta", PRIORITIES + U64.pack(topic), KNOWN.unpack)

    def learn(self, topic: int, *priorities: int) -> None:
        """Extend the range that `known` reads to these priorities and those in the queue."""
        known = self.known(topic)
        found = widened(known, *priorities, *self._ends_of_queue(topic))
        if found != known:
            self.rows.put("meta", PRIORITIES + U64.pack(topic), KNOWN.pack(*found))

    def _ends_of_queue(self, topic: int) -> Iterator[int]:
        """The priorities of its first and of its last waiter, if there is one."""
        cursor = self.rows.cursor("queue")
        if cursor.set_range(U64.pack(topic)) and cursor.key().startswith(U64.pack(topic)):
            yield HIGHEST_PRIORITY - PLACE.unpack(cursor.key())[1]
            if cursor.prev() if cursor.set_range(U64.pack(topic + 1)) else cursor.last():
                yield HIGHEST_PRIORITY - PLACE.unpack(cursor.key())[1]

    def _sessions(self, table: str, topic: int) -> Iterator[Session]:
        for _, data in self.rows.under(table, topic):
            yield self.rows.decode(table, unpack_session, data)

    def _index(self, session: Session, kind: int, key: bytes) -> None:
        index = INDEX.pack(int(session.engine, 16), kind, session.id)
        self.rows.put("engines", index, SLOT.pack(session.slot) + key)
        if session.bound_to:
            binding = PAIR.pack(session.bound_to, session.id)
            self.rows.put("claimants", binding, bytes([kind]) + key)

    def _unindex(self, session: Session, kind: int) -> None:
        index = INDEX.pack(int(session.engine, 16), kind, session.id)
        self.rows.delete("engines", index)
        if session.bound_to:
            self.rows.delete("claimants", PAIR.pack(session.bound_to, session.id))

    def engines(self) -> Iterator[tuple[str, int]]:
        """(engine id, slot) of every engine that has sessions here, dead or alive."""
        cursor = self.rows.cursor("engines")
        found = cursor.first()
        while found:
            engine = INDEX.unpack(cursor.key())[0]
            try:
                slot, _ = self.rows.decode("engines", _unpack_index, cursor.value())
            except LedgerCorruptedError as error:
                report_damaged(self.rows.path, error, NOT_EVICTED)
                found = cursor.next()
                continue
            yield f"{engine:016x}", slot
            found = cursor.set_range(INDEX.pack(engine, 255, 0))

    def bound_to(self, claimant: int) -> list[Session]:
        """The sessions, admitted or waiting, of the producers that are bound to a claim."""
        rows = self.rows.under("claimants", claimant)
        found = (self._at(data[0], data[1:]) for key, data in rows if key)
        return [session for session in found if session is not None]

    def topics_of(self, engine: str) -> Iterator[int]:
        """The topics that an engine's sessions hold or await, one by one."""
        for _, data in self.rows.under("engines", int(engine, 16)):
            with contextlib.suppress(LedgerCorruptedError):
                _, place = self.rows.decode("engines", _unpack_index, data)
                yield u64(place[: U64.size])

    def of_engine(self, engine: str, consequence: str, waiters: bool = True) -> list[Session]:
        """An engine's sessions, those that hold a topic first; without those that wait, unless
        `waiters`. One whose row is damaged is left out, and logged with the consequence."""
        found: list[Session] = []
        for key, data in self.rows.under("engines", int(engine, 16)):
            if key[0] != HOLDER and not waiters:
                break
            try:
                _, place = self.rows.decode("engines", _unpack_index, data)
                session = self._at(key[0], place)
            except LedgerCorruptedError as error:
                report_damaged(self.rows.path, error, consequence)
                continue
            if session is not None:
                found.append(session)
        return found

    def _at(self, kind: int, place: bytes) -> Session | None:
        """The session with this key in the table of its kind."""
        return self.rows.find("holders" if kind == HOLDER else "queue", place, unpack_session)


def _unpack_index(data: bytes) -> tuple[int, bytes]:
    """The slot and the key of a session, of a row of the table `engines`."""
    slot, place = SLOT.unpack_from(data)[0], data[SLOT.size :]
    if len(place) not in (PAIR.size, PLACE.size):
        raise ValueError(f"no key has {len(place)} bytes")
    return slot, place


NOT_LISTED = "one topic is not listed"
NO_GROUP = "one reader group is not listed"
NO_CLAIM = "one claim is not listed"
COUNTED_ANEW = "the entries in its segment are counted anew"
NOT_EVICTED = "its session is not evicted"
NOT_COUNTED = "changes of owner are counted from 0 again"
NOT_NOTIFIED = "one session does not hear of a change"
NOT_DELETED = "the messages of one topic are not deleted"
NOT_TRIMMED = "one topic is not trimmed"


class NotificationTable:
    """Notifications of engines about changes of ownership."""

    __slots__ = ("rows", "to_notify")

    def __init__(self, rows: Rows, to_notify: set[int]) -> None:
        self.rows, self.to_notify = rows, to_notify

    def post(self, session: Session | Claimant, kind: str, *details: Any) -> None:
        """Notify the session's engine, once this transaction is durable."""
        key = PAIR.pack(int(session.engine, 16), self.rows.next_id(b"mail"))
        self.rows.put("mail", key, msgpack.packb([kind, session.id, *details]))
        self.to_notify.add(session.slot)

    def read(self, engine: str, after: int) -> list[tuple[int, list[Any]]]:
        """(number, [kind, session, ...]) of an engine's notifications behind number `after`. One
        whose row is damaged is left out, and logged: the others concern other sessions."""
        rows = self.rows.under("mail", int(engine, 16), U64.pack(after + 1))
        return list(_undamaged(self.rows, "mail", msgpack.unpackb, rows, NOT_NOTIFIED))

    def engines(self) -> Iterator[str]:
        """The engines that have notifications, dead or alive."""
        cursor = self.rows.cursor("mail")
        found = cursor.first()
        while found:
            box, _ = PAIR.unpack(cursor.key())
            yield f"{box:016x}"
            found = cursor.set_range(PAIR.pack(box, 2**64 - 1))

    def drop(self, engine: str, up_to: int) -> None:
        """Delete an engine's notifications up to a number."""
        cursor = self.rows.cursor("mail")
        box = int(engine, 16)
        while cursor.set_range(PAIR.pack(box, 0)):
            owner, number = PAIR.unpack(cursor.key())
            if owner != box or number > up_to:
                break
            self.rows.delete("mail", cursor.key())


class ClaimTable:
    """Claims of resources, and the claim sessions that have them (rules F1-F5)."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def claim(self, group: str, resource: str) -> tuple[int, int]:
        """(last generation or 0, claimant or 0) of a resource."""
        return self.rows.find("claims", claim_key(group, resource), PAIR.unpack) or (0, 0)

    def put_claim(self, group: str, resource: str, generation: int, claimant: int) -> None:
        """Write what `claim` reads: no row for a resource whose generations begin anew."""
        key = claim_key(group, resource)
        if generation or claimant:
            self.rows.put("claims", key, PAIR.pack(generation, claimant))
        else:
            self.rows.delete("claims", key)

    def claimant(self, claimant: int) -> Claimant | None:
        """A claim session; None if it was revoked or released."""
        return self.rows.find_kept("claimants", U64.pack(claimant), _unpack_claimant)

    def put_claimant(self, claimant: Claimant) -> None:
        """Register a claim session."""
        row = msgpack.packb(claimant)
        self.rows.put("claimants", U64.pack(claimant.id), row)

    def claimants(self, readers: bool = False) -> Iterator[Claimant]:
        """All claim sessions, in the order in which they were made, dead or alive; `readers`: those
        of groups' readers. A damaged one is left out, and logged."""
        found = (
            (key, data)
            for key, data in self.rows.cursor("claimants")
            # A row of a reader ends with msgpack's True: to decode all of them would take long.
            if len(key) == U64.size and not (readers and data[-1:] != bytes([MSGPACK_TRUE]))
        )
        for _, claimant in _undamaged(self.rows, "claimants", _unpack_claimant, found, NO_CLAIM):
            yield claimant

    def drop_claimant(self, claimant: int) -> None:
        """Remove a claim session."""
        self.rows.delete("claimants", U64.pack(claimant))


class TransferTable:
    """Hand-overs of topics, and of single shared producers."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def get(self, topic: int) -> Transfer | None:
        """The topic's hand-over, in progress or abandoned."""
        return self.rows.find("transfers", U64.pack(topic), _unpack_transfer)

    def put(self, transfer: Transfer) -> None:
        """Write what `transfer` reads."""
        self.rows.put("transfers", U64.pack(transfer.topic), _pack_transfer(transfer))

    def drop(self, topic: int) -> None:
        """Delete a hand-over that has ended."""
        self.rows.delete("transfers", U64.pack(topic))

    def seat(self, topic: int, session: int) -> Transfer | None:
        """The hand-over of one shared producer's session (see steps.py)."""
        return self.rows.find("transfers", PAIR.pack(topic, session), _unpack_transfer)

    def seats(self, topic: int) -> Iterator[tuple[int, Transfer]]:
        """(session, hand-over) of every shared producer of a topic that is handed over
        separately."""
        for key, data in self.rows.under("transfers", topic):
            if key:
                yield u64(key), self.rows.decode("transfers", _unpack_transfer, data)

    def put_seat(self, session: int, seat: Transfer) -> None:
        """Write what `seat` reads."""
        self.rows.put("transfers", PAIR.pack(seat.topic, session), _pack_transfer(seat))

    def drop_seat(self, topic: int, session: int) -> None:
        """Delete the hand-over of this session."""
        self.rows.delete("transfers", PAIR.pack(topic, session))


def queue_key(session: Session) -> bytes:
    """A key in the order of rule D1: priority, then creation, then the random tie-breaker."""
    return PLACE.pack(
        session.topic, HIGHEST_PRIORITY - session.priority, session.created, session.tie, session.id
    )


def claim_key(group: str, resource: str) -> bytes:
    """A key that is unique for each pair of names."""
    prefix = group.encode()
    return bytes([len(prefix)]) + prefix + resource.encode()


MSGPACK_TRUE = 0xC3


def _unpack_claimant(data: bytes) -> Claimant:
    claimant = Claimant(*msgpack.unpackb(data))
    if not (
        type(claimant.id) is type(claimant.slot) is int and isinstance(claimant.generations, dict)
    ):
        raise TypeError("a field has another type")
    return claimant


def _pack_transfer(transfer: Transfer) -> bytes:
    # Without groups, earlier versions can read the row.
    packed: bytes = msgpack.packb(transfer if transfer.groups else transfer[:-1])
    return packed


def _unpack_transfer(data: bytes) -> Transfer:
    transfer = Transfer(*msgpack.unpackb(data))
    return transfer._replace(groups=tuple(transfer.groups)) if transfer.groups else transfer


# ---- maintenance -----------------------------------------------------------------------


INSTANT = struct.Struct(">16sQ")
MAKER = struct.Struct(">HQ")


class ViewTable:
    """Compacted views and snapshots, complete or in the making."""

    __slots__ = ("_deletions", "rows")

    def __init__(self, rows: Rows, deletions: DeletionTable) -> None:
        self.rows, self._deletions = rows, deletions

    def view(self, topic: int) -> View | None:
        """The topic's compacted view, if there is one."""
        return self.rows.find("views", U64.pack(topic), _unpack_view)

    def check_making(self, view: View) -> None:
        """EngineClosedError unless the engine that makes this view is still open: after its close,
        other engines delete the view."""
        row = self.rows.get("trash", U64.pack(view.id))
        if row is None or len(row) != MAKER.size:
            raise EngineClosedError("the engine was closed while it compacted, or took a snapshot")

    def put_view(self, topic: int, view: View, count: int, deleted_to: int) -> None:
        """Make this complete view of `count` messages the topic's, in place of the last one.
        `deleted_to`: what that function will return."""
        self._put("views", topic, view, self.view(topic), count)
        self.rows.put("meta", DELETED_TO + U64.pack(view.id), U64.pack(deleted_to))

    def deleted_to(self, view: View) -> int:
        """The offset after the last message that has removed keys from a compacted view, or from
        those it was made of; 0 if there was none. The horizon, if an earlier version made it."""
        found = self.rows.find("meta", DELETED_TO + U64.pack(view.id), u64)
        return view.horizon if found is None else found

    def snapshot(self, topic: int) -> View | None:
        """The newest snapshot of the topic's state, if there is one."""
        return self.rows.find("snapshots", U64.pack(topic), _unpack_view)

    def put_snapshot(self, topic: int, snapshot: View, count: int) -> None:
        """Make this complete snapshot of `count` items the topic's, in place of the last one."""
        self._put("snapshots", topic, snapshot, self.snapshot(topic), count)

    def _put(self, table: str, topic: int, view: View, former: View | None, count: int) -> None:
        if former is not None:
            self._discard(former)
        self.rows.delete("trash", U64.pack(view.id))
        self.rows.put(table, U64.pack(topic), PAIR.pack(view.id, view.horizon))
        self.rows.put("meta", ITEMS + U64.pack(view.id), U64.pack(count))

    def _discard(self, view: View) -> None:
        self._deletions.add(view.id)
        self.rows.delete("meta", ITEMS + U64.pack(view.id))
        self.rows.delete("meta", DELETED_TO + U64.pack(view.id))

    def count(self, view: View) -> int | None:
        """How many messages a view or snapshot has, to detect missing ones, which offsets cannot
        show. None if an earlier version made it."""
        return self.rows.find("meta", ITEMS + U64.pack(view.id), u64)

    def drop(self, topic: int) -> None:
        """Drop view, snapshot and kind of a deleted topic."""
        self.rows.delete("meta", KIND + U64.pack(topic))
        for table, found in (("views", self.view(topic)), ("snapshots", self.snapshot(topic))):
            if found is not None:
                self.rows.delete(table, U64.pack(topic))
                self._discard(found)

    def begin(self, view: int, slot: int, engine: str) -> None:
        """Record that an engine begins to make a view, which is deleted if the engine dies."""
        maker = MAKER.pack(slot, int(engine, 16))
        self.rows.put("trash", U64.pack(view), maker)

    def unfinished(self) -> Iterator[tuple[int, int, str]]:
        """(view, slot, engine) of all incomplete views; their engines may be dead."""
        for key, value in self.rows.cursor("trash"):
            if len(value) == MAKER.size:
                slot, engine = MAKER.unpack(value)
                yield u64(key), slot, f"{engine:016x}"


class DeletionTable:
    """Pending deletions: rows of deleted topics, and trimmed entries."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def add(self, topic: int) -> None:
        """Mark a deleted topic's rows for deletion."""
        self.rows.put("trash", U64.pack(topic), b"")
        for what in (PRIORITIES, ANNOUNCED, TIMES, OVERDUE, COMPRESSION):
            self.rows.delete("meta", what + U64.pack(topic))

    def add_before(self, topic: int, offset: int) -> None:
        """Mark a topic's entries that end before an offset for deletion."""
        self.rows.put("trash", U64.pack(topic), U64.pack(offset))

    def has(self, topic: int) -> bool:
        """Are rows of this topic still to be deleted?"""
        return self.rows.get("trash", U64.pack(topic)) is not None

    def all(self) -> dict[int, int | None]:
        """{topic: the offset before which its entries are to be deleted, or None: all of it}. A
        damaged row is left out, and logged."""
        rows = (row for row in self.rows.cursor("trash") if len(row[1]) != MAKER.size)
        return dict(_undamaged(self.rows, "trash", _unpack_deletion, rows, NOT_DELETED))

    def remove(self, topic: int, before: int | None) -> None:
        """Remove what `all` returned, which is deleted now; keep what was added since."""
        value = b"" if before is None else U64.pack(before)
        if self.rows.get("trash", U64.pack(topic)) == value:
            self.rows.delete("trash", U64.pack(topic))


class CompressionTable:
    """The compression settings of topics. A topic without the flag COMPRESSED_TOPIC has no row."""

    __slots__ = ("_topics", "rows")

    def __init__(self, rows: Rows, topics: TopicTable) -> None:
        self.rows, self._topics = rows, topics

    def get(self, row: TopicRow) -> tuple[str | None, int]:
        """(setting, the offset before which entries were compressed again) of a topic.
        LedgerCorruptedError if its row is damaged."""
        if not row.flags & _core.COMPRESSED_TOPIC:
            return None, 0
        data = self.rows.get("meta", COMPRESSION + U64.pack(row.id))
        found = None if data is None else _known_compression(data)
        if data is not None and found is None:
            raise LedgerCorruptedError(
                f"{self.rows.path}: how topic {row.name!r} compresses its messages cannot be read: "
                "the row is damaged, or of a later version. Set it again: topic.compression(...)",
                topic=row.name,
            )
        return found or (None, 0)

    def intact(self, row: TopicRow) -> str | None:
        """The topic's setting. None if its row is damaged, which is logged, but must stop neither a
        checkpoint nor an append."""
        try:
            return self.get(row)[0]
        except LedgerCorruptedError as error:
            logs.emit(
                log, logs.SETTING_DAMAGED, ledger=self.rows.path, topic=row.name, reason=str(error)
            )
            return None

    def put(self, row: TopicRow, setting: str | None, again: int = 0) -> None:
        """Write what `get` reads; the topic's row, too, if its flag changes."""
        key, flags = COMPRESSION + U64.pack(row.id), row.flags
        if setting is None:
            self.rows.delete("meta", key)
            row.flags &= ~_core.COMPRESSED_TOPIC
        else:
            self.rows.put("meta", key, msgpack.packb([setting, again]))
            row.flags |= _core.COMPRESSED_TOPIC
        if row.flags != flags:
            self._topics.put(row)

    def all(self) -> dict[int, str]:
        """{topic: setting} of the topics that have one, without those whose rows are damaged."""
        settings: dict[int, str] = {}
        cursor = self.rows.cursor("meta")
        if cursor.set_range(COMPRESSION):
            for key, data in cursor:
                if not key.startswith(COMPRESSION):
                    break
                found = _known_compression(data)
                if found is not None and len(key) == len(COMPRESSION) + U64.size:
                    settings[u64(key[len(COMPRESSION) :])] = found[0]
        return settings

    def check_libraries(self) -> None:
        """MissingLibraryError if this process lacks what a topic needs for a checkpoint."""
        for topic, setting in self.all().items():
            row = self._topics.intact(topic, "whether it is compressed is not known")
            if row is not None:
                compression.check_setting(setting, row.name)

    def compressed(self, row: TopicRow, entry: bytes) -> bytes:
        """A new entry of this topic, compressed by the topic's setting."""
        setting = self.intact(row)
        if setting is None:
            return entry
        return compression.compressed(entry, compression.NEW[setting], row.name)


def _known_compression(data: bytes) -> tuple[str, int] | None:
    """A row's contents; None if it is damaged, or of a later version."""
    try:
        setting, again = msgpack.unpackb(data)
        known = setting in compression.NEW and isinstance(again, int) and again >= 0
    except (ValueError, TypeError):
        return None
    return (setting, again) if known else None


class ChangeCounts(NamedTuple):
    """How many changes of owner there were since the ledger was created."""

    hand_overs: int = 0
    evictions: int = 0
    fencings: int = 0


COUNTED = {  # (kind, reason) of an event: the field that counts it
    ("grant", "hand-over"): 0,
    ("evict", "dead"): 1,
    ("evict", "hung"): 1,
    ("evict", "fenced"): 2,
    ("evict", "late"): 2,
}
CHANGE_COUNTS = struct.Struct(">3Q")


class ChangeTable:
    """Counts changes of owner, in the transactions that make them."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def counts(self) -> ChangeCounts:
        """All until now; earlier versions did not count."""
        try:
            found = self.rows.find("meta", CHANGES, CHANGE_COUNTS.unpack)
        except LedgerCorruptedError as error:
            report_damaged(self.rows.path, error, NOT_COUNTED)
            found = None
        return ChangeCounts(*(found or ()))

    def count(self, events: Iterable[Event]) -> None:
        """Count these."""
        found = [COUNTED.get((event.kind, event.reason)) for event in events if event.topic]
        if any(field is not None for field in found):
            counts = (n + found.count(field) for field, n in enumerate(self.counts()))
            self.rows.put("meta", CHANGES, CHANGE_COUNTS.pack(*counts))


class RetentionTable:
    """The retention settings of topics, and the times since which messages are overdue."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def all(self) -> dict[int, tuple[float | None, int | None]]:
        """{topic: (max_age in seconds, max_bytes)} of the topics with a retention. A damaged row is
        left out, and logged."""
        rows = self.rows.cursor("retention")
        return dict(_undamaged(self.rows, "retention", _unpack_limits, rows, NOT_TRIMMED))

    def get(self, topic: int) -> tuple[float | None, int | None]:
        """A topic's (max_age in seconds, max_bytes); (None, None) if it has no retention."""
        return self.rows.find("retention", U64.pack(topic), _unpack_limits) or (None, None)

    def keep(self, topic: int) -> Literal["keys"] | None:
        """What stays readable of the messages that are removed; None: nothing."""
        return self.rows.find("retention", U64.pack(topic), _unpack_keep)

    def put(
        self,
        topic: int,
        max_age: float | None,
        max_bytes: int | None,
        keep: Literal["keys"] | None = None,
    ) -> None:
        """Write what `get` and `keep` read."""
        if max_age is None and max_bytes is None and keep is None:
            self.rows.delete("retention", U64.pack(topic))
            return
        # An earlier version cannot read the third field: it applies no retention to the topic.
        row = msgpack.packb([max_age, max_bytes] if keep is None else [max_age, max_bytes, keep])
        self.rows.put("retention", U64.pack(topic), row)

    def overdue(self, topic: int) -> tuple[bytes, int] | None:
        """Since when messages of the topic are overdue (see retention.py): a boot id, and ns of the
        monotonic clock of that boot. None if none are."""
        row = self.rows.get("meta", OVERDUE + U64.pack(topic))
        if row is None or len(row) != INSTANT.size:
            return None
        boot, since = INSTANT.unpack(row)
        return boot, since

    def put_overdue(self, topic: int, since: tuple[bytes, int] | None) -> None:
        """Write what `overdue` reads."""
        key = OVERDUE + U64.pack(topic)
        if since is None:
            self.rows.delete("meta", key)
        else:
            self.rows.put("meta", key, INSTANT.pack(*since))


def _unpack_view(data: bytes) -> View:
    return View(*PAIR.unpack(data))


def _undamaged(
    rows: Rows,
    table: str,
    decode: Callable[[bytes], Decoded],
    found: Iterable[tuple[bytes, bytes]],
    consequence: str,
) -> Iterator[tuple[int, Decoded]]:
    """The numbers and decoded data of these rows, which concern different topics or sessions: one
    that is damaged is left out, and logged with the consequence."""
    for key, data in found:
        try:
            yield rows.decode(table, u64, key), rows.decode(table, decode, data)
        except LedgerCorruptedError as error:
            report_damaged(rows.path, error, consequence)


def _unpack_deletion(data: bytes) -> int | None:
    return u64(data) if data else None


def _unpack_limits(data: bytes) -> tuple[float | None, int | None]:
    max_age, max_bytes, *_ = msgpack.unpackb(data)
    if not all(limit is None or isinstance(limit, int | float) for limit in (max_age, max_bytes)):
        raise TypeError("its limits are no numbers")
    return max_age, max_bytes


def _unpack_keep(data: bytes) -> Literal["keys"] | None:
    _, _, *keep = msgpack.unpackb(data)
    return keep[0] if keep else None


# ---- a check of all rows -----------------------------------------------------------------


# How rows are decoded. Entries, and the rows of topics and views, are checked with their topic.
DECODERS: Mapping[str, Callable[[bytes], object]] = {
    "names": u64,
    "producers": _unpack_producer,
    "holders": unpack_session,
    "queue": unpack_session,
    "engines": _unpack_index,
    "mail": msgpack.unpackb,
    "trash": lambda data: MAKER.unpack(data) if len(data) == MAKER.size else _unpack_deletion(data),
    "segments": PAIR.unpack,
    "claims": PAIR.unpack,
    "transfers": _unpack_transfer,
    CURSORS: u64,
    "retention": lambda data: (_unpack_limits(data), _unpack_keep(data)),
    "fences": u64,
    "batches": _unpack_batch,
}
# Those of the table `meta`, by the beginnings of their keys.
META_DECODERS: Mapping[bytes, Callable[[bytes], object]] = {
    **dict.fromkeys((b"topic", b"session", b"claim", b"mail", b"segment", b"batch"), u64),
    LAST_ENDED: u64,
    LAST_LISTED: u64,
    LARGE_BYTES: PAIR.unpack,
    LISTED: u64,
    KIND: msgpack.unpackb,
    PRIORITIES: KNOWN.unpack,
    ANNOUNCED: _unpack_announcement,
    ITEMS: u64,
    DELETED_TO: u64,
    DEAD: u64,
    VOID: u64,
    OVERDUE: INSTANT.unpack,
    CHANGES: CHANGE_COUNTS.unpack,
}


def damaged_rows(rows: Rows) -> Iterator[tuple[str, bytes, LedgerCorruptedError]]:
    """(table, key, error) of each row that cannot be decoded, in all these tables."""
    for table in (*DECODERS, "claimants", "meta"):
        for key, data in rows.cursor(table):
            try:
                rows.decode(table, _decoder(table, key), data)
                if table == "names" or (table == "meta" and key.startswith(LISTED)):
                    rows.decode(table, bytes.decode, key)
            except LedgerCorruptedError as error:
                yield table, key, error


def _decoder(table: str, key: bytes) -> Callable[[bytes], object]:
    if table == "claimants":  # claim sessions, and what is bound to them
        return _unpack_claimant if len(key) == U64.size else _unpack_bound
    if table == "meta":
        return next((each for start, each in META_DECODERS.items() if key.startswith(start)), bytes)
    return DECODERS[table]


def _unpack_bound(data: bytes) -> tuple[int, bytes]:
    if data[:1] not in (bytes([HOLDER]), bytes([WAITER])):
        raise ValueError(f"there is no kind {data[:1]!r}")
    return _unpack_index(SLOT.pack(0) + data[1:])


# ---- all of them -----------------------------------------------------------------------


class Tables:
    """Typed access within one transaction.

    `to_notify` gathers the slots of engines, and `announce` the topics whose readers, to be woken
    once the transaction is durable. `rows` are the tables' bytes, `large` the entries in segments.
    The others are groups of tables; those that few transactions use are made at their first use.
    """

    def __init__(
        self,
        txn: lmdb.Transaction[bytes],
        databases: dict[str, Any],
        path: str,
        segments: Segments,
        journal: _core.Journal | None = None,
        room: Callable[[Rows], RoomLeft] = lambda rows: FAR,
    ) -> None:
        self.rows = Rows(txn, databases, path)
        # Lets nobody append to a topic; False if nobody could anyway. None: others may append.
        self.fence: Callable[[int], bool] | None = None
        self._room = room
        self.large = LargeEntries(self.rows, segments)
        self.journal = AppliedJournal(self.rows, journal)
        self.to_notify: set[int] = set()
        self.announce: set[int] = set()
        self.events: list[Event] = []  # to be written to `__events__` (rule E5)
        self.committed: list[Event] = []  # the same, once they are written
        # How many messages of producers, and their bytes.
        self.appended: tuple[int, int] | None = None
        # For the end of the transaction: the anchors of roles to be ended, and the topics whose
        # waiters are to be promoted (see role_rows.py).
        self.role_ends: dict[int, tuple[str, str, int]] = {}
        self.to_promote: set[int] = set()
        # Is there no request for a role in the whole ledger? None: not known yet.
        self.without_roles: bool | None = None
        self.topics = TopicTable(self.rows)
        self.entries = EntryTable(self.rows, self.large, self.journal)
        self.sessions = SessionTable(self.rows)

    @functools.cached_property
    def producers(self) -> ProducerTable:
        """Producer names."""
        return ProducerTable(self.rows, self.journal)

    @functools.cached_property
    def cursors(self) -> CursorTable:
        """The committed positions of reader groups."""
        return CursorTable(self.rows, self.journal, self.topics)

    @functools.cached_property
    def announcements(self) -> AnnouncementTable:
        """What owners have announced."""
        return AnnouncementTable(self.rows, self.journal, self.topics)

    def apply_notes(self, rows: list[tuple[str, bytes, bytes, int]]) -> None:
        """Write the rows that the journal has noted, (table, key, data, position), of each row the
        last one. The tables have all notes then."""
        last = {(table, key): data for table, key, data, _ in self.journal.counting(rows)}
        for (table, key), data in last.items():
            (self.cursors if table == CURSORS else self.announcements).apply(key, data)
        self.journal.end_voids()

    @functools.cached_property
    def once(self) -> OnceTable:
        """Batches that are appended once."""
        return OnceTable(self.rows)

    @functools.cached_property
    def notifications(self) -> NotificationTable:
        """The notifications."""
        return NotificationTable(self.rows, self.to_notify)

    @functools.cached_property
    def claims(self) -> ClaimTable:
        """Claims and claim sessions."""
        return ClaimTable(self.rows)

    @functools.cached_property
    def transfers(self) -> TransferTable:
        """Hand-overs."""
        return TransferTable(self.rows)

    @functools.cached_property
    def views(self) -> ViewTable:
        """Compacted views and snapshots."""
        return ViewTable(self.rows, self.deletions)

    @functools.cached_property
    def deletions(self) -> DeletionTable:
        """Pending deletions."""
        return DeletionTable(self.rows)

    @functools.cached_property
    def compression(self) -> CompressionTable:
        """How topics compress their entries."""
        return CompressionTable(self.rows, self.topics)

    @functools.cached_property
    def retention(self) -> RetentionTable:
        """How long topics keep their messages."""
        return RetentionTable(self.rows)

    def room(self) -> float:
        """How many bytes more the tables may take; below 0, they take some of the reserve."""
        return self._room(self.rows).left

    def is_kept(self) -> bool:
        """Do open reads keep so much of the reserve that the rest is for changes of ownership?"""
        return self._room(self.rows).kept

    def check_reserve(self) -> None:
        """LedgerFullError unless the transaction, which changes no owner, leaves enough of the
        reserve to those that do, while a long read keeps LMDB from using its pages again (H2)."""
        if self.rows.changed and self.is_kept():
            raise lmdb.MapFullError("check_reserve")

    def check_room(self) -> None:
        """LedgerFullError if messages that the transaction has written do not fit: the reserve is
        for changes of ownership, trims and deletions (rule H2)."""
        if self.entries.added and self.room() + self.large.excess < 0:
            raise lmdb.MapFullError("check_room")  # its translation names a read that is the cause

    def include_journal(self) -> None:
        """Include the journal's frames in `last_sequence` and `latest`. Exclude appends."""
        if self.journal.file is not None:
            self.journal.see(self.journal.file.tail)

    def close_to_appends(self, topic: int) -> None:
        """In a fencing transaction, let nobody append to the topic until its end, and include what
        the journal has of it."""
        if self.fence is not None and self.fence(topic):
            self.include_journal()

    def last_sequence(self, topic: int, name: str) -> int:
        """The last sequence id of a producer name; -1 if it has none."""
        self.close_to_appends(topic)
        journaled = self.journal.sequences().get((topic, name), -1)
        return max(self.producers.get(topic, name)[0], journaled)

    def latest(self, topic: int, since: int = 0) -> TopicRow:
        """The topic's current row, with the journal's frames behind the position `since`."""
        self.close_to_appends(topic)
        row = self.topics.get(topic)
        end = self.journal.end_of(topic, since)
        if end is not None:
            row.next_offset = max(row.next_offset, end[0])
            row.last_publish_time = max(row.last_publish_time, end[1])
        return row


# ---- who may write ---------------------------------------------------------------------


def fenced(tables: Tables, row: _core.TopicRow, session: Session) -> ProducerFencedError:
    """The error of a session that may no longer write."""
    if session.bound_to and tables.claims.claimant(session.bound_to) is None:
        return revoked(row, session)
    return fenced_by(row, session, owner_of(tables, row))


def owner_of(tables: Tables, row: _core.TopicRow) -> Session | None:
    """The session that owns the topic; its engine may be dead."""
    return tables.sessions.holder(row.id, row.owner) if row.owner else None


def existing(row: _core.TopicRow) -> _core.TopicRow:
    """The row; TopicNotFoundError if its topic was deleted."""
    if row.flags & _core.DELETED:
        raise _deleted(row)
    return row


def _deleted(row: _core.TopicRow) -> TopicNotFoundError:
    return TopicNotFoundError(f"topic {row.name!r} was deleted")


def unusable(row: _core.TopicRow) -> ExclusiveLogError | None:
    """The error of a change to a topic that was deleted or terminated."""
    if row.flags & _core.DELETED:
        return _deleted(row)
    if row.flags & _core.TERMINATED:
        return refusals.terminated(f"topic {row.name!r}", row.next_offset)
    return None


def check_usable(row: _core.TopicRow) -> _core.TopicRow:
    """The row, unless its topic was deleted or terminated."""
    error = unusable(row)
    if error is not None:
        raise error
    return row


def check_may_write(tables: Tables, row: _core.TopicRow, session: Session) -> None:
    """Raise unless session and epoch may write to the topic, whose row the append will change."""
    check_usable(row)
    if session.exclusive:
        valid = row.admits(session.id, session.epoch)
    else:
        valid = tables.sessions.holds(session.topic, session.id)
    if not valid:
        raise fenced(tables, row, session)
