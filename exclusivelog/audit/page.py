"""The page of a report: leaders, take-overs, silences and load, drawn in one HTML file."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files

from exclusivelog.audit.leaders import MOST_TOPICS, LeaderReport, Story, TakeOver, Tenure, median
from exclusivelog.version import __version__

# ---- the page --------------------------------------------------------------------------


WIDTH, LEFT, RIGHT = 1080, 132, 16
LANE, LOAD, SILENCE = 34, 170, 120
COLOURS = 8
CRASHES = ("dead", "hung")
SHOWN = 12  # rows of a table before the rest is folded


# ---- the page ----------------------------------------------------------------------------


def page(told: LeaderReport) -> str:
    """The whole page."""
    shown = told.stories[:MOST_TOPICS]
    rest = told.stories[MOST_TOPICS:]
    body = "\n".join(
        [_head(told), *(_topic(story) for story in shown), _others(rest), _audit(told)]
    )
    style = files("exclusivelog.audit").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Failover and load: {escape(told.path)}</title>\n<style>\n{style}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n<footer>exclusivelog {__version__}. Times are UTC, "
        "to the millisecond.</footer>\n</main>\n</body>\n</html>\n"
    )


def _head(told: LeaderReport) -> str:
    spans = [story.span for story in told.stories if story.messages or story.tenures]
    when = ""
    if spans:
        start, end = min(start for start, _ in spans), max(end for _, end in spans)
        when = f"{_date(start)} {_clock(start)} to {_clock(end)} ({_lasting(end - start)})"
    take_overs = [t for story in told.stories for t in story.take_overs]
    crashes = sum(t.why in CRASHES for t in take_overs)
    failed = sum(not verdict.holds for verdict in told.verdicts)
    tiles = [
        (f"{sum(story.messages for story in told.stories):,}", "messages"),
        (f"{sum(len(story.tenures) for story in told.stories):,}", "leaders"),
        (f"{len(take_overs):,}", f"take-overs, {crashes:,} after a crash"),
        (_lasting(median(told.silences)) if told.silences else "-", "median silence"),
        (_lasting(max(told.silences)) if told.silences else "-", "longest silence"),
        ("sound" if not failed else f"{failed} failed", f"audit, {len(told.verdicts)} claims"),
    ]
    kinds = ["", "", "", "", "", "bad" if failed else "good"]
    boxes = "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for (value, name), kind in zip(tiles, kinds, strict=True)
    )
    return (
        f"<header><h1>Failover and load</h1><p><code>{escape(told.path)}</code></p>"
        f'<p class="soft">{escape(when)}</p></header><div class="tiles">{boxes}</div>'
    )


def _topic(story: Story) -> str:
    parts = [f"<section><h2>{escape(story.topic)}</h2>", f'<p class="soft">{_facts(story)}</p>']
    if story.messages or story.tenures:
        parts += [_legend(story), _figure("Who led", timeline(story))]
        if any(t.silence is not None for t in story.take_overs):
            parts.append(_figure("Silence at each take-over: from the last message of one leader "
                                 "to the first of the next", silences(story)))  # fmt: skip
        if story.load:
            parts.append(_figure(f"Messages per second, by producer (in steps of "
                                 f"{_lasting(story.bucket_ms)})", load(story)))  # fmt: skip
        parts.append(_take_overs(story))
    return "\n".join([*parts, "</section>"])


def _facts(story: Story) -> str:
    crashes = sum(t.why in CRASHES for t in story.take_overs)
    facts = [f"{story.messages:,} messages", f"{len(story.tenures):,} leaders",
             f"{len(story.take_overs):,} take-overs", f"{crashes:,} crashes"]  # fmt: skip
    return " &middot; ".join(facts)


def _legend(story: Story) -> str:
    names = "".join(
        f'<span><i class="c{index % COLOURS}"></i>{escape(name)}</span>'
        for index, name in enumerate(story.producers[:COLOURS])
    )
    marks = (
        '<span><svg width="12" height="12" viewBox="-6 -6 12 12">'
        f"{_cross(0, 0)}</svg>crashed or hung</span>"
        '<span><svg width="12" height="12" viewBox="-6 -6 12 12">'
        f"{_diamond(0, 0)}</svg>fenced or moved</span>"
    )
    return f'<div class="legend">{names}{marks}</div>'


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def _take_overs(story: Story) -> str:
    rows = [_take_over(t) for t in story.take_overs]
    if not rows:
        return ""
    head = (
        "<tr><th>at</th><th>epoch</th><th>from</th><th>ended</th><th>to</th>"
        '<th class="n">leaderless</th><th class="n">silence</th>'
        '<th class="n">messages after</th><th class="n">load before</th>'
        '<th class="n">load after</th></tr>'
    )
    first, rest = rows[:SHOWN], rows[SHOWN:]
    table = f"<table>{head}{''.join(first)}</table>"
    if rest:
        table += (
            f"<details><summary>{len(rest):,} more</summary><table>{head}{''.join(rest)}</table>"
            "</details>"
        )
    return table


def _take_over(t: TakeOver) -> str:
    kind = "bad" if t.why in CRASHES else ""
    cells = [
        (_clock(t.at), ""), (f"{t.before.epoch} &rarr; {t.after.epoch}", ""),
        (_who(t.before), ""), (escape(t.why or "-"), kind), (_who(t.after), ""),
        ("-" if t.leaderless is None else _lasting(t.leaderless), "n"),
        ("-" if t.silence is None else _lasting(t.silence), "n"),
        (f"{t.after.messages:,}", "n"), (_rate_of(t.before), "n"), (_rate_of(t.after), "n"),
    ]  # fmt: skip
    return "<tr>" + "".join(f'<td class="{kind}">{text}</td>' for text, kind in cells) + "</tr>"


def _rate_of(tenure: Tenure) -> str:
    return "-" if tenure.rate is None else _rate(tenure.rate)


def _who(tenure: Tenure) -> str:
    return f'{escape(tenure.producer)} <span class="soft">pid {tenure.pid}</span>'


def _others(stories: Sequence[Story]) -> str:
    if not stories:
        return ""
    rows = "".join(
        f'<tr><td>{escape(s.topic)}</td><td class="n">{s.messages:,}</td>'
        f'<td class="n">{len(s.tenures):,}</td><td class="n">{len(s.take_overs):,}</td></tr>'
        for s in stories
    )
    return (
        '<section><h2>Other topics</h2><table><tr><th>topic</th><th class="n">messages</th>'
        f'<th class="n">leaders</th><th class="n">take-overs</th></tr>{rows}</table></section>'
    )


def _audit(told: LeaderReport) -> str:
    rows = "".join(
        f'<tr><td class="{"good" if v.holds else "bad"}">{"ok" if v.holds else "FAILED"}</td>'
        f"<td>{escape(v.topic)}</td><td>{escape(v.claim)}</td><td>{escape(v.facts)}</td></tr>"
        for v in sorted(told.verdicts, key=lambda verdict: verdict.holds)
    )
    return (
        "<section><h2>Audit</h2><table><tr><th></th><th>topic</th><th>claim</th><th>facts</th>"
        f"</tr>{rows}</table></section>"
    )


# ---- pictures ----------------------------------------------------------------------------


class Scale:
    """Times, in ms, as x."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, max(end, start + 1)

    def __call__(self, time: float) -> float:
        """The place of a time."""
        share = (time - self.start) / (self.end - self.start)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 2)

    def axis(self, y: float) -> str:
        """A line with the times below."""
        step = nice_step((self.end - self.start) / 7)
        first = math.ceil(self.start / step) * step
        ticks = "".join(
            f'<line class="grid" x1="{self(t)}" x2="{self(t)}" y1="0" y2="{y}"/>'
            f'<text x="{self(t)}" y="{y + 16}" text-anchor="middle">{_label(t, step)}</text>'
            for t in range(int(first), self.end + 1, int(step))
        )
        return f'{ticks}<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'


