"""Records in the tables: sessions, transfers and claims; rows of LMDB; and a session for people."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import msgpack

from exclusivelog import _core, admission, refusals
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerCorruptedError,
    ProducerFencedError,
    ProducerRevokedError,
)
from exclusivelog.types import (
    EXCLUSIVE_MODES,
    FENCING_MODES,
    PREFIX,
    WAITING_MODES,
    AccessMode,
    OwnerInfo,
    WaiterInfo,
)

if TYPE_CHECKING:
    import lmdb


# ---- rows ------------------------------------------------------------------------------


NAMES = """
    meta names topics entries producers holders queue engines mail trash segments claims claimants
    transfers cursors retention views snapshots fences batches
""".split()
U64 = struct.Struct(">Q")
PAIR = struct.Struct(">QQ")

Decoded = TypeVar("Decoded")


# ---- what others remember of rows (rule K1)

# The tables whose keys begin with the number of a topic, or of a view: producers, readers and
# shared states remember what a topic's rows say.
OF_TOPICS = frozenset(
    (
        "topics",
        "entries",
        "producers",
        "holders",
        "queue",
        "transfers",
        "retention",
        "views",
        "snapshots",
        "fences",
        "batches",
        "trash",
    )
)
# Those whose keys begin with the number of a claim session: groups' readers remember that it lives.
OF_CLAIMS = frozenset(("claimants",))
# Those of which nobody remembers anything beyond a transaction; and beginnings of such keys in
# `meta`. What is in none of these lists may concern everybody.
READ_ANEW = frozenset(("names", "engines", "mail", "segments", "claims", "cursors"))
TIMES, OVERDUE = b"times", b"overdue"
KIND, PRIORITIES, ANNOUNCED = b"kind", b"priorities", b"announced"
COMPRESSION = b"compression"
ITEMS, DELETED_TO = b"items", b"deleted to"
DEAD = b"dead"
ENDED, LAST_ENDED = b"ended", b"last ended"
LISTED, LAST_LISTED = b"listed", b"last listed"
VOID = b"void"
ROLE = b"role"  # as all keys of role_rows.py begin
APPLIED_JOURNAL, LARGE_BYTES, CHANGES = b"journal", b"large", b"changes"
READ_ANEW_IN_META = (
    TIMES, OVERDUE, KIND, PRIORITIES, ANNOUNCED, COMPRESSION, ITEMS, DELETED_TO, DEAD, ENDED,
    LISTED, LAST_LISTED, VOID, ROLE, APPLIED_JOURNAL, LARGE_BYTES, CHANGES,
)  # fmt: skip


class Walk(Protocol):
    """A cursor of LMDB's as a reader of rows. It has no methods that write: `Rows` does that, and
    notes what is written."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        """(key, data) of the rows from its place on."""

    def set_range(self, key: bytes) -> bool:
        """Go to the first row from this key on."""

    def first(self) -> bool:
        """Go to the first row."""

    def last(self) -> bool:
        """Go to the last row."""

    def next(self) -> bool:
        """Go to the next row."""

    def prev(self) -> bool:
        """Go to the row before."""

    def key(self) -> bytes:
        """The key of the row at its place."""

    def value(self) -> bytes:
        """The data of that row."""


class NoRows:
    """An empty cursor, for a table that an earlier format does not have."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **options: False


