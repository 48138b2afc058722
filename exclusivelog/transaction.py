"""Transactions: messages to several topics, and reader cursors, enter the log together.

Nothing is written before the commit. The commit is one transaction of the ledger, in which
every session, every reader's claim and all that was required is checked, so that it is atomic
after any crash, and fenced as a whole (rules B3, F5, F6, G3). Consume, process and produce
exactly once:

>>> with topic.producer() as producer:
...     _ = producer.send_many([b"1", b"2"])
>>> squares = engine.topic("squares").producer("exclusive")
>>> with topic.reader(group="squarer") as reader, engine.transaction() as txn:
...     for message in reader:
...         _ = squares.send(b"%d" % int(message.value) ** 2, transaction=txn)
...     txn.commit_cursor(reader)
>>> [message.value for message in engine.topic("squares").reader()], txn.offsets[squares]
([b'1', b'4'], range(0, 2))
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from exclusivelog import threads
from exclusivelog.backend import Backend, ProducerSession, Put, TransactionParts
from exclusivelog.claims import Claim
from exclusivelog.errors import (
    ExclusiveLogError,
    TransactionAbortedError,
)
from exclusivelog.waits import in_slices, settled

if TYPE_CHECKING:
    from exclusivelog.reader import GroupReader, Reader


State = Literal["open", "committed", "aborted", "unknown"]


class HoldsClaim(Protocol):
    """A role: what it holds is lost with its claim."""

    @property
    def claim(self) -> Claim:
        """The claim that it is bound to."""


class Sender(abc.ABC):
    """What a transaction needs of a producer."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def ledger(self) -> object:
        """What keeps its messages."""

    @abc.abstractmethod
    def here(self, numbered: bool) -> ProducerSession:
        """The session that appends what this producer is given, in this process. `numbered`: with
        sequence ids of its own name."""


class Transaction:
    """Messages and reader positions that are committed together. Made by `engine.transaction`.

    As a context manager it commits when its block ends, and aborts when an exception leaves the
    block. For one thread at a time. After the commit, `offsets` has the offsets of each producer's
    messages: {producer: range}.
    """

    def __init__(self, engine: Backend) -> None:
        self.offsets: dict[Sender, range] = {}
        self._engine = engine
        self._state: State = "open"
        self._parts: TransactionParts[Sender] = TransactionParts()

    @property
    def state(self) -> State:
        """ "open", "committed", "aborted" or "unknown".

        It is "unknown" during the commit, and after an I/O error in it. Then open the engine and
        the producers again: `last_sequence_id`, or the group's position, shows the outcome."""
        return self._state

    def add(self, producer: Sender, put: Put, numbered: bool) -> None:
        """Have a producer's messages appended by the commit: `put` gives them to an appender,
        `numbered`: with sequence ids of their own."""
        self.check_open()
        if producer.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._parts.puts.setdefault(producer, []).append(put)
        if numbered:
            self._parts.numbered.add(producer)

    def require(self, holder: Claim | Sender | HoldsClaim) -> None:
        """Let the commit fail unless this claim or role is held, or this producer still has its
        topic.

        - `holder`: a claim of `engine.own`, a role of `engine.role`, or a producer; it need not
          send in this transaction. Call this once for each.

        The commit checks it in its critical section. If the check fails, nothing of the transaction
        is in the log, and the commit raises OwnershipLostError for a claim or a role that was
        lost or given back. For a producer it raises what the producer's sends would raise:
        ProducerFencedError, ProducerMovedError, EngineClosedError, TopicTerminatedError, ...

        >>> claim = engine.own({"shard-7": None})
        >>> with engine.transaction() as txn, topic.producer() as producer:
        ...     txn.require(claim)
        ...     _ = producer.send(b"by the owner of shard-7", transaction=txn)
        ...     txn.commit()
        """
        self.check_open()
        if not isinstance(holder, Claim | Sender):
            holder = getattr(holder, "claim", holder)  # a role's
        if not isinstance(holder, Claim | Sender):
            raise TypeError(f"require takes a role, a claim or a producer, not {holder!r}")
        if holder.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes claims and producers of its own ledger")
        if isinstance(holder, Claim):
            self._parts.claims.add(holder)
        else:
            self._parts.puts.setdefault(holder, [])

    def announce(self, producer: Sender, info: dict[str, str]) -> None:
        """What `Producer.announce` does with a transaction."""
        self.check_open()
        if producer.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._parts.puts.setdefault(producer, [])  # it is checked as one that sends
        self._parts.announced[producer] = info

    def commit_cursor(self, reader: Reader | GroupReader) -> None:
        """Store the reader's present position as its group's position when this transaction
        commits (rule F6)."""
        self.check_open()
        membership = reader.membership
        if membership is None:
            raise ValueError(f"reader={reader!r} has no cursor; open it with group=")
        if membership.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._parts.cursors[reader] = membership, reader.offsets_to_commit()

    def check_open(self) -> None:
        """TransactionAbortedError unless it can still be added to."""
        if self._state != "open":
            raise TransactionAbortedError(
                f"this transaction is {self._state}; begin a new one with engine.transaction()"
            )

    def commit(self) -> None:
        """Append and commit everything, or nothing: durable when it returns.

        Raises ProducerFencedError, ReaderFencedError, OwnershipLostError, LedgerFullError,
        DuplicateSequenceError, TopicTerminatedError, ... Then nothing of it is in the log, unless
        the error's `maybe_written` is true.

        Ctrl-C interrupts only the wait. A commit that has begun goes on, and `state` shows its
        outcome once it is over.
        """
        self.check_open()
        self._engine.check_free()
        self._state = "aborted"  # until it has begun
        self._engine.check_open()
        if not self._parts:
            self._state = "committed"
            return
        if threading.current_thread() is threading.main_thread():
            self._commit_elsewhere()
        else:
            self._commit()

    def _commit_elsewhere(self) -> None:
        # Signals interrupt the main thread: during a commit their handlers would wait for locks
        # that this thread has, and an interrupt would leave producers that know nothing of it.
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        thread = threading.Thread(
            target=self._commit_for, args=(done,), name="exclusivelog-transaction", daemon=True
        )
        try:
            threads.start(self._engine.path, thread)
            in_slices(functools.partial(settled, done), None, self._engine.check_alone)
            done.result(0)
        finally:
            done.cancel()  # where an interrupt came before it had begun
            del done  # it may have an error, whose traceback has this frame

    def _commit_for(self, done: concurrent.futures.Future[None]) -> None:
        try:
            if done.set_running_or_notify_cancel():
                self._commit()
                done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        finally:
            del done

    def _commit(self) -> None:
        self._state = "unknown"
        try:
            self.offsets = self._engine.commit_transaction(self._parts)
        except BaseException as error:
            unwritten = isinstance(error, ExclusiveLogError) and not error.maybe_written
            if unwritten or not self._parts.written:
                self._state = "aborted"
            raise
        self._state = "committed"

    def abort(self) -> None:
        """Abort the transaction: nothing of it is written. After a commit this does nothing."""
        if self._state == "open":
            self._state = "aborted"

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._state == "open":
            self.commit()
        else:
            self.abort()
