"""Steps of a change of ownership: claims, their moves, hand-overs of topics, and those of seats.

Each step is part of the caller's transaction.

**Claims that move with a topic** (rules E1, F5, F6): the claims of the groups that a hand-over
names, on the resource with the topic's name, are revoked in the transaction that assigns the topic
to its destination: those of group readers, and those of `engine.own`. A claim session is always
lost as a whole. Its engine gets a notification that names the successor, for the holder's error.

**Seats** (rules E1 to E4): one shared producer moves without the others. Shared producers own
nothing, so no ownership moves, but a seat: the place of one producer among those that may write. A
row of the table `transfers` under (topic, session) has its state:

```text
releasing    the row of a shared producer's own session; its engine drains it, and releases it
assigned     the seat is a session of the destination already, which no producer has yet: it keeps
             the name, and keeps the topic shared, until the destination's next shared producer
             takes it. The destination itself releases it at the deadline.
owned        a producer of the destination has the session; the row is gone
```

In all else, a reserved seat is an ordinary session: it is evicted with its engine, and fenced by a
request that fences. The death of any process, at any step, leaves the other shared producers as
they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, refusals
from exclusivelog.admission import (
    NO_DESTINATION,
    ClaimVerdict,
    end_by_grant,
    end_of_move,
    judge_claim,
)
from exclusivelog.errors import ProducerMovedError
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.ownership.recording import record, record_claim
from exclusivelog.local.records import Claimant, Session, Transfer, is_role
from exclusivelog.local.storage.tables import Tables, owner_of
from exclusivelog.refusals import claim_refused, claim_revoked, handed_over
from exclusivelog.types import AccessMode, EngineInfo

if TYPE_CHECKING:
    from exclusivelog.local.ownership.sessions import Succession
    from exclusivelog.local.shm.slots import Slots

# ---- notifications ---------------------------------------------------------------------


# Kinds of notifications. Waiters: granted, fenced, terminated. Engines: retry a promotion at a
# given time. Owners: release the topic, or: another producer waits for it.
GRANTED, FENCED, RETRY_AT, RELEASE = "granted", "fenced", "later", "release"
WANTED, TERMINATED = "wanted", "sealed"
REVOKED = "revoked"  # the claim of a producer has ended
CLAIM_LOST = "claim-lost"  # the session is a claim's
CLAIM_MOVED = "claim moved"  # it names the successor
# Wake-up counters; no topic has these ids.
RESOURCES = 0  # incremented when a resource may be free
MOVES = 2**63  # incremented by every step of a hand-over


# ---- claims ----------------------------------------------------------------------------


def take_claims(
    succession: Succession,
    tables: Tables,
    claimant: Claimant,
    group: str,
    wanted: Mapping[str, int | None],
) -> Claimant:
    """Claim all resources or none, as a part of the caller's transaction. `claimant` has no id and
    no generations yet; the returned one has both."""
    generations, revoked = judge_claims(succession, tables, group, wanted)
    claimant = claimant._replace(id=tables.rows.next_id(b"claim"), generations=generations)
    _revoke(succession, tables, list(revoked.values()), claimant)
    tables.claims.put_claimant(claimant)
    for resource, generation in generations.items():
        tables.claims.put_claim(group, resource, generation, claimant.id)
    reason = "reader" if claimant.reads else "claim"
    record_claim(tables, claimant, "own", reason, target=claimant)
    return claimant


def judge_claims(
    succession: Succession, tables: Tables, group: str, wanted: Mapping[str, int | None]
) -> tuple[dict[str, int], dict[int, Claimant]]:
    """The generations that these resources would get, and the claimants that would lose them, by
    id. Raises OwnershipError where one is refused."""
    generations: dict[str, int] = {}
    revoked: dict[int, Claimant] = {}
    for resource, number in wanted.items():
        last, holder_id = tables.claims.claim(group, resource)
        holder = tables.claims.claimant(holder_id) if holder_id else None
        held = holder is not None and succession.alive(holder)
        verdict, generation = judge_claim(last, held, number)
        if verdict in (ClaimVerdict.STALE, ClaimVerdict.HELD):
            living = (engine_of(holder), holder.since) if holder is not None and held else None
            raise claim_refused(group, resource, number, last, living)
        generations[resource] = generation
        if holder is not None:
            revoked[holder.id] = holder
    return generations, revoked


def _revoke(
    succession: Succession, tables: Tables, revoked: list[Claimant], rival: Claimant
) -> None:
    for claimant in revoked:
        alive = succession.alive(claimant)
        reason = "claimed" if alive else succession.end_of(claimant)
        record_claim(tables, claimant, "revoke", reason, source=claimant, target=rival)
    if revoked:
        succession.end_claims(tables, revoked, "evict")
    for claimant in revoked:
        if succession.exists(claimant):
            error = claim_revoked(describe_claim(claimant), engine_of(rival))
            tables.notifications.post(claimant, CLAIM_LOST, str(error))


def describe_claim(claimant: Claimant) -> str:
    """A claim, for an error's text."""
    return refusals.describe_claim(claimant.group, claimant.generations)


