"""A program that opens producers, topics and claims all day long: what has ended must not stay in
the tables for ever, or each call and each backup would take longer from day to day."""

from __future__ import annotations

import os
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import _core
from exclusivelog.local.log import reading
from exclusivelog.local.records import ENDED, LAST_ENDED, NAMES, U64
from exclusivelog.local.storage import forgetting
from testing.processes import State, rows

pytestmark = pytest.mark.once  # either durability leaves the same rows


def names(engine: xl.Engine) -> set[str]:
    """The producer names in the tables, of all topics."""
    with engine.ledger.read() as tables:
        return {key[8:].decode() for key, _ in tables.rows.cursor("producers")}


def pending(engine: xl.Engine) -> int:
    """The rows of names that have ended."""
    with engine.ledger.read() as tables:
        return sum(key.startswith(b"ended") for key, _ in tables.rows.cursor("meta"))


def use(topic: xl.Topic, count: int, **options: Any) -> list[str]:
    """Producers that send a message each, one after the other."""
    used = []
    for _ in range(count):
        with topic.producer(**options) as producer:
            producer.send(b"one")
            used.append(producer.name)
    return used


def forget(engine: xl.Engine) -> None:
    """Let two checkpoints pass: one writes names, another one deletes those that have ended."""
    for _ in range(2):
        with engine.ledger.write_checkpointed():
            pass


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are forgotten as soon as they may be."""
    monkeypatch.setattr(forgetting, "KEPT", 0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them are kept."""
    monkeypatch.setattr(forgetting, "KEPT", 5)


# ---- names of producers ------------------------------------------------------------------


@pytest.mark.rule("G2")
@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_the_last_names_that_the_library_gave_are_kept(topic, mode, few) -> None:
    used = use(topic, 20, access_mode=mode)
    assert len(set(used)) == 20
    forget(topic.engine)
    assert names(topic.engine) == {*used[-forgetting.KEPT :]}
    assert pending(topic.engine) == forgetting.KEPT


@pytest.mark.rule("G2")
def test_a_checkpoint_does_not_write_a_forgotten_name_again(topic, soon) -> None:
    engine = topic.engine
    for _ in range(8):
        use(topic, 4)  # their messages are still in the journal when they close
        engine.ledger.checkpoint()
    forget(engine)
    assert (names(engine), pending(engine)) == (set(), 0)


@pytest.mark.rule("G2")
def test_a_name_of_the_caller_stays_with_its_last_sequence_id(topic, soon) -> None:
    for _ in range(3):
        use(topic, 1, name="mine")
        use(topic, 3)
    topic.engine.ledger.checkpoint()
    with topic.producer(name="mine") as producer:
        assert producer.last_sequence_id == 2
    assert "mine" in names(topic.engine)


@pytest.mark.rule("G2")
def test_a_given_name_that_a_caller_takes_is_his_from_then_on(topic, monkeypatch) -> None:
    (name,) = use(topic, 1)
    with topic.producer(name=name) as producer:
        assert producer.last_sequence_id == 0
        producer.send(b"two")
    monkeypatch.setattr(forgetting, "KEPT", 0)
    use(topic, 3)
    forget(topic.engine)
    assert names(topic.engine) == {name}
    with topic.producer(name=name) as producer:
        assert producer.last_sequence_id == 1


@pytest.mark.rule("G2", "D9")
def test_a_given_name_that_a_caller_waits_for_is_his_too(topic, soon) -> None:
    with topic.producer("exclusive") as first:
        first.send(b"one")
        waiting = topic.producer_async("wait_for_exclusive", name=first.name)
    with waiting.result() as second:
        assert (second.name, second.last_sequence_id) == (first.name, 0)
    use(topic, 3)
    forget(topic.engine)
    assert names(topic.engine) == {first.name}


@pytest.mark.rule("G2")
def test_a_caller_who_imitates_a_given_name_keeps_it(topic, soon) -> None:
    number = int(use(topic, 1)[0].rpartition("-")[2])
    imitated = [f"{topic.engine.name}-{number + ahead}" for ahead in range(1, 8)]
    for name in imitated:
        use(topic, 1, name=name)
    given = use(topic, 8)
    forget(topic.engine)
    assert not set(given) & set(imitated)
    assert names(topic.engine) == {*imitated}


