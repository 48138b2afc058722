"""Awaitable producers. A send is queued in the loop's own thread, and the engine's commit thread
wakes its task. So a send needs no further thread, and all tasks share commits."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
)
from typing import Any

from exclusivelog import _core
from exclusivelog._core import Message
from exclusivelog.aio.calls import (
    drop_outcome,
    in_steps,
    in_thread,
    like,
    opened,
    outcome_of,
    shielded,
)
from exclusivelog.aio.readers import Reader
from exclusivelog.aio.transactions import Sender, Transaction, joined, unwrapped
from exclusivelog.arguments import check_timeout
from exclusivelog.backend import State
from exclusivelog.messages import Encoded
from exclusivelog.producer import NO_MESSAGE
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.refusals import without_outcome
from exclusivelog.types import AccessMode, Move, ProducerStats
from exclusivelog.unload import UnloadFuture as SyncUnloadFuture

__all__ = ["Producer", "Receipt", "UnloadFuture"]

MOST_DELAY = 0.01  # seconds between two attempts, while threads append by the same producer

# ---- the outcome of send_async -------------------------------------------------------------


class Receipt:
    """The outcome of one `Producer.send_async`: `await` it for the message's offset. It never
    blocks the loop: like those of an asyncio future, `result()` and `exception()` raise
    asyncio.InvalidStateError before it is done."""

    __slots__ = ("_of",)

    def __init__(self, of: _core.Receipt | asyncio.Task[_core.Receipt]) -> None:
        self._of = of  # a receipt, or a task if the message could not be queued at once

    def done(self) -> bool:
        """True when the outcome is known."""
        return self._of.done()

    def result(self) -> int:
        """Return the message's offset; raise the error it failed with."""
        of = self._known()
        return (of if isinstance(of, _core.Receipt) else of.result()).result()

    def exception(self) -> BaseException | None:
        """Return the error, or None when the message is in the log."""
        of = self._known()
        if isinstance(of, _core.Receipt):
            return of.exception()
        return of.exception() or of.result().exception()

    def _known(self) -> _core.Receipt | asyncio.Task[_core.Receipt]:
        if not self._of.done():
            raise asyncio.InvalidStateError("the outcome of this send is not known yet: await it")
        return self._of

    def add_done_callback(self, callback: Callable[[Receipt], object]) -> None:
        """Call `callback(receipt)` in the loop when the outcome is known."""
        loop = asyncio.get_running_loop()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(callback, self)

        self._of.add_done_callback(tell)

    def __await__(self) -> Generator[Any, None, int]:
        of = self._of
        return (of if isinstance(of, _core.Receipt) else _outcome_of(of)).__await__()

    def __repr__(self) -> str:
        return repr(self._of) if isinstance(self._of, _core.Receipt) else "<Receipt pending>"


async def _settled(receipt: _core.Receipt) -> _core.Receipt:
    """The receipt, once its outcome is known. It has told nobody of an error: if nobody asks it,
    `flush` raises that."""
    await receipt._future(False)
    return receipt


async def _outcome_of(queued: Awaitable[_core.Receipt]) -> int:
    """The offset of a message that is queued first; its error."""
    return (await queued).result()


# ---- the producer ------------------------------------------------------------------------


class Ticket:
    """A place in a line: `await ticket.turn` returns when its task may proceed.

    It leaves the line at the latest when it is dropped: a task that is cancelled before its first
    step runs no `finally`, but drops the arguments of its coroutine.
    """

    __slots__ = ("_line", "turn")

    def __init__(self, line: deque[asyncio.Future[None]]) -> None:
        self._line, self.turn = line, asyncio.get_running_loop().create_future()
        line.append(self.turn)
        _call_next(line)

    def leave(self) -> None:
        """Leave the line; a second call has no effect."""
        with contextlib.suppress(ValueError):
            self._line.remove(self.turn)
            _call_next(self._line)

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.leave()


def _call_next(line: deque[asyncio.Future[None]]) -> None:
    if line and not line[0].done():
        line[0].set_result(None)


