"""The compiled path: appends, the comparison of epochs and promotions pass through `_core`.

Each of them counts there what it decides. A ledger that went around it would leave the counters
where they are, and one that did not obey it would not change its mind when it does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local import records
from exclusivelog.local.records import U64
from exclusivelog.local.shm.slots import SLOT_SIZE, SLOTS, WAKE_UPS
from testing.processes import PATIENCE, State, Worker, hang, until

SHARED, EXCLUSIVE = "shared", "exclusive"
WAIT, FENCING = "wait_for_exclusive", "exclusive_with_fencing"


def test_d_the_core_is_compiled() -> None:
    assert Path(_core.__file__).suffix == ".so"
    for part in (_core.select, _core.delay, _core.eligible_at, _core.passed):
        assert type(part).__name__ in ("cython_function_or_method", "builtin_function_or_method")
    for kind in (_core.Journal, _core.Appender, _core.TopicRow, _core.Selection):
        with pytest.raises(TypeError):  # no code can replace it
            kind.__new__ = None  # type: ignore[method-assign]


# ---- promotions --------------------------------------------------------------------------


def own_rows(rows: Any, topic: int) -> list[tuple[bytes, bytes]]:
    return [row for row in rows if row[0].startswith(U64.pack(topic))]


class Broken(Exception):
    """What a replaced selection raises."""


def refuse_to_select(*args: Any, **facts: Any) -> Any:
    raise Broken


def released(topic: xl.Topic, owner: xl.Producer) -> None:
    owner.close()


def fenced_and_released(topic: xl.Topic, owner: xl.Producer) -> None:
    with topic.producer(FENCING):
        topic.producer_async(WAIT)


def asked_for(topic: xl.Topic, owner: xl.Producer) -> None:
    owner.close()
    topic.producer(WAIT, timeout=0.1)


WAYS = (released, fenced_and_released, asked_for)


@pytest.mark.parametrize("way", WAYS)
def test_d4_every_promotion_is_selected_by_the_core(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, way: Callable[..., Any]
) -> None:
    """No waiter is promoted while the selection is broken, whatever frees the topic."""
    owner = topic.producer(EXCLUSIVE)
    waiter = topic.producer_async(WAIT)
    with monkeypatch.context() as patch:
        patch.setattr(_core, "select", refuse_to_select)
        with pytest.raises(Broken):
            way(topic, owner)
        now = topic.owner  # later, the engine promotes one after all
    assert now is None or now.access_mode is not xl.AccessMode.WAIT_FOR_EXCLUSIVE
    del waiter


def test_e3_the_waiter_of_a_hand_over_is_selected_by_the_core(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = topic.producer(EXCLUSIVE)
    with xl.open(path, name="destination") as other:
        waiter = other.topic("orders").producer_async(WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(_core, "select", refuse_to_select)
            [move] = topic.engine.unload("orders", to=other.id, timeout=0.3)
            assert not move.ok
            assert not waiter.done()
        [move] = topic.engine.unload("orders", to=other.id)
        assert move.ok
        assert waiter.result(PATIENCE).topic_epoch == 2
    owner.close()


def test_d4_whom_the_core_selects_is_promoted(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the selection decides about the queue's order: where it is shown the last waiter only,
    it is the last one's turn."""
    select = _core.select
    with topic.producer(EXCLUSIVE):
        waiters = [topic.producer_async(WAIT, priority=9 - number) for number in range(4)]

        def select_the_last(rows: Any, topic: int, epoch: int, alive: Any, **facts: Any) -> Any:
            return select(own_rows(rows, topic)[-1:], topic, epoch, alive, **facts)

        monkeypatch.setattr(_core, "select", select_the_last)
    assert waiters[3].result(PATIENCE).priority == 6
    monkeypatch.undo()
    waiters[3].result().close()
    assert waiters[0].result(PATIENCE).priority == 9


def test_d4_each_promotion_is_one_selection(topic: xl.Topic) -> None:
    owner = topic.producer(EXCLUSIVE)
    waiters = [topic.producer_async(WAIT, priority=-number) for number in range(20)]
    for waiter in waiters:
        before = _core.passed()["selections"]
        owner.close()
        owner = waiter.result(PATIENCE)
        assert _core.passed()["selections"] == before + 1
    assert owner.topic_epoch == 21
    owner.close()


def selections(state: State) -> int:
    return _core.passed()["selections"]


def wait_for_it(state: State) -> int:
    state.producer = state.topic.producer(WAIT)
    return state.producer.topic_epoch


