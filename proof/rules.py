"""The rules that the model goes by, and each of them broken: the controls of its judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from exclusivelog import _core, admission
from exclusivelog.admission import Decision, Verdict
from exclusivelog.local.ownership import promoting
from exclusivelog.local.ownership.promoting import Promotion
from exclusivelog.local.ownership.sessions import Succession
from exclusivelog.local.ownership.steps import RETRY_AT, Transfers
from exclusivelog.local.ownership.transfers import HandOver
from exclusivelog.local.records import (
    Session,
    Transfer,
    pack_session,
    unpack_session,
)
from exclusivelog.local.storage.tables import Tables, queue_key
from proof.memory import DEADLINE, SETTLED
from proof.world import SMALL_MOVING_WORLDS, SMALL_WORLDS, Client, State, World
from testing.processes import EXCLUSIVE, FENCING, SHARED


def may_append(state: State, client: Client) -> bool:
    """As `fencing.check_may_write`, with the very comparison that an append makes."""
    if client.mode == SHARED:
        return any(row.id == client.id for row in state.holders)
    row = _core.TopicRow()
    row.owner, row.epoch = state.owner, state.epoch
    return bool(row.admits(client.id, client.epoch))


Patch = tuple[object, str, Any]  # of which module or class, the name, what stands there instead


@dataclass(frozen=True)
class Rules:
    """What a walk goes by: the library, with nothing or something broken. `world` is the one that
    shows it soonest. The other fields are about producers, which the model has instead of the
    library's."""

    patches: tuple[Patch, ...] = ()
    world: World | None = None
    may_append: Callable[[State, Client], bool] = may_append
    keeps_what_was_refused: bool = False
    writes_later: bool = False
    drops_grants: bool = False


def without(owner: object, name: str, instead: Any, **rules: Any) -> Rules:
    """The rules, but for this function of the library."""
    return Rules(((owner, name, instead),), **rules)


# The original functions, while a broken rule replaces them.
_admit, _promote, _is_settled = admission.admit, promoting.promote, promoting.is_settled
_leave, _evict_dead = Succession.leave, Succession.evict_dead
_current = Transfers.current


def does_not_raise(verdict: Verdict) -> Callable[..., Decision]:
    def admit(**facts: Any) -> Decision:
        decision = _admit(**facts)
        return decision._replace(epoch=facts["epoch"]) if decision.verdict is verdict else decision

    return admit


def believes_stale_claims(**facts: Any) -> Decision:
    claim = facts["request"].claimed_epoch
    if claim is None or claim >= facts["epoch"]:
        return _admit(**facts)
    return _admit(**{**facts, "epoch": claim})


def believes_claims_ahead(**facts: Any) -> Decision:
    claim = facts["request"].claimed_epoch
    return _admit(**{**facts, "epoch": max(facts["epoch"], claim or 0)})


def forgets(fact: str, nothing: Any) -> Callable[..., Decision]:
    return lambda **facts: _admit(**{**facts, fact: nothing})


def fences_without_force(**facts: Any) -> Decision:
    decision = _admit(**facts)
    if facts["request"].mode == EXCLUSIVE and decision.verdict is Verdict.FENCED:
        return Decision(Verdict.GRANT, facts["epoch"] + 1)
    return decision


Rows = Iterable[tuple[bytes, bytes]]  # of the queue's table


def rows_of(sessions: list[Session]) -> list[tuple[bytes, bytes]]:
    """The rows of these waiters, in this order if it were the queue's."""
    inorder = [s._replace(priority=-number) for number, s in enumerate(sessions)]
    keys = [queue_key(session) for session in inorder]
    return list(zip(keys, map(pack_session, sessions), strict=True))


def sessions_of(rows: Rows) -> list[Session]:
    return [unpack_session(data) for _, data in rows]


