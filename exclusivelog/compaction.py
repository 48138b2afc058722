"""Compaction: the last message of every key, at its own offset (rule G7).

A compacted view is a run of entries under an id of its own, like a topic's, that lack what a
later message of the same key has replaced, or a map's `clear` has removed. It reaches up to its
*horizon*; a compacted reader goes on with the topic itself there. A tombstone removes its key
from the view; a message without a key is kept. Making a new view reads the last one and what has
come since, so that it costs what is new, and trimming the topic loses nothing of it.

A view is made beside everything else: entries are added a bounded number at a time, one small
transaction makes it the topic's, and then the last one goes. What a crash leaves of an
unfinished one is removed by whoever opens the ledger next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, TopicNotFoundError
from exclusivelog.ledger import Ledger
from exclusivelog.log import check_place
from exclusivelog.retention import empty_trash, give_up_view
from exclusivelog.snapshots import is_clear
from exclusivelog.tables import PACKED_ENTRY, Tables, View

READ_BYTES = 4 << 20
WRITTEN_AT_ONCE = 4 << 20  # bytes of one transaction: others wait for the ledger meanwhile


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction has done: messages in the view, of how many that it was made of."""

    kept: int
    read: int
    horizon: int


def compact(ledger: Ledger, topic: int, slot: int, engine: str) -> Compacted:
    """Make the topic's compacted view anew, up to its end as it is now."""
    ledger.checkpoint()
    while True:
        basis = _basis(ledger, topic)
        try:
            done = _compact_once(ledger, topic, slot, engine)
        except LedgerCorruptedError:
            if _basis(ledger, topic) == basis:
                raise  # else it was trimmed, or its view replaced, while we read it
        else:
            if done is not None:
                return done


def _basis(ledger: Ledger, topic: int) -> tuple[int, View | None]:
    """What a view is made of; TopicNotFoundError once the topic was deleted."""
    with ledger.read() as tables:
        row = tables.topic(topic)
        if row.flags & _core.DELETED:
            raise TopicNotFoundError(f"topic {row.name!r} was deleted")
        return row.first_offset, tables.view(topic)


def _compact_once(ledger: Ledger, topic: int, slot: int, engine: str) -> Compacted | None:
    """None: it was of no use, for more was trimmed meanwhile than it has read."""
    view = None
    try:
        with ledger.write_beside() as tables:
            row = tables.topic(topic)
            former = tables.view(topic)
            view = View(tables.rows.next_id(b"topic"), row.next_offset)
            tables.begin_view(view.id, slot, engine)
        work = _Work(ledger, topic, row.first_offset, former, view)
        last, read = _last_of_each_key(work)
        kept = _write(work, last)
        whole = _finish(work)
    except BaseException:
        give_up_view(ledger, topic, view)
        raise
    finally:
        empty_trash(ledger)
    return Compacted(kept, read, view.horizon) if whole else None


@dataclass(frozen=True, slots=True)
class _Work:
    ledger: Ledger
    topic: int
    first_offset: int
    former: View | None
    view: View


def _finish(work: _Work) -> bool:
    """False if a trim has gone beyond what it was made of, where there was no view to keep it
    from that: what has replaced some of its messages is no more."""
    with work.ledger.write_beside() as tables:
        tables.check_making(work.view)
        if tables.view(work.topic) != work.former or _is_deleted(tables, work.topic):
            tables.discard(work.view.id)  # somebody else was faster
            return True
        if tables.topic(work.topic).first_offset > work.view.horizon:
            tables.discard(work.view.id)
            return False
        tables.put_view(work.topic, work.view)
        if work.former is not None:
            tables.discard(work.former.id)
        return True


def _is_deleted(tables: Tables, topic: int) -> bool:
    return bool(tables.topic(topic).flags & _core.DELETED)


def _last_of_each_key(work: _Work) -> tuple[dict[bytes, int], int]:
    """{key: the offset of its last message, unless that is a tombstone}, and how many messages
    were read."""
    last: dict[bytes, int] = {}
    count = 0
    for entry, indices in _entries(work):
        for index in indices:
            message = entry.message(index)
            key = message.key
            count += 1
            if key is None:
                if is_clear(message):
                    last.clear()
                continue
            if message.raw_value is None:
                last.pop(key, None)
            else:
                last[key] = message.offset
    return last, count


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
    with work.ledger.write_beside() as tables:
        tables.check_making(work.view)
        for last, entry in _core.pack_kept(parts, PACKED_ENTRY):
            tables.put_entry(work.view.id, last, entry)


def _entries(work: _Work) -> Iterator[tuple[_core.Entry, range]]:
    """(entry, indices of the messages that count) of the last view, and then of the topic, up
    to the new horizon."""
    position, end = work.first_offset, work.view.horizon
    if work.former is not None:
        for entry in _walk(work.ledger, work.former.id, 0, work.former.horizon):
            yield entry, range(entry.count)
        position = max(position, work.former.horizon)
    for entry in _walk(work.ledger, work.topic, position, end):
        # The last one may have been filled up meanwhile.
        base = entry.base_offset
        yield entry, range(max(0, position - base), min(entry.count, end - base))


def _walk(ledger: Ledger, topic: int, position: int, end: int) -> Iterator[_core.Entry]:
    # Each batch in a short transaction of its own: a long one would pin the ledger's pages.
    while position < end:
        with ledger.read() as tables:
            found = _read(tables, topic, position, end)
        if not found:
            return
        yield from found
        position = found[-1].end


def _read(tables: Tables, topic: int, position: int, end: int) -> list[_core.Entry]:
    found, size = [], 0
    for last, data in tables.entries(topic, position):
        if size >= READ_BYTES or position >= end:
            break
        try:
            entry = _core.Entry(tables.load(data))
            check_place(entry, topic, last, None)
        except ValueError as error:
            raise LedgerCorruptedError(
                f"the entry of topic id {topic} that ends at offset {last} is damaged: {error}; "
                "nothing was compacted"
            ) from None
        found.append(entry)
        size += entry.nbytes
        position = entry.end
    return found


def view_entries(
    tables: Tables, topic: int, position: int, horizon: int,
    loads: Callable[[bytes], object] | None, most_bytes: int,
) -> list[_core.Entry]:  # fmt: skip
    """Entries of the topic's view from `position` on, of their messages those that stand before
    `horizon`. It may be a later view than the one that the reader began with: what it lacks
    has been replaced by messages behind that horizon.

    Raises LedgerCorruptedError for a damaged entry, once it is the first (rule G9).
    """
    found: list[_core.Entry] = []
    size = 0
    view = tables.view(topic)
    for last, data in () if view is None else tables.entries(view.id, position):
        try:
            entry = _core.Entry(tables.load(data), loads)
            check_place(entry, view.id if view else 0, last, None)
        except ValueError as error:
            if found:
                break
            name = tables.topic(topic).name
            raise LedgerCorruptedError(
                f"topic {name!r}: an entry of its compacted view, up to offset {last}, is "
                f"damaged: {error}; compact() makes it anew from what is not trimmed, and "
                f"seek({last + 1}) steps over it",
                topic=name, offsets=range(position, last + 1),
            ) from None  # fmt: skip
        if entry.base_offset >= horizon:
            break
        if entry.end > horizon:
            count = sum(entry.message(i).offset < horizon for i in range(entry.count))
            entry = _core.Entry(_core.keep(entry, list(range(count)), entry.topic)[1], loads)
            if entry.end <= position:  # a later view's: what stood in between has been replaced
                break
        found.append(entry)
        size += entry.nbytes
        if size >= most_bytes:
            break
    return found
