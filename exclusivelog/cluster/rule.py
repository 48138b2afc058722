"""Which records of an ordered log count: a pure fold. No I/O, no clock, no thread.

Every reader and writer applies this rule to the same records in the same order. So all agree on the
topic's owner and messages, even if the backend admits records of stale writers:

- A **grant** counts if it begins at the next offset, states the number of all joins so far, and has
  the epoch after the current one; or has the current epoch and names the current session as the one
  that it continues (rule B5). Then its session is the owner, and all shared sessions have ended.
  A grant by which an owner **passes the topic on** also has to name the current owner's session.
- A **join** counts if the topic has no owner, its sender had seen all grants and joins that have
  counted, and no shared session has its producer name. Then its session is a shared one.
- A **frame** counts if its epoch and session are the owner's, and its first offset is the next one;
  or if they are a shared session's, and its number is that session's next one. A shared session's
  frame gets the next offset, and a publish time not before the last one (rule G4).
- A **release** counts if its epoch and session are the owner's or a shared session's. It ends the
  session.
- A **copied frame**, which a mirror writes, counts if no grant or join has counted, it comes from
  the same source as all before it, its gap begins at the next offset, and its epoch is not lower
  than the last one. The first grant or join that counts ends the mirroring.
- An **announcement** counts if its epoch and session are the owner's, and its number is the next of
  that session.
- A **termination** counts if its sender had seen all grants that have counted. It ends all
  sessions, and no later record counts (rule G8).
- No other record counts, and a record that does not count changes nothing.

Therefore epochs only grow, offsets rise, a frame that was appended twice counts once, and no frame
of an earlier owner counts behind a later grant. A frame that did not count before a later grant
will never count: this settles a send whose answer was lost (`is_written`).

Fold from the first record that the log ever had, or from a saved state. A log whose beginning was
removed can be read from a saved state alone.

>>> from exclusivelog.cluster.frames import Content, Frame, Grant, Holder, encode
>>> from exclusivelog.types import AccessMode
>>> holder = Holder("e1", "host", 1, "p", AccessMode.EXCLUSIVE)
>>> content = Content(b"hello", None, {}, None, 0, "p", 0)
>>> state = State()
>>> def fold(number, record):
...     return state.fold(Record(Position(bytes([number])), encode(record))).verdict.name
>>> fold(1, Grant(1, 0, 77, holder)), fold(2, Frame(1, 77, 0, (content,)))
('COUNTS', 'COUNTS')
>>> fold(3, Frame(1, 77, 0, (content,))), fold(4, Grant(1, 1, 78, holder))
('BEHIND', 'EPOCH')
>>> state.epoch, state.next
(1, 1)
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgpack

from exclusivelog._core import crc32c
from exclusivelog.cluster.frames import (
    Announce,
    Frame,
    Grant,
    Join,
    Parsed,
    Release,
    Terminate,
    decode,
    encode,
)
from exclusivelog.cluster.ordered import Position, Record
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError

__all__ = ["Announced", "Judged", "Shared", "State", "Verdict", "is_written", "judge"]


class Verdict(enum.Enum):
    """Whether a record counts, or the first reason why not."""

    COUNTS = "it counts"
    FOREIGN = "it is not a record of this library"
    REPEATED = "the tail has yielded it before"
    EPOCH = "its epoch is not the one that is due"
    SESSION = "its session is not the one that is due"
    ENDED = "its session was released"
    BEHIND = "its first offset is taken"
    AHEAD = "its first offset is not reached yet"
    UNSEEN = "a grant or a join has counted that its sender had not seen"
    NAMED = "a shared session has its producer name"
    OWNED = "it is a copy, and the topic has an owner or had one"
    SOURCE = "it is a copy of another log than the frames before it"
    TERMINATED = "the topic is terminated"


class Shared(NamedTuple):
    """A shared session: how it began, and the number of its next frame."""

    join: Join
    number: int = 1


class Announced(NamedTuple):
    """What the owner of this grant has announced last, at this time (ms since 1970)."""

    grant: Grant
    time: int
    info: dict[str, str]

    def save(self) -> list[Any]:
        """As a list of bytes, int and map."""
        return [encode(self.grant), self.time, self.info]

    @classmethod
    def restore(cls, row: list[Any]) -> Announced:
        """From such a list."""
        packed, time, info = row
        return cls(_granted(packed), time, info)


class Judged(NamedTuple):
    """A record, parsed (None: foreign), and the verdict on it. A shared session's frame that counts
    has its offset."""

    position: Position
    parsed: Parsed | None
    verdict: Verdict

    @property
    def counts(self) -> bool:
        """Does it count?"""
        return self.verdict is Verdict.COUNTS


@dataclass(slots=True)
class State:
    """The state after folding the records up to `position`.

    - `epoch`, `session`: of the last grant that counts; 0 before the first one.
    - `owned`: that session was not released.
    - `next`: the offset of the next message.
    - `grant`: the last grant that counts.
    - `sequences`: the highest sequence id of each producer name (rule G2).
    - `published`: the highest publish time, in ms since 1970.
    - `source`: the log of which the frames are copies; None if they are none.
    - `shared`: the shared sessions, by number; `joins`: how many joins have counted, ever.
    - `terminated`: nothing counts any more.
    - `announced`: the last announcement of an owner; `said`: how many records of announcements the
      present owner's session has made.
    """

    position: Position | None = None
    epoch: int = 0
    session: int = 0
    owned: bool = False
    next: int = 0
    grant: Grant | None = None
    sequences: dict[str, int] = field(default_factory=dict)
    published: int = 0
    source: str | None = None
    shared: dict[int, Shared] = field(default_factory=dict)
    joins: int = 0
    terminated: bool = False
    announced: Announced | None = None
    said: int = 0

    def fold(self, record: Record) -> Judged:
        """Judge the next record, and apply it if it counts.

        Raises `LedgerVersionError` and `LedgerCorruptedError` as `frames.decode` does, and is then
        unchanged."""
        if self.position is not None and record.position <= self.position:
            return Judged(record.position, None, Verdict.REPEATED)
        parsed = decode(record.data)
        verdict = Verdict.FOREIGN if parsed is None else judge(self, parsed)
        if parsed is not None and verdict is Verdict.COUNTS:
            parsed = self._apply(parsed)
        self.position = record.position
        return Judged(record.position, parsed, verdict)

    def _apply(self, parsed: Parsed) -> Parsed:
        if isinstance(parsed, Frame):
            if parsed.number:
                parsed = self._place(parsed)
            self._apply_frame(parsed)
        elif isinstance(parsed, Grant):
            self.epoch, self.session, self.owned = parsed.epoch, parsed.session, True
            self.grant, self.source, self.said = parsed, None, 0
            self.shared.clear()
            if parsed.announce is not None:
                self._announce(parsed.holder.since, parsed.announce)
        elif isinstance(parsed, Announce):
            self.said = parsed.number
            self._announce(parsed.time, parsed.info)
        elif isinstance(parsed, Join):
            self.shared[parsed.session] = Shared(parsed)
            self.joins, self.source = self.joins + 1, None
        elif isinstance(parsed, Terminate):
            self.terminated, self.owned = True, False
            self.shared.clear()
        elif self.shared.pop(parsed.session, None) is None:
            self.owned = False
        return parsed

    def _place(self, frame: Frame) -> Frame:
        """A shared session's frame, with its offset, and publish times not before the last one."""
        join, number = self.shared[frame.session]
        self.shared[frame.session] = Shared(join, number + 1)
        contents = frame.contents
        if contents[0].publish_time < self.published:
            contents = tuple(
                [
                    each._replace(publish_time=max(each.publish_time, self.published))
                    for each in contents
                ]
            )
        return replace(frame, first=self.next, contents=contents)

    def _announce(self, time: int, info: dict[str, str]) -> None:
        assert self.grant is not None
        self.announced = Announced(self.grant, time, info)

    def _apply_frame(self, frame: Frame) -> None:
        self.next = frame.end
        if frame.source is not None:
            self.epoch, self.source = frame.epoch, frame.source
        for name, sequence in frame.sequences().items():
            if sequence > self.sequences.get(name, -1):
                self.sequences[name] = sequence
        self.published = max(self.published, frame.published)
        if frame.announces:
            last = frame.contents[-1]
            self._announce(last.publish_time, last.properties)

    @property
    def tenure(self) -> tuple[int, bool, int]:
        """(the last session that was granted the topic, is it still the owner, number of joins so
        far)."""
        return self.session, self.owned, self.joins

    @property
    def owning(self) -> int:
        """The session that owns the topic; 0 if none does."""
        return self.session if self.owned else 0

    @property
    def owner(self) -> Grant | None:
        """The grant of the session that has the topic."""
        return self.grant if self.owned else None

    # ---- keeping -------------------------------------------------------------------------

    def save(self) -> bytes:
        """This state as bytes, from which folding can continue."""
        body: bytes = msgpack.packb(
            [
                self.position,
                self.epoch,
                self.session,
                self.owned,
                self.next,
                None if self.grant is None else encode(self.grant),
                self.sequences,
                self.published,
                self.source,
                [[encode(join), number] for join, number in self.shared.values()],
                self.joins,
                self.terminated,
                None if self.announced is None else self.announced.save(),
                self.said,
            ]
        )
        return SAVED.pack(SAVED_MAGIC, SAVED_VERSION, crc32c(body)) + body

    @classmethod
    def restore(cls, data: bytes) -> State:
        """The state that was saved. Raises `LedgerCorruptedError` for damaged bytes, and
        `LedgerVersionError` for those of another version."""
        if len(data) < SAVED.size or data[: len(SAVED_MAGIC)] != SAVED_MAGIC:
            raise LedgerCorruptedError("the saved state of an ordered log is invalid: no header")
        _, version, wanted = SAVED.unpack_from(data)
        if version != SAVED_VERSION:
            raise LedgerVersionError(
                f"the saved state of an ordered log has version {version}; this library reads "
                f"version {SAVED_VERSION}: delete it, and read the log from its first record"
            )
        body = data[SAVED.size :]
        if crc32c(body) != wanted:
            raise LedgerCorruptedError("the saved state of an ordered log is damaged: checksum")
        return cls._unpack(msgpack.unpackb(body, max_ext_len=0))

    @classmethod
    def _unpack(cls, row: list[Any]) -> State:
        position, epoch, session, owned, following, packed, sequences, published, *rest = row
        source, shared, joins, terminated, announced, said = rest
        grant = None if packed is None else _granted(packed)
        place = None if position is None else Position(position)
        return cls(
            place,
            epoch,
            session,
            owned,
            following,
            grant,
            sequences,
            published,
            source,
            {join.session: Shared(join, number) for join, number in _joined(shared)},
            joins,
            terminated,
            None if announced is None else Announced.restore(announced),
            said,
        )


