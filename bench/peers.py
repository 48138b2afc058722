"""The peers: other libraries that store 100-byte messages on this disk.

Each appends one message per call, with a known durability. Those that do not sync by default are
configured to sync, and that is verified; for figures without a flush, all are configured without.
Their modules are imported when they are opened.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, Self

import lmdb

from bench.measure import POWER, PROCESS, Stores

KEY = struct.Struct(">Q")
MAP_SIZE = 1 << 38
WRITER_SHIFT = 48  # writers at the same time have their number in the key's highest bytes
Item = tuple[bytes, bytes]
Synchronous = Literal["NORMAL", "FULL"]
LEVELS = {"NORMAL": 1, "FULL": 2}  # as SQLite numbers them
SURVIVES = {"NORMAL": PROCESS, "FULL": POWER}


class Peer(Protocol):
    """Appends messages."""

    name: str
    durability: str

    def append(self, value: bytes) -> object: ...
    def close(self) -> None: ...


class RawFile:
    """A file that was filled with zeros before, so that a flush changes no metadata: the lower
    bound.

    `size=0`: a file that grows; its flushes change metadata, and its pages are new.
    `flush=False`: only the system call that writes.
    """

    def __init__(self, path: str, size: int = 64 << 20, flush: bool = True) -> None:
        self.name = "pwrite + fdatasync" if flush else "pwrite"
        survived = POWER if flush else PROCESS
        self.durability = f"{survived}, keeps no order of writers, no checksum, no index"
        self._flush = flush
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = size
        self._at = 0
        for at in range(0, size, 16 << 10):
            os.pwrite(self._fd, bytes(16 << 10), at)
        os.fsync(self._fd)

    def append(self, value: bytes) -> None:
        if self._size and self._at + len(value) > self._size:
            self._at = 0
        os.pwrite(self._fd, value, self._at)
        self._at += len(value)
        if self._flush:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Lmdb:
    """One key per message, 8 bytes big-endian, as users of LMDB do.

    `writemap=True`: writes through the mapping, which is the fastest without flushes.
    """

    def __init__(self, path: str, sync: bool = True, writemap: bool = False) -> None:
        self.name = "py-lmdb" + ", sync=False" * (not sync) + ", writemap=True" * writemap
        self.durability = POWER if sync else "not flushed; a power loss may destroy it"
        self.env = lmdb.open(path, map_size=MAP_SIZE, lib_version=0, sync=sync, writemap=writemap)
        self.count = 0

    def append(self, value: bytes) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(KEY.pack(self.count), value, append=True)
        self.count += 1

    def writer(self, number: int) -> Callable[[bytes], None]:
        """`append` for one of several concurrent writers, each with its own keys."""
        keys = itertools.count(number << WRITER_SHIFT)

        def append(value: bytes) -> None:
            with self.env.begin(write=True) as txn:
                txn.put(KEY.pack(next(keys)), value)

        return append

    def items(self, values: Sequence[bytes]) -> list[Item]:
        """The next messages, as `put_many` takes them."""
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

    def __init__(self, path: str, synchronous: Synchronous = "FULL") -> None:
        self.name = f"sqlite3 WAL {synchronous}"
        self.durability = SURVIVES[synchronous]
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
    """RocksDB, its own log synced at each put, or only written."""

    def __init__(self, path: str, sync: bool = True) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self.name = "rocksdict, sync" if sync else "rocksdict, no sync"
        self.durability = POWER if sync else PROCESS
        self._db = Rdict(path, Options(raw_mode=True))
        options = WriteOptions()
        options.sync = sync
        self._db.set_write_options(options)
        self._count = 0

    def append(self, value: bytes) -> None:
        self._db[KEY.pack(self._count)] = value
        self._count += 1

    def close(self) -> None:
        self._db.close()


class PersistQueue:
    """persist-queue's SQLite queue, which is in WAL mode; its file queue flushes only once per
    chunk."""

    def __init__(self, path: str, synchronous: Synchronous = "FULL") -> None:
        import persistqueue

        self.name = f"persist-queue (SQLite, auto_commit), {synchronous}"
        self.durability = SURVIVES[synchronous]
        self._queue = persistqueue.FIFOSQLiteQueue(path, auto_commit=True, multithreading=True)
        set_level(self._queue._putter, synchronous)

    def append(self, value: bytes) -> None:
        self._queue.put(value)

    def close(self) -> None:
        self._queue.close()


class LiteQueue:
    """litequeue; NORMAL is its own choice."""

    def __init__(self, path: str, synchronous: Synchronous = "FULL") -> None:
        from litequeue import LiteQueue as Queue

        self.name = f"litequeue, {synchronous}"
        self.durability = SURVIVES[synchronous]
        self._queue = Queue(path)
        set_level(self._queue.conn, synchronous)

    def append(self, value: bytes) -> None:
        self._queue.put(value)  # it says str, SQLite takes either

    def close(self) -> None:
        self._queue.conn.close()


class Deque:
    """diskcache.Deque; NORMAL is its own choice."""

    def __init__(self, path: str, synchronous: Synchronous = "FULL") -> None:
        from diskcache import Cache
        from diskcache import Deque as Queue

        self.name = f"diskcache.Deque, {synchronous}"
        self.durability = SURVIVES[synchronous]
        level = LEVELS[synchronous]
        self._cache = Cache(path, eviction_policy="none", sqlite_synchronous=level)
        require_level(self._cache._con, level)
        self._queue = Queue.fromcache(self._cache)

    def append(self, value: bytes) -> None:
        self._queue.append(value)

    def close(self) -> None:
        self._cache.close()


def set_level(connection: Any, synchronous: Synchronous) -> None:
    connection.execute(f"PRAGMA synchronous={synchronous}")
    require_level(connection, LEVELS[synchronous])


def require_level(connection: Any, expected: int) -> None:
    """Check that a durable peer flushes, and that one that is not durable does not."""
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    if level != expected:
        raise RuntimeError(f"this peer has synchronous={level}, and should have {expected}")


class Appenders:
    """All peers that append one message per call, on one disk.

    `durable`: each call survives a power loss; otherwise it survives only the death of the process.
    """

    def __init__(self, stores: Stores, durable: bool = True) -> None:
        synchronous: Synchronous = "FULL" if durable else "NORMAL"
        path = stores.path
        self._peers: list[Peer] = [
            RawFile(path("raw"), flush=durable),
            Lmdb(path("lmdb"), sync=durable),
            Sqlite(path("sqlite.db"), synchronous),
            Rocks(path("rocks"), sync=durable),
            PersistQueue(path("persist"), synchronous),
            LiteQueue(path("litequeue.db"), synchronous),
            Deque(path("deque"), synchronous),
        ]
        if not durable:
            self._peers.append(Lmdb(path("writemap"), sync=False, writemap=True))

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.close()
