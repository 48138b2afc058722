"""Sessions and the queue: what `access.py` decides is carried out here, each time within one
durable transaction (rule A2).

A session is a row: in `holders` once it is admitted, in `queue` while it waits. Its row gone
means that it is fenced, released or dead, and the difference matters to nobody but people.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from exclusivelog import _core, access, moved_claims, seats
from exclusivelog.access import Session, Transfer, Verdict, changed
from exclusivelog.announcements import put_announcement
from exclusivelog.errors import (
    ExclusiveLogError,
    InvalidEpochError,
    OwnershipLostError,
    ProducerBusyError,
    ProducerFencedError,
    ProducerRevokedError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.events import Event
from exclusivelog.ledger import Ledger
from exclusivelog.role_rows import PREFIX, Definition, RoleRow, is_role
from exclusivelog.tables import Claimant, Tables
from exclusivelog.types import AccessMode, EngineInfo, OwnerInfo, RoleInfo, WaiterInfo

# Mail: a waiter's grant and loss; that it is to try again at a time; that an owner is to hand
# its topic over; that somebody waits for it; that it is sealed.
GRANTED, FENCED, LATER, RELEASE = "granted", "fenced", "later", "release"
WANTED, SEALED = "wanted", "sealed"
REVOKED = "revoked"  # a producer's claim is gone
CLAIM_LOST = "claim-lost"  # the session is a claim's
HANDED_OVER = "hand-over"  # the reason of a grant
BELL = 0  # the counter that says "a resource may be free"; no topic has this id
MOVES = 2**63  # the counter that says "a move has gone on"; no topic has this id
EVICTED_AT_FIRST = 50
EVICTED_AT_ONCE = 1000  # sessions in one transaction: others wait for the ledger meanwhile

# The rows (key, data) of a topic's queue that come into question.
Choose = Callable[[Tables, _core.TopicRow], Iterable[tuple[bytes, bytes]]]


class StillReleasing(ExclusiveLogError):
    """Internal: the source has not released the topic yet; request again once it has, or at
    `until` (ns of the monotonic clock). No caller ever sees it."""

    def __init__(self, refusal: ExclusiveLogError, until: int) -> None:
        super().__init__(str(refusal), holder=refusal.holder)
        self.until = until


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


def told(topic: str) -> str:
    """A topic, or the role whose own topic it is, for an error's text."""
    return f"role {topic.removeprefix(PREFIX)!r}" if is_role(topic) else f"topic {topic!r}"


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
    if session.bound_to and tables.claimant(session.bound_to) is None:
        return revoked(row, session)
    return _fenced_by(row, session, owner_of(tables, row))


def _fenced_by(row: _core.TopicRow, session: Session, owner: Session | None) -> ProducerFencedError:
    now = f"held by {describe(owner)}" if owner is not None else f"at epoch {row.epoch}"
    return ProducerFencedError(
        f"{told(row.name)}: producer {session.name!r} with epoch {session.epoch} was fenced; "
        f"the topic is {now}. Close it and open a new one",
        holder=None if owner is None else owner_info(owner),
    )


def revoked(row: _core.TopicRow, session: Session) -> ProducerRevokedError:
    """What a producer is told whose claim is gone."""
    return ProducerRevokedError(
        f"{told(row.name)}: producer {session.name!r} was fenced: the claim or role that it was "
        "bound to was severed or released. Make a new one with engine.own or engine.role, and open "
        "a new producer"
    )


def owner_of(tables: Tables, row: _core.TopicRow) -> Session | None:
    """The session that owns the topic, whether it lives or not."""
    return tables.holder(row.id, row.owner) if row.owner else None


def _usable(tables: Tables, topic: int) -> _core.TopicRow:
    row = tables.topic(topic)
    if row.flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {row.name!r} was deleted")
    if row.flags & _core.TERMINATED:
        raise _sealed(row)
    return row


def _sealed(row: _core.TopicRow) -> TopicTerminatedError:
    return TopicTerminatedError(f"topic {row.name!r} is sealed at offset {row.next_offset}")


_ADMITTED = (Verdict.ADMIT, Verdict.GRANT, Verdict.TAKE_OVER, Verdict.QUEUE)


def _why(session: Session, verdict: Verdict, transfer: Transfer | None) -> str:
    if verdict is Verdict.TAKE_OVER:
        return "fencing"
    if transfer is not None and transfer.target == session.engine:
        return HANDED_OVER
    return "reconnect" if session.claim == session.epoch else "request"


