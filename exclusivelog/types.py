"""The library's public value types: access modes, and facts about engines, sessions, claims and
hand-overs. All of them are immutable.

>>> AccessMode("wait_for_exclusive") is AccessMode.WAIT_FOR_EXCLUSIVE
True
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "AccessMode",
    "Announcement",
    "ClaimInfo",
    "EngineInfo",
    "GroupInfo",
    "Move",
    "OwnerInfo",
    "Report",
    "RoleInfo",
    "TopicStats",
    "TransferInfo",
    "WaiterInfo",
]

PREFIX = "__role__/"  # of the names of the roles' own topics


class AccessMode(str, enum.Enum):
    """How a producer shares its topic with others (PIP-68, rules A1-A6).

    - `SHARED`: beside other shared producers.
    - `EXCLUSIVE`: alone, or an error at once.
    - `WAIT_FOR_EXCLUSIVE`: alone, after waiting in the priority queue (PIP-440).
    - `EXCLUSIVE_WITH_FENCING`: alone, at once: present holders and waiters are fenced.
    """

    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    WAIT_FOR_EXCLUSIVE = "wait_for_exclusive"
    EXCLUSIVE_WITH_FENCING = "exclusive_with_fencing"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, value: AccessMode | str) -> AccessMode:
        """The mode of that name; an unknown one is an error, never a weaker mode (rule A4).

        >>> AccessMode.parse("exclusive").name
        'EXCLUSIVE'
        >>> AccessMode.parse("exklusive")
        Traceback (most recent call last):
            ...
        ValueError: access_mode='exklusive' is unknown; it takes shared, exclusive, \
wait_for_exclusive or exclusive_with_fencing
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                f"access_mode={value!r} is unknown; it takes shared, exclusive, "
                "wait_for_exclusive or exclusive_with_fencing"
            ) from None


@dataclass(frozen=True)
class EngineInfo:
    """One live engine on a ledger. `heartbeat_age` is in seconds."""

    id: str
    name: str
    pid: int
    properties: Mapping[str, str]
    heartbeat_age: float


@dataclass(frozen=True)
class OwnerInfo:
    """A session that holds a topic, its engine and its epoch. `since` is in ms since 1970."""

    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    access_mode: AccessMode
    priority: int
    epoch: int
    since: int
    session: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Announcement:
    """The last announcement of a topic (`producer.announce`), and the owner that made it.

    `epoch` is that owner's epoch, `time` is in ms since 1970. If the topic's epoch is higher, a
    later owner has announced nothing yet."""

    info: Mapping[str, str]
    epoch: int
    time: int
    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    session: int


@dataclass(frozen=True)
class WaiterInfo:
    """A session that waits in a topic's queue. `since` is in ms since 1970."""

    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    priority: int
    since: int
    session: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimInfo:
    """A claim that is held.

    `group` is "" if it was left out; `since` is in ms since 1970. `reader` is true for the claim of
    a group reader, whose resources are the names of its topics."""

    id: int
    group: str
    generations: Mapping[str, int]
    engine_id: str
    engine_name: str
    pid: int
    since: int
    reader: bool = False


@dataclass(frozen=True)
class RoleInfo:
    """A role that was granted or asked for at some time (`engine.roles`).

    - `epoch`: how many holders it has had. `holder`: the present one; None if no live engine has
      the role.
    - `topics`, `groups` ({group: names of its topics}), `claims` ({group: resources}): what its
      last holder's request bound.
    - `waiters`: who waits for it, in the order of their promotion.
    """

    name: str
    epoch: int
    holder: OwnerInfo | None
    topics: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    claims: Mapping[str, tuple[str, ...]]
    waiters: tuple[WaiterInfo, ...]


@dataclass(frozen=True)
class GroupInfo:
    """A reader group on one topic.

    `position` is the offset that the group has committed, the next one to read; `lag` is the number
    of messages from there to the end. Both are None before its first commit. `reader` is the claim
    of its reader; None if it has none."""

    group: str
    topic: str
    position: int | None
    lag: int | None
    reader: ClaimInfo | None


@dataclass(frozen=True)
class TransferInfo:
    """A hand-over that is under way (rules E1-E4).

    - `state`: "releasing": `source` has not released it yet; "assigned": it is reserved for
      `target`.
    - `source`: the session that is to release it; None once it has.
    - `target`: the destination engine.
    - `until`: the deadline, in ms since 1970. What `source` has not released by then stays there,
      and a reservation ends.
    - `producer`: the name of the shared producer that moves alone; None if the ownership of the
      topic moves.
    - `groups`: the groups whose claims on the topic move with it.
    """

    topic: str
    state: str
    source: OwnerInfo | None
    target: EngineInfo
    until: int
    producer: str | None = None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Move:
    """The outcome of `engine.unload` or `producer.move` for one topic, or for one of its shared
    producers (rules E1-E4). `state` is

    - "owned": a producer of the destination owns it, under `epoch`.
    - "assigned": it is reserved for the destination's next producer until the deadline.
    - "releasing": its owner `source` has not released it yet.
    - "failed": it was not moved; `reason` says why, and `source` is its present holder.

    `producer` is the name of the producer that was moved alone; None if the topic was moved.
    """

    topic: str
    topic_id: int
    epoch: int
    source: OwnerInfo | None
    target: EngineInfo
    state: str
    reason: str = ""
    producer: str | None = None

    @property
    def ok(self) -> bool:
        """True if the destination has it, or it is reserved for the destination."""
        return self.state in ("owned", "assigned")


@dataclass(frozen=True)
class TopicStats:
    """How a topic's entries are stored (`topic.stats()`), without those in the journal.

    - `compression`: the topic's setting, "lz4", "zstd" or None. It applies to new entries.
    - `entries`, `raw_bytes`, `stored_bytes`: how many there are, and their bytes without
      compression and as they are stored.
    - `methods`: {"lz4", "zstd" or "none": stored bytes}.
    """

    compression: str | None
    entries: int
    raw_bytes: int
    stored_bytes: int
    methods: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """How many times shorter compression makes them; 1.0 if there are none."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0


@dataclass(frozen=True)
class Report:
    """What `engine.verify()` found. `problems` is empty on a sound ledger."""

    topics: int
    entries: int
    messages: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems
