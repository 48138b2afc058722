"""Fails a ledger for good when its files are lost (rules C7, H2). Then nothing is acknowledged any
more, and every call raises the same error, until the ledger is opened again."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

import lmdb

from exclusivelog import _core, logs
from exclusivelog.errors import EngineClosedError, ExclusiveLogError, LedgerError, LedgerIOError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.local.faults import translation
from exclusivelog.local.files import Directory

log = logging.getLogger(__name__)

PLACE_SECONDS = 1.0  # between two comparisons of the files with those that were opened


class Integrity:
    """Whether an open ledger may still be used.

    - `files`: the names of the files that must stay as they are.
    - `page_lost`: could a page of a mapped file not be read or written?
    - `check_readable`: raises where the reads of this process are not protected from writers.
    """

    def __init__(
        self,
        directory: Directory,
        files: tuple[str, ...],
        journal: _core.Journal | None,
        readonly: bool,
        page_lost: Callable[[], bool],
        check_readable: Callable[[], None],
    ) -> None:
        self._path = directory.path
        self._directory = directory
        self._files = {  # {name: (inode, size)}
            name: (facts.st_ino, facts.st_size)
            for name in files
            if (facts := directory.facts(name))
        }
        self._journal = journal
        self._readonly = readonly
        self._page_lost = page_lost
        self._check_readable = check_readable
        self._due = 0.0
        self._failure: LedgerError | None = None
        self.closed = False  # later errors are consequences of the closing, and fail nothing

    @property
    def failed(self) -> bool:
        """Has this ledger failed for good? Then no wait on it can succeed."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the error with which this ledger is known to have failed, if it has; checks
        nothing."""
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Raise the error with which this ledger has failed, here or in another process."""
        if self._failure is None:
            self._check_files()
        failed = 0 if self._journal is None else self._journal.failed
        if self._failure is None and failed:
            # Fail it only in this process: another one may have opened the ledger again by now.
            self._failure = LedgerIOError(
                f"{self._path}: a write or flush failed ({os.strerror(failed)}), so no send can be "
                "acknowledged; close every engine on it and open it again"
            )
            self._log(self._failure)
        self.raise_failure()

    def check_pages(self) -> None:
        """Do the same only if a page of a mapped file was lost: the last read may have used it."""
        if self._is_page_lost():
            self.check()

    def _is_page_lost(self) -> bool:
        return (self._journal is not None and self._journal.lost) or self._page_lost()

    def _check_files(self) -> None:
        if self._is_page_lost():
            error = LedgerIOError(
                f"{self._path}: the disk failed to read or write a page of a mapped file. It is "
                "full or shut down, or a file was cut off; close every engine and open it again"
            )
            self.fail(error)
        elif _core.monotonic() > self._due or (self._journal and self._journal.left):
            self.check_place()
            self._check_readable()

    def check_place(self) -> None:
        """LedgerError, for good, once the directory or a file in it is not the one that was opened
        (rule C7): nothing more is acknowledged here. Other processes check for themselves."""
        self._due = _core.monotonic() + PLACE_SECONDS
        if self._failure is None and not self.closed:
            why = self._directory.lost() or self._replaced()
            if why and not self.closed:  # else another thread is closing it
                self._failure = LedgerError(
                    f"{self._path} is no longer the ledger that this engine has open: {why}; close "
                    "the engine and open the ledger again"
                )
                if self._journal is not None and not self._readonly:
                    self._journal.leave(errno.ESTALE)
                self._log(self._failure)
        self.raise_failure()

    def _replaced(self) -> str:
        for name, (number, size) in self._files.items():
            try:
                facts = self._directory.facts(name)
            except OSError as error:  # privileges were dropped, or another thread closes the ledger
                pass_on_foreign(error)
                continue  # it cannot be checked; a call that uses the file reports why
            if facts is None or facts.st_ino != number:
                return f"its {name} was {'removed' if facts is None else 'replaced'}"
            if facts.st_size < size:
                return f"its {name} was cut off"
            self._files[name] = number, facts.st_size  # these files never shrink
        return ""

    def fail(self, error: LedgerIOError) -> None:
        """Make every call in all processes raise this error: after a failed flush, no message may
        count as durable."""
        if self._failure is None and not self.closed:
            self._failure = error
            if self._journal is not None and not self._readonly:
                self._journal.fail(errno.EIO)
            self._log(error)

    def _log(self, error: LedgerError) -> None:
        logs.emit(log, logs.FAILED, ledger=self._path, reason=str(error))

    def translated(self, error: BaseException) -> ExclusiveLogError | None:
        """The library's error for one of LMDB's or the system's; None for any other. A final one
        fails this ledger."""
        if self.closed and isinstance(error, lmdb.Error):
            return EngineClosedError(
                f"the ledger {self._path} was closed during the call; open it again"
            )
        if self._failure is not None and getattr(error, "errno", None) == errno.ESTALE:
            return self._failure  # the failure ended a wait for the journal
        raised = translation(self._path, error, self._readonly)
        if isinstance(raised, LedgerIOError):
            self.fail(raised)
        return raised
