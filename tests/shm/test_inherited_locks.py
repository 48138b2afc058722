"""File locks that a child of C code inherits, and keeps although its parent has ended (rule C8).

A child that calls the library closes what it has inherited. A worker that C code forked may never
call it: the kernel then keeps the locks of its parent's open files for as long as the child lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.local.files import LOCK, Directory, lock_open_file
from exclusivelog.local.storage.environment import Reading, parse_readers
from exclusivelog.local.versions import in_use
from testing.children import child, line
from testing.deaths import READERS, address_of
from testing.processes import UNSEEN_FORKS, forked, until

pytestmark = [pytest.mark.once, pytest.mark.rule("C8")]

READS = """
    import sys
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine, engine.ledger.read() as tables:
        tables.topics.all()
        print("reading", flush=True)
        input()
"""
FORKS = """
    import os, signal, sys, threading
    import exclusivelog as xl
    from testing.processes import UNSEEN_FORKS
    path, fork, threads = sys.argv[1], UNSEEN_FORKS[sys.argv[2]], int(sys.argv[3])
    engine = xl.open(path)
    together = threading.Barrier(threads + 1)

    def read():
        with engine.ledger.read() as tables:
            tables.topics.all()
            together.wait()
            signal.pause()

    for _ in range(threads):
        threading.Thread(target=read, daemon=True).start()
    together.wait()
    pid = fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    print(pid, flush=True)
    signal.pause()
"""
PLACE, FIRST_PLACE, PLACES = 64, 128, 56  # in lock.mdb on x86-64 and ARM: bytes, and where


@pytest.fixture
def orphans() -> Iterator[list[int]]:
    """The children of parents that a test has killed."""
    found: list[int] = []
    yield found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def readings(engine: xl.Engine) -> list[Reading]:
    with engine.ledger.environment() as env:
        return parse_readers(env.readers())


def readers(engine: xl.Engine) -> set[int]:
    """The processes that are inside a read."""
    return {each.pid for each in readings(engine)} - {os.getpid()}


@pytest.mark.long
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "a zombie"])
@pytest.mark.parametrize("fork", UNSEEN_FORKS)
def test_c8_a_child_of_c_code_keeps_no_read_of_its_dead_parent(
    engine: xl.Engine, topic: xl.Topic, orphans: list[int], fork: str, reaped: bool
) -> None:
    """Its snapshot made data.mdb grow for as long as the child lived, which had called nothing.
    The reads of processes that live are older, and stay."""
    with child(READS, engine.path) as living, child(FORKS, engine.path, fork, 3) as process:
        assert line(living) == "reading"
        topic.producer().close()  # so that the next snapshot is another one
        orphans.append(int(line(process)))
        assert readers(engine) == {living.pid, process.pid}
        process.kill()
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        until(lambda: process.pid not in readers(engine))
        assert readers(engine) == {living.pid}
    until(lambda: not readers(engine))


def test_c8_places_behind_the_earlier_end_of_the_table_are_freed(
    path: str, orphans: list[int]
) -> None:
    """LMDB makes its lock file longer after its mutexes are looked at."""
    xl.open(path, max_readers=4).close()
    with xl.open(path, max_readers=100) as engine:
        with child(FORKS, path, "fork in C", 30) as process:
            orphans.append(int(line(process)))
            assert len(readings(engine)) >= 30
            process.kill()
            process.wait()
        until(lambda: not readers(engine))


@pytest.fixture
def stranger() -> Iterator[int]:
    """The id of a process that has nothing of the ledger."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_c8_a_process_with_the_id_of_a_dead_reader_keeps_no_read(
    engine: xl.Engine, topic: xl.Topic, stranger: int
) -> None:
    """The reader's child has its lock, and another program its id."""
    with (Path(engine.path) / LOCK).open("r+b") as file:
        assert lock_open_file(file.fileno(), "read", at=stranger)
        start_of_page = address_of(engine, READERS) & -mmap.PAGESIZE
        count = ctypes.c_uint32.from_address(start_of_page + PLACES)
        at = start_of_page + FIRST_PLACE + count.value * PLACE
        assert at + PLACE <= start_of_page + mmap.PAGESIZE
        ctypes.c_uint64.from_address(at).value = 1  # the transaction that is read
        ctypes.c_uint32.from_address(at + 8).value = stranger
        count.value += 1
        assert readers(engine) == {stranger}
        until(lambda: not readers(engine))


# ---- the locks of the files --------------------------------------------------------------


def is_in_use(path: str) -> bool:
    directory = Directory(path)
    try:
        return in_use(directory, by_readers=True)
    finally:
        directory.close()


CLOSES = """
    import os, signal, sys
    import exclusivelog as xl
    from testing.processes import UNSEEN_FORKS
    engine = xl.open(sys.argv[1])
    pid = UNSEEN_FORKS[sys.argv[2]]()
    if pid == 0:
        signal.pause()
        os._exit(0)
    engine.close()
    print(pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("fork", UNSEEN_FORKS)
def test_c8_a_closed_ledger_is_in_use_by_no_child_of_c_code(
    path: str, orphans: list[int], fork: str
) -> None:
    """No upgrade and no restoration was possible before the child had ended."""
    with child(CLOSES, path, fork) as process:
        orphans.append(int(line(process)))
        assert not is_in_use(path)


@pytest.mark.parametrize("fork", UNSEEN_FORKS.values(), ids=UNSEEN_FORKS)
def test_c8_a_child_that_closes_leaves_the_locks_of_its_parent(
    engine: xl.Engine, fork: Callable[[], int]
) -> None:
    forked(engine.close, fork=fork)
    assert is_in_use(engine.path)
