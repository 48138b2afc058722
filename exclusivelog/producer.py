"""Producers: sending, and noticing the loss of a topic."""

from __future__ import annotations

import datetime as dt
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from exclusivelog import _core
from exclusivelog._core import Outcome
from exclusivelog.access import Session, Transfer
from exclusivelog.announcements import check_info
from exclusivelog.encoding import (
    Encoded,
    Raw,
    Serializer,
    encode_columns,
    encode_message,
    encode_sequence,
)
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    ProducerBusyError,
    ProducerFencedError,
    ProducerMovedError,
    TopicNotFoundError,
    WaitTimeoutError,
)
from exclusivelog.futures import GrantFuture
from exclusivelog.handover import Moving, moved_error
from exclusivelog.log import REPAIRABLE, check_may_write, duplicate, refusal, repair
from exclusivelog.transaction import Sender, Transaction
from exclusivelog.types import AccessMode, Move
from exclusivelog.unload import UnloadFuture, Unloading, begin_move, check_groups
from exclusivelog.waits import check_seconds, check_timeout, in_slices

if TYPE_CHECKING:
    from exclusivelog.ledger import Ledger
    from exclusivelog.reader import Reader
    from exclusivelog.runtime import Runtime

SENT_AT_ONCE = 64 << 10  # bytes; a message from there on goes the long way, with its checks
_LONGEST = threading.TIMEOUT_MAX
FOLLOWED_WITHIN = 5.0  # seconds, by a producer whose topic was handed over
MOST = {
    "max_batch_messages": 10_000_000,
    "max_batch_bytes": 1 << 30,
    "max_pending_bytes": 2**63 - 1,
}
NO_MESSAGE: Any = object()  # None is a tombstone
State = Literal["open", "fenced", "moved", "closed"]
Sent = TypeVar("Sent")
Send = Callable[["Producer", "float | None"], Sent]
Placed = TypeVar("Placed", bound="int | tuple[int, int, int]")


@dataclass(slots=True)
class Appended:
    """What `Producer.append` has appended: its first offset, and up to where the journal must be
    flushed before it may be acknowledged (rule H1)."""

    producer: Producer
    offset: int
    position: int = 0
    generation: int = 0
    flushed: bool = False


@dataclass(frozen=True)
class Options:
    """How a producer sends; `topic.producer` tells what each option means."""

    linger: float = 0.0
    max_batch_messages: int = 100_000
    max_batch_bytes: int = 1 << 20
    max_pending_bytes: int = 64 << 20
    dumps: Serializer | None = None
    on_fenced: Callable[[Producer, ProducerFencedError], object] | None = None
    on_wanted: Callable[[Producer], object] | None = None
    follow: bool = True

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: it takes a whole number, 1 to {most}")
        check_seconds(self.linger, "linger", "seconds from 0 on")
        if self.on_fenced is not None and not callable(self.on_fenced):
            raise TypeError("on_fenced takes a function of (producer, error)")
        if self.on_wanted is not None and not callable(self.on_wanted):
            raise TypeError("on_wanted takes a function of (producer)")


