"""Topics, awaitable."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

from exclusivelog.aio.calls import Callbacks, in_task, in_thread, like, opened, outcome_of
from exclusivelog.aio.handles import Opening, Wrapper, check_loop
from exclusivelog.aio.owners import OwnerWatch
from exclusivelog.aio.producers import Producer
from exclusivelog.aio.readers import Reader
from exclusivelog.aio.terms import Terms
from exclusivelog.aio.transactions import Claim, unwrapped
from exclusivelog.arguments import is_internal
from exclusivelog.engine import Engine as SyncEngine
from exclusivelog.errors import ProducerFencedError, TopicNotFoundError
from exclusivelog.producer import Producer as SyncProducer
from exclusivelog.producer import ProducerFuture
from exclusivelog.reader import Message, Start
from exclusivelog.terms import OnFenced as SyncOnFenced
from exclusivelog.topic import TermOptions, check_term_options
from exclusivelog.topic import Topic as SyncTopic
from exclusivelog.types import (
    UNCHANGED,
    AccessMode,
    Announcement,
    ModeName,
    OwnerInfo,
    Retention,
    TopicStats,
    TransferInfo,
    Unchanged,
    WaiterInfo,
)

__all__ = ["Topic"]

R = TypeVar("R")

OnFenced = Callable[[Producer, ProducerFencedError], object]
OnWanted = Callable[[Producer], object]


class NamedTopic:
    """The synchronous topic of a name, which may not exist yet. Creating it waits for the writer
    lock, and so is done in a thread, when something is opened on it."""

    def __init__(self, engine: SyncEngine, name: str, found: SyncTopic | None = None) -> None:
        self.name = name
        self._engine, self._found = engine, found

    @classmethod
    def find(cls, engine: SyncEngine, name: str, create: bool) -> NamedTopic:
        """Find the topic of that name; TopicNotFoundError if it is missing and `create` is
        False."""
        try:
            return cls(engine, name, engine.topic(name, create=False))
        except TopicNotFoundError:
            if create and not engine.backend.readonly and not is_internal(name):
                return cls(engine, name)
        # This raises an error, or makes `__events__`.
        return cls(engine, name, engine.topic(name, create))

    def made(self) -> SyncTopic:
        """The topic, created if it is missing, which may wait."""
        if self._found is None:
            self._found = self._engine.topic(self.name)
        return self._found

    def existing(self) -> SyncTopic:
        """The topic; TopicNotFoundError if it does not exist yet."""
        if self._found is None:
            try:
                self._found = self._engine.topic(self.name, create=False)
            except TopicNotFoundError as error:
                end = "" if str(error).endswith("?") else "."
                raise TopicNotFoundError(
                    f"{error}{end} `await engine.topic({self.name!r})` makes it"
                ) from None
        return self._found

    @property
    def exists(self) -> bool:
        """Whether it exists by now."""
        try:
            return self.existing() is not None
        except TopicNotFoundError:
            return False

    async def run(self, method: Callable[..., R], *args: Any) -> R:
        """Run a synchronous method in a thread, which creates the topic first if it is missing."""
        return await in_thread(lambda: method(self.made(), *args))

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}>"

    async def make(self) -> None:
        """Create the topic, unless it is known to exist."""
        check_loop()
        if self._found is None:
            await in_thread(self.made)

    async def open_producer(
        self, access_mode: AccessMode | ModeName, options: dict[str, Any]
    ) -> Producer:
        """Open a producer; if cancelled, the request leaves the queue."""
        callbacks: Callbacks[SyncProducer, Producer] = Callbacks(Producer)
        given = with_callbacks(options, callbacks)
        future = await opened(
            lambda: self.made().producer_async(access_mode, **given), ProducerFuture.give_up
        )
        return callbacks.twin(await outcome_of(future, future.give_up))


class _ByName(Wrapper[SyncTopic]):
    """A topic that may not exist yet."""

    def __init__(self, sync: SyncTopic | NamedTopic) -> None:
        if isinstance(sync, SyncTopic):
            sync = NamedTopic(sync.engine, sync.name, sync)
        self.name, self._named, self._shown = sync.name, sync, sync

    @property
    def sync(self) -> SyncTopic:  # type: ignore[override]
        """The synchronous topic; TopicNotFoundError if it does not exist yet."""
        return self._named.existing()

    def __repr__(self) -> str:
        return f"<aio.Topic {self.name!r}>"


class Topic(_ByName):
    """An awaitable wrapper of an `exclusivelog.Topic`, which is `sync`. `Engine.topic` returns it.

    `await` it to create the topic if it does not exist; opening something on it does this, too.
    Facts about the topic, such as `next_offset`, are read without an `await`.
    """

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._named.make().__await__()
        return self

    # ---- facts ---------------------------------------------------------------------------

    @property
    def id(self) -> int:
        """Its number on the ledger."""
        return self.sync.id

    @property
    def epoch(self) -> int:
        """The number of owners that the topic has had (rule B1)."""
        return self.sync.epoch

    @property
    def first_offset(self) -> int:
        """The offset of the first message that was not trimmed."""
        return self.sync.first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return self.sync.next_offset

    @property
    def owner(self) -> OwnerInfo | None:
        """The session that owns the topic; None if no live engine owns it."""
        return self.sync.owner

    @property
    def holders(self) -> list[OwnerInfo]:
        """The sessions that may write: the owner's, or those of the shared producers."""
        return self.sync.holders

    @property
    def transfer(self) -> TransferInfo | None:
        """The topic's hand-over to another engine; None if there is none (rules E1, E3)."""
        return self.sync.transfer

    @property
    def transfers(self) -> list[TransferInfo]:
        """The topic's hand-over, if there is one, and those of single shared producers."""
        return self.sync.transfers

    @property
    def waiters(self) -> list[WaiterInfo]:
        """The producers in the topic's queue, in the order of their promotion (rule D1)."""
        return self.sync.waiters

    @property
    def kind(self) -> str:
        """What the topic holds: "messages", "map", "state" or "events"."""
        return self.sync.kind

    @property
    def serializers(self) -> dict[str, str | None]:
        """The names of a map's serialisers, by "key" and "value"; empty for other kinds."""
        return self.sync.serializers

    @property
    def announcement(self) -> Announcement | None:
        """The last announcement of an owner of the topic; None if there is none."""
        return self.sync.announcement

    @like(SyncTopic.stats)
    async def stats(self, storage: bool = True) -> TopicStats:
        return await self._named.run(SyncTopic.stats, storage)

    def __len__(self) -> int:
        """The number of its messages, without those that were trimmed."""
        return len(self.sync)

    def __bool__(self) -> bool:
        """Always True, also if it has no messages."""
        return True

    def watch_owner(self, start: Start = "latest") -> OwnerWatch:
        """Watch every change of the topic's owner as it comes; the parameter and the events are
        those of `exclusivelog.Topic.watch_owner`. It is opened when it is awaited, entered by
        `async with`, or first read from.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         topic = await engine.topic("orders")
        ...         async with topic.watch_owner() as watch:
        ...             async with topic.producer("exclusive"):
        ...                 return (await watch.read_next(timeout=5)).kind
        >>> asyncio.run(example())
        'grant'
        """
        watch = OwnerWatch(cast(Any, None))
        return watch._opens_late(
            "topic.watch_owner(...)", lambda: self._named.made().watch_owner(start)
        )

    # ---- write ---------------------------------------------------------------------------

    def producer(
        self,
        access_mode: AccessMode | ModeName = AccessMode.SHARED,
        *,
        name: str | None = None,
        priority: int = 0,
        topic_epoch: int | None = None,
        timeout: float | None = None,
        settle: float = 0.0,
        properties: Mapping[str, str] | None = None,
        announce: Mapping[str, str] | None = None,
        linger: float = 0.0,
        max_batch_messages: int = 100_000,
        max_batch_bytes: int = 1 << 20,
        max_pending_bytes: int = 64 << 20,
        serializer: Any = None,
        on_fenced: OnFenced | None = None,
        on_wanted: OnWanted | None = None,
        follow: bool = True,
        claim: Claim | None = None,
    ) -> Opening[Producer]:
        """Open a producer: `await` the call, or enter it by `async with`. Waiting in the queue
        needs no thread.

        Parameters and errors are those of `exclusivelog.Topic.producer`. `on_fenced` and
        `on_wanted` are called in the loop, with a producer of this package; they may be coroutine
        functions. If cancelled, the request leaves the queue, and a topic that was granted is
        released.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async with engine.topic("orders").producer("wait_for_exclusive") as producer:
        ...             return await producer.send(b"hello"), producer.topic_epoch
        >>> asyncio.run(example())
        (0, 1)
        """
        options = {
            "name": name,
            "priority": priority,
            "topic_epoch": topic_epoch,
            "timeout": timeout,
            "settle": settle,
            "properties": properties,
            "announce": announce,
            "linger": linger,
            "max_batch_messages": max_batch_messages,
            "max_batch_bytes": max_batch_bytes,
            "max_pending_bytes": max_pending_bytes,
            "serializer": serializer,
            "on_fenced": on_fenced,
            "on_wanted": on_wanted,
            "follow": follow,
            "claim": claim,
        }
        begin = functools.partial(self._named.open_producer, access_mode, options)
        return Opening("topic.producer(...)", Producer, begin, Producer.close)

    producer_async = in_task(producer)

    def terms(
        self,
        name: str | None = None,
        priority: int = 0,
        *,
        timeout: float | None = None,
        settle: float = 0.0,
        **options: Unpack[TermOptions],
    ) -> Terms:
        """Lead in a loop, as `exclusivelog.Topic.terms`: `async for term in topic.terms()`, and in
        it `async with term as producer`. The loss of the topic cancels the body of that block, and
        only the body. Waiting in the queue needs no thread.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         async for term in engine.topic("orders").terms(name="worker-1"):
        ...             async with term as producer:
        ...                 return term.epoch, await producer.send(b"hello")
        >>> asyncio.run(example())
        (1, 0)
        """
        check_term_options(options)

        def request(seconds: float | None, on_fenced: SyncOnFenced) -> ProducerFuture:
            return self._named.made().producer_async(
                AccessMode.WAIT_FOR_EXCLUSIVE,
                name=name,
                priority=priority,
                timeout=seconds,
                settle=settle,
                follow=False,
                on_fenced=on_fenced,
                **options,
            )

        return Terms(request, timeout)

    # ---- keep ----------------------------------------------------------------------------

    @like(SyncTopic.compact)
    async def compact(self) -> int:
        return await self._named.run(SyncTopic.compact)

    @like(SyncTopic.trim)
    async def trim(
        self,
        before: int | dt.datetime | None = None,
        max_bytes: int | None = None,
        *,
        dry_run: bool = False,
    ) -> int:
        trim = functools.partial(SyncTopic.trim, dry_run=dry_run)
        return await self._named.run(trim, before, max_bytes)

    @like(SyncTopic.retention)
    async def retention(
        self,
        max_age: float | dt.timedelta | Unchanged | None = UNCHANGED,
        max_bytes: int | Unchanged | None = UNCHANGED,
        keep: Literal["keys"] | Unchanged | None = UNCHANGED,
    ) -> Retention:
        return await self._named.run(SyncTopic.retention, max_age, max_bytes, keep)

    @like(SyncTopic.compression)
    async def compression(self, method: Literal["lz4", "zstd"] | None) -> None:
        await self._named.run(SyncTopic.compression, method)

    @like(SyncTopic.terminate)
    async def terminate(self) -> int:
        return await self._named.run(SyncTopic.terminate)

    # ---- read ----------------------------------------------------------------------------

    def reader(
        self,
        start: Start = "earliest",
        *,
        inclusive: bool = True,
        read_compacted: bool = False,
        group: str | None = None,
        generation: int | None = None,
        trimmed: Literal["error", "earliest"] = "error",
        deserializer: Any = None,
        key_deserializer: Any = None,
    ) -> Reader:
        """Open a reader; the parameters are those of `exclusivelog.Topic.reader`.

        Without a group it is open at once. With a group it claims (group, topic), which may have to
        wait: so it is opened when it is awaited, entered by `async with`, or first read from.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         topic = engine.topic("orders")
        ...         async with topic.producer() as producer:
        ...             await producer.send_many([b"a", b"b", b"c"])
        ...         return [message.value async for message in topic.reader(start=1)]
        >>> asyncio.run(example())
        [b'b', b'c']
        """

        def make() -> Any:
            return self._named.made().reader(
                start,
                inclusive=inclusive,
                read_compacted=read_compacted,
                group=group,
                generation=generation,
                trimmed=trimmed,
                deserializer=deserializer,
                key_deserializer=key_deserializer,
            )

        if group is None and self._named.exists:
            return Reader(make())
        return Reader(cast(Any, None))._opens_late("topic.reader(...)", make)

    @overload
    def __getitem__(self, which: int) -> Coroutine[Any, Any, Message]: ...
    @overload
    def __getitem__(self, which: slice) -> Coroutine[Any, Any, list[Message]]: ...
    def __getitem__(self, which: int | slice) -> Coroutine[Any, Any, Message | list[Message]]:
        """Read without a reader, as `exclusivelog.Topic`: `await topic[-1]`, `await topic[10:20]`;
        and `async for message in topic`.

        >>> async def example():
        ...     async with aio.open(path) as engine:
        ...         topic = engine.topic("orders")
        ...         async with topic.producer() as producer:
        ...             await producer.send_many([b"a", b"b"])
        ...         return (await topic[-1]).value, [message.value async for message in topic]
        >>> asyncio.run(example())
        (b'b', [b'a', b'b'])
        """
        return self._named.run(SyncTopic.__getitem__, which)

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over the messages from the earliest up to the present end."""
        return self.reader().__aiter__()

    __iter__ = None  # it would never end: each index is a coroutine


def with_callbacks(options: Any, callbacks: Callbacks[Any, Any]) -> dict[str, Any]:
    """The options for the synchronous call: its callbacks run in the loop."""
    given: dict[str, Any] = {**options}
    for name in ("on_fenced", "on_wanted"):
        if name in given:
            given[name] = callbacks.of(given[name])
    if given.get("claim") is not None:
        given["claim"] = unwrapped("claim", given["claim"])
    return given
