"""Rules E1 to E4 for one producer: it is moved, and the others are not.

A shared producer is moved by its name, or by its own `move`. Those beside it send on meanwhile,
those who wait for the topic go on waiting, and its place among the producers is kept for the
destination. Source, destination and coordinator fall at every step.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.handovers import (
    KEEPALIVE,
    KILLED,
    POINTS,
    SENDS,
    HeldUp,
    Notes,
    Quick,
    _send_on,
    at_once,
    begin,
    end_reservations,
    fall_at,
    freeze,
    moved,
    quick_workers,
    retire,
    steps,
    thaw,
)
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
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


def move(state: State, to: str, timeout: float = PATIENCE, **options: Any) -> str:
    """What became of the kept producer's move."""
    assert state.producer is not None
    return state.producer.move(to, timeout, **options).state


def name_and_last(state: State) -> tuple[str, int]:
    """The kept producer's name, and its last sequence id."""
    assert state.producer is not None
    return state.producer.name, state.producer.last_sequence_id


def unload_one(
    state: State, name: str, to: str, timeout: float = PATIENCE
) -> list[tuple[str, str]]:
    """What became of the move of the producer of that name."""
    return moved(state.engine.unload("orders", to, timeout, producer=name))


def bare(engine: xl.Engine) -> bool:
    """There is no holder, waiter or hand-over."""
    tables = rows(engine)
    return not (tables["holders"] or tables["queue"] or tables["transfers"])


# ---- E1 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["source", "destination", "third"])
def test_e1_one_shared_producer_moves_and_the_others_stay(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], asks: str
) -> None:
    workers = {name: quick(name, properties={"at": name}) for name in ("source", "destination")}
    workers["third"] = quick("third")
    source, destination = workers["source"], workers["destination"]
    source.call(open_producer, SHARED, name="p")
    others = [topic.producer(SHARED), topic.producer(SHARED, name="q")]
    source.call(send, b"before")
    assert workers[asks].call(unload_one, "p", destination.id) == [("orders", "assigned")]
    with pytest.raises(
        Failed, match=rf"ProducerMovedError.*engine 'destination' .*{destination.pid}"
    ):
        source.call(send, b"late")
    assert source.call(producer_state) == "moved"
    assert [other.send(b"x") for other in others] == [1, 2]
    destination.call(open_producer, SHARED, name="p")
    assert destination.call(name_and_last) == ("p", 0)  # its sequence ids go on
    assert destination.call(send, b"after") == 3
    assert workers[asks].call(unload_one, "p", destination.id) == [("orders", "owned")]
    assert {holder.engine_name for holder in topic.holders} == {"test", "destination"}
    assert rows(engine)["transfers"] == []
    found = steps(engine.history("orders"))
    assert found == [("releasing", "producer"), ("assigned", "producer"), ("admit", "hand-over")]


