"""Claims: the ledger's record of all claims, and the claims that one engine holds.

The record says which claim holds which resource, and which generations may be claimed (rules
F1-F5).

A claim covers one or more named resources, and is lost as a whole: a later claim on one of them,
with an equal or higher generation or with 0, revokes all of it. Each call of `engine.own` makes a
claim session of its own. One engine may have many, and each is lost by itself.

Claims are checked in the critical section that appends: `txn.require(claim)` for one transaction,
`topic.producer(claim=claim)` for all that a producer sends. The transaction that revokes a claim
also evicts the producers that are bound to it, so that their sends check their session only
(rule B2).

It is the `own` call of Kafka's proposal for single readers and writers, on one machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, refusals
from exclusivelog._core import Outcome
from exclusivelog.arguments import check_generation, check_group
from exclusivelog.backend import ClaimSession, Held
from exclusivelog.errors import (
    LedgerFullError,
    OwnershipError,
    OwnershipLostError,
    ReaderFencedError,
    TopicNotFoundError,
    describe_engine,
)
from exclusivelog.local.log.appending import REPAIRABLE, failure, versions_of
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.ownership.recording import record_claim
from exclusivelog.local.ownership.steps import (
    RESOURCES,
    describe_claim,
    engine_of,
    take_claims,
)
from exclusivelog.local.records import U64, Claimant
from exclusivelog.local.storage.tables import CURSORS, Tables, cursor_key
from exclusivelog.types import ClaimInfo, EngineInfo, GroupInfo

if TYPE_CHECKING:
    from exclusivelog.local.ownership.sessions import Succession
    from exclusivelog.local.ownership.steps import Successors
    from exclusivelog.local.runtime import Runtime
    from exclusivelog.local.storage.ledger import Ledger


# ---- the record ------------------------------------------------------------------------


POLL_SECONDS = 0.25  # a death sends no wake-up


class Claims:
    """All changes of the claims of one ledger."""

    def __init__(self, ledger: Ledger, sessions: Succession) -> None:
        self._ledger = ledger
        self._sessions = sessions

    def take(
        self,
        engine: EngineInfo,
        slot: int,
        group: str,
        wanted: Mapping[str, int | None],
        check: Callable[[Tables], object] | None = None,
        made: list[Claimant] | None = None,
        reads: bool = False,
        until: int = 0,
    ) -> Claimant:
        """Claim all resources or none, in one transaction, in which `check` may raise. The claim is
        added to `made` before the commit, so that a caller that is interrupted after it can release
        it."""
        claimant = Claimant(
            0,
            engine.id,
            slot,
            engine.pid,
            engine.name,
            group,
            {},
            time.time_ns() // 1_000_000,
            dict(engine.properties),
            reads,
        )
        section = self._ledger.write_fencing(until)
        try:
            with section as tables:
                if check is not None:
                    check(tables)
                claimant = take_claims(self._sessions, tables, claimant, group, wanted)
                if made is not None:
                    made.append(claimant)
                return claimant
        finally:
            if made and not section.committed:
                made.clear()  # the next claim on the ledger gets its number

    def release(self, claimant: Claimant) -> bool:
        """Release the claim; False, without a change, if it was revoked before."""
        with self._ledger.write_fencing() as tables:
            found = tables.claims.claimant(claimant.id)
            if found is None or found.engine != claimant.engine:
                return False
            record_claim(tables, claimant, "release", "closed", source=claimant)
            self._sessions.end_claims(tables, [claimant], "release")
            return True

    def holds(self, claimant: Claimant) -> bool:
        """Is this claim still valid?"""
        with self._ledger.read() as tables:
            return tables.claims.claimant(claimant.id) is not None

    def successor(self, claimant: Claimant, known: Successors) -> EngineInfo | None:
        """The engine that a lost claim was handed over to; None if a later claim revoked it."""
        with self._ledger.read() as tables:
            return known.of(tables, claimant)

    # ---- inspect -------------------------------------------------------------------------

    def living(self, group: str | None) -> list[ClaimInfo]:
        """The claims of a group (None: of all groups) whose engines are alive, the oldest first."""
        with self._ledger.read() as tables:
            return [claim_info(claimant) for claimant in self._living(tables, group)]

    def readers(self) -> dict[tuple[str, str], ClaimInfo]:
        """The readers of groups that live, by group and topic."""
        with self._ledger.read() as tables:
            return self._readers(tables)

    def _readers(self, tables: Tables) -> dict[tuple[str, str], ClaimInfo]:
        return {
            (claimant.group, name): claim_info(claimant)
            for claimant in self._living(tables, None, readers=True)
            for name in claimant.generations
        }

    def _living(self, tables: Tables, group: str | None, readers: bool = False) -> list[Claimant]:
        return [
            claimant
            for claimant in tables.claims.claimants(readers)
            if group in (None, claimant.group)
            and self._sessions.alive(claimant)
            and not role_rows.is_anchor(tables, claimant)
        ]

    def groups(self, topics: Iterable[tuple[str, int, int]], unflushed: bool) -> list[GroupInfo]:
        """The reader groups of topics (name, id, next offset), sorted. `unflushed`: with positions
        that a power loss could still take away (rule G6)."""
        wanted = list(topics)

        def find(tables: Tables) -> list[GroupInfo]:
            found: list[GroupInfo] = []
            readers = self._readers(tables)
            for name, topic, end in wanted:
                cursors: dict[str, int | None] = dict(tables.cursors.all(topic))
                for group in {*cursors, *(g for g, read in readers if read == name)}:
                    position = cursors.get(group)
                    lag = None if position is None else max(0, end - position)
                    found.append(GroupInfo(group, name, position, lag, readers.get((group, name))))
            return sorted(found, key=lambda info: (info.group, info.topic))

        return self._ledger.inspect(find, unflushed)

    def delete_group(self, name: str) -> int:
        """Remove the positions of a reader group without a reader; how many there were. The last
        generations stay, so that no former reader can commit."""
        with contextlib.suppress(LedgerFullError):
            self._ledger.checkpoint()  # what is left in the journal is read while nobody appends
        with self._ledger.write_exclusive() as tables:
            tables.include_journal()
            reader = next(iter(self._living(tables, name, readers=True)), None)
            if reader is not None:
                raise refusals.group_is_read(name, claim_info(reader))
            return tables.cursors.delete(name)

    # ---- wait ----------------------------------------------------------------------------

    def wait_for_a_change(self, seen: int, seconds: float) -> None:
        """Sleep until a claim is released, or it is time to check for dead engines."""
        lockfile = self._ledger.lockfile
        left = min(seconds, POLL_SECONDS)
        lockfile.counters.wait(lockfile.counters.place(RESOURCES), seen, left, spin=False)

    def changes(self) -> int:
        """A counter that every release increments."""
        lockfile = self._ledger.lockfile
        found: int = lockfile.atomics.load(lockfile.counters.place(RESOURCES))
        return found


def claim_info(claimant: Claimant) -> ClaimInfo:
    """The public facts about a claim session."""
    return ClaimInfo(
        claimant.id,
        claimant.group,
        dict(claimant.generations),
        claimant.engine,
        claimant.engine_name,
        claimant.pid,
        claimant.since,
        claimant.reads,
    )


# ---- claims that an engine holds -------------------------------------------------------


Positions = Mapping[int, int]  # topic id: offset
NOTED = CURSORS.encode()


class HeldClaim:
    """One claim that an engine has made; see `exclusivelog.backend.ClaimSession`."""

    def __init__(self, host: Runtime, claimant: Claimant) -> None:
        self.id = claimant.id
        self.group = claimant.group
        self.generations = dict(claimant.generations)
        self.ledger = host.ledger  # that keeps it
        self._host = host
        self._claims = Claims(host.ledger, host.sessions.succession)
        self._claimant = claimant

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
    `exclusivelog.backend.GroupCursor`. `bound`: it belongs to a role, and does not end with its
    reader."""

    def __init__(
        self, host: Runtime, claimant: Claimant, topics: Mapping[str, int], bound: bool = False
    ) -> None:
        super().__init__(host, claimant)
        self._topics = dict(topics)
        self._version = -1  # of the claim when it was read last
        self._keys = {topic: cursor_key(topic, self.group) for topic in topics.values()}
        # The version of the claim, and of each topic, when they were last checked.
        self._checked: tuple[int, dict[int, int]] = 0, {}
        self._ended = False
        self._bound = bound

    def check(self) -> None:
        """ReaderFencedError if a later reader of the group has come."""
        journal = self._host.ledger.journal
        # Before the tables are read.
        version = 0 if journal is None else journal.version_of_claim(self.id)
        if version != self._version:
            with self._host.ledger.read() as tables:
                self._check_in(tables)
            # The version of a fence says nothing: its process may have died behind its commit.
            self._version = -1 if journal is not None and journal.is_fenced(version) else version

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
        later = None if holder is None else engine_of(holder)
        raise refusals.reader_fenced(names, self.group, later)

    def _holder(self, tables: Tables) -> Claimant | None:
        for name in self._topics:
            _, later = tables.claims.claim(self.group, name)
            holder = tables.claims.claimant(later) if later else None
            if holder is not None:
                return holder
        return None

    def positions(self, topics: Iterable[int]) -> dict[int, int]:
        """The committed positions, {topic: offset}, where there is one."""
        wanted = list(topics)

        def find(tables: Tables) -> dict[int, int]:
            return tables.cursors.positions(wanted, self.group)

        # No other reader commits any more, and what the last one has committed is flushed.
        return self._host.ledger.inspect(find, unflushed=True)

    def commit(self, positions: Positions) -> None:
        """Commit these positions: checked and written by one append. If they are too many for
        that, they go into the tables; so they do if the tables have no room for what is in the
        journal, but for this."""
        ledger = self._host.ledger
        try:
            if not self._append(positions):
                self._write_in(ledger.write_checkpointed(), positions)
        except LedgerFullError:
            self._write_in(ledger.write_exclusive(), positions)

    def _write_in(self, section: AbstractContextManager[Tables], positions: Positions) -> None:
        with section as tables:
            self.write(tables, positions)
            tables.check_reserve()  # no position takes what a change of owner needs

    def _append(self, positions: Positions) -> bool:
        """False if they are too many for one append."""
        ledger = self._host.ledger
        assert ledger.journal is not None
        joint = _core.Joint(ledger.journal, not self._host.unflushed)
        self.note(joint, positions)
        if not joint.fits:
            return False
        self.require(joint, positions)
        outcome: int = joint.place()
        while outcome in REPAIRABLE:
            if outcome == Outcome.FULL:
                ledger.checkpoint()
            else:
                self.forget_checks()
            joint.forget_requirements()
            self.require(joint, positions)
            outcome = joint.place()
        if outcome != Outcome.PLACED:
            raise failure(ledger, outcome, joint.tried)
        return True

    def note(self, joint: _core.Joint, positions: Positions) -> None:
        """Add the positions to an append."""
        for topic, offset in positions.items():
            joint.note(NOTED, self._key(topic), U64.pack(offset))

    def require(self, joint: _core.Joint, positions: Positions) -> None:
        """Let the append be refused if the claim or the topics have changed since they were last
        checked in the tables. The first call checks them."""
        claim, topics = self._checked
        if topics.keys() != positions.keys():
            claim, topics = self._checked = self._check_again(positions)
        joint.require_claim(self.id, claim)
        for topic, version in topics.items():
            joint.require_topic(topic, version)

    def forget_checks(self) -> None:
        """An append was refused so: the next one checks the claim and the topics."""
        self._checked = 0, {}

    def _check_again(self, positions: Positions) -> tuple[int, dict[int, int]]:
        ledger, topics = self._host.ledger, list(positions)
        claim, *versions = versions_of(ledger, [self.id], topics)  # before the tables are read
        with ledger.read() as tables:
            self._check_in(tables)
            self._check_topics(tables, positions)
        return claim, dict(zip(topics, versions, strict=True))

    def write(self, tables: Tables, positions: Positions) -> None:
        """Write the positions as a part of a transaction of the tables."""
        self._check_in(tables)
        self._check_topics(tables, positions)
        for topic, offset in positions.items():
            tables.cursors.put(topic, self.group, offset)

    def _check_topics(self, tables: Tables, positions: Positions) -> None:
        for topic in positions:
            self._key(topic)
            tables.topics.existing(topic)

    def _key(self, topic: int) -> bytes:
        """The key of its position on a topic of its claim."""
        key = self._keys.get(topic)
        if key is None:
            raise TopicNotFoundError(
                f"reader group {self.group!r}: a topic that it reads was deleted, and another one "
                "has its name; open a new reader or role"
            )
        return key

    def wait(self, cursors: Sequence[Any], marks: Sequence[int], seconds: float) -> None:
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
            self.release()
            self._ended = True  # set after the release: one that failed is retried


