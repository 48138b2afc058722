"""The traffic of processes on a ledger, and their notes of it.

`play` is one process of the torture: it opens producers in random modes, sends, reads, closes,
abandons, forks, and sends again with producers that were fenced. Each process notes each call in
its file before it begins and after it has ended, so that no call is missing if the process dies.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import exclusivelog as xl
from exclusivelog.local.log import appending
from exclusivelog.producer import Options
from testing.judges import Call, Read, judge, read_rows

TOPICS = ("orders", "payments")
KEEPALIVE = 1.0
TIMEOUTS = (0.0, 0.02, 0.3, 1.0)
MOST_AT_ONCE = 5
UNCHECKED = "unchecked"  # a deliberate defect: no append checks which session owns a topic
PATIENCE = 20.0


# ---- notes -------------------------------------------------------------------------------


class Notes:
    """A process's own file: one line of JSON for the beginning and the end of each call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = 0

    def _write(self, **facts: object) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())

    def begin(self, topic: str, values: list[bytes], **facts: Any) -> int:
        """A call is about to be made; its number."""
        self._count += 1
        texts = [value.decode() for value in values]
        self._write(call=self._count, begun=time.monotonic_ns(), topic=topic, values=texts, **facts)
        return self._count

    def end(self, number: int, **facts: Any) -> None:
        """What came of it."""
        self._write(end=number, ended=time.monotonic_ns(), **facts)

    def read(self, topic: str, begun: int, start: int, messages: list[xl.Message]) -> None:
        """What a reader got."""
        texts = [(message.value or b"").decode() for message in messages]
        self._write(read=topic, begun=begun, ended=time.monotonic_ns(), start=start, values=texts)

    def trouble(self, what: str) -> None:
        """Something that must not be, and that no call tells."""
        self._write(trouble=what)

    def error(self, error: Exception) -> None:
        """A call has raised what it may raise: the cluster was away, say."""
        self._write(error=f"{type(error).__name__}: {error}")


@dataclass
class Record:
    """What all notes say."""

    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[str, list[Read]] = field(default_factory=lambda: defaultdict(list))
    trouble: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # that calls may raise

    def count(self, outcome: str, stale: bool | None = None) -> int:
        """Messages of calls with this outcome."""
        return sum(
            len(call.values)
            for calls in self.calls.values()
            for call in calls
            if call.outcome == outcome and stale in (None, call.stale)
        )

    @property
    def operations(self) -> int:
        """Calls and reads."""
        return sum(map(len, self.calls.values())) + sum(map(len, self.reads.values()))


def read_notes(directory: Path) -> Record:
    """All notes in a directory. The last line of a killed process may be cut off."""
    record = Record()
    for path in sorted(directory.glob("notes-*.jsonl")):
        for call, topic in _calls(path, record):
            record.calls[topic].append(call)
    return record


def _calls(path: Path, record: Record) -> Iterator[tuple[Call, str]]:
    calls: dict[int, tuple[Call, str]] = {}
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        facts = json.loads(line)
        if "call" in facts:
            values = tuple(value.encode() for value in facts["values"])
            sender = facts.get("sender", path.stem)
            call = Call(
                sender, values, facts["begun"], facts["exclusive"], facts.get("stale", False)
            )
            calls[facts["call"]] = call, facts["topic"]
        elif "end" in facts:
            call, topic = calls[facts["end"]]
            ended = facts["ended"]
            if facts.get("refused"):
                call = call.refused(ended)
            else:
                call = call.acknowledged(ended, facts["offset"], facts.get("epoch"))
            calls[facts["end"]] = call, topic
        elif "read" in facts:
            values = tuple(value.encode() for value in facts["values"])
            record.reads[facts["read"]].append(
                Read(path.stem, facts["begun"], facts["ended"], facts["start"], values)
            )
        elif "error" in facts:
            record.errors.append(facts["error"])
        else:
            record.trouble.append(facts["trouble"])
    yield from calls.values()


def judge_ledger(
    path: Path, record: Record, topics: Iterable[str], send: bool = True
) -> Iterator[str]:
    """Every broken rule of a ledger, by comparison with the notes."""
    try:
        with xl.open(path, name="judge") as engine:
            yield from engine.verify().problems
            for name in topics:
                # The topic can be owned at once. Messages of a process that died before a flush
                # are in the log from now on, or are not.
                topic = engine.topic(name)
                with topic.producer("wait_for_exclusive", timeout=10) as producer:
                    rows = read_rows(topic)
                    for broken in judge(rows, record.calls[name], record.reads[name]):
                        yield f"{name}: {broken}"
                    if send and (offset := producer.send(b"after")) != len(rows):
                        yield f"{name}: G5 at offset {offset}: it should be {len(rows)}"
    except xl.ExclusiveLogError as error:
        yield f"H1: {type(error).__name__}: {error}"


