"""Rule I8: a write to a shared state waits for no owner that does not answer.

An owner that does not release the topic in time is evicted. It takes the topic again with its next
write, and what it had begun to compute is computed anew.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.state.shared import LOOKS, LOST_BEFORE_KEPT
from testing.processes import (
    PATIENCE,
    State,
    Worker,
    no_requests_for_the_gil,
    stop,
    stop_outside,
    until,
)
from testing.states import (
    call_map,
    count_up_slowly,
    count_up_until,
    one_more,
    open_map,
)

pytestmark = pytest.mark.rule("I8")

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


@pytest.fixture
def other(worker: Callable[..., Worker]) -> Worker:
    """Another process that has the map open, and is never taken for silent."""
    process = worker(keepalive=None)
    process.call(open_map)
    return process


def ends(engine: xl.Engine) -> list[tuple[str, str]]:
    """How owners have lost the topic."""
    lost = [event for event in engine.history("orders") if event.kind in ("release", "evict")]
    return [(event.kind, event.reason) for event in lost]


def owners(engine: xl.Engine) -> set[str]:
    """The names of the engines that the topic was granted to."""
    events = engine.history("orders")
    return {event.target["engine_name"] for event in events if event.kind == "grant"}


def keep_the_gil(state: State, pipe: str) -> None:
    """As a regular expression or a sort does: no other thread of the process runs until somebody
    writes to the pipe."""
    file, room, libc = os.open(pipe, os.O_RDWR), ctypes.create_string_buffer(1), ctypes.PyDLL(None)
    with no_requests_for_the_gil():  # nor does one run between these two calls
        libc.creat(os.fsencode(f"{pipe}.in"), 0o600)
        libc.read(file, room, 1)
    os.close(file)


def test_i8_a_stopped_owner_is_evicted_and_takes_the_topic_again(
    engine: xl.Engine, shared: Map, other: Worker
) -> None:
    other.call(call_map, "put", "n", 1)
    stop_outside(engine.path, other.pid)
    assert shared.update("n", one_more).value == 2
    assert ends(engine) == [("evict", "late")]
    other.signal(signal.SIGCONT)
    assert other.call(call_map, "update", "n", one_more).value == 3
    assert shared.get("n", latest=True) == 3


def test_i8_an_owner_that_keeps_the_gil_is_evicted_and_takes_the_topic_again(
    engine: xl.Engine, shared: Map, other: Worker, tmp_path: Path
) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    other.call(call_map, "put", "n", 1)
    other.start(keep_the_gil, pipe)
    until(Path(f"{pipe}.in").exists)
    assert shared.update("n", one_more).value == 2
    Path(pipe).write_bytes(b"x")
    other.answer()
    assert other.call(call_map, "update", "n", one_more).value == 3
    assert ends(engine)[0] == ("evict", "late")


def test_i8_a_process_that_is_stopped_while_it_waits_holds_nobody_up(
    engine: xl.Engine, topic: xl.Topic, shared: Map, other: Worker
) -> None:
    """It is granted the topic while it is stopped."""
    first = topic.producer("exclusive")
    other.start(call_map, "put", "n", 1)
    until(lambda: topic.waiters)
    stop_outside(engine.path, other.pid)
    first.close()
    assert shared.put("m", 1) is None
    assert ends(engine) == [("release", "closed"), ("evict", "late")]
    other.signal(signal.SIGCONT)
    other.answer()
    assert dict(shared.scan(latest=True)) == {"m": 1, "n": 1}


def test_i8_a_map_that_reads_late_of_its_own_grant_does_not_evict_itself(
    engine: xl.Engine, topic: xl.Topic, shared: Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It owns the topic in the tables, and the thread that reads notifications is late."""
    notifications, looked = engine.backend.notifications, list[int]()
    read = notifications.read
    store = shared._ownership._store

    def look() -> int:
        owner = type(store).yielding_owner(store)
        if owner or looked:
            looked.append(owner)
        return owner

    def read_late() -> None:
        if len(looked) > 2 * LOOKS:
            read()

    monkeypatch.setattr(shared._ownership, "_store", Looking(store, look))
    monkeypatch.setattr(notifications, "read", read_late)
    with topic.producer("exclusive") as first, ThreadPoolExecutor(1) as pool:
        putting = pool.submit(shared.put, "n", 1)
        until(lambda: topic.waiters)
        first.close()
        assert putting.result(PATIENCE) is None
    assert ends(engine) == [("release", "closed")]
    assert topic.epoch == 2


