"""Rules C1 to C6: the ways in which a topic is lost, and what the loser and the others see."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership import notifications
from exclusivelog.local.session import LocalSession
from exclusivelog.local.shm import slots
from exclusivelog.local.storage import ledger
from testing.children import child, finish, line, tell
from testing.handovers import KEEPALIVE, Quick, stop_here, thaw
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    Worker,
    close_producer,
    forked,
    hang,
    open_producer,
    producer_state,
    rows,
    send,
    until,
    values,
    within,
)

FENCED = xl.ProducerFencedError


# ---- C1: graceful close ------------------------------------------------------------------


def test_c1_the_next_waiter_is_promoted_in_the_same_transaction(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """The topic is never free while a producer waits for it."""
    with xl.open(engine.path) as other:
        owner = topic.producer(EXCLUSIVE)
        waiter = other.topic("orders").producer_async(WAIT, name="next")
        before = engine.ledger.usage.sizes()["transactions"]
        owner.close()
        assert engine.ledger.usage.sizes()["transactions"] == before + 1
        assert topic.owner is not None
        assert (topic.owner.producer_name, topic.owner.epoch) == ("next", 2)
        assert waiter.result(timeout=PATIENCE).topic_epoch == 2


# ---- C2: the death of a process ----------------------------------------------------------


def test_c2_a_killed_owner_s_topic_goes_to_the_waiter(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """SIGKILL leaves the owner no time to say anything. The kernel tells the others."""
    for epoch in range(1, 10, 2):
        process = worker(keepalive=None)  # no silence, however long, would give it away
        assert process.call(open_producer, EXCLUSIVE) == epoch
        assert process.call(send, b"alive") == topic.next_offset - 1
        waiter = topic.producer_async(WAIT)
        process.kill()
        successor = waiter.result(timeout=PATIENCE)
        assert successor.topic_epoch == epoch + 1
        successor.send(b"successor")
        successor.close()
    assert [message.epoch for message in topic.reader()] == list(range(1, 11))


LAST_WORDS = {
    "leaves main": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "an exception": ("raise RuntimeError('no more')", 1),
    "an exception in a thread that it waits for": (
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); os._exit(5)",
        5,
    ),
    "abort": ("faulthandler.disable(); os.abort()", -signal.SIGABRT),
    "a crash": ("faulthandler.disable(); ctypes.string_at(8)", -signal.SIGSEGV),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "exec": ("os.execv('/bin/true', ['true'])", 0),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("words", "code"), LAST_WORDS.values(), ids=LAST_WORDS)
def test_c2_however_a_process_ends_the_waiter_gets_its_topic(
    topic: xl.Topic, words: str, code: int
) -> None:
    source = f"""
        import ctypes, faulthandler, os, resource, signal, sys, threading
        import exclusivelog as xl
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        engine = xl.open(sys.argv[1], keepalive=None)
        producer = engine.topic("orders").producer("exclusive")
        producer.send(b"alive")
        print("ready", flush=True)
        input()
        sys.stderr = open(os.devnull, "w")
        {words}
    """
    with child(source, topic.engine.path) as process:
        assert line(process) == "ready"
        waiter = topic.producer_async(WAIT)
        tell(process)
        assert waiter.result(timeout=PATIENCE).topic_epoch == 2
        assert process.wait(timeout=PATIENCE) == code
    assert values(topic) == [b"alive"]


def test_c2_leaving_main_sends_what_still_waits(topic: xl.Topic) -> None:
    source = """
        import sys
        import exclusivelog as xl
        producer = xl.open(sys.argv[1]).topic("orders").producer(linger=60)
        for i in range(100):
            producer.send_async(b"%d" % i)
        print("ready", flush=True)
    """
    with child(source, topic.engine.path) as process:
        assert line(process) == "ready"
        assert process.wait(timeout=PATIENCE) == 0
    assert values(topic) == [b"%d" % i for i in range(100)]


def hold_and_await(state: State) -> None:
    """Sessions of every kind on several topics."""
    state.kept["sessions"] = [
        state.engine.topic("owned").producer(EXCLUSIVE),
        state.engine.topic("shared").producer(SHARED),
        state.engine.topic("shared").producer(SHARED),
        state.engine.topic("awaited").producer_async(WAIT),
        state.topic.producer(EXCLUSIVE),
    ]


def test_c2_all_sessions_of_a_dead_engine_are_evicted(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    owner = engine.topic("awaited").producer(EXCLUSIVE)
    process = worker(name="gone")
    process.call(hold_and_await)
    gone = next(info.id for info in engine.engines() if info.name == "gone")

    def sessions() -> list[Any]:
        with engine.ledger.read() as tables:
            return tables.sessions.of_engine(gone, "")

    assert len(sessions()) == 5
    waiter = topic.producer_async(WAIT)
    process.kill()
    assert waiter.result(timeout=PATIENCE).topic_epoch == 2
    until(lambda: sessions() == [])
    for name, epoch in (("owned", 1), ("shared", 0)):
        assert engine.topic(name).holders == []
        assert engine.topic(name).epoch == epoch
    assert owner.state == "open"
    assert engine.topic("awaited").waiters == []
    assert [info.name for info in engine.engines()] == ["test"]


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
def test_c2_a_dead_owner_is_in_no_ones_way(
    topic: xl.Topic, worker: Callable[..., Worker], mode: str
) -> None:
    process = worker(keepalive=None)
    process.call(open_producer, EXCLUSIVE)
    process.kill()
    assert topic.owner is None
    producer = topic.producer(mode, timeout=PATIENCE)
    assert producer.topic_epoch == (1 if mode == SHARED else 2)


def test_c2_the_thread_that_opened_an_engine_may_end(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    """It is the process whose life counts, not the life of the thread that called open()."""
    opened: list[xl.Engine] = []
    thread = threading.Thread(target=lambda: opened.append(xl.open(path, keepalive=None)))
    thread.start()
    thread.join()
    with opened[0] as other:
        with ThreadPoolExecutor(1) as pool:
            owner = pool.submit(other.topic("orders").producer, EXCLUSIVE).result(PATIENCE)
        with pytest.raises(xl.WaitTimeoutError):
            topic.producer(WAIT, timeout=0.5)
        assert owner.send(b"x") == 0


def test_c2_the_process_that_promotes_may_die_too(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Owner and waiters are killed almost at once, so that the process that notices a death may be
    dead itself before it has passed the topic on. The last one alive gets it."""
    for _ in range(3):
        owner, *waiters = [worker(name=f"w{i}") for i in range(4)]
        owner.call(open_producer, EXCLUSIVE)
        for waiter in waiters:
            waiter.start(open_producer, WAIT, priority=5)
        until(lambda: len(topic.waiters) == 3)
        last = topic.producer_async(WAIT)
        for process in (owner, *waiters):
            process.signal(signal.SIGKILL)
        with last.result(timeout=PATIENCE) as producer:
            assert producer.topic_epoch == topic.epoch
            assert topic.waiters == []


