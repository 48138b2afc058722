"""Views of a topic, kept in addition to its messages: compacted views, and snapshots of states.

**Compaction** keeps the last message of every key, at its own offset (rule G7). A compacted view is
a run of entries under an id of its own, like a topic's. It lacks the messages that a later one of
the same key has replaced, or a map's `clear` has removed. It reaches up to its *horizon*, where a
compacted reader continues with the topic itself. A tombstone removes its key from the view; a
message without a key is kept. A new view is made from the former one and the messages since. So it
does not need trimmed messages.

Appends and reads continue meanwhile: transactions add a bounded number of entries each, a last
small one makes the view the topic's, and then the former view is deleted. The next open of the
ledger deletes an unfinished view.

**Snapshots of states** are messages under an id of their own, as of an offset of a topic (rule I4).
They are made in the background, in the same steps as compacted views.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from exclusivelog import _core, logs
from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.local.log.reading import check_place
from exclusivelog.local.maintenance.deletion import delete_pending, give_up_view
from exclusivelog.local.records import View
from exclusivelog.local.storage.checkpointer import LARGE_PACKED_ENTRY, PACKED_ENTRY
from exclusivelog.local.storage.tables import Tables
from exclusivelog.messages import Item, is_clear, item_of, messages_of

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

log = logging.getLogger(__name__)

# ---- compacted views -------------------------------------------------------------------


READ_BYTES = 4 << 20
WRITTEN_AT_ONCE = 4 << 20  # bytes in one transaction; other writers wait meanwhile


class Compacted(NamedTuple):
    """The result of a compaction: the numbers of messages in the view, and of those read for it."""

    kept: int
    read: int
    horizon: int


def compact(ledger: Ledger, topic: int, slot: int, engine: str) -> Compacted:
    """Rebuild the topic's compacted view, up to its current end."""
    began = _core.monotonic()
    ledger.checkpoint()
    while True:
        basis = _basis(ledger, topic)
        try:
            done = _compact_once(ledger, topic, slot, engine)
        except LedgerCorruptedError:
            if _basis(ledger, topic) == basis:
                raise  # else it was trimmed, or its view replaced, meanwhile: retry
        else:
            if done is not None:
                _log_compacted(ledger, topic, done, _core.monotonic() - began)
                return done


def _log_compacted(ledger: Ledger, topic: int, done: Compacted, seconds: float) -> None:
    if log.isEnabledFor(logs.COMPACTED.level):
        with ledger.read() as tables:
            name = tables.topics.get(topic).name
        logs.emit(
            log,
            logs.COMPACTED,
            ledger=ledger.path,
            topic=name,
            kept=done.kept,
            count=done.read,
            offset=done.horizon,
            seconds=seconds,
        )


def _basis(ledger: Ledger, topic: int) -> tuple[int, View | None]:
    """(first offset, former view) of the topic, from which a view is made; TopicNotFoundError once
    it was deleted."""
    with ledger.read() as tables:
        row = tables.topics.existing(topic)
        return row.first_offset, tables.views.view(topic)


def _compact_once(ledger: Ledger, topic: int, slot: int, engine: str) -> Compacted | None:
    """Compact; None if messages were trimmed meanwhile that the new view does not cover."""
    view = None
    try:
        with ledger.write_concurrent() as tables:
            row = tables.topics.get(topic)
            former = tables.views.view(topic)
            view = View(tables.topics.list.next_id(), row.next_offset)
            tables.views.begin(view.id, slot, engine)
        work = _Work(ledger, topic, row.first_offset, former, view)
        last, read, deleted_to = _last_of_each_key(work)
        kept = _write(work, last)
        whole = _finish(work, kept, deleted_to)
    except BaseException:
        give_up_view(ledger, topic, view)
        raise
    finally:
        delete_pending(ledger)
    return Compacted(kept, read, view.horizon) if whole else None


class _Work(NamedTuple):
    ledger: Ledger
    topic: int
    first_offset: int
    former: View | None
    view: View


