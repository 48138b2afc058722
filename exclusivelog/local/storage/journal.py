"""The journal's file: creating, opening and checking it, and cutting off a copy.

```text
0        8     magic, b"XLJFILE" and the version
8        8     capacity in bytes, little-endian
4096     ...   the ring of frames (see _native/journal_file.h)
```

A durable append costs one flush of a file whose blocks are allocated; a transaction on the tables
costs two, and rewrites pages. So small appends go into this file first, and a checkpoint moves many
of them into the tables at once. One row of the tables has the generation and position up to which
frames were applied. The transaction that applies frames writes that row, so that no frame is
applied twice.
"""

from __future__ import annotations

import os
import struct

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError
from exclusivelog.foreign import Ignoring
from exclusivelog.local.files import (
    JOURNAL,
    Directory,
    keep_in_place,
    remove_temporary,
    temporary_name,
)

JOURNAL_GIVEN_UP = "journal-given-up"  # made by hand: open the ledger without its journal
MAGIC = b"XLJFILE\x01"
CAPACITY = 8 << 20
HEADER = _core.JOURNAL_HEADER_BYTES
# A frame's header, as _native/journal_file.h documents it; and that of each version.
FRAME = struct.Struct("<4sIQQQQQQII")
HEADERS = {b"XLJ\1": struct.Struct("<4sIQQQQQII"), b"XLJ\2": FRAME}
STEP, PADDING, SIZE = 16, 1 << 31, (1 << 30) - 1


def open_file(directory: Directory, mode: int, readonly: bool) -> tuple[int, int]:
    """(descriptor, capacity in bytes) of a ledger's journal, created if there is none. Call it
    while the lock file is locked for opening."""
    if directory.facts(JOURNAL) is None and not readonly:
        _create(directory, mode)
    fd = directory.open(JOURNAL, os.O_RDONLY if readonly else os.O_RDWR)
    try:
        return fd, _check(os.path.join(directory.path, JOURNAL), fd)
    except BaseException:
        os.close(fd)
        raise


def inode(directory: Directory) -> int:
    """The inode of the journal's file; 0 if there is none."""
    facts = directory.facts(JOURNAL)
    return 0 if facts is None else facts.st_ino


def _create(directory: Directory, mode: int) -> None:
    # Create the whole file under another name, then rename it. Write its blocks, instead of only
    # reserving them, so that no later flush has to write the file's metadata.
    remove_temporary(directory, JOURNAL)
    temporary = temporary_name(JOURNAL)
    fd = directory.make(temporary, os.O_RDWR | os.O_EXCL, mode)
    try:
        keep_in_place(fd)
        os.posix_fallocate(fd, 0, HEADER + CAPACITY)  # a full disk must fail here
        # Linux keeps what one call has written in one folio, if it can (ext4: from 6.16 on), and a
        # flush of a mapped file goes through every page of the folios that it writes.
        zeros = bytes(16 << 10)
        for at in range(0, HEADER + CAPACITY, len(zeros)):
            os.pwrite(fd, zeros[: HEADER + CAPACITY - at], at)
        os.pwrite(fd, MAGIC + CAPACITY.to_bytes(8, "little"), 0)
        os.fsync(fd)
        directory.rename(temporary, JOURNAL)
        directory.sync()
    except BaseException:
        with Ignoring(OSError):
            directory.remove(temporary)
        raise
    finally:
        os.close(fd)


def _check(path: str, fd: int) -> int:
    header = os.pread(fd, 16, 0)
    size = os.fstat(fd).st_size
    capacity = int.from_bytes(header[8:], "little")
    if size < HEADER or (header.startswith(MAGIC) and size < HEADER + capacity):
        raise LedgerCorruptedError(
            f"{path} was cut off after {size} bytes; the last acknowledged messages may be gone. "
            f"Restore a backup, or move it away and make an empty file {JOURNAL_GIVEN_UP!r} there "
            "to open the ledger without it"
        )
    if not header.startswith(MAGIC) or size != HEADER + capacity or capacity % 4096:
        raise LedgerVersionError(
            f"{path} is not a journal of this version ({size} bytes); acknowledged messages may "
            "be in it: open it with the version that made it, or restore a backup"
        )
    return capacity


# ---- copy --------------------------------------------------------------------------------


def cut_off(
    fd: int, position: int, generation: int, capacity: int, version: int, tail: int
) -> None:
    """End a copied journal, whose frames from `position` on the copied tables lack: at the `tail`
    of the time before it was copied, or before the first frame that was written under a later
    `version`, which may depend on a topic, an owner or a large batch that these tables lack.

    What is behind is erased: its notes of what was durable would show the end to be damage. So
    would those in an `owners.lock` beside which the copy is put: its header names the generation.
    """
    stop = position + capacity
    end = min(_first_later(fd, position, generation, capacity, version, tail), tail)
    os.pwrite(fd, generation.to_bytes(8, "little"), _core.JOURNAL_CUT_OFF)
    while end < stop:
        place = end % capacity
        size = min(stop - end, capacity - place)
        os.pwrite(fd, bytes(size), HEADER + place)
        end += size


def _first_later(
    fd: int, position: int, generation: int, capacity: int, version: int, stop: int
) -> int:
    while position < stop:
        left = capacity - position % capacity
        found = _frame(fd, position, generation, capacity) if left >= FRAME.size else None
        if found is None:  # damaged: a recovery looks for the next frame, too
            position += STEP
            continue
        length, written, padding = found
        if written > version:
            return position
        position += left if padding else -(-length // STEP) * STEP
    return stop


def _frame(fd: int, position: int, generation: int, capacity: int) -> tuple[int, int, bool] | None:
    """(bytes with the header, version, is it padding) of the frame there; None if its header is
    damaged."""
    data = os.pread(fd, FRAME.size, HEADER + position % capacity)
    header = HEADERS.get(data[:4], FRAME)
    _, size, at, of, _, _, written, *_, crc = header.unpack(data[: header.size])
    if (at, of) != (position, generation) or crc != _core.crc32c(data[: header.size - 4]):
        return None
    return header.size + (size & SIZE), written, bool(size & PADDING)
