"""Old messages go, by hand or by age and size; topics are sealed, deleted and made again. What
stays is whole, readers are told, and the space is given back, also after a death on the way (rules
G8, B1)."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local import topics
from exclusivelog.local.maintenance import deletion, retention, views
from exclusivelog.local.ownership import notifications
from exclusivelog.local.records import PAIR, U64
from exclusivelog.local.storage import segments
from testing.journals import never_pack, no_checkpoints
from testing.kills import die_at_commit, garbage, killable, say
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    open_producer,
    preload,
    rows,
    send,
    threads_since,
    until,
    values,
    within,
)
from tests.log.test_readers import PUBLISHED, fill, moment, publish, rest

preload(__name__)

LARGE = 200_000  # bytes, more than goes into the tables themselves


def entries(topic: xl.Topic) -> list[_core.Entry]:
    """The topic's entries in the tables, also those that are to go."""
    with topic.engine.ledger.read() as found:
        return [_core.Entry(found.entries.load(row)) for _, row in found.entries.walk(topic.id, 0)]


# ---- G8: trimming ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["trim", "retention"])
def test_g8_a_limit_of_bytes_leaves_the_newest_entry(topic: xl.Topic, how: str) -> None:
    """However many messages a checkpoint has packed into it."""
    with topic.producer() as producer:
        for _ in range(200):
            producer.send(bytes(10_000))
    topic.engine.ledger.checkpoint()
    newest = entries(topic)[-1]
    if how == "trim":
        assert topic.trim(max_bytes=newest.nbytes - 1) == newest.base_offset
    else:
        topic.retention(max_bytes=newest.nbytes - 1)
        until(lambda: topic.first_offset)
    assert topic.first_offset == newest.base_offset < topic.next_offset
    assert topic.trim(max_bytes=0) == topic.next_offset


def refused(call: Callable[[], Any], first: int) -> None:
    with pytest.raises(xl.OffsetTrimmedError, match=f"'orders' begins at offset {first};"):
        call()


def check_reader(topic: xl.Topic, sent: list[bytes], first: int, start: int) -> None:
    """A reader from that offset on gets what there is, or the error that says what there is."""
    reader = topic.reader(start)
    if start < first == len(sent):
        refused(reader.has_message_available, first)
    else:
        assert reader.has_message_available() == (max(first, start) < len(sent))
    if start < first:
        for read in (
            lambda: reader.read_next(0),
            lambda: reader.read_batch(100),
            lambda: list(reader),
            lambda: next(reader.follow(0)),
        ):
            refused(read, first)
            assert reader.position == start
        reader.seek("earliest")
        assert reader.position == first
    assert rest(reader) == sent[max(start, first) :]
    assert not reader.has_message_available()
    going_on = topic.reader(start, trimmed="earliest")
    assert going_on.has_message_available() == (max(first, start) < len(sent))
    assert rest(going_on) == sent[max(start, first) :]
    assert not going_on.has_message_available()


def check_trimmed(topic: xl.Topic, sent: list[bytes], first: int) -> None:
    assert (topic.first_offset, topic.next_offset) == (first, len(sent))
    assert values(topic) == sent[first:]
    for start in range(len(sent) + 2):
        check_reader(topic, sent, first, start)
    report = topic.engine.verify()
    assert report.ok, report
    assert report.messages == len(sent) - first
    assert garbage(topic.engine) == {}


def prepare(where: str, topic: xl.Topic, monkeypatch) -> list[bytes]:
    """Ten messages in frames of the journal, in entries of four, or in one entry."""
    if where == "entries":
        never_pack(monkeypatch)
    sent = fill(topic, 10)
    if where != "journal":
        topic.engine.ledger.checkpoint()
        assert len(entries(topic)) == (3 if where == "entries" else 1)
    return sent


WHERE = pytest.mark.parametrize("where", ["journal", "entries", "packed"])


@WHERE
@pytest.mark.parametrize("before", [0, 1, 3, 4, 5, 9, 10, 11, 2**63])
def test_g8_a_topic_is_trimmed_at_any_offset(engine, topic, monkeypatch, where, before) -> None:
    """At the end of an entry, in the middle of one, all of it; what is beyond the end cannot
    go."""
    with no_checkpoints(engine) if where == "journal" else contextlib.nullcontext():
        sent = prepare(where, topic, monkeypatch)
        first = min(before, 10)
        assert topic.trim(before) == first
        check_trimmed(topic, sent, first)
        for less in range(first + 1):
            assert topic.trim(less) == first
        fill(topic, 3, batch=1)
        check_trimmed(topic, [*sent, b"0", b"1", b"2"], first)
        engine.ledger.checkpoint()
    check_trimmed(topic, [*sent, b"0", b"1", b"2"], first)


@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_g8_trimming_goes_on_and_on(engine, topic, worker, size) -> None:
    """A little at a time while the topic grows, here and in another process."""
    dice, sent, first, other = random.Random(size), [], 0, worker()
    with topic.producer(max_batch_messages=3) as producer:
        for number in range(60):
            some = [b"%d %d " % (number, n) + bytes(size) for n in range(dice.randrange(1, 6))]
            producer.send_many(some) if dice.random() < 0.5 else [producer.send(s) for s in some]
            sent += some
            before = dice.randrange(first, len(sent) + 1)
            first = other.call(trim, before) if number % 2 else topic.trim(before)
            assert first == before
            assert values(topic) == sent[first:]
            assert engine.verify().ok
    assert garbage(engine) == {}
    assert other.call(read_all) == sent[first:]


def trim(state: State, before: int) -> int:
    return state.topic.trim(before)


