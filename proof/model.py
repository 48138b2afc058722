"""Every interleaving of a small world, decided by access.py (rules A, B, C, D, E).

Up to three producers in three engines open (in every mode, with and without a claim, with two
priorities, letting the topic settle or not), send, close, cancel, die, start again, hang, come
back, and are evicted; and the topic is handed over: begun, released, assigned, cancelled, late,
its destination dead; in every order that there is. `access.admit`, `access.promote` and
`access.held_back` decide; what carries their decisions out is a model of `sessions.py` and
`handover.py`, in which a transaction is one step. Every state that can be reached is visited
once, and judged:

- there is at most one owner, and no shared producer beside it (A);
- a grant has the epoch after the highest one ever granted, or exactly the highest one, if it
  was claimed and the topic was free (B1, B5); nothing else changes the epoch;
- whoever has lost its row appends nothing, and what a session has written is one run in the
  log, in the order of the epochs (B2, B3, B8, B10);
- a request that is refused changes nothing (A2, B6); a release touches nobody else (B7);
- who is promoted is the first in the order of D1 that lives and is not stale (D1, D4), when
  the topic has settled for him (D7); while it is in transit, the first of its destination (E3);
- a topic in transit is for its destination, but for a rival that takes it by force; one whose
  hand-over has ended stays with its owner (E3, E4);
- nobody waits in front of a topic that nobody holds (A3, D4), unless it is in transit or
  settling, and somebody who lives, or will be missed, comes back for it (D7, E4);
- a holder that lives knows that it is one, or is about to be told (D5).

A judge that cannot condemn is none: each control breaks one rule, and must be found out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from exclusivelog import _core, access
from exclusivelog.access import (
    EXCLUSIVE,
    FENCING,
    SHARED,
    WAIT,
    Decision,
    Promotion,
    Request,
    Session,
    Transfer,
    Verdict,
)

MODES = (SHARED, EXCLUSIVE, WAIT, FENCING)
GRANTING = (Verdict.GRANT, Verdict.TAKE_OVER)
ACCEPTING = (*GRANTING, Verdict.ADMIT, Verdict.QUEUE)


SETTLES, TRANSIT = "settles", "transit"  # why somebody is to come back
NOBODY = (0, "")


class Violation(Exception):
    """A state, or a step, that must not be."""


# ---- the world ---------------------------------------------------------------------------


class Row(NamedTuple):
    """A session in the ledger; its id is also its creation time."""

    id: int
    producer: int
    life: int
    mode: str
    priority: int
    claim: int | None
    epoch: int
    settle: int = 0


class Move(NamedTuple):
    """A hand-over that is under way: to which engine, in which of its lives, from which session
    (0: that has released it), and whether its deadline has passed."""

    target: int
    life: int
    session: int
    late: bool = False


class Engine(NamedTuple):
    """`status`: up, stopped, overdue (stopped for longer than its keepalive), or dead."""

    status: str
    life: int


class Client(NamedTuple):
    """What a producer believes. `mine` is the last epoch that it had, to claim it again."""

    status: str  # idle, waiting, open; checked: about to write, in one of the controls
    id: int
    mode: str
    epoch: int
    mine: int


class State(NamedTuple):
    """Everything, at one moment. `top` is the highest epoch ever granted; `settled` says that
    the topic has been free for as long as anybody wants. `reminders` are (engine, why): it is
    to come back for the topic, because it settles or because it is in transit."""

    epoch: int
    top: int
    owner: int
    holders: tuple[Row, ...]
    queue: tuple[Row, ...]
    engines: tuple[Engine, ...]
    clients: tuple[Client, ...]
    last: tuple[int, int]  # session and epoch of the last message in the log
    past: tuple[int, ...]  # exclusive sessions that others have written behind
    opens: int  # how many of each are left
    deaths: int
    stops: int
    moves: int
    move: Move | None = None
    settled: bool = True
    reminders: tuple[tuple[int, str], ...] = ()
    told: tuple[int, str] = NOBODY  # which session was told so last, and why


@dataclass(frozen=True)
class World:
    """How large it is: in which engine each producer is, and how often things may happen."""

    engine_of: tuple[int, ...]
    opens: int
    deaths: int = 0
    stops: int = 0
    moves: int = 0
    settles: bool = False  # may waiters ask for it?

    @functools.cached_property
    def symmetric(self) -> bool:
        """Engines with one producer each are as good as each other."""
        return self.engine_of == tuple(range(len(self.engine_of)))

    def line_up(self, state: State) -> tuple[list[int], list[int]]:
        """An order of the producers that does not depend on their numbers: the rank of each,
        and who has it."""

        rows: list[list[int]] = [[] for _ in self.engine_of]
        for row in (*state.holders, *state.queue):
            rows[row.producer].append(row.id)

        def looks(producer: int) -> tuple[Any, ...]:
            home = self.engine_of[producer]
            engine = state.engines[home] if self.symmetric else home
            return (engine, state.clients[producer], rows[producer], self.awaits(state, home))

        order = sorted(range(len(self.engine_of)), key=looks)
        rank = [0] * len(order)
        for number, producer in enumerate(order):
            rank[producer] = number
        return rank, order

    def awaits(self, state: State, engine: int) -> tuple[Any, ...]:
        """What is to come to this engine, or of it."""
        if state.move is None and not state.reminders:
            return ()
        goes_there = state.move is not None and state.move.target == engine
        return goes_there, [why for number, why in state.reminders if number == engine]

    def first(self) -> State:
        engines = (Engine("up", 0),) * (max(self.engine_of) + 1)
        clients = (Client("idle", 0, "", 0, 0),) * len(self.engine_of)
        return State(
            0, 0, 0, (), (), engines, clients, (0, 0), (), self.opens, self.deaths, self.stops,
            self.moves, settled=not self.settles,
        )  # fmt: skip


GONE = -1  # a session of which nothing is left
# Time is what these say: the topic was freed at 0, and it is 1 once it has settled.
FREED, SETTLED, DEADLINE = 0, 1, 9


@functools.cache
def session_of(row: Row, home: int) -> Session:
    """The session as access.py knows it."""
    return Session(
        id=row.id, topic=1, engine=f"{home:08x}{row.life:08x}", slot=home, pid=0, engine_name="",
        name="", mode=row.mode, priority=row.priority, created=row.id, tie=0, since=0,
        claim=row.claim, epoch=row.epoch, settle=row.settle,
    )  # fmt: skip


@functools.cache
def transfer_of(move: Move | None) -> Transfer | None:
    """The hand-over as access.py knows it."""
    if move is None:
        return None
    target = f"{move.target:08x}{move.life:08x}"
    return Transfer(1, target, move.target, DEADLINE, move.session, "", 0, {})


def place(row: Row) -> tuple[int, int]:
    """The order of rule D1, spelled out once more."""
    return (-row.priority, row.id)


# ---- transactions ------------------------------------------------------------------------


class Ledger:
    """The topic's rows within one transaction."""

    def __init__(self, world: World, rules: Rules, state: State) -> None:
        self.world = world
        self.rules = rules
        self.engines = state.engines
        self.epoch, self.top, self.owner = state.epoch, state.top, state.owner
        self.holders = {row.id: row for row in state.holders}
        self.queue = {row.id: row for row in state.queue}
        self.move, self.settled = state.move, state.settled
        self.reminders, self.told = set(state.reminders), state.told

    def home(self, row: Row) -> int:
        return self.world.engine_of[row.producer]

    def lives(self, engine: int, life: int) -> bool:
        """What the others see: a death at once, a silence only when it is overdue."""
        found = self.engines[engine]
        return found.life == life and found.status in ("up", "stopped")

    def alive(self, row: Row) -> bool:
        return self.lives(self.home(row), row.life)

    def session(self, row: Row) -> Session:
        return session_of(row, self.home(row))

    def commit(self, state: State) -> State:
        if self.holders:
            self.reminders.clear()  # who comes back finds it held
        elif self.move is None:
            # Worse than it is: in truth somebody would come back when the old deadline is over.
            self.reminders -= {reminder for reminder in self.reminders if reminder[1] == TRANSIT}
        return state._replace(
            epoch=self.epoch, top=self.top, owner=self.owner,
            holders=tuple(sorted(self.holders.values())),
            queue=tuple(sorted(self.queue.values())),
            move=self.move, settled=self.settled, reminders=tuple(sorted(self.reminders)),
            told=self.told,
        )  # fmt: skip

    def grant(self, row: Row, epoch: int, free: bool) -> None:
        again = free and row.claim == epoch == self.top == self.epoch
        if epoch != self.top + 1 and not again:
            raise Violation(f"epoch {epoch} is granted after {self.top}, to {row}")
        self.holders[row.id] = row._replace(epoch=epoch)
        self.owner, self.epoch, self.top = row.id, epoch, epoch
        self.forget_appointments()

    def drop_holder(self, row: Row) -> None:
        del self.holders[row.id]
        if self.owner == row.id:
            self.owner = 0
        if not self.holders:
            self.settled = not self.world.settles
            self.forget_appointments()

    def bury_the_dead(self) -> None:
        """As `Sessions.bury_the_dead`: ghosts go, and who waits comes before who is new."""
        for row in list(self.holders.values()):
            if not self.alive(row):
                self.drop_holder(row)
        self.promote()
        for row in sorted(self.queue.values(), key=place):
            if self.alive(row):
                break
            del self.queue[row.id]

    # ---- hand-overs

    @property
    def in_transit(self) -> int | None:
        """To which engine the topic is on its way, if that can still succeed: spelled out once
        more."""
        move = self.move
        if move is None or move.late or not self.lives(move.target, move.life):
            return None
        return move.target if self.owner in (0, move.session) else None

    def transfer(self) -> Move | None:
        """As `Sessions.transfer`: what cannot succeed any more is ended."""
        move, rules = self.move, self.rules
        if move is None:
            return None
        gone = rules.sees_dead_destinations and not self.lives(move.target, move.life)
        late = rules.keeps_deadlines and move.late
        if gone or late or self.owner not in (0, move.session):
            self.move = None
        return self.move

    def end_transfer(self, move: Move | None, row: Row, forced: bool) -> None:
        """As `Sessions._end_transfer`: this row has the topic."""
        target = self.in_transit
        if target is not None and self.home(row) != target and not forced:
            raise Violation(f"{row} gets a topic that is on its way to engine {target}")
        if move is not None:
            self.move = None

    def begin(self, target: int) -> None:
        """As `HandOver._begin_one`."""
        self.bury_the_dead()
        under_way = self.transfer()
        owner = self.holders.get(self.owner)
        if owner is not None and self.home(owner) == target:
            return
        if under_way is not None and under_way.target != target:
            return
        if self.holders and owner is None:
            return  # shared producers
        self.move = Move(target, self.engines[target].life, self.owner)
        self.forget_appointments()
        self.promote()

    def release(self, session: int) -> bool:
        """As `HandOver._release_one`: is it the destination's now?"""
        row = self.holders[session]
        expected = self.in_transit is not None
        move = self.transfer() if self.rules.asks_before_it_releases else self.move
        if self.rules.asks_before_it_releases and (move is None or move.session != session):
            return False
        if not expected:
            raise Violation(f"{row} releases a topic that goes nowhere")
        self.drop_holder(row)
        self.promote()
        return True

    def cancel(self) -> None:
        """As `HandOver.cancel`."""
        if self.transfer() is not None:
            self.move = None
            self.promote()
        elif self.rules.promotes_what_was_over:
            self.promote()

    # ---- promotion

    def promote(self) -> None:
        """As `Sessions.promote`, and is it the right one?"""
        if self.holders:
            return
        target = self.in_transit
        move = self.transfer()
        if not self.queue:
            return
        queue = sorted(self.queue.values(), key=place)
        fit = [row for row in queue if self.alive(row) and row.claim in (None, self.epoch)]
        promotion = self.rules.promote(
            self.epoch, map(self.session, queue),
            lambda session: self.alive(self.queue[session.id]),
            now=SETTLED if self.settled else FREED, freed=FREED, transfer=transfer_of(move),
        )  # fmt: skip
        winner = promotion.winner
        if self.rightful(fit, target) != (None if winner is None else winner.id):
            raise Violation(f"{winner} is promoted out of {queue}, on the way to {target}")
        if winner is not None:
            row = self.queue.pop(winner.id)
            self.end_transfer(move, row, forced=False)
            self.grant(row, winner.epoch, free=True)
        elif promotion.later is not None and self.rules.reminds:
            self.remind(promotion.later.id, SETTLES if move is None else TRANSIT)
        for session in (*promotion.dead, *promotion.stale):
            del self.queue[session.id]

    def remind(self, session: int, why: str) -> None:
        """Tell its engine to come back at this time, once."""
        if self.told != (session, why):
            self.told = (session, why)
            self.reminders.add((self.home(self.queue[session]), why))

    def forget_appointments(self) -> None:
        """Whoever is told from now on is told another time."""
        if self.rules.tells_by_time:
            self.told = NOBODY

    def rightful(self, fit: list[Row], target: int | None) -> int | None:
        """Who should be promoted: spelled out once more."""
        if target is not None:
            return next((row.id for row in fit if self.home(row) == target), None)
        if not fit or (fit[0].settle and not self.settled):
            return None
        return fit[0].id

    def leave(self, row: Row) -> None:
        """As `Sessions._leave`."""
        if row.id in self.holders:
            self.drop_holder(self.holders[row.id])
        elif row.id in self.queue:
            del self.queue[row.id]
        else:
            return
        if self.rules.promotes:
            self.promote()

    # ---- requests

    def request(self, row: Row) -> str | None:
        """As `Sessions.request`: what the client is then, None if it was refused."""
        self.bury_the_dead()
        if self.rules.keeps_what_was_refused and row.mode == FENCING:
            self.evict_all()
        owner = self.holders.get(self.owner)
        shared = bool(self.holders) and owner is None
        target, move = self.in_transit, self.transfer()
        waiting = bool(self.queue)
        if not self.holders:
            waiting = self.rules.held_back(
                self.session(row), now=SETTLED if self.settled else FREED, freed=FREED,
                waiting=waiting, transfer=transfer_of(move),
            )  # fmt: skip
        decision = self.rules.admit(
            epoch=self.epoch, owner=None if owner is None else self.session(owner), shared=shared,
            waiting=waiting, request=Request(row.mode, row.claim),
        )  # fmt: skip
        if row.claim not in (None, self.epoch) and decision.verdict in ACCEPTING:
            raise Violation(f"{row} is accepted at epoch {self.epoch}")
        if decision.verdict is Verdict.QUEUE:
            self.queue[row.id] = row
            self.promote()
            return "waiting"
        if decision.verdict is Verdict.ADMIT:
            if owner is not None or row.mode != SHARED or self.must_wait(row, target):
                raise Violation(f"{row} is let in beside {owner}, before {self.queue}")
            self.end_transfer(move, row, forced=False)
            self.holders[row.id] = row._replace(epoch=decision.epoch)
            return "open"
        if decision.verdict in GRANTING:
            forced = decision.verdict is Verdict.TAKE_OVER
            if not forced and (self.holders or self.must_wait(row, target)):
                raise Violation(f"{row} is granted before {self.queue}")
            if forced:
                self.evict_all()
            self.end_transfer(move, row, forced)
            self.grant(row, decision.epoch, not forced)
            return "open"
        return None

    def must_wait(self, row: Row, target: int | None) -> bool:
        """Must it leave a free topic to others, or to later? Spelled out once more."""
        if target is not None:
            return self.home(row) != target
        return bool(self.queue) or (bool(row.settle) and not self.settled)

    def evict_all(self) -> None:
        self.holders.clear()
        self.queue.clear()
        self.owner = 0


