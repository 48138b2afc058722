"""What Python and the kernel do not report, in random schedules.

Processes make the random calls of `proof.traffic`. Meanwhile

- they are killed, and their memory is freed before they have ended (process_mrelease), so that the
  kernel does not report the locks that they hold;
- they end themselves inside one of the ledger's locks, LMDB's included, with empty robust lists:
  the lock outlives its thread;
- they are forked by C code and by the bare system call, and the child sends as its parent;
- they read the files of their own ledger, and so lose their POSIX locks, and go on reading while
  others check LMDB's readers, as each opening does, which must not free their places.

The judge is that of the torture: no acknowledged message is lost, no topic has two owners, no child
is heard. And the log goes on: after the last fault, each topic gets an acknowledged message.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exclusivelog as xl
from exclusivelog.local.storage import environment
from exclusivelog.local.storage.opening import OpenFiles
from proof.faults import PROCESSES, Crew
from proof.fork_server import Forked, fork_server
from proof.report import Figure
from proof.traffic import (
    KEEPALIVE,
    MOST_AT_ONCE,
    PATIENCE,
    TOPICS,
    Notes,
    Player,
    Record,
    judge_ledger,
    read_notes,
)
from testing.deaths import LOCKS, forget_robust_lists, hold, libc
from testing.judges import ACKNOWLEDGED, REFUSED, Call
from testing.processes import UNSEEN_FORKS

# Deliberate defects.
UNWATCHED = "unwatched"  # only robust lists tell of a death
UNSHARED = "unshared"  # a place in the table of readers has LMDB's POSIX lock alone
PROCESS_MRELEASE = 448
GOES_ON_SECONDS = 10.0
STACKS = ".stacks"  # of a process's threads, in a file beside its notes

# ---- one process -------------------------------------------------------------------------


class Faulty(Player):
    """A process with such faults of its own."""

    def step(self) -> None:
        """A step, or a fault."""
        chance = self.rng.random()
        if chance < 0.04:
            self.die_inside()
        elif chance < 0.15:
            self.read_the_directory()
        elif chance < 0.25:
            self.fork_unseen()
        elif chance < 0.4:
            with self.engine.ledger.environment() as tables:
                tables.reader_check()
        else:
            super().step()

    def die_inside(self) -> None:
        """End inside a lock, and with nothing in the robust lists."""
        with contextlib.suppress(OSError):
            hold(self.engine, self.rng.choice(LOCKS))
        forget_robust_lists()
        os.kill(os.getpid(), signal.SIGKILL)

    def read_the_directory(self) -> None:
        """As a backup program in this process does; in the middle of a read."""
        with self.engine.ledger.read() as tables:
            before, mine = tables.topics.all(), tables.rows.transaction
            for file in Path(self.engine.path).iterdir():
                if file.is_file():
                    with file.open("rb") as opened:
                        opened.read(4096)
            end = time.monotonic() + self.rng.random() * 0.2
            while time.monotonic() < end:
                if tables.topics.all() != before:
                    self.notes.trouble("G6: a snapshot changes")
                if not self.is_registered(mine):
                    self.notes.trouble("G6: LMDB's table of readers has lost a read")
                time.sleep(0.002)

    def is_registered(self, transaction: int) -> bool:
        """Does LMDB know of this process's read?"""
        with self.engine.ledger.environment() as tables:
            found = environment.parse_readers(tables.readers())
        return any(each[::2] == (os.getpid(), transaction) for each in found)

    def fork_unseen(self) -> None:
        """Fork, unseen by Python, with a producer that the child then uses."""
        topic = self.engine.topic(self.rng.choice(TOPICS))
        try:
            producer = topic.producer("exclusive")
        except xl.ProducerFencedError:
            return
        self.send(topic, producer, exclusive=True)
        pid = self.rng.choice(list(UNSEEN_FORKS.values()))()
        if pid == 0:
            os._exit(_use(self, topic, producer))
        _await(self.notes, pid)
        self.count += MOST_AT_ONCE
        self.send(topic, producer, exclusive=True)
        producer.close()


def _use(player: Player, topic: xl.Topic, producer: xl.Producer) -> int:
    """1 if the child was heard."""
    try:
        return int(player.send(topic, producer, exclusive=True, stale=True))
    except BaseException:
        return 2


