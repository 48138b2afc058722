"""Where claims, hand-overs and the queue meet in one transaction: what ends with a claim that moves
is ended once, on all topics, and nothing is written over it (rules A1, A6, B1, D4, E4, F5)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from exclusivelog.backend import MoveCancelled
from exclusivelog.local import unloading
from testing.handovers import Quick
from testing.processes import PATIENCE, State, Worker, hang, open_producer, values, within

BUSY, REVOKED = xl.ProducerBusyError, xl.ProducerRevokedError


@pytest.fixture
def engines(path: str) -> Iterator[tuple[xl.Engine, xl.Engine, xl.Engine]]:
    """Three engines on one ledger."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b, xl.open(path, name="c") as c:
        yield a, b, c


def own(state: State, group: str, resource: str) -> None:
    state.kept["claim"] = state.engine.own(group, {resource: None})


def open_bound(state: State, mode: str, **options: object) -> None:
    """A producer, or one that waits for its turn, bound to the kept claim."""
    state.kept["bound"] = state.topic.producer_async(
        mode,
        claim=state.kept["claim"],
        **options,  # type: ignore[arg-type]
    )


def begin_and_die(state: State, to: str, timeout: float, **options: object) -> None:
    """A coordinator that does not live to see what becomes of the move."""
    state.engine.unload_async("orders", to, timeout, **options)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGKILL)


def fall_while_releasing(
    source: Worker, coordinator: Worker, to: str, timeout: float, **options: object
) -> None:
    """The source dies before it has released what is to be moved, and no engine evicts it."""
    hang(source)
    with pytest.raises(EOFError):
        coordinator.call(begin_and_die, to, timeout, **options)
    source.kill()


@contextlib.contextmanager
def deaf(engine: xl.Engine) -> Iterator[None]:
    """Its background worker does not get to read its notifications."""
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.backend.notifications.lock:
            began.set()
            go_on.wait(PATIENCE)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        assert began.wait(PATIENCE)
        yield
    finally:
        go_on.set()
        holding.join()


def counts(engine: xl.Engine, name: str) -> tuple[int, int]:
    """How many shared producers and waiters the topic's row tells of."""
    with engine.ledger.read() as tables:
        row = tables.topics.find(name)
        assert row is not None
        assert row.shared == len([h for h in tables.sessions.holders(row.id) if not h.exclusive])
        assert row.waiting == len(list(tables.sessions.waiters(row.id)))
        return row.shared, row.waiting


def test_b1_a_claim_that_moves_with_one_topic_frees_the_next_one_of_the_call(
    engines: tuple[xl.Engine, xl.Engine, xl.Engine],
) -> None:
    a, b, c = engines
    for name in ("t1", "t2"):
        a.topic(name)
    bound = a.topic("t2").producer("exclusive", claim=a.own("g", {"t1": None}))
    waiter = c.topic("t2").producer_async("wait_for_exclusive")
    moves = c.unload(["t1", "t2"], to=b.id, groups=["g"], timeout=PATIENCE)
    assert [move.ok for move in moves] == [True, True]
    with pytest.raises(REVOKED):
        bound.send(b"of a revoked writer")
    assert waiter.result(PATIENCE).send(b"by its successor, at b") == 0
    granted = [e.epoch for e in c.history("t2") if e.kind == "grant"]
    assert granted == [1, 2, 3]  # none of them twice (rule B1)


def test_a3_what_a_move_ends_on_another_topic_may_end_more_on_its_own(
    engines: tuple[xl.Engine, xl.Engine, xl.Engine],
) -> None:
    """r moves: the claim r ends, and with it the owner of t2, which was to be moved, too. So the
    claim t2 moves, and with it ends one who waits for r."""
    a, b, c = engines
    for name in ("r", "t2"):
        c.topic(name)
    moved = c.topic("r").producer("exclusive", follow=False)
    first, second = a.own("g", {"r": None}), a.own("g", {"t2": None})
    ended = a.topic("t2").producer("exclusive", claim=first)
    waiter = a.topic("r").producer_async("wait_for_exclusive", claim=second)
    with deaf(a):  # else it may be faster, and release t2 itself
        c.unload(["r", "t2"], to=b.id, groups=["g"], timeout=PATIENCE)
    with pytest.raises(REVOKED):
        waiter.result(PATIENCE)
    with pytest.raises(REVOKED):
        ended.send(b"x")
    assert moved.state == "moved"
    assert counts(c, "r") == (0, 0)
    c.cancel_unload(["r", "t2"])
    assert a.topic("r").producer().send(b"the topic is free") == 0


def test_f5_no_producer_is_bound_to_a_claim_that_its_own_request_moves(
    engine: xl.Engine, path: str, quick: Callable[..., Quick]
) -> None:
    """The request buries the source of a hand-over, and the claim that it rests on moves."""
    source, coordinator = quick("source"), quick("coordinator")
    source.call(open_producer, "exclusive")
    topic, claim = engine.topic("orders"), engine.own("g", {"orders": None})
    with xl.open(path, name="destination") as destination:
        fall_while_releasing(source, coordinator, destination.id, PATIENCE, groups=["g"])
        assert claim.is_valid
        with pytest.raises(xl.OwnershipLostError):
            within(lambda: topic.producer("wait_for_exclusive", claim=claim, timeout=PATIENCE))
        assert not claim.is_valid
        assert not topic.waiters
        assert destination.topic("orders").producer("exclusive").topic_epoch == 2


