"""Sending: group commit, and appending for one session.

Group commit: each commit takes everything that waits at that moment.

`send` commits in its own thread: one thread at a time commits, and the messages of threads that
arrive meanwhile are in the next commit. `send_async` leaves it to a background thread, which sleeps
when nothing waits.

Appending for one session: at once where nothing waits before it, else through the queue; and the
pauses in which its appends wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from exclusivelog import _core, logs, threads
from exclusivelog._core import Outcome
from exclusivelog.backend import SENT_AT_ONCE, SessionOptions, SessionPaused, without_outcome
from exclusivelog.errors import (
    DuplicateSequenceError,
    ExclusiveLogError,
    LedgerError,
    ProducerFencedError,
    WaitTimeoutError,
    called_reentrantly,
)
from exclusivelog.local.log.entries import (
    REPAIRABLE,
    Work,
    append,
    append_together,
    duplicate,
    refusal,
    repair,
)
from exclusivelog.local.storage.tables import Store
from exclusivelog.messages import Columns, Encoded, Raw
from exclusivelog.waits import in_slices

# ---- group commit ----------------------------------------------------------------------


log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25  # after a commit that could not begin


class Committer:
    """Commits for all producers of one engine."""

    def __init__(self, ledger: Store, run_callbacks: Callable[[], None]) -> None:
        self._run_callbacks = weakref.WeakMethod(run_callbacks)  # no reference cycle
        self.commit_queue = _core.CommitQueue()
        self._ledger = ledger
        self._commit_lock: Any = threading.RLock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---- in the sender's thread ----------------------------------------------------------

    def commit(self, appender: _core.Appender, receipt: _core.Receipt | None = None) -> None:
        """Return when the outcome of `receipt` (None: of all that this appender has) is known,
        having committed it together with everything else that waits."""
        receipt = receipt or appender.newest()
        if receipt is None or receipt.done():
            return
        self.check_free()
        if threading.current_thread() is threading.main_thread():
            # Ctrl-C interrupts the main thread, perhaps between a commit and its outcome: so
            # another thread commits, and the main thread waits.
            self.commit_queue.put(appender, 0.0)
            receipt.exception()
            return
        try:
            with self._commit_lock:
                if not receipt.done():
                    self._commit()
        finally:
            self._call_back()
        if not receipt.done():  # that commit was interrupted: the background thread retries
            self.commit_queue.put(appender, RETRY_SECONDS)
            receipt.exception()

    def commit_within(
        self, appender: _core.Appender, receipt: _core.Receipt, timeout: float
    ) -> None:
        """The same, for at most `timeout` seconds: in the background, because a thread that commits
        cannot stop waiting for the writer lock."""
        self.check_free()
        self.commit_queue.put(appender, 0.0)
        with contextlib.suppress(WaitTimeoutError):
            receipt.exception(timeout)

    def drain(self) -> None:
        """Commit everything that waits, also messages whose producer was dropped."""
        for appender in self.commit_queue.pending():
            self.commit(appender)
        with self._commit_lock:
            pass  # what another thread has taken is committed, too

    def drain_session(self, session: int) -> None:
        """Commit the messages of a session whose producers were dropped."""
        for appender in self.commit_queue.pending():
            if appender.session.id == session:
                self.commit(appender)
        with self._commit_lock:
            pass

    def fail(self, appender: _core.Appender, error: ExclusiveLogError) -> None:
        """Fail what waits in this appender, and everything that it is given later.

        Not during a commit: what is being committed has its own outcome (rules B9, B10).
        """
        with self._commit_lock:
            appender.settle([], error, True)
        self._call_back()

    def _call_back(self) -> None:
        run = self._run_callbacks() or _core.run_callbacks
        run()

    # ---- one commit ----------------------------------------------------------------------

    def _commit(self) -> None:
        # What has no outcome at the end of the block, also after an exception, is retried.
        with self.commit_queue as waiting:
            try:
                append(self._ledger, self._gather(append_together(self._ledger, waiting)))
            except Exception as error:  # every receipt has it, or is retried
                expected = isinstance(error, ExclusiveLogError)
                line = logs.COMMIT_REFUSED if expected else logs.COMMIT_FAILED
                logs.emit(log, line, ledger=self._ledger.path, reason=repr(error))

    def _gather(self, waiting: Sequence[_core.Appender]) -> list[Work]:
        return [
            Work(appender, batches) for appender in waiting if (batches := self._take(appender))
        ]

    def _take(self, appender: _core.Appender) -> Sequence[_core.Batch]:
        try:
            return appender.take()
        except Exception as error:  # no memory to encode it, say: the others are committed
            appender.settle([], LedgerError(f"messages could not be encoded: {error!r}"))
            return []

    @property
    def busy_here(self) -> bool:
        """Is this thread inside a commit? So is a signal handler that interrupted it."""
        return bool(self._commit_lock._is_owned()) or self._ledger.busy_here

    def check_free(self) -> None:
        """LedgerError where this thread would wait for itself."""
        if self.busy_here:
            raise called_reentrantly(self._ledger.path)

    # ---- in the background ---------------------------------------------------------------

    def start(self) -> None:
        """Start the thread in the background, unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._run, name="exclusivelog-commit", daemon=True
                    )
                    self._thread = threads.start(self._ledger.path, thread)

    def _run(self) -> None:
        _core.keep_running(self._commit_when_due, self._report)

    def _commit_when_due(self) -> bool:
        if not self.commit_queue.sleep():
            return False
        try:
            self._commit_alone()
        finally:
            _core.run_callbacks()
        return True

    def _commit_alone(self) -> None:
        with self._commit_lock:
            self._commit()

    def _report(self, error: BaseException) -> None:
        # Every receipt has its outcome, or is in the commit queue still.
        logs.emit(log, logs.COMMIT_INTERRUPTED, error=error, ledger=self._ledger.path)

    def stop(self) -> None:
        """End the thread in the background; what waits must have been committed before."""
        self.commit_queue.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=60)


