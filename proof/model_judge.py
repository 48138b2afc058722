"""What the model judges each transaction by: the rules, spelled out once more."""

from __future__ import annotations

from typing import Any

from proof.world import Row, State, Violation, World, is_alive, place
from testing.processes import EXCLUSIVE, FENCING, SHARED, WAIT


def in_transit(state: State) -> int | None:
    """To which engine the topic is on its way, if that can still succeed."""
    move = state.move
    if move is None or move.late or not is_alive(state.engines, move.target, move.life):
        return None
    return move.target if state.owner in (0, move.session) else None


def leaves_it(state: State, row: Row) -> bool:
    """Does it leave a free topic to better ones that reconnect?"""
    known = state.known
    is_best = known is not None and known[0] > known[1] and row.priority >= known[0]
    settled = state.settled and not state.holders
    return bool(row.settle) and not (settled or row.patient or is_best)


class Watch:
    """Sees each session that a transaction admits or drops, in their order."""

    def __init__(self, world: World, state: State, operation: str) -> None:
        self.top = state.top
        self._world = world
        self._state = state
        self._target = None if operation == "end" else in_transit(state)
        self._waited = {row.id for row in state.queue}
        self._living_dropped = False

    def _home(self, row: Row) -> int:
        return self._world.engine_of[row.producer]

    def _alive(self, row: Row) -> bool:
        return is_alive(self._state.engines, self._home(row), row.life)

    def reserved(self, engine: int) -> None:
        """A hand-over to this engine has begun, or made a step."""
        self._target = engine

    def dropped(self, row: Row) -> None:
        """A session holds, or waits, no longer."""
        self._living_dropped |= self._alive(row)

    def admitted(self, row: Row, holders: list[Row], queue: list[Row]) -> None:
        """This session holds the topic from now on, with all these, while others wait."""
        if not self._alive(row):
            raise Violation(f"{row} is admitted, and is dead")
        if row.claim not in (None, self.top):
            raise Violation(f"{row} is admitted at epoch {self.top}")
        forced = row.mode == FENCING
        if self._target not in (None, self._home(row)) and not forced:
            raise Violation(f"{row} gets a topic that is on its way to engine {self._target}")
        others = [each for each in holders if each.id != row.id]
        if row.mode == SHARED:
            if any(each.mode != SHARED for each in others):
                raise Violation(f"{row} is let in beside {others}")
            self._judge_order(row, queue)
            return
        if others:
            raise Violation(f"{row} is granted beside {others}")
        again = row.claim == row.epoch == self.top and self._target is None
        if row.epoch != self.top + 1 and not (again and not (forced and self._living_dropped)):
            raise Violation(f"epoch {row.epoch} is granted after {self.top}, to {row}")
        if not forced:
            self._judge_order(row, queue)
        self.top = max(self.top, row.epoch)

    def _judge_order(self, row: Row, queue: list[Row]) -> None:
        """Is it first in the order of the queue?"""
        others = [each for each in queue if each.id != row.id]
        if row.id in self._waited or row.mode == WAIT:
            fit = [
                each
                for each in others
                if self._alive(each)
                and each.claim in (None, self.top)
                and self._target in (None, self._home(each))
            ]
            if any(place(each) < place(row) for each in fit):
                raise Violation(f"{row} is promoted before {fit}")
        elif self._target is None and others:
            raise Violation(f"{row} is admitted before {others}")
        if self._target is None and leaves_it(self._state, row):
            raise Violation(f"{row} does not leave the topic to better ones")


def judge_outcome(
    world: World, before: State, operation: str, about: Any, outcome: Any, after: State
) -> None:
    """Is this what the operation may have made of it?"""
    if operation == "request" and outcome in (None, "arriving"):
        judge_refusal(world, before, about, outcome, after)
        return
    if operation == "release" and outcome and in_transit(before) is None:
        raise Violation(f"session {about} releases a topic that goes nowhere")
    judge_dropped(world, before, operation, about, after)
    if operation not in ("close", "release") or rows(before) != rows(after):  # else it was stale
        judge_vacancy(world, after)


def rows(state: State) -> tuple[Any, ...]:
    """What the tables have."""
    return state.epoch, state.owner, state.holders, state.queue, state.move


def judge_refusal(world: World, before: State, row: Row, outcome: str | None, after: State) -> None:
    """A refused request changes nothing; it waits if its engine is about to get the topic."""
    if rows(before) != rows(after):
        raise Violation(f"{row} is refused, and has changed {before}")

    def alive(each: Row) -> bool:
        return is_alive(before.engines, world.engine_of[each.producer], each.life)

    home = world.engine_of[row.producer]
    fits = row.claim in (None, before.epoch)
    waiters = [each for each in before.queue if alive(each)]
    in_the_way = (
        waiters
        if row.mode == SHARED
        else [each for each in waiters if world.engine_of[each.producer] == home]
    )
    owned = any(each.id == before.owner and alive(each) for each in before.holders)
    coming = owned and in_transit(before) == home and row.mode in (SHARED, EXCLUSIVE)
    if (outcome == "arriving") != (coming and fits and not in_the_way):
        raise Violation(f"{row} is refused ({outcome}) on the way to {in_transit(before)}")
    reserved = before.move is not None and in_transit(before) is not None
    if fits and not waiters and not reserved and not any(map(alive, before.holders)):
        raise Violation(f"{row} is refused, and the topic is free")


def judge_dropped(world: World, before: State, operation: str, about: Any, after: State) -> None:
    """Have those lost the topic, or their place in its queue, that may?"""
    there = {row.id for row in after.holders + after.queue}
    forced = any(row.mode == FENCING and row not in before.holders for row in after.holders)
    for row in before.holders + before.queue:
        lives = is_alive(before.engines, world.engine_of[row.producer], row.life)
        if row.id in there or not lives or forced:
            continue
        itself = operation in ("cancel", "close") and row.id == about.id
        released = operation == "release" and row.id == about
        stale = row in before.queue and row.claim not in (None, after.epoch)
        if not (itself or released or stale):
            raise Violation(f"{row} lives, and has lost what it had, by {operation} of {about}")


def judge_vacancy(world: World, after: State) -> None:
    """Is a free topic left free, though there is one that should have it?"""
    if after.holders:
        return
    target = in_transit(after)
    if after.move is not None and target is None:
        raise Violation("a hand-over that cannot succeed is kept")
    fit = [
        row
        for row in sorted(after.queue, key=place)
        if is_alive(after.engines, world.engine_of[row.producer], row.life)
        and row.claim in (None, after.epoch)
    ]
    if target is not None:
        fit = [row for row in fit if world.engine_of[row.producer] == target]
        if fit:
            raise Violation(f"{fit[0]} waits for a topic that is reserved for its engine")
    elif fit and not leaves_it(after, fit[0]):
        raise Violation(f"{fit[0]} waits for a free topic")
