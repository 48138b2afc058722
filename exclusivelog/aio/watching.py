"""Waiting at the end of a topic: one thread for all tasks that wait there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import ClassVar

from exclusivelog import threads
from exclusivelog.errors import ExclusiveLogError
from exclusivelog.reader import Reader

# The thread that sleeps at the end of a topic checks so often whether a task still waits.
SLICE_SECONDS = 0.25


class Watch:
    """A thread that sleeps at the end of a topic, on behalf of all tasks that wait there."""

    lock = threading.Lock()
    _there: ClassVar[dict[tuple[int, int], Watch]] = {}

    def __init__(self, key: tuple[int, int], reader: Reader) -> None:
        self._key = key
        self._reader = reader
        self._waiting: dict[asyncio.Future[None], int] = {}  # {task's future: what it has seen}

    @classmethod
    def of(cls, reader: Reader) -> Watch:
        """Return the watch at the end of this reader's topic."""
        key = id(reader.ledger), reader.topic_id
        with cls.lock:
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
        with self.lock:
            self._waiting[future] = seen
            if self._there.get(self._key) is not self:  # it has just ended: read again
                _wake_up(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self.lock:
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
            with self.lock:
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


async def wait_for_any(readers: Sequence[Reader], marks: Sequence[int], seconds: float) -> None:
    """Return when one of the readers' topics no longer has the mark that was seen, or so many
    seconds have passed."""
    if len(readers) == 1:
        return await Watch.of(readers[0]).wait(marks[0], seconds)
    waits = [
        asyncio.ensure_future(Watch.of(reader).wait(mark, seconds))
        for reader, mark in zip(readers, marks, strict=True)
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _forget_watches() -> None:
    """In a forked child: the threads, and the holder of the lock, are the parent's."""
    Watch.lock = threading.Lock()
    Watch._there = {}


os.register_at_fork(after_in_child=_forget_watches)
