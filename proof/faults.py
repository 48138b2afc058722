"""What is done to processes: killed, stopped for longer than their keepalive, continued."""

from __future__ import annotations

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

from proof.traffic import KEEPALIVE
from tests.children import ROOT

PROCESSES = 4
STOPS = (0.01, 0.1, KEEPALIVE + 0.3)  # seconds
PATIENCE = 30.0


@dataclass
class Crew:
    """The processes of the torture, and what was done to them."""

    path: Path  # of the notes
    ledger: Path
    rng: random.Random
    sabotage: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    living: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: int = 0
    kills: int = 0
    stops: int = 0

    def start(self) -> None:
        self.started += 1
        notes = self.path / f"notes-{self.started}.jsonl"
        seed = self.rng.randrange(1 << 30)
        code = f"from proof.traffic import play; play({str(self.ledger)!r}, "
        code += f"{str(notes)!r}, {seed}, {self.sabotage!r})"
        with open(self.path / f"stderr-{self.started}.txt", "wb") as stderr:
            self.living.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    stderr=stderr,
                    cwd=ROOT,
                    env={**os.environ, **self.environment},
                )
            )

    def torment(self) -> None:
        """Do something cruel to one of them."""
        victim = self.rng.choice(self.living)
        if self.rng.random() < 0.7:
            victim.kill()
            victim.wait(PATIENCE)
            self.living.remove(victim)
            self.kills += 1
            self.start()
        else:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(self.rng.choice(STOPS))
            victim.send_signal(signal.SIGCONT)
            self.stops += 1

    def go_on(self, seconds: float) -> None:
        """Torment them for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.rng.random() * 0.4)
            self.torment()

    def end(self) -> None:
        while self.living:
            process = self.living.pop()
            process.kill()
            process.wait(PATIENCE)

    def tracebacks(self) -> list[str]:
        """What a process died of by itself."""
        texts = [errors.read_text() for errors in self.path.glob("stderr-*.txt")]
        return [text.strip().splitlines()[-1] for text in texts if "Traceback" in text]


@contextmanager
def crew(path: Path, seed: int, sabotage: str = "") -> Iterator[Crew]:
    """So many processes on the ledger `path`/log, each with its notes beside it."""
    made = Crew(path, path / "log", random.Random(seed), sabotage)
    try:
        for _ in range(PROCESSES):
            made.start()
        yield made
    finally:
        made.end()
