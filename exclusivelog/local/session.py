"""Sessions of producers, and the commit of their transactions.

A producer's session on an engine of this machine: paused, lost, handed over, followed, closed.

Producers refer to a session, and never the other way round: one that is not referred to any more
is released by its finalizer. Several producers may share one: those that followed a topic to it.

Committing messages to several topics, reader cursors and announcements in one transaction.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Protocol

from exclusivelog import _core, threads
from exclusivelog.backend import (
    ProducerRequest,
    ProducerSession,
    SessionListener,
    SessionOptions,
    SessionPaused,
    State,
    TransactionParts,
    Who,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    ProducerBusyError,
    ProducerFencedError,
    ProducerMovedError,
    TopicNotFoundError,
)
from exclusivelog.local.log.entries import Placed, Work, append_one
from exclusivelog.local.log.sending import Committer, LocalSending
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.ownership.steps import put_announcement, topic_moved_error
from exclusivelog.local.records import EXCLUSIVE, SHARED, Session, Transfer
from exclusivelog.local.registry import Registry
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables, check_may_write, owner_of
from exclusivelog.waits import AnyFuture, GrantFuture, Requests, in_slices, settled

# ---- a session -------------------------------------------------------------------------


FOLLOWED_WITHIN = 5.0  # seconds, by a producer whose topic was handed over


class Releasing(Protocol):
    """The background worker of an engine."""

    def finalizer(self, session: Session) -> _core.Finalizer:
        """What has the session released once its producers are dropped."""

    def release(self, session: Session) -> None:
        """Release one session now."""


class Calling(Protocol):
    """Runs code where it can block no thread of the library."""

    def call_later(self, function: Callable[[], object]) -> None:
        """Run a function in a thread of its own."""


class Host(Protocol):
    """The engine of a session."""

    ledger: Ledger
    committer: Committer
    sessions: Sessions
    registry: Registry
    unflushed: bool
    closed: bool
    forked: bool

    @property
    def worker(self) -> Releasing:
        """Its background worker."""

    @property
    def callbacks(self) -> Calling:
        """Runs code of the application."""

    @property
    def pending(self) -> Requests:
        """Where requests wait."""

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock?"""

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def check_alone(self) -> None:
        """EngineClosedError in a forked child."""

    def check_free(self) -> None:
        """LedgerError where this thread would wait for itself."""

    def open_producer(self, future: AnyFuture, request: ProducerRequest) -> None:
        """Register a producer, or queue it."""

    def engine_here(self, engine: str) -> Host | None:
        """The engine of that id, if it is in this process and open."""


# The producers of a session, which keeps none of them. There are few; a WeakSet would take a
# kilobyte for each session.
References = tuple["weakref.ref[SessionListener]", ...]


def _living(references: References) -> list[SessionListener]:
    found = (reference() for reference in references)
    return [listener for listener in found if listener is not None]


def _without(references: References, listener: SessionListener) -> References:
    return tuple(r for r in references if r() is not None and r() is not listener)