def read_all(state: State) -> list[bytes]:
    return values(state.topic)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"before": -1}, ValueError),
        ({"before": True}, TypeError),
        ({"before": 1.0}, TypeError),
        ({"before": "earliest"}, TypeError),
        ({"before": dt.date(2020, 1, 1)}, TypeError),
        ({"max_bytes": -1}, ValueError),
        ({"max_bytes": 1.5}, ValueError),
    ],
)
def test_g8_wrong_arguments_are_named_and_trim_nothing(topic, wrong, kind) -> None:
    fill(topic, 4)
    (name,) = wrong
    with pytest.raises(kind, match=name):
        topic.trim(**wrong)
    if name == "max_bytes":
        with pytest.raises(kind, match=name):
            topic.retention(**wrong)
    assert topic.trim(before=0) == topic.first_offset == 0


def test_g8_trimming_needs_to_be_told_what(topic) -> None:
    fill(topic, 4)
    for call in (topic.trim, lambda: topic.trim(None, None)):
        with pytest.raises(TypeError, match=r"trim takes before= .*, max_bytes=, or both"):
            call()
    assert topic.first_offset == 0


def test_g8_a_readonly_engine_trims_nothing(engine, topic) -> None:
    fill(topic, 4)
    engine.ledger.checkpoint()
    with xl.open(engine.path, readonly=True) as readonly:
        theirs = readonly.topic("orders")
        for call in (lambda: theirs.trim(2), theirs.terminate, lambda: theirs.retention(1)):
            with pytest.raises(xl.LedgerError, match="readonly"):
                call()
    assert topic.first_offset == 0


# ---- G8: by time -------------------------------------------------------------------------


@WHERE
def test_g8_a_topic_is_trimmed_by_time(engine, topic, monkeypatch, where) -> None:
    """What was published before that moment goes; also within one entry."""
    if where == "entries":
        never_pack(monkeypatch)
    with no_checkpoints(engine) if where == "journal" else contextlib.nullcontext():
        publish(topic)
    if where != "journal":
        engine.ledger.checkpoint()
    sent, times = values(topic), [ms for ms in PUBLISHED for _ in range(3)]
    for ms in (0, PUBLISHED[0] - 500, *(at + 500 for at in PUBLISHED), PUBLISHED[-1] + 10**10):
        expected = sum(at < ms for at in times)
        east = moment(ms).astimezone(dt.timezone(dt.timedelta(hours=5)))
        assert topic.trim(moment(ms)) == expected
        assert topic.trim(moment(ms).astimezone().replace(tzinfo=None)) == expected
        assert topic.trim(before=east) == expected
        assert values(topic) == sent[expected:]
        assert engine.verify().ok
    check_trimmed(topic, sent, len(sent))


def test_g8_what_was_published_at_that_moment_stays(topic, monkeypatch) -> None:
    """However long the process is held up in between: other threads, say, keep it waiting for
    five milliseconds."""
    publish(topic)
    real = time.time
    late = SimpleNamespace(time=lambda: real() + 0.005)
    monkeypatch.setattr(retention, "time", late)
    assert topic.trim(moment(PUBLISHED[3])) == 9


def test_g5_a_time_finds_the_first_message_that_is_left(engine, topic) -> None:
    """Trimmed in the middle of an entry: a reader from a time before that starts with the
    first message that is there, as it does at the beginning of an entry."""
    publish(topic)
    engine.ledger.checkpoint()
    assert len(entries(topic)) == 1
    topic.trim(13)
    for ms in PUBLISHED:
        start = max(13, 3 * sum(at < ms for at in PUBLISHED))
        assert topic.reader(moment(ms)).read_next(0).offset == start


# ---- G8: by size -------------------------------------------------------------------------


def newest_within(sizes: list[int], ends: list[int], most: int) -> int:
    """The first offset of the newest entries that have at most so many bytes together."""
    first = ends[-1]
    for size, begin in zip(reversed(sizes), reversed([0, *ends[:-1]]), strict=True):
        most -= size
        if most < 0:
            break
        first = begin
    return first


def test_g8_a_topic_is_trimmed_by_size(engine, topic, monkeypatch) -> None:
    """The newest entries that fit stay, small ones in the tables and large ones beside them."""
    never_pack(monkeypatch)
    sent = []
    with topic.producer(max_batch_messages=3) as producer:
        for number in range(24):
            some = [b"%d %d" % (number, n) + bytes((10, 3000, LARGE)[number % 3]) for n in range(4)]
            producer.send_many(some)
            sent += some
    engine.ledger.checkpoint()
    found = entries(topic)
    sizes, ends = [entry.nbytes for entry in found], [entry.end for entry in found]
    total = sum(sizes)
    sums = [total - sum(sizes[:at]) for at in range(0, len(sizes) + 1, 3)]
    for most in (total + 1, *(sums_and for at in sums for sums_and in (at, at - 1)), 0):
        if most >= 0:
            expected = newest_within(sizes, ends, most)
            assert topic.trim(max_bytes=most) == expected
            assert values(topic) == sent[expected:]
    check_trimmed(topic, sent, len(sent))


def test_g8_the_stricter_of_two_limits_counts(engine, topic, monkeypatch) -> None:
    prepare("entries", topic, monkeypatch)
    size = entries(topic)[-1].nbytes
    assert topic.trim(before=3, max_bytes=10 * size) == 3
    assert topic.trim(before=5, max_bytes=size) == 8
    assert topic.trim(before=9, max_bytes=size) == 9
    assert topic.trim(before=moment(0), max_bytes=size) == 9


# ---- G2, G4: what trimming leaves alone --------------------------------------------------


def test_g2_sequence_ids_and_offsets_survive_the_trimming_of_everything(path) -> None:
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        with topic.producer(name="p") as producer:
            producer.send_many([b"x"] * 5, sequence_id=10)
        assert topic.trim(5) == 5
        with topic.producer(name="p") as producer:
            assert producer.last_sequence_id == 14
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        assert (topic.first_offset, topic.next_offset) == (5, 5)
        with topic.producer("exclusive", name="p") as producer:
            assert producer.last_sequence_id == 14
            with pytest.raises(xl.DuplicateSequenceError):
                producer.send(b"again", sequence_id=14)
            assert producer.send(b"next") == 5
        assert [m.sequence_id for m in topic.reader()] == [15]
        check_trimmed(topic, [b""] * 5 + [b"next"], 5)


