"""A trial of job_table.py: workers are killed during their work, and the log is judged.

    $ python examples/job_table_trial.py

The other workers see that they are gone, and do their jobs. In the end every worker is killed, and
the table is restored three times: from the log's first message by a plain loop, by the state from
its snapshot, and after a trim. It must be the same each time, with every job done exactly once.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial

from job_table import Op, Table, apply, open_table, work
from processes import directory, never_interleaved, processes, run, until, verdict

import exclusivelog as xl


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

            def done_at_least(number: int) -> bool:
                return states(table)["done"] >= number

            for kill in range(1, options.kills + 1):
                part = kill * options.jobs // (options.kills + 1)
                until("jobs are done", partial(done_at_least, part))
                until(
                    "a worker has a job",
                    lambda: bool(busy(table, engine)) or done_at_least(len(jobs)),
                )
                pids = busy(table, engine)
                worker = next((w for w in workers if w.pid in pids), workers[0])
                worker.kill()
                worker.join()
                workers.remove(worker)
                print(f"{dict(states(table))}: {worker.name} is killed")
                workers.append(start(f"{worker.name}+", work, path, f"{worker.name}+"))
            until("all are done", partial(done_at_least, len(jobs)))
            took = table.read(lambda now: sum(job["attempt"] for job in now.values()))
        by_loop, done = replay(topic)
        messages = list(topic.reader())
        with open_table(engine) as table:
            by_state = table.read(dict)
            snapshot = table.snapshot()
            if engine.supports("retention"):  # a cluster keeps all messages
                topic.trim(before=snapshot)
        with open_table(engine) as table:
            after_trim = table.read(dict)
    print(
        f"{len(jobs)} jobs, {took} attempts; {len(messages)} operations, "
        f"{messages[-1].epoch} epochs\n"
    )
    return verdict(
        {
            "every job was done exactly once": done == Counter(jobs),
            "jobs of killed workers were done by others": took > len(jobs),
            "the table is the same, however it is restored": by_loop == by_state == after_trim,
            "there never were two writers at a time": never_interleaved(messages),
        }
    )


if __name__ == "__main__":
    run(main)
