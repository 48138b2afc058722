"""What an abort, a failure or an interrupt of a transaction takes back (rule G11): its readers read
again what was not committed, and its producers count on as the log does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local import commits
from exclusivelog.local.storage import ledger
from exclusivelog.members import GroupMember
from testing.interrupts import Interrupts, Limit, raise_in
from testing.processes import PATIENCE, collect, until, within

# Python reports what is raised inside a finalizer, and pytest takes that for an error.
dropped = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# ---- producers ---------------------------------------------------------------------------


LARGE = b"l" * 200_000  # it goes into the tables


@pytest.mark.parametrize("value", [b"a", LARGE], ids=["framed", "large"])
def test_g11_after_an_exception_behind_the_commit_the_next_one_goes_through(
    engine, topic, monkeypatch, value
) -> None:
    """The transaction is in the log, `state` and `offsets` say so, and the same producer's next
    transaction is not taken for a duplicate."""
    producer = topic.producer("exclusive", name="p")
    place = commits.FramedAttempt.place
    txn = engine.transaction()
    producer.send(value, transaction=txn)

    def strike(self: Any, *args: Any) -> Any:
        if isinstance(self, commits.FramedAttempt):
            place(self, *args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Transaction, "waken", strike)
        patch.setattr(commits.FramedAttempt, "place", strike)
        with pytest.raises(MemoryError):
            within(txn.commit)
    assert txn.state == "committed"
    assert txn.offsets == {producer: range(1)}
    with engine.transaction() as txn:
        producer.send(b"b", transaction=txn)
    assert producer.send(b"c") == 2
    assert [message.value for message in topic.reader()] == [value, b"b", b"c"]


def test_g11_a_counter_that_was_left_behind_follows_the_log(engine, topic, monkeypatch) -> None:
    """Not even the acknowledgement was reached. The next commit learns from the log where to go on;
    a sequence id of the caller's own that is in the log already is still a duplicate."""
    producer = topic.producer("exclusive", name="p")
    with monkeypatch.context() as patch:
        patch.setattr(commits.TableAttempt, "_acknowledge", lambda self: None)
        with engine.transaction() as txn:
            producer.send(LARGE, transaction=txn)
    with engine.transaction() as txn:
        producer.send(b"b", transaction=txn)
    assert txn.offsets == {producer: range(1, 2)}
    assert producer.last_sequence_id == 1
    with pytest.raises(xl.DuplicateSequenceError), engine.transaction() as txn:
        producer.send(b"c", sequence_id=1, transaction=txn)
    assert txn.state == "aborted"
    assert topic.next_offset == 2


def check_values(topic: xl.Topic, sure: set[bytes], maybe: set[bytes]) -> None:
    """Everything that was acknowledged is there once, and nothing that was aborted."""
    found = [message.value for message in topic.reader()]
    assert len(found) == len(set(found)), "a message is doubled"
    assert sure <= set(found) <= sure | maybe


@dropped
@pytest.mark.parametrize("tries", [25, pytest.param(120, marks=pytest.mark.long)])
def test_g11_a_time_limit_in_a_thread_breaks_no_producer(engine, topic, tries) -> None:
    """What the interrupted transaction says afterwards is what the log has, and all later ones of
    the same producer go through."""
    producer = topic.producer("exclusive", name="p")
    made: list[tuple[Any, bytes]] = []

    def step(number: int) -> None:
        txn = engine.transaction()
        made.append((txn, b"%d" % number))
        producer.send(b"%d" % number, transaction=txn)
        txn.commit()

    interrupts = Interrupts(step, 0.006)
    interrupts.run(tries)
    assert interrupts.count > tries // 2
    with engine.transaction() as txn:  # waits for what still goes on
        producer.send(b"last", transaction=txn)
    until(lambda: not [one for one, _ in made if one.state == "unknown"])
    sure = {value for one, value in made if one.state == "committed"}
    check_values(topic, {*sure, b"last"}, set())
    assert producer.last_sequence_id == topic.next_offset - 1
    # Those that have committed for others end once none needs them.
    until(lambda: "exclusivelog-transaction" not in [it.name for it in threading.enumerate()])


@dropped
@pytest.mark.long
@pytest.mark.parametrize("kind", ["send", "large", "send_many", "send_async", "map", "state"])
def test_g11_a_time_limit_breaks_no_other_call_either(engine, topic, kind) -> None:
    producer = topic.producer("exclusive", name="p") if kind not in ("map", "state") else None
    shared: Any = None
    if kind == "map":
        shared = xl.SharedMap(topic)
    elif kind == "state":
        shared = xl.SharedState(topic, initial=list, apply=lambda state, op: [*state, op])
    sure: set[bytes] = set()

    def step(number: int) -> None:
        value = b"%d" % number + bytes(200_000 if kind == "large" else 0)
        if kind == "map":
            shared.put(str(number), number)
        elif kind == "state":
            shared.write(lambda state: [number])
        elif kind == "send_many":
            producer.send_many([value])
        elif kind == "send_async":
            producer.send_async(value).result()
        else:
            producer.send(value)
        sure.add(b"%d" % number)

    interrupts = Interrupts(step, 0.004)
    interrupts.run(150)
    assert interrupts.count > 50
    within(lambda: step(1000))
    everything = {b"%d" % number for number in range(150)}
    if kind == "map":
        assert sure <= {key.encode() for key in shared} <= everything | {b"1000"}
    elif kind == "state":
        found = shared.read(lambda state: [b"%d" % number for number in state])
        assert len(found) == len(set(found))
        assert sure <= set(found) <= everything | {b"1000"}
    else:
        producer.flush()
        found = [message.value.rstrip(b"\0") for message in topic.reader()]
        assert len(found) == len(set(found))
        assert sure <= set(found) <= everything | {b"1000"}
    if shared is not None:
        shared.close()


