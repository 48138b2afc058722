"""The record of changes of ownership: what a transaction has changed becomes messages of the topic
`__events__`, in the same transaction (rule E5)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.events import EVENTS, Event
from exclusivelog.local.faults import report_damaged
from exclusivelog.local.records import Claimant, Session, Transfer
from exclusivelog.local.storage.environment import MAP_RESERVED
from exclusivelog.local.storage.tables import ChangeTable, Tables

EVENT_WRITER = b"exclusivelog"
MOST_IN_ONE_ENTRY = 1 << 20
MOST_EVENTS = 250_000  # kept in `__events__`, unless that topic has a retention
# More old events than this are deleted separately, not within changes of ownership.
LEFT_TO_DELETE = 1000
NOT_RECORDED = "changes of ownership are not recorded in __events__"
NOT_TRIMMED = "old events are not deleted"


def record(
    tables: Tables,
    row: _core.TopicRow,
    kind: str,
    reason: str,
    *,
    source: Session | Claimant | None = None,
    target: Session | Transfer | None = None,
) -> None:
    """Record a change of a topic's ownership in `__events__`, within its transaction (rule E5)."""
    about = next((each for each in (target, source) if isinstance(each, Session)), None)
    tables.events.append(
        Event(
            time=time.time_ns() // 1_000_000,
            topic=row.name,
            epoch=row.epoch,
            kind=kind,
            reason=reason,
            priority=0 if about is None else about.priority,
            source=_party(source),
            target=_party(target),
        )
    )


def record_claim(
    tables: Tables,
    about: Claimant,
    kind: str,
    reason: str,
    *,
    source: Claimant | None = None,
    target: Claimant | None = None,
) -> None:
    """Record a change of each of a claim's resources in `__events__`; not for readers of
    `__events__` itself, which such a record would wake again and again."""
    now = time.time_ns() // 1_000_000
    for resource, generation in about.generations.items():
        if about.reads and resource == EVENTS:
            continue
        tables.events.append(
            Event(
                now,
                "",
                0,
                kind,
                reason,
                0,
                _party(source),
                _party(target),
                about.group,
                resource,
                generation,
            )
        )


def _party(party: Session | Claimant | Transfer | None) -> dict[str, Any] | None:
    if party is None:
        return None
    if isinstance(party, Transfer):
        engine, name, properties = party.target, party.name, party.properties
    else:
        engine, name, properties = party.engine, party.engine_name, party.engine_properties
    session = party if isinstance(party, Session) else None
    return {
        "engine": engine,
        "engine_name": name,
        "pid": party.pid,
        "producer": None if session is None else session.name,
        "properties": {} if session is None else session.properties,
        "engine_properties": properties,
    }


# ---- before the commit -------------------------------------------------------------------


def write_events(tables: Tables) -> None:
    """Append the recorded events to `__events__`, in the transaction that they describe (rule E5).
    They go into the tables, as the journal never has messages of this topic."""
    if not tables.events:
        return
    with _passed_over(tables, NOT_RECORDED):
        _append_events(tables, tables.topics.find(EVENTS) or tables.topics.create(EVENTS))
    ChangeTable(tables.rows).count(tables.events)
    tables.committed, tables.events = tables.events, []


@contextlib.contextmanager
def _passed_over(tables: Tables, consequence: str) -> Iterator[None]:
    """Let a damaged row of `__events__` stop no grant of another topic (rule G9)."""
    try:
        yield
    except LedgerCorruptedError as error:
        report_damaged(tables.rows.path, error, consequence)


def _append_events(tables: Tables, row: _core.TopicRow) -> None:
    appender = _core.Appender(
        EVENT_WRITER, row.next_offset - 1, len(tables.events), MOST_IN_ONE_ENTRY
    )
    batch = appender.make_batch(
        _core.strings([event.dumps() for event in tables.events]),
        _core.strings([event.topic.encode() or None for event in tables.events]),
        None,
        None,
    )
    appender.add_batch(batch)
    published = max(row.last_publish_time, time.time_ns() // 1_000_000)
    for last, entry in batch.stamp(row.id, row.next_offset, row.epoch, 0, published):
        tables.entries.put(row.id, last, entry)
        row.next_offset = last + 1
    row.last_publish_time = published
    with _passed_over(tables, NOT_TRIMMED):
        _trim_events(tables, row, 2 * len(tables.events))
    tables.topics.put(row)
    tables.announce.add(row.id)


def _trim_events(tables: Tables, row: _core.TopicRow, most: int) -> None:
    """Keep the newest `MOST_EVENTS` (rule E5), and delete up to `most` of the entries before them.
    It is done here, because no engine may be open long enough to do it in the background."""
    first = row.next_offset - MOST_EVENTS
    if tables.room() < -MAP_RESERVED / 4:  # the rest is for grants and fencing, not for their past
        first = max(first, min(row.first_offset + most, row.next_offset))
    if first <= row.first_offset or tables.retention.get(row.id) != (None, None):
        return
    if tables.views.view(row.id) is not None:
        # Trimming would make the view show replaced events (rule G7); `trim` renews it first.
        return
    if first - row.first_offset > LEFT_TO_DELETE:  # a ledger of an earlier version
        tables.deletions.add_before(row.id, first)
    row.first_offset = first
    tables.topics.drop_marks(row.id, first)
    tables.entries.drop(row.id, most, first)
