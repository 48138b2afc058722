"""The directory of a ledger, and LMDB's environment in it (rules H2, H4).

Checks of the directory's contents; creating, checking and opening the environment, sharing it among
threads, and closing it in a forked child. LMDB opens its files by name; see `_only`.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import functools
import mmap
import os
import re
import resource
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import lmdb
import msgpack

from exclusivelog import _core
from exclusivelog._core import JOURNAL_HEADER_BYTES
from exclusivelog.arguments import is_url
from exclusivelog.errors import (
    EngineClosedError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerVersionError,
)
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.blocks import own_blocks, unshare
from exclusivelog.local.faults import NO_ROOM, locks_all_memory, translated
from exclusivelog.local.files import (
    DATA,
    JOURNAL,
    LOCK,
    SEGMENTS,
    Directory,
    above_standard,
    close_locked,
    is_locked,
    keep_in_place,
    lock_open_file,
    set_permissions,
    share_process_lock,
    show_namespace,
    sync_directory,
    why_shared,
)
from exclusivelog.local.records import NAMES, Rows
from exclusivelog.local.storage import free_pages
from exclusivelog.local.storage.free_pages import FAR, RoomLeft
from exclusivelog.local.storage.mounts import is_mounted_read_only
from exclusivelog.local.versions import FORMAT, refuse_format
from exclusivelog.version import __version__
from exclusivelog.waits import Waited

# In the target of a backup until it is complete: see maintenance/backup.py.
UNFINISHED_BACKUP = "backup-unfinished"
# Names that an interrupted creation of a ledger leaves, or that a new file system has.
OURS = re.compile(r"\.creating-.*|owners\.lock.*|journal.*|lock\.mdb|segments|lost\+found")


# ---- the directory -----------------------------------------------------------------------


def make_directory(path: str, mode: int) -> None:
    """Create the directory unless it exists."""
    if not os.path.isdir(path):
        try:
            if not os.path.exists(above := os.path.dirname(path)):
                os.makedirs(above, exist_ok=True)
            os.mkdir(path, 0o700)
        except FileExistsError as error:
            pass_on_foreign(error)
            if os.path.isdir(path):  # another process has just made it
                return
            raise LedgerError(f"{path} is a file; a ledger is a directory") from None
        made = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            set_permissions(made, mode)
        finally:
            os.close(made)
        sync_directory(above)


def refuse_incomplete(directory: Directory) -> tuple[bool, bool]:
    """LedgerError for an unfinished backup (rule H4), for files that are not this ledger's own, or
    a copy that shares files with another directory. Returns whether there are tables, and a
    journal."""
    refuse_unfinished_backup(directory)
    found = {name: directory.facts(name) for name in (DATA, JOURNAL)}
    for name, facts in found.items():
        if facts is not None:
            directory.refuse_foreign(name, facts)
        if facts is None or facts.st_nlink <= 1:
            continue
        with Ignoring(FileNotFoundError, PermissionError):  # reported when it is opened
            fd = directory.open(name, os.O_RDONLY)
            try:
                why = why_shared(fd)
            finally:
                os.close(fd)
            if why:
                raise LedgerError(why)
    return found[DATA] is not None, found[JOURNAL] is not None


def refuse_unfinished_backup(directory: Directory) -> None:
    """LedgerError for a directory with an unfinished backup, also if its process is still
    running."""
    if directory.facts(UNFINISHED_BACKUP) is not None:
        raise LedgerError(
            f"{directory.path} holds a backup that is unfinished or still being made; wait for "
            "its end, or run the backup again"
        )


def identity(path: str) -> tuple[int, int]:
    """(device, inode) of a directory: the same for every path that leads to it."""
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino


def check_path(path: str | os.PathLike[str], argument: str = "path") -> str:
    """The argument `path` of `open`, or another that names a directory, as a str.

    >>> check_path("")
    Traceback (most recent call last):
    ValueError: path='': it takes the name of a directory
    >>> check_path("memory://log", "backup")
    Traceback (most recent call last):
    ValueError: backup='memory://log': it takes the name of a directory, and this is a URL
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise TypeError(f"{argument}={path!r}: it takes a str, or an os.PathLike of one")
    if not name or "\0" in name:
        raise ValueError(f"{argument}={name!r}: it takes the name of a directory")
    if is_url(name):
        raise ValueError(
            f"{argument}={name!r}: it takes the name of a directory, and this is a URL"
        )
    if name.startswith("~"):
        raise ValueError(
            f"{argument}={name!r}: ~ is not expanded here. Give os.path.expanduser({name!r}), or "
            f"{'./' + name!r} for a directory of that name"
        )
    return name


