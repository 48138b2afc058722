"""What the outside world does to a ledger that is in use: kills, full disks, failing devices,
too many readers (rules H1, H2). Each gets a clear error of its own, nothing acknowledged is
lost, and the engine works again once the cause is gone."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import functools
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local import faults
from exclusivelog.local.log import reading
from exclusivelog.local.storage import environment, ledger, tables
from exclusivelog.local.storage.journal import CAPACITY, HEADER
from exclusivelog.local.worker import BackgroundWorker, Heartbeat
from exclusivelog.messages import Columns
from exclusivelog.once import Run, append_once
from testing.children import ROOT, child, command, finish, line, tell
from testing.disks import OPENS, disk, leave, needs_strace
from testing.processes import PATIENCE, Failed, State, open_producer, send, until, values, within
from testing.strace import injecting

pytestmark = pytest.mark.usual_journal  # its size decides what fits on a disk

# ---- H1: acknowledged is there -----------------------------------------------------------

# Threads of one process send in every way, and say what has been acknowledged.
ACKNOWLEDGES = """
    import os, sys, threading
    import exclusivelog as xl
    producer = xl.open(sys.argv[1]).topic("t").producer("exclusive_with_fencing")

    def tell(value):
        os.write(1, value + b"\\n")

    def run(name):
        for n in range(10**6):
            value = name + b" %d" % n
            if n % 2:
                producer.send_async(value).add_done_callback(
                    lambda r, value=value: tell(value) if r.exception(0) is None else None)
            else:
                producer.send(value)
                tell(value)

    for i in range(3):
        threading.Thread(target=run, args=(sys.argv[2].encode() + b" %d" % i,)).start()
"""


@pytest.mark.long
def test_h1_what_was_acknowledged_survives_a_kill(path) -> None:
    """A process is killed in the middle of its sends, again and again; every message that it
    knew to be in the log is in the log."""
    dice, acknowledged = random.Random(1), set()
    for number in range(10):
        with child(ACKNOWLEDGES, path, number) as process:
            acknowledged |= {line(process) for _ in range(4)}
            time.sleep(dice.random() * 0.05)
            process.kill()
            process.wait(PATIENCE)
            acknowledged |= set(process.stdout.read().split("\n")[:-1])
    with xl.open(path) as engine:
        log = {value.decode() for value in values(engine.topic("t"))}
        assert engine.verify().ok
    assert len(acknowledged) > 20
    assert acknowledged <= log


SENDS_AND_SAYS = """
    import os, sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1], durability="power")
    engine.ledger.checkpoint = lambda: None  # another thread writes it, and no send waits for that
    producer = engine.topic("t").producer()
    os.write(1, b"begin\\n")
    for n in range(20):
        producer.send(b"x" * 100) if n % 2 else producer.send_many([b"x"] * 1000)
        os.write(1, b"acknowledged\\n")
    os._exit(0)
