"""Calls that recurse deeply, in a thread whose stack suffices."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from exclusivelog import _core
from exclusivelog.futures import Future

R = TypeVar("R")

DEEP_STACK = 16 << 20
_stacks = threading.RLock()  # the size is one for all threads that are started


def _renew_after_fork() -> None:
    global _stacks
    _stacks = threading.RLock()


_core.in_forked_child(_renew_after_fork)


def with_deep_stack(call: Callable[[], R]) -> R:
    """Run a call that recurses in a thread whose stack suffices, and wait for it.

    >>> with_deep_stack(lambda: threading.current_thread().name)
    'exclusivelog-deep'
    """
    future: Future[R] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # the caller raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, name="exclusivelog-deep", daemon=True)
    with _stacks:
        usual = threading.stack_size(DEEP_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return future.result()
