"""Checkpoints: how the journal's frames get into the tables, when, and after a crash."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from exclusivelog import _core, logs, threads
from exclusivelog._core import TopicRow
from exclusivelog.errors import (
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    MissingLibraryError,
)
from exclusivelog.local.faults import translation
from exclusivelog.local.records import PAIR
from exclusivelog.local.storage.segments import LARGE_ENTRY, is_reference
from exclusivelog.local.storage.tables import AppliedJournal, Tables
from exclusivelog.local.time_marks import SLACK_MS, wall_ms

if TYPE_CHECKING:
    import lmdb

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 1.0  # the longest that an append waits for its checkpoint
OF_NOTE_SECONDS = 0.5  # a checkpoint that takes longer, or of half the journal, is logged
RETRY_SECONDS = 0.25  # after a checkpoint that failed

# LMDB gives a large value whole pages, less 16 bytes: this one takes 16 of them.
PACKED_ENTRY = 16 * 4096 - 16
SMALL_ENTRY = 16 << 10  # an entry below this size is always filled up
# A checkpoint rewrites about this many bytes in all to fill up entries, and at least these per
# topic.
FILLED_UP, LEAST_FILLED_UP = 16 << 20, 4 << 10
MERGED_AT_ONCE = 256  # topics; their last entries are held in memory meanwhile
LARGE_PACKED_ENTRY = 1 << 20


class Checkpointer:
    """Calls `checkpoint` while the journal has a backlog, until `failed()` or `stop`.

    `journal` is None where this process makes no checkpoints: then every method does nothing.
    """

    def __init__(
        self,
        path: str,
        journal: _core.Journal | None,
        checkpoint: Callable[[], None],
        failed: Callable[[], bool],
    ) -> None:
        self._path = path
        self._journal = journal
        self._checkpoint = checkpoint
        self._failed = failed
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._applied = -1  # the start of the backlog at the last `poll`
        self._due = 0.0  # when to request a checkpoint, unless another process makes one before

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and self._journal is not None:
                    run = functools.partial(
                        _core.keep_running, functools.partial(self._run, self._journal), self._log
                    )
                    thread = threading.Thread(
                        target=run, name="exclusivelog-checkpoint", daemon=True
                    )
                    self._thread = threads.start(self._path, thread)

    def _log(self, error: BaseException) -> None:
        logs.emit(log, logs.CHECKPOINTS_FAILED, error=error, ledger=self._path, reason=repr(error))

    def poll(self) -> None:
        """Request a checkpoint if the backlog stalls: the process that appended it may have died.
        Call it about once a second."""
        journal = self._journal
        if journal is None:
            return
        applied, now = journal.tail - journal.backlog, _core.monotonic()
        if not journal.backlog or applied != self._applied:
            self._applied, self._due = applied, now + 2 * CHECKPOINT_SECONDS
        elif now > self._due:
            self._due = now + 2 * CHECKPOINT_SECONDS
            self.start()
            journal.request_checkpoint()

    def _run(self, journal: _core.Journal) -> None:
        logs.emit_later()
        due = 0.0
        while True:
            # Read before the check below, so that a later request ends the wait.
            seen = journal.expect()
            if self._stopping.is_set():
                return
            backlog = journal.backlog
            if not backlog:
                journal.await_due(seen, -1.0)
                due = _core.monotonic() + CHECKPOINT_SECONDS
                continue
            left = due - _core.monotonic()
            if backlog < journal.capacity // 2 and left > 0:
                journal.await_due(seen, left)
                continue
            due = _core.monotonic() + CHECKPOINT_SECONDS
            try:
                self._make_checkpoint(journal, backlog)
            except LedgerError as error:
                # A full disk, say; appends go on while the journal has room.
                if self._failed():
                    return
                logs.emit(log, logs.CHECKPOINT_REFUSED, ledger=self._path, reason=str(error))
                self._stopping.wait(RETRY_SECONDS)
            except Exception as error:
                logs.emit(
                    log, logs.CHECKPOINT_FAILED, error=error, ledger=self._path, reason=repr(error)
                )
                self._stopping.wait(RETRY_SECONDS)

    def _make_checkpoint(self, journal: _core.Journal, backlog: int) -> None:
        began = _core.monotonic()
        self._checkpoint()
        seconds = _core.monotonic() - began
        if seconds >= OF_NOTE_SECONDS or backlog >= journal.capacity // 2:
            logs.emit(
                log,
                logs.CHECKPOINT,
                ledger=self._path,
                bytes=backlog,
                seconds=seconds,
                reason="half of the journal" if backlog >= journal.capacity // 2 else "slow",
            )

    def stop(self) -> None:
        """Stop the thread, and make a last checkpoint."""
        self._stopping.set()
        if self._journal is None:
            return
        self._journal.request_checkpoint()
        if self._thread is not None:
            self._thread.join(timeout=60)
        if not self._failed():
            try:
                self._checkpoint()
            except LedgerError as error:
                logs.emit(log, logs.BACKLOG_KEPT, ledger=self._path, reason=str(error))


# ---- what one does -----------------------------------------------------------------------


def apply_frames(tables: Tables, stop: int, version: int | None = None) -> None:
    """Apply the journal's frames before the position `stop` to the tables. `version`: frames behind
    that have at least this one (see `AppliedJournal.mark`)."""
    journal = tables.journal
    assert journal.file is not None
    if stop <= journal.applied:
        return
    tables.entries.added = True
    frames = journal.file.gather(journal.applied, stop, journal.generation)
    with frames as bundles:
        small = min(SMALL_ENTRY, max(LEAST_FILLED_UP, FILLED_UP // max(1, len(bundles))))
        for start in range(0, len(bundles), MERGED_AT_ONCE):
            for bundle in _merge(tables, bundles[start : start + MERGED_AT_ONCE], small):
                _apply_to(tables, bundle, small)
        rows, damaged = frames.notes()
    tables.apply_notes(rows)
    if damaged:
        logs.emit(log, logs.NOTES_DAMAGED, ledger=tables.rows.path, count=damaged)
    destroyed, _ = journal.file.holes(journal.applied, stop, journal.generation)
    if destroyed:
        logs.emit(log, logs.NOTES_DOUBTED, ledger=tables.rows.path, bytes=destroyed)
    journal.advance(stop, version)


def _merge(tables: Tables, bundles: list[_core.Bundle], small: int) -> list[_core.Bundle]:
    """Apply the frames of topics whose rows are intact, many rows in one call of LMDB; returns the
    others. An entry of up to `small` bytes is filled up."""
    if len(bundles) == 1:
        return bundles
    rows = tables.rows
    found = rows.get_many("topics", _core.topic_keys(bundles))
    merge = _core.Merge(bundles, found, wall_ms() + SLACK_MS, LARGE_ENTRY)
    last = rows.get_many("entries", merge.last_entries())
    dropped, entries = merge.pack(last, PACKED_ENTRY, small)
    for key in dropped:
        rows.delete("entries", key)
    if not rows.put_many("entries", entries, overwrite=False):
        raise LedgerCorruptedError(f"{rows.path}: a topic has an entry already behind its own end")
    sequences = merge.sequences(rows.get_many("producers", merge.producers()))
    for key in merge.damaged:
        logs.emit(log, logs.PRODUCER_ROW_DAMAGED, ledger=rows.path, key=key)
    rows.put_many("producers", sequences)
    rows.put_many("topics", merge.topics())
    tables.announce.update(merge.ids())
    return merge.others


def _apply_to(tables: Tables, bundle: _core.Bundle, small: int) -> None:
    row = tables.topics.intact(bundle.topic, "its messages are kept, but cannot be read")
    if row is None:
        _keep(tables, bundle)
        return
    if row.flags & _core.DELETED:
        return
    left = bundle.follow(row.next_offset)
    for offset, count in bundle.repeated:
        logs.emit(
            log, logs.REPEATED, ledger=tables.rows.path, topic=row.name, offset=offset, count=count
        )
    if not left:
        return
    if bundle.base_offset != row.next_offset:
        logs.emit(
            log,
            logs.GAP,
            ledger=tables.rows.path,
            topic=row.name,
            offset=bundle.base_offset,
            end=row.next_offset,
        )
    before = _entry_to_fill(tables, row, bundle, small)
    large = bundle.nbytes >= LARGE_ENTRY or row.flags & _core.COMPRESSED_TOPIC
    most = LARGE_PACKED_ENTRY if large else PACKED_ENTRY
    for last, entry in bundle.pack(before, most):
        tables.entries.put(row.id, last, tables.compression.compressed(row, entry))
    _count_sequences(tables, bundle)
    row.next_offset = bundle.next_offset
    row.last_publish_time = max(row.last_publish_time, bundle.publish_time)
    tables.topics.put(row)
    tables.announce.add(row.id)


def _keep(tables: Tables, bundle: _core.Bundle) -> None:
    """Store the entries of a topic whose row is damaged at their offsets, because the journal must
    be emptied for all other topics."""
    for last, entry in bundle.pack(None, PACKED_ENTRY):
        key = PAIR.pack(bundle.topic, last)
        if tables.rows.get("entries", key) is None:
            tables.entries.put(bundle.topic, last, entry)
    _count_sequences(tables, bundle)


def _count_sequences(tables: Tables, bundle: _core.Bundle) -> None:
    for packed_name, sequence in bundle.producers().items():
        name = packed_name.decode()
        try:
            tables.producers.count(bundle.topic, name, sequence)
        except LedgerCorruptedError as error:  # go by the ids in the journal, which are the newest
            logs.emit(log, logs.PRODUCER_DAMAGED, ledger=tables.rows.path, reason=str(error))
            tables.producers.put(bundle.topic, name, sequence, 0)


def _entry_to_fill(
    tables: Tables, row: TopicRow, bundle: _core.Bundle, small: int
) -> _core.Entry | None:
    """Remove and return the topic's last entry, if it is small enough to be filled up."""
    if row.next_offset == row.first_offset:
        return None
    key = PAIR.pack(row.id, row.next_offset - 1)
    data = tables.rows.get("entries", key)
    if data is None or is_reference(data):
        return None
    found, most = _core.compression_of(data), PACKED_ENTRY
    size = len(data) if found is None else found[2]
    if row.flags & _core.COMPRESSED_TOPIC:
        most = LARGE_PACKED_ENTRY
    elif found is not None:
        return None  # this process may lack the library
    if size >= most or (len(data) > small and size > 4 * bundle.nbytes):
        return None  # rewriting it would cost more than it saves
    try:
        entry = _core.Entry(data)
        entry.check()
    except (ValueError, MissingLibraryError):
        return None  # it stays in place, and reading it reports the damage
    tables.rows.delete("entries", key)
    return entry


