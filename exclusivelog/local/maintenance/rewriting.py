"""Rewriting of segments: frees the space of entries that were trimmed or deleted (rule G8).

A segment can only be removed as a whole: readers have its file mapped, so nothing in it may change.
One entry that lives would keep its whole space. So what lives in such a segment is written to the
newest one, byte by byte, some MiB in each transaction, while appends go on; then it is removed.

When:

- once more bytes of all segments are dead than alive, and a whole segment could be saved: some of
  it in the trim or deletion, for programs that are soon over, the rest in the background (the
  retention worker). So segments take at most twice the bytes of the entries that live, and two
  segments more;
- if there is little room, in the trim or deletion, each segment of which an eighth is dead.

Death at any instant leaves either what was written behind the committed end of the newest segment,
which is cut off or overwritten, or a segment to which no row refers, which the next opening
removes. A damaged entry stays where it is, and so does its segment.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from exclusivelog.errors import ExclusiveLogError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.local.maintenance.deletion import delete_pending
from exclusivelog.local.storage.reserve import LEFT
from exclusivelog.local.storage.segments import REFERENCE
from exclusivelog.local.storage.tables import Segment, Tables

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

BYTES_AT_ONCE = 4 << 20  # bytes of entries in one transaction
# Bytes that a trim or deletion rewrites where there is little room, and else; the background does
# the rest.
MOST_AT_ONCE, SOME_AT_ONCE = 256 << 20, 32 << 20
ROWS_AT_ONCE = 20_000  # in one snapshot
# A segment is rewritten if one part in this many of it is dead.
HALF, EIGHTH = 2, 8
# A trim or deletion waits so long for reads that may still use what it removes: where there is
# little room; and else only for those of background threads, which are short.
READ_PATIENCE_SECONDS, SHORT_READ_SECONDS = 0.5, 0.05

Reference = tuple[int, int, bytes]  # topic, last offset, row

# ---- when ------------------------------------------------------------------------------


def free_room(ledger: Ledger) -> None:
    """Delete what a trim or deletion has marked, and make its space free for other files if there
    is little room."""
    ledger.reserve.help(lambda: delete_pending(ledger))
    with ledger.read() as tables:
        scarce = _is_scarce(ledger, tables)
    ledger.remove_unneeded(READ_PATIENCE_SECONDS if scarce else SHORT_READ_SECONDS)
    most = MOST_AT_ONCE if scarce else SOME_AT_ONCE
    # The trim or deletion itself has succeeded: the background tries again, and logs why not.
    with contextlib.suppress(ExclusiveLogError):
        ledger.reserve.help(lambda: rewrite(ledger, most=most, helped=True))


def is_due(ledger: Ledger, tables: Tables) -> bool:
    """Is there a segment to be rewritten, or to be looked at for that?"""
    slack, scarce = tables.large.segment_bytes, _is_scarce(ledger, tables)
    if not tables.large.agree():
        return True
    if tables.large.total_bytes() <= slack and not scarce:
        return False
    found = _within_reach(ledger, tables, scarce)
    return any(each.dead is None for each in found) or bool(chosen(found, slack, scarce))


def chosen(found: Iterable[Segment], slack: int, scarce: bool) -> list[Segment]:
    """The segments to be rewritten, those with the fewest bytes that live first: they need the
    least room. `slack`: bytes that may be dead besides as many as live; `scarce`: there is little
    room.

    >>> old, new = Segment(1, 100, 1, 90, grows=False), Segment(2, 50, 5, 0, grows=True)
    >>> chosen([old, new], slack=20, scarce=False) == [old]
    True
    >>> chosen([old, new], slack=50, scarce=False)
    []
    """
    counted = [each for each in found if each.dead is not None]
    dead = sum(each.dead or 0 for each in counted)
    live = sum(each.live_bytes for each in counted)
    if not scarce and dead <= live + slack:
        return []
    least, picked = EIGHTH if scarce else HALF, list[Segment]()
    for each in sorted(counted, key=lambda each: each.live_bytes):
        if not scarce and dead <= live:
            break
        if not each.grows and (each.dead or 0) * least >= each.end:
            picked.append(each)
            dead -= each.dead or 0
    return picked


def _is_scarce(ledger: Ledger, tables: Tables) -> bool:
    disk = ledger.usage.room.disk()
    return tables.large.nearly_full or (disk is not None and disk.low)


def _room(ledger: Ledger, scarce: bool, helped: bool) -> float:
    """The bytes that may be written before anything is freed. Messages need room meanwhile, and a
    read may keep the old segment: so `LEFT` bytes stay free or, where there is little room, a
    quarter of what is free. `helped`: the caller gets the reserve, if it is left."""
    disk = ledger.usage.room.disk()
    if disk is None:
        return math.inf
    room: float = disk.free
    if ledger.reserve.lent:
        return room
    room = max(0.0, room - (min(LEFT, room / 4) if scarce else LEFT))
    return room + (ledger.reserve.left if scarce and helped else 0)


def _within_reach(
    ledger: Ledger, tables: Tables, scarce: bool, helped: bool = False
) -> list[Segment]:
    """The segments without those that have a damaged entry, or whose entries do not fit on the
    disk a second time."""
    room = _room(ledger, scarce, helped)
    return [
        each
        for each in tables.large.survey()
        if each.id not in ledger.segments.stuck and (each.dead is None or each.live_bytes <= room)
    ]


# ---- what is done ----------------------------------------------------------------------


def rewrite(
    ledger: Ledger,
    ended: Callable[[], bool] = lambda: False,
    most: float = math.inf,
    helped: bool = False,
) -> None:
    """Rewrite segments, if that is due, until about `most` bytes were written, or until
    `ended()`. `helped`: `Reserve.help` calls it."""
    _count_dead(ledger)
    with ledger.read() as tables:
        slack, scarce = tables.large.segment_bytes, _is_scarce(ledger, tables)
        segments = chosen(_within_reach(ledger, tables, scarce, helped), slack, scarce)
    if not segments:
        return
    places = _references(ledger, {each.id for each in segments})
    for each in segments:
        # Earlier ones may have used the room: a read keeps them, or others have written.
        if most <= 0 or ended() or each.live_bytes > _room(ledger, scarce, helped):
            return
        for size in _rewrite_one(ledger, each.id, places[each.id]):
            most -= size
            if most <= 0 or ended():
                break
        ledger.remove_unneeded(READ_PATIENCE_SECONDS if scarce else 0.0)


def _count_dead(ledger: Ledger) -> None:
    """Count the dead bytes of segments of which they are not known, because an earlier version has
    begun them, or their rows do not agree; and find segments that have lost their rows."""
    with ledger.read() as tables:
        found, agree = tables.large.survey(), tables.large.agree()
    unknown = [each for each in found if each.dead is None or not agree]
    lost = set[int]() if agree else ledger.segments.ids() - {each.id for each in found}
    if agree and not unknown:
        return
    places = _references(ledger, lost | {each.id for each in unknown})
    with ledger.write_concurrent() as tables:
        for each in unknown:
            tables.large.count_dead(each, [REFERENCE.unpack(row)[3] for *_, row in places[each.id]])
        for segment in lost:
            rows = (REFERENCE.unpack(row) for *_, row in places[segment])
            tables.large.find_again(segment, {position: length for *_, position, length in rows})
        if not agree:
            tables.large.correct_total()


def _references(ledger: Ledger, segments: set[int]) -> dict[int, list[Reference]]:
    """The entries in each of these segments. Several snapshots: none is kept for long."""
    found: dict[int, list[Reference]] = {segment: [] for segment in segments}
    start: bytes | None = b""
    while start is not None:
        with ledger.scan() as tables:
            some, start = tables.entries.references(segments, start, ROWS_AT_ONCE)
        for place in some:
            found[REFERENCE.unpack(place[2])[1]].append(place)
    return found


def _rewrite_one(ledger: Ledger, segment: int, places: list[Reference]) -> Iterator[int]:
    """Rewrite a segment part by part; yields the bytes of each. What was moved stays moved."""
    for part in _parts(places):
        try:
            copies = list(_copied(ledger, part))
        except OSError as error:  # no descriptor is left, say: a later round tries again
            pass_on_foreign(error)
            return
        with ledger.write_concurrent() as tables:
            if any(each.id == segment and each.grows for each in tables.large.survey()):
                return  # the disk, or the limit, has become larger
            for topic, last, row, entry in copies:
                tables.entries.move(topic, last, row, entry)
        yield sum(len(entry) for *_, entry in copies)
    with ledger.read() as tables:
        if any(tables.entries.has(*place) for place in places):
            ledger.segments.stuck.add(segment)


def _parts(places: list[Reference]) -> Iterator[list[Reference]]:
    part, size = list[Reference](), 0
    for place in places:
        length = REFERENCE.unpack(place[2])[3]
        if part and size + length > BYTES_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(place)
        size += length
    if part:
        yield part


def _copied(ledger: Ledger, part: list[Reference]) -> Iterator[tuple[int, int, bytes, bytes]]:
    """These entries, with their bytes, without those that cannot be read: reading them reports the
    damage."""
    for topic, last, row in part:
        try:
            yield topic, last, row, _copy(ledger, row)
        except ValueError:
            continue
        except OSError as error:
            pass_on_foreign(error)
            if error.errno != errno.EIO:
                raise


def _copy(ledger: Ledger, row: bytes) -> bytes:
    """The bytes of one entry, from the file: what the disk cannot read is an OSError, no SIGBUS."""
    _, segment, position, length = REFERENCE.unpack(row)
    fd = ledger.segments.open(segment)
    try:
        found = bytearray()
        while len(found) < length:
            part = os.pread(fd, length - len(found), position + len(found))
            if not part:
                raise ValueError(f"{ledger.segments.file(segment)} is cut off")
            found += part
        return bytes(found)
    finally:
        os.close(fd)
