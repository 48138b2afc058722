"""Consume, process and produce exactly once: transactions with one message and a position (P27)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import exclusivelog as xl
from bench.append import messages
from bench.measure import (
    POWER,
    PROCESS,
    Arm,
    Figure,
    Settings,
    Stores,
    Target,
    latencies,
    take_turns,
)

CALLS = 200  # per round
INPUTS = 10_000  # messages that are read again and again
THREADS = 8
SECONDS = 0.5  # that threads commit, per round


def p27(settings: Settings) -> Figure:
    """What a transaction costs that reads one message, sends one and commits the position, beside a
    send; and what threads with topics of their own gain."""
    figure = Figure("P27", "one message consumed, one produced, the position committed")
    for name, durability in (("power", POWER), ("process", PROCESS)):
        with Stores(settings) as stores:
            _measure(
                figure,
                stores.engine(name, durability=name),
                name,
                durability,
                settings.rounds_or(10),
            )
    return figure


def _measure(figure: Figure, engine: xl.Engine, name: str, durability: str, rounds: int) -> None:
    send = partial(engine.topic("sent").producer("exclusive").send, messages(1)[0])
    steps = [step(engine, number) for number in range(THREADS)]
    one, many = f"1 thread, {name}", f"{THREADS} threads, {name}"
    results = take_turns(
        [
            Arm(
                f"send, {name}", lambda _: latencies(send, CALLS), CALLS, "s", durability=durability
            ),
            Arm(
                f"exactly once, {name}",
                lambda _: latencies(steps[0], CALLS),
                CALLS,
                "s",
                durability=durability,
            ),
            Arm(one, partial(by_threads, steps[:1]), durability=durability),
            Arm(many, partial(by_threads, steps), durability=durability),
        ],
        rounds,
    )
    figure.series += results.values()
    power = durability == POWER
    figure.compare(
        f"exactly once, {name}",
        results[f"exactly once, {name}"],
        results[f"send, {name}"],
        Target(most_ratio=1.3) if power else Target(most=5e-6),
    )
    figure.compare(
        f"by {THREADS} threads, {name}",
        results[many],
        results[one],
        Target(least_ratio=4.0) if power else None,
    )


def step(engine: xl.Engine, number: int) -> Callable[[], None]:
    """A function that reads the next message of a topic, and commits what is made of it."""
    source = engine.topic(f"in {number}")
    with source.producer() as producer:
        producer.send_many(messages(INPUTS))
    reader = source.reader(group="readers")
    made = engine.topic(f"out {number}").producer("exclusive")

    def call() -> None:
        if reader.position == INPUTS:
            reader.seek("earliest")
        value = reader.read_next(timeout=0).value
        with engine.transaction() as txn:
            made.send(value, transaction=txn)
            txn.commit_cursor(reader)

    return call


def by_threads(steps: list[Callable[[], None]], _: object) -> list[float]:
    """Transactions a second of so many threads."""
    start = time.perf_counter()
    end, count = start + SECONDS, [0] * len(steps)

    def work(number: int) -> None:
        while True:
            steps[number]()
            count[number] += 1
            if time.perf_counter() >= end:
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sum(count) / (time.perf_counter() - start)]
