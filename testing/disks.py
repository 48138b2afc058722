"""Small file systems to fill up, and two scripts that inspect a ledger from another process."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from exclusivelog.local.shm.lockfile import BOOT
from testing.patience import PATIENCE

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


EXT4 = "-q -F -b 4096 -m 0 -N 512 -O ^has_journal,^resize_inode -E nodiscard,lazy_itable_init=0"
METADATA = 152 << 10  # bytes of superblock, bitmaps and 512 inodes
FOR_EXTENTS = 1.021  # ext4 keeps 2 % of the blocks for itself


@contextlib.contextmanager
def disk(where: Path, megabytes: float, kind: str = "ext4") -> Iterator[Path]:
    """Mount a small file system with that much room: ext4 in a file, or "tmpfs"; or a "btrfs" or
    "xfs" of that size, at least 300 MB."""
    where.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        if kind == "tmpfs":
            source, options = "tmpfs", f"size={int(megabytes * 1024)}k"
        else:
            image = _image(megabytes) if kind == "ext4" else _large_image(megabytes, kind)
            source, options = str(stack.enter_context(image)), "loop"
        _run("mount", "-t", kind, "-o", options, source, str(where))
        stack.callback(subprocess.run, ["umount", "-l", where], check=True, timeout=PATIENCE)
        with contextlib.suppress(FileNotFoundError):
            (where / "lost+found").rmdir()
        yield where


@contextlib.contextmanager
def _image(megabytes: float) -> Iterator[Path]:
    """A file that holds an ext4 file system; nothing of its room is reserved for root."""
    with tempfile.NamedTemporaryFile(prefix="disk-") as file:
        os.truncate(file.name, int(megabytes * FOR_EXTENTS * (1 << 20)) + METADATA)
        _run("mkfs.ext4", *EXT4.split(), file.name)
        yield Path(file.name)


@contextlib.contextmanager
def _large_image(megabytes: float, kind: str) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="disk-") as file:
        os.truncate(file.name, int(megabytes * (1 << 20)))
        _run(f"mkfs.{kind}", "-q", file.name)
        yield Path(file.name)


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except FileNotFoundError:
        pytest.skip(f"{words[0]} is not installed")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")


def another_boot(ledger: Path) -> None:
    """The lock file's words are of a boot that is over."""
    with contextlib.suppress(FileNotFoundError):
        with (ledger / "owners.lock").open("r+b") as file:
            file.seek(BOOT)
            file.write(os.urandom(16))


def leave(where: Path, free: int) -> Path:
    """Fill the disk up to so many free bytes; the file that takes the room."""
    ballast = where / "ballast"
    ballast.unlink(missing_ok=True)
    stat = os.statvfs(where)
    size = stat.f_bavail * stat.f_frsize - free
    with ballast.open("wb") as file:
        while size > 0:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                break
            except OSError as error:  # the list of a file's extents takes a block, too
                if error.errno != errno.ENOSPC:
                    raise
                size -= stat.f_frsize
    return ballast


def digest(path: Path) -> dict[str, str]:
    """A sum of every file in the directory."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.iterdir()
        if file.is_file()
    }


OPENS = """
    import sys
    import exclusivelog as xl
    try:
        with xl.open(sys.argv[1]) as engine:
            with engine.topic("t").producer() as producer:
                producer.send(b"x")
    except xl.LedgerFullError as error:
        print("full")
    else:
        print("opened")
"""


TELLS_ALL = """
    import sys
    import exclusivelog as xl
    try:
        with xl.open(sys.argv[1], readonly=len(sys.argv) > 2) as engine:
            topic = engine.topic("t", create=False)
            reader = topic.reader()
            while True:
                try:
                    print(*[m.value.decode() for m in reader])
                    break
                except xl.LedgerCorruptedError as error:
                    if error.offsets.stop <= reader.position:
                        raise
                    reader.seek(error.offsets.stop)
            engine.verify()
    except xl.LedgerError as error:
        print(type(error).__name__)
    except xl.TopicNotFoundError:
        print("no such topic")
"""
