"""The future of `engine.unload_async`: moves in progress."""

from __future__ import annotations

import threading
from concurrent.futures import InvalidStateError
from contextlib import suppress

from exclusivelog import threads
from exclusivelog.backend import EngineBackend, MoveCancelled, Moves
from exclusivelog.types import Move
from exclusivelog.waits import EngineFuture

__all__ = ["UnloadFuture"]

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
