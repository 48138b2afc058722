"""The futures of this library: an exception that a signal handler raises, such as a time limit,
cannot leave them locked.

`concurrent.futures.Future` takes its lock in Python. A handler that raises there, before the block
is entered or while it is left, leaves the lock taken for ever: and the thread that is to settle the
future waits for ever, with all that it does for others.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any, TypeVar

from exclusivelog import _core

__all__ = ["Future", "is_free"]

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """As its base, with a lock that is taken and released in C.

    >>> future = Future()
    >>> future.set_result(1)
    >>> future.result()
    1
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _core.Condition()


def is_free(future: Future[Any]) -> bool:
    """Does no other thread have its lock? `concurrent.futures.wait` leaves it taken for ever if it
    is interrupted."""
    free: bool = future._condition.acquire(blocking=False)
    if free:
        future._condition.release()
    return free
