"""Who has a ledger open: told by the kernel, not by what stands in shared memory.

An engine's process holds open-file locks of `journal`, `data.mdb` and `owners.lock` as long as it
has the ledger open, shared with all others that do. The process that gets all of them exclusively
is alone, so that whatever the lock file says is of a life that is over: it makes the words anew
and recovers the journal (rule H3). The process that does not get them joins engines that live, and
never changes what they believe.

Three files, because one of them may have been replaced under an engine that lives. The kernel drops
the locks when the last process that has these descriptors closes them, or dies; no other program's
`flock` is in their way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from exclusivelog.errors import LedgerError
from exclusivelog.files import Directory, is_locked, lock_open_file

FILES = ("journal", "data.mdb", "owners.lock")
ATTEMPT_SECONDS = 1.0  # a process that dies right now still has its locks for a moment


class Presence:
    """This process's locks on a ledger. Make it while the lock file is locked for opening."""

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
        """Give the locks back. In a forked child: keep none of the parent's. A second time does
        nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def enter(self) -> None:
        """Find out whether this process is alone, and keep all others from being it."""
        end = time.monotonic() + ATTEMPT_SECONDS
        # A process that was alone and dies right now gives its locks back one after the other:
        # both attempts may fail for a moment, and then this one is alone.
        while not (self._take_alone() or self._lock("read")):
            if time.monotonic() > end:
                raise self._opened_elsewhere()
            time.sleep(0.002)
        self._show_earlier_versions()

    def _show_earlier_versions(self) -> None:
        # A version before lock-file version 4 removes the lock file of a later one unless somebody
        # holds a `flock` of the journal. Nothing else depends on this lock.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fds[0], fcntl.LOCK_SH | fcntl.LOCK_NB)

    def admit_others(self) -> None:
        """The words are as the files are: others may join."""
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
            f"{self._path} is being opened by another process by way of another lock file; was "
            "owners.lock replaced? Close every engine, then open it"
        )


def writers_live(journal: int) -> bool:
    """Does an engine that writes have the journal open? `journal` is a descriptor of it."""
    return is_locked(journal)
