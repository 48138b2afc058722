"""Background calls of a state: executed in the order of submission, acknowledged in batches.

One thread executes the calls. It does not wait for the flush of what a call has appended, but
begins the next call. A second thread flushes once for all calls that have returned by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from exclusivelog import _core
from exclusivelog.futures import Future

R = TypeVar("R")
NAME = "exclusivelog-state"


class CallFuture(Future[R]):
    """The future of a background call."""

    given_up = False  # stop waiting for the topic


@dataclass(slots=True)
class _Done:
    """A call that has returned, with the append that must be durable before it is acknowledged."""

    future: Future[Any]
    result: Any
    error: BaseException | None
    pending: Any


class Calls:
    """The background calls of one shared state.

    `flush(pending)` returns once a call's append is durable, or raises.
    """

    def __init__(self, flush: Callable[[Any], None]) -> None:
        self._flush = flush
        # Re-entrant: a signal handler may interrupt `submit` and call it.
        self._lock = threading.RLock()
        self._jobs: deque[tuple[CallFuture[Any], Callable[[], Any]]] = deque()
        self._done: deque[_Done] = deque()
        self._working = self._flushing = False
        self._threads: list[_OneThread] = []
        self._here = threading.local()

    def submit(self, call: Callable[[], R]) -> CallFuture[R]:
        """Run `call()` after all calls that were submitted before."""
        future: CallFuture[R] = CallFuture()
        with _core.Holding(self._lock):
            if not self._threads:
                self._threads = [_OneThread(), _OneThread()]
            self._jobs.append((future, call))
            if not self._working:
                self._working = True
                self._threads[0].submit(self._work)
        return future

    @property
    def current(self) -> CallFuture[Any] | None:
        """The background call that this thread runs; None in any other thread."""
        return getattr(self._here, "call", None)

    def defer(self, pending: Any) -> bool:
        """Acknowledge the call that this thread executes only after `pending` is durable. False if
        this thread executes no call."""
        if self.current is None:
            return False
        self._here.pending = pending
        return True

    @property
    def idle(self) -> bool:
        """Whether no submitted call is pending: another thread can then run a call without
        overtaking one."""
        return bool(self._threads) and not self._working

    def acknowledge(self, future: Any, result: Any, pending: Any) -> None:
        """Call `future.set_result(result)` in the background once `pending` is durable, or
        `future.set_exception(error)` if that fails."""
        try:
            self._finish(_Done(future, result, None, pending))
        except RuntimeError:  # another thread has closed it
            self._acknowledge()

    def close(self) -> None:
        """Run all calls that were submitted, then end the threads."""
        for thread in self._threads:
            thread.end()

    # ---- in the background ---------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with _core.Holding(self._lock):
                if not self._jobs:
                    self._working = False
                    return
                future, call = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                self._finish(self._run(future, call))
            del future, call

    def _run(self, future: CallFuture[Any], call: Callable[[], Any]) -> _Done:
        self._here.call, self._here.pending = future, None
        done = _Done(future, None, None, None)
        try:
            done.result = call()
        except BaseException as error:  # the future raises it
            done.error = error
        finally:
            self._here.call = None
        done.pending, self._here.pending = self._here.pending, None
        return done

    def _finish(self, done: _Done) -> None:
        with _core.Holding(self._lock):
            waits = done.pending is not None or bool(self._done)
            if waits:
                self._done.append(done)
            if waits and not self._flushing:
                self._flushing = True
                self._threads[1].submit(self._acknowledge)
        if not waits:
            _set_outcome(done, None)

    def _acknowledge(self) -> None:
        while True:
            with _core.Holding(self._lock):
                some = list(self._done)
                if not some:
                    self._flushing = False
                    return
            self._acknowledge_some(some)
            for _ in some:
                self._done.popleft()

    def _acknowledge_some(self, some: list[_Done]) -> None:
        # Flushing the last append flushes all. If that fails, flush each call separately, for its
        # own outcome.
        last = next((done for done in reversed(some) if done.pending is not None), None)
        all_durable = last is None or self._failure(last) is None
        for done in some:
            failed = None if all_durable or done.pending is None else self._failure(done)
            _set_outcome(done, failed)

    def _failure(self, done: _Done) -> BaseException | None:
        try:
            self._flush(done.pending)
        except BaseException as error:
            return error
        return None


def _set_outcome(done: _Done, failed: BaseException | None) -> None:
    error = failed or done.error
    if error is not None:
        done.future.set_exception(error)
    else:
        done.future.set_result(done.result)


class _OneThread:
    """Calls functions one after the other in a thread of its own, until `end` or until it is
    dropped.

    It is no pool of concurrent.futures: the interpreter waits for the threads of those before any
    `atexit` function can end what they wait for.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(
            target=_call_all, args=(self._queue,), name=NAME, daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable[[], object]) -> None:
        """Call it after the others. RuntimeError after `end`."""
        if self._ended:
            raise RuntimeError("the thread has ended")
        self._queue.put(function)

    def end(self) -> None:
        """Wait until all functions were called; the thread ends then. One of these functions, such
        as a callback of a future, waits for no other."""
        self._ended = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        self._queue.put(None)


def _call_all(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    while (function := queue.get()) is not None:
        function()
        del function  # it refers to what must be freed when the application drops it
