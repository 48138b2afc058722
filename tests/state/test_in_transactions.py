"""Maps and states that write in a transaction: with its other parts or not at all, computed from
the newest state or not at all (rules G3, G11, I8).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local import commits
from exclusivelog.state.joining import StateWriter
from exclusivelog.state.shared import Replica
from testing.interrupts import Interrupts, Limit
from testing.processes import PATIENCE, State, Worker, stop_outside, until, within
from testing.states import (
    call_map,
    everything,
    one_more,
    open_counts,
    open_map,
    opened_afresh,
    take_over,
)

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic) as shared:
        yield shared


@pytest.fixture
def second(engine: xl.Engine) -> Iterator[Map]:
    with xl.SharedMap(engine.topic("second")) as second:
        yield second


# ---- all of it or nothing ----------------------------------------------------------------


def test_g3_writes_of_maps_a_state_sends_and_positions_are_one_commit(
    engine: xl.Engine, topic: xl.Topic, shared: Map, second: Map
) -> None:
    """Nobody sees a part of it before the commit; afterwards everybody sees all of it."""
    with topic.engine.topic("in").producer() as source:
        source.send(b"order")
    with (
        open_counts(engine.topic("counts")) as counts,
        engine.topic("out").producer() as producer,
        engine.topic("in").reader(group="g") as reader,
    ):
        shared.put("a", 1)
        with engine.transaction() as txn:
            reader.read_next(0)
            assert shared.put("a", 2, transaction=txn) == 1
            assert second.put("b", 3, transaction=txn) is None
            assert counts.write(lambda now: [["n", 1]], transaction=txn) is None
            producer.send(b"bill", transaction=txn)
            txn.commit_cursor(reader)
            found = (shared.get("a", latest=True), second.get("b"), counts.read(dict))
            assert found == (1, None, {})
            assert engine.topic("second").next_offset == 0
        assert (shared.get("a"), second.get("b"), counts.read(dict)) == (2, 3, {"n": 1})
        assert txn.offsets == {producer: range(1)}  # not the maps' own producers
    assert opened_afresh(topic) == {"a": 2}
    with engine.topic("in").reader(group="g") as reader:
        assert not reader.has_message_available()


@pytest.mark.parametrize("large", [False, True], ids=["framed", "in tables"])
def test_g3_an_exception_in_the_block_leaves_nothing(
    engine: xl.Engine, topic: xl.Topic, shared: Map, second: Map, large: bool
) -> None:
    shared.put("a", 1)
    with contextlib.suppress(Limit), engine.transaction() as txn:
        shared.put("a", "x" * 300_000 if large else 2, transaction=txn)
        second.clear(transaction=txn)
        raise Limit
    assert (txn.state, everything(shared), topic.next_offset) == ("aborted", {"a": 1}, 1)
    assert shared.put("a", 3) == 1
    with engine.transaction() as txn:
        shared.put("a", "x" * 300_000 if large else 2, transaction=txn)
    assert opened_afresh(topic) == everything(shared) == {"a": "x" * 300_000 if large else 2}
    assert topic.epoch == 1  # the map has kept the topic


@pytest.mark.rule("I6")
def test_i6_watches_snapshots_and_the_past_take_it_for_ordinary_writes(
    engine: xl.Engine, topic: xl.Topic, shared: Map
) -> None:
    shared.put("a", 1)
    with shared.watch() as watch, engine.transaction() as txn:
        shared.put("b", 2, transaction=txn)
        shared.delete("a", transaction=txn)
        assert list(watch.follow(timeout=0)) == []
        txn.commit()
        assert list(watch.follow(timeout=0)) == [
            xl.MapChange("b", None, 2, 1),
            xl.MapChange("a", 1, None, 2),
        ]
    assert [shared.at(offset) for offset in (1, 2, 3)] == [{"a": 1}, {"a": 1, "b": 2}, {"b": 2}]
    assert shared.snapshot() == 3
    topic.trim(before=3)
    assert opened_afresh(topic) == {"b": 2}


def test_i4_a_snapshot_that_a_transaction_makes_due_is_taken(topic: xl.Topic) -> None:
    with xl.SharedMap(topic, snapshot_every=3) as shared:
        with topic.engine.transaction() as txn:
            for number in range(5):
                shared.put(str(number), number, transaction=txn)
        shared._snapshots.close()
    assert topic.trim(before=5) == 5


# ---- its own writes ----------------------------------------------------------------------

KEYS = ["a", "b", "c", "d"]


def any_call(dice: random.Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A write of a map, at random."""
    key, value, other = dice.choice(KEYS), dice.randrange(3), dice.randrange(3)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("put", (key, value)),
        ("put_if_absent", (key, value)),
        ("replace", (key, other, value)),
        ("update", (key, one_more)),
        ("update", ({key: value, "d": other},)),
        ("delete", (key,)),
        ("update_multiple", (lambda k: k < key, lambda k, v: v + 1 if v != other else None)),
        ("put_all", ({key: value, dice.choice(KEYS): None},)),
        ("setdefault", (key, value)),
        ("pop", (key, None)),
        ("popitem", ()),
        ("clear", ()),
    ]
    return (*dice.choice(calls), {})


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except KeyError:
        return KeyError