# ---- readers -----------------------------------------------------------------------------


class Failed(Exception):
    """What goes wrong in the block of a transaction."""


@pytest.fixture
def orders(engine) -> Iterator[xl.Topic]:
    topic = engine.topic("orders")
    with topic.producer() as producer:
        producer.send_many([b"%d" % number for number in range(5)])
    return topic


def billed(engine: xl.Engine) -> list[bytes]:
    """What is in the topic of invoices."""
    return [message.value for message in engine.topic("invoices").reader()]


@pytest.mark.parametrize("when", ["at once", "sent", "committed its cursor", "at the commit"])
@pytest.mark.parametrize("kind", ["one topic", "two topics", "iterates", "reads inside"])
def test_g11_each_order_is_billed_once_although_some_attempts_fail(
    engine, orders, kind, when
) -> None:
    """The documented loop. An attempt fails now and then, wherever it is by then; the program goes
    on with the same reader."""
    invoices = engine.topic("invoices").producer("exclusive")
    engine.topic("other")
    reader: Any = (
        engine.reader(["orders", "other"], group="g")
        if kind == "two topics"
        else orders.reader(group="g")
    )
    attempts = itertools.count()

    def bill(order: Any, txn: xl.Transaction) -> None:
        order = order or next(reader)
        message = order[1] if kind == "two topics" else order
        fails = next(attempts) % 2 == 0
        if fails and when == "at once":
            raise Failed
        invoices.send(message.value, transaction=txn)
        if fails and when == "sent":
            raise Failed
        txn.commit_cursor(reader)
        if fails and when == "committed its cursor":
            raise Failed
        if fails and when == "at the commit":
            invoices.send(b"", sequence_id=0, transaction=txn)

    with engine.transaction() as txn:
        invoices.send(b"first", transaction=txn)
    for order in reader if kind == "iterates" else itertools.repeat(None):
        if kind != "iterates" and not reader.has_message_available():
            break
        if kind == "two topics":
            order = next(reader)
        with contextlib.suppress(Failed, xl.DuplicateSequenceError), engine.transaction() as txn:
            bill(order, txn)
    assert billed(engine) == [b"first", b"0", b"1", b"2", b"3", b"4"]


@dropped
@pytest.mark.parametrize("large", [False, True], ids=["framed", "large"])
def test_g11_each_order_is_billed_once_although_a_signal_interrupts_at_any_moment(
    engine, large
) -> None:
    """A timer's handler raises in the thread of the transaction, also behind its commit."""
    count = 20 if large else 200
    orders = engine.topic("orders")
    with orders.producer() as producer:
        producer.send_many([b"%d " % number for number in range(count)])
    invoices = engine.topic("invoices").producer("exclusive")
    reader = orders.reader(group="g")
    armed, dice = [False], random.Random(3)
    interrupts = 0

    def interrupt(number: int, frame: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Limit

    def bill() -> None:
        with engine.transaction() as txn:
            invoices.send(next(reader).value + (LARGE if large else b""), transaction=txn)
            txn.commit_cursor(reader)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while reader.has_message_available():
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 1e-2 if large else 1e-3))
                bill()
                armed[0] = False
            except Limit:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts
    assert [int(bill[:4].split()[0]) for bill in billed(engine)] == list(range(count))


def test_g11_what_one_of_two_callers_gives_back_is_not_skipped_by_the_other(engine, orders) -> None:
    """Two threads read by one reader, in turn. The one that read first aborts."""
    reader = orders.reader(group="g")
    invoices = engine.topic("invoices").producer("exclusive")

    def first() -> None:
        with contextlib.suppress(Failed), engine.transaction():
            assert reader.read_next(0).value == b"0"
            hand_over.wait(PATIENCE)
            hand_over.wait(PATIENCE)
            raise Failed

    hand_over = threading.Barrier(2)
    thread = threading.Thread(target=first)
    thread.start()
    hand_over.wait(PATIENCE)
    txn = engine.transaction()
    invoices.send(reader.read_next(0).value, transaction=txn)
    hand_over.wait(PATIENCE)
    thread.join(PATIENCE)
    with pytest.raises(ValueError, match="has aborted"):
        txn.commit_cursor(reader)
    txn.abort()
    for order in reader:
        with engine.transaction() as txn:
            invoices.send(order.value, transaction=txn)
            txn.commit_cursor(reader)
    assert billed(engine) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("joins", [False, True], ids=["read for it", "part of it"])
