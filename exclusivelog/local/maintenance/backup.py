"""Backups: a consistent copy of a ledger, while others go on writing.

First the tables, as LMDB copies them, compacted; then the segments that these refer to; at last
the journal, as far as the tables go along with it. Whoever opens the copy recovers from that
what its tables do not have yet, as after a crash. So it has all that was acknowledged before.

The copy is made in a subdirectory that marks it as unfinished: see backup_target.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import lmdb

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, LedgerError
from exclusivelog.local.faults import DAMAGED, retry_damaged, translated
from exclusivelog.local.files import DATA, Directory, above_standard
from exclusivelog.local.maintenance.backup_target import (
    Target,
    claimed,
    explained,
    refuse_inside,
    set_mode,
)
from exclusivelog.local.records import NAMES
from exclusivelog.local.storage.environment import check_header
from exclusivelog.local.storage.journal import cut_off
from exclusivelog.local.storage.ledger import MOST_ATTEMPTS, Ledger
from exclusivelog.local.storage.tables import Tables

RUN_AGAIN = "there is no backup; run it again"
COPIED_AT_ONCE = 1 << 24  # bytes


def backup(ledger: Ledger, path: str) -> None:
    """Copy the ledger into an empty directory, or one that holds an unfinished backup."""
    # What befalls the copy is not the end of the ledger: nothing of it is pending.
    with ledger.environment() as env, translated(path, way_out=RUN_AGAIN):
        begun = 0 if ledger.journal is None else ledger.journal.tail
        refuse_inside(ledger.path, path)
        with (
            explained(ledger.path, path),
            claimed(path, _mode(ledger.directory.by_descriptor)) as target,
        ):
            for attempt in range(MOST_ATTEMPTS):
                if attempt and not ledger.readonly:
                    ledger.checkpoint()  # so that the tables are enough
                if retry_damaged(lambda: _copy_anew(ledger, env, target, begun)):
                    target.install()
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
    # Before the tables: they know of all that was written under it.
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
            with translated(ledger.path):  # it is the source, not the copy
                raise
        os.fsync(fd)
    with contextlib.closing(Directory(work)) as copied:
        check_header(copied)  # a shorter file would end this process by SIGBUS


def _copy_segments(ledger: Ledger, work: str, files: dict[int, int]) -> tuple[int, int]:
    """Copy what the copied tables refer to; the journal's generation, and the position up to
    which they have it."""
    wanted, place = _what_the_copy_needs(ledger, work)
    if wanted:
        os.mkdir(os.path.join(work, "segments"))
        mode = _mode(os.path.join(ledger.directory.by_descriptor, "segments")) | 0o700
        set_mode(os.path.join(work, "segments"), mode)
    for segment, (end, _) in wanted.items():
        try:
            if segment not in files:  # begun since
                files[segment] = ledger.segments.open(segment)
            source = files[segment]
            mode = os.fstat(source).st_mode & 0o777
            with _created(os.path.join(work, "segments", f"{segment:016x}"), mode) as target:
                _copy_bytes(source, target, end)
                os.fsync(target)
        except (ValueError, FileNotFoundError) as error:
            raise LedgerCorruptedError(
                f"segment {segment:016x} of {ledger.path} cannot be copied: {error}; "
                "verify() says what is damaged"
            ) from error
    return place


def _what_the_copy_needs(
    ledger: Ledger, work: str
) -> tuple[dict[int, tuple[int, int]], tuple[int, int]]:
    with contextlib.ExitStack() as stack:
        copied = stack.enter_context(contextlib.closing(Directory(work)))  # LMDB wants UTF-8
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
    """False if what the tables lack may have been written over before it was copied."""
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
    if version is None:  # no process wrote to it, unless one has come meanwhile
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
            target.install()


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
    """A new file with this mode, whatever the umask; its file descriptor."""
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
