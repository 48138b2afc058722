"""Compression: a compressed topic reads as any other, whichever way it is read, and damage to it
costs a block and is named (rules G9, H6)."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.maintenance import compression as maintenance
from exclusivelog.local.maintenance import retention
from exclusivelog.local.records import COMPRESSION, U64
from exclusivelog.local.storage import compression
from exclusivelog.local.storage.segments import OpenEntries, is_reference
from testing.children import child, finish, line
from testing.entries import (
    CHUNK,
    COMPRESSED,
    FOOTER,
    LZ4,
    SUMMARY,
    ZSTD,
    chunks_of,
    compressed,
    encode,
    examine,
    flipped,
    resealed,
    values,
    various,
)
from testing.journals import checkpoint, no_checkpoints
from testing.processes import PATIENCE, State, Worker, forked
from tests.log.test_blocks import everything, lost
from tests.log.test_damage import Damage, caught
from tests.log.test_readers import moment

pytestmark = pytest.mark.once  # either durability leaves the same on the disk

pytest.importorskip("lz4")
pytest.importorskip("zstandard")

COUNT = 6000
METHODS = {"lz4": LZ4, "zstd": ZSTD}


def orders() -> Iterator[bytes]:
    dice = random.Random(1)
    for n in itertools.count():
        order = {
            "order": n,
            "state": dice.choice(["new", "paid", "sent"]),
            "customer": dice.randrange(1000),
            "at": 1_700_000_000 + n,
        }
        yield json.dumps(order).encode()


ORDERS = orders()
MADE: list[bytes] = []


def events(count: int) -> list[bytes]:
    """The first orders, as JSON. Each is made once: that takes longer than most tests."""
    MADE.extend(itertools.islice(ORDERS, max(0, count - len(MADE))))
    return MADE[:count]


def deflate(method: int) -> Callable[[bytes], bytes]:
    return compression.method(method).compress


def shorter(method: int) -> Callable[[bytes], bytes]:
    """The same, of what it makes shorter."""
    return lambda data: min(deflate(method)(data), data, key=len)


def packed(data: bytes, method: int = LZ4) -> bytes:
    """The entry as the library compresses it."""
    made = _core.compress(data, method, deflate(method))
    assert made[-8:-4] == COMPRESSED.to_bytes(4, "little")
    return made


def methods_of(engine: xl.Engine, topic: xl.Topic) -> list[int]:
    """How the topic's entries in the tables are compressed; 0: not at all."""
    with engine.ledger.read() as tables:
        return [
            (_core.compression_of(tables.entries.load(row)) or (0,))[0]
            for _, row in tables.entries.stored(topic.id, 0)
        ]


