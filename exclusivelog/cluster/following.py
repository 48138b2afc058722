"""One topic's log, as one engine follows it: a thread that reads it, and the sessions that write.

`TopicLog` folds each record once, and passes it to the writers of this engine's sessions
(`owning`), to those who wait (`queueing`) and to what readers need (`recent`).

Nothing depends on the answers to an append. What has not been read back is appended again
(`appending`); the rule counts it once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from exclusivelog import _core, threads
from exclusivelog.cluster.appending import RESEND_SECONDS, Appending
from exclusivelog.cluster.checkpoints import AT_CLOSING, NOWHERE, Checkpoint, Saving
from exclusivelog.cluster.figures import Figures
from exclusivelog.cluster.frames import Frame, Grant, Holder, Join, Release, Terminate, encode
from exclusivelog.cluster.log import Reader, Writer
from exclusivelog.cluster.ordered import OrderedLog, Position, Record
from exclusivelog.cluster.owning import ANSWER_SECONDS, LIVING, Owning
from exclusivelog.cluster.place import Place
from exclusivelog.cluster.queueing import Queue, Told
from exclusivelog.cluster.recent import Recent
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.cluster.waiting import Noted, Wait, Waiters, decode
from exclusivelog.errors import (
    EngineClosedError,
    ExclusiveLogError,
    LedgerIOError,
    WaitTimeoutError,
)
from exclusivelog.waits import in_slices

__all__ = ["TopicLog"]


class Host(Protocol):
    """The engine that follows the log."""

    id: str
    path: str
    readonly: bool
    figures: Figures

    @property
    def place(self) -> Place:
        """Where the topics are."""

    @property
    def commit_queue(self) -> _core.CommitQueue:
        """Of its commit thread."""

    def check_not_forked(self) -> None:
        """EngineClosedError in a forked child."""

    def ownership_changed(self) -> None:
        """A grant or a release counts."""

    def look_at_waiters(self) -> None:
        """Somebody who waits may have his turn."""

    def waits_here(self, number: int) -> bool:
        """Is this a waiter of this engine?"""


class Changes:
    """A counter that changes, and those who wait for that. The word at 0 of `words` has it."""

    def __init__(self) -> None:
        self.words = _core.SharedWords(bytearray(8))

    def mark(self) -> int:
        """The number now."""
        return self.words.load(0)

    def wake(self) -> None:
        """Change it, and wake those who wait."""
        self.words.add(0, 1)
        self.words.wake(0)


# ---- one topic ---------------------------------------------------------------------------


class TopicLog:
    """One topic's log. `number` is the topic's id within its engine.

    `changed` guards everything here, and is notified with every record."""

    def __init__(
        self, host: Host, name: str, number: int, log: OrderedLog,
        checkpoint: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self.host, self.name, self.id = host, name, number
        self.log = log
        self.changed = threading.Condition()
        self.frames = Changes()  # changes with every frame
        start = checkpoint or Checkpoint(NOWHERE, State(), -1)
        self.recent = Recent(start.first, start.marks, start.state.next)
        self._appending = Appending(log, self._stored)
        self.queue = Queue(host, self._appending.append)
        for record in start.queue:
            self.waiters.take(record)
        self.saving = Saving(host.place, name, start.anchor, not host.readonly)
        self.state = start.state
        self._reader = Reader(log, self.state)
        self._owning: list[Owning] = []
        self._closed = False
        self._error: ExclusiveLogError | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"exclusivelog-topic-{name}", daemon=True
        )
        threads.start(host.path, self._thread)

    # ---- calls ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended the thread that follows the log."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise EngineClosedError(f"topic {self.name!r}: its engine was closed")

    def await_change(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Wait until `done()`, which is called with the lock; WaitTimeoutError with `what`."""

        def wait(seconds: float) -> bool:
            with self.changed:
                return self.changed.wait_for(lambda: done() or self._ended, seconds)

        if not in_slices(wait, timeout, self.host.check_not_forked):
            raise WaitTimeoutError(f"topic {self.name!r}: {what} within {timeout} s")
        with self.changed:
            if not done():
                self.check()

    @property
    def _ended(self) -> bool:
        return self._closed or self._error is not None

    def catch_up(self, timeout: float = ANSWER_SECONDS) -> None:
        """Wait until all that is in the log now is read."""
        self.check()
        end = self.log.end()
        if end is None:
            return
        state = self.state
        self.await_change(
            lambda: state.position is not None and state.position >= end, timeout,
            "the log was not read to its end",
        )  # fmt: skip

    def is_wanted(self, name: str) -> bool:
        """Does another producer wait for the topic?"""
        with self.changed:
            return self.queue.is_wanted(name)

    @property
    def waiters(self) -> Waiters:
        """Who waits, as far as the log was read."""
        return self.queue.waiters

    # ---- asking --------------------------------------------------------------------------

    def ask(
        self, holder: Holder, topic_epoch: int | None, seen: tuple[int, bool, int],
        timeout: float = ANSWER_SECONDS,
    ) -> Owning | None:  # fmt: skip
        """Ask for the topic as it is known now; None if another record came first, or `tenure` is
        not what was seen any more.

        Raises what `Writer.ask` does, and `WaitTimeoutError`, which leaves no owner behind."""
        with self.changed:
            self.check()
            if self.state.tenure != seen:
                return None
            writer = Writer(
                self.state, self._appending.append, holder, topic=f"topic {self.name!r}"
            )
            owning = Owning(self, writer)
            writer.ask(topic_epoch)
            self._owning.append(owning)
        try:
            self.await_change(
                lambda: writer.status != "asking", timeout, "the topic was not granted"
            )
        except BaseException:
            with self.changed:
                writer.release()  # also if it was granted just before an interrupt
            raise
        return owning if writer.status in ("owner", "fenced") else None

    def evict(self, session: Grant | Join) -> None:
        """Release a session whose engine is gone."""
        with self.changed:
            self.check()
            self._appending.append(encode(Release(session.epoch, session.session, "evicted")))

        def is_over() -> bool:
            if isinstance(session, Join):
                return session.session not in self.state.shared
            return not self.state.owned or self.state.session != session.session

        self.await_change(is_over, ANSWER_SECONDS, "the release of a dead engine was not read back")

    def tell(self, record: Told) -> None:
        """Let a producer wait, or (un)assign the topic; returns once the log shows it."""
        with self.changed:
            self.check()
            self.queue.tell(record)
        self.await_change(
            lambda: self.queue.is_told(record), ANSWER_SECONDS,
            "the record of a waiting producer or of a move was not read back",
        )  # fmt: skip

    def terminate(self) -> int:
        """End all writing for good; the next offset, which no message will have (rule G8)."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._try_to_terminate():
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"topic {self.name!r}: its termination was not read back within "
                    f"{ANSWER_SECONDS} s"
                )
        return self.state.next

    def _try_to_terminate(self) -> bool:
        """Append a termination, and wait until it counts, cannot count any more, or may be lost."""
        state = self.state
        with self.changed:
            self.check()
            seen = state.epoch, state.session
            if not state.terminated:
                self._appending.append(encode(Terminate(*seen)))

        def is_settled() -> bool:
            return state.terminated or (state.epoch, state.session) != seen

        with contextlib.suppress(WaitTimeoutError):
            self.await_change(is_settled, RESEND_SECONDS, "")
        return state.terminated

    def leave_queue(self, number: int) -> None:
        """This producer waits no more."""
        with self.changed:
            if not self._ended:
                self.queue.leave(number)

    # ---- appending again -----------------------------------------------------------------

    def _try_again(self) -> None:
        for owning in self._owning:
            if owning.writer.unsettled:
                owning.writer.resend()
        self.queue.append_again()

    @property
    def _unsettled(self) -> bool:
        return self.queue.unsettled or any(each.writer.unsettled for each in self._owning)

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._guard(self._step)
        if self._error is None:
            self._end(None)

    def _guard(self, step: Callable[[], None]) -> None:
        """Take a step, unless this has ended; what it raises ends it."""
        try:
            if not self._closed:
                step()
        except ExclusiveLogError as error:
            self._end(None if self._closed else error)
        except BaseException as error:
            self._end(LedgerIOError(f"topic {self.name!r} cannot be followed any more: {error!r}"))
            raise

    def _step(self) -> None:
        self._advance(self._reader.receive(self._appending.seconds))

    def _stored(self, position: Position, data: bytes) -> None:
        """The log has stored a record of this process there. In a thread of the log."""
        with self.changed:
            self._appending.answers.add(position, data)
        with contextlib.suppress(Exception):  # the thread is not ours, and this has ended
            self._guard(lambda: self._advance(None))

    def _advance(self, record: Record | None) -> None:
        """Take the next record, and those of this process that were answered behind it."""
        look = False
        with self.changed:
            answers, state = self._appending.answers, self.state
            while record is not None or (record := answers.next(state.position)) is not None:
                look = self._take(self._reader.fold(record), record) or look
                record = None
            if self.saving.is_due() and self._may_save:
                self.saving.save(self._checkpoint())
            if self._appending.is_due():
                self._try_again()
            news = [owning for owning in self._owning if owning.has_news]
        for owning in news:
            owning.tell()
        if look:
            self._forget_ended()
            self.host.look_at_waiters()

    @property
    def _may_save(self) -> bool:
        """Does this engine write to the topic, or nobody?"""
        mine = any(each.writer.status == "owner" for each in self._owning)
        return mine or not (self.state.owned or self.state.shared)

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            self.saving.anchor, self.state, self.recent.first, self.recent.marks,
            self.waiters.records(),
        )  # fmt: skip

    def _take(self, judged: Judged, record: Record) -> bool:
        """The next record; may somebody who waits have his turn now?"""
        data = record.data
        if judged.verdict is not Verdict.REPEATED:
            self.saving.saw(record)
        for owning in self._owning:
            owning.writer.saw(judged)
        self.recent.take(judged, self.state, len(data))
        look = False
        if judged.verdict is Verdict.FOREIGN:
            look = self._take_wait(decode(data))
        elif judged.counts:
            look = self._take_counting(judged)
        elif judged.verdict is Verdict.AHEAD and self._unsettled:  # the frame before it was lost
            self._appending.hurry()
        self.changed.notify_all()
        return look

    def _take_counting(self, judged: Judged) -> bool:
        self._appending.progress(self._unsettled)
        parsed = judged.parsed
        if isinstance(parsed, Frame):
            self.frames.wake()
            return False
        if isinstance(parsed, Grant):
            self.waiters.granted(parsed)
        elif isinstance(parsed, Join):
            for owning in self._owning:
                if owning.writer.session == parsed.session:
                    owning.behind = tuple(self.waiters)
        elif isinstance(parsed, Terminate):
            self.frames.wake()  # readers at the end
        self.host.ownership_changed()
        return True

    def _take_wait(self, record: Noted | None) -> bool:
        if record is None:
            return False
        self.queue.take(record)
        if isinstance(record, Wait):
            for owning in self._owning:
                owning.notify_wanted()
        return True

    def _forget_ended(self) -> None:
        with self.changed:
            self._owning = [
                each for each in self._owning
                if each.has_news or each.writer.status in LIVING
            ]  # fmt: skip

    def _end(self, error: ExclusiveLogError | None) -> None:
        why = f": {error}" if error is not None else ""
        in_doubt = LedgerIOError(
            f"topic {self.name!r} is not followed any more, the send is in doubt{why}"
        )
        unsent = EngineClosedError(
            f"topic {self.name!r} is not followed any more; nothing was sent{why}"
        )
        with self.changed:
            self._error, self._closed = error, True
            owning, self._owning = self._owning, []
            for each in owning:
                each.writer.give_up(in_doubt, unsent)
            self.changed.notify_all()
        for each in owning:
            each.tell()
        self.frames.wake()

    # ---- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, and close the log. Sends that were not read back are in doubt."""
        with self.changed:
            if not self._ended and self.saving.is_due(AT_CLOSING) and self._may_save:
                self.saving.save(self._checkpoint())
            self._closed = True
            self.changed.notify_all()
        self._reader.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        self.saving.close()
        self.log.close()
        self.frames.wake()

    def forget(self) -> None:
        """In a forked child: log, sends and thread are the parent's (rule C5)."""
        self._closed = True
        self._error = EngineClosedError(
            f"topic {self.name!r} was inherited through fork(); open an engine of your own"
        )
        self.changed = threading.Condition()  # a thread of the parent may have held the lock
