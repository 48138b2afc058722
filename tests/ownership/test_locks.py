"""`engine.lock` on one machine: what is bound to it, roles of its name, processes that hang, and
asyncio (rules A1, B2, C2, C3, D5). What all backends promise of it is in conformance/test_locks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.loops import play, soon
from testing.processes import FENCING, PATIENCE, State, Worker, hang, until

pytestmark = pytest.mark.once


@pytest.fixture
def rival(path: str, engine: xl.Engine) -> Iterator[xl.Engine]:
    """Another engine on the ledger."""
    with xl.open(path, name="rival") as other:
        yield other


def waiters(engine: xl.Engine) -> list[str]:
    """The engines that wait for the lock "job"."""
    return [w.engine_name for info in engine.roles() if info.name == "job" for w in info.waiters]


def is_free(engine: xl.Engine) -> bool:
    return all(info.holder is None and not info.waiters for info in engine.roles())


def hold(state: State, timeout: float | None = None) -> int:
    """Hold the lock, in a worker; its epoch."""
    state.kept["lock"] = state.engine.lock("job", timeout)
    return int(state.kept["lock"].epoch)


def is_lost(state: State) -> tuple[bool, bool]:
    lock = state.kept["lock"]
    return lock.lost.wait(PATIENCE), lock.is_valid


def release(state: State) -> None:
    state.kept["lock"].close()


def test_the_role_of_that_name_excludes_it(engine: xl.Engine, rival: xl.Engine) -> None:
    with engine.role("job", topics=["invoices"]), pytest.raises(xl.WaitTimeoutError):
        rival.lock("job", timeout=0)
    with engine.lock("job"):
        [info] = engine.roles()
        assert (info.name, info.topics, info.holder is not None) == ("job", (), True)


@pytest.mark.rule("B2")
def test_what_is_bound_to_it_is_refused_after_the_loss(
    engine: xl.Engine, rival: xl.Engine, topic: xl.Topic
) -> None:
    lock = engine.lock("job")
    bound, plain = topic.producer(claim=lock.claim), topic.producer()
    transaction = engine.transaction()
    transaction.require(lock)
    plain.send(b"x", transaction=transaction)
    assert bound.send(b"held") == 0
    with rival.role("job", access_mode=FENCING):
        with pytest.raises(xl.ProducerRevokedError):
            bound.send(b"stale")
        with pytest.raises(xl.OwnershipLostError):
            transaction.commit()
    assert topic.next_offset == 1


@pytest.mark.long
@pytest.mark.rule("C2")
@pytest.mark.rule("C3")
def test_processes_that_die_or_hang_lose_it(
    engine: xl.Engine, worker: Callable[..., Worker]
) -> None:
    killed, paused, third = (worker(name=name) for name in ("killed", "paused", "third"))
    assert killed.call(hold) == 1
    paused.start(hold)
    until(lambda: waiters(engine) == ["paused"])
    third.start(hold)
    until(lambda: waiters(engine) == ["paused", "third"])
    killed.kill()
    assert paused.answer() == 2
    hang(paused, 0.5)
    assert third.answer() == 3
    paused.signal(signal.SIGCONT)
    assert paused.call(is_lost) == (True, False)
    paused.call(release)  # disturbs nobody
    with pytest.raises(xl.WaitTimeoutError, match="'third'"):
        engine.lock("job", timeout=0)
    third.call(release)
    assert engine.lock("job", timeout=0).epoch == 4


def test_asyncio_waits_and_is_told_of_the_loss(
    path: str, engine: xl.Engine, rival: xl.Engine
) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            told: asyncio.Queue[aio.Lock] = asyncio.Queue()
            async with mine.lock("job") as lock:
                assert (lock.epoch, lock.is_valid, bool(lock.lost)) == (1, True, False)
                with pytest.raises(xl.WaitTimeoutError, match="a lock is not reentrant"):
                    await mine.lock("job", timeout=0)
            assert lock.lost
            second = await mine.lock("job", on_lost=lambda lock, error: told.put(lock))
            fencing = await asyncio.to_thread(rival.role, "job", access_mode=FENCING)
            assert await second.lost.wait(PATIENCE)
            assert await told.get() is second
            await second.close()
            await asyncio.to_thread(fencing.close)

    play(main)
    assert is_free(engine)


@pytest.mark.rule("D5")
def test_asyncio_leaves_the_queue_if_cancelled(
    path: str, engine: xl.Engine, rival: xl.Engine
) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            waiting = asyncio.create_task(mine.lock("job"))
            await soon(lambda: waiters(engine))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await soon(lambda: not waiters(engine))

    with rival.lock("job"):
        play(main)
