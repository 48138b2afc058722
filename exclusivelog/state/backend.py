"""What shared states need of the place that keeps their topic, beyond producers and readers.

This is the only module of the package that knows that the place is a ledger on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.errors import StateError
from exclusivelog.local.faults import retry_damaged
from exclusivelog.local.maintenance.views import read_snapshot, read_view
from exclusivelog.messages.items import Item

if TYPE_CHECKING:
    from exclusivelog.topic import Topic

Kind = Mapping[str, str | None]  # what a topic holds, and its serialisers
Snapshot = tuple[int, list[Item]]  # the offset that it goes up to, and what it consists of


def change_counter(topic: Topic) -> tuple[_core.SharedWords, int]:
    """Return where the counter lies that changes with every commit to the topic."""
    lockfile = topic.engine.ledger.lockfile
    return lockfile.atomics, lockfile.counters.place(topic.id)


def read_newest(topic: Topic, position: int, views: bool) -> tuple[int, Snapshot | None]:
    """Return the topic's first offset and its newest snapshot, or None.

    With `views`, a map's compacted view stands in for a snapshot where messages were trimmed
    that are neither in the snapshot nor before `position`.
    """

    def read() -> tuple[int, Snapshot | None]:
        with topic.engine.ledger.read() as tables:
            first = tables.topics.get(topic.id).first_offset
            found = read_snapshot(tables, topic.id)
            if views and first > max(position, found[0] if found else 0):
                found = read_view(tables, topic.id) or found
            return first, found

    return retry_damaged(read)


def check_kind(topic: Topic, kind: Kind) -> bool:
    """Is it recorded that the topic holds this? False if nothing is recorded yet; StateError if
    it holds something else."""
    with topic.engine.ledger.read() as tables:
        return _matches(topic.name, tables.topics.kind(topic.id), kind)


def record_kind(topic: Topic, kind: Kind) -> None:
    """Record what the topic holds; StateError if it holds something else."""
    with topic.engine.ledger.write_concurrent() as tables:
        if not _matches(topic.name, tables.topics.kind(topic.id), kind):
            tables.topics.put_kind(topic.id, dict(kind))


def _matches(name: str, held: Kind, kind: Kind) -> bool:
    if any(value and (held.get(field) or value) != value for field, value in kind.items()):
        raise StateError(
            f"topic {name!r} holds {_described(held)}; it cannot be opened as {_described(kind)}"
        )
    return bool(held)


def _described(kind: Kind) -> str:
    codecs = ", ".join(f"{name}={value}" for name, value in kind.items() if name != "holds")
    return f"a {kind['holds']}" + (f" ({codecs})" if codecs else "")
