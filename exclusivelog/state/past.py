"""Past contents of a map, and watches of its changes.

`map_at` restores a map as of an offset or time, from a snapshot or compacted view and the log.

`MapWatch` returns the changes of a map in order (rule I6).
"""

from __future__ import annotations

import datetime as dt
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from exclusivelog import _core
from exclusivelog.arguments import as_int, check_timeout
from exclusivelog.backend import TopicStore
from exclusivelog.closing import Closing
from exclusivelog.errors import (
    DeserializationError,
    EngineClosedError,
    OffsetTrimmedError,
    TopicTerminatedError,
    WaitTimeoutError,
)
from exclusivelog.messages import Item, Timed, item_of, plain, to_ms
from exclusivelog.state.entries import Entries, apply_to, is_of_map

__all__ = ["MapChange", "MapWatch"]

if TYPE_CHECKING:
    from exclusivelog.reader import Reader
    from exclusivelog.topic import Topic


# ---- the past --------------------------------------------------------------------------


At = int | dt.datetime


def map_at(
    topic: Topic, when: At, holds: Callable[[bytes], bool] | None = None
) -> tuple[int, Entries]:
    """Return (offset, map): the map before the message at an offset, or before the first message
    published at a time or later; if there is none, the present map. `holds`: as for `Entries`. A
    message of another program, which stops an open map, is left out, as compaction leaves it out:
    so a trim can remove it."""
    when = as_int(when)
    if isinstance(when, bool) or not isinstance(when, (int, dt.datetime)):
        raise TypeError(f"when={when!r}: it takes an offset or a datetime")
    if isinstance(when, int) and when < 0:
        raise ValueError(f"when={when}: it takes an offset from 0 on")
    topic.engine.backend.make_visible()
    with topic.reader("earliest") as reader:
        if isinstance(when, dt.datetime):
            when = _offset_at(topic, reader, when)
        entries = Entries(holds)
        end = min(when, topic.next_offset)  # before the messages: others may append meanwhile
        position = _restore_base(entries, topic, when)
        reader.cursor.move_to(position)
        for message in reader:
            if message.offset >= end:
                break
            item = item_of(message)
            if is_of_map(*item):
                entries.apply(*item)
            position = message.offset + 1
    return max(position, end), entries


def map_since(
    topic: Topic, start: Literal["earliest"] | At, holds: Callable[[bytes], bool]
) -> tuple[int, Entries]:
    """The same at `start`; "earliest": the earliest map that can be restored."""
    if start != "earliest":
        return map_at(topic, start, holds)
    first, found = topic.engine.backend.topic_store(topic.id).newest(0, views=True)
    return map_at(topic, found[0] if first and found else first, holds)


def _offset_at(topic: Topic, reader: Reader, when: dt.datetime) -> int:
    row = topic.engine.backend.topic_store(topic.id).latest()
    reader.seek(when)
    if 0 < row.first_offset == reader.position and to_ms(when) <= row.last_publish_time:
        raise OffsetTrimmedError(  # trimmed messages may have been published later than that
            f"topic {topic.name!r}: the map as of {when} cannot be restored any more: messages "
            f"before offset {row.first_offset} were trimmed"
        )
    return reader.position


def _restore_base(entries: Entries, topic: Topic, offset: int) -> int:
    """Restore the newest snapshot or compacted view that is no later than the offset; leave the map
    empty if no message was trimmed. Returns its offset."""
    store: TopicStore = topic.engine.backend.topic_store(topic.id)
    first, found = store.newest(0, views=True)
    if found is not None and first <= found[0] <= offset:
        entries.restore([item for item in found[1] if None not in item])
        return found[0]
    if first > 0:
        oldest = f"as of offset {found[0]}" if found else "missing"
        raise OffsetTrimmedError(
            f"topic {topic.name!r}: the map as of offset {offset} cannot be restored any more; "
            f"messages before offset {first} were trimmed, and its snapshot is {oldest}"
        )
    return 0


# ---- watching --------------------------------------------------------------------------


K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class MapChange(Generic[K, V]):
    """A change of a key's value by the message at `offset`; None means no value.

    >>> MapChange("limit", None, 20, 3).value
    20
    """

    key: K
    previous: V | None
    value: V | None
    offset: int


