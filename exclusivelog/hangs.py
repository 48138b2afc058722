"""Who holds everybody up: a thread that is stopped inside the ledger's critical section.

The section is short, microseconds for an append and about a millisecond for a change of the
tables, and whoever dies in it holds nobody up. But a process that is *stopped* there (SIGSTOP,
a debugger, a frozen container) keeps all others out until it goes on or dies: nobody can take
a lock away from a thread without risking that it goes on in the middle. Those who wait say in
the log whom they wait for; and with `kill_hung=True` they end a process that has been silent
for longer than its own `keepalive` (rule C3), which frees the lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from exclusivelog import _core
from exclusivelog.lockfile import LockFile, is_stopped
from exclusivelog.types import EngineInfo

log = logging.getLogger("exclusivelog")


def process_of(thread: int) -> int | None:
    """The id of the process that a thread belongs to; None if it is gone, or not to be seen."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path(f"/proc/{thread}/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("Tgid:")).split()[1])
    return None


class Watch:
    """Reports those who hold others up, each once, and ends them if it may.

    `killers` counts the engines of this process that were opened with `kill_hung`.
    """

    def __init__(self, path: str, lockfile: LockFile, journal: _core.Journal, killers: int) -> None:
        self.killers = killers
        self._path = path
        self._lockfile = lockfile
        self._journal = journal  # which lets go of us when it is closed
        self._reported = (0, 0, 0)

    def stalled(self, thread: int) -> None:
        """Half a second has been waited for this thread."""
        # It may itself wait for another one, which is stopped.
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
        # Had it gone on meanwhile, one of these would have changed.
        appends = self._inside()[0] == thread
        stall = thread, self._journal.version, self._journal.tail if appends else 0
        if stall == self._reported:
            return
        self._reported = stall
        pid = process_of(thread)
        engines = [] if pid is None else [each for _, each in self._lockfile.in_process(pid)]
        log.warning(
            "%s: half a second has been waited for the ledger; inside is %s. Where it is "
            "stopped, nothing goes on until it is continued or killed",
            self._path, ", ".join(map(describe, engines)) or f"thread {thread}",
        )  # fmt: skip

    def _kill_if_inside(self, thread: int) -> None:
        pid = process_of(thread)
        if pid is not None:
            # What still holds the lock, under its old id, has not died: it is that process.
            self.kill_if_hung(
                pid, lambda: thread in self._inside() and process_of(thread) == pid,
                "inside the ledger",
            )  # fmt: skip

    def kill_if_hung(self, pid: int, holds: Callable[[], bool], where: str) -> None:
        """End another process, if this one may, all engines of which have been silent for longer
        than their keepalive. `holds()`: does it still hold others up, `where` it does?"""
        if self.killers and pid != os.getpid():
            engines = list(self._lockfile.in_process(pid))
            if self._all_hung(engines):
                self._kill(pid, holds, where, [engine for _, engine in engines])

    def _all_hung(self, engines: list[tuple[int, EngineInfo]]) -> bool:
        alive = self._lockfile.alive
        return bool(engines) and not any(alive(slot, engine.id) for slot, engine in engines)

    def _kill(
        self, pid: int, holds: Callable[[], bool], where: str, engines: list[EngineInfo]
    ) -> None:
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return  # it is gone
        try:
            # Who asks may have stood still himself meanwhile, and it may have gone on.
            if holds() and self._all_hung(list(self._lockfile.in_process(pid))):
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
        """Who is in the critical section at this moment."""
        for thread in self._inside():
            pid = process_of(thread) if thread else None
            for _, engine in () if pid is None else self._lockfile.in_process(pid):
                return engine
        return None


def describe(engine: EngineInfo) -> str:
    """An engine, for people, and how long it has been silent."""
    return (
        f"engine {engine.name!r} (id {engine.id}, pid {engine.pid}), silent for "
        f"{engine.heartbeat_age:.1f} s"
    )
