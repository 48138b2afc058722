"""Producers: sending messages, and detecting that the topic is lost."""

from __future__ import annotations

import datetime as dt
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from exclusivelog import _core
from exclusivelog._core import Receipt
from exclusivelog.arguments import check_groups, check_timeout
from exclusivelog.backend import (
    SENT_AT_ONCE,
    EngineBackend,
    Moves,
    ProducerSession,
    SessionOptions,
    SessionPaused,
    State,
)
from exclusivelog.closing import Closing
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    ProducerFencedError,
    ProducerMovedError,
    WaitTimeoutError,
)
from exclusivelog.messages import (
    Columns,
    Encoded,
    Raw,
    Serializer,
    check_info,
    encode_columns,
    encode_message,
    encode_sequence,
)
from exclusivelog.reads import Caller, this_caller
from exclusivelog.sessions import state_after
from exclusivelog.transaction import (
    SendingProducer,
    Transaction,
    check_transaction,
)
from exclusivelog.types import AccessMode, Move, ProducerStats
from exclusivelog.unload import UnloadFuture, check_move
from exclusivelog.waits import GrantFuture

__all__ = ["Producer", "Receipt"]

if TYPE_CHECKING:
    from exclusivelog.reader import Reader


NO_MESSAGE: Any = object()  # None is a tombstone
Sent = TypeVar("Sent")

# One for all producers, held briefly by each change of a session: one each would take 48 bytes.
_changing = _core.Lock()


def _after_fork_in_child() -> None:
    global _changing
    _changing = _core.Lock()  # the parent's may be held by a thread that does not exist here


_core.in_forked_child(_after_fork_in_child)


@dataclass(slots=True)
class Append:
    """What `ProducerSender.append` has appended: its first offset, and the journal position up to
    which must be flushed before it may be acknowledged (rule H1)."""

    sender: ProducerSender
    offset: int
    position: int = 0
    generation: int = 0
    flushed: bool = False

    def await_flush(self) -> None:
        """Return once it is durable; one flush serves all waiting threads.

        Raises LedgerIOError if the flush failed, EngineClosedError if the engine was closed
        meanwhile; the messages may be in the log then (rule B9).
        """
        if self.flushed:
            return
        sending = self.sender.session.sending
        sending.await_flush(self.position, self.generation)
        if not self.flushed:
            self.flushed = True
            sending.appender.announce()


