"""Kills at full speed: one sender after the other is killed between any two of its instructions.

`process` durability: an append makes no system call, so that kills hit between stores through the
mapping, and inside the critical section. Another sender runs at the same time, and must continue
without a pause. Acknowledged appends are counted in shared memory, which remains after a kill.

A slice is some hundred kills on one ledger, in a process of its own, which has imported everything
and forks the processes that open the ledger; then the ledger is judged and removed. So a run of ten
thousand kills needs little memory and disk, and its judge reads each message once.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import exclusivelog as xl
from proof.jobs import spread
from proof.syscall_crashes import EARLY
from testing.children import PATIENCE, die_with_parent
from testing.judges import Call, Row
from testing.judges import judge as judge_calls
from testing.processes import values

PACER, PACER_COUNT, SPRINTERS = 0, 1, 2  # numbers in the notes: go on?, count, counts
LONGEST_LIFE = 0.015  # seconds of a sprinter, from its first message on
SLOW = 0.4  # seconds without a message of the surviving sender
LONGEST_LOOK = 0.02  # seconds between two looks of a process that runs
SLICE = 250  # kills on one ledger
SECONDS_OF_A_KILL = 2.0  # at most, on a busy machine, the judgement included
Notes = memoryview  # of 64-bit numbers: each is stored at once, unlike with struct.pack_into


@dataclass
class Sprinted:
    """The result of some kills."""

    kills: int = 0
    operations: int = 0  # appends that were acknowledged
    acknowledged: int = 0  # messages
    longest: float = 0.0  # the longest pause of the surviving sender after a kill, in seconds
    slow: int = 0  # how many pauses were longer than SLOW
    broken: list[str] = field(default_factory=list)


# ---- the senders -------------------------------------------------------------------------


def note(where: Path) -> Notes:
    """Shared memory that outlives its writers."""
    with where.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


def parts(count: int) -> int:
    """Every tenth append is a batch of three entries, the others are one message."""
    return 3 if count % 10 == 9 else 1


def messages(calls: int) -> int:
    """Of so many appends.

    >>> messages(9), messages(10), messages(11)
    (9, 12, 13)
    """
    return calls + 2 * (calls // 10)


def send_until_killed(
    path: Path, notes: Notes, at: int, name: str, pause: Callable[[], object], early: bool = False
) -> None:
    """Send as fast as can be, and count what was acknowledged; `early` counts it before."""
    with xl.open(path, durability="process", name=name) as engine:
        producer = engine.topic("t").producer("shared", name=name, max_batch_messages=1)
        for count in itertools.count():
            pause()
            if early:
                notes[at] = count + 1
            if parts(count) == 1:
                producer.send(b"%s/%d/0" % (name.encode(), count))
            else:
                producer.send_many([b"%s/%d/%d" % (name.encode(), count, n) for n in range(3)])
            notes[at] = count + 1


def pace(path: Path, notes: Notes) -> None:
    """The surviving sender: sends as long as the notes say so."""

    def pause() -> None:
        while not notes[PACER]:
            time.sleep(0.0002)

    send_until_killed(path, notes, PACER_COUNT, "pacer", pause)


def forked(work: Callable[[], object]) -> int:
    """The pid of a child that does this until it is killed."""
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with_parent(parent)
        with contextlib.suppress(BaseException):
            work()
        os._exit(1)
    return pid


def killed(pid: int) -> bool:
    """Kill it now, if it has not ended by itself."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@contextlib.contextmanager
def pacer(path: Path, notes: Notes) -> Iterator[None]:
    """A sender that runs while the block runs, and has made the ledger before."""
    notes[PACER] = 1
    pid = forked(lambda: pace(path, notes))
    try:
        wait_for(lambda: notes[PACER_COUNT] > 0)
        notes[PACER] = 0
        yield
    finally:
        assert killed(pid), "the surviving sender has failed"


def sprint_to_death(
    path: Path, notes: Notes, number: int, dice: random.Random, early: bool
) -> float:
    """Let one sprint, and kill it; for how long the pacer then paused, in seconds."""
    at = SPRINTERS + number
    pid = forked(lambda: send_until_killed(path, notes, at, f"s{number}", lambda: None, early))
    wait_for(lambda: notes[at] > 0)
    notes[PACER] = 1
    time.sleep(dice.random() * LONGEST_LIFE)
    os.kill(pid, signal.SIGKILL)
    seen = notes[PACER_COUNT]
    pause = wait_for(lambda: notes[PACER_COUNT] > seen + 1)
    notes[PACER] = 0
    assert killed(pid), "it has failed by itself"
    return pause


