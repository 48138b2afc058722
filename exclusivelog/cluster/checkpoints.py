"""Checkpoints of a topic's log, and snapshots of shared maps and states.

A **checkpoint** is the state that results from folding the records of a topic up to one of them:
the state of the rule, the waiters, a group's claims, and an index of places to read from, by offset
and time.

An engine that opens a topic continues from its newest checkpoint, instead of the first record.

A checkpoint may be lost, old or damaged, because every reader can compute it again. It is used only
if its checksum holds, if it is of this topic, and if the topic has its last record at the same
position (`Anchor`). Otherwise the topic is read from its first record, with the same result. So an
old checkpoint costs time, and a wrong one is not used.

The owner's engine saves checkpoints, or any engine while the topic has no producer: after so many
records or bytes, and when the engine is closed.

A **snapshot** is a map or state after the messages before an offset (rule I4); it has an anchor,
too. Both are values in logs of their own (`blobs`).

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

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from exclusivelog import logs, threads
from exclusivelog._core import crc32c
from exclusivelog.backend import Snapshot
from exclusivelog.cluster import blobs, waiting
from exclusivelog.cluster.claimed import Holdings
from exclusivelog.cluster.ordered import OrderedLog, Place, Position, Record
from exclusivelog.cluster.rule import State
from exclusivelog.errors import (
    ClusterError,
    ExclusiveLogError,
    LedgerCorruptedError,
    OffsetTrimmedError,
)
from exclusivelog.messages import Item, Timed

if TYPE_CHECKING:
    from exclusivelog.cluster.following import TopicLog

__all__ = [
    "Anchor",
    "Checkpoint",
    "Mark",
    "Saving",
    "checkpoint_bytes",
    "holds",
    "load",
    "newest_snapshot",
    "store_snapshot",
    "stored_beside",
]

log = logging.getLogger(__name__)

VERSION, SNAPSHOT_VERSION = 2, 1
EVERY_RECORDS = 5_000
EVERY_BYTES = 32 << 20
AT_CLOSING = 10  # divisor of these limits when the engine is closed
PREFIX, SNAPSHOTS, COMPACTED = "__checkpoints__", "__snapshots__", "__compacted__"
BESIDE = (PREFIX, SNAPSHOTS, COMPACTED)  # names of logs without checkpoints
READ_SECONDS = 10.0
JOIN_SECONDS = 5.0


# ---- what is saved ------------------------------------------------------------------------


class Anchor(NamedTuple):
    """A record: its position, that of the one before it, and the CRC-32C of its bytes.

    A Pulsar topic may be deleted and recreated, restored or copied: then a checkpoint of the former
    topic must not be used. So it names a record of the log, and is used only if the log still has
    that record at that position (`holds`)."""

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
    """Does the log have this record at this position?"""
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


NOWHERE = Anchor(None, None, 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to read from: the rule's state there. `next` and `published` as of `State`."""

    next: int
    published: int
    state: State

    @classmethod
    def of(cls, state: State) -> Mark:
        """The mark of a state, without the fields that only writers need."""
        shared = dict(state.shared)
        grant = None if state.grant is None else replace(state.grant, announce=None)
        kept = replace(state, sequences={}, shared=shared, grant=grant, announced=None, said=0)
        return cls(state.next, state.published, kept)

    def begin(self) -> State:
        """A state from which to continue folding here."""
        return Mark.of(self.state).state


@dataclass(slots=True)
class Checkpoint:
    """The state after a topic's records up to `anchor`. `first` is the topic's first offset, or
    -1."""

    anchor: Anchor
    state: State
    first: int
    marks: list[Mark] = field(default_factory=list)
    queue: list[waiting.Noted] = field(default_factory=list)
    claims: Holdings = field(default_factory=Holdings)

    def save(self, topic: str) -> bytes:
        """The checkpoint as bytes."""
        body: bytes = msgpack.packb(
            [
                VERSION,
                topic,
                list(self.anchor),
                self.state.save(),
                self.first,
                [each.state.save() for each in self.marks],
                [waiting.encode(each) for each in self.queue],
                self.claims.save(),
            ]
        )
        return crc32c(body).to_bytes(4, "little") + body

    @classmethod
    def restore(cls, data: bytes, topic: str) -> Checkpoint | None:
        """Decode a checkpoint of this topic; None if these bytes are none."""
        body = data[4:]
        if crc32c(body) != int.from_bytes(data[:4], "little"):
            return None
        try:
            version, name, *fields = msgpack.unpackb(body)
            if (version, name) != (VERSION, topic):
                return None
            anchor, state, first, marks, queue, claims = fields
            restored = State.restore(state)
            found = cls(
                Anchor.of(anchor),
                restored,
                first,
                list(map(_mark, marks)),
                list(_noted(queue)),
                Holdings.restore(claims),
            )
        except (ExclusiveLogError, ValueError, TypeError, msgpack.UnpackException):
            return None
        return found if restored.position == found.anchor.position else None


