"""Shared parts of the pipelines: directories, DataFrames, progress.

Directories of a pipeline, wherever Spark can write them, and names for what it records.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO
from urllib.parse import quote

from exclusivelog.arguments import NAME_BYTES
from exclusivelog.spark.errors import PIPELINE, SourceError
from exclusivelog.spark.files import is_connect
from exclusivelog.spark.options import file_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- directories -----------------------------------------------------------------------


def job_name(kind: str, *about: str, most: int = NAME_BYTES) -> str:
    """A writer's name: readable if it is short enough, always the same for the same job. `most`:
    bytes that it may have.

    >>> job_name("archive", "/data/archive"), len(job_name("archive", "x" * 500))
    ('archive:/data/archive', 72)
    """
    name = ":".join((kind, *about))
    if len(name.encode()) <= most and name.isprintable():
        return name
    return f"{kind}:{hashlib.sha256(name.encode()).hexdigest()}"


def place(root: str, topic: str) -> str:
    """The directory of a topic in an archive.

    >>> place("/data/archive/", "eu/orders")
    '/data/archive/eu%2Forders'
    """
    name = quote(topic, safe="")
    # Such names would lead out of the directory, or be hidden from Spark.
    name = name.replace(".", "%2E") if name.startswith(".") else name
    name = name.replace("_", "%5F") if name.startswith("_") else name
    return f"{root.rstrip('/')}/{file_name(name)}"


def parquet(spark: SparkSession, path: str) -> DataFrame:
    """The path escaped for reading: Spark takes it for a pattern, which might match other
    directories, or none."""
    return spark.read.parquet(re.sub(r"([][{}*?\\])", r"\\\1", path))


# ---- frames ----------------------------------------------------------------------------


CHUNK = 5_000_000  # messages a range


def check_chunk(chunk: int) -> None:
    """SourceError unless `chunk` is a positive whole number."""
    if chunk < 1:
        raise SourceError(PIPELINE, f"chunk={chunk}: it takes a whole number from 1 on")


def with_origin(frame: DataFrame) -> DataFrame:
    """The columns that can be written, with the origin's offset and epoch as properties."""
    origin = "map('origin_offset', cast(offset as string), 'origin_epoch', cast(epoch as string))"
    former = (
        "map_filter(coalesce(properties, cast(map() as map<string,string>)), "
        "(k, v) -> k not in ('origin_offset', 'origin_epoch'))"
    )
    properties = f"map_concat({former}, {origin}) as properties"
    return frame.selectExpr("key", "value", "event_time", properties)


# ---- progress --------------------------------------------------------------------------


POLL_SECONDS = 0.25
ERASE = "\r\x1b[K"


class Progress:
    """Progress: one line for each step, and on a terminal, Spark's tasks on a line that is updated
    in place. `out` None: no output."""

    def __init__(self, spark: SparkSession, out: TextIO | None) -> None:
        # A client of Spark Connect is not told about tasks.
        self._tracker = None if is_connect(spark) else spark.sparkContext.statusTracker()
        self._out = out
        self._live = out is not None and out.isatty()

    def report(self, text: str) -> None:
        """Write a line."""
        if self._out is not None:
            print(f"{ERASE if self._live else ''}{text}", file=self._out, flush=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show a step while the block runs, then write its name and duration."""
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
        self.report(f"{text}: {time.monotonic() - begun:.1f} s")

    def _watch(self, text: str, begun: float, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            done, tasks = self._tasks()
            left = f", task {done} of {tasks}" if tasks else ""
            seconds = time.monotonic() - begun
            print(f"{ERASE}{text} ... {seconds:.0f} s{left}", end="", file=self._out, flush=True)

    def _tasks(self) -> tuple[int, int]:
        if self._tracker is None:
            return 0, 0
        stages = [self._tracker.getStageInfo(stage) for stage in self._tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        return sum(s.numCompletedTasks for s in known), sum(s.numTasks for s in known)
