"""Compaction: of every key the last message stays, at its own offset; tombstones remove keys; a
compacted reader misses no message that was written after it began, even if processes compact, trim,
die or is interrupted meanwhile (rule G7)."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.maintenance import views
from exclusivelog.local.maintenance.deletion import delete_pending
from exclusivelog.local.records import U64
from exclusivelog.local.shm.slots import Slots
from exclusivelog.local.storage.tables import Tables
from testing.compactions import Sent, compacted, kept, read, state_of
from testing.kills import die_at_commit, garbage, killable, say
from testing.processes import PATIENCE, State, Worker, preload, send, until, within
from testing.states import struck_after
from tests.log.test_readers import PUBLISHED, moment, publish

preload(__name__)

LARGE = 200_000  # bytes, more than goes into the tables themselves


class Writer:
    """Sends at random, in every way, and remembers what it has sent."""

    def __init__(self, topic: xl.Topic, seed: int, size: int = 10) -> None:
        self.topic, self.size = topic, size
        self.dice = random.Random(seed)
        self.sent: list[Sent] = []

    def go_on(self, count: int, keys: int = 12) -> None:
        """Some `count` messages more, by a producer of a new epoch."""
        with self.topic.producer("exclusive") as producer:
            while count > 0:
                some = [self._message(keys) for _ in range(self.dice.choice((1, 1, 3, 20)))]
                where = self._send(producer, some)
                self.sent += [(at, *one) for at, one in zip(where, some, strict=True)]
                count -= len(some)

    def _message(self, keys: int) -> tuple[bytes | None, bytes | None]:
        key = None if self.dice.random() < 0.1 else b"k%d" % self.dice.randrange(keys)
        value = None if self.dice.random() < 0.2 else self.dice.randbytes(self.size)
        return key, value

    @staticmethod
    def _send(producer: xl.Producer, some: list[tuple[bytes | None, bytes | None]]) -> range:
        if len(some) == 1:
            [(key, value)] = some
            first = producer.send(value, key=key)
        else:
            first = producer.send_many([v for _, v in some], keys=[k for k, _ in some]).start
        return range(first, first + len(some))


@pytest.fixture
def writer(topic: xl.Topic) -> Writer:
    return Writer(topic, 1)


# ---- what stays --------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "size"), [(1, 10), (2, 3000), (3, LARGE)])
def test_g7_the_last_message_of_every_key_stays_at_its_offset(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], seed: int, size: int
) -> None:
    """Again and again, while the topic grows, by several owners; read here and elsewhere."""
    other, writer = worker(readonly=True), Writer(topic, seed, size)
    for _ in range(6):
        writer.go_on(60 if size < LARGE else 12)
        expected = kept(writer.sent)
        assert topic.compact() == len(expected)
        assert compacted(topic) == other.call(look) == expected
        writer.go_on(10)
        tail = [one for one in writer.sent if one[0] > expected[-1][0]]
        found = compacted(topic)
        assert found[: len(expected)] == expected
        assert found[-1] == writer.sent[-1]
        assert set(found) <= {*expected, *tail}
        assert read(topic.reader()) == writer.sent
    assert engine.verify().ok
    assert garbage(engine) == {}


def look(state: State) -> list[Sent]:
    return compacted(state.topic)


def test_g7_without_a_view_all_is_read(topic: xl.Topic, writer: Writer) -> None:
    writer.go_on(50)
    assert compacted(topic) == writer.sent


def test_g7_of_a_topic_of_tombstones_nothing_stays(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"1", None, None], keys=["a", "a", "b"])
        assert topic.compact() == 0
        reader = topic.reader(read_compacted=True)
        assert not reader.has_message_available()
        assert read(reader) == []
        producer.send(b"2", key="a")
        assert reader.has_message_available()
        assert read(reader) == [(3, b"a", b"2")]
    assert topic.compact() == 1
    assert compacted(topic) == [(3, b"a", b"2")]
    assert garbage(engine) == {}


def test_g7_messages_are_what_they_were(topic: xl.Topic) -> None:
    """Times, properties, epochs, names and ids go with them."""
    stamps = [{"properties": {"n": str(n)}, "event_time": n} if n % 2 else {} for n in range(20)]
    for number, stamp in enumerate(stamps):
        with topic.producer("exclusive", name=f"p{number % 3}") as producer:
            producer.send(b"%d" % number, key=f"k{number % 7}", **stamp)
    facts = """
        offset epoch key value properties publish_time event_time producer_name sequence_id
    """.split()

    def all_facts(reader: xl.Reader) -> list[list[Any]]:
        return [[getattr(message, fact) for fact in facts] for message in reader]

    expected = all_facts(topic.reader(13))
    topic.compact()
    assert all_facts(topic.reader(read_compacted=True)) == expected
    batch = topic.reader(read_compacted=True).read_arrow()
    assert batch.column("offset").to_pylist()[0] == 13


# ---- from where --------------------------------------------------------------------------


def test_g7_a_compacted_reader_begins_anywhere(topic: xl.Topic, writer: Writer) -> None:
    """At offsets that have gone, too: then with the next that is there. It knows exactly whether
    there is any."""
    writer.go_on(150)
    topic.compact()
    writer.go_on(5)
    left = compacted(topic)
    for start in range(len(writer.sent) + 2):
        expected = [one for one in left if one[0] >= start]
        reader = topic.reader(start, read_compacted=True)
        assert reader.has_message_available() == bool(expected)
        assert read(reader) == expected
        assert not reader.has_message_available()
    reader.seek("latest")
    assert read(reader) == []
    reader.seek("earliest")
    found = [reader.read_next(0).offset for _ in left]
    assert found == [offset for offset, *_ in left]


def test_g7_it_begins_at_a_time(topic: xl.Topic) -> None:
    publish(topic)
    topic.compact()
    for ms in PUBLISHED:
        start = topic.reader(moment(ms)).position
        assert [offset for offset, *_ in compacted(topic, start=moment(ms))] == [
            offset for offset, *_ in compacted(topic) if offset >= start
        ]


# ---- readers at work meanwhile -----------------------------------------------------------


def test_g7_one_that_has_begun_misses_nothing_that_came_since(
    topic: xl.Topic, writer: Writer
) -> None:
    """However often others compact and trim before it comes to its end: what it has not met of
    the old view was replaced by messages that it is going to meet."""
    for seed in range(10):
        writer.go_on(100)
        topic.compact()
        began = topic.next_offset
        reader = topic.reader(read_compacted=True, trimmed="earliest")
        found = [
            (message.offset, message.key, message.value)
            for message in reader.read_batch(random.Random(seed).randrange(1, 12))
        ]
        for _ in range(3):
            writer.go_on(20)
            topic.compact()
            found += [(m.offset, m.key, m.value) for m in reader.read_batch(2)]
        topic.trim(before=began)
        writer.go_on(5)
        found += read(reader)
        offsets = [offset for offset, *_ in found]
        assert offsets == sorted(set(offsets))
        assert set(writer.sent[began:]) <= set(found) <= set(writer.sent)
        assert state_of(found) == state_of(writer.sent)


def test_g7_one_whose_rest_of_the_view_was_replaced_comes_to_the_end(topic: xl.Topic) -> None:
    """It has read a part of its view; then all the rest is replaced, and compacted. An entry of
    the new view has what it had read, and what came afterwards, and nothing in between."""
    with topic.producer() as producer:
        producer.send_many([bytes(30_000)] * 200, keys=[b"%d" % number for number in range(200)])
        topic.compact()
        reader = topic.reader(read_compacted=True)
        found = [message.offset for message in reader.read_batch(21)]
        producer.send_many([b"new"] * 199, keys=[b"%d" % number for number in range(1, 200)])
        topic.compact()
        assert reader.has_message_available()
        found += within(lambda: [message.offset for message in reader.read_batch(1000)])
    assert found == sorted(set(found))
    assert set(range(200, 399)) <= set(found) <= set(range(399))
    assert not reader.has_message_available()


def write_on(state: State, count: int, gate: str) -> None:
    """Send so many messages; the last hundred once that file is there."""
    with state.topic.producer() as producer:
        for number in range(count):
            if number == count - 100:
                until(lambda: os.path.exists(gate))
            producer.send(b"%d" % number, key=f"k{number % 10}")
            if number % 50 == 0:
                time.sleep(0.01)  # unflushed, it would be over at once


@pytest.mark.long
def test_g7_another_process_writes_while_it_is_made(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    process, gate = worker(), tmp_path / "gate"
    process.start(write_on, 3000, str(gate))
    compactions = 0
    while topic.next_offset < 3000:
        topic.compact()
        horizon = topic.next_offset
        found = compacted(topic)
        assert state_of(found) == state_of(
            read(topic.reader())[: found[-1][0] + 1] if found else []
        )
        assert horizon <= topic.next_offset
        compactions += 1
        if compactions == 4:
            gate.touch()
    process.answer()
    assert compactions > 3
    assert topic.compact() == 10
    assert [offset for offset, *_ in compacted(topic)] == list(range(2990, 3000))
    assert garbage(engine) == {}


def test_g7_two_that_compact_at_once_leave_one_view(engine: xl.Engine, writer: Writer) -> None:
    topic, failed = writer.topic, []

    def compact() -> None:
        try:
            for _ in range(20):
                topic.compact()
        except BaseException as error:
            failed.append(error)

    writer.go_on(200)
    threads = [threading.Thread(target=compact) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failed == []
    assert compacted(topic) == kept(writer.sent)
    assert garbage(engine) == {}


# ---- trimming ----------------------------------------------------------------------------


def test_g7_trimming_takes_nothing_of_the_view(
    engine: xl.Engine, topic: xl.Topic, writer: Writer
) -> None:
    """Not even from the views that follow."""
    for _ in range(4):
        writer.go_on(80)
        topic.compact()
        assert topic.trim(topic.next_offset) == len(writer.sent)
        assert compacted(topic) == kept(writer.sent)
    assert topic.compact() == len(kept(writer.sent))
    assert engine.verify().ok
    engine.delete_topic("orders")
    assert garbage(engine) == {}


# ---- deaths and interrupts -----------------------------------------------------


def compact_for_ever(says: Connection, path: str, strike: int, behind: bool) -> None:
    with xl.open(path, name="killed") as engine:
        topic = engine.topic("orders")
        die_at_commit(strike, behind=behind)
        for number in itertools.count():
            topic.compact()
            say(says, number)


@pytest.mark.sampled
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_g7_death_leaves_the_old_view_or_the_new_one(path: str, behind: bool) -> None:
    """Killed at each of its commits in turn. The next open of the ledger removes what is
    half made."""
    with xl.open(path) as engine:
        writer = Writer(engine.topic("orders"), 4)
        writer.go_on(50)
    for strike in range(1, 9):
        with xl.open(path) as engine:
            writer.topic = engine.topic("orders")
            writer.go_on(20)
        with killable(compact_for_ever, path, strike, behind) as process:
            process.all_told()
            assert process.process.exitcode == -signal.SIGKILL
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            assert garbage(engine) == {}
            assert state_of(compacted(topic)) == state_of(writer.sent)
            assert topic.compact() == len(kept(writer.sent))
            assert compacted(topic) == kept(writer.sent)


def test_g7_ctrl_c_leaves_the_old_view_or_the_new_one(
    engine: xl.Engine, topic: xl.Topic, writer: Writer
) -> None:
    chance = random.Random(5)
    for _ in range(40):
        writer.go_on(10)
        struck_after(chance.uniform(1e-4, 8e-3), topic.compact)
        assert state_of(compacted(topic)) == state_of(writer.sent)
    topic.compact()
    assert compacted(topic) == kept(writer.sent)
    assert garbage(engine) == {}


@pytest.mark.parametrize("what", ["deleted", "closed"])
def test_g7_a_topic_or_an_engine_that_ends_meanwhile(
    path: str, engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nothing stays of what was being made."""
    Writer(topic, 6).go_on(50)
    mortal = xl.open(path)
    go_on = views._write

    def end_it(*args: Any) -> int:
        if what == "deleted":
            engine.delete_topic("orders")
        else:
            mortal.close()
            xl.open(path).close()  # who comes clears away what the dead have left
        return go_on(*args)

    monkeypatch.setattr(views, "_write", end_it)
    if what == "closed":
        with pytest.raises(xl.EngineClosedError):
            mortal.topic("orders").compact()
    else:
        mortal.topic("orders").compact()
    mortal.close()
    until(lambda: garbage(engine) == {})


