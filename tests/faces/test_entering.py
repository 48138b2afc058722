"""`with` on an object that is over raises, as its other calls do: a block that relies on a lock, a
claim or a producer does not run without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.local.storage.ledger import Ledger
from testing.handovers import begin
from testing.processes import PATIENCE, until

pytestmark = pytest.mark.once
LOST, CLOSED = xl.OwnershipLostError, xl.EngineClosedError


def map_on(engine: xl.Engine) -> Any:
    return xl.SharedMap(engine.topic("map"))


# What it is, how it is opened, and the error of a `with` after it was closed.
OBJECTS: dict[str, tuple[Callable[[xl.Engine], Any], type[Exception], str]] = {
    "lock": (lambda e: e.lock("a"), LOST, "lock 'a' was closed; request it again with engine.lock"),
    "role": (lambda e: e.role("a"), LOST, "role 'a' was closed; .* engine.role"),
    "claim": (lambda e: e.own("g", {"a": None}), LOST, "was released; make a new one"),
    "producer": (lambda e: e.topic("a").producer(), CLOSED, "is closed; open a new one"),
    "reader": (lambda e: e.topic("a").reader(), CLOSED, "reader of topic 'a' is closed"),
    "group": (lambda e: e.reader(["a"], group="g"), CLOSED, "reader of group 'g' is closed"),
    "map": (map_on, CLOSED, "state of topic 'map' is closed"),
    "watch": (lambda e: map_on(e).watch(), CLOSED, "watch of the map in topic 'map' is closed"),
    "owners": (lambda e: e.topic("a").watch_owner(), CLOSED, "watch of the owner of topic 'a'"),
    "transaction": (lambda e: e.transaction(), xl.TransactionAbortedError, "is committed; begin"),
    "engine": (lambda e: xl.open(e.path, name="again"), CLOSED, "engine 'again' on .* is closed"),
}


@pytest.mark.rule("B4", "F5")
@pytest.mark.parametrize("kind", OBJECTS)
def test_f5_no_block_runs_with_what_is_closed(engine: xl.Engine, kind: str) -> None:
    open_it, error, text = OBJECTS[kind]
    engine.topic("a")
    found: AbstractContextManager[Any] = open_it(engine)
    with found as inside:
        assert inside is found
    with pytest.raises(error, match=text), found:
        pytest.fail("the block has run")


@pytest.mark.rule("B4", "F5")
def test_f5_of_two_who_enter_a_lock_in_turn_one_holds_it(engine: xl.Engine, path: str) -> None:
    """As loops of `threading.Lock` do."""
    lock = engine.lock("job")
    with lock:
        pass
    with (
        xl.open(path, name="other") as there,
        there.lock("job") as other,
        pytest.raises(LOST, match="lock 'job' was closed"),
        lock,
    ):
        pytest.fail(f"{lock} and {other} were held at once")


@pytest.mark.rule("B4", "F5")
def test_f5_no_block_runs_with_what_is_known_to_be_lost(engine: xl.Engine, path: str) -> None:
    told: list[object] = []
    lock = engine.lock("job", on_lost=lambda *_: told.append(lock))
    claim = engine.own("g", {"a": None}, on_lost=lambda *_: told.append(claim))
    producer = engine.topic("a").producer("exclusive")
    with xl.open(path, name="other") as there:
        with there.role("job", access_mode="exclusive_with_fencing"):
            until(lambda: lock in told)
            with pytest.raises(LOST, match="lock 'job' with epoch 1 was lost"), lock:
                pytest.fail("the block has run")
        with there.own("g", {"a": None}):
            until(lambda: claim in told)
            with pytest.raises(LOST, match="was revoked"), claim:
                pytest.fail("the block has run")
        with there.topic("a").producer("exclusive_with_fencing"):
            with pytest.raises(xl.ProducerFencedError):
                producer.send(b"late")
            with pytest.raises(xl.ProducerFencedError), producer:
                pytest.fail("the block has run")


@pytest.mark.rule("A1")
@pytest.mark.parametrize("where", ["an inner block", "another thread", "asyncio"])
def test_a1_one_block_runs_with_a_lock(engine: xl.Engine, path: str, where: str) -> None:
    """The end of a second one would release it under the first."""
    text = "was entered already"
    with xl.open(path, name="other") as other:
        if where == "asyncio":
            asyncio.run(_enter_twice(path, text))
        else:
            with engine.lock("job") as lock:
                run = begin if where == "another thread" else _run_here
                entered = run(lock.__enter__)
                with pytest.raises(RuntimeError, match=text):
                    entered.result(PATIENCE)
                assert lock.is_valid
                with pytest.raises(xl.WaitTimeoutError):
                    other.lock("job", timeout=0)
        other.lock("job", timeout=0).close()


def _run_here(call: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(call())
    except RuntimeError as error:
        done.set_exception(error)
    return done


async def _enter_twice(path: str, text: str) -> None:
    async with aio.open(path) as engine, engine.lock("job") as lock:
        with pytest.raises(RuntimeError, match=text):
            async with lock:
                pytest.fail("the block has run")
        assert lock.is_valid


@pytest.mark.rule("B4", "F5")
def test_f5_to_enter_asks_nobody(engine: xl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an error of that, of a broker, say, would leave the lock held by nobody's block."""
    held = [engine.lock("job"), engine.own("g", {"a": None}), engine.role("role")]
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "read", lambda ledger: pytest.fail("it has read the ledger"))
        for each in held:
            assert each.__enter__() is each
    for each in held:
        each.__exit__(None, None, None)


@pytest.mark.rule("B4", "F5")
def test_f5_nor_with_one_of_asyncio(path: str) -> None:
    async def run() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("a")
            lock = await engine.lock("job")
            opened: list[Any] = [lock, await engine.own("g", {"a": None}), await topic.producer()]
            opened += [await topic.reader(), await aio.SharedMap(topic), engine.transaction()]
            for one in opened:
                async with one:
                    pass
                with pytest.raises((LOST, CLOSED, xl.TransactionAbortedError)):
                    async with one:
                        pytest.fail(f"the block has run with {one}")
        with pytest.raises(CLOSED):
            async with engine:
                pytest.fail("the block has run")

    asyncio.run(run())
