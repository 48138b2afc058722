"""A transaction that changes owners fences the topics that it concerns, and no others: whoever is
paused inside it holds up nobody else's sends, and whoever dies inside it leaves no topic closed
(rules B2, C1, K3)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog._core import Outcome
from exclusivelog.local.ownership.notifications import Notifications
from exclusivelog.local.storage import ledger as ledgers
from exclusivelog.local.storage.tables import CursorTable
from testing.journals import no_checkpoints
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, State, Worker, until, values, within

pytestmark = pytest.mark.rule("K3", "B2")

EVENTS, SUBJECT_WORDS = "__events__", 4096


# ---- being stopped in a change of owners -----------------------------------------------------


class StopsInCommit:
    """A transaction of LMDB that stops its process right before or right behind its commit."""

    def __init__(self, txn: Any, behind: bool, once: Callable[[], object]) -> None:
        self.txn, self.behind, self.once, self.stops = txn, behind, once, False

    def commit(self) -> None:
        if self.behind:
            self.txn.commit()
        if self.stops:
            self.once()
            os.kill(os.getpid(), signal.SIGSTOP)
        if not self.behind:
            self.txn.commit()

    def abort(self) -> None:
        self.txn.abort()


def stop_in_the_next_change(state: State, behind: bool) -> None:
    """Of owners. No checkpoint and no read has anything to do with it."""
    environment = state.engine.ledger._environment
    begin, usual = environment.begin_write, ledgers.Transaction.opened

    def opened(section: ledgers.Transaction, txn: Any) -> Any:
        if isinstance(txn, StopsInCommit):
            txn.stops = section.fencing
            txn = txn.txn
        return usual(section, txn)

    def flushing(section: ledgers.FlushingTransaction, txn: Any) -> Any:
        if isinstance(txn, StopsInCommit):
            txn.stops = section.fencing
            txn = txn.txn
        return flushed(section, txn)

    flushed = ledgers.FlushingTransaction.opened
    ledgers.Transaction.opened = opened  # type: ignore[method-assign]
    ledgers.FlushingTransaction.opened = flushing  # type: ignore[method-assign]

    def once() -> None:
        environment.begin_write = begin

    environment.begin_write = lambda: StopsInCommit(begin(), behind, once)


def take(state: State, mode: str, behind: bool) -> int:
    """Take the topic, and be stopped on the way; the epoch."""
    stop_in_the_next_change(state, behind)
    state.producer = state.topic.producer(mode)
    return int(state.producer.topic_epoch)


def claim(state: State, behind: bool) -> dict[str, int]:
    """The same with a claim."""
    stop_in_the_next_change(state, behind)
    state.kept["claim"] = state.engine.own({"a": None})
    return dict(state.kept["claim"].generations)


@contextlib.contextmanager
def nobody_tells_the_owner(engine: xl.Engine) -> Iterator[None]:
    """Its engine reads no notifications: behind the commit, it could learn of the grant from one
    before it sends. A look at them that has begun before is over when the thread comes to the next
    one."""
    came = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Notifications, "read", lambda notifications: came.set())
        engine.backend.worker.wake()
        assert came.wait(PATIENCE)
        yield


places = pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])


# ---- other topics ----------------------------------------------------------------------------


def calls_of_others(engine: xl.Engine) -> list[Callable[[], object]]:
    alone, shared = engine.topic("alone").producer(EXCLUSIVE), engine.topic("shared").producer()
    alone.send(b"first"), shared.send(b"first")
    with engine.topic("read").producer() as source:
        source.send_many([b"1", b"2", b"3"])
    reader = engine.topic("read").reader(group="readers")

    def position() -> None:
        reader.read_next(timeout=0)
        reader.commit()

    def transaction() -> None:
        with engine.transaction() as begun:
            reader.read_next(timeout=0)
            alone.send(b"in a transaction", transaction=begun)
            shared.send(b"in a transaction", transaction=begun)
            begun.commit_cursor(reader)

    position()
    return [
        lambda: alone.send(b"alone"),
        lambda: shared.send(b"shared"),
        lambda: alone.send_async(b"queued").result(PATIENCE),
        lambda: shared.send_many([b"many"] * 3),
        transaction,
        position,
    ]


@places
@pytest.mark.parametrize("mode", [EXCLUSIVE, FENCING])
def test_k3_sends_to_other_topics_go_on_beside_one_that_is_stopped_in_a_grant(
    engine: xl.Engine, worker: Callable[..., Worker], mode: str, behind: bool
) -> None:
    process, calls = worker(name="stopped"), calls_of_others(engine)
    owner = engine.topic("orders").producer(EXCLUSIVE)
    if mode == EXCLUSIVE:
        owner.close()
    with no_checkpoints(engine), nobody_tells_the_owner(engine):  # a checkpoint would wait
        process.start(take, mode, behind)
        process.await_stop()
        receipt = owner.send_async(b"waits") if mode == FENCING else None
        for call in calls:
            within(call)
        assert receipt is None or not receipt.done()
    process.signal(signal.SIGCONT)
    assert process.answer() == 2
    if receipt is not None:
        with pytest.raises(xl.ProducerFencedError):
            receipt.result(PATIENCE)
    assert len(engine.topic("alone")) == 4
    assert len(engine.topic("shared")) == 6


# ---- the topic itself ------------------------------------------------------------------------


@places
def test_b2_nobody_appends_to_a_topic_while_its_owner_changes(
    engine: xl.Engine, worker: Callable[..., Worker], behind: bool
) -> None:
    """Once the process that changes it has died, the owner goes on, or is fenced: as the tables
    say. It need not be asked for that."""
    owner = engine.topic("orders").producer(EXCLUSIVE)
    assert owner.send(b"0") == 0
    process = worker(name="stopped")
    with nobody_tells_the_owner(engine):
        process.start(take, FENCING, behind)
        process.await_stop()
        assert owner._sender.appender.send(b"lost") == -Outcome.STALE
        receipt = owner.send_async(b"1")
    process.kill()
    if behind:
        with pytest.raises(xl.ProducerFencedError):
            receipt.result(PATIENCE)
        with engine.topic("orders").producer(FENCING) as successor:
            assert (successor.send(b"1"), successor.topic_epoch) == (1, 3)
    else:
        assert receipt.result(PATIENCE) == 1
    assert values(engine.topic("orders")) == [b"0", b"1"]
    assert engine.verify().ok


@places
def test_f5_no_transaction_relies_on_a_claim_while_that_changes(
    engine: xl.Engine, worker: Callable[..., Worker], behind: bool
) -> None:
    ours, producer = engine.own({"a": None}), engine.topic("orders").producer()

    def send() -> range:
        with engine.transaction() as begun:
            begun.require(ours)
            producer.send(b"by the holder", transaction=begun)
        return begun.offsets[producer]

    assert send() == range(1)
    process = worker(name="stopped")
    process.start(claim, behind)
    process.await_stop()
    process.kill()
    if behind:
        with pytest.raises(xl.OwnershipLostError):
            send()
    else:
        assert send() == range(1, 2)


def read(state: State) -> None:
    stop_in_the_next_change(state, behind=True)
    state.kept["reader"] = state.topic.reader(group="readers")


@pytest.mark.rule("F6")
def test_f6_no_position_is_stored_by_a_reader_whose_successor_has_died_behind_its_commit(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It has seen before that it has its claim, and does not look again unless that has changed."""
    with topic.producer() as producer:
        producer.send_many([b"1", b"2"])
    reader = topic.reader(group="readers")
    reader.read_next(timeout=0)
    reader.commit()
    process = worker(name="stopped")
    process.start(read)
    process.await_stop()
    process.kill()
    with pytest.raises(xl.ReaderFencedError):
        reader.commit()


