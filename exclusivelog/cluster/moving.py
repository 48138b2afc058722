"""Hand-overs of topics to an engine that is named in advance (rules E1 to E4), on a cluster.

A hand-over is a record in the topic's log (`waiting.Assign`): the session that is to release the
topic, the destination engine, and the deadline. The rule ignores it, like all records of the queue:
it decides which engine asks next, not which one owns the topic.

- The engine of that session accepts no more sends, waits for those that it has accepted, and
  releases the topic. Its producers raise `ProducerMovedError`.
- Then only the destination asks for the topic, until the deadline or a grant.
- `waiting.Unassign` ends a hand-over, and so does its deadline, by each engine's own clock.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.admission import NO_DESTINATION, end_of_move
from exclusivelog.backend import MoveCancelled
from exclusivelog.cluster.following import (
    Seen,
    SessionFacts,
    TopicLog,
    inspect,
    log_change,
    now_ms,
)
from exclusivelog.cluster.frames import Grant
from exclusivelog.cluster.refused import refusal
from exclusivelog.cluster.waiting import Assign
from exclusivelog.refusals import NO_OWNER, moves_to, no_engine, not_there, state_of_move
from exclusivelog.types import EngineInfo, Move, OwnerInfo

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["Moving", "cancel_moves"]

POLL_SECONDS = 0.1  # the death of a destination writes no record


@dataclass
class One:
    """The hand-over of one topic. `number`: of its record; 0: it needed none. `promotes`: it is
    assigned, and the destination has a waiter for it."""

    log: TopicLog
    source: Grant | None
    number: int
    move: Move
    promotes: bool = False


class Moving:
    """One call of `Engine.unload`; see `exclusivelog.backend.Moves`."""

    def __init__(
        self,
        host: ClusterEngine,
        topics: Sequence[str],
        to: str,
        timeout: float,
        groups: Sequence[str],
        producer: str | None,
        session: SessionFacts | None,
    ) -> None:
        if groups:
            raise refusal("moved_claims")
        self._host, self._producer = host, producer
        self._session = session  # whose producer moves; None: whoever has the topics
        self._target = _find(host, to)
        self._names = topics
        self._until = now_ms() + int(timeout * 1000)
        self._end = _core.monotonic() + timeout
        self._stopped = threading.Event()
        self._begun: list[One] = []

    # ---- begin -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to move the topics, unless that has begun."""
        names, self._names = self._names, ()
        for name in names:
            self._begun.append(self._begin(self._host.topics.named(name)))

    def _begin(self, log: TopicLog) -> One:
        log.catch_up()
        seen = inspect(log, self._host.lives)
        self._check_has(seen)
        going = log.waiters.assigned_at(now_ms())
        reason = self._refusal(seen, going)
        one = One(log, seen.owner, 0, self._state(log, seen.owner, "failed", reason))
        if reason:
            return one
        if self._is_there(seen):
            one.move = self._state(log, seen.owner, "owned")
            return one
        if going is not None and going.engine_id == self._target.id:
            return self._join(one, going)
        if going is not None:  # its destination has died
            log.withdraw(going, NO_DESTINATION)
        for dead in seen.dead:
            log.evict(dead)
        one.number = secrets.randbits(62)
        assign = Assign(
            one.number,
            0 if seen.owner is None else seen.owner.session,
            self._target.id,
            self._target.name,
            self._target.pid,
            dict(self._target.properties),
            now_ms(),
            self._until,
        )
        log.publish(assign)
        first = log.waiters.assigned
        if first is not None and first.number != one.number and first.engine_id == self._target.id:
            return self._join(one, first)  # that of another caller
        self._inspect(one)
        if one.move.state != "failed":
            step = "assigned" if seen.owner is None else "releasing"
            source = None if seen.owner is None else seen.owner.holder
            log_change(log, seen.epoch, step, "unload", source, assign)
        return one

    def _check_has(self, seen: Seen) -> None:
        """The error of the session whose producer moves, if it has lost the topic (rule B3)."""
        facts = self._session
        session = None if facts is None else self._host.registry.find(facts.id)
        if session is not None and not self._holders(seen):
            session.verify()

    def _holders(self, seen: Seen) -> list[OwnerInfo]:
        """Those of the topic that may be meant: another one may have the producer's name."""
        facts = self._session
        return [each for each in seen.holders if facts is None or each.session == facts.id]

    def _join(self, one: One, going: Assign) -> One:
        """Follow a hand-over to the same destination that is under way (rule E4)."""
        one.number = going.number
        if going.until < self._until:
            one.log.publish(replace(going, until=self._until))
        self._inspect(one)
        return one

    def _is_there(self, seen: Seen) -> bool:
        return seen.owner is not None and seen.owner.holder.engine_id == self._target.id

    def _refusal(self, seen: Seen, going: Assign | None) -> str:
        producer = self._producer
        if producer is not None and producer not in [
            each.producer_name for each in self._holders(seen)
        ]:
            return not_there(producer)
        other = None if going is None or going.engine_id == self._target.id else going
        if other is not None and self._host.lives(other.engine_id) and not self._is_there(seen):
            return moves_to(other.engine_name, other.engine_id)
        return NO_OWNER if seen.shared else ""

    def _state(
        self,
        log: TopicLog,
        source: Grant | None,
        state: str,
        reason: str = "",
        owner: Grant | None = None,
    ) -> Move:
        epoch = log.state.epoch if owner is None else owner.epoch
        shown = None if source is None else source.owner()
        return Move(log.name, log.id, epoch, shown, self._target, state, reason, self._producer)

    # ---- follow ----------------------------------------------------------------------------

    def _inspect(self, one: One) -> bool:
        """The present state of the hand-over, and whether it has ended."""
        log = one.log
        if not one.number or (one.move.ok and not one.promotes):
            return True
        # The log may go on meanwhile: what was assigned first, so that the grant that ends it shows
        # as the owner.
        assigned = log.waiters.assigned
        seen = inspect(log, self._host.lives, self._target.id)
        owner = seen.owner
        mine = assigned is not None and assigned.engine_id == self._target.id
        changed = owner is not None and (one.source is None or owner.session != one.source.session)
        arrived = changed and owner is not None and owner.holder.engine_id == self._target.id
        state, why = state_of_move(
            arrived=arrived,
            in_transit=mine and not changed,
            holder=None if owner is None else owner.owner(),
        )
        source, present = (owner if why else one.source), (owner if arrived else None)
        one.move = self._state(log, source, state, why, present)
        # If it is assigned, the destination's best waiter is about to own it (rule E3).
        one.promotes = state == "assigned" and bool(seen.queue)
        return state != "releasing" and not one.promotes

    def run(self) -> list[Move]:
        """Move all topics; returns the outcome of each."""
        try:
            self.begin()
            for one in self._begun:
                self._follow(one)
        except BaseException:
            self.give_up()
            raise
        return self.moves()

    def _follow(self, one: One) -> None:
        while not self._inspect(one):
            if self._stopped.is_set():
                raise MoveCancelled("the call was cancelled")
            self._host.check_open()
            left = self._end - _core.monotonic()
            if one.move.ok and left <= 0:
                return
            lives = self._host.lives(self._target.id)
            ended = end_of_move(lives=lives, late=left <= 0, overtaken=False)
            if ended:
                self._withdraw(one, ended)
                return
            with one.log.changed:
                one.log.changed.wait(min(left, POLL_SECONDS))
        one.log.check()

    def _withdraw(self, one: One, reason: str) -> None:
        """Cancel a hand-over that was not released, as far as the log shows, unless another call
        has given it more time."""
        assigned = one.log.waiters.assigned
        mine = assigned is not None and assigned.number == one.number
        if assigned is not None and mine and assigned.until <= self._until:
            one.log.withdraw(assigned, reason)
        if not self._inspect(one):
            owner = inspect(one.log, self._host.lives).owner
            one.move = self._state(one.log, owner, "failed", reason)

    def stop(self) -> None:
        """Make `run`, in another thread, raise MoveCancelled, unless it has ended."""
        self._stopped.set()

    def give_up(self) -> None:
        """Cancel the moves that were not released yet."""
        for one in self._begun:
            if not self._inspect(one):
                self._withdraw(one, "cancelled")

    def moves(self) -> list[Move]:
        """The present state of the moves that have begun."""
        return [one.move for one in self._begun]


def _find(host: ClusterEngine, to: str) -> EngineInfo:
    engines = host.place.engines()
    for engine in engines:
        if engine.id == to:
            return engine
    raise no_engine(host.place.url, to, engines)


def cancel_moves(host: ClusterEngine, topics: Sequence[str]) -> list[str]:
    """Cancel the hand-overs of these topics. Returns the names of those that had one."""
    found = []
    for name in topics:
        log = host.followed(host.catalog.topic(name, False)[0])
        log.catch_up()
        assigned = log.waiters.assigned_at(now_ms())
        if assigned is not None and log.withdraw(assigned, "cancelled"):
            found.append(name)
    return found
