"""Small child processes that run a piece of source: for what may crash, hang or be killed.

>>> with child("print('ready', flush=True); input()") as process:
...     line(process)
'ready'
>>> finish("print(1 + 1)")
'2\\n'
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testing.descriptors import readable
from testing.patience import PATIENCE as PATIENCE

ROOT = Path(__file__).parent.parent


def script(*parts: str) -> str:
    """One source of several, each with an indentation of its own."""
    return "\n".join(textwrap.dedent(part).strip("\n") for part in parts) + "\n"


def command(source: str, *args: object) -> list[str]:
    """What starts Python on `source`, with `args` in its sys.argv."""
    program = [sys.executable, "-X", "faulthandler", "-c", script(source)]
    return program + [str(arg) for arg in args]


@contextlib.contextmanager
def child(source: str, *args: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child with pipes to and from it; killed, if need be, and reaped afterwards."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command(source, *args), stdin=pipe, stdout=pipe, text=True, cwd=ROOT, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not sent has no reader any more
                stream.close()


def line(process: subprocess.Popen[str], timeout: float = PATIENCE) -> str:
    """The child's next line."""
    deadline = time.monotonic() + timeout
    output = process.stdout.fileno()
    text = b""
    while not text.endswith(b"\n"):
        left = max(0.0, deadline - time.monotonic())
        assert readable(output, left), f"the child said nothing within {timeout} s"
        byte = os.read(output, 1)
        assert byte, f"the child has ended: {process.wait(PATIENCE)}"
        text += byte
    return text.decode().rstrip("\n")


def tell(process: subprocess.Popen[str], text: str = "") -> None:
    """Give the child a line to read."""
    process.stdin.write(text + "\n")
    process.stdin.flush()


def finish(source: str, *args: object, timeout: float = PATIENCE, **options: Any) -> str:
    """Run the child to its end; what it printed. It must end well: a crash is a failure."""
    done = subprocess.run(
        command(source, *args),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def die_with_parent(parent: int) -> None:
    """End this process with `parent`, the one that started it, which may have ended already."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_with_this() -> Callable[[], None]:
    """A `preexec_fn` for children that must end with this process."""
    return functools.partial(die_with_parent, os.getpid())


def run_pytest(*arguments: str | Path, status: int = 0) -> str:
    """pytest's output, from the project's directory; AssertionError unless its status is this."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *map(str, arguments)]
    # Without what tells pytest-benchmark that the test that calls this runs beside others.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
