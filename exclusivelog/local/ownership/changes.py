"""What a change of ownership needs and tells: the machine's live engines, the kinds of
notifications and wake-up counters, and the records in `__events__` (rule E5)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

from exclusivelog import _core
from exclusivelog.events import EVENTS, Event
from exclusivelog.local.records import Claimant, Session, Transfer
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import EngineInfo

# Kinds of notifications: to a waiter that it was granted or fenced; to an engine that it is to
# retry a promotion at a time; to an owner that it is to release its topic, or that a session waits
# for it; to a waiter that the topic was terminated.
GRANTED, FENCED, RETRY_AT, RELEASE = "granted", "fenced", "later", "release"
WANTED, TERMINATED = "wanted", "sealed"
REVOKED = "revoked"  # a producer's claim is gone
CLAIM_LOST = "claim-lost"  # the session is a claim's
CLAIM_MOVED = "claim moved"  # it names the successor
# Wake-up counters; no topic has these ids.
RESOURCES = 0  # a resource may be free
MOVES = 2**63  # a move has made a step
HANDED_OVER = "hand-over"  # the reason of a grant


class Living(Protocol):
    """Which engines of the machine live: the ledger's lock file, or the model checker's."""

    @property
    def opened(self) -> int:
        """When the ledger was opened by the first of its engines, in ns of the monotonic clock."""

    def alive(self, slot: int, engine: str) -> bool:
        """Does this engine exist, and send its heartbeats?"""

    def exists(self, slot: int, engine: str) -> bool:
        """Does this engine exist, responsive or not?"""

    def present(self) -> list[EngineInfo]:
        """The engines that exist."""


class LockFile(Protocol):
    """Where engines register."""

    @property
    def slots(self) -> Living:
        """One for each engine."""


class Transactions(Protocol):
    """The ledger whose rows change, each time in one transaction: all of it or, if it raises,
    nothing."""

    @property
    def lockfile(self) -> LockFile:
        """Which engines live."""

    def read(self) -> AbstractContextManager[Tables]:
        """A snapshot."""

    def write_exclusive(self) -> AbstractContextManager[Tables]:
        """An exclusive write."""

    def write_checkpointed(self) -> AbstractContextManager[Tables]:
        """An exclusive write whose tables have all that the journal has."""

    def write_concurrent(self) -> AbstractContextManager[Tables]:
        """A write beside those that append."""


def record(
    tables: Tables, row: _core.TopicRow, kind: str, reason: str, *,
    source: Session | Claimant | None = None, target: Session | Transfer | None = None,
) -> None:  # fmt: skip
    """Record a change of a topic's ownership in `__events__`, within its transaction (rule E5)."""
    about = next((each for each in (target, source) if isinstance(each, Session)), None)
    tables.events.append(
        Event(
            time=time.time_ns() // 1_000_000, topic=row.name, epoch=row.epoch, kind=kind,
            reason=reason, priority=0 if about is None else about.priority,
            source=_party(source), target=_party(target),
        )
    )  # fmt: skip


def record_claim(
    tables: Tables, about: Claimant, kind: str, reason: str, *,
    source: Claimant | None = None, target: Claimant | None = None,
) -> None:  # fmt: skip
    """Record a change of each of a claim's resources in `__events__`; not for readers of
    `__events__` itself, which such a record would wake again and again."""
    now = time.time_ns() // 1_000_000
    for resource, generation in about.generations.items():
        if about.reads and resource == EVENTS:
            continue
        tables.events.append(
            Event(
                now, "", 0, kind, reason, 0, _party(source), _party(target), about.group,
                resource, generation,
            )
        )  # fmt: skip


def _party(party: Session | Claimant | Transfer | None) -> dict[str, Any] | None:
    if party is None:
        return None
    if isinstance(party, Transfer):
        engine, name, properties = party.target, party.name, party.properties
    else:
        engine, name, properties = party.engine, party.engine_name, party.engine_properties
    session = party if isinstance(party, Session) else None
    return {
        "engine": engine, "engine_name": name, "pid": party.pid,
        "producer": None if session is None else session.name,
        "properties": {} if session is None else session.properties,
        "engine_properties": properties,
    }  # fmt: skip
