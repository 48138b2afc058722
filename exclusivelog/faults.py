"""What the errors of LMDB and of the system mean for a ledger, and the way out (rule H2)."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

import lmdb

from exclusivelog.errors import (
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
    LedgerVersionError,
)

NO_SUCH_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR)
HARDLY_ANY_ROOM = 1 << 18  # bytes; a write that was cut short leaves less
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
OPEN_AGAIN = "close the engine and open it again"
# No file's: whoever Python runs in between, a signal handler above all, has raised it.
FOREIGN = (
    TimeoutError, ConnectionError, ChildProcessError, ProcessLookupError, InterruptedError,
)  # fmt: skip
SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)

Found = TypeVar("Found")


@contextlib.contextmanager
def translated(
    path: str, readonly: bool = False, fail: Callable[[LedgerIOError], None] | None = None,
    way_out: str = OPEN_AGAIN,
) -> Iterator[None]:  # fmt: skip
    """The library's own errors for LMDB's and the system's. `fail` is told what is final, and
    `way_out` is said where there is no better advice."""
    try:
        yield
    except Exception as error:
        raised = translation(path, error, readonly, way_out)
        if raised is None:
            raise
        if fail is not None and isinstance(raised, LedgerIOError):
            fail(raised)
        try:
            raise raised from error
        finally:
            del raised  # else error and frame keep each other, and what was opened so far


def translation(
    path: str, error: BaseException, readonly: bool = False, way_out: str = OPEN_AGAIN
) -> LedgerError | None:
    """The library's own error for one of LMDB's or the system's; None for any other."""
    if isinstance(error, struct.error):
        return LedgerCorruptedError(f"{path}: a row is damaged: {error}")
    if isinstance(error, lmdb.Error):
        return _translate(path, error, getattr(error, "code", 0), readonly, way_out)
    if isinstance(error, OSError) and error.errno and not isinstance(error, FOREIGN):
        return _translate(path, error, error.errno, readonly, way_out)
    return None


def met_twice(look: Callable[[], Found]) -> Found:
    """What `look` finds. Damage is only what is met twice (rule G9): what seems damaged may have
    been on its way out, trimmed or replaced, and then another look does not meet it.

    >>> met_twice(lambda: "sound")
    'sound'
    """
    met = ""
    while True:
        try:
            return look()
        except LedgerCorruptedError as error:
            if str(error) == met:
                raise
            met = str(error)


def _ran_out_of_room(path: str) -> bool:
    """LMDB calls a write that the system cut short an I/O error, whatever cut it."""
    try:
        size = os.stat(os.path.join(path, "data.mdb")).st_size
    except OSError:
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = limit != resource.RLIM_INFINITY and size + HARDLY_ANY_ROOM > limit
    return limited or not _takes(path, HARDLY_ANY_ROOM)


def _takes(path: str, size: int) -> bool:
    """Does the disk take so many bytes more? Asked by a file without a name: what statvfs calls
    free has quotas in it, and what the file system keeps for itself."""
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.errno not in NO_ROOM and os.statvfs(path).f_bavail > 0
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        return error.errno not in NO_ROOM
    finally:
        os.close(fd)
    return True


def _translate(path: str, error: Exception, code: int, readonly: bool, way_out: str) -> LedgerError:
    if isinstance(error, lmdb.MapFullError):
        return LedgerFullError(
            f"{path}: the map is full; open the ledger with a larger map_size, or trim it"
        )
    if isinstance(error, lmdb.ReadersFullError):
        return LedgerFullError(
            f"{path}: max_readers read at the same time; close some, or remove lock.mdb while no "
            "engine is open and open again with more"
        )
    # LMDB's copy calls it an invalid argument.
    if code in NO_ROOM or (code in (errno.EIO, errno.EINVAL) and _ran_out_of_room(path)):
        return LedgerFullError(f"{path}: no room left ({error}); nothing was written")
    if isinstance(error, lmdb.Error) and code == errno.EAGAIN:
        return LedgerError(
            f"{path}: a process of another pid namespace (a container, say) reads it, which has "
            f"this one's id there, {os.getpid()}; processes that share a ledger must share their "
            "process ids"
        )
    if code in SHORT_OF:
        return LedgerError(
            f"{path}: the system is short of files or memory ({error}); nothing was written. "
            "Try again, or raise the limit (ulimit -n, -v)"
        )
    if code in NO_SUCH_PLACE:
        return LedgerError(f"{path} cannot be opened: {error}; a ledger lives in a directory")
    if code in (errno.EACCES, errno.EROFS, errno.EPERM) or isinstance(error, lmdb.ReadonlyError):
        return LedgerError(
            f"{path} cannot be written ({error}); check its owner and mount"
            + (
                ". Readers, too, must be able to write lock.mdb, unless the mount is read-only"
                if readonly
                else ", or open it with readonly=True"
            )
        )
    if isinstance(error, DAMAGED):
        return LedgerCorruptedError(f"{path}/data.mdb is damaged: {error}; restore a backup")
    if isinstance(error, lmdb.VersionMismatchError):
        return LedgerVersionError(f"{path}/data.mdb has another LMDB file format: {error}")
    return LedgerIOError(f"{path}: {error}; {way_out}")
