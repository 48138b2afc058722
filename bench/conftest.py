"""Fixtures of the microbenchmarks: a directory on a real disk, and the peers on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.append import messages
from bench.measure import Settings, Stores, prepare_directory
from bench.peers import Lmdb, RawFile, Sqlite

RESULTS = Path(__file__).parent / "results"


@pytest.fixture
def stores() -> Iterator[Stores]:
    with Stores(Settings(prepare_directory(RESULTS))) as stores:
        yield stores


@pytest.fixture(autouse=True)
def _short_journals() -> None:
    """Journals have their usual size: what is measured here is what users have."""


@pytest.fixture
def path(stores: Stores) -> str:
    """The path of the ledger of `engine`: on the disk of this tree, not in memory."""
    return stores.path("log")


@pytest.fixture
def raw(stores: Stores) -> Iterator[RawFile]:
    raw = RawFile(stores.path("raw"), 8 << 20)
    yield raw
    raw.close()


@pytest.fixture
def lmdb(stores: Stores) -> Iterator[Lmdb]:
    lmdb = Lmdb(stores.path("lmdb"))
    yield lmdb
    lmdb.close()


@pytest.fixture
def sqlite(stores: Stores) -> Iterator[Sqlite]:
    sqlite = Sqlite(stores.path("sqlite.db"))
    yield sqlite
    sqlite.close()


@pytest.fixture(scope="session")
def values() -> list[bytes]:
    """1,000 messages of 100 bytes."""
    return messages(1_000)
