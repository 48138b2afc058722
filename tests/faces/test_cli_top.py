"""`exclusivelog top`, in a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, until, within
from tests.faces.test_cli import PROGRAM, lines

pytestmark = pytest.mark.once


class Terminal:
    """A terminal on which a command runs."""

    def __init__(self, *arguments: str) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (40, 120))
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], stdin=self.theirs, stdout=self.theirs, stderr=self.theirs,
            env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, "TERM": "xterm"},
        )  # fmt: skip
        self.text = ""

    def see(self, pattern: str) -> str:
        """Wait until this stands on the screen, drawn since the wait before."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.text)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} never came:\n{self.text[-3000:]}"
            if select.select([self._ours], [], [], min(left, 1.0))[0]:
                data = os.read(self._ours, 1 << 16).decode(errors="replace")
                self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data)
        self.text = self.text[found.end() :]
        return found[0]

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(path: str) -> Iterator[Terminal]:
    with xl.open(path) as engine:
        for name in ("orders", "bills"):
            engine.topic(name).producer().send(b"a")
        with contextlib.closing(Terminal("top", path, "--interval", "0.2")) as screen:
            screen.see("2 of 2 topics")
            yield screen


def test_in_a_pipe_it_prints_tables_and_ends(engine, topic, path) -> None:
    with topic.producer("exclusive", name="leader") as leader:
        leader.send(b"a")
        engine.topic("empty")
        topic.reader(group="audit").commit()
        shown = lines("top", path, "-n", "2", "--interval", "0.1", "--sort", "topic")
    looks = [number for number, line in enumerate(shown) if line[0] == "topic"]
    assert len(looks) == 2
    assert shown[looks[1] - 1] == [""]
    empty, orders = shown[1:3]
    assert (empty[0], empty[2]) == ("empty", "0")
    assert orders == ["orders", "0", "1", "1", f"leader (pid {os.getpid()})", "0", "1"]
    assert any("orders grant (request): test" in line[0] for line in shown)
    assert lines("top", path, "-n", "1", "--filter", "emp")[1][0] == "empty"


def test_it_shows_rates(path, terminal) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:

        def grown() -> bool:
            producer.send_many([b"x"] * 100)
            with contextlib.suppress(AssertionError):
                return bool(within(lambda: terminal.see(r"orders +[1-9][\d,]* "), 60))
            return False

        until(grown)


def test_keys_sort_filter_and_quit(terminal) -> None:
    terminal.see("by rate")
    terminal.type("s")
    terminal.see("by topic")
    terminal.type("/bil\r")
    terminal.see("1 of 2 topics")
    terminal.type("q")
    assert terminal.process.wait(PATIENCE) == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_topic_is_unloaded_by_a_key(path, terminal) -> None:
    with xl.open(path, name="one") as one, xl.open(path, name="two") as two:
        with one.topic("orders").producer("exclusive", name="p"):
            waiting = two.topic("orders").producer_async("wait_for_exclusive", name="q")
            terminal.type("s")
            terminal.see("by topic")
            terminal.type("j")
            terminal.type("unobody\r")
            terminal.see("there is .engine-")
            terminal.type("utwo\r")
            terminal.see("orders owned 2 one two")
            assert waiting.result(PATIENCE).name == "q"


def test_ctrl_c_leaves_the_terminal_as_it_was(terminal) -> None:
    terminal.process.send_signal(2)
    assert terminal.process.wait(PATIENCE) == 130
    assert termios.tcgetattr(terminal.theirs) == terminal.before
