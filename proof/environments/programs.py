"""What programs do to themselves: patched threads, signals, errors in threads, forks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import exclusivelog as xl
from exclusivelog.local.log import appending
from proof.environments.actors import Hands
from proof.environments.cases import Scene, Skip, case
from testing.children import ROOT, command

PATCHED = """
    import sys
    {patch}
    import exclusivelog as xl
    try:
        with xl.open(sys.argv[1]) as engine, engine.topic("t").producer("exclusive") as producer:
            producer.send(b"patched")
    except xl.ExclusiveLogError as error:
        print("refused:", "LedgerError" in [c.__name__ for c in type(error).__mro__], error)
    else:
        print("sent")
"""


@case("before", "after")
def patched_threads(scene: Scene, variant: str) -> None:
    """`gevent.monkey.patch_all()` has replaced threads and locks: `open` says so, and returns."""
    if importlib.util.find_spec("gevent") is None:
        raise Skip("gevent is not installed")
    scene.ledger_with(b"1")
    patch = "from gevent import monkey; monkey.patch_all()"
    if variant == "after":
        patch = f"import exclusivelog; {patch}"
    source = PATCHED.format(patch=scene.pick(patch, "pass"))
    try:
        done = subprocess.run(
            command(source, scene.ledger),
            capture_output=True,
            text=True,
            timeout=20,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        scene.blame("works", "open did not return within 20 s")
        return
    if scene.struck and not (done.stdout.startswith("refused: True") and "gevent" in done.stdout):
        scene.blame("works", f"it said {done.stdout or done.stderr[-200:]!r}")
    if not scene.struck:
        scene.acknowledged.append(b"patched")
    scene.keeps()


def fail_in_commits(hands: Hands, lines: int) -> tuple[list[bytes], list[str], int]:
    """Let the library's memory end at the n-th line of a commit, for each n; what is acknowledged,
    the errors of the other senders, and how often memory ended."""
    library, lead, left = os.path.dirname(xl.__file__), appending.Committer._commit, [0]
    struck = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(library):
            return None
        nonlocal struck
        if event == "line" and left[0]:
            left[0] -= 1
            if not left[0]:
                struck += 1
                raise MemoryError
        return trace

    def failing(committer: appending.Committer) -> None:
        sys.settrace(trace if left[0] else None)
        try:
            lead(committer)
        finally:
            sys.settrace(None)

    assert hands.producer is not None
    sent: list[bytes] = []
    errors: list[str] = []
    with mock.patch.object(appending.Committer, "_commit", failing):
        for number in range(1, lines):
            value, left[0] = b"async/%d" % number, number
            try:
                hands.producer.send_async(value).result(6)
                sent.append(value)
            except BaseException as caught:
                errors.append(type(caught).__name__)
                if "Timeout" in errors[-1]:
                    break
    return sent, errors, struck


@case()
def no_memory_in_the_commit_thread(scene: Scene) -> None:
    """A MemoryError strikes the thread that commits: it tries again, or its senders get errors;
    none waits for ever, and the engine works again."""
    owner = scene.owner()
    if scene.struck:
        said = owner.ask(fail_in_commits, 80, wait=60.0)
        if scene.works(said):
            sent, errors, struck = said.value
            scene.acknowledged += sent
            if struck < 10 or (errors and "Timeout" in errors[-1]):
                scene.blame(
                    "works", f"struck {struck} times: {len(sent)} succeed; the others get {errors}"
                )
    scene.works(owner.ask(send_async, "afterwards"))
    scene.works(owner.send(b"3"))
    scene.lives(owner.close())
    scene.end()
    scene.keeps()


def send_async(hands: Hands, value: str) -> int:
    """Send by the commit thread."""
    assert hands.producer is not None
    return hands.producer.send_async(value.encode()).result(10)


def interrupted(hands: Hands, count: int) -> int:
    """Send while signals raise in between; how many sends came to their end."""

    class Struck(Exception):
        pass

    def strike(*_: object) -> None:
        raise Struck

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    done, number = 0, 0
    try:
        while done < count:
            number += 1
            try:
                hands.send(b"struck/%d" % number)
                done += 1
            except Struck:
                pass
    except Struck:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return done


@case(twin=False)
def signals_that_raise(scene: Scene) -> None:
    """A handler raises in the middle of sends, as a time limit of a web server does: the next
    send, and the next owner, work."""
    owner = scene.owner()
    owner.ask(interrupted, 100)
    scene.works(owner.send(b"3"))
    scene.works(owner.close())
    scene.keeps()


def use_in_a_child(hands: Hands) -> str:
    """What a forked child gets that sends with the inherited producer."""
    output, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            hands.send(b"of the child")
            os.write(theirs, b"sent")
        except xl.ExclusiveLogError as error:
            os.write(theirs, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(theirs)
    deadline = time.monotonic() + 15
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return "it did not end"
        time.sleep(0.01)
    return os.read(output, 100).decode()


@case(twin=False)
def a_daemon_that_forks_after_opening(scene: Scene) -> None:
    """`open`, then the double fork of a daemon: the child's error says to open again (rule C5)."""
    owner = scene.owner()
    said = owner.ask(use_in_a_child)
    if said.value != "EngineClosedError":
        scene.blame("keeps", f"the child got {said}")
    scene.works(owner.send(b"3"))
    scene.keeps(actor=owner)


