"""`engine.lock`: one process at a time holds a lock, and the others wait in a queue (rules A1, C2,
C3, D1, D5). It is a role without parts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import exclusivelog as xl
from testing.processes import FENCING, PATIENCE, State, Worker, until, within

pytestmark = pytest.mark.needs("locks")


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
        with pytest.raises(xl.WaitTimeoutError, match=r"lock 'job' .* held by engine 'test'"):
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
            assert engine.stats().waiters == count + 1
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


@pytest.mark.rule("C2", "A1", "D4")
@pytest.mark.on_broker
@pytest.mark.parametrize("rivals", ["processes"])
def test_the_first_waiter_has_it_when_its_holder_is_killed(
    engine: xl.Engine, worker: Callable[..., Worker], rivals: str
) -> None:
    holder, waiting = worker(name="holder"), worker(name="waiting")
    assert holder.call(hold) == 1
    waiting.start(hold)
    until(lambda: waiters(engine) == ["waiting"])
    with pytest.raises(xl.WaitTimeoutError, match="'holder'"):
        engine.lock("job", timeout=0)
    holder.kill()
    assert waiting.answer() == 2
    [info] = engine.roles()
    assert (info.name, info.epoch, info.waiters) == ("job", 2, ())
    assert info.holder is not None
    assert info.holder.engine_name == "waiting"
    with engine.role("job", access_mode=FENCING) as taken:
        assert taken.epoch == 3
        assert waiting.call(is_lost) == (True, False)
        waiting.call(release)  # disturbs nobody
        assert taken.state == "open"
    assert is_free(engine)


@pytest.mark.rule("E1", "E2")
@pytest.mark.on_broker
def test_it_is_handed_over_as_a_topic_is(engine: xl.Engine, path: str) -> None:
    with xl.open(path, name="rival") as rival:
        lost: list[xl.OwnershipLostError] = []
        role = engine.role("job", on_lost=lambda _, error: lost.append(error))
        waiting = rival.role_async("job")
        move = role.hand_over(to=rival.id, timeout=PATIENCE)
        assert (move.ok, role.state) == (True, "moved")
        with pytest.raises(xl.OwnershipLostError, match="was handed over to engine 'rival'"):
            role.claim.check()
        until(lambda: lost)
        assert [error.successor and error.successor.name for error in lost] == ["rival"]
        with waiting.result(PATIENCE) as there:
            assert (there.epoch, there.claim.is_valid) == (2, True)
        kinds = [event.kind for event in engine.history(role="job")]
        found = [kind for kind in kinds if kind in ("grant", "release")]
        assert found == ["grant", "release", "grant", "release"]


# ---- wrong arguments ---------------------------------------------------------------------


def test_wrong_arguments_are_refused(engine: xl.Engine) -> None:
    with pytest.raises(TypeError, match="on_lost"):
        engine.lock("job", on_lost=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        engine.lock("job", timeout=-1)
    with pytest.raises(ValueError, match="name"):
        engine.lock("")
    assert engine.roles() == []
