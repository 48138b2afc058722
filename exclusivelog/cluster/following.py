"""`TopicLog`: a topic's log, which an engine follows by a thread and its sessions write to.

- `TopicLog` folds each record once, and passes it to the writers of this engine's sessions
  (`Owning`), to the queue of waiters (`waiting`) and to the memory for readers (`Recent`).
- `inspect` returns the topic's holders and waiters whose engines are alive.
- `Topics` are the topics that an engine follows.

Correctness does not depend on the log's answers: a record that is not read back is appended again
(`appending`), and the rule counts it once.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from exclusivelog import _core, threads
from exclusivelog.admission import NO_DESTINATION
from exclusivelog.cluster import checkpoints
from exclusivelog.cluster.appending import RESEND_SECONDS, Appending
from exclusivelog.cluster.births import check_first, check_granted
from exclusivelog.cluster.changes import owner_changed
from exclusivelog.cluster.checkpoints import AT_CLOSING, NOWHERE, Anchor, Checkpoint, Mark, Saving
from exclusivelog.cluster.facts import lacks_beginning, make_birth
from exclusivelog.cluster.frames import (
    EVICTED,
    MAX_BYTES,
    Frame,
    Grant,
    Holder,
    Join,
    Release,
    Terminate,
    encode,
)
from exclusivelog.cluster.log import CLOSED, Heir, Reader, Ticket, Writer
from exclusivelog.cluster.ordered import OrderedLog, Position, Record
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.cluster.waiting import (
    Assign,
    Hold,
    Noted,
    Published,
    Queue,
    Unassign,
    Wait,
    Waiters,
    Yields,
    decode,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerIOError,
    WaitTimeoutError,
)
from exclusivelog.events import log_event
from exclusivelog.foreign import Ignoring
from exclusivelog.messages import Encoded
from exclusivelog.refusals import handed_over, topic_label
from exclusivelog.types import OwnerInfo
from exclusivelog.waits import READER_LOOK_UP_SECONDS, in_slices, wait_for

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine
    from exclusivelog.cluster.sessions import ClusterSession

__all__ = [
    "ANSWER_SECONDS",
    "CLOSE_SECONDS",
    "Changes",
    "Owning",
    "Recent",
    "Seen",
    "SessionFacts",
    "TopicLog",
    "Topics",
    "await_any",
    "inspect",
    "now_ms",
    "waiter_info",
]

ANSWER_SECONDS = 60.0  # time limit for reading back an append
HELD_SECONDS = 0.5  # for a request that fences, after it has lost a race
HEIR_SECONDS = 5.0  # time limit for reading the queue before the topic is passed on
CLOSE_SECONDS = 30.0  # time limit for sending what is queued, and again for the releases
LIVING = ("asking", "cancelled", "owner", "closing")  # statuses of a writer that may still write
UNDER_WAY = 4  # unread batches of one session; later messages gather in the next one
KEPT_BYTES = 8 << 20  # bytes of frames, about
MARK_EVERY, MARK_BYTES = 500, 4 << 20  # records, or bytes of records
MOST_MARKS = 1024  # at this number, every other one is dropped, and new ones are set half as often


def now_ms() -> int:
    """Ms since 1970."""
    return time.time_ns() // 1_000_000


# ---- what readers need --------------------------------------------------------------------


class Changes:
    """A counter that threads can wait for. It is the word at 0 of `words`. `others` change with it:
    those of threads that wait for several."""

    def __init__(self) -> None:
        self.words = _core.SharedWords(bytearray(8))
        self.others: list[Changes] = []

    def mark(self) -> int:
        """The current number."""
        return self.words.load(0)

    def wake(self) -> None:
        """Change it, and wake the threads that wait."""
        self.words.add(0, 1)
        self.words.wake(0)
        for each in list(self.others):
            each.wake()


def await_any(watched: Sequence[Changes], marks: Sequence[int], seconds: float) -> None:
    """Sleep until the number of one of these is no longer what was seen, or for so many seconds, or
    less."""
    one = Changes()
    for each in watched:
        each.others.append(one)
    try:
        seen = one.mark()  # before the marks are compared: a later change ends the wait
        if [each.mark() for each in watched] == list(marks):
            left = min(max(seconds, 0.0), READER_LOOK_UP_SECONDS)
            one.words.wait(0, seen, int(left * 1e9))
    finally:
        for each in watched:
            each.others.remove(one)


class Recent:
    """An engine's memory of a topic's log: the newest frames, and marks from which to read older
    ones. Its topic serialises all calls.

    A reader at the end of a topic gets its messages here. One that is further back reads the log
    again, from the last *mark* before its position."""

    def __init__(self, first: int = -1, marks: Sequence[Mark] = (), kept_from: int = 0) -> None:
        self.first = first  # the first offset that the log has; -1: it has no message
        self._marks = [*marks] or [Mark.of(State())]
        self._since_mark = self._bytes_since_mark = 0
        self._stride = 1
        self._kept_from = kept_from  # all messages from this offset on are kept
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        self._bytes = 0

    def take(self, judged: Judged, state: State, size: int) -> None:
        """Add the next record of `size` bytes, after `state` was folded over it."""
        self._since_mark += 1
        self._bytes_since_mark += size
        if max(self._since_mark / MARK_EVERY, self._bytes_since_mark / MARK_BYTES) >= self._stride:
            self._mark(state)
        if judged.counts and isinstance(judged.parsed, Frame):
            self._keep(judged.parsed, size)

    def _mark(self, state: State) -> None:
        self._since_mark = self._bytes_since_mark = 0
        self._marks.append(Mark.of(state))
        if len(self._marks) > MOST_MARKS:
            del self._marks[1::2]
            self._stride *= 2

    @property
    def marks(self) -> list[Mark]:
        """The places to read from, in order."""
        return list(self._marks)

    # ---- frames --------------------------------------------------------------------------

    def _keep(self, frame: Frame, size: int) -> None:
        if self.first < 0:
            self.first = frame.first
        self._frames.append(frame)
        self._sizes.append(size)
        self._bytes += size
        if self._bytes > KEPT_BYTES and len(self._frames) > 1:
            self._drop()

    def _drop(self) -> None:
        """Drop the older half at once, because each drop moves all that stay."""
        count = 0
        while count < len(self._frames) - 1 and self._bytes > KEPT_BYTES // 2:
            self._bytes -= self._sizes[count]
            count += 1
        self._kept_from = self._frames[count].first
        del self._frames[:count], self._sizes[:count]

    def frames(self, position: int, most: int) -> list[Frame] | None:
        """The frames from this offset on, of about `most` bytes, at least one; None if the first of
        them is not kept."""
        if position < self._kept_from:
            return None
        if not self._frames:
            return []
        start = bisect.bisect_right(self._frames, position, key=lambda frame: frame.end)
        stop, size = start, 0
        while stop < len(self._frames) and size < most:
            size += self._sizes[stop]
            stop += 1
        return self._frames[start:stop]

    @property
    def message_bytes(self) -> float:
        """The mean size of the messages that are kept; 0.0 without one."""
        count = sum(len(frame.contents) for frame in self._frames)
        return self._bytes / count if count else 0.0

    # ---- places to read from -------------------------------------------------------------

    def mark_before(self, position: int) -> Mark:
        """The last mark at or before this offset."""
        index = bisect.bisect_right(self._marks, position, key=lambda mark: mark.next)
        return self._marks[max(0, index - 1)]

    def mark_before_time(self, time: int) -> Mark:
        """The last mark before the first message that was published at this time (ms) or later."""
        index = bisect.bisect_left(self._marks, time, key=lambda mark: mark.published)
        return self._marks[max(0, index - 1)]


# ---- the sessions that write --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The facts of a session: `id` is its number, `topic` the topic's id."""

    id: int
    topic: int
    name: str
    mode: str
    priority: int
    epoch: int
    properties: dict[str, str] = field(default_factory=dict)
    notify_on_contention: bool = False
    exclusive: bool = True


