"""The chance that a process that is stopped holds up the writers of other topics (P28).

A process does one thing without a pause, and is stopped at random moments. After each stop, this
process sends to another topic of the same ledger: it is held up if that has no answer within
0.3 s. Each kind has a new ledger and process in each block; the kinds take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import POWER, PROCESS, Figure, Series, Settings, Stores, Target
from testing.pauses import CONTROL, SILENCE, Found, Kind, measured, name_of

TRIALS, BLOCK = 300, 50  # of each kind; between two changes of the kind
SURE = 1.96  # standard deviations: 95 %
MOST_PERCENT = 1.0
GRANTS = "grants"  # their chance is stated
WORK = ("sends", "commits", "positions", GRANTS, "checkpoints", "moves")
IDLE: Kind = ("nothing", "process", 0)  # a send that waits beside this one waits for the machine
KINDS: list[Kind] = [
    *((what, "power", 0) for what in WORK),
    *((what, "process", 0) for what in WORK),
    IDLE,
]
DURABILITIES = {"power": POWER, "process": PROCESS}


@dataclass
class Stopped:
    """All stops of one kind. `blocks`: the per cent of each block that held up a send."""

    trials: int = 0
    held_up: int = 0
    calls: int = 0
    seconds: float = 0.0
    blocks: list[float] = field(default_factory=list)

    def add(self, kind: Kind, found: Found) -> None:
        if found.unanswered:
            raise RuntimeError(f"{name_of(kind)}: a send had no answer after SIGCONT")
        if not found.calls and kind != CONTROL:
            raise RuntimeError(f"{name_of(kind)}: the process did nothing between the stops")
        self.trials += found.stops
        self.held_up += found.inside
        self.calls += found.calls
        self.seconds += found.seconds
        self.blocks.append(100 * found.inside / found.stops)


def p28(settings: Settings) -> Figure:
    """The share of the stops that hold up a send to another topic, for each kind of work."""
    figure = Figure("P28", f"SIGSTOP at random moments: a send to another topic waits {SILENCE} s")
    results = {kind: Stopped() for kind in KINDS}
    with Stores(settings) as stores:
        where = Path(stores.directory)
        for trials in blocks_of(settings.rounds_or(TRIALS)):
            for kind, stopped in results.items():
                stopped.add(kind, measured(kind, trials, where))
        control = Stopped()
        control.add(CONTROL, measured(CONTROL, min(BLOCK, 5), where))
    if control.held_up != control.trials:
        raise RuntimeError("a process that is always inside did not hold up each send")
    for kind, stopped in results.items():
        _judge(figure, kind, stopped)
    figure.notes.append(
        "in brackets: the 95 % interval (Wilson); and how often the process did it, while it ran"
    )
    return figure


def blocks_of(trials: int) -> Iterable[int]:
    """
    >>> list(blocks_of(120)), list(blocks_of(20))
    ([50, 50, 20], [20])
    """
    return [min(BLOCK, trials - at) for at in range(0, trials, BLOCK)]


def _judge(figure: Figure, kind: Kind, stopped: Stopped) -> None:
    what, durability, _ = kind
    name, share = name_of(kind), 100 * stopped.held_up / stopped.trials
    figure.series.append(Series(name, "%", stopped.blocks, DURABILITIES[durability]))
    target = None if what == GRANTS or kind == IDLE else Target(most=MOST_PERCENT)
    figure.state(f"{name}: held up", share, "%", target)
    low, high = (100 * bound for bound in interval(stopped.held_up, stopped.trials))
    figure.notes.append(
        f"{name}: {stopped.held_up} of {stopped.trials} ({low:.1f} to {high:.1f} %); "
        f"{stopped.calls / stopped.seconds:,.0f}/s"
    )


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's interval of a chance.

    >>> [round(bound, 3) for bound in interval(0, 300)], [round(b, 3) for b in interval(150, 300)]
    ([0.0, 0.013], [0.444, 0.556])
    """
    share, weight = hits / trials, SURE**2 / trials
    middle = (share + weight / 2) / (1 + weight)
    half = SURE / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)
