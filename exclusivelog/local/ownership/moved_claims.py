"""Claims that move with a topic (rules E1, F5, F6).

The claims of the groups that a hand-over names, on the resource that has the topic's name, are
revoked in the very transaction in which the topic is assigned to its destination: those of group
readers, and those of `engine.own`. As always, a claim session is lost as a whole. Its engine gets
a notification that names the successor, so that the old holder's error can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exclusivelog.errors import OwnershipLostError, describe_engine
from exclusivelog.local.ownership.changes import CLAIM_MOVED
from exclusivelog.types import EngineInfo

if TYPE_CHECKING:
    from exclusivelog import _core
    from exclusivelog.local.ownership.changes import Living
    from exclusivelog.local.records import Claimant, Transfer
from exclusivelog.local.storage.tables import Tables

MOST_REMEMBERED = 4096  # successors that an engine can name


def claims_that_move(tables: Tables, row: _core.TopicRow, to: Transfer) -> list[Claimant]:
    """The claims that move with this topic, but for those that the destination has."""
    moved = []
    for group in to.groups:
        _, number = tables.claims.claim(group, row.name)
        holder = tables.claims.claimant(number) if number else None
        if holder is not None and holder.engine != to.target:
            moved.append(holder)
    return moved


def notify(
    living: Living, tables: Tables, row: _core.TopicRow, moved: list[Claimant], to: Transfer
) -> None:
    """Name the successor to the engines that had these claims."""
    for holder in moved:
        if living.exists(holder.slot, holder.engine):
            tables.notifications.post(
                holder, CLAIM_MOVED, to.target, to.name, to.pid, to.properties
            )
    tables.announce.add(row.id)  # a reader that waits for messages must learn of it


def moved_error(claim: str, successor: EngineInfo) -> OwnershipLostError:
    """What the holder of a claim is told that has moved."""
    return OwnershipLostError(
        f"{claim} was handed over with its topic to {describe_engine(successor)}; claim it there",
        successor=successor,
    )


class Successors:
    """Where the claims of one engine have moved, as far as it was notified."""

    def __init__(self) -> None:
        self._known: dict[int, EngineInfo] = {}

    def note(self, claimant: int, *party: Any) -> EngineInfo:
        """A notification has been read: it names this one."""
        successor = self._known[claimant] = _engine(*party)
        while len(self._known) > MOST_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        return successor

    def of(self, tables: Tables, claimant: Claimant) -> EngineInfo | None:
        """Who has what this claim was on; None if it did not move."""
        # What another thread reads and forgets meanwhile is known behind that.
        for _, (kind, number, *party) in tables.notifications.read(claimant.engine, 0):
            if kind == CLAIM_MOVED and number == claimant.id:
                return _engine(*party)
        return self._known.get(claimant.id)


def _engine(engine: str, name: str, pid: int, properties: dict[str, str]) -> EngineInfo:
    return EngineInfo(engine, name, pid, properties, 0.0)
