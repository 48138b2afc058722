"""Tables about who may write: sessions, claims, hand-overs, notifications."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import msgpack

from exclusivelog.local.records import (
    CLAIMANT_FIELDS,
    Claimant,
    Known,
    Session,
    Transfer,
    pack_session,
    unpack_session,
    widened,
)
from exclusivelog.local.storage.rows import PAIR, PRIORITIES, U64, Rows, u64

log = logging.getLogger("exclusivelog")
PLACE = struct.Struct(">QQQIQ")
INDEX = struct.Struct(">QBQ")
SLOT = struct.Struct(">H")
KNOWN = struct.Struct(">qq")
HIGHEST_PRIORITY = 2**63 - 1
HOLDER, WAITER = 0, 1
TRANSFER_FIELDS = [field.name for field in fields(Transfer)]


class SessionTable:
    """Sessions, admitted or waiting, by topic, by engine and by claim."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def holder(self, topic: int, session: int) -> Session | None:
        """An admitted session."""
        return self.rows.find("holders", PAIR.pack(topic, session), unpack_session)

    def holds(self, topic: int, session: int) -> bool:
        """Is this session admitted?"""
        return self.rows.get("holders", PAIR.pack(topic, session)) is not None

    def holders(self, topic: int) -> list[Session]:
        """All admitted sessions of a topic."""
        return list(self._sessions("holders", topic))

    def put_holder(self, session: Session) -> None:
        """Register an admitted session."""
        key = PAIR.pack(session.topic, session.id)
        self.rows.put("holders", key, pack_session(session))
        self._index(session, HOLDER, key)

    def drop_holder(self, session: Session) -> None:
        """Remove an admitted session."""
        self.rows.delete("holders", PAIR.pack(session.topic, session.id))
        self._unindex(session, HOLDER)

    def waiters(self, topic: int) -> Iterator[Session]:
        """The topic's queue, best first (rule D1). Lazy; do not change it while walking."""
        return self._sessions("queue", topic)

    def queue(self, topic: int) -> Iterable[tuple[bytes, bytes]]:
        """(key, data) of the queue's rows from the topic's best waiter on, behind its last one
        those of other topics: what `admission.promote` walks."""
        cursor = self.rows.cursor("queue")
        return cursor if cursor.set_range(U64.pack(topic)) else ()

    def waiting(self, session: Session) -> bool:
        """Is this session still in the queue?"""
        return self.rows.get("queue", queue_key(session)) is not None

    def put_waiter(self, session: Session) -> None:
        """Put a session into the queue."""
        key = queue_key(session)
        self.rows.put("queue", key, pack_session(session))
        self._index(session, WAITER, key)

    def drop_waiter(self, session: Session) -> bool:
        """Take a session out of the queue; False if it was not there."""
        self._unindex(session, WAITER)
        return self.rows.delete("queue", queue_key(session))

    def known(self, topic: int) -> Known | None:
        """The best and the lowest priority of the topic's waiters so far; None before one of
        them has had it (rule D7)."""
        return self.rows.find("meta", PRIORITIES + U64.pack(topic), KNOWN.unpack)

    def learn(self, topic: int, *priorities: int) -> None:
        """Widen what `known` reads by these priorities, and by those of the queue."""
        known = self.known(topic)
        found = widened(known, *priorities, *self._ends_of_queue(topic))
        if found != known:
            self.rows.put("meta", PRIORITIES + U64.pack(topic), KNOWN.pack(*found))

    def _ends_of_queue(self, topic: int) -> Iterator[int]:
        """The priorities of its first and of its last waiter, if there is one."""
        cursor = self.rows.cursor("queue")
        if cursor.set_range(U64.pack(topic)) and cursor.key().startswith(U64.pack(topic)):
            yield HIGHEST_PRIORITY - PLACE.unpack(cursor.key())[1]
            if cursor.prev() if cursor.set_range(U64.pack(topic + 1)) else cursor.last():
                yield HIGHEST_PRIORITY - PLACE.unpack(cursor.key())[1]

    def _sessions(self, table: str, topic: int) -> Iterator[Session]:
        for _, data in self.rows.under(table, topic):
            yield self.rows.decode(table, unpack_session, data)

    def _index(self, session: Session, kind: int, key: bytes) -> None:
        index = INDEX.pack(int(session.engine, 16), kind, session.id)
        self.rows.put("engines", index, SLOT.pack(session.slot) + key)
        if session.bound_to:
            binding = PAIR.pack(session.bound_to, session.id)
            self.rows.put("claimants", binding, bytes([kind]) + key)

    def _unindex(self, session: Session, kind: int) -> None:
        index = INDEX.pack(int(session.engine, 16), kind, session.id)
        self.rows.delete("engines", index)
        if session.bound_to:
            self.rows.delete("claimants", PAIR.pack(session.bound_to, session.id))

    def engines(self) -> Iterator[tuple[str, int]]:
        """(engine id, slot) of every engine that has sessions here, dead or alive."""
        cursor = self.rows.cursor("engines")
        found = cursor.first()
        while found:
            engine = INDEX.unpack(cursor.key())[0]
            yield f"{engine:016x}", SLOT.unpack(cursor.value()[:2])[0]
            found = cursor.set_range(INDEX.pack(engine, 255, 0))

    def bound_to(self, claimant: int) -> list[Session]:
        """The sessions, admitted or waiting, of the producers that are bound to a claim."""
        rows = self.rows.under("claimants", claimant)
        return self._found((value[0], value[1:]) for key, value in rows if key)

    def _found(self, places: Iterable[tuple[int, bytes]]) -> list[Session]:
        found: list[Session] = []
        for kind, key in places:
            table = "holders" if kind == HOLDER else "queue"
            data = self.rows.get(table, key)
            if data is not None:
                found.append(self.rows.decode(table, unpack_session, data))
        return found

    def topics_of(self, engine: str) -> Iterator[int]:
        """The topics that an engine's sessions hold or await, one by one."""
        for _, value in self.rows.under("engines", int(engine, 16)):
            yield u64(value[2:10])

    def of_engine(self, engine: str) -> list[Session]:
        """An engine's sessions, those that hold a topic first."""
        rows = self.rows.under("engines", int(engine, 16))
        return self._found((key[0], value[SLOT.size :]) for key, value in rows)


