"""Systems that refuse a call: containers with a list of permitted ones, emulators, hardened units.

The library works without what it can do without, and otherwise names what is missing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import exclusivelog as xl
from testing.children import PATIENCE, child, finish, line, script
from testing.seccomp import NUMBERS

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not NUMBERS, reason="the numbers of system calls here are not known"),
]
Child = subprocess.Popen[str]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount")

USE = """
    import errno, os, sys, time
    from testing.seccomp import refuse
    if sys.argv[2:]:
        refuse(sys.argv[2], int(sys.argv[3]))
    import exclusivelog as xl
    try:
        with xl.open(sys.argv[1]) as engine, engine.topic("orders").producer("exclusive") as first:
            print(first.send(b"x"))
    except xl.LedgerError as error:
        print(type(error).__name__, error)
"""
OWN = """
    import sys
    from testing.seccomp import refuse
    refuse(sys.argv[2], int(sys.argv[3]))
    import exclusivelog as xl
    engine = xl.open(sys.argv[1], keepalive=None)
    producer = engine.topic("orders").producer("exclusive")
    print("owns", flush=True)
    sys.stdin.read()
"""
WAIT = """
    import sys, time
    from testing.seccomp import refuse
    from testing.patience import PATIENCE
    refuse(sys.argv[2], int(sys.argv[3]))
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine:
        waiting = engine.topic("orders").producer_async("wait_for_exclusive")
        began, used = time.monotonic(), time.process_time()
        print("waits", flush=True)
        with waiting.result(PATIENCE) as producer:
            print(producer.topic_epoch, flush=True)
            print((time.process_time() - used) / (time.monotonic() - began), flush=True)
"""
EPERM, EINVAL, ENOSYS = "1", "22", "38"


@contextlib.contextmanager
def owner_and_waiter(path: str, *refused: str) -> Iterator[tuple[Child, Child]]:
    with child(OWN, path, *refused) as owner:
        assert line(owner) == "owns"
        with child(WAIT, path, *refused) as waiter:
            assert line(waiter) == "waits"
            yield owner, waiter


@pytest.mark.rule("C8")
def test_c8_without_robust_lists_a_death_is_found_all_the_same(path: str) -> None:
    """As under emulators: the kernel reports no death at all."""
    refused = "set_robust_list", ENOSYS
    with owner_and_waiter(path, *refused) as (owner, waiter):
        owner.kill()
        assert line(waiter) == "2"


@pytest.mark.parametrize("number", [EPERM, ENOSYS])
def test_a_waiter_sleeps_where_futex_waitv_is_refused(path: str, number: str) -> None:
    """Lists of permitted calls answer EPERM, earlier kernels ENOSYS."""
    refused = "futex_waitv", number
    with owner_and_waiter(path, *refused) as (owner, waiter):
        with pytest.raises(AssertionError, match="said nothing"):
            line(waiter, 1.5)
        owner.kill()
        assert line(waiter) == "2"
        assert float(line(waiter)) < 0.1  # of one processor; it was 0.3 to 0.8


@pytest.mark.parametrize(
    ("call", "number", "told"),
    [
        ("F_OFD_SETLK", EINVAL, "there are no open-file locks, F_OFD_SETLK"),
        ("fallocate", ENOSYS, "the system refuses a call that a ledger needs"),
        ("fdatasync", EPERM, "the calls that its container permits (seccomp)"),
    ],
)
def test_a_call_that_is_refused_is_named(path: str, call: str, number: str, told: str) -> None:
    assert told in finish(USE, path, call, number)


def test_a_program_with_much_thread_local_memory(path: str) -> None:
    """It leaves no room on a small stack."""
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000"}
    assert finish(USE, path, env=environment) == "0\n"


@needs_root
@pytest.mark.parametrize("option", ["subset=pid", "hidepid=invisible"])
def test_a_proc_that_shows_less(path: str, option: str) -> None:
    """ProcSubset= and ProtectProc= of systemd. What is hidden is not dead."""
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"x")
        mounted = f'mount -t proc -o {option} proc /proc && exec "$@"'
        program = [sys.executable, "-c", script(USE.replace('"exclusive"', '"shared"')), path]
        command = subprocess.run(
            ["unshare", "-m", "sh", "-c", mounted, "sh", *program],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if command.returncode and "mount:" in command.stderr:
            pytest.skip(f"this kernel cannot mount /proc with {option}")
        assert producer.send(b"y") > 0
    if option == "subset=pid":
        assert "/proc/sys/kernel/random/boot_id is missing" in command.stdout
        assert "without ProcSubset=pid" in command.stdout
    else:
        assert command.stdout == "1\n"


@needs_root
def test_a_limit_on_locked_memory_is_named(path: str) -> None:
    source = script(
        """
        import ctypes, resource
        import exclusivelog, exclusivelog.opening
        most = min(32 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
        assert ctypes.CDLL(None).mlockall(2) == 0
        """,
        USE,
    )
    program = [sys.executable, "-c", source, path]
    done = subprocess.run(
        [*"setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock".split(), *program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "LedgerError" in done.stdout
    assert "mlockall" in done.stdout or "-l)" in done.stdout
