"""Topics of one ledger: creating, inspecting, trimming and deleting them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exclusivelog import _core, logs
from exclusivelog.backend import Kind, Snapshot
from exclusivelog.errors import LedgerFullError
from exclusivelog.local.faults import retry_damaged
from exclusivelog.local.log.inspection import Inspection
from exclusivelog.local.maintenance.compression import check_engines, set_compression, stats
from exclusivelog.local.maintenance.retention import (
    first_to_retain,
    note_time,
    set_retention,
    trim,
)
from exclusivelog.local.maintenance.views import read_snapshot, read_view
from exclusivelog.local.names import stats_of
from exclusivelog.local.ownership.claims import Claims
from exclusivelog.local.storage.compression import naming
from exclusivelog.local.storage.tables import Tables
from exclusivelog.refusals import is_other_kind, other_kind
from exclusivelog.types import (
    Announcement,
    OwnerInfo,
    Retention,
    TopicStats,
    TransferInfo,
    WaiterInfo,
)

log = logging.getLogger(__name__)


class LocalTopic(Inspection):
    """One topic of a ledger."""

    def facts(self) -> _core.TopicRow:
        """Its epoch, offsets and flags; TopicNotFoundError if it was deleted."""
        self._engine.check_open()
        with self._engine.ledger.read() as tables:
            return tables.topics.existing(self._id)

    def owner(self) -> OwnerInfo | None:
        """The session that owns it."""
        self._engine.check_open()
        return self._engine.sessions.owner(self._id)

    def holders(self) -> list[OwnerInfo]:
        """The sessions that may write."""
        self._engine.check_open()
        return self._engine.sessions.holders(self._id)

    def waiters(self) -> list[WaiterInfo]:
        """The sessions in its queue, best first."""
        self._engine.check_open()
        return self._engine.sessions.waiters(self._id)

    def transfers(self) -> list[TransferInfo]:
        """The hand-overs in progress."""
        self._engine.check_open()
        return self._engine.hand_over.transfers(self._id)

    def yielding_owner(self) -> int:
        """The session that owns it, if that has agreed to release it; 0 if there is none."""
        self._engine.check_open()
        return self._engine.sessions.yielding_owner(self._id)

    def evict_late(self, owner: int, until: int) -> bool:
        """Evict the owner, if it is this session; see `TopicStore.evict_late`."""
        self._engine.check_open()
        return self._engine.sessions.evict_late(self._id, owner, until)

    def kind(self) -> tuple[str, dict[str, str | None]]:
        """What the topic holds ("messages", "map", "state"), and a map's serialisers."""
        self._engine.check_open()
        with self._engine.ledger.read() as tables:
            tables.topics.existing(self._id)
            held = tables.topics.kind(self._id)
            kind = held.get("holds")
            if not kind:
                kind = "messages" if tables.views.snapshot(self._id) is None else "state"
            return kind, {name: held[name] for name in ("key", "value") if name in held}

    def check_kind(self, kind: Kind) -> bool:
        """Is it recorded that the topic holds this? False if nothing is recorded yet; StateError if
        it holds something else."""
        with self._engine.ledger.read() as tables:
            return _matches(tables, self._id, kind)

    def record_kind(self, kind: Kind) -> None:
        """Record what the topic holds; StateError if it holds something else."""
        with self._engine.ledger.write_concurrent() as tables:
            if not _matches(tables, self._id, kind):
                tables.topics.put_kind(self._id, dict(kind))

    def newest(self, position: int, views: bool) -> tuple[int, Snapshot | None]:
        """The topic's first offset and its newest snapshot, or None; see `TopicStore.newest`."""

        def read() -> tuple[int, Snapshot | None]:
            with self._engine.ledger.read() as tables:
                row = tables.topics.get(self._id)
                with naming(row.name):
                    found = read_snapshot(tables, self._id)
                    if views and row.first_offset > max(position, found[0] if found else 0):
                        found = read_view(tables, self._id) or found
                return row.first_offset, found

        return retry_damaged(read)

    def change_counter(self) -> tuple[_core.SharedWords, int]:
        """The place of the counter that every commit to the topic changes."""
        lockfile = self._engine.ledger.lockfile
        return lockfile.atomics, lockfile.counters.place(self._id)

    def announcement(self) -> Announcement | None:
        """The last announcement of an owner."""
        self._engine.check_open()

        def find(tables: Tables) -> Announcement | None:
            tables.topics.existing(self._id)
            return tables.announcements.get(self._id)

        return self._engine.ledger.inspect(find, self._engine.unflushed)

    def compact(self) -> int:
        """Rebuild the compacted view; the number of its messages."""
        with naming(self.facts().name):
            return self._engine.compact(self._id)

    def trim(self, before: int, before_ms: int | None, max_bytes: int | None, dry_run: bool) -> int:
        """Remove the messages before an offset, and before a time (ms since 1970), and all but
        `max_bytes`; the new first offset. `dry_run`: change nothing."""
        if dry_run:
            return self._first_kept(before, before_ms, max_bytes)
        self.facts()
        ledger = self._engine.ledger
        self._checkpoint()
        if before_ms is not None:
            note_time(ledger, self._id)
        first = max(first_to_retain(ledger, self._id, before_ms, max_bytes), before)
        return trim(ledger, self._id, first, self._engine.renew)

    def _checkpoint(self) -> None:
        with contextlib.suppress(LedgerFullError):  # what is trimmed makes room for it
            self._engine.ledger.checkpoint()

    def _first_kept(self, before: int, before_ms: int | None, max_bytes: int | None) -> int:
        """The first offset that `trim` would keep; without the journal for a read-only engine."""
        row, ledger = self.facts(), self._engine.ledger
        if not ledger.readonly:
            self._checkpoint()
        first = max(first_to_retain(ledger, self._id, before_ms, max_bytes), before)
        return max(row.first_offset, min(first, self.latest().next_offset))

    def retention(self) -> Retention:
        """What is removed in the background."""
        self.facts()
        with self._engine.ledger.read() as tables:
            return Retention(*tables.retention.get(self._id), tables.retention.keep(self._id))

    def retain(self, changes: Mapping[str, Any]) -> Retention:
        """Change these fields of the retention."""
        self.facts()
        made = set_retention(self._engine.ledger, self._id, changes)
        self._engine.retention_worker.start()
        return made

    def compress(self, setting: str | None) -> None:
        """Compress new entries from now on by this setting."""
        self.facts()
        if setting is not None:
            check_engines(self._engine.ledger, setting)
        set_compression(self._engine.ledger, self._id, setting)
        self._engine.retention_worker.start_if_needed()

    def record_batch(self, writer: str, number: int) -> None:
        """Store a writer's last number, unless a higher one is stored."""
        with self._engine.ledger.write_concurrent() as tables:
            before = tables.once.batch(tables.topics.existing(self._id).id, writer)
            if before is None or number > before:
                tables.once.put_batch(self._id, writer, number)

    def stats(self, storage: bool) -> TopicStats:
        """The topic's size; with `storage`, also how its entries are stored."""
        row = self.facts()
        ledger, end = self._engine.ledger, self.latest().next_offset
        found = stats_of(row, end)
        groups = Claims(ledger, self._engine.sessions.succession).groups(
            [(row.name, self._id, end)], self._engine.unflushed
        )
        if storage:
            held = stats(ledger, self._id)
            found = replace(
                found,
                compression=held.compression,
                entries=held.entries,
                methods=held.methods,
                raw_bytes=held.raw_bytes,
                stored_bytes=held.stored_bytes,
            )
        return replace(found, groups=tuple(groups))

    def terminate(self) -> int:
        """Terminate the topic; the next offset."""
        end = self._engine.sessions.terminate(self._id)
        logs.emit(
            log,
            logs.TERMINATED,
            ledger=self._engine.ledger.path,
            topic=self.facts().name,
            offset=end,
        )
        return end


def _matches(tables: Tables, topic: int, kind: Kind) -> bool:
    held = tables.topics.kind(topic)
    if is_other_kind(held, kind):
        raise other_kind(tables.topics.get(topic).name, held, kind)
    return bool(held)
