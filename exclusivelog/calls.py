"""Calls in the background: made in the order of their submission, acknowledged in batches.

One thread makes the calls. A call that has appended something need not wait for its flush: the
next one begins meanwhile, and a second thread waits for one flush of all that is appended by then.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exclusivelog import _core

Future = concurrent.futures.Future
NAME = "exclusivelog-state"


@dataclass(slots=True)
class _Made:
    """A call that was made, and what is to be durable before it is acknowledged."""

    future: Future[Any]
    result: Any
    error: BaseException | None
    pending: Any


class Calls:
    """The background calls of one shared state.

    `flush(pending)` returns once what a call has appended is durable, or raises.
    """

    def __init__(self, flush: Callable[[Any], None]) -> None:
        self._flush = flush
        self._guard = threading.RLock()  # a signal handler may submit inside of `submit`
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._made: deque[_Made] = deque()
        self._working = self._flushing = False
        self._threads: list[concurrent.futures.ThreadPoolExecutor] = []
        self._here = threading.local()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """`call()`, after all calls that were submitted before."""
        future: Future[Any] = Future()
        with _core.Holding(self._guard):
            if not self._threads:
                self._threads = [_one_thread(), _one_thread()]
            self._jobs.append((future, call))
            if not self._working:
                self._working = True
                self._threads[0].submit(self._work)
        return future

    def defer(self, pending: Any) -> bool:
        """Acknowledge the call that this thread makes only once `pending` is durable; False in
        a thread that makes none."""
        if not getattr(self._here, "busy", False):
            return False
        self._here.pending = pending
        return True

    @property
    def idle(self) -> bool:
        """Could a call be made in another thread without overtaking one that was submitted?"""
        return bool(self._threads) and not self._working

    def acknowledge(self, future: Any, result: Any, pending: Any) -> None:
        """Have `future.set_result(result)` called in the background, once `pending` is durable;
        `future.set_exception(error)` if it cannot be."""
        try:
            self._finish(_Made(future, result, None, pending))
        except RuntimeError:  # closed just now, by another thread
            self._acknowledge()

    def close(self) -> None:
        """Make all calls that were submitted, then end the threads."""
        for thread in self._threads:
            thread.shutdown(wait=True)

    # ---- in the background ---------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with _core.Holding(self._guard):
                if not self._jobs:
                    self._working = False
                    return
                future, call = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                self._finish(self._make(future, call))
            del future, call

    def _make(self, future: Future[Any], call: Callable[[], Any]) -> _Made:
        self._here.busy, self._here.pending = True, None
        made = _Made(future, None, None, None)
        try:
            made.result = call()
        except BaseException as error:  # its caller gets it
            made.error = error
        finally:
            self._here.busy = False
        made.pending, self._here.pending = self._here.pending, None
        return made

    def _finish(self, made: _Made) -> None:
        with _core.Holding(self._guard):
            waits = made.pending is not None or bool(self._made)
            if waits:
                self._made.append(made)
            if waits and not self._flushing:
                self._flushing = True
                self._threads[1].submit(self._acknowledge)
        if not waits:
            _tell(made, None)

    def _acknowledge(self) -> None:
        while True:
            with _core.Holding(self._guard):
                some = list(self._made)
                if not some:
                    self._flushing = False
                    return
            self._acknowledge_some(some)
            for _ in some:
                self._made.popleft()

    def _acknowledge_some(self, some: list[_Made]) -> None:
        # What was appended last is durable last; each has its own outcome where that fails.
        last = next((made for made in reversed(some) if made.pending is not None), None)
        whole = last is None or self._outcome(last) is None
        for made in some:
            failed = None if whole or made.pending is None else self._outcome(made)
            _tell(made, failed)

    def _outcome(self, made: _Made) -> BaseException | None:
        try:
            self._flush(made.pending)
        except BaseException as error:
            return error
        return None


def _tell(made: _Made, failed: BaseException | None) -> None:
    error = failed or made.error
    if error is not None:
        made.future.set_exception(error)
    else:
        made.future.set_result(made.result)


def _one_thread() -> concurrent.futures.ThreadPoolExecutor:
    threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=NAME)
    threads.submit(int)  # its thread is there now; else a call would stay for later
    return threads
