"""Coordinates hand-overs for `engine.unload` and `producer.move`: begins them, awaits them, and
cancels those that fail.

ownership/transfers.py has the steps of a hand-over. It does not depend on its coordinator: if that
dies, the hand-over still succeeds, or ends at its deadline.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.admission import end_of_move
from exclusivelog.backend import MoveCancelled
from exclusivelog.errors import (
    ExclusiveLogError,
    WaitTimeoutError,
)
from exclusivelog.local.ownership.pending import BETWEEN_CHUNKS_SECONDS, FOLLOWED_FIRST_SECONDS
from exclusivelog.local.ownership.steps import MOVES
from exclusivelog.local.ownership.transfers import Begun, Wish
from exclusivelog.local.records import Session
from exclusivelog.refusals import no_engine
from exclusivelog.types import Move
from exclusivelog.waits import time_limit

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime

MOVED_AT_ONCE = 125  # topics, in turns of one transaction: others wait for the ledger meanwhile
INSPECTED_AFTER = 0.25  # seconds: all topics of a move, where the last one is not released yet
LONGEST_SECONDS = 10**8  # of a move: about three years
CANCELLED_WITHIN = 2.0  # seconds that a cancel waits for the writer lock


class Chunk:
    """Topics whose hand-overs begin in one transaction, and the present states of these."""

    def __init__(self, engine: Runtime, names: list[str], wish: Wish) -> None:
        self._engine = engine
        self._wish = wish
        self.damage: ExclusiveLogError | None = None  # of one topic: the others have their outcome
        try:
            self._begun = engine.hand_over.begin(names, wish)
        except WaitTimeoutError as error:  # not raised: other chunks of the call may have moved
            self._begun = engine.hand_over.not_begun(names, wish, str(error))
        self.moves = [begun.move for begun in self._begun]

    def wait(self, end: float, stopped: threading.Event) -> None:
        """Return once each hand-over has its outcome, or at the time `end`.

        WaitTimeoutError if it was `stopped`, but no cancel can be recorded: its topics may still
        move."""
        try:
            self._await(end, stopped)
        except MoveCancelled:
            self.cancel()
            raise
        except BaseException:
            with contextlib.suppress(WaitTimeoutError):
                self.cancel()
            raise
        late = self._late()
        with contextlib.suppress(WaitTimeoutError):  # they end by themselves
            why = end_of_move(lives=self._has_destination(), late=True, overtaken=False)
            self._cancel(late, why, self._wish.until)
        ended = {move.topic_id: move for move in self._inspect(late)}
        self.moves = [
            _merged(begun.move, ended.get(move.topic_id, move))
            for begun, move in zip(self._begun, self.moves, strict=True)
        ]

    def _await(self, end: float, stopped: threading.Event) -> None:
        # A topic that was reserved counts as moved, even if that lapses before the others end.
        moves, done = self.moves, dict[int, Move]()
        while True:
            done.update({move.topic_id: move for move in moves if move.ok})
            self.moves = [done.get(move.topic_id, move) for move in moves]
            releasing = [
                (begun, move)
                for begun, move in zip(self._begun, self.moves, strict=True)
                if move.state == "releasing"
            ]
            left = end - _core.monotonic()
            if not releasing or left <= 0 or not self._has_destination():
                return
            if stopped.is_set():
                raise MoveCancelled("the call was cancelled")
            self._engine.check_open()
            sources = {move.source.engine_id for _, move in releasing if move.source}
            topics = {move.topic_id for _, move in releasing}
            # In short attempts: the call may be cancelled, or the engine closed, meanwhile.
            attempt = min(self._wish.until, time_limit(INSPECTED_AFTER, _core.now()))
            with contextlib.suppress(WaitTimeoutError):
                self._engine.worker.evict_dead_engines(sources, topics, attempt)
            self._await_release(releasing[-1][0], min(left, INSPECTED_AFTER), stopped)
            moves = self._inspect(self._begun)

    def _inspect(self, some: Sequence[Begun]) -> list[Move]:
        """The present states of these. A topic with a damaged row has not moved, and is not waited
        for; the others are."""
        moves = list[Move]()
        for begun, found in zip(some, self._engine.hand_over.inspect(some), strict=True):
            if not isinstance(found, Move):
                self.damage = found
                found = replace(begun.move, state="failed", reason=str(found))
            moves.append(found)
        return moves

    def _await_release(self, last: Begun, seconds: float, stopped: threading.Event) -> None:
        # Topics are released in this order. To inspect all of them after each transaction would
        # take the interpreter from the thread that releases the next ones.
        hand_over, until = self._engine.hand_over, _core.monotonic() + seconds
        while not stopped.is_set():
            seen = hand_over.changes()
            self._engine.check_open()
            left = until - _core.monotonic()
            if left <= 0 or self._inspect([last])[0].state != "releasing":
                return
            hand_over.wait_for_a_change(seen, left)

    def _has_destination(self) -> bool:
        return self._engine.ledger.lockfile.slots.alive(self._wish.slot, self._wish.to.id)

    def cancel(self) -> None:
        """Cancel the hand-overs of topics that are not released yet."""
        self._cancel(self._late(), "cancelled", time_limit(CANCELLED_WITHIN, _core.now()))

    def _late(self) -> list[Begun]:
        return [
            begun
            for begun, move in zip(self._begun, self.moves, strict=True)
            if begun.move.state == "releasing" and not move.ok
        ]

    def _cancel(self, late: list[Begun], reason: str, limit: int) -> None:
        """Cancel these. If that cannot begin before `limit`, it is done in the background, and this
        raises WaitTimeoutError."""
        if not late:
            return
        ids, until = [begun.move.topic_id for begun in late], self._wish.until
        cancel = functools.partial(self._engine.hand_over.cancel, ids, reason, until)
        try:
            cancel(limit)
        except WaitTimeoutError:
            self._engine.worker.do_later(cancel)
            raise


def _merged(first: Move, last: Move) -> Move:
    """The hand-over to return: with its source if it succeeded, with the reason if it was
    refused."""
    if last.ok:
        return replace(last, source=first.source)
    return first if first.state == "failed" else last


class Unloading:
    """One call of `Engine.unload`: its topics are moved chunk by chunk."""

    def __init__(
        self,
        engine: Runtime,
        topics: Sequence[str],
        to: str,
        timeout: float,
        groups: Sequence[str],
        producer: str | None,
        session: Session | None = None,
    ) -> None:
        slots = engine.ledger.lockfile.slots
        destination = slots.find(to)
        if destination is None:
            raise no_engine(engine.path, to, slots.engines())
        self._groups = groups
        self._slot, self._to = destination
        self._engine = engine
        self._producer, self._session = producer, session
        self._names = list(topics)
        self._end = _core.monotonic() + timeout
        self._stopped = threading.Event()
        self._chunks: list[Chunk] = []  # those that have begun; all but the last have ended

    def begin(self) -> None:
        """Begin to move the first chunk, unless that has begun."""
        if self._names and not self._chunks:
            self._begin_next()

    def _begin_next(self) -> None:
        names, self._names = self._names[:MOVED_AT_ONCE], self._names[MOVED_AT_ONCE:]
        left = min(max(0.0, self._end - _core.monotonic()), LONGEST_SECONDS)
        until = _core.now() + int(left * 1e9)
        wish = Wish(self._to, self._slot, until, tuple(self._groups), self._producer, self._session)
        self._chunks.append(Chunk(self._engine, names, wish))

    def run(self) -> list[Move]:
        """Move all topics; returns the outcome of each. If the row of one is damaged, or it was
        deleted, its error is raised once the others have moved."""
        if self._chunks:
            self._chunks[-1].wait(self._end, self._stopped)
        while self._names:
            if self._stopped.is_set():
                raise MoveCancelled("the call was cancelled")
            time.sleep(BETWEEN_CHUNKS_SECONDS)
            self._engine.followers.await_urgent(FOLLOWED_FIRST_SECONDS)
            self._begin_next()
            self._chunks[-1].wait(self._end, self._stopped)
        for chunk in self._chunks:
            if chunk.damage is not None:
                raise chunk.damage
        return self.moves()

    def stop(self) -> None:
        """Make `run`, in another thread, raise MoveCancelled, unless it has ended."""
        self._stopped.set()
        self._engine.ledger.lockfile.counters.announce(MOVES)

    def give_up(self) -> None:
        """Cancel the hand-overs that have begun, if `run` will not be called."""
        for chunk in self._chunks[-1:]:
            chunk.cancel()

    def moves(self) -> list[Move]:
        """The present states of the hand-overs that have begun."""
        return [move for chunk in list(self._chunks) for move in chunk.moves]
