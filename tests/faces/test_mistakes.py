"""Mistakes of users: each error names the argument, topic or file, and what to do instead."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime as dt
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
import exclusivelog.testing
from exclusivelog import aio
from testing.children import finish
from tests.faces.test_cli import refusal

pytestmark = pytest.mark.once


class Objects:
    """A ledger with a topic "orders" of three messages, and what a program has open on it."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self.path = path
        self.engine = stack.enter_context(xl.open(path, "main", durability="process"))
        self.topic = self.engine.topic("orders")
        self.producer = stack.enter_context(self.topic.producer(name="p"))
        self.producer.send_many([b"a", b"b", b"c"])
        self.closed = stack.enter_context(self.topic.producer())
        self.closed.close()
        self.gone = xl.open(path, "gone", durability="process")
        self.gone_topic = self.gone.topic("orders")
        self.gone.close()

        self.future = self.topic.producer_async("shared")
        stack.enter_context(self.future.result())

    @property
    def receipt(self) -> xl.Receipt:
        """The receipt of a message that is in the log."""
        with self.engine.topic("sent").producer() as producer:
            receipt = producer.send_async(b"x")
        assert receipt.done()
        return receipt

    def changes(self) -> xl.MapWatch[str, int]:
        """A watch with one change."""
        counts = xl.SharedMap(self.engine.topic("counts"))
        counts.put("a", 1)
        return counts.watch(start=0)

    def json(self, *values: Any) -> None:
        with self.topic.producer(serializer="json") as producer:
            producer.send_many(values) if len(values) > 1 else producer.send(values[0])

    def in_transaction(self, use: Callable[[xl.Transaction], object]) -> None:
        with self.engine.transaction() as transaction:
            use(transaction)

    def closed_too_early(self) -> None:
        with self.engine.transaction() as txn, self.topic.producer(name="early") as producer:
            producer.send(b"x", transaction=txn)

    def terminated(self) -> xl.Topic:
        topic = self.engine.topic("done")
        topic.terminate()
        return topic


@pytest.fixture
def there(path: str) -> Any:
    with contextlib.ExitStack() as stack:
        yield Objects(path, stack)


Case = tuple[Callable[[Objects], object], type[Exception], list[str]]

