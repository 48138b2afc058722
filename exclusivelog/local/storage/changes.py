"""Logs the changes of ownership that this process commits.

The lines are made from the records that the transaction has written to `__events__` (rule E5),
after the commit, when all locks of the ledger are free. All evictions of one dead engine are one
line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from exclusivelog import logs
from exclusivelog.events import Event, Party
from exclusivelog.local.shm.slots import Slots

log = logging.getLogger(__name__)

GONE = {"dead": "dead", "hung": "unresponsive"}  # reasons of an eviction, and what is logged
STEPS = ("releasing", "assigned", "admit", "moved", "cancel")


def is_logged() -> bool:
    """Does any log handler take these lines?"""
    return log.isEnabledFor(logs.ENGINE_GONE.level)


def log_changes(path: str, records: Iterable[object], slots: Slots) -> None:
    """Log the changes that a transaction of the ledger at `path` has committed."""
    gone: dict[str, list[Event]] = {}
    for event in records:
        if not isinstance(event, Event):
            continue
        source = event.source
        if source is not None and event.kind in ("evict", "revoke") and event.reason in GONE:
            gone.setdefault(source["engine"], []).append(event)
        elif log.isEnabledFor(logging.INFO):
            _log_one(path, event)
    for engine, lost in gone.items():
        _log_gone(path, engine, lost, slots)


def log_gone(path: str, engine: Party, reason: str, topics: list[str], slots: Slots) -> None:
    """Log that a dead or unresponsive engine was evicted from these topics."""
    logs.emit(
        log,
        logs.ENGINE_GONE,
        ledger=path,
        **_party_fields(engine),
        reason=GONE[reason],
        silence=silence(slots, engine["engine"]),
        count=len(topics),
        topics=logs.some(topics),
        topic=topics[0] if len(topics) == 1 else None,
    )


def silence(slots: Slots, engine: str) -> str:
    """How long an engine has been silent, as text, if the lock file still has its slot."""
    seconds = slots.silent_for(engine)
    return "last heartbeat unknown" if seconds is None else f"silent for {seconds:.1f} s"


def _log_gone(path: str, engine: str, lost: list[Event], slots: Slots) -> None:
    topics = [event.topic for event in lost if event.group is None]
    first = lost[0].source
    assert first is not None
    if topics:
        log_gone(path, first, lost[0].reason, topics, slots)
    for event in lost:
        if event.group is not None:
            logs.emit(
                log,
                logs.CLAIM_OF_GONE,
                ledger=path,
                **_party_fields(first),
                reason=GONE[event.reason],
                group=event.group,
                resource=event.resource,
                silence=silence(slots, engine),
            )


def _log_one(path: str, event: Event) -> None:
    facts: dict[str, Any] = {
        "ledger": path,
        "topic": event.topic,
        "epoch": event.epoch,
        "reason": event.reason,
    }
    source, target = event.source, event.target
    if event.group is not None:
        facts |= {"topic": None, "epoch": None, "group": event.group}
        logs.emit(
            log,
            logs.CLAIM,
            **facts,
            **_party_fields(target or source),
            resource=event.resource,
            generation=event.generation,
            step=event.kind,
            source=_name(source),
            target=_name(target),
        )
    elif event.kind in STEPS:
        logs.emit(
            log,
            logs.HAND_OVER,
            **facts,
            **_party_fields(source or target),
            step=event.kind,
            source=_name(source),
            target=_name(target),
        )
    elif event.kind == "release":
        logs.emit(log, logs.RELEASED, **facts, **_party_fields(source))
    elif event.kind == "evict":
        logs.emit(log, logs.EVICTED, **facts, **_party_fields(source), rival=_name(target))
    elif event.kind == "grant" and target is not None and target["pid"] != os.getpid():
        logs.emit(
            log, logs.PROMOTED, **facts, **_party_fields(target)
        )  # an engine of this process logs its own grants


def _party_fields(party: Party | None) -> dict[str, Any]:
    if party is None:
        return {"engine": None, "engine_id": None, "pid": None, "producer": None}
    return {
        "engine": party["engine_name"],
        "engine_id": party["engine"],
        "pid": party["pid"],
        "producer": party["producer"],
    }


def _name(party: Party | None) -> str:
    if party is None:
        return "no engine"
    return f"engine {party['engine_name']!r} (id {party['engine']}, pid {party['pid']})"
