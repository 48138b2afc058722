"""Checkpoints: what the records of a topic up to one of them amount to, kept beside the topic.

An engine that opens a topic goes on from its newest checkpoint, and need not read the topic from
its first record. A checkpoint has all that is folded from records: the state of the rule, who
waits, and an index of places to read from, by offset and by time.

A checkpoint is a copy of what every reader computes, and may be lost, old or damaged. It is used
only if its checksum holds, if it is this topic's, and if the topic has the record that it stands on
(`anchors`). Otherwise the topic is read from its first record, which gives the same. So an old
checkpoint costs time, and a wrong one is not used: neither lets a record count that does not.

Whoever owns a topic saves, or anybody while it has no producer: after so many records or bytes, and
when its engine is closed. The log of the checkpoints is that of `blobs`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgpack

from exclusivelog import logs, threads
from exclusivelog._core import crc32c
from exclusivelog.cluster import blobs, waiting
from exclusivelog.cluster.anchors import Anchor, holds
from exclusivelog.cluster.ordered import OrderedLog, Record
from exclusivelog.cluster.place import Place, is_known
from exclusivelog.cluster.recent import Mark
from exclusivelog.cluster.rule import State
from exclusivelog.errors import ExclusiveLogError

__all__ = ["Checkpoint", "Saving", "load"]

log = logging.getLogger(__name__)

VERSION = 1
EVERY_RECORDS = 5_000
EVERY_BYTES = 32 << 20
AT_CLOSING = 10  # ... and when the engine is closed, after that part of either
PREFIX = "__checkpoints__"
BESIDE = (PREFIX, "__snapshots__")  # logs that have no checkpoints of their own
JOIN_SECONDS = 5.0
NOWHERE = Anchor(None, None, 0)


@dataclass(slots=True)
class Checkpoint:
    """What a topic's records up to that of `anchor` amount to. `first` is the first offset that the
    topic has, or -1."""

    anchor: Anchor
    state: State
    first: int
    marks: list[Mark] = field(default_factory=list)
    queue: list[waiting.Noted] = field(default_factory=list)

    def save(self, topic: str) -> bytes:
        """It as bytes."""
        body: bytes = msgpack.packb([
            VERSION, topic, list(self.anchor), self.state.save(), self.first,
            [each.state.save() for each in self.marks],
            [waiting.encode(each) for each in self.queue],
        ])  # fmt: skip
        return crc32c(body).to_bytes(4, "little") + body

    @classmethod
    def restore(cls, data: bytes, topic: str) -> Checkpoint | None:
        """The checkpoint of this topic that these bytes are; None if they are none."""
        body = data[4:]
        if crc32c(body) != int.from_bytes(data[:4], "little"):
            return None
        try:
            version, name, anchor, state, first, marks, queue = msgpack.unpackb(body)
            if (version, name) != (VERSION, topic):
                return None
            restored = State.restore(state)
            found = cls(
                Anchor.of(anchor), restored, first, list(map(_mark, marks)), list(_noted(queue))
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


def load(place: Place, topic: str, topic_log: OrderedLog) -> Checkpoint | None:
    """The newest checkpoint of this topic, if it is of this very log."""
    if topic.startswith(BESIDE) or not is_known(place, PREFIX + topic):
        return None
    beside = place.open(PREFIX + topic)
    try:
        data = blobs.load(beside)
    finally:
        beside.close()
    found = None if data is None else Checkpoint.restore(data, topic)
    if found is None or not holds(topic_log, found.anchor):
        return None
    return found


class Saving:
    """Saves the checkpoints of one topic. Its topic serialises all calls but `close`."""

    def __init__(self, place: Place, topic: str, anchor: Anchor, enabled: bool) -> None:
        self.anchor = anchor
        self._place, self._topic = place, topic
        self._enabled = enabled and not topic.startswith(BESIDE)
        self._records = self._bytes = 0
        self._thread: threading.Thread | None = None

    def saw(self, record: Record) -> None:
        """The next record was folded."""
        self.anchor = self.anchor.then(record)
        self._records += 1
        self._bytes += len(record.data)

    def is_due(self, part: int = 1) -> bool:
        """Is it time for a checkpoint? `part`: after that part of what it takes otherwise."""
        enough = (
            self._records * part >= EVERY_RECORDS or self._bytes * part >= EVERY_BYTES
        )  # fmt: skip
        return enough and self._enabled and not self._is_saving

    @property
    def _is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, checkpoint: Checkpoint) -> None:
        """Have it saved by a thread of its own."""
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
            logs.emit(log, logs.CHECKPOINT_NOT_KEPT, topic=self._topic, reason=str(error))

    def close(self) -> None:
        """Wait for what is being saved."""
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
