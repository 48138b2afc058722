"""Rows that users meet in company, measured in company (P36): a durable send (P1), a send under
`process` (P2), messages to many topics (P18), and one message out of many (P19), each also beside a
transaction stream, a reader, checkpoints, and all three. These are another process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import exclusivelog as xl
from bench.append import messages
from bench.beside import sent_async
from bench.company import Kind, beside, checkpoint, scan, tail, transact
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
    take_turns,
)
from bench.peers import RawFile
from bench.scan import check
from bench.topics import names, own
from testing.processes import Worker, workers

SECONDS, MOST_CALLS = 0.5, 1_000_000  # per round
TOPICS = 10_000
OUT_OF, BATCH = 1_000_000, 100_000  # messages, of which one is read; sent at a time
ALONE = "alone"
STREAM, READER, CHECKPOINTS = "transactions", "a reader", "checkpoints"
CHECKPOINTS_PER_SECOND = 10.0  # ten times as many as usual
ALL = "all three"
COMPANIES = {
    ALONE: (),
    STREAM: (STREAM,),
    READER: (READER,),
    CHECKPOINTS: (CHECKPOINTS,),
    ALL: (STREAM, READER, CHECKPOINTS),
}


@dataclass(frozen=True)
class Measured:
    """What is measured in each company: its samples, in `unit`, of which the median counts.
    `reads`: what a reader beside it does with the topic of that name."""

    name: str
    work: Callable[[], list[float]]
    unit: str
    durability: str
    reads: tuple[Kind, str]
    target: Target | None = None  # also in company
    bound: Callable[[], list[float]] | None = None  # what the target's ratio is about


def p36(settings: Settings) -> Figure:
    """Each of them in each company, in turn; the ratio is to the same alone."""
    figure = Figure("P36", "rows of P1, P2, P18 and P19 in company")
    rounds = settings.rounds_or(5)
    for durability, prepare in (
        ("power", durable_send),
        ("process", unflushed_send),
        ("power", many_topics),
        ("process", one_of_many),
    ):
        with Stores(settings) as stores, workers() as make:
            engine = stores.engine(durability=durability)
            worker = make(engine.path, "company", durability=durability)
            _measure(figure, prepare(engine, stores), worker, rounds)
    figure.notes.append(
        f"the company is another process, with a thread each: transactions of one message without "
        f"a pause, a reader that follows the topic, {CHECKPOINTS_PER_SECOND:g} checkpoints a second"
    )
    return figure


# ---- what is measured ----------------------------------------------------------------------


def durable_send(engine: xl.Engine, stores: Stores) -> Measured:
    value = messages(1)[0]
    raw = stores.enter_context(closing(RawFile(stores.path("raw"))))
    send = partial(engine.topic("sent").producer("exclusive").send, value)
    append = partial(raw.append, value)
    return Measured(
        "durable send (P1)",
        partial(consecutive, send, MOST_CALLS, SECONDS),
        "s",
        POWER,
        (tail, "sent"),
        Target(most_ratio=1.3),
        partial(consecutive, append, MOST_CALLS, SECONDS),
    )


def unflushed_send(engine: xl.Engine, _: Stores) -> Measured:
    send = partial(engine.topic("sent").producer("exclusive").send, messages(1)[0])
    work = partial(consecutive, send, MOST_CALLS, SECONDS)
    return Measured("send, process (P2)", work, "s", PROCESS, (tail, "sent"), Target(most=3e-6))


def many_topics(engine: xl.Engine, _: Stores) -> Measured:
    topics = names(TOPICS)
    turn = itertools.cycle(own(engine, topics, one_by_one=False))
    return Measured(
        f"send_async, {TOPICS:,} topics (P18)",
        lambda: [sent_async(turn)],
        "/s",
        POWER,
        (tail, topics[0]),
        Target(least=100e3),
    )


def one_of_many(engine: xl.Engine, stores: Stores) -> Measured:
    topic, values = engine.topic("sent"), messages(BATCH)
    with topic.producer() as producer:
        for _ in range(OUT_OF // BATCH):
            producer.send_many(values)
    engine.ledger.checkpoint()
    reader = stores.enter_context(topic.reader())
    dice, size = random.Random(1), len(values[0])

    def read() -> None:
        reader.seek(dice.randrange(OUT_OF // BATCH * BATCH))
        check(len(reader.read_next(timeout=0).value or b""), size)

    work = partial(consecutive, read, MOST_CALLS, SECONDS)
    what = f"one random message of {OUT_OF:,} (P19)"
    return Measured(what, work, "s", PROCESS, (scan, "sent"), Target(most=15e-6))


# ---- in company ----------------------------------------------------------------------------


def _measure(figure: Figure, measured: Measured, worker: Worker, rounds: int) -> None:
    rates: dict[str, dict[str, list[float]]] = {}
    arms = []
    for company, kinds in COMPANIES.items():
        rates[company] = {kind: [] for kind in kinds}
        arms.append(_arm(measured, company, worker, rates[company]))
        if measured.bound is not None:
            arms.append(_bound_arm(measured, company, worker))
    results = take_turns(arms, rounds)
    figure.series += [series.thinned() for series in results.values()]
    for company in COMPANIES:
        _judge(figure, measured, company, results)
        for kind, reached in rates[company].items():
            figure.rows.append(Row(f"{_name(measured, company)}: {kind}", median(reached), "/s"))


def _name(measured: Measured, company: str) -> str:
    return f"{measured.name}, {company if company == ALONE else f'beside {company}'}"


def _bound_name(measured: Measured, company: str) -> str:
    return _name(measured, company).replace(measured.name, "pwrite + fdatasync")


def _judge(figure: Figure, measured: Measured, company: str, results: Mapping[str, Series]) -> None:
    ours, alone = results[_name(measured, company)], results[_name(measured, ALONE)]
    peer = None if company == ALONE else alone
    if measured.bound is None:
        figure.compare(ours.name, ours, peer, measured.target)
    else:
        figure.compare(
            f"{ours.name}, against a file",
            ours,
            results[_bound_name(measured, company)],
            measured.target,
        )
        figure.compare(ours.name, ours, peer)
    if ours.unit == "s" and peer is not None:
        figure.compare_at(0.99, f"{ours.name}: p99", ours, peer)


def _arm(measured: Measured, company: str, worker: Worker, rates: Mapping[str, list[float]]) -> Arm:
    kind, topic = measured.reads
    acts: dict[str, tuple[Kind, float | None, tuple[object, ...]]] = {
        STREAM: (transact, None, ()),
        READER: (kind, None, (topic,)),
        CHECKPOINTS: (checkpoint, CHECKPOINTS_PER_SECOND, ()),
    }

    def work(_: object) -> list[float]:
        with beside(worker, {name: acts[name] for name in rates}, rates):
            return measured.work()

    name = _name(measured, company)
    return Arm(name, work, unit=measured.unit, durability=measured.durability)


def _bound_arm(measured: Measured, company: str, worker: Worker) -> Arm:
    assert measured.bound is not None
    bound = Measured(
        "pwrite + fdatasync", measured.bound, measured.unit, measured.durability, measured.reads
    )
    rates: dict[str, list[float]] = {kind: [] for kind in COMPANIES[company]}
    arm = _arm(bound, company, worker, rates)
    arm.rival = True
    return arm
