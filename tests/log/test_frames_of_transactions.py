"""A transaction is frames of the journal (rule K2): it is checked, written and acknowledged as a
send is, without the writer lock and without a transaction of the tables, and a crash leaves all of
it or nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local import commits
from exclusivelog.local.session import LocalSession
from exclusivelog.local.storage.ledger import Ledger
from testing.journals import MORE, flip, frames, move_away, no_checkpoints, small_journal
from testing.loops import held
from testing.processes import EXCLUSIVE, PATIENCE, State, until, values, within
from testing.stops import stopped

pytestmark = pytest.mark.rule("K2")


@pytest.fixture
def producers(engine: xl.Engine) -> list[xl.Producer]:
    """Producers of three topics, which have sent: nothing is left to be read of their topics."""
    made = [engine.topic(name).producer("exclusive") for name in "abc"]
    for producer in made:
        producer.send(b"0")
    return made


def send_to_all(engine: xl.Engine, producers: list[xl.Producer], value: bytes) -> Any:
    """Commit a message for each."""
    with engine.transaction() as txn:
        for producer in producers:
            producer.send(value, transaction=txn)
    return txn


def found(engine: xl.Engine) -> list[list[bytes]]:
    """The messages of the three topics."""
    return [values(engine.topic(name)) for name in "abc"]


# ---- as a send ---------------------------------------------------------------------------


def test_a_transaction_makes_none_of_the_tables(engine, producers, monkeypatch) -> None:
    claim = engine.own({"r": None})
    with no_checkpoints(engine):
        begun = []
        transaction_of = Ledger._transaction
        monkeypatch.setattr(
            Ledger, "_transaction", lambda *a, **k: begun.append(k) or transaction_of(*a, **k)
        )
        before = engine.ledger.journal.tail
        with engine.transaction() as txn:
            txn.require(claim)
            for producer in producers:
                producer.send(b"1", transaction=txn)
        assert begun == []
        written = frames(engine, before)
        assert [frame.flags & MORE for frame in written] == [MORE, MORE, 0]
    assert found(engine) == [[b"0", b"1"]] * 3


def test_it_waits_for_no_process_that_is_stopped_with_the_writer_lock(
    engine, producers, worker
) -> None:
    """As a send, it goes on beside a process that is paused while it changes the tables."""
    process = worker()
    with stopped(process, "in_a_commit"):
        assert within(lambda: send_to_all(engine, producers, b"1")).state == "committed"
        assert producers[0].send(b"2") == 2
    process.answer()


def test_what_only_requires_writes_nothing(engine, producers) -> None:
    before = engine.ledger.journal.tail
    with engine.transaction() as txn:
        txn.require(engine.own({"r": None}))
        txn.require(producers[0])
    assert txn.state == "committed"
    assert engine.ledger.journal.tail == before


def test_one_that_does_not_fit_goes_into_the_tables(engine, producers) -> None:
    """The limit is of all frames together; both sides of it are in the log as one."""
    for size in (_core.LARGEST_TRANSACTION // 3 - 1000, _core.LARGEST_TRANSACTION // 3):
        before = engine.ledger.journal.tail
        txn = send_to_all(engine, producers, bytes(size))
        assert list(txn.offsets.values()) == [
            range(len(each) - 1, len(each)) for each in found(engine)
        ]
        assert (engine.ledger.journal.tail > before) == (size < _core.LARGEST_TRANSACTION // 3)


def test_it_wraps_around_the_journal(path) -> None:
    """It is written in one piece; a journal that is full makes room first."""
    with small_journal(), xl.open(path) as engine:
        producers = [engine.topic(name).producer("exclusive") for name in "abc"]
        expected = [b"%d " % number * 4000 for number in range(60)]
        for value in expected:
            send_to_all(engine, producers, value)
        assert found(engine) == [expected] * 3
        assert engine.ledger.journal.tail > 3 * engine.ledger.journal.capacity
        assert engine.verify().ok


def test_a_producers_only_message_is_encoded_as_its_sends_are(
    engine, producers, monkeypatch
) -> None:
    """No batch is made for it: that takes longer than the rest of the transaction."""
    monkeypatch.setattr(LocalSession, "private_appender", lambda session: pytest.fail("a batch"))
    with no_checkpoints(engine):
        producers[0].send(b"1", key=b"k", properties={"a": "b"}, event_time=7)
        with engine.transaction() as txn:
            producers[1].send(b"1", key=b"k", properties={"a": "b"}, event_time=7, transaction=txn)
            txn.require(producers[2])
    sent, committed = [list(engine.topic(name).reader())[-1] for name in "ab"]
    assert txn.offsets == {producers[1]: range(1, 2)}
    assert (committed.key, committed.value, committed.properties, committed.event_time) == (
        (sent.key, sent.value, sent.properties, sent.event_time)
    )
    assert committed.sequence_id == sent.sequence_id == producers[1].last_sequence_id == 1


def test_a_message_with_a_number_of_its_own_is_put_into_a_batch(engine, topic) -> None:
    """So is a large one, and one whose number may be that of a message before it."""
    producer = topic.producer(EXCLUSIVE, linger=PATIENCE)
    producer.send(b"0")
    joint = _core.Joint(engine.ledger.journal, False)
    appender = producer._sender.session.appender
    assert not joint.send(appender, (b"1", None, None, None, 7))
    assert not joint.send(appender, (bytes(_core.LARGEST_TRANSACTION), b"k", None, None, None))
    producer.send_async(b"1")
    assert not joint.send(appender, (b"2", None, None, None, None))
    assert joint.nbytes == 0
    producer.flush()
    assert joint.send(appender, (b"2", None, None, None, None))
    assert joint.place() == _core.Outcome.PLACED
    assert values(topic) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("attempts", [0, commits.UNPAUSED_ATTEMPTS])
def test_it_comes_behind_what_its_producers_have_accepted(
    engine, producers, monkeypatch, attempts
) -> None:
    """With the producers paused, and without."""
    monkeypatch.setattr(commits, "UNPAUSED_ATTEMPTS", attempts)
    for number in range(20):
        for producer in producers:
            producer.send_async(b"async %d" % number)
        send_to_all(engine, producers, b"%d" % number)
    expected = [b"0", *(each for n in range(20) for each in (b"async %d" % n, b"%d" % n))]
    assert found(engine) == [expected] * 3


def test_it_gets_its_turn_beside_a_queue_that_is_never_empty(engine, topic, monkeypatch) -> None:
    """Other messages of its producer come in between again and again, until that is paused."""
    producer = topic.producer(EXCLUSIVE, linger=PATIENCE)
    queued, append = [], commits.FramedAttempt._append

    def never_empty(attempt: Any) -> bool:
        if producer._sender.session.ready_for_transaction():
            queued.append(producer.send_async(b"between"))
        return append(attempt)

    monkeypatch.setattr(commits.FramedAttempt, "_append", never_empty)
    with engine.transaction() as txn:
        producer.send(b"t", transaction=txn)
    assert values(topic) == [b"between"] * commits.UNPAUSED_ATTEMPTS + [b"t"]
    assert all(receipt.done() for receipt in queued)


# ---- K4: turns ------------------------------------------------------------------------------


@pytest.fixture
def placed(monkeypatch) -> list[int]:
    """The outcome of each attempt to append a transaction."""
    outcomes: list[int] = []
    place = commits.FramedAttempt.place

    def record(attempt: Any, joint: Any) -> int:
        outcomes.append(place(attempt, joint))
        return outcomes[-1]

    monkeypatch.setattr(commits.FramedAttempt, "place", record)
    return outcomes


def refused_send(producer: xl.Producer) -> None:
    producer.send(b"refused", sequence_id=0, timeout=PATIENCE)


def refused_send_async(producer: xl.Producer) -> None:
    producer.send_async(b"refused", sequence_id=0)


@pytest.mark.rule("K4")
@pytest.mark.parametrize("refused", [refused_send, refused_send_async])
def test_it_does_not_wait_for_a_message_that_was_refused(
    engine, producers, placed, refused
) -> None:
    """Nothing is queued, so that it is placed at once."""
    with pytest.raises(xl.DuplicateSequenceError):
        refused(producers[0])
    assert within(lambda: send_to_all(engine, producers, b"1")).state == "committed"
    assert placed == [_core.Outcome.PLACED]
    assert found(engine) == [[b"0", b"1"]] * 3


@pytest.mark.rule("K4")
def test_it_does_not_wait_for_a_place_that_is_given_up(engine, producers, placed) -> None:
    """A call could not queue its message while another thread sent, and does not come again."""
    appender = producers[0]._sender.session.sending.appender
    # With a used sequence id, so that it queues nothing before the thread sends either.
    message = producers[0]._sender.encode(b"late", None, None, None, 0)
    with ThreadPoolExecutor(1) as pool:
        with held(engine):
            sending = pool.submit(producers[0].send, b"1")
            until(lambda: appender.add(*message, True, False) is _core.NOT_NOW)
        sending.result(PATIENCE)
    within(lambda: send_to_all(engine, producers, b"2"))
    assert placed[-1] == _core.Outcome.PLACED
    assert found(engine) == [[b"0", b"1", b"2"], [b"0", b"2"], [b"0", b"2"]]


@pytest.mark.rule("K4")
def test_messages_that_are_refused_while_it_has_paused_keep_it_from_nothing(
    engine, producers, placed, monkeypatch
) -> None:
    """Another thread sends again and again; its calls wait for the end of the pause."""
    monkeypatch.setattr(commits, "UNPAUSED_ATTEMPTS", 0)
    session, require = producers[0]._sender.session, commits.FramedAttempt._require
    sending = threading.Thread(target=lambda: producers[0].send_async(b"2"))

    def send_meanwhile(attempt: Any, joint: Any) -> None:
        require(attempt, joint)
        if sending.ident is None:
            sending.start()
            until(lambda: session.pauses._waiting)

    monkeypatch.setattr(commits.FramedAttempt, "_require", send_meanwhile)
    within(lambda: send_to_all(engine, producers, b"1"))
    sending.join()
    producers[0].flush()
    assert placed == [_core.Outcome.PLACED]
    assert found(engine) == [[b"0", b"1", b"2"], [b"0", b"1"], [b"0", b"1"]]


# ---- B9: its outcome -----------------------------------------------------------------------


@pytest.mark.rule("B9")
@pytest.mark.parametrize("closed", [False, True])
def test_one_that_may_be_in_the_log_is_not_tried_again(
    engine, producers, monkeypatch, closed
) -> None:
    """Its flush has failed, and a hand-over has paused its producer just then, or a call has closed
    it."""
    session, place = producers[0]._sender.session, commits.FramedAttempt.place
    placed = []

    def fails(attempt: Any, joint: Any) -> int:
        place(attempt, joint)
        placed.append(joint.tried)
        session.pauses.begin()
        if closed:
            producers[0].close()
        return _core.Outcome.LOST

    monkeypatch.setattr(commits.FramedAttempt, "place", fails)
    txn = engine.transaction()
    producers[0].send(b"1", transaction=txn)
    with pytest.raises(xl.ExclusiveLogError) as caught:
        within(txn.commit)
    session.resume()
    assert caught.value.maybe_written
    assert placed == [True]
    assert values(engine.topic("a")) == [b"0", b"1"]


@pytest.mark.rule("B9")
def test_one_whose_ledger_is_moved_during_its_flush_may_be_in_the_log(
    engine, producers, monkeypatch
) -> None:
    """It is, where the ledger is now. A later call's error says that nothing was written."""
    place = commits.FramedAttempt.place

    def lost(attempt: Any, joint: Any) -> int:
        place(attempt, joint)
        move_away(engine)
        return _core.Outcome.LOST

    monkeypatch.setattr(commits.FramedAttempt, "place", lost)
    txn = engine.transaction()
    producers[0].send(b"1", transaction=txn)
    with pytest.raises(xl.LedgerError, match="no longer the ledger") as caught:
        txn.commit()
    assert caught.value.maybe_written
    with pytest.raises(xl.LedgerError, match="no longer the ledger") as later:
        producers[1].send(b"2")
    assert not later.value.maybe_written
    engine.close()
    with xl.open(Path(engine.path).with_name("moved")) as moved:
        assert values(moved.topic("a")) == [b"0", b"1"]


