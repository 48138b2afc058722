"""What `run` does: a command runs while this process holds a lock."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Self

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.cli import watchdog
from exclusivelog.cli.output import printable_lines
from exclusivelog.foreign import Ignoring, pass_on_foreign

ENDING = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# A waiting process does with these what it always would.
PASSED_ON = (*ENDING, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
BY_SIGNAL, NOT_EXECUTABLE, NOT_FOUND = 128, 126, 127  # a shell's exit statuses
LOST = 1  # of a command that was ended before it was done, though it says 0
LOOK_SECONDS = 1.0  # between two looks whether the lock is held; most losses are told at once
REST_SECONDS = 0.1  # between two looks whether processes of the command's group are left
LONGEST_ADDRESS = 107  # bytes of a socket's
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def lead(
    path: str,
    name: str,
    command: Sequence[str],
    priority: int,
    timeout: float | None,
    grace: float,
    options: Mapping[str, Any],
) -> int:
    """Wait for the lock, and run the command; its exit status. `options` are those of `open`."""
    engine_name = os.path.basename(command[0]) or None
    with Signals() as signals:
        try:
            with xl.open(path, engine_name, **options) as engine:
                return _run_in_turn(engine, name, command, priority, timeout, grace, signals)
        except Signalled as ended:
            return BY_SIGNAL + ended.number


def _run_in_turn(
    engine: xl.Engine,
    name: str,
    command: Sequence[str],
    priority: int,
    timeout: float | None,
    grace: float,
    signals: Signals,
) -> int:
    notify(f"READY=1\nSTATUS=waits for lock {name}")
    with engine.lock(name, timeout, priority=priority, on_lost=lambda *_: signals.wake()) as lock:
        signals.begin_to_pass_on()
        terminal = Terminal()
        with Watchdog() as on_death:
            try:
                process = started(command, lock.epoch, terminal, on_death)
            except OSError as error:
                pass_on_foreign(error)
                tell(f"{command[0]}: {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            notify(f"STATUS=has lock {name}, epoch {lock.epoch}; runs {command[0]}")
            running = Running(process, signals, grace, terminal)
            try:
                running.run_while(lambda: not lock.lost)
                was_lost = not running.has_ended
                if was_lost:
                    notify("STOPPING=1\nSTATUS=lost the lock")
                    tell(f"lock {name!r} was lost at epoch {lock.epoch}; the command is ended")
            finally:
                running.end()
        status = running.status()  # last: the watchdog must not kill another group of the same id
    return status or (LOST if was_lost else 0)


def tell(text: str) -> None:
    """Print a line to stderr, whatever names it has."""
    print(printable_lines(f"exclusivelog: {text}"), file=sys.stderr, flush=True)


# ---- the command ---------------------------------------------------------------------------


def started(
    command: Sequence[str], epoch: int, terminal: Terminal, on_death: Watchdog
) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own, which dies with this process."""
    environment = {**os.environ, "EXCLUSIVELOG_EPOCH": str(epoch)}
    environment.pop("NOTIFY_SOCKET", None)  # of this process
    parent = os.getpid()

    def begin() -> None:
        on_death.kill(os.getpgrp())
        terminal.give_to(os.getpgrp())
        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it has died before
            os._exit(BY_SIGNAL + signal.SIGKILL)

    return subprocess.Popen(command, env=environment, process_group=0, preexec_fn=begin)


