"""Append: into memory, one message that survives the process or a power loss, and a thousand."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exclusivelog as xl
from bench.append import pipeline
from bench.measure import Stores
from bench.peers import Lmdb, RawFile, Sqlite
from exclusivelog import _core

pytestmark = pytest.mark.benchmark(max_time=0.5, min_rounds=3)
BATCH = {"rounds": 200, "warmup_rounds": 5}


def make_appender() -> _core.Appender:
    return _core.Appender(b"producer", -1, 100_000, 1 << 20)


def fill(appender: _core.Appender, values: list[bytes]) -> _core.Appender:
    add = appender.add
    for value in values:
        add(value)
    return appender


# ---- into memory -------------------------------------------------------------------------


@pytest.mark.benchmark(group="1,000 messages into memory")
def test_add(benchmark: BenchmarkFixture, values: list[bytes]) -> None:
    filled = benchmark.pedantic(fill, setup=lambda: ((make_appender(), values), {}), **BATCH)
    assert filled.pending_messages == len(values)


@pytest.mark.benchmark(group="1,000 messages into memory")
def test_list_append(benchmark: BenchmarkFixture, values: list[bytes]) -> None:
    """The time of Python itself to store them in a list."""

    def keep() -> list[bytes]:
        kept: list[bytes] = []
        append = kept.append
        for value in values:
            append(value)
        return kept

    assert len(benchmark(keep)) == len(values)


@pytest.mark.benchmark(group="1,000 messages into an entry")
def test_seal_one_by_one(benchmark: BenchmarkFixture, values: list[bytes]) -> None:
    def setup() -> tuple[tuple[_core.Appender], dict[str, Any]]:
        return (fill(make_appender(), values),), {}

    batches = benchmark.pedantic(_core.Appender.take, setup=setup, **BATCH)
    assert batches[0].count == len(values)


@pytest.mark.benchmark(group="1,000 messages into an entry")
def test_seal_many(benchmark: BenchmarkFixture, values: list[bytes]) -> None:
    column = _core.strings([*values])

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (make_appender(), column, None, None, None), {}

    batch = benchmark.pedantic(_core.Appender.make_batch, setup=setup, **BATCH)
    assert batch.count == len(values)


@pytest.mark.benchmark(group="1,000 messages into an entry")
def test_join(benchmark: BenchmarkFixture, values: list[bytes]) -> None:
    """The time of Python itself to join them into one bytes object."""
    assert len(benchmark(b"".join, values)) == 100 * len(values)


@pytest.mark.benchmark(group="inside the critical section")
def test_stamp(benchmark: BenchmarkFixture, values: list[bytes]) -> None:
    (batch,) = fill(make_appender(), values).take()
    ((last, entry),) = benchmark(batch.stamp, 1, 1_000, 7, 42, 1_700_000_000_000)
    assert last == 1_999
    assert _core.Entry(entry).epoch == 7


# ---- durable -----------------------------------------------------------------------------


@pytest.mark.benchmark(group="one durable message")
def test_send(benchmark: BenchmarkFixture, topic: xl.Topic, values: list[bytes]) -> None:
    with topic.producer("exclusive") as producer:
        assert benchmark(producer.send, values[0]) >= 0


@pytest.mark.benchmark(group="one durable message")
def test_pwrite_and_fdatasync(
    benchmark: BenchmarkFixture, raw: RawFile, values: list[bytes]
) -> None:
    benchmark(raw.append, values[0])


@pytest.mark.benchmark(group="one durable message")
def test_lmdb_commit(benchmark: BenchmarkFixture, lmdb: Lmdb, values: list[bytes]) -> None:
    benchmark(lmdb.append, values[0])


@pytest.mark.benchmark(group="one durable message")
def test_sqlite_full(benchmark: BenchmarkFixture, sqlite: Sqlite, values: list[bytes]) -> None:
    benchmark(sqlite.append, values[0])


# ---- surviving the process ---------------------------------------------------------------


@pytest.mark.benchmark(group="one message that survives the process")
def test_send_unflushed(benchmark: BenchmarkFixture, stores: Stores, values: list[bytes]) -> None:
    engine = stores.engine("process", durability="process")
    with engine.topic("orders").producer("exclusive") as producer:
        assert benchmark(producer.send, values[0]) >= 0


@pytest.mark.benchmark(group="one message that survives the process")
def test_pwrite(benchmark: BenchmarkFixture, stores: Stores, values: list[bytes]) -> None:
    with closing(RawFile(stores.path("unflushed"), 8 << 20, flush=False)) as raw:
        benchmark(raw.append, values[0])


@pytest.mark.benchmark(group="one message that survives the process")
def test_lmdb_unsynced(benchmark: BenchmarkFixture, stores: Stores, values: list[bytes]) -> None:
    with closing(Lmdb(stores.path("unsynced"), sync=False)) as lmdb:
        benchmark(lmdb.append, values[0])


@pytest.mark.benchmark(group="one message that survives the process")
def test_sqlite_normal(benchmark: BenchmarkFixture, stores: Stores, values: list[bytes]) -> None:
    with closing(Sqlite(stores.path("normal.db"), "NORMAL")) as sqlite:
        benchmark(sqlite.append, values[0])


# ---- a thousand durable ones -------------------------------------------------------------


@pytest.mark.benchmark(group="1,000 durable messages")
def test_send_many(benchmark: BenchmarkFixture, topic: xl.Topic, values: list[bytes]) -> None:
    with topic.producer("exclusive") as producer:
        assert len(benchmark(producer.send_many, values)) == len(values)


@pytest.mark.benchmark(group="1,000 durable messages")
def test_send_async_and_flush(
    benchmark: BenchmarkFixture, topic: xl.Topic, values: list[bytes]
) -> None:
    with topic.producer("exclusive") as producer:
        benchmark(pipeline, producer, values)


@pytest.mark.benchmark(group="1,000 durable messages")
def test_lmdb_putmulti(benchmark: BenchmarkFixture, lmdb: Lmdb, values: list[bytes]) -> None:
    benchmark.pedantic(
        lmdb.put_many, setup=lambda: ((lmdb.items(values), len(values)), {}), **BATCH
    )


@pytest.mark.benchmark(group="1,000 durable messages")
def test_sqlite_full_many(benchmark: BenchmarkFixture, sqlite: Sqlite, values: list[bytes]) -> None:
    benchmark(sqlite.append_many, values)