class Owning:
    """The writer of one session, and its unread sends. Made by `TopicLog.ask`.

    Its producers fill an appender, the engine's commit thread passes the messages to the writer
    (`exclusivelog.cluster.log.Writer`), and the thread that follows the log settles the receipts
    once it has read the messages back as counting (rule J2)."""

    def __init__(self, topic: TopicLog, writer: Writer) -> None:
        self.writer = writer
        self.topic = topic
        self.appender: _core.Appender | None = None  # set when its session is opened
        self._session: Callable[[], ClusterSession | None] = _no_session
        self._batches: dict[Ticket, _core.Batch] = {}  # unread batches
        self._taken: set[int] = set()  # their ids
        self._announcing: dict[int, _core.Batch] = {}  # without outcomes, by their ids
        self._begun: dict[Ticket, float] = {}  # when they were appended
        self._done: list[Ticket] = []
        self._numbers: dict[Ticket, int] = {}  # numbers of unread `append` calls
        self._number = self._counted = 0  # the last number given, the last one with an outcome
        self._failed: tuple[int, ExclusiveLogError] | None = None  # the first one that failed
        self._lost = False
        self._reporting = threading.Lock()
        self.behind: tuple[Wait, ...] = ()  # of a shared session: the waiters when it joined
        # Engines of waiters, when the release began; None: the topic is not passed on.
        self._dead: frozenset[str] | None = None
        writer.heir = _heir_of(weakref.ref(self))

    def connect(self, appender: _core.Appender | None, session: ClusterSession) -> None:
        """Take messages from this appender, and notify this session of its loss."""
        self.appender, self._session = appender, weakref.ref(session)

    # ---- sending -------------------------------------------------------------------------

    def pump(self, patient: bool = True) -> None:
        """Pass waiting messages to the writer, in the engine's commit thread. `patient`: not while
        enough batches are unread; later the rest follows as one batch."""
        with self.topic.changed:
            appender = self.appender
            if appender is None or (patient and len(self._batches) >= UNDER_WAY):
                return
            for batch in appender.take():
                if id(batch) not in self._taken and not self._send(appender, batch):
                    return

    def _send(self, appender: _core.Appender, batch: _core.Batch) -> bool:
        """False if it failed, and all that wait with it."""
        try:
            self.topic.check()  # the error that has ended it, rather than the writer's end
            announces = id(batch) in self._announcing
            ticket = self.writer.send_packed(batch, now_ms(), self._note, announces)
        except ExclusiveLogError as error:
            _fail(appender, [], error)
            return False
        self._begun[ticket] = _core.monotonic()
        self._batches[ticket] = batch
        self._taken.add(id(batch))
        return True

    def append(self, messages: Sequence[Encoded]) -> tuple[int, int] | None:
        """Pass messages to the writer now, past the appender. Returns the offset that they will
        have if they get into the log, and a number for `await_counting`. None if earlier messages
        wait, or the offset is unknown because the topic is shared."""
        with self.topic.changed:
            self.topic.check()
            appender = self.appender
            if appender is None or appender.pending_messages or self.writer.is_shared:
                return None
            if appender.error is not None:
                raise appender.error
            expected = self.writer.next_offset
            ticket = self.writer.send(messages, now_ms(), self._note)
            self._begun[ticket] = _core.monotonic()
            appender.advance(self.writer.last_sequence)
            self._number += 1
            self._numbers[ticket] = self._number
            return expected, self._number

    def announce(self, info: dict[str, str]) -> Ticket:
        """Pass an announcement without a message to the writer."""
        with self.topic.changed:
            self.topic.check()
            appender = self.appender
            if appender is not None and appender.error is not None:
                raise appender.error
            return self.writer.announce(info, now_ms())

    @contextlib.contextmanager
    def announcing(self, batch: _core.Batch) -> Iterator[None]:
        """Let the properties of this batch's last message be an announcement; the block queues
        it."""
        self._announcing[id(batch)] = batch
        try:
            yield
        except Exception:  # it was not queued
            del self._announcing[id(batch)]
            raise

    def await_announced(self) -> None:
        """Wait until no announcement is without an outcome, or no more can be made."""
        self.topic.await_change(
            self._has_announced, ANSWER_SECONDS, "an announcement has no outcome"
        )

    def _has_announced(self) -> bool:
        ended = self.writer.status != "owner" or self.appender is None or self.appender.error
        return bool(ended) or not (self._announcing or self.writer.has_said)

    def await_counting(self, number: int) -> None:
        """Wait until these messages count; raises the error if they failed."""
        self.topic.await_change(lambda: self._counted >= number, None, "")
        if self._failed is not None and number >= self._failed[0]:
            raise self._failed[1]

    def _note(self, ticket: Ticket) -> None:
        self._done.append(ticket)
        begun = self._begun.pop(ticket, None)
        if ticket.error is None and begun is not None:
            size, seconds = ticket.weight, _core.monotonic() - begun
            self.topic.host.figures.sent(ticket.count, size, seconds)
        number = self._numbers.pop(ticket, None)
        if number is not None:  # in order; after a failed one, all fail
            self._counted = number
            if ticket.error is not None and self._failed is None:
                self._failed = number, ticket.error

    # ---- outcomes ------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Is there an outcome, or a loss, to report to the producers?"""
        return bool(self._done) or (self.writer.status == "fenced" and not self._lost)

    def report(self) -> None:
        """Settle the receipts, in order. Called after reading records, without the topic's lock."""
        with self._reporting:
            self._report()

    def _report(self) -> None:
        with self.topic.changed:
            done, self._done = self._done, []
            ended = [(self._batches.pop(ticket, None), ticket) for ticket in done]
            fenced = self.writer.status == "fenced" and not self._lost
            self._lost = self._lost or fenced
            error = self.writer.error if fenced else None
        # The session is kept only where it is told: meanwhile no drop of its producers is noticed.
        if error is not None and (session := self._session()) is not None:
            error = session.reason_of(error)
            del session
        appender = self.appender
        if appender is not None:
            self._settle(appender, ended, error)
        with self.topic.changed:  # only now: until they are settled, the appender gives them again
            self._taken -= {id(batch) for batch, _ in ended}
            for batch, _ in ended:
                if self._announcing.pop(id(batch), None) is not None:
                    self.topic.changed.notify_all()
        if error is not None and (session := self._session()) is not None:
            session.lose(error)

    def _settle(
        self,
        appender: _core.Appender,
        ended: Iterable[tuple[_core.Batch | None, Ticket]],
        error: ExclusiveLogError | None,
    ) -> None:
        placed: list[tuple[_core.Batch, int]] = []
        for batch, ticket in ended:
            error = error or ticket.error
            if batch is not None and ticket.error is None:
                placed.append((batch, ticket.offset or 0))
        if error is not None:
            _fail(appender, placed, error, self.topic.error or error)
        elif placed:
            appender.settle(placed)
        # The commit thread calls back, and takes what waits.
        self.topic.host.commit_queue.put(appender, 0.0)

    @property
    def is_wanted(self) -> bool:
        """Does this session own the topic, while another producer waits for it?"""
        with self.topic.changed:
            return self._is_exclusive and self.topic.queue.is_wanted

    @property
    def lineage(self) -> int:
        """The session with which the series of hand-overs began that has led to this owner; 0 if
        it has lost the topic."""
        topic = self.topic
        return topic.waiters.lineage if topic.state.session == self.writer.session else 0

    def notify_wanted(self) -> None:
        """Notify the session that another producer waits for the topic."""
        session = self._session()
        if session is not None and self._is_exclusive:
            session.notify_wanted()

    @property
    def _is_exclusive(self) -> bool:
        return self.writer.status == "owner" and not self.writer.is_shared

    # ---- the end -------------------------------------------------------------------------

    def hand_over_if_due(self) -> None:
        """If the topic is assigned to another engine, have the session release it. Then its
        producers raise ProducerMovedError."""
        assigned = self.topic.waiters.assigned_at(now_ms())
        if assigned is None or assigned.session != self.writer.session:
            return
        if not self.topic.host.seems_to_live(assigned.engine_id):
            self.topic.withdraw_soon(assigned, NO_DESTINATION)
            return
        session = self._session()
        if session is not None and self.writer.status == "owner":
            name = self.writer.holder.producer_name
            error = handed_over(self.topic.name, name, assigned.target)
            session.hand_over(error, assigned.engine_id)

    def drain(self, commit: Callable[[Owning], None], seconds: float) -> None:
        """Wait until what was queued has its outcome, success or failure."""
        waiting = None if self.appender is None else self.appender.newest()
        if waiting is not None:
            commit(self)
            waiting._wait(max(0.0, seconds))

    def begin_release(self, reason: str = CLOSED) -> None:
        """Release the topic after all sends so far, or pass it on to the first live waiter."""
        dead = self._dead_engines() if reason == CLOSED and not self.writer.is_shared else None
        with self.topic.changed:
            self._dead = dead
            self.writer.release(reason)

    def _dead_engines(self) -> frozenset[str] | None:
        """The dead engines of waiters; None if the cluster does not tell."""
        topic = self.topic
        with topic.changed:
            engines = {each.engine_id for each in topic.waiters}
        try:
            return frozenset(each for each in engines if not topic.host.seems_to_live(each))
        except ExclusiveLogError:
            return None

    def _see_who_waits(self) -> None:
        """Read who has left the queue by now: the topic is not passed on to them (rule D4)."""
        with self.topic.changed:
            waits = self.topic.queue.is_wanted
        if waits:
            with contextlib.suppress(ExclusiveLogError):  # the release will show it
                self.topic.catch_up(HEIR_SECONDS)

    def _heir(self) -> Heir | None:
        """The waiter that gets the topic in the step that ends this session (rule C1), with the
        topic's lock. None if the first one has to wait for its delay (rule D7) or asks for an old
        epoch, and while the topic is assigned."""
        topic, dead = self.topic, self._dead
        now = now_ms()
        if dead is None or topic.waiters.assigned_at(now) is not None:
            return None
        living = (each for each in topic.waiters.in_order() if self._may_live(each, dead))
        first = next(living, None)
        if first is None or not first.inherits:
            return None
        return first.number, first.holder(now), first.announce

    def _may_live(self, waiter: Wait, dead: frozenset[str]) -> bool:
        host = self.topic.host
        if waiter.engine_id == host.id:
            return host.waits_here(waiter.number)
        return waiter.engine_id not in dead

    def release(self, timeout: float, reason: str = CLOSED) -> None:
        """Release the topic, after all sends so far, and wait for that."""
        with self.topic.changed:
            assigned = self.topic.waiters.assigned  # a grant ends it
        if reason == CLOSED and self.writer.status == "owner" and not self.writer.is_shared:
            self._see_who_waits()
        self.begin_release(reason)
        self.topic.await_change(
            lambda: self.writer.status in ("closed", "fenced"),
            timeout,
            "the release of the topic was not read back",
        )
        writer = self.writer
        if writer.status == "closed" and not writer.is_shared:
            log_change(self.topic, writer.epoch, "release", reason, writer.holder)
            moved = assigned is not None and assigned.session == writer.session
            if moved and not writer.has_passed_on:
                log_change(self.topic, writer.epoch, "assigned", "unload", writer.holder, assigned)


