"""Locks, awaitable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exclusivelog.aio.calls import Callbacks, opened, outcome_of
from exclusivelog.aio.handles import Handle
from exclusivelog.aio.losses import Loss
from exclusivelog.aio.transactions import Claim
from exclusivelog.backend import Opened
from exclusivelog.errors import OwnershipLostError, WaitTimeoutError
from exclusivelog.locks import Lock as SyncLock
from exclusivelog.locks import LockRequest

__all__ = ["Lock"]


class Lock(Handle[SyncLock]):
    """An awaitable wrapper of an `exclusivelog.Lock`, which is `sync`. `Engine.lock` returns it.

    The loss cancels nothing: ask `lost`, or wait for it in a task of its own.
    """

    def __init__(self, sync: SyncLock) -> None:
        super().__init__(sync)
        self._lost = Loss(sync.lost)

    @property
    def name(self) -> str:
        """Its name."""
        return self.sync.name

    @property
    def epoch(self) -> int:
        """The fencing token: it grows with every holder, and is never used again."""
        return self.sync.epoch

    @property
    def claim(self) -> Claim:
        """The claim for `claim=` of `topic.producer`: that producer sends only while the lock is
        held."""
        return Claim(self.sync.claim)

    @property
    def is_valid(self) -> bool:
        """True while the lock is held; each call reads the ledger."""
        return self.sync.is_valid

    @property
    def lost(self) -> Loss:
        """Whether the lock is not held any more: `if lock.lost`, or `await lock.lost.wait()`."""
        return self._lost

    def check(self) -> None:
        """Raise OwnershipLostError unless the lock is held."""
        self.sync.check()

    async def close(self) -> None:
        """Release it, as the synchronous lock; closing twice does nothing."""
        try:
            await super().close()
        finally:
            self._lost._tell()


OnLost = Callable[[Lock, OwnershipLostError], object]


async def acquire(
    engine: Opened, name: str, timeout: float | None, priority: int, on_lost: OnLost | None
) -> Lock:
    """Wait for a lock; if cancelled, the request leaves the queue."""
    callbacks: Callbacks[SyncLock, Lock] = Callbacks(Lock)

    def lose(lock: Lock, error: OwnershipLostError) -> object:
        lock.lost._tell()
        return None if on_lost is None else on_lost(lock, error)

    told: Any = callbacks.of(lose if on_lost is None or callable(on_lost) else on_lost)
    request = await opened(
        lambda: LockRequest(engine, name, timeout, priority, told), LockRequest.give_up
    )
    try:
        role = await outcome_of(request.future, request.give_up)
    except WaitTimeoutError as error:
        raise request.timed_out(error) from None
    return callbacks.twin(request.lock_of(role))
