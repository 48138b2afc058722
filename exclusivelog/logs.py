"""All lines that the library logs: their events, levels and texts, and how they are logged.

Each module logs to `logging.getLogger(__name__)`, below "exclusivelog". Lines report changes and
problems; none is logged for a send. Every record has the attributes in `COMMON` (None if they do
not apply), and those that its text names:

```text
event       the line's name, such as "granted"     topic, epoch   of the topic concerned
ledger      the directory                          reason         why it happened
engine, engine_id, pid    the engine concerned; by default, pid is that of the logging process
```

docs/operations.md lists the lines; a test compares it with this file.

>>> GRANTED.event, logging.getLevelName(GRANTED.level)
('granted', 'INFO')
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import stat
import sys
import termios
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from exclusivelog import _core
from exclusivelog.foreign import Ignoring, is_raised_by_a_handler

COMMON = ("event", "ledger", "engine", "engine_id", "pid", "topic", "epoch", "reason")
MOST_NAMES = 10  # of topics, in the text of one line
FORMAT_BYTES = 512  # of time, level and logger


class Line(NamedTuple):
    """One line: its text names the attributes of the record, as `%(topic)r`."""

    event: str
    level: int
    text: str


LINES: dict[str, Line] = {}


def _line(event: str, level: int, text: str, begin: str = "%(ledger)s: ") -> Line:
    """Define a line. `begin`: its first words; a process may have several ledgers open."""
    line = LINES[event] = Line(event, level, begin + text)
    return line


class _Logging(threading.local):
    now = False
    later = False  # is this a thread that must not wait for a handler?


_logging = _Logging()


def emit(
    log: logging.Logger, line: Line, *, error: BaseException | None = None, **fields: object
) -> None:
    """Log a line. If a handler raises, or stderr is closed, the caller is not affected. A handler
    that would block, because its pipe is full, is skipped.

    - `error`: logged with its traceback.
    - `fields`: the attributes of the record.

    In a thread that has called `emit_later`, another thread calls the handlers, in order.
    """
    if not log.isEnabledFor(line.level) or _logging.now:  # a handler that uses the library itself
        return
    facts = {**dict.fromkeys(COMMON), "pid": os.getpid(), **fields, "event": line.event}
    _logging.now = True
    try:
        with Ignoring(Exception):
            size = _size_of(line, facts, error)
            blocked = [handler for handler in _handlers(log) if _is_blocked(handler, size)]
            if _logging.later:
                record = _record(log, line, facts, error)
                _queue.put(lambda: _handle(blocked, log, record))
            elif blocked:
                _log_without(blocked, log, line, facts, error)
            else:
                log.log(line.level, line.text, facts, exc_info=error, extra=facts, stacklevel=2)
    finally:
        _logging.now = False


def _handlers(log: logging.Logger) -> Iterator[logging.Handler]:
    """The handlers of this logger, as `Logger.callHandlers` finds them."""
    above: logging.Logger | None = log
    found = False
    while above is not None:
        found = found or bool(above.handlers)
        yield from above.handlers
        above = above.parent if above.propagate else None
    if not found and logging.lastResort is not None:
        yield logging.lastResort


def _size_of(line: Line, facts: Mapping[str, object], error: BaseException | None) -> int:
    """An upper estimate of the bytes that a handler writes, with the usual formatters."""
    parts = [line.text % facts, *(traceback.format_exception(error) if error else ())]
    return FORMAT_BYTES + sum(len(part.encode(errors="replace")) for part in parts)


def _is_blocked(handler: logging.Handler, size: int) -> bool:
    return isinstance(handler, logging.StreamHandler) and is_blocked(handler.stream, size)


def is_blocked(stream: Any, size: int = select.PIPE_BUF) -> bool:
    """Whether a write of so many bytes would block, because the stream is a full pipe, socket or
    terminal.

    >>> is_blocked(sys.stderr), is_blocked(None)
    (False, False)
    """
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError) as error:  # none, closed, or not of the system
        if is_raised_by_a_handler(error):  # `io` gives its own no errno
            raise
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        return True
    if size <= select.PIPE_BUF or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return False  # a pipe that accepts anything accepts PIPE_BUF bytes
    waiting = int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    return waiting + size > fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) - select.PIPE_BUF


def _log_without(
    blocked: list[logging.Handler],
    log: logging.Logger,
    line: Line,
    facts: Mapping[str, object],
    error: BaseException | None,
) -> None:
    """As `Logger.log`, but without the blocked handlers."""
    _handle(blocked, log, _record(log, line, facts, error, stacklevel=4))


def _record(
    log: logging.Logger,
    line: Line,
    facts: Mapping[str, object],
    error: BaseException | None,
    stacklevel: int = 3,
) -> logging.LogRecord:
    file, number, function, _ = log.findCaller(stacklevel=stacklevel)
    told = None if error is None else (type(error), error, error.__traceback__)
    return log.makeRecord(
        log.name, line.level, file, number, line.text, (facts,), told, function, facts
    )


def _handle(blocked: list[logging.Handler], log: logging.Logger, record: logging.LogRecord) -> None:
    if log.filter(record):
        for handler in _handlers(log):
            if handler not in blocked and record.levelno >= handler.level:
                handler.handle(record)


# ---- lines of threads that must not wait -------------------------------------------------

MOST_QUEUED = 1000  # lines; later ones are dropped, and counted
IDLE_SECONDS = 1.0


class _Queue:
    """Calls the handlers for other threads, in a thread of its own, which ends when it is idle."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._more = _core.Signal()
        self._running = False
        self._dropped = 0

    def put(self, call: Callable[[], None]) -> None:
        """Make this call, unless too many wait."""
        with self._lock:
            if len(self._calls) >= MOST_QUEUED:
                self._dropped += 1
                return
            self._calls.append(call)
            if self._running:
                self._more.set()
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="exclusivelog-log", daemon=True).start()
        except RuntimeError:  # there can be no thread now: the next line tries again
            self._running = False

    def _run(self) -> None:
        _logging.now = True  # a handler that uses the library itself
        while self._wait():
            while self._calls:
                with Ignoring(Exception):
                    self._calls[0]()
                self._calls.popleft()  # not before: `drained`

    def _wait(self) -> bool:
        if self._calls or self._more.wait(IDLE_SECONDS):
            self._more.clear()
            return True
        with self._lock:
            self._running = bool(self._calls)
            return self._running

    def take_dropped(self) -> int:
        """How many calls were dropped since the last one; 0 while there is no room to say so."""
        with self._lock:
            found = 0 if len(self._calls) >= MOST_QUEUED else self._dropped
            self._dropped -= found
            return found

    def drain(self, seconds: float) -> None:
        """Wait until all calls were made, at most for so many seconds."""
        end = _core.monotonic() + seconds
        while self._calls and self._running and _core.monotonic() < end:
            time.sleep(0.001)


