"""One engine's pending requests: in a topic's queue, or waiting for a hand-over.

A queued request is a session in the ledger; a notification settles its future.

While a topic is being handed over to an engine, that engine's shared and exclusive requests would
be refused, because the source still holds the topic. So they wait here until the release, in the
memory of this process, with no row in the ledger (rules A2, E3). The engine's background thread
repeats them once the release, or the end of the hand-over, is committed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from exclusivelog import _core, logs
from exclusivelog.errors import (
    ExclusiveLogError,
    WaitTimeoutError,
)
from exclusivelog.local.records import Registration, Session, StillReleasing
from exclusivelog.refusals import late_release, timed_out
from exclusivelog.sessions import log_granted
from exclusivelog.waits import AnyFuture, give_granted, may_block, time_limit

if TYPE_CHECKING:
    from exclusivelog.local.runtime import LocalEngine

# ---- arrivals --------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Arrival:
    """A request that waits for a hand-over. `timeout` is in seconds, `deadline` in seconds of the
    monotonic clock."""

    future: AnyFuture
    register: Callable[[], Registration]
    timeout: float | None
    deadline: float | None
    until: int = 0  # the hand-over's deadline, ns of the monotonic clock
    refusal: ExclusiveLogError | None = None

    @property
    def topic(self) -> int:
        """The topic's id."""
        return self.future.topic_id

    def timed_out(self) -> WaitTimeoutError:
        """The error of the request at its deadline."""
        assert self.refusal is not None
        return late_release(self.timeout, self.refusal)


class Arrivals:
    """The requests of one engine that wait for a hand-over, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def topics(self) -> set[int]:
        """The topics that these requests wait for."""
        return {arrival.topic for arrival in list(self._waiting)}

    def all(self) -> list[Arrival]:
        """Every waiting request."""
        return list(self._waiting)

    def add(self, arrival: Arrival, refused: StillReleasing) -> None:
        """Let a request wait."""
        arrival.refusal, arrival.until = refused, refused.until
        self._waiting.append(arrival)

    def take(self, arrival: Arrival) -> bool:
        """Remove a request; False if it is not waiting any more."""
        try:
            # One call, not check and remove: a signal handler may do the same.
            self._waiting.remove(arrival)
        except ValueError:
            return False
        return True

    def take_future(self, future: AnyFuture) -> bool:
        """The same, for the request that settles this future."""
        found = self.find(future)
        return found is not None and self.take(found)

    def find(self, future: AnyFuture) -> Arrival | None:
        """The request that settles this future, if it waits."""
        return next((each for each in list(self._waiting) if each.future is future), None)

    def overdue(self) -> list[Arrival]:
        """Those whose `timeout` has passed."""
        now = _core.monotonic()
        return [a for a in list(self._waiting) if a.deadline is not None and a.deadline <= now]

    def next_times(self) -> Iterable[float]:
        """The seconds until each of them is due."""
        now, clock = _core.now(), _core.monotonic()
        for arrival in list(self._waiting):
            yield (arrival.until - now) / 1e9
            if arrival.deadline is not None:
                yield arrival.deadline - clock


# ---- in a queue ------------------------------------------------------------------------


class Queued:
    """The requests of one engine whose sessions are in a queue, or whose outcome is known but not
    delivered yet; by session id."""

    def __init__(self) -> None:
        self._waiting: dict[int, AnyFuture] = {}
        self._settling: dict[int, AnyFuture] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._lock = _core.Lock()  # no thread waits for the writer lock with it

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def futures(self) -> list[AnyFuture]:
        """The futures of the requests that wait."""
        return list(self._waiting.values())

    def sessions(self) -> list[Session]:
        """The sessions that wait."""
        return [f.session for f in self.futures() if f.session is not None]

    def known(self) -> set[int]:
        """The ids of sessions whose futures are not settled: waiting first, as they move that
        way."""
        return set(self._waiting) | set(self._settling)

    def settling(self, session: int) -> AnyFuture | None:
        """The future of a session whose outcome is known but not delivered yet."""
        return self._settling.get(session)

    def settles(self, session: Session) -> bool:
        """Will another thread settle this session's future?"""
        return session.id in self._waiting or session.id in self._settling

    def add(self, future: AnyFuture, deadline: float | None) -> None:
        """Add a request that waits until `deadline`, a time of the monotonic clock (None: for
        ever)."""
        self._waiting[future.session.id] = future
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, future.session.id))

    def drop(self, session: int) -> None:
        """Remove a session that has no outcome to deliver."""
        self._waiting.pop(session, None)

    def take(self, session: int) -> AnyFuture | None:
        """Mark a queued session's outcome as known; return its future, to one caller only."""
        with self._lock:
            # It is in one of the two at every moment: `cancel` must see that it will be settled.
            future = self._waiting.get(session)
            if future is not None:
                self._settling[session] = future
                self._waiting.pop(session, None)
            return future

    def settle_later(self, session: int, future: AnyFuture) -> None:
        """Add a session that never waited, whose outcome is to be delivered."""
        self._settling[session] = future

    def settled(self, session: int) -> None:
        """Remove a session whose outcome was delivered."""
        self._settling.pop(session, None)

    def next_times(self) -> Iterator[float]:
        """The seconds until the first deadline."""
        if self._deadlines:
            yield self._deadlines[0][0] - _core.monotonic()

    def end_waits(self, end: Callable[[AnyFuture], None]) -> None:
        """Call `end` for each one whose deadline has passed."""
        now = _core.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            # Pop it first: an earlier deadline may be pushed meanwhile.
            entry = heapq.heappop(self._deadlines)
            future = self._waiting.get(entry[1])
            try:
                if future is not None:
                    end(future)
            except BaseException:  # the disk is full, say: the next round tries again
                heapq.heappush(self._deadlines, entry)
                raise

    @property
    def is_crowded(self) -> bool:
        """Are most of the deadlines those of requests that do not wait any more?"""
        return len(self._deadlines) > FEW_ENTRIES + 2 * len(self._waiting)

    def forget_ended(self) -> None:
        """Forget the deadlines of requests that do not wait any more. No request may be added
        meanwhile."""
        self._deadlines = [entry for entry in self._deadlines if entry[1] in self._waiting]
        heapq.heapify(self._deadlines)

    def take_all(self, settling: bool) -> dict[int, AnyFuture]:
        """Remove and return all that wait; with `settling`, also those about to be settled."""
        waiting, self._waiting = self._waiting, {}
        return {**waiting, **(self._settling if settling else {})}


