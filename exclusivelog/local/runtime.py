"""One open engine below the public interface: its parts, and their life cycle."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from exclusivelog import _core, logs, threads
from exclusivelog.backend import (
    CAPABILITIES,
    Appended,
    EngineBackend,
    ProducerRequest,
    Run,
    SessionOptions,
    TransactionParts,
    Who,
)
from exclusivelog.errors import EngineClosedError, ExclusiveLogError, LedgerError
from exclusivelog.life import open_here
from exclusivelog.local.catalog import LocalCatalog
from exclusivelog.local.commits import commit, commit_at_once
from exclusivelog.local.followers import Followers
from exclusivelog.local.log.appending import Committer
from exclusivelog.local.log.reading import LogCursor
from exclusivelog.local.maintenance.backup import backup
from exclusivelog.local.maintenance.deletion import AT_OPEN, delete_pending
from exclusivelog.local.maintenance.retention import RetentionWorker
from exclusivelog.local.maintenance.views import compact, write_snapshot
from exclusivelog.local.names import relist_topics
from exclusivelog.local.once import append_once
from exclusivelog.local.ownership.claims import LocalClaims, LocalGroupCursor, join_group
from exclusivelog.local.ownership.held_roles import LocalRoles
from exclusivelog.local.ownership.notifications import Notifications
from exclusivelog.local.ownership.pending import Pending
from exclusivelog.local.ownership.registry import Registry
from exclusivelog.local.ownership.sessions import Sessions
from exclusivelog.local.ownership.steps import MOVES
from exclusivelog.local.ownership.transfers import HandOver
from exclusivelog.local.records import Registration, Session
from exclusivelog.local.session import LocalSession
from exclusivelog.local.shm.slots import Slot
from exclusivelog.local.storage.compression import installed
from exclusivelog.local.storage.forgetting import forget_ended
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.local.storage.tables import Tables
from exclusivelog.local.topics import LocalTopic
from exclusivelog.local.unloading import Unloading
from exclusivelog.local.worker import BackgroundWorker, Heartbeat, LocalCallbacks
from exclusivelog.messages import Columns, Item
from exclusivelog.waits import AnyFuture

Found = TypeVar("Found")
# (engine, topic's id, name, offset) -> (offset, the map's items before it)
MapAt = Callable[[Any, int, str, int], tuple[int, Iterable[Item]]]


def _weakly(method: Callable[[int], int]) -> Callable[[int], int]:
    """A weak bound method: it does not keep a dropped engine, and so its files, open."""
    reference = weakref.WeakMethod(method)

    def call(topic: int) -> int:
        found = reference()
        if found is None:
            raise EngineClosedError("the engine was closed; open a new one")
        return found(topic)

    return call


class LocalEngine(EngineBackend):
    """The parts of one open engine, and how they are opened and closed."""

    callbacks: LocalCallbacks
    ledger: Ledger
    pending: Pending
    worker: BackgroundWorker

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        properties: Mapping[str, str],
        keepalive: float | None,
        readonly: bool,
        map_at: MapAt,
        unflushed: bool = False,
        kill_stalled: bool = False,
    ) -> None:
        super().__init__("0" * 16, ledger.path, name, properties, readonly)
        self.ledger = ledger
        self._map_at = map_at
        self.sessions = Sessions(ledger)
        self.registry = Registry()
        self.followers = Followers(ledger.path, self.registry)
        self.hand_over = HandOver(ledger, self.sessions.succession)
        self.notifications = Notifications(self)
        self.pending = self.notifications.pending
        self.retention_worker = RetentionWorker(ledger, _weakly(self.renew))
        self.worker = BackgroundWorker(self)
        self.callbacks = LocalCallbacks(ledger, name, self.worker)
        self.committer = Committer(ledger, self.callbacks.run_due)
        self.unflushed = unflushed  # acknowledge before the flush (rule H1)
        self._keepalive = keepalive
        self._slot: Slot | None = None
        self._drop: weakref.finalize[Any, Any] | None = None
        self._heartbeat: Heartbeat | None = None
        self._kill_stalled = kill_stalled
        self.started = False

    def start(self) -> None:
        """Join the other engines, and start the threads. It is not done by `__init__`, so that
        after an interrupt at any moment the caller has what it must close."""
        try:
            if not self.readonly:
                self._join(self.info.properties)
            self.register()
            self.ledger.holders.append(self.name)
            if self.readonly:  # a program may drop it, as a reader of files does
                self._drop = weakref.finalize(self, self.ledger.dropped.append, self.name)
            self.started = True
        except BaseException:
            self._leave_at_once()
            raise

    def _join(self, properties: Mapping[str, str]) -> None:
        with self.ledger.lockfile.opening(), threads.needed(self.path):
            self._slot = self.ledger.lockfile.slots.join(
                self.name, properties, self._keepalive, installed()
            )
        self.identify(self._slot.engine, properties)
        self._heartbeat = Heartbeat(
            self.name,
            self.ledger,
            self._slot,
            self._keepalive,
            self.worker,
            self.pending,
            self.callbacks,
        )
        self._heartbeat.start()
        self._clear_up()
        self.worker.start(self, self._slot)

    def _clear_up(self) -> None:
        """Complete deletions of dead processes, and remove what dead engines have left."""
        for step in (
            functools.partial(delete_pending, self.ledger, AT_OPEN),
            self.sessions.evict_gone,
            functools.partial(forget_ended, self.ledger, AT_OPEN),
            functools.partial(relist_topics, self.ledger),
            self.sessions.drop_notifications_of_dead_engines,
        ):
            try:
                step()
            except ExclusiveLogError as error:  # a damaged row, say: go on with the others
                self.emit(logs.NOT_CLEARED, reason=str(error))

    def _leave_at_once(self) -> None:
        self.closed = True
        self.retention_worker.stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._slot is not None:
            self.worker.wake()
            self._slot.leave()
        if self._heartbeat is not None:
            self._heartbeat.join()
        self.worker.stop()
        if self._drop is not None:
            self._drop.detach()

    @property
    def busy_here(self) -> bool:
        """Does this thread hold an engine lock? A signal handler or a finalizer that runs in this
        thread then must not wait for that lock."""
        return (
            bool(self.notifications.lock._is_owned() or self.ledger.pause_lock._is_owned())
            or self.committer.busy_here
        )

    @property
    def slot(self) -> int:
        """Its slot in the lock file; LedgerError if it is read-only, and has none."""
        self.check_writable()
        assert self._slot is not None
        return self._slot.index

    def _alarm_was_set(self) -> None:
        self.pending.limits.wake()  # the heartbeat

    # ---- the end -------------------------------------------------------------------------

    def _refuse_calls(self) -> None:
        with self.notifications.lock:  # wait for the end of a registration
            self.closed = True

    def _finish_work(self) -> None:
        # The heartbeats go on: this may wait for a stopped process, and requests end meanwhile.
        self.worker.stop()
        self.retention_worker.stop()
        sessions = self.registry.sessions()
        waiting = self.pending.queued.sessions()
        error = self.closed_error()
        for each in sessions:
            each.end(error)  # what is queued is still sent
        with self.ledger.pause_lock:
            pass  # wait for the end of a commit
        self.committer.drain()
        self.worker.release_all(waiting)  # waiters first: they must not be granted what is released
        self.worker.release_all([each.session for each in sessions])
        self.worker.release_given_up()
        for claim in self.registry.claims():
            claim.end()

    def _end(self) -> None:
        # The slot first: if a later step fails, no engine waits for this one. Every step may be
        # repeated, after an interrupt between them.
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._slot is not None and not self._over:
            self.worker.wake()
            self._slot.leave()
        error = EngineClosedError(f"engine {self.name!r} on {self.path} was closed")
        for each in self.registry.sessions():
            self.committer.fail(each.sending.appender, error)
        self.pending.fail_all(error)
        self.committer.stop()
        if self._heartbeat is not None:
            self._heartbeat.join()
        for reader in self.registry.readers():
            self.ledger.lockfile.counters.announce(reader.topic_id)
        self.ledger.lockfile.counters.announce(MOVES)

    def _let_go(self) -> None:
        if self._kill_stalled and self.ledger.watch is not None:
            self.ledger.watch.killers -= 1
        if self._drop is not None:
            self._drop.detach()
        self.ledger.holders.remove(self.name)
        self.ledger.close()

    @abc.abstractmethod
    def renew(self, topic: int) -> int:
        """Take a map's snapshot, and rebuild a compacted view, before a trim. Returns the offset up
        to which they go."""

    def _forget(self) -> None:
        if self._drop is not None:
            self._drop.detach()
        if self._slot is not None:
            self._slot.forget()
        threads.renew(self.notifications.lock)
        self.committer.forget()


class Runtime(LocalEngine):
    """The backend of one open engine; see `exclusivelog.backend.EngineBackend`."""

    capabilities = CAPABILITIES
    is_remote = False
    latest_needs_log = False  # a topic's version changes with every change of its owner

    def check_supports(self, capability: str) -> None:
        """One machine's log has all capabilities."""

    def inspect(self, find: Callable[[Tables], Found]) -> Found:
        """The result of `find` on a snapshot of all that this engine's readers may see (rule
        G6)."""
        return self.ledger.inspect(find, self.unflushed)

    def ownership_version(self, topic: int) -> int:
        """A number that every change of the topic's ownership changes."""
        journal = self.ledger.journal
        return 0 if journal is None else journal.version_of(topic)

    def make_visible(self) -> None:
        """Make all that any engine has acknowledged visible to this engine's readers (rule G6)."""
        if not self.unflushed:
            self.ledger.flush()

    def events(self, topic: str | None, group: str | None) -> None:
        """The ownership events, messages of the topic `__events__`."""

    def watch_owner(self, topic: int, start: Any) -> None:
        """The changes of a topic's owner, messages of the topic `__events__`."""

    def open_producer(self, future: AnyFuture, request: ProducerRequest) -> None:
        """Register a producer, or queue it until it is promoted or its timeout has passed."""
        self.check_open()
        slot = self._slot
        if slot is None:
            raise LedgerError(f"{self.path} is open with readonly=True; it takes no producers")
        self.ledger.checkpointer.start()  # before the registration: starting a thread may fail
        self.committer.start()
        request = replace(request, created=_core.now())
        register = functools.partial(
            self.sessions.request,
            request,
            self.info,
            slot.index,
            self._ended(request.topic, request.timeout),
        )
        self.pending.request(future, register, request.timeout)

    def open_producers(
        self, names: Sequence[str], request: ProducerRequest, options: SessionOptions
    ) -> list[LocalSession]:
        """Register a producer on each of these topics, all or none; returns their sessions."""
        slot = self.slot
        self.ledger.checkpointer.start()  # before the registration: starting a thread may fail
        self.committer.start()
        request = replace(request, created=_core.now())
        topics = iter(names)

        def make(found: Registration) -> LocalSession:
            return LocalSession(self, next(topics), found.session, found.last_sequence, options)

        register = functools.partial(
            self.sessions.request_all, names, request, self.info, slot, self._ended(None)
        )
        return self.pending.request_all(register, make)

    def queue_producers(
        self, names: Sequence[str], futures: Sequence[AnyFuture], request: ProducerRequest
    ) -> None:
        """Register a producer for each future on the topic of that name, or queue it until it is
        promoted or its timeout has passed; create missing topics."""
        slot = self.slot
        self.ledger.checkpointer.start()  # before the registration: starting a thread may fail
        self.committer.start()
        request = replace(request, created=_core.now())
        ended = self._ended(None, request.timeout)

        def register(start: int) -> list[Registration | ExclusiveLogError]:
            return self.sessions.queue_some(names[start:], request, self.info, slot, ended)

        self.pending.queue_all(futures, register, request.timeout)

    def open_followers(
        self,
        names: Sequence[str],
        futures: Sequence[AnyFuture],
        requests: Sequence[ProducerRequest],
    ) -> None:
        """Register a producer for each future, which follows the topic of that name to this engine
        (rule E2)."""
        slot = self.slot
        self.ledger.checkpointer.start()  # before the registration: starting a thread may fail
        self.committer.start()
        now = _core.now()
        wanted = [replace(request, created=now) for request in requests]
        ended = self._ended(None)

        def register(start: int) -> list[Registration | ExclusiveLogError]:
            return self.sessions.follow_some(names[start:], wanted[start:], self.info, slot, ended)

        self.pending.queue_all(futures, register, None)

    def _ended(
        self, topic: int | None, timeout: float | None = None
    ) -> Callable[[], list[Session]]:
        """Gives the sessions of this process that have ended, and are still registered: those of
        dropped producers, say, which must not refuse a request. What these have accepted for this
        topic (None: for all) is committed first, if that takes no longer than `timeout`."""
        here = [each for each in open_here(Runtime) if each.ledger is self.ledger]
        drained = [session for each in here for session in each.drain_dropped(topic, timeout)]
        return lambda: [*drained, *(session for each in here for session in each.worker.ended())]

    def drain_dropped(self, topic: int | None, timeout: float | None) -> list[Session]:
        """Commit what dropped producers of this engine have accepted; returns their sessions."""
        return self.committer.drain_dropped(
            topic, lambda session: self.registry.find_session(session) is not None, timeout
        )

    def release_dropped(self) -> None:
        """Release the sessions of dropped producers of this process, before a call that they would
        refuse."""
        ended = self._ended(None)()
        if ended:
            self.sessions.release(ended)

    def open_session(
        self,
        topic: str,
        session: Session,
        last_sequence: int,
        options: SessionOptions,
        keeper: object = None,
    ) -> LocalSession:
        """The open session of a producer, after its grant. `keeper`: the object that releases the
        session instead of the producer, such as a role."""
        return LocalSession(self, topic, session, last_sequence, options, keeper)

    def topic_store(self, topic: int) -> LocalTopic:
        """The topic with this id."""
        return LocalTopic(self, topic)

    def commit_at_once(self, parts: TransactionParts[Who]) -> bool:
        """Commit all parts of a transaction, or none, by frames of the journal. False if they are
        too large for that, or its producers must be paused."""
        return commit_at_once(self.ledger, parts, not self.unflushed)

    def commit_transaction(self, parts: TransactionParts[Who]) -> None:
        """Commit all parts of a transaction, or none."""
        commit(self.ledger, parts, not self.unflushed)

    @property
    def catalog(self) -> LocalCatalog:
        """The catalog of its ledger."""
        return LocalCatalog(self)

    @property
    def role_store(self) -> LocalRoles:
        """The roles of its ledger."""
        return LocalRoles(self)

    @property
    def claims(self) -> LocalClaims:
        """The claims of this engine."""
        return LocalClaims(self)

    def append_once(
        self, run: Run, number: int | None, batches: Mapping[str, Iterable[Columns]]
    ) -> dict[str, Appended]:
        """Append a batch to topics, unless they already have it."""
        return append_once(self, run, number, batches)

    def open_cursor(
        self,
        topic: int,
        name: str,
        loads: _core.Deserializer | None,
        compacted: bool,
        skip_trimmed: bool,
    ) -> LogCursor:
        """A cursor on a topic; closing the engine wakes a thread that waits with it."""
        cursor = LogCursor(self, topic, name, loads, compacted, skip_trimmed)
        self.registry.register_reader(cursor)
        return cursor

    def join_group(
        self, group: str, topics: Mapping[str, int], generation: int | None
    ) -> LocalGroupCursor:
        """Become the group's reader of these topics, {name: id}; the one before is fenced."""
        return join_group(self, group, topics, generation)

    def moves(
        self,
        topics: Sequence[str],
        to: str,
        timeout: float,
        groups: Sequence[str],
        producer: str | None,
        session: Session | None = None,
    ) -> Unloading:
        """The hand-overs of one `Engine.unload` or `Producer.move`, to be begun or run."""
        return Unloading(self, topics, to, timeout, groups, producer, session)

    def cancel_moves(self, topics: Sequence[str]) -> list[str]:
        """Cancel the hand-overs of these topics. Returns the names of those that had one."""
        ids = [self.catalog.topic(name, False)[0] for name in topics]
        return self.hand_over.cancel(ids, "cancelled")

    def backup(self, path: str) -> None:
        """Copy the ledger into a directory."""
        began = _core.monotonic()
        backup(self.ledger, path)
        self.emit(logs.BACKUP, target=path, seconds=_core.monotonic() - began)

    def compact(self, topic: int) -> int:
        """Rebuild a topic's compacted view; see `Topic.compact`."""
        self.check_writable()
        assert self._slot is not None
        return compact(self.ledger, topic, self._slot.index, self.id).kept

    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> None:
        """Store a snapshot: the state after a topic's messages before an offset (rule I4)."""
        self.check_writable()
        assert self._slot is not None
        write_snapshot(self.ledger, topic, self._slot.index, self.id, offset, items)

    def renew(self, topic: int) -> int:
        """Take a map's snapshot, and rebuild a compacted view, before a trim. Returns the offset up
        to which they go."""
        with self.ledger.read() as tables:
            row, kind = tables.topics.get(topic), tables.topics.kind(topic)
            compacts = tables.views.view(topic) or tables.retention.keep(topic)
        end = row.next_offset
        if kind.get("holds") == "map":
            end, items = self._map_at(self, topic, row.name, end)
            self.snapshot(topic, end, items)
        if compacts:
            self.compact(topic)
        return end
