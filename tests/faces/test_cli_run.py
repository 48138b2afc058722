"""`exclusivelog run`: a command that runs while its process holds a lock. Real processes, real
signals."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.descriptors import readable
from testing.processes import FENCING, PATIENCE, set_keepalive, stop_outside, until, within

pytestmark = [pytest.mark.once, pytest.mark.long]

# Writes its epoch to a file, and then waits for a signal: what it says of that comes after it.
WAITS = """
    trap 'echo TERM >> "$0"; exit 3' TERM
    trap 'echo INT >> "$0"; exit 4' INT
    trap 'echo USR1 >> "$0"' USR1
    echo "$EXCLUSIVELOG_EPOCH $$" >> "$0"
    while :; do sleep 0.05; done
"""
DEAF = """
    trap '' TERM
    echo "$EXCLUSIVELOG_EPOCH $$" >> "$0"
    while :; do sleep 0.05; done
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    """`start(*arguments, "--", *command)`: a process of `exclusivelog run PATH job ...`."""
    began: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "exclusivelog", "run", path, "job", *arguments]
        began.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]
        )
        return began[-1]

    yield begin
    for process in began:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate(timeout=PATIENCE)


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """The file that the command writes to."""
    return tmp_path / "said"


def lines(said: Path) -> list[str]:
    return said.read_text().splitlines() if said.exists() else []


def begun(said: Path, count: int = 1) -> tuple[int, int]:
    """Wait for so many commands; the epoch and the process id of the last one."""
    until(lambda: sum(" " in line for line in lines(said)) == count)
    epoch, pid = next(line for line in reversed(lines(said)) if " " in line).split()
    return int(epoch), int(pid)


def has_ended(pid: int) -> bool:
    """It is gone, or a zombie that nobody reaps here."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def waiting(engine: xl.Engine) -> int:
    return sum(len(info.waiters) for info in engine.roles())


def take(engine: xl.Engine) -> xl.Role:
    """Take the lock from its holder."""
    return engine.role("job", access_mode=FENCING)


# ---- its exit status ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", 'test "$EXCLUSIVELOG_EPOCH" = 1'], 0),
        (["sh", "-c", 'test -z "$NOTIFY_SOCKET"'], 0),
        (["no-such-command"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_the_exit_status_of_the_command_is_passed_on(
    start: Start, engine: xl.Engine, command: list[str], status: int
) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": "/nowhere/at/all"}
    process = start("--", *command, env=environment)
    _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, b"Traceback" in error) == (status, False)
    assert bool(error) == (status in (126, 127))
    with engine.lock("job", timeout=0) as lock:  # it is released
        assert lock.epoch == 2


# ---- one at a time -----------------------------------------------------------------------


@pytest.mark.rule("A1")
def test_the_next_one_begins_when_the_command_has_ended(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    first = start("--", "sh", "-c", WAITS, str(said))
    begun(said)
    second = start("--", "sh", "-c", WAITS, str(said))
    until(lambda: waiting(engine) == 1)
    once = start("--timeout", "0", "--", "true")
    _, error = once.communicate(timeout=PATIENCE)
    assert once.returncode == 1
    assert b"lock 'job' was not granted" in error
    assert b"held by engine 'sh'" in error  # named for the command
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE) == 3
    epoch, _ = begun(said, 2)
    assert epoch == 2
    second.send_signal(signal.SIGINT)
    assert second.wait(PATIENCE) == 4
    assert [line for line in lines(said) if " " not in line] == ["TERM", "INT"]


def test_the_priority_decides_who_is_next(start: Start, engine: xl.Engine, said: Path) -> None:
    with engine.lock("job"):
        start("--", "sh", "-c", 'echo "low" >> "$0"', str(said))
        until(lambda: waiting(engine) == 1)
        start("--priority", "5", "--", "sh", "-c", 'echo "high" >> "$0"', str(said))
        until(lambda: waiting(engine) == 2)
    until(lambda: lines(said) == ["high", "low"])


# ---- signals -----------------------------------------------------------------------------


def test_signals_are_passed_on(start: Start, said: Path) -> None:
    process = start("--", "sh", "-c", WAITS, str(said))
    begun(said)
    process.send_signal(signal.SIGUSR1)
    until(lambda: "USR1" in lines(said))
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 4


@pytest.mark.rule("D5")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_wait_and_leaves_no_waiter(
    start: Start, engine: xl.Engine, said: Path, number: int
) -> None:
    with engine.lock("job"):
        process = start("--", "sh", "-c", WAITS, str(said))
        until(lambda: waiting(engine) == 1)
        process.send_signal(number)
        _, error = process.communicate(timeout=PATIENCE)
        assert (process.returncode, error) == (128 + number, b"")
        until(lambda: waiting(engine) == 0)
    assert lines(said) == []


def test_a_signal_that_is_ignored_stays_ignored(start: Start, said: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start("--", "sh", "-c", WAITS, str(said), preexec_fn=ignore)
    _, pid = begun(said)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    until(lambda: "USR1" in lines(said))
    os.kill(pid, signal.SIGHUP)  # the command inherits it
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 3


# ---- the loss ----------------------------------------------------------------------------


@pytest.mark.rule("C6")
def test_the_loss_ends_the_command_and_its_process_group(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    beside = f"sh -c 'echo child $$ >> {said}; exec sleep 3600' & {WAITS}"
    process = start("--", "sh", "-c", beside, str(said))
    until(lambda: len(lines(said)) == 2)
    pids = [int(line.split()[1]) for line in lines(said)]
    with take(engine):
        _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert b"lock 'job' was lost at epoch 1" in error
    assert "TERM" in lines(said)
    until(lambda: all(map(has_ended, pids)))


def test_a_command_that_says_0_was_ended_before_it_was_done(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    ends_well = 'trap "exit 0" TERM; echo $$ >> "$0"; while :; do sleep 0.05; done'
    process = start("--", "sh", "-c", ends_well, str(said))
    until(lambda: len(lines(said)) == 1)
    with take(engine):
        assert process.wait(PATIENCE) == 1


def test_a_command_that_does_not_end_is_killed_after_the_grace(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    process = start("--grace", "0.1", "--", "sh", "-c", DEAF, str(said))
    _, pid = begun(said)
    with take(engine):
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert has_ended(pid)


@pytest.mark.rule("C2")
def test_the_command_dies_with_its_parent(start: Start, engine: xl.Engine, said: Path) -> None:
    first = start("--", "sh", "-c", DEAF, str(said))
    _, pid = begun(said)
    start("--", "sh", "-c", WAITS, str(said))
    until(lambda: waiting(engine) == 1)
    first.kill()
    assert begun(said, 2)[0] == 2
    until(lambda: has_ended(pid))


# ---- its own death -----------------------------------------------------------------------

# A command with a child, which is no child of `run`; both ignore SIGTERM.
FAMILY = """
    trap '' TERM
    sh -c 'echo child $$ >> "$0"; exec sleep 3600' "$0" &
    echo "$EXCLUSIVELOG_EPOCH $$" >> "$0"
    wait
