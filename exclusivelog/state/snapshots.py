"""When snapshots of a state are taken, and the background thread that takes them (rule I4)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from exclusivelog import _core
from exclusivelog.errors import StateError

log = logging.getLogger("exclusivelog")

NEVER = (1 << 63) - 1


class SnapshotRefused(StateError):
    """The state would not come back from its snapshot as it is; none was kept."""


class Snapshots(_core.SnapshotsBase):
    """The schedule of one state's snapshots.

    - `every`: after so many messages one is due; None: never.
    - `take`: takes one, in the background thread.
    """

    def __init__(self, topic: str, every: int | None, take: Callable[[], object]) -> None:
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"snapshot_every={every!r}: it takes a number of writes")
        self.refused: SnapshotRefused | None = None  # in the background: the next call raises it
        self._topic, self._every, self._take = topic, every, take
        self._newest = 0
        self.due_at = NEVER if every is None else every  # an offset
        self._thread: threading.Thread | None = None

    def note(self, offset: int) -> None:
        """There is a snapshot that goes up to this offset."""
        self._newest = max(self._newest, offset)
        if self._every is not None:
            self.due_at = self._newest + self._every

    def take_if_due(self, position: int) -> None:
        """Begin one in the background, if it is due at this offset, unless one is being taken."""
        if position < self.due_at or (self._thread is not None and self._thread.is_alive()):
            return
        self.note(position)
        thread = threading.Thread(
            target=self._take_quietly, name="exclusivelog-snapshot", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # too many threads; what was written is in the log
            log.warning("topic %r: no snapshot: %s", self._topic, error)
        else:
            self._thread = thread

    def _take_quietly(self) -> None:
        try:
            self._take()
        except SnapshotRefused as error:
            self._every, self.due_at, self.refused = None, NEVER, error
        except Exception as error:  # the next one may succeed
            log.warning("topic %r: no snapshot: %s", self._topic, error)

    def close(self) -> None:
        """Wait for the one that is being taken."""
        if self._thread is not None:
            self._thread.join(timeout=60)
