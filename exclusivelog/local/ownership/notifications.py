"""The notifications of one engine: grants, losses, hand-overs.

A notification is a row of the ledger, written in the transaction that it is about, which wakes the
engine's background thread. That reads it, settles the futures of waiting requests, retries
promotions, and hands topics over.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exclusivelog import _core
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipLostError,
    ProducerFencedError,
    ProducerRevokedError,
    TopicTerminatedError,
)
from exclusivelog.local.ownership.pending import (
    BETWEEN_CHUNKS_SECONDS,
    CHUNK_SECONDS,
    FOLLOWED_FIRST_SECONDS,
    Deliveries,
    Pending,
)
from exclusivelog.local.ownership.steps import (
    CLAIM_LOST,
    CLAIM_MOVED,
    FENCED,
    GRANTED,
    RELEASE,
    RETRY_AT,
    REVOKED,
    TERMINATED,
    WANTED,
    Successors,
)
from exclusivelog.local.records import Session
from exclusivelog.refusals import claim_moved
from exclusivelog.types import OwnerInfo
from exclusivelog.waits import AnyFuture

if TYPE_CHECKING:
    from exclusivelog.local.runtime import LocalEngine

LONGEST_SLEEP_SECONDS = 5.0
RETRY_SECONDS = 0.25  # after a round that failed
PROMOTED_AT_ONCE = 1000
# Sends to the topics of a chunk wait while it is released, and each chunk costs a transaction. Its
# size follows from what the chunk before took, so that it takes about `CHUNK_SECONDS`.
RELEASED_AT_FIRST, RELEASED_AT_LEAST, RELEASED_AT_MOST = 32, 32, 250


class Retries:
    """Promotions to be retried at a given time: during a settle delay or a reservation (rules D7,
    E3)."""

    def __init__(self, engine: Callable[[], LocalEngine], lock: Any) -> None:
        self._engine = engine
        self._lock = lock
        self._due: list[tuple[int, int]] = []  # (ns of the monotonic clock, topic)

    def add(self, topic: int, due: int) -> None:
        """Retry the topic's promotion at this time."""
        heapq.heappush(self._due, (due, topic))

    def next_times(self) -> list[float]:
        """Seconds until the first one is due."""
        return [(self._due[0][0] - _core.now()) / 1e9] if self._due else []

    def promote_due(self) -> None:
        """Retry promotions that are due."""
        now = _core.now()
        if self._due and self._due[0][0] > now:
            self._retry_where_destination_is_dead()
        while self._due and self._due[0][0] <= now:
            # Removed only after it succeeded: the disk may be full at the moment.
            topics = {topic for at, topic in self._due if at <= now}
            some = sorted(topics)[:PROMOTED_AT_ONCE]
            self._engine().sessions.promote_again(some)
            with self._lock:  # other threads read notifications, too
                self._due = [
                    (at, topic) for at, topic in self._due if at > now or topic not in some
                ]
                heapq.heapify(self._due)

    def _retry_where_destination_is_dead(self) -> None:
        topics = {topic for _, topic in list(self._due)}
        dead = self._engine().sessions.destinations_gone(topics)
        if dead:
            with self._lock:
                self._due = [(0 if topic in dead else at, topic) for at, topic in self._due]
                heapq.heapify(self._due)


class Releases:
    """Sessions of this engine whose topics are to be handed over (rule E2)."""

    def __init__(self, engine: Callable[[], LocalEngine], lock: Any, requests: Pending) -> None:
        self._engine = engine
        self._lock = lock
        self._pending = requests
        self._asked: list[tuple[int, int]] = []  # (session, topic)
        self._size = RELEASED_AT_FIRST

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, session: int, topic: int) -> None:
        """Add a session that is to release its topic."""
        self._asked.append((session, topic))

    def hand_over(self) -> None:
        """Drain and release these sessions; their sends wait meanwhile."""
        with self._lock:
            asked: list[tuple[int, int]] = []
            later: list[tuple[int, int]] = []
            for session, topic in self._asked:
                (later if self._makes_producer(session) else asked).append((session, topic))
            self._asked = later
        while asked:
            chunk = asked[: self._size]
            began = _core.monotonic()
            try:
                with self._engine().ledger.pause_lock:
                    self._hand_over(chunk)
            except BaseException:  # the disk is full, say: the next round tries again
                with self._lock:
                    self._asked = asked + self._asked
                raise
            del asked[: len(chunk)]
            self._adapt(len(chunk), _core.monotonic() - began)
            if asked:
                time.sleep(BETWEEN_CHUNKS_SECONDS)
                # Else the calls that wait would wait for all chunks: they share the interpreter.
                self._engine().followers.await_urgent(FOLLOWED_FIRST_SECONDS)

    def _adapt(self, count: int, seconds: float) -> None:
        """Set the size of the next chunk, by how long this one took."""
        fitting = int(count * CHUNK_SECONDS / max(seconds, 1e-6))
        self._size = max(RELEASED_AT_LEAST, min(fitting, 2 * self._size, RELEASED_AT_MOST))

    def _makes_producer(self, session: int) -> bool:
        # Another thread has read the grant, and is making the producer. Wait for it: only an
        # existing producer can be notified of the destination.
        future = self._pending.queued.settling(session)
        made = self._engine().registry.find_session(session) is not None
        return future is not None and not made and not future.done()

    def _hand_over(self, asked: list[tuple[int, int]]) -> None:
        engine = self._engine()
        producers = {session: engine.registry.find_session(session) for session, _ in asked}
        bound = {p: engine.registry.bound_to_role(p) for p in producers.values() if p is not None}
        every = [*bound, *(each for parts in bound.values() for each in parts)]
        for each in every:
            each.pauses.begin()
        try:
            for part in every[len(bound) :]:
                part.sending.drain()
            for session, producer in producers.items():
                if producer is not None:
                    producer.sending.drain()
                else:  # it was dropped, and its messages may still be queued
                    engine.committer.drain_session(session)
            for released in engine.hand_over.release(asked):
                producer = producers[released.session]
                if producer is not None and released.to is not None:
                    for each in (producer, *bound[producer]):
                        each.hand_off(released.to)
        finally:
            for each in every:
                each.pauses.end()  # has no effect once it was handed over