"""


@pytest.mark.long
@needs_strace
def test_h1_every_acknowledgement_stands_behind_a_flush(path, tmp_path) -> None:
    """In the order of the system calls: everything that a commit writes is flushed, or written with
    a descriptor that flushes by itself, before the send is acknowledged."""
    trace = tmp_path / "trace"
    calls = "trace=openat,pwrite64,pwritev,write,writev,fdatasync,fsync,msync"
    subprocess.run(
        ["strace", "-f", "-o", trace, "-e", calls, *command(SENDS_AND_SAYS, path)],
        check=True,
        timeout=PATIENCE,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    synced: set[str] = set()
    flushes, dirty, acknowledged = 0, False, 0
    for call in trace.read_text().splitlines():
        if '"begin' in call:
            flushes, dirty = 0, False
        elif "acknowledged" in call:
            assert flushes
            assert not dirty
            flushes, acknowledged = 0, acknowledged + 1
        elif found := re.search(r"(fdatasync|fsync|msync)(\(| resumed>).* = 0", call):
            flushes, dirty = flushes + 1, False
        elif found := re.search(r"openat\(.*O_D?SYNC.* = (\d+)", call):
            synced.add(found[1])
        elif found := re.search(r"(?:pwrite64|pwritev|writev)\((\d+), ", call):
            dirty |= found[1] not in synced
    assert acknowledged == 20


# ---- H2: the disk is full ----------------------------------------------------------------


JOURNAL = CAPACITY + HEADER  # bytes that every ledger takes from the start


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 3 + 2 * JOURNAL / (1 << 20)) as where:
        yield where


def fill(producer: xl.Producer, size: int = 20_000) -> tuple[int, xl.ExclusiveLogError]:
    """Send until it fails: how many were acknowledged, and the error."""
    for count in range(10_000):
        try:
            producer.send(b"%06d" % count + bytes(size))
        except xl.ExclusiveLogError as error:
            return count, error
    raise AssertionError("there is no end to it")


def check_full(error: xl.ExclusiveLogError) -> None:
    assert type(error) is xl.LedgerFullError
    assert error.errno == errno.ENOSPC
    assert error.retriable
    assert not error.maybe_written


def numbers(topic: xl.Topic) -> list[int]:
    return [int(value[:6]) for value in values(topic)]


@pytest.mark.long
def test_h2_a_disk_that_fills_up_while_writing(small_disk) -> None:
    """The disk is full in the middle of a stream of messages. The sender is told; what was
    acknowledged can be read, by this engine and by the next; and once there is room, the same
    producer goes on."""
    path = small_disk / "log"
    ballast = leave(small_disk, (2 << 20) + JOURNAL)
    with xl.open(path) as engine:
        topic = engine.topic("t")
        producer = topic.producer("exclusive", name="p")
        count, error = fill(producer)
        check_full(error)
        assert count > 10
        for _ in range(3):
            check_full(fill(producer)[1])
        check_full(producer.send_async(bytes(1 << 20)).exception(PATIENCE))
        with pytest.raises(xl.LedgerFullError):
            producer.send_many([bytes(100_000)] * 20)
        acknowledged = topic.next_offset
        assert acknowledged >= count
        assert numbers(topic)[:count] == list(range(count))
        assert engine.verify().ok
        assert producer.state == "open"
        ballast.unlink()
        assert producer.send(b"000777") == acknowledged
        producer.close()
    with xl.open(path) as engine:
        assert engine.verify().ok
        assert numbers(engine.topic("t"))[-1] == 777
        assert engine.topic("t").next_offset == acknowledged + 1


def test_h2_closing_on_a_full_disk_ends_and_loses_nothing(small_disk) -> None:
    path = small_disk / "log"
    ballast = leave(small_disk, (3 << 19) + JOURNAL)
    engine = xl.open(path)
    producer = engine.topic("t").producer("exclusive")
    count, _ = fill(producer)
    receipts = [producer.send_async(bytes(50_000)) for _ in range(20)]
    within(engine.close, PATIENCE)
    assert all(receipt.done() for receipt in receipts)
    sent = [r.result(0) for r in receipts if r.exception(0) is None]
    ballast.unlink()
    with xl.open(path) as engine:
        topic = engine.topic("t")
        assert topic.owner is None
        assert topic.next_offset >= count + len(sent)
        with topic.producer("exclusive") as producer:
            assert producer.send(b"000777") == topic.next_offset - 1


def test_h2_a_topic_is_given_back_once_there_is_room(small_disk) -> None:
    """The owner closes on a full disk: it cannot even write that it has left. Its waiter gets
    the topic as soon as there is room, not when the process ends."""
    path = small_disk / "log"
    ballast = leave(small_disk, (1 << 20) + JOURNAL)
    with xl.open(path) as engine:
        topic = engine.topic("t")
        owner = topic.producer("exclusive")
        waiter = topic.producer_async("wait_for_exclusive", timeout=PATIENCE)
        fill(owner)
        fill(owner, 10)
        with contextlib.suppress(xl.LedgerFullError):
            owner.close()
        assert owner.state == "closed"
        ballast.unlink()
        with waiter.result(PATIENCE) as producer:
            producer.send(b"000777")


@pytest.mark.long
def test_h2_opening_a_new_ledger_on_a_full_disk(tmp_path) -> None:
    """With every amount of room from none to enough. Files that are made with holes, and
    mapped, would end the process with SIGBUS here."""
    said = collections.Counter()
    with disk(tmp_path / "disk", 3 + JOURNAL / (1 << 20)) as where:
        without = [0, 4096, 40_000, 594_000, 640_000, 690_000, 2 << 20]
        behind = [0, 594_000, 640_000, 660_000, 690_000, 1 << 20, 3 << 19]
        for free in [*without, *(JOURNAL + size for size in behind)]:
            ballast = leave(where, free)
            said[finish(OPENS, where / "log").strip()] += 1
            ballast.unlink()
            with xl.open(where / "log") as engine, engine.topic("t").producer() as producer:
                producer.send(b"y")
                assert engine.verify().ok
            shutil.rmtree(where / "log")
    assert said["full"] > 3
    assert said["opened"] > 0
    assert said.total() == 14


@pytest.mark.parametrize("thread", [Heartbeat, BackgroundWorker])
def test_h2_a_closed_engine_lets_go_of_its_files_at_once(path, monkeypatch, thread) -> None:
    """Not only when Python looks for cycles, nor when the last of its threads has come to its
    end, however slow that is: the room of a ledger that is removed is needed."""
    monkeypatch.setattr(thread, "_run", functools.partialmethod(end_late, thread._run))
    gc.disable()
    try:
        for _ in range(3):
            with xl.open(path) as engine, engine.topic("t").producer("exclusive") as producer:
                producer.send_async(b"x").add_done_callback(lambda receipt: None)
            del engine, producer
            assert path not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def end_late(thread: Any, run: Callable[..., None], *args: Any) -> None:
    run(thread, *args)
    time.sleep(0.2)


# ---- H2: what is not the ledger's own --------------------------------------------------


def fail_in_the_middle(state: State, error: OSError) -> None:
    """A batch is appended whose source breaks off."""

    def source() -> Iterator[Columns]:
        yield Columns(_core.strings([b"half"]))
        raise error

    append_once(state.engine, Run(None, "run", "writer"), None, {"new": source()})


def be_struck(state: State, error: OSError) -> None:
    """A signal handler raises, inside a transaction of the thread that it interrupts."""

    def handler(*_: Any) -> None:
        raise error

    put_holder = tables.SessionTable.put_holder

    def strike(*args: Any) -> None:
        tables.SessionTable.put_holder = put_holder
        signal.raise_signal(signal.SIGUSR1)
        put_holder(*args)

    signal.signal(signal.SIGUSR1, handler)
    tables.SessionTable.put_holder = strike
    state.engine.topic("new").producer("exclusive")


@pytest.mark.parametrize(
    "error",
    [
        OSError("as in Python's own example of a handler"),
        ConnectionResetError(104, "reset"),
        ChildProcessError(10, "no child"),
        ProcessLookupError(3, "gone"),
        TimeoutError("late"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", [fail_in_the_middle, be_struck])
def test_h2_an_error_that_is_not_the_ledgers_stops_no_process(path, worker, where, error) -> None:
    """The error is raised inside a transaction, which is rolled back. The caller gets this error.
    Once it was taken for a failing disk, and every process had to open the ledger again."""
    process = worker()
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        with pytest.raises(Failed, match=type(error).__name__):
            process.call(where, error)
        assert producer.send(b"x") == 0
        process.call(open_producer, "shared")
        assert process.call(send, b"y") == 1
        assert engine.topics() == (["orders"] if where is fail_in_the_middle else ["new", "orders"])
        assert values(engine.topic("new")) == []


def test_h2_a_source_whose_own_disk_fails_stops_no_process(path, worker) -> None:
    process = worker()
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        with pytest.raises(Failed, match="the staged file"):
            process.call(fail_in_the_middle, OSError(errno.EIO, "the staged file"))
        assert producer.send(b"x") == 0
        assert engine.topics() == ["orders"]


def close_beside_a_long_look(state: State) -> str:
    """What a thread is told that looks at everything, and is not done when closing its engine
    has waited long enough for it."""
    ledger.CLOSE_WAIT_SECONDS = 0.2  # else the look must take more than five seconds
    check_place, told = reading.check_place, []
    inside, closed = threading.Event(), threading.Event()

    def take_long(*args: Any) -> None:
        inside.set()
        assert closed.wait(PATIENCE)
        check_place(*args)

    def look() -> None:
        try:
            state.engine.verify()
        except xl.ExclusiveLogError as error:
            told.append(type(error).__name__)

    reading.check_place = take_long
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert inside.wait(PATIENCE)
    state.engine.close()
    closed.set()
    thread.join(PATIENCE)
    return told[0]


def test_h2_closing_beside_a_long_look_stops_no_other(path, worker) -> None:
    """LMDB is closed under the look then, which is told so. It was taken for a disk that fails,
    and every process had to open the ledger again."""
    process = worker()
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        for number in range(2):
            assert producer.send(b"x") == number
            engine.ledger.checkpoint()
        assert process.call(close_beside_a_long_look) == "EngineClosedError"
        assert producer.send(b"x") == 2


def make_topics(engine: xl.Engine) -> None:
    for number in range(1000):
        engine.topic(f"t{number}").producer().send(bytes(5000))


def test_h2_opening_an_old_ledger_on_a_full_disk(small_disk) -> None:
    """Everything that is there can be read; what needs room says that there is none."""
    path = small_disk / "log"
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send_many([b"x"] * 1000)
    ballast = leave(small_disk, 0)
    with xl.open(path) as engine:
        topic = engine.topic("t")
        assert values(topic) == [b"x"] * 1000
        with pytest.raises(xl.LedgerFullError):
            make_topics(engine)
        assert engine.verify().ok
        ballast.unlink()
        with topic.producer() as producer:
            assert producer.send(b"y") == 1000
    assert finish(OPENS, path) == "opened\n"


def test_h2_a_write_that_a_full_disk_cuts_short_is_no_io_error(small_disk) -> None:
    """LMDB says "Input/output error" of both. ext4 keeps 2 % for itself, which look free."""
    path = small_disk / "log"
    with xl.open(path):
        pass
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    assert type(faults.translation(str(path), error)) is xl.LedgerIOError
    leave(small_disk, 0)
    facts = os.statvfs(small_disk)
    assert facts.f_bfree * facts.f_frsize > 300_000
    assert type(faults.translation(str(path), error)) is xl.LedgerFullError


@pytest.mark.long
def test_h2_opening_an_old_ledger_whose_lock_files_are_gone_on_a_full_disk(small_disk) -> None:
    path = small_disk / "log"
    assert finish(OPENS, path) == "opened\n"
    ballast = leave(small_disk, 0)
    for name in ("owners.lock", "lock.mdb"):
        (path / name).unlink()
        leave(small_disk, 0)
        assert finish(OPENS, path) == "full\n"
    ballast.unlink()
    assert finish(OPENS, path) == "opened\n"


LIMITED = """
    import resource, sys
    import exclusivelog as xl
    from tests.storage.test_faults import check_full, fill, numbers

    with xl.open(sys.argv[1], durability="power") as engine:
        topic = engine.topic("t")
        producer = topic.producer("exclusive")
        producer.send(b"000000")
        used = engine.stats()["used_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (used + 400_000, resource.RLIM_INFINITY))
        count, error = fill(producer)
        check_full(error)
        assert 3 < count < 30, count
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert numbers(topic) == [0, *range(count)]
        assert producer.send(b"000001") == count + 1
        assert engine.verify().ok
"""


@pytest.mark.long
def test_h2_a_file_that_may_not_grow(path) -> None:
    """RLIMIT_FSIZE, which a service manager may set."""
    finish(LIMITED, path)
    with xl.open(path) as engine:
        assert engine.verify().ok


def test_h2_a_backup_without_room(path, small_disk) -> None:
    leave(small_disk, 3 << 20)
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send_many([bytes(100_000)] * 40)
        with pytest.raises(xl.LedgerFullError):
            engine.backup(small_disk / "copy")
        shutil.rmtree(small_disk / "copy", ignore_errors=True)
        with pytest.raises(xl.LedgerError):
            engine.backup(path)  # not empty
        engine.backup(small_disk.parent / "roomy")
        producer.send(b"x")
    with xl.open(small_disk.parent / "roomy") as engine:
        assert engine.topic("t").next_offset == 40
        assert engine.verify().ok


def a_file(path, monkeypatch) -> None:
    path.write_bytes(b"")


def filled_meanwhile(path, monkeypatch) -> None:
    """With another program's file, between our look into it and our copy."""
    look = os.listdir

    def listdir(where: int) -> list[str]:
        names = look(where)
        if names == ["backup-unfinished"] and os.readlink(f"/proc/self/fd/{where}") == str(path):
            (path / "notes.txt").write_bytes(b"")
        return names

    monkeypatch.setattr(os, "listdir", listdir)


def failing(path, monkeypatch) -> None:
    """A medium that answers with EIO."""

    def mkdir(where: str, *options: object, **others: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), where)

    monkeypatch.setattr(os, "mkdir", mkdir)


