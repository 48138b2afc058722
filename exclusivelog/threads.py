"""Threads of the operating system: starting them, and refusing a patched `threading`."""

from __future__ import annotations

import _thread
import contextlib
import heapq
import math
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from operator import methodcaller
from queue import Empty, SimpleQueue
from types import BuiltinFunctionType
from typing import Any, TypeVar

from exclusivelog import _core
from exclusivelog.errors import LedgerError
from exclusivelog.foreign import Ignoring

# Python's messages when the system refuses a thread, and while the interpreter shuts down.
REFUSED, SHUTTING_DOWN = "can't start new thread", "at interpreter shutdown"
# Its message in place of the exception of a signal handler that has interrupted a wait for a
# condition just before that took its lock again, as `Thread.start` does. The thread runs then.
UNLOCKED = "release unlocked lock"

R = TypeVar("R")


def patched() -> bool:
    """Whether gevent or eventlet has replaced threads and locks.

    A debugger wraps only the start of a thread, not the locks; that returns False.

    >>> patched()
    False
    """
    real_start = isinstance(_thread.start_new_thread, BuiltinFunctionType)
    real_locks = type(threading.Lock()).__module__ == "_thread"
    return not real_start and not real_locks


def refuse_patched(path: str) -> None:
    """Raise LedgerError if `threading` does not start threads of the operating system."""
    if patched():
        raise LedgerError(
            f"{path}: threading was patched (gevent, eventlet), and the ledger needs real threads; "
            "patch with patch_all(thread=False), eventlet.monkey_patch(thread=False), or use the "
            "ledger in a process of its own"
        )


def refuse_bare_fork(path: str) -> None:
    """Raise LedgerError in a child made by the bare system call fork(2) or clone(2): there the C
    library takes mutexes in the name of the parent's thread."""
    if not _core.thread_is_known():
        raise LedgerError(
            f"{path}: this process was made by a bare system call, as by syscall(SYS_fork), which "
            "the C library does not know of; use fork(), or execute a program that opens the ledger"
        )


# ---- alarms ------------------------------------------------------------------------------


class Alarms:
    """Functions to be called at a time. The thread that watches them sleeps until the first.

    >>> alarms = Alarms()
    >>> alarms.set(0.0, "a call".upper), alarms.set(60.0, "another one".upper)
    (None, None)
    >>> [call() for call in alarms.take_due()], alarms.seconds_left() > 50
    (['A CALL'], True)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()  # functions are not compared
        self._lock = _core.Lock()

    def set(self, seconds: float, function: Callable[[], object]) -> None:
        """Have the function called after so many seconds. The caller wakes the thread."""
        with self._lock:
            at = _core.monotonic() + seconds
            heapq.heappush(self._heap, (at, next(self._numbers), function))

    def seconds_left(self) -> float:
        """Seconds until the first; infinite if there is none."""
        first = self._heap[:1]
        return max(0.0, first[0][0] - _core.monotonic()) if first else math.inf

    def take_due(self) -> list[Callable[[], object]]:
        """Remove and return the functions whose time has come."""
        due: list[Callable[[], object]] = []
        if not self._heap:
            return due
        with self._lock:
            while self._heap and self._heap[0][0] <= _core.monotonic():
                due.append(heapq.heappop(self._heap)[2])
        return due


# ---- in forked children ------------------------------------------------------------------


def renew(lock: Any) -> None:
    """Free an RLock, in a forked child, if a thread of the parent holds it: that will never release
    it here. Who waits for it, or comes to it later, then learns that it is in a child.

    >>> lock = threading.RLock()
    >>> with lock:
    ...     renew(lock)  # of this thread: it stays taken
    """
    if not lock._is_owned():
        lock._at_fork_reinit()


# ---- refused ones ------------------------------------------------------------------------


@contextlib.contextmanager
def needed(path: str) -> Iterator[None]:
    """Raise LedgerError if a thread cannot be started in the block."""
    try:
        yield
    except RuntimeError as error:
        raised = refusal(path, error)
        if raised is None:
            raise
        try:
            raise raised from error
        finally:
            # Otherwise the error and the frame would refer to each other, and keep what was opened.
            del raised


def start(path: str, thread: threading.Thread) -> threading.Thread:
    """Start this thread for the ledger in `path`; LedgerError if it cannot be started."""
    try:  # not `needed`, which costs more: each commit of the main thread starts one
        thread.start()
    except RuntimeError as error:
        interrupt = error.__context__ if str(error) == UNLOCKED else None
        if interrupt is not None:
            raise interrupt from None
        with needed(path):
            raise error
    return thread


class Helpers:
    """Daemon threads that make a call for another thread, so that an exception raised in that one
    (Ctrl-C, the time limit of a task queue) interrupts only its wait, and not the call.

    A thread that has made its call waits `IDLE_SECONDS` for the next one: starting one takes longer
    than a short transaction.
    """

    IDLE_SECONDS = 0.5

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: deque[SimpleQueue[Callable[[], object]]] = deque()

    def call(self, path: str, function: Callable[[], object]) -> None:
        """Have a thread call `function`, which must not raise; LedgerError if none can be
        started."""
        taken = map(methodcaller("put", function), iter(self._idle.pop, None))
        try:
            next(taken)  # in one call of C: an interrupt between the two would lose the thread
        except IndexError:
            calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
            calls.put(function)
            run = threading.Thread(target=self._run, args=(calls,), name=self._name, daemon=True)
            start(path, run)

    def _run(self, calls: SimpleQueue[Callable[[], object]]) -> None:
        while True:
            try:
                function = calls.get(timeout=self.IDLE_SECONDS)
            except Empty:
                try:
                    self._idle.remove(calls)
                except ValueError:
                    continue  # another thread has just taken it, and is about to put a call
                return
            function()
            del function  # it must not keep what it refers to
            self._idle.append(calls)

    def forget(self) -> None:
        """Forget the parent's threads, in a forked child."""
        self._idle = deque()


def refusal(path: str, error: RuntimeError) -> LedgerError | None:
    """The error that replaces Python's own for a thread that cannot be started; None for
    any other error."""
    text = str(error)
    if SHUTTING_DOWN in text or "after shutdown" in text or "after interpreter" in text:
        return LedgerError(f"{path}: no thread can be started while the interpreter shuts down")
    if REFUSED in text:
        return LedgerError(
            f"{path}: the system refuses another thread to this process ({limits()}); nothing was "
            "changed. Raise the limit (ulimit -u, pids.max; of memory: ulimit -v, memory.max), or "
            "end other threads"
        )
    return None


def limits() -> str:
    """The limits on the number of threads of this process, as text.

    >>> "RLIMIT_NPROC" in limits()
    True
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    said = [f"RLIMIT_NPROC {'unlimited' if soft == resource.RLIM_INFINITY else soft}"]
    most = _pids_max()
    if most is not None:
        said.append(f"pids.max {most}")
    return ", ".join(said)


def _pids_max() -> str | None:
    with Ignoring(OSError, StopIteration):
        with open("/proc/self/cgroup") as lines:
            group = next(line.strip().split(":", 2)[2] for line in lines if line.startswith("0::"))
        with open(f"/sys/fs/cgroup/{group.strip('/')}/pids.max") as limit:
            most = limit.read().strip()
        return None if most == "max" else most
    return None
