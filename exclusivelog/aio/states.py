"""Awaitable shared states and maps. The calls of all tasks run in order, in the background thread
of the state, and share flushes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy as _copy
import datetime as dt
import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast, overload

from exclusivelog import _core, serde
from exclusivelog.aio.calls import deliverable, given_back, in_task, in_thread, like
from exclusivelog.aio.handles import Handle, Openable
from exclusivelog.aio.readers import Following, Reader
from exclusivelog.aio.topics import Topic
from exclusivelog.aio.transactions import Transaction, sync_transaction, unwrapped
from exclusivelog.arguments import check_timeout
from exclusivelog.errors import OffsetTrimmedError, TopicTerminatedError
from exclusivelog.state import map as _map
from exclusivelog.state import past as _past
from exclusivelog.state import state as _state
from exclusivelog.state.expiry import Ttl
from exclusivelog.state.map import NOTHING, Change, put_at_once
from exclusivelog.state.past import MapChange
from exclusivelog.state.shared import SNAPSHOT_EVERY, Shared, acknowledge
from exclusivelog.transaction import Claim as SyncClaim
from exclusivelog.transaction import HoldsClaim

__all__ = ["Change", "MapChange", "MapWatch", "SharedMap", "SharedState"]

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
S = TypeVar("S")
Op = TypeVar("Op")
R = TypeVar("R")
T = TypeVar("T")

At = int | dt.datetime

CALLS_PER_SWITCH = 8  # calls without a wait before other tasks run

# ---- calls between a loop and the background threads of states ---------------------------


class _Call:
    """A background call of a state, and the task that waits for it."""

    __slots__ = ("call", "future", "outcome", "state", "traffic", "waiter")

    def __init__(
        self, state: Shared, call: Callable[[], Any], waiter: asyncio.Future[Any], traffic: Traffic
    ) -> None:
        self.state, self.call, self.waiter, self.traffic = state, call, waiter, traffic
        self.future: concurrent.futures.Future[Any] | None = None
        # The outcome, if there is no future.
        self.outcome: tuple[Any, BaseException | None] = None, None

    def settled(self, _: object) -> None:
        """Callback of its future. Called in any thread."""
        self.traffic.arrive(self)

    def set_result(self, result: Any) -> None:
        """Set the result of a call whose writes are durable. Called in any thread."""
        self.outcome = result, None
        self.traffic.arrive(self)

    def set_exception(self, error: BaseException) -> None:
        """Set the error of a call whose writes may not be durable. Called in any thread."""
        self.outcome = None, error
        self.traffic.arrive(self)


class Traffic:
    """Passes calls of states between a loop and their threads. The calls of one iteration of the
    loop are submitted together, and one wake-up delivers all available outcomes. Otherwise the two
    threads would contend for the GIL at every call."""

    _of: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Traffic]] = (
        weakref.WeakKeyDictionary()
    )

    _newest: ClassVar[tuple[Callable[[], object], Traffic] | None] = None  # the last one found

    def __init__(self) -> None:
        self.leaving: list[_Call] = []
        self._arrived: deque[_Call] = deque()
        self._notified = False
        self._made = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Traffic:
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
        """Whether other tasks should run now: True after every few calls that did not wait. A
        switch costs more than such a call, but a task that makes only those must not block the
        loop."""
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
                call.future = call.state._submit(call.call)
            except Exception as error:
                call.waiter.set_exception(deliverable(error))
            else:
                call.future.add_done_callback(call.settled)

    def arrive(self, call: _Call) -> None:
        """Deliver the call's outcome. From any thread."""
        self._arrived.append(call)
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # its loop has ended
                call.waiter.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._notified = False  # reset first, so that later outcomes wake the loop again
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
                waiter.set_exception(deliverable(error))


