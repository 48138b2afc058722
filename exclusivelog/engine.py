"""The engine: one open handle on a ledger, and the broker of its producers and readers."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import heapq
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeVar

from exclusivelog import _core
from exclusivelog.access import Session
from exclusivelog.commit import Committer
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerError,
    ProducerFencedError,
    WaitTimeoutError,
)
from exclusivelog.ledger import DEFAULT_MAP_SIZE, DEFAULT_MAX_READERS, Ledger
from exclusivelog.lockfile import Slot
from exclusivelog.log import verify
from exclusivelog.ownership import Claim, Claims, own
from exclusivelog.producer import Options, Producer, check_seconds, encode_properties
from exclusivelog.reader import Reader
from exclusivelog.sessions import FENCED, GRANTED, Sessions
from exclusivelog.tables import Tables
from exclusivelog.topic import (
    Topic,
    check_name,
    create_topic,
    delete_topic,
    empty_trash,
    list_topics,
)
from exclusivelog.types import EngineInfo, OwnerInfo, Report

log = logging.getLogger("exclusivelog")

LONGEST_BEAT_SECONDS = 5.0
LONGEST_NAP_SECONDS = 5.0
RELEASED_AT_ONCE = 1000
SETTLING_SECONDS = 5.0
RETRY_SECONDS = 0.25  # after a round that failed

Found = TypeVar("Found")

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class ProducerFuture(concurrent.futures.Future[Producer]):
    """A producer that may have to wait for its turn. `cancel()` leaves no trace (rule D5)."""

    def __init__(self, engine: Engine, topic: Topic, options: Options) -> None:
        super().__init__()
        self.has_callbacks = False
        self.topic = topic
        self.options = options
        self.session: Session | None = None
        self.producer: Producer | None = None
        self._engine = engine

    def cancel(self) -> bool:
        """Leave the queue. False if it is too late: the future has its producer, or its
        error, at once then."""
        if self.session is None or self.done():
            return self.cancelled()
        if not self._engine.withdraw(self.session):
            if self._engine.settles(self.session):  # another thread is about to
                concurrent.futures.wait([self], SETTLING_SECONDS)
            return self.cancelled()
        cancelled = super().cancel()
        if cancelled:  # else concurrent.futures.wait does not see it
            self.set_running_or_notify_cancel()
        return cancelled

    def result(self, timeout: float | None = None) -> Producer:
        """The producer; waits for it, up to `timeout` seconds (None: for ever)."""
        self._check_fork()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What it failed with, or None; waits as `result` does."""
        self._check_fork()
        return super().exception(timeout)

    def _check_fork(self) -> None:
        if self._engine.forked and not self.done():
            self._engine.check_open()  # who would settle it is the parent's thread

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call `function(future)` once it is settled, in a thread of its own."""
        self.has_callbacks = True
        super().add_done_callback(function)


def _hand_over(future: ProducerFuture) -> None:
    # The future's result keeps the producer; the future itself must not, should nobody want it.
    producer, future.producer = future.producer, None
    if producer is not None:
        future.set_result(producer)


class Engine:
    """One open handle on a ledger directory. Made by `exclusivelog.open`; threads may share it.

    Closing it sends what waits, gives its topics back, and ends its threads. Engines that
    are still open when the interpreter exits are closed then.

    >>> with xl.open(path, name="worker-1") as engine:
    ...     with engine.topic("orders").producer() as producer:
    ...         producer.send(b"hello")
    0
    """

    def __init__(
        self, ledger: Ledger, name: str, properties: Mapping[str, str], keepalive: float | None,
        readonly: bool, unflushed: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.path = ledger.path
        self.ledger = ledger
        self.sessions = Sessions(ledger)
        self.committer = Committer(ledger)
        self._claims = Claims(ledger)
        self._owned: weakref.WeakSet[Claim] = weakref.WeakSet()
        self.closed = False
        self.forked = False
        self.unflushed = unflushed  # acknowledged before it is flushed (rule H1)
        self._readonly = readonly
        self._keepalive = keepalive
        self._closing = threading.RLock()
        self._closed_for_good = False
        self._producers: weakref.WeakValueDictionary[int, Producer] = weakref.WeakValueDictionary()
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._pending: dict[int, ProducerFuture] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._abandoned: deque[Session] = deque()
        self._orphans_wanted = False
        self._mailing: Any = threading.RLock()
        self._undelivered: deque[Callable[[], None]] = deque()
        self._mail_read = 0
        self._settling: dict[int, ProducerFuture] = {}
        self._ended = threading.Event()
        self._slot: Slot | None = None
        self._guard: threading.Thread | None = None
        self.id = "0" * 16
        self.info = EngineInfo("0" * 16, name, os.getpid(), dict(properties), 0.0)
        try:
            if not readonly:
                self._join(properties)
            _engines.add(self)
        except BaseException:
            self._leave_at_once()
            raise

    def _join(self, properties: Mapping[str, str]) -> None:
        with self.ledger.lockfile.opening():
            self._slot = self.ledger.lockfile.join(self.name, properties, self._keepalive)
        self.id = self._slot.engine
        self.info = EngineInfo(self.id, self.name, os.getpid(), dict(properties), 0.0)
        if self._keepalive is not None:
            threading.Thread(
                target=self._keep_beating, args=(self._slot, self._keepalive),
                name=f"exclusivelog-heart-{self.name}", daemon=True,
            ).start()  # fmt: skip
        self._empty_trash()
        self._guard = threading.Thread(
            target=self._keep_watch, name=f"exclusivelog-{self.name}", daemon=True
        )
        self._guard.start()

    def _leave_at_once(self) -> None:
        self.closed = True
        self._ended.set()
        if self._slot is not None:
            self._ring_myself()
            self._slot.leave()

    # ---- state ---------------------------------------------------------------------------

    def check_open(self) -> None:
        """EngineClosedError unless this engine can be used here (rule C5)."""
        if self.forked:
            raise EngineClosedError(
                f"engine {self.name!r} on {self.path} was inherited through fork(); open one of "
                "your own in the child"
            )
        if self.closed:
            raise EngineClosedError(f"engine {self.name!r} on {self.path} is closed")

    @property
    def busy_here(self) -> bool:
        """Is this thread in the middle of something? Code that Python runs in between, a
        signal handler or a finalizer, may find it so, and must not wait for it."""
        return bool(self._mailing._is_owned()) or self.committer.busy_here

    # ---- topics --------------------------------------------------------------------------

    def topic(self, name: str, create: bool = True) -> Topic:
        """The topic of that name, made if there is none.

        - `name`: 1 to 255 bytes of UTF-8 without control characters; "__" in front is kept
          for the library.
        - `create`: False raises TopicNotFoundError where there is none.

        >>> engine.topic("orders").next_offset
        0
        """
        self.check_open()
        return Topic(self, *create_topic(self.ledger, name, create and not self._readonly))

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        self.check_open()
        return list_topics(self.ledger)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and its messages (rule G8). Its epoch goes on, should a topic of that
        name be made again (rule B1).

        Raises TopicNotFoundError, and ProducerBusyError while somebody holds or awaits it.
        """
        self.check_open()
        delete_topic(self.ledger, self.sessions, name)

    def look(self, find: Callable[[Tables], Found]) -> Found:
        """What `find` finds in all that this engine's readers may see (rule G6)."""
        return self.ledger.look(find, self.unflushed)

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now."""
        return self.look(lambda tables: tables.latest(topic))

    # ---- producers -----------------------------------------------------------------------

    def future(self, topic: Topic, options: Options) -> ProducerFuture:
        """A future for `open_producer` to settle."""
        return ProducerFuture(self, topic, options)

    def open_producer(
        self, future: ProducerFuture, mode: str, *, name: str | None, priority: int,
        claim: int | None, timeout: float | None, properties: dict[str, str],
    ) -> None:  # fmt: skip
        """Register a producer, or queue it until it is promoted or `timeout` has passed."""
        self.check_open()
        if self._slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; it takes no producers")
        created = _core.now()
        try:
            with self._mailing:  # no mail about a session may be read before it is known here
                self.check_open()
                registration = self.sessions.request(
                    future.topic.id, self.info, self._slot.index, mode, name=name,
                    priority=priority, claim=claim, created=created, properties=properties,
                )  # fmt: skip
                future.session = registration.session
                if registration.queued:
                    self._queue(future, timeout)
                else:
                    self._hand_out(future, registration.session, registration.last_sequence)
        except ExclusiveLogError as error:
            future.set_exception(error)
        except BaseException:
            # An interrupt may come after the commit: the guard looks for what nobody got.
            if future.session is not None:
                self._pending.pop(future.session.id, None)
            self._orphans_wanted = True
            self._ring_myself()
            raise

    def _queue(self, future: ProducerFuture, timeout: float | None) -> None:
        assert future.session is not None
        self._pending[future.session.id] = future
        if timeout is not None:
            heapq.heappush(self._deadlines, (time.monotonic() + timeout, future.session.id))
        self._ring_myself()  # the guard must watch the other engines from now on

    def withdraw(self, session: Session) -> bool:
        """Take a waiting session out of the queue; False if it was granted or fenced first,
        which its future knows when this returns."""
        self.check_open()
        if self.sessions.cancel(session):
            self._pending.pop(session.id, None)
            return True
        self._read_mail()
        return False

    def settles(self, session: Session) -> bool:
        """Somebody has read this waiting session's mail, or will, and settles its future."""
        return session.id in self._pending or session.id in self._settling

    def adopt(self, producer: Producer) -> None:
        """Mail about this producer's session goes to it."""
        self._producers[producer.session.id] = producer

    def disown(self, producer: Producer) -> None:
        """The producer is closed."""
        self._producers.pop(producer.session.id, None)

    def release(self, session: Session) -> None:
        """Give one session back."""
        self.sessions.release([session], read=(self.id, self._mail_read))

    def leash(self, session: Session) -> _core.Leash:
        """What gives a session back once its producer is dropped: the collector may run
        anywhere, even inside a transaction, so the release is left to the guard."""
        assert self._slot is not None
        return _core.Leash(session, self._abandoned, self.ledger.lockfile.words, self._slot.bell)

    def call_later(self, function: Callable[[], object]) -> None:
        """Run application code where it can block nobody."""

        def run() -> None:
            try:
                function()
            except Exception:
                log.exception("a callback of engine %s failed", self.name)

        threading.Thread(target=run, name="exclusivelog-callback", daemon=True).start()

    def register_reader(self, reader: Reader) -> None:
        """Closing the engine wakes this reader."""
        self._readers.add(reader)

    # ---- claims --------------------------------------------------------------------------

    def own(
        self, group: str, resources: Mapping[str, int | None], timeout: float | None = None
    ) -> Claim:
        """Claim resources of a group, any strings, for this engine: all of them or none
        (rules F1-F5; Kafka's `own` call).

        - `group`, names of resources: 1 to 240 bytes of UTF-8. Groups never conflict.
        - `resources`: {name: generation}. None takes the generation after the last one (the
          first is 1); a number below the last one is refused; 0 always wins, and begins anew.
        - `timeout`: seconds to wait for an owner with a higher generation to go (None: no
          waiting).

        A live owner of any of them with an equal or lower generation loses all that it owns
        by that claim. A claim ends with its process, or when that hangs for longer than
        `keepalive`.

        Raises OwnershipError, which names the owner, if one has a higher generation.

        >>> first = engine.own("reports", {"march": None, "april": 7})
        >>> second = engine.own("reports", {"april": 7})
        >>> first.is_valid, second.generations
        (False, {'april': 7})
        """
        self.check_open()
        if self._slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; it takes no claims")
        claim = own(self, self._claims, self.info, self._slot.index, group, resources, timeout)
        self._owned.add(claim)
        return claim

    # ---- the guard: mail, deaths, timeouts -----------------------------------------------

    def _ring_myself(self) -> None:
        if self._slot is not None:
            self.ledger.lockfile.ring(self._slot.index)

    def _keep_watch(self) -> None:
        slot = self._slot
        assert slot is not None
        while not self.closed:
            # What changes after these two are read ends the sleep below at once.
            seen, arrivals = slot.mail_count(), slot.arrivals()
            try:
                self._do_rounds()
            except ExclusiveLogError as error:
                if self.closed:
                    return
                log.warning("engine %s: %s", self.name, error)
                self._fail_pending_if_broken(error)
            except Exception:  # the guard must not die: waiters depend on it
                log.exception("engine %s: its guard stumbled", self.name)
            if self.closed:
                return
            if self._pending:
                slot.await_mail_or_death(seen, arrivals, self._nap())
            else:
                slot.await_mail(seen, self._nap())

    def _empty_trash(self) -> None:
        # What a process left behind that died while it deleted a topic.
        try:
            empty_trash(self.ledger)
        except ExclusiveLogError as error:
            log.warning("engine %s: %s", self.name, error)

    def _keep_beating(self, slot: Slot, keepalive: float) -> None:
        # A thread of its own: the guard may have to wait for a ledger that somebody else has
        # stopped, and is not hung for that (rule C3).
        while not self._ended.wait(min(LONGEST_BEAT_SECONDS, keepalive / 4)):
            slot.beat()

    def _release_orphans(self) -> None:
        """Give back what was granted to a call that was interrupted before it could return."""
        if not self._orphans_wanted:
            return
        with self._mailing:
            self._orphans_wanted = False
            # In the order in which a session moves through them.
            known = set(self._pending) | set(self._settling) | set(self._producers.keys())
            with self.ledger.read() as tables:
                sessions = tables.sessions_of(self.id)
            for session in sessions:
                if session.id not in known:
                    self.release(session)

    def _do_rounds(self) -> None:
        failure: ExclusiveLogError | None = None
        for step in (
            self._release_abandoned, self._release_orphans, self._read_mail, self._end_waits,
            self.ledger.segments.forget_removed, self._bury_the_dead,
        ):  # fmt: skip
            try:
                step()
            except ExclusiveLogError as error:  # a full disk, say; the other steps may do
                failure = failure or error
        if failure is not None:
            raise failure

    def _release_abandoned(self) -> None:
        while self._abandoned:
            try:
                self.release(self._abandoned[0])
            except ExclusiveLogError:  # a full disk, say: it stays for later, behind the others
                self._abandoned.rotate(-1)
                raise
            self._abandoned.popleft()

    def _bury_the_dead(self) -> None:
        if self._pending:
            for engine in self.sessions.find_dead():
                log.info("engine %s is gone; taking its sessions away", engine)
                for _ in self.sessions.evict(engine):
                    self._read_mail()

    def _nap(self) -> float:
        longest = RETRY_SECONDS if self._undelivered else LONGEST_NAP_SECONDS
        if self._deadlines:
            left = self._deadlines[0][0] - time.monotonic()
            longest = min(longest, left if left > 0 else RETRY_SECONDS)
        return longest

    def _read_mail(self) -> None:
        with self._mailing:
            with self.ledger.read() as tables:
                mail = tables.mail(self.id, self._mail_read)
            for number, (kind, session, *details) in mail:
                if kind == GRANTED:
                    self._granted(session, *details)
                elif kind == FENCED:
                    self._fenced(session, *details)
                self._mail_read = number
        self._deliver()

    def _deliver(self) -> None:
        """Tell the application. What cannot be told now, for want of memory or threads, is
        told in one of the next rounds."""
        while self._undelivered:
            try:
                delivery = self._undelivered.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                delivery()
            except BaseException:
                self._undelivered.appendleft(delivery)
                raise

    def _granted(self, session_id: int, epoch: int, since: int, last_sequence: int) -> None:
        future = self._take_pending(session_id)
        if future is None or future.session is None:
            return
        session = replace(future.session, epoch=epoch, since=since)
        self._undelivered.append(lambda: self._hand_out(future, session, last_sequence))

    def _take_pending(self, session_id: int) -> ProducerFuture | None:
        # In one of the two at every moment: `cancel` must see that somebody settles it.
        future = self._pending.get(session_id)
        if future is not None:
            self._settling[session_id] = future
            self._pending.pop(session_id, None)
        return future

    def _hand_out(self, future: ProducerFuture, session: Session, last_sequence: int) -> None:
        if future.producer is None:  # else this is a second try
            future.producer = Producer(
                self, future.topic.name, session, last_sequence, future.options
            )
        self._settle(future, session.id, functools.partial(_hand_over, future))

    def _settle(
        self, future: ProducerFuture, session_id: int, settle: Callable[[], object]
    ) -> None:
        def unless_settled() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                settle()
            self._settling.pop(session_id, None)

        # Its callbacks are the application's: they must not hold up the guard.
        if future.has_callbacks:
            self.call_later(unless_settled)
        else:
            unless_settled()

    def _fenced(self, session_id: int, text: str) -> None:
        self._take_pending(session_id)
        self._undelivered.append(lambda: self._tell_fenced(session_id, text))

    def _tell_fenced(self, session_id: int, text: str) -> None:
        # Only now: the grant may have been in the same mail.
        future = self._settling.get(session_id)
        if future is not None and future.session is not None and future.producer is None:
            holder = self._owner_if_known(future.session.topic)
            error = ProducerFencedError(text, holder=holder)
            self._settle(future, session_id, functools.partial(future.set_exception, error))
        producer = self._producers.get(session_id)
        if producer is not None:
            holder = self._owner_if_known(producer.session.topic)
            producer.lose(ProducerFencedError(text, holder=holder))

    def _owner_if_known(self, topic: int) -> OwnerInfo | None:
        with contextlib.suppress(ExclusiveLogError):
            return self.sessions.owner(topic)
        return None

    def _end_waits(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            future = self._pending.get(self._deadlines[0][1])
            # If the ledger is full now, the next round tries again.
            if (
                future is not None
                and future.session is not None
                and self.sessions.cancel(future.session)
            ):
                self._take_pending(future.session.id)
                self._undelivered.append(functools.partial(self._tell_timed_out, future))
            heapq.heappop(self._deadlines)
        self._deliver()

    def _tell_timed_out(self, future: ProducerFuture) -> None:
        assert future.session is not None
        error = self.timed_out(future.session)
        settle = functools.partial(future.set_exception, error)
        self._settle(future, future.session.id, settle)

    def timed_out(self, session: Session) -> WaitTimeoutError:
        """What a producer's wait ends with: it says who is in the way (rule A5)."""
        owner = None
        with contextlib.suppress(ExclusiveLogError):
            owner = next(iter(self.sessions.holders(session.topic)), None)
        by = "" if owner is None else (
            f"; it is held by producer {owner.producer_name!r} of engine {owner.engine_name!r} "
            f"(id {owner.engine_id}, pid {owner.pid}, epoch {owner.epoch})"
        )  # fmt: skip
        return WaitTimeoutError(
            f"producer {session.name!r} waited for its topic in vain{by}", holder=owner
        )

    def _fail_pending_if_broken(self, error: ExclusiveLogError) -> None:
        if error.maybe_written:
            pending, self._pending = self._pending, {}
            for session_id, future in pending.items():
                self._settle(future, session_id, functools.partial(future.set_exception, error))

    # ---- facts ---------------------------------------------------------------------------

    def engines(self) -> list[EngineInfo]:
        """The engines that have this ledger open, in any process of this machine."""
        self.check_open()
        return self.ledger.lockfile.engines()

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes and counts: what the ledger uses, how many topics and engines."""
        self.check_open()
        topics, engines = self.topics(), self.engines()
        return {**self.ledger.stats(), "topics": len(topics), "engines": len(engines)}

    def verify(self) -> Report:
        """Read everything: every checksum, the density of offsets, epochs and times
        (rules B8, G4, G9).

        >>> engine.verify().ok
        True
        """
        self.check_open()
        results = list(verify(self.ledger, self.unflushed))
        problems = [problem for result in results for problem in result[2]]
        return Report(
            topics=len(results), entries=sum(result[0] for result in results),
            messages=sum(result[1] for result in results), problems=tuple(problems),
        )  # fmt: skip

    def backup(self, path: str | os.PathLike[str]) -> None:
        """A consistent, compacted copy into an empty directory, while others go on writing."""
        self.check_open()
        self.ledger.backup(os.path.abspath(path))

    # ---- close ---------------------------------------------------------------------------

    def close(self) -> None:
        """Send what waits, give everything back, end the threads. Closing twice does nothing;
        after an interrupt, the second call finishes what the first one began.

        In a signal handler or a finalizer that struck inside a transaction of this very
        thread, another thread closes the engine as soon as that is over."""
        if self.forked or self._closed_for_good:
            return
        if self.busy_here:
            threading.Thread(target=self.close, name="exclusivelog-close").start()
            return
        with self._closing:
            if self._closed_for_good:
                return
            try:
                with self._mailing:  # who asks for a producer right now is served before
                    self.closed = True
                self._finish_work()
            except ExclusiveLogError as error:
                log.warning("engine %s: closing: %s", self.name, error)
            finally:
                self._end()

    def _finish_work(self) -> None:
        self._stop_guard()
        producers = list(self._producers.values())
        waiting = [f.session for f in list(self._pending.values()) if f.session is not None]
        error = EngineClosedError(f"engine {self.name!r} on {self.path} is closed")
        for producer in producers:
            producer.appender.condemn(error)  # what is queued is still sent, and nothing more
        self.committer.drain()
        self._release_all([p.session for p in producers] + list(self._abandoned))
        self._release_all(waiting)
        for claim in list(self._owned):
            claim.end()

    def _stop_guard(self) -> None:
        self._ended.set()
        self._ring_myself()
        if self._guard is not None and self._guard is not threading.current_thread():
            self._guard.join(timeout=60)

    def _release_all(self, sessions: list[Session]) -> None:
        for start in range(0, len(sessions), RELEASED_AT_ONCE):
            chunk = sessions[start : start + RELEASED_AT_ONCE]
            self.sessions.release(chunk, read=(self.id, 2**64 - 1))

    def _end(self) -> None:
        # The slot first: whatever else fails, nobody waits for an engine that is gone. Every
        # step may be taken twice, should an interrupt strike between them.
        self.closed = True
        self._ended.set()
        if self._slot is not None and not self._closed_for_good:
            self._ring_myself()
            self._slot.leave()
        error = EngineClosedError(f"engine {self.name!r} on {self.path} was closed")
        for producer in list(self._producers.values()):
            self.committer.fail(producer.appender, error)
        for session_id, future in [*self._pending.items(), *self._settling.items()]:
            self._settle(future, session_id, functools.partial(future.set_exception, error))
        self.committer.stop()
        for reader in list(self._readers):
            self.ledger.lockfile.announce(reader.topic_id)
        if not self._closed_for_good:
            self._closed_for_good = True
            self.ledger.close()

    def _forget(self) -> None:
        """In a forked child: everything is the parent's (rule C5)."""
        self.forked = self.closed = self._closed_for_good = True
        if self._slot is not None:
            self._slot.forget()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} ({self.id}) on {self.path}>"


