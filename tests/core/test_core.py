"""The compiled core: the entry, the topic's row, the queue's selection, the words that processes
share."""

from __future__ import annotations

import contextlib
import fractions
import itertools
import mmap
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings

from exclusivelog import _core
from exclusivelog.local import records
from exclusivelog.local.records import U64
from exclusivelog.local.storage.tables import queue_key
from testing.children import child, finish, line, script, tell
from testing.entries import FOOTER, encode, examine, flipped, refooted, values
from testing.processes import PATIENCE, until

pytestmark = pytest.mark.once

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
MAYBE_BYTES = st.none() | st.binary(max_size=40)
SLOW = [HealthCheck.too_slow]  # so is a busy machine

# ---- entries -----------------------------------------------------------------------------

properties = st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
rows = st.lists(
    st.tuples(MAYBE_BYTES, MAYBE_BYTES, properties, st.none() | INT64, st.integers(1, 3)),
    min_size=1,
    max_size=40,
)


def everything() -> bytes:
    """An entry with every section, of several messages."""
    packed = msgpack.packb({"a": "b"})
    return encode(
        [
            (b"first", b"k", packed, 1, 5),
            (None, None, None, None, 9),
            (b"", b"", None, -1, 10),
            (b"\x00" * 9, b"key", packed, 0, 2**62),
        ],
        name="producteur-é".encode(),
        base=1000,
        time=1_700_000_000_000,
    )


def timed(data: bytes, times: list[int]) -> bytes:
    """The entry with a section of publish times, in ms after the first, as packing makes it."""
    name_length, count = (FOOTER.unpack(data[-FOOTER.size :])[i] for i in (8, 6))
    assert len(times) == count
    section = b"".join(ms.to_bytes(4, "little") for ms in times)
    section += bytes(-len(section) % 8)
    at = len(data) - FOOTER.size - (name_length + 7) // 8 * 8
    flags = FOOTER.unpack(data[-FOOTER.size :])[7]
    return refooted(data[:at] + section + data[at:], flags=flags | 32)


@pytest.mark.long
@given(
    rows=rows,
    name=st.text(max_size=30),
    base=st.integers(0, 2**62),
    epoch=UINT64,
    session=UINT64,
    published=st.integers(-(2**53), 2**53),
    first=st.integers(-1, 2**60),
)
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_an_entry_gives_back_what_went_in(
    rows, name, base, epoch, session, published, first
) -> None:
    appender = _core.Appender(name.encode(), first, 1 << 20, 1 << 30)
    expected, sequence = [], first
    for value, key, props, event, step in rows:
        sequence += step
        packed = None if props is None else msgpack.packb(props)
        appender.add(value, key, packed, event, sequence)
        expected.append((value, key, props or {}, event, sequence))
    (batch,) = appender.take()
    ((last, data),) = batch.stamp(1, base, epoch, session, published)

    entry = _core.Entry(data)

    assert last == base + len(rows) - 1
    found = (entry.base_offset, entry.count, entry.epoch, entry.session, entry.publish_time)
    assert found == (base, len(rows), epoch, session, published)
    seen = [entry.message(i) for i in range(entry.count)]
    assert [(m.value, m.key, m.properties, m.event_time, m.sequence_id) for m in seen] == expected
    assert [m.offset for m in seen] == list(range(base, base + len(rows)))
    assert {m.producer_name for m in seen} == {name}


@given(
    gaps=st.lists(st.integers(0, 3) | st.integers(0, 2**26), min_size=1, max_size=30),
    published=st.integers(-(2**53), 2**53),
    name=st.binary(max_size=9).map(bytes.hex),
)
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
def test_g4_an_entry_keeps_the_publish_time_of_each_message(gaps, published, name) -> None:
    times = list(itertools.accumulate([0, *gaps[1:]]))
    plain = encode(
        [(b"%d" % n, None, None, None, None) for n in times], name.encode(), base=50, time=published
    )
    entry = _core.Entry(timed(plain, times))
    expected = [published + ms for ms in times]
    messages = [entry.message(i) for i in range(entry.count)]
    assert [m.publish_time for m in messages] == expected
    assert [(m.value, m.producer_name) for m in messages] == [(b"%d" % n, name) for n in times]
    assert entry.has_publish_times
    assert (entry.publish_time, entry.last_publish_time) == (expected[0], expected[-1])
    for moment in {at + shift for at in expected for shift in (-1, 0, 1)}:
        found = 50 + sum(at < moment for at in expected)
        assert entry.first_published_at(moment) == found
    assert not _core.Entry(plain).has_publish_times
    assert _core.Entry(plain).last_publish_time == published


