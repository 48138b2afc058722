"""A target that is full: a clear error, nothing is skipped, and the mirror goes on once there is
room (J4)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.cluster import Mirror
from testing.broker import Broker, Namespace, missing
from testing.disks import disk, leave
from testing.mirrors import compare
from testing.processes import PATIENCE, until, within

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]

MEGABYTE = 1 << 20


def mirror(engine: xl.Engine, namespace: Namespace, timeout: float = 90.0) -> Mirror:
    return Mirror(engine, namespace.url, admin=namespace.admin, timeout=timeout)


def test_a_backlog_quota_is_exceeded_while_it_follows(
    topic: xl.Topic, namespace: Namespace
) -> None:
    quota = {"limitSize": 1000, "limitTime": -1, "policy": "producer_exception"}
    subscription = f"persistent/{namespace.path}/orders/subscription/slow"
    with topic.producer() as producer:
        with mirror(topic.engine, namespace) as running:
            running.start(follow=True)
            producer.send_many([b"x" * 1000] * 3000)
            until(lambda: [one.position for one in running.progress()] == [3000])
            namespace.call("POST", f"namespaces/{namespace.path}/backlogQuota", quota)
            namespace.call("PUT", subscription, {"ledgerId": 0, "entryId": 0, "partitionIndex": -1})
            # The quota is looked at when a producer comes: as after a move to another broker.
            namespace.call("PUT", f"persistent/{namespace.path}/orders/unload")
            producer.send_many([b"y"] * 1000)
            with pytest.raises(
                xl.ClusterError, match=r"it is full: .*backlog quota|stored nothing"
            ):
                within(lambda: running.wait(PATIENCE), PATIENCE)
            assert [one.lag for one in running.progress()] == [1000]
        namespace.call("DELETE", subscription + "?force=true")
        namespace.call("DELETE", f"namespaces/{namespace.path}/backlogQuota")
        with mirror(topic.engine, namespace) as running:
            within(running.run, PATIENCE)
    assert compare(topic.engine.path, namespace) == 4000


def test_a_full_disk_of_the_broker(topic: xl.Topic, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    settings: dict[str, Any] = {
        "diskCheckInterval": "500",
        "dbStorage_rocksDB_writeBufferSizeMB": "4",
        "journalMaxSizeMB": "16",
        "journalPreAllocSizeMB": "4",
        "logSizeLimit": str(16 * MEGABYTE),
    }
    with disk(tmp_path / "disk", 6000) as place, topic.producer() as producer:
        broker = Broker(place / "broker", settings)
        broker.start()
        try:
            namespace = Namespace.make(broker.url, broker.admin)
            producer.send_many([b"x" * 100] * 100)
            with mirror(topic.engine, namespace) as running:
                within(running.run, PATIENCE)
            # A standalone's bookie takes no writes beyond 99.9 %; its metadata needs more room.
            ballast = leave(place, 5 * MEGABYTE)
            time.sleep(3.0)  # it looks every half second
            producer.send_many([b"y" * 1000] * 10_000)
            with mirror(topic.engine, namespace, timeout=10.0) as running:
                with pytest.raises(xl.ClusterError, match=r"full|could not store"):
                    within(running.run, PATIENCE)
                assert sum(one.lag for one in running.progress()) > 0
            ballast.unlink()
            with mirror(topic.engine, namespace) as running:
                within(running.run, PATIENCE)
            assert compare(topic.engine.path, namespace) == 10_100
        finally:
            broker.kill()
