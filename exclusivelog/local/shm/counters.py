"""Wake-up counters of the lock file: one for each topic, which readers wait on.

```text
4096     1024 x 64   topics, hashed: u32 counter of commits, u32 number of waiting readers
```
"""

from __future__ import annotations

from collections.abc import Sequence

from exclusivelog import _core

TOPICS, TOPIC_COUNT, TOPIC_SIZE = 4096, 1024, 64
# A reader polls this often, for a writer that died between its commit and its wake-up call.
READER_LOOK_UP_SECONDS = 1.0
POLL_SECONDS = 0.02  # where no writer can wake the reader, or not for all topics that it waits for
SPIN_NS = 40_000


class TopicCounters:
    """The counters of all topics. `shared`: writers of other processes change them."""

    def __init__(self, atomics: _core.SharedWords, shared: bool) -> None:
        self._atomics = atomics
        self._shared = shared

    def place(self, topic: int) -> int:
        """The offset of this topic's counter in the file."""
        return TOPICS + (topic * 0x9E3779B1 % TOPIC_COUNT) * TOPIC_SIZE

    def announce(self, topic: int) -> None:
        """Wake the readers that wait for this topic: something was appended."""
        at = self.place(topic)
        self._atomics.add(at, 1)
        if self._atomics.load(at + 4):
            self._atomics.wake(at)

    def wait(self, at: int, seen: int, timeout: float | None, spin: bool) -> None:
        """Wait until the counter at `at` differs from `seen`, for `timeout` seconds at most; it
        may return earlier. None: as long as a reader waits at once.

        `spin`: poll for some microseconds first. While data flows that costs reader and writer
        less than a wake-up.
        """
        if spin and self._atomics.watch(at, seen, SPIN_NS):
            return
        # A reader killed here leaves its count behind: writers then make a needless wake-up call.
        self._atomics.add(at + 4, 1)
        try:
            longest = READER_LOOK_UP_SECONDS if self._shared else POLL_SECONDS
            if timeout is not None:
                longest = min(longest, max(0.0, timeout))
            self._atomics.wait(at, seen, int(longest * 1e9))
        finally:
            self._atomics.add(at + 4, -1)

    def wait_any(self, places: Sequence[int], seen: Sequence[int], seconds: float) -> None:
        """Wait until one of the counters at `places` differs from its value in `seen`, for
        `seconds` at most; it may return earlier."""
        for at in places:
            self._atomics.add(at + 4, 1)
        try:
            longest = READER_LOOK_UP_SECONDS if self._shared else POLL_SECONDS
            if len(places) > _core.MOST_WAITED_FOR:
                longest = POLL_SECONDS
            longest = min(longest, max(0.0, seconds))
            if not self._atomics.wait_any(list(places), list(seen), int(longest * 1e9)):
                self._atomics.wait(places[0], seen[0], int(min(longest, POLL_SECONDS) * 1e9))
        finally:
            for at in places:
                self._atomics.add(at + 4, -1)
