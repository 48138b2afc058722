"""File locks that a child of C code inherits, and keeps although its parent has ended (rule C8).

A child that calls the library closes what it has inherited. A worker that C code forked may never
call it: the kernel then keeps the locks of its parent's open files for as long as the child lives.
LMDB frees the place of a reader only once the lock of its process is gone. So a thread whose table
of descriptors is its own holds that lock: no fork copies it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.files import LOCK, lock_open_file
from exclusivelog.local.storage.environment import parse_readers
from testing.children import child, line
from testing.processes import UNSEEN_FORKS, forked, until
from testing.seccomp import NUMBERS

pytestmark = [pytest.mark.once, pytest.mark.rule("C8")]

READS = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1], readonly=True) as engine, engine.ledger.read() as tables:
        tables.topics.all()
        print("reading", flush=True)
        input()
"""
FORKS = """
    import os, signal, sys
    from testing.seccomp import refuse
    if sys.argv[3:]:
        refuse(*sys.argv[3:4], 38)
    import exclusivelog as xl
    from testing.processes import UNSEEN_FORKS
    engine = xl.open(sys.argv[1])
    with engine.ledger.read() as tables:
        tables.topics.all()
        pid = UNSEEN_FORKS[sys.argv[2]]()
        if pid == 0:
            signal.pause()
            os._exit(0)
        print(pid, flush=True)
        signal.pause()
"""


@contextlib.contextmanager
def forked_in_c(path: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process inside a read, and its child, which outlives it."""
    with child(FORKS, path, *arguments) as process:
        orphan = int(line(process))
        try:
            yield process, orphan
        finally:
            os.kill(orphan, signal.SIGKILL)


def readers(engine: xl.Engine) -> set[int]:
    """The processes that are inside a read, once LMDB has freed the places of those that it takes
    for dead."""
    with engine.ledger.environment() as env:
        env.reader_check()
        return {each.pid for each in parse_readers(env.readers())} - {os.getpid()}


def end(process: subprocess.Popen[str], reaped: bool) -> None:
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fork", "reaped"),
    [("fork in C", True), ("system call", True), ("fork in C", False)],
    ids=["fork in C", "system call", "a zombie"],
)
def test_c8_a_child_of_c_code_keeps_no_read_of_its_dead_parent(
    engine: xl.Engine, fork: str, reaped: bool
) -> None:
    """Its snapshot made data.mdb grow for as long as the child lived, which had called nothing."""
    with forked_in_c(engine.path, fork) as (process, _):
        assert readers(engine) == {process.pid}
        end(process, reaped)
        until(lambda: not readers(engine))


@pytest.mark.long
@pytest.mark.skipif(not NUMBERS, reason="the numbers of system calls here are not known")
def test_c8_where_the_system_refuses_that_the_child_keeps_it(engine: xl.Engine) -> None:
    """An earlier kernel, or a list of permitted calls: a living reader keeps its place there."""
    with forked_in_c(engine.path, "fork in C", "close_range") as (process, _):
        end(process, reaped=True)
        assert readers(engine) == {process.pid}
    until(lambda: not readers(engine))


@pytest.mark.long
@pytest.mark.parametrize("fork", UNSEEN_FORKS)
def test_c8_the_reads_of_a_living_process_outlive_its_children(
    engine: xl.Engine, fork: str
) -> None:
    """The children of C code end, as do those that close the engine; their parent reads on."""
    with child(READS, engine.path) as process:
        assert line(process) == "reading"
        for _ in range(3):
            forked(lambda: None, fork=UNSEEN_FORKS[fork])
            assert readers(engine) == {process.pid}
    with engine.ledger.read() as tables:
        tables.topics.all()
        forked(engine.close, fork=UNSEEN_FORKS[fork])
        assert others_see(engine) == f"[{os.getpid()}]\n"


OTHERS_SEE = """
    import sys
    import exclusivelog as xl
    from tests.shm.test_inherited_locks import readers
    with xl.open(sys.argv[1]) as engine:
        print(sorted(readers(engine)))
"""


def others_see(engine: xl.Engine) -> str:
    with child(OTHERS_SEE, engine.path) as process:
        return line(process) + "\n"


# ---- the lock itself -----------------------------------------------------------------------


def test_c8_the_lock_is_there_until_it_is_released(engine: xl.Engine) -> None:
    with (Path(engine.path) / LOCK).open("r+b") as file:
        at = 1 << 30  # no process has this id
        lock = _core.PrivateLock(file.fileno(), at)
        assert not lock_open_file(file.fileno(), "write", at)
        lock.release()
        assert lock_open_file(file.fileno(), "write", at)
        lock.release()


def test_c8_a_closed_engine_leaves_no_such_lock(path: str) -> None:
    with xl.open(path) as engine, (Path(path) / LOCK).open("r+b") as file:
        assert not lock_open_file(file.fileno(), "write", os.getpid())
        engine.close()
        assert lock_open_file(file.fileno(), "write", os.getpid())


def test_c8_a_lock_of_a_closed_file_is_an_error() -> None:
    with pytest.raises(OSError, match="No such file"):
        _core.PrivateLock(1 << 20, 0)
