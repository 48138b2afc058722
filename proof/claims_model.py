"""Every order in which the records of a group's claims can arrive, for small worlds.

The rule is the library's own (`exclusivelog.cluster.claimed`). Claims are made from what a log has
at any time, with the decisions of `admission`; their records may arrive at any later time, in any
order, and any number of times. So a claim that arrives late was made from what its engine had read
long ago. After each arrival, the state is saved and restored.

Beside the rule, `Truth` keeps what its text promises, and both are compared after each step:

- a claim gets all of its resources or none, and only if it was made from the last claims of them;
- no resource has two holders, and a holder that has lost one resource has lost all, for good;
- a generation is the one that `admission.judge_claim` gives, and is granted once;
- positions are those of commits that came in order, from a reader that was not fenced;
- a claim is not refused without need.

`CONTROLS` are broken variants of the rule, which the walk must find out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from exclusivelog.admission import ClaimVerdict, judge_claim
from exclusivelog.cluster import claimed
from exclusivelog.cluster.claimed import (
    Clearing,
    Commit,
    Drop,
    Holdings,
    Noting,
    Resource,
    Ruling,
    Take,
)

Patch = tuple[object, str, Any]  # of which module or class, the name, what stands there instead

TOO_LOW = -1  # asked for in place of a generation: one below the last, which must be refused


class Violation(AssertionError):
    """The rule and the truth differ."""


class Size(NamedTuple):
    """How much a walk tries. `wanted`: generations that are asked for; `commits`, of each
    session."""

    name: str
    sessions: int
    wanted: tuple[int | None, ...]
    resources: str = "ab"
    commits: int = 0
    clearings: int = 0

    def __str__(self) -> str:
        return self.name


SMALL_SIZES = (
    Size("readers", 2, (None,), "a", commits=2, clearings=1),
    Size("two of two", 2, (None, 0, 1, 2, TOO_LOW)),
    Size("three", 3, (None, 0), "a"),
)
ALL_SIZES = (
    *SMALL_SIZES,
    Size("readers of two", 2, (None, 0, 1, 2, TOO_LOW), commits=1, clearings=1),
    Size("three readers", 3, (None,), "a", commits=1, clearings=1),
    Size("three of two", 3, (None, 0)),
)


# ---- what is promised --------------------------------------------------------------------


class Sent(NamedTuple):
    """A record that was appended, and may arrive at any time. `basis`: of a take, how many takes of
    each of its resources it was made from; `fair`: its generations are those that are due."""

    record: int
    basis: tuple[tuple[str, int], ...] = ()
    fair: bool = True


class Truth(NamedTuple):
    """What the promises say. Pairs, sorted, stand for dicts."""

    takes: tuple[tuple[str, int], ...] = ()  # how many of each resource have counted
    generations: tuple[tuple[str, int], ...] = ()
    holders: tuple[tuple[str, int], ...] = ()
    granted: frozenset[int] = frozenset()
    committed: tuple[tuple[int, int], ...] = ()
    positions: tuple[tuple[str, int], ...] = ()
    all_takes: int = 0  # that have counted

    def ending(self, sessions: Iterable[int]) -> Truth:
        """These have lost all that they had."""
        gone = set(sessions)
        return self._replace(
            holders=tuple(each for each in self.holders if each[1] not in gone),
            committed=tuple(each for each in self.committed if each[0] not in gone),
        )


class World(NamedTuple):
    """`held`: the rule's state, saved; `sent`: all records so far."""

    held: bytes
    truth: Truth
    sent: frozenset[Sent]
    cleared: int = 0


def pairs(found: dict[Any, int]) -> tuple[tuple[Any, int], ...]:
    return tuple(sorted(found.items()))


# ---- the steps ---------------------------------------------------------------------------


