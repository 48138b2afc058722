"""How soon after SIGKILL a death can be detected, by two kinds of lock that the kernel releases.

`python -m bench.liveness` kills processes that hold both an OFD lock on a file and a word on
the kernel's robust list, small ones and ones with 1 GiB of memory, and prints how long after
the kill each lock was free. Because of the result, the lock file uses the robust list.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from exclusivelog import _core

F_OFD_SETLK, F_OFD_SETLKW = 37, 38
LOCK = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
ROUNDS = 15

HOLDER = """
import fcntl, mmap, os, sys
from bench.liveness import F_OFD_SETLK, LOCK
from exclusivelog import _core
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, F_OFD_SETLK, LOCK)
words = _core.SharedWords(mmap.mmap(fd, 4096))
hold = _core.Hold(words, 0, 8, 4)
ballast = bytearray(int(sys.argv[2])) or None
if ballast:
    ballast[::4096] = b"x" * len(ballast[::4096])
print("held", flush=True)
sys.stdin.read()
"""


def one_death(ballast: int) -> dict[str, float]:
    """Seconds from SIGKILL until each kind of lock is free."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4096)
        words = _core.SharedWords(mmap.mmap(file.fileno(), 4096))
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, file.name, str(ballast)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        freed: dict[str, float] = {}
        watchers = [
            threading.Thread(target=_watch, args=("OFD lock", freed, lambda: _lock(file.name))),
            threading.Thread(target=_watch, args=("robust word", freed, lambda: _sleep(words))),
        ]
        for watcher in watchers:
            watcher.start()
        time.sleep(0.1)
        killed = time.monotonic()
        holder.send_signal(signal.SIGKILL)
        for watcher in watchers:
            watcher.join(30)
        holder.wait(30)
        holder.stdout.close()
        return {kind: moment - killed for kind, moment in freed.items()}


def _watch(kind: str, freed: dict[str, float], wait: Callable[[], None]) -> None:
    wait()
    freed[kind] = time.monotonic()


def _lock(path: str) -> None:
    # fcntl.fcntl would hold the GIL through a wait for an OFD lock.
    fd = os.open(path, os.O_RDWR)
    ctypes.CDLL(None, use_errno=True).fcntl(fd, F_OFD_SETLKW, ctypes.create_string_buffer(LOCK))
    os.close(fd)


def _sleep(words: _core.SharedWords) -> None:
    while not words.load(0) & _core.OWNER_DIED:
        words.wait_any([0], [words.mark(0, _core.SLEEPERS)], 10**9)


def measure(rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Median milliseconds by memory of the dead process and kind of lock."""
    results = {}
    for name, ballast in (("small", 0), ("1 GiB", 1 << 30)):
        deaths = [one_death(ballast) for _ in range(rounds)]
        results[name] = {
            kind: statistics.median(death[kind] for death in deaths) * 1e3 for kind in deaths[0]
        }
    return results


if __name__ == "__main__":
    for memory, medians in measure().items():
        for kind, milliseconds in medians.items():
            print(f"{memory:>6}  {kind:<12} {milliseconds:8.2f} ms")