@pytest.mark.rule("E2")
def test_the_error_of_a_pause_does_not_reach_the_application(
    engine, producers, placed, monkeypatch
) -> None:
    """A pause refuses the append, and is over before that is looked at."""
    session, append = producers[0]._sender.session, commits.FramedAttempt._append
    paused = []

    def pause(attempt: Any) -> bool:
        if paused:
            return append(attempt)
        paused.append(True)
        session.pauses.begin()
        try:
            return append(attempt)
        finally:
            session.resume()

    monkeypatch.setattr(commits.FramedAttempt, "_append", pause)
    assert send_to_all(engine, producers, b"1").state == "committed"
    assert placed == [_core.Outcome.PLACED]
    assert found(engine) == [[b"0", b"1"]] * 3


# ---- B2: each part is checked -------------------------------------------------------------


def take(state: State, name: str) -> None:
    """Fence the topic's owner, and close."""
    state.engine.topic(name).producer("exclusive_with_fencing").close()


@pytest.mark.parametrize("fenced", "abc")
@pytest.mark.rule("B2")
def test_each_producer_is_checked_in_the_append(
    engine, producers, worker, monkeypatch, fenced
) -> None:
    """One of them is fenced when all has been prepared, and only the append is still to come."""
    process, require = worker(), commits.FramedAttempt._require

    def fence(attempt: Any, joint: Any) -> None:
        require(attempt, joint)
        process.call(take, fenced)

    monkeypatch.setattr(commits.FramedAttempt, "_require", fence)
    with pytest.raises(xl.ProducerFencedError, match=f"topic '{fenced}'"):
        send_to_all(engine, producers, b"1")
    assert found(engine) == [[b"0"]] * 3


