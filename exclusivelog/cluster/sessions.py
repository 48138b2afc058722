"""The sessions of an engine on a cluster: sending, their life cycle, and their registry.

`ClusterSession` is what `exclusivelog.backend.ProducerSession` describes: open, then fenced,
closed, or handed over. After a hand-over within the process its producers go on with another
session (`Following`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from exclusivelog import _core, sessions, threads
from exclusivelog.admission import HANDED_OVER
from exclusivelog.backend import (
    SessionOptions,
    SessionPaused,
    State,
)
from exclusivelog.cluster.following import (
    ANSWER_SECONDS,
    CLOSE_SECONDS,
    Owning,
    SessionFacts,
    now_ms,
)
from exclusivelog.cluster.frames import MAX_MESSAGES
from exclusivelog.cluster.log import FRAME_OVERHEAD, MESSAGE_OVERHEAD, MOST_MESSAGE_BYTES
from exclusivelog.cluster.refused import refusal
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    ProducerMovedError,
    duplicate_sequence,
)
from exclusivelog.futures import Future
from exclusivelog.members import living
from exclusivelog.messages import Columns, Encoded, Raw
from exclusivelog.refusals import without_outcome
from exclusivelog.sessions import (
    FOLLOWED_WITHIN,
    NOT_OPENED,
    SessionFuture,
    SessionLife,
    outcome_of,
    state_after,
)
from exclusivelog.waits import in_slices, queued, until_settled

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["ClusterSending", "ClusterSession", "Registry"]

# So many messages of so many bytes certainly fit into a record.
MOST_MESSAGES = 16_000
MOST_BYTES = 2 << 20


# ---- sending -----------------------------------------------------------------------------


class ClusterSending:
    """Appends the messages of one session; see `exclusivelog.backend.Sending`."""

    def __init__(
        self, host: ClusterEngine, owning: Owning, appender: _core.Appender, options: SessionOptions
    ) -> None:
        self.appender = appender
        self._host, self._owning, self._options = host, owning, options

    def send(self, message: Encoded, timeout: float | None) -> int:
        """Append one message; its offset, once it counts."""
        receipt, left = self._queue(message, False, timeout)
        return self.outcome(receipt, left)

    def send_async(self, message: Encoded) -> _core.Receipt:
        """Queue one message; wait while `max_pending_bytes` is exceeded."""
        receipt: _core.Receipt = self._queue(message, True, None)[0]
        self.commit_if_full()
        return receipt

    def offer(self, message: Encoded) -> _core.Receipt | None:
        """The same, without waiting. None, without queueing the message, if a message that waits
        has used the sequence id."""
        receipt = self._add(message, later=True)
        if receipt is _core.UNDECIDED:
            self._host.committer.commit(self._owning)
            return None
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        found: _core.Receipt = receipt
        return found

    def commit_if_full(self) -> None:
        """Wait for the outcome of all that waits, if it exceeds `max_pending_bytes`."""
        if self.appender.holds(self._options.max_pending_bytes):
            receipt = self.appender.newest()
            if receipt is not None:
                self._host.committer.commit(self._owning)
                receipt._wait(ANSWER_SECONDS)

    def _add(self, message: Encoded, later: bool) -> Any:
        size = sum(len(part) for part in message[:3] if part is not None)
        _check_fits(1, size)
        return self.appender.add(*message, later)

    def _queue(self, message: Encoded, later: bool, timeout: float | None) -> list[Any]:
        return queued(self, lambda: self._add(message, later), message[4], timeout)

    def await_earlier(self, timeout: float | None = None) -> None:
        """Wait for the outcome of all that was accepted so far, whatever it is. WaitTimeoutError
        after `timeout` seconds."""
        waiting = self.appender.newest()
        if waiting is not None:
            self._await(waiting, timeout)

    def outcome(self, receipt: _core.Receipt, timeout: float | None) -> int:
        """The offset of an accepted message, once it counts."""
        return outcome_of(receipt, lambda: self._await(receipt, timeout))

    def _await(self, receipt: _core.Receipt, timeout: float | None) -> None:
        self._host.committer.commit(self._owning)
        if not receipt._wait(timeout):
            raise without_outcome(self._owning.topic.name, timeout)

    def send_batch(self, columns: Columns, sequence: int | None, timeout: float | None) -> int:
        """Append messages atomically, in one record; the first one's offset."""
        batch = columns.batch(self.appender)
        _check_fits(batch.count, batch.nbytes)
        return self._send_batch(batch, sequence, timeout)

    def _send_batch(self, batch: _core.Batch, sequence: int | None, timeout: float | None) -> int:
        receipt, left = queued(
            self, lambda: self.appender.add_batch(batch, sequence), sequence, timeout, batch.count
        )
        return self.outcome(receipt, left)

    def announce(self, message: Encoded) -> _core.Receipt:
        """Queue one message, the last of its record, whose properties are an announcement."""
        value, key, packed, _, _ = message
        size = sum(len(part) for part in (value, key, packed) if part is not None)
        _check_fits(1, size)
        batch = self._batch_of([(key, value, packed)])
        with self._owning.announcing(batch):
            receipt: _core.Receipt = queued(
                self, lambda: self.appender.add_batch(batch, None), None, None, 1
            )[0]
        return receipt

    def await_announced(self) -> None:
        """Wait until all earlier announcements of the session have their outcomes."""
        self._host.committer.commit(self._owning)
        self._owning.await_announced()

    def append(self, messages: Sequence[Raw]) -> tuple[int, int, int] | int:
        """Append messages atomically. Returns (offset, number, 0) for `await_flush`, or only the
        offset if the messages count already."""
        encoded: list[Encoded] = [
            (value, key, packed, None, None) for key, value, packed in messages
        ]
        _check_fits(len(encoded), sum(len(p) for m in encoded for p in m[:3] if p is not None))
        found = self._owning.append(encoded)
        if found is None:  # earlier messages wait
            return self._send_batch(self._batch_of(messages), None, None)
        return *found, 0

    def _batch_of(self, messages: Sequence[Raw]) -> _core.Batch:
        keys, values, properties = (_core.strings([m[i] for m in messages]) for i in range(3))
        return self.appender.make_batch(values, keys, properties, None)

    def served(self) -> None:
        """No effect: no transaction pauses it."""

    def await_flush(self, position: int, generation: int) -> None:
        """Return once the messages of an `append` count."""
        self._owning.await_counting(position)

    def duplicate(
        self, appender: _core.Appender, sequence: int | None, count: int = 1
    ) -> ExclusiveLogError:
        """The error for a sequence id that was used before."""
        return duplicate_sequence(
            self._owning.topic.name,
            appender.name.decode(),
            -1 if sequence is None else sequence,
            appender.durable_sequence,
            count,
        )


