"""The page of a report: leaders, take-overs, silences and load, in one HTML file.

Jinja renders page.html.j2, and page.js draws the charts with Plotly in the browser. The page
contains all of this, and loads nothing. The number of elements in a chart is limited to what a
browser can draw, whatever the size of the log. Times in a chart are in ms since the first time of
its topic, which makes the page shorter.
"""

from __future__ import annotations

import datetime as dt
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

from exclusivelog.audit.leaders import (
    CRASH,
    FAILURES,
    SHARED,
    UNRECORDED,
    UNRESPONSIVE,
    LeaderReport,
    Story,
    TakeOver,
    Tenure,
    median,
)
from exclusivelog.version import __version__

MOST_LANES = 8  # beside one for all other engines
MOST_BARS = 6000
MOST_MARKS = 1500
MOST_SPANS = 300  # without a leader, or without a message

Chart = dict[str, Any]
Bar = list[Any]  # lane, start, end, number of tenures, text (until `_bars` ends: the tenure)


def chart_of(story: Story) -> Chart:
    """One topic's timeline, load and silences, as page.js draws them."""
    start, end = story.span
    lanes = lanes_of(story)
    index = lane_of(lanes)
    gaps = [
        (t.before.end, t.after.start)
        for t in story.take_overs
        if t.before.end is not None and t.leaderless
    ]
    return {
        "start": start,
        "end": max(end, start + 1) - start,
        "lanes": lanes,
        "bars": _bars(story, index, start, end),
        "marks": _marks(story, index, start, end),
        "gaps": _longest(gaps, start),
        "pauses": _longest(story.pauses, start),
        "load": _load(story, lanes, index),
        "silences": _silences(story, start),
    }


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
    """A function that returns the lane of an engine; the last lane is for all other engines."""
    places = {name: place for place, name in enumerate(lanes)}
    return lambda engine: places.get(engine, len(lanes) - 1)


# ---- bars and marks ----------------------------------------------------------------------


def _bars(story: Story, index: Callable[[str], int], start: int, end: int) -> list[Bar]:
    """The tenures as bars. If there are too many, tenures of a lane that lie close together are
    merged into one bar."""
    found: list[Bar] = sorted(
        (
            [index(t.engine), t.start - start, (end if t.end is None else t.end) - start, 1, t]
            for t in (*story.tenures, *story.shared)
        ),
        key=itemgetter(1),
    )
    apart = 0.0
    while len(found) > MOST_BARS:
        apart = max(1.0, 2 * apart, (end - start) / 20_000)
        found = _merged(found, apart)
    for bar in found:
        bar[4] = _text(bar[4]) if bar[3] == 1 else ""
    return found


def _merged(bars: Iterable[Bar], apart: float) -> list[Bar]:
    """Merge bars of a lane with less than `apart` ms between them; `bars` are in the order of their
    starts."""
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
    if tenure.engine == UNRECORDED:
        return f"epoch {tenure.epoch}: {tenure.producer}, {messages}; its grant is not recorded"
    ended = f"ended: {tenure.why}" if tenure.why else "leads still"
    return (
        f"epoch {tenure.epoch}: {tenure.producer}, engine {tenure.engine}, pid {tenure.pid}, "
        f"{messages}, {ended}"
    )


def _marks(story: Story, index: Callable[[str], int], start: int, end: int) -> list[list[int]]:
    """(lane, time, whether it crashed) for each leader that crashed, was fenced or handed over; if
    marks are too close to distinguish, only the first."""
    least = (end - start) / MOST_MARKS
    found: list[list[int]] = []
    last: dict[tuple[int, bool], int] = {}
    for tenure in story.tenures:
        crashed = tenure.why in FAILURES
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
    """The messages of each lane in each bucket, from the first to the last bucket; None without
    messages."""
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
    return sorted([t.at - start, t.silence, int(t.why in FAILURES), _change(t)] for t in found)


def _change(t: TakeOver) -> str:
    return f"{t.before.producer} ({t.why or 'ended'}) to {t.after.producer}"


MOST_TOPICS = 12  # that are drawn
SHOWN = 12  # rows of a table before the rest is folded
MOST_ROWS = 200  # of it


@dataclass
class Load:
    """What one engine did, on all topics. `led`: in ms."""

    topics: set[str] = field(default_factory=set)
    tenures: int = 0
    led: int = 0
    messages: int = 0
    crashes: int = 0
    unresponsive: int = 0


def parts() -> tuple[Any, Path]:
    """Jinja's module, and Plotly's file; ImportError that says how to install what is missing."""
    if find_spec("pyarrow") is None:
        raise _lacking("pyarrow")
    try:
        import jinja2
    except ImportError as error:
        raise _lacking("Jinja") from error
    plotly = find_spec("plotly")  # its Python module is not needed, and takes long to import
    if plotly is None or plotly.origin is None:
        raise _lacking("Plotly")
    return jinja2, Path(plotly.origin).parent / "package_data" / "plotly.min.js"


