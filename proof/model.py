"""Every interleaving of a small world, carried out by the library's own code (rules A to E).

Up to three producers in three engines open (in every mode, with and without a claim, with two
priorities, leaving the topic to better ones or not), send, close, cancel, die, start again, hang,
come back, and are evicted; and the topic is handed over: begun, released, assigned, cancelled,
late, its destination dead; in every order that there is. Each step is a transaction of the
library's own `Sessions` and `HandOver` over tables in memory (`proof.memory`). Every state that can
be reached is visited once, and judged, as is every transaction (`proof.model_judge`):

- there is at most one owner, and no shared producer beside it (A);
- a grant has the epoch after the highest one ever granted, or exactly the highest one, if it
  was claimed and the topic was free (B1, B5); nothing else changes the epoch;
- a shared or exclusive request that is refused only because its engine is still to get the topic
  waits for that, and changes nothing meanwhile; no other one does (E3, A2);
- a session that has lost its row appends nothing, and what a session has written is one run in
  the log, in the order of the epochs (B2, B3, B8, B10);
- a request that is refused changes nothing (A2, B6); a release touches no other session (B7), and
  no living session loses what it has but by force;
- the promoted waiter is the first in the order of D1 that lives and is not stale (D1, D4), when
  it need not leave the topic to better ones that reconnect (D7); while it is in transit, the first
  of its destination (E3);
- a topic in transit is for its destination, but for a rival that takes it by force; one whose
  hand-over has ended stays with its owner (E3, E4);
- no session waits for a topic that is free (A3, D4), unless it is in transit or settling, and an
  engine that lives, or will be missed, retries (D7, E4);
- a live holder knows that it is one, or has a notification (D5).

Each control breaks one rule, and the judge must find it out.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from proof.memory import Transactions, last_id
from proof.model_judge import in_transit
from proof.rules import Rules
from proof.world import (
    GONE,
    NO_CLAIM,
    SETTLE,
    SETTLES,
    TRANSIT,
    Client,
    Engine,
    Move,
    Row,
    State,
    Violation,
    World,
    is_alive,
    place,
)
from testing.processes import MODES, SHARED, WAIT

# ---- steps -------------------------------------------------------------------------------


class Steps:
    """What can happen next."""

    def __init__(self, world: World, rules: Rules) -> None:
        self.world = world
        self.rules = rules
        self.transactions = Transactions(world)
        self.transactions.ledger.keeps_what_failed = rules.keeps_what_was_refused

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
            elif client.status == "arriving":
                yield from self.arrive(state, producer, client, engine)
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
        number = 1 + last_id(state)
        for mode, claim in itertools.product(MODES, claims):
            for priority, settle in self.wishes(mode):
                row = Row(number, producer, engine.life, mode, priority, claim, 0, settle)
                status, following = self.transactions.request(state, row)
                step = f"{producer} opens {mode} {priority} {claim} {settle}"
                if status is None:
                    continue  # the transaction is undone
                following = following._replace(opens=state.opens - 1)
                if status == "arriving":  # so is that of one that waits for a release
                    wanted = NO_CLAIM if claim is None else claim
                    yield (
                        step,
                        self.believe(
                            following, producer, status=status, id=0, mode=mode, epoch=wanted
                        ),
                    )
                    continue
                beliefs = {"status": status, "id": number, "mode": mode}
                if status == "open":
                    epoch = held(following, number).epoch
                    beliefs.update(epoch=epoch, mine=epoch)
                yield step, self.believe(following, producer, **beliefs)

    def arrive(
        self, state: State, producer: int, client: Client, engine: Engine
    ) -> Iterator[tuple[str, State]]:
        """It gives up; or, once nothing is released to its engine any more, requests again."""
        yield f"{producer} does not wait for the release", self.forget(state, producer)
        if state.owner and in_transit(state) == self.world.engine_of[producer]:
            return
        number = 1 + last_id(state)
        claim = None if client.epoch == NO_CLAIM else client.epoch
        row = Row(number, producer, engine.life, client.mode, 0, claim, 0, 0)
        status, following = self.transactions.request(state, row)
        if status in (None, "arriving"):
            if status == "arriving":
                raise Violation(f"{client} waits for a release that no engine owes it")
            yield f"{producer} is refused after all", self.forget(state, producer)
            return
        epoch = held(following, number).epoch
        yield (
            f"{producer} arrives",
            self.believe(following, producer, status="open", id=number, epoch=epoch, mine=epoch),
        )

    def wishes(self, mode: str) -> tuple[tuple[int, int], ...]:
        """(priority, settle) that it may ask for."""
        if mode != WAIT:
            return ((0, 0),)
        if not self.world.settles:
            return ((0, 0), (1, 0))
        return ((0, 0), (1, 0), (0, SETTLE), (1, SETTLE))

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
        elif found := [row for row in state.queue if row.id == client.id]:
            following = self.transactions.cancel(state, found[0])
            yield f"{producer} cancels", self.forget(following, producer)
        else:
            yield f"{producer} learns that it has lost", self.forget(state, producer)

    def hold(self, state: State, producer: int, client: Client) -> Iterator[tuple[str, State]]:
        if client.status == "checked":
            yield f"{producer} writes", self.written(state, producer, client)
            return
        if not self.rules.may_append(state, client):
            yield f"{producer} sends and is fenced", self.forget(state, producer)
        elif self.rules.writes_later:
            yield f"{producer} is checked", self.believe(state, producer, status="checked")
        else:
            yield f"{producer} sends", self.written(state, producer, client)
        yield from self.release(state, producer, client)
        following = self.transactions.close(state, producer, client)
        yield f"{producer} closes", self.forget(following, producer)

    def written(self, state: State, producer: int, client: Client) -> State:
        if all(row.id != client.id for row in state.holders):
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
            producer,
            status="open",
        )

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
        """A waiting engine's background thread, or a coordinator, evicts the sessions of an engine
        that is gone."""
        engine_of = self.world.engine_of
        if state.move is None and not any(
            client.status in ("waiting", "arriving")
            and state.engines[engine_of[producer]].status == "up"
            for producer, client in enumerate(state.clients)
        ):
            return
        for engine in self.transactions.find_dead(state):
            yield f"engine {engine} is evicted", self.transactions.evict(state, engine)

    def hand_over(self, state: State) -> Iterator[tuple[str, State]]:
        """A coordinator that is no part of this world moves the topic, or gives that up."""
        for target in range(len(state.engines) if state.moves else 0):
            if is_alive(state.engines, target, state.engines[target].life):
                following = self.transactions.begin(state, target)._replace(moves=state.moves - 1)
                yield f"it is to be moved to engine {target}", following
        move = state.move
        if move is None:
            return
        yield "the move is cancelled", self.transactions.end_move(state)
        if not move.late:
            yield "the deadline passes", state._replace(move=move._replace(late=True))

    def release(self, state: State, producer: int, client: Client) -> Iterator[tuple[str, State]]:
        """Its engine has been asked to release it, for this move or an earlier one; it may have
        lost it since."""
        if state.move is None and self.world.moves == state.moves:  # it was never asked
            return
        released, following = self.transactions.release(state, client.id)
        if released:
            yield f"{producer} releases it", self.forget(following, producer)
        else:
            yield f"{producer} keeps it", following

    def settle(self, state: State) -> Iterator[tuple[str, State]]:
        """Time passes, and the engines retry that have a reminder."""
        if not state.settled and not state.holders:
            yield "it has settled", state._replace(settled=True)
        if state.holders and any(row.settle and not row.patient for row in state.queue):
            queue = tuple([row._replace(patient=True) for row in state.queue])
            yield "the waiters have waited for long", state._replace(queue=queue)
        for reminder in state.reminders:
            number, why = reminder
            due = state.settled if why == SETTLES else in_transit(state) is None
            if due and state.engines[number].status == "up":
                left = tuple([each for each in state.reminders if each != reminder])
                following = self.transactions.promote_again(state._replace(reminders=left))
                yield f"engine {number} comes back", following


def held(state: State, session: int) -> Row:
    """The row of a session that holds the topic."""
    return next(row for row in state.holders if row.id == session)


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
            raise Violation(f"{row} is an orphan: its engine does not know that it has it")


def judge_idleness(world: World, state: State) -> None:
    """May the waiters be left waiting?"""
    if state.holders or not state.queue:
        return
    if not (world.moves or world.settles):
        raise Violation("a session waits for a free topic")
    waiters = sorted(state.queue, key=place)
    living = [
        row for row in waiters if is_alive(state.engines, world.engine_of[row.producer], row.life)
    ]
    if len(living) < len(waiters):
        return  # live engines evict dead ones, and that promotes
    why = SETTLES if state.move is None else TRANSIT
    if why == SETTLES and (not living[0].settle or living[0].patient):
        raise Violation("a session waits for a free topic")
    coming = [number for number, reason in state.reminders if reason == why]
    if not any(state.engines[number].status in ("up", "stopped") for number in coming):
        raise Violation("no engine retries for the waiters")


def canonical(world: World, state: State) -> State:
    """Numbers sessions anew, in their order, and forgets those that cannot be met again;
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
        state.epoch,
        state.top,
        new[state.owner],
        tuple([Row(new[row[0]], rank[row[1]], *row[2:]) for row in state.holders]),
        tuple([Row(new[row[0]], rank[row[1]], *row[2:]) for row in state.queue]),
        engines,
        tuple([Client(clients[old][0], new[clients[old][1]], *clients[old][2:]) for old in order]),
        (new.get(state.last[0], 0), state.last[1]),
        tuple([new[old] for old in state.past if old in new]),
        state.opens,
        state.deaths,
        state.stops,
        state.moves,
        move,
        state.settled,
        reminders,
        (new.get(state.reminded[0], GONE), state.reminded[1]),
        state.known,
    )


def walk(world: World, rules: Rules, most: int = 10**6) -> tuple[int, int]:
    """(states, steps), or a Violation with a shortest way to it in its notes; engines that are
    alike may change their numbers on the way."""
    with contextlib.ExitStack() as broken, rare_collections():
        for owner, name, instead in rules.patches:
            broken.enter_context(mock.patch.object(owner, name, instead))
        return _walk(world, rules, most)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """States are kept, and none is part of a cycle: looking for garbage takes a fifth of a walk."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _walk(world: World, rules: Rules, most: int) -> tuple[int, int]:
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


def find_out(rules: Rules, worlds: Iterable[World]) -> Violation | None:
    """What the judge has against these rules."""
    soonest = () if rules.world is None else (rules.world,)
    for world in (*soonest, *worlds):
        try:
            walk(world, rules)
        except Violation as violation:
            return violation
    return None
