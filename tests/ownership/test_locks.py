"""`engine.lock`: one process at a time holds a lock, and the others wait in a queue (rules A1, C2,
C3, D1, D5). It is a role without parts; a cluster refuses it as it refuses roles (J3)."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.loops import play, soon
from testing.processes import FENCING, PATIENCE, State, Worker, until, within

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


# ---- one holder --------------------------------------------------------------------------


@pytest.mark.rule("A1")
def test_one_engine_at_a_time_holds_it_and_the_epoch_grows(
    engine: xl.Engine, rival: xl.Engine
) -> None:
    with engine.lock("job") as lock:
        assert (lock.name, lock.epoch, lock.is_valid, bool(lock.lost)) == ("job", 1, True, False)
        lock.check()
        with pytest.raises(xl.WaitTimeoutError, match=r"lock 'job' .* of engine 'test'"):
            rival.lock("job", timeout=0)
        with rival.lock("another"):  # a lock of its own
            pass
    assert (lock.is_valid, bool(lock.lost)) == (False, True)
    with pytest.raises(xl.OwnershipLostError):
        lock.check()
    with rival.lock("job", timeout=0) as lock:
        assert lock.epoch == 2
    assert is_free(engine)


def test_an_exception_releases_it(engine: xl.Engine) -> None:
    with pytest.raises(LookupError), engine.lock("job"):
        raise LookupError
    assert is_free(engine)


@pytest.mark.rule("D1")
def test_others_wait_in_order_of_priority_and_arrival(engine: xl.Engine, rival: xl.Engine) -> None:
    order: list[str] = []

    def wait(name: str, priority: int) -> None:
        with rival.lock("job", priority=priority):
            order.append(name)

    threads = []
    with engine.lock("job"):
        for count, (name, priority) in enumerate([("second", 0), ("third", 0), ("first", 5)]):
            threads.append(threading.Thread(target=wait, args=(name, priority)))
            threads[-1].start()
            until(lambda count=count: len(waiters(engine)) == count + 1)
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["first", "second", "third"]
    assert is_free(engine)


def test_it_is_not_reentrant_and_says_so(engine: xl.Engine, rival: xl.Engine) -> None:
    with engine.lock("job"):
        with pytest.raises(xl.WaitTimeoutError, match="a lock is not reentrant"):
            engine.lock("job", timeout=0)
        with pytest.raises(xl.WaitTimeoutError) as raised:
            rival.lock("job", timeout=0)
        assert "reentrant" not in str(raised.value)
        assert raised.value.holder is not None
        assert raised.value.holder.engine_id == engine.id


def test_the_role_of_that_name_excludes_it(engine: xl.Engine, rival: xl.Engine) -> None:
    with engine.role("job", topics=["invoices"]), pytest.raises(xl.WaitTimeoutError):
        rival.lock("job", timeout=0)
    with engine.lock("job"):
        [info] = engine.roles()
        assert (info.name, info.topics, info.holder is not None) == ("job", (), True)


@pytest.mark.rule("D5")
def test_an_interrupted_wait_leaves_the_queue(engine: xl.Engine, rival: xl.Engine) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def soon_interrupt() -> None:
        until(lambda: waiters(engine))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with rival.lock("job"):
            thread = threading.Thread(target=soon_interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                engine.lock("job")
            thread.join(PATIENCE)
            until(lambda: waiters(engine) == [])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_closing_the_engine_releases_it_and_ends_waits(path: str, engine: xl.Engine) -> None:
    with xl.open(path) as other:
        lock = other.lock("job")
        assert waiters(engine) == []
    assert (lock.is_valid, lock.lost.wait(0)) == (False, True)
    with engine.lock("job"), xl.open(path) as other:
        ending = threading.Thread(target=lambda: (until(lambda: waiters(engine)), other.close()))
        ending.start()
        with pytest.raises(xl.EngineClosedError):
            within(lambda: other.lock("job"))
        ending.join(PATIENCE)
    assert is_free(engine)


# ---- the loss ----------------------------------------------------------------------------


@pytest.mark.rule("F5")
def test_its_loss_is_told_once(engine: xl.Engine, rival: xl.Engine) -> None:
    told: list[tuple[xl.Lock, xl.OwnershipLostError]] = []
    lock = engine.lock("job", on_lost=lambda *what: told.append(what))
    with rival.role("job", access_mode=FENCING):
        assert lock.lost.wait(PATIENCE)
        until(lambda: told)
        assert not lock.is_valid
        with pytest.raises(xl.OwnershipLostError):
            lock.check()
    lock.close()
    assert [each for each, _ in told] == [lock]
    with engine.lock("job", on_lost=lambda *what: told.append(what)):
        pass
    assert len(told) == 1


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
    paused.set_keepalive(0.5)
    paused.signal(signal.SIGSTOP)
    assert third.answer() == 3
    paused.signal(signal.SIGCONT)
    assert paused.call(is_lost) == (True, False)
    paused.call(release)  # disturbs nobody
    with pytest.raises(xl.WaitTimeoutError, match="'third'"):
        engine.lock("job", timeout=0)
    third.call(release)
    assert engine.lock("job", timeout=0).epoch == 4


# ---- wrong arguments, other backends -----------------------------------------------------


def test_wrong_arguments_are_refused(engine: xl.Engine) -> None:
    with pytest.raises(TypeError, match="on_lost"):
        engine.lock("job", on_lost=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        engine.lock("job", timeout=-1)
    with pytest.raises(ValueError, match="name"):
        engine.lock("")
    assert engine.roles() == []


@pytest.mark.rule("J3")
def test_a_cluster_refuses_it_as_it_refuses_roles(tmp_path: str) -> None:
    with xl.open(f"memory://{tmp_path}") as engine:
        with pytest.raises(xl.UnsupportedError) as of_role:
            engine.role("job")
        with pytest.raises(xl.UnsupportedError) as of_lock:
            engine.lock("job")
        assert str(of_lock.value) == str(of_role.value)


# ---- asyncio -----------------------------------------------------------------------------


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
