"""What a pipeline tells while it works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_SECONDS = 0.25
ERASE = "\r\x1b[K"


class Progress:
    """Steps, each a line that stays; while one is under way, Spark's tasks on a line that
    changes in place. Where `out` is no terminal, only what stays. None: silence."""

    def __init__(self, spark: SparkSession, out: TextIO | None) -> None:
        self._tracker = spark.sparkContext.statusTracker()
        self._out = out
        self._live = out is not None and out.isatty()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._out is not None:
            print(f"{ERASE if self._live else ''}{text}", file=self._out, flush=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Something that takes a while: its name and time stay."""
        begun, ended = time.monotonic(), threading.Event()
        thread = threading.Thread(target=self._watch, args=(text, begun, ended), daemon=True)
        if self._live:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self._live:
                thread.join(10)
        self.say(f"{text}: {time.monotonic() - begun:.1f} s")

    def _watch(self, text: str, begun: float, ended: threading.Event) -> None:
        while not ended.wait(LOOK_SECONDS):
            done, tasks = self._tasks()
            left = f", task {done} of {tasks}" if tasks else ""
            seconds = time.monotonic() - begun
            print(f"{ERASE}{text} ... {seconds:.0f} s{left}", end="", file=self._out, flush=True)

    def _tasks(self) -> tuple[int, int]:
        stages = [self._tracker.getStageInfo(stage) for stage in self._tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        return sum(s.numCompletedTasks for s in known), sum(s.numTasks for s in known)
