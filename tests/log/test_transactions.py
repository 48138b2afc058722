"""Transactions: messages to several topics, and readers' cursors, enter the log together or not
at all, even if a process dies, is fenced, finds no room or is interrupted (rules G3, F6, B3)."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.commits import FramedAttempt
from exclusivelog.local.session import LocalSession
from exclusivelog.local.storage import ledger
from exclusivelog.producer import ProducerInTransaction
from testing.children import finish
from testing.disks import disk, leave
from testing.kills import die_at_commit, garbage, killable, say
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    forked,
    hang,
    preload,
    rows,
    send,
    until,
    values,
    within,
)
from testing.states import struck_after

preload(__name__)

Transaction = xl.Engine.transaction.__globals__["Transaction"]
LARGE = 200_000  # bytes, more than goes into the tables themselves


@dataclass
class Desk:
    """Three topics to send to, with a producer each, and one to read from, in a group."""

    engine: xl.Engine
    options: dict[str, Any] = field(default_factory=dict)
    mode: str = "exclusive"

    def __post_init__(self) -> None:
        self.topics = [self.engine.topic(name) for name in "abc"]
        self.producers = [
            topic.producer(self.mode, name=f"p{topic.name}", **self.options)
            for topic in self.topics
        ]
        self.source = self.engine.topic("source")
        with self.source.producer() as producer:
            producer.send_many([b"%d" % number for number in range(100)])
        self.reader = self.source.reader(group="g")

    def fill(self, txn: Any, value: bytes = b"t") -> None:
        """Add one message for each topic, and the cursor behind one more message."""
        self.reader.read_next(0)
        for producer in self.producers:
            producer.send(value, transaction=txn)
        txn.commit_cursor(self.reader)

    @property
    def cursor(self) -> int | None:
        return cursor(self.engine)

    def found(self) -> list[list[bytes]]:
        return [values(topic) for topic in self.topics]


def cursor(engine: xl.Engine, group: str = "g") -> int | None:
    """Where the group goes on in the topic `source`."""
    topic = engine.topic("source").id
    return engine.ledger.inspect(
        lambda tables: tables.cursors.get(topic, group), engine.backend.unflushed
    )


@pytest.fixture
def desk(engine) -> Desk:
    return Desk(engine)


def read_topics(state: State, *names: str) -> list[list[bytes]]:
    return [values(state.engine.topic(name)) for name in names]


def anything_there(state: State, *names: str) -> list[bool]:
    return [state.engine.topic(name).reader().has_message_available() for name in names]


# ---- G3: together ------------------------------------------------------------------------


def test_g3_messages_of_every_kind_and_a_cursor_enter_together(desk, worker) -> None:
    a, b, c = desk.producers
    stamp = {"key": "k", "properties": {"é": "1"}, "event_time": 0}
    desk.reader.read_batch(3)
    with desk.engine.transaction() as txn:
        assert a.send(b"one", transaction=txn) == -1
        assert b.send_many([b"x", None, b""], keys=["1", None, ""], transaction=txn) == range(-1)
        assert a.send(None, transaction=txn, **stamp) == -1
        assert list(c.send_many([], transaction=txn)) == []
        txn.commit_cursor(desk.reader)
        assert txn.offsets == {}
        assert txn.state == "open"
    assert txn.state == "committed"
    assert txn.offsets == {a: range(2), b: range(3)}
    expected = [[b"one", None], [b"x", None, b""], []]
    assert desk.found() == worker().call(read_topics, *"abc") == expected
    last = list(desk.topics[0].reader())[-1]
    assert (last.key, last.properties, last.event_time) == (b"k", {"é": "1"}, 0)
    assert [message.key for message in desk.topics[1].reader()] == [b"1", None, b""]
    assert desk.cursor == 3
    assert desk.engine.verify().ok


def test_g3_offsets_tell_where_each_producers_messages_are(desk) -> None:
    a, b, _ = desk.producers
    a.send_many([b"before"] * 7)
    for number in range(3):
        txn = desk.engine.transaction()
        for _ in range(number):
            a.send(b"1", transaction=txn)
            b.send_many([b"2"] * 4, transaction=txn)
            a.send_many([b"3", b"4"], transaction=txn)
        txn.commit()
        assert [*txn.offsets] == [a, b][: 2 * bool(number)]
    assert txn.offsets == {a: range(10, 16), b: range(4, 12)}
    assert values(desk.topics[0])[10:] == [b"1", b"3", b"4"] * 2


def test_g3_an_empty_transaction_commits_and_changes_nothing(desk) -> None:
    before = settled(desk)
    with desk.engine.transaction() as txn:
        pass
    assert (txn.state, txn.offsets) == ("committed", {})
    assert rows(desk.engine) == before


@pytest.mark.parametrize("size", [10, 3 << 20], ids=["small", "3 MiB"])
def test_g3_large_values_enter_with_small_ones(desk, size) -> None:
    """More than goes into one entry, and more than is encoded ahead of its being written."""
    a, b, c = desk.producers
    many = [b"%06d" % number + bytes(size // 1000) for number in range(3000)]
    with desk.engine.transaction() as txn:
        a.send(b"first", transaction=txn)
        b.send(bytes(size), transaction=txn)
        c.send_many(many, transaction=txn)
        a.send(bytes(size), transaction=txn)
        a.send(b"last", transaction=txn)
    assert desk.found() == [[b"first", bytes(size), b"last"], [bytes(size)], many]
    assert [c.last_sequence_id, a.last_sequence_id] == [2999, 2]
    assert txn.offsets == {a: range(3), b: range(1), c: range(3000)}
    assert desk.engine.verify().ok


def wait_at_the_commit(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """A transaction of this process stops when all of it is encoded, or written in the tables, and
    nothing committed: (it has stopped, let it go on)."""
    stopped, go_on = threading.Event(), threading.Event()
    finish_it, place = ledger.Transaction.finish, FramedAttempt.place

    def stop() -> None:
        if threading.current_thread().name in ("commits", "exclusivelog-transaction"):
            stopped.set()
            go_on.wait(PATIENCE)

    def stop_behind(self: Any, tables: Any) -> None:
        finish_it(self, tables)
        stop()

    def stop_before(self: Any, joint: Any) -> int:
        stop()
        return place(self, joint)

    monkeypatch.setattr(ledger.Transaction, "finish", stop_behind)
    monkeypatch.setattr(FramedAttempt, "place", stop_before)
    return stopped, go_on


@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_g3_nothing_is_visible_before_the_commit(desk, worker, monkeypatch, size) -> None:
    """The commit itself has not been made. No reader of any process sees any of
    it, and those that wait at the end are not woken."""
    other = worker()
    stopped, go_on = wait_at_the_commit(monkeypatch)
    readers = [topic.reader() for topic in desk.topics]
    txn = desk.engine.transaction()
    desk.fill(txn, bytes(size))
    assert [reader.has_message_available() for reader in readers] == [False] * 3
    thread = threading.Thread(target=txn.commit, name="commits")
    thread.start()
    try:
        assert stopped.wait(PATIENCE)
        assert [reader.has_message_available() for reader in readers] == [False] * 3
        with pytest.raises(xl.WaitTimeoutError):
            readers[0].read_next(0.1)
        assert other.call(anything_there, *"abc") == [False] * 3
        assert [topic.next_offset for topic in desk.topics] == [0] * 3
        assert desk.cursor is None
    finally:
        go_on.set()
        thread.join(PATIENCE)
    assert other.call(read_topics, *"abc") == [[bytes(size)]] * 3
    assert [reader.read_next(0).value for reader in readers] == [bytes(size)] * 3
    assert desk.cursor == 1


def watch(state: State, names: str) -> int:
    """Read one topic after the other, for ever anew: who sees a message of the first has to
    find its companions in those behind. How many looks have seen something new."""
    readers = [state.engine.topic(name).reader() for name in names]
    news, last = 0, -1
    while last < state.kept["until"]:
        seen = last
        for number, reader in enumerate(readers):
            for message in reader:
                if number == 0:
                    seen = int(message.value)
            assert reader.position > seen, f"{names[number]} lacks message {reader.position}"
        news, last = news + (seen > last), seen
    return news


def keep(state: State, **kept: Any) -> None:
    state.kept.update(kept)


@pytest.mark.long
def test_g3_who_sees_one_message_sees_its_companions(desk, worker) -> None:
    watchers = [worker(), worker(readonly=True)]

    def looks_at(numbers: range) -> list[int]:
        for other in watchers:
            other.call(keep, until=numbers[-1])
            other.start(watch, "abc")
        for number in numbers:
            with desk.engine.transaction() as txn:
                for producer in reversed(desk.producers):
                    producer.send(b"%d" % number, transaction=txn)
        return [other.answer() for other in watchers]

    rounds = (range(start, start + 400) for start in itertools.count(0, 400))
    until(lambda: min(looks_at(next(rounds))) > 3)  # a watcher may hardly run on a busy machine


# ---- G3: giving it up --------------------------------------------------------------------


def check_nothing_happened(desk: Desk, txn: Any, before: Any) -> None:
    assert txn.state == "aborted"
    assert rows(desk.engine) == before
    assert txn.offsets == {}
    for use in (
        txn.commit,
        lambda: desk.producers[0].send(b"x", transaction=txn),
        lambda: desk.producers[0].send_many([b"x"], transaction=txn),
        lambda: txn.commit_cursor(desk.reader),
    ):
        with pytest.raises(xl.TransactionAbortedError, match=r"aborted.*engine\.transaction"):
            use()
    assert rows(desk.engine) == before


def settled(desk: Desk) -> Any:
    """All rows, once nothing is on its way into the tables any more."""
    desk.engine.ledger.checkpoint()
    return rows(desk.engine)


def test_g3_an_aborted_transaction_leaves_nothing(desk) -> None:
    before = settled(desk)
    txn = desk.engine.transaction()
    desk.fill(txn)
    txn.abort()
    txn.abort()
    check_nothing_happened(desk, txn, before)
    with desk.engine.transaction() as txn:
        desk.fill(txn)
        txn.abort()
    check_nothing_happened(desk, txn, before)
    assert desk.producers[0].send(b"next") == 0
    assert desk.producers[0].last_sequence_id == 0


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, xl.WaitTimeoutError])
def test_g3_an_exception_in_the_block_aborts_it(desk, kind) -> None:
    before = settled(desk)
    raised = kind("mine")
    txn = desk.engine.transaction()

    def fail() -> None:
        with txn:
            desk.fill(txn)
            raise raised

    with pytest.raises(kind) as caught:
        fail()
    assert caught.value is raised
    check_nothing_happened(desk, txn, before)


def test_g3_a_transaction_is_used_once(desk) -> None:
    txn = desk.engine.transaction()
    desk.fill(txn)
    txn.commit()
    before = settled(desk)
    txn.abort()  # too late, and no error
    assert txn.state == "committed"
    for use in (
        txn.commit,
        lambda: desk.producers[0].send(b"x", transaction=txn),
        lambda: txn.commit_cursor(desk.reader),
    ):
        with pytest.raises(xl.TransactionAbortedError, match="committed"):
            use()
    assert settled(desk) == before
    assert [producer.send(b"goes on") for producer in desk.producers] == [1, 1, 1]


def test_g3_only_producers_and_readers_of_its_own_ledger(desk, tmp_path) -> None:
    with xl.open(tmp_path / "other") as other:
        theirs = Desk(other)
        txn = desk.engine.transaction()
        for use in (
            lambda: theirs.producers[0].send(b"x", transaction=txn),
            lambda: theirs.producers[0].send_many([b"x"], transaction=txn),
            lambda: txn.commit_cursor(theirs.reader),
        ):
            with pytest.raises(ValueError, match="own ledger"):
                use()
        with pytest.raises(ValueError, match="group="):
            txn.commit_cursor(desk.source.reader())
        desk.fill(txn)  # it is none the worse for it
        txn.commit()
        assert theirs.found() == [[], [], []]
    assert desk.found() == [[b"t"]] * 3


def test_g3_producers_of_another_engine_on_the_same_ledger(desk) -> None:
    with xl.open(desk.engine.path) as other:
        with other.topic("d").producer() as producer, desk.engine.transaction() as txn:
            producer.send(b"x", transaction=txn)
            desk.fill(txn)
    assert desk.found() == [[b"t"]] * 3
    assert values(desk.engine.topic("d")) == [b"x"]


def test_g3_a_readonly_engine_and_a_closed_one_have_no_transactions(desk) -> None:
    with xl.open(desk.engine.path, readonly=True) as readonly:
        with pytest.raises(xl.LedgerError, match="readonly"):
            readonly.transaction()
    txn = desk.engine.transaction()
    desk.fill(txn)
    desk.engine.close()
    with pytest.raises(xl.EngineClosedError):
        txn.commit()
    assert txn.state == "aborted"
    with pytest.raises(xl.EngineClosedError):
        desk.engine.transaction()
    with xl.open(desk.engine.path) as engine:
        assert [values(engine.topic(name)) for name in "abc"] == [[], [], []]
        assert cursor(engine) is None


def test_c5_a_forked_child_cannot_commit_the_parents_transaction(desk) -> None:
    txn = desk.engine.transaction()
    txn.commit_cursor(desk.reader)
    with pytest.raises(Failed) as caught:
        forked(txn.commit)
    assert caught.value.kind == "EngineClosedError"


# ---- G2, G3: sequence ids ----------------------------------------------------------------


def ids(topic: xl.Topic) -> list[int]:
    return [message.sequence_id for message in topic.reader()]


def test_g2_sequence_ids_are_counted_when_it_commits(desk) -> None:
    """What was sent meanwhile comes first, and has the lower ids."""
    a = desk.producers[0]
    txn = desk.engine.transaction()
    a.send(b"t", transaction=txn)
    assert a.last_sequence_id == -1
    a.send(b"0")
    a.send_many([b"1", b"2"])
    a.send_many([b"t", b"t"], transaction=txn)
    assert a.last_sequence_id == 2
    txn.commit()
    assert a.last_sequence_id == 5
    a.send(b"6")
    assert values(desk.topics[0]) == [b"0", b"1", b"2", b"t", b"t", b"t", b"6"]
    assert ids(desk.topics[0]) == list(range(7))


def test_g2_explicit_ids_are_kept_and_known_on_re_opening(desk, path) -> None:
    a, b, c = desk.producers
    with desk.engine.transaction() as txn:
        a.send(b"1", sequence_id=7, transaction=txn)
        a.send(b"2", transaction=txn)
        a.send(b"3", sequence_id=100, transaction=txn)
        b.send_many([b"1", b"2", b"3"], sequence_id=5, transaction=txn)
        c.send(b"1", sequence_id=2**63 - 1, transaction=txn)
    assert ids(desk.topics[0]) == [7, 8, 100]
    assert ids(desk.topics[1]) == [5, 6, 7]
    assert [p.last_sequence_id for p in desk.producers] == [100, 7, 2**63 - 1]
    a.send(b"4")
    desk.engine.close()
    with xl.open(path) as engine:
        again = [engine.topic(name).producer("exclusive", name=f"p{name}") for name in "abc"]
        assert [producer.last_sequence_id for producer in again] == [101, 7, 2**63 - 1]
        with engine.transaction() as txn:
            again[0].send(b"5", transaction=txn)
        assert ids(engine.topic("a")) == [7, 8, 100, 101, 102]


@pytest.mark.parametrize("late", [False, True], ids=["added", "sent meanwhile"])
def test_g2_one_duplicate_keeps_all_of_it_out(desk, late) -> None:
    """The id was used up before it was added, or between that and the commit."""
    a, b, c = desk.producers
    b.send(b"0", sequence_id=3 if late else 4)
    before = settled(desk)
    txn = desk.engine.transaction()
    desk.reader.read_next(0)
    a.send(b"t", transaction=txn)
    b.send(b"t", sequence_id=4, transaction=txn)
    c.send(b"t", transaction=txn)
    txn.commit_cursor(desk.reader)
    if late:
        b.send(b"1", sequence_id=4)
        before = settled(desk)
    with pytest.raises(xl.DuplicateSequenceError, match="'b'") as caught:
        txn.commit()
    assert (caught.value.sequence_id, caught.value.last_sequence_id) == (4, 4)
    check_nothing_happened(desk, txn, before)
    assert [producer.last_sequence_id for producer in desk.producers] == [-1, 4, -1]
    with desk.engine.transaction() as txn:
        desk.fill(txn)
    assert [producer.last_sequence_id for producer in desk.producers] == [0, 5, 0]


def test_g2_a_transaction_that_is_repeated_is_recognised(desk) -> None:
    """After a crash it is unknown whether it committed: with ids of its own it can be tried again
    as a whole, and is refused as a whole."""

    def attempt() -> Any:
        with desk.engine.transaction() as txn:
            for number, producer in enumerate(desk.producers):
                producer.send(b"t", sequence_id=10 + number, transaction=txn)

    attempt()
    for _ in range(3):
        with pytest.raises(xl.DuplicateSequenceError, match="'a'"):
            attempt()
    assert desk.found() == [[b"t"]] * 3


# ---- G3: beside ordinary sends -----------------------------------------------------------


def test_g3_what_was_sent_before_comes_before(desk) -> None:
    desk.options["linger"] = 60.0
    with desk.engine.topic("d").producer(linger=60.0) as producer:
        for number in range(10):
            receipts = [producer.send_async(b"b%d" % n) for n in range(number)]
            with desk.engine.transaction() as txn:
                producer.send(b"t", transaction=txn)
                receipts.append(producer.send_async(b"b"))
            assert all(receipt.done() for receipt in receipts)
            assert receipts[-1].result(0) == txn.offsets[producer].start - 1
            receipts = [producer.send_async(b"a") for _ in range(3)]
            producer.flush()
            assert receipts[0].result(0) == txn.offsets[producer].stop
    expected = [
        value
        for number in range(10)
        for value in (*(b"b%d" % n for n in range(number)), b"b", b"t", b"a", b"a", b"a")
    ]
    assert values(desk.engine.topic("d")) == expected
    assert ids(desk.engine.topic("d")) == list(range(len(expected)))


@contextlib.contextmanager
def running(*calls: Callable[[], Any]) -> Iterator[threading.Event]:
    """Call each in a thread of its own, over and over, until the event is set, and see that
    none has failed."""
    stop = threading.Event()

    def repeat(call: Callable[[], Any]) -> None:
        while not stop.is_set():
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(repeat, call) for call in calls]
        try:
            yield stop
        finally:
            stop.set()
    for future in futures:
        future.result(PATIENCE)


def sender(producer: xl.Producer, name: bytes) -> Callable[[], None]:
    """Sends in every way, each message with a number of its own."""
    numbers = itertools.count()

    def send_some() -> None:
        producer.send(name + b" %d" % next(numbers))
        producer.send_many([name + b" %d" % next(numbers) for _ in range(3)])
        receipts = [producer.send_async(name + b" %d" % next(numbers)) for _ in range(3)]
        producer.send(name + b" %d" % next(numbers), key="k", timeout=PATIENCE)
        assert all(receipt.result(PATIENCE) >= 0 for receipt in receipts)

    return send_some


@pytest.mark.sampled
@pytest.mark.parametrize("in_main_thread", [True, False], ids=["main thread", "other thread"])
def test_g3_other_threads_send_with_the_same_producers_meanwhile(desk, in_main_thread) -> None:
    """Every thread's messages stay in their order, a transaction's stand together, and sequence
    ids are those of the log."""

    def commit_one(number: int) -> None:
        with desk.engine.transaction() as txn:
            for producer in desk.producers:
                producer.send(b"t %d" % number, transaction=txn)
                producer.send_many([b"t %d" % (number + n) for n in (1, 2)], transaction=txn)
        assert [len(where) for where in txn.offsets.values()] == [3, 3, 3]

    def commit_some() -> None:
        for number in range(0, 180, 3):
            commit_one(number)
            time.sleep(0.003)  # without it they send hardly anything

    threads = [sender(p, b"%d" % n) for n in range(2) for p in desk.producers[:2]]
    with running(*threads):
        commit_some() if in_main_thread else within(commit_some)
    for topic in desk.topics:
        found = values(topic)
        for name in {value.split()[0] for value in found}:
            numbers = [int(value.split()[1]) for value in found if value.split()[0] == name]
            assert numbers == list(range(len(numbers)))
        at = [index for index, value in enumerate(found) if value.startswith(b"t")]
        assert len(at) == 180
        assert all(at[i + 2] == at[i] + 2 for i in range(0, 180, 3))
        assert ids(topic) == list(range(len(found)))
    assert desk.topics[0].next_offset > 300
    assert desk.engine.verify().ok


def test_g3_a_send_that_is_on_its_way_when_the_commit_begins(desk) -> None:
    """A thread has begun to send, and waits for the ledger, where somebody is about to be
    refused. A transaction of the same producer comes just then: both get through."""
    producer = desk.producers[0]
    producer.send(b"before")
    inside, go_on = threading.Event(), threading.Event()

    def be_refused() -> None:
        with contextlib.suppress(KeyError), desk.engine.ledger.write_exclusive():
            inside.set()
            go_on.wait(PATIENCE)
            raise KeyError

    def commit() -> range:
        with desk.engine.transaction() as txn:
            producer.send(b"t", transaction=txn)
        return txn.offsets[producer]

    with ThreadPoolExecutor(3) as pool:
        refused = pool.submit(be_refused)
        assert inside.wait(PATIENCE)
        sent = pool.submit(producer.send, b"ordinary")
        time.sleep(0.2)
        committed = pool.submit(commit)
        time.sleep(0.2)
        go_on.set()
        refused.result(PATIENCE)
        assert {sent.result(PATIENCE), *committed.result(PATIENCE)} == {1, 2}


def test_g3_two_engines_commit_with_one_producer(desk) -> None:
    with xl.open(desk.engine.path) as other:

        def commit_some(engine: xl.Engine) -> None:
            for _ in range(100):
                with engine.transaction() as txn:
                    desk.producers[0].send(b"t", transaction=txn)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(commit_some, engine) for engine in (desk.engine, other)]:
                done.result(PATIENCE)
    assert ids(desk.topics[0]) == list(range(200))


def test_g3_threads_commit_transactions_of_the_same_producers(desk) -> None:
    def commit_some(name: int) -> None:
        for number in range(40):
            with desk.engine.transaction() as txn:
                for producer in random.Random(name + number).sample(desk.producers, 3):
                    producer.send_many([b"%d %d" % (name, number)] * 2, transaction=txn)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(commit_some, name) for name in range(4)]:
            done.result(PATIENCE)
    one, two, three = desk.found()
    assert one == two == three
    assert one[::2] == one[1::2]
    for name in range(4):
        mine = [value for value in one[::2] if value.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, number) for number in range(40)]


SENDS_IN_A_CALLBACK = """
    import sys, threading, time
    import exclusivelog as xl
    from testing.patience import PATIENCE
    engine = xl.open(sys.argv[1])
    producer = engine.topic("t").producer()
    inside, done = threading.Event(), threading.Event()

    def again(receipt):
        inside.set()
        time.sleep(0.3)
        producer.send(b"again")
        done.set()

    producer.send_async(b"1").add_done_callback(again)
    inside.wait(PATIENCE)
    producer.send_async(b"2")
    with engine.transaction() as txn:
        producer.send(b"t", transaction=txn)
    assert done.wait(PATIENCE)
    print(len(list(engine.topic("t").reader())))
