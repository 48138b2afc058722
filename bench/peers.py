"""The peers: other ways to keep 100-byte messages on this disk.

Each appends one message per call and says what that survives; those that are not synced by
default are told to be. Their modules are imported when they are opened.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import lmdb

from bench.measure import POWER, Stores

KEY = struct.Struct(">Q")
MAP_SIZE = 1 << 38
Item = tuple[bytes, bytes]


class Peer(Protocol):
    """Appends messages, durably."""

    name: str
    durability: str

    def append(self, value: bytes) -> object: ...
    def close(self) -> None: ...


class RawFile:
    """A file written full of zeros before, so that a flush changes no metadata: the floor.

    `size=0`: a file that grows, whose flushes change metadata and whose pages are new.
    """

    name = "pwrite + fdatasync"
    durability = POWER + ", keeps no order of writers, no checksum, no index"

    def __init__(self, path: str, size: int = 64 << 20) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = size
        self._at = 0
        for at in range(0, size, 1 << 20):
            os.pwrite(self._fd, bytes(1 << 20), at)
        os.fsync(self._fd)

    def append(self, value: bytes) -> None:
        if self._size and self._at + len(value) > self._size:
            self._at = 0
        os.pwrite(self._fd, value, self._at)
        self._at += len(value)
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Lmdb:
    """One key per message, 8 bytes big-endian, as an LMDB user would."""

    name = "py-lmdb"
    durability = POWER

    def __init__(self, path: str, sync: bool = True) -> None:
        if not sync:
            self.durability = "not flushed; a power loss may destroy it"
        self.env = lmdb.open(path, map_size=MAP_SIZE, lib_version=0, sync=sync)
        self.count = 0

    def append(self, value: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(KEY.pack(self.count), value, append=True)
        self.count += 1

    def items(self, values: Sequence[bytes]) -> list[Item]:
        """What comes next, as `put_many` takes it."""
        first, self.count = self.count, self.count + len(values)
        return [(KEY.pack(first + i), value) for i, value in enumerate(values)]

    def put_many(self, items: Sequence[Item], per_transaction: int) -> None:
        for at in range(0, len(items), per_transaction):
            with self.env.begin(write=True) as txn:
                txn.cursor().putmulti(items[at : at + per_transaction], append=True)

    def close(self) -> None:
        self.env.close()


class Sqlite:
    """A table with a row per message, in WAL mode."""

    def __init__(self, path: str, synchronous: str = "FULL") -> None:
        self.name = f"sqlite3 WAL {synchronous}"
        self.durability = POWER if synchronous == "FULL" else "survives the process's death"
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(f"PRAGMA synchronous={synchronous}")
        self.db.execute("CREATE TABLE log (offset INTEGER PRIMARY KEY, value BLOB)")

    def append(self, value: bytes) -> None:
        self.db.execute("INSERT INTO log (value) VALUES (?)", (value,))

    def append_many(self, values: Sequence[bytes]) -> None:
        self.db.execute("BEGIN")
        self.db.executemany("INSERT INTO log (value) VALUES (?)", ((value,) for value in values))
        self.db.execute("COMMIT")

    def close(self) -> None:
        self.db.close()


class Rocks:
    """RocksDB, its own log synced at each put."""

    name = "rocksdict, sync"
    durability = POWER

    def __init__(self, path: str) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self._db = Rdict(path, Options(raw_mode=True))
        options = WriteOptions()
        options.sync = True
        self._db.set_write_options(options)
        self._count = 0

    def append(self, value: bytes) -> None:
        self._db[KEY.pack(self._count)] = value
        self._count += 1

    def close(self) -> None:
        self._db.close()


class PersistQueue:
    """persist-queue's SQLite queue; its file queue flushes only once per chunk."""

    name = "persist-queue (SQLite, auto_commit)"
    durability = POWER

    def __init__(self, path: str) -> None:
        import persistqueue

        self._queue = persistqueue.FIFOSQLiteQueue(path, auto_commit=True, multithreading=True)
        require_full(self._queue._putter)

    def append(self, value: bytes) -> None:
        self._queue.put(value)

    def close(self) -> None:
        self._queue.close()


class LiteQueue:
    """litequeue, raised from its NORMAL to synchronous=FULL."""

    name = "litequeue, FULL"
    durability = POWER

    def __init__(self, path: str) -> None:
        from litequeue import LiteQueue as Queue

        self._queue = Queue(path)
        self._queue.conn.execute("PRAGMA synchronous=FULL")
        require_full(self._queue.conn)

    def append(self, value: bytes) -> None:
        self._queue.put(value)  # it says str, SQLite takes either

    def close(self) -> None:
        self._queue.conn.close()


class Deque:
    """diskcache.Deque, raised from its NORMAL to synchronous=FULL."""

    name = "diskcache.Deque, FULL"
    durability = POWER

    def __init__(self, path: str) -> None:
        from diskcache import Cache
        from diskcache import Deque as Queue

        self._cache = Cache(path, eviction_policy="none", sqlite_synchronous=2)
        require_full(self._cache._con)
        self._queue = Queue.fromcache(self._cache)

    def append(self, value: bytes) -> None:
        self._queue.append(value)

    def close(self) -> None:
        self._cache.close()


def require_full(connection: Any) -> None:
    """A peer that is called durable must be."""
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    if level < 2:
        raise RuntimeError(f"synchronous={level}: this peer does not survive a power loss")


class Appenders:
    """All peers that append one durable message per call, on one disk."""

    def __init__(self, stores: Stores) -> None:
        self._peers: list[Peer] = [
            RawFile(stores.path("raw")),
            Lmdb(stores.path("lmdb")),
            Sqlite(stores.path("sqlite.db")),
            Rocks(stores.path("rocks")),
            PersistQueue(stores.path("persist")),
            LiteQueue(stores.path("litequeue.db")),
            Deque(stores.path("deque")),
        ]

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.close()