def outrun(path, monkeypatch) -> None:
    """Others append more while the tables are copied than the journal has room for."""
    monkeypatch.setattr("exclusivelog.local.maintenance.backup._copy", lambda *args: False)


@pytest.mark.parametrize("befalls", [a_file, filled_meanwhile, failing, outrun])
def test_h2_a_backup_that_fails_is_not_the_end_of_the_ledger(
    path, tmp_path, monkeypatch, befalls
) -> None:
    """Only the copy is damaged: the engine goes on, and so do other processes."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        befalls(tmp_path / "copy", monkeypatch)
        with pytest.raises(xl.LedgerError):
            engine.backup(tmp_path / "copy")
        monkeypatch.undo()
        assert producer.send(b"x") == 0
        assert not engine.ledger.journal.failed  # which ends the others, too
        engine.backup(tmp_path / "roomy")


# ---- H2: the map is full -----------------------------------------------------------------


def test_h2_a_full_map(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("t")
        producer = topic.producer("exclusive")
        count, error = fill(producer)
        check_full(error)
        assert "map_size" in str(error)
        assert count > 10
        assert numbers(topic) == list(range(count))
        assert engine.verify().ok
        assert producer.send(b"000777") == count  # a small one still fits
    with xl.open(path, map_size=8 << 20) as engine:
        assert fill(engine.topic("t").producer())[0] > 100


def test_h2_a_full_map_has_room_again_when_a_topic_is_deleted(path) -> None:
    with xl.open(path, map_size=12 << 20) as engine:
        with engine.topic("old").producer() as producer:
            for _ in range(3):
                producer.send_many([bytes(1000)] * 3000)
        producer = engine.topic("t").producer()
        fill(producer)
        engine.delete_topic("old")
        assert fill(producer)[0] > 5
        assert engine.verify().ok


def test_h2_large_entries_are_limited_too_and_have_room_again(path) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        with engine.topic("old").producer() as producer:
            for _ in range(3):
                producer.send_many([bytes(1000)] * 300)
        topic = engine.topic("t")
        with topic.producer() as producer:
            with pytest.raises(xl.LedgerFullError, match="map_size") as caught:
                producer.send_many([bytes(1000)] * 300)
            assert not caught.value.maybe_written
            assert producer.send(b"small") == 0
            engine.delete_topic("old")
            assert len(producer.send_many([bytes(1000)] * 900)) == 900
        assert engine.verify().ok
        assert engine.stats()["large_bytes"] < 1 << 20


def send_large(state: State, count: int) -> None:
    with state.topic.producer() as producer:
        producer.send_many([bytes(100_000)] * count)


def test_h2_a_map_that_another_process_made_larger(path, worker) -> None:
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("orders")
        reader = topic.reader()
        large = worker(map_size=64 << 20)
        large.call(send_large, 100)
        assert len(list(reader)) == 100
        with topic.producer() as producer:
            assert producer.send_many([bytes(100_000)] * 50) == range(100, 150)
        large.call(send_large, 100)
        assert engine.verify().messages == 250


# ---- H2: errors of the device ------------------------------------------------------------

FAILS = """
    import os, sys
    import exclusivelog as xl
    from exclusivelog.local.storage.checkpointer import Checkpointer
    Checkpointer.start = lambda self: None  # each thread of it would meet the failures anew

    def open_again():
        global engine, producer
        for attempt in range(20):
            engine.close()
            try:
                engine = xl.open(sys.argv[1], durability="power")
                producer = engine.topic("t").producer("exclusive_with_fencing", name="p")
                return
            except (xl.LedgerIOError, xl.LedgerFullError):
                pass
        raise SystemExit("it cannot be opened any more")

    engine = xl.open(sys.argv[1], durability="power")
    producer = engine.topic("t").producer("exclusive_with_fencing", name="p")
    producer.send(b"0")
    print("ready", flush=True)
    input()
    failed = []
    for n in range(1, 9):
        denied = False
        for attempt in range(10):
            try:
                producer.send(b"%d" % n, sequence_id=n)
                break
            except xl.DuplicateSequenceError:
                assert not denied, "it was in the log, and the error said that it could not be"
                break
            except xl.ExclusiveLogError as error:
                failed.append(type(error).__name__)
                denied |= not error.maybe_written
                assert denied == isinstance(error, xl.LedgerFullError) or attempt
                if isinstance(error, xl.LedgerIOError):
                    try:
                        producer.send(b"again", sequence_id=n)
                    except xl.LedgerIOError:
                        pass
                    else:
                        raise SystemExit("went on after a failed flush")
                    open_again()
    print(failed, flush=True)
    input()
    open_again()
    print([m.value.decode() for m in engine.topic("t").reader()], engine.verify().ok)
