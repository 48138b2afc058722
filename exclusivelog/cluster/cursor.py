"""Cursors: read a topic from a position on.

The compiled `_core.Cursor` reads entries, as on a local log: a frame's messages are encoded as
entries here, one for each run of one producer and time. So messages, values and Arrow batches are
the same as with a local log.

The newest frames come from memory (`recent`). A cursor that is further back reads the log again,
from a mark before its position, and applies the rule itself.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgpack

from exclusivelog import _core
from exclusivelog.arguments import offset_of
from exclusivelog.cluster.compaction import View, newest_horizon
from exclusivelog.cluster.following import ANSWER_SECONDS, Changes, TopicLog
from exclusivelog.cluster.frames import Content, Frame, Packed
from exclusivelog.cluster.log import Reader
from exclusivelog.errors import (
    LedgerCorruptedError,
    LedgerIOError,
)
from exclusivelog.messages import to_ms
from exclusivelog.refusals import reader_closed, trimmed
from exclusivelog.waits import READER_LOOK_UP_SECONDS

if TYPE_CHECKING:
    from exclusivelog.cluster.engine import ClusterEngine

__all__ = ["ClusterCursor", "entries_of", "frames_from", "offset_at_time"]


READ_BYTES = 1 << 20  # encoded at once, about


# ---- frames as entries -------------------------------------------------------------------


def entries_of(frame: Frame, topic: int, loads: _core.Deserializer | None) -> Iterator[_core.Entry]:
    """The messages of a frame that counts, as entries."""
    if isinstance(frame, Packed):
        for data in frame.entries:
            yield _core.Entry(data, loads)
        return
    offset = frame.first
    for run in _runs(frame.contents):
        yield _entry(run, topic, offset, frame, loads)
        offset += len(run)


def _runs(contents: tuple[Content, ...]) -> Iterator[list[Content]]:
    """Split messages into runs of one producer and publish time, with rising sequence ids."""
    for _, group in itertools.groupby(
        contents, lambda each: (each.producer_name, each.publish_time)
    ):
        run: list[Content] = []
        for content in group:
            if run and content.sequence_id <= run[-1].sequence_id:
                yield run
                run = []
            run.append(content)
        yield run


def _entry(
    run: list[Content], topic: int, offset: int, frame: Frame, loads: _core.Deserializer | None
) -> _core.Entry:
    first = run[0]
    appender = _core.Appender(
        first.producer_name.encode(), first.sequence_id - 1, len(run) + 1, 1 << 40
    )
    for content in run:
        properties = msgpack.packb(content.properties) if content.properties else None
        appender.add(
            content.value, content.key, properties, content.event_time, content.sequence_id
        )
    [batch] = appender.take()
    [(_, data)] = batch.stamp(topic, offset, frame.epoch, frame.session, first.publish_time)
    return _core.Entry(data, loads)


def offset_at_time(topic: TopicLog, time_ms: int) -> int:
    """The offset of the first message published at this time or later."""
    with topic.changed:
        mark, end = topic.recent.mark_before_time(time_ms), topic.state.next
    back = _Back(topic, mark.begin())
    try:
        while (frame := back.next(end)) is not None:
            if frame.published < time_ms:
                continue
            for index, content in enumerate(frame.contents):
                if content.publish_time >= time_ms:
                    return frame.first + index
    finally:
        back.close()
    return end


def frames_from(topic: TopicLog, first: int) -> Iterator[Frame]:
    """The frames from this offset on, up to the known end."""
    with topic.changed:
        mark, end = topic.recent.mark_before(first), topic.state.next
    back = _Back(topic, mark.begin())
    try:
        while (frame := back.next(end)) is not None:
            if frame.end > first:
                yield frame
    finally:
        back.close()


class _Back:
    """Reads older parts of a topic's log again, from a mark."""

    def __init__(self, topic: TopicLog, state: Any) -> None:
        self._topic = topic
        self._reader = Reader(topic.log, state, topic.check_first)

    def next(self, end: int) -> Frame | None:
        """The next frame that counts; None at the offset `end`."""
        deadline = _core.monotonic() + ANSWER_SECONDS
        while self._reader.state.next < end:
            judged = self._reader.next(min(1.0, ANSWER_SECONDS))
            if judged is not None and judged.counts and isinstance(judged.parsed, Frame):
                return judged.parsed
            self._topic.host.check_not_forked()
            if judged is None and _core.monotonic() > deadline:
                raise LedgerIOError(
                    f"topic {self._topic.name!r}: offset {self._reader.state.next} could not be "
                    f"read within {ANSWER_SECONDS} s"
                )
        return None

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()


# ---- the cursor --------------------------------------------------------------------------


