"""Rules E1 to E3: moving a topic to an engine that is named in advance.

The owner may be a process of its own or an engine next door, may be sending with all its
threads, may have thousands of messages in its queue. The destination may wait for the topic,
or not know of its luck yet. test_crashed_moves.py is about those who fall on the way.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership.sessions import Succession
from exclusivelog.local.ownership.transfers import HandOver
from exclusivelog.local.storage.ledger import Ledger
from exclusivelog.types import EngineInfo
from testing.handovers import (
    COUNTS,
    SENDS,
    HeldUp,
    Quick,
    begin,
    catch_up,
    freeze,
    large,
    moved,
    queue_up,
    quiet_wake_ups,
    steps,
    take_writer_lock,
    thaw,
    unload,
    wake_ups,
)
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    MODES,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    collect,
    open_producer,
    producer_state,
    rows,
    send,
    until,
    values,
    within,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

FENCED, MOVED = xl.ProducerFencedError, xl.ProducerMovedError


# ---- E1: who, what and how many ----------------------------------------------------------


def test_e1_a_topic_goes_to_the_engine_that_is_named(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """Three processes: one owns the topic, one waits for it, the third one moves it. The source
    learns where it went, and the destination goes on behind its last message."""
    source = quick("source")
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(open_producer, EXCLUSIVE, name="old")
    source.call(send, b"before")
    destination.call(queue_up, name="new")
    [move] = engine.unload("orders", to=destination.id)
    assert (move.topic, move.topic_id, move.epoch) == ("orders", topic.id, 2)
    assert (move.state, move.ok, move.reason) == ("owned", True, "")
    assert (move.source.engine_id, move.source.pid) == (source.id, source.pid)
    assert (move.source.producer_name, move.source.epoch) == ("old", 1)
    assert (move.target.id, move.target.name) == (destination.id, "destination")
    assert (move.target.pid, move.target.properties) == (destination.pid, {"address": "unix:/d"})
    assert (topic.owner.engine_id, topic.owner.producer_name) == (destination.id, "new")
    assert destination.call(take_writer_lock) == topic.epoch == 2
    assert destination.call(send, b"after") == 1
    with pytest.raises(Failed, match="ProducerMovedError"):
        source.call(send, b"late")
    assert source.call(producer_state) == "moved"
    assert values(topic) == [b"before", b"after"]


@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e1_the_steps_are_those_of_the_rule(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], waiting: bool
) -> None:
    """Owned(a, 1), Releasing, Assigned(b), Owned(b, 2); and the first two of them can be seen
    while a does not come to it."""
    source, destination = quick("source"), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    if waiting:
        destination.call(queue_up)
    freeze(source)
    moving = begin(engine.unload, "orders", destination.id)
    until(lambda: len(list(engine.history("orders"))) == 2)
    assert topic.owner.engine_id == source.id
    assert not moving.done()
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "owned" if waiting else "assigned")]
    if not waiting:
        assert topic.owner is None
        destination.call(open_producer, EXCLUSIVE)
    assert topic.owner.engine_id == destination.id
    events = list(engine.history("orders"))
    assert [event.kind for event in events] == [
        "grant",
        "releasing",
        "release",
        "assigned",
        "grant",
    ]
    assert [event.epoch for event in events] == [1, 1, 1, 1, 2]
    assert events[-1].reason == "hand-over"


def open_all(state: State, names: list[str]) -> None:
    """Own these topics."""
    state.kept["producers"] = [state.engine.topic(name).producer(EXCLUSIVE) for name in names]


def await_all(state: State, names: list[str]) -> None:
    """Wait for these topics."""
    state.kept["futures"] = [state.engine.topic(name).producer_async(WAIT) for name in names]


def epochs_of_all(state: State) -> list[int]:
    """The epochs that were granted to those who waited."""
    return [future.result(PATIENCE).topic_epoch for future in state.kept["futures"]]


NAMES = ["eu-1", "eu-2", "eu-3", "eu", "orders", "e*"]
CHOICES: dict[str, tuple[Any, list[str]]] = {
    "one": ("orders", ["orders"]),
    "one that others begin with": ("eu", ["eu"]),
    "one with a star in its name": ("e*", ["e*"]),
    "a list": (["orders", "eu-2"], ["orders", "eu-2"]),
    "a list that says one twice": (["orders", "orders", "eu"], ["orders", "eu"]),
    "a tuple of one": (("eu",), ["eu"]),
    "an iterator": (iter(["eu-3"]), ["eu-3"]),
    "a prefix": ("eu-", ["eu-1", "eu-2", "eu-3"]),
    "a prefix with a star": ("eu*", ["eu", "eu-1", "eu-2", "eu-3"]),
    "everything": ("*", sorted(NAMES)),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("topics", "expected"), CHOICES.values(), ids=CHOICES)
def test_e1_one_topic_a_list_or_a_prefix(
    engine: xl.Engine, quick: Callable[..., Quick], topics: Any, expected: list[str]
) -> None:
    source, destination = quick("source"), quick("destination")
    source.call(open_all, NAMES)
    assert moved(engine.unload(topics, to=destination.id)) == [
        (name, "assigned") for name in expected
    ]
    owners = {name: engine.topic(name).owner for name in NAMES}
    assert {name for name, owner in owners.items() if owner is None} == set(expected)


@pytest.mark.long
def test_e1_a_thousand_topics_take_a_handful_of_transactions(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    names = [f"t{number:04}" for number in range(1000)]
    for name in names:
        engine.topic(name)
    source, destination = quick("source"), quick("destination")
    source.start(open_all, names)
    source.answer(PATIENCE)
    destination.start(await_all, names)
    destination.answer(PATIENCE)
    before = engine.stats()["transactions"]
    moves = engine.unload("t*", to=destination.id, timeout=PATIENCE)
    assert engine.stats()["transactions"] - before < 50  # of 48 topics or more
    assert moved(moves) == [(name, "owned") for name in names]
    assert destination.call(epochs_of_all) == [2] * 1000
    assert all(engine.topic(name).owner.engine_id == destination.id for name in names)


@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e1_no_other_waiter_is_woken(path: str, waiting: bool) -> None:
    """Four engines have waiters of a higher priority than the destination's. None of them is
    woken. Where the destination has no waiter, the guard of the best of the others is told
    when the reservation ends, and its waiter goes on waiting."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xl.open(path, name=f"e{i}")) for i in range(6)]
        source, destination, *others = engines
        owner = source.topic("orders").producer(EXCLUSIVE, follow=False)
        waiters = [engine.topic("orders").producer_async(WAIT, priority=9) for engine in others]
        mine = destination.topic("orders").producer_async(WAIT) if waiting else None
        before = quiet_wake_ups(others)
        [move] = source.unload("orders", to=destination.id)
        if mine is None:  # the source wakes it after the commit that the move has seen
            until(lambda: wake_ups(others) != before)
        after = quiet_wake_ups(others)
        woken = [now - then for now, then in zip(after, before, strict=True)]
        assert not any(waiter.done() for waiter in waiters)
        if mine is not None:
            assert mine.result(PATIENCE).topic_epoch == move.epoch == 2
            assert woken == [0, 0, 0, 0]
        else:
            assert (move.state, owner._session.epoch) == ("assigned", 1)
            assert woken == [1, 0, 0, 0]


