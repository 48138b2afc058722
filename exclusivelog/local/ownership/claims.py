"""The record of claims: who holds which resource, and what one may be claimed (rules F1-F5).

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

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from exclusivelog.errors import OwnershipError
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.ownership.changes import CLAIM_LOST, RESOURCES, record_claim
from exclusivelog.local.records import Claimant
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables
from exclusivelog.types import ClaimInfo, EngineInfo, GroupInfo

if TYPE_CHECKING:
    from exclusivelog.local.ownership.moved_claims import Successors

POLL_SECONDS = 0.25  # a death sends no wake-up


class Verdict(enum.Enum):
    """What becomes of a claim on one resource."""

    GRANT = "grant"
    REVOKE = "revoke"  # granted; its holder loses everything
    STALE = "stale"  # a number below the last one
    HELD = "held"  # its holder has a higher generation


def decide(last: int, held: bool, wanted: int | None) -> tuple[Verdict, int]:
    """The verdict, and the resource's generation if it is granted. Pure.

    `last` is the resource's last generation (0: none yet), `held` says that its holder lives.

    >>> decide(4, False, None), decide(4, True, 3)
    ((<Verdict.GRANT: 'grant'>, 5), (<Verdict.HELD: 'held'>, 3))
    """
    generation = last + 1 if wanted is None else wanted
    if generation < last and generation != 0:  # 0 always wins, and begins anew (rule F4)
        return (Verdict.HELD if held else Verdict.STALE), generation
    return (Verdict.REVOKE if held else Verdict.GRANT), generation


class Sessions(Protocol):
    """What becomes of the sessions that are bound to claims."""

    def end_of(self, party: Claimant) -> str:
        """How its engine ended that does not live: an event's reason."""

    def end_claims(self, tables: Tables, claimants: Sequence[Claimant], kind: str) -> None:
        """Claims are gone, and with them the producers that are bound to them."""


