"""Sends to many topics beside what another process does on a topic of its own (P26)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import exclusivelog as xl
from bench.append import messages
from bench.company import COMPANY, beside
from bench.measure import POWER, PROCESS, Arm, Figure, Row, Settings, Stores, Target, take_turns
from bench.topics import names, own
from testing.processes import Worker, workers

TOPICS = 1_000
WINDOW_SECONDS = 0.5
AT_ONCE = 10_000  # messages on their way by send_async
SENDS = 100  # between two looks at the clock
ALONE = "alone"
RATES = {"10/s": 10.0, "100/s": 100.0, "at full speed": None}

# ---- what is measured --------------------------------------------------------------------


def p26(settings: Settings) -> Figure:
    """Sends to 1,000 topics, alone and beside transactions, grants and claims of others."""
    figure = Figure("P26", f"sends to {TOPICS:,} topics beside what happens on another topic")
    figure.notes.append("the others are one thread of another process, on topics of their own")
    rates: dict[str, list[float]] = {}
    arms: list[Arm] = []
    with Stores(settings) as stores, workers() as make:
        for kind, durability, survives in (
            ("send", "process", PROCESS),
            ("send_async", "power", POWER),
        ):
            engine = stores.engine(durability, durability=durability)
            worker = make(engine.path, "company", durability=durability)
            arms += _arms(kind, survives, own(engine, names(TOPICS), False), worker, rates)
        results = take_turns(arms, settings.rounds_or(5))
    figure.series = list(results.values())
    for name, series in results.items():
        kind, _, company = name.partition(", ")
        if company != ALONE:
            figure.compare(name, series, results[f"{kind}, {ALONE}"], Target(least_ratio=0.9))
            did = sorted(rates[name])[len(rates[name]) // 2]
            figure.rows.append(Row(f"{name}: what these reached", did, "/s"))
    return figure


def _arms(
    kind: str,
    durability: str,
    producers: Sequence[xl.Producer],
    worker: Worker,
    rates: dict[str, list[float]],
) -> list[Arm]:
    measure = SENT[kind]
    turn = itertools.cycle(producers)

    def alone(_: Any) -> list[float]:
        return [measure(turn)]

    def arm(company: str, how: str) -> Arm:
        name = f"{kind}, beside {company} {how}"
        reached = rates.setdefault(name, [])

        def work(_: Any) -> list[float]:
            kinds = {company: (COMPANY[company], RATES[how], ())}
            with beside(worker, kinds, {company: reached}):
                return [measure(turn)]

        return Arm(name, work, durability=durability)

    return [
        Arm(f"{kind}, {ALONE}", alone, durability=durability),
        *(arm(company, how) for company in COMPANY for how in RATES),
    ]


def sent(turn: Iterator[xl.Producer]) -> float:
    """Messages a second, one by one, round robin."""
    value, count = messages(1)[0], 0
    began = time.perf_counter()
    while time.perf_counter() - began < WINDOW_SECONDS:
        for producer in itertools.islice(turn, SENDS):
            producer.send(value)
        count += SENDS
    return count / (time.perf_counter() - began)


def sent_async(turn: Iterator[xl.Producer]) -> float:
    """The same by send_async, until all of them are acknowledged."""
    value, count = messages(1)[0], 0
    began = time.perf_counter()
    while time.perf_counter() - began < WINDOW_SECONDS:
        receipts = [producer.send_async(value) for producer in itertools.islice(turn, AT_ONCE)]
        for receipt in receipts:
            receipt.result()
        count += AT_ONCE
    return count / (time.perf_counter() - began)


SENT = {"send": sent, "send_async": sent_async}
