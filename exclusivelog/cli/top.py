"""`top`: a live view of a ledger."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

import exclusivelog as xl
from exclusivelog.cli import locks
from exclusivelog.cli.findings import findings
from exclusivelog.cli.locks import RoleLine, role_cells, role_line
from exclusivelog.cli.messaging import parts_of
from exclusivelog.cli.output import (
    fields_of,
    holder_of,
    lags_of,
    of_each,
    print_table,
    printable,
    shares,
    shortened,
)
from exclusivelog.cli.program import (
    access_arguments,
    as_json,
    ledger_path,
    open_to_read,
    program,
)

SORTS = ("rate", "topic", "messages", "waiters", "lag")
COLUMNS = ("topic", "messages/s", "messages", "epoch", "owner", "waiters", "lag")
ENGINE_COLUMNS = ("engine", "id", "pid", "heartbeat")
# Columns that become narrower if there is no room.
NAMES = {"topic", "owner", "engine", "lock or role", "holder", "queue"}
BESIDE, BETWEEN = 4, 2  # the spaces of a table beside and between its columns
EVENTS_SHOWN = 8
ROLES_SHOWN = 8  # on a terminal
HELP = "s sort   / filter   j k select   m messages   u unload   ? help   q quit"
KEYS = (
    ("s", "sort by the next column"),
    ("/", "show only topics with a text; Return ends it, Escape shows all again"),
    ("j k arrows", "select a topic"),
    ("m", "show the latest messages of the selected topic, or the events again"),
    ("u", "unload the selected topic to an engine"),
    ("?", "show this, or the events again"),
    ("q Ctrl-C", "quit"),
)
BAD = "bold red"  # without colours, as with NO_COLOR, it is bold
ARROWS = {"A": "k", "B": "j"}


@program.command()
@ledger_path
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 86_400),
    default=1.0,
    help="Between two samples.",
)
@click.option(
    "-n", "samples", metavar="N", type=click.IntRange(min=1), help="End after so many samples."
)
@click.option("--sort", type=click.Choice(SORTS), default="rate", help="What comes first.")
@click.option("--filter", "pattern", metavar="TEXT", default="", help="Only topics with this text.")
@as_json
def top(
    path: str, interval: float, samples: int | None, sort: str, pattern: str, as_json: bool
) -> None:
    """Show a live view: the topics with their rates, owners and lag, the locks and roles with their
    holders and waiters, the engines, and the latest changes of ownership.

    A cluster stores no events, so no changes are shown; use `owners --history` for them.

    On a terminal it fills the screen. Elsewhere it prints tables, and ends after two samples unless
    -n is given; with --json, it prints one object for each sample.
    """
    with open_to_read(path) as engine:
        watch, view = Watch(engine), View(sort, pattern)
        if sys.stdout.isatty() and sys.stdin.isatty() and not as_json:
            _full_screen(path, watch, view, interval, samples)
            return
        for number in range(samples or 2):
            if number:
                time.sleep(interval)
            _print(watch.sample(), view, as_json, number == 0)


# ---- samples -----------------------------------------------------------------------------


class Line(NamedTuple):
    """A topic at one moment. `rate`: messages per second since the last sample; `lag`: that of the
    reader group that is farthest behind, None without a group."""

    topic: str
    rate: float
    messages: int
    epoch: int
    owner: str
    waiters: int
    lag: int | None


class Sample(NamedTuple):
    """A ledger at one moment."""

    lines: list[Line]
    flushes: float  # per second, of all engines
    engines: list[xl.EngineInfo]
    events: list[str]
    findings: list[str]  # what `check` would say is wrong, but for locks that last
    unresponsive: frozenset[str]  # ids of engines
    roles: Sequence[RoleLine] = ()  # the locks and roles that have a holder or a waiter


class Watch:
    """Takes samples of a ledger."""

    def __init__(self, engine: xl.Engine) -> None:
        self._engine = engine
        self._ends: Mapping[str, int] = {}
        self._flushes = engine.stats().flush_seconds.count
        self._at = time.monotonic()
        self._history: xl.Reader | None = None
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def sample(self) -> Sample:
        """Take a sample: the present state, and the events since the last sample."""
        now = time.monotonic()
        stats = self._engine.stats()
        lag = lags_of(stats)
        elapsed = max(now - self._at, 1e-9)
        ends: dict[str, int] = {}

        def line(topic: xl.Topic) -> Iterator[Line]:
            ends[topic.name] = end = topic.next_offset
            grown = max(0, end - self._ends.get(topic.name, end))  # it may have been made anew
            yield Line(
                topic.name,
                grown / elapsed,
                end - topic.first_offset,
                topic.epoch,
                holder_of(topic),
                len(topic.waiters),
                lag.get(topic.name),
            )

        lines = list(of_each(self._engine, self._engine.topics(), line))
        flushed = stats.flush_seconds.count
        flushes = max(0, flushed - self._flushes) / elapsed
        self._ends, self._at, self._flushes = ends, now, flushed
        self._follow()
        found = [each.text for each in findings(stats, self._engine.inside())]
        silent = frozenset(engine.id for engine in stats.unresponsive)
        events = list(self._events)
        roles = [role_line(info) for info in locks.in_use(self._engine)]
        return Sample(lines, flushes, self._engine.engines(), events, found, silent, roles)

    def messages(self, name: str) -> list[str]:
        """The latest messages of a topic, a line each."""
        try:
            found = self._engine.topic(name, create=False)[-EVENTS_SHOWN:]
        except xl.ExclusiveLogError as error:  # deleted, trimmed or damaged
            return [printable(str(error))]
        return [f"messages of {name}:", *("  ".join(parts_of(message)) for message in found)]

    def _follow(self) -> None:
        if self._history is None:
            try:
                events = self._engine.topic("__events__", create=False)
            except xl.TopicNotFoundError:  # nothing has happened yet
                return
            start = max(events.first_offset, events.next_offset - EVENTS_SHOWN)
            self._history = events.reader(start=start, trimmed="earliest")
        while batch := self._history.read_batch(1000):
            self._events += [_event_text(xl.Event.loads(message.value)) for message in batch]


def _event_text(event: xl.Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time / 1000))
    parties = [party["engine_name"] for party in (event.source, event.target) if party]
    change = f"{locks.subject_of(event)} {event.kind} ({event.reason})"
    return f"{clock} {change}: {' -> '.join(map(str, parties))}"


# ---- display -----------------------------------------------------------------------------


class View:
    """The sort order and the filter of the lines, and the selected line."""

    def __init__(self, sort: str, pattern: str) -> None:
        self.sort, self.pattern, self.selected = sort, pattern, 0
        self.lower = "events"  # below the tables: events, messages or help

    def lines(self, sample: Sample) -> list[Line]:
        """The lines to show, in their order."""
        found = [line for line in sample.lines if self.pattern in line.topic]
        if self.sort == "topic":
            return sorted(found)
        return sorted(found, key=lambda line: (-(getattr(line, self.sort) or 0), line.topic))

    def next_sort(self) -> None:
        """Sort by the next column."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    def show(self, what: str) -> None:
        """Show that below the tables; the events, if it is there."""
        self.lower = "events" if self.lower == what else what

    def move(self, by: int, lines: Sequence[Line]) -> None:
        """Select another line."""
        self.selected = max(0, min(self.selected + by, len(lines) - 1))


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.topic,
        f"{line.rate:,.0f}",
        f"{line.messages:,}",
        str(line.epoch),
        line.owner,
        str(line.waiters),
        "-" if line.lag is None else f"{line.lag:,}",
    )


