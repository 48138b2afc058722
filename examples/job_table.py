"""A job table as a replicated state machine: each job is done exactly once.

    $ python examples/job_table.py data/log --submit 80
    $ python examples/job_table.py data/log --work worker-1      # and others, in other terminals

The table is a `SharedState`: a dict of jobs, and a function that applies one operation to it.
A worker takes the first waiting job, does it, and marks it as done. Taking a job is a write, and a
write is computed from the newest table: so no two workers ever take the same job.

The workers see from the list of live engines which others are gone, and give their jobs back. Each
time a job is taken, its attempt number increases; a "done" with an older attempt number is
ignored, so a worker that was only stopped does no harm.

job_table_trial.py kills workers, and judges the log.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import exclusivelog as xl

Table = dict[str, dict[str, Any]]  # job -> state, worker (an engine's id), attempt, done by
Op = dict[str, Any]


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
            finish(table, name, attempt)


def finish(table: xl.SharedState[Table, Op], job: str, attempt: int) -> None:
    """Mark a job as done, by this attempt."""
    table.write(lambda now: [{"do": "done", "job": job, "attempt": attempt}])


def choose(table: Table, engine: xl.Engine) -> list[Op]:
    """Return what to write: give back the jobs of dead workers, and take the first waiting job."""
    living = {info.id for info in engine.engines()}
    lost = [
        name for name, job in table.items() if job["state"] == "taken" and job["by"] not in living
    ]
    ops = [{"do": "give back", "job": n, "attempt": table[n]["attempt"]} for n in lost]
    waiting = lost + [name for name, job in table.items() if job["state"] == "waiting"]
    return ops + [{"do": "take", "job": name, "by": engine.id} for name in waiting[:1]]


def mine(table: Table, engine: xl.Engine) -> tuple[str, int] | None:
    """Return the job that this worker has taken: (name, attempt)."""
    for name, job in table.items():
        if job["state"] == "taken" and job["by"] == engine.id:
            return name, job["attempt"]
    return None


def submit(path: str, number: int) -> None:
    """Enter jobs that are not there yet."""
    with xl.open(path) as engine, open_table(engine) as table:
        table.write(lambda now: [{"do": "submit", "job": f"job-{n}"} for n in range(number)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A job table on its log.")
    parser.add_argument("path", help="the ledger's directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--submit", type=int, metavar="NUMBER", help="enter so many jobs")
    what.add_argument("--work", metavar="NAME", help="do jobs, as the worker of that name")
    options = parser.parse_args()
    if options.work is None:
        submit(options.path, options.submit)
    else:
        work(options.path, options.work)
