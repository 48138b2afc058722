"""What an engine keeps of a topic's log in memory: the newest frames, and places to read older ones
from.

A reader at the end of a topic gets its messages here. One that is further back reads the log again,
from the last *mark* before its position: a position and the state of the rule there.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exclusivelog.cluster.frames import Frame
from exclusivelog.cluster.rule import Judged, State

__all__ = ["Mark", "Recent"]

KEPT_BYTES = 8 << 20  # of frames, about
MARK_EVERY, MARK_BYTES = 500, 4 << 20  # records, or bytes of records
MOST_MARKS = 1024  # then every other one is dropped, and they are set half as often


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to read from: the rule's state there. `next` and `published` as of `State`."""

    next: int
    published: int
    state: State

    @classmethod
    def of(cls, state: State) -> Mark:
        """Where `state` is, without what only writers need."""
        kept = replace(state, sequences={}, shared=dict(state.shared))
        return cls(state.next, state.published, kept)

    def begin(self) -> State:
        """A state to fold on from here."""
        return Mark.of(self.state).state


class Recent:
    """See the module's text. Its owner serialises all calls."""

    def __init__(self, first: int = -1, marks: Sequence[Mark] = (), kept_from: int = 0) -> None:
        self.first = first  # the first offset that the log has; -1: it has no message
        self._marks = [*marks] or [Mark.of(State())]
        self._since_mark = self._bytes_since_mark = 0
        self._stride = 1
        self._kept_from = kept_from  # all messages from this offset on are kept
        self._frames: list[Frame] = []
        self._sizes: list[int] = []
        self._bytes = 0

    def take(self, judged: Judged, state: State, size: int) -> None:
        """The next record of `size` bytes, after `state` was folded over it."""
        self._since_mark += 1
        self._bytes_since_mark += size
        if max(self._since_mark / MARK_EVERY, self._bytes_since_mark / MARK_BYTES) >= self._stride:
            self._mark(state)
        if judged.counts and isinstance(judged.parsed, Frame):
            self._keep(judged.parsed, size)

    def _mark(self, state: State) -> None:
        self._since_mark = self._bytes_since_mark = 0
        self._marks.append(Mark.of(state))
        if len(self._marks) > MOST_MARKS:
            del self._marks[1::2]
            self._stride *= 2

    @property
    def marks(self) -> list[Mark]:
        """The places to read from, in order."""
        return list(self._marks)

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
        if position < self._kept_from:
            return None
        if not self._frames:
            return []
        start = bisect.bisect_right(self._frames, position, key=lambda frame: frame.end)
        stop, size = start, 0
        while stop < len(self._frames) and size < most:
            size += self._sizes[stop]
            stop += 1
        return self._frames[start:stop]

    @property
    def message_bytes(self) -> float:
        """The mean size of the messages that are kept; 0.0 without one."""
        count = sum(len(frame.contents) for frame in self._frames)
        return self._bytes / count if count else 0.0

    # ---- places to read from -------------------------------------------------------------

    def mark_before(self, position: int) -> Mark:
        """The last mark at or before this offset."""
        index = bisect.bisect_right(self._marks, position, key=lambda mark: mark.next)
        return self._marks[max(0, index - 1)]

    def mark_before_time(self, time: int) -> Mark:
        """The last mark before all messages that were published at this time (ms) or later."""
        index = bisect.bisect_left(self._marks, time, key=lambda mark: mark.published)
        return self._marks[max(0, index - 1)]