def wait_for(condition: Callable[[], bool]) -> float:
    """Poll: a killed process sends no wake-up. Returns the seconds that this took. Of the time
    between two looks, so much counts: in a longer one this process did not run, as on a busy
    machine, and the others did not run either."""
    last = time.monotonic()
    waited, deadline = 0.0, last + PATIENCE
    while not condition():
        assert last < deadline, "no sender goes on"
        time.sleep(0.0001)
        now = time.monotonic()
        waited += min(now - last, LONGEST_LOOK)
        last = now
    return waited


# ---- the judge ---------------------------------------------------------------------------


def judge_random_kills(found: list[bytes], acknowledged: dict[str, int]) -> list[str]:
    """Each one's appends are there in order, once, whole; one more than acknowledged may be.
    A log that is as promised needs no judge."""
    if as_promised(found, acknowledged):
        return []
    calls = []
    for name, count in acknowledged.items():
        for number in range(count + 1):
            parts_of_it = [f"{name}/{number}/{part}".encode() for part in range(parts(number))]
            call = Call(name, tuple(parts_of_it), begun=0, exclusive=False)
            calls.append(call if number == count else call.acknowledged(ended=0))
    rows = [Row(offset, 0, 0, value) for offset, value in enumerate(found)]
    broken = [str(broken) for broken in judge_calls(rows, calls)]
    return broken or ["B9: the log is not as promised, and the judge does not see why"]


def as_promised(found: list[bytes], acknowledged: dict[str, int]) -> bool:
    """The same in one pass, without a word about what is wrong."""
    counts = {name.encode(): 0 for name in acknowledged}
    left = iter(found)
    for message in left:
        name = message.partition(b"/")[0]
        count = counts.get(name)
        if count is None or message != b"%s/%d/0" % (name, count):
            return False
        for part in range(1, parts(count)):
            if next(left, None) != b"%s/%d/%d" % (name, count, part):
                return False
        counts[name] = count + 1
    return all(0 <= counts[name.encode()] - n <= 1 for name, n in acknowledged.items())


def judge(path: Path, acknowledged: dict[str, int]) -> list[str]:
    """Every rule that the ledger breaks; the next sender continues with the same ledger."""
    try:
        with xl.open(path, durability="process") as engine:
            found = values(engine.topic("t"))
            broken = judge_random_kills(found, acknowledged) + list(engine.verify().problems)
            with engine.topic("t").producer("exclusive", timeout=10) as producer:
                if (offset := producer.send(b"next")) != len(found):
                    broken.append(f"G5 at offset {offset}: it should be {len(found)}")
            return broken
    except xl.ExclusiveLogError as error:
        return [f"H1: {type(error).__name__}: {error}"]


# ---- slices ------------------------------------------------------------------------------


def kill_some(where: str, kills: int, seed: int, defect: str) -> dict[str, object]:
    """One slice. Call it in a process that has no engine open."""
    place, dice, sprinted = Path(where), random.Random(seed), Sprinted(kills)
    place.mkdir(parents=True)
    (place / "notes").write_bytes(bytes(8 * (SPRINTERS + kills)))
    notes = note(place / "notes")
    with pacer(place / "log", notes):
        for number in range(kills):
            pause = sprint_to_death(place / "log", notes, number, dice, defect == EARLY)
            sprinted.longest = max(sprinted.longest, pause)
            sprinted.slow += pause > SLOW
    acknowledged = {f"s{n}": notes[SPRINTERS + n] for n in range(kills)}
    acknowledged["pacer"] = notes[PACER_COUNT]
    sprinted.operations = sum(acknowledged.values())
    sprinted.acknowledged = sum(map(messages, acknowledged.values()))
    sprinted.broken = judge(place / "log", acknowledged)
    shutil.rmtree(place)
    return vars(sprinted)


def kill_beside(where: Path, kills: int, seed: int, defect: str = "") -> Iterator[Sprinted]:
    """So many kills in slices, in processes of their own: what came of each slice."""
    starts = range(0, kills, SLICE)
    jobs = [
        (str(where / str(start)), min(SLICE, kills - start), seed + start, defect)
        for start in starts
    ]
    seconds = PATIENCE + SECONDS_OF_A_KILL * SLICE
    for found in spread("proof.random_kills:kill_some", jobs, seconds):
        yield Sprinted(**found)
