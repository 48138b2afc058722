"""Engines of this process, opened when they are first needed and kept: an idle worker ends with
its process, and what it had open goes with it.

A Python worker reads for one task, commits for another, and is forked from a process that has
nothing open; so engines are kept by process id and path.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from exclusivelog.engine import Engine
from exclusivelog.engine import open as open_engine
from exclusivelog.errors import LedgerError
from exclusivelog.spark.errors import REMOTE_EXECUTOR, SourceError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MOST_KEPT = 8  # ledgers that a process has open; each reserves a lot of address space

Inode = tuple[int, int]


@dataclass
class _Handle:
    engine: Engine
    inode: Inode
    writes: bool


_handles: dict[tuple[int, str], _Handle] = {}
_opening = threading.Lock()


def _inode(path: str) -> Inode | None:
    try:
        stat = os.stat(os.path.join(path, "data.mdb"))
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def reading(path: str) -> Engine:
    """An engine of this process that reads the ledger; LedgerError where there is none."""
    return _handle(path, writes=False).engine


def writing(path: str) -> Engine:
    """An engine of this process that writes to the ledger, which is made if need be."""
    return _handle(path, writes=True).engine


def _handle(path: str, writes: bool) -> _Handle:
    key = os.getpid(), os.path.realpath(path)  # a process has a ledger open once
    with _opening:
        handle = _handles.pop(key, None)
        if handle is not None and not _fits(handle, path, writes):
            handle.engine.close()
            handle = None
        if handle is None:
            engine = open_engine(path, name="spark", readonly=not writes, create=writes)
            inode = _inode(path)
            assert inode is not None
            handle = _Handle(engine, inode, writes)
            _make_room()
        _handles[key] = handle  # behind all others: the first is the one that rests longest
        return handle


def _make_room() -> None:
    # What was inherited by a fork is not ours to close, and does not count.
    ours = [key for key in _handles if key[0] == os.getpid()]
    if len(ours) >= MOST_KEPT:
        _handles.pop(ours[0]).engine.close()


def _fits(handle: _Handle, path: str, writes: bool) -> bool:
    if handle.engine.closed or handle.inode != _inode(path) or (writes and not handle.writes):
        return False
    try:
        handle.engine.ledger.check()
    except LedgerError:  # it has failed; a fresh one starts from what is durable
        return False
    return True


# ---- is it the same ledger, on the same machine? -----------------------------------------


@dataclass(frozen=True)
class Place:
    """Which ledger a driver has planned for, and where: a path alone says neither."""

    path: str
    uuid: str
    inode: Inode
    boot: str
    host: str

    @classmethod
    def of(cls, engine: Engine) -> Place:
        """Where this engine's ledger is."""
        inode = _inode(engine.path)
        assert inode is not None
        return cls(engine.path, engine.ledger.uuid, inode, boot_id(), socket.gethostname())

    def engine(self) -> Engine:
        """An engine that reads this very ledger.

        Raises SourceError where the files are another machine's, or another ledger's.
        """
        if self.boot != boot_id() or self.inode != _inode(self.path):
            raise SourceError(
                REMOTE_EXECUTOR,
                f"the ledger {self.path} lies on {self.host!r}, and this executor on "
                f"{socket.gethostname()!r} cannot open its files. Let the executors run on that "
                "machine (master local[*] or local-cluster), or ship what they read inside the "
                'partitions with option("access", "inline")',
            )
        engine = reading(self.path)
        if engine.ledger.uuid != self.uuid:
            raise SourceError(
                REMOTE_EXECUTOR, f"{self.path} holds another ledger than when the query was planned"
            )
        return engine


def boot_id() -> str:
    """What tells this machine, since it was started, from all others."""
    return BOOT_ID.read_text().strip()


def ledger_exists(path: str) -> bool:
    """Is there a ledger in this directory?"""
    return _inode(path) is not None
