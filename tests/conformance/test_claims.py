"""Claims and reader groups, on the public interface alone (rules F1 to F6)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from testing.processes import EXCLUSIVE, PATIENCE, State, Worker, until

pytestmark = pytest.mark.needs("claims", "reader_groups")


@pytest.fixture
def other(path: str) -> Iterator[xl.Engine]:
    with xl.open(path, name="other") as engine:
        yield engine


@pytest.fixture
def filled(topic: xl.Topic) -> xl.Topic:
    """The topic, with ten messages."""
    with topic.producer(EXCLUSIVE) as producer:
        producer.send_many([b"%d" % n for n in range(10)])
    return topic


def test_f1_groups_and_resources_do_not_know_each_other(
    engine: xl.Engine, other: xl.Engine
) -> None:
    claims = [
        place.own(group, {name: None})
        for place in (engine, other)
        for group, name in ((f"g{place.name}", "a"), (f"g{place.name}", "b"), (None, place.name))
    ]
    assert all(claim.is_valid for claim in claims)
    assert {(info.group, *info.generations) for info in engine.claims()} == {
        (claim.group, *claim.generations) for claim in claims
    }


@pytest.mark.needs("several_claims")
@pytest.mark.on_broker
def test_f1_f3_a_claim_gets_all_of_its_resources_or_none_and_loses_all(
    engine: xl.Engine, other: xl.Engine
) -> None:
    first = engine.own("g", {"a": 5, "b": None})
    with pytest.raises(xl.OwnershipError, match="resource 'a' of group 'g' is held"):
        other.own("g", {"c": None, "a": 4})
    assert [info.generations for info in other.claims("g")] == [{"a": 5, "b": 1}]
    second = other.own("g", {"c": None, "b": None})
    assert (second.generations, first.is_valid) == ({"c": 1, "b": 2}, False)
    assert engine.own("g", {"a": None}).generations == {"a": 6}  # it was freed with b
    assert second.is_valid
    second.release()
    assert [info.generations for info in other.claims("g")] == [{"a": 6}]


@pytest.mark.on_broker
def test_f2_generations_count_up_and_a_number_below_the_last_is_refused(
    engine: xl.Engine, other: xl.Engine
) -> None:
    for generation in (1, 2):
        with engine.own("g", {"r": None}) as claim:
            assert claim.generations == {"r": generation}
    with other.own("g", {"r": 7}):
        pass
    with pytest.raises(xl.OwnershipError, match="has been at generation 7"):
        engine.own("g", {"r": 6})
    assert engine.own("g", {"r": 7}).generations == {"r": 7}
    assert engine.own("g", {"r": None}).generations == {"r": 8}


@pytest.mark.on_broker
def test_f3_f5_a_live_claim_is_revoked_by_an_equal_or_higher_one_alone(
    engine: xl.Engine, other: xl.Engine
) -> None:
    lost: list[BaseException] = []
    first = engine.own("g", {"r": 5}, on_lost=lambda _, error: lost.append(error))
    with pytest.raises(xl.OwnershipError, match="is held with generation 5, above 4"):
        other.own("g", {"r": 4})
    assert first.is_valid
    second = other.own("g", {"r": 5})
    assert (first.is_valid, second.is_valid) == (False, True)
    until(lambda: lost)
    for use in (first.check, lambda: first.generations):
        with pytest.raises(xl.OwnershipLostError):
            use()
    first.release()
    assert second.is_valid
    assert isinstance(lost[0], xl.OwnershipLostError)


@pytest.mark.on_broker
def test_f4_generation_0_always_wins_and_begins_anew(engine: xl.Engine, other: xl.Engine) -> None:
    first = engine.own("g", {"r": 9})
    assert other.own("g", {"r": 0}).generations == {"r": 0}
    assert not first.is_valid
    assert engine.own("g", {"r": None}).generations == {"r": 1}


def test_f5_a_claim_ends_with_its_engine(engine: xl.Engine, path: str) -> None:
    with xl.open(path) as gone:
        claim = gone.own("g", {"r": 3})
        assert len(engine.claims("g")) == 1
    assert engine.claims("g") == []
    assert not claim.is_valid
    assert engine.own("g", {"r": 3}).is_valid


def test_f3_a_claim_waits_for_one_with_a_higher_generation(
    engine: xl.Engine, other: xl.Engine
) -> None:
    first = engine.own("g", {"r": 5})
    with pytest.raises(xl.OwnershipError):
        other.own("g", {"r": 1}, timeout=0.1)
    releasing = threading.Timer(0.2, first.release)
    releasing.start()
    with pytest.raises(xl.OwnershipError, match="has been at"):
        other.own("g", {"r": 1}, timeout=PATIENCE)
    releasing.join()


@pytest.mark.on_broker
def test_e5_history_tells_of_claims(engine: xl.Engine, other: xl.Engine) -> None:
    engine.own("g", {"r": 2})
    other.own("g", {"r": 3}).release()
    told = [
        (event.kind, event.reason, event.resource, event.generation)
        for event in engine.history(group="g")
    ]
    assert told == [
        ("own", "claim", "r", 2),
        ("revoke", "claimed", "r", 2),
        ("own", "claim", "r", 3),
        ("release", "closed", "r", 3),
    ]


# ---- reader groups -----------------------------------------------------------------------


def test_f6_a_group_goes_on_where_it_has_committed(filled: xl.Topic, other: xl.Engine) -> None:
    with filled.reader(group="billing") as reader:
        assert [message.offset for message in reader.read_batch(4)] == [0, 1, 2, 3]
        reader.commit()
        reader.read_batch(3)
    with other.topic("orders").reader(group="billing") as reader:
        assert reader.position == 4
        assert reader.read_next(PATIENCE).offset == 4
        reader.commit()
        reader.commit()
    assert filled.reader(group="billing").position == 5
    assert filled.reader(group="other").position == 0
    [billing, another] = other.groups()
    found = (billing.group, billing.topic, billing.position, billing.lag)
    assert found == ("billing", "orders", 5, 5)
    assert (another.group, another.position) == ("other", None)
    other.topic("bills")
    assert other.topic("orders").stats().groups == tuple(other.groups())
    assert other.topic("bills").stats().groups == ()


@pytest.mark.on_broker
def test_f6_the_next_reader_of_a_group_fences_the_one_before(
    filled: xl.Topic, other: xl.Engine
) -> None:
    first = filled.reader(group="billing")
    first.read_batch(2)
    first.commit()
    first.read_batch(2)
    second = other.topic("orders").reader(group="billing")
    with pytest.raises(xl.ReaderFencedError):
        first.commit()
    with pytest.raises(xl.ReaderFencedError):
        first.read_next(timeout=1)
    assert (second.position, second.generation) == (2, 2)
    second.read_batch(3)
    second.commit()
    first.close()
    assert [info.position for info in other.groups()] == [5]


def test_f6_a_reader_that_waits_is_fenced(topic: xl.Topic, other: xl.Engine) -> None:
    reader = topic.reader(group="billing")
    fenced: list[BaseException] = []

    def wait() -> None:
        try:
            reader.read_next(PATIENCE)
        except xl.ExclusiveLogError as error:
            fenced.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with other.topic("orders").reader(group="billing"):
        waiting.join(PATIENCE)
        assert [type(error) for error in fenced] == [xl.ReaderFencedError]


def read_and_commit(state: State, count: int) -> int:
    """Read for the group; its position."""
    state.kept["reader"] = reader = state.topic.reader(group="billing")
    reader.read_batch(count)
    reader.commit()
    return int(reader.position)


@pytest.mark.on_broker
def test_f6_a_group_outlives_the_process_of_its_reader(
    filled: xl.Topic, worker: Callable[..., Worker]
) -> None:
    process = worker()
    assert process.call(read_and_commit, 6) == 6
    process.kill()
    with filled.reader(group="billing") as reader:
        assert [message.offset for message in reader] == [6, 7, 8, 9]


@pytest.mark.needs("several_claims")
@pytest.mark.on_broker
def test_f6_a_reader_of_several_topics_commits_all_positions_or_none(
    engine: xl.Engine, filled: xl.Topic, other: xl.Engine
) -> None:
    with engine.topic("bills").producer(EXCLUSIVE) as producer:
        producer.send_many([b"x"] * 3)
    first = engine.reader(["orders", "bills"], group="g")
    assert len(first.read_batch(5)) == 5
    first.commit()
    committed = dict(first.positions)
    first.read_batch(2)
    with other.topic("bills").reader(group="g") as rival:
        assert rival.position == committed["bills"]
        with pytest.raises(xl.ReaderFencedError):
            first.commit()
    assert {info.topic: info.position for info in other.groups()} == committed
    with pytest.raises(xl.ReaderFencedError):
        first.read_next(timeout=1)
    first.close()
    with other.reader(["orders", "bills"], group="g") as second:
        assert dict(second.positions) == committed
        assert len(list(second)) == 8


@pytest.mark.on_broker
def test_f6_a_group_without_a_reader_is_deleted(filled: xl.Topic, other: xl.Engine) -> None:
    with filled.reader(group="g") as reader:
        reader.read_batch(4)
        reader.commit()
        with pytest.raises(xl.OwnershipError, match="while it is read by engine 'test'"):
            other.delete_group("g")
    assert other.delete_group("g") == 1
    assert other.groups() == []
    with pytest.raises(ValueError, match="no reader group"):
        other.delete_group("g")
    with filled.reader(group="g") as reader:
        assert (reader.position, reader.generation) == (0, 2)


def test_f6_a_reader_of_one_topic_in_a_list_is_the_same(
    engine: xl.Engine, filled: xl.Topic, other: xl.Engine
) -> None:
    with engine.reader(["orders"], group="billing") as reader:
        assert [(name, message.offset) for name, message in reader] == [
            ("orders", offset) for offset in range(10)
        ]
        reader.commit()
        with other.topic("orders").reader(group="billing") as rival:
            assert rival.position == 10
            with pytest.raises(xl.ReaderFencedError):
                reader.commit()
