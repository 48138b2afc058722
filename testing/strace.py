"""Kill or stop a process at a chosen system call, with strace."""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.children import child, die_with_parent, line, tell
from testing.patience import PATIENCE


@dataclass(frozen=True)
class Point:
    """Where a process is killed: at the n-th call of a kind that a thread makes."""

    call: str
    when: int
    behind: bool  # right after the call, not before it

    def __str__(self) -> str:
        return f"{self.call}-{self.when}-{'behind' if self.behind else 'before'}"

    @property
    def injection(self) -> str:
        # SIGKILL keeps the call from starting; SIGSTOP takes effect when it returns.
        number = "SIGSTOP" if self.behind else "SIGKILL"
        return f"inject={self.call}:signal={number}:when={self.when}"


def attached(pid: int, *options: str) -> subprocess.Popen[str]:
    """A strace that traces the process and its threads. Who asks for it ends it."""
    strace = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), *options], stderr=subprocess.PIPE, text=True
    )
    assert strace.stderr is not None
    said = "\n"
    while said and "attached" not in said:
        said = strace.stderr.readline()
    if not said:
        strace.communicate(timeout=PATIENCE)
        raise AssertionError("strace has ended")
    return strace


@contextlib.contextmanager
def traced(pid: int, *options: str) -> Iterator[None]:
    """Trace the process and its threads with strace, while the block runs."""
    strace = attached(pid, *options)
    try:
        yield
    finally:
        strace.terminate()
        strace.communicate(timeout=PATIENCE)


def injecting(pid: int, injection: str, *paths: str) -> contextlib.AbstractContextManager[None]:
    """Let system calls fail, or be late, while the block runs: all of them, or those on `paths`."""
    options = [option for path in paths for option in ("-P", path)]
    return traced(pid, "-o", os.devnull, *options, "-e", f"inject={injection}")


def points(trace: Path) -> list[Point]:
    """Every point at which a thread of the traced process could be killed."""
    most: collections.Counter[str] = collections.Counter()
    for (_, call), count in collections.Counter(
        re.findall(r"^(\d+) +(\w+)\(", trace.read_text(), re.M)
    ).items():
        most[call] = max(most[call], count)
    return [
        Point(call, when + 1, behind)
        for call, count in most.items()
        if call not in ("exit", "exit_group")
        for when in range(count)
        for behind in (False, True)
    ]


# ---- processes that die there ------------------------------------------------------------

SERVES = "import sys; from testing.strace import serve; serve(*sys.argv[1:])"


@dataclass
class ForkServer:
    """Forks one process after the other; each costs milliseconds, not the start of Python."""

    process: subprocess.Popen[str]

    def start(self, *job: Any) -> int:
        """Fork a process; return its id when it is ready and waits."""
        tell(self.process, json.dumps(job, default=str))
        return int(line(self.process))

    def end(self) -> tuple[int, str]:
        """Let it run to its end; return its exit status, and what it said or its error."""
        tell(self.process)
        status, said = json.loads(line(self.process))
        assert status in (0, 1, -signal.SIGKILL), f"{status}: {said}"
        return status, said

    def run(self, *job: Any, strace: tuple[str, ...] = ()) -> tuple[int, str]:
        """`start` and `end`, under strace if there are options for that."""
        pid = self.start(*job)
        with traced(pid, *strace) if strace else contextlib.nullcontext():
            return self.end()


@contextlib.contextmanager
def fork_server(work: str, *arguments: Any) -> Iterator[ForkServer]:
    """For each job a process that calls `module:function` with `arguments`, the job, and two
    functions: `begin()`, which waits for `ForkServer.end`, and `say(text)`."""
    with child(SERVES, work, json.dumps(arguments, default=str)) as process:
        yield ForkServer(process)


def serve(work: str, arguments: str) -> None:
    """Fork a process for each line of input. One that SIGSTOP has stopped is killed there."""
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    for job in sys.stdin:
        (go, start), (said, says) = os.pipe(), os.pipe()
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(said)
            _live(server, function, [*json.loads(arguments), *json.loads(job)], go, says)
        os.close(says)
        os.close(go)
        os.read(said, 1)
        print(pid, flush=True)
        sys.stdin.readline()
        with contextlib.suppress(BrokenPipeError):  # killed while it waits for this
            os.write(start, b"!")
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        answer = [os.waitstatus_to_exitcode(status), os.read(said, 2000).decode()]
        print(json.dumps(answer), flush=True)
        os.close(start)
        os.close(said)


def _live(server: int, function: Any, arguments: list[Any], go: int, says: int) -> None:
    def begin() -> None:
        os.write(says, b"!")
        os.read(go, 1)

    die_with_parent(server)
    try:
        function(*arguments, begin, lambda text: os.write(says, text.encode()))
        os._exit(0)
    except BaseException as error:
        os.write(says, f"{type(error).__name__}: {error}".encode())
    os._exit(1)
