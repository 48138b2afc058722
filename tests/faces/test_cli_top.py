"""`exclusivelog top`, in a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

import exclusivelog as xl
from exclusivelog.cli import locks, top
from testing import recording
from testing.operations import PAGE
from testing.pages import blocks
from testing.processes import PATIENCE, until
from testing.terminal import Terminal
from tests.faces.test_cli import PROGRAM, lines

pytestmark = pytest.mark.once


@pytest.fixture
def terminal(path: str) -> Iterator[Terminal]:
    with xl.open(path) as engine:
        for name in ("orders", "bills"):
            with engine.topic(name).producer() as producer:
                producer.send(b"a")
        with Terminal([*PROGRAM, "top", path, "--interval", "0.2"]) as screen:
            screen.see("2 of 2 topics")
            yield screen


@pytest.mark.long
def test_in_a_pipe_it_prints_tables_and_ends(engine, topic, path) -> None:
    with topic.producer("exclusive", name="leader") as leader:
        leader.send(b"a")
        engine.topic("empty")
        topic.reader(group="audit").commit()
        shown = lines("top", path, "-n", "2", "--interval", "0.1", "--sort", "topic")
    looks = [number for number, line in enumerate(shown) if line[0] == "topic"]
    assert len(looks) == 2
    assert shown[looks[1] - 1] == [""]
    empty, orders = shown[1:3]
    assert (empty[0], empty[2]) == ("empty", "0")
    assert orders == ["orders", "0", "1", "1", f"leader (pid {os.getpid()})", "0", "1"]
    assert any("orders grant (request): test" in line[0] for line in shown)
    assert lines("top", path, "-n", "1", "--filter", "emp")[1][0] == "empty"


def test_it_shows_rates(path, terminal) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:

        def grown() -> bool:
            producer.send_many([b"x"] * 100)
            terminal.draw(0.1)
            text = terminal.text()
            rates = (
                re.search(r"orders +[1-9][\d,]* ", text),
                re.search(r" [1-9]\d* flushes/s", text),
            )
            return all(rates)

        until(grown)


@pytest.mark.long
def test_keys_sort_select_filter_and_quit(terminal) -> None:
    terminal.see("2 of 2 topics by rate")
    terminal.type("s")
    terminal.see("by topic")
    until_selected(terminal, "bills")
    for keys, selected in (
        ("j", "orders"),
        ("j", "orders"),
        ("\x1b[A", "bills"),
        ("\x1b[B", "orders"),
        ("k", "bills"),
    ):
        terminal.type(keys)
        until_selected(terminal, selected)
    terminal.type("/bilx\x7f\r")
    terminal.see("1 of 2 topics")
    terminal.type("/\x1b")  # Escape: all again
    terminal.see("2 of 2 topics")
    for order in ("messages", "waiters", "lag", "rate"):
        terminal.type("s")
        terminal.see(f"by {order}")
    terminal.type("q")
    assert terminal.wait() == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before


@pytest.mark.long
def test_keys_show_messages_and_help(path, terminal) -> None:
    terminal.type("?")
    terminal.see("show only topics with a text")
    terminal.type("?smj")
    terminal.see(r"messages of orders:\s+0 ")
    with xl.open(path) as engine, engine.topic("orders").producer(name="late") as producer:
        producer.send(b"came\x1b[2J later", key="k")
        terminal.see(r"1  0  .*late  k  came\\x1b\[2J later")
    terminal.type("k")
    terminal.see("messages of bills:")
    terminal.type("/none\r")
    terminal.see("0 of 2 topics")
    terminal.type("q")
    assert terminal.wait() == 0


def test_it_shows_who_holds_a_lock_and_who_waits(engine, path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(locks, "QUEUE_SHOWN", 1)
    watch = top.Watch(engine)
    with engine.lock("job"), engine.lock("other"), xl.open(path, name="next") as next_one:
        futures = [next_one.role_async("job") for _ in range(2)]
        until(lambda: watch.sample().roles[0].waiters == 2)
        sample, pid = watch.sample(), os.getpid()
        for future in futures:
            future.cancel()
    assert sample.lines == []
    assert any("lock or role job grant (request): test" in event for event in sample.events)
    top._print(sample, top.View("rate", ""), False, True)
    shown = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert shown[1:4] == [
        [*locks.COLUMNS],
        ["job", "1", f"test (pid {pid})", "2", f"next (pid {pid}), 1 more"],
        ["other", "1", f"test (pid {pid})", "0", "-"],
    ]
    top._print(sample, top.View("rate", ""), True, True)
    job, _ = json.loads(capsys.readouterr().out)["roles"]
    assert job == {
        "role": "job",
        "epoch": 1,
        "holder": f"test (pid {pid})",
        "waiters": 2,
        "queue": [f"next (pid {pid})"],
    }
    assert not watch.sample().roles  # those that are free are left out


def test_a_screen_shows_the_first_locks_and_how_many_more(monkeypatch) -> None:
    monkeypatch.setattr(top, "ROLES_SHOWN", 2)
    roles = [locks.RoleLine(f"{'x' * 90}job-{n}", 1, "p", 0, []) for n in range(5)]
    names = [top.Line(f"topic-{n}", 0.0, 0, 0, "-", 0, None) for n in range(50)]
    console = Console(width=80, height=40, file=io.StringIO())
    sample = BAD._replace(lines=names, roles=roles)
    console.print(top._draw("log", sample, top.View("rate", ""), [], (80, 40), top.HELP))
    printed = console.file.getvalue()
    assert re.findall(r"job-\d", printed) == ["job-0", "job-1"]
    assert "3 locks and roles more" in printed
    assert len(printed.splitlines()) <= 40


BAD = top.Sample(
    [top.Line("orders-with-a-long-name-of-many-parts", 1e6, 10**9, 12345, "p" * 60, 10, 9)],
    0.0,
    [xl.EngineInfo("a" * 16, "silent", 1, {}, 99.0), xl.EngineInfo("b" * 16, "well", 2, {}, 0.0)],
    [],
    ["engine 'silent' has been silent"],
    frozenset({"a" * 16}),
)


@pytest.mark.parametrize("no_color", [False, True])
def test_bad_news_are_red_and_headings_whole(no_color, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1" if no_color else "")
    console = Console(width=80, force_terminal=True, color_system="standard", file=io.StringIO())
    console.print(top._draw("log", BAD, top.View("rate", ""), [], (80, 24), top.HELP))
    printed = console.file.getvalue()
    said, silent, well = (
        next(line for line in printed.splitlines() if text in line)
        for text in ("has been", "aaaa", "bbbb")
    )
    assert ["\x1b[1;31m" in line for line in (said, silent, well)] == [not no_color] * 2 + [False]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert next(line for line in plain.splitlines() if "waiters" in line).split() == [*top.COLUMNS]


@pytest.mark.parametrize(
    ("start", "owner", "whole"),
    [
        ("a-topic-with-a-long-name-", "-", True),
        ("a-topic-with-a-long-name-of-many-parts-", "producer-17 (pid 12345)", False),
        ("注文" * 30, "p" * 60, False),
    ],
)
def test_names_that_differ_at_their_ends_look_different(start, owner, whole) -> None:
    """At 80 columns: whole if there is room, else without their middles."""
    names = [f"{start}{number}" for number in range(3)]
    found = [top.Line(name, 1e3, 1000, 12345, owner, 10, 9) for name in names]
    sample = top.Sample(found, 0.0, [], [], [], frozenset())
    drawn = on_80_columns(top._draw("log", sample, top.View("topic", ""), [], (80, 24), top.HELP))
    shown = [line.split("  ")[1].strip() for line in drawn if "12345 " in line]
    assert len(set(shown)) == 3
    assert (shown == names) is whole
    assert max(map(cell_len, drawn)) == 80


def on_80_columns(drawn: Any) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    console.print(drawn)
    return console.file.getvalue().splitlines()


def until_selected(terminal: Terminal, topic: str) -> None:
    def selected() -> bool:
        terminal.draw(0.1)
        return terminal.reversed().split()[:1] == [topic]

    until(selected)


@pytest.mark.long
def test_a_topic_is_unloaded_by_a_key(path, terminal) -> None:
    with xl.open(path, name="one") as one, xl.open(path, name="two") as two:
        with one.topic("orders").producer("exclusive", name="p"):
            waiting = two.topic("orders").producer_async("wait_for_exclusive", name="q")
            terminal.type("s")
            terminal.see("by topic")
            terminal.type("j")
            terminal.type("unobody\r")
            terminal.see("--to 'nobody' is not a live engine")
            terminal.type("utwo\r")
            terminal.see("orders owned 2 one two")
            assert waiting.result(PATIENCE).name == "q"


def test_ctrl_c_leaves_the_terminal_as_it_was(terminal) -> None:
    terminal.process.send_signal(2)
    assert terminal.wait() == 130
    assert termios.tcgetattr(terminal.theirs) == terminal.before


@pytest.mark.long
def test_the_recorded_session_is_what_happens(tmp_path) -> None:
    """Numbers, times and ids differ from one to the next, and nothing else."""
    recorded = [block.text for block in blocks(PAGE.read_text()) if block.mark.startswith("top: ")]
    assert len(recorded) == len(recording.SCENES)
    played = recording.session(tmp_path / "log")
    assert list(map(recording.outline, played)) == list(map(recording.outline, recorded)), (
        "run: python -m testing.recording --write"
    )


def test_events_that_are_removed_before_they_are_shown_are_left_out(engine, topic) -> None:
    """The retention of `__events__` may be faster than the view."""
    watch = top.Watch(engine)
    with topic.producer("exclusive"):
        assert watch.sample().events != []
    for _ in range(5):
        topic.producer("exclusive").close()
    events = engine.topic("__events__")
    events.trim(before=events.next_offset)
    assert len(watch.sample().lines) > 0
    topic.producer("exclusive").close()


def test_a_topic_that_is_made_anew_has_no_negative_rate(engine, topic) -> None:
    with topic.producer() as producer:
        producer.send_many([b"x"] * 9)
    watch = top.Watch(engine)
    watch.sample()
    engine.delete_topic(topic.name)
    engine.topic(topic.name).producer().close()
    assert min(line.rate for line in watch.sample().lines) == 0
