"""Leading in a loop: one turn for each time that this process owns a topic."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from exclusivelog import _core
from exclusivelog.closing import OfThisProcess
from exclusivelog.errors import (
    LedgerError,
    OwnershipLostError,
    ProducerFencedError,
    ReaderFencedError,
    TransactionAbortedError,
)
from exclusivelog.losses import Loss
from exclusivelog.producer import Producer, ProducerFuture
from exclusivelog.waits import in_slices

__all__ = ["Term", "Terms"]

# What a successor does to the readers, claims and transactions of the owner before it.
CONSEQUENCES = (
    ProducerFencedError,
    ReaderFencedError,
    OwnershipLostError,
    TransactionAbortedError,
)
OnFenced = Callable[[Producer, ProducerFencedError], object]
# Requests the topic: the seconds that it waits at most, and what is called when it is lost.
Request = Callable[[float | None, OnFenced], ProducerFuture]


class Term(OfThisProcess):
    """One turn as the topic's owner. Iterating over `topic.terms()` returns it.

    `with term as producer` gives the producer, and ends the term:

    - The block ends: pending sends are committed, and the topic is given up.
    - The topic is lost, and the block raises the producer's ProducerFencedError (or
      ProducerMovedError), or fails because the successor has taken what else it uses, such as the
      reader of a group (ReaderFencedError, OwnershipLostError, TransactionAbortedError): the error
      ends here. An error that was raised from one of these does not.
    - Any other exception gives the topic up, and leaves the block.

    A term has one epoch: after a hand-over, also to another engine of this process, it is over.

    >>> for term in topic.terms(name="worker-1"):
    ...     with term as producer:
    ...         print(term.epoch, producer.send(b"hello"))
    ...     break
    1 0
    """

    def __init__(self, producer: Producer, lost: Loss) -> None:
        self._producer, self._lost = producer, lost
        self._is_entered = False

    @property
    def epoch(self) -> int:
        """The epoch of the topic in this term. It grows with every owner, so it serves other
        systems as a fencing token."""
        return self._producer.topic_epoch

    @property
    def lost(self) -> Loss:
        """Whether the topic is lost: `if term.lost`, or `term.lost.wait(timeout)`. See `Loss`."""
        return self._lost

    def _end(self) -> None:
        """Give the topic up."""
        try:
            self._producer.close()
        finally:
            self._lost._tell()

    def __enter__(self) -> Producer:
        check_entered_once(self._is_entered, self._producer.state == "closed")
        self._is_entered = True
        return self._producer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        is_over = is_loss(self._producer, error)  # once it is closed, nothing tells any more
        self._end()
        return is_over

    def __repr__(self) -> str:
        return f"<Term of topic {self._producer.topic!r}, epoch {self.epoch}>"


class Terms(OfThisProcess):
    """The turns of this process as the topic's owner, one after the other. `topic.terms` returns
    it. For one thread at a time, except `stop`.

    >>> terms = topic.terms()
    >>> for term in terms:
    ...     with term as producer:
    ...         _ = producer.send(b"one turn is enough")
    ...         terms.stop()
    >>> topic.owner is None
    True
    """

    def __init__(self, request: Request, timeout: float | None) -> None:
        self._request, self._timeout = request, timeout
        self._term: Term | None = None
        self._changed = _core.Signal()
        self._is_stopped = False

    def stop(self) -> None:
        """Let the loop end: a wait in the queue ends at once, a present term with its block. Any
        thread and a signal handler may call it."""
        self._is_stopped = True
        self._changed.set()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Term:
        """Wait until this process owns the topic; return the term. It first gives up the former
        term, if that is still held."""
        former, self._term = self._term, None
        if former is not None:
            former._end()
        end = None if self._timeout is None else _core.monotonic() + self._timeout
        while not self._is_stopped:
            left = None if end is None else max(0.0, end - _core.monotonic())
            try:
                term = self._turn(left)
            except ProducerFencedError:
                continue  # a rival has taken the topic, and fenced all that waited for it
            if term is not None:
                self._term = term
                return term
        raise StopIteration

    def _turn(self, timeout: float | None) -> Term | None:
        """Wait in the queue; None if that was stopped."""
        turn = Turn()
        self._changed = turn.changed
        future = self._request(timeout, turn.lose)
        try:
            Future.add_done_callback(future, lambda _: turn.changed.set())
            if not self._is_stopped:
                in_slices(turn.changed.wait, None, future._engine.check_not_forked)
            if self._is_stopped:
                future.give_up()
                return None
            return turn.begin(future.result())
        except BaseException:
            future.give_up()  # interrupted, perhaps
            raise

    def __del__(self) -> None:
        term = getattr(self, "_term", None)  # `__init__` may have failed
        if term is not None and not term._is_entered:
            term._end()

    def __repr__(self) -> str:
        return f"<Terms, {'none yet' if self._term is None else f'at {self._term!r}'}>"


class Turn:
    """A term that is not granted yet. The producer keeps it, and must not be kept by it."""

    def __init__(self) -> None:
        self.changed = _core.Signal()  # the request is settled, or the loop was stopped
        self._lost: Loss | None = None
        self._is_lost = False

    def lose(self, *_: object) -> None:
        """The topic was lost."""
        self._is_lost = True
        if self._lost is not None:
            self._lost._tell()

    def begin(self, producer: Producer) -> Term:
        """The topic was granted."""
        self._lost = lost = loss_of(producer)
        if self._is_lost:
            lost._tell()
        return Term(producer, lost)


def loss_of(producer: Producer) -> Loss:
    """Whether this producer has lost its topic. It does not keep the producer, because a dropped
    one releases its topic."""
    found = weakref.ref(producer)

    def is_held() -> bool:
        producer = found()
        return producer is not None and producer.state == "open"

    return Loss(is_held)


def check_entered_once(entered: bool, closed: bool) -> None:
    """Raise RuntimeError if a term cannot be entered (again)."""
    if entered:
        raise RuntimeError("this term was entered already; the loop returns the next one")
    if closed:
        raise RuntimeError(
            "this term is over: its loop was left, or the engine was closed. Keep the iterator "
            "that topic.terms() returns as long as its term is used"
        )


def is_loss(producer: Producer, error: BaseException | None) -> bool:
    """Whether a block has ended because this producer, which is not closed yet, has lost its topic.
    In a group of exceptions, each of them has to say so."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_loss(producer, each) for each in error.exceptions)
    if error is None or producer._sender.was_lost_by(error):
        return error is not None
    if not isinstance(error, CONSEQUENCES):
        return False
    with contextlib.suppress(LedgerError):
        return producer.state in ("fenced", "moved")
    return False
