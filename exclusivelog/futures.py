"""The future of a request that may have to wait in a queue, and what it needs of its engine."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Set
from typing import Any, Generic, Protocol, TypeVar

from exclusivelog.waits import in_slices, settled

SETTLING_SECONDS = 5.0


Granted = TypeVar("Granted")  # what a future gives, which has a close()


class Requests(Protocol):
    """Where requests wait for their outcome."""

    def forget(self, future: GrantFuture[Any]) -> bool:
        """Let a request no longer wait for a hand-over; False if it does not."""

    def withdraw(self, session: Any) -> bool:
        """Take a waiting session out of the queue; False if it was granted or fenced first."""

    def settles(self, session: Any) -> bool:
        """Will another thread settle this session's future?"""


class Host(Protocol):
    """The engine of a request."""

    @property
    def pending(self) -> Requests:
        """Where the request waits."""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def check_alone(self) -> None:
        """EngineClosedError in a forked child."""


class GrantFuture(concurrent.futures.Future[Granted], Generic[Granted]):
    """The outcome of a request. `cancel()` removes the request without a trace (rule D5)."""

    def __init__(self, engine: Host, topic: int) -> None:
        super().__init__()
        self.has_callbacks = False
        self.topic_id = topic
        self.session: Any = None  # its registration, once there is one
        self.granted: Granted | None = None
        self._engine = engine

    @property
    def topics(self) -> frozenset[int]:
        """The ids of the topics that it waits for."""
        return frozenset((self.topic_id,))

    def in_the_way(self) -> Set[int]:
        """The topics that have to become free for it."""
        return self.topics

    @property
    def waited(self) -> str:
        """What the error of a timeout says."""
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
        """Leave the queue; a grant that came first is given back."""
        if not self.cancel():
            self.add_done_callback(_close_granted)

    def result(self, timeout: float | None = None) -> Granted:
        """What was asked for; waits for it, up to `timeout` seconds (None: for ever)."""
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
