"""Records in the tables: sessions, transfers and claims; rows of LMDB; time marks.

**Time marks** are the real times of messages whose publish times are ahead of the clock. Publish
times never decrease within a topic (rule G4). So one message sent under a clock that is ten years
ahead gives its time to all later messages of the topic, for ten years. The ledger therefore keeps a
few *time marks* for such a topic. A mark (offset, time) means: every message before this offset had
been published by that time.

The effective time of a message is its publish time, unless that is ahead of the reading process's
clock: then it is the time of the first mark after the message, or now if there is none. Retention
by age, trimming and seeking by time use the effective time.

A mark may have been made under a wrong clock, too. Every rule below prefers the later time, so that
a wrong clock makes retention keep more, never less:

- A mark counts only for publish times ahead of the reader's clock: a process with a clock *behind*
  takes right publish times for wrong ones, and the others ignore its marks.
- A mark ahead of the reader's clock is ignored; the next one, or now, counts instead.
- So is a mark earlier than a mark, or a trusted publish time, before it.
"""

from __future__ import annotations

import itertools
import operator
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack

from exclusivelog._core import crc32c
from exclusivelog.errors import ExclusiveLogError, LedgerCorruptedError
from exclusivelog.types import PREFIX, AccessMode

if TYPE_CHECKING:
    import lmdb


# ---- rows ------------------------------------------------------------------------------


NAMES = (
    "meta", "names", "topics", "entries", "producers", "holders", "queue", "engines", "mail",
    "trash", "segments", "claims", "claimants", "transfers", "cursors", "retention",
    "views", "snapshots", "fences", "batches",
)  # fmt: skip
U64 = struct.Struct(">Q")
PAIR = struct.Struct(">QQ")

Decoded = TypeVar("Decoded")


class NoRows:
    """An empty cursor, for a table that an earlier format does not have."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **options: False


class Rows:
    """Access to the rows of all tables of one ledger, while a transaction lasts."""

    __slots__ = ("_databases", "_txn", "changed", "path")

    def __init__(self, txn: lmdb.Transaction[bytes], databases: dict[str, Any], path: str) -> None:
        self._txn = txn
        self._databases = databases
        self.path = path
        self.changed = False

    def get(self, table: str, key: bytes) -> bytes | None:
        """The data of a row; None if there is none."""
        database = self._databases[table]
        return None if database is None else self._txn.get(key, db=database)

    def put(self, table: str, key: bytes, data: bytes, overwrite: bool = True) -> bool:
        """Write a row; False if there is one that may not be overwritten."""
        self.changed = True
        return self._txn.put(key, data, overwrite=overwrite, db=self._databases[table])

    def get_many(self, table: str, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
        """(key, data) of the rows among `keys` that exist, in the order of `keys`."""
        return list(self.cursor(table).getmulti(keys)) if keys else []

    def put_many(
        self, table: str, items: list[tuple[bytes, bytes]], overwrite: bool = True
    ) -> bool:
        """Write (key, data) rows; False if there is one that may not be overwritten."""
        self.changed = True
        consumed, added = self.cursor(table).putmulti(items, overwrite=overwrite)
        return consumed == added == len(items)

    def delete(self, table: str, key: bytes) -> bool:
        """Delete a row; False if there was none."""
        self.changed = True
        return self._txn.delete(key, db=self._databases[table])

    def cursor(self, table: str) -> lmdb.Cursor[bytes]:
        """LMDB's own cursor, in the order of the keys. Do not change the table while iterating."""
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

    def decode(self, table: str, decode: Callable[[bytes], Decoded], data: bytes) -> Decoded:
        """The decoded data of a row; LedgerCorruptedError if it cannot be decoded."""
        try:
            return decode(data)
        except (struct.error, ValueError, TypeError) as error:
            raise self.damaged(table, error) from None

    def damaged(self, table: str, error: Exception) -> LedgerCorruptedError:
        """The error for a damaged row of this table."""
        return LedgerCorruptedError(
            f"{self.path}: a row of the table {table!r} is damaged: {error}"
        )

    def next_id(self, counter: bytes) -> int:
        """The next number of this counter. No number is used twice."""
        last = self.find("meta", counter, u64)
        given = 1 if last is None else last + 1
        self.put("meta", counter, U64.pack(given))
        return given


