"""A server loads the application, and forks its workers in C: uWSGI does, by default. Python's fork
hooks do not run, so each worker has a producer that owns the topic exclusively. All of them sent as
that one owner, each send was acknowledged, and about half of the messages were lost; `close()` in a
worker gave the topic of all others away. So the library asks the kernel which process it is in."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core, aio
from testing.children import child, line
from testing.processes import (
    COPIES,
    EXCLUSIVE,
    PATIENCE,
    UNSEEN_FORKS,
    WAIT,
    Failed,
    Worker,
    bare_fork,
    c_fork,
    forked,
    open_producer,
    stop_outside,
    until,
    values,
)
from tests.ownership.test_losing import USES, Inherited

pytestmark = pytest.mark.rule("C8")

Fork = Callable[[], int]


@pytest.fixture(params=UNSEEN_FORKS.values(), ids=UNSEEN_FORKS)
def fork(request: pytest.FixtureRequest) -> Fork:
    function: Fork = request.param
    return function


# ---- what it may not do ------------------------------------------------------------------


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_c8_a_child_of_c_code_gets_engine_closed_error(
    engine: xl.Engine, use: Callable[[Inherited], Any]
) -> None:
    inherited = Inherited(engine)
    with pytest.raises(Failed) as error:
        forked(lambda: use(inherited), fork=c_fork)
    assert error.value.kind == "EngineClosedError", str(error.value)
    assert inherited.producer.send(b"parent") == 1
    assert inherited.producer.state == "open"
    assert not inherited.future.done()


def test_c8_each_first_call_of_a_child_notices(engine: xl.Engine, fork: Fork) -> None:
    """Each in a child of its own, so that no earlier call has noticed the fork for it."""
    topic = engine.topic("orders")
    producer = topic.producer(EXCLUSIVE, linger=60)
    names: xl.SharedMap[str, int] = xl.SharedMap(engine.topic("names"))
    names.put("a", 1)
    claim = engine.own("group", {"resource": None})
    reader = topic.reader(group="readers")
    role = engine.role("leader", topics=["jobs"])
    calls: dict[str, Callable[[], Any]] = {
        "send": lambda: producer.send(b"child"),
        "send with a key": lambda: producer.send(b"child", key="k"),
        "send_async": lambda: producer.send_async(b"child").result(),
        "send_many": lambda: producer.send_many([b"child"]),
        "flush": producer.flush,
        "transaction": lambda: send_in_a_transaction(engine, producer),
        "put": lambda: names.put("a", 2),
        "put_async": lambda: names.put_async("a", 2).result(),
        "update": lambda: names.update("a", lambda value: 2),
        "claim": lambda: engine.own("group", {"resource": None}),
        "check of a claim": claim.check,
        "read": lambda: reader.read_next(timeout=0),
        "role": lambda: engine.role("leader", topics=["jobs"], timeout=0),
        "producer of a role": lambda: role.producer("jobs").send(b"child"),
    }
    for name, call in calls.items():
        with pytest.raises(Failed) as error:
            forked(call, fork=fork)
        assert error.value.kind == "EngineClosedError", f"{name}: {error.value}"
    assert producer.send(b"parent") == 0
    assert names.get("a") == 1
    assert (producer.state, claim.is_valid, role.closed) == ("open", True, False)
    assert values(topic) == [b"parent"]


def send_in_a_transaction(engine: xl.Engine, producer: xl.Producer) -> None:
    with engine.transaction() as transaction:
        producer.send(b"child", transaction=transaction)


def test_c8_closing_in_a_child_is_quick_and_takes_nothing_from_the_parent(
    engine: xl.Engine, fork: Fork
) -> None:
    inherited = Inherited(engine)
    names: xl.SharedMap[str, int] = xl.SharedMap(engine.topic("names"))
    names.put("a", 1)
    claim = engine.own("group", {"resource": None})
    role = engine.role("leader", topics=["jobs"])
    closing = (
        inherited.producer.close,
        inherited.reader.close,
        names.close,
        role.close,
        engine.close,
    )
    for close in closing:
        forked(close, PATIENCE / 3, fork)
    assert inherited.producer.send(b"parent") == 1
    assert inherited.producer.state == "open"
    assert names.put("a", 2) is None or names.get("a") == 2
    assert claim.is_valid
    assert not inherited.future.done()
    assert not role.closed


ALL_FORKS = {"os.fork": os.fork, **UNSEEN_FORKS}


class Ends:
    """All that has an end, each in use; `calls` ends each of them by name."""

    def __init__(self, engine: xl.Engine, stopped: Worker) -> None:
        topic = engine.topic("orders")
        self.owner = topic.producer(EXCLUSIVE, linger=60)
        self.owner.send(b"first")
        self.waiter = topic.producer_async(WAIT)
        self.claim = engine.own("group", {"resource": None})
        self.other_claim = engine.own("group", {"other": None})
        self.reader, self.member = topic.reader(), topic.reader(group="readers")
        self.many = engine.reader(["orders"], group="many")
        self.role = engine.role("leader", topics=["jobs"], groups={"workers": ["orders"]})
        self.role_waiter = engine.role_async("leader", topics=["jobs"])
        self.bound = self.role.producer("jobs")
        self.names: xl.SharedMap[str, int] = xl.SharedMap(engine.topic("names"))
        self.names.put("a", 1)
        self.changes = self.names.watch()
        self.total: xl.SharedState[int, int] = xl.SharedState(
            engine.topic("total"), lambda: 0, lambda state, operation: state + operation
        )
        self.transaction = engine.transaction()
        self.owner.send(b"in it", transaction=self.transaction)
        self.reading = engine.transaction()
        self.member.read_next(timeout=0)
        self.reading.commit_cursor(self.member)
        self.move = engine.unload_async("stopped", to=engine.id, timeout=PATIENCE)
        self.history = engine.history()
        next(self.history)
        until(lambda: self.move.moves())
        self.engine, self.stopped, self.topic = engine, stopped, topic

    def calls(self) -> dict[str, Callable[[], Any]]:
        error = ValueError("leaves the block")
        return {
            "claim.release": self.claim.release,
            "the end of a claim's block": lambda: self.other_claim.__exit__(None, None, None),
            "the claim of a role": self.role.claim.release,
            "waiter.cancel": self.waiter.cancel,
            "role_waiter.cancel": self.role_waiter.cancel,
            "move.cancel": self.move.cancel,
            "transaction.abort": self.transaction.abort,
            "the end of a transaction": lambda: self.reading.__exit__(ValueError, error, None),
            "history.close": self.history.close,
            "reader.close": self.reader.close,
            "member.close": self.member.close,
            "many.close": self.many.close,
            "changes.close": self.changes.close,
            "bound.close": self.bound.close,
            "owner.close": self.owner.close,
            "role.close": self.role.close,
            "names.close": self.names.close,
            "total.close": self.total.close,
            "engine.close": self.engine.close,
        }

    def check(self) -> None:
        """All of it still works in the parent."""
        assert self.claim.is_valid
        assert self.other_claim.is_valid
        assert not self.waiter.done()
        assert not self.role_waiter.done()
        assert not self.move.done()
        assert self.owner.send(b"parent") == 1
        assert [message.value for message in self.reader] == [b"first", b"parent"]
        assert len(list(self.many)) == 2
        self.role.claim.check()
        self.bound.send(b"job")
        assert self.names.update("a", lambda value: value + 1).value == 2
        assert self.changes.read_next(timeout=PATIENCE).key == "a"
        self.reading.commit()
        self.transaction.commit()
        assert self.transaction.offsets == {self.owner: range(2, 3)}
        self.stopped.signal(signal.SIGCONT)
        assert [move.ok for move in self.move.result(PATIENCE)] == [True]
        self.owner.close()
        self.waiter.result(PATIENCE).close()


@pytest.mark.rule("C5")
@pytest.mark.parametrize("fork", ALL_FORKS.values(), ids=ALL_FORKS)
def test_c5_c8_every_end_of_every_object_does_nothing_in_a_child(
    engine: xl.Engine, worker: Callable[..., Worker], fork: Fork
) -> None:
    """Each in a child of its own, and without an error: servers close all that they know."""
    stopped = worker(topic="stopped", keepalive=None)
    stopped.call(open_producer, EXCLUSIVE)
    stop_outside(engine.path, stopped.pid)
    ends = Ends(engine, stopped)
    raised = {}
    for name, call in ends.calls().items():
        try:
            forked(lambda call=call: call() and None, PATIENCE / 3, fork)
        except Failed as error:
            raised[name] = str(error)
    assert raised == {}
    ends.check()


@pytest.mark.rule("C5")
@pytest.mark.parametrize("fork", ALL_FORKS.values(), ids=ALL_FORKS)
def test_c5_c8_every_end_in_asyncio_does_nothing_in_a_child(path: str, fork: Fork) -> None:
    async def make() -> dict[str, Any]:
        engine = await aio.open(path)
        topic = engine.topic("orders")
        names: aio.SharedMap[str, int] = await aio.SharedMap(engine.topic("names"))
        return {
            "producer": await topic.producer(EXCLUSIVE),
            "claim": await engine.own({"a": None}),
            "reader": await topic.reader(group="readers"),
            "names": names,
            "role": await engine.role("leader", topics=["jobs"]),
            "engine": engine,
        }

    made = asyncio.run(make())
    raised = {}
    for name, it in made.items():
        try:
            end = it.release if name == "claim" else it.close
            forked(lambda end=end: asyncio.run(end()), PATIENCE / 3, fork)
        except Failed as error:
            raised[name] = str(error)
    assert raised == {}
    assert made["claim"].is_valid
    assert made["producer"].state == "open"
    made["role"].sync.claim.check()
    made["engine"].sync.close()


def test_c8_dropping_all_in_a_child_takes_nothing_from_the_parent(
    engine: xl.Engine, topic: xl.Topic, fork: Fork
) -> None:
    """Garbage collection in the child runs the finalizers that release what was dropped."""
    kept: list[Any] = [topic.producer(EXCLUSIVE), engine.own("group", {"resource": None})]
    kept[0].send(b"first")
    session = topic.owner
    forked(kept.clear, fork=fork)
    assert topic.owner == session
    assert kept[0].send(b"second") == 1
    assert kept[1].is_valid


def test_c8_a_child_that_drops_a_read_leaves_the_parent_s_place_in_the_table_of_readers(
    engine: xl.Engine, topic: xl.Topic, fork: Fork
) -> None:
    with engine.ledger.read() as tables:
        before = engine.ledger._environment.lmdb.readers()
        forked(lambda: engine.closed, fork=fork)
        assert engine.ledger._environment.lmdb.readers() == before
        assert tables.topics.find("orders") is not None


ORDINARY_EXIT = """
    import os, sys
    import exclusivelog as xl
    from testing.processes import PATIENCE, c_fork
    engine = xl.open(sys.argv[1])
    topic = engine.topic("orders")
    producer = topic.producer("exclusive", linger=60)
    producer.send(b"before")
    producer.send_async(b"buffered")
    waiter = topic.producer_async("wait_for_exclusive")
    names = xl.SharedMap(engine.topic("names"))
    names.put("a", 1)
    if c_fork() == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    print(producer.send(b"after"), producer.state, flush=True)
    names.put("a", 2)
    producer.close()
    print(waiter.result(timeout=PATIENCE).topic_epoch, flush=True)
