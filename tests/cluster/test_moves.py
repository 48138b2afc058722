"""Hand-overs on a cluster (rules E1 to E5), over logs in memory: requests that wait for a release,
destinations that die, moves that are repeated, and what history tells of them."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgpack
import pytest

import exclusivelog as xl
from exclusivelog.admission import NO_DESTINATION
from exclusivelog.cluster.following import Owning
from exclusivelog.cluster.frames import Grant, Holder, sealed
from exclusivelog.cluster.waiting import MAGIC, VERSION, Assign, Unassign, Waiters, decode
from exclusivelog.types import AccessMode
from testing.processes import EXCLUSIVE, FENCING, PATIENCE, SHARED, WAIT, until

pytestmark = pytest.mark.once


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No source releases its topic before this event."""
    go, hand_over = threading.Event(), Owning.hand_over_if_due

    def hand_over_then(self: Owning) -> None:
        if go.is_set():
            hand_over(self)

    monkeypatch.setattr(Owning, "hand_over_if_due", hand_over_then)
    return go


def release(event: threading.Event, source: xl.Engine) -> None:
    """Let the source release its topics."""
    event.set()
    source.backend.wake_worker()


def begin(pool: ThreadPoolExecutor, source: xl.Engine, to: xl.Engine, timeout: float = PATIENCE):
    """Begin to move the topic; the future of the outcome."""
    moving = pool.submit(source.unload, "orders", to=to.id, timeout=timeout)
    until(lambda: source.topic("orders").transfer)
    return moving


def told(engine: xl.Engine) -> list[tuple[str, str, int]]:
    """The kinds, reasons and epochs of the topic's history."""
    return [(event.kind, event.reason, event.epoch) for event in engine.history("orders")]


# ---- E3: who asks at the destination -----------------------------------------------------