@pytest.mark.parametrize("asks", ["source", "destination", "third", "command"])
def test_e1_any_engine_may_ask_for_it(
    path: str, topic: xl.Topic, quick: Callable[..., Quick], asks: str
) -> None:
    workers = {name: quick(name) for name in ("source", "destination", "third")}
    workers["source"].call(open_producer, EXCLUSIVE)
    workers["destination"].call(queue_up)
    if asks == "command":
        assert run("unload", path, "orders", "--to", "destination").returncode == 0
    else:
        to = workers["destination"].id
        assert workers[asks].call(unload, "orders", to) == [("orders", "owned")]
    assert workers["destination"].call(take_writer_lock) == 2
    assert topic.owner.engine_name == "destination"


# ---- E1: the command ---------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The `exclusivelog` command."""
    command = [sys.executable, "-m", "exclusivelog.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_e1_the_command_says_what_became_of_each(
    path: str, engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    """Two topics are moved and one is not: the table says so, and the exit status, too."""
    source, destination = quick("source"), quick("destination")
    source.call(open_all, ["a-1", "a-2"])
    with engine.topic("a-3").producer(SHARED):
        done = run("unload", path, "a-", "--to", destination.id, "--timeout", str(PATIENCE))
    table = [line.split("\t") for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (1, "")
    found = [row[:2] for row in table[-3:]]
    assert found == [["a-1", "assigned"], ["a-2", "assigned"], ["a-3", "failed"]]
    got = [row[3:5] for row in table[-3:]]
    assert got == [["source", "destination"], ["source", "destination"], ["-", "destination"]]
    assert "shared" in table[-1][5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("orders", "--to", "nobody"), "not a live engine"),
        (("missing", "--to", "destination"), "missing"),
        (("orders", "missing", "--to", "destination"), "missing"),
        (("orders", "--to", "twin"), "2 engines have that name"),
    ],
)
def test_e1_the_command_refuses_in_one_line(
    path: str, engine: xl.Engine, quick: Callable[..., Quick], arguments: tuple[str], says: str
) -> None:
    for name in ("destination", "twin", "twin"):
        quick(name)
    with engine.topic("orders").producer(EXCLUSIVE) as producer:
        done = run("unload", path, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
        assert done.stderr.startswith("exclusivelog: ")
        assert done.stderr.count("\n") == 1
        assert producer.state == "open"


# ---- E1: what cannot be moved ------------------------------------------------------------


def test_e1_an_engine_that_is_not_there_is_an_error_that_says_who_is(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        gone = quick("gone")
        gone.kill()
        before = rows(engine)
        for to in ("f" * 16, gone.id, "", "test"):
            with pytest.raises(xl.LedgerError, match="not a live engine") as error:
                engine.unload("orders", to=to)
            assert engine.id in str(error.value)
        assert rows(engine) == before
        assert producer.state == "open"


@pytest.mark.parametrize("topics", ["missing", "missing*", ["orders", "missing"], ["ord"]])
def test_e1_a_topic_that_is_not_there_moves_nothing(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], topics: Any
) -> None:
    destination = quick("destination")
    with topic.producer(EXCLUSIVE) as producer:
        before = rows(engine)
        with pytest.raises(xl.TopicNotFoundError):
            engine.unload(topics, to=destination.id)
        with pytest.raises(xl.TopicNotFoundError):
            engine.cancel_unload("missing")
        assert rows(engine) == before
        assert producer.state == "open"


def test_e1_a_deleted_topic_is_not_there(engine: xl.Engine, quick: Callable[..., Quick]) -> None:
    destination = quick("destination")
    engine.topic("old")
    assert moved(engine.unload("old", to=destination.id)) == [("old", "assigned")]
    engine.delete_topic("old")
    with pytest.raises(xl.TopicNotFoundError):
        engine.unload(["old"], to=destination.id)
    assert engine.topic("old").producer(EXCLUSIVE).topic_epoch == 1  # nor is it reserved


def test_e1_shared_producers_have_no_ownership_to_hand_over(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination, dead = quick("destination"), quick("dead")
    dead.call(open_producer, SHARED)
    with topic.producer(SHARED) as producer:
        [move] = engine.unload("orders", to=destination.id)
        assert (move.state, move.ok, move.source, move.epoch) == ("failed", False, None, 0)
        assert "shared" in move.reason
        assert producer.send(b"x") == 0
    dead.kill()
    assert moved(engine.unload("orders", to=destination.id)) == [("orders", "assigned")]


def test_e1_what_is_there_already_stays(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    destination.call(open_producer, EXCLUSIVE)
    before = rows(engine)
    for _ in range(3):
        [move] = engine.unload("orders", to=destination.id)
        assert (move.state, move.epoch, move.source.engine_id) == ("owned", 1, destination.id)
    assert rows(engine) == before
    assert destination.call(send, b"still mine") == 0


def test_e1_a_topic_that_is_free_is_assigned(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    [move] = engine.unload("orders", to=destination.id)
    assert (move.state, move.epoch, move.source) == ("assigned", 0, None)
    with pytest.raises(FENCED, match="being handed over to engine 'destination'"):
        topic.producer(EXCLUSIVE)
    assert destination.call(open_producer, EXCLUSIVE) == 1


def test_e1_the_topic_of_a_dead_owner_is_moved(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source"), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    source.kill()
    assert moved(engine.unload("orders", to=destination.id)) == [("orders", "assigned")]
    assert destination.call(open_producer, EXCLUSIVE) == 2
    assert steps(engine.history("orders"))[1] == ("evict", "dead")


def test_e1_a_conflicting_move_is_refused_and_the_first_goes_on(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, first, second = quick("source"), quick("first"), quick("second")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    moving = begin(engine.unload, "orders", first.id)
    until(lambda: steps(engine.history("orders"))[-1] == ("releasing", "unload"))
    for state in ("releasing", "assigned"):
        [move] = engine.unload("orders", to=second.id, timeout=PATIENCE)
        assert (move.state, move.ok) == ("failed", False)
        assert f"being handed over to engine 'first' (id {first.id})" in move.reason
        if state == "releasing":
            thaw(source)
            assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    assert first.call(open_producer, EXCLUSIVE) == 2
    assert moved(engine.unload("orders", to=second.id)) == [("orders", "assigned")]


def test_e1_each_topic_has_an_outcome_of_its_own(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    """Seven topics in as many states, and one call."""
    source, destination, elsewhere = quick("source"), quick("destination"), quick("elsewhere")
    source.call(open_all, ["awaited", "reserved", "elsewhere"])
    destination.call(open_all, ["there"])
    destination.call(await_all, ["awaited"])
    shared, mine = engine.topic("shared").producer(), engine.topic("mine").producer(EXCLUSIVE)
    engine.unload("elsewhere", to=elsewhere.id)
    moves = engine.unload("*", to=destination.id)
    assert moved(moves) == [
        ("awaited", "owned"),
        ("elsewhere", "failed"),
        ("mine", "assigned"),
        ("orders", "assigned"),
        ("reserved", "assigned"),
        ("shared", "failed"),
        ("there", "owned"),
    ]
    assert (shared.state, mine.state) == ("open", "moved")
    found = {move.source.engine_name for move in moves if move.source}
    assert found == {"source", "destination", "test"}


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, lambda engine: engine.unload(5, to=engine.id)),
        (TypeError, lambda engine: engine.unload(b"orders", to=engine.id)),
        (TypeError, lambda engine: engine.unload(["orders", 5], to=engine.id)),
        (TypeError, lambda engine: engine.unload("orders", to=engine.id, timeout="1")),
        (TypeError, lambda engine: engine.unload("orders", to=engine.id, timeout=None)),
        (ValueError, lambda engine: engine.unload("orders", to=engine.id, timeout=-1)),
        (ValueError, lambda engine: engine.unload("orders", to=engine.id, timeout=float("nan"))),
        (TypeError, lambda engine: engine.unload("orders", to=None)),
        (ValueError, lambda engine: engine.unload("", to=engine.id)),
        (ValueError, lambda engine: engine.unload_async("", to=engine.id)),
        (ValueError, lambda engine: engine.cancel_unload("")),
        (TypeError, lambda engine: engine.cancel_unload([None])),
    ],
)
def test_e1_wrong_arguments_change_nothing(
    engine: xl.Engine, topic: xl.Topic, error: type[Exception], call: Callable[[xl.Engine], Any]
) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        before = rows(engine)
        with pytest.raises(error):
            call(engine)
        assert rows(engine) == before
        assert producer.state == "open"


@pytest.mark.parametrize("timeout", [float("inf"), 1e11])
def test_e1_a_timeout_may_be_as_long_as_any(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], timeout: float
) -> None:
    """Everything else that takes a timeout takes one for ever."""
    topic.producer(EXCLUSIVE)
    [move] = engine.unload("orders", to=quick("destination").id, timeout=timeout)
    assert move.state == "assigned"


def test_e1_who_may_only_read_cannot_move_anything(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    owner = topic.producer(EXCLUSIVE)
    with xl.open(path, readonly=True) as onlooker:
        for call in (
            lambda: onlooker.unload("orders", to=engine.id),
            lambda: onlooker.cancel_unload("orders"),
        ):
            with pytest.raises(xl.LedgerError, match="readonly"):
                call()
    with xl.open(path) as closed:
        pass
    with pytest.raises(xl.EngineClosedError):
        closed.unload("orders", to=engine.id)
    assert owner.state == "open"


# ---- E2: sends, where the destination is another process ---------------------------------


def test_e2_producers_send_while_their_moves_are_announced(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Announcing many topics takes a while, in which none of them has changed its owner yet."""
    names = ["a", "b"]
    owners = [engine.topic(name).producer("exclusive") for name in names]
    announce, offsets = HandOver._begin_releasing, list[int]()

    def send_meanwhile(*about: Any) -> None:
        announce(*about)
        offsets.extend(within(lambda owner=owner: owner.send(b"x")) for owner in owners)

    monkeypatch.setattr(HandOver, "_begin_releasing", send_meanwhile)
    with xl.open(path, name="destination") as destination:
        moves = within(lambda: engine.unload(names, to=destination.id))
        assert [move.state for move in moves] == ["assigned", "assigned"]
        assert offsets == [0, 0, 1, 1]


def test_e2_a_move_that_changes_an_owner_is_not_announced_beside_sends(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No producer owns the second topic, so the transaction that begins both moves assigns it: no
    process may append to it beside that one."""
    owner = engine.topic("a").producer("exclusive")
    engine.topic("b")
    last, found = dict[int, str](), list[str]()  # of this thread: the kind of its transaction
    for kind in ("write_exclusive", "write_fencing", "write_concurrent"):
        call = getattr(Ledger, kind)

        def noted(
            ledger: Ledger,
            *until: int,
            kind: str = kind,
            call: Callable[..., Any] = call,
            **options: Any,
        ) -> Any:
            last[threading.get_ident()] = kind
            return call(ledger, *until, **options)

        monkeypatch.setattr(Ledger, kind, noted)
    assign = Succession.assign

    def assigned(*about: Any) -> Any:
        found.append(last[threading.get_ident()])
        return assign(*about)

    monkeypatch.setattr(Succession, "assign", assigned)
    with xl.open(path, name="destination") as destination:
        moves = within(lambda: engine.unload(["a", "b"], to=destination.id))
        assert [move.state for move in moves] == ["assigned", "assigned"]
    assert set(found) == {"write_fencing"}
    owner.close()


@pytest.mark.parametrize("value", [b"%06d".__mod__, large], ids=["small", "large"])
def test_e2_what_was_queued_is_in_the_log_before_the_new_owner_s_first_message(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], value: Callable[[int], bytes]
) -> None:
    destination = quick("destination")
    count = 20 if value is large else 2000
    producer = topic.producer(EXCLUSIVE, linger=60)
    receipts = [producer.send_async(value(number)) for number in range(count)]
    destination.call(queue_up)
    engine.unload("orders", to=destination.id)
    assert [receipt.result(timeout=0) for receipt in receipts] == list(range(count))
    destination.call(take_writer_lock)
    assert destination.call(send, b"new") == count
    messages = list(topic.reader())
    assert [message.value for message in messages] == [*map(value, range(count)), b"new"]
    assert [message.epoch for message in messages] == [1] * count + [2]


def test_e2_sends_during_the_move_wait_and_end_with_the_successor(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    """Threads send in every way while the topic is drained. None of them goes through and none
    fails before it is known where the topic went; then all get one and the same error."""
    destination = quick("destination", properties={"address": "unix:/d"})
    told: list[tuple[Any, Any]] = []
    topic = engine.topic("orders")
    producer = topic.producer(EXCLUSIVE, on_fenced=lambda *about: told.append(about))
    with HeldUp(engine) as release:
        moving = begin(engine.unload, "orders", destination.id)
        release.await_it()
        sends = [begin(use, producer) for use in SENDS.values()]
        time.sleep(0.1)
        assert not any(send.done() for send in [*sends, moving])
        assert (producer.state, topic.next_offset) == ("open", 0)
        release.go_on()
        errors = [send.exception(PATIENCE) for send in sends]
    error = errors[0]
    assert isinstance(error, MOVED)
    assert all(other is error for other in errors)
    assert f"engine 'destination' (id {destination.id}, pid {destination.pid})" in str(error)
    assert isinstance(error.successor, EngineInfo)
    assert (error.successor.id, error.successor.name) == (destination.id, "destination")
    assert error.successor.pid == destination.pid
    assert error.successor.properties == {"address": "unix:/d"}
    until(lambda: told)
    assert told == [(producer, error)]
    assert (producer.state, topic.next_offset) == ("moved", 0)


def test_e2_a_producer_that_has_moved_is_fenced_for_ever(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    producer = topic.producer(EXCLUSIVE)
    engine.unload("orders", to=destination.id)
    uses = [*SENDS.values(), lambda producer: producer.flush(), catch_up]
    for _ in range(2):
        errors = []
        for use in uses:
            with pytest.raises(MOVED) as error:
                use(producer)
            errors.append(error.value)
        assert len(set(map(id, errors))) == 1
        assert producer.state == "moved"
        engine.cancel_unload("orders")  # it makes no difference where the topic is by now
    producer.close()
    producer.close()
    assert producer.state == "closed"
    with topic.producer(EXCLUSIVE) as new:
        assert (new.topic_epoch, new.send(b"new")) == (2, 0)


def test_e2_the_state_is_known_without_sending(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source"), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    mine = engine.topic("mine").producer(EXCLUSIVE)
    engine.unload(["orders", "mine"], to=destination.id)
    assert source.call(producer_state) == mine.state == "moved"
    with pytest.raises(Failed, match=f"ProducerMovedError.*{destination.id}"):
        source.call(send, b"x")


def test_e2_sends_that_wait_go_through_where_the_move_ends_without_its_destination(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    producer = topic.producer(EXCLUSIVE)
    with HeldUp(engine) as release:
        moving = begin(engine.unload, "orders", destination.id)
        release.await_it()
        sends = [begin(use, producer) for use in SENDS.values()]
        assert engine.cancel_unload("orders") == ["orders"]
        [move] = moving.result(PATIENCE)
        assert (move.state, move.source.engine_id) == ("failed", engine.id)
        release.go_on()
        offsets = sorted(send.result(PATIENCE) for send in sends)
    assert len(set(offsets)) == len(SENDS)
    assert topic.next_offset == sum(COUNTS)
    assert {message.epoch for message in topic.reader()} == {1}
    assert (producer.state, topic.epoch) == ("open", 1)


def test_e2_a_send_waits_no_longer_than_its_timeout(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    producer = topic.producer(EXCLUSIVE)
    with HeldUp(engine) as release:
        moving = begin(engine.unload, "orders", destination.id)
        release.await_it()
        for use in (producer.send, lambda value, **options: producer.send_many([value], **options)):
            start = time.monotonic()
            with pytest.raises(xl.WaitTimeoutError, match=r"timeout=0\.1 s, by a hand-over"):
                use(b"no", timeout=0.1)
            assert 0.1 <= time.monotonic() - start < PATIENCE / 2
        release.go_on()
        assert moving.result(PATIENCE)[0].ok
    assert topic.next_offset == 0


def test_e2_closing_a_producer_during_the_move_ends_its_sends_and_the_topic_moves(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    producer = topic.producer(EXCLUSIVE, linger=60)
    destination.call(queue_up)
    receipt = producer.send_async(b"queued")
    with HeldUp(engine) as release:
        moving = begin(engine.unload, "orders", destination.id)
        release.await_it()
        send = begin(producer.send, b"too late")
        within(producer.close)
        assert isinstance(send.exception(PATIENCE), xl.EngineClosedError)
        assert moved(moving.result(PATIENCE)) == [("orders", "owned")]
    assert receipt.result(timeout=0) == 0
    assert destination.call(take_writer_lock) == 2
    assert values(topic) == [b"queued"]


def test_e2_closing_the_source_s_engine_during_the_move_hands_over_what_is_accepted(
    path: str, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    source = xl.open(path, name="source")
    producer = source.topic("orders").producer(EXCLUSIVE, linger=60)
    destination.call(queue_up)
    receipts = [producer.send_async(b"%d" % number) for number in range(100)]
    with HeldUp(source) as release:
        moving = begin(topic.engine.unload, "orders", destination.id)
        release.await_it()
        closing = begin(source.close)
        time.sleep(0.05)
        release.go_on()
        closing.result(PATIENCE)
        assert moved(moving.result(PATIENCE)) == [("orders", "owned")]
    assert [receipt.result(timeout=0) for receipt in receipts] == list(range(100))
    assert destination.call(take_writer_lock) == 2
    assert destination.call(send, b"after") == 100


def test_e2_what_a_dropped_producer_has_accepted_is_in_the_log_before_the_move(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """The application has dropped the producer, but a message still lingers, and a thread waits for
    its outcome."""
    other = quick("other")
    receipts = [topic.producer(EXCLUSIVE, linger=20.0).send_async(b"x")]
    collect()
    assert topic.owner is not None
    [move] = engine.unload("orders", to=other.id)
    assert move.ok
    assert receipts[0].result(PATIENCE) == 0
    assert other.call(open_producer, EXCLUSIVE) == 2
    assert other.call(send, b"behind it") == 1


def test_e2_a_move_waits_for_no_linger_and_fences_no_other(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    """The topics that stay are not touched: their producers send on, and what they have queued
    stays queued."""
    destination = quick("destination")
    going, staying = (
        engine.topic(name).producer(EXCLUSIVE, linger=60) for name in ("going", "staying")
    )
    first = going.send_async(b"x")
    with HeldUp(engine) as release:
        moving = begin(engine.unload, "going", destination.id)
        release.await_it()
        assert first.done()
        second = staying.send_async(b"y")
        assert staying.send(b"z") == 1
        assert second.done()
        release.go_on()
        assert moving.result(PATIENCE)[0].ok
    assert (going.state, staying.state) == ("moved", "open")


def test_e2_a_move_waits_for_no_callback(engine: xl.Engine, topic: xl.Topic) -> None:
    """What is drained has its outcome, and somebody wants to be told, who takes his time: the
    engine goes on handing over, and beating, meanwhile."""
    over = threading.Event()
    with xl.open(engine.path, name="destination") as destination:
        producer = topic.producer(EXCLUSIVE, linger=60)
        receipt = producer.send_async(b"x")
        receipt.add_done_callback(lambda _: over.wait(PATIENCE))
        try:
            [move] = engine.unload("orders", to=destination.id, timeout=PATIENCE / 2)
            assert move.ok
            assert receipt.result(0) == 0
        finally:
            over.set()


@pytest.fixture
def told_late(engine: xl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has handed a topic over, and is slow to tell the producer."""
    release = engine.backend.hand_over.release

    def slowly(sessions: Any) -> Any:
        released = release(sessions)
        time.sleep(0.3)
        return released

    monkeypatch.setattr(engine.backend.hand_over, "release", slowly)


def test_c6_the_state_is_moved_as_soon_as_that_is_committed(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], told_late: None
) -> None:
    owner, destination = topic.producer(EXCLUSIVE), quick("destination")
    [move] = engine.unload("orders", to=destination.id)
    assert (move.state, owner.state) == ("assigned", "moved")


def test_e2_a_caller_is_told_meanwhile_that_it_was_moved(
    engine: xl.Engine,
    topic: xl.Topic,
    quick: Callable[..., Quick],
    told_late: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole hand-over happens between the first two steps of the look."""
    owner, destination = topic.producer(EXCLUSIVE), quick("destination")
    read = engine.ledger.read

    def read_late() -> Any:
        monkeypatch.setattr(engine.ledger, "read", read)
        assert moved(engine.unload("orders", to=destination.id)) == [("orders", "assigned")]
        return read()

    monkeypatch.setattr(engine.ledger, "read", read_late)
    assert owner.state == "moved"
    with pytest.raises(MOVED):
        owner.send(b"x")


# ---- E3: the best waiter of the destination ----------------------------------------------


def test_e3_the_destination_s_best_waiter_by_d1_has_it(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """The best of all waiters is on another engine. The best waiter of the destination gets the
    topic, whatever other options they have."""
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE)
    best = topic.producer_async(WAIT, priority=99)
    for name, priority, settle in (("low", 1, 0), ("high", 7, 60), ("late", 7, 0)):
        destination.call(queue_up, name=name, priority=priority, settle=settle)
        until(lambda name=name: name in [waiter.producer_name for waiter in topic.waiters])
    assert moved(engine.unload("orders", to=destination.id)) == [("orders", "owned")]
    assert topic.owner.producer_name == "high"
    assert [waiter.producer_name for waiter in topic.waiters][1:] == ["late", "low"]
    until(lambda: owner.state == "moved")  # it is told once that is committed
    assert not best.done()


def test_e3_the_stale_waiters_of_the_destination_are_passed_over(
    path: str, engine: xl.Engine, topic: xl.Topic
) -> None:
    with xl.open(path, name="destination") as destination:
        there = destination.topic("orders")
        first = topic.producer(EXCLUSIVE)
        second = topic.producer_async(WAIT, priority=10, follow=False)
        stale = there.producer_async(WAIT, priority=9, topic_epoch=1)
        live = there.producer_async(WAIT, name="live")
        first.close()
        owner = second.result(PATIENCE)
        assert moved(engine.unload("orders", to=destination.id)) == [("orders", "owned")]
        assert live.result(PATIENCE).topic_epoch == 3
        assert isinstance(stale.exception(PATIENCE), FENCED)
        assert (owner._session.epoch, topic.waiters) == (2, [])


# ---- E3: the reservation -----------------------------------------------------------------

KEPT_AWAY = {SHARED: xl.ProducerBusyError, EXCLUSIVE: FENCED, WAIT: xl.WaitTimeoutError}


@pytest.mark.parametrize("mode", KEPT_AWAY)
def test_e3_the_reservation_keeps_everybody_else_away(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], mode: str
) -> None:
    source, destination, other = quick("source"), quick("destination"), quick("other")
    source.call(open_producer, EXCLUSIVE)
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    kind = KEPT_AWAY[mode].__name__
    for process in (source, other):
        with pytest.raises(Failed, match=kind) as refused:
            process.call(open_producer, mode, timeout=0.1)
        if mode != WAIT:
            assert f"being handed over to engine 'destination' (id {destination.id})" in str(
                refused.value
            )
    with pytest.raises(KEPT_AWAY[mode]):
        topic.producer(mode, timeout=0.1)
    until(lambda: not topic.waiters)  # one that ends late leaves the queue later
    assert (topic.owner, topic.holders, topic.waiters, topic.epoch) == (None, [], [], 1)
    assert steps(engine.history("orders"))[-1] == ("assigned", "unload")
    assert destination.call(open_producer, EXCLUSIVE) == 2


def test_e3_only_force_takes_what_is_reserved(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """exclusive_with_fencing takes any topic (rule A); the hand-over ends there and then."""
    destination = quick("destination")
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    rival = topic.producer(FENCING)
    assert rival.topic_epoch == 1
    found = steps(engine.history("orders"))[-2:]
    assert found == [("cancel", "another owner came first"), ("grant", "fencing")]
    with pytest.raises(Failed, match="ProducerFencedError"):
        destination.call(open_producer, EXCLUSIVE)
    assert rows(engine)["transfers"] == []


@pytest.mark.parametrize(
    ("mode", "crowded"),
    [(mode, crowded) for mode in MODES for crowded in (True, False)][1:],
)
def test_e3_the_destination_s_next_producer_has_it(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], mode: str, crowded: bool
) -> None:
    """The request of the destination is granted in any mode, even if others wait. Those continue to
    wait, also if the request is to fence, which is not necessary. Only a shared request that others
    wait behind is not granted."""
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE)
    waiter = topic.producer_async(WAIT, priority=9) if crowded else None
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    assert owner.state == "moved"
    assert destination.call(open_producer, mode, timeout=PATIENCE) == (1 if mode == SHARED else 2)
    assert destination.call(send, b"mine") == 0
    assert [holder.engine_id for holder in topic.holders] == [destination.id]
    assert rows(engine)["transfers"] == []
    if waiter is not None:
        assert not waiter.done()
        destination.end()
        assert waiter.result(PATIENCE).send(b"next") == 1


def test_a3_a_reservation_takes_no_shared_producer_past_a_waiter(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    waiter = topic.producer_async(WAIT)
    with pytest.raises(Failed, match="ProducerBusyError"):
        destination.call(open_producer, SHARED)
    assert not waiter.done()
    assert destination.call(open_producer, EXCLUSIVE) == 1
    destination.end()
    assert waiter.result(PATIENCE).topic_epoch == 2


@pytest.mark.parametrize("mode", [WAIT, EXCLUSIVE, FENCING])
@pytest.mark.parametrize("queued", [True, False])
def test_e1_a_hand_over_gives_a_new_epoch_also_to_who_reconnects(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], mode: str, queued: bool
) -> None:
    """A producer with topic_epoch= of the topic that is handed over does not keep it:
    the producer that had it must not be able to write any more."""
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE)
    if queued:
        destination.call(queue_up, topic_epoch=1)
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    if queued:
        assert destination.call(take_writer_lock) == 2
    else:
        assert destination.call(open_producer, mode, topic_epoch=1) == 2
    with pytest.raises(xl.ProducerMovedError):
        owner.send(b"too late")
    assert destination.call(send, b"mine") == 0


def test_e3_a_reservation_is_for_one_producer(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    waiter = topic.producer_async(WAIT)
    destination.call(open_producer, EXCLUSIVE)
    with pytest.raises(Failed, match="ProducerFencedError"):
        destination.call(open_producer, EXCLUSIVE)
    destination.end()
    assert waiter.result(PATIENCE).topic_epoch == 2


@pytest.mark.long
def test_e3_after_the_deadline_the_ordinary_waiter_is_promoted_by_itself(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """Without any call, the waiter's own engine retries at the deadline, not before."""
    destination, low, high = quick("destination"), quick("low"), quick("high")
    owner = topic.producer(EXCLUSIVE)
    low.call(queue_up, name="low")
    high.call(queue_up, name="high", priority=1)
    started: list[float] = []

    def move_in_time() -> bool:  # again if the machine was too slow to release it until then
        started.append(time.monotonic())
        [move] = engine.unload("orders", to=destination.id, timeout=3.0)
        return move.state == "assigned"

    until(move_in_time)
    assert owner.state == "moved"
    assert high.call(take_writer_lock) == 2
    assert 3.0 <= time.monotonic() - started[-1] < PATIENCE / 2
    assert steps(engine.history("orders"))[-2:] == [("cancel", "deadline"), ("grant", "promotion")]
    with pytest.raises(Failed, match="ProducerFencedError"):
        destination.call(open_producer, EXCLUSIVE)


@pytest.mark.long
def test_e3_a_better_waiter_that_comes_during_the_reservation_is_promoted_at_its_end(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination, low, high = quick("destination"), quick("low"), quick("high")
    owner = topic.producer(EXCLUSIVE)
    low.call(queue_up)
    engine.unload("orders", to=destination.id, timeout=3.0)
    high.call(queue_up, priority=1)
    assert (topic.owner, owner.state) == (None, "moved")
    assert until(lambda: topic.owner).engine_id == high.id


def test_e3_queueing_for_what_is_reserved_wakes_no_engine(path: str) -> None:
    """The first one in the queue has been told when the reservation ends, and sleeps until
    then, however many others come and go behind it."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xl.open(path, name=f"e{i}")) for i in range(3)]
        first, crowd, destination = [engine.topic("orders") for engine in engines]
        engines[0].unload("orders", to=engines[2].id, timeout=PATIENCE)
        waiter = first.producer_async(WAIT, priority=9)
        before = quiet_wake_ups([engines[0], engines[2]])
        futures = [crowd.producer_async(WAIT) for _ in range(50)]
        assert all(future.cancel() for future in futures)
        assert quiet_wake_ups([engines[0], engines[2]]) == before
        assert not waiter.done()
        assert destination.producer(EXCLUSIVE).topic_epoch == 1


def test_e3_after_the_deadline_the_topic_is_free_for_everybody(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    for mode in MODES:
        topic.producer(EXCLUSIVE).close()
        engine.unload("orders", to=destination.id, timeout=0.2)
        time.sleep(0.21)
        with topic.producer(mode) as producer:
            producer.send(b"x")


def test_e3_a_move_without_time_moves_nothing(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    with topic.producer(EXCLUSIVE) as producer:
        [move] = engine.unload("orders", to=destination.id, timeout=0)
        assert (move.state, move.source.engine_id) == ("failed", engine.id)
        assert producer.send(b"x") == 0
    [move] = engine.unload("orders", to=destination.id, timeout=0)
    assert (move.state, move.source) == ("failed", None)
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


def test_e2_an_empty_batch_is_sent_where_the_producer_has_moved(path: str) -> None:
    first, second = xl.open(path), xl.open(path)
    with second, first.topic("orders").producer("exclusive") as producer:
        producer.send(b"by the first")
        assert first.unload("orders", to=second.id, timeout=PATIENCE)[0].ok
        assert producer.send(b"by the second") == 1
        first.close()
        assert producer.send_many([]) == range(2, 2)
