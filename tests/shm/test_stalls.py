"""Rule C3: processes that are really stopped, at any moment.

SIGSTOP, a debugger, a frozen container: mostly that strikes somewhere in a process's own code,
and then its topics go to others once it has been silent for longer than its keepalive; when it
resumes it is fenced. If it is stopped inside the ledger's critical section, all other writers wait:
they name the process that they wait for, can be interrupted, and kill it if they may.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership import sessions
from testing.children import ROOT, child, finish, line, tell
from testing.judges import REFUSED, Call, judge, read_rows
from testing.processes import (
    PATIENCE,
    State,
    Worker,
    hang,
    open_producer,
    producer_state,
    send,
    until,
    values,
    within,
)
from testing.stops import PLACES, stop_yourself, stopped

pytestmark = pytest.mark.once

SHARED, EXCLUSIVE = "shared", "exclusive"
WAIT, FENCING = "wait_for_exclusive", "exclusive_with_fencing"

FENCED = xl.ProducerFencedError


# ---- C3: stopped anywhere ----------------------------------------------------------------


Acked = list[tuple[int, bytes]]  # (offset, value), as they were acknowledged


def numbered(producer: xl.Producer, number: int) -> bytes:
    return b"%d/%d" % (producer.topic_epoch, number)


def one_by_one(producer: xl.Producer, acked: Acked) -> None:
    for number in itertools.count():
        value = numbered(producer, number)
        acked.append((producer.send(value), value))


def many_at_once(producer: xl.Producer, acked: Acked) -> None:
    for number in itertools.count(step=7):
        batch = [numbered(producer, number + i) for i in range(7)]
        acked.extend(zip(producer.send_many(batch), batch, strict=True))


def in_the_background(producer: xl.Producer, acked: Acked) -> None:
    under_way: deque[tuple[Any, bytes]] = deque()
    with contextlib.suppress(FENCED):
        for number in itertools.count():
            value = numbered(producer, number)
            under_way.append((producer.send_async(value), value))
            if len(under_way) > 40:
                receipt, value = under_way[0]
                acked.append((receipt.result(PATIENCE), value))
                under_way.popleft()
    for receipt, value in under_way:
        with contextlib.suppress(FENCED):
            acked.append((receipt.result(PATIENCE), value))
    producer.flush()


WAYS = {way.__name__: way for way in (one_by_one, many_at_once, in_the_background)}


def send_until_fenced(state: State, way: str) -> tuple[int, Acked]:
    """Own the topic and send until that fails; return the epoch and the acknowledged messages.
    Every later call must raise the same error."""
    acked: Acked = []
    with state.topic.producer(EXCLUSIVE) as producer:
        with pytest.raises(FENCED) as first:
            WAYS[way](producer, acked)
        for again in (producer.send, producer.send_async):
            with pytest.raises(FENCED) as later:
                again(b"zombie")
            assert later.value is first.value
        return producer.topic_epoch, acked


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_c3_an_owner_stopped_at_any_moment_is_replaced_and_writes_nothing_more(
    topic: xl.Topic, worker: Callable[..., Worker], way: str
) -> None:
    """The owner is stopped wherever it happens to be: while it encodes, between its append and
    the flush, in the flush. The waiter is promoted and writes; then the owner goes on. What was
    acknowledged to it stands in the log before the successor's first message, and what was not
    acknowledged stands nowhere."""
    process = worker(name="stopped", keepalive=0.25)
    reader = topic.reader()
    for _ in range(6):
        process.start(send_until_fenced, way)
        until(lambda: topic.owner is not None)
        waiter = topic.producer_async(WAIT)
        time.sleep(random.uniform(0, 0.03))
        hang(process)
        with waiter.result(timeout=PATIENCE) as successor:
            successor.send(b"successor")
            process.signal(signal.SIGCONT)
            epoch, acked = process.answer()
            successor.send(b"still here")
            assert (successor.topic_epoch, successor.state) == (epoch + 1, "open")
        *before, first, second = reader
        assert [(message.offset, message.value) for message in before] == acked
        assert {message.epoch for message in before} <= {epoch}
        assert (first.value, second.value) == (b"successor", b"still here")
    assert topic.engine.verify().ok


def send_until(state: State, over: str) -> Acked:
    """Send until that file is there."""
    acked: Acked = []
    with state.topic.producer(SHARED) as producer:
        while not os.path.exists(over):
            value = b"%d/%d" % (os.getpid(), len(acked))
            acked.append((producer.send(value), value))
    return acked


@pytest.mark.long
def test_c3_short_stops_anywhere_lose_nothing(
    topic: xl.Topic, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Two processes send side by side. One or the other is stopped for a few milliseconds,
    hundreds of times, also inside the critical section and in the flush that both share."""
    processes, over = [worker(name=f"w{i}") for i in range(2)], tmp_path / "over"
    for process in processes:
        process.start(send_until, str(over))
    until(lambda: len(topic.holders) == 2)
    for _ in range(120):
        process = random.choice(processes)
        process.signal(signal.SIGSTOP)
        time.sleep(random.choice((0, 0.001, 0.005, 0.03)))
        process.signal(signal.SIGCONT)
        time.sleep(random.uniform(0, 0.01))
    over.touch()
    acked = [pair for process in processes for pair in process.answer()]
    assert [(message.offset, message.value) for message in topic.reader()] == sorted(acked)
    assert topic.engine.verify().ok