def _check_fits(count: int, size: int) -> None:
    room = MOST_MESSAGE_BYTES - FRAME_OVERHEAD
    if count > MAX_MESSAGES or size + count * MESSAGE_OVERHEAD > room:
        raise refusal(
            "large_messages",
            f"{count:,} message(s) of {size:,} bytes were to be sent as one; a record takes "
            f"{MAX_MESSAGES:,}, and {room:,} bytes with {MESSAGE_OVERHEAD} more for each",
        )


# ---- the session -------------------------------------------------------------------------


class ClusterSession(SessionLife):
    """One registration of a producer."""

    engine: ClusterEngine
    session: SessionFacts
    _following: Following | None

    def __init__(
        self,
        engine: ClusterEngine,
        topic: str,
        session: SessionFacts,
        owning: Owning,
        last_sequence: int,
        options: SessionOptions,
    ) -> None:
        super().__init__(engine, topic, session, options)
        self.owning = owning
        self._resumed: threading.Event | None = None  # set when a hand-over ends
        self._handed_to: tuple[str, ProducerMovedError] | None = None  # an engine's id
        self._finalizer = engine.registry.finalizer(owning)
        self.appender = _core.Appender(
            session.name.encode(),
            last_sequence,
            min(options.max_batch_messages, MOST_MESSAGES),
            min(options.max_batch_bytes, MOST_BYTES),
            session,
            engine.commit_queue,
            options.linger,
        )
        self.sending = ClusterSending(engine, owning, self.appender, options)
        owning.connect(self.appender, self)
        engine.registry.register(self)
        if owning.writer.status == "fenced" and owning.writer.error is not None:
            self.lose(owning.writer.error)  # it was fenced before it was connected

    # ---- state ---------------------------------------------------------------------------

    @property
    def ended_by(self) -> ExclusiveLogError | None:
        """What it was lost by, or is handed over by."""
        handed = None if self._handed_to is None else self._handed_to[1]
        return self._lost or handed

    def status(self) -> State:
        """Its state according to the log; changes nothing."""
        self.engine.check_not_forked()
        state = self._known_status()
        if state == "open":
            self.owning.topic.catch_up()
            state = self._known_status()  # it may have ended meanwhile, for any reason
        return state

    def _known_status(self) -> State:
        """Its state, as far as the log was read."""
        known, error = self.known_state, self.owning.writer.error
        if known is not None:
            return known
        if error is not None:
            return state_after(self.reason_of(error))
        if self._handed_to is not None and self.owning.writer.status == "closed":
            return self.state_at(self._handed_to[0])
        return "open"

    def verify(self) -> None:
        """ProducerFencedError unless the log still admits its appends."""
        self.owning.topic.catch_up()
        error = self._lost or self.owning.writer.error or self.moved
        if error is not None:
            raise error

    def reason_of(self, error: ExclusiveLogError) -> ExclusiveLogError:
        """The error for its producers after the writer ended with this one."""
        holder = getattr(error, "holder", None)
        if self._handed_to is None or holder is None:
            return error
        target, moved = self._handed_to  # it may be evicted as dead during the hand-over
        return moved if holder.engine_id == target else error

    def lose(self, error: ExclusiveLogError) -> None:
        """End the session for good, and notify the producers."""
        super().lose(self.reason_of(error))

    # ---- hand-over -----------------------------------------------------------------------

    def hand_over(self, error: ProducerMovedError, target: str) -> None:
        """Pause and drain sends, and release the topic (rule E2). Then its producers follow to the
        engine `target` if it is in this process, else they raise `error`."""
        with self.engine.registry.lock:
            if not self.usable or self._resumed is not None:
                return
            self._resumed, self._handed_to = threading.Event(), (target, error)
            self.appender.pause(SessionPaused(f"topic {self.topic!r} is being handed over"))
        following = Following(self.engine, self.owning, error)  # before others can have the topic
        try:
            self.finish()
            self.owning.release(ANSWER_SECONDS, HANDED_OVER)
        finally:
            self._end_hand_over(error, target, following)

    def _end_hand_over(self, error: ProducerMovedError, target: str, following: Following) -> None:
        there = self.engine.engine_here(target) if self.options.follow else None
        with self.engine.registry.lock:
            follows = there is not None and self.usable
            if follows:
                self._following = following
                self.moved = error
                self.appender.close_with(error)
        if not follows:
            self.lose(error)
        self._finalizer.detach()
        self.engine.registry.unregister(self)
        if follows:
            self.engine.registry.note_hand_over(self)
        assert self._resumed is not None
        self._resumed.set()

    def begin_to_follow(self) -> None:
        """Let its producers follow its topic soon, although they do not send."""
        if self._following is not None and not self.over:
            self._following.begin(self)

    def follows_in(self) -> float:
        """The seconds until that is due; negative if it is overdue, infinite while it happens."""
        following = self._following
        if following is None or self.over or self.is_following:
            return math.inf
        return following.due_in()

    @property
    def is_following(self) -> bool:
        """Does a thread let its producers follow?"""
        return self._following is not None and self._following.is_running

    def await_resumed(self, timeout: float | None) -> bool:
        """Wait for the end of a hand-over; False after `timeout` seconds."""
        resumed = self._resumed
        return resumed is None or in_slices(resumed.wait, timeout, self.engine.check_not_forked)

    # ---- what its life needs -------------------------------------------------------------

    @property
    def _sessions(self) -> Registry:
        return self.engine.registry

    @property
    def _is_released(self) -> bool:
        return self.engine.ended  # until then, it may be drained here and there

    @property
    def _is_wanted(self) -> bool:
        return self.session.notify_on_contention and self.owning.is_wanted

    def _await(self, receipt: _core.Receipt, timeout: float | None) -> None:
        self.sending._await(receipt, timeout)

    def _release(self) -> None:
        self.owning.release(ANSWER_SECONDS)

    def _commit(self, last: _core.Receipt) -> None:
        self.engine.committer.commit(self.owning)
        if not last._wait(ANSWER_SECONDS):
            last.result(0)