# ---- after a crash -----------------------------------------------------------------------


def recover(
    tables: Tables,
    txn: lmdb.Transaction[bytes],
    journal: _core.Journal,
    begin_life: Callable[[], None] | None,
) -> None:
    """Apply the journal's frames in the write transaction `txn` of these tables, commit it, and
    begin a new generation of frames. If there is no room for that, they stay in the journal, and a
    later checkpoint applies them.

    `begin_life` initialises the shared memory; None if other engines have the ledger open, and it
    is recovered because a flush has failed.
    """
    applied, alone = tables.journal, begin_life is not None
    before = AppliedJournal(tables.rows, journal)
    # Acknowledged frames are recovered even if a frame before them is damaged (rule H7).
    known, last_void = applied.known_end(), applied.last_void()
    if begin_life is not None:
        begin_life()
    journal.lock()
    try:
        end = applied.live_end()
        if known > end:
            logs.emit(log, logs.JOURNAL_DAMAGED, ledger=tables.rows.path, position=end)
        stop = applied.live_end(known) if alone else journal.tail
        generation = int.from_bytes(os.urandom(8)) >> 1 | 1
        # Skip the commit if nothing was applied: the first transaction records the generation, and
        # no process appends before that.
        if stop > applied.applied or not alone or not applied.generation:
            doubted = _doubted(tables, stop) if known > end else {}
            apply_frames(tables, stop)
            _skip_lost(tables, doubted)
            tables.check_room()
            applied.begin_generation(generation, applied.applied)
            tables.large.sync()
            txn.commit()
        journal.begin(generation, applied.applied)
    except Exception as error:
        full = translation(tables.rows.path, error) or error
        tables.large.undo()
        txn.abort()  # no effect if it has ended
        if not (alone and before.generation and isinstance(full, LedgerFullError)):
            raise
        if before.live_end(known) < last_void:
            raise  # lost frames: the next notes would be where the tables let none count
        # Who opens a ledger on a full disk wants to read it, or to trim it.
        before.resume(known)
        logs.emit(log, logs.RECOVERY_PUT_OFF, ledger=tables.rows.path, reason=str(full))
    except BaseException:
        tables.large.undo()
        raise
    finally:
        journal.unlock()


