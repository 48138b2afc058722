"""The fencing check: the cost, for an append, of checking that its session still owns the topic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exclusivelog as xl
from bench.peers import Lmdb, Sqlite
from exclusivelog import _core
from exclusivelog.local.storage.tables import check_may_write

pytestmark = pytest.mark.benchmark(max_time=0.4, min_rounds=3)


@pytest.fixture
def owner(topic: xl.Topic) -> Iterator[xl.Producer]:
    with topic.producer("exclusive") as producer:
        yield producer


@pytest.mark.benchmark(group="epoch check")
def test_row(benchmark: BenchmarkFixture, owner: xl.Producer, engine: xl.Engine) -> None:
    """Unpack the topic's row and compare session and epoch."""
    session = owner._session
    with engine.ledger.read() as tables:
        data = tables.topics.get(session.topic).pack()

    def check() -> bool:
        return _core.TopicRow.unpack(data).admits(session.id, session.epoch)

    assert benchmark(check)


@pytest.mark.benchmark(group="epoch check within a transaction")
def test_row_in_the_ledger(
    benchmark: BenchmarkFixture, owner: xl.Producer, engine: xl.Engine
) -> None:
    """As an append does it: the row is read, unpacked and compared."""
    session = owner._session
    with engine.ledger.read() as tables:
        benchmark(lambda: check_may_write(tables, tables.topics.get(session.topic), session))


@pytest.mark.benchmark(group="epoch check with a transaction of its own")
def test_read_transaction(
    benchmark: BenchmarkFixture, owner: xl.Producer, engine: xl.Engine
) -> None:
    session = owner._session

    def check() -> None:
        with engine.ledger.read() as tables:
            check_may_write(tables, tables.topics.get(session.topic), session)

    benchmark(check)


@pytest.mark.benchmark(group="epoch check with a transaction of its own")
def test_state(benchmark: BenchmarkFixture, owner: xl.Producer) -> None:
    """`producer.state`, as an application asks."""
    assert benchmark(lambda: owner.state) == "open"


@pytest.mark.benchmark(group="epoch check with a transaction of its own")
def test_lmdb_get(benchmark: BenchmarkFixture, lmdb: Lmdb) -> None:
    lmdb.append(bytes(16))

    def check() -> bytes | None:
        with lmdb.env.begin() as txn:
            return txn.get(bytes(8))

    assert benchmark(check) == bytes(16)


@pytest.mark.benchmark(group="epoch check with a transaction of its own")
def test_sqlite_select(benchmark: BenchmarkFixture, sqlite: Sqlite) -> None:
    sqlite.db.execute("CREATE TABLE owner (topic INTEGER PRIMARY KEY, session, epoch)")
    sqlite.db.execute("INSERT INTO owner VALUES (1, 42, 7)")
    query = "SELECT session, epoch FROM owner WHERE topic = 1"
    assert benchmark(lambda: sqlite.db.execute(query).fetchone()) == (42, 7)