class LocalSession:
    """One registration of a producer. Threads, and several producers, may share it.

    `keeper`: what releases the session instead, such as a role.
    """

    # A process may have a hundred thousand.
    __slots__ = (
        "__dict__", "__weakref__", "_announced", "_finalizer", "_follow_lock", "_following",
        "_is_closed", "_keeper", "_lineage", "_listeners", "_lock", "_lost", "_next", "_options",
        "_owner", "_pauses", "_resumed", "engine", "moved", "sending", "session", "topic",
    )  # fmt: skip

    def __init__(
        self, engine: Host, topic: str, session: Session, last_sequence: int,
        options: SessionOptions, keeper: object = None,
    ) -> None:  # fmt: skip
        self.engine, self.session = engine, session
        self.moved: ProducerMovedError | None = None
        self.topic, self._options, self._keeper = topic, options, keeper
        self._lineage = 0  # of the hand-over, once there was one
        self._announced = session.announce
        self._lost: ExclusiveLogError | None = None
        self._is_closed = False
        self._pauses = 0
        self._resumed: threading.Event | None = None  # while it is paused
        # What its producers go on with, and whether it was opened for them.
        self._next: tuple[LocalSession, bool] | None = None
        self._following: Future[None] | None = None
        self._lock = _core.Lock()
        self._follow_lock: threading.Lock | None = None  # once there is something to follow
        self._listeners: References = ()
        self._owner: Callable[[], SessionListener | None] = _no_owner
        self._finalizer = engine.worker.finalizer(session)
        if keeper is not None:
            self._finalizer.let_go()
        self.sending = LocalSending(
            engine.ledger, engine.committer, self._connect(last_sequence), topic, options
        )
        engine.ledger.checkpointer.start()
        engine.committer.start()
        engine.registry.register(self)

    def _connect(self, last_sequence: int) -> _core.Appender:
        session, ledger, options = self.session, self.engine.ledger, self._options
        appender = _core.Appender(
            session.name.encode(), last_sequence, options.max_batch_messages,
            options.max_batch_bytes, session, self.engine.committer.commit_queue, options.linger,
            self._finalizer,
        )  # fmt: skip
        assert ledger.journal is not None
        appender.connect(
            ledger.journal, ledger.lockfile.atomics, ledger.lockfile.counters.place(session.topic),
            session.topic, session.epoch, session.id, session.exclusive,
            not self.engine.unflushed,
        )  # fmt: skip
        return appender

    # ---- state -----------------------------------------------------------------------------

    @property
    def appender(self) -> _core.Appender:
        """What it appends by."""
        return self.sending.appender

    @property
    def closed(self) -> bool:
        """Is it, or its engine, closed?"""
        return self._is_closed or self.engine.closed

    @property
    def usable(self) -> bool:
        """True unless it is known to be closed, fenced or moved."""
        return self._lost is None and self.moved is None and not self._is_closed

    def status(self) -> State:
        """What has become of it, as the ledger says; changes nothing."""
        self.engine.check_alone()
        if self.closed:
            return "closed"
        if self._lost is not None:
            return "moved" if isinstance(self._lost, ProducerMovedError) else "fenced"
        if self.moved is not None:
            return "open" if self.within_reach else "moved"
        with self.engine.ledger.read() as tables:
            row = tables.topics.get(self.session.topic)
            if self._may_write(tables, row):
                return "open"
            target = _handed_over_to(tables, row)
        if not self.usable:  # it was told meanwhile
            return self.status()
        if self._resumed is None or target is None:
            return "fenced"
        # The hand-over that has paused it is committed, and it is about to be told.
        reached = self._options.follow and self.engine.engine_here(target) is not None
        return "open" if reached else "moved"

    def _may_write(self, tables: Tables, row: _core.TopicRow) -> bool:
        try:
            check_may_write(tables, row, self.session)
        except ProducerFencedError:
            return False
        except ExclusiveLogError:  # deleted, say: the next append tells it
            return True
        return True

    def verify(self) -> None:
        """ProducerFencedError unless it may append still, as the ledger says."""
        with self.engine.ledger.read() as tables:
            row = tables.topics.get(self.session.topic)
            if not self._may_write(tables, row):
                check_may_write(tables, row, self.session)

    def flush(self, timeout: float | None) -> None:
        """Wait until everything that was accepted has its outcome."""
        if isinstance(self.appender.error, ProducerMovedError):
            raise self.appender.error
        if not self.sending.flush(timeout):
            self.verify()

    def has_announced(self, info: dict[str, str]) -> None:
        """It is committed; the session that goes on after a hand-over says the same."""
        self._announced = info

    # ---- producers -------------------------------------------------------------------------

    def subscribe(self, listener: SessionListener, owner: bool) -> None:
        """Tell this producer what becomes of the session; the `owner` closes it."""
        with self._lock:
            others = _without(self._listeners, listener)
            self._listeners = (*others, weakref.ref(listener))
            if owner:
                self._owner = weakref.ref(listener)
            lost, closed = self._lost, self.closed
        if lost is not None:
            listener.lost(lost)
        elif closed:
            listener.ended()

    def tell_wanted(self) -> None:
        """Another producer waits for the topic: tell the owner, or if it was dropped, those that
        still send by the session."""
        if self.usable:
            owner = self._owner()
            for listener in _living(self._listeners) if owner is None else [owner]:
                listener.wanted()

    @property
    def lost(self) -> ExclusiveLogError | None:
        """The error of a session that has ended for good."""
        return self._lost

    def lose(self, error: ExclusiveLogError) -> None:
        """The topic is lost for good: fail what waits, and tell the producers."""
        with self._lock:
            if self._lost is not None or self._is_closed:
                return
            self._tell_where(error)
            # The same error in every call, whichever thread notices it first (rule B4).
            self._lost = error = self.appender.close_with(error)
            self._let_appends_go_on()
            listeners = _living(self._listeners)
        self.engine.committer.fail(self.appender, error)
        for listener in listeners:
            listener.lost(error)

    def _tell_where(self, error: ExclusiveLogError) -> None:
        """Say it if this process took the topic from itself: by a second producer, for example."""
        holder = error.holder
        if type(error) is not ProducerFencedError or holder is None:
            return
        is_next = holder.epoch == self.session.epoch + 1  # else another one may have been between
        if is_next and self.engine.engine_here(holder.engine_id) is not None:
            error.args = (f"{error}. It was fenced by this process, engine {holder.engine_name!r}",)

    def end(self, error: EngineClosedError) -> None:
        """The engine is closing: accept nothing more. What is queued is still committed."""
        self.appender.close_with(error)
        self._tell_ended()

    def _tell_ended(self) -> None:
        with self._lock:
            listeners = _living(self._listeners)
        for listener in listeners:
            listener.ended()

    def refused(self, error: ProducerFencedError) -> ExclusiveLogError:
        """What a caller is told whose append met this error."""
        if self._is_closed:
            return self._closed_error()  # by another thread, meanwhile
        if self._resumed is not None:
            return SessionPaused(str(error))  # it came just behind the hand-over
        if self.moved is not None:
            return self.moved
        self.lose(error)
        return self._lost or error

    # ---- pause -----------------------------------------------------------------------------

    def pause(self) -> None:
        """Let appends wait until as many calls of `resume`; what was accepted is still sent."""
        with self._lock:
            self._pauses += 1
            if self._resumed is None and self.usable:
                self._resumed = threading.Event()
                self.appender.pause(SessionPaused(f"topic {self.topic!r} is being handed over"))

    def pause_for_transaction(self) -> bool:
        """Let appends wait; False if they wait already, or the topic was handed over."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._is_closed:
                raise self._closed_error()
            if self._pauses or self.moved is not None:
                return False
            self.pause()
            return True

    def drain(self) -> None:
        """Commit what was accepted so far."""
        self.sending.drain()

    def resume(self) -> None:
        """Let appends go on, or learn where the topic is."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses:
                self.appender.resume()
                self._let_appends_go_on()

    def _let_appends_go_on(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.set()

    def await_resumed(self, timeout: float | None) -> bool:
        """Wait until it is not paused; False after `timeout` seconds."""
        self.engine.check_free()
        resumed = self._resumed
        return resumed is None or in_slices(resumed.wait, timeout, self.engine.check_alone)

    # ---- hand-over -------------------------------------------------------------------------

    def hand_off(self, to: Transfer) -> None:
        """The topic was handed over. Where its new owner is in this process, the producers may go
        on there (rule E2); else this is their end."""
        error = topic_moved_error(self.topic, self.session.name, to)
        if not self._options.follow or self.engine.engine_here(to.target) is None:
            self.lose(error)
            return
        with self._lock:
            if self._lost is None and not self._is_closed:
                self._lineage, self.moved = to.lineage, error
                self.appender.close_with(error)
                self.engine.registry.note_hand_over(self)

    @property
    def within_reach(self) -> bool:
        """Is the topic with an engine of this process since it was handed over?"""
        where = self.engine.sessions.locate(self.session.topic, self._lineage)
        return where is not None and self.engine.engine_here(where[0]) is not None

    def end_unless_within_reach(self) -> None:
        """End it if its topic was handed over and another owner has had it since: then no producer
        can follow it any more."""
        moved = self.moved
        if moved is not None and self._lost is None and not self.within_reach:
            self.lose(moved)

    def follow(self, timeout: float | None) -> bool:
        """Give the producers the session that has the topic now, or end this one; False after
        `timeout` seconds."""
        # In a thread of its own: an interrupt of this one must not drop what was granted, nor come
        # between two producers (rules B9, E2).
        self.engine.check_alone()
        self.engine.check_free()
        with self._lock:
            self._follow_lock = self._follow_lock or threading.Lock()
            following = self._following
            if following is None or following.done():
                following = Future()
                follow = threading.Thread(
                    target=self._follow, args=(following,), name="exclusivelog-follow", daemon=True
                )
                threads.start(self.engine.ledger.path, follow)
                self._following = following
        if not in_slices(functools.partial(settled, following), timeout, self.engine.check_alone):
            return False
        self._following = None  # it would keep the error, and with its frames this session
        following.result(0)
        return True

    def _follow(self, outcome: Future[None]) -> None:
        assert self._follow_lock is not None
        try:
            with self._follow_lock:
                if self._next is None and self._lost is None and not self._is_closed:
                    self.engine.check_open()
                    self._find_next()
                if self._next is not None:
                    self._hand_on(*self._next)
        except BaseException as error:
            outcome.set_exception(error)
            del outcome  # the error's frames refer to it
        else:
            outcome.set_result(None)

    def _find_next(self) -> None:
        end = time.monotonic() + FOLLOWED_WITHIN
        while time.monotonic() < end:
            where = self.engine.sessions.locate(self.session.topic, self._lineage)
            there = None if where is None else self.engine.engine_here(where[0])
            if where is None or there is None:
                break
            # Its engine may not have come to making the session of a grant yet.
            found = there.registry.find_session(where[1]) if where[1] else self._open_on(there)
            if isinstance(found, LocalSession):
                self._next = found, not where[1]
                return
            time.sleep(0.001)
        assert self.moved is not None
        self.lose(self.moved)

    def _open_on(self, engine: Host) -> LocalSession | None:
        session = self.session
        request = ProducerRequest(
            session.topic, EXCLUSIVE if session.exclusive else SHARED, session.name,
            session.priority, properties=session.properties, announce=self._announced,
            notify_on_contention=session.notify_on_contention, lineage=self._lineage,
        )  # fmt: skip
        future = SessionFuture(engine, self.topic, session.topic, self._options)
        try:
            engine.open_producer(future, request)
            return future.result()
        except (ProducerFencedError, ProducerBusyError):  # another producer was faster
            return None
        except (EngineClosedError, TopicNotFoundError):  # neither engine nor topic wait for us
            return None

    def _hand_on(self, found: LocalSession, opened: bool) -> None:
        """Give the producers their next session; called again, it goes on where it failed."""
        assert self.moved is not None
        self.engine.registry.unregister(self)
        self._finalizer.let_go()
        for listener in _living(self._listeners):
            found.subscribe(listener, owner=opened and listener is self._owner())
            listener.moved_to(found, self.moved)
            with self._lock:  # another producer may come or leave meanwhile
                self._listeners = _without(self._listeners, listener)
        if opened and not found.has_listeners:  # they were all closed meanwhile
            found.close()

    @property
    def has_listeners(self) -> bool:
        """Does any producer send by it?"""
        return bool(_living(self._listeners))

    # ---- end -------------------------------------------------------------------------------

    def leave(self, listener: SessionListener) -> ExclusiveLogError | None:
        """This producer is closed: commit what was accepted. The owner, and the last one, release
        the session. Returns what the last of the accepted messages failed with."""
        if self.engine.forked:
            return None
        if self.engine.busy_here:
            self.engine.callbacks.call_later(functools.partial(self.leave, listener))
            return None
        with self._lock:
            self._listeners = _without(self._listeners, listener)
            is_guest = self.has_listeners and self._owner() is not listener
        return self._drain() if is_guest else self.close()

    def close(self) -> ExclusiveLogError | None:
        """Drain and release the session; what the last of the accepted messages failed with."""
        failure = None
        with self._lock:
            if self._is_closed:
                return None
            self._is_closed = True
            if self.moved is None:
                self.appender.close_with(self._closed_error())  # what is queued is still sent
                self._let_appends_go_on()
        try:
            failure = self._drain()
            releases = self.moved is None and self._lost is None and not self.engine.closed
            if releases and self._keeper is None:
                self.engine.worker.release(self.session)
            self._finalizer.let_go()
        except BaseException:
            # Interrupted, or the disk is full: a closed producer must not stay an owner.
            self._finalizer.pull()
            raise
        try:
            self.engine.committer.fail(self.appender, self._closed_error())
        finally:
            self.engine.registry.unregister(self)
            self._tell_ended()
        return failure

    def _drain(self) -> ExclusiveLogError | None:
        """Commit what was accepted; what the last of it failed with, unless it was fenced."""
        if self.moved is not None or self._lost is not None or self.engine.closed:
            return None
        waiting = self.appender.newest()
        if waiting is None:
            return None
        self.engine.committer.commit(self.appender, waiting)
        error = waiting.exception()
        failed = isinstance(error, ExclusiveLogError)
        return error if failed and not isinstance(error, ProducerFencedError) else None

    def abandon(self) -> None:
        """Nobody has this session, as after an interrupt: its engine releases it."""
        self._finalizer.pull()

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(
            f"producer {self.session.name!r} of topic {self.topic!r} is closed"
        )


class SessionFuture(GrantFuture[LocalSession]):
    """The session that goes on after a hand-over."""

    _engine: Any

    def __init__(self, engine: Host, name: str, topic: int, options: SessionOptions) -> None:
        super().__init__(engine, topic)
        self._name, self._options = name, options

    def make(self, session: Session, last_sequence: int) -> LocalSession:
        """The session that was granted."""
        return LocalSession(self._engine, self._name, session, last_sequence, self._options)


def _no_owner() -> None:
    """Stands for a reference to an owner, where there is none."""


def _handed_over_to(tables: Tables, row: _core.TopicRow) -> str | None:
    """The engine that a topic, or a shared producer, was handed over to last; None if another
    owner came instead."""
    owner = owner_of(tables, row)
    if owner is not None:
        return owner.engine if owner.lineage != owner.id else None
    transfer = tables.transfers.get(row.id)
    if transfer is not None:
        return transfer.target
    return next((h.engine for h in tables.sessions.holders(row.id) if h.lineage != h.id), "")


# ---- the commit of a transaction -------------------------------------------------------


def commit(ledger: Ledger, parts: TransactionParts[Who]) -> dict[Who, range]:
    """Commit all parts, or none; {producer: offsets}. A topic that was handed over within this
    process is followed."""
    while True:
        here = {producer: producer.here(producer in parts.numbered) for producer in parts.puts}
        attempt = Attempt(ledger, parts, here)
        try:
            offsets = attempt.commit()
        except _Refused as refused:
            # Only now: while it was paused, its topic seemed to be handed over.
            error = refused.session.refused(refused.error)
            if not isinstance(error, SessionPaused):
                raise error from None
        else:
            if offsets is not None:
                return offsets


class _Refused(Exception):
    """A session that was fenced, and the error that says so."""

    def __init__(self, session: ProducerSession, error: ProducerFencedError) -> None:
        super().__init__(str(error))
        self.session, self.error = session, error


class Attempt(Generic[Who]):
    """One attempt to commit. `here`: the session that appends for each of the producers that
    messages were given to, or that are required."""

    def __init__(
        self, ledger: Ledger, parts: TransactionParts[Who], here: Mapping[Who, ProducerSession]
    ) -> None:
        self._ledger, self._parts, self._here = ledger, parts, here
        self._sessions = list(dict.fromkeys(here.values()))
        self._works: dict[ProducerSession, Work] = {}
        self._placed: dict[ProducerSession, Placed] = {}
        self._counts: dict[Who, int] = {}

    def commit(self) -> dict[Who, range] | None:
        """{producer: offsets}; None, and nothing is written, where a session is paused."""
        with self._ledger.pause_lock, contextlib.ExitStack() as paused:
            for session in self._sessions:
                if not session.pause_for_transaction():
                    return None
                paused.callback(session.resume)
                session.sending.drain()
            self._encode()
            self.write()
            for producer, info in self._parts.announced.items():
                self._here[producer].has_announced(info)
            return self._acknowledge()

    def _encode(self) -> None:
        """The sessions are paused: now it is known which sequence ids are next."""
        appenders = {session: session.sending.private_appender() for session in self._sessions}
        for producer, session in self._here.items():
            appender = appenders[session]
            before = appender.pending_messages
            for put in self._parts.puts[producer]:
                put(appender)
            self._counts[producer] = appender.pending_messages - before
        self._works = {
            session: Work(appender, appender.take()) for session, appender in appenders.items()
        }

    def write(self) -> None:
        """Check and write all of it in one transaction of the tables."""
        parts = self._parts
        with self._ledger.write_checkpointed() as tables:
            for claim in parts.claims:
                claim.check_in(tables)
            for session, work in self._works.items():
                try:
                    self._placed[session] = append_one(tables, work)
                except ProducerFencedError as error:
                    raise _Refused(session, error) from error
            for cursor, positions in parts.cursors.values():
                cursor.write(tables, positions)
            for producer, info in parts.announced.items():
                put_announcement(tables, self._here[producer].session, info)
            parts.written = True

    def _acknowledge(self) -> dict[Who, range]:
        """It is committed: each session continues behind it."""
        ends = {}
        for session, places in self._placed.items():
            if not places:
                continue  # it is only required, or only announces
            session.sending.appender.advance(places[-1][0].last_sequence)
            ends[session] = places[0][1]
        offsets = {}
        for producer, session in self._here.items():
            if session not in ends or not self._counts[producer]:
                continue
            first, ends[session] = ends[session], ends[session] + self._counts[producer]
            offsets[producer] = range(first, ends[session])
        return offsets
