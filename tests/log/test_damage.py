"""Damage: it is found and named, stepped over, and never returned as data (rule G9)."""

from __future__ import annotations

import collections
import functools
import random
import re
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.ownership import recording
from exclusivelog.local.records import CHANGES, KIND, LISTED, PAIR, U64, unpack_session
from exclusivelog.local.storage.tables import NOT_LISTED, NOT_TRIMMED, EntryTable
from testing.children import finish
from testing.entries import flipped, refooted
from testing.handovers import HeldUp, begin
from testing.journals import MORE, Frame, checkpoint, flip, frames, never_pack, no_checkpoints
from testing.processes import (
    PATIENCE,
    State,
    Worker,
    close_producer,
    open_producer,
    send,
    until,
    within,
)
from tests.log.test_readers import ASKED, PUBLISHED, blocked, fill, moment, publish, rest

pytestmark = pytest.mark.once  # either durability leaves the same on the disk

# ---- entries ---------------------------------------------------------------------------


class Damage:
    """Writes into a ledger's tables what no program should."""

    def __init__(self, engine: xl.Engine, topic: xl.Topic) -> None:
        self.engine, self.id = engine, topic.id

    def entries(self) -> list[tuple[int, bytes]]:
        with self.engine.ledger.read() as tables:
            return list(tables.entries.walk(self.id, 0))

    def put(self, last: int, data: bytes, table: str = "entries", key: bytes | None = None) -> None:
        with self.engine.ledger.write_exclusive() as tables:
            key = PAIR.pack(self.id, last) if key is None else key
            tables.rows.put(table, key, data)

    def restore(self, entries: list[tuple[int, bytes]]) -> None:
        with self.engine.ledger.write_exclusive() as tables:
            for last, data in entries:
                tables.rows.put("entries", PAIR.pack(self.id, last), data)

    def remove(self, last: int) -> None:
        with self.engine.ledger.write_exclusive() as tables:
            tables.rows.delete("entries", PAIR.pack(self.id, last))


@pytest.fixture
def damage(engine, topic, monkeypatch) -> Damage:
    """A topic of five entries in the tables, [0, 4), [4, 8) ... [16, 20)."""
    never_pack(monkeypatch)
    fill(topic, 20)
    engine.ledger.checkpoint()
    return Damage(engine, topic)


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "a few bytes": lambda data: b"garbage",
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: random.Random(1).randbytes(len(data)),
    "cut off in front": lambda data: data[8:],
    "cut off behind": lambda data: data[:-8],
    "twice": lambda data: data + data,
    "a value's bit": lambda data: flipped(data, 8 * 30),
    "an offset's bit": lambda data: flipped(data, 8 * 4),
    "the base offset's bit": lambda data: flipped(data, 8 * (len(data) - 56)),
    "the checksum's bit": lambda data: flipped(data, 8 * len(data) - 1),
    "another format": lambda data: refooted(data, magic=0x03454C58),
    "the format with blocks": lambda data: refooted(data, magic=0x02454C58),
    "another base offset": lambda data: refooted(data, base_offset=0),
    "a later base offset": lambda data: refooted(data, base_offset=400),
    "more messages": lambda data: refooted(data, count=5),
    "fewer messages": lambda data: refooted(data, count=3),
    "an unknown section": lambda data: refooted(data, flags=64),
}


def outcome(call: Callable[[], Any]) -> Any:
    """What the call gives, or the damage that it meets."""
    try:
        return call()
    except xl.LedgerCorruptedError as error:
        return error


def caught(call: Callable[[], Any]) -> xl.LedgerCorruptedError:
    with pytest.raises(xl.LedgerCorruptedError) as info:
        call()
    return info.value


@pytest.mark.parametrize("kind", GARBAGE)
def test_g9_a_damaged_entry_is_named_and_stepped_over(engine, topic, damage, kind) -> None:
    last, data = damage.entries()[2]
    damage.put(last, GARBAGE[kind](data))
    reader = topic.reader()
    seen = [m.value for m in reader.read_batch(8)]
    error = caught(lambda: reader.read_next(0))
    assert (error.topic, error.offsets) == ("orders", range(8, 12))
    assert "orders" in str(error)
    assert "seek(12)" in str(error)
    assert reader.position == 8
    assert caught(lambda: reader.read_batch(100)).offsets == range(8, 12)
    assert caught(lambda: list(reader)).offsets == range(8, 12)
    assert caught(lambda: list(topic.reader(10))).offsets == range(8, 12)
    reader.seek(error.offsets.stop)
    assert seen + rest(reader) == [b"%d" % n for n in [*range(8), *range(12, 20)]]
    (problem,) = engine.verify().problems
    assert "orders" in problem
    assert "8 to 11" in problem


def test_g9_what_comes_before_the_damage_is_handed_out_first(topic, damage) -> None:
    damage.put(11, b"garbage")
    for read in (
        lambda reader, seen: seen.extend(reader.read_batch(100)),
        lambda reader, seen: [seen.append(message) for message in reader],
        lambda reader, seen: [seen.append(message) for message in reader.follow(0)],
    ):
        reader, seen = topic.reader(), []
        while reader.position < 8:
            try:
                read(reader, seen)
            except xl.LedgerCorruptedError:
                break
        assert reader.position == 8
        assert [m.offset for m in seen] == list(range(8))


@pytest.mark.parametrize("index", [0, 2, 4])
def test_g9_damage_is_named_wherever_it_is(topic, damage, index) -> None:
    last, _ = damage.entries()[index]
    damage.put(last, b"garbage")
    error = caught(lambda: list(topic.reader(last)))
    assert error.offsets == range(last - 3, last + 1)
    assert rest(topic.reader(last + 1)) == [b"%d" % n for n in range(last + 1, 20)]


def test_g9_two_damaged_entries_are_both_named(engine, topic, damage) -> None:
    damage.put(7, b"garbage")
    damage.put(11, b"garbage")
    reader = topic.reader(4)
    assert caught(lambda: list(reader)).offsets == range(4, 8)
    reader.seek(8)
    assert caught(lambda: list(reader)).offsets == range(8, 12)
    assert len(engine.verify().problems) == 2


@pytest.mark.parametrize("index", [0, 2, 4])
def test_g9_a_missing_entry_is_named_and_stepped_over(engine, topic, damage, index) -> None:
    last, _ = damage.entries()[index]
    damage.remove(last)
    gone = range(last - 3, last + 1)
    reader = topic.reader()
    seen = [m.value for m in reader.read_batch(gone.start)] if gone.start else []
    error = caught(lambda: reader.read_next(0))
    assert (error.topic, error.offsets) == ("orders", gone)
    assert reader.position == gone.start
    assert caught(lambda: topic.reader(gone.start + 1).read_next(0)).offsets.stop == gone.stop
    assert caught(lambda: list(topic.reader(gone.start))).offsets == gone
    reader.seek(error.offsets.stop)
    assert seen + rest(reader) == [b"%d" % n for n in range(20) if n not in gone]
    (problem,) = engine.verify().problems
    assert f"{gone.start} to {gone.stop - 1}" in problem


