"""Counters of one engine: messages sent, and how long it took to read them back.

>>> figures = Figures()
>>> figures.sent(messages=3, size=90, seconds=0.0021)
>>> stats = figures.counted()
>>> stats["appended_messages"], stats["durable_seconds"].count
(3, 1)
>>> 0.0021 <= stats["durable_seconds"].quantile(0.5) <= 0.0042
True
"""

from __future__ import annotations

import math
from typing import Any

from exclusivelog.types import Histogram

__all__ = ["Figures"]

BUCKETS = 28
TIMES = (*(2.0**i / 1e6 for i in range(BUCKETS - 1)), math.inf)  # seconds, from a microsecond on
COUNTS = (*(2.0**i for i in range(BUCKETS - 1)), math.inf)


class _Counter:
    """How often values fell between two powers of two."""

    def __init__(self, bounds: tuple[float, ...], unit: float) -> None:
        self._bounds, self._unit = bounds, unit
        self._counts = [0] * len(bounds)
        self._sum = 0.0

    def add(self, value: float) -> None:
        bucket = int(value * self._unit).bit_length()
        self._counts[min(bucket, len(self._counts) - 1)] += 1
        self._sum += value

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


class Figures:
    """Counters without a lock: concurrent threads may lose some counts."""

    def __init__(self) -> None:
        self._messages = self._bytes = 0
        self._records = _Counter(COUNTS, 1)
        self._seconds = _Counter(TIMES, 1e6)

    def sent(self, messages: int, size: int, seconds: float) -> None:
        """Count messages that were appended together, and read back as counting after `seconds`."""
        self._messages += messages
        self._bytes += size
        self._records.add(messages)
        self._seconds.add(seconds)

    def counted(self) -> dict[str, Any]:
        """The fields of `EngineStats` that come from the counters."""
        return {
            "appended_messages": self._messages,
            "appended_bytes": self._bytes,
            "flushed_messages": self._records.histogram(),
            "durable_seconds": self._seconds.histogram(),
        }