# What a program does, what is raised, and what the error has to name.
MISTAKES: dict[str, Case] = {
    "a path that is a number": (lambda o: xl.open(3), TypeError, ["path=3", "str"]),
    "a path that is None": (lambda o: xl.open(None), TypeError, ["path=None"]),
    "a path with ~": (lambda o: xl.open("~/log"), ValueError, ["path='~/log'", "expanduser"]),
    "a mode as text": (lambda o: xl.open(o.path, mode="700"), ValueError, ["mode='700'", "0o700"]),
    "a decimal mode": (lambda o: xl.open(o.path, mode=700), ValueError, ["mode=0o1274", "0o700"]),
    "a mode that excludes the owner": (
        lambda o: xl.open(o.path, mode=0o077), ValueError, ["mode=0o77", "owner"],
    ),
    "properties of an engine": (
        lambda o: xl.open(o.path, properties={"a": 1}), TypeError, ["properties={'a': 1}", "str"],
    ),
    "properties of a message": (
        lambda o: o.producer.send(b"x", properties=["a"]),
        TypeError, ["properties=['a']", "mapping"],
    ),
    "a value that JSON has not": (lambda o: o.json({1, 2}), TypeError, ["value={1, 2}", "JSON"]),
    "one of many values": (lambda o: o.json(1, {2}), TypeError, ["value={2}", "JSON"]),
    "a value that a serializer refuses": (
        lambda o: o.topic.producer(serializer=lambda text: int(text)).send("x"),
        ValueError, ["value='x'", "serializer"],
    ),
    "a transaction that is none": (
        lambda o: o.producer.send(b"x", transaction=True),
        TypeError, ["transaction", "engine.transaction()", "True"],
    ),
    "many in a transaction that is none": (
        lambda o: o.producer.send_many([b"x"], transaction=o.engine),
        TypeError, ["transaction", "engine.transaction()"],
    ),
    "the cursor of a producer": (
        lambda o: o.in_transaction(lambda txn: txn.commit_cursor(o.producer)),
        TypeError, ["commit_cursor", "group=", "Producer 'p'"],
    ),
    "the cursor of a reader without a group": (
        lambda o: o.in_transaction(lambda txn: txn.commit_cursor(o.topic.reader())),
        ValueError, ["Reader of topic 'orders'", "group="],
    ),
    "a list of resources": (
        lambda o: o.engine.own(["a"]), TypeError, ["['a']", "own({'shard-7': None})"],
    ),
    "a group without resources": (
        lambda o: o.engine.own("a"), TypeError, ["'a'", "own('group', {'shard-7': None})"],
    ),
    "retention as text": (
        lambda o: o.topic.retention("7d"), TypeError, ["max_age='7d'", "seconds", "timedelta"],
    ),
    "retention of more bytes than there can be": (
        lambda o: o.topic.retention(max_bytes=2**64),
        ValueError, ["max_bytes=18446744073709551616", "2**63 - 1"],
    ),
    "a message behind the largest sequence id": (
        lambda o: (lambda full: (full.send(b"", sequence_id=2**63 - 1), full.send(b"")))(
            o.engine.topic("full").producer(name="q")
        ),
        xl.DuplicateSequenceError, ["'full'", "'q'", "9223372036854775807", "another name"],
    ),
    "a closed producer": (
        lambda o: o.closed.send(b"x"),
        xl.EngineClosedError, ["'orders'", "closed", "open a new one"],
    ),
    "a closed reader": (
        lambda o: (lambda reader: (reader.close(), reader.read_next(0)))(o.topic.reader()),
        xl.EngineClosedError, ["'orders'", "closed", "open a new one"],
    ),
    "a closed engine": (
        lambda o: o.gone_topic.producer(),
        xl.EngineClosedError, ["'gone'", "open the ledger again"],
    ),
    "a producer that is closed before the commit": (
        lambda o: o.closed_too_early(),
        xl.EngineClosedError, ["'early'", "'orders'", "as producer, engine.transaction()"],
    ),
    "dict as a deserializer": (
        lambda o: o.topic.reader(deserializer=dict),
        TypeError, ["deserializer=<class 'dict'>", "'json' is for dicts"],
    ),
    "list as a serializer": (
        lambda o: o.topic.producer(serializer=list),
        TypeError, ["serializer=<class 'list'>", "'json' is for dicts"],
    ),
    "a flag of open as text": (
        lambda o: xl.open(o.path, readonly="no"), TypeError, ["readonly='no'", "True or False"],
    ),
    "a flag of a topic as a number": (
        lambda o: o.engine.topic("order", create=0), TypeError, ["create=0", "True or False"],
    ),
    "a flag of a reader as text": (
        lambda o: o.topic.reader(read_compacted="no"),
        TypeError, ["read_compacted='no'", "True or False"],
    ),
    "a flag of seek as None": (
        lambda o: o.topic.reader().seek(1, inclusive=None), TypeError, ["inclusive=None"],
    ),
    "True as a number of messages": (
        lambda o: o.topic.reader().read_batch(True), ValueError, ["max_messages=True"],
    ),
    "True as a number of bytes": (
        lambda o: o.topic.trim(max_bytes=True), ValueError, ["max_bytes=True"],
    ),
    "a timeout of a claim that is refused without a wait": (
        lambda o: o.engine.own({"shard": None}, timeout=-1), ValueError, ["timeout=-1"],
    ),
    "an engine in place of its id": (
        lambda o: o.engine.unload("orders", to=o.engine), TypeError, ["to=<Engine", "id"],
    ),
    "a terminated topic": (
        lambda o: o.terminated().producer(), xl.TopicTerminatedError, ["'done'", "only be read"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_names_what_is_wrong_and_the_way_out(there: Objects, mistake: str) -> None:
    call, kind, named = MISTAKES[mistake]
    with pytest.raises(kind) as raised:
        call(there)
    assert [word for word in named if word not in str(raised.value)] == [], str(raised.value)
    assert len(there.topic) == 3


# ---- timeouts --------------------------------------------------------------------------------

# Every public call with a `timeout`; a generator checks it at its first step.
Waits = Callable[[Objects, Any], Any]
WAITS: dict[str, Waits] = {
    "producer": lambda o, t: o.topic.producer(timeout=t),
    "producer_async": lambda o, t: o.topic.producer_async("wait_for_exclusive", timeout=t),
    "role": lambda o, t: o.engine.role("r", timeout=t),
    "role_async": lambda o, t: o.engine.role_async("r", timeout=t),
    "own": lambda o, t: o.engine.own({"shard": None}, timeout=t),
    "send": lambda o, t: o.producer.send(b"x", timeout=t),
    "send_many": lambda o, t: o.producer.send_many([b"x"], timeout=t),
    "flush": lambda o, t: o.producer.flush(timeout=t),
    "result of a receipt": lambda o, t: o.receipt.result(t),
    "exception of a receipt": lambda o, t: o.receipt.exception(t),
    "result of a future": lambda o, t: o.future.result(t),
    "exception of a future": lambda o, t: o.future.exception(t),
    "read_next": lambda o, t: o.topic.reader().read_next(t),
    "follow": lambda o, t: next(o.topic.reader().follow(t)),
    "values": lambda o, t: next(o.topic.reader().values(follow=True, timeout=t)),
    "read_next of a group": lambda o, t: o.engine.reader(["orders"], group="g").read_next(t),
    "follow of a group": lambda o, t: next(o.engine.reader(["orders"], group="g").follow(t)),
    "map": lambda o, t: xl.SharedMap(o.engine.topic("map"), timeout=t),
    "state": lambda o, t: xl.SharedState(
        o.engine.topic("state"), initial=dict, apply=lambda state, op: state, timeout=t
    ),
    "read_next of a watch": lambda o, t: o.changes().read_next(t),
    "follow of a watch": lambda o, t: next(o.changes().follow(t)),
    "unload": lambda o, t: o.engine.unload("orders", to=o.engine.id, timeout=t),
    "unload_async": lambda o, t: o.engine.unload_async("orders", to=o.engine.id, timeout=t),
    "move": lambda o, t: o.producer.move(o.engine.id, timeout=t),
    "result of a process": lambda o, t: xl.testing.Process.result(None, t),
    "wait_until": lambda o, t: xl.testing.wait_until(lambda: True, t),
}


@pytest.mark.sampled
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("-inf"), "1", True])
def test_a_timeout_is_a_number_of_seconds_from_0_on(
    there: Objects, wait: str, timeout: Any
) -> None:
    """Also if the call need not wait: the messages are there, and the outcomes are known."""
    kind = TypeError if isinstance(timeout, (str, bool)) else ValueError
    with pytest.raises(kind, match=re.escape(f"timeout={timeout!r}: it takes seconds from 0 on")):
        WAITS[wait](there, timeout)
    assert len(there.topic) == 3


@pytest.mark.rule("A4")
def test_an_error_does_not_repeat_a_long_argument(there: Objects) -> None:
    for call in (there.engine.topic, there.engine.own):
        with pytest.raises((ValueError, TypeError), match="bytes of UTF-8") as raised:
            call("x" * 100_000) if call == there.engine.topic else call({"x" * 100_000: None})
        assert len(str(raised.value)) < 1000


def test_nothing_is_made_in_a_directory_named_tilde(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\./~/log"):
        xl.open("~/log")
    assert os.listdir(tmp_path) == []
    xl.open("./~/log", durability="process").close()
    assert os.listdir(tmp_path) == ["~"]


def test_retention_takes_a_timedelta(there: Objects) -> None:
    there.topic.retention(dt.timedelta(days=7))
    with there.engine.ledger.read() as tables:
        assert tables.retention.get(there.topic.id) == (604_800.0, None)


def test_with_instead_of_async_with_is_named(path: str) -> None:
    async def program() -> None:
        with aio.open(path):
            pass

    with pytest.raises(TypeError, match=r"aio\.open\(\.\.\.\): use `async with`"):
        asyncio.run(program())


@pytest.mark.long
def test_the_command_sends_nothing_into_a_map(path: str) -> None:
    with xl.open(path) as engine, xl.SharedMap[str, int](engine.topic("settings")) as settings:
        settings["limit"] = 1
    assert "'settings' holds a map" in refusal("send", path, "settings", "x")
    with xl.open(path) as engine, xl.SharedMap[str, int](engine.topic("settings")) as settings:
        assert dict(settings) == {"limit": 1}


FORKED = """
    import os, sys
    import exclusivelog as xl

    with xl.open(sys.argv[1]) as engine, engine.topic("orders").producer() as producer:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                producer.send(b"x")
            except xl.EngineClosedError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        print(os.read(read, 1000).decode())
"""


def test_a_forked_child_is_told_to_open_an_engine_of_its_own(path: str) -> None:
    said = finish(FORKED, path)
    assert "inherited through fork()" in said
    assert "open an engine of your own" in said


def test_a_batch_of_more_messages_than_there_can_be_has_all(there: Objects) -> None:
    assert len(there.topic.reader().read_batch(2**64)) == len(there.topic)


def handed_over(engine: xl.Engine) -> dict[str, Any]:
    """Objects that a program may try to give to a process of multiprocessing."""
    topic = engine.topic("orders")
    return {
        "engine": engine,
        "topic": topic,
        "producer": topic.producer(),
        "reader": topic.reader(),
        "readers": engine.reader(["orders"], group="g"),
        "transaction": engine.transaction(),
        "claim": engine.own("g", {"a": None}),
        "map": xl.SharedMap(engine.topic("map")),
    }


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_object_of_this_process_is_not_passed_to_another_one(engine, copied) -> None:
    for name, one in handed_over(engine).items():
        with pytest.raises(TypeError, match="Pass the path of the ledger, and open it there"):
            copied(one)
        assert name
    context = multiprocessing.get_context("spawn")
    with pytest.raises(TypeError, match="another process"):
        context.Process(target=print, args=(engine,)).start()