@pytest.mark.long
def test_d4_a_waiter_that_ends_with_its_claim_leaves_its_retry_time_to_the_next(
    engine: xl.Engine, path: str, quick: Callable[..., Quick]
) -> None:
    """It was to look again once the reservation is over."""
    topic = engine.topic("orders")
    bound = quick("bound")
    with xl.open(path, name="destination") as destination:
        engine.unload("orders", to=destination.id, timeout=5.0)  # until the other one waits, too
        bound.call(own, "g", "orders")
        bound.call(open_bound, "wait_for_exclusive", priority=9)
        other = topic.producer_async("wait_for_exclusive")
        engine.unload("orders", to=destination.id, timeout=0.1, groups=["g"])
        assert [waiter.session for waiter in topic.waiters] == [other.session.id]  # type: ignore[union-attr]
        bound.kill()
        assert other.result(PATIENCE).send(b"") == 0


def test_a1_who_ends_with_a_claim_while_the_dead_are_evicted_is_counted_once(
    engine: xl.Engine, path: str, quick: Callable[..., Quick]
) -> None:
    """Two shared producers of one dead engine: one was on its way, with the claim of the other."""
    topic = engine.topic("orders")
    source, coordinator = quick("source"), quick("coordinator")
    source.call(open_producer, "shared", name="x")
    source.call(own, "g", "orders")
    source.call(open_bound, "shared", name="y")
    with xl.open(path, name="destination") as destination:
        beside = topic.producer(name="z")
        about = {"producer": "x", "groups": ["g"]}
        fall_while_releasing(source, coordinator, destination.id, PATIENCE, **about)
        waiter = topic.producer_async("wait_for_exclusive")
        assert counts(engine, "orders") == (2, 1)  # z, and the seat of x
        moved = destination.topic("orders").producer(name="x")
        beside.close()
        assert not waiter.done()
        assert moved.send(b"x") == 0
        moved.close()
        assert waiter.result(PATIENCE).send(b"alone") == 1
    assert values(topic) == [b"x", b"alone"]


def test_a6_the_name_of_a_seat_that_was_on_its_way_is_taken(
    engine: xl.Engine, path: str, quick: Callable[..., Quick]
) -> None:
    """Also where its producer has died, and the seat is reserved by the request that wants it."""
    topic = engine.topic("orders")
    source, coordinator = quick("source"), quick("coordinator")
    source.call(open_producer, "shared", name="x")
    with xl.open(path, name="destination") as destination:
        fall_while_releasing(source, coordinator, destination.id, PATIENCE, producer="x")
        with pytest.raises(BUSY, match="in use by"):
            topic.producer(name="x")
        assert destination.topic("orders").producer(name="x").send(b"") == 0


def test_d4_claims_that_are_revoked_together_grant_one_another_nothing(
    engines: tuple[xl.Engine, xl.Engine, xl.Engine],
) -> None:
    a, b, c = engines
    topic = a.topic("orders")
    owner = topic.producer("exclusive", claim=a.own("g", {"x": None}), announce={"by": "a"})
    waiter = b.topic("orders").producer_async(
        "wait_for_exclusive", claim=b.own("g", {"y": None}), announce={"by": "b"}
    )
    c.own("g", {"x": None, "y": None})
    with pytest.raises(REVOKED):
        waiter.result(PATIENCE)
    with pytest.raises(REVOKED):
        owner.send(b"x")
    assert topic.epoch == 1
    assert topic.announcement is not None
    assert topic.announcement.info == {"by": "a"}


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_b3_a_fenced_producer_does_not_move_its_successor_of_the_same_name(
    engines: tuple[xl.Engine, xl.Engine, xl.Engine], mode: str
) -> None:
    """It has not heard of its end: it hung, say, and goes on (rule B3)."""
    a, b, c = engines
    old = a.topic("orders").producer(mode, name="x")
    with deaf(a):
        c.backend.sessions.release([old._session])  # as one evicts a producer that hangs
        new = c.topic("orders").producer(mode, name="x")
        with pytest.raises(xl.ProducerFencedError) as first:
            old.move(to=b.id)
        with pytest.raises(xl.ProducerFencedError) as second:
            old.move_async(to=b.id)
        assert second.value is first.value
    assert new._sender.session.usable
    assert new.send(b"") == 0
    assert old.state == "fenced"


@pytest.mark.long
def test_d4_a_seat_that_is_reserved_for_one_who_hangs_keeps_no_waiter_for_ever(
    engine: xl.Engine, path: str, quick: Callable[..., Quick]
) -> None:
    """The destination, which would give the seat back at its deadline, does not run."""
    topic, destination = engine.topic("orders"), quick("destination", keepalive=None)
    producer = topic.producer()
    with xl.open(path, name="c") as c:
        first, second = (c.topic("orders").producer_async("wait_for_exclusive") for _ in "ab")
        hang(destination)
        assert producer.move(to=destination.id, timeout=3.0).state == "assigned"
        first.cancel()  # now the second one is the best waiter
        assert second.result(PATIENCE).send(b"") == 0


def test_e4_a_cancel_begins_to_move_nothing_more(
    engine: xl.Engine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the topics have no owners, so that each move has its outcome at once."""
    monkeypatch.setattr(unloading, "MOVED_AT_ONCE", 1)
    names = [engine.topic(f"t{number}").name for number in range(20)]
    with xl.open(path, name="destination") as destination:
        moves = engine.backend.moves(names, destination.id, 20.0, (), None)
        moves.begin()
        moves.stop()
        with pytest.raises(MoveCancelled):
            moves.run()
        assert [engine.topic(name).transfer is not None for name in names] == [True] + [False] * 19
