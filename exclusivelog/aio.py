"""The same names, awaitable: for programs built on asyncio.

```python
import exclusivelog.aio as xl

async with xl.open("data/log") as engine:
    topic = engine.topic("orders")
    async with await topic.producer("wait_for_exclusive") as producer:
        await producer.send(b"hello")
    async for message in topic.reader():
        ...
```

What may have to wait is awaited; what does not, is called. Cancellation at any await leaves
nothing behind: no waiter, no owner, no thread that waits on, no message that was taken and
lost. Only what was already on its way when it struck takes its course: a message that is being
sent may be in the log.

>>> async def example():
...     async with open(path) as engine:
...         async with await engine.topic("orders").producer("exclusive") as producer:
...             offset = await producer.send(b"hello")
...         return offset, [message.value async for message in engine.topic("orders").reader()]
>>> asyncio.run(example())
(0, [b'hello'])
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime as dt
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, Unpack, overload

from exclusivelog import engine as _engine
from exclusivelog import state as _state
from exclusivelog import threads
from exclusivelog import upgrading as _upgrading
from exclusivelog._core import Message, Receipt
from exclusivelog.engine import Engine as SyncEngine
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.group_reader import Found
from exclusivelog.group_reader import GroupReader as SyncGroupReader
from exclusivelog.lockfile import READER_LOOK_UP_SECONDS
from exclusivelog.ownership import Claim, OnLost
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.producer import ProducerFuture, without_outcome
from exclusivelog.reader import Reader as SyncReader
from exclusivelog.replica import Replica
from exclusivelog.roles import Role as SyncRole
from exclusivelog.roles import RoleFuture, RoleOptions, SendingOptions
from exclusivelog.state import Change
from exclusivelog.topic import ProducerOptions
from exclusivelog.topic import Topic as SyncTopic
from exclusivelog.transaction import Transaction as SyncTransaction
from exclusivelog.types import AccessMode, Move, Report
from exclusivelog.unload import UnloadFuture
from exclusivelog.upgrading import Upgrade
from exclusivelog.waits import check_timeout

__all__ = [
    "Engine",
    "GroupReader",
    "MapWatch",
    "Producer",
    "Reader",
    "Role",
    "SharedMap",
    "SharedState",
    "Topic",
    "Transaction",
    "open",
    "upgrade",
]

GIVEN_BACK_SECONDS = 1.0  # that a cancelled call waits until it has left nothing behind
OWN_SECONDS = 0.25  # that a claim waits in a thread, which cannot be interrupted

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")
Op = TypeVar("Op")
R = TypeVar("R")

# The thread that sleeps at the end of a topic looks up so often whether anybody still waits.
SLICE_SECONDS = 0.25


async def _in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    loop = asyncio.get_running_loop()
    return await threads.in_executor(loop, functools.partial(call, *args, **kwargs))


async def _opened(call: Callable[[], R], close: Callable[[R], object]) -> R:
    """What `call()` opens, in a thread. Cancelled meanwhile, `close` gets it as soon as it is
    there, also where the loop has come to its end by then; that is waited for, but not for long:
    the ledger may be held up."""
    made: list[R] = []
    abandoned = threading.Event()

    def run() -> None:
        made.append(call())
        if abandoned.is_set():
            give_back()

    def give_back() -> None:
        with contextlib.suppress(IndexError):  # it is not there yet, or somebody else does it
            close(made.pop())

    loop = asyncio.get_running_loop()
    running = threads.in_executor(loop, run)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        abandoned.set()
        running.add_done_callback(_drop_outcome)
        giving_back = threads.in_executor(loop, give_back)
        await asyncio.wait({running, giving_back}, timeout=GIVEN_BACK_SECONDS)
        raise
    return made.pop()


def _drop_outcome(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # nobody else asks for it


class _Call:
    """A call of a state, and the task that waits for it."""

    __slots__ = ("call", "future", "outcome", "state", "traffic", "waiter")

    def __init__(
        self, state: Replica, call: Callable[[], Any], waiter: asyncio.Future[Any],
        traffic: _Traffic,
    ) -> None:  # fmt: skip
        self.state, self.call, self.waiter, self.traffic = state, call, waiter, traffic
        self.future: concurrent.futures.Future[Any] | None = None
        self.outcome: tuple[Any, BaseException | None] = None, None  # where there is no future

    def settled(self, _: object) -> None:
        """Its future has its outcome. From any thread."""
        self.traffic.arrive(self)

    def set_result(self, result: Any) -> None:
        """It was made, and is durable. From any thread."""
        self.outcome = result, None
        self.traffic.arrive(self)

    def set_exception(self, error: BaseException) -> None:
        """It was made, and may not be durable. From any thread."""
        self.outcome = None, error
        self.traffic.arrive(self)


class _Traffic:
    """Calls of states between a loop and their threads: all of one turn of the loop go together,
    and one wake-up tells all outcomes that are there. Else two threads would contend for the
    interpreter at every call."""

    _of: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Traffic]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self.leaving: list[_Call] = []
        self._arrived: deque[_Call] = deque()
        self._told = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Traffic:
        """The loop's."""
        found = cls._of.get(loop)
        if found is None:
            found = cls._of[loop] = cls()
        return found

    def send(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the call at the end of this turn of the loop."""
        self.leaving.append(call)
        if len(self.leaving) == 1:
            loop.call_soon(self._submit)

    def _submit(self) -> None:
        calls, self.leaving = self.leaving, []
        for call in calls:
            if call.waiter.done():
                continue  # cancelled before it began
            try:
                call.future = call.state.submit(call.call)
            except Exception as error:
                call.waiter.set_exception(error)
            else:
                call.future.add_done_callback(call.settled)

    def arrive(self, call: _Call) -> None:
        """The call has its outcome. From any thread."""
        self._arrived.append(call)
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # its loop has ended
                call.waiter.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False  # before: what comes later wakes the loop again
        while self._arrived:
            call = self._arrived.popleft()
            future, waiter = call.future, call.waiter
            if waiter.done() or (future is not None and future.cancelled()):
                continue
            result, error = call.outcome
            if future is not None:
                error = future.exception()
                result = future.result() if error is None else None
            if error is None:
                waiter.set_result(result)
            else:
                waiter.set_exception(error)


async def _called(state: Replica, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """The outcome of a state's own method, made in the background; cancelled, it waits for the
    topic no longer."""
    loop = asyncio.get_running_loop()
    traffic = _Traffic.of(loop)
    mine = _Call(state, functools.partial(call, *args, **kwargs), loop.create_future(), traffic)
    traffic.send(mine, loop)
    try:
        result: R = await mine.waiter
        return result
    except asyncio.CancelledError:
        if mine.future is not None:
            mine.future.cancel()
            await asyncio.shield(_in_thread(state.give_up, mine.future))
        raise


async def _put(shared: _state.SharedMap[K, V], key: K, value: V | None) -> V | None:
    """`put`: in the loop's own thread where it has nothing to wait for but its flush. That costs
    a fraction of what it costs to have another thread make it."""
    loop = asyncio.get_running_loop()
    traffic = _Traffic.of(loop)
    found = None if traffic.leaving else shared._put_now(key, value)  # in order, never before
    if found is None:
        return await _called(shared, shared.put, key, value)
    result, appended = found
    if appended is None or appended.flushed:
        await asyncio.sleep(0)  # a task that only puts must not keep the loop from the others
        return result
    mine = _Call(shared, int, loop.create_future(), traffic)
    shared._acknowledge(mine, result, appended)
    told: V | None = await mine.waiter
    return told


class _Closing:
    """`async with`: closes what it has at the end."""

    async def close(self) -> None:
        """Close it, draining what it has accepted."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shielded: what was opened is closed, whoever cancels whom.
        await asyncio.shield(asyncio.ensure_future(self.close()))


class Producer(_Closing):
    """An `exclusivelog.Producer`, awaitable; `sync` is that one."""

    def __init__(self, sync: SyncProducer) -> None:
        self.sync = sync
        self._order = asyncio.Lock()  # of those who wait for a hand-over, in a thread each
        self._ahead = 0

    async def send(self, value: Any, **options: Any) -> int:
        """Append one message; its offset, once it is durable. Options as in `Producer.send`.

        While the topic is being handed over, only the task that sends waits."""
        timeout = options.pop("timeout", None)
        check_timeout(timeout)
        transaction: Transaction | None = options.pop("transaction", None)
        if transaction is not None:
            options["transaction"] = transaction.of(self)
            if self.sync.is_moving:
                return await _in_thread(self.sync.send, value, **options)
            return self.sync.send(value, **options)
        # At once: a task that gathers several sends has them in this order.
        receipt = None if self._ahead else self.sync.offer(value, **options)
        self._ahead += receipt is None
        try:
            return await asyncio.wait_for(self._sent(receipt, value, options), timeout)
        except WaitTimeoutError:
            raise
        except TimeoutError:
            raise without_outcome(self.sync.topic, timeout) from None
        finally:
            self._ahead -= receipt is None

    async def _sent(self, receipt: Receipt | None, value: Any, options: dict[str, Any]) -> int:
        if receipt is None:
            async with self._order:
                receipt = await _in_thread(self.sync.send_async, value, **options)
        return await _outcome(receipt)

    def send_async(self, value: Any, **options: Any) -> Receipt:
        """Queue one message; the receipt can be awaited. It is no coroutine: while the topic is
        being handed over, the loop waits with it. `send` does not do that."""
        return self.sync.send_async(value, **options)

    async def send_many(self, values: Iterable[Any], **options: Any) -> range:
        """Append messages atomically. Options as in `Producer.send_many`."""
        transaction: Transaction | None = options.pop("transaction", None)
        if transaction is not None:
            options["transaction"] = transaction.of(self)
        return await _in_thread(self.sync.send_many, values, **options)

    async def announce(self, info: Mapping[str, str], **options: Any) -> None:
        """Tell everybody something about this owner. Options as in `Producer.announce`."""
        transaction: Transaction | None = options.pop("transaction", None)
        if transaction is not None:
            options["transaction"] = transaction.of(self)
        await _in_thread(self.sync.announce, info, **options)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far has its outcome."""
        await _in_thread(self.sync.flush, timeout)

    async def move(self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()) -> Move:
        """Move this producer to another engine, and no other one. Cancelled, it stays where it is,
        unless it has been released."""
        begin = functools.partial(self.sync.move_async, to, timeout, groups=groups)
        return (await (await _begun(begin)))[0]

    async def close(self) -> None:
        """Send what waits, then give the topic back."""
        await _in_thread(self.sync.close)

    def __getattr__(self, name: str) -> Any:
        # name, topic, access_mode, priority, topic_epoch, last_sequence_id, state
        return getattr(self.sync, name)


async def _outcome(receipt: Receipt) -> int:
    return int(await receipt)


class Reader(_Closing):
    """An `exclusivelog.Reader`, awaitable; `sync` is that one. `async for` reads up to the end
    as it is now, `follow()` goes on for ever."""

    def __init__(self, sync: SyncReader) -> None:
        self.sync = sync

    async def read_next(self, timeout: float | None = None) -> Message:
        """The next message; waits for it at the end of the topic, up to `timeout` seconds
        (None: for ever), then WaitTimeoutError."""
        check_timeout(timeout)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            seen = self.sync.mark()  # before the look: what comes after it ends the wait
            try:
                return self.sync.read_next(timeout=0)
            except WaitTimeoutError:
                left = None if deadline is None else deadline - loop.time()
                if left is not None and left <= 0:
                    raise self.sync.nothing_came(timeout) from None
            # Who has committed may die before he can tell: so one looks up now and then.
            look_up = READER_LOOK_UP_SECONDS
            await _Watch.of(self.sync).wait(seen, look_up if left is None else min(left, look_up))

    async def read_batch(self, max_messages: int) -> list[Message]:
        """Up to `max_messages` next messages, without waiting."""
        return self.sync.read_batch(max_messages)

    async def __aiter__(self) -> AsyncIterator[Message]:
        for count, message in enumerate(self.sync):
            yield message
            if count % 1000 == 999:  # the next one is not taken yet
                await asyncio.sleep(0)  # others have their turn

    async def follow(self, timeout: float | None = None) -> AsyncIterator[Message]:
        """The messages, for ever: at the end it waits. Ends when nothing has come for
        `timeout` seconds (None: never), or nothing can come any more."""
        while True:
            try:
                message = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield message

    async def commit(self) -> None:
        """Let the group go on at the position, durably."""
        await _in_thread(self.sync.commit)

    async def close(self) -> None:
        """End reading."""
        await _in_thread(self.sync.close)

    def __getattr__(self, name: str) -> Any:
        # position, seek, has_message_available, group, topic
        return getattr(self.sync, name)


class GroupReader(_Closing):
    """An `exclusivelog.GroupReader`, awaitable; `sync` is that one. `async for` reads up to the
    ends as they are now, `follow()` goes on for ever."""

    def __init__(self, sync: SyncGroupReader) -> None:
        self.sync = sync

    async def read_next(self, timeout: float | None = None) -> Found:
        """The next message of any topic, with the topic's name; waits for it up to `timeout`
        seconds (None: for ever), then WaitTimeoutError."""
        check_timeout(timeout)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            # Before the read: what comes after it ends the wait.
            marks = [reader.mark() for reader in self.sync.readers]
            try:
                return self.sync.read_next(timeout=0)
            except WaitTimeoutError:
                left = None if deadline is None else deadline - loop.time()
                if left is not None and left <= 0:
                    raise self.sync.nothing_came(timeout) from None
            look_up = READER_LOOK_UP_SECONDS
            await self._wait(marks, look_up if left is None else min(left, look_up))

    async def _wait(self, marks: list[int], seconds: float) -> None:
        waits = [
            asyncio.ensure_future(_Watch.of(reader).wait(mark, seconds))
            for reader, mark in zip(self.sync.readers, marks, strict=True)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def read_batch(self, max_messages: int) -> list[Found]:
        """Up to `max_messages` next messages, without waiting."""
        return self.sync.read_batch(max_messages)

    async def __aiter__(self) -> AsyncIterator[Found]:
        for count, found in enumerate(self.sync):
            yield found
            if count % 1000 == 999:  # the next one is not taken yet
                await asyncio.sleep(0)  # others have their turn

    async def follow(self, timeout: float | None = None) -> AsyncIterator[Found]:
        """The messages, for ever: at the ends of all topics it waits. Ends when nothing has come
        for `timeout` seconds (None: never), or nothing can come any more."""
        while True:
            try:
                found = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield found

    async def commit(self) -> None:
        """Let the group go on at the positions of all topics, durably."""
        await _in_thread(self.sync.commit)

    async def close(self) -> None:
        """End reading."""
        await _in_thread(self.sync.close)

    def __getattr__(self, name: str) -> Any:
        # topics, group, generations, positions, seek, has_message_available
        return getattr(self.sync, name)


class _Watch:
    """A thread that sleeps at the end of a topic, for all tasks that wait there."""

    _lock = threading.Lock()
    _there: ClassVar[dict[tuple[int, int], _Watch]] = {}

    def __init__(self, key: tuple[int, int], reader: SyncReader) -> None:
        self._key = key
        self._reader = reader
        self._waiting: dict[asyncio.Future[None], int] = {}  # {task's future: what it has seen}

    @classmethod
    def of(cls, reader: SyncReader) -> _Watch:
        """The watch at the end of this reader's topic."""
        key = id(reader.ledger), reader.topic_id
        with cls._lock:
            watch = cls._there.get(key)
            if watch is None:
                watch = cls(key, reader)
                run = threading.Thread(target=watch._run, name="exclusivelog-watch", daemon=True)
                threads.start(reader.ledger.path, run)
                cls._there[key] = watch
            return watch

    async def wait(self, seen: int, timeout: float | None) -> None:
        """Return when the topic's mark is no longer `seen`, or so many seconds have passed."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting[future] = seen
            if self._there.get(self._key) is not self:  # it ended just now: look again
                _wake_up(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self._lock:
                self._waiting.pop(future, None)

    def _run(self) -> None:
        try:
            idle = 0
            while idle < 2:  # it stays for a moment: readers come back
                mark = self._reader.mark()
                idle = 0 if self._wake(mark) else idle + 1
                self._reader.await_mark(mark, SLICE_SECONDS)
        except ExclusiveLogError:
            pass  # the engine was closed, as whoever waits will see
        finally:
            with self._lock:
                del self._there[self._key]
                self._wake(None)

    def _wake(self, mark: int | None) -> bool:
        """Wake those who have not seen this mark; is anybody there?"""
        waiting = list(self._waiting.items())
        for future, seen in waiting:
            if seen != mark:
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    future.get_loop().call_soon_threadsafe(_wake_up, future)
        return bool(waiting)


def _wake_up(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _forget_watches() -> None:
    """In a forked child: the threads are the parent's, and so is whoever had the lock."""
    _Watch._lock = threading.Lock()
    _Watch._there = {}


os.register_at_fork(after_in_child=_forget_watches)


class Topic:
    """An `exclusivelog.Topic`, awaitable; `sync` is that one."""

    def __init__(self, sync: SyncTopic) -> None:
        self.sync = sync

    async def producer(
        self, access_mode: AccessMode | str = AccessMode.SHARED, **options: Unpack[ProducerOptions]
    ) -> Producer:
        """Open a producer; waits in the queue if the mode says so. Options as in
        `Topic.producer`. Cancelled, it has left the queue, or gives back what it got."""
        ask = functools.partial(self.sync.producer_async, access_mode, **options)
        future = await _opened(ask, ProducerFuture.give_up)
        try:
            return Producer(await asyncio.shield(asyncio.wrap_future(future)))
        except asyncio.CancelledError:
            await asyncio.shield(_in_thread(future.give_up))
            raise

    def reader(self, start: str | int | dt.datetime = "earliest", **options: Any) -> Reader:
        """Open a reader. Options as in `Topic.reader`."""
        return Reader(self.sync.reader(start, **options))

    async def compact(self) -> int:
        """Make the compacted view anew."""
        return await _in_thread(self.sync.compact)

    async def trim(
        self, before: int | dt.datetime | None = None, max_bytes: int | None = None
    ) -> int:
        """Remove old messages for good."""
        return await _in_thread(self.sync.trim, before, max_bytes)

    async def retention(self, max_age: float | None = None, max_bytes: int | None = None) -> None:
        """Have old messages removed in the background, from now on."""
        await _in_thread(self.sync.retention, max_age, max_bytes)

    async def terminate(self) -> int:
        """Seal the topic for ever."""
        return await _in_thread(self.sync.terminate)

    def __getattr__(self, name: str) -> Any:
        # name, epoch, first_offset, next_offset, owner, holders, waiters, announcement, kind,
        # serializers
        return getattr(self.sync, name)


async def _begun(begin: Callable[[], UnloadFuture]) -> asyncio.Task[list[Move]]:
    """A task with the outcome of moves that have begun."""
    task = asyncio.create_task(_unloaded(await _opened(begin, UnloadFuture.cancel)))
    try:
        await asyncio.sleep(0)  # a task that is cancelled before it runs cancels nothing
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    return task


async def _unloaded(future: UnloadFuture) -> list[Move]:
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        await asyncio.shield(_in_thread(future.cancel))
        raise


class Engine(_Closing):
    """An `exclusivelog.Engine`, awaitable; `sync` is that one. Made by `open`."""

    def __init__(self, sync: SyncEngine) -> None:
        self.sync = sync

    def topic(self, name: str, create: bool = True) -> Topic:
        """The topic of that name, made if there is none."""
        return Topic(self.sync.topic(name, create))

    def reader(self, topics: Iterable[str], *, group: str, **options: Any) -> GroupReader:
        """Open one reader of a group on several topics. Options as in `Engine.reader`."""
        return GroupReader(self.sync.reader(topics, group=group, **options))

    @overload
    async def own(
        self, group: str | None, resources: Mapping[str, int | None],
        timeout: float | None = None, *, on_lost: OnLost | None = None,
    ) -> Claim: ...  # fmt: skip
    @overload
    async def own(
        self, group: Mapping[str, int | None], *, timeout: float | None = None,
        on_lost: OnLost | None = None,
    ) -> Claim: ...  # fmt: skip
    async def own(
        self, group: Any = None, resources: Any = None, timeout: float | None = None, *,
        on_lost: OnLost | None = None,
    ) -> Claim:  # fmt: skip
        """Claim resources of a group. Cancelled, it gives back what it got, and nothing waits on
        for longer than a moment. `on_lost` is called in a thread of its own, not in the loop."""
        end = time.monotonic() + (timeout or 0.0)
        while True:
            left = max(0.0, end - time.monotonic())
            claim = functools.partial(
                self.sync.own, group, resources, min(left, OWN_SECONDS), on_lost=on_lost
            )
            try:
                return await _opened(claim, Claim.release)
            except OwnershipError as error:
                if left <= OWN_SECONDS or not error.retriable:
                    raise

    async def role(self, name: str, **options: Unpack[RoleOptions]) -> Role:
        """Become the only holder of a role; waits in its queue if the mode says so. Options as in
        `Engine.role`; `on_lost` is called with the `xl.Role`, in a thread of its own. Cancelled, it
        has left the queue, or gives back what it got.

        >>> async def example():
        ...     async with open(path) as engine:
        ...         async with await engine.role("billing", topics=["invoices"]) as role:
        ...             invoices = await role.producer("invoices")
        ...             return role.epoch, await invoices.send(b"no. 1")
        >>> asyncio.run(example())
        (1, 0)
        """
        ask = functools.partial(self.sync.role_async, name, **options)
        future = await _opened(ask, RoleFuture.give_up)
        try:
            return Role(await asyncio.shield(asyncio.wrap_future(future)))
        except asyncio.CancelledError:
            await asyncio.shield(_in_thread(future.give_up))
            raise

    async def delete_role(self, name: str) -> None:
        """Remove a role that nobody holds or awaits."""
        await _in_thread(self.sync.delete_role, name)

    def transaction(self) -> Transaction:
        """Begin a transaction, for `async with`."""
        return Transaction(self.sync.transaction())

    async def delete_topic(self, name: str) -> None:
        """Remove a topic and its messages."""
        await _in_thread(self.sync.delete_topic, name)

    async def verify(self) -> Report:
        """Read everything, and say what is damaged."""
        return await _in_thread(self.sync.verify)

    async def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the ledger into a new or empty directory: `xl.Engine.backup`."""
        await _in_thread(self.sync.backup, path)

    async def unload(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0, *,
        groups: Iterable[str] = (), producer: str | None = None,
    ) -> list[Move]:  # fmt: skip
        """Move the ownership of topics to another engine. Cancelled, it leaves to its owner what
        has not been released."""
        return await (
            await self.unload_async(topics, to, timeout, groups=groups, producer=producer)
        )

    async def unload_async(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0, *,
        groups: Iterable[str] = (), producer: str | None = None,
    ) -> asyncio.Task[list[Move]]:  # fmt: skip
        """Begin to move topics, and return a task that can be awaited, or cancelled, as
        `xl.UnloadFuture` can.

        >>> async def example():
        ...     async with open(path, "a") as a, open(path, "b") as b:
        ...         moving = await a.unload_async(a.topic("orders").name, to=b.id)
        ...         return [move.state for move in await moving]
        >>> asyncio.run(example())
        ['assigned']
        """
        begin = functools.partial(
            self.sync.unload_async, topics, to, timeout, groups=groups, producer=producer
        )
        return await _begun(begin)

    async def cancel_unload(self, topics: str | Iterable[str]) -> list[str]:
        """End hand-overs that are under way; whose they were."""
        return await _in_thread(self.sync.cancel_unload, topics)

    async def close(self) -> None:
        """Send what waits, give everything back, end the threads."""
        await _in_thread(self.sync.close)

    def __getattr__(self, name: str) -> Any:
        # id, name, path, topics, engines, claims, groups, roles, stats, history, inside, ...
        return getattr(self.sync, name)


class Role(_Closing):
    """An `exclusivelog.Role`, awaitable; `sync` is that one. Made by `Engine.role`."""

    def __init__(self, sync: SyncRole) -> None:
        self.sync = sync

    async def producer(self, topic: str, **options: Unpack[SendingOptions]) -> Producer:
        """The role's producer of one of its topics. Options as in `Role.producer`."""
        return Producer(await _in_thread(self.sync.producer, topic, **options))

    def reader(self, topic: str, **options: Any) -> Reader:
        """Open the reader of one topic of a group. Options as in `Role.reader`."""
        return Reader(self.sync.reader(topic, **options))

    def group_reader(self, group: str | None = None, **options: Any) -> GroupReader:
        """Open one reader on all topics of a group. Options as in `Role.group_reader`."""
        return GroupReader(self.sync.group_reader(group, **options))

    async def hand_over(self, to: str, timeout: float = 10.0) -> Move:
        """Move the role to another engine. Cancelled, the role stays here unless it has moved."""
        begin = functools.partial(self.sync.hand_over_async, to, timeout)
        return (await (await _begun(begin)))[0]

    async def close(self) -> None:
        """Send what waits, then give the role back."""
        await _in_thread(self.sync.close)

    def __getattr__(self, name: str) -> Any:
        # name, epoch, claim, topics, groups, generations, state
        return getattr(self.sync, name)


class Transaction:
    """An `exclusivelog.Transaction`, awaitable; `sync` is that one. `async with` commits at the
    end of the block, or aborts if an exception leaves it.

    A cancelled `commit` takes its course: `state` says how it has ended.
    """

    def __init__(self, sync: SyncTransaction) -> None:
        self.sync = sync
        self._producers: set[Producer] = set()

    def of(self, producer: Producer) -> SyncTransaction:
        """The transaction, for a producer that takes part in it."""
        self._producers.add(producer)
        return self.sync

    @property
    def offsets(self) -> dict[Producer, range]:
        """After the commit: where each producer's messages are."""
        there = self.sync.offsets
        return {p: there[p.sync] for p in self._producers if p.sync in there}

    def require(self, holder: Claim | Role | Producer) -> None:
        """Commit only if this claim or role is held, or this producer still has its topic."""
        self.sync.require(holder.sync if isinstance(holder, (Producer, Role)) else holder)

    def commit_cursor(self, reader: Reader | GroupReader) -> None:
        """Let the reader's group go on at its position, if and when this commits."""
        self.sync.commit_cursor(reader.sync)

    async def commit(self) -> None:
        """Append and commit everything, or nothing."""
        await _in_thread(self.sync.commit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.sync.state == "open":
            await self.commit()
        else:
            self.sync.abort()

    def __getattr__(self, name: str) -> Any:
        # state, abort
        return getattr(self.sync, name)


class _Opening:
    """What `open` gives: to be awaited, or entered by `async with`."""

    def __init__(self, call: Callable[[], SyncEngine]) -> None:
        self._call = call
        self._engine: Engine | None = None

    async def _open(self) -> Engine:
        return Engine(await _opened(self._call, SyncEngine.close))

    def __await__(self) -> Any:
        return self._open().__await__()

    async def __aenter__(self) -> Engine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(self, *exception: Any) -> None:
        if self._engine is not None:
            await self._engine.__aexit__(*exception)


def open(
    path: str | os.PathLike[str],
    name: str | None = None,
    properties: Mapping[str, str] | None = None,
    *,
    durability: Literal["power", "process"] = "power",
    **options: Any,
) -> _Opening:
    """Open the ledger in a directory: `await` it, or `async with` it. Options as in
    `exclusivelog.open`."""
    return _Opening(
        functools.partial(_engine.open, path, name, properties, durability=durability, **options)
    )


async def upgrade(
    path: str | os.PathLike[str],
    backup: str | os.PathLike[str] | None = None,
    *,
    despite_damage: bool = False,
) -> Upgrade:
    """Raise a ledger of an earlier format, after a backup; as `exclusivelog.upgrade`. Cancelled, it
    takes its course."""
    return await _in_thread(_upgrading.upgrade, path, backup, despite_damage=despite_damage)


# ---- state -------------------------------------------------------------------------------


class SharedState(_Closing, Generic[S, Op]):
    """An `exclusivelog.SharedState`, awaitable; `sync` is that one. Make it by `create`."""

    def __init__(self, sync: _state.SharedState[S, Op]) -> None:
        self.sync = sync

    @classmethod
    async def create(cls, topic: Topic, *args: Any, **options: Any) -> SharedState[S, Op]:
        """Open the state in a topic. Arguments as in `exclusivelog.SharedState`."""
        make = functools.partial(_state.SharedState, topic.sync, *args, **options)
        return cls(await _opened(make, _state.SharedState.close))

    async def read(self, fn: Callable[[S], R], latest: bool = False) -> R:
        """`fn(state)`, which cannot change it."""
        return await _in_thread(self.sync.read, fn, latest)

    async def write(
        self, ops_fn: Callable[[S], Iterable[Op]], read_fn: Callable[[S], R] | None = None
    ) -> R | None:
        """Append operations, apply them, and read. Cancelled, it takes its course, or never
        began. Writes of many tasks share flushes."""
        return await _called(self.sync, self.sync.write, ops_fn, read_fn)

    async def snapshot(self) -> int:
        """Keep the state as it is."""
        return await _in_thread(self.sync.snapshot)

    async def close(self) -> None:
        """Give the topic back."""
        await _in_thread(self.sync.close)


class SharedMap(_Closing, Generic[K, V]):
    """An `exclusivelog.SharedMap`, awaitable; `sync` is that one. Make it by `create`. Writes of
    many tasks share flushes."""

    def __init__(self, sync: _state.SharedMap[K, V]) -> None:
        self.sync = sync

    @classmethod
    async def create(cls, topic: Topic, *args: Any, **options: Any) -> SharedMap[K, V]:
        """Open the map in a topic. Arguments as in `exclusivelog.SharedMap`."""
        make = functools.partial(_state.SharedMap, topic.sync, *args, **options)
        return cls(await _opened(make, _state.SharedMap.close))

    # ---- read ----------------------------------------------------------------------------

    async def get(self, key: K, default: Any = None, *, latest: bool = False) -> Any:
        """The key's value, or `default`."""
        return await _called(self.sync, self.sync.get, key, default, latest=latest)

    async def get_or_default(self, key: K, default: Any, latest: bool = False) -> Any:
        """The key's value, or `default`."""
        return await _called(self.sync, self.sync.get_or_default, key, default, latest)

    async def scan(
        self, fn: Callable[[K, V], object] | None = None, *,
        filter: Callable[[K], object] | None = None, latest: bool = False,
    ) -> list[tuple[K, V]]:  # fmt: skip
        """The (key, value) pairs of one moment, of the keys for which `filter(key)` is true."""
        return await _called(self.sync, self.sync.scan, fn, filter=filter, latest=latest)

    async def list_keys(self, latest: bool = False) -> list[K]:
        """All keys."""
        return await _called(self.sync, self.sync.list_keys, latest)

    def watch(
        self, key: K | None = None, *, prefix: Any = None, start: int | None = None
    ) -> MapWatch[K, V]:
        """Every change, in order; see `exclusivelog.SharedMap.watch`."""
        return MapWatch(self.sync, key, prefix, start)

    async def at(self, when: int | dt.datetime) -> dict[K, V]:
        """The map as it was before the message at an offset, or at a time."""
        return await _called(self.sync, self.sync.at, when)

    async def diff(
        self, a: int | dt.datetime, b: int | dt.datetime
    ) -> dict[K, tuple[V | None, V | None]]:
        """{key: (value at `a`, value at `b`)} of the keys that differ."""
        return await _called(self.sync, self.sync.diff, a, b)

    # ---- write ---------------------------------------------------------------------------

    async def put(self, key: K, value: V | None) -> V | None:
        """Set the key's value, or remove it (None); its value before."""
        return await _put(self.sync, key, value)

    async def put_all(self, values: Mapping[K, V]) -> None:
        """Set several keys' values, all of them or none."""
        await _called(self.sync, self.sync.put_all, dict(values))

    async def put_if_absent(self, key: K, value: V | None) -> Change[V]:
        """Set the key's value if it has none; true if it had none."""
        return await _called(self.sync, self.sync.put_if_absent, key, value)

    async def replace(self, key: K, expected: V | None, value: V | None) -> Change[V]:
        """Set the key's value if it is `expected`; true if it was."""
        return await _called(self.sync, self.sync.replace, key, expected, value)

    @overload
    async def update(
        self, key: K, fn: Callable[..., V | None], /, *, with_key: bool = False
    ) -> Change[V]: ...
    @overload
    async def update(self, values: Mapping[K, V] | Iterable[tuple[K, V]], /) -> None: ...
    async def update(
        self, key: Any, fn: Any = None, /, *, with_key: bool = False
    ) -> Change[V] | None:
        """`update(key, fn)`: set the key's value to `fn(value)`. `update(values)`: set several."""
        update: Any = self.sync.update
        changed: Change[V] | None = await _called(self.sync, update, key, fn, with_key=with_key)
        return changed

    async def update_multiple(
        self, filter: Callable[[K], object] | None, fn: Callable[[K, V], V | None]
    ) -> dict[K, V | None]:
        """Set the values of all keys for which `filter(key)` is true to `fn(key, value)`."""
        return await _called(self.sync, self.sync.update_multiple, filter, fn)

    async def setdefault(self, key: K, default: V | None = None) -> V | None:
        """The key's value; where it has none, `default`, which it then has."""
        return await _called(self.sync, self.sync.setdefault, key, default)

    async def delete(self, key: K) -> V | None:
        """Remove a key; its value before."""
        return await _put(self.sync, key, None)

    async def pop(self, key: K, default: Any = _state.NOTHING) -> Any:
        """Remove a key, and return its value; where it has none, `default`, or KeyError."""
        return await _called(self.sync, self.sync.pop, key, default)

    async def popitem(self) -> tuple[K, V]:
        """Remove the key that was put last; it and its value."""
        return await _called(self.sync, self.sync.popitem)

    async def clear(self) -> None:
        """Remove all keys."""
        await _called(self.sync, self.sync.clear)

    async def snapshot(self) -> int:
        """Keep the map as it is."""
        return await _in_thread(self.sync.snapshot)

    async def close(self) -> None:
        """Give the topic back."""
        await _in_thread(self.sync.close)


class MapWatch(_Closing, Generic[K, V]):
    """An `exclusivelog.MapWatch`, awaitable: `async for change in watch`. It sees what is written
    from when it is opened on (`async with`, or the first call), or from its `start`."""

    def __init__(
        self, shared: _state.SharedMap[K, V], key: K | None, prefix: Any, start: int | None
    ) -> None:
        self._open = functools.partial(shared.watch, key, prefix=prefix, start=start)
        self._sync: _state.MapWatch[K, V] | None = None

    async def _opened(self) -> _state.MapWatch[K, V]:
        if self._sync is None:
            self._sync = await _opened(self._open, _state.MapWatch.close)
        return self._sync

    async def read_next(self, timeout: float | None = None) -> _state.MapChange[K, V]:
        """The next change; waits for it up to `timeout` seconds (None: for ever), then
        WaitTimeoutError."""
        check_timeout(timeout)
        watch = await self._opened()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return watch.read_next(timeout=0)
            except WaitTimeoutError:
                left = None if end is None else max(0.0, end - time.monotonic())
                watch.take(await Reader(watch.reader).read_next(left))

    async def follow(self, timeout: float | None = None) -> AsyncIterator[_state.MapChange[K, V]]:
        """The changes, until nothing has come for `timeout` seconds (None: for ever)."""
        while True:
            try:
                change = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield change

    def __aiter__(self) -> AsyncIterator[_state.MapChange[K, V]]:
        return self.follow()

    async def close(self) -> None:
        """End it."""
        if self._sync is not None:
            await _in_thread(self._sync.close)

    async def __aenter__(self) -> Self:
        await self._opened()
        return self
