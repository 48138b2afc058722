"""The mirror and the log's writer are killed while they work, again and again: each message arrives
once, as it was. `python -m testing.mirrors` is the long run, which also kills the broker."""

from __future__ import annotations

import random

import pytest

import exclusivelog as xl
from exclusivelog.cluster import Mirror
from exclusivelog.cluster.pulsar import topic_name
from testing.broker import Namespace
from testing.mirrors import compare, finish, kill_at_random

pytestmark = [pytest.mark.rule("J4"), pytest.mark.broker]


@pytest.mark.parametrize("seed", range(2))
def test_mirrors_and_writers_that_are_killed(path: str, namespace: Namespace, seed: int) -> None:
    kinds = {"mirror": 2.0, "writer": 1.0}
    chance = random.Random(seed)
    done = kill_at_random(kinds, path, namespace, kills=6, pause=0.8, rate=20_000.0, chance=chance)
    finish(path, namespace)
    assert sum(done.values()) == 6
    assert compare(path, namespace) > 1000


def test_plain_mirrors_that_are_killed(path: str, namespace: Namespace) -> None:
    kinds = {"mirror": 2.0, "writer": 1.0}
    chance = random.Random(3)
    kill_at_random(
        kinds, path, namespace, kills=5, pause=0.8, rate=500.0, chance=chance, plain=True
    )
    finish(path, namespace, plain=True)
    with xl.open(path, readonly=True) as engine:
        ends = {name: engine.topic(name).next_offset for name in engine.topics()}
        with Mirror(engine, namespace.url, admin=namespace.admin, plain=True) as mirror:
            assert mirror.verify() == {name: (end, 0, 0) for name, end in ends.items()}
    for name, end in ends.items():
        there = namespace.messages(topic_name(name))
        offsets = [int(each.properties()["exclusivelog.offset"]) for each in there]
        assert offsets == list(range(end))
