"""The horizon of a compacted view, beside a topic on a cluster (rule G7). tests/conformance has
what readers see."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

import exclusivelog as xl
from exclusivelog.cluster import blobs
from exclusivelog.cluster.checkpoints import COMPACTED
from exclusivelog.cluster.memory import MemoryPlace
from testing.compactions import compacted, read

pytestmark = [pytest.mark.once, pytest.mark.rule("G7")]


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def topic(path: str) -> Iterator[xl.Topic]:
    """A topic with two messages of one key, compacted."""
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        with topic.producer("exclusive") as producer:
            producer.send_many([b"1", b"2"], keys=["a", "a"])
        assert topic.compact() == 1
        assert compacted(topic) == [(1, b"a", b"2")]
        yield topic


def change(path: str, **changed: Any) -> None:
    """Store another horizon, which differs in these fields."""
    log = MemoryPlace.named(path.partition("://")[2]).open(f"{COMPACTED}orders")
    data = blobs.load(log)
    assert data is not None
    names = ("version", "topic", "anchor", "horizon")
    fields = {**dict(zip(names, msgpack.unpackb(data), strict=True)), **changed}
    blobs.store(log, msgpack.packb(list(fields.values())))


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2, "more": "of a later version"},
        {"topic": "other"},
        {"anchor": [None, None, 0]},
        {"anchor": [None, b"\0" * 8, 7]},
    ],
    ids=["version", "topic", "no record", "another log's"],
)
def test_g7_what_is_no_horizon_of_this_log_leaves_nothing_out(
    path: str, topic: xl.Topic, changed: dict[str, Any]
) -> None:
    change(path, **changed)
    assert compacted(topic) == read(topic.reader()) == [(0, b"a", b"1"), (1, b"a", b"2")]


def test_g7_an_older_horizon_that_comes_late_leaves_less_out(path: str, topic: xl.Topic) -> None:
    """Two that compact at once may be stored in either order."""
    change(path, horizon=1)
    assert compacted(topic) == read(topic.reader())


def test_g7_it_is_no_topic(topic: xl.Topic) -> None:
    assert topic.engine.topics() == ["orders"]
    assert topic.engine.verify().ok
