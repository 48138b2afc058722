"""The main job: killed leaders, and a judge that can say no.

The first part runs the demo as people do, with few events. The second shows that each of its
claims turns red when what it claims is not so: a judge that cannot say no is no judge.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.audit.leaders import Verdict
from exclusivelog.cli import demo
from testing.processes import PATIENCE, until
from tests.faces.scripts import unwarned

pytestmark = pytest.mark.once
COMMAND = [sys.executable, "-m", "exclusivelog.cli", "demo"]


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, timeout=2 * PATIENCE, text=True
    )
    return done.returncode, done.stdout, unwarned(done.stderr)


def workers_of(ledger: Path) -> list[int]:
    """Processes that run a worker on this ledger."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"exclusivelog.cli.demo" in arguments and str(ledger).encode() in arguments:
                found.append(int(process.name))
    return found


def write_data(directory: Path, count: int) -> Callable[[dict[str, int]], None]:
    """The first events of the data, and their truth; a function that changes the truth."""
    events = demo.read_events(demo.DEFAULT_DATA, count)
    (directory / demo.HISTORY).write_bytes(gzip.compress(b"\n".join(events)))

    def write_truth(changes: dict[str, int]) -> None:
        truth = json.dumps(demo.replay(events) | changes)
        (directory / demo.TRUTH).write_bytes(gzip.compress(truth.encode()))

    write_truth({})
    return write_truth


# ---- the run -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_short_run_survives_its_kills() -> None:
    status, output, errors = run("--events", "900", "--rate", "800", "--kills", "3", "--seed", "7")
    assert (status, errors) == (0, "")
    kills = re.search(r" s, (\d) of 3 kills", output)
    assert kills is not None
    assert int(kills[1]) >= 1
    assert output.count(" is killed, ") == int(kills[1])
    assert "every event exactly once, in order: 900 events" in output
    assert output.endswith("verdict: all of it holds\n")


@pytest.mark.long
def test_a_finished_log_is_judged_again_and_a_wrong_truth_is_told(tmp_path) -> None:
    write_truth = write_data(tmp_path, 300)
    options = ["--data", str(tmp_path), "--path", str(tmp_path / "log"), "--rate", "10000"]
    status, output, _ = run(*options, "--kills", "0")
    assert (status, output.splitlines()[-1]) == (0, "verdict: all of it holds")
    write_truth({"redis.c": 1})
    status, output, errors = run(*options)
    assert (status, errors) == (1, "")
    assert "300 events, 300 of them in the log" in output
    assert re.search(
        r"FAILED  files and lines equal the truth: 1 files differ: redis.c: \d+ lines instead of 1",
        output,
    )
    assert output.endswith("verdict: FAILED\n")


