"""What Pulsar's own producers do not give, shown with the plain client, and the same asked of ours.

A service uses Pulsar's exclusive producers as they are. An evicted one comes back with its old
epoch after its connection was cut, another evicts the valid owner, a third never learns that it was
evicted; a batch that is sent again is there twice, and a topic that is deleted under its owner
takes its next message. Each test shows one of these on a real broker, and then that an engine on
the same broker keeps its promise. A test whose first half fails says that Pulsar has changed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import exclusivelog as xl
from testing.broker import Namespace, plain_client
from testing.children import child, line
from testing.processes import (
    EXCLUSIVE,
    FENCING,
    PATIENCE,
    SHARED,
    WAIT,
    State,
    Worker,
    open_producer,
    send,
    stop,
    until,
    values,
    workers,
)

pulsar = pytest.importorskip("pulsar")

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240), pytest.mark.rule("J1")]

OWN = {
    SHARED: "Shared",
    EXCLUSIVE: "Exclusive",
    WAIT: "WaitForExclusive",
    FENCING: "ExclusiveWithFencing",
}
LARGE = 5 << 20  # bytes; a broker takes no larger message


class Plain:
    """A client of Pulsar without this library, and its connections."""

    def __init__(self, namespace: Namespace, **options: Any) -> None:
        self._namespace = namespace
        self._client = plain_client(namespace, **options)
        self._connections: set[int] = set()

    def producer(self, topic: str, mode: str = "Shared", **options: Any) -> Any:
        """A producer; without batches, unless the options say so."""
        before = sockets()
        made = self._client.create_producer(
            f"persistent://{self._namespace.path}/{topic}",
            access_mode=getattr(pulsar.ProducerAccessMode, mode),
            **{"batching_enabled": False, **options},
        )
        self._connections |= sockets() - before
        return made

    def sever(self) -> None:
        """Cut its connections. It connects again by itself."""
        assert self._connections
        cut(self._connections)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(Exception):
            self._client.close()


def sockets() -> set[int]:
    """The descriptors of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def cut(descriptors: set[int]) -> None:
    """Shut down all connections of these descriptors."""
    for number in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                one.shutdown(socket.SHUT_RDWR)


def sever(state: State) -> None:
    """In a worker: cut the connections of its engine."""
    cut(sockets())


def epoch_of(namespace: Namespace, topic: str) -> int:
    """The epoch that Pulsar has; only the admin API tells it."""
    found = namespace.call("GET", f"persistent/{namespace.path}/{topic}/properties")
    return int(found["pulsar.topic.epoch"])


def stored(namespace: Namespace, topic: str) -> list[bytes]:
    """The messages of a Pulsar topic."""
    return [message.data() for message in namespace.messages(topic)]


