"""Waiting for many topics at a time, and a promotion behind waiters that have died (P31)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import exclusivelog as xl
from bench.concurrent_appends import soon
from bench.measure import POWER, Arm, Figure, Settings, Stores, Target, take_turns
from bench.topics import names, own
from bench.waiters import (
    NS,
    granted_at,
    has_moved_on,
    queue_up_in_bulk,
    release,
    wait_for,
)
from testing.processes import State, Worker, until, workers

TOPICS, PROCESSES = 1_000, 4
ONE_BY_ONE = 100  # of the topics, which requests of their own wait for
DEAD = 10_000
BEHIND = -1  # priority; those in front have 0 to 9
TRIES = 10  # of a round whose dead are removed before the release
PATIENCE = 300.0
BULK, SINGLY = "producers(..., wait=False)", "producer_async, one by one"


def p31(settings: Settings) -> Figure:
    """The time to queue for each of many topics, by several processes at once; and the time from a
    release until a waiter behind dead ones has its producer."""
    figure = Figure("P31", f"{PROCESSES} processes wait for {TOPICS:,} topics each")
    _measure_queueing(figure, settings)
    _measure_promotion(figure, settings)
    return figure


# ---- many topics ---------------------------------------------------------------------------


def _measure_queueing(figure: Figure, settings: Settings) -> None:
    counts = {BULK: TOPICS, SINGLY: min(TOPICS, ONE_BY_ONE)}
    queue = {BULK: queue_at_once, SINGLY: queue_singly}
    arms = [
        Arm(
            name,
            partial(_queue, settings, queue[name], names(count)),
            unit="s",
            durability=POWER,
        )
        for name, count in counts.items()
    ]
    results = take_turns(arms, settings.rounds_or(5))
    figure.series += results.values()
    figure.compare(
        f"{PROCESSES} processes at once, each request",
        results[BULK],
        results[SINGLY],
        Target(most=0.3e-3),
    )


def _queue(
    settings: Settings,
    function: Callable[[State, Sequence[str], float], float],
    topics: Sequence[str],
    _: object,
) -> list[float]:
    """Seconds for each request of all processes together; on a new ledger."""
    with Stores(settings) as stores, workers() as make:
        engine = stores.engine()
        owners = own(engine, topics, one_by_one=False)
        waiting = [make(engine.path, f"waiter-{number}") for number in range(PROCESSES)]
        start = soon()
        for worker in waiting:
            worker.start(function, topics, start)
        taken: list[float] = [worker.answer(PATIENCE) for worker in waiting]
        for name in topics:
            if len(engine.topic(name).waiters) != PROCESSES:
                raise RuntimeError(f"{len(engine.topic(name).waiters)} processes wait for {name}")
        for worker in waiting:
            worker.kill()
        assert all(owner.state == "open" for owner in owners)
    return [max(taken) / (PROCESSES * len(topics))]


def queue_at_once(state: State, topics: Sequence[str], start: float) -> float:
    time.sleep(max(0.0, start - time.monotonic()))
    state.kept["futures"] = state.engine.producers(topics, "wait_for_exclusive", wait=False)
    return time.monotonic() - start


def queue_singly(state: State, topics: Sequence[str], start: float) -> float:
    time.sleep(max(0.0, start - time.monotonic()))
    state.kept["futures"] = [
        state.engine.topic(name).producer_async("wait_for_exclusive") for name in topics
    ]
    return time.monotonic() - start


# ---- behind the dead -----------------------------------------------------------------------


def _measure_promotion(figure: Figure, settings: Settings) -> None:
    with Stores(settings) as stores, workers() as make:
        engine = stores.engine()
        living, last = make(engine.path, "living"), make(engine.path, "owner")
        in_front: list[int] = []

        def work(dead: int, _: object) -> list[float]:
            for _try in range(TRIES):
                seconds, found = _promote(engine, make, last, living, dead)
                if found >= dead:
                    in_front.append(found)
                    return [seconds]
            raise RuntimeError("the dead waiters were removed before each release")

        behind, alone = f"promotion behind {DEAD:,} dead waiters", "promotion, nobody in front"
        results = take_turns(
            [
                Arm(behind, partial(work, DEAD), unit="s", durability=POWER),
                Arm(alone, partial(work, 0), unit="s", durability=POWER),
            ],
            settings.rounds_or(10),
        )
    figure.series += results.values()
    for share, what in ((0.5, "p50"), (1.0, "longest")):
        target = Target(most=10e-3) if share == 0.5 else None
        figure.compare_at(share, f"{behind}: {what}", results[behind], results[alone], target)
    least = min(found for found in in_front if found >= DEAD)
    figure.state("dead waiters in the queue, at the release: least", least, "")


def _promote(
    engine: xl.Engine, make: Callable[..., Worker], owner: Worker, living: Worker, dead: int
) -> tuple[float, int]:
    """Seconds from the release to the grant, and how many waiters were in the queue in front."""
    topic = engine.topic("orders")
    owner.call(take)
    epoch = topic.epoch
    if dead:
        victim = make(engine.path, "victim")
        victim.start(queue_up_in_bulk, dead)
        victim.answer(PATIENCE)
        living.call(queue_behind)
        victim.kill()
    else:
        living.call(queue_behind)
    in_front = queued(topic) - 1
    begun = owner.call(release)
    until(partial(has_moved_on, topic, epoch))
    granted = living.call(granted_at, topic.epoch)
    living.call(release)
    until(lambda: queued(topic) == 0)
    return (granted - begun) * NS, in_front


def queued(topic: xl.Topic) -> int:
    """How many requests are in the topic's queue, those of the dead included."""
    with topic.engine.ledger.read() as tables:
        return sum(1 for _ in tables.sessions.waiters(topic.id))


def take(state: State) -> None:
    state.producer = state.topic.producer("exclusive")


def queue_behind(state: State) -> None:
    wait_for(state, [state.topic.producer_async("wait_for_exclusive", priority=BEHIND)])
