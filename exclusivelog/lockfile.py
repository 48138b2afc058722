"""`owners.lock`: who lives, and whom to wake. It stands in for the broker.

One small file, mapped by every engine, created once and never removed:

```text
offset   size        what
0        8           magic, b"XLLOCK" and the version
8        8 + 8       device and inode of this file: a copy knows that it is one
24       16          the boot it was last used in: words of an earlier boot are void
40       4           counts the engines that have come: waiting engines watch it
48       8           when the first of the engines came, ns of the monotonic clock
1024     320         the journal's words: its mutexes and positions (see _journal.pxi)
4096     1024 x 64   topics, hashed: u32 counter of commits, u32 sleeping readers
69632    512 x 1024  slots, one per open engine:
           0   4     liveness: 0 free, else the holder's thread id; the kernel sets
                     OWNER_DIED when that thread dies
           4   4     process id, for people
           8   8     the kernel's list node for the word above
          16   8     engine id, 0 while the slot is being given or taken back
          24   8     last heartbeat, ns of the monotonic clock
          32   8     keepalive, ns; 0 = never evicted for silence
          40   4     wake-up counter: mail has come
          44   4     length of the next field
          48   8     the pid namespace's inode: process ids of another one say nothing here
          56 968     msgpack [engine name, properties]
```

Liveness is a word in the kernel's robust list, not a file lock: at the death of a process
the list is walked before its memory is torn down, so that a take-over does not wait for a
large process to be dismantled (0.3 ms for 1 GiB, where an OFD lock took 25 ms:
`python -m bench.liveness`), and a forked child inherits nothing. A process that dumps core
is dead only once the dump is written. Nothing here decides
who may write: the epoch does, in the ledger (rule B2).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgpack

from exclusivelog import _core
from exclusivelog.errors import LedgerError, LedgerFullError, LedgerVersionError
from exclusivelog.types import EngineInfo

MAGIC = int.from_bytes(b"XLLOCK\x00\x02", "little")
DEVICE, INODE, BOOT, ARRIVALS, OPENED = 8, 16, 24, 40, 48
JOURNAL_WORDS = 1024
JOURNAL_READY = JOURNAL_WORDS + _core.JOURNAL_READY
TOPICS, TOPIC_COUNT, TOPIC_SIZE = 4096, 1024, 64
SLOTS, SLOT_COUNT, SLOT_SIZE = TOPICS + TOPIC_COUNT * TOPIC_SIZE, 512, 1024
ALIVE, PID, NODE, ENGINE, HEARTBEAT, KEEPALIVE, MAIL, INFO_SIZE, NAMESPACE, INFO = (
    0, 4, 8, 16, 24, 32, 40, 44, 48, 56,
)  # fmt: skip
SIZE = SLOTS + SLOT_COUNT * SLOT_SIZE

OPENING_TIMEOUT = 10.0
# A watcher sleeps until the kernel wakes it. It looks up this often all the same: a death
# wakes one watcher only, and that one may be stopped.
LOOK_UP_SECONDS = 0.25
# So does a reader, for the writer that dies between its commit and its wake-up call.
READER_LOOK_UP_SECONDS = 1.0

POLL_SECONDS = 0.02  # where there is no shared file to be woken through
SPIN_NS = 40_000


def _boot_id() -> bytes:
    text = Path("/proc/sys/kernel/random/boot_id").read_text()
    return bytes.fromhex(text.strip().replace("-", ""))


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


class LockFile:
    """The mapped file. `path` is the file's own path."""

    def __init__(self, path: str, *, mode: int = 0o600, readonly: bool = False) -> None:
        self.path = path
        self.shared = True
        self._opening = threading.Lock()
        if readonly and not _can_be_shared(path):
            self._detach()
            return
        self._fd = _open_or_create(path, mode)
        try:
            if os.fstat(self._fd).st_size != SIZE:
                raise LedgerVersionError(
                    f"{path} is {os.fstat(self._fd).st_size} bytes long, not {SIZE}: it was not "
                    "made by this version; close every engine on the ledger and remove the file"
                )
            self._map = mmap.mmap(self._fd, SIZE)
            self.words = _core.SharedWords(self._map)
            if self.words.load64(0) != MAGIC:
                raise LedgerVersionError(
                    f"{path} is no lock file of this version; close every engine on the ledger "
                    "and remove the file"
                )
        except BaseException:
            os.close(self._fd)
            raise

    def _detach(self) -> None:
        # Read-only, and there is no file to share: nobody is seen to live, nobody wakes us.
        self.shared = False
        self._fd = -1
        self._map = mmap.mmap(-1, SIZE)
        self.words = _core.SharedWords(self._map)

    def close(self) -> None:
        """Let go of the file. The mapping goes when its last user does."""
        if self.shared:
            os.close(self._fd)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """One process at a time opens, creates, or takes a slot. Freed by the kernel."""
        if not self.shared:
            yield
            return
        with self._opening:  # the file's lock is the process's, not the thread's
            self._lock_for_opening()
            try:
                self._void_words_of_another_life()
                self._remove_leftovers()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock_for_opening(self) -> None:
        deadline = time.monotonic() + OPENING_TIMEOUT
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise LedgerError(f"{self.path} cannot be locked: {error.strerror}") from error
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"{self.path} has been locked by another process for {OPENING_TIMEOUT:.0f} s; "
                    "is one stopped while it opens the ledger?"
                )
            time.sleep(0.002)

    def _life(self) -> bytes:
        stat = os.fstat(self._fd)
        return stat.st_dev.to_bytes(8, "little") + stat.st_ino.to_bytes(8, "little") + _boot_id()

    def _void_words_of_another_life(self) -> None:
        # After a reboot, or in a copy of the directory, no thread stands behind the words.
        life = self._life()
        if self._map[DEVICE : BOOT + 16] != life:
            self._map[SLOTS:SIZE] = bytes(SIZE - SLOTS)
            self._map[TOPICS:SLOTS] = bytes(SLOTS - TOPICS)
            self.words.store(JOURNAL_READY, 0)
            self._map[DEVICE : BOOT + 16] = life

    @property
    def in_use(self) -> bool:
        """Is the ledger whole, and the words of this life?"""
        if not self.shared or not self.words.load(JOURNAL_READY):
            return False
        return self._map[DEVICE : BOOT + 16] == self._life()

    def refuse_other_namespaces(self) -> None:
        """LedgerError while an engine of another pid namespace is open: locks and LMDB's readers
        go by thread and process ids, and two containers would mistake each other's."""
        ours = _pid_namespace()
        for index, engine in self._taken():
            theirs = self.words.load64(SLOTS + index * SLOT_SIZE + NAMESPACE)
            if theirs != ours and self.exists(index, engine):
                raise LedgerError(
                    f"{self.path} is in use by {self._info(index, engine).name!r}, an engine of "
                    "another pid namespace (a container, say); processes that share a ledger "
                    "must share their process ids"
                )

    def _remove_leftovers(self) -> None:
        # A creator that was killed leaves its unfinished file behind.
        for leftover in glob.glob(glob.escape(self.path) + ".*"):
            with contextlib.suppress(OSError):
                os.unlink(leftover)

    # ---- slots ---------------------------------------------------------------------------

    def join(self, name: str, properties: Mapping[str, str], keepalive: float | None) -> Slot:
        """Take a slot for a new engine. Call it while `opening`."""
        info = msgpack.packb([name, dict(properties)])
        if len(info) > SLOT_SIZE - INFO:
            raise ValueError(
                f"name and properties of an engine take {SLOT_SIZE - INFO} bytes at most, "
                f"these take {len(info)}"
            )
        if not self._somebody_is_here():
            self.words.store64(OPENED, _core.now())
        for index in range(SLOT_COUNT):
            at = SLOTS + index * SLOT_SIZE
            if self._is_free(at):
                with contextlib.suppress(BlockingIOError):
                    return Slot(self, index, info, keepalive)
        raise LedgerFullError(
            f"{self.path}: all {SLOT_COUNT} engines that a ledger takes at once are open"
        )

    def _somebody_is_here(self) -> bool:
        return any(self.exists(index, engine) for index, engine in self._taken())

    @property
    def opened(self) -> int:
        """When the first of the engines came that are here now, or of their predecessors without
        a gap: ns of the monotonic clock."""
        return self.words.load64(OPENED)

    def _taken(self) -> Iterator[tuple[int, str]]:
        for index in range(SLOT_COUNT):
            engine = self.words.load64(SLOTS + index * SLOT_SIZE + ENGINE)
            if engine:
                yield index, f"{engine:016x}"

    def _is_free(self, at: int) -> bool:
        word = self.words.load(at + ALIVE)
        if word & _core.HELD_BY:
            return False
        if word:
            # The id goes first: whoever sees it still there sees a dead word beside it.
            self.words.store64(at + ENGINE, 0)
            self.words.store(at + ALIVE, 0)
        return True

    def alive(self, slot: int, engine: str) -> bool:
        """Does this engine live, and has it been heard within its keepalive (rules C2, C3)?"""
        if not self.exists(slot, engine):
            return False
        at = SLOTS + slot * SLOT_SIZE
        if self.words.load(at + PID) == os.getpid():
            return True  # whoever asks does not hang: its heart is about to beat again
        keepalive = self.words.load64(at + KEEPALIVE)
        return keepalive == 0 or _core.now() - self.words.load64(at + HEARTBEAT) <= keepalive

    def exists(self, slot: int, engine: str) -> bool:
        """Does this engine's process live, be it hung or not? It may still read its mail."""
        at = SLOTS + slot * SLOT_SIZE
        words = self.words
        wanted = int(engine, 16)
        if words.load64(at + ENGINE) != wanted:
            return False
        word = words.load(at + ALIVE)
        held = word & _core.HELD_BY and not word & _core.OWNER_DIED
        return bool(held) and words.load64(at + ENGINE) == wanted

    def engines(self) -> list[EngineInfo]:
        """The engines that live now."""
        found = [
            (index, self._info(index, engine))
            for index, engine in self._taken()
            if self.alive(index, engine)
        ]
        # Once more: what was read is theirs only if the slot still is.
        return [info for index, info in found if self.exists(index, info.id)]

    def present(self) -> list[EngineInfo]:
        """The engines whose processes live, hung ones too."""
        return [
            self._info(index, engine)
            for index, engine in self._taken()
            if self.exists(index, engine)
        ]

    def find(self, engine: str) -> tuple[int, EngineInfo] | None:
        """(slot, facts) of an engine that lives."""
        for index, other in self._taken():
            if other == engine and self.alive(index, engine):
                return index, self._info(index, engine)
        return None

    def in_process(self, pid: int) -> Iterator[tuple[int, EngineInfo]]:
        """(slot, facts) of the engines of a process of this pid namespace, hung ones too."""
        namespace = _pid_namespace()
        for index, engine in self._taken():
            at = SLOTS + index * SLOT_SIZE
            process = self.words.load(at + PID), self.words.load64(at + NAMESPACE)
            if process == (pid, namespace) and self.exists(index, engine):
                yield index, self._info(index, engine)

    def _description(self, index: int) -> tuple[str, dict[str, str]]:
        at = SLOTS + index * SLOT_SIZE
        length = self.words.load(at + INFO_SIZE)
        try:
            name, properties = msgpack.unpackb(self._map[at + INFO : at + INFO + length])
        except (ValueError, TypeError):  # somebody has just taken the slot, and fills it in
            return "", {}
        return name, properties

    def _info(self, index: int, engine: str) -> EngineInfo:
        at = SLOTS + index * SLOT_SIZE
        name, properties = self._description(index)
        age = max(0, _core.now() - self.words.load64(at + HEARTBEAT)) / 1e9
        return EngineInfo(engine, name, self.words.load(at + PID), properties, age)

    def ring(self, slot: int) -> None:
        """Tell an engine that mail has come."""
        at = SLOTS + slot * SLOT_SIZE + MAIL
        self.words.add(at, 1)
        self.words.wake(at)

    # ---- topics --------------------------------------------------------------------------

    def topic_word(self, topic: int) -> int:
        """Where this topic's counter of commits lies."""
        return TOPICS + (topic * 0x9E3779B1 % TOPIC_COUNT) * TOPIC_SIZE

    def announce(self, topic: int) -> None:
        """Something was appended: wake the readers that sleep, if any do."""
        at = self.topic_word(topic)
        self.words.add(at, 1)
        if self.words.load(at + 4):
            self.words.wake(at)

    def await_topic(self, at: int, seen: int, timeout: float | None, spin: bool) -> None:
        """Sleep until the counter at `at` is no longer `seen`, or a while has passed.

        With `spin` it looks hard for a moment first: while data flows that is cheaper, for
        reader and writer, than a sleep and a wake-up.
        """
        if spin and self.words.watch(at, seen, SPIN_NS):
            return
        # A reader killed here leaves the count too high: that costs writers an idle wake
        # call, and nobody a message.
        self.words.add(at + 4, 1)
        try:
            longest = READER_LOOK_UP_SECONDS if self.shared else POLL_SECONDS
            if timeout is not None:
                longest = min(longest, max(0.0, timeout))
            self.words.wait(at, seen, int(longest * 1e9))
        finally:
            self.words.add(at + 4, -1)


