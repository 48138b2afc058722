"""Concurrent durable sends, which share flushes (P5)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from bench.append import messages
from bench.concurrent_appends import (
    PATIENCE,
    Append,
    count_calls,
    keep_lmdb,
    keep_raw,
    keep_send,
    soon,
    sum_of_processes,
    sum_of_threads,
)
from bench.measure import POWER, Arm, Figure, Row, Series, Settings, Stores, Target, take_turns
from bench.native import build
from bench.peers import Lmdb, RawFile
from testing.processes import Worker, workers

THREADS, PROCESSES = 8, 4
WINDOW_SECONDS = 0.6
OURS, LMDB, RAW = "send", "py-lmdb", "pwrite + fdatasync"
BOUND = "one leader in C"  # the least that sharing a flush costs: native/shared_flush.c
ONE = f"{OURS}, 1 thread"


def p5(settings: Settings) -> Figure:
    """The total rate of durable sends of threads and of processes, compared with one thread's."""
    figure = Figure("P5", f"durable send of 100 B, {THREADS} threads, and {PROCESSES} processes")
    with Stores(settings) as stores, workers() as make:
        arms = [
            *_our_threads(stores),
            *_lmdb_threads(stores),
            *_raw_threads(stores),
            *_process_arms(stores, make),
            *_bound_arms(stores),
        ]
        results = take_turns(arms, settings.rounds_or(5))
    figure.series = list(results.values())
    _judge(figure, results)
    figure.notes.append(
        "all send in threads that are not their process's main one, which has a row of its own"
    )
    return figure


def _judge(figure: Figure, results: dict[str, Series]) -> None:
    one = results[ONE]
    threads, shared = results[f"{OURS}, {THREADS} threads"], results[_one_producer()]
    processes = results[f"{OURS}, {PROCESSES} processes"]
    figure.compare(
        f"{THREADS} threads, each its own topic: the sum", threads, one, Target(least_ratio=5)
    )
    figure.compare(f"{THREADS} threads, one producer: the sum", shared, one)
    figure.compare(
        f"{PROCESSES} processes, each its own topic: the sum", processes, one, Target(least_ratio=3)
    )
    figure.compare(f"{PROCESSES} processes, one topic: the sum", results[_one_topic()], one)
    figure.compare("1 process", results[f"{OURS}, 1 process"], one)
    figure.compare("the main thread", results[f"{OURS}, the main thread"], one)
    for how in ("1 thread", f"{THREADS} threads", f"{PROCESSES} processes"):
        figure.compare(
            f"{how}: the sum, against {BOUND}",
            results[f"{OURS}, {how}"],
            results[f"{BOUND}, {how}"],
            Target(least_ratio=0.85),
        )
    for how in (f"{THREADS} threads", f"{PROCESSES} processes"):
        gain, bound = (
            results[f"{name}, {how}"].median / results[f"{name}, 1 thread"].median
            for name in (OURS, BOUND)
        )
        figure.rows.append(
            Row(
                f"{how}: times one thread, against {BOUND}",
                gain,
                "",
                bound,
                BOUND,
                Target(least_ratio=0.9),
            )
        )
    for peer in (LMDB, RAW):
        for ours, how in (
            (one, "1 thread"),
            (threads, f"{THREADS} threads"),
            (processes, f"{PROCESSES} processes"),
        ):
            figure.compare(f"{how}: the sum, against {peer}", ours, results[f"{peer}, {how}"])

    figure.notes += [_gains(name, results) for name in (OURS, BOUND, LMDB, RAW)]


def _gains(name: str, results: dict[str, Series]) -> str:
    one = results[f"{name}, 1 thread"].median
    times = " and ".join(
        f"{results[f'{name}, {how}'].median / one:.2f} times"
        for how in (f"{THREADS} threads", f"{PROCESSES} processes")
    )
    return f"{name}: {THREADS} threads and {PROCESSES} processes do {times} what one thread does"


def _one_producer() -> str:
    return f"{OURS}, {THREADS} threads, one producer"


def _one_topic() -> str:
    return f"{OURS}, {PROCESSES} processes, one topic"


# ---- threads -----------------------------------------------------------------------------


