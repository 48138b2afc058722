"""Watching who owns a topic: every change of owner, as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from exclusivelog import _core
from exclusivelog.arguments import check_timeout
from exclusivelog.backend import OwnerChanges
from exclusivelog.closing import Closing
from exclusivelog.errors import WaitTimeoutError
from exclusivelog.events import Event
from exclusivelog.reader import Reader
from exclusivelog.refusals import watch_closed

__all__ = ["OwnerWatch"]


class RecordedChanges:
    """The changes of a topic's owner that are messages of `__events__`, read by this reader."""

    def __init__(self, topic: str, reader: Reader) -> None:
        self._key, self._reader = topic.encode(), reader
        self.key = id(reader._ledger), reader.topic_id
        self.path = reader._store.path

    @property
    def position(self) -> int:
        """The offset of the next message to read."""
        return self._reader.position

    def take(self) -> Event | None:
        """The next change that is there; events of other topics, and of claims, are skipped."""
        while (message := next(self._reader, None)) is not None:
            if message.value is not None and message.key == self._key:
                return Event.loads(message.value)
        return None

    def catch_up(self) -> None:
        """No effect: `take` reads up to the present end."""

    def mark(self) -> int:
        """A number that changes with every event."""
        return self._reader.cursor.mark()

    def wait(self, seen: int, seconds: float | None) -> None:
        """Sleep until `mark()` is no longer `seen`, or for so many seconds, or less."""
        self._reader.cursor.wait(seen, seconds)

    def await_mark(self, seen: int, seconds: float) -> None:
        """As `wait`; any thread may call it while another one takes changes."""
        self._reader.cursor.await_mark(seen, seconds)

    def close(self) -> None:
        """Close the reader, and wake a thread that waits."""
        self._reader.close()


class OwnerWatch(Closing):
    """The changes of a topic's owner, in order. `topic.watch_owner` returns it.

    `for event in watch` waits for changes without a limit; `follow(timeout)` stops if none comes
    for `timeout` seconds; `read_next(timeout)` returns one. None of them polls.

    On a directory, it reads `__events__`, which keeps its newest 250,000 events by default; on a
    cluster, the records of the topic, and so many changes are kept for it. If changes that it has
    not read yet are gone, it raises OffsetTrimmedError; open a new watch then.

    >>> watch = topic.watch_owner()
    >>> with topic.producer("exclusive", name="leader"):
    ...     event = watch.read_next(timeout=5)
    >>> event.kind, event.epoch, event.target["producer"]
    ('grant', 1, 'leader')
    >>> watch.read_next(timeout=5).kind
    'release'
    """

    def __init__(self, topic: str, changes: OwnerChanges) -> None:
        self._topic, self._changes, self._closed = topic, changes, False

    @property
    def position(self) -> int:
        """The place from which it reads on: `topic.watch_owner(position)` continues there. On a
        directory, it is the offset in `__events__`."""
        return self._changes.position

    def read_next(self, timeout: float | None = None) -> Event:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit).

        Raises WaitTimeoutError if there was none, and OffsetTrimmedError if the watch has fallen
        behind.
        """
        check_timeout(timeout)
        end = None if timeout is None else _core.monotonic() + timeout
        while True:
            seen = self._changes.mark()  # before taking: a later change ends the wait
            event = self._take()
            if event is not None:
                return event
            left = None if end is None else end - _core.monotonic()
            if left is not None and left <= 0:
                return self._take_last(timeout)
            self._changes.wait(seen, left)

    def _take(self) -> Event | None:
        """The next change, if it is there."""
        self._check_enters()
        return self._changes.take()

    def _take_last(self, timeout: float | None) -> Event:
        """The next change up to now, after `timeout` seconds have passed."""
        self._changes.catch_up()
        return self._last(timeout)

    def _last(self, timeout: float | None) -> Event:
        """The next change, once they have caught up."""
        event = self._take()
        if event is None:
            raise self._nothing_came(timeout)
        return event

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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """The next change; waits for it without a limit."""
        return self.read_next()

    def _check_enters(self) -> None:
        if self._closed:
            raise watch_closed(self._topic)

    def close(self) -> None:
        """End the watch; a thread that waits in `read_next` gets EngineClosedError."""
        self._closed = True
        self._changes.close()

    def __repr__(self) -> str:
        return f"<OwnerWatch of topic {self._topic!r}>"
