"""Facts about a topic for a query planner: its row, offsets by time, sizes, epochs, producers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from exclusivelog import _core
from exclusivelog.backend import Epoch
from exclusivelog.cluster.cursor import frames_from, offset_at_time
from exclusivelog.cluster.following import TopicLog, inspect
from exclusivelog.cluster.frames import Content
from exclusivelog.cluster.refused import refuses
from exclusivelog.errors import UnsupportedError

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["Inspection"]


class Inspection:
    """What a query planner asks about one topic; `ClusterTopic` has the rest. Every call reads its
    log up to the current end."""

    def __init__(self, engine: ClusterEngine, topic: int) -> None:
        self._engine, self._id = engine, topic

    def _log(self) -> TopicLog:
        """The topic's log, read to its end."""
        self._engine.check_open()
        log = self._engine.followed(self._id)
        log.catch_up()
        return log

    def latest(self) -> _core.TopicRow:
        """Its epoch and offsets."""
        log = self._log()
        row = _core.TopicRow()
        with log.changed:
            row.id, row.name = self._id, log.name
            row.epoch, row.next_offset = log.state.epoch, log.state.next
            row.first_offset = max(0, log.recent.first)
            row.last_publish_time = log.state.published
            row.flags = _core.TERMINATED if log.state.terminated else 0
        return row

    def offset_at(self, time_ms: int) -> int:
        """The offset of the first message published at this time or later."""
        log = self._log()
        return offset_at_time(log, time_ms)

    def message_bytes(self, samples: Iterable[int]) -> float:
        """The average size of the newest messages, regardless of `samples`."""
        log = self._engine.followed(self._id)
        with log.changed:
            return log.recent.message_bytes

    def producers(self) -> list[tuple[str, int, bool]]:
        """(name, last sequence id, is it live?) of each producer name."""
        log = self._log()
        live = {holder.producer_name for holder in inspect(log, self._engine.lives).holders}
        with log.changed:
            sequences = sorted(log.state.sequences.items())
        return [(name, last, name in live) for name, last in sequences]

    def epochs(self, first: int) -> list[Epoch]:
        """The epochs of the messages from the offset `first` on. All of them are read."""
        log = self._log()
        found: list[Epoch] = []
        for frame in frames_from(log, first):
            for offset, content in enumerate(frame.contents, frame.first):
                if offset < first:
                    continue
                if not found or found[-1].epoch != frame.epoch:
                    found.append(Epoch(frame.epoch, offset, content.publish_time))
                _count(found[-1], offset, content)
        return found

    def end_within(self, start: int, end: int, most_bytes: int) -> NoReturn:
        """Unsupported: the log has no sizes."""
        raise UnsupportedError(
            "a cluster's log is not measured in bytes; bound it by a number of messages "
            "(maxOffsetsPerTrigger)"
        )

    batches = record_batch = refuses("once")


def _count(epoch: Epoch, offset: int, content: Content) -> None:
    """Count a message of this epoch."""
    epoch.last_offset, epoch.last_time = offset, content.publish_time
    epoch.messages += 1
    if content.producer_name not in epoch.producers:
        epoch.producers.append(content.producer_name)
