"""Reading: where it starts, how it waits, and what it may see (rules G5, G6)."""

from __future__ import annotations

import datetime as dt
import random
import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import reader as reader_module
from exclusivelog.local.log import appending
from exclusivelog.local.shm import lockfile
from testing.children import child, finish, line, tell
from testing.journals import checkpoint, never_pack, no_checkpoints, published_last_at, wall_ms
from testing.processes import PATIENCE, State, open_producer, send, until

UTC = dt.UTC


def fill(topic: xl.Topic, count: int, batch: int = 4) -> list[bytes]:
    """Messages numbered from 0, `batch` of them to an entry."""
    sent = [b"%d" % number for number in range(count)]
    with topic.producer(max_batch_messages=batch) as producer:
        producer.send_many(sent)
    return sent


def offsets(reader: xl.Reader) -> list[int]:
    return [message.offset for message in reader]


def rest(reader: xl.Reader) -> list[bytes]:
    return [message.value for message in reader]


# ---- G5: where a reader starts -----------------------------------------------------------


def test_g5_reading_begins_where_it_is_asked_to(topic) -> None:
    sent = fill(topic, 10)
    assert rest(topic.reader()) == sent
    assert rest(topic.reader("earliest")) == sent
    assert rest(topic.reader("latest")) == []
    for start in range(15):
        assert rest(topic.reader(start)) == sent[start:]
        assert rest(topic.reader(start, inclusive=False)) == sent[start + 1 :]


def test_g5_latest_sees_what_comes_from_now_on(topic) -> None:
    fill(topic, 3)
    reader = topic.reader("latest")
    assert reader.position == 3
    fill(topic, 2)
    assert offsets(reader) == [3, 4]


def test_g5_beyond_the_end_waits_for_that_offset(topic) -> None:
    reader = topic.reader(5)
    fill(topic, 5)
    assert not reader.has_message_available()
    with pytest.raises(xl.WaitTimeoutError):
        reader.read_next(0)
    fill(topic, 2, batch=2)
    assert reader.has_message_available()
    assert offsets(reader) == [5, 6]


@pytest.mark.parametrize(
    "start", ["newest", "", b"earliest", 2**63, 1.0, True, None, [], -dt.timedelta(1)]
)
def test_g5_a_wrong_start_is_refused_by_name(topic, start) -> None:
    reader = topic.reader()
    for call in (topic.reader, reader.seek):
        with pytest.raises((ValueError, TypeError), match="start"):
            call(start)
    assert reader.position == 0


def test_g5_the_largest_offset_is_a_start(topic) -> None:
    reader = topic.reader(2**63 - 1)
    assert not reader.has_message_available()
    assert rest(reader) == []
    reader.seek(2**63 - 1, inclusive=False)
    assert rest(reader) == []


# ms, one frame each. They are still to come: no clock of this machine interferes.
PUBLISHED = [4_102_444_800_000 + ms for ms in (0, 0, 1, 1000, 1000, 1000, 4000, 4000, 8000)]
BESIDE = (-1, 0, 1, 2, 999, 1000, 1001, 4000, 7999, 8000, 8001)
ASKED = [-5, 0, 1000, *(PUBLISHED[0] + ms for ms in BESIDE), PUBLISHED[0] * 10]


def publish(topic: xl.Topic) -> None:
    """Three messages to a frame, the frames published at these times."""
    with topic.producer() as producer:
        for ms in PUBLISHED:
            published_last_at(topic, ms)
            producer.send_many([b"x"] * 3)
    assert [m.publish_time for m in topic.reader()] == [ms for ms in PUBLISHED for _ in range(3)]


def moment(ms: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=UTC) + dt.timedelta(milliseconds=ms)


@pytest.mark.parametrize(("where", "entries"), [("frames", 9), ("entries", 9), ("packed", 1)])
def test_g5_a_time_finds_the_first_message_published_then_or_later(
    engine, topic, monkeypatch, where, entries
) -> None:
    """In the journal, in entries of the tables, and within an entry into which all of it was
    packed."""
    if where == "entries":
        never_pack(monkeypatch)
    with no_checkpoints(engine):
        publish(topic)
        if where == "frames":
            check_times(topic)
            assert engine.verify().entries == entries
    engine.ledger.checkpoint()
    check_times(topic)
    assert where == "frames" or engine.verify().entries == entries


