"""Faults: kill processes, stop them for longer than their keepalive, and continue them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from proof.fork_server import Forked, fork_server
from proof.traffic import KEEPALIVE

PROCESSES = 4
STOPS = (0.01, 0.1, KEEPALIVE + 0.3)  # seconds


@dataclass
class Crew:
    """The processes of the torture, and the numbers of faults."""

    path: Path  # of the notes
    ledger: Path
    rng: random.Random
    fork: Callable[..., Forked]
    defect: str = ""
    living: list[Forked] = field(default_factory=list)
    started: int = 0
    kills: int = 0
    stops: int = 0

    def start(self) -> None:
        self.started += 1
        notes = self.path / f"notes-{self.started}.jsonl"
        stderr, seed = self.path / f"stderr-{self.started}.txt", self.rng.randrange(1 << 30)
        self.living.append(self.fork(stderr, str(self.ledger), str(notes), seed, self.defect))

    def inject(self) -> None:
        """Kill one of them and start another one, or stop one for a moment."""
        process = self.rng.choice(self.living)
        if self.rng.random() < 0.7:
            self.living.remove(process)
            process.close()
            self.kills += 1
            self.start()
        else:
            process.signal(signal.SIGSTOP)
            time.sleep(self.rng.choice(STOPS))
            process.signal(signal.SIGCONT)
            self.stops += 1

    def go_on(self, seconds: float) -> None:
        """Inject faults for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.rng.random() * 0.4)
            self.inject()

    def end(self) -> None:
        while self.living:
            self.living.pop().close()

    def tracebacks(self) -> list[str]:
        """The errors that have ended processes, other than kills."""
        texts = [errors.read_text() for errors in self.path.glob("stderr-*.txt")]
        return [text.strip().splitlines()[-1] for text in texts if "Traceback" in text]


@contextmanager
def crew_of(
    path: Path,
    ledger: Path,
    rng: random.Random,
    defect: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Crew]:
    """A crew without processes; those that are started are ended with the block."""
    with fork_server("proof.traffic:play", environment) as fork:
        made = Crew(path, ledger, rng, fork, defect)
        try:
            yield made
        finally:
            made.end()


@contextmanager
def crew(path: Path, seed: int, defect: str = "") -> Iterator[Crew]:
    """A crew of `PROCESSES` processes on the ledger `path`/log; their notes are in `path`."""
    with crew_of(path, path / "log", random.Random(seed), defect) as made:
        for _ in range(PROCESSES):
            made.start()
        yield made
