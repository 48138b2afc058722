"""Tables about what is appended: topics, entries, producer names, cursors."""

from __future__ import annotations

import contextlib
import logging
import secrets
import struct
from collections.abc import Callable, Iterator

import msgpack

from exclusivelog import _core
from exclusivelog._core import TopicRow
from exclusivelog.errors import LedgerCorruptedError, LedgerFullError
from exclusivelog.local.records import (
    Session,
)
from exclusivelog.local.storage.rows import KIND, PAIR, TIMES, U64, Rows, u64
from exclusivelog.local.storage.segments import (
    LARGE_ENTRY,
    REFERENCE,
    REFERENCE_MAGIC,
    Segments,
    has_room,
    is_reference,
    space,
)
from exclusivelog.local.storage.time_marks import (
    Mark,
    is_ahead,
    is_marked,
    pack_marks,
    unpack_marks,
    wall_ms,
    with_mark,
    without_trimmed,
)

log = logging.getLogger("exclusivelog")
# They go with it, key by key.
OF_A_TOPIC = ("entries", "producers", "cursors", "retention", "batches")
COLLECTED_BYTES = 256 << 10  # that are copied out of the journal at once
PRODUCER = struct.Struct(">qQ")
BATCH = struct.Struct(">qQ")
OLD_BATCH = struct.Struct(">q")
MOST_FENCES = 4096  # of a topic: the runs that are remembered as superseded
MOST_WRITERS = 4096  # of a topic: the jobs whose last number is remembered
APPLIED = struct.Struct(">QQQQ")
Kind = dict[str, str | None]  # of the state that a topic holds


class TopicTable:
    """Topics: their names and rows, their time marks, and what state they hold."""

    __slots__ = ("_in_hand", "rows")

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._in_hand: dict[int, TopicRow] = {}

    @contextlib.contextmanager
    def in_hand(self, row: TopicRow | None) -> Iterator[dict[int, TopicRow]]:
        """Rows that are being changed, and are written back later by who changes them: this one,
        too, for as long. Nobody else may read them from the table meanwhile. By topic."""
        before, self._in_hand = self._in_hand, dict(self._in_hand)
        if row is not None:
            self._in_hand[row.id] = row
        try:
            yield self._in_hand
        finally:
            self._in_hand = before

    def id_of(self, name: str) -> int | None:
        """The id of the topic of that name, also of a deleted one."""
        return self.rows.find("names", name.encode(), u64)

    def get(self, topic: int) -> TopicRow:
        """The topic's row; it must exist."""
        row = self.rows.find("topics", U64.pack(topic), TopicRow.unpack)
        if row is None:
            raise LedgerCorruptedError(f"{self.rows.path}: the row of topic {topic} is missing")
        return row

    def sound(self, topic: int, consequence: str) -> TopicRow | None:
        """The topic's row; None where it is damaged, which is logged with its consequence. What
        is done for many topics in one transaction must not fail for all of them."""
        try:
            return self.get(topic)
        except LedgerCorruptedError as error:
            log.error("%s; %s", error, consequence)
            return None

    def put(self, row: TopicRow) -> None:
        """Write the row back."""
        self.rows.put("topics", U64.pack(row.id), row.pack())
        self.mark_time(row)

    def find(self, name: str) -> TopicRow | None:
        """The row of the topic of that name, unless it was deleted."""
        topic = self.id_of(name)
        row = None if topic is None else self.get(topic)
        return None if row is None or row.flags & _core.DELETED else row

    def create(self, name: str) -> TopicRow:
        """Make a topic of that name; there must be none."""
        row = TopicRow()
        row.id = self.rows.next_id(b"topic")
        row.name = name
        former = self.id_of(name)
        if former is not None:
            row.epoch = self.get(former).epoch  # no epoch is ever used twice (rule B1)
            row.flags = _core.RECREATED
            OnceTable(self.rows).move_fences(
                former, row.id
            )  # and who was fenced stays so (rule B4)
        self.put(row)
        self.rows.put("names", row.name.encode(), U64.pack(row.id))
        return row

    def all(self) -> list[tuple[str, int]]:
        """(name, id) of all topics in the order of their names, deleted ones too."""
        return [
            (key.decode(), self.rows.decode("names", u64, data))
            for key, data in self.rows.cursor("names")
        ]

    def marks(self, topic: int) -> list[Mark]:
        """The topic's time marks, in the order of their offsets."""
        return unpack_marks(self.rows.get("meta", TIMES + U64.pack(topic)))

    def lacks_mark(self, row: TopicRow) -> bool:
        """Are there messages ahead of the clock that no mark tells the age of?"""
        now = wall_ms()
        gone = row.flags & _core.DELETED or row.first_offset == row.next_offset
        if gone or not is_ahead(row.last_publish_time, now):
            return False
        return not is_marked(self.marks(row.id), row.next_offset, now)

    def mark_time(self, row: TopicRow) -> None:
        """Where the topic's publish times lie ahead of the clock: remember that its messages had
        been published by now."""
        if self.lacks_mark(row):
            marks = with_mark(self.marks(row.id), row.next_offset, wall_ms())
            self._put_marks(row.id, marks)

    def drop_marks(self, topic: int, before: int) -> None:
        """What stood before an offset is gone, and with it what marks said about it."""
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
        """What state the topic holds: {"holds": "map" or "state", and of a map the names of its
        serialisers}; {} where no one has written one."""
        return self.rows.find("meta", KIND + U64.pack(topic), msgpack.unpackb) or {}

    def put_kind(self, topic: int, kind: Kind) -> None:
        """Write what `kind` reads."""
        self.rows.put("meta", KIND + U64.pack(topic), msgpack.packb(kind))


