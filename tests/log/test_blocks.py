"""Blocks (rule H6): of a large entry, damage costs the block that it is in, and what is read is
verified, whichever way it is read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.storage.segments import REFERENCE
from testing.children import finish
from testing.entries import (
    BLOCKED,
    FOOTER,
    PLAIN,
    SUMMARY,
    blocked,
    encode,
    examine,
    flipped,
    refooted,
    resummed,
    values,
    various,
)
from testing.journals import checkpoint, flip, frames, no_checkpoints
from tests.log.test_damage import Damage, caught, step_over
from tests.log.test_readers import moment

pytestmark = pytest.mark.once  # either durability leaves the same on the disk

COUNT, SIZE = 6000, 100
BLOCK = 16 << 10


def some(count: int, seed: int = 1, size: int = SIZE) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(size) for _ in range(count)]


def everything(count: int) -> bytes:
    """A large entry with every section that a producer can write."""
    return encode(various(count))


def magic(data: bytes) -> int:
    return int.from_bytes(data[-8:-4], "little")


def lost(entry: _core.Entry) -> set[int]:
    """The messages that damaged blocks cost."""
    found, index = set(), 0
    while index < entry.count:
        start, index = entry.damage_from(index)
        found |= set(range(start, index))
    return found


# ---- entries -----------------------------------------------------------------------------


def test_h6_an_entry_has_blocks_from_64_kib_on() -> None:
    for size, expected in ((65_448, PLAIN), (65_449, BLOCKED)):
        data = values([bytes(size)])
        assert magic(data) == expected
        (found,) = examine(_core.Entry(data))
        assert found[2] == bytes(size)


def test_h6_an_entry_with_blocks_gives_back_what_went_in() -> None:
    data = everything(COUNT)
    assert magic(data) == BLOCKED
    entry, plain = _core.Entry(data), encode(various(100))
    assert magic(plain) == PLAIN
    assert examine(entry)[:100] == examine(_core.Entry(plain))
    one_by_one = _core.Entry(data)
    order = random.Random(2).sample(range(COUNT), COUNT)
    found = {i: one_by_one.message(i).value for i in order}
    assert [found[i] for i in range(COUNT)] == [message[2] for message in examine(entry)]


def test_h6_the_space_of_blocks_is_small() -> None:
    items = some(100_000)
    data = values(items)
    plain = sum(map(len, items)) + 4 * 100_001 + 4 + 8 + FOOTER.size
    assert plain < len(data) < 1.0005 * plain


@pytest.mark.long
def test_h6_every_flipped_bit_is_found_and_costs_its_block() -> None:
    """Sections, names, sums and footer: whichever bit it is."""
    data = everything(COUNT)
    sound = examine(_core.Entry(data))
    dice = random.Random(3)
    for _ in range(150):
        at = dice.choice([dice.randrange(len(data)), len(data) - 1 - dice.randrange(400)])
        changed = flipped(data, 8 * at + dice.randrange(8))
        try:
            entry = _core.Entry(changed)
        except ValueError:
            continue  # what follows the blocks is the whole entry's
        gone = lost(entry)
        assert 1 <= len(gone) < COUNT * 2 // 3, at  # as many as have a part in 16 KiB of keys
        for index in range(0, COUNT, 1 if len(gone) < 50 else 97):
            if index not in gone:
                message = entry.message(index)
                assert (message.value, message.key) == (sound[index][2], sound[index][3])
        for index in gone:
            with pytest.raises(ValueError, match="its checksum does not hold"):
                entry.message(index)
        for whole, *arguments in (
            (entry.check,),
            (entry.column, "value"),
            (entry.numbers, "offset"),
        ):
            with pytest.raises(ValueError, match="its checksum does not hold"):
                whole(*arguments)


def test_h6_a_summary_that_changes_under_an_open_entry_moves_nothing() -> None:
    """The kernel may drop a page of a mapped file and read it again, with what the disk has made of
    it. The sums and sections are where they were found."""
    data = bytearray(everything(COUNT))
    for bit in range(8 * 12):  # the sizes of values, keys and properties
        entry = _core.Entry(memoryview(data))
        at = len(data) - FOOTER.size - SUMMARY.size + bit // 8
        data[at] ^= 1 << bit % 8
        assert not lost(entry)
        data[at] ^= 1 << bit % 8


def test_h6_every_bit_of_what_follows_the_blocks_is_guarded() -> None:
    data = values(some(COUNT))
    sums = 6 + 37  # of offsets and values
    tail = 8 + 4 * sums + 4 + 24 + FOOTER.size
    for at in range(len(data) - tail, len(data)):
        with pytest.raises(ValueError, match=r"it|its"):
            _core.Entry(flipped(data, 8 * at + at % 8))


def test_h6_a_value_costs_only_its_own_blocks_neighbours() -> None:
    data = values(some(COUNT))
    start = 4 * (COUNT + 1) + 4
    for index in (0, 1, 163, 164, 2500, COUNT - 1):
        gone = lost(_core.Entry(flipped(data, 8 * (start + SIZE * index + 50))))
        assert index in gone
        block = (SIZE * index + 50) // BLOCK
        touched = range(block * BLOCK // SIZE, -(-(block + 1) * BLOCK // SIZE))
        assert gone == set(touched) & set(range(COUNT))


def test_h6_offsets_that_fall_are_refused_however_they_are_summed() -> None:
    data = bytearray(values(some(COUNT)))
    data[4 * 2000 : 4 * 2000 + 4] = (2**31).to_bytes(4, "little")
    entry = _core.Entry(resummed(bytes(data)))
    assert lost(entry) == {1999, 2000}
    with pytest.raises(ValueError, match="its checksum"):
        entry.check()


@pytest.mark.parametrize("changes", [{"count": 5999}, {"count": 0}, {"flags": 2}, {"flags": 128}])
def test_h6_a_footer_that_does_not_fit_the_summary_is_refused(changes) -> None:
    with pytest.raises(ValueError, match=r"it has|its sections"):
        _core.Entry(refooted(values(some(COUNT)), **changes))


def test_h6_short_entries_with_blocks_are_read() -> None:
    plain = encode([(b"a", b"k", None, 5, None), (None, None, b"\x81\xa1a\xa1b", None, None)])
    assert examine(_core.Entry(blocked(plain))) == examine(_core.Entry(plain))


def test_h6_packing_and_keeping_go_on_with_blocks() -> None:
    entry = _core.Entry(everything(COUNT))
    _, kept = _core.keep(entry, list(range(0, COUNT, 2)), 9)
    assert magic(kept) == BLOCKED
    found = [message[1:] for message in examine(_core.Entry(kept))]
    assert found == [message[1:] for message in examine(entry)[::2]]
    _, few = _core.keep(entry, [5, 7, 4000], 9)
    ((_, packed),) = _core.pack_kept([kept[:0] + few], 1 << 20)
    assert [m[0] for m in examine(_core.Entry(packed))] == [5, 7, 4000]
    broken = _core.Entry(flipped(kept, 8 * (len(kept) // 2)))
    with pytest.raises(ValueError, match="its checksum"):
        _core.keep(broken, list(range(broken.count)), 9)


# ---- readers -----------------------------------------------------------------------------


@pytest.fixture
def sent(topic) -> list[bytes]:
    """A topic of two large entries in a segment, [0, 6000) and [6000, 12000)."""
    items = some(2 * COUNT)
    with topic.producer() as producer:
        for start in (0, COUNT):
            producer.send_many(items[start : start + COUNT])
    return items


@pytest.fixture
def broken(engine, topic, sent, path) -> range:
    """A bit of the value 7000 is flipped: the offsets that this costs."""
    _, _, position, _ = REFERENCE.unpack(Damage(engine, topic).entries()[1][1])
    at = SIZE * 1000 + 50
    (file,) = Path(path, "segments").iterdir()
    with file.open("r+b", buffering=0) as segment:
        segment.seek(position + 4 * (COUNT + 1) + 4 + at)
        byte = segment.read(1)[0]
        segment.seek(-1, 1)
        segment.write(bytes([byte ^ 8]))
    block = at // BLOCK
    return range(COUNT + block * BLOCK // SIZE, COUNT - (-(block + 1) * BLOCK // SIZE))


def test_h6_readers_lose_one_block_and_are_told_which(engine, topic, sent, broken) -> None:
    seen, named = step_over(topic)
    assert named == set(broken)
    assert {n: value for n, (value, *_) in seen.items()} == {
        n: sent[n] for n in range(2 * COUNT) if n not in broken
    }
    reader = topic.reader()
    for offset in (broken.start - 1, broken.stop, 0, 2 * COUNT - 1):
        reader.seek(offset)
        assert reader.read_next(0).value == sent[offset]
    for offset in broken:
        reader.seek(offset)
        error = caught(lambda: reader.read_next(0))
        assert (error.topic, error.offsets) == ("orders", broken)
        assert f"the block with offsets {broken.start} to {broken.stop - 1}" in str(error)
        assert f"seek({broken.stop}) steps over it" in str(error)
        assert reader.position == offset


def test_h6_verify_names_the_block(engine, broken) -> None:
    report = engine.verify()
    (problem,) = report.problems
    assert f"offsets {broken.start} to {broken.stop - 1} is damaged" in problem
    assert report.messages == 2 * COUNT - len(broken)


def test_h6_verify_passes_over_a_block_that_was_trimmed(engine, topic, broken) -> None:
    topic.trim(before=broken.stop - 1)
    report = engine.verify()
    assert f"offsets {broken.stop - 1} to {broken.stop - 1} is damaged" in report.problems[0]
    assert report.messages == 2 * COUNT - broken.stop
    topic.trim(before=broken.stop)
    report = engine.verify()
    assert (report.problems, report.messages) == ((), 2 * COUNT - broken.stop)


def test_h6_arrow_reads_up_to_the_block_and_on_behind_it(topic, sent, broken) -> None:
    pytest.importorskip("pyarrow")
    reader, seen = topic.reader(), dict[int, bytes]()

    def read() -> None:
        while (batch := reader.read_arrow()) is not None:
            offsets, items = (batch.column(name).to_pylist() for name in ("offset", "value"))
            seen.update(zip(offsets, items, strict=True))

    assert caught(read).offsets == broken
    assert reader.position == broken.start
    reader.seek(broken.stop)
    read()
    assert seen == {n: sent[n] for n in range(2 * COUNT) if n not in broken}


def test_h6_two_blocks_are_named_one_after_the_other(engine, topic, path, broken) -> None:
    _, _, position, _ = REFERENCE.unpack(Damage(engine, topic).entries()[1][1])
    (file,) = Path(path, "segments").iterdir()
    content = bytearray(file.read_bytes())
    content[position + 4 * (COUNT + 1) + 4 + SIZE * 4000] ^= 1
    file.write_bytes(content)
    first = caught(lambda: list(topic.reader()))
    second = caught(lambda: list(topic.reader(first.offsets.stop)))
    assert first.offsets == broken
    assert COUNT + 4000 in second.offsets
    assert len(engine.verify().problems) == 2


def test_h6_a_reader_of_the_journal_loses_one_block(engine, topic) -> None:
    """Frames of up to 128 KiB stay in the journal; a checkpoint takes damage over as it is."""
    items = some(1000)
    with no_checkpoints(engine):
        with topic.producer() as producer:
            producer.send_many(items)
        (frame,) = frames(engine)
        assert magic(frame.entry) == BLOCKED
        flip(engine.path, frame.entry_at + 4 * 1001 + 4 + SIZE * 500)
        for _ in range(2):
            seen, named = step_over(topic)
            assert 500 in named
            assert len(named) <= BLOCK // SIZE + 2
            assert {n: value for n, (value, *_) in seen.items()} == {
                n: items[n] for n in range(1000) if n not in named
            }
            assert len(engine.verify().problems) == 1
            checkpoint(engine)


def test_h6_a_search_by_time_goes_on_beside_a_damaged_block(topic, sent, broken) -> None:
    published = topic.reader(broken.stop).read_next(0).publish_time
    assert topic.reader(moment(published)).position in (0, COUNT)
    assert topic.reader(moment(published - 60_000)).position == 0
    assert topic.reader(moment(published + 60_000)).position == 2 * COUNT


# ---- entries that a reader keeps open ----------------------------------------------------


def test_h6_a_reader_seeks_to_and_fro(topic, sent) -> None:
    reader, dice = topic.reader(), random.Random(5)
    for _ in range(500):
        offset = dice.randrange(2 * COUNT)
        reader.seek(offset)
        assert [m.value for m in reader.read_batch(3)] == sent[offset : offset + 3]


def test_h6_a_reader_that_seeks_back_is_told_what_is_missing(engine, topic, sent) -> None:
    reader = topic.reader()
    for offset in (0, COUNT + 1):
        reader.seek(offset)
        assert reader.read_next(0).value == sent[offset]
    Damage(engine, topic).remove(COUNT - 1)
    reader.seek(COUNT - 5)
    assert caught(lambda: reader.read_next(0)).offsets.stop == COUNT


def test_h6_an_entry_that_is_refused_is_not_kept_open(engine, topic, sent) -> None:
    """A row that refers to another topic's entry: reading it once must not make it this topic's."""
    with engine.topic("other").producer() as producer:
        for _ in range(2):
            producer.send_many([bytes(SIZE)] * COUNT)
    _, (last, reference) = Damage(engine, engine.topic("other")).entries()
    Damage(engine, topic).put(last, reference)
    reader = topic.reader()
    assert reader.read_next(0).value == sent[0]
    for _ in range(3):
        reader.seek(COUNT + 10)
        caught(lambda: reader.read_next(0))


def test_h6_what_a_reader_keeps_open_is_let_go_with_its_segment(engine, topic, sent, path) -> None:
    reader = topic.reader()
    for offset in (0, COUNT, 5):
        reader.seek(offset)
        assert reader.read_next(0).value == sent[offset]
    kept = reader.cursor._open
    assert len(kept) == 2
    with topic.producer() as producer:
        producer.send_many(sent[:COUNT])
    (segment,) = {REFERENCE.unpack(row)[1] for _, row in Damage(engine, topic).entries()}
    engine.ledger.segments._forget(segment)
    assert not len(kept)
    assert reader.read_next(0).value == sent[6]


def test_h6_a_reader_that_seeks_back_is_told_what_was_trimmed_or_deleted(
    engine, topic, sent
) -> None:
    reader = topic.reader()
    reader.seek(10)
    assert reader.read_next(0).value == sent[10]
    topic.trim(before=COUNT)
    reader.seek(10)
    with pytest.raises(xl.OffsetTrimmedError):
        reader.read_next(0)
    engine.delete_topic("orders")
    with pytest.raises(xl.TopicNotFoundError):
        reader.seek(COUNT)


CUT = """
    import os, sys
    import exclusivelog as xl
    from tests.log.test_blocks import COUNT, some
    from tests.storage.test_segments import only
    with xl.open(sys.argv[1]) as engine:
        topic = engine.topic("orders")
        with topic.producer() as producer:
            producer.send_many(some(COUNT))
        reader = topic.reader()
        for offset in (0, 10):
            reader.seek(offset)
            assert reader.read_next(0).offset == offset
        os.truncate(only(sys.argv[1]), 4096)
        reader.seek(COUNT - 1)
        try:
            reader.read_next(0)
        except xl.LedgerCorruptedError as error:
            print(error.offsets)