"""


@pytest.mark.long
def test_b9_a_callback_may_send_while_a_transaction_commits(path) -> None:
    assert finish(SENDS_IN_A_CALLBACK, path) == "4\n"


HANDLES = """
    import os, signal, sys
    import exclusivelog as xl
    from exclusivelog.local.commits import FramedAttempt, TableAttempt

    engine = xl.open(sys.argv[1])
    one, two = (engine.topic(name).producer() for name in "ab")

    def handler(*_):
        try:
            if sys.argv[2] == "commits":
                with engine.transaction() as txn:
                    two.send(b"h", transaction=txn)
            else:
                one.send(b"h")
        except xl.ExclusiveLogError as error:
            print(type(error).__name__)

    step = FramedAttempt.place, TableAttempt.write

    def struck(self, *args):
        FramedAttempt.place, TableAttempt.write = step
        os.kill(os.getpid(), signal.SIGUSR1)
        return step[isinstance(self, TableAttempt)](self, *args)

    signal.signal(signal.SIGUSR1, handler)
    FramedAttempt.place = TableAttempt.write = struck
    with engine.transaction() as txn:
        one.send(b"t" * int(sys.argv[3]), transaction=txn)
    print(txn.state)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("does", ["commits", "sends"])
def test_g3_a_signal_handler_strikes_in_a_commit(path, does, size) -> None:
    """It must not wait for itself; it may get through, or be told to come later."""
    assert finish(HANDLES, path, does, str(size)).endswith("committed\n")


