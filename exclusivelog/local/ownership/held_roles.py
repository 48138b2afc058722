"""The roles of one engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from exclusivelog.backend import GroupCursor, Owned, RoleDefinition, RoleParts
from exclusivelog.errors import LedgerFullError
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.ownership.claims import HeldClaim, LocalGroupCursor
from exclusivelog.local.records import Claimant, Session
from exclusivelog.types import PREFIX

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime


class LocalRoles:
    """See `exclusivelog.backend.RoleStore`."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine

    def own_topic(self, name: str, until: int = 0) -> tuple[int, str]:
        """(id, name) of the topic that stands for the role of that name. WaitTimeoutError if it
        cannot be created before `until`."""
        ledger, own = self._engine.ledger, PREFIX + name
        with ledger.read() as tables:
            row = tables.topics.find(own)
        if row is None:
            with ledger.write_fencing(until) as tables:
                row = tables.topics.find(own) or tables.topics.create(own)
        return row.id, row.name

    def conflicting_roles(self, definition: RoleDefinition) -> set[int]:
        """The own topics of the roles that hold claims which this request wants."""
        with self._engine.ledger.read() as tables:
            return role_rows.conflicting_roles(tables, definition)

    def find(self, seat: Session) -> RoleParts:
        """The parts of a role whose seat was granted."""
        with self._engine.ledger.read() as tables:
            row, held, claimants = role_rows.parts(tables, seat)
            topics = {tables.topics.get(part.topic).name: part for part in held}
            name = tables.topics.get(seat.topic).name.removeprefix(PREFIX)
        anchor = Claimant(
            seat.bound_to,
            seat.engine,
            seat.slot,
            seat.pid,
            seat.engine_name,
            PREFIX,
            {name: seat.epoch},
            seat.since,
        )
        readers: dict[str, GroupCursor] = {
            c.group: LocalGroupCursor(self._engine, c, row.groups[c.group], True)
            for c in claimants
            if c.reads
        }
        return RoleParts(
            topics,
            {group: list(there) for group, there in row.groups.items()},
            readers,
            [c.id for c in claimants if c.reads],
            [(c.group, c.reads, dict(c.generations)) for c in claimants],
            HeldClaim(self._engine, anchor),
        )

    def last_sequence(self, session: Session) -> int:
        """The last sequence id of a session's producer name."""
        ledger = self._engine.ledger
        try:
            ledger.checkpoint()
        except LedgerFullError:
            with ledger.write_exclusive() as tables:
                tables.include_journal()
                return tables.last_sequence(session.topic, session.name)
        with ledger.read() as tables:
            return tables.last_sequence(session.topic, session.name)

    def keep(self, number: int, claim: Owned) -> None:
        """Deliver notifications about this claim to it, and release it when the engine is
        closed."""
        self._engine.registry.keep_claim(number, claim)

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove claims that were released."""
        for number in numbers:
            self._engine.registry.forget_claim(number)
