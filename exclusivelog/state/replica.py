"""Replicas: a copy of what a topic says, in the memory of this process (rules I1, I4).

A replica follows its topic: it begins with the newest snapshot, and applies every message behind
it once, in order. What a message means, its content says (state.py, map.py).
"""

from __future__ import annotations

import logging
from typing import Protocol

from exclusivelog import _core
from exclusivelog.errors import LedgerCorruptedError, OffsetTrimmedError, StateError
from exclusivelog.messages.items import Item, item_of
from exclusivelog.state.backend import Snapshot, change_counter, read_newest
from exclusivelog.state.snapshots import Snapshots
from exclusivelog.topic import Topic

log = logging.getLogger("exclusivelog")


class Content(Protocol):
    """What a replica copies, and what a message does to it."""

    @property
    def restores_views(self) -> bool:
        """Can it be restored from a compacted view of the topic?"""

    def reset(self) -> None:
        """Return to the content before the first message."""

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one message."""

    def to_items(self) -> list[Item]:
        """Return a snapshot; SnapshotRefused if it would not restore the content."""

    def restore(self, items: list[Item]) -> None:
        """Replace the content by that of a snapshot."""


class Replica(_core.ReplicaBase):
    """A copy of what one topic says. Its owner serialises all calls."""

    def __init__(self, topic: Topic, content: Content, snapshots: Snapshots) -> None:
        self.content = content
        self.position = 0  # all messages before it are applied; the reader may be elsewhere
        self.torn = False  # was an apply interrupted? Then everything is read anew
        self.failure: StateError | None = None  # a message that cannot be applied
        self.words, self.word = change_counter(topic)
        self.seen = -1  # no mark
        self._topic, self._snapshots = topic, snapshots
        content.reset()
        self._take_snapshot()
        self._reader = topic.reader(self.position)

    def check(self) -> None:
        """Raise StateError if a message could not be applied."""
        if self.failure is not None:
            raise StateError(str(self.failure)) from self.failure.__cause__

    def catch_up(self) -> None:
        """Apply all messages that the topic has now."""
        seen = self.mark()  # before reading: what comes later is noticed
        if self.torn:
            self._begin_anew()
        while True:
            try:
                self._read_on()
                break
            except OffsetTrimmedError as error:
                # Other processes may trim what is in a snapshot, and may do so again while this
                # one restores it.
                if not self._take_snapshot():
                    raise OffsetTrimmedError(
                        f"the state in topic {self._topic.name!r} cannot be restored: {error}; its "
                        f"snapshot goes up to offset {self.position}"
                    ) from error
        self.seen = seen

    def _read_on(self) -> None:
        if self._reader.position != self.position:
            self._reader.cursor.move_to(self.position)
        for message in self._reader:
            self._apply_one(message.offset, *item_of(message))

    def apply_own(self, first: int, items: list[Item]) -> None:
        """Apply what this process has just appended at `position`."""
        for offset, item in enumerate(items, first):
            self._apply_one(offset, *item)

    def _apply_one(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        self.torn = True  # an interrupt may strike before it is applied and counted
        try:
            self.content.apply(key, value)
        except Exception as error:
            self.failure = StateError(
                f"topic {self._topic.name!r}: the message at offset {offset} could not be applied: "
                f"{error!r}. It is in the log; open the state with an applier that can"
            )
            raise self.failure from error
        self.position = offset + 1
        self.torn = False

    # ---- snapshots -----------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self._reset()
        self._take_snapshot()
        self.torn = False

    def _reset(self) -> None:
        self.content.reset()
        self.position = 0

    def _take_snapshot(self) -> bool:
        """Restore the newest snapshot if it is ahead of `position`; was it?"""
        found = self._newest()
        if found is None or found[0] <= self.position:
            return False
        self.torn = True
        try:
            self.content.restore(found[1])
        except Exception as error:
            self._do_without(found[0], error)
            return False
        self.position = found[0]
        self._snapshots.note(found[0])
        self.torn = False
        return True

    def _newest(self) -> Snapshot | None:
        try:
            return read_newest(self._topic, self.position, self.content.restores_views)[1]
        except LedgerCorruptedError as error:
            if self._topic.first_offset > self.position:
                raise
            log.warning("%s; reading all messages instead", error)
            return None

    def _do_without(self, offset: int, error: Exception) -> None:
        # The application's encode and decode functions do not match.
        text = f"topic {self._topic.name!r}: the snapshot as of offset {offset} cannot be decoded"
        if self._topic.first_offset > 0:
            raise StateError(f"{text}: {error!r}, and older messages were trimmed") from error
        log.warning("%s: %r; reading all messages instead", text, error)
        self._reset()
        self.torn = False

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