def engine_of(claimant: Claimant) -> EngineInfo:
    """The engine that has made a claim."""
    return EngineInfo(
        claimant.engine, claimant.engine_name, claimant.pid, claimant.engine_properties, 0.0
    )


# ---- claims that move ------------------------------------------------------------------


MOST_REMEMBERED = 4096  # successors that an engine can name


def claims_that_move(tables: Tables, row: _core.TopicRow, to: Transfer) -> list[Claimant]:
    """The claims that move with this topic, without those that the destination has."""
    moved = []
    for group in to.groups:
        _, number = tables.claims.claim(group, row.name)
        holder = tables.claims.claimant(number) if number else None
        if holder is not None and holder.engine != to.target:
            moved.append(holder)
    return moved


def notify_moved(
    living: Slots, tables: Tables, row: _core.TopicRow, moved: list[Claimant], to: Transfer
) -> None:
    """Notify the engines that had these claims of the successor."""
    for holder in moved:
        if living.exists(holder.slot, holder.engine):
            tables.notifications.post(
                holder, CLAIM_MOVED, to.target, to.name, to.pid, to.properties
            )
    tables.announce.add(row.id)  # wake a reader that waits for messages: it is fenced


class Successors:
    """The successors of one engine's claims, as far as it was notified."""

    def __init__(self) -> None:
        self._known: dict[int, EngineInfo] = {}

    def note(self, claimant: int, *party: Any) -> EngineInfo:
        """Record the successor that a notification names."""
        successor = self._known[claimant] = _destination(*party)
        while len(self._known) > MOST_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        return successor

    def of(self, tables: Tables, claimant: Claimant) -> EngineInfo | None:
        """The engine that this claim was handed over to; None if it was not."""
        # Read the table first: a notification that another thread deletes meanwhile is in `_known`
        # by then.
        for _, (kind, number, *party) in tables.notifications.read(claimant.engine, 0):
            if kind == CLAIM_MOVED and number == claimant.id:
                return _destination(*party)
        return self._known.get(claimant.id)


def _destination(engine: str, name: str, pid: int, properties: dict[str, str]) -> EngineInfo:
    return EngineInfo(engine, name, pid, properties, 0.0)


# ---- hand-overs of topics --------------------------------------------------------------