@pytest.mark.parametrize("topics", ["one topic", "two topics"])
def test_g11_a_reader_that_resumes_goes_back_to_where_it_has_resumed(
    engine, orders, topics, joins
) -> None:
    """Not to where it would have begun if the group had not committed anything."""
    engine.topic("other")
    before = orders.reader(group="g")
    before.read_batch(2)
    before.commit()
    reader: Any = (
        engine.reader(["orders", "other"], group="g")
        if topics == "two topics"
        else orders.reader(group="g")
    )
    for _ in range(2):
        with contextlib.suppress(Failed), engine.transaction() as txn:
            assert value_of(next(reader)) == b"2"
            if joins:
                txn.commit_cursor(reader)
            raise Failed
        assert position(reader) == 2


@pytest.mark.parametrize("how", ["in a transaction", "of its own"])
@pytest.mark.parametrize("ends", ["commits", "aborts"])
def test_g11_no_commit_passes_what_an_open_transaction_of_another_caller_has_read(
    engine, orders, how, ends
) -> None:
    reader = orders.reader(group="g")
    invoices = engine.topic("invoices").producer("exclusive")
    txn = engine.transaction()
    invoices.send(next(reader).value, transaction=txn)

    def commit() -> None:
        if how == "of its own":
            reader.commit()
        else:
            commit_position(engine, reader)

    def read_and_commit() -> bytes:
        value: bytes = next(reader).value
        commit()
        return value

    with pytest.raises(ValueError, match="of another thread or task"):
        within(read_and_commit)
    assert group_position(engine) is None
    if ends == "aborts":
        txn.abort()
        assert within(read_and_commit) == b"0"
        assert (group_position(engine), billed(engine)) == (1, [])
    elif how == "in a transaction":  # that has aborted, and with it what this one had read then
        assert position(reader) == 1
        txn.commit_cursor(reader)
        txn.commit()
        assert (group_position(engine), billed(engine)) == (1, [b"0"])
        assert within(read_and_commit) == b"1"
    else:
        txn.commit_cursor(reader)
        txn.commit()
        within(commit)
        assert (group_position(engine), billed(engine)) == (2, [b"0"])


def test_g11_a_read_of_another_caller_hides_no_abort_after_a_commit(engine, orders) -> None:
    """That commit was one of the reader's own."""
    reader = orders.reader(group="g")
    next(reader)
    reader.commit()
    txn = engine.transaction()
    assert next(reader).value == b"1"
    assert within(lambda: next(reader).value) == b"2"
    txn.abort()
    assert next(reader).value == b"1"


@pytest.mark.parametrize("end", ["abort", "drop"])
def test_g11_what_was_read_after_a_commit_within_a_transaction_is_read_again(
    engine, reader, end
) -> None:
    """The commit is one of the reader's own, which is not part of the transaction."""
    txn = engine.transaction()
    next(reader)
    reader.commit()
    assert value_of(next(reader)) == b"1"
    if end == "abort":
        txn.abort()
    del txn
    collect()
    assert value_of(next(reader)) == b"1"


@pytest.mark.parametrize("end", ["abort", "drop"])
@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "has read"])
def test_g11_a_transaction_within_another_one_takes_back_what_it_has_read(
    engine, reader, reads, end
) -> None:
    """And nothing that the one around it has read."""
    invoices = engine.topic("invoices").producer("exclusive")
    with engine.transaction() as outer:
        invoices.send(value_of(next(reader)) if reads else b"audit", transaction=outer)
        inner = engine.transaction()
        invoices.send(value_of(next(reader)), transaction=inner)
        if end == "abort":
            inner.abort()
        del inner
        collect()
        if reads:
            invoices.send(value_of(next(reader)), transaction=outer)
            outer.commit_cursor(reader)
    assert billed(engine) == ([b"0", b"1"] if reads else [b"audit"])
    assert value_of(next(reader)) == (b"2" if reads else b"0")


def test_g11_readers_note_no_callers_that_have_ended(path) -> None:
    """Whether or not anything is committed."""

    async def main() -> tuple[int, int]:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"%d" % number for number in range(300)])
            reader = await topic.reader(group="g")

            async def read(number: int) -> None:
                if number % 2:
                    await reader.read_next(0)
                    return
                async with engine.transaction():
                    await reader.read_next(0)

            for number in range(300):
                await asyncio.create_task(read(number))
            collect()
            return len(reader.sync.spans), len(reader.sync.alone)

    spans, alone = asyncio.run(main())
    assert spans == 0
    assert alone <= 1


class Clerk:
    """A thread that bills orders in transactions, and gives some of them up."""

    def __init__(self, engine: xl.Engine, reader: Any, invoices: xl.Producer) -> None:
        self._engine, self._reader, self._invoices = engine, reader, invoices
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._open: list[xl.Transaction] = []  # one, and one within that

    def do(self, step: str) -> None:
        """A step, unless it cannot be done now. A clerk that is refused aborts."""
        self._thread.submit(self._do, step).result(PATIENCE)

    def _do(self, step: str) -> None:
        try:
            getattr(self, f"_{step}")()
        except ValueError:
            self._give_up()

    def _begin(self) -> None:
        if len(self._open) < 2:
            self._open.append(self._engine.transaction())

    def _read(self) -> None:
        if self._open and self._reader.has_message_available():
            self._invoices.send(value_of(next(self._reader)), transaction=self._open[-1])

    def _begin_late(self) -> None:
        if not self._open and self._reader.has_message_available():
            value = value_of(next(self._reader))
            self._begin()
            self._invoices.send(value, transaction=self._open[-1])

    def _join(self) -> None:
        if self._has_sent:
            self._open[-1].commit_cursor(self._reader)

    def _commit(self) -> None:
        if self._has_sent:
            self._join()
            self._open.pop().commit()

    @property
    def _has_sent(self) -> bool:
        """In its only transaction. Without, it would commit past what it gave back before."""
        return len(self._open) == 1 and bool(self._open[0]._parts.puts)

    def _abort(self) -> None:
        if self._open:
            self._open.pop().abort()

    def _drop(self) -> None:
        if self._open:
            self._open.pop()

    def _give_up(self) -> None:
        while self._open:
            self._open.pop().abort()

    def end(self) -> None:
        """Go home."""
        self.do("give_up")
        self._thread.shutdown()


