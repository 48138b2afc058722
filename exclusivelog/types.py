"""The facts that people are handed: modes, and who is who. All immutable.

>>> AccessMode("wait_for_exclusive") is AccessMode.WAIT_FOR_EXCLUSIVE
True
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AccessMode", "EngineInfo", "Move", "OwnerInfo", "Report", "WaiterInfo"]


class AccessMode(str, enum.Enum):
    """How a producer shares its topic with others (PIP-68, rules A1-A6).

    - `SHARED`: beside other shared producers.
    - `EXCLUSIVE`: alone, or an error at once.
    - `WAIT_FOR_EXCLUSIVE`: alone, after waiting in the priority queue (PIP-440).
    - `EXCLUSIVE_WITH_FENCING`: alone, at once: whoever is there is fenced.
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
    """A session that holds a topic: who, since when (`since`: ms since 1970), under which epoch."""

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
class WaiterInfo:
    """A session in a topic's queue, in the order of rule D1 (`since`: ms since 1970)."""

    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    priority: int
    since: int
    session: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Move:
    """What became of one topic of `engine.unload` (rules E1-E4). `state` is

    - "owned": a producer of the destination owns it, under `epoch`.
    - "assigned": it is reserved for the destination's next producer until the deadline.
    - "releasing": its owner `source` is still at it.
    - "failed": it was not moved; `reason` says why, and `source` who has it now.
    """

    topic: str
    topic_id: int
    epoch: int
    source: OwnerInfo | None
    target: EngineInfo
    state: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """True where the destination has it, or is the only one who can get it."""
        return self.state in ("owned", "assigned")


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
