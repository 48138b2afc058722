"""A signal handler raises an OSError in the middle of a call: the time limit by SIGALRM that many
programs have. It says nothing of a file or a network, and reaches the caller as it is (rule H2)."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import cli, foreign, logs, opening, threads, waits
from exclusivelog.cli import demo, streams
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


def test_h2_no_attempt_to_remove_files_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    (tmp_path / "old" / "file").parent.mkdir()
    (tmp_path / "old" / "file").touch()
    with monkeypatch.context() as patched:
        patched.setattr("os.unlink", strike)
        with pytest.raises(Limit):
            foreign.remove_tree(str(tmp_path / "old"))
    foreign.remove_tree(str(tmp_path / "old"))
    foreign.remove_tree(str(tmp_path / "old"))  # it is gone
    assert not list(tmp_path.iterdir())


def test_a_symbolic_link_in_the_way_of_a_removal_stays(tmp_path) -> None:
    """Python's own error for it has no errno, as a signal handler's may have none."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    foreign.remove_tree(str(link))
    foreign.remove_tree(str(tmp_path / "nothing"))
    assert link.is_symlink()


def test_h2_no_file_that_may_be_missing_or_unreadable_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    for module, call in (
        ("os.listdir", lambda: opening._is_free(str(tmp_path))),
        ("gzip.decompress", lambda: demo.read_events(Path(demo.__file__).parent)),
        ("os.read", lambda: streams.read_some(0, 1)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("pathlib.Path.read_bytes", lambda _: b"")
            patched.setattr(module, strike)
            with pytest.raises(Limit):
                call()


def test_h2_a_command_that_is_run_as_a_function_raises_it(
    path: str, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    """Else it would end the program, with "exclusivelog: Connection timed out"."""
    xl.open(path).close()
    monkeypatch.setattr(xl.Engine, "topics", strike)
    with pytest.raises(Limit):
        cli.load().main(["topics", path], standalone_mode=False)


def test_h2_a_log_line_does_not_swallow_it(
    path: str, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    monkeypatch.setattr(logs, "_handlers", strike)
    with pytest.raises(Limit):
        logs.emit(logging.getLogger("exclusivelog.test"), logs.CALLBACK_FAILED, reason="none")


def test_h2_a_maps_wait_for_the_topic_is_not_taken_for_the_end_of_a_look(
    path: str, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    """A look at the holder ends with a time limit of its own."""
    with xl.open(path) as engine, xl.open(path) as other:
        held = other.topic("t").producer("exclusive")
        shared = xl.SharedMap(engine.topic("t"))
        waits_once = iter([strike])
        settled = waits.until_settled
        monkeypatch.setattr(
            waits, "until_settled", lambda future: next(waits_once, None) or settled(future)
        )
        with pytest.raises(Limit):
            shared.put("key", 1)
        held.close()
        shared.put("key", 2)


def test_h2_an_admin_call_that_is_interrupted_is_no_error_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Any]
) -> None:
    """urllib makes an URLError of it."""
    monkeypatch.setattr(socket, "create_connection", strike)
    cluster = object.__new__(pulsar.Cluster)  # the calls of the admin API use its address only
    monkeypatch.setattr(cluster, "check_not_forked", int)
    cluster.access = pulsar.Access("pulsar://localhost", "public", "default", "http://localhost:1")
    cluster._answering = ""
    with pytest.raises(Limit):
        cluster.admin("GET", "clusters")


class Stalled(io.BytesIO):
    """The body of an answer that never comes: a socket's time-out has no errno."""

    def read(self, size: int | None = -1) -> bytes:
        raise TimeoutError("timed out")


def test_a_stalled_answer_of_the_admin_api_is_told_as_the_refusal_that_it_is() -> None:
    access = pulsar.Access("pulsar://host:6650", "tenant", "space", "http://host:8080")
    answer = urllib.error.HTTPError("http://host", 500, "Server Error", Message(), Stalled())
    assert "Server Error (HTTP 500)" in pulsar._refused(access, access.admin, "/policies", answer)
