"""Tenures of leaders, costs of failovers, and load.

Computed from the messages, and from the changes of ownership in `__events__`, in a form that is
fast enough for a million of them.
"""

from __future__ import annotations

import functools
import io
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

from exclusivelog.events import RESTORED, Event, Party

KINDS = ("grant", "release", "evict", RESTORED)
FOREVER = 2**63


class Change(NamedTuple):
    """A grant, the end of one, or the restoring of the topic. `producer`, `engine` (its name) and
    `pid` are those of the owner."""

    time: int
    topic: str
    epoch: int
    kind: str
    reason: str
    producer: str
    engine: str
    pid: int

    @classmethod
    def of(cls, event: Event) -> Change:
        """Make it from an event."""
        party: Party = (event.target if event.kind == "grant" else event.source) or {}
        return cls(
            event.time,
            event.topic,
            event.epoch,
            event.kind,
            event.reason,
            party.get("producer") or "?",
            party.get("engine_name") or "",
            party.get("pid") or 0,
        )


@dataclass
class Changes:
    """The changes of each topic, in order. `complete`: none was removed since the ledger was
    created."""

    complete: bool = True
    of: dict[str, list[Change]] = field(default_factory=dict)

    def add(self, changes: Iterable[Change]) -> Changes:
        """Add changes."""
        for change in changes:
            self.of.setdefault(change.topic, []).append(change)
        return self

    def since(self, topic: str) -> int:
        """The grants of this topic's epochs before this one are not recorded (rule E5): the record
        has lost its beginning, or the topic was restored from copies.

        >>> Changes(complete=False).add([Change(5, "orders", 7, "grant", "", "a", "e", 1)]).since(
        ...     "orders"
        ... )
        7
        """
        about = self.of.get(topic, [])
        known = 0 if self.complete else min(granted(about), default=FOREVER)
        return max((c.epoch + 1 for c in about if c.kind == RESTORED), default=known)


def granted(changes: Iterable[Change]) -> Counter[int]:
    """Epoch -> the number of its grants, without reconnects."""
    return Counter(
        change.epoch
        for change in changes
        if change.kind == "grant" and change.reason != "reconnect"
    )


def parsed(values: Sequence[bytes]) -> Iterable[Change]:
    """The changes of stored events, without a Python object for each field of each event: creating
    these would take most of the time."""
    try:
        return list(_columns(values))
    except (ImportError, ValueError):  # no pyarrow; names with lone surrogates, which JSON allows
        return list(changes_of(map(Event.loads, values)))


def changes_of(events: Iterable[Event]) -> Iterator[Change]:
    """The changes of those events that concern topics."""
    return (Change.of(event) for event in events if event.topic and event.kind in KINDS)


