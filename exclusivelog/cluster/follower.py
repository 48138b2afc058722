"""A thread that follows one ordered log and drives its writer; calls that wait for it.

The caller decides when a process asks for the topic (rules A and D): `acquire` takes it from any
owner. That is safe, because the rule fences the former owner.

>>> from exclusivelog.cluster.frames import Holder
>>> from exclusivelog.cluster.memory import MemoryLog
>>> from exclusivelog.types import AccessMode
>>> holder = Holder("e1", "host", 1, "p", AccessMode.EXCLUSIVE)
>>> with Follower(MemoryLog(), holder) as follower:
...     epoch = follower.acquire(timeout=10)
...     offset = follower.send([(b"hello", None, None, None, None)], timeout=10)
>>> epoch, offset
(1, 0)
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from exclusivelog import _core
from exclusivelog.backend import Closing
from exclusivelog.cluster.frames import MAX_BYTES, Frame, Holder
from exclusivelog.cluster.log import Reader, Status, Ticket, Writer
from exclusivelog.cluster.ordered import Answer, OrderedLog, Position
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerIOError,
    ProducerFencedError,
    WaitTimeoutError,
)
from exclusivelog.messages import Encoded

__all__ = ["Follower"]

RESEND_SECONDS = 1.0  # without progress, before unread records are appended again
JOIN_SECONDS = 10.0
NEVER = float("inf")


class Resends:
    """The time at which a writer appends unread records again: after some seconds without progress,
    or sooner if an append is in doubt."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = NEVER  # by the monotonic clock

    def appended(self) -> None:
        """Start the time limit, after an append."""
        self._due = min(self._due, _core.monotonic() + self._seconds)

    def resend_soon(self) -> None:
        """Append again soon, because an append is in doubt."""
        self._due = min(self._due, _core.monotonic() + self._seconds / 10)

    def progressed(self, waits: bool) -> None:
        """Restart the time limit, after a record was read back. `waits`: others were not yet."""
        self._due = _core.monotonic() + self._seconds if waits else NEVER

    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, min(self._seconds, self._due - _core.monotonic()))

    def take(self) -> bool:
        """Is the time limit reached? True only once until the next append."""
        due = _core.monotonic() >= self._due
        if due:
            self._due = NEVER
        return due


class Outcomes:
    """The futures of sends without an outcome. Called under the follower's lock."""

    def __init__(self) -> None:
        self._futures: dict[Ticket, Future[int]] = {}
        self._settled: list[Ticket] = []

    def await_one(self, ticket: Ticket) -> Future[int]:
        """A future for the offset of this send."""
        future = self._futures[ticket] = Future()
        return future

    def note(self, ticket: Ticket) -> None:
        """Note that this send is settled, and its future is to be set."""
        self._settled.append(ticket)

    def take(self) -> list[tuple[Ticket, Future[int]]]:
        """Remove and return the settled sends, whose futures are set without the lock."""
        settled, self._settled = self._settled, []
        return [(ticket, self._futures.pop(ticket)) for ticket in settled]

    def forget(self, error: ExclusiveLogError) -> None:
        """Fail all futures in a forked child, where no thread sets them."""
        futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future._condition = threading.Condition()
            # Callbacks may wait for locks of the parent's threads.
            vars(future)["_done_callbacks"] = []
            with contextlib.suppress(Exception):  # it is cancelled or set already
                future.set_exception(error)


