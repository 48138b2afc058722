"""`engine.producers` opens many producers in one transaction: all or none (rules A2, A6, B6)."""

from __future__ import annotations

import asyncio
import gc

import pytest

import exclusivelog as xl
import exclusivelog.aio
from exclusivelog.local.ownership.sessions import Sessions
from testing.processes import PATIENCE, until, values

NAMES = [f"t{i}" for i in range(30)]


def snapshot(engine: xl.Engine) -> list[tuple[str, int, object]]:
    """Each topic's name, epoch and owner."""
    topics = [engine.topic(name) for name in engine.topics()]
    owners = [topic.owner for topic in topics]
    names = [owner and owner.producer_name for owner in owners]
    return [(t.name, t.epoch, name) for t, name in zip(topics, names, strict=True)]


@pytest.mark.parametrize("mode", ["shared", "exclusive", "exclusive_with_fencing"])
def test_a2_they_are_opened_in_one_transaction(engine: xl.Engine, mode: str) -> None:
    before = engine.stats()["transactions"]
    producers = engine.producers(NAMES, mode, properties={"rack": "7"})
    assert engine.stats()["transactions"] <= before + 2  # a checkpoint may come between
    assert [p.topic for p in producers] == NAMES
    assert len({p.name for p in producers}) == len(NAMES)
    receipts = [p.send_async(p.topic.encode()) for p in producers]
    assert [r.result(PATIENCE) for r in receipts] == [0] * len(NAMES)
    for name in NAMES:
        topic = engine.topic(name)
        assert values(topic) == [name.encode()]
        [holder] = topic.holders
        assert holder.properties == {"rack": "7"}
        assert topic.epoch == (0 if mode == "shared" else 1)
    for producer in producers:
        producer.close()
    assert all(not engine.topic(name).holders for name in NAMES)


def test_g2_each_counts_the_sequence_ids_of_its_topic(engine: xl.Engine) -> None:
    for producer in engine.producers(["a", "b"], "exclusive", name="p"):
        if producer.topic == "a":
            producer.send(b"x", sequence_id=41)
        producer.close()
    a, b = engine.producers(["a", "b"], "exclusive", name="p")
    assert (a.last_sequence_id, b.last_sequence_id) == (41, -1)


def test_a2_one_that_is_refused_opens_none(engine: xl.Engine, path: str) -> None:
    """No topic is made, no epoch used up, and no producer fenced before it is refused."""
    with xl.open(path, name="other") as other:
        shared = other.topic("t1").producer(name="taken")
        owner = other.topic("t20").producer("exclusive", name="owner")
        other.topic("t25").terminate()
        before = snapshot(engine)
        with pytest.raises(xl.ProducerFencedError, match="t1"):
            engine.producers(NAMES, "exclusive")
        with pytest.raises(xl.ProducerBusyError, match="'taken'"):
            engine.producers(NAMES[:5], "shared", name="taken")
        with pytest.raises(xl.TopicTerminatedError):
            engine.producers(NAMES, "exclusive_with_fencing")
        assert snapshot(engine) == before
        assert (shared.send(b"1"), owner.send(b"2")) == (0, 0)


def test_b6_fencing_takes_all_topics_over(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="other") as other:
        former = other.producers(NAMES, "exclusive")
        producers = engine.producers(NAMES, "exclusive_with_fencing")
        assert [p.topic_epoch for p in producers] == [2] * len(NAMES)
        for producer in former:
            with pytest.raises(xl.ProducerFencedError):
                producer.send(b"too late")


def test_a4_wrong_arguments(engine: xl.Engine) -> None:
    for names in ("orders", [1], [b"orders"]):
        with pytest.raises(TypeError):
            engine.producers(names)  # type: ignore[arg-type]
    for names in (["a", "b", "a"], ["__events__"], [""], ["a\n"]):
        with pytest.raises(ValueError):
            engine.producers(names)
    with pytest.raises(ValueError, match="producer_async"):
        engine.producers(["a"], "wait_for_exclusive")
    for option in ("timeout", "topic_epoch", "priority", "nonsense"):
        with pytest.raises(TypeError, match=option):
            engine.producers(["a"], **{option: 1})
    assert engine.producers([]) == []
    assert engine.topics() == []


def test_a2_an_interrupt_after_the_commit_leaves_no_owner(
    engine: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_all = Sessions.request_all

    def interrupted(*args):
        request_all(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sessions, "request_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.producers(NAMES, "exclusive")
    until(lambda: all(owner is None for _, _, owner in snapshot(engine)))


def test_dropped_producers_give_their_topics_back(engine: xl.Engine) -> None:
    producers = engine.producers(NAMES, "exclusive")
    assert all(owner for _, _, owner in snapshot(engine))
    del producers
    gc.collect()
    until(lambda: all(owner is None for _, _, owner in snapshot(engine)))


@pytest.mark.rule("G8")
def test_g8_a_dropped_producer_keeps_no_topic_from_being_deleted(engine: xl.Engine) -> None:
    for _ in range(20):
        producer = engine.topic("brief").producer("exclusive", linger=60)
        producer.send_async(b"x")
        del producer
        engine.delete_topic("brief")


def test_f5_they_are_bound_to_a_claim(engine: xl.Engine) -> None:
    claim = engine.own("group", {"r": None})
    producers = engine.producers(["a", "b"], "exclusive", claim=claim)
    assert [p.send(b"x") for p in producers] == [0, 0]
    claim.release()
    for producer in producers:
        with pytest.raises(xl.ProducerRevokedError):
            producer.send(b"y")
    with pytest.raises(xl.OwnershipLostError):
        engine.producers(["c"], "exclusive", claim=claim)
    assert "c" not in engine.topics()


def test_they_are_awaitable(path: str) -> None:
    async def main() -> list[int]:
        async with exclusivelog.aio.open(path) as engine:
            producers = await engine.producers(["a", "b"], "exclusive", name="p")
            return [await p.send(b"x") for p in producers]

    assert asyncio.run(main()) == [0, 0]