def _columns(values: Sequence[bytes]) -> Iterator[Change]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    party = pa.struct(
        [("producer", pa.string()), ("engine_name", pa.string()), ("pid", pa.int64())]
    )
    text, number = pa.string(), pa.int64()
    schema = pa.schema(
        [
            ("time", number),
            ("topic", text),
            ("epoch", number),
            ("kind", text),
            ("reason", text),
            ("from", party),
            ("to", party),
        ]
    )
    data = b"\n".join(values)
    table = pj.read_json(
        io.BytesIO(data),
        pj.ReadOptions(block_size=len(data) + 1),
        pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    granted = pc.equal(table["kind"], "grant")

    def of_party(name: str, default: Any) -> Any:
        sides = [pc.struct_field(table[side], name) for side in ("to", "from")]
        return pc.fill_null(pc.if_else(granted, *sides), default)

    wanted = pc.and_(
        pc.is_in(table["kind"], pa.array(KINDS)), pc.not_equal(table["topic"], "")
    ).to_pylist()
    columns = [
        table["time"].to_pylist(),
        _strings(table["topic"]),
        table["epoch"].to_pylist(),
        _strings(table["kind"]),
        _strings(table["reason"]),
        _strings(of_party("producer", "?")),
        _strings(of_party("engine_name", "")),
        of_party("pid", 0).to_pylist(),
    ]
    return map(Change._make, compress(zip(*columns, strict=True), wanted))


def _strings(column: Any) -> list[str]:
    """The strings of a column; equal values are the same object."""
    found = column.combine_chunks().dictionary_encode()
    names = found.dictionary.to_pylist()
    return [names[index] for index in found.indices.to_pylist()]


Record = dict[str, Any]

BUCKETS_MS = (
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 900_000,
    3_600_000, 21_600_000, 86_400_000,
)  # fmt: skip
MOST_BUCKETS = 400
SHARED = "shared producers"
UNRECORDED = "not recorded"  # the engine of an owner whose grant is no longer recorded
SUPERSEDED, LOST = "superseded", "lost"
CRASH, UNRESPONSIVE = "dead", "hung"  # why a leader ended: its process is dead, or did not answer
FAILURES = (CRASH, UNRESPONSIVE)


@dataclass(slots=True)
class Tenure:
    """The tenure of one leader. Times are in ms since 1970; `end` None: it still leads.

    `why`: the reason for its end: closed, dead, hung, fenced, hand-over, superseded (the leader
    was a job that appends batches, and another one took the topic between two batches), or lost
    (no end is recorded, and it does not lead; `end` is the time of its last message).
    """

    epoch: int
    producer: str
    engine: str
    pid: int
    start: int
    end: int | None = None
    why: str = ""
    messages: int = 0
    first_message: int | None = None
    last_message: int | None = None

    @property
    def rate(self) -> float | None:
        """Messages per second between its first and last message; None if there are too few."""
        if self.first_message is None or self.last_message is None:
            return None
        lasted = self.last_message - self.first_message
        return self.messages * 1000 / lasted if lasted else None


class TakeOver(NamedTuple):
    """A change from one leader to the next. `last_message`: the time of the last message before it,
    from any producer."""

    before: Tenure
    after: Tenure
    last_message: int | None

    @property
    def at(self) -> int:
        """The time at which the next leader began."""
        return self.after.start

    @property
    def why(self) -> str:
        """The reason for the end of the former leader."""
        return self.before.why

    @property
    def leaderless(self) -> int | None:
        """ms from the end of one leader to the beginning of the next."""
        return None if self.before.end is None else max(0, self.after.start - self.before.end)

    @property
    def silence(self) -> int | None:
        """ms from the last message before the change to the first message of the next leader; None
        if it sent none."""
        last, first = self.last_message, self.after.first_message
        return None if last is None or first is None else max(0, first - last)


@dataclass
class Story:
    """The history of one topic.

    - `tenures`: of its leaders; `shared`: of its shared producers (engine: `SHARED`), and of owners
      whose grants are no longer recorded (engine: `UNRECORDED`).
    - `load`: engine -> {start of a bucket: messages}.
    - `pauses`: (from, to; in ms) without a message that are longer than two buckets.
    """

    topic: str
    tenures: list[Tenure]
    messages: int = 0
    bucket_ms: int = 1000
    load: dict[str, dict[int, int]] = field(default_factory=dict)
    shared: list[Tenure] = field(default_factory=list)
    pauses: list[tuple[int, int]] = field(default_factory=list)

    @functools.cached_property
    def take_overs(self) -> list[TakeOver]:
        """Every change from one leader to another."""
        found, last = [], None
        shared: dict[int, int] = {}  # they write in the epoch of the last owner before them
        for tenure in self.shared:
            time = tenure.last_message or 0
            shared[tenure.epoch] = max(time, shared.get(tenure.epoch, time))
        for before, after in itertools.pairwise(self.tenures):
            last = before.last_message or last  # a leader may have died before its first one
            if before.epoch != after.epoch and before.epoch in shared:
                last = max(shared[before.epoch], last or 0)
            found.append(TakeOver(before, after, last))
        return found

    @property
    def crashes(self) -> int:
        """How many leaders crashed, and had a successor."""
        return sum(t.why == CRASH for t in self.take_overs)

    @property
    def unresponsive(self) -> int:
        """How many leaders became unresponsive, and had a successor: they may have gone on."""
        return sum(t.why == UNRESPONSIVE for t in self.take_overs)

    @property
    def span(self) -> tuple[int, int]:
        """From the first moment to the last one, in ms."""
        parts = [*self.tenures, *self.shared]
        last = [time for t in parts for time in (t.end, t.last_message) if time is not None]
        starts = [t.start for t in parts]
        return (min(starts), max(starts + last)) if parts else (0, 1)


@dataclass(frozen=True)
class Verdict:
    """One claim about a topic, whether it holds, and the facts."""

    topic: str
    claim: str
    holds: bool
    facts: str


@dataclass(frozen=True)
class LeaderReport:
    """The content of a report. `silences`: those of all take-overs of all topics, in ms."""

    path: str
    stories: list[Story]
    verdicts: list[Verdict]
    silences: list[int]


def stories_of(
    buckets: Mapping[str, int],
    found: Iterable[Record],
    changes: Changes,
    held: Set[tuple[str, int]] = frozenset(),
) -> list[Story]:
    """The stories of the topics, those with the most messages first. `buckets`:
    {topic: their length in ms}; `held`: the epochs that have an owner now (see `owned`)."""
    records: dict[str, list[Record]] = {name: [] for name in buckets}
    for record in found:
        records[record["topic"]].append(record)
    stories = []
    for name, length in buckets.items():
        story = Story(name, tenures(changes.of.get(name, [])), bucket_ms=length)
        _add_messages(story, records[name], changes.since(name))
        _end_lost(story, {epoch for topic, epoch in held if topic == name})
        stories.append(story)
    return sorted(stories, key=lambda story: (-story.messages, -len(story.tenures), story.topic))


def bucket_of(span_ms: int) -> int:
    """The length of a bucket (ms) for a chart of the load over `span_ms`.

    >>> bucket_of(0), bucket_of(12_000), bucket_of(86_400_000)
    (10, 50, 300000)
    """
    return next((ms for ms in BUCKETS_MS if span_ms / ms <= MOST_BUCKETS), BUCKETS_MS[-1])


def tenures(changes: Iterable[Change]) -> list[Tenure]:
    """The tenures of a topic's leaders, in order.

    >>> grant = Change(5, "orders", 1, "grant", "request", "a", "e", 1)
    >>> evict = Change(9, "orders", 1, "evict", "dead", "a", "e", 1)
    >>> [(tenure.start, tenure.end, tenure.why) for tenure in tenures([grant, evict])]
    [(5, 9, 'dead')]
    """
    found: list[Tenure] = []
    leads: Tenure | None = None
    for time, _, epoch, kind, reason, producer, engine, pid in changes:
        if leads is not None:
            leads.end = max(leads.start, time)  # a clock may have been set back
            leads.why = SUPERSEDED if kind == "grant" else reason
            leads = None
        if kind == "grant":
            leads = Tenure(epoch, producer, engine, pid, time)
            found.append(leads)
    return found


def _end_lost(story: Story, held: Set[int]) -> None:
    """End the last tenure if its leader leads no more: it was killed, and has no successor yet, or
    it is a job that appends batches."""
    last = story.tenures[-1] if story.tenures else None
    if last is not None and last.end is None and last.epoch not in held:
        last.end, last.why = max(last.start, last.last_message or 0), LOST


def _add_messages(story: Story, found: Sequence[Record], since: int) -> None:
    led = {(t.epoch, t.producer): t for t in story.tenures} if found else {}
    shared: dict[tuple[int, str], Tenure] = {}
    for record in found:
        key = record["epoch"], record["producer"]
        first, last = record["first_time"], record["last_time"]
        tenure = led.get(key) or shared.get(key)
        if tenure is None:
            engine = UNRECORDED if 0 < key[0] < since else SHARED
            tenure = shared[key] = Tenure(*key, engine, 0, first)
        tenure.messages += record["messages"]
        tenure.first_message = min(first, tenure.first_message or first)
        tenure.last_message = max(last, tenure.last_message or last)
        if key in shared:
            tenure.end = tenure.last_message
        story.messages += record["messages"]
        buckets = story.load.setdefault(tenure.engine, Counter())
        buckets[record["bucket"]] += record["messages"]
    story.shared = list(shared.values())
    story.pauses = _pauses(found, 2 * story.bucket_ms)


def _pauses(found: Sequence[Record], least: int) -> list[tuple[int, int]]:
    pauses, end = [], None
    for first, last in sorted((record["first_time"], record["last_time"]) for record in found):
        if end is not None and first - end >= least:
            pauses.append((end, first))
        end = last if end is None else max(end, last)
    return pauses


def median(numbers: Sequence[int]) -> float:
    """The median; 0 if there are no numbers."""
    return statistics.median(numbers) if numbers else 0.0
