"""Liveness: slots of the lock file, one for each open engine, with its heartbeat and description.

```text
69632    512 x 1024  slots, one per open engine:
           0   4     liveness: 0 free, else the holder's thread id; the kernel sets
                     OWNER_DIED when that thread dies
           4   4     process id, for messages
           8   8     the kernel's list node for the liveness value
          16   8     engine id, 0 while the slot is being taken or released
          24   8     last heartbeat, ns of the machine's monotonic clock
          32   8     keepalive, ns; 0 = never evicted for silence
          40   4     wake-up counter: incremented for each notification
          44   4     length of the description
          48   8     inode of the pid namespace in which the process ids are valid
          56   4     the holder's thread waits on it: if a wake-up call reaches the thread, caller
          and holder share this memory 64 960     description: msgpack [engine name, properties,
          version of the library]
```

The places of liveness, pid, engine id and description are the same in all versions: versions.py
reads them.

Liveness is a value in the kernel's robust list, not a file lock: when a process dies, the kernel
walks the list before it frees the process's memory, so that a take-over does not wait for that (0.3
ms for 1 GiB, where an OFD lock took 25 ms: `python -m bench.liveness`), and a forked child inherits
nothing. A death of which that list does not tell (memory that was freed before, a core dump, a
system without such lists) is found by looking: `_native/deaths.h` marks the value within half a
second. Liveness does not give the right to write: the epoch in the ledger does (rule B2).

**Presence**: the kernel's locks, and not shared memory, show which processes have a ledger open. A
process holds shared open-file locks of `journal`, `data.mdb` and `owners.lock` while it has the
ledger open. If it gets all of them exclusively, it is alone: then it initialises the lock file and
recovers the journal (rule H3). Else it joins live engines, and leaves the shared memory as it is.

It locks three files because one may have been replaced while an engine had it open. The kernel
drops the locks when the last process with these descriptors closes them, or dies. They do not
conflict with any program's `flock`.

**Stalled processes**: a thread holds the writer lock for microseconds at an append, and for about a
millisecond at a change of the tables; the kernel frees the lock when the thread dies. But a process
that is *stopped* there (SIGSTOP, a debugger, a frozen container) blocks all others: a lock cannot
be taken from a thread that may resume at any time. `StallWatch` logs which process it is.

With `kill_stalled=True`, it is killed once it has been silent for longer than its own `keepalive`
(rule C3); so is a process that is stopped inside a read (see storage/usage.py).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from exclusivelog import _core, logs
from exclusivelog.errors import LedgerError, LedgerFullError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.files import (
    DATA,
    JOURNAL,
    OWNERS,
    Directory,
    close_locked,
    is_locked,
    lock_open_file,
    pid_namespace,
)
from exclusivelog.local.shm import tasks
from exclusivelog.local.shm.tasks import is_stopped, process_of
from exclusivelog.types import EngineInfo
from exclusivelog.version import __version__
from exclusivelog.waits import Waited

# ---- slots -----------------------------------------------------------------------------


ARRIVALS, OPENED, NAMESPACE = 40, 48, 56  # in the file's header
SLOTS, SLOT_COUNT, SLOT_SIZE = 69632, 512, 1024
ALIVE, PID, NODE, ENGINE, HEARTBEAT, KEEPALIVE, WAKE_UPS, INFO_SIZE, PIDS, PRESENCE, INFO = (
    0, 4, 8, 16, 24, 32, 40, 44, 48, 56, 64,
)  # fmt: skip

# Poll this often in addition: the kernel wakes only one waiting process at a death, and that one
# may be stopped.
LOOK_UP_SECONDS = 0.25
# All engines together poll this often for events without a wake-up, such as a stalled engine.
POLLS_PER_SECOND = 100
MOST_WATCHED = _core.MOST_WAITED_FOR - 2  # the other two are the wake-up counter and the arrivals
POLL_SECONDS = 0.02  # used if a thread cannot wait for all counters at once

LONGEST_BEAT_SECONDS = 5.0
# Between heartbeats that are more frequent than those of the engine need to be, because of others.
SHORTEST_WATCH_SECONDS = 0.05
FIRST_BEAT_SECONDS = 0.25  # after which an engine knows how often its heartbeats have to come
MOST_PAUSES = 1000  # that are remembered
LEAST_PAUSE_NS = 100_000_000  # a busy machine lets a thread wait for less than this


def own_beat_seconds(keepalive: float | None) -> float:
    """Seconds between the heartbeats that an engine with this keepalive needs."""
    return LONGEST_BEAT_SECONDS if keepalive is None else min(LONGEST_BEAT_SECONDS, keepalive / 4)


class Observer:
    """Remembers when this process did not run itself: what it did not hear meanwhile is no silence
    of others (rule C9). After a pause of the whole machine all engines are silent, and the first
    that resumes must not evict the others.

    A process runs if its heartbeats come when they are due, and when it judges. Times are in ns of
    `_core.now`.
    """

    def __init__(self) -> None:
        self._beats = dict[str, int]()  # of the engines of this process: the time between two
        self._due = 0  # the shortest of them
        self.last = 0  # when this process was known to run
        self._pauses = deque[tuple[int, int]](maxlen=MOST_PAUSES)  # (begin, end), in order

    def begin(self, engine: str, now: int) -> None:
        """An engine of this process begins its heartbeats."""
        if not self._beats:  # what was before has not been observed
            self.last = now
            self._pauses.clear()
        self.expect(engine, FIRST_BEAT_SECONDS)

    def expect(self, engine: str, seconds: float) -> None:
        """The engine's next heartbeat comes in so many seconds."""
        self._beats[engine] = int(seconds * 1e9)
        self._choose_due()

    def end(self, engine: str) -> None:
        """An engine of this process has ended its heartbeats."""
        self._beats.pop(engine, None)
        self._choose_due()

    def _choose_due(self) -> None:
        # None: the thread of another engine may end the last heartbeats meanwhile.
        self._due = min(list(self._beats.values()), default=0)

    def note(self, now: int) -> None:
        """This process runs now."""
        if self._beats:
            late = now - self.last - self._due
            if late >= LEAST_PAUSE_NS:
                # Before `last`: another thread that finds it set also finds the pause.
                self._pauses.append((now - late, now))
            self.last = max(self.last, now)

    def missed(self, since: int) -> int:
        """For how long this process has not run since then."""
        total, counted = 0, 2**64  # later than any
        for begin, end in reversed(self._pauses.copy()):
            if end <= since:
                break
            # Two threads may have noted the same pause.
            total += max(0, min(end, counted) - max(begin, since))
            counted = min(counted, begin)
        return total


