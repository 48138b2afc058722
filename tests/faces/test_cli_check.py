"""`exclusivelog check`: what it finds, and the exit statuses that probes go by."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from click.testing import CliRunner

import exclusivelog as xl
from exclusivelog.cli.findings import findings
from exclusivelog.cli.program import program
from testing.deaths import LOCKS, READERS, WRITER, die_unreported
from testing.disks import disk, leave
from testing.processes import (
    EXCLUSIVE,
    PATIENCE,
    State,
    Worker,
    forked,
    open_producer,
    stop_outside,
    until,
)
from testing.stops import PLACES, stopped
from tests.faces.test_cli import lines, refusal, run

pytestmark = pytest.mark.once
KEEPALIVE = 0.5
PAGE = os.sysconf("SC_PAGE_SIZE")  # of LMDB
SOUND = xl.EngineStats(used_bytes=1, map_size=1000, journal_bytes=0, journal_capacity=1000)


def stop_inside(state: State) -> None:
    """Be stopped while all other writers wait for this one."""
    with state.engine.ledger.write_exclusive():
        os.kill(os.getpid(), signal.SIGSTOP)


def checked(path: str, *options: str) -> tuple[int, list[tuple[str, bool]]]:
    """(exit status, what was found) of a check."""
    done = run("check", path, "--json", *options)
    assert done.stderr == b""
    answer = json.loads(done.stdout)
    assert answer["healthy"] == (not answer["findings"])
    return done.returncode, [(each["check"], each["blocks"]) for each in answer["findings"]]


def files(path: str) -> dict[str, tuple[int, int]]:
    """Each file's size and time of its last change."""
    found = ((file, file.stat()) for file in sorted(Path(path).iterdir()))
    return {file.name: (facts.st_size, facts.st_mtime_ns) for file, facts in found}


def test_a_log_that_nothing_is_wrong_with(path: str) -> None:
    with xl.open(path) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"a")
        assert checked(path, "--strict") == (0, [])
        assert run("check", path).stdout.decode() == f"{path} is healthy\n"
    before = files(path)
    assert checked(path) == (0, [])
    assert {name: size for name, (size, _) in files(path).items()} == {
        name: size for name, (size, _) in before.items()
    }
    assert files(path)["journal"] == before["journal"]


def test_what_is_no_log_cannot_be_used_and_is_not_made(tmp_path: Path) -> None:
    missing, text = tmp_path / "missing", tmp_path / "text"
    text.mkdir()
    (text / "data.mdb").write_bytes(b"no tables" * 1000)
    assert checked(str(missing)) == (1, [("open", True)])
    assert checked(str(text)) == (1, [("open", True)])
    assert not missing.exists()
    done = run("check", str(missing))
    assert (done.returncode, b"open\tblocked\t" in done.stdout) == (1, True)


def test_an_engine_that_does_not_respond_needs_attention(
    path: str, worker: Callable[..., Worker]
) -> None:
    stopped = worker(name="w", keepalive=KEEPALIVE)
    stopped.call(open_producer, EXCLUSIVE)
    stop_outside(path, stopped.pid)
    until(lambda: checked(path)[1])
    assert checked(path) == (0, [("engines", False)])
    assert checked(path, "--strict") == (3, [("engines", False)])
    told = run("check", path).stdout.decode()
    assert f"engine 'w' (id {stopped.id}, pid {stopped.pid}) has been silent for" in told
    stopped.signal(signal.SIGCONT)
    until(lambda: checked(path) == (0, []))


def test_an_engine_that_is_stopped_with_the_writer_lock_blocks_all(
    path: str, worker: Callable[..., Worker]
) -> None:
    stopped = worker(name="w", keepalive=KEEPALIVE)
    stopped.start(stop_inside)
    stopped.await_stop()
    until(lambda: checked(path) == (1, [("writers", True)]))
    stopped.signal(signal.SIGCONT)
    stopped.answer()
    until(lambda: checked(path) == (0, []))


