"""Handing over topics whose producers all publish: inside one process, and to another (P30).

A thread sends to all topics in turn, by `send_async`; a few topics have a thread of their own
instead. Inside a process they go on during and after the move: the producers follow their topics
to the other engine. The gap of a topic is the longest time between two of its acknowledgements.
Beside it stands the gap of a time without a move: that of the thread's round.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import exclusivelog as xl
from bench.append import messages
from bench.handover import HAND_OVER, NS, ROUND_PAUSE_SECONDS, Counts, Crew, Moved, arm_of, sample
from bench.measure import PROCESS, Arm, Figure, Series, Settings, Stores, Target, take_turns
from bench.topics import names, own
from exclusivelog._core import Receipt, now
from testing.processes import PATIENCE, until, workers

TOPICS = 1_000
BEFORE_SECONDS = 0.2  # of traffic without a move
CREW = 3  # processes: the owner, the next one, and one that stands by
P50, LONGEST = 5e-3, 50e-3
FEW = 0.1  # transactions for each topic, at most: they go by time
ALONE = "publish gap inside a process, topics with a thread of their own"
GAP, CALM = "publish gap inside a process", "publish gap without a move"
ELSEWHERE = "publish gap to another process"
WHERE = INSIDE, AWAY = "inside a process", "to another process"


def p30(settings: Settings) -> Figure:
    """Move all topics to and fro, in one process, and around three processes."""
    figure = Figure("P30", f"hand-over of {TOPICS:,} topics whose producers all publish")
    rounds = settings.rounds_or(7)
    with Stores(settings) as stores:
        _measure_inside(figure, stores, rounds)
    with Stores(settings) as stores:
        _measure_elsewhere(figure, stores, rounds)
    figure.notes.append(
        "a thread sends one message to each topic in turn, and pauses for "
        f"{ROUND_PAUSE_SECONDS * 1e3:g} ms; a gap includes the round, in which send_async waits "
        "for topics that are moving"
    )
    return figure


# ---- inside one process --------------------------------------------------------------------


@dataclass
class Traffic:
    """Threads that send to all topics until the end. `gaps`: the longest of each topic, in seconds,
    since the list was replaced. `alone`: the topics that have a thread of their own."""

    producers: Sequence[xl.Producer]
    alone: Sequence[int]
    gaps: list[float] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def begin_anew(self) -> None:
        self.gaps = [0.0] * len(self.producers)

    def publish(self, numbers: Sequence[int]) -> None:
        value, receipts = messages(1)[0], list[Receipt]()
        try:
            while not self.over.is_set():
                receipts = [self.producers[number].send_async(value) for number in numbers]
                for number, receipt in zip(numbers, receipts, strict=True):
                    receipt.add_done_callback(partial(self.note, number))
                self.over.wait(ROUND_PAUSE_SECONDS)
            for receipt in receipts:
                receipt.result(PATIENCE)
        except BaseException as error:
            self.errors.append(error)

    def note(self, number: int, receipt: Receipt) -> None:
        if error := receipt.exception():
            self.errors.append(error)
        at, gaps = now(), self.gaps
        gaps[number] = max(gaps[number], (at - self.last[number]) * NS)
        self.last[number] = at

    def shares(self) -> Iterator[Sequence[int]]:
        """The topics of each thread."""
        yield [number for number in range(len(self.producers)) if number not in self.alone]
        yield from ([number] for number in self.alone)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.last = [now()] * len(self.producers)
        self.begin_anew()
        threads = [threading.Thread(target=self.publish, args=(each,)) for each in self.shares()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join(PATIENCE)
        if self.errors:
            raise self.errors[0]


@dataclass(frozen=True)
class Followed:
    """One move inside a process."""

    gaps: list[float]
    alone: list[float]  # those of topics with a thread of their own
    calm: list[float]
    whole: float  # seconds, until all producers had followed
    transactions: int


def _measure_inside(figure: Figure, stores: Stores, rounds: int) -> None:
    first = stores.engine(durability="process")
    second = stores.engine(durability="process")  # of the same ledger, in this process
    producers = own(first, names(TOPICS), one_by_one=False)
    ends, moves = [first, second], list[Followed]()

    def work(_: Any) -> list[float]:
        moves.append(_follow(producers, *ends))
        ends.reverse()
        return moves[-1].gaps

    gaps = take_turns([Arm(GAP, work, unit="s", durability=PROCESS)], rounds)[GAP]
    moves = moves[-rounds:]
    calm = Series(CALM, "s", [gap for move in moves for gap in move.calm], PROCESS)
    alone = Series(ALONE, "s", [gap for move in moves for gap in move.alone], PROCESS)
    figure.series += [gaps.thinned(), alone.thinned(), calm.thinned()]
    _judge(figure, gaps, calm)
    _judge(figure, alone)
    whole = [move.whole for move in moves]
    figure.compare(
        "all producers followed, inside a process: p50", Series("whole", "s", whole, drawn=False)
    )
    _judge_transactions(figure, INSIDE, [move.transactions for move in moves])


def _follow(
    producers: Sequence[xl.Producer], source: xl.Engine, destination: xl.Engine
) -> Followed:
    topics, epoch = names(len(producers)), producers[0].topic_epoch
    traffic = Traffic(producers, [topics.index(name) for name in sample(topics)])
    with traffic.running():
        time.sleep(BEFORE_SECONDS)  # the first sends of a new epoch read the tables
        traffic.begin_anew()
        time.sleep(BEFORE_SECONDS)
        calm = traffic.gaps
        before = Counts.of(source)
        traffic.begin_anew()
        begun = time.perf_counter()
        failed = [move for move in source.unload(topics, to=destination.id) if not move.ok]
        if failed:
            raise RuntimeError(f"not moved: {failed[0]}")
        until(lambda: all(producer.topic_epoch > epoch for producer in producers))
        whole = time.perf_counter() - begun
        transactions = Counts.of(source).since(before).transactions
        time.sleep(BEFORE_SECONDS)  # a send that waits has ended, too
    alone = [traffic.gaps[number] for number in traffic.alone]
    return Followed(traffic.gaps, alone, calm, whole, transactions)


# ---- to another process --------------------------------------------------------------------


def _measure_elsewhere(figure: Figure, stores: Stores, rounds: int) -> None:
    engine, topics = stores.engine(durability="process"), names(TOPICS)
    moves: list[Moved] = []
    with workers() as make:
        members = [make(engine.path, f"engine-{i}", durability="process") for i in range(CREW)]
        crew = Crew(engine, topics, members, all_publish=True)
        crew.take_posts()
        arm = arm_of(crew, HAND_OVER, moves, ELSEWHERE, PROCESS)
        gaps = take_turns([arm], rounds)[ELSEWHERE]
        for worker in crew.members:
            worker.kill()
    figure.series.append(gaps.thinned())
    _judge(figure, gaps)
    _judge_transactions(figure, AWAY, [move.transactions for move in moves[-rounds:]])


# ---- what came of it -----------------------------------------------------------------------


def _judge(figure: Figure, gaps: Series, calm: Series | None = None) -> None:
    for share, name, target in (
        (0.5, "p50", Target(most=P50)),
        (1.0, "longest", Target(most=LONGEST)),
    ):
        what = f"{gaps.name}: {name}"
        if calm is None:
            figure.state(what, gaps.percentile(share), "s", target)
        else:
            figure.compare_at(share, what, gaps, calm, target)


def _judge_transactions(figure: Figure, where: str, counts: list[int]) -> None:
    series = Series(f"transactions, {where}", "", [float(count) for count in counts])
    figure.series.append(series)
    figure.compare(f"{series.name}: p50", series, target=Target(most=FEW * TOPICS))