class ProducerSender:
    """Sends for one producer under its present session.

    The session notifies it: once the topic is lost, every call fails; after a hand-over within the
    process, it continues with the next session. Transactions, shared states and event loops use it
    directly. `appender`: what `Producer.send` calls on its fast path.
    """

    # A process may have a hundred thousand of them.
    __slots__ = (
        "__weakref__",
        "_callers",
        "_closed",
        "_last_sequence",
        "_lost",
        "_moved",
        "_producer",
        "appender",
        "engine",
        "first",
        "options",
        "session",
        "topic",
    )

    def __init__(
        self,
        engine: EngineBackend,
        topic: str,
        session: ProducerSession,
        options: Options,
        producer: weakref.ref[Producer] | None,
    ) -> None:
        self.topic = topic
        self.appender = session.sending.appender
        self.engine, self.session = engine, session
        self.first = session.session  # the producer has its name, mode and priority
        self._last_sequence = -1
        self.options = options
        self._producer = producer  # for its callbacks; None: it has none
        self._callers: tuple[Caller, ...] = ()  # whose `with` blocks have sent by it
        self._lost: ExclusiveLogError | None = None
        self._moved: ProducerMovedError | None = None  # the last move that it has followed
        self._closed = False

    # ---- facts ---------------------------------------------------------------------------

    @property
    def ledger(self) -> object:
        """What stores its messages."""
        return self.engine.ledger

    @property
    def usable(self) -> bool:
        """False once it is known to be closed, fenced or moved."""
        return self._lost is None and not self._closed and self.session.usable

    @property
    def state(self) -> State:
        """What `Producer.state` returns."""
        if self._closed:
            return "closed"
        if self._lost is not None:
            return state_after(self._lost)
        found = self.session.status()
        return "moved" if found == "closed" and self._moved is not None else found

    @property
    def last_sequence_id(self) -> int:
        """The last sequence id sent under the producer's name; -1 if there is none (rule G2)."""
        if self.session.session.name == self.first.name:
            return self.session.sending.appender.last_sequence
        return self._last_sequence

    def was_lost_by(self, error: BaseException) -> bool:
        """Whether this is the error with which the producer has lost its topic. Each of its calls
        raises the same one (rule B4)."""
        if not isinstance(error, ProducerFencedError):
            return False
        session = self.session
        # A receipt may fail before its session is told; its appender has the error by then.
        known = (self._lost, session.lost, session.moved, session.sending.appender.error)
        return any(each is error for each in known)

    # ---- notifications of its session ----------------------------------------------------

    def lost(self, error: ExclusiveLogError) -> None:
        """Its session was lost: fail every later call, and call `on_fenced`."""
        with _changing:
            if self._lost is not None or self._closed:
                return
            self._lost = error
            self._refuse(error)
        producer = None if self._producer is None else self._producer()
        on_fenced = self.options.on_fenced
        if on_fenced is None or producer is None or not isinstance(error, ProducerFencedError):
            return
        self.engine.call_soon(functools.partial(on_fenced, producer, error))

    def _refuse(self, error: ExclusiveLogError) -> None:
        """Make `send` raise this error, even if other producers still send by the session."""
        if self.appender.error is not error:
            self.appender = _core.Appender(b"", -1, 1, 1)
            self.appender.close_with(error)

    def ended(self) -> None:
        """The session was closed: a producer that has followed its topic is lost then."""
        if self._moved is not None:
            self.lost(self._moved)

    def wanted(self) -> None:
        """Another producer waits for the topic: call `on_wanted`."""
        producer = None if self._producer is None else self._producer()
        on_wanted = self.options.on_wanted
        if on_wanted is not None and producer is not None and self.usable:
            self.engine.call_soon(functools.partial(on_wanted, producer))

    def moved_to(self, session: ProducerSession, error: ProducerMovedError) -> None:
        """Its topic was handed over within this process: continue with this session."""
        with _changing:
            if self._lost is None and not self._closed:
                self._last_sequence = self.last_sequence_id
                self.session, self._moved = session, error
                self.appender = session.sending.appender
                return
        session.leave(self)

    def close(self) -> None:
        """Leave the session. The owner's producer, or the last shared producer, releases it."""
        with _changing:
            if self._closed:
                return
            self._closed = True
            session = self.session
        failure = session.leave(self)
        if self.appender.error is None:
            self._refuse(self._closed_error())
        if failure is not None and self._lost is None:
            raise failure

    # ---- a call that follows the topic ---------------------------------------------------

    def here(self, numbered: bool) -> ProducerSession:
        """The session of this process that appends the producer's messages (rule E2). Waits
        while it is paused. `numbered`: the messages have sequence ids of the producer's name."""
        if self.appender.error is None and self._moved is None and not self._closed:
            return self.session  # its appender would raise otherwise, as in `Producer.send`
        if self._closed and (self._lost or self.session.lost) is None:
            raise EngineClosedError(
                f"producer {self.first.name!r} of topic {self.topic!r} was closed before the "
                "commit of a transaction in which it sends; nothing was committed. Close it "
                "afterwards: `with topic.producer() as producer, engine.transaction() as txn`"
            )
        self.check()
        return self.call(_not_paused, None, 0 if numbered else None)

    def call(
        self,
        call: Callable[[ProducerSession, float | None], Sent],
        timeout: float | None,
        sequence: int | None = None,
    ) -> Sent:
        """Return `call(session, seconds left)` as soon as the session is not paused; after a
        hand-over within this process, with the next session."""
        waited: list[ProducerSession] = []  # for the end of a pause
        try:
            return self._call(call, timeout, sequence, waited)
        finally:
            if waited:  # without memory for an iterator, a message that is queued would be refused
                for session in waited:
                    session.sending.served()

    def _call(
        self,
        call: Callable[[ProducerSession, float | None], Sent],
        timeout: float | None,
        sequence: int | None,
        waited: list[ProducerSession],
    ) -> Sent:
        deadline = None if timeout is None else _core.monotonic() + timeout
        left = timeout
        while True:
            if self._lost is not None or self._closed or self._moved is not None:
                self.check()  # otherwise the session's appender raises by itself
            session = self.session
            if sequence is not None:
                self._check_numbering()
            try:
                return call(session, left)
            except ProducerFencedError as error:
                refused = session.refused(error)
            waited.append(session)
            try:
                if not self._await_change(session, refused, left):
                    raise WaitTimeoutError(
                        f"topic {self.topic!r} was paused for longer than timeout={timeout} s, by "
                        "a hand-over or a transaction; nothing was sent"
                    )
            finally:
                del refused  # an error and a frame that refer to each other keep this sender
            left = None if deadline is None else max(0.0, deadline - _core.monotonic())

    def _await_change(
        self, session: ProducerSession, refused: ExclusiveLogError, left: float | None
    ) -> bool:
        if isinstance(refused, SessionPaused):
            refused.__traceback__ = None
            return session.await_resumed(left)
        if refused is not session.moved:
            # The error is kept: its traceback would keep the frames of each call.
            raise refused.with_traceback(None) from None
        refused.__traceback__ = None  # the error is kept, and must not keep this sender
        return session.follow(left)

    def check(self) -> None:
        """Raise an error unless the producer may send, as far as this process knows."""
        session = self.session
        if self.appender.error is None and self._moved is None and not self._closed:
            session.engine.check_open()
            return
        lost = self._lost or session.lost  # the session is told first (rule B4)
        if lost is None and not self._closed and self._moved is None:
            session.engine.check_open()
            return
        session.engine.check_not_forked()
        if lost is not None:
            raise lost.with_traceback(None)
        if self._closed:
            raise self._closed_error()
        if self._moved is not None and self.session.closed:
            self.lost(self._moved)
            raise self._moved.with_traceback(None)
        self.session.engine.check_open()

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(
            f"producer {self.first.name!r} of topic {self.topic!r} is closed; open a new one"
        )

    def _check_numbering(self) -> None:
        """Raise if the session after a hand-over counts sequence ids for another name."""
        if self._moved is not None and self.session.session.name != self.first.name:
            raise self._moved.with_traceback(None)

    # ---- messages ------------------------------------------------------------------------

    def encode(
        self, value: Any, key: Any, properties: Any, event_time: Any, sequence_id: Any
    ) -> Encoded:
        """Check and encode one message; raise if the producer cannot send."""
        if self._lost is not None or self._closed:
            self.check()
        return encode_message(value, key, properties, event_time, sequence_id, self.options.dumps)

    def offer(self, message: Encoded) -> Receipt | None:
        """`send_async` of an encoded message without any wait, for an event loop. Returns None, and
        queues nothing, if it might have to wait: the topic was handed over or is being handed
        over, or another thread appends by this producer."""
        if message[4] is not None:
            self._check_numbering()
        try:
            return self.session.sending.offer(message)
        except ProducerMovedError as error:
            error.__traceback__ = None
            return None

    def append(self, messages: Sequence[Raw]) -> Append:
        """Append messages atomically, and return before they are flushed: the caller may
        acknowledge them only after `Append.await_flush`. Large ones are flushed at once.

        Raises what `send` raises. For shared states, whose threads share flushes.
        """
        if len(messages) == 1:
            key, value, properties = messages[0]
            if len(value or b"") + len(key or b"") < SENT_AT_ONCE:
                # The most frequent call by far, as in `Producer.send`.
                appender = self.appender
                try:
                    outcome = appender.append(value, key, properties)
                except ProducerMovedError as error:
                    error.__traceback__ = None
                    outcome = -1
                if type(outcome) is tuple:
                    return self._appended(appender, outcome)
        return self.call(
            lambda session, _: self._appended(
                session.sending.appender, session.sending.append(messages)
            ),
            None,
        )

    def _appended(self, appender: _core.Appender, outcome: tuple[int, int, int] | int) -> Append:
        if not isinstance(outcome, tuple):
            return Append(self, outcome, flushed=True)
        flushes = appender.flushes
        if not flushes:
            appender.announce()
        return Append(self, *outcome, not flushes)

    # ---- sends beside a transaction ------------------------------------------------------

    def enlist(self, producer: SendingProducer, caller: Caller) -> None:
        """Until `discharge`, warn this caller if it sends by the producer without `transaction=`.

        The producer has another class meanwhile, so that sends of other producers cost nothing
        more."""
        with _changing:
            if type(producer) is Producer or type(producer) is ProducerInTransaction:
                self._callers = (*self._callers, caller)
                object.__setattr__(producer, "__class__", ProducerInTransaction)

    def discharge(self, producer: SendingProducer, caller: Caller) -> bool:
        """End what `enlist` began: the block has ended, or the caller was warned. Returns whether
        the caller was enlisted."""
        with _changing:
            callers = list(self._callers)
            found = caller in callers
            if found:
                callers.remove(caller)
                self._callers = tuple(callers)
            if not callers and type(producer) is ProducerInTransaction:
                object.__setattr__(producer, "__class__", Producer)
            return found


