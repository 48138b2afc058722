"""Trimming and retention: removing old messages, by a call or by age and size (rule G8).

**Trimming**: one transaction moves the topic's first offset; later ones delete the entries before
it, a bounded number of rows each. After a crash, the next open of the ledger completes that. The
entry that holds the first offset stays until all of its messages are trimmed.

**Age**: wall clocks may be wrong, and retention cannot be undone. So it must not delete messages
because a clock has just been set ten years ahead. Two rules prevent that, both by the monotonic
clock:

- Messages that this process has seen arrive within `max_age` stay.
- Messages that are older than `max_age` by more than an hour are *overdue*. Running retention
  removes messages as soon as they reach `max_age`; so it has not run for a while, or the clock has
  jumped. Overdue messages are removed an hour later. If any process on the ledger finds meanwhile
  that they are not overdue, because the clock was put back or its own is right, the hour starts
  again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, logs, threads
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerFullError,
    MissingLibraryError,
    StateError,
    TopicNotFoundError,
)
from exclusivelog.local.faults import retry_damaged
from exclusivelog.local.log.reading import offset_at_time
from exclusivelog.local.maintenance.compression import compress_old
from exclusivelog.local.maintenance.deletion import delete_pending
from exclusivelog.local.maintenance.rewriting import free_room, is_due, rewrite
from exclusivelog.local.shm.lockfile import boot_id
from exclusivelog.local.storage.compression import OLD, naming
from exclusivelog.local.storage.forgetting import forget_ended
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import Retention

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

# ---- what is too old -------------------------------------------------------------------


log = logging.getLogger(__name__)

ARRIVALS_RESOLUTION = 0.01  # share of max_age by which a message may be kept too long
PATIENCE_SECONDS = 3600.0


class ArrivalHistory:
    """A history of one topic's next offset, as this process saw it.

    Messages that arrived within `max_age` stay, whatever wall clocks show: to a clock that is
    ahead, all messages seem old, and so does a message that was sent under a clock that is behind.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []  # (time of the monotonic clock, next offset)

    def note(self, next_offset: int, max_age: float) -> int:
        """Record that the topic ends at `next_offset` now. Returns the offset from which on all
        messages have certainly arrived within `max_age` seconds."""
        now = _core.monotonic()
        if not self._seen or now - self._seen[-1][0] >= max_age * ARRIVALS_RESOLUTION:
            self._seen.append((now, next_offset))
        while len(self._seen) > 1 and self._seen[1][0] <= now - max_age:
            del self._seen[0]
        return self._seen[0][1]


class Ages:
    """Decides which messages of one topic are too old, in each round of a retention worker."""

    def __init__(self, ledger: Ledger, topic: int) -> None:
        self._ledger = ledger
        self._topic = topic
        self._arrivals = ArrivalHistory()
        self._logged = False

    def first_to_keep(
        self, row: _core.TopicRow, max_age: float, first_since: Callable[[int], int]
    ) -> int:
        """The first offset that must stay. `first_since(ms)` returns the first offset published at
        that time or later, by the wall clocks."""
        young = self._arrivals.note(row.next_offset, max_age)
        oldest = int((time.time() - max_age) * 1000)
        first = min(young, first_since(oldest))
        long_ago = oldest - int(PATIENCE_SECONDS * 1000)
        if first <= row.first_offset or first_since(long_ago) < first:
            self._forget()
        # Overdue for max_age: the messages are that old, whatever the clock shows.
        elif not self._has_waited(min(PATIENCE_SECONDS, max_age)):
            return row.first_offset
        return max(row.first_offset, first)

    def _forget(self) -> None:
        self._logged = False
        with self._ledger.read() as tables:
            if tables.retention.overdue(self._topic) is None:
                return
        with self._ledger.write_concurrent() as tables:
            tables.retention.put_overdue(self._topic, None)

    def _has_waited(self, wait: float) -> bool:
        now = _core.now()
        with self._ledger.read() as tables:
            noted = tables.retention.overdue(self._topic)
            name = tables.topics.get(self._topic).name
        if noted is not None and noted[0] == boot_id() and noted[1] <= now:
            return now - noted[1] >= wait * 1e9
        with self._ledger.write_concurrent() as tables:
            tables.retention.put_overdue(self._topic, (boot_id(), now))
        if not self._logged:
            self._logged = True
            logs.emit(log, logs.RETENTION_WAITS, ledger=self._ledger.path, topic=name, seconds=wait)
        return wait == 0


# ---- trimming --------------------------------------------------------------------------


log = logging.getLogger(__name__)

