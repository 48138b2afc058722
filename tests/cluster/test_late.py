"""An engine whose thread that follows a log is late: it was stopped, say, and others have taken its
topic meanwhile. It asks the log where a wrong answer would break a rule."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog import aio
from exclusivelog.cluster import cursor
from exclusivelog.cluster.ordered import Position, Record
from testing.processes import PATIENCE, until

pytestmark = pytest.mark.once


@pytest.fixture
def path() -> str:
    return f"memory://{secrets.token_hex(8)}"


class Late:
    """The thread of `engine` that follows this topic reads on only when a call looks where the log
    ends, or appends to it, from `begin` on."""

    def __init__(self, engine: xl.Engine, name: str, patch: pytest.MonkeyPatch) -> None:
        self._log, self._patch = engine.backend.topics.named(name), patch
        self.goes_on = threading.Event()
        late, advance = threading.Event(), self._log._advance

        def advance_late(record: Record | None) -> None:
            late.set()
            self.goes_on.wait(PATIENCE)
            advance(record)

        patch.setattr(self._log, "_advance", advance_late)
        until(late.is_set)

    def begin(self) -> None:
        """What is called from now on lets it read on."""
        log: Any = self._log.log
        end, append = log.end, log.append

        def look() -> Position | None:
            self.goes_on.set()
            found: Position | None = end()
            return found

        def write(*arguments: Any) -> None:
            append(*arguments)
            self.goes_on.set()

        assert not self.goes_on.is_set()
        self._patch.setattr(log, "end", look)
        self._patch.setattr(log, "append", write)


# ---- maps and states ---------------------------------------------------------------------

Map = xl.SharedMap[str, int]
WRITES: dict[str, tuple[Callable[[Map], object], object]] = {
    # They have nothing to append, as far as this process knows.
    "put_if_absent": (lambda shared: shared.put_if_absent("a", 9).previous, 2),
    "replace": (lambda shared: shared.replace("a", 3, 9).previous, 2),
    "delete": (lambda shared: shared.delete("b"), 3),
    "pop": (lambda shared: shared.pop("b", None), 3),
    "setdefault": (lambda shared: shared.setdefault("a", 9), 2),
    "update_multiple": (
        lambda shared: shared.update_multiple("b".__eq__, lambda _, n: n + 4),
        {"b": 7},
    ),
    "an error": (lambda shared: shared.update("b", lambda value: {3: 4}[value or 0]).value, 4),
    # They append.
    "put": (lambda shared: shared.put("a", 9), 2),
    "update": (lambda shared: shared.update("a", lambda value: value + 5).value, 7),
    "put_if_absent, a new key": (lambda shared: shared.put_if_absent("c", 9).value, 9),
    "put_async": (lambda shared: shared.put_async("a", 9).result(PATIENCE), 2),
    "put_all": (lambda shared: [shared.put_all({"a": 8, "c": 9}), *shared.values()][1:], [8, 3, 9]),
}


@pytest.mark.rule("I2", "I8")
@pytest.mark.parametrize("name", WRITES)
def test_i8_a_write_of_an_evicted_owner_is_made_anew(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What it has in memory is old, and what it appends does not count."""
    here, there = xl.SharedMap(engine.topic("map")), xl.SharedMap(other.topic("map"))
    for number in range(3):
        here.put("a", number - 2)
    late = Late(engine, "map", monkeypatch)
    there.put("a", 2)
    there.put("b", 3)
    late.begin()
    call, expected = WRITES[name]
    assert call(here) == expected
    for each in (here, there):
        each.close()


