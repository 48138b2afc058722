"""Which topics a call of `engine.unload` moves; the future of `engine.unload_async`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import InvalidStateError
from contextlib import suppress

from exclusivelog import threads
from exclusivelog.arguments import (
    check_engine_id,
    check_groups,
    check_seconds,
    check_selection,
    is_internal,
)
from exclusivelog.backend import EngineBackend, MoveCancelled, Moves
from exclusivelog.errors import TopicNotFoundError
from exclusivelog.types import PREFIX, Move
from exclusivelog.waits import EngineFuture

__all__ = ["UnloadFuture"]


def selected(engine: EngineBackend, topics: str | Iterable[str]) -> list[str]:
    """The topics that a name, a list of names, or a prefix selects."""
    if not isinstance(topics, str):
        names = list(topics)
        for name in names:
            _check_has_owner(name)
        return list(dict.fromkeys(names))
    check_selection(topics)
    known = engine.catalog.topics()
    if topics in known or topics.startswith(PREFIX):
        return [topics]
    found = [name for name in known if name.startswith(topics.removesuffix("*"))]
    if not found:
        raise TopicNotFoundError(
            f"{engine.path} has no topic {topics!r}, and none that begins with it"
        )
    return found


def _check_has_owner(topic: object) -> None:
    if not isinstance(topic, str):
        raise TypeError(f"topics takes a str or an iterable of them, not {topic!r}")
    if is_internal(topic) and not topic.startswith(PREFIX):  # one that stands for a role has one
        raise ValueError(f"topics: {topic!r} is internal to the library, and has no owner")


def moves(
    engine: EngineBackend,
    topics: str | Iterable[str],
    to: str,
    timeout: float,
    groups: Iterable[str],
    producer: str | None,
) -> Moves:
    """The moves of these topics, not begun yet; see `Engine.unload`."""
    check_move(engine, to, timeout)
    if producer is not None and not isinstance(producer, str):
        raise TypeError(f"producer={producer!r}: it takes the name of a producer, or None")
    return engine.moves(selected(engine, topics), to, timeout, check_groups(groups), producer)


def check_move(engine: EngineBackend, to: str, timeout: float) -> None:
    """Raise an error unless this engine can be asked to move something like that."""
    engine.check_writable()
    check_engine_id(to)
    check_seconds(timeout, "timeout", "seconds from 0 on")


# ---- in the background -------------------------------------------------------------------

CANCELLED_WITHIN = 5.0  # seconds that a cancel waits for its transaction


class UnloadFuture(EngineFuture[list[Move]]):
    """Moves in progress. `engine.unload_async` returns it; its result is a list of one `Move` for
    each topic.

    >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
    ...     future = a.unload_async(["orders"], to=b.id) if a.topic("orders") else None
    ...     [move.ok for move in future.result(timeout=10)]
    [True]
    """

    def __init__(self, engine: EngineBackend, unloading: Moves) -> None:
        super().__init__(engine)
        self._engine: EngineBackend = engine
        self._unloading = unloading

    def _start(self) -> UnloadFuture:
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
            except MoveCancelled:
                super()._cancel()
                self.set_running_or_notify_cancel()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(moves)

    def moves(self) -> list[Move]:
        """The present states of the hand-overs, without waiting."""
        return self._unloading.moves()

    def cancel(self) -> bool:
        """Cancel the moves of topics that are not released yet; their owners keep them (rule E4).
        Topics that the destination has stay there. False if all moves had ended. In a forked child
        it does nothing, and returns False."""
        return super().cancel()

    def _cancel(self) -> bool:
        if not self.done():
            self._engine.check_free()
            self._unloading.stop()
            self._await_end(CANCELLED_WITHIN)
        return self.cancelled()
