"""All that one ledger has: topics, roles, claims, engines; see `exclusivelog.backend.Catalog`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from exclusivelog import _core
from exclusivelog.local import unloading
from exclusivelog.local.log.entries import verify
from exclusivelog.local.maintenance.backup import backup
from exclusivelog.local.ownership.claims import Claims
from exclusivelog.local.ownership.role_grants import list_roles
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.topics import checked, create_topic, delete_topic, list_topics
from exclusivelog.types import ClaimInfo, EngineInfo, GroupInfo, Report, RoleInfo


class Host(unloading.Host, Protocol):
    """The engine that asks."""

    sessions: Sessions
    unflushed: bool

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now."""


class LocalCatalog:
    """What an engine can learn of its ledger as a whole, and change there."""

    def __init__(self, engine: Host) -> None:
        self._engine = engine

    @property
    def _ledger(self) -> Ledger:
        return self._engine.ledger

    # ---- topics ----------------------------------------------------------------------------

    def topic(self, name: str, create: bool) -> tuple[int, str]:
        """(id, name) of the topic of that name, made if need be; or TopicNotFoundError."""
        return create_topic(self._ledger, name, create)

    def topics(self) -> list[str]:
        """The names of the topics that exist, sorted; without the library's own."""
        self._engine.check_open()
        return list_topics(self._ledger)

    def delete(self, name: str, own: bool = False) -> None:
        """Remove a topic that nobody holds or awaits; `own`: it is one of the library's."""
        delete_topic(self._ledger, self._engine.sessions, name, own)

    # ---- ownership -------------------------------------------------------------------------

    def claims(self, group: str | None) -> list[ClaimInfo]:
        """The claims that live engines hold, the oldest first."""
        return Claims(self._ledger, self._engine.sessions.succession).living(group)

    def groups(self) -> list[GroupInfo]:
        """The reader groups of all topics."""
        there = [create_topic(self._ledger, name, False) for name in self.topics()]
        claims = Claims(self._ledger, self._engine.sessions.succession)
        return claims.groups(
            (name, topic, checked(self._engine.latest(topic)).next_offset) for topic, name in there
        )

    def roles(self) -> list[RoleInfo]:
        """All roles, by name."""
        return list_roles(self._ledger)

    def moves(
        self, topics: str | Iterable[str], to: str, timeout: float, groups: Iterable[str],
        producer: str | None,
    ) -> unloading.Unloading:  # fmt: skip
        """What `Engine.unload` does, to be begun or run."""
        return unloading.unloading(self._engine, self.topics, topics, to, timeout, groups, producer)

    def cancel_moves(self, topics: str | Iterable[str]) -> list[str]:
        """End the moves of these topics. Returns the names of those that were under way."""
        names = unloading.choose(self._engine.path, self.topics, topics)
        ids = [create_topic(self._ledger, name, False)[0] for name in names]
        return self._engine.hand_over.cancel(ids, "cancelled")

    # ---- facts -----------------------------------------------------------------------------

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open."""
        return self._ledger.lockfile.slots.engines()

    def inside(self) -> EngineInfo | None:
        """The engine that is inside the critical section now."""
        return None if self._ledger.watch is None else self._ledger.watch.inside()

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes and counts, and the oldest reader."""
        topics, engines = self.topics(), self.engines()
        return {
            **self._ledger.stats(), "topics": len(topics), "engines": len(engines),
            "oldest_reader": self._ledger.oldest_reader(),
        }  # fmt: skip

    def verify(self) -> Report:
        """Read everything."""
        return verify(self._ledger, self._engine.unflushed)

    def backup(self, path: str) -> None:
        """Copy the ledger into a directory."""
        backup(self._ledger, path)
