"""A read that does not end keeps pages from being reused: its process is named, and where it
hangs and may be killed, it is (rules C3, H2)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership import notifications
from exclusivelog.local.storage import usage
from exclusivelog.local.storage.environment import Reading, parse_readers
from testing.children import child, line, tell
from testing.processes import PATIENCE, stop_outside, until

pytestmark = pytest.mark.once  # durability changes appends, not who may append

READS = """
    import sys
    import exclusivelog as xl
    path, how, keepalive = sys.argv[1:]
    readonly, keepalive = how == "readonly", float(keepalive)
    with xl.open(path, name="reads", keepalive=keepalive, readonly=readonly) as engine:
        with engine.ledger.read() as tables:
            tables.topics.all()
            print("reading", flush=True)
            input()
        print("over", flush=True)
        input()
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "READERS_SECONDS", 0.05)
    monkeypatch.setattr(usage, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(notifications, "LONGEST_SLEEP_SECONDS", 0.05)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the log has said about reads that do not end."""
    caplog.set_level(logging.WARNING, "exclusivelog")
    return lambda: [text for text in caplog.messages if "data.mdb grows" in text]


def read_on(process: subprocess.Popen[str], path: str, how: str) -> None:
    """It reads from now on, and is stopped unless it sleeps."""
    assert line(process) == "reading"
    if how != "sleeps":  # inside the ledger it would hold up who writes
        stop_outside(path, process.pid)


def stopped(process: subprocess.Popen[str]) -> bool:
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def turn_over(engine: xl.Engine, rounds: int = 200) -> int:
    """Send and trim, so that as much is freed as comes; by how many bytes the tables grew."""
    topic = engine.topic("orders")
    before = engine.stats()["used_bytes"]
    with topic.producer() as producer:
        for _ in range(rounds):
            producer.send(os.urandom(20_000))
            engine.ledger.checkpoint()
            topic.trim(before=topic.next_offset)
    return engine.stats()["used_bytes"] - before


GROWN = 3 << 20  # of 4 MB that go through
HELD_UP = GROWN / 2  # less than that: a read that a busy machine holds up for a moment


def until_pages_are_used_again(engine: xl.Engine) -> None:
    """A round soon needs hardly a page more. On a busy machine one may need some: a thread of
    this process may be held up inside a short read."""
    until(lambda: turn_over(engine) < HELD_UP)


@pytest.fixture
def engine(path: str) -> Iterator[xl.Engine]:
    """Whose tables have the size that they need."""
    with xl.open(path, name="writes") as engine:
        turn_over(engine)
        until_pages_are_used_again(engine)  # the control: without a read, nothing grows
        yield engine


@pytest.mark.long
def test_c3_who_is_stopped_inside_a_read_is_named_once(
    engine: xl.Engine, path: str, told: Callable[[], list[str]]
) -> None:
    """The tables grow for as long as it is stopped, the log names it, and so does
    `stats`. It is not killed, and when it goes on the pages are used again."""
    with child(READS, path, "stops", 0.3) as process:
        read_on(process, path, "stops")
        assert turn_over(engine) > GROWN
        oldest = engine.stats()["oldest_reader"]
        assert (oldest["pid"], oldest["engine"]) == (process.pid, "reads")
        assert oldest["transactions_behind"] > 200
        until(told)
        turn_over(engine, 50)
        [text] = told()
        assert "engine 'reads'" in text
        assert f"pid {process.pid}" in text
        assert stopped(process)
        process.send_signal(signal.SIGCONT)
        tell(process)
        assert line(process) == "over"
        until(lambda: engine.stats()["oldest_reader"] is None)  # a thread beside it reads, too
        until_pages_are_used_again(engine)
        assert len(told()) == 1


@pytest.mark.long
def test_c3_kill_stalled_ends_who_is_stopped_inside_a_read(
    path: str, engine: xl.Engine, told: Callable[[], list[str]]
) -> None:
    """Once it has been silent for longer than its keepalive; the tables do not grow any more."""
    with (
        xl.open(path, name="kills", kill_stalled=True),
        child(READS, path, "stops", 1.0) as process,
    ):
        read_on(process, path, "stops")
        turn_over(engine, 20)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert len(told()) == 1
        until_pages_are_used_again(engine)
        until(lambda: engine.stats()["oldest_reader"] is None)  # a thread beside it reads, too
        assert engine.verify().ok


LIVES = {"it sleeps": "sleeps", "it is read-only": "readonly"}


@pytest.mark.long
@pytest.mark.parametrize("how", LIVES.values(), ids=LIVES)
def test_c3_kill_stalled_spares_who_is_not_silent_or_has_no_keepalive(
    path: str, engine: xl.Engine, told: Callable[[], list[str]], how: str
) -> None:
    """A thread that reads for long in a process whose heart beats; and a read-only engine, which
    has no heart: told by its process id alone."""
    with (
        xl.open(path, name="kills", kill_stalled=True),
        child(READS, path, how, 2.0) as process,
    ):
        read_on(process, path, how)
        turn_over(engine, 20)
        until(told)
        time.sleep(3.0)
        assert process.poll() is None
        [text] = told()
        assert f"process {process.pid}" in text if how == "readonly" else "'reads'" in text


@pytest.mark.long
def test_c3_a_long_read_of_this_process_is_named_with_its_thread(
    engine: xl.Engine, told: Callable[[], list[str]]
) -> None:
    """A verify or a backup that takes minutes, or a transaction that was never left."""
    done, begun = threading.Event(), threading.Event()

    def read() -> None:
        with engine.ledger.read():
            begun.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=read, name="reads-on-and-on")
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        turn_over(engine, 20)
        until(told)
        assert "'reads-on-and-on'" in told()[0]
        assert engine.stats()["oldest_reader"]["pid"] == os.getpid()
    finally:
        done.set()
        thread.join(PATIENCE)
    until(lambda: engine.stats()["oldest_reader"] is None)  # a thread beside it reads, too


@pytest.mark.smoke
@pytest.mark.long
def test_c2_the_place_of_a_reader_that_was_killed_is_given_back(
    engine: xl.Engine, path: str, told: Callable[[], list[str]]
) -> None:
    """It died inside a read. LMDB alone would keep its snapshot until the ledger is opened."""
    with child(READS, path, "sleeps", 0.3) as process:
        assert line(process) == "reading"
        process.kill()  # and it is not even reaped
        turn_over(engine, 20)
        until(lambda: engine.stats()["oldest_reader"] is None)
        until_pages_are_used_again(engine)
        assert told() == []


@pytest.mark.long
def test_c2_control_without_a_look_a_killed_reader_pins_pages(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage.PinnedPages, "check", lambda self, env: None)
    with child(READS, path, "sleeps", 0.3) as process:
        assert line(process) == "reading"
        process.kill()
        assert turn_over(engine) > GROWN


@pytest.mark.long
def test_c3_many_short_reads_are_no_long_one(
    engine: xl.Engine, told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "STALLED_SECONDS", 2.0)  # a busy machine stops a thread for less
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            engine.topics()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        begin = time.monotonic()
        while time.monotonic() - begin < 5.0:
            turn_over(engine, 5)
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert told() == []


@pytest.mark.long
def test_c3_lmdb_s_listing_is_understood(engine: xl.Engine) -> None:
    """Header, places without a read, and no table at all."""
    assert parse_readers("(no active readers)\n") == parse_readers("(no reader locks)\n") == []
    with engine.ledger.environment() as env, env.begin() as read:
        listed = parse_readers(env.readers())
        here, seen = threading.get_ident(), read.id()
    [found] = [each for each in listed if each.thread == here]  # a thread beside it reads, too
    assert found == Reading(os.getpid(), here, seen)
