"""`owners.lock`: the file that all processes on a ledger map, created once and never removed.

Its contents are valid only while an engine that has written them is alive: a process that has the
ledger open alone (see slots.py) initialises the file.

```text
offset   size        what
0        8           magic, b"XLLOCK" and the version
8        8 + 8       device and inode of this file, as live engines know it
24       16          ... and the boot id: an engine that sees others has another view of the file
40       4           counts engines that have joined; waiting engines watch it
48       8           when the first engine opened it, ns of the machine's monotonic clock
56       8           inode of the pid namespace in which the thread ids here are valid; 0: unknown
1024     320         the journal's mutexes, positions and counts (see _native/journal_lock.h)
2048     1880        figures of all processes: histograms (see _native/figures.h)
4096     1024 x 64   the counters of topics: of wake-ups, and the versions of topics and claims
69632    512 x 1024  one slot for each open engine (see slots.py)
```

The places of the magic, device, inode and boot id are the same in all versions: see versions.py.

Readers wait on the counters: u32 counter of commits, u32 number of waiting readers, u64 time of the
first announcement to them (ns of the machine's monotonic clock). Writers leave there the u64
position in the journal behind the last frame: an exclusive owner that finds another one than its
own reads the topic's end again. Four u64 follow, the versions of the topics and claims that have
them in common (see _native/changes.pxi). Topics are hashed.

The machine's monotonic clock, in every time namespace.

Heartbeats and deadlines in shared files are compared between processes (rule C4). A time
namespace (`unshare --time --monotonic N`, some containers) adds a fixed offset to the monotonic
clock of the processes in it, so the offset is subtracted before a time is stored or compared.

`/proc/self/timens_offsets` has the offsets of the namespace of future *children*. That is the
process's own namespace, unless it has called `unshare(CLONE_NEWTIME)`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from exclusivelog import _core
from exclusivelog.errors import LedgerError, LedgerVersionError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.blocks import own_blocks
from exclusivelog.local.faults import NO_ROOM
from exclusivelog.local.files import (
    Directory,
    RefusedFile,
    is_locked,
    keep_in_place,
    pid_namespace,
    read_whole,
    remove_temporary,
    temporary_name,
)
from exclusivelog.local.shm import tasks
from exclusivelog.local.shm.opening_lock import OpeningWait
from exclusivelog.local.shm.slots import (
    ALIVE,
    ARRIVALS,
    NAMESPACE,
    SLOT_COUNT,
    SLOT_SIZE,
    SLOTS,
    Slots,
    describe,
)
from exclusivelog.local.versions import LOCK_NAME, LOCK_VERSION, refuse_other_lock_file
from exclusivelog.waits import READER_LOOK_UP_SECONDS

# ---- clocks ----------------------------------------------------------------------------


# The inode of the initial time namespace of a machine: its offsets are always 0.
INITIAL = 0xEFFFFFFA


def find_clock(path: str) -> None:
    """Set `_core.now()` to the machine's monotonic clock. Call it at each opening of `path`: a
    forked child may be in another namespace than its parent.

    Raises LedgerError if the namespace's offset cannot be read.
    """
    offset = namespace_offset()
    if offset is None:
        raise LedgerError(
            f"{path} cannot be opened in a time namespace whose clock offset cannot be read. Its "
            "heartbeats could not be compared with those of other processes: this process has "
            "called unshare(CLONE_NEWTIME); open the ledger in a child of it"
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
    except OSError as error:
        pass_on_foreign(error)
        return 0  # this kernel has no time namespaces
    if own == INITIAL:
        return 0
    # Ask a parent in the same namespace, whose future children are in that namespace, too.
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
    except (OSError, LookupError, ValueError) as error:
        pass_on_foreign(error)
        return None


def boot_id() -> bytes:
    """16 bytes that identify a boot of the machine, and so a start of its monotonic clock. They are
    read each time: a process that is saved and restored runs on in another boot."""
    text = read_whole("/proc/sys/kernel/random/boot_id").decode()
    return bytes.fromhex(text.strip().replace("-", ""))


# ---- counters --------------------------------------------------------------------------


TOPICS, TOPIC_SIZE = 4096, 64
# Used if writers cannot wake the reader, or not for all topics that it waits for.
POLL_SECONDS = 0.02
SPIN_NS = 40_000


class TopicCounters:
    """The counters of all topics. `shared`: writers of other processes change them."""

    def __init__(self, atomics: _core.SharedWords, shared: bool, figures: _core.Figures) -> None:
        self._atomics = atomics
        self._figures = figures
        self._shared = shared

    def place(self, topic: int) -> int:
        """The offset of this topic's counter in the file."""
        return TOPICS + _core.counter_of(topic) * TOPIC_SIZE

    def announce(self, topic: int) -> None:
        """Wake the readers that wait for this topic, after an append."""
        at = self.place(topic)
        self._atomics.announce(at)

    def wait(self, at: int, seen: int, timeout: float | None, spin: bool) -> None:
        """Wait until the counter at `at` differs from `seen`, for `timeout` seconds at most (None:
        the longest single wait of a reader); it may return earlier.

        `spin`: poll for some microseconds first. While messages keep coming, that costs reader and
        writer less than a wake-up.
        """
        if spin and self._atomics.watch(at, seen, SPIN_NS):
            return
        longest = READER_LOOK_UP_SECONDS if self._shared else POLL_SECONDS
        if timeout is not None:
            longest = min(longest, max(0.0, timeout))
        late = self._atomics.sleep(at, seen, int(longest * 1e9))
        if late >= 0:
            self._figures.note_wake(late)

    def wait_any(self, places: Sequence[int], seen: Sequence[int], seconds: float) -> None:
        """Wait until one of the counters at `places` differs from its value in `seen`, for
        `seconds` at most; it may return earlier."""
        for at in places:
            self._atomics.add(at + 4, 1)
        try:
            longest = READER_LOOK_UP_SECONDS if self._shared else POLL_SECONDS
            if len(places) > _core.MOST_WAITED_FOR:
                longest = POLL_SECONDS
            longest = min(longest, max(0.0, seconds))
            if not self._atomics.wait_any(list(places), list(seen), int(longest * 1e9)):
                self._atomics.wait(places[0], seen[0], int(min(longest, POLL_SECONDS) * 1e9))
        finally:
            for at in places:
                self._atomics.add(at + 4, -1)