@pytest.mark.parametrize("seed", range(8))
def test_i8_a_write_sees_what_the_transaction_has_written_before(
    engine: xl.Engine, shared: Map, second: Map, seed: int
) -> None:
    """As a map does that makes the same writes one by one: results, keys and their order."""
    dice = random.Random(seed)
    for _ in range(15):
        with engine.transaction() as txn:
            for _ in range(dice.randrange(1, 8)):
                name, args, options = any_call(dice)
                plain = outcome(lambda: getattr(second, name)(*args, **options))  # noqa: B023
                joined = outcome(
                    lambda: getattr(shared, name)(*args, **options, transaction=txn)  # noqa: B023
                )
                assert joined == plain, name
        assert list(shared.items()) == list(second.items())
    assert opened_afresh(shared.topic) == everything(shared)


def test_i8_a_state_sees_what_the_transaction_has_written_before(engine: xl.Engine) -> None:
    with open_counts(engine.topic("counts")) as counts:
        counts.write(lambda now: [["n", 1]])
        with engine.transaction() as txn:
            doubled = counts.write(lambda now: [["n", now["n"]]], dict, transaction=txn)
            again = counts.write(lambda now: [["n", now["n"]]], dict, transaction=txn)
            assert (doubled, again, counts.read(dict)) == ({"n": 2}, {"n": 4}, {"n": 1})
        assert counts.read(dict) == {"n": 4}


