"""The blocks of mapped files: each file has its own, so that a store into it needs no room.

A copy of a file may share its blocks with the original (`cp` does so on xfs), and so does a
snapshot (btrfs). Then the next write to each block needs a new one. For a store into the mapped
file that is a SIGBUS if the disk is full. Until the file has blocks of its own again, such stores
use the ledger's spare room (_native/spare_room.h).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Iterator

from exclusivelog import _core
from exclusivelog.foreign import Ignoring, pass_on_foreign

FS_IOC_FIEMAP, MOST_EXTENTS = 0xC020660B, 256
FIEMAP = struct.Struct("QQIIII")  # start, length, flags, extents found, room for extents, 0
EXTENT = struct.Struct("Q8xQ16xI12x")  # start, length, flags
FIEMAP_EXTENT_LAST, FIEMAP_EXTENT_SHARED = 1, 0x2000
# An append waits while a piece is copied, and goes on between two.
PIECE = 1 << 20
ROOM_LEFT = 4 << 20  # bytes for the file system's own tables
# The lock files, the pages of a frame, and what a file system allocates beyond them.
SPARE = 3 << 19


def own_blocks(fd: int) -> None:
    """Give a file blocks for all of its bytes, as a copy may have holes, which it shares with no
    other file. OSError (ENOSPC) if there is no room."""
    facts = os.fstat(fd)
    if facts.st_blocks * 512 < facts.st_size:
        os.posix_fallocate(fd, 0, facts.st_size)
    unshare(fd)


def unshare(fd: int, size: int | None = None) -> None:
    """Give the first `size` bytes of a file (None: all of them) blocks that no other file shares.
    Other processes may write to the file meanwhile. OSError (ENOSPC) if there is no room."""
    end = os.fstat(fd).st_size if size is None else min(size, os.fstat(fd).st_size)
    found = list(shared_ranges(fd, end))
    for start, length in found:
        for at in range(start, start + length, PIECE):
            _unshare_piece(fd, at, min(PIECE, start + length - at))
    if found:
        os.fdatasync(fd)  # only then the blocks count as the file's own


def shared_ranges(fd: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what the first `end` bytes of a file share with other files. None where
    the file system does not say so."""
    start = 0
    while start < end:
        query = bytearray(FIEMAP.pack(start, end - start, 0, 0, MOST_EXTENTS, 0))
        query += bytes(MOST_EXTENTS * EXTENT.size)
        try:
            fcntl.ioctl(fd, FS_IOC_FIEMAP, query)
        except OSError as error:
            pass_on_foreign(error)
            return
        count = FIEMAP.unpack_from(query)[3]
        flags = FIEMAP_EXTENT_LAST
        for number in range(count):
            at, length, flags = EXTENT.unpack_from(query, FIEMAP.size + number * EXTENT.size)
            first, start = max(at, start), at + length
            if flags & FIEMAP_EXTENT_SHARED and first < end:
                yield first, min(start, end) - first
        if flags & FIEMAP_EXTENT_LAST:
            return


def _unshare_piece(fd: int, start: int, length: int) -> None:
    try:
        _core.unshare_blocks(fd, start, length)
    except OSError as error:
        pass_on_foreign(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        # On btrfs, each store leads to new blocks. Without room, it would be the SIGBUS.
        room = os.fstatvfs(fd)
        if room.f_bavail * room.f_frsize < length + ROOM_LEFT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        before = start % mmap.PAGESIZE
        _core.store_again(fd, start - before, length + before)


# ---- spare room --------------------------------------------------------------------------


class SpareRoom:
    """The room for stores into files whose blocks may be shared, in a file without a name, which is
    in no copy. `directory`: a path to the ledger's; `files`: descriptors of its lock files."""

    def __init__(
        self,
        directory: str,
        files: Iterable[int],
        journal: _core.Journal,
        guards: Iterable[_core.FileGuard],
    ) -> None:
        self._room: _core.SpareRoom | None = None
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self._room = _core.SpareRoom(self._fd, SPARE, files, journal, guards)
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        """Allocate it again, if a store has needed it, and if there is room."""
        if self._room is not None and self._room.spent:
            with Ignoring(OSError):
                self._room.fill()

    def close(self) -> None:
        """Free it. A second call has no effect."""
        room, self._room = self._room, None
        if room is not None:
            room.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
