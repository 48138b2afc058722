"""What a claim guards once it is revoked: transactions that require it, producers that are bound to
it, and the callback of its holder (rules B2-B4, F1-F5)."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

import exclusivelog as xl
from exclusivelog.local.commits import FramedAttempt
from testing.kills import die_at_commit
from testing.processes import (
    PATIENCE,
    Failed,
    State,
    Worker,
    hang,
    open_producer,
    rows,
    until,
    values,
    within,
)

LOST = xl.OwnershipLostError
REVOKED = xl.ProducerRevokedError
LARGE = 200_000  # bytes, more than goes through the journal


# ---- what workers are told ---------------------------------------------------------------


def own(state: State, generation: int | None = None, *, note_loss: bool = False) -> int:
    """Claim the resource `r`, and keep the claim; its generation."""
    state.kept["losses"] = []

    def note(claim: xl.Claim, error: LOST) -> None:
        state.kept["losses"].append((claim is state.kept["claim"], str(error)))

    claim = state.engine.own("g", {"r": generation}, on_lost=note if note_loss else None)
    state.kept["claim"] = claim
    return claim.generations["r"]


def losses(state: State) -> list[tuple[bool, str]]:
    return list(state.kept["losses"])


def begin(state: State, value: bytes = b"stale") -> None:
    """A transaction that requires the claim, up to its commit."""
    state.producer = state.topic.producer()
    txn = state.kept["txn"] = state.engine.transaction()
    txn.require(state.kept["claim"])
    state.producer.send(value, transaction=txn)
    state.producer.send(value * LARGE, transaction=txn)


def commit(state: State) -> None:
    state.kept["txn"].commit()


def state_of_txn(state: State) -> str:
    return str(state.kept["txn"].state)


def bind(state: State, mode: str = "shared", **options: Any) -> None:
    state.producer = state.topic.producer(mode, claim=state.kept["claim"], **options)


def send(state: State, value: bytes) -> int:
    assert state.producer is not None
    return state.producer.send(value)


def send_on(state: State) -> tuple[int, str]:
    """Send the claim's generation until that fails: how often, and the error's name."""
    assert state.producer is not None
    value, count = b"%d" % state.kept["claim"].generations["r"], 0
    while True:
        try:
            state.producer.send(value)
        except xl.ExclusiveLogError as error:
            return count, type(error).__name__
        count += 1


def commit_on(state: State) -> tuple[int, str]:
    """The same, in transactions that require the claim."""
    value, count = b"%d" % state.kept["claim"].generations["r"], 0
    producer = state.topic.producer()
    while True:
        try:
            with state.engine.transaction() as txn:
                txn.require(state.kept["claim"])
                producer.send(value, transaction=txn)
        except xl.ExclusiveLogError as error:
            return count, type(error).__name__
        count += 1


# ---- F5, B2: transactions ----------------------------------------------------------------


def test_f5_a_commit_with_a_claim_that_is_held(engine: xl.Engine, topic: xl.Topic) -> None:
    claim, other = engine.own("g", {"a": None}), engine.own("g", {"b": None})
    with topic.producer() as producer, engine.transaction() as txn:
        producer.send(b"1", transaction=txn)
        txn.require(claim)
        txn.require(other)
        txn.require(claim)
        txn.require(producer)
    assert (values(topic), txn.state, txn.offsets) == ([b"1"], "committed", {producer: range(1)})


@pytest.mark.parametrize("end", ["revoked", "revoked by 0", "released"])
@pytest.mark.parametrize("size", [1, LARGE])
def test_f5_a_commit_that_requires_a_lost_claim_writes_nothing(
    engine: xl.Engine, topic: xl.Topic, end: str, size: int
) -> None:
    """Neither messages nor cursors, however many there are and wherever they go."""
    claim = engine.own("g", {"a": None, "b": None})
    other = engine.topic("other")
    with topic.producer() as producer:
        producer.send(b"first")
    reader = topic.reader(group="readers")
    reader.read_next(0)
    first, second = topic.producer(), other.producer("exclusive")
    before = {name: found for name, found in rows(engine).items() if name == "cursors"}
    txn = engine.transaction()
    txn.require(claim)
    first.send(b"x" * size, transaction=txn)
    second.send_many([b"y" * size] * 3, transaction=txn)
    txn.commit_cursor(reader)
    if end == "released":
        claim.release()
    else:
        engine.own("g", {"b": 0 if end == "revoked by 0" else None})
    with pytest.raises(LOST, match=r"released|revoked"):
        txn.commit()
    assert txn.state == "aborted"
    assert (values(topic), values(other)) == ([b"first"], [])
    assert rows(engine)["cursors"] == before["cursors"] == []
    assert first.send(b"not bound") == 1  # the producers are as they were
    assert second.send(b"not bound") == 0


def test_f5_a_commit_of_nothing_but_requirements_checks_them(engine: xl.Engine) -> None:
    claim = engine.own("g", {"a": None})
    with engine.transaction() as txn:
        txn.require(claim)
    engine.own("g", {"a": None})
    txn = engine.transaction()
    txn.require(claim)
    with pytest.raises(LOST):
        txn.commit()
    assert txn.state == "aborted"


def test_b3_a_commit_that_requires_a_fenced_producer_writes_nothing(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    other = engine.topic("other").producer()
    leader = topic.producer("exclusive")
    with engine.transaction() as txn:
        txn.require(leader)
        other.send(b"1", transaction=txn)
    assert txn.offsets == {other: range(1)}
    txn = engine.transaction()
    txn.require(leader)
    other.send(b"2", transaction=txn)
    topic.producer("exclusive_with_fencing")
    with pytest.raises(xl.ProducerFencedError) as caught:
        txn.commit()
    with pytest.raises(xl.ProducerFencedError) as again:
        leader.send(b"x")
    assert again.value is caught.value
    assert values(engine.topic("other")) == [b"1"]


def test_b3_a_commit_that_requires_a_moved_producer_writes_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], path: str
) -> None:
    """... unless the producer follows its topic within the process."""
    other = engine.topic("other").producer()
    leader = topic.producer("exclusive")
    with xl.open(path, name="neighbour") as neighbour:
        engine.unload("orders", to=neighbour.id)
        with engine.transaction() as txn:
            txn.require(leader)
            other.send(b"1", transaction=txn)
        destination = worker()
        (there,) = [e.id for e in engine.engines() if e.name == "worker"]
        neighbour.unload("orders", to=there)
        txn = engine.transaction()
        txn.require(leader)
        other.send(b"2", transaction=txn)
        with pytest.raises(xl.ProducerMovedError) as caught:
            txn.commit()
        assert caught.value.successor is not None
        assert caught.value.successor.id == there
    assert destination.call(open_producer, "exclusive") == 3
    assert values(engine.topic("other")) == [b"1"]


def test_f5_what_can_be_required(engine: xl.Engine, topic: xl.Topic, path: str) -> None:
    txn = engine.transaction()
    for wrong in (None, "claim", topic, topic.reader()):
        with pytest.raises(TypeError, match="claim or a producer"):
            txn.require(wrong)  # type: ignore[arg-type]
    with xl.open(f"{path}-other") as other:
        for foreign in (other.own({"a": None}), other.topic("orders").producer()):
            with pytest.raises(ValueError, match="own ledger"):
                txn.require(foreign)  # type: ignore[arg-type]
    txn.abort()
    with pytest.raises(xl.TransactionAbortedError):
        txn.require(engine.own({"b": None}))


def test_f5_a_holder_that_is_stopped_in_a_transaction_commits_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Its keepalive has not passed: a claim with an equal generation revokes a live holder."""
    holder = worker()
    assert holder.call(own, 7) == 7
    holder.call(begin)
    hang(holder)
    assert engine.own("g", {"r": 7}).is_valid
    assert values(topic) == []
    holder.signal(signal.SIGCONT)
    with pytest.raises(Failed, match=r"OwnershipLostError.*revoked"):
        holder.call(commit)
    assert holder.call(state_of_txn) == "aborted"
    assert values(topic) == []


