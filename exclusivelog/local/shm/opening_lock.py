"""The lock for opening: a `flock` of the lock file, which a process of any version holds while it
opens a ledger or joins it (rule H3).

A process that is stopped meanwhile keeps all others from opening. Such a wait ends with an error,
and names that process before (rule K3).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import random
import time
from collections.abc import Callable

from exclusivelog import logs
from exclusivelog.errors import LedgerError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.local.shm import tasks
from exclusivelog.waits import Waited

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between two looks at the holder
# One that is not stopped is logged after so long: to recover a ledger takes seconds.
LASTING_SECONDS = 5.0


class OpeningWait:
    """A wait for the lock of the open file `fd`, whose path is `path`.

    `describe(pid)`: the engines of a process, if it has any; `progress()`: a number that changes
    whenever a process has got the lock.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        describe: Callable[[int], str] = lambda _: "",
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self._fd = fd
        self._path = path
        self._describe = describe
        self._progress = progress
        self._reported = False

    def take(self, seconds: float) -> bool:
        """Take the lock. False if no process has got it for so many seconds, in which this process
        was not paused."""
        seen, waited, look, pause = -1, Waited(), 0.0, 0.001
        while not self._try():
            # Hundreds of processes may wait: begin anew whenever one has opened the ledger.
            if (progress := self._progress()) != seen:
                seen, waited, look = progress, Waited(), LOOK_SECONDS
            if (now := waited.seconds) > seconds:
                return False
            if now > look:
                look = now + LOOK_SECONDS
                self._report(now)
            # Back off: many polling processes would take the CPU from the one that opens.
            pause = min(1.2 * pause, 0.2)
            time.sleep(random.uniform(0.5, 1.0) * pause)
        return True

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pass_on_foreign(error)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise LedgerError(f"{self._path} cannot be locked: {error.strerror}") from error
            return False
        return True

    def _report(self, seconds: float) -> None:
        """Log the holder, once."""
        pid = None if self._reported else tasks.flock_holder(self._fd)
        if pid is not None and (tasks.is_stopped(pid) or seconds >= LASTING_SECONDS):
            self._reported = True
            logs.emit(
                log,
                logs.SLOW_OPENING,
                ledger=self._path,
                pid=pid,
                holder=self._name(pid),
                doing=tasks.DOING[tasks.state_of(pid)],
            )

    def _name(self, pid: int) -> str:
        return self._describe(pid) or tasks.name_of(pid)

    def holder(self) -> str:
        """The process that holds the lock and what to do about it, for an error."""
        pid = tasks.flock_holder(self._fd)
        if pid is None:
            return (
                "another process. If it is stopped while it opens the ledger, resume or end it; "
                f"`fuser -v {self._path}` lists the processes that have the file open"
            )
        return f"{self._name(pid)}, which {tasks.DOING[tasks.state_of(pid)]}"
