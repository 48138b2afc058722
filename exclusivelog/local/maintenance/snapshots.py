"""Snapshots of states: messages under an id of their own, as of an offset of a topic (rule I4).

They are made beside everything else, as compacted views are: a bounded number of rows at a
time, one small transaction that makes them the topic's, and then the last ones go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.local.maintenance.retention import delete_pending, give_up_view
from exclusivelog.local.records import View
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables
from exclusivelog.messages.items import Item

WRITER = b"snapshot"
ITEMS_AT_ONCE = 10_000
ENTRY_BYTES = 1 << 20


def write_snapshot(
    ledger: Ledger, topic: int, slot: int, engine: str, offset: int, items: Iterable[Item]
) -> None:
    """Keep these items as what the topic's messages before `offset` add up to."""
    snapshot = None
    try:
        with ledger.write_concurrent() as tables:
            snapshot = View(tables.rows.next_id(b"topic"), offset)
            tables.views.begin(snapshot.id, slot, engine)
        _write_items(ledger, snapshot, items)
        with ledger.write_concurrent() as tables:
            tables.views.check_making(snapshot)
            former = tables.views.snapshot(topic)
            if tables.topics.get(topic).flags & _core.DELETED or (
                former is not None and former.horizon > offset  # a later one was faster
            ):
                tables.deletions.add(snapshot.id)
            else:
                tables.views.put_snapshot(topic, snapshot)
    except BaseException:
        give_up_view(ledger, topic, snapshot)
        raise
    finally:
        delete_pending(ledger)


def _write_items(ledger: Ledger, snapshot: View, items: Iterable[Item]) -> None:
    count = 0
    for some in _in_groups(items):
        appender = _core.Appender(WRITER, count - 1, ITEMS_AT_ONCE, ENTRY_BYTES)
        batch = appender.make_batch(
            _core.strings([value for _, value in some]),
            _core.strings([key for key, _ in some]), None, None,
        )  # fmt: skip
        appender.add_batch(batch)
        with ledger.write_concurrent() as tables:
            tables.views.check_making(snapshot)
            for last, entry in batch.stamp(snapshot.id, count, 0, 0, 0):
                tables.entries.put(snapshot.id, last, entry)
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
    snapshot = tables.views.snapshot(topic)
    if snapshot is None:
        return None
    items: list[Item] = []
    for entry in _entries_of(tables, topic, snapshot, "snapshot"):
        if entry.base_offset != len(items):
            raise _damaged(tables, topic, snapshot, "snapshot", len(items), "items are missing")
        items += [(m.key, m.raw_value) for m in map(entry.message, range(entry.count))]
    return snapshot.horizon, items


def read_view(tables: Tables, topic: int) -> tuple[int, list[Item]] | None:
    """The same of a map's compacted view: its keys' last values as of its horizon."""
    view = tables.views.view(topic)
    if view is None:
        return None
    items: list[Item] = []
    for entry in _entries_of(tables, topic, view, "compacted view"):
        messages = map(entry.message, range(entry.count))
        items += [(m.key, m.raw_value) for m in messages if m.key is not None]
    return view.horizon, items


def _entries_of(tables: Tables, topic: int, view: View, what: str) -> Iterator[_core.Entry]:
    for last, data in tables.entries.walk(view.id, 0):
        try:
            entry = _core.Entry(tables.entries.load(data))
            if entry.topic != view.id:
                raise ValueError("it does not stand where it should")
            entry.check()
        except ValueError as error:
            raise _damaged(tables, topic, view, what, last, error) from None
        yield entry


def _damaged(
    tables: Tables, topic: int, view: View, what: str, item: int, why: object
) -> LedgerCorruptedError:
    name = tables.topics.get(topic).name
    return LedgerCorruptedError(
        f"topic {name!r}: the {what} as of offset {view.horizon} is damaged (item {item}): {why}",
        topic=name,
    )
