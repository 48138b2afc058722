"""Processes that are killed during a backup, and the judge of what they leave (rule H4)."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.maintenance import backup
from exclusivelog.local.storage.environment import UNFINISHED_BACKUP
from testing.children import PATIENCE
from testing.processes import until, values
from testing.strace import ForkServer, Point, fork_server, points

# Every call of a backup that changes a file, or finds out what is there.
CALLS = (
    "mkdir,openat,flock,ftruncate,write,pwrite64,writev,sendfile,fsync,fchmod,chmod,rename,unlink,"
    "rmdir"
)
UNMARKED, UNSYNCED = "unmarked", "unsynced"  # deliberate defects
NOLOGFLUSH, EXT4_IOC_SHUTDOWN = 2, 0x8004587D


def message(number: int) -> bytes:
    """A message of its own; every fiftieth is a large entry, which lies in a segment."""
    head = b"%d/" % number
    return head + bytes(200_000 if number % 50 == 7 else 40)


def fill(engine: xl.Engine, count: int) -> None:
    """Send the next `count` messages."""
    topic = engine.topic("orders")
    with topic.producer() as producer:
        first = topic.next_offset
        for number in range(first, first + count):
            producer.send(message(number))


# ---- the process that makes the backup ---------------------------------------------------


def play(
    source: str, readonly: bool, defect: str, target: str, begin: Callable[[], None], say: Any
) -> None:
    """Make a backup once it is told to."""
    with xl.open(source, readonly=readonly, durability="process", name="killed") as engine:
        begin()
        if defect == UNSYNCED:
            os.fsync = lambda fd: None
        if defect == UNMARKED:
            os.mkdir(target)
            Path(target, "journal-given-up").touch()  # else a copy without one is refused for that
            with engine.ledger.environment() as env:
                backup._copy(engine.ledger, env, target, engine.ledger.journal.tail)
        else:
            engine.backup(target)
        os._exit(0)  # as it is, without closing anything


def backup_server(source: Path, readonly: bool = True, defect: str = "") -> Any:
    """A fork server for processes that make a backup of `source`."""
    return fork_server("tests.maintenance.backups:play", source, readonly, defect)


def die_at(one: ForkServer, target: Path, point: Point) -> bool:
    """Kill a backup at `point`; return whether it reached that point."""
    options = ("-o", os.devnull, "-e", f"trace={point.call}", "-e", point.injection)
    status, error = one.run(target, strace=options)
    assert status in (0, -signal.SIGKILL), error
    return status != 0


def deaths(one: ForkServer, where: Path, most: int) -> list[Point]:
    """The points at which a backup could die: a sample, or all if `most` is negative."""
    trace = where / "trace"
    status, error = one.run(where / "whole", strace=("-o", str(trace), "-e", f"trace={CALLS}"))
    assert status == 0, error
    found = points(trace)
    assert len(found) >= 50, found
    return found if most < 0 else random.sample(found, min(most, len(found)))


# ---- what is left of it ------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [{"create": True}, {"create": False}, {"readonly": True}]


@dataclass
class Verdict:
    """Whether a directory is a ledger, and what is wrong with that."""

    opened: bool = False
    problems: list[str] = field(default_factory=list)


def judge(target: Path, count: int) -> Verdict:
    """A directory must be refused in every way, or hold the first `count` messages and be sound.
    One in which there is nothing at all must be refused where it may not be created."""
    verdict = Verdict()
    nothing = not target.exists() or not os.listdir(target)
    for options in WAYS[1:] if nothing else WAYS:
        try:
            with xl.open(target, durability="process", **options) as engine:
                verdict.opened = True
                verdict.problems += whats_wrong(engine, count)
        except xl.LedgerError as error:
            if verdict.opened:
                verdict.problems.append(f"{options}: {error}")
            elif (target / UNFINISHED_BACKUP).exists() and "run the backup again" not in str(error):
                verdict.problems.append(f"not said clearly: {error}")
    return verdict


def whats_wrong(engine: xl.Engine, count: int) -> list[str]:
    """What a copy lacks that must have the first `count` messages."""
    problems = list(engine.verify().problems)
    if engine.topics() != ["orders"]:
        return [*problems, f"topics {engine.topics()}"]
    found = values(engine.topic("orders"))
    if len(found) < count:
        problems.append(f"{count - len(found)} of {count} acknowledged messages are missing")
    if found != [message(number) for number in range(len(found))]:
        problems.append("other messages than were sent")
    return problems


def make_again(source: Path, target: Path) -> None:
    """Run the backup again, as the command does."""
    with xl.open(source, readonly=True) as engine:
        engine.backup(target)


def judge_both(source: Path, target: Path, acknowledged: Callable[[], int], count: int) -> Verdict:
    """What is left, and what a second run makes of it."""
    verdict = judge(target, count)
    if verdict.opened:
        with pytest.raises(xl.LedgerError, match="is not empty"):
            make_again(source, target)
        return verdict
    count = acknowledged()
    try:
        make_again(source, target)
    except xl.LedgerError as error:
        verdict.problems.append(f"a second run was refused: {error}")
        return verdict
    again = judge(target, count)
    verdict.problems += [f"a second run: {text}" for text in again.problems]
    if not again.opened:
        verdict.problems.append("a second run made no ledger")
    return verdict


# ---- those who go on meanwhile -----------------------------------------------------------


@dataclass
class Sender:
    """A thread that sends message after message while it is told to."""

    engine: xl.Engine
    acknowledged: int = 0
    left: float = 0  # of the messages that it may send before it is told again
    stop: threading.Event = field(default_factory=threading.Event)
    going: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def at_work(self, most: float = math.inf) -> Iterator[None]:
        """At most so many messages: on a slow machine, each backup would take longer than the one
        before."""
        self.left = most
        self.going.set()
        try:
            yield
        finally:
            self.going.clear()

    def run(self) -> None:
        topic = self.engine.topic("orders")
        with topic.producer("exclusive") as producer:
            while not self.stop.is_set():
                if self.going.wait(0.1):
                    if self.left > 0:
                        assert producer.send(message(self.acknowledged)) == self.acknowledged
                        self.acknowledged += 1
                        self.left -= 1
                    time.sleep(0.001)


@contextlib.contextmanager
def sending(engine: xl.Engine) -> Iterator[Sender]:
    sender = Sender(engine, engine.topic("orders").next_offset)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sender.run)
        try:
            yield sender
        finally:
            sender.stop.set()
            running.result(PATIENCE)


# ---- a disk whose power fails ------------------------------------------------------------


class Ext4:
    """A small ext4 file system of its own, from which the power can be taken."""

    def __init__(self, where: Path) -> None:
        self.path, self._image = where / "ext4", where / "image"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 << 20)

    def make(self) -> None:
        """Skips where there is no mkfs, or no mounting."""
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4 is not installed")
        subprocess.run(["mkfs.ext4", "-q", "-F", self._image], check=True, timeout=PATIENCE)
        self.mount()

    def mount(self) -> None:
        done = subprocess.run(
            ["mount", "-o", "loop", self._image, self.path],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"a loop device cannot be mounted here: {done.stderr.strip()}")

    def umount(self) -> None:
        subprocess.run(["umount", self.path], check=True, timeout=PATIENCE)
        # A mount namespace made meanwhile may hold a copy of the mount for a while: then the next
        # mount would be the same file system again, and not its recovery.
        until(self._is_detached)

    def _is_detached(self) -> bool:
        loops = ["losetup", "--associated", self._image]
        done = subprocess.run(loops, capture_output=True, check=True, timeout=PATIENCE)
        return not done.stdout

    def cut_power(self) -> None:
        """What was not flushed is gone."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        finally:
            os.close(fd)
        self.umount()
        self.mount()


@contextlib.contextmanager
def ext4(where: Path) -> Iterator[Ext4]:
    made = Ext4(where)
    made.make()
    try:
        yield made
    finally:
        made.umount()