def _refusal(
    tables: Tables, row: _core.TopicRow, session: Session, verdict: Verdict, owner: Session | None,
    transfer: Transfer | None,
) -> ExclusiveLogError:  # fmt: skip
    if verdict is Verdict.INVALID:
        return InvalidEpochError(
            f"{told(row.name)}: topic_epoch={session.claim} was never granted; the topic is at "
            f"epoch {row.epoch}. It takes the epoch that this producer had, or None"
        )
    holder = owner or next(iter(tables.holders(row.id)), None) or next(tables.waiters(row.id), None)
    by = f"; it is held by {describe(holder)}" if holder is not None else ""
    if transfer is not None:
        by += f"; it is on its way to engine {transfer.name!r} (id {transfer.target})"
    info = None if holder is None else owner_info(holder)
    if verdict is Verdict.STALE:
        return ProducerFencedError(
            f"topic {row.name!r} is at epoch {row.epoch}, topic_epoch={session.claim} is over: a "
            f"later owner has come{by}. Open a producer without topic_epoch",
            holder=info,
        )
    if verdict is Verdict.BUSY:
        way_out = "wait until it is free, or ask for another access mode"
        return ProducerBusyError(
            f"topic {row.name!r} takes no shared producer now{by}; {way_out}", holder=info
        )
    holds = "holder" if is_role(row.name) else "producer"
    return ProducerFencedError(
        f"{told(row.name)} is not free for an exclusive {holds}{by}; wait_for_exclusive "
        "waits for it, exclusive_with_fencing takes it",
        holder=info,
    )


def _by_urgency(tables: Tables, sessions: list[Session]) -> list[Session]:
    """Those first that hold topics with good waiters; those last that nobody waits for."""

    def urgency(session: Session) -> tuple[bool, tuple[int, ...]]:
        best = next(tables.waiters(session.topic), None) if session.epoch else None
        return best is None, () if best is None else best.place

    return sorted(sessions, key=urgency)


# ---- sessions ----------------------------------------------------------------------------


class Roles(Protocol):
    """What role_grants.py does for the sessions of a ledger: all within their transactions."""

    def bury_the_dead(self, tables: Tables, definition: Definition, mode: str) -> None:
        """Evict what dead engines have on the role's topics."""

    def register(
        self, tables: Tables, row: _core.TopicRow, seat: Session, definition: Definition
    ) -> None:
        """Write the request down, and the anchor that its parts are bound to."""

    def check_free(self, tables: Tables, seat: Session, waits: bool) -> bool:
        """Is all of the role free, for a request that was not queued?"""

    def queue(self, tables: Tables, seat: Session) -> None:
        """The seat waits: so does a part on each of the role's topics, at the same place."""

    def admitted(self, tables: Tables, seat: Session) -> None:
        """The seat was granted: take all that the role binds. Raises where it is not free."""

    def dropped(self, tables: Tables, session: Session, kind: str, reason: str) -> None:
        """A session that is bound to something holds or waits no longer."""

    def claim_ended(self, tables: Tables, claimant: Claimant, kind: str) -> None:
        """The same for a claim."""

    def postpones(self, tables: Tables, row: _core.TopicRow) -> bool:
        """Is this topic's next owner chosen at the end of the transaction?"""

    def cancelled(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, reason: str
    ) -> None:
        """The hand-over of a role has ended without its destination."""

    def prolong(self, tables: Tables, row: _core.TopicRow, transfer: Transfer) -> None:
        """The hand-over of a role has got more time."""

    def binds(self, tables: Tables, session: Session) -> bool:
        """Is this session a part, but not the seat, of a role that is held or awaited?"""

    def owned_by(self, tables: Tables, owner: Session | None) -> int | None:
        """The own topic of the role that this owner of a topic is a part of; None for any other."""

    def is_anchor(self, tables: Tables, claimant: Claimant) -> bool:
        """Is this claim session none that anybody has made, but what binds a role?"""

    def parts(self, tables: Tables, seat: Session) -> tuple[RoleRow, list[Session], list[Claimant]]:
        """What a granted role consists of now: nothing, if it was lost meanwhile."""

    def rivals(self, definition: Definition) -> set[int]:
        """The own topics of the roles that have what this request wants to claim."""

    def roles(self) -> list[RoleInfo]:
        """All roles, by name."""


