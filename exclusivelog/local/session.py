"""Sessions of producers on the log of one machine: their state in the tables, their pauses, and
their hand-overs. `exclusivelog.sessions` has the rest of their life."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.backend import SessionOptions, State
from exclusivelog.errors import (
    ExclusiveLogError,
    ProducerFencedError,
    TopicTerminatedError,
)
from exclusivelog.local.followers import Following
from exclusivelog.local.log.appending import LocalSending, Pauses
from exclusivelog.local.ownership.steps import topic_moved_error
from exclusivelog.local.records import Session, Transfer
from exclusivelog.local.storage.tables import Tables, check_may_write, owner_of
from exclusivelog.sessions import SessionLife

if TYPE_CHECKING:
    from exclusivelog.local.ownership.registry import Registry
    from exclusivelog.local.runtime import Runtime


class LocalSession(LocalSending, SessionLife):
    """One registration of a producer. `keeper`: what releases the session instead, such as a role.

    Its parts have the rest: `pauses` lets appends wait, and `Following` gives its producers another
    session after a hand-over."""

    __slots__ = ("_keeper", "_pauses")

    engine: Runtime
    session: Session
    _following: Following | None

    def __init__(
        self,
        engine: Runtime,
        topic: str,
        session: Session,
        last_sequence: int,
        options: SessionOptions,
        keeper: object = None,
    ) -> None:
        super().__init__(engine, topic, session, options)
        self._keeper = keeper
        self._pauses: Pauses | None = None
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

    def status(self) -> State:
        """Its state according to the ledger; changes nothing."""
        self.engine.check_not_forked()
        known = self.known_state
        if known is not None:
            return known
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
        return self.state_at(target)

    def verify(self) -> None:
        """ProducerFencedError or TopicTerminatedError unless the ledger still admits its
        appends."""
        with self.engine.ledger.read() as tables:
            row = tables.topics.get(self.session.topic)
            if not _may_write(tables, row, self.session):
                check_may_write(tables, row, self.session)

    # ---- pause -----------------------------------------------------------------------------

    def ready_for_transaction(self) -> bool:
        """False if its appends wait, or the topic was handed over; raises if it has ended."""
        with self.engine.registry.lock:
            if self._lost is not None:
                raise self._lost.with_traceback(None)
            if self._is_closed:
                raise self.closed_error()
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
                self._following = Following(self.engine, self.session.topic, to, error)
                self.moved = error
                self.appender.close_with(error)
                self.engine.registry.note_hand_over(self)

    def begin_to_follow(self) -> None:
        """Let its producers follow its topic soon, although they do not send."""
        if self._following is not None and not self.over:
            self._following.begin(self)

    def follows_in(self) -> float:
        """The seconds until that is due; negative if it is overdue."""
        following = self._following
        return math.inf if following is None or self.over else following.due_in()

    # ---- what its life needs ---------------------------------------------------------------

    @property
    def _sessions(self) -> Registry:
        return self.engine.registry

    @property
    def _is_paused(self) -> bool:
        return bool(self.pauses)

    def _end_pauses(self) -> None:
        self.pauses.stop()

    def _commit(self, last: _core.Receipt) -> None:
        self.engine.committer.commit(self.appender, last)

    def _release(self) -> None:
        if self._keeper is None:
            self.engine.worker.release(self.session)

    def _fail_queued(self, error: ExclusiveLogError) -> None:
        self.engine.committer.fail(self.appender, error)


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
