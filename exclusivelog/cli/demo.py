"""The demo: leaders append a real event stream, are killed, and no event is lost or duplicated.

Three processes queue for one topic with different priorities. The owner reads the log to its end,
so that it knows how many events are in it, and appends the next ones, each with its index as
sequence id. The owner is repeatedly killed with SIGKILL during its work; the next process takes
over, and the killed one is started again and queues. In the end the log must contain every event
exactly once and in order, and replaying it must give the known number of lines of every file.

Only these mechanisms prevent losses and duplicates: catching up under a fenced epoch (rules B2,
B10), durable appends (H1) and increasing sequence ids (G2).

```text
parent ── starts, kills, starts again ──► worker alice │ bob │ carol    one engine each
   ▲                                          │
   └── a JSON line for each change of state ──┘         the parent ends = stdin closed = they end
```
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import exclusivelog as xl
from exclusivelog.arguments import is_url
from exclusivelog.foreign import Ignoring, is_raised_by_a_handler, pass_on_foreign

if TYPE_CHECKING:
    from rich.console import Console

    from exclusivelog.audit.leaders import Verdict

TOPIC = "history"
PRIORITIES = {"alice": 30, "bob": 20, "carol": 10}
HISTORY, TRUTH = "redis-history.jsonl.gz", "redis-lines.json.gz"
DEFAULT_DATA = Path(__file__).resolve().parent / "demo_data"
DEFAULT_KILLS, DEFAULT_RATE = 20, 4000.0
MADE_UP, MADE_UP_FILES = 25_000, 1_600

BURST = 64  # events in flight at most: these may be lost or stored when their sender is killed
STANDBY_SECONDS = 0.1  # how often a waiting worker reads new events
POLL_SECONDS = 0.004
LONGEST_REST_SECONDS = 0.3  # between a death and the next start
STALLED_SECONDS = 60.0
PATIENCE_SECONDS = 86_400.0  # the longest wait of a worker; its parent ends it long before
END_SECONDS = 10.0

UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError)


class DemoError(Exception):
    """The demo cannot continue, for the reason in the text."""


# ---- the data ----------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """The events, as lines of JSON, and the true number of lines of each file after them."""

    events: list[bytes]
    truth: dict[str, int]


def read_events(directory: Path, most: int | None = None) -> list[bytes]:
    """The first `most` events in the data directory (None: all)."""
    path = directory / HISTORY
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
    except FileNotFoundError as error:
        pass_on_foreign(error)
        raise DemoError(
            f"there is no {path}; give the directory of the data with --data DIR"
        ) from None
    except UNREADABLE as error:
        if is_raised_by_a_handler(error):  # gzip's errors have no errno
            raise
        raise DemoError(f"{path} cannot be read: {error}") from None
    return lines if most is None else lines[:most]


def read_history(directory: Path, most: int | None = None) -> History:
    """The events and the expected result. For a part of the events, that is their replay."""
    events = read_events(directory)
    try:
        if most is not None and most < len(events):
            return History(events[:most], replay(events[:most]))
        return History(events, json.loads(gzip.decompress((directory / TRUTH).read_bytes())))
    except UNREADABLE as error:
        if is_raised_by_a_handler(error):  # gzip's errors have no errno
            raise
        raise DemoError(f"the data in {directory} cannot be read: {error!r}") from None


@contextlib.contextmanager
def data_directory(given: Path | None) -> Iterator[Path]:
    """The directory of the events: the given one, that of a clone, or else a temporary one with
    made-up events. A wheel has no events."""
    if given is not None or (DEFAULT_DATA / HISTORY).exists():
        yield (given or DEFAULT_DATA).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="exclusivelog-events-") as made:
        write_made_up(Path(made))
        yield Path(made)


def write_made_up(directory: Path) -> None:
    """Write changes of files that never were, each time the same, and their expected result."""
    chance = random.Random(0).random  # of all that `random` offers, no version of Python changes it
    lines: dict[str, int] = {}
    events = []
    for number in range(MADE_UP):
        path = f"src/file{int(chance() * MADE_UP_FILES)}.c"
        before = lines.get(path, 0)
        added, removed = 1 + int(chance() * 40), int(chance() * before)
        lines[path] = before + added - removed
        event = {"commit": f"{number:08x}", "time": 1_234_567_890 + 60 * number, "path": path}
        events.append(json.dumps(event | {"added": added, "removed": removed}))
    for name, content in ((HISTORY, "\n".join(events)), (TRUTH, json.dumps(lines))):
        (directory / name).write_bytes(gzip.compress(content.encode(), compresslevel=1))


def replay(events: Iterable[bytes]) -> dict[str, int]:
    """Path -> lines after these changes. A file that comes down to 0 lines is gone.

    A change of no lines makes an empty file where there is none, and removes it where it is
    empty; one of a file with lines concerns its mode.

    >>> change = '{{"path": "{}", "added": {}, "removed": {}}}'.format
    >>> replay([change("a", 3, 0).encode(), change("a", 1, 2).encode()])
    {'a': 2}
    >>> replay([change("a", 3, 0).encode(), change("b", 0, 0).encode(), change("a", 0, 3).encode()])
    {'b': 0}
    """
    files: dict[str, int] = {}
    for line in events:
        event = json.loads(line)
        path, added, removed = event["path"], event["added"], event["removed"]
        before = files.get(path)
        files[path] = (before or 0) + added - removed
        nothing_changed = added == removed == 0
        if files[path] == 0 and not (nothing_changed and before is None):
            del files[path]
    return files


# ---- a worker: its own process -----------------------------------------------------------


@dataclass
class Worker:
    """One of the three workers. `run` returns when the parent requests it or has ended."""

    path: str
    name: str
    priority: int
    rate: float
    events: list[bytes]
    access: Mapping[str, Any] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    waiting: Future[xl.Producer] | None = None

    def run(self) -> None:
        """Queue and lead; repeat when the lead was lost. Wait once all events are in the log."""
        threading.Thread(target=self._watch_parent, daemon=True).start()
        with xl.open(self.path, self.name, create=False, **self.access) as engine:
            topic = engine.topic(TOPIC, create=False)
            while not self.stop.is_set():
                try:
                    with contextlib.suppress(CancelledError):
                        self._queue_and_lead(topic)
                except xl.ProducerFencedError:
                    _report("fenced")  # it was stopped for too long; it queues again

    def _watch_parent(self) -> None:
        # os.read, because a thread inside sys.stdin would disturb the interpreter's end.
        while os.read(0, 1024):
            pass
        self.stop.set()
        if self.waiting is not None:
            with contextlib.suppress(xl.ExclusiveLogError):  # it may be closed at this moment
                self.waiting.cancel()
        time.sleep(END_SECONDS / 2)  # if `run` has not returned by then, end the process
        os._exit(1)

    def _queue_and_lead(self, topic: xl.Topic) -> None:
        reader = topic.reader()
        count = catch_up(reader, self.events, 0)
        self.waiting = topic.producer_async(
            "wait_for_exclusive", name=self.name, priority=self.priority, timeout=PATIENCE_SECONDS
        )
        if self.stop.is_set():
            self.waiting.cancel()
        while not self.waiting.done():
            count = catch_up(reader, self.events, count)  # so little remains to read when it leads
            try:
                self.waiting.exception(STANDBY_SECONDS)
            except TimeoutError as error:  # it still waits
                if is_raised_by_a_handler(error):
                    raise
        with self.waiting.result(0) as producer:
            # The other workers are fenced from here on, and can append nothing behind this read.
            count = catch_up(reader, self.events, count)
            _report("leads", epoch=producer.topic_epoch, count=count)
            # A kill needs another worker that waits: the first leader lets one start, which may
            # take longer than all events of a short run.
            while not (count or topic.waiters or self.stop.wait(POLL_SECONDS)):
                pass
            self._lead(producer, count)

    def _lead(self, producer: xl.Producer, count: int) -> None:
        first, begun = count, time.monotonic()
        while count < len(self.events) and not self.stop.is_set():
            due = first + 1 + int((time.monotonic() - begun) * self.rate)
            if due <= count:
                time.sleep(1 / self.rate)
                continue
            end = min(due, count + BURST, len(self.events))
            receipts = [self._send(producer, index) for index in range(count, end)]
            for receipt in receipts:
                receipt.result(STALLED_SECONDS)
            if count == first:
                _report("first", at=time.monotonic_ns())
            count = end
        if count == len(self.events):
            _report("finished")
            self.stop.wait(PATIENCE_SECONDS)  # keep the topic until the others have left

    def _send(self, producer: xl.Producer, index: int) -> xl.Receipt:
        line = self.events[index]
        event = json.loads(line)
        return producer.send_async(
            line, key=event["path"], event_time=event["time"] * 1000, sequence_id=index
        )


def catch_up(reader: xl.Reader, events: Sequence[bytes], count: int) -> int:
    """Read to the end of the log; return the number of events. `count` were read before."""
    for message in reader:
        if count >= len(events) or message.value != events[count]:
            raise DemoError(
                f"topic {TOPIC!r} does not hold the expected event at offset {message.offset}; "
                "choose another directory with --path"
            )
        count += 1
    return count


def _report(what: str, **facts: object) -> None:
    # A single write of a short line is atomic, also if this process is killed.
    line = json.dumps({"what": what, **facts}) + "\n"
    with Ignoring(BrokenPipeError):  # the parent has ended; `_watch_parent` notices
        os.write(1, line.encode())


# ---- the parent's side of a worker -------------------------------------------------------


class Child:
    """A worker process, as its parent sees it. Its reports go to `reports`, with "gone" as the
    last."""

    def __init__(self, name: str, arguments: Sequence[str], reports: queue.Queue[Report]) -> None:
        self.name = name
        self.noise: list[str] = []
        self._reports = reports
        # In a session of its own, so that only the parent gets Ctrl-C; it ends the child by stdin.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "exclusivelog.cli.demo", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._reports.put((self, json.loads(line)))
            except ValueError:  # a traceback
                self.noise.append(line.decode(errors="replace").rstrip())
        self._reports.put((self, {"what": "gone"}))

    def kill(self) -> int:
        """Send SIGKILL and reap the process; return the time (ns of the monotonic clock)."""
        now = time.monotonic_ns()
        self._process.kill()
        self._process.wait(END_SECONDS)
        return now

    def dismiss(self) -> None:
        """Tell it to end by closing its stdin."""
        assert self._process.stdin is not None
        with Ignoring(OSError):
            self._process.stdin.close()

    def end(self) -> None:
        """End the process, by force if necessary."""
        self.dismiss()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._thread.join(END_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


Report = tuple[Child, dict[str, Any]]


@dataclass
class Tenure:
    """The tenure of a leader, as the parent observed it."""

    epoch: int
    name: str
    pid: int
    priority: int
    begins_at: int
    first_append: int | None = None
    killed: int | None = None
    best_waiter: int | None = None
    end: str = "leads"


# ---- the parent --------------------------------------------------------------------------


class Screen(Protocol):
    """Shows the progress of a run."""

    def leads(self, tenure: Tenure) -> None:
        """A new leader took over."""

    def killed(self, tenure: Tenure, kills: int, wanted: int) -> None:
        """The leader was killed, the `kills`th of so many."""

    def progress(self, done: int) -> None:
        """So many events are in the log."""


class Run:
    """Runs three workers on one ledger, and kills them."""

    def __init__(
        self,
        path: str,
        data: Path,
        events: list[bytes],
        *,
        kills: int,
        seed: int,
        rate: float,
        screen: Screen,
        access: Mapping[str, Any],
    ) -> None:
        self.path, self.access = path, access
        self.events = events
        self.tenures: list[Tenure] = []
        self.kills = 0
        self.wanted = kills
        self._screen = screen
        self._random = random.Random(seed)
        self._arguments = [path, str(data), str(len(events)), str(rate), json.dumps(access)]
        self._reports: queue.Queue[Report] = queue.Queue()
        self._children: dict[str, Child] = {}
        self._starts: dict[str, float] = dict.fromkeys(PRIORITIES, 0.0)
        self._done, self._moved = -1, time.monotonic()
        self._finished = False

    def go(self) -> None:
        """Run until all events are in. Raises DemoError; leaves no process behind."""
        with xl.open(self.path, "demo", readonly=True, **self.access) as engine:
            topic = engine.topic(TOPIC, create=False)
            points = self._choose_points(topic.next_offset)
            try:
                while not self._finished:
                    self._start_missing()
                    self._take_reports(POLL_SECONDS)
                    self._follow(topic.next_offset)
                    self._kill_at(points, topic)
                self._dismiss()
            finally:
                for child in self._children.values():
                    child.dismiss()
                for child in self._children.values():
                    child.end()

    def _follow(self, done: int) -> None:
        now = time.monotonic()
        if done != self._done:
            self._done, self._moved = done, now
            self._screen.progress(done)
        elif now - self._moved > STALLED_SECONDS:
            raise DemoError(f"nothing was appended for {STALLED_SECONDS:.0f} s")

    def _choose_points(self, done: int) -> list[int]:
        # Not near the end: a kill waits until another process can take over.
        places = range(done + 1, done + int(0.95 * (len(self.events) - done)))
        return sorted(self._random.sample(places, min(self.wanted, len(places))))

    def _start_missing(self) -> None:
        for name, due in list(self._starts.items()):
            if time.monotonic() >= due:
                del self._starts[name]
                arguments = [str(PRIORITIES[name]), *self._arguments]
                self._children[name] = Child(name, arguments, self._reports)

    def _take_reports(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            child, facts = self._reports.get(timeout=timeout)
            while True:
                self._take(child, **facts)
                child, facts = self._reports.get_nowait()

    def _take(self, child: Child, what: str, epoch: int = 0, count: int = 0, at: int = 0) -> None:
        tenure = self._tenure_of(child)
        if what == "leads":
            tenure = Tenure(epoch, child.name, child.pid, PRIORITIES[child.name], count)
            self.tenures.append(tenure)
            self._screen.leads(tenure)
        elif what == "first" and tenure is not None:
            tenure.first_append = at
        elif what == "fenced" and tenure is not None:
            tenure.end = "fenced"
        elif what == "finished" and tenure is not None:
            if tenure.killed is None:
                tenure.end = "finished"
                self._finished = True
        elif what == "gone" and self._children.get(child.name) is child:
            raise DemoError(f"worker {child.name} ended by itself:\n" + "\n".join(child.noise))

    def _tenure_of(self, child: Child) -> Tenure | None:
        return next((r for r in reversed(self.tenures) if r.pid == child.pid), None)

    # ---- kill ----------------------------------------------------------------------------

    def _kill_at(self, points: list[int], topic: xl.Topic) -> None:
        """Kill the leader if the next chosen point has passed and another worker waits."""
        if not points or self._done < points[0]:
            return
        leader = next((r for r in reversed(self.tenures) if r.end == "leads"), None)
        waiters = topic.waiters
        if leader is None or not waiters:
            return
        del points[0]
        time.sleep(self._random.uniform(0, POLL_SECONDS))  # else kills would follow the polls
        leader.best_waiter = waiters[0].priority
        child = self._children[leader.name]
        leader.killed = child.kill()
        leader.end = "killed"
        child.end()
        del self._children[leader.name]
        self.kills += 1
        rest = self._random.uniform(0, LONGEST_REST_SECONDS)
        self._starts[leader.name] = time.monotonic() + rest
        self._screen.killed(leader, self.kills, self.wanted)

    def _dismiss(self) -> None:
        # End the leader last: it keeps the topic, so that no other worker is promoted for nothing.
        leader = self.tenures[-1].name
        for name in sorted(self._children, key=lambda name: name == leader):
            self._children[name].end()
        self._children.clear()


def takeovers(tenures: Sequence[Tenure]) -> dict[int, float]:
    """Epoch -> ms from the SIGKILL of the predecessor to the first durable append."""
    found = {}
    for before, after in itertools.pairwise(tenures):
        if before.killed is not None and after.first_append is not None:
            found[after.epoch] = (after.first_append - before.killed) / 1e6
    return found


# ---- the judge ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """One claim, whether it holds, and the facts."""

    claim: str
    holds: bool
    facts: str


def judge(
    messages: Sequence[xl.Message], history: History, sound: Judgement, tenures: Sequence[Tenure]
) -> list[Judgement]:
    """The verdict on every claim, from the log (and the observed order of the leaders). `sound`:
    the result of `check_log`."""
    return [
        _judge_events(messages, history.events),
        _judge_epochs(messages),
        _judge_order(tenures),
        sound,
        _judge_lines(messages, history.truth),
    ]


def check_log(engine: xl.Engine) -> Judgement:
    """Verify the log's checksums. On a cluster, reading verifies them, so audit the grants."""
    if not is_url(engine.path):
        return judge_report(engine.verify())
    from exclusivelog.audit import audit

    return judge_audit(audit(engine, [TOPIC]))