# ---- damage, refusals --------------------------------------------------------------------


def damage(engine: xl.Engine, topic: int) -> None:
    """Flip a bit in each entry that stands under this id."""
    with engine.ledger.write_exclusive() as tables:
        for key, value in list(tables.rows.cursor("entries")):
            if U64.unpack(key[:8])[0] == topic:
                tables.rows.put("entries", key, value[:-1] + bytes([value[-1] ^ 1]))


def view_id(engine: xl.Engine, topic: xl.Topic) -> int:
    with engine.ledger.read() as tables:
        return view_id_in(tables, topic)


def view_id_in(tables: Tables, topic: xl.Topic) -> int:
    view = tables.views.view(topic.id)
    assert view is not None
    return int(view.id)


def test_g9_a_damaged_topic_is_not_compacted(engine: xl.Engine, writer: Writer) -> None:
    """The last view stays, and is read."""
    topic = writer.topic
    writer.go_on(50)
    topic.compact()
    expected = compacted(topic)
    writer.go_on(50)
    engine.ledger.checkpoint()
    damage(engine, topic.id)
    with pytest.raises(xl.LedgerCorruptedError, match="nothing was compacted"):
        topic.compact()
    reader = topic.reader(read_compacted=True)
    assert [reader.read_next(0).offset for _ in expected] == [offset for offset, *_ in expected]
    assert garbage(engine) == {}


