"""Restoring: writes messages of another log into an empty ledger, unchanged.

Offsets, epochs, sessions, sequence ids, times and producer names stay as given. The ledger must be
new, and in use by no other process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgpack

from exclusivelog import _core
from exclusivelog.events import RESTORED
from exclusivelog.local.ownership.recording import record, write_events
from exclusivelog.local.records import U64, u64
from exclusivelog.local.storage.checkpointer import PACKED_ENTRY
from exclusivelog.local.storage.environment import HEADER
from exclusivelog.local.storage.tables import Tables
from exclusivelog.messages import encode_properties

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

WRITTEN_AT_ONCE = 8 << 20  # bytes of one transaction
ENTRY_MESSAGES, ENTRY_BYTES = 100_000, 1 << 20
SESSION = b"session"  # the counter of sessions


class Content(Protocol):
    """A message without offset and session; times are ms since 1970, and value None is a
    tombstone."""

    @property
    def value(self) -> bytes | None:
        """The value; The value; None: a tombstone."""
        ...

    @property
    def key(self) -> bytes | None:
        """The key, or None."""
        ...

    @property
    def properties(self) -> dict[str, str]:
        """The properties."""
        ...

    @property
    def event_time(self) -> int | None:
        """The event time, in ms since 1970, or None."""
        ...

    @property
    def publish_time(self) -> int:
        """The publish time, in ms since 1970."""
        ...

    @property
    def producer_name(self) -> str:
        """The name of the producer that sent it."""
        ...

    @property
    def sequence_id(self) -> int:
        """The producer's sequence id."""
        ...


class Part(Protocol):
    """Consecutive messages of one session, from the offset `first` on."""

    @property
    def epoch(self) -> int:
        """Of the owner."""
        ...

    @property
    def session(self) -> int:
        """Of the owner."""
        ...

    @property
    def first(self) -> int:
        """The offset of the first message."""
        ...

    @property
    def contents(self) -> Sequence[Content]:
        """The messages."""
        ...


def restore_id(ledger: Ledger, uuid: str) -> None:
    """Give the ledger the id of the ledger that it replaces. It takes effect at the next open."""
    with ledger.write_checkpointed() as tables:
        header = msgpack.unpackb(tables.rows.get("meta", HEADER))
        tables.rows.put("meta", HEADER, msgpack.packb({**header, "uuid": uuid}))


def restore_topic(ledger: Ledger, name: str, parts: Iterable[Part]) -> int:
    """Create a topic with these messages, in the order of their offsets. Returns how many."""
    with ledger.write_checkpointed() as tables:
        topic = tables.topics.create(name).id
    count = 0
    for index, chunk in enumerate(_chunks(parts)):
        with ledger.write_checkpointed() as tables:
            _write(tables, topic, chunk, first=index == 0)
        count += sum(len(part.contents) for part in chunk)
    if count:
        _record(ledger, topic)
    return count


def _record(ledger: Ledger, topic: int) -> None:
    """Record that the changes of the topic's owner up to here are those of another ledger."""
    with ledger.write_checkpointed() as tables:
        record(tables, tables.topics.get(topic), RESTORED, "copies")
        write_events(tables)


def _chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    chunk: list[Part] = []
    size = 0
    for part in parts:
        chunk.append(part)
        size += sum(len(each.value or b"") + len(each.key or b"") + 64 for each in part.contents)
        if size >= WRITTEN_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _write(tables: Tables, topic: int, parts: Sequence[Part], first: bool) -> None:
    row = tables.topics.get(topic)
    if first:
        row.first_offset = parts[0].first
    sequences: dict[str, int] = {}
    entries: list[bytes] = []
    for part in parts:
        entries += _entries(topic, part)
        sequences.update((each.producer_name, each.sequence_id) for each in part.contents)
    for last, entry in _core.pack_kept(entries, PACKED_ENTRY):
        tables.entries.put(topic, last, entry)
    for name, sequence in sequences.items():
        tables.producers.put(topic, name, sequence, 0)
    newest = parts[-1]
    row.next_offset = newest.first + len(newest.contents)
    row.epoch = max(row.epoch, newest.epoch)
    row.last_publish_time = newest.contents[-1].publish_time
    tables.topics.put(row)
    _pass_sessions(tables, max(part.session for part in parts))


def _pass_sessions(tables: Tables, session: int) -> None:
    """Advance the counter of sessions, so that no new session gets the id of a restored one."""
    last = tables.rows.find("meta", SESSION, u64) or 0
    if session > last:
        tables.rows.put("meta", SESSION, U64.pack(session))


# ---- entries -----------------------------------------------------------------------------


def _entries(topic: int, part: Part) -> Iterator[bytes]:
    offset = part.first
    for run in _runs(part.contents):
        for last, data in _batch(run).stamp(
            topic, offset, part.epoch, part.session, run[0].publish_time
        ):
            yield data
            offset = last + 1


def _runs(contents: Sequence[Content]) -> Iterator[Sequence[Content]]:
    """Split messages into runs with one producer and publish time, and consecutive sequence ids."""
    start = 0
    for index, (one, after) in enumerate(itertools.pairwise(contents), 1):
        if (
            after.sequence_id != one.sequence_id + 1
            or after.publish_time != one.publish_time
            or after.producer_name != one.producer_name
        ):
            yield contents[start:index]
            start = index
    yield contents[start:]


def _batch(run: Sequence[Content]) -> _core.Batch:
    first = run[0]
    appender = _core.Appender(
        first.producer_name.encode(), first.sequence_id - 1, ENTRY_MESSAGES, ENTRY_BYTES
    )
    batch = appender.make_batch(
        _core.strings([each.value for each in run]),
        _column(run, lambda each: each.key),
        _column(run, lambda each: encode_properties(each.properties) if each.properties else None),
        [each.event_time for each in run] if _any(run, lambda each: each.event_time) else None,
    )
    appender.add_batch(batch, first.sequence_id)
    appender.take()
    return batch


def _column(
    run: Sequence[Content], field: Callable[[Content], bytes | None]
) -> _core.Strings | None:
    items = [field(each) for each in run]
    return _core.strings(items) if any(item is not None for item in items) else None


def _any(run: Sequence[Content], field: Callable[[Content], object]) -> bool:
    return any(field(each) is not None for each in run)
