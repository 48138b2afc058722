"""Archive: a topic's messages into Parquet, verified, and recorded in the ledger; then, if
asked, trimmed from it. Resumable at every step, and nothing is archived twice.

```text
<to>/<topic>/_ledger                                  whose messages these are
<to>/<topic>/range=<from>-<to>/date=2026-01-31/*.parquet    a range, whole: [from, to)
<to>/<topic>/_writing/*/                              one that is being written, or was given up
```

A range is written to `_writing`, read back, compared, and then renamed into place. Then its end is
recorded in the ledger, in the table of batches, under `archive:<to>`. Meanwhile the run holds a
lock of the ledger: two that archive the same messages would each have a range of them.

An archive that was moved is continued where it is now: its ranges tell how far it goes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import exclusivelog as xl
from exclusivelog.arguments import MAX_NAME_BYTES
from exclusivelog.once import record, recorded
from exclusivelog.spark import plan
from exclusivelog.spark.clusters import open_log
from exclusivelog.spark.errors import DATA_LOSS, PIPELINE, SourceError, coded
from exclusivelog.spark.files import files_of, make_durable
from exclusivelog.spark.options import refuse
from exclusivelog.spark.pipelines import (
    CHUNK,
    Progress,
    check_chunk,
    job_name,
    parquet,
    place,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# By the time in UTC, regardless of the session's time zone.
DATE = "date_add(date'1970-01-01', cast(floor(unix_micros(publish_time) / 86400000000) as int))"
SUM = (
    "bit_xor(xxhash64(offset, epoch, key, value, publish_time, event_time, producer, "
    "sequence_id, map_entries(properties)))"
)
FACTS = ("count(*) as n", "min(offset) as low", "max(offset) as high", f"{SUM} as hash")
# What to do with a range that is not what it should be, if the topic has all of it, or may not.
MAKE_AGAIN = "Remove it, and run the archive again"
MAKE_ANOTHER = "Bring it back from a copy, or archive the topic to another directory"


@dataclass(frozen=True)
class Archived:
    """The archive has the offsets before `end`; this call has added those from `start` on.
    `first_offset`: of the topic, after trimming."""

    topic: str
    start: int
    end: int
    first_offset: int


def run(
    spark: SparkSession,
    ledger: str,
    topic: str,
    to: str,
    *,
    before: int | dt.datetime | None = None,
    chunk: int = CHUNK,
    keep: dt.timedelta | None = None,
    out: TextIO | None = None,
    access: Mapping[str, str] | None = None,
) -> Archived:
    """Archive the new messages of a topic.

    - `ledger`, `topic`: the source. `to`: a directory to which Spark can write.
    - `before`: an offset or a time (naive: local time) at which to stop; None: the current end.
    - `chunk`: most messages in a range. A range that was begun and not finished stays one range.
    - `keep`: afterwards trim archived messages that are older than this. None: trim nothing.
    - `out`: where to write progress; None: nowhere.
    - `access`: what `exclusivelog.open` takes to get into a cluster, if `ledger` is the URL of a
      namespace. There the archive alone says what it has, and nothing can be trimmed.

    Raises SourceError: DATA_LOSS where messages are gone that were not archived, PIPELINE where
    the archive is another ledger's, does not hold what was written, or is being written by another
    run. Of two runs on a cluster, which can only be read, none keeps the other out.
    """
    check_chunk(chunk)
    with coded(), open_log(ledger, "archive", access, readonly=False) as engine:
        if keep is not None and not engine.supports("retention"):
            raise refuse("keep trims the topic, and a cluster's log keeps all; leave it out")
        job = Archive(spark, engine, topic, to, Progress(spark, out), access)
        with job.alone():
            return job.go(before, chunk, keep)


class Archive:
    """One topic's way into one archive."""

    def __init__(
        self,
        spark: SparkSession,
        engine: xl.Engine,
        topic: str,
        to: str,
        progress: Progress,
        access: Mapping[str, str] | None = None,
    ) -> None:
        self._spark = spark
        self._engine = engine
        self._access = access
        self._records = engine.supports("once")
        self._topic = engine.topic(topic, create=False)
        self._files = files_of(spark, to)
        self._progress = progress
        root = self._files.absolute(to)
        self._where = place(root, topic)
        self._writer = job_name("archive", root)
        self._lock: xl.Lock | None = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs out while the block runs."""
        if not self._records:
            yield
            return
        name = job_name("archive", str(self._topic.id), self._where, most=MAX_NAME_BYTES)
        try:
            self._lock = self._engine.lock(name, timeout=0)
        except xl.WaitTimeoutError as error:
            raise SourceError(
                PIPELINE, f"{self._where} is being written by another run: {error}"
            ) from None
        with self._lock:
            yield

    def go(
        self, before: int | dt.datetime | None, chunk: int, keep: dt.timedelta | None
    ) -> Archived:
        """Archive range after range."""
        self._claim_the_directory()
        self._files.remove(f"{self._where}/_writing")  # given up, as nobody else has the lock
        first = start = self._begin()
        end = self._end(before)
        self._progress.report(f"{self._topic.name}: offsets {start} to {max(start, end)}")
        while start < end:
            stop = self._left_behind(start) or min(start + chunk, end)
            self._archive(start, stop)
            if self._records:
                record(self._engine, self._topic, self._writer, stop)
            start = stop
        if keep is not None:
            self._trim(start, keep)
        return Archived(self._topic.name, first, start, self._topic.first_offset)

    def _claim_the_directory(self) -> None:
        log = self._engine.ledger.uuid if self._records else self._engine.path
        mark = f"{log} {self._topic.id}"
        found = self._files.read(f"{self._where}/_ledger")
        if found is None and self._done:
            raise SourceError(
                PIPELINE,
                f"the ledger has recorded that offsets before {self._done} of topic "
                f"{self._topic.name!r} are in {self._where}, but there is no archive: is it "
                "mounted? Choose another directory to start a new archive",
            )
        if found is None:
            self._files.write(f"{self._where}/_ledger", mark)
            make_durable(f"{self._where}/_ledger")
        elif found != mark:
            raise SourceError(
                PIPELINE,
                f"{self._where} is the archive of another ledger's topic {self._topic.name!r} "
                f"({found}, not {mark}); choose another directory",
            )

    @property
    def _done(self) -> int:
        if not self._records:
            return max(self._ranges().values(), default=0)  # ranges are made in order
        return recorded(self._engine, self._topic).get(self._writer, 0)

    def _begin(self) -> int:
        done, first = self._done, self._topic.first_offset
        if done < first and self._ranges():
            done = max(done, self._held_before(first))
        if done < first and (done or self._ranges()):
            raise SourceError(
                DATA_LOSS,
                f"topic {self._topic.name!r} begins at offset {first}; those from {done} on were "
                "trimmed, and are not in the archive",
            )
        return max(done, first)

    def _held_before(self, first: int) -> int:
        """Up to where the archive has what the topic has lost, though the ledger has recorded less:
        the archive was moved. What the topic still has of it is compared."""
        done = 0
        for start, stop in sorted(self._ranges().items()):
            if start < first:
                done = stop
        if done > first:
            self._check_left_behind(first, done, self._range_with(first), MAKE_ANOTHER)
        return done

    def _range_with(self, offset: int) -> str:
        return next(
            self._range(start, stop)
            for start, stop in self._ranges().items()
            if start <= offset < stop
        )

    def _end(self, before: int | dt.datetime | None) -> int:
        here = plan.row_of(self._engine, self._topic.id)
        if before is None:
            return here.next_offset
        return min(plan.place_of(self._engine, here, before), here.next_offset)

    def _ranges(self) -> dict[int, int]:
        names = [n for n in self._files.names(self._where) if n.startswith("range=")]
        bounds = (name.removeprefix("range=").split("-") for name in names)
        pairs = sorted((int(start), int(stop)) for start, stop in bounds)
        for (start, end), (begin, stop) in itertools.pairwise(pairs):
            if begin < end:
                raise SourceError(
                    PIPELINE,
                    f"{self._range(start, end)} and {self._range(begin, stop)} have the same "
                    "messages twice: two runs have written at the same time. Remove one of the two",
                )
        return dict(pairs)

    def _left_behind(self, start: int) -> int | None:
        """The end of a range that was completely written, but not recorded."""
        return self._ranges().get(start)

    def _archive(self, start: int, stop: int) -> None:
        final = self._range(start, stop)
        if self._files.exists(final):
            self._check_left_behind(start, stop, final)
            make_durable(final)
            return
        aside = f"{self._where}/_writing/{uuid.uuid4().hex}"
        with self._progress.step(f"offsets {start} to {stop - 1}"):
            written = self._write(start, stop, aside)
            _check(_facts(parquet(self._spark, aside)), written, start, stop, aside)
        if self._lock is not None:
            self._lock.check()  # this process may have been paused
        self._files.rename(aside, final)
        self._files.remove(f"{self._where}/_writing")
        make_durable(final)  # what is recorded may be trimmed

    def _range(self, start: int, stop: int) -> str:
        return f"{self._where}/range={start:020d}-{stop:020d}"

    def _check_left_behind(
        self, start: int, stop: int, where: str, advice: str = MAKE_AGAIN
    ) -> None:
        """Does a range that was not recorded hold what the log has? It may be of another future,
        if the log was restored from a copy."""
        end = self._end(None)
        if stop > end:
            raise SourceError(
                PIPELINE,
                f"{where} holds offsets {start} to {stop - 1}, but topic {self._topic.name!r} ends "
                f"at offset {end}: the log is an older copy. Choose another directory, or remove "
                "that range if what it holds is not to be kept",
            )
        with self._progress.step(f"looking through {where}"):
            there = parquet(self._spark, where).where(f"offset >= {start}")
            _check(_facts(there), _facts(self._frame(start, stop)), start, stop, where, advice)

    def _frame(self, start: int, stop: int) -> DataFrame:
        from exclusivelog.spark.source import read

        return read(
            self._spark,
            self._engine.path,
            self._topic.name,
            self._topic.id,
            start,
            stop,
            self._access,
        )

    def _write(self, start: int, stop: int, to: str) -> Any:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F  # noqa: N812

        seen = Observation("archive")
        frame = self._frame(start, stop).observe(seen, *[F.expr(fact) for fact in FACTS])
        frame = frame.drop("topic").withColumn("date", F.expr(DATE))
        frame.write.option("compression", "zstd").partitionBy("date").parquet(to)
        return seen.get

    def _trim(self, end: int, keep: dt.timedelta) -> None:
        here = plan.row_of(self._engine, self._topic.id)
        old = plan.place_of(self._engine, here, dt.datetime.now(dt.UTC) - keep)
        if min(old, end) > here.first_offset:
            self._check_holds(here.first_offset, min(old, end))
            self._topic.trim(before=min(old, end))
            self._progress.report(f"{self._topic.name}: trimmed before {min(old, end)}")

    def _check_holds(self, first: int, end: int) -> None:
        """Does the archive hold these offsets? The log is about to lose them, and the archive may
        have lost them since they were recorded."""
        held = first
        for start, stop in sorted(self._ranges().items()):
            if start <= held < min(stop, end):
                where = self._range(start, stop)
                with self._progress.step(f"looking through {where}"):
                    found = _facts(parquet(self._spark, where))
                    _check(found, None, start, stop, where, MAKE_ANOTHER)
                held = stop
        if held < end:
            raise SourceError(
                DATA_LOSS,
                f"topic {self._topic.name!r}: offsets {held} to {end - 1} were archived, and are "
                f"not in {self._where} now, so nothing was trimmed. Bring the archive back, or "
                "archive the topic to another directory",
            )


def _facts(frame: DataFrame) -> dict[str, Any]:
    row = frame.selectExpr(*FACTS).first()
    assert row is not None
    return row.asDict()


def _check(
    found: dict[str, Any],
    written: dict[str, Any] | None,
    start: int,
    stop: int,
    where: str,
    advice: str = MAKE_AGAIN,
) -> None:
    dense = (found["n"], found["low"], found["high"]) == (stop - start, start, stop - 1)
    if not dense or (written is not None and found["hash"] != written["hash"]):
        raise SourceError(
            PIPELINE,
            f"{where} does not hold offsets {start} to {stop - 1} as the topic has them. It has "
            f"{found['n']} messages from {found['low']} to {found['high']}. {advice}",
        )
