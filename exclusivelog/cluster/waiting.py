"""The queue of a topic on a cluster: its records, and the state after folding them.

A producer that waits appends a `Wait`, and a `Leave` if it gives up. Both are **foreign** to
`exclusivelog.cluster.rule` (they have another magic): no epoch, offset or acknowledgement depends
on them. All engines fold the same records in the same order, so that they agree on the first
waiter: the highest priority, then the earliest record (rule D1). Only the first live waiter asks
for a topic that has become free, and the owner is notified that a producer waits.

A topic may be **assigned** to an engine (`exclusivelog.cluster.moving`): then only that engine asks
for it once it is free, until a grant, a join, an `Unassign`, or the deadline of the `Assign`.

- A waiter ends with its `Leave`, or with a grant to its engine and producer name.
- A grant to a producer that fences ends all waiters (rule A1).

A lost, doubled or late record only affects order or time: an engine appends its records again until
it has read them back, and answers a late copy of a `Wait` with another `Leave`.

>>> waiters = Waiters()
>>> for number, priority in enumerate((0, 7)):
...     wait = Wait(number, "e1", "host", 1, f"p{number}", priority, 0)
...     waiters.take(decode(encode(wait)))
>>> [waiter.producer_name for waiter in waiters.in_order()]
['p1', 'p0']
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from exclusivelog.admission import Known, place, reason_of_grant, widened
from exclusivelog.cluster.frames import Grant, Holder, sealed, unsealed
from exclusivelog.types import AccessMode, EngineInfo, WaiterInfo

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = [
    "Assign",
    "Hold",
    "Leave",
    "Noted",
    "Published",
    "Queue",
    "Unassign",
    "Wait",
    "Waiters",
    "Yields",
    "decode",
    "encode",
]

MAGIC = b"XLW"
VERSION = 1
MOST_ENDED = 8


@dataclass(frozen=True, slots=True)
class Wait:
    """A producer waits. `number` is unique; `since` is in ms since 1970. `inherits`: the
    topic can be passed on to it, as it takes it without a delay, under a new epoch;
    `announce`: what it announces then."""

    number: int
    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    priority: int
    since: int
    properties: dict[str, str] = field(default_factory=dict)
    inherits: bool = True
    announce: dict[str, str] | None = None

    def holder(self, since: int) -> Holder:
        """The holder of a grant to it, at this time (ms since 1970)."""
        return Holder(
            self.engine_id,
            self.engine_name,
            self.pid,
            self.producer_name,
            self.access_mode,
            self.priority,
            since,
            self.properties,
        )

    @property
    def access_mode(self) -> AccessMode:
        """The mode of every waiter: its record has none."""
        return AccessMode.WAIT_FOR_EXCLUSIVE

    def info(self) -> WaiterInfo:
        """The waiter as inspections show it."""
        return WaiterInfo(
            engine_id=self.engine_id,
            engine_name=self.engine_name,
            pid=self.pid,
            producer_name=self.producer_name,
            priority=self.priority,
            since=self.since,
            session=self.number,
            properties=self.properties,
            access_mode=self.access_mode,
        )


@dataclass(frozen=True, slots=True)
class Leave:
    """These waiters leave the queue."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """Assigns the topic to an engine, once `session` (0: none) has released it. `since` and `until`
    are in ms since 1970."""

    number: int
    session: int
    engine_id: str
    engine_name: str
    pid: int
    properties: dict[str, str]
    since: int
    until: int

    def prolonged_by(self, record: Assign) -> bool:
        """Does this record, of the same hand-over, give it more time (rule E4)?"""
        return record.number == self.number and record.until > self.until

    @property
    def target(self) -> EngineInfo:
        """The engine, as inspections show it."""
        return EngineInfo(self.engine_id, self.engine_name, self.pid, dict(self.properties), 0.0)


@dataclass(frozen=True, slots=True)
class Unassign:
    """Ends an assignment, for this reason."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Yields:
    """The owner's session, `number`, has agreed to release the topic when another producer
    waits."""

    number: int


@dataclass(frozen=True, slots=True)
class Hold:
    """A request that fences has lost a race with the owner's messages: let the owner's engine
    append no new ones for a moment. `number` is unique."""

    number: int


Noted = Wait | Leave | Assign | Unassign | Yields | Hold


def encode(record: Noted) -> bytes:
    """The bytes of a record."""
    if isinstance(record, Leave):
        row: list[Any] = ["l", list(record.numbers)]
    elif isinstance(record, Unassign):
        row = ["u", record.number, record.reason]
    elif isinstance(record, Yields):
        row = ["y", record.number]
    elif isinstance(record, Hold):
        row = ["h", record.number]
    elif isinstance(record, Assign):
        row = [
            "a",
            record.number,
            record.session,
            record.engine_id,
            record.engine_name,
            record.pid,
            record.properties or None,
            record.since,
            record.until,
        ]
    else:
        row = [
            "w",
            record.number,
            record.engine_id,
            record.engine_name,
            record.pid,
            record.producer_name,
            record.priority,
            record.since,
            record.properties or None,
            record.inherits,
            record.announce,
        ]
    body: bytes = msgpack.packb(row)
    return sealed(MAGIC, VERSION, body)


