"""The changes of a topic's owner as events (rule E5): the grants and releases that count.

They are read from the log, from its first record on.
"""

from __future__ import annotations

from collections.abc import Iterator

from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import Grant, Release, Terminate
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.rule import Judged, State
from exclusivelog.events import Event, Party

__all__ = ["claim_event", "history"]


def history(topic: TopicLog) -> Iterator[Event]:
    """The events up to the log's current end. A release has the time of the last grant or message
    before it, as its record has no time."""
    topic.catch_up()
    end = topic.state.position
    reader = Reader(topic.log, None, topic.check_first)
    state, time = reader.state, 0
    try:
        while end is not None and (state.position is None or state.position < end):
            before = state.grant if state.owned else None
            judged = reader.next(1.0)
            topic.check()
            if judged is not None and judged.counts:
                time = max(time, _time(judged, state))
                yield from _told(topic.name, judged, before, time)
    finally:
        reader.close()


def _time(judged: Judged, state: State) -> int:
    parsed = judged.parsed
    return parsed.holder.since if isinstance(parsed, Grant) else state.published


def _told(topic: str, judged: Judged, before: Grant | None, time: int) -> Iterator[Event]:
    record = judged.parsed
    if isinstance(record, Release | Terminate) and before is not None:
        why = "terminated" if isinstance(record, Terminate) else record.reason or "closed"
        yield Event(
            time, topic, record.epoch, "release", why, before.holder.priority, _party(before), None
        )
    elif isinstance(record, Grant):
        mode = str(record.holder.access_mode)
        if before is not None:
            why = "fenced" if mode == "exclusive_with_fencing" else "dead"
            yield Event(
                time,
                topic,
                record.epoch,
                "evict",
                why,
                before.holder.priority,
                _party(before),
                None,
            )
        yield Event(
            time,
            topic,
            record.epoch,
            "grant",
            _reason(record, mode),
            record.holder.priority,
            None,
            _party(record),
        )


def _reason(grant: Grant, mode: str) -> str:
    if grant.continues:
        return "reconnect"
    return {"wait_for_exclusive": "promotion", "exclusive_with_fencing": "fencing"}.get(
        mode, "request"
    )


def _party(grant: Grant) -> Party:
    holder = grant.holder
    return {
        "engine": holder.engine_id,
        "engine_name": holder.engine_name,
        "pid": holder.pid,
        "producer": holder.producer_name,
        "properties": holder.properties,
        "engine_properties": {},
    }


# ---- of claims ----------------------------------------------------------------------------


KINDS = {"grant": "own", "evict": "revoke", "release": "release"}


def claim_event(event: Event, group: str, resource: str) -> Event:
    """Turn an event of a claim's log into one of the claim."""
    party = event.target if event.source is None else event.source
    properties = {} if party is None else party["properties"]
    reason = event.reason
    if event.kind == "grant":
        reason = "reader" if properties.get("reads") else "claim"
    elif reason == "fenced":
        reason = "claimed"
    source, target = (
        None if each is None else {**each, "producer": None, "properties": {}}
        for each in (event.source, event.target)
    )
    return Event(
        event.time,
        "",
        0,
        KINDS[event.kind],
        reason,
        0,
        source,
        target,
        group,
        resource,
        int(properties.get("generation", 0)),
    )
