"""Access to a ledger's files through a descriptor of its directory, and locks of open files.

A path may lead to another directory after `mv`, `rm -rf` or the restoration of a backup. So every
file of a ledger is opened, created, renamed and removed relative to a descriptor of its directory,
and `Directory.lost` says when the path no longer leads to that directory (rule C7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator

# The files of a ledger's directory, and the directory of its segments.
DATA, LOCK, JOURNAL, SEGMENTS = "data.mdb", "lock.mdb", "journal", "segments"
OWNERS = "owners.lock"
FIRST_OWN_DESCRIPTOR = 3
FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
# F_OFD_GETLK, F_OFD_SETLK: locks of an open file, which closing another descriptor of the same
# file does not drop. Python names them from 3.9 on, where the C library has them.
LOCK_TYPES = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}


def above_standard(fd: int) -> int:
    """Move a descriptor above 2, so that C code that prints to a closed stderr does not write into
    a file of the ledger.

    >>> above_standard(os.open("/dev/null", os.O_RDONLY)) >= 3
    True
    """
    if fd >= FIRST_OWN_DESCRIPTOR:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR)
    finally:
        os.close(fd)


@contextlib.contextmanager
def standard_descriptors_taken() -> Iterator[None]:
    """Occupy closed descriptors 0 to 2 while the block runs, so that LMDB or mmap do not get
    them."""
    taken = []
    try:
        while True:
            fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            taken.append(fd)
            if fd >= FIRST_OWN_DESCRIPTOR:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)


def lock_open_file(fd: int, kind: str, at: int = 0) -> bool:
    """Lock the byte at `at` for this open file ("read", "write") or unlock it ("none"); False if
    another open file's lock prevents it. The change from one kind to another is atomic."""
    wanted = FLOCK.pack(LOCK_TYPES[kind], os.SEEK_SET, at, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except (BlockingIOError, PermissionError):
        return False
    return True


def share_process_lock(fd: int, at: int) -> None:
    """Keep others from locking the byte at `at` for as long as this file is open. This process has
    a POSIX lock on it, which it loses when it closes any descriptor of the file (it has copied the
    file, say). A lock of the open file is not lost; the two are compatible once both are shared."""
    shared = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, 1, 0)
    fcntl.fcntl(fd, fcntl.F_SETLK, shared)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, shared)


