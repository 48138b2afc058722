"""The claims that one engine holds: those of `engine.own`, and those of its group readers.

`claims.py` has the rules, and writes down who holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from exclusivelog import _core
from exclusivelog.backend import ClaimSession, Held, Owned
from exclusivelog.errors import (
    OwnershipError,
    OwnershipLostError,
    ReaderFencedError,
    TopicNotFoundError,
    describe_engine,
)
from exclusivelog.local.log.cursor import LogCursor
from exclusivelog.local.ownership.claims import Claims, describe_claim
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.records import Claimant
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import EngineInfo
from exclusivelog.validation import check_generation, check_group

Positions = Mapping[int, int]  # topic id: offset


class Registered(Protocol):
    """The claims of one engine, to be told of their loss."""

    def keep_claim(self, number: int, claim: Owned) -> None:
        """Notify this claim of its loss, and end it when the engine closes."""

    def forget_claim(self, number: int) -> None:
        """The claim is released."""


class Releases(Protocol):
    """Releases claims in the background."""

    def give_up_claims(
        self, claimants: Iterable[Claimant], release: Callable[[Claimant], object]
    ) -> None:
        """Release what an interrupted call has claimed."""


class Host(Protocol):
    """What a claim needs of the engine that holds it."""

    ledger: Ledger
    sessions: Sessions
    info: EngineInfo

    @property
    def slot(self) -> int:
        """Its place in the lock file; LedgerError if it is read-only."""

    @property
    def notifications(self) -> Any:
        """Its notifications: their lock, and the `Successors` of its claims."""

    @property
    def registry(self) -> Registered:
        """Its claims."""

    @property
    def worker(self) -> Releases:
        """Its background worker."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""


class HeldClaim:
    """One claim that an engine has made; see `exclusivelog.backend.ClaimSession`."""

    def __init__(self, host: Host, claimant: Claimant) -> None:
        self.id = claimant.id
        self.group = claimant.group
        self.generations = dict(claimant.generations)
        self._host = host
        self._claims = Claims(host.ledger, host.sessions.succession)
        self._claimant = claimant

    @property
    def ledger(self) -> Ledger:
        """Where it is kept."""
        return self._host.ledger

    def is_held(self) -> bool:
        """Is it still valid?"""
        return self._claims.holds(self._claimant)

    def is_held_in(self, tables: Tables) -> bool:
        """The same, as a part of a transaction."""
        return tables.claims.claimant(self.id) is not None

    def successor(self) -> EngineInfo | None:
        """The engine that a lost claim was handed over to; None if it was revoked."""
        return self._claims.successor(self._claimant, self._host.notifications.successors)

    def release(self) -> None:
        """Release it, unless it is lost."""
        self._claims.release(self._claimant)
        self._host.registry.forget_claim(self.id)

    def __repr__(self) -> str:
        return describe_claim(self._claimant)


