"""A user's ledger has reached its `map_size`: no message fits, and all else goes on (rule H2).

Sends say what to do. Topics are granted, taken over, released and handed on as before, and trims
and deletions make room: a part of the map is reserved for them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import exclusivelog as xl
from exclusivelog.events import EVENTS, Event
from exclusivelog.local.ownership import recording
from exclusivelog.local.storage import environment, ledger, usage
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, WAIT, Worker, open_producer, values

pytestmark = [pytest.mark.rule("H2"), pytest.mark.once]  # they run with both durabilities

MAP = 2 << 20
WAY_OUT = "larger map_size, or trim or delete topics"


def fill(engine: xl.Engine) -> int:
    """Send until nothing fits into the tables, nor into the journal, not even one byte; how many
    messages were acknowledged."""
    topic = engine.topic("t")
    with topic.producer(EXCLUSIVE, name="p") as producer:

        def send(batch: list[bytes], then: Callable[[], None] = lambda: None) -> None:
            while producer.send_many(batch):
                then()

        with pytest.raises(xl.LedgerFullError, match=WAY_OUT):
            # A little at a time: more of it is in a segment.
            send([bytes(1000)] * 50, engine.ledger.checkpoint)
        for batch in ([bytes(1000)] * 50, [bytes(1000)], [b"x"]):
            with pytest.raises(xl.LedgerFullError, match=WAY_OUT):
                send(batch)
    return topic.next_offset


@pytest.fixture(params=["power", "process"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def full(path: str, durability: str) -> int:
    """A full ledger; how many messages its topic has."""
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        for _ in range(20):
            engine.topic("old").producer().send_many([bytes(1000)] * 20)
            engine.ledger.checkpoint()
        return fill(engine)


def check_ownership(engine: xl.Engine, count: int) -> None:
    """All changes of ownership succeed, and none of them loses a message or a sequence id."""
    topic = engine.topic("t")
    owner = topic.producer(EXCLUSIVE, name="p")
    assert owner.last_sequence_id == count - 1
    rival = topic.producer(FENCING)
    with pytest.raises(xl.ProducerFencedError):
        owner.send(b"stale")
    waiter = topic.producer_async(WAIT, name="p")
    rival.close()
    assert waiter.result(PATIENCE).last_sequence_id == count - 1
    waiter.result().close()
    with engine.own("group", {"r": None}) as claim:
        assert claim.is_valid
    with engine.role("r", topics=["t", "u"]) as role:
        assert role.producer("t").last_sequence_id == -1
        role.producer("t").close()
    with topic.reader("earliest", group="g") as reader:
        reader.read_next(timeout=0)
        reader.commit()
    engine.topic("new").producer().close()
    engine.delete_topic("new")
    assert topic.next_offset == count


def test_h2_a_full_map_stops_sends_alone(path: str, durability: str, full: int) -> None:
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        for _ in range(3):
            check_ownership(engine, full)
        topic = engine.topic("t")
        with topic.producer() as producer, pytest.raises(xl.LedgerFullError):
            producer.send(bytes(1000))
        assert engine.verify().ok


@pytest.mark.parametrize("way", ["trim", "larger"])
def test_h2_a_full_map_goes_on_once_there_is_room(
    path: str, durability: str, full: int, way: str
) -> None:
    size = 4 * MAP if way == "larger" else MAP
    with xl.open(path, map_size=size, durability=durability) as engine:
        topic = engine.topic("t")
        if way == "trim":
            topic.trim(before=full - 10)
        with topic.producer(EXCLUSIVE, name="p") as producer:
            assert producer.last_sequence_id == full - 1
            assert [producer.send(bytes(1000)) for _ in range(5)] == list(range(full, full + 5))
        assert len(values(topic)) == (15 if way == "trim" else full + 5)
        assert engine.verify().ok


@pytest.mark.usual_journal
@pytest.mark.parametrize("way", ["trim", "delete"])
def test_h2_room_is_made_although_the_journal_is_larger_than_the_map(
    path: str, durability: str, way: str
) -> None:
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        count = fill(engine)
        if way == "trim":
            engine.topic("t").trim(before=count - 1)
            assert len(values(engine.topic("t"))) == 1
        else:
            engine.delete_topic("t")
        other = engine.topic("other")
        with other.producer() as producer:
            assert [producer.send(bytes(1000)) for _ in range(20)] == list(range(20))
            engine.ledger.checkpoint()
        assert engine.verify().ok


def test_h2_a_full_map_has_room_once_a_topic_is_deleted(
    path: str, durability: str, full: int
) -> None:
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        engine.delete_topic("t")
        with engine.topic("t").producer(EXCLUSIVE) as producer:
            assert [producer.send(bytes(1000)) for _ in range(20)] == list(range(20))
        assert engine.verify().ok


def test_h2_the_owner_of_a_full_map_dies(
    path: str, durability: str, full: int, worker: Callable[..., Worker]
) -> None:
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        topic = engine.topic("t")
        owner = worker(topic="t", map_size=MAP, durability=durability)
        owner.call(open_producer, EXCLUSIVE, name="p")
        waiter = topic.producer_async(WAIT)
        owner.kill()
        waiter.result(PATIENCE).close()
        assert topic.producer(EXCLUSIVE, name="p").last_sequence_id == full - 1


def test_h2_a_full_map_opens_with_a_smaller_one(path: str, durability: str, full: int) -> None:
    with xl.open(path, map_size=MAP // 2, durability=durability) as engine:
        check_ownership(engine, full)
        engine.topic("t").trim(before=full)
        engine.delete_topic("old")
        with engine.topic("t").producer() as producer:
            assert producer.send(bytes(1000)) == full


@pytest.mark.long
def test_h2_a_full_map_keeps_the_newest_changes_of_ownership(
    path: str, durability: str, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often its topic changes hands, the record of that does not fill the reserve."""
    for module in environment, ledger, recording, usage:
        monkeypatch.setattr(module, "MAP_RESERVED", 1 << 19)
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        for _ in range(600):
            owner = engine.topic("t").producer(FENCING, name="p")
        owner.close()
        last = Event.loads(values(engine.topic(EVENTS))[-1])
        assert (last.kind, last.topic) == ("release", "t")


def test_h2_a_full_map_terminates_a_topic_at_its_end(path: str, durability: str, full: int) -> None:
    with xl.open(path, map_size=MAP, durability=durability) as engine:
        assert engine.topic("t").terminate() == full
        assert len(values(engine.topic("t"))) == full
