"""Rules A to D and G2, all at once: processes that do what they like, and are killed.

Several processes open producers in random modes, send, close, fence each other, are stopped
for longer than their keepalive and go on, and die by SIGKILL at random moments. Each notes
in a file of its own what was acknowledged to it, after it was. In the end one judge reads the
log and the notes: nothing acknowledged may be missing or elsewhere, nothing may be there
twice, no epoch may go back, and within an epoch nobody may stand between an owner's messages.

The same judge must turn red for a log in which a rule is broken: those are its controls.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import exclusivelog as xl

TOPICS = ["orders", "payments"]
PROCESSES = 4
KEEPALIVE = 1.0


# ---- the traffic -------------------------------------------------------------------------


def play(path: str, notes: str, seed: int) -> None:
    """What one process does until it is killed or its standard input is closed."""
    rng = random.Random(seed)
    pid = os.getpid()
    note = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(**facts: object) -> None:
        os.write(note, (json.dumps(facts) + "\n").encode())

    with xl.open(path, name=f"w{seed}", keepalive=KEEPALIVE) as engine:
        count = 0
        zombie: xl.Producer | None = None
        while os.getppid() != 1:
            topic = engine.topic(rng.choice(TOPICS))
            mode = rng.choice([mode.value for mode in xl.AccessMode])
            try:
                producer = topic.producer(
                    mode, priority=rng.randrange(5), timeout=rng.choice([0.0, 0.02, 0.3, 1.0])
                )
            except (xl.ProducerBusyError, xl.ProducerFencedError, xl.WaitTimeoutError):
                continue
            exclusive = mode != "shared"
            for _ in range(rng.randrange(1, 12)):
                values = []
                for _ in range(rng.choice([1, 1, 1, 5])):
                    count += 1
                    values.append(f"{topic.name}/{pid}/{count}/{int(exclusive)}".encode())
                try:
                    offsets = (
                        [producer.send(values[0])]
                        if len(values) == 1
                        else list(producer.send_many(values))
                    )
                except xl.ProducerFencedError:
                    write(topic=topic.name, refused=[v.decode() for v in values])
                    zombie = producer
                    break
                acked = {o: v.decode() for o, v in zip(offsets, values, strict=True)}
                write(topic=topic.name, epoch=producer.topic_epoch, acked=acked)
            if zombie is not None:
                count += 1
                value = f"{topic.name}/{pid}/{count}/zombie"
                try:
                    zombie.send(value.encode())
                except xl.ProducerFencedError:
                    write(topic=topic.name, refused=[value])
                zombie = None
            if rng.random() < 0.8:
                producer.close()
            del producer  # else it is abandoned, and must not stay an owner


@dataclass
class Crew:
    """The processes, and what was done to them."""

    path: Path
    rng: random.Random
    living: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: int = 0
    kills: int = 0
    stops: int = 0

    def start(self) -> None:
        self.started += 1
        notes = self.path / f"notes-{self.started}.jsonl"
        code = f"from tests.test_torture import play; play({str(self.path / 'log')!r}, "
        code += f"{str(notes)!r}, {self.started})"
        with open(self.path / f"stderr-{self.started}.txt", "wb") as stderr:
            self.living.append(subprocess.Popen([sys.executable, "-c", code], stderr=stderr))

    def torment(self) -> None:
        """Do something cruel to one of them."""
        victim = self.rng.choice(self.living)
        if self.rng.random() < 0.6:
            victim.kill()
            victim.wait(30)
            self.living.remove(victim)
            self.kills += 1
            self.start()
        else:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(self.rng.choice([0.01, 0.1, KEEPALIVE + 0.3]))
            victim.send_signal(signal.SIGCONT)
            self.stops += 1

    def end(self) -> None:
        for process in self.living:
            process.kill()
            process.wait(30)


@contextmanager
def crew(path: Path, seed: int) -> Iterator[Crew]:
    made = Crew(path, random.Random(seed))
    try:
        for _ in range(PROCESSES):
            made.start()
        yield made
    finally:
        made.end()


# ---- the judge ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the judge looks at in a message."""

    offset: int
    epoch: int
    session: int
    value: str

    @property
    def exclusive(self) -> bool:
        return self.value.endswith("/1")


def read_rows(topic: xl.Topic) -> list[Row]:
    return [Row(m.offset, m.epoch, m.session, m.value.decode()) for m in topic.reader()]