class LocalGroupCursor(HeldClaim):
    """The committed positions of a group on some topics, {name: id}, and the claim on them; see
    `exclusivelog.backend.GroupCursor`. One that is `bound` is a role's, and does not end with its
    reader."""

    def __init__(
        self, host: Host, claimant: Claimant, topics: Mapping[str, int], bound: bool = False
    ) -> None:
        super().__init__(host, claimant)
        self._topics = dict(topics)
        self._version = -1  # of the journal when the claim was read last
        self._ended = False
        self._bound = bound

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come."""
        journal = self._host.ledger.journal
        version = 0 if journal is None else journal.version  # before the tables are read
        if version != self._version:
            with self._host.ledger.read() as tables:
                self._check_in(tables)
            self._version = version

    def _check_in(self, tables: Tables) -> None:
        if self.is_held_in(tables):
            return
        names = ", ".join(repr(name) for name in self._topics)
        moved = self._host.notifications.successors.of(tables, self._claimant)
        if moved is not None:
            raise ReaderFencedError(
                f"topic {names}: group {self.group!r} was handed over with its topic to "
                f"{describe_engine(moved)}; read there",
                successor=moved,
            )
        holder = self._holder(tables)
        by = "" if holder is None else (
            f": engine {holder.engine_name!r} (id {holder.engine}, pid {holder.pid}) reads now"
        )  # fmt: skip
        raise ReaderFencedError(
            f"topic {names}: this reader of group {self.group!r} was fenced by a later "
            f"one{by}. Close this reader and open a new one"
        )

    def _holder(self, tables: Tables) -> Claimant | None:
        for name in self._topics:
            _, later = tables.claims.claim(self.group, name)
            holder = tables.claims.claimant(later) if later else None
            if holder is not None:
                return holder
        return None

    def position(self, topic: int) -> int | None:
        """The committed position; None before the group's first commit."""
        with self._host.ledger.read() as tables:
            return tables.cursors.get(topic, self.group)

    def commit(self, positions: Positions) -> None:
        """Commit these positions: checked and written in one transaction."""
        with self._host.ledger.write_concurrent() as tables:
            self.write(tables, positions)

    def write(self, tables: Tables, positions: Positions) -> None:
        """The same, as a part of a transaction."""
        self._check_in(tables)
        for name, topic in self._topics.items():
            if topic in positions:
                _check_exists(tables, topic, name)
                tables.cursors.put(topic, self.group, positions[topic])

    def wait(self, cursors: Sequence[LogCursor], marks: Sequence[int], seconds: float) -> None:
        """Sleep until one of the cursors' marks changes, or for so many seconds, or less."""
        words = [cursor.word for cursor in cursors]
        self._host.ledger.lockfile.counters.wait_any(words, marks, seconds)

    def lose(self, error: OwnershipLostError) -> None:
        """A later reader has come: wake a thread that waits for messages."""
        self.announce()

    def announce(self) -> None:
        """Wake the readers of its topics."""
        for topic in self._topics.values():
            self._host.ledger.lockfile.counters.announce(topic)

    def end(self) -> None:
        """Release the claim."""
        if not self._ended and not self._bound:
            self._ended = True
            self.release()


def _check_exists(tables: Tables, topic: int, name: str) -> None:
    if tables.topics.get(topic).flags & _core.DELETED:
        raise TopicNotFoundError(f"topic {name!r} was deleted")


# ---- claiming ----------------------------------------------------------------------------


def _hold(
    host: Host, group: str, resources: Mapping[str, int | None], make: Callable[[Claimant], Held],
    check: Callable[[Tables], object] | None = None, reads: bool = False,
) -> Held:  # fmt: skip
    """Claim resources in one transaction, in which `check` may raise, and have the engine keep what
    `make` makes of the claim."""
    claims, slot = Claims(host.ledger, host.sessions.succession), host.slot
    made: list[Claimant] = []
    try:
        # No notification of its loss is read before the engine knows the claim.
        with _core.Holding(host.notifications.lock):
            host.check_open()  # closing it releases what is registered by then
            claimant = claims.take(host.info, slot, group, resources, check, made, reads)
            held = make(claimant)
            host.registry.keep_claim(claimant.id, held)
            return held
    except OwnershipError:
        raise
    except BaseException:  # Ctrl-C after the commit: the caller does not get this claim
        host.worker.give_up_claims(made, claims.release)
        raise


def hold_claim(
    host: Host, group: str, resources: Mapping[str, int | None],
    make: Callable[[ClaimSession], Held],
) -> Held:  # fmt: skip
    """What `exclusivelog.backend.ClaimStore.hold_claim` does."""
    return _hold(host, group, resources, lambda claimant: make(HeldClaim(host, claimant)))


def join_group(
    host: Host, group: str, topics: Mapping[str, int], generation: int | None
) -> LocalGroupCursor:
    """Become the reader of these topics, {name: id}, in the group; the one before is fenced."""
    check_group(group)
    for name in topics:
        check_generation(name, generation)

    def check(tables: Tables) -> None:
        # A claim is on the name: of another topic by now, perhaps, whose reader it would fence.
        for name, topic in topics.items():
            _check_exists(tables, topic, name)

    def make(claimant: Claimant) -> LocalGroupCursor:
        return LocalGroupCursor(host, claimant, topics)

    joined = _hold(host, group, dict.fromkeys(topics, generation), make, check, reads=True)
    try:
        joined.announce()  # a former reader that waits must learn of it
    except BaseException:
        host.worker.give_up_claims([joined._claimant], joined._claims.release)
        raise
    return joined