def judge_report(report: xl.Report) -> Judgement:
    """The finding for a report of `verify`."""
    return Judgement(
        "the ledger is sound",
        report.ok,
        "; ".join(report.problems) or f"{report.entries:,} entries, every checksum holds",
    )


def judge_audit(verdicts: Sequence[Verdict]) -> Judgement:
    """The finding for the verdicts of `audit`."""
    wrong = [f"{each.claim}: {each.facts}" for each in verdicts if not each.holds]
    return Judgement(
        "the audit of its grants and messages",
        not wrong,
        "; ".join(wrong) or f"{len(verdicts)} claims hold",
    )


def _judge_events(messages: Sequence[xl.Message], events: Sequence[bytes]) -> Judgement:
    claim = "every event exactly once, in order"
    for index, (message, line) in enumerate(zip(messages, events, strict=False)):
        event = json.loads(line)
        expected = (index, line, event["path"].encode(), event["time"] * 1000, index)
        found = (
            message.offset,
            message.value,
            message.key,
            message.event_time,
            message.sequence_id,
        )
        if found != expected:
            return Judgement(claim, False, f"event {index}: {found} instead of {expected}")
    if len(messages) != len(events):
        return Judgement(claim, False, f"{len(messages):,} messages for {len(events):,} events")
    return Judgement(claim, True, f"{len(messages):,} events")


