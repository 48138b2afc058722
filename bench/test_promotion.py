"""Promotion: the order of the queue, the decision, and a whole hand-over in the ledger."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exclusivelog as xl
from bench.peers import Lmdb, Sqlite
from exclusivelog import _core
from exclusivelog.local.ownership import promoting
from exclusivelog.local.records import Session

pytestmark = pytest.mark.benchmark(max_time=0.4, min_rounds=3)
WAITERS = 100_000
DEAD = "dead" * 4  # the id of an engine


@pytest.fixture
def queue(topic: xl.Topic) -> xl.Topic:
    """A topic with so many waiters of this engine."""
    chance = random.Random(7)
    engine = topic.engine
    first = Session(
        id=0,
        topic=topic.id,
        engine=engine.id,
        slot=engine.backend.slot,
        pid=1,
        engine_name="engine",
        name="name",
        mode="wait_for_exclusive",
        priority=0,
        created=0,
        tie=0,
        since=0,
    )
    with engine.ledger.write_exclusive() as tables:
        for number in range(1, WAITERS + 1):
            place = {
                "priority": chance.randrange(10),
                "created": chance.getrandbits(40),
                "tie": chance.getrandbits(32),
            }
            waiter = first._replace(id=number, name=f"engine-{number}", **place)
            tables.sessions.put_waiter(waiter)
        row = tables.topics.get(topic.id)
        row.waiting = WAITERS
        tables.topics.put(row)
    return topic


@pytest.mark.benchmark(group="the next waiter of 100,000")
@pytest.mark.parametrize("dead", [0, 100, 9_999])
def test_select(benchmark: BenchmarkFixture, queue: xl.Topic, dead: int) -> None:
    """The ledger's own selection: the first live waiter behind so many of an engine that died."""
    best = next_in_line(queue, dead + 1)
    with queue.engine.ledger.write_exclusive() as tables:
        waiters = tables.sessions.waiters(queue.id)
        for waiter in list(itertools.islice(waiters, dead)):
            tables.sessions.put_waiter(waiter._replace(engine=DEAD))
    with queue.engine.ledger.read() as tables:
        row = tables.topics.get(queue.id)

        def decide() -> promoting.Promotion:
            rows = tables.sessions.queue(queue.id)
            return promoting.promote(row.epoch, row.id, rows, lambda _, engine: engine != DEAD)

        before = _core.passed()["selections"]
        promotion = benchmark(decide)
        assert _core.passed()["selections"] > before
        assert promotion.winner is not None
        found = len(promotion.dead) + promotion.left
        assert (promotion.winner.id, found) == (best[-1], dead)


def next_in_line(topic: xl.Topic, count: int) -> list[int]:
    """The ids of the best waiters."""
    with topic.engine.ledger.read() as tables:
        waiters = tables.sessions.waiters(topic.id)
        return [waiter.id for waiter in itertools.islice(waiters, count)]


@pytest.mark.benchmark(group="the next waiter of 100,000")
def test_select_heapq(benchmark: BenchmarkFixture) -> None:
    """Python's heap, in memory: one waiter comes, the first one goes."""
    chance = random.Random(7)
    places = [
        (-chance.randrange(10), chance.getrandbits(40), chance.getrandbits(32), number)
        for number in range(WAITERS)
    ]
    heapq.heapify(places)
    benchmark(lambda: heapq.heappushpop(places, (0, 0, 0, 0)))


@pytest.mark.benchmark(group="hand-over, durable")
def test_promotion_out_of_many(benchmark: BenchmarkFixture, queue: xl.Topic) -> None:
    """The transaction of a release and a promotion, with 100,000 waiters in the queue; it wakes no
    process but this one."""
    sessions, ledger = queue.engine.backend.sessions.succession, queue.engine.ledger
    epochs = [queue.epoch]

    def promote() -> None:
        with ledger.write_exclusive() as tables:
            row = tables.topics.get(queue.id)
            if row.owner:
                owner = tables.sessions.holder(queue.id, row.owner)
                assert owner is not None
                sessions.drop_holder(tables, row, owner, "release", "closed")
            sessions.promote(tables, row)
            tables.topics.put(row)
            epochs.append(row.epoch)

    benchmark.pedantic(promote, rounds=200, warmup_rounds=5)
    assert epochs == list(range(len(epochs)))


@pytest.mark.benchmark(group="hand-over, durable")
def test_hand_over(benchmark: BenchmarkFixture, topic: xl.Topic) -> None:
    """From the owner's close until the successor has its producer."""
    owner = topic.producer("exclusive")

    def queue_up() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (owner, topic.producer_async("wait_for_exclusive")), {}

    def hand_over(holder: xl.Producer, successor: Any) -> None:
        nonlocal owner
        holder.close()
        owner = successor.result(timeout=10)

    benchmark.pedantic(hand_over, setup=queue_up, rounds=300, warmup_rounds=5)
    assert owner.topic_epoch == topic.epoch
    owner.close()


@pytest.mark.benchmark(group="hand-over, durable")
def test_unload(benchmark: BenchmarkFixture, topic: xl.Topic, engine: xl.Engine) -> None:
    """The same for a hand-over, from the call of `engine.unload` on."""
    with xl.open(engine.path, name="other") as other:
        engines, owners = [other, engine], [topic.producer("exclusive")]

        def queue_up() -> tuple[tuple[Any, ...], dict[str, Any]]:
            for former in owners[:-1]:
                former.close()
            to, source = engines
            engines.reverse()
            return (source, to, to.topic("orders").producer_async("wait_for_exclusive")), {}

        def hand_over(source: xl.Engine, to: xl.Engine, successor: Any) -> None:
            source.unload("orders", to=to.id)
            owners.append(successor.result(timeout=10))

        benchmark.pedantic(hand_over, setup=queue_up, rounds=300, warmup_rounds=5)
        assert owners[-1].topic_epoch == topic.epoch == len(owners)


@pytest.mark.benchmark(group="hand-over, durable")
def test_lmdb_row(benchmark: BenchmarkFixture, lmdb: Lmdb) -> None:
    """One durable row, without a wake-up: the lower bound of a hand-over in LMDB."""

    def write() -> None:
        with lmdb.env.begin(write=True) as txn:
            txn.put(b"owner", bytes(16))

    benchmark(write)


@pytest.mark.benchmark(group="hand-over, durable")
def test_sqlite_row(benchmark: BenchmarkFixture, sqlite: Sqlite) -> None:
    """The same in SQLite."""
    sqlite.db.execute("CREATE TABLE owner (topic INTEGER PRIMARY KEY, session, epoch)")
    sqlite.db.execute("INSERT INTO owner VALUES (1, 42, 7)")
    benchmark(lambda: sqlite.db.execute("UPDATE owner SET session = session + 1"))
