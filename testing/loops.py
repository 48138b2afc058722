"""Event loops for tests: each is run to its end, and nothing may be left then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import exclusivelog as xl
from testing.processes import PATIENCE, threads_since, until


def play(main: Callable[[], Coroutine[Any, Any, Any]], patience: float = PATIENCE) -> Any:
    """Run a coroutine function in a loop of its own. Afterwards no thread may be there that was
    not there before, and asyncio must not have complained."""

    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await main()

    before = set(threading.enumerate())
    gc.collect()  # what other tests have left behind complains before this one is heard
    with complaints() as heard:
        result = asyncio.run(bounded())
        gc.collect()
        until(lambda: not threads_since(before), patience)
    assert heard == []
    return result


@contextlib.contextmanager
def complaints() -> Iterator[list[str]]:
    """What asyncio logs as an error: futures whose exception was never retrieved, pending tasks
    that were destroyed."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener(logging.ERROR)
    logging.getLogger("asyncio").addHandler(listener)
    try:
        yield heard
    finally:
        logging.getLogger("asyncio").removeHandler(listener)


async def soon(condition: Callable[[], Any]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, condition
        await asyncio.sleep(0.002)


async def cancelled_after(delay: float, call: Awaitable[Any]) -> Any:
    """Cancel the call after so many seconds (below 0: after so many turns of the loop). What it
    returned, if it was faster; else None."""
    task = asyncio.ensure_future(call)
    if delay < 0:
        for _ in range(int(-delay)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(delay)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None


def free(topic: xl.Topic) -> bool:
    """The topic has no owner and no waiter."""
    return not topic.holders and not topic.waiters


@contextlib.contextmanager
def held(engine: xl.Engine) -> Iterator[None]:
    """No thread can commit while the block runs."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.ledger.write_exclusive():
            entered.set()
            leave.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert entered.wait(PATIENCE)
        try:
            yield
        finally:
            leave.set()
            holding.result(PATIENCE)