# ---- C3: a process that hangs ------------------------------------------------------------


def await_silence(topic: xl.Topic) -> None:
    """Wait until no responsive engine holds the topic."""
    until(lambda: not topic.holders)


RIVALS: dict[str, Callable[[xl.Topic], xl.Producer]] = {
    "a waiter": lambda topic: topic.producer(WAIT, timeout=PATIENCE),
    "an exclusive request": lambda topic: await_silence(topic) or topic.producer(EXCLUSIVE),
    "a fencing request": lambda topic: await_silence(topic) or topic.producer(FENCING),
    "a shared request": lambda topic: await_silence(topic) or topic.producer(SHARED),
    "a fencing request that does not wait": lambda topic: topic.producer(FENCING),
}


@pytest.mark.sampled
@pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS)
def test_c3_a_hung_owner_is_evicted_and_nothing_of_it_reaches_the_log_any_more(
    topic: xl.Topic, worker: Callable[..., Worker], rival: Callable[[xl.Topic], xl.Producer]
) -> None:
    """The owner's process is stopped for longer than its keepalive. Another process takes the
    topic and writes. Then the process goes on, and does not know that it was away."""
    process = worker(name="hung", keepalive=1.0)
    process.call(open_producer, EXCLUSIVE)
    process.call(send, b"before")
    hang(process)
    producer = rival(topic)
    assert producer.send(b"rival") == 1
    process.signal(signal.SIGCONT)
    with pytest.raises(Failed, match="ProducerFencedError"):
        process.call(send, b"zombie")
    with pytest.raises(Failed, match="ProducerFencedError"):
        process.call(send, b"zombie again")
    assert process.call(producer_state) == "fenced"
    process.call(close_producer)
    assert producer.state == "open"
    assert producer.send(b"rival again") == 2
    assert values(topic) == [b"before", b"rival", b"rival again"]
    producer.close()
    assert process.call(open_producer, EXCLUSIVE) == topic.epoch


@pytest.mark.long
def test_c3_hung_shared_producers_are_evicted_by_a_waiter(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="hung", keepalive=1.0)
    process.call(open_producer, SHARED)
    here = topic.producer()
    waiter = topic.producer_async(WAIT)
    hang(process)
    here.close()
    producer = waiter.result(timeout=PATIENCE)
    process.signal(signal.SIGCONT)
    with pytest.raises(Failed, match="ProducerFencedError"):
        process.call(send, b"zombie")
    producer.send(b"x")
    assert values(topic) == [b"x"]


def hold_more(state: State) -> None:
    """Hold topics that no other process wants, and wait for one."""
    more = state.engine.topic("shared"), state.engine.topic("owned"), state.engine.topic("awaited")
    state.kept["more"] = [more[0].producer(), more[1].producer(EXCLUSIVE)]
    state.kept["waiting"] = more[2].producer_async(WAIT)


def send_to_more(state: State) -> list[int]:
    return [producer.send(b"x") for producer in state.kept["more"]]


def still_waits(state: State) -> bool:
    return not state.kept["waiting"].done()


@pytest.mark.parametrize("by", ["a waiter", "a move"])
def test_c3_a_hung_process_keeps_the_topics_that_no_other_needs(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], by: str
) -> None:
    awaited = engine.topic("awaited").producer(EXCLUSIVE)
    process = worker(name="hung", keepalive=1.0)
    process.call(open_producer, EXCLUSIVE)
    process.call(hold_more)
    hang(process)
    if by == "a move":
        engine.unload("orders", to=engine.id, timeout=PATIENCE)
    producer = topic.producer(WAIT, timeout=PATIENCE)
    process.signal(signal.SIGCONT)
    assert process.call(send_to_more) == [0, 0]
    assert process.call(still_waits)
    with pytest.raises(Failed, match="ProducerFencedError"):
        process.call(send, b"zombie")
    assert producer.send(b"x") == 0
    awaited.close()


def buffer(state: State, count: int) -> None:
    """Queue messages that are to be committed in a while."""
    assert state.producer is not None
    state.kept["receipts"] = [state.producer.send_async(b"buffered") for _ in range(count)]


def outcomes(state: State) -> set[str]:
    """How they ended."""
    return {type(receipt.exception(PATIENCE)).__name__ for receipt in state.kept["receipts"]}


def buffer_and_stop(state: State, count: int) -> None:
    """The same, and stop this process before they are due."""
    buffer(state, count)
    stop_here(state, KEEPALIVE)