class Slots:
    """All slots of the lock file at `path`."""

    def __init__(self, path: str, memory: mmap.mmap, atomics: _core.SharedWords) -> None:
        self.path = path
        self.memory = memory
        self.atomics = atomics
        self.observer = Observer()
        self._shortest = (-1, 0)  # `ARRIVALS` when it was read, and the shortest keepalive

    def join(
        self,
        name: str,
        properties: Mapping[str, str],
        keepalive: float | None,
        libraries: Sequence[str] = (),
    ) -> Slot:
        """Take a slot for a new engine; `keepalive` in seconds, `libraries`: the optional libraries
        that it has. Call it while the lock file is locked for opening.

        Raises ValueError if the description is too long, LedgerFullError if no slot is free.
        """
        info = msgpack.packb([name, dict(properties), __version__, list(libraries)])
        if len(info) > SLOT_SIZE - INFO:
            raise ValueError(
                f"name= and properties= of an engine take {SLOT_SIZE - INFO} bytes at most, "
                f"these take {len(info)}"
            )
        if not any(self.exists(index, engine) for index, engine in self._taken()):
            self.atomics.store64(OPENED, _core.now())
        for index in range(SLOT_COUNT):
            at = SLOTS + index * SLOT_SIZE
            if self._is_free(at):
                with Ignoring(BlockingIOError):
                    return Slot(self, index, info, keepalive)
        raise LedgerFullError(
            f"{self.path}: {SLOT_COUNT} engines have the ledger open, the most possible; close one"
        )

    @property
    def opened(self) -> int:
        """When the ledger was opened by the first engine after a time without any, in ns of the
        machine's monotonic clock."""
        return self.atomics.load64(OPENED)

    def _taken(self) -> Iterator[tuple[int, str]]:
        for index, engine in self.atomics.taken(SLOTS + ENGINE, SLOT_SIZE, SLOT_COUNT):
            yield index, f"{engine:016x}"

    def _is_free(self, at: int) -> bool:
        liveness = self.atomics.load(at + ALIVE)
        if liveness & _core.HELD_BY:
            return False
        if liveness:
            # Clear the id first: a process that still sees the old id then sees it as dead.
            self.atomics.store64(at + ENGINE, 0)
            self.atomics.store(at + ALIVE, 0)
        return True

    # ---- which engines live --------------------------------------------------------------

    def alive(self, slot: int, engine: str) -> bool:
        """Is this engine's process alive, with a heartbeat within its keepalive (rules C2, C3)?"""
        if not self.exists(slot, engine):
            return False
        at = SLOTS + slot * SLOT_SIZE
        if self.atomics.load(at + PID) == os.getpid():
            return True  # its process runs, and is about to send a heartbeat
        keepalive = self.atomics.load64(at + KEEPALIVE)
        now, heard = _core.now(), self.atomics.load64(at + HEARTBEAT)
        if keepalive == 0 or now - heard <= keepalive:
            return True
        self.observer.note(now)
        return now - heard - self.observer.missed(heard) <= keepalive

    def beat_seconds(self, keepalive: float | None) -> float:
        """Seconds between the heartbeats of an engine with this keepalive: short enough also to
        notice a pause of this process in which another engine may have become silent."""
        arrivals = self.atomics.load(ARRIVALS)
        if self._shortest[0] != arrivals:
            places = (SLOTS + index * SLOT_SIZE for index, _ in self._taken())
            found = filter(None, (self.atomics.load64(at + KEEPALIVE) for at in places))
            self._shortest = arrivals, min(found, default=0)
        others, own = self._shortest[1] / 1e9, own_beat_seconds(keepalive)
        return min(own, max(others / 4, SHORTEST_WATCH_SECONDS)) if others else own

    def exists(self, slot: int, engine: str) -> bool:
        """Is this engine's process alive? It may be unresponsive, and read its notifications
        later."""
        if slot >= SLOT_COUNT:  # a damaged row says so
            return False
        at = SLOTS + slot * SLOT_SIZE
        wanted = int(engine, 16)
        if self.atomics.load64(at + ENGINE) != wanted:
            return False
        liveness = self.atomics.load(at + ALIVE)
        held = liveness & _core.HELD_BY and not liveness & _core.OWNER_DIED
        return bool(held) and self.atomics.load64(at + ENGINE) == wanted

    def engines(self) -> list[EngineInfo]:
        """The live engines."""
        found = [
            (index, self._info(index, engine))
            for index, engine in self._taken()
            if self.alive(index, engine)
        ]
        # Check again: the facts are theirs only if they still have the slot.
        return [info for index, info in found if self.exists(index, info.id)]

    def present(self) -> list[EngineInfo]:
        """The engines whose processes are alive, including unresponsive ones."""
        return [
            self._info(index, engine)
            for index, engine in self._taken()
            if self.exists(index, engine)
        ]

    def unresponsive(self) -> list[EngineInfo]:
        """The engines whose processes are alive, but silent for longer than their keepalive."""
        found = [
            (index, self._info(index, engine))
            for index, engine in self._taken()
            if not self.alive(index, engine)
        ]
        return [info for index, info in found if self.exists(index, info.id)]

    def find(self, engine: str) -> tuple[int, EngineInfo] | None:
        """(slot, facts) of a live engine."""
        for index, other in self._taken():
            if other == engine and self.alive(index, engine):
                return index, self._info(index, engine)
        return None

    def silent_for(self, engine: str) -> float | None:
        """Seconds since the last heartbeat of an engine, live or dead; None once its slot is
        free."""
        for index, other in self._taken():
            if other == engine:
                return self._info(index, engine).heartbeat_age
        return None

    def in_process(self, pid: int) -> Iterator[tuple[int, EngineInfo]]:
        """(slot, facts) of the engines of a process, including unresponsive ones. `pid`: in this
        pid namespace."""
        namespace = pid_namespace()
        for index, engine in self._taken():
            at = SLOTS + index * SLOT_SIZE
            process = self.atomics.load(at + PID), self.atomics.load64(at + PIDS)
            if process == (pid, namespace) and self.exists(index, engine):
                yield index, self._info(index, engine)

    def without(self, library: str) -> list[EngineInfo]:
        """The live engines that lack this optional library."""
        return [
            self._info(index, engine)
            for index, engine in self._taken()
            if (noted := self._description_row(index)[3:])
            and library not in noted[0]
            and self.exists(index, engine)
        ]

    def _description_row(self, index: int) -> list[Any]:
        """The description in an engine's slot: [name, properties, version, libraries]."""
        at = SLOTS + index * SLOT_SIZE
        length = self.atomics.load(at + INFO_SIZE)
        try:
            return list(msgpack.unpackb(self.memory[at + INFO : at + INFO + length]))
        except (ValueError, TypeError):  # an engine is taking the slot, and has not filled it in
            return ["", {}]

    def _description(self, index: int) -> tuple[str, dict[str, str]]:
        name, properties, *_ = self._description_row(index)
        return name, properties

    def _info(self, index: int, engine: str) -> EngineInfo:
        at = SLOTS + index * SLOT_SIZE
        name, properties = self._description(index)
        age = max(0, _core.now() - self.atomics.load64(at + HEARTBEAT)) / 1e9
        return EngineInfo(engine, name, self.atomics.load(at + PID), properties, age)

    def notify(self, slot: int) -> None:
        """Wake an engine, after a notification was written for it."""
        if slot >= SLOT_COUNT:  # a damaged row says so
            return
        at = SLOTS + slot * SLOT_SIZE + WAKE_UPS
        self.atomics.add(at, 1)
        self.atomics.wake(at)

    # ---- engines that must not be open ---------------------------------------------------

    def refuse_other_namespaces(self) -> None:
        """LedgerError while an engine of another pid namespace is open: locks and LMDB's table of
        readers have thread and process ids, which are ambiguous between containers."""
        ours = pid_namespace()
        if self.atomics.load64(NAMESPACE) not in (0, ours):
            raise self._of_other_namespace("a process")
        for index, engine in self._taken():
            theirs = self.atomics.load64(SLOTS + index * SLOT_SIZE + PIDS)
            if theirs != ours and self.exists(index, engine):
                raise self._of_other_namespace(f"{self._info(index, engine).name!r}, an engine")

    def _of_other_namespace(self, who: str) -> LedgerError:
        return LedgerError(
            f"{self.path} is in use by {who} of another pid namespace (such as a container); "
            "processes that share a ledger must share a pid namespace"
        )

    def refuse_engines_that_answer(self) -> None:
        """LedgerError if a thread waits on a slot in this memory although the locks show no engine:
        it has the same memory through another file system (an overlay and its upper directory)."""
        for index, engine in self._taken():
            if not self.exists(index, engine):
                continue
            at = SLOTS + index * SLOT_SIZE
            thread = self.atomics.load(at + ALIVE) & _core.HELD_BY
            if self.atomics.wake(at + PRESENCE) or is_stopped(thread):
                raise LedgerError(
                    f"{self.path} is in use by engine {self._info(index, engine).name!r} (pid "
                    f"{self.atomics.load(at + PID)}) through another path; open the "
                    "ledger by one path only, as others (an overlay, for example) share no "
                    "locks. If this is a copy, remove its owners.lock"
                )