@dataclass(frozen=True)
class Options(SessionOptions):
    """The options of a producer; `topic.producer` describes each."""

    dumps: Serializer | None = None
    on_fenced: Callable[[Producer, ProducerFencedError], object] | None = None
    on_wanted: Callable[[Producer], object] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_fenced is not None and not callable(self.on_fenced):
            raise TypeError("on_fenced takes a function of (producer, error)")
        if self.on_wanted is not None and not callable(self.on_wanted):
            raise TypeError("on_wanted takes a function of (producer)")


class Producer(SendingProducer, Closing):
    """Sends messages to one topic. `topic.producer` returns it; threads may share it.

    Losing the topic is final (rule B4): every call except `close` then raises the same
    ProducerFencedError, and a new producer must be opened.

    >>> with engine.topic("orders").producer("exclusive") as producer:
    ...     producer.send(b"first"), producer.send(b"second")
    (0, 1)
    """

    # `_dumps`: a copy from its options for the fast path of `send`. A process may have a hundred
    # thousand producers.
    __slots__ = ("__dict__", "__weakref__", "_dumps", "_sender")

    _sender: ProducerSender

    def __init__(
        self, engine: EngineBackend, topic: str, session: ProducerSession, options: Options
    ) -> None:
        calls_back = options.on_fenced is not None or options.on_wanted is not None
        this = weakref.ref(self) if calls_back else None  # the sender must not keep it
        self._dumps = options.dumps
        self._sender = ProducerSender(engine, topic, session, options, this)
        session.subscribe(self._sender, owner=True)  # its callbacks need the whole producer

    def _check_enters(self) -> None:
        self._sender.check()

    # ---- facts ---------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self._sender.topic

    @property
    def name(self) -> str:
        """The name for which sequence ids are counted (rule G2)."""
        return str(self._sender.first.name)

    @property
    def access_mode(self) -> AccessMode:
        """The requested mode."""
        return AccessMode(self._sender.first.mode)

    @property
    def priority(self) -> int:
        """The priority of its request in the queue; cannot be changed (rule D2)."""
        return int(self._sender.first.priority)

    @property
    def _session(self) -> Any:
        """The session that it sends by, as the ledger stores it."""
        return self._sender.session.session

    @property
    def topic_epoch(self) -> int:
        """The epoch that its messages get. Keep it to reconnect with `topic_epoch=` (rule B5)."""
        return int(self._session.epoch)

    @property
    def last_sequence_id(self) -> int:
        """The last sequence id sent under this name; -1 if there is none (rule G2)."""
        return self._sender.last_sequence_id

    def stats(self) -> ProducerStats:
        """How much this producer has sent, and how much waits for a commit. See `ProducerStats`.

        >>> _ = producer.send_many([b"a", b"b"])
        >>> producer.stats().messages, producer.stats().pending_messages
        (2, 0)
        """
        appender = self._sender.session.sending.appender
        return ProducerStats(
            self.topic,
            self.name,
            self.topic_epoch,
            appender.sent,
            appender.pending_messages,
            appender.pending_bytes,
            self.last_sequence_id,
        )

    @property
    def state(self) -> State:
        """Its state, read from the ledger (rule C6): "open", "fenced", "moved" or "closed". Reading
        it changes nothing, and does not wait; on a cluster, it asks the broker."""
        return self._sender.state

    # ---- move ----------------------------------------------------------------------------

    def move(self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()) -> Move:
        """Move only this producer to another engine (rules E1 to E4).

        An exclusive producer moves with its topic, a shared one without the other shared producers.
        To do this from another process, pass the producer's name to `engine.unload`.

        - `to`, `timeout`, `groups`: as in `engine.unload`.

        What the producer has accepted is committed first. The place of a shared producer, with its
        name and sequence ids, is reserved for the destination's next shared producer until the
        deadline; waiters do not get the topic meanwhile. This producer then raises
        ProducerMovedError; if `to` is an engine of its own process, its sends go through that
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
        return UnloadFuture(engine, unloading)._start()

    def _begin_move(
        self, to: str, timeout: float, groups: Iterable[str]
    ) -> tuple[EngineBackend, Moves]:
        """Begin to move the session that this producer currently sends by."""
        chosen = check_groups(groups)

        def begin(session: ProducerSession, _: float | None) -> tuple[EngineBackend, Moves]:
            if not session.usable and session.moved is not None:
                raise session.moved
            engine = session.engine
            check_move(engine, to, timeout)
            found = session.session
            moves = engine.moves([self.topic], to, timeout, chosen, found.name, found)
            moves.begin()
            return engine, moves

        self._sender.check()
        return self._sender.call(begin, None)

    # ---- send ----------------------------------------------------------------------------

    def catch_up(self, reader: Reader) -> Iterator[_core.Message]:
        """Iterate over this topic from the reader's position to its end (rule D8).

        A new owner that does so before its first send has read all that former owners wrote: they
        cannot append any more. Raises ProducerFencedError at the end if this producer has lost the
        topic meanwhile; then its successor may have appended more messages.

        >>> with topic.producer() as before:
        ...     _ = before.send(b"old")
        >>> with topic.producer("wait_for_exclusive") as producer:
        ...     [message.value for message in producer.catch_up(topic.reader())]
        [b'old']
        """
        ours = reader._ledger is self._sender.ledger and reader.topic_id == self._session.topic
        if not ours:
            raise ValueError(f"reader: it takes one of topic {self.topic!r}, not {reader!r}")
        self._sender.check()
        return self._catch_up(reader)

    def _catch_up(self, reader: Reader) -> Iterator[_core.Message]:
        yield from reader
        self._sender.check()
        self._sender.call(lambda session, _: session.verify(), None)

    def send(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None,
        sequence_id: int | None = None,
        timeout: float | None = None,
        transaction: Transaction | None = None,
    ) -> int:
        """Append one message; return its offset once the message is durable (rules B9, H1).

        - `value`: bytes, or what the producer's serializer takes; None is a tombstone.
        - `key`: bytes or str; None and b"" differ.
        - `properties`: a mapping of str to str.
        - `event_time`: a datetime (naive: local time) or ms since 1970; None and 0 differ.
        - `sequence_id`: 0 to 2**63 - 1, greater than the last one. Default: the next number. If a
          queued message has used it, the call waits until that is in the log, or has failed.
        - `timeout`: seconds to wait for other producers' commits (None: without limit). After
          WaitTimeoutError the message may still be committed if the error's `maybe_written` is
          True; otherwise (the topic was being handed over) nothing was sent.
        - `transaction`: append it when that commits. This call then returns -1, and
          `transaction.offsets` has the offset after the commit (rule G3).

        Raises ProducerFencedError, DuplicateSequenceError, LedgerFullError, LedgerIOError,
        TopicTerminatedError. `maybe_written` of the last two says whether the message may be in the
        log.

        >>> producer.send(b"hello", key="greeting", properties={"lang": "en"})
        0
        """
        if (
            type(value) is bytes
            and key is None
            and properties is None
            and event_time is None
            and sequence_id is None
            and self._dumps is None
            and timeout is None
            and transaction is None
            and len(value) < SENT_AT_ONCE
        ):
            # The most frequent call by far. A closed or lost appender raises by itself.
            try:
                offset = self._sender.appender.send(value)
            except ProducerMovedError as error:
                error.__traceback__ = None  # the error is kept, and must not keep this producer
                offset = -1
            if offset >= 0:
                return offset
        if timeout is not None:
            check_timeout(timeout)
        message = self._sender.encode(value, key, properties, event_time, sequence_id)
        if transaction is not None:
            self._sender.check()
            check_transaction(transaction)._add(self, message, numbered=message[4] is not None)
            return -1
        return self._sender.call(
            lambda session, left: session.sending.send(message, left), timeout, message[4]
        )

    def send_async(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None,
        sequence_id: int | None = None,
    ) -> Receipt:
        """Queue one message, and return at once. The `Receipt` is a future with the offset: it can
        be waited for, given callbacks, and awaited.

        Messages are committed in order, together with others, at the latest after `linger`. If
        `max_pending_bytes` are waiting, the call commits before it returns. Arguments and errors
        are those of `send`; wrong arguments raise at once.

        >>> receipts = [producer.send_async(b"%d" % i) for i in range(3)]
        >>> [receipt.result() for receipt in receipts]
        [0, 1, 2]
        """
        sender = self._sender
        appender = sender.appender
        if (
            type(value) is bytes
            and key is None
            and properties is None
            and event_time is None
            and sequence_id is None
            and self._dumps is None
            and len(value) < SENT_AT_ONCE
        ):
            # The most frequent call by far. A closed or lost appender raises by itself.
            try:
                receipt = appender.add(value, None, None, None, None, True)
            except ProducerMovedError as error:
                error.__traceback__ = None
                receipt = None
            if receipt is None:
                return self._send_async((value, None, None, None, None))
        else:
            return self._send_async(
                self._sender.encode(value, key, properties, event_time, sequence_id)
            )
        if appender.holds(sender.options.max_pending_bytes):
            sender.session.sending.commit_if_full()
        return receipt

    def _send_async(self, message: Encoded) -> Receipt:
        return self._sender.call(
            lambda session, _: session.sending.send_async(message), None, message[4]
        )

    def send_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        properties: Iterable[Mapping[str, str] | None] | None = None,
        event_times: Iterable[dt.datetime | int | None] | None = None,
        sequence_id: int | None = None,
        timeout: float | None = None,
        transaction: Transaction | None = None,
    ) -> range:
        """Append messages atomically: after any crash all of them are in the log, or none (rule
        G3).

        - `values`: an iterable of what `send` takes, or a pyarrow array of binary or string, which
          is not copied message by message. A pyarrow RecordBatch gives all four: it has the column
          `value`, and may have `key`, `properties` (maps or structs) and `event_time`; its other
          columns are ignored.
        - `keys`, `properties`, `event_times`: one for each value, as in `send`. Default: none.
        - `sequence_id`: that of the first message; the others have the numbers that follow. If one
          of them was used before, the whole batch is refused. Default: the next numbers.
        - `timeout`: as in `send`.
        - `transaction`: append them when that commits; the range that is returned is empty.

        Returns the offsets. Raises what `send` raises.

        >>> producer.send_many([b"a", b"b", None], keys=["x", "y", "x"])
        range(0, 3)
        """
        check_timeout(timeout)
        columns = encode_columns(values, keys, properties, event_times, self._dumps)
        count = columns.values.count
        self._sender.check()
        if count == 0:
            end = self._sender.call(_verified_end, timeout)
            return range(end, end)
        sequence = None if sequence_id is None else encode_sequence(sequence_id)
        if transaction is not None:
            check_transaction(transaction)._add(
                self,
                lambda appender: self._put_batch(appender, columns, sequence),
                numbered=sequence is not None,
            )
            return range(-1, -1)
        first = self._sender.call(
            lambda session, left: session.sending.send_batch(columns, sequence, left),
            timeout,
            sequence,
        )
        return range(first, first + count)

    def _put_batch(self, appender: _core.Appender, columns: Columns, sequence: int | None) -> None:
        batch = columns.batch(appender)
        if appender.add_batch(batch, sequence) is None:
            raise self._sender.session.sending.duplicate(appender, sequence, batch.count)

    # ---- announce ------------------------------------------------------------------------

    def announce(
        self,
        info: Mapping[str, str],
        *,
        message: Any = NO_MESSAGE,
        transaction: Transaction | None = None,
    ) -> None:
        """Publish facts about this owner that may change, such as its address or progress.

        An announcement is durable and fenced, as a send is (rules B2, B3). Any process reads it as
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
        if not self._session.exclusive:
            raise ValueError(
                f"announce: producer {self.name!r} of topic {self.topic!r} is shared, and only an "
                "owner can announce. Open it with another access mode"
            )
        if transaction is None:
            self._sender.check()
        # It may have followed its topic to another engine, whose ledger has another name.
        sender = self._sender
        announcing = transaction or Transaction(sender.session.engine, sender.ledger)
        announcing._announce(self, given)
        if message is not NO_MESSAGE:
            self.send(message, properties=given, transaction=announcing)
        if transaction is None:
            announcing.commit()

    # ---- flush and close -----------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every message sent so far is durable or has failed. Raises the error of the
        last one, if it failed, also if that was before this call; once, and not if its receipt
        has told of it.

        - `timeout`: seconds until WaitTimeoutError. None, the default: without limit.

        A fenced producer raises ProducerFencedError, even if nothing is pending (rule B3).
        """
        check_timeout(timeout)
        self._sender.check()
        self._sender.call(lambda session, left: session.flush(left), timeout)

    def close(self) -> None:
        """Commit pending sends, then release the topic: the next waiter is promoted in the same
        transaction (rule C1). Raises the error of the last message as `flush` does, once the topic
        is released. Closing a closed or fenced producer does nothing (rule B3), and does not wait
        for another thread that is closing it.

        Called from a signal handler or a finalizer that interrupted a transaction of the same
        thread, it returns at once; another thread closes the producer after that transaction."""
        if not self._sender.session.engine.forked:
            self._sender.close()

    def __repr__(self) -> str:
        return (
            f"<Producer {self.name!r} of topic {self.topic!r}, {self.access_mode}, "
            f"epoch {self.topic_epoch}>"
        )


class ProducerInTransaction(Producer):
    """A producer that has sent in the transaction of a `with` block: it warns if it sends there
    without `transaction=`. No `super()`, and no methods of its own: the class may change back at
    any moment, also while one of these runs."""

    __slots__ = ()

    def send(self, value: Any, **options: Any) -> int:
        """As `Producer.send`."""
        _check_transaction(self, options)
        return Producer.send(self, value, **options)

    def send_many(self, values: Iterable[Any], **options: Any) -> range:
        """As `Producer.send_many`."""
        _check_transaction(self, options)
        return Producer.send_many(self, values, **options)


def _check_transaction(producer: Producer, options: Mapping[str, Any]) -> None:
    if options.get("transaction") is not None:
        return
    if producer._sender.discharge(producer, this_caller()):  # once is enough
        warnings.warn(
            f"topic {producer.topic!r}: this message is not in the transaction of the block around "
            "it. Use send(..., transaction=...) to include it, or send it outside of the block",
            stacklevel=3,
        )


class ProducerFuture(GrantFuture[Producer]):
    """A future with a producer that may have to wait in the queue. `cancel()` removes the request
    (rule D5)."""

    _engine: EngineBackend

    def __init__(self, engine: EngineBackend, topic: int, name: str, options: Options) -> None:
        super().__init__(engine, topic)
        self._topic, self._options = name, options

    @property
    def waited(self) -> str:
        """The text of a timeout's error."""
        return f"topic {self._topic!r}: {super().waited}"

    def make(self, session: Any, last_sequence: int) -> Producer:
        """The producer of a session that was granted."""
        opened = self._engine.open_session(self._topic, session, last_sequence, self._options)
        return Producer(self._engine, self._topic, opened, self._options)


def _verified_end(session: ProducerSession, _: float | None) -> int:
    """The end of the session's topic; the error of a send if it could not append there."""
    session.verify()
    return session.engine.topic_store(session.session.topic).latest().next_offset


def _not_paused(session: ProducerSession, _: float | None) -> ProducerSession:
    error = session.sending.appender.error
    if isinstance(error, ProducerMovedError):
        raise error
    return session
