"""One topic's log, as one engine follows it: a thread that reads it, and the sessions that write.

`TopicLog` folds each record once, and passes it to the writers of this engine's sessions
(`exclusivelog.cluster.log.Writer`), to those who wait (`waiting`) and to what readers need
(`recent`). `Owning` is one session's way to the log: its producers fill an appender, the engine's
commit thread hands what is there to the writer, and the thread that follows settles the receipts
once it has read the messages back as counting (rule J2).

Nothing depends on the answers to an append. What has not been read back is appended again
(`RESEND_SECONDS`); the rule counts it once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgpack

from exclusivelog import _core, threads
from exclusivelog.cluster.frames import Frame, Grant, Holder
from exclusivelog.cluster.log import Reader, Ticket, Writer
from exclusivelog.cluster.ordered import Answer, OrderedLog
from exclusivelog.cluster.recent import Recent
from exclusivelog.cluster.rule import Judged, Verdict
from exclusivelog.cluster.waiting import Leave, Wait, Waiters, decode, encode
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerIOError,
    ProducerFencedError,
    WaitTimeoutError,
)
from exclusivelog.messages import Encoded
from exclusivelog.waits import in_slices

__all__ = ["ANSWER_SECONDS", "Lost", "Owning", "TopicLog", "now_ms"]

RESEND_SECONDS = 1.0  # without progress, before what was not read back is appended again
ANSWER_SECONDS = 60.0  # for a log to show what was appended to it
LIVING = ("asking", "cancelled", "owner", "closing")  # of a writer's `status`
UNDER_WAY = 4  # batches of one session; what comes meanwhile becomes one more


def now_ms() -> int:
    """Ms since 1970."""
    return time.time_ns() // 1_000_000


class Host(Protocol):
    """The engine that follows the log."""

    id: str
    path: str
    commit_queue: _core.CommitQueue

    def check_alone(self) -> None:
        """EngineClosedError in a forked child."""

    def ownership_changed(self) -> None:
        """A grant or a release counts."""

    def look_at_waiters(self) -> None:
        """Somebody who waits may have his turn."""

    def waits_here(self, number: int) -> bool:
        """Is this a waiter of this engine?"""


class Lost(Protocol):
    """A session, which is told what becomes of it."""

    def lose(self, error: ExclusiveLogError) -> None:
        """The topic is lost for good."""

    def tell_wanted(self) -> None:
        """Another producer waits for the topic."""


# ---- one session's way to the log --------------------------------------------------------


class Owning:
    """One session's writer, and what its producers have sent. Made by `TopicLog.ask`."""

    def __init__(self, topic: TopicLog, writer: Writer) -> None:
        self.writer = writer
        self.topic = topic
        self.appender: _core.Appender | None = None  # once its session is opened
        self._session: Callable[[], Lost | None] = _no_session
        self._batches: dict[Ticket, _core.Batch] = {}  # those under way
        self._taken: set[int] = set()  # their ids
        self._done: list[Ticket] = []
        self._numbers: dict[Ticket, int] = {}  # those of `append` under way
        self._number = self._counted = 0  # the last one given, the last one with an outcome
        self._failed: tuple[int, ExclusiveLogError] | None = None  # the first one that failed
        self._lost = False

    def connect(self, appender: _core.Appender, session: Lost) -> None:
        """Send what this appender is given, and tell this session of its loss."""
        self.appender, self._session = appender, weakref.ref(session)

    # ---- sending -------------------------------------------------------------------------

    def pump(self, patient: bool = True) -> None:
        """Hand on what waits. In the engine's commit thread. `patient`: unless enough is under way
        already; then the rest follows as one batch."""
        with self.topic.changed:
            appender = self.appender
            if appender is None or (patient and len(self._batches) >= UNDER_WAY):
                return
            for batch in appender.take():
                if id(batch) not in self._taken:
                    self._send(appender, batch)

    def _send(self, appender: _core.Appender, batch: _core.Batch) -> None:
        try:
            ticket = self.writer.send(_encoded(batch), now_ms(), self._note)
        except ExclusiveLogError as error:
            _fail(appender, [], error)
        else:
            self._batches[ticket] = batch
            self._taken.add(id(batch))

    def append(self, messages: Sequence[Encoded]) -> tuple[int, int] | None:
        """Hand messages on now, past the appender: the offset that they will have, if they will be
        in the log, and a number for `await_counting`. None if others wait before them."""
        with self.topic.changed:
            self.topic.check()
            appender = self.appender
            if appender is None or appender.pending_messages:
                return None
            if appender.error is not None:
                raise appender.error
            expected = self.writer.next_offset
            ticket = self.writer.send(messages, now_ms(), self._note)
            appender.advance(self.writer.last_sequence)
            self._number += 1
            self._numbers[ticket] = self._number
            return expected, self._number

    def await_counting(self, number: int) -> None:
        """Wait until these messages count; raises what they failed with."""
        self.topic.await_change(lambda: self._counted >= number, None, "")
        if self._failed is not None and number >= self._failed[0]:
            raise self._failed[1]

    def _note(self, ticket: Ticket) -> None:
        self._done.append(ticket)
        number = self._numbers.pop(ticket, None)
        if number is not None:  # in order; after one that has failed, all do
            self._counted = number
            if ticket.error is not None and self._failed is None:
                self._failed = number, ticket.error

    # ---- outcomes ------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Is there anything to tell the producers?"""
        return bool(self._done) or (self.writer.status == "fenced" and not self._lost)

    def tell(self) -> None:
        """Settle the receipts. In the thread that follows the log, without its lock."""
        with self.topic.changed:
            done, self._done = self._done, []
            ended = [(self._batches.pop(ticket, None), ticket) for ticket in done]
            self._taken -= {id(batch) for batch, _ in ended}
            fenced = self.writer.status == "fenced" and not self._lost
            self._lost = self._lost or fenced
            error = self.writer.error if fenced else None
        appender = self.appender
        if appender is not None:
            self._settle(appender, ended, error)
        session = self._session()
        if error is not None and session is not None:
            session.lose(error)

    def _settle(
        self, appender: _core.Appender, ended: Iterable[tuple[_core.Batch | None, Ticket]],
        error: ExclusiveLogError | None,
    ) -> None:  # fmt: skip
        placed: list[tuple[_core.Batch, int]] = []
        for batch, ticket in ended:
            error = error or ticket.error
            if batch is not None and ticket.error is None:
                placed.append((batch, ticket.offset or 0))
        if error is not None:
            _fail(appender, placed, error)
        elif placed:
            appender.settle(placed)
        self.topic.host.commit_queue.put(appender, 0.0)  # it calls back, and takes what waits

    def tell_wanted(self) -> None:
        """Another producer waits for the topic."""
        session = self._session()
        if session is not None and self.writer.status == "owner":
            session.tell_wanted()

    # ---- the end -------------------------------------------------------------------------

    def release(self, timeout: float) -> None:
        """Give the topic back, behind what was handed on, and wait for that."""
        with self.topic.changed:
            self.writer.release()
        self.topic.await_change(
            lambda: self.writer.status in ("closed", "fenced"), timeout,
            "the release of the topic was not read back",
        )  # fmt: skip


