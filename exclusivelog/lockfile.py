"""`owners.lock`: who lives, and whom to wake. It stands in for the broker.

One small file, mapped by every engine, created once and never removed. What stands in it counts
only while an engine lives that has written it: the process that opens a ledger alone (see
presence.py) makes it anew, whatever it says.

```text
offset   size        what
0        8           magic, b"XLLOCK" and the version
8        8 + 8       device and inode of this file, as the engines that live know it
24       16          ... and the boot: an engine that sees others is in another view of the file
40       4           counts the engines that have come: waiting engines watch it
48       8           when the first of the engines came, ns of the machine's monotonic clock
1024     320         the journal's words: its mutexes and positions (see _journal.pxi)
4096     1024 x 64   topics, hashed: u32 counter of commits, u32 sleeping readers
69632    512 x 1024  slots, one per open engine:
           0   4     liveness: 0 free, else the holder's thread id; the kernel sets
                     OWNER_DIED when that thread dies
           4   4     process id, for people
           8   8     the kernel's list node for the word above
          16   8     engine id, 0 while the slot is being given or taken back
          24   8     last heartbeat, ns of the machine's monotonic clock
          32   8     keepalive, ns; 0 = never evicted for silence
          40   4     wake-up counter: mail has come
          44   4     length of the next field
          48   8     the pid namespace's inode: process ids of another one say nothing here
          56   4     the holder's thread sleeps on it: whoever wakes it shares this memory
          64 960     msgpack [engine name, properties, version of the library]
```

The places of the magic, device, inode, boot, and of a slot's liveness, pid, engine id and
description are the same in all versions: see versions.py.

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
import mmap
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgpack

from exclusivelog import _core
from exclusivelog.clocks import find_clock
from exclusivelog.errors import LedgerError, LedgerFullError, LedgerVersionError
from exclusivelog.files import Directory, fill_holes, read_whole
from exclusivelog.types import EngineInfo
from exclusivelog.version import __version__
from exclusivelog.versions import LOCK_NAME, LOCK_VERSION, refuse_other_lock_file

NAME = "owners.lock"
MAGIC = int.from_bytes(LOCK_NAME + bytes([LOCK_VERSION]), "little")
DEVICE, INODE, BOOT, ARRIVALS, OPENED = 8, 16, 24, 40, 48
JOURNAL_WORDS = 1024
JOURNAL_READY = JOURNAL_WORDS + _core.JOURNAL_READY
TOPICS, TOPIC_COUNT, TOPIC_SIZE = 4096, 1024, 64
SLOTS, SLOT_COUNT, SLOT_SIZE = TOPICS + TOPIC_COUNT * TOPIC_SIZE, 512, 1024
ALIVE, PID, NODE, ENGINE, HEARTBEAT, KEEPALIVE, MAIL, INFO_SIZE, NAMESPACE, PRESENCE, INFO = (
    0, 4, 8, 16, 24, 32, 40, 44, 48, 56, 64,
)  # fmt: skip
SIZE = SLOTS + SLOT_COUNT * SLOT_SIZE

OPENING_TIMEOUT = 10.0
# A watcher sleeps until the kernel wakes it. It looks up this often all the same: a death
# wakes one watcher only, and that one may be stopped.
LOOK_UP_SECONDS = 0.25
# What wakes nobody, a hung engine above all, is looked for so often by all engines together.
LOOKS_PER_SECOND = 100
MOST_WATCHED = _core.MOST_WAITED_FOR - 2  # beside mail and arrivals
# So does a reader, for the writer that dies between its commit and its wake-up call.
READER_LOOK_UP_SECONDS = 1.0

POLL_SECONDS = 0.02  # where nobody can be woken, or not by all that he waits for
SPIN_NS = 40_000


def _boot_id() -> bytes:
    text = read_whole("/proc/sys/kernel/random/boot_id")
    return bytes.fromhex(text.decode().strip().replace("-", ""))


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def is_stopped(thread: int) -> bool:
    """Is this thread stopped, by a signal or a debugger?"""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{thread}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


class LockFile:
    """The mapped file of a ledger."""

    def __init__(self, directory: Directory, *, mode: int = 0o600, readonly: bool = False) -> None:
        self.path = os.path.join(directory.path, NAME)
        self._directory = directory
        find_clock(self.path)
        self.shared = True
        self._opening = threading.Lock()
        if readonly and not _can_be_shared(directory):
            self._detach()
            return
        self._fd = make_lock_file(directory, mode)
        try:
            if self._is_of_another_version():
                refuse_other_lock_file(directory, readonly)
                if readonly:  # no engine lives: it is left as it is
                    os.close(self._fd)
                    self._detach()
                    return
                fd, self._fd = self._fd, -1
                self._fd = _replace(directory, fd, mode)
            self._check_whole()
            self._map = mmap.mmap(self._fd, SIZE)
            self.words = _core.SharedWords(self._map, True)
        except BaseException:
            self.close()
            raise

    def _is_of_another_version(self) -> bool:
        size, magic = os.fstat(self._fd).st_size, os.pread(self._fd, 8, 0)
        ours = size == SIZE and magic.startswith(b"XLLOCK")
        return ours and magic != MAGIC.to_bytes(8, "little")

    def _check_whole(self) -> None:
        size, magic = os.fstat(self._fd).st_size, os.pread(self._fd, 8, 0)
        if magic != MAGIC.to_bytes(8, "little"):
            raise LedgerVersionError(
                f"{self.path} is no lock file of this version; close every engine on the ledger "
                "and remove the file"
            )
        if size != SIZE:
            raise LedgerVersionError(
                f"{self.path} is {size} bytes long, not {SIZE}; close every engine on the ledger "
                "and remove the file"
            )

    def _detach(self) -> None:
        # Read-only, and there is no file to share: nobody is seen to live, nobody wakes us.
        self.shared = False
        self._fd = -1
        self._map = mmap.mmap(-1, SIZE)
        self.words = _core.SharedWords(self._map)

    def close(self) -> None:
        """Let go of the file. The mapping goes when its last user does. A second time does
        nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """One process at a time opens, creates, or takes a slot. Freed by the kernel."""
        if not self.shared:
            yield
            return
        with self._opening:  # the file's lock is the process's, not the thread's
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
            # Hundreds may stand in line; the line moves as long as engines arrive.
            if (arrivals := self.words.load(ARRIVALS)) != seen:
                seen, deadline = arrivals, time.monotonic() + OPENING_TIMEOUT
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"{self.path} has been locked by another process for {OPENING_TIMEOUT:.0f} s; "
                    "is one stopped while it opens the ledger?"
                )
            # A crowd that looks every other millisecond takes the processor from whoever opens.
            pause = min(1.2 * pause, 0.2)
            time.sleep(random.uniform(0.5, 1.0) * pause)

    # ---- one life: as long as engines have the ledger open, without a gap ------------------

    def _identity(self) -> bytes:
        facts = os.fstat(self._fd)
        return facts.st_dev.to_bytes(8, "little") + facts.st_ino.to_bytes(8, "little") + _boot_id()

    def begin_life(self) -> None:
        """Make all words anew: the caller has the locks that say that it is alone (H3).

        Raises LedgerError where an engine answers all the same: it has the same memory by way of
        another file system (an overlay and its upper directory), which shares no locks.
        """
        self._refuse_engines_that_answer()
        self.words.store(JOURNAL_READY, 0)
        fill_holes(self._fd)  # before anything is stored
        self.words.clear(TOPICS, SIZE)
        self._map[DEVICE : BOOT + 16] = self._identity()

    def _refuse_engines_that_answer(self) -> None:
        for index, engine in self._taken():
            if not self.exists(index, engine):
                continue
            at = SLOTS + index * SLOT_SIZE
            thread = self.words.load(at + ALIVE) & _core.HELD_BY
            if self.words.wake(at + PRESENCE) or is_stopped(thread):
                raise LedgerError(
                    f"{self.path} is in use by engine {self._info(index, engine).name!r} (pid "
                    f"{self.words.load(at + PID)}) through another path (an overlay and its upper "
                    "directory, say), which shares no locks; open the ledger by one path only. If "
                    "this is a copy, remove its owners.lock"
                )

    def check_same_life(self) -> None:
        """LedgerError where engines live whose words these cannot be."""
        if self.in_use:
            return
        if not self.words.load64(INODE):
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
        """Is the ledger whole, and are the words of this boot and file?"""
        if not self.shared or not self.words.load(JOURNAL_READY):
            return False
        return self._map[DEVICE : BOOT + 16] == self._identity()

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
        for name in self._directory.names():
            if name.startswith(NAME + "."):
                with contextlib.suppress(OSError):
                    self._directory.remove(name)

    # ---- slots ---------------------------------------------------------------------------

    def join(self, name: str, properties: Mapping[str, str], keepalive: float | None) -> Slot:
        """Take a slot for a new engine. Call it while `opening`."""
        info = msgpack.packb([name, dict(properties), __version__])
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
        a gap: ns of the machine's monotonic clock."""
        return self.words.load64(OPENED)

    def _taken(self) -> Iterator[tuple[int, str]]:
        for index, engine in self.words.taken(SLOTS + ENGINE, SLOT_SIZE, SLOT_COUNT):
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
            name, properties, _ = msgpack.unpackb(self._map[at + INFO : at + INFO + length])
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

    def await_topics(self, words: Sequence[int], seen: Sequence[int], seconds: float) -> None:
        """Sleep until one of the counters at `words` is no longer what was `seen`, or a while has
        passed."""
        for at in words:
            self.words.add(at + 4, 1)
        try:
            longest = READER_LOOK_UP_SECONDS if self.shared else POLL_SECONDS
            if len(words) > _core.MOST_WAITED_FOR:
                longest = POLL_SECONDS
            longest = min(longest, max(0.0, seconds))
            if not self.words.wait_any(list(words), list(seen), int(longest * 1e9)):
                self.words.wait(words[0], seen[0], int(min(longest, POLL_SECONDS) * 1e9))
        finally:
            for at in words:
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
        self._hold = _core.Hold(words, self._at + ALIVE, self._at + NODE, self._at + PRESENCE)
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
        return frozenset(i for i, word in self._others() if not word & _core.OWNER_DIED)

    def _others(self) -> list[tuple[int, int]]:
        """(slot, liveness) of those that are taken, our own left out."""
        found = self._file.words.taken(SLOTS + ALIVE, SLOT_SIZE, SLOT_COUNT)
        return [
            (index, word)
            for index, pair in found
            if (word := pair & 0xFFFF_FFFF) and index != self.index
        ]

    def await_mail_or_death(
        self, seen: int, arrivals: int, living: frozenset[int], timeout: float
    ) -> None:
        """Sleep until mail comes, an engine dies, or one joins; also if that has happened since
        the first three arguments were read. At most as long as all engines together may look
        `LOOKS_PER_SECOND` times a second for what wakes nobody."""
        longest = max(LOOK_UP_SECONDS, len(living) / LOOKS_PER_SECOND)
        end = time.monotonic() + min(timeout, longest)
        while not self._is_called(seen, arrivals, living) and time.monotonic() < end:
            self._doze(seen, arrivals, end - time.monotonic())

    def _is_called(self, seen: int, arrivals: int, living: frozenset[int]) -> bool:
        return (
            self.mail_count() != seen
            or self.arrivals() != arrivals
            or any(word & _core.OWNER_DIED and i in living for i, word in self._others())
        )

    def _doze(self, seen: int, arrivals: int, timeout: float) -> None:
        words = self._file.words
        offsets, expected = [self._at + MAIL, ARRIVALS], [seen, arrivals]
        others = [index for index, word in self._others() if not word & _core.OWNER_DIED]
        timeout = min(timeout, LOOK_UP_SECONDS * max(1.0, len(others) / MOST_WATCHED))
        if len(others) > MOST_WATCHED:
            # The kernel takes no more words. In a crowd, each is among those that some have drawn.
            others = random.sample(others, MOST_WATCHED)
        for index in others:
            at = SLOTS + index * SLOT_SIZE
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
        ns = int(max(timeout, 0.0) * 1e9)
        if not words.wait_any(offsets, expected, ns):
            words.wait(self._at + MAIL, seen, min(ns, int(POLL_SECONDS * 1e9)))

    def leave(self) -> None:
        """Give the slot back. A second time does nothing: it may be somebody else's by then."""
        if self._hold.tid == 0:
            return
        self._file.words.store64(self._at + ENGINE, 0)
        self._hold.release()

    def forget(self) -> None:
        """In a forked child: the slot is the parent's."""
        self._hold.forget()


