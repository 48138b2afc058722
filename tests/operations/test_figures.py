"""What the processes of a ledger count together, seen from any of them; and what a process that is
killed leaves behind."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.shm import lockfile
from exclusivelog.local.storage.figures import COUNTS, TIMES
from testing.processes import PATIENCE, State, Worker, open_producer, until

pytestmark = pytest.mark.once


def send_many_times(state: State, count: int) -> None:
    assert state.producer is not None
    for number in range(count):
        state.producer.send(b"%d" % number)


# ---- the ledger's figures ----------------------------------------------------------------


def test_messages_of_every_path_are_counted_once(engine: xl.Engine, topic: xl.Topic) -> None:
    """One by one, queued, as a batch, too large for the journal, and in a transaction."""
    with topic.producer() as producer, engine.topic("other").producer() as other:
        for _ in range(10):
            producer.send(b"one")
        for _ in range(20):
            producer.send_async(b"queued")
        producer.flush()
        producer.send_many([b"batch"] * 30)
        producer.send(b"x" * 200_000)
        with engine.transaction() as txn:
            producer.send(b"t", transaction=txn)
            other.send(b"t", transaction=txn)
        assert engine.stats().appended_messages == 63
        assert topic.next_offset == 62
        assert engine.stats().appended_bytes > 200_000 + 60


def test_what_was_not_appended_is_not_counted(topic: xl.Topic) -> None:
    producer = topic.producer("exclusive")
    producer.send(b"x")
    topic.producer("exclusive_with_fencing")
    with pytest.raises(xl.ProducerFencedError):
        producer.send(b"y")
    with pytest.raises(xl.ExclusiveLogError), topic.engine.transaction() as txn:
        producer.send(b"z", transaction=txn)
    assert topic.engine.stats().appended_messages == 1


def test_any_process_sees_what_all_have_appended(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    processes = [worker(name=f"w{n}") for n in range(2)]
    for process in processes:
        process.call(open_producer, "shared")
    for process in processes:
        process.start(send_many_times, 200)
    for process in processes:
        process.answer()
    assert engine.stats().appended_messages == 400
    with xl.open(engine.path, readonly=True) as reader:
        assert reader.stats().appended_messages == 400


def test_a_killed_process_takes_nothing_away(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It may be killed between its append and the count: at most that one message is missing."""
    for _ in range(3):
        process = worker(name="doomed")
        process.call(open_producer, "shared")
        process.start(send_many_times, 1_000_000)
        end = topic.next_offset
        until(lambda end=end: topic.next_offset > end + 50)
        process.signal(signal.SIGKILL)
        until(lambda: [each.name for each in engine.engines()] == ["test"])
    until(lambda: topic.holders == [])
    engine.ledger.flush()  # what a dead process has not flushed is not visible before
    assert topic.next_offset - 3 <= engine.stats().appended_messages <= topic.next_offset


def test_a_new_life_counts_from_0(path: str) -> None:
    for _ in range(2):
        with xl.open(path) as engine:
            assert engine.stats().appended_messages == 0
            assert engine.stats().promotion_seconds.count == 0
            topic = engine.topic("orders")
            owner = topic.producer("exclusive")
            owner.send(b"x")
            waiting = topic.producer_async("wait_for_exclusive")
            owner.close()
            waiting.result(PATIENCE).close()
            until(lambda engine=engine: engine.stats().promotion_seconds.count == 1)
            assert engine.stats().appended_messages == 1


def test_flushes_and_what_they_made_durable(path: str) -> None:
    with xl.open(path, durability="power") as engine:
        with engine.topic("orders").producer() as producer:
            for _ in range(20):
                producer.send(b"x")
            producer.send_many([b"y"] * 100)
        stats = engine.stats()
    assert 0 < stats.flush_seconds.count <= 21 + 5  # the last: of transactions
    assert stats.flushed_messages.count == stats.flush_seconds.count
    assert stats.flushed_messages.sum == 120
    assert stats.durable_seconds.count == 21
    assert 0 < stats.flush_seconds.sum <= stats.durable_seconds.sum < 60


