"""The `exclusivelog` command in a process of its own, without the start of an interpreter.

The process is forked off a server that has imported the command: 20 ms instead of 300. Tests of
what happens at the start or the end of the interpreter start `python -m exclusivelog.cli`.

>>> run("--version").returncode
0
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe

from testing.patience import PATIENCE
from testing.processes import forks, preload

for module in ("program", "messaging", "inspecting", "owning", "maintaining"):
    preload(f"exclusivelog.cli.{module}")

# Warnings that are true of a machine that is busy.
SLOW = (
    "wait for .*, which holds |no process can open the ledger until |a flush of the journal took "
)
_SLOW = re.compile(SLOW.encode())


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """What the command prints, but for true warnings, and its exit status."""
    pipes = [Pipe(duplex=False) for _ in range(3)]  # (the reading end, the writing end)
    (its_stdin, our_stdin), (our_stdout, its_stdout), (our_stderr, its_stderr) = pipes
    theirs = (its_stdin, its_stdout, its_stderr)
    process = forks.Process(target=_serve, args=(arguments, theirs, dict(os.environ), os.getcwd()))
    process.start()
    for end in theirs:
        end.close()
    printed: list[bytes] = [b"", b""]

    def read(number: int, end: Connection) -> None:
        printed[number] = b"".join(_chunks(end))

    readers = [
        threading.Thread(target=read, args=(number, end))
        for number, end in enumerate((our_stdout, our_stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        _write(our_stdin, stdin)
        process.join(PATIENCE)
        assert process.exitcode is not None, f"{arguments} did not end"
        for reader in readers:
            reader.join(PATIENCE)
        errors = printed[1].splitlines(keepends=True)
        printed[1] = b"".join(line for line in errors if not _SLOW.search(line))
        return subprocess.CompletedProcess(arguments, process.exitcode, *printed)
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        for end in (our_stdout, our_stderr):
            end.close()


def _write(end: Connection, data: bytes) -> None:
    # A command that does not read its input ends the pipe; to close a buffer is to write it again.
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(end.fileno()), "wb") as file:
        end.close()
        file.write(data)


def _chunks(end: Connection) -> Iterable[bytes]:
    while data := os.read(end.fileno(), 1 << 16):
        yield data


def _serve(
    arguments: tuple[str, ...], ends: tuple[Connection, ...], environment: dict[str, str], cwd: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for fd, end in enumerate(ends):
        os.dup2(end.fileno(), fd)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, closefd=False, errors=errors)  # noqa: SIM115
        for fd, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
    )
    sys.argv = ["exclusivelog", *arguments]
    from exclusivelog.cli import main

    main()
