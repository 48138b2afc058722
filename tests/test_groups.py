"""`make test` and `make test-all` run groups of checks in parallel: a failure hides no other group,
and nothing that a group has started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.children import ROOT, finish
from testing.patience import PATIENCE
from testing.processes import until

pytestmark = pytest.mark.once

MAKEFILE = """
good:
\t@echo all is well
bad:
\t@echo what is wrong; exit 3
forgetful:
\t@sleep 1000 & echo $$! >left; setsid sleep 1000 & echo $$! >apart
files:
\t@mktemp -d; mkdir "$$TMPDIR/no"; touch "$$TMPDIR/no/file"; chmod 0 "$$TMPDIR/no"
broken:
\t@mktemp -d; exit 3
endless:
\t@sleep 1000 & echo $$! >left; wait
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    return tmp_path


def start(place: Path, *targets: str) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "tools" / "groups.py", *targets]
    (place / "tmp").mkdir()
    return subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, "TMPDIR": str(place / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_all_groups_run_and_each_result_is_listed(place: Path) -> None:
    process = start(place, "bad", "good")
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2  # what make ends with when a command fails
    assert printed.index("what is wrong") < printed.index("all is well")
    assert printed.index("all is well") < printed.rindex("what is wrong")  # again, at the end
    assert printed.count("all is well") == 1
    summary = printed.partition("result\n")[2].split("\n")
    assert [line.split(maxsplit=2)[::2] for line in summary[:2]] == [
        ["bad", "failed, status 2"],
        ["good", "passed"],
    ]


def test_groups_that_pass_end_with_status_0(place: Path) -> None:
    process = start(place, "good", "good")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert list((place / "tmp").iterdir()) == []


def test_groups_share_no_temporary_files_and_leave_only_those_of_one_that_fails(
    place: Path,
) -> None:
    process = start(place, "files", "broken", "files")
    printed, _ = process.communicate(timeout=PATIENCE)
    lines = printed.partition("==== the end of")[0].splitlines()
    made = [Path(each) for each in lines if each.startswith(str(place / "tmp"))]
    assert len({each.parent for each in made}) == 3
    assert [each.exists() for each in made] == [False, True, False]
    [root] = (place / "tmp").iterdir()
    assert list(root.iterdir()) == [made[1].parent]
    assert (root.stat().st_mode & 0o777, made[1].parent.stat().st_mode & 0o7777) == (0o755, 0o1777)
    assert f"temporary files of what failed: {root}" in printed


@pytest.mark.long
def test_a_process_that_a_group_leaves_behind_is_ended_and_reported(place: Path) -> None:
    process = start(place, "forgetful", "good")
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "left behind: sleep 1000, sleep 1000" in printed
    assert all(gone(int((place / name).read_text())) for name in ("left", "apart"))


def test_an_interrupt_ends_all_that_was_started(place: Path) -> None:
    process = start(place, "endless", "good")
    left = place / "left"
    until(lambda: left.exists() and left.read_text().strip())
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in printed
    assert gone(int(left.read_text()))


def test_a_process_whose_parent_has_ended_before_ends_with_it() -> None:
    """It was killed between the fork and the child's request to be killed with it."""
    said = finish(
        """
        import os, time
        from testing.children import die_with_parent
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.001)
        die_with_parent(parent)
        print("lives on", flush=True)
        """
    )
    assert said == ""