class Sessions:
    """Every change of who holds or awaits a topic of one ledger. `roles` is set by its engine."""

    roles: Roles

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lockfile = ledger.lockfile

    def _alive(self, session: Session) -> bool:
        return self._lockfile.alive(session.slot, session.engine)

    def _select(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer | None,
        choose: Choose | None = None,
    ) -> access.Promotion:  # fmt: skip
        """Whose turn it is on a free topic; `choose`: of those whose rows it gives."""
        rows = tables.queue(row.id) if choose is None else choose(tables, row)
        try:
            return access.promote(
                row.epoch, row.id, rows, self._lockfile.alive,
                now=_core.now(), freed=self._freed(row), transfer=transfer,
                known=tables.known(row.id),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise tables.rows.damaged("queue", error) from None

    # ---- open ----------------------------------------------------------------------------

    def request(
        self, topic: int, engine: EngineInfo, slot: int, mode: str, *, name: str | None,
        priority: int, claim: int | None, created: int, settle: int, yields: bool,
        properties: dict[str, str], follows: int | None = None, bound_to: int = 0,
        announce: dict[str, str] | None = None, role: Definition | None = None,
    ) -> Registration:  # fmt: skip
        """Register a producer, or queue it; everything or nothing (rules A1-A6, B5, B6).
        `follows` is the chain of one whose topic was handed over to this engine: refused
        unless nobody else has had it since (rule E2). `bound_to` is the claim session that it
        ends with (0: none). `role`: what is bound to the session, which is the seat of a role."""
        with self._ledger.write_all() as tables:  # with the last sequence id of every name
            if role is not None:
                self.roles.bury_the_dead(tables, role, mode)
            row = _usable(tables, topic)
            self.bury_the_dead(tables, row, mode, name)
            # Only now: a claim may move with the topic that one who was buried was to hand over.
            if not bound_to or tables.claimant(bound_to) is not None:
                if follows is not None:
                    self._check_unbroken(tables, row, engine.id, follows)
                if role is not None:
                    bound_to = tables.rows.next_id(b"claim")
                session = Session(
                    id=tables.rows.next_id(b"session"), topic=topic, engine=engine.id, slot=slot,
                    pid=engine.pid, engine_name=engine.name, name="", mode=mode, priority=priority,
                    created=created, tie=secrets.randbits(32), since=time.time_ns() // 1_000_000,
                    claim=claim, properties=properties, settle=settle, yields=yields,
                    engine_properties=dict(engine.properties), bound_to=bound_to, announce=announce,
                )  # fmt: skip
                if name is None:
                    name = tables.unused_name(topic, f"{engine.name}-{session.id}")
                session = replace(session, name=name)
                if role is not None:
                    self.roles.register(tables, row, session, role)
                return self._decide(tables, row, session, follows)
        # Outside: what was buried stays so.
        raise OwnershipLostError(
            f"topic {row.name!r}: claim= was severed, released or handed over, and no producer can "
            "be bound to it. Make a new one with engine.own"
        )

    def _decide(
        self, tables: Tables, row: _core.TopicRow, session: Session, follows: int | None
    ) -> Registration:
        owner = owner_of(tables, row)
        transfer = self.transfer(tables, row)
        seat = None
        if not session.exclusive and row.shared:
            seat = seats.find(tables, row, session.engine, session.name, follows)
        waiting = row.waiting > 0 and seat is None
        if owner is None and not row.shared:
            waiting = access.held_back(
                session, now=_core.now(), freed=self._freed(row), waiting=waiting,
                transfer=transfer, known=tables.known(row.id),
            )  # fmt: skip
        decision = access.admit(
            epoch=row.epoch, owner=owner, shared=row.shared > 0, waiting=waiting,
            request=access.Request(session.mode, session.claim),
            in_transit=transfer is not None, reborn=bool(row.flags & _core.REBORN),
        )  # fmt: skip
        verdict = decision.verdict
        if verdict not in _ADMITTED:
            refusal = _refusal(tables, row, session, verdict, owner, transfer)
            coming = None if follows is not None else self._coming(tables, row, session, verdict)
            if coming is not None:
                raise StillReleasing(refusal, coming.until)
            raise refusal
        role = is_role(row.name)
        if role and verdict is Verdict.GRANT and session.mode != access.FENCING:
            waits = session.mode == access.WAIT
            if not self.roles.check_free(tables, session, waits):
                verdict = Verdict.QUEUE
        sequence, namesake = tables.producer(row.id, session.name)
        if namesake and verdict is not Verdict.TAKE_OVER and (seat is None or namesake != seat.id):
            self._check_name(tables, row, session, namesake)
        if verdict is Verdict.QUEUE:
            tables.put_waiter(session)
            row.waiting += 1
            tables.put_producer(row.id, session.name, sequence, session.id)
            if owner is not None and owner.yields:
                tables.post(owner, WANTED)
            if owner is not None and tables.known(row.id) is not None:
                tables.learn(row.id, session.priority)
            if role:
                self.roles.queue(tables, session)
            self.promote(tables, row)  # it may be the best of those who let the topic settle
        else:
            session = replace(session, epoch=decision.epoch)
            if verdict is Verdict.TAKE_OVER:
                self.evict_all(tables, row, session)
            if seat is not None:
                session = replace(session, id=seat.id)
                transfer = seats.take(tables, row, seat, session)
                self.record(tables, row, "admit", HANDED_OVER, source=None, target=session)
            reason = _why(session, verdict, transfer)
            if seat is None:
                self._end_transfer(tables, row, transfer, session, reason)
            self._admit(tables, row, session, reason, transfer)
            tables.put_producer(row.id, session.name, sequence, session.id)
            if row.waiting and session.yields:
                tables.post(session, WANTED)  # it came past the queue (rule E3)
        tables.put_topic(row)
        return Registration(session, verdict is Verdict.QUEUE, sequence)

    def _coming(
        self, tables: Tables, row: _core.TopicRow, session: Session, verdict: Verdict
    ) -> Transfer | None:
        """The hand-over to the session's engine that its request has to wait for, if any."""
        transfer = self.releasing_to(tables, row, session.engine)
        if transfer is None:
            return None
        if not row.owner:  # it is a seat: it is taken past those who wait
            return transfer if verdict is Verdict.BUSY else None
        expected = any(
            waiter.engine == session.engine and self._alive(waiter)
            for waiter in tables.waiters(row.id)
        )
        waits = access.awaits_release(
            session, verdict=verdict, waiting=row.waiting > 0, expected=expected,
            target=transfer.target,
        )  # fmt: skip
        return transfer if waits else None

    def releasing_to(self, tables: Tables, row: _core.TopicRow, engine: str) -> Transfer | None:
        """The hand-over to this engine, of the topic or of a shared producer's seat, whose source
        has not released it yet, and still has time to. Changes nothing."""
        if row.flags & (_core.DELETED | _core.TERMINATED):
            return None
        if not row.owner:
            return seats.releasing_to(tables, row.id, engine)
        transfer = tables.transfer(row.id)
        if transfer is None or transfer.target != engine or _core.now() >= transfer.until:
            return None
        return transfer if transfer.session and transfer.session == row.owner else None

    def _check_unbroken(self, tables: Tables, row: _core.TopicRow, engine: str, chain: int) -> None:
        if seats.find(tables, row, engine, "", chain) is not None:
            return
        transfer = self.transfer(tables, row)
        if transfer is None or transfer.target != engine or transfer.chain != chain:
            raise ProducerFencedError(f"topic {row.name!r} has been somebody else's meanwhile")

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

    def _admit(
        self, tables: Tables, row: _core.TopicRow, session: Session, reason: str,
        transfer: Transfer | None = None,
    ) -> None:  # fmt: skip
        moved = reason == HANDED_OVER and transfer is not None and transfer.chain
        chain = transfer.chain if moved and transfer else session.id
        if session.announce is not None:
            put_announcement(tables, session, session.announce)
        session = changed(session, chain=chain, announce=None)
        tables.put_holder(session)
        if session.exclusive:
            row.owner = session.id
            row.epoch = session.epoch
            row.flags &= ~_core.REBORN
            if session.mode == access.WAIT:
                tables.learn(row.id, session.priority)
            self.record(tables, row, "grant", reason, target=session)
            if is_role(row.name):
                self.roles.admitted(tables, session)
        else:
            row.shared += 1

    def evict_all(self, tables: Tables, row: _core.TopicRow, rival: Session) -> None:
        """Fence all who hold or await the topic."""
        seats.cancel(self, tables, row, "another owner came first")
        for session in tables.holders(row.id):
            self.drop_holder(tables, row, session, "evict", "fenced", rival)
            self._tell_fenced(tables, row, session, rival)
        for session in list(tables.waiters(row.id)):
            self._drop_waiter(tables, row, session)
            self._tell_fenced(tables, row, session, rival)

    def _tell_fenced(
        self, tables: Tables, row: _core.TopicRow, session: Session, rival: Session | None
    ) -> None:
        # One that hangs, and is passed over for that, must learn of it when it goes on.
        if not self._lockfile.exists(session.slot, session.engine):
            return
        if self.roles.binds(tables, session):  # its role is lost: its sends are told the same
            tables.post(session, REVOKED, str(revoked(row, session)))
        else:
            tables.post(session, FENCED, str(_fenced_by(row, session, rival)))

    # ---- seal ----------------------------------------------------------------------------

    def seal(self, topic: int) -> int:
        """Admit nobody to the topic any more, and tell those who wait (rule G8); its end."""
        with self._ledger.write_all() as tables:
            row = tables.topic(topic)
            if row.flags & _core.DELETED:
                raise TopicNotFoundError(f"topic {row.name!r} was deleted")
            row.flags |= _core.TERMINATED
            for _, seat in tables.seats(row.id):
                tables.ring.add(seat.slot)
            if (transfer := tables.transfer(row.id)) is not None:
                tables.ring.add(transfer.slot)  # requests may wait for it there
            for session in list(tables.waiters(row.id)):
                self._drop_waiter(tables, row, session)
                tables.post(session, SEALED, str(_sealed(row)))
            tables.put_topic(row)
            tables.announce.add(row.id)
            return row.next_offset

    def visit(self, tables: Tables, session: Session) -> tuple[_core.TopicRow, Session]:
        """Let a session have its topic for this transaction alone: the same decisions as for one
        that stays (rules A, B5, B6), no registration. The topic's row, for the caller to write
        back, and the session with its epoch; told of in `__events__` is what others can notice,
        a new epoch."""
        row = _usable(tables, session.topic)
        self.bury_the_dead(tables, row, session.mode)
        owner = owner_of(tables, row)
        transfer = self.transfer(tables, row)
        decision = access.admit(
            epoch=row.epoch, owner=owner, shared=row.shared > 0,
            waiting=row.waiting > 0 or transfer is not None,
            request=access.Request(session.mode, session.claim),
            reborn=bool(row.flags & _core.REBORN),
        )  # fmt: skip
        verdict = decision.verdict
        if verdict not in _ADMITTED or verdict is Verdict.QUEUE:
            raise _refusal(tables, row, session, verdict, owner, transfer)
        session = replace(session, epoch=decision.epoch)
        _, namesake = tables.producer(row.id, session.name)
        if verdict is Verdict.TAKE_OVER:
            self.evict_all(tables, row, session)
            self._end_transfer(tables, row, transfer, session, "fencing")
        elif namesake:
            self._check_name(tables, row, session, namesake)
        if session.epoch > row.epoch:
            row.epoch = session.epoch
            row.flags &= ~_core.REBORN
            reason = _why(session, verdict, None)
            self.record(tables, row, "grant", reason, target=session)
        return row, session

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
                self._leave(tables, session, "release", "closed")

    def _leave(
        self, tables: Tables, session: Session, kind: str, reason: str, promote: bool = True,
        row: _core.TopicRow | None = None,
    ) -> _core.TopicRow | None:  # fmt: skip
        if row is None:
            consequence = f"producer {session.name!r} is taken away from it"
            row = tables.sound_topic(session.topic, consequence)
        if row is None:
            tables.drop_holder(session)
            tables.drop_seat(session.topic, session.id)
            tables.drop_waiter(session)
            self.roles.dropped(tables, session, kind, reason)
            return None
        if (holder := tables.holder(session.topic, session.id)) is not None:
            self.drop_holder(tables, row, holder, kind, reason)
        elif tables.waiting(session):
            self._drop_waiter(tables, row, session)
        else:
            return None
        if promote:
            self.promote(tables, row)
        tables.put_topic(row)
        return row

    def leave(self, tables: Tables, session: Session, kind: str, reason: str) -> None:
        """A session has ended; the caller sees to it that somebody is promoted."""
        self._leave(tables, session, kind, reason, promote=False)

    def end_claims(
        self, tables: Tables, claimants: Sequence[Claimant], kind: str,
        row: _core.TopicRow | None = None,
    ) -> None:  # fmt: skip
        """Claims are gone, and with them the producers that are bound to them, admitted or waiting;
        `kind` is evict or release (rules B2, F5). `row`: of a topic that the caller changes, too,
        and promotes on by himself."""
        for claimant in claimants:
            self.roles.claim_ended(tables, claimant, kind)
            tables.drop_claimant(claimant.id)
        bound = [session for claimant in claimants for session in tables.bound_to(claimant.id)]
        with tables.in_hand(row) as rows:
            for session in bound:
                own = rows.get(session.topic)
                left = self._leave(tables, session, kind, "claim", promote=False, row=own)
                if left is not None and self._lockfile.exists(session.slot, session.engine):
                    tables.post(session, REVOKED, str(revoked(left, session)))
            # Only now: none of them may be promoted in place of another one.
            self._promote_all(tables, {session.topic for session in bound} - rows.keys())
        for claimant in claimants:
            for resource in claimant.generations:
                last, holder = tables.claim(claimant.group, resource)
                if holder == claimant.id:
                    tables.put_claim(claimant.group, resource, last, 0)
        tables.announce.add(BELL)

    def cancel(self, session: Session) -> bool:
        """Leave the queue. False if the session is not in it (any more): it was granted or
        fenced, and the mail says which (rule D5)."""
        with self._ledger.write() as tables:
            if not tables.waiting(session):
                return False
            row = tables.topic(session.topic)
            self._drop_waiter(tables, row, session)
            self.promote(tables, row)  # others may have let it have its time to settle
            tables.put_topic(row)
            return True

    def drop_holder(
        self, tables: Tables, row: _core.TopicRow, session: Session, kind: str, reason: str,
        rival: Session | Transfer | None = None,
    ) -> None:  # fmt: skip
        """The session no longer holds the topic; `rival` is to have it."""
        tables.drop_holder(session)
        tables.free_name(session)
        if not session.exclusive:
            row.shared -= 1
            seats.pass_on(self, tables, row, session)
        elif row.owner == session.id:
            row.owner = 0
            self.record(tables, row, kind, reason, source=session, target=rival)
        if not row.owner and not row.shared:
            row.freed = _core.now()
        if session.bound_to:
            self.roles.dropped(tables, session, kind, reason)

    def _drop_waiter(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        if tables.drop_waiter(session):
            tables.free_name(session)
            row.waiting -= 1
            if session.bound_to:
                self.roles.dropped(tables, session, "evict", "waited")

    def _remove(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        if session.epoch or not session.exclusive:
            self.drop_holder(tables, row, session, "evict", self.end_of(session))
        else:
            self._drop_waiter(tables, row, session)
        self._tell_fenced(tables, row, session, owner_of(tables, row))  # if it only hangs

    # ---- promote -------------------------------------------------------------------------

    def promote(self, tables: Tables, row: _core.TopicRow) -> None:
        """Make the best waiter the owner of a topic that nobody holds (rules A3, D4), or tell it
        when to come back (rules D7, E3). Where roles are concerned, that is done at the end of the
        transaction."""
        if not self.roles.postpones(tables, row):
            self.promote_now(tables, row)

    def promote_now(
        self, tables: Tables, row: _core.TopicRow, choose: Choose | None = None
    ) -> None:
        """The same, at once. `choose` gives the rows of the queue that come into question."""
        if row.shared:
            seats.end_overdue(self, tables, row)
        if row.shared and row.waiting:
            self._await_seats(tables, row)
        if row.owner or row.shared:
            return
        transfer = self.transfer(tables, row)
        if transfer is not None and transfer.session:
            transfer = self.assign(tables, row, transfer)  # its holder is gone some other way
        if not row.waiting:
            return
        promotion = self._select(tables, row, transfer, choose)
        for session in (*promotion.dead, *promotion.stale):
            self._drop_waiter(tables, row, session)
            self._tell_fenced(tables, row, session, promotion.winner)
        if promotion.winner is not None:
            reason = "promotion" if transfer is None else HANDED_OVER
            self._end_transfer(tables, row, transfer, promotion.winner, reason)
            self._grant(tables, row, promotion.winner, reason, transfer)
            row.later = row.due = 0
        elif promotion.later is not None:
            self._appoint(tables, row, promotion.later, promotion.due)

    def _await_seats(self, tables: Tables, row: _core.TopicRow) -> None:
        """The destination of a seat gives it back at the deadline, unless it hangs: so the best
        waiter looks again then (rule E4)."""
        due = seats.next_deadline(tables, row.id)
        if due is not None:
            best = next((w for w in tables.waiters(row.id) if self._alive(w)), None)
            if best is not None:
                self._appoint(tables, row, best, due)

    def _appoint(self, tables: Tables, row: _core.TopicRow, waiter: Session, due: int) -> None:
        """Have a waiter look at the topic again at that time: told once, however many come behind
        it."""
        if (row.later, row.due) != (waiter.id, due):
            row.later, row.due = waiter.id, due
            self.remind(tables, row, waiter, due)

    def remind(self, tables: Tables, row: _core.TopicRow, session: Session, due: int) -> None:
        """Have the session's engine look at the topic again at that time."""
        tables.post(session, LATER, row.id, due)

    def _grant(
        self, tables: Tables, row: _core.TopicRow, waiter: Session, reason: str,
        transfer: Transfer | None,
    ) -> None:  # fmt: skip
        winner = changed(waiter, since=time.time_ns() // 1_000_000)
        tables.drop_waiter(winner)
        row.waiting -= 1
        self._admit(tables, row, winner, reason, transfer)
        sequence, namesake = tables.producer(row.id, winner.name)
        if namesake != winner.id:  # else the row is as it has to be: a page less to write
            tables.put_producer(row.id, winner.name, sequence, winner.id)
        tables.post(winner, GRANTED, winner.epoch, winner.since, sequence)
        if row.waiting and winner.yields:
            tables.post(winner, WANTED)  # behind the grant

    def promote_again(self, topics: Iterable[int]) -> None:
        """The time to come back for these topics has come (rule D7)."""
        with self._ledger.write() as tables:
            self._promote_all(tables, topics, due=True)

    def _promote_all(self, tables: Tables, topics: Iterable[int], due: bool = False) -> None:
        for topic in topics:
            row = tables.sound_topic(topic, "nobody is promoted there")
            if row is None:
                continue
            if due:
                row.later = row.due = 0  # who comes back has kept the appointment
            self.promote(tables, row)
            tables.put_topic(row)

    def _freed(self, row: _core.TopicRow) -> int:
        # A ledger that nobody had open was freed when somebody opened it.
        return max(row.freed if row.freed <= _core.now() else 0, self._lockfile.opened)

    # ---- hand-overs ----------------------------------------------------------------------

    def transfer(self, tables: Tables, row: _core.TopicRow) -> Transfer | None:
        """The topic's hand-over, if it can still succeed; else it is ended here."""
        transfer = tables.transfer(row.id)
        if transfer is None:
            return None
        if not self.has_destination(transfer):
            self.cancel_transfer(tables, row, transfer, "the destination is gone")
        elif _core.now() >= transfer.until:
            self.cancel_transfer(tables, row, transfer, "deadline")
        elif row.owner and transfer.session != row.owner:
            self.cancel_transfer(tables, row, transfer, "another owner came first")
        else:
            return transfer
        return None

    def has_destination(self, transfer: Transfer) -> bool:
        """Does the engine live that this hand-over goes to?"""
        return self._lockfile.alive(transfer.slot, transfer.target)

    def can_succeed(self, transfer: Transfer) -> bool:
        """Does its destination live, and is there time left?"""
        return self.has_destination(transfer) and _core.now() < transfer.until

    def assign(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, source: Session | None = None
    ) -> Transfer:
        """From now on the topic is reserved: nobody holds it any more (rules E1, E3)."""
        assigned = replace(transfer, session=0)
        tables.put_transfer(assigned)
        self.tell_assigned(tables, row, transfer, source, "unload")
        return assigned

    def tell_assigned(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, source: Session | None,
        reason: str,
    ) -> None:  # fmt: skip
        """What this hand-over is of is reserved for its destination: its claims move now."""
        self.record(tables, row, "assigned", reason, source=source, target=transfer)
        self.move_claims(tables, row, transfer)
        tables.announce.add(MOVES)
        tables.ring.add(transfer.slot)  # requests may wait for it there

    def move_claims(self, tables: Tables, row: _core.TopicRow, transfer: Transfer) -> None:
        """The claims of its groups follow the topic."""
        moved = moved_claims.claims_that_move(tables, row, transfer)
        if not moved:
            return
        self.end_claims(tables, moved, "evict", row)
        moved_claims.notify(self._lockfile, tables, row, moved, transfer)
        for claimant in moved:
            reason = f"group {claimant.group}"
            self.record(tables, row, "moved", reason, source=claimant, target=transfer)

    def cancel_transfer(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, reason: str
    ) -> None:
        """The hand-over ends without its destination (rule E4)."""
        tables.drop_transfer(row.id)
        if is_role(row.name):
            self.roles.cancelled(tables, row, transfer, reason)
        tables.ring.add(transfer.slot)  # what waits for it there is decided as usual
        self.record(tables, row, "cancel", reason, source=owner_of(tables, row), target=transfer)

    def whereabouts(self, topic: int, chain: int) -> tuple[str, int] | None:
        """(engine, session) of where a topic is, session 0 where it is still reserved, as long as
        this chain of hand-overs goes on: nobody else has had it in between."""
        with self._ledger.read() as tables:
            row = tables.topic(topic)
            seat = seats.held(tables, topic, chain) if row.shared else None
            if seat is not None:
                return seat.engine, 0 if seats.reserved(tables, seat) else seat.id
            owner = owner_of(tables, row)
            if owner is not None:
                return (owner.engine, owner.id) if owner.chain == chain else None
            transfer = tables.transfer(topic)
            if transfer is not None and transfer.chain == chain and _core.now() < transfer.until:
                return transfer.target, 0
            return None

    def destinations_gone(self, topics: Iterable[int]) -> set[int]:
        """Those of these topics that are on their way to an engine that is gone."""
        with self._ledger.read() as tables:
            found = [tables.transfer(topic) for topic in topics]
        return {
            transfer.topic
            for transfer in found
            if transfer is not None and not self._lockfile.alive(transfer.slot, transfer.target)
        }

    def _end_transfer(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer | None, winner: Session,
        reason: str,
    ) -> None:  # fmt: skip
        if transfer is None:
            return
        if not winner.exclusive:
            self.cancel_transfer(tables, row, transfer, "a shared producer of it came first")
        elif reason != HANDED_OVER:
            self.cancel_transfer(tables, row, transfer, "another owner came first")
        else:
            tables.drop_transfer(row.id)

    # ---- the record ----------------------------------------------------------------------

    def record(
        self, tables: Tables, row: _core.TopicRow, kind: str, reason: str, *,
        source: Session | Claimant | None = None, target: Session | Transfer | None = None,
    ) -> None:  # fmt: skip
        """Tell of a change of ownership in `__events__`, within its transaction (rule E5)."""
        about = next((each for each in (target, source) if isinstance(each, Session)), None)
        tables.events.append(
            Event(
                time=time.time_ns() // 1_000_000, topic=row.name, epoch=row.epoch, kind=kind,
                reason=reason, priority=0 if about is None else about.priority,
                source=self._party(source), target=self._party(target),
            )
        )  # fmt: skip

    def _party(self, party: Session | Claimant | Transfer | None) -> dict[str, Any] | None:
        if party is None:
            return None
        if isinstance(party, Claimant):
            return {
                "engine": party.engine, "engine_name": party.engine_name, "pid": party.pid,
                "producer": None, "properties": {}, "engine_properties": {},
            }  # fmt: skip
        if isinstance(party, Transfer):
            return {
                "engine": party.target, "engine_name": party.name, "pid": party.pid,
                "producer": None, "properties": {}, "engine_properties": party.properties,
            }  # fmt: skip
        return {
            "engine": party.engine, "engine_name": party.engine_name, "pid": party.pid,
            "producer": party.name, "properties": party.properties,
            "engine_properties": party.engine_properties,
        }  # fmt: skip

    # ---- the dead ------------------------------------------------------------------------

    def end_of(self, session: Session | Claimant) -> str:
        """How a session's engine ended that does not live: an event's reason."""
        return "hung" if self._lockfile.exists(session.slot, session.engine) else "dead"

    def bury_the_dead(
        self, tables: Tables, row: _core.TopicRow, mode: str, name: str | None = None
    ) -> None:
        """Evict ghosts that could stand in a request's way, and let a living waiter have the
        topic before anyone new (rules C2, D4)."""
        for session in self._holders_in_the_way(tables, row, mode, name):
            # One may have ended with a claim that moved when another one was dropped.
            if not self._alive(session) and tables.holds(row.id, session.id):
                self.drop_holder(tables, row, session, "evict", self.end_of(session))
                self._tell_fenced(tables, row, session, None)
        self.promote(tables, row)
        if row.waiting:
            ghosts = []
            for waiter in tables.waiters(row.id):
                if self._alive(waiter):
                    break
                ghosts.append(waiter)
            for waiter in ghosts:
                self._drop_waiter(tables, row, waiter)
                self._tell_fenced(tables, row, waiter, owner_of(tables, row))
        tables.put_topic(row)

    def _holders_in_the_way(
        self, tables: Tables, row: _core.TopicRow, mode: str, name: str | None
    ) -> Sequence[Session]:
        if row.owner:
            owner = owner_of(tables, row)
            return [owner] if owner is not None else []
        if mode != access.SHARED or row.waiting:
            return tables.holders(row.id)
        # A shared producer is not in another one's way, and there may be many; but for its
        # namesake, whose seat may have been on its way (rule A6).
        number = 0 if name is None else tables.producer(row.id, name)[1]
        namesake = tables.holder(row.id, number) if number else None
        return [] if namesake is None else [namesake]

    def find_dead(self, needed: Callable[[], Set[int]] | None = None) -> list[str]:
        """Engines that have sessions here and do not live. `needed`: of those that only hang the
        ones that have one of these topics; the others keep what nobody needs (rule C3). It is
        called only where one hangs: a hundred thousand may wait for them."""

        def is_in_the_way(tables: Tables, slot: int, engine: str) -> bool:
            gone = not self._lockfile.exists(slot, engine)
            return gone or needed is None or not needed().isdisjoint(tables.topics_of(engine))

        with self._ledger.read() as tables:
            return [
                engine
                for engine, slot in tables.engines()
                if not self._lockfile.alive(slot, engine) and is_in_the_way(tables, slot, engine)
            ]

    def drop_mail_of_the_gone(self) -> None:
        """Nobody will ever read it: no engine comes back."""
        with self._ledger.read() as tables:
            boxes = list(tables.mailboxes())
        gone = set(boxes) - {engine.id for engine in self._lockfile.present()}
        if gone:
            with self._ledger.write_beside() as tables:
                for engine in gone:
                    tables.drop_mail(engine, 2**64 - 1)

    def evict(self, engine: str) -> Iterator[None]:
        """Remove a dead engine's sessions and promote who waits for them (rule C2).

        The topics it held go first, those with the best waiters before the others. A
        transaction takes a bounded number, so that nobody waits long for the ledger, and the
        first one few, so that the first waiters need not wait for the last. Yields after each.
        """
        with self._ledger.read() as tables:
            order = _by_urgency(tables, tables.sessions_of(engine))
        size = EVICTED_AT_FIRST
        while order and self._evict_some(engine, order[:size]):
            order = order[size:]
            size = EVICTED_AT_ONCE
            yield

    def _evict_some(self, engine: str, sessions: Sequence[Session]) -> bool:
        with self._ledger.write() as tables:
            if self._lockfile.alive(sessions[0].slot, engine):
                return False  # it only hung, and has gone on since somebody looked (rule C3)
            if not self._lockfile.exists(sessions[0].slot, engine):
                tables.drop_mail(engine, 2**64 - 1)
            for session in sessions:
                row = self._leave(tables, session, "evict", self.end_of(session))
                if row is not None:
                    self._tell_fenced(tables, row, session, owner_of(tables, row))
            return True

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

    def still_coming(self, topic: int, engine: str) -> Transfer | None:
        """What `releasing_to` finds, in a transaction of its own."""
        with self._ledger.read() as tables:
            row = tables.sound_topic(topic, "who waits for it is told")
            return None if row is None else self.releasing_to(tables, row, engine)

    def holders(self, topic: int) -> list[OwnerInfo]:
        """Who holds the topic: its owner, or its shared producers. The living only, and no seat
        that is reserved for one who has not come yet."""
        with self._ledger.read() as tables:
            there = [s for s in tables.holders(topic) if self._alive(s)]
            return [owner_info(s) for s in there if not seats.reserved(tables, s)]

    def owner(self, topic: int) -> OwnerInfo | None:
        """The topic's owner, if it has one that lives."""
        with self._ledger.read() as tables:
            owner = owner_of(tables, tables.topic(topic))
            return owner_info(owner) if owner is not None and self._alive(owner) else None

    def waiters(self, topic: int) -> list[WaiterInfo]:
        """The living in the topic's queue, best first."""
        with self._ledger.read() as tables:
            return [waiter_info(s) for s in tables.waiters(topic) if self._alive(s)]