@pytest.mark.rule("C8", "K3")
def test_a_stopped_holder_of_a_lock_is_told_before_it_counts_as_silent(
    path: str, worker: Callable[..., Worker]
) -> None:
    hung = worker(name="w")
    hung.start(stop_inside)
    hung.await_stop()
    assert checked(path) == (1, [("locks", True)])
    told = run("check", path).stdout.decode()
    assert f"engine 'w' (id {hung.id}, pid {hung.pid})" in told
    assert "has held the append lock and the writer lock and LMDB's lock of writers for" in told
    assert "and is stopped: resume or end its process" in told
    hung.signal(signal.SIGCONT)
    hung.answer()
    until(lambda: checked(path) == (0, []))


@pytest.mark.rule("C8")
@pytest.mark.parametrize(
    "lock", [pytest.param(lock, marks=() if lock == WRITER else pytest.mark.long) for lock in LOCKS]
)
def test_a_lock_that_a_dead_thread_left_is_no_healthy_log(
    path: str, worker: Callable[..., Worker], lock: str
) -> None:
    """The engines that run are stopped, so that none of them takes it. Readers take LMDB's lock of
    readers themselves."""
    stopped, dead = worker(name="stopped"), worker(name="dead")
    stop_outside(path, stopped.pid)
    dead.start(die_unreported, lock)
    dead.process.join(PATIENCE)
    expected = (0, []) if lock == READERS else (1, [("locks", True)])
    assert checked(path) == expected
    if lock != READERS:
        assert "a thread that has ended (thread " in run("check", path).stdout.decode()
    stopped.signal(signal.SIGCONT)
    until(lambda: checked(path) == (0, []))


@pytest.mark.rule("K3")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keepalive", [None, 3600])
def test_k3_it_blocks_all_however_long_its_keepalive_is(
    path: str, worker: Callable[..., Worker], place: str, keepalive: float | None
) -> None:
    """A probe must not call a ledger healthy in which no process can write. The stop may find
    another thread of the process in another lock, which is told, too."""
    process = worker(name="w", keepalive=keepalive)

    def told() -> str:
        return run("check", path).stdout.decode()

    def each_is_told() -> bool:
        status, problems = checked(path)
        assert (status, set(problems)) == (1, {("locks", True)})
        return told().count(f"pid {process.pid})") == len(problems)

    with stopped(process, place):
        until(each_is_told)  # a lock is told once it has been held for a while
        assert "is stopped: resume or end its process" in told()
        assert f"pid {process.pid}), silent for" in run("owners", path).stdout.decode()
    process.answer()
    until(lambda: checked(path) == (0, []))


@pytest.mark.rule("K3")
def test_k3_writers_that_make_progress_are_healthy(path: str) -> None:
    """A look finds one of them inside nearly always."""
    ended = threading.Event()
    with xl.open(path, durability="process") as engine, engine.topic("t").producer() as producer:

        def send() -> None:
            while not ended.is_set():
                producer.send_many([b"x"] * 1000)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            for _ in range(5):
                assert not {"writers", "locks"} & {check for check, _ in checked(path)[1]}
        finally:
            ended.set()
            sender.join()


def test_a_disk_that_is_full_blocks_and_one_that_is_nearly_full_does_not(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 400) as where:
        path = str(where / "log")
        run("send", path, "orders", "a")
        assert checked(path, "--strict") == (0, [])
        leave(where, 8 << 20)
        assert checked(path) == (0, [("disk", False)])
        assert checked(path, "--strict") == (3, [("disk", False)])
        ballast = leave(where, 64 << 10)
        assert checked(path, "--strict") == (1, [("disk", True)])
        ballast.unlink()
        assert checked(path, "--strict") == (0, [])