@pytest.mark.rule("A2")
def test_waiters_that_give_up_leave_no_names(topic, soon) -> None:
    with topic.producer("exclusive", name="mine") as owner:
        for _ in range(10):
            owner.send(b"so that the journal is not empty")
            with pytest.raises(xl.WaitTimeoutError):
                topic.producer("wait_for_exclusive", timeout=0.001)
    forget(topic.engine)
    assert (names(topic.engine), pending(topic.engine)) == ({"mine"}, 0)


def open_many(state: State, count: int) -> int:
    producers = state.kept["producers"] = [state.topic.producer() for _ in range(count)]
    for producer in producers:
        producer.send(b"one")
    return os.getpid()


@pytest.mark.rule("C2", "G2")
def test_an_opening_removes_what_dead_processes_had_open(path, worker) -> None:
    process = worker("dies")
    process.call(open_many, 40)
    process.kill()
    with xl.open(path) as engine:
        assert rows(engine)["holders"] == rows(engine)["engines"] == []
        forget(engine)
        assert len(names(engine)) == forgetting.KEPT
        assert engine.topic("orders").stats().holders == 0


@pytest.mark.rule("G2")
def test_an_opening_forgets_what_a_process_has_left(path, monkeypatch) -> None:
    with xl.open(path) as engine:
        monkeypatch.setattr(forgetting, "KEPT", 100)
        use(engine.topic("orders"), 40)
        monkeypatch.undo()
    with xl.open(path) as engine:
        assert len(names(engine)) == forgetting.KEPT