"""


# strace counts the calls of each thread, and the main thread leads no commits.
IN_A_THREAD = f"""
import threading
thread = threading.Thread(target=exec, args=({textwrap.dedent(FAILS)!r}, globals()))
thread.start()
thread.join()
"""


@pytest.mark.sampled
@needs_strace
@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("fdatasync", "EIO", {"LedgerIOError"}),
        ("pwrite64,pwritev,writev", "EIO", {"LedgerIOError"}),
        # A page that could not be flushed may be gone: the journal does not try it again.
        ("fdatasync", "ENOSPC", {"LedgerFullError", "LedgerIOError"}),
        # LMDB gives up when it is its meta page that cannot be written.
        ("pwrite64,pwritev,writev", "ENOSPC", {"LedgerFullError", "LedgerIOError"}),
        ("pwrite64,pwritev,writev", "EDQUOT", {"LedgerFullError", "LedgerIOError"}),
    ],
    ids=["flush-EIO", "write-EIO", "flush-ENOSPC", "write-ENOSPC", "write-EDQUOT"],
)
@pytest.mark.parametrize("when", [1, 2, 3])
def test_h2_a_write_or_flush_that_fails(path, call, error, expected, when) -> None:
    """One call of a kind fails, and every so many later ones. The error says whether the
    message can be in the log; sent again under its sequence id, by this engine or by the next,
    it is there once."""
    with child(IN_A_THREAD, path) as process:
        line(process)
        inject = f"inject={call}:error={error}:when={when}+{3 if call == 'fdatasync' else 11}"
        strace = subprocess.Popen(
            ["strace", "-f", "-p", str(process.pid), "-o", os.devnull, "-e", inject],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert "attached" in strace.stderr.readline()
            tell(process)
            failed = eval(line(process))
        finally:
            strace.terminate()
            strace.communicate(timeout=PATIENCE)
        tell(process)
        assert line(process) == f"{[str(n) for n in range(9)]} True"
    assert failed
    assert set(failed) <= expected


QUEUED = """
    import sys, threading
    import exclusivelog as xl
    from testing.patience import PATIENCE
    engine = xl.open(sys.argv[1], durability="power")
    producers = [engine.topic(name).producer("exclusive") for name in ("a", "b")]
    [producer.send(b"first") for producer in producers]
    print("ready", flush=True)
    input()
    outcomes = []
    def send():
        receipts = [p.send_async(b"queued") for _ in range(20) for p in producers]
        for receipt in receipts:
            try:
                outcomes.append(type(receipt.result(PATIENCE)).__name__)
            except xl.ExclusiveLogError as error:
                outcomes.append((type(error).__name__, error.maybe_written))
    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    print(set(outcomes), flush=True)
    input()
