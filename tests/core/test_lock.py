"""The lock of a shared state: one thread at a time, reentrant, and no wait that cannot be ended.

A thread that waits may be the main thread, in which signal handlers run, and may fork in one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exclusivelog._core import Holding, Lock, Locks
from exclusivelog.errors import EngineClosedError
from testing.processes import PATIENCE

pytestmark = pytest.mark.once


@pytest.fixture
def leave() -> threading.Event:
    """Set: the holder of `taken` leaves it."""
    return threading.Event()


@pytest.fixture
def taken(leave: threading.Event) -> Iterator[Lock]:
    """A lock that another thread holds."""
    lock, ready = Lock(), threading.Event()

    def hold() -> None:
        with lock:
            ready.set()
            leave.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(PATIENCE)
    yield lock
    leave.set()
    thread.join(PATIENCE)


def with_an_alarm(wait: Callable[[], object]) -> None:
    """Wait, and be struck by SIGALRM: on a busy machine perhaps before the wait has begun."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    wait()


@pytest.mark.rule("K4")
def test_k4_a_thread_that_takes_it_again_and_again_lets_others_have_it() -> None:
    """It sleeps inside, so that those that wait find it taken whenever they can run."""
    lock, began, had = Lock(), threading.Event(), threading.Event()
    times = 0

    def work() -> None:
        nonlocal times
        while not had.is_set() and times < 2000:
            with lock:
                began.set()
                time.sleep(0.002)
            times += 1

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert began.wait(PATIENCE)
    for _ in range(3):
        with lock:
            pass
    had.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert times < 2000


@pytest.mark.rule("K4")
@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_k4_a_wait_that_ends_leaves_it_to_others(
    taken: Lock, leave: threading.Event, how: str
) -> None:
    """Also one for which it was reserved."""
    before = signal.signal(signal.SIGALRM, lambda *_: 1 // 0)
    had = threading.Event()

    def take() -> None:
        with taken:
            had.set()

    other = threading.Thread(target=take)
    try:
        if how == "timeout":
            assert not taken.acquire(timeout=0.05)
        else:
            with pytest.raises(ZeroDivisionError):
                with_an_alarm(taken.acquire)
        other.start()
        leave.set()
        assert had.wait(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
        other.join(PATIENCE)


def test_one_thread_at_a_time_is_inside() -> None:
    lock, found = Lock(), [0]

    def count() -> None:
        for number in range(300):
            with lock:
                seen = found[0]
                if number % 30 == 0:
                    time.sleep(0)  # another thread runs
                found[0] = seen + 1

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [8 * 300]
    assert not lock.held_here()


def test_it_is_free_when_it_was_left_as_often_as_it_was_taken() -> None:
    lock = Lock()
    with lock:
        assert lock.acquire()
        assert lock.held_here()
        lock.release()
        assert lock.held_here()
    assert not lock.held_here()


def test_it_is_left_by_its_holder_alone(taken: Lock) -> None:
    with pytest.raises(RuntimeError, match="does not hold"):
        taken.release()
    with pytest.raises(RuntimeError, match="does not hold"):
        Lock().release()


def test_a_wait_has_a_limit(taken: Lock) -> None:
    assert not taken.acquire(False)
    begin = time.monotonic()
    assert not taken.acquire(timeout=0.05)
    assert time.monotonic() - begin >= 0.05


def test_all_who_wait_get_it_in_turn(taken: Lock, leave: threading.Event) -> None:
    got: list[bool] = []

    def take() -> None:
        with taken:
            got.append(taken.held_here())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert got == []
    leave.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == [True] * 4


class Struck(Exception):
    """What the handler raises."""


def test_a_handler_that_raises_ends_a_wait(taken: Lock) -> None:
    def strike(*_: Any) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for wait in (taken.acquire, Holding(taken).__enter__):
            with pytest.raises(Struck):
                with_an_alarm(wait)
            assert not taken.held_here()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_c5_a_child_that_is_forked_during_a_wait_does_not_wait_on(taken: Lock) -> None:
    """The thread that holds the lock is its parent's."""
    children: list[int] = []

    def fork(*_: Any) -> None:
        children.append(os.fork())
        if children[0]:
            raise Struck

    before = signal.signal(signal.SIGALRM, fork)
    code = 1
    try:
        with_an_alarm(taken.acquire)
    except EngineClosedError:
        code = 42
    except Struck:
        pass
    finally:
        if children == [0]:
            os._exit(code)
        signal.signal(signal.SIGALRM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 42


# ---- several locks -----------------------------------------------------------------------


def test_locks_that_are_taken_together_are_released_together() -> None:
    """Also one that was taken twice, and whatever ends the block."""
    first, second = Lock(), Lock()
    with contextlib.suppress(ZeroDivisionError), Locks() as locks:
        for lock in (first, second, first):
            assert locks.take(lock)
        assert first.held_here()
        assert second.held_here()
        raise ZeroDivisionError
    assert not first.held_here()
    assert not second.held_here()


def test_a_further_lock_that_is_kept_is_not_waited_for_for_ever(taken: Lock) -> None:
    free = Lock()
    with Locks() as locks:
        assert locks.take(free)
        assert not locks.take(taken)
        assert free.held_here()
    assert not free.held_here()
    assert not taken.held_here()
