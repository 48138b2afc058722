"""Awaitable readers. They read in the loop's own thread. At the end of a topic, one thread waits on
behalf of all tasks."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from exclusivelog import _core, threads
from exclusivelog._core import Message
from exclusivelog.aio.calls import Steps, in_steps, in_thread, like
from exclusivelog.aio.handles import Openable
from exclusivelog.arguments import check_timeout
from exclusivelog.errors import ExclusiveLogError, TopicTerminatedError, WaitTimeoutError
from exclusivelog.messages import import_pyarrow
from exclusivelog.reader import Found, Start, check_following
from exclusivelog.reader import GroupReader as SyncGroupReader
from exclusivelog.reader import Reader as SyncReader
from exclusivelog.reads import called_by, this_caller
from exclusivelog.waits import READER_LOOK_UP_SECONDS

__all__ = ["GroupReader", "Message", "Reader"]

if TYPE_CHECKING:
    import pyarrow as pa

M = TypeVar("M")
T = TypeVar("T")

# How often the thread that waits at the end of a topic checks whether any task still waits.
SLICE_SECONDS = 0.25

# ---- waiting at the end of a topic ---------------------------------------------------------


class Changing(Protocol):
    """What tasks wait for. `key`: the same for those that one thread can wait for; `path`: of the
    ledger."""

    key: tuple[int, int]
    path: str

    def mark(self) -> int:
        """A number that changes with it."""

    def await_mark(self, seen: int, seconds: float) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""


class End:
    """The end of a reader's topic."""

    def __init__(self, reader: SyncReader) -> None:
        self.key = id(reader._ledger), reader.topic_id
        self.path = reader._store.path
        self._reader = reader

    def mark(self) -> int:
        """A number that changes with every append."""
        return self._reader.cursor.mark()

    def await_mark(self, seen: int, seconds: float) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""
        self._reader.cursor.await_mark(seen, seconds)


