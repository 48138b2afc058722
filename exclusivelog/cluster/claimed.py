"""Which records of a group's claims count, and who holds what: a pure fold (rules F1 to F6).

All claims of one group are records of one ordered log, which every engine folds alike:

- A **take** claims resources for a new session, all or none. It counts if no other take of one of
  them has counted since its sender looked, and no generation is below the resource's last one,
  unless it is 0. Then its session has the resources, and every session that had one of them has
  ended, with all that it had.
- A **drop** ends its session.
- A **commit** stores positions of a reader group. It counts if its session has not ended, and its
  number is that session's next one.
- A **clearing** removes all positions of the group. It counts if its sender had seen all takes that
  have counted. It ends all sessions of readers.
- No other record counts, and a record that does not count changes nothing.

So a resource never has two sessions, a session that has ended never has anything again, and a
record that was appended twice counts once. A claim of many resources is one record.

>>> def take(session, seen, **generations):
...     return Take(session, dict.fromkeys(generations, seen), generations, "e1", "host", 1, {}, 0)
>>> holdings = Holdings()
>>> holdings.fold(take(7, 0, march=1, april=5)), holdings.fold(take(7, 0, march=1, april=5))
((<Ruling.COUNTS: 'it counts'>, ()), (<Ruling.UNSEEN: 'another take has counted since'>, ()))
>>> ruling, ended = holdings.fold(take(8, 7, april=5))
>>> ruling.name, [each.session for each in ended], holdings.holder("march")
('COUNTS', [7], None)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from exclusivelog.cluster.frames import HEADER, sealed, unsealed
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError
from exclusivelog.types import EngineInfo

__all__ = [
    "Clearing",
    "Commit",
    "Drop",
    "Holdings",
    "Noting",
    "Resource",
    "Ruling",
    "Take",
    "read",
    "write",
]

MAGIC = b"XLG"
VERSION = 1


# ---- records -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Take:
    """Claims resources. `seen`: {resource: the session that had taken it last when its sender
    looked; 0: none}; `since`: in ms since 1970; `reads`: it is a reader's."""

    session: int
    seen: dict[str, int]
    generations: dict[str, int]
    engine_id: str
    engine_name: str
    pid: int
    properties: dict[str, str]
    since: int
    reads: bool = False

    @property
    def engine(self) -> EngineInfo:
        """The engine that has made it."""
        return EngineInfo(self.engine_id, self.engine_name, self.pid, dict(self.properties), 0.0)


