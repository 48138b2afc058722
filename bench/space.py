"""Bytes on disk per message, sent one by one and in batches (P13)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import exclusivelog as xl
from bench.append import SIZE
from bench.measure import POWER, PROCESS, Figure, Row, Series, Settings, Stores, Target, consecutive
from bench.peers import Lmdb, Rocks, Sqlite

COUNT = 1_000_000
ONE_BY_ONE_SECONDS = 40.0
BATCHES = (1_000, 100_000)
BLOCK = 512  # what st_blocks counts
PAYLOAD = "the payload"


def p13(settings: Settings) -> Figure:
    """The disk space of a ledger of messages after its engine was closed."""
    figure = Figure("P13", "space of a 100 B message on the disk, after the engine was closed")
    values = incompressible(COUNT)
    _measure_ours(figure, settings, "one by one, process", values, one_by_one, "process")
    for batch in BATCHES:
        _measure_ours(figure, settings, f"send_many of {batch:,}", values, in_batches(batch))
    for name, fill in PEERS.items():
        with Stores(settings) as stores:
            fill(stores, values)
            per_message = disk_bytes(stores.directory) / COUNT
        figure.series.append(Series(name, "B", [per_message], rival=True))
        figure.rows.append(
            Row(
                f"one by one, process: against {name}",
                figure.rows[0].ours,
                "B",
                per_message,
                name,
                rival=True,
            )
        )
    figure.notes.append(
        "space is the files' blocks; each message is 100 random bytes, which cannot be compressed; "
        "the journal, which is as large however many messages there are, is counted apart"
    )
    return figure


def incompressible(count: int) -> list[bytes]:
    chance = random.Random(7)
    data = chance.randbytes(count * SIZE)
    return [data[at : at + SIZE] for at in range(0, len(data), SIZE)]


# ---- ours --------------------------------------------------------------------------------

Durability = Literal["power", "process"]
SURVIVES = {"power": POWER, "process": PROCESS}
Send = Callable[[xl.Producer, Sequence[bytes]], int]


def _measure_ours(
    figure: Figure,
    settings: Settings,
    name: str,
    values: Sequence[bytes],
    send: Send,
    durability: Durability = "power",
) -> None:
    with Stores(settings) as stores:
        path = Path(stores.path("ours"))
        with xl.open(path, name="bench", durability=durability) as engine:
            with engine.topic("orders").producer("exclusive") as producer:
                count = send(producer, values)
            unsettled = (disk_bytes(path) - journal_bytes(path)) / count
        journal = journal_bytes(path)
        per_message = (disk_bytes(path) - journal) / count
    figure.series.append(Series(name, "B", [per_message], SURVIVES[durability]))
    figure.rows.append(
        Row(f"{name}, {count:,} messages", per_message, "B", SIZE, PAYLOAD, Target(most_ratio=1.15))
    )
    figure.rows.append(Row(f"{name}: before the engine was closed", unsettled, "B", SIZE, PAYLOAD))
    figure.state(f"{name}: the journal, once per ledger", journal, "B")


def one_by_one(producer: xl.Producer, values: Sequence[bytes]) -> int:
    """The number of messages sent within the time limit."""
    turn = iter(values)
    return len(consecutive(lambda: producer.send(next(turn)), len(values), ONE_BY_ONE_SECONDS))


def in_batches(size: int) -> Send:
    def send(producer: xl.Producer, values: Sequence[bytes]) -> int:
        for at in range(0, len(values), size):
            producer.send_many(values[at : at + size])
        return len(values)

    return send


# ---- the peers ---------------------------------------------------------------------------
# In transactions, which leave what single appends would leave, but sooner.


def fill_lmdb(stores: Stores, values: Sequence[bytes]) -> None:
    with closing(Lmdb(stores.path("lmdb"), sync=False)) as lmdb:
        lmdb.put_many(lmdb.items(values), 1_000)


def fill_sqlite(stores: Stores, values: Sequence[bytes]) -> None:
    with closing(Sqlite(stores.path("sqlite.db"), "NORMAL")) as sqlite:
        for at in range(0, len(values), 1_000):
            sqlite.append_many(values[at : at + 1_000])


def fill_rocks(stores: Stores, values: Sequence[bytes]) -> None:
    with closing(Rocks(stores.path("rocks"), sync=False)) as rocks:
        for value in values:
            rocks.append(value)


PEERS = {"py-lmdb": fill_lmdb, "sqlite3": fill_sqlite, "rocksdict": fill_rocks}


# ---- files -------------------------------------------------------------------------------


def disk_bytes(directory: Path) -> int:
    """The disk space of all files below: less than their sizes if they have holes."""
    return sum(BLOCK * path.stat().st_blocks for path in directory.rglob("*") if path.is_file())


def journal_bytes(directory: Path) -> int:
    """The disk space of the preallocated files."""
    return sum(BLOCK * path.stat().st_blocks for path in directory.glob("*journal*"))
