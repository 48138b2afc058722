"""The rules that the model goes by, and each of them broken: the controls of its judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from exclusivelog import _core, access
from exclusivelog.access import (
    EXCLUSIVE,
    SHARED,
    Decision,
    Promotion,
    Session,
    Verdict,
    pack_session,
    unpack_session,
)
from exclusivelog.tables import queue_key
from proof.world import SETTLED, Client, Ledger


def may_append(ledger: Ledger, client: Client) -> bool:
    """As `log.check_may_write`, with the very comparison that an append makes."""
    if client.mode == SHARED:
        return client.id in ledger.holders
    row = _core.TopicRow()
    row.owner, row.epoch = ledger.owner, ledger.epoch
    return bool(row.admits(client.id, client.epoch))


def release(ledger: Ledger, client: Client) -> None:
    """Close: a session that is not registered any more is passed over."""
    row = ledger.holders.get(client.id)
    if row is not None:
        ledger.leave(row)


@dataclass(frozen=True)
class Rules:
    """Who decides what."""

    admit: Callable[..., Decision] = access.admit
    promote: Callable[..., Promotion] = access.promote
    held_back: Callable[..., bool] = access.held_back
    awaits_release: Callable[..., bool] = access.awaits_release
    may_append: Callable[[Ledger, Client], bool] = may_append
    release: Callable[[Ledger, Client], None] = release
    promotes: bool = True
    keeps_what_was_refused: bool = False
    writes_later: bool = False
    drops_grants: bool = False
    reminds: bool = True
    tells_by_time: bool = True
    sees_dead_destinations: bool = True
    keeps_deadlines: bool = True
    asks_before_it_releases: bool = True
    promotes_what_was_over: bool = True


def does_not_raise(verdict: Verdict) -> Callable[..., Decision]:
    def admit(**facts: Any) -> Decision:
        decision = access.admit(**facts)
        return replace(decision, epoch=facts["epoch"]) if decision.verdict is verdict else decision

    return admit


def believes_stale_claims(**facts: Any) -> Decision:
    claim = facts["request"].claim
    if claim is None or claim >= facts["epoch"]:
        return access.admit(**facts)
    return access.admit(**{**facts, "epoch": claim})


def believes_claims_ahead(**facts: Any) -> Decision:
    claim = facts["request"].claim
    return access.admit(**{**facts, "epoch": max(facts["epoch"], claim or 0)})


def forgets(fact: str, nothing: Any) -> Callable[..., Decision]:
    return lambda **facts: access.admit(**{**facts, fact: nothing})


def fences_without_force(**facts: Any) -> Decision:
    decision = access.admit(**facts)
    if facts["request"].mode == EXCLUSIVE and decision.verdict is Verdict.FENCED:
        return Decision(Verdict.GRANT, facts["epoch"] + 1)
    return decision


Rows = list[tuple[bytes, bytes]]  # of the queue's table


def rows_of(sessions: list[Session]) -> Rows:
    """The rows of these waiters, in this order if it were the queue's."""
    inorder = [replace(s, priority=-number) for number, s in enumerate(sessions)]
    keys = [queue_key(session) for session in inorder]
    return list(zip(keys, map(pack_session, sessions), strict=True))


def sessions_of(rows: Rows) -> list[Session]:
    return [unpack_session(data) for _, data in rows]