class LargeEntries:
    """The large entries, within one transaction.

    `emptied` collects the segments that can be removed once the transaction is durable.
    """

    __slots__ = ("_grown", "_rows", "_segments", "emptied")

    def __init__(self, rows: Rows, segments: Segments) -> None:
        self._rows = rows
        self._segments = segments
        self._grown: dict[int, int] = {}  # {segment: where it ended before}
        self.emptied: set[int] = set()

    def segments(self) -> dict[int, tuple[int, int]]:
        """{segment: (committed end, number of live entries)}."""
        return {
            u64(key): self._rows.decode("segments", PAIR.unpack, row)
            for key, row in self._rows.cursor("segments")
        }

    def total_bytes(self) -> int:
        """The length of all segments together."""
        return self._total()[0]

    def load(self, row: bytes) -> bytes | memoryview:
        """The bytes of the entry that a row is, or refers to; ValueError if they are missing."""
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
        """Free the entry of this topic that `row` refers to, if it refers to one."""
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
        """Make entries durable, before the rows that refer to them."""
        if self._grown:
            self._segments.sync(max(self._grown))  # one that is full was synced before

    def undo(self) -> None:
        """Undo what the transaction has written."""
        for segment, end in self._grown.items():
            with contextlib.suppress(OSError):  # the next one overwrites it
                self._segments.cut(segment, end)

    def _total(self) -> tuple[int, int]:
        # The limit is the highest with which an engine has opened the ledger, as LMDB's own is.
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
            if has_room(end, self._total()[1]):
                return u64(cursor.key()), end, live
        self.sync()  # it takes no more entries
        return self._rows.next_id(b"segment"), 0, 0

    def _refers_to_its_own(self, topic: int, last_offset: int, row: bytes) -> bool:
        # A damaged row must not free another topic's segment: rather keep the space.
        if not is_reference(row):
            return False
        try:
            if _core.ends_as(self.load(row), topic, last_offset):
                return True
        except ValueError as error:
            log.debug("%s: %s", self._rows.path, error)
        log.warning(
            "%s: the space of a damaged entry of topic %d is not freed", self._rows.path, topic
        )
        return False


