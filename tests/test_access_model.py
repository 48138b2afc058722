"""Every interleaving of a small world, decided by access.py (rules A, B, C, D).

Up to three producers in three engines open (in every mode, with and without a claim, with two
priorities), send, close, cancel, die, start again, hang, come back, and are evicted, in every
order that there is. `access.admit` and `access.promote` decide; what carries their decisions
out is a model of `sessions.py`, in which a transaction is one step. Every state that can be
reached is visited once, and judged:

- there is at most one owner, and no shared producer beside it (A);
- a grant has the epoch after the highest one ever granted, or exactly the highest one, if it
  was claimed and the topic was free (B1, B5); nothing else changes the epoch;
- whoever has lost its row appends nothing, and what a session has written is one run in the
  log, in the order of the epochs (B2, B3, B8, B10);
- a request that is refused changes nothing (A2, B6); a release touches nobody else (B7);
- who is promoted is the first in the order of D1 that lives and is not stale (D1, D4);
- nobody waits in front of a topic that nobody holds (A3, D4);
- a holder that lives knows that it is one, or is about to be told (D5).

A judge that cannot condemn is none: each control breaks one rule, and must be found out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

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
    Verdict,
)

MODES = (SHARED, EXCLUSIVE, WAIT, FENCING)
GRANTING = (Verdict.GRANT, Verdict.TAKE_OVER)
ACCEPTING = (*GRANTING, Verdict.ADMIT, Verdict.QUEUE)


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
    """Everything, at one moment. `top` is the highest epoch ever granted."""

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


@dataclass(frozen=True)
class World:
    """How large it is: in which engine each producer is, and how often things may happen."""

    engine_of: tuple[int, ...]
    opens: int
    deaths: int
    stops: int

    @functools.cached_property
    def symmetric(self) -> bool:
        """Engines with one producer each are as good as each other."""
        return self.engine_of == tuple(range(len(self.engine_of)))

    def line_up(self, state: State) -> tuple[list[int], list[int]]:
        """An order of the producers that does not depend on their numbers: the rank of each,
        and who has it."""

        def looks(producer: int) -> tuple[Any, ...]:
            home = self.engine_of[producer]
            rows = [row.id for row in state.holders + state.queue if row.producer == producer]
            engine = state.engines[home]
            return (engine if self.symmetric else home, state.clients[producer], sorted(rows))

        order = sorted(range(len(self.engine_of)), key=looks)
        rank = [0] * len(order)
        for number, producer in enumerate(order):
            rank[producer] = number
        return rank, order

    def first(self) -> State:
        engines = (Engine("up", 0),) * (max(self.engine_of) + 1)
        clients = (Client("idle", 0, "", 0, 0),) * len(self.engine_of)
        return State(
            0, 0, 0, (), (), engines, clients, (0, 0), (), self.opens, self.deaths, self.stops
        )


@functools.cache
def session_of(row: Row) -> Session:
    """The session as access.py knows it."""
    return Session(
        id=row.id, topic=1, engine=f"{row.producer:016x}", slot=row.life, pid=0, engine_name="",
        name="", mode=row.mode, priority=row.priority, created=row.id, tie=0, since=0,
        claim=row.claim, epoch=row.epoch,
    )  # fmt: skip


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

    def alive(self, row: Row) -> bool:
        """What the others see: a death at once, a silence only when it is overdue."""
        engine = self.engines[self.world.engine_of[row.producer]]
        return engine.life == row.life and engine.status in ("up", "stopped")

    def commit(self, state: State) -> State:
        return state._replace(
            epoch=self.epoch, top=self.top, owner=self.owner,
            holders=tuple(sorted(self.holders.values())),
            queue=tuple(sorted(self.queue.values())),
        )  # fmt: skip

    def grant(self, row: Row, epoch: int, free: bool) -> None:
        again = free and row.claim == epoch == self.top == self.epoch
        if epoch != self.top + 1 and not again:
            raise Violation(f"epoch {epoch} is granted after {self.top}, to {row}")
        self.holders[row.id] = row._replace(epoch=epoch)
        self.owner, self.epoch, self.top = row.id, epoch, epoch

    def drop_holder(self, row: Row) -> None:
        del self.holders[row.id]
        if self.owner == row.id:
            self.owner = 0

    def bury_the_dead(self) -> None:
        """As `Sessions._bury_the_dead`: ghosts go, and who waits comes before who is new."""
        for row in list(self.holders.values()):
            if not self.alive(row):
                self.drop_holder(row)
        self.promote()
        for row in sorted(self.queue.values(), key=place):
            if self.alive(row):
                break
            del self.queue[row.id]

    def promote(self) -> None:
        """As `Sessions._promote`, and is it the right one?"""
        if self.holders or not self.queue:
            return
        queue = sorted(self.queue.values(), key=place)
        fit = [row for row in queue if self.alive(row) and row.claim in (None, self.epoch)]
        promotion = self.rules.promote(
            self.epoch, map(session_of, queue), lambda session: self.alive(self.queue[session.id])
        )
        winner = promotion.winner
        if (fit[0].id if fit else None) != (winner.id if winner else None):
            raise Violation(f"{winner} is promoted out of {queue}")
        if winner is not None:
            self.grant(self.queue.pop(winner.id), winner.epoch, free=True)
        for session in (*promotion.dead, *promotion.stale):
            del self.queue[session.id]

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

    def request(self, row: Row) -> str | None:
        """As `Sessions.request`: what the client is then, None if it was refused."""
        self.bury_the_dead()
        if self.rules.keeps_what_was_refused and row.mode == FENCING:
            self.evict_all()
        owner = self.holders.get(self.owner)
        shared = bool(self.holders) and owner is None
        waiting = bool(self.queue)
        decision = self.rules.admit(
            epoch=self.epoch, owner=None if owner is None else session_of(owner), shared=shared,
            waiting=waiting, request=Request(row.mode, row.claim),
        )  # fmt: skip
        if row.claim not in (None, self.epoch) and decision.verdict in ACCEPTING:
            raise Violation(f"{row} is accepted at epoch {self.epoch}")
        if decision.verdict is Verdict.QUEUE:
            self.queue[row.id] = row
            return "waiting"
        if decision.verdict is Verdict.ADMIT:
            if owner is not None or waiting or row.mode != SHARED:
                raise Violation(f"{row} is let in beside {owner}, before {self.queue}")
            self.holders[row.id] = row._replace(epoch=decision.epoch)
            return "open"
        if decision.verdict in GRANTING:
            free = not self.holders and not self.queue
            if decision.verdict is Verdict.TAKE_OVER:
                self.evict_all()
            self.grant(row, decision.epoch, free)
            return "open"
        return None

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
    may_append: Callable[[Ledger, Client], bool] = may_append
    release: Callable[[Ledger, Client], None] = release
    promotes: bool = True
    keeps_what_was_refused: bool = False
    writes_later: bool = False
    drops_grants: bool = False


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


def does_not_look_who_lives(epoch: int, queue: Any, alive: Any) -> Promotion:
    return access.promote(epoch, queue, lambda session: True)


def stops_at_the_first_dead(epoch: int, queue: Any, alive: Any) -> Promotion:
    first = next(iter(queue))
    if not alive(first):
        return Promotion(None, (first,), ())
    return access.promote(epoch, [first], alive)


def stops_at_the_first_stale(epoch: int, queue: Any, alive: Any) -> Promotion:
    waiters = list(queue)
    promotion = access.promote(epoch, waiters, alive)
    if promotion.stale:
        return Promotion(None, promotion.dead, promotion.stale)
    return promotion


def believes_stale_waiters(epoch: int, queue: Any, alive: Any) -> Promotion:
    waiters = list(queue)
    winner = next((session for session in waiters if alive(session)), None)
    if winner is None or winner.claim is None:
        return access.promote(epoch, waiters, alive)
    return Promotion(replace(winner, epoch=winner.claim), (), ())


def last_come_first_served(epoch: int, queue: Any, alive: Any) -> Promotion:
    return access.promote(epoch, list(queue)[::-1], alive)


def the_dead_use_up_epochs(epoch: int, queue: Any, alive: Any) -> Promotion:
    promotion = access.promote(epoch, queue, alive)
    if promotion.winner is None:
        return promotion
    used_up = promotion.winner.epoch + len(promotion.dead)
    return replace(promotion, winner=replace(promotion.winner, epoch=used_up))


def promotes_under_the_same_epoch(epoch: int, queue: Any, alive: Any) -> Promotion:
    promotion = access.promote(epoch, queue, alive)
    if promotion.winner is None:
        return promotion
    return replace(promotion, winner=replace(promotion.winner, epoch=epoch))


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

    def open(
        self, state: State, producer: int, client: Client, engine: Engine
    ) -> Iterator[tuple[str, State]]:
        if not state.opens:
            return
        claims = [None, *sorted({client.mine, state.epoch, state.epoch + 1} - {0})]
        number = 1 + max((each.id for each in state.clients), default=0)
        number = max([number, *(row.id + 1 for row in state.holders + state.queue)])
        for mode in MODES:
            for claim in claims:
                for priority in (0, 1) if mode == WAIT else (0,):
                    row = Row(number, producer, engine.life, mode, priority, claim, 0)
                    ledger = self.ledger(state)
                    status = ledger.request(row)
                    step = f"{producer} opens {mode} {priority} {claim}"
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
            del ledger.queue[client.id]
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
        def become(status: str, life: int = engine.life, **budget: int) -> State:
            engines = list(state.engines)
            engines[number] = Engine(status, life)
            return state._replace(engines=tuple(engines), **budget)

        if engine.status == "dead":
            yield f"engine {number} starts again", become("up", engine.life + 1)
            return
        if state.deaths:
            following = become("dead", deaths=state.deaths - 1)
            for producer, home in enumerate(self.world.engine_of):
                if home == number:
                    following = self.forget(following, producer)
            yield f"engine {number} dies", following
        if engine.status == "up":
            if state.stops:
                yield f"engine {number} hangs", become("stopped", stops=state.stops - 1)
            return
        if engine.status == "stopped":
            yield f"engine {number} is overdue", become("overdue")
        yield f"engine {number} goes on", become("up")

    def evict(self, state: State) -> Iterator[tuple[str, State]]:
        """A waiting engine's guard takes away what belongs to an engine that is gone."""
        engine_of = self.world.engine_of
        if not any(
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
    if state.queue and not state.holders:
        raise Violation("somebody waits in front of a free topic")
    for row in state.holders:
        engine = state.engines[world.engine_of[row.producer]]
        lives = engine.life == row.life and engine.status != "dead"
        if lives and state.clients[row.producer].id != row.id:
            raise Violation(f"{row} is an orphan: nobody knows that he has it")


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
    return state._replace(
        owner=new[state.owner],
        holders=tuple([Row(new[row[0]], rank[row[1]], *row[2:]) for row in state.holders]),
        queue=tuple([Row(new[row[0]], rank[row[1]], *row[2:]) for row in state.queue]),
        engines=tuple([engines[old] for old in order]) if world.symmetric else engines,
        clients=tuple([clients[old]._replace(id=new[clients[old].id]) for old in order]),
        last=(new.get(state.last[0], 0), state.last[1]),
        past=tuple([new[old] for old in state.past if old in new]),
    )


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
SMALL_WORLDS = (
    World((0, 1), opens=2, deaths=1, stops=1),
    World((0, 1, 2), opens=3, deaths=1, stops=0),
    World((0, 1, 2), opens=4, deaths=0, stops=0),
)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_every_interleaving_keeps_the_rules(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    states, steps = walk(world, Rules())
    with capsys.disabled():
        print(f"\n{world}: {states:,} distinct states, {steps:,} steps, 0 violations ", end="")
    assert states > 1000


@pytest.mark.parametrize("rules", CONTROLS.values(), ids=CONTROLS)
def test_a_broken_rule_is_found_out(rules: Rules) -> None:
    found = []
    for world in SMALL_WORLDS:
        try:
            walk(world, rules)
        except Violation as violation:
            found.append(violation)
            break
    assert found, "the walk has not noticed"
