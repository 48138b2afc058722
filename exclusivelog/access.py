"""Who may write: pure decisions over rows. No I/O, no clock, no lock (rules A, B, D).

Everything that decides about admission, epochs, the queue and fencing is here; what
carries a decision out, inside one ledger transaction, is `sessions.py`.

>>> first = admit(epoch=3, owner=None, shared=False, waiting=False, request=Request("exclusive"))
>>> first.verdict.name, first.epoch
('GRANT', 4)
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from exclusivelog import _core
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
    settle: int = 0  # ns that it lets better ones reconnect, at most (rule D7)
    engine_properties: dict[str, str] = field(default_factory=dict)
    chain: int = 0  # the session since which the topic was only ever handed over
    yields: bool = False  # is to be told when somebody waits for its topic
    bound_to: int = 0  # the claim session that it ends with (rule F5)
    announce: dict[str, str] | None = None  # what is announced with its grant

    @property
    def exclusive(self) -> bool:
        """Alone on its topic, once it is admitted."""
        return self.mode != SHARED

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts sessions in the order of rule D1, best first."""
        return (-self.priority, self.created, self.tie)


SESSION_FIELDS = [field.name for field in fields(Session)]
_FIELD_NUMBERS = {name: number for number, name in enumerate(SESSION_FIELDS)}
_values_of = operator.attrgetter(*SESSION_FIELDS)


def changed(session: Session, **values: Any) -> Session:
    """The session with other values of these fields: `dataclasses.replace` in less than half the
    time, because every grant needs several.

    >>> from dataclasses import replace
    >>> session = unpack_session(pack_session(Session(1, 2, "e", 3, 4, "", "n", WAIT, 0, 5, 6, 7)))
    >>> changed(session, epoch=8) == replace(session, epoch=8)
    True
    """
    row = list(_values_of(session))
    for name, value in values.items():
        row[_FIELD_NUMBERS[name]] = value
    return Session(*row)


def pack_session(session: Session) -> bytes:
    """A session as msgpack, fields in order; the last one only if it is there, so that earlier
    versions read all others."""
    row = _values_of(session)
    packed: bytes = msgpack.packb(row if session.announce is not None else row[:-1])
    return packed


def unpack_session(data: bytes) -> Session:
    """The session that `pack_session` packed."""
    return Session(*msgpack.unpackb(data))


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
    groups: tuple[str, ...] = ()  # whose claims on the topic move with it


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


Known = tuple[int, int]  # the best and the lowest priority of a topic's waiters so far


def widened(known: Known | None, *priorities: int) -> Known:
    """What is known once these have been there, too.

    >>> widened((5, 1), 7), widened(None, 3)
    ((7, 1), (3, 3))
    """
    seen = (*(known or ()), *priorities)
    return max(seen), min(seen)


def due(session: Session, freed: int, known: Known | None) -> int:
    """From when on this waiter may have a topic that is free since `freed` (rule D7): compiled,
    see `_core.delay` and `_core.due`."""
    delay = _core.delay(session.priority, session.settle, known)
    return _core.due(session.created, delay, freed)


def held_back(
    session: Session, *, now: int, freed: int, waiting: bool, transfer: Transfer | None,
    known: Known | None = None,
) -> bool:  # fmt: skip
    """Must this request leave a free topic to others, or to later?

    A topic in transit is for its destination alone, whose owner need not mind the queue
    (rule E3). Who has just come leaves it to better ones for a while (rule D7).
    """
    if transfer is not None:
        return transfer.target != session.engine or (waiting and not session.exclusive)
    return waiting or (session.mode == WAIT and now < due(session, freed, known))


def awaits_release(
    session: Session, *, verdict: Verdict, waiting: bool, expected: bool, target: str
) -> bool:
    """Is a request refused only because its engine `target` is still to get the topic (rule E3)?

    `waiting`: somebody is in the queue, which keeps shared producers out. `expected`: a waiter of
    the destination is in it, which becomes owner at the release.
    """
    if verdict not in (Verdict.BUSY, Verdict.FENCED) or target != session.engine:
        return False
    return not (waiting if session.mode == SHARED else expected)


@dataclass(frozen=True, slots=True)
class Promotion:
    """Who becomes owner (None: nobody, now), and who was passed over (rule D4). `later` may
    become owner at the time `due`."""

    winner: Session | None
    dead: tuple[Session, ...]
    stale: tuple[Session, ...]
    later: Session | None = None
    due: int = 0


def promote(
    epoch: int, topic: int, rows: Iterable[tuple[bytes, bytes]], alive: Callable[[int, str], bool],
    *, now: int = 0, freed: int = 0, transfer: Transfer | None = None, known: Known | None = None,
) -> Promotion:  # fmt: skip
    """The first waiter, in the queue's order, that lives and whose claim still holds: selected by
    `_core.select`, out of (key, data) of the queue's rows. `alive` takes slot and engine id.

    Those passed over use up no epoch. The claim is checked again here because the topic may
    have had other owners since it was queued (rule B5). While the topic is in transit only
    the destination's waiters count (rule E3); else the best one decides how long the topic,
    free since `freed`, is left to those who reconnect (rule D7).
    """
    target, until = (None, 0) if transfer is None else (transfer.target.encode(), transfer.until)
    found = _core.select(
        rows, topic, epoch, alive, now=now, freed=freed, known=known, target=target, until=until
    )
    winner = later = None
    if found.winner is not None:
        winner = unpack_session(found.winner)
        granted = granted_epoch(epoch, winner.claim, transfer is not None)
        winner = changed(winner, epoch=granted)
    elif found.later is not None:
        later = unpack_session(found.later)
    dead, stale = map(unpack_session, found.dead), map(unpack_session, found.stale)
    return Promotion(winner, tuple(dead), tuple(stale), later, found.due)