async def called(state: Shared, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run a method of a state in its background thread. If cancelled, it stops waiting for the
    topic."""
    loop = asyncio.get_running_loop()
    traffic = Traffic.of(loop)
    mine = _Call(state, functools.partial(call, *args, **kwargs), loop.create_future(), traffic)
    traffic.send(mine, loop)
    try:
        result: R = await mine.waiter
        return result
    except asyncio.CancelledError:
        if mine.future is not None:
            mine.future.cancel()
            await given_back(functools.partial(state._give_up, mine.future))
        raise


async def written(
    state: Shared,
    transaction: Transaction | None,
    call: Callable[..., R],
    *args: Any,
    **kwargs: Any,
) -> R:
    """Run a method that writes, in a transaction if one is given."""
    if transaction is not None:
        kwargs["transaction"] = sync_transaction(transaction)
    return await called(state, call, *args, **kwargs)


async def put(shared: _map.SharedMap[K, V], key: K, value: V | None) -> V | None:
    """`put`. It runs in the loop's own thread if only the flush has to be waited for: that costs a
    fraction of a call in another thread."""
    loop = asyncio.get_running_loop()
    traffic = Traffic.of(loop)
    # Earlier calls must come first.
    found = None if traffic.leaving else put_at_once(shared, key, value)
    if found is None:
        return await called(shared, shared.put, key, value)
    result: V | None
    result, appended = found
    if appended is None or appended.flushed:
        if traffic.yields():
            await asyncio.sleep(0)
        return result
    mine = _Call(shared, int, loop.create_future(), traffic)
    acknowledge(shared, mine, result, appended)
    was: V | None = await mine.waiter
    return was


# ---- what maps and states have in common --------------------------------------------------


class _Bindable(Protocol):
    """A claim, a role or a lock of this package."""

    @property
    def sync(self) -> SyncClaim | HoldsClaim:
        """The synchronous object."""


def _checked(topic: Topic, call: str) -> Topic:
    if not isinstance(topic, Topic):
        raise TypeError(
            f"topic={topic!r}: exclusivelog.aio.{call} takes a topic of exclusivelog.aio. That is "
            f"what engine.topic(...) returns there; use exclusivelog.{call} for this one"
        )
    return topic


class _Shared(Openable[T], Generic[T]):
    """The base of maps and states."""

    _topic: Topic | None = None

    @classmethod
    def wrap(cls, sync: T) -> Any:
        """Wrap a synchronous state, which is open already."""
        made = cls.__new__(cls)
        Handle.__init__(made, sync)
        return made

    @property
    def topic(self) -> Topic:
        """The topic that stores it."""
        if self._topic is None:
            shared: Any = self.sync
            self._topic = Topic(shared.topic)
        return self._topic

    async def snapshot(self) -> int:
        """Store a snapshot, so that opening the state need not read earlier messages (rule I4).
        Returns the offset after the last message that it includes: `topic.trim(before=...)` can
        remove the messages before it.

        Raises StateError if the state could not be restored from it."""
        shared: Any = self.sync
        return int(await in_thread(shared.snapshot))

    snapshot_async = in_task(snapshot)


# ---- states ------------------------------------------------------------------------------


class SharedState(_Shared[_state.SharedState[S, Op]], Generic[S, Op]):
    """An awaitable wrapper of an `exclusivelog.SharedState`, which is `sync`. `await` it, or enter
    it by `async with`, to open it. The parameters are those of `exclusivelog.SharedState`; writes
    of many tasks share flushes.

    >>> def add(state, op):
    ...     state[op["name"]] = state.get(op["name"], 0) + op["amount"]
    >>> async def example():
    ...     async with aio.open(path) as engine:
    ...         async with aio.SharedState(engine.topic("state"), dict, add) as accounts:
    ...             await accounts.write(lambda state: [{"name": "a", "amount": 5}])
    ...             return await accounts.read(lambda state: state["a"], latest=True)
    >>> asyncio.run(example())
    5
    """

    def __init__(
        self,
        topic: Topic,
        initial: Callable[[], S] = dict,  # type: ignore[assignment]
        apply: Callable[[S, Op], S | None] | None = None,
        *,
        encode: Callable[[Any], bytes] = serde.exact.dumps,
        decode: Callable[[bytes], Any] = serde.exact.loads,
        encode_state: Callable[[S], bytes] | None = None,
        decode_state: Callable[[bytes], S] | None = None,
        snapshot_every: int | None = SNAPSHOT_EVERY,
        copy: Callable[[Any], Any] | None = _copy.deepcopy,
        timeout: float | None = None,
        claim: _Bindable | None = None,
    ) -> None:
        self._topic = _checked(topic, "SharedState")
        bound = None if claim is None else unwrapped("claim", claim)

        def make() -> _state.SharedState[S, Op]:
            return _state.SharedState(
                topic._named.made(),
                initial,
                apply,
                encode=encode,
                decode=decode,
                encode_state=encode_state,
                decode_state=decode_state,
                snapshot_every=snapshot_every,
                copy=copy,
                timeout=timeout,
                claim=bound,
            )

        self._opens_late("exclusivelog.aio.SharedState(...)", make)

    @like(_state.SharedState.read)
    async def read(self, fn: Callable[[S], R], latest: bool = False) -> R:
        return await in_thread(self.sync.read, fn, latest)

    @like(_state.SharedState.write)
    async def write(
        self,
        ops_fn: Callable[[S], Iterable[Op]],
        read_fn: Callable[[S], R] | None = None,
        *,
        transaction: Transaction | None = None,
    ) -> R | None:
        return await written(self.sync, transaction, self.sync.write, ops_fn, read_fn)

    read_async = in_task(read)
    write_async = in_task(write)


# ---- maps --------------------------------------------------------------------------------


class SharedMap(_Shared[_map.SharedMap[K, V]], Generic[K, V]):
    """An awaitable wrapper of an `exclusivelog.SharedMap`, which is `sync`. `await` it, or enter it
    by `async with`, to open it. The parameters are those of `exclusivelog.SharedMap`; writes of
    many tasks share flushes. `async for key in map` iterates over the keys of one moment.

    >>> async def example():
    ...     async with aio.open(path) as engine:
    ...         async with aio.SharedMap(engine.topic("settings")) as settings:
    ...             await settings.put("retries", 3)
    ...             changed = await settings.update("retries", lambda old: old + 1)
    ...             return changed.value, await settings.items()
    >>> asyncio.run(example())
    (4, [('retries', 4)])
    """

    def __init__(
        self,
        topic: Topic,
        key: Any = serde.str,
        value: Any = serde.msgpack,
        *,
        prefix: str | bytes | None = None,
        snapshot_every: int | None = SNAPSHOT_EVERY,
        timeout: float | None = None,
        claim: _Bindable | None = None,
    ) -> None:
        self._topic = _checked(topic, "SharedMap")
        bound = None if claim is None else unwrapped("claim", claim)

        def make() -> _map.SharedMap[K, V]:
            return _map.SharedMap(
                topic._named.made(),
                key,
                value,
                prefix=prefix,
                snapshot_every=snapshot_every,
                timeout=timeout,
                claim=bound,
            )

        self._opens_late("exclusivelog.aio.SharedMap(...)", make)

    # ---- read ----------------------------------------------------------------------------

    @overload
    async def get(self, key: K, default: None = None, *, latest: bool = False) -> V | None: ...
    @overload
    async def get(self, key: K, default: D, *, latest: bool = False) -> V | D: ...
    @like(_map.SharedMap.get)
    async def get(self, key: K, default: Any = None, *, latest: bool = False) -> Any:
        return await called(self.sync, self.sync.get, key, default, latest=latest)

    @like(_map.SharedMap.get_or_default)
    async def get_or_default(self, key: K, default: D, latest: bool = False) -> V | D:
        return await called(self.sync, self.sync.get_or_default, key, default, latest)

    @like(_map.SharedMap.scan)
    async def scan(
        self,
        fn: Callable[[K, V], object] | None = None,
        *,
        filter: Callable[[K], object] | None = None,
        latest: bool = False,
    ) -> list[tuple[K, V]]:
        return await called(self.sync, self.sync.scan, fn, filter=filter, latest=latest)

    @like(_map.SharedMap.list_keys)
    async def list_keys(
        self, latest: bool = False, *, prefix: str | bytes | None = None
    ) -> list[K]:
        return await called(self.sync, self.sync.list_keys, latest, prefix=prefix)

    @like(_map.SharedMap.expires_at)
    async def expires_at(self, key: K, *, latest: bool = False) -> dt.datetime | None:
        return await called(self.sync, self.sync.expires_at, key, latest=latest)

    async def keys(self) -> list[K]:
        """Return all keys of one moment, in the order in which they were first put."""
        return await self.list_keys()

    async def items(self) -> list[tuple[K, V]]:
        """Return the (key, value) pairs of one moment."""
        return await self.scan()

    async def values(self) -> list[V]:
        """Return the values of one moment."""
        return [value for _, value in await self.scan()]

    async def __aiter__(self) -> AsyncIterator[K]:
        for key in await self.list_keys():
            yield key

    # ---- write ---------------------------------------------------------------------------

    @like(_map.SharedMap.put)
    async def put(
        self,
        key: K,
        value: V | None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> V | None:
        if transaction is not None or ttl is not None:
            return await written(self.sync, transaction, self.sync.put, key, value, ttl=ttl)
        return await put(self.sync, key, value)

    @like(_map.SharedMap.put_all)
    async def put_all(
        self,
        values: Mapping[K, V],
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> None:
        await written(self.sync, transaction, self.sync.put_all, values, ttl=ttl)

    @like(_map.SharedMap.put_if_absent)
    async def put_if_absent(
        self,
        key: K,
        value: V | None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> Change[V]:
        return await written(self.sync, transaction, self.sync.put_if_absent, key, value, ttl=ttl)

    @like(_map.SharedMap.replace)
    async def replace(
        self,
        key: K,
        expected: V | None,
        value: V | None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> Change[V]:
        replace = self.sync.replace
        return await written(self.sync, transaction, replace, key, expected, value, ttl=ttl)

    @overload
    async def update(
        self,
        key: K,
        fn: Callable[[V | None], V | None],
        /,
        *,
        with_key: Literal[False] = False,
        ttl: Ttl | None = ...,
        transaction: Transaction | None = None,
    ) -> Change[V]: ...
    @overload
    async def update(
        self,
        key: K,
        fn: Callable[[K, V | None], V | None],
        /,
        *,
        with_key: Literal[True],
        ttl: Ttl | None = ...,
        transaction: Transaction | None = None,
    ) -> Change[V]: ...
    @overload
    async def update(
        self,
        values: Mapping[K, V] | Iterable[tuple[K, V]] = ...,
        /,
        *,
        transaction: Transaction | None = None,
        **more: V,
    ) -> None: ...
    @like(_map.SharedMap.update)
    async def update(
        self,
        key: Any = (),
        fn: Any = None,
        /,
        *,
        with_key: Any = False,
        ttl: Any = NOTHING,
        transaction: Any = None,
        **more: Any,
    ) -> Change[V] | None:
        if fn is None and not (transaction is None or isinstance(transaction, Transaction)):
            more["transaction"], transaction = transaction, None  # a key of this name
        given: Any = self.sync.update
        update = functools.partial(given, key, fn, with_key=with_key, ttl=ttl, **more)
        changed: Change[V] | None = await written(self.sync, transaction, update)
        return changed

    @like(_map.SharedMap.update_multiple)
    async def update_multiple(
        self,
        filter: Callable[[K], object] | None,
        fn: Callable[[K, V], V | None],
        *,
        ttl: Ttl | None = NOTHING,
        transaction: Transaction | None = None,
    ) -> dict[K, V | None]:
        update = self.sync.update_multiple
        return await written(self.sync, transaction, update, filter, fn, ttl=ttl)

    @like(_map.SharedMap.setdefault)
    async def setdefault(
        self,
        key: K,
        default: V | None = None,
        *,
        ttl: Ttl | None = None,
        transaction: Transaction | None = None,
    ) -> V | None:
        return await written(self.sync, transaction, self.sync.setdefault, key, default, ttl=ttl)

    @like(_map.SharedMap.delete)
    async def delete(self, key: K, *, transaction: Transaction | None = None) -> V | None:
        return await self.put(key, None, transaction=transaction)

    @like(_map.SharedMap.pop)
    async def pop(
        self, key: K, default: Any = NOTHING, *, transaction: Transaction | None = None
    ) -> Any:
        return await written(self.sync, transaction, self.sync.pop, key, default)

    @like(_map.SharedMap.popitem)
    async def popitem(self, *, transaction: Transaction | None = None) -> tuple[K, V]:
        return await written(self.sync, transaction, self.sync.popitem)

    @like(_map.SharedMap.clear)
    async def clear(self, *, transaction: Transaction | None = None) -> None:
        await written(self.sync, transaction, self.sync.clear)

    # ---- changes, and the past -----------------------------------------------------------

    def watch(
        self,
        key: K | None = None,
        *,
        prefix: str | bytes | None = None,
        start: Literal["earliest", "latest"] | At | None = None,
        existing: bool = False,
    ) -> MapWatch[K, V]:
        """Watch every change of one key, of the keys that begin with `prefix`, or of all keys, as
        `exclusivelog.SharedMap.watch`. It is opened when it is awaited, entered by `async with`, or
        first read from; without `start`, it returns the changes after that.

        >>> async def example():
        ...     async with aio.open(path) as engine, aio.SharedMap(engine.topic("jobs")) as jobs:
        ...         async with jobs.watch(prefix="job/") as watch:
        ...             await jobs.put("job/1", "new")
        ...             await jobs.put("other", 1)
        ...             return [(one.key, one.value) async for one in watch.follow(timeout=0)]
        >>> asyncio.run(example())
        [('job/1', 'new')]
        """
        make = functools.partial(
            self.sync.watch, key, prefix=prefix, start=start, existing=existing
        )
        watch: MapWatch[K, V] = MapWatch(cast(Any, None))
        return watch._opens_late("shared_map.watch(...)", make)

    @like(_map.SharedMap.at)
    async def at(self, when: At) -> dict[K, V]:
        return await called(self.sync, self.sync.at, when)

    @like(_map.SharedMap.diff)
    async def diff(self, a: At, b: At) -> dict[K, tuple[V | None, V | None]]:
        return await called(self.sync, self.sync.diff, a, b)

    # ---- tasks ---------------------------------------------------------------------------

    get_async = in_task(get)
    get_or_default_async = in_task(get_or_default)
    scan_async = in_task(scan)
    list_keys_async = in_task(list_keys)
    expires_at_async = in_task(expires_at)
    put_async = in_task(put)
    put_all_async = in_task(put_all)
    put_if_absent_async = in_task(put_if_absent)
    replace_async = in_task(replace)
    update_async = in_task(update)
    update_multiple_async = in_task(update_multiple)
    setdefault_async = in_task(setdefault)
    delete_async = in_task(delete)
    pop_async = in_task(pop)
    popitem_async = in_task(popitem)
    clear_async = in_task(clear)
    at_async = in_task(at)
    diff_async = in_task(diff)


class MapWatch(Following[_past.MapWatch[K, V], MapChange[K, V]], Generic[K, V]):
    """An awaitable wrapper of an `exclusivelog.MapWatch`, which is `sync`. `SharedMap.watch`
    returns it. `async for change in watch` waits for changes without a limit."""

    @property
    def position(self) -> int:
        """The offset of the next message that it reads."""
        return self.sync.position

    async def read_next(self, timeout: float | None = None) -> MapChange[K, V]:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit),
        then raise WaitTimeoutError."""
        check_timeout(timeout)
        await self._opened()
        end = None if timeout is None else _core.monotonic() + timeout
        self.sync._check_enters()
        while not self.sync._changes:
            left = None if end is None else max(0.0, end - _core.monotonic())
            try:
                self.sync._take(await Reader(self.sync.reader).read_next(left))
            except OffsetTrimmedError as error:
                raise self.sync._fallen_behind(error) from error
        return self.sync._pop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MapChange[K, V]:
        """The next change; waits for it without a limit."""
        try:
            return await self.read_next()
        except TopicTerminatedError:
            raise StopAsyncIteration from None
