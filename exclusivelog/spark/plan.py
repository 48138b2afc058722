"""Planning: the offsets to read, and their partitions. No Spark here.

A Python task takes 20 to 40 ms before its first row, so few, large partitions are best, the same
number for each core; small topics share one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from exclusivelog import _core
from exclusivelog.errors import TopicNotFoundError
from exclusivelog.foreign import pass_on_foreign
from exclusivelog.messages import to_ms
from exclusivelog.spark.errors import DATA_LOSS, SourceError
from exclusivelog.spark.options import EARLIEST, LATEST, Bounds, ReadOptions, Where, refuse

if TYPE_CHECKING:
    import exclusivelog as xl

# The bytes of a partition: below, a separate one is not worth its task; above, a second attempt
# would repeat too much.
LEAST_MESSAGES, LEAST_BYTES = 200_000, 32 << 20
MOST_MESSAGES, MOST_BYTES = 5_000_000, 512 << 20
SAMPLES = 8

Offsets = dict[str, int]
# A stream's position, as its checkpoint has it: {topic: next offset}, and the topics' ids, because
# a recreated topic has the same name but other offsets.
Position = dict[str, Any]
IDS = ""  # the key of the ids, which is not a valid name of a topic


@dataclass(frozen=True)
class Span:
    """The messages of a topic from `start` up to, not with, `end`. `id` is the topic's; None:
    any topic of that name."""

    topic: str
    start: int
    end: int
    id: int | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """How many messages."""
        return self.end - self.start


# ---- topics ------------------------------------------------------------------------------


def topics(engine: xl.Engine, options: ReadOptions) -> list[str]:
    """The topics that the options name, or match."""
    if options.names is not None:
        return list(options.names)
    return [name for name in engine.topics() if re.fullmatch(options.pattern, name)]


def row(engine: xl.Engine, topic: str) -> _core.TopicRow:
    """The topic's current row; TopicNotFoundError if it is missing."""
    return row_of(engine, engine.topic(topic, create=False).id)


def row_of(engine: xl.Engine, number: int) -> _core.TopicRow:
    """The row of the topic with this id; TopicNotFoundError if it was deleted, even if another
    topic has its name."""
    return engine.backend.topic_store(number).latest()


def rows(engine: xl.Engine, options: ReadOptions, known: bool = False) -> dict[str, _core.TopicRow]:
    """The rows of the topics that the options name, or match. `known`: a topic that is missing was
    there when the query began."""
    found = {}
    for topic in topics(engine, options):
        try:
            found[topic] = row(engine, topic)
        except TopicNotFoundError:
            was_deleted = options.names is None or (known and not options.fail_on_data_loss)
            if not was_deleted:
                raise
    return found


# ---- a batch: from here to there ---------------------------------------------------------


def spans(engine: xl.Engine, options: ReadOptions) -> list[Span]:
    """The spans that a batch reads. Raises SourceError if the end is before the start, or for
    missing offsets, unless failOnDataLoss is false: then reads those that exist."""
    found = []
    for topic, here in rows(engine, options).items():
        if options.ids.get(topic, here.id) != here.id:
            raise made_anew(topic)
        _check_order(here, options)
        start = _resolve(engine, here, options.start, options.fail_on_data_loss)
        end = _resolve(engine, here, options.end, options.fail_on_data_loss)
        found.append(Span(topic, start, max(start, end), here.id))
    return found


def _check_order(here: _core.TopicRow, options: ReadOptions) -> None:
    """SourceError for a range that ends before it starts."""
    start, end = options.start.of(here.name), options.end.of(here.name)
    if start == EARLIEST or end == LATEST:  # then they are in order, unless messages are missing
        return
    if isinstance(start, dt.datetime) != isinstance(end, dt.datetime):
        return  # times and offsets cannot be compared
    if _number(here, start) > _number(here, end):
        raise refuse(
            f"the end of what is to be read of topic {here.name!r}, {end}, is before its start, "
            f"{start}; see {_names('starting', start)} and {_names('ending', end)}"
        )


def _number(here: _core.TopicRow, place: Where) -> int:
    if isinstance(place, dt.datetime):
        return to_ms(place)
    if isinstance(place, str):
        return here.first_offset if place == EARLIEST else here.next_offset
    return place


def _names(end: str, place: Where) -> str:
    return f"{end}Timestamp" if isinstance(place, dt.datetime) else f"{end}Offsets"


def _resolve(engine: xl.Engine, here: _core.TopicRow, bounds: Bounds, strict: bool) -> int:
    place = bounds.of(here.name)
    offset = place_of(engine, here, place)
    if not isinstance(place, int):
        return offset
    return check_there(here, offset, strict)