@given(
    items=st.lists(MAYBE_BYTES, min_size=1, max_size=60),
    most=st.integers(1, 20),
    size=st.integers(1, 100),
)
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
def test_a_large_batch_is_cut_into_entries_that_join_seamlessly(items, most, size) -> None:
    appender = _core.Appender(b"p", 9, most, size)
    made = appender.make_batch(_core.strings(items), _core.strings(items), None, None)
    assert appender.add_batch(made) is not None
    (batch,) = appender.take()

    entries = [(last, _core.Entry(data)) for last, data in batch.stamp(1, 100, 1, 1, 0)]

    messages = [e.message(i) for _, e in entries for i in range(e.count)]
    assert [m.value for m in messages] == items
    assert [m.key for m in messages] == items
    assert [m.offset for m in messages] == list(range(100, 100 + len(items)))
    assert [m.sequence_id for m in messages] == list(range(10, 10 + len(items)))
    for last, entry in entries:
        assert last == entry.base_offset + entry.count - 1
        assert entry.count <= most
        assert (
            entry.count == 1
            or sum(len(entry.message(i).value or b"") for i in range(entry.count)) <= size
        )


def test_g9_every_flipped_bit_of_an_entry_is_found() -> None:
    whole = everything()
    for data in (whole, timed(whole, [0, 1, 1, 9]), values([b"x"]), values([b"abc" * 50, None])):
        for bit in range(8 * len(data)):
            with pytest.raises(ValueError):
                _core.Entry(flipped(data, bit))


def test_g9_an_entry_that_is_cut_off_or_shifted_is_found() -> None:
    data = timed(everything(), [0, 1, 1, 9])
    for size in range(len(data)):
        with pytest.raises(ValueError):
            _core.Entry(data[:size])
        with pytest.raises(ValueError):
            _core.Entry(data[len(data) - size :])
    for more in (b"\x00" * 8, data):
        with pytest.raises(ValueError):
            _core.Entry(more + data)
        if more is not data:
            with pytest.raises(ValueError):
                _core.Entry(data + more)


def test_the_checksum_is_the_crc32c_of_the_whole_entry() -> None:
    data = everything()
    assert refooted(data) == data
    assert FOOTER.size == _core.FOOTER_BYTES


@given(st.binary(max_size=50_000), st.integers(0, 9))
@settings(deadline=None, suppress_health_check=SLOW)
def test_the_core_s_crc32c_is_google_s(data: bytes, start: int) -> None:
    part = memoryview(data)[start:]
    assert _core.crc32c(part) == google_crc32c.value(bytes(part))


@pytest.mark.parametrize("size", [0, 1, 503, 504, 8159, 8160, 8192, 8193, 130_000, 1 << 20])
def test_the_core_s_crc32c_of_large_buffers_is_google_s(size: int) -> None:
    data = bytes(number * number % 251 for number in range(size))
    assert _core.crc32c(data) == google_crc32c.value(data)


def test_the_core_says_how_checksums_are_computed() -> None:
    """A processor without the instruction has a slow way, and the log tells of it."""
    has_it = {"x86_64": " sse4_2 ", "aarch64": " crc32 "}.get(platform.machine(), "none")
    facts = Path("/proc/cpuinfo").read_text().replace("\n", " ")
    assert (_core.CRC_KIND != "tables") == (has_it in facts)
    wide = platform.machine() == "x86_64" and all(
        f" {flag} " in facts for flag in ("avx512f", "vpclmulqdq")
    )
    assert (_core.CRC_KIND == "avx512") == wide


def test_an_entry_asked_for_what_it_has_not_says_so() -> None:
    entry = _core.Entry(values([b"a", b"b"]))
    with pytest.raises(IndexError):
        entry.message(2)
    with pytest.raises(ValueError, match="name="):
        entry.column("nothing")
    with pytest.raises(ValueError, match="name="):
        entry.numbers("event_time")
    with pytest.raises((IndexError, ValueError)):
        entry.numbers("offset", 3)


