"""A signal handler raises an OSError in the middle of a call: the time limit by SIGALRM that many
programs have. It says nothing of a file or a network, and reaches the caller as it is (rule H2)."""

from __future__ import annotations

import io
import os
import signal
import socket
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from exclusivelog import logs, threads
from exclusivelog.cluster import pulsar
from exclusivelog.spark import plan, staging

pytestmark = pytest.mark.rule("H2")


class Limit(TimeoutError):
    """What the handler raises, also with an errno."""


@pytest.fixture(params=[(), (110, "Connection timed out")], ids=["no errno", "an errno"])
def strike(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """In place of a call of the system: a handler interrupts it, and raises."""

    def handler(*_: Any) -> None:
        raise Limit(*request.param)

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda *_, **__: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


class Stream:
    def __init__(self, fileno: Callable[..., Any]) -> None:
        self.fileno = fileno


def test_h2_no_question_about_a_file_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    kept = staging.Directory.prepare(str(tmp_path / "staging"))
    os.mkdir(tmp_path / "staging" / "old")
    with pytest.raises(Limit):
        logs.is_blocked(Stream(strike))
    for module, call in (
        ("os.stat", lambda: plan.inode(str(tmp_path))),
        ("os.makedirs", lambda: staging.Directory.prepare(str(tmp_path / "other"))),
        ("builtins.open", lambda: kept.shared),
        ("os.scandir", lambda: kept.remove_old("old")),
        ("builtins.open", threads._pids_max),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, strike)
            with pytest.raises(Limit):
                call()


def test_h2_an_admin_call_that_is_interrupted_is_no_error_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    """urllib makes an URLError of it."""
    monkeypatch.setattr(socket, "create_connection", strike)
    cluster = object.__new__(pulsar.Cluster)  # the calls of the admin API use its address only
    cluster.access = pulsar.Access("pulsar://localhost", "public", "default", "http://localhost:1")
    with pytest.raises(Limit):
        cluster.admin("GET", "clusters")


class Stalled(io.BytesIO):
    """The body of an answer that never comes: a socket's time-out has no errno."""

    def read(self, size: int | None = -1) -> bytes:
        raise TimeoutError("timed out")


def test_a_stalled_answer_of_the_admin_api_is_told_as_the_refusal_that_it_is() -> None:
    access = pulsar.Access("pulsar://host:6650", "tenant", "space", "http://host:8080")
    answer = urllib.error.HTTPError("http://host", 500, "Server Error", Message(), Stalled())
    assert "Server Error (HTTP 500)" in pulsar._refused(access, "/policies", answer)
