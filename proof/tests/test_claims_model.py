"""Every order of the records of a group's claims: `proof.claims_model` walks it and judges it."""

from __future__ import annotations

import pytest

from proof.claims_model import CONTROLS, SMALL_SIZES, Patch, Size, find_out, walk

pytestmark = pytest.mark.once


@pytest.mark.sampled
@pytest.mark.rule("F1", "F2", "F3", "F4", "F5", "F6", "J1")
@pytest.mark.parametrize("size", SMALL_SIZES, ids=str)
def test_claims_keep_their_rules_in_whatever_order_they_arrive(
    size: Size, capsys: pytest.CaptureFixture[str]
) -> None:
    states, steps = walk(size)
    with capsys.disabled():
        print(f"\n{size}: {states:,} distinct states, {steps:,} steps, 0 violations ", end="")
    assert states > 1000


@pytest.mark.sampled
@pytest.mark.parametrize("patches", CONTROLS.values(), ids=CONTROLS)
def test_a_broken_rule_of_claims_is_found_out(patches: tuple[Patch, ...]) -> None:
    assert find_out(patches), "the walk has not noticed"
