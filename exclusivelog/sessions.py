"""Sessions and the queue: what `access.py` decides is carried out here, each time within one
durable transaction (rule A2).

A session is a row: in `holders` once it is admitted, in `queue` while it waits. Its row gone
means that it is fenced, released or dead, and the difference matters to nobody but people.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from exclusivelog import _core, access
from exclusivelog.access import Session, Verdict
from exclusivelog.errors import (
    ExclusiveLogError,
    InvalidEpochError,
    ProducerBusyError,
    ProducerFencedError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.ledger import Ledger
from exclusivelog.tables import Tables
from exclusivelog.types import AccessMode, EngineInfo, OwnerInfo, WaiterInfo

GRANTED, FENCED = "granted", "fenced"
EVICTED_AT_FIRST = 50
EVICTED_AT_ONCE = 1000  # sessions in one transaction: others wait for the ledger meanwhile


@dataclass(frozen=True, slots=True)
class Registration:
    """The outcome of a request: a session, admitted or queued, and where its name stands."""

    session: Session
    queued: bool
    last_sequence: int


# ---- people ------------------------------------------------------------------------------


def owner_info(session: Session) -> OwnerInfo:
    """What is told about a session that holds a topic (rule A5)."""
    return OwnerInfo(
        engine_id=session.engine, engine_name=session.engine_name, pid=session.pid,
        producer_name=session.name, access_mode=AccessMode(session.mode),
        priority=session.priority, epoch=session.epoch, since=session.since,
        session=session.id, properties=session.properties,
    )  # fmt: skip


def waiter_info(session: Session) -> WaiterInfo:
    """What is told about a session in the queue."""
    return WaiterInfo(
        engine_id=session.engine, engine_name=session.engine_name, pid=session.pid,
        producer_name=session.name, priority=session.priority, since=session.since,
        session=session.id, properties=session.properties,
    )  # fmt: skip


def describe(session: Session) -> str:
    """The holder, for an error's text."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(session.since / 1000))
    epoch = f"epoch {session.epoch}, " if session.exclusive else ""
    return (
        f"producer {session.name!r} of engine {session.engine_name!r} (id {session.engine}, "
        f"pid {session.pid}, {epoch}since {since} UTC)"
    )


def fenced(tables: Tables, row: _core.TopicRow, session: Session) -> ProducerFencedError:
    """Why a session may no longer write."""
    return _fenced_by(row, session, _owner(tables, row))


def _fenced_by(row: _core.TopicRow, session: Session, owner: Session | None) -> ProducerFencedError:
    now = f"held by {describe(owner)}" if owner is not None else f"at epoch {row.epoch}"
    return ProducerFencedError(
        f"topic {row.name!r}: producer {session.name!r} with epoch {session.epoch} was fenced; "
        f"the topic is {now}. Close it and open a new one",
        holder=None if owner is None else owner_info(owner),
    )


def _owner(tables: Tables, row: _core.TopicRow) -> Session | None:
    return tables.holder(row.id, row.owner) if row.owner else None


def _usable(tables: Tables, topic: int) -> _core.TopicRow:
    row = tables.topic(topic)
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    if row.flags & _core.TERMINATED:
        raise TopicTerminatedError(f"topic {row.name!r} is sealed at offset {row.next_offset}")
    return row


_ADMITTED = (Verdict.ADMIT, Verdict.GRANT, Verdict.TAKE_OVER, Verdict.QUEUE)


def _refusal(
    tables: Tables, row: _core.TopicRow, session: Session, verdict: Verdict, owner: Session | None
) -> ExclusiveLogError:
    if verdict is Verdict.INVALID:
        return InvalidEpochError(
            f"topic {row.name!r}: topic_epoch={session.claim} was never granted; the topic is at "
            f"epoch {row.epoch}. It takes the epoch that this producer had, or None"
        )
    holder = owner or next(iter(tables.holders(row.id)), None) or next(tables.waiters(row.id), None)
    by = f"; it is held by {describe(holder)}" if holder is not None else ""
    info = None if holder is None else owner_info(holder)
    if verdict is Verdict.STALE:
        return ProducerFencedError(
            f"topic {row.name!r} is at epoch {row.epoch}, topic_epoch={session.claim} is over{by}. "
            "Open a producer without topic_epoch",
            holder=info,
        )
    if verdict is Verdict.BUSY:
        way_out = "wait until it is free, or ask for another access mode"
        return ProducerBusyError(
            f"topic {row.name!r} takes no shared producer now{by}; {way_out}", holder=info
        )
    return ProducerFencedError(
        f"topic {row.name!r} is not free for an exclusive producer{by}; wait_for_exclusive "
        "waits for it, exclusive_with_fencing takes it",
        holder=info,
    )


def _by_urgency(tables: Tables, sessions: list[Session]) -> list[Session]:
    heap = _core.WaiterHeap()
    for index, session in enumerate(sessions):
        best = next(tables.waiters(session.topic), None) if session.epoch else None
        if best is None:
            heap.push(-(2**63), 2**64 - 1, 0, index)
        else:
            heap.push(best.priority, best.created, best.tie, index)
    return [sessions[heap.pop()] for _ in range(len(heap))]


