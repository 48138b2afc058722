"""Appending 100-byte messages: one by one (P1), pipelined (P3), many at a time (P4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import exclusivelog as xl
from bench.measure import (
    POWER,
    Arm,
    Figure,
    Row,
    Series,
    Settings,
    Stores,
    Target,
    in_thread,
    latencies,
    take_turns,
)
from bench.peers import Appenders, Lmdb, PersistQueue, RawFile, Rocks, Sqlite

SIZE = 100
PER_TRANSACTION = 1_000
PUTMULTI = f"py-lmdb putmulti, {PER_TRANSACTION:,} per transaction"
UNSYNCED = f"{PUTMULTI}, sync=False"


def messages(count: int, size: int = SIZE) -> list[bytes]:
    """Messages that differ."""
    return [i.to_bytes(8, "big") * (size // 8) + bytes(size % 8) for i in range(count)]


# ---- P1: one durable send ----------------------------------------------------------------


# What a send must not exceed, in times of the peer's.
P1_RATIOS = {RawFile: 1.3, Lmdb: 1.0, Sqlite: 1.0, Rocks: 1.0, PersistQueue: 1.0}


def p1(settings: Settings) -> Figure:
    """Durable sends of one message, by one thread, compared with all peers."""
    figure = Figure("P1", "durable send of 100 B, one thread: p50")
    calls, value = 100, messages(1)[0]
    with Stores(settings) as stores:
        producer = stores.engine().topic("orders").producer("exclusive")
        send = partial(producer.send, value)
        peers = [*stores.enter_context(Appenders(stores))]

        def beside(_: Any) -> Any:
            return in_thread(lambda: latencies(send, calls))

        arms = [
            _one_by_one("exclusivelog send", POWER, send, calls),
            Arm("send, not in the main thread", beside, calls, "s", durability=POWER),
            *(
                _one_by_one(peer.name, peer.durability, partial(peer.append, value), calls, True)
                for peer in peers
            ),
        ]
        # SQLite's log grows, at a price, until its first checkpoint, 1,000 pages on.
        results = take_turns(arms, settings.rounds_or(10), warm_ups=15)
    figure.series = list(results.values())
    ours, elsewhere = figure.series[:2]
    for peer in peers:
        most = P1_RATIOS.get(type(peer))
        figure.compare(
            f"send, against {peer.name}",
            ours,
            results[peer.name],
            None if most is None else Target(most_ratio=most),
        )
    figure.compare("send, not in the main thread", elsewhere, results[peers[0].name])
    for share in (0.95, 0.99):
        figure.compare_at(share, f"send, p{100 * share:g}", ours, results[peers[0].name])
    return figure


def _one_by_one(
    name: str, durability: str, append: Callable[[], object], calls: int, rival: bool = False
) -> Arm:
    return Arm(
        name, lambda _: latencies(append, calls), calls, "s", durability=durability, rival=rival
    )


# ---- P3: pipelined -----------------------------------------------------------------------


def p3(settings: Settings) -> Figure:
    """send_async from one thread, flushed at the end."""
    figure = Figure("P3", "pipelined durable send_async of 100 B")
    values = messages(300_000)
    with Stores(settings) as stores:
        producer = stores.engine().topic("orders").producer("exclusive")
        lmdb = stores.enter_context(closing(Lmdb(stores.path("lmdb"))))
        results = take_turns(
            [
                Arm(
                    "send_async",
                    lambda _: pipeline(producer, values),
                    len(values),
                    durability=POWER,
                ),
                Arm(
                    "send_async, every receipt's result()",
                    lambda _: pipeline_and_ask(producer, values),
                    len(values),
                    durability=POWER,
                ),
                putmulti(PUTMULTI, lmdb, values, PER_TRANSACTION),
            ],
            settings.rounds_or(7),
            before=stores.warm_memory,
        )
    figure.series = list(results.values())
    ours, asked, peer = figure.series
    figure.compare("send_async, then flush", ours, peer, Target(least=1.5e6, least_ratio=1.5))
    figure.compare("send_async, every receipt kept and asked", asked, peer)
    figure.rows.append(cpu_row("CPU per message", ours, peer))
    return figure


def pipeline(producer: xl.Producer, values: Sequence[bytes]) -> None:
    send = producer.send_async
    for value in values:
        send(value)
    producer.flush()


def pipeline_and_ask(producer: xl.Producer, values: Sequence[bytes]) -> None:
    receipts = [producer.send_async(value) for value in values]
    for receipt in receipts:
        receipt.result()


# ---- P4: many at a time ------------------------------------------------------------------

# messages per call: messages per round
BATCHES = {1_000: 200_000, 10_000: 200_000, 100_000: 500_000, 1_000_000: 1_000_000}


def p4(settings: Settings) -> Figure:
    """send_many of lists of bytes and of arrow arrays, against putmulti."""
    figure = Figure("P4", "send_many of 100 B")
    figure.notes.append("all arms write into memory that was touched before, outside the clock")
    values = messages(max(BATCHES.values()))
    with Stores(settings) as stores:
        producer = stores.engine().topic("orders").producer("exclusive")
        arms = [send_many(producer, values[:total], batch) for batch, total in BATCHES.items()]
        arms += _arrow_arms(producer, values)
        arms += _putmulti_arms(stores, values)
        arms += _raw_arms(stores, values)
        results = take_turns(arms, settings.rounds_or(5), before=stores.warm_memory)
    figure.series = list(results.values())
    for batch in BATCHES:
        ours, same = results[f"send_many, {batch:,} a call"], results[same_batch(batch)]
        target = Target(least=5e6, least_ratio=4) if batch >= 100_000 else None
        figure.compare(f"send_many, {batch:,} a call", ours, results[PUTMULTI], target)
        if batch != PER_TRANSACTION:
            figure.compare(f"send_many, {batch:,} a call; the same for the peer", ours, same)
        figure.compare(
            f"send_many, {batch:,} a call; the peer not flushed", ours, results[UNSYNCED]
        )
        figure.rows.append(cpu_row(f"CPU per message, {batch:,} a call", ours, same))
    for batch in (100_000, 1_000_000):
        name = f"send_many, arrow, {batch:,} a call"
        for grows in (True, False):
            target = Target(least=0.5e9) if grows else None
            figure.compare(name, results[name], results[raw_name(batch, grows)], target)
    return figure


def send_many(producer: xl.Producer, values: Sequence[bytes], batch: int) -> Arm:
    """Lists that were prepared before, as an application has them."""
    lists = [values[at : at + batch] for at in range(0, len(values), batch)]

    def work(_: Any) -> None:
        for part in lists:
            producer.send_many(part)

    return Arm(f"send_many, {batch:,} a call", work, len(values), durability=POWER)


def putmulti(name: str, lmdb: Lmdb, values: Sequence[bytes], per_transaction: int) -> Arm:
    """Keys and pairs are created outside of the timed part."""
    return Arm(
        name,
        lambda items: lmdb.put_many(items, per_transaction),
        len(values),
        prepare=lambda: lmdb.items(values),
        durability=lmdb.durability,
        rival=True,
    )


def same_batch(batch: int) -> str:
    return PUTMULTI.replace(f"{PER_TRANSACTION:,}", f"{batch:,}")


def raw_name(batch: int, grows: bool) -> str:
    file = "a growing file" if grows else "a preallocated file"
    return f"pwrite + fdatasync of {batch * SIZE / 1e6:g} MB, {file}"


def _putmulti_arms(stores: Stores, values: Sequence[bytes]) -> list[Arm]:
    synced = stores.enter_context(closing(Lmdb(stores.path("lmdb"))))
    unsynced = stores.enter_context(closing(Lmdb(stores.path("unsynced"), sync=False)))
    arms = [
        putmulti(same_batch(batch), synced, values[:total], batch)
        for batch, total in BATCHES.items()
    ]
    return [*arms, putmulti(UNSYNCED, unsynced, values[:200_000], PER_TRANSACTION)]


def _arrow_arms(producer: xl.Producer, values: Sequence[bytes]) -> list[Arm]:
    import pyarrow as pa

    arms = []
    for batch in (100_000, 1_000_000):
        arrays = [pa.array(values[at : at + batch]) for at in range(0, BATCHES[batch], batch)]

        def work(_: Any, arrays: list[Any] = arrays) -> None:
            for array in arrays:
                producer.send_many(array)

        name = f"send_many, arrow, {batch:,} a call"
        arms.append(Arm(name, work, BATCHES[batch] * SIZE, "B/s", durability=POWER))
    return arms


def _raw_arms(stores: Stores, values: Sequence[bytes]) -> list[Arm]:
    """The time of the disk itself: the same bytes into a preallocated and a growing file."""
    arms = []
    for batch in (100_000, 1_000_000):
        data = b"".join(values[:batch])
        for grows, size in ((False, 4 * len(data)), (True, 0)):
            name = raw_name(batch, grows)
            raw = stores.enter_context(closing(RawFile(stores.path(name), size)))
            arms.append(_raw_arm(name, raw, data, BATCHES[batch] // batch))
    return arms


def _raw_arm(name: str, raw: RawFile, data: bytes, times: int) -> Arm:
    def work(_: Any) -> None:
        for _at in range(times):
            raw.append(data)

    return Arm(name, work, times * len(data), "B/s", durability=POWER, rival=True)


def cpu_row(what: str, ours: Series, peer: Series) -> Row:
    """CPU time of this process, which does not depend on the noise of the disk."""
    assert ours.cpu is not None
    assert peer.cpu is not None
    return Row(what, ours.cpu, "s", peer.cpu, peer.name, rival=True)