def _fail(
    appender: _core.Appender, placed: list[tuple[_core.Batch, int]], error: ExclusiveLogError
) -> None:
    """Fail all that this appender has, but what is in the log, and take no more. If it was closed
    before, later calls are told so; what it had accepted is told what it failed with."""
    appender.close_with(error)
    appender.settle(placed, error)


def _no_session() -> None:
    """Stands for a reference to a session, where there is none."""


def _encoded(batch: _core.Batch) -> list[Encoded]:
    """The messages of a batch."""
    found: list[Encoded] = []
    for _, data in batch.stamp(0, 0, 0, 0, 0):
        entry = _core.Entry(data)
        for index in range(entry.count):
            message = entry.message(index)
            properties = message.properties
            packed = msgpack.packb(properties) if properties else None
            found.append(
                (message.raw_value, message.key, packed, message.event_time, message.sequence_id)
            )
    return found


# ---- one topic ---------------------------------------------------------------------------


class TopicLog:
    """One topic's log. `number` is the topic's id within its engine.

    `changed` guards everything here, and is notified with every record."""

    def __init__(self, host: Host, name: str, number: int, log: OrderedLog) -> None:
        self.host, self.name, self.id = host, name, number
        self.log = log
        self.changed = threading.Condition()
        self.words = _core.SharedWords(bytearray(8))  # the word at 0 changes with every frame
        self.recent = Recent()
        self.waiters = Waiters()
        self._reader = Reader(log)
        self.state = self._reader.state
        self._owning: list[Owning] = []
        self._waits: dict[int, bytes] = {}  # records that were not read back yet
        self._due = float("inf")  # when to append again, by the monotonic clock
        self._closed = False
        self._error: ExclusiveLogError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"exclusivelog-topic-{name}", daemon=True
        )
        threads.start(host.path, self._thread)

    # ---- calls ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended the thread that follows the log."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineClosedError(f"topic {self.name!r}: its engine was closed")

    def await_change(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until `done()`, which is called with the lock; WaitTimeoutError with `what`."""

        def wait(seconds: float) -> bool:
            with self.changed:
                return self.changed.wait_for(lambda: done() or self._ended, seconds)

        if not in_slices(wait, timeout, self.host.check_alone):
            raise WaitTimeoutError(f"topic {self.name!r}: {what} within {timeout} s")
        with self.changed:
            if not done():
                self.check()

    @property
    def _ended(self) -> bool:
        return self._closed or self._error is not None

    def catch_up(self, timeout: float = ANSWER_SECONDS) -> None:
        """Wait until all that is in the log now is read."""
        self.check()
        end = self.log.end()
        if end is None:
            return
        state = self.state
        self.await_change(
            lambda: state.position is not None and state.position >= end, timeout,
            "the log was not read to its end",
        )  # fmt: skip

    def is_wanted(self, name: str) -> bool:
        """Does another producer wait for the topic?"""
        with self.changed:
            return any(each.producer_name != name for each in self.waiters.in_order())

    @property
    def tenure(self) -> tuple[int, bool]:
        """The last session that was granted the topic, and whether it has it still."""
        return self.state.session, self.state.owned

    @property
    def owner(self) -> Grant | None:
        """The grant of the session that has the topic, as far as the log was read."""
        return self.state.grant if self.state.owned else None

    def mark(self) -> int:
        """A number that changes with every frame."""
        return self.words.load(0)

    def wake(self) -> None:
        """Wake those who wait for `mark` to change."""
        self.words.add(0, 1)
        self.words.wake(0)

    # ---- asking --------------------------------------------------------------------------

    def ask(
        self, holder: Holder, topic_epoch: int | None, seen: tuple[int, bool],
        timeout: float = ANSWER_SECONDS,
    ) -> Owning | None:  # fmt: skip
        """Ask for the topic as it is known now; None if another record came first, or `tenure` is
        not what was seen any more.

        Raises what `Writer.ask` does, and `WaitTimeoutError`, which leaves no owner behind."""
        with self.changed:
            self.check()
            if self.tenure != seen:
                return None
            writer = Writer(self.state, self._append, holder)
            owning = Owning(self, writer)
            writer.ask(topic_epoch)
            self._owning.append(owning)
        try:
            self.await_change(
                lambda: writer.status != "asking", timeout, "the topic was not granted"
            )
        except BaseException:
            with self.changed:
                writer.release()  # also if it was granted just before an interrupt
            raise
        return owning if writer.status in ("owner", "fenced") else None

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """Keep others from appending meanwhile, where the log can do that: an owner that sends
        without a pause could be faster each time."""
        alone: Callable[[], contextlib.AbstractContextManager[Any]] | None
        alone = getattr(self.log, "alone", None)
        return contextlib.nullcontext() if alone is None else alone()

    def join_queue(self, wait: Wait) -> None:
        """Let this producer wait for the topic; returns once the log shows it."""
        with self.changed:
            self.check()
            self._waits[wait.number] = encode(wait)
            self._append(self._waits[wait.number])
        self.await_change(
            lambda: wait.number not in self._waits, ANSWER_SECONDS,
            "the record of a waiting producer was not read back",
        )  # fmt: skip

    def leave_queue(self, number: int) -> None:
        """This producer waits no more."""
        with self.changed:
            self._waits.pop(number, None)
            if not self._ended:
                self._append(encode(Leave((number,))))

    # ---- appending -----------------------------------------------------------------------

    def _append(self, data: bytes) -> None:
        self._due = min(self._due, time.monotonic() + RESEND_SECONDS)
        try:
            self.log.append(data, self._answered)
        except Exception as error:  # whether it is in the log is known when it is read back
            self._answered(Answer(None, error=error))

    def _answered(self, answer: Answer) -> None:
        """An append that is not known to be stored is tried again soon."""
        if not answer.stored:
            self._due = min(self._due, time.monotonic() + RESEND_SECONDS / 10)

    def _try_again(self) -> None:
        self._due = float("inf")
        for owning in self._owning:
            if owning.writer.unsettled:
                owning.writer.resend()
        for data in list(self._waits.values()):
            self._append(data)
        if gone := self._gone():
            self._append(encode(Leave(gone)))

    @property
    def _unsettled(self) -> bool:
        if self._waits or self._gone():
            return True
        return any(each.writer.unsettled for each in self._owning)

    def _gone(self) -> tuple[int, ...]:
        """The waiters of this engine that do not wait any more, though the log says so: their
        records came late, or that of their leaving is not there yet."""
        return tuple(
            each.number
            for each in self.waiters
            if each.engine_id == self.host.id and not self.host.waits_here(each.number)
        )

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step()
        except ExclusiveLogError as error:
            self._end(None if self._closed else error)
        except BaseException as error:
            self._end(LedgerIOError(f"topic {self.name!r} cannot be followed any more: {error!r}"))
            raise
        else:
            self._end(None)

    def _step(self) -> None:
        left = max(0.0, min(RESEND_SECONDS, self._due - time.monotonic()))
        record = self._reader.receive(left)
        look = False
        with self.changed:
            if record is not None:
                look = self._take(self._reader.fold(record), record.data)
            if time.monotonic() >= self._due:
                self._try_again()
            news = [owning for owning in self._owning if owning.has_news]
        for owning in news:
            owning.tell()
        if look:
            self._forget_ended()
            self.host.look_at_waiters()

    def _take(self, judged: Judged, data: bytes) -> bool:
        """The next record; may somebody who waits have his turn now?"""
        for owning in self._owning:
            owning.writer.saw(judged)
        self.recent.take(judged, self.state, len(data))
        look = False
        if judged.verdict is Verdict.FOREIGN:
            look = self._take_wait(decode(data))
        elif judged.counts:
            look = self._take_counting(judged)
        elif judged.verdict is Verdict.AHEAD and self._unsettled:  # the frame before it was lost
            self._due = min(self._due, time.monotonic() + RESEND_SECONDS / 10)
        self.changed.notify_all()
        return look

    def _take_counting(self, judged: Judged) -> bool:
        self._due = time.monotonic() + RESEND_SECONDS if self._unsettled else float("inf")
        parsed = judged.parsed
        if isinstance(parsed, Frame):
            self.wake()
            return False
        if isinstance(parsed, Grant):
            self.waiters.granted(parsed)
        self.host.ownership_changed()
        return True

    def _take_wait(self, record: Wait | Leave | None) -> bool:
        self.waiters.take(record)
        if isinstance(record, Wait):
            self._waits.pop(record.number, None)
            if gone := self._gone():
                self._append(encode(Leave(gone)))
            for owning in self._owning:
                owning.tell_wanted()
        return record is not None

    def _forget_ended(self) -> None:
        with self.changed:
            self._owning = [
                each for each in self._owning
                if each.has_news or each.writer.status in LIVING
            ]  # fmt: skip

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
            owning, self._owning = self._owning, []
            for each in owning:
                each.writer.give_up(in_doubt, unsent)
            self.changed.notify_all()
        for each in owning:
            each.tell()
        self.wake()

    # ---- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, and close the log. Sends that were not read back are in doubt."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._reader.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        self.log.close()
        self.wake()

    def forget(self) -> None:
        """In a forked child: log, sends and thread are the parent's (rule C5)."""
        self._closed = True
        self._error = EngineClosedError(
            f"topic {self.name!r} was inherited through fork(); open an engine of your own"
        )
        self.changed = threading.Condition()  # a thread of the parent may have held the lock


def fenced_error(name: str, what: str, grant: Grant | None) -> ProducerFencedError:
    """The error for a request that is refused because of this owner (rule A5)."""
    if grant is None:
        return ProducerFencedError(f"topic {name!r} {what}")
    owner = grant.owner()
    return ProducerFencedError(
        f"topic {name!r} {what}; it is held by producer {owner.producer_name!r} of engine "
        f"{owner.engine_name!r} (id {owner.engine_id}, pid {owner.pid}), epoch {owner.epoch}",
        holder=owner,
    )