STEPS = ["begin", "begin_late", "read", "read", "join", "commit", "abort", "drop"]


@pytest.mark.parametrize("topics", ["one topic", "two topics"])
@pytest.mark.parametrize("turns", [15, pytest.param(120, marks=pytest.mark.long)])
def test_g11_each_order_is_billed_once_whatever_several_threads_do(engine, topics, turns) -> None:
    """They share a reader, take turns in any order, and have transactions within others."""
    orders = engine.topic("orders").producer()
    others = engine.topic("other").producer()
    invoices = engine.topic("invoices").producer("exclusive")
    sent = 0
    for turn in range(turns):
        dice = random.Random(turn)
        reader: Any = (
            engine.reader(["orders", "other"], group="g")
            if topics == "two topics"
            else engine.topic("orders").reader(group="g")
        )
        clerks = [Clerk(engine, reader, invoices) for _ in range(3)]
        for _ in range(8):
            both = [orders, others] if topics == "two topics" else [orders]
            dice.choice(both).send(b"%d" % sent)
            sent += 1
        steps = [(dice.choice(clerks), dice.choice(STEPS)) for _ in range(40)]
        for clerk, step in steps:
            clerk.do(step)
        for clerk in clerks:
            clerk.end()
        while reader.has_message_available():
            with engine.transaction() as txn:
                invoices.send(value_of(next(reader)), transaction=txn)
                txn.commit_cursor(reader)
        values = sorted(map(int, billed(engine)))
        assert values == list(range(sent)), (turn, [(clerks.index(c), s) for c, s in steps])
        reader.close()


@pytest.mark.parametrize("whose", ["another thread", "the same thread"])
@pytest.mark.parametrize("ends", ["commits", "aborts"])
def test_g11_an_abort_takes_no_reader_back_before_a_position_that_is_about_to_be_committed(
    engine, orders, whose, ends
) -> None:
    """What that transaction has sent would be read and sent once more."""
    reader = orders.reader(group="g")
    invoices = engine.topic("invoices").producer("exclusive")
    with concurrent.futures.ThreadPoolExecutor(1) as other:

        def first(call: Callable[[], Any]) -> Any:
            return other.submit(call).result(PATIENCE) if whose == "another thread" else call()

        begun = first(engine.transaction) if whose == "the same thread" else None
        assert first(lambda: next(reader)).value == b"0"
        txn = engine.transaction()
        invoices.send(next(reader).value, transaction=txn)
        txn.commit_cursor(reader)
        first(lambda: (begun or engine.transaction()).abort())
        later = first(engine.transaction)
        assert first(lambda: next(reader)).value == b"2"
        if ends == "commits":
            txn.commit()
            first(lambda: later.commit_cursor(reader))
            first(later.commit)
            assert (group_position(engine), billed(engine)) == (3, [b"1"])
        else:
            txn.abort()
            first(later.abort)
            assert next(reader).value == b"0"


def test_g11_a_caller_that_waits_is_one_although_another_commits_meanwhile(engine, orders) -> None:
    reader = orders.reader(group="g")
    reader.read_batch(5)

    def wait() -> None:
        with contextlib.suppress(Failed), engine.transaction():
            assert reader.read_next(PATIENCE).value == b"5"
            raise Failed

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: bool(reader.spans))
    with engine.transaction() as txn:
        txn.commit_cursor(reader)
    orders.producer().send(b"5")
    thread.join(PATIENCE)
    assert reader.read_next(0).value == b"5"


def test_g11_nobody_is_told_an_outcome_before_there_is_one(engine, orders, monkeypatch) -> None:
    """The garbage collector, or another thread, looks at a transaction that begins to commit."""
    reader, looks = orders.reader(group="g"), GroupMember._awaits
    told = []

    def awaits(self: Any, transaction: Any) -> None:
        told.append(within(lambda: transaction.state))
        looks(self, transaction)

    monkeypatch.setattr(GroupMember, "_awaits", awaits)
    with engine.transaction() as txn:
        reader.read_next(0)
        txn.commit_cursor(reader)
    assert (told, txn.state, reader.position) == (["unknown"], "committed", 1)


def test_g11_an_interrupt_before_the_commit_takes_the_readers_beside_back(
    engine, orders, monkeypatch
) -> None:
    reader, beside = orders.reader(group="g"), orders.reader(group="beside")
    awaits = GroupMember._awaits

    def interrupted(self: Any, transaction: Any) -> None:
        awaits(self, transaction)
        raise Limit

    def step() -> None:
        with engine.transaction() as txn:
            beside.read_next(0)
            reader.read_next(0)
            txn.commit_cursor(reader)

    with monkeypatch.context() as patch:
        patch.setattr(GroupMember, "_awaits", interrupted)
        with pytest.raises(Limit):
            step()
    assert reader.position == 0
    assert [reader.read_next(0).offset, beside.read_next(0).offset] == [0, 0]


