"""The content of a map: its keys with their values, as bytes, and the times at which keys expire.

The time at which a key expires (its deadline) is part of the message that sets its value. It
changes nothing by itself: a key is there until a message removes it. The owner appends that message
once the log's time has come. So the map is a function of the log alone, the same in every process,
whatever clocks show (rule I2).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, MutableMapping

from exclusivelog import _core
from exclusivelog.messages import Item, Timed

NEVER = (1 << 63) - 1  # of `MapBase.due_at`
FEW = 64  # so many entries of the heap may be out of date


def is_of_map(key: bytes | None, value: bytes | None) -> bool:
    """Is it a message of a map: does it set or remove a key, or clear the map?"""
    return key is not None or value is None


def apply_to(entries: MutableMapping[bytes, bytes], key: bytes | None, value: bytes | None) -> None:
    """Apply one message to a map of bytes."""
    if key is not None and value is not None:
        entries[key] = bytes(value)  # a plain one is not copied
    elif key is not None:
        entries.pop(key, None)
    elif value is None:
        entries.clear()
    else:
        raise ValueError("it is not a message of a map")


class Entries(_core.MapBase):
    """A map in memory; applies messages to it.

    - `holds`: which keys it holds (default: all).
    """

    def __init__(self, holds: Callable[[bytes], bool] | None = None) -> None:
        self._holds = holds
        self.reset()

    def reset(self) -> None:
        """Remove all keys."""
        self.entries: dict[bytes, bytes] = {}
        self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        self.deadlines: dict[bytes, int] = {}
        # (deadline, key), the earliest first; some are out of date. The compiled calls do not
        # change it.
        self._heap: list[tuple[int, bytes]] = []
        self.due_at = NEVER

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one message."""
        if key is not None and self._holds is not None and not self._holds(key):
            return
        apply_to(self.entries, key, value)
        if type(value) is Timed and key is not None:
            self._expire(key, value.until)
        elif not self.deadlines:
            return
        elif key is not None:
            self.deadlines.pop(key, None)
        else:
            self._forget_deadlines()

    def to_items(self) -> list[Item]:
        """Return the keys with their values."""
        if not self.deadlines:
            return list(self.entries.items())
        return [(key, self._stored(key, value)) for key, value in self.entries.items()]

    def until(self, key: bytes) -> int | None:
        """When a key expires, in ms since 1970, by the log's time; None if it does not."""
        return self.deadlines.get(key)

    def _stored(self, key: bytes, value: bytes) -> bytes:
        until = self.until(key)
        return value if until is None else Timed(value, until)

    def restore(self, items: list[Item]) -> None:
        """Replace the map by that of a snapshot."""
        if any(key is None or value is None for key, value in items):
            raise ValueError("it is not a snapshot of a map")
        self.reset()
        if self._holds is None and Timed not in {type(value) for _, value in items}:
            self.entries = {k: v for k, v in items if k is not None and v is not None}
            return
        for item in items:
            self.apply(*item)

    # ---- expiry --------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether a key is to be removed now."""
        if self.due_at == NEVER:
            return False
        self._drop_outdated()
        return self.due_at <= self.now()

    def due_items(self, most: int, most_bytes: int) -> list[Item]:
        """Return the messages that remove keys whose time has come: at most so many, and none after
        so many bytes of keys."""
        self._drop_outdated()  # else all that are taken may be
        now, size = self.now(), 0
        taken: list[tuple[int, bytes]] = []
        while self._heap and self._heap[0][0] <= now and len(taken) < most and size < most_bytes:
            taken.append(heapq.heappop(self._heap))
            size += len(taken[-1][1])
        for entry in taken:  # they stay until their removal is applied: the append may fail
            heapq.heappush(self._heap, entry)
        due = [name for until, name in taken if self.deadlines.get(name) == until]
        return [(name, None) for name in dict.fromkeys(due)]

    def _expire(self, key: bytes, until: int) -> None:
        self.deadlines[key] = until
        heapq.heappush(self._heap, (until, key))
        self.due_at = min(self.due_at, until)
        if len(self._heap) > 2 * len(self.deadlines) + FEW:
            self._heap = [(until, key) for key, until in self.deadlines.items()]
            heapq.heapify(self._heap)

    def _drop_outdated(self) -> None:
        """Find the earliest deadline: keys may have been set or removed since."""
        heap = self._heap
        while heap and self.deadlines.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        self.due_at = heap[0][0] if heap else NEVER
