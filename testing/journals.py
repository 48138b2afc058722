"""Inspect and damage the journal: its frames, its flushes, its size, its times."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.shm.lockfile import JOURNAL_OFFSET
from exclusivelog.local.storage import journal

if TYPE_CHECKING:  # children import this, and pytest takes 130 ms
    import pytest

CAPACITY = 512 << 10  # of a small journal: it wraps around within one test
# A frame's header, as _native/journal_file.h tells it: magic, flags and bytes of the entry,
# position, generation, topic, base offset, version, durable position, count, checksum.
FRAME = struct.Struct("<IIQQQQQQII")
MAGIC = 0x024A4C58
PADDING, MORE = 1 << 31, 1 << 30
# The counter of flushes among the journal's words, behind two mutexes, six numbers of 64 bits
# and two of 32.
FLUSHES = JOURNAL_OFFSET + 3 * 64 + 6 * 8 + 2 * 4


@dataclass(frozen=True)
class Frame:
    """One frame: where its header stands in the file, and what it holds."""

    at: int
    flags: int
    entry: bytes

    @property
    def offsets(self) -> range:
        """The offsets of the messages in it, as long as it is sound."""
        entry = _core.Entry(self.entry)
        return range(entry.base_offset, entry.base_offset + entry.count)

    @property
    def entry_at(self) -> int:
        """Where the entry stands in the file."""
        return self.at + FRAME.size


def frames(engine: xl.Engine, since: int | None = None) -> list[Frame]:
    """The frames from the position `since` on; by default those that are in no table yet."""
    journal = engine.ledger.journal
    data = (Path(engine.path) / "journal").read_bytes()
    with engine.ledger.read() as tables:
        position = tables.journal.applied if since is None else since
    found = []
    while position < journal.tail:
        at = _core.JOURNAL_HEADER_BYTES + position % journal.capacity
        left = journal.capacity - position % journal.capacity
        if left < FRAME.size:
            position += left
            continue
        magic, size, place, *_ = FRAME.unpack_from(data, at)
        assert (magic, place) == (MAGIC, position)
        flags, size = size & (PADDING | MORE), size & (MORE - 1)
        if flags & PADDING:
            position += left
            continue
        start = at + FRAME.size
        found.append(Frame(at, flags, data[start : start + size]))
        position += (FRAME.size + size + 15) // 16 * 16
    return found


def appends(engine: xl.Engine, since: int) -> int:
    """How many times something was appended to the journal, from the position `since` on."""
    return sum(not frame.flags & MORE for frame in frames(engine, since))


def flushes(engine: xl.Engine) -> int:
    """Counts the flushes of the journal; and the commits of the tables, which make one needless."""
    return engine.ledger.lockfile.atomics.load(FLUSHES)


def flip(path: str | Path, at: int, mask: int = 1) -> None:
    """Flip bits of one byte of the file `journal` in a ledger's directory."""
    with open(os.path.join(path, "journal"), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def move_away(engine: xl.Engine) -> Path:
    """Move the ledger, and let the engine see that it is gone; where it is now."""
    moved = Path(engine.path).with_name("moved")
    Path(engine.path).rename(moved)
    with contextlib.suppress(xl.LedgerError):
        engine.ledger.integrity.check_place()
    assert engine.ledger.integrity.failed
    return moved


@contextlib.contextmanager
def no_checkpoints(engine: xl.Engine) -> Iterator[None]:
    """Keep what is appended in the journal while the block runs."""
    engine.ledger.checkpoint = lambda: None
    try:
        while _is_under_way(engine):
            time.sleep(0.001)
        yield
    finally:
        del engine.ledger.checkpoint


def _is_under_way(engine: xl.Engine) -> bool:
    """Does the thread in the background make a checkpoint, which it has begun before?"""
    thread = engine.ledger.checkpointer._thread
    frame = None if thread is None else sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not type(engine.ledger).checkpoint.__code__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def small_journal(capacity: int = CAPACITY) -> Iterator[None]:
    """Give the journals that this process creates in this block only `capacity` bytes."""
    usual, journal.CAPACITY = journal.CAPACITY, capacity
    try:
        yield
    finally:
        journal.CAPACITY = usual


def checkpoint(engine: xl.Engine) -> None:
    """A checkpoint, also where there are `no_checkpoints`."""
    type(engine.ledger).checkpoint(engine.ledger)


def never_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame becomes an entry of its own in the tables."""
    for name in ("PACKED_ENTRY", "LARGE_PACKED_ENTRY"):
        monkeypatch.setattr(f"exclusivelog.local.storage.checkpointer.{name}", 1)


def wall_ms() -> int:
    """The machine's clock."""
    return time.time_ns() // 1_000_000


def published_last_at(topic: xl.Topic, ms: int) -> None:
    """Let the topic's last message have been published then: for a time to come, as if the
    machine's clock had been set back since. The next ones get the same time (rule G4)."""
    with topic.engine.ledger.write_exclusive() as tables:
        row = tables.topics.get(topic.id)
        assert row.last_publish_time <= ms
        row.last_publish_time = ms
        tables.topics.put(row)
