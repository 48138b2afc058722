"""The page of a report, in a browser: at the widths of a phone, a tablet and a desk, by day and by
night, on paper, and for as many changes of owner as years bring."""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.audit import read_changes, report
from exclusivelog.audit.leaders import FAILURES, Change, Changes, stories_of
from exclusivelog.audit.page import MOST_BARS, MOST_LANES, _engines, chart_of
from testing.browser import browser, complaints, problems, resize
from testing.changes import write_changes
from testing.processes import PATIENCE, until

pytestmark = pytest.mark.once

WIDTHS = (360, 768, 1280)
MARKED = "<b>two</b>"  # Plotly would make its texts of this bold
HOSTILE = "</script><script>alert(1)</script>&<b>"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real leaders and messages, a name that is no HTML, and a long history of owners."""
    path = str(tmp_path_factory.mktemp("report") / "log")
    with xl.open(path, name=HOSTILE) as one, xl.open(path, name=MARKED) as two:
        for topic in "payments", "audit":
            one.topic(topic)
        write_changes(one, 3_000, ("payments", "audit"), engines=60)
        for _ in range(3):
            for engine in one, two:
                with engine.topic("orders").producer("exclusive_with_fencing") as producer:
                    producer.send_many([b"x"] * 20)
    return path


@pytest.fixture(scope="module")
def page(ledger: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("page") / "page.html"
    with xl.open(ledger, readonly=True) as engine:
        report(engine, to)
    return to


@pytest.fixture(scope="module")
def shown(page: Path) -> Iterator[Any]:
    with browser(WIDTHS[0]) as found:
        found.get(page.as_uri())
        yield found


def draw_all(page: Any) -> int:
    """Scroll to each chart, as a reader does; how many there are."""
    charts = page.execute_script("return document.querySelectorAll('.chart').length")
    for index in range(charts):
        page.execute_script(
            "document.querySelectorAll('.chart')[arguments[0]].scrollIntoView()", index
        )
        until(lambda index=index: drawn(page, index))
    return int(charts)


def drawn(page: Any, index: int) -> bool:
    width = page.execute_script(
        "const chart = document.querySelectorAll('.chart')[arguments[0]];"
        "const svg = chart.querySelector('svg.main-svg');"
        "return svg ? svg.getBoundingClientRect().width - chart.clientWidth : null",
        index,
    )
    return width is not None and abs(width) < 2


def emulate(page: Any, scheme: str, medium: str = "") -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": medium, "features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_text_can_be_read_and_nothing_overflows(shown: Any, width: int, scheme: str) -> None:
    resize(shown, width, 900)
    emulate(shown, scheme)
    assert draw_all(shown) == 3
    late = time.monotonic() + PATIENCE / 4
    back = shown.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 300) == (scheme == "dark")
    until(lambda: not problems(shown) or time.monotonic() > late)  # the colours have changed
    assert problems(shown) == []
    assert complaints(shown) == []


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_drawn_stands_out(shown: Any, scheme: str) -> None:
    emulate(shown, scheme)
    ratios = shown.execute_script("""
        const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
        const light = (hex) => rgb(hex).map((v) => v <= 0.03928 ? v / 12.92
            : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const style = getComputedStyle(document.documentElement);
        const value = (name) => style.getPropertyValue(name).trim();
        const names = ["0","1","2","3","4","5","6","7"].map((n) => "--c" + n)
            .concat(["--bad", "--pause", "--others", "--axis"]);
        return names.map((name) => {
            const [high, low] = [light(value(name)), light(value("--card"))].sort((a, b) => b - a);
            return [name, (high + 0.05) / (low + 0.05)];
        });""")
    assert [(name, ratio) for name, ratio in ratios if ratio < 3] == []  # WCAG 1.4.11
    assert len(ratios) == 12


@pytest.mark.long
def test_one_can_zoom_into_the_timeline(shown: Any) -> None:
    resize(shown, WIDTHS[-1], 900)
    draw_all(shown)
    count = """
        const chart = [...document.querySelectorAll('.chart')][arguments[0]];
        const [bars] = chart.data;
        const [from, to] = chart.layout.xaxis.range.map((time) => new Date(time));
        return [bars.x.length, to - from, Math.min(...bars.x)];"""
    titles = [h2.text for h2 in shown.find_elements("css selector", "h2")]
    index = titles.index("payments") - 1  # the first is about engines
    bars, length, least = shown.execute_script(count, index)
    figure = shown.find_elements("css selector", "figure")[index]
    button = figure.find_element("css selector", "[data-zoom=in]")
    for _ in range(3):
        shown.execute_script("arguments[0].click()", button)
    nearer = shown.execute_script(count, index)
    assert nearer[1] == pytest.approx(length / 8, rel=0.01)
    assert nearer[2] < least  # what was one bar is several
    shown.execute_script(
        "arguments[0].click()", figure.find_element("css selector", "[data-zoom=all]")
    )
    assert shown.execute_script(count, index)[:2] == [bars, length]
    assert complaints(shown) == []


@pytest.mark.long
def test_on_paper_it_is_light_and_complete(shown: Any) -> None:
    resize(shown, 718, 1000)  # A4 without its margins
    emulate(shown, "dark", "print")
    until(lambda: all(drawn(shown, index) for index in range(3)))
    assert problems(shown) == []
    printed = shown.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    emulate(shown, "light")
    assert complaints(shown) == []


@pytest.mark.long
def test_a_page_loads_nothing_and_shows_names_as_they_are(shown: Any, page: Path) -> None:
    found = shown.execute_script("return performance.getEntriesByType('resource').length")
    assert found == 0
    assert HOSTILE in shown.find_element("tag name", "body").text
    loads = []

    class Outline(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            loads.extend(value for name, value in attrs if name in ("src", "href"))

    Outline().feed(page.read_text())
    assert loads == []


@pytest.mark.long
def test_the_charts_show_names_as_they_are_and_no_markup(shown: Any) -> None:
    draw_all(shown)
    texts = shown.execute_script(
        "return [...document.querySelectorAll('.chart text')].map((each) => each.textContent)"
    )
    assert MARKED in texts
    assert any(text.startswith(HOSTILE[:11]) for text in texts)
    bold = "return [...document.querySelectorAll('.chart tspan')].map((each) => each.textContent)"
    assert "two" not in shown.execute_script(bold)


@pytest.mark.long
def test_what_the_checks_above_look_for_is_found() -> None:
    with browser(360) as page:
        page.get(
            "data:text/html,<meta name=viewport content=width=device-width>"
            "<p style='font-size:9px'>small<p style='color:%23999'>pale"
            "<p style='width:900px;text-align:right'>far<script>x()</script>"
        )
        found = "; ".join(problems(page))
        for what in ("9 px: small", "contrast 2.85: pale", "outside", "overflows by"):
            assert what in found
        assert "x is not defined" in complaints(page)[0]


# ---- what is drawn ---------------------------------------------------------------------------


def test_the_busiest_engines_have_lanes_and_the_others_one(ledger: str) -> None:
    with xl.open(ledger, readonly=True) as engine:
        changes = read_changes(engine)
        events = [e for e in engine.history("payments") if e.kind in ("grant", "release", "evict")]
    assert changes.of["payments"] == [Change.of(event) for event in events]
    [story] = stories_of({"payments": 1000}, [], changes)
    chart = chart_of(story)
    names = {tenure.engine for tenure in story.tenures}
    assert chart["lanes"][-1] == f"{len(names) - MOST_LANES} others"
    assert len(chart["lanes"]) == MOST_LANES + 1
    counts = [sum(t.engine == name for t in story.tenures) for name in chart["lanes"][:-1]]
    assert counts == sorted(counts, reverse=True)
    assert sum(bar[3] for bar in chart["bars"]) == len(story.tenures)
    assert sum(mark[2] for mark in chart["marks"]) <= sum(t.why in FAILURES for t in story.tenures)
    assert chart["gaps"]


@pytest.mark.long
def test_a_page_has_no_more_bars_than_a_browser_draws() -> None:
    found = [
        Change(10 * n + late, "t", n, kind, "closed", f"p{n % 5}", f"p{n % 5}", 1)
        for n in range(3 * MOST_BARS)
        for late, kind in ((0, "grant"), (9, "release"))
    ]
    [story] = stories_of({"t": 1000}, [], Changes().add(found))
    bars = chart_of(story)["bars"]
    assert len(bars) <= MOST_BARS
    assert sum(bar[3] for bar in bars) == 3 * MOST_BARS


def test_an_unresponsive_leader_is_not_counted_as_a_crash() -> None:
    """It may have gone on, and was fenced then."""
    ends = [
        ("evict", "dead"),
        ("evict", "hung"),
        ("evict", "hung"),
        ("evict", "fenced"),
        ("release", "closed"),
    ]
    found = [
        Change(10 * n + late, "t", n + 1, kind, why, f"p{n}", "e", 1)
        for n, end in enumerate([*ends, ("release", "closed")])
        for late, (kind, why) in ((0, ("grant", "request")), (9, end))
    ]
    [story] = stories_of({"t": 1000}, [], Changes().add(found))
    assert (story.crashes, story.unresponsive, len(story.take_overs)) == (1, 2, 5)
    [(_, load)] = _engines([story])
    assert (load.crashes, load.unresponsive) == (1, 2)


def run(first: int, last: int, epoch: int = 1, producer: str = "p") -> dict[str, Any]:
    return {
        "topic": "t",
        "epoch": epoch,
        "producer": producer,
        "first_time": first,
        "last_time": last,
        "messages": 5,
        "bucket": first // 10 * 10,
    }


def granted(time: int, epoch: int) -> Change:
    return Change(time, "t", epoch, "grant", "request", "p", "e", 1)


def test_a_leader_without_a_recorded_end_leads_still_only_if_it_owns_the_topic() -> None:
    changes = Changes().add([granted(5, 1)])
    [story] = stories_of({"t": 10}, [run(6, 9)], changes, {("t", 1)})
    assert (story.tenures[0].end, story.tenures[0].why) == (None, "")
    assert "leads still" in chart_of(story)["bars"][0][4]
    [story] = stories_of({"t": 10}, [run(6, 9)], changes)
    assert (story.tenures[0].end, story.tenures[0].why) == (9, "lost")


def test_an_owner_whose_grant_is_no_longer_recorded_is_no_shared_producer() -> None:
    changes = Changes(complete=False).add([granted(50, 7)])
    [story] = stories_of({"t": 10}, [run(6, 9, 3), run(51, 52, 7), run(60, 61, 7, "q")], changes)
    assert [(t.engine, t.epoch) for t in story.shared] == [
        ("not recorded", 3),
        ("shared producers", 7),
    ]
    assert "epoch 3: p, 5 messages; its grant is not recorded" in chart_of(story)["bars"][0][4]


def test_the_silence_at_a_take_over_begins_with_the_last_message_of_any_producer() -> None:
    release = Change(20, "t", 1, "release", "closed", "p", "e", 1)
    changes = Changes().add([granted(5, 1), release, granted(100, 2)])
    found = [run(6, 9), run(30, 90, 1, "shared"), run(104, 110, 2)]
    [story] = stories_of({"t": 10}, found, changes)
    assert [t.silence for t in story.take_overs] == [14]


def test_a_clock_that_is_set_back_makes_no_tenure_negative() -> None:
    changes = [granted(500, 1), Change(400, "t", 1, "release", "closed", "p", "e", 1)]
    [story] = stories_of({"t": 10}, [], Changes().add(changes))
    assert (story.tenures[0].start, story.tenures[0].end) == (500, 500)


def test_grants_before_a_topic_was_restored_are_not_looked_for() -> None:
    restored = Change(5, "t", 6, "restored", "copies", "?", "", 0)
    changes = Changes().add([restored, granted(9, 7)])
    assert changes.since("t") == 7
    assert changes.since("other") == 0


def test_pauses_without_a_message_are_marked() -> None:
    grant = Change(0, "t", 1, "grant", "request", "p", "p", 1)
    [story] = stories_of({"t": 10}, [run(0, 9), run(12, 19), run(70, 79)], Changes().add([grant]))
    assert chart_of(story)["pauses"] == [[19, 70]]


def test_events_with_names_that_arrow_cannot_read_are_read() -> None:
    from exclusivelog.audit.leaders import parsed

    party = {"producer": "p", "engine_name": "\ud800", "pid": 1, "properties": {"a": "b"}}
    events = [
        xl.Event(1, "t", 1, "grant", "request", 0, None, party),
        xl.Event(2, "", 0, "own", "claim", 0, None, party, "g", "r", 1),
    ]
    [change] = parsed([event.dumps() for event in events])
    assert change == Change(1, "t", 1, "grant", "request", "p", "\ud800", 1)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, ledger: str, tmp_path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with xl.open(ledger, readonly=True) as engine:
        with pytest.raises(ImportError, match=re.escape("pip install 'exclusivelog[report]'")):
            report(engine, tmp_path / "page.html")
    assert not os.listdir(tmp_path)
