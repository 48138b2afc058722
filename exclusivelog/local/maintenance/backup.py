"""Backups: a consistent copy of a ledger, made while other processes write.

First the tables are copied, compacted by LMDB; then the segments to which they refer; at last the
journal, up to the first frame that depends on later tables. The process that opens the copy
recovers it from that journal, as after a crash. So the copy has all messages that were acknowledged
before the backup began.

The copy is made in a subdirectory of the target, until it is complete (rule H4):

```text
backup-unfinished/          exists before the first byte is copied, until every byte is durable
    lock                    locked (flock) by the process that makes the backup, and names it
    data.mdb journal segments/      the copy, until it is renamed into the directory
```

`open` refuses a directory that holds `backup-unfinished`, so the process may die at any instant.
The next backup into the directory finds the lock free, removes what the dead process left, and
copies again. The subdirectory is inside the target because the target may be a mount point, and a
rename cannot leave its file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from collections.abc import Iterator, Sequence

import lmdb

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, LedgerError, LedgerFullError
from exclusivelog.local.faults import DAMAGED, NO_ROOM, retry_damaged, translated
from exclusivelog.local.files import DATA, Directory, above_standard, sync_directory
from exclusivelog.local.records import NAMES
from exclusivelog.local.storage.environment import UNFINISHED_BACKUP, check_header, identity
from exclusivelog.local.storage.journal import cut_off
from exclusivelog.local.storage.ledger import MOST_ATTEMPTS, Ledger
from exclusivelog.local.storage.segments import NAME as SEGMENT
from exclusivelog.local.storage.tables import Tables

# ---- where to --------------------------------------------------------------------------


# `data.mdb` is renamed last: without it a directory holds no ledger.
FILES = ("segments", "journal", "data.mdb")
LOCK = "lock"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


@contextlib.contextmanager
def claimed(path: str, mode: int) -> Iterator[Target]:
    """Claim a target directory, so that no other backup writes to it; create it with `mode` if it
    is missing. An error in the block before `Target.install` removes the copy and leaves the
    marker."""
    made = _make_directory(path, mode)
    try:
        target = Target(path, _claim(path), bool(made))
    except BaseException:
        _remove_empty(made)
        raise
    with target:
        target.clear_leftovers()
        yield target


class Target:
    """A claimed directory. Use `claimed`."""

    def __init__(self, path: str, lock: Lock, made: bool) -> None:
        self.path = path
        self._made = made
        self.work = os.path.join(path, UNFINISHED_BACKUP)  # the copy is made here
        self._lock = lock
        self._installing = self._complete = False

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and not self._complete and self._lock.in_place:
                # Report the error that ended the backup, not one of the clean-up.
                with contextlib.suppress(OSError):
                    self.clear()
        finally:
            self._lock.close()

    def clear_leftovers(self) -> None:
        """Remove what a dead process has copied, and perhaps begun to install."""
        _remove_copy(self.path)
        self.clear()
        others = set(os.listdir(self.work)) - {LOCK}
        if others:
            raise LedgerError(
                f"{self.work} holds {min(others)!r}, which is not from a backup; remove it, then "
                "run the backup again"
            )

    def clear(self) -> None:
        """Remove the incomplete copy."""
        if self._installing:
            _remove_copy(self.path)
        _remove_copy(self.work)

    def install(self, source: Directory) -> None:
        """Move a finished copy into the target durably, with the owner of `source`. The files
        themselves must have been flushed."""
        self._check()
        copied = [name for name in FILES if os.path.lexists(os.path.join(self.work, name))]
        self._give_to_owner(source, copied)
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

    def _give_to_owner(self, source: Directory, copied: Sequence[str]) -> None:
        """Give a copy that root has made to the owner of the ledger, whose programs use it."""
        owner = source.facts(DATA) or os.fstat(source.fd)
        for name in copied:
            set_owner(os.path.join(self.work, name), owner)
        segments = os.path.join(self.work, "segments")
        for name in os.listdir(segments) if "segments" in copied else ():
            set_owner(os.path.join(segments, name), owner)
        if self._made:
            set_owner(self.path, os.fstat(source.fd))

    def _check(self) -> None:
        """LedgerError if the directory was replaced, or got other files, since it was claimed."""
        if not self._lock.in_place:
            raise LedgerError(
                f"{self.path} was removed or replaced while the backup was made; run it again"
            )
        others = set(os.listdir(self.path)) - {UNFINISHED_BACKUP}
        if others:
            raise LedgerError(
                f"{min(others)!r} appeared in {self.path} while the backup was made; a backup goes "
                "into a directory of its own"
            )

    def _remove_marker(self) -> None:
        # Close the lock before removing its directory: NFS keeps the name of an open file.
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
    """The lock file of a marker directory, held while the process that makes the backup is alive:
    from `take` until `close`, the object's finalizer, or the death of the process."""

    _fd = -1  # set here in case an interrupt ends `__init__`

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
        """Release the lock. A second call has no effect."""
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
    """Make the directory, and missing ones above it, durably. Returns those made, the outermost
    first."""
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
    """Make the directory with its marker in it, atomically: an empty directory could be opened as a
    new ledger."""
    above, name = os.path.split(path)
    made = os.path.join(above, f".{name}-{os.urandom(8).hex()}.{UNFINISHED_BACKUP}")
    os.mkdir(made, 0o700)
    try:
        set_mode(made, mode | 0o700)
        os.mkdir(os.path.join(made, UNFINISHED_BACKUP), 0o700)
        os.rename(made, path)  # also replaces an empty directory that another process made
    except OSError as error:
        _remove_empty([made, os.path.join(made, UNFINISHED_BACKUP)])
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _remove_empty(made: list[str]) -> None:
    for directory in reversed(made):
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _claim(path: str) -> Lock:
    """Take the lock of the marker directory in `path`; create the marker if it is missing."""
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
    """Create the marker; False if it exists already."""
    try:
        os.mkdir(work, 0o700)
    except FileExistsError:
        if os.path.islink(work) or not os.path.isdir(work):
            raise _not_empty(path) from None
        return False
    sync_directory(path)  # before anything else is there
    return True


