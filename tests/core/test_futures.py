"""A future that a signal handler has interrupted, at any place, can still be settled by another
thread: that one works for other topics, too (rules C8, G11)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.futures import Future
from exclusivelog.waits import EngineFuture, until_settled
from testing.processes import PATIENCE

pytestmark = [pytest.mark.once, pytest.mark.rule("C8", "G11")]

SECONDS = 20e-6  # between two signals, at least
STRIKES = 3000


class LimitError(Exception):
    """As a job queue raises it."""


@pytest.fixture
def strikes() -> Iterator[list[int]]:
    """A handler of SIGALRM that counts, and raises."""
    counted: list[int] = []

    def strike(*_: object) -> None:
        counted.append(1)
        raise LimitError

    before = signal.signal(signal.SIGALRM, strike)
    yield counted
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def use(future: concurrent.futures.Future[int]) -> None:
    """What waits for a future calls."""
    future.done()
    future.cancelled()
    future.running()
    future.add_done_callback(int)
    future._done_callbacks.clear()  # type: ignore[attr-defined]


def is_left_locked(future: concurrent.futures.Future[int]) -> bool:
    """Would a thread that settles it wait for ever? No other thread uses it now."""
    condition: Any = future._condition  # type: ignore[attr-defined]
    free: list[bool] = []

    def look() -> None:
        free.append(condition.acquire(blocking=False))
        if free == [True]:
            condition.release()

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return free == [False]


def interrupt(future: concurrent.futures.Future[int], strikes: list[int]) -> bool:
    """Interrupt the use of a future until it is left locked, or so often."""
    while len(strikes) < STRIKES:
        with contextlib.suppress(LimitError):
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            while True:
                use(future)
        if is_left_locked(future):
            return True
    return False


def test_a_handler_that_raises_leaves_no_future_locked(strikes: list[int]) -> None:
    assert not interrupt(Future(), strikes)


def test_control_a_future_of_python_is_left_locked(strikes: list[int]) -> None:
    assert interrupt(concurrent.futures.Future(), strikes)


def test_others_wait_for_it_as_for_any_future() -> None:
    future, done = Future[int](), threading.Event()
    wait = until_settled(future)
    assert not wait(0.0)
    assert not concurrent.futures.wait([future], 0.01).done
    with pytest.raises(TimeoutError):
        future.result(0.01)
    waits = threading.Thread(target=lambda: future.result() == 1 and done.set())
    waits.start()
    future.set_result(1)
    waits.join()
    assert done.is_set()
    assert wait(0.0)
    assert future.result() == 1
    assert [*concurrent.futures.as_completed([future])] == [future]
    cancelled = Future[Any]()
    assert cancelled.cancel()
    assert issubclass(EngineFuture, Future)


@pytest.mark.rule("K1", "J1")
@pytest.mark.parametrize("where", ["directory", "cluster"])
def test_a_future_that_an_application_has_left_locked_holds_up_no_other(
    tmp_path: Path, where: str
) -> None:
    """`concurrent.futures.wait` leaves it so, if it is interrupted."""
    path = str(tmp_path / "log") if where == "directory" else "memory://left-locked"
    names = ("broken", "sound")
    with xl.open(path, name="mine") as engine, xl.open(path, name="other") as other:
        owners = [other.topic(name).producer("exclusive") for name in names]
        broken, sound = (engine.topic(name).producer_async("wait_for_exclusive") for name in names)
        taking = threading.Thread(target=broken._condition.acquire)
        taking.start()
        taking.join()
        for owner in owners:
            owner.close()
        with sound.result(PATIENCE) as producer:
            assert producer.send(b"0") == 0
