"""LMDB's environment: where it may be, how it is made and opened, and what is refused before LMDB
touches it (rule H2)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable
from typing import Any

import lmdb
import msgpack

from exclusivelog._core import JOURNAL_HEADER_BYTES, FileGuard, file_system_magic
from exclusivelog.errors import LedgerCorruptedError, LedgerError, LedgerVersionError
from exclusivelog.faults import translated
from exclusivelog.files import (
    Directory,
    fill_holes,
    is_locked,
    lock_open_file,
    read_whole,
    refuse_links,
    sync_directory,
)
from exclusivelog.pinned import parse_readers
from exclusivelog.tables import FORMAT, NAMES
from exclusivelog.version import __version__
from exclusivelog.versions import refuse_format

LMDB_MAGIC = 0xBEEFC0DE
RAISING_BYTES = 64 << 20  # of map that a new number and new tables need, and more
LMDB_ENGINE = 0  # the 0.9 file format, whatever this machine's py-lmdb would choose
# Locks, shared mappings and flushes do not hold there what they hold on a local disk.
REMOTE_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2",
    "ocfs2", "beegfs", "gpfs", "fuse", "fuseblk", "virtiofs", "vboxsf", "prl_fs",
}  # fmt: skip
# The usual ones, by their numbers in statfs(2), are known without the table of mounts.
LOCAL_DISKS = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs"}
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
DATA, LOCK = "data.mdb", "lock.mdb"
HEADER = b"format"  # its key in the table `meta`
Header = dict[str, Any]
CREATING = ".creating-"
# In a directory that a backup goes into, as long as it is not complete: see backup_target.py.
UNFINISHED_BACKUP = "backup-unfinished"
# What a creation of ours that was cut short leaves, and what a new file system has.
OURS = re.compile(r"\.creating-.*|owners\.lock.*|journal.*|lock\.mdb|segments|lost\+found")
# LMDB's meta pages, the first two of the file: where the size of a page, the number of the
# last page in use and the transaction's number stand in them.
META_PAGE_SIZE, META_LAST_PAGE, META_TXN, META_BYTES = 40, 136, 144, 152


# ---- where -------------------------------------------------------------------------------


def file_system(path: str) -> str:
    """The type of the file system that `path` is on, as the kernel names it.

    >>> file_system("/proc")
    'proc'
    """
    return mount_of(path)[0]


def mount_of(path: str) -> tuple[str, str]:
    """(type, options) of the file system that `path` is on; of a usual disk, whose options do not
    matter, the type alone (ext4 for its predecessors, too)."""
    kind = LOCAL_DISKS.get(file_system_magic(os.fsencode(path)))
    if kind is not None:
        return kind, ""
    path = os.path.realpath(path) + "/"
    best, found = "", ("unknown", "")
    for line in os.fsdecode(read_whole("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        mount = _unescaped(before.split(" ", 5)[4]).rstrip("/") + "/"
        if len(mount) >= len(best) and path.startswith(mount):
            kind, _, options = after.split(" ", 2)
            best, found = mount, (kind, options)
    return found


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def refuse_file_system(path: str, power: bool) -> None:
    """LedgerError where locks and shared mappings cannot be trusted, or where nothing survives a
    power loss and `power` is asked for (rule H5)."""
    kind, options = mount_of(path)
    if kind in REMOTE_FILE_SYSTEMS or kind.startswith("fuse."):
        raise LedgerError(
            f"{path} is on a {kind} file system, where locks and shared mappings cannot be "
            "trusted; put the ledger on a local disk"
        )
    upper = re.search(r"(?:^|,)upperdir=([^,]+)", options) if kind == "overlay" else None
    if upper is not None:  # what is written to an overlay lands there
        kind = file_system(_unescaped(upper[1]))
    if power and kind in MEMORY_FILE_SYSTEMS:
        raise LedgerError(
            f"{path} is on {kind}, which lies in memory: nothing there survives a power loss; put "
            'the ledger on a disk, or open it with durability="process"'
        )


def is_mounted_read_only(fd: int) -> bool:
    """Is the file system of this open file read-only here? It may be writable by another mount."""
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def copy_up(directory: Directory, names: Iterable[str]) -> None:
    """Before a reader opens these files: an overlay replaces a file of its lower layer by a copy
    when it is first opened to be written, and who has the old one open reads that for ever."""
    if file_system(directory.path) == "overlay":
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.close(directory.open(name, os.O_RDWR))
                except OSError as error:
                    if error.errno != errno.EROFS:
                        raise


def refuse_incomplete(directory: Directory) -> None:
    """LedgerError for a directory that is not a whole ledger of its own: a backup that is
    unfinished (rule H4), or a copy that shares files with another directory."""
    refuse_unfinished_backup(directory)
    for name in (DATA, "journal"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # told when it is opened
            fd = directory.open(name, os.O_RDONLY)
            try:
                refuse_links(fd)
            finally:
                os.close(fd)


def refuse_unfinished_backup(directory: Directory) -> None:
    """LedgerError for a directory into which a backup is being made, or was until it died."""
    if UNFINISHED_BACKUP in directory.names():
        raise LedgerError(
            f"{directory.path} holds a backup that is unfinished or still being made; wait for "
            "its end, or run the backup again"
        )


def identity(path: str) -> tuple[int, int]:
    """What a directory is, by whatever name."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def check_path(path: str | os.PathLike[str], argument: str = "path") -> str:
    """The argument `path` of `open`, or another that names a directory, as a str.

    >>> check_path("")
    Traceback (most recent call last):
    ValueError: path='': it takes the name of a directory
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"{argument}={path!r}: it takes a str or an os.PathLike of one, not bytes")
    if not name or "\0" in name:
        raise ValueError(f"{argument}={name!r}: it takes the name of a directory")
    return name


def refuse_strangers(directory: Directory) -> None:
    """LedgerError where a ledger is to be made in a directory that has files of somebody else."""
    if directory.facts(DATA) is not None:
        return
    refuse_unfinished_backup(directory)  # one that has begun just now
    names = directory.names()
    strangers = sorted(name for name in names if not OURS.fullmatch(name))
    if strangers and DATA not in names:  # else another process has made the ledger since
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise LedgerError(
            f"{directory.path} has other files ({strangers[0]!r}{more}) and no ledger; choose a "
            "directory of its own, which open() makes"
        )


# ---- made whole, and looked at before it is opened ---------------------------------------


def make_directory(path: str, mode: int) -> None:
    """The directory, unless it is there."""
    if not os.path.isdir(path):
        with translated(path):
            try:
                os.makedirs(path, mode=mode, exist_ok=True)
            except FileExistsError:
                raise LedgerError(f"{path} is a file; a ledger lives in a directory") from None
            sync_directory(os.path.dirname(path))


def create_environment(directory: Directory, mode: int) -> None:
    """A whole data.mdb or none: LMDB's own creation leaves a file that is void for ever if it
    is interrupted."""
    for leftover in directory.names():
        if leftover.startswith(CREATING):
            shutil.rmtree(leftover, dir_fd=directory.fd)
    name = f"{CREATING}{secrets.token_hex(8)}"
    os.mkdir(name, mode, dir_fd=directory.fd)
    temporary = Directory(os.path.join(directory.path, name), directory)
    try:
        # Behind that mkdir: a backup that begins now finds the directory no longer empty.
        refuse_unfinished_backup(directory)
        env = lmdb.open(
            temporary.by_descriptor, map_size=1 << 22, max_dbs=len(NAMES), mode=mode & 0o666,
            lock=False, lib_version=LMDB_ENGINE,
        )  # fmt: skip
        with env, env.begin(write=True) as txn:
            for table in NAMES:
                database = env.open_db(table.encode(), txn=txn)
                if table == "meta":
                    header = {
                        "version": FORMAT, "uuid": secrets.token_hex(16), "library": __version__,
                    }  # fmt: skip
                    txn.put(HEADER, msgpack.packb(header), db=database)
        temporary.sync()
        os.rename(DATA, DATA, src_dir_fd=temporary.fd, dst_dir_fd=directory.fd)
        directory.sync()
    finally:
        temporary.close()
        shutil.rmtree(name, ignore_errors=True, dir_fd=directory.fd)


def refuse_remains(directory: Directory) -> None:
    """LedgerCorruptedError where data.mdb is gone, and other files of the ledger are not: a new
    one would hide that everything acknowledged is lost."""
    if directory.facts(DATA) is None and (_has_frames(directory) or _has_segments(directory)):
        raise LedgerCorruptedError(
            f"{directory.path} has the journal or segments of a ledger, and no {DATA}: it was "
            "removed, with all that was acknowledged; restore a backup, or choose another directory"
        )


def _has_frames(directory: Directory) -> bool:
    with contextlib.suppress(OSError):
        fd = directory.open("journal", os.O_RDONLY)
        try:
            return any(os.pread(fd, 64, JOURNAL_HEADER_BYTES))
        finally:
            os.close(fd)
    return False


def _has_segments(directory: Directory) -> bool:
    with contextlib.suppress(OSError):
        segments = Directory(os.path.join(directory.path, "segments"), directory)
        with contextlib.closing(segments):
            return bool(segments.names())
    return False


def check_format(directory: Directory, readonly: bool, beside_others: bool) -> bool:
    """LedgerVersionError for an LMDB file that is not a ledger's, or of a format that is not
    opened, before anything is made beside it; else whether these tables have ever had a journal.
    LMDB's lock is not needed: call it while no process writes."""
    with lmdb.open(
        directory.by_descriptor, max_dbs=len(NAMES), readonly=True, lock=False, create=False,
        map_size=1 << 20, lib_version=LMDB_ENGINE,
    ) as env:  # fmt: skip
        with env.begin() as txn:
            meta, header = _read_header(env, txn, directory.path)
            refuse_format(directory, header, readonly, beside_others)
            used = txn.get(b"journal", db=meta) is not None
        open_tables(env, directory, readonly=True, beside_others=False)
        return used