def test_g11_after_an_abort_the_position_is_the_one_from_before(engine, orders) -> None:
    reader = orders.reader(group="g")
    for _ in range(2):
        with contextlib.suppress(Failed), engine.transaction() as txn:
            assert reader.read_next(0).offset == 0
            txn.commit_cursor(reader)
            raise Failed
        assert reader.position == 0
    with engine.transaction() as txn:
        reader.read_batch(2)
        txn.commit_cursor(reader)
        assert reader.read_next(0).offset == 2  # it is not part of the transaction
    assert reader.position == 3
    txn = engine.transaction()
    reader.seek(4)
    reader.read_next(0)
    txn.commit_cursor(reader)
    txn.abort()
    assert reader.position == 4


def test_g11_an_abort_moves_no_reader_of_others(engine, orders) -> None:
    """One that commits by itself, one of another thread, one that belongs to an outer transaction,
    and one whose message is committed by the next transaction after all."""
    alone, outer, elsewhere = (orders.reader(group=name) for name in "abc")
    invoices = engine.topic("invoices").producer("exclusive")
    alone.read_next(0)
    alone.commit()
    alone.read_next(0)
    within(lambda: elsewhere.read_next(0))

    def fail() -> None:
        with contextlib.suppress(Failed), engine.transaction() as txn:
            invoices.send(b"audit", transaction=txn)
            raise Failed

    with engine.transaction() as txn:
        invoices.send(outer.read_next(0).value, transaction=txn)
        fail()
        invoices.send(outer.read_next(0).value, transaction=txn)
        txn.commit_cursor(outer)
    value = outer.read_next(0).value
    fail()
    with engine.transaction() as txn:
        invoices.send(value, transaction=txn)
        txn.commit_cursor(outer)
    assert billed(engine) == [b"0", b"1", b"2"]
    assert (alone.position, elsewhere.position, outer.position) == (2, 1, 3)


@pytest.mark.parametrize("stored", [True, False], ids=["behind the commit", "before it"])
@pytest.mark.parametrize("topics", ["one topic", "two topics"])
def test_g11_a_commit_of_a_reader_s_own_that_was_interrupted_is_known_by_its_outcome(
    engine, orders, monkeypatch, topics, stored
) -> None:
    engine.topic("other")
    reader: Any = (
        engine.reader(["orders", "other"], group="g")
        if topics == "two topics"
        else orders.reader(group="g")
    )
    commit = reader.membership.commit

    def interrupted(positions: Any) -> None:
        if stored:
            commit(positions)
        raise Limit

    reader.read_next(0)
    with monkeypatch.context() as patch:
        patch.setattr(reader.membership, "commit", interrupted)
        with pytest.raises(Limit):
            reader.commit()
    with contextlib.suppress(Failed), engine.transaction():
        raise Failed
    reader.read_next(0)
    found = reader.positions["orders"] if topics == "two topics" else reader.position
    assert found == (2 if stored else 1)


def test_g11_a_commit_of_a_reader_s_own_may_be_seen_by_another_thread(
    engine, orders, monkeypatch
) -> None:
    """As in asyncio, where another task reads by the same reader meanwhile."""
    reader = orders.reader(group="g")
    reader.read_next(0)
    commit = reader.membership.commit

    def seen(positions: Any) -> None:
        reader.read_next(0)
        commit(positions)
        reader.read_next(0)

    monkeypatch.setattr(reader.membership, "commit", seen)
    reader.commit()
    assert (reader.position, reader.membership.positions([reader.topic_id])) == (
        3,
        {reader.topic_id: 1},
    )


def test_g11_a_reader_waits_for_the_commit_that_an_interrupt_has_left(
    engine, orders, monkeypatch
) -> None:
    """Ctrl-C ends only the wait. The next read shows whether the position was committed."""
    invoices = engine.topic("invoices").producer("exclusive")
    reader = orders.reader(group="g")
    reached, go_on = threading.Event(), threading.Event()

    def stop(self: Any) -> None:
        reached.set()
        go_on.wait(PATIENCE)
        raise MemoryError

    monkeypatch.setattr(commits.TableAttempt, "write", stop)
    states = []

    def commit() -> None:
        with contextlib.suppress(Limit), engine.transaction() as txn:
            states.append(txn)
            invoices.send(reader.read_next(0).value + LARGE, transaction=txn)
            txn.commit_cursor(reader)

    thread = threading.Thread(target=commit)
    thread.start()
    assert reached.wait(PATIENCE)
    raise_in(thread)
    thread.join(PATIENCE)
    assert states[0].state == "unknown"
    threading.Timer(0.1, go_on.set).start()
    assert within(lambda: reader.read_next(0).offset) == 0
    assert states[0].state == "aborted"


