"""A terminal on which a command runs: keys go in, and the screen is seen as a person sees it.

>>> with Terminal(["sh", "-c", "printf 'a\\\\tb'; read answer; echo got $answer"]) as screen:
...     _ = screen.see("a       b")
...     screen.type("yes\\r")
...     print(screen.see("got (.*)")[1])
yes
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

from testing.descriptors import readable
from testing.processes import PATIENCE


class Terminal:
    """A command on a terminal of its own; killed at the end, should it not have ended by itself."""

    def __init__(
        self,
        command: Sequence[str],
        size: tuple[int, int] = (40, 120),
        directory: Path | None = None,
    ) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, size)
        self.before = termios.tcgetattr(self.theirs)
        self._screen = pyte.Screen(size[1], size[0])
        self._stream = pyte.ByteStream(self._screen)
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**inherited, "TERM": "xterm"},
            start_new_session=True,
            cwd=directory,
        )

    def text(self) -> str:
        """What the screen shows now, without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._screen.display).strip("\n")

    def reversed(self) -> str:
        """The line that is shown in reverse: the one that is selected."""
        buffer = self._screen.buffer
        return "\n".join(
            line.rstrip()
            for number, line in enumerate(self._screen.display)
            if buffer[number][1].reverse
        )

    def see(self, pattern: str) -> re.Match[str]:
        """Wait until this stands on the screen."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.text())):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} never came:\n{self.text()}"
            self.draw(min(left, 1.0))
        return found

    def draw(self, timeout: float = 0.0) -> bool:
        """Take what the command has written, or writes within this time; False if nothing."""
        if not readable(self._ours, timeout):
            return False
        self._stream.feed(os.read(self._ours, 1 << 16))
        return True

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._ours, keys.encode())

    def wait(self) -> int:
        """The command's exit status, once it has ended. It draws on: a command whose screen nobody
        takes waits for that, and sees no key."""
        deadline = time.monotonic() + PATIENCE
        while (status := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"it never ended:\n{self.text()}"
            self.draw(0.05)
        return status

    def close(self) -> None:
        """End the command, and remove the terminal."""
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._ours)
        os.close(self.theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
