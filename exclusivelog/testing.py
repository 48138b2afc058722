"""Test your own leader processes: a temporary ledger, real processes, and injected faults.

This is a pytest plugin, loaded by one line of the root `conftest.py`:

```python
pytest_plugins = ["exclusivelog.testing"]
```

- The fixture `ledger`: an `Engine` on a temporary directory.
- The fixture `second_process`: runs a function in another process, which the test can `kill`,
  `stop` and `resume`.
- The function `fence` takes a topic away from its holder; `wait_until` waits for a condition.

The library itself does not import this module. docs/testing.md has a complete example.
"""

from __future__ import annotations

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
from exclusivelog import _core
from exclusivelog.arguments import check_seconds
from exclusivelog.foreign import Ignoring

__all__ = ["Process", "Start", "fence", "ledger", "second_process", "wait_until"]

PATIENCE = 30.0  # seconds: the default timeout of the calls in this module
STOP_SECONDS = 10.0  # a thread that is in a flush stops only after it
POLL_SECONDS = 0.005

Found = TypeVar("Found")
Outcome = tuple[Any, BaseException | None]  # what a function returned, or raised

_processes = multiprocessing.get_context("spawn")  # they inherit nothing from the test's process


class Process:
    """A function that runs in another process; the fixture `second_process` returns it."""

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
        """Whether the process exists; also True while it is stopped."""
        return self._process.is_alive()

    def result(self, timeout: float = PATIENCE) -> Any:
        """Return what the function returned, or raise what it raised.

        - `timeout`: seconds to wait for its end.

        Raises TimeoutError if it still runs then, and ChildProcessError if the process was killed.
        """
        check_seconds(timeout, "timeout", "seconds from 0 on")
        self._asked = True
        value, error = self._ended(timeout)
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory is short; return when the process has
        ended."""
        self._asked = True
        self._process.kill()
        self._process.join(PATIENCE)

    def stop(self) -> None:
        """Send SIGSTOP: the process pauses as under a debugger, in a frozen container or on a
        machine that swaps. Returns when every thread has stopped."""
        self._signal(signal.SIGSTOP)
        wait_until(lambda: _is_stopped(self.pid), STOP_SECONDS, f"{self!r} to stop")

    def resume(self) -> None:
        """Send SIGCONT: the process continues after `stop`."""
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
        """Reap the process. Returns what its function raised, if the test has not read it."""
        error = None
        if not self._asked and self._pipe.poll():
            error = self._ended(0)[1]
        self.kill()
        self._pipe.close()
        self._process.close()
        return error


def _run(pipe: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """The main function of the other process."""
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
    with Ignoring(ChildProcessError):
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_STOPPED
    return False


def wait_until(
    condition: Callable[[], Found], timeout: float = PATIENCE, what: str | None = None
) -> Found:
    """Call `condition()` every few milliseconds until it returns something true; return that.

    - `timeout`: seconds after which it raises AssertionError.
    - `what`: describes the condition in that error.

    >>> wait_until(lambda: len(engine.engines()))
    1
    """
    check_seconds(timeout, "timeout", "seconds from 0 on")
    deadline = _core.monotonic() + timeout
    while not (found := condition()):
        if _core.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout} s for {what or condition}")
        time.sleep(POLL_SECONDS)
    return found


def fence(engine: xl.Engine, topic: str) -> int:
    """Fence all holders and waiters of a topic, as another leader does with
    `exclusive_with_fencing`, and leave the topic free. Returns the epoch that was used for this.

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
        """Start the process."""


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[xl.Engine]:
    """An engine on an empty ledger of this test; other processes open `ledger.path`. Its durability
    is "process": the messages of a test need not survive a power loss."""
    with xl.open(tmp_path / "ledger", "test", durability="process") as engine:
        yield engine


@pytest.fixture
def second_process() -> Iterator[Start]:
    """`second_process(function, *args)` runs a function in another process.

    The function and its arguments are pickled, so the function must be defined at the top level of
    a module. The processes are killed at the end of the test. If a function has raised an error
    that `result()` was not called for, the test fails.
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
