"""The sessions of one engine: those that were granted, those that producers have, and those that no
producer has any more."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from exclusivelog import _core
from exclusivelog.cluster.owning import Owning
from exclusivelog.cluster.session import ClusterSession
from exclusivelog.errors import EngineClosedError, ExclusiveLogError

__all__ = ["Registry"]

CLOSE_SECONDS = 30.0  # for what is queued to be in the log, and again for the releases


class Registry:
    """See the module's text. `words` and `bell` tell the engine's worker that a session was
    dropped."""

    def __init__(self, words: _core.SharedWords, bell: int) -> None:
        self._words, self._bell = words, bell
        self._owning: dict[int, Owning] = {}  # by session
        self._sessions: weakref.WeakSet[ClusterSession] = weakref.WeakSet()
        self._dropped: deque[Owning] = deque()

    def keep(self, number: int, owning: Owning) -> None:
        """This session was granted."""
        self._owning[number] = owning

    def owning(self, number: int) -> Owning | None:
        """How this session writes."""
        return self._owning.get(number)

    def register(self, session: ClusterSession) -> None:
        """Closing the engine closes this session."""
        self._sessions.add(session)

    def unregister(self, session: ClusterSession) -> None:
        """It is closed."""
        self._sessions.discard(session)
        self._owning.pop(session.session.id, None)

    def all(self) -> list[Owning]:
        """All that were granted, and not released."""
        return list(self._owning.values())

    def pending(self) -> tuple[int, int]:
        """Messages, and their bytes, that producers have queued."""
        there = [each.appender for each in self.all() if each.appender is not None]
        return sum(each.pending_messages for each in there), sum(e.pending_bytes for e in there)

    # ---- dropped -------------------------------------------------------------------------

    def finalizer(self, owning: Owning) -> _core.Finalizer:
        """What has the session released once its producers are dropped."""
        return _core.Finalizer(owning, self._dropped, self._words, self._bell)

    def drop(self, number: int) -> None:
        """Nobody takes this session: release it."""
        owning = self._owning.pop(number, None)
        if owning is not None:
            self._dropped.append(owning)
            self._words.add(self._bell, 1)
            self._words.wake(self._bell)

    def dropped(self) -> Iterator[Owning]:
        """Take those out that were dropped."""
        while self._dropped:
            yield self._dropped.popleft()

    def forget(self, owning: Owning) -> None:
        """It was released."""
        for number in [n for n, each in list(self._owning.items()) if each is owning]:
            self._owning.pop(number, None)

    # ---- the end -------------------------------------------------------------------------

    def close(self, error: EngineClosedError, commit: Callable[[Owning], None]) -> None:
        """Send what waits, and release all topics."""
        for session in list(self._sessions):
            session.end(error)  # what is queued is still sent, and nothing more
        owning = list(self._owning.values())
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in owning:
            drain(each, commit, deadline - time.monotonic())
        for each in owning:
            with each.topic.changed:
                each.writer.release()
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in owning:
            with contextlib.suppress(ExclusiveLogError):
                each.release(max(0.0, deadline - time.monotonic()))

    def fail_all(self, error: EngineClosedError) -> None:
        """Fail what is still queued."""
        for each in list(self._owning.values()):
            if each.appender is not None:
                each.appender.settle([], error, True)


def drain(owning: Owning, commit: Callable[[Owning], None], seconds: float) -> None:
    """Wait for the outcome of what was queued, whatever it is."""
    waiting = None if owning.appender is None else owning.appender.newest()
    if waiting is not None:
        commit(owning)
        with contextlib.suppress(ExclusiveLogError):
            waiting.exception(max(0.0, seconds))
