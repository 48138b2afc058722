"""The life of a producer's session, as far as all backends decide it alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.backend import SessionListener, State
from exclusivelog.errors import (
    ExclusiveLogError,
    ProducerMovedError,
    TopicTerminatedError,
    WaitTimeoutError,
)

FOLLOWED_WITHIN = 5.0  # seconds for which a producer tries to follow a topic that was handed over


def state_after(error: ExclusiveLogError) -> State:
    """The state of a producer that has ended with this error (rule C6).

    >>> from exclusivelog.errors import ProducerFencedError, TopicTerminatedError
    >>> state_after(ProducerFencedError("late")), state_after(TopicTerminatedError("over"))
    ('fenced', 'closed')
    """
    if isinstance(error, TopicTerminatedError):
        return "closed"
    return "moved" if isinstance(error, ProducerMovedError) else "fenced"


def outcome_of(receipt: _core.Receipt, wait: Callable[[], None]) -> int:
    """The offset of a message for whose outcome `wait` waits, or its error."""
    try:
        wait()
    except WaitTimeoutError:
        raise  # the outcome comes later; if it is an error, the next flush raises it
    except BaseException:
        if receipt.done():  # the caller gets this interrupt; no flush is to raise an error, too
            receipt.exception()
        raise
    return receipt.result()


def failure_of(appender: _core.Appender, last: _core.Receipt | None) -> Exception | None:
    """The error of the last message: of `last`, which was waited for, or of one that has failed
    before, since the last flush, unless its receipt has told of it."""
    return appender.take_failure() or (None if last is None else last.exception())


def raise_failure(appender: _core.Appender, last: _core.Receipt | None) -> None:
    """Raise that error, if there is one."""
    error = failure_of(appender, last)
    if error is not None:
        raise error


Reference = Callable[[], SessionListener | None]  # a weak one


class Listeners:
    """The producers of one session, which are notified of its changes, and the one that owns it. It
    refers to them weakly. Change it under a lock."""

    __slots__ = ("_others", "_owner")

    def __init__(self) -> None:
        self._owner: Reference = _no_owner
        # Most sessions have the owner alone; a WeakSet would take a kilobyte for each.
        self._others: tuple[Reference, ...] = ()

    def add(self, listener: SessionListener, owner: bool) -> None:
        """Add a producer; `owner`: it closes the session."""
        former = self._owner
        others = self._without(listener)
        if owner:
            self._owner = weakref.ref(listener)
            self._others = others if former() in (None, listener) else (former, *others)
        elif former() is not listener:
            self._others = (*others, weakref.ref(listener))

    def remove(self, listener: SessionListener) -> bool:
        """Remove a producer. True if the session stays, because its owner or another producer
        closes it."""
        self._others = self._without(listener)
        if self.is_owner(listener):
            self._owner = _no_owner
            return False
        return bool(self.all())

    def _without(self, listener: SessionListener) -> tuple[Reference, ...]:
        return tuple(r for r in self._others if r() is not None and r() is not listener)

    def all(self) -> list[SessionListener]:
        """Those that still exist, the owner first."""
        found = (reference() for reference in (self._owner, *self._others))
        return [listener for listener in found if listener is not None]

    def is_owner(self, listener: SessionListener) -> bool:
        """Does this producer close the session?"""
        return self._owner() is listener

    def responsible(self) -> list[SessionListener]:
        """The owner; if it was dropped, all other producers of the session."""
        owner = self._owner()
        return self.all() if owner is None else [owner]


def _no_owner() -> None:
    """Used in place of a weak reference if there is no owner."""
