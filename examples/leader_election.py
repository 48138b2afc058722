"""Leader election: one worker leads, the others wait in a queue.

    $ python examples/leader_election.py data/log worker-1      # and others, in other terminals

Each worker leads in a loop. `topic.terms()` returns a term when this worker owns the topic: it is
the leader, and writes its decisions to the topic. If it dies, the kernel notifies the others at
once, and the first in the queue leads. If it is paused for longer than its `keepalive`, the next
worker leads, too; the former leader learns this when its next send is refused, which ends its term.

leader_election_trial.py kills and stops leaders, and judges the log.
"""

from __future__ import annotations

import argparse
import itertools
import time

import exclusivelog as xl

DECISIONS, LOSSES = "decisions", "losses"
PAUSE = 0.02  # seconds between two decisions
PATIENCE = 30.0  # seconds until the loss must be told


def work(path: str, name: str, keepalive: float) -> None:
    """Wait to become the leader, lead, and queue again when the lead is lost."""
    with xl.open(path, name, keepalive=keepalive) as engine:
        for term in engine.topic(DECISIONS).terms(name):
            with term as leader:
                lead(engine, term, leader)


def lead(engine: xl.Engine, term: xl.Term, leader: xl.Producer) -> None:
    """Decide, until the lead is lost."""
    for number in itertools.count(1):
        decision = f"{engine.name}, epoch {term.epoch}: decision {number}"
        try:
            leader.send(decision.encode())
        except xl.ProducerFencedError as error:
            # Another worker leads, and this decision is not in the log. A leader that does not
            # send learns it from `term.lost`, which can be waited for. For the trial, tell it:
            told = term.lost.wait(PATIENCE)
            with engine.topic(LOSSES).producer("shared", serializer="json") as losses:
                losses.send(
                    {
                        "decision": decision,
                        "state": leader.state,
                        "told": told,
                        "error": f"{type(error).__name__}: {error}",
                    }
                )
            raise  # to the end of the term
        time.sleep(PAUSE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker that waits to become the leader.")
    parser.add_argument("path", help="the ledger's directory")
    parser.add_argument("name", help="the worker's name")
    parser.add_argument(
        "--keepalive",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of silence until a waiter takes over (default: 30)",
    )
    work(**vars(parser.parse_args()))
