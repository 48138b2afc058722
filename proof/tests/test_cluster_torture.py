"""Rules J1 and J2 under fire: a sample of `make proof PARTS=cluster-torture`.

Processes send to two topics and a shared map of a cluster engine. They are killed and stopped, and
their connections to the broker are cut, ended in one direction and slowed down. Meanwhile they hand
the topics over and claim resources. In the end the
judges of the torture on one machine read the topics, the map, and what each process noted. The same
with a writer that takes for acknowledged what the broker has stored must turn them red.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.cluster_players import STORED, Claimed
from proof.cluster_torture import CONTROL_FAULTS, FAULTS, broker_behind, judge_claims, torture
from testing.broker import Broker, missing
from testing.judges import about
from testing.proxy import Proxy

pytestmark = pytest.mark.timeout(300)

SAMPLE = 15  # faults


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Broker, Proxy]]:
    if reason := missing():
        pytest.skip(reason)
    with broker_behind() as found:
        yield found


@pytest.mark.broker
@pytest.mark.rule(
    "J1", "J2", "B1", "B3", "B8", "B9", "B10", "C2", "E4", "F2", "F3", "F5", "G2", "G3", "G5", "I2"
)
def test_nothing_acknowledged_is_lost_and_nothing_stale_counts(
    tmp_path: Path, place: tuple[Broker, Proxy]
) -> None:
    without_broker = {name: weight for name, weight in FAULTS.items() if name != "broker"}
    for faults in (SAMPLE, 2 * SAMPLE, 4 * SAMPLE):  # on a busy machine, little happens meanwhile
        where = tmp_path / str(faults)
        where.mkdir()
        seed = random.randrange(1 << 30)
        found = torture(where, *place, faults, seed, weights=without_broker)
        print(f"\nseed {seed}: {found.counts} {found.notes}")
        assert found.broken == []
        if min(found.counts["acknowledged"], found.counts["map_calls"]) > 10:
            break
    assert found.counts["acknowledged"] > 10
    assert found.counts["map_calls"] > 10


@pytest.mark.broker
def test_a_writer_that_ignores_the_rule_turns_the_judge_red(
    tmp_path: Path, place: tuple[Broker, Proxy]
) -> None:
    """Nearly each storm shows it; on a busy machine, one may have too few sends."""
    for seed in range(1, 6):
        where = tmp_path / str(seed)
        where.mkdir()
        found = torture(where, *place, 6, seed, STORED, CONTROL_FAULTS)
        if about(found.broken, "H1", "B9"):
            return
    raise AssertionError("the judge has not noticed")


def test_two_claims_that_are_valid_at_one_time_turn_the_judge_red() -> None:
    first, second = (Claimed("granted", "lock", n, 10 * n, 10 * n + 1) for n in (1, 2))
    before, after = (Claimed("valid", "lock", 1, begun, begun + 1) for begun in (15, 22))
    assert list(judge_claims([first, before, second])) == []
    assert [text[:2] for text in judge_claims([first, before, second, after])] == ["F5"]
    assert [text[:2] for text in judge_claims([first, first])] == ["F2"]
    late = Claimed("granted", "lock", 1, 30, 31)
    assert [text[:2] for text in judge_claims([second, late])] == ["F5"]
