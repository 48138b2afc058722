"""Leader election: one worker leads, the others wait in a queue.

    $ python examples/leader_election.py data/log worker-1      # and others, in other terminals

Each worker requests the same topic with "wait_for_exclusive". The worker that gets it is the
leader, and writes its decisions to the topic. If it dies, the kernel notifies the others at once,
and the first in the queue leads. If it is paused for longer than its `keepalive`, the next worker
leads, too; the former leader learns this when its next send is refused.

leader_election_trial.py kills and stops leaders, and judges the log.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time

import exclusivelog as xl

DECISIONS, LOSSES = "decisions", "losses"
PAUSE = 0.02  # seconds between two decisions
PATIENCE = 30.0  # seconds until the callback must have come


def work(path: str, name: str, keepalive: float) -> None:
    """Wait to become the leader, lead, and queue again when the lead is lost."""
    with xl.open(path, name, keepalive=keepalive) as engine:
        while True:
            lead(engine)


def lead(engine: xl.Engine) -> None:
    """Become the leader, and lead until the lead is lost."""
    called_back = threading.Event()
    # This is the election: the call returns when this process owns the topic.
    leader = engine.topic(DECISIONS).producer(
        "wait_for_exclusive", name=engine.name, on_fenced=lambda *_: called_back.set()
    )
    with leader:
        for number in itertools.count(1):
            decision = f"{engine.name}, epoch {leader.topic_epoch}: decision {number}"
            try:
                leader.send(decision.encode())
            except xl.ProducerFencedError as error:
                # Another worker leads, and this decision is not in the log. A leader that does not
                # send learns it from the callback, or from `leader.state` at any time.
                told = called_back.wait(PATIENCE)
                with engine.topic(LOSSES).producer("shared", serializer="json") as losses:
                    losses.send({"decision": decision, "state": leader.state, "told": told,
                                 "error": f"{type(error).__name__}: {error}"})  # fmt: skip
                return
            time.sleep(PAUSE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker that waits to become the leader.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("name", help="the worker's name")
    parser.add_argument("--keepalive", type=float, default=30.0, metavar="SECONDS",
                        help="of silence until a waiter takes over (default: 30)")  # fmt: skip
    work(**vars(parser.parse_args()))