@pytest.mark.rule("I2", "I8")
def test_i8_so_is_an_operation_of_a_state(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (
        xl.SharedState(each.topic("sums"), initial=list, apply=list.append)
        for each in (engine, other)
    )
    for number in range(3):
        here.write(lambda state, number=number: [number])
    late = Late(engine, "sums", monkeypatch)
    there.write(lambda state: [len(state)])
    late.begin()
    assert here.write(lambda state: [len(state)], list) == [0, 1, 2, 3, 4]
    for each in (here, there):
        each.close()


BESIDE: dict[str, tuple[Callable[[Map], object], object]] = {
    "get": (lambda shared: shared.get("a") in (2, 5), True),
    "get, latest": (lambda shared: shared.get("a", latest=True) in (2, 5), True),
    "len": (len, 1),
    "snapshot": (lambda shared: shared.snapshot() in (4, 5), True),
    "put": (lambda shared: shared.put("z", 7), None),
    "put_if_absent": (lambda shared: shared.put_if_absent("a", 7).previous in (2, 5), True),
}


@pytest.mark.rule("I2", "I8")
@pytest.mark.parametrize("name", BESIDE)
def test_i8_calls_beside_such_a_write_do_not_fail(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They have seen it in memory, and it does not count."""
    here, there = xl.SharedMap(engine.topic("map")), xl.SharedMap(other.topic("map"))
    for number in range(3):
        here.put("a", number)
    late, found = Late(engine, "map", monkeypatch), list[object]()
    there.put("a", 2)
    call, expected = BESIDE[name]
    threads = [
        threading.Thread(target=lambda each=each: found.append(each(here)))
        for each in (lambda shared: shared.put("a", 5), call)
    ]
    threads[0].start()
    until(lambda: here._unflushed is not None and not here._unflushed.flushed)
    threads[1].start()
    late.goes_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert (len(found), expected in found, here.get("a", latest=True)) == (2, True, 5)
    for each in (here, there):
        each.close()


# ---- readers -----------------------------------------------------------------------------

READS: dict[str, tuple[Callable[[xl.Reader], object], object]] = {
    "read_batch": (lambda reader: [each.value for each in reader.read_batch(9)], [b"2"]),
    "next": (lambda reader: next(reader).value, b"2"),
    "read_next": (lambda reader: reader.read_next(timeout=0).value, b"2"),
    "follow": (lambda reader: [each.value for each in reader.follow(timeout=0)], [b"2"]),
    "read_arrow": (lambda reader: reader.read_arrow().num_rows, 1),
}


@pytest.mark.rule("G5")
@pytest.mark.parametrize("name", READS)
def test_g5_a_read_that_does_not_wait_finds_what_was_acknowledged_elsewhere(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    producer = other.topic("orders").producer("exclusive")
    producer.send(b"1")
    reader = engine.topic("orders").reader()
    assert reader.read_next(PATIENCE).value == b"1"
    assert next(reader, None) is None
    late = Late(engine, "orders", monkeypatch)
    producer.send(b"2")
    late.begin()
    read, expected = READS[name]
    assert read(reader) == expected


@pytest.mark.rule("G5")
def test_g5_so_does_one_of_several_topics(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = other.topic("orders").producer("exclusive")
    engine.topic("bills")
    with engine.reader(["orders", "bills"], group="g") as reader:
        assert reader.read_batch(1) == []
        late = Late(engine, "orders", monkeypatch)
        producer.send(b"1")
        late.begin()
        assert [message.value for _, message in reader.read_batch(9)] == [b"1"]


@pytest.mark.rule("G5")
def test_g5_the_end_of_a_topic_that_was_terminated_elsewhere_is_told(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = engine.topic("orders").reader()
    assert reader.read_batch(1) == []
    late = Late(engine, "orders", monkeypatch)
    other.topic("orders").terminate()
    late.begin()
    with pytest.raises(xl.TopicTerminatedError):
        reader.read_next(timeout=0)


@pytest.mark.rule("G7")
def test_g7_a_view_that_is_newer_than_what_was_read_leaves_nothing_out(
    engine: xl.Engine, other: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine sends and compacts after this one has read the log, and before it looks for
    the newest view."""
    topic, producer = engine.topic("orders"), other.topic("orders").producer("exclusive")
    for key, value in (("a", b"old"), ("b", b"b")):
        producer.send(value, key=key)
    assert topic.next_offset == 2
    newest, late = cursor.newest_horizon, list[Late]()

    def newest_later(*arguments: Any) -> Any:
        if not late:
            late.append(Late(engine, "orders", monkeypatch))
            producer.send(b"new", key="a")
            producer.send(b"c", key="c")
            other.topic("orders").compact()
            late[0].begin()
        return newest(*arguments)

    monkeypatch.setattr(cursor, "newest_horizon", newest_later)
    reader = topic.reader(read_compacted=True)
    assert [message.value for message in reader] == [b"b", b"new", b"c"]


# ---- producers ---------------------------------------------------------------------------


@pytest.mark.rule("B3")
def test_b3_a_stale_session_does_not_move_the_topic_of_its_successor(
    engine: xl.Engine, other: xl.Engine, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor has its name (rule D9)."""
    stale = engine.topic("orders").producer("exclusive", name="leader", follow=False)
    late = Late(engine, "orders", monkeypatch)
    fencing = other.topic("orders").producer("exclusive_with_fencing", name="leader", follow=False)
    late.begin()
    with pytest.raises(xl.ProducerFencedError) as error:
        stale.move(to=third.id, timeout=PATIENCE)
    assert not isinstance(error.value, xl.ProducerMovedError)
    assert (fencing.state, fencing.send(b"1")) == ("open", 0)


@pytest.mark.rule("C6", "D8")
def test_c6_a_producer_whose_successor_in_this_process_was_fenced_asks_the_log(
    engine: xl.Engine, other: xl.Engine, third: xl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = engine.topic("orders").producer("exclusive")
    reader = engine.topic("orders").reader()
    waiting = other.topic("orders").producer_async("wait_for_exclusive", follow=False)
    [move] = engine.unload(["orders"], to=other.id)
    assert (move.state, waiting.result(PATIENCE).state, left.state) == ("owned", "open", "open")
    late = Late(engine, "orders", monkeypatch)
    third.topic("orders").producer("exclusive_with_fencing").send(b"elsewhere")
    late.begin()
    assert left.state != "open"
    with pytest.raises(xl.ProducerFencedError):
        list(left.catch_up(reader))


async def read_elsewhere(reader: aio.Reader, batch: bool) -> list[bytes | None]:
    if batch:
        return [message.value for message in await reader.read_batch(9)]
    return [(await reader.read_next(timeout=0)).value]


@pytest.mark.rule("G5")
@pytest.mark.parametrize("batch", [False, True])
def test_g5_so_does_one_of_asyncio_while_other_tasks_run(
    path: str, other: xl.Engine, monkeypatch: pytest.MonkeyPatch, batch: bool
) -> None:
    """Where the log ends is asked in a thread of the executor, not in that of the loop."""
    producer = other.topic("orders").producer("exclusive")
    producer.send(b"1")

    async def main() -> None:
        async with aio.open(path) as engine:
            topic = await engine.topic("orders")
            async with topic.reader() as reader:
                assert (await reader.read_next(PATIENCE)).value == b"1"
                with pytest.raises(xl.WaitTimeoutError):
                    await reader.read_next(timeout=0)
                late = Late(engine.sync, "orders", monkeypatch)
                producer.send(b"2")
                late.begin()
                log: Any = engine.sync.backend.topics.named("orders").log
                end, asked = log.end, list[threading.Thread]()

                def look() -> Position | None:
                    asked.append(threading.current_thread())
                    found: Position | None = end()
                    return found

                monkeypatch.setattr(log, "end", look)
                assert await read_elsewhere(reader, batch) == [b"2"]
                assert asked
                assert threading.main_thread() not in asked

    asyncio.run(main())