@pytest.mark.long
def test_workers_end_with_their_parent_and_the_next_run_goes_on(tmp_path) -> None:
    """The parent itself is killed in the middle, and can neither kill nor reap anybody."""
    log = tmp_path / "log"
    options = ["--path", str(log), "--events", "4000", "--kills", "0"]
    with subprocess.Popen([*COMMAND, *options, "--rate", "200"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        until(lambda: b"goes on from" in parent.stdout.readline())
        until(lambda: len(workers_of(log)) == 3)
        with xl.open(log, readonly=True) as engine:
            until(lambda: engine.topic(demo.TOPIC).next_offset)
            parent.send_signal(signal.SIGKILL)
            until(lambda: workers_of(log) == [])
            done = engine.topic(demo.TOPIC).next_offset
    assert 0 < done < 4000
    status, output, _ = run(*options, "--rate", "10000")
    assert f"4,000 events, {done:,} of them in the log" in output
    assert (status, output.splitlines()[-1]) == (0, "verdict: all of it holds")


@pytest.mark.long
def test_an_interrupt_ends_it_quietly_with_all_its_processes(tmp_path) -> None:
    log = tmp_path / "log"
    with subprocess.Popen(
        [*COMMAND, "--path", str(log), "--rate", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        until(lambda: b"goes on from" in parent.stdout.readline())
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=PATIENCE)
    assert (parent.returncode, unwarned(errors)) == (130, "")
    assert workers_of(log) == []


@pytest.mark.long
def test_what_it_cannot_work_with_is_one_clear_line(tmp_path, engine, path) -> None:
    status, _, errors = run("--data", str(tmp_path))
    assert status == 1
    assert errors.count("\n") == 1
    assert "--data DIR" in errors
    with engine.topic(demo.TOPIC).producer() as producer:
        producer.send(b"something else")
    status, _, errors = run("--path", path)
    assert status == 1
    assert errors.count("\n") == 1
    assert "offset 0" in errors


# ---- the judge ---------------------------------------------------------------------------


def test_replaying_the_whole_history_gives_the_truth() -> None:
    history = demo.read_history(demo.DEFAULT_DATA)
    assert len(history.events) == 25_214
    assert demo.replay(history.events) == history.truth
    assert (len(history.truth), sum(history.truth.values())) == (1_611, 464_808)


def test_without_the_data_of_a_clone_the_events_are_made_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "DEFAULT_DATA", tmp_path)
    with demo.data_directory(None) as first, demo.data_directory(None) as second:
        history = demo.read_history(first)
        assert history == demo.read_history(second)
        assert len(history.events) == demo.MADE_UP
        assert demo.replay(history.events) == history.truth
        assert min(history.truth.values()) > 0
    assert not first.exists()
    with demo.data_directory(tmp_path) as given:
        assert given == tmp_path


SOUND = xl.Report(topics=1, entries=6, messages=6, problems=())
HISTORY = demo.History(
    [
        json.dumps({"path": path, "time": 9, "added": added, "removed": removed}).encode()
        for path, added, removed in [
            ("a", 3, 0),
            ("b", 2, 0),
            ("a", 1, 2),
            ("b", 0, 2),
            ("c", 0, 0),
            ("a", 0, 0),
        ]
    ],
    {"a": 2, "c": 0},
)
REIGNS = [
    demo.Tenure(1, "alice", 11, 30, 0, first_append=5, killed=10, best_waiter=20, end="killed"),
    demo.Tenure(2, "bob", 12, 20, 3, first_append=2_000_010, end="finished"),
]


def log_of(history: demo.History) -> list[Any]:
    """What two leaders would have written: three events each."""
    return [
        SimpleNamespace(
            offset=index,
            value=line,
            key=json.loads(line)["path"].encode(),
            event_time=9000,
            sequence_id=index,
            epoch=1 + index // 3,
            session=1 + index // 3,
            producer_name=("alice", "bob")[index // 3],
        )
        for index, line in enumerate(history.events)
    ]


def failed(
    messages: list[Any], report: xl.Report = SOUND, tenures: list[demo.Tenure] = REIGNS
) -> set[str]:
    findings = demo.judge(messages, HISTORY, demo.judge_report(report), tenures)
    return {finding.claim for finding in findings if not finding.holds}


EVENTS = "every event exactly once, in order"
EPOCHS = "epochs never interleave, one producer each"
LINES = "files and lines equal the truth"


def test_a_sound_log_passes() -> None:
    assert failed(log_of(HISTORY)) == set()
    assert demo.takeovers(REIGNS) == {2: 2.0}


def test_a_lost_a_doubled_and_a_swapped_event_are_seen() -> None:
    log = log_of(HISTORY)
    assert failed(log[:-1]) == {EVENTS}
    assert failed([*log[:2], *log[3:]]) == {EVENTS, LINES}
    assert failed([*log[:3], log[2], *log[3:]]) == {EVENTS, LINES}
    assert EVENTS in failed([log[1], log[0], *log[2:]])
    log[4].sequence_id = 5
    assert failed(log) == {EVENTS}


def test_another_value_or_key_is_seen() -> None:
    for name, value in [("value", None), ("value", b"?"), ("key", b"?"), ("event_time", 9)]:
        log = log_of(HISTORY)
        setattr(log[1], name, value)
        assert EVENTS in failed(log)


def test_epochs_that_go_back_or_have_two_producers_are_seen() -> None:
    log = log_of(HISTORY)
    log[4].epoch = 1  # a zombie's append after its successor's first
    assert failed(log) == {EPOCHS}
    log = log_of(HISTORY)
    log[4].session = 7
    assert failed(log) == {EPOCHS}
    log = log_of(HISTORY)
    log[1].producer_name = "bob"
    assert failed(log) == {EPOCHS}


def test_a_worse_waiter_that_is_promoted_is_seen() -> None:
    worse = dataclasses.replace(REIGNS[1], name="carol", priority=10)
    assert failed(log_of(HISTORY), tenures=[REIGNS[0], worse]) == {
        "the best waiter is next, each time"
    }
    assert failed(log_of(HISTORY), tenures=REIGNS[::-1]) == {"the best waiter is next, each time"}


def test_a_damaged_ledger_is_seen() -> None:
    damaged = dataclasses.replace(SOUND, problems=("offset 3 is damaged",))
    assert failed(log_of(HISTORY), damaged) == {"the ledger is sound"}


def test_a_wrong_grant_of_a_cluster_is_seen() -> None:
    right = Verdict("history", "offsets are dense", True, "6 messages")
    wrong = Verdict("history", "every epoch is granted once", False, "epoch 2 was granted twice")
    assert demo.judge_audit([right]).holds
    found = demo.judge_audit([right, wrong])
    assert not found.holds
    assert found.facts == "every epoch is granted once: epoch 2 was granted twice"
