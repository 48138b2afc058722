"""Watching who owns a topic, awaitable."""

from __future__ import annotations

from typing import Self

from exclusivelog import _core
from exclusivelog.aio.calls import in_thread
from exclusivelog.aio.readers import Following, Watch
from exclusivelog.arguments import check_timeout
from exclusivelog.events import Event
from exclusivelog.owners import OwnerWatch as SyncOwnerWatch
from exclusivelog.waits import READER_LOOK_UP_SECONDS

__all__ = ["OwnerWatch"]


class OwnerWatch(Following[SyncOwnerWatch, Event]):
    """An awaitable wrapper of an `exclusivelog.OwnerWatch`, which is `sync`. `Topic.watch_owner`
    returns it. `async for event in watch` waits for changes without a limit."""

    @property
    def position(self) -> int:
        """The place from which it reads on."""
        return self.sync.position

    async def read_next(self, timeout: float | None = None) -> Event:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit),
        then raise WaitTimeoutError."""
        check_timeout(timeout)
        await self._opened()
        watch, changes = self.sync, self.sync._changes
        end = None if timeout is None else _core.monotonic() + timeout
        while True:
            mark = changes.mark()  # before taking: a later change ends the wait
            event = watch._take()
            if event is not None:
                return event
            left = READER_LOOK_UP_SECONDS if end is None else end - _core.monotonic()
            if left <= 0:
                await in_thread(changes.catch_up)
                return watch._last(timeout)
            await Watch.of(changes).wait(mark, min(left, READER_LOOK_UP_SECONDS))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next change; waits for it without a limit."""
        return await self.read_next()