def test_g4_publish_times_go_on_behind_what_was_trimmed(engine, topic) -> None:
    publish(topic)
    topic.trim(topic.next_offset)
    assert topic.reader(moment(PUBLISHED[-1])).position == topic.next_offset
    fill(topic, 1)
    (message,) = topic.reader()
    assert message.publish_time == PUBLISHED[-1]


def test_f6_a_cursor_that_was_trimmed_away(topic) -> None:
    """A group's next reader is told, or goes on with what there is; its commit counts again."""
    sent = fill(topic, 10)
    with topic.reader(group="g") as reader:
        reader.read_batch(3)
        reader.commit()
    topic.trim(6)
    with topic.reader(group="g") as reader:
        assert reader.position == 3
        refused(lambda: reader.read_next(0), 6)
    with topic.reader(group="g", trimmed="earliest") as reader:
        assert reader.read_next(0).value == sent[6]
        reader.commit()
    assert rest(topic.reader(group="g")) == sent[7:]


# ---- G8: readers at work meanwhile -------------------------------------------------------


def browse(state: State, trimmed: str) -> None:
    """Read on, and from anywhere, until enough has been seen, and enough of what was wanted had
    been trimmed; every message is the one that it should be."""
    dice, topic = random.Random(trimmed), state.topic
    reader = topic.reader(trimmed=trimmed)
    seen = missed = 0
    while seen < 300 or missed < 5:
        wanted = reader.position
        if dice.random() < 0.2:
            wanted = dice.randrange(max(0, topic.next_offset - 60), topic.next_offset + 1)
            reader.seek(wanted)
        before = topic.first_offset
        try:
            messages = reader.read_batch(dice.randrange(1, 8)) or [reader.read_next(0.02)]
        except xl.WaitTimeoutError:
            continue
        except xl.OffsetTrimmedError as error:
            check(trimmed == "error" and wanted < topic.first_offset, error, wanted)
            missed += 1
            reader.seek("earliest")
            continue
        first = messages[0].offset
        if first != wanted:
            bounds = max(wanted, before), topic.first_offset
            check(trimmed == "earliest" and bounds[0] <= first <= bounds[1], first, wanted, bounds)
            missed += 1
        check_run(messages, dense=trimmed == "error")
        seen += len(messages)


def check_run(messages: list[Any], dense: bool) -> None:
    for message in messages:
        check(message.offset == int(message.value[:10]), message.offset, message.value[:10])
    for message, follower in itertools.pairwise(messages):
        gap = follower.offset - message.offset - 1  # it may have gone between two entries
        check(gap == 0 or (gap > 0 and not dense), message.offset, gap)


def check(holds: bool, *facts: Any) -> None:
    """An assertion that says something in a worker, too."""
    if not holds:
        raise AssertionError(f"{facts}")


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_g8_other_processes_read_while_a_topic_is_trimmed(engine, topic, worker, large) -> None:
    """What they get is right, message by message, or the clear error; nothing looks damaged."""
    readers = [worker(), worker(), worker(readonly=True)]
    for reader, trimmed in zip(readers, ("error", "earliest", "error"), strict=True):
        reader.start(browse, trimmed)
    dice, deadline = random.Random(1), time.monotonic() + PATIENCE
    with topic.producer() as producer:
        for number in itertools.count():
            if all(reader.answered() for reader in readers) or time.monotonic() > deadline:
                break
            size = LARGE if large and number % 5 == 0 else 100
            some = range(3 * number, 3 * number + 3)
            producer.send_many([b"%010d" % one + bytes(size) for one in some])
            if dice.random() < 0.5:
                topic.trim(max(0, topic.next_offset - dice.randrange(30)))
            if number % 50 == 0:
                engine.ledger.checkpoint()
            time.sleep(0.002)
    for reader in readers:
        reader.answer()
    assert engine.verify().ok


@pytest.mark.long
def test_g8_everything_stays_sound_while_it_is_trimmed(engine, topic) -> None:
    """verify() is never told of damage that is none."""
    reports = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            reports.append(engine.verify())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with topic.producer(max_batch_messages=4) as producer:
            for number in range(150):
                producer.send_many([bytes(100)] * 10)
                producer.send(bytes(LARGE))
                topic.trim(topic.next_offset - number % 40)
        until(lambda: len(reports) > 5)
    finally:
        stop.set()
        looking.join(PATIENCE)
    assert all(report.ok for report in reports)


# ---- G8: dying in the middle -------------------------------------------------------------


def trim_step_by_step(says: Connection, path: str, before: int, step: int, behind: bool) -> None:
    deletion.DROPPED_AT_ONCE = 3
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        die_at_commit(step, behind=behind)
        say(says, topic.trim(before))


def delete_step_by_step(says: Connection, path: str, before: int, step: int, behind: bool) -> None:
    deletion.DROPPED_AT_ONCE = 3
    with xl.open(path) as engine:
        die_at_commit(step, behind=behind)
        engine.delete_topic("orders")
        say(says, before)


