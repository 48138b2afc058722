"""Rule C4: what a process must not be told by: the wall clock, and process ids.

The clock jumps, by a day ahead or back, because it is set, or a machine wakes up. A
process id comes back, because there are not many: in a container that is started again, at
once. Neither may cost an owner its topic, or keep a dead one alive.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from testing.children import ROOT, command, line, script, tell
from testing.clocks import DAY, WallClock
from testing.namespaces import NEW_NAMESPACE, in_a_namespace, needs_namespaces
from testing.processes import (
    PATIENCE,
    State,
    Worker,
    close_producer,
    open_producer,
    send,
    until,
)

pytestmark = pytest.mark.once

SHARED, EXCLUSIVE, WAIT = "shared", "exclusive", "wait_for_exclusive"

# ---- C4: the wall clock ------------------------------------------------------------------


def wall_clock(state: State) -> float:
    return time.time()


JUMPS = {"a day ahead": DAY, "a day back": -DAY}


@pytest.mark.long
@pytest.mark.parametrize("seconds", JUMPS.values(), ids=JUMPS)
def test_c4_a_jump_of_the_wall_clock_evicts_no_engine(
    path: str, clock: WallClock, worker: Callable[..., Worker], seconds: int
) -> None:
    """Owner and waiter live by a clock that jumps, a third process by one that does not. None
    of them takes another one for dead, and when the owner is gone the waiter has its turn."""
    owner, waiter = worker(name="owner", keepalive=10), worker(name="waiter", keepalive=10)
    owner.call(open_producer, EXCLUSIVE)
    waiter.start(open_producer, WAIT)
    with xl.open(path, name="test", keepalive=10) as engine:
        topic = engine.topic("orders")
        until(lambda: topic.waiters)
        clock.jump(seconds)
        assert abs(owner.call(wall_clock) - time.time() - seconds) < 3600
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            owner.call(send, b"still here")
            time.sleep(0.05)
        assert not waiter.answered()
        assert {info.name for info in engine.engines()} == {"owner", "waiter", "test"}
        assert all(info.heartbeat_age < 60 for info in engine.engines())
        assert topic.owner is not None
        assert topic.owner.engine_name == "owner"
        owner.call(close_producer)
        assert waiter.answer() == 2


def send_in_every_way(state: State, name: str) -> None:
    """Through the journal, through the tables, alone, in a batch, in the background."""
    with state.topic.producer(SHARED) as producer:
        producer.send(name.encode())
        producer.send(bytes(200_000))
        producer.send_many([name.encode()] * 5)
        producer.send_async(name.encode()).result(PATIENCE)


def test_c4_publish_times_never_go_backwards(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker]
) -> None:
    """A process whose clock jumps to and fro writes beside one whose clock is right (rule G4).
    Nor does the clock's return lose anything that was written in the future."""
    process = worker(name="time traveller")
    for number, seconds in enumerate((0, DAY, -DAY, 2 * DAY, 0)):
        clock.jump(seconds)
        process.call(send_in_every_way, f"there-{number}")
        with topic.producer(SHARED) as producer:
            producer.send(b"here-%d" % number)
            producer.send(bytes(200_000))
    messages = list(topic.reader())
    published = [message.publish_time for message in messages]
    assert published == sorted(published)
    assert DAY < published[-1] / 1000 - time.time() < 3 * DAY
    assert [message.offset for message in messages] == list(range(5 * 10))
    assert topic.engine.verify().ok


def how_long(action: Callable[[], Any]) -> float:
    begin = time.monotonic()
    with contextlib.suppress(xl.WaitTimeoutError, xl.OwnershipError):
        action()
    return time.monotonic() - begin


def wait_in_every_way(state: State, seconds: float) -> list[float]:
    """How long each wait took that was to take so long. The topic is taken."""
    engine, topic = state.engine, state.topic
    free = engine.topic("free")
    waits = (
        lambda: topic.producer(WAIT, timeout=seconds),
        lambda: topic.reader().read_next(seconds),
        lambda: list(topic.reader().follow(seconds)),
        lambda: (free.producer(EXCLUSIVE).close(), free.producer(WAIT, settle=seconds)),
        lambda: engine.own("g", {"a": 1}, timeout=seconds),
    )
    with ThreadPoolExecutor(len(waits)) as pool:
        return list(pool.map(how_long, waits))