"""


def test_c8_a_child_may_exit_in_the_ordinary_way(topic: xl.Topic) -> None:
    with child(ORDINARY_EXIT, topic.engine.path) as process:
        assert line(process) == "2 open"
        assert line(process) == "2"
        assert process.wait(timeout=PATIENCE) == 0
    assert values(topic) == [b"before", b"buffered", b"after"]


# ---- what it may do ----------------------------------------------------------------------


def test_c8_a_child_of_c_code_can_open_an_engine_of_its_own(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    parent = topic.producer()

    def work() -> tuple[int, list[bytes], int]:
        with xl.open(engine.path, name="child") as own:
            with own.topic("orders").producer() as producer:
                offset = producer.send(b"child")
            return offset, values(own.topic("orders")), len(own.engines())

    assert parent.send(b"parent") == 0
    offset, found, engines = forked(work, fork=c_fork)
    assert found == [b"parent", *[b"child"] * offset]  # a child that hangs afterwards has sent, too
    assert (offset > 0, engines) == (True, 2)
    assert parent.send(b"parent again") == offset + 1


def test_c8_a_child_of_a_bare_system_call_is_told_why_it_cannot_open_one(path: str) -> None:
    """The C library still has the id of the parent's thread: the child would take mutexes in its
    name, and its death would release none of them."""
    with pytest.raises(Failed, match="bare system call") as error:
        forked(lambda: xl.open(path).close(), fork=bare_fork)
    assert error.value.kind == "LedgerError"


def test_c8_a_fork_of_a_fork_is_another_process(engine: xl.Engine, topic: xl.Topic) -> None:
    producer = topic.producer(EXCLUSIVE)

    def send() -> int:
        return producer.send(b"grandchild")

    def fork_again() -> tuple[str, int, int]:
        with pytest.raises(Failed) as error:
            forked(send, fork=c_fork)
        return error.value.kind, _core.this_process(), forked(_core.this_process, fork=c_fork)

    kind, child_s, grandchild_s = forked(fork_again, fork=c_fork)
    assert kind == "EngineClosedError"
    assert len({_core.this_process(), child_s, grandchild_s}) == 3
    assert producer.send(b"parent") == 0


DAEMON = """
    import os, signal, sys
    import exclusivelog as xl
    from testing.processes import c_fork as fork
    engine = xl.open(sys.argv[1])
    producer = engine.topic("orders").producer("exclusive")
    if fork():
        os._exit(0)
    signal.alarm(int(sys.argv[2]))
    os.setsid()
    if fork():
        os._exit(0)
    signal.alarm(int(sys.argv[2]))
    os.closerange(3, 256)
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    try:
        print(producer.send(b"daemon"), flush=True)
    except xl.EngineClosedError:
        print("refused", flush=True)
    engine.close()
    print(all(os.fstat(fd).st_rdev == os.stat("/dev/null").st_rdev for fd in kept), flush=True)
    print(xl.open(sys.argv[1]).topic("orders").producer("exclusive").send(b"own"), flush=True)