def _finish(work: _Work, kept: int, deleted_to: int) -> bool:
    """Make the view the topic's. False if messages behind its horizon were trimmed: these may have
    replaced some of the view's."""
    with work.ledger.write_concurrent() as tables:
        tables.views.check_making(work.view)
        if tables.views.view(work.topic) != work.former or _is_deleted(tables, work.topic):
            # Another process has replaced the view, or deleted the topic.
            tables.deletions.add(work.view.id)
            return True
        if tables.topics.get(work.topic).first_offset > work.view.horizon:
            tables.deletions.add(work.view.id)
            return False
        if work.former is not None:
            deleted_to = max(deleted_to, tables.views.deleted_to(work.former))
        tables.views.put_view(work.topic, work.view, kept, deleted_to)
        return True


def _is_deleted(tables: Tables, topic: int) -> bool:
    return bool(tables.topics.get(topic).flags & _core.DELETED)


def _last_of_each_key(work: _Work) -> tuple[dict[bytes, int], int, int]:
    """{key: the offset of its last message}, without keys whose last message is a tombstone; how
    many messages were read; and the offset after the last one that deletes keys. Without a former
    view, messages that were trimmed may have deleted keys, too."""
    last: dict[bytes, int] = {}
    count, deleted_to = 0, work.first_offset if work.former is None else 0
    for entry, indices in _entries(work):
        for index in indices:
            message = entry.message(index)
            key = message.key
            count += 1
            if key is None:
                if is_clear(message):
                    last.clear()
                    deleted_to = message.offset + 1
                continue
            if message.raw_value is None:
                last.pop(key, None)
                deleted_to = message.offset + 1
            else:
                last[key] = message.offset
    return last, count, deleted_to


def _write(work: _Work, last: dict[bytes, int]) -> int:
    count = size = 0
    parts: list[bytes] = []
    for entry, indices in _entries(work):
        kept = [index for index in indices if _is_kept(entry, index, last)]
        if kept:
            parts.append(_core.keep(entry, kept, work.view.id)[1])
            count += len(kept)
            size += len(parts[-1])
        if size >= WRITTEN_AT_ONCE:
            _add(work, parts)
            parts, size = [], 0
    _add(work, parts)
    return count


def _is_kept(entry: _core.Entry, index: int, last: dict[bytes, int]) -> bool:
    message = entry.message(index)
    key = message.key
    if key is None:
        return message.raw_value is not None
    return last.get(key) == message.offset


def _add(work: _Work, parts: list[bytes]) -> None:
    with work.ledger.write_concurrent() as tables:
        tables.views.check_making(work.view)
        row = tables.topics.get(work.topic)
        most = LARGE_PACKED_ENTRY if row.flags & _core.COMPRESSED_TOPIC else PACKED_ENTRY
        for last, entry in _core.pack_kept(parts, most):
            tables.entries.put(work.view.id, last, tables.compression.compressed(row, entry))


def _entries(work: _Work) -> Iterator[tuple[_core.Entry, range]]:
    """(entry, indices of its valid messages) of the former view, and then of the topic, up to the
    new horizon."""
    position, end = work.first_offset, work.view.horizon
    if work.former is not None:
        for entry in _walk(work.ledger, work.former.id, 0, work.former.horizon):
            yield entry, range(entry.count)
        position = max(position, work.former.horizon)
    for entry in _walk(work.ledger, work.topic, position, end):
        # The last entry may have been filled up meanwhile.
        base = entry.base_offset
        yield entry, range(max(0, position - base), min(entry.count, end - base))


def _walk(ledger: Ledger, topic: int, position: int, end: int) -> Iterator[_core.Entry]:
    # Read each batch in a short transaction of its own: a long one would pin pages.
    while position < end:
        with ledger.read() as tables:
            found = _read(tables, topic, position, end)
        if not found:
            return
        yield from found
        position = found[-1].end


def _read(tables: Tables, topic: int, position: int, end: int) -> list[_core.Entry]:
    found, size = [], 0
    for last, data in tables.entries.walk(topic, position):
        if size >= READ_BYTES or position >= end:
            break
        try:
            entry = _core.Entry(tables.entries.load(data))
            check_place(entry, topic, last, None)
            entry.check()
        except ValueError as error:
            raise LedgerCorruptedError(
                f"the entry of topic id {topic} that ends at offset {last} is damaged: {error}; "
                "nothing was compacted"
            ) from None
        found.append(entry)
        size += entry.nbytes
        position = entry.end
    return found


