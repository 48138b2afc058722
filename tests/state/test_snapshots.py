"""Rule I4: snapshots. Opening a state costs what the state has, not what its history has.

A snapshot is written while other calls run, and becomes the topic's snapshot in one small
transaction. Whatever happens meanwhile, the topic has the old one or the new one, and in the end no
other rows are left.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import exclusivelog as xl
from exclusivelog.local import topics
from exclusivelog.local.maintenance import views
from exclusivelog.local.maintenance.deletion import delete_pending
from exclusivelog.local.records import ITEMS, U64
from exclusivelog.local.storage.ledger import Transaction
from exclusivelog.state.shared import Replica
from testing.children import child, line, tell
from testing.processes import PATIENCE, State, Worker, rows, threads_since, until
from testing.states import (
    call_map,
    everything,
    one_more,
    open_counts,
    open_map,
    opened_afresh,
    struck_after,
)

Map = xl.SharedMap[Any, Any]


@pytest.fixture
def shared(topic: xl.Topic) -> Iterator[Map]:
    with xl.SharedMap(topic, snapshot_every=None) as shared:
        yield shared


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of the messages that states apply."""
    offsets: list[int] = []
    apply_one = Replica._apply_one

    def count(replica: Any, offset: int, key: bytes | None, value: bytes | None) -> None:
        offsets.append(offset)
        apply_one(replica, offset, key, value)

    monkeypatch.setattr(Replica, "_apply_one", count)
    return offsets


def fill(shared: Map, count: int, keys: int = 7) -> None:
    for number in range(count):
        shared.put(f"k{number % keys}", number)


def horizon(topic: xl.Topic) -> int | None:
    """The offset that the topic's snapshot goes up to, if it has one."""
    with topic.engine.ledger.read() as tables:
        snapshot = tables.views.snapshot(topic.id)
        return None if snapshot is None else snapshot.horizon


def garbage(engine: xl.Engine) -> list[Any]:
    """Entries that are no topic's and no snapshot's, and what is still to go."""
    with engine.ledger.read() as tables:
        snapshot_ids = {
            tables.views.snapshot(topic).id
            for _, topic in tables.topics.all()
            if tables.views.snapshot(topic) is not None
        }
        known = {topic for _, topic in tables.topics.all()} | snapshot_ids
        counts = [key for key, _ in tables.rows.cursor("meta") if key.startswith(ITEMS)]
    found = rows(engine)
    strays = [key for key, _ in found["entries"] if U64.unpack(key[:8])[0] not in known]
    homeless = [key for key, _ in found["snapshots"] if U64.unpack(key)[0] not in known]
    stale = [key for key in counts if U64.unpack(key[len(ITEMS) :])[0] not in known]
    return strays + homeless + stale + found["trash"]


# ---- what opening costs ------------------------------------------------------------------


def test_i4_opening_reads_the_snapshot_and_what_follows(
    shared: Map, topic: xl.Topic, applied: list[int]
) -> None:
    fill(shared, 100)
    assert shared.snapshot() == 100
    shared.put("new", 1)
    shared.delete("k3")
    applied.clear()
    assert opened_afresh(topic) == everything(shared)
    assert applied == [100, 101]


def test_i4_so_it_is_for_a_state(topic: xl.Topic, applied: list[int]) -> None:
    with open_counts(topic) as counts:
        for number in range(30):
            counts.write(lambda state, number=number: [["a", 1], [f"n{number % 3}", 1]])
        assert counts.snapshot() == 60
        counts.write(lambda state: [["a", 1]])
        applied.clear()
        with open_counts(topic) as again:
            assert again.read(dict) == counts.read(dict) == {"a": 31, "n0": 10, "n1": 10, "n2": 10}
        assert applied == [60]


def test_i4_snapshots_are_taken_now_and_then_by_themselves(
    topic: xl.Topic, applied: list[int]
) -> None:
    """The next one begins with the write that makes it due, if none is under way."""
    with xl.SharedMap(topic, snapshot_every=10) as shared:

        def write() -> int:
            shared.update("n", one_more)
            return topic.next_offset - (horizon(topic) or 0)

        assert [write() for _ in range(9)] == list(range(1, 10))
        for _ in range(3):
            until(lambda: write() < 10)
            until(lambda: write() >= 10)
        until(lambda: write() < 10)
        until(lambda: not garbage(topic.engine))
    applied.clear()
    assert opened_afresh(topic) == {"n": topic.next_offset}
    assert len(applied) < 10