@pytest.fixture(params=["liblz4", "lz4"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """What decompresses LZ4: the system's library, or the Python package."""
    compression.method(LZ4)
    found = _core.use_system_lz4(LZ4 if request.param == "liblz4" else 0)
    if request.param == "liblz4" and not found:
        pytest.skip("this system has no liblz4.so.1")
    yield request.param
    _core.use_system_lz4(LZ4)


@pytest.fixture
def by_package() -> Iterator[None]:
    """The Python package decompresses LZ4, also where the system has the library."""
    compression.method(LZ4)
    _core.use_system_lz4(0)
    yield
    _core.use_system_lz4(LZ4)


# ---- entries -----------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("make", [packed, None], ids=["the library's", "by hand"])
def test_a_compressed_entry_gives_back_what_went_in(method: int, make: Any) -> None:
    data = everything(COUNT)
    stored = packed(data, method) if make else compressed(data, shorter(method), method)
    assert len(stored) < len(data) / 2
    sound = examine(_core.Entry(data))
    entry = _core.Entry(stored)
    assert (entry.compression, entry.stored) == (method, len(stored))
    assert examine(entry) == sound
    one_by_one = _core.Entry(stored)
    for index in random.Random(2).sample(range(COUNT), COUNT):
        assert one_by_one.message(index).value == sound[index][2]
    assert _core.decompressed(stored) == data


def test_the_library_and_the_page_agree_about_the_layout() -> None:
    data = everything(COUNT)
    assert packed(data) == compressed(data, shorter(LZ4), bits=16)


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_short_entries_are_compressed_if_that_saves_room(rows: int) -> None:
    data = values([b"abcdefgh" * 40] * rows)
    stored = packed(data)
    assert examine(_core.Entry(stored)) == examine(_core.Entry(data))
    assert _core.decompressed(stored) == data
    dull = values([random.Random(1).randbytes(300)] * 1)
    assert _core.compress(dull, LZ4, deflate(LZ4)) is dull


def test_a_chunk_that_cannot_be_compressed_stays_as_it_is() -> None:
    data = values([b"a" * 200_000, random.Random(1).randbytes(130_000), b"b" * 200_000])
    stored = packed(data)
    assert 130_000 < len(stored) < 200_000
    assert examine(_core.Entry(stored)) == examine(_core.Entry(data))


def test_compressing_leaves_a_damaged_or_compressed_entry_alone() -> None:
    for data in (flipped(everything(COUNT), 9000), packed(everything(COUNT)), b"", b"x" * 64):
        assert _core.compress(data, LZ4, deflate(LZ4)) is data


def test_kept_messages_come_out_of_a_compressed_entry() -> None:
    entry = _core.Entry(packed(everything(COUNT)))
    _, kept = _core.keep(entry, list(range(0, COUNT, 2)), 9)
    assert [m[1:] for m in examine(_core.Entry(packed(kept)))] == [
        m[1:] for m in examine(entry)[::2]
    ]
    assert _core.decompressed(packed(kept)) == kept


def test_the_journal_takes_no_compressed_entry_for_its_own() -> None:
    with pytest.raises(ValueError, match="does not end as an entry does"):
        _core.pack_kept([packed(everything(COUNT))], 1 << 20)


# ---- entries that are damaged, or made to harm -----------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_h6_every_flipped_bit_of_a_compressed_entry_is_found(method: int) -> None:
    data = everything(COUNT)
    stored, sound = compressed(data, shorter(method), method), examine(_core.Entry(data))
    dice = random.Random(3)
    for _ in range(150):
        at = dice.choice([dice.randrange(len(stored)), len(stored) - 1 - dice.randrange(900)])
        try:
            entry = _core.Entry(flipped(stored, 8 * at + dice.randrange(8)))
        except ValueError:
            continue  # what follows the chunks is the whole entry's
        gone = lost(entry)
        for index in range(0, COUNT, 97):
            if index not in gone:
                message = entry.message(index)
                assert (message.value, message.key) == (sound[index][2], sound[index][3])
        if gone:
            with pytest.raises(ValueError, match="its checksum does not hold"):
                entry.check()
            assert "its checksum does not hold" in (entry.damage or "")


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "too short": lambda data: deflate(LZ4)(data[:-1]),
    "too long": lambda data: deflate(LZ4)(data + b"x" * 100),
    "a bomb": lambda data: deflate(LZ4)(bytes(1 << 19)),
    "noise": lambda data: random.Random(1).randbytes(len(data) // 2),
    "one byte": lambda data: b"\xff",
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", BROKEN)
def test_h6_a_block_of_another_size_is_damage_however_it_is_summed(kind: str) -> None:
    entry = _core.Entry(entry_with(BROKEN[kind]))
    gone = lost(entry)
    assert 10 < len(gone) < 500
    assert entry.damage is not None
    assert entry.damage.startswith("lz4 block 5 of ")
    assert "it is " in entry.damage
    items = events(2000)
    assert all(entry.message(n).value == items[n] for n in range(2000) if n not in gone)
    with pytest.raises(ValueError, match="its checksum does not hold"):
        entry.check()


def test_h6_a_block_that_is_longer_than_what_it_stands_for_is_refused() -> None:
    with pytest.raises(ValueError, match="not as long as it says"):
        _core.Entry(entry_with(lambda data: data + b"x"))


def entry_with(make: Callable[[bytes], bytes]) -> bytes:
    """A compressed entry whose sixth chunk is not what it should be."""
    calls = iter(range(1 << 30))

    def some(data: bytes) -> bytes:
        return make(data) if next(calls) == 5 else shorter(LZ4)(data)

    return compressed(values(events(2000)), some)


@pytest.mark.long
def test_h6_a_zstd_block_that_claims_another_size_sets_no_memory_aside() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    plain = zstandard.ZstdCompressor(write_content_size=False)
    assert len(bomb) < 1 << 17
    for chunk in (bomb, plain.compress(bytes(1 << 20)), b"", b"x" * 100):
        with pytest.raises(ValueError, match=r"its header does not state|not decompressed"):
            compression.method(ZSTD).decompress(memoryview(chunk), 1 << 20)
    with pytest.raises(ValueError, match="it is not decompressed to 4096 bytes"):
        compression.method(LZ4).decompress(memoryview(b"\xff" * 5000), 4096)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (5, 0, "not as long as it says"),
        (5, 3 | 12 << 8, "does not know its compression method 3"),
        (5, LZ4 | 11 << 8, "not as long as it says"),
        (5, LZ4 | 21 << 8, "not as long as it says"),
        (5, LZ4 | 255 << 8, "not as long as it says"),
        (0, 2**32 - 1, "not as long as it says"),
        (0, 300 << 20, "not as long as it says"),
        (0, 200 << 20, "longer than the entry"),
        (1, 2**32 - 1, "its|it"),
    ],
)
def test_h6_a_summary_that_promises_too_much_is_refused(field: int, value: int, why: str) -> None:
    data = compressed(values(events(2000)), shorter(LZ4))
    at = len(data) - FOOTER.size - SUMMARY.size
    summary = list(SUMMARY.unpack_from(data, at))
    summary[field] = value
    table, _ = chunks_of(data)
    changed = bytearray(data[:at] + SUMMARY.pack(*summary) + data[at + SUMMARY.size :])
    changed[-4:] = bytes(4)  # the sum of what really stands behind the chunks
    start = table - 8
    changed[-4:] = _core.crc32c(bytes(changed[start:])).to_bytes(4, "little")
    if field == 1:
        _core.Entry(bytes(changed))  # there are no keys, so their size is not used
    else:
        with pytest.raises(ValueError, match=why):
            _core.Entry(bytes(changed)).check()


SMALL = compressed(encode(various(400)), shorter(LZ4))


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=8),
    st.booleans(),
)
def test_h6_what_is_written_over_a_compressed_entry_is_refused_or_read(
    changes: list[tuple[int, int]], sealed: bool
) -> None:
    """With sums that hold, anything may come out; it never reaches beyond an end."""
    changed = bytearray(SMALL)
    for at, byte in changes:
        changed[at] = byte
    data = bytes(changed)
    if sealed:
        try:
            data = resealed(data)
        except struct.error:
            return
    try:
        entry = _core.Entry(data)
        lost(entry)
        found = examine(entry)
    except (ValueError, UnicodeDecodeError, TypeError):
        return
    assert len(found) == entry.count


