"""Entries made by hand, valid and invalid ones, and a read of every part of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import google_crc32c

from exclusivelog import _core

# The footer's layout, as _native/layout.pxi tells it.
FOOTER = struct.Struct("<QQQQqqIHHII")
FIELDS = (
    "topic", "base_offset", "epoch", "session", "base_sequence", "publish_time", "count", "flags",
    "name_length", "magic", "crc",
)  # fmt: skip

# value, key, packed properties, event time, sequence id (None: the next)
Row = tuple[bytes | None, bytes | None, bytes | None, int | None, int | None]


def encode(rows: Iterable[Row], name: bytes = b"p", *, base: int = 0, time: int = 0) -> bytes:
    """One entry with these messages, as a producer makes it."""
    appender = _core.Appender(name, -1, 1 << 20, 1 << 30)
    for row in rows:
        assert appender.add(*row) is not None
    (batch,) = appender.take()
    ((_, data),) = batch.stamp(1, base, 3, 7, time)
    return data


def values(items: Sequence[bytes | None], base: int = 0) -> bytes:
    """One entry with these values and nothing else."""
    return encode([(item, None, None, None, None) for item in items], base=base)


def refooted(data: bytes, **changes: int) -> bytes:
    """The entry with footer fields changed, and a checksum that holds."""
    fields = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
    fields.update(changes, crc=0)
    data = data[: -FOOTER.size] + FOOTER.pack(*fields.values())
    return data[:-4] + google_crc32c.value(data).to_bytes(4, "little")


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit turned."""
    changed = bytearray(data)
    changed[bit >> 3] ^= 1 << (bit & 7)
    return bytes(changed)


def examine(entry: _core.Entry) -> list[tuple[Any, ...]]:
    """Touch every part of an entry; what its messages say."""
    entry.has_properties, entry.session, entry.flags
    for name in ("value", "key", "event_time"):
        place = entry.column(name)
        assert place is None or all(-1 <= at <= len(entry.data) for at in place)
    for name in ("offset", "sequence_id"):
        assert len(entry.numbers(name)) == 8 * entry.count
    if entry.column("event_time") is not None:
        entry.numbers("event_time")
    messages = [entry.message(i) for i in range(entry.count)]
    return [
        (m.offset, m.epoch, m.value, m.key, m.properties, m.event_time, m.publish_time,
         m.sequence_id, m.producer_name)
        for m in messages
    ]  # fmt: skip
