"""The examples of shared states, as a newcomer runs them.

Each must succeed and print what it promises. Each checks its claims by the log, so it is also run
with a change that makes them untrue, and must report that. However a script ends, none of its
processes is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, until
from tests.faces.scripts import EXAMPLES, failed, findings, run, unwarned

pytestmark = pytest.mark.once

SCRIPTS = ["kv_service.py", "dynamic_config.py", "job_table.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_short_and_its_docstrings_hold(script: str) -> None:
    source = EXAMPLES / script
    assert len(source.read_text().splitlines()) < 180
    command = [sys.executable, "-m", "doctest", str(source)]
    assert subprocess.run(command, timeout=PATIENCE).returncode == 0


# ---- the key-value service ---------------------------------------------------------------


@pytest.mark.long
def test_every_payment_is_there_though_a_server_is_killed() -> None:
    status, output, errors = run("kv_service_trial.py")
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4)
    assert "server-1 is killed" in output
    assert "{'alice': 14700, 'bob': 14900, 'carol': 15100}" in output
    assert re.search(r"\d+ messages, \d+ epochs, \d+ requests sent again", output)


@pytest.mark.long
def test_a_balance_that_nobody_paid_is_seen(path: str, engine: xl.Engine) -> None:
    with xl.SharedMap(engine.topic("accounts"), value="json") as accounts:
        accounts.put("alice", {"balance": 1, "last": {}})
    status, output, errors = run("kv_service_trial.py", "--path", path, "--payments", 30)
    assert (status, errors) == (1, "")
    assert "every payment is there, exactly once" in failed(output)


# ---- dynamic configuration ---------------------------------------------------------------


@pytest.mark.long
def test_a_change_is_seen_in_all_processes() -> None:
    status, output, errors = run("dynamic_config_trial.py", "--slowest", 30)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4)
    assert "40 changes, seen by 3" in output
    assert "[[False, True], [True]], and it is 40" in output
    newest = "{'limit': 50, 'host': 'host-40', 'port': 7040}"
    assert f"watcher-1, restarted after a trim to offset 86, begins with {newest}" in output


@pytest.mark.long
def test_a_change_that_takes_too_long_is_told() -> None:
    status, output, errors = run("dynamic_config_trial.py", "--changes", 3, "--slowest", 0)
    assert (status, errors) == (1, "")
    assert failed(output) == ["every change was seen by all, in time"]


# ---- the job table -----------------------------------------------------------------------


@pytest.mark.long
def test_every_job_is_done_once_though_workers_are_killed() -> None:
    status, output, errors = run("job_table_trial.py")
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4)
    killed = re.findall(r"(w\d\+*) is killed", output)
    assert len(set(killed)) == len(killed) == 4
    assert int(re.search(r"80 jobs, (\d+) attempts", output)[1]) > 80


@pytest.mark.smoke
@pytest.mark.long
def test_a_job_that_nobody_submitted_is_seen(path: str, engine: xl.Engine) -> None:
    ops = [{"do": "take", "job": "x", "by": "me"}, {"do": "done", "job": "x", "attempt": 1}]
    with engine.topic("jobs").producer() as producer:
        producer.send_many(map(msgpack.packb, ops))
    status, output, errors = run("job_table_trial.py", "--path", path, "--jobs", 20, "--kills", 1)
    assert (status, errors) == (1, "")
    assert "every job was done exactly once" in failed(output)


# ---- all ---------------------------------------------------------------------------------


def processes_of(session: int) -> list[int]:
    """The ids of the processes of a session: a script, and all processes that it has started."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            facts = process.joinpath("stat").read_text().rpartition(")")[2].split()
            state, its_session = facts[0], facts[3]
            if int(its_session) == session and state != "Z":
                found.append(int(process.name))
    return found


def engines_of(path: str) -> int:
    try:
        with xl.open(path, readonly=True) as engine:
            return len(engine.engines())
    except xl.LedgerError:  # not yet
        return 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "engines", "number"),
    [
        ("kv_service_trial.py", 2, signal.SIGINT),
        ("dynamic_config_trial.py", 5, signal.SIGINT),
        ("job_table_trial.py", 4, signal.SIGINT),
        ("kv_service_trial.py", 2, signal.SIGKILL),
    ],
)
def test_no_process_outlives_its_script(
    script: str, engines: int, number: signal.Signals, path: str
) -> None:
    command = [sys.executable, str(EXAMPLES / script), "--path", path]
    interrupted = number == signal.SIGINT
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        until(lambda: engines_of(path) >= engines)
        if interrupted:
            os.killpg(process.pid, number)  # as a terminal does it
        else:
            process.kill()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if interrupted else -number)
    assert unwarned(errors) == "" or not interrupted
    until(lambda: processes_of(process.pid) == [])
