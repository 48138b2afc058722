"""One open engine on a cluster: its topics, sessions and threads; see `exclusivelog.backend`.

Threads: one for each topic that is used, which follows its log; `exclusivelog-commit`, which hands
messages to the writers and calls back; `exclusivelog-worker`, which gives waiters their turn and
releases what was dropped. The last two begin with the first producer.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from exclusivelog import _core, threads
from exclusivelog.backend import ProducerRequest, ProducerSession, SessionOptions
from exclusivelog.cluster.catalog import ClusterCatalog, ClusterTopic
from exclusivelog.cluster.cursor import ClusterCursor
from exclusivelog.cluster.following import Owning, TopicLog
from exclusivelog.cluster.history import history
from exclusivelog.cluster.kinds import TOPIC as KINDS
from exclusivelog.cluster.kinds import Kinds
from exclusivelog.cluster.place import Place
from exclusivelog.cluster.refused import Refusing, refusal
from exclusivelog.cluster.requests import Requests
from exclusivelog.cluster.session import ClusterSession, Registration
from exclusivelog.errors import EngineClosedError, ExclusiveLogError, LedgerError
from exclusivelog.events import Event
from exclusivelog.messages import Item
from exclusivelog.types import AccessMode, EngineInfo
from exclusivelog.waits import AnyFuture

__all__ = ["ClusterEngine"]

log = logging.getLogger("exclusivelog")

CLOSE_SECONDS = 30.0  # for what is queued to be in the log, and again for the releases
IDLE_SECONDS = 60.0  # the worker is woken for whatever there is to do
BELL = 0

_engines: weakref.WeakSet[ClusterEngine] = weakref.WeakSet()


class Ledger:
    """Where an engine reads and writes: what its readers, producers and transactions compare."""

    def __init__(self, path: str) -> None:
        self.path = path


class ClusterEngine:
    """One open engine; see `exclusivelog.backend.EngineBackend`."""

    capabilities = frozenset({"history", "shared_state"})
    latest_needs_log = True  # another machine may own the topic by now

    def __init__(
        self, place: Place, name: str, properties: Mapping[str, str], readonly: bool
    ) -> None:
        self.place = place
        self.name, self.path, self.readonly = name, place.url, readonly
        self.id = secrets.token_hex(8)
        self.info = EngineInfo(self.id, name, os.getpid(), dict(properties), 0.0)
        self.ledger = Ledger(self.path)
        self.closed = self.forked = False
        self.commit_queue = _core.CommitQueue()
        self.pending = Requests(self)
        self.kinds = Kinds(lambda: place.open(KINDS))
        self._versions = itertools.count(1)
        self.ownership_version = 0
        self._locks = threading.Lock
        self._lock = threading.Lock()
        self._closing = threading.RLock()
        self._topics: dict[int, TopicLog] = {}
        self._numbers: dict[str, int] = {}
        self._owning: dict[int, Owning] = {}  # by session
        self._sessions: weakref.WeakSet[ClusterSession] = weakref.WeakSet()
        self._dropped: deque[Owning] = deque()
        self._words = _core.SharedWords(bytearray(8))
        self._commit_thread: threading.Thread | None = None
        self._worker: threading.Thread | None = None
        if not readonly:
            place.join(self.info)
        _engines.add(self)

    # ---- may it be used? -----------------------------------------------------------------

    def check_alone(self) -> None:
        """EngineClosedError in a forked child (rule C5)."""
        if self.forked:
            raise EngineClosedError(
                f"engine {self.name!r} on {self.path} was inherited through fork(); open one of "
                "your own in the child"
            )

    def check_open(self) -> None:
        """EngineClosedError unless this engine can be used here."""
        self.check_alone()
        if self.closed:
            raise EngineClosedError(f"engine {self.name!r} on {self.path} is closed")

    def check_writable(self) -> None:
        """An error unless this engine can be used here, and to write."""
        self.check_open()
        if self.readonly:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")

    def check_free(self) -> None:
        """A call never waits for its own thread."""

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock? None is held while anything is waited for."""
        return False

    @property
    def callbacks(self) -> Any:
        """Runs code of the application."""
        return self

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run application code in a thread of its own."""
        thread = threading.Thread(
            target=_logged, args=(function,), name="exclusivelog-callback", daemon=True
        )
        threads.start(self.path, thread)

    call_later = call_soon

    # ---- topics --------------------------------------------------------------------------

    def number_of(self, topic: str) -> int:
        """The id of a topic, for as long as this engine is open."""
        with self._lock:
            return self._numbers.setdefault(topic, len(self._numbers) + 1)

    def followed(self, topic: int) -> TopicLog:
        """The topic's log, followed from now on."""
        found = self._topics.get(topic)
        if found is not None:
            return found
        with self._lock:
            self.check_open()
            found = self._topics.get(topic)
            if found is None:
                name = next(name for name, number in self._numbers.items() if number == topic)
                found = self._topics[topic] = TopicLog(self, name, topic, self.place.open(name))
            return found

    def lives(self, engine: str) -> bool:
        """Does the engine of that id live?"""
        return engine == self.id or self.place.lives(engine)

    @property
    def catalog(self) -> ClusterCatalog:
        """What the place has."""
        return ClusterCatalog(self)

    def topic_store(self, topic: int) -> ClusterTopic:
        """The topic with this id."""
        return ClusterTopic(self, topic)

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's facts as they are now."""
        return ClusterTopic(self, topic).facts()

    def ownership_changed(self) -> None:
        """A grant or a release counts."""
        self.ownership_version = next(self._versions)  # unique, whichever thread is the last

    def events(self, topic: str | None, group: str | None) -> Iterator[Event]:
        """The changes of ownership of a topic, or of all topics one after the other."""
        if group is not None:
            raise refusal("claims")
        names = self.catalog.topics() if topic is None else [topic]
        for name in names:
            if not self.place.has(name):
                continue
            yield from history(self.followed(self.number_of(name)))

    # ---- readers -------------------------------------------------------------------------

    def open_cursor(
        self, topic: int, name: str, loads: _core.Deserializer | None, compacted: bool,
        skip_trimmed: bool,
    ) -> ClusterCursor:  # fmt: skip
        """A cursor on a topic."""
        if compacted:
            raise refusal("compaction")
        return ClusterCursor(self, self.followed(topic), loads, skip_trimmed)

    def join_group(self, group: str, topics: Mapping[str, int], generation: int | None) -> NoReturn:
        """It cannot be done."""
        raise refusal("reader_groups")

    def make_visible(self) -> None:
        """Readers see what counts."""

    # ---- producers -----------------------------------------------------------------------

    def open_producer(self, future: AnyFuture, request: ProducerRequest) -> None:
        """Register a producer, or queue it until it is promoted or its timeout has passed."""
        self.check_writable()
        if request.mode == AccessMode.SHARED:
            raise refusal("shared_producers")
        if request.announce is not None:
            raise refusal("announcements")
        if request.settle and request.mode == AccessMode.WAIT_FOR_EXCLUSIVE:
            raise refusal("settle")
        self._start()
        self.pending.open(self.followed(request.topic), future, request)
        self.wake()

    def open_producers(
        self, names: Sequence[str], request: ProducerRequest, options: SessionOptions
    ) -> Sequence[ProducerSession]:
        """It cannot be done."""
        raise refusal("many_producers")

    def open_session(
        self, topic: str, session: Registration, last_sequence: int, options: SessionOptions,
        keeper: object = None,
    ) -> ClusterSession:  # fmt: skip
        """What a producer sends by, now that its session was granted."""
        return ClusterSession(
            self, topic, session, self._owning[session.id], last_sequence, options
        )

    def keep(self, number: int, owning: Owning) -> None:
        """This session was granted."""
        self._owning[number] = owning

    def drop(self, number: int) -> None:
        """Nobody takes this session: release it."""
        owning = self._owning.pop(number, None)
        if owning is not None:
            self._dropped.append(owning)
            self.wake()

    def register(self, session: ClusterSession) -> None:
        """Closing the engine closes this session."""
        self._sessions.add(session)

    def unregister(self, session: ClusterSession) -> None:
        """It is closed."""
        self._sessions.discard(session)
        self._owning.pop(session.session.id, None)

    def finalizer(self, owning: Owning) -> _core.Finalizer:
        """What has the session released once its producers are dropped."""
        return _core.Finalizer(owning, self._dropped, self._words, BELL)

    # ---- threads -------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._commit_thread is None:
                self._commit_thread = self._run("exclusivelog-commit", self._commit_when_due)
            if self._worker is None:
                self._worker = self._run("exclusivelog-worker", self._work)

    def _run(self, name: str, step: Callable[[], bool]) -> threading.Thread:
        thread = threading.Thread(
            target=_core.keep_running, args=(step, _report), name=name, daemon=True
        )
        return threads.start(self.path, thread)

    def commit(self, owning: Owning) -> None:
        """Have what waits there handed on soon."""
        appender = owning.appender
        if appender is None:
            return
        if threading.current_thread() is self._commit_thread:
            owning.pump(patient=False)  # a callback waits for it
        else:
            self.commit_queue.put(appender, 0.0)

    def _commit_when_due(self) -> bool:
        if not self.commit_queue.sleep():
            return False
        self._commit_waiting()
        return True

    def _commit_waiting(self) -> None:
        with self.commit_queue as waiting:
            for appender in waiting:
                owning = self._owning.get(appender.session.id)
                if owning is not None:
                    owning.pump()
                else:
                    appender.take()
                    appender.settle([], EngineClosedError("its producer is closed"), True)
        _core.run_callbacks()

    def wake(self) -> None:
        """Have the worker look around."""
        self._words.add(BELL, 1)
        self._words.wake(BELL)

    look_at_waiters = wake

    def waits_here(self, number: int) -> bool:
        """Is this a waiter of this engine?"""
        return number in self.pending

    def _work(self) -> bool:
        seen = self._words.load(BELL)
        if self.closed:
            return False
        while self._dropped:
            self._release(self._dropped.popleft())
        self.pending.look()
        left = self.pending.seconds
        self._words.wait(BELL, seen, int((IDLE_SECONDS if left is None else left) * 1e9))
        return True

    def _release(self, owning: Owning) -> None:
        """Its producers are gone: send what they have left, and give the topic back."""
        appender = owning.appender
        waiting = None if appender is None else appender.newest()
        with contextlib.suppress(ExclusiveLogError):
            if waiting is not None:
                self.commit(owning)
                waiting.exception(CLOSE_SECONDS)
        with contextlib.suppress(ExclusiveLogError):
            owning.release(CLOSE_SECONDS)
        for number in [n for n, each in list(self._owning.items()) if each is owning]:
            self._owning.pop(number, None)

    # ---- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Send what waits, release topics, and end the threads. Closing twice does nothing."""
        if self.forked:
            return
        with self._closing:
            if self.closed:
                return
            try:
                self._finish_work()
            except ExclusiveLogError as error:
                log.warning("engine %s: closing: %s", self.name, error)
            finally:
                self._end()

    def _finish_work(self) -> None:
        error = EngineClosedError(f"engine {self.name!r} on {self.path} is closed")
        self.pending.fail_all(error)
        for session in list(self._sessions):
            session.end(error)  # what is queued is still sent, and nothing more
        owning = list(self._owning.values())
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in owning:
            waiting = None if each.appender is None else each.appender.newest()
            if waiting is not None:
                self.commit(each)
                with contextlib.suppress(ExclusiveLogError):
                    waiting.exception(max(0.0, deadline - time.monotonic()))
        for each in owning:
            with each.topic.changed:
                each.writer.release()
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in owning:
            with contextlib.suppress(ExclusiveLogError):
                each.release(max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        self.closed = True
        error = EngineClosedError(f"engine {self.name!r} on {self.path} was closed")
        self.wake()
        with self._lock:
            topics = list(self._topics.values())
        for topic in topics:
            topic.close()
        self.kinds.close()
        for each in list(self._owning.values()):
            if each.appender is not None:
                each.appender.settle([], error, True)
        self.commit_queue.stop()
        for thread in (self._commit_thread, self._worker):
            if thread is not None and thread is not threading.current_thread():
                thread.join(60)
        _core.run_callbacks()
        self.place.close()
        _engines.discard(self)

    def forget(self) -> None:
        """In a forked child: everything is the parent's (rule C5)."""
        self.forked = self.closed = True
        for topic in list(self._topics.values()):
            topic.forget()
        self.place.forget()

    # ---- what a cluster does not have ----------------------------------------------------

    role_store = Refusing("roles")
    claims = Refusing("claims")
    once = Refusing("once")
    inspection = Refusing("inspection")

    def commit_transaction(self, parts: Any) -> NoReturn:
        """It cannot be done."""
        raise refusal("transactions")

    def begin_move(self, *args: Any) -> NoReturn:
        """It cannot be done."""
        raise refusal("unload")

    def moves(
        self, topics: str | Iterable[str], to: str, timeout: float, groups: Iterable[str],
        producer: str | None,
    ) -> NoReturn:  # fmt: skip
        """It cannot be done."""
        raise refusal("unload")

    def cancel_moves(self, topics: str | Iterable[str]) -> NoReturn:
        """It cannot be done."""
        raise refusal("unload")

    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> NoReturn:
        """It cannot be done."""
        raise refusal("snapshots")

    def backup(self, path: str) -> NoReturn:
        """It cannot be done."""
        raise refusal("backup")


def _logged(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        log.exception("a callback of the application failed")


def _report(error: BaseException) -> None:
    log.error("a thread of a cluster engine was interrupted", exc_info=error)


def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


def _forget_all() -> None:
    for engine in list(_engines):
        engine.forget()
    _engines.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
