"""The ledger's tables: keys, rows, and typed access to them within one transaction.

```text
table      key                                              value
meta       b"format" | b"topic", b"session", b"mail", ...   msgpack | last id given (u64)
           b"journal"                                       generation, position applied (u64)
names      topic name, UTF-8                                topic id (u64)
topics     topic id                                         topic row (_core.TopicRow)
entries    topic id, last offset of the entry               entry (_core.Entry), or where it is
segments   segment id                                       bytes in use, entries that live (u64)
producers  topic id, producer name                          last sequence id, live session
holders    topic id, session                                msgpack of access.Session
queue      topic id, order of rule D1, session              msgpack of access.Session
engines    engine id, 0 holder | 1 waiter, session          slot (u16), key in holders or queue
mail       engine id, number                                msgpack [kind, session, ...]
trash      topic id                                         empty: it was deleted, its rows are
                                                            still to go; or an offset: those of
                                                            the entries before it; or (slot,
                                                            engine): a view that is being made
views      topic id                                         id and horizon of its compacted view
snapshots  topic id                                         id of a state's snapshot, and the
                                                            offset that it goes up to
claims     group (with its length in front), resource       last generation, claimant or 0 (u64)
claimants  claim session                                    msgpack of Claimant
transfers  topic id                                         msgpack of access.Transfer
cursors    topic id, group                                  the offset a reader group goes on at
retention  topic id                                         msgpack [max_age (s), max_bytes]
fences     topic id, token of a run                         the epoch it writes under (see once.py)
batches    topic id, writer                                 the number of its last batch (i64)
```

Numbers in keys are big-endian, so that LMDB's order is theirs. Entries are keyed by their
last offset: the entry that holds an offset is then the first at or after it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from exclusivelog import _core
from exclusivelog._core import TopicRow
from exclusivelog.access import Session, Transfer
from exclusivelog.errors import EngineClosedError, LedgerCorruptedError, LedgerFullError
from exclusivelog.segments import (
    LARGE_ENTRY,
    REFERENCE,
    REFERENCE_MAGIC,
    SEGMENT_BYTES,
    Segments,
    is_reference,
    space,
)

if TYPE_CHECKING:
    import lmdb

    from exclusivelog.events import Event

log = logging.getLogger("exclusivelog")

NAMES = (
    "meta", "names", "topics", "entries", "producers", "holders", "queue", "engines", "mail",
    "trash", "segments", "claims", "claimants", "transfers", "cursors", "retention",
    "views", "snapshots", "fences", "batches",
)  # fmt: skip
FORMAT = 3
# They go with it, key by key.
OF_A_TOPIC = ("entries", "producers", "cursors", "retention", "batches")
# LMDB gives a large value whole pages, less 16 bytes: this one takes 16 of them.
PACKED_ENTRY = 16 * 4096 - 16
SMALL_ENTRY = 16 << 10  # is filled up, however little there is to add
LARGE_PACKED_ENTRY = 1 << 20
COLLECTED_BYTES = 256 << 10  # that are copied out of the journal at once

U64 = struct.Struct(">Q")
PAIR = struct.Struct(">QQ")
PLACE = struct.Struct(">QQQIQ")
INDEX = struct.Struct(">QBQ")
PRODUCER = struct.Struct(">qQ")
BATCH = struct.Struct(">q")
SLOT = struct.Struct(">H")
MAKER = struct.Struct(">HQ")
HIGHEST_PRIORITY = 2**63 - 1
HOLDER, WAITER = 0, 1

Row = TypeVar("Row")


SESSION_FIELDS = [field.name for field in fields(Session)]
TRANSFER_FIELDS = [field.name for field in fields(Transfer)]


def pack_session(session: Session) -> bytes:
    """A session as msgpack, fields in order."""
    packed: bytes = msgpack.packb([getattr(session, name) for name in SESSION_FIELDS])
    return packed


def unpack_session(data: bytes) -> Session:
    """The session that `pack_session` packed."""
    return Session(*msgpack.unpackb(data))


def queue_key(session: Session) -> bytes:
    """Sorts as rule D1 says: priority, then creation, then the random tie."""
    return PLACE.pack(
        session.topic, HIGHEST_PRIORITY - session.priority, session.created, session.tie, session.id
    )


@dataclass(frozen=True, slots=True)
class Claimant:
    """One claim session (rules F1-F5). `since` is in ms since 1970."""

    id: int
    engine: str
    slot: int
    pid: int
    engine_name: str
    group: str
    generations: dict[str, int]
    since: int


@dataclass(frozen=True, slots=True)
class View:
    """A topic's compacted view: its entries stand under `id`, and reach up to `horizon`."""

    id: int
    horizon: int


