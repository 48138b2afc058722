"""Two processes send as the one exclusive owner, because nothing has told the second that it is
another process. Each knew the topic's end from its own last append: both were acknowledged at one
offset, and no reader returned the later message. After the next checkpoint the ledger could not be
opened.

So an owner looks at the topic's end again once others have moved it, for whatever reason; and a
second frame at a used offset, which an earlier version may have left, is named and left out."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.backend import SessionOptions
from exclusivelog.local.log.appending import append_together, look_up
from testing.journals import checkpoint, no_checkpoints
from testing.processes import EXCLUSIVE, State, Worker, c_fork, forked, values

pytestmark = pytest.mark.rule("C8")


@pytest.fixture
def deceiving_fork() -> Callable[[], int]:
    """Forks a child that passes for its parent: the page that the kernel has wiped is restored."""
    page = wiped_page()
    stamp = ctypes.string_at(page, 8)
    assert any(stamp)

    def fork() -> int:
        pid = c_fork()
        if pid == 0:
            assert not any(ctypes.string_at(page, 8))
            ctypes.memmove(page, stamp, 8)
        return pid

    return fork


def wiped_page() -> int:
    """The address of the page that the kernel wipes in forked children."""
    start = 0
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if span := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
                start = int(span[1], 16)
            elif line.startswith("VmFlags:") and " wf" in line:
                return start
    raise AssertionError("the kernel wipes no page of this process")


def one_by_one(producer: xl.Producer, tags: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    for tag in tags:
        yield producer.send(tag), tag


def together(producer: xl.Producer, tags: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """As the commit thread appends what is queued."""
    appender = producer._sender.appender
    for tag in tags:
        receipt = appender.add(tag)
        assert append_together(producer._sender.session.engine.ledger, [appender]) == []
        yield receipt.result(), tag


SENDING = {"one by one": one_by_one, "together": together}


@pytest.mark.parametrize("send", SENDING.values(), ids=SENDING)
def test_c8_each_sees_what_the_other_has_sent(
    topic: xl.Topic, deceiving_fork: Callable[[], int], send: Callable[..., Any]
) -> None:
    producer = topic.producer(EXCLUSIVE)
    mine = send(producer, iter([b"a", b"c", b"e"]))
    assert next(mine) == (0, b"a")
    assert forked(lambda: next(send(producer, iter([b"b"]))), fork=deceiving_fork) == (1, b"b")
    assert next(mine) == (2, b"c")
    assert forked(lambda: next(send(producer, iter([b"d"]))), fork=deceiving_fork) == (3, b"d")
    assert next(mine) == (4, b"e")
    assert values(topic) == [b"a", b"b", b"c", b"d", b"e"]
    assert topic.engine.verify().problems == ()


def test_c8_no_offset_is_acknowledged_twice(
    topic: xl.Topic, deceiving_fork: Callable[[], int]
) -> None:
    """Both at once."""
    ours, theirs = os.pipe()
    producer = topic.producer(EXCLUSIVE)
    acknowledged = [producer.send(b"before")]
    pid = deceiving_fork()
    if pid == 0:
        try:
            for _ in range(300):
                os.write(theirs, producer.send(b"child").to_bytes(4))
        finally:
            os._exit(0)
    os.close(theirs)
    acknowledged += [producer.send(b"parent") for _ in range(300)]
    with open(ours, "rb") as pipe:
        answers = pipe.read()
    os.waitpid(pid, 0)
    children = [int.from_bytes(answers[at : at + 4]) for at in range(0, len(answers), 4)]
    assert len(children) == 300
    assert sorted(acknowledged + children) == list(range(601))
    found = values(topic)
    assert [found[offset] for offset in children] == 300 * [b"child"]
    assert topic.engine.verify().problems == ()


def test_c8_the_log_names_a_topic_to_which_another_process_sends(
    topic: xl.Topic, deceiving_fork: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    producer = topic.producer(EXCLUSIVE)
    producer.send(b"parent")
    for _ in range(2):
        forked(lambda: producer.send(b"child"), fork=deceiving_fork)
        producer.send(b"parent")
    assert caplog.text.count("another process has sent to the topic") == 1


def test_c8_other_topics_and_engines_do_not_look_foreign(
    engine: xl.Engine, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """Topics share counters, so another topic's append may seem to be one of this topic."""
    producers = engine.producers([f"ours {n}" for n in range(100)], EXCLUSIVE)
    other = worker(durability="process")
    other.call(open_theirs)
    for round in range(3):
        assert {producer.send(b"x") for producer in producers} == {round}
        assert other.call(send_theirs) == {round}
    assert "another process has sent" not in caplog.text
    assert engine.verify().problems == ()


def open_theirs(state: State) -> None:
    names = [f"theirs {n}" for n in range(100)]
    state.kept["producers"] = state.engine.producers(names, EXCLUSIVE)


def send_theirs(state: State) -> set[int]:
    return {producer.send(b"y") for producer in state.kept["producers"]}


# ---- what earlier versions may have left in a journal ---------------------------------------


def send_blindly(state: State, session: Any, value: bytes) -> None:
    """Learn the topic's end as its owner, without the word that tells of other appends."""
    ledger = state.engine.ledger
    opened = state.engine.backend.open_session("orders", session, -1, SessionOptions())
    appender = opened.sending.appender
    appender.connect(
        ledger.journal,
        _core.SharedWords(bytearray(1 << 20)),
        ledger.lockfile.counters.place(session.topic),
        session.topic,
        session.epoch,
        session.id,
        True,
        True,
    )
    look_up(ledger, appender)
    state.kept["send"] = lambda: appender.send(value, sequence=100)


def send_now(state: State) -> int:
    return int(state.kept["send"]())


@pytest.fixture
def repeated(path: str, worker: Callable[..., Worker]) -> Iterator[xl.Engine]:
    """An engine in whose journal offset 1 was used twice."""
    with xl.open(path) as engine, no_checkpoints(engine):
        producer = engine.topic("orders").producer(EXCLUSIVE)
        assert producer.send(b"a") == 0
        blind = worker(durability="process")
        blind.call(send_blindly, producer._session, b"lost")
        assert producer.send(b"b") == 1
        assert blind.call(send_now) == 1
        blind.kill()
        assert producer.send(b"c") == 2
        yield engine


def test_c8_verify_names_a_second_frame_at_a_used_offset(repeated: xl.Engine) -> None:
    assert repeated.verify().problems == (
        "topic 'orders': the journal has 1 messages at offset 1, which other messages have already",
    )
    assert values(repeated.topic("orders")) == [b"a", b"b", b"c"]


def test_c8_a_checkpoint_names_it_and_leaves_it_out(
    repeated: xl.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        checkpoint(repeated)
    assert "has 1 messages of topic 'orders' at offset 1, which other messages have already" in (
        caplog.text
    )
    topic = repeated.topic("orders")
    assert values(topic) == [b"a", b"b", b"c"]
    assert repeated.verify().problems == ()
    assert topic.next_offset == 3


def test_c8_recovery_names_it_and_leaves_it_out(
    repeated: xl.Engine, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repeated.path, copy)
    with xl.open(copy) as engine:
        assert "which other messages have already" in caplog.text
        topic = engine.topic("orders")
        assert values(topic) == [b"a", b"b", b"c"]
        assert topic.producer("exclusive_with_fencing").send(b"d") == 3
        assert engine.verify().problems == ()
