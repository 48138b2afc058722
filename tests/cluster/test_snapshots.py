"""Snapshots of shared maps and states on a cluster, and the figures of an engine there."""

from __future__ import annotations

import secrets

import pytest

import exclusivelog as xl
from exclusivelog.cluster import checkpoints, cursor
from exclusivelog.cluster.memory import MemoryPlace
from exclusivelog.metrics import render
from testing.processes import EXCLUSIVE, WAIT, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoints, "EVERY_RECORDS", 20)
    monkeypatch.setattr("exclusivelog.cluster.following.MARK_EVERY", 5)
    return f"memory://{secrets.token_hex(8)}"


def frames_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first offsets of the frames that cursors take from now on."""
    found: list[int] = []
    entries_of = cursor.entries_of

    def noting(frame: object, *options: object) -> object:
        found.append(frame.first)  # type: ignore[attr-defined]
        return entries_of(frame, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(cursor, "entries_of", noting)
    return found


@pytest.mark.rule("I4")
@pytest.mark.parametrize("size", [1, 3000], ids=["one record", "several records"])
def test_i4_a_map_is_opened_from_its_snapshot(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xl.open(path) as engine, xl.SharedMap(engine.topic("m")) as settings:
        for n in range(60):
            settings.put(f"key-{n % 4}", "x" * size * 1000 * (n > 55) + str(n))
        assert settings.snapshot() == 60
        settings.put("key-0", "last")
    found = frames_read(monkeypatch)
    with xl.open(path) as engine, xl.SharedMap(engine.topic("m")) as settings:
        assert settings.get("key-0") == "last"
        assert settings.get("key-3") == "x" * size * 1000 + "59"
        assert settings.get("key-4") is None
    assert set(found) == {60}


@pytest.mark.rule("I4")
def test_i4_a_snapshot_of_another_log_is_not_used(path: str) -> None:
    with xl.open(path) as engine, xl.SharedMap(engine.topic("m")) as settings:
        settings.put("key", "old")
        settings.snapshot()
    shared = MemoryPlace.named(path.partition("://")[2])._shared
    # The topic is made anew, no record says that it was there, and what is beside it stays.
    del shared.logs["m"], shared.logs["__births__"]
    with xl.open(path) as engine, xl.SharedMap(engine.topic("m")) as settings:
        assert settings.list_keys() == []
        settings.put("key", "new")
    with xl.open(path) as engine, xl.SharedMap(engine.topic("m")) as settings:
        assert settings.get("key") == "new"


def test_the_figures_of_an_engine(path: str) -> None:
    with xl.open(path) as engine:
        topic = engine.topic("orders")
        with topic.producer(EXCLUSIVE) as producer:
            producer.send(b"a")
            producer.send_many([b"b", b"c"])
            assert producer.stats().messages == 3
            assert producer.stats().pending_messages == 0
            waiting = topic.producer_async(WAIT)
            until(lambda: topic.stats().waiters == 1)
            stats = engine.stats()
            assert (stats.topics, stats.engines, stats.waiters) == (1, 1, 1)
            assert (stats.appended_messages, stats.pending_messages) == (3, 0)
            assert stats.durable_seconds.count == 2
            assert 0 < stats.durable_seconds.quantile(0.5) < 60
            found = topic.stats()
            assert (found.messages, found.next_offset, found.epoch) == (3, 3, 1)
            assert (found.holders, found.waiters) == (1, 1)
            text = render(engine)
            assert "exclusivelog_appended_messages_total" in text
            assert 'topic="orders"' in text
            assert f'exclusivelog_up{{ledger="{path}"}} 1' in text
            waiting.cancel()
