"""What the tables remember of what has ended, and for how long.

The library gives a producer without a name a new one, which no later producer gets. The row with
its last sequence id is needed for a while: a program that does not know what became of its last
send (an I/O error) opens the engine again, and a producer under the same name. The rows of the last
`KEPT_NAMES` of them are kept. Others are deleted once the journal is in the tables: a checkpoint
writes the row of each name that it finds in the journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from exclusivelog.local.records import ENDED, LAST_ENDED, U64, u64
from exclusivelog.local.storage.tables import Tables, is_handed_over

KEPT_NAMES = 32  # of those that the library gave, and whose sessions have ended
AT_ONCE = 1000  # names in one transaction, some microseconds each


def forget(tables: Tables) -> None:
    """Delete the rows of names that have ended, a bounded number. The journal must be in the
    tables."""
    for number, key in list(itertools.islice(_names_to_forget(tables), AT_ONCE)):
        tables.producers.forget(number, key)
        tables.rows.delete("meta", ENDED + U64.pack(number))


def has_more(tables: Tables) -> bool:
    """Is there something to forget?"""
    return next(_names_to_forget(tables), None) is not None


def _names_to_forget(tables: Tables) -> Iterator[tuple[int, bytes]]:
    """(number, key in `producers`) of each. A producer that is handed over continues under its
    name, and so with its sequence ids: these names are left out until that has ended."""
    stop = ENDED + U64.pack(max(0, (tables.rows.find("meta", LAST_ENDED, u64) or 0) - KEPT_NAMES))
    cursor = tables.rows.cursor("meta")
    if cursor.set_range(ENDED + U64.pack(0)):
        for key, place in cursor:
            if key > stop:
                return
            if not is_handed_over(tables.rows, u64(place[: U64.size])):
                yield u64(key[len(ENDED) :]), place
