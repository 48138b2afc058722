"""The records of an ordered log as bytes: frames, grants, joins, releases and terminations.

```text
0  3 bytes  magic XLO
3  u8       version, 1
4  u32      CRC-32C of the bytes 0 to 3 and of all bytes from 8 on, little-endian
8           one msgpack array; its first element is the kind

frame    ["f", epoch, session, first offset, gap, source, producers, sequence ids, publish times,
          values, keys, event times, properties]
packed   ["e", epoch, session, first offset, entries]
shared   ["s", epoch, session, number, producers, sequence ids, publish times, values, keys,
          event times, properties]
grant    ["g", epoch, first offset, session, continues, joins, engine id, engine name, pid,
          producer name, access mode, priority, since, properties]
pass     ["p", epoch, first offset, session, joins, by, waiter, engine id, engine name, pid,
          producer name, priority, since, properties]
announce  ["n", epoch, session, number, time, info]
join     ["j", epoch, granted, joins, session, engine id, engine name, pid, producer name,
          access mode, priority, since, properties]
release  ["r", epoch, session, reason]
terminate  ["t", epoch, granted]
```

A packed frame whose last message is an announcement, too, has the kind "ea". A grant or pass that
announces has one more element, the info, and the kind "ga" or "pa".

The columns of a frame have one element for each message, or are shorter: `producers` is one str if
all messages have the same name, `sequence ids` is the first one if they count up by 1, `publish
times` is one int if all are the same, and `keys`, `event times` and `properties` are nil if no
message has one. Times are ms since 1970.

A packed frame is what engines write: its entries are those of a ledger (docs/format.md), not
compressed, with topic 0, epoch, session and dense offsets. They are encoded, checked and read by
compiled code.

All readers must agree on which records count. So `decode` has three outcomes:

- Bytes without the magic are **foreign**, of another program. `decode` returns None. They count in
  no version of this library.
- An unknown version or access mode raises `LedgerVersionError`, and damaged or invalid bytes raise
  `LedgerCorruptedError`. A reader stops there: another reader might count this record, so skipping
  it could let two owners write.
- Everything else decodes to exactly one record.

>>> frame = Frame(epoch=1, session=7, first=0, contents=(Content(b"a", None, {}, None, 5, "p", 0),))
>>> decode(encode(frame)) == frame
True
>>> decode(b"plain text") is None
True
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgpack

from exclusivelog._core import Entry, Message, crc32c
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError, UnsupportedError
from exclusivelog.types import EXCLUSIVE_MODES, AccessMode, OwnerInfo

__all__ = [
    "MAX_BYTES",
    "MAX_MESSAGES",
    "Announce",
    "Content",
    "Frame",
    "Grant",
    "Holder",
    "Join",
    "Packed",
    "Parsed",
    "Release",
    "Terminate",
    "decode",
    "encode",
    "sealed",
    "split",
    "unsealed",
]

# Pulsar takes 5 MiB with its own headers and properties; this leaves them 240 kB.
MAX_BYTES = 5_000_000
MAX_MESSAGES = 100_000  # in one frame; bounds what a few bytes can make a reader allocate

MAGIC = b"XLO"
VERSION = 1
HEADER = struct.Struct("<3sBI")
SUMMED = 4  # bytes before the checksum
ANNOUNCING = "a"  # behind the kind of a record that announces, too

U63 = 2**63 - 1
U64 = 2**64 - 1


# ---- records -----------------------------------------------------------------------------


class Content(NamedTuple):
    """A message without its offset; the fields are those of `Message`.

    `value` is None for a tombstone; times are ms since 1970."""

    value: bytes | None
    key: bytes | None
    properties: dict[str, str]
    event_time: int | None
    publish_time: int
    producer_name: str
    sequence_id: int

    @classmethod
    def of(cls, message: Message) -> Content:
        """The content of a message that was read from a log."""
        return cls(
            message.raw_value,
            message.key,
            message.properties,
            message.event_time,
            message.publish_time,
            message.producer_name,
            message.sequence_id,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """One or more messages with dense offsets from `first` on.

    - `epoch`, `session`: of the owner that has written it.
    - `source`: the log of which this frame is a copy, or None. A copied frame has the epoch of its
      source.
    - `gap`: of a copied frame: how many offsets before `first` the source no longer had; else 0.
    - `number`: of a shared producer's frame: how many its session has sent up to this one; else 0.
      Such a frame has no offset before it counts: `first` is 0 until the rule gives it the next.
    - `announces`: the properties of its last message are what the owner announces.
    """

    epoch: int
    session: int
    first: int
    contents: tuple[Content, ...]
    gap: int = 0
    source: str | None = None
    number: int = 0
    announces: bool = False

    @property
    def end(self) -> int:
        """The offset after its last message."""
        return self.first + len(self.contents)

    def sequences(self) -> dict[str, int]:
        """The highest sequence id of each producer name."""
        found: dict[str, int] = {}
        for content in self.contents:
            name, sequence = content.producer_name, content.sequence_id
            if sequence > found.get(name, -1):
                found[name] = sequence
        return found

    @property
    def published(self) -> int:
        """The highest publish time."""
        return max(content.publish_time for content in self.contents)

    @property
    def size(self) -> int:
        """The bytes of its values and keys, or a little more."""
        return sum(len(each.value or b"") + len(each.key or b"") for each in self.contents)


class Packed(Frame):
    """A frame whose messages are entries of a ledger; `contents` decodes them on demand."""

    __slots__ = ("_entries", "_opened")
    _entries: tuple[bytes, ...]
    _opened: tuple[Entry, ...]

    def __init__(
        self,
        epoch: int,
        session: int,
        first: int,
        entries: Sequence[bytes],
        announces: bool = False,
    ) -> None:
        for name, value in (
            ("epoch", epoch),
            ("session", session),
            ("first", first),
            ("gap", 0),
            ("source", None),
            ("number", 0),
            ("announces", announces),
            ("_entries", tuple(entries)),
            ("_opened", tuple(map(Entry, entries))),
        ):
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        mine = (self.epoch, self.session, self.first, self._entries, self.announces)
        return isinstance(other, Packed) and mine == (
            other.epoch,
            other.session,
            other.first,
            other._entries,
            other.announces,
        )

    def __hash__(self) -> int:
        return hash((self.epoch, self.session, self.first))

    def __repr__(self) -> str:
        return f"Packed({self.epoch}, {self.session}, {self.first}, {len(self._entries)} entries)"

    @property
    def entries(self) -> tuple[bytes, ...]:
        """Its entries, as they are stored."""
        return self._entries

    @property
    def contents(self) -> tuple[Content, ...]:
        """Its messages."""
        return tuple(
            [
                Content.of(entry.message(index))
                for entry in self._opened
                for index in range(entry.count)
            ]
        )

    @property
    def end(self) -> int:
        """The offset after its last message."""
        return self._opened[-1].end

    def sequences(self) -> dict[str, int]:
        """The highest sequence id of each producer name."""
        found: dict[str, int] = {}
        for entry in self._opened:  # the sequence ids of an entry rise
            name, sequence = entry.producer_name, entry.message(entry.count - 1).sequence_id
            found[name] = max(sequence, found.get(name, -1))
        return found

    @property
    def published(self) -> int:
        """The highest publish time."""
        return max(entry.last_publish_time for entry in self._opened)

    @property
    def size(self) -> int:
        """The bytes of its entries."""
        return sum(map(len, self._entries))

    def check(self) -> None:
        """Raise ValueError unless all entries are undamaged, and have the offsets that the frame
        states."""
        expected = self.first
        for entry in self._opened:
            entry.check()
            place = (entry.topic, entry.base_offset, entry.epoch, entry.session)
            dense = entry.end == entry.base_offset + entry.count
            if place != (0, expected, self.epoch, self.session) or not dense or entry.compression:
                raise ValueError(f"the entry at offset {expected} is not of this frame")
            if not entry.count or not isinstance(entry.producer_name, str):
                raise ValueError(f"the entry at offset {expected} has no message")
            expected = entry.end


@dataclass(frozen=True, slots=True)
class Holder:
    """The engine and producer that ask for a topic, as errors name them (rule A5). `since` is in ms
    since 1970."""

    engine_id: str
    engine_name: str
    pid: int
    producer_name: str
    access_mode: AccessMode
    priority: int = 0
    since: int = 0
    properties: dict[str, str] = field(default_factory=dict)

    def owner(self, epoch: int, session: int) -> OwnerInfo:
        """The holder of a session, as errors and inspections show it."""
        return OwnerInfo(
            engine_id=self.engine_id,
            engine_name=self.engine_name,
            pid=self.pid,
            producer_name=self.producer_name,
            access_mode=self.access_mode,
            priority=self.priority,
            epoch=epoch,
            since=self.since,
            session=session,
            properties=self.properties,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """Makes `session` the owner from the offset `first` on, if it counts.

    `continues` is 0, or the session whose epoch this one continues (rule B5). `joins` is the number
    of joins that had counted when its sender asked.

    An owner that closes passes the topic on to the first waiter by a grant of its own, in place of
    a release (rule C1): `by` is the owner's session, and `waiter` the waiter's number; else both
    are 0. `announce`: what the new owner announces with its grant; None: nothing."""

    epoch: int
    first: int
    session: int
    holder: Holder
    continues: int = 0
    joins: int = 0
    by: int = 0
    waiter: int = 0
    announce: dict[str, str] | None = None

    def owner(self) -> OwnerInfo:
        """The owner as errors and inspections show it."""
        return self.holder.owner(self.epoch, self.session)


@dataclass(frozen=True, slots=True)
class Join:
    """Makes `session` one of the topic's shared producers, if it counts.

    Its sender has seen the last grant, of the session `granted` (0: none), and so many `joins`."""

    epoch: int
    granted: int
    joins: int
    session: int
    holder: Holder

    def owner(self) -> OwnerInfo:
        """The producer as errors and inspections show it."""
        return self.holder.owner(self.epoch, self.session)


# The reasons of a release by another engine: the engine of the session is dead; or the session has
# agreed to release the topic when another one waits, and does not.
EVICTED, LATE = "evicted", "late"


@dataclass(frozen=True, slots=True)
class Release:
    """Ends a session, an owner's or a shared one (rule B7). `reason` is for people."""

    epoch: int
    session: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ends the topic for good, if it counts (rule G8): nothing counts behind it.

    Its sender has seen the last grant, of the session `granted` (0: none), under that epoch."""

    epoch: int
    granted: int


@dataclass(frozen=True, slots=True)
class Announce:
    """What the owner says about itself from now on, if it counts. `number`: how many announcements
    its session has made up to this one, without those in frames. `time` is in ms since 1970."""

    epoch: int
    session: int
    number: int
    time: int
    info: dict[str, str]


Parsed = Frame | Grant | Join | Release | Terminate | Announce


# ---- encoding ----------------------------------------------------------------------------


def encode(record: Parsed) -> bytes:
    """The bytes of a record. Raises ValueError if a field is invalid or the record too large."""
    data = _pack(record)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the record has {len(data)} bytes; an ordered log takes {MAX_BYTES}")
    return data


def _pack(record: Parsed) -> bytes:
    body: bytes = msgpack.packb(_row(record))
    head = HEADER.pack(MAGIC, VERSION, 0)[:SUMMED]
    return HEADER.pack(MAGIC, VERSION, crc32c(head + body)) + body


def _row(record: Parsed) -> list[Any]:
    if isinstance(record, Packed):
        kind = "e" + ANNOUNCING * record.announces
        return [kind, record.epoch, record.session, record.first, record.entries]
    if isinstance(record, Frame):
        row = _frame_row(record)
    elif isinstance(record, Grant):
        row = _pass_row(record) if record.by else _grant_row(record)
        if record.announce is not None:
            row = [row[0] + ANNOUNCING, *row[1:], record.announce or None]
    elif isinstance(record, Join):
        row = [
            "j",
            record.epoch,
            record.granted,
            record.joins,
            record.session,
            *_holder_row(record.holder),
        ]
    elif isinstance(record, Terminate):
        row = ["t", record.epoch, record.granted]
    elif isinstance(record, Announce):
        place = [record.epoch, record.session, record.number, record.time]
        row = ["n", *place, record.info or None]
    else:
        row = ["r", record.epoch, record.session, record.reason]
    try:
        _parse(row)  # never write a record that readers would refuse
    except _InvalidError as error:
        raise ValueError(f"{type(record).__name__}: {error}") from None
    return row


def _frame_row(frame: Frame) -> list[Any]:
    if not frame.contents:
        raise ValueError("contents is empty; a frame has at least one message")
    values, keys, properties, events, published, names, sequences = map(
        list, zip(*frame.contents, strict=True)
    )
    if frame.announces:
        raise ValueError("only a packed frame announces")
    place: list[Any] = ["f", frame.epoch, frame.session, frame.first, frame.gap, frame.source]
    if frame.number:
        place = ["s", frame.epoch, frame.session, frame.number]
    return [
        *place,
        _one_or_all(names),
        _counted_or_all(sequences),
        _one_or_all(published),
        values,
        _none_or_all(keys),
        _none_or_all(events),
        _none_or_all([each or None for each in properties]),
    ]


def _one_or_all(column: list[Any]) -> Any:
    return column[0] if column.count(column[0]) == len(column) else column


def _counted_or_all(column: list[int]) -> Any:
    first = column[0]
    counted = all(map(int.__eq__, column, range(first, first + len(column))))
    return first if counted else column


def _none_or_all(column: list[Any]) -> Any:
    return None if column.count(None) == len(column) else column


def _grant_row(grant: Grant) -> list[Any]:
    place = [grant.epoch, grant.first, grant.session, grant.continues, grant.joins]
    return ["g", *place, *_holder_row(grant.holder)]


def _pass_row(grant: Grant) -> list[Any]:
    *who, mode, priority, since, properties = _holder_row(grant.holder)
    if grant.continues or mode != AccessMode.WAIT_FOR_EXCLUSIVE:
        raise ValueError("a topic is passed on to a waiter, under a new epoch")
    place = [grant.epoch, grant.first, grant.session, grant.joins, grant.by, grant.waiter]
    return ["p", *place, *who, priority, since, properties]


def _holder_row(holder: Holder) -> list[Any]:
    return [
        holder.engine_id,
        holder.engine_name,
        holder.pid,
        holder.producer_name,
        str(holder.access_mode),
        holder.priority,
        holder.since,
        holder.properties or None,
    ]


def split(frame: Frame, most: int = MAX_BYTES) -> Iterator[tuple[Frame, bytes]]:
    """The frame in parts of up to `most` bytes, each with its bytes.

    Raises `UnsupportedError` for a message that alone has more."""
    data = None
    if len(frame.contents) <= MAX_MESSAGES and frame.size <= most:
        data = _pack(frame)
    if data is not None and len(data) <= most:
        yield frame, data
    elif len(frame.contents) == 1:
        raise UnsupportedError(
            f"the message at offset {frame.first} does not fit into one record of the cluster, "
            f"which has {most} bytes; store its value elsewhere and send a reference"
        )
    else:
        for part in _halves(frame):
            yield from split(part, most)


def _halves(frame: Frame) -> tuple[Frame, Frame]:
    middle = len(frame.contents) // 2
    head, rest = frame.contents[:middle], frame.contents[middle:]
    return (
        Frame(frame.epoch, frame.session, frame.first, head, frame.gap, frame.source),
        Frame(frame.epoch, frame.session, frame.first + middle, rest, 0, frame.source),
    )


# ---- decoding ----------------------------------------------------------------------------


def sealed(magic: bytes, version: int, body: bytes) -> bytes:
    """A record of another kind: its magic and version, then the checksum of its body, then that."""
    return HEADER.pack(magic, version, crc32c(body)) + body


def unsealed(magic: bytes, version: int, data: bytes) -> bytes | None:
    """The body of a record that is `sealed`; None for any other, and for a damaged one."""
    if data[: len(magic)] != magic or len(data) < HEADER.size:
        return None
    _, found, wanted = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    return body if found == version and crc32c(body) == wanted else None


class _InvalidError(ValueError):
    """A field has a value that no writer of this version writes."""


def decode(data: bytes) -> Parsed | None:
    """The record that these bytes are; None if they are foreign.

    Raises `LedgerVersionError` and `LedgerCorruptedError`, as the module's text says."""
    if data[: len(MAGIC)] != MAGIC:
        return None
    if len(data) < HEADER.size:
        raise _damaged(data, "it is cut short")
    _, version, wanted = HEADER.unpack_from(data)
    if version != VERSION:
        raise LedgerVersionError(
            f"the log has a record of version {version}; this library reads version {VERSION}: "
            "read it with a newer version of exclusivelog"
        )
    body = memoryview(data)[HEADER.size :]
    if crc32c(data[:SUMMED] + body) != wanted:
        raise _damaged(data, "its checksum does not hold")
    if len(data) > MAX_BYTES:
        raise _damaged(data, f"it has more than {MAX_BYTES} bytes")
    try:
        return _parse(_unpack(body))
    except (ValueError, msgpack.UnpackException) as error:
        raise _damaged(data, str(error) or type(error).__name__) from None


