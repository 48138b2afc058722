"""What the library logs: each change of ownership once, with the names that an operator needs; and
no handler, however broken, does a call any harm."""

from __future__ import annotations

import ast
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import logs
from exclusivelog.local.shm import slots
from exclusivelog.local.storage import checkpointer, usage
from exclusivelog.local.storage.changes import silence
from testing.operations import PAGE, ROOT, lines_of, table
from testing.processes import PATIENCE, Worker, open_producer, send, stop_outside, until

pytestmark = pytest.mark.once

Heard = Callable[[str], list[logging.LogRecord]]


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Heard:
    """The records of one event so far."""
    caplog.set_level(logging.INFO, "exclusivelog")
    return lambda event: [r for r in caplog.records if getattr(r, "event", None) == event]


def only(records: list[logging.LogRecord]) -> logging.LogRecord:
    [record] = records
    return record


# ---- the table ---------------------------------------------------------------------------


def test_the_page_lists_every_line_and_no_other() -> None:
    told = lines_of(PAGE.read_text())
    there = {
        line.event: (logging.getLevelName(line.level), line.text) for line in logs.LINES.values()
    }
    assert told == there, f"put this into docs/operations.md:\n{table()}"


@pytest.mark.long
def test_every_line_names_its_ledger() -> None:
    """A process may have several open. The reason of four lines is an error that names a file."""
    begins = {line.text.split(")")[0] for line in logs.LINES.values()}
    assert begins == {"%(ledger", "%(file", "%(reason"}
    calls = [
        call
        for path in (ROOT / "exclusivelog").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "logs.emit"
    ]
    without = [
        ast.unparse(call.args[1])
        for call in calls
        if not {"ledger", "file", None} & {given.arg for given in call.keywords}
    ]
    assert len(calls) > 30
    assert [name for name in without if not _begins_with_its_reason(name)] == []


def _begins_with_its_reason(name: str) -> bool:
    line: logs.Line = getattr(logs, name.removeprefix("logs."))
    return line.text.startswith("%(reason)s")


def test_every_line_is_logged_somewhere_and_nothing_past_the_table() -> None:
    sources = {
        path: path.read_text()
        for path in (ROOT / "exclusivelog").rglob("*.py")
        if path.name != "logs.py"
    }
    names = {name for name, line in vars(logs).items() if isinstance(line, logs.Line)}
    used = {name for text in sources.values() for name in re.findall(r"logs\.([A-Z_]+)", text)}
    assert names - used == set()
    direct = re.compile(r"\blog\.(debug|info|warning|error|exception|critical|log)\(")
    assert [path for path, text in sources.items() if direct.search(text)] == []


def test_the_page_names_the_attributes_that_every_record_has() -> None:
    page = PAGE.read_text()
    assert [name for name in logs.COMMON if f"`{name}`" not in page] == []


# ---- what is logged ----------------------------------------------------------------------


def test_a_life_of_an_engine_and_of_an_owner(path: str, heard: Heard) -> None:
    with xl.open(path, name="a", keepalive=7.0) as engine:
        opened = only([r for r in heard("opened") if r.engine == "a"])
        topic = engine.topic("orders")
        with topic.producer("exclusive", name="first") as producer:
            for _ in range(3):
                producer.send(b"x")
        identity = engine.id
    assert (opened.levelname, opened.engine_id, opened.pid) == ("INFO", identity, os.getpid())
    assert (opened.ledger, opened.keepalive, opened.topic) == (path, 7.0, None)
    granted = only(heard("granted"))
    assert (granted.topic, granted.producer, granted.mode) == ("orders", "first", "exclusive")
    assert (granted.epoch, granted.reason, granted.engine) == (1, "request", "a")
    assert granted.getMessage().startswith(f"{path}: topic 'orders' was granted to")
    assert 0 <= granted.waited < 30
    released = only(heard("released"))
    assert (released.topic, released.epoch, released.reason) == ("orders", 1, "closed")
    assert only([r for r in heard("closed") if r.engine == "a"]).engine_id == identity


def test_no_line_is_logged_for_a_send(
    topic: xl.Topic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (usage, "SLOW_FLUSH_SECONDS"),
        (checkpointer, "OF_NOTE_SECONDS"),
        (slots, "LASTING_SECONDS"),
        (slots, "BUSY_SECONDS"),
    ):
        monkeypatch.setattr(module, name, math.inf)  # what a slow machine tells
    with topic.producer() as producer:
        caplog.set_level(logging.DEBUG)
        caplog.clear()
        for number in range(200):
            producer.send(b"%d" % number)
        producer.send_many([b"many"] * 100)
        assert [r for r in caplog.records if r.name.startswith("exclusivelog")] == []


