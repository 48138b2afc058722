"""Rule E5: every change of ownership is told in `__events__`, by the transaction that makes it.

This topic has each change of ownership of a ledger: the owners, the time and the reason. It
must not miss a change, nor have one that never was, even if a process dies before or after a
commit.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.events import EVENTS, Event
from exclusivelog.local.storage.tables import owner_of
from testing.handovers import (
    KEEPALIVE,
    KILLED,
    Chronicle,
    HeldUp,
    Quick,
    begin,
    begin_to_wait,
    fall_at,
    freeze,
    queue_up,
    steps,
    take_writer_lock,
)
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    State,
    close_producer,
    open_producer,
    rows,
    until,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

FENCED = xl.ProducerFencedError


class Diary:
    """What is new in `__events__` since one looked last."""

    def __init__(self, engine: xl.Engine) -> None:
        self._reader = engine.topic(EVENTS).reader()

    def new(self) -> list[Event]:
        return [Event.loads(message.value) for message in self._reader]

    def steps(self) -> list[tuple[str, str]]:
        return steps(self.new())


@pytest.fixture
def diary(engine: xl.Engine) -> Diary:
    return Diary(engine)


# ---- what is told ------------------------------------------------------------------------


def test_e5_events_of_earlier_versions_have_the_kinds_of_today() -> None:
    today = Event(1, "", 0, "revoke", "claimed", 0, None, None, "workers", "part-1", 7)
    former = today.dumps().replace(b'"revoke"', b'"sever"')
    assert former != today.dumps()
    assert Event.loads(former) == today


def test_e5_grants_and_releases(engine: xl.Engine, topic: xl.Topic, diary: Diary) -> None:
    owner = topic.producer(EXCLUSIVE)
    assert diary.steps() == [("grant", "request")]
    waiter = topic.producer_async(WAIT)
    assert diary.steps() == []  # a waiter owns nothing
    owner.close()
    assert diary.steps() == [("release", "closed"), ("grant", "promotion")]
    waiter.result(PATIENCE).close()
    assert diary.steps() == [("release", "closed")]
    with topic.producer(EXCLUSIVE, topic_epoch=2):
        assert diary.steps() == [("grant", "reconnect")]
    with topic.producer(FENCING):  # there was no owner to be fenced
        assert diary.steps() == [("release", "closed"), ("grant", "request")]
    Chronicle(engine).read()


def test_e5_evictions(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """Owners that lose a topic without releasing it: dead, unresponsive and fenced ones."""
    owner = topic.producer(EXCLUSIVE)
    rival = topic.producer(FENCING)
    assert diary.steps() == [("grant", "request"), ("evict", "fenced"), ("grant", "fencing")]
    rival.close()
    diary.new()
    for how in ("dead", "hung"):
        worker = quick(how)
        worker.call(open_producer, EXCLUSIVE)
        waiter = topic.producer_async(WAIT)
        if how == "dead":
            worker.kill()
        else:
            freeze(worker, KEEPALIVE)
        waiter.result(PATIENCE).close()
        assert diary.steps() == [
            ("grant", "request"),
            ("evict", how),
            ("grant", "promotion"),
            ("release", "closed"),
        ]
    assert owner.state == "fenced"
    Chronicle(engine).read()


def test_e5_a_hand_over_step_by_step(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """From its beginning to its end, whether the destination waits or not."""
    for waiting in (True, False):
        source, destination = quick("source"), quick("destination")
        source.call(open_producer, WAIT)
        if waiting:
            destination.call(queue_up)
        diary.new()
        engine.unload("orders", to=destination.id)
        told = diary.steps()
        assert told[:3] == [
            ("releasing", "unload"),
            ("release", "hand-over"),
            ("assigned", "unload"),
        ]
        if not waiting:
            assert told[3:] == []
            destination.call(queue_up)
            told += diary.steps()
        assert told[3:] == [("grant", "hand-over")]
        destination.call(take_writer_lock)
        destination.call(close_producer)
        source.end()


@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("end", [("release", "closed"), ("evict", "dead")])
def test_e5_a_hand_over_whose_source_is_closed_or_dies_meanwhile(
    engine: xl.Engine,
    diary: Diary,
    quick: Callable[..., Quick],
    end: tuple[str, str],
    waiting: bool,
) -> None:
    """The topic is assigned all the same, which is told like any step."""
    source, destination = quick("source"), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    source.call(hold_up_releases)
    if waiting:
        destination.call(queue_up)
    diary.new()
    moving = begin(engine.unload, "orders", destination.id)
    until(lambda: source.call(has_been_asked))
    if end == ("evict", "dead"):
        source.kill()
    else:
        source.call(close_producer)
    assert moving.result(PATIENCE)[0].ok
    told = diary.steps()
    assert told[:3] == [("releasing", "unload"), end, ("assigned", "unload")]
    assert told[3:] == ([("grant", "hand-over")] if waiting else [])
    if waiting:
        assert destination.call(take_writer_lock) == 2
    if source.process.is_alive():
        source.kill()  # closing its engine would wait for what is held up


def hold_up_releases(state: State) -> None:
    """From now on this engine is asked to hand topics over, and does not."""
    held = state.kept["held"] = HeldUp(state.engine)
    held.__enter__()


def has_been_asked(state: State) -> bool:
    return bool(state.kept["held"].reached)


def test_e5_an_eviction_says_whose_engine_it_was(
    engine: xl.Engine, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """Its slot is another engine's by now, as after any restart."""
    old = quick("old", properties={"address": "host:1"})
    old.call(open_producer, EXCLUSIVE)
    old.kill()
    new = quick("new", properties={"address": "host:2"})
    new.call(open_producer, EXCLUSIVE)
    evicted = next(event for event in diary.new() if event.kind == "evict")
    assert evicted.source["engine_properties"] == {"address": "host:1"}