# ---- C3: stopped inside the critical section ---------------------------------------------


@contextlib.contextmanager
def waiting_for(
    process: Worker,
    place: str,
    action: Callable[[], Any],
    begin: Callable[[State, str], None] = stop_yourself,
) -> Iterator[Callable[[], bool]]:
    """The process is stopped there, and a thread starts an operation that must wait for it; the
    block is told whether that is over. Once the process goes on, or is dead, it must succeed."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(process, place, begin):
            done = pool.submit(action)
            yield done.done
        done.result(PATIENCE)


def who(process: Worker, name: str, engine: xl.Engine) -> str:
    """How the log describes the one engine of that process."""
    [(_, info)] = engine.ledger.lockfile.slots.in_process(process.pid)
    return f"engine {name!r} (id {info.id}, pid {process.pid}), silent for"


def owners(path: str) -> str:
    """What `exclusivelog owners` prints."""
    return subprocess.run(
        [sys.executable, "-m", "exclusivelog.cli", "owners", path],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        cwd=ROOT,
    ).stdout


def hold_another(state: State) -> int:
    """A producer on another topic."""
    state.kept["another"] = state.engine.topic("another").producer(EXCLUSIVE)
    return int(state.kept["another"].topic_epoch)


def state_of_another(state: State) -> str:
    return str(state.kept["another"].state)


@pytest.mark.parametrize("keepalive", [0, -1, float("inf"), float("nan"), 1e300])
def test_c3_a_keepalive_that_cannot_be_is_refused(path: str, keepalive: float) -> None:
    with pytest.raises(ValueError, match=r"keepalive=.*None for never"):
        xl.open(path, keepalive=keepalive)


@pytest.mark.sampled
@pytest.mark.parametrize("step", ["find_dead", "_evict_some"])
def test_c3_one_that_has_gone_on_is_not_evicted_any_more(
    path: str, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A waiter has found the owner silent for too long, and is held up itself before it acts on
    that, or between two of the transactions that this takes. Meanwhile the owner goes on, and
    opens another producer: it is not silent any more."""
    monkeypatch.setattr(sessions, "EVICTED_AT_FIRST", 1)
    hung = worker(keepalive=0.5)
    hung.call(open_producer, EXCLUSIVE)
    if step == "_evict_some":
        hung.call(hold_another)
    with xl.open(path) as engine:
        original = getattr(engine.backend.sessions, step)
        went_on: list[float] = []

        def held_up(*args: Any) -> Any:
            result = original(*args)
            if not went_on and (result or step == "_evict_some"):
                hung.signal(signal.SIGCONT)
                until(lambda: len(engine.engines()) == 2)
                hung.set_keepalive(30.0)  # it is well from now on, however slow the machine is
                if step == "find_dead":
                    hung.call(hold_another)
                went_on.append(time.monotonic())
            return result

        setattr(engine.backend.sessions, step, held_up)
        hang(hung)
        waiting = engine.topic("orders").producer_async(WAIT)
        until(lambda: went_on and time.monotonic() > went_on[0] + 1)
        assert hung.call(state_of_another) == "open"
        if step == "find_dead":  # else that one went first
            assert hung.call(producer_state) == "open"
            assert not waiting.done()
            waiting.cancel()


