"""Audit: is a log what exclusive access promises? Judged from the messages alone, by Spark.

For each topic: its epochs lie one behind the other and never interleave, offsets are dense,
each exclusive epoch has one producer, sequence ids rise, and every exclusive epoch with
messages was granted once (rules B1, B8, E5, G2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import exclusivelog as xl
from exclusivelog.events import Event
from exclusivelog.spark import NAME
from exclusivelog.spark.errors import coded
from exclusivelog.spark.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Record = dict[str, Any]

COLUMNS = (
    "topic string, epoch bigint, producer string, first_offset bigint, last_offset bigint, "
    "messages bigint, first_sequence_id bigint, last_sequence_id bigint, falls bigint, gaps bigint"
)
TIMES = ("bucket", "first_time", "last_time")
SHOWN = 3  # faults that are named, of each kind


@dataclass(frozen=True)
class Verdict:
    """One claim about a topic, whether it holds, and the facts."""

    topic: str
    claim: str
    holds: bool
    facts: str


@dataclass
class Span:
    """The messages of one epoch and one producer."""

    epoch: int
    producer: str
    first: int
    last: int
    messages: int = 0


@dataclass
class Summary:
    """A topic, summed up from its runs in the order of their offsets."""

    topic: str
    spans: dict[tuple[int, str], Span] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    falls: list[str] = field(default_factory=list)
    gaps: int = 0

    def add(self, run: Record) -> None:
        """Take the next run."""
        key = run["epoch"], run["producer"]
        span = self.spans.get(key)
        if span is None:
            span = self.spans[key] = Span(*key, run["first_offset"], run["last_offset"])
        span.last = max(span.last, run["last_offset"])
        span.messages += run["messages"]
        self.gaps += run["gaps"]
        before = self.sequences.get(run["producer"], -1)
        if run["falls"] or run["first_sequence_id"] <= before:
            self.falls.append(f"{run['producer']} at offset {run['first_offset']}")
        self.sequences[run["producer"]] = run["last_sequence_id"]

    @property
    def epochs(self) -> list[list[Span]]:
        """The spans of each epoch, by epoch."""
        found: dict[int, list[Span]] = {}
        for span in self.spans.values():
            found.setdefault(span.epoch, []).append(span)
        return [found[epoch] for epoch in sorted(found)]


def run(
    spark: SparkSession, ledger: str, topics: Sequence[str] | None = None, *,
    out: TextIO | None = None,
) -> list[Verdict]:  # fmt: skip
    """Judge topics (None: all); a verdict for each claim about each topic."""
    progress = Progress(spark, out)
    with coded(), xl.open(ledger, "audit", readonly=True) as engine:
        names = engine.topics() if topics is None else list(topics)
        with progress.step(f"reading {len(names)} topics"):
            found = runs(spark, engine.path, names)
        return verdicts(names, found, engine.history())  # of leaders that came meanwhile, too


def verdicts(
    topics: Iterable[str], found: Iterable[Record], events: Iterable[Event]
) -> list[Verdict]:
    """Every claim about each of these topics, judged by its `runs`; the events were read after
    them."""
    grants = _grants(events)
    return [verdict for one in _summaries(found, topics) for verdict in judge(one, grants)]


def runs(
    spark: SparkSession, ledger: str, topics: Sequence[str], columns: str = COLUMNS,
    bucket_ms: int = 0,
) -> list[Record]:  # fmt: skip
    """The view `runs` of some topics, in the order of offsets; times in ms since 1970."""
    from pyspark.sql.functions import expr

    from exclusivelog.spark import register

    register(spark)
    if not topics:
        return []
    reader = spark.read.schema(columns).format(NAME).option("view", "runs")
    # One job for all of them; in a list, a name could not have a comma.
    reader = reader.option("topicsPattern", "|".join(map(re.escape, topics)))
    if bucket_ms:
        reader = reader.option("bucketMs", str(bucket_ms))
    frame = reader.load(ledger)
    for name in TIMES:
        if name in frame.columns:  # Spark's rows have naive times, of this machine's zone
            frame = frame.withColumn(name, expr(f"unix_millis({name})"))
    found = [row.asDict() for row in frame.collect()]
    return sorted(found, key=lambda run: (run["topic"], run["first_offset"]))


def _summaries(found: Iterable[Record], topics: Iterable[str]) -> list[Summary]:
    summaries = {topic: Summary(topic) for topic in topics}
    for record in found:
        summaries[record["topic"]].add(record)
    return list(summaries.values())


def _grants(events: Iterable[Event]) -> Counter[tuple[str, int]]:
    """(topic, epoch) -> how often it was granted, not counting who only came back."""
    return Counter(
        (event.topic, event.epoch)
        for event in events
        if event.kind == "grant" and event.reason != "reconnect"
    )


# ---- judging -----------------------------------------------------------------------------


def judge(summary: Summary, grants: Counter[tuple[str, int]]) -> list[Verdict]:
    """Every claim about one topic.

    >>> summary = Summary("orders")
    >>> summary.add(dict(epoch=1, producer="a", first_offset=0, last_offset=4, messages=5,
    ...                  first_sequence_id=0, last_sequence_id=4, falls=0, gaps=0))
    >>> summary.add(dict(epoch=2, producer="b", first_offset=3, last_offset=9, messages=5,
    ...                  first_sequence_id=0, last_sequence_id=4, falls=0, gaps=0))
    >>> [verdict.claim for verdict in judge(summary, Counter()) if not verdict.holds]
    ['epochs never interleave', 'every epoch is granted once']
    """
    return [
        Verdict(summary.topic, claim, not faults, "; ".join(faults[:SHOWN]) or facts)
        for claim, (faults, facts) in {
            "epochs never interleave": _interleaving(summary),
            "offsets are dense": _density(summary),
            "one producer in each exclusive epoch": _producers(summary, grants),
            "sequence ids rise": (summary.falls, f"{len(summary.sequences)} producers"),
            "every epoch is granted once": _granted(summary, grants),
        }.items()
    ]


Found = tuple[list[str], str]


def _interleaving(summary: Summary) -> Found:
    faults, end, before = [], -1, None
    for spans in summary.epochs:
        first, epoch = min(span.first for span in spans), spans[0].epoch
        if first <= end:
            faults.append(f"epoch {epoch} begins at offset {first}, within epoch {before}")
        end, before = max(end, *(span.last for span in spans)), epoch
    return faults, f"{len(summary.epochs)} epochs"


def _density(summary: Summary) -> Found:
    spans = list(summary.spans.values())
    if not spans:
        return [], "0 messages"
    first, last = min(span.first for span in spans), max(span.last for span in spans)
    count = sum(span.messages for span in spans)
    faults = [] if last - first + 1 == count else [f"{count} messages from {first} to {last}"]
    if summary.gaps:
        faults.append(f"{summary.gaps} offsets do not follow the one before")
    return faults, f"{count:,} messages from {first} to {last}"


def _producers(summary: Summary, grants: Counter[tuple[str, int]]) -> Found:
    """Others may share an exclusive epoch once its owner has left: never in between."""
    faults, exclusive = [], 0
    for spans in summary.epochs:
        epoch = spans[0].epoch
        if not grants[summary.topic, epoch]:
            continue  # shared producers write under the epoch that was there before them
        exclusive += 1
        owner = min(spans, key=lambda span: span.first)
        if owner.last - owner.first + 1 != owner.messages:
            others = sorted(span.producer for span in spans if span is not owner)
            faults.append(f"epoch {epoch} of {owner.producer}: {', '.join(others)} in between")
    return faults, f"{exclusive} exclusive epochs"


def _granted(summary: Summary, grants: Counter[tuple[str, int]]) -> Found:
    faults = []
    for spans in summary.epochs:
        epoch = spans[0].epoch
        count = grants[summary.topic, epoch]
        if count > 1 or (count == 0 and epoch > 0):
            faults.append(f"epoch {epoch} was granted {count} times")
    return faults, f"{sum(1 for topic, _ in grants if topic == summary.topic)} grants"
