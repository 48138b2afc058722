"""Runs what a page of the documentation shows, as its reader would, in a directory of its own.

- A `python` block that begins with `# name.py` is a file. Any other one is run, in one namespace
  for the whole page; what it prints is what the block after `<!-- prints -->` says.
- In a `console` block each `$ command` is run; what follows it is what it prints. A command that
  ends in `&` goes on in the background; `<!-- ann prints -->` before a block is what the one with
  the argument `ann` prints next; `<!-- ann prints, in any order -->` before lines of two threads.
- `...` stands for anything. Process ids differ: a `pid 4711` that a page shows is known from then
  on, also in commands.
- `<!-- before: code -->` before a block is Python that is run first, unseen by readers.
- `<!-- not run: why -->` before a block leaves it out; its Python must compile nevertheless.

>>> [block.language for block in blocks("```python\\nx\\n```\\n\\n```text\\ny\\n```\\n")]
['python', 'text']
>>> matches("pid ... of 7", "pid 12 of 7\\n"), matches("ok", "not ok")
(True, False)
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import exclusivelog as xl
from testing.patience import PATIENCE

BLOCK = re.compile(
    r"^(?: *<!-- (?P<mark>[^\n]*?) -->\n+)?"
    r"(?P<margin> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PID = re.compile(r"\bpid (\d+)")
ANY_ORDER = ", in any order"
SHELL = ("cat", "kill", "ls", "mkdir", "rm", "cp", "mv", "python", "pytest", "echo")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the comment before it."""

    language: str
    text: str
    mark: str
    line: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    found = []
    for match in BLOCK.finditer(page):
        margin = match["margin"]
        text = "".join(
            line.removeprefix(margin) for line in match["text"].splitlines(keepends=True)
        )
        number = page.count("\n", 0, match.start("language")) + 1
        found.append(Block(match["language"], text, match["mark"] or "", number))
    return found


def pattern(expected: str) -> str:
    """A regular expression for a text in which `...` stands for anything."""
    lines = [line.rstrip() for line in expected.strip().splitlines()]
    escaped = re.escape("\n".join(lines)).replace(r"\.\.\.", ".*?")
    return PID.sub(r"pid (\\d+)", escaped.replace(r"pid\ ", "pid "))


def matches(expected: str, found: str) -> bool:
    """Is `found` what a page expects?"""
    lines = "\n".join(line.rstrip() for line in found.strip().splitlines())
    return re.fullmatch(pattern(expected), lines, re.DOTALL) is not None


class Screen(io.StringIO):
    """A terminal, as far as programs ask."""

    def isatty(self) -> bool:
        """Tables are drawn on it."""
        return True


