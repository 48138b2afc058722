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

Every call that may have to wait is awaited. Cancellation at any await leaves nothing behind: no
waiter, no owner, no blocked thread, no message that was taken and lost. Only what has begun takes
its course: a message that is being sent may be in the log.

Methods that only wait for a thread are made from those of the synchronous classes by `_threaded`
and its siblings, with their signatures and docstrings.

>>> async def example():
...     async with open(path) as engine:
...         async with await engine.topic("orders").producer("exclusive") as producer:
...             offset = await producer.send(b"hello")
...         return offset, [message.value async for message in engine.topic("orders").reader()]
>>> asyncio.run(example())
(0, [b'hello'])
"""

from __future__ import annotations

import abc
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
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from exclusivelog import opening as _places
from exclusivelog import threads
from exclusivelog._core import Message, Receipt
from exclusivelog.backend import without_outcome
from exclusivelog.engine import Engine as SyncEngine
from exclusivelog.errors import (
    ExclusiveLogError,
    LedgerError,
    OwnershipError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.opening import Upgrade
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.producer import ProducerFuture
from exclusivelog.reader import Found, check_following
from exclusivelog.reader import GroupReader as SyncGroupReader
from exclusivelog.reader import Reader as SyncReader
from exclusivelog.roles import Role as SyncRole
from exclusivelog.roles import RoleFuture, RoleOptions, SendingOptions
from exclusivelog.state import map as _map
from exclusivelog.state import past as _watch
from exclusivelog.state import state as _state
from exclusivelog.state.shared import Shared, acknowledge
from exclusivelog.topic import ManyOptions, ProducerOptions
from exclusivelog.topic import Topic as SyncTopic
from exclusivelog.transaction import Claim, OnLost
from exclusivelog.transaction import Transaction as SyncTransaction
from exclusivelog.types import AccessMode, Move
from exclusivelog.unload import UnloadFuture
from exclusivelog.waits import READER_LOOK_UP_SECONDS, check_timeout

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

CALLS_PER_SWITCH = 8  # calls that did not wait, until other tasks may run
GIVEN_BACK_SECONDS = 1.0  # a cancelled call waits so long for its clean-up
OWN_SECONDS = 0.25  # `own` waits so long in a thread, which cannot be interrupted

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")
Op = TypeVar("Op")
R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

# The thread that sleeps at the end of a topic checks so often whether a task still waits.
SLICE_SECONDS = 0.25


async def _in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    loop = asyncio.get_running_loop()
    return await _in_executor(loop, functools.partial(call, *args, **kwargs))


def _in_executor(loop: asyncio.AbstractEventLoop, call: Callable[[], R]) -> asyncio.Future[R]:
    """`call()` in a thread of the loop's executor, or LedgerError: then it is never called,
    though the executor has it in its queue by then."""
    outcome: concurrent.futures.Future[R] = concurrent.futures.Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        with threads.needed("asyncio's executor"):
            loop.run_in_executor(None, run)
    except LedgerError:
        if outcome.cancel():
            raise
    return asyncio.wrap_future(outcome, loop=loop)


def _as(method: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function the name, the signature and the docstring of a synchronous method; not its
    example, which does not await."""

    def take(function: F) -> F:
        functools.update_wrapper(function, method, ("__name__", "__qualname__"))
        function.__doc__ = (method.__doc__ or "").partition(">>>")[0].rstrip()
        return function

    return take


