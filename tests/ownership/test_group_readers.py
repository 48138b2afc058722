"""A group's reader with a generation, and one reader of a group on several topics (rule F6)."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local.ownership.claims import Claims
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    Worker,
    forked,
    hang,
    open_producer,
    rows,
    send,
    until,
    values,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

FENCED = xl.ReaderFencedError
NAMES = ("a", "b", "c")


@pytest.fixture
def filled(engine: xl.Engine) -> xl.Engine:
    """Topics a, b and c with 10 messages each: a0, a1, ..."""
    for name in NAMES:
        with engine.topic(name).producer() as producer:
            producer.send_many([b"%s%d" % (name.encode(), number) for number in range(10)])
    return engine


def offsets(found: list[tuple[str, xl.Message]]) -> dict[str, list[int]]:
    """{topic: offsets in the order in which they came}."""
    return {name: [m.offset for topic, m in found if topic == name] for name in NAMES}


def open_reader(state: State, names: tuple[str, ...], **options: Any) -> dict[str, int]:
    state.kept["reader"] = state.engine.reader(names, **options)
    return dict(state.kept["reader"].positions)


def read(state: State, count: int) -> list[tuple[str, bytes]]:
    return [(name, m.value) for name, m in state.kept["reader"].read_batch(count)]


def read_next(state: State, timeout: float) -> tuple[str, bytes]:
    name, message = state.kept["reader"].read_next(timeout)
    return name, message.value


def commit(state: State) -> None:
    state.kept["reader"].commit()


def begin(state: State, value: bytes) -> None:
    """A transaction with the reader's cursors and a message, up to its commit."""
    state.producer = state.topic.producer()
    txn = state.kept["txn"] = state.engine.transaction()
    state.producer.send(value, transaction=txn)
    txn.commit_cursor(state.kept["reader"])


def commit_txn(state: State) -> None:
    state.kept["txn"].commit()


# ---- generations -------------------------------------------------------------------------


def test_a_name_that_no_topic_has_makes_none(engine) -> None:
    """And is answered with names like it."""
    for name in ("orders", "order-lines", "bills"):
        engine.topic(name)
    for call in (
        lambda: engine.reader(["bills", "order"], group="g"),
        lambda: engine.topic("order", create=False),
    ):
        with pytest.raises(xl.TopicNotFoundError, match="no topic 'order'; did you mean 'orders'"):
            call()
    with pytest.raises(xl.TopicNotFoundError, match=r"has no topic 'zzz'$"):
        engine.topic("zzz", create=False)
    assert engine.topics() == ["bills", "order-lines", "orders"]
    assert engine.claims() == []


def test_a_ledger_without_topics_says_so(path) -> None:
    with xl.open(path) as engine, pytest.raises(xl.TopicNotFoundError, match="has no topics yet"):
        engine.topic("orders", create=False)


def test_f6_a_reader_s_generation_counts_as_that_of_a_claim(topic: xl.Topic) -> None:
    engine = topic.engine
    first = topic.reader(group="g")
    assert first.generation == 1
    fifth = topic.reader(group="g", generation=5)
    assert fifth.generation == 5
    with pytest.raises(FENCED):
        first.read_next(0)
    for lower in (1, 4):
        with pytest.raises(xl.OwnershipError, match="generation 5") as caught:
            topic.reader(group="g", generation=lower)
        assert caught.value.retriable
        with pytest.raises(xl.OwnershipError):
            engine.reader(["orders"], group="g", generation=lower)
    fifth.commit()  # the refused calls have fenced no reader
    equal = topic.reader(group="g", generation=5)
    with pytest.raises(FENCED):
        fifth.commit()
    equal.close()
    with pytest.raises(xl.OwnershipError, match="out of date") as caught:
        topic.reader(group="g", generation=4)  # also if the group has no reader
    assert not caught.value.retriable
    following = topic.reader(group="g")
    assert following.generation == 6
    zero = topic.reader(group="g", generation=0)
    assert zero.generation == 0
    with pytest.raises(FENCED):
        following.commit()
    assert topic.reader(group="g").generation == 1
    assert topic.reader(group="h").generation == 1
    assert topic.reader().generation is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"generation": 1}, ValueError),
        ({"group": "g", "generation": -1}, ValueError),
        ({"group": "g", "generation": 2**63}, ValueError),
        ({"group": "g", "generation": "1"}, TypeError),
        ({"group": "g", "generation": True}, TypeError),
    ],
)
def test_f6_wrong_generations_say_what_is_taken(
    topic: xl.Topic, options: dict[str, Any], error: type[Exception]
) -> None:
    kept = topic.reader(group="g")
    with pytest.raises(error, match=r"takes|needs"):
        topic.reader(**options)
    kept.commit()


