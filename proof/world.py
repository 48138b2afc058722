"""What the model walks through: a topic, its engines and producers as one value, and what a
transaction of `sessions.py` or `handover.py` makes of it, in one step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from exclusivelog.access import (
    EXCLUSIVE,
    FENCING,
    SHARED,
    WAIT,
    Known,
    Request,
    Session,
    Transfer,
    Verdict,
    pack_session,
)
from exclusivelog.tables import queue_key

if TYPE_CHECKING:
    from proof.rules import Rules

MODES = (SHARED, EXCLUSIVE, WAIT, FENCING)
GRANTING = (Verdict.GRANT, Verdict.TAKE_OVER)
ACCEPTING = (*GRANTING, Verdict.ADMIT, Verdict.QUEUE)


NO_CLAIM = -1
SETTLES, TRANSIT = "settles", "transit"  # why somebody is to come back
NOBODY = (0, "")


class Violation(Exception):
    """A state, or a step, that must not be."""


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
    patient: bool = False  # has waited for as long as that while the topic had an owner


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

    # idle, waiting, open; arriving: waits for the release of a topic that is on its way to it;
    # checked: about to write, in one of the controls
    status: str
    id: int
    mode: str
    epoch: int  # of one that is arriving: its claim, or NO_CLAIM
    mine: int


class State(NamedTuple):
    """Everything, at one moment. `top` is the highest epoch ever granted; `settled` says that
    the topic has been free for as long as anybody leaves it to others. `reminders` are (engine,
    why): it is to come back for the topic, because it settles or because it is in transit."""

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
    known: Known | None = None  # the best and the lowest priority of earlier waiters

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


TOPIC = 1
GONE = -1  # a session of which nothing is left
# Time is what these say: who waits now has come since `COME`, and the topic was freed at `FREED`,
# which is too soon for all but the patient; once it has settled it is `SETTLED`.
COME, FREED, SETTLE = 10**6, 10**6 + 10**3, 10**5
SETTLED, DEADLINE = FREED + SETTLE, FREED + 9 * SETTLE


@functools.cache
def session_of(row: Row, home: int) -> Session:
    """The session as access.py knows it."""
    return Session(
        id=row.id, topic=TOPIC, engine=f"{home:08x}{row.life:08x}", slot=home, pid=0,
        engine_name="", name="", mode=row.mode, priority=row.priority,
        created=row.id if row.patient else COME + row.id, tie=0, since=0,
        claim=row.claim, epoch=row.epoch, settle=row.settle,
    )  # fmt: skip


@functools.cache
def row_of(row: Row, home: int) -> tuple[bytes, bytes]:
    """Its row of the queue's table."""
    session = session_of(row, home)
    return queue_key(session), pack_session(session)


@functools.cache
def transfer_of(move: Move | None) -> Transfer | None:
    """The hand-over as access.py knows it."""
    if move is None:
        return None
    target = f"{move.target:08x}{move.life:08x}"
    return Transfer(TOPIC, target, move.target, DEADLINE, move.session, "", 0, {})


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
        rows = [row_of(row, self.home(row)) for row in queue]
        fit = [row for row in queue if self.alive(row) and row.claim in (None, self.epoch)]
        promotion = self.rules.promote(
            self.epoch, TOPIC, rows,
            lambda home, engine: self.lives(home, int(engine[8:], 16)),
            now=SETTLED if self.settled else FREED, freed=FREED, transfer=transfer_of(move),
            known=self.world.known,
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
        return fit[0].id if fit and not self.leaves_it(fit[0]) else None

    def leaves_it(self, row: Row) -> bool:
        """Does it leave a free topic to better ones that reconnect? Spelled out once more."""
        is_best = self.world.known is not None and row.priority == max(self.world.known)
        return bool(row.settle) and not (self.settled or row.patient or is_best)

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
                waiting=waiting, transfer=transfer_of(move), known=self.world.known,
            )  # fmt: skip
        decision = self.rules.admit(
            epoch=self.epoch, owner=None if owner is None else self.session(owner), shared=shared,
            waiting=waiting, request=Request(row.mode, row.claim),
        )  # fmt: skip
        if row.claim not in (None, self.epoch) and decision.verdict in ACCEPTING:
            raise Violation(f"{row} is accepted at epoch {self.epoch}")
        if decision.verdict not in ACCEPTING:
            return self.refuse(row, decision.verdict, owner, target)
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

    def releases_to(self, engine: int) -> bool:
        """As `Sessions.releasing_to`: is an owner still to release the topic to this engine?"""
        return bool(self.owner) and self.in_transit == engine

    def refuse(
        self, row: Row, verdict: Verdict, owner: Row | None, target: int | None
    ) -> str | None:
        """As `Sessions._coming`: does it wait for a release instead?"""
        home = self.home(row)
        expected = any(self.home(each) == home and self.alive(each) for each in self.queue.values())
        transfer = transfer_of(self.move)
        coming = owner is not None and target is not None and transfer is not None
        arrives = coming and self.rules.awaits_release(
            self.session(row), verdict=verdict, waiting=bool(self.queue), expected=expected,
            target="" if transfer is None else transfer.target,
        )  # fmt: skip
        # Spelled out once more.
        fits = row.claim in (None, self.epoch)
        free = not (self.queue if row.mode == SHARED else expected)
        if bool(arrives) != (coming and target == home and fits and free):
            raise Violation(
                f"{row} is refused ({verdict}, arrives: {arrives}) on the way to {target}"
            )
        return "arriving" if arrives else None

    def must_wait(self, row: Row, target: int | None) -> bool:
        """Must it leave a free topic to others, or to later? Spelled out once more."""
        if target is not None:
            return self.home(row) != target
        return bool(self.queue) or self.leaves_it(row)

    def evict_all(self) -> None:
        self.holders.clear()
        self.queue.clear()
        self.owner = 0


# ---- worlds ------------------------------------------------------------------------------


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
    "a topic that settles, whose priorities are known": World(
        (0, 1, 2), opens=3, settles=True, known=(1, 0)
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
    World((0, 1), opens=2, settles=True, known=(1, 0)),
    World((0, 1), opens=2, deaths=1, moves=1),
    World((0, 1), opens=2, moves=2),
)
