"""A trial of uptime_checker.py: workers are killed, with priorities and without.

    $ python examples/uptime_checker_trial.py

When all workers are up, one is killed, and later the others. Two runs show the effect of the
queue's order:

- With priorities, a standby comes last, and a dead worker's endpoints go to several others.
- Without priorities, it is first come, first served: the first worker has all the load, and when
  it dies, the second has it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from processes import PATIENCE, directory, never_interleaved, processes, run, until, verdict
from uptime_checker import choices, queue, work

import exclusivelog as xl

WATCHED = 0.25  # seconds until the next death
STANDBY = "standby"


def take_part(
    path: str, name: str, priorities: Mapping[str, int], settle: float, parent: Connection
) -> None:
    """A worker, in a process of its own. It begins when the parent says so."""
    parent.send("loaded")
    parent.recv()
    with xl.open(path, name) as engine:
        queued = queue(engine, priorities, settle)
        parent.send("up")
        work(queued)


@dataclass
class Outcome:
    """The owners of the endpoints at the start, after the first death, and after the last one; how
    many were granted to the standby before the last death; and all that was written."""

    owners: list[list[str]]
    given_to_standby: int
    logs: list[list[xl.Message]]

    def longest_gap(self) -> int:
        """The longest time between two checks of an endpoint, in ms."""
        pairs = (pair for log in self.logs for pair in itertools.pairwise(log))
        return max(after.publish_time - before.publish_time for before, after in pairs)


def play(path: str, priorities: dict[str, dict[str, int]], settle: float) -> Outcome:
    """Start all, kill the first worker, kill the other workers. The standby stays."""
    with xl.open(path, "parent") as engine:
        endpoints = [engine.topic(endpoint).name for endpoint in priorities[STANDBY]]
    # From here on the parent only reads: `settle` counts from the first engine that can write.
    with xl.open(path, readonly=True) as engine, processes() as start:
        topics = [engine.topic(endpoint, create=False) for endpoint in endpoints]
        readers = [topic.reader("latest") for topic in topics]
        begun = int(time.time() * 1000)
        fleet: dict[str, tuple[SpawnProcess, Connection]] = {}
        for name in priorities:
            line, theirs = multiprocessing.Pipe()
            fleet[name] = start(name, take_part, path, name, priorities[name], settle, theirs), line
        for _, line in fleet.values():
            expect(line, "loaded")
        # With `settle` they may all start at once; without, they start in order.
        for group in [list(fleet)] if settle else [[name] for name in fleet]:
            for name in group:
                fleet[name][1].send("go")
            for name in group:
                expect(fleet[name][1], "up")
        all_up = time.monotonic()
        owners, last_death = [look(topics)], 0
        # No waiter is new any more when the first worker dies.
        time.sleep(max(0.0, all_up + settle - time.monotonic()))
        first, *rest, _ = (process for process, _ in fleet.values())
        for killed in [first], rest:
            for process in killed:
                last_death = int(time.time() * 1000)  # events have whole ms
                process.kill()
                process.join(PATIENCE)  # until the kernel has ended it
            owners.append(look(topics))
        early = sum(
            event.kind == "grant"
            and event.target is not None
            and event.target["engine_name"] == STANDBY
            and begun <= event.time < last_death
            for event in engine.history()
        )
        return Outcome(owners, early, [list(reader) for reader in readers])


def expect(line: Connection, word: str) -> None:
    """Wait until the child sends this word."""
    try:
        said = line.recv() if line.poll(PATIENCE) else "nothing"
    except EOFError:
        said = "its end"
    if said != word:
        raise TimeoutError(f"expected {word!r} from a worker in {PATIENCE:g} s, received {said}")


def look(topics: Sequence[xl.Topic]) -> list[str]:
    """Wait until each endpoint has a live owner, and for some checks; return the owners."""
    until("each endpoint has a worker", lambda: all(topic.owner for topic in topics))
    time.sleep(WATCHED)
    return [topic.owner.engine_name if topic.owner else "none" for topic in topics]


def show(names: Sequence[str], outcomes: dict[str, Outcome]) -> None:
    """Print how many endpoints each worker has, as a table."""
    columns = ["start", f"{names[0]} dead", "all dead"] * len(outcomes)
    print(" " * 12 + "".join(f"{title:>42}" for title in outcomes))
    print("endpoints of" + "".join(f"{column:>14}" for column in columns))
    for name in names:
        loads = [found.count(name) for run in outcomes.values() for found in run.owners]
        print(f"{name:12}" + "".join(f"{load or '-':>14}" for load in loads))
    gaps = (f"{run.longest_gap():,} ms" for run in outcomes.values())
    print("longest gap " + "".join(f"{gap:>42}" for gap in gaps) + "\n")


def main() -> int:
    """Run with and without priorities, and check the log."""
    parser = argparse.ArgumentParser(description="An uptime checker with priorities.")
    parser.add_argument("--endpoints", type=int, default=12, help="how many (default: 12)")
    parser.add_argument("--workers", type=int, default=3, help="how many (default: 3)")
    parser.add_argument(
        "--settle",
        type=float,
        default=1.5,
        metavar="SECONDS",
        help="left to higher priorities (default: 1.5)",
    )
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    if options.workers < 2 or options.endpoints < 1:
        parser.error("give at least 2 workers and 1 endpoint")

    workers = [f"worker-{number}" for number in range(1, options.workers + 1)]
    wanted = {f"endpoint-{number}": choices(number, workers) for number in range(options.endpoints)}
    ranked = {
        name: {endpoint: -best.index(name) for endpoint, best in wanted.items()} for name in workers
    }
    ranked[STANDBY] = dict.fromkeys(wanted, -len(workers))
    equal = {name: dict.fromkeys(wanted, 0) for name in ranked}
    with directory(options.path) as path:
        spread = play(path, ranked, options.settle)
        fifo = play(path, equal, 0.0)
    show(list(ranked), {"with priorities": spread, "first come, first served": fifo})

    best = [
        [next(name for name in (*best, STANDBY) if name not in dead) for best in wanted.values()]
        for dead in ([], workers[:1], workers)
    ]
    return verdict(
        {
            "with priorities, each endpoint has its best live worker": spread.owners == best,
            "the standby has no endpoint while a worker lives": spread.given_to_standby == 0,
            "without priorities, one worker has all endpoints": [set(o) for o in fifo.owners]
            == [{name} for name in (workers[0], workers[1], STANDBY)],
            "no endpoint ever had two workers at a time": all(
                never_interleaved(log) for log in spread.logs + fifo.logs
            ),
        }
    )


if __name__ == "__main__":
    run(main)
