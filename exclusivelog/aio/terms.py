"""Leading in a loop, awaitable: the loss of the topic cancels the body of `async with term`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from exclusivelog import _core
from exclusivelog.aio.calls import drop_outcome, in_executor, opened, outcome_of
from exclusivelog.aio.handles import _NoWith, check_loop, finished
from exclusivelog.aio.losses import Loss
from exclusivelog.aio.producers import Producer
from exclusivelog.closing import OfThisProcess
from exclusivelog.errors import LedgerError, ProducerFencedError
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.producer import ProducerFuture
from exclusivelog.terms import OnFenced, check_entered_once, is_loss, loss_of
from exclusivelog.waits import SLICE_SECONDS

__all__ = ["Term", "Terms"]

# Requests the topic, in a thread; see `exclusivelog.terms.Request`.
Request = Callable[[float | None, OnFenced], ProducerFuture]


class Body:
    """The task that runs the body of `async with term`, and cancels it once the topic is lost.

    As `asyncio.timeout` does, it counts the cancellations of the task: only its own one ends here.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None  # while it runs the body
        self._before = 0  # cancellations of the task that came before
        self._is_cancelled = False

    def enter(self, lost: Loss) -> None:
        """The body begins, in this task."""
        self._task = asyncio.current_task()
        assert self._task is not None  # `check_loop` was called
        self._before = self._task.cancelling()
        self._look_later(lost)

    def _look_later(self, lost: Loss) -> None:
        self._loop.call_later(SLICE_SECONDS, self._look, lost)

    def _look(self, lost: Loss) -> None:
        """Cancel the body after a loss that no callback tells of: the topic was terminated, the
        engine closed, or its directory is gone."""
        if self._task is None or self._is_cancelled:
            return
        with contextlib.suppress(LedgerError):
            if not lost.is_set():
                self._look_later(lost)
                return
        self.cancel()

    def cancel(self) -> None:
        """Cancel the body, unless it has ended. Called by the loop, so the task is not running: its
        present await raises the CancelledError."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def leave(self) -> tuple[bool, bool]:
        """The body has ended. Returns whether this object has cancelled it, and whether others
        have."""
        task, self._task = self._task, None
        assert task is not None
        count = task.uncancel() if self._is_cancelled else task.cancelling()
        return self._is_cancelled, count > self._before


class Term(OfThisProcess, _NoWith):
    """One turn as the topic's owner; as `exclusivelog.Term`, with `async with term as producer`.

    If the topic is lost, the body is cancelled: its present await raises CancelledError, which ends
    at the end of the block. That is at once if a rival takes the topic, or it is handed over, and
    within a second if it is terminated, or the engine closed. So does the producer's
    ProducerFencedError, if that comes first. A cancellation from outside leaves the block as
    always.

    >>> async def example():
    ...     async with aio.open(path) as engine:
    ...         topic = await engine.topic("orders")
    ...         async for term in topic.terms():
    ...             async with term:
    ...                 rival = topic.producer_async("exclusive_with_fencing")    # a task
    ...                 await asyncio.sleep(3600)
    ...             return bool(term.lost), (await rival).topic_epoch
    >>> asyncio.run(example())
    (True, 2)
    """

    def __init__(self, producer: SyncProducer, lost: Loss, body: Body) -> None:
        self._sync, self._producer = producer, Producer(producer)
        self._lost, self._body = lost, body
        self._is_entered = False

    @property
    def epoch(self) -> int:
        """The epoch of the topic in this term. It grows with every owner, so it serves other
        systems as a fencing token."""
        return self._sync.topic_epoch

    @property
    def lost(self) -> Loss:
        """Whether the topic is lost: `if term.lost`, or `await term.lost.wait(timeout)`."""
        return self._lost

    async def _end(self) -> None:
        """Give the topic up."""
        try:
            await self._producer.close()
        finally:
            self._lost._tell()

    async def __aenter__(self) -> Producer:
        check_entered_once(self._is_entered, self._sync.state == "closed")
        self._is_entered = True
        self._body.enter(self._lost)
        if self._lost._is_told:
            self._body._loop.call_soon(self._body.cancel)
        return self._producer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        ours, others = self._body.leave()
        is_lost = is_loss(self._sync, error)  # once it is closed, nothing tells any more
        await finished(self._end())
        is_over = is_lost or (ours and isinstance(error, asyncio.CancelledError))
        if is_over and others and not isinstance(error, BaseExceptionGroup):
            # The body was cancelled from outside as well, and the task has to learn that. Before
            # Python 3.13, a task group that fails leaves a cancellation of its own counted.
            raise asyncio.CancelledError from error
        return is_over

    def __repr__(self) -> str:
        return f"<aio.Term of topic {self._sync.topic!r}, epoch {self.epoch}>"


class Terms(OfThisProcess):
    """The turns of this task as the topic's owner, one after the other; as `exclusivelog.Terms`.

    If it is cancelled while it waits, the request leaves the queue.

    >>> async def example():
    ...     async with aio.open(path) as engine:
    ...         async for term in engine.topic("orders").terms(name="worker-1"):
    ...             async with term as producer:
    ...                 return term.epoch, await producer.send(b"hello")
    >>> asyncio.run(example())
    (1, 0)
    """

    def __init__(self, request: Request, timeout: float | None) -> None:
        self._request, self._timeout = request, timeout
        self._term: Term | None = None
        self._waiting: ProducerFuture | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Let the loop end: a wait in the queue ends at once, a present term with its block. It is
        called in the loop's thread, as by a signal handler of the loop."""
        self._is_stopped = True
        if self._waiting is not None:
            ending = in_executor(asyncio.get_running_loop(), self._waiting.cancel)
            ending.add_done_callback(drop_outcome)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Term:
        """Wait until this process owns the topic; return the term. It first gives up the former
        term, if that is still held."""
        check_loop()
        former, self._term = self._term, None
        if former is not None:
            await finished(former._end())
        end = None if self._timeout is None else _core.monotonic() + self._timeout
        while not self._is_stopped:
            left = None if end is None else max(0.0, end - _core.monotonic())
            try:
                self._term = await self._turn(left)
            except ProducerFencedError:
                continue  # a rival has taken the topic, and fenced all that waited for it
            if self._term is not None:
                return self._term
        raise StopAsyncIteration

    async def _turn(self, timeout: float | None) -> Term | None:
        """Wait in the queue; None if that was stopped."""
        turn = Turn()
        future = await opened(lambda: self._request(timeout, turn.lose), ProducerFuture.give_up)
        producer = None
        if not self._is_stopped:
            producer = await self._outcome(future)
        if self._is_stopped:
            await finished(_released(future))
            return None
        assert producer is not None
        return turn.begin(producer)

    async def _outcome(self, future: ProducerFuture) -> SyncProducer | None:
        """The producer; None if the wait was stopped."""
        task = asyncio.current_task()
        assert task is not None
        before, self._waiting = task.cancelling(), future
        try:
            return await outcome_of(future, future.give_up)
        except asyncio.CancelledError:
            if not self._is_stopped or task.cancelling() > before:
                raise
            return None
        finally:
            self._waiting = None

    def __del__(self) -> None:
        term = getattr(self, "_term", None)  # `__init__` may have failed
        if term is not None and not term._is_entered:
            # Not here, in the loop's thread: releasing the topic may wait.
            term._sync._sender.engine.call_soon(term._sync.close)

    def __repr__(self) -> str:
        return f"<aio.Terms, {'none yet' if self._term is None else f'at {self._term!r}'}>"


async def _released(future: ProducerFuture) -> None:
    """Leave the queue; release the topic if it was granted."""
    await in_executor(asyncio.get_running_loop(), future.give_up)


class Turn:
    """A term that is not granted yet. The producer keeps it, and must not be kept by it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._body = Body()
        self._lost: Loss | None = None
        self._is_lost = False

    def lose(self, *_: object) -> None:
        """The topic was lost; called by a thread of the engine."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._lose)

    def _lose(self) -> None:
        self._is_lost = True
        if self._lost is not None:
            self._lost._tell()
        self._body.cancel()

    def begin(self, producer: SyncProducer) -> Term:
        """The topic was granted."""
        self._lost = lost = Loss(loss_of(producer))
        if self._is_lost:
            lost._tell()
        return Term(producer, lost, self._body)