def test_a_log_on_a_read_only_mount_is_healthy_and_read(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 400) as where:
        path = str(where / "log")
        run("send", path, "orders", "a")  # this process would keep files open
        subprocess.run(["mount", "-o", "remount,ro", where], check=True, timeout=PATIENCE)
        assert checked(path, "--strict") == (0, [])
        assert [row[5] for row in lines("tail", path, "orders")] == ["a"]
        assert "cannot be written" in refusal("send", path, "orders", "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_log_cannot_be_used(path: str) -> None:
    xl.open(path).close()
    with tempfile.TemporaryDirectory() as place:  # pytest's are root's, up to the first
        os.chmod(place, 0o711)
        theirs = shutil.copytree(path, f"{place}/log")
        os.chmod(theirs, 0o700)

        def as_another() -> list[tuple[int, str]]:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            done = [CliRunner().invoke(program, ["check", log]) for log in (theirs, path)]
            return [(each.exit_code, each.output) for each in done]

        (status, told), (above, told_of_above) = forked(as_another)
    assert (status, above) == (1, 1)
    assert f"open\tblocked\t{theirs} may not be read by this user; check its owner" in told
    assert "cannot be reached by this user" in told_of_above


@pytest.mark.parametrize(
    ("stats", "check", "blocks"),
    [
        (replace(SOUND, disk_low=True, disk_free_bytes=2 << 20), "disk", False),
        (replace(SOUND, disk_low=True, disk_free_bytes=4096), "disk", True),
        (replace(SOUND, used_bytes=801), "tables", False),
        (replace(SOUND, journal_bytes=751), "journal", False),
        (replace(SOUND, oldest_reader={"pid": 7, "transactions_behind": 101}), "readers", False),
    ],
    ids=["nearly full disk", "full disk", "tables", "journal", "reader"],
)
def test_what_runs_short_is_told(stats: xl.EngineStats, check: str, blocks: bool) -> None:
    assert [(each.check, each.blocks) for each in findings(stats, None)] == [(check, blocks)]
    assert list(findings(SOUND, None)) == []


def test_the_figures_say_how_full_the_disk_is(engine: xl.Engine) -> None:
    stats, disk = engine.stats(), os.statvfs(engine.path)
    assert abs(stats.disk_free_bytes - disk.f_bavail * disk.f_frsize) < disk.f_frsize << 18
    assert stats.disk_free_bytes > 0
    assert stats.unresponsive == ()


@pytest.mark.rule("G9", "H2")
@pytest.mark.parametrize("table", ["entries", "topics", "names", "queue"])
def test_a_table_whose_root_is_damaged_is_named(path: str, table: str) -> None:
    with xl.open(path) as engine:
        for name in ("a", "b"):
            with engine.topic(name).producer("exclusive") as producer:
                producer.send(b"x")
        owner = engine.topic("a").producer("exclusive")
        waiter = engine.topic("a").producer_async("wait_for_exclusive")
        engine.ledger.checkpoint()
        shutil.copytree(path, f"{path}-copy")
        assert waiter.cancel()
        owner.close()
    damage_root(f"{path}-copy", table)
    done = run("check", f"{path}-copy")
    assert done.returncode == 1
    assert b"data.mdb is damaged: the root of a table cannot be read; restore" in done.stdout
    assert run("verify", f"{path}-copy").returncode == 1
    with pytest.raises(xl.LedgerCorruptedError, match="the root of a table"):
        with xl.open(f"{path}-copy") as engine:
            engine.topic("a").producer("exclusive_with_fencing").send(b"y")


def damage_root(path: str, table: str) -> None:
    with lmdb.open(path, max_dbs=64, readonly=True, lock=False) as environment:
        with environment.begin() as transaction:
            described = transaction.get(table.encode())
            assert described is not None
            [page] = struct.unpack("<40xQ", described)
    with open(f"{path}/data.mdb", "r+b") as file:
        file.seek(page * PAGE)
        file.write(random.Random(1).randbytes(PAGE))
