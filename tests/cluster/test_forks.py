"""A forked child ends and drops all that it has inherited of a cluster's objects (C5, C8).

A lock that another thread held at the moment of the fork is never released in the child. So a
thread holds every lock of these objects while the test forks, and the child ends all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import Mirror
from testing.broker import Namespace
from testing.children import finish
from testing.peers import open_engine, open_log
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    UNSEEN_FORKS,
    WAIT,
    collect,
    forked,
    until,
)

pytestmark = pytest.mark.rule("C5", "C8")

FORKS = {"os.fork": os.fork, **UNSEEN_FORKS}
LOCK_SECONDS = 0.2  # for a lock that a thread has for a moment; others have theirs for ever

Ends = list[Callable[[], Any]]

# ---- the locks -----------------------------------------------------------------------------


def locks() -> list[Any]:
    """All locks in attributes of objects of exclusivelog.cluster."""
    found = {}
    for thing in gc.get_objects():
        if str(type(thing).__module__).startswith("exclusivelog.cluster."):
            for value in values_of(thing):
                lock = getattr(value, "_cond", value)  # an Event's
                if hasattr(lock, "acquire"):
                    found[id(lock)] = lock
    return list(found.values())


def values_of(thing: object) -> list[Any]:
    """The values of an instance's own attributes."""
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(thing, "__dict__", ()), *slots]
    return [getattr(thing, name, None) for name in names]


@contextlib.contextmanager
def all_held() -> Iterator[int]:
    """A thread holds them; how many."""
    ready, over, held = threading.Event(), threading.Event(), list[Any]()

    def hold() -> None:
        held.extend(lock for lock in locks() if lock.acquire(timeout=LOCK_SECONDS))
        ready.set()
        over.wait(PATIENCE)
        for lock in held:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield len(held)
    finally:
        over.set()
        thread.join(PATIENCE)


# ---- what there is to end --------------------------------------------------------------------


def ends_of(engine: xl.Engine) -> Ends:
    """The ends of all that a program can have open, and of requests that wait."""
    topic = engine.topic("orders")
    owner = topic.producer(EXCLUSIVE, name="owner")
    shared = engine.topic("shared").producer(SHARED)
    for _ in range(20):
        owner.send(b"x")
    waiting = topic.producer_async(WAIT, name="waiting")
    moving = engine.unload_async("orders", to=engine.id)
    reader, group = topic.reader(), topic.reader(group="g")
    for each in (reader, group):
        each.read_next(PATIENCE)
    claim = engine.own("leaders", {"one": None})
    state = xl.SharedMap(engine.topic("state"))
    state["k"] = b"v"
    return [
        waiting.cancel,
        moving.cancel,
        reader.close,
        group.close,
        claim.release,
        state.close,
        shared.close,
        owner.close,
        engine.close,
    ]


