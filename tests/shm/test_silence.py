"""Rule C9: who may judge that another engine is silent, and by which clock.

A process under libfaketime has another time than the rest of the machine. A machine that was
suspended shows each engine that all others are silent. The directory's file system does not
answer, or a handler of the log takes seconds. In none of these cases may a healthy owner lose its
topic, and in none may the topic of a dead one stay with it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog import _core, logs
from exclusivelog.local.shm.slots import (
    HEARTBEAT,
    MOST_PAUSES,
    SLOT_SIZE,
    SLOTS,
    Observer,
)
from exclusivelog.waits import wait_for
from testing.children import child, line, tell
from testing.clocks import FAKE_CLOCK
from testing.processes import (
    EXCLUSIVE,
    PATIENCE,
    WAIT,
    State,
    Worker,
    open_producer,
    send,
    stop_outside,
    until,
    within,
)

pytestmark = pytest.mark.once

SECOND = 10**9

# ---- the observer ------------------------------------------------------------------------


def observer_of(seconds: float) -> Observer:
    observer = Observer()
    observer.begin("e", 0)
    observer.expect("e", seconds)
    return observer


def test_c9_the_time_in_which_an_observer_was_paused_is_no_silence_of_others() -> None:
    observer = observer_of(0.5)
    for now in range(0, 10 * SECOND, SECOND // 2):
        observer.note(now)
    assert observer.missed(0) == 0
    observer.note(15 * SECOND)  # it was due half a second after the last one, at 9.5
    observer.note(15 * SECOND + SECOND // 2)
    assert observer.missed(0) == observer.missed(9 * SECOND) == 5 * SECOND
    assert observer.missed(12 * SECOND) == 3 * SECOND
    assert observer.missed(15 * SECOND) == 0


def test_c9_a_pause_that_two_threads_note_at_once_counts_once() -> None:
    """Else who hangs would be taken for well again, for as long as the pause was."""

    class NotedMeanwhile(deque[tuple[int, int]]):
        def append(self, pause: tuple[int, int]) -> None:
            super().append(pause)
            if len(self) == 1:  # the first thread has yet to say that it runs
                observer.note(pause[1] + 1)

    observer = observer_of(0.5)
    observer._pauses = NotedMeanwhile()
    observer.note(10 * SECOND)
    assert len(observer._pauses) == 2
    assert observer.missed(0) == 9 * SECOND + SECOND // 2 + 1
    assert observer.missed(4 * SECOND) == 6 * SECOND + 1


def test_c9_an_observer_that_is_always_late_still_hears_who_is_silent() -> None:
    """On a busy machine each heartbeat comes late. If each began the wait anew, no engine with a
    short keepalive would ever be evicted."""
    observer = observer_of(0.1)
    for n in range(1, 31):
        observer.note(n * 3 * SECOND // 10)
    assert 9 * SECOND - observer.missed(0) == 3 * SECOND
    for n in range(31, 2 * MOST_PAUSES):
        observer.note(n * 3 * SECOND // 10)
    assert len(observer._pauses) == MOST_PAUSES


def test_c9_the_engine_with_the_most_heartbeats_counts() -> None:
    observer = observer_of(5)
    observer.begin("other", 0)
    observer.expect("other", 0.1)
    observer.note(SECOND)
    assert observer.missed(0) == 9 * SECOND // 10
    observer.end("other")
    observer.note(5 * SECOND)
    assert observer.missed(SECOND) == 0


def test_c9_a_heartbeat_beside_the_end_of_the_last_engine_raises_nothing() -> None:
    """Another thread ends it between two steps of the heartbeat."""

    class EndsMeanwhile(dict[str, int]):
        def __setitem__(self, engine: str, seconds: int) -> None:
            super().__setitem__(engine, seconds)
            observer.end(engine)

    observer = Observer()
    observer._beats = EndsMeanwhile()
    observer.expect("e", 1.0)
    observer.note(SECOND)
    assert observer.missed(0) == 0


def test_c9_what_was_before_the_first_engine_is_no_pause() -> None:
    observer = Observer()
    observer.note(5 * SECOND)
    observer.begin("e", 100 * SECOND)
    observer.note(100 * SECOND + 1000)
    assert observer.missed(0) == 0


# ---- a pause of the machine --------------------------------------------------------------


@pytest.mark.long
def test_c9_a_standby_that_was_paused_as_well_evicts_no_healthy_owner(
    path: str, worker: Callable[..., Worker]
) -> None:
    """Both are paused for longer than the owner's keepalive. The standby resumes first."""
    owner, standby = worker(name="owner", keepalive=2), worker(name="standby", keepalive=2)
    owner.call(open_producer, EXCLUSIVE)
    standby.start(open_producer, WAIT)
    with xl.open(path, name="test") as engine:
        until(lambda: engine.topic("orders").waiters)
        for each in (owner, standby):
            stop_outside(path, each.pid)
        owner.set_keepalive(2)  # from now on: to stop both may take a while on a busy machine
        time.sleep(3)
        standby.signal(signal.SIGCONT)
        time.sleep(0.5)  # in which it looks several times
        owner.signal(signal.SIGCONT)
        for _ in range(25):
            owner.call(send, b"x")
            time.sleep(0.1)
        assert not standby.answered()
        # The control: it evicts an owner that is stopped alone.
        stop_outside(path, owner.pid)
        assert standby.answer() == 2