def _damaged(data: bytes, why: str) -> LedgerCorruptedError:
    return LedgerCorruptedError(
        f"a record of {len(data)} bytes in the ordered log is invalid: {why}"
    )


def _unpack(body: memoryview) -> Any:
    row = msgpack.unpackb(body, max_array_len=MAX_MESSAGES, max_map_len=MAX_MESSAGES, max_ext_len=0)
    # Each record has only one valid encoding, while msgpack can write a number or map in several
    # ways.
    if msgpack.packb(row) != body:
        raise _InvalidError("its msgpack is not in the shortest form")
    return row


def _parse(row: Any) -> Parsed:
    if type(row) is not list or not row or type(row[0]) is not str or row[0] not in PARSERS:
        raise _InvalidError("it is of no known kind")
    parse, length = PARSERS[row[0]]
    if len(row) != length:
        raise _InvalidError(f"it has {len(row)} fields instead of {length}")
    return parse(row)


def _parse_frame(row: list[Any]) -> Frame:
    _, epoch, session, first, gap, source, *columns = row
    contents = _contents(columns)
    _check_int("first", first, 0, U63 - len(contents))
    if source is not None:
        _check_text("source", source)
    elif gap != 0:
        raise _InvalidError("only a copied frame has a gap")
    return Frame(
        _check_int("epoch", epoch, 0, U63),
        _check_int("session", session, 0, U64),
        first,
        contents,
        _check_int("gap", gap, 0, first),
        source,
    )