def place_of(engine: xl.Engine, here: _core.TopicRow, place: Where) -> int:
    """The offset of "earliest", "latest", a time or an offset, as of now."""
    if place == EARLIEST:
        return here.first_offset
    if place == LATEST:
        return here.next_offset
    if isinstance(place, dt.datetime):
        return engine.backend.topic_store(here.id).offset_at(to_ms(place))
    assert isinstance(place, int)
    return place


def check_there(here: _core.TopicRow, offset: int, strict: bool) -> int:
    """The offset, if it is between the topic's first and next one; else an error, or the nearest
    valid one."""
    nearest = min(max(offset, here.first_offset), here.next_offset)
    if strict and nearest != offset:
        gone = "was trimmed" if offset < here.first_offset else "is not there yet"
        raise SourceError(
            DATA_LOSS,
            f"topic {here.name!r} has offsets {here.first_offset} to {here.next_offset - 1}; "
            f"{offset} {gone}, or the topic was created again. failOnDataLoss=false reads "
            "what there is",
        )
    return nearest


# ---- a stream: as far as the limit allows ------------------------------------------------


def starts(engine: xl.Engine, options: ReadOptions) -> Position:
    """The start of a new stream."""
    found = rows(engine, options)
    for topic in found:
        _check_past(topic, options.start.of(topic))
    strict = options.fail_on_data_loss
    offsets = {
        topic: _resolve(engine, here, options.start, strict) for topic, here in found.items()
    }
    return {**offsets, IDS: {topic: here.id for topic, here in found.items()}}


def _check_past(topic: str, start: Where) -> None:
    """SourceError for a time that is yet to come: a stream begins at an offset, and would deliver
    the messages of before that time."""
    if isinstance(start, dt.datetime) and to_ms(start) > time.time() * 1000:
        raise refuse(
            f"startingTimestamp {start} of topic {topic!r} is in the future, and a stream begins "
            "with what is there; begin it then, or filter by publish_time"
        )


def ends(engine: xl.Engine, options: ReadOptions) -> Position:
    """The current ends of the topics."""
    found = rows(engine, options, known=True)
    offsets = {topic: here.next_offset for topic, here in found.items()}
    return {**offsets, IDS: {topic: here.id for topic, here in found.items()}}


def split(position: Mapping[str, Any]) -> tuple[Offsets, dict[str, int]]:
    """(offsets, known topic ids) of a position.

    >>> split({"a": 3, "": {"a": 1}}), split({"a": 3})
    (({'a': 3}, {'a': 1}), ({'a': 3}, {}))
    """
    offsets = {topic: offset for topic, offset in position.items() if topic != IDS}
    return offsets, dict(position.get(IDS, {}))


def kept(engine: xl.Engine, start: Mapping[str, Any], available: Position) -> Position:
    """The positions of topics that the query has read before, and does not select any more. They
    stay in its checkpoint, so that a topic that is selected again is continued."""
    (offsets, ids), (wanted, _) = split(start), split(available)
    found, numbers = {}, {}
    for topic in offsets.keys() - wanted.keys():
        with contextlib.suppress(TopicNotFoundError):
            number = row(engine, topic).id
            if ids.get(topic, number) == number:
                found[topic], numbers[topic] = offsets[topic], number
    return {**found, IDS: numbers}


def goes_on(
    engine: xl.Engine,
    options: ReadOptions,
    start: Mapping[str, Any],
    available: Position,
    others: Position,
) -> Offsets:
    """The start of the next micro-batch in each topic: the end of the last one, if that offset
    exists. `others`: what `kept` returns."""
    offsets, ids = split(start)
    wanted, _ = split(available)
    gone = offsets.keys() - wanted.keys() - others.keys()
    if gone and options.fail_on_data_loss:
        raise SourceError(
            DATA_LOSS,
            f"topic {min(gone)!r} was deleted, perhaps with messages that were not read. "
            "failOnDataLoss=false continues without it",
        )
    found = {}
    for topic, end in wanted.items():
        first = _first(engine, topic)
        begin = offsets.get(topic, first)
        anew = ids.get(topic) not in (None, available[IDS].get(topic))
        found[topic] = first if anew or begin > end else max(begin, first)
    return found


def _first(engine: xl.Engine, topic: str) -> int:
    try:
        return int(row(engine, topic).first_offset)
    except TopicNotFoundError:  # meanwhile
        return 0