def test_g9_a_damaged_view_is_named(engine: xl.Engine, writer: Writer) -> None:
    topic = writer.topic
    writer.go_on(50)
    topic.compact()
    damage(engine, view_id(engine, topic))
    reader = topic.reader(read_compacted=True)
    with pytest.raises(xl.LedgerCorruptedError, match="compacted view") as error:
        reader.read_next(0)
    assert error.value.topic == "orders"
    reader.seek(error.value.offsets.stop)
    assert read(topic.reader()) == writer.sent
    assert not engine.verify().ok


def test_g7_a_readonly_engine_reads_it_and_makes_none(engine: xl.Engine, writer: Writer) -> None:
    writer.go_on(50)
    writer.topic.compact()
    with xl.open(engine.path, readonly=True) as readonly:
        theirs = readonly.topic("orders")
        with pytest.raises(xl.LedgerError, match="readonly"):
            theirs.compact()
        assert compacted(theirs) == kept(writer.sent)


def test_g7_one_that_waits_at_the_end_is_woken(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_producer_of_its_own)
    process.call(send, b"0")
    topic.compact()
    reader = topic.reader("latest", read_compacted=True)
    threading.Timer(0.2, lambda: process.start(send, b"1")).start()
    assert within(lambda: reader.read_next(PATIENCE)).value == b"1"
    process.answer()


