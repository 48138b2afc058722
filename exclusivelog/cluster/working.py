"""The two threads of an engine that has producers.

`exclusivelog-commit` passes messages to the writers and runs callbacks; `exclusivelog-worker`
promotes waiters, hands topics over, releases dropped sessions and looks whether watched owners
live. The first producer or watch of an owner starts them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from exclusivelog import _core, threads
from exclusivelog.cluster.following import CLOSE_SECONDS, Owning
from exclusivelog.errors import EngineClosedError, ExclusiveLogError
from exclusivelog.life import Callbacks, thread_of

if TYPE_CHECKING:
    from exclusivelog.cluster.requests import Requests
    from exclusivelog.cluster.sessions import Registry
    from exclusivelog.cluster.watching import Watching

__all__ = ["WAKE", "Committer", "Worker"]

IDLE_SECONDS = 60.0  # the worker is woken when there is work
LAPSE_SECONDS = 1.0  # an assignment lapses without a record
SOON_SECONDS = 0.02  # between looks at producers that wait for others to have followed
FOLLOWED_AT_ONCE = 8  # by a thread each, for a round trip to the log; those that send do not wait
JOIN_SECONDS = 60.0
RETRY_SECONDS = 0.25  # to start a thread that the system has refused
WAKE = 0  # the word of the shared words that wakes the worker


class Running:
    """A thread that repeats a step until it returns False."""

    def __init__(self, path: str, engine: str, name: str) -> None:
        self._path, self._engine, self._name = path, engine, name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, step: Callable[[], bool]) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None:
                self._thread = self._run(step)

    def _run(self, step: Callable[[], bool]) -> threading.Thread:
        thread = thread_of(self._path, step, self._name, self._engine)
        return threads.start(self._path, thread)

    @property
    def is_here(self) -> bool:
        """Is this thread the current one?"""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for its end."""
        if self._thread is not None and not self.is_here:
            self._thread.join(JOIN_SECONDS)


class Committer:
    """Passes queued messages of producers to the writers."""

    def __init__(self, path: str, engine: str, registry: Registry) -> None:
        self.queue = _core.CommitQueue()
        self._registry = registry
        self._running = Running(path, engine, "exclusivelog-commit")

    def start(self) -> None:
        """Start the thread, unless it runs."""
        self._running.start(self._step)

    def commit(self, owning: Owning) -> None:
        """Have this session's waiting messages passed on soon."""
        appender = owning.appender
        if appender is None:
            return
        if self._running.is_here:
            owning.pump(patient=False)  # a callback of this thread waits for it
        else:
            self.queue.put(appender, 0.0)

    def _step(self) -> bool:
        if not self.queue.sleep():
            return False
        with self.queue as waiting:
            for appender in waiting:
                owning = self._registry.owning(appender.session.id)
                if owning is not None:
                    owning.pump()
                else:
                    appender.take()
                    appender.settle([], EngineClosedError("its producer is closed"), True)
        _core.run_callbacks()
        return True

    def stop(self) -> None:
        """End the thread."""
        self.queue.stop()
        self._running.join()
        _core.run_callbacks()


class Worker:
    """Promotes waiters, hands topics over, and releases dropped sessions."""

    def __init__(
        self,
        path: str,
        engine: str,
        words: _core.SharedWords,
        registry: Registry,
        committer: Committer,
        pending: Requests,
        watching: Watching,
    ) -> None:
        self._words, self._registry, self._committer = words, registry, committer
        self._pending, self._watching = pending, watching
        self._stopped = False
        self.callbacks = ClusterCallbacks(path, engine, self)
        self._running = Running(path, engine, "exclusivelog-worker")

    def start(self) -> None:
        """Start the thread, unless it runs."""
        self._running.start(self._step)

    def wake(self) -> None:
        """Wake the thread for its next step."""
        self._words.add(WAKE, 1)
        self._words.wake(WAKE)

    def _step(self) -> bool:
        seen = self._words.load(WAKE)
        if self._stopped:
            return False
        self.release_dropped()
        self._hand_over()
        self._pending.poll()
        self._watching.poll()
        self.callbacks.ring()
        waiting = self._pending.seconds
        left = min(self._until_followed(), math.inf if waiting is None else waiting)
        left = min(left, self._watching.seconds, self.callbacks.alarms.seconds_left())
        self._words.wait(WAKE, seen, int(left * 1e9))
        return True

    def _hand_over(self) -> None:
        """Hand over what is due. A method of its own, so that nothing keeps a session while the
        thread sleeps."""
        for owning in self._registry.all():
            with contextlib.suppress(ExclusiveLogError):
                owning.hand_over_if_due()
        there = self._registry.handed_over()
        idle = FOLLOWED_AT_ONCE - sum(session.is_following for session in there)
        for session in there:
            session.end_unless_within_reach()
            if session.follows_in() <= 0 and idle > 0:
                idle -= 1
                with contextlib.suppress(ExclusiveLogError):  # no thread can be started, say
                    session.begin_to_follow()

    def _until_followed(self) -> float:
        """The seconds until producers follow a topic that was handed over, or it lapses."""
        there = self._registry.handed_over()
        left = min((session.follows_in() for session in there), default=IDLE_SECONDS)
        return max(SOON_SECONDS, min(left, LAPSE_SECONDS)) if there else left

    def release_dropped(self, topic: str | None = None) -> None:
        """Release the dropped sessions of a topic (None: of all). Two threads may release the same
        one: both wait for it."""
        for owning in self._registry.dropped(topic):
            self._release(owning)

    def _release(self, owning: Owning) -> None:
        """Release a dropped session: send what its producers have queued, then release the
        topic."""
        owning.drain(self._committer.commit, CLOSE_SECONDS)
        with contextlib.suppress(ExclusiveLogError):
            owning.release(CLOSE_SECONDS)
        self._registry.forget(owning)

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopped = True
        self.wake()

    def join(self) -> None:
        """Wait for its end."""
        self._running.join()


class ClusterCallbacks(Callbacks):
    """Runs code of the application; the worker calls `ring`."""

    def __init__(self, path: str, engine: str, worker: Worker) -> None:
        super().__init__(path, engine)
        self._worker = worker

    def retry(self, function: Callable[[], object]) -> None:
        """Have the worker try again soon."""
        self.alarms.set(RETRY_SECONDS, function)
        self._worker.start()
        self._worker.wake()