"""


def family(said: Path) -> list[int]:
    """Wait for the command and its child; their process ids."""
    until(lambda: sum(" " in line for line in lines(said)) == 2)
    return [int(line.split()[1]) for line in lines(said) if " " in line]


def watchdog_of(process: subprocess.Popen[bytes], *command: int) -> int:
    """The child of this process that does not belong to its command."""
    there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    [found] = [pid for pid in there.difference(command) if parent_of(pid) == process.pid]
    return found


def parent_of(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@pytest.mark.rule("C2")
def test_the_process_group_of_the_command_dies_with_its_parent(start: Start, said: Path) -> None:
    """Also if the whole process group of `run` is killed, as a shell kills a job."""
    first = start("--", "sh", "-c", FAMILY, str(said), process_group=0)
    found = family(said)
    watchdog = watchdog_of(first, *found)
    os.killpg(first.pid, signal.SIGKILL)
    until(lambda: all(map(has_ended, [*found, watchdog])))


@pytest.mark.rule("C2")
def test_a_service_manager_s_sigterm_does_not_end_the_watchdog(start: Start, said: Path) -> None:
    """It sends SIGTERM to all processes of a service; `run` may be killed after that."""
    process = start("--", "sh", "-c", FAMILY, str(said))
    found = family(said)
    watchdog = watchdog_of(process, *found)
    until(lambda: ignores(watchdog, signal.SIGTERM))
    os.kill(watchdog, signal.SIGTERM)
    process.kill()
    until(lambda: all(map(has_ended, [*found, watchdog])))


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_watchdog_ends_with_the_command(start: Start, said: Path) -> None:
    process = start("--", "sh", "-c", WAITS, str(said))
    watchdog = watchdog_of(process, begun(said)[1])
    process.terminate()
    assert process.wait(PATIENCE) == 3
    assert has_ended(watchdog)


def test_a_watchdog_that_is_killed_does_no_harm(start: Start, said: Path) -> None:
    process = start("--", "sh", "-c", WAITS, str(said))
    _, pid = begun(said)
    watchdog = watchdog_of(process, pid)
    os.kill(watchdog, signal.SIGKILL)
    until(lambda: has_ended(watchdog))
    process.send_signal(signal.SIGUSR1)
    until(lambda: "USR1" in lines(said))
    process.kill()
    until(lambda: has_ended(pid))  # the command itself needs none


@pytest.mark.rule("C3")
def test_one_that_was_paused_ends_its_command_when_it_resumes(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    first = start("--keepalive", "600", "--", "sh", "-c", WAITS, str(said))
    begun(said)
    start("--", "sh", "-c", WAITS, str(said))
    until(lambda: waiting(engine) == 1)
    stop_outside(engine.path, first.pid)
    assert [*set_keepalive(engine.path, first.pid, 0.5).values()] == [600_000_000_000]
    assert begun(said, 2)[0] == 2
    assert "TERM" not in lines(said)  # nobody has told it yet
    first.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE) == 3


LEAVES = """
    trap '' USR1
    sh -c 'trap "sleep 0.3; echo over >> \\"$0\\"; exit" TERM
           : > "$0.trap"; while :; do sleep 0.05; done' "$0" &
    echo "$EXCLUSIVELOG_EPOCH $$" >> "$0"
    until test -e "$0.trap"; do sleep 0.01; done