def decode(data: bytes) -> Noted | None:
    """Decode a record of the queue. None for any other, also for damaged ones and those of another
    version, as safety does not depend on them."""
    body = unsealed(MAGIC, VERSION, data)
    if body is None:
        return None
    try:
        return _record(msgpack.unpackb(body))
    except (TypeError, ValueError, msgpack.UnpackException):  # undamaged, but of another program
        return None


def _record(row: list[Any]) -> Noted:
    kind, *fields = row
    if kind == "l":
        (numbers,) = fields
        return Leave(tuple(map(int, numbers)))
    if kind == "y":
        (number,) = fields
        return Yields(int(number))
    if kind == "h":
        (number,) = fields
        return Hold(int(number))
    if kind == "u":
        number, *reason = fields  # an earlier version wrote no reason
        return Unassign(int(number), str(reason[0]) if reason else "cancelled")
    if kind == "a":
        number, session, engine, name, pid, properties, since, until = fields
        return Assign(
            int(number),
            int(session),
            str(engine),
            str(name),
            int(pid),
            dict(properties or {}),
            int(since),
            int(until),
        )
    # An earlier version wrote nothing behind the properties: the topic is not passed on to it.
    number, engine, name, pid, producer, priority, since, properties, *more = fields
    inherits, announce = more or (False, None)
    return Wait(
        int(number),
        str(engine),
        str(name),
        int(pid),
        str(producer),
        int(priority),
        int(since),
        dict(properties or {}),
        bool(inherits),
        None if announce is None else dict(announce),
    )


class Waiters:
    """The waiters and the assignment, after the records so far."""

    def __init__(self) -> None:
        self._waiting: dict[int, Wait] = {}  # in the order of the log
        self.assigned: Assign | None = None  # it may have ended: see `assigned_at`
        self._ended = deque[int](maxlen=MOST_ENDED)  # assignments, of which copies may come late
        self.yielding = 0  # the session that has agreed to release the topic; 0: none
        self.known: Known | None = None  # the priorities of waiters so far (rule D7)
        # The session with which the present series of hand-overs began: by it, producers find where
        # their topic is (rule E2). 0: none, or it was not seen.
        self.lineage = 0

    def assigned_at(self, now: int) -> Assign | None:
        """The assignment that is in force at this time (ms since 1970)."""
        return self.assigned if self.assigned is not None and now < self.assigned.until else None

    def take(self, record: Noted | None, owner: int | None = None) -> None:
        """Apply the next record. `owner`: the session that owns the topic, 0 if none does; None: a
        record of `records`."""
        if isinstance(record, Assign):
            self._assign(record, owner)
        elif isinstance(record, Unassign):
            self._end_assigned(record.number)
        elif isinstance(record, Yields):
            self.yielding = record.number
        elif isinstance(record, Wait):
            self._waiting.setdefault(record.number, record)
            if self.known is not None:
                self.known = widened(self.known, record.priority)
        elif isinstance(record, Leave):
            for number in record.numbers:
                self._waiting.pop(number, None)

    def _assign(self, record: Assign, owner: int | None) -> None:
        """The first valid one stays, and may get more time (rule E4); one that has ended is
        replaced. It is valid if the topic has the owner that its sender has seen."""
        before = self.assigned
        if record.number in self._ended:
            return
        if before is not None and record.since < before.until:
            self.assigned = record if before.prolonged_by(record) else before
        elif owner is None or record.session == owner:
            self._end_assigned()
            self.assigned = record

    def _end_assigned(self, number: int | None = None) -> None:
        """End the assignment of this number (None: any)."""
        assigned = self.assigned
        if assigned is not None and number in (None, assigned.number):
            number, self.assigned = assigned.number, None
        if number is not None:
            self._ended.append(number)

    def reason_of(self, grant: Grant, was_owned: bool, was_shared: bool) -> str:
        """Why the topic is granted by the next record, which counts (rule E5). `was_owned`: it has
        an owner until then, `was_shared`: shared producers."""
        holder = grant.holder
        fences = holder.access_mode.fences
        kept = self.assigned_at(holder.since) is not None or bool(self._waiting)
        moved = self._is_reserved(holder, was_owned)
        return reason_of_grant(
            takes=fences and not moved and (was_owned or was_shared or kept),
            moved=moved,
            continues=grant.continues > 0,
            waited=grant.by > 0 or bool(self._of(holder)),
        )

    def _is_reserved(self, holder: Holder, was_owned: bool) -> bool:
        """Is the topic kept for the engine of this holder, which is granted it?"""
        kept = self.assigned_at(holder.since)
        if kept is None or kept.engine_id != holder.engine_id:
            return False
        return not was_owned or not holder.access_mode.fences  # else its owner must be dead

    def granted(self, grant: Grant, last: int, was_owned: bool) -> None:
        """Apply a grant that counts. `last`: the session of the grant before it; `was_owned`: it
        takes the topic from that."""
        holder = grant.holder
        reserved = self._is_reserved(holder, was_owned)
        assigned = self.assigned
        self._end_assigned()
        moved = reserved and assigned is not None and assigned.session == last
        self.lineage = self.lineage if moved and self.lineage else grant.session
        if holder.access_mode.waits:
            queued = (each.priority for each in self._waiting.values())
            self.known = widened(self.known, holder.priority, *queued)
            self._granted_to_waiter(grant)
        elif holder.access_mode.fences and not reserved:
            self._waiting.clear()

    def _granted_to_waiter(self, grant: Grant) -> None:
        """Remove the waiter that was granted the topic. If several of its engine have its name, it
        leaves the queue itself: a grant that it has asked for has no number of a waiter."""
        if grant.by:
            self._waiting.pop(grant.waiter, None)
            return
        same = self._of(grant.holder)
        if len(same) == 1:
            del self._waiting[same[0]]

    def _of(self, holder: Holder) -> list[int]:
        """The waiters that may be this holder, by their numbers."""
        if not holder.access_mode.waits:
            return []
        return [
            number
            for number, each in self._waiting.items()
            if (each.engine_id, each.producer_name) == (holder.engine_id, holder.producer_name)
        ]

    def joined(self) -> None:
        """Apply a join that counts: a shared producer has the topic that was assigned (rule E3)."""
        self._end_assigned()
        self.lineage = 0

    def forget(self, engines: Iterable[str]) -> None:
        """Remove the waiters of dead engines."""
        gone = set(engines)
        self._remove(lambda each: each.engine_id in gone)

    def _remove(self, ends: Callable[[Wait], bool]) -> None:
        for number in [number for number, each in self._waiting.items() if ends(each)]:
            del self._waiting[number]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Wait]:
        return iter(self._waiting.values())

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def records(self) -> list[Noted]:
        """Records from which the same state results."""
        assigned = [] if self.assigned is None else [self.assigned]
        yielding = [Yields(self.yielding)] if self.yielding else []
        ended = [Unassign(number, "") for number in self._ended]
        return [*self._waiting.values(), *ended, *assigned, *yielding]

    def in_order(self) -> list[Wait]:
        """The waiters in the order of their promotion (rule D1)."""
        arrived = enumerate(self._waiting.values())
        return [each for _, each in sorted(arrived, key=lambda e: place(e[1].priority, e[0]))]


