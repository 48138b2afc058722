"""Rule D5: a request's timeout also bounds the wait for a process that is stopped in a transaction.

Such a process holds the writer lock, so nothing can be registered. The request ends with an error
that names the process, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    WAIT,
    Worker,
    open_producer,
    send,
    until,
    within,
)
from testing.stops import PLACES, stopped


@contextlib.contextmanager
def blocked_by(process: Worker, place: str = "in_a_commit") -> Iterator[str]:
    """The process is stopped there, and resumes afterwards. Gives the pattern of the error."""
    with stopped(process, place):
        yield rf"pid {process.pid}\), silent for .* Resume or end that process.*kill_stalled=True"
    process.answer()


@pytest.mark.rule("D5")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [WAIT, EXCLUSIVE, FENCING])
def test_d5_a_request_that_cannot_be_registered_ends_at_its_timeout(
    topic: xl.Topic, worker: Callable[..., Worker], mode: str, place: str
) -> None:
    process = worker(name="stopped")
    with blocked_by(process, place) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        within(lambda: topic.producer(mode, timeout=1))
    assert process.call(open_producer, EXCLUSIVE) == 1  # the late request has not had the topic
    assert [owner.engine_name for owner in topic.holders] == ["stopped"]
    assert topic.waiters == []
    with topic.producer(FENCING, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2
        assert again.send(b"x") == 0


@pytest.mark.rule("D5", "A4")
def test_d5_a_fencing_request_that_timed_out_fences_nobody(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="owner")
    assert process.call(open_producer, EXCLUSIVE) == 1
    with blocked_by(process) as names_it, pytest.raises(xl.WaitTimeoutError, match=names_it):
        within(lambda: topic.producer(FENCING, timeout=1))
    assert process.call(send, b"still the owner") == 0
    with topic.producer(FENCING, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2


@pytest.mark.rule("D5")
def test_d5_a_thread_beside_one_that_waits_without_a_timeout_is_bounded_too(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The patient request holds the engine's lock meanwhile, and is granted in the end."""
    process, pending = worker(name="stopped"), topic.engine.backend.pending
    with ThreadPoolExecutor(1) as pool:
        with blocked_by(process) as names_it:
            patient = pool.submit(topic.producer, EXCLUSIVE)
            until(lambda: not _is_free(pending.lock))
            with pytest.raises(xl.WaitTimeoutError, match=names_it):
                within(lambda: topic.producer(WAIT, timeout=1))
            assert not patient.done()
        with patient.result(PATIENCE) as producer:
            assert producer.topic_epoch == 1
            assert topic.waiters == []
    with topic.producer(WAIT, timeout=PATIENCE) as again:
        assert again.topic_epoch == 2


def _is_free(lock: object) -> bool:
    """Is no thread inside? Taken for a moment to see that."""
    if free := lock.acquire(False):  # type: ignore[attr-defined]
        lock.release()  # type: ignore[attr-defined]
    return bool(free)


@pytest.mark.rule("D5")
def test_d5_a_claim_that_cannot_be_recorded_ends_at_its_timeout(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    with blocked_by(worker(name="stopped")) as names_it:
        with pytest.raises(xl.WaitTimeoutError, match=names_it):
            within(lambda: engine.own({"shard": None}, timeout=1))
    assert engine.claims() == []
    with engine.own({"shard": None}, timeout=PATIENCE) as claim:
        assert claim.generations == {"shard": 1}