@pytest.mark.long
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), st.data())
def test_h6_sizes_of_chunks_that_do_not_fit_are_refused(sizes: list[int], data: Any) -> None:
    changed = bytearray(SMALL)
    table, count = chunks_of(SMALL)
    for size in sizes:
        number = data.draw(st.integers(0, count - 1))
        small = data.draw(st.sampled_from([size, size % 5000, 0]))
        changed[table + CHUNK.size * number :][:4] = small.to_bytes(4, "little")
        struct.pack_into("<I", changed, table + CHUNK.size * number, small)
    if bytes(changed) == SMALL:
        return
    try:
        _core.Entry(resealed(bytes(changed))).check()
    except ValueError:
        return
    assert _core.decompressed(resealed(bytes(changed)))


@pytest.mark.usefixtures("by_package")
def test_an_interrupted_call_leaves_no_damage_to_others(monkeypatch) -> None:
    """It had asked for a damaged block, and was interrupted before that was found."""
    halves = [
        encode(((value, None, None, None, None) for value in events(COUNT)), base=at, time=at)
        for at in (0, COUNT)
    ]
    halves = [_core.keep(_core.Entry(half), list(range(COUNT)), 1)[1] for half in halves]
    ((_, whole),) = _core.pack_kept(halves, 1 << 30)
    data = packed(whole)
    assert _core.Entry(data).has_publish_times
    table, _ = chunks_of(data)
    at = sum(CHUNK.unpack_from(data, table + 8 * number)[0] for number in range(3)) + 100
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    method, calls = compression.method(LZ4), list[int]()

    def decompress(block: memoryview, size: int) -> bytes:
        calls.append(size)
        if len(calls) == 2:
            raise MemoryError
        return method.decompress(block, size)

    monkeypatch.setitem(
        compression._loaded, LZ4, compression.Method("lz4", method.compress, decompress)
    )
    entry = _core.Entry(damaged)
    calls.clear()
    with pytest.raises(MemoryError):
        entry.check()
    assert entry.first_published_at(0) == entry.base_offset  # its column is in another block
    with pytest.raises(ValueError, match="checksum"):
        entry.check()
    assert "block 3 of" in (entry.damage or "")


# ---- topics ------------------------------------------------------------------------------


@pytest.fixture(params=["lz4", "zstd"])
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sent(topic, setting) -> list[bytes]:
    """A compressed topic of large entries, and smaller ones behind them."""
    topic.compression(setting)
    items = events(60_000)
    with topic.producer() as producer:
        for start in range(0, 50_000, 10_000):
            producer.send_many(items[start : start + 10_000])
        for start in range(50_000, 60_000, 100):
            producer.send_many(items[start : start + 100])
    topic._engine.ledger.checkpoint()
    return items


def test_a_compressed_topic_is_shorter_and_reads_the_same(engine, topic, sent, setting) -> None:
    stats = topic.stats()
    assert (stats.compression, set(stats.methods)) == (setting, {"lz4"})
    assert stats.raw_bytes > sum(map(len, sent))
    assert stats.ratio > 2.5
    assert list(topic.reader().values()) == sent
    assert [message.value for message in topic.reader()] == sent
    assert set(methods_of(engine, topic)) == {LZ4}
    report = engine.verify()
    assert (report.ok, report.messages) == (True, len(sent))


@pytest.mark.sampled
@pytest.mark.usefixtures("library")
def test_chunks_are_decompressed_ahead_of_readers_that_leave_at_any_time(topic, sent) -> None:
    """A reader may be gone before the thread that works for it, and others read beside it."""
    dice, others = random.Random(7), [topic.reader() for _ in range(3)]
    ahead = [iter(other.values()) for other in others]
    for _ in range(100):
        start, count = dice.randrange(len(sent) - 3000), dice.choice([700, 1500, 3000])
        with topic.reader(start) as reader:
            values = iter(reader.values())
            assert [next(values) for _ in range(count)] == sent[start : start + count]
        for number, other in enumerate(ahead):
            at = others[number].position
            assert [next(other) for _ in range(500)] == sent[at : at + 500]


@pytest.mark.long
@pytest.mark.usefixtures("library")
def test_c5_a_child_decompresses_what_its_parent_had_begun() -> None:
    """The thread that is at work on a chunk is the parent's alone."""
    data, items = packed(values(events(30_000))), events(30_000)

    def read_the_rest() -> bool:
        entry.check()
        return [entry.message(n).value for n in range(0, 30_000, 50)] == items[::50]

    for _ in range(20):
        entry = _core.Entry(data)
        for index in range(1000):
            entry.message(index)
        assert forked(read_the_rest)
        assert read_the_rest()