# ---- sessions ----------------------------------------------------------------------------


class Sessions:
    """Every change of who holds or awaits a topic of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lockfile = ledger.lockfile

    def _alive(self, session: Session) -> bool:
        return self._lockfile.alive(session.slot, session.engine)

    # ---- open ----------------------------------------------------------------------------

    def request(
        self, topic: int, engine: EngineInfo, slot: int, mode: str, *, name: str | None,
        priority: int, claim: int | None, created: int, properties: dict[str, str],
    ) -> Registration:  # fmt: skip
        """Register a producer, or queue it; everything or nothing (rules A1-A6, B5, B6)."""
        with self._ledger.write_all() as tables:  # with the last sequence id of every name
            row = _usable(tables, topic)
            self._bury_the_dead(tables, row, mode)
            session = Session(
                id=tables.next_id(b"session"), topic=topic, engine=engine.id, slot=slot,
                pid=engine.pid, engine_name=engine.name, name="", mode=mode, priority=priority,
                created=created, tie=secrets.randbits(32), since=time.time_ns() // 1_000_000,
                claim=claim, properties=properties,
            )  # fmt: skip
            if name is None:
                name = tables.unused_name(topic, f"{engine.name}-{session.id}")
            session = replace(session, name=name)
            return self._decide(tables, row, session)

    def _decide(self, tables: Tables, row: _core.TopicRow, session: Session) -> Registration:
        owner = _owner(tables, row)
        decision = access.admit(
            epoch=row.epoch, owner=owner, shared=row.shared > 0, waiting=row.waiting > 0,
            request=access.Request(session.mode, session.claim),
        )  # fmt: skip
        verdict = decision.verdict
        if verdict not in _ADMITTED:
            raise _refusal(tables, row, session, verdict, owner)
        sequence, namesake = tables.producer(row.id, session.name)
        if namesake and verdict is not Verdict.TAKE_OVER:
            self._check_name(tables, row, session, namesake)
        if verdict is Verdict.QUEUE:
            tables.put_waiter(session)
            row.waiting += 1
        else:
            session = replace(session, epoch=decision.epoch)
            if verdict is Verdict.TAKE_OVER:
                self._evict_all(tables, row, session)
            self._admit(tables, row, session)
        tables.put_producer(row.id, session.name, sequence, session.id)
        tables.put_topic(row)
        return Registration(session, verdict is Verdict.QUEUE, sequence)

    def _check_name(
        self, tables: Tables, row: _core.TopicRow, session: Session, namesake: int
    ) -> None:
        holder = tables.holder(row.id, namesake)
        if holder is None:  # it waits
            holder = next((w for w in tables.waiters(row.id) if w.id == namesake), None)
        if holder is None:
            return
        if not self._alive(holder):
            self._remove(tables, row, holder)
            return
        raise ProducerBusyError(
            f"topic {row.name!r}: the producer name {session.name!r} is in use by "
            f"{describe(holder)}; choose another name, or wait until it is closed",
            holder=owner_info(holder),
        )

    def _admit(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        tables.put_holder(session)
        if session.exclusive:
            row.owner = session.id
            row.epoch = session.epoch
        else:
            row.shared += 1

    def _evict_all(self, tables: Tables, row: _core.TopicRow, rival: Session) -> None:
        for session in tables.holders(row.id):
            self._drop_holder(tables, row, session)
            self._tell_fenced(tables, row, session, rival)
        for session in list(tables.waiters(row.id)):
            self._drop_waiter(tables, row, session)
            self._tell_fenced(tables, row, session, rival)

    def _tell_fenced(
        self, tables: Tables, row: _core.TopicRow, session: Session, rival: Session | None
    ) -> None:
        # One that hangs, and is passed over for that, must learn of it when it goes on.
        if self._lockfile.exists(session.slot, session.engine):
            tables.post(session, FENCED, str(_fenced_by(row, session, rival)))

    # ---- leave ---------------------------------------------------------------------------

    def release(self, sessions: Iterable[Session], read: tuple[str, int] | None = None) -> None:
        """Give sessions back and promote who waits, all in one transaction (rules B7, C1).

        One that is no longer registered, because it was evicted, is passed over: its
        successor is not disturbed. `read` is (engine, number) of mail that can go.
        """
        with self._ledger.write() as tables:
            if read is not None:
                tables.drop_mail(*read)
            for session in sessions:
                self._leave(tables, session)

    def _leave(self, tables: Tables, session: Session) -> _core.TopicRow | None:
        row = tables.topic(session.topic)
        if tables.holds(session.topic, session.id):
            self._drop_holder(tables, row, session)
        elif tables.waiting(session):
            self._drop_waiter(tables, row, session)
        else:
            return None
        self._promote(tables, row)
        tables.put_topic(row)
        return row

    def cancel(self, session: Session) -> bool:
        """Leave the queue. False if the session is not in it (any more): it was granted or
        fenced, and the mail says which (rule D5)."""
        with self._ledger.write() as tables:
            if not tables.waiting(session):
                return False
            row = tables.topic(session.topic)
            self._drop_waiter(tables, row, session)
            tables.put_topic(row)
            return True

    def _drop_holder(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        tables.drop_holder(session)
        tables.free_name(session)
        if not session.exclusive:
            row.shared -= 1
        elif row.owner == session.id:
            row.owner = 0

    def _drop_waiter(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        if tables.drop_waiter(session):
            tables.free_name(session)
            row.waiting -= 1

    def _remove(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        if session.epoch or not session.exclusive:
            self._drop_holder(tables, row, session)
        else:
            self._drop_waiter(tables, row, session)

    # ---- promote -------------------------------------------------------------------------

    def _promote(self, tables: Tables, row: _core.TopicRow) -> None:
        """Make the best waiter the owner of a topic that nobody holds (rules A3, D4)."""
        if row.owner or row.shared or not row.waiting:
            return
        promotion = access.promote(row.epoch, tables.waiters(row.id), self._alive)
        for session in (*promotion.dead, *promotion.stale):
            self._drop_waiter(tables, row, session)
            self._tell_fenced(tables, row, session, promotion.winner)
        winner = promotion.winner
        if winner is not None:
            winner = replace(winner, since=time.time_ns() // 1_000_000)
            tables.drop_waiter(winner)
            row.waiting -= 1
            self._admit(tables, row, winner)
            sequence, _ = tables.producer(row.id, winner.name)
            tables.put_producer(row.id, winner.name, sequence, winner.id)
            tables.post(winner, GRANTED, winner.epoch, winner.since, sequence)

    # ---- the dead ------------------------------------------------------------------------

    def _bury_the_dead(self, tables: Tables, row: _core.TopicRow, mode: str) -> None:
        """Evict ghosts that could stand in a request's way, and let a living waiter have the
        topic before anyone new (rules C2, D4)."""
        for session in self._holders_in_the_way(tables, row, mode):
            if not self._alive(session):
                self._drop_holder(tables, row, session)
                self._tell_fenced(tables, row, session, None)
        self._promote(tables, row)
        if row.waiting:
            ghosts = []
            for waiter in tables.waiters(row.id):
                if self._alive(waiter):
                    break
                ghosts.append(waiter)
            for waiter in ghosts:
                self._drop_waiter(tables, row, waiter)
                self._tell_fenced(tables, row, waiter, _owner(tables, row))
        tables.put_topic(row)

    def _holders_in_the_way(
        self, tables: Tables, row: _core.TopicRow, mode: str
    ) -> Sequence[Session]:
        if row.owner:
            owner = _owner(tables, row)
            return [owner] if owner is not None else []
        # A shared producer is not in another one's way, and there may be many.
        return tables.holders(row.id) if mode != access.SHARED or row.waiting else []

    def find_dead(self) -> list[str]:
        """Engines that have sessions here and do not live."""
        with self._ledger.read() as tables:
            return [
                engine
                for engine, slot in tables.engines()
                if not self._lockfile.alive(slot, engine)
            ]

    def evict(self, engine: str) -> Iterator[None]:
        """Remove a dead engine's sessions and promote who waits for them (rule C2).

        The topics it held go first, those with the best waiters before the others. A
        transaction takes a bounded number, so that nobody waits long for the ledger, and the
        first one few, so that the first waiters need not wait for the last. Yields after each.
        """
        with self._ledger.read() as tables:
            order = _by_urgency(tables, tables.sessions_of(engine))
        size = EVICTED_AT_FIRST
        while order:
            self._evict_some(engine, order[:size])
            order = order[size:]
            size = EVICTED_AT_ONCE
            yield

    def _evict_some(self, engine: str, sessions: Sequence[Session]) -> None:
        with self._ledger.write() as tables:
            if not self._lockfile.exists(sessions[0].slot, engine):
                tables.drop_mail(engine, 2**64 - 1)
            for session in sessions:
                if (row := self._leave(tables, session)) is not None:
                    self._tell_fenced(tables, row, session, _owner(tables, row))

    def clear(self, tables: Tables, row: _core.TopicRow) -> Session | None:
        """Remove the dead from a topic; a living session that holds or awaits it, if any."""
        everyone = [*tables.holders(row.id), *tables.waiters(row.id)]
        for session in everyone:
            if self._alive(session):
                return session
        for session in everyone:
            self._remove(tables, row, session)
        return None

    # ---- look ----------------------------------------------------------------------------

    def holders(self, topic: int) -> list[OwnerInfo]:
        """Who holds the topic: its owner, or its shared producers. The living only."""
        with self._ledger.read() as tables:
            return [owner_info(s) for s in tables.holders(topic) if self._alive(s)]

    def owner(self, topic: int) -> OwnerInfo | None:
        """The topic's owner, if it has one that lives."""
        with self._ledger.read() as tables:
            owner = _owner(tables, tables.topic(topic))
            return owner_info(owner) if owner is not None and self._alive(owner) else None

    def waiters(self, topic: int) -> list[WaiterInfo]:
        """The living in the topic's queue, best first."""
        with self._ledger.read() as tables:
            return [waiter_info(s) for s in tables.waiters(topic) if self._alive(s)]
