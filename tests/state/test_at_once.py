"""Rules I2, I5, H1: writes of a map that have nothing to wait for.

Such a put is one step of the compiled core in the thread that calls it, which may be an event
loop's thread. It is acknowledged only once it is durable, and does not overtake earlier calls. If
it would have to wait, another thread does it instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio, serde
from exclusivelog.state.shared import Shared
from testing.journals import no_checkpoints
from testing.processes import PATIENCE, until

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    # A checkpoint keeps the journal's lock for a moment, on a busy machine for longer.
    with no_checkpoints(topic.engine), xl.SharedMap(topic) as shared:
        shared.put("k", 0)  # it is the owner from now on,
        shared.put("k", 0)  # has seen that it is,
        shared.get_async("k").result(PATIENCE)  # and has threads for what has to wait
        until(lambda: shared._calls.idle)
        yield shared


def test_i5_an_owner_s_put_is_one_step_of_the_core(
    shared: Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls that set one key, whether they change anything or not."""
    monkeypatch.delattr(Shared, "_append")
    assert shared.put("k", 1) == 0
    shared["k"] = 2
    assert shared.put_if_absent("k", 9).previous == 2
    assert shared.replace("k", 2, 3)
    assert not shared.replace("k", 2, 4)
    assert shared.delete("k") == 3
    assert shared.delete("k") is None
    assert shared.put_if_absent("k", 5)
    assert shared.get("k", latest=True) == 5


def test_i5_so_it_is_where_another_thread_has_the_map_for_a_moment(
    shared: Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core waits for that thread."""
    monkeypatch.delattr(Shared, "_append")
    taken, tries = threading.Event(), iter(range(1, 100))

    def hold() -> None:
        with shared._lock:
            taken.set()
            time.sleep(0.005)

    def put() -> bool:  # False on a busy machine, where the moment was too long
        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(PATIENCE)
        taken.clear()
        try:
            shared.put("k", next(tries))
        except AttributeError:
            return False
        finally:
            thread.join(PATIENCE)
        return True

    until(put)
    assert shared.get("k") == next(tries) - 1


def test_i1_all_that_threads_put_at_once_arrives(shared: Map) -> None:
    """Each is told the value just before its own: they form one chain."""
    before: list[list[Any]] = [[] for _ in range(8)]

    def put(thread: int) -> None:
        for number in range(200):
            before[thread].append(shared.put("k", [thread, number]))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    told = [str(value) for values in before for value in values]
    assert len(told) == len(set(told)) == 8 * 200
    made = {str([thread, number]) for thread in range(8) for number in range(200)}
    assert made - set(told) == {str(shared.get("k"))}


def test_i5_so_it_is_for_a_task(shared: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread is asked."""
    mine = aio.SharedMap.wrap(shared)

    async def main() -> list[Any]:
        monkeypatch.delattr(Shared, "_submit")
        return [await mine.put("k", 1), await mine.delete("k"), await mine.put("k", 2)]

    assert asyncio.run(main()) == [0, 1, None]


@pytest.mark.parametrize("tasks", [False, True])
def test_h1_it_is_durable_once_it_is_told(tmp_path: Path, tasks: bool) -> None:
    """Nothing that was appended before is left to be flushed."""
    with (
        xl.open(tmp_path / "ledger", durability="power") as engine,
        xl.SharedMap(engine.topic("map")) as shared,
    ):
        mine, journal = aio.SharedMap.wrap(shared), engine.ledger.journal
        assert journal is not None

        async def put(number: int) -> None:
            await mine.put("k", number)
            assert journal.synced == journal.tail

        async def main() -> None:
            await mine.get("k")
            for number in range(20):
                await put(number)

        if tasks:
            asyncio.run(main())
        else:
            for number in range(20):
                shared.put("k", number)
                assert journal.synced == journal.tail


def test_i2_a_loop_does_not_wait_for_another_thread_s_write(shared: Map) -> None:
    """Else nothing that runs in the loop could ever end that write."""
    begun, go_on = threading.Event(), threading.Event()
    went_on: list[bool] = []

    def slowly(old: Any) -> Any:
        begun.set()
        went_on.append(go_on.wait(PATIENCE))
        return "update"

    async def main() -> Any:
        mine = aio.SharedMap.wrap(shared)
        put = asyncio.ensure_future(mine.put("k", "put"))
        await asyncio.sleep(0.05)
        go_on.set()
        return await put

    thread = threading.Thread(target=shared.update, args=("k", slowly))
    thread.start()
    assert begun.wait(PATIENCE)
    assert asyncio.run(main()) == "update"
    thread.join(PATIENCE)
    assert went_on == [True]
    assert shared.get("k") == "put"


def test_i2_it_overtakes_nothing_of_its_own_turn_of_the_loop(shared: Map) -> None:
    """What the tasks of one turn ask for is done in their order."""

    async def main() -> list[Any]:
        mine = aio.SharedMap.wrap(shared)
        return list(await asyncio.gather(mine.get("k"), mine.put("k", 1), mine.get("k")))

    assert asyncio.run(main()) == [0, 0, 1]


def test_i2_it_overtakes_nothing_that_waits_in_the_background(shared: Map) -> None:
    """Also if no process owns the map at that moment."""
    begun, go_on = threading.Event(), threading.Event()

    def look(key: str, value: Any) -> None:
        begun.set()
        go_on.wait(PATIENCE)

    async def main() -> None:
        mine = aio.SharedMap.wrap(shared)
        first = asyncio.ensure_future(mine.scan(look))
        second = asyncio.ensure_future(mine.put_all({"k": "second"}))
        await asyncio.to_thread(begun.wait, PATIENCE)
        third = asyncio.ensure_future(mine.put("k", "third"))
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.gather(first, second)
        assert await third == "second"

    asyncio.run(main())
    assert shared.get("k") == "third"


def test_i2_an_application_s_serialiser_never_runs_in_a_loop_s_thread(topic: xl.Topic) -> None:
    """It may take long, or wait."""
    threads: set[int] = set()

    def dumps(value: Any) -> bytes:
        threads.add(threading.get_ident())
        return serde.json.dumps(value)

    async def main() -> None:
        mine = aio.SharedMap.wrap(shared)
        for number in range(3):
            await mine.put("k", number)

    with xl.SharedMap(topic, value=serde.Serde(dumps, serde.json.loads)) as shared:
        asyncio.run(main())
        assert shared.get("k") == 2
    assert threads
    assert threading.get_ident() not in threads
