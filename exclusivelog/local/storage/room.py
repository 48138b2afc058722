"""Warns before room runs out: on the disk, and in the map of the tables."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass

import lmdb

from exclusivelog import logs
from exclusivelog.local.files import Directory

log = logging.getLogger(__name__)

ROOM_SECONDS = 10.0  # between two checks
# The disk is nearly full with less than this share of it, unless that is more than the bytes below;
# and with less than `LEAST_BYTES` in any case.
LOW_SHARE, LOW_BYTES, LEAST_BYTES = 0.02, 1 << 30, 64 << 20
SLOW_FLUSH_SECONDS = 1.0
MAP_SHARE = 0.8  # of map_size
GROWN_FROM = 256 << 20  # bytes: tables smaller than that may double unnoticed


@dataclass(frozen=True, slots=True)
class Disk:
    """What this user can still write there, and the disk's size, in bytes; `low`: nearly full."""

    free: int
    size: int
    low: bool


class Room:
    """What one ledger has left. All engines of a process on a ledger share it; each state is logged
    once, until it ends."""

    def __init__(self, path: str, directory: Directory) -> None:
        self._path = path
        self._directory = directory
        self._next = 0.0
        self._checking = threading.Lock()
        self._disk_low = False
        self._map_low = False
        self._used = 0

    @property
    def due(self) -> bool:
        """Is the next check due?"""
        return time.monotonic() >= self._next

    def check(self, env: lmdb.Environment) -> None:
        """Log what is nearly full. Takes some microseconds."""
        if self._checking.acquire(blocking=False):
            try:
                self._next = time.monotonic() + ROOM_SECONDS
                self._check_disk()
                self._check_map(env)
            finally:
                self._checking.release()

    def check_flush(self, ns: int) -> None:
        """Log a flush of this process that took long; `ns`: the slowest since the last call."""
        if ns >= SLOW_FLUSH_SECONDS * 1e9:
            logs.emit(log, logs.SLOW_FLUSH, ledger=self._path, seconds=ns / 1e9)

    def disk(self) -> Disk | None:
        """How much of the disk is left; None if it cannot be asked, because privileges were dropped
        (whoever needs the disk says why)."""
        try:
            facts = os.statvfs(self._directory.by_descriptor)
        except OSError:
            return None
        free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        return Disk(free, size, free < max(min(LOW_SHARE * size, LOW_BYTES), LEAST_BYTES))

    def _check_disk(self) -> None:
        disk = self.disk()
        if disk is not None and disk.low != self._disk_low:
            self._disk_low = disk.low
            percent = 100 * disk.free / disk.size if disk.size else 0.0
            line = logs.DISK_LOW if disk.low else logs.DISK_ENOUGH
            logs.emit(log, line, ledger=self._path, free=disk.free, percent=percent)

    def _check_map(self, env: lmdb.Environment) -> None:
        info = env.info()
        used, most = (info["last_pgno"] + 1) * env.stat()["psize"], info["map_size"]
        if used > MAP_SHARE * most and not self._map_low:
            logs.emit(log, logs.MAP_LOW, ledger=self._path, used=used, map_size=most)
        self._map_low = used > MAP_SHARE * most
        before = self._used or used
        if used >= max(2 * before, GROWN_FROM):
            logs.emit(log, logs.MAP_GROWS, ledger=self._path, before=before, used=used)
            before = used
        self._used = before
