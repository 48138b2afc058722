"""Processes that are killed, or stopped and continued, in the midst of a hand-over, a claim or a
checkpoint, on a real broker.

Each is interrupted at one record that it appends: *before* the record is sent, or once the broker
has *stored* it and before the process knows. At each moment there are never two owners, what was
acknowledged is in the log, nothing of a former owner comes after the next one's grant, and the
topic or resource can be owned again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import blobs, checkpoints, claimed, frames, waiting
from exclusivelog.cluster.ordered import Answer, Answered, ignore
from exclusivelog.cluster.pulsar_log import PulsarLog
from testing.broker import Namespace
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    WAIT,
    Failed,
    State,
    Worker,
    open_producer,
    send,
    until,
    values,
    workers,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
MOMENTS = [
    pytest.param(number, when, id=f"{number.name}-{when}")
    for number in (KILL, STOP)
    for when in ("before", "stored")
]


@pytest.fixture
def engine(namespace: Namespace) -> Iterator[xl.Engine]:
    with xl.open(namespace.url, name="test", admin=namespace.admin) as engine:
        yield engine


@pytest.fixture
def worker(namespace: Namespace) -> Iterator[Callable[..., Worker]]:
    with workers() as make:
        yield lambda name="worker": make(namespace.url, name, admin=namespace.admin)


# ---- in the processes --------------------------------------------------------------------


def is_a(data: bytes, kind: str) -> bool:
    """Is it a record of that kind, or one part of a checkpoint?"""
    if kind == "checkpoint":
        return data.startswith(b"XLB")
    record = frames.decode(data) or waiting.decode(data) or claimed.read(data)
    return type(record).__name__ == kind


def interrupt_at(state: State, kind: str, number: int, when: str) -> None:
    """Send this process a signal at the next record of that kind that it appends."""
    append, due = PulsarLog.append, [kind]

    def interrupt() -> None:
        if due:
            due.clear()
            # To this thread: it stops before it does anything else.
            signal.pthread_kill(threading.get_ident(), number)

    def interrupted(log: PulsarLog, data: bytes, answered: Answered = ignore) -> None:
        if not due or not is_a(data, kind):
            append(log, data, answered)
            return
        if when == "before":
            interrupt()

        def told(answer: Answer) -> None:
            if answer.stored:
                interrupt()
            answered(answer)

        append(log, data, told)

    PulsarLog.append = interrupted  # type: ignore[method-assign]


def own_and_send(state: State, count: int) -> int:
    """Own the topic and send; the epoch."""
    epoch = open_producer(state, EXCLUSIVE, follow=False)
    for number in range(count):
        send(state, b"%d" % number)
    return epoch


def begin_to_wait(state: State) -> None:
    """Queue up."""
    state.kept["waiter"] = state.topic.producer_async(WAIT, follow=False)


def send_when_granted(state: State, value: bytes) -> tuple[int, int]:
    """Wait for one's turn, and send; epoch and offset."""
    state.producer = state.kept["waiter"].result(PATIENCE)
    return state.producer.topic_epoch or 0, state.producer.send(value)


def refused(state: State) -> str:
    """What a send of the kept producer raises."""
    try:
        send(state, b"stale")
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return "nothing"


# ---- what they are interrupted in --------------------------------------------------------


def await_interrupt(process: Worker, number: int) -> None:
    """Wait until it was killed, or is stopped."""
    if number == KILL:
        process.process.join(PATIENCE)
        assert not process.process.is_alive()
    else:
        until(process.stopped)
        process.await_stop()


def go_on(process: Worker, number: int) -> bool:
    """Continue it; False if it was killed."""
    if number == STOP:
        process.signal(signal.SIGCONT)
    return number == STOP


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin a call; what is returned waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE)
        assert results, "the call has not returned"
        return results[0]

    return result


def check_log(engine: xl.Engine, topic: xl.Topic, expected: list[bytes]) -> None:
    """These are its messages, and each epoch had one owner."""
    assert values(topic) == expected
    epochs = [event.epoch for event in engine.history("orders") if event.kind == "grant"]
    assert epochs == sorted(set(epochs))
    read = [message.epoch for message in topic.reader()]
    assert read == sorted(read)


@pytest.mark.rule("E4", "B10")
@pytest.mark.parametrize(("number", "when"), MOMENTS)
def test_e4_a_source_that_is_interrupted_when_it_releases(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], number: int, when: str
) -> None:
    source, target = worker("source"), worker("target")
    assert source.call(own_and_send, 3) == 1
    target.call(begin_to_wait)
    source.call(interrupt_at, "Release", number, when)
    moves = in_background(lambda: engine.unload("orders", to=target.id, timeout=PATIENCE))
    await_interrupt(source, number)
    assert target.call(send_when_granted, b"after") == (2, 3)
    assert [move.ok for move in moves()] == [True]
    if go_on(source, number):
        assert source.call(refused) == "ProducerMovedError"
    assert target.call(send, b"still") == 4
    assert topic.owner is not None
    assert topic.owner.engine_name == "target"
    check_log(engine, topic, [b"0", b"1", b"2", b"after", b"still"])


