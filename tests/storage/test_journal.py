"""What the journal must not do to those who share it (rules B10, D8, G6, H1)."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.log import appending
from exclusivelog.local.log.appending import repair
from testing.disks import needs_strace
from testing.journals import frames, no_checkpoints
from testing.processes import PATIENCE, Failed, State, open_producer, send, until, values, within
from testing.strace import attached


def append_unflushed(state: State) -> int:
    """What is in the journal when its sender dies before the flush."""
    appender = state.producer._sender.appender
    batch = appender.make_batch(_core.strings([b"unflushed"]), None, None, None)
    while (outcome := appender.place(batch)) != _core.Outcome.PLACED:
        repair(state.engine.ledger, appender, outcome)
    return batch.base_offset


def test_d8_a_successor_sees_what_its_predecessor_died_over(path, worker) -> None:
    """The owner has appended, and dies before the flush. Readers do not see the message, since
    a power cut could still take it. The next owner does: else it would write it once more."""
    owner = worker(durability="power")
    assert owner.call(open_producer, "exclusive") == 1
    assert owner.call(send, b"flushed") == 0
    with xl.open(path, durability="power") as engine, no_checkpoints(engine):
        topic = engine.topic("orders")
        waiting = topic.producer_async("wait_for_exclusive")
        assert owner.call(append_unflushed) == 1
        assert values(topic) == [b"flushed"]
        owner.kill()
        with waiting.result(PATIENCE) as successor:
            assert values(topic) == [b"flushed", b"unflushed"]
            assert successor.send(b"next") == 2
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == [b"flushed", b"unflushed", b"next"]


def test_h1_what_a_power_cut_has_cut_off_stays_off(path, tmp_path) -> None:
    """A power cut has taken a frame that was not flushed, and left those behind it. What is sent
    next goes where it was, in the same size: those behind must not count again, though opening
    commits nothing."""
    with xl.open(path, durability="process") as engine, no_checkpoints(engine):
        with engine.topic("orders").producer(name="p") as producer:
            producer.send_many([b"a"])
            producer.send_many([b"b"])
            producer.send_many([b"c"])
        first = frames(engine)[0]
        cut = _as_after_a_power_cut(path, tmp_path / "cut")
    with open(cut / "journal", "r+b") as journal:
        journal.seek(first.at)
        journal.write(bytes(first.entry_at - first.at + len(first.entry)))
    for _ in range(2):
        with xl.open(cut) as engine:
            assert values(engine.topic("orders")) == []
    with xl.open(cut) as engine, no_checkpoints(engine):
        with engine.topic("orders").producer(name="p") as producer:
            assert producer.send_many([b"x"]) == range(1)
        assert frames(engine)[0].at == first.at
        again = _as_after_a_power_cut(cut, tmp_path / "again")
    with xl.open(again) as engine:
        assert values(engine.topic("orders")) == [b"x"]


def _as_after_a_power_cut(path: str | Path, copy: Path) -> Path:
    shutil.copytree(path, copy)
    for name in ("owners.lock", "lock.mdb"):
        (copy / name).unlink()
    return copy


def test_h3_opening_what_needs_no_recovery_commits_nothing(path) -> None:
    """A commit is a flush; who only looks for a moment, as a command does, need not wait for it."""
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"x")
    counts = []
    for _ in range(3):
        with xl.open(path) as engine:
            counts.append(engine.stats()["transactions"])
    assert len(set(counts)) == 1
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        assert producer.send(b"y") == 1
        assert engine.stats()["transactions"] > counts[0]


@pytest.mark.long
def test_h1_who_lives_flushes_what_the_dead_have_left(path, worker) -> None:
    """In `process` durability a message is flushed a moment later, by its sender. It dies at
    once; the others are idle. It is not for them to be lost in the next power cut."""
    with xl.open(path, durability="power") as engine:
        reader = engine.topic("orders").reader()
        sender = worker(durability="process")
        sender.call(open_producer, "shared")
        sender.call(send_and_die_later, b"acknowledged")
        sender.kill()
        message = reader.read_next(timeout=PATIENCE)
        assert message is not None
        assert message.value == b"acknowledged"
        assert engine.ledger.journal.synced == engine.ledger.journal.tail


def send_and_die_later(state: State, value: bytes) -> None:
    """Send, and make no checkpoint any more."""
    state.engine.ledger.checkpoint = lambda: time.sleep(PATIENCE)
    state.producer.send(value)


def test_g6_a_reader_sees_no_message_before_its_flush(path) -> None:
    with (
        xl.open(path, durability="power") as careful,
        xl.open(path, durability="process") as quick,
        no_checkpoints(careful),
    ):
        with quick.topic("t").producer() as producer:
            assert producer.send(b"x") == 0
            assert values(quick.topic("t")) == [b"x"]
            assert values(careful.topic("t")) == []
            assert not careful.topic("t").reader().has_message_available()
            with careful.topic("other").producer() as other:
                other.send(b"flushed")  # and all before it
            assert values(careful.topic("t")) == [b"x"]


@pytest.mark.long
def test_g6_what_is_not_flushed_is_there_after_a_checkpoint(path, worker) -> None:
    """A reader in another process, opened with `power`, waits for what is sent in `process`."""
    quick = worker(durability="process", topic="t")
    with xl.open(path, durability="power") as engine:
        reader = engine.topic("t").reader()
        quick.call(open_producer, "shared")
        quick.call(send, b"x")
        assert reader.read_next(PATIENCE).value == b"x"


@needs_strace
def test_h1_no_thread_waits_for_a_flush_whose_leader_is_stopped(path, worker) -> None:
    """A process is held up in its flush, for longer than all else takes: those who would have
    shared it make one of their own."""
    slow = worker(durability="power", topic="slow")
    slow.call(open_producer, "shared")
    delay = f"inject=fdatasync:delay_exit={round(PATIENCE * 1e6)}"
    journal = str(Path(path) / "journal")
    strace = attached(slow.pid, "-o", os.devnull, "-P", journal, "-e", delay)
    try:
        with xl.open(path, durability="power") as engine:
            producer = engine.topic("quick").producer()
            slow.start(send, b"slow")
            time.sleep(0.3)
            for number in range(20):
                assert producer.send(b"quick") == number
            producer.close()
            assert not slow.answered()
    finally:
        strace.kill()
        strace.communicate(timeout=PATIENCE)


class DiesCommitted:
    """A transaction whose process is killed as soon as its commit has returned."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def commit(self) -> None:
        self._txn.commit()
        os.kill(os.getpid(), signal.SIGKILL)


