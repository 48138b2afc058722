"""Moving one shared producer without the others (rules E1 to E4).

Among shared producers there is no owner, and so no ownership to hand over; what moves is a seat:
the place of one producer among those that may write. A row of the table `transfers` under (topic,
session) says so:

```text
releasing    the row of a shared producer's own session; its engine drains it, and releases it
assigned     the seat is a session of the destination already, which no producer has yet: it keeps
             the name, and keeps the topic shared, until the destination's next shared producer
             takes it. The destination itself gives it back at the deadline.
owned        a producer of the destination has the session; the row is gone
```

A reserved seat is an ordinary session in all else: it is evicted with its engine, and fenced by
force. So whichever process dies at whichever step, the other shared producers notice nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from exclusivelog import _core
from exclusivelog.local.ownership.changes import RETRY_AT, record
from exclusivelog.local.records import SHARED, Session, Transfer
from exclusivelog.local.storage.tables import Tables


class Transfers(Protocol):
    """Which hand-overs can still succeed."""

    def has_destination(self, transfer: Transfer) -> bool:
        """Does the engine live that it goes to?"""

    def can_succeed(self, transfer: Transfer) -> bool:
        """Does its destination live, and is there time left?"""


class Sessions(Protocol):
    """What a move of a seat needs of the sessions of its ledger."""

    @property
    def transfers(self) -> Transfers:
        """Which hand-overs can still succeed."""

    def now(self) -> int:
        """The machine's monotonic clock, in ns."""

    def tell_assigned(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, source: Session | None,
        reason: str,
    ) -> None:  # fmt: skip
        """It is reserved for its destination."""

    def drop_holder(
        self, tables: Tables, row: _core.TopicRow, session: Session, kind: str, reason: str
    ) -> None:
        """The session no longer holds the topic."""


def held(tables: Tables, topic: int, lineage: int) -> Session | None:
    """The shared session that this lineage of hand-overs has led to."""
    return next(
        (h for h in tables.sessions.holders(topic) if h.lineage == lineage and not h.exclusive),
        None,
    )


def reserved(tables: Tables, session: Session) -> bool:
    """Is this the session of a seat that no producer has taken yet?"""
    seat = tables.transfers.seat(session.topic, session.id)
    return seat is not None and not seat.session


def releasing_to(tables: Tables, topic: int, engine: str, now: int) -> Transfer | None:
    """A seat on its way to this engine that its producer has not released yet."""
    return next(
        (
            seat
            for _, seat in tables.transfers.seats(topic)
            if seat.session and seat.target == engine and now < seat.until
        ),
        None,
    )


def find(
    tables: Tables, row: _core.TopicRow, engine: str, name: str, lineage: int | None
) -> Session | None:
    """The reserved seat that a shared request of this engine takes: that of the producer which it
    follows, or that has its name, or the one that was reserved first."""
    there = [
        holder
        for session, seat in tables.transfers.seats(row.id)
        if not seat.session and seat.target == engine
        and (holder := tables.sessions.holder(row.id, session)) is not None
    ]  # fmt: skip
    if lineage is not None:
        return next((seat for seat in there if seat.lineage == lineage), None)
    named = (seat for seat in there if seat.name == name)
    return next(named, there[0] if there else None)


def take(tables: Tables, row: _core.TopicRow, seat: Session, session: Session) -> Transfer:
    """A producer takes the seat; its session has the seat's id from now on."""
    transfer = tables.transfers.seat(row.id, seat.id)
    assert transfer is not None
    tables.transfers.drop_seat(row.id, seat.id)
    tables.sessions.drop_holder(seat)
    if seat.name != session.name:
        tables.producers.free(seat)
    row.shared -= 1  # it is counted again when the session is admitted
    return transfer


def pass_on(sessions: Sessions, tables: Tables, row: _core.TopicRow, session: Session) -> None:
    """A shared session has ended: where its seat was on its way, reserve it."""
    seat = tables.transfers.seat(row.id, session.id)
    if seat is None:
        return
    tables.transfers.drop_seat(row.id, session.id)
    if not seat.session:
        return  # it was the reservation that has ended
    if not sessions.transfers.can_succeed(seat):
        record(tables, row, "cancel", "producer", source=session, target=seat)
        return
    there = Session(
        id=tables.rows.next_id(b"session"), topic=row.id, engine=seat.target, slot=seat.slot,
        pid=seat.pid, engine_name=seat.name, name=session.name, mode=SHARED,
        priority=session.priority, created=sessions.now(), tie=0,
        since=time.time_ns() // 1_000_000, epoch=row.epoch, properties=session.properties,
        engine_properties=seat.properties, lineage=seat.lineage,
    )  # fmt: skip
    sequence, _ = tables.producers.get(row.id, session.name)
    tables.sessions.put_holder(there)
    tables.producers.put(row.id, session.name, sequence, there.id)
    row.shared += 1
    tables.transfers.put_seat(there.id, replace(seat, session=0))
    tables.notifications.post(there, RETRY_AT, row.id, seat.until)
    sessions.tell_assigned(tables, row, seat, session, "producer")


def next_deadline(tables: Tables, topic: int) -> int | None:
    """When the first of the topic's reserved seats is to be given back; None if there is none."""
    return min(
        (seat.until for _, seat in tables.transfers.seats(topic) if not seat.session), default=None
    )


def end_overdue(sessions: Sessions, tables: Tables, row: _core.TopicRow) -> None:
    """End the moves of seats that cannot succeed any more."""
    for session, seat in _all(tables, row):
        if not sessions.transfers.has_destination(seat):
            _end(sessions, tables, row, session, seat, "the destination is gone")
        elif not sessions.transfers.can_succeed(seat):
            _end(sessions, tables, row, session, seat, "deadline")


def cancel(
    sessions: Sessions, tables: Tables, row: _core.TopicRow, reason: str, until: int | None = None
) -> bool:
    """End the moves of this topic's seats (only those with this deadline, unless None): a producer
    that has not released its seat keeps it. Were there any?"""
    found = [each for each in _all(tables, row) if until in (None, each[1].until)]
    for session, seat in found:
        _end(sessions, tables, row, session, seat, reason)
    return bool(found)


def _all(tables: Tables, row: _core.TopicRow) -> list[tuple[int, Transfer]]:
    return list(tables.transfers.seats(row.id)) if row.shared else []


def _end(
    sessions: Sessions, tables: Tables, row: _core.TopicRow, session: int, seat: Transfer,
    reason: str,
) -> None:  # fmt: skip
    tables.transfers.drop_seat(row.id, session)
    tables.ring.add(seat.slot)
    holder = tables.sessions.holder(row.id, session)
    record(tables, row, "cancel", reason, source=holder if seat.session else None, target=seat)
    if holder is not None and not seat.session:
        sessions.drop_holder(tables, row, holder, "release", reason)


def under_way(tables: Tables, topic: int) -> Iterator[tuple[Session, Transfer]]:
    """(session, seat) of the topic's shared producers that are on their way, or reserved."""
    for session, seat in list(tables.transfers.seats(topic)):
        holder = tables.sessions.holder(topic, session)
        if holder is not None:
            yield holder, seat
