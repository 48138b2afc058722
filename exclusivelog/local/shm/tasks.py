"""What the kernel tells about threads, processes and file locks of others, for messages and to
decide whether a process is stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator

from exclusivelog.foreign import Ignoring
from exclusivelog.local.files import read_whole

STOPPED, RUNS, WAITS = "stopped", "runs", "waits"
# What a holder of a lock does, and what to do about it.
DOING = {
    STOPPED: "is stopped: resume or end that process",
    RUNS: "runs, or waits for a CPU (is the machine overloaded?)",
    WAITS: "waits, for a disk or another process, or is frozen with its container",
}


def is_stopped(thread: int) -> bool:
    """Is this thread stopped, by a signal or a debugger?"""
    return _state(thread) in ("T", "t")


def state_of(thread: int) -> str:
    """What this thread of any process does: `STOPPED`, `RUNS` or `WAITS`. It runs if any thread of
    its process runs or waits for a CPU, as it may need the interpreter's lock from that one."""
    if is_stopped(thread):
        return STOPPED
    return RUNS if any(_state(each) == "R" for each in _threads(thread)) else WAITS


def _state(thread: int) -> str:
    with Ignoring(OSError, IndexError):
        return read_whole(f"/proc/{thread}/stat").rpartition(b")")[2].split()[0].decode()
    return ""


def _threads(thread: int) -> list[int]:
    """The threads of a thread's process."""
    with Ignoring(OSError):
        return list(map(int, os.listdir(f"/proc/{thread}/task")))
    return []


def process_of(thread: int) -> int | None:
    """The id of the process of a thread; None if the thread has ended, or is hidden from this
    process."""
    with Ignoring(OSError, ValueError, StopIteration):
        status = read_whole(f"/proc/{thread}/status").splitlines()
        return int(next(line for line in status if line.startswith(b"Tgid:")).split()[1])
    return None


def name_of(pid: int) -> str:
    """A process and its program, for a message.

    >>> name_of(os.getpid()).startswith(f"process {os.getpid()} (")
    True
    """
    with Ignoring(OSError):
        return f"process {pid} ({read_whole(f'/proc/{pid}/comm').decode(errors='replace').strip()})"
    return f"process {pid}"


# ---- file locks --------------------------------------------------------------------------


def flock_holder(fd: int) -> int | None:
    """The id of the process that holds a `flock` of this open file; None if there is none, or if
    the kernel does not show it, as it is in another pid namespace."""
    facts = os.fstat(fd)
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    for pid, place, inode in _flocks():
        # Some file systems (btrfs, overlays) have one device number for `stat`, another for this.
        if inode == facts.st_ino and (place == device or _has_open(pid, facts)):
            return pid
    return None


def _flocks() -> Iterator[tuple[int, str, int]]:
    """(process, device, inode) of each `flock` in the kernel's list, with lines as

    1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF
    """
    with Ignoring(OSError, ValueError, IndexError):
        for line in read_whole("/proc/locks").decode().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[4]) > 0:
                device, _, inode = fields[5].rpartition(":")
                yield int(fields[4]), device, int(inode)


def _has_open(pid: int, facts: os.stat_result) -> bool:
    with Ignoring(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with Ignoring(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), facts):
                    return True
    return False
