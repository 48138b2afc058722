"""Rule I1: who owns a shared state's topic, how long, and what becomes of it when he is gone.

A write makes its process the owner, and it stays that until another one asks. So writing costs
an append if no other process writes, and a hand-over if one does.
"""

from __future__ import annotations

import contextlib
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
from exclusivelog.local.session import LocalSession
from testing.children import child, line
from testing.processes import PATIENCE, Failed, State, Worker, collect, hang, until, within
from testing.states import (
    call_map,
    count_up,
    count_up_slowly,
    everything,
    one_more,
    open_counts,
    open_map,
    opened_afresh,
    struck_after,
    take_over,
)

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


@pytest.fixture
def mapper(worker: Callable[..., Worker]) -> Callable[..., Worker]:
    """A worker that has the map open. `timeout` is the map's, other options the engine's."""

    def make(name: str = "worker", timeout: float | None = None, **options: Any) -> Worker:
        process = worker(name=name, **options)
        process.call(open_map, timeout=timeout)
        return process

    return make


# ---- kept, and given up ------------------------------------------------------------------


def test_i2_a_read_beside_giving_the_topic_back_sees_what_the_next_owner_has_written(
    shared: Map, mapper: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process waits for the topic, and a thread gives it back, while this one asks
    whether it still has it; and the other one writes at once."""
    other, look = mapper(), LocalSession.status
    shared.put("n", 1)

    def too_late(self: LocalSession) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(LocalSession, "status", look)
            thread = threading.Thread(target=shared._ownership._wanted, args=(self,))
            thread.start()
            thread.join(PATIENCE)
            other.call(call_map, "put", "n", 2)
        return look(self)

    monkeypatch.setattr(LocalSession, "status", too_late)
    assert shared.get("n", latest=True) == 2


def test_i1_who_reads_only_never_owns(shared: Map, topic: xl.Topic) -> None:
    for latest in (False, True):
        shared.get("a", latest=latest)
        shared.scan(latest=latest)
    shared.snapshot()
    assert (topic.owner, topic.epoch) == (None, 0)


def test_i1_ownership_is_kept_while_no_other_asks(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    """Writes, reads of one's own, and others' reads: all within one epoch."""
    with xl.SharedMap(other) as reader:
        for number in range(50):
            shared.put("n", number)
            shared.replace("n", -1, -2)
            assert shared.get("n", latest=True) == number
            assert reader.get("n", latest=True) == number
        time.sleep(0.3)
        shared.put("n", 50)
    assert topic.owner is not None
    assert (topic.owner.epoch, topic.epoch) == (1, 1)


def test_i1_an_idle_owner_gives_the_topic_up_when_another_process_asks(
    shared: Map, topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    process = mapper(timeout=PATIENCE)
    for turn in range(10):
        shared.put("n", 2 * turn)
        time.sleep(0.05)  # both do nothing
        begin = time.monotonic()
        assert process.call(call_map, "update", "n", one_more).value == 2 * turn + 1
        assert time.monotonic() - begin < PATIENCE / 2
    assert (topic.epoch, topic.waiters) == (20, [])


def test_i1_two_maps_of_one_engine_take_turns_as_well(shared: Map, topic: xl.Topic) -> None:
    with xl.SharedMap(topic, timeout=PATIENCE) as second:
        for number in range(10):
            assert (second if number % 2 else shared).update("n", one_more).value == number + 1
    assert topic.epoch == 10


def test_i1_a_write_that_runs_is_finished_before_the_next_owner_s(
    shared: Map,
    topic: xl.Topic,
    mapper: Callable[..., Worker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exclusivelog.state.shared.LOOKS", 1_000_000)
    process = mapper()
    gate = str(tmp_path / "gate")
    process.start(count_up_slowly, "n", gate)
    until(lambda: os.path.exists(f"{gate}.in"))
    later = shared.update_async("n", one_more)
    until(lambda: topic.waiters)
    time.sleep(0.1)
    assert not later.done()
    Path(f"{gate}.go").touch()
    assert process.answer() == [None]  # called once
    assert later.result(PATIENCE).value == 2


@pytest.mark.long
def test_i1_all_have_their_turns(
    shared: Map, topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    """Three processes write as fast as they can. None starves, none loses a write, and the
    topic does not change hands for every one of them. Beside load, four seconds are few turns, and
    the kernel may run one process far less than the others, or none for a while: they are given
    more."""
    processes = [mapper(name=f"w{number}") for number in range(3)]
    counts, longest, rounds = [0, 0, 0], 4.0, 0
    while rounds < 10 and (sum(counts) < 1000 or min(counts) <= sum(counts) / 20 or longest >= 4):
        longest, rounds = 0.0, rounds + 1
        for process in processes:
            process.start(count_up, "n", 4.0)
        for number, process in enumerate(processes):
            times, took = process.answer()
            counts[number] += times
            longest = max(longest, took)
    assert shared.get("n", latest=True) == sum(counts) == topic.next_offset
    assert min(counts) > sum(counts) / 20, counts
    assert longest < 4
    assert topic.epoch < sum(counts)


@pytest.mark.long
def test_i1_one_busy_with_many_threads_lets_others_have_their_turns(
    shared: Map, mapper: Callable[..., Worker]
) -> None:
    process = mapper()
    ended = threading.Event()

    def write() -> int:
        times = 0
        while not ended.is_set():
            shared.update("n", one_more)
            times += 1
        return times

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(write) for _ in range(4)]
        theirs, longest, rounds = 0, 0.0, 0
        try:
            while theirs < 10 and rounds < 10:  # beside load, three seconds are few turns
                times, took = process.call(count_up, "n", 3.0)
                theirs, longest, rounds = theirs + times, max(longest, took), rounds + 1
        finally:
            ended.set()
        ours = sum(thread.result(PATIENCE) for thread in threads)
    assert shared.get("n", latest=True) == theirs + ours
    assert theirs >= 10
    assert longest < PATIENCE / 2  # else it would have to wait until the threads end


# ---- the owner dies, or hangs ------------------------------------------------------------


def test_c2_a_killed_owner_s_successor_has_all_that_it_wrote(
    shared: Map, mapper: Callable[..., Worker]
) -> None:
    expected = {}
    for turn in range(4):
        process = mapper(keepalive=None)
        for number in range(10):
            process.call(call_map, "put", f"{turn}-{number}", number)
            expected[f"{turn}-{number}"] = number
        process.kill()
        if turn % 2:  # as its next owner; else as a reader
            shared.put("last", turn)
            expected["last"] = turn
        assert dict(shared.scan(latest=True)) == expected


def test_c2_who_waits_for_a_killed_owner_is_next_at_once(
    shared: Map, topic: xl.Topic, mapper: Callable[..., Worker], tmp_path: Path
) -> None:
    """It is killed inside of its function: nothing of that write is left."""
    process = mapper(keepalive=None)
    process.call(call_map, "put", "n", 5)
    process.start(count_up_slowly, "n", str(tmp_path / "gate"))
    until(lambda: (tmp_path / "gate.in").exists())
    waiting = [shared.update_async("n", one_more)]
    until(lambda: topic.waiters)
    process.kill()
    assert waiting[0].result(PATIENCE).value == 6
    assert topic.epoch == 2


def test_c3_a_stopped_owner_is_passed_over_and_finds_out(
    shared: Map, topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    process = mapper()
    process.call(call_map, "put", "n", 1)
    hang(process, 0.5)
    shared.put("n", 10)  # waits until it has been silent for too long
    process.signal(signal.SIGCONT)
    assert process.call(call_map, "get", "n", latest=True) == 10
    assert process.call(call_map, "update", "n", one_more).value == 11
    assert shared.get("n", latest=True) == 11
    assert topic.epoch == 3


def test_c3_one_stopped_in_its_function_begins_anew(
    shared: Map, mapper: Callable[..., Worker], tmp_path: Path
) -> None:
    """What it computed from the old state is refused; it is called again with the new one."""
    process = mapper()
    process.call(call_map, "put", "n", 1)
    gate = str(tmp_path / "gate")
    process.start(count_up_slowly, "n", gate)
    until(lambda: os.path.exists(f"{gate}.in"))
    hang(process, 0.5)
    shared.put("n", 10)
    Path(f"{gate}.go").touch()
    process.signal(signal.SIGCONT)
    assert process.answer() == [1, 10]
    assert shared.get("n", latest=True) == 11


def test_c3_a_short_stop_costs_no_call_its_ownership(
    shared: Map, topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    process = mapper(keepalive=60)
    process.call(call_map, "put", "n", 1)
    hang(process)
    time.sleep(0.3)
    assert shared.get("n", latest=True) == 1
    process.signal(signal.SIGCONT)
    assert process.call(call_map, "update", "n", one_more).value == 2
    assert topic.epoch == 1


def count_and_look(state: State, seconds: float) -> list[tuple[int, int]]:
    """Add 1 to a counter of one's own and read another's, again and again: (own, other)."""
    shared, seen = state.kept["map"], []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        own = shared.update(state.engine.name, one_more).value
        other = "w1" if state.engine.name == "w0" else "w0"
        seen.append((own, shared.get(other, 0, latest=True)))
    return seen


@pytest.mark.long
def test_c3_stops_at_random_lose_nothing(shared: Map, mapper: Callable[..., Worker]) -> None:
    """Two processes count, and are stopped for shorter and longer than their keepalive. Each
    finds its own counter as it left it, and the other's never goes back."""
    chance = random.Random(7)
    processes = [mapper(name=f"w{number}", keepalive=0.2) for number in range(2)]
    for process in processes:
        process.start(count_and_look, 3.0)
    for _ in range(12):
        process = chance.choice(processes)
        process.signal(signal.SIGSTOP)
        time.sleep(chance.choice((0.01, 0.1, 0.4)))
        process.signal(signal.SIGCONT)
        time.sleep(0.05)
    for name, process in zip(("w0", "w1"), processes, strict=True):
        own, other = zip(*process.answer(), strict=True)
        assert list(own) == list(range(1, len(own) + 1))
        assert list(other) == sorted(other)
        assert shared.get(name, latest=True) == len(own)


def test_i1_a_write_that_is_fenced_while_it_waits_begins_anew(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    """As it does that is fenced a moment later, when it owns the topic."""
    holder = other.producer("exclusive")
    future = shared.put_async("a", 1)
    until(lambda: topic.waiters)
    take_over(other)
    assert holder.state == "fenced"
    assert future.result(PATIENCE) is None


def test_c3_a_write_that_hangs_while_it_waits_begins_anew(
    topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    process, slots = mapper(), topic.engine.ledger.lockfile.slots
    with topic.producer("exclusive"):
        process.start(call_map, "put", "a", 1)
        until(lambda: topic.waiters)
        hang(process, 0.3)
        [(slot, there)] = slots.in_process(process.pid)
        until(lambda: not slots.alive(slot, there.id))
    with topic.producer("exclusive"):  # the one that hangs is passed over
        process.signal(signal.SIGCONT)
    assert process.answer() is None
    assert opened_afresh(topic) == {"a": 1}


# ---- timeouts, interrupts ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
@pytest.mark.parametrize("timeout", [0, 0.1])
def test_d5_a_write_waits_no_longer_than_its_timeout(
    topic: xl.Topic, other: xl.Topic, mode: str, timeout: float
) -> None:
    """Producers of another kind do not give the topic up. The error says who has it, nothing
    is left behind, and the map goes on."""
    with xl.SharedMap(topic, timeout=timeout) as shared, open_counts(topic, timeout=0.05) as counts:
        with other.producer(mode, name="somebody") as holder:
            begin = time.monotonic()
            with pytest.raises(xl.WaitTimeoutError, match="'somebody'"):
                shared.put("a", 1)
            assert time.monotonic() - begin >= timeout
            with pytest.raises(xl.WaitTimeoutError):
                counts.write(lambda state: [["a", 1]])
            with pytest.raises(xl.WaitTimeoutError):
                shared.update_async("a", one_more).result(PATIENCE)
            assert (topic.waiters, topic.next_offset) == ([], 0)
            assert shared.get("a", latest=True) is None
            assert holder.state == "open"
        shared.put("a", 1)
        assert shared.get("a") == 1


def test_d5_ctrl_c_ends_a_wait_and_leaves_nothing(
    topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    process = mapper()
    with topic.producer("exclusive"):
        process.start(call_map, "put", "a", 1)
        until(lambda: topic.waiters)
        process.signal(signal.SIGINT)  # right before a sleep, it is seen at the next look
        with pytest.raises(Failed, match="KeyboardInterrupt"):
            process.answer()
        until(lambda: not topic.waiters)
    process.call(call_map, "put", "a", 2)
    assert opened_afresh(topic) == {"a": 2}


@pytest.mark.long
def test_b9_ctrl_c_anywhere_in_a_write_leaves_the_map_whole(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    """It may be in the log, or not. The map must say the same as the log, write again, and let
    others write."""
    chance = random.Random(11)

    def write_and_read(number: int) -> None:
        shared.put("mine", number)
        shared.get("theirs", latest=True)

    with xl.SharedMap(other, timeout=PATIENCE) as rival:
        for number in range(300):
            if number % 2:
                rival.put("theirs", number)
            struck_after(chance.uniform(1e-6, 2e-3), lambda number=number: write_and_read(number))
            assert everything(shared) == everything(rival)
            if number % 10 == 0:
                shared.put("again", number)
        assert opened_afresh(topic) == everything(rival)


# ---- moved, dropped, inherited -----------------------------------------------------------


def test_e1_a_topic_that_was_unloaded_goes_on_in_the_other_process(
    engine: xl.Engine, shared: Map, topic: xl.Topic, mapper: Callable[..., Worker]
) -> None:
    process = mapper()
    [there] = [info.id for info in engine.engines() if info.id != engine.id]
    shared.put("n", 1)
    [move] = engine.unload("orders", to=there)
    assert move.state == "assigned"
    assert process.call(call_map, "update", "n", one_more).value == 2
    assert shared.update("n", one_more).value == 3
    assert process.call(call_map, "get", "n", latest=True) == 3


def test_e2_a_topic_that_was_unloaded_within_one_process_has_one_writer(
    engine: xl.Engine, shared: Map, other: xl.Topic
) -> None:
    """Sends follow a topic that moves within the process. A map's must not: they rest on the
    state as it was, and the next owner assumes that it is the only writer."""
    with xl.SharedMap(other) as second:
        shared.put("n", 1)
        engine.unload("orders", to=other.engine.id)
        assert second.update("n", one_more).value == 2
        assert shared.update("n", one_more).value == 3
        assert second.get("n", latest=True) == 3


def test_a2_a_map_that_was_dropped_gives_its_topic_back(topic: xl.Topic) -> None:
    shared: Map = xl.SharedMap(topic)
    shared.put("a", 1)
    assert shared.put_async("a", 2).result(PATIENCE) == 1
    del shared
    collect()
    until(lambda: topic.owner is None)


FORKED_INSIDE = """
    import os, signal, sys, threading
    import exclusivelog as xl
    from testing.patience import PATIENCE

    with xl.open(sys.argv[1]) as engine, xl.SharedMap(engine.topic("orders")) as shared:
        inside, go_on = threading.Event(), threading.Event()

        def slowly(old):
            inside.set()
            go_on.wait(PATIENCE)
            return 1

        thread = threading.Thread(target=shared.update, args=("n", slowly))
        thread.start()
        inside.wait(PATIENCE)
        call = {"get": lambda: shared.get("n"), "put": lambda: shared.put("n", 2),
                "len": lambda: len(shared), "future": lambda: shared.get_async("n"),
                "close": shared.close}[sys.argv[2]]
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE))
            try:
                call()
                print("nothing", flush=True)
            except xl.EngineClosedError as error:
                print("told" if "fork" in str(error) else error, flush=True)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        go_on.set()
        thread.join()
        if status:
            print("died of signal", os.WTERMSIG(status), flush=True)
        assert shared.get("n") == 1
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("call", "said"),
    [("put", "told"), ("future", "told"), ("get", "told"), ("len", "told"), ("close", "nothing")],
)
def test_c5_a_child_forked_while_another_thread_writes_is_told(
    path: str, call: str, said: str
) -> None:
    """The thread that holds the map's locks does not exist in the child, and never lets go."""
    with child(FORKED_INSIDE, path, call) as process:
        assert line(process) == said
        assert process.wait(PATIENCE) == 0


CALLED_BACK = """
    import os, sys, threading
    import exclusivelog as xl
    from testing.patience import PATIENCE

    def add(state, op):
        state["n"] = state.get("n", 0) + op

    with xl.open(sys.argv[1]) as engine:
        counts = xl.SharedState(engine.topic("orders"), initial=dict, apply=add)
        inside, go_on = threading.Event(), threading.Event()

        def write_inside(state):
            inside.set()
            go_on.wait(PATIENCE)
            counts.write(lambda state: [1])

        def read():
            try:
                counts.read(write_inside)
            except RuntimeError:
                print("refused", flush=True)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        inside.wait(PATIENCE)
        writer = threading.Thread(target=counts.write, args=(lambda s: [1],), daemon=True)
        writer.start()
        writer.join(0.5)  # it waits for the reader
        go_on.set()
        reader.join(PATIENCE)
        print("stuck" if reader.is_alive() else "free", flush=True)
        os._exit(0)
"""


def test_i3_a_call_back_is_refused_while_another_thread_writes(path: str) -> None:
    """One thread reads, and its function writes, which it must not; another thread writes. The
    first holds the state and wants its turn to write, the second the other way round."""
    with child(CALLED_BACK, path) as process:
        assert [line(process), line(process)] == ["refused", "free"]


# ---- lagging behind ----------------------------------------------------------------------


def test_i2_one_that_has_not_looked_for_long_catches_up(
    shared: Map, mapper: Callable[..., Worker]
) -> None:
    process = mapper()
    process.call(call_map, "put", "n", 0)
    for _ in range(3):
        for _ in range(300):
            shared.update("n", one_more)
        shared.clear()
        shared.put("n", 7)
        assert process.call(call_map, "scan", latest=True) == [("n", 7)]
        assert process.call(call_map, "update", "n", one_more).value == 8


def test_i1_fenced_again_and_again_a_write_succeeds_in_the_end(
    shared: Map, other: xl.Topic
) -> None:
    """Another producer fences the topic's owner every few milliseconds."""
    ended = threading.Event()

    def bully() -> None:
        while not ended.is_set():
            began = time.monotonic()
            with contextlib.suppress(xl.ExclusiveLogError):
                take_over(other)
            time.sleep(max(0.005, time.monotonic() - began))  # a busy machine writes more slowly

    with ThreadPoolExecutor(1) as pool:
        bullying = pool.submit(bully)
        try:
            got = within(lambda: [shared.update("n", one_more).value for _ in range(200)])
        finally:
            ended.set()
        bullying.result(PATIENCE)
    assert got == list(range(1, 201))
    assert other.next_offset == 200