# What is tried on hostile entries runs in a child: a crash of the interpreter would be the
# worst answer of all. Each either raises ValueError or can be looked at from end to end.
HOSTILE = """
    import random, resource, sys
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    from exclusivelog import _core
    from testing.entries import FOOTER, encode, examine, flipped, refooted, values
    from tests.core.test_core import everything, timed

    counts = {True: 0, False: 0}

    def attempt(data):
        try:
            examine(_core.Entry(bytes(data)))
        except ValueError:
            counts[False] += 1
        else:
            counts[True] += 1

    SEED = int(sys.argv[1])
    dice = random.Random(SEED)
    samples = [everything(), values([b"x"]), values([b"abc" * 50, None, b""]), values([None] * 9),
               timed(everything(), [0, 1, 1, 9])]
"""


def hostile(source: str, seed: int = 0) -> tuple[int, int]:
    """(readable, refused) of the entries that `source` gives to `attempt`."""
    output = finish(script(HOSTILE, source, "print(counts[True], counts[False])"), seed)
    readable, refused = output.split()
    return int(readable), int(refused)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_fuzz_arbitrary_bytes_are_refused(seed) -> None:
    readable, refused = hostile(
        """
        for size in [*range(200), *range(200, 2000, 8)]:
            for _ in range(20):
                attempt(dice.randbytes(size))
                attempt(bytes(size))
        """,
        seed,
    )
    assert readable == 0
    assert refused == 17000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_fuzz_mutated_entries_are_refused(seed) -> None:
    readable, refused = hostile(
        """
        for _ in range(20000):
            data = bytearray(dice.choice(samples))
            for _ in range(dice.choice([1, 1, 2, 5, 20])):
                data[dice.randrange(len(data))] ^= dice.randrange(1, 256)
            attempt(data) if bytes(data) not in samples else None
        """,
        seed,
    )
    assert readable == 0
    assert refused > 19000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_fuzz_mutated_entries_whose_checksum_holds_do_no_harm(seed) -> None:
    _, refused = hostile(
        """
        for _ in range(15000):
            data = bytearray(dice.choice(samples))
            for _ in range(dice.choice([1, 1, 2, 5])):
                at = dice.randrange(len(data) - 8)
                data[at] = dice.choice([0, 1, 7, 8, 127, 128, 255, dice.randrange(256)])
            if dice.random() < 0.2:
                at = 8 * dice.randrange(len(data) // 8 - 6)
                data[at:at] = dice.randbytes(8 * dice.randrange(4))
            attempt(refooted(bytes(data), magic=0x01454C58))
        """,
        seed,
    )
    assert refused > 1000


@pytest.mark.long
def test_fuzz_hostile_footers_whose_checksum_holds_do_no_harm() -> None:
    _, refused = hostile(
        """
        counts_tried = [0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 2**16, 2**28, 2**29, 2**30 - 1,
                        2**30, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1]
        for data in samples:
            for count in counts_tried:
                for flags in range(64):
                    for length in (0, 1, 8, 13, 255, 2**16 - 1):
                        attempt(refooted(data, count=count, flags=flags, name_length=length))
            for bit in range(16):
                attempt(refooted(data, flags=1 << bit))
            for offset in (2**64 - 1, 2**63, 2**64 - 4):
                attempt(refooted(data, base_offset=offset, epoch=offset, session=offset))
            for number in (-2**63, 2**63 - 1, -1):
                attempt(refooted(data, base_sequence=number, publish_time=number))
        """
    )
    assert refused > 30000


@pytest.mark.long
def test_fuzz_hostile_offsets_whose_checksum_holds_do_no_harm() -> None:
    hostile(
        """
        for data in samples:
            for at in range(0, len(data) - FOOTER.size, 4):
                for number in (0, 1, 7, 8, 9, 2**16, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1):
                    attempt(refooted(data[:at] + number.to_bytes(4, "little") + data[at + 4:]))
        """
    )


def test_objects_that_only_the_library_makes_do_no_harm_when_others_make_them() -> None:
    finish(
        """
        import exclusivelog as xl
        from exclusivelog import _core

        ASKED = {"done": (), "exception": (0,), "result": (0,), "__next__": (), "__len__": (),
                 "__repr__": (), "stamp": (0, 0, 0, 0, 0)}

        def look(thing):
            for name in dir(thing):
                try:
                    part = getattr(thing, name)
                    part(*ASKED.get(name, ())) if name in ASKED else None
                except Exception:
                    pass

        for kind in (xl.Message, xl.Receipt, _core.Entry, _core.Scan, _core.SealedEntry,
                     _core.Batch, _core.TopicRow, _core.Cursor, _core.Strings):
            try:
                thing = kind()
            except TypeError:
                continue
            look(thing)
        """
    )


