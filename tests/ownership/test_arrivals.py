"""Rule E3: requests at the destination while the source still releases the topic.

A shared or exclusive request of the destination waits for the release, up to its `timeout`,
instead of being refused because of a source that is about to release the topic. The wait ends with
the hand-over: by the release, a deadline, a cancel or the death of the source. A request that gives
up before that has changed nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.ownership import promoting
from exclusivelog.local.ownership.pending import Arrivals
from exclusivelog.local.ownership.transfers import HandOver
from testing.handovers import (
    KEEPALIVE,
    POINTS,
    Chronicle,
    HeldUp,
    Quick,
    Stage,
    at_once,
    begin,
    freeze,
    moved,
    queue_up,
    take_writer_lock,
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
    forked,
    open_producer,
    rows,
    send,
    until,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

FENCED = xl.ProducerFencedError


def ask(state: State, mode: str, **options: Any) -> None:
    """Request a producer, without waiting here."""
    state.kept["future"] = state.topic.producer_async(mode, **options)


def ask_in_a_thread(state: State, mode: str) -> None:
    """Request another one in a thread, which waits in its call."""
    state.kept["second"] = begin(state.topic.producer, mode)


def answer_of_the_thread(state: State) -> int:
    """The epoch that it got."""
    return int(state.kept["second"].result(PATIENCE).topic_epoch)


def arrivals(state: State) -> int:
    """How many requests of this engine wait for a release."""
    return len(state.engine.backend.pending._arrivals.all())


def ask_and_tell(state: State, mode: str, flag: str) -> int:
    """Open a producer, and make the file once the request waits for a release."""
    add_and_tell(flag)
    return open_producer(state, mode)


def add_and_tell(flag: str) -> None:
    """From now on, make the file when a request of this process has to wait for a release."""
    add = Arrivals.add

    def tell(self: Arrivals, *args: Any) -> None:
        add(self, *args)
        Path(flag).touch()

    Arrivals.add = tell


def registered(engine: xl.Engine) -> dict[str, Any]:
    """Who holds or awaits what, and what was told of it."""
    return {
        name: rows(engine)[name] for name in ("holders", "queue", "engines", "mail", "transfers")
    }


def is_done(state: State) -> bool:
    """Has the request its outcome?"""
    return bool(state.kept["future"].done())


def withdraw(state: State) -> bool:
    """Cancel the request."""
    return bool(state.kept["future"].cancel())


def begin_release(
    engine: xl.Engine, source: Quick, to: Quick, timeout: float = PATIENCE
) -> concurrent.futures.Future[Any]:
    """A move that is begun, and that the frozen source does not come to; its outcome."""
    freeze(source)
    moving = begin(engine.unload, "orders", to.id, timeout)
    until(lambda: rows(engine)["transfers"])
    return moving


@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_e3_a_request_at_the_destination_waits_for_the_release(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], mode: str
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    source.call(send, b"before")
    moving = begin_release(engine, source, destination)
    before = registered(engine)
    destination.call(ask, mode)
    destination.call(ask_in_a_thread, mode)  # another one, which waits in its call
    until(lambda: destination.call(arrivals) == 2)
    assert registered(engine) == before
    thaw(source)
    assert moving.result(PATIENCE)[0].ok
    if mode == EXCLUSIVE:  # the first one has it
        with pytest.raises(Failed, match=r"ProducerFencedError.*engine 'destination'"):
            destination.call(answer_of_the_thread)
    else:
        assert destination.call(answer_of_the_thread) == 1
    assert destination.call(take_writer_lock) == (2 if mode == EXCLUSIVE else 1)
    assert destination.call(send, b"after") == 1
    Chronicle(engine).read() if mode == EXCLUSIVE else None


@pytest.mark.rule("D4")
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_d4_dead_waiters_keep_no_request_from_waiting_for_the_release(
    engine: xl.Engine,
    topic: xl.Topic,
    quick: Callable[..., Quick],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """There are more of them than one request removes from the queue."""
    monkeypatch.setattr(promoting, "DROPPED_AT_ONCE", 3)
    source, victim = quick("source", keepalive=None), quick("victim")
    source.call(open_producer, EXCLUSIVE)
    victim.call(queue_many, 20)
    until(lambda: len(topic.waiters) == 20)
    victim.kill()
    until(lambda: not topic.waiters)  # the dead do not count
    freeze(source)
    moving = begin(engine.unload, "orders", engine.id, PATIENCE)
    until(lambda: rows(engine)["transfers"])
    future = topic.producer_async(mode)
    assert not future.done()
    thaw(source)
    assert moving.result(PATIENCE)[0].ok
    assert future.result(PATIENCE).send(b"x") == 0


def queue_many(state: State, count: int) -> None:
    """Queue up so often, in a worker."""
    state.kept["many"] = [state.topic.producer_async(WAIT) for _ in range(count)]


def test_e3_the_earlier_request_is_granted_whenever_the_release_comes(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source releases the topic while the destination looks after its requests."""
    source = quick("source", keepalive=None)
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    moving = begin(engine.unload, "orders", engine.id, PATIENCE)
    until(lambda: rows(engine)["transfers"])
    first, second = topic.producer_async(EXCLUSIVE), topic.producer_async(EXCLUSIVE)
    sessions = engine.backend.sessions
    still_coming, looks = sessions.still_coming, []

    def released_behind_the_first_look(number: int, to: str) -> Any:
        found = still_coming(number, to)
        if found is not None and not looks:
            looks.append(found)
            thaw(source)
            until(lambda: still_coming(number, to) is None)
        return found

    monkeypatch.setattr(sessions, "still_coming", released_behind_the_first_look)
    engine.backend.worker.wake()
    assert moving.result(PATIENCE)[0].ok
    with first.result(PATIENCE):
        with pytest.raises(xl.ProducerFencedError):
            second.result(PATIENCE)
    assert looks