def many_entries(topic: xl.Topic) -> None:
    """Twenty entries, some of them in segments of their own."""
    with topic.producer(name="p") as producer:
        for number in range(20):
            producer.send_many(
                [b"%d" % n + bytes(LARGE if number % 4 == 0 else 9) for n in range(2)]
            )
    with topic.reader(group="g") as reader:
        reader.commit()
    topic.engine.ledger.checkpoint()


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Each append is an entry, each large entry a segment."""
    never_pack(monkeypatch)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)


def steps() -> Iterator[tuple[int, bool]]:
    """Exactly before the first commit, exactly behind it, before the second one ..."""
    for step in itertools.count(1):
        yield step, False
        yield step, True


def dies(function: Callable[..., None], *args: Any) -> bool:
    with killable(function, *args) as process:
        told = process.all_told()
        assert process.process.exitcode == (0 if told else -signal.SIGKILL)
        return not told


@pytest.mark.long
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_g8_dying_at_any_step_of_a_trim(path, small_parts, beside) -> None:
    """A process is killed right before and right after each commit of a trim. The first commit
    decides; the next engine that opens the ledger, or trims the topic, removes what is left."""
    deaths = 0
    for step, behind in steps():
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            many_entries(topic)
            first, end, expected = topic.first_offset, topic.next_offset, values(topic)
        with xl.open(path) if beside else contextlib.nullcontext() as other:
            if other is not None:
                other.backend.retention_worker.stop()  # else it may do what is counted below
            if not dies(trim_step_by_step, path, end - 3, step, behind):
                break
            deaths += 1
            if other is not None:
                with other.topic("else").producer() as producer:
                    producer.send(b"x")  # what was committed comes to light
                assert other.verify().ok
                other.topic("orders").trim(end - 3 if step > 1 or behind else first)
        moved = step > 1 or behind
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            assert topic.first_offset == (end - 3 if moved else first)
            assert values(topic) == (expected[-3:] if moved else expected)
            assert engine.verify().ok
            assert garbage(engine) == {}
            topic.trim(end)
    assert deaths > 10


@pytest.mark.long
def test_g8_dying_at_any_step_of_a_deletion(path, small_parts) -> None:
    deaths = 0
    for step, behind in steps():
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            topic.trim(topic.next_offset)
            many_entries(topic)
            topic.retention(max_age=10**6)
            topic.compact()
            end = topic.next_offset
        if not dies(delete_step_by_step, path, end, step, behind):
            break
        deaths += 1
        with xl.open(path) as engine:
            assert engine.topics() == ([] if step > 1 or behind else ["orders"])
            assert garbage(engine) == {}
            assert engine.verify().ok
    assert deaths > 10


def append_and_trim(says: Connection, path: str, seed: int) -> None:
    """For ever; what was done is told."""
    deletion.DROPPED_AT_ONCE = 3
    dice = random.Random(seed)
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        producer = topic.producer("exclusive_with_fencing", name="p", max_batch_messages=2)
        while True:
            number = producer.last_sequence_id + 1
            size = dice.choice((10, 10, 10, LARGE))
            some = [b"%d" % n + bytes(size) for n in range(number, number + 4)]
            say(says, (producer.send_many(some).stop, -1))
            say(says, (-1, topic.trim(max(0, topic.next_offset - dice.randrange(40)))))


@pytest.mark.long
def test_g8_killed_while_it_trims(path) -> None:
    """Forty times or more, at a random moment: nothing that was acknowledged is missing, nothing
    that was trimmed comes back, and nothing stays behind."""
    dice, first, end = random.Random(4), 0, 0
    for seed in itertools.count():
        if seed >= 40 and first > 100:  # on a busy machine, few come as far as a trim
            break
        with killable(append_and_trim, path, seed) as process:
            process.told()
            time.sleep(dice.random() * 0.05)
            process.kill()
            for stop, begin in process.all_told():
                end, first = max(end, stop), max(first, begin)
        with xl.open(path) as engine:
            topic = engine.topic("orders")
            assert topic.next_offset >= end
            assert topic.first_offset >= first
            found = [int(value.rstrip(b"\0")) for value in values(topic)]
            assert found == list(range(topic.first_offset, topic.next_offset))
            assert engine.verify().ok
            assert garbage(engine) == {}
            first, end = topic.first_offset, topic.next_offset


# ---- G8: space ---------------------------------------------------------------------------


def test_g8_large_entries_give_their_space_back(engine, topic, monkeypatch) -> None:
    """Segment by segment, each with its last entry."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4 * LARGE)
    with topic.producer() as producer:
        for number in range(12):
            producer.send(b"%d" % number + bytes(LARGE))
    full = engine.stats()["large_bytes"]
    assert full > 12 * LARGE
    left = []
    for before in range(1, 13):
        topic.trim(before)
        left.append(engine.stats()["large_bytes"])
        assert garbage(engine) == {}
    assert left == sorted(left, reverse=True)
    assert left[3] < full - 3 * LARGE
    assert left[-1] == 0


@pytest.mark.long
def test_g8_what_was_trimmed_makes_room_for_what_comes(engine, topic) -> None:
    """Ten times as much as ever is there at once goes through a ledger that does not grow."""
    used = []
    with topic.producer() as producer:
        for _ in range(20):
            producer.send_many([random.randbytes(1000) for _ in range(1000)])
            for _ in range(100):
                producer.send(bytes(1000))
            engine.ledger.checkpoint()
            topic.trim(topic.next_offset - 100)
            used.append(engine.stats()["used_bytes"])
    assert max(used[5:]) <= used[4] + (1 << 20), used


