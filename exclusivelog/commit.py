"""Group commit: whoever commits takes everything along that waits at that moment.

`send` commits in its own thread: one thread leads, and those that arrive meanwhile find
their messages in the leader's commit, or lead the next one. `send_async` leaves it to a
thread in the background, which starts when first needed and sleeps when nothing waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.errors import ExclusiveLogError, WaitTimeoutError
from exclusivelog.ledger import Ledger
from exclusivelog.log import Work, append

if TYPE_CHECKING:
    from exclusivelog.producer import Producer

log = logging.getLogger("exclusivelog")

RETRY_SECONDS = 0.25  # after a commit that could not even begin


class Committer:
    """Commits for all producers of one engine."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turn = threading.Lock()
        self._waiting: dict[int, Producer] = {}
        self._wanted = threading.Condition()
        self._due: float | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    # ---- in the sender's thread ----------------------------------------------------------

    def commit(self, producer: Producer, receipt: _core.Receipt | None = None) -> None:
        """Return when the outcome of `receipt` (None: of all that this producer has sent) is
        known, having committed it together with everything else that waits."""
        receipt = receipt or producer.appender.newest()
        if receipt is None:
            return
        if threading.current_thread() is threading.main_thread():
            # Ctrl-C strikes here, and may do so between a commit and the news of it: so the
            # main thread lets another one lead, and may be interrupted while it waits.
            self.schedule(producer, 0.0)
            receipt.exception()
            return
        self._enqueue(producer)
        try:
            with self._turn:
                if not receipt.done():
                    self._lead()
        finally:
            _core.run_callbacks()

    def commit_within(self, producer: Producer, receipt: _core.Receipt, timeout: float) -> None:
        """The same, for at most `timeout` seconds: in the background, because who leads cannot
        leave the ledger's queue."""
        self.schedule(producer, 0.0)
        with contextlib.suppress(WaitTimeoutError):
            receipt.exception(timeout)

    def fail(self, producer: Producer, error: ExclusiveLogError) -> None:
        """Fail what this producer has waiting, and whatever it may ever send.

        In turn with the commits: what is being committed right now has its own outcome, and
        that is not changed by what has become known meanwhile (rules B9, B10).
        """
        with self._turn:
            producer.appender.settle([], error, True)
        _core.run_callbacks()

    # ---- who leads -----------------------------------------------------------------------

    def _enqueue(self, producer: Producer) -> None:
        with self._wanted:
            self._waiting[id(producer)] = producer

    def _lead(self) -> None:
        works = self._gather()
        if works:
            try:
                append(self._ledger, works)
            except Exception as error:  # every receipt tells its owner
                expected = isinstance(error, ExclusiveLogError)
                log.log(logging.DEBUG if expected else logging.ERROR, "a commit failed: %r", error)

    def _gather(self) -> list[Work]:
        with self._wanted:
            waiting, self._waiting = self._waiting, {}
        try:
            works = []
            for producer in waiting.values():
                producer.scheduled = False  # before it is emptied: what comes later asks anew
                if batches := producer.appender.take():
                    works.append(Work(producer.session, producer.appender, batches))
            return works
        except BaseException:
            for producer in waiting.values():
                self.schedule(producer, RETRY_SECONDS)
            raise

    # ---- in the background ---------------------------------------------------------------

    def schedule(self, producer: Producer, delay: float) -> None:
        """Commit this producer's messages within `delay` seconds."""
        due = time.monotonic() + delay
        with self._wanted:
            self._waiting[id(producer)] = producer
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="exclusivelog-commit", daemon=True
                )
                self._thread.start()
            if self._due is None or due < self._due:
                self._due = due
                self._wanted.notify()

    def _run(self) -> None:
        while self._sleep_until_due():
            for step in (self._take_turn, _core.run_callbacks):
                try:
                    step()
                except BaseException:  # every receipt has its outcome; the next commit may do
                    log.exception("a commit in the background was interrupted")

    def _take_turn(self) -> None:
        with self._turn:
            self._lead()

    def _sleep_until_due(self) -> bool:
        with self._wanted:
            while not self._stopped:
                if self._due is None:
                    self._wanted.wait()
                elif (left := self._due - time.monotonic()) > 0:
                    self._wanted.wait(left)
                else:
                    self._due = None
                    return True
        return False

    def stop(self) -> None:
        """End the thread in the background; what waits must have been committed before."""
        with self._wanted:
            self._stopped = True
            self._wanted.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=60)
