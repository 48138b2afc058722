"""What the records of a cluster's logs change, as events (rule E5): owners, hand-overs, claims.

`history` makes them from a whole log; what an engine logs is made from its own records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exclusivelog.cluster.claimed import Clearing, Drop, Noting, Take
from exclusivelog.cluster.frames import Holder
from exclusivelog.cluster.waiting import Assign
from exclusivelog.events import Event, Party

__all__ = ["claims_changed", "owner_changed", "party"]


def owner_changed(
    time: int,
    topic: str,
    epoch: int,
    kind: str,
    reason: str,
    source: Holder | None,
    target: Holder | Assign | None = None,
) -> Event:
    """A change of a topic's owner, or a step of its hand-over to the engine `target`."""
    about = next((each for each in (target, source) if isinstance(each, Holder)), None)
    priority = 0 if about is None else about.priority
    return Event(time, topic, epoch, kind, reason, priority, _party(source), _party(target))


def claims_changed(group: str, record: Noting, gone: Iterable[Take], time: int) -> Iterator[Event]:
    """What a record of claims that counts has changed; it has ended the claims `gone`."""
    rival = record if isinstance(record, Take) else None
    kind, reason = ("release", "closed") if isinstance(record, Drop) else ("revoke", "claimed")
    if isinstance(record, Clearing):
        reason = "dead"
    for take in gone:
        yield from _of_each(group, take, kind, reason, time, source=take, target=rival)
    if rival is not None:
        reason = "reader" if rival.reads else "claim"
        yield from _of_each(group, rival, "own", reason, time, target=rival)


def _of_each(
    group: str,
    take: Take,
    kind: str,
    reason: str,
    time: int,
    *,
    source: Take | None = None,
    target: Take | None = None,
) -> Iterator[Event]:
    """The event of each resource of a claim."""
    before, after = _party(source), _party(target)
    for resource, generation in take.generations.items():
        yield Event(time, "", 0, kind, reason, 0, before, after, group, resource, generation)


def _party(who: Holder | Assign | Take | None) -> Party | None:
    return None if who is None else party(who)


def party(who: Holder | Assign | Take) -> Party:
    """Who has a topic, is to have it, or has made a claim, as events show it."""
    holder = who if isinstance(who, Holder) else None
    return {
        "engine": who.engine_id,
        "engine_name": who.engine_name,
        "pid": who.pid,
        "producer": None if holder is None else holder.producer_name,
        "properties": {} if holder is None else holder.properties,
        "engine_properties": {} if isinstance(who, Holder) else who.properties,
    }
