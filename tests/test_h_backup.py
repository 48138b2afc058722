"""A backup that is made beside everything else: what it has is of one moment (rules B1, G3, H1).

It copies tables, segments and journal one after the other. What another process does between
two of them must not show: neither as a hole, nor as a backup that cannot be opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.ledger import Ledger
from tests.processes import State, open_producer, send, values

BEFORE = [b"%d" % number for number in range(5)]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`behind(step, function)` has `function()` called each time that a backup has done a step
    and not begun the next."""

    def strike(step: str, function: Callable[[], object]) -> None:
        original = getattr(Ledger, step)

        def struck(self: Ledger, *args: Any) -> Any:
            result = original(self, *args)
            function()
            return result

        monkeypatch.setattr(Ledger, step, struck)

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
def test_h1_a_backup_is_of_one_moment(path, worker, behind, tmp_path, change) -> None:
    """The journal is copied last, and has what was sent to a topic, by an owner, or behind a
    batch that the copied tables know nothing of."""
    other = worker()
    other.call(open_producer, "exclusive")
    for value in BEFORE:
        other.call(send, value)
    behind("_copy_tables", lambda: other.call(change))
    with xl.open(path) as engine:
        engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy") as copy:
        assert copy.topics() == ["orders"]
        assert values(copy.topic("orders")) == BEFORE
        assert copy.verify().ok
        with copy.topic("orders").producer("exclusive") as producer:
            assert producer.topic_epoch == 2
            assert producer.send(b"next") == len(BEFORE)