def test_i3_an_operation_that_cannot_be_applied_aborts_before_it_is_in_the_log(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with open_counts(topic) as counts:
        txn = engine.transaction()
        with pytest.raises(xl.StateError, match="nothing was written"):
            counts.write(lambda now: [["n", "one"], ["n", 1]], dict, transaction=txn)
        assert (txn.state, topic.next_offset) == ("aborted", 0)
        counts.write(lambda now: [["n", 1]])
        assert counts.read(dict) == {"n": 1}


def test_i3_an_operation_that_cannot_be_applied_after_the_commit_is_told_as_for_a_plain_write(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """A single write is not applied before."""
    with open_counts(topic) as counts:
        txn = engine.transaction()
        counts.write(lambda now: [["n", "one"]], transaction=txn)
        with pytest.raises(xl.StateError, match="could not be applied") as caught:
            txn.commit()
        assert caught.value.maybe_written
        assert (txn.state, topic.next_offset) == ("committed", 1)


@pytest.mark.rule("G11")
def test_g11_an_interrupt_in_the_applier_leaves_no_half_of_an_operation(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """The transaction may go on: its next write sees each operation once."""
    interrupts = [KeyboardInterrupt()]

    def apply(state: dict[str, int], op: int) -> None:
        state["n"] = state.get("n", 0) + op
        if interrupts:
            raise interrupts.pop()

    with xl.SharedState(topic, initial=dict, apply=apply) as counts:
        with engine.transaction() as txn:
            counts.write(lambda now: [7], transaction=txn)
            with pytest.raises(KeyboardInterrupt):
                counts.write(lambda now: [now["n"]], transaction=txn)
            assert counts.write(lambda now: [now["n"]], dict, transaction=txn) == {"n": 14}
        assert counts.read(dict) == {"n": 14}


@pytest.mark.rule("G11")
@pytest.mark.parametrize("copy", [None, lambda state: state], ids=["none", "same"])
def test_g11_a_transaction_s_own_state_is_another_object_without_copies_for_functions(
    engine: xl.Engine, topic: xl.Topic, copy: Any
) -> None:
    """Of a class that has no view, and that the applier changes in place."""

    def apply(state: collections.Counter[str], op: int) -> None:
        state["n"] += op

    with xl.SharedState(topic, collections.Counter, apply, copy=copy) as counts:
        for ends, expected in (("abort", 0), ("commit", 3)):
            txn = engine.transaction()
            counts.write(lambda now: [1], transaction=txn)
            assert counts.write(lambda now: [2], lambda now: now["n"], transaction=txn) == 3
            assert counts.read(lambda now: now["n"]) == 0
            getattr(txn, ends)()
            assert counts.read(lambda now: now["n"]) == expected


@pytest.mark.rule("G11")
def test_g11_a_transaction_that_is_dropped_has_aborted_at_once(
    engine: xl.Engine, shared: Map
) -> None:
    engine.topic("in").producer().send(b"a")
    with engine.topic("in").reader(group="g") as reader:
        txn = engine.transaction()
        reader.read_next(0)
        txn.commit_cursor(reader)
        shared.put("a", 1, transaction=txn)
        gone = weakref.ref(txn)
        gc.disable()
        del txn
        gc.enable()
        assert gone() is None
        assert reader.read_next(0).value == b"a"


# ---- the newest state --------------------------------------------------------------------


def by_a_thread(shared: Map, other: Map) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(shared.put, "n", 10).result(PATIENCE)


def by_this_thread(shared: Map, other: Map) -> None:
    shared.put("n", 10)


def by_another_engine(shared: Map, other: Map) -> None:
    other.put("n", 10)


def by_a_transaction(shared: Map, other: Map) -> None:
    with shared.topic.engine.transaction() as txn:
        shared.put("n", 10, transaction=txn)


def by_a_background_call(shared: Map, other: Map) -> None:
    shared.put_async("n", 10).result(PATIENCE)


def by_who_took_the_topic(shared: Map, other: Map) -> None:
    take_over(shared.topic)
    other.put("n", 10)


MEANWHILE = [
    by_a_thread,
    by_this_thread,
    by_another_engine,
    by_a_transaction,
    by_a_background_call,
    by_who_took_the_topic,
]


@pytest.mark.parametrize("appends", [True, False], ids=["appends", "compares only"])
@pytest.mark.parametrize("again", [True, False], ids=["at its next write", "at the commit"])
@pytest.mark.parametrize("write", MEANWHILE)
def test_i8_what_was_computed_from_an_older_state_is_not_committed(
    engine: xl.Engine,
    shared: Map,
    second: Map,
    other: xl.Topic,
    write: Callable[[Map, Map], None],
    again: bool,
    appends: bool,
) -> None:
    """The transaction is aborted with all its parts, and goes through when it is run again."""
    shared.put("n", 1)
    with xl.SharedMap(other) as stranger:
        txn = engine.transaction()
        second.put("m", 5, transaction=txn)
        if appends:
            shared.update("n", one_more, transaction=txn)
        else:
            assert not shared.replace("n", -1, -2, transaction=txn)
        write(shared, stranger)
        with pytest.raises(xl.TransactionAbortedError, match="Run the transaction again"):
            shared.update("n", one_more, transaction=txn) if again else txn.commit()
        assert txn.state == "aborted"
        assert (everything(shared), everything(second)) == ({"n": 10}, {})
        with engine.transaction() as txn:
            second.put("m", 5, transaction=txn)
            shared.update("n", one_more, transaction=txn)
        assert (everything(stranger), everything(second)) == ({"n": 11}, {"m": 5})


def test_i8_a_state_of_another_owner_is_read_before_it_is_written(
    engine: xl.Engine, shared: Map, other: xl.Topic
) -> None:
    """The other one keeps the topic until the commit, and then gives it up."""
    with xl.SharedMap(other) as stranger:
        stranger.put("n", 1)
        with engine.transaction() as txn:
            assert shared.update("n", one_more, transaction=txn).value == 2
        assert stranger.get("n", latest=True) == 2


@pytest.mark.rule("K4")
def test_k4_a_transaction_that_is_never_committed_keeps_nobody_from_writing(
    engine: xl.Engine, shared: Map, worker: Callable[..., Worker]
) -> None:
    stranger = worker()
    stranger.call(open_map)
    txn = engine.transaction()
    shared.put("n", 100, transaction=txn)
    for number in range(3):
        assert within(lambda: shared.update("n", one_more)).value == 2 * number + 1
        assert stranger.call(call_map, "update", "n", one_more).value == 2 * number + 2
    assert txn.state == "open"


def test_i8_a_commit_does_not_wait_for_a_stopped_owner(
    engine: xl.Engine, shared: Map, second: Map, worker: Callable[..., Worker]
) -> None:
    stranger = worker(keepalive=None)
    stranger.call(open_map)
    stranger.call(call_map, "put", "n", 1)
    stop_outside(engine.path, stranger.pid)
    with engine.transaction() as txn:
        second.put("m", 1, transaction=txn)
        assert within(lambda: shared.update("n", one_more, transaction=txn)).value == 2
    assert everything(shared) == {"n": 2}


@pytest.mark.rule("K4")
def test_k4_two_maps_in_opposite_order_in_threads_and_engines(
    engine: xl.Engine, shared: Map, second: Map, other: xl.Topic
) -> None:
    """No deadlock, and the sum of both maps holds."""
    shared.put("n", 1000)
    second.put("n", 1000)
    moved: list[int] = []

    def move(own: xl.Engine, out: Map, into: Map) -> None:
        for _ in range(10):
            within(lambda: retried(own, lambda txn: transfer(out, into, 1, txn)))
            moved.append(1)

    with (
        xl.SharedMap(other) as first_there,
        xl.SharedMap(other.engine.topic("second")) as second_there,
        ThreadPoolExecutor(4) as pool,
    ):
        moves = [
            pool.submit(move, own, out, into)
            for own, one, two in [
                (engine, shared, second),
                (other.engine, first_there, second_there),
            ]
            for out, into in [(one, two), (two, one)]
        ]
        for each in moves:
            each.result(4 * PATIENCE)
        assert len(moved) == 40
        assert (everything(shared), everything(second_there)) == ({"n": 1000}, {"n": 1000})


@pytest.mark.rule("K4")
def test_k4_a_commit_beside_a_write_function_that_writes_to_another_map(
    engine: xl.Engine, shared: Map, second: Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function has the one map, which the commit takes last, and waits for the other one."""
    inside, committing = threading.Event(), threading.Event()
    begin = StateWriter.begin

    def begun(self: StateWriter, *args: Any) -> Any:
        kept = begin(self, *args)
        committing.set()  # it has the first map
        return kept

    def write_to_the_other(old: int | None) -> int:
        inside.set()
        assert committing.wait(PATIENCE)
        shared.put("m", 1)
        return 1

    with ThreadPoolExecutor(2) as pool:
        txn = engine.transaction()
        shared.put("n", 1, transaction=txn)
        second.put("n", 1, transaction=txn)
        writing = pool.submit(second.update, "m", write_to_the_other)
        assert inside.wait(PATIENCE)
        monkeypatch.setattr(StateWriter, "begin", begun)
        commit = pool.submit(txn.commit)
        writing.result(PATIENCE)
        with pytest.raises(xl.TransactionAbortedError):
            commit.result(PATIENCE)
    assert (everything(shared), everything(second)) == ({"m": 1}, {"m": 1})


@pytest.mark.rule("K4")
def test_k4_a_commit_that_waits_lets_another_process_have_the_first_map(
    engine: xl.Engine, shared: Map, second: Map, other: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was written meanwhile: it goes through, by the producer that owns the topic then."""
    inside, over, tried = threading.Event(), threading.Event(), threading.Event()
    try_with = xl.Transaction._try_with

    def tries(self: xl.Transaction, writers: Any) -> Any:
        kept = try_with(self, writers)
        tried.set()  # it has had the first map
        return kept

    monkeypatch.setattr(xl.Transaction, "_try_with", tries)

    def keep_all(key: str, value: int) -> int:
        inside.set()
        assert over.wait(PATIENCE)
        return value

    shared.put("n", 1)
    second.put("n", 1)
    with ThreadPoolExecutor(2) as pool, xl.SharedMap(other) as stranger:
        txn = engine.transaction()
        shared.put("n", 2, transaction=txn)
        second.put("n", 2, transaction=txn)
        writing = pool.submit(second.update_multiple, None, keep_all)
        assert inside.wait(PATIENCE)
        commit = pool.submit(txn.commit)
        assert tried.wait(PATIENCE)
        assert within(lambda: stranger.delete("absent")) is None
        over.set()
        assert writing.result(PATIENCE) == {}
        commit.result(PATIENCE)
    assert (everything(shared), everything(second)) == ({"n": 2}, {"n": 2})


@pytest.mark.rule("K1")
def test_k1_a_commit_that_waits_for_one_topic_keeps_no_other_map(
    engine: xl.Engine, shared: Map, second: Map, other: xl.Topic
) -> None:
    """A producer has the topic of the second map, for as long as it likes."""
    shared.put("n", 1)
    second.put("n", 1)
    txn = engine.transaction()
    shared.put("n", 2, transaction=txn)
    second.put("n", 2, transaction=txn)
    take_over(second.topic)
    with ThreadPoolExecutor(1) as pool:
        with other.engine.topic("second").producer("exclusive"):
            commit = pool.submit(txn.commit)
            until(lambda: second.topic.waiters)  # the commit waits, and has had the first map
            assert within(lambda: shared.delete("absent")) is None
            assert not commit.done()
        commit.result(PATIENCE)
    assert (everything(shared), everything(second)) == ({"n": 2}, {"n": 2})


def test_i8_a_commit_waits_for_the_topic_as_long_as_the_map_s_writes_do(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    with topic.producer("exclusive"), xl.SharedMap(topic, timeout=0.05) as shared:
        txn = engine.transaction()
        shared.put("a", 1, transaction=txn)
        with pytest.raises(xl.WaitTimeoutError):
            txn.commit()
        assert (txn.state, everything(shared)) == ("aborted", {})


def transfer(out: Map, into: Map, amount: int, txn: Any) -> None:
    """Move an amount from one map to another."""
    out.update("n", lambda had: had - amount, transaction=txn)
    into.update("n", lambda had: had + amount, transaction=txn)


def retried(engine: xl.Engine, body: Callable[[xl.Transaction], object]) -> int:
    """Run a transaction until it is committed; how often that was."""
    times = 0
    while True:
        times += 1
        try:
            with engine.transaction() as txn:
                body(txn)
            return times
        except xl.TransactionAbortedError:
            continue


# ---- real processes ----------------------------------------------------------------------


def keep_moving(state: State, seed: int, ended: str) -> int:
    """Move amounts between two maps, and log each by a message of the same transaction, until the
    file `ended` is there. How many that were."""
    dice, moved = random.Random(seed), 0
    with (
        xl.SharedMap(state.topic) as first,
        xl.SharedMap(state.engine.topic("second")) as second,
        state.engine.topic("moves").producer() as producer,
    ):
        while not Path(ended).exists():
            amount = dice.randrange(1, 9)
            out, into = (first, second) if dice.random() < 0.5 else (second, first)

            def body(txn: xl.Transaction) -> None:
                transfer(out, into, amount, txn)  # noqa: B023
                producer.send(b"%d" % (amount if out is first else -amount), transaction=txn)  # noqa: B023

            retried(state.engine, body)
            moved += 1
    return moved


@pytest.mark.long
def test_g3_money_that_processes_move_is_neither_lost_nor_made(
    engine: xl.Engine,
    shared: Map,
    second: Map,
    worker: Callable[..., Worker],
    tmp_path: Path,
) -> None:
    """They are killed, and stopped while others go on, at random moments (outside of the lock of
    grants, which the others would wait for: rule K3)."""
    shared.put("n", 1000)
    second.put("n", 1000)
    ended, dice, moves = str(tmp_path / "ended"), random.Random(7), engine.topic("moves")

    def started() -> Worker:
        process = worker(keepalive=None)
        process.start(keep_moving, dice.randrange(1000), ended)
        return process

    def await_more(count: int) -> None:
        before = moves.next_offset
        until(lambda: moves.next_offset >= before + count)

    processes = [started() for _ in range(3)]
    for turn in range(12):
        await_more(5)
        chosen = dice.randrange(3)
        if turn % 3 == 0:
            processes[chosen].kill()
            processes[chosen] = started()
        else:
            stop_outside(engine.path, processes[chosen].pid)
            await_more(5)
            processes[chosen].signal(signal.SIGCONT)
    Path(ended).touch()
    assert sum(process.answer() for process in processes) > 0
    moved = sum(int(message.value) for message in moves.reader())
    assert everything(shared) == opened_afresh(shared.topic) == {"n": 1000 - moved}
    assert everything(second) == opened_afresh(second.topic) == {"n": 1000 + moved}


# ---- interrupts --------------------------------------------------------------------------


@pytest.mark.rule("G11")
@pytest.mark.parametrize("value", [1, "x" * 300_000], ids=["framed", "in tables"])
def test_g11_an_exception_behind_the_commit_hides_nothing_of_it(
    engine: xl.Engine, topic: xl.Topic, shared: Map, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    commit = commits.FramedAttempt.commit if value == 1 else commits.TableAttempt.write
    shared.put("a", 0)
    txn = engine.transaction()
    shared.put("a", value, transaction=txn)

    def strike(self: Any) -> Any:
        commit(self)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(
            commits.FramedAttempt if value == 1 else commits.TableAttempt, commit.__name__, strike
        )
        with pytest.raises(MemoryError):
            within(txn.commit)
    assert (txn.state, shared.get("a")) == ("committed", value)
    assert shared.put("a", 2) == value
    assert opened_afresh(topic) == {"a": 2}


@pytest.mark.rule("G11")
@pytest.mark.parametrize("method", ["apply_own", "_apply_one"])
def test_g11_an_exception_before_the_map_has_applied_a_commit_hides_nothing_of_it(
    engine: xl.Engine,
    topic: xl.Topic,
    shared: Map,
    second: Map,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Reads, writes and transactions go on from what is in the log."""
    for number in range(3):
        txn = engine.transaction()
        shared.put("a", [number], transaction=txn)
        shared.put("b", [number], transaction=txn)
        second.put("a", [number], transaction=txn)
        with monkeypatch.context() as patch:
            patch.setattr(Replica, method, interrupted)
            with pytest.raises(Limit):
                within(txn.commit)
        assert txn.state == "committed"
        if number == 0:
            assert (shared.get("a"), second.get("a")) == ([0], [0])
        elif number == 1:
            assert shared.put("c", 1) is None
        else:
            with engine.transaction() as txn:
                shared.update("a", lambda old: [*old, 3], transaction=txn)
                second.update("a", lambda old: [*old, 3], transaction=txn)
            assert (shared.get("a"), second.get("a")) == ([2, 3], [2, 3])
    assert opened_afresh(topic) == everything(shared) == {"a": [2, 3], "b": [2], "c": 1}


def interrupted(*args: object) -> None:
    raise Limit


@pytest.mark.rule("G11")
@pytest.mark.parametrize("owns", [True, False], ids=["owner", "not the owner"])
def test_g11_an_exception_before_the_commit_leaves_nothing_of_it(
    engine: xl.Engine,
    topic: xl.Topic,
    shared: Map,
    second: Map,
    monkeypatch: pytest.MonkeyPatch,
    owns: bool,
) -> None:
    if owns:
        shared.put("a", 0)
        second.put("b", 0)
    txn = engine.transaction()
    shared.put("a", 1, transaction=txn)
    second.put("b", 1, transaction=txn)

    def strike(self: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(commits.FramedAttempt, "commit", strike)
        with pytest.raises(MemoryError):
            within(txn.commit)
    before = 0 if owns else None
    assert (txn.state, shared.get("a"), second.get("b")) == ("aborted", before, before)
    assert (shared.put("a", 2), second.put("b", 2)) == (before, before)
    assert (topic.epoch, engine.topic("second").epoch) == (1, 1)


@pytest.mark.rule("G11")
@pytest.mark.long
# Python reports what is raised inside a finalizer, and pytest takes that for an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("large", [False, True], ids=["framed", "in tables"])
def test_g11_interrupts_at_random_moments_leave_memory_and_log_alike(
    engine: xl.Engine, topic: xl.Topic, shared: Map, second: Map, large: bool
) -> None:
    """Both maps have all of each transaction or nothing, what `state` says; and go on."""
    last: list[xl.Transaction] = []
    filling = "x" * 200_000 if large else ""

    def step(number: int) -> None:
        last[:] = [txn] = [engine.transaction()]
        shared.put("n", [number, filling], transaction=txn)
        second.put("n", [number, ""], transaction=txn)
        txn.commit()

    interrupts = Interrupts(step, 0.02 if large else 0.006)
    committed = None
    for number in range(120):
        last.clear()  # it may be interrupted before it has begun a transaction
        interrupts.run(1, number)
        with contextlib.suppress(IndexError):
            state = within(lambda: settled(last[0]))
            if state == "open":  # the commit was not begun
                within(last[0].abort)
                state = last[0].state
            assert state in ("committed", "aborted")
            committed = number if state == "committed" else committed
        both = [(m.get("n") or [None])[0] for m in (shared, second)]
        assert both == [committed, committed]
        assert both == [
            within(lambda: m.get("n", latest=True) or [None])[0]  # noqa: B023
            for m in (shared, second)
        ]
        if number % 5 == 0:
            within(lambda: shared.put("m", number))  # noqa: B023
    assert interrupts.count > 60
    assert opened_afresh(topic) == everything(shared)


def settled(txn: xl.Transaction) -> str:
    """Its state, once a commit that goes on after an interrupt has ended."""
    while (state := txn.state) == "unknown":
        threading.Event().wait(0.001)
    return state


# ---- mistakes ----------------------------------------------------------------------------


def test_a4_what_is_no_transaction_of_this_ledger_is_refused(
    engine: xl.Engine, topic: xl.Topic, shared: Map, tmp_path: Any
) -> None:
    with pytest.raises(TypeError, match="transaction takes"):
        shared.put("a", 1, transaction=7)  # type: ignore[arg-type]
    with xl.open(str(tmp_path / "elsewhere")) as elsewhere:
        with pytest.raises(ValueError, match="its own ledger"):
            shared.put("a", 1, transaction=elsewhere.transaction())
    with xl.SharedMap(topic) as twin, engine.transaction() as txn:
        shared.put("a", 1, transaction=txn)
        with pytest.raises(ValueError, match="one object for each topic"):
            twin.put("a", 2, transaction=txn)
    with pytest.raises(xl.TransactionAbortedError):
        shared.put("a", 1, transaction=txn)
    shared.update(transaction=3)  # type: ignore[call-overload]
    assert everything(shared) == {"a": 1, "transaction": 3}


def test_i3_a_function_that_raises_leaves_the_transaction_as_it_was(
    engine: xl.Engine, shared: Map
) -> None:
    with engine.transaction() as txn:
        shared.put("a", 1, transaction=txn)
        with pytest.raises(ZeroDivisionError):
            shared.update("a", lambda old: old // 0, transaction=txn)
        with pytest.raises(RuntimeError, match="inside a function"):
            shared.update("a", lambda old: shared.get("a"), transaction=txn)
    assert everything(shared) == {"a": 1}


def test_i3_a_commit_inside_a_function_of_its_own_map_is_refused(
    engine: xl.Engine, shared: Map
) -> None:
    txn = engine.transaction()
    shared.put("a", 1, transaction=txn)
    for update in (
        lambda: shared.update("a", lambda old: txn.commit()),
        lambda: shared.update("a", lambda old: txn.commit(), transaction=txn),
    ):
        with pytest.raises((RuntimeError, xl.TransactionAbortedError)):
            update()
        assert txn.state == "aborted"
    assert shared.put("a", 2) is None


def test_a_map_that_is_closed_before_the_commit_fails_it(engine: xl.Engine, topic: Any) -> None:
    txn = engine.transaction()
    with xl.SharedMap(topic) as shared:
        shared.put("a", 1, transaction=txn)
    with pytest.raises(xl.EngineClosedError):
        txn.commit()
    assert (txn.state, opened_afresh(topic)) == ("aborted", {})


# ---- asyncio -----------------------------------------------------------------------------


def test_g3_awaitable_maps_and_states_write_in_transactions(path: str) -> None:
    async def run() -> Any:
        async with (
            aio.open(path) as engine,
            aio.SharedMap(engine.topic("a")) as first,
            aio.SharedMap(engine.topic("b")) as second,
        ):
            await first.put("n", 5)
            async with engine.transaction() as txn:
                change = await first.update("n", lambda had: had - 1, transaction=txn)
                await second.put("n", 1, transaction=txn)
                assert await second.get("n") is None
            assert change.value == 4
            txn = engine.transaction()
            await second.update("n", one_more, transaction=txn)
            await second.put("m", 1)
            with pytest.raises(xl.TransactionAbortedError):
                await txn.commit()
            with pytest.raises(TypeError, match=r"exclusivelog\.aio"):
                await first.put("n", 1, transaction=txn.sync)  # type: ignore[arg-type]
            return await first.items(), await second.items()

    assert asyncio.run(run()) == ([("n", 4)], [("n", 1), ("m", 1)])