@pytest.fixture
def plain(namespace: Namespace) -> Iterator[Callable[..., Plain]]:
    made: list[Plain] = []

    def make(**options: Any) -> Plain:
        made.append(Plain(namespace, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def engine(namespace: Namespace) -> Iterator[xl.Engine]:
    with xl.open(namespace.url, name="test", **options(namespace)) as engine:
        yield engine


@pytest.fixture
def worker(namespace: Namespace) -> Iterator[Callable[..., Worker]]:
    with workers() as make:
        yield lambda name="worker": make(namespace.url, name, **options(namespace))


def options(namespace: Namespace) -> dict[str, Any]:
    return {"admin": namespace.admin, "token": namespace.token}


# ---- evicted owners ----------------------------------------------------------------------


@pytest.mark.rule("B1", "B4")
def test_b1_an_evicted_waiter_comes_back_with_its_old_epoch(
    namespace: Namespace,
    plain: Callable[..., Plain],
    topic: xl.Topic,
    worker: Callable[..., Worker],
) -> None:
    first, second = plain(), plain()
    evicted = first.producer("plain", "WaitForExclusive")
    evicted.send(b"a")
    valid = second.producer("plain", "ExclusiveWithFencing")
    valid.send(b"b")
    assert epoch_of(namespace, "plain") == 1
    first.sever()  # it comes back into the queue, and its epoch is not compared
    time.sleep(0.5)
    valid.close()
    until(lambda: epoch_of(namespace, "plain") == 0)
    evicted.send(b"c")
    assert stored(namespace, "plain") == [b"a", b"b", b"c"]

    process = worker()
    assert process.call(open_producer, WAIT) == 1
    process.call(send, b"a")
    with topic.producer(FENCING) as rival:
        rival.send(b"b")
        process.call(sever)
    assert process.call(outcome_of_a_send) == "ProducerFencedError"
    assert values(topic) == [b"a", b"b"]
    with topic.producer(EXCLUSIVE) as next_one:
        assert next_one.topic_epoch == 3


def outcome_of_a_send(state: State) -> str:
    """Send; the name of the error."""
    assert state.producer is not None
    try:
        state.producer.send(b"stale")
    except xl.ExclusiveLogError as error:
        return type(error).__name__
    return "acknowledged"


@pytest.mark.rule("B6")
def test_b6_the_reconnect_of_an_evicted_producer_evicts_the_valid_owner(
    namespace: Namespace,
    plain: Callable[..., Plain],
    topic: xl.Topic,
    worker: Callable[..., Worker],
) -> None:
    first, second, third = plain(), plain(), plain()
    stale = first.producer("plain", "ExclusiveWithFencing")
    second.producer("plain", "ExclusiveWithFencing").send(b"valid")
    failed: list[str] = []

    def wait() -> None:
        try:
            third.producer("plain", "WaitForExclusive")
        except Exception as error:
            failed.append(type(error).__name__)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    time.sleep(0.5)
    first.sever()
    waiter.join(PATIENCE)
    assert failed == ["ProducerFenced"]  # the stale one has cleared the queue
    assert stale is not None

    process = worker()
    process.call(open_producer, FENCING)
    with topic.producer(FENCING, name="valid") as valid:
        valid.send(b"valid")
        waiting = topic.producer_async(WAIT, name="waiter")
        process.call(sever)
        assert process.call(outcome_of_a_send) == "ProducerFencedError"
        assert [each.producer_name for each in topic.waiters] == ["waiter"]
        assert valid.send(b"still valid") == 1
        assert valid.topic_epoch == 2
    with waiting.result(PATIENCE) as promoted:
        assert promoted.topic_epoch == 3


@pytest.mark.rule("C6")
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT, FENCING])
def test_c6_an_evicted_producer_is_not_told(
    plain: Callable[..., Plain], topic: xl.Topic, mode: str
) -> None:
    evicted = plain().producer("plain", OWN[mode], send_timeout_millis=1500)
    plain().producer("plain", "ExclusiveWithFencing")
    time.sleep(0.3)
    assert evicted.is_connected()
    with pytest.raises((pulsar.ProducerFenced, pulsar.Timeout)) as told:
        evicted.send(b"x")
    learns_late = mode in (WAIT, SHARED)  # when the send has timed out: 30 s by default
    assert told.type is (pulsar.Timeout if learns_late else pulsar.ProducerFenced)

    fenced = threading.Event()
    ours = topic.producer(mode, on_fenced=lambda *_: fenced.set())
    with topic.producer(FENCING):
        assert fenced.wait(PATIENCE)  # without sending
        assert ours.state == "fenced"
        with pytest.raises(xl.ProducerFencedError):
            ours.send(b"x")


# ---- waiting -----------------------------------------------------------------------------


@pytest.mark.rule("D5", "A2")
def test_d5_a_wait_that_has_ended_is_granted_later(
    namespace: Namespace, plain: Callable[..., Plain], topic: xl.Topic
) -> None:
    owner = plain().producer("plain", "Exclusive")
    with pytest.raises(pulsar.Timeout):
        plain(operation_timeout_seconds=2).producer("plain", "WaitForExclusive")
    owner.close()
    until(lambda: epoch_of(namespace, "plain") == 1)  # no request waits for it any more

    with topic.producer(EXCLUSIVE) as ours:
        with pytest.raises(xl.WaitTimeoutError):
            topic.producer(WAIT, timeout=0.2)
        cancelled = topic.producer_async(WAIT)
        assert cancelled.cancel()
        until(lambda: topic.waiters == [])  # the record that it left follows that it waits
        assert ours.topic_epoch == 1
    time.sleep(0.5)
    with topic.producer(EXCLUSIVE) as next_one:
        assert next_one.topic_epoch == 2


GIVES_UP_AFTER = (
    7  # seconds; the plain client's default is 30, and the broker notices after 30 to 60
)

