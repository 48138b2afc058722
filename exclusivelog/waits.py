"""Waits, and the future of a request that may have to wait.

A signal handler may fork while its thread waits, and return in the child, too. The child then waits
for a thread that only its parent has. So every wait checks for a fork now and then (rule C5).
"""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

# ---- waits -----------------------------------------------------------------------------


SLICE_SECONDS = 1.0
# A reader polls this often, for a writer that died between its commit and its wake-up call.
READER_LOOK_UP_SECONDS = 1.0


def in_slices(
    wait: Callable[[float], bool], timeout: float | None, check: Callable[[], object]
) -> bool:
    """Call `wait(seconds)` until it is true, or `timeout` seconds (None: for ever) have passed:
    False. In between, `check()` may raise.

    >>> in_slices(lambda seconds: True, None, check=int)
    True
    >>> in_slices(lambda seconds: False, 0.0, check=int)
    False
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_SECONDS if end is None else max(0.0, end - time.monotonic())
        if wait(min(left, SLICE_SECONDS)):
            return True
        check()
        if end is not None and time.monotonic() >= end:
            return False


def settled(future: Future[Any], seconds: float) -> bool:
    """Wait until the future is done, for so many seconds; is it?

    Not by its `exception`: its TimeoutError looks like one that a signal handler raises. Nor by
    `concurrent.futures.wait`, which an interrupt leaves with its locks taken.
    """
    with future._condition:
        if not future.done():
            future._condition.wait(seconds)
    return future.done()


def check_timeout(timeout: object) -> None:
    """TypeError or ValueError unless it is a number of seconds, 0 or more, or None: for ever."""
    if timeout is not None:
        check_seconds(timeout, "timeout", "seconds from 0 on, or None")


def check_seconds(value: object, argument: str, takes: str) -> None:
    """TypeError or ValueError unless it is a number of seconds, 0 or more."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{argument}={value!r}: it takes {takes}")
    if not value >= 0:
        raise ValueError(f"{argument}={value!r}: it takes {takes}")


# ---- requests that wait ----------------------------------------------------------------


SETTLING_SECONDS = 5.0


Granted = TypeVar("Granted")  # what a future gives, which has a close()


class Requests(Protocol):
    """Where requests wait for their outcome."""

    def forget(self, future: GrantFuture[Any]) -> bool:
        """Remove a request that waits for a hand-over; False if it does not wait for one."""

    def withdraw(self, session: Any) -> bool:
        """Take a waiting session out of the queue; False if it was granted or fenced first."""

    def settles(self, session: Any) -> bool:
        """Will another thread settle this session's future?"""


class ForkChecked(Protocol):
    """An engine, as what waits for its threads knows it."""

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child."""


class EngineFuture(concurrent.futures.Future[Granted], Generic[Granted]):
    """A future that a thread of an engine settles: in a forked child that thread does not exist, so
    waiting there raises EngineClosedError."""

    _engine: Any

    def __init__(self, engine: ForkChecked) -> None:
        super().__init__()
        self._engine = engine

    def result(self, timeout: float | None = None) -> Granted:
        """The result; waits for it, up to `timeout` seconds (None: without a limit)."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed with, or None; waits as `result` does."""
        self._await(timeout)
        return super().exception(0)

    def _await(self, timeout: float | None) -> None:
        if not self.done():
            self._engine.check_not_forked()  # the thread that would settle it is the parent's
            in_slices(functools.partial(settled, self), timeout, self._engine.check_not_forked)


class Host(ForkChecked, Protocol):
    """The engine of a request."""

    @property
    def pending(self) -> Requests:
        """Where the request waits."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""


class GrantFuture(EngineFuture[Granted]):
    """The outcome of a request. `cancel()` removes the request without a trace (rule D5)."""

    _engine: Host

    def __init__(self, engine: Host, topic: int) -> None:
        super().__init__(engine)
        self.has_callbacks = False
        self.topic_id = topic
        self.session: Any = None  # its registration, once there is one
        self.granted: Granted | None = None

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
        name = "" if self.session is None else self.session.name
        return f"producer {name!r} was not granted the topic within its timeout"

    def make(self, session: Any, last_sequence: int) -> Granted:
        """What the future gives, now that its session was granted."""
        raise NotImplementedError

    def cancel(self) -> bool:
        """Leave the queue. False if it is too late: the future has its producer, or its
        error, at once then."""
        if self.done() or not (self._engine.pending.forget(self) or self._withdraw()):
            return self.cancelled()
        cancelled = super().cancel()
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
            concurrent.futures.wait([self], SETTLING_SECONDS)
        return False

    def give_up(self) -> None:
        """Leave the queue; a grant that came first is released."""
        if not self.cancel():
            self.add_done_callback(_close_granted)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function(future)` once it is settled, in a thread of its own."""
        self.has_callbacks = True
        super().add_done_callback(function)


def _close_granted(future: concurrent.futures.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


AnyFuture = GrantFuture[Any]


def give_granted(future: AnyFuture) -> None:
    """Settle the future with what it gives."""
    # Only its result may keep it: the future itself must not, where nothing refers to the result.
    granted, future.granted = future.granted, None
    if granted is not None:
        future.set_result(granted)