class Steps:
    """What can happen next in a world of this size."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.records: list[Noting] = []
        self._numbers: dict[bytes, int] = {}

    def sent(self, record: Noting, **more: Any) -> Sent:
        data = claimed.write(record)
        if data not in self._numbers:
            self._numbers[data] = len(self.records)
            self.records.append(record)
            assert claimed.read(data) == record
        return Sent(self._numbers[data], **more)

    def after(self, world: World) -> Iterator[World]:
        """The worlds after one step."""
        for sent in self._made(world):
            cleared = world.cleared + isinstance(self.records[sent.record], Clearing)
            yield world._replace(sent=world.sent | {sent}, cleared=cleared)
        for sent in world.sent:
            yield self._arrives(world, sent)

    def _made(self, world: World) -> Iterator[Sent]:
        held = Holdings.restore(world.held)
        there = [self.records[each.record] for each in world.sent]
        takes = [each for each in there if isinstance(each, Take)]
        if len(takes) < self.size.sessions:
            yield from self._takes(held, dict(world.truth.takes), len(takes) + 1)
        for take in takes:
            yield self.sent(Drop(take.session, 0))  # also by one that gives up
            known = [c for c in there if isinstance(c, Commit) and c.session == take.session]
            if take.session in world.truth.granted and len(known) < self.size.commits:
                number = len(known) + 1
                at = dict.fromkeys(take.generations, 10 * take.session + number)
                yield self.sent(Commit(take.session, number, at))
        if world.cleared < self.size.clearings:
            yield self.sent(Clearing(held.takes))

    def _takes(self, held: Holdings, counted: dict[str, int], session: int) -> Iterator[Sent]:
        names = self.size.resources
        for count in range(1, len(names) + 1):
            for chosen in itertools.combinations(names, count):
                for wanted in self.size.wanted:
                    generations = {name: due(held.last(name), wanted) for name in chosen}
                    if any(generation is None for generation in generations.values()):
                        continue
                    take = Take(
                        session,
                        {name: held.last(name).session for name in chosen},
                        {name: each or 0 for name, each in generations.items()},
                        "e",
                        "e",
                        1,
                        {},
                        0,
                        self.size.commits > 0,
                    )
                    basis = pairs({name: counted.get(name, 0) for name in chosen})
                    yield self.sent(take, basis=basis, fair=wanted != TOO_LOW)

    # ---- arrivals ------------------------------------------------------------------------

    def _arrives(self, world: World, sent: Sent) -> World:
        record, held = self.records[sent.record], Holdings.restore(world.held)
        ruling, ended = held.fold(record)
        right, truth = expected(world.truth, record, sent)
        if (ruling is Ruling.COUNTS) != right:
            raise Violation(f"{record}: {ruling.value}, at {world.truth}")
        gone = {s for _, s in world.truth.holders} - {s for _, s in truth.holders}
        if gone != {take.session for take in ended}:
            raise Violation(f"{record} ended {ended}, not {gone}")
        saved = held.save()
        check(Holdings.restore(saved), truth)
        return world._replace(held=saved, truth=truth)


def due(last: Resource, wanted: int | None) -> int | None:
    """The generation that a claim would get; None if it would be refused."""
    if wanted == TOO_LOW:
        return last.generation - 1 if last.generation > 1 else None
    verdict, generation = judge_claim(last.generation, False, wanted)
    return None if verdict is ClaimVerdict.STALE else generation


def expected(truth: Truth, record: Noting, sent: Sent) -> tuple[bool, Truth]:
    """Must this record count, and what is true then?"""
    if isinstance(record, Take):
        return _expected_take(truth, record, sent)
    if isinstance(record, Clearing):
        if record.takes != truth.all_takes:
            return False, truth
        readers = {session for _, session in truth.holders} if truth.committed else set()
        return True, truth.ending(readers)._replace(positions=())
    holds = any(session == record.session for _, session in truth.holders)
    if isinstance(record, Drop):
        return holds, truth.ending([record.session])
    made = dict(truth.committed).get(record.session, 0)
    if not holds or record.number != made + 1:
        return False, truth
    return True, truth._replace(
        committed=pairs({**dict(truth.committed), record.session: record.number}),
        positions=pairs({**dict(truth.positions), **record.positions}),
    )


def _expected_take(truth: Truth, take: Take, sent: Sent) -> tuple[bool, Truth]:
    counted, holders = dict(truth.takes), dict(truth.holders)
    if not sent.fair or any(counted.get(name, 0) != number for name, number in sent.basis):
        return False, truth
    if take.session in truth.granted:
        raise Violation(f"{take} is granted twice")
    after = truth.ending([holders[name] for name in take.generations if name in holders])
    return True, after._replace(
        takes=pairs({**counted, **{name: counted.get(name, 0) + 1 for name in take.generations}}),
        generations=pairs({**dict(truth.generations), **take.generations}),
        holders=pairs({**dict(after.holders), **dict.fromkeys(take.generations, take.session)}),
        granted=truth.granted | {take.session},
        committed=pairs({**dict(after.committed), take.session: 0} if take.reads else {}),
        all_takes=truth.all_takes + 1,
    )


def check(held: Holdings, truth: Truth) -> None:
    """Does the rule's state show what is true?"""
    there = {name: held.holder(name) for name in held.resources}
    shown = {name: take.session for name, take in there.items() if take is not None}
    generations = {name: each.generation for name, each in held.resources.items()}
    if pairs(shown) != truth.holders or set(held.sessions) != set(shown.values()):
        raise Violation(f"holders: {shown} of {sorted(held.sessions)}, not {truth.holders}")
    if pairs(generations) != truth.generations:
        raise Violation(f"generations: {generations}, not {truth.generations}")
    if pairs(held.positions) != truth.positions:
        raise Violation(f"positions: {held.positions}, not {truth.positions}")


