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
import contextlib
import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from exclusivelog import _core, threads
from exclusivelog.access import Session
from exclusivelog.announcements import put_announcement
from exclusivelog.errors import (
    ExclusiveLogError,
    ProducerFencedError,
    TransactionAbortedError,
)
from exclusivelog.handover import Moving
from exclusivelog.log import Placed, Work, append_one
from exclusivelog.ownership import Claim
from exclusivelog.runtime import Runtime
from exclusivelog.waits import in_slices, settled

if TYPE_CHECKING:
    from exclusivelog.group_reader import GroupReader
    from exclusivelog.groups import Membership
    from exclusivelog.ledger import Ledger
    from exclusivelog.reader import Reader

Put = Callable[[_core.Appender], object]
State = Literal["open", "committed", "aborted", "unknown"]


class HoldsClaim(Protocol):
    """A role: what it holds is lost with its claim."""

    @property
    def claim(self) -> Claim:
        """The claim that it is bound to."""


class Sender(abc.ABC):
    """What a transaction needs of a producer."""

    session: Session
    appender: _core.Appender

    @property
    @abc.abstractmethod
    def ledger(self) -> Ledger:
        """Where its messages go."""

    @abc.abstractmethod
    def here(self, numbered: bool) -> Sender:
        """Who sends what this one is given: itself, or who has its topic by now in this process.
        `numbered`: with sequence ids of its own name."""

    @abc.abstractmethod
    def stand_still(self) -> bool:
        """Let sends wait, and commit what was accepted before; False if the topic has moved."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Let sends go on."""

    @abc.abstractmethod
    def private_appender(self) -> _core.Appender:
        """One that goes on where the producer's own is."""

    @abc.abstractmethod
    def has_announced(self, info: dict[str, str]) -> None:
        """What it announces is committed."""

    @abc.abstractmethod
    def fenced_by(self, error: ProducerFencedError) -> ExclusiveLogError:
        """What a send is told that met this error."""