def _fail(
    appender: _core.Appender,
    placed: list[tuple[_core.Batch, int]],
    error: ExclusiveLogError,
    later: ExclusiveLogError | None = None,
) -> None:
    """Fail all messages of this appender that are not in the log, and take no more. Later calls
    raise `later` (None: the same error), or that with which it was closed before."""
    appender.close_with(later or error)
    appender.settle(placed, error)


def _heir_of(owning: weakref.ref[Owning]) -> Callable[[], Heir | None]:
    """What a writer asks when it closes. It does not keep its session: that would be a cycle."""

    def heir() -> Heir | None:
        found = owning()
        return None if found is None else found._heir()

    return heir


def _no_session() -> None:
    """Used in place of a weak reference if there is no session."""


class Writers:
    """The sessions of one engine that write to one topic. The topic serialises all calls."""

    def __init__(self) -> None:
        self._all: list[Owning] = []

    def add(self, owning: Owning) -> None:
        """Add a session that asks for the topic."""
        self._all.append(owning)

    def saw(self, judged: Judged) -> None:
        """Pass the next record of the log to all writers."""
        for owning in self._all:
            owning.writer.saw(judged)

    def joined(self, session: int, behind: tuple[Wait, ...]) -> None:
        """Record the waiters that were in the queue when this shared session was admitted."""
        for owning in self._all:
            if owning.writer.session == session:
                owning.behind = behind

    def notify_wanted(self) -> None:
        """Notify the session that another producer waits for the topic."""
        for owning in self._all:
            owning.notify_wanted()

    @property
    def has_owner(self) -> bool:
        """Does one of these own the topic?"""
        return any(each.writer.status == "owner" for each in self._all)

    @property
    def unsettled(self) -> bool:
        """Was any appended record not read back yet?"""
        return any(each.writer.unsettled for each in self._all)

    @property
    def have_said(self) -> bool:
        """Was an announcement not read back yet?"""
        return any(each.writer.has_said for each in self._all)

    def hold(self, held: bool) -> None:
        """Let them append no frames for a while, or go on."""
        for owning in self._all:
            owning.writer.hold(held)

    def resend(self) -> None:
        """Append again the records that were not read back."""
        for owning in self._all:
            if owning.writer.unsettled:
                owning.writer.resend()

    def with_news(self) -> list[Owning]:
        """The sessions that have something to report."""
        return [owning for owning in self._all if owning.has_news]

    def forget_ended(self) -> None:
        """Drop sessions that have ended and reported that."""
        self._all = [each for each in self._all if each.has_news or each.writer.status in LIVING]

    def end(self, in_doubt: ExclusiveLogError, unsent: ExclusiveLogError) -> list[Owning]:
        """Fail all sends, because the log is not followed any more: unread ones as in doubt."""
        ended, self._all = self._all, []
        for each in ended:
            each.writer.give_up(in_doubt, unsent)
        return ended