# ---- claiming ----------------------------------------------------------------------------


def _hold(
    host: Runtime,
    group: str,
    resources: Mapping[str, int | None],
    make: Callable[[Claimant], Held],
    check: Callable[[Tables], object] | None = None,
    reads: bool = False,
    until: int = 0,
) -> Held:
    """Claim resources in one transaction, in which `check` may raise, and which begins before
    `until`; `make` turns the claim into an object, which the engine registers."""
    claims, slot = Claims(host.ledger, host.sessions.succession), host.slot
    made: list[Claimant] = []
    try:
        # Hold the lock: a notification of its loss must not be read before the claim is registered.
        with _core.Holding(host.notifications.lock, until, host.ledger.journal):
            host.check_open()  # closing the engine releases the registered claims
            claimant = claims.take(host.info, slot, group, resources, check, made, reads, until)
            held = make(claimant)
            host.registry.keep_claim(claimant.id, held)
            return held
    except OwnershipError:
        raise
    except BaseException:  # Ctrl-C after the commit: the caller never gets this claim
        host.worker.give_up_claims(made, claims.release)
        raise


class LocalClaims:
    """The claims that one engine holds; see `exclusivelog.backend.ClaimStore`."""

    def __init__(self, host: Runtime) -> None:
        self._host = host
        self._claims = Claims(host.ledger, host.sessions.succession)

    def hold(
        self,
        group: str,
        resources: Mapping[str, int | None],
        make: Callable[[ClaimSession], Held],
        until: int = 0,
    ) -> Held:
        """Claim all of the resources or none; `make` turns the claim into the object that is
        registered."""
        host = self._host
        return _hold(
            host, group, resources, lambda claimant: make(HeldClaim(host, claimant)), until=until
        )

    def mark(self) -> int:
        """A number that changes with every release of a claim, for `wait`."""
        return self._claims.changes()

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""
        self._claims.wait_for_a_change(seen, seconds)

    def drain_bound(self, claim: int) -> None:
        """Commit what the producers that are bound to a claim have accepted."""
        for session in self._host.registry.bound_to(claim):
            session.sending.drain()


def join_group(
    host: Runtime, group: str, topics: Mapping[str, int], generation: int | None
) -> LocalGroupCursor:
    """Become the reader of these topics, {name: id}, in the group; the one before is fenced."""
    check_group(group)
    for name in topics:
        check_generation(name, generation)

    def check(tables: Tables) -> None:
        # Claims are on names. If another topic has this name by now, its reader must not be fenced.
        for topic in topics.values():
            tables.topics.existing(topic)

    def make(claimant: Claimant) -> LocalGroupCursor:
        return LocalGroupCursor(host, claimant, topics)

    joined = _hold(host, group, dict.fromkeys(topics, generation), make, check, reads=True)
    try:
        joined.announce()  # wake a former reader that waits: it has been fenced
    except BaseException:
        host.worker.give_up_claims([joined._claimant], joined._claims.release)
        raise
    return joined