def _granted(packed: bytes) -> Grant:
    grant = decode(packed)
    if not isinstance(grant, Grant):
        raise LedgerCorruptedError("the saved state of an ordered log has no grant as its grant")
    return grant


def _joined(rows: list[list[Any]]) -> Iterator[tuple[Join, int]]:
    for packed, number in rows:
        join = decode(packed)
        if not isinstance(join, Join):
            raise LedgerCorruptedError("the saved state of an ordered log has no join as a join")
        yield join, number


SAVED = struct.Struct("<3sBI")  # magic, version, CRC-32C of what follows
SAVED_MAGIC = b"XLS"
SAVED_VERSION = 3


# ---- the rule ----------------------------------------------------------------------------


def judge(state: State, parsed: Parsed) -> Verdict:
    """Does this record count, as the next one after this state?"""
    if state.terminated:
        return Verdict.TERMINATED
    if isinstance(parsed, Terminate):
        return _judge_termination(state, parsed)
    if isinstance(parsed, Grant):
        return _judge_grant(state, parsed)
    if isinstance(parsed, Join):
        return _judge_join(state, parsed)
    if isinstance(parsed, Release):
        return _judge_release(state, parsed)
    if isinstance(parsed, Announce):
        return _judge_announcement(state, parsed)
    if parsed.number:
        return _judge_shared(state, parsed)
    if parsed.source is not None:
        return _judge_copy(state, parsed)
    verdict = _judge_owner(state, parsed)
    return verdict if verdict is not Verdict.COUNTS else _judge_offset(state, parsed.first)