def test_a_made_up_message_says_that_it_is_none() -> None:
    with pytest.raises(TypeError):
        _core.Message()
    with pytest.raises(TypeError):
        _core.Receipt()


# ---- the topic's row ---------------------------------------------------------------------


def make_row(**fields: object) -> _core.TopicRow:
    row = _core.TopicRow()
    row.name = "orders"
    for name, value in fields.items():
        setattr(row, name, value)
    return row


ROW_FIELDS = {
    "id": UINT64,
    "epoch": UINT64,
    "first_offset": UINT64,
    "next_offset": UINT64,
    "last_publish_time": INT64,
    "owner": UINT64,
    "shared": st.integers(0, 2**32 - 1),
    "waiting": st.integers(0, 2**32 - 1),
    "flags": st.integers(0, 2**32 - 1),
    "name": st.text(max_size=255),
}


@given(fields=st.fixed_dictionaries(ROW_FIELDS))
@settings(deadline=None, suppress_health_check=SLOW)
def test_a_topic_row_gives_back_what_went_in(fields) -> None:
    row = _core.TopicRow.unpack(make_row(**fields).pack())
    assert {name: getattr(row, name) for name in fields} == fields


def test_g9_every_flipped_bit_of_a_topic_row_is_found() -> None:
    data = make_row(id=7, epoch=3, next_offset=10_000, owner=5, waiting=1, name="naïve").pack()
    for bit in range(8 * len(data)):
        with pytest.raises(ValueError):
            _core.TopicRow.unpack(flipped(data, bit))
    for size in range(len(data)):
        with pytest.raises(ValueError):
            _core.TopicRow.unpack(data[:size])


def test_b2_a_topic_row_admits_its_owner_in_its_epoch_alone() -> None:
    row = make_row(owner=5, epoch=9)
    assert row.admits(5, 9)
    assert not row.admits(5, 8)
    assert not row.admits(4, 9)
    assert not row.admits(9, 5)


# ---- the queue ---------------------------------------------------------------------------

TARGET = "00000000000000ff"
texts = st.text(max_size=40)
sessions = st.builds(
    records.Session,
    id=UINT64,
    topic=st.just(7),
    engine=st.sampled_from([TARGET, "0" * 16, "f" * 16]),
    slot=st.integers(0, 511),
    pid=st.integers(0, 2**31),
    engine_name=texts,
    name=texts,
    mode=st.just("wait_for_exclusive"),
    priority=INT64 | st.integers(0, 3),
    created=UINT64 | st.integers(0, 3000),
    tie=st.integers(0, 2**32 - 1),
    since=INT64,
    claimed_epoch=st.none() | st.integers(0, 3) | UINT64,
    epoch=st.just(0),
    properties=st.dictionaries(texts, texts, max_size=20),
    settle=st.integers(0, 8640 * 10**10),
    engine_properties=st.dictionaries(texts, texts, max_size=3),
    lineage=UINT64,
    notify_on_contention=st.booleans(),
    bound_to=UINT64,
    announce=st.none() | st.dictionaries(texts, texts, max_size=2),
)
known_priorities = st.none() | st.tuples(INT64, INT64).map(lambda pair: (max(pair), min(pair)))


def queue_of(waiters: list[records.Session]) -> list[tuple[bytes, bytes]]:
    """The rows of a queue's table, in the order of their keys."""
    return sorted({queue_key(each): records.pack_session(each) for each in waiters}.items())


def delay_of(waiter: records.Session, known: tuple[int, int] | None) -> int:
    """Rule D7, spelled out once more."""
    if known is None or known[0] == known[1]:
        return waiter.settle
    share = fractions.Fraction(known[0] - waiter.priority, known[0] - known[1])
    return int(waiter.settle * min(max(share, 0), 1))


