"""Runs cases, each in a process and a mount namespace of its own: what hangs is killed with all
that it has started, and what is mounted goes with it.

>>> with runner() as verdict_of:
...     verdict_of("files-a-strange-path-quotes").broken
[]
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from proof.environments import CASES
from proof.environments.cases import (
    FAULT,
    NEW_MOUNTS,
    NOTICES,
    TWIN,
    Scene,
    Skip,
    unshare,
)
from proof.jobs import LANES, todo_safely, warm_up
from proof.shutdowns import do
from testing.children import child, die_with_parent, line, tell
from testing.descriptors import readable

SECONDS = {True: 120.0, False: 900.0}  # for a fast case, and for one that is not
JUDGES = tuple(f"{judge}:" for judge in NOTICES)
SERVES = "from proof.environments.running import serve; serve()"


@dataclass
class Verdict:
    """The result of one run of a case."""

    name: str
    how: str
    broken: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0


@contextlib.contextmanager
def runner() -> Iterator[Callable[..., Verdict]]:
    """`verdict_of(name, how)` runs a case. The scratch files are on the disk of TMPDIR."""
    with child(SERVES) as process:

        def verdict_of(name: str, how: str = FAULT) -> Verdict:
            tell(process, json.dumps([name, how]))
            return Verdict(**json.loads(line(process, 30 + SECONDS[CASES[name].fast])))

        yield verdict_of


def verdicts(jobs: Iterable[tuple[str, str]], lanes: int = LANES) -> Iterator[Verdict]:
    """What came of each (name, how), in any order; so many are run at a time."""
    every = list(jobs)
    todo, found = iter(every), queue.SimpleQueue[Verdict]()

    def work(_: int) -> None:
        for name, how in todo_safely(todo):
            try:
                with runner() as verdict_of:
                    found.put(verdict_of(name, how))
                    for again in todo_safely(todo):
                        name, how = again
                        found.put(verdict_of(name, how))
            except AssertionError as error:  # the next job gets a runner of its own
                found.put(Verdict(name, how, [f"case: its runner failed: {error}"]))

    with ThreadPoolExecutor(lanes) as pool:
        done = [pool.submit(work, lane) for lane in range(lanes)]
        for _ in every:
            yield found.get()
        for each in done:
            each.result()


@dataclass
class Controls:
    """The result of the control runs: false alarms, and defects that were missed."""

    false_alarms: list[str] = field(default_factory=list)  # of clean twins
    missed: dict[str, list[str]] = field(default_factory=dict)  # defect: the cases that miss it
    tried: dict[str, int] = field(default_factory=dict)


def controls(seen: Iterable[Verdict], lanes: int = LANES) -> Controls:
    """Run these cases without a fault, and with each defect that their judges must notice."""
    found, judged = Controls(), {v.name: set(v.judged) for v in seen if not v.skipped}
    found.missed = {"judges nothing": [name for name, judges in judged.items() if not judges]}
    twins = [(name, TWIN) for name in judged if CASES[name].twin]
    for verdict in verdicts(twins, lanes):
        found.tried[TWIN] = found.tried.get(TWIN, 0) + 1
        found.false_alarms += [f"{verdict.name}: {text}" for text in verdict.broken]
    wanted = {(name, NOTICES[judge]) for name, judges in judged.items() for judge in judges}
    for verdict in verdicts(sorted(wanted), lanes):
        found.tried[verdict.how] = found.tried.get(verdict.how, 0) + 1
        if not any(text.startswith(JUDGES) for text in verdict.broken):
            found.missed.setdefault(verdict.how, []).append(verdict.name)
    return found


def serve() -> None:
    """Run the case of each line of input, and print the verdict. What actors log, or die of, is in
    the verdict."""
    logging.disable(logging.CRITICAL)
    faulthandler.disable()
    warm_up()
    for job in sys.stdin:
        print(json.dumps(asdict(run(*json.loads(job)))), flush=True)


def run(name: str, how: str) -> Verdict:
    """One run, in a child."""
    verdict = Verdict(name, how, skipped=CASES[name].lacking())
    if verdict.skipped:
        return verdict
    where = Path(tempfile.mkdtemp(prefix="environment-"))
    where.chmod(0o755)
    begun = time.monotonic()
    output, theirs = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _play(parent, name, how, where, theirs)
    os.close(theirs)
    try:
        text = _first_line(output, SECONDS[CASES[name].fast])
        if text:
            verdict = Verdict(**json.loads(text))
        else:
            verdict.broken.append("case: it did not come to its end")
    finally:
        os.close(output)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(where, ignore_errors=True)
    verdict.seconds = time.monotonic() - begun
    return verdict


def _first_line(output: int, seconds: float) -> bytes:
    text, deadline = b"", time.monotonic() + seconds
    while not text.endswith(b"\n"):
        left = max(0.0, deadline - time.monotonic())
        if not readable(output, left):
            return b""
        some = os.read(output, 65536)
        if not some:
            return b""
        text += some
    return text


def _play(parent: int, name: str, how: str, where: Path, says: int) -> None:
    verdict = Verdict(name, how)
    try:
        os.setsid()
        die_with_parent(parent)
        unshare(NEW_MOUNTS)
        _forget_other_disks()
        _play_in_its_namespace(verdict, where)
    finally:
        os.write(says, json.dumps(asdict(verdict)).encode() + b"\n")
        os._exit(0)


def _forget_other_disks() -> None:
    """The namespace has copies of all mounts, which would keep others' loop devices busy."""
    for mount in Path("/proc/self/mounts").read_text().splitlines():
        device, place = mount.split()[:2]
        if device.startswith("/dev/loop"):
            with contextlib.suppress(OSError):
                do("umount", "-l", place.encode().decode("unicode_escape"))


def _play_in_its_namespace(verdict: Verdict, where: Path) -> None:
    scene = Scene(where, verdict.how)
    try:
        CASES[verdict.name].play(scene)
    except Skip as reason:
        verdict.skipped = str(reason)
    except Exception as error:
        scene.blame("case", f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(Exception):
            scene.end()
    verdict.broken, verdict.judged = scene.broken, sorted(scene.judged)
