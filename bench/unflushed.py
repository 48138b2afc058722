"""Sends with durability="process", and the longest pause of a send (P2)."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from statistics import fmean

import exclusivelog as xl
from bench.append import SIZE, messages
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Row,
    Series,
    Settings,
    Stores,
    Target,
    consecutive,
    in_thread,
    take_turns,
)
from bench.peers import Appenders, Lmdb, Peer, RawFile, Sqlite

RUN, RUNS = 1_000, 5  # calls per sample, and samples per round
LONG = 200_000  # calls per round in search of pauses: 1,000,000 in five rounds
LARGE = 10_000  # bytes; these fill a journal a hundred times as fast
LONG_SECONDS = 2.0  # at most, per round and arm
SETTLE_SECONDS = 0.05
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}

Append = Callable[[], object]


def p2(settings: Settings) -> Figure:
    """The time of a send without a flush, and the pauses that checkpoints cause."""
    figure = Figure("P2", 'send of 100 B, durability="process", one thread')
    with Stores(settings) as stores:
        _measure_cost(figure, stores, settings.rounds_or(10))
    with Stores(settings) as stores:
        _measure_pauses(figure, stores, settings.rounds_or(5))
    return figure


# ---- what a call costs -------------------------------------------------------------------


def _measure_cost(figure: Figure, stores: Stores, rounds: int) -> None:
    value = messages(1)[0]
    engine = stores.engine(durability="process")
    send = partial(engine.topic("orders").producer("exclusive").send, value)
    peers = [*stores.enter_context(Appenders(stores, durable=False))]
    results = take_turns(
        [
            _cost_arm("send", PROCESS, send),
            Arm(
                "send, not in the main thread",
                lambda _: in_thread(lambda: cost_of_runs(send)),
                RUN * RUNS,
                "s",
                durability=PROCESS,
            ),
            *(
                _cost_arm(peer.name, peer.durability, partial(peer.append, value), rival=True)
                for peer in peers
            ),
        ],
        rounds,
        before=settle,
    )
    figure.series += results.values()
    _judge_cost(figure, results)
    figure.notes.append(f"the cost of a send is that of a run of {RUN:,}, divided by their number")


def _cost_arm(name: str, durability: str, append: Append, rival: bool = False) -> Arm:
    return Arm(
        name, lambda _: cost_of_runs(append), RUN * RUNS, "s", durability=durability, rival=rival
    )


def cost_of_runs(append: Append) -> list[float]:
    """Seconds per call, timed over runs of calls: reading a clock takes as long as some calls."""
    samples = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in itertools.repeat(None, RUN):
            append()
        samples.append((time.perf_counter() - start) / RUN)
    return samples


def _judge_cost(figure: Figure, results: dict[str, Series]) -> None:
    targets = {
        "sqlite3 WAL NORMAL": Target(most=3e-6, most_ratio=0.2),
        "py-lmdb, sync=False": Target(most=3e-6, most_ratio=0.333),
    }
    for name, peer in results.items():
        if peer.rival:
            figure.compare(f"send, against {name}", results["send"], peer, targets.get(name))
    figure.compare(
        "send, not in the main thread", results["send, not in the main thread"], results["send"]
    )


# ---- what single calls meet --------------------------------------------------------------


def _measure_pauses(figure: Figure, stores: Stores, rounds: int) -> None:
    process = stores.engine("process", durability="process")
    power = stores.engine("power")
    counts: dict[str, list[int]] = {}
    arms = [
        _watched("send, process", process, counts),
        _watched("send, power", power, counts),
        _watched(f"send, power, {LARGE:,} B", power, counts, LARGE),
        *_peers_arms(stores),
    ]
    results = take_turns(arms, rounds, warm_ups=0, before=settle_the_disk)
    _judge_pauses(figure, results)
    for name, transactions in counts.items():
        figure.state(f"transactions of the ledger under them, {name}", sum(transactions), "")
    figure.series += [
        Series(f"single calls: {name}", one.unit, one.samples, one.durability, one.rival).thinned()
        for name, one in results.items()
    ]
    figure.notes.append(
        "before each run all dirty pages are written to the disk, so that no run pays for those of "
        f"another; of the single calls' times, the plot and the file keep {_kept(results)}"
    )


def _kept(results: dict[str, Series]) -> str:
    longest = max(results.values(), key=lambda one: len(one.samples))
    return f"{len(longest.thinned().samples):,} of up to {len(longest.samples):,}"


def _watched(name: str, engine: xl.Engine, counts: dict[str, list[int]], size: int = SIZE) -> Arm:
    """Time single sends, and count the ledger's transactions meanwhile: a checkpoint is at least
    one."""
    value = messages(1, size)[0]
    send = partial(engine.topic(f"of {size} B").producer("exclusive").send, value)
    unflushed = "process" in name
    counts[name] = []

    def work(_: object) -> list[float]:
        with counted_transactions(engine, counts[name]):
            return consecutive(send, LONG, LONG_SECONDS)

    return Arm(name, work, 1, "s", durability=PROCESS if unflushed else POWER)


def _peers_arms(stores: Stores) -> list[Arm]:
    peers: list[Peer] = [
        Sqlite(stores.path("sqlite.db"), "NORMAL"),
        Lmdb(stores.path("lmdb"), sync=False),
        RawFile(stores.path("raw")),
    ]
    return [_peer_arm(stores.enter_context(closing(peer))) for peer in peers]


def _peer_arm(peer: Peer) -> Arm:
    append = partial(peer.append, messages(1)[0])
    return Arm(
        peer.name,
        lambda _: consecutive(append, LONG, LONG_SECONDS),
        1,
        "s",
        durability=peer.durability,
        rival=True,
    )


@contextlib.contextmanager
def counted_transactions(engine: xl.Engine, counts: list[int]) -> Iterator[None]:
    """Add to `counts` the number of transactions that any thread committed during the block."""
    before = last_transaction(engine)
    yield
    counts.append(last_transaction(engine) - before)


def last_transaction(engine: xl.Engine) -> int:
    with engine.ledger.environment() as env:
        number: int = env.info()["last_txnid"]
    return number


def _judge_pauses(figure: Figure, results: dict[str, Series]) -> None:
    pairs = (
        ("send, process", "sqlite3 WAL NORMAL"),
        ("send, process", "py-lmdb, sync=False"),
        ("send, power", "pwrite + fdatasync"),
    )
    for name, rival in pairs:
        ours, peer = results[name], results[rival]
        what = f"single calls: {name}, mean of {len(ours.samples):,}, checkpoints and all"
        figure.rows.append(
            Row(what, fmean(ours.samples), "s", fmean(peer.samples), rival, rival=True)
        )
        for percentile, share in SHARES.items():
            what = f"single calls: {name}, {percentile} of {len(ours.samples):,}"
            figure.compare_at(share, what, ours, peer)
    large = results[f"send, power, {LARGE:,} B"]
    for percentile, share in SHARES.items():
        what = f"single calls: {large.name}, {percentile} of {len(large.samples):,}"
        figure.state(what, large.percentile(share), "s")


def settle() -> None:
    """Wait for the end of a checkpoint in the background."""
    time.sleep(SETTLE_SECONDS)


def settle_the_disk() -> None:
    """Also wait until the disk has written what the last run has left."""
    settle()
    os.sync()
    settle()