_queue = _Queue()


def emit_later() -> None:
    """From now on this thread waits for no handler."""
    _logging.later = True


@contextlib.contextmanager
def emitting_later() -> Iterator[None]:
    """Meanwhile this thread waits for no handler."""
    before, _logging.later = _logging.later, True
    try:
        yield
    finally:
        _logging.later = before


def take_dropped() -> int:
    """How many lines of such threads were dropped since the last call (see `DROPPED`)."""
    return _queue.take_dropped()


def drain(seconds: float) -> None:
    """Wait until the lines of other threads were handled, at most for so many seconds."""
    if not _logging.now:  # a handler that uses the library itself
        _queue.drain(seconds)


def _forget() -> None:
    global _queue
    _queue = _Queue()


_core.in_forked_child(_forget)  # the parent has the thread, and logs its lines


def some(names: list[str]) -> str:
    """The first names, and the number of the others, for a text.

    >>> some(["a", "b"]), some([str(n) for n in range(12)])
    ("'a', 'b'", "'0', '1', '2', '3', '4', '5', '6', '7', '8', '9' and 2 more")
    """
    listed = ", ".join(map(repr, names[:MOST_NAMES])) or "no topic"
    return listed if len(names) <= MOST_NAMES else f"{listed} and {len(names) - MOST_NAMES} more"


_D, _I, _W, _E = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
_WHO = "engine %(engine)r (id %(engine_id)s, pid %(pid)s)"