LEAST_OF_A_MESSAGE = 4  # bytes in the journal


def _doubted(tables: Tables, stop: int) -> dict[int, int]:
    """{topic: most messages}, which may have been destroyed so completely that nothing tells (rule
    H7). Other frames of the topic behind the destroyed part show which offsets are missing."""
    journal = tables.journal
    assert journal.file is not None
    start, generation = journal.applied, journal.generation
    size, behind = journal.file.holes(start, stop, generation)
    if not size:
        return {}
    with journal.file.gather(start, stop, generation) as bundles:
        topics = {bundle.topic for bundle in bundles} | tables.sessions.owned()
    return {
        topic: size // LEAST_OF_A_MESSAGE
        for topic in topics
        if journal.file.end_of(topic, behind, stop, generation) is None
    }


def _skip_lost(tables: Tables, doubted: dict[int, int]) -> None:
    """Give none of the offsets again that destroyed messages may have had."""
    for topic, most in doubted.items():
        row = tables.topics.intact(topic, "offsets of lost messages may be given again")
        if row is not None and not row.flags & _core.DELETED:
            logs.emit(
                log,
                logs.OFFSETS_SKIPPED,
                ledger=tables.rows.path,
                topic=row.name,
                start=row.next_offset,
                stop=row.next_offset + most,
            )
            row.next_offset += most
            tables.topics.put(row)
