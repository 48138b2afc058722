"""Time marks: when messages were published whose publish times lie ahead of the clock.

Publish times never go backwards within a topic (rule G4). So one message that was sent under a
clock ten years ahead gives all later messages of its topic that time, for ten years. The ledger
therefore keeps a few *time marks* for such a topic. A mark (offset, time) says: every message
before this offset had been published by that time.

The effective time of a message is its publish time, unless that lies ahead of the clock of
whoever asks; then it is the time of the first mark behind it, or now where there is none.
Retention by age, trimming and seeking by time go by it.

A mark may have been made under a wrong clock as well. All rules below err to the later time,
so that a wrong clock makes retention keep more, never less:

- A mark counts only for publish times ahead of the asker's clock: a process whose clock is
  *behind* takes right publish times for wrong ones, and its marks are ignored by the others.
- A mark ahead of the asker's clock is ignored; the next one, or now, counts instead.
- So is one that is earlier than a mark, or a believed publish time, before it.
"""

from __future__ import annotations

import itertools
import struct
import time

from google_crc32c import value as crc32c

from exclusivelog.rows import PAIR

SLACK_MS = 5000  # so far ahead may a publish time be without being doubted
MOST_MARKS = 64
# 2025 began then. A clock that shows less was never set, and says nothing.
EARLIEST_MS = 1_735_689_600_000

CHECKSUM = struct.Struct(">I")

Mark = tuple[int, int]  # an offset; ms since 1970


def wall_ms() -> int:
    """This process's wall clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


def is_ahead(published: int, now: int) -> bool:
    """Is this publish time to be doubted?"""
    return published > now + SLACK_MS


def pack_marks(marks: list[Mark]) -> bytes:
    """The row in which a topic's marks are stored."""
    data = b"".join(itertools.starmap(PAIR.pack, marks))
    return data + CHECKSUM.pack(crc32c(data))


def unpack_marks(row: bytes | None) -> list[Mark]:
    """A row's marks; none where it is damaged: without marks messages stay for longer, and
    a checkpoint must not fail for them."""
    if row is None or len(row) % PAIR.size != CHECKSUM.size:
        return []
    data = row[: -CHECKSUM.size]
    sound = CHECKSUM.unpack(row[-CHECKSUM.size :])[0] == crc32c(data)
    return list(PAIR.iter_unpack(data)) if sound else []


def with_mark(marks: list[Mark], offset: int, now: int) -> list[Mark]:
    """The marks and one more, behind all others; unless nothing has come since the last one,
    or the clock was never set.

    >>> with_mark([(10, 1_800_000_000_000)], 20, 1_800_000_060_000)
    [(10, 1800000000000), (20, 1800000060000)]
    """
    if now < EARLIEST_MS or is_marked(marks, offset, now):
        return marks
    return _thinned([*marks, (offset, now)], now)


def is_marked(marks: list[Mark], offset: int, now: int) -> bool:
    """Does a mark that this clock can believe stand at the offset or behind?"""
    return any(at >= offset and not is_ahead(when, now) for at, when in marks)


def _thinned(marks: list[Mark], now: int) -> list[Mark]:
    # The messages between two marks seem as young as the later one. That one goes without which
    # they seem least too young, measured by their age: so marks lie the denser the younger.
    while len(marks) > MOST_MARKS:
        costs = [
            max(0, later - earlier) / (abs(now - earlier) + 1000)
            for (_, earlier), (_, later) in zip(marks, marks[2:], strict=False)
        ]
        del marks[1 + costs.index(min(costs))]
    return marks


def without_trimmed(marks: list[Mark], first: int) -> list[Mark]:
    """The marks that still say something about messages from the offset `first` on."""
    return [mark for mark in marks if mark[0] > first]


def first_marked_since(marks: list[Mark], since: int, floor: int, now: int) -> int:
    """The first offset whose messages may have been published at `since` or later, as far as
    marks can tell; 0 where they cannot. `floor`: a publish time before them that is believed.

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
