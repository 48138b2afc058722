"""The commit of a queue: the messages of many producers go into the journal in one call (rules B2,
B9), each as if it had been appended alone."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import threading
import time

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.log import appending
from testing.children import child, line
from testing.journals import no_checkpoints, small_journal
from testing.processes import PATIENCE, values

MANY = 40
DIVIDES = 112  # bytes of a value whose frame has 256 bytes: the ring holds a whole number of them


def open_all(engine: xl.Engine, count: int = MANY, **options) -> list[xl.Producer]:
    """Producers on as many topics, which commit when they are asked to."""
    return [
        engine.topic(f"t{i}").producer("exclusive", name="p", linger=60, **options)
        for i in range(count)
    ]


def outcomes(receipts: list[_core.Receipt]) -> list[int | BaseException]:
    """The offset of each, or its error."""
    return [receipt.exception(PATIENCE) or receipt.result(0) for receipt in receipts]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of appenders that each call of the compiled core has left to others."""
    left: list[int] = []
    together = _core.append_together

    def append_together(appenders: list[_core.Appender]):
        rest, outcome = together(appenders)
        left.append(len(rest))
        return rest, outcome

    monkeypatch.setattr(appending._core, "append_together", append_together)
    return left


def test_b9_what_many_producers_have_queued_is_committed_at_once(engine, calls) -> None:
    producers = open_all(engine)
    placed = engine.ledger.journal.placed
    for number in range(3):
        receipts = [p.send_async(b"%d" % number, key=p.topic) for p in producers]
        producers[0].flush()
        assert outcomes(receipts) == [number] * MANY
    # The first call finds that no session was looked up yet.
    assert calls == [MANY, 0, 0, 0]
    assert engine.ledger.journal.placed == placed + 3 * MANY
    for producer in producers:
        found = list(engine.topic(producer.topic).reader())
        assert [(m.offset, m.value, m.key, m.sequence_id) for m in found] == [
            (i, b"%d" % i, producer.topic.encode(), i) for i in range(3)
        ]


def test_b9_batches_of_one_producer_stay_in_order(engine) -> None:
    """Several batches of each producer wait, and other messages come in front and behind."""
    producers = open_all(engine, 5, max_batch_messages=2)
    sent = [b"%d" % i for i in range(7)]
    receipts = [[p.send_async(value) for value in sent] for p in producers]
    producers[0].flush()
    for producer, waiting in zip(producers, receipts, strict=True):
        assert outcomes(waiting) == list(range(7))
        assert producer.send(b"direct") == 7
        assert values(engine.topic(producer.topic)) == [*sent, b"direct"]


def test_b2_b3_a_fenced_producer_in_the_queue_is_refused_and_the_others_are_not(path) -> None:
    """The check of each message is in the critical section that writes it: also in a run."""
    with xl.open(path) as engine, xl.open(path, name="other") as other:
        producers = open_all(engine)
        before = [p.send_async(b"before") for p in producers]
        producers[0].flush()
        assert outcomes(before) == [0] * MANY
        receipts = [p.send_async(b"after") for p in producers]
        successors = {
            i: other.topic(f"t{i}").producer("exclusive_with_fencing") for i in (0, 7, MANY - 1)
        }
        producers[1].flush()
        for i, told in enumerate(outcomes(receipts)):
            found = [(m.epoch, m.value) for m in engine.topic(f"t{i}").reader()]
            if i in successors:
                assert isinstance(told, xl.ProducerFencedError)
                assert successors[i].send(b"mine") == 1
                assert found == [(1, b"before")]
            else:
                assert told == 1
                assert found == [(1, b"before"), (1, b"after")]
        assert engine.verify().problems == ()


def test_b2_a_fenced_producer_is_refused_between_two_runs(engine, path, monkeypatch) -> None:
    """A successor comes between the look-up of the queue and its placing."""
    producers = open_all(engine, 3)
    with xl.open(path, name="other") as other:
        look_up_all = appending.look_up_all

        def overtaken(*args):
            look_up_all(*args)
            monkeypatch.setattr(appending, "look_up_all", look_up_all)
            other.topic("t1").producer("exclusive_with_fencing")

        monkeypatch.setattr(appending, "look_up_all", overtaken)
        receipts = [p.send_async(b"x") for p in producers]
        producers[0].flush()
        first, second, third = outcomes(receipts)
        assert (first, third) == (0, 0)
        assert isinstance(second, xl.ProducerFencedError)
        assert engine.topic("t1").next_offset == 0


class LookedUpWhenRead:
    """A time of a message: while it is encoded, another thread reads who may write."""

    def __init__(self, engine: xl.Engine, appender: _core.Appender) -> None:
        self.engine, self.appender = engine, appender

    def __int__(self) -> int:
        appending.look_up(self.engine.ledger, self.appender)
        return 1