# ---- B3, F6: fenced ----------------------------------------------------------------------


def take_topic(state: State, name: str) -> None:
    state.producer = state.engine.topic(name).producer("exclusive_with_fencing", name="rival")


def take_group(state: State, name: str) -> None:
    state.kept["reader"] = state.engine.topic(name).reader(group="g")


def commits_again(desk: Desk, *lost: int) -> None:
    """Producers that were not fenced go on, together with the successors of the others."""
    found = desk.found()
    for number in lost:
        desk.producers[number] = desk.topics[number].producer("exclusive_with_fencing", name="new")
    for number, producer in enumerate(desk.producers):
        producer.send(b"o%d" % number)
    with desk.engine.transaction() as txn:
        desk.fill(txn)
    assert desk.found() == [[*before, b"o%d" % number, b"t"] for number, before in enumerate(found)]


@pytest.mark.parametrize("number", range(3))
def test_b3_a_fenced_producer_keeps_all_of_it_out(desk, worker, number) -> None:
    """A rival in another process takes one of the topics before the commit: whichever it is,
    nothing of the transaction is in any."""
    rival = worker()
    txn = desk.engine.transaction()
    desk.fill(txn)
    rival.call(take_topic, "abc"[number])
    with pytest.raises(xl.ProducerFencedError, match=f"'{'abc'[number]}'") as caught:
        txn.commit()
    assert txn.state == "aborted"
    assert caught.value.holder.producer_name == "rival"
    assert not caught.value.maybe_written
    assert desk.found() == [[], [], []]
    assert desk.cursor is None
    fenced = desk.producers[number]
    assert fenced.state == "fenced"
    for call in (lambda: fenced.send(b"x"), lambda: fenced.send(b"x", transaction=txn)):
        with pytest.raises(xl.ProducerFencedError) as again:  # one and the same (rule B4)
            call()
        assert again.value is caught.value
    assert [p.state for p in desk.producers].count("open") == 2
    rival.call(send, b"theirs")
    commits_again(desk, number)