def test_e5_a_reserved_topic_that_is_deleted_or_shared(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """Both end a hand-over, and no session becomes owner."""
    destination = quick("destination")
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    assert destination.call(open_producer, SHARED) == 0
    destination.call(close_producer)
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    engine.delete_topic("orders")
    assert diary.steps() == [
        ("assigned", "unload"),
        ("cancel", "a shared producer of it came first"),
        ("assigned", "unload"),
        ("cancel", "the topic was deleted"),
    ]
    assert rows(engine)["transfers"] == []


@pytest.mark.parametrize(
    "reason", ["deadline", "cancelled", "the destination is gone", "another owner came first"]
)
def test_e5_a_hand_over_that_comes_to_nothing(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick], reason: str
) -> None:
    destination = quick("destination")
    timeout = 0.2 if reason == "deadline" else PATIENCE
    engine.unload("orders", to=destination.id, timeout=timeout)
    assert diary.steps() == [("assigned", "unload")]
    mode = FENCING if reason == "another owner came first" else EXCLUSIVE
    if reason == "deadline":
        time.sleep(0.25)
    elif reason == "cancelled":
        engine.cancel_unload("orders")
    elif reason == "the destination is gone":
        destination.kill()
    with topic.producer(mode):
        told = diary.new()
    assert told[0].kind == "cancel"
    assert told[0].reason == reason
    assert (told[0].source, told[0].target["engine"]) == (None, destination.id)
    assert told[1].kind == "grant"


