"""The journal's last eighth is shared out: a process that sends at full speed, and is then stopped
while it makes the checkpoint that would make room, has left room for others (rule K3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import exclusivelog as xl
from exclusivelog.local.log import appending
from testing.processes import EXCLUSIVE, PATIENCE, SHARED, State, Worker, until

pytestmark = [pytest.mark.once, pytest.mark.rule("K3")]

MESSAGE = b"x" * 100


def begin(state: State, mode: str) -> None:
    state.producer = state.topic.producer(mode)
    state.producer.send(b"first")


def send_until(state: State, enough: str) -> int:
    """At full speed; how many."""
    assert state.producer is not None
    count = 1
    while not Path(enough).exists():
        state.producer.send(MESSAGE)
        count += 1
    return count


def send_at_least(state: State, nbytes: int) -> None:
    assert state.producer is not None
    for _ in range(nbytes // len(MESSAGE)):
        state.producer.send(MESSAGE)


def send(state: State) -> int:
    assert state.producer is not None
    return state.producer.send(MESSAGE, timeout=PATIENCE)


def send_async(state: State) -> int:
    assert state.producer is not None
    return state.producer.send_async(MESSAGE).result(PATIENCE)


def commit(state: State) -> int:
    assert state.producer is not None
    with state.engine.transaction() as transaction:
        state.producer.send(MESSAGE, transaction=transaction)
    return transaction.offsets[state.producer].start


@pytest.fixture
def engine(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, durability="process") as engine:
        yield engine


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE])
def test_k3_one_that_fills_the_journal_leaves_room_for_others(
    engine: xl.Engine, worker: Callable[..., Worker], path: str, mode: str
) -> None:
    """Also for one that has appended nothing while the ring went around. Each has its share between
    two checkpoints."""
    fast, other = (worker(topic=name, durability="process") for name in ("fast", "orders"))
    fast.call(begin, mode)
    other.call(begin, mode)
    journal, enough = engine.ledger.journal, Path(f"{path}/../enough")
    assert journal is not None
    most, share = journal.capacity * 7 // 8, journal.capacity // 64
    fast.start(send_until, str(enough))
    until(lambda: journal.applied > journal.capacity)
    with engine.ledger.write_concurrent():  # no checkpoint can be made
        until(lambda: journal.backlog > most + share - 1000)
        assert [other.call(way) for way in (send, send_async, commit)] == [1, 2, 3]
        other.start(send_until, str(enough))
        until(lambda: journal.backlog > most + 2 * share - 1000)
        assert journal.backlog <= most + 2 * share
    enough.touch()
    assert fast.answer() == len(engine.topic("fast"))
    assert other.answer() + 3 == len(engine.topic("orders"))


def test_the_frames_of_others_send_nobody_to_the_tables(
    engine: xl.Engine, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have gone around the ring since its last append, but none was of its topic."""
    fast = worker(topic="fast", durability="process")
    fast.call(begin, SHARED)
    journal = engine.ledger.journal
    assert journal is not None
    with engine.topic("orders").producer() as producer:
        producer.send(b"first")
        fast.call(send_at_least, 2 * journal.capacity)
        monkeypatch.setattr(appending, "look_up", None)
        monkeypatch.setattr(appending, "look_up_all", None)
        assert producer.send(b"second") == 1
        assert producer.send_async(b"third").result(PATIENCE) == 2


def test_a_message_of_another_process_is_found_however_old_it_is(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    """The ring has gone around since."""
    fast, other = (worker(topic=name, durability="process") for name in ("fast", "orders"))
    fast.call(begin, SHARED)
    journal = engine.ledger.journal
    assert journal is not None
    with engine.topic("orders").producer() as producer:
        producer.send(b"ours")
        other.call(begin, SHARED)
        fast.call(send_at_least, 2 * journal.capacity)
        assert producer.send(b"ours") == 2
        assert [message.value for message in engine.topic("orders").reader()] == [
            b"ours",
            b"first",
            b"ours",
        ]
