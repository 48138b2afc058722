"""Messages: what one holds, how they are counted, and that a batch is all or nothing
(rules G1 to G4)."""

from __future__ import annotations

import random
import time

import pytest

import exclusivelog as xl
from exclusivelog import serde
from exclusivelog.producer import Options
from testing.children import child, line
from testing.journals import published_last_at, wall_ms
from testing.processes import PATIENCE, open_producer, send
from tests.conformance.test_messages import Untouched, duplicate, numbers

# ---- G1: what a message holds ------------------------------------------------------------


def test_g1_nothing_is_pickled_unless_it_is_asked_for() -> None:
    assert not hasattr(serde, "pickle")
    with pytest.raises(ValueError, match="serializer"):
        serde.pick_dumps("pickle")
    with pytest.raises(ValueError, match="deserializer"):
        serde.pick_loads("pickle")


# ---- G1: wrong arguments are refused, by name, and change nothing ------------------------


def test_g1_a_message_that_is_too_large_is_refused_however_it_is_sent(topic, monkeypatch) -> None:
    monkeypatch.setattr("exclusivelog.messages.MAX_MESSAGE_BYTES", 1000)
    monkeypatch.setattr("exclusivelog.producer.SENT_AT_ONCE", 1000)  # it must be less
    with topic.producer() as producer:
        untouched = Untouched(topic, producer)
        for call in (producer.send, producer.send_async, lambda v: producer.send_many([b"x", v])):
            with pytest.raises(ValueError, match="value"):
                call(bytes(1001))
        untouched.check()
        producer.send_many([bytes(1000)])


# ---- G2: sequence ids --------------------------------------------------------------------


def test_g2_a_large_batch_that_came_through_is_not_appended_again(engine, topic) -> None:
    """By a handle that knows nothing of it: the tables can tell, in the very transaction."""
    batch = [bytes(100_000)] * 4
    with topic.producer(name="p") as producer:
        assert producer.send_many(batch, sequence_id=0) == range(4)
        session = engine.backend.open_session(topic.name, producer._session, -1, Options())
        again = xl.Producer(engine.backend, topic.name, session, Options())
        duplicate(lambda: again.send_many(batch, sequence_id=0), 0, 3)
        again.close()
    assert topic.next_offset == 4


