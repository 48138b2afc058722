"""Every interleaving of writers on one log: `proof.cluster_model` walks it and judges it."""

from __future__ import annotations

import pytest

from proof.cluster_model import find_out, walk
from proof.cluster_rules import (
    CONTROLS,
    PASS_CONTROLS,
    SHARED_CONTROLS,
    TERMINATION_CONTROLS,
    TRIM_CONTROLS,
    Patch,
)
from proof.cluster_world import (
    PASS_SIZES,
    SHARED_SIZES,
    SMALL_SIZES,
    TERMINATION_SIZES,
    TRIM_SIZES,
    Size,
)

pytestmark = pytest.mark.once


# What `proof.cluster_judge` judges in each state.
@pytest.mark.sampled
@pytest.mark.rule("J1", "J2")
@pytest.mark.parametrize("size", SMALL_SIZES, ids=str)
def test_every_interleaving_on_an_ordered_log_keeps_the_rules(
    size: Size, capsys: pytest.CaptureFixture[str]
) -> None:
    states, steps = walk(size)
    with capsys.disabled():
        print(f"\n{size}: {states:,} distinct states, {steps:,} steps, 0 violations ", end="")
    assert states > 1000


@pytest.mark.sampled
@pytest.mark.parametrize("patches", CONTROLS.values(), ids=CONTROLS)
def test_a_broken_rule_of_the_cluster_is_found_out(patches: tuple[Patch, ...]) -> None:
    sizes = SMALL_SIZES
    if patches in SHARED_CONTROLS.values():
        sizes = SHARED_SIZES
    elif patches in TERMINATION_CONTROLS.values():
        sizes = TERMINATION_SIZES
    elif patches in PASS_CONTROLS.values():
        sizes = PASS_SIZES
    elif patches in TRIM_CONTROLS.values():
        sizes = TRIM_SIZES
    assert find_out(patches, sizes), "the walk has not noticed"