def judge(rows: list[Row], acked: dict[int, str], refused: set[str]) -> list[str]:
    """Every broken rule, with the place."""
    broken = []
    by_offset = {row.offset: row for row in rows}
    for offset, value in acked.items():
        row = by_offset.get(offset)
        if row is None or row.value != value:
            broken.append(f"B9: {value} was acknowledged at {offset}, where {row} stands")
    seen: set[str] = set()
    for place, row in enumerate(rows):
        if row.offset != place:
            broken.append(f"offsets are not dense at {place}: {row}")
        if row.value in seen:
            broken.append(f"G2: {row} is there twice")
        if row.value in refused:
            broken.append(f"B3: {row} was refused, and is there")
        seen.add(row.value)
    return broken + judge_epochs(rows)


def judge_epochs(rows: list[Row]) -> list[str]:
    broken = []
    done: set[tuple[int, int]] = set()  # owners that somebody has written behind
    previous: Row | None = None
    for row in rows:
        if previous is not None:
            if row.epoch < previous.epoch:
                broken.append(f"B8: {row} stands behind epoch {previous.epoch}")
            if row.session != previous.session and previous.exclusive:
                done.add((previous.epoch, previous.session))
        if row.exclusive and (row.epoch, row.session) in done:
            broken.append(f"B8: {row} is interleaved")
        if row.exclusive and any(
            epoch == row.epoch and session != row.session for epoch, session in done
        ):
            broken.append(f"B1: epoch {row.epoch} had a second owner, session {row.session}")
        previous = row
    return broken


def read_notes(path: Path) -> tuple[dict[str, dict[int, str]], dict[str, set[str]]]:
    acked: dict[str, dict[int, str]] = {name: {} for name in TOPICS}
    refused: dict[str, set[str]] = {name: set() for name in TOPICS}
    for notes in path.glob("notes-*.jsonl"):
        for line in notes.read_text().splitlines():
            facts = json.loads(line)
            acked[facts["topic"]] |= {int(o): v for o, v in facts.get("acked", {}).items()}
            refused[facts["topic"]] |= set(facts.get("refused", []))
    return acked, refused


# ---- the test ----------------------------------------------------------------------------


def test_torture(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--torture-seconds")
    seed = int.from_bytes(os.urandom(4), "little")
    end = time.monotonic() + seconds
    with crew(tmp_path, seed) as processes:
        while time.monotonic() < end:
            time.sleep(processes.rng.random() * 0.4)
            processes.torment()
    acked, refused = read_notes(tmp_path)
    with xl.open(tmp_path / "log", name="judge") as engine:
        assert engine.verify().problems == ()
        for name in TOPICS:
            topic = engine.topic(name)
            # Whatever was left behind, the topic can be had at once. What somebody wrote and
            # died before it was flushed is in the log from now on, or is not.
            with topic.producer("wait_for_exclusive", timeout=10) as producer:
                rows = read_rows(topic)
                assert judge(rows, acked[name], refused[name]) == [], f"seed {seed}"
                assert producer.send(b"after") == len(rows)
    sent = sum(map(len, acked.values()))
    print(
        f"\n{seconds:.0f} s, seed {seed}: {processes.kills} kills, {processes.stops} stops, "
        f"{sent} acknowledged, {sum(map(len, refused.values()))} refused"
    )
    assert sent > 20 * seconds
    for errors in tmp_path.glob("stderr-*.txt"):
        assert "Traceback" not in errors.read_text(), errors.read_text()


SOUND = [Row(0, 1, 7, "a/1"), Row(1, 1, 8, "b/0"), Row(2, 2, 9, "c/1"), Row(3, 2, 9, "d/1")]


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ([*SOUND[:3]], "B9"),
        ([*SOUND, Row(4, 1, 7, "e/1")], "B8"),
        ([*SOUND, Row(4, 2, 5, "e/0"), Row(5, 2, 9, "f/1")], "B8"),
        ([*SOUND, Row(4, 2, 5, "e/1")], "B1"),
        ([*SOUND, Row(4, 3, 5, "a/1")], "G2"),
        ([*SOUND, Row(4, 3, 5, "refused/1")], "B3"),
    ],
)
def test_controls_turn_the_judge_red(rows: list[Row], rule: str) -> None:
    acked = {3: "d/1"}
    assert judge(SOUND, acked, {"refused/1"}) == []
    assert any(line.startswith(rule) for line in judge(rows, acked, {"refused/1"}))
