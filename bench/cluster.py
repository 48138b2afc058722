"""The engine on a cluster compared with the plain client of Apache Pulsar, on one broker (P25).

The broker, its bookie and both clients share this machine. The broker flushes its journal before it
answers, so all arms have the same durability: acknowledged messages survive a power loss.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import exclusivelog as xl
from bench.measure import POWER, Arm, Figure, Series, Settings, Target, take_turns
from testing.broker import Namespace, missing, own_broker

ROUNDS = 3
VALUE = bytes(100)
SENDS = 200  # durable, one after the other
PUTS = 100
QUEUED = 20_000
UNBATCHED = 3_000
MANY, AT_ONCE = 300_000, 10_000
READ = 300_000
STORED = 10_000_000
TAKEOVERS = 9
PATIENCE = 120.0
KEPT_SECONDS = 20.0  # for an owner to be killed

OWNER = """
import sys, time, exclusivelog as xl
engine = xl.open(sys.argv[1], admin=sys.argv[2])
producer = engine.topic("taken").producer("exclusive")
producer.send(b"x")
print("owns", flush=True)
time.sleep(600)
"""
OPENER = """
import sys, time, exclusivelog as xl
engine = xl.open(sys.argv[1], admin=sys.argv[2])
start = time.perf_counter()
offset = engine.topic("stored").next_offset
print(time.perf_counter() - start, offset)
"""


def p25(settings: Settings) -> Figure:
    """Start a broker for this; needs Java 17 and Maven."""
    if reason := missing():
        raise RuntimeError(reason)
    with own_broker(options="") as broker:
        return measure(settings, Namespace.make(broker.url, broker.admin))


def measure(settings: Settings, namespace: Namespace) -> Figure:
    """The same in this namespace."""
    figure = Figure("P25", "the cluster engine beside the plain Pulsar client")
    rounds = settings.rounds_or(ROUNDS)
    with Cluster(namespace) as cluster:
        _sends(figure, cluster, rounds)
        _queued(figure, cluster, rounds)
        _many(figure, cluster, rounds)
        _reading(figure, cluster, rounds)
        _taking_over(figure, cluster)
        _opening(figure, cluster, STORED)
    figure.notes.append("broker, bookie, both clients and the bench share one machine")
    return figure


class Cluster(contextlib.ExitStack):
    """One engine, and one plain client, in a namespace."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__()
        self.namespace = namespace
        self.client = self.enter_context(namespace.client())
        self.engine = self.open()

    def open(self) -> xl.Engine:
        space = self.namespace
        return self.enter_context(xl.open(space.url, name="bench", admin=space.admin))

    def producer(self, topic: str) -> xl.Producer:
        return self.enter_context(self.engine.topic(topic).producer("exclusive"))

    def address(self, topic: str) -> str:
        return f"persistent://{self.namespace.path}/plain-{topic}"

    def plain(self, topic: str, batched: bool = False) -> Any:
        return self.client.create_producer(
            self.address(topic),
            batching_enabled=batched,
            block_if_queue_full=True,
            batching_max_messages=1000,
            batching_max_publish_delay_ms=1,
            send_timeout_millis=60_000,
        )


def _each(call: Any, count: int) -> list[float]:
    """The duration of each call, in seconds."""
    samples = []
    for number in range(count):
        start = time.perf_counter()
        call(number)
        samples.append(time.perf_counter() - start)
    return samples


# ---- writing -----------------------------------------------------------------------------


def _sends(figure: Figure, cluster: Cluster, rounds: int) -> None:
    ours, plain = cluster.producer("sends"), cluster.plain("sends")
    held = cluster.enter_context(xl.SharedMap(cluster.engine.topic("map")))
    arms = [
        Arm("send", lambda _: _each(lambda n: ours.send(VALUE), SENDS), unit="s"),
        Arm("SharedMap.put", lambda _: _each(lambda n: held.put(str(n), VALUE), PUTS), unit="s"),
        Arm(
            "Producer.send",
            lambda _: _each(lambda n: plain.send(VALUE), SENDS),
            unit="s",
            rival=True,
        ),
    ]
    found = _take_turns(figure, arms, rounds)
    figure.compare("send, p50", found["send"], found["Producer.send"], Target(most_ratio=1.5))
    figure.compare(
        "SharedMap.put, p50", found["SharedMap.put"], found["send"], Target(most_ratio=2.0)
    )


def _take_turns(figure: Figure, arms: list[Arm], rounds: int) -> dict[str, Series]:
    for arm in arms:
        arm.durability = POWER
    found = take_turns(arms, rounds)
    figure.series += found.values()
    return found


