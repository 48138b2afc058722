"""Report: who led when, what each failover cost, and where the load went, as one HTML page.

Leaders come from `__events__`, messages and load from the topics themselves (view `runs`);
`exclusivelog.audit` adds them up, and draws the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import exclusivelog as xl
from exclusivelog.audit import write_page
from exclusivelog.audit.leaders import LeaderReport, Record
from exclusivelog.foreign import is_foreign
from exclusivelog.spark.errors import PIPELINE, SourceError, coded
from exclusivelog.spark.pipelines import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession,
    ledger: str,
    to: str,
    topics: Sequence[str] | None = None,
    *,
    out: TextIO | None = None,
) -> LeaderReport:
    """Write the report about some topics (None: all) to the file `to`.

    The page needs nothing else: pictures are in it, and it loads nothing.

    Raises SourceError: PIPELINE where the file cannot be written.
    """
    progress = Progress(spark, out)
    with coded(), xl.open(ledger, "report", readonly=True) as engine:

        def read(buckets: Mapping[str, int]) -> dict[str, list[Record]]:
            with progress.step(f"reading {len(buckets)} topics"):
                return _runs(spark, engine.path, buckets)

        try:
            told = write_page(engine, to, topics, read)
        except OSError as error:
            if isinstance(error, xl.ExclusiveLogError) or is_foreign(error):
                raise
            raise SourceError(PIPELINE, f"the report cannot be written to {to}: {error}") from error
    progress.report(f"the report is {Path(to).resolve()}")
    return told


def _runs(spark: SparkSession, path: str, buckets: Mapping[str, int]) -> dict[str, list[Record]]:
    from exclusivelog.spark import source

    found: dict[str, list[Record]] = {topic: [] for topic in buckets}
    for length in set(buckets.values()):
        some = [topic for topic in buckets if buckets[topic] == length]
        schema = source.RUNS + ", bucket timestamp_ltz"
        for run in source.runs(spark, path, some, schema, length):
            found[run["topic"]].append(run)
    return found
