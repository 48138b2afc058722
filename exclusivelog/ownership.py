"""Claims: any resource, held by one claim session of a group (rules F1-F5).

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
from types import TracebackType
from typing import TYPE_CHECKING, Any

from exclusivelog import _core
from exclusivelog.errors import OwnershipError, OwnershipLostError
from exclusivelog.events import EVENTS, Event
from exclusivelog.ledger import Ledger
from exclusivelog.moved_claims import moved_error
from exclusivelog.runtime import Runtime
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
            generations, severed = self._judge(tables, group, wanted)
            claimant = Claimant(
                tables.rows.next_id(b"claim"), engine.id, slot, engine.pid, engine.name, group,
                generations, time.time_ns() // 1_000_000, dict(engine.properties), reads,
            )  # fmt: skip
            self._sever(tables, list(severed.values()), claimant)
            if made is not None:
                made.append(claimant)
            tables.put_claimant(claimant)
            for resource, generation in generations.items():
                tables.put_claim(group, resource, generation, claimant.id)
            reason = "reader" if reads else "claim"
            _record(tables, claimant, "own", reason, target=claimant)
            return claimant

    def _judge(
        self, tables: Tables, group: str, wanted: Mapping[str, int | None]
    ) -> tuple[dict[str, int], dict[int, Claimant]]:
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
            _record(tables, claimant, "sever", reason, source=claimant, target=rival)
        if severed:
            self._sessions.end_claims(tables, severed, "evict")
        for claimant in severed:
            if self._ledger.lockfile.exists(claimant.slot, claimant.engine):
                tables.post(claimant, CLAIM_LOST, _severed(claimant, rival))

    def release(self, claimant: Claimant) -> bool:
        """Give everything back; False if it was severed before. Nobody is disturbed then."""
        with self._ledger.write() as tables:
            if tables.claimant(claimant.id) is None:
                return False
            _record(tables, claimant, "release", "closed", source=claimant)
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
            if group in (None, claimant.group) and self._alive(claimant)
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


OnLost = Callable[["Claim", OwnershipLostError], object]


class Claim:
    """The resources that one call of `engine.own` has claimed. They are lost as a whole.

    `group` is the group's name, "" if it was left out. A claim is held until it is released or
    revoked, or its engine closes: dropping this object does not release it.

    >>> with engine.own("reports", {"march": None}) as claim:
    ...     claim.is_valid, claim.generations
    (True, {'march': 1})
    """

    def __init__(
        self, engine: Runtime, claims: Claims, claimant: Claimant, on_lost: OnLost | None = None
    ) -> None:
        self.group = claimant.group
        self._engine = engine
        self._claims = claims
        self._claimant = claimant
        self._on_lost = on_lost
        self._released = False

    @property
    def id(self) -> int:
        """The claim session's number, never given to another one on this ledger."""
        return self._claimant.id

    @property
    def engine(self) -> Runtime:
        """The engine that made this claim."""
        return self._engine

    @property
    def ledger(self) -> Ledger:
        """The ledger that stores this claim."""
        return self._engine.ledger

    @property
    def is_valid(self) -> bool:
        """True while the whole claim is held; each call reads the ledger (rule F5)."""
        if self._released or self._engine.closed:
            return False
        return self._claims.holds(self._claimant)

    def check(self) -> None:
        """Raise OwnershipLostError unless the whole claim is still held (rule F5).

        If the claim was handed over, the error's `successor` names the destination."""
        self._engine.check_open()
        if self._released or not self._claims.holds(self._claimant):
            raise self._lost_error()

    def check_in(self, tables: Tables) -> None:
        """As `check`, within a transaction: all that it writes is written under this claim."""
        if tables.claimant(self.id) is None:
            raise self._lost_error()

    def _lost_error(self) -> OwnershipLostError:
        if self._released:
            return OwnershipLostError(f"{self!r} was released; make a new one with engine.own")
        successor = self._claims.successor(self._claimant, self._engine.mailbox.successors)
        if successor is not None:
            return moved_error(repr(self), successor)
        return OwnershipLostError(_severed(self._claimant, None))

    def lose(self, error: OwnershipLostError) -> None:
        """The claim was revoked: call `on_lost`."""
        on_lost = self._on_lost
        if on_lost is not None and not self._released:
            self._engine.call_soon(lambda: on_lost(self, error))

    @property
    def generations(self) -> dict[str, int]:
        """{resource: generation}, to store as a fencing token in other systems. Raises
        OwnershipLostError once the claim is lost (rule F5)."""
        self.check()
        return dict(self._claimant.generations)

    def release(self) -> None:
        """Release the claim. A second call, or one after the claim was revoked, does nothing.

        Producers that are bound to it first commit what they have accepted; then they end with
        ProducerRevokedError."""
        if not (self._released or self._engine.closed):
            self._engine.drain_bound(self.id)
            self.end()

    def end(self) -> None:
        """Release the claim; for an engine that is closing."""
        if not self._released:
            self._claims.release(self._claimant)
            self._released = True
            self._engine.forget_claim(self.id)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return _describe(self._claimant)