# ---- engines -----------------------------------------------------------------------------

OPENED = _line(
    "opened",
    _I,
    f"{_WHO} opened in %(seconds).3f s: durability %(durability)s, keepalive "
    "%(keepalive)s s, readonly %(readonly)s",
)
CLOSED = _line("closed", _I, f"{_WHO} closed")
CLOSING_FAILED = _line(
    "closing_failed", _W, "engine %(engine)r is closed, but met an error while closing: %(reason)s"
)
NOT_CLEARED = _line(
    "not_cleared",
    _W,
    "engine %(engine)r is open, but could not delete what dead processes have left: %(reason)s",
)
WORKER_REFUSED = _line(
    "worker_refused",
    _W,
    "the background worker of engine %(engine)r met an error, and tries again: %(reason)s",
)
WORKER_FAILED = _line(
    "worker_failed",
    _E,
    "unexpected error in the background worker of engine %(engine)r, which tries again: %(reason)s",
)
THREAD_FAILED = _line(
    "thread_failed",
    _E,
    "unexpected error in thread %(thread_of)r of engine %(engine)r, which continues: %(reason)s",
)
DROPPED = _line(
    "lines_dropped",
    _W,
    "%(count)d lines of background threads were dropped: a log handler is slower than they come",
)
WAITERS_WAIT_ON = _line(
    "waiters_wait_on",
    _W,
    "topic %(topic)r: an error while engine %(engine)r was promoting its waiters, which is tried "
    "again: %(reason)s",
)
CALLBACK_FAILED = _line(
    "callback_failed",
    _E,
    "a callback of the application, called by engine %(engine)r, raised %(reason)s",
)
ENGINE_GONE = _line(
    "engine_gone",
    _W,
    f"{_WHO} is %(reason)s (%(silence)s); it was evicted from its topics (%(count)d): %(topics)s",
)

# ---- who may write -----------------------------------------------------------------------

GRANTED = _line(
    "granted",
    _I,
    "topic %(topic)r was granted to producer %(producer)r of engine %(engine)r (pid %(pid)s), mode "
    "%(mode)s, epoch %(epoch)s, reason %(reason)s, after %(waited).3f s",
)
PROMOTED = _line(
    "promoted",
    _I,
    f"topic %(topic)r was granted by this process to producer %(producer)r of {_WHO}, epoch "
    "%(epoch)s, reason %(reason)s",
)
RELEASED = _line(
    "released",
    _I,
    f"topic %(topic)r was released by producer %(producer)r of {_WHO}, epoch %(epoch)s, reason "
    "%(reason)s",
)
EVICTED = _line(
    "evicted",
    _I,
    f"topic %(topic)r was taken from producer %(producer)r of {_WHO}, epoch %(epoch)s, reason "
    "%(reason)s; it goes to %(rival)s",
)
LOST = _line(
    "lost",
    _I,
    "topic %(topic)r was lost by producer %(producer)r of engine %(engine)r (pid %(pid)s), epoch "
    "%(epoch)s: %(reason)s",
)
HAND_OVER = _line(
    "hand_over",
    _I,
    "topic %(topic)r: hand-over from %(source)s to %(target)s: %(step)s, epoch %(epoch)s, reason "
    "%(reason)s",
)
CLAIM = _line(
    "claim",
    _I,
    "claim on resource %(resource)r of group %(group)r, generation %(generation)s: %(step)s, from "
    "%(source)s to %(target)s, reason %(reason)s",
)
CLAIM_OF_GONE = _line(
    "claim_of_gone",
    _W,
    "claim on resource %(resource)r of group %(group)r was revoked: its holder, "
    f"{_WHO}, is %(reason)s (%(silence)s)",
)
TERMINATED = _line(
    "terminated", _I, "topic %(topic)r was terminated at offset %(offset)d: it takes no messages"
)
DELETED = _line("deleted", _I, "topic %(topic)r was deleted at epoch %(epoch)s")

# ---- stalls ------------------------------------------------------------------------------

