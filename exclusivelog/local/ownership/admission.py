"""Decisions about write access: pure functions of rows. No I/O, clock or lock (rules A, B, D).

All decisions about admission, epochs, the queue and fencing are here; `sessions.py` carries them
out, inside one ledger transaction.

>>> first = admit(epoch=3, owner=None, shared=False, waiting=False, request=Request("exclusive"))
>>> first.verdict.name, first.epoch
('GRANT', 4)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

from exclusivelog import _core, admission
from exclusivelog.admission import Known
from exclusivelog.local.records import (
    FENCING,
    SHARED,
    WAIT,
    Session,
    Transfer,
    unpack_session,
)


class Request(NamedTuple):
    """A producer's request. `claim` is its `topic_epoch=` (rule B5)."""

    mode: str
    claim: int | None = None


class Verdict(enum.Enum):
    """The decision about a request."""

    ADMIT = "admit"  # as one of several shared producers
    GRANT = "grant"  # as the owner
    TAKE_OVER = "take over"  # as the owner; all holders and waiters are fenced
    QUEUE = "queue"
    BUSY = "busy"
    FENCED = "fenced"
    STALE = "stale"  # its claim is lower than the topic's epoch
    INVALID = "invalid"  # its claim is higher


class Decision(NamedTuple):
    """The verdict, and the topic's epoch once it is carried out."""

    verdict: Verdict
    epoch: int


def admit(
    *, epoch: int, owner: Session | None, shared: bool, waiting: bool, request: Request,
    in_transit: bool = False, recreated: bool = False,
) -> Decision:  # fmt: skip
    """The table of rule A, and the claims of B5 and B6: validated before any session is evicted.

    `owner`, `shared` and `waiting` count only sessions of live engines. A topic that is
    `in_transit` gets a new epoch in any case (rule E1). One that is `recreated` had its epoch
    before it was deleted: no owner gets that again (rule B1).
    """
    claim = request.claim
    if claim is not None and (claim < epoch or (recreated and claim == epoch)):
        return Decision(Verdict.STALE, epoch)
    owned = request.mode != SHARED  # epoch 0 has no owner, but may have had shared producers
    if claim is not None and (claim > epoch or (claim == 0 and owned)):
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


def eligible_at(session: Session, freed: int, known: Known | None) -> int:
    """The time from which this waiter may own a topic that has been free since `freed` (rule
    D7)."""
    return admission.eligible_at(
        created=session.created, priority=session.priority, settle=session.settle, freed=freed,
        known=known,
    )  # fmt: skip


def held_back(
    session: Session, *, now: int, freed: int, waiting: bool, transfer: Transfer | None,
    known: Known | None = None,
) -> bool:  # fmt: skip
    """Must this request wait, although the topic may be free?

    A topic in transit is for its destination alone, where it goes past the queue (rule E3). A new
    waiter does not take a free topic during its `settle` delay (rule D7).
    """
    if transfer is not None:
        return transfer.target != session.engine or (waiting and not session.exclusive)
    return waiting or (session.mode == WAIT and now < eligible_at(session, freed, known))


def awaits_release(
    session: Session, *, verdict: Verdict, waiting: bool, expected: bool, target: str
) -> bool:
    """Is a request refused only because its engine `target` is still to get the topic (rule E3)?

    `waiting`: the queue is not empty, which keeps shared producers out. `expected`: a waiter of the
    destination is in it, which becomes owner at the release.
    """
    if verdict not in (Verdict.BUSY, Verdict.FENCED) or target != session.engine:
        return False
    return not (waiting if session.mode == SHARED else expected)


class Promotion(NamedTuple):
    """The waiter that becomes owner now, if any, and those that were passed over (rule D4).
    `retry_waiter` may become owner at the time `retry_at`."""

    winner: Session | None
    dead: tuple[Session, ...]
    stale: tuple[Session, ...]
    retry_waiter: Session | None = None
    retry_at: int = 0


def promote(
    epoch: int, topic: int, rows: Iterable[tuple[bytes, bytes]], alive: Callable[[int, str], bool],
    *, now: int = 0, freed: int = 0, transfer: Transfer | None = None, known: Known | None = None,
) -> Promotion:  # fmt: skip
    """The first waiter, in the queue's order, that lives and whose claim still holds: selected by
    `_core.select`, out of (key, data) of the queue's rows. `alive` takes slot and engine id.

    Those passed over use up no epoch. The claim is checked again here because the topic may
    have had other owners since it was queued (rule B5). While the topic is in transit only
    the destination's waiters count (rule E3); else the best waiter decides how long the topic, free
    since `freed`, is left to producers that reconnect (rule D7).
    """
    target, until = (None, 0) if transfer is None else (transfer.target.encode(), transfer.until)
    found = _core.select(
        rows, topic, epoch, alive, now=now, freed=freed, known=known, target=target, until=until
    )
    winner = retry_waiter = None
    if found.winner is not None:
        winner = unpack_session(found.winner)
        granted = granted_epoch(epoch, winner.claim, transfer is not None)
        winner = winner._replace(epoch=granted)
    elif found.retry_waiter is not None:
        retry_waiter = unpack_session(found.retry_waiter)
    dead, stale = map(unpack_session, found.dead), map(unpack_session, found.stale)
    return Promotion(winner, tuple(dead), tuple(stale), retry_waiter, found.retry_at)
