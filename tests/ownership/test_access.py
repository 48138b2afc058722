"""Rules A1 to A6: who may write, and what a request leaves behind when it may not.

The table of rule A is walked cell by cell, three times: the rivals are in the same engine,
in another engine of the same process, and in another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    Worker,
    hang,
    open_producer,
    rows,
    send,
    threads_since,
    until,
    within,
)
from tests.conformance.test_access import BUSY, FENCED, check_holder

# ---- A2: all or nothing ------------------------------------------------------------------


def open_files(engine: xl.Engine) -> list[str]:
    """The ledger's files that this process has open."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(file for file in files if file.startswith(engine.path))


@pytest.mark.parametrize(
    ("mode", "options", "error"),
    [
        (SHARED, {}, BUSY),
        (EXCLUSIVE, {}, FENCED),
        (EXCLUSIVE, {"topic_epoch": 1}, FENCED),
        (EXCLUSIVE, {"topic_epoch": 9}, xl.InvalidEpochError),
        (WAIT, {"topic_epoch": 1}, FENCED),
        (WAIT, {"topic_epoch": 9}, xl.InvalidEpochError),
        (SHARED, {"name": "waiter"}, BUSY),
        (FENCING, {"topic_epoch": 1}, FENCED),
        (FENCING, {"topic_epoch": 9}, xl.InvalidEpochError),
    ],
)
def test_a2_a_refused_request_changes_nothing(
    engine: xl.Engine, topic: xl.Topic, mode: str, options: dict[str, Any], error: Any
) -> None:
    topic.producer(EXCLUSIVE).close()
    owner = topic.producer(EXCLUSIVE, name="owner")
    waiter = topic.producer_async(WAIT, name="waiter")
    before, transactions = rows(engine), engine.ledger.usage.sizes()["transactions"]
    threads, files = set(threading.enumerate()), open_files(engine)
    for _ in range(3):
        with pytest.raises(error):
            topic.producer(mode, **options)
        future = topic.producer_async(mode, **options)
        assert type(future.exception(timeout=0)) is error
        assert future.cancel() is False
    assert rows(engine) == before
    assert engine.ledger.usage.sizes()["transactions"] == transactions
    assert (threads_since(threads), open_files(engine)) == ([], files)
    owner.close()
    assert waiter.result(timeout=PATIENCE).topic_epoch == topic.epoch == 3


def test_a2_a_request_that_times_out_changes_nothing(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        threads, files = set(threading.enumerate()), open_files(engine)
        before = rows(engine)
        for timeout in (0, 0.01, 0.05):
            with pytest.raises(xl.WaitTimeoutError):
                topic.producer(WAIT, timeout=timeout)
        until(lambda: rows(engine) == before)  # one that ends late leaves the queue later
        assert (threads_since(threads), open_files(engine)) == ([], files)
        assert topic.waiters == []
    assert topic.owner is None
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


def test_a2_a_cancelled_request_changes_nothing(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE):
        threads, files = set(threading.enumerate()), open_files(engine)
        before = rows(engine)
        futures = [topic.producer_async(WAIT, priority=i) for i in range(20)]
        assert len(topic.waiters) == 20
        assert all(future.cancel() for future in futures)
        assert rows(engine) == before
        assert (threads_since(threads), open_files(engine)) == ([], files)
    assert topic.owner is None
    assert topic.producer(EXCLUSIVE).topic_epoch == 2


def test_a2_a_request_in_another_process_that_times_out_changes_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    owner = topic.producer(EXCLUSIVE)
    before = rows(engine)
    with pytest.raises(Failed, match="WaitTimeoutError"):
        process.call(open_producer, WAIT, timeout=0.05)
    with pytest.raises(Failed, match="ProducerBusyError"):
        process.call(open_producer, SHARED)
    until(lambda: rows(engine) == before)  # one that ends late leaves the queue later
    owner.close()
    assert process.call(open_producer, EXCLUSIVE) == 2


def test_a2_a_grant_is_one_transaction(engine: xl.Engine, topic: xl.Topic) -> None:
    def transactions(action: Callable[[], Any]) -> int:
        before = engine.ledger.usage.sizes()["transactions"]
        kept.append(action())
        return int(engine.ledger.usage.sizes()["transactions"] - before)

    kept: list[Any] = []
    assert transactions(lambda: topic.producer(SHARED)) == 1
    assert transactions(lambda: topic.producer(FENCING)) == 1
    assert transactions(lambda: topic.producer_async(WAIT)) == 1
    assert transactions(lambda: kept[1].close()) == 1  # release, promotion, the new epoch
    assert kept[2].result(timeout=PATIENCE).topic_epoch == 2
    assert transactions(lambda: kept[2].result().close()) == 1


# ---- A4: unknown modes and options -------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["Exclusive", "EXCLUSIVE", "exklusive", " exclusive", "", "wait", None, 1, b"shared"]
)
@pytest.mark.parametrize("method", ["producer", "producer_async"])
def test_a4_an_unknown_mode_is_an_error(
    engine: xl.Engine, topic: xl.Topic, mode: Any, method: str
) -> None:
    before = rows(engine)
    with pytest.raises((ValueError, TypeError), match="access_mode"):
        getattr(topic, method)(mode)
    assert rows(engine) == before


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 2**63},
        {"priority": -(2**63) - 1},
        {"priority": 1.5},
        {"priority": "high"},
        {"priority": None},
        {"topic_epoch": -1},
        {"topic_epoch": 1.0},
        {"topic_epoch": "1"},
        {"topic_epoch": True},
        {"priority": True},
        {"max_batch_messages": True},
        {"follow": "no"},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": "soon"},
        {"name": ""},
        {"name": "x" * 256},
        {"name": "a\nb"},
        {"name": b"bytes"},
        {"properties": {"a": 1}},
        {"properties": ["a"]},
        {"linger": -1},
        {"linger": float("nan")},
        {"max_batch_messages": 0},
        {"max_batch_bytes": 0},
        {"max_pending_bytes": 0},
        {"on_fenced": "call me"},
        {"serializer": "pickle"},
    ],
    ids=lambda options: "{}={!r}".format(*next(iter(options.items())))[:40],
)
@pytest.mark.parametrize("method", ["producer", "producer_async"])
def test_a4_a_wrong_option_is_an_error_that_names_it(
    engine: xl.Engine, topic: xl.Topic, options: dict[str, Any], method: str
) -> None:
    before = rows(engine)
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        getattr(topic, method)(WAIT, **options)
    assert rows(engine) == before