def _judge_grant(state: State, grant: Grant) -> Verdict:
    if grant.continues:
        verdict = _judge_continuation(state, grant)
    else:
        verdict = Verdict.COUNTS if grant.epoch == state.epoch + 1 else Verdict.EPOCH
    if verdict is Verdict.COUNTS and grant.by:
        verdict = _judge_session(state, grant.by)
    if verdict is Verdict.COUNTS and grant.joins != state.joins:
        verdict = Verdict.UNSEEN
    return verdict if verdict is not Verdict.COUNTS else _judge_offset(state, grant.first)


def _judge_continuation(state: State, grant: Grant) -> Verdict:
    if grant.epoch != state.epoch:
        return Verdict.EPOCH
    # Session ids within an epoch rise, so that late frames of an earlier session of this epoch
    # cannot be taken for this session's.
    if grant.continues != state.session or grant.session <= state.session:
        return Verdict.SESSION
    return Verdict.COUNTS


def _judge_join(state: State, join: Join) -> Verdict:
    if join.epoch != state.epoch:
        return Verdict.EPOCH
    if (join.granted, join.joins) != (state.session, state.joins):
        return Verdict.UNSEEN
    if state.owned:
        return Verdict.OWNED
    if join.session in state.shared:
        return Verdict.SESSION
    names = [each.join.holder.producer_name for each in state.shared.values()]
    return Verdict.NAMED if join.holder.producer_name in names else Verdict.COUNTS