def _judge_epochs(messages: Sequence[xl.Message]) -> Judgement:
    claim = "epochs never interleave, one producer each"
    producers: dict[int, tuple[str, int]] = {}
    last = 0
    for message in messages:
        producer = (message.producer_name, message.session)
        if message.epoch < last:
            return Judgement(
                claim,
                False,
                f"epoch {message.epoch} at offset {message.offset} follows epoch {last}",
            )
        if producers.setdefault(message.epoch, producer) != producer:
            return Judgement(
                claim,
                False,
                f"epoch {message.epoch} has a second producer, "
                f"{producer[0]}, at offset {message.offset}",
            )
        last = message.epoch
    return Judgement(claim, True, f"{len(producers)} epochs")


def _judge_order(tenures: Sequence[Tenure]) -> Judgement:
    claim = "the best waiter is next, each time"
    count = 0
    for before, after in itertools.pairwise(tenures):
        if after.epoch <= before.epoch:
            return Judgement(claim, False, f"epoch {after.epoch} came after epoch {before.epoch}")
        if before.best_waiter is not None:
            count += 1
            # A better waiter may have joined between the two reads, but never a worse one.
            if after.priority < before.best_waiter:
                return Judgement(
                    claim,
                    False,
                    f"epoch {after.epoch} went to priority "
                    f"{after.priority}, {before.best_waiter} waited",
                )
    return Judgement(claim, True, f"{count} promotions")


