"""Waits, and the future of a request that may have to wait.

A signal handler may fork while its thread waits, and return in the child, too. The child then waits
for a thread that only its parent has. So every wait periodically checks for a fork (rule C5).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import CancelledError, InvalidStateError
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

from exclusivelog import _core
from exclusivelog.arguments import check_timeout
from exclusivelog.errors import ExclusiveLogError
from exclusivelog.futures import Future, is_free

# ---- waits -----------------------------------------------------------------------------


SLICE_SECONDS = 1.0
# A reader polls this often, for a writer that died between its commit and its wake-up call.
READER_LOOK_UP_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 0.25  # between two looks of a process that is not paused
LONGEST_SECONDS = 10**9  # of a deadline: about thirty years


def in_slices(
    wait: Callable[[float], bool], timeout: float | None, check: Callable[[], object]
) -> bool:
    """Call `wait(seconds)` until it returns True; False after `timeout` seconds (None: no limit).
    Between the calls, `check()` may raise.

    >>> in_slices(lambda seconds: True, None, check=int)
    True
    >>> in_slices(lambda seconds: False, 0.0, check=int)
    False
    """
    end = None if timeout is None else _core.monotonic() + timeout
    while True:
        left = SLICE_SECONDS if end is None else max(0.0, end - _core.monotonic())
        if wait(min(left, SLICE_SECONDS)):
            return True
        check()
        if end is not None and _core.monotonic() >= end:
            return False


class Waited:
    """Counts for how long this process has waited, without its pauses: what it waits for may have
    been paused as well (a frozen container, a suspended machine). Look at `seconds` four times a
    second; more time between two looks is a pause.

    >>> waited = Waited()
    >>> waited.seconds <= LONGEST_LOOK_SECONDS
    True
    """

    def __init__(self) -> None:
        self._last, self._seconds = _core.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """The seconds until now, since this object was made."""
        now = _core.monotonic()
        self._seconds += min(now - self._last, LONGEST_LOOK_SECONDS)
        self._last = now
        return self._seconds


def wait_for(condition: Condition, done: Callable[[], bool], seconds: float | None) -> bool:
    """Wait for the condition, whose lock is held, until `done()`; False after `seconds` (None: no
    limit). As `Condition.wait_for`, whose deadline is a time of Python: that may stand still, as
    under freezegun (rule C9).

    >>> changed = Condition()
    >>> with changed:
    ...     wait_for(changed, lambda: False, 0.01)
    False
    """
    end = None if seconds is None else _core.monotonic() + seconds
    while not done():
        left = None if end is None else end - _core.monotonic()
        if left is not None and left <= 0:
            return False
        condition.wait(left)
    return True


def until_settled(future: concurrent.futures.Future[Any]) -> Callable[[float], bool]:
    """A function that waits for the future, up to so many seconds, and returns whether it is done.

    `Future.exception` does not serve for this: its TimeoutError looks like one that a signal
    handler raises. Nor does `concurrent.futures.wait`, which leaves its locks taken then.
    """
    done = _core.Signal()
    # Not the method of a subclass, which may count callbacks of the application.
    concurrent.futures.Future.add_done_callback(future, lambda _: done.set())
    return done.wait


def time_limit(timeout: float | None, now: int) -> int:
    """The time so many seconds after `now`, in ns of `_core.now`; 0 for None.

    >>> time_limit(1.5, 10), time_limit(None, 10)
    (1500000010, 0)
    """
    return 0 if timeout is None else now + int(min(timeout, LONGEST_SECONDS) * 1e9)


# ---- messages that wait ----------------------------------------------------------------


class Queueing(Protocol):
    """What sends for a session, as `queued` uses it."""

    appender: _core.Appender

    def await_earlier(self, timeout: float | None = None) -> None:
        """Wait for the outcome of all that was accepted so far, whatever it is. WaitTimeoutError
        after `timeout` seconds."""

    def duplicate(
        self, appender: _core.Appender, sequence: int | None, count: int = 1
    ) -> ExclusiveLogError:
        """The error for a sequence id that was used before."""


def queued(
    queue: Queueing,
    add: Callable[[], Any],
    sequence: int | None,
    timeout: float | None,
    count: int = 1,
) -> list[Any]:
    """Queue messages by `add`, which returns None or UNDECIDED where their sequence id was used.
    Returns their receipt, and what is left of `timeout`.

    If messages that wait have used the id, their outcome decides whether these ones are duplicates:
    they may fail yet (rule B9)."""
    found: list[Any] = [None, timeout]  # once they are queued, nothing needs memory
    while True:
        found[0] = add()
        if found[0] is not _core.UNDECIDED:
            break
        began = _core.monotonic()
        queue.await_earlier(found[1])
        if timeout is not None:
            found[1] = max(0.0, found[1] - (_core.monotonic() - began))
    if found[0] is None:
        raise queue.duplicate(queue.appender, sequence, count)
    return found


# ---- requests that wait ----------------------------------------------------------------


SETTLING_SECONDS = 5.0


Granted = TypeVar("Granted")  # the result of a future; it has a close()


class Requests(Protocol):
    """The requests that wait for their outcome."""

    def forget(self, future: GrantFuture[Any]) -> bool:
        """Remove a request that has no session yet, and waits: for a hand-over, or on a cluster in
        the queue. False if there is none."""

    def withdraw(self, session: Any) -> bool:
        """Take a waiting session out of the queue; False if it was granted or fenced first, as a
        session on a cluster is."""

    def settles(self, session: Any) -> bool:
        """Whether another thread is about to settle this session's future."""


