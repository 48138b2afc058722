"""`owners.lock`: the file that all processes on a ledger map, created once and never removed.

What it says counts only while an engine lives that has written it: the process that opens a
ledger alone (see presence.py) initialises it, whatever it says.

```text
offset   size        what
0        8           magic, b"XLLOCK" and the version
8        8 + 8       device and inode of this file, as the engines that live know it
24       16          ... and the boot id: an engine that sees others has another view of the file
40       4           counts the engines that have opened the ledger: waiting engines watch it
48       8           when the first of the engines opened it, ns of the machine's monotonic clock
1024     320         the journal's mutexes and positions (see _native/journal_lock.h)
4096     1024 x 64   one wake-up counter for each topic (see counters.py)
69632    512 x 1024  one slot for each open engine (see slots.py)
```

The places of the magic, device, inode and boot id are the same in all versions: see versions.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator

from exclusivelog import _core
from exclusivelog.errors import LedgerError, LedgerVersionError
from exclusivelog.local.files import Directory, fill_holes
from exclusivelog.local.shm.clocks import boot_id, find_clock
from exclusivelog.local.shm.counters import TOPICS, TopicCounters
from exclusivelog.local.shm.slots import ARRIVALS, SLOT_COUNT, SLOT_SIZE, SLOTS, Slots
from exclusivelog.local.versions import LOCK_NAME, LOCK_VERSION, refuse_other_lock_file

NAME = "owners.lock"
MAGIC = int.from_bytes(LOCK_NAME + bytes([LOCK_VERSION]), "little")
DEVICE, INODE, BOOT = 8, 16, 24
JOURNAL_OFFSET = 1024
JOURNAL_READY = JOURNAL_OFFSET + _core.JOURNAL_READY
SIZE = SLOTS + SLOT_COUNT * SLOT_SIZE

OPENING_TIMEOUT = 10.0


class LockFile:
    """The mapped file of a ledger: its `slots`, and the wake-up `counters` of its topics."""

    def __init__(self, directory: Directory, *, mode: int = 0o600, readonly: bool = False) -> None:
        self.path = os.path.join(directory.path, NAME)
        self._directory = directory
        find_clock(self.path)
        self._opening = threading.Lock()
        self._fd = -1
        self.shared = not readonly or _can_be_shared(directory)
        if self.shared:
            self._fd = make_lock_file(directory, mode)
        try:
            if self.shared and self._is_of_another_version():
                refuse_other_lock_file(directory, readonly)
                fd, self._fd = self._fd, -1
                if readonly:  # no engine lives: leave the file as it is
                    os.close(fd)
                    self.shared = False
                else:
                    self._fd = _replace(directory, fd, mode)
            if self.shared:
                self._check_whole()
            # Without a file to share, a reader sees no engine live, and no engine wakes it.
            self._map = mmap.mmap(self._fd, SIZE)
            self.atomics = _core.SharedWords(self._map, self.shared)
        except BaseException:
            self.close()
            raise
        self.slots = Slots(self.path, self._map, self.atomics)
        self.counters = TopicCounters(self.atomics, self.shared)

    def _is_of_another_version(self) -> bool:
        size, magic = os.fstat(self._fd).st_size, os.pread(self._fd, 8, 0)
        ours = size == SIZE and magic.startswith(b"XLLOCK")
        return ours and magic != MAGIC.to_bytes(8, "little")

    def _check_whole(self) -> None:
        size, magic = os.fstat(self._fd).st_size, os.pread(self._fd, 8, 0)
        if magic != MAGIC.to_bytes(8, "little"):
            raise LedgerVersionError(
                f"{self.path} is not a lock file of this version; close every engine on the ledger "
                "and remove the file"
            )
        if size != SIZE:
            raise LedgerVersionError(
                f"{self.path} is {size} bytes long, not {SIZE}; close every engine on the ledger "
                "and remove the file"
            )

    def close(self) -> None:
        """Close the file; the mapping goes with its last user. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Hold the lock under which one process at a time opens or creates the ledger, or takes a
        slot. The kernel releases it when the process dies."""
        if not self.shared:
            yield
            return
        with self._opening:  # the file's lock belongs to the process, not to the thread
            self._lock_for_opening()
            try:
                self._remove_leftovers()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def check_in_place(self) -> None:
        """LedgerError where the file was replaced since it was opened. Call it while `opening`."""
        facts = self._directory.facts(NAME) if self.shared else None
        if facts is not None and not os.path.samestat(facts, os.fstat(self._fd)):
            raise LedgerError(
                f"{self.path} was replaced by another process that opened the ledger at the same "
                "time; open it again"
            )

    def _lock_for_opening(self) -> None:
        seen, deadline, pause = -1, 0.0, 0.001
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise LedgerError(f"{self.path} cannot be locked: {error.strerror}") from error
            # Hundreds may wait: extend the deadline whenever an engine has opened the ledger.
            if (arrivals := self.atomics.load(ARRIVALS)) != seen:
                seen, deadline = arrivals, time.monotonic() + OPENING_TIMEOUT
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"{self.path} has been locked by another process for {OPENING_TIMEOUT:.0f} s; "
                    "is one stopped while it opens the ledger?"
                )
            # Back off: many processes that poll take the processor from the one that opens.
            pause = min(1.2 * pause, 0.2)
            time.sleep(random.uniform(0.5, 1.0) * pause)

    # ---- one life: the time for which at least one engine has the ledger open --------------

    def _identity(self) -> bytes:
        facts = os.fstat(self._fd)
        return facts.st_dev.to_bytes(8, "little") + facts.st_ino.to_bytes(8, "little") + boot_id()

    def begin_life(self) -> None:
        """Initialise the header, counters and slots: the caller holds the locks that prove it is
        alone (rule H3).

        Raises LedgerError if an engine answers all the same: it has the same memory by way of
        another file system (an overlay and its upper directory), which shares no locks.
        """
        self.slots.refuse_engines_that_answer()
        self.atomics.store(JOURNAL_READY, 0)
        fill_holes(self._fd)  # before anything is stored
        self.atomics.clear(TOPICS, SIZE)
        self._map[DEVICE : BOOT + 16] = self._identity()

    def check_same_life(self) -> None:
        """LedgerError where engines live that cannot share this file's memory."""
        if self.in_use:
            return
        if not self.atomics.load64(INODE):
            raise LedgerError(
                f"{self.path} was removed while engines use the ledger; close every engine on it, "
                "then open it"
            )
        raise LedgerError(
            f"{self.path} is in use by engines that know it as another file or under another boot "
            "id (a container with a boot id of its own, another mount, a file put in its place); "
            "open the ledger as they do, or close them first"
        )

    @property
    def in_use(self) -> bool:
        """Is the ledger recovered, and does the header name this boot and file?"""
        if not self.shared or not self.atomics.load(JOURNAL_READY):
            return False
        return self._map[DEVICE : BOOT + 16] == self._identity()

    def _remove_leftovers(self) -> None:
        # A process that was killed while it created the file leaves its temporary one behind.
        for name in self._directory.names():
            if name.startswith(NAME + "."):
                with contextlib.suppress(OSError):
                    self._directory.remove(name)