# ---- the rules, and how to break them ----------------------------------------------------


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


def does_not_look_who_lives(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    return access.promote(epoch, queue, lambda session: True, **facts)


def stops_at_the_first_dead(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    first = next(iter(queue))
    if not alive(first):
        return Promotion(None, (first,), ())
    return access.promote(epoch, [first], alive, **facts)


def stops_at_the_first_stale(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    waiters = list(queue)
    promotion = access.promote(epoch, waiters, alive, **facts)
    if promotion.stale:
        return Promotion(None, promotion.dead, promotion.stale)
    return promotion


def believes_stale_waiters(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    waiters = list(queue)
    winner = next((session for session in waiters if alive(session)), None)
    if winner is None or winner.claim is None:
        return access.promote(epoch, waiters, alive, **facts)
    return Promotion(replace(winner, epoch=winner.claim), (), ())


def last_come_first_served(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    return access.promote(epoch, list(queue)[::-1], alive, **facts)


def the_dead_use_up_epochs(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    promotion = access.promote(epoch, queue, alive, **facts)
    if promotion.winner is None:
        return promotion
    used_up = promotion.winner.epoch + len(promotion.dead)
    return replace(promotion, winner=replace(promotion.winner, epoch=used_up))


def promotes_under_the_same_epoch(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    promotion = access.promote(epoch, queue, alive, **facts)
    if promotion.winner is None:
        return promotion
    return replace(promotion, winner=replace(promotion.winner, epoch=epoch))


def promotes_without(fact: str, nothing: Any) -> Callable[..., Promotion]:
    return lambda *args, **facts: access.promote(*args, **{**facts, fact: nothing})


def holds_back_without(fact: str, nothing: Any) -> Callable[..., bool]:
    return lambda session, **facts: access.held_back(session, **{**facts, fact: nothing})


def passes_over_those_who_settle(epoch: int, queue: Any, alive: Any, **facts: Any) -> Promotion:
    hasty = [session for session in queue if facts["now"] >= session.settle or facts["transfer"]]
    return access.promote(epoch, hasty, alive, **facts)


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
    "who does not settle comes first": Rules(promote=passes_over_those_who_settle),
    "nobody is told to come back": Rules(reminds=False),
    "who was told once is never told again": Rules(tells_by_time=False),
}


# ---- steps -------------------------------------------------------------------------------


class Steps:
    """What can happen next."""

    def __init__(self, world: World, rules: Rules) -> None:
        self.world = world
        self.rules = rules

    def ledger(self, state: State) -> Ledger:
        return Ledger(self.world, self.rules, state)

    def believe(self, state: State, producer: int, **beliefs: Any) -> State:
        clients = list(state.clients)
        clients[producer] = clients[producer]._replace(**beliefs)
        return state._replace(clients=tuple(clients))

    def forget(self, state: State, producer: int) -> State:
        return self.believe(state, producer, status="idle", id=0, mode="", epoch=0)

    def after(self, state: State) -> Iterator[tuple[str, State]]:
        """All (step, next state)."""
        for producer, client in enumerate(state.clients):
            engine = state.engines[self.world.engine_of[producer]]
            if engine.status != "up":
                continue
            if client.status == "idle":
                yield from self.open(state, producer, client, engine)
            elif client.status == "waiting":
                yield from self.wait(state, producer, client)
            else:
                yield from self.hold(state, producer, client)
        for number, engine in enumerate(state.engines):
            yield from self.live(state, number, engine)
        yield from self.evict(state)
        yield from self.hand_over(state)
        yield from self.settle(state)

    def open(
        self, state: State, producer: int, client: Client, engine: Engine
    ) -> Iterator[tuple[str, State]]:
        if not state.opens:
            return
        claims = [None, *sorted({client.mine, state.epoch, state.epoch + 1} - {0})]
        number = 1 + max((each.id for each in state.clients), default=0)
        number = max([number, *(row.id + 1 for row in state.holders + state.queue)])
        for mode, claim in itertools.product(MODES, claims):
            for priority, settle in self.wishes(mode):
                row = Row(number, producer, engine.life, mode, priority, claim, 0, settle)
                ledger = self.ledger(state)
                status = ledger.request(row)
                step = f"{producer} opens {mode} {priority} {claim} {settle}"
                if status is None:
                    if self.rules.keeps_what_was_refused and ledger.commit(state) != state:
                        raise Violation(f"{row} is refused, and has changed {state}")
                    continue  # the transaction is undone
                following = ledger.commit(state)._replace(opens=state.opens - 1)
                beliefs = {"status": status, "id": number, "mode": mode}
                if status == "open":
                    epoch = ledger.holders[number].epoch
                    beliefs.update(epoch=epoch, mine=epoch)
                yield step, self.believe(following, producer, **beliefs)

    def wishes(self, mode: str) -> tuple[tuple[int, int], ...]:
        """(priority, settle) that it may ask for."""
        if mode != WAIT:
            return ((0, 0),)
        if not self.world.settles:
            return ((0, 0), (1, 0))
        return ((0, 0), (1, 0), (0, SETTLED), (1, SETTLED))

    def wait(self, state: State, producer: int, client: Client) -> Iterator[tuple[str, State]]:
        granted = next((row for row in state.holders if row.id == client.id), None)
        if granted is not None:
            epoch = granted.epoch
            yield (
                f"{producer} learns of its grant",
                self.believe(state, producer, status="open", epoch=epoch, mine=epoch),
            )
            if self.rules.drops_grants:
                yield f"{producer} cancels too late", self.forget(state, producer)
        elif any(row.id == client.id for row in state.queue):
            ledger = self.ledger(state)
            ledger.leave(ledger.queue[client.id])
            yield f"{producer} cancels", self.forget(ledger.commit(state), producer)
        else:
            yield f"{producer} learns that it has lost", self.forget(state, producer)

    def hold(self, state: State, producer: int, client: Client) -> Iterator[tuple[str, State]]:
        ledger = self.ledger(state)
        if client.status == "checked":
            yield f"{producer} writes", self.written(state, ledger, producer, client)
            return
        if not self.rules.may_append(ledger, client):
            yield f"{producer} sends and is fenced", self.forget(state, producer)
        elif self.rules.writes_later:
            yield f"{producer} is checked", self.believe(state, producer, status="checked")
        else:
            yield f"{producer} sends", self.written(state, ledger, producer, client)
        yield from self.release(state, producer, client)
        others = [row for row in state.holders + state.queue if row.id != client.id]
        self.rules.release(ledger, client)
        for row in others:
            gone = row.id not in ledger.holders and row.id not in ledger.queue
            if gone and row in state.holders:
                raise Violation(f"{client} closes, and {row} is released")
        yield f"{producer} closes", self.forget(ledger.commit(state), producer)

    def written(self, state: State, ledger: Ledger, producer: int, client: Client) -> State:
        if client.id not in ledger.holders:
            raise Violation(f"{client} has no row, and writes")
        last, epoch = state.last
        if client.id in state.past:
            raise Violation(f"{client} writes behind its successor")
        if client.epoch < epoch:
            raise Violation(f"{client} writes behind epoch {epoch}")
        past = set(state.past)
        past |= {each.id for each in state.clients if each.id == last and each.mode != SHARED}
        past.discard(client.id)
        return self.believe(
            state._replace(last=(client.id, client.epoch), past=tuple(sorted(past))),
            producer, status="open",
        )  # fmt: skip

    def live(self, state: State, number: int, engine: Engine) -> Iterator[tuple[str, State]]:
        def become(status: str, life: int = engine.life, **budget: Any) -> State:
            engines = list(state.engines)
            engines[number] = Engine(status, life)
            return state._replace(engines=tuple(engines), **budget)

        if engine.status == "dead":
            alone = all(each.status == "dead" for each in state.engines)
            following = become("up", engine.life + 1)
            if alone and self.world.settles:  # the ledger is opened by this
                following = following._replace(settled=False)
            yield f"engine {number} starts again", following
            return
        if state.deaths:
            following = become("dead", deaths=state.deaths - 1)
            for producer, home in enumerate(self.world.engine_of):
                if home == number:
                    following = self.forget(following, producer)
            kept = tuple([each for each in state.reminders if each[0] != number])
            yield f"engine {number} dies", following._replace(reminders=kept)
        if engine.status == "up":
            if state.stops:
                yield f"engine {number} hangs", become("stopped", stops=state.stops - 1)
            return
        if engine.status == "stopped":
            yield f"engine {number} is overdue", become("overdue")
        yield f"engine {number} goes on", become("up")

    def evict(self, state: State) -> Iterator[tuple[str, State]]:
        """A waiting engine's guard takes away what belongs to an engine that is gone; so does a
        coordinator."""
        engine_of = self.world.engine_of
        if state.move is None and not any(
            client.status == "waiting" and state.engines[engine_of[producer]].status == "up"
            for producer, client in enumerate(state.clients)
        ):
            return
        for number, engine in enumerate(state.engines):
            ledger = self.ledger(state)
            rows = [
                row
                for row in state.holders + state.queue
                if engine_of[row.producer] == number and not ledger.alive(row)
            ]
            if rows:
                for row in rows:
                    ledger.leave(row)
                yield f"engine {number} ({engine.status}) is evicted", ledger.commit(state)

    def hand_over(self, state: State) -> Iterator[tuple[str, State]]:
        """Somebody who is no part of this world moves the topic, or gives that up."""
        for target in range(len(state.engines) if state.moves else 0):
            ledger = self.ledger(state)
            if ledger.lives(target, state.engines[target].life):
                ledger.begin(target)
                following = ledger.commit(state)._replace(moves=state.moves - 1)
                yield f"it is to be moved to engine {target}", following
        move = state.move
        if move is None:
            return
        ledger = self.ledger(state)
        ledger.cancel()
        yield "the move is cancelled", ledger.commit(state)
        if not move.late:
            yield "the deadline passes", state._replace(move=move._replace(late=True))

    def release(self, state: State, producer: int, client: Client) -> Iterator[tuple[str, State]]:
        """Its engine has been asked to release it, for this move or an earlier one."""
        if client.id != state.owner or (
            state.move is None and self.world.moves == state.moves
        ):  # nobody ever asked
            return
        ledger = self.ledger(state)
        if ledger.release(client.id):
            yield f"{producer} releases it", self.forget(ledger.commit(state), producer)

    def settle(self, state: State) -> Iterator[tuple[str, State]]:
        """Time passes, and whoever was told so comes back."""
        if not state.settled and not state.holders:
            yield "it has settled", state._replace(settled=True)
        for reminder in state.reminders:
            number, why = reminder
            ledger = self.ledger(state)
            due = state.settled if why == SETTLES else ledger.in_transit is None
            if due and state.engines[number].status == "up":
                ledger.reminders.discard(reminder)
                ledger.told = NOBODY
                ledger.promote()
                yield f"engine {number} comes back", ledger.commit(state)


# ---- the judge, and the walk -------------------------------------------------------------


def judge(world: World, state: State) -> None:
    """Is this state allowed?"""
    alone = [row for row in state.holders if row.mode != SHARED]
    if len(alone) > 1 or (alone and len(state.holders) > 1):
        raise Violation("an owner is not alone")
    if state.owner != (alone[0].id if alone else 0):
        raise Violation("the topic's row names another owner than there is")
    if alone and alone[0].epoch != state.epoch:
        raise Violation("the owner's epoch is not the topic's")
    if state.epoch != state.top:
        raise Violation("the epoch is not the highest ever granted")
    if state.move is not None and state.owner not in (0, state.move.session):
        raise Violation("a topic is on its way from another session than its owner's")
    judge_idleness(world, state)
    for row in state.holders:
        engine = state.engines[world.engine_of[row.producer]]
        lives = engine.life == row.life and engine.status != "dead"
        if lives and state.clients[row.producer].id != row.id:
            raise Violation(f"{row} is an orphan: nobody knows that he has it")


def is_heard_of(world: World, state: State, row: Row) -> bool:
    """Does this session live, as far as the others see?"""
    engine = state.engines[world.engine_of[row.producer]]
    return engine.life == row.life and engine.status in ("up", "stopped")


def judge_idleness(world: World, state: State) -> None:
    """May those who wait be left waiting?"""
    if state.holders or not state.queue:
        return
    if not (world.moves or world.settles):
        raise Violation("somebody waits in front of a free topic")
    waiters = sorted(state.queue, key=place)
    living = [row for row in waiters if is_heard_of(world, state, row)]
    if len(living) < len(waiters):
        return  # whoever lives takes the ghosts away, and that is a promotion
    why = SETTLES if state.move is None else TRANSIT
    if why == SETTLES and not living[0].settle:
        raise Violation("somebody waits in front of a free topic")
    coming = [number for number, reason in state.reminders if reason == why]
    if not any(state.engines[number].status in ("up", "stopped") for number in coming):
        raise Violation("nobody comes back for those who wait")


def canonical(world: World, state: State) -> State:
    """Numbers sessions anew, in their order, and forgets those that nobody can meet again;
    then lines up the engines. States that differ in nothing else are one."""
    ids = {client.id for client in state.clients}
    ids.update(row.id for row in state.holders)
    ids.update(row.id for row in state.queue)
    ids.discard(0)
    new = {old: number for number, old in enumerate(sorted(ids), start=1)}
    new[0] = 0
    rank, order = world.line_up(state)
    engines, clients = state.engines, state.clients
    move, reminders = state.move, state.reminders
    if world.symmetric:
        engines = tuple([engines[old] for old in order])
        reminders = tuple(sorted([(rank[number], why) for number, why in reminders]))
    if move is not None:
        target = rank[move.target] if world.symmetric else move.target
        move = Move(target, move.life, new.get(move.session, GONE), move.late)
    return State(
        state.epoch, state.top, new[state.owner],
        tuple([Row(new[row[0]], rank[row[1]], *row[2:]) for row in state.holders]),
        tuple([Row(new[row[0]], rank[row[1]], *row[2:]) for row in state.queue]),
        engines,
        tuple([Client(clients[old][0], new[clients[old][1]], *clients[old][2:]) for old in order]),
        (new.get(state.last[0], 0), state.last[1]),
        tuple([new[old] for old in state.past if old in new]),
        state.opens, state.deaths, state.stops, state.moves, move, state.settled, reminders,
        (new.get(state.told[0], GONE), state.told[1]),
    )  # fmt: skip


def walk(world: World, rules: Rules, most: int = 10**6) -> tuple[int, int]:
    """(states, steps), or a Violation with a shortest way to it in its notes; engines that are
    alike may change their numbers on the way."""
    steps = Steps(world, rules)
    first = world.first()
    came_from: dict[State, tuple[State | None, str]] = {first: (None, "the beginning")}
    frontier, taken = [first], 0
    while frontier:
        following: list[State] = []
        for state in frontier:
            try:
                judge(world, state)
                for step, raw in steps.after(state):
                    taken += 1
                    if raw in came_from:
                        continue
                    after = canonical(world, raw)
                    if after not in came_from:
                        came_from[after] = (state, step)
                        following.append(after)
            except Violation as violation:
                for step in way_to(state, came_from):
                    violation.add_note(step)
                raise
        frontier = following
        assert len(came_from) < most
    return len(came_from), taken


def way_to(state: State | None, came_from: dict[State, tuple[State | None, str]]) -> list[str]:
    """The steps that lead to a state."""
    steps = []
    while state is not None:
        state, step = came_from[state]
        steps.append(step)
    return steps[::-1]


WORLDS = {
    "three engines, and a hang": World((0, 1, 2), opens=3, deaths=0, stops=1),
    "three engines, four requests": World((0, 1, 2), opens=4, deaths=0, stops=0),
    "three engines, and a death": World((0, 1, 2), opens=3, deaths=1, stops=0),
    "two engines, a death and a hang": World((0, 1), opens=3, deaths=1, stops=1),
    "two producers share an engine": World((0, 0, 1), opens=3, deaths=1, stops=0),
}
MOVING_WORLDS = {
    "a move among three engines": World((0, 1, 2), opens=3, moves=1),
    "a move, a death and a hang": World((0, 1), opens=2, deaths=1, stops=1, moves=1),
    "two moves, and a death": World((0, 1), opens=2, deaths=1, moves=2),
    "a move between two that share an engine and one": World((0, 0, 1), opens=2, deaths=1, moves=1),
    "a topic that settles": World((0, 1, 2), opens=3, settles=True),
    "a topic that settles, and a hang": World((0, 1), opens=2, stops=1, settles=True),
    "a topic that settles, a move and a death": World(
        (0, 1), opens=2, deaths=1, moves=1, settles=True
    ),
}
# For a full run.
LARGE_WORLDS = {
    "a move, three requests and a death": World((0, 1), opens=3, deaths=1, moves=1),
    "two deaths and a hang": World((0, 1), opens=3, deaths=2, stops=1),
    "two share an engine, a death and a hang": World((0, 0, 1), opens=3, deaths=1, stops=1),
    "four requests, a death and a hang": World((0, 1), opens=4, deaths=1, stops=1),
}
SMALL_WORLDS = (
    World((0, 1), opens=2, deaths=1, stops=1),
    World((0, 1, 2), opens=3, deaths=1, stops=0),
    World((0, 1, 2), opens=4, deaths=0, stops=0),
)
SMALL_MOVING_WORLDS = (
    World((0, 1), opens=2, moves=1),
    World((0, 1), opens=2, settles=True),
    World((0, 1), opens=2, deaths=1, moves=1),
    World((0, 1), opens=2, moves=2),
)


def find_out(rules: Rules, worlds: Iterable[World]) -> Violation | None:
    """What the judge has against these rules."""
    for world in worlds:
        try:
            walk(world, rules)
        except Violation as violation:
            return violation
    return None
