"""Snapshots of shared maps and states: what the messages before an offset add up to (rule I4).

A snapshot is a value beside its topic (`blobs`), in as many records as it needs. Like a checkpoint
it stands on a record of the topic's log (`anchors`): one of another log is not used.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgpack

from exclusivelog._core import crc32c
from exclusivelog.backend import Snapshot
from exclusivelog.cluster import blobs
from exclusivelog.cluster.anchors import Anchor, holds
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.place import Place, is_known
from exclusivelog.errors import LedgerCorruptedError
from exclusivelog.messages import Item

__all__ = ["newest", "store"]

VERSION = 1
PREFIX = "__snapshots__"


def store(place: Place, topic: TopicLog, offset: int, items: Iterable[Item]) -> None:
    """Keep what the messages before `offset` add up to; returns once the cluster has it."""
    with topic.changed:
        anchor = topic.saving.anchor  # its record is behind those messages, or the last of them
    body: bytes = msgpack.packb([VERSION, topic.name, list(anchor), offset, list(items)])
    beside = place.open(PREFIX + topic.name)
    try:
        blobs.store(beside, crc32c(body).to_bytes(4, "little") + body)
    finally:
        beside.close()


def newest(place: Place, topic: TopicLog, position: int) -> Snapshot | None:
    """The newest snapshot of this very topic, if it is ahead of this offset.

    Raises `LedgerCorruptedError` for one that is damaged."""
    if not is_known(place, PREFIX + topic.name):
        return None
    beside = place.open(PREFIX + topic.name)
    try:
        data = blobs.load(beside)
    finally:
        beside.close()
    if data is None:
        return None
    anchor, offset, items = _unpack(topic.name, data)
    if anchor is None or offset <= position or not holds(topic.log, anchor):
        return None
    return offset, items


def _unpack(topic: str, data: bytes) -> tuple[Anchor | None, int, list[Item]]:
    body = data[4:]
    if crc32c(body) != int.from_bytes(data[:4], "little"):
        raise LedgerCorruptedError(f"topic {topic!r}: its snapshot is damaged: checksum")
    version, name, anchor, offset, items = msgpack.unpackb(body)
    if (version, name) != (VERSION, topic) or anchor[1] is None:  # of a topic without records
        return None, -1, []
    return Anchor.of(anchor), offset, [(key, value) for key, value in items]
