"""Rules E1, E4, F5 and F6: the claims of groups move with their topic.

The reader of a group that is named, or the claim on the topic's name in it, loses it in the
very transaction that assigns the topic to its destination, and is told who that is. Where the
move comes to nothing, claims stay, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import signal
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.handovers import (
    KEEPALIVE,
    KILLED,
    POINTS,
    HeldUp,
    Quick,
    at_once,
    begin,
    fall_at,
    freeze,
    moved,
    queue_up,
    quick_workers,
    steps,
    take_writer_lock,
    thaw,
)
from testing.processes import (
    EXCLUSIVE,
    PATIENCE,
    SHARED,
    WAIT,
    Failed,
    State,
    open_producer,
    rows,
    send,
    until,
    within,
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append

FENCED, LOST = xl.ReaderFencedError, xl.OwnershipLostError
GROUP = "billing"


def join(state: State, group: str = GROUP) -> int:
    """Become the reader of the topic in this group; where it goes on."""
    state.kept["reader"] = reader = state.topic.reader(group=group)
    return reader.position


def commit(state: State) -> None:
    """Commit the cursor at the position."""
    state.kept["reader"].commit()


def read_and_commit(state: State) -> bytes:
    """Read a message, and commit the cursor behind it."""
    message = state.kept["reader"].read_next(timeout=PATIENCE)
    state.kept["reader"].commit()
    return bytes(message.value)


def claim(state: State, group: str, resources: dict[str, int | None]) -> dict[str, int]:
    """Claim resources; their generations."""
    state.kept["claim"] = state.engine.own(group, resources)
    return state.kept["claim"].generations


def check_claim(state: State) -> None:
    """Is the claim valid?"""
    state.kept["claim"].check()


def successor(state: State, call: Callable[[State], Any]) -> tuple[str, str, int, dict[str, str]]:
    """Who has what was lost, by the error that `call(state)` raises."""
    with pytest.raises((FENCED, LOST)) as error:
        call(state)
    new = error.value.successor  # type: ignore[attr-defined]
    return new.id, new.name, new.pid, dict(new.properties)


def unload(state: State, to: str, groups: Any = (GROUP,), timeout: float = 20.0) -> Any:
    """(topic, state) of the moves."""
    return moved(state.engine.unload("orders", to, timeout, groups=groups))


def party(worker: Quick) -> tuple[str, str, int, dict[str, str]]:
    """What an error says about a worker with these properties."""
    return worker.id, "destination", worker.pid, {"address": "unix:/d"}


@pytest.mark.parametrize("owned", ["by the source", "by another", "by nobody", "already there"])
def test_e1_a_group_s_reader_moves_with_the_topic(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], owned: str
) -> None:
    """Wherever the topic is: the reader goes where it goes, and on from the same cursor."""
    source = quick("source")
    destination = quick("destination", properties={"address": "unix:/d"})
    with topic.producer() as producer:
        producer.send_many([b"a", b"b"])
    owner = {
        "by the source": source,
        "by another": quick("another"),
        "already there": destination,
    }.get(owned)
    if owner is not None:
        owner.call(open_producer, EXCLUSIVE)
    source.call(join)
    assert source.call(read_and_commit) == b"a"
    [(_, state)] = quick("third").call(unload, destination.id)
    assert state == ("owned" if owned == "already there" else "assigned")
    assert source.call(successor, commit) == party(destination)
    with pytest.raises(Failed, match=r"ReaderFencedError.*handed over with its topic to engine 'd"):
        source.call(read_and_commit)
    assert destination.call(join) == 1
    assert destination.call(read_and_commit) == b"b"
    assert source.call(successor, commit) == party(destination)
    assert ("moved", f"group {GROUP}") in steps(engine.history("orders"))


def test_e1_claims_on_the_topic_s_name_move_and_others_stay(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """A claim session is lost as a whole; other groups, and other topics, are not touched."""
    source = quick("source")
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(open_producer, EXCLUSIVE)
    source.call(claim, "a", {"orders": 7, "ledger": None})
    stays = engine.own("b", {"orders": None})
    other = engine.own("a", {"else": None})
    assert source.call(unload, destination.id, ["a", "a", "nobody's"]) == [("orders", "assigned")]
    assert source.call(successor, check_claim) == party(destination)
    assert (stays.is_valid, other.is_valid) == (True, True)
    found = destination.call(claim, "a", {"orders": None, "ledger": None})
    assert found == {"orders": 8, "ledger": 2}


def test_e1_what_the_destination_has_claimed_stays(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    topic.producer(EXCLUSIVE)
    destination.call(join)
    destination.call(claim, "a", {"orders": None})
    assert (
        moved(engine.unload("orders", to=destination.id, groups=[GROUP, "a"]))[0][1] == "assigned"
    )
    destination.call(commit)
    destination.call(check_claim)


def test_f5_a_claim_that_another_has_taken_names_no_successor(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    mine, reader = engine.own("a", {"orders": None}), topic.reader(group=GROUP)
    destination.call(claim, "a", {"orders": None})
    destination.call(join)
    engine.unload("orders", to=destination.id, groups=[GROUP, "a"])
    with pytest.raises(LOST) as lost:
        mine.check()
    with pytest.raises(FENCED) as fenced:
        reader.commit()
    assert (lost.value.successor, fenced.value.successor) == (None, None)


def test_f5_what_is_bound_to_a_claim_that_moves_ends_with_it(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    """A waiter of the very topic that moves, and a producer of another one; and the holder is told
    without asking."""
    destination = quick("destination", properties={"address": "unix:/d"})
    told: queue.Queue[tuple[xl.Claim, xl.OwnershipLostError]] = queue.Queue()
    lost = engine.own("a", {"orders": None}, on_lost=lambda *call: told.put(call))
    owner = topic.producer(EXCLUSIVE)
    waiter = topic.producer_async(WAIT, claim=lost)
    elsewhere = engine.topic("elsewhere").producer(SHARED, claim=lost)
    other = topic.producer_async(WAIT)
    assert moved(engine.unload("orders", to=destination.id, groups=["a"]))[0][1] == "assigned"
    who, error = told.get(timeout=PATIENCE)
    assert who is lost
    assert isinstance(error.successor, xl.EngineInfo)
    assert error.successor.id == destination.id
    for revoked in (lambda: waiter.result(PATIENCE), lambda: elsewhere.send(b"x")):
        with pytest.raises(xl.ProducerRevokedError):
            revoked()
    with pytest.raises(xl.ProducerMovedError):
        owner.send(b"x")
    assert [waiting.engine_name for waiting in topic.waiters] == [engine.name]
    assert destination.call(open_producer, EXCLUSIVE) == topic.epoch == 2
    destination.kill()
    assert other.result(PATIENCE).topic_epoch == 3


def test_f6_a_reader_of_several_topics_moves_as_a_whole(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    with topic.producer(SHARED) as producer:
        producer.send(b"a")
    engine.topic("payments")
    reader = engine.reader(["orders", "payments"], group=GROUP)
    assert reader.read_next(timeout=PATIENCE)[1].value == b"a"
    engine.unload("orders", to=destination.id, groups=[GROUP])
    with pytest.raises(FENCED, match="handed over with its topic") as fenced:
        reader.commit()
    assert fenced.value.successor.id == destination.id
    assert destination.call(join) == 0
    assert engine.topic("payments").reader(group=GROUP).position == 0


@pytest.mark.parametrize(
    ("groups", "error"), [(["x" * 241], ValueError), ([1], TypeError), ([""], ValueError)]
)
def test_e1_wrong_groups_change_nothing(
    engine: xl.Engine, topic: xl.Topic, groups: Any, error: type[Exception]
) -> None:
    before = rows(engine)
    for call in (engine.unload, engine.unload_async):
        with pytest.raises(error, match="group"):
            call("orders", to=engine.id, groups=groups)
    assert rows(engine) == before


def test_e1_a_single_name_is_one_group(engine: xl.Engine, topic: xl.Topic, path: str) -> None:
    with xl.open(path, name="b") as b:
        reader = topic.reader(group=GROUP)
        engine.unload("orders", to=b.id, groups=GROUP)
        with pytest.raises(FENCED):
            reader.commit()


def test_e2_claims_move_only_once_the_source_has_released_the_topic(path: str) -> None:
    """What the source has begun with its claim it can finish: consume, process, produce."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        topic = a.topic("orders")
        owner, reader = topic.producer(EXCLUSIVE), topic.reader(group=GROUP)
        owner.send(b"x")
        with HeldUp(a) as release:
            moving = begin(functools.partial(a.unload, groups=[GROUP]), "orders", b.id)
            release.await_it()
            assert topic.transfer.groups == (GROUP,)
            reader.read_next(timeout=1)
            reader.commit()
            release.go_on()
            assert moving.result(PATIENCE)[0].ok
        with pytest.raises(FENCED) as error:
            reader.commit()
        assert error.value.successor.id == b.id
        assert b.topic("orders").reader(group=GROUP).position == 1


