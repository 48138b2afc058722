"""Runs without pyarrow: the same rows as `exclusivelog.audit.runs`, about ten times slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from exclusivelog._core import Message
from exclusivelog.topic import Topic

Record = dict[str, Any]
AT_ONCE = 8192


def runs(topic: Topic, bucket_ms: int = 0) -> list[Record]:
    """All runs of a topic, in the order of offsets; times in ms since 1970."""
    with topic.reader() as reader:
        messages = iter(reader)
        batches = iter(lambda: list(islice(messages, AT_ONCE)), [])
        rows = (row for batch in batches for row in _rows(batch, bucket_ms))
        return [{**row, "topic": topic.name} for row in rows]


def _rows(batch: Sequence[Message], bucket_ms: int) -> Iterator[Record]:
    rows: dict[tuple[int, str, int | None], list[Message]] = {}
    ids: dict[str, list[int]] = {}
    for message in batch:
        bucket = message.publish_time // bucket_ms * bucket_ms if bucket_ms else None
        rows.setdefault((message.epoch, message.producer_name, bucket), []).append(message)
        ids.setdefault(message.producer_name, []).append(message.sequence_id)
    falls = {name: sum(b <= a for a, b in pairwise(found)) for name, found in ids.items()}
    gaps = sum(b.offset != a.offset + 1 for a, b in pairwise(batch))
    for (epoch, producer, bucket), found in rows.items():
        times = [message.publish_time for message in found]
        yield {
            "epoch": epoch,
            "producer": producer,
            "bucket": bucket,
            "first_offset": found[0].offset,
            "last_offset": found[-1].offset,
            "messages": len(found),
            "first_time": min(times),
            "last_time": max(times),
            "first_sequence_id": found[0].sequence_id,
            "last_sequence_id": found[-1].sequence_id,
            "falls": falls[producer],
            "gaps": gaps,
        }
        gaps = 0  # only the first row of a batch counts them
