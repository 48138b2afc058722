"""The examples, as a newcomer runs them.

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

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, until
from tests.faces.scripts import EXAMPLES, failed, findings, run, unwarned

pytestmark = pytest.mark.once

# ---- leader election ---------------------------------------------------------------------

HEALTHY = ("--keepalive", 4)  # seconds: a busy machine may fail to run a leader for one


@pytest.mark.long
def test_leaders_are_killed_and_stopped_and_never_two_at_a_time() -> None:
    status, output, errors = run("leader_election_trial.py", *HEALTHY)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4)
    leaders = re.findall(r"(worker-\d) leads, epoch (\d)", output)
    assert [epoch for _, epoch in leaders] == ["1", "2", "3"]
    (first, _), (second, _), (third, _) = leaders
    assert len({first, second, third}) == 3
    assert f"{first} is killed" in output
    assert re.search(rf"{second} could not send '{second}, epoch 2: decision \d+'", output)
    assert "ProducerFencedError: topic 'decisions'" in output
    assert re.search(
        rf"1  {first} .* found dead\n +2  {second} .* found hung\n +3  {third}", output
    )


@pytest.mark.long
def test_a_zombies_message_in_the_log_is_seen(path, engine) -> None:
    """It stands there already, written by somebody who needed no lead for it."""
    with engine.topic("decisions").producer() as producer:
        producer.send_many(
            f"worker-{worker}, epoch 2: decision {number}".encode()
            for worker in (1, 2, 3)
            for number in range(1, 300)
        )
    status, output, errors = run("leader_election_trial.py", *HEALTHY, "--path", path)
    assert (status, errors) == (1, "")
    assert failed(output) == ["the decision that was refused is not in the log"]


@pytest.mark.long
def test_a_leader_that_hangs_within_its_keepalive_keeps_the_lead() -> None:
    status, output, errors = run("leader_election_trial.py", "--keepalive", 60, "--patience", 2)
    assert (status, output.count(" leads, epoch ")) == (1, 2)
    assert errors == "FAILED no worker led after epoch 2 within 2 s\n"


# ---- the billing worker ------------------------------------------------------------------


@pytest.mark.long
def test_a_role_fails_over_and_each_order_is_billed_once() -> None:
    status, output, errors = run("billing_worker_trial.py", *HEALTHY)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4)
    billers = re.findall(r"(worker-\d) bills, epoch (\d)", output)
    assert [epoch for _, epoch in billers] == ["1", "2", "3", "4"]
    (first, _), (second, _), (third, _), (fourth, _) = billers
    assert len({first, second, third}) == 3
    assert f"{first} is killed" in output
    assert f"{third} hands over to {fourth}" in output


@pytest.mark.long
def test_a_bill_that_nobody_with_the_role_has_written_is_seen(path, engine) -> None:
    with engine.topic("invoices").producer(serializer="json") as producer:
        producer.send({"order": 0, "epoch": 1, "worker": "nobody"})
    status, output, errors = run("billing_worker_trial.py", *HEALTHY, "--path", path)
    assert (status, errors) == (1, "")
    assert failed(output) == [
        "each order has one invoice, in order",
        "each invoice has its payment, by the same worker",
    ]


@pytest.mark.long
def test_a_worker_that_hangs_within_its_keepalive_keeps_its_role() -> None:
    status, output, errors = run("billing_worker_trial.py", "--keepalive", 60, "--patience", 2)
    assert (status, output.count(" bills, epoch ")) == (1, 2)
    assert errors == "FAILED not within 2 s: a worker bills under epoch 3\n"


# ---- the uptime checker ------------------------------------------------------------------


def loads(output: str) -> dict[str, list[int]]:
    """Who -> endpoints at the start, after a death, and after all, with priorities and without."""
    rows = re.findall(r"^(worker-\d|standby) +(.*)", output, re.MULTILINE)
    return {who: [int(load.replace("-", "0")) for load in row.split()] for who, row in rows}


@pytest.mark.long
def test_endpoints_go_to_their_best_choice_or_all_to_one() -> None:
    status, output, errors = run("uptime_checker_trial.py", "--endpoints", 6, "--settle", 5)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 4)
    gaps = re.findall(r"([\d,]+) ms", output)
    assert len(gaps) == 2
    assert max(int(gap.replace(",", "")) for gap in gaps) < 4000, (
        "a failover does not wait for other workers (D7)"
    )
    assert loads(output) == {
        "worker-1": [2, 0, 0, 6, 0, 0],
        "worker-2": [2, 3, 0, 0, 6, 0],
        "worker-3": [2, 3, 0, 0, 0, 0],
        "standby": [0, 0, 6, 0, 0, 6],
    }


@pytest.mark.long
def test_without_time_to_settle_the_first_has_everything() -> None:
    status, output, errors = run("uptime_checker_trial.py", "--endpoints", 6, "--settle", 0)
    assert (status, errors) == (1, "")
    assert failed(output) == ["with priorities, each endpoint has its best live worker"]
    assert loads(output)["worker-1"] == [6, 0, 0, 6, 0, 0]


def test_the_choices_are_as_documented() -> None:
    command = [sys.executable, "-m", "doctest", str(EXAMPLES / "uptime_checker.py")]
    assert subprocess.run(command, timeout=PATIENCE).returncode == 0


# ---- the drain ---------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.long
def test_a_drain_moves_every_topic_and_loses_nothing() -> None:
    status, output, errors = run("drain_trial.py", "--topics", 4)
    assert (status, errors, findings(output)) == (0, "", ["ok"] * 5)
    assert re.search(r"worker-1 unloaded 4 topics to worker-3 in [\d.]+ ms", output)
    assert re.search(r"told: jobs-\d is with worker-3, tcp://127.0.0.1:7003", output)
    rows = re.findall(r"^(jobs-\d|longest) +([\d.]+) +([\d.]+)", output, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["jobs-0", "jobs-1", "jobs-2", "jobs-3", "longest"]
    gaps = [(float(unload), float(election)) for _, unload, election in rows]
    assert gaps[-1] == tuple(map(max, zip(*gaps[:-1], strict=True)))
    assert min(gaps[-1]) > 0


@pytest.mark.smoke
@pytest.mark.long
def test_a_lost_number_is_seen(path, engine) -> None:
    """Numbers 0 to 6 are not there when the first worker comes."""
    with engine.topic("jobs-1").producer() as producer:
        producer.send(b"7 0")
    status, output, errors = run("drain_trial.py", "--topics", 2, "--path", path)
    assert (status, errors) == (1, "")
    assert failed(output) == ["every number is there once, in order"]


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


def workers_of(path: str) -> int:
    try:
        with xl.open(path, readonly=True) as engine:
            return sum(info.name.startswith("worker") for info in engine.engines())
    except xl.LedgerError:  # not yet
        return 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "number"),
    [
        ("leader_election_trial.py", signal.SIGINT),
        ("billing_worker_trial.py", signal.SIGINT),
        ("uptime_checker_trial.py", signal.SIGINT),
        ("drain_trial.py", signal.SIGINT),
        ("drain_trial.py", signal.SIGKILL),  # what ends its children then is the same for all
    ],
)
def test_no_process_outlives_its_script(script: str, number: signal.Signals, path: str) -> None:
    status = 130 if number == signal.SIGINT else -number
    runs = (_end_early(script, number, f"{path}-{attempt}") for attempt in range(10))
    # On a busy machine, it may be over before it is found at work.
    process, errors = next(run for run in runs if run[0].returncode != 0)
    assert process.returncode == status
    assert unwarned(errors) == "" or number == signal.SIGKILL
    until(lambda: processes_of(process.pid) == [])


def _end_early(
    script: str, number: signal.Signals, path: str
) -> tuple[subprocess.Popen[bytes], bytes]:
    """Run a script, and send it a signal when two of its workers are there."""
    command = [sys.executable, str(EXAMPLES / script), "--path", path]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        # Of three, one of which may be killed soon.
        until(lambda: workers_of(path) >= 2 or process.poll() is not None)
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does it
            else:
                process.kill()
        _, errors = process.communicate(timeout=PATIENCE)
    return process, errors