def test_process_durability_flushes_nothing_for_a_send(path: str) -> None:
    with xl.open(path, durability="process") as engine:
        with engine.topic("orders").producer() as producer:
            for _ in range(600):
                producer.send(b"x")
        stats = engine.stats()
    assert stats.durable_seconds.count == 0
    assert 2 <= stats.append_seconds.count <= 4  # one in 256
    assert stats.append_seconds.quantile(0.5) < 1


def test_a_commit_of_many_producers_is_counted(engine: xl.Engine) -> None:
    topics = [engine.topic(f"t{n}") for n in range(30)]
    producers = [topic.producer(linger=0.01) for topic in topics]
    receipts = [p.send_async(b"x") for p in producers for _ in range(10)]
    for receipt in receipts:
        receipt.result(PATIENCE)
    assert engine.stats().appended_messages == 300
    assert [producer.stats().messages for producer in producers] == [10] * 30


def test_the_time_to_wake_a_reader_is_measured(topic: xl.Topic) -> None:
    reader = topic.reader(start="latest")
    rounds = 0
    with topic.producer() as producer, ThreadPoolExecutor(1) as pool:

        def has_slept() -> bool:
            nonlocal rounds
            found = pool.submit(reader.read_next, PATIENCE)
            time.sleep(0.05)  # mostly long enough for it to sleep
            producer.send(b"x")
            assert found.result(PATIENCE).value == b"x"
            rounds += 1
            return rounds >= 5 and topic.engine.stats().wake_up_seconds.count > 0

        until(has_slept)
    stats = topic.engine.stats()
    wakes = stats.wake_up_seconds
    checkpoints = stats.checkpoint_seconds.count + 1  # wake readers, too; one may not be over
    assert 1 <= wakes.count <= rounds + checkpoints
    assert 0 < wakes.sum < 10
    assert wakes.quantile(1.0) < 10


def test_a_reader_that_slept_in_vain_is_not_measured(topic: xl.Topic) -> None:
    with pytest.raises(xl.WaitTimeoutError):
        topic.reader(start="latest").read_next(0.1)
    assert topic.engine.stats().wake_up_seconds.count == 0


def test_an_announcement_that_no_reader_met_is_not_measured_later() -> None:
    """It was announced to a reader that was killed: the next one must not count from there."""
    words = _core.SharedWords(bytearray(64))
    words.add(4, 1)  # a dead reader's count
    words.announce(0)
    time.sleep(0.2)
    seen, begun = words.load(0), time.monotonic_ns()

    def announce() -> None:
        until(lambda: words.load(4) == 2)  # the other one sleeps
        words.announce(0)

    thread = threading.Thread(target=announce)
    thread.start()
    took = words.sleep(0, seen, int(PATIENCE * 1e9))
    assert 0 <= took < time.monotonic_ns() - begun
    thread.join(PATIENCE)
    assert words.load(4) == 1


