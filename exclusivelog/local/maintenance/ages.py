"""Which messages of a topic are older than `max_age`, where wall clocks may be wrong.

Retention cannot be undone, so it must not follow a clock that has just been set ten years ahead.
Two things hold it back, both by the monotonic clock:

- What this process has seen arrive within `max_age` stays.
- Messages that have been due for more than an hour are *overdue*. Retention that runs removes
  messages as soon as they are due; so either none has run for a while, or the clock has jumped.
  Overdue messages go an hour later. If any process on the ledger finds meanwhile that they are
  not overdue, because the clock was put back or its own is right, the hour begins anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from exclusivelog import _core
from exclusivelog.local.shm.lockfile import boot_id

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

log = logging.getLogger("exclusivelog")

ARRIVALS_RESOLUTION = 0.01  # of max_age: so much later than needed may a message go
PATIENCE_SECONDS = 3600.0


class Arrivals:
    """How many messages one topic had when, as seen by this process.

    What has arrived within `max_age` stays, whatever any wall clock says: a message that was sent
    under a clock that is behind seems old at once, and to a clock ahead all messages do.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []  # (time of the monotonic clock, next offset)

    def note(self, next_offset: int, max_age: float) -> int:
        """The topic goes up to `next_offset` now; the offset from which on all messages have
        arrived within `max_age` seconds, for certain."""
        now = time.monotonic()
        if not self._seen or now - self._seen[-1][0] >= max_age * ARRIVALS_RESOLUTION:
            self._seen.append((now, next_offset))
        while len(self._seen) > 1 and self._seen[1][0] <= now - max_age:
            del self._seen[0]
        return self._seen[0][1]


class Ages:
    """Decides for one topic, from round to round of a retention worker."""

    def __init__(self, ledger: Ledger, topic: int) -> None:
        self._ledger = ledger
        self._topic = topic
        self._arrivals = Arrivals()
        self._told = False

    def first_to_keep(
        self, row: _core.TopicRow, max_age: float, first_since: Callable[[int], int]
    ) -> int:
        """The first offset that must stay. `first_since(ms)` is the first one published then or
        later, as far as wall clocks can tell."""
        young = self._arrivals.note(row.next_offset, max_age)
        oldest = int((time.time() - max_age) * 1000)
        first = min(young, first_since(oldest))
        long_ago = oldest - int(PATIENCE_SECONDS * 1000)
        if first <= row.first_offset or first_since(long_ago) < first:
            self._forget()
        # After max_age in this state they are that old, whatever the clock says.
        elif not self._has_waited(min(PATIENCE_SECONDS, max_age)):
            return row.first_offset
        return max(row.first_offset, first)

    def _forget(self) -> None:
        self._told = False
        with self._ledger.read() as tables:
            if tables.retention.overdue(self._topic) is None:
                return
        with self._ledger.write_concurrent() as tables:
            tables.retention.put_overdue(self._topic, None)

    def _has_waited(self, wait: float) -> bool:
        now = _core.now()
        with self._ledger.read() as tables:
            noted = tables.retention.overdue(self._topic)
            name = tables.topics.get(self._topic).name
        if noted is not None and noted[0] == boot_id() and noted[1] <= now:
            return now - noted[1] >= wait * 1e9
        with self._ledger.write_concurrent() as tables:
            tables.retention.put_overdue(self._topic, (boot_id(), now))
        if not self._told:
            self._told = True
            log.warning(
                "%s: retention of topic %r: messages are older than max_age by more than an hour. "
                "Was the clock set ahead? If not, they are removed in %.0f s",
                self._ledger.path, name, wait,
            )  # fmt: skip
        return wait == 0
