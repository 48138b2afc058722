"""Watching who owns a topic, awaitable."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

from exclusivelog import _core
from exclusivelog.aio.readers import Following, Reader
from exclusivelog.arguments import check_timeout
from exclusivelog.errors import WaitTimeoutError
from exclusivelog.events import Event
from exclusivelog.owners import OwnerWatch as SyncOwnerWatch

__all__ = ["OwnerWatch"]


class OwnerWatch(Following[SyncOwnerWatch, Event]):
    """An awaitable wrapper of an `exclusivelog.OwnerWatch`, which is `sync`. `Topic.watch_owner`
    returns it. `async for event in watch` waits for changes without a limit."""

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.sync._reader)

    @property
    def position(self) -> int:
        """The offset in `__events__` from which it reads on."""
        return self.sync.position

    async def read_next(self, timeout: float | None = None) -> Event:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit),
        then raise WaitTimeoutError."""
        check_timeout(timeout)
        await self._opened()
        watch, reader = self.sync, self._reader
        end = None if timeout is None else _core.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - _core.monotonic())
            try:
                event = watch._event_of(await reader.read_next(left))
            except WaitTimeoutError:
                raise watch._nothing_came(timeout) from None
            if event is not None:
                return event

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.follow()