def _lacking(what: str) -> ImportError:
    return ImportError(
        f"a report needs {what}, which is not installed: pip install 'exclusivelog[report]'"
    )


def page(told: LeaderReport) -> str:
    """The whole page."""
    jinja2, plotly = parts()
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"lasting": lasting, "clock": clock, "rate": rate}
    drawn = [story for story in told.stories if story.tenures or story.messages][:MOST_TOPICS]
    rest = [story for story in told.stories if story not in drawn]
    return str(
        environment.get_template("page.html.j2").render(
            told=told,
            head=_head(told),
            engines=_engines(told.stories),
            topics=[(story, chart_of(story), _table(story)) for story in drawn],
            rest=rest,
            verdicts=sorted(told.verdicts, key=lambda verdict: verdict.holds),
            shown=SHOWN,
            failures=FAILURES,
            version=__version__,
            style=_part("page.css"),
            script=_part("page.js"),
            plotly=plotly.read_text(encoding="utf-8"),
        )
    )


def _part(name: str) -> str:
    return files("exclusivelog.audit").joinpath(name).read_text(encoding="utf-8")


def _head(told: LeaderReport) -> dict[str, Any]:
    spans = [story.span for story in told.stories if story.messages or story.tenures]
    when = ""
    if spans:
        start, end = min(start for start, _ in spans), max(end for _, end in spans)
        when = (
            f"{_date(start)} {clock(start)} to {_date(end)} {clock(end)} ({lasting(end - start)})"
        )
    failed = sum(not verdict.holds for verdict in told.verdicts)
    silences = told.silences
    tiles = [
        (f"{sum(story.messages for story in told.stories):,}", "messages", ""),
        (f"{sum(len(story.tenures) for story in told.stories):,}", "leaders", ""),
        (
            f"{sum(len(story.take_overs) for story in told.stories):,}",
            f"take-overs, {sum(story.crashes for story in told.stories):,} after a crash, "
            f"{sum(story.unresponsive for story in told.stories):,} of an unresponsive leader",
            "",
        ),
        (lasting(median(silences)) if silences else "-", "median silence", ""),
        (lasting(max(silences)) if silences else "-", "longest silence", ""),
        (
            f"{failed} failed" if failed else "sound",
            f"audit, {len(told.verdicts)} claims",
            "bad" if failed else "good",
        ),
    ]
    return {"when": when, "tiles": tiles}


def _engines(stories: Iterable[Story]) -> list[tuple[str, Load]]:
    """The busiest first."""
    found: dict[str, Load] = {}
    for story in stories:
        end = story.span[1]
        for tenure in story.tenures:
            load = found.get(tenure.engine)
            if load is None:
                load = found[tenure.engine] = Load()
            load.topics.add(story.topic)
            load.tenures += 1
            load.led += (end if tenure.end is None else tenure.end) - tenure.start
            load.messages += tenure.messages
            load.crashes += tenure.why == CRASH
            load.unresponsive += tenure.why == UNRESPONSIVE
        for tenure in story.shared:
            load = found.setdefault(tenure.engine, Load())
            load.topics.add(story.topic)
            load.messages += tenure.messages
    return sorted(found.items(), key=lambda item: (-item[1].messages, -item[1].tenures, item[0]))


def _table(story: Story) -> dict[str, Any]:
    """The take-overs of a topic: all, or those that cost most."""
    rows = list(story.take_overs)
    if len(rows) > MOST_ROWS:
        rows = sorted(heapq.nlargest(MOST_ROWS, rows, key=_cost), key=lambda t: t.at)
    reasons = Counter(t.why or "unknown" for t in story.take_overs)
    return {"rows": rows, "all": len(story.take_overs), "reasons": reasons.most_common()}


def _cost(t: TakeOver) -> int:
    return max(t.silence or 0, t.leaderless or 0)


# ---- numbers for people ------------------------------------------------------------------


def lasting(ms: float | None) -> str:
    """How long something took, to three digits.

    >>> lasting(3), lasting(1500), lasting(900_000), lasting(None)
    ('3 ms', '1.5 s', '15 min', '-')
    """
    if ms is None:
        return "-"
    if ms < 1000:
        return f"{ms:.0f} ms" if ms == int(ms) or ms >= 10 else f"{ms:.1f} ms"
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.3g} h"
    days = seconds / 86_400
    return f"{days:,.0f} d" if days >= 100 else f"{days:.3g} d"


def rate(tenure: Tenure) -> str:
    """How fast it wrote."""
    if tenure.rate is None:
        return "-"
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if tenure.rate >= factor:
            return f"{tenure.rate / factor:.3g} {unit}/s"
    return f"{tenure.rate:.3g}/s"


def _time(ms: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def _date(ms: float) -> str:
    return _time(ms).strftime("%Y-%m-%d")


def clock(ms: float) -> str:
    """A time of the day."""
    return _time(ms).strftime("%H:%M:%S.%f")[:-3]
