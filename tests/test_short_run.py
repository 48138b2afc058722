"""What `make test` runs of a test with many cases, and that `make test-all` runs the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.children import run_pytest

pytestmark = [pytest.mark.once, pytest.mark.long]
FILES = ["tests/storage/test_holes.py", "proof/tests/test_access_model.py"]


def collected(*options: str) -> list[str]:
    """The cases that pytest chooses of these files."""
    found = run_pytest("--collect-only", "-q", *options, *FILES).splitlines()
    return [line for line in found if "::" in line]


def cases(listed: list[str]) -> Iterator[list[str]]:
    """The cases of each test."""
    for test in dict.fromkeys(each.partition("[")[0] for each in listed):
        yield [each for each in listed if each.partition("[")[0] == test]


def test_of_many_cases_it_runs_three_and_of_sampled_ones_the_first() -> None:
    every, short = collected(), collected("--short")
    chosen = {
        same[0].partition("[")[0].rpartition("::")[2]: [
            same.index(each) for each in same if each in short
        ]
        for same in cases(every)
    }
    assert chosen["test_h7_what_lies_behind_a_hole_is_read"] == [0, 36, 71]
    assert chosen["test_h7_a_torn_end_is_an_end"] == [0, 1]
    assert chosen["test_a_broken_rule_is_found_out"] == [0]  # it is `sampled`
    assert chosen["test_every_interleaving_keeps_the_rules"] == []  # it is `long`
    small = chosen["test_every_interleaving_of_a_small_world_keeps_the_rules"]
    assert small == [0, 1, 2, 3, 4, 5]  # it is `every`


def test_the_rest_is_all_that_the_short_run_leaves() -> None:
    every, short, rest = collected(), collected("--short"), collected("--rest")
    assert sorted([*short, *rest]) == sorted(every)
    assert short
    assert rest


def test_a_sample_has_all_long_tests_and_all_cases_about_durability() -> None:
    every, sample = collected(), collected("--sample")
    left_out = {each.partition("[")[0].rpartition("::")[2] for each in {*every} - {*sample}}
    assert left_out == {
        "test_a_broken_rule_is_found_out",
        "test_a_broken_rule_of_hand_overs_is_found_out",
    }
    assert {*collected("--rest", "-k", "every_interleaving_keeps")} <= {*sample}
