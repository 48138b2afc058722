"""The life of a producer's session, as far as all backends decide it alike.

Producers refer to their session, but a session refers to its producers only weakly: when no
producer refers to it any more, its finalizer releases it. Producers that followed a topic to the
same session share it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from exclusivelog import _core, logs
from exclusivelog.backend import (
    EngineBackend,
    ProducerRequest,
    SessionListener,
    SessionOptions,
    SessionPaused,
    State,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    ProducerBusyError,
    ProducerFencedError,
    ProducerMovedError,
    TopicNotFoundError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.refusals import name_fencing_engine, producer_closed
from exclusivelog.types import AccessMode
from exclusivelog.waits import GrantFuture

# Seconds after which producers that do not send follow, or half of the time for which the topic is
# reserved, if that is less. Until then, it is for the destination's next producer (rules E3, E6).
FOLLOWED_AFTER = 2.0
FOLLOWED_AGAIN_AFTER = 0.5  # if that fails: on a full disk, say
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


def log_granted(engine: EngineBackend, topic: str, session: Any, reason: str, begun: int) -> None:
    """Log that a session of this engine was granted the topic. `begun`: when it was asked for, in
    ns of the monotonic clock."""
    engine.emit(
        logs.GRANTED,
        topic=topic,
        producer=session.name,
        mode=session.mode,
        epoch=session.epoch,
        reason=reason,
        waited=(_core.now() - begun) / 1e9,
    )


# ---- a session ---------------------------------------------------------------------------


class Sessions(Protocol):
    """The sessions that an engine has open."""

    @property
    def lock(self) -> _core.Lock:
        """Held briefly, by each change of a session."""

    def unregister(self, session: Any) -> None:
        """Remove a session that is closed, or whose producers have another one."""


class Follows(Protocol):
    """Finds the next session of producers whose topic was handed over within this process."""

    moved: ProducerMovedError

    @property
    def is_within_reach(self) -> bool:
        """Has an engine of this process had the topic ever since?"""

    def run(self, left: Any, timeout: float | None) -> bool:
        """Give the producers of `left` the session that has the topic now, or end that; False after
        `timeout` seconds."""


class SessionLife:
    """The life of one registration of a producer: open, then lost, handed over or closed.

    Threads, and several producers, may share it. A backend's session adds its state in the log, its
    pauses, and what is below "what a backend does"."""

    # A process may have a hundred thousand.
    __slots__ = (
        "__weakref__",
        "_finalizer",
        "_following",
        "_is_closed",
        "_lost",
        "appender",
        "engine",
        "listeners",
        "moved",
        "options",
        "session",
        "topic",
    )

    appender: _core.Appender
    engine: EngineBackend
    session: Any
    _finalizer: _core.Finalizer
    _following: Follows | None  # once the topic was handed over

    def __init__(
        self, engine: EngineBackend, topic: str, session: Any, options: SessionOptions
    ) -> None:
        self.engine, self.topic, self.session, self.options = engine, topic, session, options
        self.moved: ProducerMovedError | None = None
        self.listeners = Listeners()
        self._lost: ExclusiveLogError | None = None
        self._is_closed = False
        self._following = None

    # ---- state -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Is it, or its engine, closed?"""
        return self._is_closed or self.engine.closed

    @property
    def usable(self) -> bool:
        """True unless it is known to be closed, fenced or moved."""
        return self.moved is None and not self.over

    @property
    def over(self) -> bool:
        """Is it lost or closed, regardless of its engine?"""
        return self._lost is not None or self._is_closed

    @property
    def lost(self) -> ExclusiveLogError | None:
        """The error of a session that has ended for good."""
        return self._lost

    @property
    def known_state(self) -> State | None:
        """Its state if it is not open any more; None: the log has to be asked."""
        if self.closed:
            return "closed"
        if self._lost is not None:
            return state_after(self._lost)
        if self._following is not None:
            return "open" if self._following.is_within_reach else "moved"
        return None

    def state_at(self, target: str) -> State:
        """The state of one whose topic was handed over to this engine, of which its producers are
        to be notified."""
        reached = self.options.follow and self.engine.engine_here(target) is not None
        return "open" if reached else "moved"

    def closed_error(self) -> EngineClosedError:
        """The error for calls after it was closed."""
        return producer_closed(self.session.name, self.topic)

    # ---- producers -------------------------------------------------------------------------

    def subscribe(self, listener: SessionListener, owner: bool) -> None:
        """Notify this producer of what happens to the session; the `owner` closes it."""
        with self._sessions.lock:
            self.listeners.add(listener, owner)
            lost, closed = self._lost, self.closed
        if lost is not None:
            listener.lost(lost)
        elif closed:
            listener.ended()
        elif self._is_wanted:
            listener.wanted()

    def notify_wanted(self) -> None:
        """Notify the owner that another producer waits for the topic; if the owner was dropped,
        notify all other producers of the session."""
        if self.usable and self.session.notify_on_contention:
            for listener in self.listeners.responsible():
                listener.wanted()

    def flush(self, timeout: float | None) -> None:
        """Wait until everything that was accepted has its outcome."""
        error = self.appender.error
        if isinstance(error, ProducerMovedError):
            raise error
        waiting = self.appender.newest()
        if waiting is not None:
            self._await(waiting, timeout)
        failure = failure_of(self.appender, waiting)
        if failure is not None:
            raise failure
        if waiting is None:
            self.verify()

    def lose(self, error: ExclusiveLogError) -> None:
        """The topic is lost for good: fail what waits, and notify the producers."""
        with self._sessions.lock:
            if self.over:
                return
            name_fencing_engine(error, self.session.epoch, self.engine.engine_here)
            # The same error in every call, whichever thread notices it first (rule B4).
            self._lost = error = self.appender.close_with(error)
            self._end_pauses()
            listeners = self.listeners.all()
        self._fail_queued(error)
        for listener in listeners:
            listener.lost(error)
        session = self.session
        self.engine.emit(
            logs.LOST,
            topic=self.topic,
            epoch=session.epoch,
            producer=session.name,
            reason=str(error),
        )

    def end(self, error: EngineClosedError) -> None:
        """The engine is closing: accept nothing more. What is queued is still committed."""
        self.appender.close_with(error)
        for listener in self.listeners.all():
            listener.ended()

    def refused(self, error: ProducerFencedError) -> ExclusiveLogError:
        """The error for a caller whose append failed with `error`."""
        if self._is_closed:
            return self.closed_error()  # by another thread, meanwhile
        if isinstance(error, SessionPaused) or self._is_paused:  # a pause may be over by now
            return SessionPaused(str(error))  # the append came just after the hand-over
        if self.moved is not None:
            return self.moved
        self.lose(error)
        return self._lost or error

    # ---- after a hand-over -----------------------------------------------------------------

    def end_unless_within_reach(self) -> None:
        """End it if its topic was handed over and has had another owner since, so that its
        producers cannot follow it any more."""
        following = self._following
        if following is not None and self._lost is None and not following.is_within_reach:
            self.lose(following.moved)

    def follow(self, timeout: float | None) -> bool:
        """Give the producers the session that has the topic now, or end this one; False after
        `timeout` seconds."""
        self.engine.check_not_forked()
        self.engine.check_free()
        assert self._following is not None, "only a topic that was handed over can be followed"
        return self._following.run(self, timeout)

    def hand_on(self, found: Any, opened: bool) -> None:
        """Give all producers this session instead; `opened`: it was opened for them. A second call
        continues where one failed."""
        assert self.moved is not None
        self._sessions.unregister(self)
        self._finalizer.detach()
        for listener in self.listeners.all():
            found.subscribe(listener, owner=opened and self.listeners.is_owner(listener))
            listener.moved_to(found, self.moved)
            with self._sessions.lock:
                self.listeners.remove(listener)
        if opened and not found.listeners.all():  # all producers were closed meanwhile
            found.close()

    def next_request(self, topic: int, lineage: int | None = None) -> ProducerRequest:
        """The request for the session with which its producers go on. `topic`: its id there;
        `lineage`: of the hand-over."""
        session = self.session
        mode = AccessMode.EXCLUSIVE if session.exclusive else AccessMode.SHARED
        return ProducerRequest(
            topic,
            mode.value,
            session.name,
            session.priority,
            properties=session.properties,
            notify_on_contention=session.notify_on_contention,
            lineage=lineage,
        )

    # ---- end -------------------------------------------------------------------------------

    def leave(self, listener: SessionListener) -> ExclusiveLogError | None:
        """Remove a producer that is closed: commit what was accepted, and release the session if
        this is its owner or last producer. Returns the error of the last accepted message, if it
        failed."""
        if self.engine.forked:
            return None
        if self.engine.busy_here:
            self.engine.call_later(functools.partial(self.leave, listener))
            return None
        with self._sessions.lock:
            stays = self.listeners.remove(listener)
        return self._drain() if stays else self.close()

    def close(self) -> ExclusiveLogError | None:
        """Drain and release the session; returns the error of the last accepted message, if any."""
        with self._sessions.lock:
            if self._is_closed:
                return None
            self._is_closed = True
            if self.moved is None:
                self.appender.close_with(self.closed_error())  # what is queued is still sent
                self._end_pauses()
        try:
            failure = self._drain()
            if self._has_topic:
                self._release()
            self._finalizer.detach()
        except BaseException:
            # After an interrupt or on a full disk, the worker releases it: a closed producer must
            # not stay an owner.
            self._finalizer.release()
            raise
        try:
            self._fail_queued(self.closed_error())
        finally:
            self._sessions.unregister(self)
            for listener in self.listeners.all():
                listener.ended()
        return failure

    @property
    def _has_topic(self) -> bool:
        return self.moved is None and self._lost is None and not self._is_released

    def _drain(self) -> ExclusiveLogError | None:
        """The same as `finish`, unless it has no topic any more, or its engine does that."""
        return self.finish() if self._has_topic else None

    def finish(self) -> ExclusiveLogError | None:
        """Commit what was accepted; returns the error of the last message, unless it was fenced."""
        waiting = self.appender.newest()
        if waiting is not None:
            self._commit(waiting)
        error = failure_of(self.appender, waiting)
        over = isinstance(error, ProducerFencedError | TopicTerminatedError)
        return None if over or not isinstance(error, ExclusiveLogError) else error

    def abandon(self) -> None:
        """Have the engine release a session that no caller got, as after an interrupt."""
        self._finalizer.release()

    # ---- what a backend does ---------------------------------------------------------------

    @property
    def _sessions(self) -> Sessions:
        """Those of its engine."""
        raise NotImplementedError

    @property
    def _is_released(self) -> bool:
        """Has its engine released it, or does so, because that is closed?"""
        return self.engine.closed

    @property
    def _is_paused(self) -> bool:
        """Do its appends wait, as for a hand-over?"""
        return False

    @property
    def _is_wanted(self) -> bool:
        """Is it to be told at once that another producer waits, of which it has not been told?"""
        return False

    def verify(self) -> None:
        """ProducerFencedError or TopicTerminatedError unless the log still admits its appends."""
        raise NotImplementedError

    def _await(self, receipt: _core.Receipt, timeout: float | None) -> None:
        """Wait for the outcome of this message; WaitTimeoutError after `timeout` seconds."""
        raise NotImplementedError

    def _commit(self, last: _core.Receipt) -> None:
        """Commit all messages up to this one, and wait for their outcome."""
        raise NotImplementedError

    def _release(self) -> None:
        """Release the topic."""
        raise NotImplementedError

    def _end_pauses(self) -> None:
        """Let the calls go on that wait for the end of a pause: there will be none."""

    def _fail_queued(self, error: ExclusiveLogError) -> None:
        """Fail what is still queued."""


# ---- the next session --------------------------------------------------------------------

# Another producer has the topic, or the engine or topic has gone.
NOT_OPENED = (ProducerFencedError, ProducerBusyError, EngineClosedError, TopicNotFoundError)


class SessionFuture(GrantFuture[Any]):
    """The future of a session on the topic of that name."""

    _engine: EngineBackend

    def __init__(
        self, engine: EngineBackend, topic: int, name: str, options: SessionOptions
    ) -> None:
        super().__init__(engine, topic)
        self._name, self._options = name, options

    def make(self, session: Any, last_sequence: int) -> Any:
        """Make the session that was granted."""
        return self._engine.open_session(self._name, session, last_sequence, self._options)