def _parse_shared(row: list[Any]) -> Frame:
    _, epoch, session, number, *columns = row
    return Frame(
        _check_int("epoch", epoch, 0, U63),
        _check_int("session", session, 1, U64),
        0,
        _contents(columns),
        number=_check_int("number", number, 1, U63),
    )


def _contents(columns: list[Any]) -> tuple[Content, ...]:
    names, sequences, published, values, keys, events, properties = columns
    if type(values) is not list or not 1 <= len(values) <= MAX_MESSAGES:
        raise _InvalidError(f"a frame has 1 to {MAX_MESSAGES} values")
    count = len(values)
    contents = zip(
        _column("values", values, count, _are_bytes),
        _nothing_or("keys", keys, count, _are_bytes),
        _properties(properties, count),
        _nothing_or("event times", events, count, _are_times),
        _same_or("publish times", published, count, int, _are_i64),
        _same_or("producers", names, count, str, _are_texts),
        _sequences(sequences, count),
        strict=True,
    )
    return tuple(map(Content._make, contents))


def _parse_packed(row: list[Any]) -> Frame:
    kind, epoch, session, first, entries = row
    if type(entries) is not list or {*map(type, entries)} != {bytes}:
        raise _InvalidError("a packed frame has entries of bytes")
    frame = Packed(
        _check_int("epoch", epoch, 1, U63),
        _check_int("session", session, 1, U64),
        _check_int("first", first, 0, U63 - MAX_MESSAGES),
        entries,
        kind.endswith(ANNOUNCING),
    )
    frame.check()
    if frame.end - first > MAX_MESSAGES:
        raise _InvalidError(f"a frame has 1 to {MAX_MESSAGES} messages")
    return frame