SLOW_LOCK = _line(
    "slow_lock", _W, "%(waiting)s wait for %(holder)s, which holds %(lock)s and %(doing)s"
)
SLOW_OPENING = _line(
    "slow_opening",
    _W,
    "no process can open the ledger until %(holder)s has opened it. It %(doing)s",
)
KILLING = _line(
    "killing",
    _E,
    "killing the unresponsive %(holder)s, which is longer than its keepalive, %(reason)s",
)
NOT_KILLED = _line(
    "not_killed",
    _W,
    "the unresponsive process %(pid)d cannot be killed: %(reason)s. Resume or end it",
)
SLOW_FLUSH = _line(
    "slow_flush",
    _W,
    "a flush of the journal took %(seconds).3f s, and durable sends waited for it. "
    "Look for other writers on this disk, or for a failing disk",
)
PINNED = _line(
    "pinned",
    _W,
    "data.mdb grows, because a read has lasted %(seconds).0f s and is %(behind)d "
    "transactions behind. End the read, or its process: %(holder)s",
)

# ---- room --------------------------------------------------------------------------------

DISK_LOW = _line(
    "disk_low",
    _W,
    "the disk has little room left: %(free)d bytes, %(percent).1f %% of its size. Make "
    "room, or trim topics: sends fail with LedgerFullError once nothing is left",
)
BLOCKS_SHARED = _line(
    "blocks_shared",
    _W,
    "the disk has no room to give %(files)s blocks of its own, which it shares with a copy or a "
    "snapshot. If the disk becomes full as well, sends fail, and perhaps the ledger: make room, or "
    "remove the copy",
)
DISK_ENOUGH = _line("disk_enough", _I, "the disk has room again: %(free)d bytes are free")
MAP_GROWS = _line(
    "map_grows",
    _W,
    "the tables have grown from %(before)d to %(used)d bytes. Trim topics, or look for "
    "a read that lasts: engine.stats().oldest_reader",
)
MAP_LOW = _line(
    "map_low",
    _W,
    "the tables use %(used)d of map_size=%(map_size)d bytes. Open the ledger with a "
    "larger map_size, or trim topics",
)

# ---- what is kept ------------------------------------------------------------------------

CHECKPOINT = _line(
    "checkpoint",
    _I,
    "a checkpoint moved %(bytes)d bytes from the journal into the tables in %(seconds).3f s",
)
CHECKPOINT_REFUSED = _line(
    "checkpoint_refused",
    _W,
    "a checkpoint failed, and is tried again; messages stay in the journal until then: %(reason)s",
)
CHECKPOINT_FAILED = _line(
    "checkpoint_failed", _E, "unexpected error in a checkpoint, which is tried again: %(reason)s"
)
CHECKPOINTS_FAILED = _line(
    "checkpoints_failed",
    _E,
    "unexpected error in the checkpoint thread, which continues: %(reason)s",
)
BACKLOG_KEPT = _line(
    "backlog_kept",
    _W,
    "the last checkpoint of a closing engine failed; its messages stay in the journal, "
    "and another engine moves them: %(reason)s",
)
COMMIT_REFUSED = _line("commit_refused", _D, "a commit of queued messages failed: %(reason)s")
COMMIT_FAILED = _line(
    "commit_failed", _E, "unexpected error in a commit of queued messages: %(reason)s"
)
COMMIT_INTERRUPTED = _line(
    "commit_interrupted",
    _E,
    "a commit of queued messages was interrupted, and is tried again: %(reason)s",
)
TRIMMED = _line(
    "trimmed", _I, "topic %(topic)r: trimmed before offset %(offset)d, %(count)d messages"
)
COMPACTED = _line(
    "compacted",
    _I,
    "topic %(topic)r: compacted before offset %(offset)d in %(seconds).3f s: the view keeps "
    "%(kept)d of %(count)d messages that were read",
)
SNAPSHOT = _line(
    "snapshot",
    _I,
    "topic %(topic)r: a snapshot as of offset %(offset)d, %(count)d items; took %(seconds).3f s",
)
BACKUP = _line("backup", _I, "backed up into %(target)s in %(seconds).3f s")
NO_SNAPSHOT = _line("no_snapshot", _W, "topic %(topic)r: no snapshot: %(reason)s")
NOT_EXPIRED = _line(
    "not_expired",
    _W,
    "topic %(topic)r: expired keys were not removed, which is tried again: %(reason)s",
)
SNAPSHOT_DAMAGED = _line(
    "snapshot_damaged",
    _W,
    "topic %(topic)r: its snapshot cannot be used, so all messages are read: %(reason)s",
)
CHECKPOINT_NOT_KEPT = _line(
    "checkpoint_not_kept",
    _W,
    "topic %(topic)r: its checkpoint was not stored, so opening it reads more records: %(reason)s",
)
RETENTION_REFUSED = _line("retention_refused", _W, "retention failed, and tries again: %(reason)s")
RETENTION_FAILED = _line(
    "retention_failed", _E, "unexpected error in retention, which tries again: %(reason)s"
)
RETENTION_WAITS = _line(
    "retention_waits",
    _W,
    "topic %(topic)r has messages that are older than max_age by more than an hour. "
    "Was the clock set ahead? They are removed in %(seconds).0f s unless it is set back",
)
NOT_COMPRESSED_AGAIN = _line(
    "not_compressed_again", _W, "old messages could not be compressed again: %(reason)s"
)