def test_g2_a_failed_commit_gives_its_ids_back(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("t")
        with topic.producer(name="a") as producer:
            producer.send(b"0")
            with pytest.raises(xl.LedgerFullError):
                producer.send(bytes(1 << 21), sequence_id=77)
            assert producer.last_sequence_id == 0
            with pytest.raises(xl.LedgerFullError):
                producer.send_many([bytes(1 << 19)] * 5)
            receipt = producer.send_async(bytes(1 << 21))
            assert isinstance(receipt.exception(PATIENCE), xl.LedgerFullError)
            assert producer.last_sequence_id == 0
            assert producer.send(b"1") == 1
        assert numbers(topic) == [0, 1]


# ---- G3: a batch is all or nothing -------------------------------------------------------

BATCH = 400
# A process sends batches, each far larger than one entry and one page, and says which have
# been acknowledged. It is killed at a random moment, in the middle of one if luck has it.
SENDS_BATCHES = """
    import sys
    import exclusivelog as xl
    first, count = int(sys.argv[2]), int(sys.argv[3])
    engine = xl.open(sys.argv[1])
    producer = engine.topic("t").producer("exclusive_with_fencing", max_batch_messages=17)
    for number in range(first, first + 10**6):
        producer.send_many([b"%d %d " % (number, i) + bytes(200) for i in range(count)])
        print(number, flush=True)
"""


@pytest.mark.long
def test_g3_a_batch_is_there_whole_or_not_at_all_after_a_kill(path) -> None:
    dice = random.Random(3)
    acknowledged: set[int] = set()
    for number in range(0, 20_000, 1000):
        with child(SENDS_BATCHES, path, number, BATCH) as process:
            acknowledged.add(int(line(process)))
            time.sleep(dice.random() * 0.02)
            process.kill()
            process.wait(PATIENCE)
            rest = process.stdout.read().splitlines()
            acknowledged |= {int(said) for said in rest if said.isdigit()}
    with xl.open(path) as engine:
        found: dict[int, list[int]] = {}
        for message in engine.topic("t").reader():
            batch, index, _ = message.value.split(b" ")
            found.setdefault(int(batch), []).append(int(index))
        assert engine.verify().ok
    assert acknowledged <= set(found)
    assert {batch for batch, seen in found.items() if seen != list(range(BATCH))} == set()


def test_g3_a_batch_that_does_not_fit_leaves_nothing(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("t")
        with topic.producer(max_batch_messages=1) as producer:
            with pytest.raises(xl.LedgerFullError):
                producer.send_many([bytes(4000)] * 1000)
            assert topic.next_offset == 0
            assert list(topic.reader()) == []
            assert producer.send_many([bytes(4000)] * 10) == range(10)
        assert engine.verify().ok


# ---- G4: publish times -------------------------------------------------------------------


HOUR = 3_600_000  # ms
LARGE = bytes(1 << 18)  # does not go through the journal


def test_g4_a_clock_set_back_does_not_take_publish_times_back(path) -> None:
    """The machine's clock is set back by an hour, between two messages of one producer, and
    stays behind while other producers take over, while the ledger is closed, and wherever a
    message goes. No message is published before its predecessor."""
    with xl.open(path) as engine:
        topic = engine.topic("t")
        with topic.producer() as producer:
            before = wall_ms()
            producer.send(b"a")
            after = wall_ms()
            published_last_at(topic, ahead := after + HOUR)
            producer.send(b"b")
            producer.send_many([b"c", LARGE, b"d"])
            producer.send_async(b"e")
        with topic.producer("exclusive") as producer:
            producer.send(b"f")
            engine.ledger.checkpoint()
            producer.send(b"g")
    with xl.open(path) as engine:
        topic = engine.topic("t")
        with topic.producer() as producer:
            producer.send(LARGE)
            producer.send(b"h")
        first, *times = [m.publish_time for m in topic.reader()]
        assert engine.verify().ok
        engine.ledger.checkpoint()
        assert [m.publish_time for m in topic.reader()] == [first, *times]
    assert before <= first <= after
    assert times == [ahead] * 9


@pytest.mark.long
def test_g4_once_the_clock_has_caught_up_times_go_on(topic) -> None:
    with topic.producer() as producer:
        published_last_at(topic, ahead := wall_ms() + 1000)
        for value in (b"a", b"b", LARGE):
            producer.send(value)
        while wall_ms() <= ahead:
            time.sleep(0.01)
        caught_up = wall_ms()
        for value in (b"c", LARGE, b"d"):
            producer.send(value)
        after = wall_ms()
    times = [m.publish_time for m in topic.reader()]
    assert times[:3] == [ahead] * 3
    assert times == sorted(times)
    assert caught_up <= times[3] <= times[-1] <= after


def test_g4_each_topic_has_a_time_of_its_own(engine) -> None:
    ahead = wall_ms() + HOUR
    published_last_at(engine.topic("a"), ahead)
    for name in "ab":
        with engine.topic(name).producer() as producer:
            producer.send(b"x")
    assert engine.topic("a").reader().read_next(0).publish_time == ahead
    assert engine.topic("b").reader().read_next(0).publish_time < wall_ms() + HOUR // 2


def test_g4_times_never_go_back_among_processes(worker, topic) -> None:
    others = [worker(), worker()]
    for other in others:
        other.call(open_producer, "shared")
    with topic.producer() as producer:
        for number in range(20):
            others[number % 2].call(send, b"x")
            producer.send(b"y")
    times = [m.publish_time for m in topic.reader()]
    assert times == sorted(times)
