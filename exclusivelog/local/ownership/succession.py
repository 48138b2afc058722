"""Who holds a topic after whom: every step of that within one transaction of the ledger.

A session is a row: in `holders` once it is admitted, in `queue` while it waits. A missing row
means fenced, released or dead; all are treated alike. What is decided here is decided by the rows,
the live engines and the clock alone, so that the model checker (`proof.model`) runs this very code
over tables in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from exclusivelog import _core
from exclusivelog.backend import RoleDefinition
from exclusivelog.local.ownership import admission, moved_claims, role_rows, seats
from exclusivelog.local.ownership.announcements import put_announcement
from exclusivelog.local.ownership.changes import (
    FENCED,
    GRANTED,
    HANDED_OVER,
    MOVES,
    RESOURCES,
    RETRY_AT,
    REVOKED,
    WANTED,
    Living,
    record,
)
from exclusivelog.local.records import SHARED, WAIT, Claimant, Session, Transfer, changed, is_role
from exclusivelog.local.storage.tables import Tables, fenced_by, owner_of, revoked

# The rows (key, data) of a topic's queue that come into question.
Choose = Callable[[Tables, _core.TopicRow], Iterable[tuple[bytes, bytes]]]


class Roles(Protocol):
    """What role_grants.py does for the sessions of a ledger: all within their transactions."""

    def evict_dead(self, tables: Tables, definition: RoleDefinition, mode: str) -> None:
        """Evict what dead engines have on the role's topics."""

    def register(
        self, tables: Tables, row: _core.TopicRow, seat: Session, definition: RoleDefinition
    ) -> None:
        """Write the request down, and the anchor that its parts are bound to."""

    def check_free(self, tables: Tables, seat: Session, waits: bool) -> bool:
        """Is all of the role free, for a request that was not queued?"""

    def queue(self, tables: Tables, seat: Session) -> None:
        """The seat waits: so does a part on each of the role's topics, at the same place."""

    def admitted(self, tables: Tables, seat: Session) -> None:
        """The seat was granted: take all that the role binds. Raises where it is not free."""

    def dropped(self, tables: Tables, session: Session, kind: str, reason: str) -> None:
        """A session that is bound to something no longer holds or waits."""

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


class Transfers:
    """The hand-overs under way: which can still succeed. `roles` is set by `with_roles`."""

    roles: Roles

    def __init__(self, living: Living, now: Callable[[], int]) -> None:
        self._living = living
        self._now = now

    def current(self, tables: Tables, row: _core.TopicRow) -> Transfer | None:
        """The topic's hand-over, if it can still succeed; else it is ended here."""
        transfer = tables.transfers.get(row.id)
        if transfer is None:
            return None
        if not self.has_destination(transfer):
            self.cancel(tables, row, transfer, "the destination is gone")
        elif self._now() >= transfer.until:
            self.cancel(tables, row, transfer, "deadline")
        elif row.owner and transfer.session != row.owner:
            self.cancel(tables, row, transfer, "another owner came first")
        else:
            return transfer
        return None

    def has_destination(self, transfer: Transfer) -> bool:
        """Does the engine live that this hand-over goes to?"""
        return self._living.alive(transfer.slot, transfer.target)

    def can_succeed(self, transfer: Transfer) -> bool:
        """Does its destination live, and is there time left?"""
        return self.has_destination(transfer) and self._now() < transfer.until

    def cancel(self, tables: Tables, row: _core.TopicRow, transfer: Transfer, reason: str) -> None:
        """The hand-over ends without its destination (rule E4)."""
        tables.transfers.drop(row.id)
        if is_role(row.name):
            self.roles.cancelled(tables, row, transfer, reason)
        tables.ring.add(transfer.slot)  # requests that wait for it there are decided as usual
        record(tables, row, "cancel", reason, source=owner_of(tables, row), target=transfer)

    def end(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer | None, winner: Session,
        reason: str,
    ) -> None:  # fmt: skip
        """This session gets the topic: the hand-over has succeeded, or has ended without its
        destination."""
        if transfer is None:
            return
        if not winner.exclusive:
            self.cancel(tables, row, transfer, "a shared producer of it came first")
        elif reason != HANDED_OVER:
            self.cancel(tables, row, transfer, "another owner came first")
        else:
            tables.transfers.drop(row.id)

    def releasing_to(self, tables: Tables, row: _core.TopicRow, engine: str) -> Transfer | None:
        """The hand-over to this engine, of the topic or of a shared producer's seat, whose source
        has not released it yet, and still has time to. Changes nothing."""
        if row.flags & (_core.DELETED | _core.TERMINATED):
            return None
        if not row.owner:
            return seats.releasing_to(tables, row.id, engine, self._now())
        transfer = tables.transfers.get(row.id)
        if transfer is None or transfer.target != engine or self._now() >= transfer.until:
            return None
        return transfer if transfer.session and transfer.session == row.owner else None


