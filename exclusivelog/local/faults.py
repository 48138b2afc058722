"""Translation of LMDB's and the system's errors, with advice (rule H2)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import lmdb

from exclusivelog import logs
from exclusivelog.errors import (
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
    LedgerVersionError,
)
from exclusivelog.foreign import Ignoring, is_foreign, pass_on_foreign
from exclusivelog.local.files import SEGMENTS, RefusedFile, read_whole

NO_SUCH_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR)
HARDLY_ANY_ROOM = 1 << 18  # bytes; after a truncated write, less is free
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# After damage that LMDB finds in the root of a table, its first error may be the last of these.
DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.BadTxnError)
OPEN_AGAIN = "close the engine and open it again"
SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)

Item = TypeVar("Item")
Found = TypeVar("Found")

log = logging.getLogger(__name__)


@contextlib.contextmanager
def translated(
    path: str,
    readonly: bool = False,
    fail: Callable[[LedgerIOError], None] | None = None,
    way_out: str = OPEN_AGAIN,
) -> Iterator[None]:
    """Translate errors of LMDB and the system in the block. `fail` is called with a final error;
    `way_out` is the advice if there is none more specific."""
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
            del raised  # else error and frame form a cycle, which keeps files open


def translation(
    path: str, error: BaseException, readonly: bool = False, way_out: str = OPEN_AGAIN
) -> LedgerError | None:
    """The library's error for one of LMDB's or the system's; None for any other."""
    if isinstance(error, struct.error):
        return LedgerCorruptedError(f"{path}: a row is damaged: {error}")
    if isinstance(error, lmdb.Error):
        code = getattr(error, "code", 0)
        translated = _translate(path, error, code, readonly, way_out)
        if code > 0 and translated.errno is None:  # the system's; LMDB's own are negative
            translated.errno = code
        return translated
    if isinstance(error, LedgerError):
        return None  # it is translated already
    if isinstance(error, OSError) and error.errno and not is_foreign(error):
        translated = _translate(path, error, error.errno, readonly, way_out)
        translated.errno = error.errno
        return translated
    return None


def locks_all_memory() -> bool:
    """Has this process locked its memory (mlockall), so that a limit on that stops each mapping?"""
    with Ignoring(OSError):
        for line in read_whole("/proc/self/status").splitlines():
            if line.startswith(b"VmLck:"):
                return int(line.split()[1]) > 0
    return False


def retry_damaged(read: Callable[[], Found]) -> Found:
    """Call `read`, and retry it once on corruption (rule G9): a concurrent trim or replacement can
    look like damage. Raises LedgerCorruptedError if the same damage is found twice.

    >>> retry_damaged(lambda: "sound")
    'sound'
    """
    before = ""
    while True:
        try:
            return read()
        except LedgerCorruptedError as error:
            if str(error) == before:
                raise
            before = str(error)


REPORTED = 1000  # damaged rows that are remembered
_reported: set[tuple[str, str, str]] = set()


def apart_if_damaged(
    path: str,
    some: Sequence[Item],
    change: Callable[[Sequence[Item]], list[Found]],
    consequence: str,
) -> list[Found]:
    """Call `change`, which is one transaction, for all of these; if a row that it needs is damaged,
    for one after the other. One whose rows are damaged holds up no other one: it is passed over,
    and logged with the consequence."""
    with contextlib.suppress(LedgerCorruptedError):
        return change(some)
    found: list[Found] = []
    for one in some:
        try:
            found += change([one])
        except LedgerCorruptedError as error:
            report_damaged(path, error, consequence)
    return found


def report_damaged(path: str, error: LedgerCorruptedError, consequence: str) -> None:
    """Log a damaged row that work on others passes over; once, since that work is repeated."""
    line = path, str(error), consequence
    if line not in _reported:
        if len(_reported) == REPORTED:
            _reported.clear()
        _reported.add(line)
        logs.emit(log, logs.ROW_DAMAGED, ledger=path, reason=str(error), consequence=consequence)


def map_full(path: str, pinned_by: str = "") -> LedgerFullError:
    """The error for tables that have reached `map_size`. `pinned_by`: the read that keeps LMDB from
    using pages again, if one does."""
    way_out = "open the ledger with a larger map_size, or trim or delete topics"
    if pinned_by:
        way_out = f"{pinned_by}. End that read or its process, or {way_out}"
    return LedgerFullError(f"{path}: the map is full; {way_out}")


def no_room(path: str, error: BaseException) -> LedgerFullError:
    """The error for a disk that is full."""
    return LedgerFullError(
        f"{path}: no space left on the disk ({error}); nothing was written. Free some space, or "
        "trim or delete topics"
    )