# ---- other clocks ------------------------------------------------------------------------

STANDBY = """
    import sys, time
    import exclusivelog as xl
    with xl.open(sys.argv[1], name="standby") as engine:
        waiting = engine.topic("orders").producer_async("wait_for_exclusive")
        print("waits", time.monotonic(), flush=True)
        input()
        print(waiting.done(), [each.name for each in engine.engines()], flush=True)
"""


@pytest.fixture(scope="module")
def fake_clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library for LD_PRELOAD, as libfaketime, that moves or stops the clock."""
    where = tmp_path_factory.mktemp("clock")
    (where / "clock.c").write_text(textwrap.dedent(FAKE_CLOCK))
    made = str(where / "clock.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, where / "clock.c"], check=True)
    return made


@pytest.mark.parametrize("shift", ["864000", "=1600000000"])
def test_c9_a_process_with_another_clock_evicts_no_healthy_owner(
    path: str, fake_clock: str, shift: str
) -> None:
    environment = {**os.environ, "LD_PRELOAD": fake_clock, "CLOCK_SHIFT": shift}
    with xl.open(path, name="owner", keepalive=30) as engine:
        with engine.topic("orders").producer(EXCLUSIVE) as owner:
            with child(STANDBY, path, env=environment) as standby:
                word, clock = line(standby).split()
                assert word == "waits"
                assert abs(float(clock) - time.monotonic()) > 86_400  # the control
                for _ in range(10):
                    owner.send(b"x")
                    time.sleep(0.1)
                tell(standby)
                done, names = line(standby).split(" ", 1)
                assert done == "False"
                assert "owner" in names
                assert standby.wait(PATIENCE) == 0


WAITS = """
    import sys
    import exclusivelog as xl
    from exclusivelog import _core
    from testing.patience import PATIENCE

    def took(call):
        began = _core.monotonic()
        try:
            call()
        except TimeoutError:  # of a future, and WaitTimeoutError
            pass
        return _core.monotonic() - began

    with xl.open(sys.argv[1]) as engine:
        topic = engine.topic("orders")
        owner = topic.producer("exclusive")
        waiting = topic.producer_async("wait_for_exclusive")
        print(*(
            took(call) for call in (
                lambda: topic.reader("latest").read_next(timeout=0.3),
                lambda: topic.producer("wait_for_exclusive", timeout=0.3),
                lambda: waiting.result(timeout=0.3),
                lambda: engine.role("leader", topics=["orders"], timeout=0.3),
                lambda: owner.send_async(b"x").result(PATIENCE),
            )
        ))
