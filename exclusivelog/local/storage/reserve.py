"""Room on the disk that is kept for trims and deletions (rule H2).

LMDB writes a changed page to another place, so even a transaction that deletes rows needs some
pages, and what lives in a segment must be written elsewhere before its file can be removed. On a
full disk there may be no room for that. So a ledger keeps some blocks of the disk behind the end of
its journal, where no program sees them as contents. A trim or deletion that finds no room gives
half of them to `data.mdb`, and the other half back; what it frees is used from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import lmdb

from exclusivelog import _core, logs
from exclusivelog.errors import LedgerFullError
from exclusivelog.foreign import Ignoring
from exclusivelog.local.files import DATA, JOURNAL, Directory

log = logging.getLogger(__name__)

# A transaction that deletes DROPPED_AT_ONCE entries changes some hundred KiB of pages.
RESERVED = 1 << 20
KEPT = 2 * RESERVED  # as much again for the first segment that is rewritten
BLOCK = 512  # bytes: what `st_blocks` counts
LEFT = 8 * RESERVED  # with less room on the disk, all of it is for messages

Result = TypeVar("Result")


class Reserve:
    """The reserve of the ledger in this directory. `capacity`: that of its journal."""

    def __init__(self, directory: Directory, capacity: int) -> None:
        self._directory = directory
        self._end = _core.JOURNAL_HEADER_BYTES + capacity
        self.spent = False
        self.lent = False  # does `free` run with it?

    @property
    def left(self) -> int:
        """The bytes that `help` can give to what it calls: none once any process has spent them."""
        return RESERVED if self._is_kept() and not self.spent else 0

    def _is_kept(self) -> bool:
        facts = self._directory.facts(JOURNAL)
        return facts is not None and facts.st_blocks * BLOCK >= self._end + KEPT

    def keep(self) -> None:
        """Allocate it, unless there is little room, or the file system has no such blocks."""
        if self._is_kept():
            self.spent = False  # it is there, as at most openings: that is known without the file
            return
        with Ignoring(OSError), self._opened(JOURNAL) as fd:
            room = os.fstatvfs(fd)
            if room.f_bavail * room.f_frsize >= LEFT:
                _core.allocate_behind(fd, self._end, KEPT)
                self.spent = False

    def help(self, free: Callable[[], Result]) -> Result:
        """The result of `free`, which frees room: if the disk has none, it is called again with the
        reserve."""
        try:
            return free()
        except LedgerFullError as error:
            # Blocks of the disk are no help to tables that have reached `map_size`.
            if self.spent or isinstance(error.__cause__, lmdb.MapFullError):
                raise
            logs.emit(log, logs.RESERVE_SPENT, ledger=self._directory.path, reason=str(error))
            self._spend()
            self.lent = True
            try:
                return free()
            finally:
                self.lent = False

    def _spend(self) -> None:
        self.spent = True
        with Ignoring(OSError), self._opened(JOURNAL) as fd:
            os.ftruncate(fd, self._end)  # its size is the same
        with Ignoring(OSError), self._opened(DATA) as fd:
            _core.allocate_behind(fd, os.fstat(fd).st_size, RESERVED)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = self._directory.open(name, os.O_RDWR)
        try:
            yield fd
        finally:
            os.close(fd)