TIME_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000, 60_000,
              120_000, 300_000, 600_000, 1_800_000, 3_600_000, 7_200_000, 21_600_000, 43_200_000,
              86_400_000, 604_800_000)  # fmt: skip


def nice_step(least: float) -> int:
    """The first round length of time, in ms, that is not below `least`.

    >>> nice_step(0.3), nice_step(1300), nice_step(40_000)
    (1, 2000, 60000)
    """
    return next((step for step in TIME_STEPS if step >= least), TIME_STEPS[-1])


def _svg(height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height + 24}" role="img" preserveAspectRatio="xMidYMid meet">'
        f"{''.join(parts)}</svg>"
    )


def timeline(story: Story) -> str:
    """A lane for each producer, a bar for each of its tenures, a mark where it was lost."""
    scale, lanes = Scale(*story.span), {name: i for i, name in enumerate(story.producers)}
    height = LANE * len(lanes)
    parts = [scale.axis(height)]
    parts += [_lane(name, index) for name, index in lanes.items()]
    parts += [_gap(t, scale, height) for t in story.take_overs]
    for tenure in story.shared:
        parts.append(_bar(tenure, scale, lanes[tenure.producer], "shared"))
    for tenure in story.tenures:
        parts.append(_bar(tenure, scale, lanes[tenure.producer], ""))
    parts += [_end(t, scale, lanes[t.producer]) for t in story.tenures]
    return _svg(height, parts)


