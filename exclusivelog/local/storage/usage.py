"""Monitors a ledger's disk and map usage, and the reads that pin pages.

Each state that needs attention is logged once, until it ends: a disk with little room left, a map
that is nearly full, tables that grow, slow flushes, and reads that pin pages.

LMDB never reuses a page that the snapshot of an open read has. A process that is stopped inside a
read therefore makes `data.mdb` grow with every transaction of the others, and so does a thread that
reads for minutes. LMDB's table of readers identifies it. Places of dead readers in that table are
freed here, because LMDB itself frees them only when the table is full.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from exclusivelog import _core, logs
from exclusivelog.errors import ExclusiveLogError, LedgerIOError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.local.blocks import unshare
from exclusivelog.local.faults import translated
from exclusivelog.local.files import DATA, JOURNAL, Directory, read_whole
from exclusivelog.local.shm.slots import Slots, StallWatch, describe
from exclusivelog.local.storage.environment import MAP_RESERVED, Reading, parse_readers

if TYPE_CHECKING:
    from exclusivelog.local.storage.opening import OpenFiles

log = logging.getLogger(__name__)

READERS_SECONDS = 1.0  # between two checks of LMDB's table of readers
# A read is logged once it has been this many transactions behind for this many seconds.
STALLED_SECONDS = 10.0
STALLED_TRANSACTIONS = 10
ROOM_SECONDS = 10.0  # between two checks
BLOCKS_SECONDS = 1.0  # between two checks; a copy may fill the disk
# The disk has little room left if less than this share of it is free, at most `LOW_BYTES`, or less
# than `LEAST_BYTES`.
LOW_SHARE, LOW_BYTES, LEAST_BYTES = 0.02, 1 << 30, 64 << 20
SLOW_FLUSH_SECONDS = 1.0
MAP_SHARE = 0.8  # of map_size
GROWN_FROM = 256 << 20  # bytes; growth of smaller tables is not logged


class CheckInterval:
    """The interval of a periodic check, which one thread at a time makes."""

    def __init__(self) -> None:
        self._next = 0.0
        self._checking = threading.Lock()

    @property
    def due(self) -> bool:
        """Is the next check due now?"""
        return _core.monotonic() >= self._next

    @contextlib.contextmanager
    def claimed(self, seconds: float) -> Iterator[bool]:
        """Start a check: True, and the next one is due in `seconds`. False while another thread
        checks."""
        mine = self._checking.acquire(blocking=False)
        try:
            if mine:
                self._next = _core.monotonic() + seconds
            yield mine
        finally:
            if mine:
                self._checking.release()


# ---- reads that pin pages ----------------------------------------------------------------


def _culprit(reading: Reading) -> tuple[int, int]:
    # Several threads of another process may be stopped: log that process once.
    return reading.pid, reading.thread if reading.pid == os.getpid() else 0


def _is_gone(pid: int) -> bool:
    try:
        state = read_whole(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError) as error:
        pass_on_foreign(error)
        return True
    except (OSError, IndexError) as error:
        pass_on_foreign(error)
        return False
    return state in b"ZX"


class PinnedPages:
    """Finds reads that keep LMDB from reusing pages, and logs each once. With `kill_stalled`, kills
    unresponsive processes that make them. All engines of a process on a ledger share it."""

    def __init__(self, path: str, slots: Slots, watch: StallWatch | None) -> None:
        self._path = path
        self._slots = slots
        self._watch = watch
        self._interval = CheckInterval()
        self._since: dict[Reading, float] = {}  # when each read that is far behind was first seen
        self._logged: set[tuple[int, int]] = set()

    @property
    def due(self) -> bool:
        """Is the next check due?"""
        return self._interval.due

    def check(self, env: lmdb.Environment) -> None:
        """Log the reads that have gone on for too long. Takes some microseconds."""
        with self._interval.claimed(READERS_SECONDS) as taken:
            if taken:
                self._check(env)

    def oldest(self, env: lmdb.Environment) -> dict[str, object] | None:
        """The read with the oldest snapshot: its process, engine (None if unknown) and how many
        transactions it is behind; None if every read has the newest snapshot."""
        last = env.info()["last_txnid"]
        found = min(parse_readers(env.readers()), key=lambda each: each.transaction, default=None)
        if found is None or found.transaction >= last:
            return None
        return {
            "pid": found.pid,
            "engine": next((each.name for _, each in self._slots.in_process(found.pid)), None),
            "transactions_behind": last - found.transaction,
        }

    def describe_oldest(self, env: lmdb.Environment, pinned: int) -> str:
        """The read with the oldest snapshot, which pins so many bytes, for the text of an error;
        the empty string if every read has the newest snapshot."""
        last, now = env.info()["last_txnid"], _core.monotonic()
        found = min(parse_readers(env.readers()), key=lambda each: each.transaction, default=None)
        if found is None or found.transaction >= last:
            return ""
        seconds = now - self._since.setdefault(found, now)
        return (
            f"{pinned >> 10} KiB of it cannot be used again before a read ends that is "
            f"{last - found.transaction} transactions old and was first seen {seconds:.0f} s ago, "
            f"by {self._name(found)}"
        )

    def _check(self, env: lmdb.Environment) -> None:
        last, now = env.info()["last_txnid"], _core.monotonic()
        behind = {
            each
            for each in parse_readers(env.readers())
            if last - each.transaction >= STALLED_TRANSACTIONS
        }
        if any(_is_gone(each.pid) for each in behind):
            env.reader_check()
        self._since = {each: self._since.get(each, now) for each in behind}
        stalled = {
            _culprit(each): each
            for each, since in list(self._since.items())  # errors of sends add to it
            if now - since >= STALLED_SECONDS
        }
        for culprit, each in stalled.items():
            if culprit not in self._logged:
                self._report(each, last - each.transaction, now - self._since[each])
            self._kill(env, each)
        self._logged = set(stalled)

    def _report(self, reading: Reading, behind: int, seconds: float) -> None:
        engine = next((each for _, each in self._slots.in_process(reading.pid)), None)
        logs.emit(
            log,
            logs.PINNED,
            ledger=self._path,
            pid=reading.pid,
            seconds=seconds,
            behind=behind,
            engine=None if engine is None else engine.name,
            engine_id=None if engine is None else engine.id,
            holder=self._name(reading),
        )

    def _name(self, reading: Reading) -> str:
        engines = [each for _, each in self._slots.in_process(reading.pid)]
        name = ", ".join(map(describe, engines)) or f"process {reading.pid}"
        if reading.pid == os.getpid():
            threads = {thread.ident: thread.name for thread in threading.enumerate()}
            name += f", in its thread {threads.get(reading.thread, hex(reading.thread))!r}"
        return name

    def _kill(self, env: lmdb.Environment, reading: Reading) -> None:
        if self._watch is not None:
            with contextlib.suppress(lmdb.Error):
                self._watch.kill_if_stalled(
                    reading.pid, lambda: reading in parse_readers(env.readers()), "inside a read"
                )


# ---- disk and map ------------------------------------------------------------------------


class Disk(NamedTuple):
    """The bytes that this user can still write to the disk, and its size; `low`: little is left."""

    free: int
    size: int
    low: bool


class Room:
    """Monitors the room that is left for one ledger. All engines of a process on a ledger share
    it."""

    def __init__(self, path: str, directory: Directory) -> None:
        self._path = path
        self._directory = directory
        self._interval = CheckInterval()
        self._disk_low = False
        self._map_low = False
        self._used = 0

    @property
    def due(self) -> bool:
        """Is the next check due?"""
        return self._interval.due

    def check(self, env: lmdb.Environment) -> None:
        """Log a disk with little room left, or a map nearly full. Takes some microseconds."""
        with self._interval.claimed(ROOM_SECONDS) as taken:
            if taken:
                self._check_disk()
                self._check_map(env)

    def check_flush(self, ns: int) -> None:
        """Log a flush of this process that took long; `ns`: the slowest since the last call."""
        if ns >= SLOW_FLUSH_SECONDS * 1e9:
            logs.emit(log, logs.SLOW_FLUSH, ledger=self._path, seconds=ns / 1e9)

    def disk(self) -> Disk | None:
        """How much of the disk is left; None if the process cannot read that, because it has
        dropped privileges (writes then report the cause)."""
        try:
            facts = os.statvfs(self._directory.by_descriptor)
        except OSError as error:
            pass_on_foreign(error)
            return None
        free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        return Disk(free, size, free < max(min(LOW_SHARE * size, LOW_BYTES), LEAST_BYTES))

    def _check_disk(self) -> None:
        disk = self.disk()
        if disk is not None and disk.low != self._disk_low:
            self._disk_low = disk.low
            percent = 100 * disk.free / disk.size if disk.size else 0.0
            line = logs.DISK_LOW if disk.low else logs.DISK_ENOUGH
            logs.emit(log, line, ledger=self._path, free=disk.free, percent=percent)

    def _check_map(self, env: lmdb.Environment) -> None:
        info = env.info()
        used = (info["last_pgno"] + 1) * env.stat()["psize"]
        most = info["map_size"] - MAP_RESERVED
        if used > MAP_SHARE * most and not self._map_low:
            logs.emit(log, logs.MAP_LOW, ledger=self._path, used=used, map_size=most)
        self._map_low = used > MAP_SHARE * most
        before = self._used or used
        if used >= max(2 * before, GROWN_FROM):
            logs.emit(log, logs.MAP_GROWS, ledger=self._path, before=before, used=used)
            before = used
        self._used = before


class BlocksOfFiles:
    """Gives files that are written in place blocks of their own again: a copy or a snapshot of a
    ledger that is in use shares them. All engines of a process on a ledger share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._interval = CheckInterval()
        self._logged = False

    @property
    def due(self) -> bool:
        """Is the next check due?"""
        return self._interval.due

    def check(self, files: Mapping[str, tuple[int, int | None]]) -> None:
        """Look at {name: (descriptor, size)}. It takes some microseconds, unless there is a new
        copy."""
        with self._interval.claimed(BLOCKS_SECONDS) as taken:
            if taken:
                failed = [name for name, (fd, size) in files.items() if not self._own(fd, size)]
                if failed and not self._logged:
                    names = " and ".join(failed)
                    logs.emit(log, logs.BLOCKS_SHARED, ledger=self._path, files=names)
                self._logged = bool(failed)

    def _own(self, fd: int, size: int | None) -> bool:
        try:
            unshare(fd, size)
        except OSError as error:
            pass_on_foreign(error)
            return False
        return True