def _parse_grant(row: list[Any]) -> Grant:
    _, epoch, first, session, continues, joins, *holder = row
    return Grant(
        _check_int("epoch", epoch, 1, U63),
        _check_int("first", first, 0, U63),
        _check_int("session", session, 1, U64),
        _holder(holder, EXCLUSIVE_MODES),
        _check_int("continues", continues, 0, U64),
        _check_int("joins", joins, 0, U63),
    )


def _parse_pass(row: list[Any]) -> Grant:
    _, epoch, first, session, joins, by, waiter, *holder = row
    holder.insert(len(holder) - 3, AccessMode.WAIT_FOR_EXCLUSIVE.value)
    return Grant(
        _check_int("epoch", epoch, 1, U63),
        _check_int("first", first, 0, U63),
        _check_int("session", session, 1, U64),
        _holder(holder, EXCLUSIVE_MODES),
        0,
        _check_int("joins", joins, 0, U63),
        _check_int("by", by, 1, U64),
        _check_int("waiter", waiter, 0, U63),
    )


def _parse_announcing(row: list[Any]) -> Grant:
    kind, *fields, info = row
    parse, _ = PARSERS[kind.removesuffix(ANNOUNCING)]
    grant = parse([kind, *fields])
    assert isinstance(grant, Grant)
    return replace(grant, announce=_info(info))


