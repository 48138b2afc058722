"""The ledger's tables: keys, rows, and typed access to them.

Also the fencing check, and the errors of a session that may not write.

```text
table      key                                              value
meta       b"format" | b"topic", b"session", b"mail", ...   msgpack | last id given (u64)
           b"journal"                                       generation, position applied, a mark and
                                                            the oldest version behind it (u64)
           b"times", topic id                               time marks (see records.py)
           b"overdue", topic id                             boot id, ns of the machine's monotonic
                                                            clock (see retention.py)
           b"kind", topic id                                msgpack: what state the topic holds
           b"announced", topic id                           msgpack: what its owner announced last
                                                            (see steps.py)
           b"priorities", topic id                          the best and the lowest priority of
                                                            its waiters so far (i64, rule D7)
           b"role ...", ...                                 of roles (see role_rows.py)
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
           claim session, session                           0 holder | 1 waiter, key in holders or
                                                            queue: a producer bound to the claim
transfers  topic id                                         msgpack of access.Transfer
           topic id, session                                the same, of one shared producer
cursors    topic id, group                                  the offset a reader group goes on at
retention  topic id                                         msgpack [max_age (s), max_bytes]
fences     topic id, token of a run                         the epoch it writes under (see once.py)
batches    topic id, writer                                 the number of its last batch (i64),
                                                            and a counter of when that was
```

Numbers in keys are big-endian, so that LMDB's order is theirs. Entries are keyed by their
last offset: the entry that holds an offset is then the first at or after it.
"""

from __future__ import annotations

import functools
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgpack

from exclusivelog import _core
from exclusivelog._core import TopicRow
from exclusivelog.errors import (
    EngineClosedError,
    LedgerCorruptedError,
    ProducerFencedError,
    ProducerRevokedError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.local.records import (
    ANNOUNCED,
    CLAIMANT_FIELDS,
    KIND,
    OVERDUE,
    PAIR,
    PRIORITIES,
    TIMES,
    U64,
    Claimant,
    Known,
    Rows,
    Session,
    Transfer,
    View,
    is_role,
    pack_session,
    u64,
    unpack_session,
    widened,
)
from exclusivelog.local.shm.lockfile import LockFile
from exclusivelog.local.storage.log_tables import (
    AppliedJournal,
    CursorTable,
    EntryTable,
    LargeEntries,
    OnceTable,
    ProducerTable,
    TopicTable,
)
from exclusivelog.local.storage.segments import LARGE_ENTRY, Segments, is_reference
from exclusivelog.types import PREFIX, AccessMode, OwnerInfo, WaiterInfo

if TYPE_CHECKING:
    import lmdb


Found = TypeVar("Found")


# ---- ownership -------------------------------------------------------------------------


log = logging.getLogger("exclusivelog")
PLACE = struct.Struct(">QQQIQ")
INDEX = struct.Struct(">QBQ")
SLOT = struct.Struct(">H")
KNOWN = struct.Struct(">qq")
HIGHEST_PRIORITY = 2**63 - 1
HOLDER, WAITER = 0, 1
TRANSFER_FIELDS = [field.name for field in fields(Transfer)]


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
        """(key, data) of the queue's rows from the topic's best waiter on, behind its last one
        those of other topics: what `admission.promote` walks."""
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
        """The best and the lowest priority of the topic's waiters so far; None before one of
        them has had it (rule D7)."""
        return self.rows.find("meta", PRIORITIES + U64.pack(topic), KNOWN.unpack)

    def learn(self, topic: int, *priorities: int) -> None:
        """Widen what `known` reads by these priorities, and by those of the queue."""
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
            yield f"{engine:016x}", SLOT.unpack(cursor.value()[:2])[0]
            found = cursor.set_range(INDEX.pack(engine, 255, 0))

    def bound_to(self, claimant: int) -> list[Session]:
        """The sessions, admitted or waiting, of the producers that are bound to a claim."""
        rows = self.rows.under("claimants", claimant)
        return self._found((value[0], value[1:]) for key, value in rows if key)

    def _found(self, places: Iterable[tuple[int, bytes]]) -> list[Session]:
        found: list[Session] = []
        for kind, key in places:
            table = "holders" if kind == HOLDER else "queue"
            data = self.rows.get(table, key)
            if data is not None:
                found.append(self.rows.decode(table, unpack_session, data))
        return found

    def topics_of(self, engine: str) -> Iterator[int]:
        """The topics that an engine's sessions hold or await, one by one."""
        for _, value in self.rows.under("engines", int(engine, 16)):
            yield u64(value[2:10])

    def of_engine(self, engine: str) -> list[Session]:
        """An engine's sessions, those that hold a topic first."""
        rows = self.rows.under("engines", int(engine, 16))
        return self._found((key[0], value[SLOT.size :]) for key, value in rows)


class NotificationTable:
    """What engines are told of changes of ownership."""

    __slots__ = ("ring", "rows")

    def __init__(self, rows: Rows, ring: set[int]) -> None:
        self.rows, self.ring = rows, ring

    def post(self, session: Session | Claimant, kind: str, *details: Any) -> None:
        """Tell the session's engine what became of it, once this is durable."""
        key = PAIR.pack(int(session.engine, 16), self.rows.next_id(b"mail"))
        self.rows.put("mail", key, msgpack.packb([kind, session.id, *details]))
        self.ring.add(session.slot)

    def read(self, engine: str, after: int) -> list[tuple[int, list[Any]]]:
        """(number, [kind, session, ...]) of an engine's mail behind number `after`."""
        rows = self.rows.under("mail", int(engine, 16), U64.pack(after + 1))
        return [(u64(key), self.rows.decode("mail", msgpack.unpackb, data)) for key, data in rows]

    def engines(self) -> Iterator[str]:
        """The engines that have mail, dead or alive."""
        cursor = self.rows.cursor("mail")
        found = cursor.first()
        while found:
            box, _ = PAIR.unpack(cursor.key())
            yield f"{box:016x}"
            found = cursor.set_range(PAIR.pack(box, 2**64 - 1))

    def drop(self, engine: str, up_to: int) -> None:
        """Delete an engine's mail up to a number."""
        cursor = self.rows.cursor("mail")
        box = int(engine, 16)
        while cursor.set_range(PAIR.pack(box, 0)):
            owner, number = PAIR.unpack(cursor.key())
            if owner != box or number > up_to:
                break
            cursor.delete()


class ClaimTable:
    """Claims of resources, and the claim sessions that have them (rules F1-F5)."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def claim(self, group: str, resource: str) -> tuple[int, int]:
        """(last generation or 0, claimant or 0) of a resource."""
        return self.rows.find("claims", claim_key(group, resource), PAIR.unpack) or (0, 0)

    def put_claim(self, group: str, resource: str, generation: int, claimant: int) -> None:
        """Write what `claim` reads."""
        row = PAIR.pack(generation, claimant)
        self.rows.put("claims", claim_key(group, resource), row)

    def claimant(self, claimant: int) -> Claimant | None:
        """A claim session, if it was not severed or released."""
        return self.rows.find("claimants", U64.pack(claimant), _unpack_claimant)

    def put_claimant(self, claimant: Claimant) -> None:
        """Register a claim session."""
        row = msgpack.packb([getattr(claimant, name) for name in CLAIMANT_FIELDS])
        self.rows.put("claimants", U64.pack(claimant.id), row)

    def claimants(self) -> Iterator[Claimant]:
        """All claim sessions, in the order in which they were made, dead or alive."""
        for key, data in self.rows.cursor("claimants"):
            if len(key) == U64.size:
                yield self.rows.decode("claimants", _unpack_claimant, data)

    def drop_claimant(self, claimant: int) -> None:
        """Remove a claim session."""
        self.rows.delete("claimants", U64.pack(claimant))


class TransferTable:
    """Hand-overs of topics, and of single shared producers."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def get(self, topic: int) -> Transfer | None:
        """The topic's hand-over that is under way, or was given up half-way."""
        return self.rows.find("transfers", U64.pack(topic), _unpack_transfer)

    def put(self, transfer: Transfer) -> None:
        """Write what `transfer` reads."""
        self.rows.put("transfers", U64.pack(transfer.topic), _pack_transfer(transfer))

    def drop(self, topic: int) -> None:
        """The hand-over has ended, one way or another."""
        self.rows.delete("transfers", U64.pack(topic))

    def seat(self, topic: int, session: int) -> Transfer | None:
        """The hand-over of one shared producer's session (see seats.py)."""
        return self.rows.find("transfers", PAIR.pack(topic, session), _unpack_transfer)

    def seats(self, topic: int) -> Iterator[tuple[int, Transfer]]:
        """(session, hand-over) of every shared producer of a topic that moves by itself."""
        for key, data in self.rows.under("transfers", topic):
            if key:
                yield u64(key), self.rows.decode("transfers", _unpack_transfer, data)

    def put_seat(self, session: int, seat: Transfer) -> None:
        """Write what `seat` reads."""
        self.rows.put("transfers", PAIR.pack(seat.topic, session), _pack_transfer(seat))

    def drop_seat(self, topic: int, session: int) -> None:
        """This session moves no longer."""
        self.rows.delete("transfers", PAIR.pack(topic, session))


def queue_key(session: Session) -> bytes:
    """Sorts as rule D1 says: priority, then creation, then the random tie."""
    return PLACE.pack(
        session.topic, HIGHEST_PRIORITY - session.priority, session.created, session.tie, session.id
    )


def claim_key(group: str, resource: str) -> bytes:
    """No two pairs of names have the same one."""
    prefix = group.encode()
    return bytes([len(prefix)]) + prefix + resource.encode()


def _unpack_claimant(data: bytes) -> Claimant:
    return Claimant(*msgpack.unpackb(data))


def _pack_transfer(transfer: Transfer) -> bytes:
    facts = [getattr(transfer, name) for name in TRANSFER_FIELDS]
    if not transfer.groups:  # then the row is one that earlier versions read, too
        facts.pop()
    packed: bytes = msgpack.packb(facts)
    return packed


def _unpack_transfer(data: bytes) -> Transfer:
    transfer = Transfer(*msgpack.unpackb(data))
    return replace(transfer, groups=tuple(transfer.groups))


# ---- maintenance -----------------------------------------------------------------------


log = logging.getLogger("exclusivelog")
INSTANT = struct.Struct(">16sQ")
MAKER = struct.Struct(">HQ")


class ViewTable:
    """Compacted views and snapshots: those that are whole, and those that are being made."""

    __slots__ = ("_deletions", "rows")

    def __init__(self, rows: Rows, deletions: DeletionTable) -> None:
        self.rows, self._deletions = rows, deletions

    def view(self, topic: int) -> View | None:
        """The topic's compacted view, if there is one."""
        return self.rows.find("views", U64.pack(topic), _unpack_view)

    def check_making(self, view: View) -> None:
        """EngineClosedError unless the engine that began to make this view has it still: once
        that is closed, others clear away what it leaves."""
        row = self.rows.get("trash", U64.pack(view.id))
        if row is None or len(row) != MAKER.size:
            raise EngineClosedError("the engine was closed while it compacted, or took a snapshot")

    def put_view(self, topic: int, view: View) -> None:
        """This view is whole, and the topic's from now on."""
        self.rows.delete("trash", U64.pack(view.id))
        self.rows.put("views", U64.pack(topic), PAIR.pack(view.id, view.horizon))

    def snapshot(self, topic: int) -> View | None:
        """Where the newest snapshot of the topic's state is, if there is one."""
        return self.rows.find("snapshots", U64.pack(topic), _unpack_view)

    def put_snapshot(self, topic: int, snapshot: View) -> None:
        """This snapshot is whole, and replaces the last one."""
        former = self.snapshot(topic)
        if former is not None:
            self._deletions.add(former.id)
        self.rows.delete("trash", U64.pack(snapshot.id))
        row = PAIR.pack(snapshot.id, snapshot.horizon)
        self.rows.put("snapshots", U64.pack(topic), row)

    def drop(self, topic: int) -> None:
        """The topic is gone, and its view, snapshot and kind with it."""
        self.rows.delete("meta", KIND + U64.pack(topic))
        for table, found in (("views", self.view(topic)), ("snapshots", self.snapshot(topic))):
            if found is not None:
                self.rows.delete(table, U64.pack(topic))
                self._deletions.add(found.id)

    def begin(self, view: int, slot: int, engine: str) -> None:
        """An engine begins to make a view; it is to go should the engine die."""
        maker = MAKER.pack(slot, int(engine, 16))
        self.rows.put("trash", U64.pack(view), maker)

    def unfinished(self) -> Iterator[tuple[int, int, str]]:
        """(view, slot, engine) of all that are being made, or were when their maker died."""
        for key, value in self.rows.cursor("trash"):
            if len(value) == MAKER.size:
                slot, engine = MAKER.unpack(value)
                yield u64(key), slot, f"{engine:016x}"


class DeletionTable:
    """What is still to be deleted: rows of deleted topics, and entries that were trimmed."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def add(self, topic: int) -> None:
        """Mark a deleted topic's rows as still to go."""
        self.rows.put("trash", U64.pack(topic), b"")
        for what in (PRIORITIES, ANNOUNCED, TIMES, OVERDUE):
            self.rows.delete("meta", what + U64.pack(topic))

    def add_before(self, topic: int, offset: int) -> None:
        """Mark a topic's entries that end before an offset as still to go."""
        self.rows.put("trash", U64.pack(topic), U64.pack(offset))

    def all(self) -> dict[int, int | None]:
        """{topic: the offset before which its entries are to go, or None: all of it}."""
        return {
            u64(key): u64(value) if value else None
            for key, value in self.rows.cursor("trash")
            if len(value) != MAKER.size
        }

    def remove(self, topic: int, before: int | None) -> None:
        """What `discarded` said has gone, unless more has come since."""
        value = b"" if before is None else U64.pack(before)
        if self.rows.get("trash", U64.pack(topic)) == value:
            self.rows.delete("trash", U64.pack(topic))


class RetentionTable:
    """How long topics keep their messages, and what is overdue."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def all(self) -> dict[int, tuple[float | None, int | None]]:
        """{topic: (max_age in seconds, max_bytes)} of the topics that do not keep all."""
        return {
            u64(key): self.rows.decode("retention", _unpack_limits, row)
            for key, row in self.rows.cursor("retention")
        }

    def get(self, topic: int) -> tuple[float | None, int | None]:
        """One topic's; (None, None) where it keeps all."""
        return self.rows.find("retention", U64.pack(topic), _unpack_limits) or (None, None)

    def put(self, topic: int, max_age: float | None, max_bytes: int | None) -> None:
        """Write what `retentions` reads."""
        if max_age is None and max_bytes is None:
            self.rows.delete("retention", U64.pack(topic))
            return
        row = msgpack.packb([max_age, max_bytes])
        self.rows.put("retention", U64.pack(topic), row)

    def overdue(self, topic: int) -> tuple[bytes, int] | None:
        """Since when messages of the topic are overdue (see retention.py): a boot, and ns of its
        monotonic clock. None where none are."""
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


def _unpack_limits(data: bytes) -> tuple[float | None, int | None]:
    max_age, max_bytes = msgpack.unpackb(data)
    return max_age, max_bytes


# ---- all of them -----------------------------------------------------------------------


log = logging.getLogger("exclusivelog")

# LMDB gives a large value whole pages, less 16 bytes: this one takes 16 of them.
PACKED_ENTRY = 16 * 4096 - 16
SMALL_ENTRY = 16 << 10  # is filled up, however little there is to add
LARGE_PACKED_ENTRY = 1 << 20


class Recorded(Protocol):
    """Something to be told in `__events__` when the transaction commits."""

    @property
    def topic(self) -> str:
        """The name of the topic that it is about; "" if it is about none."""

    def dumps(self) -> bytes:
        """The value of its message."""


class Tables:
    """Typed access within one transaction.

    `ring` and `announce` gather whom to wake once the transaction is durable. `rows` are the
    tables' bytes, `large` the entries that are in segments. The others are groups of tables; those
    that few transactions need are made when they are first asked for.
    """

    def __init__(
        self, txn: lmdb.Transaction[bytes], databases: dict[str, Any], path: str,
        segments: Segments, journal: _core.Journal | None = None,
    ) -> None:  # fmt: skip
        self.rows = Rows(txn, databases, path)
        self.large = LargeEntries(self.rows, segments)
        self.journal = AppliedJournal(self.rows, journal)
        self.ring: set[int] = set()
        self.announce: set[int] = set()
        self.events: list[Recorded] = []  # what is written about this transaction (rule E5)
        # What is left for `settle`, right before the commit: roles that end, by their anchors, and
        # topics whose next owner is still to be chosen (see role_grants.py).
        self.role_ends: dict[int, tuple[str, str, int]] = {}
        self.to_promote: set[int] = set()
        self.settle: Callable[[Tables], None] | None = None
        self.topics = TopicTable(self.rows)
        self.entries = EntryTable(self.rows, self.large, self.journal)
        self.sessions = SessionTable(self.rows)

    @functools.cached_property
    def producers(self) -> ProducerTable:
        """Producer names."""
        return ProducerTable(self.rows)

    @functools.cached_property
    def cursors(self) -> CursorTable:
        """Where reader groups go on."""
        return CursorTable(self.rows)

    @functools.cached_property
    def once(self) -> OnceTable:
        """Batches that are appended once."""
        return OnceTable(self.rows)

    @functools.cached_property
    def notifications(self) -> NotificationTable:
        """What engines are told."""
        return NotificationTable(self.rows, self.ring)

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
        """What is still to be deleted."""
        return DeletionTable(self.rows)

    @functools.cached_property
    def retention(self) -> RetentionTable:
        """How long topics keep their messages."""
        return RetentionTable(self.rows)

    def apply(self, stop: int, version: int | None = None) -> None:
        """Take over what the journal has before the position `stop`. `version`: what is appended
        behind that has this one, or a later one (see `AppliedJournal.mark`)."""
        journal = self.journal
        assert journal.file is not None
        if stop <= journal.applied:
            return
        with journal.file.gather(journal.applied, stop, journal.generation) as bundles:
            for bundle in bundles:
                self._apply_to(bundle)
        journal.advance(stop, version)

    def _apply_to(self, bundle: _core.Bundle) -> None:
        row = self.topics.sound(bundle.topic, "its messages are kept behind the others")
        if row is None:
            self._keep(bundle)
            return
        if row.flags & _core.DELETED:
            return
        if bundle.base_offset != row.next_offset:
            log.error(
                "%s: the journal goes on at offset %d of topic %r, which ends at %d",
                self.rows.path, bundle.base_offset, row.name, row.next_offset,
            )  # fmt: skip
        before = self._entry_to_fill(row, bundle)
        most = PACKED_ENTRY if bundle.nbytes < LARGE_ENTRY else LARGE_PACKED_ENTRY
        for last, entry in bundle.pack(before, most):
            self.entries.put(row.id, last, entry)
        self._count_sequences(bundle)
        row.next_offset = bundle.next_offset
        row.last_publish_time = max(row.last_publish_time, bundle.publish_time)
        self.topics.put(row)
        self.announce.add(row.id)

    def _keep(self, bundle: _core.Bundle) -> None:
        """Keep what the journal has of a topic whose row is damaged where it belongs, by its
        offsets: the journal must be emptied for all others."""
        for last, entry in bundle.pack(None, PACKED_ENTRY):
            key = PAIR.pack(bundle.topic, last)
            if self.rows.get("entries", key) is None:
                self.entries.put(bundle.topic, last, entry)
        self._count_sequences(bundle)

    def _count_sequences(self, bundle: _core.Bundle) -> None:
        for packed_name, sequence in bundle.producers().items():
            name = packed_name.decode()
            try:
                last, session = self.producers.get(bundle.topic, name)
            except LedgerCorruptedError as error:  # the journal has the newest of its ids
                log.error("%s; it is written anew", error)
                last, session = -1, 0
            self.producers.put(bundle.topic, name, max(last, sequence), session)

    def _entry_to_fill(self, row: TopicRow, bundle: _core.Bundle) -> _core.Entry | None:
        """The topic's last entry, taken out, if it is so small that more should go into it."""
        if row.next_offset == row.first_offset:
            return None
        key = PAIR.pack(row.id, row.next_offset - 1)
        data = self.rows.get("entries", key)
        if data is None or is_reference(data) or len(data) >= PACKED_ENTRY:
            return None
        if len(data) > max(SMALL_ENTRY, 4 * bundle.nbytes):
            return None  # not worth writing again
        try:
            entry = _core.Entry(data)
        except ValueError:
            return None  # it stays where it is, to be named
        self.rows.delete("entries", key)
        return entry

    def latest(self, topic: int, since: int = 0) -> TopicRow:
        """The topic's row as it is with what the journal has behind the position `since`."""
        row = self.topics.get(topic)
        end = self.journal.end_of(topic, since)
        if end is not None:
            row.next_offset = max(row.next_offset, end[0])
            row.last_publish_time = max(row.last_publish_time, end[1])
        return row


# ---- transactions --------------------------------------------------------------------------


class Store(Protocol):
    """The ledger, as those know it who read and change its tables; `Ledger` is one."""

    path: str
    journal: _core.Journal | None

    @property
    def lockfile(self) -> LockFile:
        """The lock file."""

    @property
    def busy_here(self) -> bool:
        """Is this thread in a transaction?"""

    def read(self) -> AbstractContextManager[Tables]:
        """A snapshot."""

    def look(self, find: Callable[[Tables], Found], unflushed: bool = False) -> Found:
        """What `find` returns for a snapshot of tables and journal."""

    def write_exclusive(self) -> AbstractContextManager[Tables]:
        """An exclusive write."""

    def write_checkpointed(self) -> AbstractContextManager[Tables]:
        """An exclusive write whose tables have all that the journal has."""

    def write_concurrent(self) -> AbstractContextManager[Tables]:
        """A write beside those that append."""

    def check(self) -> None:
        """LedgerError if it has failed."""

    def checkpoint(self) -> None:
        """Move what is in the journal into the tables."""

    def settle(self) -> None:
        """Find out whether a transaction committed whose process died while it did."""


# ---- who may write ---------------------------------------------------------------------


def owner_info(session: Session) -> OwnerInfo:
    """The public facts of a session that holds a topic (rule A5)."""
    return OwnerInfo(
        engine_id=session.engine, engine_name=session.engine_name, pid=session.pid,
        producer_name=session.name, access_mode=AccessMode(session.mode),
        priority=session.priority, epoch=session.epoch, since=session.since,
        session=session.id, properties=session.properties,
    )  # fmt: skip


def waiter_info(session: Session) -> WaiterInfo:
    """The public facts of a session in the queue."""
    return WaiterInfo(
        engine_id=session.engine, engine_name=session.engine_name, pid=session.pid,
        producer_name=session.name, priority=session.priority, since=session.since,
        session=session.id, properties=session.properties,
    )  # fmt: skip


def told(topic: str) -> str:
    """A topic, or the role whose own topic it is, for a message."""
    return f"role {topic.removeprefix(PREFIX)!r}" if is_role(topic) else f"topic {topic!r}"


def describe(session: Session) -> str:
    """The holder, for a message."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(session.since / 1000))
    epoch = f"epoch {session.epoch}, " if session.exclusive else ""
    return (
        f"producer {session.name!r} of engine {session.engine_name!r} (id {session.engine}, "
        f"pid {session.pid}, {epoch}since {since} UTC)"
    )


def fenced(tables: Tables, row: _core.TopicRow, session: Session) -> ProducerFencedError:
    """The error of a session that may no longer write."""
    if session.bound_to and tables.claims.claimant(session.bound_to) is None:
        return revoked(row, session)
    return fenced_by(row, session, owner_of(tables, row))


def fenced_by(row: _core.TopicRow, session: Session, owner: Session | None) -> ProducerFencedError:
    """What a session is told that was fenced, and who owns the topic now."""
    now = f"held by {describe(owner)}" if owner is not None else f"at epoch {row.epoch}"
    return ProducerFencedError(
        f"{told(row.name)}: producer {session.name!r} with epoch {session.epoch} was fenced; "
        f"the topic is {now}. Close it and open a new one",
        holder=None if owner is None else owner_info(owner),
    )


def revoked(row: _core.TopicRow, session: Session) -> ProducerRevokedError:
    """The error of a producer whose claim is lost."""
    return ProducerRevokedError(
        f"{told(row.name)}: producer {session.name!r} was fenced: the claim or role that it was "
        "bound to was revoked or released. Make a new one with engine.own or engine.role, and open "
        "a new producer"
    )


def owner_of(tables: Tables, row: _core.TopicRow) -> Session | None:
    """The session that owns the topic; its engine may be dead."""
    return tables.sessions.holder(row.id, row.owner) if row.owner else None


def check_may_write(tables: Tables, row: _core.TopicRow, session: Session) -> None:
    """Raise unless session and epoch may write to the topic, whose row the append will change."""
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    if row.flags & _core.TERMINATED:
        raise TopicTerminatedError(f"topic {row.name!r} was terminated at offset {row.next_offset}")
    if session.exclusive:
        valid = row.admits(session.id, session.epoch)
    else:
        valid = tables.sessions.holds(session.topic, session.id)
    if not valid:
        raise fenced(tables, row, session)
