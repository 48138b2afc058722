"""Holders and waiters of topics: steps (`Succession`), requests, and transactions (`Sessions`).

`Succession` has the steps by which a topic changes its holder. The caller has the transaction.

A session is a row: in `holders` once it is admitted, in `queue` while it waits. A missing row
means fenced, released or dead; all are treated alike. Decisions depend on the rows, the live
engines and the clock alone, so that the model checker (`proof.model`) runs this very code over
tables in memory.

`Requests` decides about a request within a transaction, with `exclusivelog.admission`. Each call of
`Sessions` is one transaction (rule A2).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, TypeVar

from exclusivelog import _core, admission, refusals
from exclusivelog.admission import ADMITTED, HANDED_OVER, OVERTAKEN, Verdict
from exclusivelog.backend import ProducerRequest, RoleDefinition
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerFullError,
    OwnershipLostError,
    ProducerBusyError,
    ProducerFencedError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.local import faults
from exclusivelog.local.ownership import promoting, role_rows, steps
from exclusivelog.local.ownership.pending import CHUNK_SECONDS
from exclusivelog.local.ownership.recording import record, write_events
from exclusivelog.local.ownership.role_grants import RoleGrants
from exclusivelog.local.ownership.steps import (
    FENCED,
    GRANTED,
    MOVES,
    RESOURCES,
    RETRY_AT,
    REVOKED,
    TERMINATED,
    WANTED,
    Transfers,
)
from exclusivelog.local.records import (
    Claimant,
    Registration,
    Session,
    StillReleasing,
    Transfer,
    fenced_by,
    is_role,
    owner_info,
    revoked,
    waiter_info,
)
from exclusivelog.local.storage.tables import NOT_EVICTED, Tables, check_usable, owner_of
from exclusivelog.refusals import moving_to
from exclusivelog.types import EXCLUSIVE_MODES, EngineInfo, OwnerInfo, WaiterInfo

if TYPE_CHECKING:
    from exclusivelog.local.shm.slots import Slots
    from exclusivelog.local.storage.ledger import Ledger

# ---- succession ------------------------------------------------------------------------


Made = TypeVar("Made")
# The rows (key, data) of a topic's queue that are candidates.
Choose = Callable[[Tables, _core.TopicRow], Iterable[tuple[bytes, bytes]]]


class Succession:
    """Grants, promotions, evictions and releases of one ledger's topics, each a step of a
    transaction. `now` is the machine's monotonic clock, in ns."""

    def __init__(self, living: Slots, now: Callable[[], int] = _core.now) -> None:
        self.now = now
        self.transfers = Transfers(living, now)
        self._living = living

    def alive(self, party: Session | Claimant) -> bool:
        """Does its engine exist, and respond?"""
        return self._living.alive(party.slot, party.engine)

    def exists(self, party: Session | Claimant) -> bool:
        """Does its engine exist, responsive or not?"""
        return self._living.exists(party.slot, party.engine)

    def end_of(self, party: Session | Claimant) -> str:
        """How the party's engine ended, as the reason of an event: dead or unresponsive."""
        return "hung" if self.exists(party) else "dead"

    # ---- grant ---------------------------------------------------------------------------

    def admit(
        self,
        tables: Tables,
        row: _core.TopicRow,
        session: Session,
        reason: str,
        transfer: Transfer | None = None,
    ) -> None:
        """Make the session a holder of the topic; `transfer`: the hand-over by which it gets it."""
        moved = reason == HANDED_OVER and transfer is not None and transfer.lineage
        lineage = transfer.lineage if moved and transfer else session.id
        if session.announce is not None:
            tables.close_to_appends(session.topic)
            tables.announcements.put(session, session.announce)
        session = session._replace(lineage=lineage, announce=None)
        tables.sessions.put_holder(session)
        if session.exclusive:
            row.owner = session.id
            row.epoch = session.epoch
            row.flags &= ~_core.RECREATED
            if session.waits:
                tables.sessions.learn(row.id, session.priority)
            record(tables, row, "grant", reason, target=session)
        else:
            row.shared += 1

    def _grant(
        self,
        tables: Tables,
        row: _core.TopicRow,
        waiter: Session,
        reason: str,
        transfer: Transfer | None,
        dead: int,
    ) -> None:
        """Grant the topic to a waiter; `dead`: how many dead ones stay in the queue."""
        winner = waiter._replace(since=time.time_ns() // 1_000_000)
        tables.sessions.drop_waiter(winner)
        row.waiting -= 1
        self.admit(tables, row, winner, reason, transfer)
        sequence, namesake = tables.producers.get(row.id, winner.name)
        if namesake != winner.id:  # others have used its name while it waited (rule D9)
            tables.include_journal()
            sequence = tables.last_sequence(row.id, winner.name)
            tables.producers.put(row.id, winner.name, sequence, winner.id)
        tables.notifications.post(
            winner, GRANTED, winner.epoch, winner.since, sequence, reason, self.now()
        )
        if row.waiting > dead and winner.notify_on_contention:
            tables.notifications.post(winner, WANTED)  # after the grant

    # ---- leave ---------------------------------------------------------------------------

    def leave(
        self,
        tables: Tables,
        session: Session,
        kind: str,
        reason: str,
        promote: bool = True,
        row: _core.TopicRow | None = None,
    ) -> _core.TopicRow | None:
        """Remove a session that has ended; nothing if it is not registered any more (rule B7).
        `promote`: also promote a waiter, else the caller does. `row`: the topic's, if the caller
        changes it, too."""
        if row is None:
            consequence = f"producer {session.name!r} is removed from the topic all the same"
            row = tables.topics.intact(session.topic, consequence)
        if row is None:
            tables.sessions.drop_holder(session)
            tables.transfers.drop_seat(session.topic, session.id)
            tables.sessions.drop_waiter(session)
            role_rows.end_role_of(tables, session, kind, reason)
            return None
        if (holder := tables.sessions.holder(session.topic, session.id)) is not None:
            self.drop_holder(tables, row, holder, kind, reason)
        elif tables.sessions.waiting(session):
            self.drop_waiter(tables, row, session)
        else:
            return None
        if promote:
            self.promote(tables, row)
        tables.topics.put(row)
        return row

    def drop_holder(
        self,
        tables: Tables,
        row: _core.TopicRow,
        session: Session,
        kind: str,
        reason: str,
        rival: Session | Transfer | None = None,
    ) -> None:
        """Remove a holder of the topic; `rival` is to have it."""
        self._unregister(tables, row, session, kind, reason, rival)
        if session.bound_to:
            role_rows.end_role_of(tables, session, kind, reason)

    def _unregister(
        self,
        tables: Tables,
        row: _core.TopicRow,
        session: Session,
        kind: str,
        reason: str,
        rival: Session | Transfer | None = None,
    ) -> None:
        """The same, but a role that the session belongs to goes on."""
        tables.close_to_appends(row.id)  # what it has sent decides whether its name is kept
        tables.sessions.drop_holder(session)
        tables.producers.free(session)
        if not session.exclusive:
            row.shared -= 1
            steps.pass_seat_on(self, tables, row, session)
        elif row.owner == session.id:
            row.owner = 0
            record(tables, row, kind, reason, source=session, target=rival)
        if not row.owner and not row.shared:
            row.freed = self.now()

    def drop_waiter(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        """Remove a waiter from the queue."""
        if tables.sessions.drop_waiter(session):
            tables.producers.free(session)
            row.waiting -= 1
            if session.bound_to:
                role_rows.end_role_of(tables, session, "evict", "waited")

    def remove_dead(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        """Remove a session whose engine is dead, or unresponsive for too long."""
        if session.epoch or not session.exclusive:
            self.drop_holder(tables, row, session, "evict", self.end_of(session))
        else:
            self.drop_waiter(tables, row, session)
        self.notify_fenced(tables, row, session, owner_of(tables, row))

    def notify_fenced(
        self, tables: Tables, row: _core.TopicRow, session: Session, rival: Session | None
    ) -> None:
        """Notify a session that was evicted, unless its process is gone; one that is unresponsive
        reads it when it resumes."""
        if not self.exists(session):
            return
        if role_rows.binds(tables, session):  # its role is lost, and its sends raise the same error
            tables.notifications.post(session, REVOKED, str(revoked(row, session)))
        else:
            tables.notifications.post(session, FENCED, str(fenced_by(row, session, rival)))

    def notify_stale(
        self, tables: Tables, row: _core.TopicRow, session: Session, transfer: Transfer | None
    ) -> None:
        """Notify a waiter whose `topic_epoch` is out of date at its promotion (rule B5)."""
        if role_rows.binds(tables, session):
            self.notify_fenced(tables, row, session, None)
        else:
            error = _refusal(tables, row, session, Verdict.STALE, None, transfer)
            tables.notifications.post(session, FENCED, str(error))

    def evict_all(self, tables: Tables, row: _core.TopicRow, rival: Session) -> None:
        """Fence all sessions that hold or await the topic."""
        steps.cancel_seats(self, tables, row, OVERTAKEN)
        for session in tables.sessions.holders(row.id):
            self.drop_holder(tables, row, session, "evict", "fenced", rival)
            self.notify_fenced(tables, row, session, rival)
        for session in list(tables.sessions.waiters(row.id)):
            self.drop_waiter(tables, row, session)
            self.notify_fenced(tables, row, session, rival)

    def end_all(
        self, tables: Tables, row: _core.TopicRow, error: TopicTerminatedError, reason: str
    ) -> None:
        """End all sessions and requests of a topic that nobody may write any more, and notify them.
        A role with this topic goes on with its others."""
        steps.cancel_seats(self, tables, row, reason)
        if (transfer := tables.transfers.get(row.id)) is not None:
            tables.to_notify.add(transfer.slot)  # requests may wait for it there
        ended = [*tables.sessions.holders(row.id), *tables.sessions.waiters(row.id)]
        for session in ended:
            if session.epoch or not session.exclusive:
                self._unregister(tables, row, session, "release", reason)
            else:
                self.drop_waiter(tables, row, session)
            if self.exists(session):
                tables.notifications.post(session, TERMINATED, str(error))
        self.promote(tables, row)  # a hand-over that waited for the owner has its release

    def evict_dead(
        self, tables: Tables, row: _core.TopicRow, mode: str, name: str | None = None
    ) -> None:
        """Evict sessions of dead engines that conflict with a request, and promote a living waiter
        before any new request (rules C2, D4)."""
        for session in _blocking_holders(tables, row, mode, name):
            # Dropping one may have moved a claim, and so have ended another one.
            if not self.alive(session) and tables.sessions.holds(row.id, session.id):
                self.drop_holder(tables, row, session, "evict", self.end_of(session))
                self.notify_fenced(tables, row, session, None)
        self.promote(tables, row)
        if row.waiting:
            self._drop_dead_waiters(tables, row)
        tables.topics.put(row)

    def _drop_dead_waiters(self, tables: Tables, row: _core.TopicRow) -> None:
        """Remove dead waiters in front of the first living one: all, if no owner refuses a request
        anyway; else a few, since others wait for the end of the transaction."""
        first = itertools.islice(
            tables.sessions.waiters(row.id), promoting.DROPPED_AT_ONCE if row.owner else None
        )
        for waiter in list(itertools.takewhile(lambda each: not self.alive(each), first)):
            self.drop_waiter(tables, row, waiter)
            self.notify_fenced(tables, row, waiter, owner_of(tables, row))

    def clear(self, tables: Tables, row: _core.TopicRow) -> Session | None:
        """Return a live session that holds or awaits the topic; if there is none, remove all dead
        ones."""
        everyone = [*tables.sessions.holders(row.id), *tables.sessions.waiters(row.id)]
        for session in everyone:
            if self.alive(session):
                return session
        for session in everyone:
            self.remove_dead(tables, row, session)
        return None

    def end_claims(
        self,
        tables: Tables,
        claimants: Sequence[Claimant],
        kind: str,
        row: _core.TopicRow | None = None,
    ) -> None:
        """End claims, and the sessions that are bound to them, admitted or waiting; `kind` is evict
        or release (rules B2, F5). `row`: of a topic that the caller changes and promotes itself."""
        for claimant in claimants:
            role_rows.end_role_with(tables, claimant, kind)
            tables.claims.drop_claimant(claimant.id)
        bound = [
            session for claimant in claimants for session in tables.sessions.bound_to(claimant.id)
        ]
        with tables.topics.being_changed(row) as rows:
            for session in bound:
                own = rows.get(session.topic)
                left = self.leave(tables, session, kind, "claim", promote=False, row=own)
                if left is not None and self.exists(session):
                    tables.notifications.post(session, REVOKED, str(revoked(left, session)))
            # Promote after all have left: none of them may be promoted in place of another one.
            self.promote_all(tables, {session.topic for session in bound} - rows.keys())
        for claimant in claimants:
            for resource in claimant.generations:
                last, holder = tables.claims.claim(claimant.group, resource)
                if holder == claimant.id:
                    tables.claims.put_claim(claimant.group, resource, last, 0)
        tables.announce.add(RESOURCES)

    # ---- promote -------------------------------------------------------------------------

    def promote(self, tables: Tables, row: _core.TopicRow) -> None:
        """Make the best waiter the owner of a topic without a holder (rules A3, D4), or notify it
        when to retry (rules D7, E3). If a role waits for the topic, that is done at the end of the
        transaction."""
        if not role_rows.postpones(tables, row):
            self.promote_now(tables, row)

    def promote_now(
        self, tables: Tables, row: _core.TopicRow, choose: Choose | None = None
    ) -> Session | None:
        """The same, at once; returns the new owner, if there is one. `choose` gives the rows of the
        queue that are candidates."""
        if row.shared:
            steps.end_overdue_seats(self, tables, row)
        if row.shared and row.waiting:
            self._await_seats(tables, row)
        if row.owner or row.shared:
            return None
        transfer = self.transfers.current(tables, row)
        if transfer is not None and transfer.session:
            # Its holder has left, but not by the hand-over's release.
            transfer = self.assign(tables, row, transfer)
        if not row.waiting:
            return None
        promotion = self._select(tables, row, transfer, choose)
        for session in promotion.dead:
            self.drop_waiter(tables, row, session)
            self.notify_fenced(tables, row, session, promotion.winner)
        for session in promotion.stale:
            self.drop_waiter(tables, row, session)
            self.notify_stale(tables, row, session, transfer)
        if promotion.winner is not None:
            reason = _why(promotion.winner, transfer, waited=True)
            self.transfers.end(tables, row, transfer, promotion.winner, reason)
            self._grant(tables, row, promotion.winner, reason, transfer, promotion.left)
            row.retry_waiter = row.retry_at = 0
        elif promotion.retry_waiter is not None:
            self._retry_at(tables, row, promotion.retry_waiter, promotion.retry_at)
        if promotion.winner is None and promotion.dead:
            # A role may have waited for one that was alive a moment ago.
            role_rows.postpones(tables, row)
        return promotion.winner

    def promote_all(self, tables: Tables, topics: Iterable[int], due: bool = False) -> None:
        """Promote waiters of these topics. `due`: this is a retry whose time has come."""
        for topic in topics:
            row = tables.topics.intact(topic, NOT_PROMOTED)
            if row is None:
                continue
            if due:
                row.retry_waiter = row.retry_at = 0  # this is the retry
            self.promote(tables, row)
            tables.topics.put(row)

    def _select(
        self,
        tables: Tables,
        row: _core.TopicRow,
        transfer: Transfer | None,
        choose: Choose | None = None,
    ) -> promoting.Promotion:
        rows = tables.sessions.queue(row.id) if choose is None else choose(tables, row)
        try:
            return promoting.promote(
                row.epoch,
                row.id,
                rows,
                self._living.alive,
                now=self.now(),
                freed=self.freed(row),
                transfer=transfer,
                known=tables.sessions.known(row.id),
            )
        except (ValueError, TypeError) as error:
            raise tables.rows.damaged("queue", error) from None

    def is_awaited(self, tables: Tables, row: _core.TopicRow) -> bool:
        """Does a living waiter await the topic?"""
        queue = tables.sessions.queue(row.id)
        try:
            return promoting.has_living(row.id, row.epoch, queue, self._living.alive)
        except (ValueError, TypeError) as error:
            raise tables.rows.damaged("queue", error) from None

    def _await_seats(self, tables: Tables, row: _core.TopicRow) -> None:
        """Have the best waiter retry at the deadline of the first reserved seat: the destination,
        which should release it then, may be unresponsive (rule E4)."""
        due = steps.next_seat_deadline(tables, row.id)
        if due is not None:
            best = next((w for w in tables.sessions.waiters(row.id) if self.alive(w)), None)
            if best is not None:
                self._retry_at(tables, row, best, due)

    def _retry_at(self, tables: Tables, row: _core.TopicRow, waiter: Session, due: int) -> None:
        """Have a waiter's engine retry the promotion at the time `due`. It is notified once,
        however many wait behind it."""
        if (row.retry_waiter, row.retry_at) != (waiter.id, due):
            row.retry_waiter, row.retry_at = waiter.id, due
            tables.notifications.post(waiter, RETRY_AT, row.id, due)

    def freed(self, row: _core.TopicRow) -> int:
        """The time since which a free topic is free: the opening of its ledger at the earliest."""
        return max(row.freed if row.freed <= self.now() else 0, self._living.opened)

    # ---- hand over -----------------------------------------------------------------------

    def assign(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, source: Session | None = None
    ) -> Transfer:
        """Reserve the topic, which has no holder any more, for the destination (rules E1, E3)."""
        assigned = transfer._replace(session=0)
        tables.transfers.put(assigned)
        self.notify_assigned(tables, row, transfer, source, "unload")
        return assigned

    def notify_assigned(
        self,
        tables: Tables,
        row: _core.TopicRow,
        transfer: Transfer,
        source: Session | None,
        reason: str,
    ) -> None:
        """Record that the topic or seat is reserved, move the claims, and notify the
        destination."""
        record(tables, row, "assigned", reason, source=source, target=transfer)
        self.move_claims(tables, row, transfer)
        tables.announce.add(MOVES)
        tables.to_notify.add(transfer.slot)  # requests may wait for it there

    def move_claims(self, tables: Tables, row: _core.TopicRow, transfer: Transfer) -> None:
        """Move the claims of the hand-over's groups with the topic."""
        moved = steps.claims_that_move(tables, row, transfer)
        if not moved:
            return
        self.end_claims(tables, moved, "evict", row)
        steps.notify_moved(self._living, tables, row, moved, transfer)
        for claimant in moved:
            reason = f"group {claimant.group}"
            record(tables, row, "moved", reason, source=claimant, target=transfer)


def _blocking_holders(
    tables: Tables, row: _core.TopicRow, mode: str, name: str | None
) -> Sequence[Session]:
    if row.owner:
        owner = owner_of(tables, row)
        return [owner] if owner is not None else []
    if mode in EXCLUSIVE_MODES or row.waiting:
        return tables.sessions.holders(row.id)
    # Shared producers do not exclude each other, and there may be many: inspect only the one
    # with the same name, whose seat may have been moving (rule A6).
    number = 0 if name is None else tables.producers.get(row.id, name)[1]
    namesake = tables.sessions.holder(row.id, number) if number else None
    return [] if namesake is None else [namesake]


# ---- requests, and all other calls -----------------------------------------------------


NOT_PROMOTED = "no waiter is promoted there"
EVICTED_AT_FIRST = 50
EVICTED_AT_ONCE = 1000  # sessions in one transaction; other writers wait meanwhile


# Raised before a request changes anything.
REFUSALS = (
    ProducerFencedError,
    ProducerBusyError,
    TopicNotFoundError,
    TopicTerminatedError,
    OwnershipLostError,
)


class DamagedTopic(Exception):
    """Rows of the topic with this number, of several in one transaction, are damaged. `error` says
    which topic."""

    def __init__(self, name: str, number: int, damage: Exception) -> None:
        super().__init__(name)
        self.number = number
        self.error = LedgerCorruptedError(f"topic {name!r}: {damage}", topic=name)


@contextlib.contextmanager
def _naming(name: str, number: int) -> Iterator[None]:
    """Name the topic whose rows are damaged."""
    try:
        yield
    except (LedgerCorruptedError, *faults.DAMAGED) as error:
        raise DamagedTopic(name, number, error) from error


class Requests:
    """Decides about requests for topics, within a transaction (rules A1-A6, B5, B6)."""

    def __init__(self, succession: Succession, roles: RoleGrants) -> None:
        self._succession = succession
        self._transfers = succession.transfers
        self._roles = roles

    def register(
        self,
        tables: Tables,
        row: _core.TopicRow,
        session: Session,
        *,
        role: RoleDefinition | None,
        follows: int | None = None,
    ) -> Registration:
        """Admit or queue a new session, which has no id yet, or raise the refusal. Without a name
        it gets a unique one. `follows`, `role`: as for `Sessions.request`."""
        if follows is not None:
            self._check_unbroken(tables, row, session.engine, follows)
            if session.exclusive:  # the log knows what was announced last, the producers do not
                session = session._replace(announce=_announced_by_last_owner(tables, row))
        if role is not None:
            session = session._replace(bound_to=tables.rows.next_id(b"claim"))
        session = session._replace(id=tables.rows.next_id(b"session"))
        given = None if follows is not None else not session.name
        if given:
            session = _named(tables, session)
        if role is not None:
            self._roles.register(tables, row, session, role)
        return self.decide(tables, row, session, follows, given)

    def decide(
        self,
        tables: Tables,
        row: _core.TopicRow,
        session: Session,
        follows: int | None,
        given: bool | None,
    ) -> Registration:
        """Carry out the decision of `exclusivelog.admission.admit` about a session. `given`: did
        the library give its name, or the caller (None: it continues under its name)?"""
        owner = owner_of(tables, row)
        transfer = self._transfers.current(tables, row)
        seat = None
        if not session.exclusive and row.shared:
            seat = steps.find_seat(tables, row, session.engine, session.name, follows)
        verdict, epoch = self._judge(tables, row, session, owner, transfer, seat)
        if verdict not in (*ADMITTED, Verdict.QUEUE):
            refusal = _refusal(tables, row, session, verdict, owner, transfer)
            coming = None if follows is not None else self._coming(tables, row, session, verdict)
            if coming is not None:
                raise StillReleasing(refusal, coming.until)
            raise refusal
        _, namesake = tables.producers.get(row.id, session.name)
        sequence = tables.last_sequence(row.id, session.name)
        reason = ""
        if verdict is Verdict.QUEUE:
            if not namesake:
                tables.producers.put(row.id, session.name, sequence, session.id, given)
            elif not given:  # it gets the name at its grant (rule D9)
                tables.producers.claim(row.id, session.name)
            self._queue(tables, row, session, owner)
        else:
            seated = seat is not None and namesake == seat.id
            if namesake and verdict is not Verdict.TAKE_OVER and not seated:
                self._check_name(tables, row, session, namesake)
            session = session._replace(epoch=epoch)
            if verdict is Verdict.TAKE_OVER:
                self._succession.evict_all(tables, row, session)
            if seat is not None:
                session, reason = session._replace(id=seat.id), HANDED_OVER
                self._admit_to_seat(tables, row, session, seat)
            else:
                reason = _why(session, transfer, takes=verdict is Verdict.TAKE_OVER)
                self._transfers.end(tables, row, transfer, session, reason)
                # A shared producer ends the hand-over: the former owner's may not follow to it.
                moved = transfer if session.exclusive else None
                self._succession.admit(tables, row, session, reason, moved)
                if session.exclusive and is_role(row.name):
                    self._roles.granted(tables, session)
            tables.producers.put(row.id, session.name, sequence, session.id, given)
            if row.waiting and session.notify_on_contention:
                # It was admitted past the queue (rule E3).
                tables.notifications.post(session, WANTED)
        tables.topics.put(row)
        return Registration(session, verdict is Verdict.QUEUE, sequence, reason)

    def _judge(
        self,
        tables: Tables,
        row: _core.TopicRow,
        session: Session,
        owner: Session | None,
        transfer: Transfer | None,
        seat: Session | None,
    ) -> tuple[Verdict, int]:
        """The verdict, and the topic's epoch once it is carried out."""
        decision = admission.decide(
            epoch=row.epoch,
            owner=owner,
            shared=row.shared > 0,
            waiting=row.waiting > 0 and seat is None,
            request=admission.Request(session.mode, session.claimed_epoch),
            settled=lambda: promoting.is_settled(
                session,
                now=self._succession.now(),
                freed=self._succession.freed(row),
                known=tables.sessions.known(row.id),
            ),
            reserved_for_it=promoting.is_reserved(session, transfer),
            recreated=bool(row.flags & _core.RECREATED),
        )
        granted = decision.verdict is Verdict.GRANT and not session.fences
        if granted and is_role(row.name) and not self._roles.check_free(tables, session):
            return Verdict.QUEUE, row.epoch
        return decision.verdict, decision.epoch

    def _queue(
        self, tables: Tables, row: _core.TopicRow, session: Session, owner: Session | None
    ) -> None:
        tables.sessions.put_waiter(session)
        row.waiting += 1
        if owner is not None and owner.notify_on_contention:
            tables.notifications.post(owner, WANTED)
        if owner is not None and tables.sessions.known(row.id) is not None:
            tables.sessions.learn(row.id, session.priority)
        if is_role(row.name):
            self._roles.queue(tables, session)
        self._succession.promote(
            tables, row
        )  # it may be the best waiter, whose settle delay decides for all

    def _admit_to_seat(
        self, tables: Tables, row: _core.TopicRow, session: Session, seat: Session
    ) -> None:
        transfer = steps.take_seat(tables, row, seat, session)
        record(tables, row, "admit", HANDED_OVER, source=None, target=session)
        self._succession.admit(tables, row, session, HANDED_OVER, transfer)

    def visit(self, tables: Tables, session: Session) -> tuple[_core.TopicRow, Session]:
        """Admit a session for this transaction alone: the same decisions, but no registration.
        Returns the topic's row, which the caller writes back, and the session with its epoch. Only
        a new epoch is recorded in `__events__`."""
        row = usable(tables, session.topic)
        self._succession.evict_dead(tables, row, session.mode)
        owner = owner_of(tables, row)
        transfer = self._transfers.current(tables, row)
        decision = admission.admit(
            epoch=row.epoch,
            owner=owner,
            shared=row.shared > 0,
            waiting=row.waiting > 0 or transfer is not None,
            request=admission.Request(session.mode, session.claimed_epoch),
            recreated=bool(row.flags & _core.RECREATED),
        )
        verdict = decision.verdict
        if verdict not in ADMITTED:
            raise _refusal(tables, row, session, verdict, owner, transfer)
        session = session._replace(epoch=decision.epoch)
        _, namesake = tables.producers.get(row.id, session.name)
        if verdict is Verdict.TAKE_OVER:
            self._succession.evict_all(tables, row, session)
            self._transfers.end(tables, row, transfer, session, "fencing")
        elif namesake:
            self._check_name(tables, row, session, namesake)
        if session.epoch > row.epoch:
            row.epoch = session.epoch
            row.flags &= ~_core.RECREATED
            reason = _why(session, None, takes=verdict is Verdict.TAKE_OVER)
            record(tables, row, "grant", reason, target=session)
        return row, session

    def _coming(
        self, tables: Tables, row: _core.TopicRow, session: Session, verdict: Verdict
    ) -> Transfer | None:
        """The hand-over to the session's engine for which its request has to wait, if any."""
        transfer = self._transfers.releasing_to(tables, row, session.engine)
        if transfer is None:
            return None
        if not row.owner:  # taking a reserved seat does not involve the queue
            return transfer if verdict is Verdict.BUSY else None
        # Thousands of dead waiters may still be in the queue, which refuse nobody (rule D4).
        waiting = row.waiting > 0 and self._succession.is_awaited(tables, row)
        expected = waiting and any(
            waiter.engine == session.engine and self._succession.alive(waiter)
            for waiter in tables.sessions.waiters(row.id)
        )
        waits = admission.awaits_release(session.mode, verdict, waiting=waiting, expected=expected)
        return transfer if waits else None

    def _check_unbroken(
        self, tables: Tables, row: _core.TopicRow, engine: str, lineage: int
    ) -> None:
        if steps.find_seat(tables, row, engine, "", lineage) is not None:
            return
        transfer = self._transfers.current(tables, row)
        if transfer is None or transfer.target != engine or transfer.lineage != lineage:
            raise ProducerFencedError(
                f"topic {row.name!r} has had another owner since; open a new producer"
            )

    def _check_name(
        self, tables: Tables, row: _core.TopicRow, session: Session, namesake: int
    ) -> None:
        holder = tables.sessions.holder(row.id, namesake)
        if holder is None:
            return
        if not self._succession.alive(holder):
            self._succession.remove_dead(tables, row, holder)
            return
        raise refusals.name_in_use(f"topic {row.name!r}", owner_info(holder))


class Sessions:
    """All changes of the holders and waiters of one ledger's topics, each call in a transaction of
    its own. Callers that have a transaction use the steps in `succession` and `requests`."""

    def __init__(self, ledger: Ledger, now: Callable[[], int] = _core.now) -> None:
        self.succession = Succession(ledger.lockfile.slots, now)
        self._roles = RoleGrants(self.succession)
        self.requests = Requests(self.succession, self._roles)
        ledger.before_commit.settle_by("roles", self._roles.settle)
        ledger.before_commit.record_by("events", write_events)
        self._ledger = ledger
        self._living = ledger.lockfile.slots

    # ---- open ----------------------------------------------------------------------------

    def request(
        self,
        request: ProducerRequest,
        engine: EngineInfo,
        slot: int,
        abandoned: Callable[[], Sequence[Session]] = tuple,
    ) -> Registration:
        """Register a producer of this engine, or queue it, in one transaction (rules A1-A6, B5,
        B6). `abandoned` returns sessions of this process that have ended, and are still registered:
        they leave first."""
        topic, role, bound_to = request.topic, request.role, request.bound_to

        def register(tables: Tables) -> Registration | OwnershipLostError:
            self._leave_all(tables, abandoned())
            if role is not None:
                self._roles.evict_dead(tables, role, request.mode)
            row = usable(tables, topic)
            self.succession.evict_dead(tables, row, request.mode, request.name)
            # Check after the evictions: a claim may have moved with an evicted session's topic.
            if bound_to and tables.claims.claimant(bound_to) is None:
                return _claim_gone(row.name)
            session = _unregistered(request, engine, slot)
            return self.requests.register(tables, row, session, role=role, follows=request.lineage)

        found = self._write_with_journal(register, request.until)
        if isinstance(found, OwnershipLostError):
            raise found  # after the commit, which keeps the evictions
        return found

    def _write_with_journal(self, change: Callable[[Tables], Made], until: int = 0) -> Made:
        """Make a change in a transaction that knows the last sequence id of every name, and where
        topics end: from the tables, or if these have no room for the journal's messages, from
        both (rule H2)."""
        try:
            with self._ledger.write_fencing(until, applied=True) as tables:
                return change(tables)
        except LedgerFullError:
            with self._ledger.write_fencing(until) as tables:
                tables.include_journal()
                return change(tables)

    def request_all(
        self,
        names: Sequence[str],
        request: ProducerRequest,
        engine: EngineInfo,
        slot: int,
        abandoned: Callable[[], Sequence[Session]] = tuple,
    ) -> list[Registration]:
        """Register a producer on each of the topics with these names, all or none; creates missing
        topics. `request` must not wait; its topic is not used. `abandoned` as in `request`."""
        session = _unregistered(request, engine, slot)

        def register(tables: Tables) -> list[Registration]:
            self._leave_all(tables, abandoned())
            return [self._register_one(tables, names, i, session) for i in range(len(names))]

        try:
            return self._write_with_journal(register)
        except DamagedTopic as damaged:
            raise damaged.error from damaged

    def queue_some(
        self,
        names: Sequence[str],
        request: ProducerRequest,
        engine: EngineInfo,
        slot: int,
        abandoned: Callable[[], Sequence[Session]] = tuple,
    ) -> list[Registration | ExclusiveLogError]:
        """Register a producer that may wait on each of the first topics with these names, as many
        as `CHUNK_SECONDS` allow, in one transaction; creates missing topics. Returns the
        registration, or the refusal, of each. `abandoned` as in `request`."""
        session = _unregistered(request, engine, slot)

        def register(tables: Tables, number: int) -> Registration:
            return self._register_one(tables, names, number, session)

        return self._register_some(len(names), register, abandoned, request.until)

    def follow_some(
        self,
        names: Sequence[str],
        requests: Sequence[ProducerRequest],
        engine: EngineInfo,
        slot: int,
        abandoned: Callable[[], Sequence[Session]] = tuple,
    ) -> list[Registration | ExclusiveLogError]:
        """The same for producers that follow their topics to this engine, each with a request of
        its own."""

        def register(tables: Tables, number: int) -> Registration:
            request = requests[number]
            with _naming(names[number], number):
                row = usable(tables, request.topic)
                self.succession.evict_dead(tables, row, request.mode, request.name)
                session = _unregistered(request, engine, slot)
                return self.requests.register(
                    tables, row, session, role=None, follows=request.lineage
                )

        return self._register_some(len(requests), register, abandoned)

    def _register_some(
        self,
        count: int,
        register: Callable[[Tables, int], Registration],
        abandoned: Callable[[], Sequence[Session]],
        until: int = 0,
    ) -> list[Registration | ExclusiveLogError]:
        def change(tables: Tables) -> list[Registration | ExclusiveLogError]:
            self._leave_all(tables, abandoned())
            return self._register_each(tables, count, register)

        while True:
            try:
                return self._write_with_journal(change, until)
            except DamagedTopic as damaged:
                # All is rolled back, since its request may have changed other rows before the
                # damage was found. Register those before it, then let it fail alone.
                if damaged.number == 0:
                    return [damaged.error]
                count = damaged.number

    def _register_each(
        self, tables: Tables, count: int, register: Callable[[Tables, int], Registration]
    ) -> list[Registration | ExclusiveLogError]:
        found: list[Registration | ExclusiveLogError] = []
        end = self.succession.now() + int(CHUNK_SECONDS * 1e9)
        for number in range(count):
            try:
                found.append(register(tables, number))
            except REFUSALS as refusal:  # it has changed nothing
                found.append(refusal)
            if self.succession.now() >= end:
                break
        return found

    def _register_one(
        self, tables: Tables, names: Sequence[str], number: int, session: Session
    ) -> Registration:
        """Register a producer on the topic with the name `names[number]`."""
        with _naming(names[number], number):
            return self._register_on(tables, names[number], session)

    def _register_on(self, tables: Tables, name: str, session: Session) -> Registration:
        row = tables.topics.find(name)
        if row is not None:
            check_usable(row)
            if row.owner or row.shared or row.waiting:
                self.succession.evict_dead(tables, row, session.mode, session.name or None)
        if session.bound_to and tables.claims.claimant(session.bound_to) is None:
            raise _claim_gone(name)
        if row is None:
            row = tables.topics.create(name)
        given = not session.name
        session = session._replace(id=tables.rows.next_id(b"session"), topic=row.id)
        if given:
            session = _named(tables, session)
        return self.requests.decide(tables, row, session, None, given)

    # ---- terminate -----------------------------------------------------------------------

    def terminate(self, topic: int) -> int:
        """Terminate the topic, and end all its sessions (rule G8). Returns its end."""

        def change(tables: Tables) -> int:
            row = tables.topics.existing(topic)
            row.flags |= _core.TERMINATED
            end = tables.latest(row.id).next_offset
            error = refusals.terminated(f"topic {row.name!r}", end)
            self.succession.end_all(tables, row, error, "terminated")
            tables.topics.put(row)
            tables.announce.add(row.id)
            return end

        return self._write_with_journal(change)

    # ---- leave ---------------------------------------------------------------------------

    def release(self, sessions: Sequence[Session], read: tuple[str, int] | None = None) -> None:
        """Release sessions and promote waiters, all in one transaction (rules B7, C1).

        One that is no longer registered, because it was evicted, is passed over: its
        successor is not affected. `read` is (engine, number) of notifications that can go.
        """
        with self._ledger.write_fencing() as tables:
            if read is not None:
                tables.notifications.drop(*read)
            self._leave_all(tables, sessions)

    def _leave_all(self, tables: Tables, sessions: Sequence[Session]) -> None:
        leave = self.succession.leave
        if len(sessions) == 1:  # it changes the topic's row once
            leave(tables, sessions[0], "release", "closed")
            return
        left = [
            session.topic
            for session in sessions
            if leave(tables, session, "release", "closed", promote=False) is not None
        ]
        # After all have left: none of them may be promoted in place of another one.
        self.succession.promote_all(tables, dict.fromkeys(left))

    def cancel(self, session: Session, until: int = 0) -> bool:
        """Remove the session from its queue. False if it is not in it (any more): it was granted or
        fenced, as a notification says (rule D5). WaitTimeoutError if that cannot begin before
        `until`."""
        with self._ledger.write_fencing(until) as tables:
            if not tables.sessions.waiting(session):
                return False
            row = tables.topics.get(session.topic)
            self.succession.drop_waiter(tables, row, session)
            self.succession.promote(tables, row)  # its settle delay may have kept others waiting
            tables.topics.put(row)
            return True

    def promote_again(self, topics: Iterable[int]) -> None:
        """Retry promotions that are due (rule D7)."""

        def promote(some: Sequence[int]) -> list[None]:
            with self._ledger.write_fencing() as tables:
                self.succession.promote_all(tables, some, due=True)
            return []

        faults.apart_if_damaged(self._ledger.path, list(topics), promote, NOT_PROMOTED)

    # ---- evict ---------------------------------------------------------------------------

    def find_dead(self, needed: Callable[[], Set[int]] | None = None) -> list[str]:
        """Engines that have sessions here and are dead or unresponsive. `needed` returns the topics
        that this engine waits for; of the unresponsive engines, only those that hold one of them
        are returned (rule C3). It is called only if there are any: a hundred thousand may wait."""

        def is_blocking(tables: Tables, slot: int, engine: str) -> bool:
            gone = not self._living.exists(slot, engine)
            return (
                gone or needed is None or not needed().isdisjoint(tables.sessions.topics_of(engine))
            )

        with self._ledger.read() as tables:
            return [
                engine
                for engine, slot in tables.sessions.engines()
                if not self._living.alive(slot, engine) and is_blocking(tables, slot, engine)
            ]

    def drop_notifications_of_dead_engines(self) -> None:
        """Delete the notifications of engines that are gone: none of them will read them."""
        with self._ledger.read() as tables:
            readers = list(tables.notifications.engines())
        gone = set(readers) - {engine.id for engine in self._living.present()}
        if gone:
            with self._ledger.write_concurrent() as tables:
                for engine in gone:
                    tables.notifications.drop(engine, 2**64 - 1)

    def evict(
        self, engine: str, needed: Callable[[], Set[int]], until: int = 0
    ) -> Iterator[Sequence[Session]]:
        """Remove a dead engine's sessions and promote the waiters for their topics (rule C2). Of an
        engine that is only unresponsive, remove those on topics that `needed` returns: the ones for
        which the caller waits (rule C3).

        Topics with the best waiters go first. A transaction takes a bounded number, so that no
        process waits long for the writer lock, and the first transaction only a few, so that the
        first waiters are promoted early. Yields the sessions of each transaction. WaitTimeoutError
        if one cannot begin before `until`.
        """
        size = EVICTED_AT_FIRST
        for waiters in (False, True):  # of these there may be ten thousand, and no topic needs them
            with self._ledger.read() as tables:
                sessions = tables.sessions.of_engine(engine, NOT_EVICTED, waiters)
                order = _by_urgency(tables, self._needed_of(sessions, needed))
            while order:
                if not self._evict_some(engine, order[:size], until):
                    return
                evicted, order = order[:size], order[size:]
                size = EVICTED_AT_ONCE
                yield evicted

    def _needed_of(self, sessions: list[Session], needed: Callable[[], Set[int]]) -> list[Session]:
        """Those of a dead engine's sessions that are to be evicted."""
        if not sessions or not self.succession.exists(sessions[0]):
            return sessions
        topics = needed()
        return [session for session in sessions if session.topic in topics]

    def _evict_some(self, engine: str, sessions: Sequence[Session], until: int) -> bool:
        """False if the engine was unresponsive, and has resumed meanwhile (rule C3)."""

        def evict(some: Sequence[Session]) -> list[bool]:
            return [self._evict_if_dead(engine, some, until)]

        dead = faults.apart_if_damaged(self._ledger.path, sessions, evict, NOT_EVICTED)
        return all(dead)

    def _evict_if_dead(self, engine: str, sessions: Sequence[Session], until: int) -> bool:
        with self._ledger.write_fencing(until) as tables:
            if self._living.alive(sessions[0].slot, engine):
                return False
            if not self._living.exists(sessions[0].slot, engine):
                tables.notifications.drop(engine, 2**64 - 1)
            for session in sessions:
                end = self.succession.end_of(session)
                row = self.succession.leave(tables, session, "evict", end)
                if row is not None:
                    self.succession.notify_fenced(tables, row, session, owner_of(tables, row))
            return True

    def evict_gone(self) -> None:
        """Remove the shared producers and waiters of engines that are gone. Nothing else does, as
        long as nobody wants their topics exclusively. Owners stay until their topics are wanted."""
        gone: list[Session] = []
        with self._ledger.read() as tables:
            for engine, slot in tables.sessions.engines():
                if not self._living.exists(slot, engine):
                    gone += [
                        session
                        for session in tables.sessions.of_engine(engine, NOT_EVICTED)
                        if not (session.exclusive and session.epoch)
                        and not self._living.exists(session.slot, engine)  # as its own row says
                    ]
        for start in range(0, len(gone), EVICTED_AT_ONCE):
            chunk = gone[start : start + EVICTED_AT_ONCE]
            faults.apart_if_damaged(self._ledger.path, chunk, self._evict_all, NOT_EVICTED)

    def _evict_all(self, sessions: Sequence[Session]) -> list[None]:
        with self._ledger.write_fencing() as tables:
            for session in sessions:
                self.succession.leave(tables, session, "evict", "dead")
        return []

    def yielding_owner(self, topic: int) -> int:
        """The session that owns the topic, if it has agreed to release it when another one waits;
        0 if there is none."""
        with self._ledger.read() as tables:
            owner = owner_of(tables, tables.topics.get(topic))
            return owner.id if owner is not None and owner.notify_on_contention else 0

    def evict_late(self, topic: int, owner: int, until: int) -> bool:
        """Evict an owner that has agreed to release the topic when another session waits, and has
        not, and promote a waiter, in one transaction (rule I8). False if it is not the owner;
        WaitTimeoutError if that cannot begin before `until`."""
        with self._ledger.write_fencing(until) as tables:
            row = tables.topics.get(topic)
            session = tables.sessions.holder(topic, owner) if row.owner == owner else None
            if session is None or not session.notify_on_contention:
                return False
            self.succession.leave(tables, session, "evict", "late", row=row)
            self.succession.notify_fenced(tables, row, session, owner_of(tables, row))
            return True

    # ---- inspect -------------------------------------------------------------------------

    def topic_name(self, topic: int) -> str:
        """The name of the topic with this id."""
        with self._ledger.read() as tables:
            return tables.topics.get(topic).name

    def still_coming(self, topic: int, engine: str) -> Transfer | None:
        """The hand-over of this topic to this engine whose source is still to release it."""
        with self._ledger.read() as tables:
            row = tables.topics.intact(topic, "its waiters are notified all the same")
            if row is None:
                return None
            return self.succession.transfers.releasing_to(tables, row, engine)

    def locate(self, topic: int, lineage: int) -> tuple[str, int] | None:
        """(engine, session) that this lineage of hand-overs has led to; session 0 while the topic
        is still reserved. None if the topic has had an owner outside the lineage since."""
        with self._ledger.read() as tables:
            row = tables.topics.get(topic)
            seat = steps.held_seat(tables, topic, lineage) if row.shared else None
            if seat is not None:
                return seat.engine, 0 if steps.is_reserved(tables, seat) else seat.id
            owner = owner_of(tables, row)
            if owner is not None:
                return (owner.engine, owner.id) if owner.lineage == lineage else None
            transfer = tables.transfers.get(topic)
            due = transfer is None or self.succession.now() >= transfer.until
            if transfer is not None and transfer.lineage == lineage and not due:
                return transfer.target, 0
            return None

    def destinations_gone(self, topics: Iterable[int]) -> set[int]:
        """The topics among these whose hand-over goes to a dead engine."""
        with self._ledger.read() as tables:
            found = [tables.transfers.get(topic) for topic in topics]
        has_destination = self.succession.transfers.has_destination
        return {each.topic for each in found if each is not None and not has_destination(each)}

    def holders(self, topic: int) -> list[OwnerInfo]:
        """The topic's holders: its owner, or its shared producers. Only live ones, without reserved
        seats."""
        with self._ledger.read() as tables:
            there = [s for s in tables.sessions.holders(topic) if self.succession.alive(s)]
            return [owner_info(s) for s in there if not steps.is_reserved(tables, s)]

    def owner(self, topic: int) -> OwnerInfo | None:
        """The topic's owner, if its engine is alive."""
        with self._ledger.read() as tables:
            owner = owner_of(tables, tables.topics.get(topic))
            lives = owner is not None and self.succession.alive(owner)
            return owner_info(owner) if owner is not None and lives else None

    def waiters(self, topic: int) -> list[WaiterInfo]:
        """The live waiters in the topic's queue, best first."""
        with self._ledger.read() as tables:
            waiters = tables.sessions.waiters(topic)
            return [waiter_info(s) for s in waiters if self.succession.alive(s)]


# ---- refusals ----------------------------------------------------------------------------


def _unregistered(request: ProducerRequest, engine: EngineInfo, slot: int) -> Session:
    return Session(
        id=0,
        topic=request.topic,
        engine=engine.id,
        slot=slot,
        pid=engine.pid,
        engine_name=engine.name,
        name=request.name or "",
        mode=request.mode,
        priority=request.priority,
        created=request.created,
        tie=int.from_bytes(os.urandom(4)),
        since=time.time_ns() // 1_000_000,
        claimed_epoch=request.topic_epoch,
        properties=request.properties,
        settle=request.settle,
        engine_properties=dict(engine.properties),
        bound_to=request.bound_to,
        notify_on_contention=request.notify_on_contention,
        announce=request.announce,
    )


def _announced_by_last_owner(tables: Tables, row: _core.TopicRow) -> dict[str, str] | None:
    """What the topic's last owner has announced itself, which its next session repeats."""
    last = tables.announcements.get(row.id)
    return dict(last.info) if last is not None and last.epoch == row.epoch else None


def _named(tables: Tables, session: Session) -> Session:
    """The session with a name that no producer of its topic has."""
    name = f"{session.engine_name}-{session.id}"
    return session._replace(name=tables.producers.unused_name(session.topic, name))


def _claim_gone(topic: str) -> OwnershipLostError:
    return OwnershipLostError(
        f"topic {topic!r}: claim= was revoked, released or handed over, and no producer can "
        "be bound to it. Make a new one with engine.own"
    )


def usable(tables: Tables, topic: int) -> _core.TopicRow:
    """The row of a topic that was neither deleted nor terminated; raises if it was."""
    return check_usable(tables.topics.get(topic))


def _why(
    session: Session, transfer: Transfer | None, *, takes: bool = False, waited: bool = False
) -> str:
    return admission.reason_of_grant(
        takes=takes,
        moved=transfer is not None and transfer.target == session.engine,
        continues=session.claimed_epoch == session.epoch,
        waited=waited,
    )


def _refusal(
    tables: Tables,
    row: _core.TopicRow,
    session: Session,
    verdict: Verdict,
    owner: Session | None,
    transfer: Transfer | None,
) -> ExclusiveLogError:
    holder = (
        owner
        or next(iter(tables.sessions.holders(row.id)), None)
        or next(tables.sessions.waiters(row.id), None)
    )
    return refusals.refused(
        refusals.topic_label(row.name),
        verdict,
        epoch=row.epoch,
        claimed_epoch=session.claimed_epoch,
        by=None if holder is None else owner_info(holder),
        moving="" if transfer is None else moving_to(transfer.name, transfer.target),
    )


def _by_urgency(tables: Tables, sessions: list[Session]) -> list[Session]:
    """Sort by the best waiter of each session's topic; sessions without a waiter come last."""

    def urgency(session: Session) -> tuple[bool, tuple[int, ...]]:
        best: Session | None = None
        with contextlib.suppress(LedgerCorruptedError):  # those of other topics are sorted
            best = next(tables.sessions.waiters(session.topic), None) if session.epoch else None
        return best is None, () if best is None else best.place

    return sorted(sessions, key=urgency)