def is_locked(fd: int) -> bool:
    """Does another open file, of any process, hold a lock on the first byte?"""
    wanted = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    found: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    return bool(FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def read_whole(path: str) -> bytes:
    """The contents of a file in /proc.

    >>> read_whole("/proc/self/comm") != b""
    True
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def fill_holes(fd: int) -> None:
    """Allocate all blocks of a file, as a copy may have holes: on a full disk, a store into a
    mapped hole is a SIGBUS. OSError (ENOSPC) if there is no room."""
    facts = os.fstat(fd)
    if facts.st_blocks * 512 < facts.st_size:
        os.posix_fallocate(fd, 0, facts.st_size)


def inherit_owner(fd: int, model: os.stat_result) -> None:
    """Give a new file the mode and owner of `model`, so that the same users can use both: one
    user's umask must not make messages unreadable to the others."""
    mine = os.fstat(fd)
    if (mine.st_uid, mine.st_gid) != (model.st_uid, model.st_gid):
        for uid in (model.st_uid, -1):  # only root may change the owner
            with contextlib.suppress(PermissionError):
                os.fchown(fd, uid, model.st_gid)
                break
    wanted = stat.S_IMODE(model.st_mode)
    if stat.S_IMODE(os.fstat(fd).st_mode) != wanted:
        os.fchmod(fd, wanted)


class Directory:
    """An open directory. `path` is the absolute path by which it was opened."""

    def __init__(self, path: str, parent: Directory | None = None) -> None:
        self.path = path
        self._parent = parent
        name, at = (path, None) if parent is None else (os.path.basename(path), parent.fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.fd: int = above_standard(os.open(name, flags, dir_fd=at))
        facts = os.fstat(self.fd)
        self.identity = facts.st_dev, facts.st_ino

    @property
    def by_descriptor(self) -> str:
        """A path to this directory that stays valid if it is moved, for code that takes only
        paths."""
        return f"/proc/self/fd/{self.fd}"

    def close(self) -> None:
        """Close the descriptor. A second call has no effect."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def is_open(self) -> bool:
        """Does the descriptor still belong to this directory? A program that becomes a daemon may
        have closed all descriptors, and opened other files."""
        try:
            facts = os.fstat(self.fd)
        except OSError as error:
            return error.errno != errno.EBADF  # the disk may have failed: other calls report that
        return (facts.st_dev, facts.st_ino) == self.identity

    # ---- its files -----------------------------------------------------------------------

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor (3 or more) of the file `name`. An OSError names its whole path."""
        try:
            return above_standard(os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=self.fd))
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise

    def make(self, name: str, flags: int, mode: int) -> int:
        """As `open`, and create the file if it does not exist: with the mode and owner of
        `data.mdb` if there is one, else with `mode` less the umask."""
        fd = self.open(name, flags | os.O_CREAT, mode)
        model = (self._parent or self).facts(DATA)
        if model is not None and os.fstat(fd).st_size == 0:
            inherit_owner(fd, model)
        return fd

    def make_directory(self, name: str) -> Directory:
        """The directory `name` in this one, created with this one's mode and owner if it does not
        exist. Its name is durable after `sync`."""
        try:
            os.mkdir(name, dir_fd=self.fd)
            made = True
        except FileExistsError:
            made = False
        found = Directory(os.path.join(self.path, name), self)
        if made:
            inherit_owner(found.fd, os.fstat(self.fd))
        return found

    def facts(self, name: str) -> os.stat_result | None:
        """The result of `stat` for a file; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(name, dir_fd=self.fd)
        return None

    def names(self) -> list[str]:
        """The names of all files."""
        return os.listdir(self.fd)

    def remove(self, name: str) -> None:
        """Remove a file; FileNotFoundError if it does not exist."""
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, atomically."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; FileExistsError if that is taken."""
        os.link(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names of its files durable."""
        os.fsync(self.fd)

    # ---- does the path still lead here? ----------------------------------------------------

    def lost(self) -> str:
        """Why the path no longer leads to this directory (removed, renamed, replaced); empty if it
        does."""
        if not self.is_open:
            return "its file descriptors were closed by the program (os.closerange, for example)"
        try:
            facts = os.stat(self.path)
        except PermissionError:
            return ""  # privileges were dropped: it cannot be checked
        except OSError as error:
            return f"nothing is at its path any more ({error.strerror}){self._elsewhere()}"
        if (facts.st_dev, facts.st_ino) != self.identity:
            return f"its path leads to another directory now{self._elsewhere()}"
        return ""

    def _elsewhere(self) -> str:
        with contextlib.suppress(OSError):
            place = os.readlink(self.by_descriptor)
            if place != self.path and not place.endswith(" (deleted)"):
                return f"; the ledger that this engine has open is at {place}"
        return "; the ledger that this engine has open was removed"


def why_shared(fd: int) -> str:
    """Why an open file must not be used: it has a second hard link, by which another ledger would
    change it. Empty if it has one name."""
    links = os.fstat(fd).st_nlink
    if links <= 1:
        return ""
    name = os.readlink(f"/proc/self/fd/{fd}")
    return (
        f"{name} has {links} names (hard links), so another directory shares it; copy the ledger "
        "into a new directory with cp -a (without -l) and use that, or remove the other names"
    )


def temporary_name(name: str) -> str:
    """The name under which a file is created, before it is renamed to `name`."""
    return f"{name}.{os.getpid()}.{os.urandom(4).hex()}"


def remove_temporary(directory: Directory, name: str) -> None:
    """Remove what killed processes have left while they created this file. Other names stay, such
    as the `journal.1` that logrotate makes."""
    temporary = re.compile(rf"{re.escape(name)}\.\d+\.[0-9a-f]{{8}}")
    for found in filter(temporary.fullmatch, directory.names()):
        with contextlib.suppress(OSError):
            directory.remove(found)


def sync_directory(path: str) -> None:
    """Make the names of the files in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
