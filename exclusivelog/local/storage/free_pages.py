"""LMDB's list of free pages, which its Python package does not show.

It is a tree in data.mdb, of the format 0.9 (little-endian here, as the ledger is). Its records have
the number of a transaction as key, and list the pages that this transaction has freed. LMDB reuses
them once every open read sees a later transaction. Call `count` in a write transaction: LMDB then
changes no page of the tree.

```text
meta page   40  page size, u32      80  root of the tree, u64     144  transaction, u64
            48  its branch, leaf and overflow pages, 3 x u64
page        10  flags, u16          12  end of the places of its nodes, u16
            16  the place of each node, u16
branch node  0  low 16 bits of a page, middle 16 bits, high 16 bits
leaf node    0  size of the data, u32      4  flags, u16      6  size of the key, u16
             8  key, then the data, or the page that has it; the data begins with a count, u64
```
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

META = struct.Struct("<I4xQQQ8xQ")  # from META_AT on
META_AT, TRANSACTION_AT, META_BYTES = 40, 144, 152
NO_PAGE = 2**64 - 1
PAGE_HEADER, LEAF, BIG = 16, 0x02, 0x01
META_PAGES = 2


class RoomLeft(NamedTuple):
    """The bytes that the tables may still take; below 0, they take some of the reserve. `kept`:
    open reads keep so much from being used again that the rest is for changes of ownership."""

    left: float
    kept: bool


FAR = RoomLeft(math.inf, False)


class Pinned(NamedTuple):
    """The pages that transactions from `oldest` to `newest` have freed. As long as a read sees
    transaction `oldest`, LMDB does not change these records, only adds later ones."""

    oldest: int
    newest: int
    pages: int


NOTHING = Pinned(-1, -1, 0)


def count(fd: int, oldest: int, known: Pinned = NOTHING) -> tuple[int, Pinned]:
    """How many pages the list itself takes, and those in it that a read may use which sees
    transaction `oldest`; and the latter by themselves. `fd`: a descriptor of data.mdb. `known`: the
    result of an earlier call, whose records are not read again: beside a long read, each
    transaction would take longer than the one before."""
    size, branches, leaves, overflow, root = _newest(fd)
    newest, pages = oldest - 1, 0
    if known.oldest == oldest:
        _, newest, pages = known
    counted = newest
    if root != NO_PAGE:
        for transaction, freed in _records(fd, root, size):
            if transaction <= counted:
                break
            newest, pages = max(newest, transaction), pages + freed
    return META_PAGES + branches + leaves + overflow + pages, Pinned(oldest, newest, pages)


def _newest(fd: int) -> tuple[int, ...]:
    first = os.pread(fd, META_BYTES, 0)
    second = os.pread(fd, META_BYTES, META.unpack_from(first, META_AT)[0])
    newest = max(first, second, key=lambda page: struct.unpack_from("<Q", page, TRANSACTION_AT))
    size = META.unpack_from(first, META_AT)[0]
    return (size, *META.unpack_from(newest, META_AT)[1:])


def _records(fd: int, number: int, size: int) -> Iterator[tuple[int, int]]:
    """(transaction, how many pages it has freed), the newest first."""
    page = os.pread(fd, size, number * size)
    flags, lower = struct.unpack_from("<HH", page, 10)
    places = struct.unpack_from(f"<{(lower - PAGE_HEADER) // 2}H", page, PAGE_HEADER)
    for place in reversed(places):
        if flags & LEAF:
            yield _record(fd, page, place, size)
        else:
            low, middle, high = struct.unpack_from("<HHH", page, place)
            yield from _records(fd, low | middle << 16 | high << 32, size)


def _record(fd: int, page: bytes, place: int, size: int) -> tuple[int, int]:
    _, flags, length = struct.unpack_from("<IHH", page, place)
    transaction, found = struct.unpack_from("<QQ", page, place + 8)
    if length != 8:
        raise ValueError("it is no list of free pages")
    if flags & BIG:  # `found` is the page that has the data
        (found,) = struct.unpack("<Q", os.pread(fd, 8, found * size + PAGE_HEADER))
    return transaction, found