def test_b2_a_successor_continues_behind_what_was_sent_while_it_was_granted(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    """Also of its own name: others send to other topics meanwhile, and the tables lack it all."""
    with no_checkpoints(engine):
        for epoch in range(1, 6):
            owner = engine.topic("orders").producer(FENCING, name="p")
            assert owner.last_sequence_id == 10 * (epoch - 1) - 1
            assert [owner.send(b"x") for _ in range(10)] == list(
                range(10 * (epoch - 1), 10 * epoch)
            )
            engine.topic("other").producer().send(b"y")


def test_b2_a_hundred_topics_are_fenced_at_once(engine: xl.Engine) -> None:
    """Of so many, all appends wait."""
    names = [f"t{number}" for number in range(100)]
    before = engine.producers(names, FENCING)
    assert [producer.send(b"1") for producer in before] == [0] * 100
    after = engine.producers(names, FENCING)
    for producer in before:
        with pytest.raises(xl.ProducerFencedError):
            producer.send(b"2")
    assert [producer.send(b"2") for producer in after] == [1] * 100


def be_stopped_in_an_append(state: State) -> None:
    journal = state.engine.ledger.journal
    assert journal is not None
    journal.lock()
    os.kill(os.getpid(), signal.SIGSTOP)
    journal.unlock()


def own(state: State) -> None:
    state.kept["claim"] = state.engine.own({"b": None})


def check(state: State) -> None:
    state.kept["claim"].check()


@pytest.mark.rule("F2", "F5")
def test_f2_a_claim_that_was_not_committed_is_no_claim_to_give_up(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    """Its number goes to the next claim, of a process that has waited for this one's end."""
    stopped, other = worker(name="stopped"), worker(name="other")
    journal = engine.ledger.journal
    assert journal is not None
    stopped.start(be_stopped_in_an_append)
    stopped.await_stop()
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(lambda: engine.own({"a": None}, timeout=0.1))
        until(lambda: journal.inside[1])
        other.start(own)
        with pytest.raises(xl.WaitTimeoutError):
            claim.result(PATIENCE)
    stopped.signal(signal.SIGCONT)
    stopped.answer()
    other.answer()
    until(lambda: not engine.backend.worker._given_up)
    other.call(check)


@places
def test_k3_the_topic_that_shares_its_word_with_the_events_is_not_fenced(
    engine: xl.Engine, worker: Callable[..., Worker], behind: bool
) -> None:
    """Each change of owners writes an event; nobody appends to that topic."""
    engine.topic("first").producer(EXCLUSIVE).close()
    events = engine.topic(EVENTS).id
    with engine.ledger.write_concurrent() as tables:
        names = (f"t{number}" for number in itertools.count())
        alike = next(
            name for name in names if tables.topics.create(name).id == events + SUBJECT_WORDS
        )
    producer = engine.topic(alike).producer()
    producer.send(b"0")
    process = worker(name="stopped")
    with no_checkpoints(engine):
        process.start(take, EXCLUSIVE, behind)
        process.await_stop()
        assert within(lambda: producer.send(b"1")) == 1
    process.signal(signal.SIGCONT)
    assert process.answer() == 1


@pytest.mark.rule("F6")
def test_f6_nobody_stores_a_position_while_those_of_its_group_are_deleted(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all topics, whichever they are: the append mutex is held until the commit."""
    with topic.producer() as producer:
        producer.send_many([b"1", b"2"])
    with topic.reader(group="readers") as reader:
        reader.read_next(timeout=0)
        reader.commit()
    journal, delete, held = engine.ledger.journal, CursorTable.delete, list[int]()
    assert journal is not None

    def deleting(table: CursorTable, group: str) -> int:
        held.append(journal.inside[0])
        return delete(table, group)

    monkeypatch.setattr(CursorTable, "delete", deleting)
    assert engine.delete_group("readers") == 1
    assert held == [threading.get_native_id()]
    with topic.reader(group="readers") as reader:
        assert reader.position == 0


# ---- recovery --------------------------------------------------------------------------------


def send_to_another(state: State, count: int) -> int:
    if state.producer is None:
        state.producer = state.engine.topic("other").producer()
    for _ in range(count):
        last = state.producer.send(b"x")
    return last


@pytest.mark.rule("B10", "D8")
@places
def test_b10_what_was_sent_beside_a_grant_is_recovered(
    path: str, worker: Callable[..., Worker], tmp_path: Path, behind: bool
) -> None:
    """From the journal alone, without the memory that processes share: a frame is void if it is
    older than the last change of an owner before it."""
    granting, sending = worker(name="granting"), worker(name="sending")
    sending.call(send_to_another, 10)
    granting.start(take, EXCLUSIVE, behind)
    granting.await_stop()
    assert sending.call(send_to_another, 10) == 19
    granting.signal(signal.SIGCONT)
    assert granting.answer() == 1
    for process in (granting, sending):
        process.kill()
    shutil.copytree(path, tmp_path / "copy", ignore=shutil.ignore_patterns("owners.lock"))
    with xl.open(tmp_path / "copy") as engine:
        assert len(engine.topic("other")) == 20
        assert engine.verify().ok


@places
def test_c1_what_a_dead_process_has_fenced_is_open_to_who_comes_later(
    path: str, worker: Callable[..., Worker], behind: bool
) -> None:
    """Nobody else had the ledger open."""
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"0")
    process = worker(name="stopped")
    process.start(take, EXCLUSIVE, behind)
    process.await_stop()
    process.kill()
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        assert producer.topic_epoch == 1 + behind
        assert within(lambda: producer.send(b"1")) == 1
