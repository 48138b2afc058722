"""Failpoints: named places in the library's code at which a test can run an action.

A place is the name of a function; `armed` runs an action before or after one of its calls, while a
block runs. It replaces the function, so the library needs no hooks, and has no cost without it. The
compiled append has no such names: strace kills it at each of its system calls
(`proof.syscall_crashes`), and SIGKILL at random moments between them.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from proof import ledger_operations
from proof.jobs import spread
from proof.syscall_crashes import EARLY
from proof.work import Durability, act, judge
from testing.children import die_with_parent
from testing.journals import small_journal

PLACES = {
    "make the tables": "local.storage.environment:create_environment",
    "make the journal": "local.storage.journal:_create",
    "make the lock file": "local.shm.lockfile:make_lock_file",
    "flush a directory": "local.files:Directory.sync",
    "recover": "local.storage.checkpointer:recover",
    "take a slot": "local.shm.slots:Slots.join",
    "leave the slot": "local.shm.slots:Slot.leave",
    "checkpoint": "local.storage.ledger:Ledger.checkpoint",
    "take frames over": "local.storage.checkpointer:apply_frames",
    "begin a generation": "local.storage.tables:AppliedJournal.begin_generation",
    "put an entry": "local.storage.tables:EntryTable.put",
    "put a topic": "local.storage.tables:TopicTable.put",
    "finish a transaction": "local.storage.ledger:Transaction.finish",
    "wake whom it concerns": "local.storage.ledger:Transaction.waken",
    "write to a segment": "local.storage.segments:Segments.append",
    "flush a segment": "local.storage.segments:Segments.sync",
    "sweep segments": "local.storage.segments:Segments.sweep",
    "decide on a request": "local.ownership.sessions:Requests.decide",
    "admit": "local.ownership.sessions:Succession.admit",
    "evict": "local.ownership.sessions:Succession.evict_all",
    "release": "local.ownership.sessions:Sessions.release",
    "promote": "local.ownership.sessions:Succession.promote",
    "look an owner up": "local.log.appending:look_up",
    "append to the tables": "local.log.appending:append_to_tables",
}
# Those that the fixed work does not come to: before it, `proof.ledger_operations` is done.
CHORES = {
    "append a queue": "local.log.appending:append_together",
    "tell a winner": "local.ownership.notifications:Notifications._granted",
    "place a transaction": "local.commits:FramedAttempt.place",
    "write a transaction": "local.commits:TableAttempt.write",
    "write a cursor": "local.ownership.claims:LocalGroupCursor.write",
    "write a view": "local.maintenance.views:_write",
    "put a view in its place": "local.maintenance.views:_finish",
    "trim": "local.maintenance.retention:trim",
    "delete what is pending": "local.maintenance.deletion:delete_pending",
    "begin a hand-over": "local.ownership.transfers:HandOver._begin_releasing",
    "release to a destination": "local.ownership.transfers:HandOver._release_one",
    "take a claim": "local.ownership.claims:Claims.take",
    "release a claim": "local.ownership.claims:Claims.release",
    "write a snapshot": "local.maintenance.views:write_snapshot",
    "delete a topic": "local.catalog:delete_topic",
}
PLACES |= CHORES
DEADLINE = 30.0


def found(place: str) -> tuple[Any, str]:
    """The module or class that has the function, and its name there."""
    module, _, path = PLACES[place].partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"exclusivelog.{module}")
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


@contextlib.contextmanager
def armed(
    place: str, action: Callable[[], object], when: int = 1, behind: bool = False
) -> Iterator[None]:
    """While the block runs: `action` before or behind the `when`-th call of a place."""
    owner, name = found(place)
    usual, calls = getattr(owner, name), itertools.count(1)

    def instead(*args: Any, **kwargs: Any) -> Any:
        strikes = next(calls) == when
        if strikes and not behind:
            action()
        result = usual(*args, **kwargs)
        if strikes and behind:
            action()
        return result

    # A function that other modules have imported by its name is replaced there, too.
    homes = [owner]
    if not isinstance(owner, type):
        modules = [m for n, m in list(sys.modules.items()) if n.startswith("exclusivelog.")]
        homes += [m for m in modules if m is not owner and vars(m).get(name) is usual]
    for home in homes:
        setattr(home, name, instead)
    try:
        yield
    finally:
        for home in homes:
            setattr(home, name, usual)


def die() -> None:
    """An action: the process is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


# ---- death at every place ----------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """Where a process is to die."""

    durability: Durability
    place: str
    when: int
    behind: bool
    defect: str = ""

    def __str__(self) -> str:
        where = "behind" if self.behind else "before"
        return f"{self.durability}, {where} call {self.when} of {self.place!r}"


@dataclass
class Died:
    """The result of a sweep."""

    tried: int = 0
    deaths: int = 0
    reached: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)


def let_die(path: Path, death: Death) -> tuple[bool, int]:
    """Run the fixed work in a process until it dies. Returns whether it finished, and how many
    steps were acknowledged."""
    said, says = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(parent)
        with contextlib.suppress(BaseException):
            _work(path, death, lambda: os.write(says, b"."))
            os._exit(0)
        os._exit(1)
    os.close(says)
    deadline = time.monotonic() + DEADLINE
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    with os.fdopen(said, "rb") as pipe:
        count = len(pipe.read())
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in (0, -signal.SIGKILL) or time.monotonic() > deadline:
        raise RuntimeError(f"{death}: the process did not end, or ended with {code}")
    return code == 0, count


def _work(path: Path, death: Death, acknowledge: Callable[[], object]) -> None:
    with armed(death.place, die, death.when, death.behind):
        with xl.open(path, durability=death.durability) as engine:
            if death.defect == EARLY:
                acknowledge()
            if death.place in CHORES:
                ledger_operations.do(path, engine)
            act(engine, "t", acknowledge)


def die_once(where: str, facts: list[Any]) -> tuple[list[Any], bool, list[str]]:
    """Let a process die, and judge what it leaves. Call this in a process without an open
    engine."""
    death, path = Death(*facts), Path(where)
    with small_journal():
        ended, count = let_die(path, death)
        broken = judge_all(path, death, count)
    shutil.rmtree(path, ignore_errors=True)
    return facts, ended, broken


def judge_all(path: Path, death: Death, count: int) -> list[str]:
    """Every rule that the ledger breaks after this death."""
    broken = judge(path, death.durability, {"t": count})
    if death.place in CHORES and not broken:
        try:
            broken += ledger_operations.judge(path)
        except xl.ExclusiveLogError as error:
            broken.append(f"H1: {type(error).__name__}: {error}")
    return broken


def sweep(
    where: Path, calls: Iterable[int], defect: str = "", places: Iterable[str] = tuple(PLACES)
) -> Died:
    """Die before and behind these calls (the first one is 1) of these places."""
    died = Died()
    durabilities: tuple[Durability, ...] = ("power", "process")
    every = itertools.product(durabilities, places, calls, (False, True))
    jobs = [(str(where / str(number)), [*facts, defect]) for number, facts in enumerate(every)]
    for facts, ended, broken in spread("proof.failpoints:die_once", jobs, 2 * DEADLINE):
        death = Death(*facts)
        died.tried += 1
        died.deaths += not ended
        if not ended:
            died.reached.add(death.place)
            died.broken += [f"{death}: {text}" for text in broken]
    return died