CLAIMANT_FIELDS = [field.name for field in fields(Claimant)]


def claim_key(group: str, resource: str) -> bytes:
    """No two pairs of names have the same one."""
    prefix = group.encode()
    return bytes([len(prefix)]) + prefix + resource.encode()


class Tables:
    """Typed access within one transaction.

    `ring` and `announce` gather whom to wake once the transaction is durable, `emptied` the
    segments that can then be removed. `visible` is the position up to which the journal is to
    be read, too; `applied` the one up to which it is in the tables.
    """

    def __init__(
        self, txn: lmdb.Transaction[bytes], databases: dict[str, Any], path: str,
        segments: Segments, journal: _core.Journal | None = None,
    ) -> None:  # fmt: skip
        self._journal = journal
        self.visible = 0
        self._txn = txn
        self._db = databases
        self._path = path
        self._segments = segments
        self._grown: dict[int, int] = {}  # {segment: where it ended before}
        self.ring: set[int] = set()
        self.announce: set[int] = set()
        self.emptied: set[int] = set()
        self.events: list[Event] = []  # what is written about this transaction (rule E5)
        self.scanned = 0
        self.generation, self.applied = self._applied()

    def _decode(self, table: str, decode: Callable[[bytes], Row], data: bytes) -> Row:
        try:
            return decode(data)
        except (struct.error, ValueError, TypeError) as error:
            raise LedgerCorruptedError(
                f"{self._path}: a row of the table {table!r} is damaged: {error}"
            ) from None

    # ---- meta ----------------------------------------------------------------------------

    def next_id(self, counter: bytes) -> int:
        """A number never given before."""
        data = self._txn.get(counter, db=self._db["meta"])
        number = 1 if data is None else U64.unpack(data)[0] + 1
        self._txn.put(counter, U64.pack(number), db=self._db["meta"])
        return number

    # ---- journal -------------------------------------------------------------------------

    def _applied(self) -> tuple[int, int]:
        if self._journal is None:
            return 0, 0
        data = self._txn.get(b"journal", db=self._db["meta"])
        return (0, 0) if data is None else self._decode("meta", PAIR.unpack, data)

    def see(self, visible: int | None) -> None:
        """Read the journal, too, up to this position (None: as far as it goes)."""
        if visible is None and self._journal is not None:
            visible = self._journal.live_end(self.applied, self.generation)
        self.visible = visible or 0

    def begin_generation(self, generation: int, position: int) -> None:
        """The journal goes on with a new generation: all that it had is here."""
        self.generation, self.applied = generation, position
        self._txn.put(b"journal", PAIR.pack(generation, position), db=self._db["meta"])

    def apply(self, stop: int) -> None:
        """Take over what the journal has before the position `stop`."""
        assert self._journal is not None
        if stop <= self.applied:
            return
        with self._journal.gather(self.applied, stop, self.generation) as bundles:
            for bundle in bundles:
                self._apply_to(bundle)
        self.applied = stop
        self._txn.put(b"journal", PAIR.pack(self.generation, stop), db=self._db["meta"])

    def _apply_to(self, bundle: _core.Bundle) -> None:
        row = self.topic(bundle.topic)
        if row.flags & _core.DELETED:
            return
        if bundle.base_offset != row.next_offset:
            log.error(
                "%s: the journal goes on at offset %d of topic %r, which ends at %d",
                self._path, bundle.base_offset, row.name, row.next_offset,
            )  # fmt: skip
        before = self._entry_to_fill(row, bundle)
        most = PACKED_ENTRY if bundle.nbytes < LARGE_ENTRY else LARGE_PACKED_ENTRY
        for last, entry in bundle.pack(before, most):
            self.put_entry(row.id, last, entry)
        for packed_name, sequence in bundle.producers().items():
            name = packed_name.decode()
            last, session = self.producer(row.id, name)
            self.put_producer(row.id, name, max(last, sequence), session)
        row.next_offset = bundle.next_offset
        row.last_publish_time = max(row.last_publish_time, bundle.publish_time)
        self.put_topic(row)
        self.announce.add(row.id)

    def _entry_to_fill(self, row: TopicRow, bundle: _core.Bundle) -> _core.Entry | None:
        """The topic's last entry, taken out, if it is so small that more should go into it."""
        if row.next_offset == row.first_offset:
            return None
        key = PAIR.pack(row.id, row.next_offset - 1)
        data = self._txn.get(key, db=self._db["entries"])
        if data is None or is_reference(data) or len(data) >= PACKED_ENTRY:
            return None
        if len(data) > max(SMALL_ENTRY, 4 * bundle.nbytes):
            return None  # not worth writing again
        try:
            entry = _core.Entry(data)
        except ValueError:
            return None  # it stays where it is, to be named
        self._txn.delete(key, db=self._db["entries"])
        return entry

    def latest(self, topic: int, since: int = 0) -> TopicRow:
        """The topic's row as it is with what the journal has behind the position `since`."""
        row = self.topic(topic)
        start = max(self.applied, since)
        if self._journal is not None and start < self.visible:
            end = self._journal.end_of(topic, start, self.visible, self.generation)
            if end is not None:
                row.next_offset = max(row.next_offset, end[0])
                row.last_publish_time = max(row.last_publish_time, end[1])
        return row

    # ---- topics --------------------------------------------------------------------------

    def topic_id(self, name: str) -> int | None:
        """The id of the topic of that name, also of a deleted one."""
        data = self._txn.get(name.encode(), db=self._db["names"])
        return None if data is None else int(self._decode("names", U64.unpack, data)[0])

    def topic(self, topic: int) -> TopicRow:
        """The topic's row; it must exist."""
        data = self._txn.get(U64.pack(topic), db=self._db["topics"])
        if data is None:
            raise LedgerCorruptedError(f"{self._path}: the row of topic {topic} is missing")
        return self._decode("topics", TopicRow.unpack, data)

    def put_topic(self, row: TopicRow) -> None:
        """Write the row back."""
        self._txn.put(U64.pack(row.id), row.pack(), db=self._db["topics"])

    def find_topic(self, name: str) -> TopicRow | None:
        """The row of the topic of that name, unless it was deleted."""
        topic = self.topic_id(name)
        row = None if topic is None else self.topic(topic)
        return None if row is None or row.flags & _core.DELETED else row

    def new_topic(self, name: str) -> TopicRow:
        """Make a topic of that name; there must be none."""
        row = TopicRow()
        row.id = self.next_id(b"topic")
        row.name = name
        former = self.topic_id(name)
        if former is not None:
            row.epoch = self.topic(former).epoch  # no epoch is ever used twice (rule B1)
            row.flags = _core.REBORN
            self._move_fences(former, row.id)  # and who was fenced stays so (rule B4)
        self.put_topic(row)
        self._txn.put(row.name.encode(), U64.pack(row.id), db=self._db["names"])
        return row

    def topics(self) -> list[tuple[str, int]]:
        """(name, id) of all topics in the order of their names, deleted ones too."""
        return [
            (key.decode(), self._decode("names", U64.unpack, data)[0])
            for key, data in self._txn.cursor(db=self._db["names"])
        ]

    # ---- entries -------------------------------------------------------------------------

    def put_entry(self, topic: int, last_offset: int, entry: bytes) -> None:
        """Append an entry behind all others of its topic."""
        key = PAIR.pack(topic, last_offset)
        row = entry if len(entry) < LARGE_ENTRY else self._put_large(entry)
        if not self._txn.put(key, row, overwrite=False, db=self._db["entries"]):
            raise LedgerCorruptedError(
                f"{self._path}: topic {topic} has an entry at offset {last_offset} already, "
                "behind its own end"
            )

    def entries(self, topic: int, offset: int, since: int = 0) -> Iterator[tuple[int, bytes]]:
        """(last offset, row) of the entries from the one that holds `offset` on, those in the
        journal last; `load` makes an entry of a row.

        What the journal has of it before the position `since` is passed over; `scanned` then
        says how far it was read.
        """
        cursor = self._txn.cursor(db=self._db["entries"])
        if cursor.set_range(PAIR.pack(topic, offset)):
            for key, data in cursor:
                owner, last = PAIR.unpack(key)
                if owner != topic:
                    break
                yield last, data
                offset = last + 1
        yield from self._frames(topic, offset, max(self.applied, since))

    def _frames(self, topic: int, offset: int, start: int) -> Iterator[tuple[int, bytes]]:
        self.scanned = start
        while self._journal is not None and self.scanned < self.visible:
            found = self._journal.collect(
                topic, offset, self.scanned, self.visible, self.generation, COLLECTED_BYTES
            )
            for last, entry, position in found:
                yield last, entry
                self.scanned = position  # only now has it been taken
            if not found:
                self.scanned = self.visible

    def load(self, row: bytes) -> bytes | memoryview:
        """The bytes of the entry that a row is, or refers to; ValueError if they are not there."""
        return self._segments.load(row)

    def last_offset_before(self, topic: int, offset: int) -> int | None:
        """The last offset of the entry that ends before `offset`."""
        frames = [last for last, _ in self._frames(topic, 0, self.applied) if last < offset]
        if frames:
            return frames[-1]
        cursor = self._txn.cursor(db=self._db["entries"])
        found = cursor.set_range(PAIR.pack(topic, offset))
        if not (cursor.prev() if found else cursor.last()):
            return None
        owner, last = PAIR.unpack(cursor.key())
        return last if owner == topic else None

    def drop_rows(self, topic: int, most: int, before: int | None = None) -> int:
        """Delete up to `most` rows of a deleted topic, or (`before`) of its entries that end
        before an offset; how many went."""
        count = 0
        prefix = U64.pack(topic)
        for table in OF_A_TOPIC if before is None else ("entries",):
            cursor = self._txn.cursor(db=self._db[table])
            while count < most and cursor.set_range(prefix) and cursor.key().startswith(prefix):
                if table == "entries":
                    last = PAIR.unpack(cursor.key())[1]
                    if before is not None and last >= before:
                        break
                    self._free(topic, last, cursor.value())
                cursor.delete()
                count += 1
        return count

    def newest_entries(self, row: TopicRow) -> Iterator[tuple[int, int]]:
        """(bytes, first offset) of the topic's entries, the newest first."""
        cursor = self._txn.cursor(db=self._db["entries"])
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

    # ---- segments ------------------------------------------------------------------------

    def segments(self) -> dict[int, tuple[int, int]]:
        """{segment: (bytes in use, entries that live)}."""
        return {
            U64.unpack(key)[0]: self._decode("segments", PAIR.unpack, row)
            for key, row in self._txn.cursor(db=self._db["segments"])
        }

    def large_bytes(self) -> int:
        """How long all segments are together."""
        return self._large()[0]

    def _large(self) -> tuple[int, int]:
        # The limit is the highest that anybody has opened the ledger with, as LMDB's own is.
        data = self._txn.get(b"large", db=self._db["meta"])
        total, limit = (0, 0) if data is None else self._decode("meta", PAIR.unpack, data)
        return total, max(limit, self._segments.limit)

    def _add_large_bytes(self, count: int) -> None:
        total, limit = self._large()
        if count > 0 and total + count > limit:
            raise LedgerFullError(
                f"{self._path}: large entries take {total} bytes of {limit}, another one does not "
                "fit; open the ledger with a larger map_size, or trim it"
            )
        self._txn.put(b"large", PAIR.pack(total + count, limit), db=self._db["meta"])

    def _put_large(self, entry: bytes) -> bytes:
        segment, end, live = self._newest_segment()
        stop = space(end) + len(entry)
        self._add_large_bytes(stop - end)
        self._grown.setdefault(segment, end)
        position = self._segments.append(segment, end, entry)
        self._txn.put(U64.pack(segment), PAIR.pack(stop, live + 1), db=self._db["segments"])
        return REFERENCE.pack(REFERENCE_MAGIC, segment, position, len(entry))

    def _newest_segment(self) -> tuple[int, int, int]:
        cursor = self._txn.cursor(db=self._db["segments"])
        if cursor.last():
            end, live = self._decode("segments", PAIR.unpack, cursor.value())
            # Short ones where there is little room: only a whole one gives it back.
            if end < min(SEGMENT_BYTES, self._large()[1] // 8):
                return U64.unpack(cursor.key())[0], end, live
        self.finish()  # it grows no more
        return self.next_id(b"segment"), 0, 0

    def _free(self, topic: int, last: int, row: bytes) -> None:
        if not self._refers_to_its_own(topic, last, row):
            return
        key = REFERENCE.unpack(row)[1].to_bytes(8, "big")
        data = self._txn.get(key, db=self._db["segments"])
        if data is None:
            return
        end, live = self._decode("segments", PAIR.unpack, data)
        if live > 1:
            self._txn.put(key, PAIR.pack(end, live - 1), db=self._db["segments"])
        else:
            self._txn.delete(key, db=self._db["segments"])
            self._add_large_bytes(-end)
            self.emptied.add(U64.unpack(key)[0])

    def _refers_to_its_own(self, topic: int, last: int, row: bytes) -> bool:
        # A damaged row must not cost another topic its segment: rather some space is lost.
        if not is_reference(row):
            return False
        try:
            if _core.ends_as(self.load(row), topic, last):
                return True
        except ValueError as error:
            log.debug("%s: %s", self._path, error)
        log.warning("%s: a damaged entry of topic %d leaves its space behind", self._path, topic)
        return False

    def finish(self) -> None:
        """What is in segments must be durable before the rows that refer to it."""
        if self._grown:
            self._segments.sync(max(self._grown))  # one that is full was synced before

    def undo(self) -> None:
        """The transaction is given up."""
        for segment, end in self._grown.items():
            with contextlib.suppress(OSError):  # the next one overwrites it
                self._segments.cut(segment, end)

    # ---- producers -----------------------------------------------------------------------

    def producer(self, topic: int, name: str) -> tuple[int, int]:
        """(last sequence id or -1, live session or 0) of a producer name (rules A6, G2)."""
        data = self._txn.get(U64.pack(topic) + name.encode(), db=self._db["producers"])
        return (-1, 0) if data is None else self._decode("producers", PRODUCER.unpack, data)

    def unused_name(self, topic: int, name: str) -> str:
        """The name, or one like it, such that nobody had it before."""
        found = name
        while self.producer(topic, found) != (-1, 0):
            found = f"{name}-{secrets.token_hex(3)}"
        return found

    def put_producer(self, topic: int, name: str, sequence: int, session: int) -> None:
        """Write what `producer` reads."""
        key = U64.pack(topic) + name.encode()
        self._txn.put(key, PRODUCER.pack(sequence, session), db=self._db["producers"])

    def free_name(self, session: Session) -> None:
        """The session's name may be registered again; its last sequence id stays."""
        sequence, holder = self.producer(session.topic, session.name)
        if holder != session.id:
            return
        if sequence >= 0:
            self.put_producer(session.topic, session.name, sequence, 0)
        else:  # it never sent anything: nothing is left of it (rule A2)
            key = U64.pack(session.topic) + session.name.encode()
            self._txn.delete(key, db=self._db["producers"])

    # ---- sessions ------------------------------------------------------------------------

    def holder(self, topic: int, session: int) -> Session | None:
        """An admitted session."""
        data = self._txn.get(PAIR.pack(topic, session), db=self._db["holders"])
        return None if data is None else self._decode("holders", unpack_session, data)

    def holds(self, topic: int, session: int) -> bool:
        """Is this session admitted?"""
        return self._txn.get(PAIR.pack(topic, session), db=self._db["holders"]) is not None

    def holders(self, topic: int) -> list[Session]:
        """All admitted sessions of a topic."""
        return list(self._sessions("holders", topic))

    def put_holder(self, session: Session) -> None:
        """Register an admitted session."""
        key = PAIR.pack(session.topic, session.id)
        self._txn.put(key, pack_session(session), db=self._db["holders"])
        self._index(session, HOLDER, key)

    def drop_holder(self, session: Session) -> None:
        """Remove an admitted session."""
        self._txn.delete(PAIR.pack(session.topic, session.id), db=self._db["holders"])
        self._unindex(session, HOLDER)

    def waiters(self, topic: int) -> Iterator[Session]:
        """The topic's queue, best first (rule D1). Lazy; do not change it while walking."""
        return self._sessions("queue", topic)

    def waiting(self, session: Session) -> bool:
        """Is this session still in the queue?"""
        return self._txn.get(queue_key(session), db=self._db["queue"]) is not None

    def put_waiter(self, session: Session) -> None:
        """Put a session into the queue."""
        key = queue_key(session)
        self._txn.put(key, pack_session(session), db=self._db["queue"])
        self._index(session, WAITER, key)

    def drop_waiter(self, session: Session) -> bool:
        """Take a session out of the queue; False if it was not there."""
        self._unindex(session, WAITER)
        return self._txn.delete(queue_key(session), db=self._db["queue"])

    def _sessions(self, table: str, topic: int) -> Iterator[Session]:
        cursor = self._txn.cursor(db=self._db[table])
        prefix = U64.pack(topic)
        if cursor.set_range(prefix):
            for key, data in cursor:
                if not key.startswith(prefix):
                    return
                yield self._decode(table, unpack_session, data)

    # ---- engines -------------------------------------------------------------------------

    def _index(self, session: Session, kind: int, key: bytes) -> None:
        index = INDEX.pack(int(session.engine, 16), kind, session.id)
        self._txn.put(index, SLOT.pack(session.slot) + key, db=self._db["engines"])

    def _unindex(self, session: Session, kind: int) -> None:
        index = INDEX.pack(int(session.engine, 16), kind, session.id)
        self._txn.delete(index, db=self._db["engines"])

    def engines(self) -> Iterator[tuple[str, int]]:
        """(engine id, slot) of every engine that has sessions here, dead or alive."""
        cursor = self._txn.cursor(db=self._db["engines"])
        found = cursor.first()
        while found:
            engine = INDEX.unpack(cursor.key())[0]
            yield f"{engine:016x}", SLOT.unpack(cursor.value()[:2])[0]
            found = cursor.set_range(INDEX.pack(engine, 255, 0))

    def sessions_of(self, engine: str) -> list[Session]:
        """An engine's sessions, those that hold a topic first."""
        cursor = self._txn.cursor(db=self._db["engines"])
        prefix = U64.pack(int(engine, 16))
        found: list[Session] = []
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not key.startswith(prefix):
                    break
                table = "holders" if key[8] == HOLDER else "queue"
                data = self._txn.get(value[2:], db=self._db[table])
                if data is not None:
                    found.append(self._decode(table, unpack_session, data))
        return found

    def topics_of(self, engine: str) -> Iterator[int]:
        """The topics that an engine's sessions hold or await, one by one."""
        cursor = self._txn.cursor(db=self._db["engines"])
        prefix = U64.pack(int(engine, 16))
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not key.startswith(prefix):
                    break
                yield U64.unpack(value[2:10])[0]

    # ---- mail ----------------------------------------------------------------------------

    def post(self, session: Session, kind: str, *details: Any) -> None:
        """Tell the session's engine what became of it, once this is durable."""
        key = PAIR.pack(int(session.engine, 16), self.next_id(b"mail"))
        self._txn.put(key, msgpack.packb([kind, session.id, *details]), db=self._db["mail"])
        self.ring.add(session.slot)

    def mail(self, engine: str, after: int) -> list[tuple[int, list[Any]]]:
        """(number, [kind, session, ...]) of an engine's mail behind number `after`."""
        cursor = self._txn.cursor(db=self._db["mail"])
        box = int(engine, 16)
        found = []
        if cursor.set_range(PAIR.pack(box, after + 1)):
            for key, data in cursor:
                owner, number = PAIR.unpack(key)
                if owner != box:
                    break
                found.append((number, self._decode("mail", msgpack.unpackb, data)))
        return found

    def drop_mail(self, engine: str, up_to: int) -> None:
        """Delete an engine's mail up to a number."""
        cursor = self._txn.cursor(db=self._db["mail"])
        box = int(engine, 16)
        while cursor.set_range(PAIR.pack(box, 0)):
            owner, number = PAIR.unpack(cursor.key())
            if owner != box or number > up_to:
                break
            cursor.delete()

    # ---- what is to go -------------------------------------------------------------------

    def discard(self, topic: int) -> None:
        """Mark a deleted topic's rows as still to go."""
        self._txn.put(U64.pack(topic), b"", db=self._db["trash"])

    def discard_before(self, topic: int, offset: int) -> None:
        """Mark a topic's entries that end before an offset as still to go."""
        self._txn.put(U64.pack(topic), U64.pack(offset), db=self._db["trash"])

    def discarded(self) -> dict[int, int | None]:
        """{topic: the offset before which its entries are to go, or None: all of it}."""
        return {
            U64.unpack(key)[0]: U64.unpack(value)[0] if value else None
            for key, value in self._txn.cursor(db=self._db["trash"])
            if len(value) != MAKER.size
        }

    def empty(self, topic: int, before: int | None) -> None:
        """What `discarded` said has gone, unless more has come since."""
        value = b"" if before is None else U64.pack(before)
        if self._txn.get(U64.pack(topic), db=self._db["trash"]) == value:
            self._txn.delete(U64.pack(topic), db=self._db["trash"])

    # ---- compacted views -----------------------------------------------------------------

    def view(self, topic: int) -> View | None:
        """The topic's compacted view, if there is one."""
        data = self._txn.get(U64.pack(topic), db=self._db["views"])
        return None if data is None else View(*self._decode("views", PAIR.unpack, data))

    def check_making(self, view: View) -> None:
        """EngineClosedError unless the engine that began to make this view has it still: once
        that is closed, others clear away what it leaves."""
        row = self._txn.get(U64.pack(view.id), db=self._db["trash"])
        if row is None or len(row) != MAKER.size:
            raise EngineClosedError("the engine was closed while it compacted, or took a snapshot")

    def put_view(self, topic: int, view: View) -> None:
        """This view is whole, and the topic's from now on."""
        self._txn.delete(U64.pack(view.id), db=self._db["trash"])
        self._txn.put(U64.pack(topic), PAIR.pack(view.id, view.horizon), db=self._db["views"])

    def snapshot(self, topic: int) -> View | None:
        """Where the newest snapshot of the topic's state is, if there is one."""
        data = self._txn.get(U64.pack(topic), db=self._db["snapshots"])
        return None if data is None else View(*self._decode("snapshots", PAIR.unpack, data))

    def put_snapshot(self, topic: int, snapshot: View) -> None:
        """This snapshot is whole, and replaces the last one."""
        former = self.snapshot(topic)
        if former is not None:
            self.discard(former.id)
        self._txn.delete(U64.pack(snapshot.id), db=self._db["trash"])
        row = PAIR.pack(snapshot.id, snapshot.horizon)
        self._txn.put(U64.pack(topic), row, db=self._db["snapshots"])

    def drop_views(self, topic: int) -> None:
        """The topic is gone, and its view and snapshot with it."""
        for table, found in (("views", self.view(topic)), ("snapshots", self.snapshot(topic))):
            if found is not None:
                self._txn.delete(U64.pack(topic), db=self._db[table])
                self.discard(found.id)

    def begin_view(self, view: int, slot: int, engine: str) -> None:
        """An engine begins to make a view; it is to go should the engine die."""
        maker = MAKER.pack(slot, int(engine, 16))
        self._txn.put(U64.pack(view), maker, db=self._db["trash"])

    def unfinished_views(self) -> Iterator[tuple[int, int, str]]:
        """(view, slot, engine) of all that are being made, or were when their maker died."""
        for key, value in self._txn.cursor(db=self._db["trash"]):
            if len(value) == MAKER.size:
                slot, engine = MAKER.unpack(value)
                yield U64.unpack(key)[0], slot, f"{engine:016x}"

    # ---- retention -----------------------------------------------------------------------

    def retentions(self) -> dict[int, tuple[float | None, int | None]]:
        """{topic: (max_age in seconds, max_bytes)} of the topics that do not keep all."""
        return {
            U64.unpack(key)[0]: tuple(self._decode("retention", msgpack.unpackb, row))
            for key, row in self._txn.cursor(db=self._db["retention"])
        }

    def retention(self, topic: int) -> tuple[float | None, int | None]:
        """One topic's; (None, None) where it keeps all."""
        row = self._txn.get(U64.pack(topic), db=self._db["retention"])
        return (
            (None, None) if row is None else tuple(self._decode("retention", msgpack.unpackb, row))
        )

    def put_retention(self, topic: int, max_age: float | None, max_bytes: int | None) -> None:
        """Write what `retentions` reads."""
        if max_age is None and max_bytes is None:
            self._txn.delete(U64.pack(topic), db=self._db["retention"])
            return
        row = msgpack.packb([max_age, max_bytes])
        self._txn.put(U64.pack(topic), row, db=self._db["retention"])

    # ---- claims --------------------------------------------------------------------------

    def claim(self, group: str, resource: str) -> tuple[int, int]:
        """(last generation or 0, claimant or 0) of a resource."""
        data = self._txn.get(claim_key(group, resource), db=self._db["claims"])
        return (0, 0) if data is None else self._decode("claims", PAIR.unpack, data)

    def put_claim(self, group: str, resource: str, generation: int, claimant: int) -> None:
        """Write what `claim` reads."""
        row = PAIR.pack(generation, claimant)
        self._txn.put(claim_key(group, resource), row, db=self._db["claims"])

    def claimant(self, claimant: int) -> Claimant | None:
        """A claim session, if it was not severed or released."""
        data = self._txn.get(U64.pack(claimant), db=self._db["claimants"])
        return None if data is None else self._decode("claimants", _unpack_claimant, data)

    def put_claimant(self, claimant: Claimant) -> None:
        """Register a claim session."""
        row = msgpack.packb([getattr(claimant, name) for name in CLAIMANT_FIELDS])
        self._txn.put(U64.pack(claimant.id), row, db=self._db["claimants"])

    def drop_claimant(self, claimant: int) -> None:
        """Remove a claim session."""
        self._txn.delete(U64.pack(claimant), db=self._db["claimants"])

    # ---- hand-overs ----------------------------------------------------------------------

    def transfer(self, topic: int) -> Transfer | None:
        """The topic's hand-over that is under way, or was given up half-way."""
        data = self._txn.get(U64.pack(topic), db=self._db["transfers"])
        return None if data is None else self._decode("transfers", _unpack_transfer, data)

    def put_transfer(self, transfer: Transfer) -> None:
        """Write what `transfer` reads."""
        row = msgpack.packb([getattr(transfer, name) for name in TRANSFER_FIELDS])
        self._txn.put(U64.pack(transfer.topic), row, db=self._db["transfers"])

    def drop_transfer(self, topic: int) -> None:
        """The hand-over has ended, one way or another."""
        self._txn.delete(U64.pack(topic), db=self._db["transfers"])

    # ---- cursors -------------------------------------------------------------------------

    def cursor(self, topic: int, group: str) -> int | None:
        """The offset at which a reader group goes on; None if it has not committed yet."""
        data = self._txn.get(U64.pack(topic) + group.encode(), db=self._db["cursors"])
        return None if data is None else int(self._decode("cursors", U64.unpack, data)[0])

    def put_cursor(self, topic: int, group: str, offset: int) -> None:
        """Write what `cursor` reads."""
        key = U64.pack(topic) + group.encode()
        self._txn.put(key, U64.pack(offset), db=self._db["cursors"])

    # ---- batches that are appended once --------------------------------------------------

    def fence(self, topic: int, token: str) -> int | None:
        """The epoch under which the run with this token writes; None if it is unknown."""
        data = self._txn.get(U64.pack(topic) + token.encode(), db=self._db["fences"])
        return None if data is None else int(self._decode("fences", U64.unpack, data)[0])

    def put_fence(self, topic: int, token: str, epoch: int) -> None:
        """Write what `fence` reads."""
        key = U64.pack(topic) + token.encode()
        self._txn.put(key, U64.pack(epoch), db=self._db["fences"])

    def _move_fences(self, former: int, topic: int) -> None:
        prefix = U64.pack(former)
        cursor = self._txn.cursor(db=self._db["fences"])
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            key, data = cursor.item()
            self._txn.put(U64.pack(topic) + key[len(prefix) :], data, db=self._db["fences"])
            self._txn.delete(key, db=self._db["fences"])
            found = cursor.set_range(prefix)

    def batch(self, topic: int, writer: str) -> int | None:
        """The number of the last batch of a writer; None if there was none."""
        data = self._txn.get(U64.pack(topic) + writer.encode(), db=self._db["batches"])
        return None if data is None else int(self._decode("batches", BATCH.unpack, data)[0])

    def put_batch(self, topic: int, writer: str, number: int) -> None:
        """Write what `batch` reads."""
        key = U64.pack(topic) + writer.encode()
        self._txn.put(key, BATCH.pack(number), db=self._db["batches"])

    def batches(self, topic: int) -> list[tuple[str, int]]:
        """(writer, number of its last batch) of all that have appended batches to a topic."""
        cursor = self._txn.cursor(db=self._db["batches"])
        prefix = U64.pack(topic)
        found = []
        if cursor.set_range(prefix):
            for key, data in cursor:
                if not key.startswith(prefix):
                    break
                number = self._decode("batches", BATCH.unpack, data)[0]
                found.append((key[len(prefix) :].decode(), number))
        return found

    def producers(self, topic: int) -> list[tuple[str, int, int]]:
        """(name, last sequence id, live session or 0) of all that have written to a topic."""
        cursor = self._txn.cursor(db=self._db["producers"])
        prefix = U64.pack(topic)
        found = []
        if cursor.set_range(prefix):
            for key, data in cursor:
                if not key.startswith(prefix):
                    break
                row = self._decode("producers", PRODUCER.unpack, data)
                found.append((key[len(prefix) :].decode(), *row))
        return found


def _unpack_claimant(data: bytes) -> Claimant:
    return Claimant(*msgpack.unpackb(data))


def _unpack_transfer(data: bytes) -> Transfer:
    return Transfer(*msgpack.unpackb(data))