class EntryTable:
    """Entries: those in the tables, and behind them those in the journal."""

    __slots__ = ("_journal", "_large", "rows", "scanned")

    def __init__(self, rows: Rows, large: LargeEntries, journal: AppliedJournal) -> None:
        self.rows, self._large, self._journal = rows, large, journal
        self.scanned = 0  # how far `walk` has read the journal

    def put(self, topic: int, last_offset: int, entry: bytes) -> None:
        """Append an entry behind all others of its topic."""
        key = PAIR.pack(topic, last_offset)
        row = entry if len(entry) < LARGE_ENTRY else self._large.put(entry)
        if not self.rows.put("entries", key, row, overwrite=False):
            raise LedgerCorruptedError(
                f"{self.rows.path}: topic {topic} has an entry at offset {last_offset} already, "
                "behind its own end"
            )

    def walk(self, topic: int, offset: int, since: int = 0) -> Iterator[tuple[int, bytes]]:
        """(last offset, row) of the entries from the one that holds `offset` on, those in the
        journal last; `load` makes an entry of a row.

        What the journal has of it before the position `since` is passed over; `scanned` then
        says how far it was read.
        """
        for key, data in self.rows.under("entries", topic, U64.pack(offset)):
            last = u64(key)
            yield last, data
            offset = last + 1
        yield from self._frames(topic, offset, max(self._journal.applied, since))

    def at(self, topic: int, offset: int) -> tuple[int, bytes] | None:
        """(last offset, row) of the entry in the tables that holds `offset`, or of the next one."""
        cursor = self.rows.cursor("entries")
        if not cursor.set_range(PAIR.pack(topic, offset)):
            return None
        owner, last = PAIR.unpack(cursor.key())
        return (last, cursor.value()) if owner == topic else None

    def begin(self, row: TopicRow, last: int) -> int:
        """Where the entry in the tables with this last offset begins, by the one before it."""
        cursor = self.rows.cursor("entries")
        if cursor.set_range(PAIR.pack(row.id, last)) and cursor.prev():
            owner, before = PAIR.unpack(cursor.key())
            if owner == row.id:
                return int(before) + 1
        return row.first_offset

    def _frames(self, topic: int, offset: int, start: int) -> Iterator[tuple[int, bytes]]:
        journal, self.scanned = self._journal, start
        while journal.file is not None and self.scanned < journal.visible:
            found = journal.file.collect(
                topic, offset, self.scanned, journal.visible, journal.generation, COLLECTED_BYTES
            )
            for last, entry, position in found:
                yield last, entry
                self.scanned = position  # only now has it been taken
            if not found:
                self.scanned = journal.visible

    def load(self, row: bytes) -> bytes | memoryview:
        """The bytes of the entry that a row is, or refers to; ValueError if they are not there."""
        return self._large.load(row)

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
        """Delete up to `most` rows of a deleted topic, or (`before`) of its entries that end
        before an offset; how many went."""
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
                cursor.delete()
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


class ProducerTable:
    """Producer names: their last sequence ids, and who has them."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def get(self, topic: int, name: str) -> tuple[int, int]:
        """(last sequence id or -1, live session or 0) of a producer name (rules A6, G2)."""
        key = U64.pack(topic) + name.encode()
        return self.rows.find("producers", key, PRODUCER.unpack) or (-1, 0)

    def unused_name(self, topic: int, name: str) -> str:
        """The name, or one like it, such that nobody had it before."""
        found = name
        while self.get(topic, found) != (-1, 0):
            found = f"{name}-{secrets.token_hex(3)}"
        return found

    def put(self, topic: int, name: str, sequence: int, session: int) -> None:
        """Write what `producer` reads."""
        key = U64.pack(topic) + name.encode()
        self.rows.put("producers", key, PRODUCER.pack(sequence, session))

    def free(self, session: Session) -> None:
        """The session's name may be registered again; its last sequence id stays."""
        sequence, holder = self.get(session.topic, session.name)
        if holder != session.id:
            return
        if sequence >= 0:
            self.put(session.topic, session.name, sequence, 0)
        else:  # it never sent anything: nothing is left of it (rule A2)
            key = U64.pack(session.topic) + session.name.encode()
            self.rows.delete("producers", key)

    def all(self, topic: int) -> list[tuple[str, int, int]]:
        """(name, last sequence id, live session or 0) of all that have written to a topic."""
        return [
            (name.decode(), *self.rows.decode("producers", PRODUCER.unpack, data))
            for name, data in self.rows.under("producers", topic)
        ]