@pytest.mark.rule("E4", "D4")
@pytest.mark.parametrize(("number", "when"), MOMENTS)
def test_e4_a_destination_that_is_interrupted_when_it_takes_the_topic(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], number: int, when: str
) -> None:
    source, target = worker("source"), worker("target")
    assert source.call(own_and_send, 3) == 1
    target.call(begin_to_wait)
    waiter = topic.producer_async(WAIT)
    target.call(interrupt_at, "Grant", number, when)
    engine.unload("orders", to=target.id, timeout=PATIENCE)  # it may see the destination die
    await_interrupt(target, number)
    assert source.call(refused) == "ProducerMovedError"
    producer = waiter.result(PATIENCE)  # the first one of those who live
    assert producer.topic_epoch == (2 if when == "before" else 3)
    assert producer.send(b"after") == 3
    if go_on(target, number):
        target.start(send_when_granted, b"late")
        assert producer.send(b"still") == 4
        if when == "before":  # it waits still, and has its turn
            producer.close()
            assert target.answer() == (3, 5)
        else:
            with pytest.raises(Failed, match="ProducerFencedError"):
                target.answer()
    late = [b"still", b"late"] if when == "before" else [b"still"]
    check_log(engine, topic, [b"0", b"1", b"2", b"after", *(late if number == STOP else [])])


def unload(state: State, target: str) -> list[str]:
    """Hand the topic over; what has become of it."""
    return [move.state for move in state.engine.unload("orders", to=target, timeout=PATIENCE)]


@pytest.mark.rule("E4")
@pytest.mark.parametrize(("number", "when"), MOMENTS)
def test_e4_a_hand_over_whose_coordinator_is_interrupted_can_be_repeated(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], number: int, when: str
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    assert owner.send(b"before") == 0
    coordinator, target = worker("coordinator"), worker("target")
    target.call(begin_to_wait)
    coordinator.call(interrupt_at, "Assign", number, when)
    coordinator.start(unload, target.id)
    await_interrupt(coordinator, number)
    if when == "before":
        assert owner.send(b"still") == 1
    end = topic.next_offset
    [again] = engine.unload("orders", to=target.id, timeout=PATIENCE)
    assert again.ok
    assert target.call(send_when_granted, b"after") == (2, end)
    with pytest.raises(xl.ProducerMovedError, match="target"):
        owner.send(b"stale")
    if go_on(coordinator, number):  # assigned: it looked between the release and the grant
        assert coordinator.answer() in (["owned"], ["assigned"], ["failed"])
    assert target.call(send, b"last") == end + 1
    check_log(engine, topic, [*[b"before", b"still"][:end], b"after", b"last"])


def own(state: State) -> None:
    """Claim a resource, under the next generation."""
    state.kept["claim"] = state.engine.own("group", {"resource": None})


def is_valid(state: State) -> bool:
    """Is the kept claim valid?"""
    return bool(state.kept["claim"].is_valid)


@pytest.mark.rule("F2", "F3", "F5")
@pytest.mark.parametrize(("number", "when"), MOMENTS)
def test_f3_a_claim_that_is_interrupted_has_one_owner_in_the_end(
    engine: xl.Engine, worker: Callable[..., Worker], number: int, when: str
) -> None:
    claimant = worker("claimant")
    claimant.call(interrupt_at, "Take", number, when)
    claimant.start(own)
    await_interrupt(claimant, number)
    before = 0 if when == "before" else 1
    claim = engine.own("group", {"resource": None})
    assert claim.generations == {"resource": before + 1}
    assert claim.is_valid
    if not go_on(claimant, number):
        return
    claimant.answer()
    # Where its grant was late, it has asked once more, for the generation after this one.
    assert claimant.call(is_valid) == (when == "before")
    assert claim.is_valid == (when == "stored")
    [living] = engine.claims("group")
    assert living.generations == {"resource": 2}


def save_often(state: State) -> None:
    """Save a checkpoint with each record, in several parts."""
    checkpoints.EVERY_RECORDS = 1
    blobs.PART_BYTES = 200


@pytest.mark.rule("J1", "B10", "C2", "C3")
@pytest.mark.parametrize(("number", "when"), MOMENTS)
def test_c2_an_owner_that_is_interrupted_when_it_saves_a_checkpoint(
    namespace: Namespace,
    engine: xl.Engine,
    topic: xl.Topic,
    worker: Callable[..., Worker],
    number: int,
    when: str,
) -> None:
    owner = worker("owner")
    assert owner.call(own_and_send, 3) == 1
    owner.call(save_often)
    owner.call(interrupt_at, "checkpoint", number, when)
    owner.start(send, b"3")
    await_interrupt(owner, number)
    producer = topic.producer(FENCING if number == STOP else EXCLUSIVE)
    assert producer.topic_epoch == 2
    offset = producer.send(b"after")
    if go_on(owner, number):
        with contextlib.suppress(Failed):  # it may have been acknowledged before
            assert owner.answer() == 3
        assert owner.call(refused) == "ProducerFencedError"
    with xl.open(namespace.url, admin=namespace.admin) as opened:
        found = values(opened.topic("orders"))
        assert opened.topic("orders").epoch == 2
    assert found == values(topic)
    check_log(engine, topic, [*[b"0", b"1", b"2", b"3"][:offset], b"after"])
