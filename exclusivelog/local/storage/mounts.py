"""The file systems that a ledger's files are on (rule H5)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from exclusivelog._core import file_system_magic
from exclusivelog.errors import LedgerError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.files import Directory, read_whole
from exclusivelog.local.storage.devices import MOST_DEVICES, why_in_memory

# Locks, shared mappings and flushes there do not give the guarantees of a local disk.
REMOTE_FILE_SYSTEMS = """
    nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs lustre gfs2 ocfs2 beegfs gpfs fuse fuseblk
    virtiofs vboxsf prl_fs
""".split()
# File systems that statfs(2) identifies by number, without reading the table of mounts.
BTRFS = 0x9123683E
LOCAL_DISKS = {0xEF53: "ext4", 0x58465342: "xfs", BTRFS: "btrfs"}
# Those on which a copy can share blocks, and those that may be on top of one.
SHARES_BLOCKS = {"xfs", "btrfs", "bcachefs", "overlay"}
# File systems in memory, by number: a process in a chroot does not see all mounts in the table.
IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
MEMORY_FILE_SYSTEMS = {"devtmpfs", *IN_MEMORY.values()}
# Options of an overlay that makes no flush: containers with --rm, builds.
VOLATILE = re.compile("(?:^|,)(?:volatile|fsync=volatile)(?:,|$)")
UPPER = re.compile("(?:^|,)upperdir=([^,]+)")
MOST_LAYERS = 4  # overlays on overlays; in a container, the upper directory's path leads elsewhere


def file_system(path: str) -> str:
    """The type of the file system that `path` is on, as the kernel names it.

    >>> file_system("/proc")
    'proc'
    """
    return mount_of(path)[0]


def shares_blocks(path: str) -> bool:
    """Can copies of files on this file system have the same blocks as the originals?

    >>> shares_blocks("/proc")
    False
    """
    return file_system(path) in SHARES_BLOCKS


def mount_of(path: str) -> tuple[str, str]:
    """(type, options) of the file system that `path` is on, or will be once it exists. The options
    of a usual local disk do not matter, and are empty; its type is ext4 for ext2 and ext3, too."""
    magic = file_system_magic(os.fsencode(path))
    if magic in LOCAL_DISKS:
        return LOCAL_DISKS[magic], ""
    kind, _, options = _row_of(path) or (IN_MEMORY.get(magic, "unknown"), "", "")
    return kind, options


def _row_of(path: str) -> tuple[str, str, str] | None:
    """(type, source, options) of the mount that `path` is on, in the kernel's table."""
    number = _mount_id(path)
    for line in os.fsdecode(read_whole("/proc/self/mountinfo")).splitlines():
        if line.partition(" ")[0] == number:
            kind, source, options = line.partition(" - ")[2].split(" ", 2)
            return kind, source, options
    return None


@contextlib.contextmanager
def _nearest(path: str) -> Iterator[int]:
    """A descriptor, to ask about, of `path`, or of the directory in which it will be made."""
    at = os.path.abspath(path)
    while True:
        with Ignoring(FileNotFoundError, NotADirectoryError, PermissionError):
            fd = os.open(at, os.O_PATH | os.O_CLOEXEC)
            break
        at = os.path.dirname(at)
    try:
        yield fd
    finally:
        os.close(fd)


def _mount_id(path: str) -> str:
    """The kernel's number of the mount that `path` is on, or will be once it exists: a mount point
    may be hidden by another, so the path alone does not say it."""
    with _nearest(path) as fd:
        lines = read_whole(f"/proc/self/fdinfo/{fd}").decode().splitlines()
    return next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")


def _device_of(path: str) -> int:
    """The number of the block device that the file system of `path` is on; 0 if it has none."""
    with _nearest(path) as fd:
        number = os.fstat(fd).st_dev
    if os.major(number):
        return number
    row = _row_of(path)  # btrfs, for one, has numbers of its own
    with Ignoring(OSError):
        if row is not None and row[1].startswith("/dev/"):
            return os.stat(_unescaped(row[1])).st_rdev
    return 0


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def refuse_file_system(path: str, power: bool, name: str = "") -> None:
    """LedgerError if the file system has no reliable locks and shared mappings, or if it or its
    device is in memory, or it makes no flushes, and `power` is requested. `name`: of the file, if
    not `path`."""
    kind, options = mount_of(path)
    name = name or path
    if kind in REMOTE_FILE_SYSTEMS or kind.startswith("fuse."):
        raise LedgerError(
            f"{name} is on a {kind} file system, where locks and shared mappings cannot be "
            "trusted; put the ledger on a local disk"
        )
    if power and (why := _why_volatile(path, kind, options)):
        raise LedgerError(
            f"{name} is on {why}: nothing there survives a power loss; put "
            'the ledger on a disk, or open it with durability="process"'
        )


def _why_volatile(path: str, kind: str, options: str, depth: int = MOST_DEVICES) -> str:
    for _ in range(MOST_LAYERS):
        if kind in MEMORY_FILE_SYSTEMS:
            return f"{kind}, which is in memory"
        if kind == "overlay" and VOLATILE.search(options):
            return "an overlay that is mounted volatile, as by podman --rm, which makes no flushes"
        upper = UPPER.search(options) if kind == "overlay" else None
        if upper is None:  # an overlay writes to its upper directory
            return why_in_memory(_device_of(path), _why_file_volatile, depth)
        path = _unescaped(upper[1])
        kind, options = mount_of(path)
    return ""


def _why_file_volatile(path: str, depth: int) -> str:
    return _why_volatile(path, *mount_of(path), depth)


def refuse_elsewhere(directory: Directory, files: Mapping[str, int], power: bool) -> None:
    """Do the same for the open files of a ledger that are on another mount than its directory.
    LedgerError if `power` is requested and one is on another file system at all: the two do not
    come back from a power cut, a snapshot or a backup together."""
    path, home = directory.path, directory.identity[0]
    for name, fd in files.items():
        if os.fstat(fd).st_dev == home:
            continue
        place = f"/proc/self/fd/{fd}"
        # The files of an overlay, and subvolumes of btrfs, have devices of their own.
        if _mount_id(place) == _mount_id(directory.by_descriptor):
            continue
        refuse_file_system(place, power, f"{path}/{name}")
        if power:
            raise LedgerError(
                f"{path}/{name} is on another file system than the directory; put the whole ledger "
                'on one disk, or open it with durability="process"'
            )


def is_mounted_read_only(fd: int) -> bool:
    """Is this open file on a read-only mount, or in a read-only subvolume (a snapshot on btrfs)?
    Another mount of the same disk may be writable."""
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return True
    path = f"/proc/self/fd/{fd}"
    return file_system_magic(path.encode()) == BTRFS and _is_in_read_only_subvolume(path)


def _is_in_read_only_subvolume(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except OSError as error:
        pass_on_foreign(error)
        return error.errno == errno.EROFS
    return False


def copy_up(directory: Directory, names: Iterable[str]) -> None:
    """Have an overlay copy these files to its upper layer before a reader opens them: it does so
    when a file is first opened for writing, and a descriptor opened before keeps the old file."""
    if file_system(directory.path) == "overlay":
        for name in names:
            with Ignoring(FileNotFoundError):
                try:
                    os.close(directory.open(name, os.O_RDWR))
                except OSError as error:
                    pass_on_foreign(error)
                    if error.errno != errno.EROFS:
                        raise
