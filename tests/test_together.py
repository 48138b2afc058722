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


@pytest.mark.long
def test_what_a_dead_worker_has_left_is_run_by_the_others(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    options = ["-q", "-p", "xdist", "-p", "conftest", "-n", "2", "--rootdir", tmp_path]
    output = run_pytest(*options, path, status=1)
    crashes = re.findall(r"worker 'gw\d' crashed while running '(.*)'", output)
    assert set(crashes) == {"test_some.py::test_that_kills_its_worker"}
    assert re.search(r"1 failed, 80 passed", output)