def test_g11_tasks_share_a_thread_but_no_positions(path) -> None:
    async def main() -> tuple[list[int], int]:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"a", b"b", b"c"])
                mine, theirs = topic.reader(group="mine"), topic.reader(group="theirs")
                await mine, await theirs
                await asyncio.create_task(theirs.read_next(0))
                found = []
                for _ in range(2):
                    with contextlib.suppress(Failed):
                        async with engine.transaction() as txn:
                            found.append((await mine.read_next(0)).offset)
                            await producer.send(b"x", transaction=txn)
                            raise Failed
                return found, theirs.position

    assert asyncio.run(main()) == ([0, 0], 1)


# ---- transactions that end without a word --------------------------------------------------


@pytest.fixture(params=["one topic", "two topics", "of a role"])
def reader(request, engine, orders) -> Any:
    """A reader of the group "g", and its part of `orders`."""
    if request.param == "two topics":
        engine.topic("other")
        return engine.reader(["orders", "other"], group="g")
    if request.param == "of a role":
        return engine.role("billing", groups={"g": ["orders"]}).reader("orders")
    return orders.reader(group="g")


def value_of(found: Any) -> bytes:
    """Of a message, or of a topic's name and a message."""
    value: bytes = (found[1] if isinstance(found, tuple) else found).value
    return value


def position(reader: Any) -> int:
    at: int = reader.positions["orders"] if isinstance(reader, xl.GroupReader) else reader.position
    return at


def group_position(engine: xl.Engine) -> int | None:
    """Where the group "g" continues with the orders."""
    return next(each.position for each in engine.groups() if each.topic == "orders")


@pytest.mark.parametrize("when", ["at once", "sent", "committed its cursor"])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "in a cycle"])
def test_g11_each_order_is_billed_once_although_transactions_are_dropped(
    engine, reader, when, kept
) -> None:
    """Without `with`, an exception drops the transaction. If it is in a cycle, it stays until
    garbage is collected."""
    invoices = engine.topic("invoices").producer("exclusive")
    attempts = itertools.count()

    def bill() -> None:
        txn = engine.transaction()
        cycle = [txn] if kept else []
        cycle.append(cycle)  # type: ignore[arg-type]
        order, fails = next(reader), next(attempts) % 2 == 0
        if fails and when == "at once":
            raise Failed
        invoices.send(value_of(order), transaction=txn)
        if fails and when == "sent":
            raise Failed
        txn.commit_cursor(reader)
        if fails:
            raise Failed
        txn.commit()

    while reader.has_message_available():
        with contextlib.suppress(Failed):
            bill()
        collect()
    assert billed(engine) == [b"0", b"1", b"2", b"3", b"4"]
    assert group_position(engine) == 5


def test_g11_a_dropped_transaction_takes_its_reader_back_whatever_comes_next(
    engine, reader
) -> None:
    """The position says so at once; a commit without a read does not pass the message either. A
    transaction cannot have the position before a read: it may have sent what is read again."""
    txn = engine.transaction()
    value_of(next(reader))
    txn.commit_cursor(reader)
    del txn
    collect()
    assert position(reader) == 0
    reader.commit()
    assert group_position(engine) == 0
    value_of(next(reader))
    txn = engine.transaction()
    txn.commit_cursor(reader)
    del txn
    collect()
    txn = engine.transaction()
    with pytest.raises(ValueError, match="read again"):
        txn.commit_cursor(reader)
    txn.abort()
    assert (group_position(engine), position(reader)) == (0, 0)


def test_g11_garbage_takes_no_reader_back_for_a_later_transaction(engine, orders) -> None:
    """The same caller reads for its next transaction by then."""
    reader = orders.reader(group="g")
    cycle: list[Any] = [engine.transaction()]
    cycle.append(cycle)
    with engine.transaction() as txn:
        values = [next(reader).value]
        del cycle
        collect()
        values.append(next(reader).value)
        txn.commit_cursor(reader)
    assert (values, reader.position) == ([b"0", b"1"], 2)


def test_g11_tasks_drop_transactions_too(path) -> None:
    async def bill(engine: aio.Engine, reader: aio.Reader, out: aio.Producer, fails: bool) -> None:
        txn = engine.transaction()
        await out.send((await reader.read_next(0)).value, transaction=txn)
        if fails:
            raise Failed
        txn.commit_cursor(reader)
        await txn.commit()

    async def main() -> list[bytes]:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with topic.producer() as producer:
                await producer.send_many([b"0", b"1", b"2"])
            reader = await topic.reader(group="g")
            out = await engine.topic("invoices").producer("exclusive")
            for number in range(6):
                with contextlib.suppress(Failed):
                    await bill(engine, reader, out, number % 2 == 0)
                collect()
            return [m.value async for m in await engine.topic("invoices").reader()]

    assert asyncio.run(main()) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("end", ["commit", "abort", "drop"])
def test_g11_two_open_transactions_do_not_share_a_reader(engine, reader, end) -> None:
    """The second one is refused, and so is a commit of the reader's own; what was read for it is
    read again, whatever becomes of the first one."""
    invoices = engine.topic("invoices").producer("exclusive")
    first = engine.transaction()
    invoices.send(value_of(next(reader)), transaction=first)
    first.commit_cursor(reader)
    second = engine.transaction()
    invoices.send(value_of(next(reader)), transaction=second)
    with pytest.raises(ValueError, match="is part of another open transaction"):
        second.commit_cursor(reader)
    second.abort()
    with pytest.raises(ValueError, match="is part of another open transaction"):
        reader.commit()
    assert group_position(engine) is None
    if end == "commit":
        first.commit()
    elif end == "abort":
        first.abort()
    del first
    collect()
    while reader.has_message_available():
        with engine.transaction() as txn:
            invoices.send(value_of(next(reader)), transaction=txn)
            txn.commit_cursor(reader)
    assert billed(engine) == [b"0", b"1", b"2", b"3", b"4"]
    assert group_position(engine) == 5


