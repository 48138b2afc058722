"""What a query planner, such as Spark's, asks about topics (`exclusivelog.backend.Inspection`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, Protocol

from exclusivelog import _core
from exclusivelog.backend import Epoch
from exclusivelog.cluster.cursor import frames_from, offset_at_time
from exclusivelog.cluster.deciding import look
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import Content
from exclusivelog.cluster.refused import refusal
from exclusivelog.errors import UnsupportedError

__all__ = ["Inspection"]


class Host(Protocol):
    """The engine that is asked."""

    def followed(self, topic: int) -> TopicLog:
        """The topic's log, followed from now on."""

    def latest(self, topic: int) -> _core.TopicRow:
        """The topic's facts as they are now."""

    def lives(self, engine: str) -> bool:
        """Does the engine of that id live?"""


class Inspection:
    """Facts about the topics of one engine, by their ids."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def row(self, topic: int) -> _core.TopicRow:
        """The topic's row as it is now."""
        return self._host.latest(topic)

    def offset_at(self, topic: int, time_ms: int) -> int:
        """The offset of the first message published at this time or later."""
        log = self._host.followed(topic)
        log.catch_up()
        return offset_at_time(log, time_ms)

    def message_bytes(self, topic: int, samples: Iterable[int]) -> float:
        """About how long a message is: of the newest ones, wherever the samples are."""
        log = self._host.followed(topic)
        with log.changed:
            return log.recent.message_bytes

    def producers(self, topic: int) -> list[tuple[str, int, bool]]:
        """(name, last sequence id, is it live?) of each producer name."""
        log = self._host.followed(topic)
        log.catch_up()
        live = {holder.producer_name for holder in look(log, self._host.lives).holders}
        with log.changed:
            sequences = sorted(log.state.sequences.items())
        return [(name, last, name in live) for name, last in sequences]

    def epochs(self, topic: int, first: int) -> list[Epoch]:
        """The epochs of the messages from the offset `first` on. All of them are read."""
        log = self._host.followed(topic)
        log.catch_up()
        found: list[Epoch] = []
        for frame in frames_from(log, first):
            for offset, content in enumerate(frame.contents, frame.first):
                if offset < first:
                    continue
                if not found or found[-1].epoch != frame.epoch:
                    found.append(Epoch(frame.epoch, offset, content.publish_time))
                _count(found[-1], offset, content)
        return found

    def end_within(self, topic: int, start: int, end: int, most_bytes: int) -> NoReturn:
        """It cannot be told."""
        raise UnsupportedError(
            "a cluster's log is not measured in bytes; bound it by a number of messages "
            "(maxOffsetsPerTrigger)"
        )

    def batches(self, topic: int) -> NoReturn:
        """There are none."""
        raise refusal("once")


def _count(epoch: Epoch, offset: int, content: Content) -> None:
    """One more message of this epoch."""
    epoch.last_offset, epoch.last_time = offset, content.publish_time
    epoch.messages += 1
    if content.producer_name not in epoch.producers:
        epoch.producers.append(content.producer_name)
