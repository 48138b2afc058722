"""An uptime checker: one worker for each endpoint, and the load is spread.

    $ python examples/uptime_checker.py data/log 0 --workers 3      # and 1, 2, in other terminals

This is the example of Pulsar's PIP-440. Every worker requests every endpoint's topic with
"wait_for_exclusive"; the owner checks the endpoint, and writes its results to the topic. With
priorities, each endpoint has a first choice, a second, and so on. The first worker to start does
not get everything: with `settle`, a new waiter is not granted a topic for some time, because a
waiter with a higher priority may follow. A dead worker's endpoints go to several others at once,
as these have waited for longer than that.

The endpoints are simulated; nothing goes over a network. uptime_checker_trial.py kills workers,
with priorities and without.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import exclusivelog as xl

PAUSE = 0.05  # seconds between two checks of an endpoint
PATIENCE = 30.0  # seconds that a send may take

Queued = list["Future[xl.Producer]"]


def queue(engine: xl.Engine, priorities: Mapping[str, int], settle: float) -> Queued:
    """Queue for every endpoint. A thousand of them take no thousand threads: these are futures."""
    return [
        engine.topic(endpoint).producer_async(
            "wait_for_exclusive",
            name=engine.name,
            priority=priority,
            settle=settle,
            serializer="json",
        )
        for endpoint, priority in priorities.items()
    ]


def work(queued: Queued) -> None:
    """Check the endpoints that this worker owns."""
    while True:
        ours = [future.result() for future in queued if future.done()]
        receipts = [producer.send_async(check(producer.topic)) for producer in ours]
        for receipt in receipts:  # they share one flush
            receipt.result(PATIENCE)
        time.sleep(PAUSE)


def check(endpoint: str) -> dict[str, object]:
    """Simulate a request."""
    return {"endpoint": endpoint, "up": random.random() < 0.99, "ms": random.randint(5, 80)}


def choices(endpoint: int, workers: Sequence[str]) -> list[str]:
    """Return who should check this endpoint, best first. Each worker is the first choice for an
    equal share of the endpoints, and the others alternate as the second choice for these.

    >>> [choices(endpoint, ["a", "b", "c"]) for endpoint in (0, 1, 2, 3)]
    [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b'], ['a', 'c', 'b']]
    """
    turn, first = divmod(endpoint, len(workers))
    others = [*workers[first + 1 :], *workers[:first]]
    shift = turn % len(others)
    return [workers[first], *others[shift:], *others[:shift]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker of an uptime checker.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("number", type=int, help="which worker this is, from 0 on")
    parser.add_argument("--workers", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--endpoints", type=int, default=12, help="how many (default: 12)")
    options = parser.parse_args()
    names = [f"worker-{number}" for number in range(options.workers)]
    me = names[int(options.number)]
    wanted = {
        f"endpoint-{number}": -choices(number, names).index(me)
        for number in range(options.endpoints)
    }
    with xl.open(options.path, me) as engine:
        work(queue(engine, wanted, settle=1.5))