def _can_be_shared(directory: Directory) -> bool:
    try:
        os.close(directory.open(NAME, os.O_RDWR))
    except OSError:
        return False
    return True


def make_lock_file(directory: Directory, mode: int = 0o600) -> int:
    """A descriptor of the lock file, created if there is none."""
    deadline = time.monotonic() + OPENING_TIMEOUT
    while True:
        try:
            return directory.open(NAME, os.O_RDWR)
        except (
            FileNotFoundError
        ):  # retry: another version removes a file that it takes for an old one
            if time.monotonic() > deadline:
                raise
        _make_whole(directory, mode)


def _make_whole(directory: Directory, mode: int) -> None:
    # Create the whole file under another name, then link it: only one creator succeeds, and one
    # that dies leaves no partial lock file.
    temporary = f"{NAME}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = directory.make(temporary, os.O_RDWR | os.O_EXCL, mode)
    try:
        os.posix_fallocate(fd, 0, SIZE)  # a full disk must fail here, not as SIGBUS later
        os.pwrite(fd, MAGIC.to_bytes(8, "little"), 0)
        os.fsync(fd)
        # Missing: another creator was first, and removed this as a dead creator's leftover.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            directory.link(temporary, NAME)
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            directory.remove(temporary)


def _replace(directory: Directory, fd: int, mode: int) -> int:
    """Replace `fd`, another version's lock file, if no engine of any version lives."""
    try:
        _lock_alone(fd, os.path.join(directory.path, NAME))
        facts = directory.facts(NAME)
        if facts is not None and os.path.samestat(facts, os.fstat(fd)):
            refuse_other_lock_file(directory, readonly=False)
            # A process of that version that waits for this lock must not trust its contents.
            os.pwrite(fd, bytes(TOPICS), 0)
            directory.remove(NAME)
    finally:
        os.close(fd)
    return make_lock_file(directory, mode)


def _lock_alone(fd: int, path: str) -> None:
    """Take the lock that every version holds while it opens a ledger."""
    deadline = time.monotonic() + OPENING_TIMEOUT
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerVersionError(
                    f"{path} is another version's lock file, and a process of that version has "
                    f"locked it for {OPENING_TIMEOUT:.0f} s; close that process first"
                ) from None
        time.sleep(0.002)