# ---- of one session --------------------------------------------------------------------


Placed = TypeVar("Placed", bound="int | tuple[int, int, int]")


class LocalSending:
    """Appends what one session is given, to the ledger of its engine."""

    __slots__ = ("_committer", "_ledger", "_options", "_topic", "appender")

    def __init__(
        self, ledger: Store, committer: Committer, appender: _core.Appender, topic: str,
        options: SessionOptions,
    ) -> None:  # fmt: skip
        self.appender = appender
        self._ledger, self._committer = ledger, committer
        self._topic, self._options = topic, options

    # ---- one message -----------------------------------------------------------------------

    def send(self, message: Encoded, timeout: float | None) -> int:
        """Append one message; its offset, once it is durable."""
        if timeout is None and sum(len(part or b"") for part in message[:3]) < SENT_AT_ONCE:
            sent = self._append_now(lambda: self.appender.send(*message), message[4])
            if sent is not None:
                return sent
        receipt = self.appender.add(*message)
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        return self._outcome(receipt, timeout)

    def send_async(self, message: Encoded) -> _core.Receipt:
        """Queue one message, and commit what waits where that is too much."""
        receipt = self._queue(message)
        self.commit_if_full()
        return receipt

    def commit_if_full(self) -> None:
        """Commit what waits, where `max_pending_bytes` do."""
        if self.appender.holds(self._options.max_pending_bytes):
            self._committer.commit(self.appender)

    def offer(self, message: Encoded) -> _core.Receipt | None:
        """The same, but leave the commit to the background; None, and nothing was queued, while
        other threads append past the queue."""
        receipt = self.appender.add(*message, True, False)
        if receipt is _core.NOT_NOW:
            return None
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        if self.appender.holds(self._options.max_pending_bytes):
            self._committer.commit_queue.put(self.appender, 0.0)
        return receipt

    def _queue(self, message: Encoded) -> _core.Receipt:
        receipt = self.appender.add(*message, True)
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        return receipt

    def _append_now(self, append: Callable[[], Placed], sequence: int | None) -> Placed | None:
        """Append past the queue; None if there is one, and this must stand behind it."""
        outcome = append()
        while isinstance(outcome, int) and -outcome in REPAIRABLE:
            repair(self._ledger, self.appender, -outcome)
            outcome = append()
        if not isinstance(outcome, int) or outcome >= 0:
            return outcome
        if -outcome == Outcome.QUEUED:
            return None
        raise refusal(self._ledger, self.appender, -outcome, sequence)

    def _outcome(self, receipt: _core.Receipt, timeout: float | None) -> int:
        if timeout is None:
            self._committer.commit(self.appender, receipt)
        else:
            self._committer.commit_within(self.appender, receipt, timeout)
        if not receipt.done():
            raise without_outcome(self._topic, timeout)
        return receipt.result()

    def duplicate(self, appender: _core.Appender, sequence: int | None) -> DuplicateSequenceError:
        """The error for a sequence id that was used before."""
        return duplicate(self._ledger, appender, sequence)

    # ---- several, atomically ---------------------------------------------------------------

    def send_batch(self, columns: Columns, sequence: int | None, timeout: float | None) -> int:
        """Append messages atomically; the first one's offset."""
        return self._send_batch(columns.batch(self.appender), sequence, timeout)

    def _send_batch(self, batch: _core.Batch, sequence: int | None, timeout: float | None) -> int:
        if timeout is None and batch.small:
            sent = self._append_now(lambda: self.appender.send_batch(batch, sequence), sequence)
            if sent is not None:
                return sent
        receipt = self.appender.add_batch(batch, sequence)
        if receipt is None:
            raise self.duplicate(self.appender, sequence)
        return self._outcome(receipt, timeout)

    # ---- append now, flush later -----------------------------------------------------------

    def append(self, messages: Sequence[Raw]) -> tuple[int, int, int] | int:
        """Append messages atomically: (offset, position, generation), the last two for
        `await_flush`; or the offset of what is flushed already."""
        call = self.appender.append
        key, value, properties = messages[0]
        if len(messages) == 1 and len(value or b"") + len(key or b"") < SENT_AT_ONCE:
            outcome = self._append_now(lambda: call(value, key, properties), None)
            if isinstance(outcome, tuple):
                return outcome
            return self._send_batch(self._batch_of(messages), None, None)
        batch = self._batch_of(messages)
        if batch.small:
            outcome = self._append_now(lambda: self.appender.append_batch(batch), None)
            if isinstance(outcome, tuple):
                return outcome
        return self._send_batch(batch, None, None)  # it is large, or others wait before it

    def _batch_of(self, messages: Sequence[Raw]) -> _core.Batch:
        keys, values, properties = ([m[column] for m in messages] for column in range(3))
        return self.appender.make_batch(
            _core.strings(values), _core.strings(keys) if _any_given(keys) else None,
            _core.strings(properties) if _any_given(properties) else None, None,
        )  # fmt: skip

    def await_flush(self, position: int, generation: int) -> None:
        """Return once what `append` has appended is durable."""
        assert self._ledger.journal is not None
        outcome = self._ledger.journal.flush_to(position, generation)
        if outcome != Outcome.PLACED:
            error = refusal(self._ledger, self.appender, outcome)
            error.maybe_written = True
            raise error

    # ---- what was accepted -----------------------------------------------------------------

    def flush(self, timeout: float | None) -> bool:
        """Wait for the outcome of what was accepted; False if nothing waits."""
        waiting = self.appender.newest()
        if waiting is not None:
            self._outcome(waiting, timeout)
        return waiting is not None

    def drain(self) -> None:
        """Commit what was accepted so far."""
        self.appender.await_sends()
        self._committer.commit(self.appender)

    def finish(self) -> ExclusiveLogError | None:
        """Commit what was accepted; what the last of it failed with, unless it was fenced."""
        waiting = self.appender.newest()
        if waiting is None:
            return None
        self._committer.commit(self.appender, waiting)
        error = waiting.exception()
        if isinstance(error, ProducerFencedError) or not isinstance(error, ExclusiveLogError):
            return None
        return error

    def private_appender(self) -> _core.Appender:
        """One for a transaction, which goes on where `appender` is."""
        return _core.Appender(
            self.appender.name, self.appender.last_sequence, self._options.max_batch_messages,
            self._options.max_batch_bytes, self.appender.session,
        )  # fmt: skip