"""


def test_nothing_of_its_process_group_runs_once_the_lock_is_released(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    process = start("--grace", f"{PATIENCE}", "--", "sh", "-c", LEAVES, str(said))
    begun(said)
    with engine.lock("job", PATIENCE):
        assert lines(said)[-1] == "over"
    assert process.wait(PATIENCE) == 0


def test_a_window_that_changes_its_size_ends_no_wait(start: Start, engine: xl.Engine) -> None:
    with engine.lock("job"):
        process = start("--", "true")
        until(lambda: waiting(engine) == 1)
        process.send_signal(signal.SIGWINCH)
        process.send_signal(signal.SIGSTOP)  # the signal before has been delivered once it goes on
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE) == 0


def test_the_command_stops_with_its_process_and_goes_on_with_it(
    start: Start, engine: xl.Engine, said: Path
) -> None:
    process = start("--", "sh", "-c", WAITS, str(said))
    _, pid = begun(said)
    process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    until(lambda: state_of(pid) in "TD")  # D: its child was stopped before it was a program
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait(PATIENCE) == 3


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_command_has_the_terminal(path: str) -> None:
    """It reads what is typed, and Ctrl-C ends it."""
    pid, terminal = pty.fork()
    if pid == 0:
        command = ["run", path, "job", "--", "sh", "-c", "read x; echo got $x; exec sleep 3600"]
        os.execv(sys.executable, [sys.executable, "-m", "exclusivelog", *command])
    try:
        shown = b""
        os.write(terminal, b"hello\n")
        while b"got hello" not in shown:
            assert readable(terminal, PATIENCE), shown
            shown += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        found = within(lambda: os.waitpid(pid, 0)[1])
        assert os.waitstatus_to_exitcode(found) == 128 + signal.SIGINT
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


# ---- systemd -----------------------------------------------------------------------------


def test_systemd_is_told_who_waits_and_who_leads(
    start: Start, engine: xl.Engine, said: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)
        with engine.lock("job"):
            environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
            process = start("--", "sh", "-c", WAITS, str(said), env=environment)
            assert systemd.recv(1000) == b"READY=1\nSTATUS=waits for lock job"
            until(lambda: waiting(engine) == 1)
        assert systemd.recv(1000) == b"STATUS=has lock job, epoch 2; runs sh"
        begun(said)
        with take(engine):
            assert systemd.recv(1000) == b"STOPPING=1\nSTATUS=lost the lock"
            assert process.wait(PATIENCE) == 3


def test_an_abstract_socket_is_told_too(start: Start, tmp_path: Path) -> None:
    name = f"@exclusivelog-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:])
        systemd.settimeout(PATIENCE)
        start("--", "true", env={**os.environ, "NOTIFY_SOCKET": name})
        assert systemd.recv(1000).startswith(b"READY=1\n")
