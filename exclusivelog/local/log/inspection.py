"""Facts about a topic for a query planner: its row, offsets by time, sizes, epochs, producers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.backend import Epoch
from exclusivelog.local.log.reading import offset_at_time
from exclusivelog.local.storage.segments import REFERENCE, is_reference
from exclusivelog.local.storage.tables import Tables, existing

if TYPE_CHECKING:
    from exclusivelog.local.runtime import Runtime


class Inspection:
    """What a query planner asks about one topic; `LocalTopic` has the rest."""

    def __init__(self, engine: Runtime, topic: int) -> None:
        self._engine, self._id = engine, topic

    def latest(self) -> _core.TopicRow:
        """Its row as readers see it now; TopicNotFoundError if it was deleted."""
        self._engine.check_open()
        return self._engine.inspect(self._latest)

    def _latest(self, tables: Tables) -> _core.TopicRow:
        return existing(tables.latest(self._id))

    def offset_at(self, time_ms: int) -> int:
        """The offset of the first message published at this time or later."""
        return self._engine.inspect(
            lambda tables: offset_at_time(tables, self._latest(tables), time_ms)
        )

    def end_within(self, start: int, end: int, most_bytes: int) -> tuple[int, int]:
        """(offset, bytes): the end of as many whole entries from `start` on as fit into
        `most_bytes`, at least one, and not past `end`."""

        def find(tables: Tables) -> tuple[int, int]:
            size = 0
            for last, data in tables.entries.walk(self._id, start):
                size += _entry_bytes(data)
                if size >= most_bytes or last + 1 >= end:
                    return min(last + 1, end), size
            return end, size

        return self._engine.inspect(find)

    def message_bytes(self, samples: Iterable[int]) -> float:
        """The average size of a message, estimated from the entries near these offsets."""

        def find(tables: Tables) -> float:
            found = [_entry_behind(tables, self._id, offset) for offset in samples]
            count = sum(messages for messages, _ in found)
            return sum(size for _, size in found) / count if count else 0.0

        return self._engine.inspect(find)

    def epochs(self, first: int) -> list[Epoch]:
        """The epochs of the messages from the offset `first` on."""

        def find(tables: Tables) -> list[Epoch]:
            found: dict[int, Epoch] = {}
            for _, data in tables.entries.walk(self._id, first):
                _add(found, _core.Entry(tables.entries.load(data)), first)
            return list(found.values())

        return self._engine.inspect(find)

    def producers(self) -> list[tuple[str, int, bool]]:
        """(name, last sequence id, is it live?) of each producer name."""
        with self._engine.ledger.read() as tables:
            found = tables.producers.all(self._id)
        return [(name, last, bool(session)) for name, last, session in found]

    def batches(self) -> dict[str, int]:
        """{writer: number of its last batch}; see `exclusivelog.once`."""
        with self._engine.ledger.read() as tables:
            return dict(tables.once.batches(tables.topics.existing(self._id).id))


def _entry_bytes(data: bytes) -> int:
    """The length of the entry that a row of the tables is, or refers to."""
    return int(REFERENCE.unpack(data)[3]) if is_reference(data) else len(data)


def _entry_behind(tables: Tables, topic: int, offset: int) -> tuple[int, int]:
    """(messages, bytes) of the entry after the one that holds the offset. The first offset of the
    entry itself is unknown, so its size per message is, too."""
    found, begin = (0, 0), offset
    for last, data in itertools.islice(tables.entries.walk(topic, offset), 2):
        found, begin = (last + 1 - begin, _entry_bytes(data)), last + 1
    return found


def _add(found: dict[int, Epoch], entry: _core.Entry, start: int) -> None:
    first = max(entry.base_offset, start)  # lower offsets were trimmed
    epoch = found.get(entry.epoch)
    if epoch is None:
        begun = entry.message(first - entry.base_offset).publish_time
        epoch = found[entry.epoch] = Epoch(entry.epoch, first, begun)
    epoch.last_offset, epoch.last_time = entry.end - 1, entry.last_publish_time
    epoch.messages += entry.end - first
    if entry.producer_name not in epoch.producers:
        epoch.producers.append(entry.producer_name)
