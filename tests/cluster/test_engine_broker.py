"""An engine in a Pulsar namespace, with real processes beside it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from testing.broker import Namespace
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    State,
    Worker,
    close_producer,
    forked,
    open_producer,
    send,
    until,
    values,
    workers,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.fixture
def engine(namespace: Namespace) -> Iterator[xl.Engine]:
    with xl.open(namespace.url, name="test", **options(namespace)) as engine:
        yield engine


@pytest.fixture
def worker(namespace: Namespace) -> Iterator[Callable[..., Worker]]:
    with workers() as make:
        yield lambda name="worker": make(namespace.url, name, **options(namespace))


def options(namespace: Namespace) -> dict[str, str | None]:
    return {"admin": namespace.admin, "token": namespace.token}


@pytest.mark.rule("J2", "B1", "B8")
def test_j2_messages_come_back_as_they_were_sent(engine: xl.Engine, topic: xl.Topic) -> None:
    with topic.producer(EXCLUSIVE, name="p", properties={"at": "here"}) as producer:
        assert engine.topics() == ["orders"]
        assert topic.owner is not None
        assert topic.owner.properties == {"at": "here"}
        assert producer.send(b"one", key="k", properties={"a": "b"}, event_time=7) == 0
        assert producer.send_many([b"two", None], keys=["x", None]) == range(1, 3)
        receipts = [producer.send_async(b"%d" % n) for n in range(500)]
        assert [receipt.result(PATIENCE) for receipt in receipts] == list(range(3, 503))
        with pytest.raises(xl.DuplicateSequenceError):
            producer.send(b"again", sequence_id=0)
    found = list(topic.reader())
    assert [message.offset for message in found] == list(range(503))
    first = found[0]
    got = (first.key, first.value, first.properties, first.event_time)
    assert got == (b"k", b"one", {"a": "b"}, 7)
    assert (first.epoch, first.producer_name, first.sequence_id) == (1, "p", 0)
    assert found[2].value is None
    assert [message.offset for message in topic.reader(400)] == list(range(400, 503))
    with topic.producer(EXCLUSIVE, topic_epoch=1, name="p") as again:
        assert (again.topic_epoch, again.last_sequence_id) == (1, 502)
    assert topic.owner is None


def open_waiting(state: State, name: str, priority: int) -> None:
    """Queue up."""
    state.kept[name] = state.topic.producer_async(WAIT, name=name, priority=priority)


def turn_of(state: State, name: str) -> int:
    """Wait for one's turn; the epoch."""
    state.producer = state.kept[name].result(PATIENCE)
    return int(state.producer.topic_epoch)