def test_e4_a_late_coordinator_sees_that_shared_producers_have_the_topic(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again only when the destination has the topic, which has no owner then."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    moving = begin_release(engine, source, destination)
    look = engine.backend.hand_over.inspect

    def look_late(begun: Any) -> Any:
        until(lambda: [holder.engine_name for holder in topic.holders] == ["destination"])
        return look(begun)

    monkeypatch.setattr(engine.backend.hand_over, "inspect", look_late)
    destination.call(ask, SHARED)
    thaw(source)
    [move] = moving.result(PATIENCE)
    assert (move.state, move.target.id) == ("owned", destination.id)


@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_e3_the_wait_is_no_longer_than_its_timeout_and_leaves_nothing(
    engine: xl.Engine, quick: Callable[..., Quick], mode: str
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    moving = begin_release(engine, source, destination)
    before = registered(engine)
    for timeout in (0, 0.3):
        start = time.monotonic()
        with pytest.raises(Failed, match=r"WaitTimeoutError.*engine 'source'"):
            destination.call(open_producer, mode, timeout=timeout)
        assert time.monotonic() - start >= timeout
    assert registered(engine) == before
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    assert destination.call(open_producer, EXCLUSIVE) == 2


@pytest.mark.parametrize("elsewhere", ["source", "bystander"])
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_e3_requests_elsewhere_are_refused_at_once(
    path: str, quick: Callable[..., Quick], elsewhere: str, mode: str
) -> None:
    destination = quick("destination")
    with xl.open(path, name="source") as source, xl.open(path, name="bystander") as bystander:
        kept = source.topic("orders").producer(EXCLUSIVE)
        engine = {"source": source, "bystander": bystander}[elsewhere]
        owner = source.topic("orders").owner
        with HeldUp(source) as release:
            moving = begin(bystander.unload, "orders", destination.id, PATIENCE)
            release.await_it()
            error = begin(engine.topic("orders").producer, mode).exception(PATIENCE)
            assert isinstance(error, (FENCED, xl.ProducerBusyError))
            assert error.holder == owner
            release.go_on()
            assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
        assert kept.state == "moved"


def test_e3_force_at_the_destination_waits_for_no_one_else(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    moving = begin_release(engine, source, destination)
    assert destination.call(open_producer, FENCING) == 2
    assert moved(moving.result(PATIENCE)) == [("orders", "owned")]
    thaw(source)
    with pytest.raises(Failed, match="ProducerFencedError"):
        source.call(send, b"late")


def test_e3_what_would_not_be_granted_behind_the_release_is_refused_at_once(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """A waiter of the destination has the topic then; any waiter keeps shared ones out; and
    a claim that is over, or was never granted, is no better later."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    waiter = topic.producer_async(WAIT)
    moving = begin_release(engine, source, destination)
    with pytest.raises(Failed, match="ProducerBusyError"):
        destination.call(open_producer, SHARED)
    for claim, error in ((0, "ProducerFencedError"), (7, "InvalidEpochError")):
        with pytest.raises(Failed, match=error):
            destination.call(open_producer, EXCLUSIVE, topic_epoch=claim)
    destination.call(queue_up)
    with pytest.raises(Failed, match="ProducerFencedError"):
        destination.call(open_producer, EXCLUSIVE)
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "owned")]
    assert not waiter.done()


def test_e3_a_request_with_the_topic_s_epoch_waits_and_gets_the_next(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    begin_release(engine, source, destination)
    destination.start(open_producer, EXCLUSIVE, topic_epoch=1)
    assert not destination.answered(0.2)
    thaw(source)
    assert destination.answer() == 2


# ---- E4: the hand-over ends otherwise ----------------------------------------------------

ENDS = ["cancelled", "deadline", "coordinator"]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_e4_a_request_that_waits_is_refused_when_the_hand_over_ends_without_release(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str, mode: str
) -> None:
    source, destination, third = quick("source", keepalive=None), quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    third.start(unload_for, destination.id, PATIENCE if how == "cancelled" else 2.0)
    until(lambda: "releasing" in [event.kind for event in engine.history("orders")])
    if how == "coordinator":  # no process is left to end the move: its deadline does
        third.kill()
    destination.call(ask, mode)
    assert how != "cancelled" or destination.call(is_done) is False
    if how == "cancelled":
        engine.cancel_unload("orders")
    until(lambda: destination.call(is_done))
    with pytest.raises(Failed, match=r"Producer(Fenced|Busy)Error.*engine 'source'"):
        destination.call(take_writer_lock)
    thaw(source)
    assert source.call(send, b"mine") == 0
    assert topic.owner.engine_id == source.id


def unload_for(state: State, to: str, timeout: float) -> list[tuple[str, str]]:
    """What became of the move."""
    return moved(state.engine.unload("orders", to, timeout))


@pytest.mark.parametrize("how", ["killed", "hung", "closed"])
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_e4_a_request_that_waits_is_granted_when_the_source_goes(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str, mode: str
) -> None:
    """Also where the coordinator, which would have noticed, is dead before."""
    source = quick("source", keepalive=None)
    destination, third = quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    freeze(source, KEEPALIVE if how == "hung" else None)
    third.start(unload_for, destination.id, PATIENCE)
    until(lambda: rows(engine)["transfers"])
    third.kill()
    destination.start(open_producer, mode)
    if how == "killed":
        source.kill()
    elif how == "closed":
        thaw(source)
        source.end()
    assert destination.answer() == (2 if mode == EXCLUSIVE else 1)
    assert destination.call(send, b"first") == 0
    if how == "hung":
        thaw(source)
        with pytest.raises(Failed, match=r"Producer(Fenced|Moved)Error"):
            source.call(send, b"late")
    assert [event.kind for event in engine.history("orders")][-1] in ("grant", "cancel")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_e4_a_destination_that_falls_while_it_waits_leaves_the_topic_to_others(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], number: int
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    bystander = topic.producer_async(WAIT)
    moving = begin_release(engine, source, destination)
    destination.call(ask, EXCLUSIVE)
    if number == signal.SIGKILL:
        destination.kill()
    else:
        freeze(destination, KEEPALIVE)
        until(lambda: destination.id not in {each.id for each in engine.engines()})
    thaw(source)
    [(_, state)] = moved(moving.result(PATIENCE))
    owner = topic.owner
    kept = owner is not None and owner.engine_id == source.id
    if kept:
        assert (state, source.call(send, b"mine")) == ("failed", 0)
    else:  # a source that was stopped itself does not judge by the silence meanwhile (rule C9)
        assert number == signal.SIGSTOP
    source.end()
    assert bystander.result(PATIENCE).send(b"next") == int(kept)
    if number == signal.SIGSTOP:
        thaw(destination)
        until(lambda: destination.call(is_done))
        with pytest.raises(Failed, match="ProducerFencedError"):
            destination.call(take_writer_lock)


def test_e4_a_terminated_or_deleted_topic_ends_the_wait(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    begin_release(engine, source, destination)
    destination.start(open_producer, EXCLUSIVE)
    assert not destination.answered(0.2)
    topic.terminate()
    with pytest.raises(Failed, match="TopicTerminatedError"):
        destination.answer()
    thaw(source)


# ---- D5: giving up -----------------------------------------------------------------------


def test_d5_a_request_that_waits_for_a_release_can_be_cancelled(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    moving = begin_release(engine, source, destination)
    before = registered(engine)
    destination.call(ask, EXCLUSIVE)
    assert destination.call(withdraw)
    assert destination.call(withdraw)  # it is cancelled, and stays so
    assert registered(engine) == before
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    assert destination.call(open_producer, EXCLUSIVE) == 2


def test_d5_ctrl_c_ends_the_wait_for_a_release(
    engine: xl.Engine, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    moving = begin_release(engine, source, destination)
    flag = f"{engine.path}.arrived"
    destination.start(ask_and_tell, EXCLUSIVE, flag)
    until(lambda: os.path.exists(flag))
    assert not destination.answered(0.3)
    destination.signal(signal.SIGINT)
    with pytest.raises(Failed, match="KeyboardInterrupt"):
        destination.answer()
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    time.sleep(0.2)
    assert [event.kind for event in engine.history("orders")].count("grant") == 1


@pytest.mark.long
def test_d5_a_cancel_that_races_with_the_release_leaves_no_orphan(path: str) -> None:
    """Sixty rounds: granted and returned, or not owner."""
    with xl.open(path, name="source") as source, xl.open(path, name="destination") as destination:
        topic, chronicle = source.topic("orders"), Chronicle(source)
        ends = set()
        for _ in range(60):
            owner = topic.producer(EXCLUSIVE, follow=False)
            with HeldUp(source) as release:
                moving = begin(source.unload, "orders", destination.id)
                release.await_it()
                asked = destination.topic("orders").producer_async(EXCLUSIVE)
                _, cancelled = at_once(release.go_on, asked.cancel)
                assert moving.result(PATIENCE)[0].ok
            ends.add(cancelled)
            if not cancelled:
                asked.result(PATIENCE).close()
            else:
                source.cancel_unload("orders")
            assert topic.owner is None
            owner.close()
            chronicle.read()


def test_d5_closing_the_destination_ends_the_wait(path: str, quick: Callable[..., Quick]) -> None:
    source = quick("source", keepalive=None)
    source.call(open_producer, EXCLUSIVE)
    with xl.open(path, name="coordinator") as coordinator:
        destination = xl.open(path, name="destination")
        freeze(source)
        moving = begin(coordinator.unload, "orders", destination.id)
        until(lambda: rows(coordinator)["transfers"])
        asked = destination.topic("orders").producer_async(EXCLUSIVE)
        assert not asked.done()
        destination.close()
        assert isinstance(asked.exception(PATIENCE), xl.EngineClosedError)
        thaw(source)
        assert moved(moving.result(PATIENCE)) == [("orders", "failed")]


def test_c5_a_forked_child_does_not_wait_for_its_parent_s_request(
    path: str, quick: Callable[..., Quick]
) -> None:
    source = quick("source", keepalive=None)
    source.call(open_producer, EXCLUSIVE)
    with xl.open(path, name="destination") as destination:
        freeze(source)
        moving = begin(destination.unload, "orders", destination.id)
        until(lambda: rows(destination)["transfers"])
        asked = destination.topic("orders").producer_async(EXCLUSIVE)
        assert forked(asked.cancel) is False
        with pytest.raises(Failed, match="EngineClosedError"):
            forked(asked.result)
        assert not asked.done()
        thaw(source)
        assert moving.result(PATIENCE)[0].ok
        assert asked.result(PATIENCE).topic_epoch == 2


def test_e3_an_awaited_request_waits_and_can_be_cancelled(
    path: str, quick: Callable[..., Quick]
) -> None:
    source = quick("source", keepalive=None)
    source.call(open_producer, EXCLUSIVE)

    async def scene() -> int:
        async with aio.open(path, name="destination") as destination:
            topic = destination.topic("orders")
            freeze(source)
            moving = asyncio.ensure_future(destination.unload("orders", destination.id, PATIENCE))
            while topic.sync.engine.backend.sessions.still_coming(topic.id, destination.id) is None:
                await asyncio.sleep(0.01)
            impatient = asyncio.ensure_future(topic.producer(EXCLUSIVE))
            patient = asyncio.ensure_future(topic.producer(EXCLUSIVE, timeout=PATIENCE))
            await asyncio.sleep(0.1)
            impatient.cancel()
            with pytest.raises(asyncio.CancelledError):
                await impatient
            assert not patient.done()
            await asyncio.to_thread(thaw, source)
            async with await patient as producer:
                assert (await moving)[0].ok
                return await producer.send(b"here")

    assert asyncio.run(asyncio.wait_for(scene(), PATIENCE)) == 0


# ---- E4: at every step -------------------------------------------------------------------


class Asking(Stage):
    """A stage whose destination does not queue: it requests the topic again and again, and the
    source releases it only when such a request waits for that."""

    def _ask(self, asks: str, heir: bool) -> Quick:
        flag = f"{self.notes}-{self.rounds}.arrived"
        self.cast("source").call(release_behind, flag)
        self.cast("destination").call(ask_on, flag)
        return super()._ask(asks, heir)


def release_behind(state: State, flag: str) -> None:
    """Release topics only once the file is there."""
    release = HandOver.release

    def release_late(self: HandOver, sessions: Any) -> Any:
        with contextlib.suppress(AssertionError):
            until(lambda: os.path.exists(flag))
        return release(self, sessions)

    state.engine.backend.hand_over.release = functools.partial(
        release_late, state.engine.backend.hand_over
    )


def ask_on(state: State, flag: str) -> None:
    """Request the topic until it is granted, or `retire` is called; make the file when a request
    has to wait for its release."""
    add_and_tell(flag)
    state.producer = None
    state.kept["stop"] = stop = threading.Event()
    state.kept["sender"] = thread = threading.Thread(target=_ask_on, args=(state, stop))
    thread.start()


def _ask_on(state: State, stop: threading.Event) -> None:
    while not stop.wait(0.001):
        try:
            # One that ended before the release would be followed by one that comes after it.
            state.producer = state.topic.producer(EXCLUSIVE, timeout=PATIENCE)
        except xl.ExclusiveLogError:
            continue
        return


def play(path: str, asks: str, names: list[str], number: int) -> int:
    """A round for each of these points; how many messages were noted."""
    with Asking(path) as stage:
        for name in names:
            try:
                stage.play(name, asks, False, number)
            except BaseException as error:
                error.add_note(f"in round {stage.rounds}: {name}; {asks=}")
                raise
        assert stage.engine.verify().ok
        assert rows(stage.engine)["transfers"] == []
        return stage.chronicle.check(stage.notes)


@pytest.mark.sampled
@pytest.mark.parametrize("role", ["coordinator", "source", "arrival"])
def test_e4_killed_at_any_step_beside_a_request_that_waits(path: str, role: str) -> None:
    names = [name for name, point in POINTS.items() if point.role == role]
    stages = [
        functools.partial(play, f"{path}-{asks}", asks, names, signal.SIGKILL)
        for asks in ("source", "third")
    ]
    assert min(at_once(*stages)) >= len(names)


@pytest.mark.long
@pytest.mark.parametrize("role", ["coordinator", "source", "arrival"])
def test_e4_stopped_at_any_step_beside_a_request_that_waits(path: str, role: str) -> None:
    names = [name for name, p in POINTS.items() if p.role == role and not p.inside]
    play(path, "third", names, signal.SIGSTOP)
