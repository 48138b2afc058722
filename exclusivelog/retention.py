"""Trimming: giving old messages back, by hand or by age and size (rule G8).

A trim is one transaction that moves the topic's first offset, and others, each a bounded
number of rows, that remove the entries before it. What a crash leaves behind is removed by
whoever opens the ledger next. An entry that holds the first offset stays until all of it is
old.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from exclusivelog import _core, threads
from exclusivelog.ages import Ages
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerCorruptedError,
    StateError,
    TopicNotFoundError,
)
from exclusivelog.faults import met_twice
from exclusivelog.ledger import Ledger
from exclusivelog.log import offset_at_time
from exclusivelog.tables import Tables, View

log = logging.getLogger("exclusivelog")

DROPPED_AT_ONCE = 1000
ROUND_SECONDS = 5.0


Renew = Callable[[int], object]
Limits = tuple[float | None, int | None]  # max_age in seconds, max_bytes


def trim(ledger: Ledger, topic: int, first: int, renew: Renew, limits: Limits | None = None) -> int:
    """Remove what stands before the offset `first`; the topic's first offset then. `limits`: only
    if the topic's retention is still that.

    Where the topic has a compacted view that does not reach as far, `renew(topic)` makes it anew
    before: else it would go on to show what the messages that go have replaced (rule G7). Of a
    topic that holds a state, nothing goes that is not in its snapshot (rule I4): a map's is taken
    here; a state's only its application can take, and StateError says so, or with `limits` what
    is in the last one goes.
    """
    # What comes from now on stays: else whoever appends could keep us at it for ever.
    row = ledger.look(lambda tables: tables.latest(topic), unflushed=True)
    first = min(first, row.next_offset)
    while True:
        with ledger.write_all() as tables:
            row = tables.topic(topic)
            first = min(first, row.next_offset)
            if first <= row.first_offset or row.flags & _core.DELETED:
                return row.first_offset
            if limits is not None and tables.retention(topic) != limits:
                return row.first_offset  # lifted since it was read: what has come since stays
            floor = _floor(tables, topic)
            holds_map = tables.kind(topic).get("holds") == "map"
            if floor < first and not holds_map:
                first = _up_to(row, first, floor, limits)
                if first <= row.first_offset:
                    return row.first_offset
                floor = first
            if floor >= first and _reaches(tables.view(topic), first):
                row.first_offset = first
                tables.put_topic(row)
                tables.discard_before(topic, first)
                tables.drop_marks(topic, first)
                tables.announce.add(topic)
                break
        renew(topic)
    empty_trash(ledger)
    return first


def _floor(tables: Tables, topic: int) -> float:
    """The offset up to which the topic's messages are in its snapshot, or in a map's compacted
    view; infinite where it holds no state."""
    snapshot, kind = tables.snapshot(topic), tables.kind(topic)
    if snapshot is None and not kind:
        return math.inf
    view = tables.view(topic) if kind.get("holds") == "map" else None
    return max(found.horizon if found else 0 for found in (snapshot, view))


def _up_to(row: _core.TopicRow, first: int, floor: float, limits: Limits | None) -> int:
    if limits is None:
        raise StateError(
            f"topic {row.name!r} holds a state, and its snapshot goes up to offset {int(floor)}: "
            f"messages before offset {first} cannot be trimmed, and none were. Call snapshot() on "
            "the state, then trim again"
        )
    return int(floor)


def _reaches(view: View | None, first: int) -> bool:
    return view is None or view.horizon >= first


def first_to_retain(ledger: Ledger, topic: int, oldest: int | None, max_bytes: int | None) -> int:
    """The first offset that was published at `oldest` (ms since 1970) or later, and among the
    newest entries that have that many bytes together. Among what checkpoints have taken over:
    what is still in the journal stays."""

    def look() -> int:
        with ledger.read() as tables:
            row = tables.topic(topic)
            deleted = row.flags & _core.DELETED
            return row.first_offset if deleted else _first_of(tables, row, oldest, max_bytes)

    return met_twice(look)


def _first_of(
    tables: Tables, row: _core.TopicRow, oldest: int | None, max_bytes: int | None
) -> int:
    first = row.first_offset
    if oldest is not None:
        first = max(first, _first_since(tables, row, oldest))
    if max_bytes is not None:
        first = max(first, _first_within(tables, row, max_bytes))
    return first


def _first_since(tables: Tables, row: _core.TopicRow, ms: int) -> int:
    if row.last_publish_time < ms or row.first_offset == row.next_offset:
        return row.next_offset
    return offset_at_time(tables, row, ms)


def _first_within(tables: Tables, row: _core.TopicRow, max_bytes: int) -> int:
    size, first = 0, row.next_offset
    for nbytes, begin in tables.newest_entries(row):
        size += nbytes
        if size > max_bytes:
            break
        first = begin
    return first


def empty_trash(ledger: Ledger) -> None:
    """Remove what deleted and trimmed topics have left behind, a bounded number of rows at a
    time."""
    _give_up_views(ledger)
    with ledger.read() as tables:
        discarded = tables.discarded()
    for topic, before in discarded.items():
        while True:
            with ledger.write_beside() as tables:
                if not tables.drop_rows(topic, DROPPED_AT_ONCE, before):
                    tables.empty(topic, before)
                    break


def give_up_view(ledger: Ledger, topic: int, view: View | None) -> None:
    """Have a view or snapshot removed whose making has failed, unless it is the topic's already:
    an interrupt may strike behind the commit."""
    if view is not None:
        with ledger.write_beside() as tables:
            if view not in (tables.view(topic), tables.snapshot(topic)):
                tables.discard(view.id)


def _give_up_views(ledger: Ledger) -> None:
    # Of those who died while they compacted.
    with ledger.read() as tables:
        dead = [
            view
            for view, slot, engine in tables.unfinished_views()
            if not ledger.lockfile.exists(slot, engine)
        ]
    if dead:
        with ledger.write_beside() as tables:
            unfinished = {view for view, _, _ in tables.unfinished_views()}
            for view in unfinished.intersection(dead):  # the others are some topic's by now
                tables.discard(view)


class Keeper:
    """Applies every topic's retention, now and then, in a thread that exists only where there
    is one to apply."""

    def __init__(self, ledger: Ledger, renew: Renew) -> None:
        self._ledger = ledger
        self._renew = renew
        self._ages: dict[int, Ages] = {}
        self._ended = threading.Event()
        self._looked = 0.0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin if there is anything to apply by now. Looks once in a while only."""
        now = time.monotonic()
        if self._thread is None and now - self._looked >= ROUND_SECONDS:
            self._looked = now
            with self._ledger.read() as tables:
                if tables.retentions():
                    self.start()

    def start(self) -> None:
        """Begin, unless it has begun."""
        with self._starting:
            if self._thread is None and not self._ended.is_set():
                thread = threading.Thread(
                    target=self._run, name="exclusivelog-retention", daemon=True
                )
                self._thread = threads.start(self._ledger.path, thread)

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._ended.wait(ROUND_SECONDS):
            try:
                self.go_round()
            except ExclusiveLogError as error:
                log.warning("retention: %s", error)
            except Exception:
                log.exception("retention stumbled")

    def go_round(self) -> None:
        """Trim every topic that has more than it is to retain."""
        with self._ledger.read() as tables:
            retentions = tables.retentions()
        self._ages = {
            topic: self._ages.get(topic) or Ages(self._ledger, topic) for topic in retentions
        }
        for topic, limits in retentions.items():
            if self._ended.is_set():
                return
            try:
                trim_what_is_old(self._ledger, topic, limits, self._renew, self._ages[topic])
            except (LedgerCorruptedError, TopicNotFoundError) as error:  # the others are trimmed
                log.warning("retention: %s", error)


