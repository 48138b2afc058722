"""Locks that one process holds at a time: roles without parts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.backend import Opened
from exclusivelog.closing import Closing
from exclusivelog.errors import OwnershipLostError, WaitTimeoutError
from exclusivelog.losses import Loss
from exclusivelog.roles import Role, request_role
from exclusivelog.transaction import Claim
from exclusivelog.types import AccessMode

__all__ = ["Lock"]

OnLost = Callable[["Lock", OwnershipLostError], object]


class Lock(Closing):
    """A lock that this process holds. `engine.lock` returns it; threads may share it.

    It is held until its `with` block ends, or `close()` is called, or its engine closes or its
    process ends: dropping this object does not release it. It is not reentrant, and is entered
    once: `with` raises RuntimeError in an inner block or another thread.

    A process that is paused for longer than its `keepalive` loses the lock, and does not know that
    when it resumes. What must not happen then has to be checked where it takes effect:
    `topic.producer(claim=lock.claim)` and `transaction.require(lock)` do so for this log, and
    `epoch` is the fencing token for other systems.

    >>> with engine.lock("nightly") as lock:
    ...     lock.name, lock.epoch, lock.is_valid
    ('nightly', 1, True)
    >>> lock.is_valid, bool(lock.lost)
    (False, True)
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._lost = Loss(lambda: role.claim.is_valid)
        self._first_block = threading.Lock()

    @property
    def name(self) -> str:
        """Its name."""
        return self._role.name

    @property
    def epoch(self) -> int:
        """The fencing token: it grows with every holder, and is never used again."""
        return int(self._role.epoch)

    @property
    def claim(self) -> Claim:
        """The claim for `claim=` of `topic.producer`: that producer sends only while the lock is
        held."""
        return self._role.claim

    @property
    def is_valid(self) -> bool:
        """True while the lock is held; each call reads the ledger."""
        return self.claim.is_valid

    @property
    def lost(self) -> Loss:
        """Whether the lock is not held any more: `if lock.lost`, or `lock.lost.wait(timeout)`. See
        `Loss`."""
        return self._lost

    def check(self) -> None:
        """Raise OwnershipLostError unless the lock is held. `with lock` does so only if it was
        closed, or this process knows that it was lost."""
        self.claim.check()

    def _check_enters(self) -> None:
        """Let one block begin: the end of a second one would release the lock under the first."""
        self.claim._check_enters()
        if not self._first_block.acquire(blocking=False):
            raise RuntimeError(
                f"{self!r} was entered already, by an outer block or another thread, and its end "
                "releases the lock; acquire it there by another engine.lock, which waits"
            )

    def close(self) -> None:
        """Release it: the next waiter gets it in the same transaction. Closing a closed or lost
        lock does nothing."""
        try:
            self._role.close()
        finally:
            self._lost._tell()

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}, epoch {self.epoch}>"


class LockRequest:
    """A request for a lock: `future` has the role, and `lock_of` makes a lock of it."""

    def __init__(
        self,
        engine: Opened,
        name: str,
        timeout: float | None,
        priority: int,
        on_lost: OnLost | None,
    ) -> None:
        if on_lost is not None and not callable(on_lost):
            raise TypeError("on_lost takes a function of (lock, error)")
        self._engine, self._on_lost = engine, on_lost
        self._telling = _core.Lock()
        self._lock: Lock | None = None
        self._error: OwnershipLostError | None = None
        self.future = request_role(
            engine,
            name,
            (),
            (),
            {},
            AccessMode.WAIT_FOR_EXCLUSIVE,
            priority,
            timeout,
            0.0,
            self._lose,
            kind="lock",
        )

    def give_up(self) -> None:
        """Leave the queue. If the lock was granted already, release it."""
        self.future.give_up()

    def lock_of(self, role: Role) -> Lock:
        """The lock that was granted."""
        with self._telling:
            self._lock = lock = Lock(role)
            error = self._error
        if error is not None:  # lost since
            role._engine.call_soon(functools.partial(self._tell, lock, error))
        return lock

    def _lose(self, role: Role, error: OwnershipLostError) -> None:
        with self._telling:
            lock, self._error = self._lock, error
        if lock is not None:
            self._tell(lock, error)

    def _tell(self, lock: Lock, error: OwnershipLostError) -> None:
        lock.lost._tell()
        if self._on_lost is not None:
            self._on_lost(lock, error)

    def timed_out(self, error: WaitTimeoutError) -> WaitTimeoutError:
        """The error of a wait that was too long. The holder of a lock is an engine; says so if it
        is this one."""
        holder, backend = error.holder, self._engine.backend
        if holder is not None:
            text = str(error).replace(f"producer {holder.producer_name!r} of engine", "engine")
            own = holder.engine_id == backend.info.id
            error.args = (text + ". That is this engine: a lock is not reentrant" * own,)
        return error


def acquire(
    engine: Opened, name: str, timeout: float | None, priority: int, on_lost: OnLost | None
) -> Lock:
    """Wait for a lock; see `Engine.lock`."""
    request = LockRequest(engine, name, timeout, priority, on_lost)
    try:
        return request.lock_of(request.future.result())
    except WaitTimeoutError as error:
        raise request.timed_out(error) from None
    except BaseException:
        request.give_up()  # interrupted, perhaps
        raise