def test_g9_all_entries_missing(engine, topic, damage) -> None:
    for last, _ in damage.entries():
        damage.remove(last)
    assert caught(lambda: list(topic.reader())).offsets == range(20)
    assert len(engine.verify().problems) == 1
    with topic.producer() as producer:
        assert producer.send(b"20") == 20
    assert rest(topic.reader(20)) == [b"20"]


def test_g9_missing_messages_are_no_messages(topic, damage) -> None:
    """A reader at the gap is not told that all is well, and that there is nothing more."""
    damage.remove(19)
    assert outcome(topic.reader(16).has_message_available) is not False


def test_g9_two_entries_in_each_others_place_are_found(engine, topic, damage) -> None:
    (first, one), (second, other) = damage.entries()[1:3]
    damage.put(first, other)
    damage.put(second, one)
    reader = topic.reader(4)
    assert caught(lambda: list(reader)).offsets == range(4, 8)
    reader.seek(8)
    assert caught(lambda: list(reader)).offsets == range(8, 12)
    assert rest(topic.reader(12)) == [b"%d" % n for n in range(12, 20)]
    assert len(engine.verify().problems) == 2


def test_g9_an_entry_of_another_topic_is_found(engine, topic, damage) -> None:
    """Both topics have an entry with these very offsets; only the place of one is wrong."""
    other = engine.topic("other")
    with other.producer(max_batch_messages=4) as producer:
        producer.send_many([b"foreign"] * 20)
    engine.ledger.checkpoint()
    damage.put(7, Damage(engine, other).entries()[1][1])
    reader = topic.reader(4)
    assert caught(lambda: list(reader)).offsets == range(4, 8)
    assert len(engine.verify().problems) == 1


@pytest.mark.parametrize("index", range(6))
def test_g9_a_damaged_key_costs_its_own_entry(path, monkeypatch, index) -> None:
    """An entry seems to stand far behind the end of its topic, and its neighbours out of order."""
    never_pack(monkeypatch)
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        number = engine.topic("orders").id
        for first in range(0, 12, 2):
            producer.send_many([b"%d" % first, b"%d" % (first + 1)])
        checkpoint(engine)
    data = Path(path, "data.mdb")
    content, key = bytearray(data.read_bytes()), PAIR.pack(number, 2 * index + 1)
    assert key in content
    at = content.find(key)
    while at >= 0:  # also in pages that are out of use
        content[at + len(key) - 3] ^= 128
        at = content.find(key, at + 1)
    data.write_bytes(content)
    with xl.open(path) as engine:
        seen, named = step_over(engine.topic("orders"))
        assert seen.keys() | named >= set(range(12))
        assert all(value == b"%d" % offset for offset, (value, *_) in seen.items())
        assert engine.verify().problems


@pytest.mark.parametrize("broken", [range(20), range(4, 12), range(16, 20), range(1000)])
def test_g9_a_broken_page_of_the_tables_is_stepped_over(topic, damage, monkeypatch, broken) -> None:
    """LMDB finds its own page broken, and cannot say which messages that costs."""
    found, end = EntryTable.at, topic.next_offset

    def at(table: EntryTable, topic_id: int, offset: int) -> Any:
        if offset in broken:
            raise lmdb.CorruptedError("mdb_cursor_get: MDB_CORRUPTED")
        return found(table, topic_id, offset)

    def stored(table: EntryTable, topic_id: int, offset: int) -> Iterator[tuple[int, bytes]]:
        while (place := table.at(topic_id, offset)) is not None:
            yield place
            offset = place[0] + 1

    monkeypatch.setattr(EntryTable, "at", at)
    monkeypatch.setattr(EntryTable, "stored", stored)
    seen, lost = step_over(topic)
    assert sorted(lost) == list(broken)[:end]
    assert set(seen) | lost == set(range(end))
    reader = topic.reader(end)
    assert not reader.has_message_available()
    with pytest.raises(xl.WaitTimeoutError):  # there is nothing to be read
        reader.read_next(timeout=0)
    with topic.producer() as producer:
        producer.send(b"more")
    assert reader.read_next(timeout=0).value == b"more"


def test_g9_damage_in_one_topic_is_no_other_topics(engine, topic, damage) -> None:
    other = engine.topic("other")
    sent = fill(other, 8)
    damage.put(11, b"garbage")
    assert rest(other.reader()) == sent
    with topic.producer() as producer:
        assert producer.send(b"20") == 20
    assert rest(topic.reader(12)) == [b"%d" % n for n in range(12, 21)]


def test_g9_arrow_never_wraps_damage(topic, damage) -> None:
    pytest.importorskip("pyarrow")
    damage.put(11, b"garbage")
    reader = topic.reader()
    seen: list[bytes] = []
    while not isinstance(batch := outcome(reader.read_arrow), xl.LedgerCorruptedError):
        seen += batch.column("value").to_pylist()
    assert batch.offsets == range(8, 12)
    assert seen == [b"%d" % n for n in range(8)]
    reader.seek(12)
    assert reader.read_arrow().column("offset").to_pylist() == list(range(12, 20))


def test_g9_an_arrow_stream_that_meets_damage_takes_nothing(topic, damage) -> None:
    pa = pytest.importorskip("pyarrow")
    damage.put(11, b"garbage")
    with topic.reader(group="g") as reader:
        for _ in range(2):
            with pytest.raises(OSError, match=re.escape("seek(12)")):
                pa.table(reader)
            assert reader.position == 0
        assert reader.read_arrow().num_rows == 8


def test_g9_a_group_gets_what_comes_before_damage_in_one_of_its_topics(
    engine, topic, damage
) -> None:
    fill(engine.topic("other"), 20)
    damage.put(11, b"garbage")
    seen: dict[str, list[int]] = {"orders": [], "other": []}
    with engine.reader(["orders", "other"], group="g") as reader:
        found = outcome(lambda: reader.read_batch(100))
        while found:
            if isinstance(found, xl.LedgerCorruptedError):
                reader.seek(found.offsets.stop, topic=found.topic)
            else:
                for name, message in found:
                    seen[name].append(message.offset)
            found = outcome(lambda: reader.read_batch(100))
    assert seen == {"orders": [*range(8), *range(12, 20)], "other": list(range(20))}