class Pauses:
    """Whether the appends of one session wait, and for how many calls: hand-overs, transactions.

    True while they wait; what was accepted before is still sent."""

    __slots__ = ("_appender", "_lock", "_resumed", "_stopped", "_topic", "count")

    def __init__(self, appender: _core.Appender, topic: str, lock: _core.Lock) -> None:
        self.count = 0  # of the calls that they wait for
        self._appender, self._topic = appender, topic
        self._lock = lock  # the session's
        self._resumed: threading.Event | None = None  # while they wait
        self._stopped = False

    def __bool__(self) -> bool:
        return self._resumed is not None

    def begin(self) -> None:
        """Let appends wait until as many calls of `end`."""
        with self._lock:
            self.count += 1
            if self._resumed is None and not self._stopped:
                self._resumed = threading.Event()
                self._appender.pause(SessionPaused(f"topic {self._topic!r} is being handed over"))

    def end(self) -> None:
        """Let appends go on, if this is the last call that they wait for."""
        with self._lock:
            self.count -= 1
            if not self.count:
                self._appender.resume()
                self._wake()

    def stop(self) -> None:
        """The session has ended: its appends fail, and wait no more."""
        with self._lock:
            self._stopped = True
            self._wake()

    def _wake(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.set()

    def wait(self, timeout: float | None, check: Callable[[], object]) -> bool:
        """Return once appends do not wait, calling `check` meanwhile; False after `timeout`
        seconds."""
        resumed = self._resumed
        return resumed is None or in_slices(resumed.wait, timeout, check)


def _any_given(column: Iterable[object]) -> bool:
    """Has any message one?"""
    return any(item is not None for item in column)
