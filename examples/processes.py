"""Helpers of the examples: start and end processes, wait with a timeout, print a verdict.

Nothing here is about the log; read one of the examples first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from multiprocessing.context import SpawnProcess
from typing import NoReturn

import exclusivelog as xl

# Seconds: the timeout of every wait. The tests have more, on a machine that is busy.
PATIENCE = float(os.environ.get("EXCLUSIVELOG_EXAMPLE_PATIENCE", "30"))

Start = Callable[..., SpawnProcess]
_spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def processes() -> Generator[Start]:
    """Yield `start(name, function, *args)`; at the end, kill and join every process it started."""
    started: list[SpawnProcess] = []

    def start(name: str, function: Callable[..., object], *args: object) -> SpawnProcess:
        process = _spawn.Process(target=_live, args=(function, *args), name=name, daemon=True)
        # A terminal sends Ctrl-C to all processes. Only the parent handles it, and ends the others.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
            started.append(process)
        finally:
            signal.signal(signal.SIGINT, before)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()  # SIGKILL: it ends a stopped process, too
        for process in started:
            process.join(PATIENCE)


def _live(function: Callable[..., object], *args: object) -> None:
    """Run `function` in a child process, which exits as soon as its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    function(*args)


@contextlib.contextmanager
def directory(path: str | None) -> Generator[str]:
    """Yield that directory, or a temporary one."""
    if path is not None:
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="exclusivelog-example-") as temporary:
            yield temporary


def until(what: str, condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait until the condition holds; TimeoutError if that takes too long."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {patience:g} s: {what}")
        time.sleep(0.005)


def never_interleaved(messages: Iterable[xl.Message]) -> bool:
    """Do the epochs never decrease, and has each epoch only one writer?"""
    last, writers = 0, dict[int, int]()
    for message in messages:
        writer = writers.setdefault(message.epoch, message.session)
        if message.epoch < last or message.session != writer:
            return False
        last = message.epoch
    return True


def verdict(findings: Mapping[str, bool]) -> int:
    """Print each claim and whether it holds; return the exit status."""
    for claim, holds in findings.items():
        print("ok    " if holds else "FAILED", claim)
    return 0 if all(findings.values()) else 1


def run(main: Callable[[], int]) -> NoReturn:
    """Run a script and exit: with its status, with 1 after an error, with 130 after Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (TimeoutError, xl.ExclusiveLogError) as error:
        sys.exit(f"FAILED {error}")