# ---- limits ----------------------------------------------------------------------------


class Limits:
    """When requests end at the latest. The background thread ends them at their deadlines, unless
    it waits for a process that is stopped with the writer lock; so another thread watches these."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, weakref.ref[AnyFuture]]] = []
        self._numbers = itertools.count()  # entries of one time are not compared further
        self._lock = _core.Lock()  # no thread waits for the writer lock with it
        self._most = FEW_ENTRIES  # more of them are looked through for dropped futures
        # Unlike an Event, it can be used in a signal handler that has interrupted such a use.
        self._woken = _core.Signal()

    def add(self, future: AnyFuture, deadline: float) -> None:
        """Watch a request that is to end at this time of the monotonic clock."""
        entry = deadline + LATE_SECONDS, next(self._numbers), weakref.ref(future)
        with self._lock:
            heapq.heappush(self._entries, entry)
            first = entry in self._entries[:1]
        if first:
            self.wake()

    def add_again(self, futures: Iterable[AnyFuture]) -> None:
        """Watch those that have not ended yet once more."""
        for future in futures:
            if not future.done():
                self.add(future, _core.monotonic())

    def wake(self) -> None:
        """End the present `wait`."""
        self._woken.set()

    def wait(self, seconds: float) -> list[AnyFuture]:
        """Sleep until requests are late, at most for so many seconds; returns those."""
        left = [at - _core.monotonic() for at, _, _ in self._entries[:1]]
        self._woken.wait(min([seconds, *left]))
        self._woken.clear()
        due = []
        with self._lock:
            while self._entries and self._entries[0][0] <= _core.monotonic():
                due.append(heapq.heappop(self._entries)[2])
        if len(self._entries) > self._most:
            self._forget_dropped()
        # Not within the lock: `done` takes a lock of the future.
        futures = [reference() for reference in due]
        return [future for future in futures if future is not None and not future.done()]

    def _forget_dropped(self) -> None:
        # Else a request that was granted soon would stay here until its timeout, of days, say.
        with self._lock:
            futures = [reference() for _, _, reference in self._entries]
            pairs = zip(self._entries, futures, strict=True)
            self._entries = [entry for entry, future in pairs if future is not None]
            heapq.heapify(self._entries)
            self._most = max(FEW_ENTRIES, 2 * len(self._entries))


# ---- requests --------------------------------------------------------------------------


log = logging.getLogger(__name__)

# Sleep this long after a delivery, so that the notified thread gets the GIL now. Else it would wait
# for it until the background thread sleeps.
HANDED_ON_SECONDS = 20e-6
# A request whose wait the background thread has not ended after this long ends without it.
LATE_SECONDS = 1.0
# Between two chunks of work, so that threads that send get the interpreter and the journal: else
# each of their sends would take as long as a chunk.
BETWEEN_CHUNKS_SECONDS = 0.003
# Of what is done for many topics together, in one transaction: who sends to them waits for its end.
CHUNK_SECONDS = 0.005
FOLLOWED_FIRST_SECONDS = 0.05  # by producers of this process, before the next chunk
CANCELLED_WITHIN = 5.0  # seconds that a cancel waits for the writer lock
FEW_ENTRIES = 1000  # so many deadlines of ended requests may stay in memory

Made = TypeVar("Made")


class Deliveries:
    """Calls of the application to be made, in order. A call that fails, for lack of memory or
    threads, is repeated in one of the background thread's next rounds."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, delivery: Callable[[], None]) -> None:
        """Make this call after all others."""
        self._waiting.append(delivery)

    def deliver(self) -> None:
        """Make the calls that are due."""
        delivered = False
        while self._waiting:
            try:
                delivery = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                delivery()
            except BaseException:
                self._waiting.appendleft(delivery)
                raise
            delivered = True
        if delivered:
            time.sleep(HANDED_ON_SECONDS)


