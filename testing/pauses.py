"""How often a process that is stopped holds up writers of other topics: SIGSTOP at random instants.

Another process sends to another topic. If that has no answer within 0.3 s, the stopped process is
inside the critical section. But each send must be answered once the process goes on.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import exclusivelog as xl
from testing.children import child, line, script, tell
from testing.patience import PATIENCE
from testing.processes import stop, until

# What it does, the durability, and how often a second (0: at full speed).
Kind = tuple[str, Literal["power", "process"], float]
SILENCE = 0.3  # seconds without an answer to a send
LONGEST_RUN = 0.03  # between two stops

BEGIN = """
    import mmap, struct, sys, time
    import exclusivelog as xl
    from testing.patience import PATIENCE
    path, durability, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with open(sys.argv[4], "r+b") as file:
        calls = mmap.mmap(file.fileno(), 8)
    engine = xl.open(path, "stopped", durability=durability)
    topic = engine.topic("a")

    def each(call):
        call()
        print("ready", flush=True)
        number = 0
        while True:
            call()
            number += 1
            struct.pack_into("=Q", calls, 0, number)
            if rate:
                time.sleep(1 / rate)
"""
WORK = {
    "sends": """
        producer = topic.producer()
        each(lambda: producer.send(b"x" * 100))
    """,
    "commits": """
        producer = topic.producer()
        def commit():
            with engine.transaction() as tx:
                producer.send(b"x" * 100, transaction=tx)
        each(commit)
    """,
    "positions": """
        with topic.producer() as producer:
            producer.send_many([b"x"] * 1000)
        reader = topic.reader(group="readers")
        def commit():
            if reader.position == 1000:
                reader.seek("earliest")
            reader.read_next(timeout=0)
            reader.commit()
        each(commit)
    """,
    "checkpoints": """
        producer, values = topic.producer(), [b"x" * 100] * 100
        def checkpoint():
            producer.send_many(values)
            engine.ledger.checkpoint()
        each(checkpoint)
    """,
    "nothing": """
        each(lambda: time.sleep(0.0001))
    """,
    "grants": """
        def grant():
            topic.producer("exclusive").close()
        each(grant)
    """,
    "moves": """
        other = xl.open(path, "other", durability=durability)
        ends = [engine, other]
        producers = [each.topic("a").producer_async("wait_for_exclusive") for each in ends]
        turn = [0]
        holder = producers[0].result(PATIENCE)
        def move():
            at, to = turn[0], 1 - turn[0]
            ends[at].unload("a", to=ends[to].id)
            producers[to].result(PATIENCE)
            producers[at] = ends[at].topic("a").producer_async("wait_for_exclusive")
            turn[0] = to
        each(move)
    """,
    # The control: it is inside whenever it is stopped.
    "holds the lock": """
        import signal
        resumed = []  # no Event: its lock may be held by the wait that the handler interrupts
        signal.signal(signal.SIGCONT, lambda *_: resumed.append(True))
        print("ready", flush=True)
        for _ in sys.stdin:
            with engine.ledger.write_exclusive():
                print("inside", flush=True)
                while not resumed:  # another thread may get the signal
                    time.sleep(0.01)
            resumed.clear()
    """,
}
CONTROL: Kind = ("holds the lock", "process", 0)


@dataclass
class Found:
    stops: int = 0
    inside: int = 0
    unanswered: int = 0  # although the process went on
    calls: int = 0  # that it made meanwhile
    seconds: float = 0.0  # that it ran, between the stops

    @property
    def share(self) -> str:
        return f"{self.inside} of {self.stops} ({100 * self.inside / max(1, self.stops):.1f} %)"


def name_of(kind: Kind) -> str:
    """
    >>> name_of(("sends", "power", 0)), name_of(("commits", "process", 10))
    ('sends under power at full speed', 'commits under process, 10 a second')
    """
    what, durability, rate = kind
    return f"{what} under {durability}" + (f", {rate} a second" if rate else " at full speed")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """All of its threads stand still."""
    try:
        stop(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def measure(kind: Kind, stops: int, where: Path) -> Found:
    """Stop a process that works so many times."""
    what, durability, rate = kind
    found = Found()
    counter = where.with_name(f"{where.name}.calls")
    counter.write_bytes(bytes(8))
    with xl.open(where, "observer", durability=durability) as engine:
        with (
            engine.topic("b").producer() as producer,
            child(script(BEGIN, WORK[what]), where, durability, rate, counter) as process,
        ):
            line(process)
            for _ in range(stops):
                began = time.monotonic()
                time.sleep(random.uniform(0, LONGEST_RUN))
                if kind == CONTROL:
                    tell(process)
                    assert line(process) == "inside"
                found.seconds += time.monotonic() - began
                _stop_once(process.pid, producer, found)
            if what != CONTROL[0]:  # it goes on; until then, it may have had no core
                made = counter.read_bytes()
                until(lambda: counter.read_bytes() != made)
    found.calls = int.from_bytes(counter.read_bytes(), sys.byteorder)
    return found


def measured(kind: Kind, stops: int, where: Path) -> Found:
    """The same on a new ledger in this directory."""
    with tempfile.TemporaryDirectory(dir=where) as ledger:
        return measure(kind, stops, Path(ledger) / "log")


def _stop_once(pid: int, producer: xl.Producer, found: Found) -> None:
    with stopped(pid):
        receipt = producer.send_async(b"y")
        with contextlib.suppress(NotYet):
            receipt.result(SILENCE)
        found.stops += 1
        found.inside += not receipt.done()
    try:
        receipt.result(PATIENCE)
    except NotYet:
        found.unanswered += 1
