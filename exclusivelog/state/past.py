"""A map as it was at an offset or a time, from a snapshot, a compacted view and the log."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from exclusivelog.backend import TopicStore
from exclusivelog.errors import OffsetTrimmedError
from exclusivelog.messages import item_of, to_ms

if TYPE_CHECKING:
    from exclusivelog.reader import Reader
    from exclusivelog.topic import Topic


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
    store: TopicStore = topic.engine.topic_store(topic.id)
    first, found = store.newest(0, views=True)
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