class NotificationTable:
    """What engines are told of changes of ownership."""

    __slots__ = ("ring", "rows")

    def __init__(self, rows: Rows, ring: set[int]) -> None:
        self.rows, self.ring = rows, ring

    def post(self, session: Session | Claimant, kind: str, *details: Any) -> None:
        """Tell the session's engine what became of it, once this is durable."""
        key = PAIR.pack(int(session.engine, 16), self.rows.next_id(b"mail"))
        self.rows.put("mail", key, msgpack.packb([kind, session.id, *details]))
        self.ring.add(session.slot)

    def read(self, engine: str, after: int) -> list[tuple[int, list[Any]]]:
        """(number, [kind, session, ...]) of an engine's mail behind number `after`."""
        rows = self.rows.under("mail", int(engine, 16), U64.pack(after + 1))
        return [(u64(key), self.rows.decode("mail", msgpack.unpackb, data)) for key, data in rows]

    def engines(self) -> Iterator[str]:
        """The engines that have mail, dead or alive."""
        cursor = self.rows.cursor("mail")
        found = cursor.first()
        while found:
            box, _ = PAIR.unpack(cursor.key())
            yield f"{box:016x}"
            found = cursor.set_range(PAIR.pack(box, 2**64 - 1))

    def drop(self, engine: str, up_to: int) -> None:
        """Delete an engine's mail up to a number."""
        cursor = self.rows.cursor("mail")
        box = int(engine, 16)
        while cursor.set_range(PAIR.pack(box, 0)):
            owner, number = PAIR.unpack(cursor.key())
            if owner != box or number > up_to:
                break
            cursor.delete()


