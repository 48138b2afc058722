"""Small file systems to fill up, and two pieces of source that look at a ledger from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@contextlib.contextmanager
def disk(where: Path, megabytes: float) -> Iterator[Path]:
    """A small file system of its own."""
    where.mkdir(exist_ok=True)
    options = f"size={int(megabytes * 1024)}k"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True, timeout=30)


def leave(where: Path, free: int) -> Path:
    """Fill the disk up to so many free bytes; the file that takes the room."""
    ballast = where / "ballast"
    ballast.unlink(missing_ok=True)
    stat = os.statvfs(where)
    with ballast.open("wb") as file:
        size = stat.f_bavail * stat.f_frsize - free
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)
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
