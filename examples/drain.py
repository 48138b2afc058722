"""A planned drain: a worker's topics move to another worker, which is chosen in advance.

    $ python examples/drain.py data/log worker-1 jobs-0 jobs-1     # and worker-2, worker-3
    $ exclusivelog unload data/log jobs- --to worker-3

Three workers request the same topics. The first one owns them all, and sends a numbered message to
each every few milliseconds. `unload` (or `engine.unload`) hands them to the worker that it names,
although another one is first in the queue (PIP-307). All of them move together. The old owner
commits what it has accepted, and its producers end with ProducerMovedError. The error names the
new owner and its address, which is one of the new engine's properties.

drain_trial.py compares this with closing and an election.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import exclusivelog as xl

FAREWELLS = "farewells"
PAUSE = 0.005  # seconds between two messages of a topic
PATIENCE = 30.0  # seconds to wait for a topic
ADDRESSES = {f"worker-{number}": f"tcp://127.0.0.1:700{number}" for number in (1, 2, 3)}


def work(path: str, name: str, topics: Sequence[str]) -> None:
    """Serve these topics until they have moved away, or SIGTERM asks to close them."""
    closing = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: closing.set())
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
            told.append(
                {
                    "topic": name,
                    "refused": number,
                    "to": to.name,
                    "address": to.properties["address"],
                }
            )


def number_of(message: xl.Message) -> int:
    """Return the message's number; its value is the number and the time when it was sent."""
    return int(message.value.split()[0])


def sent_at(message: xl.Message) -> float:
    """Return when the message was sent, in ms of the clock that all processes share."""
    return int(message.value.split()[1]) / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker that serves topics until they move.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("name", choices=ADDRESSES, help="the worker's name")
    parser.add_argument("topics", nargs="+", help="what it serves")
    work(**vars(parser.parse_args()))
