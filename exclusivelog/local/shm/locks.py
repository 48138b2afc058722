"""Locks of a ledger that last: whose thread has ended, or makes no progress (rule C8)."""

from __future__ import annotations

import time
from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.backend import LastingLock
from exclusivelog.local.shm.lockfile import LockFile
from exclusivelog.local.shm.slots import StallWatch
from exclusivelog.local.shm.tasks import is_stopped

# As `DeathWatch.held` lists them.
APPENDS, FLUSHES, WRITERS, READERS, TABLES = LOCKS = (
    "the append lock",
    "the flush lock",
    "the writer lock",
    "LMDB's lock of readers",
    "LMDB's lock of writers",
)
OPENING = "the lock for opening"
LASTING_SECONDS = 1.2  # an engine takes a dead thread's lock sooner
LOOK_SECONDS = 0.02


def lock_of_readers(deaths: _core.DeathWatch) -> int:
    """The thread that holds LMDB's lock of readers; 0 for none."""
    thread: int = deaths.held()[LOCKS.index(READERS)]
    return thread


def lasting_locks(
    deaths: _core.DeathWatch,
    journal: _core.Journal,
    watch: StallWatch,
    lockfile: LockFile,
    commits: Callable[[], int],
) -> list[LastingLock]:
    """Look at the locks repeatedly, until each was free once, or changed something. `commits`: the
    number of the last transaction of the tables."""

    def progress(lock: str, thread: int) -> tuple[int, ...]:
        """What changes if the holder, or another one after it, makes progress."""
        moved = {
            APPENDS: (journal.tail, journal.version),
            FLUSHES: (journal.synced,),
            WRITERS: (commits(),),
            TABLES: (commits(),),
        }
        return thread, *moved.get(lock, ())

    def look() -> dict[str, tuple[int, ...]]:
        held = {**dict(zip(LOCKS, deaths.held(), strict=True)), OPENING: lockfile.opener() or 0}
        return {lock: progress(lock, thread) for lock, thread in held.items() if thread}

    began = _core.monotonic()
    lasting = look()
    while lasting and _core.monotonic() - began < LASTING_SECONDS:
        time.sleep(LOOK_SECONDS)
        now = look()
        lasting = {lock: seen for lock, seen in lasting.items() if now.get(lock) == seen}
    seconds = _core.monotonic() - began
    # Once for each thread: the text says for how long it has been silent, to a tenth of a second.
    holders = {thread: watch.describe(thread) for thread, *_ in lasting.values()}
    return [
        LastingLock(lock, holders[thread], seconds, _core.has_ended(thread), is_stopped(thread))
        for lock, (thread, *_) in lasting.items()
    ]