@pytest.mark.rule("E3")
@pytest.mark.parametrize("mode", [EXCLUSIVE, SHARED])
def test_e3_a_request_at_the_destination_waits_for_the_release(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, released: threading.Event, mode: str
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    with ThreadPoolExecutor() as pool:
        moving = begin(pool, engine, other)
        asks = other.topic("orders").producer_async(mode)
        with pytest.raises(xl.ProducerFencedError):
            topic.producer(EXCLUSIVE)  # elsewhere, it is refused
        assert not asks.done()
        release(released, engine)
        assert asks.result(PATIENCE).send(b"x") == 0
        [move] = moving.result(PATIENCE)
    # A shared producer ends the hand-over, which may be seen before it or after it.
    assert (move.ok or mode == SHARED, owner.state) == (True, "moved")
    assert topic.epoch == (1 if mode == SHARED else 2)


@pytest.mark.rule("E3")
def test_e3_a_waiter_of_the_destination_comes_first(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, released: threading.Event
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    waiter = other.topic("orders").producer_async(WAIT)
    with ThreadPoolExecutor() as pool:
        moving = begin(pool, engine, other)
        with pytest.raises(xl.ProducerFencedError):
            other.topic("orders").producer(EXCLUSIVE)
        release(released, engine)
        assert moving.result(PATIENCE)[0].ok
    assert (owner.state, waiter.result(PATIENCE).topic_epoch) == ("moved", 2)


@pytest.mark.rule("E3", "E4")
def test_e3_a_request_is_refused_once_the_move_is_cancelled(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, released: threading.Event
) -> None:
    owner = topic.producer(EXCLUSIVE, name="owner")
    with ThreadPoolExecutor() as pool:
        moving = begin(pool, engine, other)
        asks = other.topic("orders").producer_async(EXCLUSIVE)
        assert engine.cancel_unload("orders") == ["orders"]
        with pytest.raises(xl.ProducerFencedError, match="producer 'owner'"):
            asks.result(PATIENCE)
        assert not moving.result(PATIENCE)[0].ok
    assert owner.state == "open"
    assert told(engine)[1:] == [("releasing", "unload", 1), ("cancel", "cancelled", 1)]


@pytest.mark.rule("E3", "D5")
def test_e3_a_request_waits_no_longer_than_its_timeout(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, released: threading.Event
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    with ThreadPoolExecutor() as pool:
        moving = begin(pool, engine, other)
        with pytest.raises(xl.WaitTimeoutError, match=r"took longer than timeout=0\.1 s: topic"):
            other.topic("orders").producer(EXCLUSIVE, timeout=0.1)
        future = other.topic("orders").producer_async(EXCLUSIVE)
        assert future.cancel()
        release(released, engine)
        assert moving.result(PATIENCE)[0].state == "assigned"
    assert (owner.state, topic.owner, topic.waiters) == ("moved", None, [])


# ---- E4: destinations that die, and moves that are repeated ------------------------------


@pytest.mark.rule("E4", "E5")
def test_e4_a_topic_is_not_released_to_a_dead_engine(
    topic: xl.Topic, engine: xl.Engine, path: str, released: threading.Event
) -> None:
    """Whoever asked for the move has died, too: nobody but the source can notice."""
    owner = topic.producer(EXCLUSIVE, follow=False)
    gone, caller = xl.open(path), xl.open(path)
    moving = caller.unload_async("orders", to=gone.id, timeout=PATIENCE)
    until(lambda: topic.transfer)
    caller.close()
    assert moving.exception(PATIENCE) is not None
    gone.close()
    release(released, engine)
    until(lambda: ("cancel", NO_DESTINATION, 1) in told(engine) or owner.state != "open")
    assert (owner.state, owner.send(b"x")) == ("open", 0)


@pytest.mark.rule("E4", "E5")
def test_e4_a_move_to_another_engine_follows_one_whose_destination_has_died(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, path: str
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    with xl.open(path) as gone:
        assert engine.unload("orders", to=gone.id, timeout=PATIENCE)[0].ok
    [move] = engine.unload("orders", to=other.id, timeout=PATIENCE)
    assert (move.ok, move.target.name, owner.state) == (True, "other", "moved")
    with other.topic("orders").producer(EXCLUSIVE) as new:
        assert new.topic_epoch == 2
    assert told(engine)[1:] == [
        ("releasing", "unload", 1),
        ("release", "hand-over", 1),
        ("assigned", "unload", 1),
        ("cancel", NO_DESTINATION, 1),
        ("assigned", "unload", 1),
        ("grant", "hand-over", 2),
        ("release", "closed", 2),
    ]


@pytest.mark.rule("E4")
@pytest.mark.parametrize("again", [0.0, 2 * PATIENCE])
def test_e4_repeating_a_move_takes_nothing_from_it(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, again: float
) -> None:
    """The second call has less time than the first, or more."""
    owner = topic.producer(EXCLUSIVE, follow=False)
    assert engine.unload("orders", to=other.id, timeout=PATIENCE)[0].ok
    [before] = topic.transfers
    assert engine.unload("orders", to=other.id, timeout=again)[0].ok
    [after] = topic.transfers
    assert after.until == before.until if again < PATIENCE else after.until > before.until
    assert (owner.state, other.topic("orders").producer(EXCLUSIVE).topic_epoch) == ("moved", 2)
    assert [step for step in told(engine) if step[1] == "unload"] == [
        ("releasing", "unload", 1),
        ("assigned", "unload", 1),
    ]


@pytest.mark.rule("E4")
def test_e4_the_deadline_of_a_repeated_move_does_not_end_the_first(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine, released: threading.Event
) -> None:
    owner = topic.producer(EXCLUSIVE, follow=False)
    with ThreadPoolExecutor() as pool:
        moving = begin(pool, engine, other)
        [move] = engine.unload("orders", to=other.id, timeout=0)
        assert (move.state, move.reason) == ("failed", "deadline")
        release(released, engine)
        assert (moving.result(PATIENCE)[0].state, owner.state) == ("assigned", "moved")


# ---- E5: what history tells --------------------------------------------------------------


@pytest.mark.rule("E5")
def test_e5_history_tells_the_steps_of_a_move_and_why_it_failed(
    topic: xl.Topic, engine: xl.Engine, other: xl.Engine
) -> None:
    owner = topic.producer(EXCLUSIVE, name="owner", priority=3, follow=False)
    assert engine.unload("orders", to=other.id, timeout=PATIENCE)[0].ok
    rival = topic.producer(FENCING, name="rival")
    assert (owner.state, rival.state) == ("moved", "open")
    releasing, released, assigned, cancel, grant = list(engine.history("orders"))[1:]
    assert [event.kind for event in (releasing, released, assigned, cancel, grant)] == [
        *("releasing", "release", "assigned", "cancel", "grant")
    ]
    for event in (releasing, assigned, cancel):
        assert event.target is not None
        assert (event.target["engine_name"], event.target["producer"]) == ("other", None)
    for event in (releasing, released, assigned):
        assert event.source is not None
        assert (event.source["producer"], event.priority, event.epoch) == ("owner", 3, 1)
    assert (cancel.reason, cancel.source, cancel.epoch) == ("another owner came first", None, 1)
    assert (grant.reason, grant.epoch) == ("fencing", 2)


# ---- E4: records that come late ----------------------------------------------------------


ASSIGN = Assign(5, 7, "there", "there", 1, {}, 10, 100)


@pytest.mark.rule("E4")
@pytest.mark.parametrize("late", [ASSIGN, replace(ASSIGN, until=200)], ids=["a copy", "more time"])
@pytest.mark.parametrize("end", ["withdrawn", "granted"])
def test_e4_nothing_revives_a_hand_over_that_has_ended(late: Assign, end: str) -> None:
    waiters = Waiters()
    waiters.take(ASSIGN, 7)
    assert waiters.assigned == ASSIGN
    if end == "withdrawn":
        waiters.take(Unassign(5, "cancelled"), 7)
    else:
        holder = Holder("there", "there", 1, "p", AccessMode.EXCLUSIVE, since=20)
        waiters.granted(Grant(2, 0, 8, holder), 7, was_owned=False)
    again = Waiters()
    for record in waiters.records():
        again.take(record)
    for each in (waiters, again):  # also from a checkpoint
        each.take(late, 7)
        assert each.assigned is None


@pytest.mark.rule("E4")
def test_e4_a_hand_over_is_void_if_another_owner_has_come_meanwhile() -> None:
    waiters = Waiters()
    waiters.take(ASSIGN, 9)
    assert waiters.assigned is None
    waiters.take(ASSIGN, 0)
    assert waiters.assigned is None


@pytest.mark.rule("H2")
def test_h2_a_withdrawal_of_an_earlier_version_is_understood() -> None:
    waiters = Waiters()
    waiters.take(ASSIGN, 7)
    waiters.take(decode(sealed(MAGIC, VERSION, msgpack.packb(["u", 5]))), 7)
    assert waiters.assigned is None
