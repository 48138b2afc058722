"""Every interleaving of a small world (rules A to E): `proof.model` walks it and judges it."""

from __future__ import annotations

import pytest

from proof.model import find_out, walk
from proof.rules import CONTROLS, MOVING_CONTROLS, Rules
from proof.world import (
    MOVING_WORLDS,
    REDUCED_WORLDS,
    SMALL_MOVING_WORLDS,
    SMALL_WORLDS,
    WORLDS,
    World,
)

pytestmark = pytest.mark.once
ALL = {**WORLDS, **MOVING_WORLDS}
SAMPLE = {**ALL, **REDUCED_WORLDS}


JUDGED = pytest.mark.rule(  # what `proof.model` judges in each state
    "A1",
    "A2",
    "A3",
    "B1",
    "B2",
    "B3",
    "B5",
    "B6",
    "B7",
    "B8",
    "B10",
    "D1",
    "D4",
    "D5",
    "D7",
    "E3",
    "E4",
)


@pytest.mark.every
@JUDGED
@pytest.mark.parametrize("world", [*SMALL_WORLDS[:2], *SMALL_MOVING_WORLDS[:4]], ids=str)
def test_every_interleaving_of_a_small_world_keeps_the_rules(world: World) -> None:
    states, _ = walk(world, Rules())
    assert states > 1000


@JUDGED
@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_every_interleaving_keeps_the_rules(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest worlds with --every-crash, and in `make proof SIZE=full`; else smaller ones."""
    world = ALL[name] if request.config.getoption("--every-crash") else SAMPLE[name]
    states, steps = walk(world, Rules())
    with capsys.disabled():
        print(f"\n{world}: {states:,} distinct states, {steps:,} steps, 0 violations ", end="")
    assert states > 1000


@pytest.mark.sampled
@pytest.mark.parametrize("rules", CONTROLS.values(), ids=CONTROLS)
def test_a_broken_rule_is_found_out(rules: Rules) -> None:
    assert find_out(rules, SMALL_WORLDS), "the walk has not noticed"


@pytest.mark.sampled
@pytest.mark.parametrize("rules", MOVING_CONTROLS.values(), ids=MOVING_CONTROLS)
def test_a_broken_rule_of_hand_overs_is_found_out(rules: Rules) -> None:
    assert find_out(rules, SMALL_MOVING_WORLDS), "the walk has not noticed"