@pytest.mark.rule("E2", "G2")
@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_a_producer_that_is_handed_over_goes_on_with_its_sequence_ids(path, mode, soon) -> None:
    """Its name is free from the release until the destination takes it."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        producer = a.topic("orders").producer(mode)
        producer.send(b"one")
        for there in (b, a, b):
            assert producer.move(to=there.id).ok
            forget(a)
            producer.send(b"more")
        sent = list(a.topic("orders").reader())
        assert [message.sequence_id for message in sent] == [0, 1, 2, 3]
        assert {message.producer_name for message in sent} == {producer.name}
        producer.close()
        forget(a)
        assert (names(a), pending(a)) == (set(), 0)


# ---- names of topics ---------------------------------------------------------------------


def topic_rows(engine: xl.Engine) -> int:
    """The rows of topics, also of deleted ones."""
    return sum(not name.startswith("__") for name in row_names(engine))


def row_names(engine: xl.Engine) -> list[str]:
    with engine.ledger.read() as tables:
        return [_core.TopicRow.unpack(data).name for _, data in tables.rows.cursor("topics")]


def listed(engine: xl.Engine) -> list[str]:
    """The names that a listing reads."""
    with engine.ledger.read() as tables:
        return [name for name, _ in tables.topics.all() if not name.startswith("__")]


def delete_again_and_again(engine: xl.Engine, names: list[str]) -> None:
    for name in names:
        with engine.topic(name).producer("exclusive") as producer:
            producer.send(b"one")
        engine.delete_topic(name)


@pytest.mark.rule("B1", "G8")
def test_no_listing_reads_the_names_of_deleted_topics(engine) -> None:
    delete_again_and_again(engine, [f"job {number}" for number in range(8)])
    engine.topic("lives")
    assert listed(engine) == engine.topics() == ["lives"]
    assert engine.stats().topics == 1
    for number in range(8):  # but their epochs are known
        with engine.topic(f"job {number}").producer("exclusive") as producer:
            assert producer.topic_epoch == 2
    assert len(listed(engine)) == 9


@pytest.mark.rule("B1", "G8")
def test_a_topic_that_is_made_again_and_again_leaves_few_rows(engine, few) -> None:
    handles = []
    for _ in range(12):
        handles.append(engine.topic("orders"))
        delete_again_and_again(engine, ["orders"])
    last = engine.topic("orders")
    forget(engine)
    assert topic_rows(engine) <= 1 + forgetting.KEPT
    for handle in handles:  # forgotten or not
        with pytest.raises(xl.TopicNotFoundError, match="was deleted"):
            handle.producer()
        with pytest.raises(xl.TopicNotFoundError, match="was deleted"):
            list(handle.reader())
    assert last.epoch == 12
    with last.producer("exclusive") as producer:
        assert producer.topic_epoch == 13
    assert engine.verify().problems == ()


@pytest.mark.rule("H2")
def test_an_opening_lists_the_topics_of_a_version_without_the_list(path) -> None:
    with xl.open(path) as engine:
        delete_again_and_again(engine, ["gone", "again"])
        engine.topic("again")
        with engine.ledger.write_exclusive() as tables:
            for key in [key for key, _ in tables.rows.cursor("meta") if b"listed" in key]:
                tables.rows.delete("meta", key)
            assert not tables.topics.list.is_complete
        assert engine.topics() == ["again"]  # all names are read
        engine.topic("new")
        assert engine.topics() == ["again", "new"]
    with xl.open(path) as engine, engine.ledger.read() as tables:
        assert tables.topics.list.is_complete
        assert listed(engine) == ["again", "new"]


def test_a_list_that_another_version_has_left_behind_is_not_believed(path) -> None:
    """It has deleted a topic, made one, and knows no list."""
    with xl.open(path) as engine:
        for name in ("a", "b"):
            engine.topic(name)
        engine.delete_topic("a")
        with engine.ledger.write_exclusive() as tables:
            row = _core.TopicRow()
            row.id, row.name = tables.rows.next_id(b"topic"), "c"
            tables.topics.put(row)
            tables.rows.put("names", b"c", row.id.to_bytes(8, "big"))
            gone = tables.topics.find("b")
            gone.flags |= _core.DELETED
            tables.topics.put(gone)
        assert engine.topics() == ["c"]
    with xl.open(path) as engine:
        assert listed(engine) == engine.topics() == ["c"]


# ---- claims ------------------------------------------------------------------------------


@pytest.mark.rule("F2", "F4")
def test_generation_0_removes_what_is_known_of_a_resource(engine) -> None:
    for resource in ("a", "b"):
        engine.own("group", {resource: None}).release()
    assert len(rows(engine)["claims"]) == 2  # the last generations must be known
    engine.own("group", {"a": 0}).release()
    ((key, _),) = rows(engine)["claims"]
    assert key.endswith(b"b")
    with engine.own("group", {"a": None, "b": None}) as claim:
        assert claim.generations == {"a": 1, "b": 2}


# ---- all of it, for a long time ----------------------------------------------------------


def use_topic_and_end(engine: xl.Engine, name: str) -> None:
    """What leaves rows of its own: shared and exclusive producers, a waiter that gives up, a move,
    a group, a claim; and the end of the topic."""
    topic = engine.topic(name)
    use(topic, 5)
    with topic.producer("exclusive") as owner:
        owner.send(b"one")
        with pytest.raises(xl.WaitTimeoutError):
            topic.producer("wait_for_exclusive", timeout=0.001)
    with topic.reader(group="readers") as reader:
        reader.read_next()
        reader.commit()  # the end of the topic is that of its position
    engine.own("group", {name: None}).release()
    if name.endswith("again"):
        engine.own("group", {name: 0}).release()
    engine.delete_topic(name)


def use_group(topic: xl.Topic) -> None:
    with topic.reader(group="readers") as reader:
        reader.commit()
    assert topic.engine.delete_group("readers") == 1


def open_and_die(state: State, number: int) -> None:
    open_many(state, 20)
    state.kept["owner"] = state.engine.topic(f"owned {number}").producer("exclusive")
    state.kept["claim"] = state.engine.own("group", {"of the dead": None})


def kept(engine: xl.Engine) -> dict[str, tuple[int, int]]:
    """How many rows each table has, and their bytes; without messages."""
    with engine.ledger.read() as tables:
        found = {name: list(tables.rows.cursor(name)) for name in NAMES if name != "entries"}
    return {
        name: (len(there), sum(len(key) + len(data) for key, data in there))
        for name, there in found.items()
    }


@pytest.mark.long
@pytest.mark.rule("B1", "F2", "G2")
def test_rounds_of_everything_leave_what_the_first_ones_have_left(path, worker) -> None:
    """Opens, closes, deaths, deletions, claims and groups, under the same names again and again."""
    seen = []
    for number in range(5):
        process = worker("dies")
        process.call(open_and_die, 0)
        process.kill()
        with xl.open(path, name="soak") as engine:
            for name in ("a", "b again"):
                for _ in range(4):
                    use_topic_and_end(engine, name)
            use_group(engine.topic("orders"))
            engine.own("group", {"of the dead": 0}).release()
            engine.topic("orders").trim(before=engine.topic("orders").next_offset)
            forget(engine)
            seen.append(kept(engine))
            assert engine.topic("a").epoch == 4 * (number + 1)
            engine.delete_topic("a")
            assert engine.topics() == ["orders", "owned 0"]
    # Numbers of ids and generations get no longer; names that have one get a digit more.
    for table, (count, size) in seen[-1].items():
        before, bytes_before = seen[2][table]
        assert count <= before, table
        assert size <= bytes_before + 2 * count, table


@pytest.mark.rule("B1", "F2")
def test_what_stays_of_new_names_is_as_small_as_the_page_says(engine) -> None:
    """As docs/operations.md says it, for each of them."""
    use_topic_and_end(engine, "job 1000")
    forget(engine)
    before = kept(engine)
    for number in range(1001, 1005):
        use_topic_and_end(engine, f"job {number}")
    engine.ledger.checkpoint()
    after = kept(engine)
    grown = {
        table: tuple(now - then for now, then in zip(after[table], before[table], strict=True))
        for table in before
        if table not in ("meta", "producers") and after[table] != before[table]
    }
    found = {table: count for table, (count, _) in grown.items()}
    assert found == {"names": 4, "topics": 4, "claims": 8}
    assert grown["names"][1] + grown["topics"][1] <= 4 * (200 + 2 * len("job 1000"))
    assert grown["claims"][1] <= 4 * (2 * 40 + len("groupreaders") + 2 * len("job 1000"))


# ---- beside damage, roles and reads ------------------------------------------------------


def test_a_role_is_listed_although_a_topic_that_it_bound_is_forgotten(engine, soon) -> None:
    engine.topic("bound")
    engine.role("r", topics=["bound"]).close()
    delete_again_and_again(engine, ["bound", "bound"])
    use(engine.topic("t"), 2)
    forget(engine)
    assert [(info.name, info.topics) for info in engine.roles()] == [("r", ())]


@pytest.mark.rule("G9")
@pytest.mark.parametrize("row", ["ended", "last ended", "names", "topics"])
def test_g9_a_damaged_row_of_what_has_ended_stops_no_checkpoint(engine, monkeypatch, row) -> None:
    producer = engine.topic("alive").producer("exclusive", name="p")
    deleted = engine.topic("t").id
    delete_again_and_again(engine, ["t", "t"])
    use(engine.topic("t"), 2)
    with engine.ledger.write_exclusive() as tables:
        notes = [key for key, _ in tables.rows.cursor("meta") if key.startswith(ENDED)]
        old = U64.pack(deleted)
        table, key = {
            "ended": ("meta", notes[0]),
            "last ended": ("meta", LAST_ENDED),
            "names": ("names", b"t"),
            "topics": ("topics", old),
        }[row]
        assert tables.rows.get(table, key) is not None
        tables.rows.put(table, key, b"abc")
    monkeypatch.setattr(forgetting, "KEPT", 0)
    forget(engine)
    assert producer.send(b"x") == 0
    engine.ledger.checkpoint()
    with engine.transaction() as txn:
        producer.send(b"y", transaction=txn)


def test_a_topic_that_is_forgotten_under_verify_is_no_damage(engine, soon) -> None:
    topic = engine.topic("t")
    delete_again_and_again(engine, ["t", "t"])
    engine.topic("t")
    forget(engine)
    with pytest.raises(xl.TopicNotFoundError):
        topic.stats()
    assert reading._verify_one(engine.ledger, topic.id, False) is None


@pytest.mark.rule("C2")
def test_c2_a_damaged_row_keeps_an_opening_from_nothing_else(path, worker, soon) -> None:
    """Of what dead processes had open, one row is damaged: all others are evicted."""
    dead, other = worker(name="dead"), worker(name="other")
    for process in dead, other:
        process.call(open_many, 3)
    with xl.open(path) as engine:
        with engine.ledger.write_exclusive() as tables:
            key, _ = next(iter(tables.rows.cursor("holders")))
            tables.rows.put("holders", key, b"abc")
        use(engine.topic("other"), 2)
    for process in dead, other:
        process.kill()
    with xl.open(path) as engine:
        assert rows(engine)["holders"] == [(key, b"abc")]