def _parse_announce(row: list[Any]) -> Announce:
    _, epoch, session, number, time, info = row
    return Announce(
        _check_int("epoch", epoch, 1, U63),
        _check_int("session", session, 1, U64),
        _check_int("number", number, 1, U63),
        _check_int("time", time, 0, U63),
        _info(info),
    )


def _info(info: Any) -> dict[str, str]:
    if info is None:
        return {}
    _check_properties(info)
    found: dict[str, str] = info
    return found


def _parse_join(row: list[Any]) -> Join:
    _, epoch, granted, joins, session, *holder = row
    return Join(
        _check_int("epoch", epoch, 0, U63),
        _check_int("granted", granted, 0, U64),
        _check_int("joins", joins, 0, U63),
        _check_int("session", session, 1, U64),
        _holder(holder, MODES - EXCLUSIVE_MODES),
    )


def _holder(fields: list[Any], modes: Set[str]) -> Holder:
    engine, engine_name, pid, name, mode, priority, since, properties = fields
    if type(mode) is str and mode not in MODES:
        raise LedgerVersionError(
            f"the log has a producer with the access mode {mode!r}, which this library does not "
            "know: read it with a newer version of exclusivelog"
        )
    if type(mode) is not str or mode not in modes:
        raise _InvalidError(f"access mode {mode!r} is not one of {', '.join(sorted(modes))}")
    if properties is not None:
        _check_properties(properties)
    return Holder(
        _check_text("engine id", engine),
        _check_text("engine name", engine_name),
        _check_int("pid", pid, 0, U63),
        _check_text("producer name", name),
        AccessMode(mode),
        _check_int("priority", priority, -U63 - 1, U63),
        _check_int("since", since, 0, U63),
        {} if properties is None else properties,
    )