def test_f6_a_reader_that_waits_for_messages_learns_where_its_group_went(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source = quick("source")
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(join)
    source.start(successor, read_and_commit)
    assert not source.answered(0.2)
    engine.unload("orders", to=destination.id, groups=[GROUP])
    assert source.answer() == party(destination)


def test_f6_a_transaction_with_a_moved_cursor_commits_nothing_and_says_where_it_went(
    engine: xl.Engine, topic: xl.Topic, path: str
) -> None:
    with xl.open(path, name="b") as b:
        out = engine.topic("out").producer(EXCLUSIVE)
        reader = topic.reader(group=GROUP)
        transaction = engine.transaction()
        out.send(b"result", transaction=transaction)
        transaction.commit_cursor(reader)
        engine.unload("orders", to=b.id, groups=[GROUP])
        with pytest.raises(FENCED) as error:
            transaction.commit()
        assert error.value.successor.id == b.id
        assert (transaction.state, engine.topic("out").next_offset) == ("aborted", 0)


def test_e1_groups_move_with_a_shared_producer_that_moves_alone(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source = quick("source")
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(open_producer, SHARED, name="p")
    beside = topic.producer(SHARED)
    source.call(join)
    [move] = engine.unload("orders", to=destination.id, producer="p", groups=[GROUP])
    assert move.ok
    assert source.call(successor, commit) == party(destination)
    assert beside.send(b"x") == 0


def test_e1_an_awaited_unload_takes_groups_along(path: str) -> None:
    async def scene() -> str:
        async with aio.open(path, "a") as a, aio.open(path, "b") as b:
            reader = await a.topic("orders").reader(group=GROUP)
            await a.unload("orders", b.id, groups=[GROUP])
            with pytest.raises(FENCED) as error:
                await reader.commit()
            return error.value.successor.name

    assert asyncio.run(asyncio.wait_for(scene(), PATIENCE)) == "b"


# ---- E4 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deadline", "cancelled", "destination"])
def test_e4_claims_stay_where_the_move_comes_to_nothing(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], how: str
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    source.call(join)
    source.call(claim, "a", {"orders": None})
    freeze(source)
    seconds = 0.4 if how == "deadline" else PATIENCE
    call = functools.partial(engine.unload, groups=[GROUP, "a"])
    moving = begin(call, "orders", destination.id, seconds)
    until(lambda: rows(engine)["transfers"] or moving.done())  # the deadline may be over
    if how == "cancelled":
        engine.cancel_unload("orders")
    elif how == "destination":
        destination.kill()
        thaw(source)
    assert moved(moving.result(PATIENCE)) == [("orders", "failed")]
    if how != "destination":
        thaw(source)
    source.call(commit)
    source.call(check_claim)
    assert source.call(send, b"mine") == 0


def test_e4_a_source_that_hung_while_its_claims_moved_learns_the_successor(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source = quick("source")
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(open_producer, EXCLUSIVE)
    source.call(join)
    freeze(source, KEEPALIVE)
    [move] = engine.unload("orders", to=destination.id, groups=[GROUP])
    assert move.state == "assigned"
    assert destination.call(join) == 0
    thaw(source)
    assert source.call(successor, commit) == party(destination)


def test_e4_repeating_the_call_takes_groups_along_that_it_names_only_then(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source = quick("source", keepalive=None)
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(open_producer, EXCLUSIVE)
    source.call(join)
    source.call(claim, "a", {"orders": None})
    freeze(source)
    moving = begin(engine.unload, "orders", destination.id, PATIENCE)
    until(lambda: topic.transfer is not None)
    again = begin(functools.partial(engine.unload, groups=[GROUP]), "orders", destination.id)
    until(lambda: topic.transfer is not None and topic.transfer.groups == (GROUP,))
    thaw(source)
    assert [f.result(PATIENCE)[0].state for f in (moving, again)] == ["assigned"] * 2
    assert source.call(successor, commit) == party(destination)
    source.call(check_claim)
    engine.unload("orders", to=destination.id, groups="a")
    assert source.call(successor, check_claim) == party(destination)


class Round:
    """The topic moves with its reader; somebody falls. The topic and the claim have moved
    together, or neither has."""

    def __init__(self, path: str, make: Callable[..., Quick]) -> None:
        self.engine = xl.open(path, name="bystander")
        self.topic = self.engine.topic("orders")
        self.make, self.cast = make, dict[str, Quick]()

    def player(self, role: str) -> Quick:
        if role not in self.cast:
            self.cast[role] = self.make(role)
        return self.cast[role]

    def play(self, name: str, asks: str, sign: int) -> None:
        point, stops = POINTS[name], sign == signal.SIGSTOP
        role = asks if point.role == "coordinator" else point.role
        falling = self.player(role)
        source, destination, asking = map(self.player, ("source", "destination", asks))
        source.call(open_producer, EXCLUSIVE)
        source.call(join)
        destination.call(queue_up)
        known = len(list(self.engine.history("orders")))
        falling.call(fall_at, name, sign)
        asking.start(unload, destination.id, (GROUP,), 3.0)
        if stops:
            falling.await_strike()
        else:
            falling.process.join(PATIENCE)
            assert falling.process.exitcode in KILLED
            del self.cast[role]
        if asking is not falling:
            asking.answer()
        until(lambda: self.engine.backend.hand_over.transfers(self.topic.id) == [])
        with self.engine.ledger.write_exclusive():
            pass  # a release that began before the deadline may be committed after it
        self.judge(source, falling, list(self.engine.history("orders"))[known:])
        if stops:
            falling.signal(signal.SIGCONT)
            if falling is asking:
                with contextlib.suppress(Failed):
                    falling.answer()
        self.go_home()

    def judge(self, source: Quick, falling: Quick, told: list[xl.Event]) -> None:
        has_moved = any(event.kind == "assigned" for event in told)
        assert has_moved == any(event.kind == "moved" for event in told)
        if source is not falling:
            if has_moved:
                source.call(successor, commit)
            else:
                source.call(commit)
        with self.topic.reader(group=GROUP) as reader:  # the group is not blocked
            within(reader.commit)
            if source is not falling:
                with pytest.raises(Failed, match="ReaderFencedError"):
                    source.call(commit)

    def go_home(self) -> None:
        for worker in self.cast.values():
            worker.end()
        self.cast.clear()
        with within(lambda: self.topic.producer(WAIT)) as producer:
            producer.send(b"x")


def play(path: str, asks: str, names: list[str], sign: int) -> None:
    """A round for each point."""
    with quick_workers(path) as make:
        rounds = Round(path, make)
        try:
            for name in names:
                try:
                    rounds.play(name, asks, sign)
                except BaseException as error:
                    error.add_note(f"{name}; {asks=}")
                    raise
            assert rounds.engine.verify().ok
            assert rows(rounds.engine)["transfers"] == []
        finally:
            for worker in rounds.cast.values():
                worker.end()
            rounds.engine.close()


ROLES = ["coordinator", "source", "destination"]


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_e4_killed_at_any_step_topic_and_claim_move_together_or_stay(path: str, role: str) -> None:
    names = [name for name, point in POINTS.items() if point.role == role]
    at_once(
        *[
            functools.partial(play, f"{path}-{asks}", asks, names, signal.SIGKILL)
            for asks in ("source", "third")
        ]
    )


@pytest.mark.long
@pytest.mark.parametrize("role", ROLES)
def test_e4_stopped_at_any_step_topic_and_claim_move_together_or_stay(path: str, role: str) -> None:
    names = [name for name, p in POINTS.items() if p.role == role and not p.inside]
    at_once(
        *[
            functools.partial(play, f"{path}-{lane}", "third", names[lane::2], signal.SIGSTOP)
            for lane in range(2)
        ]
    )


def test_e4_a_destination_that_waits_has_topic_and_claim(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source"), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    source.call(join)
    destination.call(queue_up)
    assert source.call(unload, destination.id) == [("orders", "owned")]
    assert destination.call(take_writer_lock) == 2
    assert destination.call(join) == 0
    destination.call(commit)
