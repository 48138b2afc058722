"""Appending to the journal and the tables, for one session, or for many by group commit.

Each commit takes everything that waits at that moment. `send` commits in its own thread: one thread
commits at a time, and messages that arrive meanwhile are in the next commit. `send_async` leaves
the commit to a background thread, which sleeps when nothing waits.

A session's messages are appended at once if none of its messages waits, else through the queue.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from exclusivelog import _core, logs, threads
from exclusivelog._core import Outcome
from exclusivelog.backend import SENT_AT_ONCE, SessionOptions, SessionPaused
from exclusivelog.errors import (
    DuplicateSequenceError,
    EngineClosedError,
    ExclusiveLogError,
    LedgerError,
    LedgerFullError,
    LedgerIOError,
    WaitTimeoutError,
    called_reentrantly,
    duplicate_sequence,
    not_growing,
)
from exclusivelog.local.records import Session
from exclusivelog.local.shm.tasks import is_stopped
from exclusivelog.local.storage.tables import Tables, check_may_write
from exclusivelog.local.time_marks import wall_ms
from exclusivelog.messages import Columns, Encoded, Raw
from exclusivelog.refusals import without_outcome
from exclusivelog.sessions import outcome_of
from exclusivelog.waits import in_slices, queued

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime
    from exclusivelog.local.storage.ledger import Ledger

log = logging.getLogger(__name__)

APPENDED_AT_ONCE = 1 << 15  # appenders; a copy of their messages is held in memory meanwhile
# Sessions; no process appends while they are entered in the journal's memory.
LOOKED_UP_AT_ONCE = 1000
LOOK_UP_SECONDS = 30.0  # longer than a thousand changes of ownership by other processes take
RETRY_SECONDS = 0.25  # after a commit that could not begin
AT_ONCE = 1  # a deadline that has passed: a wait ends after half a second
TURN_SECONDS = 0.5  # the longest that a transaction lets the sends before it go first

# ---- to the journal, or to the tables --------------------------------------------------


class Work(NamedTuple):
    """The batches of one producer that are to be committed."""

    appender: _core.Appender
    batches: Sequence[_core.Batch]

    @property
    def session(self) -> Session:
        """The producer's session, which must still be valid."""
        session: Session = self.appender.session
        return session


Placed = list[tuple[_core.Batch, int]]
Sent = TypeVar("Sent", bound="int | tuple[int, int, int]")


def append_together(
    ledger: Ledger, appenders: Sequence[_core.Appender]
) -> Sequence[_core.Appender]:
    """Append what these appenders have, durably, in one call of the compiled core, and settle each
    one's outcome. Returns the work that is left, because it is too large for the journal, or was
    refused; pass it to `append`.
    """
    left: list[_core.Appender] = []
    for start in range(0, len(appenders), APPENDED_AT_ONCE):
        left += _append_together(ledger, list(appenders[start : start + APPENDED_AT_ONCE]))
    return left


def _append_together(ledger: Ledger, appenders: list[_core.Appender]) -> list[_core.Appender]:
    renewed = False
    while appenders:
        try:
            appenders, outcome = _core.append_together(appenders)
            if outcome == Outcome.FULL:
                ledger.checkpoint()
            elif outcome == Outcome.STALE and not renewed:
                look_up_all(ledger, appenders)
                renewed = True
            else:
                break
        except Exception:  # the next append of each session raises the same error
            break
    return appenders


def append(ledger: Ledger, works: Sequence[Work]) -> None:
    """Append all batches, durably, and settle the outcome of each (rule B9).

    Small ones go into the journal, large ones straight into the tables. The refusal of one
    producer's messages does not fail the others'.
    """
    small: list[Work] = []
    large: list[Work] = []
    for work in works:
        fits = all(batch.small for batch in work.batches)
        (small if fits else large).append(work)
    try:
        if small:
            _append_to_journal(ledger, small)
    finally:
        if large:
            append_to_tables(ledger, large)