@pytest.mark.rule("C2", "D1", "B10")
def test_c2_a_killed_owner_is_followed_by_the_best_waiter(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    owner, low, high = (worker(name) for name in ("owner", "low", "high"))
    assert owner.call(open_producer, EXCLUSIVE) == 1
    assert owner.call(send, b"acknowledged") == 0
    low.call(open_waiting, "low", 0)
    high.call(open_waiting, "high", 5)
    assert [waiter.producer_name for waiter in topic.waiters] == ["high", "low"]
    assert {info.name for info in engine.engines()} == {"test", "owner", "low", "high"}
    with pytest.raises(xl.ProducerFencedError, match="'owner'"):
        topic.producer(EXCLUSIVE)
    owner.kill()
    assert high.call(turn_of, "high") == 2
    assert high.call(send, b"after") == 1
    assert topic.owner is not None
    assert topic.owner.engine_name == "high"
    assert values(topic) == [b"acknowledged", b"after"]


def announce_in_vain(state: State, name: str) -> str:
    """What becomes of an announcement by the producer that waited; the error's name."""
    try:
        producer = state.kept[name].result(PATIENCE)
        producer.announce({"by": name}, message=b"stale")
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return "announced"


@pytest.mark.rule("C1", "C3", "B3", "D4")
def test_c1_a_topic_that_was_passed_on_to_a_stopped_process_goes_to_the_next_waiter(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It seems to live when the owner closes. When it goes on, it has lost what it never knew it
    had."""
    stopped, next_one = worker("stopped"), worker("next")
    owner = topic.producer(EXCLUSIVE, announce={"by": "owner"})
    stopped.call(open_waiting, "stopped", 5)
    next_one.call(open_waiting, "next", 0)
    until(lambda: len(topic.waiters) == 2)
    stopped.signal(signal.SIGSTOP)
    stopped.await_stop()
    owner.close()
    epoch = next_one.call(turn_of, "next")
    assert next_one.call(send, b"next") == 0
    stopped.start(announce_in_vain, "stopped")
    stopped.signal(signal.SIGCONT)
    assert stopped.answer() == "ProducerFencedError"
    assert next_one.call(send, b"still") == 1
    assert (topic.epoch, values(topic)) == (epoch, [b"next", b"still"])
    assert topic.announcement is not None
    assert topic.announcement.info == {"by": "owner"}
    assert ("grant", "promotion", epoch) in [
        (event.kind, event.reason, event.epoch) for event in topic.engine.history("orders")
    ]


@pytest.mark.rule("C1", "C2", "D4")
def test_c1_a_topic_that_was_passed_on_to_a_killed_process_goes_to_the_next_waiter(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """It is killed beside the owner's last record: before, behind, or while that is on its way."""
    owner = topic.producer(EXCLUSIVE)
    for round_ in range(3):
        process = worker(f"killed-{round_}")
        process.call(open_waiting, "killed", 5)
        waiter = topic.producer_async(WAIT)
        until(lambda: len(topic.waiters) == 2)
        killer = threading.Timer(round_ * 0.003, process.kill)
        killer.start()
        owner.close()
        owner = waiter.result(PATIENCE)
        killer.join(PATIENCE)
        assert owner.send(b"%d" % round_) == round_
    owner.close()
    assert (topic.owner, topic.waiters) == (None, [])
    assert values(topic) == [b"0", b"1", b"2"]


def send_until_fenced(state: State, seconds: float) -> list[tuple[int, bytes]]:
    """Send; what was acknowledged until the topic was lost."""
    return send_until(state, seconds, xl.ProducerFencedError)


def send_until_terminated(state: State, seconds: float) -> list[tuple[int, bytes]]:
    """The same until the topic was terminated; any other error is raised."""
    return send_until(state, seconds, xl.TopicTerminatedError)


def send_until(
    state: State, seconds: float, error: type[xl.ExclusiveLogError]
) -> list[tuple[int, bytes]]:
    assert state.producer is not None
    acknowledged = []
    deadline = time.monotonic() + seconds
    with contextlib.suppress(error):
        while time.monotonic() < deadline:
            value = b"%s %d" % (state.engine.name.encode(), len(acknowledged))
            acknowledged.append((state.producer.send(value), value))
    return acknowledged


@pytest.mark.rule("B10", "B2", "J2")
def test_b10_owners_that_take_the_topic_from_each_other_lose_and_mix_nothing(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    processes = [worker(name) for name in ("one", "two")]
    acknowledged: list[tuple[int, bytes]] = []
    for turn in range(6):
        process = processes[turn % 2]
        assert process.call(open_producer, FENCING) == turn + 1
        if turn:
            acknowledged += processes[(turn + 1) % 2].answer()
        process.start(send_until_fenced, PATIENCE)
        end = topic.next_offset
        until(lambda end=end: topic.next_offset > end + 5)
    with topic.producer(FENCING) as last:
        acknowledged += processes[1].answer()
        assert last.topic_epoch == 7
    found = {message.offset: message.value for message in topic.reader()}
    assert all(found[offset] == value for offset, value in acknowledged)
    assert len(acknowledged) <= len(found) == topic.next_offset
    epochs = [message.epoch for message in topic.reader()]
    assert epochs == sorted(epochs)


def send_numbers(state: State, count: int) -> list[int]:
    """Send as a shared producer; the offsets."""
    assert state.producer is not None
    receipts = [state.producer.send_async(b"%d" % n) for n in range(count)]
    return [receipt.result(PATIENCE) for receipt in receipts]


@pytest.mark.rule("A1", "A3", "G2")
def test_a1_shared_producers_of_several_processes_write_side_by_side(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    processes = [worker(name) for name in ("one", "two")]
    for process in processes:
        assert process.call(open_producer, SHARED) == 0
        process.start(send_numbers, 200)
    offsets = [offset for process in processes for offset in process.answer()]
    assert sorted(offsets) == list(range(400))
    assert {holder.engine_name for holder in topic.holders} == {"one", "two"}
    waiter = topic.producer_async(WAIT)
    with pytest.raises(xl.ProducerBusyError):
        topic.producer()
    processes[0].kill()
    processes[1].call(close_producer)
    assert waiter.result(PATIENCE).topic_epoch == 1
    names = [(message.producer_name, message.sequence_id) for message in topic.reader()]
    assert len(names) == len(set(names)) == 400


@pytest.mark.rule("B2", "C3")
def test_c3_a_stopped_owner_that_was_fenced_writes_nothing_when_it_goes_on(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker("stopped")
    process.call(open_producer, EXCLUSIVE)
    process.start(send_until_fenced, PATIENCE)
    until(lambda: topic.next_offset > 3)
    process.signal(signal.SIGSTOP)
    process.await_stop()
    with topic.producer(FENCING) as rival:
        offset = rival.send(b"rival")
        process.signal(signal.SIGCONT)
        acknowledged = process.answer()
        assert rival.send(b"still") == offset + 1
    found = {message.offset: message.value for message in topic.reader()}
    assert all(found[at] == value and at < offset for at, value in acknowledged)
    assert topic.next_offset == offset + 2


@pytest.mark.rule("B2")
def test_b2_a_sender_that_was_stopped_writes_nothing_behind_a_termination(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker("stopped")
    process.call(open_producer, EXCLUSIVE)
    process.start(send_until_terminated, PATIENCE)
    until(lambda: topic.next_offset > 3)
    process.signal(signal.SIGSTOP)
    process.await_stop()
    topic.terminate()
    end = topic.next_offset
    process.signal(signal.SIGCONT)
    acknowledged = process.answer()
    found = {message.offset: message.value for message in topic.reader()}
    assert len(found) == topic.next_offset == end
    assert acknowledged
    assert all(found[at] == value for at, value in acknowledged)


@pytest.mark.rule("I2")
def test_i2_a_map_is_one_for_all_processes(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    processes = [worker(name) for name in ("one", "two")]
    for process in processes:
        process.start(add, 10)
    with xl.SharedMap(engine.topic("map")) as counts:
        for _ in range(5):
            counts.update("sum", lambda value: (value or 0) + 1)
        for process in processes:
            process.answer()
        assert counts.get("sum", latest=True) == 25


def add(state: State, times: int) -> None:
    """Count, with others."""
    with xl.SharedMap(state.engine.topic("map")) as counts:
        for _ in range(times):
            counts.update("sum", lambda value: (value or 0) + 1)


def test_a_namespace_that_loses_messages_is_refused(
    make_namespace: Callable[..., Namespace],
) -> None:
    careless = make_namespace(retention=0)
    with pytest.raises(xl.ClusterError, match="set-retention"):
        xl.open(careless.url, **options(careless))


def test_a_topic_that_loses_messages_is_refused(namespace: Namespace) -> None:
    """A policy of the topic goes before that of its namespace."""
    with xl.open(namespace.url, **options(namespace)) as engine:
        engine.topic("orders").producer(EXCLUSIVE).send(b"a")
    policy = f"persistent/{namespace.path}/orders/retention"
    namespace.call("POST", policy, {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    until(lambda: namespace.call("GET", f"{policy}?applied=true")["retentionSizeInMB"] == 0)
    with xl.open(namespace.url, **options(namespace)) as engine:
        with pytest.raises(xl.ClusterError, match="topicPolicies remove-retention persistent://"):
            values(engine.topic("orders"))
        namespace.call("DELETE", policy)
        until(lambda: namespace.call("GET", f"{policy}?applied=true")["retentionSizeInMB"] == -1)
        assert values(engine.topic("orders")) == [b"a"]


def test_no_error_and_no_repr_has_the_token(namespace: Namespace) -> None:
    with pytest.raises(xl.ClusterError) as error:
        xl.open("pulsar://127.0.0.1:1/public/default", token="very.secret.token")
    assert "secret" not in f"{error.value!r} {error.value}"
    with xl.open(namespace.url, **options(namespace)) as engine:
        assert "token" not in f"{engine!r} {engine.backend!r} {engine.backend.place!r}"


@pytest.mark.rule("C5")
def test_c5_a_forked_child_is_refused_and_the_parent_unharmed(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    producer = topic.producer(EXCLUSIVE)
    assert producer.send(b"before") == 0

    def child() -> list[str]:
        told = []
        for call in (lambda: producer.send(b"child"), lambda: topic.owner, engine.topics):
            try:
                call()
            except xl.EngineClosedError as error:
                told.append(type(error).__name__)
        producer.close()
        engine.close()
        return told

    assert forked(child) == ["EngineClosedError"] * 3
    assert producer.send(b"after") == 1
    assert topic.owner is not None


def send_and_tell(state: State, value: bytes) -> tuple[str, str]:
    """The producer's state behind a send, and whom its error names."""
    assert state.producer is not None
    try:
        state.producer.send(value)
    except xl.ProducerMovedError as error:
        return state.producer.state, "" if error.successor is None else error.successor.name
    return state.producer.state, ""


@pytest.mark.rule("E1", "E2", "E3")
def test_e1_a_topic_moves_from_one_process_to_another(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    source, bystander = worker("source"), worker("bystander")
    assert source.call(open_producer, EXCLUSIVE) == 1
    assert source.call(send_and_tell, b"before") == ("open", "")
    bystander.call(open_waiting, "bystander", 9)
    [move] = engine.unload("orders", to=engine.id, timeout=PATIENCE)
    assert (move.state, move.source is not None) == ("assigned", True)
    assert source.call(send_and_tell, b"late") == ("moved", "test")
    with topic.producer(EXCLUSIVE) as producer:
        assert (producer.topic_epoch, producer.send(b"after")) == (2, 1)
    assert bystander.call(turn_of, "bystander") == 3


def read_for_group(state: State, count: int) -> int:
    """Read so many messages for the group and commit; the position."""
    state.kept["reader"] = reader = state.topic.reader(group="billing")
    reader.read_batch(count)
    reader.commit()
    return int(reader.position)


@pytest.mark.rule("F3", "F5", "F6")
def test_f6_a_group_goes_on_in_another_process(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    with topic.producer(EXCLUSIVE) as producer:
        producer.send_many([b"%d" % n for n in range(10)])
    process = worker()
    assert process.call(read_for_group, 4) == 4
    with topic.reader(group="billing") as reader:
        assert [message.offset for message in reader] == list(range(4, 10))
        reader.commit()
        [group] = engine.groups()
        assert (group.position, group.lag, group.reader is not None) == (10, 0, True)
    claim = engine.own("g", {"r": 5})
    with xl.open(engine.path, check_policies=False) as other:
        with pytest.raises(xl.OwnershipError):
            other.own("g", {"r": 4})
        assert other.own("g", {"r": 5}).is_valid
    assert not claim.is_valid