# ---- G8: retention -----------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch) -> None:
    """Who keeps topics within their limits looks often."""
    monkeypatch.setattr(retention, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(notifications, "LONGEST_SLEEP_SECONDS", 0.02)


@pytest.mark.long
def test_g8_old_messages_go_by_themselves(engine, topic, often) -> None:
    """Each once it is old enough, not earlier."""
    keeper, reading = engine.backend.retention_worker, threading.Lock()
    go_round = keeper.go_round

    def go_round_unless_reading() -> None:
        with reading:
            go_round()

    keeper.go_round = go_round_unless_reading
    topic.retention(max_age=0.4)
    published: list[int] = []
    with topic.producer() as producer:
        for number in range(60):
            with reading:  # which may take longer than 0.4 s
                assert producer.send(b"%d" % number) == number
                published.append(next(iter(topic.reader(number))).publish_time)
            engine.ledger.checkpoint()
            first, now = topic.first_offset, time.time() * 1000
            assert all(at <= now - 400 for at in published[:first])
            time.sleep(0.01)
    until(lambda: topic.first_offset == 60)
    assert time.time() * 1000 > published[-1] + 400
    until(lambda: garbage(engine) == {})


def test_g8_what_is_too_much_goes_by_itself(engine, topic, often) -> None:
    topic.retention(max_bytes=5 * LARGE)
    with topic.producer() as producer:
        for number in range(30):
            producer.send(b"%d" % number + bytes(LARGE - 1000))
            assert topic.next_offset - topic.first_offset >= min(5, number + 1)
    until(lambda: topic.first_offset == 25)
    time.sleep(0.1)
    until(lambda: garbage(engine) == {})  # the first offset moves first
    check_trimmed(topic, [b"%d" % n + bytes(LARGE - 1000) for n in range(30)], 25)


def keep(state: State, **limits: Any) -> None:
    state.topic.retention(**limits)


def test_g8_a_process_with_the_ledger_open_applies_it(engine, topic, worker, often) -> None:
    """One process sets it and is killed at once; another one, which has nothing to do, goes on
    with it; and so does the next one to open the ledger."""
    threads = set(threading.enumerate())
    fill(topic, 20)
    engine.ledger.checkpoint()
    process = worker()
    process.call(keep, max_age=0.0)
    process.kill()
    until(lambda: topic.first_offset == 20)
    fill(topic, 20)
    path = engine.path
    engine.close()
    assert threads_since(threads) == []
    with xl.open(path) as again:
        until(lambda: again.topic("orders").first_offset == 40)


def test_g8_a_topic_that_is_terminated_keeps_everything(engine, topic, often) -> None:
    topic.retention(max_age=0.0, max_bytes=0)
    fill(topic, 5)
    engine.ledger.checkpoint()
    until(lambda: topic.first_offset == 5)
    topic.retention(max_age=None, max_bytes=None)
    fill(topic, 5)
    engine.ledger.checkpoint()
    time.sleep(0.3)
    assert topic.first_offset == 5
    assert rows(engine)["retention"] == []


def test_g8_to_ask_for_the_retention_changes_nothing(engine, topic) -> None:
    kept = xl.Retention(3600.0, 1000, "keys")
    assert topic.retention() == xl.Retention(None, None, None)
    assert topic.retention(3600.0, 1000, "keys") == kept
    with xl.open(engine.path, readonly=True) as readonly:
        for _ in range(2):
            assert topic.retention() == readonly.topic("orders").retention() == kept


def test_g8_an_argument_that_is_left_out_changes_nothing(topic) -> None:
    assert topic.retention(max_bytes=1000) == xl.Retention(None, 1000, None)
    assert topic.retention(max_age=dt.timedelta(days=1)) == xl.Retention(86400.0, 1000, None)
    assert topic.retention(keep="keys") == xl.Retention(86400.0, 1000, "keys")
    assert topic.retention(max_age=None) == xl.Retention(None, 1000, "keys")
    assert topic.retention(max_bytes=None) == xl.Retention(None, None, "keys")
    assert topic.retention(keep=None) == topic.retention() == xl.Retention()
    assert rows(topic.engine)["retention"] == []
    for wrong in ("key", True, ""):
        with pytest.raises(ValueError, match=r"keep=.*'keys' or None"):
            topic.retention(keep=wrong)


def test_g8_two_that_change_a_retention_at_once_lose_neither_change(topic, worker) -> None:
    process = worker()
    for number in range(20):
        process.start(keep, max_age=float(number))
        topic.retention(max_bytes=number)
        process.answer()
        assert topic.retention() == xl.Retention(float(number), number, None)


@pytest.mark.parametrize("views", [0, 1])
@pytest.mark.parametrize("how", ["retention", "trim"])
def test_g8_keys_are_kept_where_that_is_asked_for(
    engine, topic, often, views: int, how: str
) -> None:
    """Of a topic that was never compacted, too: it is compacted before messages are removed. A
    reader that has read all before misses no deletion either, or is told."""
    with topic.producer() as producer:
        producer.send_many([b"0", b"1", b"2"], keys=["a", "b", "a"])
        for _ in range(views):
            topic.compact()
        producer.send_many([None, b"4"], keys=["b", "c"])
    engine.ledger.checkpoint()
    if how == "retention":
        topic.retention(max_age=0.0, keep="keys")
        until(lambda: topic.first_offset == 5)
    else:
        topic.retention(keep="keys")
        assert topic.trim(before=5) == 5
    assert list(topic.reader(trimmed="earliest")) == []
    found = [(m.key, m.value) for m in topic.reader(read_compacted=True)]
    assert found == [(b"a", b"2"), (b"c", b"4")]
    until(lambda: garbage(engine) == {})


def test_g8_without_that_the_keys_go(topic) -> None:
    """The control: of a topic that was never compacted."""
    topic.producer().send_many([b"0", b"1"], keys=["a", "b"])
    assert topic.trim(before=2) == 2
    assert list(topic.reader(read_compacted=True)) == []


def test_g8_a_dry_run_removes_nothing(engine, topic) -> None:
    fill(topic, 10, batch=1)
    with xl.open(engine.path, readonly=True) as readonly:
        for given, first in (
            ({"before": 4}, 4),
            ({"before": 99}, 10),
            ({"before": 0}, 0),
            ({"max_bytes": 0}, 10),
            ({"before": dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)}, 10),
        ):
            assert topic.trim(**given, dry_run=True) == first
            assert readonly.topic("orders").trim(**given, dry_run=True) == first
    assert topic.first_offset == 0
    assert topic.trim(before=4) == topic.trim(before=2, dry_run=True) == 4
    with pytest.raises(TypeError, match="dry_run"):
        topic.trim(before=9, dry_run="no")
    assert topic.first_offset == 4


def hold_back(state: State) -> None:
    """Apply no retention unless told to."""
    retention.ROUND_SECONDS = 1e9


def go_round_in_two_halves(state: State, step: str) -> None:
    """Apply it, and hold on before a step until there is a file that says so."""
    original = getattr(retention, step)

    def hold_on(*args: Any) -> Any:
        setattr(retention, step, original)
        Path(state.engine.path, "reached").touch()
        until(Path(state.engine.path, "go on").exists)
        return original(*args)

    setattr(retention, step, hold_on)
    state.engine.backend.retention_worker.go_round()