def _judge_lines(messages: Sequence[xl.Message], truth: dict[str, int]) -> Judgement:
    claim = "files and lines equal the truth"
    try:
        files = replay(message.value for message in messages)
    except UNREADABLE as error:
        if is_raised_by_a_handler(error):
            raise
        return Judgement(claim, False, f"the log cannot be replayed: {error!r}")
    wrong = [
        f"{path}: {files.get(path)} lines instead of {truth.get(path)}"
        for path in sorted(files.keys() | truth.keys())
        if files.get(path) != truth.get(path)
    ]
    if wrong:
        return Judgement(claim, False, f"{len(wrong)} files differ: " + "; ".join(wrong[:3]))
    return Judgement(claim, True, f"{len(files):,} files, {sum(files.values()):,} lines")


# ---- show --------------------------------------------------------------------------------


class Plain:
    """Progress as lines, for a log file or a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def leads(self, tenure: Tenure) -> None:
        """One line."""
        self._console.print(
            f"epoch {tenure.epoch}: {tenure.name} (pid {tenure.pid}, priority {tenure.priority}) "
            f"goes on from event {tenure.begins_at:,}",
            highlight=False,
            soft_wrap=True,
        )

    def killed(self, tenure: Tenure, kills: int, wanted: int) -> None:
        """One line."""
        self._console.print(
            f"epoch {tenure.epoch}: {tenure.name} (pid {tenure.pid}) is killed, {kills} of "
            f"{wanted}",
            highlight=False,
            soft_wrap=True,
        )

    def progress(self, done: int) -> None:
        """Nothing."""


class Live:
    """Progress as a bar that changes in place."""

    def __init__(self, console: Console, total: int, wanted: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("events, {task.fields[kills]}"),
            console=console,
            transient=True,
        )
        self._task = self.bar.add_task("starting", total=total, kills=f"0 of {wanted} kills")

    def leads(self, tenure: Tenure) -> None:
        """The new leader beside the bar."""
        text = f"epoch {tenure.epoch:3}  [bold green]{tenure.name:5}[/] leads (pid {tenure.pid})"
        self.bar.update(self._task, description=text)

    def killed(self, tenure: Tenure, kills: int, wanted: int) -> None:
        """The leader was killed."""
        text = f"epoch {tenure.epoch:3}  [bold red]{tenure.name:5}[/] killed (pid {tenure.pid})"
        self.bar.update(self._task, description=text, kills=f"{kills} of {wanted} kills")

    def progress(self, done: int) -> None:
        """Move the bar."""
        self.bar.update(self._task, completed=done)


@contextlib.contextmanager
def _screen(console: Console, total: int, wanted: int) -> Iterator[Screen]:
    if console.is_terminal:
        live = Live(console, total, wanted)
        with live.bar:
            yield live
    else:
        yield Plain(console)


def show_tenures(
    console: Console, tenures: Sequence[Tenure], messages: Sequence[xl.Message]
) -> None:
    """The table of leaders."""
    from rich import box
    from rich.table import Table

    counts, ms = Counter(message.epoch for message in messages), takeovers(tenures)
    table = Table(
        "epoch",
        "leader",
        "pid",
        "priority",
        "messages",
        "end",
        "take-over ms",
        box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2,
    )
    for column in (0, 2, 3, 4, 6):
        table.columns[column].justify = "right"
    earlier = sum(counts.values()) - sum(counts[tenure.epoch] for tenure in tenures)
    if earlier:
        table.add_row("", "before", "", "", f"{earlier:,}", "", "")
    for tenure in tenures:
        taken = f"{ms[tenure.epoch]:.1f}" if tenure.epoch in ms else "-"
        table.add_row(
            str(tenure.epoch),
            tenure.name,
            str(tenure.pid),
            str(tenure.priority),
            f"{counts[tenure.epoch]:,}",
            tenure.end,
            taken,
        )
    console.print(table)


def show_verdict(console: Console, findings: Sequence[Judgement]) -> None:
    """Print a line for each claim, and a summary."""
    for finding in findings:
        mark = "[green]ok    [/]" if finding.holds else "[red]FAILED[/]"
        console.print(f"{mark}  {finding.claim}: ", end="")
        console.print(finding.facts, markup=False, highlight=False, soft_wrap=True)
    ok = all(finding.holds for finding in findings)
    console.print("[bold green]verdict: all of it holds[/]" if ok else "[bold red]verdict: FAILED")


# ---- the demo ------------------------------------------------------------------------------


def demo(
    console: Console,
    *,
    path: str | None = None,
    data: Path | None = None,
    events: int | None = None,
    kills: int = DEFAULT_KILLS,
    seed: int | None = None,
    rate: float = DEFAULT_RATE,
    report: Path | None = None,
    access: Mapping[str, Any] | None = None,
) -> bool:
    """Run the job and show it; True if every claim holds. Raises DemoError.

    - `path`: the ledger's directory, or the URL of a cluster's namespace. It is kept afterwards,
      and a later run continues it. None: a temporary directory.
    - `data`: the directory of the events and their expected result; None: those of a
      clone, or else made-up ones.
    - `events`: only the first so many events. None: all.
    - `kills`: how many leaders to kill; `seed` determines the moments.
    - `rate`: events per second.
    - `report`: let Spark audit the log, too, and write a page about the leaders to this file; needs
      the extra `[spark]` and Java.
    - `access`: the arguments of `open` for the URL.
    """
    access = access or {}
    if report is not None:
        _check_report(path)
    seed = random.randrange(10_000) if seed is None else seed
    with data_directory(data) as data, _directory(path) as where:
        history = read_history(data, events)
        done = _prepare(where, history.events, access)
        console.print(
            f"{len(history.events):,} events, {done:,} of them in the log; {kills} kills, "
            f"seed {seed}; ledger {where}",
            highlight=False,
            soft_wrap=True,
        )
        begun = time.monotonic()
        with _screen(console, len(history.events), kills) as screen:
            run = Run(
                where,
                data,
                history.events,
                kills=kills,
                seed=seed,
                rate=rate,
                screen=screen,
                access=access,
            )
            if done < len(history.events):
                run.go()
        seconds = time.monotonic() - begun
        holds = _judge_and_show(console, where, history, run, seconds)
        return (report is None or _draw(console, where, report)) and holds


@contextlib.contextmanager
def _directory(path: str | None) -> Iterator[str]:
    if path is not None:
        yield path if is_url(path) else os.path.realpath(path)
    else:
        with tempfile.TemporaryDirectory(prefix="exclusivelog-demo-") as temporary:
            yield str(Path(temporary, "log"))


def _prepare(path: str, events: Sequence[bytes], access: Mapping[str, Any]) -> int:
    """Create the topic if it does not exist; return the number of events in it."""
    with xl.open(path, "demo", **access) as engine:
        return catch_up(engine.topic(TOPIC).reader(), events, 0)


def _judge_and_show(
    console: Console, path: str, history: History, run: Run, seconds: float
) -> bool:
    with xl.open(path, "demo", readonly=True, **run.access) as engine:
        messages = list(engine.topic(TOPIC, create=False).reader())
        findings = judge(messages, history, check_log(engine), run.tenures)
    show_tenures(console, run.tenures, messages)
    facts = f"{seconds:.1f} s, {run.kills} of {run.wanted} kills"
    if ms := sorted(takeovers(run.tenures).values()):
        facts += (
            "; take-over, from SIGKILL to the successor's first durable append: "
            f"median {statistics.median(ms):.1f} ms, worst {ms[-1]:.1f} ms"
        )
    console.print(facts, highlight=False, soft_wrap=True)
    show_verdict(console, findings)
    return all(finding.holds for finding in findings)


def _check_report(path: str | None) -> None:
    from exclusivelog.spark.errors import missing

    if path is not None and is_url(path):
        raise DemoError(
            "--report: Spark draws the leaders of a local log; exclusivelog report URL PAGE draws "
            "those of a cluster"
        )
    lacking = missing()
    if lacking is not None:
        raise DemoError(f"--report: {lacking}")


def _draw(console: Console, path: str, to: Path) -> bool:
    """Audit the log with Spark, and write the report; True if the audit found nothing."""
    # The job is so short that optimising compilers do not pay off.
    settings = [
        "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.factoryMode=NO_CODEGEN",
    ]
    program = [sys.executable, "-m", "exclusivelog.spark", "report", path, str(to), "--quiet"]
    command = [*program, *(f"--conf={setting}" for setting in settings)]
    to.unlink(missing_ok=True)  # an earlier page must not be taken for the new one
    with console.status("Spark audits the log, and draws the leaders"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not to.exists():
        raise DemoError(f"--report: {(done.stderr.strip().splitlines() or ['no page'])[-1]}")
    verdict = "[green]ok    [/]" if done.returncode == 0 else "[red]FAILED[/]"
    console.print(f"{verdict}  Spark's audit; the leaders in pictures: ", end="")
    console.print(str(to), markup=False, highlight=False, soft_wrap=True)
    return done.returncode == 0


def main(arguments: Sequence[str]) -> None:
    """What a worker's process runs: NAME PRIORITY PATH DATA EVENTS RATE ACCESS."""
    name, priority, path, data, events, rate, access = arguments
    lines = read_events(Path(data), int(events))
    Worker(path, name, int(priority), float(rate), lines, json.loads(access)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
