"""One open engine on a cluster: its parts and their life cycle; see `exclusivelog.backend`.

Threads: one for each topic that is used, which follows its log (`following`), and two for producers
(`working`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from exclusivelog import _core
from exclusivelog.backend import (
    EngineBackend,
    ProducerRequest,
    SessionOptions,
    TransactionParts,
    Who,
)
from exclusivelog.cluster.announcing import announce
from exclusivelog.cluster.births import Births
from exclusivelog.cluster.catalog import ClusterCatalog, ClusterTopic
from exclusivelog.cluster.checkpoints import store_snapshot
from exclusivelog.cluster.claiming import PREFIX, GroupLog
from exclusivelog.cluster.claims import ClusterClaims, ClusterGroupCursor
from exclusivelog.cluster.cursor import ClusterCursor
from exclusivelog.cluster.figures import Figures
from exclusivelog.cluster.following import SessionFacts, TopicLog, Topics
from exclusivelog.cluster.history import claim_history, history
from exclusivelog.cluster.kinds import Kinds
from exclusivelog.cluster.locks import ClusterRoles
from exclusivelog.cluster.moving import Moving, cancel_moves
from exclusivelog.cluster.ordered import Place
from exclusivelog.cluster.refused import refusal, refuses
from exclusivelog.cluster.requests import Requests
from exclusivelog.cluster.sessions import ClusterSession, Registry
from exclusivelog.cluster.watching import WatchedOwner, Watching
from exclusivelog.cluster.working import WAKE, Committer, Worker
from exclusivelog.errors import EngineClosedError, ExclusiveLogError
from exclusivelog.events import Event
from exclusivelog.life import open_here
from exclusivelog.messages import Item
from exclusivelog.refusals import nothing_to_move
from exclusivelog.sessions import SessionFuture
from exclusivelog.waits import AnyFuture

__all__ = ["ClusterEngine"]


class Ledger:
    """Identifies the place of an engine, so that readers, producers and transactions can compare
    it."""

    def __init__(self, path: str) -> None:
        self.path = path


class ClusterEngine(EngineBackend):
    """One open engine."""

    capabilities = frozenset({
        "announcements", "claims", "compaction", "history", "inspection", "locks", "many_producers",
        "owner_watches", "reader_groups", "settle", "several_claims", "shared_producers",
        "shared_state", "snapshots", "statistics", "termination", "unload", "verify",
    })  # fmt: skip
    pending: Requests
    is_remote = True
    latest_needs_log = True  # another machine may own the topic by now

    append_once = refuses("once")
    backup = refuses("backup")

    def __init__(
        self, place: Place, name: str, properties: Mapping[str, str], readonly: bool
    ) -> None:
        super().__init__(secrets.token_hex(8), place.url, name, properties, readonly)
        self.place, self.ledger = place, Ledger(place.url)
        self.figures = Figures()
        self.topics = Topics(self, {PREFIX: GroupLog})
        self.births, self.kinds = Births(place), Kinds(place)
        words = _core.SharedWords(bytearray(8))
        self.registry = Registry(words, WAKE)
        self.pending = Requests(self, self.registry)
        self._claims, self._roles = ClusterClaims(self), ClusterRoles(self)
        self.committer = Committer(self.path, name, self.registry)
        self.watching = Watching()
        self.worker = Worker(
            self.path, name, words, self.registry, self.committer, self.pending, self.watching
        )
        self.callbacks = self.worker.callbacks
        self._versions = itertools.count(1)
        self.changes = 0
        if not readonly:
            place.join(self.info)
        self.register()

    def _alarm_was_set(self) -> None:
        self.worker.start()
        self.worker.wake()

    # ---- topics --------------------------------------------------------------------------

    def followed(self, topic: int) -> TopicLog:
        """The topic's log, followed from now on."""
        return self.topics.followed(topic)

    @property
    def catalog(self) -> ClusterCatalog:
        """The catalog of the place."""
        return ClusterCatalog(self)

    @property
    def claims(self) -> ClusterClaims:
        """The claims that it holds."""
        return self._claims

    @property
    def role_store(self) -> ClusterRoles:
        """Its locks."""
        return self._roles

    def topic_store(self, topic: int) -> ClusterTopic:
        """The topic with this id."""
        return ClusterTopic(self, topic)

    def check_supports(self, capability: str) -> None:
        """Raise UnsupportedError, with the reason, unless it has this capability."""
        if capability not in self.capabilities:
            raise refusal(capability)

    def events(self, topic: str | None, group: str | None) -> Iterator[Event]:
        """The changes of ownership of a topic, or of all topics one after the other."""
        if group is not None:
            for _, log in self.claims.logs(group):
                yield from claim_history(log)
            return
        names = self.catalog.topics() if topic is None else [topic]
        for name in names:
            if self.place.has(name):
                yield from history(self.topics.named(name))

    def watch_owner(self, topic: int, start: Any) -> WatchedOwner:
        """The changes of a topic's owner, from its log."""
        self.check_open()
        watch = self.watching.open(self.followed(topic), start)
        self.worker.start()
        self.worker.wake()
        return watch

    def open_cursor(
        self,
        topic: int,
        name: str,
        loads: _core.Deserializer | None,
        compacted: bool,
        skip_trimmed: bool,
    ) -> ClusterCursor:
        """A cursor on a topic."""
        return ClusterCursor(self, self.followed(topic), loads, compacted, skip_trimmed)

    def join_group(
        self, group: str, topics: Mapping[str, int], generation: int | None
    ) -> ClusterGroupCursor:
        """Become the group's reader of topics; fences the former ones."""
        return self.claims.join_group(group, topics, generation)

    def snapshot(self, topic: int, offset: int, items: Iterable[Item]) -> None:
        """Store a snapshot: the state after a topic's messages before an offset (rule I4)."""
        self.check_writable()
        store_snapshot(self.place, self.followed(topic), offset, items)

    def commit_at_once(self, parts: TransactionParts[Who]) -> bool:
        """Announce: the only transactions on a cluster are those of announcements."""
        announce(parts)
        return True

    def commit_transaction(self, parts: TransactionParts[Who]) -> None:
        """The same."""
        announce(parts)

    def make_visible(self) -> None:
        """No effect: readers see all messages that count."""

    # ---- producers -----------------------------------------------------------------------

    def _check_request(self, request: ProducerRequest) -> None:
        self.check_writable()
        if request.bound_to:
            raise refusal("bound_producers")

    def open_producer(self, future: AnyFuture, request: ProducerRequest) -> None:
        """Register a producer, or queue it until it is promoted or its timeout has passed."""
        self._check_request(request)
        self._open(future, request)

    def _open(self, future: AnyFuture, request: ProducerRequest, at_once: bool = False) -> None:
        followed = self._asked_for(request.topic)
        self.pending.open(followed, future, request, at_once)
        self.worker.wake()

    def _asked_for(self, topic: int) -> TopicLog:
        """The log of a topic for which a producer asks."""
        self.committer.start()
        self.worker.start()
        followed = self.followed(topic)
        for each in open_here(ClusterEngine):  # a dropped producer must refuse no request
            if each.path == self.path:
                each.worker.release_dropped(followed.name)
        return followed

    def open_producers(
        self, names: Sequence[str], request: ProducerRequest, options: SessionOptions
    ) -> list[ClusterSession]:
        """Register a producer on each of these topics, all or none; returns their sessions.

        Each is granted by a record of its own log. So all are decided before the first one is
        asked for, and if one is refused nevertheless, what was granted is released."""
        self._check_request(request)
        futures = [SessionFuture(self, 0, name, options) for name in names]
        for name, future in zip(names, futures, strict=True):
            if self.place.has(name):
                topic = self._asked_for(self.topics.number_of(name))
                self.pending.check(topic, future, request)
        try:
            return [
                self._open_at_once(name, future, request)
                for name, future in zip(names, futures, strict=True)
            ]
        except BaseException:
            self._take_back(names, futures)
            raise

    def _open_at_once(
        self, name: str, future: SessionFuture, request: ProducerRequest
    ) -> ClusterSession:
        future.topic_id, _ = self.catalog.topic(name, True)
        self._open(future, replace(request, topic=future.topic_id), at_once=True)
        session: ClusterSession = future.result()
        return session

    def _take_back(self, names: Sequence[str], futures: Sequence[SessionFuture]) -> None:
        """Release what these futures were granted, and wait for that."""
        for future in futures:
            session = future.granted  # an interrupt came before the result
            if session is None and future.done() and future.exception() is None:
                session = future.result()
            if session is not None:
                session.abandon()
        for name in names:
            self.worker.release_dropped(name)

    def queue_producers(
        self, names: Sequence[str], futures: Sequence[AnyFuture], request: ProducerRequest
    ) -> None:
        """Register a producer for each future on the topic of that name, or queue it until it is
        promoted or its timeout has passed; create missing topics."""
        self._check_request(request)
        for name, future in zip(names, futures, strict=True):
            try:
                future.topic_id, _ = self.catalog.topic(name, True)
                self.open_producer(future, replace(request, topic=future.topic_id))
            except ExclusiveLogError as error:  # `pending` has not settled it then
                future.set_exception(error)

    def open_session(
        self,
        topic: str,
        session: SessionFacts,
        last_sequence: int,
        options: SessionOptions,
        keeper: object = None,
    ) -> ClusterSession:
        """The open session of a producer, after its grant."""
        owning = self.registry.owning(session.id)
        assert owning is not None
        return ClusterSession(self, topic, session, owning, last_sequence, options)

    def moves(
        self,
        topics: Sequence[str],
        to: str,
        timeout: float,
        groups: Sequence[str],
        producer: str | None,
        session: SessionFacts | None = None,
    ) -> Moving:
        """The hand-overs of one `Engine.unload` or `Producer.move`, to be begun or run."""
        if session is None:
            there = set(self.place.topics())
            for name in topics:
                if name not in there:
                    raise nothing_to_move(name)
        return Moving(self, topics, to, timeout, groups, producer, session)

    def cancel_moves(self, topics: Sequence[str]) -> list[str]:
        """Cancel the hand-overs of these topics. Returns the names of those that had one."""
        return cancel_moves(self, topics)

    # ---- what the parts ask ----------------------------------------------------------------

    def lives(self, engine: str, patient: bool = True) -> bool:
        """Does the engine of that id live? Not `patient`: see `Place.lives`."""
        return engine == self.id or self.place.lives(engine, patient)

    def seems_to_live(self, engine: str) -> bool:
        """The same for those that ask again soon: they wait for no process that is stopped (rule
        K3)."""
        return self.lives(engine, patient=False)

    @property
    def commit_queue(self) -> _core.CommitQueue:
        """The queue of the commit thread."""
        return self.committer.queue

    def ownership_changed(self) -> None:
        """Note that a grant or a release counts."""
        self.changes = next(self._versions)  # unique, also if threads race

    def ownership_version(self, topic: int) -> int:
        """A number that changes whenever the owner of any topic may have changed: to compare costs
        no look at the log."""
        return self.changes

    def wake_worker(self) -> None:
        """Wake the worker, because a waiter may be promoted."""
        self.worker.wake()

    def waits_here(self, number: int) -> bool:
        """Is this a waiter of this engine?"""
        return number in self.pending

    # ---- the end -------------------------------------------------------------------------

    def _finish_work(self) -> None:
        error = self.closed_error()
        self.pending.fail_all(error)
        self.registry.close(error, self.committer.commit)
        self.claims.close()

    def _end(self) -> None:
        self.worker.stop()
        self.topics.close()
        self.kinds.close()
        self.births.close()
        self.registry.fail_all(EngineClosedError(f"engine {self.name!r} on {self.path} was closed"))
        self.committer.stop()
        self.worker.join()

    def _let_go(self) -> None:
        self.place.close()

    def _forget(self) -> None:
        self.topics.forget()
        self.place.forget()