def _append_to_journal(ledger: Ledger, works: Sequence[Work]) -> None:
    """Append small batches to the journal, with one flush for all of them."""
    errors: list[ExclusiveLogError | None] = [None for _ in works]
    try:
        for index, work in enumerate(works):
            try:
                _place(ledger, work)
            except ExclusiveLogError as error:
                errors[index] = error
    finally:
        # After any exception: what is in the journal by now is flushed and acknowledged.
        for work, refused in zip(works, errors, strict=True):
            _flush_and_settle(ledger, work, refused)


def _place(ledger: Ledger, work: Work) -> None:
    for batch in work.batches:
        if batch.placed:
            continue  # written by a commit that was interrupted before its flush
        outcome = work.appender.place(batch)
        while outcome in REPAIRABLE:
            repair(ledger, work.appender, outcome)
            outcome = work.appender.place(batch)
        if outcome != Outcome.PLACED:
            raise refusal(ledger, work.appender, outcome, batch.base_sequence, batch.count)


def _flush_and_settle(ledger: Ledger, work: Work, error: ExclusiveLogError | None) -> None:
    appender = work.appender
    placed = [batch for batch in work.batches if batch.placed]
    if len(placed) < len(work.batches) and error is None:
        error = LedgerError(f"{ledger.path}: the append was interrupted; nothing was written")
    if placed and appender.flushes and ledger.journal is not None:
        last = placed[-1]
        outcome = ledger.journal.flush_to(last.end, last.generation_placed)
        if outcome != Outcome.PLACED:
            placed, error = [], refusal(ledger, appender, outcome)
    if placed:
        appender.announce()
    passing = (DuplicateSequenceError, LedgerError)
    durable = error.last_sequence_id if isinstance(error, DuplicateSequenceError) else None
    final = error is not None and not isinstance(error, passing)
    appender.settle([(batch, batch.base_offset) for batch in placed], error, final, durable)
    _drop_frames(error)


def _drop_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that receipts keep: they keep frames, and these the appender,
    so that a producer that is dropped would never be released."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


# ---- what keeps an append out of the journal ---------------------------------------------

REPAIRABLE = (Outcome.STALE, Outcome.FULL)


def repair(ledger: Ledger, appender: _core.Appender, outcome: int) -> None:
    """Remove the cause for which an append was not written, so that it can be retried; raises if
    that is impossible."""
    if outcome == Outcome.STALE:
        look_up(ledger, appender)
    else:
        ledger.checkpoint()


def look_up(ledger: Ledger, appender: _core.Appender) -> None:
    """Read the session's right to write, its last sequence id and the topic's end into the
    appender."""
    session, journal = appender.session, ledger.journal
    assert journal is not None
    ledger.check()
    end = _core.monotonic() + LOOK_UP_SECONDS
    while _core.monotonic() < end:
        version = journal.version_of(session.topic)  # before the tables, to notice later changes
        if journal.unsettled or journal.is_fenced(version):
            ledger.settle()
            end = _core.monotonic() + LOOK_UP_SECONDS
            continue
        with ledger.read() as tables:
            row = tables.topics.get(session.topic)
            check_may_write(tables, row, session)
            sequence, _ = tables.producers.get(session.topic, session.name)
            generation, applied = tables.journal.generation, tables.journal.applied
        if journal.learn(
            session.topic, row.next_offset, row.last_publish_time, applied, generation, version
        ):
            appender.looked_up(version, sequence)
            return
    raise LedgerError(
        f"{ledger.path}: tables and shared memory have disagreed for {LOOK_UP_SECONDS:.0f} s; was "
        "a file restored while a process had the ledger open? Close every engine, and end the "
        "children of processes that had it open; then open it again"
    )


def look_up_all(ledger: Ledger, appenders: Sequence[_core.Appender]) -> None:
    """Do the same as `look_up` for many sessions at a time. Skips a session that may not write any
    more, or whose topic changes meanwhile; its next append looks it up."""
    stale = [appender for appender in appenders if appender.stale]
    for start in range(0, len(stale), LOOKED_UP_AT_ONCE):
        _look_up_some(ledger, stale[start : start + LOOKED_UP_AT_ONCE])


