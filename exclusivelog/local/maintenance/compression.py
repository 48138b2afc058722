"""Compression of topics: the setting, its statistics, and recompressing old entries.

With the setting "zstd", entries are compressed by LZ4 when they are written, and by Zstandard once
they are `OLD_MS` old, except the topic's last one: the retention worker replaces some entries in
each transaction, at the same offsets. The topic's row in `meta` has the offset that was reached,
where any process continues.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from exclusivelog import _core, logs
from exclusivelog.errors import (
    LedgerCorruptedError,
    MissingLibraryError,
    describe_engine,
)
from exclusivelog.local.storage.compression import (
    LOADERS,
    OLD,
    check_setting,
    compressed,
    needed,
)
from exclusivelog.local.storage.tables import Tables
from exclusivelog.local.time_marks import wall_ms
from exclusivelog.types import TopicStats

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

log = logging.getLogger(__name__)

OLD_MS = 600_000  # an entry is old when its last message was published so long ago
BYTES_AT_ONCE = 4 << 20  # bytes of stored entries in one transaction
TIMES_IN_A_ROUND = 16  # transactions per topic; trimming waits meanwhile
ROWS_AT_ONCE = 1000


def check_engines(ledger: Ledger, setting: str) -> None:
    """MissingLibraryError if a live engine of another process lacks a library: it could make no
    checkpoints. `set_compression` checks this process."""
    for name in sorted(needed(setting)):
        lacking = [one for one in ledger.lockfile.slots.without(name) if one.pid != os.getpid()]
        if lacking:
            raise MissingLibraryError(
                f"{describe_engine(lacking[0])} has {ledger.path} open and lacks the library for "
                f"{name}; pip install 'exclusivelog[{setting}]' where it runs, and restart it first"
            )


def set_compression(ledger: Ledger, topic: int, setting: str | None) -> None:
    """Store a topic's compression setting, which all processes use from now on."""
    with ledger.write_concurrent() as tables:
        row = tables.topics.existing(topic)
        if setting is not None:
            check_setting(setting, row.name)
        try:
            unchanged = tables.compression.get(row)[0] == setting
        except LedgerCorruptedError:
            unchanged = False  # a damaged row is written anew
        if not unchanged:
            tables.compression.put(row, setting)


# ---- what it has saved -----------------------------------------------------------------


def stats(ledger: Ledger, topic: int) -> TopicStats:
    """Statistics of the topic's entries in the tables."""
    with ledger.read() as tables:
        row = tables.topics.get(topic)
        setting, position = tables.compression.get(row)[0], row.first_offset
    entries = stored = raw = 0
    by_method: dict[str, int] = {}
    while position >= 0:
        with ledger.read() as tables:
            sizes, position = _sizes(tables, topic, position)
        entries += len(sizes)
        for method, here, there in sizes:
            stored, raw = stored + here, raw + there
            by_method[method] = by_method.get(method, 0) + here
    return TopicStats(setting, entries, raw, stored, by_method)


def _sizes(tables: Tables, topic: int, position: int) -> tuple[list[tuple[str, int, int]], int]:
    """(method, bytes stored, bytes without compression) of some entries from an offset on, and the
    offset to continue at; -1 at the end."""
    found: list[tuple[str, int, int]] = []
    for last, data in tables.entries.stored(topic, position):
        if len(found) == ROWS_AT_ONCE:
            return found, position
        position = last + 1
        try:
            entry = tables.large.load(data)
        except ValueError:
            continue  # it is damaged; `verify` reports it
        summary = _core.compression_of(entry)
        size = len(entry)
        if summary is None:
            found.append(("none", size, size))
        else:
            method = LOADERS[summary[0]][0] if summary[0] in LOADERS else "?"
            found.append((method, size, summary[2]))
    return found, -1


# ---- compressing again -----------------------------------------------------------------


class _Part(NamedTuple):
    """Some consecutive old entries of a topic, as (last offset, row, bytes), and their range of
    offsets."""

    topic: str
    method: int
    begin: int
    end: int
    entries: list[tuple[int, bytes, bytes | memoryview]]


def compress_old(ledger: Ledger, ended: Callable[[], bool]) -> None:
    """Recompress old entries of every topic with such a setting, a bounded number."""
    with ledger.read() as tables:
        topics = [topic for topic, setting in tables.compression.all().items() if setting in OLD]
    for topic in topics:
        try:
            for _ in range(TIMES_IN_A_ROUND):
                if ended() or not compress_again(ledger, topic):
                    break
        except (LedgerCorruptedError, MissingLibraryError) as error:  # go on with the other topics
            logs.emit(log, logs.NOT_COMPRESSED_AGAIN, ledger=ledger.path, reason=str(error))


def compress_again(ledger: Ledger, topic: int) -> bool:
    """Recompress some of a topic's old entries by its setting. False if there is nothing left to do
    now, or another process does it."""
    with ledger.read() as tables:
        part = _read_old(tables, topic)
    if part is None:
        return False
    changed = [
        (last, row, made)
        for last, row, stored in part.entries
        if (made := _anew(stored, part)) is not None
    ]
    return _replace(ledger, topic, part, changed)


def _read_old(tables: Tables, topic: int) -> _Part | None:
    row = tables.topics.get(topic)
    setting, again = tables.compression.get(row)
    if setting not in OLD or row.flags & _core.DELETED:
        return None
    part = _Part(row.name, OLD[setting], again, again, [])
    size, latest, end = 0, wall_ms() - OLD_MS, max(again, row.first_offset)
    start = end
    for last, data in tables.entries.stored(topic, start):
        if size >= BYTES_AT_ONCE or last + 1 >= row.next_offset:
            break  # the last one may still be filled up
        try:
            stored = tables.entries.load(data)
            if _core.Entry(stored).last_publish_time > latest:
                break
            part.entries.append((last, data, stored))
            size += len(stored)
        except ValueError:
            pass  # it is damaged: leave it, so that reading it reports that
        end = last + 1
    return None if end == start else part._replace(end=end)


def _anew(stored: bytes | memoryview, part: _Part) -> bytes | None:
    """The entry, recompressed; None if it already is, is damaged, or would not be shorter."""
    summary = _core.compression_of(stored)
    if summary is not None and summary[0] == part.method:
        return None
    try:
        made = compressed(_core.decompressed(stored), part.method, part.topic)
    except ValueError:
        return None
    return made if len(made) < len(stored) else None


def _replace(
    ledger: Ledger, topic: int, part: _Part, changed: list[tuple[int, bytes, bytes]]
) -> bool:
    with ledger.write_concurrent() as tables:
        row = tables.topics.get(topic)
        setting, again = tables.compression.get(row)
        if setting not in OLD or row.flags & _core.DELETED or again != part.begin:
            return False
        for last, data, made in changed:
            tables.entries.replace(topic, last, data, made)
        tables.compression.put(row, setting, part.end)
    return True
