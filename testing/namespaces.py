"""Pid namespaces of their own, in which the next process's id can be chosen."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

from testing.children import ROOT, command
from testing.processes import PATIENCE

NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can_choose_pids() -> bool:
    """A pid namespace of one's own, in which the next process's id can be chosen."""
    choice = "echo 300 > /proc/sys/kernel/ns_last_pid"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run(
            [*NEW_NAMESPACE, "sh", "-c", choice], capture_output=True, timeout=PATIENCE, check=False
        )
        return tried.returncode == 0
    return False


needs_namespaces = pytest.mark.skipif(
    not can_choose_pids(), reason="unshare --pid, or ns_last_pid in it, is not permitted here"
)


def in_a_namespace(source: str, *args: object) -> str:
    """What the source prints, run as process 1 of a pid namespace. It must end well."""
    done = subprocess.run(
        NEW_NAMESPACE + command(source, *args),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=2 * PATIENCE,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
