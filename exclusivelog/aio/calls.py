"""Calls that wait, made by a task: in a thread, and cancelled without a trace.

A thread costs a task some 50 to 100 microseconds, and the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from exclusivelog import threads
from exclusivelog.errors import LedgerError

R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

GIVEN_BACK_SECONDS = 1.0  # a cancelled call waits so long for its clean-up

# ---- docstrings --------------------------------------------------------------------------


def like(method: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function the docstring of a synchronous method; not its example, which does not
    await. The signature is the function's own."""

    def take(function: F) -> F:
        function.__doc__ = (method.__doc__ or "").partition(">>>")[0].rstrip()
        return function

    return take


def in_task(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], asyncio.Task[R]]:
    """The method's second form, which returns a task; cancelling it leaves no trace."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[R]:
        return asyncio.create_task(method(self, *args, **kwargs))

    functools.update_wrapper(call, method)
    call.__name__, call.__doc__ = f"{method.__name__}_async", f"`{method.__name__}`, as a task."
    return call


# ---- threads -----------------------------------------------------------------------------


async def in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run `call(*args, **kwargs)` in a thread of the loop's executor. If cancelled, it takes its
    course."""
    return await in_executor(asyncio.get_running_loop(), functools.partial(call, *args, **kwargs))


def in_executor(loop: asyncio.AbstractEventLoop, call: Callable[[], R]) -> asyncio.Future[R]:
    """`call()` in a thread of the loop's executor, or LedgerError: then it is never called,
    though the executor has it in its queue by then."""
    outcome: concurrent.futures.Future[R] = concurrent.futures.Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        with threads.needed("asyncio's executor"):
            loop.run_in_executor(None, run)
    except LedgerError:
        if outcome.cancel():
            raise
    return asyncio.wrap_future(outcome, loop=loop)


async def opened(call: Callable[[], R], close: Callable[[R], object]) -> R:
    """Return what `call()` opens, in a thread. If cancelled meanwhile, pass that to `close` as
    soon as it is there, even if the loop has ended by then. Wait for that, but not for long: the
    ledger may be blocked."""
    made: list[R] = []
    abandoned = threading.Event()

    def run() -> None:
        made.append(call())
        if abandoned.is_set():
            give_back()

    def give_back() -> None:
        with contextlib.suppress(IndexError):  # it is not there yet, or the other thread closes it
            close(made.pop())

    loop = asyncio.get_running_loop()
    running = in_executor(loop, run)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        abandoned.set()
        running.add_done_callback(drop_outcome)
        giving_back = in_executor(loop, give_back)
        await asyncio.wait({running, giving_back}, timeout=GIVEN_BACK_SECONDS)
        raise
    return made.pop()


def drop_outcome(future: asyncio.Future[Any]) -> None:
    """Retrieve its exception, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


async def outcome_of(future: concurrent.futures.Future[R], end: Callable[[], object]) -> R:
    """Wait for a request that was made. If cancelled, call `end` in a thread."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        await asyncio.shield(in_thread(end))
        raise


# ---- long work in the loop -----------------------------------------------------------------

STEPS_PER_SWITCH = 960  # messages that a task reads without a wait, until other tasks may run,
STEPS_PER_CLOCK = 16  # ... or fewer: so often it looks at the clock,
SWITCH_SECONDS = 0.005  # ... and lets others run after this time


class Steps:
    """Counts steps that did not wait: a task that makes no others must not block the loop."""

    __slots__ = ("_count", "_since")

    def __init__(self) -> None:
        self._count, self._since = 0, time.monotonic()

    def too_many(self) -> bool:
        """Count one more; should other tasks run before it?"""
        self._count += 1
        if self._count % STEPS_PER_CLOCK:
            return False
        if self._count < STEPS_PER_SWITCH and time.monotonic() - self._since < SWITCH_SECONDS:
            return False
        self._count, self._since = 0, time.monotonic()
        return True


async def in_steps(begin: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
    """Everything that this iterator gives; other tasks may run now and then, as by `Steps`."""
    count, since = 0, time.monotonic()
    for found in begin():
        yield found
        count += 1
        if count % STEPS_PER_CLOCK == 0 and (
            count >= STEPS_PER_SWITCH or time.monotonic() - since > SWITCH_SECONDS
        ):
            await asyncio.sleep(0)  # the next one is not taken yet
            count, since = 0, time.monotonic()


# ---- callbacks ---------------------------------------------------------------------------

_running: set[asyncio.Future[Any]] = set()  # callbacks that are coroutines; loops do not keep them
# {id of a synchronous object: the awaitable one}, which keeps it. Weak: what an application has
# dropped is closed at once.
_twins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Callbacks(Generic[T, R]):
    """Calls an application's functions in its loop. Their first argument, a synchronous object, is
    replaced by the awaitable one, which `make` makes."""

    def __init__(self, make: Callable[[T], R]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()

    def twin(self, sync: T) -> R:
        """The awaitable object, always the same. In the loop's thread."""
        found: R | None = _twins.get(id(sync))
        if found is None:
            found = _twins[id(sync)] = self._make(sync)
        return found

    def of(self, function: Any) -> Any:
        """What has `function` called in the loop; any thread may call it. None stays None."""
        if not callable(function):
            return function

        def tell(sync: T, *more: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._call, function, sync, *more)

        return tell

    def _call(self, function: Callable[..., object], sync: T, *more: Any) -> None:
        result = function(self.twin(sync), *more)
        if inspect.isawaitable(result):
            running = asyncio.ensure_future(result)
            _running.add(running)
            running.add_done_callback(_running.discard)