class ClusterCursor(_core.Cursor):
    """A position in one topic; see `exclusivelog.backend.Cursor`."""

    is_remote = True

    def __init__(
        self,
        host: ClusterEngine,
        topic: TopicLog,
        loads: _core.Deserializer | None,
        compacted: bool,
        skip_trimmed: bool,
    ) -> None:
        self.topic_id, self.topic = topic.id, topic.name
        self.closed = False
        self.membership: Any = None
        self._host, self._log, self._loads = host, topic, loads
        self._check_open = host.check_open  # bound once: `check` runs for every message
        self._compacted, self._skip_trimmed = compacted, skip_trimmed
        self._view: View | None = None  # of a compacted reader (rule G7)
        self._back: _Back | None = None  # while it reads old messages
        self._back_at = 0
        self._caught_up = False

    @property
    def ledger(self) -> object:
        """The ledger that it reads."""
        return self._host.ledger

    def check(self) -> None:
        """EngineClosedError unless it can be used."""
        self._check_open()
        if self.closed:
            raise reader_closed(self.topic)
        if self.membership is not None:
            self.membership.check()

    # ---- the position --------------------------------------------------------------------

    def seek(self, start: str | int | dt.datetime, inclusive: bool, resumes: bool = False) -> None:
        """Continue at "earliest", "latest", an offset from 0 on, or a datetime (naive: local).

        One that `resumes` reads all messages: those that were the last of their keys, and have been
        deleted since, are no longer in the view, and their deletions never were."""
        if self._compacted:
            self._view = None if resumes else self._newest_view()
        if start == "earliest":
            if self._log.recent.first < 0:  # it stays what it is: nothing is ever trimmed
                self._log.catch_up()
            self.move_to(max(0, self._log.recent.first))
        elif start == "latest":
            self.move_to(self.end())
        elif isinstance(start, dt.datetime):
            self._log.catch_up()
            self.move_to(offset_at_time(self._log, to_ms(start) + (0 if inclusive else 1)))
        else:
            self.move_to(offset_of(start, inclusive))

    def _newest_view(self) -> View:
        self._log.catch_up()
        horizon = newest_horizon(self._host.place, self._log)
        self._log.catch_up()  # it may be of messages that have come since
        return View.of(frames_from(self._log, 0) if horizon else (), horizon)

    def move_to(self, position: int) -> None:
        """Continue at this offset; drops what was read ahead."""
        self._drop_back()
        self._caught_up = False
        super().move_to(position)

    def _drop_back(self) -> None:
        back, self._back = self._back, None
        if back is not None:
            back.close()

    # ---- the end -------------------------------------------------------------------------

    def has_more(self) -> bool:
        """Is there a message at or behind the position (rule G5)?"""
        end = self.end()
        return end > self._next_read(max(self.position, self._log.recent.first))

    def _next_read(self, offset: int) -> int:
        """The first offset from this one on that is read, if there is a message."""
        return offset if self._view is None else self._view.next(offset)

    def end(self) -> int:
        """The topic's current end."""
        self._log.catch_up()
        self._caught_up = True
        return self._log.state.next

    def look_up(self) -> None:
        """Read the log up to its present end."""
        self._log.catch_up()

    def is_over(self) -> bool:
        """Is this the end of a terminated topic, as far as its log was read?"""
        state = self._log.state
        return state.terminated and self._next_read(self.position) >= state.next

    def mark(self) -> int:
        """A number that changes with every append to the topic, for `wait`."""
        return self._log.frames.mark()

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""
        self._log.check()
        most = READER_LOOK_UP_SECONDS
        left = most if seconds is None else min(max(seconds, 0.0), most)
        self._log.frames.words.wait(0, seen, int(left * 1e9))

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`; any thread may call it while another one reads."""
        self._check_open()
        self.wait(seen, seconds)

    @property
    def changes(self) -> Changes:
        """The counter whose number `mark` returns."""
        self._check_open()
        self._log.check()
        return self._log.frames

    # ---- entries -------------------------------------------------------------------------

    def refill(self) -> list[_core.Entry]:
        """The next entries; the compiled base class calls it when it has none left."""
        self.check()
        if not self._caught_up:
            self._log.catch_up()
            self._caught_up = True
        self._check_kept()
        if self._next_read(self.position) > self.position:
            super().move_to(self._next_read(self.position))
        with self._log.changed:
            frames = self._log.recent.frames(self.position, READ_BYTES)
            end = self._log.state.next
        if frames is None:
            frames = self._read_back(end)
        else:
            self._drop_back()
        if not frames:
            self._log.check()
        return [entry for frame in frames for entry in self._entries(frame)]

    def _entries(self, frame: Frame) -> Iterator[_core.Entry]:
        """The messages of a frame that are read, as entries."""
        view = self._view
        if view is None or frame.first >= view.horizon:
            yield from entries_of(frame, self.topic_id, self._loads)
            return
        for offsets in view.runs(frame):
            some = frame.contents[offsets.start - frame.first : offsets.stop - frame.first]
            part = Frame(frame.epoch, frame.session, offsets.start, some)
            yield from entries_of(part, self.topic_id, self._loads)

    def _check_kept(self) -> None:
        first = self._log.recent.first
        if self.position >= first:
            return
        if not self._skip_trimmed:
            raise trimmed(self.topic, first, self.position)
        self.move_to(first)
        self._caught_up = True

    def _read_back(self, end: int) -> list[Frame]:
        if self._back is None or self._back_at > self.position:
            self._drop_back()
            with self._log.changed:
                mark = self._log.recent.mark_before(self.position)
            self._back = _Back(self._log, mark.begin())
        found: list[Frame] = []
        size = 0
        try:
            while size < READ_BYTES and (frame := self._back.next(end)) is not None:
                if frame.end > self.position:
                    found.append(frame)
                    size += frame.size
            if found:
                self._back_at = found[-1].end
        except BaseException:  # an interrupt: it may have passed a frame
            self._drop_back()
            raise
        return found

    def refuse(self, start: int, stop: int, damage: str | None) -> None:
        """Raise an error; the compiled base class calls it for damage, which decoded frames do not
        have."""
        raise LedgerCorruptedError(
            f"topic {self.topic!r}: offsets {start} to {stop - 1} are damaged",
            topic=self.topic,
            offsets=range(start, stop),
        )

    def close(self) -> bool:
        """Close the cursor, and wake a thread that waits. False if it was closed before, or its
        engine is closed."""
        if self.closed:
            return False
        self.closed = True
        if self._host.forked:  # threads of the parent may hold the locks
            return False
        self.move_to(self.position)
        if self._host.ended:
            return False
        self._log.frames.wake()
        return True