class Slot:
    """One engine's slot, held until `leave` or the death of the process."""

    def __init__(self, slots: Slots, index: int, info: bytes, keepalive: float | None) -> None:
        self._at = SLOTS + index * SLOT_SIZE
        self._atomics = atomics = slots.atomics
        self._observer = slots.observer
        self.wake_ups = self._at + WAKE_UPS  # the place of the wake-up counter
        self.index = index
        self.engine = f"{int.from_bytes(os.urandom(8)) >> 1 | 1:016x}"
        self._hold = _core.Hold(atomics, self._at + ALIVE, self._at + NODE, self._at + PRESENCE)
        atomics.store(self._at + PID, os.getpid())
        atomics.store64(self._at + PIDS, pid_namespace())
        atomics.store64(self._at + KEEPALIVE, 0 if keepalive is None else int(keepalive * 1e9))
        atomics.store(self._at + INFO_SIZE, len(info))
        slots.memory[self._at + INFO : self._at + INFO + len(info)] = info
        self._observer.begin(self.engine, _core.now())
        self._id = int(self.engine, 16)
        self._store_beat()
        atomics.store64(self._at + ENGINE, self._id)
        atomics.add(ARRIVALS, 1)
        atomics.wake(ARRIVALS)
        if own_beat_seconds(keepalive) < LONGEST_BEAT_SECONDS:
            # The others beat more often from now on: see `Slots.beat_seconds`.
            for index, _ in self._others():
                slots.notify(index)

    def beat(self) -> None:
        """Store a heartbeat, which shows that the process is responsive (rule C3). Not if the slot
        is another engine's by now: a thread that was left behind must not beat for that one."""
        if self._atomics.load64(self._at + ENGINE) == self._id:
            self._store_beat()

    def _store_beat(self) -> None:
        now = _core.now()
        self._atomics.store64(self._at + HEARTBEAT, now)
        observer = self._observer
        if now - observer.last < LEAST_PAUSE_NS:  # it matters to no keepalive
            observer.last = now
        else:
            observer.note(now)

    def expect_beat(self, seconds: float) -> None:
        """The next heartbeat comes in so many seconds."""
        self._observer.expect(self.engine, seconds)

    def wake_up_count(self) -> int:
        """The counter that each notification increments."""
        return self._atomics.load(self.wake_ups)

    def await_wake_up(self, seen: int, timeout: float) -> None:
        """Wait for a notification, `timeout` seconds at most."""
        self._atomics.wait(self.wake_ups, seen, int(timeout * 1e9))

    def arrivals(self) -> int:
        """The counter that each engine increments when it joins."""
        return self._atomics.load(ARRIVALS)

    def living(self) -> frozenset[int]:
        """The slots of the other live engines, for `await_wake_up_or_death`."""
        return frozenset(i for i, liveness in self._others() if not liveness & _core.OWNER_DIED)

    def _others(self) -> list[tuple[int, int]]:
        """(slot, liveness) of the taken slots except this one."""
        found = self._atomics.taken(SLOTS + ALIVE, SLOT_SIZE, SLOT_COUNT)
        return [
            (index, liveness)
            for index, pair in found
            if (liveness := pair & 0xFFFF_FFFF) and index != self.index
        ]

    def await_wake_up_or_death(
        self, seen: int, arrivals: int, living: frozenset[int], timeout: float
    ) -> None:
        """Wait for a notification, an engine's death or an arrival; return at once if one came
        since the first three arguments were read. `timeout` is in seconds; the wait may be shorter,
        so that all engines together poll `POLLS_PER_SECOND` times a second."""
        longest = max(LOOK_UP_SECONDS, len(living) / POLLS_PER_SECOND)
        end = _core.monotonic() + min(timeout, longest)
        while not self._is_called(seen, arrivals, living) and _core.monotonic() < end:
            self._wait(seen, arrivals, end - _core.monotonic())

    def _is_called(self, seen: int, arrivals: int, living: frozenset[int]) -> bool:
        return (
            self.wake_up_count() != seen
            or self.arrivals() != arrivals
            or any(liveness & _core.OWNER_DIED and i in living for i, liveness in self._others())
        )

    def _wait(self, seen: int, arrivals: int, timeout: float) -> None:
        atomics = self._atomics
        offsets, expected = [self.wake_ups, ARRIVALS], [seen, arrivals]
        others = [index for index, liveness in self._others() if not liveness & _core.OWNER_DIED]
        timeout = min(timeout, LOOK_UP_SECONDS * max(1.0, len(others) / MOST_WATCHED))
        if len(others) > MOST_WATCHED:
            # The kernel takes no more. Each engine watches a random sample, so that every engine is
            # watched.
            others = random.sample(others, MOST_WATCHED)
        for index in others:
            at = SLOTS + index * SLOT_SIZE
            # The kernel wakes waiting threads only if this bit is set. Set for an engine that has
            # just died or left, it does no harm: its liveness is checked again.
            liveness = atomics.mark(at, _core.SLEEPERS)
            if liveness == _core.SLEEPERS:
                atomics.swap(at, liveness, 0)
                return
            if liveness & _core.OWNER_DIED:
                return
            offsets.append(at)
            expected.append(liveness)
        ns = int(max(timeout, 0.0) * 1e9)
        if not atomics.wait_any(offsets, expected, ns):
            atomics.wait(self.wake_ups, seen, min(ns, int(POLL_SECONDS * 1e9)))

    def leave(self) -> None:
        """Release the slot. A second call has no effect, as another engine may have the slot."""
        if self._hold.tid == 0:
            return
        self._atomics.store64(self._at + ENGINE, 0)
        self._hold.release()
        self._observer.end(self.engine)

    def forget(self) -> None:
        """Drop the slot, without releasing it, in a forked child."""
        self._hold.forget()