class Rows:
    """Access to the rows of all tables of one ledger, while a transaction lasts.

    Every change of a row goes through here, and is noted in `changes`: so no commit changes what
    others remember without their finding out, in whatever code it was written.
    """

    __slots__ = ("_databases", "_kept", "_txn", "changed", "changes", "path")

    def __init__(self, txn: lmdb.Transaction[bytes], databases: dict[str, Any], path: str) -> None:
        self._txn = txn
        self._databases = databases
        self.path = path
        self.changed = False
        self.changes = _core.Changes()  # the topics and claims that the transaction concerns
        self._kept: dict[tuple[str, bytes], Any] = {}

    @property
    def transaction(self) -> int:
        """The number of this transaction, or of the last one that its snapshot has."""
        return self._txn.id()

    def get(self, table: str, key: bytes) -> bytes | None:
        """The data of a row; None if there is none."""
        database = self._databases[table]
        return None if database is None else self._txn.get(key, db=database)

    def _note(self, table: str, key: bytes) -> None:
        self.changed = True
        if table in OF_TOPICS:
            self.changes.note(key)
        elif table in OF_CLAIMS:
            self.changes.note_claim(key)
        elif table not in READ_ANEW and not (table == "meta" and key.startswith(READ_ANEW_IN_META)):
            self.changes.note_everything()

    def put(self, table: str, key: bytes, data: bytes, overwrite: bool = True) -> bool:
        """Write a row; False if there is one that may not be overwritten."""
        self._note(table, key)
        if self._kept:
            self._kept.pop((table, key), None)
        return self._txn.put(key, data, overwrite=overwrite, db=self._databases[table])

    def get_many(self, table: str, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
        """(key, data) of the rows among `keys` that exist, in the order of `keys`."""
        return list(self._cursor(table).getmulti(keys)) if keys else []

    def put_many(
        self, table: str, items: list[tuple[bytes, bytes]], overwrite: bool = True
    ) -> bool:
        """Write (key, data) rows; False if there is one that may not be overwritten."""
        for key, _ in items:
            self._note(table, key)
        consumed, added = self._cursor(table).putmulti(items, overwrite=overwrite)
        return consumed == added == len(items)

    def delete(self, table: str, key: bytes) -> bool:
        """Delete a row; False if there was none."""
        self._note(table, key)
        if self._kept:
            self._kept.pop((table, key), None)
        return self._txn.delete(key, db=self._databases[table])

    def cursor(self, table: str) -> Walk:
        """LMDB's own cursor, in the order of the keys. Do not change the table while iterating."""
        return self._cursor(table)

    def _cursor(self, table: str) -> lmdb.Cursor[bytes]:
        database = self._databases[table]
        return (
            cast("lmdb.Cursor[bytes]", NoRows())
            if database is None
            else (self._txn.cursor(db=database))
        )

    def under(self, table: str, owner: int, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, data) of the rows whose keys begin with the number `owner`, from the key `start`
        on; the returned keys lack that number. Lazy, like a cursor."""
        prefix = U64.pack(owner)
        cursor = self.cursor(table)
        if cursor.set_range(prefix + start):
            for key, data in cursor:
                if not key.startswith(prefix):
                    return
                yield key[U64.size :], data

    def find(self, table: str, key: bytes, decode: Callable[[bytes], Decoded]) -> Decoded | None:
        """The decoded data of a row; None if there is none."""
        data = self.get(table, key)
        return None if data is None else self.decode(table, decode, data)

    def find_kept(
        self, table: str, key: bytes, decode: Callable[[bytes], Decoded]
    ) -> Decoded | None:
        """The same for a row with an entry for each of many parts, which each of them asks for: it
        is decoded once, until it is written again, and all callers get the same object."""
        try:
            found: Decoded | None = self._kept[table, key]
        except KeyError:
            found = self._kept[table, key] = self.find(table, key, decode)
        return found

    def decode(self, table: str, decode: Callable[[bytes], Decoded], data: bytes) -> Decoded:
        """The decoded data of a row; LedgerCorruptedError if it cannot be decoded."""
        try:
            return decode(data)
        except (struct.error, ValueError, TypeError) as error:
            raise self.damaged(table, error) from None

    def damaged(self, table: str, error: Exception) -> LedgerCorruptedError:
        """The error for a damaged row of this table."""
        return LedgerCorruptedError(
            f"{self.path}: a row of the table {table!r} is damaged: {str(error) or repr(error)}"
        )

    def count_pages(self) -> int:
        """How many pages of LMDB all tables take, with this transaction's changes."""
        tables = [self._txn.stat(each) for each in self._databases.values() if each is not None]
        return sum(
            each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"] for each in tables
        )

    def next_id(self, counter: bytes) -> int:
        """The next number of this counter. No number is used twice."""
        last = self.find("meta", counter, u64)
        given = 1 if last is None else last + 1
        self.changed = True  # and nobody remembers which number is the next
        self._txn.put(counter, U64.pack(given), overwrite=True, db=self._databases["meta"])
        return given


def u64(data: bytes) -> int:
    """The number in a row."""
    value: int = U64.unpack(data)[0]
    return value


# ---- records ---------------------------------------------------------------------------
# Each is a tuple: a frozen dataclass of as many fields takes six times as long to make, and a grant
# makes several.


class Session(NamedTuple):
    """The row of one producer's registration on a topic, waiting or admitted.

    `epoch` is 0 while it waits; `created` is in ns of the monotonic clock, `since` in ms since
    1970; `tie` is random, and breaks ties in the queue (rule D1).
    """

    id: int
    topic: int
    engine: str
    slot: int
    pid: int
    engine_name: str
    name: str
    mode: str
    priority: int
    created: int
    tie: int
    since: int
    claimed_epoch: int | None = None  # its `topic_epoch=` (rule B5)
    epoch: int = 0
    properties: dict[str, str] = {}
    settle: int = 0  # longest settle delay, ns (rule D7)
    engine_properties: dict[str, str] = {}
    lineage: int = 0  # id of the session with which an unbroken series of hand-overs began
    notify_on_contention: bool = False  # notify it when another producer waits for its topic
    bound_to: int = 0  # the claim session with which it ends (rule F5)
    announce: dict[str, str] | None = None  # the announcement to be made with its grant

    @property
    def exclusive(self) -> bool:
        """Is it the only holder of its topic, once it is admitted?"""
        return self.mode in EXCLUSIVE_MODES

    @property
    def waits(self) -> bool:
        """Does it wait in the topic's queue until it is admitted?"""
        return self.mode in WAITING_MODES

    @property
    def fences(self) -> bool:
        """Does it fence the topic's holders and waiters?"""
        return self.mode in FENCING_MODES

    @property
    def place(self) -> tuple[int, int, int]:
        """The sort key of the queue, best first (rule D1)."""
        return admission.place(self.priority, self.created, self.tie)


def pack_session(session: Session) -> bytes:
    """A session as msgpack, fields in order. The last field is left out if it is None, so that
    earlier versions can read the row."""
    packed: bytes = msgpack.packb(session if session.announce is not None else session[:-1])
    return packed


def unpack_session(data: bytes) -> Session:
    """The session that `pack_session` packed."""
    session = Session(*msgpack.unpackb(data))
    _, topic, _, slot, _, _, _, _, priority, created, tie, *_ = session
    if not (type(slot) is type(topic) is type(priority) is type(created) is type(tie) is int):
        raise TypeError("a field has another type")
    return session


class Transfer(NamedTuple):
    """A hand-over of a topic to the engine `target`, with the deadline `until` (ns of the monotonic
    clock). `session` is to release the topic; 0: it has. The other fields are for errors and
    events, and for producers that follow (rules E1-E4)."""

    topic: int
    target: str
    slot: int
    until: int
    session: int
    name: str
    pid: int
    properties: dict[str, str]
    lineage: int = 0  # the first session of an unbroken series of hand-overs
    groups: tuple[str, ...] = ()  # reader groups whose claims on the topic move with it


def is_role(topic: str) -> bool:
    """Does this topic stand for a role?"""
    return topic.startswith(PREFIX)


class Registration(NamedTuple):
    """The outcome of a request: a session, admitted or queued, the last sequence id of its name,
    and the reason of its grant."""

    session: Session
    queued: bool
    last_sequence: int
    reason: str = ""


class StillReleasing(ExclusiveLogError):
    """Internal: the source of a hand-over has not released the topic yet. Request again when it
    has, or at `until` (ns of the monotonic clock)."""

    def __init__(self, refusal: ExclusiveLogError, until: int) -> None:
        super().__init__(str(refusal), holder=refusal.holder)
        self.refusal, self.until = refusal, until


class Claimant(NamedTuple):
    """The row of a claim session (rules F1-F5). `since` is in ms since 1970; `reads`: it belongs to
    a group's reader."""

    id: int
    engine: str
    slot: int
    pid: int
    engine_name: str
    group: str
    generations: dict[str, int]
    since: int
    engine_properties: dict[str, str] = {}
    reads: bool = False


class View(NamedTuple):
    """A topic's compacted view: its entries stand under `id`, and reach up to `horizon`."""

    id: int
    horizon: int


# ---- for people, and errors ----------------------------------------------------------------


def owner_info(session: Session) -> OwnerInfo:
    """The public facts of a session that holds a topic (rule A5)."""
    return OwnerInfo(
        engine_id=session.engine,
        engine_name=session.engine_name,
        pid=session.pid,
        producer_name=session.name,
        access_mode=AccessMode(session.mode),
        priority=session.priority,
        epoch=session.epoch,
        since=session.since,
        session=session.id,
        properties=session.properties,
    )


def waiter_info(session: Session) -> WaiterInfo:
    """The public facts of a session in the queue."""
    return WaiterInfo(
        engine_id=session.engine,
        engine_name=session.engine_name,
        pid=session.pid,
        producer_name=session.name,
        priority=session.priority,
        since=session.since,
        session=session.id,
        properties=session.properties,
        access_mode=AccessMode(session.mode),
    )


def describe(session: Session) -> str:
    """A session's producer and engine, for a message."""
    return refusals.describe(owner_info(session))


def fenced_by(row: _core.TopicRow, session: Session, owner: Session | None) -> ProducerFencedError:
    """The error for a fenced session, which names the owner."""
    holder = None if owner is None else owner_info(owner)
    what = refusals.topic_label(row.name)
    if session.exclusive and not session.epoch:
        return refusals.overtaken(what, session.name, holder, row.epoch)
    return refusals.fenced(what, session.name, session.epoch, holder, row.epoch)


def revoked(row: _core.TopicRow, session: Session) -> ProducerRevokedError:
    """The error of a producer whose claim is lost."""
    return ProducerRevokedError(
        f"{refusals.topic_label(row.name)}: producer {session.name!r} was fenced: the claim or "
        "role that it was bound to was revoked or released. Make a new one with engine.own or "
        "engine.role, and open a new producer"
    )
