"""Processes that are forked from one that has imported everything: starting one takes milliseconds,
not the start of an interpreter, so that more of them can be killed.

>>> with fork_server("time:sleep") as fork:
...     process = fork(os.devnull, 60)
...     process.alive, process.kill(), process.alive
(True, None, False)
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.children import PATIENCE, child, die_with_parent, line, tell
from testing.descriptors import readable

PR_SET_CHILD_SUBREAPER = 36
SERVER = "import sys; from proof.fork_server import serve; serve(sys.argv[1])"


@dataclass
class Forked:
    """A forked process. It is identified by a pidfd, because its pid may be reused after its
    death."""

    pidfd: int

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not readable(self.pidfd, 0)

    def kill(self) -> None:
        """Send SIGKILL, and wait until all of its files are closed."""
        self.signal(signal.SIGKILL)
        assert readable(self.pidfd, PATIENCE), "a process does not die"

    def close(self) -> None:
        """Kill it, and close the pidfd."""
        self.kill()
        os.close(self.pidfd)


@contextlib.contextmanager
def fork_server(
    work: str, environment: Mapping[str, str] | None = None
) -> Iterator[Callable[..., Forked]]:
    """`fork(stderr, ...)` calls `module:function` with the other arguments in a new process, whose
    stderr is the file `stderr`. All processes end with the block, and what they have forked."""
    with child(SERVER, work, env={**os.environ, **(environment or {})}) as process:

        def fork(stderr: Path | str, *arguments: Any) -> Forked:
            tell(process, json.dumps([str(stderr), *arguments]))
            return Forked(os.pidfd_open(int(line(process))))

        try:
            yield fork
        finally:
            process.communicate(timeout=PATIENCE)  # ends its input


def serve(work: str) -> None:
    """Fork a process for each line of input. What lives on at the end of the input is killed, also
    the children of those that were killed: a child of C code may hang for ever in Python itself."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    children: set[int] = set()
    for job in sys.stdin:
        stderr, *arguments = json.loads(job)
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            _live(server, stderr, function, arguments)
        print(pid, flush=True)
        # Reap dead processes only now: before the client has opened a pidfd, the pid must not be
        # reused.
        children = {each for each in children if os.waitpid(each, os.WNOHANG)[0] == 0} | {pid}
    _end_all()


def _end_all() -> None:
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while True:
            for pid in Path("/proc/thread-self/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def _live(server: int, stderr: str, function: Callable[..., None], arguments: list[Any]) -> None:
    try:
        die_with_parent(server)
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