def is_nearly_full(directory: int) -> bool:
    """Has the disk hardly any room? `directory`: a descriptor of one on it. Ignores quotas."""
    room = os.fstatvfs(directory)
    return room.f_bavail * room.f_frsize < HARDLY_ANY_ROOM


def may_be_truncated(error: BaseException) -> bool:
    """Is it the error that LMDB reports for a truncated write? A failed flush has the same one."""
    return isinstance(error, lmdb.Error) and getattr(error, "code", 0) == errno.EIO


def _ran_out_of_room(path: str) -> bool:
    """Is the disk full, or a limit reached? LMDB reports every truncated write as an I/O error."""
    try:
        size = os.stat(os.path.join(path, "data.mdb")).st_size
    except OSError as error:
        pass_on_foreign(error)
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = limit != resource.RLIM_INFINITY and size + HARDLY_ANY_ROOM > limit
    return limited or not _takes(path, HARDLY_ANY_ROOM)


def _takes(path: str, size: int) -> bool:
    """Can so many more bytes be allocated? Tries it with a temporary file: the free space that
    statvfs reports ignores quotas and reserved blocks."""
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        pass_on_foreign(error)
        return error.errno not in NO_ROOM and os.statvfs(path).f_bavail > 0
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        pass_on_foreign(error)
        return error.errno not in NO_ROOM
    finally:
        os.close(fd)
    return True


def _translate(path: str, error: Exception, code: int, readonly: bool, way_out: str) -> LedgerError:
    if isinstance(error, RefusedFile):
        return LedgerError(str(error.strerror))
    if isinstance(error, lmdb.MapFullError):
        return map_full(path)
    if isinstance(error, lmdb.ReadersFullError):
        return LedgerFullError(
            f"{path}: all max_readers reader slots are in use; close some readers, or remove "
            "lock.mdb while no engine is open and open again with more"
        )
    # LMDB's copy reports a truncated write as an invalid argument.
    if code == errno.EFBIG:
        return LedgerFullError(
            f"{path}: a file has reached the largest size that this process may write ({error}); "
            "nothing was written. Raise the limit (ulimit -f)"
        )
    if code in NO_ROOM or (code in (errno.EIO, errno.EINVAL) and _ran_out_of_room(path)):
        return no_room(path, error)
    if isinstance(error, lmdb.Error) and code == errno.EAGAIN and not locks_all_memory():
        return LedgerError(
            f"{path}: a process in another pid namespace (such as a container) reads it with the "
            f"same process id as this one, {os.getpid()}; processes that share a ledger must share "
            "a pid namespace"
        )
    if code in SHORT_OF:
        locked = ", -l: it has locked its memory, mlockall" if locks_all_memory() else ""
        return LedgerError(
            f"{path}: out of file descriptors or memory ({error}); nothing was written. "
            f"Try again, or raise the limit of this process (ulimit -n, -v{locked})"
        )
    if code in (errno.ENOSYS, errno.ENOTSUP):
        return LedgerError(
            f"{path}: the system refuses a call that a ledger needs ({error}); it needs the kernel "
            "of Linux, not an emulator, and a container that permits the call (seccomp)"
        )
    if code in NO_SUCH_PLACE:
        wanted = getattr(error, "filename", None)
        if str(wanted).startswith("/proc/"):
            return LedgerError(
                f"{path}: {wanted} is missing, which a ledger needs; mount /proc with all its "
                "files (systemd: without ProcSubset=pid)"
            )
        if wanted is not None and os.path.dirname(wanted) == os.path.join(path, SEGMENTS):
            return LedgerError(
                f"{path}/{SEGMENTS} was removed ({error}); nothing was written. Close all engines, "
                "and put the directory back, or restore a backup"
            )
        return LedgerError(
            f"{path} cannot be opened: {error}; give a directory that exists or can be created"
        )
    if code in (errno.EACCES, errno.EROFS, errno.EPERM) or isinstance(error, lmdb.ReadonlyError):
        return LedgerError(
            f"{path} cannot be written ({error}); check its owner and mount"
            + (
                ", and the calls that its container permits (seccomp)"
                if code == errno.EPERM
                else ""
            )
            + (
                ". Readers, too, must be able to write lock.mdb, unless the mount is read-only"
                if readonly
                else ", or open it with readonly=True"
            )
        )
    if isinstance(error, DAMAGED):
        table = "the root of a table cannot be read"
        why = table if isinstance(error, lmdb.BadTxnError) else error
        return LedgerCorruptedError(f"{path}/data.mdb is damaged: {why}; restore a backup")
    if isinstance(error, lmdb.VersionMismatchError):
        return LedgerVersionError(f"{path}/data.mdb has another LMDB file format: {error}")
    return LedgerIOError(f"{path}: {error}; {way_out}")
