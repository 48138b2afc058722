"""Does the installed library work at all? Needs nothing but the library: run it from any directory.

`make wheels` and the release run it against each wheel, in an environment without a compiler.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import exclusivelog as xl

TREE = Path(__file__).resolve().parents[1]
SECONDS = 30.0


def lead(path: str, ready: Any) -> None:
    """Own the topic until this process is killed."""
    with xl.open(path, "first") as engine:
        producer = engine.topic("orders").producer("exclusive")
        ready.send([producer.send(b"a"), producer.send(b"b")])
        signal.pause()


def check_one_process(path: Path) -> None:
    """Sends, batches, keys, fencing, transactions and a shared map."""
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        leader = topic.producer("exclusive", serializer="json")
        assert (leader.send({"a": 1}, key="k"), leader.send_many([1, None])) == (0, range(1, 3))
        successor = topic.producer("exclusive_with_fencing")
        assert successor.topic_epoch == leader.topic_epoch + 1
        try:
            leader.send(1)
            raise AssertionError("a fenced producer has sent")
        except xl.ProducerFencedError:
            pass
        with engine.transaction() as transaction:
            successor.send(b"5", transaction=transaction)
        values = [message.value for message in topic.reader(deserializer="json")]
        assert values == [{"a": 1}, 1, None, 5], values
        assert engine.verify().ok
        with xl.SharedMap(engine.topic("settings")) as settings:
            settings["color"] = "blue"
            assert dict(settings) == {"color": "blue"}


def check_two_processes(path: Path) -> None:
    """A leader is killed; who waited owns the topic, and goes on behind it."""
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    first = processes.Process(target=lead, args=(str(path), there))
    first.start()
    try:
        assert here.poll(SECONDS), "the first leader did not start"
        assert here.recv() == [0, 1]
        with xl.open(path, "second") as engine:
            topic = engine.topic("orders")
            waiting = topic.producer_async("wait_for_exclusive")
            assert not waiting.done()
            first.kill()
            with waiting.result(SECONDS) as producer:
                assert (producer.topic_epoch, producer.send(b"c")) == (2, 2)
            assert [message.value for message in topic.reader()] == [b"a", b"b", b"c"]
    finally:
        first.kill()
        first.join(SECONDS)


def main() -> None:
    """Run all of it, and say where the library came from."""
    origin = Path(xl.__file__).resolve()
    assert TREE not in origin.parents, f"this is the tree's own library, {origin}"
    # A disk, not a tmpfs, which keeps nothing through a power cut.
    with tempfile.TemporaryDirectory(dir=os.environ.get("SMOKE_DIR")) as directory:
        check_one_process(Path(directory, "one"))
        check_two_processes(Path(directory, "two"))
    print(f"exclusivelog {xl.__version__} works on Python {sys.version.split()[0]}: {origin}")


if __name__ == "__main__":
    main()
