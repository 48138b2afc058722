"""Python imports this on its own in the Spark programs that test_dying_drivers.py starts:
it kills a whole driver at a chosen instant, or makes executors believe that they are elsewhere.

EXCLUSIVELOG_TEST_KILL=before:2    just before batch 2 is committed; after:2 just after it
EXCLUSIVELOG_TEST_ELSEWHERE=DIR    while DIR/away exists: another machine, which sees nothing of
                                   this one but what is below DIR
"""

import os
import signal
from pathlib import Path

KILL, ELSEWHERE = "EXCLUSIVELOG_TEST_KILL", "EXCLUSIVELOG_TEST_ELSEWHERE"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _kill_the_driver() -> None:
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = _parent(pid)
    for killed in (_parent(pid), pid, os.getpid()):
        os.kill(killed, signal.SIGKILL)


def _kill_at(instant: str) -> None:
    from exclusivelog.spark import source

    commit = source.append_once

    def append_once(engine, run, number, batches):
        if instant == f"before:{number}":
            _kill_the_driver()
        found = commit(engine, run, number, batches)
        if instant == f"after:{number}":
            _kill_the_driver()
        return found

    source.append_once = append_once


def _be_elsewhere(only: str) -> None:
    # Tasks alone: the driver's own workers get the executors' environment, too.
    from pyspark import TaskContext

    from exclusivelog.spark import source, staging

    here, shared = source.boot_id, staging.Directory.shared.fget

    def away() -> bool:
        return TaskContext.get() is not None and Path(only, "away").exists()

    source.boot_id = lambda: "another machine's" if away() else here()
    staging.Directory.shared = property(
        lambda self: shared(self) and (self.root.startswith(only) or not away())
    )


if instant := os.environ.get(KILL):
    _kill_at(instant)
if only := os.environ.get(ELSEWHERE):
    _be_elsewhere(only)