class Succession:
    """Grants, promotions, evictions and releases of one ledger's topics, each a step of a
    transaction. `now` is the machine's monotonic clock, in ns."""

    def __init__(self, living: Living, now: Callable[[], int] = _core.now) -> None:
        self.now = now
        self.transfers = Transfers(living, now)
        self._living = living

    @property
    def roles(self) -> Roles:
        """What binds the parts of roles together."""
        return self.transfers.roles

    def alive(self, party: Session | Claimant) -> bool:
        """Does its engine exist, and respond?"""
        return self._living.alive(party.slot, party.engine)

    def exists(self, party: Session | Claimant) -> bool:
        """Does its engine exist, responsive or not?"""
        return self._living.exists(party.slot, party.engine)

    def end_of(self, party: Session | Claimant) -> str:
        """How an engine ended that does not live: an event's reason."""
        return "hung" if self.exists(party) else "dead"

    # ---- grant ---------------------------------------------------------------------------

    def admit(
        self, tables: Tables, row: _core.TopicRow, session: Session, reason: str,
        transfer: Transfer | None = None,
    ) -> None:  # fmt: skip
        """The session holds the topic from now on, `transfer`: by this hand-over."""
        moved = reason == HANDED_OVER and transfer is not None and transfer.lineage
        lineage = transfer.lineage if moved and transfer else session.id
        if session.announce is not None:
            put_announcement(tables, session, session.announce)
        session = changed(session, lineage=lineage, announce=None)
        tables.sessions.put_holder(session)
        if session.exclusive:
            row.owner = session.id
            row.epoch = session.epoch
            row.flags &= ~_core.RECREATED
            if session.mode == WAIT:
                tables.sessions.learn(row.id, session.priority)
            record(tables, row, "grant", reason, target=session)
            if is_role(row.name):
                self.roles.admitted(tables, session)
        else:
            row.shared += 1

    def _grant(
        self, tables: Tables, row: _core.TopicRow, waiter: Session, reason: str,
        transfer: Transfer | None,
    ) -> None:  # fmt: skip
        winner = changed(waiter, since=time.time_ns() // 1_000_000)
        tables.sessions.drop_waiter(winner)
        row.waiting -= 1
        self.admit(tables, row, winner, reason, transfer)
        sequence, namesake = tables.producers.get(row.id, winner.name)
        if namesake != winner.id:  # else the row is as it has to be: a page less to write
            tables.producers.put(row.id, winner.name, sequence, winner.id)
        tables.notifications.post(winner, GRANTED, winner.epoch, winner.since, sequence)
        if row.waiting and winner.notify_on_contention:
            tables.notifications.post(winner, WANTED)  # behind the grant

    # ---- leave ---------------------------------------------------------------------------

    def leave(
        self, tables: Tables, session: Session, kind: str, reason: str, promote: bool = True,
        row: _core.TopicRow | None = None,
    ) -> _core.TopicRow | None:  # fmt: skip
        """A session has ended; one that is not registered any more is passed over (rule B7). Unless
        it does `promote`, the caller does. `row`: the topic's, if the caller changes it, too."""
        if row is None:
            consequence = f"producer {session.name!r} is taken away from it"
            row = tables.topics.sound(session.topic, consequence)
        if row is None:
            tables.sessions.drop_holder(session)
            tables.transfers.drop_seat(session.topic, session.id)
            tables.sessions.drop_waiter(session)
            self.roles.dropped(tables, session, kind, reason)
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
        self, tables: Tables, row: _core.TopicRow, session: Session, kind: str, reason: str,
        rival: Session | Transfer | None = None,
    ) -> None:  # fmt: skip
        """The session no longer holds the topic; `rival` is to have it."""
        tables.sessions.drop_holder(session)
        tables.producers.free(session)
        if not session.exclusive:
            row.shared -= 1
            seats.pass_on(self, tables, row, session)
        elif row.owner == session.id:
            row.owner = 0
            record(tables, row, kind, reason, source=session, target=rival)
        if not row.owner and not row.shared:
            row.freed = self.now()
        if session.bound_to:
            self.roles.dropped(tables, session, kind, reason)

    def drop_waiter(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        """The session no longer waits."""
        if tables.sessions.drop_waiter(session):
            tables.producers.free(session)
            row.waiting -= 1
            if session.bound_to:
                self.roles.dropped(tables, session, "evict", "waited")

    def remove_dead(self, tables: Tables, row: _core.TopicRow, session: Session) -> None:
        """A session whose engine is dead, or unresponsive for too long, holds or waits no more."""
        if session.epoch or not session.exclusive:
            self.drop_holder(tables, row, session, "evict", self.end_of(session))
        else:
            self.drop_waiter(tables, row, session)
        self.tell_fenced(tables, row, session, owner_of(tables, row))

    def tell_fenced(
        self, tables: Tables, row: _core.TopicRow, session: Session, rival: Session | None
    ) -> None:
        """Notify a session that was evicted, unless its process is gone; one that is unresponsive
        reads it when it goes on."""
        if not self.exists(session):
            return
        if role_rows.binds(tables, session):  # its role is lost: its sends are told the same
            tables.notifications.post(session, REVOKED, str(revoked(row, session)))
        else:
            tables.notifications.post(session, FENCED, str(fenced_by(row, session, rival)))

    def evict_all(self, tables: Tables, row: _core.TopicRow, rival: Session) -> None:
        """Fence all who hold or await the topic."""
        seats.cancel(self, tables, row, "another owner came first")
        for session in tables.sessions.holders(row.id):
            self.drop_holder(tables, row, session, "evict", "fenced", rival)
            self.tell_fenced(tables, row, session, rival)
        for session in list(tables.sessions.waiters(row.id)):
            self.drop_waiter(tables, row, session)
            self.tell_fenced(tables, row, session, rival)

    def evict_dead(
        self, tables: Tables, row: _core.TopicRow, mode: str, name: str | None = None
    ) -> None:
        """Evict sessions of dead engines that could stand in a request's way, and promote a living
        waiter before anyone new (rules C2, D4)."""
        for session in _holders_in_the_way(tables, row, mode, name):
            # One may have ended with a claim that moved when another one was dropped.
            if not self.alive(session) and tables.sessions.holds(row.id, session.id):
                self.drop_holder(tables, row, session, "evict", self.end_of(session))
                self.tell_fenced(tables, row, session, None)
        self.promote(tables, row)
        if row.waiting:
            dead = []
            for waiter in tables.sessions.waiters(row.id):
                if self.alive(waiter):
                    break
                dead.append(waiter)
            for waiter in dead:
                self.drop_waiter(tables, row, waiter)
                self.tell_fenced(tables, row, waiter, owner_of(tables, row))
        tables.topics.put(row)

    def end_claims(
        self, tables: Tables, claimants: Sequence[Claimant], kind: str,
        row: _core.TopicRow | None = None,
    ) -> None:  # fmt: skip
        """Claims are gone, and with them the producers that are bound to them, admitted or waiting;
        `kind` is evict or release (rules B2, F5). `row`: of a topic that the caller changes, too,
        and promotes."""
        for claimant in claimants:
            self.roles.claim_ended(tables, claimant, kind)
            tables.claims.drop_claimant(claimant.id)
        bound = [
            session for claimant in claimants for session in tables.sessions.bound_to(claimant.id)
        ]
        with tables.topics.in_hand(row) as rows:
            for session in bound:
                own = rows.get(session.topic)
                left = self.leave(tables, session, kind, "claim", promote=False, row=own)
                if left is not None and self.exists(session):
                    tables.notifications.post(session, REVOKED, str(revoked(left, session)))
            # Only now: none of them may be promoted in place of another one.
            self.promote_all(tables, {session.topic for session in bound} - rows.keys())
        for claimant in claimants:
            for resource in claimant.generations:
                last, holder = tables.claims.claim(claimant.group, resource)
                if holder == claimant.id:
                    tables.claims.put_claim(claimant.group, resource, last, 0)
        tables.announce.add(RESOURCES)

    # ---- promote -------------------------------------------------------------------------

    def promote(self, tables: Tables, row: _core.TopicRow) -> None:
        """Make the best waiter the owner of a topic without a holder (rules A3, D4), or tell it
        when to retry (rules D7, E3). Where roles are concerned, that is done at the end of the
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
        transfer = self.transfers.current(tables, row)
        if transfer is not None and transfer.session:
            transfer = self.assign(tables, row, transfer)  # its holder is gone some other way
        if not row.waiting:
            return
        promotion = self._select(tables, row, transfer, choose)
        for session in (*promotion.dead, *promotion.stale):
            self.drop_waiter(tables, row, session)
            self.tell_fenced(tables, row, session, promotion.winner)
        if promotion.winner is not None:
            reason = "promotion" if transfer is None else HANDED_OVER
            self.transfers.end(tables, row, transfer, promotion.winner, reason)
            self._grant(tables, row, promotion.winner, reason, transfer)
            row.later = row.due = 0
        elif promotion.later is not None:
            self._retry_at(tables, row, promotion.later, promotion.due)

    def promote_all(self, tables: Tables, topics: Iterable[int], due: bool = False) -> None:
        """Promote on all of these topics. `due`: because it is time to retry."""
        for topic in topics:
            row = tables.topics.sound(topic, "no waiter is promoted there")
            if row is None:
                continue
            if due:
                row.later = row.due = 0  # this is the retry
            self.promote(tables, row)
            tables.topics.put(row)

    def _select(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer | None,
        choose: Choose | None = None,
    ) -> admission.Promotion:  # fmt: skip
        rows = tables.sessions.queue(row.id) if choose is None else choose(tables, row)
        try:
            return admission.promote(
                row.epoch, row.id, rows, self._living.alive,
                now=self.now(), freed=self.freed(row), transfer=transfer,
                known=tables.sessions.known(row.id),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise tables.rows.damaged("queue", error) from None

    def _await_seats(self, tables: Tables, row: _core.TopicRow) -> None:
        """The destination of a seat gives it back at the deadline, unless it is unresponsive: so
        the best waiter retries then (rule E4)."""
        due = seats.next_deadline(tables, row.id)
        if due is not None:
            best = next((w for w in tables.sessions.waiters(row.id) if self.alive(w)), None)
            if best is not None:
                self._retry_at(tables, row, best, due)

    def _retry_at(self, tables: Tables, row: _core.TopicRow, waiter: Session, due: int) -> None:
        """Have a waiter's engine retry the promotion at that time: told once, however many come
        behind it."""
        if (row.later, row.due) != (waiter.id, due):
            row.later, row.due = waiter.id, due
            tables.notifications.post(waiter, RETRY_AT, row.id, due)

    def freed(self, row: _core.TopicRow) -> int:
        """Since when a free topic is free: at the earliest since its ledger was opened."""
        return max(row.freed if row.freed <= self.now() else 0, self._living.opened)

    # ---- hand over -----------------------------------------------------------------------

    def assign(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, source: Session | None = None
    ) -> Transfer:
        """From now on the topic is reserved, and has no holder (rules E1, E3)."""
        assigned = replace(transfer, session=0)
        tables.transfers.put(assigned)
        self.tell_assigned(tables, row, transfer, source, "unload")
        return assigned

    def tell_assigned(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer, source: Session | None,
        reason: str,
    ) -> None:  # fmt: skip
        """What this hand-over is of is reserved for its destination: its claims move now."""
        record(tables, row, "assigned", reason, source=source, target=transfer)
        self.move_claims(tables, row, transfer)
        tables.announce.add(MOVES)
        tables.ring.add(transfer.slot)  # requests may wait for it there

    def move_claims(self, tables: Tables, row: _core.TopicRow, transfer: Transfer) -> None:
        """The claims of its groups follow the topic."""
        moved = moved_claims.claims_that_move(tables, row, transfer)
        if not moved:
            return
        self.end_claims(tables, moved, "evict", row)
        moved_claims.notify(self._living, tables, row, moved, transfer)
        for claimant in moved:
            reason = f"group {claimant.group}"
            record(tables, row, "moved", reason, source=claimant, target=transfer)


def clear(succession: Succession, tables: Tables, row: _core.TopicRow) -> Session | None:
    """Remove the dead from a topic; a living session that holds or awaits it, if any."""
    everyone = [*tables.sessions.holders(row.id), *tables.sessions.waiters(row.id)]
    for session in everyone:
        if succession.alive(session):
            return session
    for session in everyone:
        succession.remove_dead(tables, row, session)
    return None


def _holders_in_the_way(
    tables: Tables, row: _core.TopicRow, mode: str, name: str | None
) -> Sequence[Session]:
    if row.owner:
        owner = owner_of(tables, row)
        return [owner] if owner is not None else []
    if mode != SHARED or row.waiting:
        return tables.sessions.holders(row.id)
    # A shared producer is not in another one's way, and there may be many; but for its
    # namesake, whose seat may have been on its way (rule A6).
    number = 0 if name is None else tables.producers.get(row.id, name)[1]
    namesake = tables.sessions.holder(row.id, number) if number else None
    return [] if namesake is None else [namesake]