# ---- one topic ----------------------------------------------------------------------------


class TopicLog:
    """One topic's log. `number` is the topic's id within its engine; `first` is the record with
    which the topic began, if that is known (`births`).

    `changed` guards everything here, and is notified with every record."""

    def __init__(
        self,
        host: ClusterEngine,
        name: str,
        number: int,
        log: OrderedLog,
        checkpoint: Checkpoint | None = None,
        first: Anchor | None = None,
    ) -> None:
        if log.max_bytes < MAX_BYTES:
            raise ValueError(
                f"log takes records of {log.max_bytes} bytes; it must take {MAX_BYTES}"
            )
        self.host, self.name, self.id = host, name, number
        self.log = log
        self.changed = threading.Condition()
        self.frames = Changes()  # changed by every frame
        self.owners = Changes()  # changed where those who watch its owner have to look
        self.watches: list[Callable[[Judged, bytes], None]] = []  # called with each folded record
        start = checkpoint or Checkpoint(NOWHERE, State(), -1)
        self.recent = Recent(start.first, start.marks, start.state.next)
        self._appending = Appending(log, self._stored)
        self.queue = Queue(host, self._appending.append)
        self._continue_from(start)
        self.saving = Saving(host.place, name, start.anchor, not host.readonly)
        self.state = start.state
        self._first, self._begun = first, False
        self._reader = Reader(log, self.state, self.check_first)
        self._writers = Writers()
        self._inherited: dict[int, Owning] = {}  # that waiters here were passed, by their numbers
        # When it became free, as far as this process knows, in ns of the monotonic clock (rule D7).
        self.freed = _core.now()
        self._held_until = math.inf  # by the monotonic clock; see `Hold`
        self._closed = False
        self._error: ExclusiveLogError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"exclusivelog-topic-{name}", daemon=True
        )
        threads.start(host.path, self._thread)

    def _continue_from(self, start: Checkpoint) -> None:
        for record in start.queue:
            self.waiters.take(record)

    # ---- calls ---------------------------------------------------------------------------

    @property
    def error(self) -> ExclusiveLogError | None:
        """The error that has ended the thread which follows the log."""
        return self._error

    def check(self) -> None:
        """Raise the error that has ended the thread which follows the log."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineClosedError(f"topic {self.name!r}: its engine was closed")

    def await_change(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until `done()`, which is called with the lock; WaitTimeoutError with `what`."""

        def wait(seconds: float) -> bool:
            with self.changed:
                return wait_for(self.changed, lambda: done() or self._ended, seconds)

        if not in_slices(wait, timeout, self.host.check_not_forked):
            raise WaitTimeoutError(f"topic {self.name!r}: {what} within {timeout} s")
        with self.changed:
            if not done():
                self.check()

    @property
    def _ended(self) -> bool:
        return self._closed or self._error is not None

    def catch_up(self, timeout: float = ANSWER_SECONDS) -> None:
        """Read the log up to its current end."""
        self.check()
        end = self.log.end()
        if end is None:
            return
        state = self.state
        self.await_change(
            lambda: state.position is not None and state.position >= end,
            timeout,
            "the log was not read to its end",
        )

    @property
    def waiters(self) -> Waiters:
        """The waiters, as far as the log was read."""
        return self.queue.waiters

    # ---- the beginning -------------------------------------------------------------------

    def check_first(self, record: Record) -> None:
        """LedgerCorruptedError unless the topic began with this record."""
        self._first = check_first(self.name, self._first, record)

    def begin(self) -> None:
        """Before a request is appended: make the topic begin if it is empty, and have all engines
        of the place know its first record.

        Raises `LedgerCorruptedError` if the topic began with another record than this engine has
        read: then that was removed, with all that came before."""
        if self._begun:
            return
        self._make_first()
        first = self._first
        assert first is not None, "the first record was checked when it was read"
        if self.host.births.register(self.name, first) != first:
            raise lacks_beginning(self.name, "other engines have read records before its first one")
        self._begun = True

    def _make_first(self) -> None:
        """Wait for the log's first record; append one if there is none."""
        birth, deadline = make_birth(), _core.monotonic() + ANSWER_SECONDS
        while self.state.position is None:
            if _core.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"topic {self.name!r}: its first record was not read back within "
                    f"{ANSWER_SECONDS} s"
                )
            with self.changed:
                self.check()
                self._appending.append(birth)
            with contextlib.suppress(WaitTimeoutError):
                self.await_change(lambda: self.state.position is not None, RESEND_SECONDS, "")

    def _check_seen(self, judged: Judged) -> None:
        """LedgerCorruptedError if the sender of a record has read a grant that this engine has not:
        then one of them lacks the beginning of the log, and it is not the sender."""
        check_granted(self.name, self.state, judged)

    # ---- asking --------------------------------------------------------------------------

    def ask(
        self,
        holder: Holder,
        topic_epoch: int | None,
        seen: tuple[int, bool, int],
        announce: dict[str, str] | None,
        follows: int | None,
        timeout: float = ANSWER_SECONDS,
    ) -> Owning | None:
        """Ask for the topic on the basis of the records read so far, and `announce` this with the
        grant; None: what the session `follows` has announced, if no other one has since. None if
        another record came first, or `tenure` differs from `seen`.

        Raises the errors of `Writer.ask`, and `WaitTimeoutError`, after which this is not the
        owner."""
        self.begin()
        with self.changed:
            self.check()
            if self.state.tenure != seen:
                return None
            last = self.state.announced
            if announce is None and last is not None and last.grant.session == follows:
                announce = last.info
            owning = self._session_of(holder, announce)
            writer = owning.writer
            writer.ask(topic_epoch)
            self._writers.add(owning)
        try:
            self.await_change(
                lambda: writer.status != "asking", timeout, "the topic was not granted"
            )
        except BaseException:
            with self.changed:
                writer.release()  # it may have been granted just before an interrupt
            raise
        return owning if writer.status in ("owner", "fenced") else None

    def evict(self, session: Grant | Join, reason: str = EVICTED) -> None:
        """Release a session of another engine, for this reason."""
        with self.changed:
            self.check()
            self._appending.append(encode(Release(session.epoch, session.session, reason)))

        def is_over() -> bool:
            if isinstance(session, Join):
                return session.session not in self.state.shared
            return not self.state.owned or self.state.session != session.session

        self.await_change(is_over, ANSWER_SECONDS, "an eviction was not read back")

    def agree_to_yield(self, session: int) -> None:
        """Tell the others that this owner releases the topic when another producer waits."""
        with self.changed:
            self.check()
            self.queue.publish(Yields(session))

    def publish(self, record: Published) -> None:
        """Append a record of the queue (a wait, or an assignment), and wait until it is read
        back."""
        self.begin()
        with self.changed:
            self.check()
            self.queue.publish(record)
        self.await_change(
            lambda: self.queue.is_published(record),
            ANSWER_SECONDS,
            "the record of a waiting producer or of a move was not read back",
        )

    def withdraw(self, assigned: Assign, reason: str) -> bool:
        """End a hand-over for this reason (rule E4). False if it had ended already."""
        with self.changed:
            epoch, owner = self.state.epoch, self.state.owner
        self.publish(Unassign(assigned.number, reason))
        if self.queue.withdrew:
            self._log_withdrawal(assigned, reason, epoch, owner)
        return self.queue.withdrew

    def withdraw_soon(self, assigned: Assign, reason: str) -> None:
        """The same, without waiting until the record is read back."""
        record = Unassign(assigned.number, reason)
        with self.changed:
            self.check()
            if not self.queue.is_published(record):
                return
            self.queue.publish(record)
            epoch, owner = self.state.epoch, self.state.owner
        self._log_withdrawal(assigned, reason, epoch, owner)

    def _log_withdrawal(
        self, assigned: Assign, reason: str, epoch: int, owner: Grant | None
    ) -> None:
        source = None if owner is None else owner.holder
        log_change(self, epoch, "cancel", reason, source, assigned)

    def terminate(self) -> int:
        """End all writing for good; the next offset, which no message will have (rule G8)."""
        self.begin()
        deadline = _core.monotonic() + ANSWER_SECONDS
        while not self._try_to_terminate():
            if _core.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"topic {self.name!r}: its termination was not read back within "
                    f"{ANSWER_SECONDS} s"
                )
        return self.state.next

    def _try_to_terminate(self) -> bool:
        """Append a termination, and wait until it counts, can never count, or may be lost."""
        state = self.state
        with self.changed:
            self.check()
            seen = state.epoch, state.session
            if not state.terminated:
                self._appending.append(encode(Terminate(*seen)))

        def is_settled() -> bool:
            return state.terminated or (state.epoch, state.session) != seen

        with contextlib.suppress(WaitTimeoutError):
            self.await_change(is_settled, RESEND_SECONDS, "")
        return state.terminated

    def leave_queue(self, number: int) -> None:
        """Remove this producer from the queue."""
        with self.changed:
            if not self._ended:
                self.queue.leave(number)

    def inherited(self, number: int) -> Owning | None:
        """The session by which the topic was passed on to this waiter of this engine."""
        with self.changed:
            return self._inherited.get(number)

    def disinherit(self, number: int) -> Owning | None:
        """The same, for the last time."""
        with self.changed:
            return self._inherited.pop(number, None)

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._guard(self._step)
        if self._error is None:
            self._end(None)

    def _guard(self, step: Callable[[], None]) -> None:
        """Take a step, unless this has ended; an error ends it."""
        try:
            if not self._closed:
                step()
        except ExclusiveLogError as error:
            self._end(None if self._closed else error)
        except BaseException as error:
            self._end(LedgerIOError(f"topic {self.name!r} cannot be followed any more: {error!r}"))
            raise

    def _step(self) -> None:
        held = max(0.0, self._held_until - _core.monotonic())
        self._advance(self._reader.receive(min(self._appending.seconds, held)))

    def _stored(self, position: Position, data: bytes) -> None:
        """Callback of the log, in one of its threads: it has stored a record of this process
        there."""
        with self.changed:
            self._appending.answers.add(position, data)
        with Ignoring(Exception):
            # This has ended, and the log's thread must not get the error.
            self._guard(lambda: self._advance(None))

    def _advance(self, record: Record | None) -> None:
        """Take the next record, and records of this process that directly follow it, by their
        answers."""
        promotable = False
        with self.changed:
            answers, state = self._appending.answers, self.state
            while record is not None or (record := answers.next(state.position)) is not None:
                before = state.session, state.owned
                promotable = self._take(self._reader.fold(record), record, before) or promotable
                record = None
            self._save_if_due()
            if _core.monotonic() >= self._held_until:
                self._held_until = math.inf
                self._writers.hold(False)
            if self._appending.is_due():
                self._append_again()
            news = self._writers.with_news()
        for owning in news:
            owning.report()
        if promotable:
            with self.changed:
                self._writers.forget_ended()
            self.host.wake_worker()

    def _append_again(self) -> None:
        """Append again what was not read back."""
        self._writers.resend()
        self.queue.append_again()
        if self._held_until < math.inf:  # frames were left out
            self._appending.resend_soon()

    def _save_if_due(self, part: int = 1) -> None:
        """Save a checkpoint, if one is due, and this engine owns the topic or no engine does."""
        free = not (self.state.owned or self.state.shared)
        if self.saving.is_due(part) and (free or self._writers.has_owner):
            self.saving.save(self._checkpoint())

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            self.saving.anchor,
            self.state,
            self.recent.first,
            self.recent.marks,
            self.waiters.records(),
        )

    def _take(self, judged: Judged, record: Record, before: tuple[int, bool]) -> bool:
        """Apply the next record. Returns whether a waiter may be promoted now. `before`: the last
        session that was granted the topic before it, and did it still have it?"""
        data = record.data
        self._check_seen(judged)
        if judged.verdict is not Verdict.REPEATED:
            self.saving.saw(record)
        if judged.counts and isinstance(judged.parsed, Grant):
            self._inherit(judged.parsed)
        self._writers.saw(judged)
        self.recent.take(judged, self.state, len(data))
        for watch in self.watches:
            watch(judged, data)
        promotable = False
        if judged.verdict is Verdict.FOREIGN:
            promotable = self._take_foreign(data)
        elif judged.counts:
            promotable = self._take_counting(judged, before)
        elif judged.verdict is Verdict.AHEAD and self._unsettled:  # an earlier frame was lost
            self._appending.resend_soon()
        self.changed.notify_all()
        return promotable

    def _inherit(self, grant: Grant) -> None:
        """Take a topic that its owner passes on to a waiter of this engine. One that has left the
        queue gives it back (rule D5)."""
        if not grant.by or grant.holder.engine_id != self.host.id:
            return
        owning = self._session_of(grant.holder)
        owning.writer.inherit(grant)
        self._writers.add(owning)
        if self.host.waits_here(grant.waiter):
            self._inherited[grant.waiter] = owning
        else:
            owning.writer.release()

    def _session_of(self, holder: Holder, announce: dict[str, str] | None = None) -> Owning:
        label, append = topic_label(self.name), self._appending.append
        return Owning(self, Writer(self.state, append, holder, topic=label, announce=announce))

    @property
    def _unsettled(self) -> bool:
        return self.queue.unsettled or self._writers.unsettled

    def _take_counting(self, judged: Judged, before: tuple[int, bool]) -> bool:
        parsed = judged.parsed
        others = self._writers.have_said or self.queue.unsettled
        if not (others and isinstance(parsed, Frame)):
            # Frames may count all the time, while another record was lost.
            self._appending.progress(others or self._writers.unsettled)
        if isinstance(parsed, Frame):
            self.frames.wake()
            return False
        if isinstance(parsed, Grant):
            self.waiters.granted(parsed, *before)
        elif isinstance(parsed, Join):
            self.waiters.joined()
            self._writers.joined(parsed.session, tuple(self.waiters))
        elif isinstance(parsed, Terminate):
            self.frames.wake()  # wakes readers at the end
        elif isinstance(parsed, Release):
            self.freed = _core.now()
        self.host.ownership_changed()
        return True

    def _take_foreign(self, data: bytes) -> bool:
        """Apply a record that the rule does not know. May a waiter be promoted now?"""
        record = decode(data)
        return record is not None and self._take_queue_record(record)

    def _take_queue_record(self, record: Noted) -> bool:
        self.queue.take(record, self.state.owning)
        if isinstance(record, Wait):
            self._writers.notify_wanted()
        elif isinstance(record, Hold):
            self._held_until = _core.monotonic() + HELD_SECONDS
            self._writers.hold(True)
        return not isinstance(record, Yields | Hold)

    def _end(self, error: ExclusiveLogError | None) -> None:
        why = f": {error}" if error is not None else ""
        in_doubt = LedgerIOError(
            f"topic {self.name!r} is not followed any more, the send is in doubt{why}"
        )
        unsent = EngineClosedError(
            f"topic {self.name!r} is not followed any more; nothing was sent{why}"
        )
        with self.changed:
            self._error, self._closed = error, True
            ended = self._writers.end(in_doubt, unsent)
            self.changed.notify_all()
        for each in ended:
            each.report()
        self._wake_readers()

    def _wake_readers(self) -> None:
        self.frames.wake()
        self.owners.wake()

    # ---- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, and close the log. Unread sends are in doubt."""
        with self.changed:
            if not self._ended:
                self._save_if_due(AT_CLOSING)
            self._closed = True
            self.changed.notify_all()
        self._reader.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        self.saving.close()
        self.log.close()
        self._wake_readers()

    def forget(self) -> None:
        """Drop log, sends and thread in a forked child (rule C5)."""
        self._closed = True
        self._error = EngineClosedError(
            f"topic {self.name!r} was inherited through fork(); open an engine of your own"
        )
        self.changed = threading.Condition()  # a thread of the parent may have held the lock


