"""The catalog of a ledger: topics, roles, claims, engines; see `exclusivelog.backend.Catalog`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, logs
from exclusivelog.arguments import check_name, is_internal
from exclusivelog.backend import LastingLock
from exclusivelog.errors import LedgerCorruptedError, ProducerBusyError, TopicNotFoundError
from exclusivelog.local.faults import report_damaged
from exclusivelog.local.log.reading import verify
from exclusivelog.local.maintenance.rewriting import free_room
from exclusivelog.local.names import (
    create_topic,
    list_read_topics,
    list_topics,
    stats_of,
    topic_rows,
)
from exclusivelog.local.ownership import steps
from exclusivelog.local.ownership.claims import Claims
from exclusivelog.local.ownership.role_rows import count_waiters, list_roles
from exclusivelog.local.records import NAMES, describe, owner_info
from exclusivelog.local.shm.locks import lasting_locks
from exclusivelog.local.storage.figures import counted
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import ChangeTable
from exclusivelog.refusals import no_topic
from exclusivelog.types import (
    ClaimInfo,
    EngineInfo,
    EngineStats,
    GroupInfo,
    Report,
    RoleInfo,
    TopicStats,
)

if TYPE_CHECKING:
    from exclusivelog.local.ownership.sessions import Sessions
    from exclusivelog.local.runtime import Runtime

log = logging.getLogger(__name__)


class LocalCatalog:
    """Facts about a ledger as a whole, and the deletion of topics."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine

    @property
    def _ledger(self) -> Ledger:
        return self._engine.ledger

    # ---- topics ----------------------------------------------------------------------------

    def topic(self, name: str, create: bool, until: int = 0) -> tuple[int, str]:
        """(id, name) of the topic, created if `create`; else TopicNotFoundError if it is missing.
        WaitTimeoutError if it cannot be created before `until`."""
        return create_topic(self._ledger, name, create, until)

    def topics(self) -> list[str]:
        """The names of the topics, sorted; without internal ones."""
        self._engine.check_open()
        return list_topics(self._ledger)

    def delete(self, name: str, own: bool = False) -> None:
        """Delete a topic without holder and waiters; `own`: it is an internal one."""
        self._engine.release_dropped()
        delete_topic(self._ledger, self._engine.sessions, name, own)

    # ---- ownership -------------------------------------------------------------------------

    def claims(self, group: str | None) -> list[ClaimInfo]:
        """The claims of live engines, the oldest first."""
        return Claims(self._ledger, self._engine.sessions.succession).living(group)

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""
        claims = Claims(self._ledger, self._engine.sessions.succession)
        read = {name for _, name in claims.readers()}
        there: list[tuple[str, int, int]] = []
        for name, topic in list_read_topics(self._ledger, read):
            try:
                there.append((name, topic, self._engine.topic_store(topic).latest().next_offset))
            except TopicNotFoundError:  # it was deleted meanwhile
                continue
            except LedgerCorruptedError as error:
                report_damaged(self._ledger.path, error, "the groups of one topic are not listed")
        return claims.groups(there, self._engine.unflushed)

    def delete_group(self, name: str) -> int:
        """Remove a reader group's positions; the number of topics on which it had one."""
        claims = Claims(self._ledger, self._engine.sessions.succession)
        return self._ledger.reserve.help(lambda: claims.delete_group(name))

    def roles(self) -> list[RoleInfo]:
        """All roles, by name."""
        return list_roles(self._ledger)

    # ---- facts -----------------------------------------------------------------------------

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open."""
        return self._ledger.lockfile.slots.engines()

    def inside(self) -> EngineInfo | None:
        """The engine that appends or holds the writer lock now, if any."""
        return None if self._ledger.watch is None else self._ledger.watch.inside()

    def check_readable(self) -> None:
        """Raise LedgerCorruptedError if a table cannot be read at all."""
        with self._ledger.read() as tables:
            for table in NAMES:
                next(iter(tables.rows.cursor(table)), None)

    def lasting_locks(self) -> list[LastingLock]:
        """The locks that are held without progress."""
        ledger = self._ledger
        if ledger.journal is None or ledger.watch is None or not ledger.journal.ready:
            return []  # no engine has the ledger open to write: the next one begins anew
        with ledger.environment() as tables:
            return lasting_locks(
                ledger.deaths,
                ledger.journal,
                ledger.watch,
                ledger.lockfile,
                lambda: tables.info()["last_txnid"],
            )

    def stats(self) -> EngineStats:
        """The figures of `EngineStats`."""
        self._engine.check_open()
        rows, damaged = topic_rows(self._ledger)
        with self._ledger.read() as tables:
            waiting_for_roles = count_waiters(tables)
        appenders = [each.sending.appender for each in self._engine.registry.sessions()]
        usage = self._ledger.usage
        sizes: dict[str, Any] = usage.sizes()
        disk = usage.room.disk()
        return EngineStats(
            **sizes,
            **counted(self._ledger),
            **self._changes(),
            topics=len(rows) + damaged,
            waiters=sum(row.waiting for row in rows) + waiting_for_roles,
            engines=len(self.engines()),
            unresponsive=tuple(self._ledger.lockfile.slots.unresponsive()),
            disk_free_bytes=None if disk is None else disk.free,
            disk_low=disk is not None and disk.low,
            groups=tuple(self.groups()),
            oldest_reader=usage.oldest_reader(),
            disk_bytes=usage.disk_bytes(),
            pending_messages=sum(each.pending_messages for each in appenders),
            pending_bytes=sum(each.pending_bytes for each in appenders),
        )

    def _changes(self) -> dict[str, Any]:
        with self._ledger.read() as tables:
            return ChangeTable(tables.rows).counts()._asdict()

    def topic_stats(self) -> list[tuple[str, TopicStats]]:
        """The size of each topic, as of the last checkpoint."""
        self._engine.check_open()
        return [(row.name, stats_of(row, row.next_offset)) for row in topic_rows(self._ledger)[0]]

    def verify(self) -> Report:
        """Read and check all topics."""
        return verify(self._ledger, self._engine.unflushed)


def delete_topic(ledger: Ledger, sessions: Sessions, name: str, own: bool = False) -> None:
    """Delete a topic without holder and waiters; see `Engine.delete_topic`. `own`: it is an
    internal one."""
    check_name(name, "name")
    if is_internal(name) and not own:
        raise ValueError(f"topic={name!r} is internal to the library; it cannot be deleted")
    epoch = ledger.reserve.help(lambda: _mark_deleted(ledger, sessions, name))
    logs.emit(log, logs.DELETED, ledger=ledger.path, topic=name, epoch=epoch)
    free_room(ledger)


def _mark_deleted(ledger: Ledger, sessions: Sessions, name: str) -> int:
    """Delete the topic, but not its messages yet; its last epoch."""
    with ledger.write_fencing() as tables:
        row = tables.topics.find(name)
        if row is None:
            raise no_topic(ledger.path, name)
        steps.cancel_seats(sessions.succession, tables, row, "the topic was deleted")
        holder = sessions.succession.clear(tables, row)
        if holder is not None:
            raise ProducerBusyError(
                f"topic {name!r} cannot be deleted while it is held by {describe(holder)}; close "
                "that producer first",
                holder=owner_info(holder),
            )
        row.flags |= _core.DELETED
        tables.topics.put(row)
        tables.topics.list.remove(row.name)
        if (transfer := tables.transfers.get(row.id)) is not None:
            sessions.succession.transfers.cancel(tables, row, transfer, "the topic was deleted")
        tables.deletions.add(row.id)
        tables.views.drop(row.id)
        tables.announce.add(row.id)
        tables.check_reserve()
    return row.epoch