class Transfers:
    """The hand-overs in progress, and whether they can still succeed."""

    def __init__(self, living: Slots, now: Callable[[], int]) -> None:
        self._living = living
        self._now = now

    def current(self, tables: Tables, row: _core.TopicRow) -> Transfer | None:
        """The topic's hand-over, if it can still succeed; else it is ended here."""
        transfer = tables.transfers.get(row.id)
        if transfer is None:
            return None
        ended = end_of_move(
            lives=self.has_destination(transfer),
            late=self._now() >= transfer.until,
            overtaken=row.owner > 0 and transfer.session != row.owner,
        )
        if not ended:
            return transfer
        self.cancel(tables, row, transfer, ended)
        return None

    def has_destination(self, transfer: Transfer) -> bool:
        """Is the destination of this hand-over alive?"""
        return self._living.alive(transfer.slot, transfer.target)

    def can_succeed(self, transfer: Transfer) -> bool:
        """Is its destination alive, and its deadline not reached?"""
        return self.has_destination(transfer) and self._now() < transfer.until

    def cancel(self, tables: Tables, row: _core.TopicRow, transfer: Transfer, reason: str) -> None:
        """End a hand-over that has failed (rule E4)."""
        tables.transfers.drop(row.id)
        if is_role(row.name):
            self.end_reservations(tables, row.id, transfer.target, reason)
        # Promote waiters for this topic, or for a role with it, also if a request for another role
        # found out that this hand-over has ended.
        role_rows.postpones(tables, row)
        tables.to_notify.add(transfer.slot)  # that engine repeats the requests that waited for it
        record(tables, row, "cancel", reason, source=owner_of(tables, row), target=transfer)

    def end(
        self,
        tables: Tables,
        row: _core.TopicRow,
        transfer: Transfer | None,
        winner: Session,
        reason: str,
    ) -> None:
        """End a hand-over because this session gets the topic, at the destination or elsewhere."""
        if transfer is None:
            return
        failed = end_by_grant(shared=not winner.exclusive, reason=reason)
        if failed:
            self.cancel(tables, row, transfer, failed)
        else:
            tables.transfers.drop(row.id)

    def prolong_reservations(self, tables: Tables, topic: int, transfer: Transfer) -> None:
        """Extend the reservations of a role's topics to the new deadline of its hand-over."""
        for other, kept in _reserved(tables, topic, transfer.target):
            tables.transfers.put(kept._replace(until=max(kept.until, transfer.until)))
            tables.to_promote.add(other.id)  # its retry was set to the old deadline

    def end_reservations(self, tables: Tables, topic: int, target: str, reason: str) -> None:
        """End the reservations of a role's topics: they are not reserved with the role any more."""
        for row, kept in _reserved(tables, topic, target):
            self.cancel(tables, row, kept, reason)
            tables.to_promote.add(row.id)

    def releasing_to(self, tables: Tables, row: _core.TopicRow, engine: str) -> Transfer | None:
        """The hand-over to this engine, of the topic or of a seat, that its source has not released
        yet. Changes nothing."""
        if row.flags & (_core.DELETED | _core.TERMINATED):
            return None
        if not row.owner:
            return seat_releasing_to(tables, row.id, engine, self._now())
        transfer = tables.transfers.get(row.id)
        if transfer is None or transfer.target != engine or self._now() >= transfer.until:
            return None
        return transfer if transfer.session and transfer.session == row.owner else None


def _reserved(tables: Tables, topic: int, target: str) -> Iterator[tuple[_core.TopicRow, Transfer]]:
    """The topics of a role's last holder that are reserved for an engine; `topic`: the role's
    own."""
    bound = role_rows.last(tables, topic)
    for number in () if bound is None else bound.topics:
        kept = tables.transfers.get(number)
        row = tables.topics.intact(number, "its reservation stays until its deadline")
        if row is not None and kept is not None and kept.target == target and not kept.session:
            yield row, kept


# ---- seats of shared producers ---------------------------------------------------------


def held_seat(tables: Tables, topic: int, lineage: int) -> Session | None:
    """The shared session at the end of this lineage of hand-overs."""
    return next(
        (h for h in tables.sessions.holders(topic) if h.lineage == lineage and not h.exclusive),
        None,
    )


def is_reserved(tables: Tables, session: Session) -> bool:
    """Is this the session of a seat that no producer has taken yet?"""
    seat = tables.transfers.seat(session.topic, session.id)
    return seat is not None and not seat.session


def seat_releasing_to(tables: Tables, topic: int, engine: str, now: int) -> Transfer | None:
    """A seat that is being handed over to this engine, and is not released yet."""
    return next(
        (
            seat
            for _, seat in tables.transfers.seats(topic)
            if seat.session and seat.target == engine and now < seat.until
        ),
        None,
    )


def find_seat(
    tables: Tables, row: _core.TopicRow, engine: str, name: str, lineage: int | None
) -> Session | None:
    """The reserved seat that a shared request of this engine takes: that of the producer which it
    follows, or that has its name, or the one that was reserved first."""
    there = [
        holder
        for session, seat in tables.transfers.seats(row.id)
        if not seat.session
        and seat.target == engine
        and (holder := tables.sessions.holder(row.id, session)) is not None
    ]
    if lineage is not None:
        return next((seat for seat in there if seat.lineage == lineage), None)
    named = (seat for seat in there if seat.name == name)
    return next(named, there[0] if there else None)


