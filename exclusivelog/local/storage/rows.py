"""Rows: the names of the tables, and their bytes within one LMDB transaction."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from exclusivelog.errors import LedgerCorruptedError

if TYPE_CHECKING:
    import lmdb

NAMES = (
    "meta", "names", "topics", "entries", "producers", "holders", "queue", "engines", "mail",
    "trash", "segments", "claims", "claimants", "transfers", "cursors", "retention",
    "views", "snapshots", "fences", "batches",
)  # fmt: skip
U64 = struct.Struct(">Q")
PAIR = struct.Struct(">QQ")

Decoded = TypeVar("Decoded")


class NoRows:
    """The cursor of a table that an earlier format does not have: it finds no row."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **options: False


class Rows:
    """Access to the rows of all tables of one ledger, while a transaction lasts."""

    __slots__ = ("_databases", "_txn", "changed", "path")

    def __init__(self, txn: lmdb.Transaction[bytes], databases: dict[str, Any], path: str) -> None:
        self._txn = txn
        self._databases = databases
        self.path = path
        self.changed = False

    def get(self, table: str, key: bytes) -> bytes | None:
        """The data under a key."""
        database = self._databases[table]
        return None if database is None else self._txn.get(key, db=database)

    def put(self, table: str, key: bytes, data: bytes, overwrite: bool = True) -> bool:
        """Write a row; False if there is one that may not be overwritten."""
        self.changed = True
        return self._txn.put(key, data, overwrite=overwrite, db=self._databases[table])

    def get_many(self, table: str, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
        """(key, data) of those of these rows that are there, in the order of `keys`."""
        return list(self.cursor(table).getmulti(keys)) if keys else []

    def put_many(
        self, table: str, items: list[tuple[bytes, bytes]], overwrite: bool = True
    ) -> bool:
        """Write (key, data) rows; False if there is one that may not be overwritten."""
        self.changed = True
        consumed, added = self.cursor(table).putmulti(items, overwrite=overwrite)
        return consumed == added == len(items)

    def delete(self, table: str, key: bytes) -> bool:
        """Delete a row; False if there was none."""
        self.changed = True
        return self._txn.delete(key, db=self._databases[table])

    def cursor(self, table: str) -> lmdb.Cursor[bytes]:
        """LMDB's own cursor, in the order of the keys. Do not change the table while iterating."""
        database = self._databases[table]
        return (
            cast("lmdb.Cursor[bytes]", NoRows())
            if database is None
            else (self._txn.cursor(db=database))
        )

    def under(self, table: str, owner: int, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """(key, data) of the rows whose keys begin with the number `owner`, from the key `start`
        on; the keys are given without that number. Lazy, as a cursor is."""
        prefix = U64.pack(owner)
        cursor = self.cursor(table)
        if cursor.set_range(prefix + start):
            for key, data in cursor:
                if not key.startswith(prefix):
                    return
                yield key[U64.size :], data

    def find(self, table: str, key: bytes, decode: Callable[[bytes], Decoded]) -> Decoded | None:
        """The decoded data under a key; None if there is none."""
        data = self.get(table, key)
        return None if data is None else self.decode(table, decode, data)

    def decode(self, table: str, decode: Callable[[bytes], Decoded], data: bytes) -> Decoded:
        """The decoded data of a row; LedgerCorruptedError if it cannot be decoded."""
        try:
            return decode(data)
        except (struct.error, ValueError, TypeError) as error:
            raise self.damaged(table, error) from None

    def damaged(self, table: str, error: Exception) -> LedgerCorruptedError:
        """The error for a damaged row of this table."""
        return LedgerCorruptedError(
            f"{self.path}: a row of the table {table!r} is damaged: {error}"
        )

    def next_id(self, counter: bytes) -> int:
        """The next number of this counter. No number is used twice."""
        last = self.find("meta", counter, u64)
        given = 1 if last is None else last + 1
        self.put("meta", counter, U64.pack(given))
        return given


def u64(data: bytes) -> int:
    """The number that a row holds."""
    value: int = U64.unpack(data)[0]
    return value


TIMES, OVERDUE = b"times", b"overdue"
KIND, PRIORITIES, ANNOUNCED = b"kind", b"priorities", b"announced"