def u64(data: bytes) -> int:
    """The number in a row."""
    value: int = U64.unpack(data)[0]
    return value


TIMES, OVERDUE = b"times", b"overdue"
KIND, PRIORITIES, ANNOUNCED = b"kind", b"priorities", b"announced"
COMPRESSION = b"compression"
ITEMS = b"items"


# ---- time marks ------------------------------------------------------------------------


SLACK_MS = 5000  # a publish time may be this far ahead of the clock
MOST_MARKS = 64
# The start of 2025. An earlier time is that of a clock that was never set.
EARLIEST_MS = 1_735_689_600_000

MARK, CHECKSUM = struct.Struct(">QQ"), struct.Struct(">I")

Mark = tuple[int, int]  # an offset; ms since 1970


def wall_ms() -> int:
    """This process's wall clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


def is_ahead(published: int, now: int) -> bool:
    """Is this publish time too far ahead of the clock to be trusted?"""
    return published > now + SLACK_MS


def pack_marks(marks: list[Mark]) -> bytes:
    """The row in which a topic's marks are stored."""
    data = b"".join(itertools.starmap(MARK.pack, marks))
    return data + CHECKSUM.pack(crc32c(data))


def unpack_marks(row: bytes | None) -> list[Mark]:
    """A row's marks; none if it is damaged: then messages are only kept longer, while an error
    would fail checkpoints."""
    if row is None or len(row) % MARK.size != CHECKSUM.size:
        return []
    data = row[: -CHECKSUM.size]
    sound = CHECKSUM.unpack(row[-CHECKSUM.size :])[0] == crc32c(data)
    return list(MARK.iter_unpack(data)) if sound else []


def with_mark(marks: list[Mark], offset: int, now: int) -> list[Mark]:
    """The marks with one added; unchanged if there is no message since the last mark, or the clock
    was never set.

    >>> with_mark([(10, 1_800_000_000_000)], 20, 1_800_000_060_000)
    [(10, 1800000000000), (20, 1800000060000)]
    """
    if now < EARLIEST_MS or is_marked(marks, offset, now):
        return marks
    return _thinned([*marks, (offset, now)], now)


def is_marked(marks: list[Mark], offset: int, now: int) -> bool:
    """Is there a mark at or after the offset that is not ahead of this clock?"""
    return any(at >= offset and not is_ahead(when, now) for at, when in marks)


def _thinned(marks: list[Mark], now: int) -> list[Mark]:
    # Messages between two marks get the time of the later one. Drop the mark whose loss makes them
    # appear younger by the smallest share of their age, so that newer marks are closer together.
    while len(marks) > MOST_MARKS:
        costs = [
            max(0, later - earlier) / (abs(now - earlier) + 1000)
            for (_, earlier), (_, later) in zip(marks, marks[2:], strict=False)
        ]
        del marks[1 + costs.index(min(costs))]
    return marks


def without_trimmed(marks: list[Mark], first: int) -> list[Mark]:
    """The marks that concern messages from the offset `first` on."""
    return [mark for mark in marks if mark[0] > first]


def first_marked_since(marks: list[Mark], since: int, floor: int, now: int) -> int:
    """The first offset whose messages may have been published at `since` or later, according to
    the marks; 0 if unknown. `floor`: a trusted publish time before them.

    >>> first_marked_since([(10, 1000), (20, 3000)], 2000, 0, 5000)
    10
    """
    first, latest = 0, floor - SLACK_MS
    for offset, when in marks:
        if latest <= when <= now + SLACK_MS:
            latest = when
            if when < since:
                first = offset
    return first


