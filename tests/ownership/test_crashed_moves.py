"""Rule E4: a hand-over of which a part falls, stops, gives up, or meets another one.

Three processes take part in a move: the source, the destination, and the coordinator, which may
be either of them. Each of them is killed, and each is stopped, at every step, hundreds of
times. In the end the topic has its old owner or its new one, or goes to its best waiter: it never
has two owners and never stays blocked, and no acknowledged message is lost or duplicated.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local import unloading
from testing.handovers import (
    KEEPALIVE,
    KILLED,
    POINTS,
    Chronicle,
    HeldUp,
    Quick,
    Stage,
    at_once,
    begin,
    begin_to_wait,
    fall_at,
    freeze,
    moved,
    queue_up,
    reign_and_queue,
    retire,
    steps,
    take_writer_lock,
    thaw,
    unload,
)
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    WAIT,
    Failed,
    open_producer,
    rows,
    send,
    until,
    values,
)

pytestmark = pytest.mark.once

ASKS = ("source", "destination", "third")
# A destination hears of its grant only if it waits, and an heir is one that does not.
WAITING = {"destination": (True,), "heir": (False,)}


# ---- every step --------------------------------------------------------------------------


def play(path: str, asks: str, names: list[str], number: int) -> int:
    """A round for each of these points, on a ledger of its own; how many messages were noted."""
    with Stage(path) as stage:
        for name in names:
            for waiting in WAITING.get(POINTS[name].role, (True, False)):
                try:
                    stage.play(name, asks, waiting, number)
                except BaseException as error:
                    error.add_note(f"in round {stage.rounds}: {name}; {asks=}, {waiting=}")
                    raise
        assert stage.engine.verify().ok
        assert rows(stage.engine)["transfers"] == []
        return stage.chronicle.check(stage.notes)


@pytest.mark.long
@pytest.mark.parametrize("role", ["coordinator", "source", "destination", "heir"])
def test_e4_killed_at_any_step_no_process_is_stuck_and_nothing_is_lost(
    path: str, role: str
) -> None:
    """Twice 132 rounds. A process is killed before and after every call that a move consists of,
    right before each commit, and right after it, before any process is notified."""
    names = [name for name, point in POINTS.items() if point.role == role]
    stages = [
        functools.partial(play, f"{path}-{asks}-{number}", asks, names, signal.SIGKILL)
        for asks in ASKS
        for number in range(2)
    ]
    assert min(at_once(*stages)) >= len(names)


@pytest.mark.long
@pytest.mark.parametrize("role", ["coordinator", "source", "destination", "heir"])
def test_e4_stopped_at_any_step_no_process_is_stuck_and_nothing_is_lost(
    path: str, role: str
) -> None:
    """SIGSTOP strikes at the same places, but for those inside the ledger. The others pass over
    who is silent for longer than its keepalive, and use the topic; when it goes on, it learns
    what has become of its session, and nothing of it reaches the log any more."""
    names = [name for name, p in POINTS.items() if p.role == role and not p.inside]
    lanes = [names[lane::4] for lane in range(4)]
    at_once(
        *[
            functools.partial(play, f"{path}-{lane}", "third", names, signal.SIGSTOP)
            for lane, names in enumerate(lanes)
            if names
        ]
    )


@pytest.mark.sampled
@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e4_interrupted_at_any_step_the_call_can_be_repeated(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], waiting: bool
) -> None:
    """Ctrl-C interrupts the coordinator at any point. A move that is under way continues or is
    given up; repeating the call completes it."""
    chronicle = Chronicle(engine)
    for name in [name for name, point in POINTS.items() if point.role == "coordinator"]:
        source, destination, coordinator = quick("source"), quick("destination"), quick("third")
        source.call(reign_and_queue, f"{path}.notes", name)
        if waiting:
            destination.call(queue_up)
        coordinator.call(fall_at, name, signal.SIGINT)
        with pytest.raises(Failed, match="KeyboardInterrupt"):
            coordinator.call(unload, "orders", destination.id)
        expected = "owned" if waiting else "assigned"
        assert coordinator.call(unload, "orders", destination.id) == [("orders", expected)]
        if not waiting:
            destination.call(queue_up)
        assert destination.call(retire, name) == "owner"
        assert source.call(retire, name) == "ProducerMovedError"
        chronicle.read()
    assert chronicle.check(f"{path}.notes") >= 6


# ---- the deadline ------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e4_a_source_that_does_not_answer_keeps_the_topic(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], waiting: bool
) -> None:
    """The source is stopped, within its keepalive. At the deadline the move is off, and the
    source goes on as if nothing had been: with what it has queued, and with new messages."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(reign_and_queue, f"{path}.notes", "x")
    if waiting:
        destination.call(queue_up)
    freeze(source)
    start = time.monotonic()
    [move] = engine.unload("orders", to=destination.id, timeout=0.4)
    assert 0.4 <= time.monotonic() - start < PATIENCE / 2
    assert (move.state, move.ok, move.source.engine_id) == ("failed", False, source.id)
    assert f"held by producer 'source-1' of engine 'source' (id {source.id}" in move.reason
    until(lambda: rows(engine)["transfers"] == [])
    assert steps(engine.history("orders"))[1:] == [("releasing", "unload"), ("cancel", "deadline")]
    thaw(source)
    assert source.call(send, b"as if nothing had been") == 4
    assert topic.owner.engine_id == source.id
    assert source.call(retire, "x") == "owner"
    assert {message.epoch for message in topic.reader()} == {1}