def test_e5_the_deadline_is_told_when_it_has_passed(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """The call has returned because the source did not answer in time: the move is over, and
    a reader that follows must see that."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    diary.new()
    [move] = engine.unload("orders", to=destination.id, timeout=0.3)
    assert move.state == "failed"
    told = diary.new()
    assert steps(told) == [("releasing", "unload"), ("cancel", "deadline")]
    assert told[1].source["engine"] == source.id
    assert rows(engine)["transfers"] == []


def test_e5_an_interrupted_move_is_not_said_to_have_met_its_deadline(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick]
) -> None:
    source, destination, third = quick("source", keepalive=None), quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    begin_to_wait(third, destination.id)
    third.signal(signal.SIGINT)
    until(lambda: rows(engine)["transfers"] == [])
    last = diary.new()[-1]
    assert last.kind == "cancel"
    assert last.reason != "deadline"


# ---- who, and what about him -------------------------------------------------------------


def test_e5_an_event_says_who_and_whence_and_where_to(
    path: str, engine: xl.Engine, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """A record has the engines' and producers' properties of both sides, which a program needs to
    reroute its clients."""
    before = int(time.time() * 1000)
    destination = quick("destination", properties={"address": "unix:/d"})
    with xl.open(path, name="source", properties={"address": "unix:/s"}) as source:
        owner = source.topic("orders").producer(
            EXCLUSIVE, name="old", properties={"role": "leader"}, priority=3
        )
        destination.call(queue_up, name="new", priority=7, properties={"role": "next"})
        engine.unload("orders", to=destination.id)
        releasing, release, assigned, grant = diary.new()[-4:]
        assert owner.state == "moved"
    old = {
        "engine": source.id,
        "engine_name": "source",
        "pid": source.info.pid,
        "producer": "old",
        "properties": {"role": "leader"},
        "engine_properties": {"address": "unix:/s"},
    }
    there = {
        "engine": destination.id,
        "engine_name": "destination",
        "pid": destination.pid,
        "producer": None,
        "properties": {},
        "engine_properties": {"address": "unix:/d"},
    }
    new = {**there, "producer": "new", "properties": {"role": "next"}}
    assert [event.source for event in (releasing, release, assigned, grant)] == [old] * 3 + [None]
    assert [event.target for event in (releasing, release, assigned, grant)] == [there] * 3 + [new]
    assert [event.priority for event in (releasing, release, assigned, grant)] == [3, 3, 3, 7]
    assert [event.topic for event in (releasing, grant)] == ["orders"] * 2
    assert before <= releasing.time <= release.time <= grant.time <= int(time.time() * 1000)


def test_e5_an_eviction_says_who_did_it(engine: xl.Engine, topic: xl.Topic, diary: Diary) -> None:
    first = topic.producer(EXCLUSIVE, name="first", priority=-2, properties={"x": "1"})
    second = topic.producer(FENCING, name="second", priority=5)
    _, evict, grant = diary.new()
    assert (evict.source["producer"], evict.target["producer"]) == ("first", "second")
    assert (evict.source["properties"], evict.epoch) == ({"x": "1"}, 1)
    assert (grant.source, grant.target["producer"], grant.epoch) == (None, "second", 2)
    assert (grant.priority, first.state, second.state) == (5, "fenced", "open")


def test_e5_a_record_is_json_under_the_topic_s_name(
    engine: xl.Engine, topic: xl.Topic, diary: Diary
) -> None:
    """So that it can be read without this library's classes."""
    with topic.producer(EXCLUSIVE, name="ü"):
        pass
    messages = list(engine.topic(EVENTS).reader())
    assert [message.key for message in messages] == [b"orders", b"orders"]
    facts = json.loads(messages[0].value)
    assert set(facts) == {"time", "topic", "epoch", "kind", "reason", "priority", "from", "to"}
    assert (facts["kind"], facts["from"], facts["to"]["producer"]) == ("grant", None, "ü")
    event = Event.loads(messages[0].value)
    assert Event.loads(event.dumps()) == event == diary.new()[0]


# ---- in the same transaction -------------------------------------------------------------


CHANGES: dict[str, tuple[str, str]] = {  # point: what it would tell, what has been told before
    "heir, {} request": ("grant", ""),
    "leaver, {} release": ("release", "grant"),
    "coordinator, {} begin": ("releasing", "grant"),
    "source, {} release": ("assigned", "grant releasing"),
    "canceller, {} cancel": ("cancel", "assigned"),
}


def do(state: Any, kind: str, to: str) -> None:
    """Make the change of that kind."""
    if kind == "":
        state.topic.producer(EXCLUSIVE)
    elif kind == "release":
        state.producer.close()
    elif kind == "cancel":
        state.engine.cancel_unload("orders")
    else:
        state.engine.unload("orders", to)


@pytest.mark.parametrize("moment", ["committing", "committed"])
@pytest.mark.parametrize("point", CHANGES)
def test_e5_a_crash_leaves_the_change_and_its_event_or_neither(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], point: str, moment: str
) -> None:
    """Killed right before the commit, or right after it. No engine evicts the dead meanwhile, so
    that what is told is what it has done itself."""
    worker, other = quick("worker"), quick("other")
    kind, before = CHANGES[point]
    if "grant" in before:
        worker.call(open_producer, EXCLUSIVE)
    if before == "assigned":
        engine.unload("orders", to=other.id, timeout=PATIENCE)
    worker.call(fall_at, point.format(moment), signal.SIGKILL)
    worker.start(do, "" if point.startswith("heir") else kind, other.id)
    worker.process.join(PATIENCE)
    assert worker.process.exitcode in KILLED
    kinds = [event.kind for event in engine.history("orders")]
    owner, transfers = owner_session(topic), len(rows(engine)["transfers"])
    expected = before.split()
    if moment == "committed":
        expected += ["release", "assigned"] if "source" in point else [kind]
    assert kinds == expected
    holds, last = [k for k in kinds if k in ("grant", "release")][-1:] == ["grant"], kinds[-1:]
    assert (owner is not None) == holds
    assert bool(transfers) == (last in (["releasing"], ["assigned"]))
    assert topic.epoch == kinds.count("grant")
    assert engine.verify().ok