# ---- after a hand-over -------------------------------------------------------------------

_followers = threads.Helpers("exclusivelog-follow")
_core.in_forked_child(_followers.forget)


class Following:
    """Finds the session that has a topic after hand-overs to other engines of this process, or
    opens one there (rule E2).

    `host`: the engine of the session that hands it over, `owning`: its writer, which still has the
    topic; `moved`: the error for producers that cannot follow."""

    def __init__(self, host: ClusterEngine, owning: Owning, moved: ProducerMovedError) -> None:
        self._host, self._topic, self.moved = host, owning.topic, moved
        with owning.topic.changed:
            self._lineage = owning.lineage
            assigned = owning.topic.waiters.assigned_at(now_ms())
        reserved = math.inf if assigned is None else (assigned.until - now_ms()) / 1e3
        self._due = _core.monotonic() + min(reserved / 2, sessions.FOLLOWED_AFTER)
        self._lock = threading.Lock()
        self._running: Future[None] | None = None

    @property
    def is_within_reach(self) -> bool:
        """Has an engine of this process had the topic ever since it was handed over, as far as the
        log was read?"""
        return self._where() is not None

    def _where(self) -> tuple[Any, int] | None:
        """(engine, session) in this process that have the topic since it was handed over; session
        0 if it is only assigned; None if the topic is elsewhere."""
        log = self._topic
        with log.changed:
            if not self._lineage or log.waiters.lineage != self._lineage:
                return None  # it has had another owner
            owner, assigned = log.state.owner, log.waiters.assigned_at(now_ms())
            if owner is not None:
                engine, session = owner.holder.engine_id, owner.session
            elif assigned is not None and assigned.session == log.state.session:
                engine, session = assigned.engine_id, 0
            else:
                return None
        there = self._host.engine_here(engine)
        return None if there is None else (there, session)

    def run(self, left: ClusterSession, timeout: float | None) -> bool:
        """Give the producers of `left` their next session, or end it; False after `timeout`
        seconds."""
        running = self._begin(left)
        if not in_slices(until_settled(running), timeout, self._host.check_not_forked):
            return False
        running.result(0)
        return True

    def begin(self, left: ClusterSession) -> None:
        """Let the producers of `left` follow soon, although they do not send."""
        self._due = _core.monotonic() + sessions.FOLLOWED_AGAIN_AFTER
        self._begin(left)

    def due_in(self) -> float:
        """The seconds until producers follow that do not send."""
        return self._due - _core.monotonic()

    @property
    def is_running(self) -> bool:
        """Is a thread at it?"""
        running = self._running
        return running is not None and not running.done()

    def _begin(self, left: ClusterSession) -> Future[None]:
        # In a separate thread, because an interrupt of this one must not lose a granted session.
        with self._lock:
            running = self._running
            if running is None or running.done():
                running = self._running = Future()
                _followers.call(self._host.path, functools.partial(self._run, left, running))
            return running

    def _run(self, left: ClusterSession, outcome: Future[None]) -> None:
        try:
            # Another thread's call may have let all of them go on, and the topic may have moved
            # again since: a session that is opened for none would take it from them.
            if left.lost is None and left.listeners.all():
                self._find_next(left)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    def _find_next(self, left: ClusterSession) -> None:
        end = _core.monotonic() + FOLLOWED_WITHIN
        while _core.monotonic() < end:
            self._host.check_open()
            self._topic.catch_up()
            where = self._where()
            if where is None:
                break
            there, number = where
            # The engine may not have made the session of a grant yet.
            found = there.registry.find(number) if number else self._open_on(there, left)
            if found is not None:
                left.hand_on(found, not number)
                return
            time.sleep(0.005)
        left.lose(self.moved)

    def _open_on(self, there: Any, left: ClusterSession) -> ClusterSession | None:
        request = left.next_request(
            there.topics.number_of(self._topic.name), lineage=left.session.id
        )
        future = SessionFuture(there, request.topic, left.topic, left.options)
        try:
            there.open_producer(future, request)
            found: ClusterSession = future.result()
        except NOT_OPENED:
            return None
        self._topic.catch_up()
        if self._where() is not None:
            return found  # it may be moving on already: then it is followed again
        found.close()  # another producer has had the topic in between
        return None


