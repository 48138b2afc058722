"""Scan: 100,000 messages of 100 bytes, written one by one and in batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import exclusivelog as xl
from bench.append import SIZE, messages
from bench.measure import Settings, Stores, prepare_directory
from bench.peers import Lmdb, Sqlite
from bench.scan import arrow, each_value, iterate, value_of_each, walk
from bench.values import SIZES, fill
from exclusivelog import _core

pytestmark = pytest.mark.benchmark(group="scan of 100,000 messages", max_time=0.5, min_rounds=3)
COUNT = 100_000


@pytest.fixture(scope="module")
def disk() -> Iterator[Stores]:
    results = Path(__file__).parent / "results"
    with Stores(Settings(prepare_directory(results))) as stores:
        yield stores


@pytest.fixture(scope="module")
def full(disk: Stores) -> xl.Topic:
    topic = disk.engine().topic("full")
    with topic.producer() as producer:
        producer.send_many(messages(COUNT))
    return topic


@pytest.fixture(scope="module")
def sent(disk: Stores) -> dict[int, xl.Topic]:
    return fill(disk.engine("sent", durability="process"), messages(COUNT))


@pytest.fixture(scope="module")
def full_lmdb(disk: Stores) -> Lmdb:
    lmdb = disk.enter_context(closing(Lmdb(disk.path("lmdb"))))
    lmdb.put_many(lmdb.items(messages(COUNT)), 1_000)
    return lmdb


@pytest.mark.benchmark(group="decode the entries of 100,000 messages")
def test_decode(benchmark: BenchmarkFixture, full: xl.Topic) -> None:
    """Every checksum and every offset, no message."""
    with full.reader() as reader:
        entries = []
        while (part := reader.cursor.take_entry()) is not None:
            entries.append(part[0].data)
    decoded = benchmark(lambda: [_core.Entry(entry) for entry in entries])
    assert sum(entry.count for entry in decoded) == COUNT


def test_iterate(benchmark: BenchmarkFixture, full: xl.Topic) -> None:
    benchmark(iterate, full, COUNT)


@pytest.mark.parametrize("size", SIZES)
def test_value_of_each_message(
    benchmark: BenchmarkFixture, sent: dict[int, xl.Topic], size: int
) -> None:
    benchmark(value_of_each, sent[size], COUNT)


@pytest.mark.parametrize("size", SIZES)
def test_values(benchmark: BenchmarkFixture, sent: dict[int, xl.Topic], size: int) -> None:
    benchmark(each_value, sent[size], COUNT)


@pytest.mark.parametrize("columns", [["value"], ["offset", "value"], None])
def test_read_arrow(benchmark: BenchmarkFixture, full: xl.Topic, columns: list[str] | None) -> None:
    pytest.importorskip("pyarrow")
    benchmark(arrow, full, COUNT, columns)


def test_lmdb_cursor(benchmark: BenchmarkFixture, full_lmdb: Lmdb) -> None:
    benchmark(walk, full_lmdb)


def test_sqlite_select(benchmark: BenchmarkFixture, sqlite: Sqlite) -> None:
    sqlite.append_many(messages(COUNT))

    def walk_rows() -> int:
        return sum(len(value) for _, value in sqlite.db.execute("SELECT offset, value FROM log"))

    assert benchmark(walk_rows) == COUNT * SIZE