def check_times(topic: xl.Topic) -> None:
    times = [ms for ms in PUBLISHED for _ in range(3)]
    reader = topic.reader()
    for ms in ASKED:
        from_here = sum(published < ms for published in times)
        behind = sum(published <= ms for published in times)
        for start in (moment(ms), moment(ms).astimezone().replace(tzinfo=None)):  # local time
            assert topic.reader(start).position == from_here
            reader.seek(start)
            assert reader.position == from_here
            assert topic.reader(start, inclusive=False).position == behind
        east = moment(ms).astimezone(dt.timezone(dt.timedelta(hours=-7)))
        assert topic.reader(east).position == from_here


@pytest.mark.parametrize("trimmed", [0, 4])
def test_g5_a_negative_start_is_so_many_messages_before_the_end(topic, trimmed) -> None:
    fill(topic, 10)
    topic.trim(before=trimmed)
    for count in range(1, 14):
        first = max(trimmed, 10 - count)
        assert offsets(topic.reader(-count)) == list(range(first, 10))
        reader = topic.reader()
        reader.seek(-count)
        assert reader.position == first
        assert offsets(topic.reader(-count, inclusive=False)) == list(range(first + 1, 10))
    assert topic.reader(-(2**70)).position == trimmed
    topic.trim(before=10)
    for inclusive in (True, False):
        assert topic.reader(-1, inclusive=inclusive).position == 10


def test_g5_a_negative_start_of_a_compacted_topic_clamps_to_the_view(topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % n for n in range(6)], keys=["a", "b", "a", "c", "d", "e"])
    topic.compact()
    topic.trim(before=4)
    assert offsets(topic.reader(-1, read_compacted=True)) == [5]
    assert offsets(topic.reader(-9, read_compacted=True)) == [1, 2, 3, 4, 5]


def test_g5_a_timedelta_is_so_long_ago(topic) -> None:
    with topic.producer() as producer:
        for _ in range(3):
            producer.send(b"x")
            time.sleep(0.05)
    published = [message.publish_time for message in topic.reader()]
    reader = topic.reader("latest")
    for ago in (0, 30, 60, 110, 160, 10**9):
        begun = wall_ms()
        reader.seek(dt.timedelta(milliseconds=ago))
        found = reader.position, topic.reader(dt.timedelta(milliseconds=ago)).position
        ended = wall_ms() + 1
        for position in found:
            assert position >= sum(at < begun - ago for at in published)
            assert position <= sum(at < ended - ago for at in published)
    assert topic.reader(dt.timedelta(0)).position == 3
    assert topic.reader(dt.timedelta(days=1)).position == 0
    assert topic.reader(dt.timedelta.max).position == 0


def test_g5_next_gives_messages_up_to_the_end_as_it_is_now(engine, topic) -> None:
    fill(topic, 2)
    reader = topic.reader()
    assert (next(reader).offset, next(reader).offset) == (0, 1)
    with pytest.raises(StopIteration):
        next(reader)
    fill(topic, 1)
    assert next(reader).offset == 2
    assert next(reader, None) is None
    with engine.reader(["orders"], group="g") as both:
        got = [(name, found.offset) for name, found in (next(both), next(both))]
        assert got == [("orders", 0), ("orders", 1)]
        former = topic.reader(group="f")
        assert next(former).offset == 0
        with topic.reader(group="f"), pytest.raises(xl.ReaderFencedError):
            next(former)
        assert next(both)[1].offset == 2
        with pytest.raises(StopIteration):
            next(both)


def test_the_length_of_a_topic_is_its_number_of_messages(topic) -> None:
    assert (len(topic), bool(topic)) == (0, True)
    fill(topic, 7)
    assert (len(topic), bool(topic)) == (7, True)
    topic.trim(before=5)
    assert len(topic) == len(list(topic.reader())) == 2
    topic.trim(before=7)
    assert (len(topic), bool(topic)) == (0, True)


def test_g5_a_time_in_an_empty_topic_is_its_end(topic) -> None:
    assert topic.reader(moment(0)).position == 0
    assert topic.reader(moment(10**12), inclusive=False).position == 0


