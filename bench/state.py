"""A shared map: put, get, and how long it takes to open one with a long history (P14)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

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

KEYS, UPDATES = 100_000, 10_000_000
AT_ONCE = 100_000
CALLS = 200  # durable ones, per round
VALUE = 20  # bytes


def p14(settings: Settings) -> Figure:
    """What calls of a map cost, and that opening it costs what it has, not what it has seen."""
    figure = Figure("P14", f"SharedMap of {KEYS:,} keys")
    with Stores(settings) as stores:
        _measure_calls(figure, stores, settings.rounds_or(10))
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
            Arm("put", lambda _: latencies(partial(durable.put, "k", value), CALLS), CALLS, "s",
                durability=POWER),
            Arm("send", lambda _: latencies(send, CALLS), CALLS, "s", durability=POWER),
            Arm("put, process", lambda _: cost_of_runs(partial(quick.put, "k", value)),
                RUN * RUNS, "s", durability=PROCESS),
            Arm("get", lambda _: cost_of_runs(partial(quick.get, "k")), RUN * RUNS, "s"),
            Arm("get, latest", lambda _: cost_of_runs(partial(quick.get, "k", latest=True)),
                RUN * RUNS, "s"),
        ],
        rounds,
    )  # fmt: skip
    figure.series += results.values()
    figure.compare("put, durable", results["put"], results["send"], Target(most_ratio=1.3))
    figure.compare("put, process", results["put, process"], target=Target(most=10e-6))
    for name in ("get", "get, latest"):
        rate = 1 / results[name].median
        figure.state(f"{name}, its owner", rate, "/s", Target(least=1e6) if name == "get" else None)


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
        f"opening with a snapshot, {UPDATES:,} updates", results["long"],
        Series(f"{KEYS:,} updates", "s", results["short"].samples), Target(most_ratio=1.2),
    )  # fmt: skip
    before = long.first_offset
    figure.state("the same, once older messages are trimmed", _trimmed(long, rounds), "s")
    assert before < long.first_offset


def fill(topic: xl.Topic, updates: int) -> None:
    """So many updates: each key at least once, as a map writes them."""
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