def test_a_take_over_is_told_by_both_sides(topic: xl.Topic, heard: Heard) -> None:
    first = topic.producer("exclusive", name="first")
    second = topic.producer("exclusive_with_fencing", name="second")
    until(lambda: first.state == "fenced")
    until(lambda: heard("lost"))
    evicted = only(heard("evicted"))
    assert (evicted.producer, evicted.reason, evicted.topic) == ("first", "fenced", "orders")
    assert heard("granted")[-1].reason == "fencing"
    assert heard("granted")[-1].epoch == second.topic_epoch == 2
    lost = only(heard("lost"))
    assert (lost.producer, lost.epoch) == ("first", 1)
    assert "fenced" in lost.reason


def test_a_promotion_says_how_long_it_was_waited_for(topic: xl.Topic, heard: Heard) -> None:
    owner = topic.producer("exclusive", name="owner")
    waiting = topic.producer_async("wait_for_exclusive", name="heir")
    time.sleep(0.2)
    owner.close()
    waiting.result(PATIENCE)
    until(lambda: len(heard("granted")) == 2)
    record = heard("granted")[-1]
    found = (record.producer, record.reason, record.mode)
    assert found == ("heir", "promotion", "wait_for_exclusive")
    assert 0.2 <= record.waited < 30


def test_a_promotion_of_another_process_is_told_by_who_makes_it(
    topic: xl.Topic, worker: Callable[..., Worker], heard: Heard
) -> None:
    owner = topic.producer("exclusive")
    process = worker(name="heir")
    process.start(open_producer, "wait_for_exclusive")
    until(lambda: topic.waiters)
    owner.close()
    process.answer()
    until(lambda: heard("promoted"))
    record = only(heard("promoted"))
    assert (record.engine, record.pid, record.reason) == ("heir", process.pid, "promotion")
    assert (record.topic, record.epoch) == ("orders", 2)


def test_each_step_of_a_hand_over_is_told(path: str, heard: Heard) -> None:
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        producer = a.topic("orders").producer("exclusive", follow=False)
        waiting = b.topic("orders").producer_async("wait_for_exclusive")
        a.unload("orders", to=b.id)
        waiting.result(PATIENCE)
        until(lambda: len(heard("granted")) == 2 and len(heard("hand_over")) == 2)
        assert [record.step for record in heard("hand_over")] == ["releasing", "assigned"]
        assert heard("granted")[-1].reason == "hand-over"
        assert "engine 'a'" in heard("hand_over")[0].source
        assert "engine 'b'" in heard("hand_over")[0].target
        assert producer.state == "moved"


def test_claims_are_told_of(engine: xl.Engine, heard: Heard) -> None:
    claim = engine.own("reports", {"march": 3})
    claim.release()
    found = [(r.step, r.group, r.resource, r.generation) for r in heard("claim")]
    assert found == [("own", "reports", "march", 3), ("release", "reports", "march", 3)]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_c2_a_dead_engine_is_named_with_its_topics(
    topic: xl.Topic, worker: Callable[..., Worker], heard: Heard, mode: str
) -> None:
    process = worker(name="doomed")
    process.call(open_producer, mode)
    process.call(send, b"x")
    waiting = topic.producer_async("wait_for_exclusive")
    process.signal(signal.SIGKILL)
    waiting.result(PATIENCE)
    until(lambda: heard("engine_gone"))
    record = only(heard("engine_gone"))
    assert (record.levelname, record.engine, record.pid) == ("WARNING", "doomed", process.pid)
    assert (record.topic, record.count, record.reason) == ("orders", 1, "dead")
    assert "'orders'" in record.getMessage()


def test_c3_an_unresponsive_owner_is_named_with_how_long_it_was_silent(
    topic: xl.Topic, worker: Callable[..., Worker], heard: Heard
) -> None:
    process = worker(name="stopped", keepalive=0.5)
    process.call(open_producer, "exclusive")
    stop_outside(topic.engine.path, process.pid)
    try:
        topic.producer("wait_for_exclusive", timeout=PATIENCE).close()
        until(lambda: heard("engine_gone"))
    finally:
        process.signal(signal.SIGCONT)
    record = only(heard("engine_gone"))
    assert (record.reason, record.engine) == ("unresponsive", "stopped")
    assert re.search(r"silent for [0-9.]+ s", record.getMessage())
    there = topic.engine.backend.ledger.lockfile.slots
    until(lambda: silence(there, record.engine_id) == "it has resumed since")


def test_a_dead_engine_of_many_topics_is_one_line_for_a_transaction(
    engine: xl.Engine, worker: Callable[..., Worker], heard: Heard
) -> None:
    process = worker(name="doomed")
    process.call(own_many, 30)
    waiting = engine.topic("t00").producer_async("wait_for_exclusive")
    process.signal(signal.SIGKILL)
    waiting.result(PATIENCE)
    until(lambda: sum(record.count for record in heard("engine_gone")) == 30)
    assert len(heard("engine_gone")) <= 2
    assert "and 20 more" in "".join(r.getMessage() for r in heard("engine_gone"))