class Watch:
    """A thread that sleeps at the end of a topic, on behalf of all tasks that wait there."""

    lock = threading.Lock()
    _there: ClassVar[dict[tuple[int, int], Watch]] = {}

    def __init__(self, changing: Changing) -> None:
        self._key = changing.key
        self._changing = changing
        # {task's future: the mark that it has seen}.
        self._waiting: dict[asyncio.Future[None], int] = {}

    @classmethod
    def of(cls, changing: Changing) -> Watch:
        """Return the watch that waits for this."""
        _core.this_process()  # in a forked child, a thread of the parent may hold the lock
        with cls.lock:
            watch = cls._there.get(changing.key)
            if watch is None:
                watch = cls(changing)
                run = threading.Thread(target=watch._run, name="exclusivelog-watch", daemon=True)
                threads.start(changing.path, run)
                cls._there[changing.key] = watch
            return watch

    async def wait(self, seen: int, timeout: float | None) -> None:
        """Return when the topic's mark differs from `seen`, or after `seconds`."""
        future = asyncio.get_running_loop().create_future()
        with self.lock:
            self._waiting[future] = seen
            if self._there.get(self._key) is not self:  # the thread has just ended: read again
                _wake_up(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self.lock:
                self._waiting.pop(future, None)

    def _run(self) -> None:
        try:
            idle = 0
            while idle < 2:  # stay for a moment, because readers usually wait again soon
                mark = self._changing.mark()
                idle = 0 if self._wake(mark) else idle + 1
                self._changing.await_mark(mark, SLICE_SECONDS)
        except ExclusiveLogError:
            pass  # the engine was closed; the tasks that wait raise that themselves
        finally:
            with self.lock:
                del self._there[self._key]
                self._wake(None)

    def _wake(self, mark: int | None) -> bool:
        """Wake the tasks that have not seen this mark. Returns whether any task waits."""
        # Not item by item: a collection in between may let other threads change it.
        waiting = self._waiting.copy()
        for future, seen in waiting.items():
            if seen != mark:
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    future.get_loop().call_soon_threadsafe(_wake_up, future)
        return bool(waiting)


def _wake_up(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def wait_for_any(readers: Sequence[SyncReader], marks: Sequence[int], seconds: float) -> None:
    """Return when the mark of one of the readers' topics has changed, or after so many seconds."""
    if len(readers) == 1:
        return await Watch.of(End(readers[0])).wait(marks[0], seconds)
    waits = [
        asyncio.ensure_future(Watch.of(End(reader)).wait(mark, seconds))
        for reader, mark in zip(readers, marks, strict=True)
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _forget_watches() -> None:
    """Reset in a forked child: it has neither the threads nor the holder of the lock."""
    Watch.lock = threading.Lock()
    Watch._there = {}


_core.in_forked_child(_forget_watches)


# ---- readers -----------------------------------------------------------------------------


class Following(Openable[T], Generic[T, M]):
    """The base of readers and of watches of maps."""

    @abc.abstractmethod
    async def read_next(self, timeout: float | None = None) -> M:
        """Return the next message or change."""

    async def follow(self, timeout: float | None = None) -> AsyncIterator[M]:
        """Iterate over the messages or changes, and wait for new ones at the end. It stops if none
        comes for `timeout` seconds (default: None, no limit), or if the topic is terminated."""
        while True:
            try:
                found = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield found


class Reading(Following[T, M], Generic[T, M]):
    """The base of both kinds of readers."""

    def __init__(self, sync: T) -> None:
        super().__init__(sync)
        self._steps = Steps()

    @property
    @abc.abstractmethod
    def _parts(self) -> Sequence[SyncReader]:
        """The readers of single topics."""

    async def read_next(self, timeout: float | None = None) -> M:
        """Return the next message; wait for it up to `timeout` seconds (default: None, no limit),
        then raise WaitTimeoutError. A reader of several topics returns (topic, message)."""
        check_timeout(timeout)
        if self._make is not None:
            await self._opened()
        if self._steps.too_many():
            await asyncio.sleep(0)
        sync: Any = self.sync
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            # Taken before reading, so that any later append ends the wait.
            marks = [reader.cursor.mark() for reader in self._parts]
            found: M | None = sync._read_known()
            if found is not None:
                return found
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return await self._last(timeout)
            # Poll, too, because a process may die after its commit and before its notification.
            poll = READER_LOOK_UP_SECONDS
            await wait_for_any(self._parts, marks, poll if left is None else min(left, poll))

    async def _last(self, timeout: float | None) -> M:
        """The next message up to now, after `timeout` seconds have passed."""
        await self._look_up()
        sync: Any = self.sync
        found: M | None = sync._read_known() if self._is_remote else None
        if found is None:
            raise sync._nothing_came(timeout)
        return found

    async def read_batch(self, max_messages: int) -> list[M]:
        """Return up to `max_messages` next messages, without waiting; an empty list at the end.
        Other tasks do not run while they are read."""
        await self._opened()
        if self._steps.too_many():
            await asyncio.sleep(0)
        sync: Any = self.sync
        found: list[M] = sync._read_known_batch(max_messages)
        if not found and self._is_remote:
            await self._look_up()
            found = sync._read_known_batch(max_messages)
        return found

    @property
    def _is_remote(self) -> bool:
        """Must other machines be asked for what is there?"""
        return self._parts[0].cursor.is_remote

    async def _look_up(self) -> None:
        """Ask them, in a thread: the loop runs other tasks meanwhile."""
        for reader in self._parts:
            if reader.cursor.is_remote:
                await in_thread(reader.cursor.look_up)

    def __aiter__(self) -> AsyncIterator[M]:
        return self._steps_through() if self._make is None else self._opened_first()

    def _steps_through(self) -> AsyncIterator[M]:
        sync: Any = self.sync
        return in_steps(sync.__iter__)

    async def _opened_first(self) -> AsyncIterator[M]:
        await self._opened()
        async for found in self._steps_through():
            yield found

    async def values(
        self, *, follow: bool = False, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        """Iterate over the values only, up to the present end; with `follow=True`, wait for new
        ones at the end, with `timeout` as in `follow()`. A reader of several topics returns
        (topic, value)."""
        check_following(follow, timeout)
        await self._opened()
        sync: Any = self.sync
        while True:
            async for value in in_steps(sync.values):
                yield value
            if not follow:
                return
            try:
                found = await self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield sync._value_of(found)


class Reader(Reading[SyncReader, Message]):
    """An awaitable wrapper of an `exclusivelog.Reader`, which is `sync`. `Topic.reader` returns it;
    for one task at a time. `async for` reads up to the present end; `follow()` waits there for more
    messages.

    The reader of a group is opened, and its predecessor fenced, when it is awaited, entered by
    `async with`, or first read from. Any other reader is open at once.

    >>> async def example():
    ...     async with aio.open(path) as engine:
    ...         topic = engine.topic("orders")
    ...         async with topic.producer() as producer, topic.reader(group="billing") as reader:
    ...             await producer.send(b"hello")
    ...             message = await reader.read_next(timeout=1)
    ...             await reader.commit()
    ...             return message.value, reader.position
    >>> asyncio.run(example())
    (b'hello', 1)
    """

    @property
    def _parts(self) -> Sequence[SyncReader]:
        return (self.sync,)

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self.sync.topic

    @property
    def position(self) -> int:
        """The offset of the next message to read; the topic may not have it yet."""
        return self.sync.position

    @property
    def group(self) -> str | None:
        """The name of its group; None without a group."""
        return self.sync.group

    @property
    def generation(self) -> int | None:
        """The generation of its claim on (group, topic); None without a group."""
        return self.sync.generation

    @like(SyncReader.seek)
    def seek(self, start: Start, *, inclusive: bool = True) -> None:
        self.sync.seek(start, inclusive=inclusive)

    @like(SyncReader.has_message_available)
    def has_message_available(self) -> bool:
        return self.sync.has_message_available()

    async def read_arrow(
        self, max_bytes: int = 1 << 20, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch | None:
        """Return the next messages as a pyarrow RecordBatch, as `exclusivelog.Reader.read_arrow`;
        None at the end. Other tasks do not run while they are read, so do not set `max_bytes`
        (default: 1 MiB) above a few MiB.

        For that reason this reader is no Arrow stream. `await asyncio.to_thread(pyarrow.table,
        reader.sync)` reads all of it as a table."""
        await self._opened()
        if "pyarrow" not in sys.modules:
            await in_thread(import_pyarrow)  # in a thread, as the import takes a tenth of a second
        if self._steps.too_many():
            await asyncio.sleep(0)
        return self.sync.read_arrow(max_bytes, columns)

    @like(SyncReader.commit)
    async def commit(self) -> None:
        await in_thread(called_by, this_caller(), self.sync.commit)


class GroupReader(Reading[SyncGroupReader, Found]):
    """An awaitable wrapper of an `exclusivelog.GroupReader`, which is `sync`. `Engine.reader`
    returns it; for one task at a time. `async for` reads up to the present ends; `follow()` waits
    there for more messages.

    It is opened, and its predecessors fenced, when it is awaited, entered by `async with`, or first
    read from.
    """

    @property
    def _parts(self) -> Sequence[SyncReader]:
        return self.sync.readers

    @property
    def topics(self) -> list[str]:
        """The names of its topics."""
        return self.sync.topics

    @property
    def group(self) -> str:
        """The name of its group."""
        return self.sync.group

    @property
    def generations(self) -> dict[str, int]:
        """{topic: generation} of the reader's claim."""
        return self.sync.generations

    @property
    def positions(self) -> dict[str, int]:
        """{topic: the offset of the next message to read}."""
        return self.sync.positions

    @like(SyncGroupReader.seek)
    def seek(self, start: Start, *, topic: str | None = None, inclusive: bool = True) -> None:
        self.sync.seek(start, topic=topic, inclusive=inclusive)

    @like(SyncGroupReader.has_message_available)
    def has_message_available(self) -> bool:
        return self.sync.has_message_available()

    @like(SyncGroupReader.commit)
    async def commit(self) -> None:
        await in_thread(called_by, this_caller(), self.sync.commit)