def refuse_other_files(directory: Directory) -> None:
    """LedgerError where a ledger is to be created in a directory with other files."""
    if directory.facts(DATA) is not None:
        return
    refuse_unfinished_backup(directory)  # a backup may have begun since the first check
    names = directory.names()
    strangers = sorted(name for name in names if not OURS.fullmatch(name))
    if strangers and DATA not in names:  # else another process has created the ledger meanwhile
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise LedgerError(
            f"{directory.path} has other files ({strangers[0]!r}{more}) but no ledger; choose a "
            "directory of its own; open() creates it"
        )


def refuse_missing_data(directory: Directory) -> None:
    """LedgerCorruptedError if data.mdb is missing and other files of a ledger exist: a new ledger
    there would hide that all acknowledged messages are lost."""
    if directory.facts(DATA) is None and (_has_frames(directory) or _has_segments(directory)):
        raise LedgerCorruptedError(
            f"{directory.path} has the journal or segments of a ledger, but no {DATA}: it was "
            "removed, with all acknowledged messages; restore a backup, or choose another directory"
        )


def _has_frames(directory: Directory) -> bool:
    with Ignoring(OSError):
        fd = directory.open(JOURNAL, os.O_RDONLY)
        try:
            return any(os.pread(fd, 64, JOURNAL_HEADER_BYTES))
        finally:
            os.close(fd)
    return False


def _has_segments(directory: Directory) -> bool:
    with Ignoring(OSError):
        segments = Directory(os.path.join(directory.path, SEGMENTS), directory)
        with contextlib.closing(segments):
            return bool(segments.names())
    return False


# ---- the environment -------------------------------------------------------------------


LMDB_MAGIC = 0xBEEFC0DE
DEFAULT_MAP_SIZE = 1 << 40  # address space that is reserved, not disk that is used
# Beyond map_size, for changes of ownership, trims and deletions, but not for messages. A trim may
# have to move a whole journal (8 MiB) into the tables.
MAP_RESERVED = 16 << 20
SMALLER_MAPS = (1 << 36, 1 << 32, 1 << 30)  # where there is less of it
# A map of at least this size is not filled by one transaction: pages are counted once half of it is
# used.
COUNTED_FROM = 1 << 28
GROWING_SECONDS = 0.05  # for the end of this process's transactions
RAISING_BYTES = 64 << 20  # of map: more than a new format number and new tables need
LMDB_ENGINE = 0  # the 0.9 file format, independent of the default of the installed py-lmdb
LMDB_DESCRIPTORS = 3  # that LMDB opens
ATTEMPT_SECONDS = 1.0  # a dying process keeps its locks for a moment
FORK_WAIT_SECONDS = 5.0
BUSY_FORK_WAIT_SECONDS = 0.5  # in a signal handler that has interrupted a transaction
CHILD_WAIT_SECONDS = 3.0  # for LMDB: on a busy machine, a thread may begin late
RESIZING_SECONDS = 600.0  # for the end of a read that began before the map was made larger
HEADER = b"format"  # its key in the table `meta`
Header = dict[str, Any]
CREATING = ".creating-"
# Offsets in LMDB's meta pages, the first two of the file: the page size, the number of the last
# page in use, and the number of the transaction.
META_PAGE_SIZE, META_LAST_PAGE, META_TXN, META_BYTES = 40, 136, 144, 152


# ---- created, and checked before it is opened --------------------------------------------


META_PAGES_BYTES = 2 << 16  # of two pages, of the largest size


def create_environment(directory: Directory, mode: int) -> None:
    """Create data.mdb atomically: LMDB's own creation, if interrupted, leaves an unusable file."""
    for leftover in directory.names():
        if leftover.startswith(CREATING):
            _remove_created(directory, leftover)
    name = f"{CREATING}{os.urandom(8).hex()}"
    os.mkdir(name, 0o700, dir_fd=directory.fd)
    temporary = Directory(os.path.join(directory.path, name), directory)
    try:
        # Check after that mkdir: a backup that begins now finds that the directory is not empty.
        refuse_unfinished_backup(directory)
        _make_data_file(temporary)
        env = lmdb.open(
            temporary.by_descriptor,
            map_size=1 << 22,
            max_dbs=len(NAMES),
            mode=0o600,
            lock=False,
            lib_version=LMDB_ENGINE,
        )
        with env, env.begin(write=True) as txn:
            for table in NAMES:
                database = env.open_db(table.encode(), txn=txn)
                if table == "meta":
                    header = {
                        "version": FORMAT,
                        "uuid": os.urandom(16).hex(),
                        "library": __version__,
                    }
                    txn.put(HEADER, msgpack.packb(header), db=database)
        data = temporary.open(DATA, os.O_RDONLY)
        try:
            set_permissions(data, mode & 0o666)
        finally:
            os.close(data)
        temporary.sync()
        os.rename(DATA, DATA, src_dir_fd=temporary.fd, dst_dir_fd=directory.fd)
        directory.sync()
    finally:
        temporary.close()
        with Ignoring(OSError):
            _remove_created(directory, name)


def _remove_created(directory: Directory, name: str) -> None:
    # It has no subdirectories, and shutil would import all compressors.
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory.fd)
    try:
        for file in os.listdir(fd):
            os.unlink(file, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=directory.fd)


