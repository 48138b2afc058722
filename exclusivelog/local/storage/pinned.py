"""Reads that go on for too long, and so make `data.mdb` grow.

LMDB never reuses a page that the snapshot of a read still has. A process that is stopped inside a
read therefore makes the file grow with every transaction of the others, and so does a thread that
reads for minutes. LMDB's table of readers says which one it is. The place of a dead reader is freed
here, too: LMDB itself does so only when the table is full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

import lmdb

from exclusivelog import logs
from exclusivelog.local.files import read_whole
from exclusivelog.local.shm.slots import Slots, StallWatch, describe
from exclusivelog.local.storage.environment import Reading, parse_readers

log = logging.getLogger(__name__)

READERS_SECONDS = 1.0  # between two checks of LMDB's table of readers
# A read is reported once it is so many transactions behind for so many seconds.
STALLED_SECONDS = 10.0
STALLED_TRANSACTIONS = 10


def _culprit(reading: Reading) -> tuple[int, int]:
    # Several threads of another process may be stopped: log that process once.
    return reading.pid, reading.thread if reading.pid == os.getpid() else 0


def _is_gone(pid: int) -> bool:
    try:
        state = read_whole(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return False
    return state in b"ZX"


class PinnedPages:
    """Finds reads that keep LMDB from reusing pages, logs each once, and kills the silent processes
    that make them where `kill_stalled` allows it. All engines of a process on a ledger share it."""

    def __init__(self, path: str, slots: Slots, watch: StallWatch | None) -> None:
        self._path = path
        self._slots = slots
        self._watch = watch
        self._next = 0.0
        self._checking = threading.Lock()
        self._since: dict[Reading, float] = {}  # the reads that are far behind
        self._logged: set[tuple[int, int]] = set()

    @property
    def due(self) -> bool:
        """Is the next check due?"""
        return time.monotonic() >= self._next

    def check(self, env: lmdb.Environment) -> None:
        """Log the reads that have gone on for too long. Takes some microseconds."""
        if self._checking.acquire(blocking=False):
            try:
                self._next = time.monotonic() + READERS_SECONDS
                self._check(env)
            finally:
                self._checking.release()

    def oldest(self, env: lmdb.Environment) -> dict[str, object] | None:
        """The read with the oldest snapshot: its process, engine (None if unknown) and how many
        transactions it is behind; None if every read has the newest snapshot."""
        last = env.info()["last_txnid"]
        found = min(parse_readers(env.readers()), key=lambda each: each.transaction, default=None)
        if found is None or found.transaction >= last:
            return None
        return {
            "pid": found.pid,
            "engine": next((each.name for _, each in self._slots.in_process(found.pid)), None),
            "transactions_behind": last - found.transaction,
        }

    def _check(self, env: lmdb.Environment) -> None:
        last, now = env.info()["last_txnid"], time.monotonic()
        behind = {
            each
            for each in parse_readers(env.readers())
            if last - each.transaction >= STALLED_TRANSACTIONS
        }
        if any(_is_gone(each.pid) for each in behind):
            env.reader_check()
        self._since = {each: self._since.get(each, now) for each in behind}
        stalled = {
            _culprit(each): each
            for each, since in self._since.items()
            if now - since >= STALLED_SECONDS
        }
        for culprit, each in stalled.items():
            if culprit not in self._logged:
                self._report(each, last - each.transaction, now - self._since[each])
            self._kill(env, each)
        self._logged = set(stalled)

    def _report(self, reading: Reading, behind: int, seconds: float) -> None:
        engine = next((each for _, each in self._slots.in_process(reading.pid)), None)
        logs.emit(
            log, logs.PINNED, ledger=self._path, pid=reading.pid, seconds=seconds, behind=behind,
            engine=None if engine is None else engine.name,
            engine_id=None if engine is None else engine.id, holder=self._name(reading),
        )  # fmt: skip

    def _name(self, reading: Reading) -> str:
        engines = [each for _, each in self._slots.in_process(reading.pid)]
        name = ", ".join(map(describe, engines)) or f"process {reading.pid}"
        if reading.pid == os.getpid():
            threads = {thread.ident: thread.name for thread in threading.enumerate()}
            name += f", in its thread {threads.get(reading.thread, hex(reading.thread))!r}"
        return name

    def _kill(self, env: lmdb.Environment, reading: Reading) -> None:
        if self._watch is not None:
            with contextlib.suppress(lmdb.Error):
                self._watch.kill_if_stalled(
                    reading.pid, lambda: reading in parse_readers(env.readers()), "inside a read"
                )
