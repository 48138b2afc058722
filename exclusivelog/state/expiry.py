"""`Expiring`: keys of a map that expire, and who removes them (rule I2).

The owner of the topic removes a key by a message, as a write does: in the background once its time
has come, and before every write. If no owner does so in time, because it has ended or is stopped,
another process that has the map open becomes the owner for that. All waits are alarms of the
engine, one for each map, at its earliest deadline; a map without such keys has none.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

from exclusivelog import _core, logs
from exclusivelog.arguments import as_int
from exclusivelog.errors import (
    EngineClosedError,
    OwnershipLostError,
    StateError,
    TopicNotFoundError,
    TopicTerminatedError,
)
from exclusivelog.messages import Item
from exclusivelog.producer import Producer
from exclusivelog.state.entries import NEVER, Entries
from exclusivelog.state.shared import Shared, Write

log = logging.getLogger(__name__)

Ttl = float | dt.timedelta  # seconds

LONGEST_TTL = dt.timedelta(days=36_525)
# Keys in one append, and their bytes: other writers wait meanwhile, and it must fit into a record.
REMOVED_AT_ONCE, REMOVED_BYTES = 1000, 1 << 20
# Deadlines that are close to one another share an append.
PAUSE_SECONDS = 0.02
# So much later at least, a process that is not the owner removes what the owner has not. It is a
# random time between these, so that only one of many processes does.
LATE_SECONDS = 0.25, 0.75
TOPIC_SECONDS = 0.5  # it waits so long for the topic: other writes of this process wait for that
RETRY_SECONDS = 1.0, 60.0  # after an error; twice as long after each, up to the last
# A clock that was set does not move an alarm: look again after so long.
LONGEST_ALARM_SECONDS = 60.0


def ttl_ms(ttl: Any) -> int:
    """Return a time to live in ms; TypeError or ValueError if it is invalid.

    >>> ttl_ms(dt.timedelta(seconds=2)), ttl_ms(0.0001)
    (2000, 1)
    """
    takes = f"ttl={ttl!r}: it takes seconds above 0, or a timedelta, up to {LONGEST_TTL.days} days"
    seconds = ttl.total_seconds() if isinstance(ttl, dt.timedelta) else as_int(ttl)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(takes)
    if not 0 < seconds <= LONGEST_TTL.total_seconds():
        raise ValueError(takes)
    return math.ceil(seconds * 1000)


ENDED = (
    EngineClosedError,
    OwnershipLostError,
    StateError,
    TopicNotFoundError,
    TopicTerminatedError,
)


class Expiring(Shared):
    """The base of `SharedMap`: removes the keys that have expired."""

    _content: Entries

    def __init__(self, *args: Any) -> None:
        self._alarm_at = math.inf  # when there is an alarm, by the monotonic clock
        self._rests_until = 0.0  # no alarm before
        self._failed_for = 0.0  # seconds until the last attempt that failed was repeated
        self._late_ms = int(1000 * random.uniform(*LATE_SECONDS))
        super().__init__(*args)
        if self._content.due_at != NEVER:
            self._see_log()
        self._set_alarm()

    def _deadline(self, lasts: int) -> int:
        """Return the log's time in so many ms; for a write."""
        self._see_log()
        return self._content.now() + lasts

    def _see_log(self) -> None:
        """Let the clock not be behind that of the owners before."""
        self._content.see(self._engine.topic_store(self.topic.id).latest().last_publish_time)

    # ---- by writers ----------------------------------------------------------------------

    def _prepare_to_write(self) -> None:
        super()._prepare_to_write()
        if self._content.due_at != NEVER:
            self._see_log()

    def _catch_up(self) -> None:
        super()._catch_up()
        self._replica_was_read()

    def _replica_was_read(self) -> None:
        self._content.see(self._replica.read_to_time)
        self._set_alarm()

    def _write(self, producer: Producer, write: Write[Any]) -> None:
        while write.compute != self._removals and self._content.is_due():
            write.appends = True  # an error here is one of the write: a second attempt has it, too
            if not self._send(producer, self._removals(self._content)[0], write):
                return
        super()._write(producer, write)

    def _removals(self, content: Entries) -> tuple[list[Item], None]:
        return content.due_items(REMOVED_AT_ONCE, REMOVED_BYTES), None

    def _has_expired(self) -> bool:
        return self._content.is_due()

    def _remove_expired(self) -> None:
        self._remove_some(self._time_limit())

    def _take_back(self, first: int, items: list[Item]) -> None:
        super()._take_back(first, items)
        self._set_alarm()

    def _send(self, producer: Producer, items: list[Item], write: Write[Any]) -> bool:
        sent = super()._send(producer, items, write)
        self._set_alarm()
        return sent

    # ---- in the background ---------------------------------------------------------------

    def _set_alarm(self) -> None:
        """Have `_rang` called when the next key is due here."""
        due_at = self._due_here()
        if due_at == NEVER or self._engine.readonly:
            return
        now, left = _core.monotonic(), (due_at - self._content.now()) / 1000
        at = max(now + min(left, LONGEST_ALARM_SECONDS), self._rests_until)
        if at < self._alarm_at - PAUSE_SECONDS:  # the log's time may have jumped since it was set
            self._alarm_at = at
            ring = functools.partial(_ring, weakref.ref(self), at)
            try:
                self._engine.call_after(max(0.0, at - now), ring)
            except BaseException:  # an interrupt: there may be none, so the next call sets it
                self._alarm_at = math.inf
                raise

    def _expect(self, offset: int, until: int) -> None:
        """A watch has read that a key expires. If the map has not, look by then."""
        if self._replica.position <= offset and until < self._content.due_at:
            self._content.due_at = until
            self._set_alarm()

    def _due_here(self) -> int:
        """The log's time at which this process removes a key next."""
        due_at = self._content.due_at
        is_owner = self._ownership.producer is not None
        return due_at if is_owner or due_at == NEVER else due_at + self._late_ms

    def _rang(self, alarm_at: float) -> None:
        """Remove the keys that are due here. Called in a thread of its own, by an alarm."""
        if alarm_at != self._alarm_at:
            return  # an earlier alarm has replaced it
        self._alarm_at = 0.0  # none is set meanwhile
        pause = PAUSE_SECONDS
        try:
            self._remove_due()
            self._failed_for = 0.0
        except ENDED:
            return  # nothing can be removed any more
        except Exception as error:  # another application owns the topic, or the disk is full
            pause = self._pause_after(error)
        self._rests_until = _core.monotonic() + pause
        self._alarm_at = math.inf
        self._set_alarm()

    def _pause_after(self, error: Exception) -> float:
        first, longest = RETRY_SECONDS
        if not self._failed_for:
            logs.emit(
                log,
                logs.NOT_EXPIRED,
                ledger=self.topic.engine.path,
                topic=self.topic.name,
                reason=str(error),
            )
        self._failed_for = min(max(first, 2 * self._failed_for), longest)
        return self._failed_for

    def _remove_due(self) -> None:
        if self._ownership.producer is None:
            self._read(int, latest=True)  # the owner has removed them, as a rule
        while self._is_due_here():
            self._remove_some(_core.monotonic() + TOPIC_SECONDS)

    def _is_due_here(self) -> bool:
        with self._lock:
            self._ownership.is_held()  # `producer` is None if not
            return self._content.is_due() and self._due_here() <= self._content.now()

    def _remove_some(self, end: float | None) -> None:
        write: Write[None] = Write(self._removals, None)
        try:
            with self._writing:
                self._check_open()
                self._replica.check()
                self._write_once(write, end)
        finally:
            self._settled(write.appended, now=True)

    def _write_once(self, write: Write[None], end: float | None) -> None:
        """Write as the owner. A process that was not the owner releases the topic again."""
        was_owner = self._ownership.is_held()
        producer = self._ownership.acquire(end, keep=not was_owner)
        try:
            with self._lock:
                if self._ownership.is_by(producer):
                    self._write(producer, write)
        finally:
            if not was_owner:
                self._ownership.release()


def expecting(shared: Expiring) -> Callable[[int, int], None]:
    """`_expect`, of a map that this does not keep."""
    found = weakref.ref(shared)

    def expect(offset: int, until: int) -> None:
        told = found()
        if told is not None and not told._closing:
            told._expect(offset, until)

    return expect


def _ring(shared: weakref.ref[Expiring], alarm_at: float) -> None:
    found = shared()
    if found is not None and not found._closing:
        found._rang(alarm_at)
