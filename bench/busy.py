"""The effect of a busy Python thread beside a writer on the appends of other processes (P15)."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, replace

from bench.concurrent_appends import (
    HEAD_START_SECONDS,
    PATIENCE,
    Append,
    count_in_worker,
    keep_lmdb,
    keep_send,
    soon,
)
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Row,
    Series,
    Settings,
    Stores,
    Target,
    consecutive,
    in_thread,
    latencies,
    take_turns,
)
from testing.processes import State, Worker, workers

CLOSED_SECONDS, PACED_SECONDS, PAUSE_SECONDS = 0.5, 0.7, 0.0005
MOST_CALLS = 1_000_000
PERCENTILE = 0.99
LONG_SECONDS = 1e-3  # appends that took longer than any of these should
OURS = {"send, process": PROCESS, "send, power": POWER}
LMDB = {"py-lmdb, sync=False": "not flushed; a power loss may destroy it", "py-lmdb": POWER}
KINDS = {**OURS, **LMDB}


@dataclass(frozen=True)
class Window:
    """The measurements of one process in one round. `p99` is that of appends without pauses. If
    thousands of quick appends fit between two long ones, it does not show the long ones. So `paced`
    is the p99 of occasional appends, and `long` the share of the time spent in long appends."""

    p99: float
    paced: float
    longest: float
    long: float
    beside: float = 0.0  # what the other process appended in a second


Windows = dict[str, list[Window]]


def p15(settings: Settings) -> Figure:
    """The p99 of one process's appends while another one appends too, with and without a
    thread of pure Python beside its writer."""
    figure = Figure("P15", "append of 100 B beside another process's writer, p99 of each round")
    windows: Windows = {}
    with Stores(settings) as stores, workers() as make:
        # The engines they come with stay idle: each kind has a ledger of its own.
        there, here = (make(stores.path("idle"), name) for name in ("there", "here"))
        for number, worker in enumerate((there, here)):
            _prepare(stores, worker, number)
        results = take_turns(
            [_arm(there, here, kind, busy, windows) for kind in KINDS for busy in (False, True)],
            settings.rounds_or(5),
        )
    paced = {
        name: replace(one, name=f"{name}, now and then", samples=[w.paced for w in windows[name]])
        for name, one in results.items()
    }
    figure.series = [*results.values(), *paced.values()]
    _judge(figure, results, "without a pause")
    _judge(figure, paced, f"one every {PAUSE_SECONDS * 1e3:g} ms")
    for kind in KINDS:
        _tell_the_rest(figure, kind, windows)
    return figure


def _prepare(stores: Stores, worker: Worker, number: int) -> None:
    """All stores that this process appends to."""
    for kind in OURS:
        durability = kind.rpartition(" ")[2]
        worker.call(
            keep_send, kind, f"topic-{number}", stores.path(durability), durability=durability
        )
    for kind in LMDB:
        worker.call(keep_lmdb, kind, stores.path(kind), number, sync=kind == "py-lmdb")


def _judge(figure: Figure, results: dict[str, Series], how: str) -> None:
    for kind in KINDS:
        busy, calm = results[arm_name(kind, True)], results[arm_name(kind, False)]
        target = Target(most_ratio=2) if kind in OURS else None
        what = f"{kind}, {how}: p99 beside a writer with a busy thread"
        figure.compare(what, busy, calm, target)
    for ours, theirs in zip(OURS, LMDB, strict=True):
        for which in (True, False):
            name, peer = arm_name(ours, which), results[arm_name(theirs, which)]
            figure.compare(f"{name}, {how}: p99", results[name], peer)


def _tell_the_rest(figure: Figure, kind: str, windows: Windows) -> None:
    calm, busy = (windows[arm_name(kind, which)] for which in (False, True))
    name = arm_name(kind, False)
    longest = [max(window.longest for window in which) for which in (busy, calm)]
    long = [100 * statistics.mean(window.long for window in which) for which in (busy, calm)]
    beside = [statistics.median(window.beside for window in which) for which in (busy, calm)]
    for what, (ours, peer), unit in (
        ("the longest of all", longest, "s"),
        (f"share of the time in appends over {LONG_SECONDS * 1e3:g} ms", long, "%"),
        ("rate of the other process", beside, "/s"),
    ):
        figure.rows.append(Row(f"{kind}: {what}", ours, unit, peer, name))


def arm_name(kind: str, busy: bool) -> str:
    return f"{kind}, {'a busy thread beside the writer' if busy else 'the writer alone'}"


def _arm(there: Worker, here: Worker, kind: str, busy: bool, windows: Windows) -> Arm:
    name = arm_name(kind, busy)
    kept = windows[name] = []
    # It begins before, and ends after, the one that is measured.
    around = CLOSED_SECONDS + PACED_SECONDS + 2 * HEAD_START_SECONDS

    def work(_: object) -> list[float]:
        start = soon()
        there.start(append_beside, kind, busy, start, around)
        here.start(watch, kind, start + HEAD_START_SECONDS, CLOSED_SECONDS, PACED_SECONDS)
        window: Window = here.answer(PATIENCE)
        count = there.answer(PATIENCE)
        if not count:
            raise RuntimeError(f"{name}: the other process has not appended anything")
        kept.append(replace(window, beside=count / around))
        return [window.p99]

    return Arm(name, work, unit="s", durability=KINDS[kind], rival=kind in LMDB)


# ---- in the workers ----------------------------------------------------------------------


def append_beside(state: State, kind: str, busy: bool, start: float, seconds: float) -> int:
    """Append without pauses in one thread, while another one, if `busy`, runs pure Python. Returns
    the number of appends."""
    stop = threading.Event()
    spinner = threading.Thread(target=spin, args=(stop,))
    if busy:
        spinner.start()
    try:
        return count_in_worker(state, kind, start, seconds)
    finally:
        stop.set()
        if busy:
            spinner.join(PATIENCE)


def spin(stop: threading.Event) -> int:
    """Pure Python, which releases the GIL only when it must."""
    count = 0
    while not stop.is_set():
        for _ in range(1_000):
            count += 1
    return count


def watch(state: State, kind: str, start: float, closed: float, paced: float) -> Window:
    """Append without pauses, then occasionally, for so many seconds each."""
    time.sleep(max(0.0, start - time.monotonic()))
    append = state.kept[kind]
    samples, sparse = in_thread(
        lambda: (consecutive(append, MOST_CALLS, closed), now_and_then(append, paced))
    )
    long = sum(sample for sample in samples if sample > LONG_SECONDS)
    return Window(
        Series(kind, "s", samples).percentile(PERCENTILE),
        Series(kind, "s", sparse).percentile(PERCENTILE),
        max(*samples, *sparse),
        long / sum(samples),
    )


def now_and_then(append: Append, seconds: float) -> list[float]:
    samples, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
        samples += latencies(append, 1)
    return samples
