"""Where a ledger may lie, and what its directory may hold (rules H2, H4, H5)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable

from exclusivelog._core import JOURNAL_HEADER_BYTES, file_system_magic
from exclusivelog.errors import LedgerCorruptedError, LedgerError
from exclusivelog.local.files import (
    DATA,
    JOURNAL,
    SEGMENTS,
    Directory,
    read_whole,
    sync_directory,
    why_shared,
)

# Locks, shared mappings and flushes there do not give the guarantees of a local disk.
REMOTE_FILE_SYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2",
    "ocfs2", "beegfs", "gpfs", "fuse", "fuseblk", "virtiofs", "vboxsf", "prl_fs",
}  # fmt: skip
# Known by their numbers in statfs(2), without reading the table of mounts.
LOCAL_DISKS = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs"}
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
# A file in the target of a backup until it is complete: see backup_target.py.
UNFINISHED_BACKUP = "backup-unfinished"
# What an interrupted creation of a ledger leaves, and what a new file system has.
OURS = re.compile(r"\.creating-.*|owners\.lock.*|journal.*|lock\.mdb|segments|lost\+found")


# ---- the file system -------------------------------------------------------------------


def file_system(path: str) -> str:
    """The type of the file system that `path` is on, as the kernel names it.

    >>> file_system("/proc")
    'proc'
    """
    return mount_of(path)[0]


def mount_of(path: str) -> tuple[str, str]:
    """(type, options) of the file system that `path` is on. The options of a usual local disk do
    not matter, and are empty; its type is ext4 for ext2 and ext3, too."""
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
            f"{path} is on {kind}, which is in memory: nothing there survives a power loss; put "
            'the ledger on a disk, or open it with durability="process"'
        )


def is_mounted_read_only(fd: int) -> bool:
    """Is this open file on a read-only mount? Another mount of the same disk may be writable."""
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def copy_up(directory: Directory, names: Iterable[str]) -> None:
    """Have an overlay copy these files to its upper layer before a reader opens them: it does so
    when a file is first opened for writing, and a descriptor opened before keeps the old file."""
    if file_system(directory.path) == "overlay":
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.close(directory.open(name, os.O_RDWR))
                except OSError as error:
                    if error.errno != errno.EROFS:
                        raise


# ---- the directory -----------------------------------------------------------------------


def make_directory(path: str, mode: int) -> None:
    """Create the directory unless it exists."""
    if not os.path.isdir(path):
        try:
            os.makedirs(path, mode=mode, exist_ok=True)
        except FileExistsError:
            raise LedgerError(f"{path} is a file; a ledger is a directory") from None
        sync_directory(os.path.dirname(path))


def refuse_incomplete(directory: Directory) -> None:
    """LedgerError for a directory that is not a whole ledger of its own: a backup that is
    unfinished (rule H4), or a copy that shares files with another directory."""
    refuse_unfinished_backup(directory)
    for name in (DATA, JOURNAL):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # reported when it is opened
            fd = directory.open(name, os.O_RDONLY)
            try:
                why = why_shared(fd)
            finally:
                os.close(fd)
            if why:
                raise LedgerError(why)


def refuse_unfinished_backup(directory: Directory) -> None:
    """LedgerError for a directory with an unfinished backup, whether its process lives or not."""
    if UNFINISHED_BACKUP in directory.names():
        raise LedgerError(
            f"{directory.path} holds a backup that is unfinished or still being made; wait for "
            "its end, or run the backup again"
        )


def identity(path: str) -> tuple[int, int]:
    """(device, inode) of a directory: the same for every path that leads to it."""
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
    """LedgerError where a ledger is to be created in a directory with other files."""
    if directory.facts(DATA) is not None:
        return
    refuse_unfinished_backup(directory)  # it may have begun since the first check
    names = directory.names()
    strangers = sorted(name for name in names if not OURS.fullmatch(name))
    if strangers and DATA not in names:  # else another process has created the ledger since
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise LedgerError(
            f"{directory.path} has other files ({strangers[0]!r}{more}) but no ledger; choose a "
            "directory of its own; open() creates it"
        )


def refuse_remains(directory: Directory) -> None:
    """LedgerCorruptedError where data.mdb is missing and other files of a ledger are there: a new
    one would hide that all acknowledged messages are lost."""
    if directory.facts(DATA) is None and (_has_frames(directory) or _has_segments(directory)):
        raise LedgerCorruptedError(
            f"{directory.path} has the journal or segments of a ledger, but no {DATA}: it was "
            "removed, with all acknowledged messages; restore a backup, or choose another directory"
        )


def _has_frames(directory: Directory) -> bool:
    with contextlib.suppress(OSError):
        fd = directory.open(JOURNAL, os.O_RDONLY)
        try:
            return any(os.pread(fd, 64, JOURNAL_HEADER_BYTES))
        finally:
            os.close(fd)
    return False


def _has_segments(directory: Directory) -> bool:
    with contextlib.suppress(OSError):
        segments = Directory(os.path.join(directory.path, SEGMENTS), directory)
        with contextlib.closing(segments):
            return bool(segments.names())
    return False
