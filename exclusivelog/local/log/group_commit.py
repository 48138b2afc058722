"""Group commit: each commit takes everything that waits at that moment.

`send` commits in its own thread: one thread at a time commits, and the messages of threads that
arrive meanwhile are in the next commit. `send_async` leaves it to a background thread, which sleeps
when nothing waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from exclusivelog import _core, threads
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerError,
    WaitTimeoutError,
    called_reentrantly,
)
from exclusivelog.local.log.entries import Work, append, append_together
from exclusivelog.local.storage.ledger import Ledger

log = logging.getLogger("exclusivelog")

RETRY_SECONDS = 0.25  # after a commit that could not begin


class Committer:
    """Commits for all producers of one engine."""

    def __init__(self, ledger: Ledger, run_callbacks: Callable[[], None]) -> None:
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
        for appender in self.commit_queue.look():
            self.commit(appender)
        with self._commit_lock:
            pass  # what another thread has taken is committed, too

    def drain_session(self, session: int) -> None:
        """Commit the messages of a session whose producers were dropped."""
        for appender in self.commit_queue.look():
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
                log.log(logging.DEBUG if expected else logging.ERROR, "a commit failed: %r", error)

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
        log.error("a commit in the background was interrupted", exc_info=error)

    def stop(self) -> None:
        """End the thread in the background; what waits must have been committed before."""
        self.commit_queue.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=60)
