"""Appending for one session: at once where nothing waits before it, else through the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from exclusivelog import _core
from exclusivelog._core import Outcome
from exclusivelog.backend import SENT_AT_ONCE, SessionOptions, without_outcome
from exclusivelog.errors import DuplicateSequenceError
from exclusivelog.local.log.entries import REPAIRABLE, duplicate, refusal, repair
from exclusivelog.local.log.group_commit import Committer
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.messages.encoding import Columns, Encoded, Raw

Placed = TypeVar("Placed", bound="int | tuple[int, int, int]")


class LocalSending:
    """Appends what one session is given, to the ledger of its engine."""

    __slots__ = ("_committer", "_ledger", "_options", "_topic", "appender")

    def __init__(
        self, ledger: Ledger, committer: Committer, appender: _core.Appender, topic: str,
        options: SessionOptions,
    ) -> None:  # fmt: skip
        self.appender = appender
        self._ledger, self._committer = ledger, committer
        self._topic, self._options = topic, options

    # ---- one message -----------------------------------------------------------------------

    def send(self, message: Encoded, timeout: float | None) -> int:
        """Append one message; its offset, once it is durable."""
        if timeout is None and sum(len(part or b"") for part in message[:3]) < SENT_AT_ONCE:
            sent = self._append_now(lambda: self.appender.send(*message), message[4])
            if sent is not None:
                return sent
        receipt = self.appender.add(*message)
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        return self._outcome(receipt, timeout)

    def send_async(self, message: Encoded) -> _core.Receipt:
        """Queue one message, and commit what waits where that is too much."""
        receipt = self._queue(message)
        self.commit_if_full()
        return receipt

    def commit_if_full(self) -> None:
        """Commit what waits, where `max_pending_bytes` do."""
        if self.appender.holds(self._options.max_pending_bytes):
            self._committer.commit(self.appender)

    def offer(self, message: Encoded) -> _core.Receipt:
        """The same, but leave the commit to the background."""
        receipt = self._queue(message)
        if self.appender.holds(self._options.max_pending_bytes):
            self._committer.commit_queue.put(self.appender, 0.0)
        return receipt

    def _queue(self, message: Encoded) -> _core.Receipt:
        receipt = self.appender.add(*message, True)
        if receipt is None:
            raise self.duplicate(self.appender, message[4])
        return receipt

    def _append_now(self, append: Callable[[], Placed], sequence: int | None) -> Placed | None:
        """Append past the queue; None if there is one, and this must stand behind it."""
        outcome = append()
        while isinstance(outcome, int) and -outcome in REPAIRABLE:
            repair(self._ledger, self.appender, -outcome)
            outcome = append()
        if not isinstance(outcome, int) or outcome >= 0:
            return outcome
        if -outcome == Outcome.QUEUED:
            return None
        raise refusal(self._ledger, self.appender, -outcome, sequence)

    def _outcome(self, receipt: _core.Receipt, timeout: float | None) -> int:
        if timeout is None:
            self._committer.commit(self.appender, receipt)
        else:
            self._committer.commit_within(self.appender, receipt, timeout)
        if not receipt.done():
            raise without_outcome(self._topic, timeout)
        return receipt.result()

    def duplicate(self, appender: _core.Appender, sequence: int | None) -> DuplicateSequenceError:
        """The error for a sequence id that was used before."""
        return duplicate(self._ledger, appender, sequence)

    # ---- several, atomically ---------------------------------------------------------------

    def send_batch(self, columns: Columns, sequence: int | None, timeout: float | None) -> int:
        """Append messages atomically; the first one's offset."""
        return self._send_batch(columns.batch(self.appender), sequence, timeout)

    def _send_batch(self, batch: _core.Batch, sequence: int | None, timeout: float | None) -> int:
        if timeout is None and batch.small:
            sent = self._append_now(lambda: self.appender.send_batch(batch, sequence), sequence)
            if sent is not None:
                return sent
        receipt = self.appender.add_batch(batch, sequence)
        if receipt is None:
            raise self.duplicate(self.appender, sequence)
        return self._outcome(receipt, timeout)

    # ---- append now, flush later -----------------------------------------------------------

    def append(self, messages: Sequence[Raw]) -> tuple[int, int, int] | int:
        """Append messages atomically: (offset, position, generation), the last two for
        `await_flush`; or the offset of what is flushed already."""
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
        return self._send_batch(batch, None, None)  # it is large, or others wait before it

    def _batch_of(self, messages: Sequence[Raw]) -> _core.Batch:
        keys, values, properties = ([m[column] for m in messages] for column in range(3))
        return self.appender.make_batch(
            _core.strings(values), _core.strings(keys) if _any_given(keys) else None,
            _core.strings(properties) if _any_given(properties) else None, None,
        )  # fmt: skip

    def await_flush(self, position: int, generation: int) -> None:
        """Return once what `append` has appended is durable."""
        assert self._ledger.journal is not None
        outcome = self._ledger.journal.flush_to(position, generation)
        if outcome != Outcome.PLACED:
            error = refusal(self._ledger, self.appender, outcome)
            error.maybe_written = True
            raise error

    # ---- what was accepted -----------------------------------------------------------------

    def flush(self, timeout: float | None) -> bool:
        """Wait for the outcome of what was accepted; False if nothing waits."""
        waiting = self.appender.newest()
        if waiting is not None:
            self._outcome(waiting, timeout)
        return waiting is not None

    def drain(self) -> None:
        """Commit what was accepted so far."""
        self.appender.await_sends()
        self._committer.commit(self.appender)

    def private_appender(self) -> _core.Appender:
        """One for a transaction, which goes on where `appender` is."""
        return _core.Appender(
            self.appender.name, self.appender.last_sequence, self._options.max_batch_messages,
            self._options.max_batch_bytes, self.appender.session,
        )  # fmt: skip


def _any_given(column: Iterable[object]) -> bool:
    """Has any message one?"""
    return any(item is not None for item in column)