# ---- what is logged ----------------------------------------------------------------------


def log_change(
    topic: TopicLog,
    epoch: int,
    kind: str,
    reason: str,
    source: Holder | None,
    target: Holder | Assign | None = None,
) -> None:
    """Log a change of the topic's owner, or a step of its hand-over, that this engine has made."""
    event = owner_changed(now_ms(), topic.name, epoch, kind, reason, source, target)
    log_event(topic.host.path, event)


# ---- who has it, and who waits ------------------------------------------------------------


class Seen(NamedTuple):
    """A topic's holders and its waiters, best first, whose engines are alive; the session to be
    released because its engine is dead; `State.tenure`; and the engine to which the topic is
    assigned (rule E3). `elsewhere`: that is not the engine that asks; `everyone`: the waiters of
    all engines, also of those that the assignment leaves out."""

    owner: Grant | None
    shared: tuple[Join, ...]
    queue: tuple[Wait, ...]
    dead: tuple[Grant | Join, ...]
    tenure: tuple[int, bool, int]
    assigned: Assign | None
    elsewhere: Assign | None
    everyone: tuple[Wait, ...]
    epoch: int

    @property
    def free(self) -> bool:
        """Does the topic have no holder, and may this engine have it?"""
        return self.owner is None and not self.shared and self.elsewhere is None

    @property
    def holders(self) -> list[OwnerInfo]:
        """The sessions that hold the topic."""
        return [each.owner() for each in ((self.owner,) if self.owner else self.shared)]

    def first(self, leave_out: int = 0) -> OwnerInfo | None:
        """The holder or waiter that a refusal names (rule A5)."""
        waiters = [waiter_info(each) for each in self.everyone if each.number != leave_out]
        return next(iter([*self.holders, *waiters]), None)


