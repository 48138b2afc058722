"""Check claims about a topic's epochs, for audits and reports."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from exclusivelog.audit.leaders import FOREVER, Change, Changes, Verdict, granted

Record = dict[str, Any]
Epoch = tuple[str, int]  # topic, number

SHOWN = 3  # faults of each kind that a verdict lists


@dataclass
class Span:
    """The messages of one epoch and one producer; `times` has the times of the first and last
    message of each run."""

    epoch: int
    producer: str
    first: int
    last: int
    messages: int = 0
    times: list[int] = field(default_factory=list)


@dataclass
class EpochOwner:
    """The owner of an epoch, and the times (start, end; ms since 1970) at which it held the topic;
    several if it reconnected (rule B5). A grant whose end was not recorded is in `held` only if its
    epoch owns the topic now: the owner may be a job that holds it only while it appends a batch."""

    producer: str
    held: list[tuple[int, int]] = field(default_factory=list)

    def covers(self, time: int) -> bool:
        """Whether it certainly held the topic at that time."""
        return any(start < time < end for start, end in self.held)


@dataclass
class Summary:
    """The summary of a topic, computed from its runs in the order of their offsets."""

    topic: str
    spans: dict[tuple[int, str], Span] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    falls: list[str] = field(default_factory=list)
    gaps: int = 0

    def add(self, run: Record) -> None:
        """Add the next run."""
        key = run["epoch"], run["producer"]
        span = self.spans.get(key)
        if span is None:
            span = self.spans[key] = Span(*key, run["first_offset"], run["last_offset"])
        span.last = max(span.last, run["last_offset"])
        span.messages += run["messages"]
        span.times += [run.get("first_time", 0), run.get("last_time", 0)]
        self.gaps += run["gaps"]
        before = self.sequences.get(run["producer"], -1)
        if run["falls"] or run["first_sequence_id"] <= before:
            self.falls.append(f"{run['producer']} at offset {run['first_offset']}")
        self.sequences[run["producer"]] = run["last_sequence_id"]

    @functools.cached_property
    def epochs(self) -> list[list[Span]]:
        """The spans of each epoch, by epoch."""
        found: dict[int, list[Span]] = {}
        for span in self.spans.values():
            found.setdefault(span.epoch, []).append(span)
        return [found[epoch] for epoch in sorted(found)]

    @property
    def crowded(self) -> set[int]:
        """The epochs under which several producers have written."""
        return {spans[0].epoch for spans in self.epochs if len(spans) > 1}


def verdicts(
    topics: Iterable[str], found: Iterable[Record], changes: Changes, held: Set[Epoch] = frozenset()
) -> list[Verdict]:
    """The verdicts on these topics. `found`: their runs; `changes`: the changes of owner, read
    after the runs; `held`: the epochs that have an owner now (see `owned`)."""
    judged = []
    for summary in _summaries(found, topics):
        about = changes.of.get(summary.topic, [])
        tenures = _tenures(summary.topic, about, held, summary.crowded)
        judged += judge(summary, granted(about), tenures, changes.since(summary.topic))
    return judged


def _summaries(found: Iterable[Record], topics: Iterable[str]) -> list[Summary]:
    summaries = {topic: Summary(topic) for topic in topics}
    for record in found:
        summaries[record["topic"]].add(record)
    return list(summaries.values())


def _tenures(
    topic: str, changes: Iterable[Change], held: Set[Epoch], epochs: Set[int]
) -> dict[int, EpochOwner]:
    """Epoch -> its owner, for these epochs of one topic. A job that appends batches (`once.py`)
    holds the topic only within its transactions, and no release is recorded."""
    found: dict[int, EpochOwner] = {}
    since: dict[int, int] = {}
    for change in changes if epochs else ():
        epoch = change.epoch
        if epoch not in epochs:
            continue
        if change.kind == "grant":
            found.setdefault(epoch, EpochOwner(change.producer))
            since[epoch] = change.time
        elif epoch in since:
            found[epoch].held.append((since.pop(epoch), change.time))
    for epoch in since:
        if (topic, epoch) in held:
            found[epoch].held.append((since[epoch], FOREVER))
    return found


# ---- judging -----------------------------------------------------------------------------


def judge(
    summary: Summary,
    grants: Counter[int],
    tenures: Mapping[int, EpochOwner] | None = None,
    since: int = 0,
) -> list[Verdict]:
    """The verdicts on one topic. The grants of epochs before `since` are no longer recorded.

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
            "one producer in each exclusive epoch": _producers(
                summary, grants, tenures or {}, since
            ),
            "sequence ids rise": (summary.falls, f"{len(summary.sequences)} producers"),
            "every epoch is granted once": _granted(summary, grants, since),
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


def _producers(
    summary: Summary, grants: Counter[int], tenures: Mapping[int, EpochOwner], since: int
) -> Found:
    """Other producers may write in an exclusive epoch after its owner has released the topic, but
    never while the owner holds it."""
    faults, exclusive = [], 0
    for spans in summary.epochs:
        epoch = spans[0].epoch
        if epoch < since or not grants[epoch]:
            continue  # shared producers write in the epoch of the last owner before them
        exclusive += 1
        others = _in_between(spans, tenures.get(epoch))
        if others:
            faults.append(f"epoch {epoch}: {', '.join(sorted(others))} in between")
    return faults, f"{exclusive} exclusive epochs{_unknown(summary, since)}"


def _in_between(spans: Sequence[Span], tenure: EpochOwner | None) -> list[str]:
    """The producers that wrote between messages of the epoch's owner while it held the topic."""
    first = min(spans, key=lambda span: span.first)
    name = first.producer if tenure is None else tenure.producer
    owner = next((span for span in spans if span.producer == name), None)
    if owner is None or owner.last - owner.first + 1 == owner.messages:
        return []
    return [
        span.producer
        for span in spans
        if span is not owner and (tenure is None or any(map(tenure.covers, span.times)))
    ]


def _granted(summary: Summary, grants: Counter[int], since: int) -> Found:
    faults = []
    for spans in summary.epochs:
        epoch = spans[0].epoch
        count = grants[epoch]
        if count > 1 or (count == 0 and epoch > 0 and epoch >= since):
            faults.append(f"epoch {epoch} was granted {count} times")
    return faults, f"{len(grants)} grants{_unknown(summary, since)}"


def _unknown(summary: Summary, since: int) -> str:
    count = sum(0 < spans[0].epoch < since for spans in summary.epochs)
    return f"; {count} epochs are older than the record of owners" if count else ""