def whose_turn_it_is(
    waiters: list[records.Session],
    epoch: int,
    dead: set[str],
    now: int,
    freed: int,
    known: tuple[int, int] | None,
    target: str | None,
    until: int,
) -> tuple[Any, list[Any], list[Any], Any, int]:
    """Rules D1, D4, D7, E3 and B5, spelled out once more."""
    gone, stale, later, due = [], [], None, 0
    for waiter in sorted(waiters, key=lambda waiter: (*waiter.place, waiter.id)):
        if waiter.engine in dead:
            gone.append(waiter)
        elif waiter.claimed_epoch not in (None, epoch):
            stale.append(waiter)
        elif target is not None and waiter.engine == target:
            return waiter, gone, stale, None, 0
        elif target is not None:
            later, due = later or waiter, due or until
        else:
            delay = delay_of(waiter, known)
            at = freed if waiter.created + delay <= freed else freed + delay
            return (waiter, gone, stale, None, 0) if now >= at else (None, gone, stale, waiter, at)
    return None, gone, stale, later, due


@pytest.mark.long
@given(
    waiters=st.lists(sessions, max_size=30, unique_by=lambda waiter: queue_key(waiter)),
    epoch=st.integers(0, 3),
    dead=st.sets(st.sampled_from([TARGET, "0" * 16, "f" * 16])),
    freed=st.integers(0, 2**62),
    left=st.integers(0, 2**45) | st.integers(0, 3000),
    known=known_priorities,
    target=st.none() | st.just(TARGET),
    until=st.integers(1, 2**62),
)
@settings(deadline=None, suppress_health_check=SLOW)
def test_d1_d4_d7_the_selection_is_as_the_rules_say(
    waiters, epoch, dead, freed, left, known, target, until
) -> None:
    rows = [*queue_of(waiters), (U64.pack(8) + bytes(28), b"another topic's")]
    found = _core.select(
        rows,
        7,
        epoch,
        lambda slot, engine: engine not in dead,
        now=freed + left,
        freed=freed,
        known=known,
        target=None if target is None else target.encode(),
        until=until,
    )
    unpacked = [
        None if row is None else records.unpack_session(row)
        for row in (found.winner, found.retry_waiter)
    ]
    gone, stale = (list(map(records.unpack_session, each)) for each in (found.dead, found.stale))
    assert (unpacked[0], gone, stale, unpacked[1], found.retry_at) == whose_turn_it_is(
        waiters, epoch, dead, freed + left, freed, known, target, until
    )


@given(
    priority=INT64,
    settle=st.integers(0, 2**64 - 1),
    known=known_priorities,
    created=UINT64,
    freed=UINT64,
)
@settings(deadline=None, suppress_health_check=SLOW)
def test_d7_delays_are_exact_at_the_ends_of_64_bits(
    priority, settle, known, created, freed
) -> None:
    waiter = SimpleNamespace(priority=priority, settle=settle)
    delay = _core.delay(priority, settle, known)
    assert delay == delay_of(waiter, known)
    later = min(freed + delay, 2**64 - 1)
    expected = freed if created + delay <= freed else later
    assert _core.eligible_at(created, delay, freed) == expected


def select(rows, **facts) -> _core.Selection:
    given = {"now": 0, "freed": 0, "known": None, "target": None, "until": 0, **facts}
    return _core.select(rows, 7, 0, lambda slot, engine: True, **given)


@pytest.mark.long
@given(waiter=sessions, data=st.data())
@settings(deadline=None, suppress_health_check=SLOW)
def test_g9_a_damaged_waiter_is_refused_never_misread(waiter, data) -> None:
    """Cut off anywhere it is none; with any byte changed it is none, or it is read as msgpack
    reads it."""
    [(key, row)] = queue_of([waiter])
    cut = data.draw(st.integers(0, len(row) - 1))
    with contextlib.suppress(ValueError):  # the part that was cut off may not be needed
        select([(key, row[:cut])], now=2**63)
        unpacker = msgpack.Unpacker()
        unpacker.feed(row[:cut])
        assert unpacker.read_array_header() > 15
        for _ in range(16):
            unpacker.skip()
    at, value = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, 255))
    changed = row[:at] + bytes([value]) + row[at + 1 :]
    with contextlib.suppress(ValueError):
        assert select([(key, changed)], now=2**63).stale in ([], [changed])


NO_WAITERS = [
    b"",
    b"\xc0",
    b"\xc1",
    b"\xdc",
    b"\xdc\x00\x13",
    b"\x93\x01\x02\x03",
    b"\xdc\x00\x0f" + bytes(15),
    b"\xdc\x00\x13" + bytes(19),
    b"\xdc\x00\x13" + b"\x91" * 300,
    b"\xdc\x00\x13" + b"\xdf\xff\xff\xff\xff" * 19,
    b"\xdc\x00\x13" + b"\xc6\xff\xff\xff\xff" * 19,
]


