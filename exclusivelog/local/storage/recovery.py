"""Recovery: apply a journal whose contents no live process knows (rule H3)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import lmdb

from exclusivelog import _core
from exclusivelog.local.storage.log_tables import AppliedJournal, LargeEntries

log = logging.getLogger("exclusivelog")


def recover(
    path: str, txn: lmdb.Transaction[bytes], applied: AppliedJournal, large: LargeEntries,
    apply: Callable[[int], None], journal: _core.Journal,
    begin_life: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Apply the journal's frames in the write transaction `txn`, commit it, and begin a new
    generation of frames. `apply(position)` applies them up to there.

    `begin_life` initialises the shared memory; None where other engines have the ledger open,
    which is recovered because a flush has failed.
    """
    alone = begin_life is not None
    # Acknowledged frames count even if a frame before them is damaged.
    known = journal.known_end(applied.applied, applied.generation)
    if begin_life is not None:
        begin_life()
    journal.lock()
    try:
        end = applied.live_end()
        if known > end:
            log.error(
                "%s/journal is damaged at position %d, or an older one was put back", path, end
            )
        stop = max(end, known) if alone else journal.tail
        generation = int.from_bytes(os.urandom(8)) >> 1 | 1
        # Skip the commit where nothing was applied: no process appends before the first
        # transaction of this life, which records the generation.
        if stop > applied.applied or not alone or not applied.generation:
            apply(stop)
            applied.begin_generation(generation, applied.applied)
            large.sync()
            txn.commit()
        journal.begin(generation, applied.applied)
    except BaseException:
        large.undo()
        raise
    finally:
        journal.unlock()
