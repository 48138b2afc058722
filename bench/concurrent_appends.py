"""Concurrent appends by threads and by processes, for P5 and P15.

All of them start at the same time of the monotonic clock, and run for a fixed time. A worker
process stores each append function under a name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import exclusivelog as xl
from bench.append import messages
from bench.measure import in_thread
from bench.peers import Lmdb, RawFile
from testing.processes import State, Worker

HEAD_START_SECONDS = 0.05  # until everybody has heard of the start
PATIENCE = 60.0

Append = Callable[[], object]


# ---- in one process ----------------------------------------------------------------------


def soon() -> float:
    """A moment to start at, on the clock that all processes share."""
    return time.monotonic() + HEAD_START_SECONDS


def count_calls(append: Append, start: float, seconds: float) -> int:
    """The number of calls that ended within `seconds` from `start` on."""
    clock, end, count = time.monotonic, start + seconds, 0
    time.sleep(max(0.0, start - clock()))
    append()
    while clock() < end:
        count += 1
        append()
    return count


def sum_of_threads(appends: Sequence[Append], seconds: float) -> list[float]:
    """Calls per second of all of them together, each in a thread of its own."""
    start = soon()
    with ThreadPoolExecutor(len(appends)) as executor:
        counts = [executor.submit(count_calls, append, start, seconds) for append in appends]
        return [sum(count.result(PATIENCE) for count in counts) / seconds]


# ---- in workers --------------------------------------------------------------------------


def sum_of_processes(workers: Sequence[Worker], name: str, seconds: float) -> list[float]:
    """Calls per second of all of them together, each in a process of its own."""
    start = soon()
    for worker in workers:
        worker.start(count_in_worker, name, start, seconds)
    return [sum(worker.answer(PATIENCE) for worker in workers) / seconds]


def count_in_worker(state: State, name: str, start: float, seconds: float) -> int:
    # Not in the main thread, as with threads: else two things would differ.
    count: int = in_thread(partial(count_calls, state.kept[name], start, seconds))
    return count


def keep_send(state: State, name: str, topic: str, path: str | None = None, **options: Any) -> None:
    """Store a producer's send, by this worker's engine or by one on another ledger."""
    engine = state.engine
    if path is not None:  # closed when the worker exits
        engine = xl.open(path, name=state.engine.name, **options)
    state.kept[name] = partial(engine.topic(topic).producer().send, messages(1)[0])


def keep_lmdb(state: State, name: str, path: str, number: int, sync: bool = True) -> None:
    """Store an append to an LMDB environment that several processes write to."""
    append = Lmdb(path, sync).writer(number)
    state.kept[name] = partial(append, messages(1)[0])


def keep_raw(state: State, name: str, path: str) -> None:
    """Store an append to a preallocated file that only this process has."""
    Path(path).parent.mkdir(exist_ok=True)
    state.kept[name] = partial(RawFile(path, 8 << 20).append, messages(1)[0])
