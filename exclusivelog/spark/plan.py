"""Which offsets are read, and how they are shared out: decisions about topics, no Spark.

A Python task costs 20 to 40 ms before its first row: few, large partitions are best, and as many
for each core.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exclusivelog import _core
from exclusivelog.engine import Engine
from exclusivelog.errors import TopicNotFoundError
from exclusivelog.log import offset_at_time
from exclusivelog.producer import to_ms
from exclusivelog.segments import REFERENCE, is_reference
from exclusivelog.spark.errors import DATA_LOSS, SourceError
from exclusivelog.spark.options import EARLIEST, LATEST, Bounds, ReadOptions, Where
from exclusivelog.tables import Tables
from exclusivelog.topic import existing

# Less is not worth a partition of its own; more is too much to be read again by a second attempt.
LEAST_MESSAGES, LEAST_BYTES = 200_000, 32 << 20
MOST_MESSAGES, MOST_BYTES = 2_500_000, 256 << 20
SAMPLES = 8

Offsets = dict[str, int]
# Of a stream, as its checkpoint keeps it: {topic: next offset}, and the topics' ids besides.
# One that was deleted and made anew has the same name, and offsets of its own.
Position = dict[str, Any]
IDS = ""  # where they are: no topic has this name


@dataclass(frozen=True)
class Span:
    """The messages of a topic from `start` up to, not with, `end`. `id` is the topic's; None:
    whichever has the name."""

    topic: str
    start: int
    end: int
    id: int | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """How many messages."""
        return self.end - self.start


# ---- topics ------------------------------------------------------------------------------


def topics(engine: Engine, options: ReadOptions) -> list[str]:
    """The topics that the options name, or match."""
    if options.names is not None:
        return list(options.names)
    return [name for name in engine.topics() if re.fullmatch(options.pattern, name)]


def row(engine: Engine, topic: str) -> _core.TopicRow:
    """The topic's row as it is now; TopicNotFoundError where there is none."""
    number = engine.topic(topic, create=False).id
    return engine.look(lambda tables: existing_latest(tables, number))


def rows(engine: Engine, options: ReadOptions) -> dict[str, _core.TopicRow]:
    """The rows of the topics that the options name, or match."""
    found = {}
    for topic in topics(engine, options):
        try:
            found[topic] = row(engine, topic)
        except TopicNotFoundError:
            if options.names is not None:  # one that matches may be deleted meanwhile
                raise
    return found


# ---- a batch: from here to there ---------------------------------------------------------


def spans(engine: Engine, options: ReadOptions) -> list[Span]:
    """What a batch reads. Raises SourceError for offsets that are not there, unless
    failOnDataLoss is false: then what is there of them."""
    found = []
    for topic, here in rows(engine, options).items():
        start = _resolve(engine, here, options.start, options.fail_on_data_loss)
        end = _resolve(engine, here, options.end, options.fail_on_data_loss)
        found.append(Span(topic, start, max(start, end), here.id))
    return found


def _resolve(engine: Engine, here: _core.TopicRow, bounds: Bounds, strict: bool) -> int:
    place = bounds.of(here.name)
    offset = place_of(engine, here, place)
    if not isinstance(place, int):
        return offset
    return check_there(here, offset, strict)


def place_of(engine: Engine, here: _core.TopicRow, place: Where) -> int:
    """The offset that "earliest", "latest", a time or an offset means now."""
    if place == EARLIEST:
        return here.first_offset
    if place == LATEST:
        return here.next_offset
    if isinstance(place, dt.datetime):
        time = to_ms(place)
        return engine.look(
            lambda tables: offset_at_time(tables, existing_latest(tables, here.id), time)
        )
    assert isinstance(place, int)
    return place


def existing_latest(tables: Tables, topic: int) -> _core.TopicRow:
    """The row with what the journal has, of a topic that was not deleted."""
    existing(tables, topic)
    return tables.latest(topic)


def check_there(here: _core.TopicRow, offset: int, strict: bool) -> int:
    """The offset, if it is between the topic's first and its next one; else an error, or the
    nearest one that is."""
    nearest = min(max(offset, here.first_offset), here.next_offset)
    if strict and nearest != offset:
        gone = "was trimmed" if offset < here.first_offset else "is not there yet"
        raise SourceError(
            DATA_LOSS,
            f"topic {here.name!r} has offsets {here.first_offset} to {here.next_offset - 1}; "
            f"{offset} {gone}, or the topic was made anew. failOnDataLoss=false reads what there "
            "is",
        )
    return nearest


