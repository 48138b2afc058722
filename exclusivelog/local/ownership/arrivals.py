"""Requests that wait for the end of a hand-over to their own engine (rule E3).

While a topic is being released to an engine, that engine's shared and exclusive requests would be
refused: the source still holds the topic. Those that would be granted behind the release wait
here, in the memory of their own process: nothing of them is in the ledger (rule A2). The engine's
background thread requests again once the release, or the end of the hand-over, is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from exclusivelog import _core
from exclusivelog.errors import ExclusiveLogError, WaitTimeoutError
from exclusivelog.futures import AnyFuture
from exclusivelog.local.records import Registration, StillReleasing


@dataclass(eq=False, slots=True)
class Arrival:
    """One request, with its `timeout` in seconds, and the `deadline` that follows from it (seconds
    of the monotonic clock)."""

    future: AnyFuture
    register: Callable[[], Registration]
    timeout: float | None
    deadline: float | None
    until: int = 0  # when the hand-over ends at the latest
    refusal: ExclusiveLogError | None = None

    @property
    def topic(self) -> int:
        """The topic's id."""
        return self.future.topic_id

    def timed_out(self) -> WaitTimeoutError:
        """What the request fails with at its deadline."""
        assert self.refusal is not None
        return WaitTimeoutError(
            f"the hand-over to this engine took longer than timeout={self.timeout} s: "
            f"{self.refusal}",
            holder=self.refusal.holder,
        )


class Arrivals:
    """The waiting requests of one engine, the first one first."""

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def topics(self) -> set[int]:
        """The topics that are waited for."""
        return {arrival.topic for arrival in list(self._waiting)}

    def all(self) -> list[Arrival]:
        """Every waiting request."""
        return list(self._waiting)

    def add(self, arrival: Arrival, refused: StillReleasing) -> None:
        """Let a request wait."""
        arrival.refusal, arrival.until = refused, refused.until
        self._waiting.append(arrival)

    def take(self, arrival: Arrival) -> bool:
        """Remove a request; False if it is not waiting any more."""
        try:
            self._waiting.remove(arrival)  # at once: a signal handler may do the same
        except ValueError:
            return False
        return True

    def take_future(self, future: AnyFuture) -> bool:
        """The same, for the request that settles this future."""
        found = next((each for each in self._waiting if each.future is future), None)
        return found is not None and self.take(found)

    def overdue(self) -> list[Arrival]:
        """Those whose `timeout` has passed."""
        now = time.monotonic()
        return [a for a in list(self._waiting) if a.deadline is not None and a.deadline <= now]

    def next_times(self) -> Iterable[float]:
        """In how many seconds each of them has to be looked after again."""
        now, clock = _core.now(), time.monotonic()
        for arrival in list(self._waiting):
            yield (arrival.until - now) / 1e9
            if arrival.deadline is not None:
                yield arrival.deadline - clock