@pytest.mark.parametrize("row", NO_WAITERS)
def test_g9_rows_that_are_no_waiters_are_refused(row: bytes) -> None:
    for key in (U64.pack(7) + bytes(28), U64.pack(7), U64.pack(7) + bytes(29)):
        with pytest.raises(ValueError, match="it is no waiter"):
            select([(key, row)])


def test_d1_rows_in_another_order_than_the_queue_s_are_refused() -> None:
    """The order of the keys is the order of promotion: rows in any other order are refused."""
    waiters = [
        records.Session(
            number, 7, "0" * 16, 0, 1, "e", "n", "wait_for_exclusive", 0, number, 0, 0, 5
        )
        for number in range(3)
    ]
    rows = queue_of(waiters)
    assert len(select(rows).stale) == 3
    for wrong in (rows[::-1], [rows[0], rows[0]], [rows[1], rows[0]]):
        with pytest.raises(ValueError, match="not in its place"):
            select(wrong)
    assert select([]).winner is None
    assert select([(b"short", b"")]).winner is None


# ---- words that processes share ----------------------------------------------------------


@pytest.fixture
def words() -> _core.SharedWords:
    return _core.SharedWords(bytearray(64))


def test_words_are_read_and_changed(words) -> None:
    words.store(4, 7)
    assert words.load(4) == 7
    assert words.add(4, 3) == 10
    assert words.add(4, -11) == 2**32 - 1
    assert words.add(4, 1) == 0
    assert words.mark(4, 0x80000001) == 0x80000001
    assert words.mark(4, 2) == 0x80000003
    assert not words.swap(4, 1, 5)
    assert words.swap(4, 0x80000003, 5)
    assert words.load(4) == 5
    words.store64(8, 2**64 - 1)
    assert words.load64(8) == 2**64 - 1
    assert (words.load(8), words.load(0), words.load(16)) == (2**32 - 1, 0, 0)


@pytest.mark.parametrize("offset", [-4, 1, 2, 62, 64, 68, 2**40])
def test_words_outside_their_mapping_are_refused(words, offset) -> None:
    calls = [
        lambda: words.load(offset),
        lambda: words.store(offset, 1),
        lambda: words.add(offset, 1),
        lambda: words.swap(offset, 0, 1),
        lambda: words.mark(offset, 1),
        lambda: words.wake(offset),
        lambda: words.wait(offset, 0, 0),
        lambda: words.watch(offset, 0, 0),
        lambda: words.wait_any([offset], [0], 0),
        lambda: words.load64(offset),
        lambda: words.store64(offset, 1),
        lambda: _core.Hold(words, offset, 8, 4),
        lambda: _core.Hold(words, 0, offset, 4),
    ]
    for call in calls:
        with pytest.raises(IndexError):
            call()
    for wide in (words.load64, lambda at: words.store64(at, 1)):
        with pytest.raises(IndexError):
            wide(60)
        with pytest.raises(IndexError):
            wide(4)


def test_words_need_a_writable_buffer() -> None:
    with pytest.raises(BufferError):
        _core.SharedWords(bytes(64))


FOR_LONG = int(2 * PATIENCE * 1e9)  # ns


def seconds(call) -> float:
    before = time.monotonic()
    call()
    return time.monotonic() - before


def test_a_wait_ends_at_once_when_the_word_has_changed_already(words) -> None:
    assert seconds(lambda: words.wait(0, 1, FOR_LONG)) < PATIENCE
    assert seconds(lambda: words.wait_any([0, 4], [0, 1], FOR_LONG)) < PATIENCE
    assert words.watch(0, 1, 10**10)


def test_a_wait_ends_after_its_time(words) -> None:
    assert 0.1 <= seconds(lambda: words.wait(0, 0, 10**8)) < PATIENCE
    assert 0.09 <= seconds(lambda: words.wait_any([0, 4], [0, 0], 10**8)) < PATIENCE
    assert 0.1 <= seconds(lambda: words.watch(0, 0, 10**8)) < PATIENCE
    assert not words.watch(0, 0, 10**6)


