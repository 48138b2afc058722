"""Which offsets are read, and how they are shared out: decisions about topics, no Spark.

A Python task costs 20 to 40 ms before its first row: few, large partitions are best.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from exclusivelog import _core
from exclusivelog.engine import Engine
from exclusivelog.log import offset_at_time
from exclusivelog.producer import to_ms
from exclusivelog.segments import REFERENCE, is_reference
from exclusivelog.spark.errors import DATA_LOSS, SourceError
from exclusivelog.spark.options import EARLIEST, LATEST, Bounds, ReadOptions, Where
from exclusivelog.tables import Tables
from exclusivelog.topic import existing

PARTITION_MESSAGES, PARTITION_BYTES = 500_000, 64 << 20
ALONE = 100_000  # messages that are not worth a second partition
SAMPLES = 8

Offsets = dict[str, int]


@dataclass(frozen=True)
class Span:
    """The messages of a topic from `start` up to, not with, `end`."""

    topic: str
    start: int
    end: int

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
    return engine.latest(engine.topic(topic, create=False).id)


# ---- a batch: from here to there ---------------------------------------------------------


def spans(engine: Engine, options: ReadOptions) -> list[Span]:
    """What a batch reads. Raises SourceError for offsets that are not there, unless
    failOnDataLoss is false: then what is there of them."""
    found = []
    for topic in topics(engine, options):
        start = _resolve(engine, topic, options.start, options.fail_on_data_loss)
        end = _resolve(engine, topic, options.end, options.fail_on_data_loss)
        found.append(Span(topic, start, max(start, end)))
    return found


def _resolve(engine: Engine, topic: str, bounds: Bounds, strict: bool) -> int:
    here, place = row(engine, topic), bounds.of(topic)
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


def starts(engine: Engine, options: ReadOptions) -> Offsets:
    """Where a new stream begins."""
    return {
        topic: _resolve(engine, topic, options.start, options.fail_on_data_loss)
        for topic in topics(engine, options)
    }


def ends(engine: Engine, options: ReadOptions) -> Offsets:
    """Where the topics end now."""
    return {topic: row(engine, topic).next_offset for topic in topics(engine, options)}


def limited(start: Mapping[str, int], available: Offsets, most: int) -> Offsets:
    """At most `most` messages from `start` on, shared out by what each topic has.

    >>> limited({"a": 0, "b": 10}, {"a": 90, "b": 20}, 10), limited({"a": 5}, {"a": 8}, 10)
    ({'a': 9, 'b': 11}, {'a': 8})
    """
    waiting = {topic: max(0, end - start.get(topic, 0)) for topic, end in available.items()}
    total = sum(waiting.values())
    if total <= most:
        return dict(available)
    taken, found = 0, {}
    seen = 0
    for topic, count in waiting.items():
        seen += count
        share = most * seen // total - taken  # what is rounded off goes to the next one
        taken += share
        found[topic] = start.get(topic, 0) + share if count else available[topic]
    return found


def limited_bytes(
    engine: Engine, start: Mapping[str, int], available: Offsets, most: int
) -> Offsets:
    """As `limited`, for about so many bytes as the ledger keeps them: whole entries, at least
    one, topic after topic."""
    found, left = {}, most
    for topic, end in available.items():
        begin = start.get(topic, 0)
        if left <= 0 or end <= begin:
            found[topic] = min(begin, end) if end > begin else end
            continue
        found[topic], used = _within_bytes(engine, topic, begin, end, left)
        left -= used
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
    engine: Engine, options: ReadOptions, start: Mapping[str, int], end: Mapping[str, int]
) -> list[Span]:
    """What a micro-batch reads. A topic that came later is read from its first message on."""
    found = []
    for topic, stop in end.items():
        here = row(engine, topic)
        begin = start.get(topic, here.first_offset)
        if begin == stop:
            continue
        strict = options.fail_on_data_loss
        if begin > stop:  # the topic was deleted, and made anew
            check_there(here, begin, strict)
            begin = here.first_offset
        begin = check_there(here, begin, strict)
        stop = check_there(here, stop, strict)
        found.append(Span(topic, begin, max(begin, stop)))
    return [span for span in found if span.count]


# ---- partitions --------------------------------------------------------------------------


def share_out(engine: Engine, options: ReadOptions, wanted: Iterable[Span]) -> list[Span]:
    """The spans, cut into partitions, in the order of topics and offsets."""
    spans = [span for span in wanted if span.count]
    least = -(-options.min_partitions // len(spans)) if spans else 1
    return [piece for span in spans for piece in cut(span, max(least, pieces(span, engine)))]


def pieces(span: Span, engine: Engine) -> int:
    """How many partitions a span is worth."""
    size = span.count * _message_bytes(engine, span)
    if span.count <= ALONE and size <= PARTITION_BYTES:
        return 1
    return max(-(-span.count // PARTITION_MESSAGES), -(-int(size) // PARTITION_BYTES))


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
        yield Span(span.topic, start, span.start + (index + 1) * span.count // count)