PLAIN_OWNER = """
import os, sys, pulsar
logger = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
client = pulsar.Client(sys.argv[1], logger=logger)
owner = client.create_producer(
    sys.argv[2], access_mode=pulsar.ProducerAccessMode.Exclusive, batching_enabled=False
)
print("owns", flush=True)
input()
"""


@pytest.mark.rule("C3", "D4", "D5")
def test_c3_a_waiter_of_the_plain_client_gives_up_before_a_stopped_owner_is_noticed(
    namespace: Namespace,
    plain: Callable[..., Plain],
    topic: xl.Topic,
    worker: Callable[..., Worker],
) -> None:
    address = f"persistent://{namespace.path}/plain"
    with child(PLAIN_OWNER, namespace.broker, address) as owner:
        assert line(owner) == "owns"
        stop(owner.pid)
        waiter = plain(operation_timeout_seconds=GIVES_UP_AFTER)
        with pytest.raises(pulsar.Timeout):
            waiter.producer("plain", "WaitForExclusive")

    stopped = worker("stopped")
    assert stopped.call(open_producer, EXCLUSIVE) == 1
    stopped.call(send, b"before")
    waiting = topic.producer_async(WAIT)
    until(lambda: topic.waiters)
    stopped.signal(signal.SIGSTOP)
    stopped.await_stop()
    with waiting.result(4 * PATIENCE) as promoted:
        assert promoted.topic_epoch == 2
        assert promoted.send(b"after") == 1
        stopped.signal(signal.SIGCONT)
        assert stopped.call(outcome_of_a_send) == "ProducerFencedError"
        assert promoted.send(b"still") == 2
    assert values(topic) == [b"before", b"after", b"still"]


# ---- epochs ------------------------------------------------------------------------------


@pytest.mark.rule("B1")
def test_b1_an_epoch_begins_anew_in_a_topic_that_was_deleted(
    namespace: Namespace, plain: Callable[..., Plain], engine: xl.Engine, topic: xl.Topic
) -> None:
    client = plain()
    for _ in range(2):
        client.producer("plain", "Exclusive").close()
    assert epoch_of(namespace, "plain") == 1
    namespace.call("DELETE", f"persistent/{namespace.path}/plain?force=true")
    producer = client.producer("plain", "Exclusive")
    assert epoch_of(namespace, "plain") == 0
    assert not any("epoch" in name for name in dir(producer))

    with topic.producer(EXCLUSIVE) as ours:
        assert ours.topic_epoch == 1
    assert not engine.supports("deletion")
    with pytest.raises(xl.UnsupportedError, match="B1"):
        engine.delete_topic(topic.name)


# ---- deduplication -----------------------------------------------------------------------


@pytest.mark.rule("G2")
@pytest.mark.parametrize(
    ("again", "kept"),
    [
        # As after a reconnect: with some of the batch before, it is there whole, and those twice;
        (range(6, 16), [*range(1, 11), *range(6, 16)]),
        # with the first one of it, it is dropped whole, and the new ones are lost.
        (range(1, 16), [*range(1, 11)]),
    ],
    ids=["twice", "dropped"],
)
def test_g2_a_batch_that_overlaps_another_is_appended_or_dropped_whole(
    namespace: Namespace,
    plain: Callable[..., Plain],
    topic: xl.Topic,
    again: range,
    kept: list[int],
) -> None:
    client = plain()

    def send_batch(ids: range) -> list[Any]:
        answers: list[Any] = []
        producer = client.producer(
            "plain", producer_name="p", batching_enabled=True, batching_max_publish_delay_ms=5000
        )
        for number in ids:
            producer.send_async(
                b"%d" % number, lambda result, _: answers.append(result), sequence_id=number
            )
        producer.flush()
        producer.close()
        return answers

    assert set(send_batch(range(1, 11))) == {pulsar.Result.Ok}
    answers = send_batch(again)
    assert (set(answers), len(answers)) == ({pulsar.Result.Ok}, len(again))  # a success, each
    assert stored(namespace, "plain") == [b"%d" % n for n in kept]

    with topic.producer(EXCLUSIVE, name="p") as producer:
        for number in range(1, 11):
            producer.send_async(b"%d" % number, sequence_id=number)
    outcomes: list[object] = []
    with topic.producer(EXCLUSIVE, name="p") as producer:
        for number in again:
            try:
                outcomes.append(producer.send(b"%d" % number, sequence_id=number))
            except xl.DuplicateSequenceError:
                outcomes.append("duplicate")
    assert outcomes == ["duplicate"] * (len(again) - 5) + list(range(10, 15))
    assert values(topic) == [b"%d" % n for n in range(1, 16)]