def _look_up_some(ledger: Ledger, appenders: Sequence[_core.Appender]) -> None:
    journal = ledger.journal
    assert journal is not None
    found: list[tuple[int, int, int, int]] = []
    valid: list[tuple[_core.Appender, int, int]] = []
    # Before the tables, to notice later changes.
    versions = [journal.version_of(appender.session.topic) for appender in appenders]
    with ledger.read() as tables:
        for appender, version in zip(appenders, versions, strict=True):
            session = appender.session
            with contextlib.suppress(ExclusiveLogError):
                row = tables.topics.get(session.topic)
                check_may_write(tables, row, session)
                sequence, _ = tables.producers.get(session.topic, session.name)
                found.append((session.topic, row.next_offset, row.last_publish_time, version))
                valid.append((appender, version, sequence))
        generation, applied = tables.journal.generation, tables.journal.applied
    if journal.learn_all(found, applied, generation):
        for appender, version, sequence in valid:  # an older version than the topic's stays stale
            appender.looked_up(version, sequence)


def refusal(
    ledger: Ledger,
    appender: _core.Appender,
    outcome: int,
    sequence: int | None = None,
    count: int = 1,
) -> ExclusiveLogError:
    """The error for an append of `count` messages that did not succeed."""
    if outcome == Outcome.DUPLICATE:
        return duplicate(ledger, appender, sequence, count)
    return failure(ledger, outcome)


def versions_of(ledger: Ledger, claims: Sequence[int], topics: Sequence[int]) -> list[int]:
    """The versions of claims and topics, to be read before their rows: a transaction that is
    committed afterwards changes them."""
    journal = ledger.journal
    assert journal is not None
    while True:
        versions = [journal.version_of_claim(claim) for claim in claims]
        versions += [journal.version_of(topic) for topic in topics]
        if not (journal.unsettled or any(map(journal.is_fenced, versions))):
            return versions
        ledger.settle()


def failure(ledger: Ledger, outcome: int, tried: bool = False) -> ExclusiveLogError:
    """The error for an append that has failed, whoever sent it. `tried`: it may be in the log."""
    error = _failure(ledger, outcome)
    if (tried or outcome == Outcome.LOST) and not error.maybe_written:
        error = copy.copy(error)  # the ledger's is also that of calls that write nothing
        error.maybe_written = True
    return error


def _failure(ledger: Ledger, outcome: int) -> ExclusiveLogError:
    if outcome == Outcome.NO_ROOM:
        return LedgerFullError(
            f"{ledger.path}/journal: no space left on the disk, or for this process (ulimit -f); "
            "nothing was written. Free some"
        )
    if outcome == Outcome.HELD_HERE:
        return called_reentrantly(ledger.path)
    try:
        ledger.check()
    except LedgerError as error:
        return error
    if outcome == Outcome.CLOSED:
        return EngineClosedError(
            f"the ledger {ledger.path} was closed during the call; open it again"
        )
    return LedgerIOError(
        f"{ledger.path}/journal was recovered by another process while this send waited "
        "for its flush. Send again with the same sequence_id: a message that is in the log is "
        "refused"
    )


def duplicate(
    ledger: Ledger,
    appender: _core.Appender,
    sequence: int | None,
    count: int = 1,
    logged: int | None = None,
) -> DuplicateSequenceError:
    """This producer has sent that sequence id already. `logged`: the last one in the log, if
    `appender` has messages of a transaction."""
    last, name = appender.last_sequence, appender.session.name
    if sequence is not None and sequence <= appender.durable_sequence:
        last = appender.durable_sequence  # not one that waits, and may fail yet
    with ledger.read() as tables:
        topic = tables.topics.get(appender.session.topic).name
    if logged is not None and logged < last:
        if sequence is None or sequence > logged:
            return not_growing(
                topic, name, last if sequence is None else sequence, last, logged, count
            )
        last = logged
    if sequence is not None:
        return duplicate_sequence(topic, name, sequence, last, count)
    return DuplicateSequenceError(
        f"topic {topic!r}: producer {name!r} has sent sequence id {last}, the largest there is; "
        "go on under another name",
        sequence_id=last,
        last_sequence_id=last,
        count=count + 1,
    )


# ---- large batches -----------------------------------------------------------------------


