"""Event loops for tests: each is run to its end, and must leave no threads or tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import exclusivelog as xl
from testing.patience import PATIENCE, patience_now
from testing.processes import collect, threads_since, until

STARVED = 100  # the part of the patience for which a runnable thread may get no core: 1.2 s of 120
WATCH_SECONDS = 0.01  # a turn of what watches a loop
STRETCHED = 4  # times that a turn may take

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def play(
    main: Callable[[], Coroutine[Any, Any, Any]],
    patience: float = PATIENCE,
    loop: LoopFactory | None = None,
) -> Any:
    """Run a coroutine function in a loop of its own, which `loop` makes (None: asyncio's). No
    thread may be there afterwards that was not there before, and asyncio must not have
    complained."""

    async def bounded() -> Any:
        async with asyncio.timeout(4 * PATIENCE):  # seconds of work take a minute on busy cores
            return await main()

    before = set(threading.enumerate())
    collect()  # what other tests have left behind complains before this one is heard
    with complaints() as heard:
        with asyncio.Runner(loop_factory=loop) as runner:
            result = runner.run(bounded())
        collect()
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


class Heartbeat:
    """`async with Heartbeat() as heartbeat`: how long the loop stood still at most.

    A task counts up all the time. A thread watches it, and takes down what the loop's thread does
    while it does not. Where the whole process gets no core, the watch has no turns either, and each
    of them stands for a bounded time.
    """

    def __init__(self) -> None:
        self.longest = 0.0  # seconds
        self.where = ""  # the stack of the loop's thread during that time
        self._beat, self._used = time.monotonic(), time.process_time()
        self._over = threading.Event()

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._go_on())
        self._thread = threading.Thread(target=self._watch, args=(threading.get_ident(),))
        self._thread.start()
        await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.sleep(0.01)
        self._over.set()
        self._task.cancel()
        await asyncio.to_thread(self._thread.join, PATIENCE)

    async def _go_on(self) -> None:
        while True:
            self._used = time.process_time()  # before the beat: too much counts, never too little
            self._beat = time.monotonic()
            await asyncio.sleep(0.001)

    def _watch(self, loop: int) -> None:
        beat, turns = self._beat, 0
        while not self._over.wait(WATCH_SECONDS):
            beat, turns = self._beat, turns + 1 if beat == self._beat else 0
            ran = time.process_time() - self._used  # another thread may keep the interpreter's lock
            gap = min(time.monotonic() - beat, turns * STRETCHED * WATCH_SECONDS + ran)
            if gap > self.longest:
                self.longest = gap
                self.where = "".join(traceback.format_stack(sys._current_frames()[loop]))

    def check(self) -> None:
        """Was the loop never blocked for longer than a busy machine keeps a thread waiting?"""
        assert self.longest < patience_now() / STARVED, f"{self.longest:.2f} s in\n{self.where}"


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
def paused(producer: xl.Producer) -> Iterator[None]:
    """The producer's topic is on its way to another engine while the block runs: sends wait."""
    session = producer._sender.session
    session.pauses.begin()
    try:
        yield
    finally:
        session.resume()


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