def test_g5_seeking_goes_anywhere(topic) -> None:
    """A model walks a list; the reader, over entries of every size, does as it does."""
    dice = random.Random(5)
    sent: list[bytes] = []
    with topic.producer(max_batch_messages=7) as producer:
        while len(sent) < 300:
            batch = [b"%d" % (len(sent) + i) for i in range(dice.choice([1, 2, 7, 30]))]
            producer.send_many(batch)
            sent += batch
    reader, at = topic.reader(), 0
    for _ in range(1000):
        step = dice.randrange(6)
        if step == 0:
            at = dice.randrange(len(sent) + 1)
            reader.seek(at)
        elif step == 1:
            at = dice.choice([0, len(sent)])
            reader.seek("latest" if at else "earliest")
        elif step == 2:
            many = dice.randrange(1, 40)
            assert [m.value for m in reader.read_batch(many)] == sent[at : at + many]
            at = min(at + many, len(sent))
        elif step == 3 and at < len(sent):
            assert reader.read_next(0).value == sent[at]
            at += 1
        elif step == 4:
            for message in reader:
                assert message.value == sent[at]
                at += 1
                if dice.random() < 0.2:
                    break
        assert reader.position == at
        assert reader.has_message_available() == (at < len(sent))


# ---- G5: is there more? ------------------------------------------------------------------


def test_g5_has_message_available_is_exact(engine, topic) -> None:
    reader = topic.reader()
    latest = topic.reader("latest")
    far = topic.reader(2)

    def available() -> tuple[bool, bool, bool]:
        return tuple(r.has_message_available() for r in (reader, latest, far))

    assert available() == (False, False, False)
    producer = topic.producer("exclusive")  # an owner alone is no message
    assert available() == (False, False, False)
    producer.send_async(b"0", sequence_id=3)
    producer.flush()
    assert available() == (True, True, False)
    with pytest.raises(xl.DuplicateSequenceError):  # nor is one that was refused
        producer.send(b"again", sequence_id=3)
    reader.read_next(0)
    assert available() == (False, True, False)
    producer.send(None)  # a tombstone is
    producer.send(b"")
    assert available() == (True, True, True)
    assert len(reader.read_batch(1)) == 1
    assert available() == (True, True, True)  # read ahead, but not handed out yet
    reader.read_batch(10)
    assert available() == (False, True, True)
    reader.seek(2)
    assert reader.has_message_available()
    reader.seek(2, inclusive=False)
    assert not reader.has_message_available()
    with engine.topic("other").producer() as other:  # nor is another topic's
        other.send(b"x")
    assert not reader.has_message_available()
    producer.close()
    engine.delete_topic("orders")
    again = engine.topic("orders")
    assert not again.reader().has_message_available()


def test_g5_has_message_available_within_an_entry(topic) -> None:
    fill(topic, 8)
    for start in range(10):
        reader = topic.reader(start)
        assert reader.has_message_available() == (start < 8)
        assert len(list(reader)) == max(0, 8 - start)
        assert not reader.has_message_available()


def test_g5_has_message_available_knows_of_other_processes(worker, topic) -> None:
    other = worker()
    other.call(open_producer, "shared")
    reader = topic.reader()
    for _ in range(20):
        assert not reader.has_message_available()
        other.call(send, b"x")
        assert reader.has_message_available()
        reader.read_next(0)


def send_small(producer: xl.Producer) -> None:
    producer.send_async(b"x")
    producer.flush()


def send_large(producer: xl.Producer) -> None:
    producer.send(bytes(1 << 18))


def stop_before_the_flush(monkeypatch, engine, stop) -> None:
    """A commit stops when its frame is in the journal."""
    monkeypatch.setattr(appending, "append_together", lambda _, appenders: appenders)
    go_on = appending._flush_and_settle
    monkeypatch.setattr(appending, "_flush_and_settle", lambda *args: (stop(), go_on(*args)))


def stop_before_the_commit(monkeypatch, engine, stop) -> None:
    """A commit stops when its entry is in the tables."""
    begin = engine.ledger.write_checkpointed
    monkeypatch.setattr(engine.ledger, "write_checkpointed", lambda: Stopped(begin(), stop))


