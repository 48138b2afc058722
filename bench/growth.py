"""Whether calls take longer if there are more messages in the log (P12)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import exclusivelog as xl
from bench.append import messages
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Series,
    Settings,
    Stores,
    Target,
    consecutive,
    latencies,
    take_turns,
)
from bench.scan import arrow, check
from bench.space import journal_bytes
from exclusivelog.local.shm.lockfile import BOOT
from testing.processes import State, workers

SIZES = (100_000, 1_000_000, 10_000_000)
MORE = 100_000_000  # 10 GB
PER_ENTRY = 500  # about as a checkpoint packs them; much larger entries lie beside the tables
SENDS, SEEKS = 100, 500
FLAT = 1.2
FRAME_BYTES = 256  # of a message in the journal, about
WITHOUT_JOURNAL = 10_000  # messages, where there is none
UNFLUSHED_SECONDS = 5.0  # to fill the journal in
PATIENCE = 60.0

Logs = Mapping[int, str]  # by size, the ledger's path
Topics = Mapping[int, xl.Topic]
Work = Callable[[], list[float]]


def p12(settings: Settings) -> Figure:
    """Open, send, seek and tail, and the recovery after SIGKILL, by the size of the log."""
    figure = Figure("P12", "what a call costs with more and more messages of 100 B in the log")
    sizes = (*SIZES, MORE) if settings.full else SIZES
    with Stores(settings) as stores:
        logs = {size: stores.path(f"log-{size}") for size in sizes}
        for size, path in logs.items():
            fill(path, size)
        _measure_opening(figure, logs, settings.rounds_or(10))
        with opened(logs) as topics:
            _measure_calls(figure, topics, settings.rounds_or(10))
        _measure_recovery(figure, logs, settings.rounds_or(3))
    figure.notes.append(
        f"the logs were sent in batches of {PER_ENTRY}; before the calls are measured, everything "
        "is read once, so that all is in memory, and mapped"
    )
    return figure


def fill(path: str, count: int, batch: int = PER_ENTRY) -> None:
    """A log of that many messages, sent in batches of one size, closed cleanly."""
    values = messages(batch)
    with xl.open(path, name="bench") as engine:
        with engine.topic("orders").producer() as producer:
            for _ in range(count // batch):
                producer.send_many(values)


def in_turn(
    what: str, works: Mapping[int, Work], rounds: int, durability: str = ""
) -> dict[int, Series]:
    """The sizes in turn, each by its own work."""

    def arm(size: int, work: Work) -> Arm:
        name = f"{what}, {size:,} messages"
        return Arm(name, lambda _: work(), 1, "s", durability=durability)

    arms = [arm(size, work) for size, work in works.items()]
    return dict(zip(works, take_turns(arms, rounds).values(), strict=True))


def judge(figure: Figure, what: str, sizes: Mapping[int, Series], **bounds: float) -> None:
    """Each size against the smallest, which has no ratio to judge."""
    smallest = sizes[min(sizes)]
    for size, series in sizes.items():
        figure.series.append(series.thinned())
        if series is not smallest:
            target = Target(**bounds) if bounds else None
            figure.compare(f"{what}, {size:,} messages", series, smallest, target)
        else:
            most = bounds.get("most")
            figure.compare(
                f"{what}, {size:,} messages",
                series,
                target=None if most is None else Target(most=most),
            )


# ---- open --------------------------------------------------------------------------------


def _measure_opening(figure: Figure, logs: Logs, rounds: int) -> None:
    for what, read, bounds in (
        ("open after a clean close", False, {"most": 50e-3, "most_ratio": FLAT}),
        ("open after a clean close, and read the newest message", True, {}),
    ):
        works = {size: partial(time_opening, path, read) for size, path in logs.items()}
        judge(figure, what, in_turn(what, works, rounds), **bounds)


def time_opening(path: str, read: bool, expected: int | None = None) -> list[float]:
    """Seconds until the engine is open, or until the newest message was read."""
    start = time.perf_counter()
    with xl.open(path, name="bench") as engine:
        if read:
            count = read_newest(engine.topic("orders"))
        seconds = time.perf_counter() - start
    if expected is not None:
        check(count, expected)
    return [seconds]


def read_newest(topic: xl.Topic) -> int:
    """Read the last message; return the number of messages."""
    last = topic.next_offset - 1
    with topic.reader(last) as reader:
        return reader.read_next(timeout=0).offset + 1


# ---- send, seek, tail --------------------------------------------------------------------


@contextlib.contextmanager
def opened(logs: Logs) -> Iterator[Topics]:
    """Their topics, every page touched once."""
    with contextlib.ExitStack() as engines:
        topics = {
            size: engines.enter_context(xl.open(path, name="bench")).topic("orders")
            for size, path in logs.items()
        }
        for topic in topics.values():
            arrow(topic, topic.next_offset, ["value"])
        yield topics


def _measure_calls(figure: Figure, topics: Topics, rounds: int) -> None:
    for what, make, durability in (
        ("durable send", sending, POWER),
        ("seek to a random offset, and read one", seeking, ""),
        ("tail: read what was just sent", tailing, ""),
    ):
        works = {size: make(topic) for size, topic in topics.items()}
        sizes = in_turn(what, works, rounds, durability)
        judge(figure, f"{what}, p50", sizes, most_ratio=FLAT)


def sending(topic: xl.Topic) -> Work:
    producer, value = topic.producer(), messages(1)[0]
    return lambda: latencies(lambda: producer.send(value), SENDS)


def seeking(topic: xl.Topic) -> Work:
    reader, chance, count = topic.reader(), random.Random(7), topic.next_offset

    def seek_and_read() -> None:
        reader.seek(chance.randrange(count))
        reader.read_next(timeout=0)

    return lambda: latencies(seek_and_read, SEEKS)


def tailing(topic: xl.Topic) -> Work:
    producer, reader, value = topic.producer(), topic.reader("latest"), messages(1)[0]

    def tail() -> list[float]:
        samples = []
        for _ in range(SENDS):
            producer.send(value)
            samples += latencies(lambda: reader.read_next(timeout=5), 1)
        return samples

    return tail


# ---- recovery ----------------------------------------------------------------------------


def _measure_recovery(figure: Figure, logs: Logs, kills: int) -> None:
    """In each round the journal contains more when its process is killed; in the last, it is as
    full as possible."""
    journal = max(journal_bytes(Path(path)) for path in logs.values())
    most = journal // FRAME_BYTES or WITHOUT_JOURNAL
    for what, rebooted in (("SIGKILL", False), ("SIGKILL and a reboot", True)):
        samples: dict[int, list[float]] = {size: [] for size in logs}
        for turn in range(kills):
            for size, path in logs.items():
                expected = leave_a_journal(path, most * (turn + 1) // kills)
                if rebooted:
                    forget_the_boot(path)
                samples[size] += time_opening(path, read=True, expected=expected)
        sizes = {
            size: Series(f"open after {what}, {size:,} messages", "s", seconds, PROCESS)
            for size, seconds in samples.items()
        }
        judge(figure, f"open after {what}, and read the newest message", sizes)
        longest = max(max(seconds) for seconds in samples.values())
        figure.state(f"open after {what}, and read: the longest of all", longest, "s")
    figure.state("size of the journal, which bounds the recovery", journal, "B")
    figure.notes.append(
        f"before each SIGKILL 1/{kills} to {kills}/{kills} of the {most:,} messages were sent "
        "that fill the journal; a reboot is the lock file of another boot: nothing that was "
        "written is lost, so that there is most to recover"
    )


def leave_a_journal(path: str, count: int) -> int:
    """Send that many messages, or as many as there is time for, in a process that then kills
    itself; return the number of messages that the log must have."""
    report = Path(f"{path}.sent")
    with workers() as make:
        worker = make(path, "killed", durability="process")
        worker.start(send_and_die, count, UNFLUSHED_SECONDS, str(report))
        worker.process.join(PATIENCE)
        check(worker.process.exitcode or 0, -signal.SIGKILL)
    return int(report.read_text())


def send_and_die(state: State, count: int, seconds: float, report: str) -> None:
    producer, value = state.topic.producer(), messages(1)[0]
    consecutive(lambda: producer.send(value), count - 1, seconds)
    Path(report).write_text(str(producer.send(value) + 1))
    os.kill(os.getpid(), signal.SIGKILL)  # at once, without any clean-up


def forget_the_boot(path: str) -> None:
    """Change the boot id in the lock file: its content is then ignored, as after a power loss."""
    with open(os.path.join(path, "owners.lock"), "r+b") as lockfile:
        lockfile.seek(BOOT)
        lockfile.write(bytes(16))
