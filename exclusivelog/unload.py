"""`engine.unload`: begins moves, awaits them, and gives up those that come to nothing.

What a move is, step by step, is in handover.py. Here is the coordinator, which is no part of it:
without one, a move that has begun goes on, or ends at its deadline.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from exclusivelog import _core, threads
from exclusivelog.claims import check_group
from exclusivelog.errors import ExclusiveLogError, LedgerError, TopicNotFoundError
from exclusivelog.handover import Begun, Wish
from exclusivelog.role_rows import is_role
from exclusivelog.runtime import Runtime
from exclusivelog.sessions import MOVES
from exclusivelog.types import Move
from exclusivelog.waits import check_seconds, in_slices, settled

if TYPE_CHECKING:
    from exclusivelog.access import Session

MOVED_AT_ONCE = 250  # topics in one transaction: others wait for the ledger meanwhile
LONGEST_SECONDS = 10**8  # of a move: about three years
CANCELLED_WITHIN = 5.0  # seconds that a cancel waits for its transaction


class Cancelled(ExclusiveLogError):
    """Internal: the call was cancelled. No caller ever sees it."""


class Chunk:
    """Topics that begin to move in one transaction, and their moves as they stand."""

    def __init__(self, engine: Runtime, names: list[str], wish: Wish) -> None:
        self._engine = engine
        self._wish = wish
        self._begun = engine.hand_over.begin(names, wish)
        self.moves = [begun.move for begun in self._begun]

    def wait(self, end: float, stopped: threading.Event) -> list[Move]:
        """What became of each, when all have come to something, or at the time `end`."""
        try:
            self._await(end, stopped)
        except BaseException:
            self.give_up("cancelled")
            raise
        late = self.give_up("deadline" if self._has_destination() else "the destination is gone")
        ended = {move.topic_id: move for move in self._engine.hand_over.look(late)}
        return [
            _told(begun.move, ended.get(move.topic_id, move))
            for begun, move in zip(self._begun, self.moves, strict=True)
        ]

    def _await(self, end: float, stopped: threading.Event) -> None:
        # What has been reserved counts as such, also if the others take longer than that.
        hand_over, done = self._engine.hand_over, dict[int, Move]()
        while True:
            seen = hand_over.changes()
            moves = hand_over.look(self._begun)
            done.update({move.topic_id: move for move in moves if move.ok})
            self.moves = [done.get(move.topic_id, move) for move in moves]
            releasing = [move for move in self.moves if move.state == "releasing"]
            left = end - time.monotonic()
            if not releasing or left <= 0 or not self._has_destination():
                return
            if stopped.is_set():
                raise Cancelled("the call was cancelled")
            self._engine.check_open()
            self._engine.evict_the_dead({m.source.engine_id for m in releasing if m.source})
            hand_over.wait_for_a_change(seen, left)

    def _has_destination(self) -> bool:
        return self._engine.ledger.lockfile.alive(self._wish.slot, self._wish.to.id)

    def give_up(self, reason: str) -> list[Begun]:
        """Who has not released a topic by now keeps it; which those were."""
        late = [
            begun
            for begun, move in zip(self._begun, self.moves, strict=True)
            if begun.move.state == "releasing" and not move.ok
        ]
        if late:
            ids = [begun.move.topic_id for begun in late]
            self._engine.hand_over.cancel(ids, reason, self._wish.until)
        return late


def _told(first: Move, last: Move) -> Move:
    """What the caller is told: of what has moved, from whom; of what was refused, why."""
    if last.ok:
        return replace(last, source=first.source)
    return first if first.state == "failed" else last


class Unloading:
    """One call of `Engine.unload`: its topics are moved chunk by chunk."""

    def __init__(
        self, engine: Runtime, names: Callable[[], list[str]], to: str, timeout: float,
        groups: Iterable[str], producer: str | None, session: Session | None = None,
    ) -> None:  # fmt: skip
        engine.check_writable()
        check_seconds(timeout, "timeout", "seconds from 0 on")
        if producer is not None and not isinstance(producer, str):
            raise TypeError(f"producer={producer!r}: it takes the name of a producer, or None")
        self._groups = check_groups(groups)
        destination = engine.ledger.lockfile.find(to)
        if destination is None:
            raise LedgerError(
                f"to={to!r} is no live engine on {engine.path}; {_who_is_there(engine)}"
            )
        self._slot, self._to = destination
        self._engine = engine
        self._producer, self._session = producer, session
        self._names = names()
        self._end = time.monotonic() + timeout
        self._stopped = threading.Event()
        self._chunks: list[Chunk] = []
        self._ended: list[Move] = []

    def begin(self) -> None:
        """Begin to move the first chunk, unless that has begun."""
        if self._names and not self._chunks:
            self._begin_next()

    def _begin_next(self) -> None:
        names, self._names = self._names[:MOVED_AT_ONCE], self._names[MOVED_AT_ONCE:]
        left = min(max(0.0, self._end - time.monotonic()), LONGEST_SECONDS)
        until = _core.now() + int(left * 1e9)
        wish = Wish(self._to, self._slot, until, self._groups, self._producer, self._session)
        self._chunks.append(Chunk(self._engine, names, wish))

    def run(self) -> list[Move]:
        """Move all of them; what became of each."""
        while self._chunks or self._names:
            if not self._chunks:
                if self._stopped.is_set():
                    raise Cancelled("the call was cancelled")
                self._begin_next()
            self._ended += self._chunks[-1].wait(self._end, self._stopped)
            self._chunks.clear()
        return self._ended

    def stop(self) -> None:
        """Have `run`, in another thread, raise Cancelled, unless it has come to its end."""
        self._stopped.set()
        self._engine.ledger.lockfile.announce(MOVES)

    def give_up(self) -> None:
        """End what has begun, where nobody will run it."""
        for chunk in self._chunks:
            chunk.give_up("cancelled")

    def moves(self) -> list[Move]:
        """How the moves stand that have begun."""
        return self._ended + [move for chunk in list(self._chunks) for move in chunk.moves]


class UnloadFuture(Future[list[Move]]):
    """Moves that are under way; made by `engine.unload_async`.

    >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
    ...     future = a.unload_async(["orders"], to=b.id) if a.topic("orders") else None
    ...     [move.ok for move in future.result(timeout=10)]
    [True]
    """

    def __init__(self, engine: Runtime, unloading: Unloading) -> None:
        super().__init__()
        self._engine = engine
        self._unloading = unloading

    def start(self) -> UnloadFuture:
        """Begin the moves, and follow them in a thread."""
        self._unloading.begin()
        thread = threading.Thread(target=self._run, name="exclusivelog-unload", daemon=True)
        try:
            threads.start(self._engine.path, thread)
        except BaseException:
            self._unloading.give_up()
            raise
        return self

    def _run(self) -> None:
        with suppress(InvalidStateError):
            try:
                moves = self._unloading.run()
            except Cancelled:
                super().cancel()
                self.set_running_or_notify_cancel()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(moves)

    def moves(self) -> list[Move]:
        """How the moves stand now, without waiting."""
        return self._unloading.moves()

    def cancel(self) -> bool:
        """End the moves of what has not been released yet: its owner keeps it (rule E4). What the
        destination has by then stays there. False where all moves had come to something."""
        if not self.done():
            self._engine.check_free()
            self._unloading.stop()
            self._await(CANCELLED_WITHIN)
        return self.cancelled()

    def result(self, timeout: float | None = None) -> list[Move]:
        """What became of each topic; waits for it, up to `timeout` seconds (None: for ever)."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed with, or None; waits as `result` does."""
        self._await(timeout)
        return super().exception(0)

    def _await(self, timeout: float | None) -> None:
        if not self.done():
            self._engine.check_alone()  # the thread that would settle it is the parent's
            in_slices(functools.partial(settled, self), timeout, self._engine.check_alone)