@pytest.mark.long
def test_c2_the_promotion_behind_a_death_is_selected_by_the_core(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """By the background thread of the waiter, in its own process."""
    owner, waiter = worker(name="owner"), worker(name="waiter")
    owner.call(wait_for_it)
    waiter.start(wait_for_it)
    until(lambda: topic.waiters)
    owner.signal(signal.SIGKILL)
    assert waiter.answer() == 2
    assert waiter.call(selections) >= 1
    owner.kill()


# ---- a long queue ------------------------------------------------------------------------

LONG = 20_000


def queue_of_many(topic: xl.Topic, count: int) -> None:
    """So many waiters of this engine in the queue, all worse than any that asks."""
    engine = topic.engine
    first = records.Session(
        id=10**9,
        topic=topic.id,
        engine=engine.id,
        slot=engine.backend.slot,
        pid=1,
        engine_name="e",
        name="n",
        mode=WAIT,
        priority=-5,
        created=0,
        tie=0,
        since=0,
    )
    with engine.ledger.write_exclusive() as tables:
        row = tables.topics.get(topic.id)
        for number in range(count):
            tables.sessions.put_waiter(first._replace(id=first.id + number, name=f"n{number}"))
        row.waiting += count
        tables.topics.put(row)


def test_d6_a_promotion_looks_at_one_waiter_of_a_long_queue(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And wakes one: how many stand behind it does not matter."""
    looked_at: list[str] = []
    here = threading.get_ident()  # the guard looks around, too
    lockfile = topic.engine.ledger.lockfile
    alive = lockfile.slots.alive

    def look(slot: int, engine: str) -> bool:
        if threading.get_ident() == here:
            looked_at.append(engine)
        return alive(slot, engine)

    owner = topic.producer(EXCLUSIVE)
    queue_of_many(topic, LONG)
    waiter = topic.producer_async(WAIT)
    counter = SLOTS + topic.engine.backend.slot * SLOT_SIZE + WAKE_UPS
    before = lockfile.atomics.load(counter)
    with monkeypatch.context() as patch:
        patch.setattr(lockfile.slots, "alive", look)
        with topic.engine.ledger.write_exclusive() as tables:  # as the owner's close does
            topic.engine.backend.sessions.succession.leave(
                tables, owner._session, "release", "closed"
            )
    assert looked_at == [topic.engine.id]
    assert waiter.result(PATIENCE).topic_epoch == 2
    assert lockfile.atomics.load(counter) - before == 1


# ---- appends and epochs ------------------------------------------------------------------

Send = Callable[[xl.Producer], Any]
SENDS: dict[str, Send] = {
    "send": lambda producer: producer.send(b"x"),
    "send with a key": lambda producer: producer.send(b"x", key="k", properties={"a": "b"}),
    "send with a timeout": lambda producer: producer.send(b"x", timeout=PATIENCE),
    "send_async": lambda producer: producer.send_async(b"x").result(PATIENCE),
    "send_many": lambda producer: producer.send_many([b"x", b"y"]),
    "append": lambda producer: producer._sender.append([(None, b"x", None)]).await_flush(),
}


def journal_of(topic: xl.Topic) -> _core.Journal:
    journal = topic.engine.ledger.journal
    assert journal is not None
    return journal


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE])
@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS)
def test_b2_every_append_is_placed_and_compared_by_the_core(
    topic: xl.Topic, send: Send, mode: str
) -> None:
    journal = journal_of(topic)
    with topic.producer(mode) as producer:
        producer.send(b"first")  # its session has been looked up
        before, end = (journal.compared, journal.placed), topic.next_offset
        for _ in range(10):
            send(producer)
        after = journal.compared, journal.placed
        assert topic.next_offset >= end + 10
        assert (after[0] - before[0], after[1] - before[1]) == (10, 10)


def test_b2_a_shared_map_s_writes_are_placed_by_the_core(topic: xl.Topic) -> None:
    journal = journal_of(topic)
    with xl.SharedMap(topic) as shared:
        shared.put("a", 0)
        before = journal.placed
        for number in range(10):
            shared.put("a", number)
        assert journal.placed >= before + 10


@pytest.mark.parametrize("in_a_transaction", [False, True])
def test_b2_what_is_not_placed_in_the_journal_is_compared_by_the_core_too(
    engine: xl.Engine, topic: xl.Topic, in_a_transaction: bool
) -> None:
    """A large message goes into the tables: it is compared with the topic's row."""
    with topic.producer(EXCLUSIVE) as producer:
        before = _core.passed()["comparisons"]
        for _ in range(10):
            if in_a_transaction:
                with engine.transaction() as txn:
                    producer.send(bytes(2 << 20), transaction=txn)
            else:
                producer.send(bytes(2 << 20))
        assert _core.passed()["comparisons"] >= before + 10


def send_in_vain(state: State) -> tuple[int, int, int]:
    """How often a stale producer's appends were compared with the words and with the row, and how
    many were placed."""
    assert state.producer is not None
    journal = state.engine.ledger.journal
    assert journal is not None
    before = journal.compared, _core.passed()["comparisons"], journal.placed
    with pytest.raises(xl.ProducerFencedError):
        state.producer.send(b"stale")
    after = journal.compared, _core.passed()["comparisons"], journal.placed
    first, second, third = (now - then for now, then in zip(after, before, strict=True))
    return first, second, third


def hear_nothing(state: State) -> None:
    """From now on, no notification closes an appender before it is used, or amid that. A look at
    them that has begun before is over when the thread comes to the next one."""
    came = threading.Event()
    state.engine.backend.notifications.read = came.set
    state.engine.backend.worker.wake()
    assert came.wait(PATIENCE)


def test_b2_it_is_the_core_that_turns_a_stale_owner_away(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It was stopped while it was fenced, so that nothing else has told it."""
    stale = worker(name="stale")
    stale.call(wait_for_it)
    stale.call(hear_nothing)
    hang(stale)
    with topic.producer(FENCING) as owner:
        owner.send(b"mine")
        stale.start(send_in_vain)
        stale.signal(signal.SIGCONT)
        compared, looked_up, placed = stale.answer()
        assert placed == 0
        assert compared >= 1
        assert looked_up >= 1
    assert [message.value for message in topic.reader()] == [b"mine"]