# ---- of one ledger -----------------------------------------------------------------------


class Usage:
    """The room that one ledger has, the sizes of its files, and the reads that pin its pages.

    - `fail`: called with an error after which the ledger cannot be used.
    - `environment`: gives LMDB's environment for the length of a block.
    - `large_bytes`: the bytes of the large entries that the tables refer to, in a transaction.
    - `grow`: makes a map larger that had to be smaller than it should be.
    """

    def __init__(
        self,
        files: OpenFiles,
        fail: Callable[[LedgerIOError], None],
        environment: Callable[[], contextlib.AbstractContextManager[lmdb.Environment]],
        large_bytes: Callable[[lmdb.Transaction[bytes]], int],
        grow: Callable[[], None],
    ) -> None:
        self._files, self._journal, self._fail = files, files.journal, fail
        self._environment, self._large_bytes, self._grow = environment, large_bytes, grow
        self.pinned = PinnedPages(files.path, files.lockfile.slots, files.watch)
        self.room = Room(files.path, files.directory)
        self.blocks = BlocksOfFiles(files.path)

    def check_pinned(self) -> None:
        """Log the reads that make the tables grow. Call it about once a second."""
        if self.pinned.due:
            with self._environment() as env:
                self.pinned.check(env)

    def check_room(self) -> None:
        """Log when disk or map have little room left, and flushes that took long."""
        if self.room.due:
            self._grow()
            with self._environment() as env:
                self.room.check(env)
        if self._journal is not None:
            self.room.check_flush(self._journal.take_slowest_flush())

    def check_blocks(self) -> None:
        """Give the files that are written in place blocks of their own. Call it about once a
        second."""
        if self.blocks.due:
            with self._environment():  # the files stay open
                self.blocks.check(self._files.written_in_place)
                self._files.keep_spare_room()

    def oldest_reader(self) -> dict[str, object] | None:
        """The read with the oldest snapshot; None if every read has the newest one."""
        with self._environment() as env:
            return self.pinned.oldest(env)

    def describe_oldest(self, pinned: int) -> str:
        """The same for the text of an error; `pinned`: the bytes that the read pins."""
        with self._environment() as env:
            return self.pinned.describe_oldest(env, pinned)

    def oldest_read(self) -> float:
        """The last transaction that the read with the oldest snapshot sees. Infinite if there is no
        read; 0 if that is not known, because the ledger has failed or is being closed."""
        try:
            with self._environment() as env:
                env.reader_check()  # a dead process reads nothing
                found = parse_readers(env.readers())
        except ExclusiveLogError:
            return 0.0
        return min((each.transaction for each in found), default=math.inf)

    def sizes(self) -> dict[str, int]:
        """LMDB's sizes, in bytes, and counts."""
        journal = self._journal
        with self._environment() as env, translated(self._files.path, fail=self._fail):
            info = env.info()
            page = env.stat()["psize"]
            with env.begin() as txn:
                large = self._large_bytes(txn)
            return {
                "map_size": info["map_size"] - MAP_RESERVED,
                "used_bytes": (info["last_pgno"] + 1) * page,
                "journal_bytes": 0 if journal is None else journal.backlog,
                "journal_capacity": 0 if journal is None else journal.capacity,
                "large_bytes": large,
                "transactions": info["last_txnid"],
                "max_readers": info["max_readers"],
                "readers": info["num_readers"],
            }

    def disk_bytes(self) -> int:
        """The disk space of the files."""
        found = (self._files.directory.facts(name) for name in (DATA, JOURNAL))
        tables = sum(facts.st_blocks * 512 for facts in found if facts is not None)
        return tables + self._files.segments.disk_bytes()