def own_many(state, count: int) -> None:
    names = [f"t{n:02}" for n in range(count)]
    state.kept["many"] = state.engine.producers(names, "exclusive")


def test_what_is_removed_and_kept_is_told(engine: xl.Engine, heard: Heard, tmp_path: Path) -> None:
    topic = engine.topic("orders")
    with topic.producer() as producer:
        producer.send_many([b"1", b"2", b"3"], keys=["a", "b", "a"])
    topic.compact()
    topic.trim(before=1)
    engine.backup(str(tmp_path / "copy"))
    compacted, trimmed = only(heard("compacted")), only(heard("trimmed"))
    found = (compacted.topic, compacted.kept, compacted.count, compacted.offset)
    assert found == ("orders", 2, 3, 3)
    got = (trimmed.topic, trimmed.offset, trimmed.count, trimmed.reason)
    assert got == ("orders", 1, 1, "call")
    assert only(heard("backup")).target == str(tmp_path / "copy")
    topic.terminate()
    assert only(heard("terminated")).offset == 3
    engine.delete_topic("orders")
    assert only(heard("deleted")).topic == "orders"


def test_a_snapshot_is_told(topic: xl.Topic, heard: Heard) -> None:
    with xl.SharedMap(topic) as shared:
        shared.update({"a": 1, "b": 2})
        shared.snapshot()
    record = only(heard("snapshot"))
    assert (record.topic, record.count) == ("orders", 2)


@pytest.mark.long
def test_a_checkpoint_of_note_is_told(
    topic: xl.Topic, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "OF_NOTE_SECONDS", 0.0)
    with topic.producer() as producer:
        producer.send(b"x" * 1000)
        until(lambda: heard("checkpoint"))
    assert heard("checkpoint")[0].bytes > 1000
    assert heard("checkpoint")[0].seconds > 0


# ---- room --------------------------------------------------------------------------------


def unattended(engine: xl.Engine) -> usage.Room:
    """What checks the ledger's room, once the background worker has, which checks no more."""
    left = engine.ledger.usage.room
    until(lambda: not left.due and not left._interval._checking.locked())
    left._interval._next = math.inf
    return left


