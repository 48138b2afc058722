"""Rule K3: what a paused process can hold, and who is told about it.

A process is stopped (SIGSTOP) with each thing that others need. Who waits for it names it, in the
log or in an error; a holder that merely has a slow machine is told of as what it is.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import exclusivelog as xl
from exclusivelog import _core, waits
from exclusivelog.local.files import lock_open_file
from exclusivelog.local.shm import lockfile, opening_lock, slots, tasks
from exclusivelog.local.shm.opening_lock import OpeningWait
from exclusivelog.local.storage import environment
from testing.children import ROOT, child, line
from testing.deaths import READERS, hold
from testing.processes import PATIENCE, State, Worker, await_stop, until, within
from testing.stops import stopped

pytestmark = pytest.mark.once

OPENS_AND_STOPS = """
    import os, signal, sys
    import exclusivelog as xl
    from exclusivelog.local.storage import opening
    check = opening.check_header
    def stop(*args):
        print(os.getpid(), flush=True)
        signal.raise_signal(signal.SIGSTOP)
        check(*args)
    opening.check_header = stop
    xl.open(sys.argv[1]).close()
    print("opened", flush=True)
"""


def check(path: str) -> tuple[int, str]:
    """The exit status of `exclusivelog check`, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "exclusivelog.cli", "check", path],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
    )
    return done.returncode, done.stdout