def begin_move(
    engine: Runtime, topic: str, session: Session, to: str, timeout: float, groups: Iterable[str]
) -> Unloading:
    """Begin what `Producer.move` does. ProducerFencedError unless the session has its place
    still: its name may be another one's by now."""
    unloading = Unloading(engine, lambda: [topic], to, timeout, groups, session.name, session)
    unloading.begin()
    return unloading


def choose(path: str, there: Callable[[], list[str]], topics: str | Iterable[str]) -> list[str]:
    """The names that a topic's name, a list of them, or a prefix stand for; `there` are the names
    of all topics."""
    if not isinstance(topics, str):
        names = list(topics)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"topics takes a str or an iterable of them, not {name!r}")
            if name.startswith("__") and not is_role(name):
                raise ValueError(f"topics: {name!r} is the library's own, and has no owner")
        return list(dict.fromkeys(names))
    known = there()
    if topics in known or is_role(topics):
        return [topics]
    found = [name for name in known if name.startswith(topics.removesuffix("*"))]
    if not found:
        raise TopicNotFoundError(f"{path} has no topic {topics!r}, and none that begins so")
    return found


def check_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the groups, each once; a str is one name."""
    names = (groups,) if isinstance(groups, str) else tuple(dict.fromkeys(groups))
    for name in names:
        check_group(name)
    return names


def _who_is_there(engine: Runtime) -> str:
    there = ", ".join(
        f"{other.name!r} (id {other.id})" for other in engine.ledger.lockfile.engines()
    )
    return f"there is {there}" if there else "there is none"
