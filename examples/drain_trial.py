"""A trial of drain.py: a worker's topics move twice, and the log is judged.

    $ python examples/drain_trial.py

1. `engine.unload("jobs-", to=...)` hands them to the third worker, although the second is first
   in the queue. All of them move together.
2. Close and elect: the third worker closes its producers, and the first in the queue of each topic
   becomes its owner. The topics move one by one, each in its own transaction. No process chooses
   the new owner, and no error names it.

In the end the parent reads the log: how long did each topic get no message, and is any number
missing, or there twice?
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess
from typing import Any

from drain import ADDRESSES, FAREWELLS, number_of, sent_at, work
from processes import PATIENCE, directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl

PREFIX = "jobs-"
STEADY = 0.5  # seconds of sending between the moves
OLD, NEXT, CHOSEN = ADDRESSES


def await_owner(topics: Sequence[xl.Topic], name: str, waiting: int) -> None:
    """Wait until this worker owns all topics, and so many wait for each."""

    def settled() -> bool:
        return all(
            (owner := topic.owner) is not None
            and owner.engine_name == name
            and len(topic.waiters) == waiting
            for topic in topics
        )

    until(f"{name} owns the topics, and {waiting} wait", settled)


def let_it_send(topics: Sequence[xl.Topic], name: str) -> None:
    """Wait for a while, and until this worker has sent to all topics."""
    time.sleep(STEADY)
    until(
        f"{name} has sent to each topic",
        lambda: all([m.producer_name for m in topic[-2:]] == [name, name] for topic in topics),
    )


def play(engine: xl.Engine, topics: Sequence[xl.Topic]) -> list[dict[str, Any]]:
    """Make both moves; return what the first worker's producers were told."""
    farewells = engine.topic(FAREWELLS).reader("latest", deserializer="json")
    with processes() as start:
        workers: dict[str, SpawnProcess] = {}
        for waiting, name in enumerate(ADDRESSES):  # one by one: so the queue has their order
            workers[name] = start(name, work, engine.path, name, [topic.name for topic in topics])
            await_owner(topics, OLD, waiting)
        let_it_send(topics, OLD)

        chosen = next(info for info in engine.engines() if info.name == CHOSEN)
        begun = time.monotonic()
        moves = engine.unload(PREFIX, to=chosen.id, timeout=PATIENCE)
        ms = (time.monotonic() - begun) * 1000
        print(f"{OLD} unloaded {sum(move.ok for move in moves)} topics to {CHOSEN} in {ms:.1f} ms")
        told: list[dict[str, Any]] = [farewells.read_next(PATIENCE).value for _ in moves]
        print(f"{OLD} was told: {told[0]['topic']} is with {told[0]['to']}, {told[0]['address']}")
        workers[OLD].join(PATIENCE)  # it has nothing left to do
        let_it_send(topics, CHOSEN)

        workers[CHOSEN].terminate()  # SIGTERM: it closes its producers
        await_owner(topics, NEXT, 0)
        print(f"{CHOSEN} closed; {NEXT} was first in the queue, and has the topics\n")
        let_it_send(topics, NEXT)
        return told


def show(logs: dict[str, list[xl.Message]]) -> None:
    """How long each topic was silent, from one message to the next."""
    print(f"silent, ms     unload to {CHOSEN}   close, elect {NEXT}   usually (median)")
    moves: list[list[float]] = []
    for name, log in logs.items():
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for before, after in itertools.pairwise(log):
            gaps[before.epoch != after.epoch].append(sent_at(after) - sent_at(before))
        moves.append(gaps[True])
        print(f"{name:10}" + row(gaps[True]) + f"{statistics.median(gaps[False]):19.1f}")
    print("longest   " + row(list(map(max, zip(*moves, strict=False)))) + "\n")


def row(gaps: Sequence[float]) -> str:
    """Format the gap of each move, in its column."""
    return "".join(f"{gap:23.1f}" for gap in gaps)


def judge(
    topics: Sequence[xl.Topic], logs: dict[str, list[xl.Message]], told: list[dict[str, Any]]
) -> dict[str, bool]:
    """Check the claims; `logs` is what was written in this run."""
    begins = {  # topic -> worker -> its first number
        name: {message.producer_name: number_of(message) for message in reversed(log)}
        for name, log in logs.items()
    }
    everything = [list(topic.reader()) for topic in topics]
    return {
        f"every topic went from {OLD} to {CHOSEN}, and to {NEXT}": all(
            [name for name, _ in itertools.groupby(log, lambda message: message.producer_name)]
            == [OLD, CHOSEN, NEXT]
            for log in logs.values()
        ),
        "every number is there once, in order": all(
            [number_of(message) for message in log] == list(range(len(log))) for log in everything
        ),
        "the epochs never interleave, and each has one writer": all(
            never_interleaved(log) for log in everything
        ),
        f"{OLD} was told the new owner of every topic": sorted(begins)
        == sorted(
            loss["topic"]
            for loss in told
            if (loss["to"], loss["address"]) == (CHOSEN, ADDRESSES[CHOSEN])
        ),
        f"the messages refused to {OLD} were the first that {CHOSEN} sent": all(
            begins[loss["topic"]].get(CHOSEN) == loss["refused"] for loss in told
        ),
    }


def main() -> int:
    """Make both moves, and check the log."""
    parser = argparse.ArgumentParser(description="A planned drain of a worker.")
    parser.add_argument("--topics", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    if options.topics < 1:
        parser.error("--topics: at least 1")
    with directory(options.path) as path, xl.open(path, "parent") as engine:
        topics = [engine.topic(f"{PREFIX}{number}") for number in range(options.topics)]
        readers = {topic.name: topic.reader("latest") for topic in topics}
        told = play(engine, topics)
        logs = {name: list(reader) for name, reader in readers.items()}
        show(logs)
        return verdict(judge(topics, logs, told))


if __name__ == "__main__":
    run(main)
