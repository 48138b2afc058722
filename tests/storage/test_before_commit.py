"""What is registered with a ledger is done right before each of its commits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.storage.before_commit import BeforeCommit
from exclusivelog.local.storage.ledger import Ledger

pytestmark = [pytest.mark.once, pytest.mark.rule("E5")]


def exists(ledger: Any, topic: str) -> bool:
    with ledger.read() as tables:
        return tables.topics.find(topic) is not None


def test_all_stages_are_a_part_of_the_transaction(engine: xl.Engine) -> None:
    done: list[str] = []
    hooks = engine.ledger.before_commit
    hooks.record_by("test", lambda tables: done.append("record"))
    hooks.settle_by("test", lambda tables: (done.append("settle"), tables.topics.create("more")))
    with engine.ledger.write_exclusive() as tables:
        tables.topics.create("one")
        assert done == []
    assert done == ["settle", "record"]
    assert exists(engine.ledger, "one")
    assert exists(engine.ledger, "more")


@pytest.mark.parametrize("stage", ["settle_by", "record_by"])
def test_a_failure_rolls_the_transaction_back(engine: xl.Engine, stage: str) -> None:
    def fail(tables: Any) -> None:
        raise RuntimeError("of a hook")

    getattr(engine.ledger.before_commit, stage)("test", fail)
    with (
        pytest.raises(RuntimeError, match="of a hook"),
        engine.ledger.write_exclusive() as tables,
    ):
        tables.topics.create("one")
    assert not exists(engine.ledger, "one")


def test_of_each_subject_there_is_one() -> None:
    done: list[int] = []
    hooks = BeforeCommit()
    for number in range(3):
        hooks.settle_by("test", lambda tables, number=number: done.append(number))
    hooks.settle({})  # type: ignore[arg-type]
    assert done == [0]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """No garbage collection: what only a circle of references keeps stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_hook_keeps_no_closed_engine_and_no_closed_ledger(path: str) -> None:
    with xl.open(path, name="first") as first:
        first.topic("orders").producer("exclusive").close()
        second = xl.open(path, name="second")
        dropped = weakref.ref(first.backend.sessions)
        ledger = weakref.ref(first.ledger)
    del first
    assert isinstance(ledger(), Ledger)
    second.topic("orders").producer("exclusive").close()  # the hooks of the first engine go on
    assert [event.kind for event in second.history("orders")] == ["grant", "release"] * 2
    second.close()
    del second
    assert (dropped(), ledger()) == (None, None)
