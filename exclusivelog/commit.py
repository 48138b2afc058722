"""Group commit: whoever commits takes everything along that waits at that moment.

`send` commits in its own thread: one thread leads, and those that arrive meanwhile find
their messages in the leader's commit, or lead the next one. `send_async` leaves it to a
thread in the background, which sleeps when nothing waits.
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
from exclusivelog.ledger import Ledger
from exclusivelog.log import Work, append

log = logging.getLogger("exclusivelog")

RETRY_SECONDS = 0.25  # after a commit that could not even begin


class Committer:
    """Commits for all producers of one engine."""

    def __init__(self, ledger: Ledger, run_callbacks: Callable[[], None]) -> None:
        self._run_callbacks = weakref.WeakMethod(run_callbacks)  # an engine's, which has us
        self.agenda = _core.Agenda()
        self._ledger = ledger
        self._turn: Any = threading.RLock()
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
            # Ctrl-C strikes here, and may do so between a commit and the news of it: so the
            # main thread lets another one lead, and may be interrupted while it waits.
            self.agenda.put(appender, 0.0)
            receipt.exception()
            return
        try:
            with self._turn:
                if not receipt.done():
                    self._lead()
        finally:
            self._call_back()
        if not receipt.done():  # that commit was cut short; the next one is the background's
            self.agenda.put(appender, RETRY_SECONDS)
            receipt.exception()

    def commit_within(
        self, appender: _core.Appender, receipt: _core.Receipt, timeout: float
    ) -> None:
        """The same, for at most `timeout` seconds: in the background, because who leads cannot
        leave the ledger's queue."""
        self.check_free()
        self.agenda.put(appender, 0.0)
        with contextlib.suppress(WaitTimeoutError):
            receipt.exception(timeout)

    def drain(self) -> None:
        """Commit everything that waits, also what nobody holds a producer for any more."""
        for appender in self.agenda.look():
            self.commit(appender)
        with self._turn:
            pass  # what somebody else has taken is committed, too

    def drain_session(self, session: int) -> None:
        """Commit what a session was given whose producer nobody holds any more."""
        for appender in self.agenda.look():
            if appender.session.id == session:
                self.commit(appender)
        with self._turn:
            pass

    def fail(self, appender: _core.Appender, error: ExclusiveLogError) -> None:
        """Fail what this appender has waiting, and whatever it may ever get.

        In turn with the commits: what is being committed right now has its own outcome, and
        that is not changed by what has become known meanwhile (rules B9, B10).
        """
        with self._turn:
            appender.settle([], error, True)
        self._call_back()

    def _call_back(self) -> None:
        run = self._run_callbacks() or _core.run_callbacks
        run()

    # ---- who leads -----------------------------------------------------------------------

    def _lead(self) -> None:
        # What has no outcome when the block is left, by whatever exception, is tried again.
        with self.agenda as waiting:
            try:
                append(self._ledger, self._gather(waiting))
            except Exception as error:  # every receipt tells its owner, or is tried again
                expected = isinstance(error, ExclusiveLogError)
                log.log(logging.DEBUG if expected else logging.ERROR, "a commit failed: %r", error)

    def _gather(self, waiting: Sequence[_core.Appender]) -> list[Work]:
        return [
            Work(appender, batches) for appender in waiting if (batches := self._take(appender))
        ]

    def _take(self, appender: _core.Appender) -> Sequence[_core.Batch]:
        try:
            return appender.take()
        except Exception as error:  # no memory to encode it, say: that is not the others' fault
            appender.settle([], LedgerError(f"messages could not be encoded: {error!r}"))
            return []

    @property
    def busy_here(self) -> bool:
        """Is this thread inside a commit? A finalizer or a signal handler may find it so."""
        return bool(self._turn._is_owned()) or self._ledger.busy_here

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
        if not self.agenda.sleep():
            return False
        try:
            self._take_turn()
        finally:
            _core.run_callbacks()
        return True

    def _report(self, error: BaseException) -> None:
        # Every receipt has its outcome, or is on the agenda still.
        log.error("a commit in the background was interrupted", exc_info=error)

    def _take_turn(self) -> None:
        with self._turn:
            self._lead()

    def stop(self) -> None:
        """End the thread in the background; what waits must have been committed before."""
        self.agenda.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=60)
