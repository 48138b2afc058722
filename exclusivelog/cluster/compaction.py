"""Compacted views: the last message of each key, at its own offset (rule G7).

The log keeps every message, so nothing is removed. `compact` only notes a *horizon* beside the
topic: the offset up to which it has looked. A compacted reader finds out by itself which messages
before the newest horizon are the last of their keys, by a look at each of them, and leaves out the
others.

A horizon may be lost, old or damaged: then readers read more than they have to.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgpack

from exclusivelog import _core, logs
from exclusivelog.cluster import blobs
from exclusivelog.cluster.checkpoints import COMPACTED, Anchor, holds, stored_beside
from exclusivelog.cluster.frames import Frame
from exclusivelog.cluster.ordered import Place

if TYPE_CHECKING:
    from exclusivelog.cluster.following import TopicLog

__all__ = ["View", "compact", "newest_horizon"]

VERSION = 1

log = logging.getLogger(__name__)


class View:
    """The offsets before `horizon` that stay, in order."""

    def __init__(self, horizon: int, kept: array[int]) -> None:
        self.horizon, self._kept = horizon, kept

    def __len__(self) -> int:
        return len(self._kept)

    @classmethod
    def of(cls, frames: Iterable[Frame], horizon: int) -> View:
        """Look at all messages before this offset, in these frames from the first one on.

        Values without a key stay, and a tombstone removes its key."""
        last: dict[bytes, int] = {}
        kept = array("q")
        for frame in frames:
            for offset, content in enumerate(frame.contents, frame.first):
                if offset >= horizon:
                    break
                if content.key is None:
                    if content.value is not None:
                        kept.append(offset)
                elif content.value is not None:
                    last[content.key] = offset
                else:
                    last.pop(content.key, None)
            if frame.end >= horizon:
                break
        return cls(horizon, array("q", sorted([*kept, *last.values()])))

    def next(self, offset: int) -> int:
        """The first offset from this one on that is read: one that stays, or at or behind the
        horizon.

        >>> view = View(9, array("q", [2, 5]))
        >>> view.next(0), view.next(3), view.next(6), view.next(12)
        (2, 5, 9, 12)
        """
        if offset >= self.horizon:
            return offset
        at = bisect_left(self._kept, offset)
        return self._kept[at] if at < len(self._kept) else self.horizon

    def runs(self, frame: Frame) -> Iterator[range]:
        """The offsets of the frame's messages that are read, in runs without gaps.

        >>> from exclusivelog.cluster.frames import Content
        >>> frame = Frame(1, 1, 0, (Content(b"", None, {}, None, 0, "p", 0),) * 8)
        >>> list(View(6, array("q", [0, 2, 3])).runs(frame))
        [range(0, 1), range(2, 4), range(6, 8)]
        """
        start = self.next(frame.first)
        while start < frame.end:
            stop = start + 1
            while stop < frame.end and self.next(stop) == stop:
                stop += 1
            yield range(start, stop)
            start = self.next(stop)


def compact(place: Place, topic: TopicLog, frames: Iterable[Frame]) -> int:
    """Note the end of the topic, as it is known, as its horizon. `frames`: from the first one on.
    Returns the number of messages of the view."""
    began = _core.monotonic()
    with topic.changed:
        anchor, horizon = topic.saving.anchor, topic.state.next
        first = max(0, topic.recent.first)
    view = View.of(frames, horizon)
    body: bytes = msgpack.packb([VERSION, topic.name, list(anchor), horizon])
    beside = place.open(COMPACTED + topic.name)
    try:
        blobs.store(beside, body)
    finally:
        beside.close()
    logs.emit(
        log,
        logs.COMPACTED,
        ledger=place.url,
        topic=topic.name,
        offset=horizon,
        seconds=_core.monotonic() - began,
        kept=len(view),
        count=horizon - first,
    )
    return len(view)


def newest_horizon(place: Place, topic: TopicLog) -> int:
    """The offset up to which the topic was compacted; 0 if it was not, or that is not known."""
    data = stored_beside(place, COMPACTED + topic.name)
    if data is None:
        return 0
    version, name, *facts = msgpack.unpackb(data)
    if (version, name) != (VERSION, topic.name):
        return 0
    anchor, horizon = facts
    return int(horizon) if anchor[1] and holds(topic.log, Anchor.of(anchor)) else 0