@pytest.mark.rule("G1", "G2")
def test_g2_a_duplicate_is_answered_as_a_success_and_falsy_fields_are_dropped(
    namespace: Namespace,
    make_namespace: Callable[..., Namespace],
    plain: Callable[..., Plain],
    topic: xl.Topic,
) -> None:
    producer = plain().producer("plain", producer_name="p")
    producer.send(b"first", sequence_id=5)
    again = producer.send(b"another", sequence_id=5)
    assert (again.ledger_id(), again.entry_id()) == (-1, -1)
    careless = Plain(make_namespace(deduplication=False))
    careless.producer("plain", producer_name="p").send(b"x")
    careless.close()
    careless = Plain(careless._namespace)
    assert careless.producer("plain", producer_name="p").last_sequence_id() == -1
    careless.close()
    client = plain()
    producer = client.producer("falsy", producer_name="p")
    producer.send(b"zero")  # its sequence id is 0
    producer.send(b"one")
    producer.send(b"zero again", sequence_id=0)
    assert stored(namespace, "falsy")[-1] == b"zero again"  # the 0 was dropped: it has another id

    with topic.producer(EXCLUSIVE, name="p") as ours:
        assert ours.send(b"first", sequence_id=0, event_time=0, key=b"") == 0
        with pytest.raises(xl.DuplicateSequenceError):
            ours.send(b"another", sequence_id=0)
    [message] = topic.reader()
    assert (message.sequence_id, message.event_time, message.key) == (0, 0, b"")
    with topic.producer(EXCLUSIVE, name="p") as ours:
        assert ours.last_sequence_id == 0


# ---- what is lost ------------------------------------------------------------------------


@pytest.mark.rule("J2")
def test_j2_a_topic_that_is_deleted_under_its_owner_takes_the_next_message(
    namespace: Namespace, plain: Callable[..., Plain], topic: xl.Topic
) -> None:
    producer = plain().producer("plain", "Exclusive")
    producer.send(b"a")
    producer.send(b"b")
    namespace.call("DELETE", f"persistent/{namespace.path}/plain?force=true")
    producer.send(b"c")  # a success
    assert stored(namespace, "plain") == [b"c"]

    ours = topic.producer(EXCLUSIVE)
    ours.send(b"a")
    namespace.call("DELETE", f"persistent/{namespace.path}/orders?force=true")
    with pytest.raises(xl.ExclusiveLogError):
        ours.send_async(b"b").result(PATIENCE)


@pytest.mark.rule("J1")
def test_j1_messages_that_nobody_subscribed_to_are_removed(
    make_namespace: Callable[..., Namespace],
) -> None:
    # With deduplication, its cursor keeps them for a while.
    careless = make_namespace(retention=0, deduplication=False)
    client = Plain(careless)
    producer = client.producer("plain")
    for number in range(4):
        producer.send(b"%d" % number)
        careless.call("PUT", f"persistent/{careless.path}/plain/unload")  # begins a new ledger
    producer.send(b"last")

    def trimmed() -> bool:
        careless.call("POST", f"persistent/{careless.path}/plain/trim")
        return len(stored(careless, "plain")) < 5

    until(trimmed)
    client.close()

    ours = make_namespace(retention=0)
    with pytest.raises(xl.ClusterError, match="set-retention"):
        xl.open(ours.url, **options(ours))


@pytest.mark.rule("J3")
def test_j3_there_are_no_transactions_and_no_large_messages(
    plain: Callable[..., Plain], engine: xl.Engine, topic: xl.Topic
) -> None:
    assert not any("transaction" in name for name in dir(pulsar.Client))
    with pytest.raises(pulsar.MessageTooBig):
        plain().producer("plain").send(bytes(LARGE))

    assert not engine.supports("transactions")
    with topic.producer(EXCLUSIVE) as producer:
        with pytest.raises(xl.UnsupportedError):
            producer.send(bytes(LARGE))
        assert producer.send_many([b"all", b"or none"]) == range(2)
