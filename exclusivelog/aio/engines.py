"""Engines, awaitable."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Unpack, cast, overload

from exclusivelog import _core
from exclusivelog.aio.calls import (
    Callbacks,
    drop_outcome,
    in_executor,
    in_steps,
    in_task,
    in_thread,
    like,
    opened,
    outcome_of,
)
from exclusivelog.aio.handles import Handle, Opening
from exclusivelog.aio.locks import Lock, acquire
from exclusivelog.aio.locks import OnLost as OnLockLost
from exclusivelog.aio.producers import Producer, UnloadFuture, begun
from exclusivelog.aio.readers import GroupReader
from exclusivelog.aio.roles import OnLost as OnRoleLost
from exclusivelog.aio.roles import Role
from exclusivelog.aio.topics import NamedTopic, OnFenced, OnWanted, Topic, with_callbacks
from exclusivelog.aio.transactions import Claim, Transaction
from exclusivelog.arguments import check_flag
from exclusivelog.engine import Engine as SyncEngine
from exclusivelog.errors import (
    ExclusiveLogError,
    OwnershipError,
    OwnershipLostError,
    WaitTimeoutError,
)
from exclusivelog.events import Event
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.producer import ProducerFuture
from exclusivelog.reader import Start
from exclusivelog.roles import ClaimsOfGroups, Groups
from exclusivelog.roles import RoleFuture as SyncRoleFuture
from exclusivelog.topic import AnyOptions, QueueOptions, check_options_of_many
from exclusivelog.transaction import Claim as SyncClaim
from exclusivelog.types import (
    AccessMode,
    ClaimInfo,
    EngineInfo,
    EngineStats,
    GroupInfo,
    ModeName,
    Move,
    Report,
    RoleInfo,
)
from exclusivelog.waits import give_up_all, together

__all__ = ["Engine"]

OWN_SECONDS = 0.25  # the longest wait of `own` in a thread, which cannot be interrupted

OnLost = Callable[[Claim, OwnershipLostError], object]


class ManyOptions(AnyOptions, QueueOptions, total=False):
    """The options of `Engine.producers`; `exclusivelog.Topic.producer` describes each."""

    on_fenced: OnFenced | None
    on_wanted: OnWanted | None
    claim: Claim | None


class Engine(Handle[SyncEngine]):
    """An awaitable wrapper of an `exclusivelog.Engine`, which is `sync`. `open` returns it.
    `aio.Engine(engine)` wraps an engine that threads use, too.

    Facts about the ledger, such as `topics()`, are read without an `await`.
    """

    # ---- facts ---------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Its id, never given to another engine on this ledger."""
        return self.sync.id

    @property
    def name(self) -> str:
        """Its name in errors and listings."""
        return self.sync.name

    @property
    def path(self) -> str:
        """The ledger's directory."""
        return self.sync.path

    @property
    def info(self) -> EngineInfo:
        """The facts about it that other processes read."""
        return self.sync.info

    @property
    def closed(self) -> bool:
        """True once it is closed, or inherited by a forked child."""
        return self.sync.closed

    @like(SyncEngine.engines)
    def engines(self) -> list[EngineInfo]:
        return self.sync.engines()

    @like(SyncEngine.inside)
    def inside(self) -> EngineInfo | None:
        return self.sync.inside()

    @like(SyncEngine.supports)
    def supports(self, capability: str) -> bool:
        return self.sync.supports(capability)

    @like(SyncEngine.stats)
    async def stats(self) -> EngineStats:
        return await in_thread(self.sync.stats)

    @like(SyncEngine.verify)
    async def verify(self) -> Report:
        return await in_thread(self.sync.verify)

    @like(SyncEngine.backup)
    async def backup(self, path: str | os.PathLike[str]) -> None:
        await in_thread(self.sync.backup, path)

    # ---- topics --------------------------------------------------------------------------

    def topic(self, name: str, create: bool = True) -> Topic:
        """Return the topic of that name. If it does not exist, it is created when it is awaited, or
        when something is opened on it. `create=False` raises TopicNotFoundError at once.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         topic = await engine.topic("orders")
        ...         return topic.next_offset
        >>> asyncio.run(example())
        0
        """
        return Topic(NamedTopic.find(self.sync, name, create))

    @like(SyncEngine.topics)
    def topics(self) -> list[str]:
        return self.sync.topics()

    @like(SyncEngine.delete_topic)
    async def delete_topic(self, name: str) -> None:
        await in_thread(self.sync.delete_topic, name)

    @overload
    def producers(
        self,
        names: Iterable[str],
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        wait: Literal[True] = True,
        **options: Unpack[ManyOptions],
    ) -> Opening[list[Producer]]: ...

    @overload
    def producers(
        self,
        names: Iterable[str],
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        wait: Literal[False],
        **options: Unpack[ManyOptions],
    ) -> Opening[list[asyncio.Task[Producer]]]: ...

    def producers(
        self,
        names: Iterable[str],
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        wait: bool = True,
        **options: Unpack[ManyOptions],
    ) -> Opening[list[Producer]] | Opening[list[asyncio.Task[Producer]]]:
        """Open a producer on each of many topics, as `exclusivelog.Engine.producers`: `await` the
        call, or enter it by `async with`. Waiting in the queues needs no thread. If cancelled,
        producers that were opened are closed, and the others leave their queues.

        - `wait`: True, the default: the producers, once all are granted. False: a task for each
          topic, with its producer; cancelling it removes that request.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.producers(["a", "b"], "exclusive") as (first, second):
        ...             return await first.send(b"1"), await second.send(b"2")
        >>> asyncio.run(example())
        (0, 0)
        """
        mode = AccessMode.parse(access_mode)
        check_options_of_many(mode, options, ManyOptions)
        check_flag("wait", wait)
        many = _Many(self.sync, names, mode, options)
        if not wait:
            return Opening("engine.producers(...)", list, many.begin, _end_all)
        return Opening("engine.producers(...)", list, many.open, _close_all)

    # ---- readers -------------------------------------------------------------------------

    def reader(
        self,
        topics: Iterable[str],
        *,
        group: str,
        generation: int | None = None,
        start: Start = "earliest",
        inclusive: bool = True,
        read_compacted: bool = False,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
        key_deserializer: Any = None,
    ) -> GroupReader:
        """Open one reader of a group on several topics; the parameters are those of
        `exclusivelog.Engine.reader`. It claims the topics, which may have to wait: so it is opened
        when it is awaited, entered by `async with`, or first read from.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.producers(["a", "b"]) as producers:
        ...             for producer in producers:
        ...                 await producer.send(b"to " + producer.topic.encode())
        ...         async with engine.reader(["a", "b"], group="billing") as reader:
        ...             return [(name, message.value) async for name, message in reader]
        >>> asyncio.run(example())
        [('a', b'to a'), ('b', b'to b')]
        """
        make = functools.partial(
            self.sync.reader,
            topics,
            group=group,
            generation=generation,
            start=start,
            inclusive=inclusive,
            read_compacted=read_compacted,
            trimmed=trimmed,
            deserializer=deserializer,
            key_deserializer=key_deserializer,
        )
        return GroupReader(cast(Any, None))._opens_late("engine.reader(...)", make)

    @like(SyncEngine.groups)
    def groups(self) -> list[GroupInfo]:
        return self.sync.groups()

    @like(SyncEngine.delete_group)
    async def delete_group(self, name: str) -> int:
        return await in_thread(self.sync.delete_group, name)

    # ---- claims --------------------------------------------------------------------------

    @overload
    def own(
        self,
        group: str | None,
        resources: Mapping[str, int | None],
        timeout: float | None = None,
        *,
        on_lost: OnLost | None = None,
    ) -> Opening[Claim]: ...
    @overload
    def own(
        self,
        group: Mapping[str, int | None],
        *,
        timeout: float | None = None,
        on_lost: OnLost | None = None,
    ) -> Opening[Claim]: ...
    def own(
        self,
        group: str | Mapping[str, int | None] | None = None,
        resources: Mapping[str, int | None] | None = None,
        timeout: float | None = None,
        *,
        on_lost: OnLost | None = None,
    ) -> Opening[Claim]:
        """Claim resources, as `exclusivelog.Engine.own`: `await` the call, or enter it by `async
        with`. `on_lost` is called in the loop; it may be a coroutine function. If cancelled, a
        claim that was granted is released.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.own("reports", {"march": None}) as claim:
        ...             return claim.is_valid, claim.generations
        >>> asyncio.run(example())
        (True, {'march': 1})
        """
        begin = functools.partial(self._own, group, resources, timeout, on_lost)
        return Opening("engine.own(...)", Claim, begin, Claim.release)

    async def _own(
        self, group: Any, resources: Any, timeout: float | None, on_lost: OnLost | None
    ) -> Claim:
        callbacks: Callbacks[SyncClaim, Claim] = Callbacks(Claim)
        lost: Any = callbacks.of(on_lost)
        end = _core.monotonic() + (timeout or 0.0)
        while True:
            left = max(0.0, end - _core.monotonic())
            seconds = min(left, OWN_SECONDS)
            claim = functools.partial(self.sync.own, group, resources, seconds, on_lost=lost)
            try:
                return callbacks.twin(await opened(claim, SyncClaim.release))
            except WaitTimeoutError:  # a stopped process blocks all changes; None: without limit
                if timeout is not None and left <= OWN_SECONDS:
                    raise
            except OwnershipError as error:
                if left <= OWN_SECONDS or not error.retriable:
                    raise

    @like(SyncEngine.claims)
    def claims(self, group: str | None = None) -> list[ClaimInfo]:
        return self.sync.claims(group)

    # ---- roles ---------------------------------------------------------------------------

    def role(
        self,
        name: str,
        *,
        topics: Iterable[str] = (),
        groups: Groups = (),
        claims: ClaimsOfGroups = MappingProxyType({}),
        access_mode: AccessMode | ModeName = AccessMode.WAIT_FOR_EXCLUSIVE,
        priority: int = 0,
        timeout: float | None = None,
        settle: float = 0.0,
        on_lost: OnRoleLost | None = None,
    ) -> Opening[Role]:
        """Become the only holder of a role, as `exclusivelog.Engine.role`: `await` the call, or
        enter it by `async with`. Waiting in the role's queue needs no thread.

        `on_lost` is called in the loop; it may be a coroutine function. If cancelled, the request
        leaves the queue, and a role that was granted is released.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.role("billing", topics=["invoices"]) as role:
        ...             invoices = await role.producer("invoices")
        ...             return role.epoch, await invoices.send(b"no. 1")
        >>> asyncio.run(example())
        (1, 0)
        """

        async def begin() -> Role:
            callbacks: Callbacks[Any, Role] = Callbacks(Role)
            ask = functools.partial(
                self.sync.role_async,
                name,
                topics=topics,
                groups=groups,
                claims=claims,
                access_mode=access_mode,
                priority=priority,
                timeout=timeout,
                settle=settle,
                on_lost=callbacks.of(on_lost),
            )
            future = await opened(ask, SyncRoleFuture.give_up)
            return callbacks.twin(await outcome_of(future, future.give_up))

        return Opening("engine.role(...)", Role, begin, Role.close)

    role_async = in_task(role)

    @like(SyncEngine.roles)
    def roles(self) -> list[RoleInfo]:
        return self.sync.roles()

    @like(SyncEngine.delete_role)
    async def delete_role(self, name: str) -> None:
        await in_thread(self.sync.delete_role, name)

    # ---- locks ---------------------------------------------------------------------------

    def lock(
        self,
        name: str,
        timeout: float | None = None,
        *,
        priority: int = 0,
        on_lost: OnLockLost | None = None,
    ) -> Opening[Lock]:
        """Wait for a lock that one process at a time holds, as `exclusivelog.Engine.lock`: `await`
        the call, or enter it by `async with`. Waiting needs no thread.

        `on_lost` is called in the loop; it may be a coroutine function. If cancelled, the request
        leaves the queue, and a lock that was granted is released.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.lock("nightly") as lock:
        ...             return lock.epoch, lock.is_valid
        >>> asyncio.run(example())
        (1, True)
        """
        begin = functools.partial(acquire, self.sync, name, timeout, priority, on_lost)
        return Opening("engine.lock(...)", Lock, begin, Lock.close)

    # ---- transactions --------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Begin a transaction, for `async with`; see `exclusivelog.Engine.transaction`.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.topic("orders").producer() as producer:
        ...             async with engine.transaction() as txn:
        ...                 await producer.send(b"debit", transaction=txn)
        ...                 await producer.send(b"credit", transaction=txn)
        ...             return txn.offsets[producer]
        >>> asyncio.run(example())
        range(0, 2)
        """
        return Transaction(self.sync.transaction())

    # ---- hand-over -----------------------------------------------------------------------

    async def unload(
        self,
        topics: str | Iterable[str],
        to: str,
        timeout: float = 10.0,
        *,
        groups: Iterable[str] = (),
        producer: str | None = None,
    ) -> list[Move]:
        """Move the ownership of topics to another engine, as `exclusivelog.Engine.unload`. If
        cancelled, topics that have not been released stay with their owners."""
        return await (
            await self.unload_async(topics, to, timeout, groups=groups, producer=producer)
        )

    async def unload_async(
        self,
        topics: str | Iterable[str],
        to: str,
        timeout: float = 10.0,
        *,
        groups: Iterable[str] = (),
        producer: str | None = None,
    ) -> UnloadFuture:
        """Begin to move topics, and return a task; cancelling it ends the moves of topics that have
        not been released.

        >>> async def example():
        ...     async with aio.open(path, "a") as a, aio.open(path, "b") as b:
        ...         topic = await a.topic("orders")
        ...         moving = await a.unload_async("orders", to=b.id)
        ...         return [move.state for move in await moving]
        >>> asyncio.run(example())
        ['assigned']
        """
        begin = functools.partial(
            self.sync.unload_async, topics, to, timeout, groups=groups, producer=producer
        )
        return await begun(begin)

    @like(SyncEngine.cancel_unload)
    async def cancel_unload(self, topics: str | Iterable[str]) -> list[str]:
        return await in_thread(self.sync.cancel_unload, topics)

    def history(
        self, topic: str | None = None, *, group: str | None = None, role: str | None = None
    ) -> AsyncIterator[Event]:
        """Iterate over every change of ownership so far, as `exclusivelog.Engine.history`.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.topic("orders").producer("exclusive"):
        ...             pass
        ...         return [event.kind async for event in engine.history()]
        >>> asyncio.run(example())
        ['grant', 'release']
        """
        return in_steps(functools.partial(self.sync.history, topic, group=group, role=role))


class _Many:
    """The producers of one call of `Engine.producers`."""

    def __init__(
        self, engine: SyncEngine, names: Iterable[str], mode: AccessMode, options: ManyOptions
    ) -> None:
        self._engine, self._names, self._mode, self._options = engine, names, mode, options
        self._callbacks: Callbacks[SyncProducer, Producer]

    async def _request(self) -> list[ProducerFuture]:
        self._callbacks = Callbacks(Producer)
        given = with_callbacks(self._options, self._callbacks)

        def call() -> list[ProducerFuture]:
            return self._engine.producers(self._names, self._mode, wait=False, **given)

        return await opened(call, give_up_all)

    async def open(self) -> list[Producer]:
        """All producers, once they are granted; none is left if one fails, or if cancelled."""
        futures = await self._request()
        end = functools.partial(give_up_all, futures)
        try:
            await outcome_of(together(futures), end)
        except ExclusiveLogError:
            await in_thread(end)
            raise
        return [self._callbacks.twin(await outcome_of(each, end)) for each in futures]

    async def begin(self) -> list[asyncio.Task[Producer]]:
        """A task for each producer."""
        return [self._task(each) for each in await self._request()]

    def _task(self, future: ProducerFuture) -> asyncio.Task[Producer]:
        task = asyncio.create_task(self._outcome(future))

        def give_up(task: asyncio.Task[Producer]) -> None:
            if task.cancelled():  # maybe before its first step
                ending = in_executor(asyncio.get_running_loop(), future.give_up)
                ending.add_done_callback(drop_outcome)

        task.add_done_callback(give_up)
        return task

    async def _outcome(self, future: ProducerFuture) -> Producer:
        return self._callbacks.twin(await outcome_of(future, future.give_up))


async def _close_all(producers: Iterable[Producer]) -> None:
    for producer in producers:
        await producer.close()


async def _end_all(tasks: Iterable[asyncio.Task[Producer]]) -> None:
    """Cancel the requests that wait, and close what was granted."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Producer):
            await outcome.close()
