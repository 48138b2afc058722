"""A checkpoint of many topics writes the same rows as one topic after the other would have."""

from __future__ import annotations

import contextlib

import pytest

import exclusivelog as xl
from exclusivelog.local.records import NAMES, U64
from exclusivelog.local.storage import checkpointer
from testing.journals import checkpoint, no_checkpoints
from testing.processes import values

pytestmark = pytest.mark.once


class Undone(Exception):
    """Ends a transaction without a commit."""


def applied(engine: xl.Engine) -> dict[str, list[tuple[bytes, bytes]]]:
    """All rows as a checkpoint would leave them; it is undone."""
    found: dict[str, list[tuple[bytes, bytes]]] = {}
    journal = engine.ledger.journal
    with contextlib.suppress(Undone), engine.ledger.write_concurrent() as tables:
        checkpointer.apply_frames(tables, journal.tail, journal.version)
        found = {name: list(tables.rows.cursor(name)) for name in NAMES}
        raise Undone
    return found


def one_by_one(engine: xl.Engine, monkeypatch: pytest.MonkeyPatch):
    """The same, topic by topic."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer, "_merge", lambda tables, bundles, small: bundles)
        return applied(engine)


def send_all_kinds(engine: xl.Engine, number: int) -> None:
    """Messages of every kind to twenty topics, of several producers and epochs."""
    for i in range(20):
        topic = engine.topic(f"t{i}")
        if i % 5 == 4:
            for name in ("a", "b"):
                with topic.producer(name=name) as producer:
                    producer.send(b"shared", sequence_id=10 * number)
            continue
        with topic.producer("exclusive", name="owner") as producer:
            for k in range(i % 4 + 1):
                producer.send(
                    b"%d" % k, key="k" if i % 3 else None, event_time=k if i % 2 else None
                )
            if i % 7 == 0:
                producer.send_many([bytes(2000)] * 20, properties=[{"a": "b"}] * 20)


def test_b9_many_topics_at_once_get_the_rows_of_one_after_the_other(engine, monkeypatch) -> None:
    with no_checkpoints(engine):
        for number in range(4):
            send_all_kinds(engine, number + 1)
            merged = applied(engine)
            assert merged == one_by_one(engine, monkeypatch)
            assert len(merged["entries"]) >= 20
            checkpoint(engine)
    assert engine.verify().problems == ()
    assert engine.topic("t4").producer(name="a").last_sequence_id == 40


def test_g9_deleted_and_damaged_topics_among_many(engine, monkeypatch) -> None:
    """A topic that was deleted, a damaged row and a damaged last id cost other topics nothing."""
    with no_checkpoints(engine):
        producers = [engine.topic(f"t{i}").producer(name="p") for i in range(10)]
        for producer in producers:
            producer.send(b"first")
        producers[3].close()
        engine.delete_topic("t3")
        with engine.ledger.write_concurrent() as tables:
            row, producer = (U64.pack(engine.topic(f"t{i}").id) for i in (5, 6))
            tables.rows.put("topics", row, b"damaged")
            tables.rows.put("producers", producer + b"p", b"damaged")
        merged = applied(engine)
        assert merged == one_by_one(engine, monkeypatch)
        checkpoint(engine)
    for i in (0, 4, 6, 9):
        assert values(engine.topic(f"t{i}")) == [b"first"]
    assert "t3" not in engine.topics()


def test_many_topics_fill_up_little_of_what_they_have(engine, monkeypatch) -> None:
    """A message more costs each of very many topics a small entry, not a large one anew."""
    monkeypatch.setattr("exclusivelog.local.storage.checkpointer.FILLED_UP", 1)
    with no_checkpoints(engine):
        producers = [engine.topic(f"t{i}").producer() for i in range(2)]
        for producer in producers:
            producer.send(bytes(6000))
        checkpoint(engine)
        for _ in range(3):
            for producer in producers:
                producer.send(bytes(100))
            checkpoint(engine)
        with engine.ledger.read() as tables:
            counts = [len(list(tables.rows.under("entries", p._session.topic))) for p in producers]
    assert counts == [2, 2]