def test_points_of_a_compressed_topic_are_read_in_any_order(topic, sent) -> None:
    reader, dice = topic.reader(), random.Random(5)
    for _ in range(1000):
        offset = dice.randrange(len(sent))
        reader.seek(offset)
        assert [m.value for m in reader.read_batch(3)] == sent[offset : offset + 3]
    published = topic.reader(30_000).read_next(0).publish_time
    assert topic.reader(moment(published)).position <= 30_000
    assert topic.reader(moment(published + 60_000)).position == len(sent)


@pytest.mark.sampled
@pytest.mark.usefixtures("by_package")
@pytest.mark.parametrize("how", ["read_next", "read_batch", "iterate", "values", "read_arrow"])
def test_a_signal_handler_may_use_a_reader_that_decompresses(
    topic, sent, monkeypatch, how: str
) -> None:
    """Nothing is skipped: each message is read once, here or by the handler."""
    found = list[bytes]()
    struck, inside = 0, False

    def on_signal(*_: object) -> None:
        nonlocal struck, inside
        struck, inside = struck + 1, True
        found.extend(reader.read_next(0).value for _ in range(2))
        inside = False

    def decompress(data: memoryview, size: int) -> bytes:
        if not inside and reader.position < len(sent) - 100:
            signal.raise_signal(signal.SIGUSR1)
        return method.decompress(data, size)

    method = compression.method(LZ4)
    monkeypatch.setitem(
        compression._loaded, LZ4, compression.Method("lz4", method.compress, decompress)
    )
    former = signal.signal(signal.SIGUSR1, on_signal)
    try:
        reader = topic.reader()
        _read_all(reader, how, found, len(sent))
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert struck > 3
    assert sorted(found) == sorted(sent)


def _read_all(reader: xl.Reader, how: str, found: list[bytes], count: int) -> None:
    if how == "read_arrow":
        pytest.importorskip("pyarrow")
    while reader.position < count:
        if how == "read_next":
            found.append(reader.read_next(0).value)
        elif how == "read_batch":
            found += [message.value for message in reader.read_batch(700)]
        elif how == "read_arrow" and (batch := reader.read_arrow(1)) is not None:
            found += batch.column("value").to_pylist()
        elif how == "iterate":
            for message in reader:
                found.append(message.value)
        else:
            for value in reader.values():
                found.append(value)


@pytest.mark.sampled
def test_arrow_reads_a_compressed_topic(topic, sent) -> None:
    pytest.importorskip("pyarrow")
    reader, found = topic.reader(), list[bytes]()
    while (batch := reader.read_arrow()) is not None:
        found += batch.column("value").to_pylist()
    assert found == sent


def test_all_parts_of_messages_come_back_from_a_checkpoint(engine, topic) -> None:
    topic.compression("lz4")
    with no_checkpoints(engine):
        with topic.producer(name="p") as producer:
            for n in range(500):
                producer.send(
                    None if n % 9 == 0 else b"value %d" % n * 9,
                    key=b"k%d" % (n % 5) if n % 4 else None,
                    properties={"n": str(n)} if n % 3 == 0 else None,
                    event_time=n if n % 2 else None,
                    sequence_id=3 * n,
                )
        before = [facts(m) for m in topic.reader()]
        checkpoint(engine)
    assert methods_of(engine, topic) == [LZ4]
    assert [facts(m) for m in topic.reader()] == before


def facts(m: xl.Message) -> tuple[Any, ...]:
    return (
        m.offset,
        m.epoch,
        m.key,
        m.value,
        m.properties,
        m.publish_time,
        m.event_time,
        m.producer_name,
        m.sequence_id,
    )


def test_a_checkpoint_fills_up_a_compressed_entry(engine, topic) -> None:
    topic.compression("lz4")
    items = events(3000)
    with topic.producer() as producer:
        for start in range(0, 3000, 50):
            producer.send_many(items[start : start + 50])
            engine.ledger.checkpoint()
    assert list(topic.reader().values()) == items
    assert len(methods_of(engine, topic)) < 12
    assert topic.stats().ratio > 2.5


def test_a_change_of_the_setting_is_for_new_messages(engine, topic) -> None:
    items = events(40_000)
    with topic.producer() as producer:
        for start, method in enumerate((None, "lz4", None, "zstd")):
            topic.compression(method)
            producer.send_many(items[10_000 * start : 10_000 * start + 10_000])
            engine.ledger.checkpoint()
    assert methods_of(engine, topic) == [0, LZ4, 0, LZ4]
    assert set(topic.stats().methods) == {"none", "lz4"}
    assert list(topic.reader().values()) == items
    assert engine.verify().ok


def test_a_producer_that_follows_a_change_fills_what_was_compressed(engine, topic) -> None:
    items = events(400)
    with topic.producer() as producer:
        for start, method in ((0, "lz4"), (100, None), (200, "lz4"), (300, None)):
            topic.compression(method)
            producer.send_many(items[start : start + 100])
            engine.ledger.checkpoint()
    assert list(topic.reader().values()) == items
    assert engine.verify().ok