def test_b9_no_batch_overtakes_one_that_was_refused(path) -> None:
    """The session is looked up between the first batch of a producer and the second one: the check
    of the first one is out of date then, that of the second one is not."""
    with xl.open(path) as engine:
        [producer] = open_all(engine, 1, max_batch_messages=1)
        producer.send(b"0")
        engine.topic("t0").producer_async("wait_for_exclusive")
        appender = producer._sender.appender
        assert appender.stale
        receipts = [
            appender.add(b"1", later=True),
            appender.add(b"2", event_time=LookedUpWhenRead(engine, appender), later=True),
        ]
        producer.flush()
        assert outcomes(receipts) == [1, 2]
        assert values(engine.topic("t0")) == [b"0", b"1", b"2"]


def test_b9_a_run_that_was_not_written_leaves_no_gap(path) -> None:
    """The disk has no room for the journal's next frames, and then it has."""
    with xl.open(path, durability="power") as engine:  # which writes; `process` stores in memory
        producers = open_all(engine, 3)
        for producer in producers:
            producer.send(b"0")
        receipts = [p.send_async(b"lost") for p in producers]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_core.JOURNAL_HEADER_BYTES, hard))
        try:
            with pytest.raises(xl.LedgerFullError):
                producers[0].flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [type(outcome) for outcome in outcomes(receipts)] == [xl.LedgerFullError] * 3
        receipts = [p.send_async(b"1") for p in producers]
        producers[0].flush()
        assert outcomes(receipts) == [1] * 3
        assert [values(engine.topic(p.topic)) for p in producers] == [[b"0", b"1"]] * 3
        assert engine.verify().problems == ()