def _engine_cells(engine: xl.EngineInfo) -> tuple[str, ...]:
    return engine.name, engine.id, str(engine.pid), f"{engine.heartbeat_age:.1f} s ago"


def _print(sample: Sample, view: View, as_json: bool, first: bool) -> None:
    if as_json:
        facts = {
            "topics": [line._asdict() for line in view.lines(sample)],
            "roles": [line._asdict() for line in sample.roles],
            "flushes": sample.flushes,
            "engines": [fields_of(engine) for engine in sample.engines],
            "events": sample.events,
            "findings": sample.findings,
        }
        print(json.dumps(facts), flush=True)
        return
    print(end="" if first else "\n")
    print_table(COLUMNS, map(_cells, view.lines(sample)))
    if sample.roles:
        print_table(locks.COLUMNS, map(role_cells, sample.roles))
    print_table(ENGINE_COLUMNS, map(_engine_cells, sample.engines))
    print_table(("event",), ((event,) for event in sample.events))
    if sample.findings:
        print_table(("finding",), ((text,) for text in sample.findings))
    sys.stdout.flush()


def _below(sample: Sample, view: View, watch: Watch) -> list[str]:
    """The lines below the tables."""
    if view.lower == "help":
        return [f"{keys:12}{does}" for keys, does in KEYS]
    lines = view.lines(sample)
    if view.lower == "messages" and lines:
        view.move(0, lines)  # there may be fewer lines than before
        return watch.messages(lines[view.selected].topic)
    return sample.events


