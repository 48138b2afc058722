"""Histories of a shared map (rules I1 to I4), and what death leaves of writes to many keys.

Processes call one map as they like, and are killed and stopped; each notes what it calls. A checker
then looks for an order in which a single process would have got the same results
(`proof.linearizability`). Snapshots are made on the way, and what they have is trimmed.

A writer that writes to many keys at once is killed again and again: the next one finds its write in
all of them, or in none.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from proof.linearizability import Call, Failure, WholeMap, check, check_per_key
from proof.map_clients import FORK_SERVER, KEYS, crew, frozen
from testing.children import PATIENCE, child, line, tell
from testing.states import everything, open_counts

LEAST_DEATHS = 3
LEAST_CALLS = 350  # a busy machine needs longer for them
STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "each call has one key": ("one key", {}),
    "of two durabilities": ("one key", {"durabilities": ("process", "power", "power")}),
    "calls that concern all keys": ("whole map", {}),
    "with snapshots": ("snapshots", {}),
}


@dataclass
class Played:
    """A history, and how many of its processes were killed and stopped."""

    calls: list[Call] = field(default_factory=list)
    kills: int = 0
    stops: int = 0


def record(path: Path, style: str, seconds: float, dice: random.Random, **options: Any) -> Played:
    """The history of a crew that is tormented for so long."""
    with crew(path, style, **options) as hands:
        end = time.monotonic() + seconds
        while (
            time.monotonic() < end
            or len(hands.deaths) < LEAST_DEATHS
            or (returned(path) < LEAST_CALLS and time.monotonic() < end + PATIENCE)
        ):
            time.sleep(dice.random() * 0.25)
            hands.torment(dice)
        hands.finish()
        calls = hands.history() + look_at_the_end(path, hands.started + 1)
        return Played(calls, len(hands.deaths), hands.stops)


def returned(path: Path) -> int:
    """How many calls the notes tell the end of."""
    return sum(notes.read_bytes().count(b'"end"') for notes in path.glob("notes-*"))


def look_at_the_end(path: Path, number: int) -> list[Call]:
    """What a process reads when all others have ended."""
    shared: xl.SharedMap[Any, Any]
    with xl.open(path / "log") as engine, xl.SharedMap(engine.topic("map")) as shared:
        found = {key: frozen(value) for key, value in everything(shared).items()}
        assert engine.verify().ok
    now = time.monotonic_ns()
    return [Call(number, "get", key, None, found.get(key), now, now + 1) for key in KEYS]


def judge(style: str, calls: list[Call]) -> Failure | None:
    """None if it is linearizable. Where all calls have one key, keys are judged one by one."""
    return check(calls, WholeMap) if style == "whole map" else check_per_key(calls)


def explanation(failure: Failure | None, history: list[Call], path: Path) -> str:
    """The failure, the calls of the same key around it, and what the log has of that key."""
    if failure is None:
        return ""
    stuck = min(failure.candidates, key=lambda call: call.end)
    calls = sorted((c for c in history if c.key == stuck.key), key=lambda call: call.begin)
    around = [c for c in calls if abs(c.begin - stuck.begin) < 1e9 or c.begin < stuck.end < c.end]
    with xl.open(path / "log") as engine, engine.topic("map").reader() as reader:
        logged = [
            f"{m.offset} epoch {m.epoch} {m.producer_name}: {m.raw_value!r}"
            for m in reader
            if stuck.key is None or m.key == stuck.key.encode()
        ]
    return "\n".join([str(failure), "calls:", *map(str, around), "log:", *logged])


def record_untroubled(path: Path, style: str, seconds: float) -> list[Call]:
    """The history of a crew to which nothing is done: for controls."""
    with crew(path, style) as hands:
        time.sleep(seconds)
        hands.finish()
        return hands.history()


# ---- all keys or none --------------------------------------------------------------------


def turns(engine: xl.Engine, writer: str) -> set[int]:
    """The numbers that stand in the keys."""
    topic = engine.topic("map")
    if writer == "operations":
        with open_counts(topic) as counts:
            return set(counts.read(dict, latest=True).values())
    shared: xl.SharedMap[Any, Any]
    with xl.SharedMap(topic) as shared:
        return {value[0] for value in everything(shared).values()}


def torn(path: Path, writer: str, rounds: int) -> Iterator[bool]:
    """Kill a writer again and again: were only some of the keys written?"""
    dice, acknowledged = random.Random(rounds), path / "acknowledged"
    acknowledged.write_bytes(b"%20d" % 0)
    with (
        xl.open(path / "log") as engine,
        child(FORK_SERVER, path / "log", acknowledged, writer) as server,
    ):
        for _ in range(rounds):
            last = int(acknowledged.read_bytes())
            tell(server)
            pid = int(line(server))
            deadline = time.monotonic() + PATIENCE
            while int(acknowledged.read_bytes()) < last + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(dice.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            assert line(server) == "dead"
            found, last = turns(engine, writer), int(acknowledged.read_bytes())
            assert found <= {last, last + 1}, f"{last} was acknowledged, {found} are there"
            # The process may have written one more that it has not counted.
            acknowledged.write_bytes(b"%20d" % max(found))
            yield len(found) > 1