class ClaimTable:
    """Claims of resources, and the claim sessions that have them (rules F1-F5)."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def claim(self, group: str, resource: str) -> tuple[int, int]:
        """(last generation or 0, claimant or 0) of a resource."""
        return self.rows.find("claims", claim_key(group, resource), PAIR.unpack) or (0, 0)

    def put_claim(self, group: str, resource: str, generation: int, claimant: int) -> None:
        """Write what `claim` reads."""
        row = PAIR.pack(generation, claimant)
        self.rows.put("claims", claim_key(group, resource), row)

    def claimant(self, claimant: int) -> Claimant | None:
        """A claim session, if it was not severed or released."""
        return self.rows.find("claimants", U64.pack(claimant), _unpack_claimant)

    def put_claimant(self, claimant: Claimant) -> None:
        """Register a claim session."""
        row = msgpack.packb([getattr(claimant, name) for name in CLAIMANT_FIELDS])
        self.rows.put("claimants", U64.pack(claimant.id), row)

    def claimants(self) -> Iterator[Claimant]:
        """All claim sessions, in the order in which they were made, dead or alive."""
        for key, data in self.rows.cursor("claimants"):
            if len(key) == U64.size:
                yield self.rows.decode("claimants", _unpack_claimant, data)

    def drop_claimant(self, claimant: int) -> None:
        """Remove a claim session."""
        self.rows.delete("claimants", U64.pack(claimant))


class TransferTable:
    """Hand-overs of topics, and of single shared producers."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def get(self, topic: int) -> Transfer | None:
        """The topic's hand-over that is under way, or was given up half-way."""
        return self.rows.find("transfers", U64.pack(topic), _unpack_transfer)

    def put(self, transfer: Transfer) -> None:
        """Write what `transfer` reads."""
        self.rows.put("transfers", U64.pack(transfer.topic), _pack_transfer(transfer))

    def drop(self, topic: int) -> None:
        """The hand-over has ended, one way or another."""
        self.rows.delete("transfers", U64.pack(topic))

    def seat(self, topic: int, session: int) -> Transfer | None:
        """The hand-over of one shared producer's session (see seats.py)."""
        return self.rows.find("transfers", PAIR.pack(topic, session), _unpack_transfer)

    def seats(self, topic: int) -> Iterator[tuple[int, Transfer]]:
        """(session, hand-over) of every shared producer of a topic that moves by itself."""
        for key, data in self.rows.under("transfers", topic):
            if key:
                yield u64(key), self.rows.decode("transfers", _unpack_transfer, data)

    def put_seat(self, session: int, seat: Transfer) -> None:
        """Write what `seat` reads."""
        self.rows.put("transfers", PAIR.pack(seat.topic, session), _pack_transfer(seat))

    def drop_seat(self, topic: int, session: int) -> None:
        """This session moves no longer."""
        self.rows.delete("transfers", PAIR.pack(topic, session))


def queue_key(session: Session) -> bytes:
    """Sorts as rule D1 says: priority, then creation, then the random tie."""
    return PLACE.pack(
        session.topic, HIGHEST_PRIORITY - session.priority, session.created, session.tie, session.id
    )


def claim_key(group: str, resource: str) -> bytes:
    """No two pairs of names have the same one."""
    prefix = group.encode()
    return bytes([len(prefix)]) + prefix + resource.encode()


def _unpack_claimant(data: bytes) -> Claimant:
    return Claimant(*msgpack.unpackb(data))


def _pack_transfer(transfer: Transfer) -> bytes:
    facts = [getattr(transfer, name) for name in TRANSFER_FIELDS]
    if not transfer.groups:  # then the row is one that earlier versions read, too
        facts.pop()
    packed: bytes = msgpack.packb(facts)
    return packed


def _unpack_transfer(data: bytes) -> Transfer:
    transfer = Transfer(*msgpack.unpackb(data))
    return replace(transfer, groups=tuple(transfer.groups))