class Claims:
    """Every change of who holds which resource of one ledger."""

    def __init__(self, ledger: Ledger, sessions: Sessions) -> None:
        self._ledger = ledger
        self._sessions = sessions

    def _alive(self, claimant: Claimant) -> bool:
        return self._ledger.lockfile.slots.alive(claimant.slot, claimant.engine)

    def take(
        self, engine: EngineInfo, slot: int, group: str, wanted: Mapping[str, int | None],
        check: Callable[[Tables], object] | None = None, made: list[Claimant] | None = None,
        reads: bool = False,
    ) -> Claimant:  # fmt: skip
        """Claim all of it or nothing, in one transaction, in which `check` may raise. `made` has
        the claim before it is committed, for a caller that is interrupted behind that."""
        with self._ledger.write_exclusive() as tables:
            if check is not None:
                check(tables)
            claimant = Claimant(
                0, engine.id, slot, engine.pid, engine.name, group, {},
                time.time_ns() // 1_000_000, dict(engine.properties), reads,
            )  # fmt: skip
            claimant = self.take_in(tables, claimant, group, wanted)
            if made is not None:
                made.append(claimant)
            return claimant

    def take_in(
        self, tables: Tables, claimant: Claimant, group: str, wanted: Mapping[str, int | None]
    ) -> Claimant:
        """The same, as a part of a transaction, for a claimant that has no id and no generations
        yet; it is returned with both."""
        generations, revoked = self.judge(tables, group, wanted)
        claimant = replace(claimant, id=tables.rows.next_id(b"claim"), generations=generations)
        self._revoke(tables, list(revoked.values()), claimant)
        tables.claims.put_claimant(claimant)
        for resource, generation in generations.items():
            tables.claims.put_claim(group, resource, generation, claimant.id)
        reason = "reader" if claimant.reads else "claim"
        record_claim(tables, claimant, "own", reason, target=claimant)
        return claimant

    def judge(
        self, tables: Tables, group: str, wanted: Mapping[str, int | None]
    ) -> tuple[dict[str, int], dict[int, Claimant]]:
        """The generations that these resources would get, and the claimants that would lose them,
        by id. Raises OwnershipError where one is refused."""
        generations: dict[str, int] = {}
        revoked: dict[int, Claimant] = {}
        for resource, number in wanted.items():
            last, holder_id = tables.claims.claim(group, resource)
            holder = tables.claims.claimant(holder_id) if holder_id else None
            held = holder is not None and self._alive(holder)
            verdict, generation = decide(last, held, number)
            if verdict in (Verdict.STALE, Verdict.HELD):
                raise _refusal(group, resource, number, last, holder if held else None)
            generations[resource] = generation
            if holder is not None:
                revoked[holder.id] = holder
        return generations, revoked

    def _revoke(self, tables: Tables, revoked: list[Claimant], rival: Claimant) -> None:
        for claimant in revoked:
            alive = self._alive(claimant)
            reason = "claimed" if alive else self._sessions.end_of(claimant)
            record_claim(tables, claimant, "revoke", reason, source=claimant, target=rival)
        if revoked:
            self._sessions.end_claims(tables, revoked, "evict")
        for claimant in revoked:
            if self._ledger.lockfile.slots.exists(claimant.slot, claimant.engine):
                tables.notifications.post(claimant, CLAIM_LOST, revoked_text(claimant, rival))

    def release(self, claimant: Claimant) -> bool:
        """Give everything back; False if it was revoked before, and changes nothing then."""
        with self._ledger.write_exclusive() as tables:
            if tables.claims.claimant(claimant.id) is None:
                return False
            record_claim(tables, claimant, "release", "closed", source=claimant)
            self._sessions.end_claims(tables, [claimant], "release")
            return True

    def holds(self, claimant: Claimant) -> bool:
        """Is this claim still valid?"""
        with self._ledger.read() as tables:
            return tables.claims.claimant(claimant.id) is not None

    def successor(self, claimant: Claimant, known: Successors) -> EngineInfo | None:
        """Where a claim has moved that is lost; None if it was revoked by a later one."""
        with self._ledger.read() as tables:
            return known.of(tables, claimant)

    # ---- inspect -------------------------------------------------------------------------

    def living(self, group: str | None) -> list[ClaimInfo]:
        """The claims of a group (None: of all) whose engines live, the oldest first."""
        with self._ledger.read() as tables:
            return [claim_info(claimant) for claimant in self._living(tables, group)]

    def _living(self, tables: Tables, group: str | None) -> list[Claimant]:
        return [
            claimant
            for claimant in tables.claims.claimants()
            if group in (None, claimant.group)
            and self._alive(claimant)
            and not role_rows.is_anchor(tables, claimant)
        ]

    def groups(self, topics: Iterable[tuple[str, int, int]]) -> list[GroupInfo]:
        """The reader groups of topics (name, id, next offset), sorted."""
        found: list[GroupInfo] = []
        with self._ledger.read() as tables:
            readers = {
                (claimant.group, name): claim_info(claimant)
                for claimant in self._living(tables, None)
                for name in (claimant.generations if claimant.reads else ())
            }
            for name, topic, end in topics:
                cursors: dict[str, int | None] = dict(tables.cursors.all(topic))
                for group in {*cursors, *(g for g, read in readers if read == name)}:
                    position = cursors.get(group)
                    lag = None if position is None else max(0, end - position)
                    found.append(GroupInfo(group, name, position, lag, readers.get((group, name))))
        return sorted(found, key=lambda info: (info.group, info.topic))

    # ---- wait ----------------------------------------------------------------------------

    def wait_for_a_change(self, seen: int, seconds: float) -> None:
        """Sleep until something was given back, or an engine may have died."""
        lockfile = self._ledger.lockfile
        left = min(seconds, POLL_SECONDS)
        lockfile.counters.wait(lockfile.counters.place(RESOURCES), seen, left, spin=False)

    def changes(self) -> int:
        """Grows with everything that is given back."""
        lockfile = self._ledger.lockfile
        return lockfile.atomics.load(lockfile.counters.place(RESOURCES))


def describe_claim(claimant: Claimant) -> str:
    """A claim, for an error's text."""
    group = f"group {claimant.group!r}" if claimant.group else "no group"
    return f"<Claim of {claimant.generations} in {group}>"


def revoked_text(claimant: Claimant, rival: Claimant | None) -> str:
    """What the holder of a claim is told that was revoked."""
    by = "" if rival is None else (
        f" by engine {rival.engine_name!r} (id {rival.engine}, pid {rival.pid})"
    )  # fmt: skip
    return (
        f"{describe_claim(claimant)} was revoked: one of its resources was claimed{by} with an "
        "equal or higher generation, or with 0. Make a new one with engine.own"
    )


def claim_info(claimant: Claimant) -> ClaimInfo:
    """The public facts about a claim session."""
    return ClaimInfo(
        claimant.id, claimant.group, dict(claimant.generations), claimant.engine,
        claimant.engine_name, claimant.pid, claimant.since, claimant.reads,
    )  # fmt: skip


def _refusal(
    group: str, resource: str, wanted: int | None, last: int, holder: Claimant | None
) -> OwnershipError:
    if holder is None:
        error = OwnershipError(
            f"resource {resource!r} of group {group!r} has been at generation {last}: {wanted} is "
            "out of date. Claim it with None for the next one"
        )
    else:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(holder.since / 1000))
        error = OwnershipError(
            f"resource {resource!r} of group {group!r} is held with generation {last}, above "
            f"{wanted}, by engine {holder.engine_name!r} (id {holder.engine}, pid {holder.pid}, "
            f"since {since} UTC). Claim it with {last} or more, or None, to take it"
        )
        error.retriable = True
    return error