def test_b9_shared_producers_of_two_engines_leave_no_gap(path) -> None:
    """Both append to the same topics: each run follows what the other one has written."""
    with xl.open(path) as engine, xl.open(path, name="other") as other:
        sides = [
            [e.topic(f"t{i % 3}").producer(linger=0.001) for i in range(9)] for e in (engine, other)
        ]
        receipts: list[list[_core.Receipt]] = [[], []]

        def send(side: int) -> None:
            for number in range(300):
                receipts[side] += [p.send_async(b"%d" % number) for p in sides[side]]

        threads = [threading.Thread(target=send, args=(side,)) for side in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        told = outcomes(receipts[0] + receipts[1])
        assert all(isinstance(offset, int) for offset in told)
        for i in range(3):
            assert engine.topic(f"t{i}").next_offset == 1800
        assert engine.verify().problems == ()


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("size", [DIVIDES, 100])
def test_b9_runs_go_around_the_end_of_the_journal(path, durability, size) -> None:
    """Frames fill the ring exactly, or leave room at its end; a full journal has its checkpoint."""
    with small_journal(), xl.open(path, durability=durability) as engine:
        producers = open_all(engine, 10)
        assert len(values(engine.topic("t0"))) == 0
        sent = [i.to_bytes(size, "big") for i in range(700)]
        for part in range(0, 700, 70):
            receipts = [p.send_async(v) for v in sent[part : part + 70] for p in producers]
            producers[0].flush()
            assert outcomes(receipts) == [part + i for i in range(70) for _ in producers]
        file = os.stat(os.path.join(path, "journal")).st_size
        assert file == engine.ledger.journal.capacity + _core.JOURNAL_HEADER_BYTES
        for producer in producers:
            assert values(engine.topic(producer.topic)) == sent
        assert engine.verify().problems == ()
    with xl.open(path) as engine:
        assert values(engine.topic("t9")) == sent


@pytest.mark.long
def test_b9_many_at_once_wait_for_checkpoints(path) -> None:
    """One queue is larger than the journal."""
    with small_journal(), xl.open(path) as engine:
        producers = open_all(engine, 700)
        receipts = [p.send_async(bytes(1500)) for p in producers]
        producers[0].flush()
        assert outcomes(receipts) == [0] * 700
        assert engine.verify().messages == 700


def test_b9_a_journal_that_takes_no_more_answers_everybody(engine) -> None:
    with no_checkpoints(engine):
        producers = open_all(engine, 5)
        receipts = [p.send_async(b"x") for p in producers]
        producers[0].flush()
        assert outcomes(receipts) == [0] * 5
        receipts = [p.send_async(b"y") for p in producers]
        engine.ledger.journal.leave(errno.EIO)
        with pytest.raises(xl.LedgerError):
            producers[0].flush()
        told = outcomes(receipts)
        assert all(isinstance(error, xl.LedgerError) for error in told)


@pytest.mark.parametrize("after", [False, True])
def test_b9_an_interrupt_beside_the_call_costs_no_call_its_outcome(
    engine, monkeypatch, after
) -> None:
    together, struck = _core.append_together, []

    def strike(appenders):
        if struck:
            return together(appenders)
        struck.append(True)
        if after:
            together(appenders)
        raise KeyboardInterrupt

    producers = open_all(engine, 5)
    for producer in producers:
        producer.send(b"first")
    monkeypatch.setattr(appending._core, "append_together", strike)
    receipts = [p.send_async(b"x") for p in producers]
    producers[0].flush()
    assert outcomes(receipts) == [1] * 5
    assert [engine.topic(p.topic).next_offset for p in producers] == [2] * 5


SENDER = """
    import itertools, sys
    import exclusivelog as xl

    engine = xl.open(sys.argv[1], durability=sys.argv[2])
    producers = [
        engine.topic(f"t{i}").producer("exclusive_with_fencing", name="p") for i in range(50)
    ]
    print("ready", flush=True)
    for number in itertools.count():
        receipts = [p.send_async(b"%d" % number) for p in producers]
        for receipt in receipts:
            if receipt.result() != number:
                print("wrong", flush=True)
        print(number, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("durability", ["power", "process"])
def test_b9_a_death_in_the_middle_of_a_queue_costs_nothing_acknowledged(path, durability) -> None:
    """A process that sends to many topics is killed, again and again. Every acknowledged message is
    in the log, and no topic has a gap."""
    rng = random.Random(4)
    for _ in range(4):
        with xl.open(path) as engine:
            for name in engine.topics():
                engine.delete_topic(name)
        with child(SENDER, path, durability) as sender:
            assert line(sender) == "ready"
            time.sleep(rng.uniform(0.05, 0.4))
            os.kill(sender.pid, signal.SIGKILL)
            said = sender.stdout.read().split("\n")[:-1]
        assert "wrong" not in said
        acknowledged = int(said[-1]) + 1 if said else 0
        with xl.open(path) as engine:
            for i in range(50):
                found = values(engine.topic(f"t{i}"))
                assert found == [b"%d" % n for n in range(len(found))]
                assert len(found) in (acknowledged, acknowledged + 1)
            assert engine.verify().problems == ()


SENT_WHILE_OTHERS_ARE_ENCODED = """
    import sys, threading, time
    import exclusivelog as xl
    from testing.patience import PATIENCE

    sys.setswitchinterval(2e-5)
    engine = xl.open(sys.argv[1])
    options = {"linger": 0.002, "max_batch_bytes": 131072, "max_pending_bytes": 4 << 20}
    orders = engine.topic("orders").producer(**options)
    other = engine.topic("other").producer(linger=0.002)
    sent, end = [], time.monotonic() + 1.5

    def send(thread):
        number = 0
        while time.monotonic() < end:
            value = (b"%d-%d-" % (thread, number)).ljust(1024, b"x")
            sent.append((value, orders.send_async(value)))
            number += 1

    def send_many():
        while time.monotonic() < end:
            orders.send_many([b"large".ljust(1000)] * 300)

    def send_to_another():
        while time.monotonic() < end:
            other.send_async(b"x")
            time.sleep(0.0005)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    threads += [threading.Thread(target=each) for each in (send_many, send_to_another)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent = [(value, receipt.result(PATIENCE)) for value, receipt in sent]
    found = list(engine.topic("orders").reader().values())
    print(sum(found[offset] != value for value, offset in sent))
    engine.close()
"""


@pytest.mark.long
def test_b9_what_is_sent_while_a_queue_is_encoded_has_a_place_of_its_own(path) -> None:
    """Encoding a large batch gives other threads their turn: what they send is acknowledged when
    it is in the log, and neither lost nor written over the memory of the commit."""
    with child(SENT_WHILE_OTHERS_ARE_ENCODED, path) as process:
        assert line(process) == "0"


def test_b9_an_entry_that_is_too_large_leaves_room_for_those_before_it(engine, topic) -> None:
    """Its bytes fit into a frame, encoded they do not: the frames of a run keep their room."""
    largest = _core.Appender(b"p", -1, 10_000, 1 << 20, None)
    size = 130_000
    while True:
        largest.add(b"x" * (size + 1))
        if not largest.take()[-1].small:
            break
        size += 1
    first = topic.producer(name="p", linger=60)
    second = engine.topic("second").producer(name="p", linger=60)
    for number in range(10):
        receipts = [first.send_async(b"y" * size), second.send_async(b"z" * 131_072)]
        second.flush()
        assert outcomes(receipts) == [number, number]
    assert all(value == b"y" * size for value in topic.reader().values())


def test_b9_a_commit_that_fails_as_a_whole_is_made_batch_by_batch(
    engine, topic, monkeypatch
) -> None:
    def fail(appenders: list[_core.Appender]) -> None:
        raise MemoryError

    monkeypatch.setattr(appending._core, "append_together", fail)
    producer = topic.producer(linger=60)
    receipt = producer.send_async(b"x")
    producer.flush()
    assert receipt.result(PATIENCE) == 0