def _noted(packed: Iterable[bytes]) -> Iterable[waiting.Noted]:
    for data in packed:
        record = waiting.decode(data)
        if record is None:
            raise ValueError("it is no record of a queue")
        yield record


def _mark(data: bytes) -> Mark:
    state = State.restore(data)
    return Mark(state.next, state.published, state)


# ---- where they are ----------------------------------------------------------------------


def is_known(place: Place, topic: str) -> bool:
    """Does the place say that it has this topic? False also if it cannot be asked."""
    try:
        return place.has(topic)
    except ClusterError:  # the admin API cannot be reached
        return False


def load(place: Place, topic: str, topic_log: OrderedLog) -> Checkpoint | None:
    """The newest checkpoint of this topic, if it belongs to this log."""
    data = None if topic.startswith(BESIDE) else checkpoint_bytes(place, topic)
    found = None if data is None else Checkpoint.restore(data, topic)
    if found is None or not holds(topic_log, found.anchor):
        return None
    return found


def checkpoint_bytes(place: Place, topic: str) -> bytes | None:
    """The newest checkpoint that is stored for this topic, as it is; None if there is none."""
    return stored_beside(place, PREFIX + topic)


def stored_beside(place: Place, name: str) -> bytes | None:
    """The newest value that is stored under this name; None if there is none."""
    if not is_known(place, name):
        return None
    beside = place.open(name)
    try:
        return blobs.load(beside)
    finally:
        beside.close()


class Saving:
    """Saves the checkpoints of one topic. Its topic serialises all calls but `close`."""

    def __init__(self, place: Place, topic: str, anchor: Anchor, enabled: bool) -> None:
        self.anchor = anchor
        self._place, self._topic = place, topic
        self._enabled = enabled and not topic.startswith(BESIDE)
        self._records = self._bytes = 0
        self._thread: threading.Thread | None = None

    def saw(self, record: Record) -> None:
        """Count a record that was folded."""
        self.anchor = self.anchor.then(record)
        self._records += 1
        self._bytes += len(record.data)

    def is_due(self, part: int = 1) -> bool:
        """Is it time for a checkpoint? `part`: divide the limits by this."""
        enough = self._records * part >= EVERY_RECORDS or self._bytes * part >= EVERY_BYTES
        return enough and self._enabled and not self._is_saving

    @property
    def _is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint in a thread of its own."""
        self._records = self._bytes = 0
        data = checkpoint.save(self._topic)
        self._thread = threading.Thread(
            target=self._store, args=(data,), name="exclusivelog-checkpoint", daemon=True
        )
        threads.start(self._place.url, self._thread)

    def _store(self, data: bytes) -> None:
        try:
            beside = self._place.open(PREFIX + self._topic)
            try:
                blobs.store(beside, data)
            finally:
                beside.close()
        except ExclusiveLogError as error:
            logs.emit(
                log,
                logs.CHECKPOINT_NOT_KEPT,
                ledger=self._place.url,
                topic=self._topic,
                reason=str(error),
            )

    def close(self) -> None:
        """Wait for a checkpoint that is being saved."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)


# ---- snapshots ----------------------------------------------------------------------------


def store_snapshot(place: Place, topic: TopicLog, offset: int, items: Iterable[Item]) -> None:
    """Store the state after the messages before `offset`; returns once the cluster has it."""
    with topic.changed:
        anchor = topic.saving.anchor  # its record is the last of those messages, or after them
    rows = [_row_of(*item) for item in items]
    body: bytes = msgpack.packb([SNAPSHOT_VERSION, topic.name, list(anchor), offset, rows])
    beside = place.open(SNAPSHOTS + topic.name)
    try:
        blobs.store(beside, crc32c(body).to_bytes(4, "little") + body)
    finally:
        beside.close()


def _row_of(key: bytes | None, value: bytes | None) -> tuple[Any, ...]:
    return (key, bytes(value), value.until) if type(value) is Timed else (key, value)


def _item_in(key: bytes | None, value: Any, until: int | None = None) -> Item:
    return key, value if until is None else Timed(value, until)


def newest_snapshot(
    place: Place, topic: str, topic_log: OrderedLog, position: int
) -> Snapshot | None:
    """The newest snapshot of this topic, if it is ahead of this offset.

    Raises `LedgerCorruptedError` for one that is damaged."""
    data = stored_beside(place, SNAPSHOTS + topic)
    if data is None:
        return None
    anchor, offset, items = _unpack_snapshot(topic, data)
    if anchor is None or offset <= position or not holds(topic_log, anchor):
        return None
    return offset, items


def _unpack_snapshot(topic: str, data: bytes) -> tuple[Anchor | None, int, list[Item]]:
    body = data[4:]
    if crc32c(body) != int.from_bytes(data[:4], "little"):
        raise LedgerCorruptedError(f"topic {topic!r}: its snapshot is damaged: checksum")
    version, name, anchor, offset, items = msgpack.unpackb(body)
    if (version, name) != (SNAPSHOT_VERSION, topic) or anchor[1] is None:  # no record yet
        return None, -1, []
    return Anchor.of(anchor), offset, [_item_in(*row) for row in items]