def test_i4_they_are_bounded_by_the_state_not_by_the_history(
    shared: Map, engine: xl.Engine, topic: xl.Topic
) -> None:
    """A thousand writes to two keys: the snapshot has two items, and stays as small."""
    for _ in range(4):
        shared.put_all({f"k{number % 2}": number for number in range(500)})
        for number in range(250):
            shared.put("k0", number)
        shared.snapshot()
        with engine.ledger.read() as tables:
            found = views.read_snapshot(tables, topic.id)
        assert found is not None
        assert (found[0], len(found[1])) == (topic.next_offset, 2)
    assert not garbage(engine)


def test_i4_old_messages_can_be_trimmed(
    shared: Map, topic: xl.Topic, other: xl.Topic, worker: Callable[..., Worker]
) -> None:
    """Snapshot, trim, go on: every process that opens the state finds all of it."""
    process = worker()
    for turn in range(3):
        fill(shared, 50)
        topic.trim(before=shared.snapshot())
        assert topic.first_offset == topic.next_offset
        shared.put("turn", turn)
        expected = everything(shared)
        assert opened_afresh(other) == expected
        process.call(open_map)
        assert dict(process.call(call_map, "scan")) == expected
        assert process.call(call_map, "put_if_absent", "turn", 9).previous == turn
    assert (topic.first_offset, topic.next_offset) == (152, 153)


