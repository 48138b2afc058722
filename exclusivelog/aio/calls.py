"""Run the waiting calls of a task in a thread, and cancel them.

A call in a thread costs 50 to 100 microseconds more; the loop runs other tasks meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from exclusivelog import _core, threads
from exclusivelog.errors import LedgerError
from exclusivelog.futures import Future

R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

GIVEN_BACK_SECONDS = 1.0  # the longest time that a cancelled call waits for its clean-up

# ---- docstrings --------------------------------------------------------------------------


def like(method: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function the docstring of a synchronous method, without its example, which does not
    await."""

    def take(function: F) -> F:
        function.__doc__ = (method.__doc__ or "").partition(">>>")[0].rstrip()
        return function

    return take


def in_task(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], asyncio.Task[R]]:
    """The method's second form, which returns a task. Cancelling that task is the same as
    cancelling an await of the method."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[R]:
        return asyncio.create_task(method(self, *args, **kwargs))

    functools.update_wrapper(call, method)
    call.__name__, call.__doc__ = f"{method.__name__}_async", f"`{method.__name__}`, as a task."
    return call


# ---- threads -----------------------------------------------------------------------------


async def in_thread(call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run `call(*args, **kwargs)` in a thread of the loop's executor. It runs to its end even if
    cancelled."""
    return await in_executor(asyncio.get_running_loop(), functools.partial(call, *args, **kwargs))


def in_executor(loop: asyncio.AbstractEventLoop, call: Callable[[], R]) -> asyncio.Future[R]:
    """Run `call()` in a thread of the loop's executor. If no thread can be started, raises
    LedgerError, and never calls it, although it is in the executor's queue."""
    outcome: Future[R] = Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(deliverable(error))

    try:
        with threads.needed("asyncio's executor"):
            loop.run_in_executor(None, run)
    except LedgerError:
        if outcome.cancel():
            raise
    return asyncio.wrap_future(outcome, loop=loop)


async def opened(call: Callable[[], R], close: Callable[[R], object]) -> R:
    """Run `call()` in a thread, and return what it opens. If cancelled meanwhile, pass the result
    to `close` when `call` returns, even after the loop's end. The cancelled task waits for that
    only `GIVEN_BACK_SECONDS`, because the ledger may be blocked."""
    made: list[R] = []
    abandoned = threading.Event()

    def run() -> None:
        made.append(call())
        if abandoned.is_set():
            give_back()

    def give_back() -> None:
        with contextlib.suppress(IndexError):
            # Empty if `call` has not returned yet, or the other thread closes the result.
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


async def shielded(running: asyncio.Future[R]) -> R:
    """Wait for a future, which goes on if this task is cancelled. Nobody may ask for its exception
    then, and asyncio does not log that."""
    running.add_done_callback(drop_outcome)
    return await asyncio.shield(running)


# Exceptions with a meaning of their own to asyncio: it refuses them in a future, or takes them for
# the end of an iterator or task.
UNDELIVERABLE = (
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
)


def deliverable(error: BaseException) -> BaseException:
    """The error, or a RuntimeError in place of one that cannot be raised through a future.

    >>> deliverable(ValueError("x")), deliverable(StopIteration(1))
    (ValueError('x'), RuntimeError('the call raised StopIteration(1)'))
    """
    if not isinstance(error, UNDELIVERABLE):
        return error
    raised = RuntimeError(f"the call raised {error!r}")
    raised.__cause__ = error
    return raised


async def outcome_of(future: concurrent.futures.Future[R], end: Callable[[], object]) -> R:
    """Wait for the future of a request. If cancelled, call `end` in a thread."""
    try:
        return await shielded(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        await given_back(end)
        raise


async def given_back(end: Callable[[], object]) -> None:
    """Call `end` in a thread, for a task that was cancelled. It waits for that only
    `GIVEN_BACK_SECONDS`, because the ledger may be blocked, or no thread free."""
    ending = in_executor(asyncio.get_running_loop(), end)
    ending.add_done_callback(drop_outcome)
    await asyncio.wait({ending}, timeout=GIVEN_BACK_SECONDS)


# ---- long work in the loop -----------------------------------------------------------------

# A task that reads messages without waiting lets other tasks run after so many messages, or after
# so many seconds; it reads the clock only after every `STEPS_PER_CLOCK` messages.
STEPS_PER_SWITCH = 960
STEPS_PER_CLOCK = 16
SWITCH_SECONDS = 0.005


class Steps:
    """Counts the steps of a task that never waits, so that it does not block the loop."""

    __slots__ = ("_count", "_since")

    def __init__(self) -> None:
        self._count, self._since = 0, _core.monotonic()

    def too_many(self) -> bool:
        """Count a step. Returns whether other tasks should run before it."""
        self._count += 1
        if self._count % STEPS_PER_CLOCK:
            return False
        if self._count < STEPS_PER_SWITCH and _core.monotonic() - self._since < SWITCH_SECONDS:
            return False
        self._count, self._since = 0, _core.monotonic()
        return True


async def in_steps(begin: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
    """Iterate over an iterator asynchronously; let other tasks run as often as `Steps` does."""
    count, since = 0, _core.monotonic()
    for found in begin():
        yield found
        count += 1
        if count % STEPS_PER_CLOCK == 0 and (
            count >= STEPS_PER_SWITCH or _core.monotonic() - since > SWITCH_SECONDS
        ):
            await asyncio.sleep(0)  # before taking the next one, so that none is lost
            count, since = 0, _core.monotonic()


# ---- callbacks ---------------------------------------------------------------------------

# Running coroutines of callbacks: loops keep only weak references to tasks.
_running: set[asyncio.Future[Any]] = set()
# {id of a synchronous object: its awaitable wrapper}. Weak, so that an object is closed when the
# application drops it.
_twins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Callbacks(Generic[T, R]):
    """Calls functions of the application in its loop. Replaces their first argument, a synchronous
    object, by its awaitable wrapper, which `make` creates."""

    def __init__(self, make: Callable[[T], R]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()

    def twin(self, sync: T) -> R:
        """The awaitable wrapper of a synchronous object, always the same one. Called in the loop's
        thread."""
        found: R | None = _twins.get(id(sync))
        if found is None:
            found = _twins[id(sync)] = self._make(sync)
        return found

    def of(self, function: Any) -> Any:
        """Wrap `function` so that any thread may call it, and it runs in the loop. Anything that is
        not callable, such as None, is returned as it is."""
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