def test_e1_an_exclusive_producer_moves_with_its_topic(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination", properties={"address": "unix:/d"})
    owner = topic.producer(EXCLUSIVE, name="p")
    done = owner.move(to=destination.id)
    assert (done.state, done.producer, done.source.producer_name) == ("assigned", "p", "p")
    with pytest.raises(MOVED) as error:
        owner.send(b"late")
    assert error.value.successor.properties == {"address": "unix:/d"}
    with pytest.raises(MOVED) as again:
        owner.move(to=destination.id)
    assert again.value is error.value
    assert destination.call(open_producer, EXCLUSIVE) == 2


def test_e1_a_producer_that_holds_nothing_is_not_moved(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE, name="p")
    waiter = topic.producer_async(WAIT, name="w")
    before = rows(engine)
    for name in ("nobody", "w"):
        [move] = engine.unload("orders", to=destination.id, producer=name)
        assert (move.state, move.ok, move.producer) == ("failed", False, name)
        assert name in move.reason
    for wrong in (1, owner):
        with pytest.raises(TypeError, match="producer"):
            engine.unload("orders", to=destination.id, producer=wrong)  # type: ignore[arg-type]
    assert rows(engine) == before
    assert not waiter.done()


def test_e1_a_seat_on_its_way_goes_nowhere_else(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, first, second = quick("source", keepalive=None), quick("first"), quick("second")
    source.call(open_producer, SHARED, name="p")
    freeze(source)
    moving = begin(functools.partial(engine.unload, producer="p"), "orders", first.id)
    until(lambda: rows(engine)["transfers"])
    for state in ("releasing", "assigned"):
        [move] = engine.unload("orders", to=second.id, producer="p")
        assert (move.state, move.ok) == ("failed", False)
        assert f"engine 'first' (id {first.id})" in move.reason
        if state == "releasing":
            thaw(source)
            assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]


# ---- E2 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use", SENDS.values(), ids=SENDS)
def test_e2_sends_wait_for_the_move_and_then_go_on_in_the_same_process(
    path: str, use: Callable[[xl.Producer], Any]
) -> None:
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        producer = a.topic("orders").producer(SHARED, name="p")
        beside = a.topic("orders").producer(SHARED)
        producer.send(b"before")
        with HeldUp(a) as release:
            moving = begin(producer.move, b.id)
            release.await_it()
            sending = begin(use, producer)
            assert begin(beside.send, b"beside").result(PATIENCE) == 1  # does not wait
            assert not sending.done()
            release.go_on()
            assert moving.result(PATIENCE).ok
        assert sending.result(PATIENCE) == 2
        assert (producer.state, beside.state) == ("open", "open")
        assert {h.engine_name for h in a.topic("orders").holders} == {"a", "b"}
        assert {m.producer_name for m in a.topic("orders").reader()} == {"p", beside.name}
        producer.close()
        assert [h.engine_name for h in a.topic("orders").holders] == ["a"]


def test_e2_a_handle_follows_to_the_producer_that_took_its_seat_and_further(path: str) -> None:
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b, xl.open(path) as c:
        producer = a.topic("orders").producer(SHARED, name="p")
        assert producer.move(to=b.id).state == "assigned"
        there = b.topic("orders").producer(SHARED, name="p")
        assert producer.send(b"through b") == 0
        assert [h.engine_name for h in c.topic("orders").holders] == ["b"]
        assert producer.move(to=c.id).state == "assigned"  # what it is by now
        assert (there.send(b"through c"), producer.send(b"as well")) == (1, 2)
        assert [h.engine_id for h in c.topic("orders").holders] == [c.id]
        there.close()
        producer.close()
        assert bare(a)


def test_e2_what_was_queued_is_in_the_log_before_the_destination_s_first_message(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    producer = topic.producer(SHARED, name="p", linger=60)
    receipts = [producer.send_async(b"%d" % number) for number in range(100)]
    assert producer.move(to=destination.id).ok
    assert [receipt.result(0) for receipt in receipts] == list(range(100))
    destination.call(open_producer, SHARED, name="p")
    assert destination.call(send, b"after") == 100


def test_e2_a_dropped_or_closed_producer_leaves_its_seat_to_the_destination(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """It is closed before its engine comes to releasing it."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, SHARED, name="p")
    waiter = topic.producer_async(WAIT)
    freeze(source)
    moving = begin(functools.partial(engine.unload, producer="p"), "orders", destination.id)
    until(lambda: rows(engine)["transfers"])
    source.kill()
    assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    assert destination.call(open_producer, SHARED) == 0  # past the waiter
    assert not waiter.done()


# ---- E3 ----------------------------------------------------------------------------------


def test_e3_the_seat_is_kept_for_the_destination_past_those_who_wait(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination, other = quick("source"), quick("destination"), quick("other")
    source.call(open_producer, SHARED, name="p")
    waiter = topic.producer_async(WAIT)
    assert engine.unload("orders", to=destination.id, producer="p")[0].state == "assigned"
    assert not waiter.done()
    assert topic.holders == []
    for worker in (other, source):
        with pytest.raises(Failed, match="ProducerBusyError"):
            worker.call(open_producer, SHARED)
    destination.call(open_producer, SHARED, name="another")
    assert not waiter.done()
    with pytest.raises(Failed, match="ProducerBusyError"):  # there was one seat
        destination.call(open_producer, SHARED)
    assert destination.call(retire, "x") == "owner"
    assert waiter.result(PATIENCE).topic_epoch == 1


def test_e3_a_request_at_the_destination_waits_for_the_seat(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, SHARED, name="p")
    waiter = topic.producer_async(WAIT)
    freeze(source)
    moving = begin(functools.partial(engine.unload, producer="p"), "orders", destination.id)
    until(lambda: rows(engine)["transfers"])
    with pytest.raises(Failed, match="WaitTimeoutError"):
        destination.call(open_producer, SHARED, timeout=0.1)
    destination.start(open_producer, SHARED, name="p")
    assert not destination.answered(0.2)
    thaw(source)
    assert moving.result(PATIENCE)[0].ok
    destination.answer()
    assert destination.call(send, b"here") == 0
    assert not waiter.done()


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["deadline", "cancelled", "killed", "closed", "hung"])
def test_e4_a_reserved_seat_ends_and_who_waits_is_promoted(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str
) -> None:
    source, destination = quick("source"), quick("destination")
    source.call(open_producer, SHARED, name="p")
    waiter = topic.producer_async(WAIT)
    [move] = engine.unload("orders", to=destination.id, timeout=PATIENCE, producer="p")
    assert move.state == "assigned"
    if how == "deadline":
        end_reservations(engine, 0.5)
    elif how == "cancelled":
        assert engine.cancel_unload("orders") == ["orders"]
    elif how == "killed":
        destination.kill()
    elif how == "closed":
        destination.end()
    elif how == "hung":
        freeze(destination, KEEPALIVE)
    start = time.monotonic()
    assert waiter.result(PATIENCE).topic_epoch == 1
    assert time.monotonic() - start < PATIENCE / 2
    assert rows(engine)["transfers"] == []
    ends = {"deadline": "deadline", "cancelled": "cancelled"}
    if how in ends:  # else its engine is evicted as a whole, or the seat is found without one
        assert ("cancel", ends[how]) in steps(engine.history("orders"))
    if how == "hung":
        thaw(destination)


@pytest.mark.parametrize("how", ["deadline", "cancelled", "destination"])
def test_e4_a_seat_that_is_not_released_stays_where_it_is(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, SHARED, name="p")
    freeze(source)
    seconds = 0.4 if how == "deadline" else PATIENCE
    moving = begin(
        functools.partial(engine.unload, producer="p"), "orders", destination.id, seconds
    )
    until(lambda: rows(engine)["transfers"] or moving.done())  # the deadline may be over
    if how == "cancelled":
        assert engine.cancel_unload(["orders"]) == ["orders"]
    elif how == "destination":
        destination.kill()
        thaw(source)
    [move] = moving.result(PATIENCE)
    assert (move.state, move.producer) == ("failed", "p")
    if how != "destination":
        thaw(source)
    assert source.call(send, b"mine") == 0
    assert source.call(producer_state) == "open"


def test_e4_force_takes_the_topic_from_a_seat_at_every_step(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    for step in ("releasing", "assigned"):
        source = quick("source", keepalive=None)
        source.call(open_producer, SHARED, name="p")
        beside = topic.producer(SHARED)
        if step == "releasing":
            freeze(source)
        moving = begin(functools.partial(engine.unload, producer="p"), "orders", destination.id)
        if step == "assigned":
            assert moving.result(PATIENCE)[0].ok
        else:
            until(lambda: rows(engine)["transfers"])
        with topic.producer(FENCING) as producer:
            assert [each.engine_name for each in topic.holders] == ["test"]
            assert rows(engine)["transfers"] == []
            producer.send(b"mine")
        if step == "releasing":
            thaw(source)
            assert moved(moving.result(PATIENCE)) == [("orders", "failed")]
        with pytest.raises(FENCED):
            beside.send(b"late")
        with pytest.raises(Failed, match="Error"):
            source.call(send, b"late")
        assert bare(engine)
    assert values(topic) == [b"mine", b"mine"]


def test_e4_deleting_a_topic_ends_a_reserved_seat(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    topic.producer(SHARED, name="p").move(to=destination.id)
    engine.delete_topic("orders")
    assert bare(engine)


@pytest.mark.rule("G8")
@pytest.mark.parametrize("step", ["releasing", "assigned"])
def test_e4_terminating_a_topic_ends_a_seat_s_move(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], step: str
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, SHARED, name="p")
    if step == "releasing":
        freeze(source)
    moving = begin(functools.partial(engine.unload, producer="p"), "orders", destination.id)
    if step == "assigned":
        assert moving.result(PATIENCE)[0].ok
    until(lambda: rows(engine)["transfers"])
    topic.terminate()
    assert rows(engine)["transfers"] == rows(engine)["holders"] == []
    assert moved(moving.result(PATIENCE)) == [
        ("orders", "failed" if step == "releasing" else "assigned")
    ]
    with pytest.raises(Failed, match="TopicTerminatedError"):
        destination.call(open_producer, SHARED)
    if step == "releasing":
        thaw(source)
        with pytest.raises(Failed, match="TopicTerminatedError"):
            source.call(send, b"late")
    assert bare(engine)


# ---- at every step -----------------------------------------------------------------------


def share(state: State, notes: str, tag: str) -> None:
    """Be a shared producer, and send until the seat is lost or `retire` is called."""
    state.producer = state.topic.producer(SHARED, name="p")
    state.kept["stop"] = stop = threading.Event()
    arguments = (state.producer, Notes(notes), tag, stop)
    state.kept["sender"] = thread = threading.Thread(target=_send_on, args=arguments)
    thread.start()


class Round:
    """A shared producer moves, and somebody falls; another shared producer and a waiter are in
    this process, which is never harmed."""

    def __init__(self, path: str, make: Callable[..., Quick]) -> None:
        self.engine = xl.open(path, name="bystander")
        self.topic = self.engine.topic("orders")
        self.notes, self.make, self.cast = f"{path}.notes", make, dict[str, Quick]()

    def player(self, role: str) -> Quick:
        if role not in self.cast:
            self.cast[role] = self.make(role)
        return self.cast[role]

    def play(self, number: int, name: str, asks: str, sign: int) -> None:
        point, stops = POINTS[name], sign == signal.SIGSTOP
        role = {"coordinator": asks, "heir": "destination"}.get(point.role, point.role)
        falling = self.player(role)
        source, destination = self.player("source"), self.player("destination")
        source.call(share, self.notes, f"{number}")
        beside = self.topic.producer(SHARED)
        falling.call(fall_at, name, sign)
        busy = self.player(asks)
        busy.start(unload_one, "p", destination.id)
        if point.role == "heir":
            busy.answer()
            destination.start(open_producer, SHARED, name="p")
            busy = destination
        self.await_the_fall(falling, role, stops)
        upright = [worker for worker in self.cast.values() if worker is not falling]
        within(lambda: beside.send(b"%d-beside" % number))  # the others notice nothing
        if busy in upright:
            with contextlib.suppress(Failed):
                busy.answer()
        self.use(number, beside, upright)
        if stops:
            falling.signal(signal.SIGCONT)
            if busy is falling:
                with contextlib.suppress(Failed):
                    falling.answer()
            falling.call(retire, f"{number}-late")
            for worker in self.cast.values():
                worker.end()
            self.cast.clear()

    def await_the_fall(self, falling: Quick, role: str, stops: bool) -> None:
        if stops:
            falling.await_strike()
            return
        falling.process.join(PATIENCE)
        assert falling.process.exitcode in KILLED
        del self.cast[role]

    def use(self, number: int, beside: xl.Producer, upright: list[Quick]) -> None:
        """Once the remaining sessions are closed, the waiter is owner."""
        for worker in sorted(upright, key=lambda each: each is self.cast.get("destination")):
            worker.call(retire, f"{number}-{worker.pid}")
            if worker is self.cast.get("destination"):
                with contextlib.suppress(Failed):
                    worker.call(open_producer, SHARED, name="p", timeout=PATIENCE)
                    worker.call(retire, f"{number}-seat")
        beside.close()
        with within(lambda: self.topic.producer(WAIT)) as producer:
            producer.send(b"%d-owner" % number)

    def judge(self) -> int:
        """Every message once, and where its sender was told."""
        there = {message.value: message.offset for message in self.topic.reader()}
        assert len(there) == self.topic.next_offset
        noted = [line.rsplit(b" ", 1) for line in Path(self.notes).read_bytes().splitlines()]
        for value, offset in noted:
            assert there.get(value, -1) == int(offset), value
        assert self.engine.verify().ok
        assert bare(self.engine)
        return len(noted)


def play(path: str, asks: str, names: list[str], sign: int) -> int:
    """A round for each point."""
    with quick_workers(path) as make:
        rounds = Round(path, make)
        try:
            for number, name in enumerate(names):
                try:
                    rounds.play(number, name, asks, sign)
                except BaseException as error:
                    error.add_note(f"in round {number}: {name}; {asks=}")
                    raise
            return rounds.judge()
        finally:
            for worker in rounds.cast.values():
                worker.end()
            rounds.engine.close()


ROLES = ["coordinator", "source", "heir"]


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_e4_killed_at_any_step_of_a_seat_s_move(path: str, role: str) -> None:
    names = [name for name, point in POINTS.items() if point.role == role]
    stages = [
        functools.partial(play, f"{path}-{asks}", asks, names, signal.SIGKILL)
        for asks in ("source", "destination", "third")
    ]
    assert min(at_once(*stages)) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("role", ROLES)
def test_e4_stopped_at_any_step_of_a_seat_s_move(path: str, role: str) -> None:
    names = [name for name, p in POINTS.items() if p.role == role and not p.inside]
    lanes = [names[lane::3] for lane in range(3)]
    at_once(
        *[
            functools.partial(play, f"{path}-{lane}", "third", names, signal.SIGSTOP)
            for lane, names in enumerate(lanes)
            if names
        ]
    )


def test_e2_an_awaitable_producer_moves(path: str) -> None:
    import asyncio

    async def scene() -> tuple[str, int]:
        async with aio.open(path, "a") as a, aio.open(path, "b") as b:
            async with await a.topic("orders").producer(name="p") as producer:
                state = (await producer.move(b.id)).state
                return state, await producer.send(b"by b")

    assert asyncio.run(asyncio.wait_for(scene(), PATIENCE)) == ("assigned", 0)


def test_e4_an_awaited_move_of_one_producer_can_be_cancelled(path: str) -> None:
    import asyncio

    async def scene() -> tuple[str, int]:
        async with aio.open(path, "a") as a, aio.open(path, "b") as b:
            producer = await a.topic("orders").producer(name="p")
            with HeldUp(a.sync) as release:
                moving = asyncio.ensure_future(producer.move(b.id, PATIENCE))
                await asyncio.to_thread(release.await_it)
                moving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await moving
                assert a.topic("orders").transfers == []
                release.go_on()
            offset = await producer.send(b"mine")
            return producer.state, offset

    assert asyncio.run(asyncio.wait_for(scene(), PATIENCE)) == ("open", 0)


def test_e4_a_seat_moves_back_and_forth(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """Twenty moves between two processes, with a waiter who never gets in."""
    here, there = quick("here"), quick("there")
    here.call(open_producer, SHARED, name="p")
    topic_waiter = topic.producer_async(WAIT)
    for number in range(20):
        assert here.call(move, there.id) == "assigned"
        there.call(open_producer, SHARED, name="p")
        assert there.call(send, b"%d" % number) == number
        assert there.call(name_and_last) == ("p", number)
        here, there = there, here
    assert not topic_waiter.done()
    assert here.call(retire, "end") == "owner"
    assert topic_waiter.result(PATIENCE).topic_epoch == 1