def does_not_look_who_lives(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    return access.promote(epoch, topic, rows, lambda slot, engine: True, **facts)


def stops_at_the_first_dead(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    [first] = sessions_of(rows[:1])
    if not alive(first.slot, first.engine):
        return Promotion(None, (first,), ())
    return access.promote(epoch, topic, rows[:1], alive, **facts)


def stops_at_the_first_stale(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    promotion = access.promote(epoch, topic, rows, alive, **facts)
    if promotion.stale:
        return Promotion(None, promotion.dead, promotion.stale)
    return promotion


def believes_stale_waiters(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    waiters = sessions_of(rows)
    winner = next((session for session in waiters if alive(session.slot, session.engine)), None)
    if winner is None or winner.claim is None:
        return access.promote(epoch, topic, rows, alive, **facts)
    return Promotion(replace(winner, epoch=winner.claim), (), ())


def last_come_first_served(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    backwards = rows_of(sessions_of(rows)[::-1])
    return access.promote(epoch, topic, backwards, alive, **facts)


def the_dead_use_up_epochs(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    promotion = access.promote(epoch, topic, rows, alive, **facts)
    if promotion.winner is None:
        return promotion
    used_up = promotion.winner.epoch + len(promotion.dead)
    return replace(promotion, winner=replace(promotion.winner, epoch=used_up))


def promotes_under_the_same_epoch(epoch: int, *args: Any, **facts: Any) -> Promotion:
    promotion = access.promote(epoch, *args, **facts)
    if promotion.winner is None:
        return promotion
    return replace(promotion, winner=replace(promotion.winner, epoch=epoch))


def promotes_without(fact: str, nothing: Any) -> Callable[..., Promotion]:
    return lambda *args, **facts: access.promote(*args, **{**facts, fact: nothing})


def holds_back_without(fact: str, nothing: Any) -> Callable[..., bool]:
    return lambda session, **facts: access.held_back(session, **{**facts, fact: nothing})


def passes_over_those_who_settle(
    epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any
) -> Promotion:
    left = facts["now"] - facts["freed"]
    hasty = [
        (key, data)
        for key, data in rows
        if left >= unpack_session(data).settle or facts["transfer"]
    ]
    return access.promote(epoch, topic, hasty, alive, **facts)


def believes_that_all_have_just_come(
    epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any
) -> Promotion:
    newcomers = [
        replace(session, created=facts["freed"] + session.id) for session in sessions_of(rows)
    ]
    come = [(queue_key(session), pack_session(session)) for session in newcomers]
    return access.promote(epoch, topic, come, alive, **facts)


def releases_whoever_is_owner(ledger: Ledger, client: Client) -> None:
    row = ledger.holders.get(ledger.owner)
    if row is not None:
        ledger.leave(row)


def releases_whoever_has_the_epoch(ledger: Ledger, client: Client) -> None:
    owner = ledger.holders.get(ledger.owner)
    if client.mode == SHARED or owner is None:
        release(ledger, client)
    elif owner.epoch == client.epoch:
        ledger.leave(owner)


def compares_epochs_only(ledger: Ledger, client: Client) -> bool:
    if client.mode == SHARED:
        return may_append(ledger, client)
    return client.epoch == ledger.epoch


CONTROLS = {
    "a grant does not raise the epoch": Rules(admit=does_not_raise(Verdict.GRANT)),
    "a take-over does not raise the epoch": Rules(admit=does_not_raise(Verdict.TAKE_OVER)),
    "a promotion does not raise the epoch": Rules(promote=promotes_under_the_same_epoch),
    "stale claims are believed": Rules(admit=believes_stale_claims),
    "claims ahead of the epoch are believed": Rules(admit=believes_claims_ahead),
    "the owner is forgotten": Rules(admit=forgets("owner", None)),
    "the shared producers are forgotten": Rules(admit=forgets("shared", False)),
    "the waiters are forgotten": Rules(admit=forgets("waiting", False)),
    "exclusive is granted beside others": Rules(admit=fences_without_force),
    "a refused fencer has evicted already": Rules(keeps_what_was_refused=True),
    "the dead are promoted": Rules(promote=does_not_look_who_lives),
    "promotion stops at the first dead": Rules(promote=stops_at_the_first_dead),
    "promotion stops at the first stale": Rules(promote=stops_at_the_first_stale),
    "stale waiters are promoted": Rules(promote=believes_stale_waiters),
    "the last to come is promoted first": Rules(promote=last_come_first_served),
    "the dead use up epochs": Rules(promote=the_dead_use_up_epochs),
    "nobody is promoted": Rules(promotes=False),
    "appends are not checked": Rules(may_append=lambda ledger, client: True),
    "appends compare epochs only": Rules(may_append=compares_epochs_only),
    "appends are checked before, and written later": Rules(writes_later=True),
    "a release compares nothing": Rules(release=releases_whoever_is_owner),
    "a release compares epochs only": Rules(release=releases_whoever_has_the_epoch),
    "a cancel that comes too late drops the grant": Rules(drops_grants=True),
}
MOVING_CONTROLS = {
    "a topic in transit is promoted as usual": Rules(promote=promotes_without("transfer", None)),
    "a topic in transit takes anybody": Rules(held_back=holds_back_without("transfer", None)),
    "a move ends without those who wait": Rules(promotes_what_was_over=False),
    "a dead destination keeps its reservation": Rules(sees_dead_destinations=False),
    "a reservation has no end": Rules(keeps_deadlines=False),
    "a source releases whatever it was asked for": Rules(asks_before_it_releases=False),
    "a topic does not settle for who waits": Rules(promote=promotes_without("now", SETTLED)),
    "a topic does not settle for who comes": Rules(held_back=holds_back_without("now", SETTLED)),
    "who has waited for long waits again": Rules(promote=believes_that_all_have_just_come),
    "the best priority leaves the topic to others": Rules(
        promote=promotes_without("known", None), held_back=holds_back_without("known", None)
    ),
    "who does not settle comes first": Rules(promote=passes_over_those_who_settle),
    "who will get the topic is refused": Rules(awaits_release=lambda session, **facts: False),
    "whoever is refused waits for a release": Rules(awaits_release=lambda session, **facts: True),
    "nobody is told to come back": Rules(reminds=False),
    "who was told once is never told again": Rules(tells_by_time=False),
}
