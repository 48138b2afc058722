"""Backups: a consistent copy of a ledger, while others go on writing.

First the tables, as LMDB copies them, compacted; then the segments that these refer to; at last
the journal, which has what came meanwhile. Whoever opens the copy recovers from that what its
tables do not have yet, as after a crash.
"""

from __future__ import annotations

import os
import shutil

import lmdb

from exclusivelog.errors import LedgerCorruptedError, LedgerError
from exclusivelog.faults import DAMAGED, translated
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
        for _ in range(MOST_LOOKS):
            with ledger.segments.held() as files:
                _copy_tables(env, ledger.path, path)
                applied = _copy_segments(ledger, path, files)
            if _copy_journal(ledger, path, applied):
                sync_directory(path)
                return
            shutil.rmtree(path)  # the tables were copied too long before the journal
            os.makedirs(path)
        raise LedgerError(
            f"{path}: the journal of {ledger.path} outran {MOST_LOOKS} copies of it; try again "
            "when less is appended"
        )


def _copy_tables(env: lmdb.Environment, path: str, copy: str) -> None:
    try:
        env.copy(copy, compact=True)
    except DAMAGED:
        with translated(path):  # it is ours, not the copy
            raise


def _copy_segments(ledger: Ledger, path: str, files: dict[int, int]) -> int:
    """Copy what the copied tables refer to; the position up to which they have the journal."""
    copy = Segments(path, os.stat(ledger.path).st_mode & 0o777, ledger.segments.limit)
    try:
        wanted, applied = _what_the_copy_needs(ledger, path, copy)
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
        return applied
    finally:
        copy.close()


def _what_the_copy_needs(
    ledger: Ledger, path: str, copy: Segments
) -> tuple[dict[int, tuple[int, int]], int]:
    env = lmdb.open(path, max_dbs=len(NAMES), readonly=True, lock=False, create=False)
    with env:
        databases = {
            name: env.open_db(name.encode(), create=False) for name in ("segments", "meta")
        }
        with env.begin() as txn:
            tables = Tables(txn, databases, path, copy, ledger.journal)
            return tables.large.segments(), tables.applied


def _copy_journal(ledger: Ledger, path: str, applied: int) -> bool:
    journal = ledger.journal
    if journal is None:
        return True
    copy = os.path.join(path, "journal")
    shutil.copyfile(os.path.join(ledger.path, "journal"), copy)
    fd = os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return not journal.ready or journal.tail - applied < journal.capacity // 2
