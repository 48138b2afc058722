"""Learning that what a process holds is lost, awaitable."""

from __future__ import annotations

import asyncio

from exclusivelog import _core
from exclusivelog.arguments import check_timeout
from exclusivelog.losses import Loss as SyncLoss
from exclusivelog.waits import SLICE_SECONDS

__all__ = ["Loss"]


class Loss:
    """Whether a term or a lock is lost; as `exclusivelog.Loss`, whose `wait` is awaited.

    The body of `async with term` is cancelled at the loss, so it need not ask; this is for a lock,
    and for other tasks.
    """

    def __init__(self, sync: SyncLoss) -> None:
        self._sync = sync
        self._event = asyncio.Event()

    @property
    def _is_told(self) -> bool:
        return self._event.is_set()

    def _tell(self) -> None:
        """It is lost, or was given up. Called in the loop's thread."""
        self._sync._tell()
        self._event.set()

    def is_set(self) -> bool:
        """The same as `bool(...)`. It reads the ledger, and does not wait."""
        return self._sync.is_set()

    def __bool__(self) -> bool:
        return self.is_set()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is lost. Returns True then, and False after `timeout` seconds (None, the
        default: without limit). The wait needs no thread."""
        check_timeout(timeout)
        end = None if timeout is None else _core.monotonic() + timeout
        while not self.is_set():
            left = SLICE_SECONDS if end is None else end - _core.monotonic()
            if left <= 0:
                return False
            # A loss that no callback tells of, such as a closed engine, is seen at the next look.
            await self._told_within(min(left, SLICE_SECONDS))
        return True

    async def _told_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._event.wait()
        except TimeoutError:
            if not limit.expired():
                raise

    def __repr__(self) -> str:
        return f"<aio.Loss {self.is_set()}>"
