"""Granting and ending roles: what binds the parts of a role together, within one transaction.

A role's seat is an owner's session on the role's own topic (see role_rows.py). The transaction that
grants the seat takes all parts, and the one that ends the seat, or any part, ends all of them. So
the holder of the seat has the whole role.

An end, and a grant to a request that waits, are only noted at first (see role_rows.py): `settle`
carries them out at the end of the transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from exclusivelog import _core
from exclusivelog.admission import OVERTAKEN
from exclusivelog.backend import RoleDefinition
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipError,
    ProducerFencedError,
    TopicTerminatedError,
)
from exclusivelog.local.ownership import role_rows, steps
from exclusivelog.local.ownership.recording import record, record_claim
from exclusivelog.local.ownership.role_rows import ANCHORS, Noted, RoleRow
from exclusivelog.local.ownership.steps import (
    CLAIM_LOST,
    CLAIM_MOVED,
    FENCED,
    REVOKED,
    TERMINATED,
    WANTED,
)
from exclusivelog.local.records import (
    Claimant,
    Session,
    Transfer,
    describe,
    is_role,
    owner_info,
    revoked,
    unpack_session,
)
from exclusivelog.local.storage.tables import Tables, check_usable, owner_of, unusable
from exclusivelog.types import PREFIX, OwnerInfo

if TYPE_CHECKING:
    from exclusivelog.local.ownership.sessions import Succession

ROLE = "role"  # the reason of events about a role's parts
Place = tuple[tuple[int, int, int], int]  # a place in the queue's order (rule D1)


class Obstacle(NamedTuple):
    """The reason why a role cannot be granted now, and the holder. `error`: it can never be
    granted, and the request fails with this."""

    text: str
    holder: OwnerInfo | None = None
    error: ExclusiveLogError | None = None


def _place(session: Session) -> Place:
    return session.place, session.id


class Obstacles:
    """Finds what keeps a role from being granted."""

    def __init__(self, sessions: Succession) -> None:
        self._sessions = sessions

    def find(
        self, tables: Tables, role: RoleRow, seat: Session, place: Place | None
    ) -> Obstacle | None:
        """The first obstacle to the role of this request. `place`: of the request in the queue,
        None if it is not queued."""
        for topic in role.topics:
            found = self._on_topic(tables, role, seat, topic, place)
            if found is not None:
                return found
        for group, wanted, _ in role.wanted():
            found = self._on_claims(tables, role, group, wanted)
            if found is not None:
                return found
        return None

    def _on_topic(
        self, tables: Tables, role: RoleRow, seat: Session, topic: int, place: Place | None
    ) -> Obstacle | None:
        row = tables.topics.get(topic)
        error = unusable(row)
        if error is not None:
            return Obstacle(str(error), error=error)
        holder = owner_of(tables, row)
        if holder is None and (row.owner or row.shared):
            holder = next(iter(tables.sessions.holders(topic)), None)
        if holder is not None:
            text = f"topic {row.name!r} is held by {describe(holder)}"
            return Obstacle(text, owner_info(holder))
        if row.owner or row.shared:
            return Obstacle(f"topic {row.name!r} is held by a session whose row is missing")
        transfer = self._sessions.transfers.current(tables, row)
        if transfer is not None and transfer.target != seat.engine:
            where = f"engine {transfer.name!r} (id {transfer.target})"
            return Obstacle(f"topic {row.name!r} is reserved for {where}")
        first = self._ahead(tables, row, transfer, place)
        if first is not None:
            text = f"topic {row.name!r} is awaited by {describe(first)}"
            return Obstacle(text, owner_info(first))
        return None

    def _ahead(
        self, tables: Tables, row: _core.TopicRow, transfer: Transfer | None, place: Place | None
    ) -> Session | None:
        """The first producer in the topic's queue before that place. Requests for other roles do
        not count, so that no role waits for a role that has nothing yet."""
        for waiter in tables.sessions.waiters(row.id) if row.waiting else ():
            if place is not None and _place(waiter) >= place:
                return None
            stale = waiter.claimed_epoch not in (None, row.epoch)
            elsewhere = transfer is not None and waiter.engine != transfer.target
            part = role_rows.role_of_session(tables, waiter) is not None
            if not (stale or elsewhere or part) and self._sessions.alive(waiter):
                return waiter
        return None

    def _on_claims(
        self, tables: Tables, role: RoleRow, group: str, wanted: dict[str, int | None]
    ) -> Obstacle | None:
        try:
            _, holders = steps.judge_claims(self._sessions, tables, group, wanted)
        except OwnershipError as error:
            return Obstacle(str(error), error=error)
        for holder in holders.values():
            other = role_rows.role_of_claim(tables, holder.id)
            if other is not None and other.claim != role.claim and self._sessions.alive(holder):
                of = f"group {group!r}" if group else "no group"
                return Obstacle(
                    f"a resource of {of} is held by role {other.name!r} of engine "
                    f"{holder.engine_name!r} (id {holder.engine}, pid {holder.pid})"
                )
        return None


class RoleEnds:
    """Ends roles: all parts of a role are lost, or handed over, with it."""

    def __init__(self, sessions: Succession) -> None:
        self._sessions = sessions

    def end(self, tables: Tables, claim: int, end: Noted) -> bool:
        """End the role with this anchor, with all its parts. True if it had claims: other roles may
        have waited for one of them, also if that was revoked before."""
        role = role_rows.find(tables, claim)
        if role is None:
            return False
        kind, reason, first = end
        bound = tables.sessions.bound_to(claim)
        anchor = tables.claims.claimant(claim)
        claimants = [
            c for number in role.claimants if (c := tables.claims.claimant(number)) is not None
        ]
        role_rows.drop(tables, role)  # drops below must not record another end of this role
        tables.claims.drop_claimant(claim)
        transfer = self._transfer(tables, role)
        for session in sorted(bound, key=lambda each: each.topic):
            part = role.has(session)
            self._sessions.leave(tables, session, kind, reason if session.id == role.seat else ROLE)
            if part and session.id != role.seat and session.epoch and transfer is not None:
                self._reserve(tables, session, transfer)
            notified = session.id == first or (kind == "release" and part and first == role.seat)
            if not notified:
                self._notify_member(tables, role, session)
            tables.to_promote.add(session.topic)
        tables.to_promote.add(role.topic)
        self._end_claims(tables, claimants, kind, transfer)
        if (role.held and anchor is not None and kind != "release") or transfer is not None:
            self._notify_claimant(tables, anchor, transfer)
        return bool(role.claimants)

    def _transfer(self, tables: Tables, role: RoleRow) -> Transfer | None:
        row = tables.topics.intact(role.topic, "the role that it stands for is ended all the same")
        return (
            None if row is None or not role.held else self._sessions.transfers.current(tables, row)
        )

    def _reserve(self, tables: Tables, session: Session, transfer: Transfer) -> None:
        """Reserve the topic for the destination of its role (rule E3)."""
        row = tables.topics.intact(
            session.topic, "it is not reserved for the destination of its role"
        )
        if row is None or row.owner:
            return
        kept = transfer._replace(topic=row.id, session=0, lineage=0, groups=())
        tables.transfers.put(kept)
        record(tables, row, "assigned", ROLE, source=session, target=kept)

    def _notify_member(self, tables: Tables, role: RoleRow, session: Session) -> None:
        if not self._sessions.exists(session):
            return
        row = tables.topics.intact(session.topic, "its waiters are notified with less detail")
        if session.id == role.seat and not role.held:
            error = next(filter(None, (unusable(tables.topics.get(t)) for t in role.topics)), None)
            text = f"role {role.name!r}: this request was ended: " + (
                str(error) if error is not None else "it is no longer queued on one of its topics"
            )
            kind = TERMINATED if isinstance(error, TopicTerminatedError) else FENCED
            tables.notifications.post(session, kind, text)
        elif row is not None and session.epoch:
            tables.notifications.post(session, REVOKED, str(revoked(row, session)))

    def _end_claims(
        self, tables: Tables, claimants: list[Claimant], kind: str, transfer: Transfer | None
    ) -> None:
        for claimant in claimants:
            if kind == "release":
                record_claim(tables, claimant, "release", ROLE, source=claimant)
            else:
                why = (
                    self._sessions.end_of(claimant) if not self._sessions.alive(claimant) else ROLE
                )
                record_claim(tables, claimant, "revoke", why, source=claimant)
            if kind != "release" or transfer is not None:
                self._notify_claimant(tables, claimant, transfer)
        if claimants:
            self._sessions.end_claims(tables, claimants, kind)

    def _notify_claimant(
        self, tables: Tables, claimant: Claimant | None, to: Transfer | None
    ) -> None:
        if claimant is None or not self._sessions.exists(claimant):
            return
        if to is not None:
            tables.notifications.post(
                claimant, CLAIM_MOVED, to.target, to.name, to.pid, to.properties
            )
        else:
            name = next(iter(claimant.generations), "")
            what = f"role {name!r}" if claimant.group == ANCHORS else f"group {claimant.group!r}"
            tables.notifications.post(
                claimant, CLAIM_LOST, f"{what}: it was lost with all that its role binds"
            )


class RoleGrants:
    """All changes of the holders and waiters of one ledger's roles, as steps of transactions."""

    def __init__(self, sessions: Succession) -> None:
        self._sessions = sessions
        self._obstacles = Obstacles(sessions)
        self._ends = RoleEnds(sessions)

    # ---- request -------------------------------------------------------------------------

    def evict_dead(self, tables: Tables, definition: RoleDefinition, mode: str) -> None:
        """Evict sessions of dead engines from the role's topics."""
        for topic in sorted(definition.topics):
            self._sessions.evict_dead(tables, tables.topics.get(topic), mode)

    def register(
        self, tables: Tables, row: _core.TopicRow, seat: Session, definition: RoleDefinition
    ) -> None:
        """Write the request, and the anchor that its parts are bound to."""
        role = RoleRow(
            seat.bound_to,
            row.id,
            seat.id,
            row.name.removeprefix(PREFIX),
            list(definition.topics),
            definition.groups,
            definition.claims,
        )
        role_rows.put(tables, role)
        tables.claims.put_claimant(_claimant(seat, role.claim, ANCHORS, {}, reads=False))

    def queue(self, tables: Tables, seat: Session) -> None:
        """Queue a part on each of the role's topics, at the same place as the seat."""
        role = role_rows.find(tables, seat.bound_to)
        assert role is not None
        for topic in role.topics:
            row = tables.topics.get(topic)
            part = self._part(tables, role, seat, topic)
            role.parts[topic] = part.id
            tables.sessions.put_waiter(part)
            row.waiting += 1
            owner = owner_of(tables, row)
            if owner is not None and owner.notify_on_contention:
                tables.notifications.post(owner, WANTED)
            tables.topics.put(row)
        role_rows.put(tables, role)
        # One may be reserved: this notifies the waiter when to retry.
        tables.to_promote.update(role.topics)

    def _part(self, tables: Tables, role: RoleRow, seat: Session, topic: int) -> Session:
        number = role.parts.get(topic) or tables.rows.next_id(b"session")
        return seat._replace(
            id=number,
            topic=topic,
            name=role.name,
            claimed_epoch=None,
            settle=0,
            lineage=0,
            epoch=0,
            notify_on_contention=False,
            properties={ROLE: role.name},
            announce=None,
        )

    # ---- grant ---------------------------------------------------------------------------

    def check_free(self, tables: Tables, seat: Session) -> bool:
        """Is every part of the role free, for a request that is not queued? If not, and it does not
        wait, raises ProducerFencedError, which names the obstacle."""
        role = role_rows.find(tables, seat.bound_to)
        assert role is not None
        obstacle = self._obstacles.find(tables, role, seat, None)
        if obstacle is None:
            return True
        if obstacle.error is not None:
            raise obstacle.error
        if not seat.waits:
            raise ProducerFencedError(
                f"role {role.name!r} is not free: {obstacle.text}; wait_for_exclusive waits for "
                "it, exclusive_with_fencing takes it",
                holder=obstacle.holder,
            )
        return False

    def granted(self, tables: Tables, seat: Session) -> None:
        """Grant all parts of the role, because its seat was granted. Raises if one is not free."""
        role = role_rows.find(tables, seat.bound_to)
        if role is None or role.seat != seat.id:
            return  # a producer that is bound to a claim
        for topic in role.topics:
            self._take_topic(tables, role, seat, topic)
        for group, wanted, reads in role.wanted():
            claimant = steps.take_claims(
                self._sessions, tables, _claimant(seat, 0, group, {}, reads), group, wanted
            )
            role_rows.claim_part(tables, claimant.id, role)
        role.held = True
        role_rows.put(tables, role)
        self._sessions.transfers.end_reservations(
            tables, role.topic, seat.engine, "not of the role any more"
        )
        role_rows.put_last(tables, role)
        token = {role.name: seat.epoch}
        tables.claims.put_claimant(_claimant(seat, role.claim, ANCHORS, token, reads=False))

    def _take_topic(self, tables: Tables, role: RoleRow, seat: Session, topic: int) -> None:
        row = tables.topics.get(topic)
        check_usable(row)
        part = self._part(tables, role, seat, topic)
        part = part._replace(epoch=row.epoch + 1, lineage=part.id, since=seat.since)
        if topic in role.parts and tables.sessions.drop_waiter(part):
            row.waiting -= 1
        if seat.fences:
            self._sessions.evict_all(tables, row, part)
        assert (row.owner, row.shared) == (0, 0), f"topic {row.name!r} was taken twice"
        transfer = tables.transfers.get(topic)
        if transfer is not None and transfer.target == seat.engine:
            tables.transfers.drop(topic)
        elif transfer is not None:
            self._sessions.transfers.cancel(tables, row, transfer, OVERTAKEN)
        tables.sessions.put_holder(part)
        row.owner, row.epoch = part.id, part.epoch
        row.flags &= ~_core.RECREATED
        sequence, _ = tables.producers.get(topic, part.name)
        tables.producers.put(topic, part.name, sequence, part.id, given=False)
        record(tables, row, "grant", ROLE, target=part)
        tables.topics.put(row)
        tables.announce.add(topic)
        role.parts[topic] = part.id

    # ---- the end -------------------------------------------------------------------------

    def settle(self, tables: Tables) -> None:
        """Carry out recorded ends, then grant free roles. Called before the commit."""
        while tables.role_ends or tables.to_promote:
            freed = False
            while tables.role_ends:
                claim = next(iter(tables.role_ends))
                freed |= self._ends.end(tables, claim, tables.role_ends.pop(claim))
            if freed:  # once for all that end: thousands may, with their engine
                tables.to_promote.update(topic for _, topic in role_rows.role_topics(tables))
            topics, tables.to_promote = tables.to_promote, set()
            self._promote(tables, topics)

    # ---- promote -------------------------------------------------------------------------

    def _promote(self, tables: Tables, topics: Iterable[int]) -> None:
        """Promote the waiters of these topics, roles first: the topics of a role that cannot be
        granted go to the producers in their queues (rule D4)."""
        plain: set[int] = set()
        roles: set[int] = set()
        for topic in topics:
            row = tables.topics.intact(topic, "no waiter is promoted there")
            if row is None:
                continue
            (roles if is_role(row.name) else plain).add(topic)
            requests = role_rows.requests_on(tables, topic)
            roles.update(r.topic for each in requests if (r := role_rows.find(tables, each)))
        for topic in self._by_their_best(tables, roles):
            self._promote_one(tables, topic, self._grantable)
        for topic in sorted(plain):
            self._promote_one(tables, topic, self._plain)

    def _by_their_best(self, tables: Tables, roles: Iterable[int]) -> list[int]:
        best = {role: next(tables.sessions.waiters(role), None) for role in roles}
        waiting = sorted((_place(b), role) for role, b in best.items() if b is not None)
        return [role for _, role in waiting] + [role for role, b in best.items() if b is None]

    def _promote_one(
        self,
        tables: Tables,
        topic: int,
        choose: Callable[[Tables, _core.TopicRow], Iterator[tuple[bytes, bytes]]],
    ) -> None:
        row = tables.topics.intact(topic, "no waiter is promoted there")
        if row is None:
            return
        granted = self._sessions.promote_now(tables, row, choose)
        tables.topics.put(row)
        if granted is not None and is_role(row.name):
            self.granted(tables, granted)

    def _grantable(self, tables: Tables, row: _core.TopicRow) -> Iterator[tuple[bytes, bytes]]:
        """The waiters for a role that could get all its parts now."""
        for key, data, seat in self._living_in_queue(tables, row):
            role = role_rows.find(tables, seat.bound_to)
            found = (
                self._obstacles.find(tables, role, seat, _place(seat)) if role is not None else None
            )
            if role is not None and found is None:
                yield key, data
            elif role is not None and found is not None and found.error is not None:
                self._refuse(tables, role, seat, found.error)

    def _refuse(
        self, tables: Tables, role: RoleRow, seat: Session, error: ExclusiveLogError
    ) -> None:
        role_rows.end_role(tables, role, ("evict", ROLE, seat.id))
        tables.notifications.post(
            seat, FENCED, f"role {role.name!r} cannot be granted any more: {error}"
        )

    def _plain(self, tables: Tables, row: _core.TopicRow) -> Iterator[tuple[bytes, bytes]]:
        """The waiters for a topic without the parts of roles, which are granted with their seats.
        While the topic is reserved, other engines' parts are included, to be told when to retry."""
        transfer = tables.transfers.get(row.id)
        for key, data, waiter in self._living_in_queue(tables, row):
            part = role_rows.role_of_session(tables, waiter) is not None
            elsewhere = transfer is not None and transfer.target != waiter.engine
            if not part or elsewhere:
                yield key, data

    def _living_in_queue(
        self, tables: Tables, row: _core.TopicRow
    ) -> Iterator[tuple[bytes, bytes, Session]]:
        """The live waiters. Dead ones are removed here: one that resumes its heartbeats before the
        selection must not be selected without the parts of its role."""
        for key, data, waiter in list(_queue(tables, row)):
            if self._sessions.alive(waiter):
                yield key, data, waiter
            else:
                self._sessions.remove_dead(tables, row, waiter)
                tables.to_promote.add(row.id)  # a role may have waited for this one


def _queue(tables: Tables, row: _core.TopicRow) -> Iterator[tuple[bytes, bytes, Session]]:
    for key, data in tables.rows.under("queue", row.id):
        yield row_key(row.id, key), data, unpack_session(data)


def row_key(topic: int, key: bytes) -> bytes:
    """The key of a row, with the topic's id in front."""
    return topic.to_bytes(8, "big") + key


def _claimant(
    seat: Session, number: int, group: str, generations: dict[str, int], reads: bool
) -> Claimant:
    return Claimant(
        number,
        seat.engine,
        seat.slot,
        seat.pid,
        seat.engine_name,
        group,
        generations,
        time.time_ns() // 1_000_000,
        dict(seat.engine_properties),
        reads,
    )
