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
import stat
import weakref
from collections.abc import Iterator, Sequence

import lmdb

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, LedgerError, LedgerFullError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.faults import DAMAGED, NO_ROOM, retry_damaged, translated
from exclusivelog.local.files import (
    DATA,
    SEGMENTS,
    Directory,
    above_standard,
    give_to,
    sync_directory,
    temporary_name,
)
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
        target = Target(path, bool(made))
    except BaseException:
        _remove_empty(made)
        raise
    with target:
        target.clear_leftovers()
        yield target


class Target:
    """A claimed directory. Use `claimed`."""

    def __init__(self, path: str, made: bool) -> None:
        self.path = path
        self._made = made
        self._place = Directory(path)
        try:
            self._lock, self._copied = _claim(self._place)
        except BaseException:
            self._place.close()
            raise
        # The copy is made here: whoever may write to the target can rename the subdirectory.
        self.work = self._copied.by_descriptor
        self._installing = self._complete = False

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and not self._complete and self._lock.in_place:
                # Report the error that ended the backup, not one of the clean-up.
                with Ignoring(OSError):
                    self.clear()
        finally:
            self._lock.close()
            self._copied.close()
            self._place.close()

    def clear_leftovers(self) -> None:
        """Remove what a dead process has copied, and perhaps begun to install."""
        _remove_copy(self._place)
        self.clear()
        others = set(self._copied.names()) - {LOCK}
        if others:
            raise LedgerError(
                f"{self._copied.path} holds {min(others)!r}, which is not from a backup; remove "
                "it, then run the backup again"
            )

    def clear(self) -> None:
        """Remove the incomplete copy."""
        if self._installing:
            _remove_copy(self._place)
        _remove_copy(self._copied)

    def install(self, source: Directory) -> None:
        """Move a finished copy into the target durably, with the owner of `source`. The files
        themselves must have been flushed."""
        self._check()
        names = self._copied.names()
        copied = [name for name in FILES if name in names]
        self._give_to_owner(source, copied)
        self._copied.sync()
        self._installing = True
        for name in copied:
            if name == "data.mdb":
                self._place.sync()
            os.rename(name, name, src_dir_fd=self._copied.fd, dst_dir_fd=self._place.fd)
        self._place.sync()
        self._complete = True
        self._remove_marker()
        self._place.sync()

    def _give_to_owner(self, source: Directory, copied: Sequence[str]) -> None:
        """Give a copy that root has made to the owner of the ledger, whose programs use it."""
        owner = source.facts(DATA) or os.fstat(source.fd)
        for name in copied:
            if name == SEGMENTS:
                self._give_segments(owner)
            else:
                _give_file(self._copied, name, owner)
        if self._made:
            set_owner(self._place.fd, os.fstat(source.fd))

    def _give_segments(self, owner: os.stat_result) -> None:
        segments = Directory(os.path.join(self._copied.path, SEGMENTS), self._copied)
        with contextlib.closing(segments):
            for name in segments.names():
                _give_file(segments, name, owner)
            set_owner(segments.fd, owner)
            segments.sync()

    def _check(self) -> None:
        """LedgerError if the directory was replaced, or got other files, since it was claimed."""
        if not self._lock.in_place:
            raise LedgerError(
                f"{self.path} was removed or replaced while the backup was made; run it again"
            )
        others = set(self._place.names()) - {UNFINISHED_BACKUP}
        if others:
            raise LedgerError(
                f"{min(others)!r} appeared in {self.path} while the backup was made; a backup goes "
                "into a directory of its own"
            )

    def _remove_marker(self) -> None:
        # Close the lock before removing its directory: NFS keeps the name of an open file.
        self._copied.remove(LOCK)
        self._lock.close()
        try:
            os.rmdir(UNFINISHED_BACKUP, dir_fd=self._place.fd)
        except OSError as error:
            pass_on_foreign(error)
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

    def __init__(self, place: Directory, marker: Directory) -> None:
        self._place, self._marker = place, marker
        _locks.add(self)
        self._fd = marker.open(LOCK, os.O_RDWR | os.O_CREAT)

    def take(self, target: str) -> bool:
        """False if the file was removed by the process that had locked it. LedgerError if another
        backup into `target` holds it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pass_on_foreign(error)
            who = os.pread(self._fd, 1000, 0).decode(errors="replace") or "not known which"
            raise LedgerError(
                f"a backup into {target} is being made by another process ({who}); wait for its "
                "end, or choose another directory"
            ) from None
        if not self._is_named:
            return False
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
        return True

    @property
    def in_place(self) -> bool:
        """Is this file still the one that its path names?"""
        return self._is_named and not self._place.lost()

    @property
    def _is_named(self) -> bool:
        try:
            found = os.stat(f"{UNFINISHED_BACKUP}/{LOCK}", dir_fd=self._place.fd)
        except OSError as error:
            pass_on_foreign(error)
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


_core.in_forked_child(_after_fork_in_child)

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
        with contextlib.closing(Directory(made)) as directory:
            set_mode(directory.fd, mode | 0o700)
            os.mkdir(UNFINISHED_BACKUP, 0o700, dir_fd=directory.fd)
        os.rename(made, path)  # also replaces an empty directory that another process made
    except OSError as error:
        pass_on_foreign(error)
        _remove_empty([made, os.path.join(made, UNFINISHED_BACKUP)])
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _remove_empty(made: list[str]) -> None:
    for directory in reversed(made):
        with Ignoring(OSError):
            os.rmdir(directory)


def _claim(place: Directory) -> tuple[Lock, Directory]:
    """Take the lock of the marker directory in the target; create the marker if it is missing."""
    while True:
        names = place.names()
        if names and UNFINISHED_BACKUP not in names:
            raise _not_empty(place.path)
        fresh = _make_marker(place)
        with contextlib.ExitStack() as undo:
            try:
                marker = Directory(os.path.join(place.path, UNFINISHED_BACKUP), place)
                undo.callback(marker.close)
                _refuse_foreign_marker(marker)
                lock = Lock(place, marker)
            except FileNotFoundError as error:
                pass_on_foreign(error)
                continue  # the process that made the marker has just finished
            except BaseException:
                if fresh:
                    _remove_marker(place)
                raise
            undo.callback(lock.close)
            if lock.take(place.path):
                _refuse_others(place, marker, fresh)
                undo.pop_all()
                return lock, marker


def _refuse_foreign_marker(marker: Directory) -> None:
    """LedgerError if another user has made the marker, and could exchange what is copied there."""
    made_by = os.fstat(marker.fd).st_uid
    if made_by != os.geteuid() and made_by != _maker_on(marker):
        raise LedgerError(
            f"{marker.path} belongs to user {made_by}; remove it, or choose another directory"
        )


def _maker_on(marker: Directory) -> int:
    """The user to whom new files of this process belong: NFS and FAT have users of their own."""
    probe = temporary_name(LOCK)
    fd = marker.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        marker.remove(probe)


def _remove_marker(place: Directory) -> None:
    with Ignoring(OSError):
        os.rmdir(UNFINISHED_BACKUP, dir_fd=place.fd)


def _not_empty(path: str) -> LedgerError:
    return LedgerError(f"{path} is not empty; a backup goes into a directory of its own")


def _make_marker(place: Directory) -> bool:
    """Create the marker; False if it exists already."""
    try:
        os.mkdir(UNFINISHED_BACKUP, 0o700, dir_fd=place.fd)
    except FileExistsError as error:
        pass_on_foreign(error)
        facts = place.facts(UNFINISHED_BACKUP)
        if facts is not None and not stat.S_ISDIR(facts.st_mode):
            raise _not_empty(place.path) from None
        return False
    place.sync()  # before anything else is there
    return True


def _refuse_others(place: Directory, marker: Directory, fresh: bool) -> None:
    """LedgerError if the directory holds anything but an unfinished backup."""
    others = set(place.names()) - {UNFINISHED_BACKUP}
    if fresh and others:  # they appeared after the directory was found empty
        marker.remove(LOCK)
        _remove_marker(place)
        raise _not_empty(place.path)
    if others - set(FILES):
        raise LedgerError(
            f"{place.path} holds {min(others - set(FILES))!r} beside an unfinished backup; a "
            "backup goes into a directory of its own"
        )


# ---- files -------------------------------------------------------------------------------


def set_mode(fd: int, mode: int) -> None:
    """Give a copy the mode of its source, if the file system has modes."""
    with Ignoring(PermissionError):  # on FAT, for example, the mode is the mount's
        os.fchmod(fd, mode)


def set_owner(fd: int, owner: os.stat_result) -> None:
    """Give a copy the owner of its source, if possible: root may, on most file systems."""
    with Ignoring(OSError):
        give_to(fd, owner)


def _give_file(directory: Directory, name: str, owner: os.stat_result) -> None:
    fd = directory.open(name, os.O_RDONLY)
    try:
        set_owner(fd, owner)
    finally:
        os.close(fd)


def _remove_copy(directory: Directory) -> None:
    facts = directory.facts(SEGMENTS)
    if facts is not None and stat.S_ISDIR(facts.st_mode):
        segments = Directory(os.path.join(directory.path, SEGMENTS), directory)
        with contextlib.closing(segments):
            for name in segments.names():
                if SEGMENT.fullmatch(name):
                    segments.remove(name)
        os.rmdir(SEGMENTS, dir_fd=directory.fd)
    for name in FILES[1:]:
        with Ignoring(FileNotFoundError):
            directory.remove(name)


# ---- errors ------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(ledger: str, path: str) -> Iterator[None]:
    """Add advice to errors of a full target, or of files without permission."""
    try:
        yield
    except LedgerError:
        raise  # it has advice already
    except (OSError, lmdb.Error) as error:
        pass_on_foreign(error)
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
        with contextlib.closing(Directory(os.path.join(work, "segments"))) as made:
            set_mode(made.fd, mode)
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
            pass_on_foreign(error)
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
        facts = os.fstat(source)
        tail = journal.tail  # what is appended during the copy may be in it without its predecessor
        copy = files.enter_context(_created(os.path.join(work, "journal"), facts.st_mode & 0o777))
        _copy_bytes(source, copy, facts.st_size)
        if version is not None:
            cut_off(copy, applied, generation, journal.capacity, version, tail)
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
    with (
        contextlib.closing(Directory(os.path.join(directory.path, "segments"), directory)) as at,
        contextlib.closing(Directory(path)) as made,
    ):
        set_mode(made.fd, _mode(at.by_descriptor) | 0o700)
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
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
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
