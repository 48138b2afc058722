"""The facts of `exclusivelog.admission` in the rows of one machine's log: delays, and the
waiter that is promoted. Pure functions: no I/O, clock or lock (rules D1, D4, D7, E3).

`sessions.py` carries the decisions out, inside one ledger transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from exclusivelog import _core, admission
from exclusivelog.admission import Known, granted_epoch
from exclusivelog.local.records import Session, Transfer, unpack_session


def eligible_at(session: Session, freed: int, known: Known | None) -> int:
    """The time from which this waiter may own a topic that has been free since `freed` (rule
    D7)."""
    return admission.eligible_at(
        created=session.created,
        priority=session.priority,
        settle=session.settle,
        freed=freed,
        known=known,
    )


def is_settled(session: Session, *, now: int, freed: int, known: Known | None) -> bool:
    """Has this request's delay passed, if it has one (rule D7)?"""
    return now >= eligible_at(session, freed, known)


def is_reserved(session: Session, transfer: Transfer | None) -> bool | None:
    """Is the topic in transit to the engine of this request (rule E3)? None: it is not in
    transit."""
    return None if transfer is None else transfer.target == session.engine


def has_living(
    topic: int, epoch: int, rows: Iterable[tuple[bytes, bytes]], alive: Callable[[int, str], bool]
) -> bool:
    """Does a living waiter await the topic? `rows` and `alive` are those of `promote`; no dead
    waiter is unpacked."""
    found = _core.select(
        rows, topic, epoch, alive, now=0, freed=0, known=None, target=None, until=0
    )
    return found.winner is not None or found.retry_waiter is not None or bool(found.stale)


DROPPED_AT_ONCE = 20  # dead waiters, where a living one waits for the end of the transaction


class Promotion(NamedTuple):
    """The waiter that becomes owner now, if any, and those that were passed over (rule D4).
    `retry_waiter` may become owner at the time `retry_at`. If a waiter lives, `dead` has only the
    first `DROPPED_AT_ONCE`, and `left` further ones stay in the queue in front of it."""

    winner: Session | None
    dead: tuple[Session, ...]
    stale: tuple[Session, ...]
    retry_waiter: Session | None = None
    retry_at: int = 0
    left: int = 0


def promote(
    epoch: int,
    topic: int,
    rows: Iterable[tuple[bytes, bytes]],
    alive: Callable[[int, str], bool],
    *,
    now: int = 0,
    freed: int = 0,
    transfer: Transfer | None = None,
    known: Known | None = None,
) -> Promotion:
    """The first waiter, in the queue's order, that lives and whose claimed epoch still holds:
    selected by `_core.select`, out of (key, data) of the queue's rows. `alive` takes slot and
    engine id.

    Those passed over use up no epoch. The claimed epoch is checked again here because the topic may
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
        granted = granted_epoch(epoch, winner.claimed_epoch, transfer is not None)
        winner = winner._replace(epoch=granted)
    elif found.retry_waiter is not None:
        retry_waiter = unpack_session(found.retry_waiter)
    lives = winner is not None or retry_waiter is not None
    some = found.dead[:DROPPED_AT_ONCE] if lives else found.dead
    dead, stale = map(unpack_session, some), map(unpack_session, found.stale)
    left = len(found.dead) - len(some)
    return Promotion(winner, tuple(dead), tuple(stale), retry_waiter, found.retry_at, left)