def _refuse_others(path: str, work: str, fresh: bool) -> None:
    """LedgerError if the directory holds anything but an unfinished backup."""
    others = set(os.listdir(path)) - {UNFINISHED_BACKUP}
    if fresh and others:  # they appeared after the directory was found empty
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
    """Give a copy the mode of its source, if the file system has modes."""
    with contextlib.suppress(PermissionError):  # on FAT, for example, the mode is the mount's
        os.chmod(path, mode)


def set_owner(path: str, owner: os.stat_result) -> None:
    """Give a copy the owner of its source, if possible: root may, on most file systems."""
    with contextlib.suppress(OSError):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


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
    """Add advice to errors of a full target, or of files without permission."""
    try:
        yield
    except LedgerError:
        raise  # it has advice already
    except (OSError, lmdb.Error) as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
        if code in NO_ROOM:
            raise LedgerFullError(
                f"{path}: no space left for the backup ({error}); free some, then run it again"
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


# ---- the copy --------------------------------------------------------------------------


RUN_AGAIN = "there is no backup; run it again"
COPIED_AT_ONCE = 1 << 24  # bytes


def backup(ledger: Ledger, path: str) -> None:
    """Copy the ledger into an empty directory, or one that holds an unfinished backup."""
    # Unlike other I/O errors, one of the copy does not fail the ledger.
    with ledger.environment() as env, translated(path, way_out=RUN_AGAIN):
        begun = 0 if ledger.journal is None else ledger.journal.tail
        refuse_inside(ledger.path, path)
        with (
            explained(ledger.path, path),
            claimed(path, _mode(ledger.directory.by_descriptor)) as target,
        ):
            for attempt in range(MOST_ATTEMPTS):
                if attempt and not ledger.readonly:
                    ledger.checkpoint()  # so that the tables have as much as possible
                if retry_damaged(lambda: _copy_anew(ledger, env, target, begun)):
                    target.install(ledger.directory)
                    return
            raise LedgerError(
                f"{ledger.path}: the journal was overwritten during each of {MOST_ATTEMPTS} copies "
                f"of the tables; {RUN_AGAIN}"
            )


def _copy_anew(ledger: Ledger, env: lmdb.Environment, target: Target, begun: int) -> bool:
    target.clear()
    return _copy(ledger, env, target.work, begun)


def _copy(ledger: Ledger, env: lmdb.Environment, work: str, begun: int) -> bool:
    """Copy everything into the directory `work`. False if the copy may lack messages that were
    there at the journal's position `begun`."""
    journal = ledger.journal
    # Read before the tables, which then have all that this version depends on.
    version = journal.version if journal is not None and journal.ready else None
    with ledger.segments.held() as files:
        _copy_tables(ledger, env, work)
        generation, applied = _copy_segments(ledger, work, files)
    if journal is None or _copy_journal(ledger, journal, work, (generation, applied), version):
        return True
    return version is not None and applied >= begun


def _copy_tables(ledger: Ledger, env: lmdb.Environment, work: str) -> None:
    mode = _mode(os.path.join(ledger.directory.by_descriptor, DATA))
    with _created(os.path.join(work, DATA), mode) as fd:
        try:
            env.copyfd(fd, compact=True)
        except DAMAGED:
            with translated(ledger.path):  # LMDB's errors here are about the source
                raise
        os.fsync(fd)
    with contextlib.closing(Directory(work)) as copied:
        check_header(copied)  # a shorter file would end this process by SIGBUS


def _copy_segments(ledger: Ledger, work: str, files: dict[int, int]) -> tuple[int, int]:
    """Copy the segments to which the copied tables refer. Returns the journal's generation, and the
    position up to which the tables have its frames."""
    wanted, place = _what_the_copy_needs(ledger, work)
    if wanted:
        os.mkdir(os.path.join(work, "segments"))
        mode = _mode(os.path.join(ledger.directory.by_descriptor, "segments")) | 0o700
        set_mode(os.path.join(work, "segments"), mode)
    for segment, (end, _) in wanted.items():
        try:
            if segment not in files:  # begun after the files were opened
                files[segment] = ledger.segments.open(segment)
            source = files[segment]
            mode = os.fstat(source).st_mode & 0o777
            with _created(os.path.join(work, "segments", f"{segment:016x}"), mode) as target:
                _copy_bytes(source, target, end)
                os.fsync(target)
        except (ValueError, FileNotFoundError) as error:
            raise LedgerCorruptedError(
                f"segment {segment:016x} of {ledger.path} cannot be copied: {error}; "
                "verify() lists what is damaged"
            ) from error
    return place


def _what_the_copy_needs(
    ledger: Ledger, work: str
) -> tuple[dict[int, tuple[int, int]], tuple[int, int]]:
    with contextlib.ExitStack() as stack:
        # LMDB takes only UTF-8 paths.
        copied = stack.enter_context(contextlib.closing(Directory(work)))
        env = stack.enter_context(
            lmdb.open(
                copied.by_descriptor, max_dbs=len(NAMES), readonly=True, lock=False, create=False
            )
        )
        databases = {
            name: env.open_db(name.encode(), create=False) for name in ("segments", "meta")
        }
        with env.begin() as txn:
            tables = Tables(txn, databases, work, ledger.segments, ledger.journal)
            return tables.large.segments(), (tables.journal.generation, tables.journal.applied)


def _copy_journal(
    ledger: Ledger, journal: _core.Journal, work: str, place: tuple[int, int], version: int | None
) -> bool:
    """Copy the journal; False if frames that the tables lack may have been overwritten before."""
    generation, applied = place
    with contextlib.ExitStack() as files:
        source = ledger.directory.open("journal", os.O_RDONLY)
        files.callback(os.close, source)
        stat = os.fstat(source)
        copy = files.enter_context(_created(os.path.join(work, "journal"), stat.st_mode & 0o777))
        _copy_bytes(source, copy, stat.st_size)
        if version is not None:
            cut_off(copy, applied, generation, journal.capacity, version)
        os.fsync(copy)
    if version is None:  # no process had it open to write, unless one has opened it meanwhile
        return not journal.ready
    applied_by_now = journal.tail - journal.backlog
    return applied_by_now <= applied or journal.tail - applied < journal.capacity // 2


def copy_at_rest(directory: Directory, path: str) -> None:
    """Copy a ledger that no process changes meanwhile, byte by byte, into an empty directory, or
    one that holds an unfinished backup."""
    with translated(path, way_out=RUN_AGAIN):
        refuse_inside(directory.path, path)
        with (
            explained(directory.path, path),
            claimed(path, _mode(directory.by_descriptor)) as target,
        ):
            for name in (DATA, "journal"):
                if directory.facts(name) is not None:
                    _copy_file(directory, name, os.path.join(target.work, name))
            if directory.facts("segments") is not None:
                _copy_all_segments(directory, os.path.join(target.work, "segments"))
            target.install(directory)


def _copy_all_segments(directory: Directory, path: str) -> None:
    os.mkdir(path)
    with contextlib.closing(Directory(os.path.join(directory.path, "segments"), directory)) as at:
        set_mode(path, _mode(at.by_descriptor) | 0o700)
        for name in at.names():
            _copy_file(at, name, os.path.join(path, name))


def _copy_file(directory: Directory, name: str, path: str) -> None:
    source = directory.open(name, os.O_RDONLY)
    try:
        facts = os.fstat(source)
        with _created(path, facts.st_mode & 0o777) as target:
            _copy_bytes(source, target, facts.st_size)
            os.fsync(target)
    finally:
        os.close(source)


# ---- files -------------------------------------------------------------------------------


def _mode(path: str) -> int:
    return os.stat(path).st_mode & 0o777


@contextlib.contextmanager
def _created(path: str, mode: int) -> Iterator[int]:
    """Create a file with this mode, regardless of the umask; returns its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = above_standard(os.open(path, flags, 0o600))
    try:
        set_mode(fd, mode)
        yield fd
    finally:
        os.close(fd)


def _copy_bytes(source: int, target: int, end: int) -> None:
    """Copy the first `end` bytes; ValueError if there are fewer."""
    position = 0
    while position < end:
        copied = os.sendfile(target, source, position, min(end - position, COPIED_AT_ONCE))
        if copied == 0:
            raise ValueError(f"it is cut off after {position} bytes of {end}")
        position += copied
