"""Promotion: the order of the queue, the decision, and a whole hand-over in the ledger."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exclusivelog as xl
from bench.peers import Lmdb, Sqlite
from exclusivelog import _core, access
from exclusivelog.access import Session

pytestmark = pytest.mark.benchmark(max_time=0.4, min_rounds=3)
WAITERS = 10_000
Place = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def places() -> list[Place]:
    """Priority, creation, tie and number of as many waiters."""
    chance = random.Random(7)
    return [
        (chance.randrange(10), chance.getrandbits(40), chance.getrandbits(32), number)
        for number in range(WAITERS)
    ]


@pytest.mark.benchmark(group="10,000 waiters through the queue")
def test_waiter_heap(benchmark: BenchmarkFixture, places: list[Place]) -> None:
    def through() -> list[int]:
        heap = _core.WaiterHeap()
        for place in places:
            heap.push(*place)
        return [heap.pop() for _ in range(len(heap))]

    best = min(places, key=lambda place: (-place[0], place[1], place[2]))
    assert benchmark(through)[0] == best[3]


@pytest.mark.benchmark(group="10,000 waiters through the queue")
def test_heapq(benchmark: BenchmarkFixture, places: list[Place]) -> None:
    def through() -> list[int]:
        heap: list[Place] = []
        for priority, created, tie, number in places:
            heapq.heappush(heap, (-priority, created, tie, number))
        return [heapq.heappop(heap)[3] for _ in range(len(heap))]

    assert len(benchmark(through)) == WAITERS


def waiter(number: int) -> Session:
    return Session(
        id=number, topic=1, engine="0" * 16, slot=0, pid=1, engine_name="engine", name="name",
        mode="wait_for_exclusive", priority=0, created=number, tie=0, since=0,
    )  # fmt: skip


@pytest.mark.benchmark(group="the decision to promote")
@pytest.mark.parametrize("dead", [0, 100, 9_999])
def test_promote(benchmark: BenchmarkFixture, dead: int) -> None:
    """The first living waiter behind so many dead ones."""
    queue = [waiter(number) for number in range(WAITERS)]

    def decide() -> access.Promotion:
        return access.promote(7, queue, lambda session: session.id >= dead)

    promotion = benchmark(decide)
    assert promotion.winner.id == dead
    assert len(promotion.dead) == dead


@pytest.mark.benchmark(group="hand-over, durable")
def test_hand_over(benchmark: BenchmarkFixture, topic: xl.Topic) -> None:
    """From the owner's close to the successor's producer in hand."""
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
    """The same to an engine that was named, from `engine.unload` on."""
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
    """One durable row, which wakes nobody: the floor of a hand-over in LMDB."""

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
