"""Rule E2 within one process: a handle follows its topic to the engine next door.

Two engines of a process may share its work, and a topic that moves from one to the other need
not end the producers that the application holds: their sends go to the engine that now has the
topic, as long as that is in this process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import sessions as life
from exclusivelog.life import open_here
from exclusivelog.local.followers import Followers, Following
from exclusivelog.local.log import appending
from exclusivelog.local.ownership import sessions as ownership_sessions
from exclusivelog.local.runtime import Runtime
from exclusivelog.local.session import LocalSession
from exclusivelog.sessions import Listeners
from testing.handovers import (
    COUNTS,
    SENDS,
    Chronicle,
    HeldUp,
    Quick,
    Use,
    begin,
    catch_up,
    moved,
)
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, WAIT, collect, until, values, within

FENCED, MOVED = xl.ProducerFencedError, xl.ProducerMovedError
Neighbours = tuple[xl.Engine, xl.Engine, xl.Engine]


@pytest.fixture
def neighbours(path: str) -> Iterator[Neighbours]:
    """Three engines a, b and c of this process."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b, xl.open(path, name="c") as c:
        yield a, b, c


SOON = 0.2  # seconds


# ---- E2: sends, where the destination is in the same process -----------------------------


class Awaited:
    """Where the topic goes within the process: to b, which waits for it, or does not."""

    def __init__(self, a: xl.Engine, b: xl.Engine, **options: Any) -> None:
        self.topic = a.topic("orders")
        self.producer = self.topic.producer(EXCLUSIVE, name="p")
        self.rival = b.topic("orders").producer_async(WAIT, name="q", **options)
        assert moved(a.unload("orders", to=b.id)) == [("orders", "owned")]
        self.successor = self.rival.result(PATIENCE)