def open_producer_of_its_own(state: State) -> None:
    state.producer = state.topic.producer("exclusive")


def test_g7_trimming_beyond_the_view_brings_back_nothing(topic: xl.Topic) -> None:
    """Behind the view keys were deleted and replaced, and those messages are trimmed. The view
    is made anew before they go: it would have the old values for good."""
    producer = topic.producer()
    producer.send_many([b"0", b"1", b"2"], keys=["x", "b", "c"])
    topic.compact()
    producer.send(None, key="b")
    producer.send(b"y", key="c")
    producer.send(b"z", key="d")
    assert topic.trim(before=5) == 5
    for _ in range(2):
        compacted = [(m.offset, m.key, m.value) for m in topic.reader(read_compacted=True)]
        assert compacted == [(0, b"x", b"0"), (4, b"c", b"y"), (5, b"d", b"z")]
        topic.compact()


def test_g7_a_compacted_reader_from_a_time_begins_in_the_view(topic: xl.Topic) -> None:
    topic.producer().send_many([b"0", b"1"], keys=["x", "b"])
    topic.compact()
    topic.trim(before=2)
    start = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert [m.value for m in topic.reader(start, read_compacted=True)] == [b"0", b"1"]


@pytest.mark.parametrize("met", [0, 1, 2], ids="{} messages met".format)
@pytest.mark.parametrize("behind", [0, 2], ids="{} messages behind".format)
def test_g7_one_overtaken_by_a_trim_goes_on_in_the_newer_view(
    topic: xl.Topic, met: int, behind: int
) -> None:
    """A reader has begun in a view. Behind that view come messages, and go: compacted, and
    trimmed. What the newer view has of them was written after it began: it is still to come,
    and so is what the log has, replaced by now or not."""
    producer = topic.producer()
    producer.send_many([b"0", b"1"], keys=["a", "b"])
    topic.compact()
    reader = topic.reader(read_compacted=True, trimmed="earliest")
    found = [message.offset for message in reader.read_batch(met)] if met else []
    producer.send_many([b"2", b"3", b"4"], keys=["c", "c", "d"])
    producer.send_many([b"5", b"6"][:behind], keys=["e", "e"][:behind])
    topic.compact()
    assert topic.trim(before=5) == 5
    assert reader.has_message_available()
    found += [message.offset for message in reader]
    assert found == [0, 1, 3, 4, *range(5, 5 + behind)]
    assert not reader.has_message_available()


