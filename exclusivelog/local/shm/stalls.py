"""Stalled processes that hold the writer lock, and so hold up all others.

A thread holds the writer lock for microseconds at an append, and for about a millisecond at a
change of the tables; the kernel frees the lock when the thread dies. But a process that is
*stopped* there (SIGSTOP, a debugger, a frozen container) keeps out all others: no process can take
a lock from a thread that may go on at any time. `StallWatch` logs which process it is.

With `kill_stalled=True`, it is killed once it has been silent for longer than its own `keepalive`
(rule C3); so is a process that is stopped inside a read (see storage/pinned.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.local.files import read_whole
from exclusivelog.local.shm.slots import Slots, is_stopped
from exclusivelog.types import EngineInfo

log = logging.getLogger("exclusivelog")


def process_of(thread: int) -> int | None:
    """The id of the process that a thread belongs to; None if it has ended, or is hidden from this
    process."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = read_whole(f"/proc/{thread}/status").splitlines()
        return int(next(line for line in status if line.startswith(b"Tgid:")).split()[1])
    return None


class StallWatch:
    """Logs each process that holds others up once, and kills it where `kill_stalled` allows that.

    `killers` counts the engines of this process that were opened with `kill_stalled`.
    """

    def __init__(self, path: str, slots: Slots, journal: _core.Journal, killers: int) -> None:
        self.killers = killers
        self._path = path
        self._slots = slots
        self._journal = journal  # it drops its reference to this watch when it is closed
        self._reported = (0, 0, 0)

    def stalled(self, thread: int) -> None:
        """Called when this process has waited for this thread for half a second."""
        # The thread may itself wait for another one, which is stopped.
        inside = [other for other in self._inside() if other]
        thread = next(filter(is_stopped, inside), thread)
        self._report(thread)
        if self.killers:
            for suspect in {thread, *inside}:
                self._kill_if_inside(suspect)

    def _inside(self) -> tuple[int, int]:
        threads: tuple[int, int] = self._journal.inside
        return threads

    def _report(self, thread: int) -> None:
        # Each of these changes if the thread goes on.
        appends = self._inside()[0] == thread
        stall = thread, self._journal.version, self._journal.tail if appends else 0
        if stall == self._reported:
            return
        self._reported = stall
        pid = process_of(thread)
        engines = [] if pid is None else [each for _, each in self._slots.in_process(pid)]
        log.warning(
            "%s: waited half a second for the writer lock, held by %s. If that process is "
            "stopped, all writers wait until it is continued or killed",
            self._path, ", ".join(map(describe, engines)) or f"thread {thread}",
        )  # fmt: skip

    def _kill_if_inside(self, thread: int) -> None:
        pid = process_of(thread)
        if pid is not None:
            # While the thread still holds the lock, it lives: its id was not given to another.
            self.kill_if_stalled(
                pid, lambda: thread in self._inside() and process_of(thread) == pid,
                "while it holds the writer lock",
            )  # fmt: skip

    def kill_if_stalled(self, pid: int, holds: Callable[[], bool], where: str) -> None:
        """Kill another process if `kill_stalled` allows it, and all engines of that process have
        been silent for longer than their keepalive. `holds()`: does it still hold others up,
        `where` the log says?"""
        if self.killers and pid != os.getpid():
            engines = list(self._slots.in_process(pid))
            if self._all_stalled(engines):
                self._kill(pid, holds, where, [engine for _, engine in engines])

    def _all_stalled(self, engines: list[tuple[int, EngineInfo]]) -> bool:
        alive = self._slots.alive
        return bool(engines) and not any(alive(slot, engine.id) for slot, engine in engines)

    def _kill(
        self, pid: int, holds: Callable[[], bool], where: str, engines: list[EngineInfo]
    ) -> None:
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return  # it has ended
        try:
            # Check again: this process may have been stopped itself since, and that one gone on.
            if holds() and self._all_stalled(list(self._slots.in_process(pid))):
                log.error(
                    "%s: killing %s, silent for longer than its keepalive %s",
                    self._path, ", ".join(map(describe, engines)), where,
                )  # fmt: skip
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError as error:
            log.warning("%s: process %d cannot be killed: %s", self._path, pid, error)
        finally:
            os.close(process)

    def inside(self) -> EngineInfo | None:
        """The engine that appends or holds the writer lock at this moment; None if none does."""
        for thread in self._inside():
            pid = process_of(thread) if thread else None
            for _, engine in () if pid is None else self._slots.in_process(pid):
                return engine
        return None


def describe(engine: EngineInfo) -> str:
    """An engine and how long it has been silent, for a message."""
    return (
        f"engine {engine.name!r} (id {engine.id}, pid {engine.pid}), silent for "
        f"{engine.heartbeat_age:.1f} s"
    )