@pytest.mark.long
def test_e4_a_source_that_answers_too_late_does_not_release(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """It has drained the topic and is about to release it when the deadline passes. A rival
    that waits does not get it either."""
    destination = quick("destination")
    producer, waiter = topic.producer(EXCLUSIVE), topic.producer_async(WAIT)
    with HeldUp(engine) as release:
        moving = begin(engine.unload, "orders", destination.id, 2.0)
        release.await_it()
        sending = begin(producer.send, b"waits")
        assert moved(moving.result(PATIENCE)) == [("orders", "failed")]
        assert not sending.done()
        release.go_on()
        assert sending.result(PATIENCE) == 0
    assert (producer.state, waiter.done()) == ("open", False)


@pytest.mark.long
def test_e4_a_source_whose_ledger_is_full_keeps_the_topic(
    engine: xl.Engine,
    topic: xl.Topic,
    quick: Callable[..., Quick],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot write that it has released the topic, and so it has not: its sends go on."""
    destination = quick("destination")
    producer, refused = topic.producer(EXCLUSIVE), threading.Event()

    def be_full(sessions: object) -> None:
        refused.set()
        raise xl.LedgerFullError("full")

    monkeypatch.setattr(engine.backend.hand_over, "release", be_full)
    moving = begin(engine.unload, "orders", destination.id, 2.0)
    assert refused.wait(PATIENCE)
    assert begin(producer.send, b"goes on").result(PATIENCE) == 0
    assert moved(moving.result(PATIENCE)) == [("orders", "failed")]
    assert (producer.state, topic.owner.engine_id) == ("open", engine.id)


@pytest.mark.long
def test_e4_one_late_topic_does_not_keep_the_others(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    slow, destination = quick("slow", keepalive=None), quick("destination")
    slow.call(open_producer, EXCLUSIVE)
    mine = engine.topic("mine").producer(EXCLUSIVE)
    freeze(slow)
    moves: list[xl.Move] = []

    def move_mine_in_time() -> bool:  # again if this process was too slow for it
        moves[:] = engine.unload(["orders", "mine"], to=destination.id, timeout=2.0)
        return moves[1].ok

    until(move_mine_in_time)
    assert moved(moves) == [("orders", "failed"), ("mine", "assigned")]
    assert [move.source.engine_name for move in moves] == ["slow", "test"]
    assert mine.state == "moved"
    thaw(slow)
    assert slow.call(send, b"still mine") == 0


@pytest.mark.parametrize("moment", ["before", "committing", "committed", "after"])
def test_e4_a_coordinator_killed_while_it_gives_up_leaves_the_topic_to_its_owner(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], moment: str
) -> None:
    """The deadline ends the move even if its coordinator is dead."""
    source, destination, third = quick("source", keepalive=None), quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    destination.call(queue_up)
    freeze(source)
    third.call(fall_at, f"canceller, {moment} cancel", signal.SIGKILL)
    third.start(unload, "orders", destination.id, 0.3)
    third.process.join(PATIENCE)
    assert third.process.exitcode in KILLED
    time.sleep(0.1)
    thaw(source)
    assert source.call(send, b"mine") == 0
    until(lambda: rows(engine)["transfers"] == [])
    assert topic.owner.engine_id == source.id
    assert steps(engine.history("orders"))[-1] == ("cancel", "deadline")
    assert moved(engine.unload("orders", to=destination.id)) == [("orders", "owned")]


def test_e4_a_source_that_hangs_is_passed_over_and_the_move_goes_on(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """Its keepalive is over long before the deadline: the destination has the topic, and not
    what the source had queued, of which its senders are told the truth."""
    source, destination = quick("source"), quick("destination")
    source.call(reign_and_queue, f"{path}.notes", "x")
    freeze(source, KEEPALIVE)
    assert moved(engine.unload("orders", to=destination.id)) == [("orders", "assigned")]
    assert ("evict", "hung") in steps(engine.history("orders"))
    assert destination.call(open_producer, EXCLUSIVE) == 2
    assert destination.call(send, b"new") == 1
    thaw(source)
    assert source.call(retire, "late") in ("ProducerFencedError", "ProducerMovedError")
    chronicle = Chronicle(engine)
    chronicle.read()
    assert chronicle.check(f"{path}.notes") == 4
    assert values(topic) == [b"x-first", b"new"]


# ---- interrupted, cancelled, repeated ----------------------------------------------------


def test_e4_ctrl_c_during_the_wait_gives_the_move_up(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination, third = quick("source", keepalive=None), quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    begin_to_wait(third, destination.id)
    third.signal(signal.SIGINT)
    with pytest.raises(Failed, match="KeyboardInterrupt"):
        third.answer()
    assert rows(engine)["transfers"] == []
    assert [event.kind for event in engine.history("orders")][-1] == "cancel"
    thaw(source)
    assert source.call(send, b"mine") == 0
    assert third.call(unload, "orders", destination.id) == [("orders", "assigned")]


def test_e4_closing_the_coordinator_s_engine_during_the_wait_ends_the_call(
    path: str, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    third = xl.open(path)
    moving = begin(third.unload, "orders", destination.id, PATIENCE)
    until(lambda: rows(topic.engine)["transfers"])
    third.close()
    assert isinstance(moving.exception(PATIENCE), xl.EngineClosedError)
    thaw(source)
    until(lambda: topic.owner is None or rows(topic.engine)["transfers"] == [])
    assert moved(topic.engine.unload("orders", to=destination.id)) == [("orders", "assigned")]


@pytest.mark.parametrize("state", ["releasing", "assigned"])
def test_e4_a_move_can_be_cancelled_by_any_engine(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], state: str
) -> None:
    """Half-way, it leaves the topic to its owner; after that, to the best waiter."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    waiter = topic.producer_async(WAIT)
    if state == "releasing":
        freeze(source)
    moving = begin(engine.unload, "orders", destination.id)
    if state == "assigned":
        assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    until(lambda: rows(engine)["transfers"])
    with xl.open(engine.path) as other:
        assert other.cancel_unload("ord*") == ["orders"]
        assert other.cancel_unload(["orders"]) == []
    assert ("cancel", "cancelled") in steps(engine.history("orders"))
    if state == "releasing":
        assert moved(moving.result(PATIENCE)) == [("orders", "failed")]
        thaw(source)
        assert source.call(send, b"mine") == 0
        assert not waiter.done()
    else:
        assert waiter.result(PATIENCE).topic_epoch == 2


def test_e4_cancelling_what_is_over_changes_nothing(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    assert engine.cancel_unload("orders") == []
    owner = topic.producer(EXCLUSIVE)
    destination.call(queue_up)
    engine.unload("orders", to=destination.id)
    before = rows(engine)
    assert engine.cancel_unload("orders") == []
    assert rows(engine) == before
    assert destination.call(take_writer_lock) == 2
    assert (owner.state, destination.call(send, b"mine")) == ("moved", 0)


def test_e4_repeating_the_call_is_safe(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """At once from everywhere, one after the other, and when it is long done."""
    source, destination, third = quick("source"), quick("destination"), quick("third")
    owner = topic.producer(EXCLUSIVE)
    for worker in (source, third):
        worker.start(unload, "orders", destination.id)
    assert moved(engine.unload("orders", to=destination.id)) == [("orders", "assigned")]
    for worker in (source, third):
        assert worker.answer() == [("orders", "assigned")]
    for _ in range(2):
        assert moved(engine.unload("orders", to=destination.id)) == [("orders", "assigned")]
    assert destination.call(open_producer, EXCLUSIVE) == 2
    for _ in range(2):
        assert moved(engine.unload("orders", to=destination.id)) == [("orders", "owned")]
    assert (owner.state, topic.epoch) == ("moved", 2)
    Chronicle(engine).read()


def test_e4_repeating_the_call_puts_the_deadline_off(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    waiter = topic.producer_async(WAIT)
    owner = waiter.result(PATIENCE)
    for timeout in (0.3, PATIENCE):
        engine.unload("orders", to=destination.id, timeout=timeout)
    waiter = topic.producer_async(WAIT)
    time.sleep(0.6)
    assert (waiter.done(), owner.state) == (False, "moved")
    assert destination.call(open_producer, EXCLUSIVE) == 2


@pytest.mark.long
def test_e4_one_call_s_deadline_is_not_another_s(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination, third = quick("source", keepalive=None), quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    hasty = begin(engine.unload, "orders", destination.id, PATIENCE)
    until(lambda: rows(engine)["transfers"])
    brief = rows(engine)["transfers"]
    third.start(unload, "orders", destination.id, 2 * PATIENCE)
    until(lambda: rows(engine)["transfers"] != brief)  # it has more time now
    clock = SimpleNamespace(now=_core.now, monotonic=lambda: _core.monotonic() + PATIENCE)
    monkeypatch.setattr(unloading, "_core", clock)  # the deadline of the hasty one has come
    hasty.result(PATIENCE)
    thaw(source)
    assert third.answer() == [("orders", "assigned")]
    found = steps(engine.history("orders"))[1:]
    assert found == [("releasing", "unload"), ("release", "hand-over"), ("assigned", "unload")]


@pytest.mark.parametrize("again", [0.0, 0.3, PATIENCE])
def test_e4_repeating_a_move_takes_nothing_from_it(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], again: float
) -> None:
    """The second call has less time than the first, or more: the reservation stays at least as
    long as it was said, is told once, and the producer that was moved can still follow."""
    destination = quick("destination")
    owner = topic.producer(EXCLUSIVE)
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    engine.unload("orders", to=destination.id, timeout=again)
    waiter = topic.producer_async(WAIT)
    time.sleep(0.5)
    assert (waiter.done(), owner.state) == (False, "moved")
    assert destination.call(open_producer, EXCLUSIVE) == 2
    told = [step for step in steps(engine.history("orders")) if step[1] == "unload"]
    assert told == [("releasing", "unload"), ("assigned", "unload")]


def test_e4_a_full_disk_does_not_end_a_move(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], monkeypatch: Any
) -> None:
    """There is no room at the moment when the source releases the topic, and soon there is."""
    destination = quick("destination")
    topic.producer(EXCLUSIVE)
    release, tries = engine.backend.hand_over.release, []

    def release_at_last(sessions: Any) -> Any:
        tries.append(sessions)
        if len(tries) < 3:
            raise xl.LedgerFullError("no room left")
        return release(sessions)

    monkeypatch.setattr(engine.backend.hand_over, "release", release_at_last)
    [move] = engine.unload("orders", to=destination.id, timeout=PATIENCE)
    assert move.ok


# ---- those who are not there any more ----------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "hung", "closed"])
def test_e4_a_reservation_ends_with_its_engine(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str
) -> None:
    """Half a minute is left of it, but the waiter is promoted at once."""
    destination, other = quick("destination"), quick("other")
    owner = topic.producer(EXCLUSIVE)
    other.call(queue_up)
    engine.unload("orders", to=destination.id, timeout=PATIENCE)
    start = time.monotonic()
    {"killed": destination.kill, "closed": destination.end}.get(
        how, functools.partial(freeze, destination, KEEPALIVE)
    )()
    assert other.call(take_writer_lock) == 2
    assert time.monotonic() - start < PATIENCE / 2
    assert ("cancel", "the destination is gone") in steps(engine.history("orders"))
    assert owner.state == "moved"


def test_e4_a_reservation_of_one_that_is_gone_keeps_no_other_away(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    for epoch in range(1, 4):
        destination = quick("destination")
        engine.unload("orders", to=destination.id, timeout=PATIENCE)
        destination.kill()
        with topic.producer(EXCLUSIVE) as producer:
            assert producer.topic_epoch == epoch


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_e4_a_destination_that_goes_before_the_release_leaves_the_owner_its_topic(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    destination.call(queue_up)
    freeze(source)
    moving = begin(engine.unload, "orders", destination.id)
    until(lambda: rows(engine)["transfers"])
    destination.kill() if how == "killed" else destination.end()
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "failed")]
    assert source.call(send, b"mine") == 0
    assert ("cancel", "the destination is gone") in steps(engine.history("orders"))


def test_e4_cancelling_a_move_to_one_that_is_gone_promotes_who_waits(
    path: str, engine: xl.Engine, quick: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiter's engine has not noticed the death yet."""
    destination = quick("destination")
    engine.unload("orders", to=destination.id, timeout=PATIENCE) if engine.topic("orders") else None
    with xl.open(path) as other:
        waiter = other.topic("orders").producer_async(WAIT)
        here, go_on, promote = (
            threading.Event(),
            threading.Event(),
            other.backend.notifications.retries.promote_due,
        )

        def promote_late() -> None:
            here.set()
            go_on.wait(PATIENCE)
            promote()

        monkeypatch.setattr(other.backend.notifications.retries, "promote_due", promote_late)
        other.backend.worker.wake()
        assert here.wait(PATIENCE)
        destination.kill()
        engine.cancel_unload("orders")
        go_on.set()
        assert waiter.result(PATIENCE).topic_epoch == 1


@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e4_an_owner_that_goes_before_it_was_told_leaves_the_topic_to_the_destination(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str, waiting: bool
) -> None:
    """A rival of a higher priority waits, too; it is not an ordinary promotion."""
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    rival = topic.producer_async(WAIT, priority=9)
    if waiting:
        destination.call(queue_up)
    freeze(source)
    moving = begin(engine.unload, "orders", destination.id)
    until(lambda: rows(engine)["transfers"])
    if how == "killed":
        source.kill()
    else:
        source.start(close_and_stay)
        source.signal(signal.SIGCONT)
        source.answer()  # of the freezing
        source.answer()
    assert moved(moving.result(PATIENCE)) == [("orders", "owned" if waiting else "assigned")]
    if not waiting:
        destination.call(queue_up)
    assert destination.call(take_writer_lock) == 2
    assert not rival.done()
    assert topic.owner.engine_id == destination.id


def close_and_stay(state) -> None:
    """Close the producer; the engine stays open."""
    state.producer.close()


def test_e4_an_owner_that_does_not_know_yet_that_it_is_one_hands_over_all_the_same(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """It was promoted while it was stopped, and then must hand the topic over: it finds both
    notifications at the same time. The call that waited returns a producer that has already
    moved."""
    source, destination = quick("source", keepalive=None), quick("destination")
    owner = topic.producer(EXCLUSIVE)
    source.call(queue_up)
    freeze(source)
    owner.close()
    moving = begin(engine.unload, "orders", destination.id)
    until(lambda: rows(engine)["transfers"])
    thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "assigned")]
    assert source.call(take_writer_lock) == 2
    with pytest.raises(Failed, match="ProducerMovedError"):
        source.call(send, b"late")
    assert destination.call(open_producer, EXCLUSIVE) == 3


# ---- races -------------------------------------------------------------------------------


@pytest.mark.long
def test_e4_of_two_moves_to_different_places_the_first_wins(
    path: str, quick: Callable[..., Quick]
) -> None:
    """Forty rounds. Two coordinators move the topic at the same moment, each to another one of
    two destinations that both wait. One of them has it then; if the other one's move was
    begun only when the first was over, that one has it."""
    with xl.open(path, name="one") as one, xl.open(path, name="two") as two:
        owner, *others = quick("w0"), quick("w1"), quick("w2")
        owner.call(open_producer, EXCLUSIVE)
        topic, chronicle = one.topic("orders"), Chronicle(one)
        for number in range(40):
            for other in others:
                other.call(queue_up)
            moves = at_once(
                lambda: one.unload("orders", to=others[0].id)[0],  # noqa: B023
                lambda: two.unload("orders", to=others[1].id)[0],  # noqa: B023
            )
            winners = [m.target.id for m in moves if m.state == "owned"]
            assert topic.owner.engine_id in winners
            assert all(m.ok or m.reason.startswith("it is ") for m in moves)
            owner.call(retire, f"{number}")
            new = next(other for other in others if other.id == topic.owner.engine_id)
            others = [owner, *(other for other in others if other is not new)]
            assert others[1].call(retire, f"{number}-loser") != "owner"
            assert new.call(take_writer_lock) == topic.epoch
            assert new.call(send, b"%d" % number) == number
            owner = new
            chronicle.read()
        assert len(chronicle.reigns) >= 41


@pytest.mark.long
def test_e4_a_fencing_producer_that_races_with_a_move_has_it_or_had_it(
    path: str, quick: Callable[..., Quick]
) -> None:
    """Forty rounds. Somebody takes the topic by force in the same moment. It fences the old
    owner, and the move is off; or the new one, after the move; or it is the rival itself whose
    topic is moved."""
    source, destination = quick("source"), quick("destination")
    with xl.open(path, name="one") as one, xl.open(path, name="rival") as rival:
        topic, chronicle = one.topic("orders"), Chronicle(one)
        ends = set()
        for number in range(40):
            source.call(open_producer, EXCLUSIVE)
            destination.call(queue_up)
            move, producer = at_once(
                lambda: one.unload("orders", to=destination.id, timeout=PATIENCE)[0],
                lambda: rival.topic("orders").producer(FENCING),
            )
            until(lambda: producer.state == "moved" or topic.owner is not None)  # noqa: B023
            ends.add((move.state, producer.state))
            if producer.state == "open":
                assert topic.owner.engine_id == rival.id
                assert producer.send(b"%d" % number) == topic.next_offset - 1
            else:
                assert (move.state, producer.state) == ("assigned", "moved")
            producer.close()
            one.cancel_unload("orders")
            assert source.call(retire, f"{number}-source") != "owner"
            assert destination.call(retire, f"{number}-destination") != "owner"
            chronicle.read()
        assert ends <= {("failed", "open"), ("owned", "open"), ("assigned", "moved")}


def test_e4_a_producer_that_closes_while_it_is_moved_leaves_the_topic_to_the_destination(
    path: str, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    with xl.open(path, name="source") as source, xl.open(path, name="one") as one:
        topic, chronicle = source.topic("orders"), Chronicle(source)
        for number in range(30):
            producer = topic.producer(EXCLUSIVE)
            receipt = producer.send_async(b"%d-queued" % number)
            destination.call(queue_up)
            at_once(lambda: one.unload("orders", to=destination.id), producer.close)
            assert destination.call(retire, f"{number}") == "owner"
            chronicle.read()
            assert chronicle.offsets[b"%d-queued" % number] == receipt.result(timeout=0)


@pytest.mark.long
def test_e4_a_waiter_that_gives_up_while_the_topic_comes_leaves_a_reservation_or_is_owner(
    path: str,
) -> None:
    with xl.open(path, name="source") as source, xl.open(path, name="destination") as destination:
        topic, chronicle = source.topic("orders"), Chronicle(source)
        for _ in range(60):
            owner = topic.producer(EXCLUSIVE, follow=False)
            waiter = destination.topic("orders").producer_async(WAIT)
            moves, cancelled = at_once(
                lambda: source.unload("orders", to=destination.id),
                waiter.cancel,
            )
            assert waiter.done()
            assert waiter.cancelled() is cancelled
            if cancelled:
                assert moved(moves) == [("orders", "assigned")]
                assert (topic.owner, source.cancel_unload("orders")) == (None, ["orders"])
            else:
                assert moved(moves) == [("orders", "owned")]
                waiter.result(timeout=0).close()
            owner.close()
            chronicle.read()