def _describe(claimant: Claimant) -> str:
    group = f"group {claimant.group!r}" if claimant.group else "no group"
    return f"<Claim of {claimant.generations} in {group}>"


def _severed(claimant: Claimant, rival: Claimant | None) -> str:
    by = "" if rival is None else (
        f" by engine {rival.engine_name!r} (id {rival.engine}, pid {rival.pid})"
    )  # fmt: skip
    return (
        f"{_describe(claimant)} was severed: one of its resources was claimed{by} with an equal or "
        "higher generation, or with 0. Make a new one with engine.own"
    )


def claim_info(claimant: Claimant) -> ClaimInfo:
    """The public facts about a claim session."""
    return ClaimInfo(
        claimant.id, claimant.group, dict(claimant.generations), claimant.engine,
        claimant.engine_name, claimant.pid, claimant.since, claimant.reads,
    )  # fmt: skip


# ---- the record --------------------------------------------------------------------------


def _record(
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


# ---- the call ----------------------------------------------------------------------------


def own(
    engine: Runtime, group: str | Mapping[str, int | None] | None,
    resources: Mapping[str, int | None] | None, timeout: float | None, on_lost: OnLost | None,
) -> Claim:  # fmt: skip
    """What `Engine.own` does, arguments and waiting included."""
    claims = Claims(engine.ledger, engine.sessions)
    slot = engine.slot  # or why there is none
    if isinstance(group, Mapping) and resources is None:
        group, resources = None, group
    if group is not None:
        check_group(group)
    name = group if isinstance(group, str) else NO_GROUP
    if on_lost is not None and not callable(on_lost):
        raise TypeError("on_lost takes a function of (claim, error)")
    if not isinstance(resources, Mapping) or not resources:
        raise TypeError("resources takes a mapping of names to generations, one at least")
    for resource, generation in resources.items():
        _check_name("resources", resource)
        check_generation(resource, generation)
    end = time.monotonic() + (timeout or 0.0)
    while True:
        engine.check_open()
        seen = claims.changes()
        made: list[Claimant] = []
        try:
            # Its loss must not be told before the engine knows it.
            with _core.Holding(engine.mailbox.lock):
                engine.check_open()  # closing it releases what is registered by then
                claimant = claims.take(engine.info, slot, name, resources, made=made)
                claim = Claim(engine, claims, claimant, on_lost)
                engine.keep_claim(claimant.id, claim)
            return claim
        except OwnershipError as error:
            left = end - time.monotonic()
            if left <= 0 or not error.retriable:
                raise
        except BaseException:  # Ctrl-C behind the commit: nobody has this claim
            engine.give_up_claims(made, claims.release)
            raise
        claims.wait_for_a_change(seen, left)


def check_group(group: object) -> None:
    """An error that says what a group's name is, unless this is one."""
    _check_name("group", group)


def _check_name(argument: str, name: object) -> None:
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
