"""What was measured on, and with what."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import sqlite3
import subprocess
from pathlib import Path

import lmdb

import exclusivelog as xl
from exclusivelog.local.storage.mounts import file_system
from testing.patience import PATIENCE

PACKAGES = ("lmdb", "rocksdict", "persist-queue", "litequeue", "diskcache", "pyarrow")


def facts(directory: Path) -> dict[str, str]:
    """The machine, the disk behind `directory`, and the versions."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return {
        "measured": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.2f} when it began",
        "kernel": platform.release(),
        "disk": f"{file_system(str(directory))} on {device(directory)}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "exclusivelog": f"{xl.__version__} {commit()}",
        "peers": ", ".join(versions),
        "engines": f"LMDB {'.'.join(map(str, lmdb.version()))}, SQLite {sqlite3.sqlite_version}",
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def device(directory: Path) -> str:
    """The block device that the directory is on."""
    number = os.stat(directory).st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return link.resolve().name if link.exists() else "an unnamed device"


def commit() -> str:
    """The commit of the tree, with a + where the library differs from it."""
    tree = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=tree, capture_output=True, text=True, timeout=PATIENCE, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "exclusivelog")
        return f"({git('rev-parse', '--short', 'HEAD')}{'+' if changed else ''})"
    except (OSError, subprocess.SubprocessError):
        return "(not in a repository)"