# ---- a stream: as far as the limit allows ------------------------------------------------


def starts(engine: Engine, options: ReadOptions) -> Position:
    """Where a new stream begins."""
    found = rows(engine, options)
    strict = options.fail_on_data_loss
    offsets = {
        topic: _resolve(engine, here, options.start, strict) for topic, here in found.items()
    }
    return {**offsets, IDS: {topic: here.id for topic, here in found.items()}}


def ends(engine: Engine, options: ReadOptions) -> Position:
    """Where the topics end now."""
    found = rows(engine, options)
    offsets = {topic: here.next_offset for topic, here in found.items()}
    return {**offsets, IDS: {topic: here.id for topic, here in found.items()}}


def split(position: Mapping[str, Any]) -> tuple[Offsets, dict[str, int]]:
    """The offsets of a position, and the ids of its topics as far as they are known.

    >>> split({"a": 3, "": {"a": 1}}), split({"a": 3})
    (({'a': 3}, {'a': 1}), ({'a': 3}, {}))
    """
    offsets = {topic: offset for topic, offset in position.items() if topic != IDS}
    return offsets, dict(position.get(IDS, {}))


def goes_on(
    engine: Engine, options: ReadOptions, start: Mapping[str, Any], available: Position
) -> Offsets:
    """Where the next micro-batch begins in each topic: behind what was read, if that is there."""
    offsets, ids = split(start)
    wanted, _ = split(available)
    gone = offsets.keys() - wanted.keys()
    if gone and options.fail_on_data_loss:
        raise SourceError(
            DATA_LOSS,
            f"topic {min(gone)!r} was deleted, perhaps with messages that were not read. "
            "failOnDataLoss=false goes on without it",
        )
    found = {}
    for topic, end in wanted.items():
        first = _first(engine, topic)
        begin = offsets.get(topic, first)
        anew = ids.get(topic) not in (None, available[IDS].get(topic))
        found[topic] = first if anew or begin > end else max(begin, first)
    return found


def _first(engine: Engine, topic: str) -> int:
    try:
        return int(row(engine, topic).first_offset)
    except TopicNotFoundError:  # meanwhile
        return 0


def limited(start: Mapping[str, int], available: Offsets, most: int) -> Offsets:
    """At most `most` messages from `start` on, shared out by what each topic has.

    >>> limited({"a": 0, "b": 10}, {"a": 90, "b": 20}, 10), limited({"a": 5}, {"a": 8}, 10)
    ({'a': 9, 'b': 11}, {'a': 8})
    """
    waiting = {topic: max(0, end - start.get(topic, 0)) for topic, end in available.items()}
    if sum(waiting.values()) <= most:
        return dict(available)
    shares = _shares(waiting, most)
    return {
        topic: start.get(topic, 0) + shares[topic] if count else available[topic]
        for topic, count in waiting.items()
    }


def _shares(waiting: Offsets, most: int) -> Offsets:
    total, seen, shares = sum(waiting.values()), 0, {}
    for topic, count in waiting.items():
        before, seen = seen, seen + count
        # What is rounded off goes to the next one.
        shares[topic] = most * seen // total - most * before // total
    for topic, count in waiting.items():  # nobody waits for another one to run dry
        richest = max(shares, key=lambda name: shares[name])
        if count and not shares[topic] and shares[richest] > 1:
            shares[topic], shares[richest] = 1, shares[richest] - 1
    return shares


def limited_bytes(
    engine: Engine, start: Mapping[str, int], available: Offsets, most: int
) -> Offsets:
    """As `limited`, for about so many bytes as the ledger keeps them: whole entries, at least
    one of each topic."""
    found = dict(available)
    waiting = [topic for topic, end in available.items() if end > start.get(topic, 0)]
    for index, topic in enumerate(waiting):
        share = most // (len(waiting) - index)  # what one leaves goes to those behind it
        found[topic], used = _within_bytes(
            engine, topic, start.get(topic, 0), available[topic], share
        )
        most = max(0, most - used)
    return found


