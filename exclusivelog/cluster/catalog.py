"""The catalog of a place, and single topics; see `exclusivelog.backend`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from exclusivelog import _core, logs
from exclusivelog.arguments import check_name, check_not_reserved, is_internal
from exclusivelog.backend import Epoch, Kind, LastingLock, Snapshot
from exclusivelog.cluster.checkpoints import newest_snapshot
from exclusivelog.cluster.compaction import compact
from exclusivelog.cluster.cursor import frames_from, offset_at_time
from exclusivelog.cluster.following import TopicLog, inspect, log_change
from exclusivelog.cluster.frames import LATE, Content
from exclusivelog.cluster.refused import refuses
from exclusivelog.cluster.verifying import verify
from exclusivelog.errors import UnsupportedError
from exclusivelog.refusals import no_topic
from exclusivelog.types import (
    PREFIX,
    Announcement,
    ClaimInfo,
    EngineInfo,
    EngineStats,
    GroupInfo,
    OwnerInfo,
    Report,
    RoleInfo,
    TopicStats,
    TransferInfo,
    WaiterInfo,
)

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["ClusterCatalog", "ClusterTopic"]

logger = logging.getLogger(__name__)


def stats_of(log: TopicLog, lives: Callable[[str], bool]) -> TopicStats:
    """The size of a topic, as far as its log was read."""
    seen = inspect(log, lives)
    with log.changed:
        first, end, epoch = max(0, log.recent.first), log.state.next, log.state.epoch
    return TopicStats(
        None,
        0,
        0,
        0,
        {},
        messages=end - first,
        first_offset=first,
        next_offset=end,
        epoch=epoch,
        holders=len(seen.holders),
        waiters=len(seen.queue),
    )


class ClusterCatalog:
    """Facts about an engine's place as a whole."""

    def __init__(self, engine: ClusterEngine) -> None:
        self._engine = engine

    def topic(self, name: str, create: bool, until: int = 0) -> tuple[int, str]:
        """(id, name) of the topic, created if `create`; else TopicNotFoundError if it is missing.
        No lock of another process delays that, so `until` has no effect."""
        check_name(name, "topic")
        self._engine.check_open()
        there = self._engine.place.has(name)
        if not there and not create:
            raise no_topic(self._engine.path, name, self.topics())
        if not there:
            check_not_reserved(name)
        number = self._engine.topics.number_of(name)
        if not there:
            self._engine.followed(number)  # this creates it
        return number, name

    def topics(self) -> list[str]:
        """The names of the topics, sorted; without internal ones."""
        self._engine.check_open()
        return [name for name in self._engine.place.topics() if not is_internal(name)]

    def roles(self) -> list[RoleInfo]:
        """The locks that were ever asked for, by name."""
        return self._engine.role_store.all()

    delete = refuses("deletion")

    def claims(self, group: str | None) -> list[ClaimInfo]:
        """The claims of live engines, the oldest first."""
        return self._engine.claims.living(group)

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""
        return self._engine.claims.groups()

    def engines(self) -> list[EngineInfo]:
        """The live engines."""
        return self._engine.place.engines()

    def inside(self) -> EngineInfo | None:
        """None: a cluster has no critical section."""
        return None

    def check_readable(self) -> None:
        """It has no tables."""

    def lasting_locks(self) -> list[LastingLock]:
        """None, for the same reason."""
        return []

    def delete_group(self, name: str) -> int:
        """Remove the positions of a reader group without a reader; how many there were."""
        return self._engine.claims.delete_group(name)

    def verify(self) -> Report:
        """Read and check all logs."""
        return verify(self._engine)

    def stats(self) -> EngineStats:
        """This engine's counters, and its facts about topics, engines and queues."""
        messages, size = self._engine.registry.pending()
        followed = [
            each
            for each in self._engine.topics.all()
            if not is_internal(each.name) or each.name.startswith(PREFIX)  # of a lock
        ]
        return EngineStats(
            topics=len(self.topics()),
            engines=len(self.engines()),
            waiters=sum(stats_of(each, self._engine.lives).waiters for each in followed),
            groups=tuple(self.groups()),
            pending_messages=messages,
            pending_bytes=size,
            **self._engine.figures.counted(),
        )

    def topic_stats(self) -> list[tuple[str, TopicStats]]:
        """The size of each topic that this engine follows, as far as its log was read."""
        self._engine.check_open()
        return sorted(
            (each.name, stats_of(each, self._engine.lives))
            for each in self._engine.topics.all()
            if not is_internal(each.name)
        )