def check_header(directory: Directory) -> None:
    """Refuse what LMDB would take for its own, or die of."""
    data = os.path.join(directory.path, DATA)
    fd = directory.open(DATA, os.O_RDONLY)
    try:
        metas = [os.pread(fd, META_BYTES, 0)]
        _check_kind(data, metas[0])
        page_size = struct.unpack_from("<I", metas[0].ljust(META_BYTES), META_PAGE_SIZE)[0]
        metas.append(os.pread(fd, META_BYTES, page_size))
        size = os.fstat(fd).st_size  # after them: a writer may be at work
    finally:
        os.close(fd)
    whole = [meta for meta in metas if len(meta) == META_BYTES]
    newest = max(whole, key=lambda meta: struct.unpack_from("<Q", meta, META_TXN), default=None)
    last_page = 1 if newest is None else struct.unpack_from("<Q", newest, META_LAST_PAGE)[0]
    wanted = (last_page + 1) * page_size
    if size < wanted:
        # A page that is not in the file is a SIGBUS to whoever touches its mapping.
        raise LedgerCorruptedError(f"{data} is cut off: it has {size} bytes of {wanted}")


def _check_kind(data: str, head: bytes) -> None:
    if len(head) < 24:
        raise LedgerCorruptedError(f"{data} is cut off after {len(head)} bytes")
    magic, version = struct.unpack_from("<II", head, 16)
    if magic != LMDB_MAGIC:
        raise LedgerVersionError(f"{data} is no ledger's file; choose another directory")
    if version != 1:
        raise LedgerVersionError(
            f"{data} has LMDB file format {version}; this version of exclusivelog reads format 1"
        )


