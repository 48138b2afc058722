"""Rule C4: a time namespace moves the monotonic clock of the processes in it. Heartbeats are
compared across namespaces all the same: a healthy owner stays owner, a silent one does not."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.shm import lockfile
from testing.children import PATIENCE, ROOT, command, finish, line, tell
from testing.processes import stop_outside

UPTIME = float(Path("/proc/uptime").read_text().split()[0])
# A clock below 0 is not permitted. Soon after a boot BEHIND grows from second to second: no test
# is named by it, since the workers of one run must find the same names.
AHEAD, BEHIND = 86400, -int(min(UPTIME / 2, 600))


def in_time(offset: int, source: str, *args: object) -> list[str]:
    """The command for a child whose monotonic clock is so many seconds ahead."""
    if not offset:
        return command(source, *args)
    prefix = ["unshare", "--time", "--monotonic", str(offset), "--fork", "--kill-child"]
    return prefix + command(source, *args)


def can_unshare() -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run(
            in_time(AHEAD, "pass"), capture_output=True, timeout=PATIENCE, check=False
        )
        return tried.returncode == 0
    return False


pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not can_unshare(), reason="unshare --time is not permitted here"),
]


@contextlib.contextmanager
def process(offset: int, source: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        in_time(offset, source, *args), stdin=pipe, stdout=pipe, text=True, cwd=ROOT
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait(PATIENCE)
        for stream in (started.stdin, started.stdout):
            with contextlib.suppress(OSError):
                stream.close()


# With "raw" as an argument they go by the clock of their namespace, as it is.
BEGIN = """
    import sys, time
    import exclusivelog as xl
    from exclusivelog.local.shm import lockfile
    if sys.argv[2] == "raw":
        lockfile.namespace_offset = lambda: 0
    engine = xl.open(sys.argv[1], name="child", keepalive=float(sys.argv[3]))
    topic = engine.topic("orders")
"""
OWNER = (
    BEGIN
    + """
    producer = topic.producer("exclusive")
    print(time.monotonic(), flush=True)
    while input():
        try:
            print(producer.send(b"mine"), flush=True)
        except xl.ProducerFencedError:
            print("fenced", flush=True)
"""
)
RIVAL = (
    BEGIN
    + """
    with_heartbeats = {info.heartbeat_age < 30 for info in engine.engines()}
    try:
        topic.producer("wait_for_exclusive", timeout=2.5)
        print("granted", flush=True)
    except xl.WaitTimeoutError:
        print("waits", with_heartbeats, flush=True)
"""
)

PAIRS = {
    "rival ahead": (0, AHEAD),
    "rival behind": (0, BEHIND),
    "owner ahead": (AHEAD, 0),
    "owner behind": (BEHIND, 0),
    "both, apart": (BEHIND, AHEAD),
}


def rival_of(path: str, owner_offset: int, rival_offset: int, how: str) -> tuple[str, str]:
    """(what becomes of the rival, of the owner's next message)."""
    keepalive = 10  # which is less than the clocks differ, and more than a busy machine takes
    with process(owner_offset, OWNER, path, how, keepalive) as owner:
        clock = float(line(owner))
        assert abs(clock - time.monotonic() - owner_offset) < 30  # it is another clock indeed
        with process(rival_offset, RIVAL, path, how, keepalive) as rival:
            found = line(rival)
            tell(owner, "send")
            return found, line(owner)


@pytest.mark.long
@pytest.mark.parametrize("offsets", PAIRS.values(), ids=PAIRS)
def test_c4_an_owner_in_another_time_namespace_stays_owner(
    path: str, offsets: tuple[int, int]
) -> None:
    """The owner beats its heart, and another one wants its topic: by a clock of another day."""
    xl.open(path).close()
    assert rival_of(path, *offsets, "machine") == ("waits {True}", "0")


@pytest.mark.sampled
@pytest.mark.parametrize("offsets", [(0, AHEAD), (BEHIND, 0)], ids=["rival ahead", "owner behind"])
def test_c4_control_the_namespace_s_own_clock_evicts(path: str, offsets: tuple[int, int]) -> None:
    """The same, each by the clock of its namespace: the owner is taken for silent."""
    xl.open(path).close()
    assert rival_of(path, *offsets, "raw") == ("granted", "fenced")


@pytest.mark.sampled
@pytest.mark.parametrize("offset", [AHEAD, BEHIND], ids=["ahead", "behind"])
def test_c3_an_owner_that_hangs_in_another_time_namespace_is_evicted(
    path: str, offset: int
) -> None:
    """And no later than elsewhere, although its clock is a day ahead, or behind."""
    source = (
        BEGIN
        + """
    producer = topic.producer("exclusive")
    import os
    print(os.getpid(), flush=True)
    input()
"""
    )
    with xl.open(path) as engine, process(offset, source, path, "machine", 1.0) as owner:
        stop_outside(path, int(line(owner)))
        producer = engine.topic("orders").producer("wait_for_exclusive", timeout=PATIENCE)
        assert producer.topic_epoch == 2


FORKS = """
    import ctypes, os, sys, time
    import exclusivelog as xl
    from exclusivelog import _core
    engine = xl.open(sys.argv[1], name="parent")
    assert ctypes.CDLL(None).unshare(0x80) == 0    # CLONE_NEWTIME: for the children
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write("monotonic 86400 0")
    again = xl.open(sys.argv[1], name="again")
    assert abs(_core.now() / 1e9 - time.monotonic()) < 1
    child = os.fork()
    if child == 0:
        engine = xl.open(sys.argv[1], name="child")
        assert abs(time.monotonic() - 86400 - _core.now() / 1e9) < 1
        assert all(info.heartbeat_age < 30 for info in engine.engines())
        engine.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("well")
"""


def test_c4_a_child_of_a_process_that_has_left_its_time_namespace_goes_by_its_own(
    path: str,
) -> None:
    """`unshare(CLONE_NEWTIME)` moves the children, not the caller; the offsets that /proc tells
    are the children's from then on."""
    assert finish(FORKS, path) == "well\n"


LOST = """
    import ctypes, os, sys, time
    import exclusivelog as xl
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:    # which could tell
            time.sleep(0.01)
        assert ctypes.CDLL(None).unshare(0x80) == 0
        try:
            xl.open(sys.argv[1])
        except xl.LedgerError as error:
            print(error, flush=True)
    os._exit(0)
"""


def test_c4_a_process_whose_clock_cannot_be_told_is_refused(path: str) -> None:
    """It is in a namespace whose offset no file in /proc gives: it makes its children in another
    one, and its parent is gone."""
    xl.open(path).close()
    # `unshare` ends with its child, and kills what the child leaves behind unless told not to.
    options = [option for option in in_time(AHEAD, LOST, path) if option != "--kill-child"]
    done = subprocess.run(
        options, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE, check=True
    )
    assert "time namespace whose clock offset cannot be read" in done.stdout
    with xl.open(path) as engine:
        assert engine.verify().ok


def test_c4_without_a_namespace_the_clock_is_the_machine_s() -> None:
    assert lockfile.namespace_offset() == 0
    before, now, after = time.monotonic_ns(), _core.now(), time.monotonic_ns()
    assert before <= now <= after