# ---- all of an engine ---------------------------------------------------------------------


class Registry:
    """The sessions of one engine: granted ones, those of producers, and dropped ones. For the last,
    it wakes the engine's worker by `words` and `word`."""

    def __init__(self, words: _core.SharedWords, word: int) -> None:
        self.lock = _core.Lock()  # of all sessions: held briefly, by each change of one
        self._owning: dict[int, Owning] = {}  # by session
        # By id. A WeakSet cannot be gone through while another thread adds one.
        self._sessions = weakref.WeakValueDictionary[int, ClusterSession]()
        self._handed_over = weakref.WeakValueDictionary[int, ClusterSession]()
        self._dropped: deque[Owning] = deque()
        self._drops = _core.DropQueue(self._dropped, words, word)

    def keep(self, number: int, owning: Owning) -> None:
        """Register a session that was granted."""
        self._owning[number] = owning

    def owning(self, number: int) -> Owning | None:
        """The writer of this session."""
        return self._owning.get(number)

    def register(self, session: ClusterSession) -> None:
        """Register a session, which closing the engine closes."""
        self._sessions[id(session)] = session

    def find(self, number: int) -> ClusterSession | None:
        """The session of that number, if it is open."""
        return next((each for each in living(self._sessions) if each.session.id == number), None)

    def unregister(self, session: ClusterSession) -> None:
        """Remove a session that is closed."""
        self._sessions.pop(id(session), None)
        self._handed_over.pop(id(session), None)
        self._owning.pop(session.session.id, None)

    def note_hand_over(self, session: ClusterSession) -> None:
        """Record that this session's topic was handed over to another engine of this process."""
        self._handed_over[id(session)] = session

    def handed_over(self) -> list[ClusterSession]:
        """The sessions that were handed over, and that no producer has followed yet."""
        return living(self._handed_over)

    def all(self) -> list[Owning]:
        """All granted sessions that were not released."""
        return list(self._owning.values())

    def pending(self) -> tuple[int, int]:
        """Messages, and their bytes, that producers have queued."""
        there = [each.appender for each in self.all() if each.appender is not None]
        return sum(each.pending_messages for each in there), sum(e.pending_bytes for e in there)

    # ---- dropped -------------------------------------------------------------------------

    def finalizer(self, owning: Owning) -> _core.Finalizer:
        """A finalizer that releases the session when its producers were dropped."""
        return _core.Finalizer(owning, self._drops)

    def drop(self, number: int) -> None:
        """Release a session that no producer takes. It is kept until that is done, for an engine
        that closes before."""
        owning = self._owning.get(number)
        if owning is not None:
            self._drops.put(owning)

    def dropped(self, topic: str | None = None) -> list[Owning]:
        """The dropped sessions of a topic (None: of all), until `forget` gets them."""
        # No code runs while the copy is made; while its items are looked at, finalizers add others.
        found = self._dropped.copy()
        return [each for each in found if topic is None or each.topic.name == topic]

    def forget(self, owning: Owning) -> None:
        """Remove a session that was released."""
        with contextlib.suppress(ValueError):  # it was not dropped
            self._dropped.remove(owning)
        for number in [n for n, each in list(self._owning.items()) if each is owning]:
            self._owning.pop(number, None)

    # ---- the end -------------------------------------------------------------------------

    def close(self, error: EngineClosedError, commit: Callable[[Owning], None]) -> None:
        """Send what waits, and release all topics."""
        for session in living(self._sessions):
            session.end(error)  # what is queued is still sent
        owning = list(self._owning.values())
        deadline = _core.monotonic() + CLOSE_SECONDS
        for each in owning:
            each.drain(commit, deadline - _core.monotonic())
        for each in owning:
            each.begin_release()
        deadline = _core.monotonic() + CLOSE_SECONDS
        for each in owning:
            with contextlib.suppress(ExclusiveLogError):
                each.release(max(0.0, deadline - _core.monotonic()))

    def fail_all(self, error: EngineClosedError) -> None:
        """Fail what is still queued."""
        for each in list(self._owning.values()):
            if each.appender is not None:
                each.appender.settle([], error, True)