ROUND_SECONDS = 5.0


Renew = Callable[[int], object]
Limits = tuple[float | None, int | None]  # max_age in seconds, max_bytes


def trim(ledger: Ledger, topic: int, first: int, renew: Renew, limits: Limits | None = None) -> int:
    """Remove the messages before the offset `first`; returns the topic's new first offset. With
    `limits`, does nothing unless these are still the topic's retention.

    If the disk or the map is full, there may be no room to move the journal's messages into the
    tables. Then this removes what the tables have, which may make that room, and then the rest.

    If the topic's compacted view does not reach `first`, or is missing although its retention keeps
    the keys, `renew(topic)` builds it before: else it would show values that removed messages have
    replaced (rule G7). Messages of a state are removed
    only if its snapshot covers them (rule I4). `renew` takes the snapshot of a map. Of any other
    state only the application can: without `limits`, this raises StateError; with them, it removes
    the messages that the last snapshot covers.
    """
    # Messages sent from now on stay, so that a fast producer cannot keep this loop running.
    row = ledger.inspect(lambda tables: tables.latest(topic), unflushed=True)
    first = min(first, row.next_offset)
    reached = _move_first(ledger, topic, first, renew, limits)
    free_room(ledger)
    if reached < first:
        with contextlib.suppress(LedgerFullError):
            reached = _trim(ledger, ledger.write_freeing, topic, first, renew, limits)
            free_room(ledger)
    return reached


def _move_first(ledger: Ledger, topic: int, first: int, renew: Renew, limits: Limits | None) -> int:
    with contextlib.suppress(LedgerFullError):
        return _trim(ledger, ledger.write_checkpointed, topic, first, renew, limits)
    reached: int = ledger.reserve.help(
        lambda: _trim(ledger, ledger.write_exclusive, topic, first, renew, limits)
    )
    return reached


def _trim(
    ledger: Ledger,
    begin: Callable[[], AbstractContextManager[Tables]],
    topic: int,
    first: int,
    renew: Renew,
    limits: Limits | None,
) -> int:
    """Move the topic's first offset, in a transaction that `begin` begins; returns it."""
    while True:
        with begin() as tables:
            row = tables.topics.get(topic)
            first = min(first, row.next_offset)
            if first <= row.first_offset or row.flags & _core.DELETED:
                return row.first_offset
            if limits is not None and tables.retention.get(topic) != limits:
                return row.first_offset  # the retention was changed meanwhile: later messages stay
            floor = _floor(tables, topic)
            holds_map = tables.topics.kind(topic).get("holds") == "map"
            if floor < first and not holds_map:
                first = _up_to(row, first, floor, limits)
                if first <= row.first_offset:
                    return row.first_offset
                floor = first
            if floor >= first and _reaches(tables, topic, first):
                count, row.first_offset = first - row.first_offset, first
                tables.topics.put(row)
                tables.deletions.add_before(topic, first)
                tables.topics.drop_marks(topic, first)
                tables.announce.add(topic)
                tables.check_reserve()
                break
        renew(topic)
    logs.emit(
        log,
        logs.TRIMMED,
        ledger=ledger.path,
        topic=row.name,
        epoch=row.epoch,
        offset=first,
        count=count,
        reason="call" if limits is None else "retention",
    )
    return first


def _floor(tables: Tables, topic: int) -> float:
    """The offset up to which the topic's snapshot, or a map's compacted view, covers its messages;
    infinite if it holds no state."""
    snapshot, kind = tables.views.snapshot(topic), tables.topics.kind(topic)
    if snapshot is None and not kind:
        return math.inf
    view = tables.views.view(topic) if kind.get("holds") == "map" else None
    return max(found.horizon if found else 0 for found in (snapshot, view))


def _up_to(row: _core.TopicRow, first: int, floor: float, limits: Limits | None) -> int:
    if limits is None:
        raise StateError(
            f"topic {row.name!r}: the snapshot of its state goes up to offset {int(floor)}. "
            f"Messages before offset {first} cannot be trimmed, and none were; call snapshot() on "
            "the state, then trim again"
        )
    return int(floor)


def _reaches(tables: Tables, topic: int, first: int) -> bool:
    """Does the topic's compacted view, if it has or is to have one, have what is removed?"""
    view = tables.views.view(topic)
    if view is None:
        return tables.retention.keep(topic) is None
    return view.horizon >= first