def test_b4_one_that_is_known_to_be_fenced_cannot_be_added(desk, worker) -> None:
    worker().call(take_topic, "b")
    with pytest.raises(xl.ProducerFencedError):
        desk.producers[1].send(b"x")
    txn = desk.engine.transaction()
    with pytest.raises(xl.ProducerFencedError):
        desk.producers[1].send(b"x", transaction=txn)
    desk.producers[0].send(b"x", transaction=txn)
    txn.commit()
    assert desk.found() == [[b"x"], [], []]


@pytest.mark.parametrize("sends", [True, False], ids=["with messages", "alone"])
def test_f6_a_fenced_reader_keeps_all_of_it_out(desk, worker, sends) -> None:
    rival = worker()
    txn = desk.engine.transaction()
    if sends:
        desk.fill(txn)
    else:
        txn.commit_cursor(desk.reader)
    rival.call(take_group, "source")
    with pytest.raises(xl.ReaderFencedError, match=f"'source'.*'g'.*{rival.pid}"):
        txn.commit()
    assert txn.state == "aborted"
    assert desk.found() == [[], [], []]
    assert desk.cursor is None
    for call in (lambda: desk.reader.read_next(0), desk.reader.commit):
        with pytest.raises(xl.ReaderFencedError):
            call()
    assert [producer.state for producer in desk.producers] == ["open"] * 3
    desk.reader = desk.source.reader(group="g")
    commits_again(desk)
    assert desk.cursor == 1