def _can_be_shared(directory: Directory) -> bool:
    try:
        os.close(directory.open(NAME, os.O_RDWR))
    except OSError:
        return False
    return True


def make_lock_file(directory: Directory, mode: int = 0o600) -> int:
    """A descriptor of the lock file, which is made if there is none."""
    deadline = time.monotonic() + OPENING_TIMEOUT
    while True:
        try:
            return directory.open(NAME, os.O_RDWR)
        except FileNotFoundError:  # again: another version removes what it takes for an old one
            if time.monotonic() > deadline:
                raise
        _make_whole(directory, mode)


def _make_whole(directory: Directory, mode: int) -> None:
    # Made whole under another name, then linked: two creators cannot both win, and a
    # creator that dies leaves nothing half made.
    temporary = f"{NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = directory.make(temporary, os.O_RDWR | os.O_EXCL, mode)
    try:
        os.posix_fallocate(fd, 0, SIZE)  # a full disk must fail here, not as SIGBUS later
        os.pwrite(fd, MAGIC.to_bytes(8, "little"), 0)
        os.fsync(fd)
        # Gone: somebody else was first, and took this for the leftover of a dead creator.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            directory.link(temporary, NAME)
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            directory.remove(temporary)


def _replace(directory: Directory, fd: int, mode: int) -> int:
    """A lock file in place of `fd`, another version's, if no engine of any version lives."""
    try:
        _lock_alone(fd, os.path.join(directory.path, NAME))
        facts = directory.facts(NAME)
        if facts is not None and os.path.samestat(facts, os.fstat(fd)):
            refuse_other_lock_file(directory, readonly=False)
            # A process of that version that waits for this lock must not believe its words.
            os.pwrite(fd, bytes(TOPICS), 0)
            directory.remove(NAME)
    finally:
        os.close(fd)
    return make_lock_file(directory, mode)


def _lock_alone(fd: int, path: str) -> None:
    """Every version holds this lock while it opens a ledger."""
    deadline = time.monotonic() + OPENING_TIMEOUT
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerVersionError(
                    f"{path} is another version's of exclusivelog, and has been locked by a "
                    f"process of it for {OPENING_TIMEOUT:.0f} s; close that process first"
                ) from None
        time.sleep(0.002)
