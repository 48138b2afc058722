"""What the tables remember of what has ended, and for how long.

The library gives a producer without a name a new one, which no later producer gets. The row with
its last sequence id is needed for a while: a program that does not know what became of its last
send (an I/O error) opens the engine again, and a producer under the same name. When a topic is
deleted and made again, the former one's row is needed for a while by handles on it, for their
error. Of both kinds together the last `KEPT` rows are kept. Others are deleted once the journal is
in the tables: a checkpoint writes the row of each name that it finds in the journal.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.local.records import ENDED, LAST_ENDED, U64, u64
from exclusivelog.local.storage.tables import Tables, is_handed_over

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

KEPT = 32  # rows of what has ended
AT_ONCE = 1000  # rows in one transaction, some microseconds each


def forget(tables: Tables) -> None:
    """Delete rows of what has ended, a bounded number. The journal must be in the tables. Raises
    nothing for damaged rows, which stay: it is part of every checkpoint."""
    for number, place in list(itertools.islice(_to_forget(tables), AT_ONCE)):
        with contextlib.suppress(LedgerCorruptedError):
            if len(place) == U64.size:
                tables.topics.forget(u64(place))
            else:
                tables.producers.forget(number, place)
        tables.rows.delete("meta", ENDED + U64.pack(number))


def forget_ended(
    ledger: Ledger, most: float = math.inf, ended: Callable[[], bool] = lambda: False
) -> None:
    """Delete rows of what has ended, in at most `most` transactions, or until `ended()`. Each
    checkpoint deletes some, but there may be none for a long time."""
    while most > 0 and not ended():
        with ledger.read() as tables:
            if next(_to_forget(tables), None) is None:
                return
        with ledger.write_checkpointed():
            most -= 1


def _to_forget(tables: Tables) -> Iterator[tuple[int, bytes]]:
    """(number, place) of each: a key in `producers`, or a topic's id."""
    stop = ENDED + U64.pack(max(0, _last_ended(tables) - KEPT))
    cursor = tables.rows.cursor("meta")
    if cursor.set_range(ENDED + U64.pack(0)):
        for key, place in cursor:
            if key > stop:
                return
            if not _is_needed(tables, place):
                yield u64(key[len(ENDED) :]), place


def _last_ended(tables: Tables) -> int:
    with contextlib.suppress(LedgerCorruptedError):
        return tables.rows.find("meta", LAST_ENDED, u64) or 0
    return 0


def _is_needed(tables: Tables, place: bytes) -> bool:
    """A producer that is handed over continues under its name, and so with its sequence ids."""
    if len(place) < U64.size:
        return False  # damaged
    topic = u64(place[: U64.size])
    if len(place) == U64.size:
        return tables.deletions.has(topic)
    return is_handed_over(tables.rows, topic)