class MapWatch(Closing, Generic[K, V]):
    """The changes of a shared map, in order. `SharedMap.watch` returns it.

    `for change in watch` waits for changes without a limit; `follow(timeout)` stops if none comes
    for `timeout` seconds; `read_next(timeout)` returns one. None of them polls. A `clear` is one
    change for each key.

    A watch has its own copy of the keys that it watches, and its own reader: it continues after the
    map is closed, and a slow watch does not slow down others. If messages that it has not read yet
    are trimmed, it raises OffsetTrimmedError; open a new watch then.

    >>> with xl.SharedMap(engine.topic("settings")) as settings:
    ...     watch = settings.watch("limit")
    ...     settings.put("limit", 20)
    ...     change = watch.read_next(timeout=5)
    ...     change.key, change.previous, change.value
    ('limit', None, 20)
    """

    def __init__(
        self,
        topic: Topic,
        start: int,
        items: dict[bytes, bytes],
        matches: Callable[[bytes], bool],
        load_key: Callable[[bytes], Any],
        load: Callable[[bytes, bytes], Any],
        existing: bool = False,
        expect: Callable[[int, int], object] | None = None,
    ) -> None:
        self._topic = topic.name
        self._expect = expect  # called with an offset, and the time at which that key expires
        self._items = {name: data for name, data in items.items() if matches(name)}
        self._matches = matches
        self._load_key, self._load = load_key, load
        self._changes: deque[tuple[bytes, bytes | None, bytes | None, int]] = deque()
        if existing:
            self._changes.extend((n, None, data, start - 1) for n, data in self._items.items())
        self.reader = topic.reader(start)  # aio waits with it
        self._next = start  # the offset of the next message whose changes are not in `_changes`
        self._unapplied: Item | None = None  # to `_items`: it is the next one's past
        self._closed = False

    @property
    def position(self) -> int:
        """The offset of the next message that it reads."""
        return self.reader.position

    def read_next(self, timeout: float | None = None) -> MapChange[K, V]:
        """Return the next change; wait for it up to `timeout` seconds (default: None, no limit).

        Raises WaitTimeoutError if there was none, OffsetTrimmedError if the watch has fallen
        behind, TopicTerminatedError at the end of a terminated topic, DeserializationError for a
        change that cannot be read; the next call returns the one after it.
        """
        check_timeout(timeout)
        end = None if timeout is None else _core.monotonic() + timeout
        self._check_enters()
        while not self._changes:
            left = None if end is None else max(0.0, end - _core.monotonic())
            try:
                self._go_back()
                self._take(self.reader.read_next(left))
            except OffsetTrimmedError as error:
                raise self._fallen_behind(error) from error
        return self._pop()

    def _pop(self) -> MapChange[K, V]:
        """The first of the changes."""
        try:
            change = self._decoded(*self._changes[0])
        except DeserializationError:
            self._changes.popleft()
            raise
        # Only now, and without a call: an exception of a signal handler passes over none.
        del self._changes[0]
        return change

    def _go_back(self) -> None:
        """Read a message again that was returned, but not processed, because of an interrupt."""
        if self.reader.position != self._next:
            self.reader.seek(self._next)

    def _fallen_behind(self, error: OffsetTrimmedError) -> OffsetTrimmedError:
        return OffsetTrimmedError(
            f"this watch of the map in topic {self._topic!r} has fallen behind: {error}"
        )

    def _take(self, message: _core.Message) -> None:
        """Process a message that `reader` has returned; its changes come next."""
        item = item_of(message)
        if type(item[1]) is Timed and self._expect is not None:
            self._expect(message.offset, item[1].until)
        if self._unapplied is not None:  # twice, after an interrupt: with the same result
            apply_to(self._items, *self._unapplied)
        changes = self._changes.copy()  # empty, but of a watch that two tasks share
        for name in self._names(item):
            old = self._items.get(name)
            if item[1] is not None or old is not None:
                changes.append((name, old, plain(item[1]), message.offset))
        unapplied = item if self._is_watched(item) else None
        end = message.offset + 1
        # No interrupt comes in between.
        self._changes, self._unapplied, self._next = changes, unapplied, end

    def _is_watched(self, item: Item) -> bool:
        """False also for a message of another program; see `map_at`."""
        return is_of_map(*item) and (item[0] is None or self._matches(item[0]))

    def _names(self, item: Item) -> list[bytes]:
        if not self._is_watched(item):
            return []
        return list(self._items) if item[0] is None else [item[0]]

    def _decoded(
        self, name: bytes, old: bytes | None, new: bytes | None, offset: int
    ) -> MapChange[K, V]:
        try:
            return MapChange(
                self._load_key(name), self._value(old, name), self._value(new, name), offset
            )
        except DeserializationError as error:
            error.offset = offset
            raise

    def _value(self, data: bytes | None, name: bytes) -> Any:
        return None if data is None else self._load(data, name)

    def follow(self, timeout: float | None = None) -> Iterator[MapChange[K, V]]:
        """Iterate over the changes. It stops if none comes for `timeout` seconds (default: None, no
        limit), or if the topic is terminated."""
        while True:
            try:
                change = self.read_next(timeout)
            except (WaitTimeoutError, TopicTerminatedError):
                return
            yield change

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MapChange[K, V]:
        """The next change; waits for it without a limit. StopIteration at the end of a terminated
        topic."""
        try:
            return self.read_next()
        except TopicTerminatedError:
            raise StopIteration from None

    def _check_enters(self) -> None:
        if self._closed:
            raise EngineClosedError(
                f"this watch of the map in topic {self._topic!r} is closed; open a new one"
            )

    def close(self) -> None:
        """End the watch; a thread that waits in `read_next` gets EngineClosedError. Closing twice
        does nothing."""
        self._closed = True
        self.reader.close()
