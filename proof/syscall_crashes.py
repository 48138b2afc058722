"""Kill a process at a system call, before or right after it, for each call that it makes.

A fork server starts a child process for each point, strace kills it there, and the judge checks
what it leaves: alone, or beside a process that has the ledger open all the time and continues.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import exclusivelog as xl
from exclusivelog.local.storage import journal
from proof.jobs import todo_safely
from proof.work import Durability, act, judge, judge_topic, steps, whole_steps
from testing.children import PATIENCE
from testing.journals import CAPACITY, small_journal
from testing.processes import values, within
from testing.strace import ForkServer, Point, fork_server, points

TICK = 0.005  # seconds
AT_ONCE = 2.0  # seconds, on a busy machine; nothing in the library takes half of that
EARLY = "early"  # a deliberate defect: a step is acknowledged before it is made


def play(
    defect: str,
    path: str,
    durability: Durability,
    begin: Callable[[], None],
    say: Callable[[str], object],
) -> None:
    """The work of a child process; it writes a byte for each step that was acknowledged."""
    journal.CAPACITY = CAPACITY
    begin()
    with xl.open(path, durability=durability, name="killed") as engine:
        if defect == EARLY:
            say(".")
        act(engine, "t", lambda: say("."))


def run_child(
    server: ForkServer, path: Path, durability: Durability, *options: str
) -> tuple[bool, int]:
    """Whether the child process finished, and how many steps were acknowledged."""
    status, said = server.run(path, durability, strace=options)
    assert status in (0, -signal.SIGKILL), f"the child process failed: {path}: {said}"
    return status == 0, len(said)


CHANGING = ("pwritev", "pwrite64", "writev", "fdatasync", "fsync", "rename", "futex", "write")


def chosen(found: list[Point], most: int, part: tuple[int, int]) -> list[Point]:
    """A sample, most of it of calls that change something; or, if `most` is negative, every one
    that belongs to this part: (number, of so many)."""
    if most < 0:
        number, of = part
        return found[number::of]
    changing = [point for point in found if point.call in CHANGING]
    others = [point for point in found if point.call not in CHANGING]
    return random.sample(changing, most * 3 // 4) + random.sample(others, most // 4)


@dataclass
class Bystander:
    """An engine in this process that has the ledger open while the child process dies, and sends
    to another topic. `longest`: the longest of these sends, in seconds of `clock`, which stands
    still while this process does not run, as on a busy machine."""

    engine: xl.Engine
    sent: int = 0
    clock: float = 0.0
    longest: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with self.engine.topic("others").producer("exclusive") as producer:
            while not self.stop.wait(0.001):
                began = self.clock
                assert producer.send(b"%d" % self.sent) == self.sent
                self.longest = max(self.longest, self.clock - began)
                self.sent += 1

    def tick(self) -> None:
        last = time.monotonic()
        while not self.stop.wait(TICK):
            now = time.monotonic()
            self.clock += min(now - last, 4 * TICK)
            last = now


@contextlib.contextmanager
def bystander(path: Path, durability: Durability) -> Iterator[Bystander]:
    with xl.open(path, durability=durability, name="bystander") as engine:
        other = Bystander(engine)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(other.run), pool.submit(other.tick)]
            try:
                yield other
            finally:
                other.stop.set()
                for each in running:
                    each.result(PATIENCE)


def judge_beside(other: Bystander, path: Path, count: int) -> list[str]:
    """What a live engine reads, and the problems that it finds."""
    broken = judge_topic(other.engine, "t", count) + list(other.engine.verify().problems)
    if other.longest > AT_ONCE:
        broken.append(f"a survivor's message took {other.longest:.1f} s")
    return broken


def die_alone(
    server: ForkServer, path: Path, durability: Durability, *options: str
) -> tuple[bool, list[str]]:
    """The child process creates the ledger, and no other process has it open."""
    ended, count = run_child(server, path, durability, *options)
    return ended, within(lambda: judge(path, durability, {"t": count}))


def die_beside(
    server: ForkServer, path: Path, durability: Durability, *options: str
) -> tuple[bool, list[str]]:
    """An engine of this process has the ledger open, continues, and closes it; then another
    engine opens it."""
    with bystander(path, durability) as other:
        ended, count = run_child(server, path, durability, *options)
        broken = within(lambda: judge_beside(other, path, count))
    with xl.open(path) as engine:
        found = values(engine.topic("t"))
        if found[-1:] != [b"next"] or whole_steps(found[:-1], steps("t")) is None:
            broken.append("B9: the next one to come finds another log")
        if values(engine.topic("others")) != [b"%d" % n for n in range(other.sent)]:
            broken.append("B9: a survivor's messages are not what it sent")
        return ended, broken + list(engine.verify().problems)


# ---- the sweep ---------------------------------------------------------------------------


@dataclass
class Swept:
    """The result of a sweep."""

    points: int = 0  # at which a thread could die
    tried: int = 0
    died: int = 0
    broken: list[str] = field(default_factory=list)


def sweep(
    where: Path,
    durability: Durability,
    beside: bool,
    most: int,
    part: tuple[int, int] = (0, 1),
    defect: str = "",
) -> Swept:
    """Kill a child process at each of `most` points, or at all of them (see `chosen`), with a
    small journal."""
    die = die_beside if beside else die_alone
    trace, swept = where / "trace", Swept()
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_journal())
        servers = [
            stack.enter_context(fork_server("proof.syscall_crashes:play", defect)) for _ in range(2)
        ]
        ended, broken = die(servers[0], where / "whole", durability, "-o", str(trace))
        assert ended, "the work did not finish"
        swept.broken += [f"no process died, {text}" for text in broken]
        found = points(trace)
        swept.points = len(found)
        todo = iter(chosen(found, most, part))

        def take(server: ForkServer) -> None:
            for point in todo_safely(todo):
                path = where / str(point)
                options = ("-o", os.devnull, "-e", f"trace={point.call}", "-e", point.injection)
                ended, broken = die(server, path, durability, *options)
                swept.tried += 1
                swept.died += not ended
                swept.broken += [f"{point}, {text}" for text in broken]
                shutil.rmtree(path, ignore_errors=True)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(take, servers))
    return swept
