"""Whole Spark programs that die, and executors that are elsewhere.

A driver is killed with SIGKILL just before a micro-batch's commit, its successor just after
one; the third one finishes. Every message must be in the log once, in its place. And on a
cluster whose executors cannot open the ledger, reading and writing either work by the options
that are made for it, or say which ones those are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.children import PATIENCE, ROOT, command
from tests.spark.sparks import as_bytes, epochs, fill, finish, left_in, stream, values

FAULTS = Path(__file__).parent / "faults"
LIMIT = 4 * PATIENCE  # seconds, for a program with a JVM of its own

pytestmark = [
    pytest.mark.long,
    pytest.mark.once,
    pytest.mark.timeout(4 * LIMIT),
    pytest.mark.usefixtures("spark_home"),
]


def run(source: str, *args: object, status: int = 0, **environment: str) -> str:
    """Run a Spark program of its own, with a fault; what it prints."""
    path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command(source, *args),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=ROOT,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYSPARK_PYTHON": sys.executable,
            "EXCLUSIVELOG_TEST_PATIENCE": f"{LIMIT:.0f}",
            **environment,
        },
    )
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


QUERY = """
import sys
from pathlib import Path
from exclusivelog.spark.session import local_session
from tests.spark.conftest import FAST
from tests.spark.sparks import finish, stream

path, checkpoint = sys.argv[1:]
spark = local_session("local[2]", FAST)
finish(stream(spark, path, Path(checkpoint), maxOffsetsPerTrigger=10, sink={"inlineLimit": 0}))
spark.stop()
"""


def test_a_driver_killed_around_a_commit(spark, path, tmp_path) -> None:
    fill(path, count=40)
    checkpoint = tmp_path / "ckpt"
    run(QUERY, path, checkpoint, status=-9, EXCLUSIVELOG_TEST_KILL="before:1")
    assert values(path, "out") == as_bytes(range(10))
    assert left_in(tmp_path / "log" / "staging") != []  # what the dead one had staged
    run(QUERY, path, checkpoint, status=-9, EXCLUSIVELOG_TEST_KILL="after:2")
    assert values(path, "out") == as_bytes(range(30))
    finish(stream(spark, path, checkpoint, maxOffsetsPerTrigger=10))
    assert values(path, "out") == as_bytes(range(40))
    assert epochs(path, "out") == [1] * 10 + [2] * 20 + [3] * 10
    assert left_in(tmp_path / "log" / "staging") == []
    with xl.open(path) as engine:
        assert engine.verify().ok
        assert [m.sequence_id for m in engine.topic("out").reader()] == list(range(40))


CLUSTER = """
import json, sys
from pathlib import Path
from exclusivelog.spark.session import local_session
from tests.spark.conftest import FAST
from tests.spark.sparks import numbers, read, write

path, shared, faults, python_path = sys.argv[1:]
spark = local_session("local-cluster[1,2,1024]", {
    **FAST,
    "spark.executorEnv.EXCLUSIVELOG_TEST_ELSEWHERE": shared,
    "spark.executorEnv.PYTHONPATH": faults + ":" + python_path,
    "spark.executor.memory": "1g",
    "spark.task.maxFailures": "1",
    "spark.executor.extraJavaOptions": FAST["spark.driver.extraJavaOptions"],
})
found = {}


def attempt(name, act):
    try:
        found[name] = act()
    except Exception as error:
        found[name] = str(error)


def attempts(where):
    attempt(f"direct {where}", lambda: read(spark, path).count())
    attempt(f"large {where}", lambda: write(
        numbers(spark, 10), path, topic=f"large {where}", inlineLimit=0))


attempts("here")
Path(shared).mkdir(exist_ok=True)
Path(shared, "away").touch()
attempts("away")
attempt("inline", lambda: sorted(r.offset for r in read(spark, path, access="inline").collect()))
attempt("view", lambda: read(spark, path, view="epochs").count())
attempt("small", lambda: write(numbers(spark, 10), path, topic="small"))
attempt("shared", lambda: write(
    numbers(spark, 10), path, topic="shared", inlineLimit=0, stagingDir=shared))
spark.stop()
print(json.dumps(found))
"""


def test_executors_that_cannot_open_the_ledger(path, tmp_path) -> None:
    """A cluster of processes: at first they see the ledger's files, then they do not."""
    fill(path, count=10)
    shared = tmp_path / "shared"
    said = run(CLUSTER, path, shared, FAULTS, ROOT)
    found = json.loads(said.splitlines()[-1])
    assert (found["direct here"], found["large here"]) == (10, None)
    assert "[EXCLUSIVELOG_REMOTE_EXECUTOR]" in found["direct away"]
    assert '"access", "inline"' in found["direct away"]
    assert "[EXCLUSIVELOG_STAGING]" in found["large away"]
    assert "stagingDir" in found["large away"]
    assert "inlineLimit" in found["large away"]
    assert found["inline"] == list(range(10))
    assert found["view"] == 1
    assert (found["small"], found["shared"]) == (None, None)
    for topic in ("large here", "small", "shared"):
        assert values(path, topic) == as_bytes(range(10))
    assert left_in(shared) == [str(shared / "away")]
    assert list(Path(path, "staging").glob("*/*")) == []