@pytest.mark.parametrize(
    "limits", [{"max_age": None}, {"max_age": 10**6}], ids=["ended", "a longer one"]
)
@pytest.mark.parametrize("step", ["trim_what_is_old", "first_to_retain", "trim"])
def test_g8_a_limit_that_is_lifted_is_not_applied_any_more(
    engine, topic, worker, monkeypatch, step, limits
) -> None:
    """Another process is about to apply it: it has read what is to be retained, and hangs, or
    has other topics to trim first."""
    monkeypatch.setattr(retention, "ROUND_SECONDS", 1e9)
    process = worker()
    process.call(hold_back)
    fill(topic, 5)
    engine.ledger.checkpoint()
    topic.retention(max_age=0.0)
    process.start(go_round_in_two_halves, step)
    until(Path(engine.path, "reached").exists)
    topic.retention(**limits)
    fill(topic, 5)
    engine.ledger.checkpoint()
    Path(engine.path, "go on").touch()
    process.answer()
    assert topic.first_offset == 0
    assert len(values(topic)) == 10
    topic.retention(max_age=0.0)
    process.call(go_round_in_two_halves, step)
    assert topic.first_offset == 10
    assert garbage(engine) == {}


@pytest.mark.parametrize("wrong", [-1, -0.1, "1", True, float("nan")])
def test_g8_a_wrong_age_is_named(topic, wrong) -> None:
    with pytest.raises((ValueError, TypeError), match="max_age"):
        topic.retention(max_age=wrong)


def damage(topic: xl.Topic) -> None:
    """Every entry of the topic is rubbish."""
    with topic.engine.ledger.write_exclusive() as inside:
        for last, _ in list(inside.entries.walk(topic.id, 0)):
            inside.rows.put("entries", PAIR.pack(topic.id, last), b"garbage!")


def test_g8_a_damaged_topic_does_not_keep_the_others(engine, often) -> None:
    one, other = engine.topic("one"), engine.topic("other")
    for topic in (one, other):
        fill(topic, 8)
    engine.ledger.checkpoint()
    damage(one)
    one.retention(max_age=3600)
    other.retention(max_age=0.0)
    until(lambda: other.first_offset == 8)


@pytest.mark.parametrize("table", ["retention", "trash"])
def test_g8_a_damaged_row_of_one_topic_does_not_keep_the_others(engine, often, table) -> None:
    """Of its limits, or of what is to be deleted of it."""
    one, other = engine.topic("one"), engine.topic("other")
    for topic in (one, other):
        fill(topic, 8)
    engine.ledger.checkpoint()
    with engine.ledger.write_exclusive() as tables:
        tables.rows.put(table, U64.pack(one.id), b"\xc1")
    other.retention(max_age=0.0)
    until(lambda: other.first_offset == 8)
    engine.delete_topic("other")
    with engine.ledger.read() as tables:
        assert other.id not in tables.deletions.all()


def test_g8_an_age_without_end_keeps_no_other_topic_from_being_trimmed(engine, often) -> None:
    one, other = engine.topic("one"), engine.topic("other")
    for topic in (one, other):
        fill(topic, 8)
    engine.ledger.checkpoint()
    one.retention(max_age=float("inf"))
    other.retention(max_age=0.0)
    until(lambda: other.first_offset == 8)
    assert one.first_offset == 0


# ---- G9: what is on its way out ----------------------------------------------------------


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    except Failed as error:
        return error.kind
    return "fine"


def in_two_halves(state: State, module: Any, step: str, act: Callable[[State], Any]) -> Any:
    """`act(state)`, which holds on before a step until there is a file that says so."""
    original = getattr(module, step)

    def hold_on(*args: Any, **kwargs: Any) -> Any:
        setattr(module, step, original)
        Path(state.engine.path, "reached").touch()
        until(Path(state.engine.path, "go on").exists)
        return original(*args, **kwargs)

    setattr(module, step, hold_on)
    return act(state)


def trim_what_is_old_in_two_halves(state: State) -> int:
    old = dt.datetime(1971, 1, 1, tzinfo=dt.UTC)
    return in_two_halves(state, retention, "offset_at_time", lambda s: s.topic.trim(old))


def compact_in_two_halves(state: State) -> int:
    return in_two_halves(state, views, "_read", lambda s: s.topic.compact())


@pytest.mark.parametrize("act", [trim_what_is_old_in_two_halves, compact_in_two_halves])
@pytest.mark.parametrize("end", ["trimmed", "deleted"])
def test_g9_what_goes_while_another_process_reads_it_is_not_damaged(
    engine, topic, worker, act, end
) -> None:
    """A process is stopped in the middle of a look at large entries. Meanwhile their segment is
    removed."""
    process = worker()
    with topic.producer() as producer:
        producer.send_many([bytes(LARGE), bytes(LARGE)], keys=["a", "b"])
    process.start(act)
    until(Path(engine.path, "reached").exists)
    if end == "trimmed":
        topic.trim(2)
    else:
        engine.delete_topic("orders")
    Path(engine.path, "go on").touch()
    if end == "trimmed":
        process.answer()
    else:
        assert outcome(process.answer) in ("fine", "TopicNotFoundError")
    until(lambda: garbage(engine) == {})  # after the read


def test_g9_a_view_that_is_replaced_while_another_process_compacts_is_not_damaged(
    engine, topic, worker
) -> None:
    process = worker()
    with topic.producer() as producer:
        producer.send(bytes(LARGE), key="a")
        topic.compact()
        topic.trim(1)
        producer.send(b"1", key="b")
        process.start(compact_in_two_halves)
        until(Path(engine.path, "reached").exists)
        producer.send(None, key="a")
    topic.compact()
    Path(engine.path, "go on").touch()
    process.answer()
    assert [m.key for m in topic.reader(read_compacted=True)] == [b"b"]
    assert engine.verify().ok
    until(lambda: garbage(engine) == {})  # after the read