@pytest.mark.long
def test_transactions_and_messages_of_many_kinds_are_compressed(engine, topic) -> None:
    topic.compression("lz4")
    other = engine.topic("other")
    big = b"".join(events(60_000))
    with topic.producer() as producer, other.producer() as beside:
        producer.send(big)  # one large message
        with engine.transaction() as transaction:
            for n in range(2000):
                producer.send(b"in a transaction %d" % n, transaction=transaction)
                beside.send(b"beside %d" % n, transaction=transaction)
    engine.ledger.checkpoint()
    found = list(topic.reader().values())
    assert found == [big, *(b"in a transaction %d" % n for n in range(2000))]
    assert set(methods_of(engine, topic)) == {LZ4}
    assert set(methods_of(engine, other)) == {0}


def test_compacted_views_and_snapshots_are_compressed(engine, topic) -> None:
    topic.compression("lz4")
    with topic.producer() as producer:
        producer.send_many(events(5000), keys=[b"key %d" % (n % 100) for n in range(5000)])
    assert topic.compact() == 100
    kept = [m.value for m in topic.reader(read_compacted=True)]
    assert kept == events(5000)[-100:]
    held = engine.topic("map")
    with xl.SharedMap(held) as settings_map:
        held.compression("lz4")
        for n in range(300):
            settings_map.put(f"key {n}", {"n": n, "text": "x" * n})
        settings_map.snapshot()
    held.trim(before=held.next_offset)
    with xl.SharedMap(held) as settings_map:
        assert settings_map.get("key 299") == {"n": 299, "text": "x" * 299}
    with engine.ledger.read() as tables:
        for view in (tables.views.view(topic.id), tables.views.snapshot(held.id)):
            assert view is not None
            rows = [tables.entries.load(row) for _, row in tables.entries.stored(view.id, 0)]
            assert {(_core.compression_of(row) or (0,))[0] for row in rows} == {LZ4}
    assert engine.verify().ok


@pytest.mark.sampled
def test_a_backup_of_a_compressed_topic_is_whole(engine, topic, sent, tmp_path) -> None:
    engine.backup(str(tmp_path / "copy"))
    with xl.open(str(tmp_path / "copy"), readonly=True) as copy:
        assert list(copy.topic("orders").reader().values()) == sent
        assert copy.verify().ok
        assert copy.topic("orders").stats() == topic.stats()


@pytest.mark.sampled
def test_trimming_and_deleting_free_compressed_entries(engine, topic, sent) -> None:
    assert any(is_reference(row) for _, row in Damage(engine, topic).entries())
    topic.trim(before=55_000)
    assert list(topic.reader(55_000).values()) == sent[55_000:]
    engine.delete_topic("orders")
    assert engine.stats()["large_bytes"] == 0
    assert engine.topic("orders").stats().compression is None


def test_what_a_reader_keeps_of_compressed_entries_is_bounded(topic, sent, monkeypatch) -> None:
    monkeypatch.setattr("exclusivelog.local.storage.segments.MOST_DECOMPRESSED", 1_500_000)
    reader = topic.reader()
    kept: OpenEntries = reader.cursor._open
    for offset in (0, 10_000, 20_000, 30_000, 0, 10_000):
        reader.seek(offset)
        assert reader.read_next(0).value == sent[offset]
        assert kept._decompressed <= 1_500_000
        assert 1 <= len(kept) <= 2


def test_wrong_settings_are_refused(engine, topic) -> None:
    for wrong in ("gzip", "", 1, "none"):
        with pytest.raises(ValueError, match="it takes 'lz4', 'zstd' or None"):
            topic.compression(wrong)
    with pytest.raises(ValueError, match="internal"):
        engine.topic("__events__").compression("lz4")
    engine.delete_topic("orders")
    with pytest.raises(xl.TopicNotFoundError):
        topic.compression("lz4")
    with pytest.raises(xl.TopicNotFoundError):
        topic.stats()


# ---- damage ------------------------------------------------------------------------------


def test_g9_a_damaged_block_is_named_with_its_method_and_file(engine, topic, sent, path) -> None:
    row = Damage(engine, topic).entries()[1][1]
    assert is_reference(row)
    file = next(Path(path, "segments").iterdir())
    with engine.ledger.read() as tables:
        where = tables.large.where(row)
    at = int(where.rpartition(" ")[2])
    content = bytearray(file.read_bytes())
    content[at + 150_000] ^= 1
    file.write_bytes(content)
    error = caught(lambda: list(topic.reader()))
    gone = error.offsets
    assert error.topic == "orders"
    assert re.search(
        r"is damaged: lz4 block \d+ of 11: its checksum does not hold, in ", str(error)
    )
    assert f"in {file} at {at}; seek({gone.stop}) steps over it" in str(error)
    assert 100 < len(gone) < 3000
    assert 10_000 < gone.start < gone.stop < 20_000
    assert list(topic.reader(gone.stop).values()) == sent[gone.stop :]
    reader, before = topic.reader(), list[bytes]()
    assert caught(lambda: before.extend(reader.values())).offsets == gone
    assert before in ([], sent[: gone.start])
    report = engine.verify()
    assert str(file) in report.problems[0]
    assert report.messages == len(sent) - len(gone)
    with pytest.raises(xl.LedgerCorruptedError, match="nothing was compacted"):
        topic.compact()


