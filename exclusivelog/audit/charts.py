"""What a page shows of a topic's story: no more than a browser can draw, whatever a log has.

Times are in ms since the story's beginning, which makes the page shorter.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from exclusivelog.audit.leaders import CRASHES, SHARED, Story, TakeOver, Tenure

MOST_LANES = 8  # beside one for all other engines
MOST_BARS = 6000
MOST_MARKS = 1500
MOST_SPANS = 300  # without a leader, or without a message

Chart = dict[str, Any]
Bar = list[Any]  # lane, start, end, tenures, text; until it is written, a tenure


def chart_of(story: Story) -> Chart:
    """One topic's timeline, load and silences, as page.js draws them."""
    start, end = story.span
    lanes = lanes_of(story)
    index = lane_of(lanes)
    gaps = [(t.before.end, t.after.start) for t in story.take_overs
            if t.before.end is not None and t.leaderless]  # fmt: skip
    return {
        "start": start, "end": max(end, start + 1) - start, "lanes": lanes,
        "bars": _bars(story, index, start, end), "marks": _marks(story, index, start, end),
        "gaps": _longest(gaps, start), "pauses": _longest(story.pauses, start),
        "load": _load(story, lanes, index), "silences": _silences(story, start),
    }  # fmt: skip


# ---- lanes -------------------------------------------------------------------------------


def lanes_of(story: Story) -> list[str]:
    """Engines, the busiest first, shared producers among them; then one lane for all others."""
    work: Counter[str] = Counter()
    for tenure in (*story.tenures, *story.shared):
        work[tenure.engine] += 1 + tenure.messages
    names = [name for name, _ in work.most_common()]
    if len(names) <= MOST_LANES + 1:
        return names
    return [*names[:MOST_LANES], f"{len(names) - MOST_LANES:,} others"]


def lane_of(lanes: Sequence[str]) -> Callable[[str], int]:
    """Of an engine; those without a lane of their own have the last one."""
    places = {name: place for place, name in enumerate(lanes)}
    return lambda engine: places.get(engine, len(lanes) - 1)


# ---- bars and marks ----------------------------------------------------------------------


def _bars(story: Story, index: Callable[[str], int], start: int, end: int) -> list[Bar]:
    """The tenures; where they are too many, those of a lane that lie close together as one."""
    found: list[Bar] = sorted(
        ([index(t.engine), t.start - start, (end if t.end is None else t.end) - start, 1, t]
         for t in (*story.tenures, *story.shared)), key=itemgetter(1),
    )  # fmt: skip
    apart = 0.0
    while len(found) > MOST_BARS:
        apart = max(1.0, 2 * apart, (end - start) / 20_000)
        found = _merged(found, apart)
    for bar in found:
        bar[4] = _text(bar[4]) if bar[3] == 1 else ""
    return found


def _merged(bars: Iterable[Bar], apart: float) -> list[Bar]:
    """In the order of their starts, and with less than `apart` ms between them."""
    found: list[Bar] = []
    last: dict[int, Bar] = {}
    for lane, start, end, count, tenure in bars:
        before = last.get(lane)
        if before is not None and start - before[2] < apart:
            before[2] = max(before[2], end)
            before[3] += count
        else:
            bar = last[lane] = [lane, start, end, count, tenure]
            found.append(bar)
    return found


def _text(tenure: Tenure) -> str:
    messages = f"{tenure.messages:,} messages"
    if tenure.engine == SHARED:
        return f"{tenure.producer}, shared, {messages}"
    ended = f"ended: {tenure.why}" if tenure.why else "leads still"
    return (
        f"epoch {tenure.epoch}: {tenure.producer}, engine {tenure.engine}, pid {tenure.pid}, "
        f"{messages}, {ended}"
    )


def _marks(story: Story, index: Callable[[str], int], start: int, end: int) -> list[list[int]]:
    """(lane, time, whether it crashed) where a leader crashed, was fenced or moved; of those too
    close to tell apart, the first."""
    least = (end - start) / MOST_MARKS
    found: list[list[int]] = []
    last: dict[tuple[int, bool], int] = {}
    for tenure in story.tenures:
        crashed = tenure.why in CRASHES
        if tenure.end is not None and (crashed or tenure.why in ("fenced", "hand-over")):
            lane = index(tenure.engine)
            if tenure.end - last.get((lane, crashed), -least) >= least:
                last[lane, crashed] = tenure.end
                found.append([lane, tenure.end - start, int(crashed)])
    return found


def _longest(spans: Iterable[tuple[int, int]], start: int) -> list[list[int]]:
    found = heapq.nlargest(MOST_SPANS, spans, key=lambda span: span[1] - span[0])
    return sorted([since - start, until - start] for since, until in found)


# ---- load and silences -------------------------------------------------------------------


def _load(story: Story, lanes: Sequence[str], index: Callable[[str], int]) -> Chart | None:
    """Messages of each lane in each bucket, from the first to the last; None where there are
    none."""
    buckets = [bucket for times in story.load.values() for bucket in times]
    if not buckets:
        return None
    first, step = min(buckets), story.bucket_ms
    places = (max(buckets) - first) // step + 1
    if places > 20 * len(buckets) and places > 10_000:  # clocks that were wrong for a while
        return None
    counts = [[0] * places for _ in lanes]
    for engine, times in story.load.items():
        lane = counts[index(engine)]
        for bucket, count in times.items():
            lane[(bucket - first) // step] += count
    return {"first": first - story.span[0], "step": step, "counts": counts}


def _silences(story: Story, start: int) -> list[list[Any]]:
    """(time, ms, whether it crashed, text) of the longest."""
    told = [t for t in story.take_overs if t.silence is not None]
    found = heapq.nlargest(MOST_MARKS, told, key=lambda t: t.silence or 0)
    return sorted([t.at - start, t.silence, int(t.why in CRASHES), _change(t)] for t in found)


def _change(t: TakeOver) -> str:
    return f"{t.before.producer} ({t.why or 'ended'}) to {t.after.producer}"