# ---- the file --------------------------------------------------------------------------


NAME = "owners.lock"
MAGIC = int.from_bytes(LOCK_NAME + bytes([LOCK_VERSION]), "little")
DEVICE, INODE, BOOT = 8, 16, 24
JOURNAL_OFFSET = 1024
JOURNAL_READY = JOURNAL_OFFSET + _core.JOURNAL_READY
FIGURES = 2048
SIZE = SLOTS + SLOT_COUNT * SLOT_SIZE

OPENING_TIMEOUT = 10.0


class LockFile:
    """The mapped file of a ledger: its `slots`, and the wake-up `counters` of its topics."""

    def __init__(
        self,
        directory: Directory,
        *,
        mode: int = 0o600,
        readonly: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = os.path.join(directory.path, NAME)
        self._directory = directory
        find_clock(self.path)
        self._opening = threading.Lock()
        self._fd = -1
        self.shared = not readonly or _can_be_shared(directory)
        if self.shared:
            self._fd = make_lock_file(directory, mode)
        try:
            ours = self.shared and self._is_ours()
            other = self.shared and not ours and self._is_of_another_version()
            if other or not self.shared:
                check()  # that this version opens the ledger, before the file is replaced
            if other:
                refuse_other_lock_file(directory, readonly)
                fd, self._fd = self._fd, -1
                if readonly:  # no engine is alive: leave the file as it is
                    os.close(fd)
                    self.shared = False
                else:
                    self._fd = _replace(directory, fd, mode)
            if self.shared and not ours:
                self._check_whole()
            if readonly and self.shared and not self._takes_stores():
                os.close(self._fd)
                self._fd, self.shared = -1, False
            # Without a shared file, a reader sees no live engine, and no engine wakes it.
            self._map = mmap.mmap(self._fd, SIZE)
            self.atomics = _core.SharedWords(self._map, self.shared)
        except BaseException:
            self.close()
            raise
        self.slots = Slots(self.path, self._map, self.atomics)
        self.figures = _core.Figures(self.atomics, FIGURES)
        self.counters = TopicCounters(self.atomics, self.shared, self.figures)

    def _takes_stores(self) -> bool:
        """Can a reader store into it? Not if it is a copy, on a full disk, that nobody writes."""
        if is_locked(self._fd):
            return True  # by an engine, which has seen to that
        try:
            own_blocks(self._fd)
        except OSError as error:
            pass_on_foreign(error)
            return error.errno not in NO_ROOM
        return True

    def _is_ours(self) -> bool:
        """Is it whole, and of this version?"""
        return os.fstat(self._fd).st_size == SIZE and os.pread(self._fd, 8, 0) == MAGIC.to_bytes(
            8, "little"
        )

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

    @property
    def files(self) -> list[int]:
        """The descriptor of the file, if other processes share it."""
        return [self._fd] if self._fd >= 0 else []

    def close(self) -> None:
        """Close the file; its mapping stays until its last user is gone. A second call has no
        effect."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Hold the lock for opening or creating the ledger, and for taking a slot. The kernel
        releases it when the process dies."""
        if not self.shared:
            yield
            return
        with self._opening:  # threads, too: the file's lock belongs to the process
            self._lock_for_opening()
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def check_in_place(self) -> None:
        """LedgerError if the file was replaced since it was opened. Call it while `opening`."""
        facts = self._directory.facts(NAME) if self.shared else None
        if facts is not None and not os.path.samestat(facts, os.fstat(self._fd)):
            raise LedgerError(
                f"{self.path} was replaced by another process that opened the ledger at the same "
                "time; open it again"
            )

    def _lock_for_opening(self) -> None:
        arrivals = functools.partial(self.atomics.load, ARRIVALS)
        wait = OpeningWait(self._fd, self.path, self._engines_of, arrivals)
        if not wait.take(OPENING_TIMEOUT):
            raise LedgerError(
                f"{self.path} has been locked for {OPENING_TIMEOUT:.0f} s by {wait.holder()}. "
                "Then open the ledger again"
            )

    def opener(self) -> int | None:
        """The process that holds the lock for opening, if the kernel shows one."""
        return tasks.flock_holder(self._fd) if self.shared else None

    def _engines_of(self, pid: int) -> str:
        return ", ".join(describe(engine) for _, engine in self.slots.in_process(pid))

    # ---- one life: the time for which at least one engine has the ledger open --------------

    def _identity(self) -> bytes:
        facts = os.fstat(self._fd)
        return facts.st_dev.to_bytes(8, "little") + facts.st_ino.to_bytes(8, "little") + boot_id()

    def begin_life(self) -> None:
        """Initialise header, counters and slots. The caller holds the locks that show that it is
        alone (rule H3).

        Raises LedgerError if an engine answers nevertheless: it has the same memory through another
        file system (an overlay and its upper directory), which shares no locks.
        """
        self.slots.refuse_engines_that_answer()
        self.atomics.store(JOURNAL_READY, 0)
        own_blocks(self._fd)  # before the first store to the mapping
        self.atomics.clear(FIGURES, SIZE)
        self._map[DEVICE : BOOT + 16] = self._identity()

    def begin_here(self) -> None:
        """Note that thread ids are those of this process's pid namespace from now on. The caller is
        alone (rule H3), and has not taken a lock yet."""
        self.atomics.store64(NAMESPACE, pid_namespace())

    def watch_deaths(self, journal: _core.Journal | None, readonly: bool) -> _core.DeathWatch:
        """What looks for locks that outlive their thread (rule C8). A reader changes only LMDB's
        table of readers."""
        number = os.fstat(self._fd).st_ino if self.shared else 0
        watch = _core.DeathWatch(
            self.atomics,
            NAMESPACE,
            pid_namespace(),
            f"/{NAME}".encode(),
            number,
            readonly,
            self._fd,
        )
        if journal is not None:
            watch.add_journal(journal)
        if not readonly:
            watch.add_slots(SLOTS + ALIVE, SLOT_SIZE, SLOT_COUNT)
        return watch

    def check_same_life(self) -> None:
        """LedgerError if there are live engines that do not share this file's memory."""
        if self.in_use:
            return
        if not self.atomics.load64(INODE):
            raise LedgerError(
                f"{self.path} was removed while engines use the ledger; close every engine on it, "
                "then open it"
            )
        raise LedgerError(
            f"{self.path} is in use by engines that know it as another file or boot id. It was "
            "replaced, or is on another mount, or in a container with a boot id of its own; "
            "open the ledger by their path, or close them first"
        )

    @property
    def in_use(self) -> bool:
        """Was the ledger recovered since this boot, with this file?"""
        if not self.shared or not self.atomics.load(JOURNAL_READY):
            return False
        return self._map[DEVICE : BOOT + 16] == self._identity()

    def remove_leftovers(self) -> None:
        """Remove the temporary files of processes that were killed while they created this one.
        Call it while `opening`."""
        remove_temporary(self._directory, NAME)


def _can_be_shared(directory: Directory) -> bool:
    try:
        os.close(directory.open(NAME, os.O_RDWR))
    except RefusedFile:
        raise
    except OSError as error:
        pass_on_foreign(error)
        return False
    return True


def make_lock_file(directory: Directory, mode: int = 0o600) -> int:
    """A descriptor of the lock file, created if there is none."""
    deadline = _core.monotonic() + OPENING_TIMEOUT
    while True:
        try:
            return directory.open(NAME, os.O_RDWR)
        except FileNotFoundError as error:
            pass_on_foreign(error)  # retry: another version may have removed the new file
            if _core.monotonic() > deadline:
                raise
        _make_whole(directory, mode)


def _make_whole(directory: Directory, mode: int) -> None:
    # Create the file under another name, then link it: only one creator succeeds, and a creator
    # that dies leaves no partial lock file.
    temporary = temporary_name(NAME)
    fd = directory.make(temporary, os.O_RDWR | os.O_EXCL, mode)
    try:
        keep_in_place(fd)
        os.posix_fallocate(fd, 0, SIZE)  # a full disk must fail here, not as SIGBUS later
        os.pwrite(fd, MAGIC.to_bytes(8, "little"), 0)
        os.fsync(fd)
        # Missing: another creator was first, and took this for the leftover of a dead one.
        with Ignoring(FileExistsError, FileNotFoundError):
            directory.link(temporary, NAME)
    finally:
        os.close(fd)
        with Ignoring(FileNotFoundError):
            directory.remove(temporary)


def _replace(directory: Directory, fd: int, mode: int) -> int:
    """Replace `fd`, another version's lock file, if no engine of any version is alive."""
    try:
        _lock_alone(fd, os.path.join(directory.path, NAME))
        facts = directory.facts(NAME)
        if facts is not None and os.path.samestat(facts, os.fstat(fd)):
            refuse_other_lock_file(directory, readonly=False)
            # Invalidate its contents for a process of that version that waits for this lock.
            os.pwrite(fd, bytes(TOPICS), 0)
            directory.remove(NAME)
    finally:
        os.close(fd)
    return make_lock_file(directory, mode)


def _lock_alone(fd: int, path: str) -> None:
    """Take the lock that every version holds while it opens a ledger."""
    wait = OpeningWait(fd, path)
    if not wait.take(OPENING_TIMEOUT):
        raise LedgerVersionError(
            f"{path} is another version's lock file, locked for {OPENING_TIMEOUT:.0f} s by "
            f"{wait.holder()}; close that process first"
        )
