"""`exclusivelog mirror`, run as people run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import exclusivelog as xl
from testing.broker import Namespace
from testing.children import ROOT
from testing.patience import PATIENCE
from testing.processes import until
from tests.cluster.test_mirror import source, target

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]

PROGRAM = [sys.executable, "-m", "exclusivelog.cli", "mirror"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
        env=environment(),
        check=False,
    )


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_there_and_back(topic: xl.Topic, namespace: Namespace, tmp_path: Path) -> None:
    topic.producer().send_many([b"x"] * 1234)
    path, to = topic.engine.path, ["--to", namespace.url, "--admin", namespace.admin]
    done = run(path, *to, "--verify")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is mirrored there" in done.stderr
    assert namespace.call("GET", f"persistent/{namespace.path}") == []
    done = run(path, *to)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "orders: 1,234 mirrored, 0 behind"
    done = run(path, *to, "--json")
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "topic": "orders",
        "position": 1234,
        "end": 1234,
        "copied": 0,
        "begun": True,
        "lag": 0,
    }
    done = run(path, "orders", *to, "--verify")
    assert done.stdout == "orders: 1,234 compared, no difference; 0 behind\n"
    topic.trim(before=1000)
    done = run(path, "orders", *to, "--verify")
    assert done.stdout == (
        "orders: 234 compared, no difference; 0 behind; 1,000 cannot be compared, as the log has "
        "lost them\n"
    )
    done = run(tmp_path / "back", "--from", namespace.url, "--admin", namespace.admin)
    assert (done.returncode, done.stdout) == (0, "orders: 1,234 messages\n")
    with xl.open(tmp_path / "back") as engine:
        assert source(engine.topic("orders"))[1000:] == source(topic)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_follower_is_ended_in_good_order(
    topic: xl.Topic, namespace: Namespace, number: int, status: int
) -> None:
    command = [*PROGRAM, topic.engine.path, "--to", namespace.url, "--admin", namespace.admin]
    with topic.producer() as producer:
        producer.send(b"a")
        with subprocess.Popen(
            [*command, "--follow"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                until(lambda: process.stdout.readline() == "orders: 1 mirrored, 0 behind\n")
                producer.send(b"b")
                until(lambda: process.stdout.readline() == "orders: 2 mirrored, 0 behind\n")
                process.send_signal(number)
                _, wrong = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
    assert (process.returncode, wrong) == (status, "")
    assert target(namespace) == source(topic)


def test_errors_are_one_line(topic: xl.Topic, namespace: Namespace, tmp_path: Path) -> None:
    topic.producer().send(b"x")
    path, admin = topic.engine.path, ["--admin", namespace.admin]
    (tmp_path / "random").write_bytes(b"\xff\xfe")
    to = [path, "--to", namespace.url, *admin]
    for arguments, said in (
        ([*to, "--token-file", tmp_path / "nothing"], "nothing: No such file or directory"),
        ([*to, "--token-file", tmp_path], f"{tmp_path}: Is a directory"),
        ([*to, "--token-file", tmp_path / "random"], "random' is no token"),
        ([*to, "--tls-trust-certs", tmp_path / "nothing"], "nothing: No such file or directory"),
        ([*to, "--tls-trust-certs", tmp_path / "random"], "random' has no certificates"),
        ([path, "--to", "pulsar://127.0.0.1:1/a/b"], "cannot be reached"),
        ([path, "nothing", "--to", namespace.url, *admin], "nothing"),
        ([path, "--to", "http://x/a/b"], "is no URL of a Pulsar namespace"),
        ([path, "--from", namespace.url, *admin], "is not empty"),
        ([tmp_path / "none", "--to", namespace.url, *admin], "none"),
    ):
        done = run(*arguments)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (1, "")
        assert line.startswith("exclusivelog: ")
        assert said in line


def test_one_direction_at_a_time(topic: xl.Topic) -> None:
    path, url = topic.engine.path, "pulsar://127.0.0.1:1/a/b"
    for arguments in ([], ["--to", url, "--from", url], ["--from", url, "--follow"]):
        done = run(path, *arguments)
        assert done.returncode == 2
        assert "--to URL" in done.stderr