def _lane(name: str, index: int) -> str:
    y = index * LANE + LANE / 2
    text = name if len(name) <= 18 else name[:17] + "\u2026"
    return (
        f'<text class="name" x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(text)}'
        f"<title>{escape(name)}</title></text>"
        f'<line class="lane" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
    )


def _bar(tenure: Tenure, scale: Scale, lane: int, kind: str) -> str:
    end = scale.end if tenure.end is None else tenure.end
    x, width = scale(tenure.start), max(1.5, scale(end) - scale(tenure.start))
    y = lane * LANE + 7
    ended = f"ended: {tenure.why}" if tenure.why else "leads"
    title = (
        f"epoch {tenure.epoch}: {tenure.producer} (engine {tenure.engine or '-'}, pid "
        f"{tenure.pid or '-'}), {_clock(tenure.start)} to {_clock(end)}, "
        f"{_lasting(end - tenure.start)}, {tenure.messages:,} messages; "
        f"{'shared' if kind else ended}"
    )
    label = ""
    if width > 9 * len(str(tenure.epoch)) + 6 and not kind:
        label = (f'<text class="inside" x="{x + width / 2:.2f}" y="{y + LANE / 2 - 2.5}" '
                 f'text-anchor="middle">{tenure.epoch}</text>')  # fmt: skip
    return (
        f'<g><title>{escape(title)}</title><rect class="c{lane % COLOURS} {kind}" x="{x}" y="{y}" '
        f'width="{width:.2f}" height="{LANE - 14}" rx="3"/>{label}</g>'
    )


def _gap(t: TakeOver, scale: Scale, height: float) -> str:
    if t.before.end is None or t.why not in CRASHES:
        return ""
    x = scale(t.before.end)
    width = max(1.0, scale(t.after.start) - x)
    return f'<rect class="gap" x="{x}" y="0" width="{width:.2f}" height="{height}"/>'


def _end(tenure: Tenure, scale: Scale, lane: int) -> str:
    if tenure.end is None:
        return ""
    x, y = scale(tenure.end), lane * LANE + LANE / 2
    if tenure.why in CRASHES:
        return _cross(x, y)
    return _diamond(x, y) if tenure.why in ("fenced", "hand-over") else ""


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 4} {y - 4}l8 8m0 -8l-8 8"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path class="diamond" d="M{x} {y - 5}l5 5l-5 5l-5 -5z"/>'


