"""What the parts of one open engine share: its ledger, its threads, its producers and readers.

Producers, readers, claims and transactions are given a `Runtime`, never an `Engine`: `Engine` adds
the calls of the public interface to it, and nothing below knows those.
"""

from __future__ import annotations

import abc
import atexit
import functools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from exclusivelog import _core, seats, threads
from exclusivelog.access import Session
from exclusivelog.claims import Claims
from exclusivelog.commit import Committer
from exclusivelog.compaction import compact
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerError,
    OwnershipLostError,
    called_reentrantly,
)
from exclusivelog.futures import AnyFuture, Listener
from exclusivelog.handover import HandOver
from exclusivelog.ledger import Ledger
from exclusivelog.lockfile import Slot
from exclusivelog.mailbox import Mailbox
from exclusivelog.retention import Keeper, empty_trash
from exclusivelog.role_grants import RoleGrants
from exclusivelog.role_rows import Definition, is_role
from exclusivelog.sessions import MOVES, Sessions
from exclusivelog.snapshots import Item, write_snapshot
from exclusivelog.tables import Claimant, Tables
from exclusivelog.types import EngineInfo

log = logging.getLogger("exclusivelog")

LONGEST_BEAT_SECONDS = 5.0
RELEASED_AT_ONCE = 1000

Found = TypeVar("Found")

_engines: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Owned(Protocol):
    """A claim, or a reader's place in its group."""

    def lose(self, error: OwnershipLostError) -> None:
        """It was revoked."""

    def end(self) -> None:
        """The engine is closing: release it."""


class Follower(Protocol):
    """A reader of a topic, which sleeps until there are messages."""

    @property
    def topic_id(self) -> int:
        """Its topic."""


def _weakly(method: Callable[[int], int]) -> Callable[[int], int]:
    """The method, for a part of an engine: what is dropped lets go of its files at once."""
    reference = weakref.WeakMethod(method)

    def call(topic: int) -> int:
        found = reference()
        if found is None:
            raise EngineClosedError("the engine is gone")
        return found(topic)

    return call


