"""Time marks: the real times of messages whose publish times are ahead of the clock.

Publish times never decrease within a topic (rule G4). So one message sent under a clock that is ten
years ahead gives its time to all later messages of the topic, for ten years. The ledger therefore
keeps a few *time marks* for such a topic. A mark (offset, time) means: every message before this
offset had been published by that time.

The effective time of a message is its publish time, unless that is ahead of the reading process's
clock: then it is the time of the first mark after the message, or now if there is none. Retention
by age, trimming and seeking by time use the effective time.

A mark may have been made under a wrong clock, too. Every rule below prefers the later time, so that
a wrong clock makes retention keep more, never less:

- A mark counts only for publish times ahead of the reader's clock: a process with a clock *behind*
  takes right publish times for wrong ones, and the others ignore its marks.
- A mark ahead of the reader's clock is ignored; the next one, or now, counts instead.
- So is a mark earlier than a mark, or a trusted publish time, before it.
"""

from __future__ import annotations

import itertools
import struct
import time

from exclusivelog._core import crc32c

SLACK_MS = 5000  # a publish time may be this far ahead of the clock
MOST_MARKS = 64
# The start of 2025. An earlier time is that of a clock that was never set.
EARLIEST_MS = 1_735_689_600_000

MARK, CHECKSUM = struct.Struct(">QQ"), struct.Struct(">I")

Mark = tuple[int, int]  # an offset; ms since 1970


def wall_ms() -> int:
    """This process's wall clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


def is_ahead(published: int, now: int) -> bool:
    """Is this publish time too far ahead of the clock to be trusted?"""
    return published > now + SLACK_MS


def pack_marks(marks: list[Mark]) -> bytes:
    """The row in which a topic's marks are stored."""
    data = b"".join(itertools.starmap(MARK.pack, marks))
    return data + CHECKSUM.pack(crc32c(data))


def unpack_marks(row: bytes | None) -> list[Mark]:
    """A row's marks; none if it is damaged: then messages are only kept longer, while an error
    would fail checkpoints."""
    if row is None or len(row) % MARK.size != CHECKSUM.size:
        return []
    data = row[: -CHECKSUM.size]
    sound = CHECKSUM.unpack(row[-CHECKSUM.size :])[0] == crc32c(data)
    return list(MARK.iter_unpack(data)) if sound else []


def with_mark(marks: list[Mark], offset: int, now: int) -> list[Mark]:
    """The marks with one added; unchanged if there is no message since the last mark, or the clock
    was never set.

    >>> with_mark([(10, 1_800_000_000_000)], 20, 1_800_000_060_000)
    [(10, 1800000000000), (20, 1800000060000)]
    """
    if now < EARLIEST_MS or is_marked(marks, offset, now):
        return marks
    return _thinned([*marks, (offset, now)], now)


def is_marked(marks: list[Mark], offset: int, now: int) -> bool:
    """Is there a mark at or after the offset that is not ahead of this clock?"""
    return any(at >= offset and not is_ahead(when, now) for at, when in marks)


def _thinned(marks: list[Mark], now: int) -> list[Mark]:
    # Messages between two marks get the time of the later one. Drop the mark whose loss makes them
    # appear younger by the smallest share of their age, so that newer marks are closer together.
    while len(marks) > MOST_MARKS:
        costs = [
            max(0, later - earlier) / (abs(now - earlier) + 1000)
            for (_, earlier), (_, later) in zip(marks, marks[2:], strict=False)
        ]
        del marks[1 + costs.index(min(costs))]
    return marks


def without_trimmed(marks: list[Mark], first: int) -> list[Mark]:
    """The marks that concern messages from the offset `first` on."""
    return [mark for mark in marks if mark[0] > first]


def first_marked_since(marks: list[Mark], since: int, floor: int, now: int) -> int:
    """The first offset whose messages may have been published at `since` or later, according to
    the marks; 0 if unknown. `floor`: a trusted publish time before them.

    >>> first_marked_since([(10, 1000), (20, 3000)], 2000, 0, 5000)
    10
    """
    first, latest = 0, floor - SLACK_MS
    for offset, when in marks:
        if latest <= when <= now + SLACK_MS:
            latest = when
            if when < since:
                first = offset
    return first