# ---- one engine's part --------------------------------------------------------------------


Published = Wait | Assign | Unassign | Yields | Hold


class Queue:
    """One engine's records in a topic's queue, until they are read back. The topic serialises all
    calls."""

    def __init__(self, host: ClusterEngine, append: Callable[[bytes], object]) -> None:
        self.waiters = Waiters()
        self._host, self._append = host, append
        self._unread: dict[tuple[type, int], bytes] = {}  # records that were not read back yet
        self.withdrew = False  # did the last `Unassign` of this engine end an assignment?

    def publish(self, record: Published) -> None:
        """Append a record; it is read back once it `is_published`."""
        data = self._unread[type(record), record.number] = encode(record)
        self._append(data)

    def is_published(self, record: Published) -> bool:
        """Was this record read back?"""
        return (type(record), record.number) not in self._unread

    def leave(self, number: int) -> None:
        """Remove this producer from the queue."""
        self._unread.pop((Wait, number), None)
        self._append(encode(Leave((number,))))

    def take(self, record: Noted, owner: int) -> None:
        """Process the next record of the log; see `Waiters.take`."""
        if isinstance(record, Unassign) and not self.is_published(record):
            assigned = self.waiters.assigned
            self.withdrew = assigned is not None and assigned.number == record.number
        self.waiters.take(record, owner)
        if not isinstance(record, Leave):
            self._unread.pop((type(record), record.number), None)
        if isinstance(record, Wait):
            self._leave_again()

    @property
    def is_wanted(self) -> bool:
        """Does a producer wait?"""
        return bool(len(self.waiters))

    # ---- what was lost -------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Was any appended record not read back yet?"""
        return bool(self._unread or self._stale_waiters())

    def append_again(self) -> None:
        """Append again the records that were not read back."""
        for data in list(self._unread.values()):
            self._append(data)
        self._leave_again()

    def _leave_again(self) -> None:
        if stale := self._stale_waiters():
            self._append(encode(Leave(stale)))

    def _stale_waiters(self) -> tuple[int, ...]:
        """The waiters of this engine that have left, but are still in the queue: their `Wait` came
        late, or their `Leave` is not in the log yet."""
        return tuple(
            each.number
            for each in self.waiters
            if each.engine_id == self._host.id and not self._host.waits_here(each.number)
        )