def first_to_retain(ledger: Ledger, topic: int, oldest: int | None, max_bytes: int | None) -> int:
    """The first offset to keep: published at `oldest` (ms since 1970) or later, and within the
    newest entries of `max_bytes` together. Messages in the journal always stay."""

    def find() -> int:
        with ledger.read() as tables:
            row = tables.topics.get(topic)
            if row.flags & _core.DELETED:
                return row.first_offset
            with naming(row.name):
                return _first_of(tables, row, oldest, max_bytes)

    return retry_damaged(find)


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
    """The first offset of the newest entries that fit into so many bytes. The newest one of all
    stays, unless none may: it may have any number of messages that were sent one by one."""
    size, first = 0, row.next_offset
    for nbytes, begin in tables.entries.newest(row):
        size += nbytes
        if size > max_bytes and (first < row.next_offset or not max_bytes):
            break
        first = begin
    return first


class RetentionWorker:
    """Every few seconds, applies the retention of every topic, continues pending deletions,
    recompresses old entries, and rewrites segments. Its thread starts when there is work."""

    def __init__(self, ledger: Ledger, renew: Renew) -> None:
        self._ledger = ledger
        self._renew = renew
        self._ages: dict[int, Ages] = {}
        self._ended = threading.Event()
        self._checked = 0.0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start_if_needed(self) -> None:
        """Start the thread if there is work; reads the ledger only every few seconds."""
        now = _core.monotonic()
        if self._thread is None and now - self._checked >= ROUND_SECONDS:
            self._checked = now
            with self._ledger.read() as tables:
                if (
                    tables.retention.all()
                    or tables.deletions.all()
                    or not OLD.keys().isdisjoint(tables.compression.all().values())
                    or is_due(self._ledger, tables)
                ):
                    self.start()

    def start(self) -> None:
        """Start the thread, unless it runs."""
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
                logs.emit(log, logs.RETENTION_REFUSED, ledger=self._ledger.path, reason=str(error))
            except Exception as error:
                logs.emit(
                    log,
                    logs.RETENTION_FAILED,
                    error=error,
                    ledger=self._ledger.path,
                    reason=repr(error),
                )

    def go_round(self) -> None:
        """Trim every topic that exceeds its retention."""
        with self._ledger.read() as tables:
            retentions = tables.retention.all()
        self._ages = {
            topic: self._ages.get(topic) or Ages(self._ledger, topic) for topic in retentions
        }
        for topic, limits in retentions.items():
            if self._ended.is_set():
                return
            try:
                trim_what_is_old(self._ledger, topic, limits, self._renew, self._ages[topic])
            except (LedgerCorruptedError, MissingLibraryError, TopicNotFoundError) as error:
                # Go on with the other topics.
                logs.emit(log, logs.RETENTION_REFUSED, ledger=self._ledger.path, reason=str(error))
        for step in (delete_pending, forget_ended, compress_old):
            try:
                step(self._ledger, ended=self._ended.is_set)
            except LedgerCorruptedError as error:
                logs.emit(log, logs.RETENTION_REFUSED, ledger=self._ledger.path, reason=str(error))
        self._ledger.remove_unneeded()
        rewrite(self._ledger, self._ended.is_set)


def trim_what_is_old(ledger: Ledger, topic: int, limits: Limits, renew: Renew, ages: Ages) -> int:
    """Trim one topic by age and size, while these are its limits. Returns its first offset."""
    max_age, max_bytes = limits
    note_time(ledger, topic)
    with ledger.read() as tables:
        row = tables.topics.get(topic)
    first = row.first_offset
    if max_age is not None and not math.isinf(max_age):
        first = ages.first_to_keep(
            row, max_age, lambda oldest: first_to_retain(ledger, topic, oldest, None)
        )
    if max_bytes is not None:
        first = max(first, first_to_retain(ledger, topic, None, max_bytes))
    return trim(ledger, topic, first, renew, limits) if first > row.first_offset else first


def note_time(ledger: Ledger, topic: int) -> None:
    """Add a time mark for messages whose publish times are ahead of the clock, because no append
    does that on an idle topic."""
    with ledger.read() as tables:
        if not tables.topics.lacks_mark(tables.topics.get(topic)):
            return
    with ledger.write_concurrent() as tables:
        tables.topics.mark_time(tables.topics.get(topic))


def set_retention(ledger: Ledger, topic: int, changes: Mapping[str, Any]) -> Retention:
    """Change fields of a topic's retention, which all processes apply."""
    with ledger.write_concurrent() as tables:
        tables.topics.existing(topic)
        held = Retention(*tables.retention.get(topic), tables.retention.keep(topic))
        made = replace(held, **changes)
        tables.retention.put(topic, made.max_age, made.max_bytes, made.keep)
        return made