def test_e2_a_handle_follows_its_topic_to_a_producer_that_waited(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    it = Awaited(a, b)
    assert (it.producer.state, it.successor.send(b"q")) == ("open", 0)
    offsets = [use(it.producer) for use in SENDS.values()]
    assert len(set(offsets)) == len(SENDS)
    assert it.topic.next_offset == 1 + sum(COUNTS)
    assert {(m.epoch, m.producer_name) for m in it.topic.reader()} == {(2, "q")}
    assert (it.producer.state, it.producer.topic_epoch) == ("open", 2)
    assert it.topic.owner.engine_id == b.id
    it.producer.flush()
    assert len(catch_up(it.producer)) == it.topic.next_offset


# ---- E2: a producer that sends by another one's session ----------------------------------


def test_c1_closing_one_that_has_followed_sends_what_waits(neighbours: Neighbours) -> None:
    a, b, _ = neighbours
    it = Awaited(a, b, linger=30.0)
    it.producer.send(b"0")
    receipt = it.producer.send_async(b"1")
    it.producer.close()
    assert (receipt.done(), receipt.result(), it.topic.next_offset) == (True, 1, 2)
    assert it.successor.state == "open"


def test_b4_one_that_has_followed_ends_with_the_session(neighbours: Neighbours) -> None:
    """It says so in every call, and to `on_fenced`, without being asked."""
    a, b, _ = neighbours
    told: list[BaseException] = []
    topic = a.topic("orders")
    producer = topic.producer(EXCLUSIVE, on_fenced=lambda _, error: told.append(error))
    rival = b.topic("orders").producer_async(WAIT)
    assert moved(a.unload("orders", to=b.id)) == [("orders", "owned")]
    assert producer.send(b"x") == 0
    rival.result(PATIENCE).close()
    until(lambda: told)
    for call in (producer.send, producer.send_async, lambda value: producer.send_many([value])):
        with pytest.raises(xl.ProducerMovedError) as caught:
            call(b"y")
        assert caught.value is told[0]
    assert producer.state == "moved"


def test_d4_one_that_has_followed_is_asked_for_the_topic_of_a_dropped_one(
    neighbours: Neighbours,
) -> None:
    """The producers that use the session keep it, and are notified of another waiter."""
    a, b, c = neighbours
    told: list[xl.Producer] = []
    options: dict[str, Any] = {"on_wanted": told.append}
    producer = a.topic("orders").producer(EXCLUSIVE, **options)
    rival = b.topic("orders").producer_async(WAIT, **options)
    assert moved(a.unload("orders", to=b.id)) == [("orders", "owned")]
    rival.result(PATIENCE).send(b"x")
    producer.send(b"y")
    until(lambda: told)  # the rival had waited
    told.clear()
    del rival
    collect()
    third = c.topic("orders").producer_async(WAIT)
    until(lambda: told)
    assert told == [producer]
    told.clear()
    producer.close()
    assert third.result(PATIENCE).send(b"z") == 2


def test_e2_one_that_has_followed_announces_without_its_own_engine(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    it = Awaited(a, b)
    it.producer.send(b"x")
    a.close()
    it.producer.announce({"at": "b"}, message=b"y")
    assert b.topic("orders").announcement.info == {"at": "b"}


@pytest.mark.parametrize("waits", [True, False], ids=["to a waiter", "to nobody"])
@pytest.mark.usefixtures("only_who_sends_follows")
def test_b9_e2_an_interrupted_send_leaves_the_way_to_the_topic_open(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Ctrl-C while the session is looked for, or has just been granted: the next send goes there,
    and the topic is not given back."""
    a, b, _ = neighbours
    topic = a.topic("orders")
    producer = topic.producer(EXCLUSIVE, name="p")
    rival = b.topic("orders").producer_async(WAIT) if waits else None
    assert [move.ok for move in a.unload("orders", to=b.id)] == [True]
    hand_on = LocalSession.hand_on

    def late(*args: Any) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
        interrupted.wait(PATIENCE)
        hand_on(*args)

    interrupted = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(LocalSession, "hand_on", late)
        with pytest.raises(KeyboardInterrupt):
            producer.send(b"x", timeout=PATIENCE)
    interrupted.set()
    assert producer.send(b"y", timeout=PATIENCE) == topic.next_offset - 1
    assert (producer.state, topic.epoch) == ("open", 2)
    assert rival is None or rival.result(PATIENCE).state == "open"


def test_e2_a_handle_follows_its_topic_without_a_waiter(
    neighbours: Neighbours,
) -> None:
    """The sends of several threads wait for the move, and all go through: the first of them
    has opened a producer for all, of the same name, which counts on."""
    a, b, _ = neighbours
    topic = a.topic("orders")
    producer = topic.producer(EXCLUSIVE, name="p", properties={"role": "x"}, priority=3)
    producer.send(b"before")
    with HeldUp(a) as release:
        moving = begin(a.unload, "orders", b.id)
        release.await_it()
        sends = [begin(use, producer) for use in SENDS.values()]
        time.sleep(0.05)
        release.go_on()
        offsets = [send.result(PATIENCE) for send in sends]
        assert moving.result(PATIENCE)[0].ok
    assert len(set(offsets)) == len(SENDS)
    messages = list(topic.reader())
    assert [message.epoch for message in messages] == [1] + [2] * sum(COUNTS)
    assert [message.sequence_id for message in messages] == list(range(1 + sum(COUNTS)))
    assert {message.producer_name for message in messages} == {"p"}
    owner = topic.owner
    assert (owner.engine_id, owner.producer_name, owner.priority) == (b.id, "p", 3)
    assert owner.properties == {"role": "x"}


@pytest.mark.parametrize("mode", [EXCLUSIVE, WAIT, FENCING])
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e2_a_handle_follows_its_topic_to_a_producer_that_was_opened_meanwhile(
    neighbours: Neighbours, mode: str
) -> None:
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    assert a.unload("orders", to=b.id)[0].state == "assigned"
    other = b.topic("orders").producer(mode)
    assert [producer.send(b"0"), other.send(b"1"), producer.send(b"2")] == [0, 1, 2]
    assert {message.epoch for message in a.topic("orders").reader()} == {2}


@pytest.mark.rule("E6")
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e6_a_producer_that_sends_follows_before_all_others(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = neighbours
    producers = a.producers([f"t{number}" for number in range(40)], EXCLUSIVE)
    assert all(move.ok for move in a.unload("t*", to=b.id, timeout=PATIENCE))
    opened: list[list[str]] = []
    open_followers = Runtime.open_followers

    def noted(engine: Runtime, names: list[str], *arguments: Any) -> None:
        opened.append(list(names))
        open_followers(engine, names, *arguments)

    monkeypatch.setattr(Runtime, "open_followers", noted)
    producers[30].send(b"sent")
    until(lambda: all(each.topic_epoch == 2 for each in producers))
    assert opened[0] == ["t30"]
    assert sorted(name for names in opened for name in names) == sorted(
        f"t{number}" for number in range(40)
    )


@pytest.mark.long
def test_e2_a_handle_cannot_follow_where_another_came_first(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic was reserved for b, the deadline is over, and c has it."""
    a, b, c = neighbours
    monkeypatch.setattr(Following, "begin", lambda *_: None)  # as if its thread had been stopped
    producer = a.topic("orders").producer(EXCLUSIVE)
    reserve_for_a_while(a, b)
    owner = c.topic("orders").producer(WAIT, timeout=PATIENCE)
    with pytest.raises(MOVED) as error:
        producer.send(b"x")
    assert error.value.successor.id == b.id
    with pytest.raises(MOVED) as again:
        producer.send(b"x")
    assert again.value is error.value
    assert (producer.state, owner.send(b"mine")) == ("moved", 0)


def reserve_for_a_while(a: xl.Engine, b: xl.Engine) -> None:
    """Move the topic to b, for which it is reserved until two seconds are over; again if the
    machine was too slow to release it within them."""
    until(lambda: a.unload("orders", to=b.id, timeout=2.0)[0].ok)


def read_mail_late(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> threading.Event:
    """The engine reads its notifications this much later, or when the event is set."""
    now, read = threading.Event(), engine.backend.notifications.read
    later, worker = threading.Event(), engine.backend.worker

    def read_late() -> None:
        if threading.current_thread() is worker.thread:
            later.set()
        now.wait(seconds)
        read()

    monkeypatch.setattr(engine.backend.notifications, "read", read_late)
    worker.wake()  # what it is reading now, it reads before this
    assert later.wait(PATIENCE)
    return now


def test_e2_a_handle_follows_although_the_destination_has_not_read_its_notifications_yet(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    rival = b.topic("orders").producer_async(WAIT)
    sent = read_mail_late(b, monkeypatch, 0.3)
    a.unload("orders", to=b.id)
    sending = begin(producer.send, b"x")
    sending.add_done_callback(lambda _: sent.set())
    assert sending.result(PATIENCE) == 0
    assert rival.result(PATIENCE).topic_epoch == 2


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e2_a_producer_that_is_just_being_made_learns_where_its_topic_goes(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    """A waiter is granted the topic. A thread that cancels another request reads the notification,
    and is about to create the producer when the topic is unloaded."""
    a, b, _ = neighbours
    first = a.topic("orders").producer(EXCLUSIVE)
    rival = a.topic("orders").producer_async(WAIT, name="late", follow=follow)
    reached, go_on = threading.Event(), threading.Event()
    read, make = a.backend.notifications.read, rival.make

    def read_second() -> None:
        if threading.current_thread() is not a.backend.worker.thread or reached.is_set():
            read()

    def make_late(*args: Any) -> xl.Producer:
        reached.set()
        go_on.wait(PATIENCE)
        return make(*args)

    monkeypatch.setattr(a.backend.notifications, "read", read_second)
    monkeypatch.setattr(rival, "make", make_late)
    first.close()
    reading = begin(a.backend.notifications.read)
    assert reached.wait(PATIENCE)
    moving = begin(a.unload, "orders", b.id, PATIENCE)
    until(lambda: a.backend.notifications.releases or moving.done())
    go_on.set()
    reading.result(PATIENCE)
    producer = rival.result(PATIENCE)
    [move] = moving.result(PATIENCE)
    assert (move.state, move.source.producer_name) == ("assigned", "late"), move
    if follow:
        assert (producer.send(b"x"), producer.topic_epoch) == (0, 3)
    else:
        with pytest.raises(MOVED) as caught:
            producer.send(b"x")
        assert caught.value.successor.id == b.id


def test_e2_a_send_that_looks_for_its_topic_waits_no_longer_than_its_timeout(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination's engine is slow: its producer is not there yet."""
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    rival = b.topic("orders").producer_async(WAIT)
    over = read_mail_late(b, monkeypatch, PATIENCE)
    a.unload("orders", to=b.id)
    sending = begin(functools.partial(producer.send, b"x", timeout=0.1))
    ended = sending.exception(PATIENCE / 2)  # before it is there
    over.set()
    assert isinstance(ended, xl.WaitTimeoutError)
    assert rival.result(PATIENCE).topic_epoch == 2
    assert producer.send(b"x") == 0


def test_e2_a_send_that_was_on_its_way_does_not_fence_the_successor(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread was about to look its session up when the move began, and comes to it only
    when another thread has followed the topic already."""
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    rival = b.topic("orders").producer_async(WAIT)
    reached, go_on, repair = threading.Event(), threading.Event(), appending.repair

    def repair_late(*args: Any) -> None:
        if threading.current_thread().name == "late":
            reached.set()
            go_on.wait(PATIENCE)
        repair(*args)

    monkeypatch.setattr(appending, "repair", repair_late)
    errors: list[BaseException] = []

    def send_late() -> None:
        try:
            producer.send(b"late")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=send_late, name="late", daemon=True)
    thread.start()
    assert reached.wait(PATIENCE)
    a.unload("orders", to=b.id)
    successor = rival.result(PATIENCE)
    producer.send(b"another thread")
    go_on.set()
    thread.join(PATIENCE)
    successor.send(b"mine")
    assert errors == []
    assert producer.state == successor.state == "open"


# ---- E2: sequence ids of one that follows ------------------------------------------------


def test_e2_explicit_sequence_ids_go_on_where_the_name_does(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE, name="p")
    producer.send(b"10", sequence_id=10)
    a.unload("orders", to=b.id)
    for use in (producer.send, producer.send_async):
        with pytest.raises(xl.DuplicateSequenceError) as error:
            use(b"again", sequence_id=10)
        assert (error.value.sequence_id, error.value.last_sequence_id) == (10, 10)
    assert producer.send(b"11", sequence_id=11) == 1
    assert producer.send(b"12") == 2
    assert producer.last_sequence_id == 12
    assert values(a.topic("orders")) == [b"10", b"11", b"12"]


def test_e2_a_new_message_is_not_taken_for_a_duplicate_of_the_successor_s(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    with b.topic("orders").producer(EXCLUSIVE, name="q") as before:
        before.send(b"q-100", sequence_id=100)
    it = Awaited(a, b)
    with contextlib.suppress(MOVED):  # that would be an honest answer
        it.producer.send(b"p-6", sequence_id=6)
        assert values(it.topic) == [b"q-100", b"p-6"]


def test_e2_a_duplicate_is_not_taken_for_a_new_message_of_the_successor_s(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    topic = a.topic("orders")
    producer = topic.producer(EXCLUSIVE, name="p")
    producer.send(b"p-6", sequence_id=6)
    successor = b.topic("orders").producer_async(WAIT, name="q")
    a.unload("orders", to=b.id)
    successor.result(PATIENCE)
    with contextlib.suppress(MOVED, xl.DuplicateSequenceError):
        producer.send(b"p-6", sequence_id=6)
    assert values(topic) == [b"p-6"]


# ---- E2: the end of one that follows -----------------------------------------------------


def test_e2_closing_a_follower_leaves_the_successor_alone(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    for followed in (True, False):
        it = Awaited(a, b)
        if followed:
            it.producer.send(b"p")
        within(it.producer.close)
        assert (it.producer.state, it.successor.state) == ("closed", "open")
        assert it.successor.send(b"q") == it.topic.next_offset - 1
        it.successor.close()
        assert it.topic.owner is None


def test_e2_closing_a_follower_gives_back_what_it_has_opened_itself(
    neighbours: Neighbours,
) -> None:
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    a.unload("orders", to=b.id)
    producer.send(b"x")
    waiter = c.topic("orders").producer_async(WAIT)
    within(producer.close)
    assert waiter.result(PATIENCE).topic_epoch == 3
    assert producer.state == "closed"


def test_e2_a_follower_that_is_dropped_gives_the_topic_back(
    neighbours: Neighbours,
) -> None:
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    a.unload("orders", to=b.id)
    producer.send(b"x")
    waiter = c.topic("orders").producer_async(WAIT)
    del producer
    assert waiter.result(PATIENCE).topic_epoch == 3


@pytest.mark.parametrize(
    "how",
    list(SENDS),
)
def test_e2_a_follower_that_is_closed_sends_nothing(neighbours: Neighbours, how: str) -> None:
    a, b, _ = neighbours
    it = Awaited(a, b)
    it.producer.send(b"before")
    it.producer.close()
    with pytest.raises(xl.EngineClosedError):
        SENDS[how](it.producer)
    assert values(it.topic) == [b"before"]


def test_e2_a_producer_closed_after_the_move_does_not_follow(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    a.unload("orders", to=b.id)
    producer.close()
    with pytest.raises(xl.EngineClosedError):
        producer.send_async(b"x")
    assert a.topic("orders").owner is None


def test_e2_the_source_s_engine_may_close_once_its_producer_has_followed(
    path: str, neighbours: Neighbours
) -> None:
    _, b, _ = neighbours
    source = xl.open(path, name="source")
    producer = source.topic("orders").producer(EXCLUSIVE)
    source.unload("orders", to=b.id)
    producer.send(b"followed")
    source.close()
    assert next(use(producer) for use in SENDS.values()) == 1
    assert producer.state == "open"
    producer.close()
    assert b.topic("orders").owner is None


@pytest.mark.usefixtures("only_who_sends_follows")
def test_e2_a_handle_whose_engine_closes_before_it_has_followed_is_closed(
    path: str, neighbours: Neighbours
) -> None:
    _, b, _ = neighbours
    source = xl.open(path, name="source")
    producer = source.topic("orders").producer(EXCLUSIVE)
    source.unload("orders", to=b.id)
    source.close()
    with pytest.raises(xl.EngineClosedError):
        producer.send(b"x")
    assert producer.state == "closed"
    producer.close()
    assert b.topic("orders").producer(EXCLUSIVE).topic_epoch == 2


@pytest.mark.usefixtures("only_who_sends_follows")
def test_e2_a_handle_whose_destination_closes_before_it_has_followed_ends(
    path: str, neighbours: Neighbours
) -> None:
    a, *_ = neighbours
    destination = xl.open(path, name="destination")
    producer = a.topic("orders").producer(EXCLUSIVE)
    a.unload("orders", to=destination.id)
    destination.close()
    with pytest.raises(MOVED) as error:
        producer.send(b"x")
    assert error.value.successor.id == destination.id
    assert producer.state == "moved"
    assert a.topic("orders").producer(EXCLUSIVE).topic_epoch == 2


@pytest.mark.parametrize("how", ["its engine is closed", "the topic is deleted"])
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e2_a_handle_whose_topic_goes_while_it_follows_ends(
    path: str, neighbours: Neighbours, how: str
) -> None:
    """The destination was open when the send looked for it, and only the send opens a producer
    there. Each later call raises the same error."""
    a, b, _ = neighbours
    destination = xl.open(path, name="destination")
    producer = a.topic("orders").producer(EXCLUSIVE)
    a.unload("orders", to=destination.id)
    open_followers = destination.backend.open_followers

    def too_late(*args: Any, **kwargs: Any) -> None:
        if how == "the topic is deleted":
            b.delete_topic("orders")
        else:
            destination.close()
        open_followers(*args, **kwargs)

    destination.backend.open_followers = too_late
    with pytest.raises(MOVED) as error:
        producer.send(b"x")
    with pytest.raises(MOVED) as again:
        producer.send(b"x")
    assert again.value is error.value
    assert producer.state == "moved"


@pytest.mark.long
@pytest.mark.parametrize("end", ["another", "closed", "deleted", "chain"])
def test_c6_a_handle_that_cannot_follow_any_more_knows_without_sending(
    path: str, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its topic was reserved for a neighbour, which was cancelled, or who has gone, or who has
    handed it on, before anything was sent. It would follow soon, and not before that."""
    monkeypatch.setattr(Following, "due_in", lambda following: SOON)
    a, b, c = neighbours
    told: list[Any] = []
    destination = xl.open(path, name="destination")
    producer = a.topic("orders").producer(EXCLUSIVE, on_fenced=lambda *it: told.append(it))
    if end == "chain":
        assert a.unload("orders", to=b.id)[0].ok
        producer.send(b"x")
        b.unload("orders", to=destination.id, timeout=PATIENCE)
    else:
        a.unload("orders", to=destination.id, timeout=PATIENCE)
    assert producer.state == "open"
    if end == "closed":
        destination.close()
    else:
        assert c.cancel_unload("orders") == ["orders"]
        c.topic("orders").producer(EXCLUSIVE).close()
        if end == "deleted":
            c.delete_topic("orders")
    assert producer.state == "moved"
    until(lambda: told)
    assert [who for who, _ in told] == [producer]
    assert isinstance(told[0][1], MOVED)
    destination.close()


def outcome(use: Callable[[], Any]) -> Any:
    """What it returns, or raises."""
    try:
        return use()
    except xl.ExclusiveLogError as error:
        return error


def test_e2_a_follower_whose_successor_is_closed_is_fenced_or_goes_on(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    it = Awaited(a, b)
    it.producer.send(b"x")
    it.successor.close()
    outcomes = [outcome(functools.partial(use, it.producer)) for use in SENDS.values()]
    if it.producer.state == "open":
        assert all(isinstance(one, int) for one in outcomes)
    else:
        assert isinstance(outcomes[0], FENCED)
        assert all(one is outcomes[0] for one in outcomes)


def test_e2_a_follower_is_fenced_with_its_successor(
    neighbours: Neighbours,
) -> None:
    a, b, c = neighbours
    for waiting in (True, False):
        it = Awaited(a, b) if waiting else None
        producer = it.producer if it is not None else a.topic("orders").producer(EXCLUSIVE)
        if it is None:
            a.unload("orders", to=b.id)
        producer.send(b"x")
        rival = c.topic("orders").producer(FENCING)
        errors = []
        for use in SENDS.values():
            with pytest.raises(FENCED) as error:
                use(producer)
            errors.append(error.value)
        assert len(set(map(id, errors))) == 1
        assert producer.state == "fenced"
        producer.close()
        assert rival.state == "open"
        rival.close()


def test_e2_a_follower_s_callback_is_called_once_with_the_follower(
    neighbours: Neighbours,
) -> None:
    a, b, c = neighbours
    told: list[Any] = []
    producer = a.topic("orders").producer(EXCLUSIVE, on_fenced=lambda who, _: told.append(who))
    a.unload("orders", to=b.id)
    producer.send(b"x")
    c.topic("orders").producer(FENCING)
    until(lambda: told)
    with pytest.raises(FENCED):
        producer.send(b"x")
    time.sleep(0.1)
    assert told == [producer]


def test_e2_a_follower_of_another_s_producer_is_told_when_that_is_fenced(
    neighbours: Neighbours,
) -> None:
    a, b, c = neighbours
    told: list[Any] = []
    producer = a.topic("orders").producer(EXCLUSIVE, on_fenced=lambda who, _: told.append(who))
    rival = b.topic("orders").producer_async(WAIT)
    a.unload("orders", to=b.id)
    rival.result(PATIENCE)
    producer.send(b"x")
    c.topic("orders").producer(FENCING)
    until(lambda: told)
    assert told == [producer]


# ---- E2: chains --------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e2_a_handle_follows_a_chain_of_moves_and_comes_home(
    neighbours: Neighbours, waiting: bool
) -> None:
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE, name="p")
    chronicle = Chronicle(a)
    kept = []
    producer.send(b"0")
    for number, to in enumerate((b, c, a, b, a, c), start=1):
        future = to.topic("orders").producer_async(WAIT) if waiting else None
        assert c.unload("orders", to=to.id)[0].ok
        if future is not None:
            kept.append(future.result(PATIENCE))
        assert producer.send(b"%d" % number) == number
        assert (producer.state, producer.topic_epoch) == ("open", number + 1)
        assert a.topic("orders").owner.engine_id == to.id
    chronicle.read()
    assert [message.epoch for message in a.topic("orders").reader()] == list(range(1, 8))
    producer.close()
    assert producer.state == "closed"


@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e2_a_handle_that_was_idle_follows_two_moves_at_once(
    neighbours: Neighbours, waiting: bool
) -> None:
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE, name="p")
    kept = []  # who drops his producer gives the topic back
    for to in (b, c):
        future = to.topic("orders").producer_async(WAIT) if waiting or to is b else None
        assert a.unload("orders", to=to.id)[0].ok
        if future is not None:
            kept.append(future.result(PATIENCE))
    assert producer.send(b"x") == 0
    assert a.topic("orders").owner.engine_id == c.id


def test_e2_closing_a_follower_that_came_home_leaves_the_successor_alone(
    neighbours: Neighbours,
) -> None:
    a, b, _ = neighbours
    it = Awaited(a, b)
    it.producer.send(b"at b")
    future = a.topic("orders").producer_async(WAIT, name="another one's")
    a.unload("orders", to=a.id)
    another = future.result(PATIENCE)
    it.producer.send(b"at a")
    it.producer.close()
    assert (another.state, it.topic.owner.producer_name) == ("open", "another one's")
    another.send(b"mine")


@pytest.mark.usefixtures("only_who_sends_follows")
def test_e2_a_follower_whose_topic_leaves_the_process_ends_with_the_last_successor(
    neighbours: Neighbours, quick: Callable[..., Quick]
) -> None:
    a, b, _ = neighbours
    for waiting in (True, False):
        destination = quick("destination")
        it = Awaited(a, b) if waiting else None
        producer = it.producer if it is not None else a.topic("orders").producer(EXCLUSIVE)
        if it is None:
            a.unload("orders", to=b.id)
        producer.send(b"x")
        assert a.unload("orders", to=destination.id)[0].state == "assigned"
        errors = []
        for use in SENDS.values():
            with pytest.raises(MOVED) as error:
                use(producer)
            errors.append(error.value)
        assert len(set(map(id, errors))) == 1
        assert errors[0].successor.id == destination.id
        assert producer.state == "moved"
        producer.close()
        a.cancel_unload("orders")


def test_e2_a_follower_s_send_waits_no_longer_than_its_timeout(
    neighbours: Neighbours,
) -> None:
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    a.unload("orders", to=b.id)
    producer.send(b"followed")
    with HeldUp(b) as release:
        moving = begin(a.unload, "orders", c.id)
        release.await_it()
        sending = begin(functools.partial(producer.send, b"x", timeout=0.1))
        ended = sending.exception(PATIENCE / 2)  # before the move goes on
        release.go_on()
        assert moving.result(PATIENCE)[0].ok
    assert isinstance(ended, xl.WaitTimeoutError)


def test_e2_a_handle_does_not_follow_to_one_who_took_the_topic_by_force(
    neighbours: Neighbours,
) -> None:
    """Its topic was moved on from where it had gone, and on the way somebody took it, who
    happens to be at the destination."""
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    waiting = b.topic("orders").producer_async(WAIT)
    a.unload("orders", to=b.id)
    successor = waiting.result(PATIENCE)
    with HeldUp(b) as release:
        moving = begin(b.unload, "orders", a.id)
        release.await_it()
        rival = a.topic("orders").producer(FENCING)
        release.go_on()
        moving.result(PATIENCE)
    assert rival.send(b"mine") == 0
    for loser in (successor, producer):
        with pytest.raises(FENCED):
            loser.send(b"x")
    found = [event.reason for event in a.history("orders")][-3:]
    assert found == ["fenced", "another owner came first", "fencing"]
    assert rival.topic_epoch == 3


@pytest.mark.long
def test_e2_a_handle_does_not_follow_to_one_who_came_back(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move has failed, and then somebody reconnects under the very epoch that the handle
    had: no other session can have had the topic, but this one is no successor."""
    a, b, c = neighbours
    monkeypatch.setattr(Following, "begin", lambda *_: None)  # as if its thread had been stopped
    producer = a.topic("orders").producer(EXCLUSIVE)
    reserve_for_a_while(a, b)
    until(lambda: c.topic("orders").transfer is None)
    other = c.topic("orders").producer(EXCLUSIVE, topic_epoch=1)
    assert other.topic_epoch == 1
    with pytest.raises(MOVED):
        producer.send(b"x")
    assert other.send(b"mine") == 0


def test_e2_engines_of_the_process_are_found_while_others_open_and_close(
    engine: xl.Engine,
) -> None:
    """Any thread may open one while others look for the destination of a move."""
    over = threading.Event()

    def closed_one() -> Runtime:
        made = object.__new__(Runtime)
        made.closed = True
        made.register()
        return made

    def open_and_drop() -> None:
        while not over.is_set():
            closed_one()

    kept = [closed_one() for _ in range(500)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        opening = begin(open_and_drop)
        for _ in range(200):
            assert engine.backend in open_here(Runtime)  # others of this run may be there
    finally:
        sys.setswitchinterval(interval)
        over.set()
    opening.result(PATIENCE)
    kept.clear()


# ---- E6: all producers of a process -------------------------------------------------------


def holders(engine: xl.Engine, names: list[str]) -> set[str]:
    """The engines that have these topics."""
    owners = [engine.topic(name).owner for name in names]
    return {"nobody" if owner is None else owner.engine_name for owner in owners}


@pytest.mark.rule("E6")
def test_e6_producers_that_do_not_send_follow_while_the_topic_is_reserved(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "FOLLOWED_AFTER", SOON)
    a, b, c = neighbours
    names = [f"t{number}" for number in range(20)]
    producers = [a.topic(name).producer(EXCLUSIVE, name="p") for name in names]
    rivals = [c.topic(name).producer_async(WAIT) for name in names]
    assert all(move.ok for move in a.unload(names, to=b.id, timeout=PATIENCE))
    until(lambda: holders(a, names) == {"b"})
    assert [producer.send(b"x") for producer in producers] == [0] * 20
    assert {producer.topic_epoch for producer in producers} == {2}
    assert [rival.cancel() for rival in rivals] == [True] * 20


@pytest.mark.rule("E6")
def test_e6_the_background_thread_sleeps_while_producers_cannot_follow(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the time is over at which they should."""
    a, b, _ = neighbours
    begun, producer = threading.Event(), a.topic("orders").producer(EXCLUSIVE)
    monkeypatch.setattr(Following, "_begin", lambda *_, **__: begun.set())
    monkeypatch.setattr(life, "FOLLOWED_AFTER", SOON)
    assert a.unload("orders", to=b.id, timeout=PATIENCE)[0].state == "assigned"
    assert begun.wait(PATIENCE)
    until(lambda: producer._sender.session.follows_in() > 0)
    assert producer.state == "open"


@pytest.mark.rule("E6")
def test_e6_the_background_thread_sleeps_beside_a_producer_that_is_lost(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    monkeypatch.setattr(Following, "_begin", lambda *_, **__: None)  # it does not get there
    monkeypatch.setattr(life, "FOLLOWED_AFTER", SOON)
    assert a.unload("orders", to=b.id, timeout=PATIENCE)[0].state == "assigned"
    rival = c.topic("orders").producer(FENCING)
    session = producer._sender.session
    until(lambda: session.over)
    until(lambda: session._following.due_in() < 0)
    assert session.follows_in() == math.inf
    rival.close()


@pytest.mark.rule("E6", "B9")
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e6_an_error_where_producers_follow_is_that_of_their_sends(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails there, and whoever waits. The next send tries again."""
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    assert a.unload("orders", to=b.id)[0].state == "assigned"
    with monkeypatch.context() as patch:
        patch.setattr(Following, "request", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            producer.send(b"x", timeout=PATIENCE)
    assert producer.send(b"y", timeout=PATIENCE) == 0


@pytest.mark.rule("E6", "B9")
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e6_an_interrupt_before_a_session_waits_leaves_the_way_open(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE)
    assert a.unload("orders", to=b.id)[0].state == "assigned"

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Followers, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.send(b"x", timeout=PATIENCE)
    assert producer.send(b"y", timeout=PATIENCE) == 0


@pytest.mark.rule("E6")
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e6_with_one_that_sends_all_follow_in_few_transactions(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = neighbours
    names = [f"t{number}" for number in range(100)]
    producers = [a.topic(name).producer(EXCLUSIVE, name="p") for name in names]
    assert {move.state for move in a.unload(names, to=b.id, timeout=PATIENCE)} == {"assigned"}
    begun, follow_some = [0], b.backend.sessions.follow_some

    def counted(*args: Any) -> Any:
        begun[0] += 1
        return follow_some(*args)

    monkeypatch.setattr(b.backend.sessions, "follow_some", counted)
    monkeypatch.setattr(ownership_sessions, "CHUNK_SECONDS", PATIENCE)  # as on a fast machine
    producers[50].send(b"first")
    until(lambda: holders(a, names) == {"b"})
    assert begun[0] < 50
    sent = [producer.send(b"x") for producer in producers]
    assert sent == [int(number == 50) for number in range(100)]


def sessions() -> list[LocalSession]:
    """All that this process has in memory."""
    return [each for each in gc.get_objects() if type(each) is LocalSession]


@pytest.mark.long
def test_e2_a_handle_may_follow_for_ever(neighbours: Neighbours) -> None:
    """Its topic goes back and forth more often than Python can nest calls, and what it went
    through is not kept."""
    a, b, _ = neighbours
    others = {id(each) for each in sessions()}
    producer = a.topic("orders").producer(EXCLUSIVE)
    engines = itertools.cycle([b, a])
    for number in range(200):
        [move] = a.unload("orders", to=next(engines).id)
        assert move.ok
        assert producer.send(b"x") == number
    # A thread that has just handed the last ones on may still refer to them.
    until(lambda: len([each for each in sessions() if id(each) not in others]) < 5)
    producer.close()
    assert a.topic("orders").owner is None


def test_e2_what_waits_is_bounded_also_after_a_move(neighbours: Neighbours) -> None:
    a, b, _ = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE, linger=60, max_pending_bytes=10_000)
    a.unload("orders", to=b.id)
    for _ in range(1000):
        receipt = producer.send_async(bytes(100))
        assert producer._sender.appender.pending_bytes <= 10_000
    producer.flush()
    assert receipt.result(0) == 999


# ---- E2: everything at once --------------------------------------------------------------


def keep_sending(use: Use, stop: threading.Event, name: bytes) -> dict[bytes, int]:
    """Send until it is enough; the offset of each message."""
    sent = {}
    for number in itertools.count():
        value = b"%s-%d" % (name, number)
        sent[value] = use(value)
        if stop.is_set():
            break
    return sent


@pytest.mark.parametrize("seed", range(3))
def test_e2_threads_that_send_do_not_notice_that_their_topic_moves(
    neighbours: Neighbours, seed: int
) -> None:
    """Thirty moves between three engines, some to engines with a waiting producer, and some to
    engines without one. Four threads send by one producer, each in its own way: every message is
    acknowledged, and is in the log once."""
    chance, home = random.Random(seed), neighbours[0]
    topic, chronicle, kept = home.topic("orders"), Chronicle(home), []
    producer, stop = topic.producer(EXCLUSIVE), threading.Event()
    ways: list[Use] = [
        producer.send,
        lambda value: producer.send_async(value).result(PATIENCE),
        lambda value: producer.send_many([value])[0],
        lambda value: producer.send(value, timeout=PATIENCE),
    ]
    senders = [begin(keep_sending, use, stop, b"%d" % way) for way, use in enumerate(ways)]
    at = home
    for _ in range(30):
        at = chance.choice([engine for engine in neighbours if engine is not at])
        waiter = at.topic("orders").producer_async(WAIT) if chance.random() < 0.5 else None
        assert chance.choice(neighbours).unload("orders", to=at.id)[0].ok
        if waiter is not None:
            kept.append(waiter.result(PATIENCE))
        until(lambda: topic.owner is not None)
        assert topic.owner.engine_id == at.id
        time.sleep(chance.choice((0, 0.005)))
    stop.set()
    sent = [sender.result(PATIENCE) for sender in senders]
    chronicle.read()
    assert producer.state == "open"
    assert len(chronicle.reigns) == 31
    assert chronicle.offsets == {**sent[0], **sent[1], **sent[2], **sent[3]}


# ---- E2: a rival comes between -----------------------------------------------------------


def test_e2_no_caller_sees_the_library_s_own_error(
    neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends are paused for a move, and before what is queued can be drained, a third engine
    takes the topic by force."""
    a, b, c = neighbours
    producer = a.topic("orders").producer(EXCLUSIVE, linger=60)
    producer.send_async(b"queued")
    reached, go_on, commit = threading.Event(), threading.Event(), a.backend.committer.commit

    def wait_and_commit(*args: Any) -> None:
        if threading.current_thread().name == "exclusivelog-a":
            reached.set()
            go_on.wait(PATIENCE)
        commit(*args)

    monkeypatch.setattr(a.backend.committer, "commit", wait_and_commit)
    moving = begin(a.unload, "orders", b.id)
    assert reached.wait(PATIENCE)
    c.topic("orders").producer(FENCING)
    flushing = begin(producer.flush)
    time.sleep(0.1)
    go_on.set()
    assert type(flushing.exception(PATIENCE)) is FENCED
    assert not moving.result(PATIENCE)[0].ok


class Guest:
    """A producer that begins to send by a session."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_e2_a_producer_that_comes_while_others_are_handed_on_is_not_forgotten(
    engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It subscribes in another thread, between the reading of who is there and the writing."""
    here, there = topic.producer(name="here"), topic.producer(name="there")
    session, guest, threads = here._sender.session, Guest(), []
    without, subscribe = Listeners._without, session.subscribe

    def subscribed_meanwhile(listeners: Listeners, listener: Any) -> Any:
        left = without(listeners, listener)
        if not threads:
            threads.append(threading.Thread(target=subscribe, args=(guest, False)))
            threads[0].start()
            threads[0].join(0.3)  # it waits until what is read here is written
        return left

    moved = MOVED("the topic was handed over")
    session.moved = moved
    with monkeypatch.context() as patch:
        patch.setattr(Listeners, "_without", subscribed_meanwhile)
        patch.setattr(LocalSession, "subscribe", lambda *_, **__: None)
        session.hand_on(there._sender.session, False)
    threads[0].join(PATIENCE)
    assert session.listeners.all() == [guest]
    there.close()
