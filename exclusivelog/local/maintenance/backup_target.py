"""The directory that a backup goes into: complete, or refused by `open` (rule H4).

```text
backup-unfinished/          exists before the first byte is copied, until every byte is durable
    lock                    locked (flock) by the process that makes the backup; its text says which
    data.mdb journal segments/      the copy, until it is renamed into the directory
```

`open` refuses a directory that holds `backup-unfinished`, so it does not matter at which instant
the process dies. The next backup into the directory finds the lock free, removes what the dead
process left, and copies again. The subdirectory lies inside the target because the target may be
a mount point, and a rename cannot leave its file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator

import lmdb

from exclusivelog.errors import LedgerError, LedgerFullError
from exclusivelog.local.faults import NO_ROOM
from exclusivelog.local.files import above_standard, sync_directory
from exclusivelog.local.storage.location import UNFINISHED_BACKUP, identity
from exclusivelog.local.storage.segments import NAME as SEGMENT

# `data.mdb` is renamed last: without it a directory holds no ledger.
FILES = ("segments", "journal", "data.mdb")
LOCK = "lock"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


@contextlib.contextmanager
def claimed(path: str, mode: int) -> Iterator[Target]:
    """A target directory that no other backup writes to; it is made with `mode` if there is none.
    An error that ends the block before `Target.install` removes the copy and leaves the marker."""
    made = _make_directory(path, mode)
    try:
        target = Target(path, _claim(path))
    except BaseException:
        _remove_empty(made)
        raise
    with target:
        target.clear_leftovers()
        yield target


class Target:
    """A claimed directory. Use `claimed`."""

    def __init__(self, path: str, lock: Lock) -> None:
        self.path = path
        self.work = os.path.join(path, UNFINISHED_BACKUP)  # the copy is made here
        self._lock = lock
        self._installing = self._complete = False

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and not self._complete and self._lock.in_place:
                # The error that ended the backup matters more than one of its cleaning up.
                with contextlib.suppress(OSError, LedgerError):
                    self.clear()
        finally:
            self._lock.close()

    def clear_leftovers(self) -> None:
        """Remove what a process that died has copied, and perhaps begun to install."""
        _remove_copy(self.path)
        self.clear()
        others = set(os.listdir(self.work)) - {LOCK}
        if others:
            raise LedgerError(
                f"{self.work} holds {min(others)!r}, which no backup puts there; remove it, then "
                "run the backup again"
            )

    def clear(self) -> None:
        """Remove what was copied so far."""
        if self._installing:
            _remove_copy(self.path)
        _remove_copy(self.work)

    def install(self) -> None:
        """Make a finished copy durable, and the directory a ledger. The files themselves must
        have been flushed."""
        self._check()
        copied = [name for name in FILES if os.path.lexists(os.path.join(self.work, name))]
        if "segments" in copied:
            sync_directory(os.path.join(self.work, "segments"))
        sync_directory(self.work)
        self._installing = True
        for name in copied:
            if name == "data.mdb":
                sync_directory(self.path)
            os.rename(os.path.join(self.work, name), os.path.join(self.path, name))
        sync_directory(self.path)
        self._complete = True
        self._remove_marker()
        sync_directory(self.path)

    def _check(self) -> None:
        """LedgerError if the directory is not what it was when it was claimed."""
        if not self._lock.in_place:
            raise LedgerError(
                f"{self.path} was removed or replaced while the backup was made; run it again"
            )
        others = set(os.listdir(self.path)) - {UNFINISHED_BACKUP}
        if others:
            raise LedgerError(
                f"{self.path} was given {min(others)!r} while the backup was made; a backup goes "
                "into a directory of its own"
            )

    def _remove_marker(self) -> None:
        # The lock is closed in between: NFS keeps the name of a file that is open.
        os.unlink(self._lock.path)
        self._lock.close()
        try:
            os.rmdir(self.work)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise LedgerError(
                f"another process began a backup into {self.path} as this one ended; use a "
                "directory for each backup"
            ) from error


class Lock:
    """The lock file of a marker directory: it shows whether the process that makes the backup
    lives. Held from `take` until `close`, the object's end, or the death of the process."""

    _fd = -1  # also where an interrupt strikes `__init__`

    def __init__(self, path: str) -> None:
        self.path = path
        _locks.add(self)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = above_standard(os.open(path, flags, 0o600))

    def take(self, target: str) -> bool:
        """False if the file was removed by the process that had locked it. LedgerError if another
        backup into `target` holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(self._fd, 1000, 0).decode(errors="replace") or "not known which"
            raise LedgerError(
                f"a backup into {target} is being made by another process ({who}); wait for its "
                "end, or choose another directory"
            ) from None
        if not self.in_place:
            return False
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
        return True

    @property
    def in_place(self) -> bool:
        """Is this file still the one that its path names?"""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._fd >= 0 and os.path.samestat(found, os.fstat(self._fd))

    def close(self) -> None:
        """Closing twice does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _after_fork_in_child() -> None:
    # A copy of the descriptor would hold the lock after the parent's death.
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)