@pytest.mark.long
def test_c3_what_a_hung_process_has_in_its_buffers_is_not_written_later(
    topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """The process hangs with messages that are due soon. When it goes on they are overdue, and
    its own thread would write them at once."""
    process = quick("hung")
    process.call(open_producer, EXCLUSIVE, linger=3.0)
    process.start(buffer_and_stop, 50)
    process.await_strike()
    due = time.monotonic() + 3.0
    with topic.producer(WAIT, timeout=PATIENCE) as producer:
        time.sleep(max(0.0, due - time.monotonic()))
        producer.send(b"rival")
    thaw(process)
    assert process.call(outcomes) == {"ProducerFencedError"}
    assert values(topic) == [b"rival"]


def test_c3_a_short_stop_costs_nothing(topic: xl.Topic, worker: Callable[..., Worker]) -> None:
    process = worker(keepalive=30)
    process.call(open_producer, EXCLUSIVE)
    hang(process)
    with pytest.raises(xl.WaitTimeoutError):
        topic.producer(WAIT, timeout=0.7)
    with pytest.raises(FENCED):
        topic.producer(EXCLUSIVE)
    process.signal(signal.SIGCONT)
    assert process.call(send, b"x") == 0


@pytest.mark.long
def test_c3_keepalive_none_is_never_evicted_for_silence(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(keepalive=None)
    process.call(open_producer, EXCLUSIVE)
    hang(process)
    waiter = topic.producer_async(WAIT)
    with pytest.raises(TimeoutError):
        waiter.result(timeout=1.0)
    assert topic.owner is not None
    process.kill()  # death is another matter
    assert waiter.result(timeout=PATIENCE).topic_epoch == 2


def test_c3_a_long_stop_that_was_not_noticed_costs_nothing(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(keepalive=0.5)
    process.call(open_producer, EXCLUSIVE)
    hang(process)
    await_silence(topic)
    process.signal(signal.SIGCONT)
    assert process.call(send, b"x") == 0
    assert process.call(producer_state) == "open"
    until(lambda: topic.owner is not None)


@pytest.mark.long
def test_c3_a_process_that_goes_on_does_not_evict_itself(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    """It was stopped for longer than its keepalive, and no process waited for its topic. When it
    goes on, its guard looks who is dead before its heart has beaten again."""
    source = """
        import sys
        import exclusivelog as xl
        engine = xl.open(sys.argv[1], keepalive=0.3)
        producer = engine.topic("mine").producer("exclusive")
        waiter = engine.topic("orders").producer_async("wait_for_exclusive")
        print("ready", flush=True)
        for _ in sys.stdin:
            try:
                engine.topic("mine").producer("exclusive")
            except xl.ProducerFencedError:
                pass
            print(producer.send(b"x"), waiter.done(), flush=True)
    """
    with topic.producer(EXCLUSIVE), child(source, path) as process:
        engine.backend.sessions.find_dead = lambda needed: []  # this one must not evict it either
        assert line(process) == "ready"
        for number in range(4):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            process.send_signal(signal.SIGCONT)
            tell(process, "go")
            assert line(process) == f"{number} False"


def test_c3_a_hung_waiter_is_passed_over_and_told(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="hung", keepalive=0.5)
    owner = topic.producer(EXCLUSIVE)
    process.start(open_producer, WAIT, priority=9)
    until(lambda: topic.waiters)
    hang(process)
    until(lambda: not topic.waiters)
    waiter = topic.producer_async(WAIT)
    owner.close()
    assert waiter.result(timeout=PATIENCE).topic_epoch == 2
    process.signal(signal.SIGCONT)
    with pytest.raises(Failed, match="ProducerFencedError"):
        process.answer()
    assert topic.waiters == []


@pytest.mark.long
def test_c3_a_waiter_promoted_while_it_hangs_keeps_the_topic_or_passes_it_on(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The best waiter is stopped, but not yet for longer than its keepalive. It is promoted,
    and when its keepalive is over the next one gets the topic in its place."""
    process = worker(name="hung", keepalive=1.0)
    owner = topic.producer(EXCLUSIVE)
    process.start(open_producer, WAIT, priority=9)
    until(lambda: topic.waiters)
    waiter = topic.producer_async(WAIT)
    hang(process)
    owner.close()
    producer = waiter.result(timeout=PATIENCE)
    assert producer.send(b"x") == 0
    process.signal(signal.SIGCONT)
    with contextlib.suppress(Failed):  # it has lost it before it knew that it had it
        process.answer()
    with pytest.raises(Failed, match=r"ProducerFencedError|AssertionError"):
        process.call(send, b"zombie")
    assert producer.state == "open"
    assert values(topic) == [b"x"]


def stop_inside_a_transaction(state: State) -> None:
    with state.engine.ledger.write_exclusive():
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
def test_c3_who_waits_for_a_stalled_ledger_does_not_hang(
    path: str, worker: Callable[..., Worker]
) -> None:
    """A process is stopped in the middle of a transaction, and our engine, which has something
    to give back, waits for it longer than its keepalive. It is not the one that hangs."""
    with xl.open(path, keepalive=0.4) as engine:
        topic = engine.topic("orders")
        kept, dropped = engine.topic("kept").producer(EXCLUSIVE), topic.producer(EXCLUSIVE)
        staller = worker(topic="other")
        staller.start(stop_inside_a_transaction)
        stat = Path(f"/proc/{staller.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        del dropped  # from here on the guard waits for the ledger
        time.sleep(1.5)
        assert engine.id in [info.id for info in engine.engines()]
        staller.signal(signal.SIGCONT)
        staller.answer()
        until(lambda: topic.owner is None)
        assert kept.send(b"x") == 0


@pytest.mark.long
def test_c3_the_heart_beats_while_application_code_is_slow(path: str) -> None:
    """A callback of the future of a waiting producer takes long. It
    must not look from outside as if the process hung: it would lose its topics."""
    with xl.open(path, keepalive=0.5) as engine, xl.open(path) as other:
        kept = engine.topic("kept").producer(EXCLUSIVE)
        owner = engine.topic("orders").producer(EXCLUSIVE)
        begun, over = threading.Event(), threading.Event()

        def be_slow(future: Any) -> None:
            begun.set()
            over.wait(PATIENCE)

        engine.topic("orders").producer_async(WAIT).add_done_callback(be_slow)
        owner.close()
        assert begun.wait(PATIENCE)
        try:
            with pytest.raises(xl.WaitTimeoutError):
                other.topic("kept").producer(WAIT, timeout=1.5)
            assert kept.state == "open"
        finally:
            over.set()


# ---- C5: forks ---------------------------------------------------------------------------


class Inherited:
    """Everything that a child could try to use."""

    def __init__(self, engine: xl.Engine) -> None:
        self.engine = engine
        self.topic = engine.topic("orders")
        self.producer = self.topic.producer(EXCLUSIVE, linger=60)
        self.future = self.topic.producer_async(WAIT)
        self.producer.send(b"before")
        self.reader = self.topic.reader()
        self.receipt = engine.topic("late").producer(linger=60).send_async(b"late")


USES: dict[str, Callable[[Inherited], Any]] = {
    "engine.topic": lambda it: it.engine.topic("orders"),
    "engine.topics": lambda it: it.engine.topics(),
    "engine.delete_topic": lambda it: it.engine.delete_topic("orders"),
    "engine.engines": lambda it: it.engine.engines(),
    "engine.stats": lambda it: it.engine.stats(),
    "engine.verify": lambda it: it.engine.verify(),
    "engine.backup": lambda it: it.engine.backup("/nowhere"),
    "topic.epoch": lambda it: it.topic.epoch,
    "topic.next_offset": lambda it: it.topic.next_offset,
    "topic.first_offset": lambda it: it.topic.first_offset,
    "topic.owner": lambda it: it.topic.owner,
    "topic.holders": lambda it: it.topic.holders,
    "topic.waiters": lambda it: it.topic.waiters,
    "topic.producer": lambda it: it.topic.producer(FENCING),
    "topic.producer_async": lambda it: it.topic.producer_async(WAIT).result(PATIENCE),
    "topic.reader": lambda it: it.topic.reader(),
    "producer.send": lambda it: it.producer.send(b"child"),
    "producer.send_async": lambda it: it.producer.send_async(b"child").result(PATIENCE),
    "producer.send_many": lambda it: it.producer.send_many([b"child"]),
    "producer.flush": lambda it: it.producer.flush(),
    "producer.state": lambda it: it.producer.state,
    "reader.read_next": lambda it: it.reader.read_next(timeout=0),
    "reader.read_batch": lambda it: it.reader.read_batch(10),
    "reader.has_message_available": lambda it: it.reader.has_message_available(),
    "reader.seek": lambda it: it.reader.seek("latest"),
    "reader, in a loop": lambda it: list(it.reader),
    "future.result": lambda it: it.future.result(),
    "future.exception": lambda it: _raise(it.future.exception()),
    "receipt.result": lambda it: it.receipt.result(),
}


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


@pytest.mark.sampled
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_c5_a_forked_child_gets_engine_closed_error(
    engine: xl.Engine, use: Callable[[Inherited], Any]
) -> None:
    inherited = Inherited(engine)
    with pytest.raises(Failed) as error:
        forked(lambda: within(lambda: use(inherited), PATIENCE / 3))
    assert error.value.kind == "EngineClosedError", str(error.value)
    assert inherited.producer.send(b"parent") == 1
    assert inherited.producer.state == "open"
    assert not inherited.future.done()


def test_c5_a_child_s_closing_and_cancelling_harms_nothing_in_the_parent(
    engine: xl.Engine,
) -> None:
    inherited = Inherited(engine)

    def close_everything() -> None:
        actions = (
            inherited.future.cancel,
            inherited.reader.close,
            inherited.producer.close,
            engine.close,
        )
        for action in actions:
            with contextlib.suppress(xl.EngineClosedError):
                within(action, PATIENCE)

    waiters = inherited.topic.waiters
    forked(close_everything)
    assert inherited.producer.send(b"parent") == 1
    assert not inherited.future.done()
    assert inherited.topic.waiters == waiters
    assert [message.value for message in inherited.reader] == [b"before", b"parent"]
    inherited.producer.close()
    assert inherited.future.result(timeout=PATIENCE).send(b"promoted") == 2


READERS = """
    import struct, sys
    table = open(sys.argv[1] + "/lock.mdb", "rb").read()
    print([struct.unpack_from("<I", table, at + 8)[0] for at in range(128, 4096, 64)])
"""


def test_c5_a_child_leaves_the_parent_s_place_among_the_readers(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """A transaction that is over keeps its place in LMDB's table of readers until its object is
    gone: a variable may hold that. A child gives back what it inherited of it, for itself alone.
    In the table the place would be free, another process would take it, and the parent would give
    it back once more: under a reader whose pages are then written over."""

    def places() -> int:
        # Read by another process: a process that closes the file loses the locks that LMDB has on
        # it.
        found: list[int] = ast.literal_eval(finish(READERS, engine.path))
        return found.count(os.getpid())

    with engine.ledger.read() as tables:
        pass
    # The background thread reads for moments, and has places meanwhile.
    before = until(lambda: (now := places()) == places() and now)
    forked(os.getpid)
    until(lambda: places() == before)
    del tables
    assert topic.next_offset == 0


@pytest.mark.usefixtures("patient_forks")
def test_c5_a_child_can_open_an_engine_of_its_own(engine: xl.Engine, topic: xl.Topic) -> None:
    parent = topic.producer()

    def child() -> tuple[int, list[bytes], int]:
        with xl.open(engine.path, name="child") as own:
            with own.topic("orders").producer() as producer:
                offset = producer.send(b"child")
            with pytest.raises(FENCED):
                own.topic("orders").producer(EXCLUSIVE)  # the parent's is still there
            return offset, values(own.topic("orders")), len(own.engines())

    assert parent.send(b"parent") == 0
    assert forked(child) == (1, [b"parent", b"child"], 2)
    assert parent.send(b"parent again") == 2
    assert [info.name for info in engine.engines()] == ["test"]


def test_c5_a_child_that_outlives_the_parent_does_not_keep_its_topics(topic: xl.Topic) -> None:
    """The owner forks a child and is killed. The child lives on with copies of everything that
    the owner had open; the topic must go to the waiter all the same."""
    source = """
        import os, sys, time
        import exclusivelog as xl
        from testing.patience import PATIENCE
        engine = xl.open(sys.argv[1], keepalive=None)
        producer = engine.topic("orders").producer("exclusive")
        pid = os.fork()
        if pid == 0:
            time.sleep(PATIENCE)
            os._exit(0)
        print(pid, flush=True)
        input()
    """
    with child(source, topic.engine.path) as process:
        grandchild = int(line(process))
        try:
            waiter = topic.producer_async(WAIT)
            process.kill()
            assert waiter.result(timeout=PATIENCE).topic_epoch == 2
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_c5_a_child_may_exit_in_the_ordinary_way(topic: xl.Topic) -> None:
    """A forked child leaves `main`: its exit handlers run, too, and must not use the parent's
    objects that it has inherited."""
    source = """
        import os, sys
        import exclusivelog as xl
        from testing.patience import PATIENCE
        engine = xl.open(sys.argv[1])
        producer = engine.topic("orders").producer("exclusive", linger=60)
        producer.send(b"before")
        producer.send_async(b"buffered")
        waiter = engine.topic("orders").producer_async("wait_for_exclusive")
        if os.fork() == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        print(producer.send(b"after"), producer.state, flush=True)
        producer.close()
        print(waiter.result(timeout=PATIENCE).topic_epoch, flush=True)
    """
    with child(source, topic.engine.path) as process:
        assert line(process) == "2 open"
        assert line(process) == "2"
        assert process.wait(timeout=PATIENCE) == 0
    assert values(topic) == [b"before", b"buffered", b"after"]


def test_b4_the_error_of_every_call_has_the_traceback_of_the_last_one(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """It is the same error each time: a program that tries again and again must not keep the
    frames of all its calls."""
    with topic.producer(EXCLUSIVE) as producer, topic.producer(FENCING):
        calls = [
            lambda: producer.send(b"x"),
            lambda: producer.send(b"x", key="k"),
            lambda: producer.send_async(b"x"),
            lambda: producer.send_many([b"x"]),
            producer.flush,
        ]
        depths = set()
        for call in 20 * calls:
            with pytest.raises(xl.ProducerFencedError) as caught:
                call()
            depths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert max(depths) < 15, depths


@pytest.mark.long
@pytest.mark.usefixtures("patient_forks")
def test_c5_forking_while_threads_send_harms_no_other(
    engine: xl.Engine, topic: xl.Topic, sweep: Callable[[int, int], int]
) -> None:
    """The process forks again and again while its threads are in the middle of sending. Every
    child finds the inherited engine closed, opens one of its own, and writes with it."""
    stop = threading.Event()
    acknowledged: dict[int, bytes] = {}

    def keep_sending(thread: int) -> None:
        with topic.producer() as producer:
            for number in itertools.count():
                if stop.is_set():
                    return
                value = f"{thread}-{number}".encode()
                if thread:
                    acknowledged[producer.send(value)] = value
                else:
                    acknowledged[producer.send_async(value).result(PATIENCE)] = value

    def child(number: int) -> int:
        with pytest.raises(xl.EngineClosedError):
            inherited.send(b"no")
        with xl.open(engine.path) as own, own.topic("orders").producer() as producer:
            return producer.send(b"child-%d" % number)

    inherited = topic.producer()
    with ThreadPoolExecutor(3) as pool:
        senders = [pool.submit(keep_sending, thread) for thread in range(3)]
        try:
            for number in range(sweep(12, 30)):
                acknowledged[forked(lambda number=number: child(number))] = b"child-%d" % number
        finally:
            stop.set()
        for sender in senders:
            sender.result(timeout=PATIENCE)
    assert inherited.send(b"last") == len(acknowledged)
    log = {message.offset: message.value for message in topic.reader()}
    assert log == {**acknowledged, len(acknowledged): b"last"}
    assert engine.verify().ok


FORKS_INSIDE = """
    import os, signal, sys, threading
    import exclusivelog as xl
    from exclusivelog.local.storage import environment, ledger, tables
    from testing.patience import PATIENCE
    from testing.processes import c_fork

    # A fork waits for other threads inside, and not for its own.
    environment.FORK_WAIT_SECONDS = environment.BUSY_FORK_WAIT_SECONDS = 1000.0
    engine = xl.open(sys.argv[1])
    topic, step, children = engine.topic("orders"), sys.argv[2], []
    forks = {"Python": os.fork, "C": c_fork}[sys.argv[3]]
    producer = topic.producer("exclusive")
    producer.send(b"before")

    def fork(*_):
        children.append(forks())

    signal.signal(signal.SIGUSR1, fork)
    last = step in ("finish", "undo")
    owner = ledger.Transaction if last else tables.SessionTable
    method = getattr(owner, step)

    # Only once, and not where a thread in the background does the same: the handler, which runs in
    # this thread, forks later.
    strikes = [signal.SIGUSR1]

    def strike(*args):
        if last:
            method(*args)
        if strikes and threading.current_thread() is threading.main_thread():
            signal.raise_signal(strikes.pop())
        return None if last else method(*args)

    setattr(owner, step, strike)
    try:
        if step == "undo":
            try:
                with engine.ledger.write_exclusive():
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass
        elif step == "drop_holder":
            producer.close()
        elif step == "put_waiter":
            waiter = topic.producer_async("wait_for_exclusive")
            if children == [0]:
                waiter.result(0)
        elif step == "holder":
            topic.owner
        else:
            producer = topic.producer("exclusive_with_fencing")
    except BaseException as error:
        if children != [0]:
            raise
        os._exit(42 if isinstance(error, xl.EngineClosedError) else 43)
    if children == [0]:
        os._exit(44)
    assert children, "no process was forked"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 42
    if step == "put_waiter":
        producer.close()
        producer = waiter.result(PATIENCE)
    elif step == "drop_holder":
        producer = topic.producer("exclusive")
    print(producer.send(b"after"), producer.topic_epoch, len(topic.holders), flush=True)
    print(engine.verify().ok)
    input()
"""


@pytest.mark.parametrize(
    "step", ["drop_holder", "put_waiter", "put_holder", "holder", "finish", "undo"]
)
@pytest.mark.parametrize("language", ["Python", "C"])
def test_c5_a_child_that_is_forked_inside_a_transaction_commits_nothing(
    topic: xl.Topic, step: str, language: str
) -> None:
    """A signal handler forks, and both go on where the signal struck: in the middle of a
    transaction. It is the parent's; the child must neither commit it nor undo it, nor let go of
    the locks and the snapshot that guard it."""
    with child(FORKS_INSIDE, topic.engine.path, step, language) as process:
        epoch = 1 if step in ("holder", "undo") else 2
        assert line(process) == f"1 {epoch} 1"
        assert line(process) == "True"
        assert [info.pid for info in topic.engine.engines()][1:] == [process.pid]
        with topic.producer(FENCING) as producer:
            assert producer.send(b"mine") == 2
    assert values(topic) == [b"before", b"after", b"mine"]


FORKS_BEFORE_A_FRAME = """
    import os, signal, sys, threading
    import exclusivelog as xl
    from exclusivelog.local.commits import FramedAttempt
    from testing.processes import c_fork

    engine = xl.open(sys.argv[1])
    step, children = sys.argv[2], []
    forks = {"Python": os.fork, "C": c_fork}[sys.argv[3]]
    producer = engine.topic("orders").producer("exclusive")
    signal.signal(signal.SIGUSR1, lambda *_: children.append(forks()))
    method, strikes = getattr(FramedAttempt, step), [signal.SIGUSR1]

    def strike(*args):
        if strikes and threading.current_thread() is threading.main_thread():
            signal.raise_signal(strikes.pop())
        return method(*args)

    setattr(FramedAttempt, step, strike)
    try:
        with engine.transaction() as txn:
            producer.send(b"once", transaction=txn)
    except xl.EngineClosedError:
        os._exit(42 if children == [0] else 43)
    if children == [0]:
        os._exit(44)
    print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), producer.send(b"after"))
"""


@pytest.mark.rule("C8")
@pytest.mark.parametrize("step", ["commit", "_append", "_join", "place"])
@pytest.mark.parametrize("language", ["Python", "C"])
def test_c5_a_child_that_is_forked_before_a_frame_is_appended_appends_none(
    topic: xl.Topic, step: str, language: str
) -> None:
    """A transaction of messages alone is one frame of the journal, without one of the tables."""
    assert finish(FORKS_BEFORE_A_FRAME, topic.engine.path, step, language).split() == ["42", "1"]
    assert values(topic) == [b"once", b"after"]


OPENS_ITS_OWN = """
    import os, signal, sys, threading, time
    import exclusivelog as xl
    from exclusivelog.local.maintenance import backup
    from exclusivelog.local.storage import environment
    from exclusivelog.local.log import reading
    from exclusivelog.local.storage import tables
    from testing.patience import PATIENCE

    environment.FORK_WAIT_SECONDS = 0.2  # else who looks must take more than five seconds
    where, (path, copy) = sys.argv[1], sys.argv[2:]
    engine = xl.open(path)
    topic, parent, over = engine.topic("orders"), os.getpid(), threading.Event()
    for value in (b"1", b"2"):
        topic.producer().send(value)
        engine.ledger.checkpoint()

    def fork(*_):
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE))
            try:
                with xl.open(path, name="child") as own:
                    # The parent may have the topic meanwhile.
                    mine = own.topic("orders").producer("wait_for_exclusive", timeout=PATIENCE)
                    mine.send(b"of the child")
                    os._exit(42 if own.verify().ok else 43)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(44)
        if where == "handler":  # the child wants the lock that this very thread has
            over.pid = pid
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        over.set()

    def take_long(thing, name):
        before = getattr(thing, name)

        def slow(*args):
            if os.getpid() == parent and threading.current_thread().name == "looks":
                inside.set()
                over.wait(PATIENCE)
            return before(*args)

        setattr(thing, name, slow)

    if where == "handler":
        signal.signal(signal.SIGUSR1, fork)
        put_holder, strikes = tables.SessionTable.put_holder, [signal.SIGUSR1]

        def strike(*args):
            if strikes and threading.current_thread() is threading.main_thread():
                signal.raise_signal(strikes.pop())
            return put_holder(*args)

        tables.SessionTable.put_holder = strike
        with topic.producer("exclusive_with_fencing") as producer:
            producer.send(b"of the parent")
        print(os.waitstatus_to_exitcode(os.waitpid(over.pid, 0)[1]), flush=True)
    else:
        inside = threading.Event()
        take_long(reading, "check_place")
        if where == "backup":
            take_long(backup, "_copy_segments")
            work = lambda: engine.backup(copy)
        else:
            work = engine.verify
        looks = threading.Thread(target=work, name="looks")
        looks.start()
        assert inside.wait(PATIENCE)
        fork()
        looks.join(PATIENCE)
        with topic.producer("exclusive_with_fencing") as producer:
            producer.send(b"of the parent")
    print(len(list(topic.reader())), engine.verify().ok, flush=True)
"""


def test_c5_threads_that_fork_at_once_shut_nobody_out(engine: xl.Engine) -> None:
    """Each ends its own fork, although the one that began first ends while the other waits."""
    gate = engine.ledger._environment.gate

    def fork() -> None:
        ledger._before_fork()
        ledger._after_fork_in_parent()

    with ThreadPoolExecutor(2) as pool:
        with engine.ledger.read():
            forks = [pool.submit(fork)]
            until(lambda: gate.shut)
            forks.append(pool.submit(fork))
            until(lambda: len(ledger._forks) == 2)
        for each in forks:
            each.result(PATIENCE)
    assert (gate.shut, ledger._forks) == (0, {})


@pytest.mark.parametrize("transaction", ["read", "write_fencing", "write_exclusive"])
def test_c5_a_fork_in_a_handler_waits_for_other_threads_but_not_for_the_interrupted_one(
    engine: xl.Engine, transaction: str
) -> None:
    """What another thread is in the middle of, the child could not close."""
    environment, inside = engine.ledger._environment, threading.Event()
    seen = list[int]()

    def read() -> None:
        with engine.ledger.read():
            inside.set()
            until(lambda: environment.gate.shut)
            seen.append(environment.gate.shut)

    with getattr(engine.ledger, transaction)():  # the handler has interrupted this
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            assert inside.wait(PATIENCE)
            environment.before_fork(busy=True)
            assert environment._quiet
            reading.result(PATIENCE)
        environment.after_fork_in_parent()
    assert seen == [1]
    with engine.ledger.read():
        assert not environment.gate.shut


@pytest.mark.parametrize(
    "transaction", ["read", "write_concurrent", "write_fencing", "write_exclusive"]
)
def test_c5_a_child_that_is_forked_on_the_way_into_a_transaction_is_refused(
    engine: xl.Engine, transaction: str
) -> None:
    """By a signal handler, which returns there: the call has checked before that it may go on."""
    begun = getattr(engine.ledger, transaction)()

    def go_on() -> None:
        with begun:
            pass

    with pytest.raises(Failed, match="inherited through fork") as error:
        forked(go_on)
    assert error.value.kind == "EngineClosedError"
    go_on()


@pytest.mark.parametrize("name", ["notifications", "writing", "pauses", "commits"])
def test_c5_a_child_waits_for_no_lock_that_a_thread_of_its_parent_holds(
    engine: xl.Engine, topic: xl.Topic, name: str
) -> None:
    """A handler may fork when its thread is about to take one, and has looked for a fork before."""
    producer = topic.producer()
    lock = {
        "notifications": engine.backend.notifications.lock,
        "writing": engine.ledger._writing,
        "pauses": engine.ledger.pause_lock,
        "commits": engine.backend.committer._commit_lock,
    }[name]
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(PATIENCE)

    def take() -> None:
        with lock:
            pass

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        try:
            assert taken.wait(PATIENCE)
            forked(take)
            assert not lock.acquire(blocking=False)  # here it is still the other thread's
        finally:
            over.set()
        holding.result(PATIENCE)
    assert producer.send(b"x") == 0


@pytest.mark.parametrize("where", ["verify", "backup", "handler"])
def test_c5_a_child_opens_its_own_engine_whatever_was_under_way(
    path: str, tmp_path: Path, where: str
) -> None:
    """It was forked while a thread of its parent's looked at all of the ledger, or copied it, and
    longer than a fork waits for that; or by a signal handler, inside a transaction. LMDB may be
    opened once in a process: the inherited copy has to be closed all the same."""
    with child(OPENS_ITS_OWN, where, path, tmp_path / "copy") as process:
        assert line(process) == "42"
        assert line(process) == "4 True"
        assert process.wait(PATIENCE) == 0


FORKS_WHILE_IT_WAITS = """
    import os, signal, sys, threading, time
    import exclusivelog as xl
    from testing.patience import PATIENCE

    engine = xl.open(sys.argv[1])
    topic, place = engine.topic("orders"), sys.argv[2]
    owner = topic.producer("exclusive")
    main, children = threading.get_ident(), []
    signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
    over = threading.Event()

    def hold():
        if place == "write":
            shared.put("a", 1)  # waits for the topic
            return
        if place == "read":
            shared.read(lambda state: over.wait(PATIENCE))
            return
        ledger = engine.ledger
        locks = {"notifications": engine.backend.notifications.lock, "commit": ledger.pause_lock}
        with locks.get(place, ledger._writing):
            over.wait(PATIENCE)

    def strike():
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGUSR1)
        while not children:
            time.sleep(0.01)
        print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), flush=True)
        over.set()
        if place == "move":
            owner._sender.session.pauses.end()
        elif place != "commit":
            owner.close()

    if place == "write":
        shared = xl.SharedMap(topic)
    elif place == "read":
        shared = xl.SharedState(topic, apply=lambda state, op: None)
    if place == "move":
        owner._sender.session.pauses.begin()
    elif place != "queue":
        threading.Thread(target=hold).start()
        time.sleep(0.1)
    threading.Thread(target=strike).start()
    try:
        if place == "move":
            owner.send(b"x")
        elif place == "commit":
            with engine.transaction() as txn:
                owner.send(bytes(1 << 18), transaction=txn)  # in the tables: it pauses the owner
        elif place == "write":
            shared.put("b", 2)
        elif place == "read":
            shared.read(len)
        else:
            topic.producer("wait_for_exclusive")
    except BaseException as error:
        if children == [0]:
            os._exit(42 if isinstance(error, xl.EngineClosedError) else 43)
        raise
    print("went on", flush=True)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "place", ["queue", "move", "notifications", "transaction", "commit", "write", "read"]
)
def test_c5_a_child_that_is_forked_in_a_wait_does_not_wait_for_its_parent(
    topic: xl.Topic, place: str
) -> None:
    """A signal handler forks while the thread waits for its turn, for a hand-over, for its
    commit, or for another thread, and returns in the child, too. No thread there will ever do what
    it waits for."""
    with child(FORKS_WHILE_IT_WAITS, topic.engine.path, place) as process:
        assert line(process) == "42"
        assert line(process) == "went on"