def test_f5_a_holder_that_is_stopped_and_not_revoked_commits(
    topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """The control: it is the loss of the claim that keeps the transaction out."""
    holder = worker()
    holder.call(own)
    holder.call(begin)
    hang(holder)
    holder.signal(signal.SIGCONT)
    holder.call(commit)
    assert len(values(topic)) == 2


def test_f5_a_holder_that_is_killed_in_a_transaction_leaves_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    holder = worker()
    holder.call(own)
    holder.call(begin)
    holder.kill()
    claim = engine.own("g", {"r": None})
    assert claim.generations == {"r": 2}
    assert values(topic) == []
    with topic.producer() as producer, engine.transaction() as txn:
        txn.require(claim)
        producer.send(b"mine", transaction=txn)
    assert values(topic) == [b"mine"]


# ---- B2, B4: producers that are bound to a claim -----------------------------------------

USES: dict[str, Callable[[xl.Producer], Any]] = {
    "send": lambda p: p.send(b"x"),
    "send, large": lambda p: p.send(b"x" * LARGE),
    "send, with time": lambda p: p.send(b"x", timeout=PATIENCE),
    "send_async": lambda p: p.send_async(b"x").result(PATIENCE),
    "send_many": lambda p: p.send_many([b"x", b"y"]),
    "flush": lambda p: p.flush(),
    "transaction": lambda p: _in_a_transaction(p),
}


def _in_a_transaction(producer: xl.Producer) -> None:
    with xl.Transaction(producer._sender.engine) as txn:
        producer.send(b"x", transaction=txn)


@pytest.mark.parametrize("mode", ["shared", "exclusive", "wait_for_exclusive"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_b4_a_bound_producer_ends_with_its_claim_for_ever(
    path: str, engine: xl.Engine, topic: xl.Topic, mode: str, use: Callable[[xl.Producer], Any]
) -> None:
    """The same error at every call, also after the rival has left; it is an OwnershipLostError and
    a ProducerFencedError. Another process revokes the claim, so this producer gets no notification
    in its own process."""
    claim = engine.own("g", {"r": None})
    producer = topic.producer(mode, claim=claim)
    use(producer)
    had = values(topic)
    with xl.open(path, name="rival") as rival:
        rival.own("g", {"r": None})
        with pytest.raises(REVOKED, match="claim") as caught:
            use(producer)
        assert isinstance(caught.value, LOST)
        assert isinstance(caught.value, xl.ProducerFencedError)
    for again in USES.values():
        with pytest.raises(REVOKED) as later:
            again(producer)
        assert later.value is caught.value
    assert producer.state == "fenced"
    producer.close()
    assert values(topic) == had
    assert rows(engine)["holders"] == []


def test_f5_revoking_a_claim_promotes_who_waits(engine: xl.Engine, topic: xl.Topic) -> None:
    """In the same transaction; a bound waiter leaves the queue, and gets the error."""
    claim, other = engine.own("g", {"r": None}), engine.own("g", {"s": None})
    owner = topic.producer("exclusive", claim=claim, name="owner")
    waits = topic.producer_async("wait_for_exclusive", claim=claim, priority=5)
    heir = topic.producer_async("wait_for_exclusive", claim=other, name="heir")
    assert len(topic.waiters) == 2
    engine.own("g", {"r": None})
    with pytest.raises(REVOKED):
        waits.result(PATIENCE)
    assert heir.result(PATIENCE).send(b"heir") == 0
    assert (owner.state, topic.waiters, topic.epoch) == ("fenced", [], 2)
    told = [(e.kind, e.reason, e.epoch) for e in engine.history("orders")]
    assert told == [("grant", "request", 1), ("evict", "claim", 1), ("grant", "promotion", 2)]


def test_f5_only_the_claim_s_own_producers_end_with_it(engine: xl.Engine, topic: xl.Topic) -> None:
    """Many of them at once, on several topics; not those of another claim, or of none."""
    one, two = engine.own("g", {"r": None}), engine.own("g", {"s": None})
    topics = [engine.topic(f"t{number}") for number in range(5)]
    bound = [topic.producer(claim=one) for topic in topics for _ in range(3)]
    kept = [topic.producer(claim=claim) for topic in topics for claim in (two, None)]
    engine.own("g", {"r": None})
    for producer in bound:
        with pytest.raises(REVOKED):
            producer.send(b"x")
    assert [producer.send(b"x") for producer in kept] == [0, 1] * 5
    assert {producer.state for producer in bound} == {"fenced"}


def test_f5_no_producer_is_bound_to_a_lost_claim(
    engine: xl.Engine, topic: xl.Topic, path: str
) -> None:
    """A refused request writes nothing, and fences no producer (rules A2, B6)."""
    revoked, released = engine.own("g", {"r": None}), engine.own("g", {"s": None})
    engine.own("g", {"r": None})
    released.release()
    owner = topic.producer("exclusive")
    before = rows(engine)
    for claim in (revoked, released):
        for mode in ("shared", "exclusive_with_fencing", "wait_for_exclusive"):
            with pytest.raises(LOST, match="claim="):
                topic.producer(mode, claim=claim)
    assert rows(engine) == before
    assert owner.send(b"x") == 0
    with pytest.raises(TypeError, match="claim="):
        topic.producer(claim="r")  # type: ignore[arg-type]
    with xl.open(path) as other:
        with pytest.raises(ValueError, match="engine"):
            topic.producer(claim=other.own("g", {"t": None}))
        with pytest.raises(ValueError, match="engine"):
            topic.producer_async(claim=other.own("g", {"t": None}))


def test_f5_releasing_a_claim_sends_what_was_accepted(engine: xl.Engine, topic: xl.Topic) -> None:
    with engine.own("g", {"r": None}) as claim:
        producer = topic.producer(claim=claim, linger=60.0)
        receipts = [producer.send_async(b"%d" % number) for number in range(100)]
    assert [receipt.result(PATIENCE) for receipt in receipts] == list(range(100))
    with pytest.raises(REVOKED):
        producer.send(b"x")
    assert rows(engine)["claimants"] == []
    assert topic.next_offset == 100


def test_f5_nothing_is_left_of_a_binding(engine: xl.Engine, topic: xl.Topic, path: str) -> None:
    with xl.open(path) as other:
        claim = other.own("g", {"r": None})
        (row,) = rows(engine)["claimants"]
        with other.topic("orders").producer("exclusive", claim=claim):
            assert len(rows(engine)["claimants"]) == 2
            waits = other.topic("orders").producer_async("wait_for_exclusive", claim=claim)
            assert len(rows(engine)["claimants"]) == 3
        waits.result(PATIENCE)
        assert len(rows(engine)["claimants"]) == 2
        waits.result().close()
        assert rows(engine)["claimants"] == [row]
        other.topic("orders").producer(claim=claim)
        other.topic("orders").producer(claim=claim)
    assert (rows(engine)["claimants"], rows(engine)["holders"]) == ([], [])


def test_e2_a_bound_producer_does_not_follow_its_topic(
    engine: xl.Engine, topic: xl.Topic, path: str
) -> None:
    """Its successor's sends would rest on another claim, or on none."""
    producer = topic.producer("exclusive", claim=engine.own("g", {"r": None}))
    future = topic.producer_async("shared")  # refused: so that the option is looked at, too
    assert isinstance(future.exception(PATIENCE), xl.ProducerBusyError)
    with xl.open(path) as other:
        engine.unload("orders", to=other.id)
        with pytest.raises(xl.ProducerMovedError):
            producer.send(b"x")
        assert other.topic("orders").producer("exclusive").send(b"y") == 0


def test_f5_a_producer_that_is_not_bound_outlives_the_claim(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """The control: it is the binding that ends a producer, and nothing else is disturbed."""
    engine.own("g", {"r": None})
    producer = topic.producer("exclusive")
    engine.own("g", {"r": None})
    assert (producer.send(b"x"), producer.state) == (0, "open")


def test_h2_rows_of_format_4_are_read(engine: xl.Engine, topic: xl.Topic) -> None:
    """Sessions and claims of earlier versions lack the last fields."""
    claim = engine.own("g", {"a": 5})
    producer = topic.producer("exclusive", name="old")
    with engine.ledger.write_exclusive() as tables:
        for table, lacking in (("holders", 1), ("claimants", 2)):
            (row,) = tables.rows.cursor(table)
            fields = msgpack.unpackb(row[1])
            tables.rows.put(table, row[0], msgpack.packb(fields[:-lacking]))
    assert producer.send(b"x") == 0
    assert claim.generations == {"a": 5}
    assert [(info.generations, info.reader) for info in engine.claims()] == [({"a": 5}, False)]
    assert topic.owner is not None
    assert topic.owner.producer_name == "old"
    with pytest.raises(xl.OwnershipError):
        engine.own("g", {"a": 4})
    engine.own("g", {"a": 5})
    topic.producer("exclusive_with_fencing")
    assert (claim.is_valid, producer.state) == (False, "fenced")


def test_c6_the_callback_of_a_bound_producer_is_told(engine: xl.Engine, topic: xl.Topic) -> None:
    told: queue.Queue[tuple[xl.Producer, Exception]] = queue.Queue()
    claim = engine.own("g", {"r": None})
    producer = topic.producer(claim=claim, on_fenced=lambda *call: told.put(call))
    engine.own("g", {"r": None})
    who, error = told.get(timeout=PATIENCE)
    assert (who, type(error)) == (producer, REVOKED)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["shared", "exclusive"])
def test_b2_a_bound_producer_that_is_stopped_sends_nothing_behind_its_successor(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], mode: str
) -> None:
    """It is stopped anywhere in its sending, again and again, long before its keepalive."""
    for generation in range(1, 9):
        holder = worker()
        assert holder.call(own) == 2 * generation - 1
        holder.call(bind, mode)
        before = topic.next_offset
        holder.start(send_on)
        until(lambda before=before: topic.next_offset > before + 20)
        hang(holder)
        claim = engine.own("g", {"r": None})
        with topic.producer(claim=claim) as mine:
            marked = mine.send(b"%d" % claim.generations["r"])
        holder.signal(signal.SIGCONT)
        count, error = holder.answer()
        assert error == "ProducerRevokedError"
        assert count > 20
        assert topic.next_offset == marked + 1
        claim.release()
        holder.kill()
    assert_generations_grow(topic)


def test_b2_a_bound_producer_that_is_killed_ends_with_its_claim(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    holder = worker()
    holder.call(own)
    holder.call(bind, "exclusive")
    holder.call(send, b"1")
    heir = topic.producer_async("wait_for_exclusive")
    holder.signal(signal.SIGKILL)
    claim = within(lambda: engine.own("g", {"r": None}))
    assert claim.generations == {"r": 2}
    assert heir.result(PATIENCE).send(b"2") == 1
    assert values(topic) == [b"1", b"2"]
    assert len(rows(engine)["claimants"]) == 1
    assert engine.verify().ok


def test_b2_a_holder_that_hung_and_lost_its_claim_is_told_when_it_goes_on(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Here its keepalive has passed, so that even a low generation would win."""
    holder = worker(keepalive=0.3)
    holder.call(own, 50)
    holder.call(bind)
    hang(holder)
    until(lambda: len(engine.engines()) == 1)
    engine.own("g", {"r": 50})
    holder.signal(signal.SIGCONT)
    with pytest.raises(Failed) as caught:
        holder.call(send, b"stale")
    assert caught.value.kind == "ProducerRevokedError"
    assert values(topic) == []


def test_b2_a_claim_is_checked_in_the_critical_section_of_the_commit(
    path: str, engine: xl.Engine, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is revoked when the commit has checked it, and only its writing is still to come."""
    claim = engine.own("g", {"r": None})
    with xl.open(path, name="rival") as rival, topic.producer() as producer:
        check = FramedAttempt._require

        def revoke_behind(attempt: FramedAttempt[Any], joint: Any) -> None:
            monkeypatch.setattr(FramedAttempt, "_require", check)
            check(attempt, joint)
            rival.own("g", {"r": None})

        txn = engine.transaction()
        txn.require(claim)
        producer.send(b"stale", transaction=txn)
        monkeypatch.setattr(FramedAttempt, "_require", revoke_behind)
        with pytest.raises(LOST):
            txn.commit()
        assert (txn.state, values(topic)) == ("aborted", [])
        assert producer.send(b"later") == 0  # it is not paused any more


@pytest.mark.parametrize("how", [send_on, commit_on], ids=["bound", "required"])
def test_b2_processes_that_take_a_claim_from_each_other_never_mix(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], how: Callable[..., Any]
) -> None:
    """Each sends its generation as fast as it can until it has lost the claim: generations never
    go back within the log, and everything that was acknowledged is there."""
    holders = [worker(name=f"w{number}") for number in range(3)]
    sent: dict[int, int] = {}
    for turn in range(12):
        holder, before = holders[turn % 3], holders[(turn - 1) % 3]
        assert holder.call(own) == turn + 1
        if turn:
            count, error = before.answer()
            assert error in ("ProducerRevokedError", "OwnershipLostError")
            sent[turn] = count
        if how is send_on:
            holder.call(bind)
        had = topic.next_offset
        holder.start(how)
        until(lambda had=had: topic.next_offset > had + 3)
    engine.own("g", {"r": None})
    sent[12], _ = holders[11 % 3].answer()
    assert_generations_grow(topic)
    found = [int(value) for value in values(topic)]
    assert {generation: found.count(generation) for generation in sent} == sent


def assert_generations_grow(topic: xl.Topic) -> None:
    found = [int(value) for value in values(topic)]
    assert found == sorted(found)


# ---- F5: being told ----------------------------------------------------------------------


def test_f5_on_lost_is_called_once(path: str, engine: xl.Engine) -> None:
    told: queue.Queue[tuple[xl.Claim, Exception, threading.Thread]] = queue.Queue()

    def note(claim: xl.Claim, error: Exception) -> None:
        told.put((claim, error, threading.current_thread()))

    claim = engine.own("g", {"a": None, "b": None}, on_lost=note)
    with xl.open(path, name="rival") as rival:
        rival.own("g", {"a": None})
        who, error, thread = told.get(timeout=PATIENCE)
        assert (who, type(error)) == (claim, LOST)
        assert thread is not threading.current_thread()
        for part in ("revoked", "'rival'", rival.id, "'b'"):
            assert part in str(error)
        with pytest.raises(LOST):
            claim.check()
        rival.own("g", {"b": None})
        claim.release()
        done = threading.Event()  # set after all callbacks of the first claim
        last = engine.own("g", {"c": None}, on_lost=lambda *_: done.set())
        rival.own("g", {"c": None})
        assert done.wait(PATIENCE)
    assert told.empty()
    assert not last.is_valid


def test_f5_on_lost_is_not_called_for_a_release(path: str, engine: xl.Engine) -> None:
    told: list[object] = []
    done = threading.Event()
    with xl.open(path) as other:
        other.own("g", {"a": None}, on_lost=lambda *call: told.append(call)).release()
        with other.own("g", {"b": None}, on_lost=lambda *call: told.append(call)):
            pass
        other.own("g", {"c": None}, on_lost=lambda *call: told.append(call))
        other.own("g", {"d": None}, on_lost=lambda *_: done.set())
        engine.own("g", {"a": None, "b": None, "d": None})
        assert done.wait(PATIENCE)
    engine.own("g", {"c": None})
    assert told == []


def test_f5_on_lost_needs_no_reference_to_the_claim(engine: xl.Engine) -> None:
    done = threading.Event()
    engine.own({"a": None}, on_lost=lambda *_: done.set())
    engine.own({"a": None})
    assert done.wait(PATIENCE)


def test_f5_an_on_lost_that_fails_or_blocks_blocks_no_other(engine: xl.Engine) -> None:
    go, done = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        raise RuntimeError("from a test")

    for call in (fail, lambda *_: go.wait(PATIENCE), lambda *_: done.set()):
        engine.own({"a": None}, on_lost=call)
    engine.own({"a": None})
    try:
        assert done.wait(PATIENCE)
    finally:
        go.set()
    with pytest.raises(TypeError, match="on_lost"):
        engine.own({"a": None}, on_lost=7)  # type: ignore[call-overload]


def test_f5_a_holder_in_another_process_is_told(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    """At once, and one that was stopped when it goes on; it learns who has its resource."""
    for stopped in (False, True):
        holder = worker()
        holder.call(own, note_loss=True)
        if stopped:
            hang(holder)
        engine.own("g", {"r": None})
        holder.signal(signal.SIGCONT)
        ((same, text),) = until(lambda holder=holder: holder.call(losses))
        assert same
        assert f"engine 'test' (id {engine.id}" in text
        holder.kill()


# ---- F1, F3: how wide a claim session is -------------------------------------------------


def test_f3_each_own_is_a_session_of_its_own(engine: xl.Engine, path: str) -> None:
    """Revoking one of an engine's claims leaves its others, of the same group, as they are."""
    claims = [engine.own("g", {name: None, name * 2: None}) for name in "abc"]
    with xl.open(path) as other:
        other.own("g", {"bb": None})
        assert [claim.is_valid for claim in claims] == [True, False, True]
        assert len({claim.id for claim in claims}) == 3
        other.own("g", {"aa": None, "c": None})
        assert [claim.is_valid for claim in claims] == [False, False, False]


def test_f1_the_group_may_be_left_out(engine: xl.Engine) -> None:
    first = engine.own({"a": 5})
    named = engine.own("g", {"a": 1})
    assert first.is_valid
    assert (first.group, named.group) == ("", "g")
    for again in (
        lambda: engine.own({"a": 5}, timeout=0.0),
        lambda: engine.own(None, {"a": 5}),
        lambda: engine.own(resources={"a": 5}),  # type: ignore[call-overload]
    ):
        second = again()
        assert (first.is_valid, second.is_valid, named.is_valid) == (False, True, True)
        first = second
    with pytest.raises(xl.OwnershipError):
        engine.own({"a": 4})
    with pytest.raises(ValueError, match="group="):
        engine.own("", {"a": 9})
    for wrong in ({}, None, 7):
        with pytest.raises(TypeError, match="takes"):
            engine.own(wrong)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        engine.own({"a": 9}, {"a": 9})  # type: ignore[call-overload]


# ---- E5: events, and lists ---------------------------------------------------------------


def test_e5_claims_are_events(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="other", properties={"address": "here"}) as other:
        other.own("g", {"a": 3, "b": None})
        claim = engine.own("g", {"b": 1})
        claim.release()
        claim.release()
        engine.own({"c": None})
        events = list(engine.history(group="g"))
        told = [(e.kind, e.reason, e.resource, e.generation) for e in events]
        assert told == [
            ("own", "claim", "a", 3),
            ("own", "claim", "b", 1),
            ("revoke", "claimed", "a", 3),
            ("revoke", "claimed", "b", 1),
            ("own", "claim", "b", 1),
            ("release", "closed", "b", 1),
        ]
        assert [(e.topic, e.epoch, e.priority, e.group) for e in events] == [("", 0, 0, "g")] * 6
        first, revoked, mine, last = events[0], events[2], events[4], events[5]
        assert first.source is None
        assert (
            first.target
            == revoked.source
            == {
                "engine": other.id,
                "engine_name": "other",
                "pid": other.info.pid,
                "producer": None,
                "properties": {},
                "engine_properties": {"address": "here"},
            }
        )
        assert revoked.target == mine.target == last.source
        assert revoked.target is not None
        assert revoked.target["engine"] == engine.id
        assert last.target is None
        assert [e.resource for e in engine.history(group="")] == ["c"]
        assert len(list(engine.history())) == 7
        assert list(engine.history("a")) == list(engine.history("g")) == []
        keys = {message.key for message in engine.topic("__events__").reader()}
        assert keys == {None}
        assert xl.Event.loads(first.dumps()) == first


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "dead"), (signal.SIGSTOP, "hung")])
def test_e5_the_end_of_a_holder_that_died_or_hung_is_told(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], number: int, reason: str
) -> None:
    holder = worker(keepalive=0.3)
    holder.call(own, 9)
    holder.call(bind, "exclusive")
    if number == signal.SIGSTOP:
        hang(holder)
    else:
        holder.kill()
    until(lambda: len(engine.engines()) == 1)
    engine.own("g", {"r": None})
    told = [(e.kind, e.reason) for e in engine.history(group="g")]
    assert told == [("own", "claim"), ("revoke", reason), ("own", "claim")]
    assert [e.kind for e in engine.history("orders")] == ["grant", "evict"]
    holder.signal(signal.SIGCONT) if number == signal.SIGSTOP else None