def append_to_tables(ledger: Ledger, works: Sequence[Work]) -> None:
    """Append all batches in one transaction of the tables."""
    placed: list[Placed] = [[] for _ in works]
    refused: list[ExclusiveLogError | None] = [None for _ in works]
    try:
        with ledger.write_checkpointed() as tables:
            for index, work in enumerate(works):
                try:
                    placed[index] = append_one(tables, work)
                except LedgerError:
                    raise  # a batch may be partly written
                except ExclusiveLogError as error:
                    refused[index] = error
    except ExclusiveLogError as error:
        if isinstance(error, LedgerFullError) and len(works) > 1:
            # Retry one by one: a large batch must not fail the small ones.
            _append_each(ledger, works)
            return
        for work in works:
            work.appender.settle([], error)
        raise
    except BaseException as error:
        # The interrupt may have come after the commit: the tables show each outcome.
        for work, batches in zip(works, placed, strict=True):
            _settle_by_the_tables(ledger, work, batches, error)
        raise
    for work, batches, error_of_one in zip(works, placed, refused, strict=True):
        durable = None
        if isinstance(error_of_one, DuplicateSequenceError):
            durable = error_of_one.last_sequence_id
        final = error_of_one is not None and durable is None
        work.appender.settle(batches, error_of_one, final, durable)


def _append_each(ledger: Ledger, works: Sequence[Work]) -> None:
    for work in works:
        with contextlib.suppress(ExclusiveLogError):  # its receipts have raised the error
            append_to_tables(ledger, [work])


def _settle_by_the_tables(ledger: Ledger, work: Work, placed: Placed, cause: BaseException) -> None:
    """Settle outcomes after an interrupted transaction: acknowledge what is in the ledger, fail the
    rest."""
    written: Placed = []
    durable = None
    error: LedgerError = LedgerError(
        f"{ledger.path}: the commit was interrupted by {cause!r}; nothing was written"
    )
    try:
        with ledger.read() as tables:
            written = [place for place in placed if _is_written(tables, work.session, *place)]
            durable, _ = tables.producers.get(work.session.topic, work.session.name)
    except Exception as failure:
        error = LedgerIOError(
            f"{ledger.path}: the commit was interrupted by {cause!r}, and it is unknown "
            f"whether it completed: {failure}"
        )
    work.appender.settle(written, error, False, durable)


def _is_written(tables: Tables, session: Session, batch: _core.Batch, base_offset: int) -> bool:
    for _, data in tables.entries.walk(session.topic, base_offset):
        entry = _core.Entry(tables.entries.load(data))
        if entry.session != session.id or entry.base_offset > base_offset:
            return False
        message = entry.message(base_offset - entry.base_offset)
        return bool(message.sequence_id == batch.base_sequence)
    return False


def _was_written(tables: Tables, session: Session, batch: _core.Batch) -> bool:
    """Was the batch written by a commit that was interrupted before it settled the outcome?"""
    return batch.base_offset >= 0 and _is_written(tables, session, batch, batch.base_offset)


def append_one(tables: Tables, work: Work) -> Placed:
    """Append one producer's batches within a transaction, if it may write (rules B2, G2)."""
    session = work.session
    row = tables.topics.get(session.topic)
    check_may_write(tables, row, session)
    sequence, _ = tables.producers.get(session.topic, session.name)
    publish_time = max(row.last_publish_time, wall_ms())
    placed: Placed = []
    messages, size = tables.appended or (0, 0)
    for batch in work.batches:
        if batch.base_sequence <= sequence and _was_written(tables, session, batch):
            placed.append((batch, batch.base_offset))
            continue
        if batch.base_sequence <= sequence:
            raise duplicate_sequence(
                row.name, session.name, batch.base_sequence, sequence, batch.count
            )
        base_offset = row.next_offset
        for last, entry in batch.stamp(
            session.topic, base_offset, session.epoch, session.id, publish_time
        ):
            tables.entries.put(session.topic, last, tables.compression.compressed(row, entry))
            messages, size = messages + last + 1 - row.next_offset, size + len(entry)
            row.next_offset = last + 1
        sequence = batch.last_sequence
        placed.append((batch, base_offset))
    if placed:
        tables.appended = messages, size
        row.last_publish_time = publish_time
        tables.topics.put(row)
        tables.producers.put(session.topic, session.name, sequence, session.id)
        tables.announce.add(session.topic)
    return placed


