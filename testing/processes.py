"""Real processes for tests: each has an engine of its own and runs functions on request.

A worker runs functions of this or of a test module; the first argument is the worker's
`State`, which keeps what should outlive the call (a producer, a reader).

>>> worker.call(open_producer, "exclusive")         # in the worker's process
1
>>> worker.signal(signal.SIGKILL)
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.records import NAMES
from exclusivelog.local.shm.lockfile import NAME
from exclusivelog.local.shm.slots import (
    ALIVE,
    ARRIVALS,
    HEARTBEAT,
    KEEPALIVE,
    SLOT_COUNT,
    SLOT_SIZE,
    SLOTS,
    WAKE_UPS,
)
from exclusivelog.local.storage import journal
from testing.patience import PATIENCE as PATIENCE
from testing.patience import strain

SHARED, EXCLUSIVE = "shared", "exclusive"
WAIT, FENCING = "wait_for_exclusive", "exclusive_with_fencing"
MODES = (SHARED, EXCLUSIVE, WAIT, FENCING)

spawn = multiprocessing.get_context("spawn")
# Forked off a server that has imported what was named to `preload`: 15 ms each, not 300. What opens
# an engine is imported late, and what test modules import comes with each function of theirs.
forks = multiprocessing.get_context("forkserver")
_preloaded = ["testing.processes", "exclusivelog.opening", "exclusivelog.aio.states", "pytest"]
forks.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Let processes of `forks` find this module imported, from the first of them on."""
    _preloaded.append(module)
    forks.set_forkserver_preload(_preloaded)


