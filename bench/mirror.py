"""How fast a mirror copies a log to a Pulsar broker on this machine, and its CPU time while idle.

    python -m bench.mirror --messages 1000000

The broker is a standalone on this machine, which flushes its journal. CPU is that of the process
that mirrors, with its client's threads; the broker's is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import exclusivelog as xl
from exclusivelog.cluster import Mirror
from exclusivelog.restoring import restore
from testing.broker import Broker, Namespace, missing

VALUE, BATCH = 100, 10_000


def fill(topic: xl.Topic, messages: int) -> None:
    with topic.producer("exclusive") as producer:
        for start in range(0, messages, BATCH):
            values = [b"%0*d" % (VALUE, n) for n in range(start, min(start + BATCH, messages))]
            producer.send_many(values)


def copy(engine: xl.Engine, namespace: Namespace, plain: bool) -> tuple[float, float]:
    """(messages per second, microseconds of CPU per message)."""
    with Mirror(engine, namespace.url, admin=namespace.admin, plain=plain) as mirror:
        wall, cpu = time.perf_counter(), time.process_time()
        mirror.run()
        count = sum(one.copied for one in mirror.progress())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return count / wall, cpu / count * 1e6


def follow(engine: xl.Engine, namespace: Namespace, topic: xl.Topic) -> tuple[float, float]:
    """(ms from `send` until the broker has it, median; CPU of an idle mirror in %)."""
    delays = []
    with Mirror(engine, namespace.url, admin=namespace.admin) as mirror:
        mirror.start(follow=True)
        with topic.producer() as producer:
            for _ in range(50):
                offset, began = producer.send(b"x"), time.perf_counter()
                while mirror.progress()[0].position <= offset:
                    time.sleep(0.0005)
                delays.append(time.perf_counter() - began)
        time.sleep(1)
        cpu = time.process_time()
        time.sleep(20)
        idle = (time.process_time() - cpu) / 20
    return statistics.median(delays) * 1000, idle * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        began = time.perf_counter()
        broker = Broker(Path(folder) / "broker", options="")
        broker.start()
        print(f"broker ready after {time.perf_counter() - began:.1f} s")
        try:
            measure(folder, broker, options)
        finally:
            broker.kill()


def measure(folder: str, broker: Broker, options: argparse.Namespace) -> None:
    with xl.open(f"{folder}/log") as engine:
        topic = engine.topic("orders")
        fill(topic, options.messages)
        small = engine.topic("small")
        fill(small, 20_000)
        for number in range(options.repeat):
            namespace = Namespace.make(broker.url, broker.admin)
            rate, cpu = copy(engine, namespace, plain=False)
            print(f"frames: {rate:,.0f} messages/s of {VALUE} B, {cpu:.1f} us of CPU each")
            began = time.perf_counter()
            count = sum(
                restore(f"{folder}/{number}", namespace.url, admin=namespace.admin).values()
            )
            print(f"brought back: {count / (time.perf_counter() - began):,.0f} messages/s")
        delay, idle = follow(engine, namespace, topic)
        print(f"follower: {delay:.1f} ms from send to the broker's answer; idle: {idle:.2f} % CPU")
        engine.delete_topic("orders")
        namespace = Namespace.make(broker.url, broker.admin)
        rate, cpu = copy(engine, namespace, plain=True)
        print(f"plain: {rate:,.0f} messages/s, {cpu:.0f} us of CPU each")


if __name__ == "__main__":
    main()