class Job:
    """A command in the background, and what it has printed."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.seen = ""
        self._seeing = threading.Lock()  # protects it
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seeing:
                self.seen += line

    def pass_by(self, end: int) -> None:
        """Forget so much of what it has printed."""
        with self._seeing:
            self.seen = self.seen[end:]

    def end(self) -> None:
        """Kill it, and wait for it."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._thread.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Reader:
    """Someone who does what the page says, in the working directory."""

    def __init__(self, page: str) -> None:
        self._blocks = blocks(page)
        self._names: dict[str, Any] = {"__name__": "__main__", "path": "data/path"}
        self._jobs: dict[str, Job] = {}
        self._pids: dict[str, str] = {}
        self._printed = ""
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        self._env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self._env.get('PATH', '')}"

    def read(self) -> int:
        """Run all blocks; returns how many were run. AssertionError at the first that fails."""
        number = 0
        try:
            for block in self._blocks:
                number += self._do(block)
        finally:
            for job in self._jobs.values():
                job.end()
            for left_open in [each for each in self._names.values() if isinstance(each, xl.Engine)]:
                left_open.close()
        return number

    def _do(self, block: Block) -> bool:
        if block.mark.startswith("not run: "):
            if block.language == "python":
                compile(block.text, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            return False
        if block.mark.startswith("before: "):
            exec(block.mark.removeprefix("before: "), self._names)
        if block.mark == "prints":
            self._compare(block, self._printed)
        elif match := re.fullmatch(rf"(\w[\w-]*) prints({ANY_ORDER})?", block.mark):
            self._await(block, self._jobs[match[1]])
        elif block.language == "python":
            self._python(block)
        elif block.language == "console":
            self._console(block)
        else:
            return False
        return True

    def _python(self, block: Block) -> None:
        if name := re.match(r"# ([\w./]+\.py)\n", block.text):
            compile(block.text, name[1], "exec")
            Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(name[1]).write_text(block.text)
            return
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if block.text.startswith(">>>"):
                self._doctest(block)
            else:
                code = compile(
                    block.text, f"line {block.line}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                )
                found = eval(code, self._names)
                if asyncio.iscoroutine(found):
                    asyncio.run(found)
        self._printed = output.getvalue()

    def _doctest(self, block: Block) -> None:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        test = doctest.DocTestParser().get_doctest(
            block.text, self._names, f"line {block.line}", None, block.line
        )
        report = io.StringIO()
        doctest.DocTestRunner(optionflags=flags).run(test, out=report.write, clear_globs=False)
        self._names.update(test.globs)
        assert not report.getvalue(), report.getvalue()

    def _console(self, block: Block) -> None:
        parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
        for command, expected in zip(parts[::2], parts[1::2], strict=True):
            words = [self._pids.get(w, w) for w in shlex.split(command, comments=True)]
            if words[-1] == "&":
                assert words[0] == "python"
                name = words[-2]
                self._jobs[name] = Job([sys.executable, *words[1:-1]], self._env)
                if expected.strip():
                    self._await(Block("text", expected, "", block.line), self._jobs[name])
                continue
            found = self._run(words)
            deadline = time.monotonic() + PATIENCE / 6
            while not matches(expected, found) and words[1:2] == ["owners"]:
                if time.monotonic() > deadline:  # a worker may not have joined the queue yet
                    break
                found = self._run(words)
            self._compare(Block("text", expected, "", block.line), found, f"$ {command}\n")

    def _run(self, words: list[str]) -> str:
        if words[0] == "exclusivelog":
            return command(words[1:])
        assert words[0] in SHELL, (
            f"{words[0]}: the test does not run this; say <!-- not run: why -->"
        )
        pipeline = " ".join(word if word in "|<>" else shlex.quote(word) for word in words)
        done = subprocess.run(
            ["sh", "-c", pipeline],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=self._env,
            check=False,
        )
        return done.stdout + done.stderr

    def _await(self, block: Block, job: Job) -> None:
        """Wait until the job has printed that, and pass it."""
        texts = [block.text]
        if block.mark.endswith(ANY_ORDER):
            texts = ["\n".join(lines) for lines in permutations(block.text.strip().splitlines())]
        deadline = time.monotonic() + PATIENCE
        while True:
            for text in texts:
                match = re.match(pattern(text) + "(?=\n)", job.seen, re.DOTALL)
                if match is not None:
                    self._learn(text, match)
                    job.pass_by(match.end() + 1)
                    return
            assert time.monotonic() < deadline, (
                f"line {block.line}:\n{block.text}\nbut:\n{job.seen}"
            )
            time.sleep(0.01)

    def _compare(self, block: Block, found: str, after: str = "") -> None:
        lines = "\n".join(line.rstrip() for line in found.strip().splitlines())
        match = re.fullmatch(pattern(block.text), lines, re.DOTALL)
        if match is None:
            told = f"the page says\n{block.text.strip()}\n\nbut it is\n{found}"
            raise AssertionError(f"line {block.line}: {after}{told}")
        self._learn(block.text, match)

    def _learn(self, expected: str, match: re.Match[str]) -> None:
        for shown, found in zip(PID.findall(expected), match.groups(), strict=True):
            assert self._pids.setdefault(shown, found) == found, f"pid {shown} is {found}"


def command(words: list[str]) -> str:
    """What the command prints on a terminal; run in this process, which is faster."""
    from exclusivelog.cli import load

    program = load()
    screen = Screen()
    terminal = {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        with mock.patch.dict(os.environ, terminal), contextlib.suppress(SystemExit):
            program(words, prog_name="exclusivelog")
    return STYLE.sub("", screen.getvalue())


@contextlib.contextmanager
def reader_of(page: Path, directory: Path) -> Iterator[Reader]:
    """A reader of that page, whose working directory is `directory`."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield Reader(page.read_text())
    finally:
        os.chdir(before)
