"""Taking over from a process that was killed (P8)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from functools import partial
from typing import Any

from bench.measure import POWER, Figure, Series, Settings, Stores, Target
from bench.native import build
from exclusivelog._core import now
from testing.processes import State, Worker, until, workers

NS = 1e-9
BALLAST = 1 << 30
SETTLE_SECONDS = 0.05
BOUND = "a robust mutex in C"  # the least that this costs: native/death.c


def p8(settings: Settings) -> Figure:
    """From just before the owner's SIGKILL to the successor's first durable append."""
    figure = Figure("P8", "take-over after SIGKILL, until the successor's first durable append")
    for ballast, rounds, most in ((0, 30, 3e-3), (BALLAST, 8, 5e-3)):
        size = f"a dead owner of {ballast >> 30} GiB" if ballast else "a small dead owner"
        rounds = settings.rounds_or(rounds)
        with Stores(settings) as stores:
            granted, acknowledged = _ours(stores, ballast, rounds)
        with Stores(settings) as stores:
            locked, written = _flock(stores, ballast, rounds)
        with Stores(settings) as stores:
            woken, durable = _bound(stores, ballast, rounds)
        ours = Series(f"take-over, {size}", "s", acknowledged, POWER)
        peer = Series(f"flock, then pwrite + fdatasync, {size}", "s", written, POWER, rival=True)
        bound = Series(f"{BOUND}, {size}", "s", durable, POWER, rival=True)
        figure.series += [
            ours,
            peer,
            bound,
            Series(f"promoted, {size}", "s", granted),
            Series(f"woken in C, {size}", "s", woken, rival=True),
            Series(f"flock alone, {size}", "s", locked, rival=True),
        ]
        figure.compare(f"take-over p50, {size}", ours, peer, Target(most=most))
        figure.compare(f"take-over p50, {size}, against the kernel's share", ours, bound)
        for share in (0.95, 1.0):
            name = "max" if share == 1.0 else f"p{share * 100:.0f}"
            figure.state(f"take-over {name}, {size}", ours.percentile(share), "s")
        figure.compare(f"of which until promoted, p50, {size}", figure.series[-2])
    figure.notes += [
        "flock has neither a queue nor an epoch: it only shows what a lock costs",
        f"{BOUND}: the kernel ends a small process, wakes another one, and flushes once",
    ]
    return figure


# ---- ours --------------------------------------------------------------------------------


def _ours(stores: Stores, ballast: int, rounds: int) -> tuple[list[float], list[float]]:
    """Each successor is the next one to be killed."""
    path = stores.path("ours")
    granted, acknowledged = [], []
    topic = stores.engine("ours").topic("orders")
    with workers() as make:
        owner = make(path, "owner-0")
        owner.call(hold, ballast)
        for number in range(rounds):
            successor = make(path, f"owner-{number + 1}")
            successor.start(take_over)
            until(lambda: topic.waiters)
            at, (promoted, appended) = kill(owner, successor)
            granted.append((promoted - at) * NS)
            acknowledged.append((appended - at) * NS)
            successor.call(load, ballast)
            owner = successor
    return granted, acknowledged


def kill(owner: Worker, successor: Worker) -> tuple[int, Any]:
    """Kill the owner; return the time, and the successor's answer."""
    time.sleep(SETTLE_SECONDS)  # let it fall asleep
    at = now()
    owner.signal(signal.SIGKILL)
    answer = successor.answer()
    owner.process.join(30)
    return at, answer


def hold(state: State, ballast: int) -> None:
    """Be the owner, with this much memory."""
    state.producer = state.topic.producer("exclusive")
    state.producer.send(b"first")
    load(state, ballast)


def load(state: State, ballast: int) -> None:
    """Hold memory, every page of it touched."""
    state.kept["ballast"] = b"x" * ballast


def take_over(state: State) -> tuple[int, int]:
    """When this process was promoted, and when its first message was durable."""
    state.producer = state.topic.producer("wait_for_exclusive", timeout=30)
    promoted = now()
    state.producer.send(b"mine")
    return promoted, now()


# ---- a file lock -------------------------------------------------------------------------


def _flock(stores: Stores, ballast: int, rounds: int) -> tuple[list[float], list[float]]:
    path, lock, data = stores.path("others"), stores.path("lock"), stores.path("data")
    with open(data, "wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    locked, written = [], []
    with workers() as make:
        owner = make(path, "owner-0")
        owner.call(take_flock, lock, data)
        for number in range(rounds):
            owner.call(load, ballast)
            successor = make(path, f"owner-{number + 1}")
            successor.start(take_flock, lock, data)
            until(partial(waits_for_a_lock, successor.pid))
            at, (taken, appended) = kill(owner, successor)
            locked.append((taken - at) * NS)
            written.append((appended - at) * NS)
            owner = successor
    return locked, written


def take_flock(state: State, lock: str, data: str) -> tuple[int, int]:
    """When the lock was taken, and when a message was durable in a preallocated file."""
    state.kept["lock"] = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(state.kept["lock"], fcntl.LOCK_EX)
    taken = now()
    fd = os.open(data, os.O_RDWR)
    os.pwrite(fd, b"mine", 0)
    os.fdatasync(fd)
    return taken, now()


def waits_for_a_lock(pid: int | None) -> bool:
    with open("/proc/locks") as locks:
        return any("->" in line and f" {pid} " in line for line in locks)


# ---- the bound ---------------------------------------------------------------------------


def _bound(stores: Stores, ballast: int, rounds: int) -> tuple[list[float], list[float]]:
    program = build("death", stores)
    command = [program, stores.path("death.log"), str(ballast), str(rounds)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return [float(taken) for taken, _ in lines], [float(durable) for _, durable in lines]