# ---- opened ------------------------------------------------------------------------------


def open_environment(
    directory: Directory, mode: int, map_size: int, max_readers: int, readonly: bool,
    guards: list[FileGuard],
) -> tuple[lmdb.Environment, int]:  # fmt: skip
    """LMDB's environment in this directory, and the descriptor that keeps its lock file as it is
    (-1: LMDB works without one, on a read-only file system). `guards` gets those of its files."""

    def open_it() -> lmdb.Environment:
        return lmdb.open(
            directory.by_descriptor, map_size=map_size, max_dbs=len(NAMES),
            max_readers=max_readers, readonly=readonly, create=False, mode=mode & 0o666,
            lib_version=LMDB_ENGINE,
        )  # fmt: skip

    keeper = _keep_lock_file(directory, mode, max_readers, readonly)
    for name in (DATA, LOCK):  # LMDB stores into its lock file while it opens it
        facts = directory.facts(name)
        if facts is not None:
            guards.append(FileGuard(facts.st_ino))
    try:
        try:
            env = open_it()
        except (lmdb.Error, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise _no_address_space(directory.path, map_size) from error
        if keeper >= 0:
            lock_open_file(keeper, "read")
        elif not readonly or directory.facts(LOCK) is not None:
            keeper = _keep(directory)
        env.reader_check()
        if any(reading.pid == os.getpid() for reading in parse_readers(env.readers())):
            env = _without_a_namesake(env, open_it)
        return env, keeper
    except BaseException:
        if keeper >= 0:
            os.close(keeper)
        raise


def _keep_lock_file(directory: Directory, mode: int, max_readers: int, readonly: bool) -> int:
    """LMDB makes lock.mdb anew when it gets a POSIX lock on it, which any process loses that so
    much as reads the file and closes it (a copy, a checksum of its own directory). An open-file
    lock is not lost, and keeps LMDB from it as long as anybody has the ledger open."""
    if directory.facts(LOCK) is None:
        if readonly:
            return -1  # LMDB makes it, or does without
        # LMDB would make a sparse one, and die of SIGBUS on a full disk.
        fd = directory.make(LOCK, os.O_RDWR, mode & 0o666)
        try:
            os.posix_fallocate(fd, 0, 64 * (max_readers + 2))
        except OSError:
            directory.remove(LOCK)
            os.close(fd)
            raise
        return fd
    fd = _keep(directory, locked=False)
    if fd >= 0 and not is_locked(fd):
        with contextlib.suppress(OSError):  # a copy may have holes; not on a read-only mount
            fill_holes(fd)
        return fd  # nobody has it open: LMDB may make it anew
    if fd >= 0:
        lock_open_file(fd, "read")
    return fd


def _keep(directory: Directory, locked: bool = True) -> int:
    for flags in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            fd = directory.open(LOCK, flags)
            if locked:
                lock_open_file(fd, "read")
            return fd
    return -1


def _is_out_of_memory(error: Exception) -> bool:
    return getattr(error, "code", 0) == errno.ENOMEM or isinstance(error, MemoryError)


def _no_address_space(path: str, map_size: int) -> LedgerError:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = "has no limit" if soft == resource.RLIM_INFINITY else f"is {soft}"
    return LedgerError(
        f"{path}: map_size={map_size} bytes of address space cannot be had (RLIMIT_AS {limit}). "
        "Open it with a smaller map_size, or raise the limit (ulimit -v)"
    )


def _without_a_namesake(
    env: lmdb.Environment, open_again: Callable[[], lmdb.Environment]
) -> lmdb.Environment:
    """A dead process had our id, and died inside a read: LMDB takes its snapshot for one of ours.
    Closing gives back the places of this process id, once it has taken one."""
    with env.begin():
        pass
    env.close()
    return open_again()


def open_tables(
    env: lmdb.Environment, directory: Directory, readonly: bool, beside_others: bool
) -> tuple[dict[str, Any], Header]:
    """The tables by name, and the ledger's header: its format and uuid. `beside_others`: engines
    have the ledger open to write. In an earlier format, a table that it does not have is None."""
    path = directory.path
    with translated(path, readonly):
        with env.begin() as txn:
            _refuse_older_data(env, txn.id(), path)
            _, header = _read_header(env, txn, path)
        refuse_format(directory, header, readonly, beside_others)
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
    """Engines that only read keep LMDB's lock file, which names the newest transaction. Where the
    file of tables has none as new, an older one was put in its place under them."""
    if newest > env.info()["last_txnid"]:
        raise LedgerError(
            f"{path}/data.mdb was replaced by an older one (a backup that was put back, say) while "
            "an engine with readonly=True has the ledger open; close that engine, then open it"
        )


def _open_databases(env: lmdb.Environment, readonly: bool) -> dict[str, Any]:
    # py-lmdb forgets handles that were opened in a read transaction, and without a transaction
    # it waits for the writer's lock with the GIL held, unless read-only.
    if readonly:
        return {name: _open_database(env, name) for name in NAMES}
    with env.begin(write=True) as txn:
        return {name: _open_database(env, name, txn=txn) for name in NAMES}


def _open_database(env: lmdb.Environment, name: str, **options: Any) -> Any:
    with contextlib.suppress(lmdb.NotFoundError):
        return env.open_db(name.encode(), create=False, **options)
    return None


# ---- raised ------------------------------------------------------------------------------


def raise_format(directory: Directory) -> None:
    """Make an earlier format this version's, in one durable transaction. The caller keeps every
    other process from opening the ledger, so that LMDB's lock is not needed.

    Rows of the earlier formats are read as they are; what a format adds are tables."""
    facts = directory.facts(DATA)
    size = 0 if facts is None else facts.st_size
    with (
        lmdb.open(
            directory.by_descriptor, map_size=size + RAISING_BYTES, max_dbs=len(NAMES),
            lock=False, create=False, lib_version=LMDB_ENGINE,
        ) as env,
        env.begin(write=True) as txn,
    ):  # fmt: skip
        for name in NAMES:
            env.open_db(name.encode(), txn=txn)
        meta, header = _read_header(env, txn, directory.path)
        header.update(version=FORMAT, library=__version__)
        txn.put(HEADER, msgpack.packb(header), db=meta)
