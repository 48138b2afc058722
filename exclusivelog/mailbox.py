"""What the ledger tells an engine: grants, losses, hand-overs; and the requests that wait for it.

Mail is rows of the ledger, written in the transaction that they tell of. The engine's guard
reads it, and settles the futures of those who wait in a topic's queue.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import heapq
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from exclusivelog import _core
from exclusivelog.access import Session, changed
from exclusivelog.arrivals import Arrival, Arrivals
from exclusivelog.commit import Committer
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipLostError,
    ProducerFencedError,
    ProducerRevokedError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.futures import AnyFuture, Listener, give_granted
from exclusivelog.handover import HandOver
from exclusivelog.ledger import Ledger
from exclusivelog.moved_claims import CLAIM_MOVED, Successors, moved_error
from exclusivelog.sessions import (
    CLAIM_LOST,
    FENCED,
    GRANTED,
    LATER,
    RELEASE,
    REVOKED,
    SEALED,
    WANTED,
    Registration,
    Sessions,
    StillReleasing,
)
from exclusivelog.types import OwnerInfo

log = logging.getLogger("exclusivelog")

LONGEST_NAP_SECONDS = 5.0
RETRY_SECONDS = 0.25  # after a round that failed
PROMOTED_AT_ONCE = 1000
HANDED_ON_SECONDS = 20e-6  # that a thread with a new producer is given to begin with it


class Host(Protocol):
    """The engine of a mailbox."""

    id: str
    forked: bool
    ledger: Ledger
    sessions: Sessions
    committer: Committer
    hand_over: HandOver

    def check_open(self) -> None:
        """EngineClosedError unless the engine can be used here."""

    def ring(self) -> None:
        """Let the background thread go round."""

    def want_orphans(self) -> None:
        """Have it give back what an interrupted call was granted."""

    def call_later(self, function: Callable[[], object]) -> None:
        """Run application code in a thread of its own."""

    def find_producer(self, session: int) -> Listener | None:
        """The producer of a session of this engine."""

    def bound_to_role(self, seat: Listener) -> list[Listener]:
        """The producers that are bound to the role whose seat this is; none for any other."""

    def lose_claim(self, number: int, error: OwnershipLostError) -> None:
        """A claim was revoked."""


class Mailbox:
    """One engine's mail, and its requests that have no outcome yet."""

    def __init__(self, engine: Host) -> None:
        self.lock: Any = threading.RLock()
        self.read_up_to = 0
        self._owner = weakref.ref(engine)  # no cycle: what is dropped lets go of its files at once
        self._sessions = engine.sessions
        self._pending: dict[int, AnyFuture] = {}
        self._settling: dict[int, AnyFuture] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._due: list[tuple[int, int]] = []  # (ns, topic): when to promote again (rule D7)
        self._failed = False
        self._undelivered: deque[Callable[[], None]] = deque()
        self._to_release: list[tuple[int, int]] = []  # (session, topic), to be handed over
        self.successors = Successors()
        self._arrivals = Arrivals()  # that wait until their topics are released to this engine
        self._wanted: set[int] = set()  # sessions that were wanted before they had a producer

    @property
    def _engine(self) -> Host:
        engine = self._owner()
        assert engine is not None, "a mailbox is used through its engine"
        return engine

    # ---- requests ------------------------------------------------------------------------

    @property
    def awaits(self) -> bool:
        """Does anybody here wait in a queue, or for a hand-over?"""
        return bool(self._pending) or bool(self._arrivals)

    def needed(self) -> set[int]:
        """The topics that are waited for."""
        waiting = [future.in_the_way() for future in list(self._pending.values())]
        return self._arrivals.topics().union(*waiting)

    def waiting(self) -> list[Session]:
        """The sessions that wait in a queue."""
        return [f.session for f in list(self._pending.values()) if f.session is not None]

    def known(self) -> set[int]:
        """The sessions that somebody waits for, in the order in which they move on from here."""
        return set(self._pending) | set(self._settling)

    def request(
        self, future: AnyFuture, register: Callable[[], Registration], timeout: float | None
    ) -> None:
        """Register a producer, or queue it until it is promoted or `timeout` has passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        arrival = Arrival(future, register, timeout, deadline)
        try:
            # No mail about a session may be read before it is known here.
            with _core.Holding(self.lock):
                self._engine.check_open()
                registration = self._register(arrival)
                if registration is not None and not registration.queued:
                    self._hand_out(future, registration.session, registration.last_sequence)
        except ExclusiveLogError as error:
            future.set_exception(error)
        except BaseException:
            # An interrupt may come after the commit: the guard looks for what nobody got.
            if future.session is not None:
                self._pending.pop(future.session.id, None)
            self._engine.want_orphans()
            raise

    def _register(self, arrival: Arrival) -> Registration | None:
        """Its registration; None if it has to wait until the topic is released to this engine."""
        future = arrival.future
        try:
            registration = arrival.register()
        except StillReleasing as refused:
            self._arrivals.add(arrival, refused)
            self._engine.ring()  # the guard must watch the source's engine from now on
            return None
        future.session = registration.session
        if registration.queued:
            self._queue(future, arrival.deadline)
        return registration

    def _queue(self, future: AnyFuture, deadline: float | None) -> None:
        assert future.session is not None
        self._pending[future.session.id] = future
        # Now, not when it is promoted: the topic would be idle for as long.
        self._engine.ledger.start_checkpoints()
        self._engine.committer.start()
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, future.session.id))
        self._engine.ring()  # the guard must watch the other engines from now on

    def withdraw(self, session: Session) -> bool:
        """Take a waiting session out of the queue; False if it was granted or fenced first,
        which its future knows when this returns."""
        if self._sessions.cancel(session):
            self._pending.pop(session.id, None)
            return True
        self.read()
        self._engine.ring()  # there may have been mail for the guard in it
        return False

    def forget(self, future: AnyFuture) -> bool:
        """Let a request no longer wait for a hand-over; False if it does not."""
        if not self._arrivals or self._engine.forked:  # its lock may be the parent's
            return False
        with self.lock:
            return self._arrivals.take_future(future)

    def settles(self, session: Session) -> bool:
        """Somebody has read this waiting session's mail, or will, and settles its future."""
        return session.id in self._pending or session.id in self._settling

    def nap(self) -> float:
        """How long the guard may sleep, in seconds."""
        left_over = self._undelivered or self._to_release
        longest = RETRY_SECONDS if left_over else LONGEST_NAP_SECONDS
        if self._deadlines:
            longest = min(longest, self._until(self._deadlines[0][0] - time.monotonic()))
        if self._due:
            longest = min(longest, self._until((self._due[0][0] - _core.now()) / 1e9))
        return min([longest, *map(self._until, self._arrivals.next_look())])

    def _until(self, left: float) -> float:
        # What is overdue has come due just now, or has failed: a full disk, say.
        return max(left, 0.0) if left > 0 or not self._failed else RETRY_SECONDS

    def note(self, failed: bool) -> None:
        """How the guard's last round went."""
        self._failed = failed

    # ---- mail ----------------------------------------------------------------------------

    def read(self) -> None:
        """Read what has come, and tell the application."""
        with self.lock:
            with self._engine.ledger.read() as tables:
                mail = tables.mail(self._engine.id, self.read_up_to)
            for number, (kind, session, *details) in mail:
                if kind == GRANTED:
                    self._granted(session, *details)
                elif kind in (FENCED, REVOKED):
                    self._fenced(session, kind, *details)
                elif kind == CLAIM_LOST:
                    self._lose_claim(session, OwnershipLostError(*details))
                elif kind == LATER:
                    topic, due = details
                    heapq.heappush(self._due, (due, topic))
                elif kind == RELEASE:
                    self._to_release.append((session, *details))
                elif kind == CLAIM_MOVED:
                    successor = self.successors.note(session, *details)
                    self._lose_claim(session, moved_error("the claim", successor))
                elif kind == SEALED:
                    self._sealed(session, *details)
                elif kind == WANTED:
                    self._undelivered.append(functools.partial(self._tell_wanted, session))
                self.read_up_to = number
        self._deliver()

    def postpone(self, delivery: Callable[[], None]) -> None:
        """Have the guard tell the application, again and again until it can."""
        self._undelivered.append(delivery)

    def _deliver(self) -> None:
        """Tell the application. What cannot be told now, for want of memory or threads, is
        told in one of the next rounds."""
        delivered = False
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
            delivered = True
        if delivered:
            # Else a thread that was told would wait for the interpreter until this one sleeps.
            time.sleep(HANDED_ON_SECONDS)

    def _granted(self, session_id: int, epoch: int, since: int, last_sequence: int) -> None:
        future = self._take_pending(session_id)
        if future is None or future.session is None:
            return
        session = changed(future.session, epoch=epoch, since=since)
        self._undelivered.append(lambda: self._hand_out(future, session, last_sequence))

    def _take_pending(self, session_id: int) -> AnyFuture | None:
        # In one of the two at every moment: `cancel` must see that somebody settles it.
        future = self._pending.get(session_id)
        if future is not None:
            self._settling[session_id] = future
            self._pending.pop(session_id, None)
        return future

    def _hand_out(self, future: AnyFuture, session: Session, last_sequence: int) -> None:
        if future.granted is None:  # else this is a second try
            future.granted = future.make(session, last_sequence)
        with self.lock:
            wanted = session.id in self._wanted
            self._wanted.discard(session.id)
        self._settle(future, session.id, functools.partial(give_granted, future))
        if wanted:
            self._tell_wanted(session.id)

    def _settle(self, future: AnyFuture, session_id: int, settle: Callable[[], object]) -> None:
        def unless_settled() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                settle()
            self._settling.pop(session_id, None)

        # Its callbacks are the application's: they must not hold up the guard.
        if future.has_callbacks:
            self._engine.call_later(unless_settled)
        else:
            unless_settled()

    def _fenced(self, session_id: int, kind: str, text: str) -> None:
        self._take_pending(session_id)
        error = ProducerRevokedError if kind == REVOKED else ProducerFencedError
        self._undelivered.append(lambda: self._tell_fenced(session_id, error, text))

    def _tell_fenced(self, session_id: int, error: type[ProducerFencedError], text: str) -> None:
        # Only now: the grant may have been in the same mail.
        future = self._settling.get(session_id)
        if future is not None and future.session is not None and future.granted is None:
            holder = self._owner_if_known(future.session.topic)
            refuse = functools.partial(future.set_exception, error(text, holder=holder))
            self._settle(future, session_id, refuse)
        producer = self._engine.find_producer(session_id)
        if producer is not None:
            holder = self._owner_if_known(producer.session.topic)
            producer.lose(error(text, holder=holder))

    def _sealed(self, session_id: int, text: str) -> None:
        future = self._take_pending(session_id)
        if future is not None:
            refuse = functools.partial(future.set_exception, TopicTerminatedError(text))
            self._undelivered.append(lambda: self._settle(future, session_id, refuse))

    def _lose_claim(self, claim: int, error: OwnershipLostError) -> None:
        self._undelivered.append(functools.partial(self._engine.lose_claim, claim, error))

    def _tell_wanted(self, session_id: int) -> None:
        with self.lock:
            producer = self._engine.find_producer(session_id)
            if producer is None and session_id in self._settling:
                self._wanted.add(session_id)  # another thread is making it, and will tell it
        if producer is not None:
            producer.tell_wanted()

    def _owner_if_known(self, topic: int) -> OwnerInfo | None:
        with contextlib.suppress(ExclusiveLogError):
            return self._sessions.owner(topic)
        return None

    # ---- arrivals ------------------------------------------------------------------------

    def admit_arrivals(self) -> None:
        """Request again what waited for a hand-over that has gone on, or has ended (rule E3)."""
        for arrival in self._arrivals.overdue():
            with self.lock:
                if self._arrivals.take(arrival):
                    self._refuse(arrival, arrival.timed_out())
        for arrival in self._arrivals.all():
            coming = self._sessions.still_coming(arrival.topic, self._engine.id)
            if coming is not None:
                arrival.until = coming.until
            else:
                self._request_again(arrival)
        self._deliver()

    def _request_again(self, arrival: Arrival) -> None:
        with self.lock:
            if not self._arrivals.take(arrival):
                return  # it was cancelled
            future = arrival.future
            try:
                registration = self._register(arrival)
            except ExclusiveLogError as error:
                self._refuse(arrival, error)
                return
            except BaseException:
                self._engine.want_orphans()
                raise
            if registration is not None and not registration.queued:
                session, sequence = registration.session, registration.last_sequence
                self._settling[session.id] = future
                self._undelivered.append(lambda: self._hand_out(future, session, sequence))

    def _refuse(self, arrival: Arrival, error: ExclusiveLogError) -> None:
        refuse = functools.partial(arrival.future.set_exception, error)
        self._undelivered.append(lambda: self._settle(arrival.future, 0, refuse))

    # ---- later ---------------------------------------------------------------------------

    def promote_due(self) -> None:
        """Try again to promote those who let their topics settle, or whose topics were reserved
        for somebody else, who may have died (rules D7, E3)."""
        now = _core.now()
        if self._due and self._due[0][0] > now:
            self._hurry_where_the_destination_is_dead()
        while self._due and self._due[0][0] <= now:
            # Forgotten only once it is done: the disk may be full at the moment.
            topics = {topic for at, topic in self._due if at <= now}
            some = sorted(topics)[:PROMOTED_AT_ONCE]
            self._sessions.promote_again(some)
            with self.lock:  # other threads read mail, too
                self._due = [
                    (at, topic) for at, topic in self._due if at > now or topic not in some
                ]
                heapq.heapify(self._due)

    def _hurry_where_the_destination_is_dead(self) -> None:
        dead = self._sessions.destinations_gone({topic for _, topic in list(self._due)})
        if dead:
            with self.lock:
                self._due = [(0 if topic in dead else at, topic) for at, topic in self._due]
                heapq.heapify(self._due)

    def end_waits(self) -> None:
        """Take those out of their queue whose time is over."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            future = self._pending.get(self._deadlines[0][1])
            # If the ledger is full now, the next round tries again.
            if (
                future is not None
                and future.session is not None
                and self._sessions.cancel(future.session)
            ):
                self._take_pending(future.session.id)
                self._undelivered.append(functools.partial(self._tell_timed_out, future))
            heapq.heappop(self._deadlines)
        self._deliver()

    def _tell_timed_out(self, future: AnyFuture) -> None:
        assert future.session is not None
        error = self._timed_out(future)
        settle = functools.partial(future.set_exception, error)
        self._settle(future, future.session.id, settle)

    def _timed_out(self, future: AnyFuture) -> WaitTimeoutError:
        # It says who is in the way (rule A5).
        owner = None
        with contextlib.suppress(ExclusiveLogError):
            holders = (self._sessions.holders(topic) for topic in sorted(future.topics))
            owner = next((first for there in holders for first in there), None)
        by = "" if owner is None else (
            f"; it is held by producer {owner.producer_name!r} of engine {owner.engine_name!r} "
            f"(id {owner.engine_id}, pid {owner.pid}, epoch {owner.epoch})"
        )  # fmt: skip
        return WaitTimeoutError(f"{future.waited}{by}", holder=owner)

    def fail_pending(self, error: ExclusiveLogError) -> None:
        """The ledger has failed for good, and nobody is promoted any more: tell all who wait."""
        pending, self._pending = self._pending, {}
        self._fail(pending, error)
        self._fail_arrivals(error)

    def fail_all(self, error: ExclusiveLogError) -> None:
        """The engine is closed: so end all who wait."""
        self._fail({**self._pending, **self._settling}, error)
        self._fail_arrivals(error)

    def _fail_arrivals(self, error: ExclusiveLogError) -> None:
        for arrival in self._arrivals.all():
            if self._arrivals.take(arrival):
                refuse = functools.partial(arrival.future.set_exception, error)
                self._settle(arrival.future, 0, refuse)

    def _fail(self, futures: dict[int, AnyFuture], error: ExclusiveLogError) -> None:
        for session_id, future in futures.items():
            self._settle(future, session_id, functools.partial(future.set_exception, error))

    # ---- hand-over -----------------------------------------------------------------------

    def hand_over(self) -> None:
        """Drain and release what is to be moved (rule E2): sends wait meanwhile."""
        with self.lock:
            asked: list[tuple[int, int]] = []
            later: list[tuple[int, int]] = []
            for session, topic in self._to_release:
                (later if self._makes_producer(session) else asked).append((session, topic))
            self._to_release = later
        if asked:
            try:
                with self._engine.ledger.standstill:
                    self._hand_over(asked)
            except BaseException:  # the disk is full, say: the next round tries again
                with self.lock:
                    self._to_release = asked + self._to_release
                raise

    def _makes_producer(self, session: int) -> bool:
        # Another thread has read the grant: only a producer that is there can be told where its
        # topic goes.
        future = self._settling.get(session)
        made = self._engine.find_producer(session) is not None
        return future is not None and not made and not future.done()

    def _hand_over(self, asked: list[tuple[int, int]]) -> None:
        producers = {session: self._engine.find_producer(session) for session, _ in asked}
        bound = {p: self._engine.bound_to_role(p) for p in producers.values() if p is not None}
        every = [*bound, *(each for parts in bound.values() for each in parts)]
        for each in every:
            each.pause()
        try:
            for part in every[len(bound) :]:
                part.drain()
            for session, producer in producers.items():
                if producer is not None:
                    producer.drain()
                else:  # it was dropped, and what it has accepted may linger still
                    self._engine.committer.drain_session(session)
            for released in self._engine.hand_over.release(asked):
                producer = producers[released.session]
                if producer is not None and released.to is not None:
                    for each in (producer, *bound[producer]):
                        each.hand_off(released.to)
        finally:
            for each in every:
                each.resume()  # unless it has moved