"""


@needs_strace
def test_h1_a_queue_whose_flush_failed_is_not_acknowledged(path) -> None:
    """Every flush fails while messages of two topics are queued: each send is told that its message
    may be in the log, and none that it is."""
    with child(QUEUED, path) as process:
        line(process)
        with injecting(process.pid, "fdatasync:error=EIO"):
            tell(process)
            outcomes = eval(line(process))
        process.kill()
    assert outcomes == {("LedgerIOError", True)}


# ---- H2: too many readers ----------------------------------------------------------------


def test_h2_more_readers_than_the_ledger_takes(path) -> None:
    """Everybody reads at the same moment. Those for whom there is no room are told; as soon as
    somebody has finished, all goes on."""
    with xl.open(path, max_readers=6) as engine:
        topic = engine.topic("t")
        producer = topic.producer()
        producer.send(b"x")
        most = engine.stats()["max_readers"]
        with contextlib.ExitStack() as reading:
            with pytest.raises(xl.LedgerFullError, match="max_readers"):
                deque(reading.enter_context(engine.ledger.read()) for _ in range(most + 1))

            def nobody_can_read() -> bool:
                with contextlib.suppress(xl.LedgerFullError):  # a thread in the background had one
                    while True:
                        reading.enter_context(engine.ledger.read())
                try:
                    values(topic)
                except xl.LedgerFullError:
                    return True
                return False

            until(nobody_can_read)
            time.sleep(0.05)
        assert values(topic) == [b"x"]
        assert producer.send(b"y") == 1
        assert engine.verify().ok


READS_AND_STAYS = """
    import contextlib, sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1])
    with contextlib.ExitStack() as reading:
        for _ in range(int(sys.argv[2])):
            reading.enter_context(engine.ledger.read())
        print("reading", flush=True)
        input()
