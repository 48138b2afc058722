"""The records of an ordered log as bytes: every field comes back, and nothing else does.

All readers of a log must decide alike which records count. So a record has one encoding, and bytes
that no writer has made are foreign or an error, never another record (rules J1, G9).
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.cluster.frames import (
    MAX_BYTES,
    Announce,
    Content,
    Frame,
    Grant,
    Holder,
    Join,
    Packed,
    Parsed,
    Release,
    Terminate,
    decode,
    encode,
    split,
)
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError, UnsupportedError
from exclusivelog.types import AccessMode
from testing.patience import PATIENCE

pytestmark = [pytest.mark.once, pytest.mark.rule("J1")]

# ---- what there can be -------------------------------------------------------------------

u63 = st.integers(0, 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
binary = st.none() | st.binary(max_size=40)
text = st.text(st.characters(codec="utf-8"), max_size=10)
properties = st.dictionaries(text, text, max_size=3)
contents = st.builds(Content, binary, binary, properties, st.none() | i64, i64, text, i64)
counted = st.builds(
    lambda first, count: tuple(
        [Content(b"x", None, {}, None, 7, "p", first + index) for index in range(count)]
    ),
    st.integers(-5, 2**63 - 20),
    st.integers(1, 12),
)
frames = st.builds(
    Frame,
    epoch=u63,
    session=u64,
    first=st.integers(0, 2**60),
    contents=st.lists(contents, min_size=1, max_size=6).map(tuple) | counted,
)
copies = st.builds(
    lambda frame, gap, source: Frame(
        frame.epoch, frame.session, frame.first, frame.contents, min(gap, frame.first), source
    ),
    frames,
    u63,
    text,
)
holders = st.builds(
    Holder, text, text, u63, text, st.sampled_from(list(AccessMode)[1:]), i64, u63, properties
)
members = st.builds(Holder, text, text, u63, text, st.just(AccessMode.SHARED), i64, u63, properties)
grants = st.builds(
    Grant,
    epoch=st.integers(1, 2**63 - 1),
    first=u63,
    session=st.integers(1, 2**64 - 1),
    holder=holders,
    continues=u64,
    joins=u63,
)
joins = st.builds(Join, u63, u64, u63, st.integers(1, 2**64 - 1), members)
shared = st.builds(
    Frame,
    epoch=u63,
    session=st.integers(1, 2**64 - 1),
    first=st.just(0),
    contents=st.lists(contents, min_size=1, max_size=6).map(tuple) | counted,
    number=st.integers(1, 2**63 - 1),
)
releases = st.builds(Release, u63, st.integers(1, 2**64 - 1), text)
terminations = st.builds(Terminate, u63, u64)


def make_packed(epoch: int, session: int, first: int, messages: list[Content]) -> Packed:
    """A frame as the compiled writer makes it; sequence ids rise."""
    appender = _core.Appender(messages[0].producer_name.encode(), -1, 3, 1 << 20)
    for n, each in enumerate(messages):
        tags = msgpack.packb(each.properties) if each.properties else None
        appender.add(each.value, each.key, tags, each.event_time, 2 * n)
    entries, offset = [], first
    for batch in appender.take():
        entries += [data for _, data in batch.stamp(0, offset, epoch, session, 7)]
        offset += batch.count
    return Packed(epoch, session, first, entries)


packed_frames = st.builds(
    make_packed,
    st.integers(1, 2**63 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**60),
    st.lists(contents, min_size=1, max_size=8),
)
records = frames | copies | shared | grants | joins | releases | terminations | packed_frames

SMALL = Frame(3, 4, 5, (Content(b"value", b"key", {"a": "b"}, 6, 7, "p", 8),))


def decoded(data: bytes) -> Parsed | None:
    """What it decodes to; None if it is foreign or refused."""
    try:
        return decode(data)
    except (LedgerCorruptedError, LedgerVersionError):
        return None


def packed(row: Any, **options: Any) -> bytes:
    """Any row as a record whose checksum holds."""
    body = msgpack.packb(row, **options)
    return summed(body)


def summed(body: bytes) -> bytes:
    head = b"XLO\x01"
    return head + struct.pack("<I", _core.crc32c(head + body)) + body


def row_of(record: Parsed) -> list[Any]:
    row: list[Any] = msgpack.unpackb(encode(record)[8:])
    return row


# ---- there and back ----------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(contents, min_size=1, max_size=8))
def test_a_packed_frame_has_what_its_writer_was_given(messages: list[Content]) -> None:
    frame = decode(encode(make_packed(3, 4, 5, messages)))
    assert isinstance(frame, Packed)
    assert [each[:4] for each in frame.contents] == [each[:4] for each in messages]
    assert [each.sequence_id for each in frame.contents] == [2 * n for n in range(len(messages))]
    assert (frame.end, frame.published) == (5 + len(messages), 7)
    assert frame.sequences() == {messages[0].producer_name: 2 * len(messages) - 2}


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(records)
def test_every_field_comes_back(record: Parsed) -> None:
    data = encode(record)
    again = decode(data)
    assert again == record
    assert again is not None
    assert encode(again) == data


NONES = Content(None, None, {}, None, 0, "", 0)


@pytest.mark.parametrize(
    "other",
    [
        NONES._replace(value=b""),
        NONES._replace(key=b""),
        NONES._replace(event_time=0),
        NONES._replace(properties={"": ""}),
        NONES._replace(producer_name="p"),
        NONES._replace(publish_time=-1),
        NONES._replace(sequence_id=1),
    ],
)
def test_nothing_and_empty_differ(other: Content) -> None:
    """Also beside one another in one frame, where columns are shared."""
    for contents in ((NONES, other), (other, NONES), (other,), (NONES, NONES, other)):
        frame = decode(encode(Frame(1, 1, 0, contents)))
        assert isinstance(frame, Frame)
        assert [[*each] for each in frame.contents] == [[*each] for each in contents]


def test_a_message_of_a_log_comes_back_as_it_was(engine: xl.Engine) -> None:
    topic = engine.topic("orders")
    with topic.producer("exclusive", name="first") as producer:
        producer.send(b"", key=b"", properties={"a": "ä"}, event_time=0, sequence_id=9)
        producer.send(None, key="k")
    with topic.reader(start="earliest") as reader:
        messages = [reader.read_next(timeout=PATIENCE) for _ in range(2)]
    frame = Frame(messages[0].epoch, 1, 0, tuple(map(Content.of, messages)))
    assert decode(encode(frame)) == frame
    assert frame.contents[0][:4] == (b"", b"", {"a": "ä"}, 0)
    assert frame.contents[1][:4] == (None, b"k", {}, None)
    assert [each.sequence_id for each in frame.contents] == [9, 10]


# ---- bytes that no writer has made -------------------------------------------------------


@pytest.mark.long
@settings(deadline=None)
@given(records, st.data())
def test_flipped_bits_are_noticed(record: Parsed, data: st.DataObject) -> None:
    sound = encode(record)
    at = data.draw(st.integers(0, 8 * len(sound) - 1))
    flipped = bytearray(sound)
    flipped[at // 8] ^= 1 << at % 8
    assert decoded(bytes(flipped)) is None


def test_each_bit_of_a_record_is_checked() -> None:
    sound = encode(SMALL)
    for at in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[at // 8] ^= 1 << at % 8
        assert decoded(bytes(flipped)) is None, at


def test_each_cut_of_a_record_is_noticed() -> None:
    sound = encode(SMALL)
    assert all(decoded(sound[:length]) is None for length in range(len(sound)))
    assert decoded(sound + b"\0") is None


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60))
@example(b"\x91" * 3000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xc7\x08\xff" + bytes(8))
def test_hand_made_bytes_never_crash_a_reader(body: bytes) -> None:
    """With a checksum that holds, and with none."""
    for data in (body, b"XLO" + body, b"XLO\x01" + body, summed(body)):
        record = decoded(data)
        assert record is None or encode(record) == data


values = st.recursive(
    st.none()
    | st.booleans()
    | i64
    | u64
    | st.floats()
    | text
    | st.binary(max_size=4)
    | st.sampled_from(["f", "g", "r", "e", "exclusive", "shared"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.long
@settings(max_examples=600, deadline=None)
@given(records, values, st.data())
def test_hand_made_fields_are_refused_or_mean_what_they_say(
    record: Parsed, value: Any, data: st.DataObject
) -> None:
    row = row_of(record)
    row[data.draw(st.integers(0, len(row) - 1))] = value
    made = packed(row)
    again = decoded(made)
    assert again is None or encode(again) == made


SOUND = make_packed(3, 4, 5, [SMALL.contents[0]] * 5)


@pytest.mark.parametrize(
    "entries",
    [
        SOUND.entries[:0],
        SOUND.entries[1:],
        SOUND.entries[::-1],
        SOUND.entries * 2,
        make_packed(2, 4, 5, [SMALL.contents[0]]).entries,
        make_packed(3, 5, 5, [SMALL.contents[0]]).entries,
        [SOUND.entries[0][:-1]],
        [b""],
        ["text"],
        None,
    ],
)
def test_entries_that_are_not_of_their_frame_are_an_error(entries: Any) -> None:
    assert decode(packed(["e", 3, 4, 5, list(SOUND.entries)])) == SOUND
    with pytest.raises(LedgerCorruptedError, match="in the ordered log is invalid"):
        decode(packed(["e", 3, 4, 5, entries and list(entries)]))


FRAME, GRANT = row_of(SMALL), row_of(Grant(1, 0, 1, Holder("e", "n", 1, "p", AccessMode.EXCLUSIVE)))
SHARED_FRAME = row_of(Frame(0, 4, 0, SMALL.contents, number=1))
PASS = row_of(
    Grant(2, 0, 5, Holder("e", "n", 1, "p", AccessMode.WAIT_FOR_EXCLUSIVE), by=1, waiter=9)
)
ANNOUNCING = row_of(
    Grant(1, 0, 1, Holder("e", "n", 1, "p", AccessMode.EXCLUSIVE), announce={"a": "b"})
)
ANNOUNCE = row_of(Announce(1, 1, 1, 5, {"a": "b"}))
JOIN = row_of(Join(0, 0, 0, 1, Holder("e", "n", 1, "p", AccessMode.SHARED)))


OWNER = Holder("e", "n", 1, "p", AccessMode.EXCLUSIVE)
WAITER = Holder("e", "n", 1, "p", AccessMode.WAIT_FOR_EXCLUSIVE, properties={"a": "b"})


@pytest.mark.parametrize(
    "record",
    [
        Announce(1, 2, 3, 4, {"a": "b"}),
        Announce(1, 2, 3, 4, {}),
        Grant(1, 0, 2, OWNER, announce={}),
        Grant(1, 0, 3, OWNER, continues=2, announce={"a": "b"}),
        Grant(2, 0, 3, WAITER, by=2, waiter=9),
        Grant(2, 0, 3, WAITER, by=2, waiter=9, announce={"a": "b"}),
        Packed(3, 4, 5, make_packed(3, 4, 5, [SMALL.contents[0]] * 2).entries, announces=True),
    ],
    ids=str,
)
def test_what_owners_pass_on_and_announce_comes_back(record: Parsed) -> None:
    assert decode(encode(record)) == record


OUT_OF_BOUNDS: list[tuple[list[Any], int, tuple[Any, ...]]] = [
    (FRAME, 1, (-1, 2**63, True, 1.0)),
    (FRAME, 2, (None,)),
    (ANNOUNCING, 1, (0, 2**63)),
    (ANNOUNCING, 14, ({}, {"a": 1}, 7, [])),
    (ANNOUNCE, 1, (0, 2**63)),
    (ANNOUNCE, 3, (0, True)),
    (ANNOUNCE, 5, ({}, {1: "a"}, b"x")),
    (PASS, 1, (0, 2**63)),
    (PASS, 5, (0, -1, True)),
    (PASS, 6, (-1, 2**63, None)),
    (PASS, 7, (1,)),
    (FRAME, 3, (2**63 - 1,)),
    (FRAME, 4, (1,)),
    (FRAME, 5, (b"x",)),
    (FRAME, 6, (b"p", ["p"])),
    (FRAME, 7, (2**63, [8])),
    (FRAME, 8, (None, True)),
    (FRAME, 9, ([], ["text"], [b"x", b"y"])),
    (FRAME, 10, ([None], [1])),
    (FRAME, 11, ([2**63], [True])),
    (FRAME, 12, ([{}], [{"a": b"b"}], [["a"]])),
    (GRANT, 1, (0,)),
    (GRANT, 3, (0,)),
    (GRANT, 10, ("shared", 1, ["exclusive"])),
    (GRANT, 13, ({},)),
    (GRANT, 8, (-1,)),
    (GRANT, 5, (-1,)),
    (SHARED_FRAME, 1, (-1,)),
    (SHARED_FRAME, 2, (0,)),
    (SHARED_FRAME, 3, (0,)),
    (SHARED_FRAME, 4, (b"p",)),
    (SHARED_FRAME, 7, ([],)),
    (JOIN, 1, (-1,)),
    (JOIN, 2, (-1,)),
    (JOIN, 3, (-1,)),
    (JOIN, 4, (0,)),
    (JOIN, 9, ("exclusive", None)),
    (JOIN, 12, ({},)),
]


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [(row, field, value) for row, field, values in OUT_OF_BOUNDS for value in values],
)
def test_a_field_that_is_out_of_bounds_is_an_error(row: list[Any], field: int, value: Any) -> None:
    made = [*row]
    made[field] = value
    with pytest.raises(LedgerCorruptedError, match="in the ordered log is invalid"):
        decode(packed(made))


def test_a_record_has_one_encoding() -> None:
    """The same row in a longer form of msgpack is no record: two readers could differ on it."""
    body = msgpack.packb(FRAME)
    assert decode(summed(body)) == SMALL
    longer = body.replace(b"\xc4\x05value", b"\xc5\x00\x05value")
    assert len(longer) == len(body) + 1
    with pytest.raises(LedgerCorruptedError, match="shortest form"):
        decode(summed(longer))


@pytest.mark.parametrize("data", [b"", b"XL", b"hello", b"{}", b"xlo\x01" + bytes(20)])
def test_bytes_of_other_programs_are_foreign(data: bytes) -> None:
    assert decode(data) is None


def test_a_newer_version_stops_a_reader() -> None:
    data = bytearray(encode(SMALL))
    data[3] = 2
    with pytest.raises(LedgerVersionError, match="version 2"):
        decode(bytes(data))


@pytest.mark.parametrize(("row", "field"), [(GRANT, 10), (JOIN, 9)])
def test_an_access_mode_of_a_newer_version_stops_a_reader(row: list[Any], field: int) -> None:
    made = [*row]
    made[field] = "exclusive_with_lease"
    with pytest.raises(LedgerVersionError, match=r"'exclusive_with_lease'.*newer version"):
        decode(packed(made))


# ---- sizes -------------------------------------------------------------------------------


def of(*values: bytes) -> Frame:
    contents = [Content(value, None, {}, None, 0, "p", n) for n, value in enumerate(values)]
    return Frame(1, 2, 10, tuple(contents))


def test_a_record_that_is_too_large_is_not_written() -> None:
    with pytest.raises(ValueError, match=str(MAX_BYTES)):
        encode(of(bytes(MAX_BYTES)))
    assert len(encode(of(bytes(MAX_BYTES - 100)))) <= MAX_BYTES


@pytest.mark.parametrize("field", [{"epoch": -1}, {"first": 2**63}, {"contents": ()}, {"gap": 1}])
def test_an_invalid_record_is_not_written(field: dict[str, Any]) -> None:
    fields = {"epoch": 1, "session": 1, "first": 0, "contents": SMALL.contents, **field}
    with pytest.raises(ValueError, match=r"Frame|contents"):
        encode(Frame(**fields))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=30), st.integers(150, 400))
def test_a_large_frame_is_split_into_parts_that_follow_each_other(
    values: list[bytes], most: int
) -> None:
    whole = of(*values)
    parts = list(split(whole, most))
    assert [decode(data) for _, data in parts] == [part for part, _ in parts]
    assert all(len(data) <= most for _, data in parts)
    first = whole.first
    for part, _ in parts:
        assert (part.first, part.epoch, part.session) == (first, whole.epoch, whole.session)
        first = part.end
    assert [c for part, _ in parts for c in part.contents] == list(whole.contents)


def test_only_the_first_part_of_a_copied_frame_has_its_gap() -> None:
    whole = Frame(1, 0, 10, of(bytes(90), bytes(90)).contents, gap=4, source="ledger")
    assert [(part.first, part.gap, part.source) for part, _ in split(whole, 200)] == [
        (10, 4, "ledger"),
        (11, 0, "ledger"),
    ]


def test_a_message_that_fits_into_no_record_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"the message at offset 11 .* 200 bytes"):
        list(split(of(b"a", bytes(300)), 200))