def test_f6_cursors_of_several_readers_move_together(engine, topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % number for number in range(9)])
    readers = {name: topic.reader(group=name) for name in "xyz"}
    for step, reader in enumerate(readers.values(), 1):
        reader.read_batch(step)
    with engine.transaction() as txn:
        for reader in readers.values():
            txn.commit_cursor(reader)
        readers["y"].read_batch(5)  # its position was taken down before
    for reader in readers.values():
        reader.close()
    assert [topic.reader(group=name).position for name in "xyz"] == [1, 2, 3]
    txn = engine.transaction()
    kept = topic.reader(group="x")
    txn.commit_cursor(kept)
    kept.read_batch(4)
    txn.commit_cursor(kept)  # the last word counts
    txn.commit()
    assert topic.reader(group="x").position == 5


@pytest.mark.parametrize("what", ["closed producer", "closed reader", "closed engine"])
def test_g3_what_was_closed_before_the_commit_keeps_all_of_it_out(desk, what) -> None:
    with xl.open(desk.engine.path) as other:
        producer = other.topic("d").producer("exclusive")
        reader = other.topic("source").reader(group="h")
        txn = desk.engine.transaction()
        desk.fill(txn)
        producer.send(b"t", transaction=txn)
        txn.commit_cursor(reader)
        {"closed producer": producer, "closed reader": reader, "closed engine": other}[what].close()
        with pytest.raises((xl.EngineClosedError, xl.ReaderFencedError)):
            txn.commit()
        assert txn.state == "aborted"
    assert desk.found() == [[], [], []]
    assert values(desk.engine.topic("d")) == []
    assert desk.cursor is None
    commits_again(desk)


# ---- G8: sealed and deleted topics -------------------------------------------------------


@pytest.mark.parametrize("number", range(3))
def test_g8_a_terminated_topic_keeps_all_of_it_out_and_is_named(desk, number) -> None:
    desk.producers[number].send(b"before")
    txn = desk.engine.transaction()
    desk.fill(txn)
    desk.topics[number].terminate()
    with pytest.raises(
        xl.TopicTerminatedError, match=f"'{'abc'[number]}' was terminated at offset 1"
    ):
        txn.commit()
    assert txn.state == "aborted"
    assert list(itertools.chain(*desk.found())) == [b"before"]
    assert desk.cursor is None
    with desk.engine.transaction() as txn:
        for producer in desk.producers:
            if producer is not desk.producers[number]:
                producer.send(b"t", transaction=txn)
    assert sorted(itertools.chain(*desk.found())) == [b"before", b"t", b"t"]


def test_g8_a_cursor_of_a_deleted_topic_keeps_all_of_it_out(desk) -> None:
    txn = desk.engine.transaction()
    desk.fill(txn)
    desk.engine.delete_topic("source")
    with pytest.raises(xl.TopicNotFoundError, match="'source'"):
        txn.commit()
    assert txn.state == "aborted"
    assert desk.found() == [[], [], []]


def begin(state: State) -> None:
    """A transaction with messages for three topics."""
    txn = state.kept["txn"] = state.engine.transaction()
    state.kept["producers"] = [state.engine.topic(name).producer("exclusive") for name in "abc"]
    for producer in state.kept["producers"]:
        producer.send(b"t", transaction=txn)


def commit(state: State) -> str:
    """Commit it; its state, or what kept it out."""
    try:
        state.kept["txn"].commit()
    except xl.ExclusiveLogError as error:
        return f"{state.kept['txn'].state}: {type(error).__name__}: {error}"
    return state.kept["txn"].state


def test_g8_a_topic_that_is_deleted_under_a_hung_process(engine, worker) -> None:
    """A process is stopped during its transaction. Another one takes its topic for orphaned
    and deletes it, and makes it again. When the process goes on, its commit fails as a whole
    (rule C3)."""
    process = worker(keepalive=0.5)
    process.call(begin)
    hang(process)

    def deleted() -> bool:
        with contextlib.suppress(xl.ProducerBusyError):
            engine.delete_topic("b")
            return True
        return False

    try:
        until(deleted)
        assert engine.topic("b").next_offset == 0
    finally:
        process.signal(signal.SIGCONT)
    said = process.call(commit)
    assert said.startswith("aborted: ")
    assert "'b'" in said
    assert [values(engine.topic(name)) for name in "abc"] == [[], [], []]


# ---- E2: handed over ---------------------------------------------------------------------


def test_e2_a_transaction_follows_its_topic_within_the_process(desk) -> None:
    """As a send does."""
    with xl.open(desk.engine.path, name="other") as other:
        desk.engine.unload("b", to=other.id)
        with desk.engine.transaction() as txn:
            desk.fill(txn)
        assert desk.found() == [[b"t"]] * 3


