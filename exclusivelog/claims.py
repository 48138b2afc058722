"""The record of claims: who holds which resource, and what one may be claimed (rules F1-F5).

A claim covers one or more named resources, and is lost as a whole: a later claim on one of them,
with an equal or higher generation or with 0, revokes all of it. Each call of `engine.own` makes a
claim session of its own. One engine may have many, and each is lost by itself. The code, events
and error messages say "sever" for revoke.

Claims are checked in the critical section that appends: `txn.require(claim)` for one transaction,
`topic.producer(claim=claim)` for all that a producer sends. The transaction that revokes a claim
also evicts the producers that are bound to it, so that their sends check their session only
(rule B2).

It is the `own` call of Kafka's proposal for single readers and writers, on one machine.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exclusivelog.errors import OwnershipError
from exclusivelog.events import EVENTS, Event
from exclusivelog.ledger import Ledger
from exclusivelog.sessions import BELL, CLAIM_LOST, Sessions
from exclusivelog.tables import Claimant, Tables
from exclusivelog.types import ClaimInfo, EngineInfo, GroupInfo

if TYPE_CHECKING:
    from exclusivelog.moved_claims import Successors

MOST_NAME_BYTES = 240
NO_GROUP = ""  # of claims whose group was left out; no group that is named conflicts with it
HIGHEST_GENERATION = 2**63 - 1
LOOK_UP_SECONDS = 0.25  # a death rings no bell


class Verdict(enum.Enum):
    """What becomes of a claim on one resource."""

    GRANT = "grant"
    SEVER = "sever"  # granted; its holder loses everything
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
    return (Verdict.SEVER if held else Verdict.GRANT), generation


class Claims:
    """Every change of who holds which resource of one ledger."""

    def __init__(self, ledger: Ledger, sessions: Sessions) -> None:
        self._ledger = ledger
        self._sessions = sessions

    def _alive(self, claimant: Claimant) -> bool:
        return self._ledger.lockfile.alive(claimant.slot, claimant.engine)

    def take(
        self, engine: EngineInfo, slot: int, group: str, wanted: Mapping[str, int | None],
        check: Callable[[Tables], object] | None = None, made: list[Claimant] | None = None,
        reads: bool = False,
    ) -> Claimant:  # fmt: skip
        """Claim all of it or nothing, in one transaction, in which `check` may raise. `made` has
        the claim before it is committed, for a caller that is interrupted behind that."""
        with self._ledger.write() as tables:
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
        generations, severed = self.judge(tables, group, wanted)
        claimant = replace(claimant, id=tables.rows.next_id(b"claim"), generations=generations)
        self._sever(tables, list(severed.values()), claimant)
        tables.put_claimant(claimant)
        for resource, generation in generations.items():
            tables.put_claim(group, resource, generation, claimant.id)
        reason = "reader" if claimant.reads else "claim"
        record_claim(tables, claimant, "own", reason, target=claimant)
        return claimant

    def judge(
        self, tables: Tables, group: str, wanted: Mapping[str, int | None]
    ) -> tuple[dict[str, int], dict[int, Claimant]]:
        """The generations that these resources would get, and the claimants that would lose them,
        by id. Raises OwnershipError where one is refused."""
        generations: dict[str, int] = {}
        severed: dict[int, Claimant] = {}
        for resource, number in wanted.items():
            last, holder_id = tables.claim(group, resource)
            holder = tables.claimant(holder_id) if holder_id else None
            held = holder is not None and self._alive(holder)
            verdict, generation = decide(last, held, number)
            if verdict in (Verdict.STALE, Verdict.HELD):
                raise _refusal(group, resource, number, last, holder if held else None)
            generations[resource] = generation
            if holder is not None:
                severed[holder.id] = holder
        return generations, severed

    def _sever(self, tables: Tables, severed: list[Claimant], rival: Claimant) -> None:
        for claimant in severed:
            alive = self._alive(claimant)
            reason = "claimed" if alive else self._sessions.end_of(claimant)
            record_claim(tables, claimant, "sever", reason, source=claimant, target=rival)
        if severed:
            self._sessions.end_claims(tables, severed, "evict")
        for claimant in severed:
            if self._ledger.lockfile.exists(claimant.slot, claimant.engine):
                tables.post(claimant, CLAIM_LOST, severed_text(claimant, rival))

    def release(self, claimant: Claimant) -> bool:
        """Give everything back; False if it was severed before. Nobody is disturbed then."""
        with self._ledger.write() as tables:
            if tables.claimant(claimant.id) is None:
                return False
            record_claim(tables, claimant, "release", "closed", source=claimant)
            self._sessions.end_claims(tables, [claimant], "release")
            return True

    def holds(self, claimant: Claimant) -> bool:
        """Is this claim still valid?"""
        with self._ledger.read() as tables:
            return tables.claimant(claimant.id) is not None

    def successor(self, claimant: Claimant, known: Successors) -> EngineInfo | None:
        """Where a claim has moved that is lost; None if it was severed by a later one."""
        with self._ledger.read() as tables:
            return known.of(tables, claimant)

    # ---- look ----------------------------------------------------------------------------

    def living(self, group: str | None) -> list[ClaimInfo]:
        """The claims of a group (None: of all) whose engines live, the oldest first."""
        with self._ledger.read() as tables:
            return [claim_info(claimant) for claimant in self._living(tables, group)]

    def _living(self, tables: Tables, group: str | None) -> list[Claimant]:
        return [
            claimant
            for claimant in tables.claimants()
            if group in (None, claimant.group)
            and self._alive(claimant)
            and not self._sessions.roles.is_anchor(tables, claimant)
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
                cursors: dict[str, int | None] = dict(tables.cursors(topic))
                for group in {*cursors, *(g for g, read in readers if read == name)}:
                    position = cursors.get(group)
                    lag = None if position is None else max(0, end - position)
                    found.append(GroupInfo(group, name, position, lag, readers.get((group, name))))
        return sorted(found, key=lambda info: (info.group, info.topic))

    # ---- wait ----------------------------------------------------------------------------

    def wait_for_a_change(self, seen: int, seconds: float) -> None:
        """Sleep until something was given back, or somebody may have died."""
        lockfile = self._ledger.lockfile
        left = min(seconds, LOOK_UP_SECONDS)
        lockfile.await_topic(lockfile.topic_word(BELL), seen, left, spin=False)

    def changes(self) -> int:
        """Grows with everything that is given back."""
        lockfile = self._ledger.lockfile
        return lockfile.words.load(lockfile.topic_word(BELL))


def describe_claim(claimant: Claimant) -> str:
    """A claim, for an error's text."""
    group = f"group {claimant.group!r}" if claimant.group else "no group"
    return f"<Claim of {claimant.generations} in {group}>"


