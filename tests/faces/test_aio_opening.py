"""exclusivelog.aio: a call that opens something can be awaited, or entered by async with; using it
before it is open, or outside of asyncio, raises a clear error."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from testing.loops import cancelled_after, free, held, play, soon
from testing.processes import PATIENCE
from testing.states import add

pytestmark = pytest.mark.once

EXCLUSIVE, WAIT = "exclusive", "wait_for_exclusive"

# How each kind of thing is opened, on an engine and a topic.
OPENINGS: dict[str, Callable[[aio.Engine, aio.Topic], Any]] = {
    "engine": lambda engine, topic: aio.open(engine.path),
    "producer": lambda engine, topic: topic.producer(),
    "producers": lambda engine, topic: engine.producers(["a", "b"]),
    "reader": lambda engine, topic: topic.reader(),
    "reader of a group": lambda engine, topic: topic.reader(group="g"),
    "reader of many": lambda engine, topic: engine.reader(["orders"], group="g"),
    "claim": lambda engine, topic: engine.own({"r": None}),
    "role": lambda engine, topic: engine.role("role"),
    "map": lambda engine, topic: aio.SharedMap(topic),
    "state": lambda engine, topic: aio.SharedState(topic, dict, add),
}


@pytest.mark.parametrize("kind", OPENINGS)
def test_it_can_be_awaited_or_entered(path: str, kind: str) -> None:
    make = OPENINGS[kind]

    async def main() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            async with make(engine, topic) as entered:
                pass
            awaited = await make(engine, topic)
            assert type(awaited) is type(entered)
            if kind != "producers":
                async with awaited as again:  # what is open closes itself
                    assert again is awaited
            else:
                for one in awaited:
                    await one.close()
            assert free(topic.sync)

    play(main)


@pytest.mark.parametrize("kind", OPENINGS)
def test_the_end_of_its_block_closes_it(path: str, kind: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            with pytest.raises(ZeroDivisionError):
                async with OPENINGS[kind](engine, topic) as opened:
                    raise ZeroDivisionError
            states = {
                "engine": lambda: opened.closed,
                "claim": lambda: not opened.is_valid,
                "producer": lambda: opened.state == "closed",
                "producers": lambda: {one.state for one in opened} == {"closed"},
                "role": lambda: opened.state == "closed",
            }
            if kind in states:
                assert states[kind]()
                return
            if kind == "map":
                use = opened.get("a")
            elif kind == "state":
                use = opened.read(len)
            else:
                use = opened.read_next(timeout=0)
            with pytest.raises(xl.EngineClosedError):
                await use

    play(main)


@pytest.mark.parametrize(
    "name", ["producer", "engine", "claim", "role"], ids=lambda name: f"by {name}"
)
def test_it_is_a_coroutine_for_tasks(path: str, name: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            make = OPENINGS[name]
            async with await asyncio.create_task(make(engine, topic)):
                pass
            async with asyncio.TaskGroup() as group:
                task = group.create_task(make(engine, topic))
            async with task.result():
                pass
            async with await asyncio.wait_for(make(engine, topic), PATIENCE):
                pass
            never = asyncio.create_task(make(engine, topic))
            never.cancel()
            with pytest.raises(asyncio.CancelledError):
                await never
            failing = asyncio.create_task(engine.topic("orders").producer(priority="high"))
            with pytest.raises(ValueError, match="priority"):
                await failing

    play(main)


def test_one_may_be_opened_once(path: str) -> None:
    async def main() -> None:
        opening = aio.open(path)
        async with opening as engine:
            with pytest.raises(RuntimeError, match=r"awaited already; call it again"):
                await opening
            reader = engine.topic("orders").reader(group="g")
            assert (await reader, await reader) == (reader, reader)
            async with reader as again:
                assert again is reader

    play(main)


def test_d5_two_tasks_open_the_same_reader(path: str) -> None:
    """... once: a second claim would fence the first."""

    async def main() -> None:
        async with aio.open(path) as engine:
            reader = engine.topic("orders").reader(group="g")
            await asyncio.gather(reader, reader, reader.read_batch(1))
            assert reader.generation == 1
            await reader.close()

    play(main)


# ---- a forgotten await ---------------------------------------------------------------------


async def outcome_of(use: Callable[[Any], Any], it: Any) -> None:
    used = use(it)
    if asyncio.isfuture(used):
        await used


@pytest.mark.parametrize(
    ("kind", "use", "names"),
    [
        ("producer", lambda it: it.send(b"x"), r"await topic\.producer"),
        ("producer", lambda it: it.send(b"x", key="k"), r"await topic\.producer"),
        ("producer", lambda it: it.send(None), r"await topic\.producer"),
        ("producer", lambda it: it.flush(), r"await topic\.producer"),
        ("producer", lambda it: it.topic_epoch, r"await topic\.producer"),
        ("engine", lambda it: it.topic("orders"), r"await exclusivelog\.aio\.open"),
        ("claim", lambda it: it.is_valid, r"await engine\.own"),
        ("role", lambda it: it.producer("orders"), r"await engine\.role"),
        ("reader of a group", lambda it: it.position, r"await topic\.reader"),
        ("reader of a group", lambda it: it.seek(0), r"await topic\.reader"),
        ("reader of many", lambda it: it.positions, r"await engine\.reader"),
        ("map", lambda it: asyncio.ensure_future(it.get("a")), r"await exclusivelog.aio.SharedMap"),
        ("map", lambda it: asyncio.ensure_future(it.put("a", 1)), r"await exclusivelog.aio.Shared"),
        ("map", lambda it: it.watch(), r"await exclusivelog\.aio\.SharedMap"),
        ("state", lambda it: asyncio.ensure_future(it.read(len)), r"await exclusivelog\.aio\.Sha"),
    ],
)
def test_a_forgotten_await_is_named(
    path: str, kind: str, use: Callable[[Any], Any], names: str
) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            opening = OPENINGS[kind](engine, await engine.topic("orders"))
            with pytest.raises(TypeError, match=names):
                await outcome_of(use, opening)
            async with opening:  # it has not begun: nothing is lost
                pass

    play(main)


def test_a_missing_name_is_an_attribute_error(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            opening = engine.topic("orders").producer()
            with pytest.raises(AttributeError, match="no attribute 'sned'"):
                opening.sned
            assert not hasattr(opening, "flush")
            await (await opening).close()

    play(main)


def test_an_opening_that_was_never_awaited_warns(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            with pytest.warns(RuntimeWarning, match=r"topic\.producer.* was never awaited"):
                engine.topic("orders").producer()

    play(main)


def test_with_is_no_async_with(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            for kind, make in OPENINGS.items():
                opening = make(engine, topic)
                with pytest.raises(TypeError, match="use `async with`"), opening:
                    pass
                async with opening as opened:
                    pass
                if kind != "producers":
                    with pytest.raises(TypeError, match="use `async with`"), opened:
                        pass

    play(main)


def test_a_misspelt_argument_is_refused_at_once(path: str) -> None:
    async def main() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            async with topic.producer() as producer, aio.SharedMap(engine.topic("m")) as shared:
                calls: list[Callable[[], Any]] = [
                    lambda: aio.open(path, keepalife=1),
                    lambda: topic.producer(prio=1),
                    lambda: topic.producer_async(prio=1),
                    lambda: engine.producers(["a"], prio=1),
                    lambda: topic.reader(grup="g"),
                    lambda: engine.role("r", topic=["a"]),
                    lambda: engine.own({"a": 1}, timeuot=1),
                    lambda: producer.send(b"x", keyy=3),
                    lambda: producer.send_async(b"x", keyy=3),
                    lambda: producer.send_many([b"x"], key=[3]),
                    lambda: shared.get("a", lastest=True),
                    lambda: aio.SharedMap(topic, keys="str"),
                ]
                for call in calls:
                    with pytest.raises(TypeError, match=r"unexpected keyword|takes no option"):
                        call()
            assert topic.next_offset == 0

    play(main)


# ---- objects of the other module -------------------------------------------------------------


def test_each_module_refuses_the_other_s_objects(path: str, engine: xl.Engine) -> None:
    async def main() -> None:
        async with aio.open(path) as mine:
            theirs, topic = engine.topic("orders"), await mine.topic("orders")
            for make in (aio.SharedMap, lambda it: aio.SharedState(it, dict, add)):
                with pytest.raises(TypeError, match=r"takes a topic of exclusivelog\.aio"):
                    make(theirs)
            for plain in (xl.SharedMap, lambda it: xl.SharedState(it, dict, add)):
                with pytest.raises(TypeError, match=r"exclusivelog\.aio\.Shared(Map|State)"):
                    plain(topic)
            async with topic.producer() as producer:
                with pytest.raises(
                    TypeError, match=r"engine\.transaction\(\) of exclusivelog\.aio"
                ):
                    await producer.send(b"x", transaction=engine.transaction())
                txn, claim = mine.transaction(), engine.own({"a": None})
                with pytest.raises(TypeError, match=r"holder=.*exclusivelog\.aio"):
                    txn.require(claim)
                with pytest.raises(TypeError, match=r"reader=.*exclusivelog\.aio"):
                    txn.commit_cursor(theirs.reader())
                with pytest.raises(TypeError, match=r"claim=.*exclusivelog\.aio"):
                    await topic.producer(claim=claim)
                with pytest.raises(TypeError, match=r"holder=.*after its `await`"):
                    txn.require(mine.own({"b": None}))
            assert topic.next_offset == 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the last one was not awaited
        play(main)


# ---- topics that do not exist yet ------------------------------------------------------------


def test_a_topic_is_made_by_what_is_awaited(path: str, engine: xl.Engine) -> None:
    """Making it waits for the writer lock, and the loop must not."""

    async def main() -> None:
        async with aio.open(path) as mine:
            with held(engine):
                topic = mine.topic("later")
                assert repr(topic) == "<aio.Topic 'later'>"
                with pytest.raises(xl.TopicNotFoundError) as missing:
                    assert topic.epoch
                assert str(missing.value) == (
                    f"{path} has no topic 'later'; it has no topics yet. "
                    "`await engine.topic('later')` makes it"
                )
                making = asyncio.ensure_future(topic)
                await asyncio.sleep(0.05)
                assert not making.done()
            assert await making is topic
            assert (topic.epoch, topic.next_offset, mine.topics()) == (0, 0, ["later"])
            assert [m async for m in mine.topic("read").reader()] == []
            assert mine.topics() == ["later", "read"]
            for other in ("__mine", ""):
                with pytest.raises(ValueError, match="topic="):
                    await mine.topic(other)
            with pytest.raises(xl.TopicNotFoundError):
                mine.topic("none", create=False)
        async with aio.open(path, readonly=True) as reading:
            with pytest.raises(xl.TopicNotFoundError):
                reading.topic("none")

    play(main)


@pytest.mark.long
def test_d5_a_reader_whose_opening_was_cancelled_has_no_group(path: str, engine: xl.Engine) -> None:
    topic = engine.topic("orders")

    async def main() -> None:
        async with aio.open(path) as mine:
            with held(engine):
                reader = mine.topic("orders").reader(group="g")
                await cancelled_after(0.05, reader.read_next())
            await soon(lambda: not engine.claims("g"))
            assert (await reader).group == "g"  # it can be opened still
            await reader.close()

    play(main)
    assert topic.next_offset == 0


# ---- callbacks ---------------------------------------------------------------------------


def test_c6_callbacks_run_in_the_loop(path: str) -> None:
    """... with the object that the application has, as functions or as coroutine functions."""

    async def main() -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any, Any]]()

        def note(kind: str) -> Callable[..., None]:
            def call(it: Any, error: Any = None) -> None:
                assert asyncio.get_running_loop() is loop
                told.put_nowait((kind, it, error))

            return call

        async def note_later(it: Any, error: Any) -> None:
            await asyncio.sleep(0)
            note("role")(it, error)

        async with aio.open(path) as engine:
            topic = engine.topic("orders")
            owner = await topic.producer(
                EXCLUSIVE, on_fenced=note("fenced"), on_wanted=note("wanted")
            )
            waiting = asyncio.create_task(topic.producer(WAIT))
            assert (await told.get())[:2] == ("wanted", owner)
            rival = await topic.producer("exclusive_with_fencing")
            kind, who, error = await told.get()
            assert (kind, who, type(error)) == ("fenced", owner, xl.ProducerFencedError)
            await rival.close()
            with pytest.raises(xl.ProducerFencedError):
                await waiting
            role = await engine.role("role", on_lost=note_later)
            await engine.role("role", access_mode="exclusive_with_fencing")
            assert (await told.get())[:2] == ("role", role)
            one, two = await engine.producers(["a", "b"], EXCLUSIVE, on_fenced=note("many"))
            await engine.producers(["b"], "exclusive_with_fencing")
            assert (await told.get())[:2] == ("many", two)
            await one.close()
            with pytest.raises(TypeError, match="on_fenced"):
                await topic.producer(on_fenced=1)

    play(main)


# ---- outside of asyncio ----------------------------------------------------------------------


def test_trio_is_refused_in_one_sentence(path: str) -> None:
    trio = pytest.importorskip("trio")

    async def by_await() -> None:
        await aio.open(path)

    async def by_entering() -> None:
        async with aio.open(path):
            pass

    for main in (by_await, by_entering):
        with pytest.raises(RuntimeError, match="runs on asyncio"):
            trio.run(main)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_anyio_runs_on_asyncio_only(path: str, backend: str) -> None:
    anyio = pytest.importorskip("anyio")
    pytest.importorskip("trio")

    async def main() -> int:
        async with aio.open(path) as engine, engine.topic("orders").producer() as producer:
            with anyio.fail_after(PATIENCE):
                return await producer.send(b"x")

    if backend == "asyncio":
        assert anyio.run(main, backend=backend) == 0
    else:
        with pytest.raises(RuntimeError, match="runs on asyncio"):
            anyio.run(main, backend=backend)


def test_trio_as_a_guest_of_asyncio_is_refused_too(path: str) -> None:
    """There is a loop then, and no task of it."""
    trio = pytest.importorskip("trio")

    async def by_trio() -> None:
        async with aio.open(path):
            pass

    async def main() -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        trio.lowlevel.start_guest_run(
            by_trio,
            done_callback=done.set_result,
            run_sync_soon_threadsafe=asyncio.get_running_loop().call_soon_threadsafe,
        )
        return (await done).unwrap()

    with pytest.raises(RuntimeError, match="runs on asyncio"):
        asyncio.run(main())