class ClusterTopic:
    """One topic. Every call reads its log up to the current end."""

    def __init__(self, engine: ClusterEngine, topic: int) -> None:
        self._engine, self._id = engine, topic

    def _log(self) -> TopicLog:
        """The topic's log, read to its end."""
        self._engine.check_open()
        log = self._engine.followed(self._id)
        log.catch_up()
        return log

    def latest(self) -> _core.TopicRow:
        """Its epoch and offsets."""
        log = self._log()
        row = _core.TopicRow()
        with log.changed:
            row.id, row.name = self._id, log.name
            row.epoch, row.next_offset = log.state.epoch, log.state.next
            row.first_offset = max(0, log.recent.first)
            row.last_publish_time = log.state.published
            row.flags = _core.TERMINATED if log.state.terminated else 0
        return row

    def facts(self) -> _core.TopicRow:
        """Its epoch and offsets."""
        return self.latest()

    def owner(self) -> OwnerInfo | None:
        """The session that owns it; None if no live engine has one."""
        owner = inspect(self._log(), self._engine.lives).owner
        return None if owner is None else owner.owner()

    def holders(self) -> list[OwnerInfo]:
        """The owner, or the shared producers, whose engines live."""
        return inspect(self._log(), self._engine.lives).holders

    def waiters(self) -> list[WaiterInfo]:
        """The sessions in its queue whose engines live, best first."""
        return [each.info() for each in inspect(self._log(), self._engine.lives).queue]

    def transfers(self) -> list[TransferInfo]:
        """The hand-over in progress."""
        log = self._log()
        seen = inspect(log, self._engine.lives)
        assigned, owner = seen.assigned, None if seen.owner is None else seen.owner.owner()
        if assigned is None:
            return []
        state = "releasing" if owner is not None else "assigned"
        return [TransferInfo(log.name, state, owner, assigned.target, assigned.until)]

    def yielding_owner(self) -> int:
        """The session that owns it, if that has agreed to release it when another one waits."""
        log = self._engine.followed(self._id)  # asked often, by a request that the log has woken
        with log.changed:
            owner, session = log.state.owner, log.waiters.yielding
        return session if owner is not None and owner.session == session else 0

    def evict_late(self, owner: int, until: int) -> bool:
        """Evict the owner, if it is this session, and has agreed to release the topic."""
        log = self._engine.followed(self._id)
        grant = log.state.owner
        if grant is None or grant.session != owner or log.waiters.yielding != owner:
            return False
        log.evict(grant, LATE)
        log_change(log, grant.epoch, "evict", LATE, grant.holder)
        return True

    def kind(self) -> tuple[str, dict[str, str | None]]:
        """What the topic holds ("messages", "map", "state"), and a map's serialisers."""
        held = dict(self._engine.kinds.of(self._log().name))
        kind = held.pop("holds", None) or "messages"
        return kind, held

    def check_kind(self, kind: Kind) -> bool:
        """Is it recorded that the topic holds this? StateError if it holds something else."""
        return self._engine.kinds.check(self._log().name, kind)

    def record_kind(self, kind: Kind) -> None:
        """Record what the topic holds; StateError if it holds something else."""
        self._engine.kinds.record(self._log().name, kind)

    def stats(self, storage: bool) -> TopicStats:
        """The topic's size, and its reader groups; how its records are stored is up to the
        cluster."""
        log = self._log()
        groups = tuple(each for each in self._engine.claims.groups() if each.topic == log.name)
        return replace(stats_of(log, self._engine.lives), groups=groups)

    def newest(self, position: int, views: bool) -> tuple[int, Snapshot | None]:
        """The topic's first offset, and its newest snapshot; compacted views store no messages."""
        log = self._log()
        found = newest_snapshot(self._engine.place, log.name, log.log, position)
        return max(0, log.recent.first), found

    def change_counter(self) -> tuple[_core.SharedWords, int]:
        """The place of the counter that every frame changes."""
        return self._engine.followed(self._id).frames.words, 0

    def announcement(self) -> Announcement | None:
        """The last announcement of an owner."""
        log = self._log()
        log.catch_up()
        found = log.state.announced
        if found is None:
            return None
        holder, grant = found.grant.holder, found.grant
        return Announcement(
            found.info,
            grant.epoch,
            found.time,
            holder.engine_id,
            holder.engine_name,
            holder.pid,
            holder.producer_name,
            grant.session,
        )

    def terminate(self) -> int:
        """End all writing for good; the next offset."""
        log = self._log()
        log.catch_up()
        owner = inspect(log, self._engine.lives).owner
        end = log.terminate()
        if owner is not None:
            log_change(log, owner.epoch, "release", "terminated", owner.holder)
        logs.emit(logger, logs.TERMINATED, ledger=log.host.path, topic=log.name, offset=end)
        return end

    def compact(self) -> int:
        """Note up to which offset compacted readers leave out what is not the last of its key; the
        number of messages before it that stay."""
        self._engine.check_writable()
        log = self._log()
        return compact(self._engine.place, log, frames_from(log, 0))

    trim = refuses("retention")
    retention = refuses("retention")
    retain = refuses("retention")
    compress = refuses("compression")

    # ---- what a query planner asks ---------------------------------------------------------

    def offset_at(self, time_ms: int) -> int:
        """The offset of the first message published at this time or later."""
        log = self._log()
        return offset_at_time(log, time_ms)

    def message_bytes(self, samples: Iterable[int]) -> float:
        """The average size of the newest messages, regardless of `samples`."""
        log = self._engine.followed(self._id)
        with log.changed:
            return log.recent.message_bytes

    def producers(self) -> list[tuple[str, int, bool]]:
        """(name, last sequence id, is it live?) of each producer name."""
        log = self._log()
        live = {holder.producer_name for holder in inspect(log, self._engine.lives).holders}
        with log.changed:
            sequences = sorted(log.state.sequences.items())
        return [(name, last, name in live) for name, last in sequences]

    def epochs(self, first: int) -> list[Epoch]:
        """The epochs of the messages from the offset `first` on. All of them are read."""
        log = self._log()
        found: list[Epoch] = []
        for frame in frames_from(log, first):
            for offset, content in enumerate(frame.contents, frame.first):
                if offset < first:
                    continue
                if not found or found[-1].epoch != frame.epoch:
                    found.append(Epoch(frame.epoch, offset, content.publish_time))
                _count(found[-1], offset, content)
        return found

    def end_within(self, start: int, end: int, most_bytes: int) -> NoReturn:
        """Unsupported: the log has no sizes."""
        raise UnsupportedError(
            "a cluster's log is not measured in bytes; bound it by a number of messages "
            "(maxOffsetsPerTrigger)"
        )

    batches = record_batch = refuses("once")


def _count(epoch: Epoch, offset: int, content: Content) -> None:
    """Count a message of this epoch."""
    epoch.last_offset, epoch.last_time = offset, content.publish_time
    epoch.messages += 1
    if content.producer_name not in epoch.producers:
        epoch.producers.append(content.producer_name)