ENDS: dict[str, str] = {
    "sys.exit": "sys.exit()",
    "an error": "raise RuntimeError",
    "os._exit": "os._exit(0)",
    "in a thread": "threading.Thread(target=lambda: [producer.send(b'x') for _ in range(9**9)],"
    " daemon=True).start(); time.sleep(0.2); sys.exit()",
}
LEAVES = """
    import os, sys, threading, time
    import exclusivelog as xl
    engine = xl.open(sys.argv[1])
    producer = engine.topic("t").producer("exclusive")
    producer.send(b"left")
    {end}
"""


@case(*ENDS, twin=False)
def a_program_that_does_not_close(scene: Scene, variant: str) -> None:
    """The interpreter ends in this way with an engine open: without a signal or a hang, and the
    next owner comes at once."""
    source = LEAVES.format(end=ENDS[variant])
    try:
        done = subprocess.run(
            command(source, scene.ledger), capture_output=True, timeout=20, cwd=ROOT, check=False
        )
        if done.returncode not in (0, 1):
            scene.blame("works", f"it ended with {done.returncode}")
    except subprocess.TimeoutExpired:
        scene.blame("works", "it did not end")
    scene.acknowledged.append(b"left")
    made = scene.actor(acknowledged=[])
    scene.works(made.open())
    found = made.read().value or []
    scene.has([b"left", *(v for v in found if v not in (b"left", b"x"))], scene.acknowledged)
    scene.works(made.own("exclusive"))
    scene.works(made.send(b"next"))
    scene.judged.add("keeps")
    if b"left" not in found:
        scene.blame("keeps", "what was acknowledged is lost")


@case(twin=False)
def a_locale_without_characters(scene: Scene) -> None:
    """`LC_ALL=C`, no UTF-8 mode, and a path with an umlaut: cron's environment."""
    path = Path(f"{scene.where}/Bücher/log")
    path.parent.mkdir()
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": "/usr/bin"}
    done = subprocess.run(
        command(PATCHED.format(patch="pass"), path),
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        check=False,
    )
    if done.stdout.strip() != "sent":
        scene.blame("works", f"it said {done.stdout or done.stderr[-200:]!r}")
    scene.acknowledged.append(b"patched")
    scene.keeps(path)


@case(twin=False)
def without_asserts(scene: Scene) -> None:
    """`python -OO`: nothing that matters is an assert or a docstring."""
    words = command(PATCHED.format(patch="pass"), scene.ledger)
    done = subprocess.run(
        [words[0], "-OO", *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    if done.stdout.strip() != "sent":
        scene.blame("works", f"it said {done.stdout or done.stderr[-200:]!r}")
    scene.acknowledged.append(b"patched")
    scene.keeps()
