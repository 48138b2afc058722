"""What a topic's map was: from snapshots, compacted views and the log; and what a topic holds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.errors import OffsetTrimmedError, StateError
from exclusivelog.local.faults import retry_damaged
from exclusivelog.local.maintenance.views import read_snapshot, read_view
from exclusivelog.messages import Item, item_of, to_ms

if TYPE_CHECKING:
    from exclusivelog.reader import Reader
    from exclusivelog.topic import Topic


# ---- the place -------------------------------------------------------------------------


Kind = Mapping[str, str | None]  # what a topic holds, and its serialisers
Snapshot = tuple[int, list[Item]]  # the offset that it goes up to, and what it consists of


def change_counter(topic: Topic) -> tuple[_core.SharedWords, int]:
    """Return where the counter lies that changes with every commit to the topic."""
    lockfile = topic.engine.ledger.lockfile
    return lockfile.atomics, lockfile.counters.place(topic.id)


def read_newest(topic: Topic, position: int, views: bool) -> tuple[int, Snapshot | None]:
    """Return the topic's first offset and its newest snapshot, or None.

    With `views`, a map's compacted view stands in for a snapshot where messages were trimmed
    that are neither in the snapshot nor before `position`.
    """

    def read() -> tuple[int, Snapshot | None]:
        with topic.engine.ledger.read() as tables:
            first = tables.topics.get(topic.id).first_offset
            found = read_snapshot(tables, topic.id)
            if views and first > max(position, found[0] if found else 0):
                found = read_view(tables, topic.id) or found
            return first, found

    return retry_damaged(read)


def check_kind(topic: Topic, kind: Kind) -> bool:
    """Is it recorded that the topic holds this? False if nothing is recorded yet; StateError if
    it holds something else."""
    with topic.engine.ledger.read() as tables:
        return _matches(topic.name, tables.topics.kind(topic.id), kind)


def record_kind(topic: Topic, kind: Kind) -> None:
    """Record what the topic holds; StateError if it holds something else."""
    with topic.engine.ledger.write_concurrent() as tables:
        if not _matches(topic.name, tables.topics.kind(topic.id), kind):
            tables.topics.put_kind(topic.id, dict(kind))


def _matches(name: str, held: Kind, kind: Kind) -> bool:
    if any(value and (held.get(field) or value) != value for field, value in kind.items()):
        raise StateError(
            f"topic {name!r} holds {_described(held)}; it cannot be opened as {_described(kind)}"
        )
    return bool(held)


def _described(kind: Kind) -> str:
    codecs = ", ".join(f"{name}={value}" for name, value in kind.items() if name != "holds")
    return f"a {kind['holds']}" + (f" ({codecs})" if codecs else "")


# ---- the past --------------------------------------------------------------------------


At = int | dt.datetime


def apply_to(entries: dict[bytes, bytes], key: bytes | None, value: bytes | None) -> None:
    """Apply one message to a map of bytes."""
    if key is not None and value is not None:
        entries[key] = value
    elif key is not None:
        entries.pop(key, None)
    elif value is None:
        entries.clear()
    else:
        raise ValueError("it is no message of a map")


def map_at(topic: Topic, when: At) -> tuple[int, dict[bytes, bytes]]:
    """Return (offset, map) before the message at an offset, or before the first one that was
    published at a time or later; at the end of the topic if there is none."""
    if isinstance(when, bool) or not isinstance(when, (int, dt.datetime)):
        raise TypeError(f"when={when!r}: it takes an offset or a datetime")
    if isinstance(when, int) and when < 0:
        raise ValueError(f"when={when}: it takes an offset from 0 on")
    topic.engine.make_visible()
    with topic.reader("earliest") as reader:
        if isinstance(when, dt.datetime):
            when = _offset_at(topic, reader, when)
        position, items = _base(topic, when)
        reader.cursor.move_to(position)
        for message in reader:
            if message.offset >= when:
                break
            apply_to(items, *item_of(message))
            position = message.offset + 1
    return max(position, min(when, topic.next_offset)), items


def _offset_at(topic: Topic, reader: Reader, when: dt.datetime) -> int:
    row = topic.engine.latest(topic.id)
    reader.seek(when)
    if 0 < row.first_offset == reader.position and to_ms(when) <= row.last_publish_time:
        raise OffsetTrimmedError(  # some of what was trimmed may have come later
            f"topic {topic.name!r}: the map as of {when} cannot be restored any more: messages "
            f"before offset {row.first_offset} were trimmed"
        )
    return reader.position


def _base(topic: Topic, offset: int) -> tuple[int, dict[bytes, bytes]]:
    """Return the newest snapshot or compacted view that is no later than the offset; an empty map
    if no message was trimmed."""
    first, found = read_newest(topic, 0, views=True)
    if found is not None and first <= found[0] <= offset:
        items = ((key, value) for key, value in found[1] if key is not None)
        return found[0], {key: value for key, value in items if value is not None}
    if first > 0:
        oldest = f"as of offset {found[0]}" if found else "missing"
        raise OffsetTrimmedError(
            f"topic {topic.name!r}: the map as of offset {offset} cannot be restored any more: "
            f"messages before offset {first} were trimmed, and its snapshot is {oldest}"
        )
    return 0, {}
