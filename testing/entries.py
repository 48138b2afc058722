"""Entries made by hand, valid and invalid ones, and a read of every part of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import google_crc32c

from exclusivelog import _core

# The footer's layout, as _native/layout.pxi tells it.
FOOTER = struct.Struct("<QQQQqqIHHII")
FIELDS = """
    topic base_offset epoch session base_sequence publish_time count flags name_length magic crc
""".split()

PLAIN, BLOCKED, COMPRESSED = 0x01454C58, 0x02454C58, 0x03454C58  # magic and version
# Of an entry of version 2 or 3: bytes of values, keys and properties, last gap, last time, and the
# method + 256 * log2(bytes of a chunk), or 0.
SUMMARY = struct.Struct("<IIIIII")
CHUNK = struct.Struct("<II")  # bytes of a compressed chunk, and their checksum
LZ4, ZSTD = 1, 2
# Its sections in blocks: flag (0: always), kind, and whose bytes, by their place in the summary.
SECTIONS = (
    (1, "bits", 0), (0, "offsets", 0), (0, "bytes", 0), (2, "bits", 1), (2, "offsets", 1),
    (2, "bytes", 1), (4, "bits", 0), (4, "eights", 0), (8, "eights", 0), (16, "offsets", 2),
    (16, "bytes", 2), (32, "fours", 0), (64, "fours", 0),
)  # fmt: skip

# value, key, packed properties, event time, sequence id (None: the next)
Row = tuple[bytes | None, bytes | None, bytes | None, int | None, int | None]


def various(count: int) -> Iterator[Row]:
    """Rows with all that a producer can write, each with some of it."""
    for n in range(count):
        yield (
            None if n % 7 == 0 else b"v" * (n % 90),
            b"k%d" % n if n % 3 else None,
            b"\x81\xa1a\xa1b" if n % 5 == 0 else None,
            n if n % 2 else None,
            3 * n,
        )


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
            "bits": (-(-n // 8), 128),
            "offsets": (4 * n + 4, 4096),
            "eights": (8 * n, 8192),
            "fours": (4 * n, 4096),
            "bytes": (sizes[which], 16384),
        }[kind]
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


def compressed(
    data: bytes, deflate: Callable[[bytes], bytes], method: int = LZ4, bits: int = 12
) -> bytes:
    """An entry of version 1 without times and gaps, or of version 2, as one of version 3."""
    data = blocked(data) if data[-8:-4] == PLAIN.to_bytes(4, "little") else data
    fields = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
    end = list(_blocks(fields, data))[-1][1]
    name = data[end : end + -(-fields["name_length"] // 8) * 8]
    summary = list(SUMMARY.unpack_from(data, len(data) - FOOTER.size - SUMMARY.size))
    summary[-1] = method | bits << 8
    chunks = [deflate(data[at : min(at + (1 << bits), end)]) for at in range(0, end, 1 << bits)]
    stored = b"".join(chunks)
    fields["magic"] = COMPRESSED
    return resealed(
        stored
        + bytes(-len(stored) % 8)
        + name
        + b"".join(CHUNK.pack(len(chunk), 0) for chunk in chunks)
        + SUMMARY.pack(*summary)
        + FOOTER.pack(*fields.values())
    )


def chunks_of(data: bytes) -> tuple[int, int]:
    """(where the table of an entry of version 3 begins, how many chunks there are)."""
    fields = dict(zip(FIELDS, FOOTER.unpack(data[-FOOTER.size :]), strict=True))
    end = len(data) - FOOTER.size - SUMMARY.size
    n, size = fields["count"], 0
    sizes = SUMMARY.unpack_from(data, end)
    for flag, kind, which in SECTIONS:
        if not flag or fields["flags"] & flag:
            width = {"bits": -(-n // 8), "offsets": 4 * n + 4, "eights": 8 * n, "fours": 4 * n}
            size += -(-width.get(kind, sizes[which]) // 8) * 8
    count = -(-size // (1 << min(32, sizes[-1] >> 8)))
    return end - CHUNK.size * count, count


def resealed(data: bytes) -> bytes:
    """An entry of version 3 with sums of its chunks, and a checksum, that hold."""
    changed, at = bytearray(data), 0
    table, count = chunks_of(data)
    name = -(-FOOTER.unpack(data[-FOOTER.size :])[8] // 8) * 8
    if table - name < 0:
        return data
    for number in range(count):
        place = table + CHUNK.size * number
        size, _ = CHUNK.unpack_from(changed, place)
        CHUNK.pack_into(changed, place, size, google_crc32c.value(bytes(changed[at : at + size])))
        at += size
    changed[-4:] = bytes(4)
    changed[-4:] = google_crc32c.value(bytes(changed[table - name :])).to_bytes(4, "little")
    return bytes(changed)


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
        (
            m.offset,
            m.epoch,
            m.value,
            m.key,
            m.properties,
            m.event_time,
            m.publish_time,
            m.sequence_id,
            m.producer_name,
        )
        for m in messages
    ]
