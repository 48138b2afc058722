"""Deaths, forks and lost locks of which nobody tells the library, in random schedules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proof.traffic import TOPICS, judge_ledger
from proof.unreported import UNWATCHED, heard, schedule


@pytest.mark.smoke
@pytest.mark.long
@pytest.mark.rule("B1", "C2", "C8", "G3", "H1")
def test_what_nobody_reports(tmp_path: Path) -> None:
    """And the judge finds out a child that is heard. On a busy machine little happens in a short
    schedule: then a longer one follows."""
    for seconds in (5.0, 10.0, 20.0, 40.0, 80.0):
        where = tmp_path / str(seconds)
        where.mkdir()
        seed = int.from_bytes(os.urandom(4), "little")
        found, record = schedule(where, seconds, seed)
        print(f"\nseed {seed}: {found.counts}")
        assert found.broken == []
        if found.counts["acknowledged"] > 50 and found.counts["sends_of_unseen_children"] > 0:
            break
    assert found.counts["acknowledged"] > 50
    assert found.counts["sends_of_unseen_children"] > 0
    heard(record)
    assert list(judge_ledger(where / "log", record, TOPICS, send=False))


@pytest.mark.long
@pytest.mark.rule("C8")
def test_c8_control_deaths_of_which_robust_lists_alone_tell_stop_the_log(tmp_path: Path) -> None:
    """Most schedules of this length show it; on a busy machine, one may have no such death."""
    for attempt in range(10):
        where = tmp_path / str(attempt)
        where.mkdir()
        found, _ = schedule(where, 8.0, attempt, UNWATCHED)
        if any("C8" in text for text in found.broken):
            return
    raise AssertionError("no schedule was stopped by a death")