def take_seat(tables: Tables, row: _core.TopicRow, seat: Session, session: Session) -> Transfer:
    """Give a seat to a producer: its session gets the seat's id."""
    transfer = tables.transfers.seat(row.id, seat.id)
    assert transfer is not None
    tables.transfers.drop_seat(row.id, seat.id)
    tables.sessions.drop_holder(seat)
    if seat.name != session.name:
        tables.producers.free(seat)
    row.shared -= 1  # it is counted again when the session is admitted
    return transfer


def pass_seat_on(
    sessions: Succession, tables: Tables, row: _core.TopicRow, session: Session
) -> None:
    """Reserve the seat of a shared session that has ended, if the seat is being handed over."""
    seat = tables.transfers.seat(row.id, session.id)
    if seat is None:
        return
    tables.transfers.drop_seat(row.id, session.id)
    if not seat.session:
        return  # the session that has ended was the reservation itself
    if not sessions.transfers.can_succeed(seat):
        record(tables, row, "cancel", "producer", source=session, target=seat)
        return
    there = Session(
        id=tables.rows.next_id(b"session"),
        topic=row.id,
        engine=seat.target,
        slot=seat.slot,
        pid=seat.pid,
        engine_name=seat.name,
        name=session.name,
        mode=AccessMode.SHARED.value,
        priority=session.priority,
        created=sessions.now(),
        tie=0,
        since=time.time_ns() // 1_000_000,
        epoch=row.epoch,
        properties=session.properties,
        engine_properties=seat.properties,
        lineage=seat.lineage,
    )
    sequence, _ = tables.producers.get(row.id, session.name)
    tables.sessions.put_holder(there)
    tables.producers.put(row.id, session.name, sequence, there.id)
    row.shared += 1
    tables.transfers.put_seat(there.id, seat._replace(session=0))
    tables.notifications.post(there, RETRY_AT, row.id, seat.until)
    sessions.notify_assigned(tables, row, seat, session, "producer")


def next_seat_deadline(tables: Tables, topic: int) -> int | None:
    """When the first of the topic's reserved seats is to be released; None if there is none."""
    return min(
        (seat.until for _, seat in tables.transfers.seats(topic) if not seat.session), default=None
    )


def end_overdue_seats(sessions: Succession, tables: Tables, row: _core.TopicRow) -> None:
    """End the moves of seats that cannot succeed any more."""
    for session, seat in _all_seats(tables, row):
        if not sessions.transfers.has_destination(seat):
            _end_seat(sessions, tables, row, session, seat, NO_DESTINATION)
        elif not sessions.transfers.can_succeed(seat):
            _end_seat(sessions, tables, row, session, seat, "deadline")


def cancel_seats(
    sessions: Succession, tables: Tables, row: _core.TopicRow, reason: str, until: int | None = None
) -> bool:
    """End the moves of this topic's seats (only those with this deadline, unless None): a producer
    that has not released its seat keeps it. Returns whether there were any."""
    found = [each for each in _all_seats(tables, row) if until in (None, each[1].until)]
    for session, seat in found:
        _end_seat(sessions, tables, row, session, seat, reason)
    return bool(found)


def _all_seats(tables: Tables, row: _core.TopicRow) -> list[tuple[int, Transfer]]:
    return list(tables.transfers.seats(row.id)) if row.shared else []


def _end_seat(
    sessions: Succession,
    tables: Tables,
    row: _core.TopicRow,
    session: int,
    seat: Transfer,
    reason: str,
) -> None:
    tables.transfers.drop_seat(row.id, session)
    tables.to_notify.add(seat.slot)
    holder = tables.sessions.holder(row.id, session)
    record(tables, row, "cancel", reason, source=holder if seat.session else None, target=seat)
    if holder is not None and not seat.session:
        sessions.drop_holder(tables, row, holder, "release", reason)


def seats_under_way(tables: Tables, topic: int) -> Iterator[tuple[Session, Transfer]]:
    """(session, seat) of the topic's seats that are being handed over, or are reserved."""
    for session, seat in list(tables.transfers.seats(topic)):
        holder = tables.sessions.holder(topic, session)
        if holder is not None:
            yield holder, seat


def topic_moved_error(topic: str, name: str, to: Transfer) -> ProducerMovedError:
    """The error for the producer `name` of a topic that was handed over."""
    return handed_over(topic, name, EngineInfo(to.target, to.name, to.pid, to.properties, 0.0))
