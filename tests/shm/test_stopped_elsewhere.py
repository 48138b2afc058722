"""Rule K3: every call that writes, beside a process that is stopped in the critical section.

Another process is stopped (SIGSTOP) with the locks of appends and tables. Each call either answers
or waits; while it waits, the log of its own process names the other one. Once that one goes on, so
does the call, with its usual result. A call that the library gets later belongs into a list here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import exclusivelog as xl
from testing.processes import PATIENCE, Worker, until
from testing.stops import stopped

pytestmark = [pytest.mark.once, pytest.mark.rule("K3")]

EXCLUSIVE = "exclusive"
Call = Callable[[], Any]
Calls = dict[str, Call]


class Scene(NamedTuple):
    """What calls need: two engines of this process, and a path for a copy."""

    engine: xl.Engine
    other: xl.Engine
    copy: Path
    kept: list[Any]  # what must not be freed


def calls_of_engine(scene: Scene) -> Calls:
    engine, other = scene.engine, scene.other
    for name in ("read", "read later", "moves", "moves later", "stays", "goes"):
        with engine.topic(name).producer() as producer:
            producer.send(name.encode())
    for name in ("moves", "moves later", "stays"):
        scene.kept.append(engine.topic(name).producer(EXCLUSIVE))
    with engine.topic("read").reader(group="old") as reader:
        reader.commit()
    engine.role("old", topics=["old job"]).close()
    ends = xl.open(engine.path)
    ends.topic("ends").producer(EXCLUSIVE)
    return {
        "backup": lambda: engine.backup(scene.copy),
        "cancel_unload": lambda: engine.cancel_unload("stays"),
        "close": ends.close,
        "delete_group": lambda: engine.delete_group("old"),
        "delete_role": lambda: engine.delete_role("old"),
        "delete_topic": lambda: engine.delete_topic("goes"),
        "lock": lambda: engine.lock("job three", PATIENCE),
        "own": lambda: engine.own("claims", {"a": None}),
        "reader": lambda: engine.reader(["read"], group="new"),
        "role": lambda: engine.role("one", topics=["job"]),
        "role_async": lambda: engine.role_async("two", topics=["job two"]).result(PATIENCE),
        "topic": lambda: engine.topic("new"),
        "unload": lambda: engine.unload("moves", other.id, PATIENCE),
        "unload_async": lambda: engine.unload_async("moves later", other.id, PATIENCE).result(
            PATIENCE
        ),
    }


def calls_of_topic(scene: Scene) -> Calls:
    names = ("compacts", "compresses", "asks", "asks later", "reads", "keeps", "ends", "trims")
    topics = {name: scene.engine.topic(name) for name in names}
    for topic in topics.values():
        with topic.producer() as producer:
            producer.send_many([b"1", b"2"])
    return {
        "compact": topics["compacts"].compact,
        "compression": lambda: topics["compresses"].compression(None),
        "producer": topics["asks"].producer,
        "producer_async": lambda: topics["asks later"].producer_async().result(PATIENCE),
        "reader": lambda: topics["reads"].reader(group="new"),
        "retention": lambda: topics["keeps"].retention(max_age=3600.0),
        "terminate": topics["ends"].terminate,
        "trim": lambda: topics["trims"].trim(before=1),
    }


def calls_of_producer(scene: Scene) -> Calls:
    def owner(topic: str) -> xl.Producer:
        return scene.engine.topic(topic).producer(EXCLUSIVE)

    announces, flushes, moves, moves_later, closes = map(owner, "abcde")
    catches_up, sends, many, later = map(owner, "fghi")
    flushes.send_async(b"x")
    reader = scene.engine.topic("f").reader()
    return {
        "announce": lambda: announces.announce({"at": "here"}),
        "catch_up": lambda: list(catches_up.catch_up(reader)),
        "close": closes.close,
        "flush": flushes.flush,
        "move": lambda: moves.move(scene.other.id, PATIENCE),
        "move_async": lambda: moves_later.move_async(scene.other.id, PATIENCE).result(PATIENCE),
        "send": lambda: sends.send(b"x"),
        "send_async": lambda: later.send_async(b"x").result(PATIENCE),
        "send_many": lambda: many.send_many([b"x"] * 100),
    }


def calls_of_reader(scene: Scene) -> Calls:
    def member(name: str) -> xl.Reader:
        with scene.engine.topic(name).producer() as producer:
            producer.send(b"x")
        reader = scene.engine.topic(name).reader(group="g")
        reader.read_next(0)
        return reader

    return {"commit": member("commits").commit, "close": member("closes").close}


def calls_of_group_reader(scene: Scene) -> Calls:
    def many(name: str) -> xl.GroupReader:
        with scene.engine.topic(name).producer() as producer:
            producer.send(b"x")
        reader = scene.engine.reader([name], group=name)
        reader.read_next(0)
        return reader

    return {"commit": many("commits").commit, "close": many("closes").close}


def calls_of_transaction(scene: Scene) -> Calls:
    def begun(name: str, value: bytes) -> xl.Transaction:
        transaction = scene.engine.transaction()
        producer = scene.engine.topic(name).producer(EXCLUSIVE)
        producer.send(value, transaction=transaction)
        return transaction

    small, large = begun("small", b"x"), begun("large", bytes(300_000))
    return {
        "commit": small.commit,
        "commit of much": large.commit,
        "abort": begun("aborted", b"x").abort,
    }


def calls_of_claim(scene: Scene) -> Calls:
    return {"release": scene.engine.own("claims", {"a": None}).release}


def calls_of_role(scene: Scene) -> Calls:
    engine = scene.engine
    roles = {
        name: engine.role(name, topics=[f"{name} job"], groups={f"{name} group": [f"{name} job"]})
        for name in ("closes", "works", "moves", "moves later")
    }
    return {
        "close": roles["closes"].close,
        "group_reader": roles["works"].group_reader,
        "hand_over": lambda: roles["moves"].hand_over(scene.other.id, PATIENCE),
        "hand_over_async": lambda: (
            roles["moves later"].hand_over_async(scene.other.id, PATIENCE).result(PATIENCE)
        ),
        "producer": lambda: roles["works"].producer("works job"),
        "reader": lambda: roles["works"].reader("works job"),
    }


def in_maps(scene: Scene, calls: dict[str, Callable[[xl.SharedMap[str, int]], Any]]) -> Calls:
    """Each call on a map of its own."""

    def bound(name: str, call: Callable[[xl.SharedMap[str, int]], Any]) -> Call:
        names: xl.SharedMap[str, int] = xl.SharedMap(scene.engine.topic(name))
        names.put("a", 1)
        return lambda: call(names)

    return {name: bound(name, call) for name, call in calls.items()}


def calls_of_map(scene: Scene) -> Calls:
    return in_maps(
        scene,
        {
            "clear": lambda names: names.clear(),
            "close": lambda names: names.close(),
            "delete": lambda names: names.delete("a"),
            "pop": lambda names: names.pop("a"),
            "popitem": lambda names: names.popitem(),
            "put": lambda names: names.put("a", 2),
            "put_all": lambda names: names.put_all({"a": 2}),
            "put_if_absent": lambda names: names.put_if_absent("b", 2),
            "replace": lambda names: names.replace("a", 1, 2),
            "setdefault": lambda names: names.setdefault("b", 2),
            "snapshot": lambda names: names.snapshot(),
            "update": lambda names: names.update("a", lambda value: 2),
            "update_multiple": lambda names: names.update_multiple(None, lambda key, value: 2),
        },
    )


def calls_of_map_in_the_background(scene: Scene) -> Calls:
    return in_maps(
        scene,
        {
            "clear_async": lambda names: names.clear_async().result(PATIENCE),
            "delete_async": lambda names: names.delete_async("a").result(PATIENCE),
            "pop_async": lambda names: names.pop_async("a").result(PATIENCE),
            "popitem_async": lambda names: names.popitem_async().result(PATIENCE),
            "put_async": lambda names: names.put_async("a", 2).result(PATIENCE),
            "put_all_async": lambda names: names.put_all_async({"a": 2}).result(PATIENCE),
            "put_if_absent_async": lambda names: names.put_if_absent_async("b", 2).result(PATIENCE),
            "replace_async": lambda names: names.replace_async("a", 1, 2).result(PATIENCE),
            "setdefault_async": lambda names: names.setdefault_async("b", 2).result(PATIENCE),
            "snapshot_async": lambda names: names.snapshot_async().result(PATIENCE),
            "update_async": lambda names: names.update_async("a", lambda _: 2).result(PATIENCE),
            "update_multiple_async": lambda names: names.update_multiple_async(
                None, lambda key, value: 2
            ).result(PATIENCE),
        },
    )


def calls_of_state(scene: Scene) -> Calls:
    def total(name: str) -> xl.SharedState[int, int]:
        made: xl.SharedState[int, int] = xl.SharedState(
            scene.engine.topic(name), lambda: 0, lambda state, operation: state + operation
        )
        made.write(lambda state: [1])
        return made

    closes, snapshots, later, writes, writes_later = map(total, "abcde")
    return {
        "close": closes.close,
        "snapshot": snapshots.snapshot,
        "snapshot_async": lambda: later.snapshot_async().result(PATIENCE),
        "write": lambda: writes.write(lambda state: [1], lambda state: state),
        "write_async": lambda: writes_later.write_async(lambda state: [1]).result(PATIENCE),
    }


WRITES: dict[str, tuple[type, Callable[[Scene], Calls]]] = {
    "Engine": (xl.Engine, calls_of_engine),
    "Topic": (xl.Topic, calls_of_topic),
    "Producer": (xl.Producer, calls_of_producer),
    "Reader": (xl.Reader, calls_of_reader),
    "GroupReader": (xl.GroupReader, calls_of_group_reader),
    "Transaction": (xl.Transaction, calls_of_transaction),
    "Claim": (xl.Claim, calls_of_claim),
    "Role": (xl.Role, calls_of_role),
    "SharedMap": (xl.SharedMap, calls_of_map),
    "SharedMap in the background": (xl.SharedMap, calls_of_map_in_the_background),
    "SharedState": (xl.SharedState, calls_of_state),
}
# Calls that read, or that only note something in this process.
READS = {
    xl.Engine: "claims engines groups history inside producers roles stats supports topics "
    "transaction verify",
    xl.Topic: "stats terms watch_owner",
    xl.Producer: "stats",
    xl.Reader: "follow has_message_available read_arrow read_batch read_next seek values",
    xl.GroupReader: "follow has_message_available read_batch read_next seek values",
    xl.Transaction: "commit_cursor require",
    xl.Claim: "check",
    xl.Role: "",
    xl.SharedMap: "at at_async diff diff_async expires_at expires_at_async get get_async "
    "get_or_default get_or_default_async items keys list_keys list_keys_async scan scan_async "
    "values watch",
    xl.SharedState: "read read_async",
}


@pytest.fixture
def scene(path: str, tmp_path: Path) -> Iterator[Scene]:
    with xl.open(path, name="calls") as engine, xl.open(path, name="other") as other:
        yield Scene(engine, other, tmp_path / "copy", [])


@pytest.mark.long
@pytest.mark.parametrize("kind", WRITES)
def test_k3_each_call_that_writes_answers_or_names_who_is_stopped(
    scene: Scene, worker: Callable[..., Worker], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = WRITES[kind][1](scene)
    hung = worker(name="hung", topic="elsewhere")
    with ThreadPoolExecutor(len(calls)) as pool:
        with stopped(hung, "in_a_transaction"):
            caplog.clear()
            made: dict[str, Future[Any]] = {name: pool.submit(call) for name, call in calls.items()}
            until(lambda: names(caplog, hung.pid) or all(each.done() for each in made.values()))
        hung.answer()
        for name, call in made.items():
            try:
                call.result(PATIENCE)
            except Exception as error:
                raise AssertionError(f"{kind}.{name}") from error


def names(caplog: pytest.LogCaptureFixture, pid: int) -> bool:
    """Has the log named that process as one that is stopped inside?"""
    lines = [each for each in caplog.records if getattr(each, "event", "") == "slow_lock"]
    return any(f"pid {pid})" in each.getMessage() for each in lines)


@pytest.mark.long
def test_k3_no_call_of_the_api_is_in_neither_list(tmp_path: Path) -> None:
    listed: dict[type, set[str]] = {kind: set(reads.split()) for kind, reads in READS.items()}
    for number, (kind, make) in enumerate(WRITES.values()):
        with xl.open(tmp_path / str(number)) as engine, xl.open(tmp_path / str(number)) as other:
            listed[kind] |= {call.split()[0] for call in make(Scene(engine, other, tmp_path, []))}
    for kind, calls in listed.items():
        public = {
            name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))
        }
        assert public == calls, kind
