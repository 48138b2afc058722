"""Transactions, on the public interface alone (rule G3)."""

from __future__ import annotations

import pytest

from testing.processes import (
    open_producer,
    send,
    values,
)

pytestmark = pytest.mark.needs("transactions")


def test_g3_two_producers_of_one_topic_stand_in_one_transaction(engine, topic, worker) -> None:
    """Shared producers; a third one in another process sends in between."""
    other = worker()
    other.call(open_producer, "shared")
    with topic.producer(name="x") as x, topic.producer(name="y") as y:
        for number in range(20):
            with engine.transaction() as txn:
                x.send(b"x", transaction=txn)
                y.send_many([b"y", b"y"], transaction=txn)
                x.send(b"x", transaction=txn)
                other.call(send, b"o")
            first = txn.offsets[x].start
            assert txn.offsets == {x: range(first, first + 2), y: range(first + 2, first + 4)}
            assert first == 5 * number + 1
    assert values(topic) == [b"o", b"x", b"x", b"y", b"y"] * 20
    messages = [m.sequence_id for m in topic.reader() if m.producer_name == "y"]
    assert messages == list(range(40))