def _queued(figure: Figure, cluster: Cluster, rounds: int) -> None:
    ours = cluster.producer("queued")
    unbatched, batched = cluster.plain("unbatched"), cluster.plain("batched", batched=True)

    def send_async() -> None:
        for _ in range(QUEUED):
            receipt = ours.send_async(VALUE)
        receipt.result(PATIENCE)

    def plain(producer: Any, count: int) -> None:
        for _ in range(count):
            producer.send_async(VALUE, _ignore)
        producer.flush()

    arms = [
        Arm("send_async", lambda _: send_async(), QUEUED),
        Arm("send_async, unbatched", lambda _: plain(unbatched, UNBATCHED), UNBATCHED, rival=True),
        Arm("send_async, batched", lambda _: plain(batched, QUEUED), QUEUED, rival=True),
    ]
    found = _take_turns(figure, arms, rounds)
    figure.compare(
        "send_async", found["send_async"], found["send_async, unbatched"], Target(least_ratio=5.0)
    )
    figure.compare(
        "send_async", found["send_async"], found["send_async, batched"], Target(least_ratio=1.0)
    )


def _ignore(*answer: object) -> None:
    """The flush waits for all answers."""


def _many(figure: Figure, cluster: Cluster, rounds: int) -> None:
    ours, values = cluster.producer("many"), [VALUE] * AT_ONCE

    def send_many() -> None:
        for _ in range(MANY // AT_ONCE):
            ours.send_many(values)

    arms = [Arm("send_many", lambda _: send_many(), MANY)]
    found = _take_turns(figure, arms, rounds)
    figure.compare("send_many", found["send_many"], None, Target(least=300_000))


# ---- reading -----------------------------------------------------------------------------


def _reading(figure: Figure, cluster: Cluster, rounds: int) -> None:
    import pulsar

    _fill(cluster, "read", READ)
    plain = cluster.plain("read", batched=True)
    for _ in range(READ):
        plain.send_async(VALUE, _ignore)
    plain.flush()

    def read(engine: xl.Engine) -> None:
        assert sum(1 for _ in engine.topic("read").reader()) == READ
        engine.close()

    def read_plain(reader: Any) -> None:
        for _ in range(READ):
            reader.read_next(60_000).data()
        reader.close()

    arms = [
        Arm("reader", read, READ, prepare=cluster.open),
        Arm(
            "plain reader",
            read_plain,
            READ,
            rival=True,
            prepare=lambda: cluster.client.create_reader(
                cluster.address("read"), pulsar.MessageId.earliest
            ),
        ),
    ]
    found = _take_turns(figure, arms, rounds)
    figure.compare("reading", found["reader"], found["plain reader"], Target(least_ratio=2.0))


def _fill(cluster: Cluster, topic: str, count: int) -> None:
    with cluster.engine.topic(topic).producer("exclusive") as producer:
        values = [VALUE] * min(AT_ONCE, count)
        for _ in range(count // len(values)):
            producer.send_many(values)


# ---- processes ---------------------------------------------------------------------------


@contextlib.contextmanager
def _process(program: str, namespace: Namespace) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, namespace.url, namespace.admin],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def _taking_over(figure: Figure, cluster: Cluster) -> None:
    samples = []
    topic = cluster.engine.topic("taken")
    for _ in range(TAKEOVERS):
        with _process(OWNER, cluster.namespace) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "owns\n"
            future = topic.producer_async("wait_for_exclusive")
            time.sleep(0.2)
            start = time.perf_counter()
            os.kill(owner.pid, signal.SIGKILL)
            with future.result(PATIENCE) as producer:
                producer.send(VALUE)
                samples.append(time.perf_counter() - start)
    series = Series("SIGKILL to the next send", "s", samples, POWER)
    figure.series.append(series)
    figure.compare(
        "SIGKILL to the successor's first acknowledged send", series, None, Target(most=0.1)
    )


def _opening(figure: Figure, cluster: Cluster, count: int) -> None:
    start = time.perf_counter()
    _fill(cluster, "stored", count)
    figure.series.append(Series("filling that topic", "s", [time.perf_counter() - start], POWER))
    samples = []
    for _ in range(TAKEOVERS):
        with _process(OPENER, cluster.namespace) as opener:
            said, _ = opener.communicate(timeout=PATIENCE)
            seconds, offset = said.split()
            assert int(offset) == count
            samples.append(float(seconds))
    series = Series("opening a topic", "s", samples)
    figure.series.append(series)
    figure.compare(f"opening a topic of {count:,} messages", series, None, Target(most=1.0))
