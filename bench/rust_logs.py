"""Durable appends beside the write-ahead logs of Rust, where cargo is (P32).

Each log has a process of its own, a program in Rust (`native/logs`), and a directory beside ours.
An append returns once `fdatasync`, or `fsync`, has flushed it; the head of the program says by
which options.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from bench.append import SIZE, messages
from bench.concurrent_appends import Append, sum_of_threads
from bench.measure import (
    POWER,
    Arm,
    Figure,
    Series,
    Settings,
    Stores,
    Target,
    in_thread,
    latencies,
    take_turns,
)
from bench.native import build_logs
from bench.peers import RawFile
from testing.descriptors import readable

LOGS = ("okaywal", "wal-db", "fjall", "redb", "walrus")
CALLS, THREADS, WINDOW_SECONDS = 50, 8, 0.5
PATIENCE = 60.0
OURS, RAW = "send", "pwrite + fdatasync"


class RustLog:
    """A process that appends to one log, as it is told to."""

    def __init__(self, program: Path, name: str, directory: str) -> None:
        self.name = name
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [program, name, directory],
            stdin=pipe,
            stdout=pipe,
            env={**os.environ, "WALRUS_DATA_DIR": directory, "WALRUS_QUIET": "1"},
        )
        self.pid = self._process.pid
        if self._line() != "ready":
            self.close()
            raise RuntimeError(f"{name} was not opened")

    def latencies(self, count: int) -> list[float]:
        """The duration of each of so many appends, in seconds."""
        return [int(each) * 1e-9 for each in self._ask(f"latencies {count}").split()]

    def rate(self, threads: int, seconds: float) -> float:
        """Appends a second of so many threads together."""
        return float(self._ask(f"rate {threads} {seconds}"))

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not readable(self._process.stdout, PATIENCE):
            raise TimeoutError(f"{self.name} did not answer within {PATIENCE} s")
        line = self._process.stdout.readline().decode()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return line.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def p32(settings: Settings) -> Figure:
    """One thread's durable append, and the sum of many threads'."""
    figure = Figure("P32", f"durable append of {SIZE} B beside the write-ahead logs of Rust")
    program = build_logs()
    with Stores(settings) as stores:
        logs = [] if program is None else [_open(stores, program, name) for name in LOGS]
        singles, many = _our_arms(stores)
        singles += [_single(log) for log in logs]
        many += [_many(log) for log in logs]
        single = take_turns(singles, settings.rounds_or(20), warm_ups=5)
        threads = take_turns(many, settings.rounds_or(7))
    figure.series = [*single.values(), *threads.values()]
    _judge(figure, "one thread, p50", single, RAW, min, Target(most_ratio=1.05))
    _judge(
        figure,
        f"{THREADS} threads",
        threads,
        f"{RAW}, {THREADS} threads",
        max,
        Target(least_ratio=1.0),
    )
    if not logs:
        figure.notes.append(f"cargo is not installed: not measured are {', '.join(LOGS)}")
    return figure


def _open(stores: Stores, program: Path, name: str) -> RustLog:
    return stores.enter_context(closing(RustLog(program, name, stores.path(name))))


def _judge(
    figure: Figure,
    what: str,
    results: dict[str, Series],
    raw: str,
    best: Callable[..., Series],
    target: Target,
) -> None:
    """The target is about the best of the logs of Rust; the file without any log is no such."""
    ours, *peers = results.values()
    rivals = [peer for peer in peers if peer.name != raw]
    first = best(rivals, key=lambda peer: peer.median, default=None)
    for peer in peers:
        figure.compare(
            f"send, {what}, against {peer.name}", ours, peer, target if peer is first else None
        )


# ---- the arms ------------------------------------------------------------------------------


def _our_arms(stores: Stores) -> tuple[list[Arm], list[Arm]]:
    """Ours, in a thread as theirs, and a file for each thread without any log."""
    engine, value = stores.engine(), messages(1)[0]
    sends: list[Append] = [
        partial(engine.topic(f"topic-{i}").producer("exclusive").send, value)
        for i in range(THREADS)
    ]
    files = [RawFile(stores.path(f"raw-{i}"), 8 << 20) for i in range(THREADS)]
    for file in files:
        stores.callback(file.close)
    writes: list[Append] = [partial(file.append, value) for file in files]
    singles, many = [], []
    for name, appends in ((OURS, sends), (RAW, writes)):
        rival = name == RAW
        singles.append(_single_arm(name, partial(_timed, appends[0]), rival))
        sum_of = partial(sum_of_threads, appends, WINDOW_SECONDS)
        many.append(_many_arm(f"{name}, {THREADS} threads", sum_of, rival))
    return singles, many


def _timed(append: Append) -> list[float]:
    samples: list[float] = in_thread(lambda: latencies(append, CALLS))
    return samples


def _single(log: RustLog) -> Arm:
    return _single_arm(log.name, partial(log.latencies, CALLS), rival=True)


def _many(log: RustLog) -> Arm:
    def work() -> list[float]:
        return [log.rate(THREADS, WINDOW_SECONDS)]

    return _many_arm(f"{log.name}, {THREADS} threads", work, rival=True)


def _single_arm(name: str, work: Callable[[], list[float]], rival: bool) -> Arm:
    return Arm(name, lambda _: work(), CALLS, "s", durability=POWER, rival=rival)


def _many_arm(name: str, work: Callable[[], list[float]], rival: bool) -> Arm:
    return Arm(name, lambda _: work(), durability=POWER, rival=rival)