@pytest.mark.parametrize(
    ("send_one", "stop_it"),
    [(send_small, stop_before_the_flush), (send_large, stop_before_the_commit)],
    ids=["journal", "tables"],
)
def test_g5_a_message_on_its_way_is_not_available(path, monkeypatch, send_one, stop_it) -> None:
    """A commit is stopped between its last write and its durability: neither this process nor
    its readers know of the message until the commit has ended."""
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        topic = engine.topic("orders")
        reader = topic.reader()
        producer = topic.producer(linger=60)
        written, go_on = threading.Event(), threading.Event()
        stop_it(monkeypatch, engine, lambda: (written.set(), go_on.wait(PATIENCE)))
        thread = threading.Thread(target=send_one, args=(producer,))
        thread.start()
        try:
            assert written.wait(PATIENCE)
            assert not reader.has_message_available()
            assert rest(reader) == []
            assert topic.next_offset == 0
            assert rest(topic.reader()) == []
        finally:
            go_on.set()
            thread.join(PATIENCE)
        assert reader.has_message_available()
        assert topic.next_offset == 1
        assert len(rest(reader)) == 1


class Stopped:
    """A write transaction that waits, at its end, for the test."""

    def __init__(self, transaction: Any, stop: Callable[[], Any]) -> None:
        self.transaction, self.stop = transaction, stop

    def __enter__(self) -> Any:
        return self.transaction.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.stop()
        return self.transaction.__exit__(*error)


# ---- G5: waiting at the end --------------------------------------------------------------