"""


@pytest.mark.long
def test_h2_readers_that_were_killed_make_room(path) -> None:
    """A reader that is killed leaves its row in LMDB's table. A process that finds the table full
    clears it of the dead."""
    with xl.open(path, max_readers=8) as engine:
        topic = engine.topic("t")
        with topic.producer() as producer:
            producer.send(b"x")
        for _ in range(3):
            with child(READS_AND_STAYS, path, 4) as process:
                assert line(process) == "reading"
                assert values(topic) == [b"x"]
                process.kill()
                process.wait(PATIENCE)
        with contextlib.ExitStack() as reading:
            for _ in range(4):
                reading.enter_context(engine.ledger.read())
            assert values(topic) == [b"x"]


# ---- H2: errors tell what to do ----------------------------------------------------------


def test_h2_every_error_of_the_system_has_an_answer() -> None:
    answers = {
        errno.ENOSPC: xl.LedgerFullError,
        errno.EDQUOT: xl.LedgerFullError,
        errno.EFBIG: xl.LedgerFullError,
        errno.EACCES: xl.LedgerError,
        errno.EROFS: xl.LedgerError,
        errno.EPERM: xl.LedgerError,
        errno.EIO: xl.LedgerIOError,
        errno.ESTALE: xl.LedgerIOError,
    }
    for code, expected in answers.items():
        with pytest.raises(xl.LedgerError) as caught, faults.translated("/some/path"):
            raise OSError(code, os.strerror(code))
        assert type(caught.value) is expected
        assert (isinstance(caught.value, OSError), caught.value.errno) == (True, code)
        assert "/some/path" in str(caught.value)
        assert faults.translation("/another", caught.value) is None
        assert isinstance(caught.value.__cause__, OSError)


def test_h2_a_failed_engine_says_so_until_it_is_opened_again(path) -> None:
    engine = xl.open(path)
    topic = engine.topic("t")
    producer = topic.producer()
    producer.send(b"x")
    reader, seen = topic.reader("latest"), []

    def wait() -> None:
        try:
            reader.read_next(PATIENCE)
        except xl.ExclusiveLogError as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.ledger.integrity.fail(xl.LedgerIOError("the flush failed"))
    for call in (
        lambda: producer.send(b"y"),
        lambda: topic.next_offset,
        lambda: topic.producer(),
        lambda: producer.send_async(b"y").result(PATIENCE),
        lambda: list(topic.reader(0)),
    ):
        with pytest.raises(xl.LedgerIOError):
            call()
    within(engine.close, PATIENCE)
    thread.join(PATIENCE)
    assert [type(error) for error in seen] in ([xl.LedgerIOError], [xl.EngineClosedError])
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == [b"x"]
        assert engine.topic("t").producer("exclusive").send(b"y") == 1


@pytest.mark.sampled
@pytest.mark.parametrize("large", [False, True])
def test_h2_a_long_read_while_another_process_makes_the_map_larger(
    path, worker, monkeypatch, large
) -> None:
    """It goes on for longer than the library waits at once. No call fails: it sees what it saw,
    and who reads or writes beside it waits until the map can be moved."""
    monkeypatch.setattr(environment, "FORK_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(environment, "MAP_RESERVED", 0)  # it is soon full
    with xl.open(path, map_size=1 << 20) as engine:
        topic = engine.topic("orders")
        with topic.producer() as producer:
            producer.send(b"first")
        larger = worker(map_size=64 << 20)
        begun, go_on = threading.Event(), threading.Event()
        seen: list[int] = []

        def look(tables: Any) -> None:
            seen.append(tables.latest(topic.id).next_offset)
            begun.set()
            assert go_on.wait(PATIENCE)
            seen.append(tables.latest(topic.id).next_offset)

        def write() -> int:
            with topic.producer() as producer:
                return producer.send(bytes(200_000) if large else b"last")

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            reading = pool.submit(engine.backend.inspect, look)
            assert begun.wait(PATIENCE)
            larger.call(grow)
            writing, counting = pool.submit(write), pool.submit(lambda: topic.next_offset)
            time.sleep(1.5)  # five times as long as is waited at once
            assert not writing.done()
            go_on.set()
            reading.result(PATIENCE)
            assert writing.result(PATIENCE) == 2001
            assert counting.result(PATIENCE) in (2001, 2002)
        assert seen == [1, 1]


def grow(state: State) -> None:
    """By more than what the map of the test's own process has."""
    with state.topic.producer() as producer:
        for _ in range(20):
            producer.send_many([os.urandom(1000)] * 100)
            state.engine.ledger.checkpoint()  # a little at a time: else it goes beside the tables