def open(
    path: str | os.PathLike[str],
    name: str | None = None,
    properties: Mapping[str, str] | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    keepalive: float | None = 30.0,
    readonly: bool = False,
    create: bool = True,
    mode: int = 0o700,
    map_size: int = DEFAULT_MAP_SIZE,
    max_readers: int = DEFAULT_MAX_READERS,
) -> Engine:
    """Open the ledger in a directory; make it if there is none.

    - `path`: a directory on a local disk. Network and FUSE file systems are refused.
    - `name`: for people, in errors and listings (default: `engine-` and the process id).
    - `properties`: a mapping of str to str for others to see, such as an address.
    - `durability`: "power": what this engine acknowledges survives a power loss, at the price
      of one flush that all who wait share. "process": it survives the death of any process; a
      power loss may take about the last second, and never damages the log (rule H1). Readers
      see what their own engine's durability promises (rule G6).
    - `keepalive`: seconds without a heartbeat after which others may take this engine's
      topics (rule C3); None: never.
    - `readonly`: read only; takes no slot, changes nothing.
    - `create`: False raises LedgerError where there is no ledger.
    - `mode`: of the directory, if it is made; the files get its read and write bits.
    - `map_size`: how many bytes the tables can grow to, and the large entries beside them.
      Address space, not disk.
    - `max_readers`: read transactions at the same time, in all processes together; the
      first opener decides.

    Raises LedgerError (no directory, no permission, remote), LedgerFullError (no room),
    LedgerVersionError (newer, or not a ledger), LedgerCorruptedError.

    >>> xl.open(path, name="worker-1").topics()
    []
    """
    if durability not in ("power", "process"):
        raise ValueError(f"durability={durability!r}: it takes 'power' or 'process'")
    if keepalive is not None:
        check_seconds(keepalive, "keepalive", "seconds above 0, or None for never")
        if keepalive == 0:
            raise ValueError("keepalive=0: it takes seconds above 0, or None for never")
    if not isinstance(map_size, int) or map_size < 1 << 20:
        raise ValueError(f"map_size={map_size!r}: it takes bytes, from {1 << 20} on")
    if not isinstance(max_readers, int) or max_readers < 1:
        raise ValueError(f"max_readers={max_readers!r}: it takes a whole number from 1 on")
    if name is not None:
        check_name(name, "name")
    encode_properties(properties or {})
    ledger = Ledger.open(
        os.fspath(path), create=create, mode=mode, map_size=map_size, max_readers=max_readers,
        readonly=readonly,
    )  # fmt: skip
    try:
        return Engine(
            ledger, name or f"engine-{os.getpid()}", properties or {}, keepalive, readonly,
            unflushed=durability == "process",
        )  # fmt: skip
    except BaseException:
        ledger.close()
        raise


def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


def _forget_all() -> None:
    for engine in list(_engines):
        engine._forget()
    _engines.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
