"""Reads that go on for too long, and so make `data.mdb` grow.

LMDB never reuses a page that some reader's snapshot still has. A process that is stopped inside
a read (SIGSTOP, a debugger, a frozen container) therefore makes the file grow with every
transaction of the others, and so does a thread of a live process that reads for minutes. LMDB's
table of readers says who it is: the log does, and `engine.stats()`. With `kill_hung=True`, a
process that has been silent for longer than its own `keepalive` is killed, as in hangs.py.

The place of a reader that was killed is given back here, too: LMDB does so only when its table
is full.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

from exclusivelog.hangs import Watch, describe
from exclusivelog.lockfile import LockFile

log = logging.getLogger("exclusivelog")

LOOK_SECONDS = 1.0
STALLED_SECONDS = 10.0  # behind by so many transactions, and for so long: then it is told
STALLED_TRANSACTIONS = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """A read transaction that is under way: whose, and as of which write transaction."""

    pid: int
    thread: int  # as pthread_self() gives it, and Python as a thread's `ident`
    transaction: int


def parse_readers(text: str) -> list[Reading]:
    """The reads that LMDB's listing of its table of readers names as under way.

    >>> parse_readers("    pid     thread     txnid\\n   4711 7f36c8 -\\n   4712 7f36c9 12\\n")
    [Reading(pid=4712, thread=8337097, transaction=12)]
    """
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0].isdigit() and fields[2].isdigit():
            found.append(Reading(int(fields[0]), int(fields[1], 16), int(fields[2])))
    return found


def _culprit(reading: Reading) -> tuple[int, int]:
    # Another process that is stopped may be so in several threads: it is named once.
    return reading.pid, reading.thread if reading.pid == os.getpid() else 0


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return False
    return state in "ZX"


class PinnedPages:
    """Finds the reads that hold up the reuse of pages, reports each once, and ends those of
    silent processes where it may. One for all engines of a process on a ledger."""

    def __init__(self, path: str, lockfile: LockFile, watch: Watch | None) -> None:
        self._path = path
        self._lockfile = lockfile
        self._watch = watch
        self._next = 0.0
        self._looking = threading.Lock()
        self._since: dict[Reading, float] = {}  # of those that are far behind
        self._told: set[tuple[int, int]] = set()

    @property
    def due(self) -> bool:
        """Is it time to look again?"""
        return time.monotonic() >= self._next

    def look(self, env: lmdb.Environment) -> None:
        """Report who has been reading for too long. Takes some microseconds."""
        if self._looking.acquire(blocking=False):
            try:
                self._next = time.monotonic() + LOOK_SECONDS
                self._judge(env)
            finally:
                self._looking.release()

    def oldest(self, env: lmdb.Environment) -> dict[str, object] | None:
        """The read under way that has the oldest snapshot, where that is not the newest one: its
        process, engine (as far as it is known) and how many transactions it is behind."""
        last = env.info()["last_txnid"]
        found = min(parse_readers(env.readers()), key=lambda each: each.transaction, default=None)
        if found is None or found.transaction >= last:
            return None
        return {
            "pid": found.pid,
            "engine": next((each.name for _, each in self._lockfile.in_process(found.pid)), None),
            "transactions_behind": last - found.transaction,
        }

    def _judge(self, env: lmdb.Environment) -> None:
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
            if culprit not in self._told:
                self._report(each, last - each.transaction, now - self._since[each])
            self._end(env, each)
        self._told = set(stalled)

    def _report(self, reading: Reading, behind: int, seconds: float) -> None:
        log.warning(
            "%s: data.mdb grows because of one read, which has gone on for %.0f s and is %d "
            "transactions behind. No page that was freed since is used again until it ends. It is "
            "in %s",
            self._path, seconds, behind, self._name(reading),
        )  # fmt: skip

    def _name(self, reading: Reading) -> str:
        engines = [each for _, each in self._lockfile.in_process(reading.pid)]
        name = ", ".join(map(describe, engines)) or f"process {reading.pid}"
        if reading.pid == os.getpid():
            threads = {thread.ident: thread.name for thread in threading.enumerate()}
            name += f", in its thread {threads.get(reading.thread, hex(reading.thread))!r}"
        return name

    def _end(self, env: lmdb.Environment, reading: Reading) -> None:
        if self._watch is not None:
            with suppress(lmdb.Error):
                self._watch.kill_if_hung(
                    reading.pid, lambda: reading in parse_readers(env.readers()), "inside a read"
                )