"""


@pytest.mark.parametrize("shift", ["864000", "-600", "=1600000000"])
def test_c9_waits_end_in_time_by_whatever_clock(path: str, fake_clock: str, shift: str) -> None:
    environment = {**os.environ, "LD_PRELOAD": fake_clock, "CLOCK_SHIFT": shift}
    with child(WAITS, path, env=environment) as process:
        *waits, sent = map(float, line(process).split())
        assert all(0.25 < each < PATIENCE / 2 for each in waits)
        assert sent < PATIENCE / 2
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("kind", ["local", "cluster"])
def test_c9_a_frozen_clock_of_python_ends_no_wait_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As freezegun does it: `time.monotonic` and `time.time` stand still, also for `threading`."""
    path = str(tmp_path / "log") if kind == "local" else f"memory://{tmp_path}"
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE):
        topic = engine.topic("orders")
        waiting = topic.producer_async(WAIT)
        calls: list[tuple[type[Exception], Callable[[], object]]] = [
            (xl.WaitTimeoutError, lambda: topic.reader("latest").read_next(timeout=0.2)),
            (xl.WaitTimeoutError, lambda: topic.producer(WAIT, timeout=0.2)),
            (FutureTimeoutError, lambda: waiting.result(timeout=0.2)),
        ]
        if engine.supports("roles"):
            calls.append(
                (xl.WaitTimeoutError, lambda: engine.role("r", topics=["orders"], timeout=0.2))
            )
        monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
        monkeypatch.setattr(threading, "_time", lambda: 1000.0)
        monkeypatch.setattr(time, "time", lambda: 1000.0)
        monkeypatch.setattr(time, "monotonic_ns", lambda: 10**12)

        def run() -> None:
            for error, call in calls:
                with pytest.raises(error):
                    call()
            with changed:
                assert not wait_for(changed, lambda: False, 0.2)

        changed = threading.Condition()
        thread = threading.Thread(target=run)
        thread.start()
        end = _core.monotonic() + PATIENCE
        while thread.is_alive() and _core.monotonic() < end:
            thread.join(0.05)
        monkeypatch.undo()
        assert not thread.is_alive()
        waiting.cancel()


def test_c9_no_deadline_of_the_library_is_a_time_of_python() -> None:
    """Only programs of their own, and what is measured for people, use `time.monotonic`; and no
    `Condition.wait_for`, which does."""
    allowed = ("cli", "spark")
    root = Path(xl.__file__).parent
    found = [
        f"{file.relative_to(root)}: {text}"
        for file in root.rglob("*.py")
        for text in ("time.monotonic", ".wait_for(")
        if text in file.read_text() and file.relative_to(root).parts[0] not in allowed
    ]
    assert found == []


# ---- what a beat waits for ---------------------------------------------------------------


def lose_the_file_system(state: State) -> None:
    """From now on the ledger's path does not answer."""
    ledger = state.engine.ledger

    check = ledger.integrity.check_place

    def hang() -> None:
        if "heart" in threading.current_thread().name or "place" in threading.current_thread().name:
            time.sleep(3600)
        check()

    ledger.integrity.check_place = hang


@pytest.mark.long
@pytest.mark.long
def test_c9_a_path_that_does_not_answer_silences_no_engine(
    path: str, worker: Callable[..., Worker]
) -> None:
    owner = worker(name="owner", keepalive=0.4)
    owner.call(open_producer, EXCLUSIVE)
    owner.call(lose_the_file_system)
    with xl.open(path, name="test") as engine:
        lockfile = engine.ledger.lockfile
        [(slot, _)] = lockfile.slots.in_process(owner.pid)
        beats = set[int]()

        def beats_on() -> bool:
            beats.add(lockfile.atomics.load64(SLOTS + slot * SLOT_SIZE + HEARTBEAT))
            return len(beats) > 10

        until(beats_on)  # a heart that waits for the path stops at the second beat
        owner.call(send, b"still here")
        owner.kill()  # it would wait for the path when it closes


def test_c9_a_slow_log_handler_delays_no_promotion(
    path: str, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(PATIENCE)

    slow, log = Slow(), logging.getLogger("exclusivelog")
    owner = worker(name="owner")
    owner.call(open_producer, EXCLUSIVE)
    log.addHandler(slow)
    log.setLevel(logging.INFO)
    try:
        with xl.open(path, name="standby") as engine:
            waiting = engine.topic("orders").producer_async(WAIT)
            owner.kill()
            try:
                producer = waiting.result(PATIENCE / 3)
                assert within(lambda: inside.wait(PATIENCE))
            finally:
                go_on.set()
            producer.send(b"x")
            producer.close()
        for event in ("engine_gone", "granted"):  # a thread of the log tells them
            until(lambda event=event: event in [getattr(r, "event", "") for r in caplog.records])
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(slow)


def test_c9_background_lines_are_bounded_and_in_order() -> None:
    go_on, seen = threading.Event(), []
    queue = logs._Queue()
    queue.put(lambda: (go_on.wait(PATIENCE), seen.append(0)))
    for number in range(1, logs.MOST_QUEUED + 10):
        queue.put(lambda number=number: seen.append(number))
    go_on.set()
    queue.drain(PATIENCE)
    assert seen == list(range(logs.MOST_QUEUED))
    assert queue.take_dropped() == 10
    assert queue.take_dropped() == 0
