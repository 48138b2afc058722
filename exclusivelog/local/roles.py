"""The roles of one ledger, for those who ask for them and hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from exclusivelog.backend import GroupCursor, Owned, RoleDefinition, RoleParts
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.ownership.claims import HeldClaim, LocalGroupCursor
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.records import Claimant, Session
from exclusivelog.local.registry import Registry
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.types import PREFIX, EngineInfo


class Host(Protocol):
    """The engine of those who hold roles."""

    ledger: Ledger
    sessions: Sessions
    registry: Registry
    notifications: Any
    worker: Any
    info: EngineInfo

    @property
    def slot(self) -> int:
        """Its place in the lock file; LedgerError if it is read-only."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""


class LocalRoles:
    """See `exclusivelog.backend.RoleStore`."""

    def __init__(self, engine: Host) -> None:
        self._engine = engine

    def own_topic(self, name: str) -> tuple[int, str]:
        """(id, name) of the topic that stands for the role of that name."""
        ledger, own = self._engine.ledger, PREFIX + name
        with ledger.read() as tables:
            row = tables.topics.find(own)
        if row is None:
            with ledger.write_exclusive() as tables:
                row = tables.topics.find(own) or tables.topics.create(own)
        return row.id, row.name

    def conflicting_roles(self, definition: RoleDefinition) -> set[int]:
        """The own topics of the roles that have what this request wants to claim."""
        with self._engine.ledger.read() as tables:
            return role_rows.conflicting_roles(tables, definition)

    def find(self, seat: Session) -> RoleParts:
        """What the role consists of whose seat was granted."""
        with self._engine.ledger.read() as tables:
            row, held, claimants = role_rows.parts(tables, seat)
            topics = {tables.topics.get(part.topic).name: part for part in held}
            name = tables.topics.get(seat.topic).name.removeprefix(PREFIX)
        anchor = Claimant(
            seat.bound_to, seat.engine, seat.slot, seat.pid, seat.engine_name, PREFIX,
            {name: seat.epoch}, seat.since,
        )  # fmt: skip
        readers: dict[str, GroupCursor] = {
            c.group: LocalGroupCursor(self._engine, c, row.groups[c.group], True)
            for c in claimants if c.reads
        }  # fmt: skip
        return RoleParts(
            topics, {group: list(there) for group, there in row.groups.items()}, readers,
            [c.id for c in claimants if c.reads],
            [(c.group, c.reads, dict(c.generations)) for c in claimants],
            HeldClaim(self._engine, anchor),
        )  # fmt: skip

    def last_sequence(self, session: Session) -> int:
        """The last sequence id of a session's producer name."""
        self._engine.ledger.checkpoint()
        with self._engine.ledger.read() as tables:
            last, _ = tables.producers.get(session.topic, session.name)
        return last

    def keep(self, number: int, claim: Owned) -> None:
        """Notifications about this claim go to it, and closing the engine releases it."""
        self._engine.registry.keep_claim(number, claim)

    def forget(self, numbers: Iterable[int]) -> None:
        """These claims are released."""
        for number in numbers:
            self._engine.registry.forget_claim(number)