@pytest.fixture
def no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sleeps reads again only after a wake-up, or at its timeout."""
    monkeypatch.setattr(lockfile, "READER_LOOK_UP_SECONDS", 10 * PATIENCE)


def timed_out(call: Callable[[], Any]) -> float:
    before = time.monotonic()
    with pytest.raises(xl.WaitTimeoutError) as caught:
        call()
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.retriable
    return time.monotonic() - before


@pytest.mark.sampled
@pytest.mark.parametrize(("timeout", "least"), [(0, 0), (0.0, 0), (0.2, 0.2), (1.3, 1.3)])
def test_g5_read_next_waits_as_long_as_it_is_told(topic, timeout, least, no_look_up) -> None:
    fill(topic, 1)
    reader = topic.reader("latest")
    assert least <= timed_out(lambda: reader.read_next(timeout)) < PATIENCE
    assert reader.position == 1
    fill(topic, 1)
    assert reader.read_next(timeout).offset == 1


@pytest.mark.parametrize("timeout", ["soon", [], b"1", -1])
def test_g5_a_wrong_timeout_is_refused_by_name(topic, timeout) -> None:
    reader = topic.reader()
    with pytest.raises((TypeError, ValueError), match="timeout"):
        reader.read_next(timeout)
    with pytest.raises((TypeError, ValueError), match="timeout"):
        next(reader.follow(timeout))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1", None])
def test_g5_a_wrong_number_of_messages_is_refused_by_name(topic, wrong) -> None:
    with pytest.raises((TypeError, ValueError), match="max_messages"):
        topic.reader().read_batch(wrong)


def test_g5_a_blocked_reader_is_woken_by_another_process(worker, topic, no_look_up) -> None:
    """The reader waits here, the writer is another process: no message waits for a look-up
    that comes by now and then, the first one least of all."""
    other = worker()
    other.call(open_producer, "shared")
    reader = topic.reader()
    for number in range(10):
        timer = threading.Timer(0.05, other.call, [send, b"%d" % number])
        timer.start()
        assert reader.read_next(PATIENCE).value == b"%d" % number
        timer.join(PATIENCE)


def echo(state: State, rounds: int) -> None:
    """Answer every message of "orders" with one in "answers"."""
    lockfile.READER_LOOK_UP_SECONDS = 10 * PATIENCE
    producer = state.engine.topic("answers").producer()
    reader = state.topic.reader()
    for _ in range(rounds):
        producer.send(reader.read_next(PATIENCE).value)
    producer.close()


def test_g5_no_wake_up_is_lost_between_processes(worker, engine, topic, no_look_up) -> None:
    """Two processes play ping-pong: each message is the only thing that can wake the other."""
    rounds = 200
    answers = engine.topic("answers")
    other = worker()
    other.start(echo, rounds)
    reader = answers.reader()
    with topic.producer() as producer:
        for number in range(rounds):
            producer.send(b"%d" % number)
            assert reader.read_next(PATIENCE).value == b"%d" % number
            if number % 50 == 0:
                time.sleep(0.01)  # long enough to fall asleep
    other.answer()


def test_g5_every_blocked_reader_is_woken(topic) -> None:
    readers = [topic.reader() for _ in range(16)]
    seen: list[bytes] = []
    threads = [
        threading.Thread(target=lambda r=r: seen.append(r.read_next(PATIENCE).value))
        for r in readers
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    fill(topic, 1)
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == [b"0"] * 16


def test_g5_a_reader_waits_while_a_writer_dies(worker, topic) -> None:
    reader = topic.reader()
    other = worker()
    other.call(open_producer, "exclusive")
    other.call(send, b"0")
    assert reader.read_next(PATIENCE).value == b"0"
    timer = threading.Timer(0.1, other.kill)
    timer.start()
    timed_out(lambda: reader.read_next(0.4))
    timer.join(PATIENCE)
    fill(topic, 1)
    assert reader.read_next(PATIENCE).offset == 1


def wait_and_measure(state: State, seconds: float) -> tuple[float, int]:
    """(CPU seconds, context switches) of this whole process while a reader waits."""
    reader = state.topic.reader("latest")
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(xl.WaitTimeoutError):
        reader.read_next(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, after.ru_nvcsw - before.ru_nvcsw


@pytest.mark.long
def test_g5_waiting_costs_nothing(worker) -> None:
    """A reader that polled every millisecond would switch 2000 times in these two seconds."""
    cpu, switches = worker().call(wait_and_measure, 2.0)
    assert cpu < 0.05
    assert switches < 40


@pytest.mark.long
def test_g5_a_hundred_waiting_readers_cost_next_to_nothing(worker) -> None:
    cpu, most_looks, seconds = worker().call(hundred_readers)
    assert cpu < 0.2
    # Each polls once a second: a writer may have died before it could wake a reader.
    assert most_looks <= seconds + 2


def hundred_readers(state: State) -> tuple[float, int, float]:
    """(CPU seconds, most looks of one of them, for so long)."""
    readers = [state.engine.topic(f"t{i}").reader() for i in range(100)]
    looks = Counter()
    for reader in readers:
        count_looks(reader, looks)
    threads = [
        threading.Thread(target=timed_out, args=(lambda r=r: r.read_next(2.5),)) for r in readers
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(looks) == len(readers))  # a busy machine begins the last threads late
    time.sleep(0.5)
    looks.clear()
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    most_looks, seconds = max(looks.values(), default=0), time.monotonic() - began
    for thread in threads:
        thread.join(PATIENCE)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, most_looks, seconds


def count_looks(reader: xl.Reader, looks: Counter[xl.Reader]) -> None:
    refill = reader.cursor.refill

    def counted() -> list:
        looks[reader] += 1
        return refill()

    reader.cursor.refill = counted


# ---- G5: iterating, following, closing ---------------------------------------------------


def test_g5_an_iteration_ends_at_the_end_as_it_was(topic) -> None:
    fill(topic, 5)
    reader = topic.reader()
    seen = []
    with topic.producer() as producer:
        for message in reader:
            seen.append(message.offset)
            producer.send(b"more")
    assert seen == [0, 1, 2, 3, 4]
    assert offsets(reader) == [5, 6, 7, 8, 9]
    assert offsets(reader) == []


def test_g5_following_goes_on_at_the_end(topic, no_look_up) -> None:
    sent = fill(topic, 3)
    reader = topic.reader()
    followed = reader.follow(timeout=PATIENCE)
    assert [next(followed).value for _ in range(3)] == sent
    timer = threading.Timer(0.1, fill, [topic, 2])
    timer.start()
    assert [next(followed).offset for _ in range(2)] == [3, 4]
    timer.join(PATIENCE)
    assert list(reader.follow(timeout=0)) == []
    before = time.monotonic()
    assert list(reader.follow(timeout=0.2)) == []
    assert 0.2 <= time.monotonic() - before < PATIENCE


def blocked(reader: xl.Reader, seen: list[Any]) -> threading.Thread:
    """A thread that waits in `read_next`; what it ended with is added to `seen`."""

    def run() -> None:
        try:
            seen.append(reader.read_next(2 * PATIENCE))
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    return thread


def test_g5_closing_wakes_a_blocked_reader(topic, no_look_up) -> None:
    for _ in range(5):
        reader, seen = topic.reader(), []
        thread = blocked(reader, seen)
        reader.close()
        thread.join(PATIENCE)
        assert [type(error) for error in seen] == [xl.EngineClosedError]


def test_g5_closing_the_engine_wakes_its_blocked_readers(path, no_look_up) -> None:
    engine = xl.open(path)
    seen: list[Any] = []
    threads = [blocked(engine.topic(f"t{i}").reader(), seen) for i in range(3)]
    engine.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert [type(error) for error in seen] == [xl.EngineClosedError] * 3


def read_on(topic: xl.Topic, seen: list[Any]) -> None:
    """Read without a pause; what it ended with is added to `seen`."""
    try:
        while True:
            list(topic.reader())
            topic.next_offset
    except BaseException as error:
        seen.append(error)


@pytest.mark.long
def test_g5_closing_the_engine_ends_every_reader_that_is_busy(path) -> None:
    """Threads read without a pause while the engine is closed under them: each ends, at once,
    with EngineClosedError and nothing else, wherever it was."""
    for _ in range(25):
        engine = xl.open(path)
        topic = engine.topic("t")
        fill(topic, 1, batch=1)
        seen: list[Any] = []

        threads = [
            threading.Thread(target=read_on, args=(topic, seen), daemon=True) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        engine.close()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert [type(error) for error in seen] == [xl.EngineClosedError] * 4


def test_g5_a_closed_reader_reads_no_more(topic) -> None:
    fill(topic, 5)
    reader = topic.reader()
    reader.read_batch(2)
    with reader:
        pass
    reader.close()
    calls = [
        reader.has_message_available,
        lambda: reader.read_next(0),
        lambda: reader.read_batch(1),
        lambda: list(reader),
        lambda: reader.seek(0),
        lambda: next(reader.follow(0)),
    ]
    for call in calls:
        with pytest.raises(xl.EngineClosedError):
            call()


def test_g5_a_reader_of_a_deleted_topic_says_so(engine, topic) -> None:
    fill(topic, 3)
    reader, seen = topic.reader("latest"), []
    thread = blocked(reader, seen)
    engine.delete_topic("orders")
    thread.join(PATIENCE)
    assert [type(error) for error in seen] == [xl.TopicNotFoundError]
    for call in (lambda: list(reader), lambda: reader.seek(0), lambda: reader.read_batch(1)):
        with pytest.raises(xl.TopicNotFoundError):
            call()


def test_g5_a_read_only_engine_reads_and_is_woken(path, topic) -> None:
    """In a process of its own, because one process has a ledger open in one way."""
    source = """
        import sys
        import exclusivelog as xl
        from exclusivelog.local.shm import lockfile
        from testing.patience import PATIENCE
        lockfile.READER_LOOK_UP_SECONDS = 1e6
        with xl.open(sys.argv[1], readonly=True) as engine:
            reader = engine.topic("orders").reader()
            print([m.value for m in reader], flush=True)
            print(reader.read_next(PATIENCE).value, flush=True)
    """
    fill(topic, 2)
    with child(source, path) as process:
        assert line(process) == "[b'0', b'1']"
        time.sleep(0.1)
        fill(topic, 1)
        assert line(process) == "b'0'"


# ---- G6: only what is durable ------------------------------------------------------------

SENDS_ONE = """
    import sys, time
    import exclusivelog as xl
    with xl.open(sys.argv[1], durability="power") as engine:
        producer = engine.topic("orders").producer()
        print("ready", flush=True)
        input()
        print(time.monotonic(), flush=True)
        producer.send(b"x")
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_g6_nothing_is_seen_before_it_is_flushed(path, tmp_path) -> None:
    """Every flush of the writer is held up for half a second. All that its commit writes is in
    the files long before, yet the reader in this process, which flushes nothing itself, sees the
    message only afterwards."""
    with xl.open(path, durability="power") as engine, child(SENDS_ONE, path) as process:
        engine.ledger.checkpoint = engine.ledger.flush = lambda *_: None
        reader = engine.topic("orders").reader()
        line(process)
        hold_up = "inject=fdatasync,fsync,msync:delay_enter=500000"
        with traced(process.pid, hold_up, tmp_path / "trace"):
            tell(process)
            sent = float(line(process))
            assert reader.read_next(PATIENCE).value == b"x"
            assert time.monotonic() - sent >= 0.5