def _threads_arm(name: str, appends: Sequence[Append], rival: bool = False) -> Arm:
    return Arm(
        name, lambda _: sum_of_threads(appends, WINDOW_SECONDS), durability=POWER, rival=rival
    )


def _our_threads(stores: Stores) -> list[Arm]:
    value, engine = messages(1)[0], stores.engine("threads")
    own = [
        partial(engine.topic(f"topic-{i}").producer("exclusive").send, value)
        for i in range(THREADS)
    ]
    shared = partial(engine.topic("shared").producer().send, value)

    def in_the_main_thread(_: object) -> list[float]:
        return [count_calls(own[0], soon(), WINDOW_SECONDS) / WINDOW_SECONDS]

    return [
        _threads_arm(ONE, own[:1]),
        _threads_arm(f"{OURS}, {THREADS} threads", own),
        _threads_arm(_one_producer(), [shared] * THREADS),
        Arm(f"{OURS}, the main thread", in_the_main_thread, durability=POWER),
    ]


def _lmdb_threads(stores: Stores) -> list[Arm]:
    lmdb, value = stores.enter_context(closing(Lmdb(stores.path("lmdb-threads")))), messages(1)[0]
    writers = [partial(lmdb.writer(number), value) for number in range(THREADS)]
    return [
        _threads_arm(f"{LMDB}, 1 thread", writers[:1], rival=True),
        _threads_arm(f"{LMDB}, {THREADS} threads", writers, rival=True),
    ]


def _raw_threads(stores: Stores) -> list[Arm]:
    """Each its own file."""
    appends = []
    for number in range(THREADS):
        raw = stores.enter_context(closing(RawFile(stores.path(f"raw-{number}"), 8 << 20)))
        appends.append(partial(raw.append, messages(1)[0]))
    return [
        _threads_arm(f"{RAW}, 1 thread", appends[:1], rival=True),
        _threads_arm(f"{RAW}, {THREADS} threads", appends, rival=True),
    ]


# ---- processes ---------------------------------------------------------------------------


def _process_arms(stores: Stores, make: Callable[..., Worker]) -> list[Arm]:
    everybody = [make(stores.path("processes"), f"writer-{i}") for i in range(PROCESSES)]
    for number, worker in enumerate(everybody):
        worker.call(keep_send, "own", f"topic-{number}")
        worker.call(keep_send, "shared", "shared")
        worker.call(keep_lmdb, LMDB, stores.path("lmdb-processes"), number)
        worker.call(keep_raw, RAW, stores.path(f"raw-process-{number}"))
    return [
        _processes_arm(f"{OURS}, 1 process", everybody[:1], "own"),
        _processes_arm(f"{OURS}, {PROCESSES} processes", everybody, "own"),
        _processes_arm(_one_topic(), everybody, "shared"),
        _processes_arm(f"{LMDB}, {PROCESSES} processes", everybody, LMDB, rival=True),
        _processes_arm(f"{RAW}, {PROCESSES} processes", everybody, RAW, rival=True),
    ]


def _processes_arm(name: str, workers: Sequence[Worker], kept: str, rival: bool = False) -> Arm:
    def work(_: object) -> list[float]:
        return sum_of_processes(workers, kept, WINDOW_SECONDS)

    return Arm(name, work, durability=POWER, rival=rival)


# ---- the bound ---------------------------------------------------------------------------


def _bound_arms(stores: Stores) -> list[Arm]:
    program, file = build("shared_flush", stores), stores.path("shared_flush.log")
    counts = {
        "1 thread": (1, 1),
        f"{THREADS} threads": (1, THREADS),
        f"{PROCESSES} processes": (PROCESSES, 1),
    }
    return [
        Arm(
            f"{BOUND}, {how}",
            partial(_run_bound, program, file, *count),
            durability=POWER,
            rival=True,
        )
        for how, count in counts.items()
    ]


def _run_bound(program: str, file: str, processes: int, threads: int, _: object) -> list[float]:
    command = [program, file, str(processes), str(threads), str(WINDOW_SECONDS)]
    done = subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True, text=True)
    return [float(done.stdout)]
