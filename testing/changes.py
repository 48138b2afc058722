"""Ledgers with very many changes of ownership, written by the library's own code."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import exclusivelog as xl
from exclusivelog.events import Event
from exclusivelog.local.ownership import recording

IN_ONE_TRANSACTION = 2000
LASTING = 1000  # ms that each owner has a topic


def changes(topics: Sequence[str], engines: int, start: int) -> Iterator[list[Event]]:
    """The events of one change of owner after the other, without end: topics in turn, engines of
    unequal share, every tenth owner dead, every fiftieth replaced late. `start`: ms since 1970."""
    owners: dict[str, dict[str, object]] = {}
    for count in itertools.count():
        topic, epoch = topics[count % len(topics)], count // len(topics) + 1
        now = start + epoch * LASTING + (count % len(topics))
        number = (count * count // 7) % engines
        party = {
            "engine": f"{number:032x}",
            "engine_name": f"worker-{number}",
            "pid": 1000 + number,
            "producer": f"worker-{number}",
            "properties": {},
            "engine_properties": {},
        }
        events = []
        if topic in owners:
            dead = count % 10 == 0
            gone = now - (LASTING // 2 if count % 50 == 0 else 1 + dead * LASTING // 20)
            kind, reason = ("evict", "dead") if dead else ("release", "closed")
            events.append(Event(gone, topic, epoch - 1, kind, reason, 0, owners[topic], None))
        events.append(Event(now, topic, epoch, "grant", "promotion", 0, None, party))
        owners[topic] = party
        yield events


def write_changes(
    engine: xl.Engine,
    count: int,
    topics: Sequence[str] = ("orders",),
    engines: int = 40,
    most: int | None = None,
) -> None:
    """Record `count` changes of owner in `__events__`, an entry for each as a grant writes it; the
    topics themselves do not change. `most`: keep so many events, instead of the default."""
    start = time.time_ns() // 1_000_000 - (count // len(topics) + 1) * LASTING
    found = itertools.islice(changes(topics, engines, start), count)
    kept = recording.MOST_EVENTS if most is None else most
    with mock.patch.object(recording, "MOST_EVENTS", kept):
        while some := list(itertools.islice(found, IN_ONE_TRANSACTION)):
            with engine.ledger.write_exclusive() as tables:  # type: ignore[attr-defined]
                for tables.events in some:
                    recording.write_events(tables)
                tables.committed = []
