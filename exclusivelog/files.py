"""A ledger's directory, reached by an open descriptor.

A path may name another directory tomorrow: after `mv`, `rm -rf`, a restored backup. So every
file of a ledger is opened, made, renamed and removed relative to a descriptor of the directory
that was opened first, and `Directory.lost` says when the path no longer leads to it (rule C7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator

from exclusivelog.errors import LedgerError

FIRST_OWN_DESCRIPTOR = 3
LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
# F_OFD_GETLK, F_OFD_SETLK: locks of an open file, which closing another descriptor of the same
# file does not drop. Python names them from 3.9 on, where the C library has them.
LOCK_TYPES = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}


def above_standard(fd: int) -> int:
    """The same open file as a descriptor from 3 on: what C code prints to a closed stderr must
    not land in a file of ours.

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
    """Occupy closed descriptors 0 to 2 while other code (LMDB, mmap) opens files."""
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


def lock_open_file(fd: int, kind: str) -> bool:
    """Lock the first byte for this open file ("read", "write") or unlock it ("none"); False if
    another open file's lock is in the way. Changing one kind into the other is atomic."""
    wanted = LOCK.pack(LOCK_TYPES[kind], os.SEEK_SET, 0, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(fd: int) -> bool:
    """Does another open file, of any process, hold a lock on the first byte?"""
    wanted = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    found: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    return bool(LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def read_whole(path: str) -> bytes:
    """What a file of /proc says.

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
    """Have the disk's blocks behind all of a file, as a copy may not: a store into a mapped hole
    kills where the disk is full. OSError (ENOSPC) if there is no room."""
    facts = os.fstat(fd)
    if facts.st_blocks * 512 < facts.st_size:
        os.posix_fallocate(fd, 0, facts.st_size)


def inherit_owner(fd: int, model: os.stat_result) -> None:
    """Give a new file the mode and owner of `model`, so that whoever can use one can use the
    other: another user's umask must not put messages out of reach."""
    mine = os.fstat(fd)
    if (mine.st_uid, mine.st_gid) != (model.st_uid, model.st_gid):
        for uid in (model.st_uid, -1):  # only root may give away a file, a member its group
            with contextlib.suppress(PermissionError):
                os.fchown(fd, uid, model.st_gid)
                break
    wanted = stat.S_IMODE(model.st_mode)
    if stat.S_IMODE(os.fstat(fd).st_mode) != wanted:
        os.fchmod(fd, wanted)


class Directory:
    """An open directory. `path` is the absolute path that it was opened by."""

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
        """A path that leads here whatever becomes of `path`; for code that takes only paths."""
        return f"/proc/self/fd/{self.fd}"

    def close(self) -> None:
        """Let go of it. A second time does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def is_open(self) -> bool:
        """Is the descriptor still this directory's? A daemon may have closed all descriptors, and
        opened other files since."""
        try:
            facts = os.fstat(self.fd)
        except OSError as error:
            return error.errno != errno.EBADF  # the disk may be gone: that is told elsewhere
        return (facts.st_dev, facts.st_ino) == self.identity

    # ---- its files -----------------------------------------------------------------------

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor (from 3 on) of the file `name`. An OSError says its whole path."""
        try:
            return above_standard(os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=self.fd))
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise

    def make(self, name: str, flags: int, mode: int) -> int:
        """The same, of a file that is made if it is not there: then with the mode and owner of
        `data.mdb`, where there is one, else with `mode` as the umask leaves it."""
        fd = self.open(name, flags | os.O_CREAT, mode)
        model = (self._parent or self).facts("data.mdb")
        if model is not None and os.fstat(fd).st_size == 0:
            inherit_owner(fd, model)
        return fd

    def make_directory(self, name: str) -> Directory:
        """The directory `name` within, made with this one's mode and owner if it is not there.
        Its name is durable after `sync`."""
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
        """What `stat` says of a file; None if it is not there."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(name, dir_fd=self.fd)
        return None

    def names(self) -> list[str]:
        """The names of all files."""
        return os.listdir(self.fd)

    def remove(self, name: str) -> None:
        """Remove a file; FileNotFoundError if it is not there."""
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in one step."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; FileExistsError if that is taken."""
        os.link(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        """Make its names durable."""
        os.fsync(self.fd)

    # ---- is it still the one that the path names? ------------------------------------------

    def lost(self) -> str:
        """Why the path no longer leads here (removed, renamed, replaced); empty if it does."""
        if not self.is_open:
            return "its file descriptors were closed by the program (os.closerange, say)"
        try:
            facts = os.stat(self.path)
        except PermissionError:
            return ""  # privileges were dropped: then it cannot be told
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


def refuse_links(fd: int) -> None:
    """LedgerError for an open file that has a second name: a ledger in another directory would
    change it, too."""
    links = os.fstat(fd).st_nlink
    if links > 1:
        name = os.readlink(f"/proc/self/fd/{fd}")
        raise LedgerError(
            f"{name} has {links} names (hard links), so another directory shares it; copy the "
            "ledger into a new directory with cp -a (without -l) and use that, or remove the "
            "other names"
        )


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
