"""Rules F1 and F6: what is claimed by thousands goes from one holder to the next in one
transaction, in which no process can append. Its work grows with the number of parts, not with
its square: a role of 4,000 topics stopped all writers for 18 seconds.

The work is counted, not timed: how often a row is decoded that has an entry for each part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership import role_rows
from exclusivelog.local.storage import tables
from testing.processes import FENCING, PATIENCE

pytestmark = pytest.mark.once

FEW, MANY = 20, 80


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a row with an entry for each part was decoded."""
    counted: Counter[str] = Counter()

    def counting(name: str, decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
        def count(data: bytes) -> object:
            counted[name] += 1
            return decode(data)

        return count

    monkeypatch.setattr(role_rows, "_unpack", counting("role", role_rows._unpack))
    monkeypatch.setattr(tables, "_unpack_claimant", counting("claim", tables._unpack_claimant))
    return counted


def take_a_claim(first: xl.Engine, second: xl.Engine, count: int) -> None:
    wanted = dict.fromkeys(f"{count}-{number}" for number in range(count))
    lost = first.own("group", wanted)
    second.own("group", wanted)
    assert not lost.is_valid


def take_a_group(first: xl.Engine, second: xl.Engine, count: int) -> None:
    names = [first.topic(f"{count}-{number}").name for number in range(count)]
    lost = first.reader(names, group="group")
    second.reader(names, group="group")
    with pytest.raises(xl.ReaderFencedError):
        lost.read_next(timeout=0)


def take_a_role(first: xl.Engine, second: xl.Engine, count: int) -> None:
    names = [first.topic(f"{count}-{number}").name for number in range(count)]
    claims = {"group": dict.fromkeys(names)}
    lost = first.role(f"of {count}", topics=names, claims=claims)
    taken = second.role(f"of {count}", topics=names, claims=claims, access_mode=FENCING)
    with pytest.raises(xl.ExclusiveLogError):
        lost.producer(names[0]).send(b"x")
    taken.producer(names[0]).send(b"y")
    assert first.topic(names[-1]).owner.engine_id == second.id


@pytest.mark.parametrize("take", [take_a_claim, take_a_group, take_a_role])
def test_f1_what_is_taken_over_costs_by_its_parts_not_by_their_square(
    path: str, decoded: Counter[str], take: Callable[[xl.Engine, xl.Engine, int], None]
) -> None:
    with xl.open(path, name="first") as first, xl.open(path, name="second") as second:
        take(first, second, FEW)
        few = decoded.total()
        decoded.clear()
        take(first, second, MANY)
        # One decoding of a row of N entries for each of N parts would be MANY or more.
        assert decoded.total() <= few + 10
        assert decoded.total() < MANY


def test_f1_roles_that_end_together_look_for_their_successors_together(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each role that has a claim, others may be granted: all roles are looked at, but once
    for all that end in a transaction, as those of a dead process do."""
    looks, listed = [0], role_rows.role_topics

    def counted(rows: tables.Tables) -> list[tuple[str, int]]:
        looks[0] += 1
        return listed(rows)

    with xl.open(path, name="second") as second:
        with xl.open(path, name="first") as first:
            for number in range(FEW):
                first.role(f"r{number}", claims={"group": {f"{number}": None}})
            waiting = [
                second.role_async(f"s{number}", claims={"group": {f"{number}": None}})
                for number in range(FEW)
            ]
            monkeypatch.setattr(role_rows, "role_topics", counted)
        roles = [each.result(PATIENCE) for each in waiting]
        assert all(role.state == "open" for role in roles)
        assert looks[0] <= 5