def check_format(directory: Directory, readonly: bool, has_writers: bool) -> bool:
    """Have these tables ever had a journal? LedgerVersionError for an LMDB file that is not a
    ledger's, or of a format that this version does not open. It takes no lock of LMDB's: call it
    while no process writes, and before any other file is created in the directory."""
    with lmdb.open(
        directory.by_descriptor,
        max_dbs=len(NAMES),
        readonly=True,
        lock=False,
        create=False,
        map_size=1 << 20,
        lib_version=LMDB_ENGINE,
    ) as env:
        with env.begin() as txn:
            meta, header = _read_header(env, txn, directory.path)
            refuse_format(directory, header, readonly, has_writers)
            used = txn.get(b"journal", db=meta) is not None
        open_tables(env, directory, readonly=True, has_writers=False)
        return used


def _make_data_file(directory: Directory) -> None:
    """An empty file, which LMDB takes for a new one."""
    fd = directory.make(DATA, os.O_RDWR, 0o600)
    try:
        keep_in_place(fd)
    finally:
        os.close(fd)


def own_meta_pages(fd: int) -> None:
    """Give the pages with which LMDB ends a transaction blocks of their own, where there is room. A
    write to any other page may fail on a full disk, but after one to these LMDB fails for good.
    `fd`: of data.mdb."""
    with Ignoring(OSError):
        unshare(fd, META_PAGES_BYTES)


def check_header(directory: Directory, opened: int | None = None) -> None:
    """LedgerCorruptedError for a file that LMDB would accept, and that would then crash the
    process. `opened`: a descriptor of data.mdb, if there is one."""
    data = os.path.join(directory.path, DATA)
    with _opened(directory, DATA) if opened is None else contextlib.nullcontext(opened) as fd:
        metas = [os.pread(fd, META_BYTES, 0)]
        _check_kind(data, metas[0])
        page_size = struct.unpack_from("<I", metas[0].ljust(META_BYTES), META_PAGE_SIZE)[0]
        metas.append(os.pread(fd, META_BYTES, page_size))
        size = os.fstat(fd).st_size  # after reading the header: a writer may extend the file
    whole = [meta for meta in metas if len(meta) == META_BYTES]
    newest = max(whole, key=lambda meta: struct.unpack_from("<Q", meta, META_TXN), default=None)
    last_page = 1 if newest is None else struct.unpack_from("<Q", newest, META_LAST_PAGE)[0]
    wanted = (last_page + 1) * page_size
    if size < wanted:
        # Reading the mapping of a page beyond the file's end is a SIGBUS.
        raise LedgerCorruptedError(f"{data} is cut off: it has {size} bytes of {wanted}")


def _check_kind(data: str, head: bytes) -> None:
    if len(head) < 24:
        raise LedgerCorruptedError(f"{data} is cut off after {len(head)} bytes")
    magic, version = struct.unpack_from("<II", head, 16)
    if magic != LMDB_MAGIC:
        raise LedgerVersionError(f"{data} is no LMDB file of a ledger; choose another directory")
    if version != 1:
        raise LedgerVersionError(
            f"{data} has LMDB file format {version}; this version of exclusivelog reads format 1"
        )


# ---- opened ------------------------------------------------------------------------------


class Reading(NamedTuple):
    """A read transaction: its process and thread, and the last write transaction that it sees."""

    pid: int
    thread: int  # pthread_self(), the `ident` of a Python thread
    transaction: int


def parse_readers(text: str) -> list[Reading]:
    """The open read transactions in LMDB's listing of its table of readers.

    >>> parse_readers("    pid     thread     txnid\\n   4711 7f36c8 -\\n   4712 7f36c9 12\\n")
    [Reading(pid=4712, thread=8337097, transaction=12)]
    """
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0].isdigit() and fields[2].isdigit():
            found.append(Reading(int(fields[0]), int(fields[1], 16), int(fields[2])))
    return found


