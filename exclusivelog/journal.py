"""The journal's file: made whole, opened, found wanting.

```text
0        8     magic, b"XLJFILE" and the version
8        8     capacity in bytes, little-endian
4096     ...   the ring of frames (see _journal.pxi)
```

A durable append costs one flush of a file whose blocks exist already; a transaction of the
tables costs two, and rewrites pages. So small appends go into this file first, and a
checkpoint moves them into the tables, many at a time. What is where is said by one row of
the tables: (generation, position) up to which the frames have been applied. It is written
in the transaction that applies them, so that a frame counts either there or here.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import struct

from exclusivelog import _core
from exclusivelog.errors import LedgerError, LedgerVersionError
from exclusivelog.lockfile import JOURNAL_WORDS, LockFile
from exclusivelog.segments import sync_directory

MAGIC = b"XLJFILE\x01"
CAPACITY = 8 << 20
HEADER = _core.JOURNAL_HEADER_BYTES
# A frame's header, as _journal.pxi draws it.
FRAME = struct.Struct("<4sIQQQQQII")
STEP, PADDING, SIZE = 16, 1 << 31, (1 << 30) - 1


def open_journal(ledger: str, lockfile: LockFile, mode: int, readonly: bool) -> _core.Journal:
    """The journal of a ledger, made if there is none. Call it while the lock file is locked
    for opening."""
    path = os.path.join(ledger, "journal")
    if not os.path.exists(path) and not readonly:
        _create(path, mode)
    fd = os.open(path, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC)
    try:
        if not readonly:
            fcntl.flock(fd, fcntl.LOCK_SH)  # for `refuse_a_second_life`, until all is closed
        capacity = _check(path, fd)
        return _core.Journal(lockfile.words, JOURNAL_WORDS, fd, capacity, readonly)
    finally:
        os.close(fd)


def refuse_a_second_life(ledger: str, owners: str) -> None:
    """LedgerError where somebody has removed the lock file `owners` while engines write to the
    ledger: they would see nothing of a new one, and go on as its owners (rule B3)."""
    if os.path.exists(owners):
        return
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(os.path.join(ledger, "journal"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not os.path.exists(owners):  # else somebody was just quicker to make it
                raise LedgerError(
                    f"{owners} was removed while engines use the ledger; close every engine on "
                    "it, then open it"
                ) from None
        finally:
            os.close(fd)


def inode(ledger: str) -> int:
    """Of the journal's file; 0 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(os.path.join(ledger, "journal")).st_ino
    return 0


def _create(path: str, mode: int) -> None:
    # Whole under another name, then renamed: whoever sees it sees all of it. Its blocks are
    # written, not only reserved, so that no flush has to change the file's own description.
    for leftover in glob.glob(glob.escape(path) + ".*"):
        os.unlink(leftover)
    temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.posix_fallocate(fd, 0, HEADER + CAPACITY)  # a full disk shows here
        zeros = bytes(1 << 20)
        for at in range(0, HEADER + CAPACITY, len(zeros)):
            os.pwrite(fd, zeros[: HEADER + CAPACITY - at], at)
        os.pwrite(fd, MAGIC + CAPACITY.to_bytes(8, "little"), 0)
        os.fsync(fd)
        os.rename(temporary, path)
        sync_directory(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _check(path: str, fd: int) -> int:
    header = os.pread(fd, 16, 0)
    size = os.fstat(fd).st_size
    capacity = int.from_bytes(header[8:], "little")
    if not header.startswith(MAGIC) or size != HEADER + capacity or capacity % 4096:
        raise LedgerVersionError(
            f"{path} is no journal of this version ({size} bytes); acknowledged messages may be "
            "in it: open it with the version that made it, or restore a backup"
        )
    return capacity


# ---- copy --------------------------------------------------------------------------------


def cut_off(fd: int, position: int, generation: int, capacity: int, version: int) -> None:
    """Let a copied journal end before the first frame behind `position` that was written under a
    later `version`: it may follow a topic, an owner or a large batch that the copied tables do
    not have."""
    stop = position + capacity
    while position < stop:
        place = position % capacity
        if capacity - place >= FRAME.size:
            header = os.pread(fd, FRAME.size, HEADER + place)
            _, size, at, of, _, _, written, _, _ = FRAME.unpack(header)
            if at != position or of != generation:
                return  # so whoever recovers it ends here, too
            if written > version:
                os.pwrite(fd, bytes(FRAME.size), HEADER + place)
                return
            if not size & PADDING:
                length = FRAME.size + (size & SIZE)
                position += -(-length // STEP) * STEP
                continue
        position += capacity - place
