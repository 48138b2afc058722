"""A job table as a replicated state machine: each job is done exactly once.

    $ python examples/job_table.py

The table is a `SharedState`: a dict of jobs, and a function that applies one operation to it.
A worker takes the first waiting job, does it, and marks it as done. Taking a job is a write, and a
write is computed from the newest table: so no two workers ever take the same job.

Workers are killed during their work. The other workers see from the list of live engines that
they are gone, and give their jobs back. Each time a job is taken, its attempt number increases; a
"done" with an older attempt number is ignored, so a worker that was only stopped does no harm. In
the end every worker is killed, and the table is restored three times: from the log's first message
by a plain loop, by the state from its snapshot, and after a trim. It must be the same each time,
with every job done exactly once.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any

from processes import directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl

Table = dict[str, dict[str, Any]]  # job -> state, worker (an engine's id), attempt, done by
Op = dict[str, Any]


# ---- the state machine -------------------------------------------------------------------------


def apply(table: Table, op: Op) -> None:
    """Apply one operation. It is deterministic: no clock, no random numbers.

    >>> table = {}
    >>> for op in ({"do": "submit"}, {"do": "take", "by": "w"}, {"do": "done", "attempt": 1}):
    ...     apply(table, {"job": "j", **op})
    >>> table
    {'j': {'state': 'done', 'by': 'w', 'attempt': 1}}
    """
    job = table.setdefault(op["job"], {"state": "waiting", "by": None, "attempt": 0})
    if op["do"] == "take":
        job.update(state="taken", by=op["by"], attempt=job["attempt"] + 1)
    elif op["do"] == "give back" and job["attempt"] == op["attempt"]:
        job.update(state="waiting", by=None)
    elif op["do"] == "done" and (job["state"], job["attempt"]) == ("taken", op["attempt"]):
        job.update(state="done")


def open_table(engine: xl.Engine) -> xl.SharedState[Table, Op]:
    """Open this process's copy of the table."""
    return xl.SharedState(engine.topic("jobs"), initial=dict, apply=apply, snapshot_every=50)


# ---- a worker: its own process -----------------------------------------------------------


def work(path: str, name: str) -> None:
    """Take jobs and do them, for ever."""
    with xl.open(path, name) as engine, open_table(engine) as table:
        while True:
            job = table.write(lambda now: choose(now, engine), lambda now: mine(now, engine))
            if job is None:
                time.sleep(0.02)
                continue
            name, attempt = job
            time.sleep(random.uniform(0.02, 0.05))  # this is the work
            done = {"do": "done", "job": name, "attempt": attempt}
            table.write(lambda now, done=done: [done])


def choose(table: Table, engine: xl.Engine) -> list[Op]:
    """Return what to write: give back the jobs of dead workers, and take the first waiting job."""
    living = {info.id for info in engine.engines()}
    lost = [name for name, job in table.items()
            if job["state"] == "taken" and job["by"] not in living]  # fmt: skip
    ops = [{"do": "give back", "job": n, "attempt": table[n]["attempt"]} for n in lost]
    waiting = lost + [name for name, job in table.items() if job["state"] == "waiting"]
    return ops + [{"do": "take", "job": name, "by": engine.id} for name in waiting[:1]]


def mine(table: Table, engine: xl.Engine) -> tuple[str, int] | None:
    """Return the job that this worker has taken: (name, attempt)."""
    for name, job in table.items():
        if job["state"] == "taken" and job["by"] == engine.id:
            return name, job["attempt"]
    return None


# ---- the parent --------------------------------------------------------------------------


def states(table: xl.SharedState[Table, Op]) -> Counter[str]:
    """Count the jobs in each state."""
    return table.read(lambda now: Counter(job["state"] for job in now.values()), latest=True)


def busy(table: xl.SharedState[Table, Op], engine: xl.Engine) -> set[int]:
    """Return the process ids of workers that have a job now."""
    pids = {info.id: info.pid for info in engine.engines()}
    jobs = table.read(lambda now: list(now.values()), latest=True)
    return {pids[job["by"]] for job in jobs if job["state"] == "taken" and job["by"] in pids}


def replay(topic: xl.Topic) -> tuple[Table, Counter[str]]:
    """Return the table by a plain loop over the log, and how often each job became done."""
    table: Table = {}
    done: Counter[str] = Counter()
    for message in topic.reader(deserializer="msgpack"):
        name = message.value["job"]
        before = table.get(name, {}).get("state")
        apply(table, message.value)
        done[name] += before != "done" and table[name]["state"] == "done"
    return table, done


def main() -> int:
    """Submit jobs, kill workers, and check the table."""
    parser = argparse.ArgumentParser(description="A job table on its log.")
    parser.add_argument("--jobs", type=int, default=80, help="how many (default: 80)")
    parser.add_argument("--workers", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--kills", type=int, default=4, help="workers to kill (default: 4)")
    parser.add_argument("--path", help="the ledger's directory, kept (default: a temporary one)")
    options = parser.parse_args()
    jobs = [f"job-{number}" for number in range(options.jobs)]
    with directory(options.path) as path, xl.open(path, "parent") as engine:
        topic = engine.topic("jobs")
        with processes() as start, open_table(engine) as table:
            table.write(lambda now: [{"do": "submit", "job": job} for job in jobs])
            workers = [start(f"w{n}", work, path, f"w{n}") for n in range(options.workers)]

            def all_done() -> bool:
                return states(table)["done"] >= len(jobs)

            for kill in range(1, options.kills + 1):
                part = kill * options.jobs // (options.kills + 1)
                until("jobs are done", lambda part=part: states(table)["done"] >= part)
                until("a worker has a job", lambda: busy(table, engine) or all_done())
                pids = busy(table, engine)
                victim = next((w for w in workers if w.pid in pids), workers[0])
                victim.kill()
                victim.join()
                workers.remove(victim)
                print(f"{dict(states(table))}: {victim.name} is killed")
                workers.append(start(f"{victim.name}+", work, path, f"{victim.name}+"))
            until("all are done", all_done)
            took = table.read(lambda now: sum(job["attempt"] for job in now.values()))
        by_loop, done = replay(topic)
        messages = list(topic.reader())
        with open_table(engine) as table:
            by_state = table.read(dict)
            topic.trim(before=table.snapshot())
        with open_table(engine) as table:
            after_trim = table.read(dict)
    print(f"{len(jobs)} jobs, {took} attempts; {len(messages)} operations, "
          f"{messages[-1].epoch} epochs\n")  # fmt: skip
    return verdict({
        "every job was done exactly once": done == Counter(jobs),
        "jobs of killed workers were done by others": took > len(jobs),
        "the table is the same, however it is restored": by_loop == by_state == after_trim,
        "there never were two writers at a time": never_interleaved(messages),
    })  # fmt: skip


if __name__ == "__main__":
    run(main)
