"""Entries made by hand, valid and invalid ones, and a read of every part of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import google_crc32c

from exclusivelog import _core

# The footer's layout, as _native/layout.pxi tells it.
FOOTER = struct.Struct("<QQQQqqIHHII")
FIELDS = (
    "topic", "base_offset", "epoch", "session", "base_sequence", "publish_time", "count", "flags",
    "name_length", "magic", "crc",
)  # fmt: skip

PLAIN, BLOCKED = 0x01454C58, 0x02454C58  # magic and version
# Of an entry of version 2: bytes of values, keys and properties, last gap, last time, 0.
SUMMARY = struct.Struct("<IIIIII")
# Its sections in blocks: flag (0: always), kind, and whose bytes, by their place in the summary.
SECTIONS = (
    (1, "bits", 0), (0, "offsets", 0), (0, "bytes", 0), (2, "bits", 1), (2, "offsets", 1),
    (2, "bytes", 1), (4, "bits", 0), (4, "eights", 0), (8, "eights", 0), (16, "offsets", 2),
    (16, "bytes", 2), (32, "fours", 0), (64, "fours", 0),
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
    """The entry with footer fields changed, and a checksum that holds; those of its blocks stay."""
    fields = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
    fields.update(changes, crc=0)
    data = data[: -FOOTER.size] + FOOTER.pack(*fields.values())
    blocks = list(_blocks(fields, data)) if fields["magic"] == BLOCKED else []
    tail = blocks[-1][1] if blocks else 0
    return data[:-4] + google_crc32c.value(data[tail:]).to_bytes(4, "little")


def _blocks(fields: dict[str, int], data: bytes) -> Iterator[tuple[int, int]]:
    """Where the blocks of an entry of version 2 begin and end."""
    n, at = fields["count"], 0
    try:
        sizes = SUMMARY.unpack_from(data, len(data) - FOOTER.size - SUMMARY.size)
    except struct.error:
        return
    for flag, kind, which in SECTIONS:
        if flag and not fields["flags"] & flag:
            continue
        size, block = {
            "bits": (-(-n // 8), 128), "offsets": (4 * n + 4, 4096), "eights": (8 * n, 8192),
            "fours": (4 * n, 4096), "bytes": (sizes[which], 16384),
        }[kind]  # fmt: skip
        size = -(-size // 8) * 8
        if at + size > len(data):
            return
        for start in range(0, size, block):
            yield at + start, at + min(start + block, size)
        at += size


def resummed(data: bytes) -> bytes:
    """An entry of version 2 with sums of its blocks, and a checksum, that hold."""
    fields = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
    places = list(_blocks(fields, data))
    sums = b"".join(struct.pack("<I", google_crc32c.value(data[a:b])) for a, b in places)
    at = (places[-1][1] if places else 0) + -(-fields["name_length"] // 8) * 8
    if at + len(sums) <= len(data) - FOOTER.size - SUMMARY.size:
        data = data[:at] + sums + data[at + len(sums) :]
    return refooted(data)


def blocked(data: bytes) -> bytes:
    """A short entry of version 1 without times and gaps as one of version 2."""
    fields = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
    n, flags, at, sizes = fields["count"], fields["flags"], 0, [0, 0, 0]
    for flag, kind, which in SECTIONS:
        if flag and not flags & flag:
            continue
        if kind == "offsets":
            (sizes[which],) = struct.unpack_from("<I", data, at + 4 * n)
        width = {"bits": -(-n // 8), "offsets": 4 * n + 4, "eights": 8 * n, "fours": 4 * n}
        at += -(-width.get(kind, sizes[which]) // 8) * 8
    summary = SUMMARY.pack(*sizes, n - 1, 0, 0)
    fields["magic"] = BLOCKED
    footer = FOOTER.pack(*fields.values())
    count = len(list(_blocks(fields, data[: -FOOTER.size] + summary + footer)))
    room = bytes(-(-4 * count // 8) * 8)
    return resummed(data[: -FOOTER.size] + room + summary + footer)


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