@pytest.fixture(autouse=True)
def readers_that_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader has a tail of its own where it reads what was not kept in memory."""
    monkeypatch.setattr("exclusivelog.cluster.following.KEPT_BYTES", 500)
    monkeypatch.setattr("exclusivelog.cluster.cursor.READ_BYTES", 500)


def end_in_child(ends: Ends, fork: Callable[[], int]) -> None:
    """Call them in a child, which then drops all that they belong to."""

    def end() -> None:
        for each in ends:
            each()
        del each
        ends.clear()
        collect()

    with all_held() as count:
        assert count > 20
        forked(end, fork=fork)


@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_c5_a_child_ends_what_it_has_inherited_whatever_locks_were_held(
    fork: Callable[[], int],
) -> None:
    with xl.open(f"memory://forks-{os.urandom(4).hex()}", durability="power") as engine:
        end_in_child(ends_of(engine), fork)
        assert engine.topic("orders").producer(FENCING).send(b"y") == 20


@pytest.mark.broker
@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_c5_a_child_ends_mirrors_and_engines_on_a_broker_whatever_locks_were_held(
    topic: xl.Topic, namespace: Namespace, make_namespace: Any, fork: Callable[[], int]
) -> None:
    target = make_namespace()
    with (
        topic.producer() as producer,
        open_engine(namespace) as engine,
        open_log(namespace, "log") as log,
        log.alone(),
        Mirror(topic.engine, target.url, admin=target.admin) as mirror,
    ):
        mirror.start(follow=True)
        producer.send(b"a")
        until(lambda: [one.position for one in mirror.progress()] == [1])
        ends = ends_of(engine)
        reader = mirror.cluster.reader("orders")
        writer = mirror.cluster.writer("other")
        ends += [log.tail().close, log.close, reader.close, writer.close]
        ends += [mirror.stop, mirror.close, mirror.cluster.close]
        end_in_child(ends, fork)
        assert engine.topic("orders").producer(FENCING).send(b"y") == 20
        producer.send(b"b")
        until(lambda: [one.position for one in mirror.progress()] == [2])
        reader.close()
        writer.close()


@pytest.mark.broker
def test_c5_a_child_is_told_that_nothing_mirrors_there(
    topic: xl.Topic, namespace: Namespace
) -> None:
    with Mirror(topic.engine, namespace.url, admin=namespace.admin) as mirror:
        mirror.start(follow=True)

        def ask() -> list[str]:
            told = []
            calls: Ends = [
                lambda: mirror.wait(PATIENCE),
                mirror.run,
                mirror.start,
                mirror.verify,
                mirror.cluster.topics,
                mirror.cluster.check_policies,
            ]
            for call in calls:
                with pytest.raises(xl.EngineClosedError) as raised:
                    call()
                told.append(str(raised.value))
            return told

        with all_held():
            told = forked(ask)
        assert all("inherited through fork()" in text for text in told)


# ---- what is left ----------------------------------------------------------------------------

# What was closed, or has failed, and was not collected yet: no object of the library has it any
# more. At the end of the child, its destructors would wait for threads of the parent.
LEAVING = """
import gc, os, sys
import exclusivelog as xl
from exclusivelog.cluster import Mirror
from exclusivelog.cluster.pulsar import Cluster
from testing.broker import Namespace
from testing.children import die_with_parent
from testing.peers import access, open_engine, open_log

gc.disable()
namespace, parent = Namespace(*sys.argv[2:]), os.getpid()

def reader_that_was_dropped():
    with Cluster(access(namespace)) as cluster:
        cluster.reader("a").next()  # the client keeps it, as it keeps the client

def producer_that_was_refused():
    with Cluster(access(namespace), 1.0) as cluster:
        writer = cluster.writer("b")
        try:
            cluster.writer("b")
        except xl.ProducerBusyError as error:
            kept = error  # its traceback has this frame, which has the error
        else:
            raise AssertionError("there are two writers")

def engine_that_was_closed():
    with open_engine(namespace) as engine, engine.topic("c").producer() as producer:
        producer.send(b"x")
        for kind in ("exclusive", "exclusive"):
            try:
                engine.topic("c").producer(kind)
            except xl.ProducerFencedError as error:
                kept = error

def log_that_was_closed():
    log = open_log(namespace, "d")
    log.append(b"x")
    tail = log.tail()
    log.close()
    tail.close()
    tail.me = tail

def mirror_that_was_closed(engine):
    with Mirror(engine, namespace.url, admin=namespace.admin) as mirror:
        mirror.run()
    mirror.me = mirror

with xl.open(sys.argv[1]) as engine:
    engine.topic("e").producer().send(b"x")
    reader_that_was_dropped()
    producer_that_was_refused()
    engine_that_was_closed()
    log_that_was_closed()
    mirror_that_was_closed(engine)
    with open_engine(namespace), Mirror(engine, namespace.url, admin=namespace.admin) as mirror:
        child = FORK
        if child == 0:
            die_with_parent(parent)
            gc.collect()
            sys.exit(7)  # through the whole end of the interpreter
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.broker
@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.PyDLL(None).fork()"])
def test_c5_a_child_collects_what_was_closed_before_and_ends(
    path: str, namespace: Namespace, fork: str
) -> None:
    source = "import ctypes\n" + LEAVING.replace("FORK", fork)
    said = finish(source, path, namespace.broker, namespace.admin, namespace.path)
    assert said == "7\n"
