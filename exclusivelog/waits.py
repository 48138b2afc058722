"""Waits: how long, and such that a forked child does not inherit them.

A signal handler may fork while its thread waits, and return in the child, too. What the child
waits for then will be done by a thread that only its parent has; so every wait looks up now
and then (rule C5).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SLICE_SECONDS = 1.0


def in_slices(
    wait: Callable[[float], bool], timeout: float | None, check: Callable[[], object]
) -> bool:
    """`wait(seconds)` again and again until it is true, or `timeout` seconds (None: for ever)
    are over: False. In between, `check()` may raise.

    >>> in_slices(lambda seconds: True, None, check=int)
    True
    >>> in_slices(lambda seconds: False, 0.0, check=int)
    False
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_SECONDS if end is None else max(0.0, end - time.monotonic())
        if wait(min(left, SLICE_SECONDS)):
            return True
        check()
        if end is not None and time.monotonic() >= end:
            return False


def settled(future: Future[Any], seconds: float) -> bool:
    """Wait until the future is done, for so many seconds; is it?

    Not by its `exception`: its TimeoutError could not be told from one that a signal handler
    raises. Nor by `concurrent.futures.wait`, which an interrupt leaves with its locks taken.
    """
    with future._condition:
        if not future.done():
            future._condition.wait(seconds)
    return future.done()


def check_timeout(timeout: object) -> None:
    """TypeError or ValueError unless it is a number of seconds, 0 or more, or None: for ever."""
    if timeout is not None:
        check_seconds(timeout, "timeout", "seconds from 0 on, or None")


def check_seconds(value: object, argument: str, takes: str) -> None:
    """TypeError or ValueError unless it is a number of seconds, 0 or more."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{argument}={value!r}: it takes {takes}")
    if not value >= 0:
        raise ValueError(f"{argument}={value!r}: it takes {takes}")
