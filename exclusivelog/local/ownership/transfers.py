"""Handing topics over to an engine that is named in advance (PIP-307, rules E1-E4).

A move is a row in the table `transfers`, and every step one transaction for many topics. Only
the first step lets producers go on sending, where it changes no owner:

```text
Owned(a, e)      nothing under way
Releasing        the row names the destination, and the session that is to release the topic:
                 its engine is notified, lets sends wait, and commits what it has accepted
Assigned(b)      the session is released, and the row excludes every engine but b
Owned(b, e+1)    b's best waiter, or its next producer, has the topic; the row is gone
```

The claims of the groups that the call names move in the transaction that assigns the topic; one
shared producer moves as steps.py describes. The last two are one transaction where b has a waiter.
The row ends by itself: at its deadline, with the death of its destination, or when another
session becomes owner first. So after the death of any process, at any step, the topic has its old
owner or its new one, or is promoted as usual.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from exclusivelog import _core
from exclusivelog.admission import HANDED_OVER
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerCorruptedError,
    LedgerFullError,
    TopicNotFoundError,
)
from exclusivelog.local.faults import apart_if_damaged
from exclusivelog.local.ownership import role_rows, steps
from exclusivelog.local.ownership.recording import record
from exclusivelog.local.ownership.steps import MOVES, RELEASE
from exclusivelog.local.records import Session, Transfer, describe, is_role, owner_info
from exclusivelog.local.storage.tables import Tables, fenced, owner_of
from exclusivelog.refusals import NO_OWNER, moves_to, not_there, nothing_to_move, state_of_move
from exclusivelog.types import EngineInfo, Move, TransferInfo

if TYPE_CHECKING:
    from exclusivelog.local.ownership.sessions import Succession
    from exclusivelog.local.storage.ledger import Ledger

POLL_SECONDS = 0.25  # a death sends no wake-up
STAYS = "its hand-over is left as it is"


class Released(NamedTuple):
    """The outcome for one session that was to be handed over. `to`: where its topic went; None: the
    session keeps it."""

    session: int
    to: Transfer | None


class Wish(NamedTuple):
    """The arguments of a hand-over: the destination engine and its slot in the lock file, the
    deadline (ns of the monotonic clock), the groups whose claims move along, and the name of the
    one shared producer to move, if not the ownership. `session`: that producer's, if it moves
    itself."""

    to: EngineInfo
    slot: int
    until: int
    groups: tuple[str, ...] = ()
    producer: str | None = None
    session: Session | None = None


class Begun(NamedTuple):
    """A hand-over that has begun. `lineage`: of the seat that moves; 0: the topic moves."""

    move: Move
    lineage: int = 0


class HandOver:
    """The steps of hand-overs, each one transaction."""

    def __init__(self, ledger: Ledger, succession: Succession) -> None:
        self._ledger = ledger
        self._succession = succession
        self._transfers = succession.transfers

    # ---- Releasing -----------------------------------------------------------------------

    def begin(self, names: Sequence[str], wish: Wish) -> list[Begun]:
        """Begin to move these topics, all or none; returns the moves. WaitTimeoutError if that
        cannot begin before the deadline."""
        begun: list[Begun] = []
        # Where a read pins the last pages, only what changes owners has room.
        with contextlib.suppress(LedgerFullError):
            begun = self._announce(names, wish)
        return begun or self._begin(names, wish)

    def _announce(self, names: Sequence[str], wish: Wish) -> list[Begun]:
        """Begin to move these topics, while producers go on sending: what may append is not changed
        here. Empty, and nothing is written, if more is to be done for one of them."""
        if wish.producer is not None or wish.groups:
            return []
        with self._ledger.write_concurrent(wish.until) as tables:
            rows = [_existing(tables, name) for name in names]
            owners = [self._owner_to_announce(tables, row, wish) for row in rows]
            pairs = [(row, o) for row, o in zip(rows, owners, strict=True) if o is not None]
            if len(pairs) < len(rows):
                return []
            for row, owner in pairs:
                self._begin_releasing(tables, row, owner, wish)
            return [Begun(_move(row, owner, wish.to, "releasing")) for row, owner in pairs]

    def _owner_to_announce(self, tables: Tables, row: _core.TopicRow, wish: Wish) -> Session | None:
        """The topic's owner, if it is alive, elsewhere, no part of a role, and not moving yet."""
        owner = owner_of(tables, row)
        if owner is None or owner.engine == wish.to.id or not self._succession.alive(owner):
            return None
        if is_role(row.name) or role_rows.owned_by(tables, owner) is not None:
            return None
        return owner if tables.transfers.get(row.id) is None else None

    def _begin_releasing(
        self, tables: Tables, row: _core.TopicRow, owner: Session, wish: Wish
    ) -> None:
        transfer = _transfer(row, wish, owner)
        tables.transfers.put(transfer)
        record(tables, row, "releasing", "unload", source=owner, target=transfer)
        tables.notifications.post(owner, RELEASE, row.id)

    def _begin(self, names: Sequence[str], wish: Wish) -> list[Begun]:
        with self._ledger.write_fencing(wish.until) as tables:
            topics = [_existing(tables, name).id for name in names]
            begun: dict[tuple[int, int], Begun] = {}  # the topics of one role are one move
            for topic in topics:
                # Read its row here: the claims that move with one topic may have changed another.
                one = self._begin_one(tables, tables.topics.get(topic), wish)
                begun.setdefault((one.move.topic_id, one.lineage), one)
            return list(begun.values())

    def not_begun(self, names: Sequence[str], wish: Wish, reason: str) -> list[Begun]:
        """The hand-overs of these topics where none of them could begin; changes nothing."""
        with self._ledger.read() as tables:
            rows = [_existing(tables, name) for name in names]
            return [
                Begun(_move(row, owner_of(tables, row), wish.to, "failed", reason, wish.producer))
                for row in rows
            ]

    def _begin_one(self, tables: Tables, row: _core.TopicRow, wish: Wish) -> Begun:
        self._succession.evict_dead(tables, row, "exclusive")
        if wish.session is not None and not tables.sessions.holds(row.id, wish.session.id):
            raise fenced(tables, row, wish.session)  # a successor may have its name (rule B3)
        role = role_rows.owned_by(tables, owner_of(tables, row))
        if role is not None:  # it moves as a whole
            return Begun(self._begin_topic(tables, tables.topics.get(role), wish))
        if wish.producer is None:
            return Begun(self._begin_topic(tables, row, wish))
        _, number = tables.producers.get(row.id, wish.producer)
        holder = tables.sessions.holder(row.id, number) if number else None
        if holder is None:
            owner, why = owner_of(tables, row), not_there(wish.producer)
            return Begun(_move(row, owner, wish.to, "failed", why, wish.producer))
        if holder.exclusive:
            return Begun(replace(self._begin_topic(tables, row, wish), producer=wish.producer))
        return Begun(self._begin_seat(tables, row, holder, wish), holder.lineage)

    def _begin_seat(self, tables: Tables, row: _core.TopicRow, holder: Session, wish: Wish) -> Move:
        to, seat = wish.to, tables.transfers.seat(row.id, holder.id)
        if holder.engine != to.id and seat is not None and seat.target != to.id:
            other = moves_to(seat.name, seat.target)
            return _move(row, holder, to, "failed", other, holder.name)
        if holder.engine != to.id and seat is not None and not seat.session:
            other = f"it is reserved for engine {seat.name!r} (id {seat.target})"
            return _move(row, holder, to, "failed", other, holder.name)
        if holder.engine != to.id:
            wanted = _transfer(row, wish, holder)
            if seat is not None:
                wanted = _prolonged(seat, wish)
            else:
                record(tables, row, "releasing", "producer", source=holder, target=wanted)
            tables.transfers.put_seat(holder.id, wanted)
            tables.notifications.post(holder, RELEASE, row.id)
            tables.topics.put(row)
        else:
            self._move_claims(tables, row, wish, holder)
        return self._inspect_seat(tables, row, to, holder.lineage, holder)

    def _move_claims(
        self, tables: Tables, row: _core.TopicRow, wish: Wish, holder: Session | None
    ) -> None:
        """Move the claims of the groups to a destination that has the topic already."""
        if wish.groups:
            self._succession.move_claims(tables, row, _transfer(row, wish, holder))

    def _begin_topic(self, tables: Tables, row: _core.TopicRow, wish: Wish) -> Move:
        to = wish.to
        under_way = self._transfers.current(tables, row)
        owner = owner_of(tables, row)
        if owner is not None and owner.engine == to.id:
            self._move_claims(tables, row, wish, owner)
            return _move(row, owner, to, "owned")
        if under_way is not None and under_way.target != to.id:
            return _move(row, owner, to, "failed", moves_to(under_way.name, under_way.target))
        if row.shared:
            return _move(
                row,
                owner,
                to,
                "failed",
                f"{NO_OWNER}; producer= moves one of them",
            )
        if under_way is not None:  # it was requested before: only extend its deadline
            prolonged = _prolonged(under_way, wish)
            tables.transfers.put(prolonged)
            if is_role(row.name):
                self._transfers.prolong_reservations(tables, row.id, prolonged)
            if owner is not None:
                tables.notifications.post(owner, RELEASE, row.id)
            else:
                self._move_claims(tables, row, wish, None)
                # A waiter may have been notified to retry later.
                self._succession.promote(tables, row)
                tables.topics.put(row)
            return self._inspect(tables, row, to)
        if owner is None:
            self._succession.assign(tables, row, _transfer(row, wish, owner))
            self._succession.promote(tables, row)
        else:
            self._begin_releasing(tables, row, owner, wish)
        tables.topics.put(row)
        return self._inspect(tables, row, to)

    # ---- Assigned, Owned -----------------------------------------------------------------

    def release(self, sessions: Iterable[tuple[int, int]]) -> list[Released]:
        """Release the drained sessions of an engine, given as (session, topic), that are still to
        be handed over."""

        def release(some: Sequence[tuple[int, int]]) -> list[Released]:
            with self._ledger.write_fencing() as tables:
                return [
                    Released(session, self._release_one(tables, topic, session))
                    for session, topic in some
                ]

        return apart_if_damaged(self._ledger.path, list(sessions), release, STAYS)

    def _release_one(self, tables: Tables, topic: int, session_id: int) -> Transfer | None:
        row = tables.topics.intact(topic, STAYS)
        if row is None:
            return None  # do not keep the others from being released
        holder = tables.sessions.holder(topic, session_id)
        transfer = self._transfers.current(tables, row)
        if transfer is None or holder is None or transfer.session != session_id:
            if holder is not None:
                return self._release_seat(tables, row, holder)
            # It was evicted while it drained, and the call above may have ended the hand-over:
            # promote.
            self._succession.promote(tables, row)
            tables.topics.put(row)
            return None
        self._succession.drop_holder(tables, row, holder, "release", HANDED_OVER, transfer)
        self._succession.assign(tables, row, transfer, holder)
        self._succession.promote(tables, row)
        tables.topics.put(row)
        return transfer

    def _release_seat(
        self, tables: Tables, row: _core.TopicRow, holder: Session
    ) -> Transfer | None:
        seat = tables.transfers.seat(row.id, holder.id)
        if seat is None or not seat.session:
            return None
        if not self._transfers.can_succeed(seat):
            steps.end_overdue_seats(self._succession, tables, row)
            tables.topics.put(row)
            tables.announce.add(MOVES)
            return None
        self._succession.drop_holder(tables, row, holder, "release", HANDED_OVER, seat)
        self._succession.promote(tables, row)
        tables.topics.put(row)
        return seat

    # ---- the end -------------------------------------------------------------------------

    def cancel(
        self, topics: Iterable[int], reason: str, until: int | None = None, limit: int = 0
    ) -> list[str]:
        """End hand-overs (only those with this deadline, unless None). An owner keeps its topic,
        and a free topic gets its best waiter. Returns the names of the topics. WaitTimeoutError if
        that cannot begin before `limit`."""

        def cancel(some: Sequence[int]) -> list[str]:
            with self._ledger.write_fencing(limit) as tables:
                found = [self._cancel_one(tables, topic, reason, until) for topic in some]
                tables.announce.add(MOVES)
            return [name for name in found if name]

        return apart_if_damaged(self._ledger.path, list(topics), cancel, STAYS)

    def _cancel_one(self, tables: Tables, topic: int, reason: str, until: int | None) -> str:
        """The name of the topic, if its hand-over was ended; else ""."""
        row = tables.topics.intact(topic, STAYS)
        if row is None:
            return ""
        transfer = self._transfers.current(tables, row)
        ended = transfer is not None and until in (None, transfer.until)
        if ended and transfer is not None:
            self._transfers.cancel(tables, row, transfer, reason)
        else:
            ended = steps.cancel_seats(self._succession, tables, row, reason, until)
        self._succession.promote(tables, row)
        tables.topics.put(row)
        return row.name if ended else ""

    # ---- inspect -------------------------------------------------------------------------

    def inspect(self, begun: Iterable[Begun]) -> list[Move | ExclusiveLogError]:
        """The present states of these hand-overs; where a topic's rows are damaged, or it was
        deleted, that error: it is no outcome of the others."""
        with self._ledger.read() as tables:
            return [self._inspect_or_error(tables, each) for each in begun]

    def _inspect_or_error(self, tables: Tables, begun: Begun) -> Move | ExclusiveLogError:
        try:
            return self._inspect_again(tables, begun)
        except (LedgerCorruptedError, TopicNotFoundError) as error:
            return error

    def _inspect_again(self, tables: Tables, begun: Begun) -> Move:
        move = begun.move
        row = tables.topics.get(move.topic_id)
        if begun.lineage:
            return self._inspect_seat(tables, row, move.target, begun.lineage, None, move.producer)
        return replace(self._inspect(tables, row, move.target), producer=move.producer)

    def _inspect_seat(
        self,
        tables: Tables,
        row: _core.TopicRow,
        to: EngineInfo,
        lineage: int,
        holder: Session | None,
        name: str | None = None,
    ) -> Move:
        holder = holder or steps.held_seat(tables, row.id, lineage)
        if holder is None:
            return _move(row, None, to, "failed", "its producer is gone", name)
        name = name or holder.name
        if holder.engine == to.id:
            state = "assigned" if steps.is_reserved(tables, holder) else "owned"
            return _move(row, holder, to, state, producer=name)
        seat = tables.transfers.seat(row.id, holder.id)
        if seat is not None and seat.target == to.id and self._succession.now() < seat.until:
            return _move(row, holder, to, "releasing", producer=name)
        return _move(row, holder, to, "failed", f"it is held by {describe(holder)}", name)

    def _inspect(self, tables: Tables, row: _core.TopicRow, to: EngineInfo) -> Move:
        # The owner, or shared producers.
        there = next((h for h in tables.sessions.holders(row.id) if h.engine == to.id), None)
        holder = there or owner_of(tables, row)
        transfer = tables.transfers.get(row.id)
        state, reason = state_of_move(
            arrived=there is not None,
            in_transit=transfer is not None
            and transfer.target == to.id
            and self._succession.now() < transfer.until,
            holder=None if holder is None else owner_info(holder),
        )
        return _move(row, holder, to, state, reason)

    def transfers(self, topic: int) -> list[TransferInfo]:
        """The hand-overs in progress of a topic and of its shared producers."""
        with self._ledger.read() as tables:
            row = tables.topics.get(topic)
            return [
                _transfer_info(row, holder, transfer, moves_alone)
                for holder, transfer, moves_alone in self._under_way(tables, row)
                if self._transfers.can_succeed(transfer)
            ]

    def _under_way(
        self, tables: Tables, row: _core.TopicRow
    ) -> Iterator[tuple[Session | None, Transfer, bool]]:
        transfer = tables.transfers.get(row.id)
        if transfer is not None and row.owner in (0, transfer.session) and not row.shared:
            yield owner_of(tables, row), transfer, False
        for holder, seat in steps.seats_under_way(tables, row.id):
            yield holder, seat, True

    def changes(self) -> int:
        """A counter that every step of a hand-over increments."""
        lockfile = self._ledger.lockfile
        found: int = lockfile.atomics.load(lockfile.counters.place(MOVES))
        return found

    def wait_for_a_change(self, seen: int, seconds: float) -> None:
        """Sleep until a hand-over makes a step, or it is time to check for dead engines."""
        lockfile = self._ledger.lockfile
        left = min(seconds, POLL_SECONDS)
        lockfile.counters.wait(lockfile.counters.place(MOVES), seen, left, spin=False)


