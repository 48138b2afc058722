"""Python imports this on its own in the Spark programs that test_dying_drivers.py starts:
it kills a whole driver at a chosen instant, or makes executors believe that they are elsewhere.

EXCLUSIVELOG_TEST_KILL=before:2    just before batch 2 is committed; after:2 just after it
EXCLUSIVELOG_TEST_ELSEWHERE=DIR    while DIR/away exists: another machine, which sees nothing of
                                   this one but what is below DIR
"""

import os
import signal
import time
from pathlib import Path

KILL, ELSEWHERE = "EXCLUSIVELOG_TEST_KILL", "EXCLUSIVELOG_TEST_ELSEWHERE"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _stop(pid: int) -> None:
    """SIGSTOP; returns once no thread of it runs any more."""
    os.kill(pid, signal.SIGSTOP)
    while any(_runs(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def _runs(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T"
    except OSError:  # it has ended
        return False


def _kill_the_driver() -> None:
    """All of it at one moment: none of its processes goes on, or ends by itself, because another
    one has died."""
    jvm = os.getpid()
    while Path(f"/proc/{jvm}/comm").read_text().strip() != "java":
        jvm = _parent(jvm)
    program = _parent(jvm)
    _stop(program)
    for killed in (jvm, program, os.getpid()):
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