@pytest.mark.rule("G9")
def test_g9_verify_names_each_damaged_block_of_an_entry(engine, topic, sent, path) -> None:
    row = Damage(engine, topic).entries()[1][1]
    with engine.ledger.read() as tables:
        stored = tables.entries.load(row)
        at = int(tables.large.where(row).rpartition(" ")[2])
    table, count = chunks_of(bytes(stored))
    sizes = [CHUNK.unpack_from(stored, table + CHUNK.size * n)[0] for n in range(count)]
    file = next(Path(path, "segments").iterdir())
    content = bytearray(file.read_bytes())
    for number in (3, 7):
        content[at + sum(sizes[:number]) + 100] ^= 1
    file.write_bytes(content)
    problems = engine.verify().problems
    assert [re.findall(r"lz4 block (\d+) of", problem) for problem in problems] == [["3"], ["7"]]


@pytest.mark.rule("G9")
@pytest.mark.parametrize(
    "row", [b"", b"\xc1", b"\x92\xa3lz5\x00", b"\x92\xa3lz4\xc0", b"\x05", b"\x92\x90\x00"]
)
def test_g9_a_damaged_setting_holds_up_neither_its_topic_nor_others(path, row, caplog) -> None:
    with xl.open(path) as engine:
        topic, key = engine.topic("orders"), COMPRESSION + U64.pack(engine.topic("orders").id)
        topic.compression("lz4")
        with topic.producer() as producer:
            producer.send_many(sent := events(5000))
        engine.ledger.checkpoint()
        with engine.ledger.write_exclusive() as tables:
            assert tables.rows.get("meta", key) is not None
            tables.rows.put("meta", key, row)
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        for each in (topic, engine.topic("other")):
            with each.producer() as producer:
                producer.send_many(sent)
        engine.ledger.checkpoint()
        assert "topic 'orders'" in caplog.text
        assert engine.ledger.journal is not None
        assert engine.ledger.journal.backlog == 0
        assert list(topic.reader().values()) == sent + sent
        assert methods_of(engine, topic)[-1] == 0
        maintenance.compress_old(engine.ledger, lambda: False)
        report = engine.verify()
        assert [problem for problem in report.problems if "topic 'orders'" in problem]
        assert report.messages == 15_000
        with pytest.raises(xl.LedgerCorruptedError, match=r"'orders' .* Set it again: topic\.c"):
            topic.stats()
        topic.compression("lz4")
        assert (topic.stats().compression, engine.verify().ok) == ("lz4", True)


@pytest.mark.rule("G9")
def test_g9_a_damaged_setting_is_taken_back(engine, topic) -> None:
    topic.compression("lz4")
    with engine.ledger.write_exclusive() as tables:
        tables.rows.put("meta", COMPRESSION + U64.pack(topic.id), b"\xc1")
    topic.compression(None)
    assert (topic.stats().compression, engine.verify().ok) == (None, True)
    with engine.ledger.read() as tables:
        assert tables.rows.get("meta", COMPRESSION + U64.pack(topic.id)) is None


def test_g9_a_damaged_tail_of_a_compressed_entry_costs_the_entry(engine, topic) -> None:
    topic.compression("lz4")
    damage = Damage(engine, topic)
    with topic.producer() as producer:
        producer.send_many(events(2000))
    engine.ledger.checkpoint()
    ((last, data),) = damage.entries()
    for at in (len(data) - 1, len(data) - 70, len(data) - 100):
        damage.put(last, flipped(data, 8 * at))
        error = caught(lambda: list(topic.reader()))
        assert (error.topic, error.offsets) == ("orders", range(2000))
    damage.put(last, data)
    assert len(list(topic.reader())) == 2000


# ---- without the library -----------------------------------------------------------------

WITHOUT = """
    import sys
    sys.modules["lz4"] = sys.modules["lz4.block"] = None
    import exclusivelog as xl
    for options in ({}, {"readonly": True}):
        try:
            with xl.open(sys.argv[1], **options) as engine:
                print("plain", len(list(engine.topic("plain").reader())))
                try:
                    list(engine.topic("orders").reader())
                except xl.MissingLibraryError as error:
                    print(error)
                engine.verify()
        except xl.MissingLibraryError as error:
            print(error)
"""

KILLED = """
    import os, signal, sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1])
    topic = engine.topic("orders")
    topic.compression("lz4")
    engine.ledger.checkpoint = lambda: None
    topic.producer().send_many([b"in the journal"] * 500)
    print("sent", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
OPENED_WITHOUT = """
    import sys
    sys.modules["lz4"] = sys.modules["lz4.block"] = None
    import exclusivelog as xl
    try:
        xl.open(sys.argv[1])
    except xl.MissingLibraryError as error:
        print(error)
"""


@pytest.mark.long
def test_a_recovery_without_the_library_is_refused_and_loses_nothing(path) -> None:
    with child(KILLED, path) as process:
        assert line(process) == "sent"
        assert process.wait(PATIENCE) == -signal.SIGKILL
    before = {file.name: file.read_bytes() for file in Path(path).iterdir() if file.is_file()}
    for _ in range(2):
        assert finish(OPENED_WITHOUT, path).startswith("topic 'orders' is compressed by lz4, and")
    for name in ("journal", "data.mdb"):
        assert Path(path, name).read_bytes() == before[name]
    with xl.open(path) as engine:
        assert list(engine.topic("orders").reader().values()) == [b"in the journal"] * 500
        assert methods_of(engine, engine.topic("orders")) == [LZ4]


BESIDE = """
    import sys
    sys.modules["lz4"] = sys.modules["lz4.block"] = None
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine:
        plain = engine.topic("plain").producer()
        print("open", flush=True)
        sys.stdin.readline()
        print(plain.send(b"one"))
        try:
            engine.ledger.checkpoint()
        except xl.MissingLibraryError as error:
            print(error, flush=True)
