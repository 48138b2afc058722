"""The changes of a topic's owner, and of a group's claims, as events (rule E5): the grants, takes
and releases that count, and the steps of hand-overs.

They are read from the log, from its first record on.
"""

from __future__ import annotations

from collections.abc import Iterator

from exclusivelog.admission import HANDED_OVER, end_by_grant
from exclusivelog.cluster.changes import claims_changed, owner_changed
from exclusivelog.cluster.claimed import Drop, Holdings, Noting, Ruling, Take, read
from exclusivelog.cluster.claiming import GroupLog, group_of
from exclusivelog.cluster.following import Having, TopicLog
from exclusivelog.cluster.frames import EVICTED, Grant, Join, Release, Terminate
from exclusivelog.cluster.log import Reader
from exclusivelog.cluster.ordered import Record
from exclusivelog.cluster.rule import Judged, Verdict
from exclusivelog.cluster.waiting import Assign, Noted, Unassign, Waiters, decode
from exclusivelog.events import Event

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
        before = Having.of(self._reader.state)
        judged = self._reader.fold(record)
        if judged.verdict is Verdict.FOREIGN:
            yield from self._queued(decode(record.data), before)
        elif judged.counts:
            yield from self._counted(judged, before)

    def _counted(self, judged: Judged, before: Having) -> Iterator[Event]:
        """The events of a record that counts."""
        parsed, owner = judged.parsed, before.owner
        began = parsed.holder.since if isinstance(parsed, Grant) else self._reader.state.published
        self._time = max(self._time, began)
        if isinstance(parsed, Join):
            yield from self._cancelled(end_by_grant(shared=True, reason=""), before.epoch)
            self._waiters.joined()
        elif isinstance(parsed, Grant):
            reason = self._waiters.reason_of(parsed, owner is not None, bool(before.shared))
            if owner is not None:
                why = "fenced" if reason == "fencing" else "dead"
                yield self._event("evict", why, owner.epoch, owner, parsed)
            yield from self._cancelled(end_by_grant(shared=False, reason=reason), before.epoch)
            self._waiters.granted(parsed, before.tenure[0], owner is not None)
            yield self._event("grant", reason, parsed.epoch, None, parsed)
        elif isinstance(parsed, Release | Terminate) and owner is not None:
            why = "terminated" if isinstance(parsed, Terminate) else parsed.reason or "closed"
            kind, why = ("evict", "dead") if why == EVICTED else ("release", why)
            yield self._event(kind, why, owner.epoch, owner)
            assigned = self._waiters.assigned
            if why == HANDED_OVER and assigned is not None:
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
        self._waiters.take(record)
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
    ) -> Event:
        before = None if source is None else source.holder
        after = target.holder if isinstance(target, Grant) else target
        return owner_changed(self._time, self._topic, epoch, kind, reason, before, after)


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
