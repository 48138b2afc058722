"""Who may write, on the public interface alone (rules A1 to A6)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    MODES,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    Worker,
    close_producer,
    open_producer,
    producer_state,
    send,
    until,
    values,
)

BUSY, FENCED = xl.ProducerBusyError, xl.ProducerFencedError
TABLE: dict[str, tuple[Any, ...]] = {
    # the topic has           SHARED      EXCLUSIVE  WAIT       FENCING
    "nobody": ("admitted", "granted", "granted", "granted"),
    "shared": ("admitted", FENCED, "queued", "takes over"),
    "shared and a waiter": (BUSY, FENCED, "queued", "takes over"),
    "an owner": (BUSY, FENCED, "queued", "takes over"),
    "an owner and a waiter": (BUSY, FENCED, "queued", "takes over"),
}
RIVALS = {
    "nobody": (),
    "shared": (SHARED, SHARED),
    "shared and a waiter": (SHARED, SHARED, WAIT),
    "an owner": (EXCLUSIVE,),
    "an owner and a waiter": (EXCLUSIVE, WAIT),
}
OF_MANY = [pytest.mark.needs("shared_producers")]
CELLS = [
    pytest.param(
        situation,
        mode,
        outcome,
        id=f"{situation}-{mode}",
        marks=OF_MANY if SHARED in (mode, *RIVALS[situation]) else [],
    )
    for situation, outcomes in TABLE.items()
    for mode, outcome in zip(MODES, outcomes, strict=True)
]


def fate(future: Any) -> str:
    """What has become of a request."""
    if not future.done():
        return "waits"
    error = future.exception()
    return type(error).__name__ if error is not None else future.result().state


def settle_down(state: State, modes: tuple[str, ...]) -> None:
    """Open producers in these modes, in a worker, and keep them."""
    state.kept["rivals"] = [state.topic.producer_async(mode) for mode in modes]


def fates(state: State) -> list[str]:
    """What has become of them."""
    return [fate(future) for future in state.kept["rivals"]]


class Rivals:
    """A holder of the topic, in one of three places."""

    def __init__(self, place: str, engine: xl.Engine, worker: Callable[..., Worker]) -> None:
        self._state: State | None = None
        self._other: xl.Engine | None = None
        if place == "another process":
            self._worker = worker(name="rival")
            return
        if place == "another engine":
            self._other = engine = xl.open(engine.path, name="rival")
        self._state = State(engine, engine.topic("orders"))

    def settle_down(self, modes: tuple[str, ...]) -> None:
        if self._state is not None:
            settle_down(self._state, modes)
        else:
            self._worker.call(settle_down, modes)

    def fates(self) -> list[str]:
        if self._state is not None:
            return fates(self._state)
        return list(self._worker.call(fates))

    def close(self) -> None:
        if self._other is not None:
            self._other.close()


@pytest.fixture(params=["same engine", "another engine", "another process"])
def rivals(
    request: pytest.FixtureRequest, engine: xl.Engine, worker: Callable[..., Worker]
) -> Iterator[Rivals]:
    rivals = Rivals(request.param, engine, worker)
    yield rivals
    rivals.close()


@pytest.mark.sampled
@pytest.mark.parametrize(("situation", "mode", "outcome"), CELLS)
def test_a1_every_cell_of_the_table(
    rivals: Rivals, topic: xl.Topic, situation: str, mode: str, outcome: Any
) -> None:
    rivals.settle_down(RIVALS[situation])
    before = rivals.fates()
    epoch, waiters, holders = topic.epoch, topic.waiters, topic.holders
    assert len(before) == len(waiters) + len(holders)

    if outcome in (BUSY, FENCED):
        with pytest.raises(outcome) as refused:
            topic.producer(mode, timeout=PATIENCE)
        assert type(refused.value) is outcome
        assert (topic.epoch, topic.waiters, topic.holders) == (epoch, waiters, holders)
        assert rivals.fates() == before
        return

    future = topic.producer_async(mode)
    if outcome == "queued":
        assert not future.done()
        assert (topic.epoch, topic.waiters[:-1], topic.holders) == (epoch, waiters, holders)
        assert rivals.fates() == before
        return

    producer = future.result(timeout=0)
    ours = next(holder for holder in topic.holders if holder.session == producer._session.id)
    assert producer.send(b"it may write") == 0
    if outcome == "admitted":
        assert topic.epoch == producer.topic_epoch == epoch
        assert topic.owner is None
        assert topic.holders == [*holders, ours]
        assert rivals.fates() == before
    else:
        assert topic.epoch == producer.topic_epoch == epoch + 1
        assert topic.owner == ours
        assert (topic.holders, topic.waiters) == ([ours], [])
        lost = ["ProducerFencedError" if fate == "waits" else "fenced" for fate in before]
        until(lambda: rivals.fates() == lost)


def at_once(requests: list[Callable[[], Any]]) -> list[Any]:
    """Calls all at the same moment, each in a thread; what each returned or raised."""
    barrier = threading.Barrier(len(requests))

    def run(request: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        try:
            return request()
        except xl.ExclusiveLogError as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(run, requests, timeout=PATIENCE))


def test_a1_of_threads_that_ask_at_once_one_is_granted(topic: xl.Topic) -> None:
    for epoch in range(1, 6):
        outcomes = at_once([lambda: topic.producer(EXCLUSIVE)] * 8)
        granted = [outcome for outcome in outcomes if isinstance(outcome, xl.Producer)]
        assert [producer.topic_epoch for producer in granted] == [epoch]
        assert sum(isinstance(outcome, FENCED) for outcome in outcomes) == 7
        granted[0].close()


def test_a1_of_engines_that_ask_at_once_one_is_granted(path: str) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(xl.open(path, name=f"e{i}")) for i in range(6)]
        topics = [engine.topic("orders") for engine in engines]
        for epoch in range(1, 6):
            outcomes = at_once([lambda t=topic: t.producer(EXCLUSIVE) for topic in topics])
            granted = [outcome for outcome in outcomes if isinstance(outcome, xl.Producer)]
            assert [producer.topic_epoch for producer in granted] == [epoch]
            granted[0].close()


def open_at(state: State, mode: str, when: float) -> int:
    """Open a producer at a moment of the clock that all processes share."""
    while time.monotonic() < when:
        pass
    return open_producer(state, mode)


def answer(process: Worker) -> Any:
    """What the worker answers, or the kind of its error."""
    try:
        return process.answer()
    except Failed as refused:
        return refused.kind


@pytest.mark.on_broker
def test_a1_of_processes_that_ask_at_once_one_is_granted(worker: Callable[..., Worker]) -> None:
    processes = [worker(name=f"w{i}") for i in range(3)]
    for epoch in range(1, 6):
        when = time.monotonic() + 0.02
        for process in processes:
            process.start(open_at, EXCLUSIVE, when)
        answers = {process: answer(process) for process in processes}
        granted = {process: got for process, got in answers.items() if isinstance(got, int)}
        assert sorted(map(str, answers.values())) == [str(epoch), *["ProducerFencedError"] * 2]
        assert list(granted.values()) == [epoch]
        next(iter(granted)).call(close_producer)


def test_a1_fencing_at_once_leaves_one_owner_and_everybody_had_an_epoch_of_his_own(
    topic: xl.Topic,
) -> None:
    producers = at_once([lambda: topic.producer(FENCING)] * 8)
    assert sorted(producer.topic_epoch for producer in producers) == list(range(1, 9))
    still_open = [producer for producer in producers if producer.state == "open"]
    assert [producer.topic_epoch for producer in still_open] == [8]


@pytest.mark.on_broker
@pytest.mark.needs("shared_producers")
def test_a1_shared_producers_write_side_by_side_from_everywhere(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    assert process.call(open_producer, SHARED) == 0
    with xl.open(engine.path) as other, other.topic("orders").producer() as elsewhere:
        with topic.producer() as here, topic.producer() as beside:
            assert here.send(b"here") == 0
            assert process.call(send, b"process") == 1
            assert elsewhere.send(b"elsewhere") == 2
            assert beside.send(b"beside") == 3
            assert len(topic.holders) == 4
            assert topic.owner is None
    assert values(topic) == [b"here", b"process", b"elsewhere", b"beside"]


def test_a1_readers_never_count_as_producers(engine: xl.Engine, topic: xl.Topic) -> None:
    with xl.open(engine.path) as other:
        reader, behind = topic.reader(), other.topic("orders").reader("latest")
        assert topic.holders == []
        with topic.producer(EXCLUSIVE) as producer:
            assert other.topic("orders").reader().has_message_available() is False
            producer.send(b"x")
            assert reader.read_next(timeout=PATIENCE).value == b"x"
        with topic.producer(FENCING) as producer:
            producer.send(b"y")
        assert [behind.read_next(timeout=PATIENCE).value for _ in range(2)] == [b"x", b"y"]
        assert topic.epoch == 2


def test_a1_topics_do_not_know_each_other(engine: xl.Engine) -> None:
    owners = [engine.topic(name).producer(EXCLUSIVE) for name in ("a", "b", "c")]
    assert [owner.topic_epoch for owner in owners] == [1, 1, 1]
    engine.topic("b").producer(FENCING)
    assert [owner.state for owner in owners] == ["open", "fenced", "open"]


@pytest.mark.on_broker
def test_a2_a_grant_survives_its_process(topic: xl.Topic, worker: Callable[..., Worker]) -> None:
    """A process is granted the topic and is killed in the same moment. The epoch it was given
    is used up: no session gets it again."""
    for epoch in (1, 2, 3):
        process = worker()
        assert process.call(open_producer, EXCLUSIVE) == epoch
        process.kill()
        assert topic.epoch == epoch
        assert topic.owner is None


@pytest.mark.needs("shared_producers")
def test_a3_the_last_shared_producer_leaving_promotes_the_first_waiter(
    rivals: Rivals, topic: xl.Topic
) -> None:
    one, two = topic.producer(), topic.producer()
    rivals.settle_down((WAIT, WAIT))
    one.close()
    assert rivals.fates() == ["waits", "waits"]
    assert topic.owner is None
    two.close()
    until(lambda: rivals.fates() == ["open", "waits"])
    assert topic.epoch == 1
    assert topic.owner is not None


@pytest.mark.on_broker
@pytest.mark.needs("shared_producers")
def test_a3_the_last_shared_producer_killed_promotes_the_first_waiter(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    processes = [worker(name=f"w{i}") for i in range(2)]
    for process in processes:
        process.call(open_producer, SHARED)
    waiter = topic.producer_async(WAIT)
    processes[0].kill()
    with pytest.raises(TimeoutError):
        waiter.result(timeout=0.5)
    processes[1].kill()
    assert waiter.result(timeout=PATIENCE).topic_epoch == 1


@pytest.mark.needs("shared_producers")
def test_a3_a_waiter_is_not_starved(topic: xl.Topic) -> None:
    """Shared producers come and go and overlap, so that the topic is never free by itself.
    Once a producer waits, no new shared one is admitted, and the topic becomes free."""
    stop = threading.Event()
    admitted: list[float] = []

    def come_and_go() -> None:
        while not stop.is_set():
            try:
                with topic.producer() as first:
                    admitted.append(time.monotonic())
                    first.send(b"x")
                    with contextlib.suppress(BUSY), topic.producer() as second:
                        first.close()
                        second.send(b"y")
                        time.sleep(0.002)
            except BUSY:
                time.sleep(0.001)

    with ThreadPoolExecutor(3) as pool:
        crowd = [pool.submit(come_and_go) for _ in range(3)]
        try:
            until(lambda: len(admitted) > 10)
            with topic.producer(WAIT, timeout=PATIENCE):
                assert len(topic.holders) == 1
                count = len(admitted)
                time.sleep(0.05)
                assert len(admitted) == count
            until(lambda: len(admitted) > count)  # it has gone: they are let in again
        finally:
            stop.set()
        for member in crowd:
            member.result(timeout=PATIENCE)


@pytest.mark.needs("shared_producers")
def test_a4_modes_are_given_as_enum_or_as_string(engine: xl.Engine) -> None:
    for number, mode in enumerate(xl.AccessMode):
        for given in (mode, str(mode)):
            with engine.topic(f"t{number}").producer(given) as producer:
                assert producer.access_mode is mode


def test_a5_a_fenced_producer_learns_the_owner(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="far away")
    owner, waiter = topic.producer(EXCLUSIVE), topic.producer_async(WAIT)
    epoch = process.call(open_producer, FENCING, name="holder", properties={"zone": "b"})
    with pytest.raises(FENCED) as error:
        owner.send(b"x")
    check_holder(error.value, engine, process, epoch)
    with pytest.raises(FENCED) as error:
        waiter.result(timeout=PATIENCE)
    check_holder(error.value, engine, process, epoch)


def check_holder(
    error: xl.ExclusiveLogError, engine: xl.Engine, process: Worker, epoch: int
) -> None:
    far_away = next(info for info in engine.engines() if info.name == "far away")
    holder = error.holder
    assert holder is not None
    assert (holder.engine_id, holder.engine_name) == (far_away.id, "far away")
    assert (holder.pid, holder.producer_name, holder.epoch) == (process.pid, "holder", epoch)
    assert holder.properties == {"zone": "b"}
    assert abs(holder.since / 1000 - time.time()) < 120
    for fact in (far_away.id, str(process.pid), "'holder'", "'far away'"):
        assert fact in str(error)
    if holder.access_mode is not xl.AccessMode.SHARED:
        assert f"epoch {epoch}" in str(error)


@pytest.mark.on_broker
def test_a5_owner_holders_and_waiters_tell_the_same(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker(name="far away")
    process.call(open_producer, EXCLUSIVE, name="holder", priority=3)
    topic.producer_async(WAIT, name="low", priority=-1)
    topic.producer_async(WAIT, name="high", priority=1, properties={"zone": "a"})
    owner = topic.owner
    assert owner is not None
    assert topic.holders == [owner]
    assert (owner.pid, owner.producer_name, owner.priority) == (process.pid, "holder", 3)
    high, low = topic.waiters
    assert (high.producer_name, high.priority, high.pid) == ("high", 1, os.getpid())
    assert (high.properties, low.producer_name) == ({"zone": "a"}, "low")


@pytest.mark.needs("shared_producers")
def test_a6_a_live_name_is_refused_to_a_second_claimant(
    rivals: Rivals, engine: xl.Engine, topic: xl.Topic
) -> None:
    rivals.settle_down(())
    holder = topic.producer_async(SHARED, name="ann")
    with xl.open(engine.path) as other:
        for claimant in (topic, other.topic("orders")):
            with pytest.raises(BUSY, match="'ann'") as refused:
                claimant.producer(SHARED, name="ann", timeout=PATIENCE)
            assert refused.value.holder is not None
            assert refused.value.holder.producer_name == "ann"
        assert engine.topic("elsewhere").producer(EXCLUSIVE, name="ann").name == "ann"
    assert fate(holder) == "open"


@pytest.mark.on_broker
@pytest.mark.parametrize(
    "first", [pytest.param(SHARED, marks=pytest.mark.needs("shared_producers")), EXCLUSIVE, FENCING]
)
def test_d9_a_standby_waits_under_its_leaders_name_and_goes_on_from_its_last_message(
    engine: xl.Engine, topic: xl.Topic, first: str
) -> None:
    leader = topic.producer(first, name="feed")
    assert leader.send_many([b"0", b"1", b"2"]) == range(3)
    with xl.open(engine.path) as other:
        standbys = [
            topic.producer_async(WAIT, name="feed"),
            other.topic("orders").producer_async(WAIT, name="feed", priority=1),
        ]
        until(lambda: len(topic.waiters) == 2)
        assert {waiter.producer_name for waiter in topic.waiters} == {"feed"}
        leader.close()
        second = standbys[1].result(PATIENCE)
        assert (second.name, second.last_sequence_id) == ("feed", 2)
        with pytest.raises(xl.DuplicateSequenceError):
            second.send(b"again", sequence_id=2)
        assert second.send(b"3") == 3
        assert fate(standbys[0]) == "waits"
        second.close()
        assert standbys[0].result(PATIENCE).last_sequence_id == 3


def test_d9_a_cancelled_standby_leaves_the_name_to_its_leader(topic: xl.Topic) -> None:
    leader = topic.producer(EXCLUSIVE, name="feed")
    assert leader.send(b"0") == 0
    assert topic.producer_async(WAIT, name="feed").cancel()
    with pytest.raises(xl.WaitTimeoutError):
        topic.producer(WAIT, name="feed", timeout=0.01)
    assert leader.send(b"1") == 1
    leader.close()
    assert topic.producer(EXCLUSIVE, name="feed").last_sequence_id == 1


@pytest.mark.needs("shared_producers")
def test_a6_a_name_is_free_again_once_its_session_has_ended(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    for _ in range(2):
        topic.producer(name="ann").close()
    with topic.producer(EXCLUSIVE, name="bob"):
        assert topic.producer_async(WAIT, name="ann").cancel()
        with pytest.raises(xl.WaitTimeoutError):
            topic.producer(WAIT, name="ann", timeout=0.01)
        waiter = topic.producer_async(WAIT, name="ann")
    assert waiter.result(timeout=PATIENCE).name == "ann"
    rival = topic.producer(FENCING, name="cid")  # fences ann
    rival.close()
    with xl.open(engine.path) as other, other.topic("orders").producer(name="ann") as ann:
        assert ann.send(b"x") == 0


def test_a6_fencing_takes_the_name_over_with_the_topic(topic: xl.Topic) -> None:
    old = topic.producer(EXCLUSIVE, name="ann")
    old.send(b"old")
    new = topic.producer(FENCING, name="ann")
    assert (old.state, new.state) == ("fenced", "open")
    assert new.last_sequence_id == 0
    old.close()
    assert new.send(b"new") == 1  # the late close has not freed the name of the new one
    new.close()
    assert topic.producer(EXCLUSIVE, name="ann").last_sequence_id == 1


@pytest.mark.on_broker
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT])
def test_a6_the_name_of_a_killed_process_is_free(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], mode: str
) -> None:
    """A process is killed and started again at once, with the same producer name: its own
    ghost must not keep it out, whether it held the topic or waited for it."""
    owner = topic.producer(EXCLUSIVE, name="owner") if mode == WAIT else None
    process = worker(name="first life")
    process.start(open_producer, mode, name="ann")
    until(lambda: topic.waiters if mode == WAIT else topic.holders)
    process.kill()
    again = worker(name="second life")
    again.start(open_producer, mode, name="ann")
    if owner is not None:
        until(lambda: [waiter.engine_name for waiter in topic.waiters] == ["second life"])
        owner.close()
    again.answer()
    assert again.call(producer_state) == "open"
    assert [holder.producer_name for holder in topic.holders] == ["ann"]


@pytest.mark.needs("shared_producers")
def test_a6_default_names_are_ones_that_were_never_used(engine: xl.Engine, topic: xl.Topic) -> None:
    """A user gives his producers the names that the library would think of next. Producers
    that ask for no name must not be refused because of it."""
    taken = [topic.producer(name=f"{engine.name}-{number}") for number in range(2, 30, 2)]
    default = [topic.producer() for _ in range(10)]
    names = [producer.name for producer in taken + default]
    assert len(set(names)) == len(names)
    assert all(producer.last_sequence_id == -1 for producer in default)
