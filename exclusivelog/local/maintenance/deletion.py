"""Pending deletions: rows of deleted topics, trimmed messages, replaced views (rule G8).

Each transaction deletes a bounded number of rows, while appends go on. The next open of the ledger
completes deletions after a crash; if there are very many, the retention worker does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.local.faults import report_damaged
from exclusivelog.local.records import View
from exclusivelog.local.storage.tables import NOT_DELETED

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger


DROPPED_AT_ONCE = 1000
AT_OPEN = 20  # transactions, of some milliseconds each


def delete_pending(
    ledger: Ledger, most: float = math.inf, ended: Callable[[], bool] = lambda: False
) -> None:
    """Delete the rows of deleted and trimmed topics, in at most `most` transactions with a bounded
    number of rows each, or until `ended()`."""
    with ledger.read() as tables:
        unfinished, discarded = list(tables.views.unfinished()), tables.deletions.all()
    if unfinished and _give_up_views(ledger, unfinished):
        with ledger.read() as tables:
            discarded = tables.deletions.all()
    for topic, before in discarded.items():
        while most > 0 and not ended():
            most -= 1
            try:
                with ledger.write_concurrent() as tables:
                    if tables.is_kept():
                        return  # it would free nothing before a long read ends
                    if not tables.entries.drop(topic, DROPPED_AT_ONCE, before):
                        tables.deletions.remove(topic, before)
                        break
            except LedgerCorruptedError as error:  # those of other topics go
                report_damaged(ledger.path, error, NOT_DELETED)
                break


def give_up_view(ledger: Ledger, topic: int, view: View | None) -> None:
    """Delete an unfinished view or snapshot, unless it has become the topic's: an interrupt may
    come after the commit."""
    if view is not None:
        with ledger.write_concurrent() as tables:
            if view not in (tables.views.view(topic), tables.views.snapshot(topic)):
                tables.deletions.add(view.id)


def _give_up_views(ledger: Ledger, unfinished: Iterable[tuple[int, int, str]]) -> bool:
    """Delete those of processes that died while they compacted. Returns whether there were any."""
    exists = ledger.lockfile.slots.exists
    dead = [view for view, slot, engine in unfinished if not exists(slot, engine)]
    if dead:
        with ledger.write_concurrent() as tables:
            left = {view for view, _, _ in tables.views.unfinished()}
            for view in left.intersection(dead):  # the others have become a topic's meanwhile
                tables.deletions.add(view)
    return bool(dead)
