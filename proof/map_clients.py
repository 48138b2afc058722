"""Traffic for recorded histories of a shared map, and what is done to it.

Players call the map at random, each in a process of its own, and note what they do. A crew has
them killed and stopped. Writers write to many keys at once until they are killed, and are
forked by a server that has imported everything already.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import exclusivelog as xl
from proof.fork_server import Forked, fork_server
from proof.linearizability import UNKNOWN, Call, updated
from testing import DURABILITY
from testing.processes import until
from testing.states import open_counts

KEYS = ["a", "b", "c", "d"]
KEEPALIVE = 0.5
SNAPSHOT_EVERY = 20  # writes, where there are snapshots


# ---- the traffic -------------------------------------------------------------------------


class Player:
    """One process: it calls the map at random, and notes what it does."""

    def __init__(self, shared: xl.SharedMap[str, Any], notes: str, number: int, style: str):
        self._map, self._style = shared, style
        self._dice = random.Random(number)
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._ids = itertools.count(number * 1_000_000)
        self._seen: dict[str, Any] = {}

    def note(self, **facts: Any) -> None:
        """Written before anything else happens: it outlives a SIGKILL."""
        os.write(self._notes, (json.dumps(facts) + "\n").encode())

    def play(self, over: str) -> None:
        """Call the map until there is a file of that name."""
        while not os.path.exists(over) and os.getppid() != 1:
            self.call(*self.choose())
            if self._style == "snapshots" and self._dice.random() < 0.03:
                self._map.topic.trim(before=self._map.snapshot())
            if self._style != "two calls":
                time.sleep(self._dice.random() * 0.002)

    def choose(self) -> tuple[str, str | None, Any]:
        """What to call next."""
        new = [next(self._ids), None]
        if self._style == "reads only":
            return "get", self._dice.choice(KEYS), None
        if self._style == "two calls":
            return "update", KEYS[0], new[0]
        names = ["put", "put_if_absent", "replace", "update", "update", "delete", "get", "get"]
        if self._style == "whole map":
            names += ["put_all", "update_all", "scan", "scan", "clear"]
        name, key = self._dice.choice(names), self._dice.choice(KEYS)
        value = {
            "replace": [self._seen.get(key, [1, None]), new],
            "update": new[0],
            "put_all": [[key, new] for key in self._dice.sample(KEYS, 2)],
            "update_all": new[0],
            "get": None,
            "delete": None,
            "scan": None,
            "clear": None,
        }.get(name, new)
        return name, None if name in ("put_all", "update_all", "scan", "clear") else key, value

    def call(self, name: str, key: str | None, value: Any) -> None:
        """Make one call."""
        self.note(name=name, key=key, value=value, begin=time.monotonic_ns())
        result = getattr(self, name, self.as_named)(name, key, value)
        self.note(result=result, end=time.monotonic_ns())
        if name in ("get", "update") and key is not None:
            self._seen[key] = result[1] if name == "update" else result

    def as_named(self, name: str, key: str | None, value: Any) -> Any:
        """put, delete, clear."""
        arguments = [part for part in (key, value) if part is not None]
        return getattr(self._map, name)(*arguments)

    def put_if_absent(self, name: str, key: str, value: Any) -> list[Any]:
        change = self._map.put_if_absent(key, value)
        return [change.made, change.previous]

    def get(self, name: str, key: str, value: Any) -> Any:
        return self._map.get(key, latest=self._style != "reads only")

    def scan(self, name: str, key: None, value: Any) -> Any:
        return sorted(self._map.scan(latest=True))

    def replace(self, name: str, key: str, value: Any) -> list[Any]:
        change = self._map.replace(key, *value)
        return [change.made, change.previous]

    def update(self, name: str, key: str, value: Any) -> Any:
        if self._style == "two calls":
            old = self._map.get(key, latest=True)
            new = list(updated(tuple(old or (None,)), value))
            self._map.put(key, new)
            return [old, new]
        change = self._map.update(key, lambda old: list(updated(old and tuple(old), value)))
        return [change.previous, change.value]

    def put_all(self, name: str, key: None, value: Any) -> None:
        self._map.put_all(dict(value))

    def update_all(self, name: str, key: None, value: Any) -> int:
        return len(self._map.update_multiple(None, lambda k, v: list(updated(tuple(v), value))))


def play(path: str, notes: str, number: int, style: str, durability: str, over: str) -> None:
    """What a process does."""
    options: Any = {"durability": durability} if durability else {}
    with xl.open(path, f"p{number}", keepalive=KEEPALIVE, **options) as engine:
        often: Any = {"snapshot_every": SNAPSHOT_EVERY} if style == "snapshots" else {}
        shared: xl.SharedMap[str, Any]
        with xl.SharedMap(engine.topic("map"), **often) as shared:
            Player(shared, notes, number, style).play(over)


def _ended(process: Forked) -> bool:
    return not process.alive


# ---- what is done to them ----------------------------------------------------------------


@dataclass
class Crew:
    """The processes, and what became of them."""

    path: Path
    style: str
    fork: Callable[..., Forked]
    durabilities: tuple[str, ...] = ("",)
    living: dict[int, Forked] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    started: int = 0
    stops: int = 0

    def start(self, style: str | None = None) -> None:
        """One process more."""
        self.started += 1
        arguments = (
            str(self.path / "log"),
            str(self.notes(self.started)),
            self.started,
            style or self.style,
            self.durabilities[self.started % len(self.durabilities)],
            str(self.path / "over"),
        )
        self.living[self.started] = self.fork(self.path / f"stderr-{self.started}", *arguments)

    def notes(self, number: int) -> Path:
        """Where this one notes its calls; it is there once it plays."""
        return self.path / f"notes-{number}"

    def await_all(self) -> None:
        """Wait until all that live play."""
        until(lambda: all(self.notes(number).exists() for number in self.living))

    def torment(self, dice: random.Random) -> None:
        """Kill one, and start another; or stop one for a while."""
        number, process = dice.choice(list(self.living.items()))
        if dice.random() < 0.5:
            process.close()
            self.deaths[number] = time.monotonic_ns()
            del self.living[number]
            self.start()
        else:
            process.signal(signal.SIGSTOP)
            self.stops += 1
            time.sleep(dice.choice([0.01, 0.1, KEEPALIVE + 0.2]))
            process.signal(signal.SIGCONT)

    def finish(self) -> None:
        """Let those that live come to an end; they must end well."""
        self.await_all()
        (self.path / "over").touch()
        for number, process in self.living.items():
            until(partial(_ended, process))
            said = (self.path / f"stderr-{number}").read_text()
            assert "Traceback" not in said, said

    def history(self) -> list[Call]:
        """All that was called."""
        found: list[Call] = []
        for number in range(1, self.started + 1):
            if self.notes(number).exists():
                found += read_notes(self.notes(number), number, self.deaths.get(number, 0))
        return found


def frozen(value: Any) -> Any:
    """Lists as tuples, as models have them."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def read_notes(path: Path, number: int, death: int) -> Iterator[Call]:
    """The calls of one process. What it had begun when it died has an unknown outcome."""
    begun: dict[str, Any] | None = None
    for text in path.read_text().splitlines(keepends=True):
        facts = json.loads(text) if text.endswith("\n") else {}
        if "begin" in facts:
            begun = facts
        elif begun is not None and "end" in facts:
            yield made(number, begun, frozen(facts["result"]), facts["end"])
            begun = None
    if begun is not None:
        yield made(number, begun, UNKNOWN, death)