class Transaction:
    """Messages and reader positions that are committed together. Made by `engine.transaction`.

    As a context manager it commits when its block ends, and aborts when an exception leaves the
    block. For one thread at a time. After the commit, `offsets` has the offsets of each producer's
    messages: {producer: range}.
    """

    def __init__(self, engine: Runtime) -> None:
        self.offsets: dict[Sender, range] = {}
        self._engine = engine
        self._state: State = "open"
        self._complete = False  # all of it is written, and may be committed
        self._puts: dict[Sender, list[Put]] = {}
        self._numbered: set[Sender] = set()  # those that were given sequence ids
        self._cursors: dict[Reader | GroupReader, tuple[Membership, dict[int, int]]] = {}
        self._claims: set[Claim] = set()
        self._announced: dict[Sender, dict[str, str]] = {}

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
        self._puts.setdefault(producer, []).append(put)
        if numbered:
            self._numbered.add(producer)

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
            self._claims.add(holder)
        else:
            self._puts.setdefault(holder, [])

    def announce(self, producer: Sender, info: dict[str, str]) -> None:
        """What `Producer.announce` does with a transaction."""
        self.check_open()
        if producer.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._puts.setdefault(producer, [])  # it is checked as one that sends
        self._announced[producer] = info

    def commit_cursor(self, reader: Reader | GroupReader) -> None:
        """Store the reader's present position as its group's position when this transaction
        commits (rule F6)."""
        self.check_open()
        membership = reader.membership
        if membership is None:
            raise ValueError(f"reader={reader!r} has no cursor; open it with group=")
        if membership.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._cursors[reader] = membership, reader.offsets_to_commit()

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
        if not (self._puts or self._cursors or self._claims):
            self._state = "committed"
            return
        if threading.current_thread() is threading.main_thread():
            self._commit_elsewhere()
        else:
            self._commit()

    def _commit_elsewhere(self) -> None:
        # Signals strike the main thread: in the middle of a commit their handlers would wait for
        # what this thread has, and an interrupt would leave producers that know nothing of it.
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        thread = threading.Thread(
            target=self._commit_for, args=(done,), name="exclusivelog-transaction", daemon=True
        )
        try:
            threads.start(self._engine.path, thread)
            in_slices(functools.partial(settled, done), None, self._engine.check_alone)
            done.result(0)
        finally:
            done.cancel()  # it had not begun when an interrupt struck
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
            while not self._try():
                pass  # a topic has moved within this process; it is followed
        except BaseException as error:
            unwritten = isinstance(error, ExclusiveLogError) and not error.maybe_written
            if unwritten or not self._complete:
                self._state = "aborted"
            raise
        self._state = "committed"

    def _try(self) -> bool:
        here = {producer: producer.here(producer in self._numbered) for producer in self._puts}
        batch = Batch(here, self._puts)
        try:
            with self._engine.ledger.standstill, contextlib.ExitStack() as held:
                for producer in batch.senders:
                    held.callback(producer.resume)
                    if not producer.stand_still():
                        return False
                batch.encode()
                self._write(batch)
                self.offsets = batch.acknowledge()
                for producer, info in self._announced.items():
                    producer.has_announced(info)
                    batch.sender(producer).has_announced(info)
        except _Refused as refused:
            # Only now: while it stood still, its topic seemed to be on its way.
            error = refused.producer.fenced_by(refused.error)
            if isinstance(error, Moving):
                return False  # a hand-over has begun in between: it knows more
            raise error from None
        return True

    def _write(self, batch: Batch) -> None:
        with self._engine.ledger.write_all() as tables:
            for claim in self._claims:
                claim.check_in(tables)
            for producer, work in batch.works.items():
                try:
                    batch.placed[producer] = append_one(tables, work)
                except ProducerFencedError as error:
                    raise _Refused(producer, error) from error
            for membership, positions in self._cursors.values():
                membership.write(tables, positions)
            for producer, info in self._announced.items():
                put_announcement(tables, batch.sender(producer).session, info)
            self._complete = True

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


class _Refused(Exception):
    """A producer that was fenced, and the error that says so."""

    def __init__(self, producer: Sender, error: ProducerFencedError) -> None:
        super().__init__(str(error))
        self.producer, self.error = producer, error


class Batch:
    """What one try to commit appends. `here`: who sends for each of the producers that messages
    were given to, or that are required."""

    def __init__(self, here: dict[Sender, Sender], puts: dict[Sender, list[Put]]) -> None:
        self.senders = list(dict.fromkeys(here.values()))
        self.works: dict[Sender, Work] = {}
        self.placed: dict[Sender, Placed] = {}
        self._here, self._puts = here, puts
        self._counts: dict[Sender, int] = {}

    def sender(self, producer: Sender) -> Sender:
        """Who sends for it."""
        return self._here[producer]

    def encode(self) -> None:
        """Their senders stand still: now it is known which sequence ids are next."""
        appenders = {sender: sender.private_appender() for sender in self.senders}
        for producer, sender in self._here.items():
            appender = appenders[sender]
            before = appender.pending_messages
            for put in self._puts[producer]:
                put(appender)
            self._counts[producer] = appender.pending_messages - before
        self.works = {
            sender: Work(appender, appender.take()) for sender, appender in appenders.items()
        }

    def acknowledge(self) -> dict[Sender, range]:
        """It is committed: {producer: offsets}. Each goes on behind it."""
        ends = {}
        for sender, places in self.placed.items():
            if not places:
                continue  # it is only required, or only announces
            sender.appender.advance(places[-1][0].last_sequence)
            ends[sender] = places[0][1]
        offsets = {}
        for producer, sender in self._here.items():
            if sender not in ends or not self._counts[producer]:
                continue
            first, ends[sender] = ends[sender], ends[sender] + self._counts[producer]
            offsets[producer] = range(first, ends[sender])
        return offsets
