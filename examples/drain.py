"""A planned drain: a worker's topics move to another worker, which is chosen in advance.

    $ python examples/drain.py

Three workers request the same topics, "jobs-0" and so on. The first one owns them all, and sends a
numbered message to each every few milliseconds. Then the topics move, twice:

1. `engine.unload("jobs-", to=...)` hands them to the third worker, although the second is first
   in the queue (PIP-307). All of them move together. The old owner commits what it has accepted,
   and its producers end with ProducerMovedError. The error names the new owner and its address,
   which is one of the new engine's properties.
2. Close and elect: the third worker closes its producers, and the first in the queue of each topic
   becomes its owner. The topics move one by one, each in its own transaction. No process chooses
   the new owner, and no error names it.

In the end the parent reads the log: how long did each topic get no message, and is any number
missing, or there twice?
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from processes import PATIENCE, directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl

PREFIX, FAREWELLS = "jobs-", "farewells"
PAUSE = 0.005  # seconds between two messages of a topic
STEADY = 0.5  # seconds of sending between the moves
ADDRESSES = {f"worker-{number}": f"tcp://127.0.0.1:700{number}" for number in (1, 2, 3)}
OLD, NEXT, CHOSEN = ADDRESSES


# ---- a worker: its own process -----------------------------------------------------------


def work(path: str, name: str, topics: Sequence[str]) -> None:
    """Serve these topics until they have moved away, or SIGTERM asks to close them."""
    closing = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: closing.set())
    with xl.open(path, name, properties={"address": ADDRESSES[name]}) as engine:
        told: list[dict[str, Any]] = []
        threads = [threading.Thread(target=serve, args=(engine, t, closing, told)) for t in topics]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with engine.topic(FAREWELLS).producer("shared", serializer="json") as farewells:
            farewells.send_many(told)


def serve(
    engine: xl.Engine, name: str, closing: threading.Event, told: list[dict[str, Any]]
) -> None:
    """Wait for the topic, continue after the last number in it, and send until it has moved."""
    topic, number = engine.topic(name), 0
    with topic.producer("wait_for_exclusive", name=engine.name, timeout=PATIENCE) as producer:
        # No other process can write any more: the last message stays the last.
        for message in producer.catch_up(topic.reader(max(0, topic.next_offset - 1))):
            number = number_of(message) + 1
        try:
            while not closing.is_set():
                producer.send(b"%d %d" % (number, time.monotonic_ns()))
                number += 1
                closing.wait(PAUSE)
        except xl.ProducerMovedError as moved:
            # This number was refused. A client would now send it to the address.
            to = moved.successor
            assert to is not None
            told.append({
                "topic": name, "refused": number,
                "to": to.name, "address": to.properties["address"],
            })  # fmt: skip


def number_of(message: xl.Message) -> int:
    """Return the message's number; its value is the number and the time when it was sent."""
    return int(message.value.split()[0])


def sent_at(message: xl.Message) -> float:
    """Return when the message was sent, in ms of the clock that all processes share."""
    return int(message.value.split()[1]) / 1e6


# ---- the parent --------------------------------------------------------------------------


def await_owner(topics: Sequence[xl.Topic], name: str, waiting: int) -> None:
    """Wait until this worker owns all topics, and so many wait for each."""

    def settled() -> bool:
        return all(
            topic.owner is not None and topic.owner.engine_name == name
            and len(topic.waiters) == waiting for topic in topics
        )  # fmt: skip

    until(f"{name} owns the topics, and {waiting} wait", settled)


def play(engine: xl.Engine, topics: Sequence[xl.Topic]) -> list[dict[str, Any]]:
    """Make both moves; return what the first worker's producers were told."""
    farewells = engine.topic(FAREWELLS).reader("latest", deserializer="json")
    with processes() as start:
        workers = {}
        for waiting, name in enumerate(ADDRESSES):  # one by one: so the queue has their order
            workers[name] = start(name, work, engine.path, name, [topic.name for topic in topics])
            await_owner(topics, OLD, waiting)
        time.sleep(STEADY)

        chosen = next(info for info in engine.engines() if info.name == CHOSEN)
        begun = time.monotonic()
        moves = engine.unload(PREFIX, to=chosen.id, timeout=PATIENCE)
        ms = (time.monotonic() - begun) * 1000
        print(f"{OLD} unloaded {sum(move.ok for move in moves)} topics to {CHOSEN} in {ms:.1f} ms")
        told: list[dict[str, Any]] = [farewells.read_next(PATIENCE).value for _ in moves]
        print(f"{OLD} was told: {told[0]['topic']} is with {told[0]['to']}, {told[0]['address']}")
        workers[OLD].join(PATIENCE)  # it has nothing left to do
        time.sleep(STEADY)

        workers[CHOSEN].terminate()  # SIGTERM: it closes its producers
        await_owner(topics, NEXT, 0)
        print(f"{CHOSEN} closed; {NEXT} was first in the queue, and has the topics\n")
        time.sleep(STEADY)
        return told


def show(logs: dict[str, list[xl.Message]]) -> None:
    """How long each topic was silent, from one message to the next."""
    print(f"silent, ms     unload to {CHOSEN}   close, elect {NEXT}   usually (median)")
    moves = []
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
            == [OLD, CHOSEN, NEXT] for log in logs.values()
        ),
        "every number is there once, in order": all(
            [number_of(message) for message in log] == list(range(len(log))) for log in everything
        ),
        "the epochs never interleave, and each has one writer": all(
            never_interleaved(log) for log in everything
        ),
        f"{OLD} was told the new owner of every topic": sorted(begins)
        == sorted(
            loss["topic"] for loss in told
            if (loss["to"], loss["address"]) == (CHOSEN, ADDRESSES[CHOSEN])
        ),
        f"the messages refused to {OLD} were the first that {CHOSEN} sent": all(
            begins[loss["topic"]].get(CHOSEN) == loss["refused"] for loss in told
        ),
    }  # fmt: skip


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