def test_f6_a_generation_decides_between_processes(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    other = worker()
    other.call(open_reader, ("orders",), group="g", generation=7)
    with pytest.raises(xl.OwnershipError, match="worker"):
        topic.reader(group="g", generation=6)
    other.signal(signal.SIGKILL)
    with pytest.raises(xl.OwnershipError, match="out of date"):
        until(lambda: len(topic.engine.engines()) == 1) and topic.reader(group="g", generation=6)
    assert topic.reader(group="g", generation=7).generation == 7


# ---- several topics: reading -------------------------------------------------------------


def test_f6_several_topics_in_turns_and_each_in_order(filled: xl.Engine) -> None:
    reader = filled.reader(NAMES, group="g")
    assert (reader.group, reader.topics) == ("g", list(NAMES))
    assert reader.generations == dict.fromkeys(NAMES, 1)
    found = [reader.read_next(0) for _ in range(4)]
    got = [(name, m.value) for name, m in found]
    assert got == [("a", b"a0"), ("b", b"b0"), ("c", b"c0"), ("a", b"a1")]
    assert reader.positions == {"a": 2, "b": 1, "c": 1}
    found += reader.read_batch(5)
    assert sum(reader.positions.values()) == 9
    for pair in reader:
        found.append(pair)
        assert sum(reader.positions.values()) == len(found)  # what was handed out, and no more
    assert offsets(found) == {name: list(range(10)) for name in NAMES}
    assert not reader.has_message_available()
    assert reader.read_batch(5) == list(reader) == list(reader.follow(timeout=0)) == []
    with pytest.raises(xl.WaitTimeoutError, match="a, b, c"):
        reader.read_next(timeout=0.01)


def test_f6_an_iteration_ends_at_the_ends_as_they_were(filled: xl.Engine) -> None:
    reader = filled.reader(list("ab"), group="g")
    producers = [filled.topic(name).producer() for name in "ab"]
    count = 0
    for _ in reader:
        count += 1
        for producer in producers:
            producer.send(b"more")
    assert count == 20
    assert reader.has_message_available()


def test_f6_topics_of_different_lengths(engine: xl.Engine) -> None:
    sizes = {"a": 0, "b": 1000, "c": 3}
    for name, size in sizes.items():
        with engine.topic(name).producer() as producer:
            producer.send_many([b"x"] * size)
    for walk in (list, lambda r: r.read_batch(5000), lambda r: list(r.follow(timeout=0))):
        with engine.reader(NAMES, group="g") as reader:
            found = offsets(walk(reader))
            assert found == {name: list(range(size)) for name, size in sizes.items()}


def test_f6_seeking_on_one_topic_or_on_all(filled: xl.Engine) -> None:
    reader = filled.reader(list("ab"), group="g", start="latest")
    assert reader.positions == {"a": 10, "b": 10}
    reader.seek(4, topic="b", inclusive=False)
    assert reader.positions == {"a": 10, "b": 5}
    reader.seek("earliest")
    assert reader.positions == {"a": 0, "b": 0}
    with pytest.raises(xl.TopicNotFoundError, match="a, b"):
        reader.seek(1, topic="c")


@pytest.mark.parametrize(
    ("topics", "options", "error"),
    [
        ("a", {}, TypeError),
        ([], {}, ValueError),
        (["a", "none"], {}, xl.TopicNotFoundError),
        (["a", "b"], {"group": ""}, ValueError),
        (["a", "b"], {"group": None}, TypeError),
        (["a", "b"], {"start": "beginning"}, ValueError),
        (["a", "b"], {"generation": -1}, ValueError),
        (["a", 7], {}, TypeError),
        (["a", "b"], {"trimmed": "?"}, ValueError),
    ],
)
def test_f6_a_request_for_several_topics_that_is_refused_fences_no_other(
    filled: xl.Engine, topics: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    kept = filled.reader(NAMES, group="g")
    filled.ledger.checkpoint()  # else one may come between
    before = rows(filled)
    with pytest.raises(error):
        filled.reader(topics, **{"group": "g", **options})
    assert rows(filled) == before
    kept.commit()


def test_f6_it_has_options_as_any_reader(engine: xl.Engine) -> None:
    for name in "ab":
        with engine.topic(name).producer(serializer="json") as producer:
            producer.send_many([{"n": n} for n in range(4)], keys=["k"] * 4)
        engine.topic(name).compact()
        engine.topic(name).trim(before=2)
    with pytest.raises(xl.OffsetTrimmedError):
        engine.reader(list("ab"), group="g", start=0).read_next(0)
    with engine.reader(
        list("ab"), group="g", start=0, trimmed="earliest", deserializer="json"
    ) as reader:
        assert [m.value["n"] for _, m in reader] == [2, 2, 3, 3]
    with engine.reader(list("ab"), group="g", read_compacted=True, deserializer="json") as reader:
        assert [m.offset for _, m in reader] == [3, 3]
    with engine.reader(["a", "b", "a"], group="g") as reader:
        assert reader.topics == ["a", "b"]


# ---- several topics: waiting -------------------------------------------------------------


@pytest.mark.long
def test_g5_it_waits_for_all_of_its_topics_without_polling(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    """Whichever gets a message, also from another process; and the wait costs no CPU."""
    names = [f"t{number}" for number in range(20)]
    for name in names:
        engine.topic(name)
    reader = engine.reader(names, group="g")
    writers = {name: worker(topic=name) for name in (names[0], names[13])}
    for writer in writers.values():
        writer.call(open_producer, "shared")
    with ThreadPoolExecutor(1) as pool:
        for turn in range(4):
            for name, writer in writers.items():
                waiting = pool.submit(reader.read_next, PATIENCE)
                spent, began = time.process_time(), time.monotonic()
                with pytest.raises(TimeoutError):
                    waiting.result(0.2)
                idle = time.process_time() - spent
                assert idle < 0.6 * (time.monotonic() - began)
                writer.call(send, b"%d" % turn)
                found, message = waiting.result(PATIENCE)
                assert (found, message.value) == (name, b"%d" % turn)


def test_f6_a_wait_ends_when_it_is_fenced_or_closed(filled: xl.Engine, path: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        reader = filled.reader(NAMES, group="g", start="latest")
        waiting = pool.submit(reader.read_next, PATIENCE)
        with xl.open(path, name="rival") as rival:
            rival.topic("b").reader(group="g")
            with pytest.raises(FENCED, match="'rival'"):
                waiting.result(PATIENCE)
        other = filled.reader(list("ab"), group="g", start="latest")
        waiting = pool.submit(other.read_next, PATIENCE)
        time.sleep(0.05)
        other.close()
        with pytest.raises(xl.EngineClosedError):
            waiting.result(PATIENCE)
        claimed = filled.reader(list("ab"), group="g", start="latest")
        waiting = pool.submit(claimed.read_next, PATIENCE)
        time.sleep(0.05)
        filled.own("g", {"a": None})
        with pytest.raises(FENCED):
            waiting.result(PATIENCE)


def test_g8_it_ends_where_all_topics_are_terminated(filled: xl.Engine) -> None:
    reader = filled.reader(list("ab"), group="g")
    filled.topic("a").terminate()
    reader.read_batch(20)
    with pytest.raises(xl.WaitTimeoutError):
        reader.read_next(0.01)
    filled.topic("b").terminate()
    with pytest.raises(xl.TopicTerminatedError):
        reader.read_next(PATIENCE)
    assert list(reader.follow()) == []


def test_f6_more_topics_than_the_kernel_waits_for_at_once(engine: xl.Engine) -> None:
    names = [f"t{number:03}" for number in range(140)]
    for name in names:
        engine.topic(name)
    reader = engine.reader(names, group="g")
    with ThreadPoolExecutor(1) as pool:
        for name in (names[0], names[-1]):
            waiting = pool.submit(reader.read_next, PATIENCE)
            engine.topic(name).producer().send(b"x")
            assert waiting.result(PATIENCE)[0] == name


# ---- several topics: one claim, one commit -----------------------------------------------

USES: dict[str, Callable[[xl.GroupReader], Any]] = {
    "read_next": lambda reader: reader.read_next(0),
    "read_batch": lambda reader: reader.read_batch(10),
    "iteration": list,
    "follow": lambda reader: next(reader.follow()),
    "has_message_available": lambda reader: reader.has_message_available(),
    "seek": lambda reader: reader.seek("earliest"),
    "commit": lambda reader: reader.commit(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_f6_a_reader_on_one_of_the_topics_fences_it_on_all(
    filled: xl.Engine, path: str, use: Callable[[xl.GroupReader], Any]
) -> None:
    """And the other way round; for ever, and also where the messages have been read ahead."""
    reader = filled.reader(NAMES, group="g")
    reader.read_batch(5)
    other_group = filled.reader(NAMES, group="h")
    with xl.open(path, name="rival") as rival:
        second = rival.topic("b").reader(group="g")
        with pytest.raises(FENCED, match=r"group 'g'.*'rival'"):
            use(reader)
        third = rival.reader(list("cb"), group="g")
        with pytest.raises(FENCED):
            second.commit()
        third.close()
        with pytest.raises(FENCED):
            use(reader)
    reader.close()
    use(other_group)
    assert rows(filled)["cursors"] == [] or use is USES["commit"]
    other_group.close()
    with pytest.raises(xl.EngineClosedError):
        use(other_group)


def test_f6_its_claim_is_one(filled: xl.Engine) -> None:
    """`own` on one topic takes all from it; closing leaves nothing behind."""
    reader = filled.reader(NAMES, group="g", generation=3)
    (info,) = filled.claims()
    assert (info.generations, info.reader) == (dict.fromkeys(NAMES, 3), True)
    with pytest.raises(xl.OwnershipError):
        filled.own("g", {"b": 2})
    filled.own("g", {"b": 3})
    with pytest.raises(FENCED):
        reader.read_next(0)
    assert [claim.generations for claim in filled.claims()] == [{"b": 3}]
    filled.topic("a").reader(group="g", generation=3).close()
    with filled.reader(NAMES, group="h"):
        assert len(filled.claims("h")) == 1
    assert filled.claims("h") == []


def test_f6_a_commit_is_all_positions_or_none(
    filled: xl.Engine, worker: Callable[..., Worker]
) -> None:
    reader = filled.reader(NAMES, group="g")
    reader.read_batch(4)
    reader.commit()
    second = filled.reader(NAMES, group="g")
    assert second.positions == {"a": 2, "b": 1, "c": 1}
    with pytest.raises(FENCED):
        reader.commit()
    second.read_batch(3)
    filled.delete_topic("c")
    with pytest.raises(xl.TopicNotFoundError, match="'c'"):
        second.commit()
    assert filled.topic("a").reader(group="g").position == 2  # not a third of it
    other = worker()
    assert other.call(open_reader, ("a", "b"), group="g") == {"a": 2, "b": 1}
    other.call(read, 2)
    other.call(commit)
    other.kill()
    assert filled.reader(list("ba"), group="g").positions == {"b": 2, "a": 3}


def test_f6_its_cursors_are_part_of_a_transaction(filled: xl.Engine, topic: xl.Topic) -> None:
    reader = filled.reader(NAMES, group="g")
    with topic.producer() as producer:
        found = reader.read_batch(7)
        txn = filled.transaction()
        producer.send_many([m.value for _, m in found], transaction=txn)
        txn.commit_cursor(reader)
        reader.read_batch(3)  # the positions are as they were then
        txn.commit()
        assert values(topic) == [m.value for _, m in found]
        with filled.reader(NAMES, group="g") as second:
            assert second.positions == {"a": 3, "b": 2, "c": 2}
            txn = filled.transaction()
            producer.send(b"stale", transaction=txn)
            txn.commit_cursor(reader)
            with pytest.raises(FENCED):
                txn.commit()
        assert topic.next_offset == 7
    with pytest.raises(ValueError, match="ledger"):
        with xl.open(f"{filled.path}-other") as other, other.transaction() as txn:
            txn.commit_cursor(reader)


def test_f6_a_group_reader_that_is_stopped_in_a_transaction_commits_nothing(
    filled: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    other = worker()
    other.call(open_reader, NAMES, group="g")
    other.call(read, 5)
    other.call(begin, b"stale")
    hang(other)
    mine = filled.topic("c").reader(group="g")
    other.signal(signal.SIGCONT)
    with pytest.raises(Failed) as caught:
        other.call(commit_txn)
    assert caught.value.kind == "ReaderFencedError"
    with pytest.raises(Failed, match="ReaderFencedError"):
        other.call(read_next, 0)
    assert (values(topic), mine.position, rows(filled)["cursors"]) == ([], 0, [])


def copy(state: State, seed: int) -> int:
    """Consume, process, produce: until all has been copied, or this reader is fenced. How many
    transactions were committed."""
    dice, done = random.Random(seed), 0
    producer = state.topic.producer()
    while True:
        try:
            with state.engine.reader(NAMES, group="g") as reader:
                while True:
                    found = reader.read_batch(dice.randint(1, 3))
                    if not found:
                        return done
                    with state.engine.transaction() as txn:
                        producer.send_many([m.value for _, m in found], transaction=txn)
                        txn.commit_cursor(reader)
                    done += 1
                    if dice.random() < 0.05:
                        break
        except FENCED:
            continue


@pytest.mark.long
def test_f6_exactly_once_over_several_topics_by_readers_that_die(
    filled: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Processes that fence each other, and of which one is killed at any moment, copy each message
    once, those of a topic in order."""
    for name in NAMES:
        with filled.topic(name).producer() as producer:
            producer.send_many([b"%s%d" % (name.encode(), n) for n in range(10, 100)])
    for round_ in range(3):
        killed = worker(name=f"killed{round_}")
        killed.start(copy, round_)
        had = topic.next_offset
        until(lambda had=had: topic.next_offset > min(had + 5, 299))  # it may be faster than this
        killed.kill()
        filled.verify()
    copiers = [worker(name=f"w{number}") for number in range(2)]
    for seed, copier in enumerate(copiers):
        copier.start(copy, seed)
    for copier in copiers:
        copier.answer(PATIENCE * 2)
    found = values(topic)
    for name in NAMES:
        mine = [value for value in found if value.startswith(name.encode())]
        assert mine == [b"%s%d" % (name.encode(), number) for number in range(100)]
    assert len(found) == 300


# ---- several topics: the rest ------------------------------------------------------------


def test_f6_groups_are_listed(filled: xl.Engine, path: str) -> None:
    reader = filled.reader(list("ab"), group="g")
    reader.read_batch(3)
    reader.commit()
    with filled.topic("c").reader(group="h") as gone:
        gone.read_batch(4)
        gone.commit()
    waits = filled.topic("a").reader(group="i")
    filled.own("j", {"a": None})  # a claim on a resource of that name is no reader
    with xl.open(path, readonly=True) as onlooker:
        listed = onlooker.groups()
    found = [(g.group, g.topic, g.position, g.lag) for g in listed]
    assert found == [("g", "a", 2, 8), ("g", "b", 1, 9), ("h", "c", 4, 6), ("i", "a", None, None)]
    readers = [None if g.reader is None else g.reader.engine_id for g in listed]
    assert readers == [filled.id, filled.id, None, filled.id]
    waits.close()


def test_c5_a_forked_child_can_neither_read_nor_commit(filled: xl.Engine) -> None:
    reader = filled.reader(NAMES, group="g")
    for use in (USES["read_next"], USES["commit"]):
        with pytest.raises(Failed, match="EngineClosedError"):
            forked(lambda use=use: use(reader))
    forked(reader.close)
    assert len(reader.read_batch(5)) == 5
    reader.commit()


def test_f6_what_a_batch_has_taken_that_fails_is_read_again(
    filled: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = filled.reader(NAMES, group="g")
    take, calls = reader._take, iter(range(100))

    def fail() -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return take()

    with monkeypatch.context() as patch:
        patch.setattr(reader, "_take", fail)
        with pytest.raises(KeyboardInterrupt):
            reader.read_batch(10)
    assert reader.positions == dict.fromkeys(NAMES, 0)
    assert [m.value for _, m in reader.read_batch(3)] == [b"a0", b"b0", b"c0"]


@pytest.mark.long
def test_f6_threads_that_take_topics_from_each_other_do_not_jam(filled: xl.Engine) -> None:
    """Overlapping sets of topics: no two of a group's readers commit against each other."""
    stop, fenced, dice = time.monotonic() + 1.5, [], random.Random(7)

    def fight(names: str) -> None:
        rounds = 0
        while time.monotonic() < stop or rounds < 3:
            rounds += 1
            try:
                with filled.reader(list(names), group="g") as reader:
                    reader.read_batch(dice.randint(1, 4))
                    reader.commit()
            except FENCED:
                fenced.append(names)

    threads = [threading.Thread(target=fight, args=(n,), daemon=True) for n in ("ab", "bc", "ca")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert filled.claims() == []
    assert filled.verify().ok


def test_f6_a_release_that_failed_is_tried_again_when_the_engine_closes(
    filled: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the reader is closed, and is not any more when its engine is."""
    release, attempts = Claims.release, []

    def full_at_first(self: Claims, claimant: Any) -> bool:
        attempts.append(claimant.group)
        if len(attempts) == 1:
            raise xl.LedgerFullError("no room left")
        return release(self, claimant)

    with xl.open(path, name="other") as other:
        reader = other.topic("a").reader(group="g")
        monkeypatch.setattr(Claims, "release", full_at_first)
        with pytest.raises(xl.LedgerFullError):
            reader.close()
        assert [claim.group for claim in filled.claims()] == ["g"]
    assert attempts == ["g", "g"]
    released = [event.reason for event in filled.history(group="g") if event.kind == "release"]
    assert released == ["closed"]