"""


def test_c8_a_daemon_s_new_files_are_not_closed(engine: xl.Engine) -> None:
    """A daemon closes all descriptors, and opens other files under their numbers. It may hang in a
    lock that another thread held at the fork (see `forked`): then another one is made."""
    for _ in range(COPIES):
        with child(DAEMON, engine.path, int(PATIENCE / 6)) as process:
            said = process.stdout.read().split()
        if said:
            break
    assert said == ["refused", "True", "0"]


def test_c8_a_child_that_executes_another_program_harms_nothing(
    engine: xl.Engine, topic: xl.Topic, fork: Fork
) -> None:
    producer = topic.producer(EXCLUSIVE)
    pid = fork()
    if pid == 0:
        os.execv("/bin/true", ["true"])
    assert os.waitpid(pid, 0)[1] == 0
    assert producer.send(b"parent") == 0


def test_c8_a_child_that_outlives_its_parent_does_not_keep_its_topics(topic: xl.Topic) -> None:
    source = """
        import ctypes, os, sys, time
        import exclusivelog as xl
        from testing.patience import PATIENCE
        engine = xl.open(sys.argv[1], keepalive=None)
        producer = engine.topic("orders").producer("exclusive")
        pid = ctypes.PyDLL(None).fork()
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


def test_c8_what_is_done_in_a_child_is_done_once() -> None:
    calls: list[int] = []
    _core.in_forked_child(lambda: calls.append(os.getpid()))
    here = _core.this_process()

    def ask() -> tuple[bool, int, int]:
        first, second = _core.this_process(), _core.this_process()
        return first == second != here, len(calls), calls[0] - os.getpid()

    for fork in (os.fork, c_fork, bare_fork):
        assert forked(ask, fork=fork) == (True, 1, 0)
    assert _core.this_process() == here
    assert calls == []