@dataclass(frozen=True, slots=True)
class Drop:
    """Releases all that a session has, at a time (ms since 1970)."""

    session: int
    since: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Stores positions of a reader group, {topic: offset}. `number`: how many commits its session
    has made up to this one."""

    session: int
    number: int
    positions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Clearing:
    """Removes the positions of a reader group. `takes`: how many takes had counted, ever, when its
    sender looked."""

    takes: int


Noting = Take | Drop | Commit | Clearing


def write(record: Noting) -> bytes:
    """The bytes of a record."""
    body: bytes = msgpack.packb(_row(record))
    return sealed(MAGIC, VERSION, body)


def _row(record: Noting) -> list[Any]:
    if isinstance(record, Take):
        resources = {
            name: [record.seen[name], generation] for name, generation in record.generations.items()
        }
        return [
            "t",
            record.session,
            resources,
            record.engine_id,
            record.engine_name,
            record.pid,
            record.properties or None,
            record.since,
            record.reads,
        ]
    if isinstance(record, Drop):
        return ["d", record.session, record.since]
    if isinstance(record, Commit):
        return ["c", record.session, record.number, record.positions]
    return ["x", record.takes]


def read(data: bytes) -> Noting | None:
    """The record that these bytes are; None if they are none of a group's claims.

    All readers must agree on which records count, so one that cannot be read ends the reading:
    `LedgerVersionError` for one of another version, `LedgerCorruptedError` for a damaged one."""
    if data[: len(MAGIC)] != MAGIC:
        return None
    if len(data) >= HEADER.size and HEADER.unpack_from(data)[1] != VERSION:
        raise LedgerVersionError(
            f"the log has a claim of version {HEADER.unpack_from(data)[1]}; this library reads "
            f"version {VERSION}: read it with a newer version of exclusivelog"
        )
    body = unsealed(MAGIC, VERSION, data)
    if body is None:
        raise LedgerCorruptedError("a record of claims is damaged: its checksum does not hold")
    try:
        return _record(msgpack.unpackb(body))
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise LedgerCorruptedError(f"a record of claims is damaged: {error}") from None


def _record(row: list[Any]) -> Noting:
    kind, *fields = row
    if kind == "d":
        session, since = map(int, fields)
        return Drop(session, since)
    if kind == "c":
        session, number, positions = fields
        return Commit(int(session), int(number), {str(t): int(at) for t, at in positions.items()})
    if kind == "x":
        (takes,) = map(int, fields)
        return Clearing(takes)
    if kind != "t":
        raise ValueError("it is of no known kind")
    session, resources, engine, name, pid, properties, since, reads = fields
    if not resources:
        raise ValueError("it takes nothing")
    return Take(
        int(session),
        {str(each): int(seen) for each, (seen, _) in resources.items()},
        {str(each): int(generation) for each, (_, generation) in resources.items()},
        str(engine),
        str(name),
        int(pid),
        dict(properties or {}),
        int(since),
        bool(reads),
    )


# ---- the rule ----------------------------------------------------------------------------


class Ruling(enum.Enum):
    """Whether a record counts, or the first reason why not."""

    COUNTS = "it counts"
    UNSEEN = "another take has counted since"
    LOW = "its generation is below the last one"
    ENDED = "its session has ended"
    BEHIND = "a commit of its number has counted"
    AHEAD = "an earlier commit is missing"


class Resource(NamedTuple):
    """A resource that was taken: its last generation, and the session that took it last. Whether it
    still has it, `Holdings.sessions` says."""

    generation: int = 0
    session: int = 0


NEVER = Resource()


@dataclass(slots=True)
class Holdings:
    """The state after the records so far.

    - `resources`: those that were ever taken, by name.
    - `sessions`: the sessions that have not ended, {number: its take}.
    - `commits`: how many commits of each of these have counted.
    - `positions`: of the reader group, {topic: offset}.
    - `takes`: how many takes have counted, ever.
    """

    resources: dict[str, Resource] = field(default_factory=dict)
    sessions: dict[int, Take] = field(default_factory=dict)
    commits: dict[int, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    takes: int = 0

    def last(self, name: str) -> Resource:
        """The last take of this resource."""
        return self.resources.get(name, NEVER)

    def holder(self, name: str) -> Take | None:
        """The take of the session that has this resource; its engine may be dead."""
        return self.sessions.get(self.last(name).session)

    # ---- folding -------------------------------------------------------------------------

    def fold(self, record: Noting) -> tuple[Ruling, tuple[Take, ...]]:
        """Judge the next record, and apply it if it counts. The ruling, and the claims that it has
        ended."""
        ruling = judge(self, record)
        ended = self._apply(record) if ruling is Ruling.COUNTS else ()
        gone = tuple([self.sessions.pop(session) for session in ended])
        for take in gone:
            self.commits.pop(take.session, None)
        if isinstance(record, Take) and ruling is Ruling.COUNTS:
            self.sessions[record.session] = record
        return ruling, gone

    def _apply(self, record: Noting) -> tuple[int, ...]:
        """Apply a record, but for its effect on sessions; those that it ends."""
        if isinstance(record, Take):
            ended = dict.fromkeys(self.last(name).session for name in record.generations)
            for name, generation in record.generations.items():
                self.resources[name] = Resource(generation, record.session)
            self.takes += 1
            return tuple([session for session in ended if session in self.sessions])
        if isinstance(record, Commit):
            self.commits[record.session] = record.number
            self.positions.update(record.positions)
            return ()
        if isinstance(record, Clearing):
            self.positions.clear()
            return tuple([session for session, take in self.sessions.items() if take.reads])
        return (record.session,)

    # ---- keeping -------------------------------------------------------------------------

    def save(self) -> bytes:
        """This state as bytes, from which folding can continue."""
        saved: bytes = msgpack.packb(
            [
                {name: list(each) for name, each in self.resources.items()},
                [write(take) for take in self.sessions.values()],
                self.commits,
                self.positions,
                self.takes,
            ]
        )
        return saved

    @classmethod
    def restore(cls, data: bytes) -> Holdings:
        """The state that was saved; that of no records for no bytes. Raises ValueError or TypeError
        for any other bytes."""
        if not data:
            return cls()
        resources, takes, commits, positions, count = msgpack.unpackb(data, strict_map_key=False)
        sessions = [read(take) for take in takes]
        return cls(
            {name: Resource(*each) for name, each in resources.items()},
            {take.session: take for take in sessions if isinstance(take, Take)},
            commits,
            positions,
            count,
        )


def judge(holdings: Holdings, record: Noting) -> Ruling:
    """Does this record count, as the next one after this state?"""
    if isinstance(record, Take):
        return _judge_take(holdings, record)
    if isinstance(record, Clearing):
        return Ruling.COUNTS if record.takes == holdings.takes else Ruling.UNSEEN
    if record.session not in holdings.sessions:
        return Ruling.ENDED
    if isinstance(record, Commit):
        return _judge_number(record.number, holdings.commits.get(record.session, 0) + 1)
    return Ruling.COUNTS


def _judge_take(holdings: Holdings, take: Take) -> Ruling:
    for name, generation in take.generations.items():
        last = holdings.last(name)
        # A session takes a resource once: so a take that has counted never counts again.
        if take.seen[name] != last.session:
            return Ruling.UNSEEN
        if 0 != generation < last.generation:
            return Ruling.LOW
    return Ruling.COUNTS


def _judge_number(number: int, following: int) -> Ruling:
    if number == following:
        return Ruling.COUNTS
    return Ruling.BEHIND if number < following else Ruling.AHEAD
