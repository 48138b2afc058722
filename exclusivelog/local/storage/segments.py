"""Segments: files for large entries, to which the ledger's tables refer.

```text
segments/<id, 16 hex digits>    entries, each at a multiple of 64 bytes
```

LMDB would copy a large entry into fresh pages, and each reader would copy it out again. In a
segment it is written once and never changed: readers map the file and need no copy, even after
it was removed. A segment grows only at its end, within a write transaction, and is flushed before
that commits. If the transaction does not commit, its entries are cut off or overwritten, unless
the row that tells where the segment ends may be damaged: then they are dead bytes of it.

The row of a large entry in the table `entries` has its segment and position. A row of the table
`segments` has the segment's committed end and the number of its live entries. A segment without
live entries is removed, once no open read can refer to it. One that has few is rewritten
(maintenance/rewriting.py).
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import logging
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping

from exclusivelog import _core, logs
from exclusivelog.errors import LedgerError
from exclusivelog.foreign import Ignoring, pass_on_foreign
from exclusivelog.local.files import SEGMENTS, Directory, why_shared

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20  # a segment of this size takes no more entries
# On a small disk, so does one that has this share of the disk, but at least these bytes.
SHARE_OF_DISK, LEAST_SEGMENT_BYTES = 64, 1 << 20
LARGE_ENTRY = 128 << 10  # bytes: an entry of this size or more goes into a segment
MADE_FIRST = 0o600  # a new file's mode, until it gets the mode of data.mdb
ALIGNMENT = 64  # as Arrow recommends
# Keep this much of the newest entries in the page cache, for readers at the end of topics, and drop
# the rest: a large load must not evict everything else, nor make a hypervisor provide more memory,
# which takes several times as long as the disk.
KEPT_IN_MEMORY = 64 << 20
MAPPED_BEYOND = 64 << 20  # address space, not memory
MOST_MAPPED = 64  # segments whose files a process keeps open and mapped

NAME = re.compile("[0-9a-f]{16}")
REFERENCE = struct.Struct(">8sQQQ")
REFERENCE_MAGIC = b"XLREF\0\0\1"


MOST_OPEN = 16384  # entries that a reader keeps open: about 1 KB each
MOST_DECOMPRESSED = 64 << 20  # bytes of the compressed ones among them, after decompression


class OpenEntries:
    """Entries in segments that one reader of one topic keeps open. Parts that were verified are not
    verified again: the bytes at the place that a row names never change."""

    __slots__ = ("__weakref__", "_decompressed", "_entries", "_lasts", "_segments", "newest")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.newest: _core.Entry | None = None  # the entry that was opened last
        self._lasts: list[int] = []  # their last offsets, rising
        self._entries: dict[int, tuple[bytes, _core.Entry]] = {}  # by last offset, with their rows
        self._decompressed = 0  # bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, last: int, row: bytes) -> _core.Entry | None:
        """The entry with this last offset, to which this row refers; None if it is not open."""
        found = self._entries.get(last)
        if found is None or found[0] != row or not self._segments.still_has(row):
            return None
        return found[1]

    def holding(self, offset: int) -> _core.Entry | None:
        """The entry with the message at `offset`; None if it is not open."""
        lasts = self._lasts
        at = bisect.bisect_left(lasts, offset)
        found = self._entries.get(lasts[at]) if at < len(lasts) else None
        if found is None or found[1].base_offset > offset or not self._segments.still_has(found[0]):
            return None
        return found[1]

    def put(self, last: int, row: bytes, entry: _core.Entry) -> None:
        """Keep the entry that a row refers to; no effect if the row is the entry itself."""
        if not is_reference(row):
            return
        held = self._entries.get(last)
        if held is not None and held[1] is entry:
            return
        more = entry.nbytes if entry.compression else 0
        if len(self._entries) >= MOST_OPEN or self._decompressed + more > MOST_DECOMPRESSED:
            self.clear()
        self._decompressed += more
        if last not in self._entries:
            bisect.insort(self._lasts, last)
        self._entries[last] = row, entry
        self.newest = entry

    def drop(self, segment: int) -> None:
        """Close the entries of a segment: mapped entries would keep its space after its removal.
        Any thread may call it."""
        left = {
            last: (row, entry)
            for last, (row, entry) in list(self._entries.items())
            if REFERENCE.unpack(row)[1] != segment
        }
        self._lasts, self._entries, self.newest = sorted(left), left, None

    def clear(self) -> None:
        """Close all."""
        self._lasts, self._entries, self.newest, self._decompressed = [], {}, None, 0


def is_reference(row: bytes) -> bool:
    """Does this row of the table `entries` refer to an entry in a segment?"""
    return len(row) == REFERENCE.size and row.startswith(REFERENCE_MAGIC)


def space(length: int) -> int:
    """The bytes that an entry takes in a segment.

    >>> space(1), space(64)
    (64, 64)
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


