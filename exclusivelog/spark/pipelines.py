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
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote

from exclusivelog.backend import NAME_BYTES
from exclusivelog.spark.errors import PIPELINE, SourceError
from exclusivelog.spark.options import file_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- directories -----------------------------------------------------------------------


def job_name(kind: str, *about: str) -> str:
    """A writer's name: readable if it is short enough, always the same for the same job.

    >>> job_name("archive", "/data/archive"), len(job_name("archive", "x" * 500))
    ('archive:/data/archive', 72)
    """
    name = ":".join((kind, *about))
    if len(name.encode()) <= NAME_BYTES and name.isprintable():
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


def check_classic(spark: SparkSession) -> None:
    """SourceError for a session of Spark Connect, which has no SparkContext."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise SourceError(
            PIPELINE,
            "the pipelines need a classic Spark session, and this one is of Spark Connect. Make "
            "one with SparkSession.builder.master(...), without remote() and SPARK_REMOTE, or run "
            "python -m exclusivelog.spark",
        )


class Files:
    """A few operations of the file system that Spark uses for a path, local or not."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        check_classic(spark)
        assert spark.sparkContext._jvm is not None
        self._path: Any = spark.sparkContext._jvm.org.apache.hadoop.fs.Path
        hadoop = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs: Any = self._path(root).getFileSystem(hadoop)
        self._utf8: Any = spark.sparkContext._jvm.java.nio.charset.StandardCharsets.UTF_8

    def absolute(self, path: str) -> str:
        """The absolute path, with its scheme."""
        return str(self._fs.makeQualified(self._path(path)).toString())

    def exists(self, path: str) -> bool:
        """Does the path exist?"""
        return bool(self._fs.exists(self._path(path)))

    def names(self, path: str) -> list[str]:
        """What is in a directory, sorted; nothing if there is none."""
        if not self.exists(path):
            return []
        return sorted(str(s.getPath().getName()) for s in self._fs.listStatus(self._path(path)))

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all that is in it, if it is there."""
        self._fs.delete(self._path(path), True)

    def rename(self, source: str, target: str) -> None:
        """Rename to a path that does not exist; OSError if that fails."""
        if self.exists(target) or not self._fs.rename(self._path(source), self._path(target)):
            raise OSError(f"{source} cannot be renamed to {target}")

    def read(self, path: str) -> str | None:
        """A small file's text; None if there is none."""
        if not self.exists(path):
            return None
        stream = self._fs.open(self._path(path))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Write a small file atomically."""
        temporary = f"{path}.writing"
        stream = self._fs.create(self._path(temporary), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self.remove(path)
        self.rename(temporary, path)


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
        check_classic(spark)
        self._tracker = spark.sparkContext.statusTracker()
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
        stages = [self._tracker.getStageInfo(stage) for stage in self._tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        return sum(s.numCompletedTasks for s in known), sum(s.numTasks for s in known)
