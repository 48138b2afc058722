"""Rules E1 and E4: a move that is begun without waiting for its end, and what can be seen of it.

`unload_async` returns once the move has begun. Its future can be polled, awaited and cancelled. If
the process that has the future dies, the move continues, or ends at its deadline. Meanwhile
`topic.transfer`, the command and the listings show the move, its destination and its deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.handovers import (
    POINTS,
    Chronicle,
    HeldUp,
    Quick,
    Stage,
    at_once,
    begin,
    freeze,
    moved,
    queue_up,
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
)

pytestmark = pytest.mark.once  # durability changes appends, not who may append


def begin_unload(state: State, to: str, timeout: float = 20.0) -> list[tuple[str, str]]:
    """Begin the move, and keep its future; how it stands."""
    state.kept["moving"] = state.engine.unload_async("orders", to, timeout)
    return moved(state.kept["moving"].moves())


def end_unload(state: State) -> list[tuple[str, str]]:
    """What became of it."""
    return moved(state.kept["moving"].result(PATIENCE))


# ---- the future --------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "reserved"])
def test_e1_a_move_can_be_begun_without_waiting_for_its_end(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], waiting: bool
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    if waiting:
        destination.call(queue_up)
    freeze(source)
    future = engine.unload_async("orders", to=destination.id, timeout=PATIENCE)
    assert topic.transfer.state == "releasing"  # it has begun
    assert (future.done(), moved(future.moves())) == (False, [("orders", "releasing")])
    with pytest.raises(TimeoutError):
        future.result(timeout=0.1)
    called: list[Any] = []
    future.add_done_callback(called.append)
    thaw(source)
    [move] = future.result(PATIENCE)
    assert move.state == ("owned" if waiting else "assigned")
    assert (move.source.engine_id, move.target.id) == (source.id, destination.id)
    until(lambda: called == [future])
    assert (future.cancel(), future.exception(), future.moves()) == (False, None, [move])
    assert concurrent.futures.wait([future], 1).done == {future}


@pytest.mark.long
@pytest.mark.usefixtures("only_who_sends_follows")
def test_e1_hundreds_of_topics_are_begun_and_arrive(engine: xl.Engine, path: str) -> None:
    names = [f"t{number:03}" for number in range(600)]
    producers = [engine.topic(name).producer(EXCLUSIVE) for name in names]
    with xl.open(path, name="b") as b:
        future = engine.unload_async("t*", to=b.id, timeout=PATIENCE)
        assert moved(future.result(PATIENCE)) == [(name, "assigned") for name in names]
        assert {each._session.engine for each in producers} == {engine.id}


def test_e1_what_is_refused_is_refused_at_once(engine: xl.Engine, topic: xl.Topic) -> None:
    before = rows(engine)
    for error, call in (
        (xl.LedgerError, lambda: engine.unload_async("orders", to="f" * 16)),
        (xl.TopicNotFoundError, lambda: engine.unload_async("nothing", to=engine.id)),
        (xl.TopicNotFoundError, lambda: engine.unload_async(["nothing"], to=engine.id)),
        (ValueError, lambda: engine.unload_async("orders", to=engine.id, timeout=-1)),
        (TypeError, lambda: engine.unload_async(7, to=engine.id)),  # type: ignore[arg-type]
    ):
        with pytest.raises(error):
            call()
    assert rows(engine) == before
    with xl.open(engine.path, readonly=True) as reading, pytest.raises(xl.LedgerError):
        reading.unload_async("orders", to=engine.id)
    assert engine.unload_async([], to=engine.id).result(PATIENCE) == []


def test_e4_a_cancelled_move_leaves_the_topic_to_its_owner(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    mine = engine.topic("mine").producer(EXCLUSIVE)
    freeze(source)
    future = engine.unload_async(["orders", "mine"], to=destination.id, timeout=PATIENCE)
    until(lambda: mine.state == "moved")
    assert future.cancel()
    assert (future.cancelled(), future.done(), future.cancel()) == (True, True, True)
    assert topic.transfer is None  # when cancel returns
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    thaw(source)
    assert source.call(send, b"mine") == 0
    assert steps(engine.history("orders"))[-1] == ("cancel", "cancelled")
    assert mine.state == "moved"  # what has been released is the destination's
    assert engine.topic("mine").transfer.state == "assigned"


def test_e4_a_begun_move_ends_at_its_deadline(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    future = engine.unload_async("orders", to=destination.id, timeout=0.4)
    assert moved(future.result(PATIENCE)) == [("orders", "failed")]
    assert topic.transfer is None
    thaw(source)
    assert source.call(send, b"mine") == 0


@pytest.mark.long
def test_e4_a_cancel_that_races_with_the_release_is_one_or_the_other(path: str) -> None:
    """Sixty rounds."""
    with xl.open(path, name="a") as a, xl.open(path, name="b") as b:
        topic, chronicle = a.topic("orders"), Chronicle(a)
        for _ in range(60):
            owner = topic.producer(EXCLUSIVE, follow=False)
            with HeldUp(a) as release:
                future = a.unload_async("orders", to=b.id, timeout=PATIENCE)
                release.await_it()
                cancelled, _ = at_once(future.cancel, release.go_on)
            if cancelled:
                until(lambda: owner.state in ("open", "moved"))  # noqa: B023
            else:
                assert moved(future.result(PATIENCE)) == [("orders", "assigned")]
                assert owner.state == "moved"
            a.cancel_unload("orders")
            owner.close()
            chronicle.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_e4_a_begun_move_goes_on_without_its_coordinator(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], number: int
) -> None:
    source, destination, third = quick("source", keepalive=None), quick("destination"), quick("3")
    source.call(open_producer, EXCLUSIVE)
    destination.call(queue_up)
    freeze(source)
    assert third.call(begin_unload, destination.id) == [("orders", "releasing")]
    third.kill() if number == signal.SIGKILL else freeze(third)
    thaw(source)
    assert destination.call(take_writer_lock) == 2
    assert destination.call(send, b"mine") == 0
    with pytest.raises(Failed, match="ProducerMovedError"):
        source.call(send, b"late")
    if number == signal.SIGSTOP:
        thaw(third)
        assert third.call(end_unload) == [("orders", "owned")]


def test_e4_closing_the_coordinator_ends_its_future(
    path: str, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    third = xl.open(path)
    future = third.unload_async("orders", to=destination.id, timeout=PATIENCE)
    third.close()
    assert isinstance(future.exception(PATIENCE), xl.EngineClosedError)
    thaw(source)
    until(lambda: topic.transfer is None or topic.transfer.state == "assigned")


def test_c5_a_forked_child_does_not_wait_for_its_parent_s_move(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)
    freeze(source)
    future = engine.unload_async("orders", to=destination.id, timeout=PATIENCE)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            future.result()
        except xl.EngineClosedError:
            os.write(theirs, b"closed")
        finally:
            os._exit(0)
    os.close(theirs)
    reading = begin(os.read, ours, 16)
    try:
        assert reading.result(PATIENCE) == b"closed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
    thaw(source)
    assert moved(future.result(PATIENCE)) == [("orders", "assigned")]


class Beginning(Stage):
    """A stage on which no call waits for the end of the move."""

    def _ask(self, asks: str, heir: bool) -> Quick:
        destination, asking = self.cast("destination"), self.cast(asks)
        asking.start(begin_and_await, destination.id)
        return asking


def begin_and_await(state: State, to: str) -> list[tuple[str, str]]:
    """Begin the move; its outcome."""
    begin_unload(state, to)
    return end_unload(state)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("role", ["coordinator", "source"])
def test_e4_a_death_at_any_step_of_a_begun_move(path: str, role: str, number: int) -> None:
    stops = number == signal.SIGSTOP
    names = [n for n, p in POINTS.items() if p.role == role and not (stops and p.inside)]
    with Beginning(path) as stage:
        for name in names:
            for waiting in (True, False):
                try:
                    stage.play(name, "third", waiting, number)
                except BaseException as error:
                    error.add_note(f"in round {stage.rounds}: {name}; {waiting=}")
                    raise
        assert stage.engine.verify().ok
        assert rows(stage.engine)["transfers"] == []
        assert stage.chronicle.check(stage.notes) > 0


# ---- asyncio -----------------------------------------------------------------------------


def test_e1_an_awaitable_move_is_begun_awaited_and_cancelled(
    path: str, quick: Callable[..., Quick]
) -> None:
    source, destination = quick("source", keepalive=None), quick("destination")
    source.call(open_producer, EXCLUSIVE)

    async def scene() -> list[str]:
        async with aio.open(path, "third") as engine:
            topic = engine.topic("orders")
            await asyncio.to_thread(freeze, source)
            moving = await engine.unload_async("orders", to=destination.id, timeout=PATIENCE)
            assert topic.transfer.state == "releasing"
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            assert topic.transfer is None
            waiting = asyncio.ensure_future(engine.unload("orders", destination.id, PATIENCE))
            while topic.transfer is None:
                await asyncio.sleep(0.01)
            waiting.cancel()  # so is one that is awaited
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert topic.transfer is None
            moving = await engine.unload_async("orders", to=destination.id, timeout=PATIENCE)
            await asyncio.to_thread(thaw, source)
            states = [move.state for move in await moving]
            assert await engine.cancel_unload("orders") == ["orders"]
            return states

    assert asyncio.run(asyncio.wait_for(scene(), PATIENCE)) == ["assigned"]


# ---- what can be seen --------------------------------------------------------------------


def test_e1_a_topic_says_how_its_transfer_stands(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source = quick("source", keepalive=None)
    destination = quick("destination", properties={"address": "unix:/d"})
    assert (topic.transfer, topic.transfers) == (None, [])
    source.call(open_producer, EXCLUSIVE, name="p")
    owner = topic.owner
    freeze(source)
    before = time.time()
    future = engine.unload_async("orders", to=destination.id, timeout=PATIENCE, groups=["g"])
    begun = time.time()
    seen = topic.transfer
    assert (seen.topic, seen.state, seen.source, seen.producer) == (
        "orders",
        "releasing",
        owner,
        None,
    )
    found = (seen.target.id, seen.target.name, seen.target.pid)
    assert found == (destination.id, "destination", destination.pid)
    assert (seen.target.properties, seen.groups) == ({"address": "unix:/d"}, ("g",))
    until(lambda: before - 1 < topic.transfer.until / 1000 - PATIENCE < begun + 1)
    thaw(source)
    future.result(PATIENCE)
    with xl.open(engine.path, readonly=True) as reading:
        seen = reading.topic("orders").transfer
    assert (seen.state, seen.source, seen.target.id) == ("assigned", None, destination.id)
    assert [each.state for each in topic.transfers] == ["assigned"]
    destination.call(open_producer, EXCLUSIVE)
    assert (topic.transfer, topic.transfers) == (None, [])


@pytest.mark.parametrize("end", ["deadline", "killed", "cancelled", "taken"])
def test_e4_a_transfer_that_is_over_is_not_shown(
    engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick], end: str
) -> None:
    """Also if its row has not been removed yet."""
    destination = quick("destination")
    engine.unload("orders", to=destination.id, timeout=0.5 if end == "deadline" else PATIENCE)
    if end == "killed":
        destination.kill()
    elif end == "cancelled":
        engine.cancel_unload("orders")
    elif end == "taken":
        kept = topic.producer("exclusive_with_fencing")
        assert kept.topic_epoch == 1
    until(lambda: topic.transfer is None, PATIENCE / 2)


def run(*arguments: str) -> str:
    """What the `exclusivelog` command prints."""
    command = [sys.executable, "-m", "exclusivelog.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_e1_the_command_shows_transfers(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    source = quick("source", keepalive=None)
    destination = quick("destination", properties={"address": "unix:/d"})
    source.call(open_producer, EXCLUSIVE, name="p")
    seat = engine.topic("shared").producer(SHARED, name="s")
    assert seat.move(to=destination.id, timeout=PATIENCE).ok
    waiter = topic.producer_async(WAIT, name="w")
    freeze(source)
    future = engine.unload_async("orders", to=destination.id, timeout=PATIENCE, groups=["g"])
    table = [line.split("\t") for line in run("owners", path).splitlines()]
    assert [row[:3] for row in table[1:]] == [
        ["orders", "holds", "p"],
        ["orders", "releasing", "p"],
        ["orders", "waits", "w"],
        ["shared", "assigned", "s"],
    ]
    assert table[2][6:9] == ["destination", destination.id, str(destination.pid)]
    assert table[2][9].startswith("until 20")
    found = [json.loads(line) for line in run("owners", path, "--json").splitlines()]
    assert [(each["topic"], each["state"]) for each in found] == [
        ("orders", "holds"),
        ("orders", "releasing"),
        ("orders", "waits"),
        ("shared", "assigned"),
    ]
    moving = found[1]
    got = (moving["engine_id"], moving["engine_properties"])
    assert got == (destination.id, {"address": "unix:/d"})
    assert (moving["from"]["producer"], moving["from"]["engine_id"]) == ("p", source.id)
    assert (moving["groups"], abs(moving["until"] - topic.transfer.until) < 1000) == (["g"], True)
    thaw(source)
    future.result(PATIENCE)
    kinds = [
        json.loads(line)["kind"]
        for line in run("owners", path, "orders", "--history", "--json").splitlines()
    ]
    assert kinds == ["grant", "releasing", "release", "assigned"]
    assert not waiter.done()


def test_e1_the_command_moves_groups_and_one_producer(
    path: str, engine: xl.Engine, topic: xl.Topic, quick: Callable[..., Quick]
) -> None:
    destination = quick("destination")
    one, two = (topic.producer(SHARED, name=name, follow=False) for name in ("one", "two"))
    reader = topic.reader(group="g")
    arguments = ("unload", path, "orders", "--to", "destination", "--producer", "one")
    assert "assigned" in run(*arguments, "--group", "g")
    with pytest.raises(xl.ReaderFencedError) as error:
        reader.commit()
    assert error.value.successor.id == destination.id
    assert (one.state, two.state) == ("moved", "open")