def _draw(
    path: str, sample: Sample, view: View, below: Sequence[str], size: tuple[int, int], said: str
) -> Any:
    from rich.console import Group
    from rich.text import Text

    width, height = size

    lines = view.lines(sample)
    others = len(sample.engines) + len(below) + len(sample.findings) + _height_of_roles(sample)
    room = max(3, height - others - 10)
    first = max(0, min(view.selected - room // 2, len(lines) - room))
    shown = enumerate(lines[first : first + room], first)
    topics = _table(
        COLUMNS,
        [(_cells(line), "reverse" if n == view.selected else "") for n, line in shown],
        width,
    )
    engines = _table(
        ENGINE_COLUMNS,
        [(_engine_cells(e), BAD if e.id in sample.unresponsive else "") for e in sample.engines],
        width,
    )
    title = (
        f"{len(lines):,} of {len(sample.lines):,} topics by {view.sort}   "
        f"{sample.flushes:,.0f} flushes/s   {time.strftime('%H:%M:%S')}   {path}"
    )
    bad = [Text(text, style=BAD, overflow="ellipsis", no_wrap=True) for text in sample.findings]
    events = [Text(line, overflow="ellipsis", no_wrap=True) for line in below]
    return Group(
        Text(title, style="bold", overflow="ellipsis", no_wrap=True),
        *bad,
        topics,
        *_roles_table(sample.roles, width),
        engines,
        *events,
        Text(said, style="dim"),
    )


def _height_of_roles(sample: Sample) -> int:
    shown = min(len(sample.roles), ROLES_SHOWN)
    return shown + 4 + (len(sample.roles) > shown) if shown else 0


def _roles_table(roles: Sequence[RoleLine], width: int) -> Iterator[Any]:
    from rich.text import Text

    if not roles:
        return
    yield _table(locks.COLUMNS, [(role_cells(line), "") for line in roles[:ROLES_SHOWN]], width)
    if len(roles) > ROLES_SHOWN:
        yield Text(f"{len(roles) - ROLES_SHOWN:,} locks and roles more: see owners", style="dim")


def _table(names: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], width: int) -> Any:
    """A table of rows and their styles, as wide as the screen."""
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    # If names do not fit even when they are shortened, rich makes their columns narrower.
    columns = [Column(name, no_wrap=name not in NAMES) for name in names]
    table = Table(*columns, box=box.SIMPLE_HEAD, collapse_padding=True, expand=True)
    widths = _widths(names, [cells for cells, _ in rows], width)
    for cells, style in rows:
        fitting = map(shortened, cells, widths)
        table.add_row(
            *(Text(cell, overflow="ellipsis", no_wrap=True) for cell in fitting), style=style
        )
    return table


def _widths(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The widths of the columns: those of names get what the others leave."""
    from rich.cells import cell_len

    natural = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    flexible = [place for place, name in enumerate(names) if name in NAMES]
    wanted = [natural[place] for place in flexible]
    room = width - BESIDE - BETWEEN * (len(names) - 1) - (sum(natural) - sum(wanted))
    for place, share in zip(flexible, shares(wanted, room, 3), strict=False):
        natural[place] = share
    return natural


# ---- the screen --------------------------------------------------------------------------


def _full_screen(path: str, watch: Watch, view: View, interval: float, samples: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        asked: Question | None = None
        said, left = HELP, samples
        sample = watch.sample()
        due = time.monotonic() + interval
        while True:
            shown = said if asked is None else asked.text()
            below = _below(sample, view, watch)
            live.update(_draw(path, sample, view, below, console.size, shown), refresh=True)
            key = keys.next(max(0.0, due - time.monotonic()))
            if key is None:
                left = None if left is None else left - 1
                if left == 0:
                    return
                sample, due = watch.sample(), time.monotonic() + interval
            elif asked is not None:
                if asked.take(key):
                    said, asked = asked.answered(path, view) or HELP, None
            elif key in ("q", "\x03"):
                return
            else:
                asked = _react(key, view, view.lines(sample))


SHOWN_BY = {"m": "messages", "?": "help"}


class Question:
    """An input line at the bottom of the screen."""

    def __init__(self, kind: str, prompt: str, topic: str = "") -> None:
        self._kind, self._prompt, self._topic = kind, prompt, topic
        self._typed = ""

    def text(self) -> str:
        """The text of the line."""
        return f"{self._prompt}{self._typed}_"

    def take(self, key: str) -> bool:
        """Process a key; return True if the input is finished."""
        if key in ("\r", "\n"):
            return True
        if key == "\x1b":  # Escape
            self._typed = ""
            return True
        self._typed = self._typed[:-1] if key in ("\x7f", "\b") else self._typed + key
        return False

    def answered(self, path: str, view: View) -> str:
        """Carry out the request; return the text to show."""
        if self._kind == "filter":
            view.pattern, view.selected = self._typed, 0
            return ""
        return _unload(path, self._topic, self._typed) if self._typed else ""


def _react(key: str, view: View, lines: Sequence[Line]) -> Question | None:
    if key == "s":
        view.next_sort()
    elif key in ("j", "k"):
        view.move(1 if key == "j" else -1, lines)
    elif key in SHOWN_BY:
        view.show(SHOWN_BY[key])
    elif key == "/":
        return Question("filter", "only topics with: ")
    elif key == "u" and lines:
        view.move(0, lines)  # there may be fewer lines than before
        topic = lines[view.selected].topic
        return Question("unload", f"unload {topic} to the engine (name or id): ", topic)
    return None


def _unload(path: str, topic: str, to: str) -> str:
    import subprocess

    # In another process, because this one has opened the ledger read-only.
    command = [sys.executable, "-m", "exclusivelog", "unload", path, topic, "--to", to]
    done = subprocess.run(
        [*command, "--timeout", "5", *access_arguments()],
        capture_output=True,
        text=True,
        check=False,
    )
    return " ".join((done.stderr or done.stdout.splitlines()[-1]).split())


class Keys:
    """The pressed keys; arrow keys become j and k."""

    def __init__(self) -> None:
        self._held: deque[str] = deque()
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def next(self, timeout: float) -> str | None:
        """The next key; None after `timeout` seconds."""
        if not self._held and select.select([0], [], [], timeout)[0]:
            data = os.read(0, 1 << 10)
            self._held += _keys_of(self._decode(data)) if data else ["q"]  # the terminal is gone
        return self._held.popleft() if self._held else None


def _keys_of(text: str) -> list[str]:
    """Split a text into keys; the escape sequence of an arrow is one key.

    >>> _keys_of("s\x1b[Aq")
    ['s', 'k', 'q']
    """
    found = re.findall("\x1b[\\[O][A-Z]|.", text, re.DOTALL)
    return [ARROWS.get(key[-1], "") if len(key) > 1 else key for key in found]


@contextlib.contextmanager
def _keys() -> Iterator[Keys]:
    """Read single keys without echo."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield Keys()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