class Environment:
    """LMDB's environment in this directory, shared by all threads. A process opens it only once.

    `in_use`: do other processes have the ledger open? `data`: a descriptor of data.mdb, if there is
    one."""

    def __init__(
        self,
        directory: Directory,
        mode: int,
        map_size: int,
        max_readers: int,
        readonly: bool,
        in_use: Callable[[], bool],
        data: int | None,
        deaths: _core.DeathWatch,
    ) -> None:
        self.path, self._directory = directory.path, directory
        self.pinned = 0  # bytes, when the room was counted last
        self._known_pinned = free_pages.NOTHING  # what of it need not be counted again
        self._process = _core.this_process()
        self.gate = _core.Gate()
        self.gate.look_at(deaths)
        self._resizing = threading.Lock()
        self._quiet = False
        self._place: _core.PrivateLock | None = None  # keeps this process's reads
        self.unlocked = False  # does LMDB do without its lock file, of a reader on a full disk?
        with _opened(directory, DATA) if data is None else contextlib.nullcontext(data) as data:
            # The descriptor whose lock keeps LMDB from initialising its lock file; -1 if LMDB uses
            # none, on a read-only file system.
            self._lock = self._keep_lock_file(directory, mode, max_readers, readonly, in_use)
            try:
                if self._lock >= 0:
                    show_namespace(self._lock)
                self._watch_deaths(deaths)
                # LMDB stores into its lock file while it opens it.
                files = {DATA: data} if self._lock < 0 else {DATA: data, LOCK: self._lock}
                facts = {name: os.fstat(fd) for name, fd in files.items()}
                readers = directory.facts(LOCK)
                # The inode of their table.
                self._readers = -1 if readers is None else readers.st_ino
                self._guards = [_core.FileGuard(each.st_ino) for each in facts.values()]

                def open_it(size: int) -> lmdb.Environment:
                    lock = not self.unlocked
                    return _open(directory, files, facts, size, max_readers, readonly, lock)

                self.lmdb, self._map_size = _open_with_room(directory.path, map_size, open_it)
                self._wanted_size = map_size
                if self._lock >= 0:
                    lock_open_file(self._lock, "read")
                self._watch_deaths(deaths)
                deaths.await_readers()
                self.lmdb.reader_check()
                if any(each.pid == os.getpid() for each in parse_readers(self.lmdb.readers())):
                    # A dead process had our process id, and died inside a read: LMDB takes its
                    # snapshot for one of ours. Closing frees all places of this process id, if it
                    # has one.
                    with self.lmdb.begin():
                        pass
                    self.lmdb.close()
                    self.lmdb = open_it(self._map_size)
                self._keep_readers()
                if self.lost:
                    self.lmdb.close()
                    raise LedgerFullError(
                        f"{self.path}: the disk is full: it did not store LMDB's lock file; make "
                        "room, then open it again"
                    )
            except BaseException:
                self._close_lock()
                raise
        # Pointers to C functions, for `_core.Section`.
        self.begin_read = functools.partial(self.lmdb.begin)
        self.begin_scan = functools.partial(self.lmdb.begin, buffers=True)
        self.begin_write = functools.partial(self.lmdb.begin, write=True)

    def _keep_lock_file(
        self,
        directory: Directory,
        mode: int,
        max_readers: int,
        readonly: bool,
        in_use: Callable[[], bool],
    ) -> int:
        """The descriptor of LMDB's lock file; -1 if a reader cannot use one."""
        try:
            return _keep_lock_file(directory, mode, max_readers, readonly, in_use)
        except OSError as error:
            pass_on_foreign(error)
            if not readonly or error.errno not in NO_ROOM:
                raise
        # Nobody else has the ledger open, and a full disk takes no store into that file.
        self.unlocked = True
        return -1

    def _watch_deaths(self, deaths: _core.DeathWatch) -> None:
        """Have LMDB's own mutexes looked at, too, once its lock file has them."""
        if self._lock >= 0 and os.fstat(self._lock).st_size:
            with Ignoring(PermissionError):  # a read-only mount: LMDB locks nothing
                deaths.add_lmdb(self._lock)

    def _keep_readers(self) -> None:
        """Keep other processes from freeing the places of this process in LMDB's table of readers.
        They do so when nobody holds a lock on the byte of lock.mdb that this process's id names."""
        self._keep_out_of_dumps()  # in a read: LMDB takes its own lock on that byte, once
        if self._lock >= 0:
            self._place = share_process_lock(self._lock, os.getpid())

    def _keep_out_of_dumps(self) -> None:
        """Keep LMDB's map out of core dumps."""
        with self.lmdb.begin(buffers=True) as txn:
            row = txn.get(b"meta")  # of a table, in the main one
            if row is not None:
                page_size, size = self.lmdb.stat()["psize"], self.lmdb.info()["map_size"]
                _core.keep_lmdb_out_of_dumps(row, page_size, size)
            del row

    @property
    def files(self) -> dict[str, int]:
        """LMDB's lock file, if it uses one: {name: descriptor}."""
        return {LOCK: self._lock} if self._lock >= 0 else {}

    @property
    def guards(self) -> list[_core.FileGuard]:
        """What protects stores into LMDB's lock file."""
        return self._guards[1:]  # the first one is that of data.mdb, into which LMDB writes

    def close(self) -> None:
        """Close the environment and LMDB's lock file."""
        self.lmdb.close()
        self._close_lock()

    def _close_lock(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.release()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            close_locked(lock, self._process)

    @property
    def lost(self) -> bool:
        """Could a page of LMDB's files not be read or written (see _native/guard.pxi)?"""
        for guard in self._guards:  # noqa: SIM110 - each transaction calls this, so no generator
            if guard.lost:
                return True
        return False

    @property
    def inherited(self) -> bool:
        """Is this a forked child of the process that opened it?"""
        return self._process != _core.this_process()

    @contextlib.contextmanager
    def use(self) -> Iterator[lmdb.Environment]:
        """LMDB's environment, which stays open while the block runs."""
        if not self.gate.enter():
            raise EngineClosedError(
                f"the ledger {self.path} was closed during the call; open it again"
            )
        try:
            yield self.lmdb
        finally:
            self.gate.leave()

    def room(self, rows: Rows) -> RoomLeft:
        """The room that is left for the tables, as this write transaction has changed them."""
        info, page = self.lmdb.info(), self.lmdb.stat()["psize"]
        most = info["map_size"] - MAP_RESERVED
        if most >= COUNTED_FROM and 2 * (info["last_pgno"] + 1) * page < most:
            return FAR  # from the map's end
        self.pinned = page * self._count_pinned(info["last_txnid"])
        left = most - rows.count_pages() * page - self.pinned
        kept = self.pinned >= MAP_RESERVED / 4 and left < -MAP_RESERVED / 2
        return RoomLeft(float(left), kept)

    def _count_pinned(self, last: int) -> int:
        """How many pages are free, but not for LMDB as long as an open read may use them."""
        if all(each.transaction >= last for each in parse_readers(self.lmdb.readers())):
            return 0
        self.lmdb.reader_check()  # a dead process reads nothing
        found = parse_readers(self.lmdb.readers())
        oldest = min((each.transaction for each in found), default=last)
        if oldest >= last:
            return 0
        with _opened(self._directory, DATA) as fd:
            pages, self._known_pinned = free_pages.count(fd, oldest, self._known_pinned)
        return pages

    def adopt_map_size(self) -> None:
        """Make the map as large as another process has made it. LMDB moves the map, so this waits
        until this process has no transaction."""
        with self._resizing:
            end = _core.monotonic() + RESIZING_SECONDS
            while not self._resized(FORK_WAIT_SECONDS):
                # Admit transactions again: a long read must not fail, and it may have to enter a
                # second time itself.
                if _core.monotonic() > end:
                    raise LedgerError(
                        f"{self.path}: another process has made the map larger, and one read of "
                        f"this process has been under way for {RESIZING_SECONDS:.0f} s; open it "
                        "with the same map_size in every process"
                    )

    def grow(self) -> None:
        """Make a map larger that is smaller than it should be, because there was no address space,
        before it is full."""
        if self._map_size < self._wanted_size:
            with self.use() as env:
                info = env.info()
                used = (info["last_pgno"] + 1) * env.stat()["psize"]
                low = 2 * used > info["map_size"] - MAP_RESERVED
            if low and self._resizing.acquire(blocking=False):
                try:
                    self._resized(GROWING_SECONDS)
                except LedgerError:
                    pass  # there is no room yet: what finds no room in the map says so
                finally:
                    self._resizing.release()

    def _resized(self, seconds: float) -> bool:
        try:
            if not self.gate.close(seconds):
                return False
            if self._map_size == self._wanted_size:
                self.lmdb.set_mapsize(0)  # what the largest of all processes has
            else:
                # LMDB would lose the old map before it finds no address space for a new one.
                size = self._larger_map()
                self.lmdb.set_mapsize(size + MAP_RESERVED)
                self._map_size = size
            self._keep_out_of_dumps()
            return True
        finally:
            self.gate.open()

    def _larger_map(self) -> int:
        for size in _map_sizes(self._wanted_size):
            if size > self._map_size and _is_room_for(size):
                return size
        if _is_room_for(2 * self._map_size):
            return 2 * self._map_size
        raise _no_address_space(self.path, 2 * self._map_size)

    # ---- fork ----------------------------------------------------------------------------

    def before_fork(self, busy: bool) -> None:
        """Wait until no transaction runs, so that the child can close its copy. Not for one of this
        thread, which a signal handler that forks has interrupted: it is not inside LMDB. `busy`:
        others may have to wait for this thread, so that the wait must be short."""
        seconds = BUSY_FORK_WAIT_SECONDS if busy else FORK_WAIT_SECONDS
        self._quiet = self.gate.close(seconds, self.gate.of_this_thread())

    def after_fork_in_parent(self) -> None:
        """Let transactions run again."""
        self._quiet = False
        self.gate.open()

    def after_fork_in_child(self, ours: bool) -> bool:
        """Close the inherited copy without a change to the parent's: a process may have LMDB open
        only once, and the child may want to open it. False if that was impossible, or if the
        descriptors are not `ours` any more, but belong to other files."""
        # The fork shut the gate, and only the parent opens it again. A signal handler that forks
        # may have interrupted this thread on its way into a transaction: it would wait for ever.
        self.gate.end()
        if not self._detach_readers():
            self._close_lock()  # else it would keep the places of a parent that has died
            return False
        if ours and (self._quiet or not self.gate.inside):
            self.lmdb.close()
        else:  # another thread of the parent may have been in LMDB, whose lock then stays taken
            _in_thread(self.lmdb.close if ours else self._close_apart, CHILD_WAIT_SECONDS)
        if ours:
            self._close_lock()
        return ours

    def _close_apart(self) -> None:
        with Ignoring(OSError):  # refused: then this process cannot open it again
            _core.unshare_descriptors()
            self.lmdb.close()

    def _detach_readers(self) -> bool:
        # A transaction that is over keeps its place in LMDB's table of readers until its object
        # is freed, and closing frees the places of all of them. They are the parent's: let the
        # child do so in a private copy of the table.
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
                lines = [line.split(maxsplit=5) for line in maps]
        except OSError as error:
            pass_on_foreign(error)
            return False
        for span, _, _, _, number, *name in lines:
            if int(number) == self._readers and name and "/lock.mdb" in name[0]:
                start, end = (int(text, 16) for text in span.split("-"))
                _core.make_private(start, end - start)
                return True
        return False


def _in_thread(call: Callable[[], object], seconds: float) -> None:
    """Make the call in a thread, and wait for its end for so long. A thread of the parent may have
    held the locks of `threading`, which only Python's fork hooks replace."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            call()
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    done.acquire(timeout=seconds)


@contextlib.contextmanager
def _opened(directory: Directory, name: str) -> Iterator[int]:
    fd = directory.open(name, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _open(
    directory: Directory,
    files: Mapping[str, int],
    facts: Mapping[str, os.stat_result],
    map_size: int,
    max_readers: int,
    readonly: bool,
    lock: bool,
) -> lmdb.Environment:
    with _only(directory, files) as place:
        numbers = _next_descriptors(directory.fd)
        env = lmdb.open(
            place,
            map_size=map_size + MAP_RESERVED,
            max_dbs=len(NAMES),
            max_readers=max_readers,
            readonly=readonly,
            lock=lock,
            create=False,
            lib_version=LMDB_ENGINE,
        )
    try:
        _adopt_descriptors(directory, files, facts, numbers)
        used = env.info()["map_size"]
        if used > map_size + MAP_RESERVED and not readonly:
            env.set_mapsize(used + MAP_RESERVED)  # the tables were larger: LMDB left no reserve
    except BaseException:
        env.close()
        raise
    return env


def _open_with_room(
    path: str, map_size: int, open_it: Callable[[int], lmdb.Environment]
) -> tuple[lmdb.Environment, int]:
    """The environment, and the size of its map: that size, or, by default, as much of it as there
    is address space for."""
    *larger, least = _map_sizes(map_size)
    for size in larger:
        with contextlib.suppress(lmdb.MemoryError, MemoryError):
            return open_it(size), size
    try:
        return open_it(least), least
    except (lmdb.MemoryError, MemoryError) as error:
        raise _no_address_space(path, map_size) from error


def _map_sizes(map_size: int) -> list[int]:
    # Small steps down would leave nothing for the next ledger of this process.
    return [map_size, *(SMALLER_MAPS if map_size == DEFAULT_MAP_SIZE else ())]


def _is_room_for(size: int) -> bool:
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except (OSError, ValueError) as error:
        pass_on_foreign(error)
        return False
    return True


# Where a directory is made for LMDB: memory, if possible.
SCRATCH = ("/dev/shm", "/tmp")
SCRATCH_NAME = re.compile("exclusivelog-[0-9a-f]{16}")
SCRATCH_ATTEMPTS = 3  # another process may remove one before it is locked
OPEN_FILES = "/proc/self/fd/"


@contextlib.contextmanager
def _only(directory: Directory, files: Mapping[str, int]) -> Iterator[str]:
    """A path to a directory that has these open files. LMDB opens its files by name, and follows
    links: where another user may write to the ledger's directory, he could exchange one after it
    was checked. So LMDB gets a directory of this user's, with links to the open files."""
    place = os.fstat(directory.fd)
    private = place.st_uid == os.geteuid() and not place.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    scratch = None if private or LOCK not in files else _scratch()
    if scratch is None:
        yield directory.by_descriptor
        return
    path, at = scratch
    try:
        for name, fd in files.items():
            os.symlink(f"{OPEN_FILES}{fd}", name, dir_fd=at)
        yield f"{OPEN_FILES}{at}"
    finally:
        _remove_scratch(path, at)
        os.close(at)


def _scratch() -> tuple[str, int] | None:
    """The path and a descriptor of a new directory that only this user may use; None if there is no
    place for one. It is locked: those without a lock are of processes that were killed."""
    for place in SCRATCH:
        _remove_leftovers(place)
        for _ in range(SCRATCH_ATTEMPTS):
            path = f"{place}/exclusivelog-{os.urandom(8).hex()}"
            with Ignoring(OSError):
                os.mkdir(path, 0o700)
                fd = _lock_scratch(path)
                if fd is not None and os.path.samestat(os.stat(path), os.fstat(fd)):
                    return path, fd
    return None


def _lock_scratch(path: str) -> int | None:
    """A descriptor of such a directory, with a lock. None if another process has it, or it belongs
    to another user."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = above_standard(os.open(path, flags))
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove_scratch(path: str, fd: int) -> None:
    for name in (DATA, LOCK):
        with Ignoring(OSError):
            if os.readlink(name, dir_fd=fd).startswith(OPEN_FILES):  # else it is a ledger's own
                os.unlink(name, dir_fd=fd)
    with Ignoring(OSError):
        os.rmdir(path)


def _remove_leftovers(place: str) -> None:
    """Remove this user's directories that processes have left which were killed while they opened
    a ledger."""
    with Ignoring(OSError):
        for name in os.listdir(place):
            if SCRATCH_NAME.fullmatch(name):
                with Ignoring(OSError):  # in use, or just removed
                    fd = _lock_scratch(f"{place}/{name}")
                    if fd is not None:
                        _remove_scratch(f"{place}/{name}", fd)
                        os.close(fd)


def _next_descriptors(fd: int) -> list[int]:
    """The numbers of the next descriptors that this process opens, found by copies of this one."""
    fds: list[int] = []
    try:
        while len(fds) < LMDB_DESCRIPTORS:
            fds.append(os.dup(fd))
    finally:
        for each in fds:
            os.close(each)
    return fds


def _adopt_descriptors(
    directory: Directory,
    files: Mapping[str, int],
    facts: Mapping[str, os.stat_result],
    numbers: Iterable[int],
) -> None:
    """Keep programs that this process starts from inheriting LMDB's descriptors, which can write.
    LedgerError if LMDB has opened other files than these. `numbers`: of its descriptors, unless
    other threads took some meanwhile."""
    wanted = {(each.st_dev, each.st_ino): name for name, each in facts.items()}
    found = _adopted(numbers, wanted, set(files.values()))
    if found != set(files):
        found = _adopted(map(int, os.listdir("/proc/self/fd")), wanted, set(files.values()))
    for name in set(files) - found:
        if not is_mounted_read_only(files[name]):  # LMDB has opened no lock file there
            raise LedgerError(
                f"{directory.path}/{name} was replaced while it was opened; open it again"
            )


def _adopted(
    numbers: Iterable[int], wanted: Mapping[tuple[int, int], str], ours: set[int]
) -> set[str]:
    found = set()
    for number in numbers:
        if number in ours:
            continue
        try:
            facts = os.fstat(number)
        except OSError as error:
            pass_on_foreign(error)
            continue  # none is open there, or not any more
        if name := wanted.get((facts.st_dev, facts.st_ino)):
            os.set_inheritable(number, False)
            found.add(name)
    return found


def _keep_lock_file(
    directory: Directory, mode: int, max_readers: int, readonly: bool, in_use: Callable[[], bool]
) -> int:
    """LMDB initialises lock.mdb when it gets a POSIX lock on it, and a process loses that lock when
    it reads and closes the file (a copy of the directory, say). An open-file lock is not lost, and
    keeps LMDB from initialising the file while a process has the ledger open."""
    if directory.facts(LOCK) is None:
        if in_use() and directory.facts(LOCK) is None:
            raise _lock_file_lost(directory)
        return _make_lock_file(directory, mode, max_readers)
    fd = _open_lock_file(directory, readonly)
    try:
        if _is_held(fd, in_use):
            lock_open_file(fd, "read")
            return fd
        if in_use():
            raise _lock_file_lost(directory)
        _own_lock_file(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd  # no other process has it open: LMDB may initialise it


def _own_lock_file(fd: int) -> None:
    """Give LMDB's lock file blocks of its own, as a copy may have holes. OSError if there is no
    room."""
    try:
        own_blocks(fd)
    except OSError as error:
        pass_on_foreign(error)
        if error.errno in NO_ROOM:
            raise  # else it is on a read-only mount, say


def _make_lock_file(directory: Directory, mode: int, max_readers: int) -> int:
    # LMDB would create a sparse one, and crash with SIGBUS on a full disk.
    try:
        fd = directory.make(LOCK, os.O_RDWR, mode & 0o666)
    except OSError as error:
        pass_on_foreign(error)
        if error.errno == errno.EROFS:
            return -1
        raise
    try:
        keep_in_place(fd)
        os.posix_fallocate(fd, 0, 64 * (max_readers + 2))
    except OSError as error:
        pass_on_foreign(error)
        directory.remove(LOCK)
        os.close(fd)
        raise
    return fd


def _open_lock_file(directory: Directory, readonly: bool) -> int:
    try:
        return directory.open(LOCK, os.O_RDWR)
    except OSError as error:
        pass_on_foreign(error)
        if not readonly or error.errno != errno.EROFS:
            raise
    return directory.open(LOCK, os.O_RDONLY)


def _is_held(fd: int, in_use: Callable[[], bool]) -> bool:
    """Does another process have LMDB's lock file open? One that opens or closes the ledger, or
    dies, takes or releases its locks one after the other: wait for it."""
    waited = Waited()
    while not is_locked(fd):
        if not in_use() or waited.seconds > ATTEMPT_SECONDS:
            return False
        time.sleep(0.002)
    return True


def _lock_file_lost(directory: Directory) -> LedgerError:
    return LedgerError(
        f"{directory.path}/{LOCK} was removed or replaced while engines use the ledger; close "
        "every engine on it, then open it"
    )


def _is_out_of_memory(error: Exception) -> bool:
    refused = (errno.ENOMEM, errno.EAGAIN) if locks_all_memory() else (errno.ENOMEM,)
    return getattr(error, "code", 0) in refused or isinstance(error, MemoryError)


def _no_address_space(path: str, map_size: int) -> LedgerError:
    if locks_all_memory():
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return LedgerError(
            f"{path}: map_size={map_size} bytes of locked memory were refused: this process has "
            f"locked its memory (mlockall), and RLIMIT_MEMLOCK is {soft}. Open it with a smaller "
            "map_size before mlockall, or call that without MCL_FUTURE"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = "has no limit" if soft == resource.RLIM_INFINITY else f"is {soft}"
    return LedgerError(
        f"{path}: map_size={map_size} bytes of address space were refused (RLIMIT_AS {limit}). "
        "Open it with a smaller map_size, or raise the limit (ulimit -v)"
    )


def open_tables(
    env: lmdb.Environment, directory: Directory, readonly: bool, has_writers: bool
) -> tuple[dict[str, Any], Header]:
    """The tables by name, and the ledger's header: its format and uuid. A table that an earlier
    format does not have is None. `has_writers`: other engines have the ledger open to write."""
    path = directory.path
    with translated(path, readonly):
        with env.begin() as txn:
            _refuse_older_data(env, txn.id(), path)
            _, header = _read_header(env, txn, path)
        refuse_format(directory, header, readonly, has_writers)
        databases = _open_databases(env, readonly)
        if header["version"] == FORMAT and None in databases.values():
            raise LedgerCorruptedError(
                f"{path}/data.mdb lacks tables that format {FORMAT} has; restore a backup"
            )
    return databases, header


def _read_header(
    env: lmdb.Environment, txn: lmdb.Transaction[bytes], path: str
) -> tuple[Any, Header]:
    try:
        meta = env.open_db(b"meta", txn=txn, create=False)
        header = msgpack.unpackb(txn.get(HEADER, db=meta))
        return meta, {**header, "version": header["version"], "uuid": str(header["uuid"])}
    except (lmdb.NotFoundError, lmdb.IncompatibleError, TypeError, ValueError, KeyError):
        raise LedgerVersionError(
            f"{path}/data.mdb is an LMDB file, but not a ledger's; choose another directory"
        ) from None


def _refuse_older_data(env: lmdb.Environment, newest: int, path: str) -> None:
    """LedgerError if data.mdb was replaced by an older file while read-only engines have it open:
    LMDB's lock file, which they keep, then names a newer transaction than data.mdb."""
    if newest > env.info()["last_txnid"]:
        raise LedgerError(
            f"{path}/data.mdb was replaced by an older one while a read-only engine has it open. "
            "It may be a restored backup; close that engine, then open the ledger"
        )


def _open_databases(env: lmdb.Environment, readonly: bool) -> dict[str, Any]:
    # py-lmdb drops handles that were opened in a read transaction. Without a transaction it waits
    # for LMDB's writer lock with the GIL held, unless the environment is read-only.
    if readonly:
        return {name: _open_database(env, name) for name in NAMES}
    with env.begin(write=True) as txn:
        return {name: _open_database(env, name, txn) for name in NAMES}


def _open_database(env: lmdb.Environment, name: str, txn: lmdb.Transaction | None = None) -> Any:
    try:
        return env.open_db(name.encode(), txn, create=False)
    except lmdb.NotFoundError:
        return None


# ---- raised ------------------------------------------------------------------------------


def raise_format(directory: Directory) -> None:
    """Raise an earlier format to this version's, in one durable transaction. It takes no lock of
    LMDB's: the caller keeps every other process from opening the ledger.

    Rows of the earlier formats are read as they are; a new format adds tables."""
    facts = directory.facts(DATA)
    size = 0 if facts is None else facts.st_size
    with (
        lmdb.open(
            directory.by_descriptor,
            map_size=size + RAISING_BYTES,
            max_dbs=len(NAMES),
            lock=False,
            create=False,
            lib_version=LMDB_ENGINE,
        ) as env,
        env.begin(write=True) as txn,
    ):
        for name in NAMES:
            env.open_db(name.encode(), txn=txn)
        meta, header = _read_header(env, txn, directory.path)
        header.update(version=FORMAT, library=__version__)
        txn.put(HEADER, msgpack.packb(header), db=meta)
