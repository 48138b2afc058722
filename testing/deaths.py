"""Deaths of which the kernel's robust lists do not tell, and the locks that such processes hold.

`forget_robust_lists` empties the lists of all threads of this process, as if its memory was freed
before it ended: process_mrelease(2) and the kernel's OOM reaper do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import signal
from pathlib import Path

import exclusivelog as xl
from exclusivelog.local.files import LOCK
from exclusivelog.local.shm.lockfile import JOURNAL_OFFSET
from testing.processes import State

GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}.get(platform.machine())
PROCESS_MRELEASE = 448
MUTEX_ROOM = 64  # of each of the journal's mutexes
LMDB_READERS = 8  # in lock.mdb
APPEND, FLUSH, WRITER, READERS, TABLES = LOCKS = ("append", "flush", "writer", "readers", "tables")
libc = ctypes.CDLL(None, use_errno=True)


def forget_robust_lists() -> None:
    """The kernel finds nothing in the robust lists of this process's threads."""
    for thread in os.listdir("/proc/self/task"):
        head, size = ctypes.c_size_t(), ctypes.c_size_t()
        if libc.syscall(GET_ROBUST_LIST, int(thread), ctypes.byref(head), ctypes.byref(size)):
            raise OSError(ctypes.get_errno(), "get_robust_list")
        if head.value:
            ctypes.c_size_t.from_address(head.value).value = head.value  # an empty ring
            ctypes.c_size_t.from_address(head.value + 16).value = 0  # nothing under way


def die_unreported(state: State, lock: str | None) -> None:
    """End this process, inside a lock, and without a word to the kernel."""
    if lock is not None:
        hold(state.engine, lock)
    forget_robust_lists()
    os.kill(os.getpid(), signal.SIGKILL)


def hold(engine: xl.Engine, lock: str) -> None:
    """Take one of `LOCKS`, in this thread."""
    failed = libc.pthread_mutex_lock(ctypes.c_void_p(address_of(engine, lock)))
    if failed:
        raise OSError(failed, os.strerror(failed))


def address_of(engine: xl.Engine, lock: str) -> int:
    """Where a mutex is in this process."""
    ledger = engine.ledger
    if lock in (APPEND, FLUSH, WRITER):
        at = JOURNAL_OFFSET + MUTEX_ROOM * LOCKS.index(lock)
        return ctypes.addressof(ctypes.c_char.from_buffer(ledger.lockfile.slots.memory, at))
    # It is never unmapped, nor its descriptor closed: that would drop LMDB's locks.
    file = os.open(Path(engine.path) / LOCK, os.O_RDWR)
    page = _pages.setdefault(engine.path, mmap.mmap(file, mmap.PAGESIZE))
    writers = LMDB_READERS + ctypes.sizeof(ctypes.c_char * _mutex_size()) + 16
    at = LMDB_READERS if lock == READERS else -(-writers // 64) * 64
    return ctypes.addressof(ctypes.c_char.from_buffer(page, at))


_pages: dict[str, mmap.mmap] = {}


def _mutex_size() -> int:
    return 48 if platform.machine() == "aarch64" else 40


def reap_early(pid: int) -> bool:
    """SIGKILL, and free the memory before the process has ended. False if it was too late."""
    process = os.pidfd_open(pid)
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return libc.syscall(PROCESS_MRELEASE, process, 0) == 0
    finally:
        os.close(process)