def test_c5_a_child_cannot_use_a_producer_that_has_followed_its_topic(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    with xl.open(path, name="neighbour") as neighbour:
        parent = os.getpid()

        def never_in_a_child(*_: Any) -> None:  # the parent is told when the neighbour closes
            if os.getpid() != parent:
                os._exit(1)

        producer = topic.producer(EXCLUSIVE, on_fenced=never_in_a_child)
        engine.unload("orders", to=neighbour.id)
        assert producer.send(b"followed") == 0
        for use in (
            lambda: producer.send(b"child"),
            lambda: producer.send_async(b"child"),
            lambda: producer.send_many([b"child"]),
            producer.flush,
            lambda: producer.state,
        ):
            with pytest.raises(Failed) as error:
                forked(lambda use=use: within(use, PATIENCE / 3))
            assert error.value.kind == "EngineClosedError", str(error.value)
        assert producer.send(b"parent") == 1


# ---- C6: watching one's own state --------------------------------------------------------


def test_c6_the_state_is_known_without_sending(engine: xl.Engine, topic: xl.Topic) -> None:
    for mode in (SHARED, EXCLUSIVE, WAIT, FENCING):
        producer = topic.producer(mode)
        assert producer.state == "open"
        with xl.open(engine.path) as other, other.topic("orders").producer(FENCING):
            assert producer.state == "fenced"
        assert producer.state == "fenced"
        producer.close()
        assert producer.state == "closed"
    assert topic.next_offset == 0


def test_c6_the_state_is_known_in_another_process(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    process.call(open_producer, EXCLUSIVE)
    with topic.producer(FENCING):
        assert process.call(producer_state) == "fenced"


def test_c6_the_state_of_a_producer_of_a_closed_engine_is_closed(path: str) -> None:
    with xl.open(path) as engine:
        open_one = engine.topic("orders").producer(EXCLUSIVE)
        fenced = engine.topic("elsewhere").producer(EXCLUSIVE)
        engine.topic("elsewhere").producer(FENCING)
        assert fenced.state == "fenced"
    assert within(lambda: open_one.state, PATIENCE) == "closed"
    assert within(lambda: fenced.state, PATIENCE) in ("fenced", "closed")
    within(open_one.close, PATIENCE)


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT])
def test_c6_the_callback_is_called_once_with_the_producer_and_the_error(
    engine: xl.Engine, topic: xl.Topic, mode: str
) -> None:
    calls: list[tuple[Any, Any, str]] = []

    def on_fenced(producer: xl.Producer, error: xl.ProducerFencedError) -> None:
        calls.append((producer, error, threading.current_thread().name))

    producer = topic.producer(mode, on_fenced=on_fenced)
    with xl.open(engine.path) as other:
        other.topic("orders").producer(FENCING)
        until(lambda: calls)
        for _ in range(3):
            with pytest.raises(FENCED) as error:
                producer.send(b"x")
            assert error.value is calls[0][1]
        producer.close()
        time.sleep(0.05)
    assert len(calls) == 1
    assert calls[0][0] is producer
    assert calls[0][2] != threading.current_thread().name


