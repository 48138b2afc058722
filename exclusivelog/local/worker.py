"""The threads of one open engine: background worker, heartbeat, and callbacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, logs, threads
from exclusivelog.errors import ExclusiveLogError, LedgerError
from exclusivelog.events import log_gone
from exclusivelog.life import Callbacks, thread_of
from exclusivelog.local.ownership import role_rows, steps
from exclusivelog.local.records import Claimant, Session
from exclusivelog.local.shm.slots import FIRST_BEAT_SECONDS, Slot, own_beat_seconds
from exclusivelog.local.storage.changes import is_logged, silence
from exclusivelog.local.storage.ledger import Ledger

if TYPE_CHECKING:
    from exclusivelog.local.ownership.pending import Pending
    from exclusivelog.local.runtime import LocalEngine

log = logging.getLogger(__name__)

PLACE_PATIENCE_SECONDS = 5.0  # a closing engine waits so long for a file system
RELEASED_AT_ONCE = 1000
NOT_RELEASED = "its session is not released before this engine is closed"
# The first round finds little to do. Until then, the interpreter is for the caller that opens the
# engine, unless a notification comes.
FIRST_ROUND_SECONDS = 0.05


class BackgroundWorker:
    """Reads notifications, hands topics over, retries promotions, evicts dead engines, and releases
    dropped sessions.

    It refers to parts of its engine; only its thread refers to the engine, until that is closed.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.thread: threading.Thread | None = None
        self._name, self._engine_id = engine.name, ""
        self._ledger, self._sessions = engine.ledger, engine.sessions
        self._notifications, self._pending = engine.notifications, engine.notifications.pending
        self._registry, self._retention_worker = engine.registry, engine.retention_worker
        self._slot: Slot | None = None
        self._drops: _core.DropQueue | None = None
        self._dropped: deque[Session] = deque()  # sessions of dropped producers, to be released
        self._abandoned: deque[Session] = deque()  # sessions of requests that ended without a lock
        self._given_up: deque[Callable[[], object]] = deque()  # releases of claims, say
        self._orphans_wanted = False

    def start(self, engine: LocalEngine, slot: Slot) -> None:
        """Start the thread of this engine, which has this slot."""
        self._slot, self._engine_id = slot, slot.engine
        words = self._ledger.lockfile.atomics
        self._drops = _core.DropQueue(self._dropped, words, slot.wake_ups)
        run = functools.partial(self._run, engine, slot, slot.wake_up_count())
        self.thread = thread_of(self._ledger.path, run, f"exclusivelog-{self._name}", self._name)
        threads.start(self._ledger.path, self.thread)  # an interrupt may come here

    def stop(self) -> None:
        """Wait for the end of the thread, after the engine was closed."""
        self.wake()
        thread = self.thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(timeout=60)  # the thread uses the lock file's mapping
        if thread is not None and not thread.is_alive():
            self.thread = None  # one that could not be started would keep the engine

    def wake(self) -> None:
        """Start the next round now."""
        if self._slot is not None:
            self._ledger.lockfile.slots.notify(self._slot.index)

    def retry(self, function: Callable[[], None]) -> None:
        """Run a function in every round until it succeeds."""
        self._notifications.postpone(function)
        self.wake()

    # ---- rounds ----------------------------------------------------------------------------

    def _run(self, engine: LocalEngine, slot: Slot, seen: int) -> None:
        known = slot.arrivals()
        slot.await_wake_up(seen, FIRST_ROUND_SECONDS)
        while not engine.closed:
            # Read these first: a change after this ends the sleep below at once.
            seen, arrivals = slot.wake_up_count(), slot.arrivals()
            if arrivals != known:  # heartbeats may have to come more often
                self._pending.limits.wake()
            known = arrivals
            living = slot.living() if self._pending.awaits else frozenset()
            try:
                self._do_round()
            except ExclusiveLogError as error:
                if engine.closed:
                    return
                if error.maybe_written or self._ledger.integrity.failed:
                    self._pending.fail_all(error, settling=False)
                if not self._ledger.integrity.failed:  # it was logged when it happened
                    self._log(logs.WORKER_REFUSED, reason=str(error))
            except Exception as error:  # the worker must survive: waiters depend on it
                self._log(logs.WORKER_FAILED, error=error, reason=repr(error))
            dropped = logs.take_dropped()
            if dropped:
                self._log(logs.DROPPED, count=dropped)
            if engine.closed:
                return
            if self._pending.awaits:
                slot.await_wake_up_or_death(
                    seen, arrivals, living, self._notifications.sleep_timeout()
                )
            else:
                slot.await_wake_up(seen, self._notifications.sleep_timeout())

    def _log(self, line: logs.Line, **fields: Any) -> None:
        logs.emit(
            log,
            line,
            ledger=self._ledger.path,
            engine=self._name,
            engine_id=self._engine_id,
            **fields,
        )

    def _do_round(self) -> None:
        failure: ExclusiveLogError | None = None
        usage = self._ledger.usage
        self._notifications.note(True)  # reset when the round completes
        for step in (
            self._evict_awaited,  # first, because a request waits for it
            self._release_abandoned,
            self._release_dropped,
            self.release_given_up,
            self._release_orphans,
            self._follow_hand_overs,
            self._notifications.read,
            self._notifications.releases.hand_over,
            self._pending.end_waits,
            self._ledger.remove_unneeded,
            self._ledger.segments.forget_removed,
            self._pending.admit_arrivals,
            self._notifications.retries.promote_due,
            self._retention_worker.start_if_needed,
            self._ledger.checkpointer.poll,
            usage.check_pinned,
            usage.check_blocks,
            usage.check_room,
        ):
            try:
                step()
            except ExclusiveLogError as error:  # a full disk, say; go on with the other steps
                failure = failure or error
        self._notifications.note(failure is not None)
        if failure is not None:
            raise failure

    def _follow_hand_overs(self) -> None:
        for session in self._registry.handed_over():
            session.end_unless_within_reach()
            if session.follows_in() <= 0:
                session.begin_to_follow()

    # ---- release ---------------------------------------------------------------------------

    def finalizer(self, session: Session) -> _core.Finalizer:
        """A finalizer that releases the session when its producers were dropped. It only queues the
        session for this thread, because the garbage collector may run inside a transaction."""
        assert self._drops is not None
        return _core.Finalizer(session, self._drops)

    def release(self, session: Session) -> None:
        """Release one session now."""
        self._sessions.release([session], read=(self._engine_id, self._notifications.read_up_to))

    def release_all(self, sessions: list[Session]) -> None:
        """Release these and all dropped sessions, because the engine is closing."""
        sessions = [*sessions, *self._dropped, *self._abandoned]
        for start in range(0, len(sessions), RELEASED_AT_ONCE):
            chunk = sessions[start : start + RELEASED_AT_ONCE]
            self._sessions.release(chunk, read=(self._engine_id, 2**64 - 1))

    @property
    def is_behind(self) -> bool:
        """Has it not had the writer lock since `release_later` was called?"""
        return bool(self._abandoned)

    def release_later(self, session: Session) -> None:
        """Have the thread release one session, whether it holds its topic or waits for it."""
        self._abandoned.append(session)
        self.wake()

    def ended(self) -> list[Session]:
        """The sessions of dropped producers, and those that `release_later` has got, which the
        thread has not released yet."""
        return [*self._abandoned, *self._dropped]

    def release_orphans(self) -> None:
        """Have the thread release sessions that were granted to calls that were interrupted."""
        self._orphans_wanted = True
        self.wake()

    def give_up_claims(
        self, claimants: Iterable[Claimant], release: Callable[[Claimant], object]
    ) -> None:
        """Have the thread release claims of an interrupted call."""
        for claimant in claimants:
            self._registry.forget_claim(claimant.id)
            self._given_up.append(functools.partial(release, claimant))
        self.wake()

    def do_later(self, call: Callable[[], object]) -> None:
        """Have the thread make a call that waits for the writer lock."""
        self._given_up.append(call)
        self.wake()

    def release_given_up(self) -> None:
        """Release the claims that were queued for release, and make other calls that were."""
        while self._given_up:
            try:
                self._given_up[0]()
            except ExclusiveLogError:  # a full disk, say: retry after the others
                self._given_up.rotate(-1)
                raise
            self._given_up.popleft()

    def _release_dropped(self) -> None:
        while self._dropped:
            try:
                self.release(self._dropped[0])
            except ExclusiveLogError:  # a full disk, say: retry after the others
                self._dropped.rotate(-1)
                raise
            self._dropped.popleft()

    def _release_abandoned(self) -> None:
        while self._abandoned:
            # In one transaction, so that none of them is promoted in place of another one.
            some = list(self._abandoned)[:RELEASED_AT_ONCE]
            try:
                read = self._engine_id, self._notifications.read_up_to
                self._sessions.release(some, read=read)
            except BaseException:  # a full disk, say: retry one by one
                self._dropped.extend(some)
                raise
            finally:
                for _ in some:
                    self._abandoned.popleft()

    def _release_orphans(self) -> None:
        if not self._orphans_wanted:
            return
        with self._notifications.lock:
            self._orphans_wanted = False
            try:
                known = self._pending.queued.known() | {
                    s.session.id for s in self._registry.sessions()
                }
                with self._ledger.read() as tables:
                    sessions = tables.sessions.of_engine(self._engine_id, NOT_RELEASED)
                    reserved = {
                        s.id
                        for s in sessions
                        if steps.is_reserved(tables, s) or role_rows.binds(tables, s)
                    }
                orphans = [s for s in sessions if s.id not in known and s.id not in reserved]
                self._release_each(orphans)
            except BaseException:
                self._orphans_wanted = True
                raise

    def _release_each(self, sessions: Iterable[Session]) -> None:
        """Release these one by one; one with a damaged row, say, keeps no other one from that."""
        with contextlib.ExitStack() as stack:
            for session in sessions:
                stack.callback(self.release, session)

    # ---- eviction --------------------------------------------------------------------------

    def _evict_awaited(self) -> None:
        if self._pending.awaits:
            needed = self._pending.needed
            self._evict(self._sessions.find_dead(needed), needed)

    def evict_dead_engines(self, among: Set[str], topics: Set[int], until: int = 0) -> None:
        """Evict the sessions of the dead engines among these; of one that is only unresponsive,
        those on these topics (rules C2, C3). WaitTimeoutError if that cannot begin before
        `until`."""
        dead = [engine for engine in self._sessions.find_dead() if engine in among]
        self._evict(dead, lambda: topics, until)

    def _evict(
        self, engines: Iterable[str], needed: Callable[[], Set[int]], until: int = 0
    ) -> None:
        for engine in engines:
            # Other than owners, whose evictions are logged from their events.
            others: list[Session] = []
            for evicted in self._sessions.evict(engine, needed, until):
                self._notifications.read()
                others += [each for each in evicted if not each.exclusive or not each.epoch]
            self._log_gone(others)

    def _log_gone(self, evicted: list[Session]) -> None:
        if not evicted or not is_logged():
            return
        first = evicted[0]
        with self._ledger.read() as tables:
            ids = dict.fromkeys(session.topic for session in evicted)
            topics = [tables.topics.get(topic).name for topic in ids]
        party = {
            "engine": first.engine,
            "engine_name": first.engine_name,
            "pid": first.pid,
            "producer": first.name,
        }
        reason = self._sessions.succession.end_of(first)
        silent = silence(self._ledger.lockfile.slots, first.engine)
        log_gone(self._ledger.path, party, reason, silent, topics)