def overtake(topic: xl.Topic, *, behind: int) -> None:
    """Delete the key b; compact and trim so that the deletion is in neither log nor view."""
    with topic.producer() as producer:
        producer.send_many([None, b"3"], keys=["b", "c"])
        producer.send_many([b"%d" % number for number in range(behind)], keys=["d"] * behind)
    topic.compact()
    topic.trim(before=4)


def missed(call: Callable[[], Any]) -> None:
    with pytest.raises(xl.OffsetTrimmedError, match=r"missed deletions .* seek\(.earliest.\)"):
        call()


@pytest.mark.parametrize(("views", "met"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("behind", [0, 3], ids="{} messages behind".format)
def test_g12_a_compacted_reader_that_misses_a_deletion_is_told(
    topic: xl.Topic, views: int, met: int, behind: int
) -> None:
    """It would keep a deleted key for ever. From the beginning of the view it gets what is."""
    topic.producer().send_many([b"0", b"1"], keys=["a", "b"])
    for _ in range(views):
        topic.compact()
    reader = topic.reader(read_compacted=True, trimmed="earliest")
    assert len(reader.read_batch(met)) == met
    overtake(topic, behind=behind)
    for call in (
        lambda: reader.read_next(0),
        lambda: reader.read_batch(9),
        lambda: list(reader),
        lambda: next(reader),
        lambda: list(reader.values()),
        reader.read_arrow,
        reader.has_message_available,
    ):
        missed(call)
    reader.seek("earliest")
    assert state_of(read(reader)) == state_of(compacted(topic))
    assert b"b" not in state_of(compacted(topic))


def test_g12_one_that_has_read_nothing_misses_nothing(topic: xl.Topic) -> None:
    topic.producer().send_many([b"0", b"1"], keys=["a", "b"])
    readers = [topic.reader(read_compacted=True, trimmed="earliest") for _ in range(2)]
    topic.trim(before=1)
    late = topic.reader(read_compacted=True, trimmed="earliest")
    overtake(topic, behind=1)
    for reader in (*readers, late):
        assert reader.has_message_available()
        assert state_of(read(reader)) == {b"c": b"3", b"d": b"0"}


@pytest.mark.parametrize("trimmed", ["error", "earliest"])
def test_g12_a_group_that_resumes_misses_no_deletion(topic: xl.Topic, trimmed: Any) -> None:
    """The view has none since its position. As long as the topic has them, it reads the topic."""
    topic.producer().send_many([b"0", b"1"], keys=["a", "b"])

    def resumed() -> xl.Reader:
        return topic.reader(group="g", read_compacted=True, trimmed=trimmed)

    with resumed() as reader:
        found = read(reader)
        reader.commit()
    topic.producer().send_many([None, b"3"], keys=["b", "c"])
    topic.compact()
    with resumed() as reader:
        assert reader.has_message_available()
        assert state_of(found + read(reader)) == {b"a": b"0", b"c": b"3"}
        reader.commit()
    topic.producer().send_many([b"4"], keys=["a"])
    topic.compact()
    topic.trim(before=5)
    with resumed() as reader:  # no deletion since: it goes on in the view
        assert read(reader) == [(4, b"a", b"4")]
        reader.commit()
    topic.producer().send_many([None, b"6"], keys=["c", "a"])
    topic.compact()
    topic.trim(before=7)
    with resumed() as reader:
        for call in (lambda: read(reader), reader.has_message_available):
            with pytest.raises(xl.OffsetTrimmedError):
                call()


def test_g12_a_deletion_is_remembered_by_the_views_that_follow(topic: xl.Topic) -> None:
    topic.producer().send_many([b"0", b"1"], keys=["a", "b"])
    reader = topic.reader(read_compacted=True, trimmed="earliest")
    assert len(read(reader)) == 2
    overtake(topic, behind=2)
    for _ in range(3):
        topic.producer().send(b"x", key="x")
        topic.compact()
        topic.trim(before=topic.next_offset)
    missed(lambda: read(reader))


def test_g12_a_view_of_an_earlier_version_may_lack_deletions(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """It does not tell."""
    topic.producer().send_many([b"0", b"1"], keys=["a", "b"])
    reader = topic.reader(read_compacted=True, trimmed="earliest")
    assert len(read(reader)) == 2
    overtake(topic, behind=0)
    with engine.ledger.write_exclusive() as tables:
        tables.rows.delete("meta", b"deleted to" + U64.pack(view_id_in(tables, topic)))
    missed(lambda: read(reader))


def test_g7_one_that_waits_is_overtaken_by_a_trim(topic: xl.Topic) -> None:
    """It stands at the end of the log, and there was no view when it began."""
    reader = topic.reader(read_compacted=True, trimmed="earliest")
    producer = topic.producer()
    producer.send(b"0", key="a")
    assert reader.read_next(0).offset == 0
    producer.send_many([b"1", b"2", b"3"], keys=["b", "b", "c"])
    topic.compact()
    assert topic.trim(before=4) == 4
    assert [reader.read_next(0).offset for _ in range(2)] == [2, 3]
    producer.send(b"4", key="b")
    assert reader.read_next(0).offset == 4


# ---- trims that overtake a compaction ----------------------------------------------------


REPLACED = [(0, b"x", b"0"), (4, b"c", b"y"), (5, b"d", b"z")]


def replace_some(topic: xl.Topic) -> None:
    """Behind [x, b, c]: b is deleted, c replaced, and d comes."""
    with topic.producer() as producer:
        producer.send_many([None, b"y", b"z"], keys=["b", "c", "d"])


def compact_in_two_halves(state: State) -> None:
    """Hold on before the new view becomes the topic's, until there is a file that says so."""
    finish = views._finish

    def hold_on(*args: Any) -> Any:
        views._finish = finish
        Path(state.engine.path, "reached").touch()
        until(Path(state.engine.path, "go on").exists)
        return finish(*args)

    views._finish = hold_on
    state.topic.compact()


@pytest.mark.parametrize("views", [0, 1], ids=["the first view", "a later one"])
def test_g7_a_trim_beyond_what_is_being_compacted_brings_back_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], views: int
) -> None:
    """Another process compacts. Before its view is the topic's, keys are deleted and replaced
    behind the view's horizon, and those messages are trimmed."""
    topic.producer().send_many([b"0", b"1", b"2"], keys=["x", "b", "c"])
    for _ in range(views):
        topic.compact()
    process = worker()
    process.start(compact_in_two_halves)
    until(Path(engine.path, "reached").exists)
    replace_some(topic)
    assert topic.trim(before=5) == 5
    Path(engine.path, "go on").touch()
    process.answer()
    for _ in range(2):
        found = compacted(topic)
        assert found == (REPLACED if views else REPLACED[-1:])
        topic.compact()
    assert engine.verify().ok
    assert garbage(engine) == {}


@pytest.mark.parametrize("views", [0, 1], ids=["the first view", "a later one"])
def test_g7_a_compaction_and_appends_right_before_a_trims_commit(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, views: int
) -> None:
    """By then there is a view that does not reach as far as what is to go, even if there was none
    when the trim began, or it was up to date."""
    topic.producer().send_many([b"0", b"1", b"2"], keys=["x", "b", "c"])
    for _ in range(views):
        topic.compact()
    write_all = engine.ledger.write_checkpointed

    def compact_and_replace_some() -> Any:
        monkeypatch.undo()
        topic.compact()
        replace_some(topic)
        return write_all()

    monkeypatch.setattr(engine.ledger, "write_checkpointed", compact_and_replace_some)
    topic.trim(before=1 << 40)  # beyond the end: all that there is
    for _ in range(2):
        reader = topic.reader(read_compacted=True)
        found = [(message.offset, message.key, message.value) for message in reader]
        assert state_of(found) == {b"x": b"0", b"c": b"y", b"d": b"z"}
        topic.compact()
    assert engine.verify().ok
    assert garbage(engine) == {}


def compact_by_an_engine_that_is_closed(state: State) -> None:
    """An engine of its own compacts, and is closed before its view is the topic's; the process
    goes on, by another engine. See `let_it_finish`."""
    engine = xl.open(state.engine.path)
    reached, go_on = threading.Event(), threading.Event()
    finish = views._finish

    def hold_on(*args: Any) -> Any:
        reached.set()
        go_on.wait(PATIENCE)
        return finish(*args)

    views._finish = hold_on
    thread = threading.Thread(target=engine.topic("orders").compact, daemon=True)
    thread.start()
    assert reached.wait(PATIENCE)
    engine.close()
    state.kept["finish"] = go_on, thread


def let_it_finish(state: State) -> None:
    go_on, thread = state.kept["finish"]
    go_on.set()
    thread.join(PATIENCE)


def test_g7_a_view_that_is_finished_after_its_maker_has_gone_is_not_cleared_away(
    engine: xl.Engine,
    topic: xl.Topic,
    worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who clears up finds an unfinished view, and that the engine which makes it is gone. Before
    that one's rows are marked as to go, the last step of its making comes through: the view is
    the topic's, and nothing else has what was trimmed before it."""
    topic.producer().send_many([b"0", b"1", b"2"], keys=["a", "b", "b"])
    process = worker()
    process.call(compact_by_an_engine_that_is_closed)
    exists = Slots.exists
    gone: list[str] = []

    def is_it_there(self: Slots, slot: int, maker: str) -> bool:
        found = exists(self, slot, maker)
        if not found and not gone:
            gone.append(maker)
            process.call(let_it_finish)
        return found

    monkeypatch.setattr(Slots, "exists", is_it_there)
    delete_pending(engine.ledger)
    assert gone
    topic.trim(before=3)
    assert [value for _, _, value in compacted(topic)] == [b"0", b"2"]
    assert engine.verify().ok
    assert garbage(engine) == {}