class Follower(Closing):
    """Follows one log, and sends to it while it owns the topic. All calls may come from any thread.

    - `state`: a saved state to continue from; None: read the log from its first record.
    - `resend`: seconds without progress before an append is repeated. A duplicate does not count,
      so a low number only costs traffic.

    Closing it ends its thread, and leaves the log open."""

    def __init__(
        self,
        log: OrderedLog,
        holder: Holder,
        *,
        state: State | None = None,
        resend: float = RESEND_SECONDS,
    ) -> None:
        if log.max_bytes < MAX_BYTES:
            raise ValueError(
                f"log takes records of {log.max_bytes} bytes; it must take {MAX_BYTES}"
            )
        self._log = log
        self._holder = holder
        self._resends = Resends(resend)
        self._process, self._condition = _core.this_process(), threading.Condition()
        self._reader = Reader(log, state)
        self._writer = self._new_writer()
        self._outcomes = Outcomes()
        self._closed = False
        self._error: ExclusiveLogError | None = None
        self._thread = threading.Thread(target=self._run, name="exclusivelog-follower", daemon=True)
        self._thread.start()
        _open.add(self)

    @property
    def _changed(self) -> threading.Condition:
        _core.this_process()  # in a forked child, `forget` replaces it first
        return self._condition

    def _new_writer(self) -> Writer:
        return Writer(self._reader.state, self._append, self._holder)

    def _append(self, data: bytes) -> None:
        self._resends.appended()
        try:
            self._log.append(data, self._answered)
        except Exception as error:  # reading back shows whether it is in the log
            self._answered(Answer(None, error=error))

    def _answered(self, answer: Answer) -> None:
        """Handle an answer; retry soon if it does not say that the record is stored."""
        if not answer.stored:
            self._resends.resend_soon()

    # ---- calls ---------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """The writer's status: "owner", "fenced", ... (`log.Writer`)."""
        return self._writer.status

    def save(self) -> bytes:
        """The state after the records that were read, for a later `State.restore`."""
        with self._changed:
            return self._reader.state.save()

    def catch_up(self, timeout: float | None = None) -> None:
        """Read the log up to its current end. Raises `WaitTimeoutError`."""
        with self._changed:
            self._check_open()
        end = self._log.end()
        with self._changed:
            self._wait(lambda: self._has_read(end), timeout, "the log was not read to its end")

    def _has_read(self, end: Position | None) -> bool:
        position = self._reader.state.position
        return end is None or (position is not None and position >= end)

    def acquire(self, timeout: float | None = None, topic_epoch: int | None = None) -> int:
        """Become the topic's owner, or stay it; returns the epoch. Another owner is fenced.

        An owner that sends without a pause may come first each time, until the time limit. If the
        log can do that, keep it from sending meanwhile (`PulsarLog.alone`).

        With `topic_epoch`, go on under that epoch (rule B5). Raises `ProducerFencedError` if
        another process was granted the topic first or the epoch is stale, `InvalidEpochError` if
        the epoch is ahead, and `WaitTimeoutError`, which leaves no owner behind."""
        deadline = None if timeout is None else _core.monotonic() + timeout
        self.catch_up(timeout)
        with self._changed:
            if self._writer.status in ("closed", "fenced"):
                self._writer = self._new_writer()
            writer = self._writer
            if writer.status == "owner" and topic_epoch in (None, writer.epoch):
                return writer.epoch
            known = self._reader.state.grant
            while True:
                self._ask(writer, topic_epoch, deadline)
                if writer.status == "owner":
                    return writer.epoch
                if writer.status != "refused" or self._reader.state.grant is not known:
                    raise self._refused()
                # Only a frame of the owner came first: ask again.

    def _ask(self, writer: Writer, topic_epoch: int | None, deadline: float | None) -> None:
        """Ask once, and wait for the outcome."""
        writer.ask(topic_epoch)
        left = None if deadline is None else max(0.0, deadline - _core.monotonic())
        try:
            self._wait(lambda: writer.status != "asking", left, "the topic was not granted")
        except BaseException:
            writer.release()  # it may have been granted just before an interrupt
            raise

    def _refused(self) -> ProducerFencedError:
        grant = self._reader.state.grant
        holder = None if grant is None else grant.owner()
        return ProducerFencedError(
            "the topic was not granted: another process was faster", holder=holder
        )

    def send(self, batch: Sequence[Encoded], timeout: float | None = None) -> int:
        """Send messages, all or none; returns the first one's offset once they count (rule J2).

        Raises what `Writer.send` does; `ProducerFencedError`, and then nothing is written; and
        `WaitTimeoutError` with `maybe_written` set."""
        try:
            return self.send_soon(batch).result(timeout)
        except FutureTimeout:
            error = WaitTimeoutError(f"the send was not read back within {timeout} seconds")
            error.maybe_written, error.retriable = True, False
            raise error from None

    def send_soon(self, batch: Sequence[Encoded]) -> Future[int]:
        """Send without waiting; returns a future for the offset."""
        with self._changed:
            self._check_open()
            now = time.time_ns() // 1_000_000
            ticket = self._writer.send(batch, now, self._outcomes.note)
            return self._outcomes.await_one(ticket)

    def release(self, timeout: float | None = None) -> None:
        """Wait for all sends, and release the topic. Raises `WaitTimeoutError`."""
        with self._changed:
            self._check_open()
            writer = self._writer
            writer.release()
            self._wait(lambda: writer.status != "closing", timeout, "the topic was not released")

    def close(self) -> None:
        """End the thread. Sends that were not read back raise `LedgerIOError`, `maybe_written`.

        In a forked child it does nothing."""
        if self._process != _core.this_process():
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reader.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineClosedError("this follower is closed; open a new one")

    def _wait(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        ended = lambda: done() or self._closed or self._error is not None  # noqa: E731
        if not self._changed.wait_for(ended, timeout):
            raise WaitTimeoutError(f"{what} within {timeout} seconds")
        if not done():
            self._check_open()

    def forget(self) -> None:
        """Drop log, writer, sends and thread in a forked child (rule C5)."""
        error = EngineClosedError(
            "this follower was inherited through fork(); open a log and a follower of your own"
        )
        self._closed = True
        self._error, self._writer.status = error, "closed"
        self._condition = threading.Condition()  # a thread of the parent may have held the lock
        self._outcomes.forget(error)

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step()
        except ExclusiveLogError as error:
            self._end(None if self._closed else error)
        except BaseException as error:
            self._end(LedgerIOError(f"the log cannot be followed any more: {error!r}"))
            raise
        else:
            self._end(None)

    def _step(self) -> None:
        record = self._reader.receive(self._resends.seconds_left())
        with self._changed:
            if record is not None:
                self._take(self._reader.fold(record))
            if self._resends.take() and self._writer.unsettled:
                self._writer.resend()
        self._tell()

    def _take(self, judged: Judged) -> None:
        writer = self._writer
        writer.saw(judged)
        parsed = judged.parsed
        mine = isinstance(parsed, Frame) and parsed.session == writer.session
        if mine and judged.verdict is Verdict.AHEAD:  # an earlier frame was lost
            self._resends.resend_soon()
        elif judged.counts:
            self._resends.progressed(writer.unsettled)
        self._changed.notify_all()

    def _tell(self) -> None:
        """Set the futures of settled sends."""
        with self._changed:
            settled = self._outcomes.take()
        for ticket, future in settled:  # without the lock, because their callbacks may send
            with contextlib.suppress(Exception):  # it was cancelled
                if ticket.error is None:
                    future.set_result(ticket.offset or 0)
                else:
                    future.set_exception(ticket.error)

    def _end(self, error: ExclusiveLogError | None) -> None:
        why = f": {error}" if error is not None else ""
        in_doubt = LedgerIOError(f"the log is not followed any more, the send is in doubt{why}")
        unsent = EngineClosedError(f"the log is not followed any more; nothing was sent{why}")
        with self._changed:
            self._error, self._closed = error, True
            self._writer.give_up(in_doubt, unsent)
            self._changed.notify_all()
        self._tell()


_open: weakref.WeakSet[Follower] = weakref.WeakSet()


def _forget_all() -> None:
    for follower in list(_open):
        follower.forget()
    _open.clear()


_core.in_forked_child(_forget_all)