class CursorTable:
    """Where reader groups go on."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def get(self, topic: int, group: str) -> int | None:
        """The offset at which a reader group goes on; None if it has not committed yet."""
        return self.rows.find("cursors", U64.pack(topic) + group.encode(), u64)

    def all(self, topic: int) -> list[tuple[str, int]]:
        """(group, offset at which it goes on) of all that have committed on a topic."""
        return [
            (group.decode(), self.rows.decode("cursors", u64, data))
            for group, data in self.rows.under("cursors", topic)
        ]

    def put(self, topic: int, group: str, offset: int) -> None:
        """Write what `cursor` reads."""
        key = U64.pack(topic) + group.encode()
        self.rows.put("cursors", key, U64.pack(offset))


class OnceTable:
    """Batches that are appended once (see once.py): the runs that write them, and their numbers."""

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
        """Delete the oldest rows of a topic, unless there is room for one more: an eighth of
        them, so that they are looked through rarely."""
        rows = [
            (self.rows.decode(table, age, row), key) for key, row in self.rows.under(table, topic)
        ]
        if len(rows) < most:
            return
        for _, key in sorted(rows)[: len(rows) - most + most // 8 + 1]:
            self.rows.delete(table, U64.pack(topic) + key)

    def move_fences(self, former: int, topic: int) -> None:
        """A topic that was deleted is made anew: who was fenced there stays so (rule B4)."""
        for token, data in list(self.rows.under("fences", former)):
            self.rows.put("fences", U64.pack(topic) + token, data)
            self.rows.delete("fences", U64.pack(former) + token)

    def batch(self, topic: int, writer: str) -> int | None:
        """The number of the last batch of a writer; None if there was none."""
        return self.rows.find("batches", U64.pack(topic) + writer.encode(), _unpack_batch)

    def put_batch(self, topic: int, writer: str, number: int) -> None:
        """Write what `batch` reads. The `MOST_WRITERS` of a topic that came last are kept."""
        key = U64.pack(topic) + writer.encode()
        if self.rows.get("batches", key) is None:
            self._make_room("batches", topic, MOST_WRITERS, _age_of_batch)
        self.rows.put("batches", key, BATCH.pack(number, self.rows.next_id(b"batch")))

    def batches(self, topic: int) -> list[tuple[str, int]]:
        """(writer, number of its last batch) of all that have appended batches to a topic."""
        return [
            (writer.decode(), self.rows.decode("batches", _unpack_batch, data))
            for writer, data in self.rows.under("batches", topic)
        ]


class AppliedJournal:
    """The journal, as one transaction sees it.

    `applied` is the position up to which it is in the tables, `visible` the one up to which it is
    to be read, too; `file` is None where a ledger is read without its journal.
    """

    __slots__ = ("_mark", "_oldest", "_rows", "applied", "file", "generation", "visible")

    def __init__(self, rows: Rows, file: _core.Journal | None) -> None:
        self._rows, self.file = rows, file
        self.visible = 0
        self.generation, self.applied, self._mark, self._oldest = 0, 0, 0, 0
        if file is not None:
            self.generation, self.applied, self._mark, self._oldest = self._read()

    def _read(self) -> tuple[int, int, int, int]:
        return self._rows.find("meta", b"journal", _unpack_applied) or (0, 0, 0, 0)

    def _write(self) -> None:
        row = APPLIED.pack(self.generation, self.applied, self._mark, self._oldest)
        self._rows.put("meta", b"journal", row)

    def live_end(self) -> int:
        """How far the journal's frames can be trusted where nobody knows how far it came."""
        assert self.file is not None
        return self.file.live_end(self.applied, self.generation, self._mark, self._oldest)

    def mark(self, position: int, version: int) -> None:
        """From this position on, all frames that count will have this version, or a later one. What
        an appender left there that died before it had moved the tail is older, and is void: the
        topic may have gone on without it (rules B10, D8)."""
        if (position, version) != (self._mark, self._oldest):
            self._mark, self._oldest = position, version
            self._write()

    def see(self, visible: int | None) -> None:
        """Read the journal, too, up to this position (None: as far as it goes)."""
        if visible is None and self.file is not None:
            visible = self.live_end()
        self.visible = visible or 0

    def begin_generation(self, generation: int, position: int) -> None:
        """The journal goes on with a new generation: all that it had is here."""
        self.generation, self.applied = generation, position
        self._mark = self._oldest = 0  # of the frames that were before
        self._write()

    def record_generation(self) -> None:
        """Where nothing was to be recovered, opening a ledger gives the journal a new generation
        without a commit. The first one that changes anything records it: before anybody appends,
        as nobody may who was not let in by a commit."""
        if self.file is not None and self._rows.changed:
            generation = self.file.unrecorded_generation(self.generation, self.applied)
            if generation:
                self.begin_generation(generation, self.applied)

    def advance(self, stop: int, version: int | None) -> None:
        """The tables have all before the position `stop`. `version`: what is appended behind that
        has this one, or a later one (see `mark`)."""
        self.applied = stop
        if version is not None and stop >= self._mark:
            self._mark, self._oldest = stop, version
        self._write()

    def end_of(self, topic: int, since: int) -> tuple[int, int] | None:
        """(next offset, publish time) of what it has of a topic behind the position `since`."""
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