class traced:  # noqa: N801  reads as what it does
    """The process and its threads under strace, while the block runs."""

    def __init__(self, pid: int, injection: str, output: Any) -> None:
        self.command = ["strace", "-f", "-p", str(pid), "-o", str(output), "-e", injection]

    def __enter__(self) -> None:
        import subprocess

        self.strace = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        assert "attached" in self.strace.stderr.readline()

    def __exit__(self, *error: object) -> None:
        self.strace.terminate()
        self.strace.wait(PATIENCE)
        self.strace.stderr.close()


def test_g5_a_reader_used_by_a_signal_handler_while_it_reads_does_not_crash(path: str) -> None:
    """One thread at a time, says the reader; a handler that breaks it must not end the process."""
    source = """
        import sys
        import exclusivelog as xl

        def use_it_inside(reader):
            cursor, inside = reader.cursor, []
            refill = cursor.refill

            def used():
                entries = refill()
                if entries and not inside:
                    inside.append(True)
                    for _ in zip(range(150), reader):
                        pass
                    inside.clear()
                return entries

            cursor.refill = used

        with xl.open(sys.argv[1]) as engine:
            topic = engine.topic("t")
            with topic.producer() as producer:
                for _ in range(50):
                    producer.send_many([b"x"] * 100)
            reader = topic.reader()
            use_it_inside(reader)
            for _ in range(20):
                for _ in zip(range(400), reader):
                    pass
                reader.seek(0)
        print("fine")
    """
    assert finish(source, path).strip() == "fine"