class Looking:
    """A topic's store whose `yielding_owner` is counted."""

    def __init__(self, store: Any, look: Callable[[], int]) -> None:
        self.yielding_owner, self.evict_late = look, store.evict_late


def test_i8_a_function_that_takes_long_is_called_again_with_what_others_wrote(
    shared: Map, other: Worker, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    other.call(call_map, "put", "n", 1)
    other.start(count_up_slowly, "n", gate)
    until(Path(f"{gate}.in").exists)
    shared.put("n", 10)
    Path(f"{gate}.go").touch()
    assert other.answer() == [1, 10]
    assert shared.get("n", latest=True) == 11


def test_i8_a_function_that_takes_long_is_not_starved(topic: xl.Topic, shared: Map) -> None:
    """After it was interrupted a few times, the others wait until it is through."""
    seen, later = list[int](), list[Any]()

    with xl.SharedMap(topic) as slow, ThreadPoolExecutor(2) as pool:
        slow.put("n", 0)

        def slowly(old: int) -> int:
            seen.append(old)
            putting = pool.submit(shared.put, "n", 10 * len(seen))
            if len(seen) <= LOST_BEFORE_KEPT:
                putting.result(PATIENCE)
            else:
                until(lambda: topic.waiters)
                threading.Event().wait(0.3)
                assert not putting.done()
                later.append(putting)
            return old + 1

        assert slow.update("n", slowly).value == 31
        later[0].result(PATIENCE)
        assert seen == [0, 10, 20, 30]
        assert shared.get("n", latest=True) == 40


def test_i8_a_topic_that_was_kept_for_a_function_that_fails_is_given_back(
    topic: xl.Topic, shared: Map
) -> None:
    with xl.SharedMap(topic) as slow, ThreadPoolExecutor(1) as pool:
        slow.put("n", 0)
        calls = list[int]()

        def fails(old: int) -> int:
            calls.append(old)
            if len(calls) > LOST_BEFORE_KEPT:
                raise ValueError("on purpose")
            pool.submit(shared.put, "n", len(calls)).result(PATIENCE)
            return old + 1

        with pytest.raises(ValueError, match="on purpose"):
            slow.update("n", fails)
        pool.submit(shared.put, "n", 9).result(PATIENCE)
        assert slow.get("n", latest=True) == 9


def test_i8_a_write_that_waits_ends_in_time_although_a_process_is_stopped_in_a_transaction(
    engine: xl.Engine, shared: Map, other: Worker, worker: Callable[..., Worker]
) -> None:
    other.call(call_map, "put", "n", 1)
    stop_outside(engine.path, other.pid)
    third = worker(name="third", keepalive=None)
    third.start(be_stopped_in_a_transaction)
    third.await_stop()
    impatient = xl.SharedMap(shared.topic, timeout=1.0)
    with pytest.raises(xl.WaitTimeoutError):
        impatient.put("n", 2)
    third.kill()
    assert shared.update("n", one_more).value == 2


def be_stopped_in_a_transaction(state: State) -> None:
    """While it holds the writer lock."""
    with state.engine.ledger.write_exclusive():
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
def test_i8_stops_at_random_lose_and_double_no_write(
    engine: xl.Engine, shared: Map, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Three processes count in one key, each acknowledged once, while each is stopped now and then
    for longer than it is waited for; a checkpoint, a reader and transactions beside them."""
    chance, enough = random.Random(11), tmp_path / "enough"
    processes = [worker(name=f"w{number}", keepalive=None) for number in range(3)]
    for process in processes:
        process.call(open_map)
        process.start(count_up_until, "n", str(enough))
    reader, read = engine.topic("orders").reader(), 0
    with engine.topic("other").producer() as producer:
        deadline, stops = time.monotonic() + PATIENCE, 0
        while stops < 20 or ("evict", "late") not in ends(engine):
            assert time.monotonic() < deadline, ends(engine)
            stops += 1
            process = chance.choice(processes)
            stop(process.pid)
            threading.Event().wait(chance.choice((0.05, 0.2)))
            process.signal(signal.SIGCONT)
            with engine.transaction() as txn:
                producer.send(b"beside", transaction=txn)
            engine.ledger.checkpoint()
            read += len(reader.read_batch(10_000))
        until(lambda: {"w0", "w1", "w2"} <= owners(engine))
        enough.touch()
    counts = [process.answer() for process in processes]
    assert min(counts) > 0
    assert read + sum(1 for _ in reader) == sum(counts)
    assert shared.get("n", latest=True) == sum(counts) == engine.topic("orders").next_offset
