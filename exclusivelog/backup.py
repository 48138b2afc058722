"""Backups: a consistent copy of a ledger, while others go on writing.

First the tables, as LMDB copies them, compacted; then the segments that these refer to; at last
the journal, as far as the tables go along with it. Whoever opens the copy recovers from that
what its tables do not have yet, as after a crash. So it has all that was acknowledged before.
"""

from __future__ import annotations

import os
import shutil

import lmdb

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, LedgerError
from exclusivelog.faults import DAMAGED, met_twice, translated
from exclusivelog.journal import cut_off
from exclusivelog.ledger import MOST_LOOKS, Ledger
from exclusivelog.segments import Segments, sync_directory
from exclusivelog.tables import NAMES, Tables

UNFINISHED = "what is there is no backup; remove it, and make one into an empty directory"


def backup(ledger: Ledger, path: str) -> None:
    """Copy the ledger into an empty directory."""
    # What befalls the copy is not the end of the ledger: nothing of it is pending.
    with ledger.environment() as env, translated(path, way_out=UNFINISHED):
        if os.path.exists(path) and not os.path.isdir(path):
            raise LedgerError(f"{path} is a file; a backup goes into a directory of its own")
        os.makedirs(path, exist_ok=True)
        if os.listdir(path):
            raise LedgerError(f"{path} is not empty; a backup goes into a directory of its own")
        begun = 0 if ledger.journal is None else ledger.journal.tail
        for look in range(MOST_LOOKS):
            if look and not ledger.readonly:
                ledger.checkpoint()  # so that the tables are enough
            if met_twice(lambda: _copy(ledger, env, path, begun)):
                sync_directory(path)
                return
        raise LedgerError(
            f"{ledger.path}: the journal outran {MOST_LOOKS} copies of the tables; {UNFINISHED}"
        )


def _copy(ledger: Ledger, env: lmdb.Environment, path: str, begun: int) -> bool:
    """False, and nothing is left of it, if it may lack messages that were there at the journal's
    position `begun`."""
    try:
        whole = _copy_files(ledger, env, path, begun)
    except LedgerCorruptedError:
        _clear(path)
        raise
    if not whole:
        _clear(path)
    return whole


def _clear(path: str) -> None:
    shutil.rmtree(path)
    os.makedirs(path)


def _copy_files(ledger: Ledger, env: lmdb.Environment, path: str, begun: int) -> bool:
    journal = ledger.journal
    # Before the tables: they know of all that was written under it.
    version = journal.version if journal is not None and journal.ready else None
    with ledger.segments.held() as files:
        _copy_tables(env, ledger.path, path)
        generation, applied = _copy_segments(ledger, path, files)
    if journal is None or _copy_journal(ledger, journal, path, (generation, applied), version):
        return True
    return version is not None and applied >= begun


def _copy_tables(env: lmdb.Environment, path: str, copy: str) -> None:
    try:
        env.copy(copy, compact=True)
    except DAMAGED:
        with translated(path):  # it is ours, not the copy
            raise


def _copy_segments(ledger: Ledger, path: str, files: dict[int, int]) -> tuple[int, int]:
    """Copy what the copied tables refer to; the journal's generation, and the position up to
    which they have it."""
    copy = Segments(path, os.stat(ledger.path).st_mode & 0o777, ledger.segments.limit)
    try:
        wanted, place = _what_the_copy_needs(ledger, path, copy)
        for segment, (end, _) in wanted.items():
            try:
                if segment not in files:  # begun since
                    files[segment] = ledger.segments.open(segment)
                copy.take_copy(segment, end, files[segment])
            except (ValueError, FileNotFoundError) as error:
                raise LedgerCorruptedError(
                    f"segment {segment:016x} of {ledger.path} cannot be copied: {error}; "
                    "verify() says what is damaged"
                ) from error
        return place
    finally:
        copy.close()


def _what_the_copy_needs(
    ledger: Ledger, path: str, copy: Segments
) -> tuple[dict[int, tuple[int, int]], tuple[int, int]]:
    env = lmdb.open(path, max_dbs=len(NAMES), readonly=True, lock=False, create=False)
    with env:
        databases = {
            name: env.open_db(name.encode(), create=False) for name in ("segments", "meta")
        }
        with env.begin() as txn:
            tables = Tables(txn, databases, path, copy, ledger.journal)
            return tables.large.segments(), (tables.generation, tables.applied)


def _copy_journal(
    ledger: Ledger, journal: _core.Journal, path: str, place: tuple[int, int], version: int | None
) -> bool:
    """False if what the tables lack may have been written over before it was copied."""
    generation, applied = place
    copy = os.path.join(path, "journal")
    shutil.copyfile(os.path.join(ledger.path, "journal"), copy)
    fd = os.open(copy, os.O_RDWR | os.O_CLOEXEC)
    try:
        if version is not None:
            cut_off(fd, applied, generation, journal.capacity, version)
        os.fsync(fd)
    finally:
        os.close(fd)
    if version is None:  # nobody wrote to it, unless somebody has come meanwhile
        return not journal.ready
    applied_by_now = journal.tail - journal.backlog
    return applied_by_now <= applied or journal.tail - applied < journal.capacity // 2
