"""Appending batches exactly once, in the tables of one ledger; see `exclusivelog.once`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.backend import Appended, Run
from exclusivelog.errors import LedgerError
from exclusivelog.local.records import Session
from exclusivelog.local.storage.tables import Tables
from exclusivelog.messages import Columns
from exclusivelog.types import AccessMode

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime

ENTRY_BYTES, ENTRY_MESSAGES = 1 << 20, 1_000_000


def append_once(
    engine: Runtime, run: Run, number: int | None, batches: Mapping[str, Iterable[Columns]]
) -> dict[str, Appended]:
    """Append a batch to topics, unless they have it already."""
    engine.release_dropped()
    try:
        # Also creates topics, which a failure rolls back.
        with engine.ledger.write_checkpointed() as tables:
            return {
                name: _append(engine, tables, _topic(tables, name), run, number, parts)
                for name, parts in batches.items()
            }
    except _SourceFailed as failed:
        raise failed.error from None


class _SourceFailed(Exception):
    """An error of the caller's iterator of messages, not of the ledger (rule H2)."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _each(parts: Iterable[Columns]) -> Iterator[Columns]:
    try:
        yield from parts
    except Exception as error:
        raise _SourceFailed(error) from error


def _topic(tables: Tables, name: str) -> int:
    row = tables.topics.find(name) or tables.topics.create(name)
    return row.id


def _append(
    engine: Runtime,
    tables: Tables,
    topic: int,
    run: Run,
    number: int | None,
    parts: Iterable[Columns],
) -> Appended:
    row, session = engine.sessions.requests.visit(tables, _session(engine, tables, topic, run))
    first = row.next_offset
    last = None if run.writer is None else tables.once.batch(topic, run.writer)
    if run.token is not None:  # also of a shared run, which no epoch fences
        begins = tables.once.fence(topic, run.token) is None
        if begins and number is not None and last is not None and number < last:
            raise _went_back(row, run, number, last)
        tables.once.put_fence(topic, run.token, session.epoch)
    if number is None or last is None or number > last:
        _write(tables, row, session, parts)
        if run.writer is not None and number is not None:
            tables.once.put_batch(topic, run.writer, number)
    tables.topics.put(row)
    return Appended(range(first, row.next_offset), session.epoch)


def _went_back(row: _core.TopicRow, run: Run, number: int, last: int) -> LedgerError:
    # A run may begin only with the last batch of the previous run, or with the next one.
    return LedgerError(
        f"topic {row.name!r}: job {run.writer!r} sends batch {number} after its batch {last}. "
        "This run uses a copied or restored checkpoint, and nothing was written; use the original "
        "checkpoint, or a new one"
    )


def _session(engine: Runtime, tables: Tables, topic: int, run: Run) -> Session:
    mode = AccessMode.parse(run.access_mode)
    token = run.token if mode.is_exclusive else None
    return Session(
        id=tables.rows.next_id(b"session"),
        topic=topic,
        engine=engine.id,
        slot=engine.slot,
        pid=engine.info.pid,
        engine_name=engine.name,
        name=run.producer,
        mode=mode.value,
        priority=0,
        created=_core.now(),
        tie=int.from_bytes(os.urandom(4)),
        since=time.time_ns() // 1_000_000,
        claimed_epoch=None if token is None else _claimed_epoch(tables, topic, token),
        engine_properties=dict(engine.info.properties),
    )


def _claimed_epoch(tables: Tables, topic: int, token: str) -> int | None:
    epoch, row = tables.once.fence(topic, token), tables.topics.get(topic)
    # No epoch of a recreated topic can be claimed, but this run was its last owner.
    return None if row.flags & _core.RECREATED and epoch == row.epoch else epoch or None


def _write(tables: Tables, row: _core.TopicRow, session: Session, parts: Iterable[Columns]) -> None:
    published = max(row.last_publish_time, time.time_ns() // 1_000_000)
    sequence, holder = tables.producers.get(row.id, session.name)
    appender = _core.Appender(session.name.encode(), sequence, ENTRY_MESSAGES, ENTRY_BYTES)
    for part in _each(parts):
        batch = part.batch(appender)
        appender.add_batch(batch)
        appender.take()
        for last, entry in batch.stamp(
            row.id, row.next_offset, session.epoch, session.id, published
        ):
            tables.entries.put(row.id, last, tables.compression.compressed(row, entry))
            row.next_offset = last + 1
        appender.settle([(batch, batch.base_offset)])
    if appender.last_sequence > sequence:
        row.last_publish_time = published
        tables.producers.put(row.id, session.name, appender.last_sequence, holder, given=False)
        tables.announce.add(row.id)