def inspect(topic: TopicLog, lives: Callable[[str], bool], engine: str = "") -> Seen:
    """The topic's holders and waiters, as far as its log was read, for a request of `engine`: if
    the topic is assigned to that, waiters of other engines are left out."""
    with topic.changed:
        having, queue = Having.of(topic.state), topic.waiters.in_order()
        assigned = topic.waiters.assigned_at(now_ms())
    return look(having, queue, assigned, lives, engine)


class Having(NamedTuple):
    """The sessions that have a topic, of live engines and of dead ones, `State.tenure`, and the
    epoch."""

    owner: Grant | None
    shared: tuple[Join, ...]
    tenure: tuple[int, bool, int]
    epoch: int

    @classmethod
    def of(cls, state: State) -> Having:
        """Those after these records."""
        joins = tuple([shared.join for shared in state.shared.values()])
        return cls(state.owner, joins, state.tenure, state.epoch)


def look(
    there: Having,
    queue: Sequence[Wait],
    assigned: Assign | None,
    lives: Callable[[str], bool],
    engine: str,
) -> Seen:
    """The same, from the facts: `queue` in order, and the assignment that is in force."""
    owner, shared, tenure, epoch = there
    having: list[Grant | Join] = [*([] if owner is None else [owner]), *shared]
    alive = {each.holder.engine_id for each in having} | {each.engine_id for each in queue}
    alive = {each for each in alive if lives(each)}
    owner_lives = owner is not None and owner.holder.engine_id in alive
    if assigned is not None and not lives(assigned.engine_id):
        assigned = None
    elsewhere = assigned if assigned is not None and assigned.engine_id != engine else None
    everyone = tuple([each for each in queue if each.engine_id in alive])
    if assigned is not None and elsewhere is None and not (owner_lives or shared):
        queue = [each for each in queue if each.engine_id == engine]
    return Seen(
        owner if owner_lives else None,
        tuple([each for each in shared if each.holder.engine_id in alive]),
        tuple([each for each in queue if each.engine_id in alive]),
        tuple([each for each in having if each.holder.engine_id not in alive]),
        tenure,
        assigned,
        elsewhere,
        everyone,
        epoch,
    )