def test_a_wait_does_not_keep_other_threads_from_running(words) -> None:
    def change() -> None:
        time.sleep(0.05)
        words.store(8, 1)
        words.wake(8)

    for wait in (
        lambda: words.wait(8, 0, FOR_LONG),
        lambda: words.wait_any([0, 8], [0, 0], FOR_LONG),
        lambda: words.watch(8, 0, FOR_LONG),
    ):
        words.store(8, 0)
        thread = threading.Thread(target=change)
        thread.start()
        assert seconds(wait) < PATIENCE
        thread.join(PATIENCE)


def test_wake_counts_those_it_wakes(words) -> None:
    assert words.wake(0) == 0
    threads = [threading.Thread(target=words.wait, args=(0, 0, FOR_LONG)) for _ in range(3)]
    for thread in threads:
        thread.start()
    woken = 0

    def all_woken() -> bool:
        nonlocal woken
        woken += words.wake(0, 1)
        return woken == 3

    until(all_woken)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_now_is_the_monotonic_clock() -> None:
    before, now, after = time.monotonic_ns(), _core.now(), time.monotonic_ns()
    assert before <= now <= after


# The same words in several processes: a file that each maps.
MAPPED = """
    import mmap, os, signal, sys, time
    from exclusivelog import _core
    fd = os.open(sys.argv[1], os.O_RDWR)
    words = _core.SharedWords(mmap.mmap(fd, 4096))
"""


@pytest.fixture
def shared(tmp_path) -> Iterator[tuple[Path, _core.SharedWords]]:
    path = tmp_path / "words"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        yield path, _core.SharedWords(mmap.mmap(file.fileno(), 4096))


@pytest.mark.parametrize(
    "wait",
    ["words.wait(8, 0, FOR_LONG)", "words.wait_any([0, 4, 8], [0, 0, 0], FOR_LONG)"],
)
def test_a_wake_reaches_another_process(shared, wait) -> None:
    path, words = shared
    told = f"""
        FOR_LONG = {FOR_LONG}
        print("waiting", flush=True)
        before = time.monotonic()
        {wait}
        print(words.load(8), time.monotonic() - before, flush=True)
    """
    with child(script(MAPPED, told), path) as process:
        line(process)
        time.sleep(0.2)
        words.store(8, 5)
        words.wake(8)
        value, waited = line(process).split()
    assert value == "5"
    assert float(waited) < PATIENCE


HOLD = """
    hold = _core.Hold(words, 0, 8, 4)
    print("held", hold.tid, flush=True)
"""


def died(words: _core.SharedWords) -> bool:
    return bool(words.load(0) & _core.OWNER_DIED)


def freed(words: _core.SharedWords) -> bool:
    """Marked by the kernel, or given back in an orderly end of the interpreter."""
    return not words.load(0) & _core.HELD_BY


def test_c2_a_held_word_is_marked_when_its_process_is_killed(shared) -> None:
    path, words = shared
    with child(script(MAPPED, HOLD, "input()"), path) as process:
        _, tid = line(process).split()
        assert words.load(0) & _core.HELD_BY == int(tid)
        assert not died(words)
        process.send_signal(signal.SIGKILL)
        until(lambda: died(words))
        process.wait(PATIENCE)
    assert words.load(0) & _core.HELD_BY == 0


def test_c2_the_death_wakes_who_sleeps_on_the_word(shared) -> None:
    path, words = shared
    with child(script(MAPPED, HOLD, "input()"), path) as process:
        line(process)
        sleeping = words.mark(0, _core.SLEEPERS)
        threading.Timer(0.1, process.send_signal, [signal.SIGKILL]).start()
        took = seconds(lambda: words.wait_any([4, 0], [0, sleeping], FOR_LONG))
        assert took < PATIENCE
        assert died(words)


@pytest.mark.parametrize(
    "end",
    ["os._exit(1)", "raise SystemExit", "os.abort()", "os.execv('/bin/sleep', ['sleep', '60'])"],
)
def test_c2_a_held_word_is_freed_however_its_process_ends(shared, end) -> None:
    path, words = shared
    quiet = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    source = script(MAPPED, quiet, HOLD, "input()", end)
    with child(source, path, stderr=subprocess.DEVNULL) as process:
        line(process)
        assert not freed(words)
        tell(process)
        until(lambda: freed(words))
        if "exec" in end:
            assert process.poll() is None  # what runs in its place holds nothing


