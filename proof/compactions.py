"""Compaction beside a model, which is a list of all that was sent (rule G7).

Writers send, compact and trim at random, and are killed in the middle of it; of each the next one
takes the topic. A watcher process compacts, too, and reads compacted views while they are replaced.
In the end the log must be what was sent, from its first offset on, and the view must have for each
key what a dictionary would have.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from exclusivelog.local.maintenance import retention
from proof.jobs import spread
from proof.random_kills import forked, killed, wait_for
from testing.children import PATIENCE
from testing.compactions import Sent, compacted, kept, read, state_of
from testing.kills import die_at_commit, garbage

FORGETS = "forgets"  # a deliberate defect: trimming ignores how far the view reaches
SLICE = 20  # kills on one ledger
MOST_NOTED = 200_000  # bytes that a writer notes before it is killed: some forty calls
SIZES = (10, 10, 10, 300, 5000)  # bytes of a message
KEYS = 12
SECONDS_OF_A_KILL = 5.0  # at most, on a busy machine, the judgement included
Unplaced = tuple[bytes | None, bytes | None]


# ---- the writers -------------------------------------------------------------------------


class Notes:
    """What a process does: written down before it does it, and when it is done."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *facts: Any) -> None:
        """It outlives a SIGKILL."""
        os.write(self._file, (json.dumps(facts) + "\n").encode())


def read_notes(path: Path) -> list[list[Any]]:
    """All of them; the last one may be cut off, and then nothing of it was done."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(text) for text in lines if text.endswith("\n")]


def some(dice: random.Random, name: str) -> list[list[str | None]]:
    """[key, value] of one append: one message, or a batch."""
    found: list[list[str | None]] = []
    for number in range(dice.choice((1, 1, 3, 20))):
        key = None if dice.random() < 0.1 else f"k{dice.randrange(KEYS)}"
        value = f"{name}/{number}/".ljust(dice.choice(SIZES), "x")
        found.append([key, None if dice.random() < 0.2 else value])
    return found


def write(path: Path, where: Path, began: Path, seed: int, defect: str) -> None:
    """Send, compact and trim until it is killed. What came since the watcher has `began` stays."""
    dice, notes = random.Random(seed), Notes(where)
    if defect == FORGETS:
        vars(retention)["_reaches"] = lambda *_: True
    durability: Any = dice.choice(("power", "process"))
    with xl.open(path, durability=durability, name=f"w{seed}") as engine:
        topic = engine.topic("t")
        producer = topic.producer("exclusive_with_fencing")
        if dice.random() < 0.5:
            die_at_commit(dice.randrange(1, 12), behind=dice.random() < 0.5)
        for number in itertools.count():
            chance = dice.random()
            if chance < 0.03:
                notes.write("compact")
                notes.write("done", topic.compact())
            elif chance < 0.1:
                notes.write("trim")
                before = int(dice.choice((dice.random(), 1)) * int(began.read_bytes()))
                notes.write("done", topic.trim(before=before))
            else:
                append(producer, notes, some(dice, f"{seed}/{number}"))


def append(producer: xl.Producer, notes: Notes, messages: list[list[str | None]]) -> None:
    """Send them in one append."""
    notes.write("append", messages)
    placed = [placeless(message) for message in messages]
    if len(placed) == 1:
        [(key, value)] = placed
        notes.write("done", producer.send(value, key=key))
    else:
        sent = producer.send_many([v for _, v in placed], keys=[k for k, _ in placed])
        notes.write("done", sent.start)


def placeless(message: list[str | None]) -> Unplaced:
    """(key, value) of what stands in a note."""
    key, value = (None if text is None else text.encode() for text in message)
    return key, value


# ---- the watcher -------------------------------------------------------------------------


def watch(path: Path, where: Path, began: Path, seed: int) -> None:
    """Read compacted views, step by step, while they are replaced; and replace them."""
    dice, notes = random.Random(seed), Notes(where)
    with xl.open(path, name="watcher") as engine:
        topic = engine.topic("t")
        topic.compact()
        mark = os.open(began, os.O_WRONLY)
        while True:
            os.pwrite(mark, b"%20d" % topic.next_offset, 0)
            with contextlib.suppress(xl.OffsetTrimmedError):  # a clear end (rule G8)
                notes.write("watch", *one_watch(topic, dice, dice.choice(("error", "earliest"))))
            if dice.random() < 0.05:
                topic.compact()


def one_watch(topic: xl.Topic, dice: random.Random, trimmed: Any) -> tuple[int, int, list[Any]]:
    """(where the topic ended when the reader began, where it was in the end, what it found)."""
    began = topic.next_offset
    reader = topic.reader(read_compacted=True, trimmed=trimmed)
    found = []
    while some := reader.read_batch(dice.randrange(1, 40)):
        found += [_as_text(message) for message in some]
        time.sleep(dice.random() * 0.01)
    return began, reader.position, found


def _as_text(message: xl.Message) -> list[Any]:
    key, value = message.key, message.value
    return [
        message.offset,
        None if key is None else key.decode(),
        None if value is None else value.decode(),
    ]


def judge_watch(sent: list[Sent], began: int, end: int, texts: list[Any]) -> Iterator[str]:
    """Nothing that came since it began is missing, and of the rest nothing that counts, deletions
    included (rule G12)."""
    found = [(offset, *placeless(message)) for offset, *message in texts]
    offsets = [offset for offset, *_ in found]
    if offsets != sorted(set(offsets)):
        yield f"G7 at offset {began}: a compacted reader went back"
    if missing := set(sent[began:end]) - set(found):
        yield f"G7 at offset {min(missing)[0]}: a compacted reader missed what came since it began"
    if wrong := set(found) - set(sent[:end]):
        yield f"G7 at offset {min(wrong)[0]}: a compacted reader got what was never sent"
    if state_of(found) != state_of(sent[:end]):
        yield f"G7 at offset {end}: a compacted reader's keys are not those of a dictionary"


# ---- the judge ---------------------------------------------------------------------------


@dataclass
class Compacted:
    """What came of some kills."""

    kills: int = 0
    appends: int = 0
    compactions: int = 0
    trims: int = 0
    watches: int = 0
    broken: list[str] = field(default_factory=list)

    def take(self, sent: list[Sent], notes: list[list[Any]]) -> list[Unplaced]:
        """Add a writer's notes; returns what it was about to append when it died."""
        for (what, *facts), (_, *result) in itertools.zip_longest(
            notes[::2], notes[1::2], fillvalue=("died",)
        ):
            self.appends += what == "append"
            self.compactions += what == "compact"
            self.trims += what == "trim"
            if what != "append":
                continue
            messages = [placeless(message) for message in facts[0]]
            if not result:
                return messages
            if result[0] != len(sent):
                self.broken.append(f"B9 at offset {result[0]}: it should be {len(sent)}")
            sent += [(len(sent) + n, *message) for n, message in enumerate(messages)]
        return []

    def judge(self, path: Path, sent: list[Sent], begun: list[Unplaced], again: bool) -> None:
        """Compare the ledger with what was sent. No other process writes meanwhile."""
        with xl.open(path, name="judge") as engine:
            topic = engine.topic("t")
            # What dead processes have not flushed is in the log from now on, or is not.
            topic.producer("exclusive_with_fencing").close()
            if begun and topic.next_offset == len(sent) + len(begun):
                sent += [(len(sent) + n, *message) for n, message in enumerate(begun)]
            self.broken += judge_topic(topic, sent, again)

    def judge_at_last(self, path: Path, sent: list[Sent], watches: list[list[Any]]) -> None:
        """What is left when all are gone, and what the watcher has seen."""
        with xl.open(path, name="judge") as engine:
            self.broken += judge_topic(engine.topic("t"), sent, True)
            self.broken += [f"G7 at offset 0: {kind} are left" for kind in garbage(engine)]
            self.broken += engine.verify().problems
        for _, *facts in watches:
            self.watches += 1
            self.broken += judge_watch(sent, *facts)