# ---- one process -------------------------------------------------------------------------


@dataclass
class Player:
    """One process of the torture."""

    engine: xl.Engine
    notes: Notes
    rng: random.Random
    defect: str
    count: int = 0
    readers: dict[str, xl.Reader] = field(default_factory=dict)

    def values(self, topic: str, many: int) -> list[bytes]:
        """The next messages; no two of any process are alike."""
        self.count += many
        numbers = range(self.count - many, self.count)
        return [f"{topic[0]}/{os.getpid()}/{number}".encode() for number in numbers]

    def step(self) -> None:
        """Open a producer, use it, and leave it, one way or another."""
        topic = self.engine.topic(self.rng.choice(TOPICS))
        self.look(topic)
        mode = self.rng.choice([*xl.AccessMode])
        try:
            producer = topic.producer(
                mode, priority=self.rng.randrange(5), timeout=self.rng.choice(TIMEOUTS)
            )
        except (xl.ProducerBusyError, xl.ProducerFencedError, xl.WaitTimeoutError):
            return
        self.connect(producer)
        exclusive = mode != "shared"
        for _ in range(self.rng.randrange(1, 12)):
            if not self.send(topic, producer, exclusive):
                self.haunt(topic, producer, exclusive)
                break
        if self.rng.random() < 0.03:
            self.fork(topic, producer)
        if self.rng.random() < 0.8:
            producer.close()  # else it is abandoned, and must not stay an owner

    def send(
        self, topic: xl.Topic, producer: xl.Producer, exclusive: bool, stale: bool = False
    ) -> bool:
        """Send one message or a batch; return whether it was accepted."""
        values = self.values(topic.name, self.rng.choice([1, 1, 1, MOST_AT_ONCE]))
        number = self.notes.begin(topic.name, values, exclusive=exclusive, stale=stale)
        try:
            if len(values) == 1:
                offset = producer.send(values[0])
            else:
                offset = producer.send_many(values).start
        except (xl.ProducerFencedError, xl.EngineClosedError):
            self.notes.end(number, refused=True)
            return False
        epoch = producer.topic_epoch if exclusive else None
        self.notes.end(number, offset=offset, epoch=epoch)
        return True

    def haunt(self, topic: xl.Topic, producer: xl.Producer, exclusive: bool) -> None:
        """It was fenced: every later send must be refused, also by a handle on its session that got
        no notification, so that the ledger has to refuse it."""
        self.send(topic, producer, exclusive, stale=True)
        session = self.engine.backend.open_session(topic.name, producer._session, -1, Options())
        stranger = xl.Producer(self.engine.backend, topic.name, session, Options())
        self.connect(stranger)
        self.send(topic, stranger, exclusive, stale=True)
        stranger.close()

    def connect(self, producer: xl.Producer) -> None:
        """The control needs a connection that looks what others append: two owners at once
        would else write to one offset, which the ledger notices by itself."""
        if self.defect == UNCHECKED and producer._session.exclusive:
            ledger, session = self.engine.ledger, producer._session
            assert ledger.journal is not None
            producer._sender.appender.connect(
                ledger.journal,
                ledger.lockfile.atomics,
                ledger.lockfile.counters.place(session.topic),
                session.topic,
                session.epoch,
                session.id,
                False,
                True,
            )

    def look(self, topic: xl.Topic) -> None:
        """Read on to the end, or again from somewhere."""
        reader = self.readers.get(topic.name)
        if reader is None or self.rng.random() < 0.1:
            start = self.rng.choice([0, max(0, topic.next_offset - 50)])
            reader = self.readers[topic.name] = topic.reader(start)
        begun, start = time.monotonic_ns(), reader.position
        self.notes.read(topic.name, begun, start, list(reader))

    def fork(self, topic: xl.Topic, producer: xl.Producer) -> None:
        """A forked child that uses what it has inherited gets an error (rule C5)."""
        pid = os.fork()
        if pid == 0:
            try:
                accepted = self.send(topic, producer, True, stale=True)
                os._exit(int(accepted))
            except BaseException:
                os._exit(2)
        deadline = time.monotonic() + PATIENCE
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, 9)
                self.notes.trouble("C5: a forked child did not end")
            time.sleep(0.001)
        if ended[1]:
            self.notes.trouble(f"C5: a forked child ended with {ended[1]}")
        self.count += MOST_AT_ONCE  # what the child has called its messages


def play(path: str, notes: str, seed: int, defect: str = "") -> None:
    """Be one process of the torture until it is killed or its parent has ended."""
    if defect == UNCHECKED:
        vars(appending)["check_may_write"] = lambda *_: None
    with xl.open(path, name=f"w{seed}", keepalive=KEEPALIVE) as engine:
        player = Player(engine, Notes(notes), random.Random(seed), defect)
        parent = os.getppid()
        while os.getppid() == parent:
            player.step()
