"""An engine on a cluster, over logs in memory; tests/conformance has what all engines promise."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime as dt
import random
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.cluster import following, moving, waiting
from exclusivelog.cluster.following import Owning, TopicLog
from exclusivelog.cluster.frames import Frame, Grant, Release, decode, sealed
from exclusivelog.cluster.memory import (
    Chances,
    MemoryLog,
    MemoryPlace,
    UnreliableLog,
    _Link,
)
from exclusivelog.cluster.ordered import Answer, Answered, Position, Record, Tail, ignore
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    forked,
    until,
    values,
    within,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def raw(path: str, topic: str = "orders") -> Iterator[Record]:
    """All that the topic's log has."""
    tail = MemoryPlace.named(path.partition("://")[2]).open(topic).tail()
    while (record := tail.next(0)) is not None:
        yield record


def records(path: str, topic: str = "orders") -> list[object]:
    """What the topic's log has, foreign records left out."""
    return [parsed for record in raw(path, topic) if (parsed := decode(record.data)) is not None]


class Late(_Link):
    """Answers in a thread of its own, as clusters do; its tails show the first record alone."""

    def append(self, data: bytes, answered: Answered = ignore) -> None:
        answers: list[Answer] = []
        super().append(data, answers.append)
        threading.Thread(target=lambda: [answered(answer) for answer in answers]).start()

    def tail(self, after: Position | None = None) -> Tail:
        return LateTail(super().tail(after))


class LateTail:
    def __init__(self, tail: Tail) -> None:
        self._tail, self._found = tail, False

    def next(self, timeout: float | None = None) -> Record | None:
        if self._found:
            time.sleep(0.01)
            return None
        record = self._tail.next(timeout)
        self._found = record is not None
        return record

    def close(self) -> None:
        self._tail.close()


