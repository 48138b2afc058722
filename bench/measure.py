"""How the figures are measured: the arms of a comparison alternate, and their medians are compared.

Machines are noisy: the duration of a flush can drift tenfold within an hour. So the arms of a
comparison run one after another within one process, in many rounds, each in another order, and the
result is the ratio of the medians.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import exclusivelog as xl
from exclusivelog.local.storage.mounts import file_system

POWER = "survives power loss"
PROCESS = "survives the process's death"
KEPT_SAMPLES = 2_000  # of a series that would be too long to keep
PREFIX = "exclusivelog-bench-"
FILLING = bytes(1 << 20)
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


# ---- what a figure is --------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """The measurements of one arm. `rival`: it is another library. `cpu`: CPU seconds per unit of
    work, if measured. `drawn`: it is in the plots, not only in the raw numbers."""

    name: str
    unit: str
    samples: list[float]
    durability: str = ""
    rival: bool = False
    cpu: float | None = None
    drawn: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def percentile(self, share: float) -> float:
        """The sample that `share` of all samples do not exceed."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def thinned(self, most: int = KEPT_SAMPLES) -> Series:
        """The same distribution in at most `most` samples, with the smallest and the largest.
        Values that are rarer than one in `most` are lost, except for the largest."""
        if len(self.samples) <= most:
            return self
        ordered = sorted(self.samples)
        step = (len(ordered) - 1) / (most - 1)
        return replace(self, samples=[ordered[round(i * step)] for i in range(most)])


@dataclass(frozen=True)
class Target:
    """Bounds for our own figure, and for its ratio to the peer's. None: no bound."""

    least: float | None = None
    most: float | None = None
    least_ratio: float | None = None
    most_ratio: float | None = None

    @property
    def of_ratio(self) -> bool:
        """Whether it bounds only the ratio."""
        return self.least is None and self.most is None

    def holds(self, ours: float, ratio: float | None) -> bool:
        pairs = (
            (self.least, ours, 1),
            (self.most, ours, -1),
            (self.least_ratio, ratio, 1),
            (self.most_ratio, ratio, -1),
        )
        return all(
            value is not None and (value - bound) * sign >= 0
            for bound, value, sign in pairs
            if bound is not None
        )


@dataclass(frozen=True)
class Row:
    """One line of the table. A row without a target is for information."""

    what: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str = ""
    target: Target | None = None
    rival: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours divided by the peer's: above 1 is good for a rate, below 1 for a time."""
        return self.ours / self.peer if self.peer else None

    @property
    def holds(self) -> bool | None:
        return None if self.target is None else self.target.holds(self.ours, self.ratio)

    @property
    def loses(self) -> bool:
        """Whether a rival is better."""
        if self.ratio is None or not self.rival:
            return False
        return self.ratio < 1 if self.unit.endswith("/s") else self.ratio > 1


@dataclass
class Figure:
    """One figure of the benchmarks: its rows, everything that was measured, and remarks."""

    id: str
    title: str
    series: list[Series] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(
        self, what: str, ours: Series, peer: Series | None = None, target: Target | None = None
    ) -> None:
        """A row of two medians."""
        self.rows.append(
            Row(
                what,
                ours.median,
                ours.unit,
                peer.median if peer else None,
                peer.name if peer else "",
                target,
                peer.rival if peer else False,
            )
        )

    def compare_at(
        self, share: float, what: str, ours: Series, peer: Series, target: Target | None = None
    ) -> None:
        """A row of two percentiles: what `share` of the samples do not exceed."""
        self.rows.append(
            Row(
                what,
                ours.percentile(share),
                ours.unit,
                peer.percentile(share),
                peer.name,
                target,
                peer.rival,
            )
        )

    def state(self, what: str, ours: float, unit: str, target: Target | None = None) -> None:
        """A row of one number."""
        self.rows.append(Row(what, ours, unit, target=target))


# ---- taking turns ------------------------------------------------------------------------


@dataclass
class Arm:
    """One arm of a comparison. `work(prepare())` is timed, without `prepare`.

    `work` either returns samples, in `unit`, or does `amount` units of work, whose rate is
    computed.
    """

    name: str
    work: Callable[[Any], list[float] | None]
    amount: int = 1
    unit: str = "/s"
    prepare: Callable[[], Any] = lambda: None
    durability: str = ""
    rival: bool = False


