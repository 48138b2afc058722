"""The records with which a place's topics began, so that a lost beginning is recognised (rule B1).

A log can be folded from its first record on. If that was removed, by retention for example, the
rest looks like a new log: its next owner would be granted epoch 1 again, while the former one goes
on under another epoch. So an engine appends to a topic only if

- the first record that it has read is a *birth* (`facts`), or the first copy of a mirror, and
- the log `__births__` of the place names that record as the topic's first one. The first entry of
  a topic counts, so that all engines decide alike.

A topic without an entry gets one before the first request is appended to it. An empty log with an
entry, or of which the place says that it was written, has lost its beginning. The same is asked of
`__births__` itself. An engine that has followed a topic from its birth on goes on when the
beginning is removed, and so does one that finds a valid checkpoint.

>>> from exclusivelog.cluster.memory import MemoryPlace
>>> births = Births(MemoryPlace.named("example of births"))
>>> first = Anchor(None, Position(b"1"), 7)
>>> births.of("orders"), births.register("orders", first) == births.of("orders") == first
(None, True)
>>> births.register("orders", Anchor(None, Position(b"2"), 7)) == first
True
"""

from __future__ import annotations

from typing import overload

from exclusivelog.cluster.checkpoints import NOWHERE, READ_SECONDS, Anchor
from exclusivelog.cluster.facts import EMPTIED, Facts, is_birth, lacks_beginning, was_emptied
from exclusivelog.cluster.frames import Frame, Grant, decode
from exclusivelog.cluster.ordered import OrderedLog, Place, Position, Record
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.errors import LedgerIOError

__all__ = ["Births", "check_first", "check_granted", "first_of", "is_beginning"]

TOPIC = "__births__"
MAGIC = b"XLE"


class Births:
    """The first record of each topic of a place, as `Anchor`."""

    def __init__(self, place: Place) -> None:
        self._place, self._facts = place, Facts(place, TOPIC, MAGIC)

    def of(self, topic: str) -> Anchor | None:
        """The first record that the topic ever had; None: no engine has asked for it yet."""
        found = self._facts.of(topic)
        return None if found is None else _anchor(found)

    def known(self, topic: str, log: OrderedLog, goes_on: bool) -> Anchor | None:
        """The same for an engine that is about to follow the log; `goes_on`: from a checkpoint.

        Raises `LedgerCorruptedError` for a log that is empty, and was not."""
        found = self.of(topic)
        if goes_on:
            return found or first_of(topic, log)
        if was_emptied(self._place, topic, log):
            raise lacks_beginning(topic, EMPTIED)
        if found is not None and log.end() is None:
            check_first(topic, found, None)
        return found

    def register(self, topic: str, first: Anchor) -> Anchor:
        """Record the first record of a topic, unless one is recorded. Returns the one that
        counts."""
        known = self.of(topic)
        if known is None:
            self._place.note_written(topic)
            known = _anchor(self._facts.record(topic, [first.position, first.crc]))
        return known

    def close(self) -> None:
        """Close the log."""
        self._facts.close()


def _anchor(found: list[Position | int]) -> Anchor:
    return Anchor.of([None, *found])


def first_of(topic: str, log: OrderedLog) -> Anchor:
    """The first record of a log that has records. Raises `LedgerCorruptedError` if no log begins
    so."""
    tail = log.tail()
    try:
        record = tail.next(READ_SECONDS)
    finally:
        tail.close()
    if record is None:
        raise LedgerIOError(f"topic {topic!r}: its first record was not read in {READ_SECONDS} s")
    return check_first(topic, None, record)


@overload
def check_first(topic: str, known: Anchor | None, record: Record) -> Anchor: ...
@overload
def check_first(topic: str, known: Anchor | None, record: None) -> None: ...
def check_first(topic: str, known: Anchor | None, record: Record | None) -> Anchor | None:
    """Decide if a log has its beginning. `record` is its first record now (None: it is empty),
    `known` the one that it began with, if that is known. Returns the first record.

    Raises `LedgerCorruptedError`. `proof.cluster_model` decides by it, too."""
    if record is None:
        if known is not None:
            raise lacks_beginning(topic, EMPTIED)
        return None
    if known is None and not is_beginning(record.data):
        raise lacks_beginning(topic, "its first record is none that begins a log")
    found = NOWHERE.then(record)
    if known not in (None, found):
        raise lacks_beginning(topic, "its first record is not the one that it began with")
    return found


def check_granted(topic: str, state: State, judged: Judged) -> None:
    """LedgerCorruptedError if the sender of the last record, which was judged so, has read a grant
    that is not in this state: then one of the two lacks the beginning of the log."""
    record = judged.parsed
    if judged.verdict is not Verdict.EPOCH or record is None:
        return
    if isinstance(record, Frame) and record.source is not None:
        return  # the epoch of a copy is that of its source
    is_next = isinstance(record, Grant) and not record.continues
    if record.epoch - is_next > state.epoch:
        raise lacks_beginning(topic, f"nothing has granted epoch {record.epoch}")


def is_beginning(data: bytes) -> bool:
    """Can a log begin with this record: a birth, or the first copy of a mirror? A first grant is
    none: a copy of it may come late.

    >>> is_beginning(b"another program's")
    False
    """
    if is_birth(data):
        return True
    record = decode(data)
    return isinstance(record, Frame) and record.source is not None and record.first == record.gap