def die_owning(state: State, behind: bool) -> None:
    """Claim the resource, and be killed right before the commit of that, or right behind it."""
    die_at_commit(1, behind=behind)
    state.engine.own("g", {"r": None})


@pytest.mark.long
@pytest.mark.parametrize("behind", [False, True])
def test_e5_a_crash_revokes_a_claim_with_all_that_is_bound_to_it_or_nothing(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], behind: bool
) -> None:
    told = threading.Event()
    claim = engine.own("g", {"r": None}, on_lost=lambda *_: told.set())
    producers = [engine.topic(name).producer("exclusive", claim=claim) for name in "ab"]
    rival = worker()
    rival.start(die_owning, behind)
    rival.process.join(PATIENCE)
    assert rival.process.exitcode == -signal.SIGKILL
    kinds = [event.kind for event in engine.history(group="g")]
    assert kinds == (["own", "revoke", "own"] if behind else ["own"])
    assert claim.is_valid == (not behind)
    for producer in producers:
        if behind:
            with pytest.raises(REVOKED):
                producer.send(b"x")
        else:
            assert producer.send(b"x") == 0
    assert len(rows(engine)["claimants"]) == (1 if behind else 3)
    if behind:
        assert told.wait(PATIENCE)
    assert engine.own("g", {"r": None}).generations == {"r": 3 if behind else 2}
    assert engine.verify().ok