def _judge_termination(state: State, record: Terminate) -> Verdict:
    if record.epoch != state.epoch:
        return Verdict.EPOCH
    return Verdict.COUNTS if record.granted == state.session else Verdict.UNSEEN


def _judge_shared(state: State, frame: Frame) -> Verdict:
    if frame.epoch != state.epoch:
        return Verdict.EPOCH
    session = state.shared.get(frame.session)
    if session is None:
        return Verdict.SESSION
    if frame.number == session.number:
        return Verdict.COUNTS
    return Verdict.BEHIND if frame.number < session.number else Verdict.AHEAD


def _judge_release(state: State, release: Release) -> Verdict:
    if release.epoch == state.epoch and release.session in state.shared:
        return Verdict.COUNTS
    return _judge_owner(state, release)


def _judge_announcement(state: State, record: Announce) -> Verdict:
    verdict = _judge_owner(state, record)
    if verdict is not Verdict.COUNTS or record.number == state.said + 1:
        return verdict
    return Verdict.BEHIND if record.number <= state.said else Verdict.AHEAD


def _judge_owner(state: State, record: Frame | Release | Announce) -> Verdict:
    """Does the record belong to the owner?"""
    if record.epoch != state.epoch:
        return Verdict.EPOCH
    return _judge_session(state, record.session)


def _judge_session(state: State, session: int) -> Verdict:
    """Does this session of the current epoch own the topic?"""
    if session != state.session:
        return Verdict.SESSION
    return Verdict.COUNTS if state.owned else Verdict.ENDED


def _judge_offset(state: State, first: int) -> Verdict:
    if first == state.next:
        return Verdict.COUNTS
    return Verdict.BEHIND if first < state.next else Verdict.AHEAD


def _judge_copy(state: State, frame: Frame) -> Verdict:
    if state.grant is not None or state.joins:
        return Verdict.OWNED
    if state.source not in (None, frame.source):
        return Verdict.SOURCE
    if frame.epoch < state.epoch:
        return Verdict.EPOCH
    return _judge_offset(state, frame.first - frame.gap)


def is_written(offset: int, grant: Grant) -> bool:
    """Did the message count that a former owner has sent at this offset?

    `grant` is the next grant that counts after that owner's own. Its first offset shows which
    messages had counted before it, and none of the former owner counts after it."""
    return offset < grant.first
