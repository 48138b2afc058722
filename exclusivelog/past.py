"""A map as it was, from a snapshot, a compacted view and the log."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from exclusivelog.encoding import to_ms
from exclusivelog.errors import OffsetTrimmedError
from exclusivelog.snapshots import Item, item_of, read_snapshot, read_view

if TYPE_CHECKING:
    from exclusivelog.reader import Reader
    from exclusivelog.topic import Topic

At = int | dt.datetime


def apply_to(items: dict[bytes, bytes], item: Item) -> None:
    """What one message does to a map of bytes."""
    key, value = item
    if key is None:
        if value is not None:
            raise ValueError("it is no message of a map")
        items.clear()
    elif value is None:
        items.pop(key, None)
    else:
        items[key] = value


def map_at(topic: Topic, when: At) -> tuple[int, dict[bytes, bytes]]:
    """(offset, map) before the message at an offset, or the first one published at a time or
    later; the end of the topic where that is later still."""
    if isinstance(when, bool) or not isinstance(when, (int, dt.datetime)):
        raise TypeError(f"when={when!r}: it takes an offset or a datetime")
    if isinstance(when, int) and when < 0:
        raise ValueError(f"when={when}: it takes an offset from 0 on")
    topic.engine.make_visible()
    with topic.reader("earliest") as reader:
        if isinstance(when, dt.datetime):
            when = _offset_at(topic, reader, when)
        position, items = _base(topic, when)
        reader.move_to(position)
        for message in reader:
            if message.offset >= when:
                break
            apply_to(items, item_of(message))
            position = message.offset + 1
    return max(position, min(when, topic.next_offset)), items


def _offset_at(topic: Topic, reader: Reader, when: dt.datetime) -> int:
    row = topic.engine.latest(topic.id)
    reader.seek(when)
    if 0 < row.first_offset == reader.position and to_ms(when) <= row.last_publish_time:
        raise OffsetTrimmedError(  # some of what was trimmed may have come later
            f"topic {topic.name!r}: the map as of {when} is not known any more: messages before "
            f"offset {row.first_offset} were trimmed"
        )
    return reader.position


def _base(topic: Topic, offset: int) -> tuple[int, dict[bytes, bytes]]:
    """The newest snapshot or compacted view that is no later than the offset; the beginning, if
    that is still there."""
    with topic.engine.ledger.read() as tables:
        first = tables.topic(topic.id).first_offset
        found = read_snapshot(tables, topic.id)
        if first > (found[0] if found else 0):
            found = read_view(tables, topic.id) or found
    if found is not None and first <= found[0] <= offset:
        items = ((key, value) for key, value in found[1] if key is not None)
        return found[0], {key: value for key, value in items if value is not None}
    if first > 0:
        oldest = f"as of offset {found[0]}" if found else "missing"
        raise OffsetTrimmedError(
            f"topic {topic.name!r}: the map as of offset {offset} is not known any more: messages "
            f"before offset {first} were trimmed, and its snapshot is {oldest}"
        )
    return 0, {}