def _existing(tables: Tables, name: str) -> _core.TopicRow:
    row = tables.topics.find(name)
    if row is None:
        raise nothing_to_move(name)
    return row


def _move(
    row: _core.TopicRow,
    owner: Session | None,
    to: EngineInfo,
    state: str,
    reason: str = "",
    producer: str | None = None,
) -> Move:
    source = None if owner is None else owner_info(owner)
    return Move(row.name, row.id, row.epoch, source, to, state, reason, producer)


def _transfer(row: _core.TopicRow, wish: Wish, holder: Session | None) -> Transfer:
    return Transfer(
        row.id,
        wish.to.id,
        wish.slot,
        wish.until,
        0 if holder is None else holder.id,
        wish.to.name,
        wish.to.pid,
        dict(wish.to.properties),
        0 if holder is None else holder.lineage,
        wish.groups,
    )


def _prolonged(under_way: Transfer, wish: Wish) -> Transfer:
    """The hand-over, with the deadline and groups of a repeated request."""
    groups = tuple(dict.fromkeys((*under_way.groups, *wish.groups)))
    return under_way._replace(until=max(wish.until, under_way.until), groups=groups)


def _transfer_info(
    row: _core.TopicRow, holder: Session | None, transfer: Transfer, alone: bool
) -> TransferInfo:
    releasing = bool(transfer.session) and holder is not None
    return TransferInfo(
        topic=row.name,
        state="releasing" if releasing else "assigned",
        source=owner_info(holder) if releasing and holder is not None else None,
        target=EngineInfo(transfer.target, transfer.name, transfer.pid, transfer.properties, 0.0),
        until=time.time_ns() // 1_000_000 + (transfer.until - _core.now()) // 1_000_000,
        producer=holder.name if alone and holder is not None else None,
        groups=transfer.groups,
    )
