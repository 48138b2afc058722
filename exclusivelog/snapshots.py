"""Snapshots of states: messages under an id of their own, as of an offset of a topic (rule I4).

They are made beside everything else, as compacted views are: a bounded number of rows at a
time, one small transaction that makes them the topic's, and then the last ones go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.ledger import Ledger
from exclusivelog.retention import empty_trash, give_up_view
from exclusivelog.tables import Tables, View

WRITER = b"snapshot"
ITEMS_AT_ONCE = 10_000
ENTRY_BYTES = 1 << 20

Item = tuple[bytes | None, bytes | None]  # key, value


def write_snapshot(
    ledger: Ledger, topic: int, slot: int, engine: str, offset: int, items: Iterable[Item]
) -> None:
    """Keep these items as what the topic's messages before `offset` add up to."""
    snapshot = None
    try:
        with ledger.write_beside() as tables:
            snapshot = View(tables.rows.next_id(b"topic"), offset)
            tables.begin_view(snapshot.id, slot, engine)
        _write_items(ledger, snapshot, items)
        with ledger.write_beside() as tables:
            tables.check_making(snapshot)
            former = tables.snapshot(topic)
            if tables.topic(topic).flags & _core.DELETED or (
                former is not None and former.horizon > offset  # a later one was faster
            ):
                tables.discard(snapshot.id)
            else:
                tables.put_snapshot(topic, snapshot)
    except BaseException:
        give_up_view(ledger, topic, snapshot)
        raise
    finally:
        empty_trash(ledger)


def _write_items(ledger: Ledger, snapshot: View, items: Iterable[Item]) -> None:
    count = 0
    for some in _in_groups(items):
        appender = _core.Appender(WRITER, count - 1, ITEMS_AT_ONCE, ENTRY_BYTES)
        batch = appender.make_batch(
            _core.strings([value for _, value in some]),
            _core.strings([key for key, _ in some]), None, None,
        )  # fmt: skip
        appender.add_batch(batch)
        with ledger.write_beside() as tables:
            tables.check_making(snapshot)
            for last, entry in batch.stamp(snapshot.id, count, 0, 0, 0):
                tables.put_entry(snapshot.id, last, entry)
        count += len(some)


def _in_groups(items: Iterable[Item]) -> Iterator[list[Item]]:
    group: list[Item] = []
    size = 0
    for key, value in items:
        group.append((key, value))
        size += len(key or b"") + len(value or b"")
        if len(group) == ITEMS_AT_ONCE or size >= ENTRY_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_snapshot(tables: Tables, topic: int) -> tuple[int, list[Item]] | None:
    """(offset, items) of the topic's newest snapshot.

    Raises LedgerCorruptedError if it is damaged: another one can be made from the topic's
    messages, where they have not been trimmed.
    """
    snapshot = tables.snapshot(topic)
    if snapshot is None:
        return None
    items: list[Item] = []
    for last, data in tables.entries(snapshot.id, 0):
        try:
            entry = _core.Entry(tables.load(data))
            if entry.topic != snapshot.id or entry.base_offset != len(items):
                raise ValueError("it does not stand where it should")
        except ValueError as error:
            name = tables.topic(topic).name
            raise LedgerCorruptedError(
                f"topic {name!r}: the snapshot as of offset {snapshot.horizon} is damaged (item "
                f"{last}): {error}",
                topic=name,
            ) from None
        items += [(m.key, m.raw_value) for m in map(entry.message, range(entry.count))]
    return snapshot.horizon, items