class Heartbeat:
    """Sends heartbeats in a thread of its own, which touches memory alone: no beat waits for a
    disk, the ledger's path, a log handler or the application (rule C9). It needs the interpreter's
    lock (the GIL), so a process in which no thread of Python can run falls silent (rule C3).

    It also notices requests whose wait the background worker should have ended, and has another
    thread end them (rule D5), and starts the thread that watches the ledger's path.
    """

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        slot: Slot,
        keepalive: float | None,
        worker: BackgroundWorker,
        waits: Pending,
        callbacks: LocalCallbacks,
    ) -> None:
        self._ended, self._limits, self._path = threading.Event(), waits.limits, ledger.path
        self._place = PlaceWatch(name, ledger, keepalive, self._limits.wake)
        run = functools.partial(self._run, ledger, slot, keepalive, worker, waits, callbacks)
        thread = thread_of(ledger.path, run, f"exclusivelog-heart-{name}", name)
        self._thread: threading.Thread | None = thread

    def start(self) -> None:
        """Start the thread. Call it when `stop` can be called: an interrupt may come here."""
        assert self._thread is not None
        threads.start(self._path, self._thread)

    def _run(
        self,
        ledger: Ledger,
        slot: Slot,
        keepalive: float | None,
        worker: BackgroundWorker,
        waits: Pending,
        callbacks: LocalCallbacks,
    ) -> None:
        seconds = FIRST_BEAT_SECONDS  # the opening thread needs the interpreter now
        while not self._ended.is_set():
            slot.expect_beat(seconds)
            late = self._limits.wait(min(seconds, callbacks.alarms.seconds_left()))
            if self._ended.is_set():
                return
            slot.beat()
            callbacks.ring()
            if late:
                # Not here: it reads the tables, and no beat must wait for that.
                try:
                    callbacks.call_later(functools.partial(waits.end_late, late))
                except (LedgerError, MemoryError):  # no thread can be started now
                    self._limits.add_again(late)
            del late  # a future's result must be freed when the application drops it
            if ledger.integrity.failed:
                # All calls raise it, and the worker fails waiters.
                worker.wake()
                return  # no heartbeat any more: other engines may evict this one
            self._place.start()
            seconds = ledger.lockfile.slots.beat_seconds(keepalive)

    def stop(self) -> None:
        """Tell the threads to end."""
        self._ended.set()
        self._place.stop()
        self._limits.wake()

    def join(self) -> None:
        """Wait for the end of the thread, which uses the lock file's mapping."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(timeout=60)
        if thread is not None and not thread.is_alive():
            self._thread = None  # one that could not be started would keep the ledger
        self._place.join()


class PlaceWatch:
    """Checks in a thread of its own that the ledger's files are still those that were opened (rule
    C7): the file system may not answer for minutes. Calls `failed()` once they are not."""

    def __init__(
        self, name: str, ledger: Ledger, keepalive: float | None, failed: Callable[[], object]
    ) -> None:
        self._name, self._path, self._integrity = name, ledger.path, ledger.integrity
        self._seconds = own_beat_seconds(keepalive)
        self._failed = failed
        self._ended = _core.Signal()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            name = f"exclusivelog-place-{self._name}"
            thread = thread_of(self._path, self._run, name, self._name)
            with contextlib.suppress(LedgerError, MemoryError):  # the next beat tries again
                self._thread = threads.start(self._path, thread)

    def _run(self) -> None:
        while True:
            try:
                self._integrity.check_place()
            except LedgerError:
                self._failed()
                return
            if self._ended.wait(self._seconds):
                return

    def stop(self) -> None:
        """Tell the thread to end."""
        self._ended.set()

    def join(self) -> None:
        """Wait for the end of the thread, but not for a file system that does not answer."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=PLACE_PATIENCE_SECONDS)


class LocalCallbacks(Callbacks):
    """Runs code of the application. The heartbeat calls `ring`; the background worker retries."""

    def __init__(self, ledger: Ledger, engine: str, worker: BackgroundWorker) -> None:
        super().__init__(ledger.path, engine)
        self._ledger, self._worker = ledger, worker

    def run_due(self) -> None:
        """Run the callbacks of settled receipts. Another thread runs them if this is the background
        worker, or has paused producers for which a callback may wait."""
        if not _core.callbacks_due():
            return  # a thread for nothing would cost more than the release of a topic
        worker = threading.current_thread() is self._worker.thread
        if worker or self._ledger.pause_lock._is_owned():
            self.call_soon(_core.run_callbacks)
        else:
            _core.run_callbacks()

    def retry(self, function: Callable[[], object]) -> None:
        """Have the background worker call `call_later(function)` until that succeeds."""
        self._worker.retry(lambda: self.call_later(function))
