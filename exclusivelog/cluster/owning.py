"""One session's way to a topic's log.

Its producers fill an appender, the engine's commit thread hands what is there to the writer
(`exclusivelog.cluster.log.Writer`), and the thread that follows the log (`following`) settles the
receipts once it has read the messages back as counting (rule J2).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from exclusivelog import _core
from exclusivelog.cluster.figures import Figures
from exclusivelog.cluster.log import Ticket, Writer
from exclusivelog.cluster.waiting import Wait, Waiters
from exclusivelog.errors import ExclusiveLogError, ProducerMovedError
from exclusivelog.messages import Encoded

__all__ = ["ANSWER_SECONDS", "LIVING", "Followed", "Lost", "Owning", "now_ms"]

LIVING = ("asking", "cancelled", "owner", "closing")  # of a writer's `status`
ANSWER_SECONDS = 60.0  # for a log to show what was appended to it
UNDER_WAY = 4  # batches of one session; what comes meanwhile becomes one more


def now_ms() -> int:
    """Ms since 1970."""
    return time.time_ns() // 1_000_000


class Host(Protocol):
    """The engine of the topic."""

    figures: Figures

    @property
    def commit_queue(self) -> _core.CommitQueue:
        """Of its commit thread."""


class Followed(Protocol):
    """A topic's log; `changed` guards it."""

    name: str
    id: int
    changed: threading.Condition

    @property
    def host(self) -> Host:
        """The engine that follows it."""

    def check(self) -> None:
        """Raise what has ended the thread that follows the log."""

    def await_change(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until `done()`, which is called with the lock; WaitTimeoutError with `what`."""

    def catch_up(self) -> None:
        """Wait until all that is in the log now is read."""

    @property
    def waiters(self) -> Waiters:
        """Who waits, and to whom it is assigned."""

    def is_wanted(self, name: str) -> bool:
        """Does another producer wait for the topic?"""


class Lost(Protocol):
    """A session, which is told what becomes of it."""

    def lose(self, error: ExclusiveLogError) -> None:
        """The topic is lost for good."""

    def notify_wanted(self) -> None:
        """Another producer waits for the topic."""

    def hand_over(self, error: ProducerMovedError) -> None:
        """Release the topic, and raise this error from then on."""


class Owning:
    """One session's writer, and what its producers have sent. Made by `TopicLog.ask`."""

    def __init__(self, topic: Followed, writer: Writer) -> None:
        self.writer = writer
        self.topic = topic
        self.appender: _core.Appender | None = None  # once its session is opened
        self._session: Callable[[], Lost | None] = _no_session
        self._batches: dict[Ticket, _core.Batch] = {}  # those under way
        self._taken: set[int] = set()  # their ids
        self._begun: dict[Ticket, float] = {}  # when they were handed on
        self._done: list[Ticket] = []
        self._numbers: dict[Ticket, int] = {}  # those of `append` under way
        self._number = self._counted = 0  # the last one given, the last one with an outcome
        self._failed: tuple[int, ExclusiveLogError] | None = None  # the first one that failed
        self._lost = False
        self._telling = threading.Lock()
        self.behind: tuple[Wait, ...] = ()  # of a shared session: who waited when it joined

    def connect(self, appender: _core.Appender | None, session: Lost) -> None:
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
            ticket = self.writer.send_packed(batch, now_ms(), self._note)
        except ExclusiveLogError as error:
            _fail(appender, [], error)
        else:
            self._begun[ticket] = time.monotonic()
            self._batches[ticket] = batch
            self._taken.add(id(batch))

    def append(self, messages: Sequence[Encoded]) -> tuple[int, int] | None:
        """Hand messages on now, past the appender: the offset that they will have, if they will be
        in the log, and a number for `await_counting`. None if others wait before them, or no offset
        can be told as others share the topic."""
        with self.topic.changed:
            self.topic.check()
            appender = self.appender
            if appender is None or appender.pending_messages or self.writer.is_shared:
                return None
            if appender.error is not None:
                raise appender.error
            expected = self.writer.next_offset
            ticket = self.writer.send(messages, now_ms(), self._note)
            self._begun[ticket] = time.monotonic()
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
        begun = self._begun.pop(ticket, None)
        if ticket.error is None and begun is not None:
            size, seconds = ticket.weight, time.monotonic() - begun
            self.topic.host.figures.sent(ticket.count, size, seconds)
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
        """Settle the receipts, in order. In a thread that has read on, without the topic's lock."""
        with self._telling:
            self._tell()

    def _tell(self) -> None:
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

    def notify_wanted(self) -> None:
        """Another producer waits for the topic."""
        session = self._session()
        if session is not None and self.writer.status == "owner":
            session.notify_wanted()

    # ---- the end -------------------------------------------------------------------------

    def hand_over(self, error: ProducerMovedError) -> None:
        """Have its session release the topic, whose producers raise this error from then on."""
        session = self._session()
        if session is not None:
            session.hand_over(error)

    def release(self, timeout: float, reason: str = "closed") -> None:
        """Give the topic back, behind what was handed on, and wait for that."""
        with self.topic.changed:
            self.writer.release(reason)
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
