"""What the model walks through: a topic, its engines and producers as one value."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from exclusivelog.admission import Known

NO_CLAIM = -1
GONE = -1  # a session of which nothing is left
SETTLE = 10**5  # ns that those leave a topic to better ones that do
SETTLES, TRANSIT, PAST = "settles", "transit", "past"  # why an engine is to retry
NO_SESSION = (0, "")


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
    patient: bool = False  # has waited for longer than any request settles


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
    the topic has been free for as long as any request settles. `reminders` are (engine,
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
    reminded: tuple[int, str] = NO_SESSION  # the session whose engine was reminded last, and why
    known: Known | None = None  # the best and the lowest priority of earlier waiters


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
        and which one has it."""

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
            0,
            0,
            0,
            (),
            (),
            engines,
            clients,
            (0, 0),
            (),
            self.opens,
            self.deaths,
            self.stops,
            self.moves,
            settled=not self.settles,
            known=self.known,
        )


def is_alive(engines: tuple[Engine, ...], engine: int, life: int) -> bool:
    """What the others see: a death at once, a silence only when it is overdue."""
    found = engines[engine]
    return found.life == life and found.status in ("up", "stopped")


def place(row: Row) -> tuple[int, int]:
    """The order of rule D1, spelled out once more."""
    return (-row.priority, row.id)


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
    "a move among three engines, and a hang": World((0, 1, 2), opens=2, stops=1, moves=1),
    "a topic that settles": World((0, 1, 2), opens=3, settles=True),
    "a topic that settles, and a hang": World((0, 1), opens=2, stops=1, settles=True),
    "a topic that settles, a move and a death": World(
        (0, 1), opens=2, deaths=1, moves=1, settles=True
    ),
    "a topic that settles, whose priorities are known": World(
        (0, 1, 2), opens=3, settles=True, known=(1, 0)
    ),
}
# What the tests walk in place of the largest of these, unless --every-crash.
REDUCED_WORLDS = {
    "three engines, and a hang": World((0, 1, 2), opens=2, deaths=0, stops=1),
    "three engines, and a death": World((0, 1, 2), opens=2, deaths=1, stops=0),
    "two producers share an engine": World((0, 0), opens=3, deaths=1, stops=0),
    "a move among three engines": World((0, 1, 2), opens=2, moves=1),
    "a move, a death and a hang": World((0, 1), opens=1, deaths=1, stops=1, moves=1),
    "a topic that settles": World((0, 1, 2), opens=2, settles=True),
    "a topic that settles, a move and a death": World(
        (0, 1), opens=1, deaths=1, moves=1, settles=True
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
    World((0, 1), opens=2, moves=1, settles=True),
    World((0, 1, 2), opens=2, stops=1, moves=1),
)
