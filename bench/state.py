"""Shared maps and states: put, get, many concurrent writers, and opening one (P14)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import exclusivelog as xl
from bench.append import messages
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Series,
    Settings,
    Stores,
    Target,
    latencies,
    take_turns,
)
from bench.unflushed import RUN, RUNS, cost_of_runs
from exclusivelog import aio

KEYS, UPDATES = 100_000, 10_000_000
AT_ONCE = 100_000
CALLS = 200  # durable ones, per round
VALUE = 20  # bytes
THREADS, TASKS = 16, 64
SECONDS = 0.5  # that writers write, per round


def p14(settings: Settings) -> Figure:
    """The cost of calls of a map, and that the time to open it depends on its size, not on its
    history."""
    figure = Figure("P14", f"SharedMap of {KEYS:,} keys")
    with Stores(settings) as stores:
        _measure_calls(figure, stores, settings.rounds_or(10))
    for durability, name in ((POWER, "power"), (PROCESS, "process")):
        with Stores(settings) as stores:
            _measure_writers(figure, stores, settings.rounds_or(10), name, durability)
    with Stores(settings) as stores:
        _measure_states(figure, stores, settings.rounds_or(10))
    with Stores(settings) as stores:
        _measure_opening(figure, stores, settings.rounds_or(5))
    return figure


# ---- calls -------------------------------------------------------------------------------


def _measure_calls(figure: Figure, stores: Stores, rounds: int) -> None:
    value = messages(1)[0]
    power, process = stores.engine("power"), stores.engine("process", durability="process")
    send = partial(power.topic("orders").producer("exclusive").send, value)
    durable = stores.enter_context(bytes_map(power.topic("map")))
    quick = stores.enter_context(bytes_map(process.topic("map")))
    quick.put("k", value)
    results = take_turns(
        [
            Arm(
                "put",
                lambda _: latencies(partial(durable.put, "k", value), CALLS),
                CALLS,
                "s",
                durability=POWER,
            ),
            Arm("send", lambda _: latencies(send, CALLS), CALLS, "s", durability=POWER),
            Arm(
                "put, process",
                lambda _: cost_of_runs(partial(quick.put, "k", value)),
                RUN * RUNS,
                "s",
                durability=PROCESS,
            ),
            Arm("get", lambda _: cost_of_runs(partial(quick.get, "k")), RUN * RUNS, "s"),
            Arm(
                "get, latest",
                lambda _: cost_of_runs(partial(quick.get, "k", latest=True)),
                RUN * RUNS,
                "s",
            ),
        ],
        rounds,
    )
    figure.series += results.values()
    figure.compare("put, durable", results["put"], results["send"], Target(most_ratio=1.3))
    figure.compare("put, process", results["put, process"], target=Target(most=10e-6))
    for name in ("get", "get, latest"):
        rate = 1 / results[name].median
        figure.state(f"{name}, its owner", rate, "/s", Target(least=1e6) if name == "get" else None)


# ---- many writers (rule I5), and states of 100,000 keys ----------------------------------


def _measure_writers(
    figure: Figure, stores: Stores, rounds: int, name: str, durability: str
) -> None:
    """One thread and many, one task and many: alternating, because the cost of a flush changes."""
    engine = stores.engine(durability=name)
    shared = stores.enter_context(bytes_map(engine.topic("map")))
    shared.put("k", b"")
    arms = {
        f"{count} {kind}, {name}": Arm(
            f"{count} {kind}, {name}",
            partial(_rate_of, run, shared, count),
            1,
            "/s",
            durability=durability,
        )
        for kind, run, counts in (
            ("threads", by_threads, (1, THREADS)),
            ("tasks", by_tasks, (1, TASKS)),
        )
        for count in counts
    }
    results = take_turns(list(arms.values()), rounds)
    figure.series += results.values()
    for kind, many, least in (("threads", THREADS, 4.0), ("tasks", TASKS, 8.0)):
        figure.compare(
            f"puts of {many} {kind}, {name}",
            results[f"{many} {kind}, {name}"],
            results[f"1 {kind}, {name}"],
            Target(least_ratio=least),
        )


def _rate_of(run: Any, shared: Any, count: int, _: object) -> list[float]:
    return [run(shared, count)]


def by_threads(shared: xl.SharedMap[str, bytes], count: int) -> float:
    """Puts a second of so many threads."""
    start = time.perf_counter()
    end, made = start + SECONDS, [0] * count

    def work(number: int) -> None:
        while True:
            shared.put(f"k{number}", b"x" * VALUE)
            made[number] += 1
            if time.perf_counter() >= end:
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(made) / (time.perf_counter() - start)


def by_tasks(shared: xl.SharedMap[str, bytes], count: int) -> float:
    """The same of so many tasks of asyncio."""
    mine = aio.SharedMap.wrap(shared)

    async def work(number: int, end: float) -> int:
        made = 0
        while True:
            await mine.put(f"k{number}", b"x" * VALUE)
            made += 1
            if time.perf_counter() >= end:
                return made

    async def main() -> float:
        start = time.perf_counter()
        made = await asyncio.gather(*(work(n, start + SECONDS) for n in range(count)))
        return sum(made) / (time.perf_counter() - start)

    return asyncio.run(main())


def _measure_states(figure: Figure, stores: Stores, rounds: int) -> None:
    """Reading one key of a large state copies nothing; writing one takes as long as a send."""
    engine = stores.engine("power")
    send = partial(engine.topic("orders").producer("exclusive").send, bytes(VALUE))
    state: xl.SharedState[dict[str, int], list[Any]] = xl.SharedState(
        engine.topic("state"), dict, lambda state, op: state.update([op]), snapshot_every=None
    )
    with state:
        state.write(lambda _: [[f"k{number}", number] for number in range(KEYS)])
        read = partial(state.read, lambda now: now["k5"])
        write = partial(state.write, lambda now: [["k5", now["k5"] + 1]])
        results = take_turns(
            [
                Arm("read", lambda _: cost_of_runs(read), RUN * RUNS, "s"),
                Arm("write", lambda _: latencies(write, CALLS), CALLS, "s", durability=POWER),
                Arm(
                    "send beside it", lambda _: latencies(send, CALLS), CALLS, "s", durability=POWER
                ),
            ],
            rounds,
        )
    figure.series += results.values()
    what = f"of a state of {KEYS:,} keys"
    figure.compare(f"read one {what}", results["read"], target=Target(most=10e-6))
    figure.compare(
        f"write one {what}, durable",
        results["write"],
        results["send beside it"],
        Target(most_ratio=1.2),
    )


def bytes_map(topic: xl.Topic) -> xl.SharedMap[str, bytes]:
    return xl.SharedMap(topic, value="bytes", snapshot_every=None)


# ---- opening -----------------------------------------------------------------------------


def _measure_opening(figure: Figure, stores: Stores, rounds: int) -> None:
    engine = stores.engine(durability="process")
    short, long = engine.topic("short"), engine.topic("long")
    fill(short, KEYS)
    fill(long, UPDATES)
    with bytes_map(long) as shared:  # without a snapshot it reads them all
        assert len(shared) == KEYS
        shared.snapshot()
    with bytes_map(short) as shared:
        shared.snapshot()
    results = take_turns([opening("long", long), opening("short", short)], rounds)
    figure.series += results.values()
    figure.compare(
        f"opening with a snapshot, {UPDATES:,} updates",
        results["long"],
        Series(f"{KEYS:,} updates", "s", results["short"].samples),
        Target(most_ratio=1.2),
    )
    before = long.first_offset
    figure.state("the same, once older messages are trimmed", _trimmed(long, rounds), "s")
    assert before < long.first_offset


def fill(topic: xl.Topic, updates: int) -> None:
    """Send so many updates, as a map writes them: each key at least once."""
    with topic.producer("exclusive") as producer:
        for items in updates_of(updates):
            producer.send_many([value for _, value in items], keys=[key for key, _ in items])


def updates_of(count: int) -> Iterator[list[tuple[bytes, bytes]]]:
    chance = random.Random(1)
    keys = [b"key %06d" % number for number in range(KEYS)]
    for start in range(0, count, AT_ONCE):
        data = chance.randbytes(VALUE * AT_ONCE)
        chosen = keys if start == 0 else chance.choices(keys, k=AT_ONCE)
        some = min(AT_ONCE, count - start)
        yield [(chosen[i], data[VALUE * i : VALUE * (i + 1)]) for i in range(some)]


def opening(name: str, topic: xl.Topic) -> Arm:
    def work(_: object) -> list[float]:
        return latencies(lambda: bytes_map(topic).close(), 1)

    return Arm(name, work, unit="s")


def _trimmed(topic: xl.Topic, rounds: int) -> float:
    topic.trim(before=topic.next_offset)
    return take_turns([opening("trimmed", topic)], rounds)["trimmed"].median