def test_e2_a_commit_that_is_refused_just_before_a_hand_over_says_why(desk, monkeypatch) -> None:
    """A producer is fenced; its engine has not been notified yet, and pauses it for a hand-over
    that it was asked for before. A commit retries while it is paused, but not for ever."""
    a, engine = desk.producers[0], desk.engine
    session = a._sender.session
    with engine.ledger.write_exclusive() as tables:
        row = tables.topics.get(a._session.topic)
        engine.backend.sessions.succession.drop_holder(tables, row, a._session, "evict", "test")
        tables.topics.put(row)
    resume = LocalSession.resume

    def resume_and_pause(each: LocalSession) -> None:
        resume(each)
        if each is session:
            monkeypatch.setattr(LocalSession, "resume", resume)
            session.pauses.begin()
            threading.Timer(0.3, session.resume).start()

    monkeypatch.setattr(LocalSession, "resume", resume_and_pause)
    txn = engine.transaction()
    desk.fill(txn)
    with pytest.raises(xl.ProducerFencedError, match="was fenced") as caught:
        within(txn.commit)
    assert txn.state == "aborted"
    with pytest.raises(xl.ProducerFencedError) as again:
        a.send(b"x")
    assert again.value is caught.value


def test_e2_a_topic_that_went_to_another_process_keeps_all_of_it_out(desk, worker) -> None:
    rival = worker(name="rival")
    to = next(info.id for info in desk.engine.engines() if info.name == "rival")
    txn = desk.engine.transaction()
    desk.fill(txn)
    (move,) = desk.engine.unload("b", to=to)
    assert move.ok
    with pytest.raises(xl.ProducerMovedError, match="'b'") as caught:
        txn.commit()
    assert caught.value.successor.pid == rival.pid
    assert (txn.state, desk.found(), desk.cursor) == ("aborted", [[], [], []], None)
    assert desk.producers[0].send(b"goes on") == 0


# ---- H2: a full disk ---------------------------------------------------------------------


def until_full(desk: Desk, value: bytes) -> tuple[int, Any]:
    """Commit until it fails: how often it did not, and the transaction that was refused."""
    for count in itertools.count():
        assert count < 5000, "there is no end to it"
        txn = desk.engine.transaction()
        try:
            for producer in desk.producers:
                producer.send(value, transaction=txn)
            txn.commit_cursor(desk.reader)
            txn.commit()
        except xl.LedgerFullError as error:
            refused = error
            break
    assert refused.retriable
    assert not refused.maybe_written
    return count, txn


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1000, LARGE], ids=["small", "large"])
@pytest.mark.usual_journal
def test_h2_a_full_disk_keeps_all_of_it_out(tmp_path, size) -> None:
    """Again and again; when there is room again the same producers go on, with the ids that
    come next."""
    with disk(tmp_path / "disk", 32) as where:
        ballast = leave(where, 11 << 20)
        with xl.open(where / "log") as engine:
            desk, count = Desk(engine), 0
            for _ in range(4):
                more, txn = until_full(desk, bytes(size))
                count += more
                assert txn.state == "aborted"
                assert [topic.next_offset for topic in desk.topics] == [count] * 3
            assert count > 2
            assert [producer.last_sequence_id for producer in desk.producers] == [count - 1] * 3
            assert engine.verify().ok
            ballast.unlink()
            desk.fill(txn := engine.transaction())
            txn.commit()
            assert [ids(topic) for topic in desk.topics] == [list(range(count + 1))] * 3
            assert desk.cursor == 1
        with xl.open(where / "log") as engine:
            assert engine.verify().ok
            assert [engine.topic(name).next_offset for name in "abc"] == [count + 1] * 3
            assert garbage(engine) == {}


# ---- G3, H1: killed ----------------------------------------------------------------------

GOES = [  # what is sent in the n-th transaction, to topics a, b, c
    lambda n: ([b"%d" % n], [b"%d" % n] * 2, [b"%d" % n]),
    lambda n: ([b"%d" % n], [b"%d" % n] * 2, [b"%d" % n + b" " * LARGE]),
    lambda n: ([b"%d" % n], [b"%d" % n] * 2, [b"%d" % n + b" " * 1000]),
]


