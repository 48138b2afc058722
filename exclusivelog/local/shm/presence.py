"""Which processes have a ledger open: the kernel's locks say so, not shared memory.

A process holds shared open-file locks of `journal`, `data.mdb` and `owners.lock` while it has the
ledger open. A process that gets all of them exclusively is alone: what the lock file says is out
of date, so this process initialises it and recovers the journal (rule H3). A process that does not
get them joins live engines, and leaves the shared memory as it is.

There are three files because one may have been replaced while an engine had it open. The kernel
drops the locks when the last process with these descriptors closes them, or dies. They do not
conflict with any program's `flock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from exclusivelog.errors import LedgerError
from exclusivelog.local.files import (
    DATA,
    JOURNAL,
    OWNERS,
    Directory,
    is_locked,
    lock_open_file,
)

FILES = (JOURNAL, DATA, OWNERS)
ATTEMPT_SECONDS = 1.0  # a dying process keeps its locks for a moment


class Presence:
    """This process's locks on a ledger. Create it while the lock file is locked for opening."""

    def __init__(self, directory: Directory) -> None:
        self._path = directory.path
        self._fds: list[int] = []
        self.alone = False
        try:
            for name in FILES:
                self._fds.append(directory.open(name, os.O_RDWR))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the locks; in a forked child, close the parent's descriptors. A second call does
        nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def enter(self) -> None:
        """Find out whether this process is alone, and keep every other process from being alone."""
        end = time.monotonic() + ATTEMPT_SECONDS
        # A dying process that was alone releases its locks one after the other: both attempts may
        # fail for a moment, and then this process is alone.
        while not (self._take_alone() or self._lock("read")):
            if time.monotonic() > end:
                raise self._opened_elsewhere()
            time.sleep(0.002)
        self._show_earlier_versions()

    def _show_earlier_versions(self) -> None:
        # Versions before lock-file version 4 remove the lock file of a later one unless a process
        # holds a `flock` of the journal. Nothing else depends on this lock.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fds[0], fcntl.LOCK_SH | fcntl.LOCK_NB)

    def admit_others(self) -> None:
        """Recovery is complete: let other processes join."""
        if self.alone:
            self.alone = False
            if not self._lock("read"):
                raise self._opened_elsewhere()

    def _take_alone(self) -> bool:
        self.alone = self._lock("write")
        return self.alone

    def _lock(self, kind: str) -> bool:
        return all(lock_open_file(fd, kind) for fd in self._fds)

    def _opened_elsewhere(self) -> LedgerError:
        return LedgerError(
            f"{self._path} is being opened by another process with another lock file; was "
            "owners.lock replaced? Close every engine, then open it"
        )


def writers_live(journal: int) -> bool:
    """Does an engine have the ledger open to write? `journal` is a descriptor of the journal."""
    return is_locked(journal)
