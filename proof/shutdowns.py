"""Power cuts of a real file system: the kernel drops it, with all that it has not written yet.

A loop-mounted ext4 or xfs is shut down (`FS_IOC_SHUTDOWN`, without a flush of its log) under
processes that write to it, mounted again, and judged by what they noted elsewhere. The lock file
then says that it is of another boot, as it would after a real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from exclusivelog.lockfile import BOOT
from proof.faults import Crew, players
from proof.judges import ACKNOWLEDGED
from proof.traffic import TOPICS, judge_ledger, read_notes

SHUTDOWN, WITHOUT_THE_LOG = 0x8004587D, 2
MEGABYTES = {"ext4": 64, "xfs": 320}  # the least that xfs takes, about
WRITERS = 2
CUTS_OF_A_LEDGER = 5
UNMOUNTED_WITHIN = 20.0  # seconds
LEAST_SECONDS = 0.1  # of life between two cuts
LYING = "int fsync(int f) { return 0; } int fdatasync(int f) { return 0; }\n"


@dataclass
class Found:
    """What came of some cuts."""

    cuts: int = 0
    operations: int = 0
    acknowledged: int = 0
    broken: list[str] = field(default_factory=list)


def missing(kind: str) -> str:
    """Why this cannot be done here; empty if it can."""
    if os.geteuid() != 0:
        return "only root may mount"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} is not installed"
    return "" if os.path.exists("/dev/loop-control") else "there are no loop devices"


def cut_again_and_again(where: Path, kind: str, count: int, lying: bool = False) -> Found:
    """So many cuts. A ledger lives through some of them."""
    found, dice = Found(), random.Random()
    environment = {"LD_PRELOAD": str(_lying(where))} if lying else {}
    for number in range(-(-count // CUTS_OF_A_LEDGER)):
        place = where / str(number)
        place.mkdir(parents=True)
        cuts = min(CUTS_OF_A_LEDGER, count - found.cuts)
        _one_ledger(place, kind, cuts, dice, environment, found)
    return found


def _one_ledger(
    place: Path, kind: str, cuts: int, dice: random.Random, environment: dict[str, str],
    found: Found,
) -> None:  # fmt: skip
    image = place / "image"
    with image.open("wb") as file:
        file.truncate(MEGABYTES[kind] << 20)
    _do(f"mkfs.{kind}", "-q", str(image))
    with players(place, place / "disk" / "log", dice, environment=environment) as crew:
        for _ in range(cuts):
            broken = _one_cut(place, image, crew, dice)
            found.cuts += 1
            found.broken += broken
            if broken:
                break
    record = read_notes(place)
    found.operations += record.operations
    found.acknowledged += record.count(ACKNOWLEDGED)


def _one_cut(place: Path, image: Path, crew: Crew, dice: random.Random) -> list[str]:
    with mounted(image, place / "disk") as disk:
        another_boot(disk / "log")
        try:
            for _ in range(WRITERS):
                crew.start()
            time.sleep(LEAST_SECONDS + dice.random())
            shut_down(disk)
        finally:
            crew.end()
    with mounted(image, place / "disk") as disk:
        another_boot(disk / "log")
        return list(judge_ledger(disk / "log", read_notes(place), TOPICS, send=False))


@contextlib.contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    """The file system, while the block runs."""
    where.mkdir(exist_ok=True)
    _do("mount", "-o", "loop", str(image), str(where))
    try:
        yield where
    finally:
        _unmount(where, image)


def _unmount(where: Path, image: Path) -> None:
    # Whoever makes a namespace of mounts, anywhere on the machine, keeps it busy for a moment. And
    # a copy of it there is what the next mount would be: a file system that is shut down.
    deadline, mounted_here = time.monotonic() + UNMOUNTED_WITHIN, True
    while True:
        try:
            if mounted_here:
                _do("umount", str(where))
            mounted_here = False
            if not _do("losetup", "-j", str(image)):
                return
            raise OSError(f"{image} is mounted elsewhere, too")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def shut_down(disk: Path) -> None:
    """From now on nothing reaches the disk, and what has not yet is gone."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", WITHOUT_THE_LOG))
    finally:
        os.close(fd)


def another_boot(ledger: Path) -> None:
    """The lock file's words are of a boot that is over."""
    with contextlib.suppress(FileNotFoundError):
        with (ledger / "owners.lock").open("r+b") as file:
            file.seek(BOOT)
            file.write(os.urandom(16))


def _lying(where: Path) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    source, library = where / "lying.c", where / "lying.so"
    source.write_text(LYING)
    _do("gcc", "-shared", "-fPIC", "-o", str(library), str(source))
    return library


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
