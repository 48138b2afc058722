"""A backup that is made beside everything else: what it has is of one moment (rules B1, G3, H1).

It copies tables, segments and journal one after the other. What another process does between
two of them must not show: neither as a hole, nor as a backup that cannot be opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import backup
from tests.processes import State, open_producer, send, values

BEFORE = [b"%d" % number for number in range(5)]


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`around(step, before, behind)` has functions called each time that a backup begins a step,
    and when it has done it."""

    def strike(step: str, before: Callable[[], object], behind: Callable[[], object]) -> None:
        original = getattr(backup, step)

        def struck(*args: Any) -> Any:
            before()
            result = original(*args)
            behind()
            return result

        monkeypatch.setattr(backup, step, struck)

    return strike


def make_a_topic(state: State) -> None:
    state.engine.topic("new").producer().send(b"first of a new topic")


def send_a_large_batch(state: State) -> None:
    assert state.producer is not None
    state.producer.send_many([bytes(100_000), bytes(100_000)])
    state.producer.send(b"behind it")


def commit_a_transaction(state: State) -> None:
    with state.engine.transaction() as txn:
        state.producer.send(b"in a transaction", transaction=txn)
    state.producer.send(b"behind it")


def change_the_owner(state: State) -> None:
    open_producer(state, "exclusive_with_fencing")
    send(state, b"of the next owner")


def make_it_anew(state: State) -> None:
    state.producer.close()
    state.engine.delete_topic("orders")
    state.engine.topic("orders").producer().send(b"of another topic")


CHANGES = [
    make_a_topic, send_a_large_batch, commit_a_transaction, change_the_owner, make_it_anew,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_h1_a_backup_is_of_one_moment(path, worker, around, tmp_path, change) -> None:
    """The journal is copied last, and has what was sent to a topic, by an owner, or behind a
    batch that the copied tables know nothing of."""
    other = worker()
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    around("_copy_tables", int, lambda: other.call(change))
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy") as copy:
        assert copy.topics() == ["orders"]
        assert values(copy.topic("orders")) == BEFORE
        assert copy.verify().ok
        with copy.topic("orders").producer("exclusive") as producer:
            assert producer.topic_epoch == 2
            assert producer.send(b"next") == len(BEFORE)


def send_much(state: State) -> None:
    """More than a journal has room for."""
    for _ in range(200):
        state.producer.send(bytes(60_000))


def test_h1_a_backup_beside_one_who_sends_fast_is_none_without_messages(
    path, worker, around, tmp_path, monkeypatch
) -> None:
    """Each time that the tables are copied, the journal has been around meanwhile. A backup that
    gave up returned as if it had succeeded, and there was an empty directory."""
    monkeypatch.setattr(backup, "MOST_LOOKS", 3)
    other = worker(durability="process")
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    around("_copy_tables", int, lambda: other.call(send_much))
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy", create=False) as copy:
        assert values(copy.topic("orders"))[: len(BEFORE)] == BEFORE
        assert copy.verify().ok


def begin_a_segment(state: State) -> None:
    with state.engine.topic("large").producer() as producer:
        producer.send(bytes(200_000))


def remove_it(state: State) -> None:
    state.engine.delete_topic("large")


def test_g9_a_segment_that_comes_and_goes_beside_a_backup_is_no_damage(
    path, worker, around, tmp_path
) -> None:
    """It is begun when the backup has opened all segments, and removed when the copied tables
    refer to it."""
    other = worker()
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    once = iter([begin_a_segment, remove_it])

    def strike() -> None:
        for function in itertools.islice(once, 1):
            other.call(function)

    around("_copy_tables", strike, strike)
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy") as copy:
        assert values(copy.topic("orders")) == BEFORE
        assert copy.verify().ok
