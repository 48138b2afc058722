"""A log that is written, mirrored and killed: the writer, the mirror and the broker, each again and
again, and a judge that reads the target with nothing of the library.

    python -m testing.mirrors --kills 200     # about half an hour

A kill is one SIGKILL at a random moment. What was killed is started again at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

import exclusivelog as xl
from testing.broker import Broker, Namespace, missing
from testing.children import ROOT, dying_with_this
from testing.patience import PATIENCE

Fields = tuple[Any, ...]  # of a message

TOPICS = ("orders", "bills/2026")
BROKER_IS_DOWN = "cannot be reached|may be down|starting up|connection was lost"

WRITER = """
import random, sys, time
import exclusivelog as xl

path, rate, topics = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
chance = random.Random()
with xl.open(path, name="writer", keepalive=5.0) as engine:
    producers = [engine.topic(name).producer("exclusive_with_fencing", name="w") for name in topics]
    while True:
        for producer in producers:
            count = chance.choice([1, 1, 1, 10, 100, 1000, 5000])
            if count == 1:
                producer.send(chance.choice([b"", None, b"x" * 300]), key=b"k", event_time=0,
                              properties={"n": "1"})
            else:
                values = [b"%0100d" % (producer.last_sequence_id + 1 + i) for i in range(count)]
                producer.send_many(values, keys=[None, b"k"] * (count // 2))
            time.sleep(count / rate)
"""


# ---- processes that are killed -----------------------------------------------------------


class Program:
    """A process that is killed and started again."""

    def __init__(self, name: str, *command: str) -> None:
        self.name, self._command = name, command
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, *self._command],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            preexec_fn=dying_with_this(),
        )

    def check(self, excused: str = "(?!)") -> None:
        """It must not have ended by itself, unless it said this pattern; then start it again."""
        if self.process.poll() is not None:
            self._log.seek(0)
            said = self._log.read().strip()
            if not re.search(excused, said):
                raise AssertionError(f"{self.name} ended: {self.process.returncode} {said}")
            self._log.truncate(0)
            self.process = self._start()

    def kill(self) -> None:
        """SIGKILL, and start it again."""
        self.end()
        self.process = self._start()

    def end(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def close(self) -> None:
        """End it for good."""
        self.end()
        self._log.close()


def python_that_writes(path: str, rate: float) -> Program:
    return Program("the writer", "-c", WRITER, path, str(rate), *TOPICS)


def command_that_mirrors(path: str, namespace: Namespace, *more: str) -> Program:
    return Program(
        "the mirror",
        "-m",
        "exclusivelog.cli",
        "mirror",
        path,
        "--to",
        namespace.url,
        "--admin",
        namespace.admin,
        "--timeout",
        "120",
        *more,
    )


def kill_at_random(
    kinds: Mapping[str, float],
    path: str,
    namespace: Namespace,
    broker: Broker | None = None,
    *,
    kills: int,
    pause: float,
    rate: float,
    chance: random.Random,
    plain: bool = False,
) -> Counter[str]:
    """Write and mirror, and kill what `kinds` names (with its weight), so many times in all."""
    done: Counter[str] = Counter()
    writer = python_that_writes(path, rate)
    follower = None
    try:
        _await_topics(path)
        flags = ["--plain"] * plain
        follower = command_that_mirrors(path, namespace, "--follow", *flags)
        while sum(done.values()) < kills:
            time.sleep(chance.uniform(0, 2 * pause))
            chosen = chance.choices(list(kinds), list(kinds.values()))[0]
            done[chosen] += 1
            if chosen == "broker":
                assert broker is not None
                broker.kill()
                time.sleep(chance.uniform(0, 1))
                broker.start(wait=False)
                broker.await_ready()
            else:
                (writer if chosen == "writer" else follower).kill()
            writer.check()
            follower.check(BROKER_IS_DOWN)
    finally:
        writer.close()
        if follower is not None:
            follower.close()
    return done


def _await_topics(path: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(xl.LedgerError), xl.open(path, readonly=True) as engine:
            if set(engine.topics()) == set(TOPICS):
                return
        time.sleep(0.1)
    raise TimeoutError("the writer has made no topics")


def finish(path: str, namespace: Namespace, plain: bool = False) -> None:
    """Mirror what is left, and end."""
    program = command_that_mirrors(path, namespace, *["--plain"] * plain)
    try:
        if program.process.wait(PATIENCE):
            program.check()
    finally:
        program.close()


# ---- the judge ---------------------------------------------------------------------------


def fields(message: xl.Message) -> Fields:
    return (
        message.offset,
        message.epoch,
        message.key,
        message.raw_value,
        message.properties,
        message.event_time,
        message.publish_time,
        message.producer_name,
        message.sequence_id,
    )


def source(topic: xl.Topic) -> Iterator[Fields]:
    """The messages of the log, field by field."""
    return map(fields, topic.reader())


def unpacked(data: bytes) -> Iterator[tuple[Any, ...]]:
    """The messages of a frame, by docs/cluster.md and not by the library."""
    assert data[:4] == b"XLO\x01"
    kind, epoch, _, first, _, _, names, sequences, published, values, keys, events, properties = (
        msgpack.unpackb(data[8:])
    )
    assert kind == "f"
    for i, value in enumerate(values):
        yield (
            first + i,
            epoch,
            keys and keys[i],
            value,
            (properties and properties[i]) or {},
            events and events[i],
            published if isinstance(published, int) else published[i],
            names if isinstance(names, str) else names[i],
            sequences + i if isinstance(sequences, int) else sequences[i],
        )


def target(namespace: Namespace, topic: str) -> Iterator[tuple[Any, ...]]:
    """The messages of the cluster, field by field."""
    for message in namespace.messages(topic):
        yield from unpacked(message.data())


def compare(path: str, namespace: Namespace) -> int:
    """AssertionError at the first difference; how many messages are the same."""
    count = 0
    with xl.open(path, readonly=True) as engine:
        for name in engine.topics():
            there = target(namespace, name.replace("/", "=2F"))
            for ours, theirs in itertools.zip_longest(source(engine.topic(name)), there):
                assert ours == theirs, f"{name}: {ours} in the log, {theirs} in the cluster"
                count += 1
    return count


# ---- the long run ------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--rate", type=float, default=20_000.0, help="messages per second")
    parser.add_argument("--broker", type=float, default=0.15, help="share of the broker's kills")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    rest = (1 - options.broker) / 2
    kinds = {"mirror": rest, "writer": rest, "broker": options.broker}
    with tempfile.TemporaryDirectory(prefix="mirrors-", ignore_cleanup_errors=True) as folder:
        broker = Broker(Path(folder) / "broker")
        broker.start()
        try:
            namespace, path = Namespace.make(broker.url, broker.admin), f"{folder}/log"
            began = time.monotonic()
            done = kill_at_random(
                kinds,
                path,
                namespace,
                broker,
                kills=options.kills,
                pause=options.pause,
                rate=options.rate,
                chance=random.Random(options.seed),
            )
            finish(path, namespace)
            count = compare(path, namespace)
            taken = time.monotonic() - began
            print(f"{dict(done)}: {count:,} messages, each once and as it was; {taken:.0f} s")
        finally:
            broker.kill()


if __name__ == "__main__":
    main()