@pytest.mark.rule("J2")
def test_j2_an_answer_behind_all_that_was_read_is_the_next_record(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = collections.defaultdict[str, MemoryLog](MemoryLog)
    log = logs["orders"]

    def open_late(place: MemoryPlace, name: str) -> _Link:
        return (Late if name == "orders" else _Link)(logs[name])

    monkeypatch.setattr(MemoryPlace, "open", open_late)
    with xl.open(path) as engine, engine.topic("orders").producer(EXCLUSIVE) as producer:
        offsets = [producer.send(b"%d" % n, timeout=PATIENCE) for n in range(9)]
        assert offsets == list(range(9))
        log.append(b"another program's")
        with pytest.raises(xl.WaitTimeoutError):  # something is in between, unread
            producer.send(b"9", timeout=0.1)
        monkeypatch.setattr(LateTail, "next", lambda self, timeout=None: self._tail.next(timeout))
        producer.flush(PATIENCE)


@pytest.mark.rule("J2")
def test_j2_a_send_returns_once_its_frame_is_read_back(path: str, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE, name="p") as producer:
        assert producer.send(b"one") == 0
        assert producer.send_many([b"two", b"three"]) == range(1, 3)
    grant, one, many, release = records(path)
    assert isinstance(grant, Grant)
    assert isinstance(release, Release)
    assert isinstance(one, Frame)
    assert isinstance(many, Frame)
    assert (one.first, one.end, many.first, many.end) == (0, 1, 1, 3)
    assert {record.session for record in (grant, one, many, release)} == {grant.session}


@pytest.mark.rule("B2", "B10")
def test_b10_what_an_owner_sends_behind_anothers_grant_fails(
    topic: xl.Topic, other: xl.Engine
) -> None:
    lost: list[BaseException] = []
    owner = topic.producer(EXCLUSIVE, on_fenced=lambda _, error: lost.append(error))
    owner.send(b"counts")
    rival = other.topic("orders").producer(FENCING)
    rival.send(b"rival")
    with pytest.raises(xl.ProducerFencedError) as error:
        owner.send(b"late")
    assert error.value.holder is not None
    assert error.value.holder.engine_name == "other"
    until(lambda: lost == [error.value])
    assert values(topic) == [b"counts", b"rival"]
    assert (owner.state, rival.topic_epoch) == ("fenced", 2)


@pytest.mark.rule("B2", "K4")
def test_k4_an_owner_pauses_for_a_request_that_fences(
    topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an owner that sends all the time could come first each time: a grant counts only if no
    record comes between it and what its engine has read."""
    monkeypatch.setattr(following, "HELD_SECONDS", PATIENCE)
    ask, lost, held = TopicLog.ask, list[int](), list[Any]()

    def ask_late(log: TopicLog, *arguments: Any) -> Owning | None:
        """The first attempt of the other engine loses the race."""
        if log.host is not other.backend or log.name != "orders":
            return ask(log, *arguments)
        if not lost:
            lost.append(producer.send(b"in between"))
            return None
        until(lambda: producer._sender.session.owning.writer.held)
        held.append(producer.send_async(b"held"))
        return ask(log, *arguments)

    monkeypatch.setattr(TopicLog, "ask", ask_late)
    producer = topic.producer(EXCLUSIVE)
    assert other.topic("orders").producer(FENCING).topic_epoch == 2
    assert (lost, len(held)) == ([0], 1)
    with pytest.raises(xl.ProducerFencedError):
        held[0].result(PATIENCE)
    assert values(topic) == [b"in between"]


@pytest.mark.rule("K4")
def test_k4_an_owner_that_has_paused_goes_on(topic: xl.Topic, other: xl.Engine) -> None:
    """Whoever asked for the pause may have died."""
    producer = topic.producer(EXCLUSIVE)
    other.backend.topics.named("orders").publish(waiting.Hold(1))
    until(lambda: producer._sender.session.owning.writer.held)
    assert within(lambda: producer.send(b"x")) == 0
    assert not producer._sender.session.owning.writer.held


@pytest.mark.rule("C2", "C1")
def test_c2_a_waiter_gets_what_a_closed_engine_had(path: str, topic: xl.Topic) -> None:
    gone = xl.open(path, name="gone")
    owner = gone.topic("orders").producer(EXCLUSIVE)
    waiter = topic.producer_async(WAIT)
    assert len(topic.waiters) == 1
    assert owner.state == "open"
    gone.close()
    assert waiter.result(timeout=PATIENCE).topic_epoch == 2


@pytest.mark.rule("C2")
def test_c2_the_topic_of_an_engine_that_is_gone_is_free(path: str, topic: xl.Topic) -> None:
    gone = xl.open(path, name="gone")
    producer = gone.topic("orders").producer(EXCLUSIVE)
    waiter = topic.producer_async(WAIT)
    assert not waiter.done()
    gone.backend.place.close()  # as if its process had been killed: nothing is released
    assert waiter.result(timeout=PATIENCE).topic_epoch == 2
    assert [event.reason for event in topic.engine.history("orders") if event.kind == "evict"] == [
        "dead"
    ]
    with pytest.raises(xl.ProducerFencedError):
        producer.send(b"late")
    gone.close()


@pytest.mark.rule("D1", "D4")
def test_d1_the_order_of_waiters_is_one_over_all_engines(topic: xl.Topic, other: xl.Engine) -> None:
    there = other.topic("orders")
    owner = topic.producer(EXCLUSIVE)
    waiters = {
        name: place.producer_async(WAIT, name=name, priority=priority)
        for name, place, priority in (
            ("low", topic, -1),
            ("first", there, 0),
            ("second", topic, 0),
            ("high", there, 9),
        )
    }
    order = ["high", "first", "second", "low"]
    for place in (topic, there):
        assert [waiter.producer_name for waiter in place.waiters] == order
    waiters["gives up"] = there.producer_async(WAIT, name="gives up", priority=10)
    assert waiters.pop("gives up").cancel()
    owner.close()
    for epoch, name in enumerate(order, 2):
        with waiters[name].result(timeout=PATIENCE) as producer:
            assert producer.topic_epoch == epoch
    assert topic.waiters == []


@pytest.mark.rule("D5")
def test_d5_a_waiter_times_out_and_leaves_nothing(topic: xl.Topic, other: xl.Engine) -> None:
    owner = topic.producer(EXCLUSIVE)
    with pytest.raises(xl.WaitTimeoutError):
        other.topic("orders").producer(WAIT, timeout=0.05)
    until(lambda: topic.waiters == [])
    owner.close()
    assert (topic.owner, topic.epoch) == (None, 1)


@pytest.mark.rule("D4")
def test_d4_a_late_record_of_a_waiter_that_has_left_blocks_no_other(
    path: str, topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine lives, and answers that it waits no more, again if that answer was lost."""
    monkeypatch.setattr("exclusivelog.cluster.appending.RESEND_SECONDS", 0.05)
    append, lost = _Link.append, []

    def lose_the_first_leave(link: _Link, data: bytes, *answered: Any) -> None:
        if isinstance(waiting.decode(data), waiting.Leave) and not lost:
            lost.append(data)
        else:
            append(link, data, *answered)

    monkeypatch.setattr(_Link, "append", lose_the_first_leave)
    owner = topic.producer(EXCLUSIVE)
    ghost = waiting.Wait(1, other.id, "other", 1, "ghost", 99, 0)
    there = other.topic("orders").producer_async(WAIT)
    MemoryPlace.named(path.partition("://")[2]).open("orders").append(waiting.encode(ghost))
    until(lambda: lost and len(topic.waiters) == 1 and topic.waiters[0].producer_name != "ghost")
    owner.close()
    assert there.result(timeout=PATIENCE).topic_epoch == 2


@pytest.mark.rule("A1")
def test_a1_a_producer_that_fences_ends_the_waiters_of_all_engines(
    topic: xl.Topic, other: xl.Engine
) -> None:
    owner = topic.producer(EXCLUSIVE)
    waiters = [place.producer_async(WAIT) for place in (topic, other.topic("orders"))]
    rival = topic.producer(FENCING)
    for waiter in waiters:
        assert isinstance(waiter.exception(PATIENCE), xl.ProducerFencedError)
    assert (owner.state, rival.state, topic.waiters) == ("fenced", "open", [])


def test_a_dropped_producer_gives_the_topic_back(topic: xl.Topic) -> None:
    producer = topic.producer(EXCLUSIVE)
    receipt = producer.send_async(b"last words")
    del producer
    assert receipt.result(PATIENCE) == 0
    until(lambda: topic.owner is None)


@pytest.mark.rule("A6")
def test_a6_a_request_releases_dropped_producers_of_its_own_topic_alone(
    topic: xl.Topic, engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is interrupted while it does loses none."""
    released: list[str] = []

    def interrupted(owning: Owning, timeout: float, reason: str = "closed") -> None:
        released.append(owning.topic.name)
        raise KeyboardInterrupt

    worker = engine.backend.worker
    idle = engine.topic("idle").producer(EXCLUSIVE)
    worker.stop()  # else it would release them first
    worker.join()
    producer = topic.producer(EXCLUSIVE)
    del idle, producer
    with monkeypatch.context() as patched:
        patched.setattr(Owning, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            topic.producer(EXCLUSIVE)
    assert released == ["orders"]
    topic.producer(EXCLUSIVE).close()
    assert engine.topic("idle").owner is not None


@pytest.mark.rule("A6")
def test_a6_a_producer_that_is_dropped_while_its_send_is_settled_blocks_no_request(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, settled, go_on = Owning._settle, threading.Event(), threading.Event()

    def late(owning: Owning, *facts: Any) -> None:
        settle(owning, *facts)
        settled.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Owning, "_settle", late)
    producer = topic.producer(EXCLUSIVE, name="p")
    session = weakref.ref(producer._sender.session)
    producer.send_async(b"x")
    assert settled.wait(PATIENCE)
    del producer
    kept = session()
    go_on.set()
    assert kept is None
    assert topic.producer(EXCLUSIVE, name="p").send(b"y") == 1


@pytest.mark.rule("G5")
def test_g5_a_reader_finds_old_messages_by_offset_and_by_time(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exclusivelog.cluster.following.KEPT_BYTES", 4_000)
    monkeypatch.setattr("exclusivelog.cluster.following.MARK_EVERY", 10)
    with topic.producer(EXCLUSIVE) as producer:
        for number in range(300):
            assert producer.send(b"%d" % number) == number
    found = list(topic.reader())
    assert [message.value for message in found] == [b"%d" % n for n in range(300)]
    for start in (0, 1, 57, 150, 299):
        reader = topic.reader(start)
        assert reader.read_next(timeout=0).value == b"%d" % start
        assert [message.offset for message in reader] == list(range(start + 1, 300))
    moment = dt.datetime.fromtimestamp(found[120].publish_time / 1000, dt.UTC)
    first = next(m.offset for m in found if m.publish_time >= found[120].publish_time)
    assert topic.reader(moment).position == first
    assert topic.reader("latest").position == 300
    assert topic.reader(dt.datetime(2100, 1, 1)).position == 300


@pytest.mark.rule("G5")
def test_g5_a_reader_asks_once_where_the_end_is(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        producer.send_many([b"a", b"b"])
    with xl.open(path) as engine:
        again = engine.topic("orders")
        assert again.next_offset == 2
        asked: list[object] = []
        end = _Link.end
        monkeypatch.setattr(_Link, "end", lambda link: asked.append(link) or end(link))
        assert values(again) == [b"a", b"b"]
        assert len(asked) == 1


@pytest.mark.rule("G5")
def test_g5_a_reader_that_waits_is_woken_by_another_engine(
    topic: xl.Topic, other: xl.Engine
) -> None:
    reader = topic.reader()
    got: list[bytes] = []
    sleeper = threading.Thread(target=lambda: got.append(reader.read_next(PATIENCE).value))
    sleeper.start()
    with other.topic("orders").producer(EXCLUSIVE) as producer:
        producer.send(b"news")
    sleeper.join(PATIENCE)
    assert got == [b"news"]
    with pytest.raises(xl.WaitTimeoutError):
        reader.read_next(timeout=0.01)


BAD = Chances(lost=0.2, doubled=0.2, delayed=0.2, answer_lost=0.3, answer_doubled=0.2)


@pytest.mark.rule("J2", "B9", "B10", "D4")
@pytest.mark.parametrize("mode", [WAIT, FENCING])
def test_b9_each_send_has_one_outcome_whatever_the_log_does(
    path: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Appends are lost, doubled and late, and their answers as well. Two engines take the topic
    from each other, or in turn: what was acknowledged is there once, at its offset, and nothing
    that was refused is."""
    open_link = MemoryPlace.open
    dice = random.Random(3)

    def open_badly(place: MemoryPlace, topic: str) -> UnreliableLog:
        return UnreliableLog(open_link(place, topic), BAD, random.Random(dice.random()))

    monkeypatch.setattr(MemoryPlace, "open", open_badly)
    monkeypatch.setattr("exclusivelog.cluster.appending.RESEND_SECONDS", 0.03)
    outcomes: list[tuple[bytes, xl.Receipt]] = []
    with xl.open(path, name="one") as one, xl.open(path, name="two") as two:
        topics = [engine.topic("orders") for engine in (one, two)]
        owner = topics[0].producer(mode)
        for turn in range(12):
            for number in range(15):
                value = b"%d %d" % (turn, number)
                with contextlib.suppress(xl.ProducerFencedError):
                    outcomes.append((value, owner.send_async(value)))
            rival = topics[(turn + 1) % 2].producer_async(mode)
            if mode == WAIT:
                owner.close()
            owner = rival.result(PATIENCE)
        owner.close()
        found = {message.offset: message.value for message in topics[0].reader()}
        same = {message.offset: message.value for message in topics[1].reader()}
    acknowledged = {}
    for value, receipt in outcomes:
        error = receipt.exception(PATIENCE)
        if error is None:
            acknowledged[receipt.result(0)] = value
        else:
            assert isinstance(error, xl.ProducerFencedError)
            assert value not in found.values()
    assert found == same == acknowledged
    assert mode == FENCING or len(found) == 12 * 15


@pytest.mark.rule("J2", "B9", "G2", "A1")
def test_b9_shared_producers_lose_and_mix_nothing_whatever_the_log_does(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for shared producers on two engines, which another one fences in the end."""
    open_link = MemoryPlace.open
    dice = random.Random(5)

    def open_badly(place: MemoryPlace, topic: str) -> UnreliableLog:
        return UnreliableLog(open_link(place, topic), BAD, random.Random(dice.random()))

    monkeypatch.setattr(MemoryPlace, "open", open_badly)
    monkeypatch.setattr("exclusivelog.cluster.appending.RESEND_SECONDS", 0.03)
    outcomes: list[tuple[bytes, xl.Receipt]] = []
    with xl.open(path, name="one") as one, xl.open(path, name="two") as two:
        places = [engine.topic("orders") for engine in (one, two)]
        writers = [places[n % 2].producer(SHARED, name=f"w{n}") for n in range(4)]
        for number in range(40):
            for writer in writers:
                value = f"{writer.name} {number}".encode()
                outcomes.append((value, writer.send_async(value)))
        rival = places[0].producer(FENCING)
        rival.send(b"rival")
        found = list(places[1].reader())
        acknowledged = {r.result(0): v for v, r in outcomes if r.exception(PATIENCE) is None}
    refused = {value for value, r in outcomes if r.exception(0) is not None}
    there = {message.offset: message.value for message in found}
    assert [message.offset for message in found] == list(range(len(found)))
    assert there.pop(len(found) - 1) == b"rival"
    assert there == acknowledged
    assert not refused & set(there.values())
    for writer in writers:
        mine = [m.sequence_id for m in found if m.producer_name == writer.name]
        assert mine == list(range(len(mine)))


@pytest.mark.rule("A3")
def test_a3_one_who_joins_behind_a_waiter_that_it_has_not_seen_leaves_again(
    topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter's record comes in between the decision and the join."""
    first = topic.producer(SHARED)
    asked, wait = TopicLog.ask, []

    def ask_late(log: TopicLog, *args: Any) -> Any:
        if not wait:
            wait.append(other.topic("orders").producer_async(WAIT))
            until(lambda: log.waiters.in_order())
        return asked(log, *args)

    monkeypatch.setattr(TopicLog, "ask", ask_late)
    with pytest.raises(xl.ProducerBusyError, match="not free for a shared producer"):
        topic.producer(SHARED)
    assert [holder.session for holder in topic.holders] == [first._session.id]
    first.close()
    assert wait[0].result(PATIENCE).topic_epoch == 1


@pytest.mark.rule("E4")
def test_e4_a_grant_between_two_looks_of_a_move_does_not_cancel_it(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move looks at what is assigned, and at the owner; the destination's waiter takes the
    topic in between."""
    owner = topic.producer(EXCLUSIVE, follow=False)
    waiter = other.topic("orders").producer_async(WAIT)
    look, ask, taken, go = moving.inspect, TopicLog.ask, [], threading.Event()

    def ask_then(self: TopicLog, *args: Any) -> Any:
        assert go.wait(PATIENCE)
        return ask(self, *args)

    def until_it_is_taken(log: TopicLog, *args: Any) -> Any:
        seen = look(log, *args)
        if log.waiters.assigned is not None and seen.owner is None and not taken:
            go.set()
            taken.append(waiter.result(PATIENCE))
            until(lambda: log.catch_up() or log.waiters.assigned is None)
        return seen

    monkeypatch.setattr(TopicLog, "ask", ask_then)
    monkeypatch.setattr(moving, "inspect", until_it_is_taken)
    [move] = engine.unload("orders", to=other.id, timeout=PATIENCE)
    assert taken
    assert (move.state, move.epoch, owner.state) == ("owned", 2, "moved")


@pytest.mark.rule("E2")
def test_e2_a_call_that_comes_late_to_follow_a_move_leaves_the_next_move_alone(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine
) -> None:
    """Its thread was slow: meanwhile another one has followed, and the topic has moved again."""
    producer = topic.producer(EXCLUSIVE)
    former = producer._sender.session
    assert engine.unload("orders", to=other.id, timeout=PATIENCE)[0].ok
    assert producer.send(b"there") == 0
    assert engine.unload("orders", to=engine.id, timeout=PATIENCE)[0].ok
    assert former.follow(PATIENCE)
    assert topic.epoch == 2
    assert producer.send(b"back") == 1
    assert topic.epoch == 3


@pytest.mark.rule("E2")
def test_e2_a_producer_whose_engine_is_closed_after_a_move_is_closed(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine
) -> None:
    producer = topic.producer(EXCLUSIVE)
    assert engine.unload("orders", to=other.id, timeout=PATIENCE)[0].ok
    engine.close()
    for call in (lambda: producer.send(b"x"), producer.flush):
        with pytest.raises(xl.EngineClosedError, match=r"^engine .* is closed"):
            call()
    assert producer.state == "closed"
    producer.close()
    assert other.topic("orders").producer(EXCLUSIVE).topic_epoch == 2


@pytest.mark.rule("E5")
def test_e5_history_is_the_grants_and_releases(topic: xl.Topic, engine: xl.Engine) -> None:
    with topic.producer(EXCLUSIVE, name="leader", priority=4):
        pass
    again = topic.producer(FENCING, topic_epoch=1)
    rival = topic.producer(FENCING, name="rival")
    assert (again.state, rival.state) == ("fenced", "open")
    told = [(event.kind, event.reason, event.epoch) for event in engine.history("orders")]
    assert told == [
        ("grant", "request", 1),
        ("release", "closed", 1),
        ("grant", "reconnect", 1),
        ("evict", "fenced", 1),
        ("grant", "fencing", 2),
    ]
    grant = next(iter(engine.history()))
    assert grant.target is not None
    assert (grant.target["producer"], grant.priority, grant.topic) == ("leader", 4, "orders")


@pytest.mark.rule("C5")
def test_c5_a_forked_child_is_refused_and_the_parent_unharmed(topic: xl.Topic) -> None:
    producer = topic.producer(EXCLUSIVE)
    producer.send(b"before")

    def child() -> list[str]:
        calls = (lambda: producer.send(b"child"), lambda: topic.next_offset, topic.reader)
        told = []
        for call in calls:
            try:
                call()
            except xl.EngineClosedError as error:
                told.append(type(error).__name__)
        producer.close()
        topic.engine.close()
        return told

    assert forked(child) == ["EngineClosedError"] * 3
    assert producer.send(b"after") == 1
    assert values(topic) == [b"before", b"after"]


def test_topics_are_made_and_found(engine: xl.Engine, other: xl.Engine) -> None:
    assert engine.topics() == []
    with pytest.raises(xl.TopicNotFoundError):
        engine.topic("orders", create=False)
    engine.topic("orders")
    assert other.topics() == ["orders"]
    assert other.topic("orders", create=False).next_offset == 0
    assert {info.name for info in engine.engines()} == {"test", "other"}


def test_a_reader_only_engine_takes_no_producers(path: str, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        producer.send(b"x")
    with xl.open(path, readonly=True) as watcher:
        assert values(watcher.topic("orders")) == [b"x"]
        with pytest.raises(xl.LedgerError):
            watcher.topic("orders").producer(EXCLUSIVE)


@pytest.mark.rule("I2")
def test_i2_a_latest_read_of_an_owner_that_was_fenced_sees_what_its_rival_wrote(
    engine: xl.Engine, other: xl.Engine
) -> None:
    """The former owner believes that it owns the map still: it must look into the log."""
    here, there = xl.SharedMap(engine.topic("map")), xl.SharedMap(other.topic("map"))
    for number in range(20):
        here.put("a", number)
        assert there.get("a", latest=True) == number
        there.put("a", -number)
        assert here.get("a", latest=True) == -number
    for each in (here, there):
        each.close()


@pytest.mark.rule("I5")
def test_i5_writes_of_many_threads_lose_nothing(engine: xl.Engine, other: xl.Engine) -> None:
    maps = [xl.SharedMap(each.topic("map")) for each in (engine, other)]

    def add(number: int) -> None:
        for _ in range(25):
            maps[number % 2].update("sum", lambda value: (value or 0) + 1)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [each.get("sum", latest=True) for each in maps] == [100, 100]
    for each in maps:
        each.close()


def test_a_topic_holds_one_kind_of_state(engine: xl.Engine, other: xl.Engine) -> None:
    with xl.SharedMap(engine.topic("settings")) as settings:
        settings.put("colour", "blue")
    assert other.topic("settings").kind == "map"
    with pytest.raises(xl.StateError):
        xl.SharedState(other.topic("settings"), initial=list, apply=list.append)


def test_closing_ends_all_threads(path: str) -> None:
    before = set(threading.enumerate())
    engine = xl.open(path)
    reader = engine.topic("orders").reader()
    producer = engine.topic("orders").producer(EXCLUSIVE)
    producer.send(b"x")
    waiter = engine.topic("orders").producer_async(WAIT)
    within(engine.close)
    assert isinstance(waiter.exception(PATIENCE), xl.EngineClosedError)
    for call in (lambda: producer.send(b"y"), lambda: reader.read_next(timeout=0)):
        with pytest.raises(xl.EngineClosedError):
            call()
    until(lambda: set(threading.enumerate()) <= before)


def test_the_asynchronous_names_work_on_it(path: str) -> None:
    async def run() -> list[object]:
        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            async with await topic.producer("exclusive") as producer:
                first = await producer.send(b"a")
                queued = asyncio.create_task(topic.producer("wait_for_exclusive"))
                offsets = [await producer.send(b"b") for _ in range(3)]
            async with await queued as successor:
                epoch = successor.topic_epoch
            reader = topic.reader()
            found = [message.value async for message in reader]
            counts = await aio.SharedMap(engine.topic("map"))
            await counts.put("a", 1)
            value = await counts.get("a", latest=True)
            await counts.close()
            return [first, offsets, epoch, found, value]

    assert asyncio.run(run()) == [0, [1, 2, 3], 2, [b"a", b"b", b"b", b"b"], 1]


def test_a_whole_record_of_another_program_is_no_waiter() -> None:
    def framed(row: object) -> bytes:
        body: bytes = msgpack.packb(row)
        return sealed(waiting.MAGIC, waiting.VERSION, body)

    whole = ["w", 1, "e", "n", 2, "p", 3, 4, None]
    assert isinstance(waiting.decode(framed(whole)), waiting.Wait)
    wrong: list[object] = [
        None,
        7,
        [],
        ["l"],
        ["l", 5],
        ["l", ["x"]],
        ["w"],
        {},
        "w",
        ["w", *"abcdefgh"],
    ]
    wrong += [whole[:n] for n in range(len(whole))]
    assert [waiting.decode(framed(row)) for row in wrong] == [None] * len(wrong)
    assert waiting.decode(framed(whole)[:-1]) is None


@pytest.mark.rule("C6")
def test_c6_the_state_is_that_of_the_log_and_not_of_what_was_read_of_it(
    engine: xl.Engine, topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = topic.producer("exclusive")
    reader = engine.backend.followed(topic.id)._reader  # type: ignore[attr-defined]
    receive = reader.receive

    def late(seconds: float) -> Any:
        found = receive(seconds)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(reader, "receive", late)
    producer.send(b"x")  # the thread that follows the log is in `late` from now on
    with other.topic("orders").producer("exclusive_with_fencing"):
        assert producer.state == "fenced"


@pytest.mark.rule("C6")
def test_c6_a_producer_that_is_handed_over_while_its_state_is_read_is_moved(
    engine: xl.Engine, topic: xl.Topic, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = topic.producer(EXCLUSIVE, follow=False)
    session, catch_up = producer._sender.session, TopicLog.catch_up

    def meanwhile(log: TopicLog) -> None:
        monkeypatch.setattr(TopicLog, "catch_up", catch_up)
        assert engine.unload("orders", to=other.id, timeout=PATIENCE)[0].ok
        until(lambda: session.lost)
        catch_up(log)

    monkeypatch.setattr(TopicLog, "catch_up", meanwhile)
    assert producer.state == "moved"
    assert session.lost


# ---- outcomes ------------------------------------------------------------------------------


@pytest.mark.rule("B9")
def test_messages_that_are_read_back_are_not_sent_again_before_they_are_settled(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit thread looks for messages at just that moment."""
    settle = Owning._settle

    def late(owning: Owning, *facts: Any) -> None:
        owning.pump(patient=False)
        settle(owning, *facts)

    monkeypatch.setattr(Owning, "_settle", late)
    with topic.producer() as producer:
        assert [producer.send(b"%d" % n) for n in range(5)] == list(range(5))
        receipts = [producer.send_async(b"%d" % n) for n in range(5, 25)]
        assert [receipt.result(PATIENCE) for receipt in receipts] == list(range(5, 25))
    assert values(topic) == [b"%d" % n for n in range(25)]


@pytest.mark.rule("B9")
def test_what_waits_behind_a_message_that_is_refused_fails_with_it(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pump, all_wait, sizes = Owning.pump, threading.Event(), list[int]()

    def later(owning: Owning, patient: bool = True) -> None:
        assert all_wait.wait(PATIENCE)
        pump(owning, patient)

    def refuse_the_first(_: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 1:
            raise xl.UnsupportedError("not this one")

    monkeypatch.setattr(Owning, "pump", later)
    monkeypatch.setattr("exclusivelog.cluster.log._check_fits", refuse_the_first)
    with topic.producer() as producer:
        receipts = [producer.send_async(bytes(4_000_000)) for _ in range(3)]  # a batch for each
        all_wait.set()
        for receipt in receipts:
            with pytest.raises(xl.UnsupportedError, match="not this one"):
                receipt.result(PATIENCE)
    assert len(sizes) == 1
    assert not caplog.records
    assert values(topic) == []


def test_a_callback_gets_a_whole_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another producer waits already when the first waiter is granted: its `on_wanted` is called
    while the producer is made, here at once."""
    heard: list[str] = []
    with xl.open(f"memory://{tmp_path}/whole", name="a") as engine:
        monkeypatch.setattr(engine.backend, "call_soon", lambda function: function())
        topic = engine.topic("orders")
        owner = topic.producer("exclusive")
        first = topic.producer_async(
            "wait_for_exclusive",
            name="first",
            priority=1,
            on_wanted=lambda producer: heard.append(producer.name),
        )
        second = topic.producer_async("wait_for_exclusive", name="second")
        owner.close()
        first.result(PATIENCE).close()
        second.result(PATIENCE)
    assert heard == ["first"]


# ---- the life of an engine, as on one machine ------------------------------------------------


@pytest.mark.rule("C1")
def test_c1_a_close_that_was_interrupted_is_completed_by_the_next(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.pending, "fail_all", lambda error: interrupted())
        patch.setattr(engine.backend.committer, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert engine.closed
    engine.close()
    assert [each.name for each in other.engines()] == ["other"]


@pytest.mark.rule("C1")
def test_c1_an_engine_that_is_closing_takes_no_more_calls(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closing, refused = engine.backend.registry.close, [], []

    def ask(*arguments: Any) -> None:
        closing.append(engine.closed)
        with pytest.raises(xl.EngineClosedError) as error:
            topic.producer_async()
        refused.append(error.value)
        close(*arguments)

    monkeypatch.setattr(engine.backend.registry, "close", ask)
    engine.close()
    assert closing == [True]
    assert "closed" in str(refused[0])


@pytest.mark.rule("B4")
def test_b4_a_callback_comes_once_a_thread_can_be_started_for_it(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    owner = topic.producer(EXCLUSIVE, on_fenced=lambda producer, error: told.set())
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "exclusivelog-callback":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with topic.producer(FENCING):
            assert refused.wait(PATIENCE)
            assert not told.is_set()
    assert told.wait(PATIENCE)
    owner.close()