# ---- G8: sealed --------------------------------------------------------------------------


def sealed(call: Callable[[], Any], end: int) -> None:
    with pytest.raises(xl.TopicTerminatedError, match=f"'orders' was terminated.* offset {end}"):
        call()


@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_g8_a_terminated_topic_takes_no_message_ever_again(engine, topic, worker, mode) -> None:
    """The next call of its producers raises the error, in this process and in another one, and so
    do new requests, also after the ledger was opened again. The topic can be read."""
    other = worker()
    mine = topic.producer(mode, name="mine", linger=60.0)
    if mode == "shared":
        other.call(open_producer, "shared")
        other.call(send, b"theirs")
    mine.send(b"x")
    end = topic.next_offset
    waiting = mine.send_async(b"too late")
    assert topic.terminate() == end
    sealed(lambda: mine.send(b"y"), end)
    sealed(lambda: waiting.result(PATIENCE), end)
    sealed(lambda: mine.send_many([b"y"]), end)
    sealed(lambda: mine.send_async(b"y").result(PATIENCE), end)
    with pytest.raises(Failed, match="TopicTerminatedError"):
        other.call(send, b"y") if mode == "shared" else other.call(open_producer, "shared")
    for other_mode in ("shared", "exclusive", "exclusive_with_fencing", "wait_for_exclusive"):
        sealed(lambda mode=other_mode: topic.producer(mode, timeout=PATIENCE), end)
    mine.close()
    assert topic.terminate() == end
    expected = values(topic)
    engine.close()
    with xl.open(engine.path) as again:
        topic = again.topic("orders")
        sealed(topic.producer, end)
        assert topic.next_offset == end == len(expected)
        assert values(topic) == expected
        assert again.verify().ok


@pytest.mark.parametrize("what", ["a frame", "an entry"])
def test_g8_what_was_acknowledged_before_the_seal_is_there(engine, topic, what) -> None:
    """Producers send at full speed while the topic is terminated."""
    value = bytes(LARGE if what == "an entry" else 10)
    acknowledged: list[int] = []

    def send_all(producer: xl.Producer) -> None:
        with contextlib.suppress(xl.TopicTerminatedError):
            while True:
                acknowledged.append(producer.send(value))

    threads = [threading.Thread(target=send_all, args=(topic.producer(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(acknowledged) > 30)
    end = topic.terminate()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(acknowledged) == list(range(end)) == list(range(topic.next_offset))


def test_g8_readers_come_to_the_end_of_a_terminated_topic(topic) -> None:
    sent = fill(topic, 6)
    end = topic.terminate()
    reader = topic.reader()
    assert rest(reader) == sent
    assert not reader.has_message_available()
    assert reader.read_batch(5) == []
    for timeout in (0, 5, None):
        with pytest.raises(xl.TopicTerminatedError, match=f"'orders' is terminated.*{end}"):
            within(lambda timeout=timeout: reader.read_next(timeout))
    assert [m.value for m in within(lambda: list(topic.reader(4).follow()))] == sent[4:]
    assert within(lambda: list(topic.reader("latest").follow())) == []
    assert list(topic.reader(end + 10)) == []


def follow(state: State, at_the_end: bool) -> list[int]:
    reader = state.topic.reader("latest" if at_the_end else "earliest")
    state.kept["reading"] = True
    return [message.offset for message in reader.follow(PATIENCE)]


def test_g8_readers_that_wait_at_the_end_are_woken_by_the_seal(topic, worker) -> None:
    processes = [worker(), worker(readonly=True)]
    fill(topic, 3)
    for process in processes:
        process.start(follow, False)
    blocked = topic.reader("latest")
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(outcome(blocked.read_next)))
    thread.start()
    time.sleep(0.3)
    assert not result
    topic.terminate()
    thread.join(PATIENCE)
    assert result == ["TopicTerminatedError"]
    assert [process.answer() for process in processes] == [[0, 1, 2]] * 2


def test_g8_a_waiter_for_a_topic_is_notified_of_its_termination(topic) -> None:
    owner = topic.producer("exclusive")
    waiter = topic.producer_async("wait_for_exclusive")
    topic.terminate()
    with pytest.raises(xl.TopicTerminatedError):
        waiter.result(timeout=PATIENCE)
    owner.close()


def test_g8_a_terminated_topic_is_trimmed_compacted_and_deleted_as_any_other(engine, topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % n for n in range(6)], keys=["a", "b"] * 3)
    end = topic.terminate()
    assert topic.compact() == 2
    assert [m.offset for m in topic.reader(read_compacted=True)] == [4, 5]
    assert topic.trim(4) == 4
    topic.retention(max_age=1000)
    assert values(topic) == [b"4", b"5"]
    assert topic.terminate() == end
    engine.delete_topic("orders")
    again = engine.topic("orders")
    with again.producer() as producer:
        assert producer.send(b"new") == 0


# ---- G8, B1: deleted, and made again -----------------------------------------------------


def not_found(call: Callable[[], Any]) -> None:
    with pytest.raises(xl.TopicNotFoundError, match="'orders'"):
        call()


def a_whole_life(topic: xl.Topic) -> None:
    """A topic with all that it can have: messages, epochs, a view, a snapshot, a cursor, limits."""
    with topic.producer("exclusive", name="p") as producer:
        producer.send_many([b"%d" % n for n in range(9)], keys=["a", "b", "c"] * 3)
        producer.send(bytes(LARGE), key="large")
    topic.compact()
    topic.engine.backend.snapshot(topic.id, 10, [(b"k", b"v")])
    topic.trim(4)
    topic.retention(max_age=10**6)
    with topic.reader(group="g") as reader:
        reader.read_batch(3)
        reader.commit()


def test_g8_a_topic_that_is_made_again_has_nothing_of_the_old_one(engine, topic) -> None:
    """But its epoch, which is never used twice (rule B1)."""
    for life in range(1, 6):
        a_whole_life(topic)
        assert topic.epoch == life
        engine.delete_topic("orders")
        assert engine.topics() == []
        assert garbage(engine) == {}
        assert engine.stats()["large_bytes"] == 0
        old, topic = topic, engine.topic("orders")
        assert (topic.epoch, topic.first_offset, topic.next_offset) == (life, 0, 0)
        assert old.id != topic.id
        assert list(topic.reader(read_compacted=True)) == list(topic.reader()) == []
        with topic.reader("latest", group="g") as reader:
            assert reader.position == 0
        with topic.producer(name="p") as producer:
            assert producer.last_sequence_id == -1
        state = xl.SharedState(topic, apply=lambda state, op: state)
        assert state.read(dict) == {}
        state.close()
        assert rows(engine)["retention"] == []
        for call in (
            lambda old=old: old.trim(1),
            old.compact,
            old.terminate,
            old.reader,
            old.producer,
            lambda old=old: old.retention(1),
            lambda old=old: old.epoch,
        ):
            not_found(call)
    assert engine.verify().ok


def test_b1_the_epoch_goes_on_in_every_process(engine, topic, worker) -> None:
    other = worker()
    epochs = [other.call(open_and_close)]
    for _ in range(3):
        engine.delete_topic("orders")
        epochs.append(other.call(open_and_close))
        with engine.topic("orders").producer("exclusive_with_fencing") as producer:
            epochs.append(producer.topic_epoch)
    engine.delete_topic("orders")
    engine.close()
    with xl.open(engine.path) as again, again.topic("orders").producer("exclusive") as producer:
        assert [*epochs, producer.topic_epoch] == list(range(1, 9))


def open_and_close(state: State) -> int:
    with state.engine.topic("orders").producer("exclusive") as producer:
        producer.send(b"x")
        return producer.topic_epoch


def test_g8_a_topic_in_use_cannot_be_deleted(engine, topic, worker) -> None:
    """Held, or awaited, wherever that is; readers do not count (rule A1)."""
    with topic.producer(), pytest.raises(xl.ProducerBusyError, match=r"'orders'.*held by"):
        engine.delete_topic("orders")
    other = worker()
    other.call(open_producer, "exclusive")
    with pytest.raises(xl.ProducerBusyError, match=str(other.pid)):
        engine.delete_topic("orders")
    other.kill()
    engine.delete_topic("orders")
    not_found(lambda: engine.delete_topic("orders"))


def test_g8_readers_of_a_deleted_topic_are_told(engine, topic, worker) -> None:
    fill(topic, 3)
    blocked, behind = topic.reader("latest"), topic.reader()
    process = worker()
    process.start(follow, True)
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(outcome(blocked.read_next)))
    thread.start()
    time.sleep(0.5)
    engine.delete_topic("orders")
    thread.join(PATIENCE)
    assert result == ["TopicNotFoundError"]
    for call in (
        lambda: behind.read_next(0),
        lambda: list(behind),
        behind.has_message_available,
        lambda: behind.seek("earliest"),
        lambda: behind.read_batch(1),
    ):
        not_found(call)
    with pytest.raises(Failed, match="TopicNotFoundError"):
        process.answer()