def silences(story: Story) -> str:
    """A needle for each take-over, as high as its silence was long."""
    scale = Scale(*story.span)
    found = [(t, t.silence) for t in story.take_overs if t.silence is not None]
    top = nice_top(max(silence for _, silence in found) or 1)
    y = _height(SILENCE, top)
    parts = [scale.axis(SILENCE), _rule(y, top, lambda ms: _lasting(ms))]
    for t, silence in found:
        kind = "bad" if t.why in CRASHES else "plain"
        title = (f"{_clock(t.at)}: {t.before.producer} ({t.why or 'ended'}) to {t.after.producer}, "
                 f"{_lasting(silence)} without a message")  # fmt: skip
        x = scale(t.at)
        parts.append(
            f'<g class="needle {kind}"><title>{escape(title)}</title>'
            f'<line x1="{x}" x2="{x}" y1="{SILENCE}" y2="{y(silence)}"/>'
            f'<circle cx="{x}" cy="{y(silence)}" r="4"/></g>'
        )
    return _svg(SILENCE, parts)


def load(story: Story) -> str:
    """Messages per second, the producers' shares on top of one another."""
    scale, seconds = Scale(*story.span), story.bucket_ms / 1000
    starts = sorted({start for buckets in story.load.values() for start in buckets})
    totals = {s: sum(b.get(s, 0) for b in story.load.values()) / seconds for s in starts}
    top = nice_top(max(totals.values()))
    y = _height(LOAD, top)
    parts = [scale.axis(LOAD), _rule(y, top, lambda rate: _rate(rate))]
    base = dict.fromkeys(starts, 0.0)
    for index, name in enumerate(story.producers):
        buckets = story.load.get(name, {})
        for start in sorted(buckets):
            rate = buckets[start] / seconds
            x = max(scale(start), float(LEFT))
            width = max(0.5, scale(min(start + story.bucket_ms, scale.end)) - x)
            high, low = y(base[start] + rate), y(base[start])
            title = f"{_clock(start)}: {name}, {_rate(rate)}"
            parts.append(
                f'<rect class="c{index % COLOURS} load" x="{x:.2f}" y="{high:.2f}" '
                f'width="{width:.2f}" height="{low - high:.2f}">'
                f"<title>{escape(title)}</title></rect>"
            )
            base[start] += rate
    for t in story.take_overs:
        x, kind = scale(t.at), "bad" if t.why in CRASHES else ""
        parts.append(f'<line class="change {kind}" x1="{x}" x2="{x}" y1="0" y2="{LOAD}"/>')
    return _svg(LOAD, parts)


def _height(height: float, top: float) -> Callable[[float], float]:
    return lambda value: round(height - value / top * (height - 10), 2)


def _rule(y: Callable[[float], float], top: float, text: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
        f'<text x="{LEFT - 10}" y="{y(value) + 4}" text-anchor="end">{text(value)}</text>'
        for value in (0, top / 2, top)
    )


# ---- numbers for people ------------------------------------------------------------------


def nice_top(most: float) -> float:
    """The end of an axis: the first round number that is not below.

    >>> nice_top(7), nice_top(13), nice_top(2600)
    (8, 15.0, 3000)
    """
    power: float = 10 ** math.floor(math.log10(most))
    return next(f for f in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if f * power >= most) * power


def _lasting(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.0f} ms" if ms == int(ms) or ms >= 10 else f"{ms:.1f} ms"
    seconds = ms / 1000
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.3g} d"


def _rate(rate: float) -> str:
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:.3g} {unit}/s"
    return f"{rate:.3g}/s"


def _time(ms: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def _date(ms: float) -> str:
    return _time(ms).strftime("%Y-%m-%d")


def _clock(ms: float) -> str:
    return _time(ms).strftime("%H:%M:%S.%f")[:-3]


def _label(ms: float, step: int) -> str:
    if step >= 86_400_000:
        return _date(ms)
    if step >= 60_000:
        return _time(ms).strftime("%H:%M")
    return _time(ms).strftime("%H:%M:%S") if step >= 1000 else _clock(ms)[6:]
