"""`pytest --benchmark` from a clone: the microbenchmarks, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.children import run_pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.once


@pytest.mark.long
def test_benchmark_selects_bench() -> None:
    found = run_pytest("--benchmark", "--collect-only", "-q").splitlines()
    files = {line.partition("::")[0] for line in found if "::" in line}
    assert "bench/test_promotion.py" in files
    assert all(file.startswith("bench/") for file in files)
    only = run_pytest("--benchmark-only", "--collect-only", "-q", "bench/").splitlines()
    assert found[:-1] == only[:-1], "it is what it stands for"


@pytest.mark.long
def test_benchmark_measures() -> None:
    """It is no abbreviation of --benchmark-disable, say: there is a table with the figures."""
    output = run_pytest("--benchmark", "-k", "test_select", "--benchmark-max-time=0.01")
    assert re.search(r"benchmark.*: \d+ tests", output)
    assert re.search(r"^test_select\S* +[\d.,]+ ", output, re.MULTILINE)


@pytest.mark.smoke
@pytest.mark.long
def test_benchmark_goes_with_a_path() -> None:
    """What is no microbenchmark there is skipped."""
    output = run_pytest("--benchmark", "-rs", "tests/test_benchmark_option.py")
    assert re.search(r"^=+ \d+ skipped", output, re.MULTILINE)
    assert "passed" not in output


@pytest.mark.long
def test_without_it_nothing_of_bench_is_run() -> None:
    large = ("tests", "proof", "exclusivelog")  # to collect them takes most of the time
    output = run_pytest("--collect-only", "-q", *(f"--ignore={each}" for each in large))
    assert "README.md" in output
    assert "bench/" not in output