"""


@pytest.mark.long
def test_h6_an_open_entry_whose_file_was_cut_off_is_damage(path) -> None:
    assert finish(CUT, path) == f"range(0, {COUNT})\n"


def test_h6_the_disk_is_asked_for_nothing_outside_of_an_entry() -> None:
    """The prefetch estimates an entry by another one. However different the two are, it reads only
    within the entry."""
    dice = random.Random(8)
    entries = [values(some(COUNT)), everything(COUNT), values([bytes(1 << 17)])]
    likes = [_core.Entry(data) for data in entries]
    for like in (*likes, _core.Entry(values([b"short"]))):
        for data in (*entries, b"", b"x" * 100):
            for _ in range(50):
                count = dice.choice([0, 1, COUNT, dice.randrange(1 << 33), 2**64 - 1])
                _core.prefetch_like(
                    like, data, dice.choice([0, count // 2, max(0, count - 1)]), count
                )


@pytest.mark.parametrize("sizes", [(1, 400), (100, 100), (90, 110), (0, 3000)])
def test_h6_messages_of_any_length_are_found_in_any_order(engine, topic, sizes) -> None:
    """Also where the disk was asked for another block."""
    dice = random.Random(4)
    items = [dice.randbytes(dice.randint(*sizes)) for _ in range(9000)]
    keys = [b"%d" % n for n in range(9000)]
    with topic.producer() as producer:
        for start in range(0, 9000, 3000):
            some_items, some_keys = items[start : start + 3000], keys[start : start + 3000]
            producer.send_many(some_items, keys=some_keys)
    reader = topic.reader()
    for offset in dice.sample(range(9000), 300):
        reader.seek(offset)
        message = reader.read_next(0)
        assert (message.value, message.key) == (items[offset], keys[offset])