def owner_session(topic: xl.Topic) -> Any:
    """Who owns the topic, alive or dead, by the tables."""
    with topic.engine.ledger.read() as tables:
        return owner_of(tables, tables.topics.get(topic.id))


def test_e5_refused_requests_leave_no_event(
    engine: xl.Engine, topic: xl.Topic, diary: Diary, quick: Callable[..., Quick]
) -> None:
    """Everything that can be refused, while the topic has an owner, and while it is reserved."""
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE, name="owner")
    diary.new()
    for _ in range(2):
        for mode, error, options in (
            (SHARED, xl.ProducerBusyError, {}),
            (EXCLUSIVE, FENCED, {}),
            (WAIT, xl.WaitTimeoutError, {"timeout": 0.01}),
            (WAIT, FENCED, {"topic_epoch": 0}),
            (FENCING, xl.InvalidEpochError, {"topic_epoch": 9}),
            ("exclusiv", ValueError, {}),
        ):
            with pytest.raises(error):
                topic.producer(mode, **options)
        assert topic.producer_async(WAIT).cancel()
        assert diary.new() == []
        if owner.state == "open":
            with pytest.raises(xl.LedgerError):
                engine.unload("orders", to="nobody")
            with pytest.raises(xl.TopicNotFoundError):
                engine.unload(["orders", "missing"], to=destination.id)
            assert engine.cancel_unload("orders") == []
            assert diary.new() == []
            engine.unload("orders", to=destination.id, timeout=PATIENCE)
            diary.new()
    assert owner.state == "moved"


def test_e5_shared_producers_own_nothing(topic: xl.Topic, diary: Diary) -> None:
    with topic.producer(SHARED), topic.producer(SHARED):
        pass
    assert diary.new() == []


# ---- reading it --------------------------------------------------------------------------


def test_e5_the_history_of_one_topic_or_of_all(engine: xl.Engine, topic: xl.Topic) -> None:
    assert list(engine.history()) == []
    assert list(engine.history("missing")) == []
    for name in ("orders", "other", "orders"):
        with engine.topic(name).producer(EXCLUSIVE):
            pass
    assert [event.topic for event in engine.history()] == ["orders"] * 2 + ["other"] * 2 + [
        "orders"
    ] * 2
    assert [event.epoch for event in engine.history("orders")] == [1, 1, 2, 2]
    assert steps(engine.history("other")) == [("grant", "request"), ("release", "closed")]
    engine.delete_topic("other")
    assert len(list(engine.history("other"))) == 2  # it has been
    assert engine.verify().ok


@pytest.mark.long
def test_e5_the_command_shows_the_history(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE, name="p1", priority=4)
    destination.call(queue_up, name="p2")
    with engine.topic("other").producer(EXCLUSIVE):
        engine.unload("orders", to=destination.id)
    assert owner.state == "moved"
    for arguments, count in ((["orders"], 5), ([], 7)):
        table = table_of("owners", "--history", path, *arguments)
        assert len(table) == count + 1
        assert table[0][1:] == ["topic", "epoch", "what", "reason", "from", "to", "priority"]
    table = table_of("owners", "--history", path, "orders")
    assert [row[3] for row in table[1:]] == ["grant", "releasing", "release", "assigned", "grant"]
    assert [row[2] for row in table[1:]] == ["1", "1", "1", "1", "2"]
    assert table[2][5] == f"p1 of test (id {engine.id}, pid {engine.info.pid})"
    assert table[2][6] == f"destination (id {destination.id}, pid {destination.pid})"
    assert table[5][5:7] == ["-", f"p2 of destination (id {destination.id}, pid {destination.pid})"]


