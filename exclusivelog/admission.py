"""Decisions about waiters that are the same on every backend: pure functions (rules A5, D7).

>>> eligible_at(created=500, priority=1, settle=900, freed=1000, known=(3, 1))
1900
>>> eligible_at(created=500, priority=3, settle=900, freed=1000, known=(3, 1))
1000
"""

from __future__ import annotations

import time

from exclusivelog import _core
from exclusivelog.types import AccessMode, OwnerInfo

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


# ---- how a refusal reads -----------------------------------------------------------------
# `what` is a topic, or the role that it stands for: "topic 'orders'".


def describe(owner: OwnerInfo) -> str:
    """A producer that holds a topic, or waits for it, for a message."""
    epoch = "" if owner.access_mode is AccessMode.SHARED else f"epoch {owner.epoch}, "
    return (
        f"producer {owner.producer_name!r} of engine {owner.engine_name!r} (id {owner.engine_id}, "
        f"pid {owner.pid}, {epoch}since {utc(owner.since)})"
    )


def utc(ms: int) -> str:
    """A time in ms since 1970, for a message."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))


def held_by(owner: OwnerInfo | None) -> str:
    """Who holds the topic, as a part of an error (rule A5); "" for None."""
    return "" if owner is None else f"; it is held by {describe(owner)}"


def fenced_text(what: str, name: str, epoch: int, owner: OwnerInfo | None, topic_epoch: int) -> str:
    """The text of a fenced producer's error, which names the owner."""
    now = f"at epoch {topic_epoch}" if owner is None else f"held by {describe(owner)}"
    return (
        f"{what}: producer {name!r} with epoch {epoch} was fenced; the topic is {now}. Close this "
        "producer and open a new one"
    )
