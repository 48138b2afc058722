#!/usr/bin/env python3
"""Runs groups of checks in parallel, and prints the result of each at the end.

    tools/groups.py [--beside N] TARGET...

A group is a target of the Makefile in this directory. Its output goes to build/TARGET.txt, and is
printed group by group. A group that fails does not keep the others from running. The exit status is
the worst one. A process that a group leaves behind is ended and makes the group fail. Ctrl-C ends
all of them. The last lines of those that failed are printed again at the end, where they are seen.

Each group has a directory of its own for temporary files, as TMPDIR: a pytest that removes what
earlier ones have left must not meet another one that does so. Those of groups that fail are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

OUTPUT = Path("build")
ENDS_WITHIN = 20.0  # seconds that a process has after SIGTERM
LAST = 60  # lines of a group that failed
LINGERS = 10.0  # seconds that a process may live on after its group: servers end with their users
PR_SET_CHILD_SUBREAPER = 36
ENDED = dict[int, int]()  # the exit statuses of processes that were reaped


@dataclass
class Group:
    """One target of the Makefile, and what has come of it."""

    target: str
    temporary: Path  # its TMPDIR
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0
    status: int | None = None
    left: list[str] = field(default_factory=list)
    printed: int = 0  # bytes of its output

    @property
    def output(self) -> Path:
        """Where its output goes."""
        return OUTPUT / f"{self.target}.txt"

    @property
    def result(self) -> str:
        """What came of it, in words."""
        if self.status is None:
            return "interrupted" if self.began else "not run"
        if self.left:
            return f"left behind: {', '.join(self.left)}"
        return "passed" if self.status == 0 else f"failed, status {self.status}"

    def start(self) -> None:
        """Run the target in a process group of its own, so that it can be ended as a whole."""
        self.began = time.monotonic()
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)  # as /tmp: tests run programs as other users, too
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                ["make", "--no-print-directory", self.target],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "GROUP": self.target,
                    "MAKEFLAGS": "",
                    "MAKELEVEL": "0",
                    "TMPDIR": str(self.temporary),
                },
            )

    def end(self, status: int) -> None:
        """Note its result, and end what it has left behind."""
        self.seconds = time.monotonic() - self.began
        self.left = end_left(lambda: left_by(self.target))
        self.status = status if status >= 0 else 128 - status

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than it should."""
        return self.status is not None and (self.status != 0 or bool(self.left))

    def last(self) -> str:
        """The last lines of its output, with a heading."""
        lines = self.output.read_text(errors="replace").splitlines()[-LAST:]
        return "\n".join((f"==== the end of {self.output}", *lines, ""))

    def show(self) -> None:
        """Print what it has written since the last call."""
        if self.process is not None:
            with self.output.open("rb") as output:
                output.seek(self.printed)
                new = output.read()
            self.printed += len(new)
            sys.stdout.buffer.write(new)
            sys.stdout.flush()


def minutes(seconds: float) -> str:
    """
    >>> minutes(75.2)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def remove(directory: Path) -> None:
    """Remove it with all that is in it, also what tests have protected."""
    for folder, names, _ in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(directory, ignore_errors=True)


def remove_temporary(groups: list[Group], root: Path) -> None:
    """Remove the temporary files of all groups that have not failed; say where the others are."""
    for group in groups:
        if not group.failed:
            remove(group.temporary)
    try:
        root.rmdir()
    except OSError:
        print(f"temporary files of what failed: {root}")


# ---- processes ---------------------------------------------------------------------------


def descendants() -> dict[int, str]:
    """All processes below this one, with their commands; also those whose parents have ended."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found = dict[int, str]()
    below = [os.getpid()]
    while below:
        for pid in children.get(below.pop(), []):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found[pid] = words.decode(errors="replace").strip()[:120]
                below.append(pid)
    return found


def left_by(target: str) -> dict[int, str]:
    """The processes that this group has started: they have inherited its environment."""
    mark, found = f"GROUP={target}".encode(), dict[int, str]()
    for pid, words in descendants().items():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = words
    return found


def end_left(left: Callable[[], dict[int, str]]) -> list[str]:
    """End the processes that live on; their commands."""
    deadline = time.monotonic() + LINGERS
    while found := left():
        if time.monotonic() > deadline:
            end_all(found)
            return list(found.values())
        reap()
        time.sleep(0.1)
    return []


def end_all(pids: dict[int, str]) -> None:
    """SIGTERM, and SIGKILL for those that remain."""
    for signum, patience in ((signal.SIGTERM, ENDS_WITHIN), (signal.SIGKILL, ENDS_WITHIN)):
        for pid in pids.keys() & descendants().keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # it may be stopped
                os.kill(pid, signum)
        deadline = time.monotonic() + patience
        while pids.keys() & descendants().keys() and time.monotonic() < deadline:
            time.sleep(0.05)
        reap()


def reap() -> None:
    """Note the exit status of each child that has ended, also of adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ENDED[pid] = os.waitstatus_to_exitcode(status)


# ---- the run -----------------------------------------------------------------------------


def run(groups: list[Group], beside: int) -> None:
    """Run all groups, in this order, so many at a time; print the output of one after the other."""
    waiting, running, printing = list(groups), list[Group](), iter(groups)
    shown: Group | None = None
    while waiting or running:
        while waiting and len(running) < beside:
            running.append(waiting.pop(0))
            running[-1].start()
        reap()
        for group in [each for each in running if each.process and each.process.pid in ENDED]:
            running.remove(group)
            group.end(ENDED[group.process.pid])
        shown = show(shown, printing)
        time.sleep(0.05)
    while shown is not None:
        shown = show(shown, printing)


def show(group: Group | None, printing: Iterator[Group]) -> Group | None:
    """Print what is new of this group; the group to go on with."""
    if group is None or group.status is not None:
        if group is not None:
            group.show()
            print(f"==== {group.target}: {group.result}, {minutes(group.seconds)}\n", flush=True)
        group = next(printing, None)
        if group is not None:
            print(f"==== {group.target}", flush=True)
    if group is not None:
        group.show()
    return group


def summary(groups: list[Group]) -> int:
    """Print the end of what failed, and the result of each group; the worst exit status."""
    for group in groups:
        if group.failed:
            print(f"\n{group.last()}")
    print(f"\n{'group':<16} {'time':>6}  result")
    for group in groups:
        print(f"{group.target:<16} {minutes(group.seconds):>6}  {group.result}")
    left = end_left(descendants)  # with another environment than that of their group
    if left:
        print(f"left behind: {', '.join(left)}")
    return max(1 if left or group.left else group.status or 0 for group in groups)


def interrupted(signum: int, frame: object) -> NoReturn:
    """End the run as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the groups that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=int, default=2, help="groups that run at a time")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    arguments = parser.parse_args()
    # A process whose parent has ended becomes a child of this one, and can be found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupted)
    OUTPUT.mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="xl-"))  # short: paths of sockets have 107 bytes at most
    root.chmod(0o755)
    groups = [
        Group(target, root / f"{number}-{target}")
        for number, target in enumerate(arguments.targets)
    ]
    try:
        run(groups, arguments.beside)
    except KeyboardInterrupt:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        end_all(descendants())
        summary(groups)
        return 130
    else:
        return summary(groups)
    finally:
        remove_temporary(groups, root)


if __name__ == "__main__":
    sys.exit(main())