# ---- claim -------------------------------------------------------------------------------


def refuse_inside(ledger: str, path: str) -> None:
    """LedgerError if `path` is the ledger's own directory or lies in it, by whatever name."""
    own, at = identity(ledger), os.path.realpath(path)
    while True:
        if os.path.exists(at) and identity(at) == own:
            raise LedgerError(
                f"{path} lies inside the ledger {ledger}; choose a directory outside of it for "
                "the backup"
            )
        above = os.path.dirname(at)
        if above == at:
            return
        at = above


def _make_directory(path: str, mode: int) -> list[str]:
    """The directories that had to be made, the outermost first; their names are durable."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise LedgerError(f"{path} is a file; a backup goes into a directory of its own")
    at, missing = path, list[str]()
    while not os.path.exists(at):
        missing.insert(0, at)
        at = os.path.dirname(at)
    if len(missing) > 1:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if missing:
        _make_marked(path, mode)
    for directory in missing:
        sync_directory(os.path.dirname(directory))
    return missing


def _make_marked(path: str, mode: int) -> None:
    """The directory with its marker in it from the first instant: an empty one would be opened as
    a new ledger."""
    above, name = os.path.split(path)
    made = os.path.join(above, f".{name}-{os.urandom(8).hex()}.{UNFINISHED_BACKUP}")
    os.mkdir(made, 0o700)
    try:
        set_mode(made, mode | 0o700)
        os.mkdir(os.path.join(made, UNFINISHED_BACKUP), 0o700)
        os.rename(made, path)  # over an empty directory that another process made, too
    except OSError as error:
        _remove_empty([made, os.path.join(made, UNFINISHED_BACKUP)])
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _remove_empty(made: list[str]) -> None:
    for directory in reversed(made):
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _claim(path: str) -> Lock:
    """The lock of the marker directory in `path`, held; the marker is made if there is none."""
    work = os.path.join(path, UNFINISHED_BACKUP)
    while True:
        names = os.listdir(path)
        if names and UNFINISHED_BACKUP not in names:
            raise _not_empty(path)
        fresh = _make_marker(path, work)
        try:
            lock = Lock(os.path.join(work, LOCK))
        except FileNotFoundError:
            continue  # the process that made the marker has just finished
        except BaseException:
            if fresh:
                _remove_empty([work])
            raise
        try:
            if lock.take(path):
                _refuse_others(path, work, fresh)
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def _not_empty(path: str) -> LedgerError:
    return LedgerError(f"{path} is not empty; a backup goes into a directory of its own")


def _make_marker(path: str, work: str) -> bool:
    """False if it is there already."""
    try:
        os.mkdir(work, 0o700)
    except FileExistsError:
        if os.path.islink(work) or not os.path.isdir(work):
            raise _not_empty(path) from None
        return False
    sync_directory(path)  # before anything else is there
    return True


def _refuse_others(path: str, work: str, fresh: bool) -> None:
    """LedgerError if the directory holds what is no leftover of a backup."""
    others = set(os.listdir(path)) - {UNFINISHED_BACKUP}
    if fresh and others:  # they came since the directory was found empty
        os.unlink(os.path.join(work, LOCK))
        os.rmdir(work)
        raise _not_empty(path)
    if others - set(FILES):
        raise LedgerError(
            f"{path} holds {min(others - set(FILES))!r} beside an unfinished backup; a backup goes "
            "into a directory of its own"
        )


# ---- files -------------------------------------------------------------------------------


def set_mode(path: str | int, mode: int) -> None:
    """Give a copy the mode of its source, where the file system has modes."""
    with contextlib.suppress(PermissionError):  # on FAT, say, the mode is the mount's
        os.chmod(path, mode)


def _remove_copy(directory: str) -> None:
    segments = os.path.join(directory, "segments")
    if os.path.isdir(segments) and not os.path.islink(segments):
        for name in os.listdir(segments):
            if SEGMENT.fullmatch(name):
                os.unlink(os.path.join(segments, name))
        os.rmdir(segments)
    for name in FILES[1:]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))


# ---- errors ------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(ledger: str, path: str) -> Iterator[None]:
    """Say what to do where the target is full, or a file of either side may not be used."""
    try:
        yield
    except (OSError, lmdb.Error) as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        if code in NO_ROOM:
            raise LedgerFullError(
                f"{path}: no room left for the backup ({error}); make room, then run it again"
            ) from error
        if code not in NOT_WRITABLE:
            raise
        if str(getattr(error, "filename", "")).startswith(ledger + os.sep):
            raise LedgerError(
                f"{ledger} cannot be read for a backup ({error}); make its files readable for "
                "this user"
            ) from error
        raise LedgerError(
            f"{path}: the backup may not be written ({error}); choose a directory in which this "
            "user may create files"
        ) from error