@pytest.mark.parametrize("place", PLACES)
def test_c3_those_who_wait_name_the_holder(
    engine: xl.Engine,
    topic: xl.Topic,
    worker: Callable[..., Worker],
    place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process is stopped while a thread of it holds the writer lock. Another process that
    wants a producer waits, and says for whom; so do `inside()` and the command. When the
    process goes on, all others do."""
    process = worker(name="hung")
    description = who(process, "hung", engine)
    with waiting_for(process, place, topic.producer) as over:
        until(lambda: description in caplog.text)
        inside = engine.inside()
        assert inside is not None
        assert (inside.name, inside.pid) == ("hung", process.pid)
        assert description in owners(engine.path)
        assert not over()
    process.answer()
    until(lambda: engine.inside() is None)
    with topic.producer() as producer:
        assert producer.send(b"x") == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "ways"),
    [("in_an_append", ["send", "send_async", "topic"]), ("in_a_commit", ["topic"])],
)
def test_c7_those_who_wait_for_a_stopped_one_are_told_that_the_directory_went(
    path: str,
    worker: Callable[..., Worker],
    place: str,
    ways: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who holds the mutex may never give it back: the process may stay stopped, or the mutex be in
    a file that `cp` has written over."""
    with xl.open(path, keepalive=2.0) as engine, ThreadPoolExecutor() as pool:
        producer, queued = (engine.topic("t").producer() for _ in range(2))
        calls: dict[str, Callable[[], Any]] = {
            "send": lambda: producer.send(b"x"),
            "send_async": lambda: queued.send_async(b"x").result(PATIENCE),
            "topic": lambda: engine.topic("another"),
        }
        process = worker(name="hung")
        description = who(process, "hung", engine)
        with stopped(process, place):
            waiting = [pool.submit(calls[way]) for way in ways]
            until(lambda: description in caplog.text)
            assert not any(call.done() for call in waiting)
            os.rename(path, path + ".moved")
            for call in waiting:
                with pytest.raises(xl.LedgerError, match="no longer the ledger"):
                    call.result(PATIENCE)
            within(engine.close, PATIENCE)
        os.rename(path + ".moved", path)
    with xl.open(path) as engine:
        assert values(engine.topic("t")) == []


def test_c3_appends_go_on_beside_a_stopped_commit(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """A process that is stopped during a change without effect on ownership keeps no other from
    writing."""
    producer = topic.producer(EXCLUSIVE)
    producer.send(b"before")
    process = worker(name="hung")
    with stopped(process, "in_a_commit"):
        for number in range(100):
            assert within(lambda: producer.send(b"meanwhile"), PATIENCE) == number + 1
        assert len(values(topic)) == 101
    process.answer()


def test_c3_readers_do_not_mind_who_is_stopped(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    with topic.producer() as producer:
        producer.send_many([b"%d" % i for i in range(100)])
    process = worker(name="hung")
    for place in PLACES:
        reader = topic.reader()
        reader.read_next(0)
        with stopped(process, place):
            assert len(within(lambda r=reader: list(r), PATIENCE)) == 99
            assert len(within(lambda: values(topic), PATIENCE)) == 100
            assert within(lambda: topic.owner, PATIENCE) is None
            with pytest.raises(xl.WaitTimeoutError):
                within(lambda r=reader: r.read_next(0.05))
        process.answer()


WAITS_UNTIL_INTERRUPTED = """
    import sys
    import exclusivelog as xl
    from testing.patience import PATIENCE

    with xl.open(sys.argv[1], name="waits") as engine:
        topic = engine.topic("orders")
        reader = topic.reader(group="g")
        producer, other = topic.producer(), engine.topic("other").producer()
        producer.send(b"before")
        waits = {
            "for a topic": lambda: engine.topic("new"),
            "for a producer": topic.producer,
            "to stand in the queue": lambda: topic.producer("wait_for_exclusive"),
            "to send": lambda: producer.send(b"x"),
            "to send much": lambda: producer.send(bytes(200_000)),
            "to flush": lambda: (producer.send_async(b"x"), producer.flush()),
            "for a claim": lambda: engine.own("g", {"a": None}),
            "to join a group": lambda: topic.reader(group="other"),
            "to commit": reader.commit,
            "to close a producer": other.close,
        }
        print("ready", flush=True)
        input()
        for name, wait in waits.items():
            try:
                print(name, flush=True)
                wait()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        print("no more", flush=True)
        input()
        print(producer.send(b"after") > 0, flush=True)
        reader.read_next(0)
        reader.commit()
        other.close()
        producer.close()
        engine.topic("orders").producer("wait_for_exclusive", timeout=PATIENCE).send(b"new")
        print("all is well", flush=True)
"""


def interrupt_every_wait(process: Any, errors: Path) -> list[str]:
    """What it waited for, each time until Ctrl-C."""
    waited = [line(process)]
    until(lambda: "silent for" in errors.read_text())
    while waited[-1] != "no more":
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert line(process, timeout=PATIENCE) == "interrupted"
        waited.append(line(process))
    return waited


@pytest.mark.long
def test_c3_every_wait_for_a_stopped_process_can_be_interrupted(
    path: str, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Ctrl-C ends the wait soon, in every call, and the process names on stderr the process that it
    waits for. Afterwards, once the stopped process resumes, everything works."""
    hung = worker(name="hung", topic="elsewhere")
    errors = tmp_path / "stderr"
    with (
        errors.open("w") as stderr,
        child(WAITS_UNTIL_INTERRUPTED, path, stderr=stderr) as process,
    ):
        assert line(process) == "ready"
        with stopped(hung, "in_a_transaction"):
            tell(process)
            assert len(interrupt_every_wait(process, errors)) == 11
        hung.answer()
        tell(process)
        assert (line(process), line(process)) == ("True", "all is well")
        assert process.wait(PATIENCE) == 0
    assert f"pid {hung.pid}), silent for" in errors.read_text()
    assert "Traceback" not in errors.read_text()


OPENS_UNTIL_INTERRUPTED = """
    import sys
    import exclusivelog as xl

    try:
        print("waits", flush=True)
        xl.open(sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    input()
    with xl.open(sys.argv[1]) as engine, engine.topic("orders").producer() as producer:
        print(producer.send(b"x"), flush=True)
"""


@pytest.mark.long
def test_c3_opening_a_stalled_ledger_can_be_interrupted(
    path: str, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    process = worker(name="hung")
    errors = tmp_path / "stderr"
    with (
        stopped(process, "in_a_transaction"),
        errors.open("w") as stderr,
        child(OPENS_UNTIL_INTERRUPTED, path, stderr=stderr) as opens,
    ):
        assert line(opens) == "waits"
        until(lambda: f"pid {process.pid}), silent for" in errors.read_text())
        opens.send_signal(signal.SIGINT)
        assert line(opens, timeout=PATIENCE) == "interrupted"
        process.signal(signal.SIGCONT)
        process.answer()
        tell(opens)
        assert line(opens) == "0"


# ---- C3: fencing by kill -----------------------------------------------------------------


def own_and_send(state: State, value: bytes) -> int:
    """Own the topic and have something in the log; the epoch."""
    epoch = open_producer(state, EXCLUSIVE)
    send(state, value)
    return epoch


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
def test_c3_a_hung_process_is_killed_once_its_own_keepalive_is_over(
    path: str, worker: Callable[..., Worker], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds everybody up, and has been silent for longer than it said it ever would. Who
    waits for it kills it, and not a moment before. Then all go on, and its topic is evicted."""
    process = worker(name="hung", keepalive=1.0)
    assert process.call(own_and_send, b"before") == 1
    with xl.open(path, name="killer", keepalive=0.2, kill_stalled=True) as engine:
        topic, writer = engine.topic("orders"), engine.topic("other").producer()
        waiter = topic.producer_async(WAIT)
        description = who(process, "hung", engine)
        slots = engine.ledger.lockfile.slots
        [(_, info)] = slots.in_process(process.pid)
        with waiting_for(process, place, lambda: engine.topic("new")):
            process.process.join(PATIENCE)
            assert process.process.exitcode == -signal.SIGKILL
            assert slots.silent_for(info.id) >= 1.0
        assert f"killing the unresponsive {description}" in caplog.text
        assert writer.send(b"goes on") == 0
        with waiter.result(timeout=PATIENCE) as successor:
            assert successor.topic_epoch == 2
            assert successor.send(b"after") == 1
        assert values(topic) == [b"before", b"after"]
        until(lambda: engine.inside() is None)
        assert [info.name for info in engine.engines()] == ["killer"]
        assert engine.verify().ok


def test_c3_it_is_killed_by_a_send_that_waits_for_it_too(
    path: str, worker: Callable[..., Worker]
) -> None:
    process = worker(name="hung", keepalive=0.3)
    with xl.open(path, kill_stalled=True) as engine, engine.topic("orders").producer() as producer:
        producer.send(b"before")
        with stopped(process, "in_an_append"):
            assert within(lambda: producer.send(b"x")) == 1
        process.process.join(PATIENCE)
        assert process.process.exitcode == -signal.SIGKILL


def open_another(state: State, **options: Any) -> None:
    """A second engine in the worker's process."""
    state.kept["another"] = xl.open(state.engine.path, name="another", **options)


MERCIES = {
    "nobody may": ("in_a_transaction", False, 0.2, ()),
    "nobody may, in an append": ("in_an_append", False, 0.2, ()),
    "it has no keepalive": ("in_an_append", True, None, ()),
    "it has been silent for less": ("in_a_transaction", True, 30.0, ()),
    "one of its engines has no keepalive": ("in_a_transaction", True, 0.2, (None,)),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "kill_stalled", "keepalive", "another"), MERCIES.values(), ids=MERCIES
)
def test_c3_it_is_not_killed_without_leave(
    path: str,
    worker: Callable[..., Worker],
    place: str,
    kill_stalled: bool,
    keepalive: float | None,
    another: tuple[float | None, ...],
) -> None:
    """Neither where no waiting engine has `kill_stalled`, nor where the process has not been
    silent for as long as each of its engines said. It goes on, and owns its topic still."""
    process = worker(name="hung", keepalive=keepalive)
    process.call(own_and_send, b"before")
    for other in another:
        process.call(open_another, keepalive=other)
    with xl.open(path, kill_stalled=kill_stalled) as engine:
        with waiting_for(process, place, lambda: engine.topic("new")) as over:
            time.sleep(1.0)
            assert process.process.is_alive()
            assert not over()
        process.answer()
        assert process.call(send, b"after") == 1
        assert process.call(producer_state) == "open"


def be_slow(state: State, seconds: float) -> None:
    """Stay inside, in a process that runs."""
    with state.engine.ledger.write_exclusive():
        time.sleep(seconds)


@pytest.mark.long
def test_c3_a_process_that_beats_is_not_killed_however_long_it_stays(
    path: str, worker: Callable[..., Worker]
) -> None:
    process = worker(name="slow", keepalive=2.0)
    with xl.open(path, kill_stalled=True) as engine:
        process.start(be_slow, 4.0)
        until(lambda: engine.inside() is not None)
        within(lambda: engine.topic("new"))
        process.answer()
        assert process.call(own_and_send, b"alive") == 1


@pytest.mark.long
def test_c3_one_that_beats_again_before_it_is_killed_is_spared(
    path: str, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits has found it silent for too long, and is held up itself before it kills. It goes
    on meanwhile, and is inside for longer."""
    process = worker(name="slow", keepalive=0.4)
    with xl.open(path, kill_stalled=True) as engine, ThreadPoolExecutor(1) as pool:
        [(slot, info)] = engine.ledger.lockfile.slots.in_process(process.pid)
        pidfd_open, aimed = os.pidfd_open, []

        def held_up(pid: int) -> int:
            if not aimed:
                aimed.append(pid)
                process.signal(signal.SIGCONT)
                until(lambda: engine.ledger.lockfile.slots.alive(slot, info.id))
                process.set_keepalive(30.0)  # it is well, however slow the machine is
            return pidfd_open(pid)

        monkeypatch.setattr(os, "pidfd_open", held_up)
        process.start(be_slow, 4.0)
        until(lambda: engine.inside() is not None)
        process.signal(signal.SIGSTOP)
        process.await_stop()
        made = pool.submit(engine.topic, "new")
        until(lambda: aimed)
        process.answer()
        made.result(PATIENCE)
        assert process.call(own_and_send, b"alive") == 1


WAITS_FOR_ITSELF = """
    import sys, threading, time
    import exclusivelog as xl
    from exclusivelog.local.shm.slots import Slot

    with xl.open(sys.argv[1], keepalive=0.3, kill_stalled=True) as engine:
        producer = engine.topic("orders").producer()
        producer.send(b"before")
        Slot.beat = lambda slot: None
        inside = threading.Event()

        def stay():
            engine.ledger.journal.lock()
            inside.set()
            time.sleep(1.6)
            engine.ledger.journal.unlock()

        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait()
        print(producer.send(b"after"))
        thread.join()
"""


@pytest.mark.long
def test_c3_no_process_kills_itself(path: str) -> None:
    """One thread waits for another one of its own process, whose heart has stopped."""
    assert finish(WAITS_FOR_ITSELF, path) == "1\n"


# ---- C3: fencing by request --------------------------------------------------------------


@dataclass
class Fought:
    """What a fencer has seen: the epochs it had, and its calls."""

    epochs: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def fence_and_send(state: State, rounds: int) -> Fought:
    """Fence the topic's owner and write until another process takes it back, again and again."""
    fought = Fought()
    for _ in range(rounds):
        producer = state.topic.producer(FENCING)
        fought.epochs.append(producer.topic_epoch)
        with contextlib.suppress(FENCED), producer:  # it may be fenced already
            _send_some(producer, fought)
    return fought


def _send_some(producer: xl.Producer, fought: Fought) -> None:
    epoch = producer.topic_epoch
    for number in range(random.randrange(1, 60)):
        value = f"{os.getpid()}/{epoch}/{number}".encode()
        call = Call(f"{os.getpid()}", (value,), time.monotonic_ns())
        try:
            offset = producer.send(value)
        except FENCED:
            fought.calls.append(call.refused(time.monotonic_ns()))
            return
        fought.calls.append(call.acknowledged(time.monotonic_ns(), offset, epoch))


def test_c3_two_fencers_leave_one_order_of_epochs(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Two processes take the topic from each other as fast as they can. Every grant has an
    epoch of its own, the epochs stand in the log one behind the other, never interleaved, and
    all that was acknowledged stands there, and nothing that was refused."""
    rounds = 150
    processes = [worker(name=f"fencer-{i}") for i in range(2)]
    for process in processes:
        process.start(fence_and_send, rounds)
    fights = [process.answer(2 * PATIENCE) for process in processes]
    epochs = [epoch for fought in fights for epoch in fought.epochs]
    assert sorted(epochs) == list(range(1, 2 * rounds + 1))
    calls = fights[0].calls + fights[1].calls
    refused = sum(call.outcome == REFUSED for call in calls)
    assert refused, "they have never met"
    rows = read_rows(topic)
    assert judge(rows, calls) == []
    assert len(rows) == len(calls) - refused
    assert topic.engine.verify().ok


# ---- C3: several that wait, several times ------------------------------------------------


def stop_your_main_thread(state: State, place: str) -> None:
    PLACES[place](state.engine)


@pytest.mark.long
def test_c3_who_is_stopped_a_second_time_is_reported_a_second_time(
    engine: xl.Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on after the first time; a day later it is stopped there again."""
    process = worker(name="hung")
    for name in ("first", "second"):
        caplog.clear()
        make = lambda name=name: engine.topic(name)  # noqa: E731
        with waiting_for(process, "in_a_transaction", make, stop_your_main_thread):
            until(lambda: "engine 'hung'" in caplog.text)
        process.answer()


def open_a_shared_one(state: State) -> None:
    state.topic.producer(SHARED).close()


@contextlib.contextmanager
def waiting_behind_another(
    process: Worker, between: Worker, engine: xl.Engine
) -> Iterator[Callable[[], bool]]:
    """`process` is stopped in an append; `between` waits for that, with the tables in its hands;
    and we wait for `between`."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(process, "in_an_append"):
            between.start(open_a_shared_one)
            until(lambda: all(engine.ledger.journal.inside))
            done = pool.submit(engine.topic, "new")
            yield done.done
        done.result(PATIENCE)
        between.answer()


def test_c3_a_hung_process_is_killed_by_those_who_wait_behind_others_too(
    path: str, worker: Callable[..., Worker]
) -> None:
    """A process that may not kill it holds a lock between it and the one that may."""
    process, between = worker(name="hung", keepalive=0.3), worker(name="between")
    with xl.open(path, kill_stalled=True) as engine:
        with waiting_behind_another(process, between, engine) as over:
            until(over)


def test_c3_those_who_wait_behind_others_name_the_one_that_is_stopped(
    engine: xl.Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """They must not tell people to kill a process that is in good health."""
    process, between = worker(name="hung"), worker(name="between")
    with waiting_behind_another(process, between, engine):
        until(lambda: "all writers wait for" in caplog.text)
        assert "engine 'between'" not in caplog.text
        assert "engine 'hung'" in caplog.text


def test_c3_who_opens_a_ledger_may_kill_as_well(
    path: str, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """The only other process was started to take over, with `kill_stalled`, and waits in open."""
    process = worker(name="hung", keepalive=0.3)
    with stopped(process, "in_a_transaction"), opening(path, tmp_path, kill_stalled=True):
        process.process.join(PATIENCE)
        assert process.process.exitcode == -signal.SIGKILL


@contextlib.contextmanager
def opening(path: str, where: Path, **options: Any) -> Iterator[None]:
    """Another process opens the ledger, and has waited for half a second."""
    source = f"import sys, exclusivelog; exclusivelog.open(sys.argv[1], **{options!r})"
    errors = where / "stderr"
    with errors.open("w") as stderr, child(source, path, stderr=stderr):
        until(lambda: "silent for" in errors.read_text())
        yield


def test_c3_one_can_look_while_a_producer_waits_in_open(
    path: str, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """A process is stopped inside, a supervisor has started another one, and somebody wants to
    know what is the matter. Who only looks must not have to wait for the one that waits."""
    process = worker(name="hung")
    with stopped(process, "in_a_transaction"), opening(path, tmp_path):
        assert f"pid {process.pid}), silent for" in owners(path)


@pytest.mark.long
def test_c3_the_leave_to_kill_ends_with_its_engine(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    process = worker(name="hung", keepalive=0.3)
    xl.open(engine.path, kill_stalled=True).close()
    with waiting_for(process, "in_a_transaction", lambda: engine.topic("new")):
        process.process.join(3)
        assert process.process.is_alive()