def limited(start: Mapping[str, int], available: Offsets, most: int) -> Offsets:
    """The end of at most `most` messages from `start` on, in proportion to what each topic has.

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
        # Carry the rounding error to the next topic.
        shares[topic] = most * seen // total - most * before // total
    for topic, count in waiting.items():  # so that every topic gets its share in each micro-batch
        richest = max(shares, key=lambda name: shares[name])
        if count and not shares[topic] and shares[richest] > 1:
            shares[topic], shares[richest] = 1, shares[richest] - 1
    return shares


def limited_bytes(
    engine: xl.Engine, start: Mapping[str, int], available: Offsets, most: int
) -> Offsets:
    """As `limited`, for about so many bytes of entries: whole entries, at least one of each
    topic."""
    found = dict(available)
    waiting = [topic for topic, end in available.items() if end > start.get(topic, 0)]
    for index, topic in enumerate(waiting):
        share = most // (len(waiting) - index)  # unused shares go to the next topics
        number = row(engine, topic).id
        found[topic], used = engine.backend.topic_store(number).end_within(
            start.get(topic, 0), available[topic], share
        )
        most = max(0, most - used)
    return found


def steps(
    engine: xl.Engine, options: ReadOptions, start: Mapping[str, Any], end: Mapping[str, Any]
) -> list[Span]:
    """The spans that a micro-batch reads. A new topic is read from its first message on."""
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


def _planned_for(engine: xl.Engine, topic: str, number: int | None) -> _core.TopicRow:
    here = row(engine, topic)
    if number not in (None, here.id):
        raise made_anew(topic)
    return here


def made_anew(topic: str) -> SourceError:
    """The error, or None: messages of the topic that were to be read are missing."""
    return SourceError(
        DATA_LOSS,
        f"topic {topic!r} was deleted and created again, perhaps with messages that were not read. "
        "failOnDataLoss=false continues with the new topic",
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


def share_out(engine: xl.Engine, options: ReadOptions, wanted: Iterable[Span]) -> list[list[Span]]:
    """Divide spans into partitions, in the order of topics and offsets: large spans are cut, small
    ones are read by one task."""
    spans = [span for span in wanted if span.count]
    sizes = [int(span.count * _message_bytes(engine, span)) for span in spans]
    count = partitions(sum(span.count for span in spans), sum(sizes))
    if options.min_partitions > count:  # then weigh by messages
        return cut(spans, [span.count for span in spans], options.min_partitions)
    return cut(spans, [_weight(*pair) for pair in zip(spans, sizes, strict=True)], count)


def _weight(span: Span, size: int) -> int:
    return max(span.count * LEAST_BYTES, size * LEAST_MESSAGES)


def cores() -> int:
    """How many tasks this machine, which also has the executors, can run at once."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def partitions(count: int, size: int) -> int:
    """The number of partitions for so many messages and bytes.

    >>> partitions(1, 1), partitions(0, 0)
    (1, 0)
    """
    worth, lanes = max(-(-count // LEAST_MESSAGES), -(-size // LEAST_BYTES)), cores()
    if worth <= lanes:
        return worth
    needed = max(-(-count // MOST_MESSAGES), -(-size // MOST_BYTES))
    return -(-needed // lanes) * lanes  # a multiple of the cores, so that none is idle at the end


def _message_bytes(engine: xl.Engine, span: Span) -> float:
    """The average stored size of a message, from a few sampled entries."""
    places = sorted({span.start + index * span.count // SAMPLES for index in range(SAMPLES)})
    return engine.backend.topic_store(row(engine, span.topic).id).message_bytes(places)


def cut(spans: Sequence[Span], weights: Sequence[int], count: int) -> list[list[Span]]:
    """The spans in `count` partitions of about the same weight; fewer if there are fewer
    messages.

    >>> two = [Span("a", 10, 20), Span("b", 0, 5)]
    >>> [[(p.topic, p.start, p.end) for p in part] for part in cut(two, [10, 5], 2)]
    [[('a', 10, 17)], [('a', 17, 20), ('b', 0, 5)]]
    """
    total, before, found = sum(weights), 0, [list[Span]() for _ in range(count)]
    for span, weight in zip(spans, weights, strict=True):
        # The boundaries within this span, and its first partition.
        first, behind = before * count // total, -(-(before + weight) * count // total)
        inner = [total * index // count - before for index in range(first + 1, behind)]
        at = [0, *(span.count * place // weight for place in inner), span.count]
        for index, (start, end) in enumerate(itertools.pairwise(at), first):
            if start < end:
                piece = replace(span, start=span.start + start, end=span.start + end)
                found[index].append(piece)
        before += weight
    return [pieces for pieces in found if pieces]


# ---- is it the same ledger? --------------------------------------------------------------

Inode = tuple[int, int]


def inode(path: str) -> Inode | None:
    """Identifies a ledger's file, to detect a replacement; None if there is none."""
    try:
        stat = os.stat(os.path.join(path, "data.mdb"))
    except OSError as error:
        pass_on_foreign(error)
        return None
    return stat.st_dev, stat.st_ino


def ledger_exists(path: str) -> bool:
    """Is there a ledger in this directory?"""
    return inode(path) is not None