def judge_topic(topic: xl.Topic, sent: list[Sent], again: bool) -> Iterator[str]:
    """The log, and the view as it stands; `again`, and as it is when it is made anew."""
    first = topic.first_offset
    if read(topic.reader(first)) != sent[first:] or topic.next_offset != len(sent):
        yield f"B9 at offset {first}: the log is not what was sent"
    found = compacted(topic)
    offsets = [offset for offset, *_ in found]
    if offsets != sorted(set(offsets)) or not set(found) <= set(sent):
        yield "G7 at offset 0: the view has what was never sent"
    if state_of(found) != state_of(sent):
        yield "G7 at offset 0: the view's keys are not those of a dictionary"
    if again:
        topic.compact()
        if compacted(topic) != kept(sent):
            yield "G7 at offset 0: a new view is not the last message of every key"


# ---- slices ------------------------------------------------------------------------------


def kill_some(where: str, kills: int, seed: int, defect: str) -> dict[str, Any]:
    """One slice. Call it in a process that has no engine open."""
    place, dice = Path(where), random.Random(seed)
    place.mkdir(parents=True)
    path, began = place / "log", place / "began"
    began.write_bytes(b"%20d" % 0)
    sent: list[Sent] = []
    done = Compacted()
    with watcher(path, place / "watches", began, seed):
        for number in range(kills):
            notes = place / f"notes-{number}"
            write_to_death(path, notes, began, dice, defect)
            begun = done.take(sent, read_notes(notes))
            done.kills += 1
            with _named(done.broken):
                done.judge(path, sent, begun, number % 4 == 3)
            if done.broken:
                break
    watches = read_notes(place / "watches")
    if not done.broken:
        with _named(done.broken):
            done.judge_at_last(path, sent, watches)
    shutil.rmtree(place)
    return vars(done)


@contextlib.contextmanager
def _named(broken: list[str]) -> Iterator[None]:
    try:
        yield
    except xl.ExclusiveLogError as error:
        broken.append(f"G7: {type(error).__name__}: {error}")


@contextlib.contextmanager
def watcher(path: Path, where: Path, began: Path, seed: int) -> Iterator[None]:
    """A process that watches while the block runs, and has made the first view before."""
    pid = forked(lambda: watch(path, where, began, seed))
    try:
        wait_for(lambda: where.exists() and where.stat().st_size > 0)
        yield
    finally:
        assert killed(pid), "the watcher has failed"


def write_to_death(path: Path, notes: Path, began: Path, dice: random.Random, defect: str) -> None:
    """Let one write, until it kills itself at a commit or is killed."""
    seed = dice.randrange(1 << 30)
    pid = forked(lambda: write(path, notes, began, seed, defect))
    enough = dice.randrange(1, MOST_NOTED)

    def is_over() -> bool:
        died = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return died or (notes.exists() and notes.stat().st_size >= enough)

    wait_for(is_over)
    time.sleep(dice.random() * 0.005)
    assert killed(pid), "a writer has failed by itself"


def kill_beside(where: Path, kills: int, seed: int, defect: str = "") -> Iterator[Compacted]:
    """So many kills in slices, in processes of their own: what came of each slice."""
    jobs = [
        (str(where / str(start)), min(SLICE, kills - start), seed + start, defect)
        for start in range(0, kills, SLICE)
    ]
    seconds = PATIENCE + SECONDS_OF_A_KILL * SLICE
    for found in spread("proof.compactions:kill_some", jobs, seconds):
        yield Compacted(**found)