# ---- group commit ----------------------------------------------------------------------


class Committer:
    """Commits for all producers of one engine."""

    def __init__(self, ledger: Ledger, run_callbacks: Callable[[], None]) -> None:
        self._run_callbacks = weakref.WeakMethod(run_callbacks)  # no reference cycle
        self.commit_queue = _core.CommitQueue()
        self._ledger = ledger
        self._commit_lock: Any = threading.RLock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    # ---- in the sender's thread ----------------------------------------------------------

    def commit(self, appender: _core.Appender, receipt: _core.Receipt | None = None) -> None:
        """Commit everything that waits; return when the outcome of `receipt` (None: of all that
        this appender has) is known."""
        receipt = receipt or appender.newest()
        if receipt is None or receipt.done():
            return
        self.check_free()
        if threading.current_thread() is threading.main_thread():
            # Ctrl-C interrupts the main thread, perhaps between a commit and its outcome. So
            # another thread commits, and the main thread waits for it.
            self.commit_queue.put(appender, 0.0)
            receipt._wait(None)
            return
        try:
            with self._commit_lock:
                if not receipt.done():
                    self._commit()
        finally:
            self._call_back()
        if not receipt.done():  # the commit was interrupted: the background thread retries
            self.commit_queue.put(appender, RETRY_SECONDS)
            receipt._wait(None)

    def commit_within(
        self, appender: _core.Appender, receipt: _core.Receipt, timeout: float
    ) -> None:
        """The same for at most `timeout` seconds. It commits in the background, because a thread
        that waits for the writer lock cannot give up."""
        self.check_free()
        self.commit_queue.put(appender, 0.0)
        receipt._wait(timeout)

    def drain(self) -> None:
        """Commit everything that waits, also messages of dropped producers."""
        for appender in self.commit_queue.pending():
            self.commit(appender)
        with self._commit_lock:
            pass  # until other threads have committed what they took

    def drain_session(self, session: int) -> None:
        """Commit the messages of a session whose producers were dropped."""
        for appender in self.commit_queue.pending():
            if appender.session.id == session:
                self.commit(appender)
        with self._commit_lock:
            pass

    def drain_dropped(
        self, topic: int | None, lives: Callable[[int], object], timeout: float | None
    ) -> list[Session]:
        """Commit what the dropped producers of a topic (None: of all topics) have accepted; returns
        the sessions of those where that took no longer than `timeout` seconds in all (None: without
        limit). `lives`: does a session of this id have a producer?"""
        dropped = [
            appender
            for appender in self.commit_queue.pending()
            if topic in (None, appender.session.topic) and not lives(appender.session.id)
        ]
        end = None if timeout is None else _core.monotonic() + timeout
        return [appender.session for appender in dropped if self._drains(appender, end)]

    def _drains(self, appender: _core.Appender, end: float | None) -> bool:
        """Commit what waits here, until `end` at most; whether all is committed."""
        receipt = appender.newest()
        if receipt is None or end is None:
            self.commit(appender)
            return True
        self.commit_within(appender, receipt, max(0.0, end - _core.monotonic()))
        return receipt.done()

    def fail(self, appender: _core.Appender, error: ExclusiveLogError) -> None:
        """Fail all messages that wait in this appender, and all later ones.

        Waits for the end of a commit: messages that are being committed get their own outcome
        (rules B9, B10).
        """
        with self._commit_lock:
            appender.settle([], error, True)
        self._call_back()

    def _call_back(self) -> None:
        run = self._run_callbacks() or _core.run_callbacks
        run()

    # ---- one commit ----------------------------------------------------------------------

    def _commit(self) -> None:
        # The block requeues messages without an outcome, also after an exception.
        with self.commit_queue as waiting:
            try:
                left = append_together(self._ledger, waiting)
                append(self._ledger, self._gather(filter(self._is_open, left)))
            except Exception as error:  # every receipt has the error, or is retried
                expected = isinstance(error, ExclusiveLogError)
                line = logs.COMMIT_REFUSED if expected else logs.COMMIT_FAILED
                logs.emit(log, line, ledger=self._ledger.path, reason=repr(error))
                _drop_frames(error)

    def _is_open(self, appender: _core.Appender) -> bool:
        """May this topic be appended to, or may it soon? Else a process is paused in a change of
        its owners: its messages are tried again later, and hold up those of no other topic."""
        journal = self._ledger.journal
        if journal is None or not journal.is_fenced(journal.version_of(appender.session.topic)):
            return True
        _, thread = journal.inside
        if thread and is_stopped(thread):
            if journal.on_stall is not None:
                journal.on_stall(thread)
            return False
        try:
            self._ledger.settle(AT_ONCE)
        except WaitTimeoutError:
            return False
        return True

    def _gather(self, waiting: Iterable[_core.Appender]) -> list[Work]:
        return [
            Work(appender, batches) for appender in waiting if (batches := self._take(appender))
        ]

    def _take(self, appender: _core.Appender) -> Sequence[_core.Batch]:
        try:
            return appender.take()
        except Exception as error:
            # No memory to encode it, say; the other producers' messages are committed.
            appender.settle([], LedgerError(f"messages could not be encoded: {error!r}"))
            return []

    def forget(self) -> None:
        """Wait for no commit of the parent, in a forked child."""
        threads.renew(self._commit_lock)

    @property
    def busy_here(self) -> bool:
        """Is this thread inside a commit, or a signal handler that interrupted one?"""
        return bool(self._commit_lock._is_owned()) or self._ledger.busy_here

    def check_free(self) -> None:
        """LedgerError if this thread is inside a commit, and would wait for itself."""
        if self.busy_here:
            raise called_reentrantly(self._ledger.path)

    # ---- in the background ---------------------------------------------------------------

    def start(self) -> None:
        """Start the background thread, unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(
                        target=self._run, name="exclusivelog-commit", daemon=True
                    )
                    self._thread = threads.start(self._ledger.path, thread)

    def _run(self) -> None:
        _core.keep_running(self._commit_when_due, self._report)

    def _commit_when_due(self) -> bool:
        if not self.commit_queue.sleep():
            return False
        try:
            self._commit_alone()
        finally:
            _core.run_callbacks()
        return True

    def _commit_alone(self) -> None:
        with self._commit_lock:
            self._commit()

    def _report(self, error: BaseException) -> None:
        # Only log it: every receipt has its outcome, or is still in the commit queue.
        logs.emit(
            log, logs.COMMIT_INTERRUPTED, error=error, ledger=self._ledger.path, reason=repr(error)
        )

    def stop(self) -> None:
        """End the background thread. Drain before: it does not commit what still waits."""
        self.commit_queue.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=60)


# ---- of one session --------------------------------------------------------------------


class LocalSending:
    """Appends the messages of one session to the ledger of its engine.

    A base class of sessions: a process may have a hundred thousand, and an object of its own for
    each would repeat what the session knows."""

    __slots__ = ()  # `SessionLife` has them

    appender: _core.Appender
    engine: Runtime
    options: SessionOptions
    topic: str
    _pauses: Pauses | None

    @property
    def sending(self) -> LocalSending:
        """It appends by itself."""
        return self

    def served(self) -> None:
        """The call of this thread that has waited for the end of a pause has been made."""
        if self._pauses is not None:
            self._pauses.served()

    def await_turns(self) -> None:
        """Before a transaction pauses it again: let calls be made that waited for the last one
        (rule K4)."""
        if self._pauses is not None:
            self._pauses.await_turns()

    # ---- one message -----------------------------------------------------------------------

    def send(self, message: Encoded, timeout: float | None) -> int:
        """Append one message; its offset, once it is durable."""
        if timeout is None and sum(len(part or b"") for part in message[:3]) < SENT_AT_ONCE:
            sent = self._append_now(lambda: self.appender.send(*message), message[4])
            if sent is not None:
                return sent
        receipt = self.appender.add(*message)
        if receipt is None or receipt is _core.UNDECIDED:
            receipt, timeout = queued(
                self, lambda: self.appender.add(*message), message[4], timeout
            )
        return self._outcome(receipt, timeout)

    def send_async(self, message: Encoded) -> _core.Receipt:
        """Queue one message; commit what waits if that exceeds `max_pending_bytes`."""
        receipt = self.appender.add(*message, True)
        if receipt is None or receipt is _core.UNDECIDED:
            receipt, _ = queued(self, lambda: self.appender.add(*message, True), message[4], None)
        self.commit_if_full()
        return receipt

    def commit_if_full(self) -> None:
        """Commit what waits if it exceeds `max_pending_bytes`."""
        if self.appender.holds(self.options.max_pending_bytes):
            self.engine.committer.commit(self.appender)

    def offer(self, message: Encoded) -> _core.Receipt | None:
        """The same, but leave the commit to the background thread. None, without queueing the
        message, while another thread of this session appends past the queue, or a message that
        waits has used the sequence id."""
        receipt = self.appender.add(*message, True, False)
        if receipt is _core.NOT_NOW:
            return None
        if receipt is _core.UNDECIDED:
            self.engine.committer.commit_queue.put(self.appender, 0.0)
            return None
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        if self.appender.holds(self.options.max_pending_bytes):
            self.engine.committer.commit_queue.put(self.appender, 0.0)
        return receipt

    def await_earlier(self, timeout: float | None = None) -> None:
        """Wait for the outcome of all that was accepted so far, whatever it is. WaitTimeoutError
        after `timeout` seconds."""
        self.appender.await_sends()
        waiting = self.appender.newest()
        if waiting is not None:
            self._await(waiting, timeout)

    def _append_now(
        self, append: Callable[[], Sent], sequence: int | None, count: int = 1
    ) -> Sent | None:
        """Append past the queue; None if messages wait that must come first."""
        outcome = append()
        while isinstance(outcome, int) and -outcome in REPAIRABLE:
            repair(self.engine.ledger, self.appender, -outcome)
            outcome = append()
        if not isinstance(outcome, int) or outcome >= 0:
            return outcome
        if -outcome == Outcome.QUEUED:
            return None
        raise refusal(self.engine.ledger, self.appender, -outcome, sequence, count)

    def _outcome(self, receipt: _core.Receipt, timeout: float | None) -> int:
        return outcome_of(receipt, lambda: self._await(receipt, timeout))

    def _await(self, receipt: _core.Receipt, timeout: float | None) -> None:
        if timeout is None:
            self.engine.committer.commit(self.appender, receipt)
        else:
            self.engine.committer.commit_within(self.appender, receipt, timeout)
        if not receipt.done():
            raise without_outcome(self.topic, timeout)

    def duplicate(
        self, appender: _core.Appender, sequence: int | None, count: int = 1
    ) -> DuplicateSequenceError:
        """The error for a sequence id that was used before. `appender` may be that of a
        transaction."""
        logged = None if appender is self.appender else self.appender.durable_sequence
        return duplicate(self.engine.ledger, appender, sequence, count, logged)

    # ---- several, atomically ---------------------------------------------------------------

    def send_batch(self, columns: Columns, sequence: int | None, timeout: float | None) -> int:
        """Append messages atomically; the first one's offset."""
        return self._send_batch(columns.batch(self.appender), sequence, timeout)

    def _send_batch(self, batch: _core.Batch, sequence: int | None, timeout: float | None) -> int:
        if timeout is None and batch.small:
            sent = self._append_now(
                lambda: self.appender.send_batch(batch, sequence), sequence, batch.count
            )
            if sent is not None:
                return sent
        receipt = self.appender.add_batch(batch, sequence)
        if receipt is None or receipt is _core.UNDECIDED:
            receipt, timeout = queued(
                self,
                lambda: self.appender.add_batch(batch, sequence),
                sequence,
                timeout,
                batch.count,
            )
        return self._outcome(receipt, timeout)

    # ---- append now, flush later -----------------------------------------------------------

    def append(self, messages: Sequence[Raw]) -> tuple[int, int, int] | int:
        """Append messages atomically. Returns (offset, position, generation), the last two for
        `await_flush`, or only the offset if the messages are flushed already."""
        call = self.appender.append
        key, value, properties = messages[0]
        if len(messages) == 1 and len(value or b"") + len(key or b"") < SENT_AT_ONCE:
            outcome = self._append_now(lambda: call(value, key, properties), None)
            if isinstance(outcome, tuple):
                return outcome
            return self._send_batch(self._batch_of(messages), None, None)
        batch = self._batch_of(messages)
        if batch.small:
            outcome = self._append_now(lambda: self.appender.append_batch(batch), None)
            if isinstance(outcome, tuple):
                return outcome
        return self._send_batch(batch, None, None)  # it is large, or earlier messages wait

    def _batch_of(self, messages: Sequence[Raw]) -> _core.Batch:
        keys, values, properties = ([m[column] for m in messages] for column in range(3))
        return self.appender.make_batch(
            _core.strings(values),
            _core.strings(keys) if _any_given(keys) else None,
            _core.strings(properties) if _any_given(properties) else None,
            None,
        )

    def await_flush(self, position: int, generation: int) -> None:
        """Return once what `append` has appended is durable."""
        assert self.engine.ledger.journal is not None
        outcome = self.engine.ledger.journal.flush_to(position, generation)
        if outcome != Outcome.PLACED:
            raise failure(self.engine.ledger, outcome, tried=True)

    # ---- what was accepted -----------------------------------------------------------------

    def commit_queued(self) -> None:
        """Commit what waits in the queue."""
        self.engine.committer.commit(self.appender)

    def drain(self) -> None:
        """Commit what was accepted so far."""
        self.appender.await_sends()
        self.commit_queued()

    def private_appender(self) -> _core.Appender:
        """One for a transaction, which continues the numbering of `appender`."""
        return _core.Appender(
            self.appender.name,
            self.appender.last_sequence,
            self.options.max_batch_messages,
            self.options.max_batch_bytes,
            self.appender.session,
        )


