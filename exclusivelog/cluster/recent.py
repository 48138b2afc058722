"""What an engine keeps of a topic's log in memory: the newest frames, places to read older ones
from, and every change of owner.

A reader at the end of a topic gets its messages here. One that is further back reads the log again,
from the last *mark* before its position: a position and the state of the rule there.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from exclusivelog.cluster.frames import Frame, Grant, Release
from exclusivelog.cluster.rule import Judged, State
from exclusivelog.events import Event, Party

__all__ = ["Change", "Mark", "Recent"]

KEPT_BYTES = 8 << 20  # of frames, about
MARK_EVERY = 500  # records


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to read from: the rule's state there. `next` and `published` as of `State`."""

    next: int
    published: int
    state: State

    @classmethod
    def of(cls, state: State) -> Mark:
        """Where `state` is, without what only writers need."""
        kept = State(
            state.position, state.epoch, state.session, state.owned, state.next, state.grant, {},
            state.published, state.source,
        )  # fmt: skip
        return cls(state.next, state.published, kept)

    def begin(self) -> State:
        """A state to fold on from here."""
        return Mark.of(self.state).state


@dataclass(frozen=True, slots=True)
class Change:
    """A grant or a release that counts, at about this time (ms since 1970), and the grant that it
    ends, if that had not been released."""

    record: Grant | Release
    time: int
    ended: Grant | None


class Recent:
    """See the module's text. Its owner serialises all calls."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.first = -1  # the first offset that the log has; -1: it has no message
        self._marks = [Mark.of(State())]
        self._since_mark = 0
        self._kept_from = 0  # all messages from this offset on are kept
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        self._bytes = 0

    def take(self, judged: Judged, before: Grant | None, state: State, size: int) -> None:
        """The next record of `size` bytes, after `state` was folded over it. `before`: the grant of
        the owner before it, if there was one."""
        self._since_mark += 1
        if self._since_mark >= MARK_EVERY:
            self._since_mark = 0
            self._marks.append(Mark.of(state))
        if not judged.counts:
            return
        parsed = judged.parsed
        if isinstance(parsed, Frame):
            self._keep(parsed, size)
        elif isinstance(parsed, Grant):
            continued = before is not None and parsed.continues == before.session
            self._note(parsed, max(parsed.holder.since, self._time()), before, continued)
        elif isinstance(parsed, Release):
            self._note(parsed, max(state.published, self._time()), before, True)

    def _note(
        self, record: Grant | Release, time: int, before: Grant | None, expected: bool
    ) -> None:
        ended = before if isinstance(record, Release) or not expected else None
        self.changes.append(Change(record, time, ended))

    def _time(self) -> int:
        return self.changes[-1].time if self.changes else 0

    # ---- frames --------------------------------------------------------------------------

    def _keep(self, frame: Frame, size: int) -> None:
        if self.first < 0:
            self.first = frame.first
        self._frames.append(frame)
        self._sizes.append(size)
        self._bytes += size
        if self._bytes > KEPT_BYTES and len(self._frames) > 1:
            self._drop()

    def _drop(self) -> None:
        """Drop the older half: one at a time, each would move all that stay."""
        count = 0
        while count < len(self._frames) - 1 and self._bytes > KEPT_BYTES // 2:
            self._bytes -= self._sizes[count]
            count += 1
        self._kept_from = self._frames[count].first
        del self._frames[:count], self._sizes[:count]

    def frames(self, position: int, most: int) -> list[Frame] | None:
        """The frames with this offset or later ones, of about `most` bytes, one at least; None if
        the first of them is not kept."""
        if not self._frames:
            return []
        if position < self._kept_from:
            return None
        start = bisect.bisect_right(self._frames, position, key=lambda frame: frame.end)
        stop, size = start, 0
        while stop < len(self._frames) and size < most:
            size += self._sizes[stop]
            stop += 1
        return self._frames[start:stop]

    # ---- places to read from -------------------------------------------------------------

    def mark_before(self, position: int) -> Mark:
        """The last mark at or before this offset."""
        index = bisect.bisect_right(self._marks, position, key=lambda mark: mark.next)
        return self._marks[max(0, index - 1)]

    def mark_before_time(self, time: int) -> Mark:
        """The last mark before all messages that were published at this time (ms) or later."""
        index = bisect.bisect_left(self._marks, time, key=lambda mark: mark.published)
        return self._marks[max(0, index - 1)]


# ---- changes of owner as events ----------------------------------------------------------


def events(topic: str, changes: list[Change]) -> list[Event]:
    """What `Engine.history` tells of a topic (rule E5)."""
    told = []
    for change in changes:
        record, ended = change.record, change.ended
        if isinstance(record, Release):
            told.append(
                Event(change.time, topic, record.epoch, "release", record.reason or "closed",
                      0 if ended is None else ended.holder.priority, _party(ended), None)
            )  # fmt: skip
            continue
        mode = str(record.holder.access_mode)
        if ended is not None:
            why = "fenced" if mode == "exclusive_with_fencing" else "dead"
            told.append(
                Event(change.time, topic, record.epoch, "evict", why, ended.holder.priority,
                      _party(ended), None)
            )  # fmt: skip
        told.append(
            Event(change.time, topic, record.epoch, "grant", _reason(record, mode),
                  record.holder.priority, None, _party(record))
        )  # fmt: skip
    return told


def _reason(grant: Grant, mode: str) -> str:
    if grant.continues:
        return "reconnect"
    return {"wait_for_exclusive": "promotion", "exclusive_with_fencing": "fencing"}.get(
        mode, "request"
    )


def _party(grant: Grant | None) -> Party | None:
    if grant is None:
        return None
    holder = grant.holder
    return {
        "engine": holder.engine_id, "engine_name": holder.engine_name, "pid": holder.pid,
        "producer": holder.producer_name, "properties": holder.properties,
        "engine_properties": {},
    }  # fmt: skip
