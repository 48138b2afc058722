"""Processes to kill while they work, and checks of what they leave in a ledger.

They are forked from one process that has imported everything and opened nothing, so that each
costs about ten milliseconds. Such a process reports what it has done through a pipe:

>>> with killable(work, path) as process:       # work(says, path)
...     process.told()
...     process.kill()
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import exclusivelog as xl
from exclusivelog.local import commits
from exclusivelog.local.records import U64
from exclusivelog.local.storage import ledger
from exclusivelog.local.storage.segments import NAME
from testing.processes import PATIENCE, forks, until


class Killable:
    """A process to kill, which runs `function(says, ...)`."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = forks.Pipe(duplex=False)
        self.process = forks.Process(target=_begin, args=(function, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def told(self, timeout: float = PATIENCE) -> Any:
        """The next message that it sends; raise EOFError if it has died."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the process said nothing within {timeout} s")
        return self._pipe.recv()

    def all_told(self) -> list[Any]:
        """Wait until it has died; return all messages that it sent."""
        found = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                found.append(self.told())
        self.process.join(PATIENCE)
        return found

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join(PATIENCE)

    def end(self) -> None:
        """Kill it if it is alive, and reap it."""
        self.kill()
        self._pipe.close()
        self.process.close()


def _begin(function: Callable[..., None], *args: Any) -> None:
    # If the test itself is killed, nothing else ends a process that writes until it is killed.
    signal.alarm(int(4 * PATIENCE))
    function(*args)


@contextlib.contextmanager
def killable(function: Callable[..., None], *args: Any) -> Iterator[Killable]:
    """A process to kill, which is reaped when the block ends."""
    process = Killable(function, *args)
    try:
        yield process
    finally:
        process.end()


def say(says: Connection, what: Any) -> None:
    """Send `what` to the test; ignore that the test has closed the pipe."""
    with contextlib.suppress(BrokenPipeError):
        says.send(what)


def die_at_commit(number: int, *, behind: bool) -> None:
    """Kill this process at the `number`-th commit of LMDB, or of a transaction into the journal, by
    its main thread or for it, counted from now on. All is written, or encoded, and nothing
    committed; or (`behind`) all is committed, and no process has been notified."""
    left = itertools.count(1)
    step = "waken" if behind else "finish"
    original, place = getattr(ledger.Transaction, step), commits.FramedAttempt.place

    def is_the_one() -> bool:
        main = threading.current_thread().name in ("MainThread", "exclusivelog-transaction")
        return main and next(left) == number

    def strike(self: Any, tables: Any) -> Any:
        last = is_the_one()
        if last and behind:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, tables)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def strike_at_frames(self: Any, joint: Any) -> int:
        last = is_the_one()
        if last and not behind:
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = place(self, joint)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    setattr(ledger.Transaction, step, strike)
    commits.FramedAttempt.place = strike_at_frames


# ---- what is left ------------------------------------------------------------------------

OF_TOPICS = ("entries", "producers", "cursors", "retention", "snapshots", "views", "trash")


def strays(engine: xl.Engine) -> dict[str, list[bytes]]:
    """Rows that belong to a deleted topic, view or snapshot."""
    with engine.ledger.read() as tables:
        alive = {
            topic for name, topic in tables.topics.all() if tables.topics.find(name) is not None
        }
        kept = {
            found.id
            for topic in alive
            for found in (tables.views.view(topic), tables.views.snapshot(topic))
            if found is not None
        }
        rows = {
            table: [
                key
                for key, _ in tables.rows.cursor(table)
                if U64.unpack(key[:8])[0] not in (alive | kept if table == "entries" else alive)
            ]
            for table in OF_TOPICS
        }
    return {table: keys for table, keys in rows.items() if keys}


def trimmed_entries(engine: xl.Engine) -> int:
    """Number of entries of existing topics that lie before the topic's first offset."""
    with engine.ledger.read() as tables:
        rows = [tables.topics.get(topic) for _, topic in tables.topics.all()]
        return sum(
            last < row.first_offset for row in rows for last, _ in tables.entries.walk(row.id, 0)
        )


def wasted_bytes(engine: xl.Engine) -> int:
    """Bytes of segment files beyond what the tables refer to."""
    with engine.ledger.read() as tables:
        known = {segment: end for segment, (end, _) in tables.large.segments().items()}
    folder = os.path.join(engine.path, "segments")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    sizes = {}
    for name in names:
        if NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                sizes[int(name, 16)] = os.stat(os.path.join(folder, name)).st_size
    return sum(max(0, size - known.get(segment, 0)) for segment, size in sizes.items())


def garbage(engine: xl.Engine) -> dict[str, Any]:
    """What nothing in the ledger refers to, by kind; {} if the ledger is clean. Waits for segments
    that an open read still keeps: also a thread in the background reads, now and then."""

    def wastes_nothing() -> bool:
        engine.ledger.remove_unneeded()
        return not wasted_bytes(engine)

    found = {"strays": strays(engine), "trimmed": trimmed_entries(engine)}
    with contextlib.suppress(AssertionError):
        until(wastes_nothing)
    found["bytes"] = wasted_bytes(engine)
    return {kind: what for kind, what in found.items() if what}
