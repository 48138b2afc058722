"""The record of ownership changes keeps a bounded number of them (rules E5, G8).

A ledger that changes owners once a second has 60 million events after a year. Users do not set a
retention on a topic that the library writes, so it has one by default. It must work even if no
engine stays open long enough for a background thread to run.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.audit import audit
from exclusivelog.events import EVENTS
from exclusivelog.local.ownership import recording
from testing.changes import write_changes

pytestmark = [pytest.mark.once, pytest.mark.rule("E5"), pytest.mark.rule("G8")]


def kept(engine: xl.Engine) -> tuple[int, int]:
    events = engine.topic(EVENTS)
    return events.first_offset, events.next_offset


def entries(engine: xl.Engine) -> int:
    """How many entries of `__events__` are in the tables."""
    with engine.ledger.read() as tables:
        return sum(1 for _ in tables.entries.stored(tables.topics.find(EVENTS).id, 0))


def change_owner(engine: xl.Engine, times: int = 1) -> None:
    for _ in range(times):
        with engine.topic("orders").producer("exclusive") as producer:
            producer.send(b"x")


def test_old_events_go_with_the_transactions_that_add_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_EVENTS", 20)
    with xl.open(tmp_path / "log") as engine:
        change_owner(engine, 30)
        first, end = kept(engine)
        assert end == 60
        assert first == 40
        assert entries(engine) <= 20
        assert len(list(engine.history())) == 20


@pytest.mark.long
def test_a_ledger_of_many_changes_is_as_small_as_its_limit(tmp_path: Path) -> None:
    sizes = {}
    for count in 5_000, 15_000:
        with xl.open(tmp_path / str(count)) as engine:
            write_changes(engine, count, most=2_000)
            assert entries(engine) <= 2_000
        sizes[count] = (tmp_path / str(count) / "data.mdb").stat().st_size
    assert sizes[15_000] < 1.2 * sizes[5_000]


def test_a_retention_of_its_own_takes_the_place_of_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_EVENTS", 20)
    with xl.open(tmp_path / "log") as engine:
        engine.topic(EVENTS).retention(max_age=math.inf)
        change_owner(engine, 30)
        assert kept(engine) == (0, 60)
        engine.topic(EVENTS).retention(max_age=None)  # the default again
        change_owner(engine)
        assert kept(engine) == (42, 62)


def test_what_an_earlier_version_kept_goes_in_the_background(tmp_path: Path) -> None:
    with xl.open(tmp_path / "log") as engine:
        write_changes(engine, 5_000, most=10**9)
        write_changes(engine, 1, most=2_000)
        assert kept(engine)[0] == kept(engine)[1] - 2_000
        assert entries(engine) > 2_000  # a change of owner does not wait for it
        engine.backend.retention_worker.go_round()  # type: ignore[attr-defined]
        assert entries(engine) <= 2_000


def test_a_history_that_is_read_while_events_go_continues_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_EVENTS", 20)
    with xl.open(tmp_path / "log") as engine:
        change_owner(engine, 10)
        history = engine.history()
        assert next(history).epoch == 1
        change_owner(engine, 15)
        assert [event.epoch for event in history][-1] >= 10


def test_an_audit_judges_the_epochs_whose_grants_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_EVENTS", 20)
    with xl.open(tmp_path / "log") as engine:
        change_owner(engine, 30)
        assert [verdict for verdict in audit(engine) if not verdict.holds] == []
