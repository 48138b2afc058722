"""`engine.producers` in the modes that do not wait: on all topics or on none (rules A2, A6, B6)."""

from __future__ import annotations

import pytest

import exclusivelog as xl
import exclusivelog.aio
from testing.loops import play
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, SHARED, WAIT, values

pytestmark = [pytest.mark.once, pytest.mark.needs("many_producers")]
NAMES = ["t0", "t1", "t2"]


def snapshot(engine: xl.Engine) -> list[tuple[str, int, object]]:
    """Each topic's name, epoch and holders."""
    topics = [engine.topic(name) for name in engine.topics()]
    return [(t.name, t.epoch, [holder.producer_name for holder in t.holders]) for t in topics]


@pytest.mark.rule("A2")
@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, FENCING])
def test_a2_all_of_them_are_opened(engine: xl.Engine, mode: str) -> None:
    producers = engine.producers(NAMES, mode, properties={"rack": "7"})
    assert [p.topic for p in producers] == NAMES
    assert len({p.name for p in producers}) == len(NAMES)
    receipts = [p.send_async(p.topic.encode()) for p in producers]
    assert [r.result(PATIENCE) for r in receipts] == [0] * len(NAMES)
    for name in NAMES:
        topic = engine.topic(name)
        assert values(topic) == [name.encode()]
        [holder] = topic.holders
        assert holder.properties == {"rack": "7"}
        assert topic.epoch == (0 if mode == SHARED else 1)
    for producer in producers:
        producer.close()
    assert all(not engine.topic(name).holders for name in NAMES)


@pytest.mark.rule("G2")
def test_g2_each_counts_the_sequence_ids_of_its_topic(engine: xl.Engine) -> None:
    for producer in engine.producers(["a", "b"], EXCLUSIVE, name="p"):
        if producer.topic == "a":
            producer.send(b"x", sequence_id=41)
        producer.close()
    a, b = engine.producers(["a", "b"], EXCLUSIVE, name="p")
    assert (a.last_sequence_id, b.last_sequence_id) == (41, -1)


@pytest.mark.rule("A2", "A6")
def test_a2_one_that_is_refused_opens_none(engine: xl.Engine, path: str) -> None:
    """No topic is made, no epoch used up, and no producer fenced before it is refused."""
    with xl.open(path, name="other") as other:
        owner = other.topic("t0").producer(EXCLUSIVE, name="owner")
        shared = other.topic("t1").producer(name="taken")
        other.topic("t2").terminate()
        before = snapshot(engine)
        with pytest.raises(xl.ProducerFencedError, match="t1"):
            engine.producers(["new", "t1", "t0"], EXCLUSIVE)
        with pytest.raises(xl.ProducerBusyError, match="'taken'"):
            engine.producers(["new", "t1"], SHARED, name="taken")
        with pytest.raises(xl.TopicTerminatedError):
            engine.producers(["t0", "new", "t1", "t2"], FENCING)
        assert snapshot(engine) == before
        assert (shared.send(b"1"), owner.send(b"2")) == (0, 0)


@pytest.mark.rule("A2")
def test_dropped_producers_give_their_topics_back(engine: xl.Engine) -> None:
    engine.producers(NAMES, EXCLUSIVE)
    producers = engine.producers(NAMES, EXCLUSIVE)
    assert [p.topic_epoch for p in producers] == [2] * len(NAMES)


@pytest.mark.rule("B6")
def test_b6_fencing_takes_all_topics_over(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="other") as other:
        former = other.producers(NAMES, EXCLUSIVE)
        producers = engine.producers(NAMES, FENCING)
        assert [p.topic_epoch for p in producers] == [2] * len(NAMES)
        for producer in former:
            with pytest.raises(xl.ProducerFencedError):
                producer.send(b"too late")


@pytest.mark.rule("A4")
def test_a4_wrong_arguments(engine: xl.Engine) -> None:
    for names in ("orders", [1], [b"orders"]):
        with pytest.raises(TypeError):
            engine.producers(names)  # type: ignore[arg-type]
    for names in (["a", "b", "a"], ["__events__"], [""], ["a\n"]):
        with pytest.raises(ValueError):
            engine.producers(names)
    assert engine.producers([]) == []
    assert engine.topics() == []


@pytest.mark.rule("D9")
def test_d9_they_may_wait(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="other") as other:
        former = other.producers(NAMES, EXCLUSIVE)
        with pytest.raises(xl.WaitTimeoutError):
            engine.producers(NAMES, WAIT, timeout=0.05)
        assert not any(engine.topic(name).waiters for name in NAMES)
        futures = engine.producers(NAMES, WAIT, wait=False)
        for producer in former:
            producer.close()
        assert [f.result(PATIENCE).topic_epoch for f in futures] == [2] * len(NAMES)


def test_they_are_awaitable(path: str) -> None:
    async def main() -> list[int]:
        async with exclusivelog.aio.open(path) as engine:
            producers = await engine.producers(NAMES, EXCLUSIVE)
            return [await producer.send(b"x") for producer in producers]

    assert play(main) == [0] * len(NAMES)