def test_c2_a_held_word_is_not_inherited_by_fork(shared) -> None:
    path, words = shared
    fork = """
        from testing.patience import PATIENCE
        if os.fork() == 0:
            hold.forget()
            print("child", flush=True)
            time.sleep(PATIENCE)
            os._exit(0)
        input()
    """
    with child(script(MAPPED, HOLD, fork), path, start_new_session=True) as process:
        try:
            assert {line(process).split()[0], line(process).split()[0]} == {"held", "child"}
            process.send_signal(signal.SIGKILL)
            until(lambda: died(words))
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_held_word_outlives_the_thread_that_asked_for_it(words) -> None:
    held = []
    thread = threading.Thread(target=lambda: held.append(_core.Hold(words, 0, 8, 4)))
    thread.start()
    thread.join(PATIENCE)
    assert words.load(0) == held[0].tid
    held[0].release()
    assert words.load(0) == 0


def test_a_held_word_is_refused_to_others_until_it_is_released(words) -> None:
    hold = _core.Hold(words, 0, 8, 4)
    assert hold.tid == words.load(0) != 0
    with pytest.raises(OSError):
        _core.Hold(words, 0, 16, 4)
    waiter = threading.Thread(target=words.wait, args=(0, hold.tid, FOR_LONG))
    waiter.start()
    time.sleep(0.05)
    hold.release()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()  # releasing wakes who watches
    assert words.load(0) == 0
    assert hold.tid == 0
    hold.release()  # a second time does nothing
    again = _core.Hold(words, 0, 8, 4)
    assert words.load(0) == again.tid
    again.release()


def test_a_word_marked_by_a_death_is_not_held_again_unseen(words) -> None:
    words.store(0, _core.OWNER_DIED)
    with pytest.raises(OSError):
        _core.Hold(words, 0, 8, 4)
    assert words.load(0) == _core.OWNER_DIED


def test_many_words_can_be_held_at_once() -> None:
    words = _core.SharedWords(bytearray(16 * 64))
    holds = [_core.Hold(words, 16 * i, 16 * i + 8, 16 * i + 4) for i in range(64)]
    assert len({hold.tid for hold in holds}) == 64
    assert all(words.load(16 * i) == hold.tid for i, hold in enumerate(holds))
    for hold in holds:
        hold.release()
    assert not any(words.load(16 * i) for i in range(64))


# ---- the gate ----------------------------------------------------------------------------


def test_a_gate_counts_who_is_inside() -> None:
    gate = _core.Gate()
    gate.enter()
    gate.enter()
    assert gate.inside == 2
    gate.leave()
    gate.leave()
    assert gate.inside == 0
    assert gate.close(0)


def test_a_gate_closes_once_no_thread_is_inside() -> None:
    gate = _core.Gate()
    gate.enter()
    assert not gate.close(0.05)  # still somebody there, but shut
    threading.Timer(0.1, gate.leave).start()
    assert gate.close(PATIENCE)
    assert gate.inside == 0


def test_a_gate_knows_how_often_the_present_thread_is_inside() -> None:
    gate = _core.Gate()
    gate.enter()
    gate.enter()
    other = threading.Thread(target=gate.enter)
    other.start()
    other.join(PATIENCE)
    assert (gate.of_this_thread(), gate.inside) == (2, 3)
    assert not gate.close(0, gate.of_this_thread())
    gate.leave()
    assert gate.of_this_thread() == 1
    gate.leave()
    gate.leave()  # the other one
    assert gate.close(0, gate.of_this_thread())


def test_a_gate_that_was_shut_twice_opens_after_the_last() -> None:
    """A fork shuts it while another thread makes the map larger."""
    gate = _core.Gate()
    assert gate.close(0)
    assert gate.close(0)
    gate.open()
    assert gate.shut == 1
    gate.open()
    assert gate.enter()


def test_a_shut_gate_keeps_others_waiting_until_it_opens() -> None:
    gate = _core.Gate()
    assert gate.close(1)
    thread = threading.Thread(target=gate.enter)
    thread.start()
    time.sleep(0.1)
    assert gate.inside == 0
    gate.open()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert gate.inside == 1


def test_examine_sees_what_is_there() -> None:
    offset, epoch, value, key, properties, event, published, sequence, name = examine(
        _core.Entry(everything())
    )[0]
    assert (offset, epoch, value, key) == (1000, 3, b"first", b"k")
    assert (properties, event, published) == ({"a": "b"}, 1, 1_700_000_000_000)
    assert (sequence, name) == (5, "producteur-é")