"""


@pytest.mark.long
def test_a_process_that_cannot_make_the_checkpoint_says_so(path) -> None:
    """It opens the ledger right before a topic is compressed: otherwise that is refused."""
    with xl.open(path) as engine, child(BESIDE, path) as process:
        assert line(process) == "open"
        topic = engine.topic("orders")
        for method in ("lz4", "zstd"):
            with pytest.raises(xl.MissingLibraryError, match=rf"pid {process.pid}\) has") as lacks:
                topic.compression(method)
            assert f"lacks the library for lz4; pip install 'exclusivelog[{method}]'" in str(lacks)
        maintenance.set_compression(engine.ledger, topic.id, "lz4")  # the same, at the same time
        with no_checkpoints(engine), topic.producer() as producer:
            producer.send_many([b"in the journal"] * 500)
            process.stdin.write("\n")
            process.stdin.flush()
            assert line(process) == "0"
            assert line(process).startswith("topic 'orders' is compressed by lz4, and the Python")
        assert len(list(topic.reader())) == 500
        assert [m.value for m in engine.topic("plain").reader()] == [b"one"]


WRITE_WITHOUT = """
    import sys
    sys.modules["lz4"] = sys.modules["lz4.block"] = None
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine:
        for name in ("orders", "plain"):
            with engine.topic(name).producer() as producer:
                for n in range(50):
                    producer.send(b"later %d" % n)
        engine.ledger.checkpoint()
        print(list(engine.topic("orders").reader(3000).values())[-1])
"""


def test_a_topic_that_was_compressed_is_written_without_the_library(path) -> None:
    with xl.open(path) as engine:
        engine.topic("orders").compression("lz4")
        for name in ("orders", "plain"):
            with engine.topic(name).producer() as producer:
                producer.send_many(events(3000))
        engine.topic("orders").compression(None)
    assert finish(WRITE_WITHOUT, path) == "b'later 49'\n"
    with xl.open(path) as engine:
        assert engine.topic("orders").next_offset == 3050
        assert engine.verify().ok


@pytest.mark.long
def test_without_the_library_an_error_says_what_to_install(path) -> None:
    with xl.open(path) as engine:
        engine.topic("orders").compression("lz4")
        for name in ("orders", "plain"):
            with engine.topic(name).producer() as producer:
                producer.send_many(events(3000))
    told = finish(WITHOUT, path).splitlines()
    assert [each for each in told if "orders" not in each] == ["plain 3000"]
    for each in (told[0], told[-2], told[-1]):
        assert each.startswith("topic 'orders'")
        assert " is compressed by lz4, and the Python package lz4 cannot be imported" in each
        assert each.endswith("pip install 'exclusivelog[lz4]'")


SET_WITHOUT = """
    import sys
    sys.modules["zstandard"] = None
    import exclusivelog as xl
    with xl.open(sys.argv[1]) as engine:
        topic = engine.topic("orders")
        try:
            topic.compression("zstd")
        except xl.MissingLibraryError as error:
            print(error)
        print(topic.stats().compression)
        topic.compression("lz4")
        print(topic.stats().compression)
"""


@pytest.mark.long
def test_a_setting_whose_library_is_missing_is_refused(path) -> None:
    told, setting, other = finish(SET_WITHOUT, path).splitlines()
    assert told.startswith("topic 'orders'")  # of this process, not of "engine 'engine-1' (id"
    assert "pip install 'exclusivelog[zstd]'" in told
    assert (setting, other) == ("None", "lz4")


# ---- old entries again -------------------------------------------------------------------


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry is old at once."""
    monkeypatch.setattr(maintenance, "OLD_MS", -60_000)


@pytest.mark.sampled
def test_old_entries_are_compressed_again(engine, topic, sent, setting, old) -> None:
    before = topic.stats()
    reader = topic.reader(5)
    assert reader.read_next(0).value == sent[5]
    maintenance.compress_old(engine.ledger, lambda: False)
    if setting == "lz4":
        assert topic.stats() == before
        return
    found = methods_of(engine, topic)
    assert set(found[:-1]) == {ZSTD}
    assert found[-1] == LZ4  # it may still be filled up
    after = topic.stats()
    assert after.raw_bytes == before.raw_bytes
    assert after.stored_bytes < before.stored_bytes * 0.8
    assert list(topic.reader().values()) == sent
    assert [m.value for m in reader.read_batch(100_000)] == sent[6:]
    assert engine.verify().ok
    with topic.producer() as producer:
        producer.send_many(sent[:10])
    assert list(topic.reader().values()) == sent + sent[:10]


def test_young_entries_are_left_alone(engine, topic, sent) -> None:
    maintenance.compress_old(engine.ledger, lambda: False)
    assert set(methods_of(engine, topic)) == {LZ4}


