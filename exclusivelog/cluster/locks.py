"""Locks on a cluster: roles without parts (rules A1, D1, D5).

A lock is owned as a topic is: the topic that stands for it has a log of its own, whose rule says
who holds it. So it has the queue and the epochs of topics. A role that binds topics, groups or
claims is refused: these have logs of their own, and no record grants all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from exclusivelog.backend import Owned, ProducerSession, RoleDefinition, RoleParts
from exclusivelog.cluster.following import SessionFacts, inspect
from exclusivelog.cluster.refused import refuses
from exclusivelog.cluster.sessions import ClusterSession
from exclusivelog.errors import ExclusiveLogError, OwnershipLostError, ProducerMovedError
from exclusivelog.refusals import claim_moved
from exclusivelog.types import PREFIX, EngineInfo, RoleInfo

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["ClusterRoles"]


class SeatClaim:
    """Whether the session that holds a lock is the owner; see
    `exclusivelog.backend.ClaimSession`."""

    is_held_in = refuses("transactions")
    session: ClusterSession | None = None  # once its producer is made

    def __init__(self, host: ClusterEngine, name: str, seat: SessionFacts) -> None:
        self.id, self.group, self.generations = seat.id, PREFIX, {name: seat.epoch}
        self._log = host.followed(seat.topic)
        self._host = host

    @property
    def ledger(self) -> object:
        """Where it is kept."""
        return self._host.ledger

    def is_held(self) -> bool:
        """Is it still valid?"""
        self._log.catch_up()
        return self._log.state.owned and self._log.state.session == self.id

    def successor(self) -> EngineInfo | None:
        """The engine that it was handed over to; None if it was lost otherwise."""
        error = None if self.session is None else self.session.ended_by
        return error.successor if isinstance(error, ProducerMovedError) else None

    def release(self) -> None:
        """No effect: closing the producer releases the topic."""


class Holding:
    """Keeps what a lock's session notifies. It is a `SessionListener` beside the producer's own."""

    def __init__(self, claim: Owned) -> None:
        self.claim = claim

    def lost(self, error: ExclusiveLogError) -> None:
        """The lock was lost."""
        successor = error.successor if isinstance(error, ProducerMovedError) else None
        self.claim.lose(
            OwnershipLostError(str(error))
            if successor is None
            else claim_moved("the claim", successor)
        )

    def ended(self) -> None:
        """No effect: it was released."""

    def wanted(self) -> None:
        """No effect."""

    def moved_to(self, session: ProducerSession, error: ProducerMovedError) -> None:
        """Never called: the producer of a lock does not follow."""


class ClusterRoles:
    """See `exclusivelog.backend.RoleStore`."""

    def __init__(self, host: ClusterEngine) -> None:
        self._host = host
        self._claims: dict[int, SeatClaim] = {}  # by session, until they are kept
        self._kept: dict[int, Holding] = {}  # dropping a lock does not release it

    def own_topic(self, name: str, until: int = 0) -> tuple[int, str]:
        """(id, name) of the topic that stands for the lock of that name."""
        own = PREFIX + name
        number = self._host.topics.number_of(own)
        self._host.followed(number)  # this creates it
        return number, own

    def conflicting_roles(self, definition: RoleDefinition) -> set[int]:
        """None: locks have no claims."""
        return set()

    def find(self, seat: SessionFacts) -> RoleParts:
        """The parts of a lock that was granted: none."""
        name = self._host.followed(seat.topic).name.removeprefix(PREFIX)
        claim = self._claims[seat.id] = SeatClaim(self._host, name, seat)
        return RoleParts({}, {}, {}, [], [], claim)

    last_sequence = refuses("roles")

    def keep(self, number: int, claim: Owned) -> None:
        """Notify `claim` of the loss of the lock whose session has this number."""
        holding = self._kept[number] = Holding(claim)
        seat = self._claims.pop(number)
        session = self._host.registry.find(number)
        if session is None:  # it was handed over meanwhile, or its engine was closed
            if not self._host.closed:
                [(name, _)] = seat.generations.items()
                holding.lost(
                    OwnershipLostError(f"role {name!r} was lost as soon as it was granted")
                )
            return
        seat.session = session
        session.subscribe(holding, owner=False)

    def forget(self, numbers: Iterable[int]) -> None:
        """These locks were released."""
        for number in numbers:
            self._kept.pop(number, None)

    def all(self) -> list[RoleInfo]:
        """The locks that were ever asked for, by name."""
        names = [name for name in self._host.place.topics() if name.startswith(PREFIX)]
        return [self._info(name) for name in sorted(names)]

    def _info(self, name: str) -> RoleInfo:
        log = self._host.topics.named(name)
        log.catch_up()
        seen = inspect(log, self._host.lives)
        holder = None if seen.owner is None else seen.owner.owner()
        waiters = tuple(each.info() for each in seen.queue)
        return RoleInfo(name.removeprefix(PREFIX), log.state.epoch, holder, (), {}, {}, waiters)
