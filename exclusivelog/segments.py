"""Segments: files for large entries, which the ledger's tables only refer to.

```text
segments/<id, 16 hex digits>    entries, each at a multiple of 64 bytes
```

Inside LMDB a large entry is copied into fresh pages, and copied out again by each reader. In
a segment it is written once and never changed: readers map the file and need no copy, not
even when it has been removed meanwhile. A segment grows at its end only, inside the
ledger's write transaction, and is flushed before that commits; how far it counts is a row of
the ledger. So what a transaction wrote that never committed lies behind the end, and is
overwritten by the next one. A segment goes when none of its entries is left.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator

SEGMENT_BYTES = 256 << 20  # a segment this long takes no more
LARGE_ENTRY = 128 << 10  # bytes, from which on an entry goes into a segment
ALIGNMENT = 64  # as Arrow likes it
# So much of what was appended last stays in memory for readers that follow. The rest is read
# back when it is asked for: a large load must not push everything else out of memory, nor
# make a hypervisor look for more of it, which costs several times what the disk does.
KEPT_IN_MEMORY = 64 << 20
MOST_MAPPED = 64  # segments that a process keeps mapped, and their files open

REFERENCE = struct.Struct(">8sQQQ")
REFERENCE_MAGIC = b"XLREF\0\0\1"


def is_reference(row: bytes) -> bool:
    """Does this row of the table `entries` stand for an entry in a segment?"""
    return len(row) == REFERENCE.size and row.startswith(REFERENCE_MAGIC)


def space(length: int) -> int:
    """The bytes that an entry takes in a segment.

    >>> space(1), space(64)
    (64, 64)
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


class Segments:
    """The segments of one ledger, as this process sees them."""

    def __init__(self, ledger: str, mode: int, limit: int) -> None:
        self.path = os.path.join(ledger, "segments")
        self.limit = limit  # bytes that all of them may take together
        self._mode = mode
        self._mapping = threading.Lock()
        self._mapped: dict[int, mmap.mmap] = {}
        self._newest: tuple[int, int] | None = None  # (segment, file descriptor)

    def _file(self, segment: int) -> str:
        return os.path.join(self.path, f"{segment:016x}")

    # ---- read ----------------------------------------------------------------------------

    def load(self, row: bytes) -> bytes | memoryview:
        """The entry of a row: the row itself, or what it refers to, where it lies.

        Raises ValueError if there is no such place.
        """
        if not is_reference(row):
            return row
        _, segment, position, length = REFERENCE.unpack(row)
        stop = position + length
        mapped = self._mapped.get(segment)
        if mapped is None or len(mapped) < stop:
            mapped = self._map(segment)
        # A mapping does not shrink with its file: to touch what is cut off would be fatal.
        if stop > min(len(mapped), mapped.size()):
            raise ValueError(
                f"{self._file(segment)} is cut off after {mapped.size()} bytes; {stop} are needed"
            )
        return memoryview(mapped)[position:stop]

    def _map(self, segment: int) -> mmap.mmap:
        with self._mapping:
            path = self._file(segment)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise ValueError(f"{path} is missing") from None
            try:
                if os.fstat(fd).st_size == 0:
                    raise ValueError(f"{path} is empty")
                mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            self._mapped.pop(segment, None)
            self._mapped[segment] = mapped
            while len(self._mapped) > MOST_MAPPED:
                del self._mapped[next(iter(self._mapped))]
            return mapped

    # ---- write, inside the ledger's write transaction ------------------------------------

    def append(self, segment: int, end: int, entry: bytes) -> int:
        """Write an entry behind `end`; its position. Durable only after `sync`."""
        fd = self._open_newest(segment)
        position, written, view = space(end), 0, memoryview(entry)
        while written < len(view):
            written += os.pwrite(fd, view[written:], position + written)
        return position

    def sync(self, segment: int) -> None:
        """Make what was appended durable."""
        fd = self._open_newest(segment)
        os.fdatasync(fd)
        old = os.fstat(fd).st_size - KEPT_IN_MEMORY
        if old > 0:
            os.posix_fadvise(fd, 0, old, os.POSIX_FADV_DONTNEED)

    def _open_newest(self, segment: int) -> int:
        if self._newest is not None and self._newest[0] == segment:
            return self._newest[1]
        if not os.path.isdir(self.path):
            os.mkdir(self.path, self._mode)
            sync_directory(os.path.dirname(self.path))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._file(segment), flags, self._mode & 0o666)
        try:
            sync_directory(self.path)
        except BaseException:
            os.close(fd)
            raise
        self._close_newest()
        self._newest = segment, fd
        return fd

    def _close_newest(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            os.close(newest[1])

    # ---- remove --------------------------------------------------------------------------

    def remove(self, segment: int) -> None:
        """Remove a segment that nothing refers to any more. Who reads it can go on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(segment))
        self._mapped.pop(segment, None)

    def sweep(self, known: Iterable[int]) -> None:
        """Remove the files of segments that no transaction ever committed, or that were to be
        removed when the process died. Inside a write transaction."""
        wanted = {f"{segment:016x}" for segment in known}
        for name in self._names():
            if name not in wanted:
                self.remove(int(name, 16))

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self.path) if len(name) == 16]
        return []

    def forget_removed(self) -> None:
        """Let go of segments that another process has removed: only then is their space free."""
        for segment in list(self._mapped):
            if not os.path.exists(self._file(segment)):
                self._mapped.pop(segment, None)

    # ---- copy ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[int, int]]:
        """All segments as open files, {segment: file descriptor}: whatever is removed
        meanwhile can still be copied."""
        files: dict[int, int] = {}
        try:
            for name in self._names():
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(self.path, name)
                    files[int(name, 16)] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            yield files
        finally:
            for fd in files.values():
                os.close(fd)

    def take_copy(self, segment: int, end: int, source: int) -> None:
        """Make `segment` the first `end` bytes of the open file `source`."""
        target = self._open_newest(segment)
        position = 0
        while position < end:
            copied = os.sendfile(target, source, position, min(end - position, 1 << 24))
            if copied == 0:
                raise ValueError(f"segment {segment:016x} is cut off after {position} bytes")
            position += copied
        os.fsync(target)

    def close(self) -> None:
        """Let go of all files. What readers hold stays mapped."""
        self._close_newest()
        self._mapped.clear()


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