# ---- the walk ----------------------------------------------------------------------------


def walk(size: Size, patches: Iterable[Patch] = (), most: int = 10**7) -> tuple[int, int]:
    """(states, steps), or a Violation."""
    with contextlib.ExitStack() as broken:
        for owner, name, instead in patches:
            broken.enter_context(mock.patch.object(owner, name, instead))
        steps, taken = Steps(size), 0
        first = World(Holdings().save(), Truth(), frozenset())
        seen, frontier = {first}, [first]
        while frontier:
            following = []
            for world in frontier:
                for after in steps.after(world):
                    taken += 1
                    if after not in seen:
                        seen.add(after)
                        following.append(after)
            frontier = following
            assert len(seen) < most
        return len(seen), taken


def find_out(patches: Iterable[Patch], sizes: Iterable[Size] = SMALL_SIZES) -> Exception | None:
    """What the walk has against a broken rule."""
    patches = tuple(patches)
    for size in sizes:
        try:
            walk(size, patches)
        except (Violation, KeyError, ValueError) as found:
            return found
    return None


# ---- broken rules ------------------------------------------------------------------------

_judge, _judge_take, _apply, _save = (
    claimed.judge,
    claimed._judge_take,
    Holdings._apply,
    Holdings.save,
)


def any_take(held: Holdings, take: Take) -> Ruling:
    return Ruling.COUNTS


def first_resource_alone(held: Holdings, take: Take) -> Ruling:
    name = next(iter(take.generations))
    same = held.last(name).session == take.seen[name]
    return Ruling.COUNTS if same else Ruling.UNSEEN


def last_resource_alone(held: Holdings, take: Take) -> Ruling:
    name = list(take.generations)[-1]
    same = held.last(name).session == take.seen[name]
    return Ruling.COUNTS if same else Ruling.UNSEEN


def whatever_is_free(held: Holdings, take: Take) -> Ruling:
    free = all(held.holder(name) is None for name in take.generations)
    return Ruling.COUNTS if free else _judge_take(held, take)


def by_generation(held: Holdings, take: Take) -> Ruling:
    low = any(
        0 != generation < held.last(name).generation
        for name, generation in take.generations.items()
    )
    return Ruling.LOW if low else Ruling.COUNTS


def no_generation_too_low(held: Holdings, take: Take) -> Ruling:
    ruling = _judge_take(held, take)
    return Ruling.COUNTS if ruling is Ruling.LOW else ruling


def zero_too_low(held: Holdings, take: Take) -> Ruling:
    low = any(g < held.last(n).generation for n, g in take.generations.items())
    return Ruling.LOW if low else _judge_take(held, take)


def equal_too_low(held: Holdings, take: Take) -> Ruling:
    low = any(0 != g <= held.last(n).generation for n, g in take.generations.items())
    return Ruling.LOW if low else _judge_take(held, take)


def one_at_a_time(held: Holdings, take: Take) -> Ruling:
    """A claim of others is refused while anything is held."""
    return Ruling.UNSEEN if held.sessions else _judge_take(held, take)


def judged(kind: type, ruling: Callable[[Holdings, Any], Ruling]) -> Callable[..., Ruling]:
    """The rule with another ruling on records of this kind."""

    def judge(held: Holdings, record: Noting) -> Ruling:
        return ruling(held, record) if isinstance(record, kind) else _judge(held, record)

    return judge