# ---- snapshots of states ---------------------------------------------------------------


WRITER = b"snapshot"
ITEMS_AT_ONCE = 10_000
ENTRY_BYTES = 1 << 20


def write_snapshot(
    ledger: Ledger, topic: int, slot: int, engine: str, offset: int, items: Iterable[Item]
) -> None:
    """Store these items as the state after the topic's messages before `offset`."""
    snapshot = None
    began = _core.monotonic()
    try:
        with ledger.write_concurrent() as tables:
            snapshot = View(tables.topics.list.next_id(), offset)
            tables.views.begin(snapshot.id, slot, engine)
        count = _write_items(ledger, topic, snapshot, items)
        with ledger.write_concurrent() as tables:
            tables.views.check_making(snapshot)
            row, former = tables.topics.get(topic), tables.views.snapshot(topic)
            if row.flags & _core.DELETED or (
                former is not None and former.horizon > offset  # there is a newer snapshot already
            ):
                tables.deletions.add(snapshot.id)
            else:
                tables.views.put_snapshot(topic, snapshot, count)
    except BaseException:
        give_up_view(ledger, topic, snapshot)
        raise
    finally:
        delete_pending(ledger)
    logs.emit(
        log,
        logs.SNAPSHOT,
        ledger=ledger.path,
        topic=row.name,
        epoch=row.epoch,
        offset=offset,
        count=count,
        seconds=_core.monotonic() - began,
    )


def _write_items(ledger: Ledger, topic: int, snapshot: View, items: Iterable[Item]) -> int:
    count = 0
    for some in _in_groups(items):
        appender = _core.Appender(WRITER, count - 1, ITEMS_AT_ONCE, ENTRY_BYTES)
        batch = messages_of(some).batch(appender)
        appender.add_batch(batch)
        with ledger.write_concurrent() as tables:
            tables.views.check_making(snapshot)
            row = tables.topics.get(topic)
            for last, entry in batch.stamp(snapshot.id, count, 0, 0, 0):
                tables.entries.put(snapshot.id, last, tables.compression.compressed(row, entry))
        count += len(some)
    return count


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

    Raises LedgerCorruptedError if it is damaged. Another one can be made from the topic's messages,
    unless these were trimmed.
    """
    snapshot = tables.views.snapshot(topic)
    if snapshot is None:
        return None
    items: list[Item] = []
    for entry in _entries_of(tables, topic, snapshot, "snapshot"):
        if entry.base_offset != len(items):
            raise _damaged(tables, topic, snapshot, "snapshot", len(items), "items are missing")
        items += map(item_of, map(entry.message, range(entry.count)))
    return snapshot.horizon, items


def read_view(tables: Tables, topic: int) -> tuple[int, list[Item]] | None:
    """The same for a map's compacted view, which has the last values as of its horizon."""
    view = tables.views.view(topic)
    if view is None:
        return None
    items: list[Item] = []
    for entry in _entries_of(tables, topic, view, "compacted view"):
        messages = map(entry.message, range(entry.count))
        items += [item_of(message) for message in messages if message.key is not None]
    return view.horizon, items


def _entries_of(tables: Tables, topic: int, view: View, what: str) -> Iterator[_core.Entry]:
    found, count = 0, tables.views.count(view)
    for last, data in tables.entries.walk(view.id, 0):
        try:
            entry = _core.Entry(tables.entries.load(data))
            if entry.topic != view.id:
                raise ValueError("it is not at its place")
            entry.check()
        except ValueError as error:
            raise _damaged(tables, topic, view, what, last, error) from None
        found += entry.count
        yield entry
    if count is not None and found != count:
        raise _damaged(tables, topic, view, what, found, f"it has {found} items of {count}")


def _damaged(
    tables: Tables, topic: int, view: View, what: str, item: int, why: object
) -> LedgerCorruptedError:
    name = tables.topics.get(topic).name
    return LedgerCorruptedError(
        f"topic {name!r}: the {what} as of offset {view.horizon} is damaged (item {item}): {why}",
        topic=name,
    )
