"""Sessions of producers.

Producers refer to their session, but a session refers to its producers only weakly: when no
producer refers to it any more, its finalizer releases it. Producers that followed a topic to the
same session share it.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

from exclusivelog import _core, logs
from exclusivelog.backend import (
    SessionListener,
    SessionOptions,
    SessionPaused,
    State,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    ProducerFencedError,
    ProducerMovedError,
    TopicTerminatedError,
)
from exclusivelog.local.followers import Following
from exclusivelog.local.log.appending import LocalSending, Pauses
from exclusivelog.local.ownership.steps import topic_moved_error
from exclusivelog.local.records import Session, Transfer
from exclusivelog.local.storage.tables import Tables, check_may_write, owner_of
from exclusivelog.refusals import name_fencing_engine, producer_closed
from exclusivelog.sessions import Listeners, state_after

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime

log = logging.getLogger(__name__)


class LocalSession(LocalSending):
    """The life of one registration of a producer: open, then lost, handed over or closed.

    Threads, and several producers, may share it. `keeper`: what releases the session instead, such
    as a role. Its parts have the rest: `pauses` lets appends wait, `listeners` are its producers,
    and `Following` gives these another session after a hand-over.
    """

    # A process may have a hundred thousand.
    __slots__ = (
        "__weakref__",
        "_finalizer",
        "_following",
        "_is_closed",
        "_keeper",
        "_lost",
        "_pauses",
        "listeners",
        "moved",
        "session",
    )

    def __init__(
        self,
        engine: Runtime,
        topic: str,
        session: Session,
        last_sequence: int,
        options: SessionOptions,
        keeper: object = None,
    ) -> None:
        self.engine, self.session = engine, session
        self.moved: ProducerMovedError | None = None
        self.topic, self.options, self._keeper = topic, options, keeper
        self._lost: ExclusiveLogError | None = None
        self._is_closed = False
        self._following: Following | None = None  # once the topic was handed over
        self._pauses: Pauses | None = None
        self.listeners = Listeners()
        self._finalizer = engine.worker.finalizer(session)
        if keeper is not None:
            self._finalizer.detach()
        self.appender = _connect(engine, session, last_sequence, options, self._finalizer)
        engine.ledger.checkpointer.start()
        engine.committer.start()
        engine.registry.register(self)

    @property
    def pauses(self) -> Pauses:
        """What lets its appends wait. The first use makes it: most sessions are never paused."""
        with self.engine.registry.lock:
            if self._pauses is None:
                self._pauses = Pauses(self.appender, self.topic, self.engine.registry.lock)
            return self._pauses

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

    def status(self) -> State:
        """Its state according to the ledger; changes nothing."""
        self.engine.check_not_forked()
        if self.closed:
            return "closed"
        if self._lost is not None:
            return state_after(self._lost)
        if self._following is not None:
            return "open" if self._following.is_within_reach else "moved"
        with self.engine.ledger.read() as tables:
            row = tables.topics.get(self.session.topic)
            if row.flags & _core.TERMINATED:
                return "closed"
            if _may_write(tables, row, self.session):
                return "open"
            target = _handed_over_to(tables, row)
        if not self.usable:  # a notification has ended it meanwhile
            return self.status()
        if not self.pauses or target is None:
            return "fenced"
        # It was handed over, and the notification of that is about to come.
        reached = self.options.follow and self.engine.engine_here(target) is not None
        return "open" if reached else "moved"

    def verify(self) -> None:
        """ProducerFencedError or TopicTerminatedError unless the ledger still admits its
        appends."""
        with self.engine.ledger.read() as tables:
            row = tables.topics.get(self.session.topic)
            if not _may_write(tables, row, self.session):
                check_may_write(tables, row, self.session)

    def flush(self, timeout: float | None) -> None:
        """Wait until everything that was accepted has its outcome."""
        error = self.appender.error
        if isinstance(error, ProducerMovedError):
            raise error
        if not self.await_accepted(timeout):
            self.verify()

    # ---- producers -------------------------------------------------------------------------

    def subscribe(self, listener: SessionListener, owner: bool) -> None:
        """Notify this producer of what happens to the session; the `owner` closes it."""
        with self.engine.registry.lock:
            self.listeners.add(listener, owner)
            lost, closed = self._lost, self.closed
        if lost is not None:
            listener.lost(lost)
        elif closed:
            listener.ended()

    def notify_wanted(self) -> None:
        """Notify the owner that another producer waits for the topic; if the owner was dropped,
        notify all other producers of the session."""
        if self.usable:
            for listener in self.listeners.responsible():
                listener.wanted()

    @property
    def lost(self) -> ExclusiveLogError | None:
        """The error of a session that has ended for good."""
        return self._lost

    def lose(self, error: ExclusiveLogError) -> None:
        """The topic is lost for good: fail what waits, and notify the producers."""
        with self.engine.registry.lock:
            if self.over:
                return
            name_fencing_engine(error, self.session.epoch, self.engine.engine_here)
            # The same error in every call, whichever thread notices it first (rule B4).
            self._lost = error = self.appender.close_with(error)
            self.pauses.stop()
            listeners = self.listeners.all()
        self.engine.committer.fail(self.appender, error)
        for listener in listeners:
            listener.lost(error)
        session = self.session
        logs.emit(
            log,
            logs.LOST,
            ledger=self.engine.ledger.path,
            engine=session.engine_name,
            engine_id=session.engine,
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
            return _closed(self)  # by another thread, meanwhile
        if self.pauses or isinstance(error, SessionPaused):  # a pause may be over by now
            return SessionPaused(str(error))  # the append came just after the hand-over
        if self.moved is not None:
            return self.moved
        self.lose(error)
        return self._lost or error

    # ---- pause -----------------------------------------------------------------------------

    def ready_for_transaction(self) -> bool:
        """False if its appends wait, or the topic was handed over; raises if it has ended."""
        with self.engine.registry.lock:
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            if self._is_closed:
                raise _closed(self)
            paused = self._pauses is not None and self._pauses.count
            return not paused and self.moved is None

    def pause_for_transaction(self) -> bool:
        """Let appends wait; otherwise as `ready_for_transaction`."""
        with self.engine.registry.lock:
            ready = self.ready_for_transaction()
            if ready:
                self.pauses.begin()
            return ready

    def resume(self) -> None:
        """Resume appends; after a hand-over, they follow the topic."""
        self.pauses.end()

    def await_resumed(self, timeout: float | None) -> bool:
        """Wait until it is not paused; False after `timeout` seconds."""
        self.engine.check_free()
        return self.pauses.wait(timeout, self.engine.check_not_forked)

    # ---- hand-over -------------------------------------------------------------------------

    def hand_off(self, to: Transfer) -> None:
        """Note that the topic was handed over. If its destination is in this process, the producers
        may continue there (rule E2); otherwise this ends them."""
        error = topic_moved_error(self.topic, self.session.name, to)
        if not self.options.follow or self.engine.engine_here(to.target) is None:
            self.lose(error)
            return
        with self.engine.registry.lock:
            if not self.over:
                self._following = Following(
                    self.engine, self.session.topic, to, error, self._finalizer
                )
                self.moved = error
                self.appender.close_with(error)
                self.engine.registry.note_hand_over(self)

    def end_unless_within_reach(self) -> None:
        """End it if its topic was handed over and has had another owner since, so that its
        producers cannot follow it any more."""
        following = self._following
        if following is not None and self._lost is None and not following.is_within_reach:
            self.lose(following.moved)

    def begin_to_follow(self) -> None:
        """Let its producers follow its topic soon, although they do not send."""
        if self._following is not None and not self.over:
            self._following.begin(self)

    def follows_in(self) -> float:
        """The seconds until that is due; negative if it is overdue."""
        following = self._following
        return math.inf if following is None or self.over else following.due_in()

    def follow(self, timeout: float | None) -> bool:
        """Give the producers the session that has the topic now, or end this one; False after
        `timeout` seconds."""
        self.engine.check_not_forked()
        self.engine.check_free()
        assert self._following is not None, "only a topic that was handed over can be followed"
        return self._following.run(self, timeout)

    # ---- end -------------------------------------------------------------------------------

    def leave(self, listener: SessionListener) -> ExclusiveLogError | None:
        """Remove a producer that is closed: commit what was accepted, and release the session if
        this is its owner or last producer. Returns the error of the last accepted message, if it
        failed."""
        if self.engine.forked:
            return None
        if self.engine.busy_here:
            self.engine.callbacks.call_later(functools.partial(self.leave, listener))
            return None
        with self.engine.registry.lock:
            stays = self.listeners.remove(listener)
        return self._drain() if stays else self.close()

    def close(self) -> ExclusiveLogError | None:
        """Drain and release the session; returns the error of the last accepted message, if any."""
        failure = None
        with self.engine.registry.lock:
            if self._is_closed:
                return None
            self._is_closed = True
            if self.moved is None:
                error = _closed(self)
                self.appender.close_with(error)  # what is queued is still sent
                self.pauses.stop()
        try:
            failure = self._drain()
            releases = self.moved is None and self._lost is None and not self.engine.closed
            if releases and self._keeper is None:
                self.engine.worker.release(self.session)
            self._finalizer.detach()
        except BaseException:
            # After an interrupt or on a full disk, the worker releases it: a closed producer must
            # not stay an owner.
            self._finalizer.release()
            raise
        try:
            self.engine.committer.fail(self.appender, _closed(self))
        finally:
            self.engine.registry.unregister(self)
            for listener in self.listeners.all():
                listener.ended()
        return failure

    def _drain(self) -> ExclusiveLogError | None:
        """Commit what was accepted; returns the error of the last message, unless it was fenced."""
        if self.moved is not None or self._lost is not None or self.engine.closed:
            return None
        return self.finish()

    def abandon(self) -> None:
        """Have the engine release a session that no caller got, as after an interrupt."""
        self._finalizer.release()


def _closed(session: LocalSession) -> EngineClosedError:
    return producer_closed(session.session.name, session.topic)


def _connect(
    engine: Runtime,
    session: Session,
    last_sequence: int,
    options: SessionOptions,
    finalizer: _core.Finalizer,
) -> _core.Appender:
    """The appender of the session."""
    ledger = engine.ledger
    appender = _core.Appender(
        session.name.encode(),
        last_sequence,
        options.max_batch_messages,
        options.max_batch_bytes,
        session,
        engine.committer.commit_queue,
        options.linger,
        finalizer,
    )
    assert ledger.journal is not None
    appender.connect(
        ledger.journal,
        ledger.lockfile.atomics,
        ledger.lockfile.counters.place(session.topic),
        session.topic,
        session.epoch,
        session.id,
        session.exclusive,
        not engine.unflushed,
    )
    return appender


def _may_write(tables: Tables, row: _core.TopicRow, session: Session) -> bool:
    try:
        check_may_write(tables, row, session)
    except (ProducerFencedError, TopicTerminatedError):
        return False
    except ExclusiveLogError:  # deleted, for example; the next append raises the error
        return True
    return True


def _handed_over_to(tables: Tables, row: _core.TopicRow) -> str | None:
    """The engine to which a topic or shared producer was last handed over; None if it has had
    another owner."""
    owner = owner_of(tables, row)
    if owner is not None:
        return owner.engine if owner.lineage != owner.id else None
    transfer = tables.transfers.get(row.id)
    if transfer is not None:
        return transfer.target
    return next((h.engine for h in tables.sessions.holders(row.id) if h.lineage != h.id), "")