def counts_if(ruling: Ruling) -> Callable[[Holdings, Any], Ruling]:
    def judge(held: Holdings, record: Noting) -> Ruling:
        found = _judge(held, record)
        return Ruling.COUNTS if found is ruling else found

    return judge


def applied(kind: type, ended: Callable[[Holdings, Any, tuple[int, ...]], Any]) -> Any:
    """The rule with other sessions that records of this kind end."""

    def apply(held: Holdings, record: Noting) -> tuple[int, ...]:
        before = _apply(held, record)
        if isinstance(record, kind):
            found: tuple[int, ...] = ended(held, record, before)
            return found
        return before

    return apply


def keeping_others(held: Holdings, take: Take, ended: tuple[int, ...]) -> tuple[int, ...]:
    """Who has another resource goes on."""
    kept = {each.session for each in held.resources.values()}
    return tuple(session for session in ended if session not in kept)


def without_generation(held: Holdings, take: Take, ended: tuple[int, ...]) -> tuple[int, ...]:
    for name in take.generations:
        held.resources[name] = Resource(1, take.session)
    return ended


def keeping_positions(held: Holdings, record: Noting) -> tuple[int, ...]:
    before = dict(held.positions)
    ended = _apply(held, record)
    if isinstance(record, Clearing):
        held.positions.update(before)
    return ended


def forgetting(name: str, empty: Any) -> Any:
    def save(held: Holdings) -> bytes:
        whole = getattr(held, name)
        setattr(held, name, empty)
        try:
            return _save(held)
        finally:
            setattr(held, name, whole)

    return save


def saving_the_held_alone(held: Holdings) -> bytes:
    resources = {n: each for n, each in held.resources.items() if held.holder(n) is not None}
    return _save(Holdings(resources, held.sessions, held.commits, held.positions, held.takes))


CONTROLS: dict[str, tuple[Patch, ...]] = {
    "any take counts": ((claimed, "_judge_take", any_take),),
    "the first resource decides": ((claimed, "_judge_take", first_resource_alone),),
    "the last resource decides": ((claimed, "_judge_take", last_resource_alone),),
    "what is free goes to anyone": ((claimed, "_judge_take", whatever_is_free),),
    "the generation alone decides": ((claimed, "_judge_take", by_generation),),
    "no generation is too low": ((claimed, "_judge_take", no_generation_too_low),),
    "generation 0 is too low": ((claimed, "_judge_take", zero_too_low),),
    "an equal generation is too low": ((claimed, "_judge_take", equal_too_low),),
    "a group has one holder": ((claimed, "_judge_take", one_at_a_time),),
    "a take ends no session": ((Holdings, "_apply", applied(Take, lambda *_: ())),),
    "who loses one resource keeps others": ((Holdings, "_apply", applied(Take, keeping_others)),),
    "a take keeps the generation": ((Holdings, "_apply", applied(Take, without_generation)),),
    "a drop ends nothing": ((Holdings, "_apply", applied(Drop, lambda *_: ())),),
    "a drop ends all": (
        (Holdings, "_apply", applied(Drop, lambda held, *_: tuple(held.sessions))),
    ),
    "a drop of anyone counts": ((claimed, "judge", judged(Drop, counts_if(Ruling.ENDED))),),
    "a fenced reader commits": ((claimed, "judge", judged(Commit, counts_if(Ruling.ENDED))),),
    "a commit counts twice": ((claimed, "judge", judged(Commit, counts_if(Ruling.BEHIND))),),
    "a commit overtakes": ((claimed, "judge", judged(Commit, counts_if(Ruling.AHEAD))),),
    "any clearing counts": ((claimed, "judge", judged(Clearing, counts_if(Ruling.UNSEEN))),),
    "a clearing keeps positions": ((Holdings, "_apply", keeping_positions),),
    "a clearing keeps readers": ((Holdings, "_apply", applied(Clearing, lambda *_: ())),),
    "a saved state forgets sessions": ((Holdings, "save", forgetting("sessions", {})),),
    "a saved state forgets commits": ((Holdings, "save", forgetting("commits", {})),),
    "a saved state forgets positions": ((Holdings, "save", forgetting("positions", {})),),
    "a saved state forgets takes": ((Holdings, "save", forgetting("takes", 0)),),
    "a saved state forgets the free": ((Holdings, "save", saving_the_held_alone),),
}