@pytest.mark.parametrize("notices", ["notification", "send"])
def test_c6_a_callback_that_cannot_be_called_is_called_later(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, notices: str
) -> None:
    """The topic is lost while no thread can be started: the guard hears of it, or a send meets
    it first."""
    told: list[Any] = []
    producer = topic.producer(EXCLUSIVE, on_fenced=lambda *it: told.append(it))
    with xl.open(engine.path, name="rival") as rival, rival.topic("another").producer():
        with monkeypatch.context() as patch:

            def start(self: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", start)
            if notices == "notification":
                rival.topic("orders").producer(FENCING)
            else:
                with engine.ledger.write_exclusive() as tables:
                    row = tables.topics.get(topic.id)
                    engine.backend.sessions.succession.drop_holder(
                        tables, row, producer._session, "evict", "test"
                    )
                    tables.topics.put(row)
                with pytest.raises(FENCED):
                    producer.send(b"x")
            until(lambda: producer._sender._lost)
            time.sleep(0.1)
            assert not told
        until(lambda: told)
    assert [it[0] for it in told] == [producer]
    assert isinstance(told[0][1], FENCED)


def test_c6_a_callback_may_do_whatever_it_likes(topic: xl.Topic) -> None:
    """It closes its producer, queues up for the topic again, and waits for its turn, which
    takes the very engine whose loss it is told of; or it fails."""
    regained: list[xl.Producer] = []

    def fail(producer: xl.Producer, error: Exception) -> None:
        raise ZeroDivisionError

    def queue_up_again(producer: xl.Producer, error: Exception) -> None:
        producer.close()
        regained.append(topic.producer(WAIT, timeout=PATIENCE))

    losers = [topic.producer(SHARED, on_fenced=call) for call in (fail, queue_up_again)]
    rival = topic.producer(FENCING)
    until(lambda: topic.waiters)
    assert [loser.state for loser in losers] == ["fenced", "closed"]
    rival.close()
    until(lambda: regained)
    assert regained[0].send(b"again") == 0


def test_c6_closing_by_oneself_is_no_loss(topic: xl.Topic) -> None:
    calls: list[Any] = []
    for _ in range(3):
        topic.producer(EXCLUSIVE, on_fenced=lambda *args: calls.append(args)).close()
    with topic.producer(FENCING):
        pass
    time.sleep(0.05)
    assert calls == []


def open_and_watch(state: State, mode: str) -> None:
    """Open a producer that notes when it is fenced."""
    state.kept["calls"] = []
    state.producer = state.topic.producer(
        mode, on_fenced=lambda _, error: state.kept["calls"].append(type(error).__name__)
    )


def calls(state: State) -> list[str]:
    """What was noted."""
    return list(state.kept["calls"])


def test_c6_a_process_that_hung_is_told_without_sending(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(keepalive=0.5)
    process.call(open_and_watch, EXCLUSIVE)
    hang(process)
    with topic.producer(WAIT, timeout=PATIENCE):
        process.signal(signal.SIGCONT)
        until(lambda: process.call(calls) == ["ProducerFencedError"])


def test_c6_an_owner_that_was_fenced_before_it_knew_of_its_grant_is_told(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """A waiter is promoted while its process is stopped for a moment, and fenced again before
    the process goes on: both notifications are read together. It gets its producer, and must
    be told that it has lost it, although it never sends."""
    process = worker(keepalive=30)
    owner = topic.producer(EXCLUSIVE)
    process.start(open_and_watch, WAIT)
    until(lambda: topic.waiters)
    hang(process)
    owner.close()
    with topic.producer(FENCING):
        process.signal(signal.SIGCONT)
        process.answer()
        until(lambda: process.call(calls) == ["ProducerFencedError"])


def own_and_wait(state: State, own: str, wait: str) -> None:
    """Own one topic, and be the best who waits for another."""
    state.kept["own"] = state.engine.topic(own).producer(EXCLUSIVE)
    state.kept["wait"] = state.engine.topic(wait).producer_async(WAIT, priority=9)


def test_c2_a_death_while_another_one_is_dealt_with_is_noticed_at_once(
    engine: xl.Engine, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread has found the dead engines, and evicts the first one; then the second
    one dies. No wake-up tells of that any more: its word had changed before the guard went to
    sleep."""
    first, second = worker(), worker()
    first.call(own_and_wait, "a", "elsewhere")
    second.call(own_and_wait, "b", "a")
    future = engine.topic("b").producer_async(WAIT)
    evict, sleeps = engine.backend.sessions.evict, []

    def evict_and_then_the_second_dies(dead: str, *until: int) -> Iterator[None]:
        yield from evict(dead, *until)
        if second.process.is_alive():
            second.kill()
            sleeps.clear()

    monkeypatch.setattr(engine.backend.sessions, "evict", evict_and_then_the_second_dies)
    monkeypatch.setattr(slots, "LOOK_UP_SECONDS", PATIENCE)  # what it sleeps if nothing wakes it
    monkeypatch.setattr(notifications, "LONGEST_SLEEP_SECONDS", PATIENCE)
    slot = engine.backend._slot
    sleep = slot.await_wake_up_or_death

    def note_the_sleep(*args: Any) -> None:
        before = time.monotonic()
        sleep(*args)
        sleeps.append(time.monotonic() - before)

    monkeypatch.setattr(slot, "await_wake_up_or_death", note_the_sleep)
    hang(second)  # so that the first one's death is not its business
    first.kill()
    assert future.result(PATIENCE).topic_epoch == 2
    assert sleeps == [] or sleeps[0] < PATIENCE / 2  # it did not sleep on the second one's death


def test_c2_no_notifications_outlive_their_engine(path: str, worker: Callable[..., Worker]) -> None:
    """A stopped process is fenced and killed before it resumes, so it never reads the notification.
    Opening an engine removes that."""
    process = worker()
    process.call(open_producer, EXCLUSIVE)
    with xl.open(path) as engine:
        hang(process)
        with engine.topic("orders").producer("exclusive_with_fencing") as producer:
            producer.send(b"x")
        assert len(rows(engine)["mail"]) == 1
        process.kill()
        with xl.open(path) as another:
            assert rows(another)["mail"] == []
            assert values(another.topic("orders")) == [b"x"]


@pytest.mark.long
def test_c3_an_unresponsive_process_keeps_topics_that_no_process_needs(
    path: str, worker: Callable[..., Worker], topic: xl.Topic
) -> None:
    """It is silent for longer than its keepalive, while another process waits for a topic of a
    third engine, and continuously evicts dead engines. When it resumes, it still owns its topic,
    because no producer waited for that. A producer that waits for it gets it."""
    hung = worker(keepalive=0.5)
    hung.call(open_producer, EXCLUSIVE)
    other = topic.engine.topic("other")
    owner = other.producer(EXCLUSIVE)
    with xl.open(path) as engine:
        waiting = engine.topic("other").producer_async(WAIT)
        hang(hung)
        time.sleep(2)
        hung.signal(signal.SIGCONT)
        assert hung.call(producer_state) == "open"
        assert hung.call(send, b"mine") == 0
        assert not waiting.done()
        owner.close()
        assert waiting.result(PATIENCE).topic_epoch == 2
        hang(hung)
        needed = engine.topic("orders").producer_async(WAIT)
        assert needed.result(PATIENCE).topic_epoch == 2
        hung.signal(signal.SIGCONT)
        assert hung.call(producer_state) == "fenced"


# ---- A5: who it was ----------------------------------------------------------------------


@pytest.mark.rule("A5")
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
@pytest.mark.parametrize("apart", [False, True], ids=["one engine", "two engines"])
def test_a5_a_process_that_fences_itself_is_told(engine, topic, mode, apart) -> None:
    """That is how a second producer of one program shows."""
    with xl.open(engine.path, name="second") as second:
        loser = topic.producer(mode)
        with (second if apart else engine).topic("orders").producer(FENCING) as rival:
            with pytest.raises(
                FENCED, match=r"was fenced; .* It was fenced by this process"
            ) as told:
                loser.send(b"x")
            assert told.value.holder.producer_name == rival.name
            assert repr("second" if apart else engine.name) in str(told.value)
            with pytest.raises(FENCED) as again:
                loser.flush()
            assert again.value is told.value


@pytest.mark.rule("A5")
def test_a5_another_process_is_not_taken_for_this_one(worker, topic) -> None:
    loser = topic.producer(EXCLUSIVE)
    worker().call(open_producer, FENCING)
    with pytest.raises(FENCED, match="was fenced") as told:
        loser.send(b"x")
    assert "this process" not in str(told.value)
    # Nor this process where another one has had the topic in between.
    third = topic.producer(FENCING)
    assert third.topic_epoch == 3
    with pytest.raises(FENCED) as told:
        loser.send(b"x")
    assert "this process" not in str(told.value)


# ---- a standby under its leader's name -----------------------------------------------------


def send_under(state: State, name: str, count: int) -> list[int]:
    """Own the topic under this name, and send so many."""
    state.kept["leader"] = producer = state.topic.producer(EXCLUSIVE, name=name)
    return [producer.send(b"%d" % number) for number in range(count)]


@pytest.mark.rule("D9", "C2", "G2")
def test_d9_a_killed_leaders_standby_knows_its_last_message(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """No checkpoint has moved it into the tables: the journal alone has it."""
    leader = worker(name="leader", keepalive=None)
    assert leader.call(send_under, "feed", 1) == [0]
    engine.ledger.checkpoint()
    standby = topic.producer_async(WAIT, name="feed")  # its request reads the tables
    assert not standby.done()
    assert leader.call(send_more, 5) == list(range(1, 6))
    leader.kill()
    producer = standby.result(PATIENCE)
    assert (producer.name, producer.last_sequence_id) == ("feed", 5)
    with pytest.raises(xl.DuplicateSequenceError):
        producer.send(b"again", sequence_id=5)
    assert producer.send(b"next") == 6


def send_more(state: State, count: int) -> list[int]:
    """Send so many by the kept producer."""
    return [state.kept["leader"].send(b"more") for _ in range(count)]


# ---- a term, which a loss ends -----------------------------------------------------------


@pytest.mark.rule("B4")
def test_a_receipt_that_fails_before_its_session_is_told_ends_the_term(
    topic: xl.Topic, other: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit thread fails the receipt; only later a thread tells the session of the loss."""
    epochs = []
    for term in topic.terms(timeout=PATIENCE):
        with term as producer:
            epochs.append(term.epoch)
            if len(epochs) > 1:
                break
            with monkeypatch.context() as patch:
                patch.setattr(LocalSession, "lose", lambda *_: None)
                other.producer(FENCING).close()
                producer.send_async(b"x").result(PATIENCE)
    assert epochs == [1, 3]