def die_when_owner(state: State) -> None:
    ledger = state.engine.ledger
    ledger.checkpointer.start = lambda: None  # a checkpoint would be the first to commit
    begin = ledger._environment.begin_write
    ledger._environment.begin_write = lambda: DiesCommitted(begin())
    state.topic.producer("exclusive_with_fencing")


def test_b2_a_take_over_counts_though_its_process_died_before_it_could_tell(path, worker) -> None:
    """A rival's take-over is in the tables. It is killed in the critical section, between its
    commit and the change of the version by which the others would notice. The old owner must
    notice all the same: not one more message of it gets in, and the topic is not stuck."""
    rival = worker()
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        owner = topic.producer("exclusive")
        assert owner.send(b"old") == 0
        rival.start(die_when_owner)
        rival.process.join(PATIENCE)
        assert rival.process.exitcode == -signal.SIGKILL
        assert topic.epoch == 2
        with pytest.raises(xl.ProducerFencedError):
            within(lambda: owner.send(b"too late"), PATIENCE)
        with topic.producer("exclusive") as successor:
            assert successor.topic_epoch == 3
            assert successor.send(b"new") == 1
        assert [(m.epoch, m.value) for m in topic.reader()] == [(1, b"old"), (3, b"new")]
        assert engine.verify().ok


def test_h2_a_failed_flush_stops_every_process_and_a_fresh_open_goes_on(path, worker) -> None:
    """Nothing may pretend to be durable, wherever. Who opens the ledger again recovers it; those
    that knew of the failure stay stopped, and stop no others."""
    stopped = worker()
    assert stopped.call(open_producer, "shared") == 0
    assert stopped.call(send, b"acknowledged") == 0
    with xl.open(path) as engine:
        engine.ledger.integrity.fail(xl.LedgerIOError("the flush failed"))
        with pytest.raises(Failed, match="LedgerIOError"):
            stopped.call(send, b"refused")
        fresh = worker()
        assert fresh.call(open_producer, "shared") == 0
        assert fresh.call(send, b"fresh") == 1
        with pytest.raises(Failed, match="LedgerIOError"):
            stopped.call(send, b"refused again")
        with pytest.raises(xl.LedgerIOError):
            engine.topics()
        assert fresh.call(send, b"still") == 2
    with xl.open(path) as engine:
        assert values(engine.topic("orders")) == [b"acknowledged", b"fresh", b"still"]
        assert engine.verify().ok