def take_turns(
    arms: Sequence[Arm],
    rounds: int,
    warm_ups: int = 1,
    before: Callable[[], None] = lambda: None,
) -> dict[str, Series]:
    """Run every arm `rounds` times, in a rotating order; the first runs do not count.

    `before` is called before each run, outside of the timed part.
    """
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    cpu: dict[str, list[float]] = {arm.name: [] for arm in arms}
    with settled_garbage():
        for number in range(-warm_ups, rounds):
            shift = number % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                before()
                measured, seconds = _run(arm)
                if number >= 0:
                    samples[arm.name] += measured
                    cpu[arm.name].append(seconds)
    return {arm.name: _series(arm, samples[arm.name], cpu[arm.name]) for arm in arms}


def _series(arm: Arm, samples: list[float], cpu: list[float]) -> Series:
    return Series(arm.name, arm.unit, samples, arm.durability, arm.rival, statistics.median(cpu))


def _run(arm: Arm) -> tuple[list[float], float]:
    prepared = arm.prepare()
    cpu, start = time.process_time(), time.perf_counter()
    measured = arm.work(prepared)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return [arm.amount / seconds] if measured is None else measured, cpu / arm.amount


@contextlib.contextmanager
def settled_garbage() -> Iterator[None]:
    """The garbage collector stays on, but skips the millions of objects of the benchmark itself."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def latencies(call: Callable[[], object], count: int) -> list[float]:
    """The duration of each of `count` calls, in seconds."""
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def consecutive(call: Callable[[], object], most: int, seconds: float) -> list[float]:
    """The duration of each of up to `most` calls, in seconds, within about this time.

    Each call is timed from the end of the one before, so that no pause is missed.
    """
    clock = time.perf_counter
    samples = array("d", bytes(8 * most))  # which does not grow under the clock
    before = clock()
    deadline, number = before + seconds, 0
    while number < most and before < deadline:
        call()
        after = clock()
        samples[number] = after - before
        before = after
        number += 1
    return samples[:number].tolist()


def in_thread(work: Callable[[], Any], patience: float = 60.0) -> Any:
    """Run `work()` in a thread other than the main one, which Python's signal handlers
    interrupt."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result(patience)


@contextlib.contextmanager
def limited(seconds: int, what: str) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the block takes longer."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"{what} took longer than {seconds} s")

    former = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


# ---- where ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options of the command line. `directory` is where the stores are created."""

    directory: Path
    rounds: int | None = None
    full: bool = False

    def rounds_or(self, default: int) -> int:
        return self.rounds or default


class Stores(contextlib.ExitStack):
    """The files of one figure: all on the same disk, closed and removed at its end."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        prefix = f"{PREFIX}{os.getpid()}-"
        self.directory = Path(tempfile.mkdtemp(prefix=prefix, dir=settings.directory))
        self.callback(shutil.rmtree, self.directory, ignore_errors=True)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def warm_memory(self, size: int = 256 << 20) -> None:
        """Make this much memory available to the kernel for new pages of files.

        A virtual machine gets its memory from the host page by page, at the first access, which can
        take five times as long as writing the page. Otherwise the first arm would pay for it.
        """
        filler = self.directory / "filler"
        with filler.open("wb", buffering=0) as file:
            for _ in range(0, size, len(FILLING)):
                file.write(FILLING)
        filler.unlink()

    def engine(self, name: str = "ours", **options: Any) -> xl.Engine:
        return self.enter_context(xl.open(self.path(name), name="bench", **options))


def prepare_directory(directory: Path) -> Path:
    """Create the directory, refuse one in memory, and remove what killed runs have left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    kind = file_system(str(directory))
    if kind in MEMORY_FILE_SYSTEMS:
        raise SystemExit(
            f"{directory} is on {kind}, where a flush costs nothing; choose a disk with --dir"
        )
    for leftover in directory.glob(f"{PREFIX}*"):
        pid = leftover.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(leftover, ignore_errors=True)
    return directory