@pytest.mark.parametrize("kind", ["garbage", "missing"])
def test_g9_a_search_by_time_ends_in_spite_of_damage(engine, topic, monkeypatch, kind) -> None:
    """Halving goes by the entries' own offsets; where they are gone or wrong it must neither
    run for ever nor end up somewhere else without a word."""
    never_pack(monkeypatch)
    publish(topic)
    engine.ledger.checkpoint()
    broken = Damage(engine, topic)
    for index, (last, _) in enumerate(broken.entries()):
        if index in (0, 1, 2, 4, 7, 8):
            broken.remove(last) if kind == "missing" else broken.put(last, b"garbage")
    times = [ms for ms in PUBLISHED for _ in range(3)]
    readable = {n for n in range(27) if n // 3 not in (0, 1, 2, 4, 7, 8)}
    for ms in ASKED:
        expected = sum(published < ms for published in times)
        found = outcome(lambda ms=ms: within(lambda: topic.reader(moment(ms)).position, PATIENCE))
        if isinstance(found, xl.LedgerCorruptedError):
            assert found.topic == "orders"
            assert found.offsets
        else:
            between = set(range(min(found, expected), max(found, expected)))
            assert not between & readable


def step_over(topic: xl.Topic) -> tuple[dict[int, Any], set[int]]:
    """(offset -> message parts, offsets named as damaged) of the whole topic."""
    reader = topic.reader()
    seen: dict[int, Any] = {}
    lost: set[int] = set()

    def read() -> None:
        for message in reader:
            seen[message.offset] = message.value, message.key, message.sequence_id

    while (error := outcome(read)) is not None:
        assert error.topic == topic.name
        assert reader.position < error.offsets.stop < 10_000
        lost |= set(error.offsets)
        reader.seek(error.offsets.stop)
    return seen, lost


def test_g9_nothing_wrong_is_ever_returned_and_nothing_right_is_lost(
    engine, topic, monkeypatch
) -> None:
    """Entries are damaged, swapped and removed at random. A reader that steps over what
    is named, gets every sound message as it was sent; what is named covers all the rest."""
    never_pack(monkeypatch)
    dice = random.Random(9)
    with topic.producer(max_batch_messages=5) as producer:
        for number in range(30):
            size = dice.choice([1, 3, 5, 12])
            keys = [b"%d" % n for n in range(size)] if number % 2 else None
            producer.send_many([dice.randbytes(dice.randrange(40)) for _ in range(size)], keys=keys)
    truth, lost = step_over(topic)
    assert not lost
    engine.ledger.checkpoint()
    broken = Damage(engine, topic)
    sound = broken.entries()
    assert len(sound) > 30
    for _ in range(100):
        touched: set[int] = set()
        for _ in range(dice.choice([1, 1, 2, 5])):
            index, other = dice.sample(range(len(sound)), 2)
            last, data = sound[index]
            match dice.randrange(4):
                case 0:
                    broken.remove(last)
                case 1:
                    broken.put(last, flipped(data, dice.randrange(8 * len(data))))
                case 2:
                    broken.put(last, dice.choice(list(GARBAGE.values()))(data))
                case 3:
                    broken.put(last, sound[other][1])
            start = sound[index - 1][0] + 1 if index else 0
            touched |= set(range(start, last + 1))
        seen, lost = step_over(topic)
        assert seen.items() <= truth.items()
        assert set(seen) | lost == set(truth)
        assert lost <= touched
        assert engine.verify().ok == (not lost)
        broken.restore(sound)


def test_g9_a_damaged_topic_row_is_found_and_the_others_stay(engine, topic, damage) -> None:
    sent = fill(engine.topic("other"), 4)
    with engine.ledger.read() as tables:
        row = tables.topics.get(topic.id).pack()
    damage.put(0, flipped(row, 300), table="topics", key=U64.pack(topic.id))
    for call in (
        lambda: topic.next_offset,
        lambda: topic.reader(),
        lambda: topic.producer(),
        lambda: engine.topic("orders"),
    ):
        caught(call)
    assert rest(engine.topic("other").reader()) == sent
    report = engine.verify()
    assert not report.ok
    assert report.messages == 4


def own_orders_and(state: State, name: str) -> None:
    open_producer(state, "exclusive")
    state.kept[name] = state.engine.topic(name).producer("exclusive")


def damage_row(engine: xl.Engine, name: str) -> None:
    topic = engine.topic(name)
    with engine.ledger.read() as tables:
        row = tables.topics.get(topic.id).pack()
    Damage(engine, topic).put(0, flipped(row, 300), table="topics", key=U64.pack(topic.id))


@pytest.mark.sampled
@pytest.mark.parametrize("end", ["kill", "end"])
def test_d4_a_damaged_topic_row_holds_up_no_other_topics_waiters(path, worker, end) -> None:
    """Its owner had two topics, and died, or has closed its engine."""
    owner = worker()
    owner.call(own_orders_and, "broken")
    with xl.open(path) as engine:
        waiting = engine.topic("orders").producer_async("wait_for_exclusive")
        damage_row(engine, "broken")
        if end == "kill":
            owner.kill()
        else:
            owner.call(close_the_engine)
        assert waiting.result(PATIENCE).topic_epoch == 2
        until(lambda: engine.backend.sessions.find_dead() == [])


def test_d4_a_damaged_hand_over_holds_up_no_other_topics_waiters(path, worker) -> None:
    """The row of a hand-over is read when its topic is to be evicted or promoted."""
    owner = worker()
    owner.call(own_orders_and, "broken")
    with xl.open(path) as engine:
        waiting = engine.topic("orders").producer_async("wait_for_exclusive")
        damage_hand_over(engine, "broken")
        owner.kill()
        assert waiting.result(PATIENCE).topic_epoch == 2


@pytest.mark.parametrize(
    ("table", "slot"), [("holders", 0), ("queue", 0), ("engines", 0), ("engines", 2)]
)
def test_d4_a_damaged_session_row_holds_up_no_other_topics_waiters(
    path, worker, table, slot, caplog
) -> None:
    """Of two topics of a dead engine, the session's row of one is damaged, its row in the index of
    the engine's sessions, or the first waiter's; its shared producers are evicted, too."""
    owner = worker()
    owner.call(own_orders_and, "broken")
    owner.call(share, "shared")
    with xl.open(path) as engine:
        broken, shared = engine.topic("broken"), engine.topic("shared")
        ahead = broken.producer_async("wait_for_exclusive")
        until(lambda: len(broken.waiters) == 1)
        waiting = engine.topic("orders").producer_async("wait_for_exclusive")
        with engine.ledger.read() as tables:
            number = U64.pack(broken.id)
            key, data = next(
                (key, data)
                for key, data in tables.rows.cursor(table)
                if (data[2:] if table == "engines" else key).startswith(number)
                and f"{int.from_bytes(key[:8]):016x}" != engine.id
            )
        data = b"\xff" * slot + data[slot:] if slot else b"\xc1"
        Damage(engine, broken).put(0, data, table=table, key=key)
        owner.kill()
        assert waiting.result(PATIENCE).topic_epoch == 2
        engine.backend.sessions.evict_gone()
        assert shared.holders == []
        if not slot:  # whose engine seems to be gone
            assert not ahead.done()
            until(lambda: "is promoted there" in caplog.text or "not evicted" in caplog.text)


def test_d4_a_damaged_notification_holds_up_no_other_topics_waiters(engine) -> None:
    """An engine that waits for two topics hears of the second grant."""
    names = ("broken", "orders")
    owners = [engine.topic(name).producer("exclusive") for name in names]
    waiting = [engine.topic(name).producer_async("wait_for_exclusive") for name in names]
    with engine.ledger.write_exclusive() as tables:
        key = PAIR.pack(int(engine.id, 16), tables.rows.next_id(b"mail"))
        tables.rows.put("mail", key, b"\xc1")
    owners[1].close()
    assert waiting[1].result(PATIENCE).topic_epoch == 2
    assert not waiting[0].done()


@pytest.mark.parametrize("slot", [b"\xff\xff", b"\x01\xff"], ids=["none", "another's"])
def test_c2_a_damaged_index_evicts_nothing_of_a_living_engine(path, worker, slot) -> None:
    """Its first row says that the engine is at another slot, where it is not."""
    living = worker()
    for name in ("one", "two"):
        living.call(share, name)
    with xl.open(path) as engine:
        with engine.ledger.write_exclusive() as tables:
            key, data = next(
                (key, data)
                for key, data in tables.rows.cursor("engines")
                if f"{int.from_bytes(key[:8]):016x}" != engine.id
            )
            tables.rows.put("engines", key, slot + data[2:])
        engine.backend.sessions.evict_gone()
        assert [len(engine.topic(name).holders) for name in ("one", "two")] == [1, 1]


def test_g9_a_topic_that_has_lost_its_rows_does_not_hide_the_others(engine) -> None:
    for name in ("broken", "orders"):
        engine.topic(name)
    with engine.ledger.write_exclusive() as tables:
        tables.rows.put("meta", b"listedbroken", b"\xc1")
        tables.rows.delete("names", b"broken")
    assert engine.topics() == ["broken", "orders"]
    assert engine.stats().topics == 2


def share(state: State, name: str) -> None:
    state.kept[name] = state.engine.topic(name).producer("shared")


def close_the_engine(state: State) -> None:
    state.engine.close()


@pytest.mark.parametrize("seen", ["late", "early"])
@pytest.mark.parametrize("table", ["topics", "transfers"])
def test_e4_a_damaged_row_holds_up_no_other_topics_moves(path: str, table: str, seen: str) -> None:
    """Several topics are released together, and a row of one is damaged: the topic's, or that of
    its hand-over. The others move, also if the coordinator finds the damage before, and so do
    topics that are moved later."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        names = ("broken", "orders", "later")
        owners = [a.topic(name).producer("exclusive") for name in names]
        waiting = b.topic("orders").producer_async("wait_for_exclusive")
        inspect, found = a.backend.hand_over.inspect, threading.Event()

        def look(begun: Any) -> Any:
            moves = inspect(begun)
            if any(isinstance(move, xl.LedgerCorruptedError) for move in moves):
                found.set()
            return moves

        a.backend.hand_over.inspect = look
        with HeldUp(a) as held_up:
            call = begin(a.unload, ["orders", "broken"], b.id, PATIENCE)
            held_up.await_it()
            if table == "topics":
                damage_row(a, "broken")
            else:
                damage_hand_over(a, "broken")
            if seen == "early":
                assert found.wait(PATIENCE)
            held_up.go_on()
            assert waiting.result(PATIENCE).topic_epoch == 2
        assert isinstance(call.exception(PATIENCE), xl.LedgerCorruptedError)
        assert [move.state for move in a.unload("later", to=b.id)] == ["assigned"]
        assert owners[2].state == "open"  # it is within reach


def damage_hand_over(engine: xl.Engine, name: str) -> None:
    topic = engine.topic(name)
    Damage(engine, topic).put(0, b"no row", table="transfers", key=U64.pack(topic.id))


@pytest.mark.parametrize("found", ["living", "again"])
def test_g9_a_damaged_topic_row_holds_up_no_other_topics_checkpoint(path, found, caplog) -> None:
    """The journal has messages of a topic whose row is damaged: it is emptied all the same, the
    others go on, and the messages are kept at their place, by their offsets."""
    with xl.open(path) as engine:
        with no_checkpoints(engine):
            broken, sound = engine.topic("broken"), engine.topic("sound")
            owners = [each.producer("exclusive", name="p") for each in (broken, sound)]
            for n in range(5):
                for owner in owners:
                    owner.send(b"%d" % n)
            with engine.ledger.read() as tables:
                whole = tables.rows.get("topics", U64.pack(broken.id))
            damage_row(engine, "broken")
        if found == "living":
            engine.ledger.checkpoint()
            assert engine.ledger.journal is not None
            assert engine.ledger.journal.backlog == 0
            assert owners[1].send(b"5") == 5
    with xl.open(path) as engine:
        assert engine.topic("sound").next_offset == (6 if found == "living" else 5)
        with pytest.raises(xl.LedgerCorruptedError):
            engine.topic("broken").next_offset
        with engine.ledger.write_checkpointed() as tables:
            entries = [
                _core.Entry(tables.entries.load(data))
                for _, data in tables.entries.walk(broken.id, 0)
            ]
            messages = [e.message(i) for e in entries for i in range(e.end - e.base_offset)]
            assert [(m.offset, m.value) for m in messages] == [(n, b"%d" % n) for n in range(5)]
            assert tables.producers.get(broken.id, "p")[0] == 4
            # Once the row is put right, they are there again.
            row = _core.TopicRow.unpack(whole)
            row.next_offset, row.owner = 5, 0
            tables.topics.put(row)
        assert [m.value for m in engine.topic("broken").reader()] == [b"%d" % n for n in range(5)]
    assert f"{path}" in caplog.text
    assert "kept" in caplog.text


@pytest.mark.long
def test_d7_a_damaged_topic_row_holds_up_no_other_topics_settling(engine) -> None:
    """Two topics are in their settle delay, and a former owner reconnects at the same time."""
    names = ["broken", "orders"]
    for name in names:
        engine.topic(name).producer("exclusive").close()
    waiting = [
        engine.topic(name).producer_async("wait_for_exclusive", settle=1.0) for name in names
    ]
    damage_row(engine, "broken")
    assert waiting[1].result(PATIENCE).topic_epoch == 2
    assert not waiting[0].done()


# key -> value, each of a wrong form, in the tables that hold no messages
STRANGE = [
    ("names", lambda t: t.name.encode(), b"abc"),
    ("topics", lambda t: U64.pack(t.id), b""),
    ("producers", lambda t: U64.pack(t.id) + b"a", b"abc"),
    ("holders", lambda t: PAIR.pack(t.id, 77), b"\xc1"),
    ("holders", lambda t: PAIR.pack(t.id, 77), b"\x93\x01\x02\x03"),
    ("queue", lambda t: PAIR.pack(t.id, 77) + bytes(20), b"\xc1"),
]


@pytest.mark.parametrize(("table", "key", "data"), STRANGE)
def test_g9_rows_of_a_wrong_form_are_damage_too(engine, topic, damage, table, key, data) -> None:
    """Every call that reads such a row raises LedgerCorruptedError, not the error of a decoder."""
    damage.put(0, data, table=table, key=key(topic))
    for call in (
        lambda: engine.topic("orders").next_offset,
        lambda: topic.owner,
        lambda: topic.waiters,
        lambda: topic.holders,
        lambda: topic.producer("exclusive_with_fencing", name="a").close(),
        lambda: engine.topics(),
        lambda: list(topic.reader()),
    ):
        outcome(call)


@pytest.fixture
def tail(worker: Callable[..., Worker]) -> Iterator[Worker]:
    other = worker()
    other.call(open_producer, "shared")
    yield other
    other.call(close_producer)


def test_g9_a_reader_that_waits_meets_damage_too(topic, damage, tail) -> None:
    reader, seen = topic.reader("latest"), []
    thread = blocked(reader, seen)
    damage.put(23, b"garbage")
    tail.call(send, b"20")
    thread.join(PATIENCE)
    until(lambda: seen)
    assert isinstance(seen[0], xl.LedgerCorruptedError) or seen[0].value == b"20"


def test_g9_what_is_trimmed_while_it_is_read_is_no_damage(topic, monkeypatch) -> None:
    """However often: each time the reader has begun anew, the next file is gone, too."""
    sent = fill(topic, 20)
    reader = topic.reader(trimmed="earliest")
    read_on, gone = reader.cursor._read_on, []

    def read_what_goes(tables: Any) -> Any:
        if len(gone) == 3:
            return read_on(tables)
        gone.append(topic.trim(before=4 * len(gone) + 4))
        raise xl.LedgerCorruptedError(f"what comes before offset {gone[-1]} is damaged")

    monkeypatch.setattr(reader.cursor, "_read_on", read_what_goes)
    assert [message.value for message in reader] == sent[12:]
    assert gone == [4, 8, 12]


# ---- the journal -----------------------------------------------------------------------
# What was sent last stands in frames of the file `journal`: a header of 56 bytes, and an entry
# that ends in a footer of 64. Where the header is damaged and the entry is not, nothing is lost.

SECTIONS = {"an offset": 4, "a value": 25}  # bytes behind the entry's beginning
FOOTERS = {  # bytes before the entry's end
    "topic": 64, "base offset": 56, "base offset, by far": 51, "epoch": 48, "session": 40,
    "base sequence": 32, "publish time": 24, "publish time, by far": 19, "count": 16,
    "count, by far": 14, "flags": 12, "name length": 10, "magic": 8, "checksum": 4,
}  # fmt: skip
HEADERS = {  # bytes behind the frame's beginning
    "magic": 0, "size": 4, "flags and size": 7, "position": 8, "generation": 16, "topic": 24,
    "base offset": 32, "version": 40, "count": 48, "checksum": 52,
}  # fmt: skip


def in_entry(name: str) -> Callable[[Frame], int]:
    if name in SECTIONS:
        return lambda frame: frame.entry_at + SECTIONS[name]
    return lambda frame: frame.entry_at + len(frame.entry) - FOOTERS[name]


class Sent:
    """Five frames of "orders", [0, 4), [4, 8) ... [16, 20), and between them those of "other"."""

    def __init__(self, engine: xl.Engine) -> None:
        self.orders, self.other = engine.topic("orders"), engine.topic("other")
        with self.orders.producer() as producer, self.other.producer() as beside:
            for number in range(0, 20, 4):
                producer.send_many([b"%d" % n for n in range(number, number + 4)])
                beside.send(b"beside %d" % number)
        found = [_core.Entry(frame.entry).topic for frame in frames(engine)]
        assert found == [self.orders.id, self.other.id] * 5
        self.frames = frames(engine)[::2]
        assert [frame.offsets.start for frame in self.frames] == [0, 4, 8, 12, 16]


def check_damaged(engine: xl.Engine, gone: range, more: int = 0) -> None:
    """All of "orders" but `gone` is there, and `gone` is named, to readers of every kind."""
    topic, other = engine.topic("orders"), engine.topic("other")
    assert topic.next_offset == 20 + more
    seen, lost = step_over(topic)
    assert {offset: value for offset, (value, *_) in seen.items()} == {
        n: b"%d" % n for n in range(20 + more) if n not in gone
    }
    assert lost == set(gone)
    assert rest(other.reader()) == [b"beside %d" % n for n in range(0, 20, 4)]
    if not gone:
        assert engine.verify().ok
        return
    error = caught(lambda: list(topic.reader(gone.start)))
    assert (error.topic, error.offsets) == ("orders", gone)
    assert caught(lambda: topic.reader(gone.start).read_next(0)).offsets == gone
    assert rest(topic.reader(gone.stop)) == [b"%d" % n for n in range(gone.stop, 20 + more)]
    (problem,) = engine.verify().problems
    assert "orders" in problem
    assert f"{gone.start} to {gone.stop - 1}" in problem


def check_for_good(engine: xl.Engine, gone: range) -> None:
    """Before the checkpoint and after it, and with what is sent then."""
    check_damaged(engine, gone)
    checkpoint(engine)
    assert frames(engine) == []
    check_damaged(engine, gone)
    with engine.topic("orders").producer("exclusive") as producer:
        assert producer.send(b"20") == 20
        check_damaged(engine, gone, more=1)
        checkpoint(engine)
        check_damaged(engine, gone, more=1)


@pytest.mark.sampled
@pytest.mark.parametrize("index", [0, 2, 4])
@pytest.mark.parametrize("name", [*SECTIONS, *FOOTERS])
def test_g9_a_damaged_entry_of_the_journal_is_named_and_stepped_over(engine, name, index) -> None:
    """The engine is open, and the entry is only in the journal. Whatever the damaged entry
    contains, the entries beside it are found at their places."""
    with no_checkpoints(engine):
        sent = Sent(engine)
        frame = sent.frames[index]
        flip(engine.path, in_entry(name)(frame))
        check_for_good(engine, frame.offsets)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("name", HEADERS)
def test_g9_a_damaged_frame_header_hides_nothing(engine, name, index) -> None:
    """Neither the frames behind it nor its own entry, which says itself what it is."""
    with no_checkpoints(engine):
        sent = Sent(engine)
        frame = sent.frames[index]
        flip(engine.path, frame.at + HEADERS[name])
        check_for_good(engine, range(0))


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("name", HEADERS)
def test_g9_a_damaged_frame_does_not_hide_the_frames_behind_it(engine, name, index) -> None:
    """It is unknown to which topic it belonged; but the missing offsets are named."""
    with no_checkpoints(engine):
        sent = Sent(engine)
        frame = sent.frames[index]
        flip(engine.path, frame.at + HEADERS[name])
        flip(engine.path, frame.entry_at + SECTIONS["a value"])
        check_for_good(engine, frame.offsets)


@pytest.mark.parametrize("place", ["header", "entry"])
def test_g9_damage_of_what_was_sent_last_gives_its_offsets_to_no_other(engine, place) -> None:
    """No later entry shows that there is a gap. But the messages were acknowledged: readers get an
    error, and no other message gets their offsets."""
    with no_checkpoints(engine):
        topic = engine.topic("orders")
        with topic.producer() as producer:
            producer.send_many([b"%d" % n for n in range(4)])
            producer.send_many([b"%d" % n for n in range(4, 8)])
        frame = frames(engine)[-1]
        flip(engine.path, frame.at if place == "header" else frame.entry_at + 25)
        assert outcome(topic.reader(4).has_message_available) is not False
        seen, lost = step_over(topic)
        assert set(seen) | lost == set(range(8))
        for _ in range(2):
            with topic.producer("exclusive") as producer:
                assert producer.send(b"new") >= 8
            checkpoint(engine)
        seen, lost = step_over(topic)
        assert set(range(8)) <= set(seen) | lost
        assert {n: seen[n][0] for n in seen if n < 8} == {
            n: b"%d" % n for n in range(8) if n not in lost
        }


def test_g9_damage_within_one_atomic_append_costs_only_the_entry_it_is_in(engine, topic) -> None:
    with no_checkpoints(engine):
        fill(topic, 20)
        found = frames(engine)
        assert [frame.flags for frame in found] == [MORE, MORE, MORE, MORE, 0]
        flip(engine.path, found[1].entry_at + 25)
        for at in (found[3].at, found[3].entry_at + 25):
            flip(engine.path, at)
        for _ in range(2):
            seen, lost = step_over(topic)
            assert lost == {*range(4, 8), *range(12, 16)}
            assert sorted(seen) == [n for n in range(20) if n not in lost]
            assert len(engine.verify().problems) == 2
            checkpoint(engine)


def test_g9_arrow_never_wraps_damage_of_the_journal(engine) -> None:
    pytest.importorskip("pyarrow")
    with no_checkpoints(engine):
        sent = Sent(engine)
        flip(engine.path, sent.frames[2].entry_at + 25)
        for _ in range(2):
            reader = sent.orders.reader()
            seen: list[bytes] = []
            while not isinstance(batch := outcome(reader.read_arrow), xl.LedgerCorruptedError):
                seen += batch.column("value").to_pylist()
            assert batch.offsets == range(8, 12)
            assert seen == [b"%d" % n for n in range(8)]
            reader.seek(12)
            assert reader.read_arrow().column("offset").to_pylist() == list(range(12, 20))
            checkpoint(engine)


SPOTS: dict[str, Callable[[Frame], int]] = {
    "a value": in_entry("a value"),
    "base offset": in_entry("base offset"),
    "header": lambda frame: frame.at,
}


@pytest.mark.parametrize("spot", SPOTS)
def test_g9_damage_in_a_copied_journal_is_named_and_stepped_over(path, tmp_path, spot) -> None:
    """The directory is copied while nothing of it is in the tables, the copy is damaged, and
    opened: the journal is recovered, as after a power cut. What was flushed is known to have
    been there; of others, damage cannot be told from a frame that never arrived."""
    copy = tmp_path / "copy"
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        sent = Sent(engine)
        shutil.copytree(path, copy)
    frame = sent.frames[2]
    flip(copy, SPOTS[spot](frame))
    for _ in range(2):
        with xl.open(copy) as other:
            check_damaged(other, range(0) if spot == "header" else frame.offsets)
    with xl.open(path) as engine:
        assert engine.verify().ok


def send_and_stay(state: State) -> list[Frame]:
    state.kept["unpacked"] = no_checkpoints(state.engine)
    state.kept["unpacked"].__enter__()
    return Sent(state.engine).frames


@pytest.mark.parametrize("spot", SPOTS)
def test_g9_damage_behind_a_dead_process_is_named_and_stepped_over(path, worker, spot) -> None:
    """It was killed with everything still in the journal; then the damage; then somebody opens
    the ledger."""
    other = worker()
    frame = other.call(send_and_stay)[2]
    other.kill()
    flip(path, SPOTS[spot](frame))
    with xl.open(path) as engine, no_checkpoints(engine):
        check_for_good(engine, range(0) if spot == "header" else frame.offsets)


def test_g9_nothing_wrong_comes_out_of_a_journal_with_flipped_bits(engine) -> None:
    """Bits of headers and entries are turned at random, and turned back. What is read is what
    was sent; what is not is named, as long as something behind it was left."""
    dice = random.Random(12)
    with no_checkpoints(engine):
        topic = engine.topic("orders")
        with topic.producer() as producer:
            for _ in range(30):
                size = dice.choice([1, 3, 12])
                producer.send_many([dice.randbytes(dice.randrange(40)) for _ in range(size)])
        truth, _ = step_over(topic)
        found = frames(engine)
        for _ in range(300):
            hit = [dice.choice(found[:-1]) for _ in range(dice.choice([1, 1, 3]))]
            flips = [
                (frame.at + dice.randrange(32 + len(frame.entry)), 1 << dice.randrange(8))
                for frame in hit
            ]
            for at, mask in flips:
                flip(engine.path, at, mask)
            seen, lost = step_over(topic)
            assert seen.items() <= truth.items()
            assert set(seen) | lost == set(truth)
            assert lost <= {n for frame in hit for n in frame.offsets}
            for at, mask in flips:
                flip(engine.path, at, mask)
        assert step_over(topic) == (truth, set())


# ---- the file itself -------------------------------------------------------------------

FLIPS = """
    import collections, os, random, signal, sys
    source, work, seed, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    import exclusivelog as xl
    from testing.patience import PATIENCE
    xl.open  # imported here, and not by each child
    sound = open(source + "/data.mdb", "rb").read()
    truth = eval(open(source + "/truth").read())
    dice = random.Random(seed)

    def judge(path):
        with xl.open(path, readonly=True) as engine:
            for name, expected in truth.items():
                reader = engine.topic(name, create=False).reader()
                while True:
                    try:
                        for m in reader:
                            if expected.get(m.offset) != m.value:
                                os._exit(9)             # wrong data
                        break
                    except xl.LedgerCorruptedError as error:
                        if error.offsets.stop <= reader.position:
                            raise
                        reader.seek(error.offsets.stop)

    ends = collections.Counter()
    for number in range(rounds):
        path = f"{work}/{seed}-{number}"
        os.mkdir(path)
        changed = bytearray(sound)
        for _ in range(dice.choice([1, 1, 4])):
            at = dice.randrange(len(changed))
            if number % 2:              # the head of a page, which is LMDB's own
                at = at // 4096 * 4096 + at % 64
            changed[at] ^= 1 << dice.randrange(8)
        with open(path + "/data.mdb", "wb") as file:
            file.write(changed)
        open(path + "/journal-given-up", "w").close()  # all is in the tables
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(int(PATIENCE))
            try:
                judge(path)
            except (xl.ExclusiveLogError, MemoryError):
                os._exit(1)
            except BaseException as error:
                os.write(1, f"{number}: {error!r}\\n".encode())
                os._exit(2)
            os._exit(0)
        ends[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
    print(dict(ends))
"""


@pytest.mark.long
def test_g9_flipped_bits_of_the_file_never_become_data(tmp_path, sweep) -> None:
    """Any bit of data.mdb is turned: in entries, which our checksums guard, and in LMDB's own
    pages, which nothing guards. A reader gets what was sent, or an error; nothing that was not
    sent is ever handed out. (That a page of LMDB's can be broken so that LMDB itself crashes on
    it is known; it must stay rare.)"""
    path = tmp_path / "log"
    truth: dict[str, dict[int, bytes]] = {}
    dice = random.Random(6)
    with xl.open(path) as engine:
        for name in ("small", "large"):
            topic = engine.topic(name)
            with topic.producer() as producer:
                for _ in range(15):
                    size = dice.choice([1, 20]) if name == "small" else 2000
                    producer.send_many([dice.randbytes(size) for _ in range(10)])
            truth[name] = {m.offset: m.value for m in topic.reader()}
    (path / "truth").write_text(repr(truth))
    work = tmp_path / "work"
    work.mkdir()
    with ThreadPoolExecutor(2) as pool:
        flips = sweep(200, 400)
        flip = functools.partial(finish, FLIPS, path, work, timeout=2 * PATIENCE)
        outputs = pool.map(lambda seed: flip(seed, flips), range(2))
    ends = collections.Counter()
    for output in outputs:
        *strange, counts = output.splitlines()
        assert strange == [], "errors that are none of the library's"
        ends.update(eval(counts))
    assert ends[9] == 0, "wrong data was returned"
    assert ends[0] > flips
    assert sum(count for code, count in ends.items() if code < 0) <= 0.01 * ends.total(), ends


# ---- one topic's rows, and what other topics do ------------------------------------------


def use_two_topics(state: State) -> None:
    """Own both, with a shared topic, a map, a claim and a reader group beside each."""
    for name in ("broken", "orders"):
        topic = state.engine.topic(name)
        producer = topic.producer("exclusive", name="p")
        producer.send_many([b"%d" % n for n in range(5)])
        reader = topic.reader(group=f"readers of {name}")
        reader.read_next(PATIENCE)
        reader.commit()
        claim = state.engine.own(f"claims of {name}", {name: None})
        shared = state.engine.topic(f"{name}, shared").producer("shared")
        shared_map = xl.SharedMap(state.engine.topic(f"{name}, map"))
        shared_map.put("a", 1)
        state.kept[name] = producer, reader, claim, shared, shared_map
    state.engine.topic("broken").compact()
    state.engine.topic("broken").retention(max_bytes=10**9)
    state.engine.ledger.checkpoint()


def rows_of_topic(tables: Any, table: str, topic: int, name: str) -> list[bytes]:
    """The keys of a topic's rows in this table."""
    number = U64.pack(topic)
    found = {
        "names": lambda key, data: key == name.encode(),
        "meta": lambda key, data: key.endswith((number, name.encode())),
        "claims": lambda key, data: key.endswith(name.encode()),
        "engines": lambda key, data: data[2:].startswith(number),
    }.get(table, lambda key, data: key.startswith(number))
    return [bytes(key) for key, data in tables.rows.cursor(table) if found(key, data)]


@pytest.mark.long
@pytest.mark.parametrize("damaged", [b"\xc1", b"\xff" * 40], ids=["short", "ones"])
@pytest.mark.parametrize(
    "table",
    """
        meta names topics entries producers holders queue engines claims cursors retention views
    """.split(),
)
def test_g9_no_damaged_row_of_one_topic_stops_another(path, worker, table, damaged) -> None:
    """All its rows in one table are rubbish. Its owner dies, which owned the other topic, too."""
    owner = worker()
    owner.call(use_two_topics)
    with xl.open(path) as engine, xl.open(path) as second:
        broken = engine.topic("broken")
        broken.producer_async("wait_for_exclusive")
        orders = engine.topic("orders")
        waiting = orders.producer_async("wait_for_exclusive")
        until(lambda: len(broken.waiters) == len(orders.waiters) == 1)
        with engine.ledger.write_exclusive() as tables:
            keys = rows_of_topic(tables, table, broken.id, "broken")
            for key in keys:
                tables.rows.put(table, key, damaged)
        assert keys
        owner.kill()
        producer = waiting.result(PATIENCE)
        with engine.topic("other").producer("exclusive") as other, engine.transaction() as txn:
            producer.send(b"5", transaction=txn)
            other.send(b"x", transaction=txn)
        assert rest(orders.reader(group="readers of orders")) == [b"%d" % n for n in range(1, 6)]
        assert engine.own("claims of orders", {"orders": None}).generations == {"orders": 2}
        assert xl.SharedMap(engine.topic("orders, map")).put("a", 2) == 1
        assert [move.state for move in engine.unload("orders", to=second.id)] == ["assigned"]
        until(lambda: second.topic("orders, shared").producer("exclusive").close() is None)
        engine.ledger.checkpoint()
        engine.topic("other").retention(max_bytes=0)
        until(lambda: engine.topic("other").first_offset == 1)
        engine.delete_topic("other")
        assert "orders" in engine.topics()
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive") as producer:
        assert producer.send(b"6") == 6


def use_the_rest(state: State) -> None:
    """What binds producers, a topic that was made again, a view that is being made."""
    engine = state.engine
    claim = engine.own("binding", {"resource": None})
    bound = engine.topic("bound").producer("exclusive", claim=claim)
    role = engine.role("role", topics=["of a role"])
    for _ in range(2):
        engine.topic("again").producer("exclusive").close()
        engine.delete_topic("again")
    engine.topic("again")
    with engine.ledger.write_exclusive() as tables:
        tables.views.begin(tables.topics.list.next_id(), 0, engine.id)
    state.kept["the rest"] = claim, bound, role
    engine.ledger.checkpoint()


def lead_elsewhere(tables: Any) -> None:
    tables.rows.put("names", b"broken", U64.pack(tables.topics.id_of("orders")))


def lose_the_name(tables: Any) -> None:
    tables.rows.delete("names", b"broken")


def lose_the_row(tables: Any) -> None:
    tables.rows.delete("topics", U64.pack(tables.topics.id_of("broken")))


def name_it_in_another_encoding(tables: Any) -> None:
    tables.rows.put("names", b"\xff\xfe", U64.pack(tables.topics.id_of("broken")))
    tables.rows.put("meta", LISTED + b"\xff\xfe", U64.pack(tables.topics.id_of("broken")))


@pytest.mark.every
@pytest.mark.rule("B1")
@pytest.mark.parametrize(
    "damage", [lead_elsewhere, lose_the_name, lose_the_row, name_it_in_another_encoding]
)
def test_g9_a_name_never_leads_to_another_topic_or_to_a_new_one(path, damage) -> None:
    """Its messages would be those of the other one, and its epochs would begin at 1 again."""
    with xl.open(path) as engine:
        for name in ("broken", "orders"):
            with engine.topic(name).producer("exclusive") as producer:
                producer.send(name.encode())
        engine.ledger.checkpoint()
        with engine.ledger.write_exclusive() as tables:
            damage(tables)
        assert any(
            "broken" in problem or "\\xff" in problem for problem in engine.verify().problems
        )
        assert "orders" in engine.topics()
    with xl.open(path) as engine:
        if damage is not name_it_in_another_encoding:
            with pytest.raises(xl.LedgerCorruptedError):
                engine.topic("broken").producer("exclusive")
        with engine.topic("orders").producer("exclusive") as producer:
            assert (producer.topic_epoch, producer.send(b"more")) == (2, 1)


@pytest.mark.rule("F1")
@pytest.mark.every
@pytest.mark.parametrize("damaged", [b"\xc1", b""], ids=["noise", "empty"])
def test_g9_claims_are_listed_without_one_of_a_damaged_row(path, damaged) -> None:
    with xl.open(path) as engine:
        broken, sound = engine.own("group", {"broken": None}), engine.own("group", {"sound": None})
        reader = engine.topic("orders").reader(group="readers")
        with engine.ledger.write_exclusive() as tables:
            key, data = next(iter(tables.rows.cursor("claimants")))
            tables.rows.put("claimants", key, damaged)
        assert [each.generations for each in engine.claims("group")] == [{"sound": 1}]
        assert [each.group for each in engine.claims()] == ["group", "readers"]
        assert [each.reader is not None for each in engine.groups()] == [True]
        assert len(engine.verify().problems) == 1
        reader.close()
        sound.release()
        with engine.ledger.write_exclusive() as tables:  # closing releases what it holds
            tables.rows.put("claimants", key, data)
        broken.release()


@pytest.mark.parametrize("table", ["cursors", "topics"])
def test_g9_groups_and_figures_are_listed_without_those_of_a_damaged_row(path, table) -> None:
    with xl.open(path) as engine:
        use_two_topics(types.SimpleNamespace(engine=engine, kept={}))
        with engine.ledger.write_exclusive() as tables:
            for key in rows_of_topic(tables, table, tables.topics.id_of("broken"), "broken"):
                tables.rows.put(table, key, b"\xc1")
        found = {each.group: each.position for each in engine.groups()}
        assert found.pop("readers of broken", None) is None
        assert found == {"readers of orders": 1}
        assert engine.stats().groups == tuple(engine.groups())


def test_g9_a_counter_that_went_back_overwrites_no_topic(path) -> None:
    with xl.open(path) as engine:
        with engine.topic("orders").producer("exclusive") as producer:
            producer.send(b"0")
        engine.ledger.checkpoint()
        with engine.ledger.write_exclusive() as tables:
            tables.rows.put("meta", b"topic", U64.pack(0))
        with pytest.raises(xl.LedgerCorruptedError, match="is there already"):
            engine.topic("new")
        assert rest(engine.topic("orders").reader()) == [b"0"]


def test_g9_damaged_counts_of_changes_stop_no_change(path, caplog) -> None:
    with xl.open(path) as engine:
        owner = engine.topic("orders").producer("exclusive")
        with engine.ledger.write_exclusive() as tables:
            tables.rows.put("meta", CHANGES, b"\xc1")
        assert len(engine.verify().problems) == 1
        assert engine.topic("orders").producer("exclusive_with_fencing").topic_epoch == 2
        assert (owner.state, engine.stats().fencings) == ("fenced", 1)
    assert [each.event for each in caplog.records if each.levelname == "ERROR"] == ["row_damaged"]


def test_g9_a_waiter_whose_slot_is_no_number_keeps_no_ledger_closed(path, worker) -> None:
    """A flipped bit makes it a map, which msgpack decodes."""
    owner = worker()
    owner.call(use_two_topics)
    with xl.open(path) as engine:
        engine.topic("broken").producer_async("wait_for_exclusive")
        engine.ledger.checkpoint()
        with engine.ledger.write_exclusive() as tables:
            [(key, data)] = tables.rows.cursor("queue")
            session = unpack_session(data)
            damaged = msgpack.packb(
                [{} if field == 3 else each for field, each in enumerate(session)]
            )
            tables.rows.put("queue", key, damaged)
        assert any("'queue'" in problem for problem in engine.verify().problems)
        owner.kill()
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive") as producer:
        assert producer.send(b"5") == 5


@pytest.mark.every
@pytest.mark.parametrize(
    "table",
    """
        names topics producers holders queue engines claims claimants cursors retention views meta
    """.split(),
)
def test_g9_verify_names_each_damaged_row_and_reads_on(path, table) -> None:
    with xl.open(path) as engine:
        state: Any = types.SimpleNamespace(engine=engine, kept={})
        use_two_topics(state)
        engine.topic("broken").producer_async("wait_for_exclusive")
        use_the_rest(state)
        sound = engine.verify()
        assert (sound.problems, sound.topics) == ((), 9)
        with engine.ledger.write_exclusive() as tables:
            key, _ = next(
                (key, data)
                for key, data in tables.rows.cursor(table)
                if table != "meta" or key.startswith(KIND)
            )
            tables.rows.put(table, key, b"\xc1")
        found = engine.verify()
        assert f"a row of the table {table!r}" in found.problems[0]
        assert len(found.problems) <= 2
        if table not in ("names", "topics", "views"):  # that topic is not read
            assert found.messages == sound.messages
        with engine.ledger.write_exclusive() as tables:  # closing releases what it holds
            tables.rows.delete(table, key)


@pytest.mark.rule("E5")
@pytest.mark.parametrize("damaged", [b"\xc1", b"\xff" * 40], ids=["short", "ones"])
@pytest.mark.parametrize("table", ["names", "topics", "entries", "retention", "views"])
def test_g9_no_damaged_row_of_the_events_stops_a_grant(
    path, monkeypatch, caplog, table, damaged
) -> None:
    """Who may write is more than what is remembered of it. Old events are due to be deleted."""
    with xl.open(path) as engine:
        orders = engine.topic("orders")
        orders.producer("exclusive").close()
        events = engine.topic("__events__")
        if table == "views":
            events.compact()
        elif table == "retention":
            events.retention(max_bytes=10**9)
        engine.ledger.checkpoint()
        with engine.ledger.write_exclusive() as tables:
            keys = rows_of_topic(tables, table, events.id, "__events__")
            for key in keys:
                tables.rows.put(table, key, damaged)
        assert keys
        monkeypatch.setattr(recording, "MOST_EVENTS", 1)
        with orders.producer("exclusive") as producer:
            assert (producer.topic_epoch, producer.send(b"0")) == (2, 0)
        assert engine.own("group", {"resource": None}).generations == {"resource": 1}
    with xl.open(path) as engine, engine.topic("orders").producer("exclusive") as producer:
        assert producer.send(b"1") == 1
        assert engine.verify().ok == (table == "entries")  # these are deleted by now
        engine.backend.retention_worker.go_round()  # every few seconds
    told = [each.consequence for each in caplog.records if each.event == "row_damaged"]
    assert (
        sorted(told)
        == {
            "names": [recording.NOT_RECORDED, NOT_LISTED],
            "topics": [recording.NOT_RECORDED],
            "entries": [],
            "retention": [recording.NOT_TRIMMED, NOT_TRIMMED],
            "views": [recording.NOT_TRIMMED],
        }[table]
    )