class Outcomes:
    """Gives requests their outcomes: makes what was granted, and settles futures. `queued` has the
    sessions that wait."""

    def __init__(self, engine: Callable[[], LocalEngine], queued: Queued) -> None:
        self._engine = engine
        self._queued = queued
        # Sessions that another producer waited for before they had a producer.
        self._wanted: set[int] = set()
        self._wanting = _core.Lock()  # protects it; no thread waits for the writer lock with it

    def hand_out(
        self, future: AnyFuture, session: Session, last_sequence: int, reason: str
    ) -> None:
        """Make the producer or role of a future, and settle it. `reason`: of the grant."""
        if future.granted is None:  # else this is a second attempt
            future.granted = future.make(session, last_sequence)
            self.log_granted(session, reason)
        with self._wanting:
            wanted = session.id in self._wanted
            self._wanted.discard(session.id)
        self.settle(future, session.id, functools.partial(give_granted, future))
        if wanted:
            self.notify_wanted(session.id)

    def log_granted(self, session: Session, reason: str) -> None:
        """Log that a session was granted."""
        if not log.isEnabledFor(logs.GRANTED.level):
            return
        with contextlib.suppress(ExclusiveLogError):
            topic = self._engine().sessions.topic_name(session.topic)
            log_granted(self._engine(), topic, session, reason, session.created)

    def notify_wanted(self, session_id: int) -> None:
        """Notify a session's producer that another one waits for its topic."""
        with self._wanting:
            producer = self._engine().registry.find_session(session_id)
            if producer is None and self._queued.settling(session_id) is not None:
                self._wanted.add(session_id)  # another thread is making it, and will notify it
        if producer is not None:
            producer.notify_wanted()

    def settle(self, future: AnyFuture, session_id: int, settle: Callable[[], object]) -> None:
        """Settle a future by calling `settle`, unless it is cancelled."""

        def unless_settled() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                settle()
            self._queued.settled(session_id)

        if may_block(future):
            self._engine().callbacks.call_later(unless_settled)
        else:
            unless_settled()

    def fail(self, future: AnyFuture, session_id: int, error: ExclusiveLogError) -> None:
        """Settle a future with an error."""
        self.settle(future, session_id, functools.partial(future.set_exception, error))


