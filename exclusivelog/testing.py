"""Test your own leaders: a temporary ledger, real processes, and faults on purpose.

A plugin of pytest, loaded by one line of the root `conftest.py`:

```python
pytest_plugins = ["exclusivelog.testing"]
```

- `ledger`: an `Engine` on a temporary directory.
- `second_process`: runs a function in a process of its own, which the test can `kill`, `stop` and
  `resume`.
- `fence` takes a topic away from its holder; `wait_until` waits for a condition.

Nothing here is imported by the library itself. docs/testing.md has a whole example.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

import exclusivelog as xl

__all__ = ["Process", "Start", "fence", "ledger", "second_process", "wait_until"]

PATIENCE = 30.0  # seconds that calls here wait at most, by default
STOP_SECONDS = 10.0  # a thread in the middle of a flush stops behind it
POLL_SECONDS = 0.005

Found = TypeVar("Found")
Outcome = tuple[Any, BaseException | None]  # what a function returned, or raised

_processes = multiprocessing.get_context("spawn")  # nothing of the test's process is in them


class Process:
    """A function that runs in another process; made by the fixture `second_process`."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._pipe, theirs = _processes.Pipe(duplex=False)
        self._process = _processes.Process(target=_run, args=(theirs, function, args, kwargs))
        self._outcome: Outcome | None = None
        self._asked = False
        try:
            self._process.start()
        finally:
            theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def __repr__(self) -> str:
        state = "runs" if self.is_alive else "has ended"
        return f"<Process {self._name}, pid {self.pid}, {state}>"

    @property
    def is_alive(self) -> bool:
        """Does it run? One that is stopped does."""
        return self._process.is_alive()

    def result(self, timeout: float = PATIENCE) -> Any:
        """What the function returned, within `timeout` seconds; what it raised is raised here.

        Raises TimeoutError if it still runs, and ChildProcessError if the process was killed.
        """
        self._asked = True
        value, error = self._ended(timeout)
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """End it at once, as `kill -9` or the kernel does; returns when it is gone."""
        self._asked = True
        self._process.kill()
        self._process.join(PATIENCE)

    def stop(self) -> None:
        """Let it do nothing at all from now on, as under a debugger, in a frozen container or on a
        machine that swaps; returns when every thread has stopped."""
        self._signal(signal.SIGSTOP)
        wait_until(lambda: _is_stopped(self.pid), STOP_SECONDS, f"{self!r} to stop")

    def resume(self) -> None:
        """Let it go on after `stop`, as if no time had passed."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if not self.is_alive:
            raise ProcessLookupError(f"{self!r}: there is nothing to signal any more")
        os.kill(self.pid, number)

    def _ended(self, timeout: float) -> Outcome:
        if self._outcome is None:
            if not self._pipe.poll(timeout):
                raise TimeoutError(f"{self!r}: it still runs after {timeout} s")
            try:
                self._outcome = self._pipe.recv()
            except EOFError:
                self._process.join(PATIENCE)
                code = self._process.exitcode
                how = f"was ended by signal {-code}" if code and code < 0 else f"exited with {code}"
                self._outcome = None, ChildProcessError(f"{self!r}: it {how}, without a result")
        return self._outcome

    def _end(self) -> BaseException | None:
        """Reap it. What its function raised, if the test has not read that."""
        error = None
        if not self._asked and self._pipe.poll():
            error = self._ended(0)[1]
        self.kill()
        self._pipe.close()
        self._process.close()
        return error


def _run(pipe: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """In the other process."""
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    outcome: Outcome
    try:
        outcome = function(*args, **kwargs), None
    except BaseException as error:
        error.add_note(f"in process {os.getpid()}:\n{traceback.format_exc()}")
        outcome = None, error
    try:
        pipe.send(outcome)
    except Exception as error:  # it cannot be pickled
        told = f"its outcome {outcome!r} cannot be sent to the test: {error}"
        pipe.send((None, RuntimeError(told)))


def _end_with_the_test() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_STOPPED
    return False


def wait_until(
    condition: Callable[[], Found], timeout: float = PATIENCE, what: str | None = None
) -> Found:
    """Ask again and again until `condition()` gives something true, and return that.

    - `timeout`: in seconds; AssertionError if it is still false then.
    - `what`: what is waited for, for the error.

    >>> wait_until(lambda: len(engine.engines()))
    1
    """
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout} s for {what or condition}")
        time.sleep(POLL_SECONDS)
    return found


def fence(engine: xl.Engine, topic: str) -> int:
    """Take a topic away from all who hold it or wait for it, and leave it free: what another
    leader does with `exclusive_with_fencing`. Returns the epoch that the taker had.

    >>> leader = engine.topic("orders").producer("exclusive")
    >>> fence(engine, "orders")
    2
    >>> leader.state
    'fenced'
    """
    with engine.topic(topic).producer("exclusive_with_fencing") as taker:
        assert taker.topic_epoch is not None
        return taker.topic_epoch


class Start(Protocol):
    """`second_process(function, *args, **kwargs)`."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Process:
        """Start it."""


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[xl.Engine]:
    """An engine on an empty ledger, for this test alone; `ledger.path` is what other processes
    open. Its durability is "process": a test's messages need not survive a power cut."""
    with xl.open(tmp_path / "ledger", "test", durability="process") as engine:
        yield engine


@pytest.fixture
def second_process() -> Iterator[Start]:
    """`second_process(function, *args)` runs a function in a process of its own.

    The function and its arguments are pickled: it is one of a module. The processes are killed at
    the end of the test; what a function has raised until then, and was not read by
    `result()`, fails the test.
    """
    started: list[Process] = []

    def start(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Process:
        process = Process(function, *args, **kwargs)
        started.append(process)
        return process

    yield start
    errors = [error for each in started if (error := each._end()) is not None]
    if errors:
        raise errors[0]
