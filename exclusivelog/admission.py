"""Decisions about waiters that are the same on every backend: pure functions (rules A5, D7).

>>> eligible_at(created=5, priority=1, settle=900, freed=1000, known=(3, 1))
1900
>>> eligible_at(created=5, priority=3, settle=900, freed=1000, known=(3, 1))
1000
"""

from __future__ import annotations

from exclusivelog import _core
from exclusivelog.types import OwnerInfo

Known = tuple[int, int]  # the best and the lowest priority of a topic's waiters so far


def widened(known: Known | None, *priorities: int) -> Known:
    """The range of priorities, extended to these.

    >>> widened((5, 1), 7), widened(None, 3)
    ((7, 1), (3, 3))
    """
    seen = (*(known or ()), *priorities)
    return max(seen), min(seen)


def eligible_at(
    *, created: int, priority: int, settle: int, freed: int, known: Known | None
) -> int:
    """The time from which a waiter of that priority may own a topic that has been free since
    `freed`: at once for the best priority that is known there, after `settle` for the lowest. All
    times are in ns of one monotonic clock; compiled: `_core.delay` and `_core.eligible_at`."""
    return _core.eligible_at(created, _core.delay(priority, settle, known), freed)


def held_by(owner: OwnerInfo) -> str:
    """Who holds the topic, as the end of a waiter's error (rule A5)."""
    return (
        f"; it is held by producer {owner.producer_name!r} of engine {owner.engine_name!r} "
        f"(id {owner.engine_id}, pid {owner.pid}, epoch {owner.epoch})"
    )