# ---- records ---------------------------------------------------------------------------


SHARED = AccessMode.SHARED.value
EXCLUSIVE = AccessMode.EXCLUSIVE.value
WAIT = AccessMode.WAIT_FOR_EXCLUSIVE.value
FENCING = AccessMode.EXCLUSIVE_WITH_FENCING.value


@dataclass(frozen=True, slots=True)
class Session:
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
    claim: int | None = None
    epoch: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    settle: int = 0  # longest settle delay, ns (rule D7)
    engine_properties: dict[str, str] = field(default_factory=dict)
    lineage: int = 0  # id of the session with which an unbroken series of hand-overs began
    notify_on_contention: bool = False  # notify it when another producer waits for its topic
    bound_to: int = 0  # the claim session with which it ends (rule F5)
    announce: dict[str, str] | None = None  # the announcement to be made with its grant

    @property
    def exclusive(self) -> bool:
        """Is it the only holder of its topic, once it is admitted?"""
        return self.mode != SHARED

    @property
    def place(self) -> tuple[int, int, int]:
        """The sort key of the queue, best first (rule D1)."""
        return (-self.priority, self.created, self.tie)


SESSION_FIELDS = [field.name for field in fields(Session)]
_FIELD_NUMBERS = {name: number for number, name in enumerate(SESSION_FIELDS)}
_values_of = operator.attrgetter(*SESSION_FIELDS)


def changed(session: Session, **values: Any) -> Session:
    """A copy of the session with other values of these fields. It takes less than half the time of
    `dataclasses.replace`, and every grant makes several.

    >>> from dataclasses import replace
    >>> session = unpack_session(pack_session(Session(1, 2, "e", 3, 4, "", "n", WAIT, 0, 5, 6, 7)))
    >>> changed(session, epoch=8) == replace(session, epoch=8)
    True
    """
    row = list(_values_of(session))
    for name, value in values.items():
        row[_FIELD_NUMBERS[name]] = value
    return Session(*row)


def pack_session(session: Session) -> bytes:
    """A session as msgpack, fields in order. The last field is left out if it is None, so that
    earlier versions can read the row."""
    row = _values_of(session)
    packed: bytes = msgpack.packb(row if session.announce is not None else row[:-1])
    return packed


def unpack_session(data: bytes) -> Session:
    """The session that `pack_session` packed."""
    return Session(*msgpack.unpackb(data))


@dataclass(frozen=True, slots=True)
class Transfer:
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


Known = tuple[int, int]  # the best and the lowest priority of a topic's waiters so far


def widened(known: Known | None, *priorities: int) -> Known:
    """The range of priorities, extended to these.

    >>> widened((5, 1), 7), widened(None, 3)
    ((7, 1), (3, 3))
    """
    seen = (*(known or ()), *priorities)
    return max(seen), min(seen)


def is_role(topic: str) -> bool:
    """Does this topic stand for a role?"""
    return topic.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Registration:
    """The outcome of a request: a session, admitted or queued, and the last sequence id of its
    name."""

    session: Session
    queued: bool
    last_sequence: int


class StillReleasing(ExclusiveLogError):
    """Internal: the source of a hand-over has not released the topic yet. Request again when it
    has, or at `until` (ns of the monotonic clock)."""

    def __init__(self, refusal: ExclusiveLogError, until: int) -> None:
        super().__init__(str(refusal), holder=refusal.holder)
        self.refusal, self.until = refusal, until


@dataclass(frozen=True, slots=True)
class Claimant:
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
    engine_properties: dict[str, str] = field(default_factory=dict)
    reads: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A topic's compacted view: its entries stand under `id`, and reach up to `horizon`."""

    id: int
    horizon: int


CLAIMANT_FIELDS = [field.name for field in fields(Claimant)]