class Watchdog:
    """Kills the command's process group once this process has died, however: PR_SET_PDEATHSIG kills
    only the command itself. It is a process that reads a pipe; the pipe ends with this process, as
    no other one has its writing end."""

    def __init__(self) -> None:
        # The reading end stays open here, too: to write to a dead watchdog must not fail.
        self._reading, self._writing = os.pipe()
        program = [sys.executable, "-I", "-S", os.path.abspath(watchdog.__file__)]
        # What is typed, and signals to this process's group, do not reach another session.
        self._process = subprocess.Popen(
            program,
            stdin=self._reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def kill(self, group: int) -> None:
        """Let it kill this group. The command calls this itself, before it is executed."""
        os.write(self._writing, b"%d" % group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._reading)
        os.close(self._writing)


class Terminal:
    """The terminal, if this process is in its foreground: the command then reads it, and gets what
    is typed, such as Ctrl-C."""

    def __init__(self) -> None:
        self._own = os.getpgrp()

    @property
    def is_ours(self) -> bool:
        """Whether this process's group is in the foreground."""
        try:
            return os.tcgetpgrp(0) == self._own
        except OSError as error:  # there is no terminal
            pass_on_foreign(error)
            return False

    def give_to(self, group: int) -> None:
        """Put a process group into the foreground, if this one is."""
        if self.is_ours:
            self._put(group)

    def take_back(self, group: int) -> None:
        """Put this process's group there instead of that one."""
        with Ignoring(OSError):
            if os.tcgetpgrp(0) == group:
                self._put(self._own)

    def _put(self, group: int) -> None:
        # Who is not in the foreground gets SIGTTOU for this.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
        try:
            with Ignoring(OSError):
                os.tcsetpgrp(0, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Running:
    """The command while it runs. It is reaped last: until then, its process group keeps its id."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        signals: Signals,
        grace: float,
        terminal: Terminal,
    ) -> None:
        self._process, self._signals, self._grace = process, signals, grace
        self._terminal = terminal

    @property
    def has_ended(self) -> bool:
        """Whether the command itself has ended."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def run_while(self, is_held: Callable[[], bool]) -> None:
        """Pass signals on until the command ends, or the lock is not held any more."""
        while not self.has_ended and is_held():
            numbers = self._signals.taken()
            for number in numbers:
                if number not in (signal.SIGTSTP, signal.SIGCONT):
                    self._kill(number)
            if signal.SIGTSTP in numbers or self._was_stopped():
                self._stop_with_it(is_held)
            self._signals.wait(LOOK_SECONDS)

    def _was_stopped(self) -> bool:
        """Whether the command has stopped since the last look, as Ctrl-Z lets it."""
        with Ignoring(ChildProcessError):  # it has just ended
            return os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG) is not None
        return False

    def _stop_with_it(self, is_held: Callable[[], bool]) -> None:
        """Stop as well, for a shell to notice; let the command go on with this process, unless the
        lock was lost meanwhile."""
        self._kill(signal.SIGSTOP)
        self._terminal.take_back(self._process.pid)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signals.await_one(signal.SIGCONT)  # the stop may come a moment later
        self._was_stopped()  # it was told of already
        if is_held():
            self._terminal.give_to(self._process.pid)
            self._kill(signal.SIGCONT)

    def end(self) -> None:
        """End what is left of the command's process group: nothing of it runs once the lock is
        released."""
        if self._is_left():
            self._kill(signal.SIGTERM)
            self._kill(signal.SIGCONT)
            self._await_end(self._grace)
        if self._is_left():
            self._kill(signal.SIGKILL)
            self._await_end(self._grace)
        self._terminal.take_back(self._process.pid)

    def _await_end(self, seconds: float) -> None:
        end = _core.monotonic() + seconds
        while self._is_left() and (left := end - _core.monotonic()) > 0:
            self._signals.wait(min(left, REST_SECONDS))

    def _is_left(self) -> bool:
        """Is a process of its group left?"""
        return not self.has_ended or is_alive(self._process.pid)

    def _kill(self, number: int) -> None:
        with Ignoring(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def status(self) -> int:
        """The exit status, as a shell's."""
        status = self._process.wait()
        return status if status >= 0 else BY_SIGNAL - status


def is_alive(group: int) -> bool:
    """Does any process of this group run?"""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with Ignoring(OSError):  # it has ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, found = file.read().rpartition(b")")[2].split()[:3]
            if int(found) == group and state not in (b"Z", b"X"):
                return True
    return False


# ---- signals -------------------------------------------------------------------------------


class Signalled(BaseException):
    """A signal has come while this process waits for the lock."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """The signals that come, for a loop that waits for them, for a child's end, and for `wake`. The
    kernel's delivery writes to a pipe, so that none is missed just before a wait."""

    def __init__(self) -> None:
        self._ends_waits = True  # until the command runs: a signal then raises Signalled
        self._came: deque[int] = deque()
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former: dict[int, Any] = {}
        self._former_descriptor = -1
        self._closing = _core.Lock()

    def __enter__(self) -> Self:
        self._former_descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *ENDING):
            self._take(number)
        return self

    def _take(self, number: int) -> None:
        former = signal.getsignal(number)
        if number not in self._former and (
            former is not signal.SIG_IGN or number == signal.SIGCHLD  # as by nohup
        ):
            self._former[number] = former
            signal.signal(number, self._handle)

    def begin_to_pass_on(self) -> None:
        """From now on, keep signals for the command. Raises Signalled if one has come before: the
        one that it raised may have been lost in a callback."""
        self._ends_waits = False
        if self._came:
            raise Signalled(self._came[0])
        for number in PASSED_ON:
            self._take(number)

    def __exit__(self, *exception: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        signal.set_wakeup_fd(self._former_descriptor)
        with self._closing:
            for descriptor in (self._reading, self._writing):
                os.close(descriptor)
            self._writing = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        self._came.append(number)
        if self._ends_waits:
            raise Signalled(number)

    def taken(self) -> list[int]:
        """The signals that have come since the last call."""
        return [self._came.popleft() for _ in range(len(self._came))]

    def await_one(self, number: int) -> None:
        """Wait until this signal has come; those beside it stay to be taken."""
        while number not in self._came:
            self.wait(LOOK_SECONDS)
        self._came.remove(number)

    def wake(self) -> None:
        """End a present wait, or the next one. Any thread may call it."""
        with self._closing, Ignoring(OSError):  # the pipe is full, or closed
            os.write(self._writing, b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for a signal or `wake`, at most so many seconds."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        poll.poll(seconds * 1000)
        with Ignoring(BlockingIOError):
            os.read(self._reading, 4096)


# ---- systemd -------------------------------------------------------------------------------


def notify(state: str) -> None:
    """Tell systemd, if this is the main process of a unit with Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    if len(os.fsencode(address)) > LONGEST_ADDRESS:
        return
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with Ignoring(OSError), socket.socket(socket.AF_UNIX, kind) as systemd:
        systemd.sendto(os.fsencode(state), address)
