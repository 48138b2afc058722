"""One message out of many, from memory and from the disk (P19)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import exclusivelog as xl
from bench.append import SIZE
from bench.growth import Logs, fill, in_turn, judge, opened, seeking
from bench.measure import Arm, Figure, Settings, Stores, Target, latencies, take_turns
from bench.scan import check

SIZES = (100_000, 1_000_000)
MORE = 10_000_000  # 1 GB
MOST = 100_000_000  # 10 GB, which are read from the disk alone
BATCH = 100_000
PAGE, READS = 4096, 200


def p19(settings: Settings) -> Figure:
    """Logs of several sizes; the largest one also after the page cache has dropped it."""
    figure = Figure("P19", f"one random message of 100 B, sent in batches of {BATCH:,}")
    sizes = (*SIZES, MORE) if settings.full else SIZES
    with Stores(settings) as stores:
        logs = {size: stores.path(f"log-{size}") for size in sizes}
        for size, path in logs.items():
            fill(path, size, BATCH)
        _measure_warm(figure, logs, settings.rounds_or(30))
        cold = logs[max(sizes)]
        if settings.full:
            cold = stores.path(f"log-{MOST}")
            fill(cold, MOST, BATCH)
        _measure_cold(figure, cold, settings.rounds_or(5))
    return figure


def _measure_warm(figure: Figure, logs: Logs, rounds: int) -> None:
    """Close its readers, because the page cache does not drop what a process has mapped."""
    with opened(logs) as topics:
        works = {size: seeking(topic) for size, topic in topics.items()}
        series = in_turn("seek and read one", works, rounds)
        judge(figure, "seek and read one, p50", series, most=15e-6, most_ratio=1.1)


def _measure_cold(figure: Figure, path: str, rounds: int) -> None:
    message, page = "a message from the disk", "pread of 4 KiB at a random place"
    results = take_turns(
        [
            Arm(message, lambda _: _read_messages(path), 1, "s"),
            Arm(page, lambda _: _read_pages(path), 1, "s", rival=True),
        ],
        rounds,
    )
    figure.series += list(results.values())
    figure.compare(f"{message}, p50", results[message], results[page], Target(most_ratio=3))


def _drop(path: str) -> list[Path]:
    """Drop the segments from the page cache; return their files."""
    files = sorted(Path(path, "segments").iterdir())
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return files


def _read_messages(path: str) -> list[float]:
    _drop(path)
    with xl.open(path, name="bench") as engine, engine.topic("orders").reader() as reader:
        dice, count = random.Random(os.urandom(8)), engine.topic("orders").next_offset

        def read() -> None:
            reader.seek(dice.randrange(count))
            check(len(reader.read_next(timeout=0).value or b""), SIZE)

        return latencies(read, READS)


def _read_pages(path: str) -> list[float]:
    files = [open(file, "rb", buffering=0) for file in _drop(path)]  # noqa: SIM115
    dice = random.Random(os.urandom(8))
    pages = [(file, at) for file in files for at in range(0, os.fstat(file.fileno()).st_size, PAGE)]

    def read() -> None:
        file, at = dice.choice(pages)
        os.pread(file.fileno(), PAGE, at)

    found = latencies(read, READS)
    for file in files:
        file.close()
    return found
