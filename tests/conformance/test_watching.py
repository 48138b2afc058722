"""`topic.watch_owner`: every change of a topic's owner, as it comes (rules C6, E5)."""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
import threading
from collections.abc import Callable

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.loops import play
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, WAIT, Worker, open_producer, until

pytestmark = [pytest.mark.once, pytest.mark.needs("owner_watches")]


def kinds(events: object) -> list[tuple[str, int]]:
    return [(event.kind, event.epoch) for event in events]  # type: ignore[attr-defined]


@pytest.mark.rule("E5")
def test_it_tells_every_change_of_this_topic_and_no_other(
    engine: xl.Engine, topic: xl.Topic, other: xl.Topic
) -> None:
    topic.producer(EXCLUSIVE).close()
    with topic.watch_owner() as watch:
        first = topic.producer(EXCLUSIVE, name="first")
        engine.topic("another").producer(EXCLUSIVE).close()
        claim = engine.own({"orders": None})
        second = other.producer(FENCING, name="second")
        second.close()
        claim.release()
        found = list(watch.follow(timeout=0))
        first.close()
    assert kinds(found) == [("grant", 2), ("evict", 2), ("grant", 3), ("release", 3)]
    assert found == list(engine.history("orders"))[2:]
    assert found[2].target is not None
    assert found[2].target["producer"] == "second"


@pytest.mark.rule("E5")
def test_it_is_an_iterator(topic: xl.Topic) -> None:
    with topic.watch_owner() as watch:
        with topic.producer(EXCLUSIVE):
            assert next(watch).kind == "grant"
        assert iter(watch) is watch
        assert next(watch).kind == "release"


@pytest.mark.long
@pytest.mark.on_broker
@pytest.mark.rule("C2")
def test_it_waits_for_changes_of_other_processes(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    with topic.watch_owner() as watch:
        with pytest.raises(xl.WaitTimeoutError, match="owner of topic 'orders' has not changed"):
            watch.read_next(timeout=0)
        process.start(open_producer, EXCLUSIVE)
        assert watch.read_next(PATIENCE).kind == "grant"
        process.answer()
        standby = topic.producer_async(WAIT)
        process.kill()
        found = [watch.read_next(PATIENCE) for _ in range(2)]
        assert [(e.kind, e.reason) for e in found] == [("evict", "dead"), ("grant", "promotion")]
        standby.result(PATIENCE).close()


def test_it_begins_where_it_is_told_to(topic: xl.Topic) -> None:
    topic.producer(EXCLUSIVE).close()
    with topic.watch_owner("earliest") as watch:
        assert watch.read_next(0).kind == "grant"
        after = watch.position
        assert watch.read_next(0).kind == "release"
    released = dt.datetime.now(dt.UTC)
    until(lambda: dt.datetime.now(dt.UTC) > released + dt.timedelta(milliseconds=2))
    began = dt.datetime.now(dt.UTC)
    topic.producer(EXCLUSIVE).close()
    expected = [("grant", 1), ("release", 1), ("grant", 2), ("release", 2)]
    for start, count in ((after, 3), (-2, 2), (began, 2), (dt.timedelta(hours=1), 4)):
        with topic.watch_owner(start) as watch:  # type: ignore[arg-type]
            assert kinds(watch.follow(timeout=0)) == expected[-count:]
    for wrong in ("sometimes", True, 1.5, dt.timedelta(-1)):
        with pytest.raises(ValueError, match="start="):
            topic.watch_owner(wrong)  # type: ignore[arg-type]


def test_a_position_may_be_between_the_events_of_one_change(topic: xl.Topic) -> None:
    with topic.watch_owner() as watch:
        first, second = topic.producer(EXCLUSIVE), topic.producer(FENCING)
        assert [watch.read_next(0).kind for _ in range(2)] == ["grant", "evict"]
        after = watch.position
        assert watch.read_next(0).kind == "grant"
    with topic.watch_owner(after) as watch:
        assert kinds(watch.follow(timeout=0)) == [("grant", 2)]
    first.close()
    second.close()


def test_iterating_waits_and_closing_ends_the_wait(topic: xl.Topic) -> None:
    watch = topic.watch_owner()
    found: list[xl.Event] = []

    def follow() -> None:
        with pytest.raises(xl.EngineClosedError, match="this watch of the owner of topic 'orders'"):
            found.extend(watch)

    thread = threading.Thread(target=follow)
    thread.start()
    with topic.producer(EXCLUSIVE):
        watch.close()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_closing_the_engine_ends_the_wait(path: str) -> None:
    engine = xl.open(path)
    watch = engine.topic("orders").watch_owner()
    waiting = threading.Thread(target=lambda: ended.append(outcome_of(watch)))
    ended: list[BaseException] = []
    waiting.start()
    engine.close()
    waiting.join(PATIENCE)
    assert [type(error) for error in ended] == [xl.EngineClosedError]
    assert str(ended[0]).startswith("engine ")
    with pytest.raises(xl.EngineClosedError):
        watch.read_next(0)
    watch.close()


def outcome_of(watch: xl.OwnerWatch) -> BaseException:
    try:
        raise AssertionError(watch.read_next(PATIENCE))
    except xl.ExclusiveLogError as error:
        return error


@pytest.mark.needs("termination")
def test_a_terminated_topic_changes_no_more(topic: xl.Topic) -> None:
    with topic.watch_owner() as watch:
        producer = topic.producer(EXCLUSIVE)
        topic.terminate()
        assert [(e.kind, e.reason) for e in watch.follow(timeout=0)] == [
            ("grant", "request"),
            ("release", "terminated"),
        ]
        with pytest.raises(xl.WaitTimeoutError, match="has not changed"):
            watch.read_next(0)
        producer.close()


def test_an_interrupted_wait_has_taken_nothing(topic: xl.Topic) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    def interrupted(watch: xl.OwnerWatch) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        watch.read_next(PATIENCE)

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with topic.watch_owner() as watch:
            with pytest.raises(Interrupt):
                interrupted(watch)
            topic.producer(EXCLUSIVE).close()
            assert kinds(watch.follow(timeout=0)) == [("grant", 1), ("release", 1)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_a_ledger_that_is_only_read_can_be_watched(path: str, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE) as producer, xl.open(path, readonly=True) as reading:
        with reading.topic("orders").watch_owner() as watch:
            producer.close()
            assert watch.read_next(PATIENCE).kind == "release"


def test_asyncio_waits_without_a_thread_of_its_own(path: str, topic: xl.Topic) -> None:
    async def main() -> list[tuple[str, int]]:
        async with aio.open(path) as mine, mine.topic("orders").watch_owner() as watch:
            with pytest.raises(xl.WaitTimeoutError, match="has not changed"):
                await watch.read_next(timeout=0)
            waiting = asyncio.create_task(watch.read_next(PATIENCE))
            await asyncio.to_thread(lambda: topic.producer(EXCLUSIVE).close())
            first = await waiting
            return kinds([first]) + kinds([event async for event in watch.follow(timeout=0)])

    topic.producer(EXCLUSIVE).close()  # starts the threads of this engine, which stay
    assert play(main) == [("grant", 2), ("release", 2)]