# ---- damage ------------------------------------------------------------------------------

FAILED = _line("failed", _E, "this process cannot use the ledger any more: %(reason)s")
ROW_DAMAGED = _line("row_damaged", _E, "%(reason)s; %(consequence)s", begin="")
JOURNAL_DAMAGED = _line(
    "journal_damaged",
    _E,
    "/journal is damaged at position %(position)d, or is an older one that was put back. Messages "
    "may be missing: run `exclusivelog verify`",
    begin="%(ledger)s",
)
RECOVERY_PUT_OFF = _line(
    "recovery_put_off",
    _W,
    "the messages in the journal stay there until the tables have room for them: %(reason)s",
)
RESERVE_SPENT = _line(
    "reserve_spent", _W, "a trim or deletion uses the room that was kept for it: %(reason)s"
)
SETTING_DAMAGED = _line(
    "setting_damaged", _E, "%(reason)s. New messages are not compressed until then", begin=""
)
PRODUCER_ROW_DAMAGED = _line(
    "producer_row_damaged",
    _E,
    "the row of producer %(key)r is damaged; it is written again, with the sequence id "
    "in the journal",
)
PRODUCER_DAMAGED = _line(
    "producer_damaged",
    _E,
    "%(reason)s; it is written again, with the sequence id in the journal",
    begin="",
)
GAP = _line(
    "gap",
    _E,
    "the journal continues topic %(topic)r at offset %(offset)d, but the topic ends at "
    "%(end)d. Run `exclusivelog verify`",
)
OFFSETS_SKIPPED = _line(
    "offsets_skipped",
    _E,
    "a part of the journal is destroyed, and may have held the last messages of topic %(topic)r: "
    "it goes on at offset %(stop)d, and readers get an error for %(start)d to the one before. Run "
    "`exclusivelog verify`",
)
REPEATED = _line(
    "repeated",
    _E,
    "the journal has %(count)d messages of topic %(topic)r at offset %(offset)d, which other "
    "messages have already; they are left out. Two processes have sent as one owner",
)
NOTES_DAMAGED = _line(
    "notes_damaged",
    _E,
    "%(count)d frames of the journal with positions of reader groups are damaged: a group may read "
    "again what it has read",
)
NOTES_DOUBTED = _line(
    "notes_doubted",
    _E,
    "%(bytes)d bytes of the journal are destroyed. If they had positions of reader groups, a group "
    "may read again what it has read",
)
FOREIGN = _line(
    "foreign",
    _E,
    "another process has sent to the topic with id %(topic_id)d as its exclusive owner, which this "
    "process is. Those messages are kept, and this process continues after them. Open an engine in "
    "each process",
)
ENTRY_DAMAGED = _line("entry_damaged", _D, "%(reason)s")
SPACE_KEPT = _line(
    "space_kept",
    _W,
    "a damaged entry of the topic with id %(topic_id)d keeps its space in segments/",
)
SEGMENT_KEPT = _line(
    "segment_kept",
    _W,
    "%(file)s is not used any more, but cannot be removed: %(reason)s. The next open tries again",
    begin="",
)