@pytest.mark.parametrize("method", ["producer", "producer_async"])
@pytest.mark.parametrize("option", ["priorty", "fencing", "acces_mode"])
def test_a4_an_unknown_option_is_an_error(
    engine: xl.Engine, topic: xl.Topic, option: str, method: str
) -> None:
    before = rows(engine)
    with pytest.raises(TypeError, match=option):
        getattr(topic, method)(EXCLUSIVE, **{option: 7})
    assert rows(engine) == before


# ---- A5: errors say who holds the topic --------------------------------------------------


def refused_shared(topic: xl.Topic) -> Any:
    return topic.producer(SHARED)


def refused_exclusive(topic: xl.Topic) -> Any:
    return topic.producer(EXCLUSIVE)


def refused_stale(topic: xl.Topic) -> Any:
    return topic.producer(FENCING, topic_epoch=1)


def refused_patience(topic: xl.Topic) -> Any:
    return topic.producer(WAIT, timeout=0.02)


def refused_deletion(topic: xl.Topic) -> Any:
    return topic.engine.delete_topic(topic.name)


@pytest.mark.parametrize(
    ("mode", "refused"),
    [
        (EXCLUSIVE, refused_shared),
        (EXCLUSIVE, refused_exclusive),
        (EXCLUSIVE, refused_stale),
        (EXCLUSIVE, refused_patience),
        (EXCLUSIVE, refused_deletion),
        (SHARED, refused_exclusive),
        (SHARED, refused_stale),
        (SHARED, refused_patience),
        (SHARED, refused_deletion),
    ],
)
def test_a5_errors_say_who_holds_the_topic(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], mode: str, refused: Any
) -> None:
    for _ in range(2):
        topic.producer(EXCLUSIVE).close()
    process = worker(name="far away")
    epoch = process.call(open_producer, mode, name="holder", properties={"zone": "b"})
    with pytest.raises(xl.ExclusiveLogError) as error:
        refused(topic)
    check_holder(error.value, engine, process, epoch)


# ---- A6: names ---------------------------------------------------------------------------


def test_a6_a_name_stays_with_the_living_process_that_was_only_stopped_for_a_moment(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(keepalive=30)
    process.call(open_producer, SHARED, name="ann")
    hang(process)
    try:
        with pytest.raises(BUSY):
            within(lambda: topic.producer(SHARED, name="ann"))
    finally:
        process.signal(signal.SIGCONT)
    assert process.call(send, b"x") == 0