def test_e5_refused_claims_leave_no_event(engine: xl.Engine) -> None:
    engine.own("g", {"a": 9})
    for wrong in ({"b": None, "a": 8}, {"c": 1, "a": 1}):
        with pytest.raises(xl.OwnershipError):
            engine.own("g", wrong)
    assert len(list(engine.history())) == 1


def test_e5_group_readers_are_told_of_and_readers_of_the_events_are_not(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """Else a monitor with a group would wake itself."""
    with engine.topic("__events__").reader(group="monitor"), topic.reader(group="g"):
        topic.reader(group="g").close()
    told = [(e.group, e.kind, e.reason, e.resource) for e in engine.history()]
    assert told == [
        ("g", "own", "reader", "orders"),
        ("g", "revoke", "claimed", "orders"),
        ("g", "own", "reader", "orders"),
        ("g", "release", "closed", "orders"),
    ]


def test_f1_claims_are_listed(
    engine: xl.Engine, topic: xl.Topic, worker: Callable[..., Worker], path: str
) -> None:
    """Those that are held by engines that live, also by a reader and in other processes."""
    assert engine.claims() == []
    revoked = engine.own("g", {"a": 3})
    claim = engine.own("g", {"a": 4, "b": None})
    producer = topic.producer(claim=claim)  # its binding is no claim
    engine.own({"z": None})
    reader = topic.reader(group="h")
    holder = worker(name="holder")
    holder.call(own)
    with xl.open(path, readonly=True) as onlooker:
        for looking in (engine, onlooker):
            listed = looking.claims()
            assert [(c.group, c.generations, c.engine_name, c.reader) for c in listed] == [
                ("g", {"a": 4, "b": 1}, "test", False),
                ("", {"z": 1}, "test", False),
                ("h", {"orders": 1}, "test", True),
                ("g", {"r": 1}, "holder", False),
            ]
            assert [c.generations for c in looking.claims("h")] == [{"orders": 1}]
            assert [c.generations for c in looking.claims("")] == [{"z": 1}]
    mine = engine.claims("g")[0]
    assert (mine.id, mine.engine_id, mine.pid) == (claim.id, engine.id, engine.info.pid)
    assert 0 <= time.time() * 1000 - mine.since < 1000 * 600
    holder.kill()
    until(lambda: len(engine.claims("g")) == 1)
    claim.release()
    reader.close()
    assert [c.group for c in engine.claims()] == [""]
    assert not revoked.is_valid
    with pytest.raises(REVOKED):
        producer.send(b"x")


# ---- many at once ------------------------------------------------------------------------


@pytest.mark.long
def test_f3_threads_that_revoke_each_other_s_producers_do_not_jam(
    engine: xl.Engine, topic: xl.Topic
) -> None:
    """Claim, bind, send until it is lost; and every send has an outcome (rule B9)."""
    stop, counts = time.monotonic() + 2.0, []

    def fight() -> None:
        done = 0
        while time.monotonic() < stop or done < 5:
            with contextlib.suppress(LOST), engine.own("g", {"r": None}) as claim:
                with topic.producer(claim=claim) as producer:
                    for _ in range(5):
                        producer.send(b"%d" % claim.id)
                        done += 1
        counts.append(done)

    threads = [threading.Thread(target=fight, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(counts) == 4
    assert_generations_grow(topic)
    assert topic.next_offset >= sum(counts)
    assert engine.claims() == []
    assert rows(engine)["claimants"] == []
    assert engine.verify().ok