def segment_bytes(limit: int, disk: int) -> int:
    """The size from which on a segment takes no more entries. `limit`: the most bytes of all
    segments together; `disk`: the size of the disk, 0 if it has none. Where there is little room,
    segments are shorter, because space is freed only by whole segments.

    >>> segment_bytes(limit=1 << 40, disk=1 << 40) == SEGMENT_BYTES
    True
    >>> segment_bytes(limit=1 << 40, disk=320 << 20) >> 20
    5
    """
    share = max(LEAST_SEGMENT_BYTES, disk // SHARE_OF_DISK) if disk else SEGMENT_BYTES
    return min(SEGMENT_BYTES, limit // 8, share)


def _size_of_disk(ledger: Directory) -> int:
    facts = os.statvfs(ledger.by_descriptor)
    return facts.f_blocks * facts.f_frsize


class Unneeded:
    """Segments to which no row refers any more. Each is removed once no open read can refer to
    it."""

    def __init__(self, remove: Callable[[int], None]) -> None:
        self._remove = remove
        self._since: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def add(self, segments: Mapping[int, int]) -> None:
        """Have segments removed, {segment: the first transaction that needs it no more}. Their ids
        are never given again."""
        self._since.update(segments)

    def remove(self, oldest: float) -> None:
        """Remove what no open read can refer to. `oldest`: the last transaction that the read with
        the oldest snapshot sees; infinite if there is no read."""
        for segment, transaction in list(self._since.items()):
            if transaction <= oldest and self._since.pop(segment, None) is not None:
                self._remove(segment)


class Segments:
    """The segment files of one ledger, as this process has them open."""

    def __init__(self, ledger: Directory, limit: int) -> None:
        self.path = os.path.join(ledger.path, "segments")
        self.limit = limit  # bytes that all segments together may take
        self.disk_size = _size_of_disk(ledger)
        self._ledger = ledger
        self._place: Directory | None = None
        self._mapping = threading.RLock()  # an RLock: a finalizer may read
        self._mapped: dict[int, tuple[int, _core.Mapping]] = {}  # (file descriptor, mapping)
        self._open: weakref.WeakSet[OpenEntries] = weakref.WeakSet()  # of readers
        self._growing = threading.Lock()
        self._newest: tuple[int, int] | None = None  # (segment, file descriptor)
        self._dropped = 0  # bytes of the newest segment that were dropped from the page cache
        self.unneeded = Unneeded(self.remove)
        self.stuck: set[int] = set()  # have a damaged entry, so rewriting them frees nothing

    def file(self, segment: int) -> str:
        """The path of a segment."""
        return os.path.join(self.path, _name(segment))

    @property
    def newest(self) -> tuple[int, int] | None:
        """The segment that is open to write: (its number, descriptor). Another object after each
        change."""
        return self._newest

    @property
    def files(self) -> dict[str, int]:
        """What is open to write: {name: descriptor} of the directory and the newest segment."""
        place, newest = self._place, self._newest
        found = {} if place is None else {SEGMENTS: place.fd}
        return found if newest is None else {**found, f"{SEGMENTS}/{_name(newest[0])}": newest[1]}

    def _directory(self) -> Directory | None:
        """The directory of the segments; None if there is none."""
        if self._place is None:
            with Ignoring(FileNotFoundError):
                self._place = Directory(self.path, self._ledger)
        return self._place

    def _facts(self, segment: int) -> os.stat_result | None:
        place = self._directory()
        return None if place is None else place.facts(_name(segment))

    # ---- read ----------------------------------------------------------------------------

    def load(self, row: bytes) -> bytes | memoryview:
        """The entry of a row: the row itself, or the mapped bytes that it refers to.

        Raises ValueError if the segment does not have them.
        """
        if not is_reference(row):
            return row
        _, segment, position, length = REFERENCE.unpack(row)
        stop = position + length
        with self._mapping:
            fd, mapped = self._mapped.get(segment) or self._map(segment, stop)
            if len(mapped) < stop or os.fstat(fd).st_size < stop:
                # An overlay file system has replaced the file.
                fd, mapped = self._map(segment, stop)
            size = os.fstat(fd).st_size
        # Reading a mapping beyond the file's end would be a SIGBUS.
        if stop > min(size, len(mapped)):
            raise ValueError(f"{self.file(segment)} has {size} bytes, {stop} are needed")
        return mapped.view(position, stop)

    def still_has(self, row: bytes) -> bool:
        """Does the mapped segment still have the entry of this row, or was it cut off?"""
        _, segment, position, length = REFERENCE.unpack(row)
        with self._mapping:
            mapped = self._mapped.get(segment)
            return mapped is not None and os.fstat(mapped[0]).st_size >= position + length

    def open_entries(self) -> OpenEntries:
        """A new `OpenEntries`, which drops the entries of removed segments."""
        made = OpenEntries(self)
        with self._mapping:
            self._open.add(made)
        return made

    def _map(self, segment: int, stop: int) -> tuple[int, _core.Mapping]:
        try:
            fd = self.open(segment)
        except FileNotFoundError as error:
            pass_on_foreign(error)
            raise ValueError(f"{self.file(segment)} is missing") from None
        try:
            # Map the size to which a segment may grow, once; map more only for a larger entry.
            room = max(SEGMENT_BYTES + MAPPED_BEYOND, min(stop, os.fstat(fd).st_size))
            mapped = _core.Mapping(fd, room)
        except BaseException:
            os.close(fd)
            raise
        self._forget(segment)
        self._forget_removed()
        while len(self._mapped) >= MOST_MAPPED:
            self._forget(next(iter(self._mapped)))
        self._mapped[segment] = fd, mapped
        return fd, mapped

    def _forget(self, segment: int) -> None:
        if segment in self._mapped:
            os.close(self._mapped.pop(segment)[0])
        for entries in list(self._open):
            entries.drop(segment)

    def _forget_removed(self) -> None:
        for segment in list(self._mapped):
            if not os.fstat(self._mapped[segment][0]).st_nlink:
                self._forget(segment)

    # ---- write, within a write transaction -----------------------------------------------

    def append(self, segment: int, end: int, entry: bytes | memoryview) -> int:
        """Write an entry after `end`; its position. It is durable only after `sync`."""
        position, written, view = space(end), 0, memoryview(entry)
        with self._growing:
            fd = self._open_newest(segment)
            while written < len(view):
                written += os.pwrite(fd, view[written:], position + written)
            # The disk works while the next entry is encoded.
            _core.start_writing(fd, position, written)
        return position

    def sync(self, segment: int) -> None:
        """Make all appended entries durable."""
        with self._growing:
            fd = self._open_newest(segment)
            os.fdatasync(fd)
            old = os.fstat(fd).st_size - KEPT_IN_MEMORY
            if old > self._dropped:
                os.posix_fadvise(fd, self._dropped, old - self._dropped, os.POSIX_FADV_DONTNEED)
                self._dropped = old

    def size(self, segment: int) -> int:
        """The bytes that a segment has, committed or not; 0 if its file is missing."""
        facts = self._facts(segment)
        return 0 if facts is None else facts.st_size

    def cut(self, segment: int, end: int) -> None:
        """Drop what was appended after `end`, to free the space of a failed transaction."""
        with self._growing:
            fd = self._open_newest(segment)
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)

    def _open_newest(self, segment: int) -> int:
        if self._newest is not None:
            known, fd = self._newest
            # The id of a rolled-back segment is used again, perhaps after another process has
            # removed the file that is open here.
            if known == segment and os.fstat(fd).st_nlink:
                return fd
            self._close_newest()
        if self._directory() is None:
            self._place = self._ledger.make_directory("segments")
        place = self._place
        assert place is not None
        fd = place.make(_name(segment), os.O_RDWR, MADE_FIRST)
        try:
            if why := why_shared(fd):
                raise LedgerError(why)
            place.sync()
            self._ledger.sync()  # an earlier attempt may have failed after creating the file
        except BaseException:
            os.close(fd)
            raise
        self._newest, self._dropped = (segment, fd), 0
        return fd

    def _close_newest(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            os.close(newest[1])

    # ---- remove --------------------------------------------------------------------------

    def remove(self, segment: int) -> None:
        """Remove a segment to which no row refers. Its readers keep their mappings."""
        self.stuck.discard(segment)
        try:
            place = self._directory()
            if place is not None:
                with Ignoring(FileNotFoundError):
                    place.remove(_name(segment))
        except OSError as error:  # the next process that opens the ledger retries
            pass_on_foreign(error)
            logs.emit(log, logs.SEGMENT_KEPT, file=self.file(segment), reason=str(error))
        self.forget_removed()

    def ids(self) -> set[int]:
        """The segments that have a file."""
        return {int(name, 16) for name in self._names()}

    def sweep(self, known: Container[int], last: int, transaction: int) -> None:
        """Discard segments to which no row refers, which dead processes have left, and remove those
        of rollbacks. `known` are the others, `last` is the last id that was given, and
        `transaction` the last one that was committed. Call it within a write transaction."""
        for segment in self.ids():
            if segment > last:  # of a rollback; its id will be given again
                self.remove(segment)
            elif segment not in known:
                self.unneeded.add({segment: transaction})

    def disk_bytes(self) -> int:
        """The disk space of their files."""
        found = (self._facts(int(name, 16)) for name in self._names())
        return sum(facts.st_blocks * 512 for facts in found if facts is not None)

    def _names(self) -> list[str]:
        place = self._directory()
        return [] if place is None else [name for name in place.names() if NAME.fullmatch(name)]

    def forget_removed(self) -> None:
        """Close segments that any process has removed, which frees their space."""
        with self._mapping:
            self._forget_removed()
        if self._growing.acquire(blocking=False):
            try:
                if self._newest is not None and not os.fstat(self._newest[1]).st_nlink:
                    self._close_newest()
            finally:
                self._growing.release()

    # ---- copy ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[int, int]]:
        """Open all segments, {segment: file descriptor}, so that those removed while the block runs
        can still be copied."""
        files: dict[int, int] = {}
        try:
            for name in self._names():
                with Ignoring(FileNotFoundError):
                    files[int(name, 16)] = self.open(int(name, 16))
            yield files
        finally:
            for fd in files.values():
                os.close(fd)

    def open(self, segment: int) -> int:
        """A file descriptor of a segment; FileNotFoundError if it is not there."""
        place = self._directory()
        if place is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return place.open(_name(segment), os.O_RDONLY)

    def close(self) -> None:
        """Close all files. Mappings that readers use stay."""
        with self._growing:
            self._close_newest()
        with self._mapping:
            for segment in list(self._mapped):
                self._forget(segment)
            place, self._place = self._place, None
            if place is not None:
                place.close()

    def forget(self) -> None:
        """In a forked child: close the files. Threads of the parent may have held the locks."""
        self._growing, self._mapping = threading.Lock(), threading.RLock()
        self.close()


def _name(segment: int) -> str:
    return f"{segment:016x}"