def test_g11_a_transaction_may_take_a_later_position_of_its_reader(engine, reader) -> None:
    with engine.transaction() as txn:
        for _ in range(3):
            next(reader)
            txn.commit_cursor(reader)
    assert (group_position(engine), position(reader)) == (3, 3)


@pytest.mark.parametrize("how", ["ends", "drops"])
def test_g11_a_program_may_end_with_an_open_transaction(path, how) -> None:
    """Python then drops it, perhaps after the modules of the library. Nothing is printed."""
    program = f"""
import exclusivelog as xl
engine = xl.open({path!r})
topic = engine.topic("orders")
topic.producer().send_many([b"0", b"1"])
reader = topic.reader(group="g")
txn = engine.transaction()
next(reader)
txn.commit_cursor(reader)
cycle = [txn, engine.transaction()]
cycle.append(cycle)
if {how!r} == "drops":
    engine.close()
    del txn, cycle
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_g11_an_abort_does_not_depend_on_what_other_threads_begin(engine) -> None:
    """Each abort looks for the readers that have to go back among those of all threads."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            engine.transaction().abort()

    def count_aborts() -> None:
        for _ in range(1000):
            engine.transaction().abort()
        stop.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            others = [pool.submit(work) for _ in range(2)]
            try:
                pool.submit(count_aborts).result(PATIENCE)
            finally:
                stop.set()
            for each in others:
                each.result(PATIENCE)
    finally:
        sys.setswitchinterval(interval)


def test_g11_an_interrupted_batch_of_two_topics_is_read_again_from_where_it_went_back(
    engine, orders, monkeypatch
) -> None:
    engine.topic("other")
    reader = engine.reader(["orders", "other"], group="g")
    with contextlib.suppress(Failed), engine.transaction():
        next(reader)
        next(reader)
        raise Failed
    take, reads = reader._take, itertools.count(1)

    def interrupted() -> Any:
        if next(reads) == 2:
            raise Limit
        return take()

    monkeypatch.setattr(reader, "_take", interrupted)
    with pytest.raises(Limit):
        reader.read_batch(5)
    monkeypatch.undo()
    assert [message.offset for _, message in reader.read_batch(5)] == [0, 1, 2, 3, 4]


def test_g11_an_interrupt_within_commit_cursor_takes_the_reader_back(
    engine, reader, monkeypatch
) -> None:
    """The transaction has the position already, and the reader does not know it yet."""

    def interrupted(self: Any, transaction: Any) -> None:
        raise Limit

    txn = engine.transaction()
    next(reader)
    with monkeypatch.context() as patch:
        patch.setattr(type(reader), "_joins", interrupted)
        with pytest.raises(Limit):
            txn.commit_cursor(reader)
    txn.abort()
    next(reader)
    assert position(reader) == 1


@pytest.mark.parametrize("reads", ["behind its begin", "before its begin", "before, and keeps it"])
@pytest.mark.parametrize("when", ["at once", "sent", "committed its cursor"])
def test_g11_each_order_is_billed_once_although_a_variable_keeps_transactions(
    engine, reader, reads, when
) -> None:
    """In a loop without a function, the variable drops a transaction when the next one begins:
    perhaps behind the next read. Then that one's messages are read again, too."""
    invoices = engine.topic("invoices").producer("exclusive")
    attempts, txn, order = itertools.count(), None, None
    while reader.has_message_available() or order is not None:
        try:
            if reads == "behind its begin":
                txn = engine.transaction()
            if order is None or reads != "before, and keeps it":
                order = next(reader)
            if reads != "behind its begin":
                txn = engine.transaction()
            fails = next(attempts) in (0, 3)
            if fails and when == "at once":
                raise Failed
            invoices.send(value_of(order), transaction=txn)
            if fails and when == "sent":
                raise Failed
            txn.commit_cursor(reader)
            if fails:
                raise Failed
            txn.commit()
            order = None
        except ValueError:
            txn.abort()
            order = None
        except Failed:
            if reads != "before, and keeps it":
                order = None
    assert billed(engine) == [b"0", b"1", b"2", b"3", b"4"]
    assert group_position(engine) == 5


@pytest.mark.parametrize("ends", ["committed", "open"])
def test_g11_garbage_takes_no_reader_back_that_a_later_transaction_reads(
    engine, orders, ends
) -> None:
    reader = orders.reader(group="g")
    cycle: list[Any] = [engine.transaction()]
    cycle.append(cycle)
    later = engine.transaction()
    offsets = [next(reader).offset]
    if ends == "committed":
        later.commit()
    del cycle
    collect()
    assert [*offsets, next(reader).offset] == [0, 1]