class Slot:
    """One engine's place in the lock file, held until `leave` or the death of the process."""

    def __init__(
        self, lockfile: LockFile, index: int, info: bytes, keepalive: float | None
    ) -> None:
        self._file = lockfile
        self._at = SLOTS + index * SLOT_SIZE
        self.bell = self._at + MAIL
        self.index = index
        self.engine = f"{secrets.randbits(63) | 1:016x}"
        words = lockfile.words
        self._hold = _core.Hold(words, self._at + ALIVE, self._at + NODE)
        words.store(self._at + PID, os.getpid())
        words.store64(self._at + NAMESPACE, _pid_namespace())
        words.store64(self._at + KEEPALIVE, 0 if keepalive is None else int(keepalive * 1e9))
        words.store(self._at + INFO_SIZE, len(info))
        lockfile._map[self._at + INFO : self._at + INFO + len(info)] = info
        self.beat()
        words.store64(self._at + ENGINE, int(self.engine, 16))
        words.add(ARRIVALS, 1)
        words.wake(ARRIVALS)

    def beat(self) -> None:
        """Show that this process runs, and is not merely alive (rule C3)."""
        self._file.words.store64(self._at + HEARTBEAT, _core.now())

    def mail_count(self) -> int:
        """Changes when mail has come."""
        return self._file.words.load(self._at + MAIL)

    def await_mail(self, seen: int, timeout: float) -> None:
        """Sleep until mail comes."""
        self._file.words.wait(self._at + MAIL, seen, int(timeout * 1e9))

    def arrivals(self) -> int:
        """Changes when an engine joins the ledger."""
        return self._file.words.load(ARRIVALS)

    def living(self) -> frozenset[int]:
        """The slots of the other engines that live now, for `await_mail_or_death`."""
        words = self._file.words
        return frozenset(
            index
            for index in range(SLOT_COUNT)
            if words.load(SLOTS + index * SLOT_SIZE) and index != self.index
            and not words.load(SLOTS + index * SLOT_SIZE) & _core.OWNER_DIED
        )  # fmt: skip

    def await_mail_or_death(
        self, seen: int, arrivals: int, living: frozenset[int], timeout: float
    ) -> None:
        """Sleep until mail comes, an engine dies, or one joins; also if that has happened since
        the first three arguments were read."""
        words = self._file.words
        offsets, expected = [self._at + MAIL, ARRIVALS], [seen, arrivals]
        for index in range(SLOT_COUNT):
            at = SLOTS + index * SLOT_SIZE
            word = words.load(at)
            if word & _core.OWNER_DIED and index in living:
                return
            if index == self.index or word == 0 or word & _core.OWNER_DIED:
                continue
            # The kernel wakes only where this mark says that somebody sleeps. An engine that
            # died or left just now gets it too, which is why its word is looked at again.
            word = words.mark(at, _core.SLEEPERS)
            if word == _core.SLEEPERS:
                words.swap(at, word, 0)
                return
            if word & _core.OWNER_DIED:
                return
            offsets.append(at)
            expected.append(word)
        if len(offsets) > _core.MOST_WAITED_FOR:
            timeout = min(timeout, 0.02)
        timeout = min(timeout, LOOK_UP_SECONDS)
        if not words.wait_any(offsets, expected, int(timeout * 1e9)):
            words.wait(self._at + MAIL, seen, int(min(timeout, 0.02) * 1e9))

    def leave(self) -> None:
        """Give the slot back. A second time does nothing: it may be somebody else's by then."""
        if self._hold.tid == 0:
            return
        self._file.words.store64(self._at + ENGINE, 0)
        self._hold.release()

    def forget(self) -> None:
        """In a forked child: the slot is the parent's."""
        self._hold.forget()


def _can_be_shared(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _open_or_create(path: str, mode: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    # Made whole under another name, then linked: two creators cannot both win, and a
    # creator that dies leaves nothing half made.
    temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, flags | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.posix_fallocate(fd, 0, SIZE)  # a full disk must fail here, not as SIGBUS later
        os.pwrite(fd, MAGIC.to_bytes(8, "little"), 0)
        os.fsync(fd)
        # Gone: somebody else was first, and took this for the leftover of a dead creator.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(temporary, path)
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return os.open(path, flags)
