"""Claims: any resource, held by one claim session of a group (rules F1-F5).

A claim says "these strings are mine", and is lost as a whole: whoever claims one of them with
an equal or higher generation severs all of it. It guards nothing by itself: its holder asks
`claim.check()` before he acts, or puts the generation into what he writes.

It is the `own` call of Kafka's proposal for single readers and writers, on one machine.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from exclusivelog.errors import OwnershipError, OwnershipLostError
from exclusivelog.ledger import Ledger
from exclusivelog.tables import Claimant, Tables
from exclusivelog.types import EngineInfo

if TYPE_CHECKING:
    from exclusivelog.engine import Engine

MOST_NAME_BYTES = 240
HIGHEST_GENERATION = 2**63 - 1
BELL = 0  # the counter that says "a resource may be free"; no topic has this id
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

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def _alive(self, claimant: Claimant) -> bool:
        return self._ledger.lockfile.alive(claimant.slot, claimant.engine)

    def take(
        self, engine: EngineInfo, slot: int, group: str, wanted: Mapping[str, int | None],
        check: Callable[[Tables], object] | None = None,
    ) -> Claimant:  # fmt: skip
        """Claim all of it or nothing, in one transaction, in which `check` may raise."""
        with self._ledger.write() as tables:
            if check is not None:
                check(tables)
            generations, severed = self._judge(tables, group, wanted)
            for claimant in severed.values():
                self._sever(tables, claimant)
            claimant = Claimant(
                tables.rows.next_id(b"claim"), engine.id, slot, engine.pid, engine.name, group,
                generations, time.time_ns() // 1_000_000,
            )  # fmt: skip
            tables.put_claimant(claimant)
            for resource, generation in generations.items():
                tables.put_claim(group, resource, generation, claimant.id)
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

    def _sever(self, tables: Tables, claimant: Claimant) -> None:
        tables.drop_claimant(claimant.id)
        for resource in claimant.generations:
            last, holder = tables.claim(claimant.group, resource)
            if holder == claimant.id:
                tables.put_claim(claimant.group, resource, last, 0)
        tables.announce.add(BELL)

    def release(self, claimant: Claimant) -> bool:
        """Give everything back; False if it was severed before. Nobody is disturbed then."""
        with self._ledger.write() as tables:
            if tables.claimant(claimant.id) is None:
                return False
            self._sever(tables, claimant)
            return True

    def holds(self, claimant: Claimant) -> bool:
        """Is this claim still valid?"""
        with self._ledger.read() as tables:
            return tables.claimant(claimant.id) is not None

    def wait_for_a_change(self, seen: int, seconds: float) -> None:
        """Sleep until something was given back, or somebody may have died."""
        lockfile = self._ledger.lockfile
        left = min(seconds, LOOK_UP_SECONDS)
        lockfile.await_topic(lockfile.topic_word(BELL), seen, left, spin=False)

    def changes(self) -> int:
        """Grows with everything that is given back."""
        lockfile = self._ledger.lockfile
        return lockfile.words.load(lockfile.topic_word(BELL))


class Claim:
    """Resources of a group that are ours. Made by `engine.own`.

    >>> with engine.own("reports", {"march": None}) as claim:
    ...     claim.is_valid, claim.generations
    (True, {'march': 1})
    """

    def __init__(self, engine: Engine, claims: Claims, claimant: Claimant) -> None:
        self.group = claimant.group
        self._engine = engine
        self._claims = claims
        self._claimant = claimant
        self._released = False

    @property
    def is_valid(self) -> bool:
        """Is all of it still ours? Looked up in the ledger (rule F5)."""
        if self._released or self._engine.closed:
            return False
        return self._claims.holds(self._claimant)

    def check(self) -> None:
        """OwnershipLostError unless all of it is still ours (rule F5)."""
        self._engine.check_open()
        if self._released:
            raise OwnershipLostError(f"{self!r} was released; make a new one with engine.own")
        if not self._claims.holds(self._claimant):
            raise OwnershipLostError(
                f"{self!r} was severed: one of its resources was claimed with an equal or higher "
                "generation. Make a new one with engine.own"
            )

    @property
    def generations(self) -> dict[str, int]:
        """{resource: generation}, to put into what is written elsewhere. Raises
        OwnershipLostError once the claim is lost (rule F5)."""
        self.check()
        return dict(self._claimant.generations)

    def release(self) -> None:
        """Give everything back. Twice, or after the claim was severed, it does nothing."""
        if not (self._released or self._engine.closed):
            self.end()

    def end(self) -> None:
        """Give everything back, for an engine that is closing."""
        if not self._released:
            self._claims.release(self._claimant)
            self._released = True

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
        return f"<Claim of {self._claimant.generations} in group {self.group!r}>"


def own(
    engine: Engine, claims: Claims, info: EngineInfo, slot: int, group: str,
    resources: Mapping[str, int | None], timeout: float | None,
) -> Claim:  # fmt: skip
    """What `Engine.own` does, arguments and waiting included."""
    check_group(group)
    if not isinstance(resources, Mapping) or not resources:
        raise TypeError("resources takes a mapping of names to generations, one at least")
    for resource, generation in resources.items():
        _check_name("resources", resource)
        _check_generation(resource, generation)
    end = time.monotonic() + (timeout or 0.0)
    while True:
        engine.check_open()
        seen = claims.changes()
        try:
            return Claim(engine, claims, claims.take(info, slot, group, resources))
        except OwnershipError as error:
            left = end - time.monotonic()
            if left <= 0 or not error.retriable:
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


def _check_generation(resource: str, generation: object) -> None:
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