def test_g11_a_dropped_transaction_takes_nothing_from_the_one_around_it(engine, orders) -> None:
    reader = orders.reader(group="g")
    invoices = engine.topic("invoices").producer("exclusive")
    with engine.transaction() as outer:
        invoices.send(next(reader).value, transaction=outer)
        inner = engine.transaction()
        invoices.send(b"dropped", transaction=inner)
        del inner
        invoices.send(next(reader).value, transaction=outer)
        outer.commit_cursor(reader)
    assert billed(engine) == [b"0", b"1"]


def test_g11_a_commit_whose_reader_does_not_know_it_tells_it(engine, reader, monkeypatch) -> None:
    txn = engine.transaction()
    next(reader)
    with monkeypatch.context() as patch:
        patch.setattr(type(reader), "_joins", lambda self, transaction: None)
        txn.commit_cursor(reader)
    txn.commit()
    with contextlib.suppress(Failed), engine.transaction():
        next(reader)
        raise Failed
    next(reader)
    assert (group_position(engine), position(reader)) == (1, 2)


@pytest.fixture
def held_garbage(engine) -> Iterator[Callable[[], Any]]:
    """Begins a transaction that stays after it is dropped, until garbage is collected."""

    def begin() -> Any:
        cycle: list[Any] = [engine.transaction()]
        cycle.append(cycle)
        return cycle[0]

    collect()
    gc.disable()
    try:
        yield begin
    finally:
        gc.enable()


def commit_position(engine: xl.Engine, reader: Any) -> None:
    with engine.transaction() as txn:
        txn.commit_cursor(reader)


@pytest.mark.parametrize("reads", [True, False], ids=["reads on", "reads nothing more"])
@pytest.mark.parametrize("by", ["a transaction", "itself"])
def test_g11_garbage_takes_no_reader_back_that_was_committed_since(
    engine, reader, held_garbage, by, reads
) -> None:
    """Nor does it keep the position from the next transaction."""
    garbage = held_garbage()
    value_of(next(reader))
    del garbage
    if by == "a transaction":
        commit_position(engine, reader)
    else:
        reader.commit()
    if reads:
        value_of(next(reader))
    collect()
    with engine.transaction() as txn:
        txn.commit_cursor(reader)
    assert group_position(engine) == position(reader) == 1 + reads


def test_g11_no_other_thread_commits_past_what_garbage_has_read(
    engine, reader, held_garbage
) -> None:
    """It has not been collected yet, so its program may still commit it."""
    garbage = held_garbage()
    value_of(next(reader))
    del garbage
    with pytest.raises(ValueError, match="of another thread or task"):
        within(lambda: commit_position(engine, reader))
    collect()
    assert within(lambda: value_of(next(reader))) == b"0"


@pytest.mark.parametrize("joins", [False, True], ids=["read for it", "part of it"])
def test_g11_garbage_takes_no_reader_back_that_another_thread_has_sought(
    engine, reader, held_garbage, joins
) -> None:
    garbage = held_garbage()
    value_of(next(reader))
    if joins:
        garbage.commit_cursor(reader)
    del garbage

    def go_on() -> list[bytes]:
        reader.seek(2)
        values = [value_of(next(reader))]
        collect()
        return [*values, value_of(next(reader))]

    assert within(go_on) == [b"2", b"3"]


def test_g11_garbage_takes_back_what_was_read_for_it_and_nobody_has_moved(
    engine, reader, held_garbage
) -> None:
    garbage = held_garbage()
    value_of(next(reader))
    garbage.commit_cursor(reader)
    del garbage
    value_of(next(reader))
    collect()
    assert position(reader) == 0
    assert value_of(next(reader)) == b"0"


@pytest.mark.parametrize("before", ["read", "read and committed"])
@pytest.mark.parametrize("where", ["this thread", "another thread"])
def test_g11_a_reader_that_was_read_before_is_taken_back_too(engine, reader, before, where) -> None:
    """By a thread that hands it on to another one, or by a program that commits what it skips."""
    invoices = engine.topic("invoices").producer("exclusive")
    value_of(next(reader))
    if before == "read and committed":
        reader.commit()

    def bill(fails: bool) -> None:
        with contextlib.suppress(Failed), engine.transaction() as txn:
            invoices.send(value_of(next(reader)), transaction=txn)
            if fails:
                raise Failed
            txn.commit_cursor(reader)

    for fails in (True, False):
        if where == "this thread":
            bill(fails)
        else:
            within(lambda fails=fails: bill(fails))
    assert billed(engine) == ([b"0"] if before == "read" else [b"1"])


def test_g11_a_reader_that_another_task_has_read_before_is_taken_back_too(path) -> None:
    async def bill(engine: aio.Engine, reader: aio.Reader, out: aio.Producer, fails: bool) -> None:
        with contextlib.suppress(Failed):
            async with engine.transaction() as txn:
                await out.send((await reader.read_next(0)).value, transaction=txn)
                if fails:
                    raise Failed
                txn.commit_cursor(reader)

    async def main() -> list[bytes]:
        async with aio.open(path) as engine:
            async with engine.topic("orders").producer() as producer:
                await producer.send_many([b"0", b"1", b"2"])
            reader = await engine.topic("orders").reader(group="g")
            out = await engine.topic("invoices").producer("exclusive")
            await reader.read_next(0)
            for fails in (True, False, True, False):
                await asyncio.create_task(bill(engine, reader, out, fails))
            return [m.value async for m in await engine.topic("invoices").reader()]

    assert asyncio.run(main()) == [b"0", b"1"]
