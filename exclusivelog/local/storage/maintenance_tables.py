"""Tables about what is made beside the log, and what is removed from it."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator

import msgpack

from exclusivelog.errors import EngineClosedError
from exclusivelog.local.records import View
from exclusivelog.local.storage.rows import (
    ANNOUNCED,
    KIND,
    OVERDUE,
    PAIR,
    PRIORITIES,
    TIMES,
    U64,
    Rows,
    u64,
)

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
        """Since when messages of the topic are overdue (see ages.py): a boot, and ns of its
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
