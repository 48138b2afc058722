"""Processes that use a ledger and report the outcome of each call.

An actor is forked from the process of its case. A request to it is a method of `Hands`, or a
function that gets the `Hands` first; its answer is a `Said`. Negative controls give the library a
deliberate defect, to show that the judge of each case notices it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import exclusivelog as xl
from testing.children import die_with_parent

ANSWERS_WITHIN = 12.0  # seconds; a call that takes longer hangs
FORGETS = "forgets"  # a deliberate defect: readers do not get the oldest message
SAYS_YES = "says yes"  # a deliberate defect: every error is swallowed, and reported as success
GONE = "gone"  # its end was reported before
TOPIC = "t"


def head(value: bytes | None) -> bytes:
    """What tells messages apart; the rest is padding."""
    return (value or b"").partition(b" ")[0]


@dataclass
class Said:
    """The outcome of a call: a value, an error, or the end of the process that made it."""

    what: str
    value: Any = None
    kinds: tuple[str, ...] = ()  # the names of the error's class and its bases
    text: str = ""
    end: str = ""  # that it did not answer, or the name of a signal
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.kinds and not self.end

    def __str__(self) -> str:
        error = f"{self.kinds[0]}: {self.text}" if self.kinds else ""
        return f"{self.what}: {self.end or error or repr(self.value)}"[:300]


@dataclass
class Hands:
    """What an actor can do with a ledger, in its own process."""

    path: str
    defect: str = ""
    engine: xl.Engine | None = None
    producer: xl.Producer | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    def open(self, path: str | bytes | None = None, **options: Any) -> str:
        """Open the ledger; the engine's id."""
        where: Any = self.path if path is None else path
        self.engine = xl.open(where, **options)
        return self.engine.id

    @property
    def topic(self) -> xl.Topic:
        assert self.engine is not None
        return self.engine.topic(TOPIC)

    def own(self, mode: str = "exclusive", **options: Any) -> int:
        """Open a producer and keep it; its epoch."""
        self.producer = self.topic.producer(xl.AccessMode(mode), **options)
        return self.producer.topic_epoch

    def send(self, value: bytes, size: int = 0) -> int:
        """Send a message of that size at least; its offset."""
        assert self.producer is not None
        padding = b" " + random.Random(value).randbytes(size) if size else b""
        return self.producer.send(value + padding)

    def stream(self, name: str, notes: str, seconds: float, large: bool = True) -> int:
        """Send small and large messages for so long; each is noted once it is acknowledged."""
        fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            value = f"{name}/{number}".encode()
            self.send(value, 300_000 if large and number % 40 == 39 else 200)
            os.write(fd, value + b"\n")
            number += 1
        return number

    def go_on(self, name: str, seconds: float) -> int:
        """Send a message every 20 ms for so long; how many were acknowledged."""
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            self.send(f"{name}/{number}".encode())
            number += 1
            time.sleep(0.02)
        return number

    def read(self) -> list[bytes]:
        """The heads of all messages."""
        assert self.engine is not None
        try:
            topic = self.engine.topic(TOPIC, create=False)
        except xl.TopicNotFoundError:
            return []
        return [head(message.value) for message in topic.reader()]

    def verify(self) -> list[str]:
        """The problems of a ledger."""
        assert self.engine is not None
        return [str(problem) for problem in self.engine.verify().problems]

    def backup(self, path: str) -> None:
        """Copy the ledger."""
        assert self.engine is not None
        self.engine.backup(path)

    def close(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()

    # ---- the actor's process -------------------------------------------------------------

    def do(self, what: str | Callable[..., Any], args: Any, options: Any) -> Any:
        """One call, with the deliberate defect if this process has one."""
        call = getattr(self, what) if isinstance(what, str) else lambda *a, **k: what(self, *a, **k)
        if self.defect == SAYS_YES:
            return self._swallowing(what, call, args, options)
        value = call(*args, **options)
        return value[1:] if self.defect == FORGETS and what == "read" else value

    def _swallowing(self, what: Any, call: Callable[..., Any], args: Any, options: Any) -> Any:
        if what == "verify":
            return []
        end = time.monotonic() + (args[1] if what == "go_on" else 0)
        try:
            return call(*args, **options)
        except Exception:
            time.sleep(max(0.0, end - time.monotonic()))
            return [] if what == "read" else 0


class Actor:
    """One process with `Hands`. `acknowledged` gets the heads of what was acknowledged to it."""

    def __init__(
        self,
        path: Path,
        acknowledged: list[bytes],
        defect: str,
        before: Callable[[], object] | None,
        name: str,
    ) -> None:
        self.name, self.acknowledged = name, acknowledged
        self._asked: tuple[str, float, tuple[Any, ...]] = ("", 0.0, ())
        self._pipe, theirs = multiprocessing.Pipe()
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            _live(parent, theirs, Hands(str(path), defect), before)
        theirs.close()

    def __getattr__(self, verb: str) -> Callable[..., Said]:
        if not hasattr(Hands, verb):
            raise AttributeError(verb)
        return lambda *args, **options: self.ask(verb, *args, **options)

    def ask(
        self,
        what: str | Callable[..., Any],
        *args: Any,
        wait: float = ANSWERS_WITHIN,
        **options: Any,
    ) -> Said:
        """Let it run a call; return the outcome."""
        self.start(what, *args, **options)
        return self.said(wait)

    def start(self, what: str | Callable[..., Any], *args: Any, **options: Any) -> None:
        """The same; `said` has what came of it."""
        verb = what if isinstance(what, str) else what.__name__
        self._asked = (verb, time.monotonic(), args)
        with contextlib.suppress(OSError):  # it has died: `said` says so
            self._pipe.send((what, args, options))

    def said(self, wait: float = ANSWERS_WITHIN) -> Said:
        """What came of what was started."""
        verb, begun, args = self._asked
        said = Said(f"{verb} of {self.name}")
        try:
            if self._pipe.poll(wait):
                said.value, said.kinds, said.text = self._pipe.recv()
            else:
                said.end = f"did not answer for {wait:.0f} s"
        except (EOFError, OSError):
            said.end = self._death()
        said.seconds = time.monotonic() - begun
        if said.ok and verb == "send":
            self.acknowledged.append(head(args[0]))
        if said.ok and verb == "go_on":
            self.acknowledged += [f"{args[0]}/{n}".encode() for n in range(said.value)]
        return said

    def _death(self) -> str:
        pid, self.pid = self.pid, 0
        if not pid:
            return GONE
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            return f"died by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with {os.WEXITSTATUS(status)}"

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.pid:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self._pipe.close()


def _live(parent: int, pipe: Any, hands: Hands, before: Callable[[], object] | None) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        if before is not None:
            before()
        while True:
            what, args, options = pipe.recv()
            value: Any = None
            kinds: tuple[str, ...] = ()
            text = ""
            try:
                value = hands.do(what, args, options)
            except BaseException as error:
                kinds, text = tuple(base.__name__ for base in type(error).__mro__), str(error)
            pipe.send((value, kinds, text))
    except EOFError:
        code = 0
    finally:
        os._exit(code)