def _threaded(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """The method of `sync`, run in a thread."""

    name = method.__name__

    @_as(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await _in_thread(getattr(self.sync, name), *args, **kwargs)

    return call


def _submitted(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """The method of a shared state or map, run in its background thread: in order."""

    name = method.__name__

    @_as(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await _called(self.sync, getattr(self.sync, name), *args, **kwargs)

    return call


def _opening(
    method: Callable[Concatenate[Any, P], T], make: Callable[[T], R]
) -> Callable[Concatenate[Any, P], R]:
    """The method of `sync`, which does not wait; `make` wraps what it returns."""

    name = method.__name__

    @_as(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return make(getattr(self.sync, name)(*args, **kwargs))

    return call


async def _opened(call: Callable[[], R], close: Callable[[R], object]) -> R:
    """Return what `call()` opens, in a thread. If cancelled meanwhile, pass that to `close` as
    soon as it is there, even if the loop has ended by then. Wait for that, but not for long: the
    ledger may be blocked."""
    made: list[R] = []
    abandoned = threading.Event()

    def run() -> None:
        made.append(call())
        if abandoned.is_set():
            give_back()

    def give_back() -> None:
        with contextlib.suppress(IndexError):  # it is not there yet, or the other thread closes it
            close(made.pop())

    loop = asyncio.get_running_loop()
    running = _in_executor(loop, run)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        abandoned.set()
        running.add_done_callback(_drop_outcome)
        giving_back = _in_executor(loop, give_back)
        await asyncio.wait({running, giving_back}, timeout=GIVEN_BACK_SECONDS)
        raise
    return made.pop()


def _close_all(producers: Iterable[SyncProducer]) -> None:
    for producer in producers:
        producer.close()


def _drop_outcome(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # retrieved, so that asyncio does not log it


async def _outcome_of(future: concurrent.futures.Future[R], end: Callable[[], object]) -> R:
    """Wait for a request that was made. If cancelled, call `end` in a thread."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        await asyncio.shield(_in_thread(end))
        raise


class _Call:
    """A background call of a state, and the task that waits for it."""

    __slots__ = ("call", "future", "outcome", "state", "traffic", "waiter")

    def __init__(
        self, state: Shared, call: Callable[[], Any], waiter: asyncio.Future[Any],
        traffic: _Traffic,
    ) -> None:  # fmt: skip
        self.state, self.call, self.waiter, self.traffic = state, call, waiter, traffic
        self.future: concurrent.futures.Future[Any] | None = None
        self.outcome: tuple[Any, BaseException | None] = None, None  # if there is no future

    def settled(self, _: object) -> None:
        """Its future is done. From any thread."""
        self.traffic.arrive(self)

    def set_result(self, result: Any) -> None:
        """It has returned, and what it wrote is durable. From any thread."""
        self.outcome = result, None
        self.traffic.arrive(self)

    def set_exception(self, error: BaseException) -> None:
        """It has returned, and what it wrote may not be durable. From any thread."""
        self.outcome = None, error
        self.traffic.arrive(self)


class _Traffic:
    """Calls of states between a loop and their threads: those of one iteration of the loop are
    submitted together, and one wake-up delivers all outcomes that are there. Otherwise two threads
    would contend for the interpreter at every call."""

    _of: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Traffic]] = (
        weakref.WeakKeyDictionary()
    )

    _newest: ClassVar[tuple[Callable[[], object], _Traffic] | None] = None  # the last one found

    def __init__(self) -> None:
        self.leaving: list[_Call] = []
        self._arrived: deque[_Call] = deque()
        self._told = False
        self._made = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Traffic:
        """Return the loop's instance."""
        newest = cls._newest
        if newest is not None and newest[0]() is loop:
            return newest[1]
        found = cls._of.get(loop)
        if found is None:
            found = cls._of[loop] = cls()
        cls._newest = weakref.ref(loop), found
        return found

    def yields(self) -> bool:
        """Should other tasks run now? True after every few calls that did not wait: a switch costs
        more than such a call, but a task that makes no others must not block the loop."""
        self._made += 1
        return self._made % CALLS_PER_SWITCH == 0

    def send(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the call at the end of this iteration of the loop."""
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
        """Deliver the call's outcome. From any thread."""
        self._arrived.append(call)
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # its loop has ended
                call.waiter.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False  # first: what comes later wakes the loop again
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


async def _called(state: Shared, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run a state's own method in its background thread. If cancelled, it stops waiting for the
    topic."""
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


async def _put(shared: _map.SharedMap[K, V], key: K, value: V | None) -> V | None:
    """`put`, in the loop's own thread if there is nothing to wait for but its flush: that costs a
    fraction of a call in another thread."""
    loop = asyncio.get_running_loop()
    traffic = _Traffic.of(loop)
    # Calls that were submitted before come first.
    found = None if traffic.leaving else _map.put_at_once(shared, key, value)
    if found is None:
        return await _called(shared, shared.put, key, value)
    result: V | None
    result, appended = found
    if appended is None or appended.flushed:
        if traffic.yields():
            await asyncio.sleep(0)
        return result
    mine = _Call(shared, int, loop.create_future(), traffic)
    acknowledge(shared, mine, result, appended)
    told: V | None = await mine.waiter
    return told


class _Wrapper(Generic[T]):
    """An object of `exclusivelog`, awaitable; `sync` is that one."""

    def __init__(self, sync: T) -> None:
        self.sync = sync


class _Delegating(_Wrapper[T], Generic[T]):
    """Attributes and methods that do not wait are those of `sync`. Not for states: in a class with
    this method, every access to an attribute costs more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sync, name)


class _Closing(metaclass=abc.ABCMeta):
    """`async with`: closes itself at the end of the block."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close it; closing twice does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shielded: it is closed even if the task is cancelled meanwhile.
        await asyncio.shield(asyncio.ensure_future(self.close()))


class _Handle(_Wrapper[T], _Closing, Generic[T]):
    """What has to be closed."""

    async def close(self) -> None:
        """Close it, as the synchronous one; closing twice does nothing."""
        closing: Any = self.sync
        await _in_thread(closing.close)


# ---- producers ---------------------------------------------------------------------------


class SendOptions(TypedDict, total=False):
    """Options of `Producer.send`; what they mean, `exclusivelog.Producer.send` says."""

    key: bytes | str | None
    properties: Mapping[str, str] | None
    event_time: dt.datetime | int | None
    sequence_id: int | None
    timeout: float | None
    transaction: Transaction | None


class SendManyOptions(TypedDict, total=False):
    """Options of `Producer.send_many`."""

    keys: Iterable[bytes | str | None] | None
    properties: Iterable[Mapping[str, str] | None] | None
    event_times: Iterable[dt.datetime | int | None] | None
    sequence_id: int | None
    timeout: float | None
    transaction: Transaction | None


class AnnounceOptions(TypedDict, total=False):
    """Options of `Producer.announce`."""

    message: Any
    transaction: Transaction | None


class Producer(_Handle[SyncProducer], _Delegating[SyncProducer]):
    """An `exclusivelog.Producer`, awaitable; `sync` is that one."""

    def __init__(self, sync: SyncProducer) -> None:
        super().__init__(sync)
        self._order = asyncio.Lock()  # of tasks that wait for a hand-over, in a thread each
        self._ahead = 0

    @_as(SyncProducer.send)
    async def send(self, value: Any, **options: Unpack[SendOptions]) -> int:  # noqa: D102
        given: dict[str, Any] = {**options}
        timeout = given.pop("timeout", None)
        check_timeout(timeout)
        if self._take_part(given):
            if self.sync.is_moving:
                return await _in_thread(self.sync.send, value, **given)
            return self.sync.send(value, **given)
        # At once: a task that gathers several sends has them in this order.
        receipt = None if self._ahead else self.sync.offer(value, **given)
        self._ahead += receipt is None
        try:
            return await asyncio.wait_for(self._sent(receipt, value, given), timeout)
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
        return int(await receipt)

    def _take_part(self, options: dict[str, Any]) -> bool:
        """Replace the transaction in the options by its synchronous one; is there one?"""
        transaction: Transaction | None = options.pop("transaction", None)
        if transaction is not None:
            options["transaction"] = transaction.of(self)
        return transaction is not None

    @_as(SyncProducer.send_async)
    def send_async(self, value: Any, **options: Any) -> Receipt:  # noqa: D102
        # No coroutine: during a hand-over, the loop waits with it. `send` does not do that.
        return self.sync.send_async(value, **options)

    @_as(SyncProducer.send_many)
    async def send_many(self, values: Any, **options: Unpack[SendManyOptions]) -> range:  # noqa: D102
        given: dict[str, Any] = {**options}
        self._take_part(given)
        return await _in_thread(self.sync.send_many, values, **given)

    @_as(SyncProducer.announce)
    async def announce(self, info: Mapping[str, str], **options: Unpack[AnnounceOptions]) -> None:  # noqa: D102
        given: dict[str, Any] = {**options}
        self._take_part(given)
        await _in_thread(self.sync.announce, info, **given)

    flush = _threaded(SyncProducer.flush)

    async def move(self, to: str, timeout: float = 10.0, *, groups: Iterable[str] = ()) -> Move:
        """Move this producer, and no other one, to another engine. If cancelled, it stays where it
        is, unless it has been released."""
        begin = functools.partial(self.sync.move_async, to, timeout, groups=groups)
        return (await (await _begun(begin)))[0]


# ---- readers -----------------------------------------------------------------------------


class _Following(_Closing, Generic[M]):
    """What can be followed: readers, and watches of maps."""

    @abc.abstractmethod
    async def read_next(self, timeout: float | None = None) -> M:
        """Return what comes next."""

    async def follow(self, timeout: float | None = None) -> AsyncIterator[M]:
        """Iterate over everything that comes, and wait at the end, until nothing has come for
        `timeout` seconds (default: None, no limit) or nothing can come any more."""
        while True:
            try:
                found = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield found


class _Reading(_Handle[T], _Delegating[T], _Following[M], Generic[T, M]):
    """What both kinds of readers have in common."""

    @property
    @abc.abstractmethod
    def _parts(self) -> Sequence[SyncReader]:
        """The readers of single topics."""

    async def read_next(self, timeout: float | None = None) -> M:
        """Return the next message; wait for it up to `timeout` seconds (default: None, no limit),
        then raise WaitTimeoutError. A reader of several topics returns (topic, message)."""
        check_timeout(timeout)
        sync: Any = self.sync
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            # Before reading: what comes after these marks ends the wait.
            marks = [reader.cursor.mark() for reader in self._parts]
            try:
                found: M = sync.read_next(timeout=0)
                return found
            except WaitTimeoutError:
                left = None if deadline is None else deadline - loop.time()
                if left is not None and left <= 0:
                    raise sync.nothing_came(timeout) from None
            # A process may die after its commit and before its notification: look now and then.
            poll = READER_LOOK_UP_SECONDS
            await self._wait(marks, poll if left is None else min(left, poll))

    async def _wait(self, marks: list[int], seconds: float) -> None:
        parts = self._parts
        if len(parts) == 1:
            return await _Watch.of(parts[0]).wait(marks[0], seconds)
        waits = [
            asyncio.ensure_future(_Watch.of(reader).wait(mark, seconds))
            for reader, mark in zip(parts, marks, strict=True)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def read_batch(self, max_messages: int) -> list[M]:
        """Return up to `max_messages` next messages, without waiting; an empty list at the end."""
        sync: Any = self.sync
        found: list[M] = sync.read_batch(max_messages)
        return found

    def __aiter__(self) -> AsyncIterator[M]:
        sync: Any = self.sync
        return _in_steps(sync.__iter__)

    async def values(
        self, *, follow: bool = False, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        """Iterate over the values alone, up to the end as it is now; `follow=True`: for ever, with
        `timeout` as in `follow()`. A reader of several topics gives (topic, value)."""
        check_following(follow, timeout)
        sync: Any = self.sync
        while True:
            async for value in _in_steps(sync.values):
                yield value
            if not follow:
                return
            try:
                found = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield sync.value_of(found)


async def _in_steps(begin: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
    """Everything that this iterator gives; other tasks may run now and then."""
    for count, found in enumerate(begin()):
        yield found
        if count % 1000 == 999:  # the next one is not taken yet
            await asyncio.sleep(0)


class Reader(_Reading[SyncReader, Message]):
    """An `exclusivelog.Reader`, awaitable; `sync` is that one. `async for` reads up to the end as
    it is now; `follow()` waits there for more."""

    @property
    def _parts(self) -> Sequence[SyncReader]:
        return (self.sync,)

    commit = _threaded(SyncReader.commit)


class GroupReader(_Reading[SyncGroupReader, Found]):
    """An `exclusivelog.GroupReader`, awaitable; `sync` is that one. `async for` reads up to the
    ends as they are now; `follow()` waits there for more."""

    @property
    def _parts(self) -> Sequence[SyncReader]:
        return self.sync.readers

    commit = _threaded(SyncGroupReader.commit)


class _Watch:
    """A thread that sleeps at the end of a topic, on behalf of all tasks that wait there."""

    _lock = threading.Lock()
    _there: ClassVar[dict[tuple[int, int], _Watch]] = {}

    def __init__(self, key: tuple[int, int], reader: SyncReader) -> None:
        self._key = key
        self._reader = reader
        self._waiting: dict[asyncio.Future[None], int] = {}  # {task's future: what it has seen}

    @classmethod
    def of(cls, reader: SyncReader) -> _Watch:
        """Return the watch at the end of this reader's topic."""
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
            if self._there.get(self._key) is not self:  # it has just ended: read again
                _wake_up(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self._lock:
                self._waiting.pop(future, None)

    def _run(self) -> None:
        try:
            idle = 0
            while idle < 2:  # stay for a moment: readers come back
                mark = self._reader.cursor.mark()
                idle = 0 if self._wake(mark) else idle + 1
                self._reader.cursor.await_mark(mark, SLICE_SECONDS)
        except ExclusiveLogError:
            pass  # the engine was closed; the tasks that wait raise that themselves
        finally:
            with self._lock:
                del self._there[self._key]
                self._wake(None)

    def _wake(self, mark: int | None) -> bool:
        """Wake the tasks that have not seen this mark; does any task wait?"""
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
    """In a forked child: the threads, and the holder of the lock, are the parent's."""
    _Watch._lock = threading.Lock()
    _Watch._there = {}


os.register_at_fork(after_in_child=_forget_watches)


# ---- topics and engines ------------------------------------------------------------------


class Topic(_Delegating[SyncTopic]):
    """An `exclusivelog.Topic`, awaitable; `sync` is that one."""

    async def producer(
        self, access_mode: AccessMode | str = AccessMode.SHARED, **options: Unpack[ProducerOptions]
    ) -> Producer:
        """Open a producer; wait in the queue if the mode says so. Options as in
        `exclusivelog.Topic.producer`. If cancelled, the request leaves the queue, and a topic that
        was granted is given back."""
        ask = functools.partial(self.sync.producer_async, access_mode, **options)
        future = await _opened(ask, ProducerFuture.give_up)
        return Producer(await _outcome_of(future, future.give_up))

    reader = _opening(SyncTopic.reader, Reader)
    compact = _threaded(SyncTopic.compact)
    trim = _threaded(SyncTopic.trim)
    retention = _threaded(SyncTopic.retention)
    compression = _threaded(SyncTopic.compression)
    stats = _threaded(SyncTopic.stats)
    terminate = _threaded(SyncTopic.terminate)


async def _begun(begin: Callable[[], UnloadFuture]) -> asyncio.Task[list[Move]]:
    """Begin moves, and return a task with their outcome."""
    future = await _opened(begin, UnloadFuture.cancel)
    task = asyncio.create_task(_outcome_of(future, future.cancel))
    try:
        await asyncio.sleep(0)  # a task that is cancelled before it runs would cancel nothing
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    return task


class Engine(_Handle[SyncEngine], _Delegating[SyncEngine]):
    """An `exclusivelog.Engine`, awaitable; `sync` is that one. Made by `open`."""

    topic = _opening(SyncEngine.topic, Topic)
    reader = _opening(SyncEngine.reader, GroupReader)
    supports = _opening(SyncEngine.supports, bool)

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
        """Claim resources of a group, as `exclusivelog.Engine.own`. `on_lost` is called in a thread
        of its own, not in the loop. If cancelled, a claim that was granted is released."""
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

    async def producers(
        self, names: Iterable[str], access_mode: AccessMode | str = AccessMode.SHARED,
        **options: Unpack[ManyOptions],
    ) -> list[Producer]:  # fmt: skip
        """Open a producer on each of many topics, in one transaction, as
        `exclusivelog.Engine.producers`. If cancelled, those that were opened are closed.

        >>> async def example():
        ...     async with open(path) as engine:
        ...         first, second = await engine.producers(["a", "b"], "exclusive")
        ...         return await first.send(b"1"), await second.send(b"2")
        >>> asyncio.run(example())
        (0, 0)
        """
        make = functools.partial(self.sync.producers, names, access_mode, **options)
        return [Producer(made) for made in await _opened(make, _close_all)]

    async def role(self, name: str, **options: Unpack[RoleOptions]) -> Role:
        """Become the only holder of a role; wait in its queue if the mode says so. Options as in
        `exclusivelog.Engine.role`; `on_lost` is called with the `xl.Role`, in a thread of its own.
        If cancelled, the request leaves the queue, and a role that was granted is given back.

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
        return Role(await _outcome_of(future, future.give_up))

    delete_role = _threaded(SyncEngine.delete_role)

    def transaction(self) -> Transaction:
        """Begin a transaction, for `async with`."""
        return Transaction(self.sync.transaction())

    delete_topic = _threaded(SyncEngine.delete_topic)
    verify = _threaded(SyncEngine.verify)
    backup = _threaded(SyncEngine.backup)
    cancel_unload = _threaded(SyncEngine.cancel_unload)

    async def unload(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0, *,
        groups: Iterable[str] = (), producer: str | None = None,
    ) -> list[Move]:  # fmt: skip
        """Move the ownership of topics to another engine, as `exclusivelog.Engine.unload`. If
        cancelled, topics that have not been released stay with their owners."""
        return await (
            await self.unload_async(topics, to, timeout, groups=groups, producer=producer)
        )

    async def unload_async(
        self, topics: str | Iterable[str], to: str, timeout: float = 10.0, *,
        groups: Iterable[str] = (), producer: str | None = None,
    ) -> asyncio.Task[list[Move]]:  # fmt: skip
        """Begin to move topics, and return a task, which can be awaited or cancelled as an
        `xl.UnloadFuture`.

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


class Role(_Handle[SyncRole], _Delegating[SyncRole]):
    """An `exclusivelog.Role`, awaitable; `sync` is that one. Made by `Engine.role`."""

    async def producer(self, topic: str, **options: Unpack[SendingOptions]) -> Producer:
        """Open the role's producer of one of its topics. Options as in
        `exclusivelog.Role.producer`."""
        return Producer(await _in_thread(self.sync.producer, topic, **options))

    reader = _opening(SyncRole.reader, Reader)
    group_reader = _opening(SyncRole.group_reader, GroupReader)

    async def hand_over(self, to: str, timeout: float = 10.0) -> Move:
        """Move the role to another engine, as `exclusivelog.Role.hand_over`. If cancelled, the
        role stays here unless it has moved."""
        begin = functools.partial(self.sync.hand_over_async, to, timeout)
        return (await (await _begun(begin)))[0]


class Transaction(_Delegating[SyncTransaction]):
    """An `exclusivelog.Transaction`, awaitable; `sync` is that one. `async with` commits at the
    end of the block, or aborts if an exception leaves it.

    A cancelled `commit` takes its course; `state` then says how it ended.
    """

    def __init__(self, sync: SyncTransaction) -> None:
        super().__init__(sync)
        self._producers: set[Producer] = set()

    def of(self, producer: Producer) -> SyncTransaction:
        """Let a producer take part; return the synchronous transaction."""
        self._producers.add(producer)
        return self.sync

    @property
    def offsets(self) -> dict[Producer, range]:
        """After the commit: the offsets of each producer's messages."""
        there = self.sync.offsets
        return {p: there[p.sync] for p in self._producers if p.sync in there}

    def require(self, holder: Claim | Role | Producer) -> None:
        """Commit only if this claim or role is held, or this producer still has its topic."""
        self.sync.require(holder.sync if isinstance(holder, (Producer, Role)) else holder)

    def commit_cursor(self, reader: Reader | GroupReader) -> None:
        """Commit the reader's position for its group, if and when this commits."""
        self.sync.commit_cursor(reader.sync)

    commit = _threaded(SyncTransaction.commit)

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


class _Opening:
    """The result of `open`: it can be awaited, or entered by `async with`."""

    def __init__(self, call: Callable[[], SyncEngine]) -> None:
        self._call = call
        self._engine: Engine | None = None

    async def _open(self) -> Engine:
        return Engine(await _opened(self._call, lambda engine: engine.close()))

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
        functools.partial(_places.open, path, name, properties, durability=durability, **options)
    )


async def upgrade(
    path: str | os.PathLike[str],
    backup: str | os.PathLike[str] | None = None,
    *,
    despite_damage: bool = False,
) -> Upgrade:
    """Upgrade a ledger of an earlier format after a backup, as `exclusivelog.upgrade`. If
    cancelled, it takes its course."""
    return await _in_thread(_places.upgrade, path, backup, despite_damage=despite_damage)


# ---- state -------------------------------------------------------------------------------


class SharedState(_Handle["_state.SharedState[S, Op]"], Generic[S, Op]):
    """An `exclusivelog.SharedState`, awaitable; `sync` is that one. Made by `create`. Writes of
    many tasks share flushes."""

    @classmethod
    async def create(cls, topic: Topic, *args: Any, **options: Any) -> SharedState[S, Op]:
        """Open the state in a topic. Arguments as in `exclusivelog.SharedState`."""
        make = functools.partial(_state.SharedState, topic.sync, *args, **options)
        return cls(await _opened(make, _state.SharedState.close))

    read = _threaded(_state.SharedState[S, Op].read)
    write = _submitted(_state.SharedState[S, Op].write)
    snapshot = _threaded(Shared.snapshot)


class SharedMap(_Handle["_map.SharedMap[K, V]"], Generic[K, V]):
    """An `exclusivelog.SharedMap`, awaitable; `sync` is that one. Made by `create`. Writes of
    many tasks share flushes."""

    @classmethod
    async def create(cls, topic: Topic, *args: Any, **options: Any) -> SharedMap[K, V]:
        """Open the map in a topic. Arguments as in `exclusivelog.SharedMap`."""
        make = functools.partial(_map.SharedMap, topic.sync, *args, **options)
        return cls(await _opened(make, _map.SharedMap.close))

    get = _submitted(_map.SharedMap[K, V].get)
    get_or_default = _submitted(_map.SharedMap[K, V].get_or_default)
    scan = _submitted(_map.SharedMap[K, V].scan)
    list_keys = _submitted(_map.SharedMap[K, V].list_keys)
    at = _submitted(_map.SharedMap[K, V].at)
    diff = _submitted(_map.SharedMap[K, V].diff)

    @_as(_map.SharedMap.watch)
    def watch(  # noqa: D102
        self, key: K | None = None, *, prefix: Any = None, start: int | None = None
    ) -> MapWatch[K, V]:
        return MapWatch(self.sync, key, prefix, start)

    @_as(_map.SharedMap.put)
    async def put(self, key: K, value: V | None) -> V | None:  # noqa: D102
        return await _put(self.sync, key, value)

    @_as(_map.SharedMap.delete)
    async def delete(self, key: K) -> V | None:  # noqa: D102
        return await _put(self.sync, key, None)

    put_all = _submitted(_map.SharedMap[K, V].put_all)
    put_if_absent = _submitted(_map.SharedMap[K, V].put_if_absent)
    replace = _submitted(_map.SharedMap[K, V].replace)
    update = _submitted(_map.SharedMap[K, V].update)
    update_multiple = _submitted(_map.SharedMap[K, V].update_multiple)
    setdefault = _submitted(_map.SharedMap[K, V].setdefault)
    pop = _submitted(_map.SharedMap[K, V].pop)
    popitem = _submitted(_map.SharedMap[K, V].popitem)
    clear = _submitted(_map.SharedMap[K, V].clear)
    snapshot = _threaded(Shared.snapshot)


class MapWatch(_Following[_watch.MapChange[K, V]], Generic[K, V]):
    """An `exclusivelog.MapWatch`, awaitable: `async for change in watch`. It sees what is written
    after it was opened (by `async with`, or the first call), or from its `start` on."""

    def __init__(
        self, shared: _map.SharedMap[K, V], key: K | None, prefix: Any, start: int | None
    ) -> None:
        self._open = functools.partial(shared.watch, key, prefix=prefix, start=start)
        self._sync: _watch.MapWatch[K, V] | None = None

    async def _opened(self) -> _watch.MapWatch[K, V]:
        if self._sync is None:
            self._sync = await _opened(self._open, _watch.MapWatch.close)
        return self._sync

    async def read_next(self, timeout: float | None = None) -> _watch.MapChange[K, V]:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit),
        then raise WaitTimeoutError."""
        check_timeout(timeout)
        watch = await self._opened()
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return watch.read_next(timeout=0)
            except WaitTimeoutError:
                left = None if end is None else max(0.0, end - time.monotonic())
                watch.take(await Reader(watch.reader).read_next(left))

    def __aiter__(self) -> AsyncIterator[_watch.MapChange[K, V]]:
        return self.follow()

    async def close(self) -> None:
        """Close its reader; closing twice does nothing."""
        if self._sync is not None:
            await _in_thread(self._sync.close)

    async def __aenter__(self) -> Self:
        await self._opened()
        return self