class Pauses:
    """Pauses the appends of one session, for hand-overs and transactions; counts who has paused it.

    True while appends are paused. What was accepted before is still sent."""

    __slots__ = (
        "_appender",
        "_due",
        "_lock",
        "_resumed",
        "_stopped",
        "_topic",
        "_waiting",
        "count",
    )

    def __init__(self, appender: _core.Appender, topic: str, lock: _core.Lock) -> None:
        self.count = 0  # of calls of `begin` without their `end`
        self._appender, self._topic = appender, topic
        self._lock = lock  # one for all sessions of the engine
        self._resumed: threading.Event | None = None  # None: not paused
        self._stopped = False
        self._waiting: set[int] = set()  # threads that wait for the end of this pause
        self._due: set[int] = set()  # those that waited for the last one, and whose turn it is

    def __bool__(self) -> bool:
        return self._resumed is not None

    def begin(self) -> None:
        """Pause appends until `end` has been called as often as this."""
        with self._lock:
            self.count += 1
            if self._resumed is None and not self._stopped:
                self._resumed = threading.Event()
                self._appender.pause(SessionPaused(f"topic {self._topic!r} is being handed over"))

    def end(self) -> None:
        """Resume appends, if this ends the last pause."""
        with self._lock:
            self.count -= 1
            if not self.count:
                self._appender.resume()
                self._wake()

    def stop(self) -> None:
        """End all pauses, because the session has ended: its appends fail."""
        with self._lock:
            self._stopped = True
            self._wake()

    def _wake(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._due, self._waiting = self._waiting, set()
            resumed.set()

    def wait(self, timeout: float | None, check: Callable[[], object]) -> bool:
        """Return once appends are not paused; False after `timeout` seconds. Calls `check`
        meanwhile."""
        with self._lock:
            resumed = self._resumed
            if resumed is None:
                return True
            self._waiting.add(threading.get_ident())
        return in_slices(resumed.wait, timeout, check)

    def served(self) -> None:
        """The call of this thread that has waited was made, or given up."""
        with self._lock:
            self._due.discard(threading.get_ident())
            self._waiting.discard(threading.get_ident())

    def await_turns(self) -> None:
        """Let the calls be made that waited for the end of the last pause. Not for longer than
        `TURN_SECONDS`: their threads may be stopped."""
        if self._due:
            end = _core.monotonic() + TURN_SECONDS
            while self._due and _core.monotonic() < end:
                time.sleep(0.0002)
            with self._lock:
                self._due = set()


def _any_given(column: Iterable[object]) -> bool:
    """Does any message have a value in this column?"""
    return any(item is not None for item in column)