def test_f6_a_reader_of_a_deleted_topic_commits_nothing(engine, topic) -> None:
    fill(topic, 3)
    with topic.reader(group="g") as reader:
        reader.read_batch(2)
        engine.delete_topic("orders")
        not_found(reader.commit)
    assert garbage(engine) == {}


def test_f6_a_reader_of_a_topic_that_was_made_again_commits_nothing(engine, topic) -> None:
    fill(topic, 3)
    with topic.reader(group="g") as reader:
        reader.read_batch(2)
        engine.delete_topic("orders")
        engine.topic("orders")
        not_found(reader.commit)
    assert garbage(engine) == {}


def test_g8_no_limits_stay_of_a_topic_that_is_deleted_meanwhile(engine, topic, monkeypatch) -> None:
    """Another process deletes it between two steps of ours."""

    def set_late(*args: Any) -> None:
        engine.delete_topic("orders")
        retention.set_retention(*args)

    monkeypatch.setattr(topics, "set_retention", set_late)
    with contextlib.suppress(xl.TopicNotFoundError):
        topic.retention(max_age=1000)
    assert garbage(engine) == {}


@pytest.mark.long
def test_g8_nothing_stays_of_topics_that_come_and_go(engine) -> None:
    """Five threads use a topic in every way while a sixth deletes it, over and over."""
    stop = threading.Event()

    def use(act: Callable[[xl.Topic], Any]) -> None:
        while not stop.is_set():
            with contextlib.suppress(xl.TopicNotFoundError, xl.ProducerBusyError):
                act(engine.topic("t"))

    def write(topic: xl.Topic) -> None:
        with topic.producer() as producer:
            producer.send(b"x", key="k")
            producer.send(bytes(LARGE), key="k")

    def delete(topic: xl.Topic) -> None:
        time.sleep(0.002)
        engine.delete_topic("t")

    acts = (
        write,
        delete,
        lambda topic: topic.compact(),
        lambda topic: topic.trim(1),
        lambda topic: list(topic.reader(trimmed="earliest")),
    )
    threads = [threading.Thread(target=use, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    time.sleep(2)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    engine.topic("t")
    engine.delete_topic("t")
    assert garbage(engine) == {}
    assert engine.stats()["large_bytes"] == 0
    assert engine.topic("t").epoch == 0  # shared producers use none up


def test_g8_trimming_gives_room_back_in_a_small_ledger(path: str) -> None:
    """Large entries lie in segments, and only a whole segment goes."""
    with xl.open(path, map_size=24 << 20) as engine, engine.topic("t").producer() as producer:
        topic = engine.topic("t")
        for _ in range(60):
            producer.send_many([bytes(1 << 18)] * 4)
            topic.trim(max_bytes=2 << 20)
        assert topic.next_offset == 240
