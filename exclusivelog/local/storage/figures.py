"""The counters that all processes of a ledger share (_native/figures.h), as fields of
`EngineStats`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from exclusivelog import _core
from exclusivelog.types import Histogram

if TYPE_CHECKING:
    from exclusivelog.local.storage.ledger import Ledger

NS = 1e-9
POWERS = [2**i for i in range(_core.BUCKETS - 1)]  # the upper bounds of all buckets but the last
TIMES = (*((power << _core.TIME_UNIT) * NS for power in POWERS), math.inf)
COUNTS = (*map(float, POWERS), math.inf)


def counted(ledger: Ledger) -> dict[str, Any]:
    """The fields of `EngineStats` that come from the counters."""
    found = ledger.lockfile.figures.read()
    messages, size = (0, 0) if ledger.journal is None else ledger.journal.appended
    return {
        "appended_messages": messages + found["table_messages"],
        "appended_bytes": size + found["table_bytes"],
        "flushed_messages": Histogram(COUNTS, *_frozen(found["batch"])),
        "flush_seconds": _seconds(found["flush"]),
        "append_seconds": _seconds(found["append"]),
        "durable_seconds": _seconds(found["wait"]),
        "wake_up_seconds": _seconds(found["wake"]),
        "promotion_seconds": _seconds(found["promotion"]),
        "checkpoint_seconds": _seconds(found["checkpoint"]),
        "checkpoint_bytes": found["checkpoint_bytes"],
    }


def _seconds(histogram: tuple[list[int], int]) -> Histogram:
    counts, total = histogram
    return Histogram(TIMES, tuple(counts), total * NS)


def _frozen(histogram: tuple[list[int], int]) -> tuple[tuple[int, ...], float]:
    counts, total = histogram
    return tuple(counts), float(total)