def test_h2_a_nearly_full_disk_is_told_once(
    engine: xl.Engine, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = unattended(engine)
    monkeypatch.setattr(usage, "LEAST_BYTES", 1 << 62)
    with engine.ledger.environment() as env:
        left.check(env)
        left.check(env)
        record = only(heard("disk_low"))
        assert (record.levelname, record.ledger) == ("WARNING", engine.path)
        assert record.free > 0
        monkeypatch.setattr(usage, "LEAST_BYTES", 0)
        monkeypatch.setattr(usage, "LOW_BYTES", 0)
        left.check(env)
    assert only(heard("disk_enough")).free > 0


def test_the_background_worker_checks_the_room(
    engine: xl.Engine, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "LEAST_BYTES", 1 << 62)
    engine.ledger.usage.room._next = 0.0
    engine.backend.worker.wake()
    until(lambda: heard("disk_low"))


def test_tables_that_grow_are_told(
    engine: xl.Engine, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = unattended(engine)
    with engine.ledger.environment() as env:
        left.check(env)
        assert heard("map_grows") == []
        monkeypatch.setattr(usage, "GROWN_FROM", 0)
        left._used = left._used // 3
        left.check(env)
        record = only(heard("map_grows"))
        assert record.used >= 2 * record.before
        monkeypatch.setattr(usage, "MAP_SHARE", 0.0)
        left.check(env)
        left.check(env)
    assert only(heard("map_low")).map_size > 0


def test_a_slow_flush_is_told(
    topic: xl.Topic, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is real, and so is its way from the core to the line."""
    monkeypatch.setattr(usage, "SLOW_FLUSH_SECONDS", 1e-9)
    with topic.producer() as producer:
        producer.send(b"x")
        topic.engine.backend.make_visible()
        topic.engine.ledger.checkpoint()
        topic.engine.ledger.flush()
        topic.engine.backend.worker.wake()
        if topic.engine.backend.unflushed:
            return  # nothing was flushed here
        until(lambda: heard("slow_flush"))
    assert 0 < heard("slow_flush")[0].seconds < 30


# ---- handlers that fail ------------------------------------------------------------------


class Broken(logging.Handler):
    """Raises out of `emit`, as no handler should."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.calls += 1
        raise self.error


@pytest.fixture
def broken() -> Iterator[Callable[[logging.Handler], logging.Handler]]:
    logger, added = logging.getLogger("exclusivelog"), list[logging.Handler]()
    before = logger.level

    def add(handler: logging.Handler) -> logging.Handler:
        added.append(handler)
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        return handler

    yield add
    for handler in added:
        logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("closed"), RecursionError()])
def test_a_handler_that_raises_hurts_no_call(path: str, broken, error: Exception) -> None:
    handler = broken(Broken(error))
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        with topic.producer("exclusive") as first:
            assert first.send(b"x") == 0
            second = topic.producer("exclusive_with_fencing")
            assert second.send(b"y") == 1
            until(lambda: first.state == "fenced")
        topic.trim(before=1)
    assert handler.calls > 4


class Using(logging.Handler):
    """Uses the library for each record, as a handler that sends to a log does."""

    def __init__(self, engine: xl.Engine) -> None:
        super().__init__()
        self.engine = engine
        self.values: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.values.append(record.getMessage())
        with self.engine.topic("lines").producer() as producer:
            producer.send(record.getMessage().encode())


def test_a_handler_that_uses_the_library_does_not_log_itself(
    path: str, tmp_path: Path, broken
) -> None:
    with xl.open(str(tmp_path / "lines")) as there, xl.open(path) as engine:
        handler = broken(Using(there))
        with engine.topic("orders").producer("exclusive") as producer:
            assert producer.send(b"x") == 0
        until(lambda: there.topic("lines").next_offset >= 2)
        assert any("was granted" in value for value in handler.values)


# A program that logs much; the last line is longer than what fits into a pipe at once.
LOGGING = """
import logging, os, sys
import exclusivelog as xl
from exclusivelog import logs
handlers, path = sys.argv[1:]
if handlers == "a handler":
    logging.basicConfig(level=logging.DEBUG)
with xl.open(path) as engine:
    topic = engine.topic("orders")
    first = topic.producer("exclusive")
    second = topic.producer("exclusive_with_fencing")
    print(second.send(b"x"), topic.owner.epoch)
    for number in range(20):
        logs.emit(logging.getLogger("exclusivelog"), logs.NO_SNAPSHOT, topic="orders", reason="x")
    try:
        raise ValueError("a long text " * 20_000)
    except ValueError as error:
        logs.emit(logging.getLogger("exclusivelog"), logs.RETENTION_FAILED, error=error)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("handlers", ["a handler", "no handler"])  # Python's own takes warnings
@pytest.mark.parametrize(
    "how",
    ["2>&-", "2>/dev/full", "a full pipe", "a pipe that becomes full", "a pipe without a reader"],
)
def test_no_stderr_hurts_a_call(path: str, full_pipe: int, how: str, handlers: str) -> None:
    stderr = full_pipe
    if how.startswith("a pipe"):
        reading, stderr = os.pipe()
        if "without" in how:
            os.close(reading)
    redirection = how if how.startswith("2>") else ""
    # Unbuffered: else Python itself ends with 120 if it cannot write the rest of stderr.
    program = [sys.executable, "-u", "-c", LOGGING, handlers, path]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *program],
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
    )
    if stderr is not full_pipe:
        os.close(stderr)
    if how == "a pipe that becomes full":
        told = os.read(reading, 1 << 16)
        os.close(reading)
        assert told.count(b"no snapshot") == 20
        assert b"a long text" not in told  # it is longer than the pipe
    assert (done.stdout, done.returncode) == (b"0 2\n", 0)


@pytest.mark.sampled
@pytest.mark.parametrize("close", ["sys.stderr.close()", "os.close(2)"])
def test_a_stderr_that_is_closed_later_hurts_no_call(path: str, close: str) -> None:
    program = LOGGING.replace("with xl.open", f"{close}\nwith xl.open")
    done = subprocess.run(
        [sys.executable, "-u", "-c", program, "a handler", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
    )
    assert (done.stdout, done.returncode) == (b"0 2\n", 0)


def test_a_blocked_handler_is_left_out_and_the_others_are_not(full_pipe: int, broken) -> None:
    heard: list[str] = []
    other = logging.Handler()
    other.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    with os.fdopen(os.dup(full_pipe), "w") as stream:
        broken(logging.StreamHandler(stream))
        broken(other)
        log = logging.getLogger("exclusivelog.x")
        logs.emit(log, logs.NO_SNAPSHOT, ledger="log", topic="orders", reason="full")
    assert heard == ["log: topic 'orders': no snapshot: full"]


def test_an_interrupt_goes_through_a_handler(broken) -> None:
    """Ctrl-C is no fault of a handler: it ends the call as ever."""
    handler = broken(Broken(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        logs.emit(
            logging.getLogger("exclusivelog"), logs.CLOSED, engine="a", engine_id="b", ledger="c"
        )
    assert handler.calls == 1