def does_not_look_who_lives(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    return _promote(epoch, topic, rows, lambda slot, engine: True, **facts)


def stops_at_the_first_dead(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    rows = list(rows)
    [first] = sessions_of(rows[:1])
    if not alive(first.slot, first.engine):
        return Promotion(None, (first,), ())
    return _promote(epoch, topic, rows[:1], alive, **facts)


def stops_at_the_first_stale(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    promotion = _promote(epoch, topic, rows, alive, **facts)
    if promotion.stale:
        return Promotion(None, promotion.dead, promotion.stale)
    return promotion


def believes_stale_waiters(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    rows = list(rows)
    waiters = sessions_of(rows)
    winner = next((session for session in waiters if alive(session.slot, session.engine)), None)
    if winner is None or winner.claimed_epoch is None:
        return _promote(epoch, topic, rows, alive, **facts)
    return Promotion(winner._replace(epoch=winner.claimed_epoch), (), ())


def last_come_first_served(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    backwards = rows_of(sessions_of(rows)[::-1])
    return _promote(epoch, topic, backwards, alive, **facts)


def the_dead_use_up_epochs(epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any) -> Any:
    promotion = _promote(epoch, topic, rows, alive, **facts)
    if promotion.winner is None:
        return promotion
    used_up = promotion.winner.epoch + len(promotion.dead)
    return promotion._replace(winner=promotion.winner._replace(epoch=used_up))


def promotes_under_the_same_epoch(epoch: int, *args: Any, **facts: Any) -> Promotion:
    promotion = _promote(epoch, *args, **facts)
    if promotion.winner is None:
        return promotion
    return promotion._replace(winner=promotion.winner._replace(epoch=epoch))


def promotes_without(fact: str, nothing: Any) -> Callable[..., Promotion]:
    return lambda *args, **facts: _promote(*args, **{**facts, fact: nothing})


def settles_without(fact: str, nothing: Any) -> Callable[..., bool]:
    return lambda session, **facts: _is_settled(session, **{**facts, fact: nothing})


def passes_over_those_who_settle(
    epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any
) -> Promotion:
    left = facts["now"] - facts["freed"]
    hasty = [
        (key, data)
        for key, data in rows
        if left >= unpack_session(data).settle or facts["transfer"]
    ]
    return _promote(epoch, topic, hasty, alive, **facts)


def believes_that_all_have_just_come(
    epoch: int, topic: int, rows: Rows, alive: Any, **facts: Any
) -> Promotion:
    waiters = sessions_of(rows)
    newcomers = [session._replace(created=facts["freed"] + session.id) for session in waiters]
    come = [(queue_key(session), pack_session(session)) for session in newcomers]
    promotion = _promote(epoch, topic, come, alive, **facts)
    before = {session.id: session for session in waiters}
    winner, later = promotion.winner, promotion.retry_waiter
    return promotion._replace(
        winner=None if winner is None else before[winner.id]._replace(epoch=winner.epoch),
        retry_waiter=None if later is None else before[later.id],
        dead=tuple(before[session.id] for session in promotion.dead),
        stale=tuple(before[session.id] for session in promotion.stale),
    )


def fences_before_it_is_refused(
    self: Succession, tables: Tables, row: _core.TopicRow, mode: str, name: str | None = None
) -> None:
    _evict_dead(self, tables, row, mode, name)
    if mode == FENCING:
        for session in tables.sessions.holders(row.id):
            self.drop_holder(tables, row, session, "evict", "fenced")
        tables.topics.put(row)


def releases_the_owner(
    self: Succession, tables: Tables, session: Session, *args: Any, **facts: Any
) -> _core.TopicRow | None:
    row = tables.topics.get(session.topic)
    owner = tables.sessions.holder(row.id, row.owner) if row.owner else None
    return None if owner is None else _leave(self, tables, owner, *args, **facts)


def releases_the_one_with_the_epoch(
    self: Succession, tables: Tables, session: Session, *args: Any, **facts: Any
) -> _core.TopicRow | None:
    row = tables.topics.get(session.topic)
    owner = tables.sessions.holder(row.id, row.owner) if row.owner else None
    if session.mode == SHARED or owner is None or owner.epoch != session.epoch:
        return _leave(self, tables, session, *args, **facts)
    return _leave(self, tables, owner, *args, **facts)


def compares_epochs_only(state: State, client: Client) -> bool:
    if client.mode == SHARED:
        return may_append(state, client)
    return client.epoch == state.epoch


def keeps_no_deadline(self: Transfers, tables: Tables, row: _core.TopicRow) -> Transfer | None:
    transfer = tables.transfers.get(row.id)
    if transfer is not None:
        tables.transfers.put(transfer._replace(until=DEADLINE))
    return _current(self, tables, row)


def releases_unasked(
    self: HandOver, tables: Tables, topic: int, session_id: int
) -> Transfer | None:
    row, holder = tables.topics.get(topic), tables.sessions.holder(topic, session_id)
    if holder is None:
        return None
    self._succession.drop_holder(tables, row, holder, "release", "hand-over")
    self._succession.promote(tables, row)
    tables.topics.put(row)
    return Transfer(topic, "", 0, 0, 0, "", 0, {})


def cancels_without_those_who_wait(
    self: HandOver, topics: list[int], reason: str, until: int | None = None
) -> list[str]:
    with self._ledger.write_exclusive() as tables:
        for topic in topics:
            row = tables.topics.get(topic)
            transfer = self._transfers.current(tables, row)
            if transfer is not None:
                self._transfers.cancel(tables, row, transfer, reason)
            tables.topics.put(row)
    return []


def tells_only_once(
    self: Succession, tables: Tables, row: _core.TopicRow, waiter: Session, due: int
) -> None:
    if row.retry_waiter != waiter.id:
        row.retry_waiter, row.retry_at = waiter.id, due
        tables.notifications.post(waiter, RETRY_AT, row.id, due)


def nothing(*args: Any, **facts: Any) -> None:
    """Does nothing."""


_, THREE, FOUR = SMALL_WORLDS  # requests
CONTROLS = {
    "a grant does not raise the epoch": without(admission, "admit", does_not_raise(Verdict.GRANT)),
    "a take-over does not raise the epoch": without(
        admission, "admit", does_not_raise(Verdict.TAKE_OVER)
    ),
    "a promotion does not raise the epoch": without(
        promoting, "promote", promotes_under_the_same_epoch
    ),
    "a stale topic_epoch is accepted": without(
        admission, "admit", believes_stale_claims, world=THREE
    ),
    "claims ahead of the epoch are believed": without(admission, "admit", believes_claims_ahead),
    "the owner is forgotten": without(admission, "admit", forgets("owner", None)),
    "the shared producers are forgotten": without(admission, "admit", forgets("shared", False)),
    "the waiters are forgotten": without(
        admission, "admit", forgets("waiting", False), world=THREE
    ),
    "exclusive is granted beside others": without(admission, "admit", fences_without_force),
    "a refused fencer has evicted already": without(
        Succession, "evict_dead", fences_before_it_is_refused, keeps_what_was_refused=True
    ),
    "a dead waiter is promoted": without(promoting, "promote", does_not_look_who_lives),
    "promotion stops at the first dead waiter": without(
        promoting, "promote", stops_at_the_first_dead, world=THREE
    ),
    "promotion stops at the first stale": without(
        promoting, "promote", stops_at_the_first_stale, world=FOUR
    ),
    "stale waiters are promoted": without(
        promoting, "promote", believes_stale_waiters, world=THREE
    ),
    "the last to come is promoted first": without(
        promoting, "promote", last_come_first_served, world=THREE
    ),
    "dead waiters use up epochs": without(
        promoting, "promote", the_dead_use_up_epochs, world=THREE
    ),
    "no waiter is promoted": without(Succession, "promote", nothing),
    "appends are not checked": Rules(may_append=lambda state, client: True),
    "appends compare epochs only": Rules(may_append=compares_epochs_only),
    "appends are checked before, and written later": Rules(writes_later=True),
    "a release compares nothing": without(Succession, "leave", releases_the_owner),
    "a release compares epochs only": without(Succession, "leave", releases_the_one_with_the_epoch),
    "a cancel that comes too late drops the grant": Rules(drops_grants=True),
}
MOVING_CONTROLS = {
    "a topic in transit is promoted as usual": without(
        promoting, "promote", promotes_without("transfer", None)
    ),
    "a topic in transit takes any request": without(
        promoting, "is_reserved", lambda session, transfer: None
    ),
    "a move ends and promotes no waiter": without(
        HandOver, "cancel", cancels_without_those_who_wait
    ),
    "a dead destination keeps its reservation": without(
        Transfers, "has_destination", lambda self, transfer: True, world=SMALL_MOVING_WORLDS[3]
    ),
    "a reservation has no end": without(Transfers, "current", keeps_no_deadline),
    "a source releases also what no longer moves": without(
        HandOver, "_release_one", releases_unasked
    ),
    "a topic does not settle for waiters": without(
        promoting, "promote", promotes_without("now", SETTLED)
    ),
    "a topic does not settle for new requests": without(
        promoting, "is_settled", settles_without("now", SETTLED)
    ),
    "an old waiter settles again": without(promoting, "promote", believes_that_all_have_just_come),
    "the best priority leaves the topic to others": Rules(
        (
            (promoting, "promote", promotes_without("known", None)),
            (promoting, "is_settled", settles_without("known", None)),
        )
    ),
    "a request that does not settle comes first": without(
        promoting, "promote", passes_over_those_who_settle
    ),
    "a request that will get the topic is refused": without(
        admission, "awaits_release", lambda mode, verdict, **facts: False
    ),
    "every refused request waits for a release": without(
        admission, "awaits_release", lambda mode, verdict, **facts: True
    ),
    "no engine is reminded to retry": without(Succession, "_retry_at", nothing),
    "an engine is reminded once only": without(
        Succession, "_retry_at", tells_only_once, world=SMALL_MOVING_WORLDS[5]
    ),
}