def _await(notes: Notes, pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            notes.trouble("C8: a child of C code did not end")
            deadline += PATIENCE
        time.sleep(0.001)
    if os.waitstatus_to_exitcode(ended[1]) > 0:
        notes.trouble(f"C8: a child of C code ended with {ended[1]}")


def play(path: str, notes: str, seed: int, defect: str = "") -> None:
    """Be one process until it is killed, kills itself, or its parent has ended."""
    spoil(defect)
    faulthandler.register(signal.SIGUSR1, file=open(f"{notes}{STACKS}", "w"))  # noqa: SIM115
    with xl.open(path, name=f"w{seed}", keepalive=KEEPALIVE) as engine:
        player, parent = Faulty(engine, Notes(notes), random.Random(seed), defect), os.getppid()
        while os.getppid() == parent:
            player.step()


def spoil(defect: str) -> None:
    """Give the library of this process a defect."""
    if defect == UNWATCHED:

        def unwatched(files: OpenFiles, undo: object) -> None:
            files.deaths = files.lockfile.watch_deaths(files.journal, files.readonly)

        setattr(OpenFiles, "_watch_deaths", unwatched)  # noqa: B010
    elif defect == UNSHARED:
        vars(environment)["share_process_lock"] = lambda *_: None


# ---- all of them -------------------------------------------------------------------------


@dataclass
class UnreportedCrew(Crew):
    """Processes that are also reaped early, and that may have ended by themselves."""

    reaped: int = 0
    ended: int = 0

    def inject(self) -> None:
        """Kill one, and start those anew that have ended."""
        for process in [each for each in self.living if not each.alive]:
            self.replace(process)
            self.ended += 1
        if self.rng.random() < 0.5:
            process = self.rng.choice(self.living)
            self.reaped += reap_early(process)
            self.kills += 1
            self.replace(process)

    def replace(self, process: Forked) -> None:
        """Start another one in its place."""
        self.living.remove(process)
        process.close()
        self.start()


def reap_early(process: Forked) -> bool:
    """SIGKILL, and free its memory before it has ended. False if it was too late."""
    process.signal(signal.SIGKILL)
    return bool(libc.syscall(PROCESS_MRELEASE, ctypes.c_int(process.pidfd), 0) == 0)


@contextlib.contextmanager
def crew(where: Path, seed: int, defect: str) -> Iterator[UnreportedCrew]:
    """Processes on the ledger `where`/log."""
    with fork_server("proof.unreported:play") as fork:
        made = UnreportedCrew(where, where / "log", random.Random(seed), fork, defect)
        try:
            for _ in range(PROCESSES):
                made.start()
            yield made
        finally:
            made.end()


def schedule(where: Path, seconds: float, seed: int, defect: str = "") -> tuple[Figure, Record]:
    """One random schedule, and its judgement."""
    figure = Figure("unreported deaths")
    with crew(where, seed, defect) as processes:
        processes.go_on(seconds)
        stuck = list(goes_on(where, processes))
        broken = processes.tracebacks()
    record = read_notes(where)
    figure.count(
        kills=processes.kills,
        reaped_early=processes.reaped,
        deaths_in_locks=processes.ended,
        operations=record.operations,
        acknowledged=record.count(ACKNOWLEDGED),
        sends_of_unseen_children=record.count(REFUSED, True),
    )
    figure.broken += [*record.trouble, *broken, *stuck]
    if not stuck:  # else opening it would take for ever, too
        figure.broken += judge_ledger(where / "log", record, TOPICS)
    return figure, record


def goes_on(where: Path, processes: UnreportedCrew) -> Iterator[str]:
    """What does not go on after the last fault; processes that end themselves are replaced."""
    before, missing = _counts(read_notes(where)), set(TOPICS)
    deadline = time.monotonic() + GOES_ON_SECONDS
    while missing and time.monotonic() < deadline:
        for process in [each for each in processes.living if not each.alive]:
            processes.replace(process)
        time.sleep(0.1)
        now = _counts(read_notes(where))
        missing = {topic for topic in TOPICS if now[topic] == before[topic]}
    if missing:
        yield from _stacks(where, processes)
    for topic in sorted(missing):
        yield f"C8: topic {topic!r} got no message for {GOES_ON_SECONDS:.0f} s after the last fault"


def _stacks(where: Path, processes: UnreportedCrew) -> Iterator[str]:
    """What each process does, where nothing goes on."""
    for process in processes.living:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            process.signal(signal.SIGUSR1)
    time.sleep(1.0)
    for file in where.rglob(f"*{STACKS}"):
        if text := file.read_text():
            yield f"{file.name}\n{text}"


def _counts(record: Record) -> dict[str, int]:
    return {
        topic: sum(call.outcome == ACKNOWLEDGED for call in record.calls[topic]) for topic in TOPICS
    }


def heard(record: Record) -> None:
    """Let one send of a child have been acknowledged at the offset of another message."""
    for calls in record.calls.values():
        taken = [call for call in calls if call.outcome == ACKNOWLEDGED]
        for at, call in enumerate(calls):
            if call.stale and call.outcome == REFUSED and taken:
                calls[at] = _acknowledged(call, taken[0])
                return
    raise AssertionError("no child has tried to send")


def _acknowledged(call: Call, other: Call) -> Call:
    facts: dict[str, Any] = {"offset": other.offset, "epoch": other.epoch}
    return call.acknowledged(call.ended or call.begun + 1, **facts)


def unreported_deaths(seconds: float, controlled: bool, where: Path) -> Figure:
    """The instrument: a schedule, and its controls."""
    seed = int.from_bytes(os.urandom(4), "little")
    figure, record = schedule(_made(where / "sound"), seconds, seed)
    if figure.broken:
        figure.notes.append(f"seed {seed}")
    if controlled:
        for name, defect in CONTROLS.items():
            control, _ = schedule(_made(where / defect), max(8.0, seconds), seed, defect)
            figure.controls[name] = bool(control.broken)
        heard(record)
        judged = judge_ledger(where / "sound" / "log", record, TOPICS, send=False)
        figure.controls["a child of C code that is heard"] = bool(list(judged))
    return figure


CONTROLS = {
    "deaths of which robust lists alone tell": UNWATCHED,
    "readers of which LMDB's own locks alone tell": UNSHARED,
}


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
