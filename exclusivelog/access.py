"""Who may write: pure decisions over rows. No I/O, no clock, no lock (rules A, B, D).

Everything that decides about admission, epochs, the queue and fencing is here; what
carries a decision out, inside one ledger transaction, is `sessions.py`.

>>> first = admit(epoch=3, owner=None, shared=False, waiting=False, request=Request("exclusive"))
>>> first.verdict.name, first.epoch
('GRANT', 4)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from exclusivelog.types import AccessMode

SHARED = AccessMode.SHARED.value
EXCLUSIVE = AccessMode.EXCLUSIVE.value
WAIT = AccessMode.WAIT_FOR_EXCLUSIVE.value
FENCING = AccessMode.EXCLUSIVE_WITH_FENCING.value


@dataclass(frozen=True, slots=True)
class Request:
    """What a producer asks for. `claim` is its `topic_epoch=` (rule B5)."""

    mode: str
    claim: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One producer's registration on a topic, waiting or admitted, as the ledger keeps it.

    `epoch` is what it writes under (0 while it waits); `created` is in ns of the monotonic
    clock, `since` in ms since 1970; `tie` is random and orders equals (rule D1).
    """

    id: int
    topic: int
    engine: str
    slot: int
    pid: int
    engine_name: str
    name: str
    mode: str
    priority: int
    created: int
    tie: int
    since: int
    claim: int | None = None
    epoch: int = 0
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def exclusive(self) -> bool:
        """Alone on its topic, once it is admitted."""
        return self.mode != SHARED

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts sessions in the order of rule D1, best first."""
        return (-self.priority, self.created, self.tie)


class Verdict(enum.Enum):
    """What becomes of a request."""

    ADMIT = "admit"  # as one of several shared producers
    GRANT = "grant"  # as the owner
    TAKE_OVER = "take over"  # as the owner; whoever holds or waits is fenced
    QUEUE = "queue"
    BUSY = "busy"
    FENCED = "fenced"
    STALE = "stale"  # its claim is lower than the topic's epoch
    INVALID = "invalid"  # its claim is higher


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and the topic's epoch once it is carried out."""

    verdict: Verdict
    epoch: int


def admit(
    *, epoch: int, owner: Session | None, shared: bool, waiting: bool, request: Request
) -> Decision:
    """The table of rule A, and the claims of B5 and B6: validated before anyone is disturbed.

    `owner`, `shared` and `waiting` are about the living only.
    """
    claim = request.claim
    if claim is not None and claim < epoch:
        return Decision(Verdict.STALE, epoch)
    if claim is not None and (claim > epoch or claim == 0):  # epoch 0 has no owner
        return Decision(Verdict.INVALID, epoch)
    free = owner is None and not shared
    if request.mode == SHARED:
        refused = owner is not None or waiting
        return Decision(Verdict.BUSY if refused else Verdict.ADMIT, epoch)
    if request.mode == FENCING:
        undisturbed = free and not waiting
        verdict = Verdict.GRANT if undisturbed else Verdict.TAKE_OVER
        return Decision(verdict, granted_epoch(epoch, claim) if undisturbed else epoch + 1)
    if free and not waiting:
        return Decision(Verdict.GRANT, granted_epoch(epoch, claim))
    return Decision(Verdict.QUEUE if request.mode == WAIT else Verdict.FENCED, epoch)


def granted_epoch(epoch: int, claim: int | None) -> int:
    """The epoch of a new owner of a free topic: its own old one, or the next (rule B5)."""
    return epoch if claim == epoch else epoch + 1


@dataclass(frozen=True, slots=True)
class Promotion:
    """Who becomes owner (None: nobody is left), and who was passed over (rule D4)."""

    winner: Session | None
    dead: tuple[Session, ...]
    stale: tuple[Session, ...]


def promote(epoch: int, queue: Iterable[Session], alive: Callable[[Session], bool]) -> Promotion:
    """The first waiter, in the queue's order, that lives and whose claim still holds.

    Those passed over use up no epoch. The claim is checked again here because the topic may
    have had other owners since it was queued (rule B5).
    """
    dead: list[Session] = []
    stale: list[Session] = []
    for waiter in queue:
        if not alive(waiter):
            dead.append(waiter)
        elif waiter.claim is not None and waiter.claim != epoch:
            stale.append(waiter)
        else:
            winner = replace(waiter, epoch=granted_epoch(epoch, waiter.claim))
            return Promotion(winner, tuple(dead), tuple(stale))
    return Promotion(None, tuple(dead), tuple(stale))
