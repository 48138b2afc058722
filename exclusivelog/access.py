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
    settle: int = 0  # ns that the topic must have been free for (rule D7)
    engine_properties: dict[str, str] = field(default_factory=dict)
    chain: int = 0  # the session since which the topic was only ever handed over
    yields: bool = False  # is to be told when somebody waits for its topic

    @property
    def exclusive(self) -> bool:
        """Alone on its topic, once it is admitted."""
        return self.mode != SHARED

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts sessions in the order of rule D1, best first."""
        return (-self.priority, self.created, self.tie)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A hand-over of a topic to the engine `target`, under way until `until` (ns of the
    monotonic clock): the session `session` is to release it, or nobody holds it any more (0).
    The rest is for people, and for producers that follow (rules E1-E4)."""

    topic: int
    target: str
    slot: int
    until: int
    session: int
    name: str
    pid: int
    properties: dict[str, str]
    chain: int = 0  # the first session of an unbroken chain of hand-overs that this one goes on


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
    *, epoch: int, owner: Session | None, shared: bool, waiting: bool, request: Request,
    in_transit: bool = False, reborn: bool = False,
) -> Decision:  # fmt: skip
    """The table of rule A, and the claims of B5 and B6: validated before anyone is disturbed.

    `owner`, `shared` and `waiting` are about the living only. A topic that is `in_transit`
    gets a new epoch in any case (rule E1). One that is `reborn` had its epoch before it was
    deleted, and nobody has it again (rule B1).
    """
    claim = request.claim
    if claim is not None and (claim < epoch or (reborn and claim == epoch)):
        return Decision(Verdict.STALE, epoch)
    if claim is not None and (claim > epoch or claim == 0):  # epoch 0 has no owner
        return Decision(Verdict.INVALID, epoch)
    free = owner is None and not shared
    if request.mode == SHARED:
        refused = owner is not None or waiting
        return Decision(Verdict.BUSY if refused else Verdict.ADMIT, epoch)
    if request.mode == FENCING:
        if not free or waiting:
            return Decision(Verdict.TAKE_OVER, epoch + 1)
        return Decision(Verdict.GRANT, granted_epoch(epoch, claim, in_transit))
    if free and not waiting:
        return Decision(Verdict.GRANT, granted_epoch(epoch, claim, in_transit))
    return Decision(Verdict.QUEUE if request.mode == WAIT else Verdict.FENCED, epoch)


def granted_epoch(epoch: int, claim: int | None, in_transit: bool) -> int:
    """The epoch of a new owner of a free topic: its own old one (rule B5), or the next, as
    always after a hand-over (rule E1)."""
    return epoch if claim == epoch and not in_transit else epoch + 1


def held_back(
    session: Session, *, now: int, freed: int, waiting: bool, transfer: Transfer | None
) -> bool:
    """Must this request leave a free topic to others, or to later?

    A topic in transit is for its destination alone, whose owner need not mind the queue
    (rule E3). Who wants it settled waits until it has been free for that long (rule D7).
    """
    if transfer is not None:
        return transfer.target != session.engine or (waiting and not session.exclusive)
    return waiting or (session.mode == WAIT and now < freed + session.settle)


@dataclass(frozen=True, slots=True)
class Promotion:
    """Who becomes owner (None: nobody, now), and who was passed over (rule D4). `later` may
    become owner at the time `due`."""

    winner: Session | None
    dead: tuple[Session, ...]
    stale: tuple[Session, ...]
    later: Session | None = None
    due: int = 0

    @property
    def appointment(self) -> tuple[int, int]:
        """(the session that is to come back or 0, when)."""
        return (0, 0) if self.later is None else (self.later.id, self.due)


def promote(
    epoch: int, queue: Iterable[Session], alive: Callable[[Session], bool], *,
    now: int = 0, freed: int = 0, transfer: Transfer | None = None,
) -> Promotion:  # fmt: skip
    """The first waiter, in the queue's order, that lives and whose claim still holds.

    Those passed over use up no epoch. The claim is checked again here because the topic may
    have had other owners since it was queued (rule B5). While the topic is in transit only
    the destination's waiters count (rule E3); else the best one decides how long the topic,
    free since `freed`, is left to settle (rule D7).
    """
    dead: list[Session] = []
    stale: list[Session] = []
    later: Session | None = None
    due = 0
    for waiter in queue:
        if not alive(waiter):
            dead.append(waiter)
        elif waiter.claim is not None and waiter.claim != epoch:
            stale.append(waiter)
        elif transfer is not None and waiter.engine != transfer.target:
            if later is None:
                later, due = waiter, transfer.until
        elif transfer is None and now < freed + waiter.settle:
            later, due = waiter, freed + waiter.settle
            break
        else:
            granted = granted_epoch(epoch, waiter.claim, transfer is not None)
            winner = replace(waiter, epoch=granted)
            return Promotion(winner, tuple(dead), tuple(stale))
    return Promotion(None, tuple(dead), tuple(stale), later, due)