def test_a_promotion_is_measured_in_the_process_that_was_promoted(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    owner = topic.producer("exclusive")
    process = worker(name="heir")
    process.start(open_producer, "wait_for_exclusive")
    until(lambda: topic.waiters)
    assert topic.engine.stats().waiters == 1
    owner.close()
    process.answer()
    until(lambda: topic.engine.stats().promotion_seconds.count == 1)
    assert 0 < topic.engine.stats().promotion_seconds.sum < 10
    assert topic.engine.stats().waiters == 0


def test_requests_for_locks_and_roles_wait_too(engine: xl.Engine, topic: xl.Topic) -> None:
    with engine.lock("job"), engine.role("billing", topics=["invoices"]):
        waiting = [engine.role_async("job"), engine.role_async("billing", topics=["invoices"])]
        until(lambda: sum(len(info.waiters) for info in engine.roles()) == 2)
        assert engine.stats().waiters == 2 + len(engine.topic("invoices").waiters)
        for future in waiting:
            future.cancel()
        until(lambda: engine.stats().waiters == 0)


@pytest.mark.usual_journal
def test_checkpoints_are_counted(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        producer.send(b"x" * 10_000)
        topic.engine.ledger.checkpoint()
    stats = topic.engine.stats()
    assert stats.checkpoint_seconds.count >= 1
    assert stats.checkpoint_bytes > 10_000
    assert stats.journal_bytes == 0
    assert stats.journal_capacity > 1 << 20


def test_queues_groups_and_sizes(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(linger=10 * PATIENCE) as producer:
        producer.send_many([b"x"] * 5)
        reader = topic.reader(group="billing")
        reader.read_next(PATIENCE)
        reader.commit()
        producer.send_async(b"later")
        stats = engine.stats()
        assert (stats.pending_messages, stats.topics, stats.engines) == (1, 1, 1)
        assert stats.pending_bytes >= 5
        assert [(each.group, each.topic, each.lag) for each in stats.groups] == [
            ("billing", "orders", 4)
        ]
        assert stats.disk_bytes > stats.used_bytes > 0
        assert producer.stats().pending_messages == 1
        told = topic.stats(storage=False)
        assert (told.messages, told.holders, told.waiters, told.entries) == (5, 1, 0, 0)
        assert [each.group for each in told.groups] == ["billing"]


# ---- one producer's ----------------------------------------------------------------------


def test_a_producer_knows_what_it_has_sent(topic: xl.Topic) -> None:
    with topic.producer(name="p") as producer:
        producer.send(b"a")
        producer.send_many([b"b"] * 3)
        producer.send_async(b"c").result(PATIENCE)
        stats = producer.stats()
    assert (stats.topic, stats.name, stats.epoch) == ("orders", "p", 0)
    assert (stats.messages, stats.pending_messages, stats.last_sequence_id) == (5, 0, 4)


# ---- the types ---------------------------------------------------------------------------


def test_figures_are_frozen_and_still_read_like_a_mapping(engine: xl.Engine) -> None:
    stats = engine.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.topics = 7  # type: ignore[misc]
    assert stats["topics"] == stats.topics == dict(stats)["topics"]
    assert {**stats}.keys() == set(stats) == {each.name for each in dataclasses.fields(stats)}
    with pytest.raises(KeyError):
        stats["nonsense"]
    with pytest.raises(KeyError):
        stats["keys"]


def test_so_do_those_of_a_topic_and_of_a_producer(topic: xl.Topic) -> None:
    with topic.producer() as producer:
        for stats in (topic.stats(), producer.stats()):
            assert dict(stats).keys() == {each.name for each in dataclasses.fields(stats)}
            assert all(stats[name] == getattr(stats, name) for name in dict(stats))


@pytest.mark.parametrize("ns", [0, 1, 255, 256, 257, 1000, 2**20 - 1, 2**20, 2**36, 2**62])
def test_a_value_is_below_its_bound_and_not_below_the_one_before(ns: int) -> None:
    figures = _core.Figures(_core.SharedWords(bytearray(_core.FIGURES_SIZE)), 0)
    figures.note_wake(ns)
    counts, total = figures.read()["wake"]
    [bucket] = [i for i, count in enumerate(counts) if count]
    assert (total, len(TIMES)) == (ns, len(counts))
    assert ns * 1e-9 < TIMES[bucket] * (1 + 1e-12)
    assert bucket == 0 or ns * 1e-9 >= TIMES[bucket - 1] * (1 - 1e-12)


def test_bounds_double() -> None:
    for bounds in (TIMES, COUNTS):
        assert bounds[-1] == math.inf
        assert all(after == 2 * before for before, after in itertools.pairwise(bounds[:-1]))


def test_quantiles_are_upper_bounds() -> None:
    histogram = xl.Histogram((1.0, 2.0, 4.0, math.inf), (0, 90, 9, 1), 150.0)
    found = [histogram.quantile(s) for s in (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)]
    assert found == [2.0, 2.0, 2.0, 4.0, 4.0, math.inf]
    assert (histogram.count, histogram.mean) == (100, 1.5)
    assert (xl.Histogram().quantile(0.5), xl.Histogram().mean) == (0.0, 0.0)


def test_the_figures_have_room_between_the_journal_and_the_counters() -> None:
    assert lockfile.FIGURES + _core.FIGURES_SIZE <= lockfile.TOPICS
    assert lockfile.JOURNAL_OFFSET + 320 <= lockfile.FIGURES


def test_many_processes_count_without_losing_any() -> None:
    """The histograms are added to without a lock."""
    words = _core.SharedWords(bytearray(_core.FIGURES_SIZE))
    figures = _core.Figures(words, 0)

    def note() -> None:
        for ns in range(20_000):
            figures.note_wake(ns)

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    counts, total = figures.read()["wake"]
    assert (sum(counts), total) == (80_000, 4 * sum(range(20_000)))