class ForkChecked(Protocol):
    """An engine that can tell that it was inherited by a forked child."""

    @property
    def forked(self) -> bool:
        """Was it inherited by a forked child?"""

    def check_not_forked(self) -> None:
        """Raise EngineClosedError in a forked child."""


class EngineFuture(Future[Granted], Generic[Granted]):
    """A future that a thread of an engine settles: in a forked child that thread does not exist, so
    waiting there raises EngineClosedError."""

    _engine: Any

    def __init__(self, engine: ForkChecked) -> None:
        super().__init__()
        self._engine = engine
        self._until_settled: Callable[[float], bool] | None = None

    def result(self, timeout: float | None = None) -> Granted:
        """Return the result; wait for it up to `timeout` seconds (None, the default: no limit)."""
        check_timeout(timeout)
        self._await_end(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that it failed with, or None; wait as `result` does."""
        check_timeout(timeout)
        self._await_end(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Cancel it; False if it is too late. In a forked child it does nothing, and returns False:
        what is under way is the parent's."""
        return (
            not self._engine.forked and self._cancel()
        )  # a thread of the parent may hold its lock

    def _cancel(self) -> bool:
        return super().cancel()

    def _await_end(self, timeout: float | None) -> bool:
        """Wait until it is done; False if it is not after so many seconds (None: no limit)."""
        if self.done():
            return True
        self._engine.check_not_forked()  # only the parent has the thread that would settle it
        if self._until_settled is None:  # one callback, however often it is waited for
            self._until_settled = until_settled(self)
        return in_slices(self._until_settled, timeout, self._engine.check_not_forked)


class Host(ForkChecked, Protocol):
    """The engine of a request."""

    @property
    def pending(self) -> Requests:
        """The requests that wait."""

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine is closed, or inherited by a forked child."""


class GrantFuture(EngineFuture[Granted]):
    """The outcome of a request. `cancel()` removes the request (rule D5)."""

    _engine: Host

    def __init__(self, engine: Host, topic: int) -> None:
        super().__init__(engine)
        self.has_callbacks = False
        self.topic_id = topic
        self.session: Any = None  # set once the request is registered
        self.producer_name = ""  # of a request that waits without a session
        self.granted: Granted | None = None
        self._cancelling = set[int]()  # the threads that do

    @property
    def topics(self) -> frozenset[int]:
        """The ids of the topics that it waits for."""
        return frozenset((self.topic_id,))

    def blocking(self) -> Set[int]:
        """The topics that have to become free for it."""
        return self.topics

    @property
    def waited(self) -> str:
        """The text of a timeout's error."""
        name = self.producer_name if self.session is None else self.session.name
        return f"producer {name!r} was not granted the topic within its timeout"

    def make(self, session: Any, last_sequence: int) -> Granted:
        """The result of the future, after its session was granted."""
        raise NotImplementedError

    def cancel(self) -> bool:
        """Leave the queue. False if it is too late: the future then has its result or error, or
        gets it at once. In a forked child it does nothing, and returns False."""
        return super().cancel()

    def _cancel(self) -> bool:
        me = threading.get_ident()
        self._cancelling.add(me)
        try:
            if self._leaves():
                return self._end_cancelled()
            if not self.done() and self._cancelling - {me}:  # another one has just left the queue
                self._await_end(SETTLING_SECONDS)
            return self.cancelled()
        finally:
            self._cancelling.discard(me)

    def _leaves(self) -> bool:
        """Take it out of the queue; False if it is not in one any more."""
        return not self.done() and (self._engine.pending.forget(self) or self._withdraw())

    def _end_cancelled(self) -> bool:
        cancelled = super()._cancel()
        if cancelled:  # else concurrent.futures.wait does not see it
            self.set_running_or_notify_cancel()
        return cancelled

    def _withdraw(self) -> bool:
        if self.session is None:
            return False
        self._engine.check_open()
        if self._engine.pending.withdraw(self.session):
            return True
        if self._engine.pending.settles(self.session):  # another thread is about to
            self._await_end(SETTLING_SECONDS)
        return False

    def give_up(self) -> None:
        """Leave the queue. If the request was granted already, release the grant."""
        if not self.cancel():
            self.add_done_callback(_close_granted)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function(future)` once it is settled, in a thread of its own."""
        self.has_callbacks = True
        super().add_done_callback(function)


def give_up_all(futures: Iterable[GrantFuture[Any]]) -> None:
    """`give_up` for each of these; the others also if one fails."""
    with contextlib.ExitStack() as stack:
        for future in futures:
            stack.callback(future.give_up)


def together(futures: Sequence[GrantFuture[Any]]) -> Future[None]:
    """A future that is done once all of these are granted, or fails with the first that fails."""
    result: Future[None] = Future()
    left = iter(range(len(futures)))

    def note(future: concurrent.futures.Future[Any]) -> None:
        error = CancelledError() if future.cancelled() else Future.exception(future)
        with contextlib.suppress(InvalidStateError):  # another one has failed before
            if error is not None:
                result.set_exception(error)
            elif next(left) == len(futures) - 1:
                result.set_result(None)

    if not futures:
        result.set_result(None)
    for future in futures:
        Future.add_done_callback(future, note)
    return result


def await_all(futures: Sequence[GrantFuture[Any]]) -> None:
    """Wait until all of these are granted; raise the error of the first that fails."""
    result = together(futures)
    if futures:
        in_slices(until_settled(result), None, futures[0]._engine.check_not_forked)
    result.result()


def _close_granted(future: concurrent.futures.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


AnyFuture = GrantFuture[Any]


def may_block(future: AnyFuture) -> bool:
    """May the thread that settles it have to wait: for a callback, or for a lock that a thread of
    the application has? Then no thread settles it that works for others."""
    return future.has_callbacks or not is_free(future)


def give_granted(future: AnyFuture) -> None:
    """Set the future's result."""
    # Only the future's result may refer to it from now on, so that it is released when the
    # application drops the result.
    granted, future.granted = future.granted, None
    if granted is not None:
        future.set_result(granted)