@pytest.mark.sampled
@pytest.mark.parametrize("seconds", JUMPS.values(), ids=JUMPS)
def test_c4_timeouts_hold_while_the_clock_jumps(
    topic: xl.Topic, clock: WallClock, worker: Callable[..., Worker], seconds: int
) -> None:
    """None ends before its time because a day has passed, none waits until yesterday comes."""
    process = worker(name="waits")
    claim = topic.engine.own("g", {"a": 9})
    with topic.producer(EXCLUSIVE):
        process.start(wait_in_every_way, 0.8)
        time.sleep(0.3)
        clock.jump(seconds)
        waited = process.answer()
    assert min(waited) >= 0.7  # a topic settles from when it was freed, a little before
    assert max(waited) < PATIENCE / 2
    assert claim.is_valid


# ---- C4: process ids ---------------------------------------------------------------------


@needs_namespaces
def test_c4_a_reader_in_another_container_with_this_process_id_is_named(path: str) -> None:
    """Both are process 1 of their namespaces, and LMDB tells its readers apart by these numbers. A
    reader has no slot, so that a writer sees it only in LMDB's table."""
    with xl.open(path) as engine, engine.topic("t").producer() as producer:
        producer.send(b"x")
    reads = """
        import sys
        import exclusivelog as xl
        with xl.open(sys.argv[1], readonly=True) as engine:
            print([message.value for message in engine.topic("t").reader()], flush=True)
            input()
            print(engine.topic("t").next_offset, flush=True)
    """
    writes = """
        import sys
        import exclusivelog as xl
        try:
            with xl.open(sys.argv[1]) as engine, engine.topic("t").producer() as producer:
                producer.send(b"y")
        except xl.LedgerError as error:
            print(error)
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        NEW_NAMESPACE + command(reads, path), stdin=pipe, stdout=pipe, text=True, cwd=ROOT
    ) as reader:
        try:
            assert line(reader) == "[b'x']"
            assert "another pid namespace" in in_a_namespace(writes, path)
            tell(reader)
            assert line(reader) == "1"
        finally:
            reader.kill()
    assert in_a_namespace(writes, path) == ""


# `reborn(source, pid)` runs the source in a process that has this pid.
REBORN = """
    import contextlib, os, signal, sys, time
    from pathlib import Path
    import exclusivelog as xl
    from testing.children import child, line, tell
    from testing.processes import until
    from testing.patience import PATIENCE

    path = sys.argv[1]

    @contextlib.contextmanager
    def reborn(source, pid):
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
                process = stack.enter_context(child(source, path))
                if process.pid == pid:
                    break
                process.kill()
            assert process.pid == pid
            assert line(process) == "ready"
            yield process

    def die(process):
        process.kill()
        process.wait(PATIENCE)
        return process.pid
"""

FIRST_LIFE = """
    import sys, time
    import exclusivelog as xl
    from testing.patience import PATIENCE
    engine = xl.open(sys.argv[1], name="first", keepalive=None)
    owner = engine.topic("orders").producer("exclusive")
    owner.send(b"first")
    shared = engine.topic("shared").producer()
    waiter = engine.topic("taken").producer_async("wait_for_exclusive", priority=9)
    claim = engine.own("g", {"a": 50})
    reader = engine.topic("orders").reader(group="g")
    print("ready", flush=True)
    time.sleep(PATIENCE)
"""

SECOND_LIFE = """
    import sys
    import exclusivelog as xl
    from testing.patience import PATIENCE
    engine = xl.open(sys.argv[1], name="second", keepalive=None)
    print("ready", flush=True)
    input()
    owner = engine.topic("orders").producer("wait_for_exclusive", timeout=PATIENCE)
    print(owner.topic_epoch, flush=True)
    input()
