"""Watching who owns a topic: every change of owner, as it comes."""

from __future__ import annotations

from collections.abc import Iterator

from exclusivelog import _core
from exclusivelog.arguments import check_timeout
from exclusivelog.closing import Closing
from exclusivelog.errors import WaitTimeoutError
from exclusivelog.events import Event
from exclusivelog.reader import Reader

__all__ = ["OwnerWatch"]


class OwnerWatch(Closing):
    """The changes of a topic's owner, in order. `topic.watch_owner` returns it.

    `for event in watch` waits for changes without a limit; `follow(timeout)` stops if none comes
    for `timeout` seconds; `read_next(timeout)` returns one. None of them polls.

    It reads `__events__`, which keeps its newest 250,000 events by default. If events that it has
    not read yet are removed, it raises OffsetTrimmedError; open a new watch then.

    >>> watch = topic.watch_owner()
    >>> with topic.producer("exclusive", name="leader"):
    ...     event = watch.read_next(timeout=5)
    >>> event.kind, event.epoch, event.target["producer"]
    ('grant', 1, 'leader')
    >>> watch.read_next(timeout=5).kind
    'release'
    """

    def __init__(self, topic: str, reader: Reader) -> None:
        self._topic, self._reader = topic, reader

    @property
    def position(self) -> int:
        """The offset in `__events__` from which it reads on: `topic.watch_owner(position)`
        continues there."""
        return self._reader.position

    def read_next(self, timeout: float | None = None) -> Event:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit).

        Raises WaitTimeoutError if there was none, and OffsetTrimmedError if the watch has fallen
        behind.
        """
        check_timeout(timeout)
        end = None if timeout is None else _core.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - _core.monotonic())
            try:
                event = self._event_of(self._reader.read_next(left))
            except WaitTimeoutError:
                raise self._nothing_came(timeout) from None
            if event is not None:
                return event

    def _event_of(self, message: _core.Message) -> Event | None:
        """The event of a message; None if it is one of another topic, or of a claim."""
        if message.value is None or message.key != self._topic.encode():
            return None
        return Event.loads(message.value)

    def _nothing_came(self, timeout: float | None) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"the owner of topic {self._topic!r} has not changed within {timeout} s"
        )

    def follow(self, timeout: float | None = None) -> Iterator[Event]:
        """Iterate over the changes. It stops if none comes for `timeout` seconds (default: None, no
        limit)."""
        while True:
            try:
                event = self.read_next(timeout)
            except WaitTimeoutError:
                return
            yield event

    def __iter__(self) -> Iterator[Event]:
        return self.follow()

    def close(self) -> None:
        """End the watch; a thread that waits in `read_next` gets EngineClosedError."""
        self._reader.close()

    def __repr__(self) -> str:
        return f"<OwnerWatch of topic {self._topic!r}>"