def table_of(*arguments: str) -> list[list[str]]:
    """What the command prints."""
    command = [sys.executable, "-m", "exclusivelog.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_e5_a_reader_can_follow_it_across_processes(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """Also one that began before anything had happened, and one that was away for a while."""
    reader, away = engine.topic(EVENTS).reader(), engine.topic(EVENTS).reader(group="monitor")
    worker = quick("worker")
    following = begin(reader.read_next, PATIENCE)
    time.sleep(0.05)
    worker.call(open_producer, EXCLUSIVE)
    first = Event.loads(following.result(PATIENCE).value)
    assert (first.kind, first.target["engine"]) == ("grant", worker.id)
    assert Event.loads(away.read_next(PATIENCE).value) == first
    away.commit()
    away.close()
    worker.end()
    assert Event.loads(reader.read_next(PATIENCE).value).kind == "release"
    with engine.topic(EVENTS).reader(group="monitor") as again:
        assert Event.loads(again.read_next(PATIENCE).value).kind == "release"


def test_e5_it_survives_that_everybody_leaves(path: str) -> None:
    for _ in range(3):
        with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE):
            pass
    with xl.open(path, readonly=True) as onlooker:
        events = list(onlooker.history())
    assert [(event.kind, event.epoch) for event in events] == [
        ("grant", 1),
        ("release", 1),
        ("grant", 2),
        ("release", 2),
        ("grant", 3),
        ("release", 3),
    ]


def test_e5_hundreds_of_changes_are_told_in_order(engine: xl.Engine, topic: xl.Topic) -> None:
    chronicle = Chronicle(engine)
    for _ in range(100):
        with topic.producer(EXCLUSIVE), topic.producer(FENCING):
            pass
    assert len(chronicle.read()) == 400
    assert len(chronicle.reigns) == 200
    assert engine.verify().ok


# ---- it is the library's own -------------------------------------------------------------


def test_e5_it_is_listed_nowhere(engine: xl.Engine, topic: xl.Topic, path: str) -> None:
    with topic.producer(EXCLUSIVE):
        assert engine.topics() == ["orders"]
        assert (engine.stats()["topics"], engine.verify().topics) == (1, 1)
        with pytest.raises(xl.TopicNotFoundError):
            engine.unload("__", to=engine.id)
        with pytest.raises(xl.TopicNotFoundError):
            engine.unload(EVENTS, to=engine.id)
        assert [move.topic for move in engine.unload("*", to=engine.id)] == ["orders"]


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
def test_e5_no_producer_writes_it(engine: xl.Engine, topic: xl.Topic, mode: str) -> None:
    for _ in range(2):  # before there is one, and after
        events = engine.topic(EVENTS)
        for ask in (events.producer, events.producer_async):
            with pytest.raises(ValueError, match="can only be read"):
                ask(mode)
        with topic.producer(EXCLUSIVE):
            pass
    assert (events.holders, events.waiters, events.owner) == ([], [], None)
    assert events.next_offset == 4


def test_e5_no_call_deletes_or_creates_what_is_the_library_s(engine: xl.Engine) -> None:
    with engine.topic("orders").producer(EXCLUSIVE):
        with pytest.raises(ValueError, match="cannot be deleted"):
            engine.delete_topic(EVENTS)
        for name in ("__events", "__mine__", "__"):
            with pytest.raises(ValueError, match="reserved for the library"):
                engine.topic(name)
    assert len(list(engine.history())) == 2


def test_e5_no_call_ends_it(engine: xl.Engine, topic: xl.Topic) -> None:
    """Who follows it would take the end for good, while events are still written behind it."""
    for _ in range(2):  # before there is one, and after
        events = engine.topic(EVENTS)
        with pytest.raises(ValueError, match="can only be read"):
            events.terminate()
        with topic.producer(EXCLUSIVE):
            pass
    with pytest.raises(xl.WaitTimeoutError):
        events.reader("latest").read_next(timeout=0)


def test_e5_no_state_is_kept_in_it(engine: xl.Engine, topic: xl.Topic) -> None:
    """A snapshot would say what may be trimmed."""
    with topic.producer(EXCLUSIVE):
        for make in (xl.SharedMap, lambda events: xl.SharedState(events, dict, lambda s, _: s)):
            with pytest.raises(ValueError, match="can only be read"):
                make(engine.topic(EVENTS))


def test_e5_no_call_moves_it(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    with topic.producer(EXCLUSIVE):
        before = rows(engine)
        with pytest.raises((ValueError, xl.TopicNotFoundError)):
            engine.unload([EVENTS], to=destination.id)
        with pytest.raises((ValueError, xl.TopicNotFoundError)):
            engine.unload(["orders", EVENTS], to=destination.id)
        assert rows(engine) == before
