"""Report: who led when, what each failover cost, and where the load went, as one HTML page.

Leaders come from `__events__`, messages and load from the topics themselves (view `runs`);
`leaders.py` adds them up, and `page.py` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import exclusivelog as xl
from exclusivelog.spark import audit
from exclusivelog.spark.audit import runs
from exclusivelog.spark.errors import PIPELINE, SourceError, coded
from exclusivelog.spark.leaders import Record, Told, bucket_of, story_of
from exclusivelog.spark.page import page
from exclusivelog.spark.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = audit.COLUMNS + ", bucket timestamp"


def run(
    spark: SparkSession, ledger: str, to: str, topics: Sequence[str] | None = None, *,
    out: TextIO | None = None,
) -> Told:  # fmt: skip
    """Write the report about some topics (None: all) to the file `to`.

    The page needs nothing else: pictures are in it, and it loads nothing.

    Raises SourceError: PIPELINE where the file cannot be written.
    """
    progress = Progress(spark, out)
    with coded(), xl.open(ledger, "report", readonly=True) as engine:
        names = audit.names_of(engine, topics)
        with progress.step(f"reading {len(names)} topics"):
            buckets, found = _runs(spark, engine, names)
            events = list(engine.history())
        stories = [story_of(name, buckets[name], found, events) for name in names]
        verdicts = audit.verdicts(names, found, events, audit.owned(engine, names))
        path = engine.path
    stories.sort(key=lambda story: -story.messages)
    silences = [t.silence for s in stories for t in s.take_overs if t.silence is not None]
    told = Told(path, stories, verdicts, silences)
    try:
        Path(to).write_text(page(told), encoding="utf-8")
    except OSError as error:
        raise SourceError(PIPELINE, f"the report cannot be written to {to}: {error}") from error
    progress.say(f"the report is {Path(to).resolve()}")
    return told


def _runs(
    spark: SparkSession, engine: xl.Engine, topics: Sequence[str]
) -> tuple[dict[str, int], list[Record]]:
    """Topic -> how long its buckets are, in ms; and the runs of all topics."""
    buckets = {topic: bucket_of(_span(engine, topic)) for topic in topics}
    found: list[Record] = []
    for length in set(buckets.values()):
        some = [topic for topic in topics if buckets[topic] == length]
        found += runs(spark, engine.path, some, COLUMNS, length)
    return buckets, found


def _span(engine: xl.Engine, topic: str) -> int:
    from exclusivelog.spark.views import records  # it needs pyspark, which may be missing

    epochs = list(records(engine, "epochs", [topic]))
    first = min((epoch["first_time"] for epoch in epochs), default=0)
    return int(max((epoch["last_time"] for epoch in epochs), default=0) - first) // 1000
