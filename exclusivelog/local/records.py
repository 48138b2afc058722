"""Sessions and transfers, as the tables keep them, and what becomes of a request."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from exclusivelog.errors import ExclusiveLogError
from exclusivelog.types import AccessMode

SHARED = AccessMode.SHARED.value
EXCLUSIVE = AccessMode.EXCLUSIVE.value
WAIT = AccessMode.WAIT_FOR_EXCLUSIVE.value
FENCING = AccessMode.EXCLUSIVE_WITH_FENCING.value


@dataclass(frozen=True, slots=True)
class Session:
    """One producer's registration on a topic, waiting or admitted, as the ledger keeps it.

    `epoch` is what it writes under (0 while it waits); `created` is in ns of the monotonic
    clock, `since` in ms since 1970; `tie` is random and orders equals (rule D1).
    """

    id: int
    topic: int
    engine: str
    slot: int
    pid: int
    engine_name: str
    name: str
    mode: str
    priority: int
    created: int
    tie: int
    since: int
    claim: int | None = None
    epoch: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    settle: int = 0  # ns that it leaves a free topic to better ones that reconnect, at most
    engine_properties: dict[str, str] = field(default_factory=dict)
    lineage: int = 0  # the session since which the topic was only ever handed over
    notify_on_contention: bool = False  # when a session waits for its topic
    bound_to: int = 0  # the claim session that it ends with (rule F5)
    announce: dict[str, str] | None = None  # what is announced with its grant

    @property
    def exclusive(self) -> bool:
        """Alone on its topic, once it is admitted."""
        return self.mode != SHARED

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts sessions in the order of rule D1, best first."""
        return (-self.priority, self.created, self.tie)


SESSION_FIELDS = [field.name for field in fields(Session)]
_FIELD_NUMBERS = {name: number for number, name in enumerate(SESSION_FIELDS)}
_values_of = operator.attrgetter(*SESSION_FIELDS)


def changed(session: Session, **values: Any) -> Session:
    """The session with other values of these fields: `dataclasses.replace` in less than half the
    time, because every grant needs several.

    >>> from dataclasses import replace
    >>> session = unpack_session(pack_session(Session(1, 2, "e", 3, 4, "", "n", WAIT, 0, 5, 6, 7)))
    >>> changed(session, epoch=8) == replace(session, epoch=8)
    True
    """
    row = list(_values_of(session))
    for name, value in values.items():
        row[_FIELD_NUMBERS[name]] = value
    return Session(*row)


def pack_session(session: Session) -> bytes:
    """A session as msgpack, fields in order; the last one only if it is there, so that earlier
    versions read all others."""
    row = _values_of(session)
    packed: bytes = msgpack.packb(row if session.announce is not None else row[:-1])
    return packed


def unpack_session(data: bytes) -> Session:
    """The session that `pack_session` packed."""
    return Session(*msgpack.unpackb(data))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A hand-over of a topic to the engine `target`, under way until `until` (ns of the monotonic
    clock). The session `session` is to release it, or has (0). The rest is for errors and events,
    and for producers that follow (rules E1-E4)."""

    topic: int
    target: str
    slot: int
    until: int
    session: int
    name: str
    pid: int
    properties: dict[str, str]
    lineage: int = 0  # the first session of an unbroken series of hand-overs
    groups: tuple[str, ...] = ()  # whose claims on the topic move with it


Known = tuple[int, int]  # the best and the lowest priority of a topic's waiters so far


def widened(known: Known | None, *priorities: int) -> Known:
    """What is known once these have been there, too.

    >>> widened((5, 1), 7), widened(None, 3)
    ((7, 1), (3, 3))
    """
    seen = (*(known or ()), *priorities)
    return max(seen), min(seen)


PREFIX = "__role__/"  # of the names of the roles' own topics


def is_role(topic: str) -> bool:
    """Is this the own topic of a role?"""
    return topic.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Registration:
    """The outcome of a request: a session, admitted or queued, and the last sequence id of its
    name."""

    session: Session
    queued: bool
    last_sequence: int


class StillReleasing(ExclusiveLogError):
    """Internal: the source has not released the topic yet; request again once it has, or at
    `until` (ns of the monotonic clock)."""

    def __init__(self, refusal: ExclusiveLogError, until: int) -> None:
        super().__init__(str(refusal), holder=refusal.holder)
        self.refusal, self.until = refusal, until


@dataclass(frozen=True, slots=True)
class Claimant:
    """One claim session (rules F1-F5). `since` is in ms since 1970; `reads`: it is a reader's."""

    id: int
    engine: str
    slot: int
    pid: int
    engine_name: str
    group: str
    generations: dict[str, int]
    since: int
    engine_properties: dict[str, str] = field(default_factory=dict)
    reads: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A topic's compacted view: its entries stand under `id`, and reach up to `horizon`."""

    id: int
    horizon: int


CLAIMANT_FIELDS = [field.name for field in fields(Claimant)]
