"""A shared map that another process wrote last: one put beside that process, and turns (P29)."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import exclusivelog as xl
from bench.concurrent_appends import sum_of_processes
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Settings,
    Stores,
    Target,
    latencies,
    take_turns,
)
from testing.processes import State, Worker, stop_outside, until, workers

PROCESSES = (1, 2, 4)
PUTS_IN_TURN = 20  # per round
SECONDS = 0.5  # that all processes put, per round
GIL_SECONDS = 1.5  # that the GIL is kept at least
LONGEST = 0.15
TRIES = 10  # of a put beside a process that keeps the GIL until it evicts that
SLOW = re.compile(r"(a+)+$")  # twice as long with each "a" before a "b"
IDLE, GIL = "idle", "keeping the GIL"
DURABILITIES = {"power": POWER, "process": PROCESS}


def p29(settings: Settings) -> Figure:
    """The first put after another process's, which is idle, stopped, or keeps the GIL; and puts
    of several processes to one key."""
    figure = Figure("P29", "SharedMap.put of a key that another process wrote last")
    for durability in DURABILITIES:
        with Stores(settings) as stores, workers() as make:
            _measure_one_put(figure, stores, make, durability, settings.rounds_or(15))
        with Stores(settings) as stores, workers() as make:
            _measure_turns(figure, stores, make, durability, settings.rounds_or(10))
    figure.notes.append(
        "in turn: each put is another process's, so each changes the owner, by two transactions; "
        "all the time: a process puts for 5 ms before it gives the map to another one"
    )
    return figure


# ---- one put beside the last writer --------------------------------------------------------


@dataclass
class LastWriter:
    """Another process that writes the key, and is then brought into one of the states below."""

    worker: Worker
    topic: xl.Topic
    gate: Path
    levels: int  # of a text for the regular expression
    kept: list[tuple[float, float]] = field(default_factory=list)  # when it kept the GIL
    evicted: dict[str, int] = field(default_factory=dict)  # how often, in each state
    seen: int = 0  # evictions, so far

    def write(self) -> None:
        self.worker.call(put, 1)
        owner = self.topic.owner
        if owner is None or owner.pid != self.worker.pid:
            raise RuntimeError("the process that wrote last does not hold the map")

    def be_idle(self) -> None:
        self.write()

    def be_stopped(self) -> None:
        self.write()
        assert self.worker.pid is not None
        stop_outside(self.topic.engine.path, self.worker.pid)

    def keep_the_gil(self) -> None:
        self.write()
        self.gate.unlink(missing_ok=True)
        self.worker.start(keep_the_gil, str(self.gate), self.levels)
        until(self.gate.exists)

    def stay(self) -> None:
        """It was idle, and is so."""

    def go_on(self) -> None:
        self.worker.signal(signal.SIGCONT)

    def have_kept_the_gil(self) -> None:
        self.kept.append(self.worker.answer())

    def count_evictions(self, state: str) -> int:
        """Count those since the last call, and return their number."""
        history = self.topic.engine.history(self.topic.name)
        count = sum(event.kind == "evict" for event in history)
        new, self.seen = count - self.seen, count
        self.evicted[state] = self.evicted.get(state, 0) + new
        return new

    def kept_the_gil_at(self, moment: float) -> bool:
        begin, end = self.kept[-1]
        return begin <= moment < end


BEGIN: dict[str, Callable[[LastWriter], None]] = {
    IDLE: LastWriter.be_idle,
    "stopped": LastWriter.be_stopped,
    GIL: LastWriter.keep_the_gil,
}
END: dict[str, Callable[[LastWriter], None]] = {
    IDLE: LastWriter.stay,
    "stopped": LastWriter.go_on,
    GIL: LastWriter.have_kept_the_gil,
}


def _measure_one_put(
    figure: Figure, stores: Stores, make: Callable[..., Worker], durability: str, rounds: int
) -> None:
    engine = stores.engine(durability=durability)
    topic = engine.topic("map")
    shared: xl.SharedMap[str, int] = stores.enter_context(xl.SharedMap(topic))
    worker = make(engine.path, "writer", durability=durability)
    worker.call(open_map)
    levels = worker.call(levels_for, GIL_SECONDS)
    writer = LastWriter(worker, topic, Path(stores.path("gate")), levels)
    results = take_turns(
        [_arm(shared, writer, state, durability) for state in BEGIN], rounds, warm_ups=1
    )
    figure.series += results.values()
    for state in BEGIN:
        ours, idle = results[_name(state, durability)], results[_name(IDLE, durability)]
        longest = None if state == IDLE else Target(most=LONGEST)
        figure.compare(f"{ours.name}: p50", ours, None if state == IDLE else idle)
        figure.state(f"{ours.name}: longest", max(ours.samples), "s", longest)
        figure.state(f"{ours.name}: evictions of it", writer.evicted[state], "")
    shortest = min(end - begin for begin, end in writer.kept)
    figure.notes.append(f"{durability}: the GIL was kept for {shortest:.1f} s at least each time")


def _name(state: str, durability: str) -> str:
    return f"put beside a last writer that is {state}, {durability}"


def _arm(shared: xl.SharedMap[str, int], writer: LastWriter, state: str, durability: str) -> Arm:
    def work(_: object) -> list[float]:
        for number in itertools.count(1):
            began = time.monotonic()
            samples = latencies(partial(shared.put, "n", 2), 1)
            END[state](writer)
            evicted = writer.count_evictions(state) or number >= TRIES
            if state != GIL or (evicted and writer.kept_the_gil_at(began)):
                break
            writer.keep_the_gil()  # this process came too late, or when that was nearly over
        return samples

    prepare = partial(BEGIN[state], writer)
    survives = DURABILITIES[durability]
    return Arm(_name(state, durability), work, unit="s", prepare=prepare, durability=survives)


# ---- processes that put in turn, and all the time ------------------------------------------


def _measure_turns(
    figure: Figure, stores: Stores, make: Callable[..., Worker], durability: str, rounds: int
) -> None:
    path = stores.path("turns")
    everybody = [make(path, f"writer-{i}", durability=durability) for i in range(max(PROCESSES))]
    for worker in everybody:
        worker.call(open_map)
    survives = DURABILITIES[durability]
    arms = []
    for count in PROCESSES:
        some = everybody[:count]
        arms += [
            Arm(_turns(count, durability), partial(_in_turn, some), unit="s", durability=survives),
            Arm(_all_the_time(count, durability), partial(_together, some), durability=survives),
        ]
    results = take_turns(arms, rounds)
    figure.series += results.values()
    for count in PROCESSES[1:]:
        figure.compare(
            _turns(count, durability),
            results[_turns(count, durability)],
            results[_turns(1, durability)],
            Target(most_ratio=2) if durability == "power" else None,
        )
        figure.compare(
            _all_the_time(count, durability),
            results[_all_the_time(count, durability)],
            results[_all_the_time(1, durability)],
            Target(least_ratio=0.5),
        )


def _turns(count: int, durability: str) -> str:
    return f"a put, {count} process{'es in turn' * (count > 1)}, {durability}"


def _all_the_time(count: int, durability: str) -> str:
    return f"puts of {count} process{'es all the time' * (count > 1)}, {durability}"


def _in_turn(some: Sequence[Worker], _: object) -> list[float]:
    """The duration of each put, in its process; the next process puts once it is there."""
    return [some[number % len(some)].call(put, number) for number in range(PUTS_IN_TURN)]


def _together(some: Sequence[Worker], _: object) -> list[float]:
    """The sum of all of them."""
    return sum_of_processes(some, "put", SECONDS)


# ---- in the workers ------------------------------------------------------------------------


def open_map(state: State) -> None:
    shared: xl.SharedMap[str, int] = xl.SharedMap(state.engine.topic("map"))
    state.kept["put"] = partial(shared.put, "n", 1)
    state.kept["map"] = shared


def put(state: State, value: int) -> float:
    """The seconds that a put of the key took."""
    return latencies(partial(state.kept["map"].put, "n", value), 1)[0]


def levels_for(state: State, seconds: float) -> int:
    """How many "a" occupy the regular expression for so long, on a core of its own."""
    levels, lasted = 16, 0.0
    while lasted < seconds:
        levels += 1
        began = time.thread_time()
        SLOW.match("a" * levels + "b")
        lasted = time.thread_time() - began
    return levels


def keep_the_gil(state: State, gate: str, levels: int) -> tuple[float, float]:
    """No other thread of this process runs meanwhile. Returns when that began and ended."""
    text = "a" * levels + "b"
    Path(gate).touch()
    begun = time.monotonic()
    SLOW.match(text)
    return begun, time.monotonic()
