"""Topics of one ledger: creating, inspecting, trimming and deleting them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from exclusivelog import _core
from exclusivelog.backend import check_name, is_internal
from exclusivelog.errors import LedgerCorruptedError, ProducerBusyError, TopicNotFoundError
from exclusivelog.events import EVENTS
from exclusivelog.local.fencing import describe, owner_info
from exclusivelog.local.maintenance.retention import (
    RetentionWorker,
    delete_pending,
    first_to_retain,
    note_time,
    set_retention,
    trim,
)
from exclusivelog.local.ownership import seats
from exclusivelog.local.ownership.announcements import announcement
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.ownership.succession import clear
from exclusivelog.local.ownership.transfers import HandOver
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import Announcement, OwnerInfo, TransferInfo, WaiterInfo


class Host(Protocol):
    """The engine of a topic."""

    ledger: Ledger
    sessions: Sessions
    hand_over: HandOver
    retention_worker: RetentionWorker

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now."""

    def compact(self, topic: int) -> int:
        """Rebuild a topic's compacted view."""

    @property
    def renew(self) -> Callable[[int], int]:
        """Takes a map's snapshot, and rebuilds a compacted view, before old messages go."""


class LocalTopic:
    """One topic of a ledger."""

    def __init__(self, engine: Host, topic: int) -> None:
        self._engine, self._id = engine, topic

    def facts(self) -> _core.TopicRow:
        """Its epoch, offsets and flags; TopicNotFoundError if it was deleted."""
        self._engine.check_open()
        with self._engine.ledger.read() as tables:
            return existing(tables, self._id)

    def next_offset(self) -> int:
        """The offset that the next message will have."""
        self._engine.check_open()
        return checked(self._engine.latest(self._id)).next_offset

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
        """The hand-overs that are under way."""
        self._engine.check_open()
        return self._engine.hand_over.transfers(self._id)

    def kind(self) -> tuple[str, dict[str, str | None]]:
        """What it holds ("messages", "map", "state"), and a map's serialisers."""
        self._engine.check_open()
        with self._engine.ledger.read() as tables:
            existing(tables, self._id)
            held = tables.topics.kind(self._id)
            kind = held.get("holds")
            if not kind:
                kind = "messages" if tables.views.snapshot(self._id) is None else "state"
            return kind, {name: held[name] for name in ("key", "value") if name in held}

    def announcement(self) -> Announcement | None:
        """What an owner announced last."""
        self._engine.check_open()
        with self._engine.ledger.read() as tables:
            existing(tables, self._id)
            return announcement(tables, self._id)

    def compact(self) -> int:
        """Rebuild the compacted view; the number of its messages."""
        self.facts()
        return self._engine.compact(self._id)

    def trim(self, before: int, before_ms: int | None, max_bytes: int | None) -> int:
        """Remove the messages before an offset, and before a time (ms since 1970), and all but
        `max_bytes`; the new first offset."""
        self.facts()
        ledger = self._engine.ledger
        ledger.checkpoint()
        if before_ms is not None:
            note_time(ledger, self._id)
        first = max(first_to_retain(ledger, self._id, before_ms, max_bytes), before)
        return trim(ledger, self._id, first, self._engine.renew)

    def retain(self, max_age: float | None, max_bytes: int | None) -> None:
        """Remove old messages in the background from now on."""
        self.facts()
        set_retention(self._engine.ledger, self._id, max_age, max_bytes)
        self._engine.retention_worker.start()

    def terminate(self) -> int:
        """End all writing for good; the next offset."""
        return self._engine.sessions.terminate(self._id)


# ---- rows, and all topics ----------------------------------------------------------------


def existing(tables: Tables, topic: int) -> _core.TopicRow:
    """The topic's row, or TopicNotFoundError if it was deleted."""
    return checked(tables.topics.get(topic))


def checked(row: _core.TopicRow) -> _core.TopicRow:
    """The row, or TopicNotFoundError if its topic was deleted."""
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    return row


def create_topic(ledger: Ledger, name: str, create: bool) -> tuple[int, str]:
    """(id, name) of the topic of that name, made if need be."""
    check_name(name, "topic")
    with ledger.read() as tables:
        row = tables.topics.find(name)
    if row is not None:
        return row.id, row.name
    if not create:
        raise TopicNotFoundError(f"{ledger.path} has no topic {name!r}")
    if is_internal(name) and name != EVENTS:
        raise ValueError(f"topic={name!r}: names that begin with __ are reserved for the library")
    with ledger.write_exclusive() as tables:
        row = tables.topics.find(name) or tables.topics.create(name)
        return row.id, row.name


def list_topics(ledger: Ledger) -> list[str]:
    """The names of the topics that exist, sorted; without the library's own."""
    with ledger.read() as tables:
        return [
            name
            for name, topic in tables.topics.all()
            if not is_internal(name) and not _is_deleted(tables, topic)
        ]


def _is_deleted(tables: Tables, topic: int) -> bool:
    try:
        return bool(tables.topics.get(topic).flags & _core.DELETED)
    except LedgerCorruptedError:
        return False  # it is there, and whoever opens it learns what is wrong with it


def delete_topic(ledger: Ledger, sessions: Sessions, name: str, own: bool = False) -> None:
    """Remove a topic that nobody holds or awaits; see `Engine.delete_topic`. `own`: it is one of
    the library's."""
    check_name(name, "name")
    if is_internal(name) and not own:
        raise ValueError(f"topic={name!r} is internal to the library; it cannot be deleted")
    with ledger.write_exclusive() as tables:
        row = tables.topics.find(name)
        if row is None:
            raise TopicNotFoundError(f"{ledger.path} has no topic {name!r}")
        seats.cancel(sessions.succession, tables, row, "the topic was deleted")
        holder = clear(sessions.succession, tables, row)
        if holder is not None:
            raise ProducerBusyError(
                f"topic {name!r} cannot be deleted while it is held by {describe(holder)}; close "
                "that producer first",
                holder=owner_info(holder),
            )
        row.flags |= _core.DELETED
        tables.topics.put(row)
        if (transfer := tables.transfers.get(row.id)) is not None:
            sessions.succession.transfers.cancel(tables, row, transfer, "the topic was deleted")
        tables.deletions.add(row.id)
        tables.views.drop(row.id)
        tables.announce.add(row.id)
    delete_pending(ledger)