def test_entries_of_before_the_setting_are_compressed_as_well(engine, topic, old) -> None:
    items = events(20_000)
    with topic.producer() as producer:
        producer.send_many(items[:10_000])
        topic.compression("zstd")
        producer.send_many(items[10_000:])
    maintenance.compress_old(engine.ledger, lambda: False)
    assert methods_of(engine, topic) == [ZSTD, LZ4]
    assert list(topic.reader().values()) == items


def test_a_damaged_entry_is_passed_over_as_it_is(engine, topic, sent, setting, old) -> None:
    if setting == "lz4":
        pytest.skip("it is compressed once")
    damage = Damage(engine, topic)
    last, row = damage.entries()[0]
    damage.put(last, b"garbage")
    maintenance.compress_old(engine.ledger, lambda: False)
    assert damage.entries()[0] == (last, b"garbage")
    assert set(methods_of(engine, topic)[1:-1]) == {ZSTD}
    damage.put(last, row)


def test_another_process_s_work_is_not_done_twice(engine, topic, sent, setting, old) -> None:
    if setting == "lz4":
        pytest.skip("it is compressed once")
    with engine.ledger.read() as tables:
        part = maintenance._read_old(tables, topic.id)
    assert part is not None
    assert maintenance.compress_again(engine.ledger, topic.id)
    assert not maintenance._replace(engine.ledger, topic.id, part, [])
    topic.compression(None)
    assert not maintenance.compress_again(engine.ledger, topic.id)


def test_a_topic_whose_library_is_missing_holds_up_no_other_topics_retention(
    engine, monkeypatch, caplog, old
) -> None:
    """Another process compressed it by zstd, and it is no longer compressed: the ledger opens."""
    first, second = engine.topic("first"), engine.topic("second")
    first.compression("zstd")
    for topic in (first, second):
        with topic.producer() as producer:
            for _ in range(3):
                producer.send_many(events(5000))
    engine.ledger.checkpoint()
    maintenance.compress_old(engine.ledger, lambda: False)
    assert ZSTD in methods_of(engine, first)
    first.compression(None)
    monkeypatch.setattr(compression, "_loaded", {})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    now = time.time()
    with pytest.raises(xl.MissingLibraryError, match=r"topic 'first': .* zstd"):
        first.trim(before=moment(int(1000 * (now - 1000))))
    with pytest.raises(xl.MissingLibraryError, match=r"topic 'first': .* zstd"):
        first.compact()
    retention.set_retention(engine.ledger, first.id, {"max_age": 0.000_001})
    retention.set_retention(engine.ledger, second.id, {"max_bytes": 1})
    worker = engine.backend.retention_worker
    for _ in range(2):
        worker.go_round()
        time.sleep(0.01)
    assert second.first_offset > 0
    assert "tries again: topic 'first': " in caplog.text


@pytest.mark.sampled
def test_the_retention_worker_compresses_old_entries(engine, topic, sent, setting, old) -> None:
    engine.backend.retention_worker.go_round()
    assert (ZSTD in methods_of(engine, topic)) == (setting == "zstd")


# ---- death -------------------------------------------------------------------------------

DYING = """
    import os, random, signal, sys, threading, time
    import exclusivelog as xl
    from exclusivelog.local.maintenance import compression as maintenance
    from tests.log.test_compression import events
    maintenance.OLD_MS = -60_000
    engine = xl.open(sys.argv[1], durability="process")
    topic = engine.topic("orders")
    topic.compression("zstd")
    items = events(2000)
    producer = topic.producer()
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        sent = topic.next_offset
        producer.send_many(items)
        print(topic.next_offset, flush=True)
        engine.ledger.checkpoint()
        maintenance.compress_again(engine.ledger, topic.id)
"""


@pytest.mark.long
def test_h1_a_process_that_dies_in_a_checkpoint_of_a_compressed_topic_loses_nothing(
    path, sweep
) -> None:
    """By SIGKILL at any moment of sending, checkpoints, and compressing old entries again."""
    import subprocess

    items, dice = events(2000), random.Random(4)
    acknowledged = 0
    for number in itertools.count():  # at least until one has sent something: it may begin late
        if number >= sweep(6, 12) and acknowledged:
            break
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DYING), path, str(dice.uniform(0.02, 0.4))],
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
            env={**os.environ},
        )
        assert done.returncode == -signal.SIGKILL
        told = done.stdout.split()
        acknowledged = max([acknowledged, *map(int, told[-1:])])
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            found = list(topic.reader().values())
            assert len(found) == topic.next_offset >= acknowledged
            assert len(found) % len(items) == 0
            assert found == items * (len(found) // len(items))
            assert engine.verify().ok
            acknowledged = len(found)


def write(state: State, setting: str, start: int, stop: int) -> int:
    state.topic.compression(setting)
    with state.topic.producer() as producer:
        producer.send_many(events(stop)[start:stop])
    state.engine.ledger.checkpoint()
    return state.topic.next_offset


def test_processes_share_a_compressed_topic(engine, topic, worker: Callable[..., Worker]) -> None:
    other = worker()
    assert other.call(write, "lz4", 0, 5000) == 5000
    with topic.producer() as producer:
        producer.send_many(events(10_000)[5000:])
    engine.ledger.checkpoint()
    assert set(methods_of(engine, topic)) == {LZ4}
    assert list(topic.reader().values()) == events(10_000)