def _parse_release(row: list[Any]) -> Release:
    _, epoch, session, reason = row
    return Release(
        _check_int("epoch", epoch, 0, U63),
        _check_int("session", session, 1, U64),
        _check_text("reason", reason),
    )


def _parse_terminate(row: list[Any]) -> Terminate:
    _, epoch, granted = row
    return Terminate(_check_int("epoch", epoch, 0, U63), _check_int("granted", granted, 0, U64))


PARSERS: dict[str, tuple[Callable[[list[Any]], Parsed], int]] = {
    "f": (_parse_frame, 13),
    "e": (_parse_packed, 5),
    "ea": (_parse_packed, 5),
    "s": (_parse_shared, 11),
    "g": (_parse_grant, 14),
    "p": (_parse_pass, 14),
    "ga": (_parse_announcing, 15),
    "pa": (_parse_announcing, 15),
    "n": (_parse_announce, 6),
    "j": (_parse_join, 13),
    "r": (_parse_release, 4),
    "t": (_parse_terminate, 3),
}
MODES = frozenset(mode.value for mode in AccessMode)


# ---- fields ------------------------------------------------------------------------------


def _check_int(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _InvalidError(f"{name}={value!r} is not an int of {least} to {most}")
    return value


def _check_text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise _InvalidError(f"{name}={value!r} is not a str")
    return value


def _check_properties(value: Any) -> None:
    if type(value) is not dict or not value:
        raise _InvalidError("properties are not a map, or an empty one")
    if {*map(type, value), *map(type, value.values())} != {str}:
        raise _InvalidError("properties do not map str to str")


def _column(
    name: str, values: Any, count: int, check: Callable[[Sequence[Any]], bool]
) -> Sequence[Any]:
    if type(values) is not list or len(values) != count or not check(values):
        raise _InvalidError(f"{name} are not {count} elements of the right type and size")
    return values


def _nothing_or(
    name: str, values: Any, count: int, check: Callable[[Sequence[Any]], bool]
) -> Sequence[Any]:
    if values is None:
        return (None,) * count
    column = _column(name, values, count, check)
    if column.count(None) == count:
        raise _InvalidError(f"{name} are all nil, and not left out")
    return column


def _same_or(
    name: str, values: Any, count: int, kind: type, check: Callable[[Sequence[Any]], bool]
) -> Sequence[Any]:
    if type(values) is kind:
        return [*_column(name, [values], 1, check)] * count
    column = _column(name, values, count, check)
    if column.count(column[0]) == count:
        raise _InvalidError(f"{name} are all the same, and not written once")
    return column


def _sequences(values: Any, count: int) -> Sequence[int]:
    if type(values) is int:
        _check_int("sequence id", values, -U63 - 1, U63 - count + 1)
        return range(values, values + count)
    column = _column("sequence ids", values, count, _are_i64)
    if type(_counted_or_all(list(column))) is int:
        raise _InvalidError("sequence ids count up, and are not written once")
    return column


def _properties(values: Any, count: int) -> Sequence[dict[str, str]]:
    column = _nothing_or("properties", values, count, _are_properties)
    return [each or {} for each in column]


NOTHING = type(None)


def _are_bytes(values: Sequence[Any]) -> bool:
    return {*map(type, values)} <= {bytes, NOTHING}


def _are_texts(values: Sequence[Any]) -> bool:
    return {*map(type, values)} == {str}


def _are_i64(values: Sequence[Any]) -> bool:
    return {*map(type, values)} == {int} and min(values) >= -U63 - 1 and max(values) <= U63


def _are_times(values: Sequence[Any]) -> bool:
    there = [value for value in values if value is not None]
    return not there or _are_i64(there)


def _are_properties(values: Sequence[Any]) -> bool:
    for each in itertools.filterfalse(lambda value: value is None, values):
        _check_properties(each)
    return True