class Runtime(abc.ABC):
    """One open engine, without the calls of its public interface."""

    def __init__(
        self, ledger: Ledger, name: str, properties: Mapping[str, str], keepalive: float | None,
        readonly: bool, unflushed: bool = False, kill_hung: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.path = ledger.path
        self.ledger = ledger
        self.sessions = Sessions(ledger)
        sessions = weakref.proxy(self.sessions)  # no cycle: a closed engine's files are let go
        self.sessions.roles = RoleGrants(ledger, sessions, Claims(ledger, sessions))
        self.committer = Committer(ledger, self.run_callbacks)
        self.hand_over = HandOver(ledger, self.sessions)
        self.mailbox = Mailbox(self)
        self.keeper = Keeper(ledger, _weakly(self.renew))
        self._owned: dict[int, Owned] = {}  # until they are released or severed
        self.closed = False
        self.forked = False
        self._locks = threading.Lock
        self.unflushed = unflushed  # acknowledged before it is flushed (rule H1)
        self._readonly = readonly
        self._keepalive = keepalive
        self._closing = threading.RLock()
        self._closed_for_good = False
        self._producers: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
        self._readers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._abandoned: deque[Session] = deque()
        self._given_up: deque[Callable[[], object]] = deque()
        self._orphans_wanted = False
        self._ended = threading.Event()
        self._slot: Slot | None = None
        self._guard: threading.Thread | None = None
        self._heart: threading.Thread | None = None
        self.id = "0" * 16
        self.info = EngineInfo("0" * 16, name, os.getpid(), dict(properties), 0.0)
        self._kill_hung = kill_hung
        try:
            if not readonly:
                self._join(properties)
            _engines.add(self)
        except BaseException:
            self._leave_at_once()
            raise

    def _join(self, properties: Mapping[str, str]) -> None:
        with self.ledger.lockfile.opening(), threads.needed(self.path):
            self._slot = self.ledger.lockfile.join(self.name, properties, self._keepalive)
        self.id = self._slot.engine
        self.info = EngineInfo(self.id, self.name, os.getpid(), dict(properties), 0.0)
        beat = functools.partial(self._keep_beating, self._slot, self._keepalive)
        self._heart = self._start(beat, f"exclusivelog-heart-{self.name}")
        self._clear_up()
        self._guard = self._start(self._keep_watch, f"exclusivelog-{self.name}")

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        keep = functools.partial(_core.keep_running, run, self._stumbled)
        return threads.start(self.path, threading.Thread(target=keep, name=name, daemon=True))

    def _stumbled(self, error: BaseException) -> None:
        log.error("engine %s: one of its threads stumbled", self.name, exc_info=error)

    def _leave_at_once(self) -> None:
        self.closed = True
        self._ended.set()
        self.keeper.stop()
        if self._slot is not None:
            self.ring()
            self._slot.leave()
        for thread in (self._heart, self._guard):
            if thread is not None:
                thread.join(timeout=60)  # it has the lock file's mapping

    def check_alone(self) -> None:
        """EngineClosedError in a forked child (rule C5)."""
        if self.forked:
            raise EngineClosedError(
                f"engine {self.name!r} on {self.path} was inherited through fork(); open one of "
                "your own in the child"
            )

    def check_open(self) -> None:
        """EngineClosedError unless this engine can be used here (rule C5)."""
        self.check_alone()
        if self.closed:
            raise EngineClosedError(f"engine {self.name!r} on {self.path} is closed")
        if threading.Lock is not self._locks:  # since it was opened
            threads.refuse_patched(self.path)

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock? A signal handler or a finalizer that runs in this
        thread then must not wait for that lock."""
        return (
            bool(self.mailbox.lock._is_owned() or self.ledger.standstill._is_owned())
            or self.committer.busy_here
        )

    def check_free(self) -> None:
        """LedgerError where this thread would wait for itself."""
        if self.busy_here:
            raise called_reentrantly(self.path)

    def look(self, find: Callable[[Tables], Found]) -> Found:
        """What `find` finds in all that this engine's readers may see (rule G6)."""
        return self.ledger.look(find, self.unflushed)

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now."""
        return self.look(lambda tables: tables.latest(topic))

    @property
    def ownership_version(self) -> int:
        """Changes with whatever may change who owns a topic."""
        journal = self.ledger.journal
        return 0 if journal is None else journal.version

    def make_visible(self) -> None:
        """Let this engine's readers see all that any engine has acknowledged by now (rule G6)."""
        if not self.unflushed:
            self.ledger.flush()

    @property
    def slot(self) -> int:
        """Its place in the lock file; LedgerError where it is read-only, and has none."""
        self.check_writable()
        assert self._slot is not None
        return self._slot.index

    def open_producer(
        self, future: AnyFuture, mode: str, *, name: str | None, priority: int,
        claim: int | None, timeout: float | None, settle: int, properties: dict[str, str],
        yields: bool, follows: int | None = None, bound_to: int = 0,
        announce: dict[str, str] | None = None, role: Definition | None = None,
    ) -> None:  # fmt: skip
        """Register a producer, or queue it until it is promoted or `timeout` has passed. `yields`:
        it is told when another one waits for the topic. `role`: what its session is to bind."""
        self.check_open()
        slot = self._slot
        if slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; it takes no producers")
        self.ledger.start_checkpoints()  # before anything is registered: they may not start
        self.committer.start()
        created = _core.now()
        self.mailbox.request(
            future,
            lambda: self.sessions.request(
                future.topic_id, self.info, slot.index, mode, name=name, priority=priority,
                claim=claim, created=created, settle=settle, yields=yields,
                properties=properties, follows=follows, bound_to=bound_to, announce=announce,
                role=role,
            ),
            timeout,
        )  # fmt: skip

    def want_orphans(self) -> None:
        """Have the guard give back what an interrupted call was granted."""
        self._orphans_wanted = True
        self.ring()

    def find_producer(self, session: int) -> Listener | None:
        """The producer of a session of this engine."""
        return self._producers.get(session)

    def sibling(self, engine: str) -> Runtime | None:
        """The engine of that id, if it is in this process and open."""
        return next((e for e in list(_engines) if e.id == engine and not e.closed), None)

    def adopt(self, producer: Listener) -> None:
        """Mail about this producer's session goes to it."""
        self._producers[producer.session.id] = producer

    def disown(self, producer: Listener) -> None:
        """The producer is closed."""
        self._producers.pop(producer.session.id, None)

    def release(self, session: Session) -> None:
        """Give one session back."""
        self.sessions.release([session], read=(self.id, self.mailbox.read_up_to))

    def leash(self, session: Session) -> _core.Leash:
        """What gives a session back once its producer is dropped: the collector may run
        anywhere, even inside a transaction, so the release is left to the guard."""
        assert self._slot is not None
        return _core.Leash(session, self._abandoned, self.ledger.lockfile.words, self._slot.bell)

    def run_callbacks(self) -> None:
        """Run the callbacks of receipts that have their outcome: here, unless this is the guard,
        which nobody's code may hold up, or has made senders wait, whom they may join."""
        if threading.current_thread() is self._guard or self.ledger.standstill._is_owned():
            self.call_soon(_core.run_callbacks)
        else:
            _core.run_callbacks()

    def call_later(self, function: Callable[[], object]) -> None:
        """Run application code where it can block nobody."""

        def run() -> None:
            try:
                function()
            except Exception:
                log.exception("a callback of engine %s failed", self.name)

        thread = threading.Thread(target=run, name="exclusivelog-callback", daemon=True)
        threads.start(self.path, thread)

    def call_soon(self, function: Callable[[], object]) -> None:
        """The same; where no thread can be started now, in one of the guard's next rounds."""
        try:
            self.call_later(function)
        except (LedgerError, MemoryError):
            self.mailbox.postpone(lambda: self.call_later(function))
            self.ring()

    def register_reader(self, reader: Follower) -> None:
        """Closing the engine wakes this reader."""
        self._readers.add(reader)

    def keep_claim(self, number: int, claim: Owned) -> None:
        """Mail about this claim goes to it, and closing the engine releases it."""
        self._owned[number] = claim

    def forget_claim(self, number: int) -> None:
        """The claim is released."""
        self._owned.pop(number, None)

    def lose_claim(self, number: int, error: OwnershipLostError) -> None:
        """The claim was severed."""
        claim = self._owned.pop(number, None)
        if claim is not None:
            claim.lose(error)

    def drain_bound(self, claim: int) -> None:
        """Commit what the producers that are bound to a claim have accepted."""
        for producer in list(self._producers.values()):
            if producer.session.bound_to == claim:
                producer.drain()

    def name_of(self, topic: int) -> str:
        """The name of the topic with this id."""
        with self.ledger.read() as tables:
            return tables.topic(topic).name

    def bound_to_role(self, seat: Listener) -> list[Listener]:
        """The producers that are bound to the role whose seat this is; none for any other."""
        if not is_role(self.name_of(seat.session.topic)):
            return []
        bound_to = seat.session.bound_to
        there = list(self._producers.values())
        return [p for p in there if p is not seat and p.session.bound_to == bound_to]

    def ring(self) -> None:
        """Let the guard go round."""
        if self._slot is not None:
            self.ledger.lockfile.ring(self._slot.index)

    def _keep_watch(self) -> None:
        slot = self._slot
        assert slot is not None
        while not self.closed:
            # What changes after these are read ends the sleep below at once.
            seen, arrivals = slot.mail_count(), slot.arrivals()
            living = slot.living() if self.mailbox.awaits else frozenset()
            try:
                self._do_rounds()
            except ExclusiveLogError as error:
                if self.closed:
                    return
                if error.maybe_written or self.ledger.over:
                    self.mailbox.fail_pending(error)
                if not self.ledger.over:  # that was said when it happened
                    log.warning("engine %s: %s", self.name, error)
            except Exception:  # the guard must not die: waiters depend on it
                log.exception("engine %s: its guard stumbled", self.name)
            if self.closed:
                return
            if self.mailbox.awaits:
                slot.await_mail_or_death(seen, arrivals, living, self.mailbox.nap())
            else:
                slot.await_mail(seen, self.mailbox.nap())

    def _clear_up(self) -> None:
        # What processes left behind that died while they deleted a topic, or before they read
        # what had become of them.
        try:
            empty_trash(self.ledger)
            self.sessions.drop_mail_of_the_gone()
        except ExclusiveLogError as error:
            log.warning("engine %s: %s", self.name, error)

    def _keep_beating(self, slot: Slot, keepalive: float | None) -> None:
        # A thread of its own: the guard may have to wait for a ledger that somebody else has
        # stopped, and is not hung for that (rule C3).
        beat = LONGEST_BEAT_SECONDS if keepalive is None else keepalive / 4
        while not self._ended.wait(min(LONGEST_BEAT_SECONDS, beat)):
            slot.beat()
            try:
                self.ledger.check_place()
            except LedgerError:  # every call tells it from now on; the guard tells who waits
                self.ring()
                return  # what it owns there, others may have

    def _release_orphans(self) -> None:
        """Give back what was granted to a call that was interrupted before it could return."""
        if not self._orphans_wanted:
            return
        with self.mailbox.lock:
            self._orphans_wanted = False
            try:
                known = self.mailbox.known() | set(self._producers.keys())
                with self.ledger.read() as tables:
                    sessions = tables.sessions_of(self.id)
                    reserved = {
                        s.id for s in sessions
                        if seats.reserved(tables, s) or self.sessions.roles.binds(tables, s)
                    }  # fmt: skip
                for session in sessions:
                    if session.id not in known and session.id not in reserved:
                        self.release(session)
            except BaseException:
                self._orphans_wanted = True
                raise

    def _do_rounds(self) -> None:
        failure: ExclusiveLogError | None = None
        self.mailbox.note(True)  # unless it comes to its end
        for step in (
            self._release_abandoned, self._release_claims, self._release_orphans,
            self.mailbox.read,
            self.mailbox.hand_over, self.mailbox.end_waits, self.ledger.segments.forget_removed,
            self._bury_the_dead, self.mailbox.admit_arrivals, self.mailbox.promote_due,
            self.keeper.look, self.ledger.tend,
            self.ledger.find_pinned,
        ):  # fmt: skip
            try:
                step()
            except ExclusiveLogError as error:  # a full disk, say; the other steps may do
                failure = failure or error
        self.mailbox.note(failure is not None)
        if failure is not None:
            raise failure

    def give_up_claims(
        self, claimants: Iterable[Claimant], release: Callable[[Claimant], object]
    ) -> None:
        """Have the background thread release what a call has claimed that was interrupted."""
        for claimant in claimants:
            self.forget_claim(claimant.id)
            self._given_up.append(functools.partial(release, claimant))
        self.ring()

    def _release_claims(self) -> None:
        while self._given_up:
            self._given_up[0]()
            self._given_up.popleft()

    def _release_abandoned(self) -> None:
        while self._abandoned:
            try:
                self.release(self._abandoned[0])
            except ExclusiveLogError:  # a full disk, say: it stays for later, behind the others
                self._abandoned.rotate(-1)
                raise
            self._abandoned.popleft()

    def _bury_the_dead(self) -> None:
        if self.mailbox.awaits:
            self._evict(self.sessions.find_dead(self.mailbox.needed))

    def evict_the_dead(self, among: Iterable[str]) -> None:
        """Take the sessions of those of these engines away that are gone (rules C2, C3)."""
        self._evict([engine for engine in self.sessions.find_dead() if engine in among])

    def _evict(self, engines: Iterable[str]) -> None:
        for engine in engines:
            log.info("engine %s is gone; taking its sessions away", engine)
            for _ in self.sessions.evict(engine):
                self.mailbox.read()

    def compact(self, topic: int) -> int:
        """What `Topic.compact` does."""
        self.check_writable()
        assert self._slot is not None
        return compact(self.ledger, topic, self._slot.index, self.id).kept

    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> None:
        """Keep what a topic's messages before an offset add up to (rule I4)."""
        self.check_writable()
        assert self._slot is not None
        write_snapshot(self.ledger, topic, self._slot.index, self.id, offset, items)

    def check_writable(self) -> None:
        """An error unless this engine can be used here, and to write."""
        self.check_open()
        if self._slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; nothing can be changed")

    def close(self) -> None:
        """Commit pending sends, release topics and claims, and end the threads. Closing twice does
        nothing; after an interrupt, the second call finishes what the first one began.

        If a signal handler or a finalizer calls this during a transaction of the same thread,
        another thread closes the engine as soon as that transaction is over."""
        if self.forked or self._closed_for_good:
            return
        if self.busy_here:
            closing = threading.Thread(target=self.close, name="exclusivelog-close")
            threads.start(self.path, closing)
            return
        with self._closing:
            if self._closed_for_good:
                return
            try:
                with self.mailbox.lock:  # who asks for a producer right now is served before
                    self.closed = True
                self._finish_work()
            except ExclusiveLogError as error:
                log.warning("engine %s: closing: %s", self.name, error)
            finally:
                self._end()

    def _finish_work(self) -> None:
        self._stop_guard()
        self.keeper.stop()
        producers = list(self._producers.values())
        waiting = self.mailbox.waiting()
        error = EngineClosedError(f"engine {self.name!r} on {self.path} is closed")
        for producer in producers:
            producer.appender.condemn(error)  # what is queued is still sent, and nothing more
        with self.ledger.standstill:
            pass  # a transaction that is being committed comes to its end
        self.committer.drain()
        self._release_all(waiting)  # first: what we give back must not come back to us
        self._release_all([p.session for p in producers] + list(self._abandoned))
        self._release_claims()
        for claim in list(self._owned.values()):
            claim.end()

    def _stop_guard(self) -> None:
        self._ended.set()
        self.ring()
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
            self.ring()
            self._slot.leave()
        error = EngineClosedError(f"engine {self.name!r} on {self.path} was closed")
        for producer in list(self._producers.values()):
            self.committer.fail(producer.appender, error)
        self.mailbox.fail_all(error)
        self.committer.stop()
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join(timeout=60)  # it has us, and the lock file's mapping
        for reader in list(self._readers):
            self.ledger.lockfile.announce(reader.topic_id)
        self.ledger.lockfile.announce(MOVES)
        if not self._closed_for_good:
            self._closed_for_good = True
            if self._kill_hung and self.ledger.watch is not None:
                self.ledger.watch.killers -= 1
            self.ledger.close()

    @abc.abstractmethod
    def renew(self, topic: int) -> int:
        """Before old messages go: take a map's snapshot, and make a compacted view anew, up to the
        topic's end as it is now. Returns that."""

    def _forget(self) -> None:
        """In a forked child: everything is the parent's (rule C5)."""
        self.forked = self.closed = self._closed_for_good = True
        if self._slot is not None:
            self._slot.forget()


def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


def _forget_all() -> None:
    for engine in list(_engines):
        engine._forget()
    _engines.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
