"""Calls of shared states and maps: from a loop to their background threads, and back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from exclusivelog.aio.calls import in_thread
from exclusivelog.state.map import SharedMap, put_at_once
from exclusivelog.state.shared import Shared, acknowledge

CALLS_PER_SWITCH = 8  # calls that did not wait, until other tasks may run

K = TypeVar("K")
R = TypeVar("R")
V = TypeVar("V")


class _Call:
    """A background call of a state, and the task that waits for it."""

    __slots__ = ("call", "future", "outcome", "state", "traffic", "waiter")

    def __init__(
        self, state: Shared, call: Callable[[], Any], waiter: asyncio.Future[Any],
        traffic: Traffic,
    ) -> None:  # fmt: skip
        self.state, self.call, self.waiter, self.traffic = state, call, waiter, traffic
        self.future: concurrent.futures.Future[Any] | None = None
        self.outcome: tuple[Any, BaseException | None] = None, None  # if there is no future

    def settled(self, _: object) -> None:
        """Its future is done. From any thread."""
        self.traffic.arrive(self)

    def set_result(self, result: Any) -> None:
        """It has returned, and what it wrote is durable. From any thread."""
        self.outcome = result, None
        self.traffic.arrive(self)

    def set_exception(self, error: BaseException) -> None:
        """It has returned, and what it wrote may not be durable. From any thread."""
        self.outcome = None, error
        self.traffic.arrive(self)


class Traffic:
    """Calls of states between a loop and their threads: those of one iteration of the loop are
    submitted together, and one wake-up delivers all outcomes that are there. Otherwise two threads
    would contend for the interpreter at every call."""

    _of: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Traffic]] = (
        weakref.WeakKeyDictionary()
    )

    _newest: ClassVar[tuple[Callable[[], object], Traffic] | None] = None  # the last one found

    def __init__(self) -> None:
        self.leaving: list[_Call] = []
        self._arrived: deque[_Call] = deque()
        self._notified = False
        self._made = 0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Traffic:
        """Return the loop's instance."""
        newest = cls._newest
        if newest is not None and newest[0]() is loop:
            return newest[1]
        found = cls._of.get(loop)
        if found is None:
            found = cls._of[loop] = cls()
        cls._newest = weakref.ref(loop), found
        return found

    def yields(self) -> bool:
        """Should other tasks run now? True after every few calls that did not wait: a switch costs
        more than such a call, but a task that makes no others must not block the loop."""
        self._made += 1
        return self._made % CALLS_PER_SWITCH == 0

    def send(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the call at the end of this iteration of the loop."""
        self.leaving.append(call)
        if len(self.leaving) == 1:
            loop.call_soon(self._submit)

    def _submit(self) -> None:
        calls, self.leaving = self.leaving, []
        for call in calls:
            if call.waiter.done():
                continue  # cancelled before it began
            try:
                call.future = call.state.submit(call.call)
            except Exception as error:
                call.waiter.set_exception(error)
            else:
                call.future.add_done_callback(call.settled)

    def arrive(self, call: _Call) -> None:
        """Deliver the call's outcome. From any thread."""
        self._arrived.append(call)
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # its loop has ended
                call.waiter.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._notified = False  # first: what comes later wakes the loop again
        while self._arrived:
            call = self._arrived.popleft()
            future, waiter = call.future, call.waiter
            if waiter.done() or (future is not None and future.cancelled()):
                continue
            result, error = call.outcome
            if future is not None:
                error = future.exception()
                result = future.result() if error is None else None
            if error is None:
                waiter.set_result(result)
            else:
                waiter.set_exception(error)


async def called(state: Shared, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run a state's own method in its background thread. If cancelled, it stops waiting for the
    topic."""
    loop = asyncio.get_running_loop()
    traffic = Traffic.of(loop)
    mine = _Call(state, functools.partial(call, *args, **kwargs), loop.create_future(), traffic)
    traffic.send(mine, loop)
    try:
        result: R = await mine.waiter
        return result
    except asyncio.CancelledError:
        if mine.future is not None:
            mine.future.cancel()
            await asyncio.shield(in_thread(state.give_up, mine.future))
        raise


async def put(shared: SharedMap[K, V], key: K, value: V | None) -> V | None:
    """`put`, in the loop's own thread if there is nothing to wait for but its flush: that costs a
    fraction of a call in another thread."""
    loop = asyncio.get_running_loop()
    traffic = Traffic.of(loop)
    # Calls that were submitted before come first.
    found = None if traffic.leaving else put_at_once(shared, key, value)
    if found is None:
        return await called(shared, shared.put, key, value)
    result: V | None
    result, appended = found
    if appended is None or appended.flushed:
        if traffic.yields():
            await asyncio.sleep(0)
        return result
    mine = _Call(shared, int, loop.create_future(), traffic)
    acknowledge(shared, mine, result, appended)
    told: V | None = await mine.waiter
    return told