"""


@needs_namespaces
def test_c4_a_reused_process_id_is_not_taken_for_the_dead_owner(path: str) -> None:
    """The owner is killed, and the next process gets its id, and the same thread ids, as is usual
    in a restarted container. It opens the same ledger, and is not taken for the dead process: the
    topics, the places in the queue and the claims of that one are free."""
    story = f"""
        FIRST_LIFE, SECOND_LIFE = {FIRST_LIFE!r}, {SECOND_LIFE!r}
        with xl.open(path, name="witness", keepalive=None) as engine:
            taken = engine.topic("taken").producer("exclusive")
            with child(FIRST_LIFE, path) as first:
                assert line(first) == "ready"
                threads = set(os.listdir(f"/proc/{{first.pid}}/task"))
                dead = die(first)
            with reborn(SECOND_LIFE, dead) as second:
                assert set(os.listdir(f"/proc/{{dead}}/task")) <= threads
                topic = engine.topic("orders")
                assert {{e.name for e in engine.engines()}} == {{"witness", "second"}}
                assert topic.owner is None
                assert engine.topic("shared").holders == engine.topic("taken").waiters == []
                claim = engine.own("g", {{"a": None}})
                assert claim.generations == {{"a": 51}}
                tell(second)
                assert line(second) == "2"
                assert topic.owner.engine_name == "second" and topic.owner.pid == dead
                waiter = topic.producer_async("wait_for_exclusive")
                die(second)
                assert waiter.result({PATIENCE}).topic_epoch == 3
            assert engine.verify().ok
            print("well")
    """
    assert in_a_namespace(script(REBORN, story), path) == "well\n"


STOPS_INSIDE = """
    import signal, sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1], name="first", keepalive=0.2)
    print("ready", flush=True)
    with engine.ledger.write_exclusive():
        signal.raise_signal(signal.SIGSTOP)
"""

SENDS = """
    import sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1], name="second", keepalive=0.2, kill_stalled=True)
    producer = engine.topic("orders").producer()
    print("ready", flush=True)
    for _ in range(200):
        producer.send(b"second")
    engine.topic("new").producer("exclusive").send(b"x")
    print("done", flush=True)
    input()
"""


@pytest.mark.long
@needs_namespaces
def test_c4_a_reused_process_id_has_nothing_to_do_with_the_dead_one_s_locks(path: str) -> None:
    """It was killed inside the critical section. The next process has the id of the thread that
    died there, and must neither believe that it is inside itself nor be killed for it."""
    story = f"""
        STOPS_INSIDE, SENDS = {STOPS_INSIDE!r}, {SENDS!r}
        with xl.open(path, name="witness", kill_stalled=True) as engine:
            producer = engine.topic("orders").producer()
            producer.send(b"witness")
            with child(STOPS_INSIDE, path) as first:
                assert line(first) == "ready"
                until(lambda: engine.inside() is not None)
                dead = die(first)
            with reborn(SENDS, dead) as second:
                assert line(second) == "done"
                until(lambda: engine.inside() is None)
                assert producer.send(b"witness") == 201
                assert second.poll() is None
            assert engine.verify().ok
            print("well")
    """
    assert in_a_namespace(script(REBORN, story), path) == "well\n"


READS_FOR_EVER = """
    import sys, time
    import exclusivelog as xl
    from testing.patience import PATIENCE
    engine = xl.open(sys.argv[1])
    with engine.ledger.read():
        print("ready", flush=True)
        time.sleep(PATIENCE)
"""

LIVES_ON = """
    import sys
    import exclusivelog as xl
    engine = xl.open(sys.argv[1])
    print("ready", flush=True)
    input()
"""


@needs_namespaces
def test_c4_a_reused_process_id_does_not_keep_the_dead_one_s_snapshot(path: str) -> None:
    """It was killed while it read. The next process with that id opens the ledger and stays. LMDB,
    which knows readers by their process ids, would take the snapshot for one of its own, and give
    no page back any more."""
    story = f"""
        READS_FOR_EVER, LIVES_ON = {READS_FOR_EVER!r}, {LIVES_ON!r}
        with xl.open(path) as engine:
            with child(READS_FOR_EVER, path) as first:
                assert line(first) == "ready"
                dead = die(first)
            with reborn(LIVES_ON, dead):
                until(lambda: engine.stats()["oldest_reader"] is None)  # others read, too
                for number in range(150):
                    engine.topic("orders").producer().close()
                print(engine.stats()["used_bytes"])
    """
    assert int(in_a_namespace(script(REBORN, story), path)) < 1 << 20


@needs_namespaces
def test_c4_equal_process_ids_in_two_namespaces_are_no_riddle(path: str) -> None:
    """Two containers of one machine share a ledger, and both run it as process 1. Either that
    works, or the second one is told what is the matter."""
    source = """
        import sys
        import exclusivelog as xl
        try:
            with xl.open(sys.argv[1]) as engine, engine.topic("orders").producer() as producer:
                producer.send(b"x")
            print("it works")
        except xl.LedgerError as error:
            print(error)
    """
    first = [*NEW_NAMESPACE, *command(LIVES_ON, path)]
    with subprocess.Popen(
        first, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            line(process)
            told = in_a_namespace(source, path)
            assert told == "it works\n" or "namespace" in told
        finally:
            process.kill()