# ---- the lock for opening ----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.rule("K3", "H3")
@pytest.mark.parametrize("in_use", [True, False])
def test_k3_who_is_stopped_while_it_opens_is_named_and_the_wait_ends(
    tmp_path: Path, in_use: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it before the wait ends; who goes on waiting opens once it has ended."""
    monkeypatch.setattr(lockfile, "OPENING_TIMEOUT", 1.0)
    path, other = str(tmp_path / "log"), xl.open(tmp_path / "log")
    if not in_use:
        other.close()
    with child(OPENS_AND_STOPS, path) as opener:
        pid = int(line(opener))
        await_stop(pid)
        told = rf"by process {pid} \(python.*\), which is stopped: resume or end that process"
        with pytest.raises(xl.LedgerError, match=told):
            within(lambda: xl.open(path))
        assert f"until process {pid} (python" in caplog.text
        if in_use:
            status, said = check(path)
            assert status == 1
            assert f"process {pid} (python" in said
            assert "has held the lock for opening for" in said
        monkeypatch.setattr(lockfile, "OPENING_TIMEOUT", PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(xl.open, path)
            until(lambda: caplog.text.count(f"until process {pid} (python") == 2)
            os.kill(pid, signal.SIGKILL)
            opening.result(PATIENCE).close()
    other.close()


@pytest.mark.rule("K3")
def test_k3_an_engine_of_the_process_that_holds_the_lock_for_opening_is_named(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is not stopped is not called so."""
    monkeypatch.setattr(lockfile, "OPENING_TIMEOUT", 0.0)
    other = os.open(Path(engine.path) / "owners.lock", os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        name = rf"engine '{engine.name}' \(id {engine.id}, pid {os.getpid()}\), silent for"
        with pytest.raises(xl.LedgerError, match=rf"by {name} .* s, which runs, or waits"):
            with engine.ledger.lockfile.opening():
                pass
    finally:
        os.close(other)


@pytest.mark.rule("K3")
def test_k3_a_holder_that_the_kernel_does_not_show_is_another_process(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in another pid namespace."""
    monkeypatch.setattr(tasks, "_flocks", lambda: iter(()))
    with open(Path(engine.path) / "owners.lock", "rb") as file:
        wait = opening_lock.OpeningWait(file.fileno(), "LOG/owners.lock")
        assert wait.holder().startswith("another process. If it is stopped while it opens")
        assert "fuser -v LOG/owners.lock" in wait.holder()


@pytest.mark.rule("K3")
@pytest.mark.parametrize("device", [True, False])
def test_k3_the_holder_of_a_lock_of_files_is_found(
    tmp_path: Path, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system whose files seem to be on another device than its locks."""
    found = tasks._flocks
    if not device:
        monkeypatch.setattr(tasks, "_flocks", lambda: ((p, "ff:ff", i) for p, _, i in found()))
    mine, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    try:
        assert tasks.flock_holder(mine) is None
        fcntl.flock(other, fcntl.LOCK_EX)
        assert tasks.flock_holder(mine) == os.getpid()
    finally:
        os.close(mine)
        os.close(other)


# ---- the lock of readers -----------------------------------------------------------------


def be_stopped_with_the_lock_of_readers(state: State) -> None:
    """As a process is that is stopped while it begins its first read."""
    hold(state.engine, READERS)
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.rule("K3")
def test_k3_who_is_stopped_with_the_lock_of_readers_is_named(
    path: str, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """LMDB would wait with the interpreter's lock: no thread of this process could go on."""
    process = worker(name="hung")
    with xl.open(path, keepalive=0.2):
        process.start(be_stopped_with_the_lock_of_readers)
        process.await_stop()
        until(lambda: "which holds LMDB's lock of readers and is stopped" in caplog.text)
        assert f"all readers wait for engine 'hung' (id {process.id}" in caplog.text
        process.kill()


@pytest.mark.long
@pytest.mark.rule("K3", "C3")
def test_k3_who_is_stopped_with_the_lock_of_readers_is_killed_if_that_is_allowed(
    path: str, worker: Callable[..., Worker]
) -> None:
    process = worker(name="hung", keepalive=0.2)
    with xl.open(path, keepalive=0.2, kill_stalled=True):
        process.start(be_stopped_with_the_lock_of_readers)
        process.process.join(PATIENCE)
        assert process.process.exitcode == -signal.SIGKILL


# ---- the writer lock on a busy machine ---------------------------------------------------


def slow_locks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if getattr(each, "event", None) == "slow_lock"]


def hold_the_writer_lock_and_work(state: State) -> None:
    """Until the other process says that it has seen enough."""
    with state.engine.ledger.write_concurrent():
        while not Path(f"{state.engine.path}/../enough").exists():
            pass


def hold_the_writer_lock_and_wait(state: State) -> None:
    """The same, but like a process that waits for something, or is frozen."""
    with state.engine.ledger.write_concurrent():
        until(Path(f"{state.engine.path}/../enough").exists)


@pytest.fixture
def enough(path: str) -> Path:
    return Path(f"{path}/../enough")


@pytest.mark.rule("K3")
def test_k3_a_holder_that_a_busy_machine_delays_is_not_reported_as_stopped(
    engine: xl.Engine,
    worker: Callable[..., Worker],
    enough: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs, or waits for a CPU: it is told of after seconds, and as what it is."""
    monkeypatch.setattr(slots, "LASTING_SECONDS", 0.0)
    process, watch = worker(name="busy"), engine.ledger.watch
    process.start(hold_the_writer_lock_and_work)
    thread = until(lambda: engine.ledger.journal.inside[1])
    until(lambda: tasks.state_of(thread) == tasks.RUNS)
    # Else it may wait for the interpreter's lock: another thread there may not run just now.
    monkeypatch.setattr(tasks, "state_of", lambda _: tasks.RUNS)
    for _ in range(3):
        assert f"pid {process.pid})" in watch.stalled(thread)
    assert slow_locks(caplog) == []
    monkeypatch.setattr(slots, "BUSY_SECONDS", 0.0)
    watch.stalled(thread)
    [told] = slow_locks(caplog)
    assert told.getMessage().endswith(tasks.DOING[tasks.RUNS])
    enough.touch()
    process.answer()


@pytest.mark.rule("K3")
def test_k3_a_holder_that_waits_is_reported_at_the_second_look(
    engine: xl.Engine,
    worker: Callable[..., Worker],
    enough: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, watch = worker(name="waits"), engine.ledger.watch
    process.start(hold_the_writer_lock_and_wait)
    thread = until(lambda: engine.ledger.journal.inside[1])
    monkeypatch.setattr(tasks, "state_of", lambda _: tasks.WAITS)  # it wakes up to look
    watch.stalled(thread)
    assert slow_locks(caplog) == []
    monkeypatch.setattr(slots, "LASTING_SECONDS", 0.0)
    watch.stalled(thread)
    [told] = slow_locks(caplog)
    assert told.getMessage().endswith(tasks.DOING[tasks.WAITS])
    watch.stalled(thread)
    assert slow_locks(caplog) == [told]
    enough.touch()
    process.answer()


@pytest.mark.rule("K3", "C9")
def test_k3_a_pause_of_the_one_that_waits_is_no_stall_of_the_holder(
    engine: xl.Engine,
    worker: Callable[..., Worker],
    enough: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole machine was paused."""
    process, watch = worker(name="waits"), engine.ledger.watch
    process.start(hold_the_writer_lock_and_wait)
    thread = until(lambda: engine.ledger.journal.inside[1])
    monkeypatch.setattr(tasks, "state_of", lambda _: tasks.WAITS)
    watch.stalled(thread)
    stall = watch._stalls[thread]
    stall.since -= 10**12
    monkeypatch.setattr(engine.ledger.lockfile.slots.observer, "missed", lambda _: 10**12)
    monkeypatch.setattr(slots, "LASTING_SECONDS", 100.0)
    watch.stalled(thread)
    assert slow_locks(caplog) == []
    monkeypatch.undo()
    enough.touch()
    process.answer()


@pytest.mark.rule("K3")
def test_k3_a_lock_that_goes_from_hand_to_hand_is_not_reported(
    engine: xl.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits may find it taken at each look, although all make progress."""
    watch = engine.ledger.watch
    monkeypatch.setattr(slots, "LASTING_SECONDS", 0.001)
    monkeypatch.setattr(tasks, "state_of", lambda _: tasks.WAITS)
    monkeypatch.setattr(watch, "_seconds", lambda stall: 1.0 if stall is before else 0.0)
    before = None
    with engine.ledger.write_exclusive():
        thread = engine.ledger.journal.inside[1]
        watch.stalled(thread)
    before = watch._stalls[thread]
    with engine.ledger.write_exclusive():  # the first one has changed the journal's version
        watch.stalled(thread)
        assert slow_locks(caplog) == []
        before = watch._stalls[thread]
        watch.stalled(thread)
        assert len(slow_locks(caplog)) == 1


@pytest.mark.rule("K3")
@pytest.mark.parametrize("place", ["in_a_commit", "in_an_append"])
def test_k3_a_stopped_holder_is_reported_at_the_first_look(
    engine: xl.Engine, worker: Callable[..., Worker], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    process, watch = worker(name="hung"), engine.ledger.watch
    with stopped(process, place):
        thread = next(filter(None, engine.ledger.journal.inside))
        watch.stalled(thread)
        [told] = slow_locks(caplog)
        assert told.pid == process.pid
        assert "holds the writer lock and is stopped: resume or end that" in told.getMessage()
    process.answer()


# ---- pauses ------------------------------------------------------------------------------


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let much time pass, in which this process does not run."""
    paused = [0.0]
    clock = SimpleNamespace(monotonic=lambda: _core.monotonic() + paused[0])
    monkeypatch.setattr(waits, "_core", clock)

    def pause() -> None:
        paused[0] += 10 * PATIENCE

    return pause


@pytest.mark.rule("K3")
def test_k3_a_pause_is_no_wait_for_the_lock_for_opening(
    tmp_path: Path, pause: Callable[[], None]
) -> None:
    """The process that holds it may have been paused as well, with its container."""
    file = tmp_path / "owners.lock"
    looks = itertools.count()
    with file.open("w") as held, file.open() as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)

        def progress() -> int:
            look = next(looks)
            if look == 1:
                pause()
            elif look == 3:
                fcntl.flock(held, fcntl.LOCK_UN)
            return 0

        assert OpeningWait(wanted.fileno(), str(file), progress=progress).take(PATIENCE)
    assert next(looks) > 3


@pytest.mark.rule("H2")
def test_h2_a_pause_is_no_loss_of_lmdb_s_lock_file(
    tmp_path: Path, pause: Callable[[], None]
) -> None:
    """A process that opens the ledger locks it last."""
    looks = itertools.count()
    with (tmp_path / "lock.mdb").open("w+") as file, (tmp_path / "lock.mdb").open() as other:

        def in_use() -> bool:
            look = next(looks)
            if look == 0:
                pause()
            elif look == 2:
                lock_open_file(other.fileno(), "read")
            return True

        assert environment._is_held(file.fileno(), in_use)
