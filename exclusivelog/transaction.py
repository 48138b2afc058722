"""Transactions: messages to several topics, and reader cursors, enter the log together.

Nothing is written before the commit. The commit is one transaction of the ledger, in which
every session and every reader's claim is checked, so that it is atomic after any crash, and
fenced as a whole (rules B3, F6, G3). Consume, process and produce exactly once:

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

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from exclusivelog import _core
from exclusivelog.errors import (
    ExclusiveLogError,
    ProducerFencedError,
    TransactionAbortedError,
)
from exclusivelog.log import Placed, Work, append_one
from exclusivelog.producer import Moving
from exclusivelog.waits import in_slices, settled

if TYPE_CHECKING:
    from exclusivelog.engine import Engine
    from exclusivelog.groups import Membership
    from exclusivelog.producer import Producer
    from exclusivelog.reader import Reader

Put = Callable[[_core.Appender], object]
State = Literal["open", "committed", "aborted", "unknown"]


class Transaction:
    """Made by `engine.transaction`. As a context manager it commits when its block ends, and
    aborts when an exception leaves it. For one thread at a time.

    `offsets` has, after the commit, where each producer's messages are: {producer: range}.
    """

    def __init__(self, engine: Engine) -> None:
        self.offsets: dict[Producer, range] = {}
        self._engine = engine
        self._state: State = "open"
        self._complete = False  # all of it is written, and may be committed
        self._puts: dict[Producer, list[Put]] = {}
        self._numbered: set[Producer] = set()  # those that were given sequence ids
        self._cursors: dict[Reader, tuple[Membership, int]] = {}

    @property
    def state(self) -> State:
        """What became of it: "open", "committed", "aborted"; or "unknown" while it is on its way,
        and after an I/O error in the commit: the producers' `last_sequence_id` tells once they
        are opened again, and so does the group's cursor."""
        return self._state

    def add(self, producer: Producer, put: Put, numbered: bool) -> None:
        """Have a producer's messages appended by the commit: `put` gives them to an appender,
        `numbered`: with sequence ids of their own."""
        self.check_open()
        if producer.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._puts.setdefault(producer, []).append(put)
        if numbered:
            self._numbered.add(producer)

    def commit_cursor(self, reader: Reader) -> None:
        """Let the reader's group go on at the reader's position as it is now, if and when this
        transaction commits (rule F6)."""
        self.check_open()
        membership = reader.membership
        if membership is None:
            raise ValueError(f"reader={reader!r} has no cursor; open it with group=")
        if membership.ledger is not self._engine.ledger:
            raise ValueError("transaction: it takes producers and readers of its own ledger")
        self._cursors[reader] = membership, reader.position

    def check_open(self) -> None:
        """TransactionAbortedError unless it can still be added to."""
        if self._state != "open":
            raise TransactionAbortedError(
                f"this transaction is {self._state}; begin a new one with engine.transaction()"
            )

    def commit(self) -> None:
        """Append and commit everything, or nothing: durable when it returns.

        Raises what keeps it out: ProducerFencedError, ReaderFencedError, LedgerFullError,
        DuplicateSequenceError, TopicTerminatedError, ... Nothing of it is in the log then.

        Ctrl-C interrupts the wait for it only. It is committed all the same, unless that had
        not begun, and `state` says so once it is over.
        """
        self.check_open()
        self._engine.check_free()
        self._state = "aborted"  # until it has begun
        self._engine.check_open()
        if not self._puts and not self._cursors:
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
            thread.start()
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
        except _Refused as refused:
            # Only now: while it stood still, its topic seemed to be on its way.
            error = refused.producer.fenced_by(refused.error)
            if isinstance(error, Moving):
                return False  # a hand-over has begun in between: it knows more
            raise error from None
        return True

    def _write(self, batch: Batch) -> None:
        with self._engine.ledger.write_all() as tables:
            for producer, work in batch.works.items():
                try:
                    batch.placed[producer] = append_one(tables, work)
                except ProducerFencedError as error:
                    raise _Refused(producer, error) from error
            for membership, position in self._cursors.values():
                membership.write(tables, position)
            self._complete = True

    def abort(self) -> None:
        """Give it up: nothing of it is written. After a commit it does nothing."""
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

    def __init__(self, producer: Producer, error: ProducerFencedError) -> None:
        super().__init__(str(error))
        self.producer, self.error = producer, error


class Batch:
    """What one try to commit appends. `here`: who sends for each of the producers that messages
    were given to."""

    def __init__(self, here: dict[Producer, Producer], puts: dict[Producer, list[Put]]) -> None:
        self.senders = list(dict.fromkeys(here.values()))
        self.works: dict[Producer, Work] = {}
        self.placed: dict[Producer, Placed] = {}
        self._here, self._puts = here, puts
        self._counts: dict[Producer, int] = {}

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

    def acknowledge(self) -> dict[Producer, range]:
        """It is committed: {producer: offsets}. Each goes on behind it."""
        ends = {}
        for sender, places in self.placed.items():
            sender.appender.advance(places[-1][0].last_sequence)
            ends[sender] = places[0][1]
        offsets = {}
        for producer, sender in self._here.items():
            first, ends[sender] = ends[sender], ends[sender] + self._counts[producer]
            offsets[producer] = range(first, ends[sender])
        return offsets
