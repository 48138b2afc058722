"""The thread that makes checkpoints: it moves what the journal has into the tables."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

from exclusivelog import _core, logs, threads
from exclusivelog.errors import LedgerError

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 1.0  # the longest that an append waits for its checkpoint
OF_NOTE_SECONDS = 0.5  # a checkpoint that takes longer is logged, and one of half the journal
RETRY_SECONDS = 0.25  # after a checkpoint that failed


class Checkpointer:
    """Calls `checkpoint` while the journal has a backlog, until `failed()` or `stop`.

    `journal` is None where this process makes no checkpoints: then every method does nothing.
    """

    def __init__(
        self, path: str, journal: _core.Journal | None, checkpoint: Callable[[], None],
        failed: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._path = path
        self._journal = journal
        self._checkpoint = checkpoint
        self._failed = failed
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._applied = -1  # where the backlog began at the last `poll`
        self._due = 0.0  # when this process requests a checkpoint if no other has made one

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None and self._journal is not None:
                    run = functools.partial(
                        _core.keep_running, functools.partial(self._run, self._journal), self._log
                    )
                    thread = threading.Thread(
                        target=run, name="exclusivelog-checkpoint", daemon=True
                    )
                    self._thread = threads.start(self._path, thread)

    def _log(self, error: BaseException) -> None:
        logs.emit(log, logs.CHECKPOINTS_FAILED, error=error, ledger=self._path, reason=repr(error))

    def poll(self) -> None:
        """Request a checkpoint if the backlog stalls: the process that appended it may have died.
        Call it about once a second."""
        journal = self._journal
        if journal is None:
            return
        applied, now = journal.tail - journal.backlog, time.monotonic()
        if not journal.backlog or applied != self._applied:
            self._applied, self._due = applied, now + 2 * CHECKPOINT_SECONDS
        elif now > self._due:
            self._due = now + 2 * CHECKPOINT_SECONDS
            self.start()
            journal.request_checkpoint()

    def _run(self, journal: _core.Journal) -> None:
        due = 0.0
        while True:
            seen = journal.expect()  # before the check below: a later request ends the wait
            if self._stopping.is_set():
                return
            backlog = journal.backlog
            if not backlog:
                journal.await_due(seen, -1.0)
                due = time.monotonic() + CHECKPOINT_SECONDS
                continue
            left = due - time.monotonic()
            if backlog < journal.capacity // 2 and left > 0:
                journal.await_due(seen, left)
                continue
            due = time.monotonic() + CHECKPOINT_SECONDS
            try:
                self._make_checkpoint(journal, backlog)
            except LedgerError as error:  # a full disk, say: appends go on while there is room
                if self._failed():
                    return
                logs.emit(log, logs.CHECKPOINT_REFUSED, ledger=self._path, reason=str(error))
                self._stopping.wait(RETRY_SECONDS)
            except Exception as error:
                logs.emit(
                    log, logs.CHECKPOINT_FAILED, error=error, ledger=self._path, reason=repr(error)
                )
                self._stopping.wait(RETRY_SECONDS)

    def _make_checkpoint(self, journal: _core.Journal, backlog: int) -> None:
        began = time.monotonic()
        self._checkpoint()
        seconds = time.monotonic() - began
        if seconds >= OF_NOTE_SECONDS or backlog >= journal.capacity // 2:
            logs.emit(
                log, logs.CHECKPOINT, ledger=self._path, bytes=backlog, seconds=seconds,
                reason="half of the journal" if backlog >= journal.capacity // 2 else "slow",
            )  # fmt: skip

    def stop(self) -> None:
        """Stop the thread, and make a last checkpoint."""
        self._stopping.set()
        if self._journal is None:
            return
        self._journal.request_checkpoint()
        if self._thread is not None:
            self._thread.join(timeout=60)
        if not self._failed():
            try:
                self._checkpoint()
            except LedgerError as error:
                logs.emit(log, logs.BACKLOG_KEPT, ledger=self._path, reason=str(error))
