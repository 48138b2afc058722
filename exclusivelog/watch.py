"""Every change of a shared map, as it happens (rule I6)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from exclusivelog import _core
from exclusivelog.errors import OffsetTrimmedError, TopicTerminatedError, WaitTimeoutError
from exclusivelog.past import apply_to
from exclusivelog.snapshots import Item, item_of

if TYPE_CHECKING:
    from exclusivelog.topic import Topic

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class MapChange(Generic[K, V]):
    """A key has another value since the message at `offset`; None is no value."""

    key: K
    previous: V | None
    value: V | None
    offset: int


class MapWatch(Generic[K, V]):
    """The changes of a shared map, in order; made by `SharedMap.watch`.

    `for change in watch` goes on for ever, `follow(timeout)` until nothing has come for so long,
    `read_next(timeout)` gives one. None of them polls. A `clear` is one change for each key.
    It has what it watches in its own memory, and reads the topic by itself: it goes on after the
    map is closed, and one that is slow slows nobody down. Where messages were trimmed that it has
    not read yet, it raises OffsetTrimmedError: it has fallen behind; open another one.
    """

    def __init__(
        self, topic: Topic, start: int, items: dict[bytes, bytes], matches: Callable[[bytes], bool],
        load_key: Callable[[bytes], Any], load: Callable[[bytes], Any],
    ) -> None:  # fmt: skip
        self._topic = topic.name
        self._items = {name: data for name, data in items.items() if matches(name)}
        self._matches = matches
        self._load_key, self._load = load_key, load
        self._changes: deque[MapChange[K, V]] = deque()
        self.reader = topic.reader(start)  # aio waits with it

    @property
    def position(self) -> int:
        """The offset of the next message that it looks at."""
        return self.reader.position

    def read_next(self, timeout: float | None = None) -> MapChange[K, V]:
        """The next change; waits for it up to `timeout` seconds (None: for ever).

        Raises WaitTimeoutError when nothing came, OffsetTrimmedError when it has fallen behind,
        TopicTerminatedError when nothing can come any more.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._changes:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                self.take(self.reader.read_next(left))
            except OffsetTrimmedError as error:
                raise OffsetTrimmedError(
                    f"this watch of the map in topic {self._topic!r} has fallen behind: {error}"
                ) from error
        return self._changes.popleft()

    def take(self, message: _core.Message) -> None:
        """Take a message that was read by `reader`; its changes come next."""
        item = item_of(message)
        for name in self._names(item):
            old = self._items.get(name)
            if item[1] is not None or old is not None:
                self._changes.append(
                    MapChange(
                        self._load_key(name), self._value(old), self._value(item[1]), message.offset
                    )
                )
        if item[0] is None or self._matches(item[0]):
            apply_to(self._items, item)

    def _names(self, item: Item) -> list[bytes]:
        if item[0] is None:
            return list(self._items)
        return [item[0]] if self._matches(item[0]) else []

    def _value(self, data: bytes | None) -> Any:
        return None if data is None else self._load(data)

    def follow(self, timeout: float | None = None) -> Iterator[MapChange[K, V]]:
        """The changes, until nothing has come for `timeout` seconds (None: for ever)."""
        while True:
            try:
                change = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield change

    def __iter__(self) -> Iterator[MapChange[K, V]]:
        return self.follow()

    def close(self) -> None:
        """End it. Twice does nothing."""
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