class Pending:
    """The pending requests. `lock` is held while one is registered, so that no notification about a
    session is read before the session is known here."""

    def __init__(
        self, engine: Callable[[], LocalEngine], lock: Any, deliveries: Deliveries
    ) -> None:
        self.lock = lock
        self._engine = engine
        self._deliveries = deliveries
        self.queued = Queued()
        self.limits = Limits()
        self.outcomes = Outcomes(engine, self.queued)
        self._arrivals = Arrivals()

    # ---- what waits ----------------------------------------------------------------------

    @property
    def awaits(self) -> bool:
        """Does a request of this engine wait in a queue, or for a hand-over?"""
        return bool(self.queued) or bool(self._arrivals)

    def needed(self) -> set[int]:
        """The topics that are waited for."""
        waiting = [future.blocking() for future in self.queued.futures()]
        return self._arrivals.topics().union(*waiting)

    def settles(self, session: Session) -> bool:
        """Will another thread settle this session's future?"""
        return self.queued.settles(session)

    def next_times(self) -> Iterator[float]:
        """The seconds until each of them is due."""
        yield from self.queued.next_times()
        yield from self._arrivals.next_times()

    # ---- request -------------------------------------------------------------------------

    def request(
        self, future: AnyFuture, register: Callable[[], Registration], timeout: float | None
    ) -> None:
        """Register a producer, or queue it until it is promoted or `timeout` seconds have passed
        (None: without an end)."""
        deadline = None if timeout is None else _core.monotonic() + timeout
        arrival = Arrival(future, register, timeout, deadline)
        try:
            with self._registering(timeout):
                self._engine().check_open()
                registration = self._register(arrival)
                if registration is not None and not registration.queued:
                    self._hand_out(future, registration)
        except ExclusiveLogError as error:
            self._fail_registered(future, error)
        except BaseException:
            # An interrupt may come after the commit: the background thread releases orphans.
            if future.session is not None:
                self.queued.drop(future.session.id)
            self._engine().worker.release_orphans()
            raise

    def _registering(self, timeout: float | None) -> _core.Holding:
        """Holds the lock; another thread may hold it while it waits for the writer lock."""
        until = time_limit(timeout, _core.now())
        return _core.Holding(self.lock, until, self._engine().ledger.journal)

    def request_all(
        self, register: Callable[[], list[Registration]], make: Callable[[Registration], Made]
    ) -> list[Made]:
        """Register producers that do not wait, and make what each gives."""
        try:
            with _core.Holding(self.lock):
                self._engine().check_open()
                registrations = register()
                made = [make(registration) for registration in registrations]
                for registration in registrations:
                    self.outcomes.log_granted(registration.session, registration.reason)
                return made
        except StillReleasing as refused:
            raise refused.refusal from None
        except BaseException:
            # An interrupt may come after the commit: the background thread releases orphans.
            self._engine().worker.release_orphans()
            raise

    def queue_all(
        self,
        futures: Sequence[AnyFuture],
        register: Callable[[int], Sequence[Registration | ExclusiveLogError]],
        timeout: float | None,
    ) -> None:
        """Register producers that may wait, chunk by chunk. `register(n)` is one transaction: it
        registers some of those from the n-th on, at least one, and returns the outcome of each."""
        deadline = None if timeout is None else _core.monotonic() + timeout
        done = 0
        try:
            while done < len(futures):
                if done:
                    time.sleep(BETWEEN_CHUNKS_SECONDS)
                with self._registering(timeout):
                    self._engine().check_open()
                    for outcome in register(done):
                        self._take(futures[done], outcome, deadline)
                        done += 1
        except ExclusiveLogError as error:
            for future in futures[done:]:
                future.set_exception(error)
        except BaseException:
            # An interrupt may come after the commit: the background thread releases orphans.
            self._engine().worker.release_orphans()
            raise

    def _take(
        self, future: AnyFuture, outcome: Registration | ExclusiveLogError, deadline: float | None
    ) -> None:
        if not isinstance(outcome, Registration):
            future.set_exception(outcome)
            return
        future.session, future.topic_id = outcome.session, outcome.session.topic
        try:
            if outcome.queued:
                self.queue(future, deadline)
            else:
                self._hand_out(future, outcome)
        except ExclusiveLogError as error:  # no thread can be started, say; the others go on
            self._fail_registered(future, error)

    def _hand_out(self, future: AnyFuture, granted: Registration) -> None:
        self.outcomes.hand_out(future, granted.session, granted.last_sequence, granted.reason)

    def _fail_registered(self, future: AnyFuture, error: ExclusiveLogError) -> None:
        """Fail a request that is registered, if it has a session: that is then released."""
        future.granted = None  # dropping it releases the session, as the orphan that it else is
        if future.session is not None:
            self._engine().worker.release_orphans()
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it got its result before
            future.set_exception(error)

    def _register(self, arrival: Arrival) -> Registration | None:
        """Register the request; None if it has to wait until the topic is released to this
        engine."""
        future = arrival.future
        try:
            registration = arrival.register()
        except StillReleasing as refused:
            self._arrivals.add(arrival, refused)
            if arrival.deadline is not None:
                self.limits.add(future, arrival.deadline)
            self._engine().worker.wake()  # the background thread must watch the source's engine now
            return None
        future.session = registration.session
        if registration.queued:
            self.queue(future, arrival.deadline)
        return registration

    def queue(self, future: AnyFuture, deadline: float | None) -> None:
        """Track a queued session: settle its future when it is granted, or end its wait at the
        deadline."""
        assert future.session is not None
        self.queued.add(future, deadline)
        try:
            if deadline is not None:
                self.limits.add(future, deadline)
            # Start them now, not at the promotion: the topic would be idle for as long.
            self._engine().ledger.checkpointer.start()
            self._engine().committer.start()
        except ExclusiveLogError:  # the caller fails the future: nothing may settle it later
            self.queued.drop(future.session.id)
            self._engine().worker.release_orphans()
            raise
        self._engine().worker.wake()  # the background thread must watch the other engines now

    def withdraw(self, session: Session) -> bool:
        """Remove a waiting session from the queue. False if it was granted or fenced first; then
        its future is settled when this returns.

        If the writer lock is not free within `CANCELLED_WITHIN`, the background thread removes it
        later, and all that are withdrawn until it has had the lock: a thousand of them must not
        wait for that one after the other."""
        engine = self._engine()
        if engine.worker.is_behind:
            return self._withdraw_later(session)
        try:
            cancelled = engine.sessions.cancel(session, time_limit(CANCELLED_WITHIN, _core.now()))
        except WaitTimeoutError:
            return self._withdraw_later(session)
        if cancelled:
            self.queued.drop(session.id)
            return True
        engine.notifications.read()
        engine.worker.wake()  # some notifications may be for the background thread
        return False

    def _withdraw_later(self, session: Session) -> bool:
        if self._abandon(session) is None:
            return False
        self.queued.settled(session.id)
        return True

    def forget(self, future: AnyFuture) -> bool:
        """Remove a request that waits for a hand-over; False if it is not one."""
        if not self._arrivals or self._engine().forked:  # its lock may be the parent's
            return False
        if future.session is not None:  # it waits in the queue
            return False
        if self._arrivals.take_future(future):
            return True
        with contextlib.suppress(WaitTimeoutError), self._registering(CANCELLED_WITHIN):
            return self._arrivals.take_future(future)  # it was repeated, to no avail
        return False

    # ---- arrivals ------------------------------------------------------------------------

    def admit_arrivals(self) -> None:
        """Repeat the requests that waited for a hand-over whose state has changed (rule E3)."""
        for arrival in self._arrivals.overdue():
            with self.lock:
                if self._arrivals.take(arrival):
                    self._refuse(arrival, arrival.timed_out())
        engine, waiting = self._engine(), self._arrivals.all()
        # One snapshot for all requests of a topic: if it is released meanwhile, a later one must
        # not be granted before an earlier one.
        coming = {
            topic: engine.sessions.still_coming(topic, engine.id)
            for topic in {arrival.topic for arrival in waiting}
        }
        for arrival in waiting:
            transfer = coming[arrival.topic]
            if transfer is not None:
                arrival.until = transfer.until
            else:
                self._request_again(arrival)
        self._deliveries.deliver()

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
                self._engine().worker.release_orphans()
                raise
            if registration is not None and not registration.queued:
                self.queued.settle_later(registration.session.id, future)
                self._deliveries.add(functools.partial(self._hand_out, future, registration))

    def _refuse(self, arrival: Arrival, error: ExclusiveLogError) -> None:
        self._deliveries.add(functools.partial(self.outcomes.fail, arrival.future, 0, error))

    # ---- the end -------------------------------------------------------------------------

    def end_waits(self) -> None:
        """Remove requests whose `timeout` has passed from their queues."""
        self.queued.end_waits(self._end_wait)
        self._deliveries.deliver()
        if self.queued.is_crowded:
            with self.lock:
                self.queued.forget_ended()

    def _end_wait(self, future: AnyFuture) -> None:
        session = future.session
        # None: the wait for the writer lock was so long that the request has ended without it.
        if self._engine().sessions.cancel(session) and self.queued.take(session.id) is not None:
            self._deliveries.add(functools.partial(self._fail_late, future, session.id))

    def end_late(self, futures: Iterable[AnyFuture]) -> None:
        """End requests that the background thread has not ended, because it waits for a process
        that is stopped with the writer lock (rule D5). Called in a thread of its own.

        Their sessions are released as soon as that lock is free, also where one is granted until
        then: no call has got it."""
        engine = self._engine()
        try:
            if self.lock.acquire(False):  # else a thread that waits for the writer lock has it
                try:
                    engine.notifications.read()  # one of them may have been granted before
                finally:
                    self.lock.release()
            blocked = _describe_block(engine)
            for future in futures:
                self._end_late(future, blocked)
            self._deliveries.deliver()
        finally:
            self.limits.add_again(futures)  # one may be registered now, or settled elsewhere

    def _end_late(self, future: AnyFuture, blocked: str) -> None:
        arrival = self._arrivals.find(future)
        if arrival is not None and self._arrivals.take(arrival):
            self._refuse(arrival, arrival.timed_out())
        elif future.session is not None and self._abandon(future.session) is not None:
            # Not called here: it is repeated if no thread can be started for a callback.
            fail = functools.partial(self._fail_late, future, future.session.id, blocked)
            self._deliveries.add(fail)

    def _abandon(self, session: Session) -> AnyFuture | None:
        """Stop waiting for a queued session, and have the background thread release it. Returns its
        future, which is to be settled; None if its outcome is known."""
        future = self.queued.take(session.id)
        if future is not None:
            self._engine().worker.release_later(session)
        return future

    def _fail_late(self, future: AnyFuture, session_id: int, blocked: str = "") -> None:
        """Settle a future whose `timeout` has passed; the error names the topic's holder, and the
        process that `blocked` the background thread."""
        owner = None
        with contextlib.suppress(ExclusiveLogError):
            sessions = self._engine().sessions
            holders = (sessions.holders(topic) for topic in sorted(future.topics))
            owner = next((first for there in holders for first in there), None)
        self.outcomes.fail(
            future,
            session_id,
            timed_out(future.waited, owner, blocked),
        )

    def fail_all(self, error: ExclusiveLogError, settling: bool = True) -> None:
        """Fail all requests that wait, because there will be no more promotions; with `settling`,
        also those about to be settled."""
        for session_id, future in self.queued.take_all(settling).items():
            self.outcomes.fail(future, session_id, error)
        for arrival in self._arrivals.all():
            if self._arrivals.take(arrival):
                self.outcomes.fail(arrival.future, 0, error)


def _describe_block(engine: LocalEngine) -> str:
    """The process that holds the writer lock, for the text of an error."""
    watch = engine.ledger.watch
    holder = None if watch is None else watch.holder()
    if holder is None:
        return ""
    return (
        f"; the writer lock is held by {holder}, and the request leaves the queue once it is free. "
        "Resume or end that process; open(kill_stalled=True) kills one that is silent for longer "
        "than its keepalive"
    )