# ---- open files ------------------------------------------------------------------------


FILES = (JOURNAL, DATA, OWNERS)
ATTEMPT_SECONDS = 1.0  # a dying process keeps its locks for a moment


class Presence:
    """This process's locks on a ledger. Create it while the lock file is locked for opening."""

    def __init__(self, directory: Directory) -> None:
        self._path = directory.path
        self._fds: list[int] = []
        self._process = _core.this_process()
        self.alone = False
        try:
            for name in FILES:
                self._fds.append(directory.open(name, os.O_RDWR))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the locks; in a forked child, only close the parent's descriptors. A second call
        has no effect."""
        while self._fds:
            close_locked(self._fds.pop(), self._process)

    def enter(self) -> None:
        """Take the locks. Is this process alone? From now on, no other process can be."""
        waited = Waited()
        # A dying process that was alone releases its locks one after the other. Meanwhile this
        # process gets neither all of them nor a share, so retry.
        while not (self._take_alone() or self._lock("read")):
            if waited.seconds > ATTEMPT_SECONDS:
                raise self._opened_elsewhere()
            time.sleep(0.002)
        self._show_earlier_versions()

    def _show_earlier_versions(self) -> None:
        # Versions before lock-file version 4 remove the lock file of a later one unless a process
        # holds a `flock` of the journal. Only they use this lock.
        with Ignoring(OSError):
            fcntl.flock(self._fds[0], fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def data(self) -> int:
        """The descriptor of data.mdb."""
        return self._fds[FILES.index(DATA)]

    @property
    def files(self) -> dict[str, int]:
        """The open files, by name."""
        return dict(zip(FILES, self._fds, strict=True))

    @property
    def beside_others(self) -> bool:
        """Do other processes hold such locks, too?"""
        return is_locked(self._fds[0])

    def admit_others(self) -> None:
        """Recovery is complete: let other processes join."""
        if self.alone:
            self.alone = False
            if not self._lock("read"):
                raise self._opened_elsewhere()

    def _take_alone(self) -> bool:
        self.alone = self._lock("write")
        return self.alone

    def _lock(self, kind: str) -> bool:
        return all(lock_open_file(fd, kind) for fd in self._fds)

    def _opened_elsewhere(self) -> LedgerError:
        return LedgerError(
            f"{self._path} is being opened by another process with another lock file; was "
            "owners.lock replaced? Close every engine, then open it"
        )


def writers_live(journal: int) -> bool:
    """Does an engine have the ledger open to write? `journal` is a descriptor of the journal."""
    return is_locked(journal)


# ---- stalled processes -----------------------------------------------------------------


log = logging.getLogger(__name__)

# A wait looks at the holder every half second. It is reported at the second look, or, if it runs or
# waits for a CPU, as on a busy machine, after so many seconds.
LASTING_SECONDS, BUSY_SECONDS = 0.4, 5.0


@dataclass
class Stall:
    """A thread that holds a lock. One of the numbers in `progress` changes if it makes progress."""

    progress: tuple[int, ...]
    since: int  # when it was first seen, ns
    reported: bool = False


class StallWatch:
    """Logs each process that blocks others once, and kills it where `kill_stalled` allows that.

    `killers` counts the engines of this process that were opened with `kill_stalled`.
    """

    def __init__(self, path: str, slots: Slots, journal: _core.Journal, killers: int) -> None:
        self.killers = killers
        self._path = path
        self._slots = slots
        self._journal = journal  # a reference cycle, which the journal's close breaks
        self._reader = 0  # the stopped thread with LMDB's lock of readers that was reported
        self._stalls = dict[int, Stall]()  # of the threads that hold a lock, as last looked at

    def stalled(self, thread: int) -> str:
        """Callback of the journal: this process has waited for that thread for half a second.
        Returns who holds the lock."""
        # The thread may itself wait for another thread, which is stopped.
        inside = [other for other in self._inside() if other]
        thread = next(filter(is_stopped, inside), thread)
        self._report(thread)
        if self.killers:
            for suspect in {thread, *inside}:
                self._kill_if_inside(suspect)
        return self.describe(thread)

    def check_readers(self, holder: Callable[[], int]) -> None:
        """Callback of `_core.DeathWatch`: this process has waited for LMDB's lock of readers for
        half a second. Logs a holder that is stopped, and kills it if that is allowed. `holder()`:
        its thread."""
        thread = holder()
        if not thread or not is_stopped(thread):
            self._reader = 0
            return
        if thread != self._reader:
            self._reader = thread
            self._log(thread, "all readers", "LMDB's lock of readers")
        pid = process_of(thread)
        if pid is not None:
            self.kill_if_stalled(pid, lambda: holder() == thread, "while it begins a read")

    def holder(self) -> str | None:
        """Who appends or holds the writer lock without making progress, if any. A process that does
        so for a moment is not named."""
        inside = [thread for thread in self._inside() if thread]
        waited_for = (thread for thread in inside if self._is_reported(thread))
        thread = next(filter(is_stopped, inside), next(waited_for, None))
        return None if thread is None else self._describe(thread)[0]

    def _inside(self) -> tuple[int, int]:
        threads: tuple[int, int] = self._journal.inside
        return threads

    def _report(self, thread: int) -> None:
        """Log a holder that makes no progress. On a busy machine a wait may last although the lock
        goes from hand to hand, or this process may not have run itself."""
        stall, state = self._look(thread), tasks.state_of(thread)
        least = {tasks.STOPPED: 0.0, tasks.RUNS: BUSY_SECONDS}.get(state, LASTING_SECONDS)
        if not stall.reported and self._seconds(stall) >= least:
            stall.reported = True
            self._log(thread, "all writers", "the writer lock")

    def _log(self, thread: int, waiting: str, lock: str) -> None:
        holder, pid, engines = self._describe(thread)
        logs.emit(
            log,
            logs.SLOW_LOCK,
            ledger=self._path,
            **_of_process(pid, engines),
            holder=holder,
            waiting=waiting,
            lock=lock,
            doing=tasks.DOING[tasks.state_of(thread)],
        )

    def _look(self, thread: int) -> Stall:
        stall, progress = self._stalls.get(thread), self._progress(thread)
        if stall is None or stall.progress != progress:
            stall = Stall(progress, _core.now())
        inside = self._inside()
        kept = {other: each for other, each in self._stalls.items() if other in inside}
        self._stalls = {**kept, thread: stall}
        return stall

    def _seconds(self, stall: Stall) -> float:
        """For how long it has lasted, while this process ran."""
        now, observer = _core.now(), self._slots.observer
        observer.note(now)
        return (now - stall.since - observer.missed(stall.since)) / 1e9

    def _is_reported(self, thread: int) -> bool:
        stall = self._stalls.get(thread)
        return stall is not None and stall.reported and stall.progress == self._progress(thread)

    def _progress(self, thread: int) -> tuple[int, ...]:
        appends = self._inside()[0] == thread
        return self._journal.version, self._journal.tail if appends else 0

    def describe(self, thread: int) -> str:
        """The engines of a thread's process, or else the thread, for a message."""
        return self._describe(thread)[0]

    def _describe(self, thread: int) -> tuple[str, int | None, list[EngineInfo]]:
        """The text about a thread, its process and the engines there."""
        pid = process_of(thread)
        engines = [] if pid is None else [each for _, each in self._slots.in_process(pid)]
        name = f"thread {thread}" if pid is None else tasks.name_of(pid)
        return ", ".join(map(describe, engines)) or name, pid, engines

    def _kill_if_inside(self, thread: int) -> None:
        pid = process_of(thread)
        if pid is not None:
            # A thread that still holds the lock is alive, so its id was not reused.
            self.kill_if_stalled(
                pid,
                lambda: thread in self._inside() and process_of(thread) == pid,
                "while it holds the writer lock",
            )

    def kill_if_stalled(self, pid: int, holds: Callable[[], bool], where: str) -> None:
        """Kill another process if `kill_stalled` allows it, and all engines of that process have
        been silent for longer than their keepalive. `holds()`: does it still block others? `where`:
        the blocked resource, for the log."""
        if self.killers and pid != os.getpid():
            engines = list(self._slots.in_process(pid))
            if self._all_stalled(engines):
                self._kill(pid, holds, where, [engine for _, engine in engines])

    def _all_stalled(self, engines: list[tuple[int, EngineInfo]]) -> bool:
        alive = self._slots.alive
        return bool(engines) and not any(alive(slot, engine.id) for slot, engine in engines)

    def _kill(
        self, pid: int, holds: Callable[[], bool], where: str, engines: list[EngineInfo]
    ) -> None:
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            pass_on_foreign(error)
            return  # it has ended
        try:
            # Check again: this process may have been stopped itself, while the other one resumed.
            if holds() and self._all_stalled(list(self._slots.in_process(pid))):
                logs.emit(
                    log,
                    logs.KILLING,
                    ledger=self._path,
                    **_of_process(pid, engines),
                    holder=", ".join(map(describe, engines)),
                    reason=where,
                )
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError as error:
            pass_on_foreign(error)
            logs.emit(log, logs.NOT_KILLED, ledger=self._path, pid=pid, reason=str(error))
        finally:
            os.close(process)

    def inside(self) -> EngineInfo | None:
        """The engine that appends or holds the writer lock now, if any."""
        for thread in self._inside():
            pid = process_of(thread) if thread else None
            for _, engine in () if pid is None else self._slots.in_process(pid):
                return engine
        return None


def _of_process(pid: int | None, engines: list[EngineInfo]) -> dict[str, Any]:
    """The fields of a log line about a process and its first engine."""
    if not engines:
        return {"pid": pid}
    return {"pid": pid, "engine": engines[0].name, "engine_id": engines[0].id}


def describe(engine: EngineInfo) -> str:
    """An engine and how long it has been silent, for a message."""
    return (
        f"engine {engine.name!r} (id {engine.id}, pid {engine.pid}), silent for "
        f"{engine.heartbeat_age:.1f} s"
    )