# ---- found by attack ---------------------------------------------------------------------


def test_b9_facts_of_yesterday_are_not_learned(path, monkeypatch) -> None:
    """A thread has looked up what its message follows, and is held up. Meanwhile a large batch
    goes straight into the tables, and another producer has learned of it. What the first thread
    knows must not come over that: the next small message would get an offset a second time."""
    with xl.open(path) as engine:
        topic = engine.topic("t")
        quick, held = topic.producer(name="quick"), topic.producer(name="held")
        quick.send(b"0")
        reached, gate = threading.Event(), [threading.Event(), threading.Event()]
        check = appending.check_may_write

        def check_then_wait(*args: object) -> None:
            check(*args)
            if threading.current_thread().name == "held" and gate:
                reached.set()
                assert gate.pop(0).wait(PATIENCE)

        monkeypatch.setattr(appending, "check_may_write", check_then_wait)
        first, second = gate
        thread = threading.Thread(target=lambda: held.send(b"held"), name="held")
        thread.start()
        assert reached.wait(PATIENCE)
        assert quick.send_many([bytes(60_000)] * 3) == range(1, 4)
        with pytest.raises(xl.DuplicateSequenceError):
            quick.send(b"again", sequence_id=0)  # learns where the topic ends
        reached.clear()
        first.set()
        assert reached.wait(PATIENCE)
        assert quick.send(b"after") == 4
        second.set()
        thread.join(PATIENCE)
        assert engine.verify().messages == 6
        assert engine.verify().ok


def fill_ring(producer: xl.Producer, journal: _core.Journal, up_to: int) -> None:
    while up_to - journal.tail > 70_000:
        producer.send(bytes(60_000))
    producer.send(bytes(up_to - journal.tail - 700))
    while up_to - journal.tail > 450:
        producer.send(b"x")


def test_h2_a_refused_append_costs_no_process_what_he_has_not_seen_yet(path, worker) -> None:
    """There is no room for the second half of a batch. Its first half has been written over frames
    that are in the tables by now, and that another process has yet to catch up with."""
    other = worker(durability="process", topic="t")
    other.call(open_producer, "shared")
    assert other.call(send, b"0") == 0
    with xl.open(path, durability="power") as engine:
        topic, journal = engine.topic("t"), engine.ledger.journal
        with (
            topic.producer() as producer,
            engine.topic("u").producer(max_batch_messages=1) as filling,
        ):
            filling.send(b"x")
            producer.send_many([])
            assert other.call(send, b"1") == 1
            seen = journal.tail
            assert producer.send(b"2") == 2
            fill_ring(filling, journal, seen + journal.capacity)
            engine.ledger.checkpoint()
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            limit = _core.JOURNAL_HEADER_BYTES + seen % journal.capacity + 2500
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(xl.LedgerFullError):
                    filling.send_many([bytes(2000), bytes(5000)])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert other.call(send, b"3") == 3
            engine.ledger.checkpoint()
            assert engine.verify().ok
            assert values(topic) == [b"0", b"1", b"2", b"3"]


def test_a_large_batch_is_not_kept_waiting_by_small_ones(path) -> None:
    """Threads send one message after the other by the producer that has a large batch to send."""
    with xl.open(path, durability="process") as engine, engine.topic("t").producer() as producer:
        ended = threading.Event()

        def send_on() -> None:
            while not ended.is_set():
                producer.send(b"x")

        threads = [threading.Thread(target=send_on) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            before = time.monotonic()
            for _ in range(5):
                producer.send_many([bytes(70_000)] * 3)
            assert time.monotonic() - before < PATIENCE
        finally:
            ended.set()
            for thread in threads:
                thread.join(PATIENCE)
        assert engine.verify().ok


@pytest.mark.long
def test_h1_another_process_makes_the_checkpoint_of_a_dead_process(path, worker) -> None:
    """It found the journal empty, and so it was its turn. It dies; another one goes on sending,
    and what it sends is in the tables, safe from a power cut, a second or two later."""
    first, second = (worker(durability="process", topic="t") for _ in range(2))
    for process in (first, second):
        process.call(open_producer, "shared")
    with xl.open(path) as engine:
        engine.ledger.checkpoint()
        first.call(send, b"0")
        first.kill()
        second.call(send, b"1")
        until(lambda: engine.ledger.journal.backlog == 0)
        assert values(engine.topic("t")) == [b"0", b"1"]