def test_i4_an_opener_may_be_overtaken_by_other_snapshots_again_and_again(
    shared: Map, topic: xl.Topic, other: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it reads a large snapshot, the next one is there, and the file of the old one gone."""
    fill(shared, 20)
    topic.trim(before=shared.snapshot())
    found: list[int] = []

    def read_what_goes(tables: Any, number: int) -> Any:
        horizon, items = views.read_snapshot(tables, number)  # type: ignore[misc]
        if len(found) == 4:
            return horizon, items
        found.append(horizon)
        shared.put("turn", len(found))
        topic.trim(before=shared.snapshot())
        raise xl.LedgerCorruptedError(f"the snapshot as of offset {horizon} is damaged")

    monkeypatch.setattr(topics, "read_snapshot", read_what_goes)
    opened = xl.SharedMap(other)
    monkeypatch.undo()
    assert found == sorted(set(found))
    assert len(found) == 4
    assert everything(opened) == everything(shared)
    opened.close()


def write_on(state: State, turn: int) -> None:
    """In a worker: write, take a snapshot, and trim what is in it."""
    shared = state.kept["map"]
    shared.put("turn", turn)
    state.topic.trim(before=shared.snapshot())


@pytest.mark.parametrize("call", ["get", "get latest", "open"])
def test_i4_one_that_is_left_behind_may_be_so_again_while_it_restores_a_snapshot(
    shared: Map,
    topic: xl.Topic,
    worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """A process that writes, takes snapshots and trims is faster than this one restores
    what it finds."""
    process = worker()
    process.call(open_map, snapshot_every=None)
    process.call(write_on, 0)
    take_snapshot = Replica._take_snapshot
    turns: list[int] = []

    def take_what_goes(replica: Any) -> bool:
        found = take_snapshot(replica)
        if len(turns) < 4:
            turns.append(len(turns) + 1)
            process.call(write_on, turns[-1])
        return found

    monkeypatch.setattr(Replica, "_take_snapshot", take_what_goes)
    if call == "open":
        assert opened_afresh(topic) == {"turn": 4}
    else:
        assert shared.get("turn", latest=call == "get latest") == 4
    assert turns == [1, 2, 3, 4]


def trim_as_before(topic: xl.Topic, first: int) -> None:
    """Without minding what the topic holds."""
    with topic.engine.ledger.write_checkpointed() as tables:
        row = tables.topics.get(topic.id)
        row.first_offset = first
        tables.topics.put(row)


def test_i4_a_state_without_a_snapshot_on_a_trimmed_topic_is_refused(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    """As an earlier version has left it, that trimmed a map as any other topic."""
    fill(shared, 10)
    trim_as_before(topic, 5)
    with pytest.raises(xl.OffsetTrimmedError, match=r"'orders' cannot be restored.*offset 0"):
        xl.SharedMap(other)
    shared.put("a", 1)  # this one has it all, and can help
    shared.snapshot()
    assert opened_afresh(other) == everything(shared)


def test_i4_nor_with_one_that_is_too_old(shared: Map, topic: xl.Topic, other: xl.Topic) -> None:
    fill(shared, 10)
    shared.snapshot()
    fill(shared, 10)
    trim_as_before(topic, 15)
    with pytest.raises(xl.OffsetTrimmedError, match=r"cannot be restored.*up to offset 10"):
        xl.SharedMap(other)


@pytest.mark.parametrize("call", ["get", "put"])
def test_i4_one_that_slept_while_others_trimmed_goes_on(
    shared: Map, topic: xl.Topic, other: xl.Topic, call: str
) -> None:
    """Two processes have the map. One does nothing for an hour; the other one writes, takes a
    snapshot and trims, as it may. The first must not be left behind."""
    with xl.SharedMap(other) as sleeper:
        fill(shared, 10)
        topic.trim(before=shared.snapshot())
        assert sleeper.get("k0", latest=True) == 7 if call == "get" else not sleeper.put("z", 1)
        assert everything(sleeper) == everything(shared)


def test_i4_one_that_was_left_behind_does_not_read_on_as_if_nothing_were(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    with xl.SharedMap(other) as sleeper:
        fill(shared, 10)
        topic.trim(before=shared.snapshot())
        for _ in range(2):
            try:
                assert sleeper.get("k0") == 7
            except xl.OffsetTrimmedError:
                continue


# ---- events during a snapshot ------------------------------------------------------------

HELD_UP = """
    import sys
    import exclusivelog as xl
    from exclusivelog.local.maintenance import views

    engine = xl.open(sys.argv[1])
    shared = xl.SharedMap(engine.topic("orders"), snapshot_every=None)
    write_items = views._write_items

    def hold_up(*args):
        if sys.argv[2] == "before":
            print("there", flush=True)
            sys.stdin.readline()
        count = write_items(*args)
        print("there", flush=True)
        sys.stdin.readline()
        return count

    views._write_items = hold_up
    shared.snapshot()
"""


@pytest.mark.parametrize("where", ["before", "after"])
def test_i4_death_while_one_is_taken_leaves_the_old_one(
    path: str, engine: xl.Engine, shared: Map, topic: xl.Topic, where: str
) -> None:
    """It has written none of its items yet, or all. Nothing of it stays."""
    fill(shared, 20)
    shared.snapshot()
    fill(shared, 30, keys=40)
    shared.close()
    with child(HELD_UP, path, where) as process:
        assert line(process) == "there"
        assert garbage(engine)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    assert horizon(topic) == 20
    with xl.open(path) as again:
        assert not garbage(again)
        found = opened_afresh(again.topic("orders"))
    assert (len(found), found["k0"], found["k29"]) == (30, 0, 29)


SNAPSHOTS_FOR_EVER = """
    import itertools, os, sys, time
    import exclusivelog as xl

    while pid := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            shared = xl.SharedMap(xl.open(sys.argv[1]).topic("orders"), snapshot_every=None)
            for number in itertools.count():
                shared.put("n", number)
                start = time.monotonic()
                shared.snapshot()
                if not number:  # how long it takes here, at this moment
                    os.write(1, b"%f\\n" % (time.monotonic() - start))
        os.write(1, b"%d\\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"dead\\n")
"""


@pytest.mark.long
def test_i4_death_at_any_moment_leaves_one_that_is_whole(
    path: str, engine: xl.Engine, shared: Map, topic: xl.Topic, sweep: Callable[[int, int], int]
) -> None:
    """A process takes one snapshot after another of a map of 3000 keys, and is killed at random,
    thirty times, or sixty with --every-crash. Each time the map is there, opened by its snapshot;
    in the end, only one is."""
    chance = random.Random(5)
    shared.put_all({f"k{number}": number for number in range(3000)})
    shared.close()
    with child(SNAPSHOTS_FOR_EVER, path) as process:
        for _ in range(sweep(30, 60)):
            tell(process)
            pid, seconds = sorted((line(process), line(process)), key=lambda said: "." in said)
            time.sleep(chance.uniform(0, 3 * float(seconds)))
            os.kill(int(pid), signal.SIGKILL)
            assert line(process) == "dead"
            found = opened_afresh(topic)
            assert found.pop("n", 0) >= 0
            assert found == {f"k{number}": number for number in range(3000)}
    assert (horizon(topic) or 0) > 3000
    with xl.open(path) as again:
        assert not garbage(again)
        assert again.verify().ok


def take_snapshots(state: State, count: int) -> int:
    """Take one after another; the last one's offset."""
    return max(state.kept["map"].snapshot() for _ in range(count))


@pytest.mark.long
def test_i4_two_processes_take_them_at_once(
    engine: xl.Engine, shared: Map, topic: xl.Topic, worker: Callable[..., Worker]
) -> None:
    shared.put_all({f"k{number}": number for number in range(2000)})
    processes = [worker(name=f"w{number}") for number in range(2)]
    for process in processes:
        process.call(open_map, snapshot_every=None)
        process.start(take_snapshots, 30)
    while not all(process.answered() for process in processes):
        shared.update("n", one_more)
        assert len(opened_afresh(topic)) == 2001
    last = max(process.answer() for process in processes)
    assert (horizon(topic) or 0) >= last > 2000
    assert opened_afresh(topic) == everything(shared)
    shared.snapshot()
    assert not garbage(engine)


def test_i4_a_slow_one_does_not_replace_a_later_one(
    engine: xl.Engine, shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    """One begins; while it writes its items, another one of a later state is finished."""
    fill(shared, 10)

    def slowly() -> Iterator[tuple[bytes, bytes]]:
        yield b"old", b"\x01"
        shared.put("new", 1)
        assert shared.snapshot() == 11

    other.engine.backend.snapshot(topic.id, 10, slowly())
    assert horizon(topic) == 11
    assert opened_afresh(topic) == everything(shared)
    assert not garbage(engine)


def test_i4_writes_go_on_while_one_is_taken(
    engine: xl.Engine, shared: Map, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    write_items = views._write_items

    def slowly(*args: Any) -> int:
        began.set()
        assert go_on.wait(PATIENCE)
        return write_items(*args)

    monkeypatch.setattr(views, "_write_items", slowly)
    fill(shared, 10)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(shared.snapshot)
        assert began.wait(PATIENCE)
        fill(shared, 50)
        assert shared.get("k0", latest=True) == 49
        go_on.set()
        assert taking.result(PATIENCE) == 10
    assert opened_afresh(topic) == everything(shared)


def test_i4_closing_waits_for_the_one_in_the_background(
    topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_items, began = views._write_items, threading.Event()

    def slowly(*args: Any) -> int:
        began.set()
        time.sleep(0.3)
        return write_items(*args)

    monkeypatch.setattr(views, "_write_items", slowly)
    threads = set(threading.enumerate())
    with xl.SharedMap(topic, snapshot_every=5) as shared:
        fill(shared, 5)
        assert began.wait(PATIENCE)
    assert horizon(topic) == 5
    assert threads_since(threads) == []


def test_i4_one_that_fails_is_told_and_costs_no_write(
    engine: xl.Engine,
    topic: xl.Topic,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No room for it, say. By hand it raises; in the background it is a warning, and the next
    one may do."""

    def no_room(*args: Any) -> None:
        raise xl.LedgerFullError("no room")

    with xl.SharedMap(topic, snapshot_every=5) as shared, monkeypatch.context() as patch:
        patch.setattr(views, "_write_items", no_room)
        with caplog.at_level(logging.WARNING, "exclusivelog"):
            fill(shared, 7)
            until(lambda: "'orders': no snapshot: no room" in caplog.text)
        with pytest.raises(xl.LedgerFullError):
            shared.snapshot()
        until(lambda: not garbage(engine))  # another one may fail in the background just now
        patch.undo()
        fill(shared, 10)
        until(lambda: horizon(topic))
        assert opened_afresh(topic) == everything(shared)


def strike_behind_the_last_commit(snapshot: Callable[[], object]) -> None:
    """Ctrl-C during the flush of the transaction that makes the snapshot the topic's: Python
    sees to it at the first thing that it does afterwards, which is to wake others."""
    commits: list[str] = []

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code is Transaction.waken.__code__ and frame.f_back is not None:
            commits.append(frame.f_back.f_code.co_name)
            if commits.count("write_snapshot") == 2:  # behind the one that begins it
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            snapshot()
    finally:
        sys.settrace(None)


def test_i4_ctrl_c_behind_the_commit_does_not_take_the_state_away(
    shared: Map, topic: xl.Topic
) -> None:
    fill(shared, 10)
    strike_behind_the_last_commit(shared.snapshot)
    assert opened_afresh(topic) == everything(shared)


@pytest.mark.long
def test_i4_nor_does_it_at_any_other_moment(shared: Map, topic: xl.Topic) -> None:
    chance = random.Random(3)
    fill(shared, 10)
    for _ in range(100):
        struck_after(chance.uniform(1e-5, 3e-3), shared.snapshot)
        assert opened_afresh(topic) == everything(shared)


def test_i4_one_whose_engine_is_closed_meanwhile_is_given_up_or_whole(
    path: str, topic: xl.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines in one process: one is closed while it takes a snapshot, and the other one
    looks for what the dead have left."""
    written, go_on = threading.Event(), threading.Event()
    write_items = views._write_items

    def hold_up(*args: Any) -> int:
        count = write_items(*args)
        written.set()
        go_on.wait(PATIENCE)
        return count

    monkeypatch.setattr(views, "_write_items", hold_up)
    mortal = xl.open(path)
    shared: Map = xl.SharedMap(mortal.topic("orders"))
    fill(shared, 10)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(shared.snapshot)
        assert written.wait(PATIENCE)
        mortal.close()
        delete_pending(topic.engine.ledger)  # as every open, trim and snapshot does it
        go_on.set()
        assert isinstance(taking.exception(PATIENCE), (xl.EngineClosedError, type(None)))
    assert len(opened_afresh(topic)) == 7


# ---- damage, deletion, copies ------------------------------------------------------------


def damage(engine: xl.Engine, topic: xl.Topic) -> None:
    """Flip a bit in the topic's snapshot."""
    with engine.ledger.write_exclusive() as tables:
        snapshot = tables.views.snapshot(topic.id)
        assert snapshot is not None
        for key, value in list(tables.rows.cursor("entries")):
            if U64.unpack(key[:8])[0] == snapshot.id:
                tables.rows.put("entries", key, value[:-1] + bytes([value[-1] ^ 1]))


def test_g9_a_damaged_one_is_named_and_can_be_replaced(
    engine: xl.Engine, shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    fill(shared, 10)
    topic.trim(before=shared.snapshot())
    damage(engine, topic)
    for _ in range(2):
        with pytest.raises(xl.LedgerCorruptedError, match=r"snapshot as of offset 10") as error:
            xl.SharedMap(other)
        assert error.value.topic == "orders"
    shared.snapshot()  # who has the state open has it still
    assert opened_afresh(other) == everything(shared)


def test_g9_a_damaged_one_is_passed_over_where_all_messages_are_there(
    engine: xl.Engine, shared: Map, topic: xl.Topic
) -> None:
    """Its error says that another one can be made from them. By whom, if none can open?"""
    fill(shared, 10)
    shared.snapshot()
    damage(engine, topic)
    assert opened_afresh(topic) == everything(shared)


def test_g9_verify_finds_a_damaged_one(engine: xl.Engine, shared: Map, topic: xl.Topic) -> None:
    fill(shared, 10)
    shared.snapshot()
    assert engine.verify().ok
    damage(engine, topic)
    assert not engine.verify().ok


@pytest.mark.parametrize("gone", [slice(None), slice(-1, None)], ids=["all", "the last"])
def test_g9_one_that_lacks_entries_is_no_smaller_state(
    engine: xl.Engine, shared: Map, topic: xl.Topic, other: xl.Topic, monkeypatch, gone: slice
) -> None:
    """A page of the tables that was lost: nothing that is left of the snapshot is wrong."""
    monkeypatch.setattr(views, "ITEMS_AT_ONCE", 4)
    fill(shared, 10)
    topic.trim(before=shared.snapshot())
    with engine.ledger.write_exclusive() as tables:
        snapshot = tables.views.snapshot(topic.id)
        keys = [key for key, _ in tables.rows.cursor("entries")]
        of_snapshot = [key for key in keys if U64.unpack(key[:8])[0] == snapshot.id]
        for key in of_snapshot[gone]:
            tables.rows.delete("entries", key)
    with pytest.raises(xl.LedgerCorruptedError, match=r"snapshot as of offset 10 .* items of 7"):
        xl.SharedMap(other)
    assert not engine.verify().ok
    shared.snapshot()
    assert opened_afresh(other) == everything(shared)
    assert engine.verify().ok


def test_g8_it_goes_with_its_topic(engine: xl.Engine, shared: Map, topic: xl.Topic) -> None:
    fill(shared, 10)
    shared.snapshot()
    shared.close()
    engine.delete_topic("orders")
    assert opened_afresh(engine.topic("orders")) == {}
    assert not rows(engine)["snapshots"]
    assert not garbage(engine)


def test_g8_one_that_is_being_taken_goes_with_it_as_well(
    engine: xl.Engine, shared: Map, topic: xl.Topic
) -> None:
    fill(shared, 10)
    shared.close()

    def items() -> Iterator[tuple[bytes, bytes]]:
        yield b"a", b"\x01"
        engine.delete_topic("orders")

    engine.backend.snapshot(topic.id, 10, items())
    assert not rows(engine)["snapshots"]
    assert not garbage(engine)


def test_h1_a_backup_has_it(
    engine: xl.Engine, shared: Map, topic: xl.Topic, tmp_path: Path
) -> None:
    fill(shared, 10)
    topic.trim(before=shared.snapshot())
    shared.put("a", 1)
    engine.backup(tmp_path / "copy")
    with xl.open(tmp_path / "copy") as copy:
        assert opened_afresh(copy.topic("orders")) == everything(shared)


# ---- what they hold ----------------------------------------------------------------------


def test_i4_an_empty_state_s(shared: Map, topic: xl.Topic, applied: list[int]) -> None:
    assert shared.snapshot() == 0
    fill(shared, 10)
    shared.clear()
    topic.trim(before=shared.snapshot())
    applied.clear()
    assert opened_afresh(topic) == {}
    assert applied == []


def test_i4_a_large_state_s(topic: xl.Topic, other: xl.Topic) -> None:
    """Many items, and items of several MB."""
    sizes = [0, 1, 1 << 16, 3 << 20]
    values = {f"large{size}": bytes(size) for size in sizes}
    values |= {f"k{number}": b"%d" % number for number in range(25_000)}
    with xl.SharedMap(topic, value="bytes") as shared:
        shared.put_all(values)
        topic.trim(before=shared.snapshot())
        assert opened_afresh(other, value="bytes") == values
        shared.clear()
        shared.snapshot()
        assert not garbage(topic.engine)


def test_i4_keys_keep_their_order(shared: Map, other: xl.Topic) -> None:
    for key in ("b", "a", "c", "b", "d"):
        shared.put(key, 1)
    shared.delete("a")
    shared.put("a", 2)
    shared.snapshot()
    assert list(opened_afresh(other)) == shared.list_keys() == ["b", "c", "d", "a"]


def test_i4_what_was_taken_can_be_restored(topic: xl.Topic) -> None:
    """A state with numbers as keys. Its snapshot is taken, or refused; but not taken and then
    found to be of no use, when the messages may be trimmed already."""
    with open_counts(topic) as counts:
        counts.write(lambda state: [[1, 5]])
        counts.snapshot()
        assert counts.read(dict) == {1: 5}
    with open_counts(topic) as again:
        assert again.read(dict) == {1: 5}


def test_i4_compaction_and_snapshots_do_not_disturb_each_other(
    shared: Map, topic: xl.Topic, other: xl.Topic
) -> None:
    for _ in range(3):
        fill(shared, 30)
        topic.compact()
        topic.trim(before=shared.snapshot())
        shared.put("tail", 1)
        assert opened_afresh(other) == everything(shared)
    reader = topic.reader(read_compacted=True, deserializer="msgpack")
    compacted = {m.key.decode(): m.value for m in reader}
    assert compacted == everything(shared)


def test_g7_the_compacted_view_is_the_map_also_after_a_clear(shared: Map, topic: xl.Topic) -> None:
    """As the docstring of SharedMap says."""
    shared.put_all({"a": 1, "b": 2})
    shared.clear()
    shared.put("b", 3)
    topic.compact()
    reader = topic.reader(read_compacted=True)
    assert [m.key for m in reader if m.key is not None] == [b"b"]


def test_i4_a_snapshot_that_cannot_be_decoded_costs_nothing_but_time(topic: xl.Topic) -> None:
    """Its codec has lost the way back since it was taken. What is in the log is whole, and the
    state is read from there; if that was trimmed, the error says so."""

    def apply(state: dict[Any, int], op: list[Any]) -> None:
        state[tuple(op)] = 1

    codec: dict[str, Any] = {
        "encode_state": xl.serde.exact.dumps,
        "decode_state": xl.serde.exact.loads,
    }
    with xl.SharedState(topic, dict, apply, **codec) as shared:
        shared.write(lambda _: [["k", 1]])
        shared.snapshot()
    codec["decode_state"] = json.loads
    with xl.SharedState(topic, dict, apply, **codec) as shared:
        assert shared.read(lambda state: state) == {("k", 1): 1}
    topic.trim(before=1)
    with pytest.raises(xl.StateError, match="cannot be decoded"):
        xl.SharedState(topic, dict, apply, **codec)