def made(number: int, begun: dict[str, Any], result: Any, end: int) -> Call:
    value = frozen(begun["value"])
    return Call(number, begun["name"], begun["key"], value, result, begun["begin"], end)


@contextmanager
def crew(path: Path, style: str, count: int = 3, **options: Any) -> Iterator[Crew]:
    """Start `count` client processes; kill and reap all of them at the end of the block."""
    with fork_server("proof.map_clients:play") as fork:
        made = Crew(path, style, fork, **options)
        try:
            for _ in range(count):
                made.start()
            made.await_all()
            yield made
        finally:
            for process in made.living.values():
                process.close()


# ---- many keys at once ------------------------------------------------------------------

FORK_SERVER = """
    import os, sys
    import exclusivelog
    from proof.map_clients import WRITERS, write_for_ever

    while sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(sys.argv[1], sys.argv[2], WRITERS[sys.argv[3]])
            finally:
                os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("dead", flush=True)
"""

MANY = [f"k{number}" for number in range(40)]
PAYLOAD = "x" * 5000

Writer = Callable[[xl.Topic], Callable[[int], object]]


def by_put_all(topic: xl.Topic) -> Callable[[int], object]:
    shared: xl.SharedMap[str, Any] = xl.SharedMap(topic)
    return lambda turn: shared.put_all({key: [turn] for key in MANY})


def by_put_all_at_length(topic: xl.Topic) -> Callable[[int], object]:
    """200 kB at once: they do not go by the journal."""
    shared: xl.SharedMap[str, Any] = xl.SharedMap(topic)
    return lambda turn: shared.put_all({key: [turn, PAYLOAD] for key in MANY})


def by_update_multiple(topic: xl.Topic) -> Callable[[int], object]:
    shared: xl.SharedMap[str, Any] = xl.SharedMap(topic)
    shared.put_all(dict.fromkeys(MANY, shared.get(MANY[0], [0])))
    return lambda turn: shared.update_multiple(None, lambda key, value: [turn])


def by_operations(topic: xl.Topic) -> Callable[[int], object]:
    counts = open_counts(topic)
    return lambda turn: counts.write(
        lambda state: [[key, turn - state.get(key, 0)] for key in MANY]
    )


def one_by_one(topic: xl.Topic) -> Callable[[int], object]:
    """The control."""
    shared: xl.SharedMap[str, Any] = xl.SharedMap(topic)

    def put(turn: int) -> None:
        for key in MANY:
            shared.put(key, [turn])

    return put


WRITERS: dict[str, Writer] = {
    "put_all": by_put_all,
    "put_all, 200 kB": by_put_all_at_length,
    "update_multiple": by_update_multiple,
    "operations": by_operations,
    "one by one": one_by_one,
}


def write_for_ever(path: str, acknowledged: str, writer: Writer) -> None:
    """Write the next number to all keys, again and again; in the file stands the last one that
    was acknowledged."""
    file = os.open(acknowledged, os.O_RDWR)
    options: Any = {"durability": os.environ.get(DURABILITY) or "power"}
    with xl.open(path, **options) as engine:
        write = writer(engine.topic("map"))
        for turn in itertools.count(int(os.pread(file, 20, 0)) + 1):
            write(turn)
            os.pwrite(file, b"%20d" % turn, 0)