class Notifications:
    """One engine's notifications. `pending` has its waiting requests, `retries` its promotions to
    be retried, `releases` its sessions to be handed over."""

    def __init__(self, engine: LocalEngine) -> None:
        self.lock: Any = threading.RLock()
        self.read_up_to = 0
        self.successors = Successors()
        self._owner = weakref.ref(engine)  # no cycle: a dropped engine closes its files at once
        self._deliveries = Deliveries()
        find = functools.partial(_engine_of, self._owner)
        self.pending = Pending(find, self.lock, self._deliveries)
        self.retries = Retries(find, self.lock)
        self.releases = Releases(find, self.lock, self.pending)
        self._failed = False

    @property
    def _engine(self) -> LocalEngine:
        return _engine_of(self._owner)

    def sleep_timeout(self) -> float:
        """How long the background thread may sleep, in seconds."""
        longest = RETRY_SECONDS if self._deliveries or self.releases else LONGEST_SLEEP_SECONDS
        follow = [each.follows_in() for each in self._engine.registry.handed_over()]
        times = [*self.pending.next_times(), *self.retries.next_times(), *follow]
        return min([longest, *map(self._until, times)])

    def _until(self, left: float) -> float:
        # After a failure (a full disk, say), do not retry overdue work at once.
        return max(left, 0.0) if left > 0 or not self._failed else RETRY_SECONDS

    def note(self, failed: bool) -> None:
        """Record whether the background thread's last round failed."""
        self._failed = failed

    def postpone(self, delivery: Callable[[], None]) -> None:
        """Have the background thread make this call of the application, until it succeeds."""
        self._deliveries.add(delivery)

    # ---- read ----------------------------------------------------------------------------

    def read(self) -> None:
        """Read new notifications, and call the application."""
        with self.lock:
            with self._engine.ledger.read() as tables:
                found = tables.notifications.read(self._engine.id, self.read_up_to)
            for number, (kind, session, *details) in found:
                self._take(kind, session, details)
                self.read_up_to = number
        self._deliveries.deliver()

    def _take(self, kind: str, session: int, details: list[Any]) -> None:
        if kind == GRANTED:
            self._granted(session, *details)
        elif kind in (FENCED, REVOKED):
            self._fenced(session, kind, *details)
        elif kind == CLAIM_LOST:
            self._lose_claim(session, OwnershipLostError(*details))
        elif kind == RETRY_AT:
            self.retries.add(*details)
        elif kind == RELEASE:
            self.releases.add(session, *details)
        elif kind == CLAIM_MOVED:
            successor = self.successors.note(session, *details)
            self._lose_claim(session, claim_moved("the claim", successor))
        elif kind == TERMINATED:
            self._terminated(session, *details)
        elif kind == WANTED:
            self._deliveries.add(functools.partial(self.pending.outcomes.notify_wanted, session))

    def _granted(
        self,
        session_id: int,
        epoch: int,
        since: int,
        last_sequence: int,
        reason: str,
        granted_at: int,
    ) -> None:
        future = self.pending.queued.take(session_id)
        if future is None or future.session is None:
            return
        session = future.session._replace(epoch=epoch, since=since)
        self._deliveries.add(
            lambda: self._hand_out(future, session, last_sequence, reason, granted_at)
        )

    def _hand_out(
        self, future: AnyFuture, session: Session, last_sequence: int, reason: str, granted_at: int
    ) -> None:
        self.pending.outcomes.hand_out(future, session, last_sequence, reason)
        self._engine.ledger.lockfile.figures.note_promotion(_core.now() - granted_at)

    def _fenced(self, session_id: int, kind: str, text: str) -> None:
        self.pending.queued.take(session_id)
        error = ProducerRevokedError if kind == REVOKED else ProducerFencedError
        self._deliveries.add(
            lambda: self._end(
                session_id, lambda topic: error(text, holder=self._owner_if_known(topic))
            )
        )

    def _end(self, session_id: int, error_on: Callable[[int], ExclusiveLogError]) -> None:
        """Fail the request, or end the session. `error_on`: the error, for the id of its topic."""
        # Looked up at delivery: the grant may have been read in the same batch.
        future = self.pending.queued.settling(session_id)
        if future is not None and future.session is not None and future.granted is None:
            error = error_on(future.session.topic)
            self.pending.outcomes.fail(future, session_id, error)
        producer = self._engine.registry.find_session(session_id)
        if producer is not None:
            producer.lose(error_on(producer.session.topic))

    def _terminated(self, session_id: int, text: str) -> None:
        self.pending.queued.take(session_id)
        error = TopicTerminatedError(text)
        self._deliveries.add(lambda: self._end(session_id, lambda topic: error))

    def _lose_claim(self, claim: int, error: OwnershipLostError) -> None:
        self._deliveries.add(functools.partial(self._engine.registry.lose_claim, claim, error))

    def _owner_if_known(self, topic: int) -> OwnerInfo | None:
        with contextlib.suppress(ExclusiveLogError):
            return self._engine.sessions.owner(topic)
        return None


def _engine_of(engine: weakref.ref[LocalEngine]) -> LocalEngine:
    found = engine()
    assert found is not None, "notifications are used through their engine"
    return found
