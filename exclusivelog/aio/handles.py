"""Handles that are opened by `await`, or by `async with`, which also closes them.

A call that opens something returns an `Opening`; an object that an application creates itself or
iterates over, such as a map or a reader, is opened at its first await. Before, any use of it raises
a TypeError that names the missing await.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

from exclusivelog.aio.calls import in_thread, opened, shielded
from exclusivelog.closing import OfThisProcess

T = TypeVar("T")


def check_loop() -> None:
    """Raise RuntimeError outside of asyncio."""
    task = None
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        task = asyncio.current_task()
    if task is None:
        raise RuntimeError(
            "exclusivelog.aio runs on asyncio (or uvloop) only, and no asyncio task runs here. On "
            "trio, and on anyio with trio, call exclusivelog itself in a thread, as by "
            "trio.to_thread.run_sync"
        )


# ---- objects that were not awaited ---------------------------------------------------------


class NotAwaitedError(TypeError, AttributeError):
    """An object was used before it was opened. Also an AttributeError, so that `hasattr` works."""


def not_awaited(call: str) -> NotAwaitedError:
    """The error for using the result of `call` without await."""
    return NotAwaitedError(
        f"{call} was not awaited: it is not open yet. Write `await {call}`, or `async with {call} "
        "as ...`"
    )


class NotOpen:
    """Placeholder for a synchronous object that is not open yet."""

    def __init__(self, call: str) -> None:
        self._call = call

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_awaited(self._call)

    def __repr__(self) -> str:
        return f"<{self._call}, not open>"


class _NoWith:
    """Refuses `with`, as only `async with` can wait."""

    if not TYPE_CHECKING:  # otherwise a type checker would accept `with`

        def __enter__(self) -> NoReturn:
            self._misused = True
            what = getattr(self, "_call", type(self).__name__)
            raise TypeError(f"{what}: use `async with` instead of `with`")

        def __exit__(self, *exception: object) -> None:
            pass


# ---- objects -----------------------------------------------------------------------------


class Wrapper(OfThisProcess, Generic[T]):
    """An awaitable wrapper of an object of `exclusivelog`, which is `sync`."""

    sync: T
    _shown: object = None  # what `repr` shows if `sync` may not exist yet

    def __init__(self, sync: T) -> None:
        self.sync = sync

    def __repr__(self) -> str:
        shown = self.sync if self._shown is None else self._shown
        return f"<aio.{repr(shown).removeprefix('<')}"


class Closing(_NoWith, metaclass=abc.ABCMeta):
    """Base of classes that `async with` closes at the end of the block."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close it; closing twice does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await finished(self.close())


async def finished(closing: Coroutine[Any, Any, None]) -> None:
    """Run `closing` to its end, even if this task is cancelled meanwhile."""
    await shielded(asyncio.ensure_future(closing))


class Handle(Wrapper[T], Closing, Generic[T]):
    """A wrapper of an object that has to be closed."""

    async def close(self) -> None:
        """Close it, as the synchronous object; closing twice does nothing."""
        closing: Any = self.sync
        await in_thread(closing.close)

    async def __aenter__(self) -> Self:
        entered: Any = self.sync
        entered._check_enters()
        return self


class Openable(Handle[T], Generic[T]):
    """A handle that is opened when it is awaited or entered. Awaiting an open one returns it.

    `_opens_late` makes a handle that is not open yet.
    """

    _make: Callable[[], T] | None = None  # opens it; None once that is done
    _opening: asyncio.Lock

    def _opens_late(self, call: str, make: Callable[[], T]) -> Self:
        """Mark the handle as not open: `make` will open it, in a thread. `call` is the
        application's call, for errors."""
        self.sync = cast(T, NotOpen(call))
        self._make, self._opening = make, asyncio.Lock()
        return self

    async def _opened(self) -> Self:
        """Open it, unless it is open. If cancelled, nothing stays open."""
        if self._make is not None:
            check_loop()
            async with self._opening:
                if self._make is not None:
                    self.sync = await opened(self._make, _close)
                    self._make = None
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def __aenter__(self) -> Self:
        await self._opened()
        return await super().__aenter__()

    async def close(self) -> None:
        """Close it, as the synchronous object; closing twice does nothing."""
        if self._make is not None:
            async with self._opening:
                pass  # another task may be opening it
        if self._make is None:
            await super().close()


def _close(made: Any) -> None:
    made.close()


# ---- calls that open something -------------------------------------------------------------


class Opening(_NoWith, Coroutine[Any, None, T], Generic[T]):
    """The result of a call that opens something. `await` it, or enter it by `async with`, which
    closes the opened object at the end of the block. Before that, the call has done nothing.

    It is also a coroutine, for `asyncio.create_task` and task groups.

    - `call`: the application's call as text, for errors.
    - `kind`: the type of the object that is opened.
    - `begin`: opens the object; if cancelled, nothing stays open.
    - `leave`: closes the object, at the end of an `async with`.
    """

    _begun: bool = True  # for the finalizer, if `__init__` fails
    _misused = False  # set by `with`, which raises: no warning is needed then

    def __init__(
        self,
        call: str,
        kind: type,
        begin: Callable[[], Coroutine[Any, Any, T]],
        leave: Callable[[T], Coroutine[Any, Any, None]],
    ) -> None:
        self._call, self._kind = call, kind
        self._begin, self._leave = begin, leave
        self._steps: Coroutine[Any, Any, T] | None = None  # set while a task runs it
        self._begun = False

    def _start(self) -> Coroutine[Any, Any, T]:
        if self._begun:
            raise RuntimeError(f"{self._call} was awaited already; call it again")
        self._begun = True
        check_loop()
        return self._begin()

    def __await__(self) -> Generator[Any, None, T]:
        return self._start().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self
        if isinstance(self._opened, Handle):
            try:
                await self._opened.__aenter__()  # this is its block
            except BaseException:
                await finished(self._leave(self._opened))
                raise
        return self._opened

    async def __aexit__(self, *exception: object) -> None:
        await finished(self._leave(self._opened))

    # ---- as the coroutine of a task ------------------------------------------------------

    def send(self, value: None = None, /, *more: Any, **options: Any) -> Any:
        """For tasks. If the application calls it instead, it meant the `send` of a producer that it
        did not await."""
        if self._steps is None:
            if value is not None or more or options or not self._is_run_by_a_task():
                raise not_awaited(self._call)
            self._steps = self._start()
        return self._steps.send(value)

    def _is_run_by_a_task(self) -> bool:
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            task = asyncio.current_task()
            return task is not None and task.get_coro() is self
        return False

    def throw(self, kind: Any, value: Any = None, trace: Any = None, /) -> Any:
        """For tasks."""
        if self._steps is None:
            self._steps = self._start()
        if value is None and trace is None:
            return self._steps.throw(kind)
        return self._steps.throw(kind, value, trace)

    def close(self) -> None:
        """For tasks."""
        self._begun = True
        if self._steps is not None:
            self._steps.close()

    # ---- use before it is open -------------------------------------------------------------

    if not TYPE_CHECKING:  # otherwise a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_") and hasattr(self._kind, name):
                raise not_awaited(self._call)
            raise AttributeError(f"{self._call} is not open, and has no attribute {name!r}")

    def __del__(self) -> None:
        if not (self._begun or self._misused):
            warnings.warn(f"{self._call} was never awaited", RuntimeWarning, 2, source=self)

    def __repr__(self) -> str:
        return f"<{self._call}, not open>"
