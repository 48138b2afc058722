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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, Unpack

from exclusivelog import engine as _engine
from exclusivelog import state as _state
from exclusivelog._core import Message, Receipt
from exclusivelog.engine import Engine as SyncEngine
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.lockfile import READER_LOOK_UP_SECONDS
from exclusivelog.mailbox import ProducerFuture
from exclusivelog.ownership import Claim
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.reader import Reader as SyncReader
from exclusivelog.replica import Replica
from exclusivelog.topic import ProducerOptions
from exclusivelog.topic import Topic as SyncTopic
from exclusivelog.transaction import Transaction as SyncTransaction
from exclusivelog.types import AccessMode, Move, Report
from exclusivelog.waits import check_timeout

__all__ = [
    "Engine",
    "Producer",
    "Reader",
    "SharedMap",
    "SharedState",
    "Topic",
    "Transaction",
    "open",
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
    return await loop.run_in_executor(None, functools.partial(call, *args, **kwargs))


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
    running = loop.run_in_executor(None, run)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        abandoned.set()
        running.add_done_callback(_drop_outcome)
        giving_back = loop.run_in_executor(None, give_back)
        await asyncio.wait({running, giving_back}, timeout=GIVEN_BACK_SECONDS)
        raise
    return made.pop()


def _drop_outcome(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # nobody else asks for it


async def _called(state: Replica, future: concurrent.futures.Future[R]) -> R:
    """The outcome of a call of a state; cancelled, it waits for the topic no longer."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        await asyncio.shield(_in_thread(state.give_up, future))
        raise


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

    async def send(self, value: Any, **options: Any) -> int:
        """Append one message; its offset, once it is durable. Options as in `Producer.send`."""
        timeout = options.pop("timeout", None)
        check_timeout(timeout)
        transaction: Transaction | None = options.pop("transaction", None)
        if transaction is not None:
            return self.sync.send(value, transaction=transaction.of(self), **options)
        receipt: Receipt = self.sync.send_async(value, **options)
        try:
            return await asyncio.wait_for(_outcome(receipt), timeout)
        except WaitTimeoutError:
            raise
        except TimeoutError:
            raise WaitTimeoutError(
                f"topic {self.sync.topic!r}: no outcome within timeout={timeout} s; what was sent "
                "is still on its way"
            ) from None

    def send_async(self, value: Any, **options: Any) -> Receipt:
        """Queue one message; the receipt can be awaited."""
        return self.sync.send_async(value, **options)

    async def send_many(self, values: Iterable[Any], **options: Any) -> range:
        """Append messages atomically. Options as in `Producer.send_many`."""
        transaction: Transaction | None = options.pop("transaction", None)
        if transaction is not None:
            options["transaction"] = transaction.of(self)
        return await _in_thread(self.sync.send_many, values, **options)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far has its outcome."""
        await _in_thread(self.sync.flush, timeout)

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
                threading.Thread(target=watch._run, name="exclusivelog-watch", daemon=True).start()
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
        # name, epoch, first_offset, next_offset, owner, holders, waiters
        return getattr(self.sync, name)


class Engine(_Closing):
    """An `exclusivelog.Engine`, awaitable; `sync` is that one. Made by `open`."""

    def __init__(self, sync: SyncEngine) -> None:
        self.sync = sync

    def topic(self, name: str, create: bool = True) -> Topic:
        """The topic of that name, made if there is none."""
        return Topic(self.sync.topic(name, create))

    async def own(
        self, group: str, resources: Mapping[str, int | None], timeout: float | None = None
    ) -> Claim:
        """Claim resources of a group. Cancelled, it gives back what it got, and nothing waits on
        for longer than a moment."""
        end = time.monotonic() + (timeout or 0.0)
        while True:
            left = max(0.0, end - time.monotonic())
            claim = functools.partial(self.sync.own, group, resources, min(left, OWN_SECONDS))
            try:
                return await _opened(claim, Claim.release)
            except OwnershipError as error:
                if left <= OWN_SECONDS or not error.retriable:
                    raise

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
        """Copy the ledger, as of one moment, into a new directory."""
        await _in_thread(self.sync.backup, path)

    async def unload(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0
    ) -> list[Move]:
        """Move the ownership of topics to another engine."""
        return await _in_thread(self.sync.unload, topics, to, timeout)

    async def close(self) -> None:
        """Send what waits, give everything back, end the threads."""
        await _in_thread(self.sync.close)

    def __getattr__(self, name: str) -> Any:
        # id, name, path, topics, engines, stats, history, inside, ...
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

    def commit_cursor(self, reader: Reader) -> None:
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
        """`fn(state)`, with a copy of the state."""
        return await _in_thread(self.sync.read, fn, latest)

    async def write(
        self, ops_fn: Callable[[S], Iterable[Op]], read_fn: Callable[[S], R] | None = None
    ) -> R | None:
        """Append operations, apply them, and read. Cancelled, it takes its course, or never
        began."""
        return await _called(self.sync, self.sync.write_async(ops_fn, read_fn))

    async def snapshot(self) -> int:
        """Keep the state as it is."""
        return await _in_thread(self.sync.snapshot)

    async def close(self) -> None:
        """Give the topic back."""
        await _in_thread(self.sync.close)


class SharedMap(_Closing, Generic[K, V]):
    """An `exclusivelog.SharedMap`, awaitable; `sync` is that one. Make it by `create`."""

    def __init__(self, sync: _state.SharedMap[K, V]) -> None:
        self.sync = sync

    @classmethod
    async def create(cls, topic: Topic, *args: Any, **options: Any) -> SharedMap[K, V]:
        """Open the map in a topic. Arguments as in `exclusivelog.SharedMap`."""
        make = functools.partial(_state.SharedMap, topic.sync, *args, **options)
        return cls(await _opened(make, _state.SharedMap.close))

    async def get(self, key: K, default: Any = None, *, latest: bool = False) -> Any:
        """The key's value, or `default`."""
        return await _called(self.sync, self.sync.get_async(key, default, latest=latest))

    async def get_or_default(self, key: K, default: Any, latest: bool = False) -> Any:
        """The key's value, or `default`."""
        return await _called(self.sync, self.sync.get_or_default_async(key, default, latest))

    async def scan(
        self, fn: Callable[[K, V], object] | None = None, latest: bool = False
    ) -> list[tuple[K, V]]:
        """All (key, value) pairs of one moment."""
        return await _called(self.sync, self.sync.scan_async(fn, latest))

    async def list_keys(self, latest: bool = False) -> list[K]:
        """All keys."""
        return await _called(self.sync, self.sync.list_keys_async(latest))

    async def put(self, key: K, value: V) -> None:
        """Set the key's value."""
        await _called(self.sync, self.sync.put_async(key, value))

    async def put_all(self, values: Mapping[K, V]) -> None:
        """Set several keys' values, all of them or none."""
        await _called(self.sync, self.sync.put_all_async(values))

    async def put_if_absent(self, key: K, value: V) -> bool:
        """Set the key's value if it has none; True if it had none."""
        return await _called(self.sync, self.sync.put_if_absent_async(key, value))

    async def replace(self, key: K, expected: V, value: V) -> bool:
        """Set the key's value if it is `expected`; True if it was."""
        return await _called(self.sync, self.sync.replace_async(key, expected, value))

    async def update(self, key: K, fn: Callable[[V | None], V | None]) -> V | None:
        """Set the key's value to `fn(value)`; what it is then."""
        return await _called(self.sync, self.sync.update_async(key, fn))

    async def update_multiple(
        self, filter: Callable[[K, V], bool] | None, fn: Callable[[K, V], V | None]
    ) -> dict[K, V | None]:
        """Set the values of all keys for which `filter(key, value)` is true."""
        return await _called(self.sync, self.sync.update_multiple_async(filter, fn))

    async def delete(self, key: K) -> bool:
        """Remove a key; True if it was there."""
        return await _called(self.sync, self.sync.delete_async(key))

    async def clear(self) -> None:
        """Remove all keys."""
        await _called(self.sync, self.sync.clear_async())

    async def snapshot(self) -> int:
        """Keep the map as it is."""
        return await _in_thread(self.sync.snapshot)

    async def close(self) -> None:
        """Give the topic back."""
        await _in_thread(self.sync.close)