def trim_what_is_old(ledger: Ledger, topic: int, limits: Limits, renew: Renew, ages: Ages) -> int:
    """Trim one topic by age and size, as long as these are its limits; its first offset then."""
    max_age, max_bytes = limits
    note_time(ledger, topic)
    with ledger.read() as tables:
        row = tables.topic(topic)
    first = row.first_offset
    if max_age is not None and not math.isinf(max_age):
        first = ages.first_to_keep(
            row, max_age, lambda oldest: first_to_retain(ledger, topic, oldest, None)
        )
    if max_bytes is not None:
        first = max(first, first_to_retain(ledger, topic, None, max_bytes))
    return trim(ledger, topic, first, renew, limits) if first > row.first_offset else first


def note_time(ledger: Ledger, topic: int) -> None:
    """Remember how old the messages are at least whose publish times lie ahead of the clock: an
    idle topic has nobody else to do so."""
    with ledger.read() as tables:
        if not tables.lacks_mark(tables.topic(topic)):
            return
    with ledger.write_beside() as tables:
        tables.mark_time(tables.topic(topic))


def set_retention(ledger: Ledger, topic: int, max_age: float | None, max_bytes: int | None) -> None:
    """Remember what a topic is to retain, for every process; None twice: everything."""
    with ledger.write_beside() as tables:
        row = tables.topic(topic)
        if row.flags & _core.DELETED:
            raise TopicNotFoundError(f"topic {row.name!r} was deleted")
        tables.put_retention(topic, max_age, max_bytes)
