"""Producers that follow their topics to another engine of this process (rules E2, E6).

A hand-over ends the session of the former engine. Its producers get the session that has the topic
then: that of a producer which waited there, or one that is opened for them. A thread of the former
engine does this for all that it has handed over meanwhile, a few in one transaction: first for
those with a call that waits, then for the others, which follow with the first that sends, or while
the topic is still reserved.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, sessions, threads
from exclusivelog.backend import ProducerRequest
from exclusivelog.errors import ProducerMovedError
from exclusivelog.futures import Future
from exclusivelog.local.ownership.registry import Registry
from exclusivelog.local.records import Transfer
from exclusivelog.sessions import FOLLOWED_WITHIN, NOT_OPENED, SessionFuture
from exclusivelog.waits import in_slices, until_settled

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime
    from exclusivelog.local.session import LocalSession

LOOK_AGAIN_SECONDS = 0.001  # the engine may not have made the session of a grant yet
FOLLOWED_AT_ONCE = 32  # about as many as one transaction of `CHUNK_SECONDS` registers
OTHERS_AT_ONCE = 16  # of those for which no call waits: one that does may come meanwhile


class Following:
    """The next session of producers whose topic was handed over within this process (rule E2): it
    locates the topic, and finds or opens the session there.

    The former session refers to it, and is passed to its methods: a reference back would be a
    cycle."""

    def __init__(
        self,
        engine: Runtime,
        topic: int,
        to: Transfer,
        moved: ProducerMovedError,
    ) -> None:
        self._engine, self._topic, self._lineage, self.moved = engine, topic, to.lineage, moved
        reserved = (to.until - _core.now()) / 1e9
        self._due = _core.monotonic() + min(reserved / 2, sessions.FOLLOWED_AFTER)
        self._lock = _core.Lock()
        self._waiting: Waiting | None = None
        # The next session, and whether it was opened for these producers.
        self._next: tuple[LocalSession, bool] | None = None

    @property
    def is_within_reach(self) -> bool:
        """Has an engine of this process had the topic ever since it was handed over?"""
        return self._where() is not None

    def _where(self) -> tuple[Runtime, int] | None:
        """(engine, session id) in this process that have the topic since it was handed over; id 0
        if it is only reserved; None if the topic is elsewhere."""
        found = self._engine.sessions.locate(self._topic, self._lineage)
        there = None if found is None else self._engine.engine_here(found[0])
        return None if found is None or there is None else (there, found[1])

    # ---- begun -----------------------------------------------------------------------------

    def run(self, left: LocalSession, timeout: float | None) -> bool:
        """Give the producers the session that has the topic now, or end the former one; False after
        `timeout` seconds."""
        waiting = self._begin(left, urgent=True)
        outcome = waiting.outcome
        if not in_slices(until_settled(outcome), timeout, self._engine.check_not_forked):
            return False
        self._waiting = None  # it refers to the error, whose frames would keep the session
        outcome.result(0)
        return True

    def begin(self, left: LocalSession) -> None:
        """Let the producers follow soon, although they do not send."""
        self._due = _core.monotonic() + sessions.FOLLOWED_AGAIN_AFTER
        if self._next is None:
            self._begin(left, urgent=False)

    def due_in(self) -> float:
        """The seconds until producers follow that do not send."""
        return self._due - _core.monotonic()

    def _begin(self, left: LocalSession, urgent: bool) -> Waiting:
        with self._lock:
            waiting = self._waiting
            if waiting is None or waiting.outcome.done():
                waiting = Waiting(self, left, urgent)
                self._engine.followers.add(waiting)
                self._waiting = waiting  # last: after an interrupt, nothing waits for it
            else:
                waiting.is_urgent |= urgent
                self._engine.followers.start()  # an interrupt may have come before that
            return waiting

    # ---- in the thread of the followers ----------------------------------------------------

    def look(self, left: LocalSession) -> tuple[Runtime, bool] | None:
        """Go on by the session that has the topic, and return None. If there is none yet, return
        the engine there, and whether it has to be opened: else it is about to be made."""
        if self._next is None and not left.over:
            self._engine.check_open()
            where = self._where()
            if where is None:
                left.lose(self.moved)
                return None
            there, number = where
            found = there.registry.find_session(number) if number else None
            if found is None:
                return there, not number
            self._next = found, False
        if self._next is not None:
            left.hand_on(*self._next)
        return None

    def request(self, left: LocalSession) -> ProducerRequest:
        """The request for the next session."""
        return left.next_request(self._topic, self._lineage)

    def opened(self, left: LocalSession, session: LocalSession) -> None:
        """Go on by this session, which was opened for the producers."""
        self._next = session, True
        left.hand_on(session, True)


class Waiting:
    """A session whose producers are to follow; `outcome` is settled once they have. Those that are
    urgent, because a call waits, come first."""

    def __init__(self, following: Following, left: LocalSession, urgent: bool) -> None:
        self.following, self.left, self.is_urgent = following, left, urgent
        self.outcome: Future[None] = Future()
        self._end = 0.0  # of the attempts, from the first one on

    def settle(self, error: BaseException | None = None) -> None:
        """Let the calls that wait go on, or raise this error."""
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(None)
        else:
            self.outcome.set_exception(error)

    def is_late(self) -> bool:
        """After an attempt: was it the last one? Then the producers have ended."""
        now = _core.monotonic()
        if not self._end:
            self._end = now + FOLLOWED_WITHIN
        if now < self._end:
            return False
        self.left.lose(self.following.moved)
        self.settle()
        return True


class Followers:
    """Lets the sessions of one engine follow their topics, in a thread of its own: an interrupt of
    the thread that sends must neither lose a granted session nor come between two producers (rules
    B9, E2)."""

    def __init__(self, path: str, registry: Registry) -> None:
        self._path, self._registry = path, registry
        self._lock = _core.Lock()
        self._waiting: list[Waiting] = []
        self._taken: list[Waiting] = []  # those that the thread is dealing with
        self._thread: threading.Thread | None = None  # None: it has nothing to do
        self._begins = False  # it has just been started

    def add(self, waiting: Waiting) -> None:
        """Let this session follow soon. LedgerError if no thread can be started."""
        with self._lock:
            self._waiting.append(waiting)
        self.start()

    def start(self) -> None:
        """Start the thread, unless it runs or has nothing to do."""
        with self._lock:
            if self._waiting and (self._thread is None or not self._thread.is_alive()):
                thread = threading.Thread(target=self._run, name="exclusivelog-follow", daemon=True)
                self._thread, self._begins = thread, True
                threads.start(self._path, thread)

    def _run(self) -> None:
        while some := self._take():
            try:
                later = [one for one in _follow(some) if not one.is_late()]
            except BaseException as error:  # no call may wait for ever
                for one in some:
                    one.settle(error)
                continue
            if later:
                with self._lock:
                    self._waiting = later + self._waiting
                time.sleep(LOOK_AGAIN_SECONDS)

    def _take(self) -> list[Waiting]:
        if 0 < len(self._waiting) < FOLLOWED_AT_ONCE:
            # With one that sends, all others follow that were handed over, too.
            for left in self._registry.handed_over():
                left.begin_to_follow()
        with self._lock:
            self._waiting.sort(key=lambda one: not one.is_urgent)
            urgent = sum(one.is_urgent for one in self._waiting)
            # A call that finds the thread idle waits for no others. Those that come while it is
            # at work are of producers that send in turn: the next ones follow with them.
            count = FOLLOWED_AT_ONCE if urgent else OTHERS_AT_ONCE
            if self._begins and urgent:
                count = min(urgent, FOLLOWED_AT_ONCE)
            self._begins = False
            some, self._waiting = self._waiting[:count], self._waiting[count:]
            self._taken = some
            if not some:
                self._thread = None
            return some

    def await_urgent(self, seconds: float) -> None:
        """Wait until no call waits for a session here, at most so long."""
        end = _core.monotonic() + seconds
        while self._has_urgent() and _core.monotonic() < end:
            time.sleep(LOOK_AGAIN_SECONDS)

    def _has_urgent(self) -> bool:
        with self._lock:
            there = self._waiting + self._taken
        return any(one.is_urgent and not one.outcome.done() for one in there)


def _follow(some: list[Waiting]) -> list[Waiting]:
    """Let these sessions follow; returns those whose next session is not there yet."""
    to_open: dict[Any, list[Waiting]] = {}  # by engine
    later = []
    for one in some:
        try:
            found = one.following.look(one.left)
        except BaseException as error:
            one.settle(error)
            continue
        if found is None:
            one.settle()
        elif found[1]:
            to_open.setdefault(found[0], []).append(one)
        else:
            later.append(one)
    for engine, those in to_open.items():
        later += _open(engine, those)
    return later


def _open(engine: Runtime, some: list[Waiting]) -> list[Waiting]:
    """Open the next sessions on this engine; returns those that were refused."""
    try:
        futures = [
            SessionFuture(engine, one.left.session.topic, one.left.topic, one.left.options)
            for one in some
        ]
        engine.open_followers(
            [one.left.topic for one in some],
            futures,
            [one.following.request(one.left) for one in some],
        )
    except NOT_OPENED:
        return some
    except BaseException as error:
        for one in some:
            one.settle(error)
        return []
    return [one for one, future in zip(some, futures, strict=True) if not _goes_on(one, future)]


def _goes_on(one: Waiting, future: SessionFuture) -> bool:
    """Let the producers go on by the session that was opened; False if that was refused."""
    try:
        session = future.result()
    except NOT_OPENED:
        return False
    except BaseException as error:
        one.settle(error)
        return True
    try:
        one.following.opened(one.left, session)
    except BaseException as error:
        one.settle(error)
    else:
        one.settle()
    return True
