"""Logs the changes of ownership that this process commits.

The lines are made from the records that the transaction has written to `__events__` (rule E5),
after the commit, when all locks of the ledger are free. All evictions of one dead engine are one
line.
"""

from __future__ import annotations

from collections.abc import Iterable

from exclusivelog import events, logs
from exclusivelog.events import GONE, Event, log_claim_of_gone, log_event
from exclusivelog.local.shm.slots import Slots


def is_logged() -> bool:
    """Does any log handler take these lines?"""
    return events.log.isEnabledFor(logs.ENGINE_GONE.level)


def log_changes(path: str, records: Iterable[object], slots: Slots) -> None:
    """Log the changes that a transaction of the ledger at `path` has committed."""
    gone: dict[str, list[Event]] = {}
    for event in records:
        if not isinstance(event, Event):
            continue
        source = event.source
        if source is not None and event.kind in ("evict", "revoke") and event.reason in GONE:
            gone.setdefault(source["engine"], []).append(event)
        else:
            log_event(path, event)
    for engine, lost in gone.items():
        _log_gone(path, lost, silence(slots, engine))


def silence(slots: Slots, engine: str) -> str:
    """How long an engine that was evicted has been silent, as text, if the lock file still has its
    slot."""
    if slots.find(engine) is not None:
        return "it has resumed since"
    seconds = slots.silent_for(engine)
    return "last heartbeat unknown" if seconds is None else f"silent for {seconds:.1f} s"


def _log_gone(path: str, lost: list[Event], silence: str) -> None:
    topics = [event.topic for event in lost if event.group is None]
    first = lost[0].source
    assert first is not None
    if topics:
        events.log_gone(path, first, lost[0].reason, silence, topics)
    for event in lost:
        if event.group is not None:
            log_claim_of_gone(path, event, silence)