@dataclass
class State:
    """What a worker's functions share."""

    engine: xl.Engine
    topic: xl.Topic
    producer: xl.Producer | None = None
    kept: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """The worker raised; `.kind` is the exception's class name, the text its message."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Worker:
    """One process with one engine on `path`. `options` go to `xl.open`."""

    _patience: dict[int, int] | None = None  # its own keepalives, while it has others
    _ended = False
    _unanswered = 1  # calls; the first answer is its engine's id

    def __init__(self, path: str, name: str = "worker", topic: str = "orders", **options: Any):
        self.path = path
        # A library is preloaded as a program starts, and no fork is such a start.
        context: Any = spawn if "LD_PRELOAD" in os.environ else forks
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, path, name, topic, options, journal.CAPACITY)
        )
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        try:
            self.id: str = self.answer()  # its engine's
        except BaseException:
            self.end()
            raise

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin `function(state, ...)` in the worker; `answer` has its result."""
        self._unanswered += 1
        self._pipe.send((function, args, kwargs))

    def answer(self, timeout: float = PATIENCE) -> Any:
        """The result of what was started; raises Failed, or TimeoutError, or EOFError if the
        worker died."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the worker did not answer within {timeout} s")
        kind, value = self._pipe.recv()
        self._unanswered -= 1
        if kind is not None:
            raise Failed(kind, value)
        return value

    def answered(self, timeout: float = 0.0) -> bool:
        """Has what was started ended?"""
        return bool(self._pipe.poll(timeout))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`start` and `answer`."""
        self.start(function, *args, **kwargs)
        return self.answer()

    def signal(self, number: int) -> None:
        """Send a signal: SIGKILL, SIGSTOP, SIGCONT, SIGINT."""
        assert self.pid is not None
        if number == signal.SIGCONT and self._patience is not None:
            _write_keepalives(self.path, self._patience)
            self._patience = None
        os.kill(self.pid, number)

    def set_keepalive(self, seconds: float) -> None:
        """Make it count as unresponsive after so many seconds, until SIGCONT."""
        assert self.pid is not None
        self._patience = set_keepalive(self.path, self.pid, seconds)

    def threads(self) -> set[int]:
        """The ids of its threads."""
        assert self.pid is not None
        return threads_of(self.pid)

    def await_stop(self) -> None:
        """Wait until SIGSTOP has taken effect: a thread inside a flush stops only after it."""
        assert self.pid is not None
        await_stop(self.pid)

    def stopped(self) -> bool:
        """Is it stopped by SIGSTOP?"""
        with contextlib.suppress(OSError):  # it has ended, and is reaped
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "T"
        return False

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; it may be so already."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)

    def end(self) -> None:
        """Let the worker close its engine and exit; kill it if it does not. Once is enough."""
        if self._ended:
            return
        self._ended = True
        if self.process.is_alive() and self.stopped():
            self.kill()
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        busy = self._unanswered > 0 and not self.answered()  # it may wait for ever
        self.process.join(1 if busy else 10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(PATIENCE)
        self._pipe.close()
        self.process.close()


W = TypeVar("W", bound=Worker)


def set_keepalive(path: str, pid: int, seconds: float) -> dict[int, int]:
    """Make the engines of any process count as unresponsive after so many seconds from now on, and
    not before. {the place of its slot: the ns that each had}."""
    with xl.open(path, readonly=True) as watcher, _words(path) as words:
        slots = [
            SLOTS + slot * SLOT_SIZE for slot, _ in watcher.ledger.lockfile.slots.in_process(pid)
        ]
        before = {at: struct.unpack("=Q", os.pread(words, 8, at + KEEPALIVE))[0] for at in slots}
        for at in slots:
            os.pwrite(words, struct.pack("=Q", _core.now()), at + HEARTBEAT)
    _write_keepalives(path, dict.fromkeys(slots, int(seconds * 1e9)))
    return before


def _write_keepalives(path: str, keepalives: dict[int, int]) -> None:
    with _words(path) as words:
        for at, ns in keepalives.items():
            os.pwrite(words, struct.pack("=Q", ns), at + KEEPALIVE)
        with mmap.mmap(words, 0) as memory:  # as an engine does that joins with a short one
            atomics = _core.SharedWords(memory)
            atomics.add(ARRIVALS, 1)
            atomics.wake(ARRIVALS)
            for index, _ in atomics.taken(SLOTS + ALIVE, SLOT_SIZE, SLOT_COUNT):
                atomics.add(SLOTS + index * SLOT_SIZE + WAKE_UPS, 1)
                atomics.wake(SLOTS + index * SLOT_SIZE + WAKE_UPS)
            del atomics


@contextlib.contextmanager
def _words(path: str) -> Iterator[int]:
    file = os.open(Path(path) / NAME, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _serve(
    pipe: Any, path: str, name: str, topic: str, options: dict[str, Any], capacity: int
) -> None:
    journal.CAPACITY = capacity  # of those that it creates: as in the test's own process
    with xl.open(path, name=name, **options) as engine:
        state = State(engine, engine.topic(topic))
        pipe.send((None, engine.id))
        while True:
            try:
                message = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                return
            if message is None:
                return
            function, args, kwargs = message
            try:
                result = function(state, *args, **kwargs)
            except BaseException as error:
                pipe.send((type(error).__name__, str(error)))
            else:
                pipe.send((None, result))


def until(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Wait until `condition()` is true, and return what it gave."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} did not come true within {timeout} s")
        time.sleep(0.002)


def collect() -> None:
    """Collect all garbage. `gc.collect` alone does nothing while another thread collects."""
    enough = gc.get_stats()[2]["collections"] + 2  # one may have begun before

    def collected() -> bool:
        gc.collect()
        return int(gc.get_stats()[2]["collections"]) >= enough

    until(collected)


@contextlib.contextmanager
def workers(kind: type[W] = Worker) -> Iterator[Callable[..., W]]:
    """A factory of workers that are all ended, and reaped, afterwards."""
    made: list[W] = []

    def make(path: str, name: str = "worker", **options: Any) -> W:
        worker = kind(path, name, **options)
        made.append(worker)
        return worker

    try:
        yield make
    finally:
        for worker in made:
            worker.end()


# ---- what workers run most ----------------------------------------------------------


def open_producer(state: State, mode: str, **options: Any) -> int:
    """Open a producer and keep it; its epoch."""
    state.producer = state.topic.producer(mode, **options)
    return state.producer.topic_epoch


def send(state: State, value: bytes, **options: Any) -> int:
    """Send with the kept producer; the offset."""
    assert state.producer is not None
    return state.producer.send(value, **options)


def close_producer(state: State) -> None:
    """Close the kept producer."""
    assert state.producer is not None
    state.producer.close()


def producer_state(state: State) -> str:
    """The kept producer's state."""
    assert state.producer is not None
    return state.producer.state


# ---- what several test files need --------------------------------------------------------


def within(function: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """`function()` in a thread of its own: its result, or its error. If it does not
    return, the test fails instead of stopping."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise AssertionError(f"{function} neither returned nor raised within {timeout} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def c_fork() -> int:
    """fork() as C code calls it: Python's hooks do not run. It keeps the GIL, as uWSGI does."""
    with no_requests_for_the_gil():
        return int(ctypes.PyDLL(None).fork())


def bare_fork() -> int:
    """The system call alone, of which the C library does not know either."""
    call = {"x86_64": 56, "aarch64": 220}[os.uname().machine]  # clone(2)
    with no_requests_for_the_gil():
        return int(ctypes.PyDLL(None).syscall(call, signal.SIGCHLD, 0, 0, 0, 0))


@contextlib.contextmanager
def no_requests_for_the_gil() -> Iterator[None]:
    """This thread keeps the GIL as long as it does not give it away: others request it only after
    they have waited for so long. A child that inherits a thread's request for the GIL waits for
    that thread for ever, in Python itself. On a busy machine, those that have begun to wait get a
    core later."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        time.sleep(4 * interval * strain())
        yield
    finally:
        sys.setswitchinterval(interval)


# The ways to fork of which Python does not know.
UNSEEN_FORKS = {"fork in C": c_fork, "system call": bare_fork}


COPIES = 3  # of a process with threads, in a row, that cannot all have a lock held by a lost thread


def forked(
    function: Callable[[], Any], timeout: float = PATIENCE, fork: Callable[[], int] = os.fork
) -> Any:
    """What `function()` gives in a child made by `fork`; Failed if it raises there.

    A child that Python does not know of hangs where another thread held a lock of the interpreter
    or of the allocator at that moment. That is no fault of the library: another child is made. A
    child that the library keeps waiting hangs each time.
    """
    early = COPIES - 1 if fork is not os.fork else 0
    for limit in (*[timeout / 12] * early, timeout):  # most end within milliseconds
        answer = _answer_of_child(function, limit, fork)
        if answer is not None:
            kind, value = answer
            if kind is not None:
                raise Failed(kind, value)
            return value
    raise AssertionError(f"{function} did not end in the forked child")


def _answer_of_child(
    function: Callable[[], Any], timeout: float, fork: Callable[[], int]
) -> tuple[str | None, Any] | None:
    """The kind of its exception, and what it gave or said; None if it did not end."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = fork()
    if pid == 0:
        try:
            try:
                # A child that Python does not know of may hang when it starts a thread.
                result = within(function, timeout / 2) if fork is os.fork else function()
                theirs.send((None, result))
            except BaseException as error:
                theirs.send((type(error).__name__, str(error)))
        finally:
            os._exit(0)
    try:
        theirs.close()
        return ours.recv() if ours.poll(timeout) else None
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def threads_since(before: set[threading.Thread]) -> list[str]:
    """The names of the threads of this process that have begun since, and still run. Those that an
    engine starts late are left out: they begin when there is something to commit, with the first
    heartbeat, or with a line to log, and end with the engine. So is a thread for retention, if an
    engine was open before: it begins seconds later."""
    new = (thread for thread in threading.enumerate() if thread not in before)
    opened = any(thread.name.startswith("exclusivelog-heart") for thread in before)
    passing = (
        "exclusivelog-commit",
        "exclusivelog-checkpoint",
        "exclusivelog-place",
        "exclusivelog-log",
        "within",
        *(["exclusivelog-retention"] if opened else []),
    )
    return [thread.name for thread in new if not thread.name.startswith(passing)]


def rows(engine: xl.Engine) -> dict[str, list[tuple[bytes, bytes]]]:
    """All that the ledger's tables hold, but for the counters of ids already given."""
    with engine.ledger.read() as tables:
        return {table: list(tables.rows.cursor(table)) for table in NAMES if table != "meta"}


def values(topic: xl.Topic) -> list[bytes]:
    """What the topic's messages say, in order."""
    return [message.value for message in topic.reader()]


def hang(worker: Worker, keepalive: float | None = None) -> None:
    """Stop a worker at any moment but one inside the ledger's critical section, where it would
    block all writers; test_stalls.py tests that.

    With `keepalive` it counts as unresponsive so many seconds later, and not before: a worker that
    was opened with so little does so too while the machine is merely slow.
    """

    assert worker.pid is not None
    stop_outside(worker.path, worker.pid)
    if keepalive is not None:
        worker.set_keepalive(keepalive)


def stop_outside(path: str, pid: int) -> None:
    """Stop any process at any moment but one inside the critical section of the ledger there."""

    def stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        await_stop(pid)
        assert watcher.ledger.journal is not None
        if not threads_of(pid) & set(watcher.ledger.journal.inside):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    with xl.open(path, readonly=True) as watcher:
        until(stopped)


def threads_of(pid: int) -> set[int]:
    """The ids of a process's threads."""
    return {int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()}


def stop(pid: int) -> None:
    """SIGSTOP; returns once all threads of the process have stopped. Some run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)


def await_stop(pid: int) -> None:
    """Wait until all threads of a process have stopped."""

    def states() -> Iterator[str]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield (thread / "stat").read_text().rpartition(")")[2].split()[0]

    until(lambda: set(states()) == {"T"})
