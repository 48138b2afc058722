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

from exclusivelog import _core
from exclusivelog.foreign import Ignoring, pass_on_foreign

# The files of a ledger's directory, and the directory of its segments.
DATA, LOCK, JOURNAL, SEGMENTS = "data.mdb", "lock.mdb", "journal", "segments"
OWNERS = "owners.lock"
# How each of them is opened: no symbolic link is followed, and no FIFO waited for.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
GROUP_WRITES, OTHERS_WRITE = 0o060, 0o006  # and reads
FIRST_OWN_DESCRIPTOR = 3
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOCOW_FL = 0x80086601, 0x40086602, 0x00800000
FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
# F_OFD_GETLK, F_OFD_SETLK: locks of an open file, which closing another descriptor of the same
# file does not drop. Python names them from 3.9 on, where the C library has them.
LOCK_TYPES = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}


class RefusedFile(OSError):
    """A file that is not opened, or cannot be given to a ledger's users: `strerror` says why.
    faults.py makes a LedgerError of it."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.ELOOP, why)


# ---- descriptors and locks ---------------------------------------------------------------


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
    except (BlockingIOError, PermissionError) as error:
        pass_on_foreign(error)
        return False
    except OSError as error:
        pass_on_foreign(error)
        raise _without_open_file_locks(error) from error
    return True


def pid_namespace() -> int:
    """The inode of the pid namespace of this process."""
    return os.stat("/proc/self/ns/pid").st_ino


def show_namespace(fd: int) -> None:
    """Show that a process of this pid namespace has this lock file open, by a lock on a byte that
    names it. Call it before the process takes a lock in the file: others judge by these bytes
    whether they know its holder (_native/deaths.h)."""
    lock_open_file(fd, "read", _core.NAMESPACES + pid_namespace())


def share_process_lock(fd: int, at: int) -> _core.PrivateLock | None:
    """Keep others from locking the byte at `at` until this process ends, or releases the lock that
    is returned. It has a POSIX lock on it, which it loses when it closes any descriptor of the file
    (it has copied the file, say). The two are compatible once both are shared.

    None if the system has no private locks: then the open file has one, which ends with it, and a
    child that C code has forked keeps it."""
    shared = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, 1, 0)
    fcntl.fcntl(fd, fcntl.F_SETLK, shared)
    with Ignoring(OSError):
        return _core.PrivateLock(fd, at)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, shared)
    return None


def close_locked(fd: int, process: int) -> None:
    """Close a file, and release the locks that `process` has taken on it (`_core.this_process()`).
    To close it is not enough: a child that C code has forked keeps the open file, with its locks,
    for as long as it lives. In such a child, the locks are left to the parent."""
    if _core.this_process() == process:
        with Ignoring(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        with Ignoring(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _without_open_file_locks(error: OSError) -> OSError:
    if error.errno not in (errno.EINVAL, errno.ENOSYS):
        return error
    return OSError(errno.ENOTSUP, f"{error.strerror}: there are no open-file locks, F_OFD_SETLK")


def is_locked(fd: int) -> bool:
    """Does another open file, of any process, hold a lock on the first byte?"""
    wanted = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        found: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    except OSError as error:
        pass_on_foreign(error)
        raise _without_open_file_locks(error) from error
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


def keep_in_place(fd: int) -> None:
    """Have writes to a new, empty file replace the contents of its blocks. On btrfs each write
    would need new blocks, and a store into the mapped file would be a SIGBUS on a full disk."""
    with Ignoring(OSError):  # other file systems do so, or do not know the flag
        flags = bytearray(struct.calcsize("l"))
        fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
        (present,) = struct.unpack_from("i", flags)
        struct.pack_into("i", flags, 0, present | FS_NOCOW_FL)
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags)


# ---- owners ------------------------------------------------------------------------------


def give_to(fd: int, model: os.stat_result) -> None:
    """Give a file that this process has made the owner and group of `model`, as far as possible:
    only root may change the owner, and nobody can name an id that his user namespace lacks."""
    mine = os.fstat(fd)
    uid = _named(model.st_uid, mine.st_uid, "uid")
    gid = _named(model.st_gid, mine.st_gid, "gid")
    for owner in (uid, -1) if (uid, gid) != (-1, -1) else ():
        try:
            os.fchown(fd, owner, gid)
            return
        except OSError as error:
            pass_on_foreign(error)
            if error.errno not in (errno.EPERM, errno.EINVAL):
                raise


def _named(wanted: int, mine: int, kind: str) -> int:
    """The argument of chown for an id: -1 for no change."""
    return -1 if wanted == mine or wanted == _overflow_id(kind) else wanted


def _overflow_id(kind: str) -> int:
    """The id that stands for all that this user namespace does not have; -1 if it has all. A file
    given to it would belong to some other user outside."""
    ranges = [
        list(map(int, line.split())) for line in read_whole(f"/proc/self/{kind}_map").split(b"\n")
    ]
    if ranges[:1] == [[0, 0, (1 << 32) - 1]]:
        return -1
    return int(read_whole(f"/proc/sys/kernel/overflow{kind}"))


def inherit_owner(fd: int, model: os.stat_result) -> None:
    """Give a new file the mode and owner of `model`, so that the same users can use both: one
    user's umask must not make messages unreadable to the others.

    Raises RefusedFile if they could not: this process may not give the file to them."""
    give_to(fd, model)
    wanted = stat.S_IMODE(model.st_mode)
    if stat.S_IMODE(os.fstat(fd).st_mode) != wanted:
        os.fchmod(fd, wanted)
    if _shuts_out(os.fstat(fd), model) and not _has_acl(fd):
        raise RefusedFile(
            f"{os.readlink(f'/proc/self/fd/{fd}')} could not be given to the users of the ledger: "
            f"this process may not make files of user {model.st_uid} or group {model.st_gid}. Set "
            "the group of the ledger's directory, and its set-group-ID bit (chmod g+s), so that "
            "new files get that group, or open it as its owner"
        )


def _shuts_out(facts: os.stat_result, model: os.stat_result) -> bool:
    """Is this file of no use to those who have `model`, by its owner, group and mode?"""
    alike = facts.st_gid == model.st_gid and facts.st_mode & GROUP_WRITES == GROUP_WRITES
    return not (
        facts.st_uid == model.st_uid or alike or facts.st_mode & OTHERS_WRITE == OTHERS_WRITE
    )


def _has_acl(file: int | str) -> bool:
    """Does an access list name more users of this file?"""
    with Ignoring(OSError):  # there is none, usually
        return bool(os.getxattr(file, "system.posix_acl_access"))
    return False


def set_permissions(fd: int, mode: int) -> None:
    """Give what this process has made these permissions, whatever the umask. A directory keeps the
    set-group-ID bit that it has got from the one above."""
    found = stat.S_IMODE(os.fstat(fd).st_mode)
    wanted = mode | found & stat.S_ISGID
    if found != wanted:
        os.fchmod(fd, wanted)


def why_foreign(
    facts: os.stat_result, place: os.stat_result, data: os.stat_result | None, acl: bool = False
) -> str:
    """Why a file in the directory `place` must not be opened as a ledger's: whoever may write to
    the directory could have put another user's file there, or what is no file. Empty if it may.
    `data`: the facts of `data.mdb`, if it is there; `acl`: an access list names more users.

    A file that another user has made for this ledger is one that the ledger's users can use (see
    `inherit_owner`); so is none that was only moved there, such as a secret of root."""
    if not stat.S_ISREG(facts.st_mode):
        return f"it is {KINDS.get(stat.S_IFMT(facts.st_mode), 'a device')}, no file of its own"
    owner = place if data is None else data
    shared = bool(place.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if facts.st_nlink > 1:  # perhaps another user's file
        if facts.st_uid in (place.st_uid, owner.st_uid) and not shared:
            return ""
        return f"it has {facts.st_nlink} names (hard links), and belongs to user {facts.st_uid}"
    if data is None and (shared or facts.st_uid in (place.st_uid, os.geteuid())):
        return ""  # another process creates the ledger
    if facts.st_uid == place.st_uid or not _shuts_out(facts, owner) or (acl and shared):
        return ""
    return (
        f"it belongs to user {facts.st_uid}, and the ledger to user {owner.st_uid}, who cannot use "
        "it. If it is the ledger's own, give it to that user (chown)"
    )


# ---- a directory -------------------------------------------------------------------------


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


class Directory:
    """An open directory. `path` is the absolute path by which it was opened."""

    def __init__(self, path: str, parent: Directory | None = None) -> None:
        self.path = path
        self._parent = parent
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if parent is None:
            self.fd: int = above_standard(os.open(path, flags))
        else:
            self.fd = parent._open(os.path.basename(path), flags | os.O_NOFOLLOW, stat.S_IFDIR)
        self.identity = _identity(os.fstat(self.fd))
        # For a process that changes its root later.
        self._root = self._above = (0, 0)
        if parent is None:
            self._name = os.path.basename(os.readlink(self.by_descriptor))
            self._root, self._above = _identity(os.stat("/")), self._identity_above()

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
            pass_on_foreign(error)
            return error.errno != errno.EBADF  # the disk may have failed: other calls report that
        return _identity(facts) == self.identity

    # ---- its files -----------------------------------------------------------------------

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor (3 or more) of the file `name`. An OSError names its whole path.

        Raises RefusedFile if that is no regular file of this ledger's users: it may be a link to
        another user's file, or a FIFO, which would be waited for."""
        fd = self._open(name, flags | SAFELY, stat.S_IFREG, mode)
        try:
            self.refuse_foreign(name, os.fstat(fd), fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open(self, name: str, flags: int, kind: int, mode: int = 0) -> int:
        try:
            return above_standard(os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=self.fd))
        except OSError as error:
            pass_on_foreign(error)
            error.filename = os.path.join(self.path, name)
            if isinstance(error, FileNotFoundError | FileExistsError):
                raise
            facts = self.facts(name)
            if facts is None or stat.S_IFMT(facts.st_mode) == kind:
                raise
        raise self._refusal(name, why_foreign(facts, facts, None) or "it is no directory")

    def refuse_foreign(self, name: str, facts: os.stat_result, fd: int = -1) -> None:
        """RefusedFile if the file with these facts must not be opened (see `why_foreign`). `fd`:
        its descriptor, if it is open."""
        place = os.fstat(self.fd)
        if facts.st_uid == place.st_uid and facts.st_nlink == 1 and stat.S_ISREG(facts.st_mode):
            return
        data = (self._parent or self).facts(DATA)
        acl = _has_acl(f"{self.by_descriptor}/{name}" if fd < 0 else fd)
        why = why_foreign(facts, place, data, acl)
        # The lock file has two names while it is made. Another file lacks its magic.
        made = name == OWNERS and stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1
        if why and not made:
            raise self._refusal(name, why)

    def _refusal(self, name: str, why: str) -> RefusedFile:
        return RefusedFile(
            f"{os.path.join(self.path, name)} is not opened: {why}. Remove it or put the ledger's "
            "own file back; a ledger on another disk is moved as a whole directory"
        )

    def make(self, name: str, flags: int, mode: int) -> int:
        """As `open`, and create the file if it does not exist: with the mode and owner of
        `data.mdb` if there is one, else with `mode`, whatever the umask. A file that exists is not
        changed."""
        try:
            fd = self._open(name, flags | os.O_CREAT | os.O_EXCL | SAFELY, stat.S_IFREG, mode)
        except FileExistsError as error:
            pass_on_foreign(error)
            if flags & os.O_EXCL:
                raise
            return self.open(name, flags)
        try:
            model = (self._parent or self).facts(DATA)
            if model is None:
                set_permissions(fd, mode)
            else:
                inherit_owner(fd, model)
        except BaseException:
            os.close(fd)
            self.remove(name)
            raise
        return fd

    def make_directory(self, name: str) -> Directory:
        """The directory `name` in this one, created with this one's mode and owner if it does not
        exist. Its name is durable after `sync`."""
        try:
            os.mkdir(name, 0o700, dir_fd=self.fd)
        except FileExistsError as error:
            pass_on_foreign(error)
            return Directory(os.path.join(self.path, name), self)
        found = Directory(os.path.join(self.path, name), self)
        try:
            inherit_owner(found.fd, os.fstat(self.fd))
        except BaseException:
            found.close()
            os.rmdir(name, dir_fd=self.fd)
            raise
        return found

    def facts(self, name: str) -> os.stat_result | None:
        """The result of `lstat` for a file; None if it does not exist."""
        with Ignoring(FileNotFoundError, NotADirectoryError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
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
        does, or if that cannot be seen."""
        if not self.is_open:
            return "its file descriptors were closed by the program (os.closerange, for example)"
        try:
            if _identity(os.stat(self.path)) == self.identity:
                return ""
            why = "its path leads to another directory now"
        except PermissionError as error:
            pass_on_foreign(error)
            return ""  # privileges were dropped: it cannot be checked
        except OSError as error:
            pass_on_foreign(error)
            why = f"nothing is at its path any more ({error.strerror})"
        if self._is_in_its_place():
            return ""
        return f"{why}{self._elsewhere()}"

    def _is_in_its_place(self) -> bool:
        """Has this process changed its root (chroot), so that the path means something else, while
        the directory is still where it was, seen from itself?"""
        if _identity(os.stat("/")) == self._root:
            return False
        with Ignoring(OSError):  # it was removed
            found = os.stat(f"../{self._name}", dir_fd=self.fd, follow_symlinks=False)
            return _identity(found) == self.identity and self._identity_above() == self._above
        return False

    def _identity_above(self) -> tuple[int, int]:
        return _identity(os.stat("..", dir_fd=self.fd))

    def _elsewhere(self) -> str:
        with Ignoring(OSError):
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
        with Ignoring(OSError):
            directory.remove(found)


def sync_directory(path: str) -> None:
    """Make the names of the files in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