class Producer(Sender):
    """Sends messages to one topic. Made by `topic.producer`; may be shared by threads.

    Losing the topic is final (rule B4): every call but `close` then raises the same
    ProducerFencedError, and a new producer must be opened.

    >>> with engine.topic("orders").producer("exclusive") as producer:
    ...     producer.send(b"first"), producer.send(b"second")
    (0, 1)
    """

    def __init__(
        self, engine: Runtime, topic: str, session: Session, last_sequence: int, options: Options,
        keeper: object = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self._keeper = keeper  # what gives the session back, where that is not the producer itself
        self.session = session
        self._leash = engine.leash(session)  # an abandoned producer must not stay an owner
        if keeper is not None:
            self._leash.let_go()
        self.appender = _core.Appender(
            session.name.encode(), last_sequence, options.max_batch_messages,
            options.max_batch_bytes, session, engine.committer.agenda, options.linger, self._leash,
        )  # fmt: skip
        assert engine.ledger.journal is not None
        self.appender.connect(
            engine.ledger.journal, engine.ledger.lockfile.words,
            engine.ledger.lockfile.topic_word(session.topic), session.topic, session.epoch,
            session.id, session.exclusive, not engine.unflushed,
        )  # fmt: skip
        self._engine = engine
        self._options = options
        self._announced = session.announce  # the last it said, for who follows the topic with it
        self._dumps = options.dumps
        self._max_pending = options.max_pending_bytes
        self._lost: ExclusiveLogError | None = None
        self._moving: threading.Event | None = None
        self._moved: ProducerMovedError | None = None  # where it was handed over to
        self._successor: Producer | None = None  # that it sends through since then,
        self._opened: Producer | None = None  # and which is its own
        self._followers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._closed = False
        self._closing = threading.RLock()
        engine.ledger.start_checkpoints()
        engine.committer.start()
        engine.adopt(self)

    # ---- facts ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name under which sequence ids are counted (rule G2)."""
        return self.session.name

    @property
    def access_mode(self) -> AccessMode:
        """The mode that was asked for."""
        return AccessMode(self.session.mode)

    @property
    def priority(self) -> int:
        """The place in the queue it was asked for with; cannot be changed (rule D2)."""
        return self.session.priority

    @property
    def topic_epoch(self) -> int:
        """The epoch it writes under. Keep it to reconnect with `topic_epoch=` (rule B5)."""
        return self.session.epoch if self._successor is None else self._successor.topic_epoch

    @property
    def last_sequence_id(self) -> int:
        """The last sequence id sent under this name, -1 if none was (rule G2)."""
        if self._successor is not None and self._successor.name == self.name:
            return self._successor.last_sequence_id
        return self.appender.last_sequence

    @property
    def state(self) -> State:
        """What became of it, looked up in the ledger without sending anything (rule C6):
        "open", "fenced", "moved" or "closed"."""
        if self._lost is None and not self._closed and self._successor is not None:
            if self._successor.state == "open":
                return "open"
            self._share_the_end_of(self._successor)
        if self._closed or self._is_with_a_closed_engine():
            return "closed"
        if self._lost is None:
            self._engine.check_open()
            self._look(FOLLOWED_WITHIN)  # what is committed is told in a moment
            if self._closed:  # by another thread meanwhile: what was found is told to nobody
                return "closed"
        if self._lost is None and self._moved is not None and self._successor is None:
            self._end_unless_within_reach()
        if isinstance(self._lost, ProducerMovedError):
            return "moved"
        return "open" if self._lost is None else "fenced"

    def _end_unless_within_reach(self) -> None:
        # What was reserved for an engine of this process may be another one's by now.
        where = self._engine.sessions.whereabouts(self.session.topic, self._chain)
        if where is None or self._engine.sibling(where[0]) is None:
            self._end_moved()

    def _is_with_a_closed_engine(self) -> bool:
        followed = self._successor is not None
        return self._engine.closed and not self._engine.forked and not followed

    def _look(self, patience: float = 0.0) -> None:
        with self._engine.ledger.read() as tables:
            try:
                check_may_write(tables, tables.topic(self.session.topic), self.session)
            except ProducerFencedError as error:
                lost = error
            except ExclusiveLogError:
                return
            else:
                return
        moving = self._moving  # not before: a hand-over pauses this one first, then commits
        if moving is not None:
            if in_slices(moving.wait, patience, self._engine.check_alone):
                self._look()
        elif self._moved is None:  # else the next send finds out
            self.lose(lost)

    def lose(self, error: ExclusiveLogError) -> None:
        """The topic is somebody else's, for good: fail what waits, tell the application."""
        with self._closing:
            if self._lost is not None or self._closed:
                return
            # One and the same error, whoever notices first (rule B4); but one that follows its
            # topic may lose it a second time.
            first = self.appender.condemn(error)
            self._lost = error if first is self._moved else first
            error = self._lost
            self._let_sends_go_on()
        self._engine.committer.fail(self.appender, error)
        for follower in list(self._followers):
            follower.lose(error)
        if self._options.on_fenced is not None:
            self._engine.call_soon(self._tell_fenced)

    def _tell_fenced(self) -> None:
        if self._options.on_fenced is not None and isinstance(self._lost, ProducerFencedError):
            self._options.on_fenced(self, self._lost)

    # ---- hand-over and transactions ------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Where its messages go."""
        return self._engine.ledger

    def here(self, numbered: bool) -> Producer:
        """Who sends what this one is given: itself, or who has its topic by now in this process
        (rule E2). Waits while it is on its way. `numbered`: with ids of its own name."""
        return self._through(lambda p, _: p._itself(), None, 0 if numbered else None)

    def _itself(self) -> Producer:
        if isinstance(self.appender.error, ProducerMovedError):
            raise self.appender.error
        self._check()
        return self

    def stand_still(self) -> bool:
        """Let sends wait, and commit what was accepted before; False if the topic has moved."""
        with self._closing:
            self._check()
            if self._moving is not None or self._moved is not None:
                return False
            self.pause()
        self.drain()
        return True

    def drain(self) -> None:
        """Commit what was accepted so far."""
        self.appender.await_sends()
        self._engine.committer.commit(self.appender)

    def private_appender(self) -> _core.Appender:
        """One for a transaction: it goes on where this producer's own is."""
        return _core.Appender(
            self.session.name.encode(), self.appender.last_sequence,
            self._options.max_batch_messages, self._options.max_batch_bytes, self.session,
        )  # fmt: skip

    def pause(self) -> None:
        """The topic is to be handed over, or a transaction commits: sends wait; what was
        accepted is still sent."""
        with self._closing:
            if self._moving is None and self.usable:
                self._moving = threading.Event()
                self.appender.pause(Moving(f"topic {self.topic!r} is being handed over"))

    def resume(self) -> None:
        """The hand-over has ended: those who waited go on, or learn where the topic is."""
        with self._closing:
            self.appender.resume()
            self._let_sends_go_on()

    def _let_sends_go_on(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.set()

    def hand_off(self, to: Transfer) -> None:
        """The topic was handed over, for good: where its new owner is in this process, sends
        go there from now on (rule E2); else this is the end of this producer."""
        error = moved_error(self.topic, self.name, to)
        if not self._options.follow or self._engine.sibling(to.target) is None:
            self.lose(error)
            return
        with self._closing:
            if self._lost is None and not self._closed:
                self._chain, self._moved = to.chain, error
                self.appender.condemn(error)

    def _through(
        self, send: Send[Sent], timeout: float | None, sequence: int | None = None
    ) -> Sent:
        """What `send(producer, seconds left)` gives, once the topic is nowhere on its way, and
        wherever it went."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            try:
                return send(self, left)
            except Moving:
                self._await_move(deadline, timeout)
                left = _left(deadline)
            except ProducerMovedError as error:
                if error is not self._moved:
                    raise
                error.__traceback__ = None  # it is kept, and must not keep this producer
                return self._send_there(send, timeout, deadline, sequence)

    def _await_move(self, deadline: float | None, timeout: float | None) -> None:
        moving = self._moving
        self._engine.check_free()
        if moving is not None and not in_slices(
            moving.wait, _left(deadline), self._engine.check_alone
        ):
            raise self._still_moving(timeout)

    def _still_moving(self, timeout: float | None) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"topic {self.topic!r} is being handed over, or a transaction commits, and it took "
            f"longer than timeout={timeout} s; nothing was sent"
        )

    def _send_there(
        self, send: Send[Sent], timeout: float | None, deadline: float | None,
        sequence: int | None,
    ) -> Sent:  # fmt: skip
        successor = self._follow(deadline, timeout)
        if sequence is not None and successor.name != self.name and self._moved is not None:
            raise self._moved  # its ids are counted under another name
        try:
            return successor._through(send, _left(deadline), sequence)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(f"{error} (timeout={timeout} s)") from None
        except (ProducerFencedError, EngineClosedError):
            self._share_the_end_of(successor)
            raise self._lost or self._closed_error() from None

    def _follow(self, deadline: float | None, timeout: float | None) -> Producer:
        """The producer, in this process, that has the topic now."""
        left = _left(deadline)
        if not self._closing.acquire(
            timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)
        ):
            raise self._still_moving(timeout)
        try:
            self._check()
            if self._successor is None:
                self._successor = self._find_successor(deadline, timeout)
                self._engine.disown(self)
            self._skip_those_who_have_moved_on()
            successor = self._successor
            if successor is None:
                self._end_moved()
                raise self._lost or self._closed_error()
            successor._followers.add(self)
            return successor
        finally:
            self._closing.release()

    def _skip_those_who_have_moved_on(self) -> None:
        # Of all producers that the topic went through only the last one is needed, and what was
        # opened on its behalf.
        while self._successor is not None and self._successor._successor is not None:
            passed, self._successor = self._successor, self._successor._successor
            if self._opened is passed:
                self._opened, passed._opened = passed._opened, None

    def _find_successor(self, deadline: float | None, timeout: float | None) -> Producer | None:
        end = time.monotonic() + FOLLOWED_WITHIN
        while time.monotonic() < end:
            where = self._engine.sessions.whereabouts(self.session.topic, self._chain)
            neighbour = None if where is None else self._engine.sibling(where[0])
            if where is None or neighbour is None:
                return None
            session = where[1]
            if session:
                # Its engine may not have come to making the producer yet.
                found = neighbour.find_producer(session)
            else:
                found = self._open_there(neighbour)
            if isinstance(found, Producer):
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise self._still_moving(timeout)
            time.sleep(0.001)
        return None

    def _open_there(self, engine: Runtime) -> Producer | None:
        session = self.session
        options = replace(self._options, on_fenced=None)  # its followers are told
        try:
            future = ProducerFuture(engine, session.topic, self.topic, options)
            mode = AccessMode.EXCLUSIVE if session.exclusive else AccessMode.SHARED
            engine.open_producer(
                future, mode.value, name=session.name, priority=session.priority,
                claim=None, timeout=None, settle=0, properties=session.properties,
                yields=options.on_wanted is not None, follows=self._chain,
                announce=self._announced,
            )  # fmt: skip
            self._opened = future.result()
        except (ProducerFencedError, ProducerBusyError):  # somebody else has been faster
            return None
        except (EngineClosedError, TopicNotFoundError):  # neither engine nor topic wait for us
            return None
        return self._opened

    def _share_the_end_of(self, successor: Producer) -> None:
        if isinstance(successor._lost, ProducerFencedError):
            self.lose(successor._lost)
        else:  # it was closed: the topic is not here any more
            self._end_moved()

    def _end_moved(self) -> None:
        if self._moved is not None:
            self.lose(self._moved)

    def fenced_by(self, error: ProducerFencedError) -> ExclusiveLogError:
        """What a send is told that met this error."""
        if isinstance(error, ProducerMovedError):
            return error
        if self._closed:
            return self._closed_error()  # it was given back, by another thread
        if self._moving is not None:
            return Moving(str(error))  # it came just behind the hand-over
        if self._moved is not None:
            return self._moved
        self.lose(error)
        return self._lost or error

    @property
    def usable(self) -> bool:
        """True unless it is known to be closed, fenced or moved."""
        return self._lost is None and self._moved is None and not self._closed

    def tell_wanted(self) -> None:
        """Somebody waits for the topic."""
        wanted = self._options.on_wanted
        if wanted is not None and self.usable:
            self._engine.call_soon(lambda: wanted(self))

    # ---- move ----------------------------------------------------------------------------

    def move(self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()) -> Move:
        """Move this producer, and no other one, to another engine (rules E1 to E4).

        An exclusive producer moves with its topic, a shared one without the other shared producers.
        To do this from another process, pass the producer's name to `engine.unload`.

        - `to`, `timeout`, `groups`: as in `engine.unload`.

        What the producer has accepted is committed first. The place of a shared producer, with its
        name and sequence ids, is reserved for the destination's next shared producer until the
        deadline; waiters do not get the topic meanwhile. This producer then raises
        ProducerMovedError; where `to` is an engine of its own process, its sends go through that
        engine instead.

        Raises ProducerFencedError and EngineClosedError as `send` does, and LedgerError if there is
        no such engine.

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     first, second = (a.topic("orders").producer(name=name) for name in ("x", "y"))
        ...     first.move(to=b.id).state, first.send(b"by b"), second.send(b"by a")
        ('assigned', 0, 1)
        """
        _, unloading = self._begin_move(to, timeout, groups)
        return unloading.run()[0]

    def move_async(
        self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()
    ) -> UnloadFuture:
        """Begin what `move` does, and return a future with a list of one `Move` (see
        `Engine.unload_async`).

        >>> with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        ...     first = a.topic("orders").producer()
        ...     [move] = first.move_async(to=b.id).result(timeout=10)
        ...     move.state
        'assigned'
        """
        engine, unloading = self._begin_move(to, timeout, groups)
        return UnloadFuture(engine, unloading).start()

    def _begin_move(
        self, to: str, timeout: float, groups: Iterable[str]
    ) -> tuple[Runtime, Unloading]:
        """Begin to move the producer that currently sends for this one."""
        chosen = check_groups(groups)

        def begin(producer: Producer, left: float | None) -> tuple[Runtime, Unloading]:
            producer._check()
            if producer._successor is not None and producer._moved is not None:
                raise producer._moved
            engine, session = producer._engine, producer.session
            try:
                return engine, begin_move(engine, producer.topic, session, to, timeout, chosen)
            except ProducerFencedError as error:
                raise producer.fenced_by(error) from None

        return self._through(begin, None)

    # ---- send ----------------------------------------------------------------------------

    def catch_up(self, reader: Reader) -> Iterator[_core.Message]:
        """Iterate over this topic from the reader's position to its end (rule D8).

        A new owner that does so before its first send has seen all that former owners wrote: they
        cannot append any more. Raises ProducerFencedError at the end if this producer has lost the
        topic meanwhile; then its successor may have appended more.

        >>> with topic.producer() as before:
        ...     _ = before.send(b"old")
        >>> with topic.producer("wait_for_exclusive") as producer:
        ...     [message.value for message in producer.catch_up(topic.reader())]
        [b'old']
        """
        ours = reader.ledger is self._engine.ledger and reader.topic_id == self.session.topic
        if not ours:
            raise ValueError(f"reader: it takes one of topic {self.topic!r}, not {reader!r}")
        self._check()
        return self._catch_up(reader)

    def _catch_up(self, reader: Reader) -> Iterator[_core.Message]:
        yield from reader
        self._look()
        self._check()

    def send(
        self, value: Any, *, key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None, sequence_id: int | None = None,
        timeout: float | None = None, transaction: Transaction | None = None,
    ) -> int:  # fmt: skip
        """Append one message; its offset, once it is durable (rules B9, H1).

        - `value`: bytes, or whatever the producer's serializer takes; None is a tombstone.
        - `key`: bytes or str; None and b"" differ.
        - `properties`: a mapping of str to str.
        - `event_time`: a datetime (naive: UTC) or ms since 1970; None and 0 differ.
        - `sequence_id`: 0 to 2**63 - 1, growing; by default counted.
        - `timeout`: seconds to wait for other producers' commits (None: for ever). On
          WaitTimeoutError the message is still on its way, where the error's `maybe_written` is
          True; else (the topic was being handed over) nothing was sent.
        - `transaction`: append it when that commits. Its offset is not known before, and -1 is
          returned; `transaction.offsets` has it afterwards (rule G3).

        Raises ProducerFencedError, DuplicateSequenceError, LedgerFullError, LedgerIOError,
        TopicTerminatedError; the last two tell by `maybe_written` what is known.

        >>> producer.send(b"hello", key="greeting", properties={"lang": "en"})
        0
        """
        if (
            type(value) is bytes and key is None and properties is None and event_time is None
            and sequence_id is None and self._dumps is None and timeout is None
            and transaction is None and len(value) < SENT_AT_ONCE
        ):  # fmt: skip
            # The most frequent call by far. What is closed or lost, the appender knows, too.
            try:
                offset = self.appender.send(value)
            except ProducerMovedError as error:
                error.__traceback__ = None  # it is kept, and must not keep this producer
                offset = -1
            if offset >= 0:
                return offset
        check_timeout(timeout)
        message = self._encode(value, key, properties, event_time, sequence_id)
        if transaction is not None:
            transaction.add(
                self, lambda appender: self._put(appender, message), numbered=message[4] is not None
            )
            return -1
        return self._through(lambda p, left: p._send(message, left), timeout, message[4])

    def _put(self, appender: _core.Appender, message: Encoded) -> None:
        if appender.add(*message) is None:
            raise duplicate(self._engine.ledger, appender, message[4])

    def _send(self, message: Encoded, timeout: float | None) -> int:
        if timeout is None and sum(len(part or b"") for part in message[:3]) < SENT_AT_ONCE:
            sent = self._send_now(lambda: self.appender.send(*message), message[4])
            if sent is not None:
                return sent
        receipt = self.appender.add(*message)
        if receipt is None:
            raise duplicate(self._engine.ledger, self.appender, message[4])
        return self._outcome(receipt, timeout)

    def _send_now(self, send: Callable[[], Placed], sequence: int | None) -> Placed | None:
        """Append past the queue; None if there is one, and this must stand behind it."""
        ledger = self._engine.ledger
        try:
            outcome = send()
            while isinstance(outcome, int) and -outcome in REPAIRABLE:
                repair(ledger, self.appender, -outcome)
                outcome = send()
        except ProducerFencedError as error:
            raise self.fenced_by(error) from None
        if not isinstance(outcome, int) or outcome >= 0:
            return outcome
        if -outcome == Outcome.QUEUED:
            return None
        raise refusal(ledger, self.appender, -outcome, sequence)

    def send_async(
        self, value: Any, *, key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None, sequence_id: int | None = None,
    ) -> _core.Receipt:  # fmt: skip
        """Queue one message and go on. The `Receipt` is a future with the offset: it can be
        waited for, given callbacks, and awaited.

        Messages are committed in order, together with others, at the latest after `linger`.
        With `max_pending_bytes` waiting, the call commits before it returns. Arguments and
        errors as in `send`; wrong arguments raise at once.

        >>> receipts = [producer.send_async(b"%d" % i) for i in range(3)]
        >>> [receipt.result() for receipt in receipts]
        [0, 1, 2]
        """
        appender = self.appender
        if (
            type(value) is bytes and key is None and properties is None and event_time is None
            and sequence_id is None and self._dumps is None and len(value) < SENT_AT_ONCE
        ):  # fmt: skip
            # The most frequent call by far. What is closed or lost, the appender knows, too.
            try:
                receipt = appender.add(value, None, None, None, None, True)
            except ProducerMovedError as error:
                error.__traceback__ = None
                alone = value, None, None, None, None
                return self._through(lambda p, _: p._add(alone), None)
        else:
            message = self._encode(value, key, properties, event_time, sequence_id)
            try:
                receipt = appender.add(*message, True)
            except ProducerMovedError as error:
                error.__traceback__ = None
                return self._through(lambda p, _: p._add(message), None, message[4])
        if receipt is None:
            raise duplicate(self._engine.ledger, appender, sequence_id)
        if appender.holds(self._max_pending):
            self._engine.committer.commit(appender)
        return receipt

    def offer(
        self, value: Any, *, key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None, sequence_id: int | None = None,
    ) -> _core.Receipt | None:  # fmt: skip
        """`send_async` that never waits: for an event loop. None, and nothing was queued, where
        the topic was handed over, or is about to be, and who sends may have to wait."""
        message = self._encode(value, key, properties, event_time, sequence_id)
        try:
            receipt = self.appender.add(*message, True)
        except ProducerMovedError as error:
            error.__traceback__ = None
            return None
        if receipt is None:
            raise duplicate(self._engine.ledger, self.appender, sequence_id)
        if self.appender.holds(self._max_pending):
            self._engine.committer.agenda.put(self.appender, 0.0)
        return receipt

    @property
    def is_moving(self) -> bool:
        """May a send have to wait for a hand-over now?"""
        return isinstance(self.appender.error, ProducerMovedError)

    def _add(self, message: Encoded) -> _core.Receipt:
        receipt = self.appender.add(*message, True)
        if receipt is None:
            raise duplicate(self._engine.ledger, self.appender, message[4])
        if self.appender.holds(self._max_pending):
            self._engine.committer.commit(self.appender)
        return receipt

    def send_many(
        self, values: Iterable[Any], *, keys: Iterable[bytes | str | None] | None = None,
        properties: Iterable[Mapping[str, str] | None] | None = None,
        event_times: Iterable[dt.datetime | int | None] | None = None,
        sequence_id: int | None = None, timeout: float | None = None,
        transaction: Transaction | None = None,
    ) -> range:  # fmt: skip
        """Append messages atomically: after any crash all are there, or none (rule G3).

        `values` and `keys` take an iterable, or a pyarrow array of binary or string (no
        copy per message); a pyarrow RecordBatch with columns `value` and, if it has them,
        `key` and `event_time`, can stand for all three. `sequence_id` is the first
        message's. Returns the offsets. Errors as in `send`; a batch with one used-up
        sequence id is refused whole. With `transaction` they enter the log when that commits,
        and the range is empty.

        >>> producer.send_many([b"a", b"b", None], keys=["x", "y", "x"])
        range(0, 3)
        """
        check_timeout(timeout)
        columns = encode_columns(values, keys, properties, event_times, self._dumps)
        count = columns.values.count
        self._check()
        if count == 0:
            next_offset = self._engine.latest(self.session.topic).next_offset
            return range(next_offset, next_offset)
        sequence = None if sequence_id is None else encode_sequence(sequence_id)
        if transaction is not None:
            transaction.add(
                self,
                lambda appender: self._put_batch(appender, columns.batch(appender), sequence),
                numbered=sequence is not None,
            )
            return range(-1, -1)

        def send(producer: Producer, left: float | None) -> int:
            return producer._send_batch(columns.batch(producer.appender), sequence, left)

        first = self._through(send, timeout, sequence)
        return range(first, first + count)

    def _put_batch(
        self, appender: _core.Appender, batch: _core.Batch, sequence: int | None
    ) -> None:
        if appender.add_batch(batch, sequence) is None:
            raise duplicate(self._engine.ledger, appender, sequence)

    def _send_batch(self, batch: _core.Batch, sequence: int | None, timeout: float | None) -> int:
        if timeout is None and batch.small:
            sent = self._send_now(lambda: self.appender.send_batch(batch, sequence), sequence)
            if sent is not None:
                return sent
        receipt = self.appender.add_batch(batch, sequence)
        if receipt is None:
            raise duplicate(self._engine.ledger, self.appender, sequence)
        return self._outcome(receipt, timeout)

    # ---- append now, flush later ---------------------------------------------------------

    def append(self, messages: Sequence[Raw]) -> Appended:
        """Append messages atomically, and return before they are flushed: who has called
        acknowledges them only behind `await_flush`. Large ones are flushed at once.

        Raises as `send` does. Internal: for shared states, whose threads share flushes.
        """
        if len(messages) == 1:
            key, value, properties = messages[0]
            if len(value or b"") + len(key or b"") < SENT_AT_ONCE:
                # The most frequent call by far, as in `send`.
                appender = self.appender
                try:
                    outcome = appender.append(value, key, properties)
                except ProducerMovedError as error:
                    error.__traceback__ = None
                    outcome = -1
                if type(outcome) is tuple:
                    return self._appended(outcome)
        return self._through(lambda p, _: p._append(messages), None)

    def _append(self, messages: Sequence[Raw]) -> Appended:
        call = self.appender.append
        key, value, properties = messages[0]
        if len(messages) == 1 and len(value or b"") + len(key or b"") < SENT_AT_ONCE:
            outcome = self._send_now(lambda: call(value, key, properties), None)
            batch = None if isinstance(outcome, tuple) else self._batch_of(messages)
        else:
            batch = self._batch_of(messages)
            outcome = None
            if batch.small:
                outcome = self._send_now(lambda: self.appender.append_batch(batch), None)
        if not isinstance(outcome, tuple):  # it is large, or others wait before it
            assert batch is not None
            return Appended(self, self._send_batch(batch, None, None), flushed=True)
        return self._appended(outcome)

    def _appended(self, outcome: tuple[int, int, int]) -> Appended:
        flushes = self.appender.flushes
        if not flushes:
            self.appender.announce()
        return Appended(self, *outcome, not flushes)

    def _batch_of(self, messages: Sequence[Raw]) -> _core.Batch:
        keys, values, properties = ([m[column] for m in messages] for column in range(3))
        return self.appender.make_batch(
            _core.strings(values), _core.strings(keys) if any_given(keys) else None,
            _core.strings(properties) if any_given(properties) else None, None,
        )  # fmt: skip

    def await_flush(self, appended: Appended) -> None:
        """Return once what `append` has appended is durable; one flush serves all who wait.

        Raises LedgerIOError where it failed, EngineClosedError where the engine was closed
        meanwhile; the messages may be in the log then (rule B9).
        """
        if appended.flushed:
            return
        ledger = self._engine.ledger
        assert ledger.journal is not None
        outcome = ledger.journal.flush_to(appended.position, appended.generation)
        if outcome != Outcome.PLACED:
            error = refusal(ledger, self.appender, outcome)
            error.maybe_written = True
            raise error
        if not appended.flushed:
            appended.flushed = True
            self.appender.announce()

    def _encode(
        self, value: Any, key: Any, properties: Any, event_time: Any, sequence_id: Any
    ) -> Encoded:
        if self._lost is not None or self._closed or self._engine.closed:
            self._check()
        return encode_message(value, key, properties, event_time, sequence_id, self._dumps)

    def _outcome(self, receipt: _core.Receipt, timeout: float | None) -> int:
        if timeout is None:
            self._engine.committer.commit(self.appender, receipt)
        else:
            self._engine.committer.commit_within(self.appender, receipt, timeout)
        if not receipt.done():
            raise without_outcome(self.topic, timeout)
        try:
            return receipt.result()
        except ProducerFencedError as error:
            raise self.fenced_by(error) from None

    def _check(self) -> None:
        self._engine.check_alone()
        if self._successor is None:  # else it is the successor's engine that counts
            self._engine.check_open()
        if self._lost is not None:
            raise self._lost
        if self._closed:
            raise self._closed_error()

    # ---- announce ------------------------------------------------------------------------

    def announce(
        self, info: Mapping[str, str], *, message: Any = NO_MESSAGE,
        transaction: Transaction | None = None,
    ) -> None:  # fmt: skip
        """Publish something about this owner that may change, such as its address or progress.

        It is durable and fenced, as a send is (rules B2, B3). Any process reads it as
        `topic.announcement`.

        - `info`: a mapping of str to str, at most 16 KiB. It replaces the former announcement, and
          stays after this producer is closed, until the next owner announces.
        - `message`: a value to append to the topic in the same transaction, with `info` as its
          properties. Default: no message.
        - `transaction`: announce when this transaction commits. Default: commit at once.

        `topic.producer(..., announce=info)` announces in the transaction of the grant. Raises what
        `send` raises, and ValueError for a shared producer, which owns nothing.

        >>> owner = topic.producer("exclusive")
        >>> owner.announce({"address": "tcp://127.0.0.1:7002"})
        >>> topic.announcement.info["address"]
        'tcp://127.0.0.1:7002'
        """
        given = check_info(info)
        if not self.session.exclusive:
            raise ValueError(
                f"announce: producer {self.name!r} of topic {self.topic!r} is shared; only an "
                "owner announces. Open it with another access mode"
            )
        if transaction is None:
            self._check()
        announcing = transaction or Transaction(self._engine)
        announcing.announce(self, given)
        if message is not NO_MESSAGE:
            self.send(message, properties=given, transaction=announcing)
        if transaction is None:
            announcing.commit()

    def has_announced(self, info: dict[str, str]) -> None:
        """It is committed; who follows the topic says the same."""
        self._announced = info

    # ---- flush and close -----------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far has its outcome; raises what the last of it failed
        with.

        `timeout` in seconds (None: for ever), then WaitTimeoutError. A fenced producer
        raises, even if nothing waits (rule B3).
        """
        check_timeout(timeout)
        self._check()
        self._through(lambda p, left: p._flush(left), timeout)

    def _flush(self, timeout: float | None) -> None:
        if isinstance(self.appender.error, ProducerMovedError):
            raise self.appender.error
        waiting = self.appender.newest()
        if waiting is not None:
            self._outcome(waiting, timeout)
        else:
            self._look()
            self._check()

    def close(self) -> None:
        """Send what waits, then give the topic back: the next waiter is promoted in the same
        transaction (rule C1). Closing twice, or a fenced producer, does nothing (rule B3).

        In a signal handler or a finalizer that struck inside a transaction of this very
        thread, another thread closes it as soon as that is over."""
        if self._engine.forked:
            return
        if self._engine.busy_here:
            self._engine.call_later(self.close)
            return
        failure = None
        try:
            with self._closing:
                if self._closed:
                    return
                self._closed = True
                if self._moved is not None:
                    self._leave_the_successor()
                    return
                self.appender.condemn(self._closed_error())  # what is queued is still sent
                self._let_sends_go_on()
            if self._lost is None and not self._engine.closed:
                failure = self._drain_and_release()
            self._leash.let_go()
        except BaseException:
            # Interrupted, or the disk is full: a closed producer must not stay an owner.
            if self._closed:
                self._leash.pull()
            raise
        self._end(failure)

    def abandon(self) -> None:
        """Nobody has this producer, as after an interrupt: the engine gives its session back."""
        self._leash.pull()

    def _leave_the_successor(self) -> None:
        """Close what was opened to follow the topic; another one's producer stays open."""
        self._engine.disown(self)
        self._leash.let_go()
        if self._opened is not None:
            self._opened.close()

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(f"producer {self.name!r} of topic {self.topic!r} is closed")

    def _end(self, failure: ExclusiveLogError | None) -> None:
        try:
            self._engine.committer.fail(self.appender, self._closed_error())
        finally:
            self._engine.disown(self)
        if failure is not None:
            raise failure

    def _drain_and_release(self) -> ExclusiveLogError | None:
        failure = None
        waiting = self.appender.newest()
        if waiting is not None:
            self._engine.committer.commit(self.appender, waiting)
            error = waiting.exception()
            if isinstance(error, ExclusiveLogError):
                failure = error
        if self._keeper is None:
            self._engine.release(self.session)
        return None if isinstance(failure, ProducerFencedError) else failure

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Producer {self.name!r} of topic {self.topic!r}, {self.access_mode}, "
            f"epoch {self.topic_epoch}>"
        )


class ProducerFuture(GrantFuture[Producer]):
    """A producer that may have to wait for its turn. `cancel()` leaves no trace (rule D5)."""

    _engine: Runtime

    def __init__(self, engine: Runtime, topic: int, name: str, options: Options) -> None:
        super().__init__(engine, topic)
        self._topic, self._options = name, options

    def make(self, session: Session, last_sequence: int) -> Producer:
        """The producer of a session that was granted."""
        return Producer(self._engine, self._topic, session, last_sequence, self._options)


def without_outcome(topic: str, timeout: float | None) -> WaitTimeoutError:
    """What a send is told whose outcome took longer than its timeout: to send again would append
    the message twice."""
    error = WaitTimeoutError(
        f"topic {topic!r}: no outcome within timeout={timeout} s; what was sent is still on its "
        "way. Send it again only with the same sequence_id"
    )
    error.retriable, error.maybe_written = False, True
    return error


def any_given(column: Iterable[object]) -> bool:
    """Has any message one?"""
    return any(item is not None for item in column)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
