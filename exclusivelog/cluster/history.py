"""The changes of a topic's owner, and of a group's claims, as events (rule E5): the grants, takes
and releases that count, and the steps of hand-overs.

They are read from the log, from its first record on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from exclusivelog.admission import end_by_grant, end_of_move
from exclusivelog.cluster.changes import claims_changed, owner_changed
from exclusivelog.cluster.claimed import Drop, Holdings, Noting, Ruling, Take, read
from exclusivelog.cluster.claiming import GroupLog, group_of
from exclusivelog.cluster.following import Having, TopicLog
from exclusivelog.cluster.frames import EVICTED, LATE, Frame, Grant, Join, Release, Terminate
from exclusivelog.cluster.log import CLOSED, Reader
from exclusivelog.cluster.ordered import Position, Record
from exclusivelog.cluster.rule import Judged, State, Verdict
from exclusivelog.cluster.waiting import Assign, Noted, Unassign, Waiters, decode
from exclusivelog.events import Event

__all__ = ["Story", "claim_history", "history", "told"]

# Reasons of releases by other engines, and of the evictions that they are.
EVICTIONS = {EVICTED: "dead", LATE: "late"}


def history(topic: TopicLog) -> Iterator[Event]:
    """The events up to the log's current end. A release has the time of the last grant or message
    before it, as its record has no time."""
    topic.catch_up()
    for _, events in told(topic, topic.state.position):
        yield from events


def told(topic: TopicLog, end: Position | None) -> Iterator[tuple[Position, list[Event]]]:
    """The events of each record up to the position `end`."""
    reader = Reader(topic.log, None, topic.check_first)
    story = Story(topic.name, reader.state)
    try:
        while end is not None and (reader.state.position or b"") < end:
            record = reader.receive(1.0)
            topic.check()
            if record is not None:
                yield record.position, story.go_on(reader.fold(record), record.data)
    finally:
        reader.close()


class Story:
    """The events of one topic's records, which are taken in order. It begins with this state, which
    its owner folds, and these records of the queue."""

    def __init__(self, topic: str, state: State, queue: Iterable[Noted] = ()) -> None:
        self._topic, self._state = topic, state
        self._waiters = Waiters()  # why a topic was granted depends on who has waited for it
        for record in queue:
            self._waiters.take(record)
        self._before = Having.of(state)
        self._time = 0 if state.grant is None else state.grant.holder.since
        self.death: Event | None = None  # of the present owner, if it was told by `died`

    def go_on(self, judged: Judged, data: bytes) -> list[Event]:
        """The events of the next record, which was just folded into the state."""
        self._time = max(self._time, self._state.published)
        if judged.verdict is Verdict.FOREIGN:
            return list(self._queued(decode(data), self._before))
        parsed = judged.parsed
        if not judged.counts or (isinstance(parsed, Frame) and parsed.source is None):
            return []  # the owner's messages change nothing: most records of a topic are these
        events = list(self._counted(judged, self._before))
        self._before = Having.of(self._state)
        return events

    @property
    def owner(self) -> Grant | None:
        """The grant of the session that has the topic."""
        return self._before.owner

    def died(self, time: int) -> list[Event]:
        """The event of the death of the owner's engine, which is no record. The next grant, or an
        eviction, is the first record that shows it; that does not tell it again."""
        if self.owner is None or self.death is not None:
            return []
        self.death = self._event("evict", "dead", self.owner.epoch, self.owner, time=time)
        return [self.death]

    def lives(self, time: int) -> list[Event]:
        """The event of the return of an owner that has `died`: its engine was only cut off."""
        if self.owner is None or self.death is None:
            return []
        self.death = None
        return [self._event("grant", "reconnect", self.owner.epoch, None, self.owner, time)]

    def _counted(self, judged: Judged, before: Having) -> Iterator[Event]:
        """The events of a record that counts."""
        parsed, owner = judged.parsed, before.owner
        if isinstance(parsed, Join):
            yield from self._cancelled(end_by_grant(shared=True, reason=""), before.epoch)
            self._waiters.joined()
        elif isinstance(parsed, Grant):
            self._time = max(self._time, parsed.holder.since)
            reason = self._waiters.reason_of(parsed, owner is not None, bool(before.shared))
            if owner is not None:
                yield from self._replaced(parsed, owner, reason)
            failed = end_by_grant(shared=False, reason=reason)
            kept = self._waiters.assigned
            if kept is not None and parsed.holder.since >= kept.until:
                failed = end_of_move(lives=True, late=True, overtaken=True)
            yield from self._cancelled(failed, before.epoch)
            self._waiters.granted(parsed, before.tenure[0], owner is not None)
            yield self._event("grant", reason, parsed.epoch, None, parsed)
        elif isinstance(parsed, Release | Terminate) and owner is not None:
            yield from self._ended(parsed, owner)

    def _replaced(self, grant: Grant, owner: Grant, reason: str) -> Iterator[Event]:
        """The events of the end of this owner by a grant to another one, for this reason."""
        if grant.by:
            yield from self.lives(self._time)
            yield self._event("release", CLOSED, owner.epoch, owner)
            return
        death, self.death = self.death, None
        if death is None:
            why = "fenced" if reason == "fencing" else "dead"
            yield self._event("evict", why, owner.epoch, owner, grant)

    def _ended(self, record: Release | Terminate, owner: Grant) -> Iterator[Event]:
        """The events of the end of this owner, without a grant to another one."""
        why = record.reason or CLOSED if isinstance(record, Release) else "terminated"
        if isinstance(record, Release) and why not in EVICTIONS:
            yield from self.lives(self._time)
        death, self.death = self.death, None
        if death is not None:
            return
        kind, why = "evict" if why in EVICTIONS else "release", EVICTIONS.get(why, why)
        yield self._event(kind, why, owner.epoch, owner)
        assigned = self._waiters.assigned
        if assigned is not None and assigned.session == owner.session:
            yield self._event("assigned", "unload", owner.epoch, owner, assigned)

    def _queued(self, record: Noted | None, before: Having) -> Iterator[Event]:
        """The events of a record of the queue: those that begin or end a hand-over."""
        kept, owner = self._waiters.assigned, before.owner
        ended = ""
        if isinstance(record, Assign):
            self._time = max(self._time, record.since)
            ended = "deadline" if kept is not None and record.since >= kept.until else ""
        elif isinstance(record, Unassign) and kept is not None and record.number == kept.number:
            ended = record.reason
        yield from self._cancelled(ended, before.epoch, owner)
        self._waiters.take(record, self._state.owning)
        begun = self._waiters.assigned
        if begun is not None and (kept is None or begun.number != kept.number):
            source = owner if owner is not None and owner.session == begun.session else None
            kind = "assigned" if source is None else "releasing"
            yield self._event(kind, "unload", before.epoch, source, begun)

    def _cancelled(self, reason: str, epoch: int, owner: Grant | None = None) -> Iterator[Event]:
        """The end of a hand-over that is under way, if there is a reason for one."""
        assigned = self._waiters.assigned
        if assigned is not None and reason:
            yield self._event("cancel", reason, epoch, owner, assigned)

    def _event(
        self,
        kind: str,
        reason: str,
        epoch: int,
        source: Grant | None,
        target: Grant | Assign | None = None,
        time: int | None = None,
    ) -> Event:
        time = self._time if time is None else time
        before = None if source is None else source.holder
        after = target.holder if isinstance(target, Grant) else target
        return owner_changed(time, self._topic, epoch, kind, reason, before, after)


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
                ruling, gone = holdings.fold(noted)
                if ruling is Ruling.COUNTS:
                    time = noted.since if isinstance(noted, Take | Drop) else time
                    yield from claims_changed(group_of(log.name), noted, gone, time)
    finally:
        reader.close()


def _noted(reader: Reader, record: Record) -> Noting | None:
    """A record of claims; None for any other, and for one that was read before."""
    if reader.fold(record).verdict is not Verdict.FOREIGN:
        return None
    return read(record.data)
