"""Start-up: the import, the command, the extension's size, opening a ledger (P23)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import exclusivelog as xl
from bench.measure import Arm, Figure, Series, Settings, Stores, Target, take_turns
from exclusivelog import _core

ROUNDS = 15
OPENINGS = 20  # of one process, a round
TOPICS = 10
PATIENCE = 60.0
COMMAND = "import sys; from exclusivelog.cli import main; sys.argv[1:] = {!r}; main()"
BOUND = "import lmdb, msgpack"
FIRST = """
import sys, time, exclusivelog as xl
xl.open  # the modules are imported now
start = time.perf_counter()
engine = xl.open(sys.argv[1])
print((time.perf_counter() - start))
engine.close()
"""


def p23(settings: Settings) -> Figure:
    """New processes, each with compiled modules at hand; and engines within one process."""
    figure = Figure("P23", "to begin: processes, and the first call")
    with Stores(settings) as stores:
        path = stores.path("ledger")
        _fill(path)
        _measure_processes(figure, settings, path, stores.directory / "compiled")
        _measure_opening(figure, settings, path)
    size = Path(_core.__file__).stat().st_size
    figure.state("size of the extension module", size, "B", Target(most=700_000))
    figure.notes.append(
        "processes run with python -S and the search path of this one, so that what the "
        "environment loads at its start does not count"
    )
    return figure


def _fill(path: str) -> None:
    with xl.open(path) as engine:
        for number in range(TOPICS):
            with engine.topic(f"topic-{number}").producer() as producer:
                producer.send(b"x")


def _measure_processes(figure: Figure, settings: Settings, path: str, compiled: Path) -> None:
    programs = {
        "python": ("pass",),
        BOUND: (BOUND,),
        "import exclusivelog": ("import exclusivelog",),
        "import exclusivelog, and all that open needs": ("import exclusivelog; exclusivelog.open",),
        "exclusivelog --help": (COMMAND.format(["--help"]),),
        "exclusivelog topics": (COMMAND.format(["topics", path]),),
        "first open of a process": (FIRST, path),
    }
    environment = _environment(compiled)
    arms = [
        Arm(name, lambda _, words=words: [_run(words, environment)], unit="s")
        for name, words in programs.items()
    ]
    found = take_turns(arms, settings.rounds_or(ROUNDS))
    figure.series += found.values()
    python, bound = found["python"], found[BOUND]
    for name, most in (
        ("import exclusivelog", 0.09),
        ("exclusivelog --help", 0.2),
        ("exclusivelog topics", 0.2),
    ):
        figure.compare(name, found[name], bound, Target(most=most))
    figure.compare(
        "import exclusivelog: against an empty program", found["import exclusivelog"], python
    )
    name = "import exclusivelog, and all that open needs"
    figure.compare(name, found[name], bound)
    figure.compare("first open of a process", found["first open of a process"])


def _environment(compiled: Path) -> dict[str, str]:
    # The modules' compiled files are written by the warm-up, also where the tree has none.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    paths = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    return {**kept, "PYTHONPATH": paths, "PYTHONPYCACHEPREFIX": str(compiled)}


def _run(words: tuple[str, ...], environment: dict[str, str]) -> float:
    """The duration of a new process, or the time that it has measured itself, in seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    took = time.perf_counter() - start
    return float(done.stdout) if words[0] == FIRST else took


def _measure_opening(figure: Figure, settings: Settings, path: str) -> None:
    samples = []
    for _ in range(settings.rounds_or(ROUNDS) * OPENINGS):
        start = time.perf_counter()
        engine = xl.open(path)
        samples.append(time.perf_counter() - start)
        engine.close()
    series = Series("open of an existing ledger", "s", samples)
    figure.series.append(series)
    figure.compare(
        "open of an existing ledger, again in one process", series, None, Target(most=0.0012)
    )