def severed_text(claimant: Claimant, rival: Claimant | None) -> str:
    """What the holder of a claim is told that was revoked."""
    by = "" if rival is None else (
        f" by engine {rival.engine_name!r} (id {rival.engine}, pid {rival.pid})"
    )  # fmt: skip
    return (
        f"{describe_claim(claimant)} was severed: one of its resources was claimed{by} with an "
        "equal or higher generation, or with 0. Make a new one with engine.own"
    )


def claim_info(claimant: Claimant) -> ClaimInfo:
    """The public facts about a claim session."""
    return ClaimInfo(
        claimant.id, claimant.group, dict(claimant.generations), claimant.engine,
        claimant.engine_name, claimant.pid, claimant.since, claimant.reads,
    )  # fmt: skip


# ---- the record --------------------------------------------------------------------------


def record_claim(
    tables: Tables, about: Claimant, kind: str, reason: str, *,
    source: Claimant | None = None, target: Claimant | None = None,
) -> None:  # fmt: skip
    """Tell of each of a claim's resources in `__events__`, within its transaction (rule E5); not of
    those who read `__events__`: they would wait for themselves."""
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


def _party(claimant: Claimant | None) -> dict[str, Any] | None:
    if claimant is None:
        return None
    return {
        "engine": claimant.engine, "engine_name": claimant.engine_name, "pid": claimant.pid,
        "producer": None, "properties": {}, "engine_properties": claimant.engine_properties,
    }  # fmt: skip


def check_group(group: object) -> None:
    """An error that says what a group's name is, unless this is one."""
    check_resource("group", group)


def check_resource(argument: str, name: object) -> None:
    """An error that says what the name of a group or resource is, unless this is one."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}={name!r}: it takes a str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{argument}={name!r} cannot be written as UTF-8") from None
    if not 1 <= size <= MOST_NAME_BYTES:
        raise ValueError(f"{argument}={name!r}: it takes 1 to {MOST_NAME_BYTES} bytes of UTF-8")


def check_generation(resource: str, generation: object) -> None:
    """An error that says what a resource's generation is, unless this is one."""
    if generation is None:
        return
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise TypeError(f"generation of {resource!r}: it takes an int or None, not {generation!r}")
    if not 0 <= generation <= HIGHEST_GENERATION:
        raise ValueError(f"generation={generation} of {resource!r}: it takes 0 to 2**63 - 1")


def _refusal(
    group: str, resource: str, wanted: int | None, last: int, holder: Claimant | None
) -> OwnershipError:
    if holder is None:
        error = OwnershipError(
            f"resource {resource!r} of group {group!r} has been at generation {last}; {wanted} is "
            "over. Claim it with None for the next one"
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
