"""Which records of a group's claims count (rules F1 to F6), and what bytes they are.

`proof.claims_model` tries the rule in every order of small worlds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exclusivelog.cluster.claimed import (
    MAGIC,
    Clearing,
    Commit,
    Drop,
    Holdings,
    Noting,
    Resource,
    Ruling,
    Take,
    read,
    write,
)
from exclusivelog.cluster.frames import sealed
from exclusivelog.errors import LedgerCorruptedError, LedgerVersionError

pytestmark = pytest.mark.once
COUNTS, UNSEEN, LOW = Ruling.COUNTS, Ruling.UNSEEN, Ruling.LOW
ENDED, BEHIND, AHEAD = Ruling.ENDED, Ruling.BEHIND, Ruling.AHEAD


def take(session: int, seen: dict[str, int], *generations: int, reads: bool = False) -> Take:
    named = dict(zip(seen, generations or [1] * len(seen), strict=True))
    return Take(session, seen, named, f"e{session}", "host", 12, {"at": "x"}, 5, reads)


def rulings(*records: Noting) -> list[Ruling]:
    holdings = Holdings()
    return [holdings.fold(record)[0] for record in records]


def after(records: Iterable[Noting]) -> Holdings:
    holdings = Holdings()
    for record in records:
        holdings.fold(record)
    return holdings


@pytest.mark.rule("F1")
def test_f1_a_take_gets_all_of_its_resources_or_none() -> None:
    holdings = after([take(1, {"a": 0, "b": 0})])
    assert holdings.fold(take(2, {"b": 0, "c": 0})) == (UNSEEN, ())
    assert (holdings.last("c"), holdings.holder("c")) == (Resource(), None)
    assert {holdings.last(name).session for name in "ab"} == {1}


@pytest.mark.rule("F3")
def test_f3_who_loses_one_resource_loses_all() -> None:
    holdings = after([take(1, {"a": 0, "b": 0}), take(2, {"c": 0})])
    first, second = holdings.sessions.values()
    assert holdings.fold(take(3, {"b": 1, "c": 2}, 1, 1)) == (COUNTS, (first, second))
    assert holdings.holder("a") is None
    assert list(holdings.sessions) == [3]
    assert holdings.fold(take(4, {"a": 1}, 1)) == (COUNTS, ())


@pytest.mark.rule("F2", "F4")
def test_f2_no_generation_is_below_the_last_but_0() -> None:
    assert rulings(
        take(1, {"a": 0}, 5),
        take(2, {"a": 1}, 4),
        take(3, {"a": 1}, 5),
        take(4, {"a": 3}, 0),
        take(5, {"a": 4}, 1),
    ) == [COUNTS, LOW, COUNTS, COUNTS, COUNTS]


@pytest.mark.rule("F5")
@pytest.mark.parametrize("generation", [0, 1])
def test_f5_a_late_copy_of_a_take_never_counts_again(generation: int) -> None:
    """Also where its generation would be granted."""
    first = take(1, {"a": 0}, generation)
    found = rulings(first, Drop(1, 5), first, take(2, {"a": 1}), Drop(2, 5), first)
    assert found == [COUNTS, COUNTS, UNSEEN, COUNTS, COUNTS, UNSEEN]


@pytest.mark.rule("F6")
def test_f6_commits_count_once_in_order_and_while_their_session_lasts() -> None:
    first, second = Commit(1, 1, {"a": 3}), Commit(1, 2, {"a": 9})
    reader = take(1, {"a": 0, "b": 0}, reads=True)
    records = [first, reader, second, first, second, first, take(2, {"b": 1}), Commit(1, 3, {})]
    assert rulings(*records) == [ENDED, COUNTS, AHEAD, COUNTS, COUNTS, BEHIND, COUNTS, ENDED]
    assert after(records).positions == {"a": 9}


@pytest.mark.rule("F6")
def test_f6_a_clearing_counts_only_if_no_reader_has_come_since() -> None:
    reader, later = take(1, {"a": 0}, reads=True), take(2, {"b": 0})
    begun: list[Noting] = [reader, Commit(1, 1, {"a": 3}), later]
    holdings = after(begun)
    assert holdings.fold(Clearing(1)) == (UNSEEN, ())
    assert holdings.positions == {"a": 3}
    assert holdings.fold(Clearing(2)) == (COUNTS, (reader,))
    assert (holdings.positions, list(holdings.sessions)) == ({}, [2])
    assert holdings.fold(Commit(1, 2, {"a": 4}))[0] is ENDED
    assert holdings.last("a") == Resource(1, 1)  # its generation stays


# ---- bytes -------------------------------------------------------------------------------


NAMES = st.sampled_from("abc")
NUMBERS = st.integers(0, 3)
RECORDS: st.SearchStrategy[Noting] = st.one_of(
    st.builds(
        lambda session, resources, reads: Take(
            session,
            {n: seen for n, (seen, _) in resources.items()},
            {n: generation for n, (_, generation) in resources.items()},
            "e",
            "host",
            1,
            {},
            7,
            reads,
        ),
        st.integers(1, 5),
        st.dictionaries(NAMES, st.tuples(NUMBERS, NUMBERS), min_size=1),
        st.booleans(),
    ),
    st.builds(Drop, NUMBERS, NUMBERS),
    st.builds(Commit, NUMBERS, NUMBERS, st.dictionaries(NAMES, NUMBERS)),
    st.builds(Clearing, NUMBERS),
)


@given(st.lists(RECORDS, max_size=12), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_j1_a_saved_state_goes_on_as_the_whole_log_does(records: list[Noting], cut: int) -> None:
    for record in records:
        assert read(write(record)) == record
    again = Holdings.restore(after(records[:cut]).save())
    whole = after(records[:cut])
    assert [again.fold(r) for r in records[cut:]] == [whole.fold(r) for r in records[cut:]]
    assert again == whole == after(records)


def test_other_records_are_none_of_claims() -> None:
    assert read(b"another program's") is None
    assert read(sealed(b"XLW", 1, b"x")) is None


@pytest.mark.rule("J1", "G9")
def test_g9_a_record_that_cannot_be_read_ends_the_reading() -> None:
    """Another reader might count it."""
    good = write(take(1, {"a": 0}))
    for data in (good[:-1], good[:5], good[:10] + b"\0" + good[11:], b"XLG"):
        with pytest.raises(LedgerCorruptedError, match="claims is damaged"):
            read(data)
    with pytest.raises(LedgerVersionError, match="of version 9"):
        read(MAGIC + struct.pack("<B", 9) + good[4:])


@pytest.mark.parametrize(
    "row", [["q", 1], ["t"], ["t", 1, {}, "e", "n", 1, None, 5, False], ["d", "x", 1], ["x"], 7]
)
def test_g9_a_whole_record_of_no_known_shape_ends_it_too(row: object) -> None:
    with pytest.raises(LedgerCorruptedError):
        read(sealed(MAGIC, 1, msgpack.packb(row)))