def going(number: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
    return GOES[number % 3](number)


def transfer(says: Connection, path: str, strike: int | None, behind: bool) -> None:
    """Go on with the transactions where the last process was killed."""
    with xl.open(path, name="killed") as engine:
        producers = [
            engine.topic(name).producer("exclusive_with_fencing", name="v") for name in "abc"
        ]
        reader = engine.topic("source").reader(group="g")
        begin = producers[0].last_sequence_id + 1
        say(says, (begin, [producer.last_sequence_id for producer in producers], reader.position))
        for number in itertools.count(begin):
            if strike == number - begin:
                die_at_commit(1, behind=behind)
            txn = engine.transaction()
            for producer, some in zip(producers, going(number), strict=True):
                producer.send_many(some, transaction=txn)
            reader.seek(number + 1)
            txn.commit_cursor(reader)
            txn.commit()
            say(says, number)


@dataclass
class Judge:
    """Reads what has come since the last time, and says how many transactions there are. A commit
    of a dead process may come to light between two reads: so it reads until nothing changes."""

    path: str
    count: int = 0
    at: list[int] = field(default_factory=lambda: [0, 0, 0])

    def look(self, engine: xl.Engine) -> tuple[list[list[bytes | None]], int]:
        """The new messages of each topic, and the cursor."""
        readers = [engine.topic(name).reader(at) for name, at in zip("abc", self.at, strict=True)]
        return [[message.value for message in reader] for reader in readers], cursor(engine) or 0

    def read(self, engine: xl.Engine) -> int:
        found = self.look(engine)
        while (again := self.look(engine)) != found:
            found = again
        new, position = found
        self.at = [at + len(some) for at, some in zip(self.at, new, strict=True)]
        expected: tuple[list[bytes], ...] = ([], [], [])
        for number in range(self.count, self.count + len(new[0])):
            for known, some in zip(expected, going(number), strict=True):
                known += some
        assert new == list(expected), [len(some) for some in new]
        self.count += len(new[0])
        assert position == self.count
        return self.count


@dataclass
class Death:
    """When a process is killed: at a random moment after it has reported `awaited` transactions,
    or right before or right after its n-th commit."""

    strike: int | None  # the number of that commit
    behind: bool = False
    awaited: int = 0
    after: float = 0.0


def deaths(count: int) -> Iterator[Death]:
    dice = random.Random(count)
    for number in range(count):
        kind = number % 4
        if kind < 2:
            yield Death(None, awaited=kind, after=dice.random() * 0.03)
        else:
            yield Death(dice.randrange(4), behind=kind == 3)


def one_death(judge: Judge, death: Death) -> tuple[int, int]:
    """Kill a process; return the number of transactions that it has reported, and the number
    that it found when it started."""
    with killable(transfer, judge.path, death.strike, death.behind) as process:
        begun, sequences, position = process.told()
        assert begun == judge.count
        assert sequences == [begun - 1, 2 * begun - 1, begun - 1]
        assert position == begun
        told = [process.told() for _ in range(death.awaited)]
        if death.strike is None:
            time.sleep(death.after)
            process.kill()
        told += process.all_told()
        assert process.process.exitcode == -signal.SIGKILL
    assert told == list(range(begun, begun + len(told)))
    return begun + len(told), begun


def check_death(death: Death, known: int, begun: int, count: int) -> None:
    assert known <= count <= known + 1
    if death.strike is not None:
        assert known == begun + death.strike
        assert count == known + death.behind


def look_beside(judge: Judge, survivor: xl.Engine, known: int) -> int:
    """A commit that its process did not live to hear of may come to light only with the next
    one, whosever that is; then it is there as a whole."""
    assert known <= judge.read(survivor) <= known + 1
    with survivor.topic("others").producer() as producer:
        producer.send(b"x")
    return judge.read(survivor)


def look_alone(judge: Judge) -> int:
    with xl.open(judge.path) as engine:
        assert garbage(engine) == {}
        return judge.read(engine)


@pytest.mark.long
@pytest.mark.parametrize(("beside", "count"), [(False, 60), (True, 140)], ids=["alone", "beside"])
def test_g3_a_killed_process_leaves_whole_transactions(path, beside, count) -> None:
    """Two hundred processes are killed, one after the other: at a random moment, or right before
    or right after LMDB's commit. An engine that had the ledger open all the time, and one that
    opens it next, find each transaction in all three topics with its cursor, or in none; those
    that were acknowledged are there, and the next process continues with the ids that follow."""
    judge = Judge(path)
    with xl.open(path) as engine:
        for name in (*"abc", "source"):
            engine.topic(name)
    with xl.open(path) if beside else contextlib.nullcontext() as survivor:
        for death in deaths(count):
            known, begun = one_death(judge, death)
            found = look_beside(judge, survivor, known) if beside else look_alone(judge)
            check_death(death, known, begun, found)
    with xl.open(path) as engine:
        assert Judge(path).read(engine) == judge.count > count
        assert engine.verify().ok
        assert garbage(engine) == {}


# ---- F6: consume, process, produce -------------------------------------------------------


def work(says: Connection, path: str, seed: int) -> None:
    """Take the topic and the group over; square numbers until another process takes them."""
    dice = random.Random(seed)
    with xl.open(path, name=f"worker {seed}") as engine:
        while True:
            with contextlib.suppress(xl.ProducerFencedError, xl.ReaderFencedError):
                producer = engine.topic("squares").producer("exclusive_with_fencing")
                with engine.topic("source").reader(group="g") as reader:
                    while True:
                        square(engine, reader, producer, dice.randrange(1, 6))
            time.sleep(dice.random() * 0.05)


def square(engine: xl.Engine, reader: xl.Reader, producer: xl.Producer, most: int) -> None:
    messages = reader.read_batch(most)
    if not messages:
        time.sleep(0.001)
        return
    with engine.transaction() as txn:
        for message in messages:
            producer.send(b"%d" % int(message.value) ** 2, transaction=txn)
        txn.commit_cursor(reader)


@pytest.mark.long
@pytest.mark.parametrize("rivals", [1, 2])
def test_f6_every_input_is_in_the_output_exactly_once(path, rivals) -> None:
    """Workers read numbers and send their squares. They are killed at random, and, where there
    are two, fence each other all the time; while numbers keep coming in. Most deaths wait until
    something was done since the last one: on a slow machine, workers would otherwise die as they
    begin."""
    total, dice = 600, random.Random(rivals)
    done_before = 0
    expected = [b"%d" % number**2 for number in range(total)]
    deadline = time.monotonic() + 2 * PATIENCE
    with xl.open(path) as engine, contextlib.ExitStack() as stack:
        source, squares = engine.topic("source"), engine.topic("squares")
        inputs = source.producer("exclusive")
        seeds = itertools.count()
        living = [stack.enter_context(killable(work, path, next(seeds))) for _ in range(rivals)]
        while squares.next_offset < total:
            assert time.monotonic() < deadline, f"only {squares.next_offset} of {total}"
            done = source.next_offset
            if done < min(total, squares.next_offset + 50):
                inputs.send_many([b"%d" % number for number in range(done, min(total, done + 20))])
            time.sleep(dice.random() * 0.12)
            if dice.random() < (0.4 if squares.next_offset > done_before else 0.05):
                done_before = squares.next_offset
                living.pop(0).kill()
                living.append(stack.enter_context(killable(work, path, next(seeds))))
        for process in living:
            process.kill()
        assert values(squares) == expected
        assert cursor(engine) == total
        assert next(seeds) > 4
        assert engine.verify().ok


# ---- G3: interrupted ---------------------------------------------------------------------

# Where Python looks for signals: behind these instructions. Between others none can strike.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")
TRACED = tuple(
    os.path.join("exclusivelog", name)
    for name in (
        "transaction.py",
        "producer.py",
        "local/session.py",
        "local/log/appending.py",
        "local/storage/ledger.py",
    )
)


@functools.cache
def instructions(code: Any) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


MOMENTS = 150


class Interrupt:
    """Ctrl-C, in the main thread, at the n-th place in the library where it can strike."""

    def __init__(self, number: int) -> None:
        self.left, self.place = number, ""

    def run(self, call: Callable[[], Any]) -> None:
        """Run `call()`, and ignore any error."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # 3.12 asks once, as tracing begins, if one has it
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        last = ""

        def look(frame: Any, event: str, _: Any) -> Any:
            nonlocal last
            if event == "opcode":
                looked = last.startswith(LOOKS)
                last = instructions(frame.f_code).get(frame.f_lasti, "")
                if looked:
                    self._count(frame)
            return look

        frame.f_trace = look  # 3.13 takes the next line for a frame that is traced already
        frame.f_trace_opcodes = True
        return look

    def _count(self, frame: Any) -> None:
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            file = os.path.basename(frame.f_code.co_filename)
            self.place = f"{file}:{frame.f_code.co_name}:{frame.f_lineno}"
            os.kill(os.getpid(), signal.SIGINT)


@dataclass(frozen=True)
class Interrupted:
    """What became of a transaction that was interrupted, and of its producers."""

    place: str
    state: str
    found: tuple[bool, bool, bool]  # in topic a, in topic b, as a cursor
    queued: bool  # what was sent before is there
    then: tuple[str, ...]  # what came of the next send of each producer
    told: bool  # opened again, it says which id was the last


def interrupt_one(engine: xl.Engine, number: int) -> Interrupted | None:
    """A transaction that is interrupted at the n-th place in the main thread, and then at the
    n-th moment while that waits for the thread that commits; None if there are no more."""
    name = f"n{number}"
    topics = [engine.topic("a"), engine.topic("b")]
    starts = [topic.next_offset for topic in topics]
    producers = [topic.producer(name=name) for topic in topics]
    reader = engine.topic("source").reader(group=name)
    producers[0].send_async(b"queued")
    txn = engine.transaction()
    for producer in producers:
        producer.send(b"t", transaction=txn)
    txn.commit_cursor(reader)
    interrupt = Interrupt(number - MOMENTS)
    if number <= MOMENTS:
        interrupt.place = f"{number * 20} µs"
        struck_after(number * 20e-6, txn.commit)
    else:
        interrupt.run(txn.commit)
    until(lambda: txn.state != "unknown")  # it takes its course
    then = tuple(next_send(producer) for producer in producers)
    found = [
        [message.value for message in topic.reader(start)]
        for topic, start in zip(topics, starts, strict=True)
    ]
    there = (b"t" in found[0], b"t" in found[1], cursor(engine, name) is not None)
    reader.close()
    for producer in producers:
        producer.close()
    if not interrupt.place:
        return None
    told = all(
        says_its_last(topic, name, start) for topic, start in zip(topics, starts, strict=True)
    )
    return Interrupted(interrupt.place, txn.state, there, b"queued" in found[0], then, told)


def says_its_last(topic: xl.Topic, name: str, start: int) -> bool:
    last = max((message.sequence_id for message in topic.reader(start)), default=-1)
    with topic.producer(name=name) as producer:
        return bool(producer.last_sequence_id == last)


def next_send(producer: xl.Producer) -> str:
    try:
        producer.send(b"next", timeout=PATIENCE)  # for ever, where it is stuck
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return "sent"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> list[Interrupted]:
    """Every place in turn."""
    with xl.open(tmp_path_factory.mktemp("interrupted") / "log") as engine:
        found = list(
            itertools.takewhile(
                lambda one: one is not None,
                (interrupt_one(engine, number) for number in itertools.count(1)),
            )
        )
        assert engine.verify().ok
        return found


@pytest.mark.long
def test_g3_an_interrupt_anywhere_leaves_all_or_nothing(interrupted) -> None:
    """Ctrl-C at some two hundred moments and places of a commit: both messages and the cursor are
    there, or none of it is; `state` says which."""
    assert len(interrupted) > MOMENTS + 10
    assert {one.state for one in interrupted} - {"open"} == {"aborted", "committed"}
    for one in interrupted:
        assert len(set(one.found)) == 1, one
        assert one.queued, one
        assert one.found[0] == (one.state == "committed"), one


@pytest.mark.long
def test_b9_an_interrupt_leaves_no_producer_waiting_for_ever(interrupted) -> None:
    assert [one for one in interrupted if "WaitTimeoutError" in one.then] == []


def test_g2_behind_an_interrupt_the_next_message_is_no_duplicate(interrupted) -> None:
    assert [one for one in interrupted if "DuplicateSequenceError" in one.then] == []


@pytest.mark.long
def test_g2_a_program_that_was_interrupted_opens_its_producer_again_and_is_told(
    interrupted,
) -> None:
    assert [one for one in interrupted if not one.told] == []


# ---- a send that was meant to be in it ----------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_a_send_without_its_transaction_is_told_once(engine, topic, many) -> None:
    """By the producer that sends in the transaction of the block; the message is sent."""
    with topic.producer() as producer:
        for _ in range(2):
            with engine.transaction() as txn:
                producer.send(b"in", transaction=txn)
                with pytest.warns(UserWarning, match="topic 'orders': .* not in the trans") as told:
                    _ = producer.send_many([b"beside"]) if many else producer.send(b"beside")
                assert told[0].filename == __file__
                producer.send(b"again")
                producer.send_many([b"in", b"in"], transaction=txn)
        producer.send(b"after")
        assert type(producer) is xl.Producer
    once = [b"beside", b"again", b"in", b"in", b"in"]
    assert values(topic) == [*once, *once, b"after"]


def test_only_a_slip_is_told(engine, topic) -> None:
    """Not what other threads, other producers and other calls send, nor what comes before and
    after the block, or within one that is left by an error."""
    with topic.producer() as producer, topic.producer() as other, ThreadPoolExecutor(1) as pool:
        with engine.transaction() as txn:
            producer.send(b"1")
            producer.send(b"2", transaction=txn)
            other.send(b"3")
            pool.submit(producer.send, b"4").result(PATIENCE)
            producer.send_async(b"5").result(PATIENCE)
            assert producer.state == "open"
        producer.send(b"6")
        with contextlib.suppress(ZeroDivisionError), engine.transaction() as txn:
            producer.send(b"7", transaction=txn)
            raise ZeroDivisionError
        producer.send(b"8")
        plain = engine.transaction()
        producer.send(b"9", transaction=plain)
        producer.send(b"10")
        plain.commit()
        assert type(producer) is xl.Producer
    assert sorted(map(int, values(topic))) == [1, 2, 3, 4, 5, 6, 8, 9, 10]


@pytest.mark.rule("B4")
def test_a_send_that_is_refused_just_before_a_pause_ends_costs_no_topic(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pause had refused was taken for the loss of the topic, once the pause was over."""
    refused = LocalSession.refused

    def late(session: LocalSession, error: xl.ProducerFencedError) -> xl.ExclusiveLogError:
        session.resume()
        return refused(session, error)

    with topic.producer("exclusive") as producer:
        assert producer._sender.session.pause_for_transaction()
        monkeypatch.setattr(LocalSession, "refused", late)
        assert producer.send(b"x") == 0
        assert producer.state == "open"


def test_blocks_of_two_threads_end_each_by_itself(engine, topic) -> None:
    def work(number: int) -> None:
        for _ in range(20):
            with engine.transaction() as txn:
                barrier.wait(PATIENCE)
                producer.send(b"%d" % number, transaction=txn)
                barrier.wait(PATIENCE)

    barrier = threading.Barrier(2)
    with topic.producer() as producer:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, number) for number in range(2)]:
                done.result(PATIENCE)
        assert type(producer) is xl.Producer
    assert topic.next_offset == 40


def test_tasks_of_one_loop_do_not_answer_for_one_another(engine, topic) -> None:
    import asyncio

    async def inside() -> None:
        with engine.transaction() as txn:
            producer.send(b"in", transaction=txn)
            await asyncio.create_task(beside())
            with pytest.warns(UserWarning, match="not in the transaction"):
                producer.send(b"slip")

    async def beside() -> None:
        producer.send(b"beside")

    with topic.producer() as producer:
        asyncio.run(inside())
        assert type(producer) is xl.Producer


def test_a_producer_whose_class_changes_back_during_a_call_sends(topic: xl.Topic) -> None:
    """The transaction for which it had another class ends in another thread meanwhile."""
    with topic.producer() as producer:
        assert ProducerInTransaction.send(producer, b"x") == 0
        assert ProducerInTransaction.send_many(producer, [b"x"]) == range(1, 2)
