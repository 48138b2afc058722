"""The server of forked processes leaves nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from proof.fork_server import fork_server
from testing.descriptors import readable
from testing.processes import until

pytestmark = pytest.mark.once


def fork_and_sleep(noted: str) -> None:
    """A process with a child; both sleep for longer than any test."""
    child = os.fork()
    if child:
        Path(noted).write_text(f"{child}\n")
    time.sleep(3600)


def test_what_a_killed_process_has_forked_ends_with_the_server(tmp_path: Path) -> None:
    noted = tmp_path / "child"
    with fork_server("proof.tests.test_fork_server:fork_and_sleep") as fork:
        process = fork(os.devnull, str(noted))
        until(lambda: noted.exists() and noted.read_text().endswith("\n"))
        child = os.pidfd_open(int(noted.read_text()))
        process.close()
        assert not ended(child)
    assert ended(child)
    os.close(child)


def ended(pidfd: int) -> bool:
    return readable(pidfd, 0)