def _within_bytes(engine: Engine, topic: str, start: int, end: int, most: int) -> tuple[int, int]:
    number = row(engine, topic).id

    def look(tables: Tables) -> tuple[int, int]:
        size = 0
        for last, data in tables.entries(number, start):
            size += entry_bytes(data)
            if size >= most or last + 1 >= end:
                return min(last + 1, end), size
        return end, size

    return engine.look(look)


def entry_bytes(data: bytes) -> int:
    """How long the entry is that a row of the ledger is, or refers to."""
    return int(REFERENCE.unpack(data)[3]) if is_reference(data) else len(data)


def steps(
    engine: Engine, options: ReadOptions, start: Mapping[str, Any], end: Mapping[str, Any]
) -> list[Span]:
    """What a micro-batch reads. A topic that came later is read from its first message on."""
    (begins, before), (stops, planned) = split(start), split(end)
    found = []
    for topic, stop in stops.items():
        anew = before.get(topic, planned.get(topic)) != planned.get(topic)
        if begins.get(topic) == stop and not anew:
            continue
        try:
            here = _planned_for(engine, topic, planned.get(topic))
        except (TopicNotFoundError, SourceError):
            if options.fail_on_data_loss:
                raise
            continue
        begin = begins.get(topic, here.first_offset)
        found.append(_step(here, begin, stop, anew, options.fail_on_data_loss))
    return [span for span in found if span.count]


def _planned_for(engine: Engine, topic: str, number: int | None) -> _core.TopicRow:
    here = row(engine, topic)
    if number not in (None, here.id):
        raise made_anew(topic)
    return here


def made_anew(topic: str) -> SourceError:
    """What was to be read of the topic is gone."""
    return SourceError(
        DATA_LOSS,
        f"topic {topic!r} was deleted and made anew, perhaps with messages that were not read. "
        "failOnDataLoss=false goes on with what there is",
    )


def _step(here: _core.TopicRow, begin: int, stop: int, anew: bool, strict: bool) -> Span:
    if anew and strict:
        raise made_anew(here.name)
    if anew or begin > stop:
        check_there(here, begin, strict)
        begin = here.first_offset
    begin = check_there(here, begin, strict)
    stop = check_there(here, stop, strict)
    return Span(here.name, begin, max(begin, stop), here.id)


# ---- partitions --------------------------------------------------------------------------


def share_out(engine: Engine, options: ReadOptions, wanted: Iterable[Span]) -> list[Span]:
    """The spans, cut into partitions, in the order of topics and offsets."""
    spans = [span for span in wanted if span.count]
    if not spans:
        return []
    least, lanes = -(-options.min_partitions // len(spans)), -(-cores() // len(spans))
    return [piece for span in spans for piece in cut(span, max(least, pieces(engine, span, lanes)))]


def cores() -> int:
    """How many tasks this machine can run at once. The executors are on it, too."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pieces(engine: Engine, span: Span, lanes: int) -> int:
    """How many partitions a span is worth, of which `lanes` can be read at once."""
    size = int(span.count * _message_bytes(engine, span))
    worth = max(-(-span.count // LEAST_MESSAGES), -(-size // LEAST_BYTES))
    if worth <= lanes:
        return worth
    needed = max(-(-span.count // MOST_MESSAGES), -(-size // MOST_BYTES))
    return -(-needed // lanes) * lanes  # no lane is to be idle while the last ones are read


def _message_bytes(engine: Engine, span: Span) -> float:
    """About how long a message is, as the ledger keeps it: of a few entries here and there."""
    number = row(engine, span.topic).id

    def look(tables: Tables) -> float:
        size = count = 0
        for index in range(SAMPLES):
            at = span.start + index * span.count // SAMPLES
            before = at
            for last, data in tables.entries(number, at):
                size += entry_bytes(data)
                count += last + 1 - before
                break
        return size / count if count else 0.0

    return engine.look(look)


def cut(span: Span, count: int) -> Iterator[Span]:
    """The span in `count` pieces of about the same length; fewer if it has fewer messages.

    >>> [(piece.start, piece.end) for piece in cut(Span("a", 10, 20), 3)]
    [(10, 13), (13, 16), (16, 20)]
    """
    count = min(count, span.count)
    for index in range(count):
        start = span.start + index * span.count // count
        end = span.start + (index + 1) * span.count // count
        yield replace(span, start=start, end=end)
