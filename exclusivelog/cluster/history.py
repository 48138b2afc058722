"""The changes of a topic's owner, and of a group's claims, as events (rule E5): the grants, takes
and releases that count.

They are read from the log, from its first record on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exclusivelog.cluster.claimed import Clearing, Drop, Holdings, Noting, Ruling, Take, read
from exclusivelog.cluster.claiming import GroupLog, group_of
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import EVICTED, Grant, Join, Release, Terminate
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.ordered import Record
from exclusivelog.cluster.rule import Verdict
from exclusivelog.cluster.waiting import Waiters, decode
from exclusivelog.events import Event, Party

__all__ = ["claim_history", "history"]


def history(topic: TopicLog) -> Iterator[Event]:
    """The events up to the log's current end. A release has the time of the last grant or message
    before it, as its record has no time."""
    topic.catch_up()
    end = topic.state.position
    reader = Reader(topic.log, None, topic.check_first)
    story = _Story(topic.name, reader)
    try:
        while end is not None and (reader.state.position or b"") < end:
            record = reader.receive(1.0)
            topic.check()
            if record is not None:
                yield from story.go_on(record)
    finally:
        reader.close()


class _Story:
    """The events of one topic's records, which are taken in order."""

    def __init__(self, topic: str, reader: Reader) -> None:
        self._topic, self._reader = topic, reader
        self._waiters = Waiters()  # why a topic was granted depends on who has waited for it
        self._time = 0

    def go_on(self, record: Record) -> Iterator[Event]:
        """The events of the next record."""
        state = self._reader.state
        owner, last, shared = state.owner, state.session, bool(state.shared)
        judged = self._reader.fold(record)
        parsed = judged.parsed
        if judged.verdict is Verdict.FOREIGN:
            self._waiters.take(decode(record.data))
        elif judged.counts:
            since = parsed.holder.since if isinstance(parsed, Grant) else state.published
            self._time = max(self._time, since)
            if isinstance(parsed, Join):
                self._waiters.joined()
            elif isinstance(parsed, Grant):
                reason = self._waiters.reason_of(parsed, owner is not None, shared)
                self._waiters.granted(parsed, last, owner is not None)
                if owner is not None:
                    why = "fenced" if reason == "fencing" else "dead"
                    yield self._event("evict", why, source=owner, target=parsed)
                yield self._event("grant", reason, target=parsed)
            elif isinstance(parsed, Release | Terminate) and owner is not None:
                why = "terminated" if isinstance(parsed, Terminate) else parsed.reason or "closed"
                kind, why = ("evict", "dead") if why == EVICTED else ("release", why)
                yield self._event(kind, why, source=owner)

    def _event(
        self, kind: str, reason: str, *, source: Grant | None = None, target: Grant | None = None
    ) -> Event:
        about = source or target
        assert about is not None
        priority = (target or about).holder.priority
        parties = _party(source), _party(target)
        return Event(self._time, self._topic, about.epoch, kind, reason, priority, *parties)


def _party(grant: Grant | None) -> Party | None:
    if grant is None:
        return None
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


def claim_history(log: GroupLog) -> Iterator[Event]:
    """The changes of a group's claims up to its log's current end. A clearing ends the claims of
    dead readers, and has the time of the record before it."""
    log.catch_up()
    end = log.state.position
    reader = Reader(log.log, None, log.check_first)
    holdings, time = Holdings(), 0
    try:
        while end is not None and (reader.state.position or b"") < end:
            record = reader.receive(1.0)
            log.check()
            noted = None if record is None else _noted(reader, record)
            if noted is not None:
                before = dict(holdings.sessions)
                ruling, ended = holdings.fold(noted)
                if ruling is Ruling.COUNTS and isinstance(noted, Take | Drop):
                    time = noted.since
                gone = [before[session] for session in ended]
                yield from _claimed(group_of(log.name), noted, ruling, gone, time)
    finally:
        reader.close()


def _noted(reader: Reader, record: Record) -> Noting | None:
    """A record of claims; None for any other, and for one that was read before."""
    if reader.fold(record).verdict is not Verdict.FOREIGN:
        return None
    return read(record.data)


def _claimed(
    group: str, record: Noting, ruling: Ruling, gone: Iterable[Take], time: int
) -> Iterator[Event]:
    rival = record if isinstance(record, Take) else None
    kind, reason = ("release", "closed") if isinstance(record, Drop) else ("revoke", "claimed")
    if isinstance(record, Clearing):
        reason = "dead"
    for take in gone:
        yield from _of_each(group, take, kind, reason, time, source=take, target=rival)
    if rival is not None and ruling is Ruling.COUNTS:
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
    before, after = _claimant(source), _claimant(target)
    for resource, generation in take.generations.items():
        yield Event(time, "", 0, kind, reason, 0, before, after, group, resource, generation)


def _claimant(take: Take | None) -> Party | None:
    if take is None:
        return None
    return {
        "engine": take.engine_id,
        "engine_name": take.engine_name,
        "pid": take.pid,
        "producer": None,
        "properties": {},
        "engine_properties": take.properties,
    }