# ---- G3: all or nothing ---------------------------------------------------------------------


@pytest.fixture
def last(engine: xl.Engine, producers: list[xl.Producer], tmp_path: Path) -> Iterator[Any]:
    """The frames of the last transaction, and a function that copies the ledger as it is."""
    with no_checkpoints(engine):
        send_to_all(engine, producers, b"1")
        before = engine.ledger.journal.tail
        send_to_all(engine, producers, b"2")

        def copy(name: str) -> Path:
            # Without the lock file: that of a machine that has lost its power did not know the
            # transaction to be flushed.
            ignored = shutil.ignore_patterns("owners.lock")
            return Path(shutil.copytree(engine.path, tmp_path / name, ignore=ignored))

        yield frames(engine, before), copy


@pytest.mark.rule("G3")
def test_a_torn_transaction_is_not_there(last) -> None:
    """Whatever part of it did not reach the disk: a header or an entry, of its first or last
    message."""
    written, copy = last
    places = [
        at
        for frame in written
        for at in (frame.at, (frame.at + frame.entry_at) // 2, frame.entry_at)
    ]
    for number, at in enumerate(places):
        torn = copy(f"torn{number}")
        flip(torn, at, 0xFF)
        with xl.open(torn) as engine:
            assert found(engine) == [[b"0", b"1"]] * 3
            assert engine.verify().ok
            send_to_all(engine, [engine.topic(n).producer() for n in "abc"], b"3")
            assert found(engine) == [[b"0", b"1", b"3"]] * 3
    with xl.open(copy("whole")) as engine:
        assert found(engine) == [[b"0", b"1", b"2"]] * 3


def commit_for_ever(state: State, names: str) -> None:
    """Commit numbers to all topics, until the process is killed."""
    producers = [state.engine.topic(name).producer(EXCLUSIVE) for name in names]
    for number in range(1_000_000):
        send_to_all(state.engine, producers, b"%d" % number)


@pytest.mark.rule("G3")
@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_killed_process_leaves_whole_transactions(
    engine, worker: Callable[..., Any], durability
) -> None:
    process = worker(durability=durability)
    process.start(commit_for_ever, "abc")
    until(lambda: len(found(engine)[2]) > 20)
    process.kill()
    with engine.topic("a").producer("exclusive_with_fencing"):  # all that it left is flushed
        first, *others = found(engine)
    assert others == [first, first]
    assert first == [b"%d" % number for number in range(len(first))]
