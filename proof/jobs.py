"""Work that is done in processes of their own, job by job: what may crash, hang, or must fork
before any engine is opened."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import exclusivelog as xl
from testing.children import child, line, tell

SERVES = "import sys; from proof.jobs import serve; serve(sys.argv[1])"
LANES = 2


def serve(name: str) -> None:
    """Call `module:function` with each line of input, a list, and print what it gives."""
    module, _, function = name.partition(":")
    work = getattr(importlib.import_module(module), function)
    warm_up()
    for job in sys.stdin:
        print(json.dumps(work(*json.loads(job))), flush=True)


def warm_up() -> None:
    """Open a ledger and close it again: a forked child inherits what is imported and
    compiled at the first time."""
    with tempfile.TemporaryDirectory(prefix="warm-") as where:
        with xl.open(Path(where) / "log") as engine, engine.topic("t").producer() as producer:
            producer.send(b"1")
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every object there is


def spread(
    name: str, jobs: Iterable[Sequence[Any]], seconds: float, lanes: int = LANES
) -> Iterator[Any]:
    """What `module:function` gives for each of the jobs, which so many processes share. Each has
    so many seconds for one job."""
    every = list(jobs)
    todo, lanes = iter(every), min(lanes, len(every))

    def work(lane: int) -> list[Any]:
        with child(SERVES, name) as process:
            done = []
            for job in todo_safely(todo):
                tell(process, json.dumps(job))
                done.append(json.loads(line(process, seconds)))
            return done

    with ThreadPoolExecutor(max(1, lanes)) as pool:
        for done in pool.map(work, range(lanes)):
            yield from done


_taking = threading.Lock()


def todo_safely(items: Iterator[Any]) -> Iterator[Any]:
    """The same items, for several threads."""
    while True:
        with _taking:
            item = next(items, None)
        if item is None:
            return
        yield item