class Producer(Sender):
    """An awaitable wrapper of an `exclusivelog.Producer`, which is `sync`. `Topic.producer` returns
    it; tasks may share it.

    >>> async def example():
    ...     async with aio.open(path) as engine:
    ...         async with engine.topic("orders").producer("exclusive") as producer:
    ...             first = await producer.send(b"first", key="a")
    ...             rest = [producer.send_async(b"%d" % number) for number in range(3)]
    ...             return first, [await receipt for receipt in rest]
    >>> asyncio.run(example())
    (0, [1, 2, 3])
    """

    def __init__(self, sync: SyncProducer) -> None:
        super().__init__(sync)
        # Of messages that cannot be queued at once: their tasks send one by one, in this order.
        self._line: deque[asyncio.Future[None]] = deque()
        # The tasks of send_async for such messages.
        self._late: set[asyncio.Task[_core.Receipt]] = set()
        self._passing: asyncio.Future[Any] | None = None  # done at the end of a hand-over

    # ---- facts ---------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self.sync.topic

    @property
    def name(self) -> str:
        """The name for which sequence ids are counted (rule G2)."""
        return self.sync.name

    @property
    def access_mode(self) -> AccessMode:
        """The requested mode."""
        return self.sync.access_mode

    @property
    def priority(self) -> int:
        """The priority of its request in the queue; cannot be changed (rule D2)."""
        return self.sync.priority

    @property
    def topic_epoch(self) -> int:
        """The epoch that its messages get. Keep it to reconnect with `topic_epoch=` (rule B5)."""
        return self.sync.topic_epoch

    @property
    def last_sequence_id(self) -> int:
        """The last sequence id sent under this name; -1 if there is none (rule G2)."""
        return self.sync.last_sequence_id

    def stats(self) -> ProducerStats:
        """How much this producer has sent, and how much waits for a commit; as
        `exclusivelog.Producer.stats`."""
        return self.sync.stats()

    @property
    def state(self) -> State:
        """Its state, read from the ledger: "open", "fenced", "moved" or "closed"."""
        return self.sync.state

    # ---- send ----------------------------------------------------------------------------

    @like(SyncProducer.send)
    async def send(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None,
        sequence_id: int | None = None,
        timeout: float | None = None,
        transaction: Transaction | None = None,
    ) -> int:
        check_timeout(timeout)
        if transaction is not None:  # nothing is appended before the commit, so it does not wait
            return self.sync.send(
                value,
                key=key,
                properties=properties,
                event_time=event_time,
                sequence_id=sequence_id,
                transaction=joined(transaction, self),
            )
        message = self.sync._sender.encode(value, key, properties, event_time, sequence_id)
        # Queue it at once, so that several sends that a task gathers stay in order.
        receipt = None if self._line else self.sync._sender.offer(message)
        if receipt is not None and timeout is None:
            return int(await receipt)
        waits = self._send_late(message) if receipt is None else _settled(receipt)
        try:
            async with asyncio.timeout(timeout) as limit:
                return await _outcome_of(waits)
        except TimeoutError:
            if not limit.expired():  # an error of the send, or of the application
                raise
            raise without_outcome(self.sync.topic, timeout) from None

    def _send_late(self, message: Encoded) -> Coroutine[Any, Any, _core.Receipt]:
        """Send it after the messages in the line, once it can be queued without waiting; its
        receipt, once its outcome is known."""
        return self._send_in_turn(Ticket(self._line), message)

    async def _send_in_turn(self, ticket: Ticket, message: Encoded) -> _core.Receipt:
        try:
            await ticket.turn
            receipt = await self._queued(message)
        finally:
            ticket.leave()
        return await _settled(receipt)

    async def _queued(self, message: Encoded) -> _core.Receipt:
        """Queue a message as soon as that is possible without waiting."""
        offer, delay = self.sync._sender.offer, 0.0
        while (receipt := offer(message)) is None:
            await self._passed()
            if (receipt := offer(message)) is not None:
                break
            await asyncio.sleep(delay)  # a thread is appending by the same producer
            delay = min(delay + 0.001, MOST_DELAY)
        return receipt

    async def _passed(self) -> None:
        """Wait for the end of a hand-over. One thread waits on behalf of all messages, and
        continues if their tasks are cancelled."""
        if self._passing is None or self._passing.done():
            self._passing = asyncio.ensure_future(in_thread(self.sync._sender.here, False))
        await shielded(self._passing)

    @like(SyncProducer.send_async)
    def send_async(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: dt.datetime | int | None = None,
        sequence_id: int | None = None,
    ) -> Receipt:
        message = self.sync._sender.encode(value, key, properties, event_time, sequence_id)
        receipt = None if self._line else self.sync._sender.offer(message)
        if receipt is not None:
            return Receipt(receipt)
        task = asyncio.ensure_future(self._send_late(message))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        task.add_done_callback(drop_outcome)
        return Receipt(task)

    @like(SyncProducer.send_many)
    async def send_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        properties: Iterable[Mapping[str, str] | None] | None = None,
        event_times: Iterable[dt.datetime | int | None] | None = None,
        sequence_id: int | None = None,
        timeout: float | None = None,
        transaction: Transaction | None = None,
    ) -> range:
        check_timeout(timeout)
        await self._turn(timeout)
        return await in_thread(
            self.sync.send_many,
            values,
            keys=keys,
            properties=properties,
            event_times=event_times,
            sequence_id=sequence_id,
            timeout=timeout,
            transaction=joined(transaction, self),
        )

    async def catch_up(self, reader: Reader) -> AsyncIterator[Message]:
        """Iterate over this topic from the reader's position to its end (rule D8), as
        `exclusivelog.Producer.catch_up`.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         topic = engine.topic("orders")
        ...         async with topic.producer("exclusive") as owner, topic.reader() as reader:
        ...             await owner.send(b"old")
        ...             return [message.value async for message in owner.catch_up(reader)]
        >>> asyncio.run(example())
        [b'old']
        """
        unwrapped("reader", reader)
        sync: Any = (await reader._opened()).sync
        self.sync.catch_up(sync)  # checks the reader
        async for message in in_steps(sync.__iter__):
            yield message
        position = sync.position
        rest = functools.partial(_all_of, self.sync.catch_up, sync)
        # The last check may have to wait for a hand-over.
        for message in await opened(rest, lambda _: sync.cursor.move_to(position)):
            yield message

    @like(SyncProducer.announce)
    async def announce(
        self,
        info: Mapping[str, str],
        *,
        message: Any = NO_MESSAGE,
        transaction: Transaction | None = None,
    ) -> None:
        await self._turn()
        await in_thread(
            self.sync.announce, info, message=message, transaction=joined(transaction, self)
        )

    @like(SyncProducer.flush)
    async def flush(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        await self._turn(timeout)
        await in_thread(self.sync.flush, timeout)

    async def _turn(self, timeout: float | None = None) -> None:
        """Wait until all earlier messages are queued."""
        if not self._line:
            return
        ticket = Ticket(self._line)
        try:
            async with asyncio.timeout(timeout) as limit:
                await ticket.turn
        except TimeoutError:
            if not limit.expired():
                raise
            raise without_outcome(self.sync.topic, timeout) from None
        finally:
            ticket.leave()

    # ---- move ----------------------------------------------------------------------------

    async def move(self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()) -> Move:
        """Move only this producer to another engine, as `exclusivelog.Producer.move`. If cancelled,
        it stays where it is, unless it has already been released."""
        return (await (await self.move_async(to, timeout, groups=groups)))[0]

    async def move_async(
        self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()
    ) -> UnloadFuture:
        """Begin what `move` does, and return a task with a list of one `Move`. Cancelling the task
        ends the move, unless the producer has already been released."""
        return await begun(functools.partial(self.sync.move_async, to, timeout, groups=groups))


def _all_of(call: Callable[[Any], Iterable[Message]], reader: Any) -> list[Message]:
    return list(call(reader))


# ---- moves -------------------------------------------------------------------------------

UnloadFuture = asyncio.Task[list[Move]]  # of `Engine.unload_async`; cancelling it ends the moves


async def begun(begin: Callable[[], SyncUnloadFuture]) -> UnloadFuture:
    """Begin moves, and return a task with their outcome."""
    future = await opened(begin, SyncUnloadFuture.cancel)
    task = asyncio.create_task(outcome_of(future, future.cancel))
    try:
        # Start the task now: cancelling it before it runs would have no effect.
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(drop_outcome)
        await asyncio.wait({task})
        raise
    return task
