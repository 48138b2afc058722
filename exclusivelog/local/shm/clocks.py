"""The machine's monotonic clock, in every time namespace.

Heartbeats and deadlines in shared files are compared between processes (rule C4). A time
namespace (`unshare --time --monotonic N`, some containers) adds a fixed offset to the monotonic
clock of the processes in it, so the offset is subtracted before a time is stored or compared.

`/proc/self/timens_offsets` gives the offsets of the namespace of future *children*. That is the
process's own namespace, unless it has called `unshare(CLONE_NEWTIME)` and not forked since.
"""

from __future__ import annotations

import os

from exclusivelog import _core
from exclusivelog.errors import LedgerError
from exclusivelog.local.files import read_whole

# The inode of the time namespace in which a machine boots: its offsets are 0, and fixed.
INITIAL = 0xEFFFFFFA


def find_clock(path: str) -> None:
    """Set `_core.now()` to the machine's monotonic clock. Call it at each opening of `path`: a
    forked child may be in another namespace than its parent.

    Raises LedgerError where the namespace's offset cannot be read.
    """
    offset = namespace_offset()
    if offset is None:
        raise LedgerError(
            f"{path} cannot be opened: this process is in a time namespace whose clock offset "
            "cannot be read, so that heartbeats could not be compared with other processes'. It "
            "has called unshare(CLONE_NEWTIME); open the ledger in a child of it"
        )
    _core.set_clock_offset(offset)


def namespace_offset() -> int | None:
    """How far this process's monotonic clock is ahead of the machine's, in ns; None if the offset
    cannot be read.

    >>> namespace_offset()
    0
    """
    try:
        own = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return 0  # this kernel has no time namespaces
    if own == INITIAL:
        return 0
    # A parent in the same namespace, whose children are in it, too, has the same offset.
    for process in ("self", str(os.getppid())):
        found = _offset_for_children(process, own)
        if found is not None:
            return found
    return None


def _offset_for_children(process: str, namespace: int) -> int | None:
    try:
        if os.stat(f"/proc/{process}/ns/time_for_children").st_ino != namespace:
            return None
        lines = read_whole(f"/proc/{process}/timens_offsets").decode().splitlines()
        rows = {fields[0]: fields[1:] for fields in map(str.split, lines)}
        seconds, nanoseconds = rows["monotonic"]
        return int(seconds) * 1_000_000_000 + int(nanoseconds)
    except (OSError, LookupError, ValueError):
        return None


def boot_id() -> bytes:
    """16 bytes that change when the machine boots, and its monotonic clock starts again."""
    text = read_whole("/proc/sys/kernel/random/boot_id").decode()
    return bytes.fromhex(text.strip().replace("-", ""))
