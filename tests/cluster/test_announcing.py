"""Announcements on a cluster, in schedules of threads and lost records that one machine does not
have. tests/conformance/test_announcements.py has what all backends promise."""

from __future__ import annotations

import _thread
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.backend import ProducerRequest
from exclusivelog.cluster import announcing
from exclusivelog.cluster.checkpoints import Checkpoint, Mark
from exclusivelog.cluster.engine import ClusterEngine
from exclusivelog.cluster.following import TopicLog
from exclusivelog.cluster.frames import Announce, Frame, decode
from exclusivelog.cluster.memory import _Link
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.once, pytest.mark.rule("B9")]
HERE, THERE = {"address": "tcp://here:1"}, {"address": "tcp://there:2"}


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


def said(topic: xl.Topic) -> tuple[dict[str, str], int]:
    found = topic.announcement
    assert found is not None
    return dict(found.info), found.epoch


class Lossy:
    """Loses the appended records of this kind while `loses` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type) -> None:
        self.loses, self.lost, append = True, threading.Event(), _Link.append

        def lose(link: _Link, data: bytes, *answered: Any) -> None:
            if self.loses and isinstance(decode(data), kind):
                self.lost.set()
            else:
                append(link, data, *answered)

        patch.setattr(_Link, "append", lose)


@pytest.fixture
def busy(topic: xl.Topic) -> Iterator[xl.Producer]:
    """A producer by which another thread sends all the time."""
    producer, over, errors = topic.producer(EXCLUSIVE), threading.Event(), list[BaseException]()

    def send() -> None:
        try:
            while not over.is_set():
                producer.send_async(b"x")
            producer.flush()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield producer
    finally:
        over.set()
        thread.join(PATIENCE)
    assert errors == []
    producer.close()


@pytest.mark.rule("G2")
def test_g2_a_message_that_announces_shares_the_sequence_ids_of_a_thread_that_sends(
    topic: xl.Topic, busy: xl.Producer
) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the other thread comes in between any two steps
    try:
        for number in range(100):
            busy.announce({"n": str(number)}, message=b"announced")
            assert said(topic) == ({"n": str(number)}, 1)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.rule("K4")
def test_k4_an_announcement_that_was_lost_is_repeated_beside_a_thread_that_sends(
    topic: xl.Topic, busy: xl.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = Lossy(monkeypatch, Announce)
    thread = threading.Thread(target=busy.announce, args=(HERE,))
    thread.start()
    assert lossy.lost.wait(PATIENCE)
    lossy.loses = False
    thread.join(PATIENCE)
    assert said(topic) == (HERE, 1)


@pytest.mark.parametrize("message", [{}, {"message": b"x"}])
def test_b9_a_callback_of_a_receipt_announces(topic: xl.Topic, message: dict[str, bytes]) -> None:
    """It runs in the thread that passes messages on."""
    done = threading.Event()
    with topic.producer(EXCLUSIVE) as owner:

        def announce(receipt: object) -> None:
            owner.send_async(b"another")
            owner.announce(HERE, **message)
            done.set()

        owner.send_async(b"x").add_done_callback(announce)
        assert done.wait(PATIENCE)
        assert said(topic) == (HERE, 1)


@pytest.mark.parametrize("first", ["with a message", "without one"])
def test_b9_an_announcement_waits_for_an_earlier_one_that_was_interrupted(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Else the earlier one, when it is sent again, would replace it."""
    monkeypatch.setattr("exclusivelog.cluster.appending.RESEND_SECONDS", 0.05)
    messages: list[dict[str, Any]] = [{"message": b"m"}, {}]
    if first == "without one":
        messages.reverse()
    owner = topic.producer(EXCLUSIVE)
    lossy = Lossy(monkeypatch, Frame if first == "with a message" else Announce)

    def interrupt() -> None:
        lossy.lost.wait(PATIENCE)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        owner.announce(HERE, **messages[0])
    thread.join(PATIENCE)
    later = threading.Thread(target=lambda: owner.announce(THERE, **messages[1]))
    later.start()
    lossy.loses = False
    later.join(PATIENCE)
    assert said(topic) == (THERE, 1)
    assert topic.next_offset == 1


@pytest.mark.rule("E2")
def test_e2_who_follows_repeats_nothing_after_another_owner(
    topic: xl.Topic, other: xl.Engine, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, open_producer, came = topic.producer(EXCLUSIVE), ClusterEngine.open_producer, list[int]()
    owner.announce(HERE)

    def open_late(engine: ClusterEngine, future: Any, request: ProducerRequest) -> None:
        if engine is other.backend and not came:
            came.append(1)
            with third.topic("orders").producer(FENCING, announce=THERE):
                pass
        open_producer(engine, future, request)

    monkeypatch.setattr(ClusterEngine, "open_producer", open_late)
    topic.engine.unload("orders", to=other.id)
    with pytest.raises(xl.ProducerFencedError):
        owner.send(b"x")
    assert came
    assert said(topic)[0] == THERE


@pytest.mark.rule("E2")
@pytest.mark.parametrize("message", [{}, {"message": b"x"}])
def test_e2_an_announcement_follows_a_topic_that_is_handed_over_meanwhile(
    topic: xl.Topic,
    other: xl.Engine,
    monkeypatch: pytest.MonkeyPatch,
    message: dict[str, bytes],
) -> None:
    announce_by, moved = announcing._announce_by, list[int]()

    def announce_late(attempt: Any, info: Any, value: Any, session: Any, timeout: Any) -> None:
        if not moved:
            moved.append(1)
            topic.engine.unload("orders", to=other.id)
            until(lambda: session.moved is not None)
        announce_by(attempt, info, value, session, timeout)

    monkeypatch.setattr(announcing, "_announce_by", announce_late)
    owner = topic.producer(EXCLUSIVE)
    owner.announce(HERE, **message)
    assert said(topic) == (HERE, 2)
    assert topic.next_offset == len(message)


def test_a_mark_does_not_repeat_what_a_grant_announces(topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE, announce={"a": "b" * 10_000}) as owner:
        owner.send(b"x")
        log: TopicLog = topic.engine.backend.topics.named("orders")  # type: ignore[attr-defined]
        with log.changed:
            state, marks = replace(log.state), [Mark.of(log.state)] * 50
            saved = Checkpoint(log.saving.anchor, state, 0, marks).save("orders")
    assert len(saved) < 50_000
    found = Checkpoint.restore(saved, "orders")
    assert found is not None
    assert (found.state.announced, found.marks) == (state.announced, marks)
