"""No caller starves another (rule K4): counted in transactions that come before a waiting send."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.log import appending
from exclusivelog.local.log.appending import Pauses
from exclusivelog.local.storage.ledger import Ledger
from testing.processes import PATIENCE, State, until, within

LARGE = bytes(140_000)
BATCHES = 5  # what else the machine does may disturb some of them


@pytest.fixture
def committed(engine: xl.Engine, topic: xl.Topic) -> Iterator[xl.Producer]:
    """A producer by which two threads commit transactions without a break."""
    producer, over = topic.producer("exclusive"), threading.Event()

    def commit() -> None:
        while not over.is_set():
            with engine.transaction() as txn:
                producer.send(b"t", transaction=txn)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=commit) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield producer
    over.set()
    for thread in threads:
        thread.join(PATIENCE)
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", ["send", "send_many", "send_async"])
def test_k4_a_send_waits_for_few_transactions_of_its_producer(
    committed: xl.Producer, topic: xl.Topic, kind: str
) -> None:
    """Counted in the log: when the thread of the send notices depends on how busy the machine is.
    Its turn in the interpreter is short: under `process`, no call gives that away."""
    send = {
        "send": lambda: committed.send(b"s"),
        "send_many": lambda: committed.send_many([b"s", b"s"]).start,
        "send_async": lambda: committed.send_async(b"s").result(),
    }[kind]

    def waited_for() -> int:
        begun = topic.next_offset
        return send() - begun

    check_middle(lambda: [within(waited_for) for _ in range(40)], 4)


def check_middle(batch: Callable[[], list[int]], most: int) -> list[int]:
    """The middle one of a batch is no more than `most`. Returns that batch."""
    for _ in range(BATCHES):
        before = batch()
        if sorted(before)[len(before) // 2] <= most:
            return before
    pytest.fail(f"{before}: more than {most}, again and again")


def test_k4_no_transaction_begins_before_a_send_that_waited_for_the_last_one(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the thread of that send takes to go on. The transactions are large, so that they
    are transactions of the tables, which pause their producers."""
    producer, over = topic.producer("exclusive"), threading.Event()
    wait, begin, begun, came = Pauses.wait, Pauses.begin, [0], list[int]()

    def commit() -> None:
        while not over.is_set():
            with engine.transaction() as txn:
                producer.send(LARGE, transaction=txn)

    def counted(pauses: Pauses) -> None:
        begun[0] += 1
        begin(pauses)

    def dawdle(pauses: Pauses, *args: Any) -> bool:
        found, seen = wait(pauses, *args), begun[0]
        if threading.get_ident() in pauses._due:
            over.wait(0.1)  # if transactions do not wait, some come
            came.append(begun[0] - seen)
        return found

    monkeypatch.setattr(appending, "TURN_SECONDS", PATIENCE)
    monkeypatch.setattr(Pauses, "begin", counted)
    monkeypatch.setattr(Pauses, "wait", dawdle)
    thread = threading.Thread(target=commit)
    thread.start()
    try:
        until(lambda: producer.send(b"s") >= 0 and len(came) >= 3)
    finally:
        over.set()
        thread.join(PATIENCE)
    assert set(came) == {0}


# ---- other calls beside transactions ------------------------------------------------------


@pytest.fixture
def beside(engine: xl.Engine) -> Iterator[list[int]]:
    """The count of transactions that four threads commit without a break, each by its own
    producer. They are large, so that they are transactions of the tables."""
    count, over = [0], threading.Event()
    producers = [engine.topic(f"t{number}").producer("exclusive") for number in range(4)]

    def commit(producer: xl.Producer) -> None:
        while not over.is_set():
            with engine.transaction() as txn:
                producer.send(LARGE, transaction=txn)
            count[0] += 1

    threads = [threading.Thread(target=commit, args=(each,)) for each in producers]
    for thread in threads:
        thread.start()
    until(lambda: count[0] > 10)
    yield count
    over.set()
    for thread in threads:
        thread.join(PATIENCE)


def check_turns(
    count: Callable[[], int], call: Callable[[], object], most: int, turns: Callable[[], int] = int
) -> None:
    """The call is made 15 times; in the middle, `most` operations of others come before it. If
    `turns` counts the transactions of this process, before each of those of the call."""

    def waited_for() -> int:
        seen, begun = count(), turns()
        within(call)
        return (count() - seen) // max(1, turns() - begun)

    before = check_middle(lambda: [waited_for() for _ in range(15)], most)
    assert max(before) <= 50 * most, before


CALLS = ("move", "grant", "checkpoint", "claim", "commit of a reader")


def calls(engine: xl.Engine, other: xl.Engine) -> dict[str, Callable[[], object]]:
    """Each of these takes locks that senders and transactions take, too."""
    topic = engine.topic("beside")
    topic.producer("exclusive", follow=False).send(b"m")
    turns, kept = [engine, other], []

    def move() -> None:
        turns.reverse()
        assert engine.unload("beside", to=turns[0].id, timeout=PATIENCE)[0].ok
        # Else it stays reserved, until the one before follows.
        kept.append(turns[0].topic("beside").producer("exclusive", follow=False))

    def commit() -> None:
        reader.seek("earliest")
        reader.read_next(timeout=0)
        reader.commit()

    reader = topic.reader(group="readers")
    return {
        "move": move,
        "commit of a reader": commit,
        "grant": lambda: engine.topic("granted").producer("exclusive_with_fencing"),
        "checkpoint": engine.ledger.checkpoint,
        "claim": lambda: engine.own({"resource": None}),
    }


@pytest.mark.rule("K4")
@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_k4_a_call_waits_for_few_transactions_of_others(engine, beside, name) -> None:
    with xl.open(engine.path, name="other") as other:
        check_turns(lambda: beside[0], calls(engine, other)[name], 12)


def send_on(state: State) -> None:
    """Send as fast as possible, until the process ends."""
    with state.topic.producer("exclusive") as producer:
        while True:
            producer.send(b"s")


@pytest.mark.rule("K4")
@pytest.mark.long
@pytest.mark.parametrize("name", [*CALLS, "transaction"])
def test_k4_a_call_waits_for_few_sends_of_another_process(path, worker, name, monkeypatch) -> None:
    """Its sends take the journal's mutex again at once. A call waits once for each transaction: a
    move for several, one after the other."""
    begun, transaction_of = [0], Ledger._transaction

    def counted(*args, **kwargs):
        begun[0] += 1
        return transaction_of(*args, **kwargs)

    monkeypatch.setattr(Ledger, "_transaction", counted)
    with xl.open(path) as engine, xl.open(path, name="other") as other:
        process = worker(topic="fast", durability="process")
        process.start(send_on)
        fast = engine.topic("fast")
        until(lambda: fast.stats().next_offset > 100)
        producer = engine.topic("in transactions").producer("exclusive")

        def transaction() -> None:
            with engine.transaction() as txn:
                producer.send(b"t", transaction=txn)

        call = {**calls(engine, other), "transaction": transaction}[name]
        check_turns(lambda: fast.stats().next_offset, call, 20_000, lambda: begun[0])
        process.kill()