def waiter_info(waiter: Wait) -> OwnerInfo:
    """A waiter, as errors show it."""
    return OwnerInfo(
        engine_id=waiter.engine_id,
        engine_name=waiter.engine_name,
        pid=waiter.pid,
        producer_name=waiter.producer_name,
        access_mode=waiter.access_mode,
        priority=waiter.priority,
        epoch=0,
        since=waiter.since,
        session=waiter.number,
        properties=waiter.properties,
    )


# ---- the topics of an engine --------------------------------------------------------------


def id_of(name: str) -> int:
    """The topic's id, computed from its name, so that the processes of a Spark query agree on it.

    >>> id_of("orders") == id_of("orders") != id_of("bills"), id_of("orders").bit_length() < 63
    (True, True)
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2


class Topics:
    """The topics of an engine, by id, with the logs of those that it follows. `kinds`: of those
    whose names begin so."""

    def __init__(self, host: ClusterEngine, kinds: Mapping[str, type[TopicLog]]) -> None:
        self._host, self._kinds = host, kinds
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._followed: dict[int, TopicLog] = {}

    def number_of(self, name: str) -> int:
        """The id of a topic: the same in all engines."""
        with self._lock:
            return self._numbers.setdefault(name, id_of(name))

    def named(self, name: str) -> TopicLog:
        """The log of the topic of that name, followed from now on."""
        return self.followed(self.number_of(name))

    def followed(self, number: int) -> TopicLog:
        """The topic's log, followed from now on."""
        found = self._followed.get(number)
        if found is not None:
            return found
        with self._lock:
            self._host.check_open()
            found = self._followed.get(number)
            if found is None:
                name = next(name for name, each in self._numbers.items() if each == number)
                found = self._open(name, number)
                self._followed[number] = found
            return found

    def _open(self, name: str, number: int) -> TopicLog:
        """Begin to follow a log; LedgerCorruptedError if it is known to lack its beginning."""
        host = self._host
        log = host.place.open(name)
        try:
            checkpoint = checkpoints.load(host.place, name, log)
            first = host.births.known(name, log, goes_on=checkpoint is not None)
            kinds = (kind for prefix, kind in self._kinds.items() if name.startswith(prefix))
            return next(kinds, TopicLog)(host, name, number, log, checkpoint, first)
        except BaseException:
            log.close()
            raise

    def all(self) -> list[TopicLog]:
        """The logs that are followed."""
        with self._lock:
            return list(self._followed.values())

    def close(self) -> None:
        """Close all logs."""
        for each in self.all():
            each.close()

    def forget(self) -> None:
        """Drop all logs in a forked child."""
        for each in list(self._followed.values()):
            each.forget()
