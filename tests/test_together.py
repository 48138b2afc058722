"""A run whose worker dies goes on, and says in which test it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.children import run_pytest

TESTS = """
    import os, time

    import pytest

    @pytest.mark.parametrize("number", range(40))
    def test_short(number):
        pass

    def test_that_kills_its_worker():
        os._exit(1)

    @pytest.mark.parametrize("number", range(40))
    def test_later(number):
        time.sleep(0.01)
"""


LAST = """
    import os

    def test_that_kills_its_worker():
        os._exit(1)

    def test_behind_it():
        pass

    def test_the_last():
        pass
"""


def run(tmp_path: Path, source: str, workers: int) -> str:
    """The output of a run, of which one worker dies."""
    path = tmp_path / "test_some.py"
    path.write_text("\n".join(line[4:] for line in source.splitlines()))
    options = ["-q", "-p", "xdist", "-p", "conftest", "-n", workers, "--rootdir", tmp_path]
    output = run_pytest(*map(str, options), path, status=1)
    crashes = re.findall(r"worker 'gw\d' crashed while running '(.*)'", output)
    assert set(crashes) == {"test_some.py::test_that_kills_its_worker"}
    return output


@pytest.mark.long
def test_what_a_dead_worker_has_left_is_run_by_the_others(tmp_path: Path) -> None:
    assert re.search(r"1 failed, 80 passed", run(tmp_path, TESTS, 2))


@pytest.mark.long
def test_so_are_the_last_two_if_no_worker_is_left(tmp_path: Path) -> None:
    """The worker that replaces the dead one is not given both at once."""
    assert re.search(r"1 failed, 2 passed", run(tmp_path, LAST, 1))