class Watched:
    """A transaction: `look` is called when it is committed, before any process is notified."""

    def __init__(self, txn: Any, look: Callable[[], None]) -> None:
        self._txn, self._look = txn, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def commit(self) -> None:
        self._txn.commit()
        self._look()


def test_g5_what_the_tables_have_is_read_before_the_notification(
    engine, topic, monkeypatch
) -> None:
    """A checkpoint has moved an unflushed message into the tables, where it is durable, and has
    not said yet that it did. Who knows that there is a message gets it."""
    found: list[Any] = []
    settle, begin = appending._flush_and_settle, engine.ledger._environment.begin_write

    def look() -> None:
        found.append(reader.has_message_available())
        found.append(rest(reader))

    def checkpoint_first(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine.ledger._environment, "begin_write", lambda: Watched(begin(), look))
            checkpoint(engine)
        settle(*args)

    with (
        no_checkpoints(engine),  # others: on a busy machine, one is due by then
        topic.producer("exclusive") as producer,
        topic.reader() as reader,
    ):
        producer.send(b"0")
        checkpoint(engine)
        producer.send(b"1")
        assert rest(reader) == [b"0", b"1"]
        assert rest(reader) == []  # from here on it looks into the journal alone
        monkeypatch.setattr(appending, "append_together", lambda _, appenders: appenders)
        monkeypatch.setattr(appending, "_flush_and_settle", checkpoint_first)
        producer.send_async(b"2").result()
    assert found == [True, [b"2"]]


@pytest.mark.parametrize(
    ("call", "place"),
    [("read_batch", "refill"), ("read_arrow", "refill"), ("read_arrow", "record_batch")],
)
def test_g5_what_a_call_has_taken_that_fails_is_read_again(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, call: str, place: str
) -> None:
    """Ctrl-C interrupts a read when half of it is done, or memory for the result is missing. The
    caller has received nothing, so the next read and a commit of the group's position must not
    skip these messages."""
    pytest.importorskip("pyarrow")
    with topic.producer() as producer:
        for _ in range(4):
            producer.send_many([bytes(100_000)] * 10)
    reader = topic.reader()
    assert reader.read_next().offset == 0
    where: Any = reader.cursor if place == "refill" else reader_module
    real, calls = getattr(where, place), []

    def strike(*arguments: Any) -> Any:
        calls.append(place)
        if len(calls) == 2 or place != "refill":
            raise KeyboardInterrupt if place == "refill" else MemoryError
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(where, place, strike)
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            getattr(reader, call)(1 << 26)
    assert reader.position == 1
    assert [message.offset for message in reader] == list(range(1, 40))
